//! What can change while we run, and the names of what cannot.
//!
//! Owns: for each part, what is new and what it becomes. Must not know: when it is read. Invariant: keys are told by
//! their ids, certificates by their fingerprints.

use std::fmt::{Debug, Write as _};
use std::sync::Arc;

use arc_swap::ArcSwap;
use futures_util::FutureExt as _;
use sha2::{Digest as _, Sha256};

use super::{Part, Ready, Trial};
use crate::config::{ClientAuth, ClientCa, ClientTls, Cluster, Config, KeySource, ServerTls};
use crate::downstream::session::{NoSessionKey, Sealer, SessionKeys};
use crate::downstream::tls::{self, Current};
use crate::gateway::caller::Identities;
use crate::gateway::login::desk::Logins;
use crate::upstream::connect::Connector;
use crate::upstream::credential::{Credentials, Pages};
use crate::upstream::peer_urls::{PeerTrust, roots_of};
use crate::upstream::tls::client_config;

impl Trial {
    /// No member may trust, between members, what certificates are minted from.
    #[must_use]
    pub fn mint(trust: Arc<PeerTrust>) -> Self {
        Self::new(move |now| {
            let (trust, mint) = (Arc::clone(&trust), now.users.mint.clone());
            let roots = roots_of(&now.cluster);
            let held = async move {
                let Some(mint) = mint else { return Ok(()) };
                trust
                    .hold(mint.authority.chain(), &roots)
                    .await
                    .map_err(|trusted| format!("mint.ca: {trusted}"))
            };
            held.boxed_local()
        })
    }
}

impl Part {
    /// The session keys: which seals, which open.
    #[must_use]
    pub fn session_keys(sealer: Arc<Sealer>) -> Self {
        Self::new(move |_, now| {
            // A random key is drawn at every reading: taking it would log everybody out.
            if now.session.key_source == KeySource::Random {
                return Ok(None);
            }
            let keys = session_keys(now).map_err(|error| error.to_string())?;
            let ids =
                |keys: Vec<_>| keys.into_iter().map(|(id, _): (_, u64)| format!("{id}")).collect::<Vec<_>>();
            let (was, is) = (ids(sealer.opened_by_key()), ids(keys.opened()));
            let mut changes = Vec::new();
            changes
                .extend(is.iter().filter(|id| !was.contains(id)).map(|id| format!("session key {id} added")));
            changes.extend(
                was.iter().filter(|id| !is.contains(id)).map(|id| format!("session key {id} taken away")),
            );
            if let Some(seals) = is.first().filter(|seals| was.first() != Some(seals)) {
                changes.push(format!("session key {seals} seals"));
            }
            let sealer = Arc::clone(&sealer);
            Ok((was != is).then(|| Ready::new(changes, move || sealer.replace_keys(&keys))))
        })
    }

    /// The moment before which sessions are refused.
    #[must_use]
    pub fn break_glass(sealer: Arc<Sealer>) -> Self {
        Self::new(move |before, now| {
            let (was, is) = (before.session.not_before, now.session.not_before);
            let sealer = Arc::clone(&sealer);
            let change = "session.not_before: what was issued earlier is refused".to_owned();
            Ok((was != is).then(|| Ready::new(vec![change], move || sealer.refuse_before(is))))
        })
    }

    /// What listeners show, and under what client certificates must verify. New handshakes see it.
    #[must_use]
    pub fn tls(current: Vec<(Arc<str>, Current)>) -> Self {
        Self::new(move |before, now| {
            let mut changes = Vec::new();
            let mut swaps = Vec::new();
            let of = |config: &Config, name: &Arc<str>| {
                let listener = config.listeners.iter().find(|listener| listener.name == *name);
                listener.and_then(|listener| listener.tls.clone())
            };
            for (name, current) in &current {
                // Where TLS comes or goes, a restart is asked for.
                let (Some(was), Some(is)) = (of(before, name), of(now, name)) else { continue };
                // So where what certificates are called by is another.
                if ca_name(&was) != ca_name(&is) {
                    continue;
                }
                let (was, seen) = (fingerprint(&was), fingerprint(&is));
                if was == seen {
                    continue;
                }
                let made = tls::server_config(&is).map_err(|error| format!("listener {name}: {error}"))?;
                changes.push(format!("listener {name}: {seen}"));
                swaps.push((Arc::clone(current), made));
            }
            let publish = move || swaps.into_iter().for_each(|(current, made)| current.store(made));
            Ok((!changes.is_empty()).then(|| Ready::new(changes, publish)))
        })
    }

    /// The users file.
    #[must_use]
    pub fn users(logins: Arc<Logins>) -> Self {
        Self::new(move |before, now| {
            let (was, is) = (&before.passwords.users, Arc::clone(&now.passwords.users));
            let change = format!("users file: {} users", is.len());
            let logins = Arc::clone(&logins);
            Ok((!was.says_the_same(&is)).then(|| Ready::new(vec![change], move || logins.replace_users(is))))
        })
    }

    /// TLS towards members: whom we believe, and what we show them. New connections see it.
    #[must_use]
    pub fn cluster_tls(connector: Connector) -> Self {
        Self::new(move |before, now| {
            let (Some(was), Some(is)) = (&before.cluster.tls, &now.cluster.tls) else { return Ok(None) };
            // A certificate that comes or goes changes how members are asked: that needs a restart.
            let (was, seen) = (towards_members(was), towards_members(is));
            if was == seen || shows(&before.cluster) != shows(&now.cluster) {
                return Ok(None);
            }
            let made = client_config(is).map_err(|error| format!("cluster.tls: {error}"))?;
            let connector = connector.clone();
            Ok(Some(Ready::new(vec![format!("cluster.tls: {seen}")], move || connector.replace_tls(made))))
        })
    }

    /// Who is which etcd user: rules, issuers and their keys, and as whom Keyward can act. Where no credential is another,
    /// those that there are go on: of certificates, their connections too.
    #[must_use]
    pub fn identities(
        current: Arc<ArcSwap<Identities>>,
        credentials: Arc<Credentials>,
        pages: Pages,
    ) -> Self {
        Self::new(move |before, now| {
            let mut changes = Vec::new();
            let mut told = |section: &str, same: bool| {
                if !same {
                    changes.push(format!("{section} changed"));
                }
            };
            told("[[map]], [mapping], default_user", same(&before.mapping, &now.mapping));
            told("[[jwt]]", same(&before.issuers, &now.issuers));
            let users = now.users.changes_since(&before.users);
            let believed =
                |config: &Config| config.cluster.tls.as_ref().map(|tls| digest(tls.roots.certificates()));
            let acting = (!users.is_empty() || believed(before) != believed(now))
                .then(|| credentials.acting_for(&now.users, &now.cluster, pages.clone()));
            let acting = acting.transpose().map_err(|error| format!("user: {error}"))?;
            changes.extend(users);
            let made = Arc::new(Identities::of(now, &credentials));
            let (current, credentials) = (Arc::clone(&current), Arc::clone(&credentials));
            // The rules last: what was decided by others is forgotten then.
            let publish = move || {
                if let Some(acting) = acting {
                    credentials.act(acting);
                }
                current.store(made);
            };
            Ok(Some(Ready::new(changes, publish)))
        })
    }
}

/// The keys of the configuration, sealing key first.
///
/// # Errors
/// There is none.
pub fn session_keys(config: &Config) -> Result<SessionKeys, NoSessionKey> {
    SessionKeys::new(config.session.keys.iter().map(|key| &**key))
}

/// What of a listener's TLS can be seen from outside.
fn fingerprint(tls: &ServerTls) -> String {
    let shown = digest(tls.identity.chain());
    let of = |ca: &ClientCa| {
        let crls = ca.crls.as_ref().map(|crls| format!(", revoked by {}", digest(crls.lists())));
        format!("{}{}", digest(ca.roots.certificates()), crls.unwrap_or_default())
    };
    match &tls.clients {
        ClientAuth::None => format!("certificate {shown}, clients show none"),
        ClientAuth::Optional(ca) => format!("certificate {shown}, clients may show one of {}", of(ca)),
        ClientAuth::Required(ca) => format!("certificate {shown}, clients show one of {}", of(ca)),
    }
}

fn digest<T: AsRef<[u8]>>(parts: impl IntoIterator<Item = T>) -> String {
    let mut hash = Sha256::new();
    parts.into_iter().for_each(|part| hash.update(part));
    hash.finalize().iter().take(8).fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").expect("a String takes all");
        text
    })
}

/// What members can see of our TLS, and whom of them we believe.
fn towards_members(tls: &ClientTls) -> String {
    let believed = digest(tls.roots.certificates());
    match &tls.identity {
        None => format!("members under {believed}, no certificate"),
        Some(identity) => format!("members under {believed}, certificate {}", digest(identity.chain())),
    }
}

/// Whether we show members a certificate; none where there is no TLS.
fn shows(cluster: &Cluster) -> Option<bool> {
    cluster.tls.as_ref().map(|tls| tls.identity.is_some())
}

/// What peers are called by that show a certificate.
fn ca_name(tls: &ServerTls) -> Option<&str> {
    tls.clients.ca().map(|ca| &*ca.name)
}

/// Sections that differ from what the process was started with, and are no part.
pub(super) fn name_what_needs_a_restart(started: &Config, read: &Config) {
    // Debug shows no secret, so a changed password of these is not seen here; it needs a restart as well.
    let listeners = |config: &Config| {
        let of_one = |listener: &Arc<crate::config::Listener>| {
            (
                listener.name.clone(),
                listener.address.clone(),
                listener.tls.as_ref().map(|tls| ca_name(tls).map(str::to_owned)),
                (listener.identify.clone(), listener.lend_login_identity, listener.on_expiry),
            )
        };
        config.listeners.iter().map(of_one).collect::<Vec<_>>()
    };
    differ("listener", &listeners(started), &listeners(read));
    let cluster = |config: &Config| Cluster { tls: None, ..Cluster::clone(&config.cluster) };
    differ("cluster", &cluster(started), &cluster(read));
    differ("cluster.tls", &shows(&started.cluster), &shows(&read.cluster));
    differ("advertise", &started.advertise, &read.advertise);
    differ("session.realm", &started.session.realm, &read.session.realm);
    differ("login.sources", &started.passwords.sources, &read.passwords.sources);
    differ("login", &started.passwords.failed, &read.passwords.failed);
    differ("revocation", &started.revocation, &read.revocation);
    differ("watch", &started.watch, &read.watch);
    differ("limits", &started.limits, &read.limits);
    differ("admin", &started.admin, &read.admin);
    differ("log", &started.log, &read.log);
    differ("drain", &started.drain, &read.drain);
    differ("runtime", &started.runtime, &read.runtime);
}

fn differ<T: Debug>(section: &'static str, started: &T, read: &T) {
    if !same(started, read) {
        tracing::warn!(section, "changed in the file; takes effect at the next start");
    }
}

/// Whether two look the same. No secret is looked at.
fn same<T: Debug>(one: &T, other: &T) -> bool {
    format!("{one:?}") == format!("{other:?}")
}
