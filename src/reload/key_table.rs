//! The configuration keys, each with the way in which a changed value takes effect.
//!
//! Owns: the table, and the comparison of two configurations by it. Must not know: the replacement of a
//! part.
//! Invariants: every key of `config.toml` has a row; a row that waits for a restart is marked "Restart" in
//! `config.toml`, and no other row is.

use ReloadPartName::{Identities, InForce};
use TakesEffect::{Reload, Restart};

use super::restart::kind_of_tls;
use keyward_config::{Cluster, Config, Listener};

/// A part of the configuration with a change at run time, see the constructor of the same name in
/// [`ReloadPart`](super::ReloadPart).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReloadPartName {
    /// The session keys.
    SessionKeys,
    /// The time before which issued sessions are refused.
    BreakGlass,
    /// Certificates and authorities of listeners.
    Tls,
    /// Password sources and the users file.
    Passwords,
    /// TLS towards members.
    ClusterTls,
    /// Mapping of peers to etcd users, and the users' credentials.
    Identities,
    /// The etcd users of Keyward itself.
    OwnLogins,
    /// Certificates, authorities and headers for collectors.
    Collectors,
    /// Addresses for finding members.
    Seeds,
    /// Values looked up at every connection or call.
    InForce,
    /// The open sockets.
    Listeners,
    /// The level of the log.
    LogLevel,
}

/// When a changed key takes effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TakesEffect {
    /// At a reload, by this part.
    Reload(ReloadPartName),
    /// At the next start.
    Restart,
}

/// Keys that take effect together.
struct KeyRow {
    takes_effect: TakesEffect,
    /// Keys of `config.toml`, without indices of tables. A key stands for all keys below it, except for keys
    /// with a row of their own. A key in two rows takes effect at a reload in some cases only.
    keys: &'static [&'static str],
    /// The name of the keys in the log and in doctor's findings; `None` for the first key.
    name: Option<&'static str>,
    /// `None` if the part itself finds and describes its changes.
    same: Option<SameKeysFn>,
}

/// Compares two configurations by some keys.
type SameKeysFn = fn(&Config, &Config) -> bool;

const fn found_by_part(part: ReloadPartName, keys: &'static [&'static str]) -> KeyRow {
    KeyRow { takes_effect: Reload(part), keys, name: None, same: None }
}

const fn compared(takes_effect: TakesEffect, keys: &'static [&'static str], same: SameKeysFn) -> KeyRow {
    KeyRow { takes_effect, keys, name: None, same: Some(same) }
}

impl KeyRow {
    const fn named(self, name: &'static str) -> Self {
        Self { name: Some(name), ..self }
    }
}

impl ReloadPartName {
    /// All parts, in the order of publication. The listeners come last: a bound address is not to be
    /// released because a later part failed.
    pub const ALL: [Self; 12] = [
        Self::SessionKeys,
        Self::BreakGlass,
        Self::Tls,
        Self::Passwords,
        Self::ClusterTls,
        Self::Identities,
        Self::OwnLogins,
        Self::Collectors,
        Self::Seeds,
        Self::InForce,
        Self::Listeners,
        Self::LogLevel,
    ];
}

/// The names of the keys that take effect in this way and differ between the configurations.
pub(super) fn changed(how: TakesEffect, before: &Config, now: &Config) -> Vec<&'static str> {
    let differs = |row: &&KeyRow| row.takes_effect == how && row.same.is_some_and(|same| !same(before, now));
    KEYS.iter().filter(differs).filter_map(|row| row.name.or(row.keys.first().copied())).collect()
}

/// Every key. Compared rows are in the order of the log.
const KEYS: &[KeyRow] = &[
    found_by_part(ReloadPartName::SessionKeys, &["session.key_files"]),
    found_by_part(ReloadPartName::BreakGlass, &["session.not_before"]),
    found_by_part(ReloadPartName::Tls, &["listener.tls"]),
    found_by_part(ReloadPartName::Passwords, &["login.sources", "login.users_file"]),
    found_by_part(
        ReloadPartName::ClusterTls,
        &["cluster.tls", "cluster.tls.insecure_skip_verify", "cluster.tls.cert", "cluster.tls.key"],
    ),
    compared(Reload(Identities), &["map", "mapping", "listener.default_user"], |was, is| {
        was.mapping == is.mapping
    })
    .named("[[map]], [mapping], default_user"),
    compared(
        Reload(Identities),
        &[
            "policy.mode",
            "policy.file",
            "policy.unknown_methods",
            "policy.namespace_leases",
            "listener.namespace",
        ],
        |was, is| {
            let (was, is) = (&was.policy, &is.policy);
            (was.mode, was.unknown_methods, &was.document, &was.listener_namespaces, was.namespace_leases)
                == (is.mode, is.unknown_methods, &is.document, &is.listener_namespaces, is.namespace_leases)
        },
    )
    .named("[policy]"),
    compared(
        Reload(Identities),
        &["policy.peer_limits", "policy.limits_mode", "listener.limits"],
        |was, is| {
            let (was, is) = (&was.policy, &is.policy);
            (&was.peer_limits, was.limits_mode, &was.listener_limits)
                == (&is.peer_limits, is.limits_mode, &is.listener_limits)
        },
    )
    .named("limits of peers and listeners"),
    compared(Reload(Identities), &["jwt", "etcd_jwt"], |was, is| was.issuers == is.issuers).named("[[jwt]]"),
    compared(Reload(Identities), &["listener.identify"], |was, is| identify(was).eq(identify(is)))
        .named("listener.identify"),
    found_by_part(Identities, &["user", "mint", "sign_jwt"]),
    found_by_part(ReloadPartName::OwnLogins, &["cluster.probe", "revocation.user", "policy.user"]),
    found_by_part(
        ReloadPartName::Collectors,
        &[
            "audit.otlp.ca",
            "audit.otlp.cert",
            "audit.otlp.key",
            "audit.otlp.authorization_file",
            "trace.ca",
            "trace.cert",
            "trace.key",
            "trace.headers_file",
        ],
    ),
    found_by_part(ReloadPartName::Seeds, &["cluster.endpoints", "cluster.srv", "cluster.allowed_hosts"]),
    compared(Reload(InForce), &["limits"], |was, is| was.limits == is.limits),
    compared(Reload(InForce), &["advertise", "listener.client_urls"], |was, is| {
        was.advertise == is.advertise
    }),
    compared(Reload(InForce), &["watch.idle_progress", "watch.share_from"], |was, is| {
        (was.watch.idle_progress, was.watch.share_from) == (is.watch.idle_progress, is.watch.share_from)
    }),
    compared(Reload(InForce), &["drain"], |was, is| was.drain == is.drain),
    compared(Reload(InForce), &["log.access", "log.slow", "log.sample", "log.keys"], |was, is| {
        was.access_log == is.access_log
    })
    .named("log.access, log.slow, log.sample, log.keys"),
    compared(
        Reload(InForce),
        &["trace.sample", "trace.follow_parent", "trace.parents_per_second", "trace.identities"],
        |was, is| was.trace_sampling == is.trace_sampling,
    )
    .named("trace.sample, trace.follow_parent, trace.parents_per_second, trace.identities"),
    compared(Reload(InForce), &["maintenance"], |was, is| was.maintenance == is.maintenance),
    compared(Reload(InForce), &["protection"], |was, is| was.protection == is.protection),
    compared(Reload(InForce), &["rest"], |was, is| was.rest == is.rest),
    compared(Reload(InForce), &["policy.require_identity"], |was, is| {
        was.policy.require_identity == is.policy.require_identity
    }),
    compared(Reload(InForce), &["cluster.reads", "cluster.writes"], |was, is| {
        (was.cluster.reads, was.cluster.writes) == (is.cluster.reads, is.cluster.writes)
    })
    .named("cluster.reads, cluster.writes"),
    compared(Reload(InForce), &["cluster.election_timeout", "cluster.unreachable_timeout"], |was, is| {
        was.cluster.outage == is.cluster.outage
    })
    .named("cluster.election_timeout, cluster.unreachable_timeout"),
    found_by_part(ReloadPartName::Listeners, &["listener"]),
    found_by_part(ReloadPartName::LogLevel, &["log.level"]),
    compared(Restart, &["cluster.dns"], |was, is| was.cluster.discovery.dns == is.cluster.discovery.dns),
    compared(Restart, &["cluster.endpoints", "cluster.srv"], |was, is| {
        first_addresses(&was.cluster) == first_addresses(&is.cluster)
    }),
    compared(Restart, &["cluster.allowed_hosts"], |was, is| {
        was.cluster.discovery.allowed_hosts == is.cluster.discovery.allowed_hosts
    }),
    compared(
        Restart,
        &["cluster.tls.insecure_skip_verify", "cluster.tls.cert", "cluster.tls.key"],
        |was, is| kind_of_tls(&was.cluster) == kind_of_tls(&is.cluster),
    )
    .named("cluster.tls"),
    compared(Restart, &["cluster.connect_timeout"], |was, is| {
        was.cluster.connect_timeout == is.cluster.connect_timeout
    }),
    compared(Restart, &["cluster.idle_timeout"], |was, is| {
        was.cluster.idle_timeout == is.cluster.idle_timeout
    }),
    compared(Restart, &["cluster.token_ttl"], |was, is| was.cluster.token_ttl == is.cluster.token_ttl),
    compared(Restart, &["cluster.id", "cluster.identity"], |was, is| was.cluster.pin == is.cluster.pin)
        .named("cluster.id, cluster.identity"),
    compared(Restart, &["cluster.near"], |was, is| was.cluster.near == is.cluster.near),
    compared(Restart, &["cluster.hedge_after"], |was, is| was.cluster.hedge_after == is.cluster.hedge_after),
    compared(Restart, &["session.key_files"], |was, is| was.session.key_source == is.session.key_source),
    compared(Restart, &["session.realm"], |was, is| was.session.realm == is.session.realm),
    compared(
        Restart,
        &[
            "login.failures_per_user_and_address",
            "login.failures_per_user",
            "login.failures_per_address",
            "login.longest_wait",
        ],
        |was, is| was.passwords.failed == is.passwords.failed,
    )
    .named("login"),
    compared(
        Restart,
        &["revocation.state_file", "revocation.etcd_prefix", "revocation.max_age"],
        |was, is| was.revocation == is.revocation,
    )
    .named("revocation"),
    compared(Restart, &["policy.etcd_prefix", "policy.state_file"], |was, is| {
        stored_at(was) == stored_at(is)
    })
    .named("policy.etcd_prefix, policy.state_file"),
    compared(Restart, &["watch.buffer"], |was, is| was.watch == is.watch),
    compared(
        Restart,
        &[
            "limits.certificate_connections",
            "limits.member_in_flight",
            "limits.unread_buffer",
            "limits.logins_in_flight_per_member",
        ],
        |was, is| was.limits == is.limits,
    )
    .named("limits"),
    compared(Restart, &["admin"], |was, is| was.admin == is.admin),
    compared(Restart, &["audit"], |was, is| was.audit == is.audit),
    compared(Restart, &["trace"], |was, is| was.trace == is.trace).named("the collector of [trace]"),
    compared(Restart, &["log"], |was, is| was.log == is.log),
    compared(Restart, &["runtime"], |was, is| was.runtime == is.runtime),
];

/// The place of the policy in etcd, and the file of the last good generation.
fn stored_at(config: &Config) -> impl PartialEq {
    config.policy.stored.as_ref().map(|stored| (stored.prefix.clone(), stored.state_file.clone()))
}

fn identify(config: &Config) -> impl Iterator<Item = impl PartialEq> {
    let of_one = |listener: &std::sync::Arc<Listener>| (listener.name.clone(), listener.identify.clone());
    config.listeners.iter().map(of_one)
}

/// The first sources of member addresses.
fn first_addresses(cluster: &Cluster) -> impl PartialEq {
    (cluster.endpoints.clone(), cluster.discovery.srv.clone())
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use keyward_config::certificate_expiry::CertificateUse;
    use keyward_config::test_reference::keys_with_comments;

    /// The rows of a key: the rows with the longest key equal to this key, or above it.
    fn rows_of(key: &str) -> Vec<&'static KeyRow> {
        let length = |row: &KeyRow| {
            let above = |above: &&&str| {
                key.strip_prefix(**above).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
            };
            row.keys.iter().filter(above).map(|above| above.len()).max()
        };
        let longest = KEYS.iter().filter_map(length).max();
        KEYS.iter().filter(|row| longest.is_some() && length(row) == longest).collect()
    }

    /// The keys of the reference that a reload changes.
    pub(in crate::reload) fn reloaded_keys() -> Vec<String> {
        let all = keys_with_comments().into_iter().map(|(key, _)| key);
        all.filter(|key| rows_of(key).iter().any(|row| row.takes_effect != Restart)).collect()
    }

    #[test]
    fn every_key_of_the_reference_has_a_row_and_is_marked_restart_if_the_row_is() {
        let keys = keys_with_comments();
        assert!(keys.len() > 90, "{}", keys.len());
        for (key, comment) in &keys {
            let rows = rows_of(key);
            let count =
                |restarts| rows.iter().filter(|row| (row.takes_effect == Restart) == restarts).count();
            assert!(!rows.is_empty() && count(false) <= 1 && count(true) <= 1, "{key}: {}", rows.len());
            assert_eq!(comment.contains("Restart."), count(true) == 1, "{key}: {comment}");
        }
        for listed in KEYS.iter().flat_map(|row| row.keys) {
            let below = |(key, _): &(String, String)| key == listed || key.starts_with(&format!("{listed}."));
            assert!(keys.iter().any(below), "{listed} is no key");
        }
    }

    /// The advice about a certificate that ends is to renew it in place.
    #[test]
    fn the_file_of_every_certificate_and_of_every_collectors_secret_is_followed() {
        let secrets = ["audit.otlp.authorization_file", "trace.headers_file"];
        for key in CertificateUse::ALL.map(CertificateUse::file_key).into_iter().chain(secrets) {
            let rows = rows_of(key);
            assert!(rows.iter().any(|row| row.takes_effect != Restart), "{key}");
            assert!(keys_with_comments().iter().any(|(known, _)| known == key), "{key} is no key");
        }
    }

    #[test]
    fn every_part_applies_some_key() {
        for part in ReloadPartName::ALL {
            assert!(KEYS.iter().any(|row| row.takes_effect == Reload(part)), "{part:?}");
        }
        for row in KEYS {
            let Reload(part) = row.takes_effect else { continue };
            assert!(ReloadPartName::ALL.contains(&part), "{part:?}");
        }
    }
}
