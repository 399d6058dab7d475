//! The changes of a reload that let more callers do more.
//!
//! Owns: which changes weaken. Must not know: who made them. Invariant: each such change is told with the
//! value before and the value now.

use crate::config::policy_document::{PolicyBinding, PolicyDocument, PolicyRole};
use crate::config::usage_limits::UsageLimits;
use crate::config::{
    ClientAuth, Config, Listener, MapRule, MappingOutcome, PolicyMode, PolicySettings, RequireIdentity,
    UnknownMethods,
};

/// The changes from `before` to `now` that weaken, each as a sentence without secrets.
pub(super) fn weaker(before: &Config, now: &Config) -> Vec<String> {
    let mut told = Vec::new();
    of_policy(&before.policy, &now.policy, &mut told);
    for old in &before.listeners {
        let Some(new) = now.listeners.iter().find(|new| new.name == old.name) else { continue };
        of_listener(old, new, &mut told);
    }
    let denies = |rule: &&MapRule| *rule.outcome() == MappingOutcome::Deny;
    let (old, new) = (&before.mapping.rules, &now.mapping.rules);
    let removed = old.iter().filter(denies).filter(|rule| !new.contains(rule)).count();
    if removed > 0 {
        let (before, now) = (old.iter().filter(denies).count(), new.iter().filter(denies).count());
        told.push(format!("[[map]] deny: {before} rules -> {now}, {removed} removed"));
    }
    told
}

fn changed(name: &str, before: &str, now: &str) -> String {
    format!("{name}: {before} -> {now}")
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
        let (Some(mode), Some(new)) = (old.mode, now.bindings.iter().find(of_same)) else { continue };
        if new.mode.is_none_or(|new| new < mode) {
            let now = new.mode.map_or("none", PolicyMode::name);
            told.push(changed(&format!("binding[{at}].mode"), mode.name(), now));
        }
    }
}

/// A limit that was removed. One that is higher is a change like any other.
fn of_limits(table: &str, before: &UsageLimits, now: &UsageLimits, told: &mut Vec<String>) {
    let removed = [
        ("calls", before.calls.map(|rate| rate.per_second.get()), now.calls.is_none()),
        ("calls_in_flight", before.calls_in_flight, now.calls_in_flight.is_none()),
        ("watches", before.watches, now.watches.is_none()),
        ("leases", before.leases, now.leases.is_none()),
        ("request_kib", before.request_kib.map(Into::into), now.request_kib.is_none()),
        ("reply_kib", before.reply_kib.map(Into::into), now.reply_kib.is_none()),
        ("keys_per_range", before.keys_per_range.map(Into::into), now.keys_per_range.is_none()),
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
}
