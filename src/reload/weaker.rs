//! The changes of a reload that let more callers do more: a protection that goes, or that opens for callers
//! whom the change does not name.
//!
//! Owns: which changes weaken. Must not know: who made them. Invariants: each such change is told with the
//! value before and the value now; an absent key that takes the value of another key is compared by that
//! value; each key that a reload changes either has an example in the tests here, or a reason why it weakens
//! nothing.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use keyward_config::policy_document::{PolicyBinding, PolicyDocument, PolicyRole};
use keyward_config::trust::Strictness;
use keyward_config::usage_limits::UsageLimits;
use keyward_config::{
    AllowedOrigins, ClientAuth, Config, Identify, Listener, MapRule, MappingOutcome, MappingRules, OnExpiry,
    OwnHosts, PolicySettings, RequireIdentity, UnknownMethods,
};
use keyward_etcd::identity::UserName;
use keyward_etcd::rpc::namespace::lease_ids::LeaseScope;
use keyward_records::audit::record::Timestamp;

/// The changes from `before` to `now` that weaken, each as a sentence without secrets.
pub(super) fn weaker(before: &Config, now: &Config) -> Vec<String> {
    let mut told = Vec::new();
    of_policy(before, now, &mut told);
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

fn of_policy(old: &Config, new: &Config, told: &mut Vec<String>) {
    let is_served = |name: &str| new.listeners.iter().any(|listener| *listener.name == *name);
    let (before, now) = (&old.policy, &new.policy);
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
        if is_served(name) && !now.listener_namespaces.iter().any(|(new, _)| new == name) {
            told.push(changed(&format!("listener {name}: namespace"), "set", "none"));
        }
    }
    of_limits("[policy.peer_limits]", &before.peer_limits, &now.peer_limits, told);
    for (name, limits) in before.listener_limits.iter().filter(|(name, _)| is_served(name)) {
        let new = now.listener_limits.iter().find(|(new, _)| new == name).map(|(_, limits)| limits);
        of_limits(&format!("listener {name}: limits"), limits, new.unwrap_or(&UsageLimits::default()), told);
    }
    // A policy in etcd has records and a generation of its own.
    if before.stored.is_none() && now.stored.is_none() {
        of_document(before, new, told);
    }
}

fn of_document(settings_before: &PolicySettings, new_config: &Config, told: &mut Vec<String>) {
    let settings_now = &new_config.policy;
    let (before, now) = (&settings_before.document, &settings_now.document);
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
        // A peer has the limits of [policy.peer_limits] where its roles have none.
        let limits_now = new.limits.clone().or(&settings_now.peer_limits);
        of_limits(&format!("role {:?}: limits", old.name), &old.limits, &limits_now, told);
        of_limits(&format!("role {:?}: total_limits", old.name), &old.total_limits, &new.total_limits, told);
    }
    for (at, old) in before.bindings.iter().enumerate() {
        let (alike_before, alike_now) = (bound_alike(before, before, old), bound_alike(before, now, old));
        if alike_now.is_empty() {
            continue;
        }
        let has_namespace = alike_now.iter().any(|new| new.namespace.is_some());
        if old.namespace.is_some() && !has_namespace && !is_confined_by_listener(old, new_config) {
            told.push(changed(&format!("binding[{at}].namespace"), "set", "none"));
        }
        // Of several modes of a caller the strictest holds, and without any that of the policy.
        let own_mode = |alike: &[&PolicyBinding]| alike.iter().filter_map(|one| one.mode).max();
        let (own_before, own_now) = (own_mode(&alike_before), own_mode(&alike_now));
        let in_force = (own_before.unwrap_or(settings_before.mode), own_now.unwrap_or(settings_now.mode));
        // A lower `policy.mode` is told once, and not for each binding that takes it.
        if in_force.1 < in_force.0 && (own_before, own_now) != (None, None) {
            let origin = if own_now.is_none() { " (policy.mode)" } else { "" };
            let now = format!("{}{origin}", in_force.1.name());
            told.push(changed(&format!("binding[{at}].mode"), in_force.0.name(), &now));
        }
    }
}

/// The bindings of `document` for the callers whom `binding`, of the document `origin`, binds.
fn bound_alike<'d>(
    origin: &PolicyDocument,
    document: &'d PolicyDocument,
    binding: &PolicyBinding,
) -> Vec<&'d PolicyBinding> {
    let bound = |document: &PolicyDocument, one: &PolicyBinding| {
        let group = one.group.and_then(|at| document.groups.get(at)).map(|group| Arc::clone(&group.name));
        (one.conditions.clone(), one.etcd_user.clone(), one.listener.clone(), group)
    };
    let wanted = bound(origin, binding);
    document.bindings.iter().filter(|one| bound(document, one) == wanted).collect()
}

/// True if a namespace of its listener confines each caller of the binding.
fn is_confined_by_listener(binding: &PolicyBinding, config: &Config) -> bool {
    let mut listeners = config.listeners.iter().map(|listener| &listener.name);
    listeners.all(|name| {
        binding.listener.as_ref().is_some_and(|only| only != name)
            || config.policy.listener_namespaces.iter().any(|(confined, _)| confined == name)
    })
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
    use crate::reload::key_table::tests::reloaded_keys;
    use keyward_config::test_reference::revoking_authority;

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

    /// A change, the lines before and after it with those of a binding, and all that is told.
    type InheritingExample =
        (&'static str, (&'static str, &'static str), (&'static str, &'static str), &'static [&'static str]);

    /// A key that is absent takes the value of another. `LIMITS` stands for limits of the role.
    const IN_FORCE: &[InheritingExample] = &[
        (
            "a mode moves to the policy",
            ("policy.mode = 'shadow'", "mode = 'enforce'"),
            ("policy.mode = 'enforce'", ""),
            &[],
        ),
        (
            "a binding's own mode goes, and that of the policy is as strict",
            ("policy.mode = 'enforce'", "mode = 'enforce'"),
            ("policy.mode = 'enforce'", ""),
            &[],
        ),
        (
            "a binding's own mode goes, and that of the policy is weaker",
            ("policy.mode = 'shadow'", "mode = 'enforce'"),
            ("policy.mode = 'shadow'", ""),
            &["binding[0].mode: enforce -> shadow (policy.mode)"],
        ),
        (
            "a binding gets a mode that is weaker than the policy's",
            ("policy.mode = 'enforce'", ""),
            ("policy.mode = 'enforce'", "mode = 'shadow'"),
            &["binding[0].mode: enforce -> shadow"],
        ),
        (
            "the mode of the policy, which the binding takes, is told once",
            ("policy.mode = 'enforce'", ""),
            ("policy.mode = 'shadow'", ""),
            &["policy.mode: enforce -> shadow"],
        ),
        (
            "the binding's own mode stays",
            ("policy.mode = 'enforce'", "mode = 'enforce'"),
            ("policy.mode = 'shadow'", "mode = 'enforce'"),
            &["policy.mode: enforce -> shadow"],
        ),
        (
            "both fall",
            ("policy.mode = 'enforce'", "mode = 'enforce'"),
            ("policy.mode = 'shadow'", ""),
            &["policy.mode: enforce -> shadow", "binding[0].mode: enforce -> shadow (policy.mode)"],
        ),
        (
            "a role's limit gives way to that of each peer",
            ("policy.peer_limits.watches = 9", "LIMITS"),
            ("policy.peer_limits.watches = 9", ""),
            &[],
        ),
        ("a role's limit goes", ("", "LIMITS"), ("", ""), &["role \"r\": limits.watches: 7 -> none"]),
        (
            "a binding's namespace gives way to that of all listeners",
            ("LISTENER namespace = '/a/'", "namespace = '/a/'"),
            ("LISTENER namespace = '/a/'", ""),
            &[],
        ),
        (
            "a binding's namespace goes",
            ("", "namespace = '/a/'"),
            ("", ""),
            &["binding[0].namespace: set -> none"],
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

    fn read(lines: &str) -> Result<Config, keyward_config::ConfigFaults> {
        let deny = "deny = [{ actions = ['write'], everything = true }]\n";
        match lines.strip_prefix("POLICY") {
            Some("") => read_with_policy("", READER),
            Some(_) => read_with_policy("", &format!("{READER}{deny}")),
            None => read_with_policy(lines, ""),
        }
    }

    /// Reads lines of the configuration, with the text of `policy.file`, if any.
    fn read_with_policy(lines: &str, policy: &str) -> Result<Config, keyward_config::ConfigFaults> {
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
        let file = if policy.is_empty() { "" } else { "policy.file = 'policy.toml'" };
        write("policy.toml", policy);
        write("password", "secret");
        let path = folder.path().join("keyward.toml");
        let text = format!(
            "{file}\n{lines}\nlistener = [{{ name = 'a', address = '127.0.0.1:1'{of_listener} }}]\n\
             cluster.endpoints = ['http://127.0.0.1:2']\n\
             user = [{{ name = 'app', password_file = 'password' }}]\n"
        );
        std::fs::write(&path, text).unwrap();
        keyward_config::load(&path).map(|(config, _)| config)
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

    /// The other binding has the same conditions, but for the etcd user.
    #[test]
    fn a_key_that_inherits_is_compared_as_it_is_in_force() {
        let load = |(lines, of_binding): (&str, &str)| {
            let (limits, of_binding) = match of_binding {
                "LIMITS" => ("limits = { watches = 7 }\n", ""),
                of_binding => ("", of_binding),
            };
            let policy = format!(
                "[[role]]\nname = 'r'\n{limits}[[binding]]\netcd_user = 'a'\nroles = ['r']\n{of_binding}\n\
                 [[binding]]\netcd_user = 'b'\nroles = ['r']\n"
            );
            read_with_policy(lines, &policy).expect("a configuration")
        };
        for (what, before, now, told) in IN_FORCE {
            assert_eq!(weaker(&load(*before), &load(*now)), *told, "{what}");
        }
        let of_listener = "LISTENER namespace = '/a/', limits = { watches = 7 }";
        let (before, mut now) = (load((of_listener, "")), load(("", "")));
        now.listeners.clear();
        assert_eq!(weaker(&before, &now), [""; 0], "nobody enters by a listener that is gone");
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
