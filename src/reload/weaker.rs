//! The changes of a reload that let more callers do more: a protection that goes, or that opens for callers
//! whom the change does not name.
//!
//! Owns: which changes weaken. Must not know: who made them. Invariants: each such change is told with the
//! value before and the value now; each key that a reload changes either has an example in the tests here, or
//! a reason why it weakens nothing.

use std::num::NonZeroU32;
use std::time::{Duration, SystemTime};

use crate::audit::record::Timestamp;
use crate::config::policy_document::{PolicyBinding, PolicyDocument, PolicyRole};
use crate::config::usage_limits::UsageLimits;
use crate::config::{
    AllowedOrigins, ClientAuth, Config, Identify, Listener, MapRule, MappingOutcome, MappingRules, OnExpiry,
    OwnHosts, PolicyMode, PolicySettings, RequireIdentity, UnknownMethods,
};
use crate::identity::UserName;
use crate::rpc::namespace::lease_ids::LeaseScope;
use crate::trust::Strictness;

/// The changes from `before` to `now` that weaken, each as a sentence without secrets.
pub(super) fn weaker(before: &Config, now: &Config) -> Vec<String> {
    let mut told = Vec::new();
    of_policy(&before.policy, &now.policy, &mut told);
    for old in &before.listeners {
        let Some(new) = now.listeners.iter().find(|new| new.name == old.name) else { continue };
        of_listener(old, new, &mut told);
    }
    of_mapping(&before.mapping, &now.mapping, &mut told);
    if now.session.not_before < before.session.not_before {
        let time = |seconds: u64| match SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(seconds)) {
            Some(time) if seconds > 0 => Timestamp(time).to_string(),
            _ => "none".to_owned(),
        };
        let (before, now) = (time(before.session.not_before), time(now.session.not_before));
        told.push(changed("session.not_before", &before, &now));
    }
    if before.rest.cors != AllowedOrigins::Any && now.rest.cors == AllowedOrigins::Any {
        told.push(changed("rest.cors", "listed", "*"));
    }
    told
}

fn changed(name: &str, before: &str, now: &str) -> String {
    format!("{name}: {before} -> {now}")
}

fn of_mapping(before: &MappingRules, now: &MappingRules, told: &mut Vec<String>) {
    let denies = |rule: &&MapRule| *rule.outcome() == MappingOutcome::Deny;
    let (old, new) = (&before.rules, &now.rules);
    let removed = old.iter().filter(denies).filter(|rule| !new.contains(rule)).count();
    if removed > 0 {
        let (before, now) = (old.iter().filter(denies).count(), new.iter().filter(denies).count());
        told.push(format!("[[map]] deny: {before} rules -> {now}, {removed} removed"));
    }
    let default =
        |rules: &MappingRules| rules.default.as_ref().map_or("none".to_owned(), UserName::to_string);
    if now.default.is_some() && before.default != now.default {
        told.push(changed("mapping.default", &default(before), &default(now)));
    }
    let (of_listeners, known) = (now.rules.get(now.written..), before.rules.get(before.written..));
    for rule in of_listeners.into_iter().flatten() {
        if let MappingOutcome::User(user) = rule.outcome()
            && !known.is_some_and(|known| known.contains(rule))
        {
            told.push(format!("listener.default_user: callers without a credential are {user}"));
        }
    }
}

fn of_policy(before: &PolicySettings, now: &PolicySettings, told: &mut Vec<String>) {
    if now.mode < before.mode {
        told.push(changed("policy.mode", before.mode.name(), now.mode.name()));
    }
    if now.limits_mode < before.limits_mode {
        told.push(changed("policy.limits_mode", before.limits_mode.name(), now.limits_mode.name()));
    }
    if (before.require_identity, now.require_identity) == (RequireIdentity::Strict, RequireIdentity::AsEtcd) {
        told.push(changed("policy.require_identity", "strict", "as-etcd"));
    }
    if (before.unknown_methods, now.unknown_methods) == (UnknownMethods::Refuse, UnknownMethods::Allow) {
        told.push(changed("policy.unknown_methods", "refuse", "allow"));
    }
    if (before.namespace_leases, now.namespace_leases) == (LeaseScope::Own, LeaseScope::Any) {
        told.push(changed("policy.namespace_leases", "own", "any"));
    }
    for (name, _) in &before.listener_namespaces {
        if !now.listener_namespaces.iter().any(|(new, _)| new == name) {
            told.push(changed(&format!("listener {name}: namespace"), "set", "none"));
        }
    }
    of_limits("[policy.peer_limits]", &before.peer_limits, &now.peer_limits, told);
    for (name, limits) in &before.listener_limits {
        let new = now.listener_limits.iter().find(|(new, _)| new == name).map(|(_, limits)| limits);
        of_limits(&format!("listener {name}: limits"), limits, new.unwrap_or(&UsageLimits::default()), told);
    }
    // A policy in etcd has records and a generation of its own.
    if before.stored.is_none() && now.stored.is_none() {
        of_document(&before.document, &now.document, told);
    }
}

fn of_document(before: &PolicyDocument, now: &PolicyDocument, told: &mut Vec<String>) {
    let nothing = PolicyRole {
        name: "".into(),
        allow: Vec::new(),
        deny: Vec::new(),
        limits: UsageLimits::default(),
        total_limits: UsageLimits::default(),
    };
    for old in &before.roles {
        let new = now.roles.iter().find(|new| new.name == old.name).unwrap_or(&nothing);
        let removed = old.deny.iter().filter(|grant| !new.deny.contains(grant)).count();
        if removed > 0 {
            let (before, now) = (old.deny.len(), new.deny.len());
            told.push(format!("role {:?}: deny: {before} grants -> {now}, {removed} removed", old.name));
        }
        of_limits(&format!("role {:?}: limits", old.name), &old.limits, &new.limits, told);
        of_limits(&format!("role {:?}: total_limits", old.name), &old.total_limits, &new.total_limits, told);
    }
    for (at, old) in before.bindings.iter().enumerate() {
        let of_same =
            |new: &&PolicyBinding| (&new.conditions, &new.listener) == (&old.conditions, &old.listener);
        let Some(new) = now.bindings.iter().find(of_same) else { continue };
        if old.namespace.is_some() && new.namespace.is_none() {
            told.push(changed(&format!("binding[{at}].namespace"), "set", "none"));
        }
        let Some(mode) = old.mode else { continue };
        if new.mode.is_none_or(|new| new < mode) {
            let now = new.mode.map_or("none", PolicyMode::name);
            told.push(changed(&format!("binding[{at}].mode"), mode.name(), now));
        }
    }
}

/// A limit that was removed. One that is higher is a change like any other.
fn of_limits(table: &str, before: &UsageLimits, now: &UsageLimits, told: &mut Vec<String>) {
    let bytes = |kib: NonZeroU32| u64::from(kib.get()) * 1024;
    let calls = before.calls.map(|rate| rate.per_second.get().into());
    let keys = before.keys_per_range.map(|keys| keys.get().into());
    let removed = [
        ("calls_per_second", calls, now.calls.is_none()),
        ("calls_in_flight", before.calls_in_flight.map(u64::from), now.calls_in_flight.is_none()),
        ("watches", before.watches.map(u64::from), now.watches.is_none()),
        ("leases", before.leases.map(u64::from), now.leases.is_none()),
        ("request_bytes_per_second", before.request_kib.map(bytes), now.request_kib.is_none()),
        ("reply_bytes_per_second", before.reply_kib.map(bytes), now.reply_kib.is_none()),
        ("keys_per_range", keys, now.keys_per_range.is_none()),
        ("bytes_per_answer", before.answer_kib.map(bytes), now.answer_kib.is_none()),
    ];
    for (key, before, is_none) in removed {
        if let Some(before) = before.filter(|_| is_none) {
            told.push(changed(&format!("{table}.{key}"), &before.to_string(), "none"));
        }
    }
}

fn of_listener(before: &Listener, now: &Listener, told: &mut Vec<String>) {
    let auth = |listener: &Listener| match listener.tls.as_ref().map(|tls| &tls.clients) {
        None | Some(ClientAuth::None) => (0, "none"),
        Some(ClientAuth::Optional(_)) => (1, "optional"),
        Some(ClientAuth::Required(_)) => (2, "required"),
    };
    let ((old, before_name), (new, now_name)) = (auth(before), auth(now));
    if new < old {
        told.push(changed(&format!("listener {}: client certificates", now.name), before_name, now_name));
    }
    let has_lists = |listener: &Listener| listener.client_ca().is_some_and(|ca| ca.crls.is_some());
    if has_lists(before) && !has_lists(now) {
        told.push(changed(&format!("listener {}: tls.client_crl", now.name), "set", "none"));
    }
    let is_strict =
        |listener: &Listener| listener.client_ca().is_some_and(|ca| ca.strictness == Strictness::Strict);
    if is_strict(before) && now.client_ca().is_some() && !is_strict(now) {
        told.push(changed(&format!("listener {}: tls.strict_certificates", now.name), "true", "false"));
    }
    if before.tls.is_some() && now.tls.is_none() {
        told.push(changed(&format!("listener {}: tls", now.name), "set", "none"));
    }
    let opens = |listener: &Listener| listener.identify.contains(&Identify::Default);
    if opens(now) && !opens(before) {
        told.push(format!("listener {}: identify: callers without a credential are taken", now.name));
    }
    if (before.on_expiry, now.on_expiry) == (OnExpiry::Cut, OnExpiry::Keep) {
        told.push(changed(&format!("listener {}: on_expiry", now.name), "cut", "keep"));
    }
    if now.lend_login_identity && !before.lend_login_identity {
        told.push(changed(&format!("listener {}: lend_login_identity", now.name), "false", "true"));
    }
    if before.http.hosts != OwnHosts::Any && now.http.hosts == OwnHosts::Any {
        told.push(changed(&format!("listener {}: hosts", now.name), "listed", "*"));
    }
    let trusts = |listener: &Listener, network| listener.proxy_protocol_from.contains(network);
    for network in now.proxy_protocol_from.iter().filter(|network| !trusts(before, network)) {
        told.push(format!("listener {}: proxy_protocol_from: {network} added", now.name));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config;
    use crate::config::reference::revoking_authority;
    use crate::reload::key_table::tests::reloaded_keys;

    /// A key, the lines before and after a change that weakens, and what is told.
    type WeakeningExample = (&'static str, &'static str, &'static str, &'static str);

    const READER: &str = "[[role]]\nname = 'reader'\nallow = [{ actions = ['read'], everything = true }]\n";

    /// `LISTENER` stands for further keys of the listener, and `POLICY` for lines of the policy's file.
    const WEAKEN: &[WeakeningExample] = &[
        (
            "session.not_before",
            "session.not_before = '2026-01-01T00:00:00Z'",
            "",
            "session.not_before: 2026-01-01T00:00:00.000000Z -> none",
        ),
        (
            "listener.tls.client_ca",
            "LISTENER tls = { cert = 'a.crt', key = 'a.key', client_ca = 'ca.crt' }",
            "LISTENER tls = { cert = 'a.crt', key = 'a.key' }",
            "listener a: client certificates: required -> none",
        ),
        (
            "listener.tls.client_auth",
            "LISTENER tls = { cert = 'a.crt', key = 'a.key', client_ca = 'ca.crt', client_auth = 'required' }",
            "LISTENER tls = { cert = 'a.crt', key = 'a.key', client_ca = 'ca.crt', client_auth = 'optional' }",
            "listener a: client certificates: required -> optional",
        ),
        (
            "listener.tls.client_crl",
            "LISTENER tls = { cert = 'a.crt', key = 'a.key', client_ca = 'ca.crt', client_crl = 'ca.crl' }",
            "LISTENER tls = { cert = 'a.crt', key = 'a.key', client_ca = 'ca.crt' }",
            "listener a: tls.client_crl: set -> none",
        ),
        (
            "listener.tls.strict_certificates",
            "LISTENER tls = { cert = 'a.crt', key = 'a.key', client_ca = 'ca.crt', strict_certificates = true }",
            "LISTENER tls = { cert = 'a.crt', key = 'a.key', client_ca = 'ca.crt' }",
            "listener a: tls.strict_certificates: true -> false",
        ),
        ("map", "map = [{ peer = 'listener:a', deny = true }]", "", "[[map]] deny: 1 rules -> 0, 1 removed"),
        ("mapping.default", "", "mapping.default = 'app'", "mapping.default: none -> app"),
        (
            "listener.default_user",
            "",
            "LISTENER default_user = 'app'",
            "listener.default_user: callers without a credential are app",
        ),
        (
            "policy.mode",
            "policy.mode = 'enforce'",
            "policy.mode = 'shadow'",
            "policy.mode: enforce -> shadow",
        ),
        (
            "policy.unknown_methods",
            "policy.unknown_methods = 'refuse'",
            "policy.unknown_methods = 'allow'",
            "policy.unknown_methods: refuse -> allow",
        ),
        (
            "policy.namespace_leases",
            "policy.namespace_leases = 'own'",
            "policy.namespace_leases = 'any'",
            "policy.namespace_leases: own -> any",
        ),
        ("policy.file", "POLICY deny", "POLICY", "role \"reader\": deny: 1 grants -> 0, 1 removed"),
        ("listener.namespace", "LISTENER namespace = '/a/'", "", "listener a: namespace: set -> none"),
        (
            "policy.peer_limits",
            "policy.peer_limits.watches = 7",
            "",
            "[policy.peer_limits].watches: 7 -> none",
        ),
        (
            "policy.limits_mode",
            "policy.limits_mode = 'enforce'",
            "policy.limits_mode = 'shadow'",
            "policy.limits_mode: enforce -> shadow",
        ),
        (
            "listener.limits",
            "LISTENER limits = { calls_in_flight = 9 }",
            "",
            "listener a: limits.calls_in_flight: 9 -> none",
        ),
        (
            "listener.identify",
            "LISTENER identify = ['token']",
            "LISTENER identify = ['token', 'default']",
            "listener a: identify: callers without a credential are taken",
        ),
        ("rest.cors", "rest.cors = ['https://a.example']", "rest.cors = ['*']", "rest.cors: listed -> *"),
        (
            "policy.require_identity",
            "policy.require_identity = 'strict'",
            "policy.require_identity = 'as-etcd'",
            "policy.require_identity: strict -> as-etcd",
        ),
        (
            "listener.on_expiry",
            "LISTENER on_expiry = 'cut'",
            "LISTENER on_expiry = 'keep'",
            "listener a: on_expiry: cut -> keep",
        ),
        (
            "listener.lend_login_identity",
            "",
            "LISTENER lend_login_identity = true",
            "listener a: lend_login_identity: false -> true",
        ),
        (
            "listener.hosts",
            "LISTENER hosts = ['a.example']",
            "LISTENER hosts = ['*']",
            "listener a: hosts: listed -> *",
        ),
        (
            "listener.proxy_protocol_from",
            "",
            "LISTENER proxy_protocol_from = ['10.0.0.0/8']",
            "listener a: proxy_protocol_from: 10.0.0.0/8 added",
        ),
    ];

    /// Keys whose changes take no protection away, each with the reason; a key stands for all keys below it.
    const WEAKEN_NOTHING: &[(&str, &str)] = &[
        ("session.key_files", "a new key has sealed no session yet"),
        ("listener.tls", "names whom it lets in, and a pair proves Keyward to clients"),
        ("login.sources", "names the source of passwords"),
        ("login.users_file", "names whom it lets in"),
        ("cluster.tls", "is about members; what verifies them waits for a restart"),
        (
            "audit.otlp",
            "is about a collector at the same address, which the new authorities must still vouch for",
        ),
        ("cluster.probe", "is Keyward's own user"),
        ("cluster.endpoints", "are members"),
        ("cluster.srv", "are members"),
        ("cluster.allowed_hosts", "are members"),
        ("cluster.reads", "is the choice of a member"),
        ("cluster.writes", "is the choice of a member"),
        ("cluster.election_timeout", "is a time of waiting"),
        ("cluster.unreachable_timeout", "is a time of waiting"),
        ("jwt", "names whom it lets in"),
        ("etcd_jwt", "names whom it lets in"),
        ("user", "names an etcd user's credential"),
        ("mint", "is Keyward's own authority"),
        ("sign_jwt", "is Keyward's own key"),
        ("revocation.user", "is Keyward's own user"),
        ("policy.user", "is Keyward's own user"),
        ("limits", "has a value always, and bounds memory"),
        ("advertise", "is shown to clients"),
        ("watch", "is a way to serve"),
        ("drain", "is a time of waiting"),
        ("log", "is shown to operators"),
        ("trace", "is shown to operators"),
        ("maintenance", "is a way to serve"),
        ("protection", "sheds load, whoever makes it"),
        ("rest.style", "is a form of answers"),
        ("listener.name", "makes another listener"),
        ("listener.address", "is told as a changed listener"),
        ("listener.accept_odd_authority", "is no protection"),
        ("listener.rest", "answers by the same rules"),
        ("listener.connection_age_spares", "is about clients that cannot take a GOAWAY"),
        ("listener.metrics_page", "has no key and no value of the store"),
        ("listener.member", "is the choice of a member"),
        ("listener.server_names", "is the choice of a member"),
        ("listener.client_urls", "is shown to clients"),
    ];

    fn covers(above: &str, key: &str) -> bool {
        key.strip_prefix(above).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    }

    fn read(lines: &str) -> Result<Config, config::ConfigFaults> {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
        let (authority, list) = revoking_authority();
        let key = rcgen::KeyPair::generate().unwrap();
        let pair = rcgen::CertificateParams::new(["a".to_owned()]).unwrap().self_signed(&key).unwrap();
        for (name, text) in [("ca.crt", authority), ("ca.crl", list), ("a.crt", pair.pem())] {
            write(name, &text);
        }
        write("a.key", &key.serialize_pem());
        let (of_listener, lines) = match lines.strip_prefix("LISTENER ") {
            Some(further) => (format!(", {further}"), ""),
            None => (String::new(), lines),
        };
        let (policy, lines) = match lines.strip_prefix("POLICY") {
            Some("") => (READER.to_owned(), "policy.file = 'policy.toml'"),
            Some(_) => {
                let deny = "deny = [{ actions = ['write'], everything = true }]\n";
                (format!("{READER}{deny}"), "policy.file = 'policy.toml'")
            }
            None => (String::new(), lines),
        };
        write("policy.toml", &policy);
        write("password", "secret");
        let path = folder.path().join("keyward.toml");
        let text = format!(
            "{lines}\nlistener = [{{ name = 'a', address = '127.0.0.1:1'{of_listener} }}]\n\
             cluster.endpoints = ['http://127.0.0.1:2']\n\
             user = [{{ name = 'app', password_file = 'password' }}]\n"
        );
        std::fs::write(&path, text).unwrap();
        config::load(&path).map(|(config, _)| config)
    }

    #[test]
    fn each_key_that_weakens_is_told_with_both_values_and_only_in_that_direction() {
        let (mut seen, mut expected) = (Vec::new(), Vec::new());
        for (key, before, now, told) in WEAKEN {
            expected.push((*key, vec![(*told).to_owned()], Vec::new()));
            match (read(before), read(now)) {
                (Ok(before), Ok(now)) => seen.push((*key, weaker(&before, &now), weaker(&now, &before))),
                (before, now) => {
                    let faults = [before.err(), now.err()].into_iter().flatten();
                    seen.push((*key, Vec::new(), faults.map(|fault| fault.to_string()).collect()));
                }
            }
        }
        assert_eq!(seen, expected);
    }

    #[test]
    fn each_key_of_a_reload_weakens_or_has_a_reason_why_not() {
        let keys = reloaded_keys();
        assert!(keys.len() > 60, "{}", keys.len());
        for key in &keys {
            let is_told = WEAKEN.iter().any(|(told, ..)| covers(told, key));
            let is_excused = WEAKEN_NOTHING.iter().any(|(above, _)| covers(above, key));
            assert!(is_told || is_excused, "{key}");
        }
        let all: Vec<_> =
            WEAKEN.iter().map(|row| row.0).chain(WEAKEN_NOTHING.iter().map(|row| row.0)).collect();
        for listed in all {
            assert!(keys.iter().any(|key| covers(listed, key)), "{listed} is no key of a reload");
        }
    }
}
