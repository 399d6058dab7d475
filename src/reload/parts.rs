//! What can change while we run.
//!
//! Owns: for each part, what is new and what it becomes. Must not know: when it is read. Invariant: keys are told by
//! their ids, certificates by their fingerprints.

use std::cell::RefCell;
use std::fmt::Write as _;
use std::rc::Rc;
use std::sync::Arc;

use futures_util::FutureExt as _;
use sha2::{Digest as _, Sha256};

use super::restart::same;
use super::{Part, Ready, Trial};
use crate::config::{
    ClientAuth, ClientCa, ClientTls, Cluster, Config, KeySource, Listener, Login, ServerTls,
};
use crate::downstream::session::{NoSessionKey, Sealer, SessionKeys};
use crate::downstream::tls::{Current, ListenerTls};
use crate::gateway::caller::Identities;
use crate::gateway::login::desk::Logins;
use crate::published::Published;
use crate::revocation::Register;
use crate::upstream::connect::Connector;
use crate::upstream::credential::{Credentials, Pages};
use crate::upstream::members::{ProbeLogin, SeedList};
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

    /// What listeners show, and under what client certificates must verify: those of new handshakes, and those that were
    /// shown before. Each listener as it was opened: what its connections call a peer by comes of that, so that no other
    /// authority may vouch for it.
    #[must_use]
    pub fn tls(running: Rc<RefCell<Vec<Running>>>) -> Self {
        Self::new(move |_, now| {
            let mut changes = Vec::new();
            let mut swaps = Vec::new();
            for Running { name, ca, current, published } in running.borrow().iter() {
                let listener = now.listeners.iter().find(|listener| listener.name == *name);
                // Where TLS goes, or what certificates are called by is another, so are its clients.
                let Some(is) = listener.and_then(|listener| listener.tls.as_ref()) else { continue };
                if ca_name(is) != ca.as_deref() {
                    continue;
                }
                // Not with what was read before: that may be waiting for the restart.
                let seen = fingerprint(is);
                if *published.borrow() == seen {
                    continue;
                }
                let made = ListenerTls::new(is).map_err(|error| format!("listener {name}: {error}"))?;
                changes.push(format!("listener {name}: {seen}"));
                swaps.push((Arc::clone(current), made, Rc::clone(published), seen));
            }
            let publish = move || {
                for (current, made, published, seen) in swaps {
                    current.publish(made);
                    published.replace(seen);
                }
            };
            Ok((!changes.is_empty()).then(|| Ready::new(changes, publish)))
        })
    }

    /// The sources of passwords, and the users file: one without the other would leave everybody out.
    #[must_use]
    pub fn passwords(logins: Arc<Logins>) -> Self {
        Self::new(move |before, now| {
            let (was, is) = (&before.passwords, Arc::clone(&now.passwords));
            let mut changes = Vec::new();
            if was.sources != is.sources {
                changes.push(format!("login.sources: {}", is.sources));
            }
            if !was.users.says_the_same(&is.users) {
                changes.push(format!("users file: {} users", is.users.len()));
            }
            let logins = Arc::clone(&logins);
            Ok((!changes.is_empty()).then(|| Ready::new(changes, move || logins.replace(is))))
        })
    }

    /// As whom Keyward itself logs in: to probe members, and to read and write who was revoked.
    #[must_use]
    pub fn own_logins(probe: ProbeLogin, register: Register, credentials: Arc<Credentials>) -> Self {
        Self::new(move |_, now| {
            let print = |login: &Login| credentials.fingerprint(&login.user, &login.password);
            let prober = now.cluster.probe.clone().map(Arc::new);
            let probes_so = probe.load().as_deref().map(print) == prober.as_deref().map(print);
            let mut changes = Vec::new();
            if !probes_so {
                changes.push("cluster.probe: another user or password".to_owned());
            }
            if !register.logs_in_as(&now.revocation) {
                changes.push("revocation.user: another user or password".to_owned());
            }
            let (probe, register, revocation) =
                (Arc::clone(&probe), register.clone(), Arc::clone(&now.revocation));
            let publish = move || {
                // A login that is the same keeps its tokens.
                if !probes_so {
                    probe.store(prober);
                }
                register.log_in_as(&revocation);
            };
            Ok((!changes.is_empty()).then(|| Ready::new(changes, publish)))
        })
    }

    /// TLS towards members: whom we believe, and what we show them. New connections see it.
    #[must_use]
    pub fn cluster_tls(connector: Connector) -> Self {
        Self::new(move |before, now| {
            let (Some(was), Some(is)) = (&before.cluster.tls, &now.cluster.tls) else { return Ok(None) };
            let (was, seen) = (towards_members(was), towards_members(is));
            if was == seen {
                return Ok(None);
            }
            let made = client_config(is).map_err(|error| format!("cluster.tls: {error}"))?;
            let connector = connector.clone();
            Ok(Some(Ready::new(vec![format!("cluster.tls: {seen}")], move || connector.replace_tls(made))))
        })
    }

    /// Where members are found first, where they are spoken to as before.
    #[must_use]
    pub fn seeds(seeds: SeedList) -> Self {
        Self::new(move |before, now| {
            let places = |config: &Config| {
                let Cluster { endpoints, discovery, .. } = &*config.cluster;
                format!("{endpoints:?} {:?} {:?}", discovery.srv, discovery.allowed_hosts)
            };
            if places(before) == places(now) || !seeds.takes(&now.cluster) {
                return Ok(None);
            }
            let (seeds, cluster) = (seeds.clone(), Arc::clone(&now.cluster));
            let change = "cluster: members are found first elsewhere".to_owned();
            Ok(Some(Ready::new(vec![change], move || _ = seeds.replace(&cluster))))
        })
    }

    /// What was read last, as far as it could be taken: for who looks at it at every connection or call, such as for the limits, and for
    /// who wants to know all of it.
    #[must_use]
    pub fn in_force(current: Arc<Published<Config>>) -> Self {
        Self::new(move |before, now| {
            let mut changes = Vec::new();
            let mut told = |section: &str, same: bool| {
                if !same {
                    changes.push(format!("{section}: changed, for what comes"));
                }
            };
            told("limits", before.limits == now.limits);
            told("advertise", same(&before.advertise, &now.advertise));
            told("watch.idle_progress", before.watch.idle_progress == now.watch.idle_progress);
            told("drain", before.drain == now.drain);
            told("maintenance", same(&before.maintenance, &now.maintenance));
            let serves = |config: &Config| (config.cluster.reads, config.cluster.writes);
            told("cluster.reads, cluster.writes", same(&serves(before), &serves(now)));
            let outage = |config: &Config| config.cluster.outage;
            told("cluster.election_timeout, cluster.unreachable_timeout", outage(before) == outage(now));
            let (current, now) = (Arc::clone(&current), now.clone());
            Ok(Some(Ready::new(changes, move || current.publish(now))))
        })
    }

    /// Who is which etcd user: rules, issuers and their keys, and as whom Keyward can act. Where no credential is another,
    /// those that there are go on: of certificates, their connections too.
    #[must_use]
    pub fn identities(
        current: Arc<Published<Identities>>,
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
            let ways = |config: &Config| {
                let of_one = |listener: &Arc<Listener>| (listener.name.clone(), listener.identify.clone());
                config.listeners.iter().map(of_one).collect::<Vec<_>>()
            };
            told("what listeners identify by", ways(before) == ways(now));
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
                current.publish(made);
            };
            Ok(Some(Ready::new(changes, publish)))
        })
    }
}

/// A listener's TLS while it runs. Clones are of the same.
#[derive(Clone)]
pub struct Running {
    name: Arc<str>,
    /// What its connections call those by who show a certificate.
    ca: Option<Arc<str>>,
    current: Current,
    /// What `current` can be seen to be.
    published: Rc<RefCell<String>>,
}

impl Running {
    /// Of a listener with TLS, which is what `current` is made by now.
    #[must_use]
    pub fn new(listener: &Listener, current: Current) -> Option<Self> {
        let tls = listener.tls.as_ref()?;
        let published = Rc::new(RefCell::new(fingerprint(tls)));
        Some(Self { ca: ca_name(tls).map(Arc::from), name: listener.name.clone(), current, published })
    }

    /// Whether it is of this TLS.
    #[must_use]
    pub fn is_of(&self, current: &Current) -> bool {
        Arc::ptr_eq(&self.current, current)
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

/// What peers are called by that show a certificate.
fn ca_name(tls: &ServerTls) -> Option<&str> {
    tls.clients.ca().map(|ca| &*ca.name)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use rcgen::{BasicConstraints, CertificateParams, IsCa, KeyPair};

    use super::*;
    use crate::reload::Reload;
    use crate::telemetry::metrics::Metrics;

    /// A certificate and its key, anew.
    fn write(folder: &Path, name: &str) {
        let mut params = CertificateParams::new([name.to_owned()]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let write =
            |kind: &str, pem: String| std::fs::write(folder.join(name).with_extension(kind), pem).unwrap();
        write("crt", params.self_signed(&key).unwrap().pem());
        write("key", key.serialize_pem());
    }

    /// A listener under reload, and what it shows.
    struct House {
        folder: tempfile::TempDir,
        reload: Reload,
        current: Current,
    }

    impl House {
        /// `clients` is what its TLS says of them.
        fn new(clients: &str) -> Self {
            let folder = tempfile::tempdir().unwrap();
            for name in ["server", "staff", "partners"] {
                write(folder.path(), name);
            }
            let path = folder.path().join("keyward.toml");
            configure(&path, clients);
            let config = Arc::new(crate::config::load(&path).unwrap().0);
            let listener = Arc::clone(&config.listeners[0]);
            let made = ListenerTls::new(listener.tls.as_ref().unwrap()).unwrap();
            let current: Current = Arc::new(Published::new(made));
            let running = Running::new(&listener, Arc::clone(&current)).into_iter().collect();
            let parts = vec![Part::tls(Rc::new(RefCell::new(running)))];
            let (waiting, metrics) =
                (Arc::new(Published::new(Vec::new())), Arc::new(Metrics::new(Vec::new())));
            let reload = Reload::new(path, &config, Vec::new(), parts, waiting, metrics);
            Self { folder, reload, current }
        }

        /// Reads it again; whether new handshakes see something else then.
        async fn changes(&mut self, clients: &str) -> bool {
            configure(&self.folder.path().join("keyward.toml"), clients);
            let before = self.current.load_full();
            assert!(self.reload.read_again().await);
            !Arc::ptr_eq(&before, &self.current.load_full())
        }

        fn renew(&self, name: &str) {
            write(self.folder.path(), name);
        }
    }

    fn configure(path: &Path, clients: &str) {
        let text = format!(
            "[[listener]]\nname = 'a'\naddress = '127.0.0.1:1'\n\
             tls = {{ cert = 'server.crt', key = 'server.key'{clients} }}\n\
             [cluster]\nendpoints = ['http://127.0.0.1:2']\n"
        );
        std::fs::write(path, text).unwrap();
    }

    const NONE: &str = "";
    const STAFF: &str = ", client_ca = 'staff.crt', client_ca_name = 'staff'";
    const PARTNERS: &str = ", client_ca = 'partners.crt', client_ca_name = 'partners'";

    /// Connections call their peers by the authority's name of the start: no other may ever vouch for them, however often
    /// the files are read.
    #[tokio::test]
    async fn another_authority_comes_with_a_restart_however_often_it_is_read() {
        for (start, then) in [(STAFF, PARTNERS), (NONE, STAFF), (STAFF, NONE)] {
            let mut house = House::new(start);
            assert!(!house.changes(then).await, "{start} {then}");
            house.renew("server");
            assert!(!house.changes(then).await, "{start} {then}: not with a later change either");
            assert!(house.changes(start).await, "the server's certificate was not published before");
            assert!(!house.changes(start).await);
        }
    }

    #[tokio::test]
    async fn what_an_authority_of_the_same_name_vouches_with_is_renewed() {
        let mut house = House::new(STAFF);
        assert!(!house.changes(STAFF).await);
        house.renew("staff");
        assert!(house.changes(STAFF).await);
        house.renew("server");
        assert!(house.changes(STAFF).await);
        assert!(house.changes(&format!("{STAFF}, client_auth = 'optional'")).await);
    }
}
