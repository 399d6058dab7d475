//! Parts of the configuration with a change at run time.
//!
//! Owns: for each part, the comparison of old and new, and the replacement. Must not know: the triggers of a
//! reload. Invariant: the log names session keys by id, certificates by fingerprint.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::SystemTime;

use data_encoding::HEXLOWER;
use futures_util::FutureExt as _;
use sha2::{Digest as _, Sha256};

use super::key_table::{self, TakesEffect};
use super::{PreparedPart, ReloadCheck, ReloadPart, ReloadPartName};
use keyward_access::policy::rules_in_force::RulesInForce;
use keyward_base::published::Published;
use keyward_cluster::discovery::{ProbeLogin, SeedList};
use keyward_config::trust::Strictness;
use keyward_config::{
    ClientAuth, ClientCa, ClientTls, Cluster, Config, EtcdLogin, KeySource, Listener, MemberTrust, ServerTls,
};
use keyward_dial::connect::Connector;
use keyward_dial::member_tls::client_config;
use keyward_downstream::listener_tls::CurrentListenerTls;
use keyward_downstream::session::{NoSessionKey, Sealer, SessionKeys};
use keyward_gateway::caller::Identities;
use keyward_gateway::login::service::LoginService;
use keyward_operations::policy_store::PolicyRegister;
use keyward_operations::revocation::RevocationRegister;
use keyward_records::otlp::collector_access::CurrentCollectorAccess;
use keyward_telemetry::log_filter::{LogFilter, log_filter, set_log_filter};
use keyward_upstream::credentials::{Credentials, MetricsPages};
use keyward_upstream::peer_urls::{PeerTrustCheck, roots_of};

impl ReloadCheck {
    /// Checks that no member trusts the minting authority for peer connections: a holder of its key could
    /// join the cluster. See `docs/decisions.md#d19`.
    #[must_use]
    pub fn mint(trust: Arc<PeerTrustCheck>) -> Self {
        Self::new(move |now| {
            let (trust, mint) = (Arc::clone(&trust), now.users.mint.clone());
            let roots = roots_of(&now.cluster);
            let held = async move {
                let Some(mint) = mint else { return Ok(()) };
                trust
                    .check_before_minting(mint.authority.chain(), &roots)
                    .await
                    .map_err(|trusted| format!("mint.ca: {trusted}"))
            };
            held.boxed_local()
        })
    }
}

impl ReloadPart {
    /// The level of the log. A filter set by `keyward log-level` ends here.
    #[must_use]
    pub fn log_level() -> Self {
        Self::new(|_, now| {
            let filter = LogFilter::from(now.log.level);
            let former = log_filter().filter(|former| *former != filter);
            let told = |former| vec![format!("log.level: {former} -> {filter}")];
            Ok(former.map(told).map(|told| PreparedPart::new(told, move || set_log_filter(filter))))
        })
    }

    /// The session keys: the sealing key and the opening keys.
    #[must_use]
    pub fn session_keys(sealer: Arc<Sealer>) -> Self {
        Self::new(move |_, now| {
            // A random key is drawn at every reading: taking the new key would log out every client.
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
            Ok((was != is).then(|| PreparedPart::new(changes, move || sealer.replace_keys(&keys))))
        })
    }

    /// The time before which issued sessions are refused.
    #[must_use]
    pub fn break_glass(sealer: Arc<Sealer>) -> Self {
        Self::new(move |before, now| {
            let (was, is) = (before.session.not_before, now.session.not_before);
            let sealer = Arc::clone(&sealer);
            let change = "session.not_before: what was issued earlier is refused".to_owned();
            Ok((was != is).then(|| PreparedPart::new(vec![change], move || sealer.refuse_before(is))))
        })
    }

    /// Server certificates of listeners, and trusted client authorities, for new handshakes and for client
    /// certificates of open connections. Each listener keeps the TLS mode and the authority name of its
    /// opening: the authority name is part of the peer name on open connections, so no other authority may
    /// vouch for these peers.
    #[must_use]
    pub fn tls(running: Rc<RefCell<Vec<RunningListenerTls>>>) -> Self {
        Self::new(move |_, now| {
            let mut changes = Vec::new();
            let mut swaps = Vec::new();
            for RunningListenerTls { name, ca, current, published } in running.borrow().iter() {
                let listener = now.listeners.iter().find(|listener| listener.name == *name);
                // A listener whose TLS is removed, or whose authority name changes, waits for a restart.
                let Some(is) = listener.and_then(|listener| listener.tls.as_ref()) else { continue };
                if ca_name(is) != ca.as_deref() {
                    continue;
                }
                // Compared with the published TLS, not with the last read configuration: the latter may be
                // waiting for a restart.
                let seen = fingerprint(is);
                if *published.borrow() == seen {
                    continue;
                }
                let made = current.load().renewed(is).map_err(|error| format!("listener {name}: {error}"))?;
                changes.push(format!("listener {name}: {seen}"));
                swaps.push((Arc::clone(current), made, Rc::clone(published), seen));
            }
            let publish = move || {
                for (current, made, published, seen) in swaps {
                    current.publish(made);
                    published.replace(seen);
                }
            };
            Ok((!changes.is_empty()).then(|| PreparedPart::new(changes, publish)))
        })
    }

    /// The password sources together with the users file: replacing one without the other could lock out
    /// every user.
    #[must_use]
    pub fn passwords(logins: Arc<LoginService>) -> Self {
        Self::new(move |before, now| {
            let (was, is) = (&before.passwords, Arc::clone(&now.passwords));
            let mut changes = Vec::new();
            if was.sources != is.sources {
                changes.push(format!("login.sources: {}", is.sources));
            }
            if was.users != is.users {
                changes.push(format!("users file: {} users", is.users.len()));
            }
            let logins = Arc::clone(&logins);
            Ok((!changes.is_empty()).then(|| PreparedPart::new(changes, move || logins.replace(is))))
        })
    }

    /// The etcd users of Keyward itself: for probes of members, for revocations, and for the stored policy.
    #[must_use]
    pub fn own_logins(
        probe: ProbeLogin,
        register: RevocationRegister,
        policy: Option<PolicyRegister>,
        credentials: Arc<Credentials>,
    ) -> Self {
        Self::new(move |_, now| {
            let print = |login: &EtcdLogin| credentials.fingerprint(&login.user, &login.password);
            let prober = now.cluster.probe.clone().map(Arc::new);
            let probes_so = probe.load().as_deref().map(print) == prober.as_deref().map(print);
            let mut changes = Vec::new();
            if !probes_so {
                changes.push("cluster.probe: another user or password".to_owned());
            }
            if !register.has_login(&now.revocation) {
                changes.push("revocation.user: another user or password".to_owned());
            }
            let stored = now.policy.stored.clone();
            if policy.as_ref().is_some_and(|policy| !policy.has_login(stored.as_ref())) {
                changes.push("policy.user: another user or password".to_owned());
            }
            let (probe, register, revocation) =
                (Arc::clone(&probe), register.clone(), Arc::clone(&now.revocation));
            let policy = policy.clone();
            let publish = move || {
                // An unchanged login keeps its tokens.
                if !probes_so {
                    probe.store(prober);
                }
                register.set_login(&revocation);
                policy.inspect(|policy| policy.set_login(stored.as_ref()));
            };
            Ok((!changes.is_empty()).then(|| PreparedPart::new(changes, publish)))
        })
    }

    /// TLS towards members: the trusted authorities and Keyward's certificate. Used by new connections.
    #[must_use]
    pub fn cluster_tls(connector: Connector) -> Self {
        Self::new(move |before, now| {
            let (Some(was), Some(is)) = (&before.cluster.tls, &now.cluster.tls) else { return Ok(None) };
            let (was, seen) = (cluster_tls_fingerprint(was), cluster_tls_fingerprint(is));
            if was == seen {
                return Ok(None);
            }
            let made = client_config(is).map_err(|error| format!("cluster.tls: {error}"))?;
            let connector = connector.clone();
            Ok(Some(PreparedPart::new(vec![format!("cluster.tls: {seen}")], move || {
                connector.replace_tls(made)
            })))
        })
    }

    /// The authorities, certificates and headers for the collectors of audit records and of traces, for the
    /// next request to each.
    #[must_use]
    pub fn collectors(audit: Option<CurrentCollectorAccess>, trace: Option<CurrentCollectorAccess>) -> Self {
        Self::new(move |before, now| {
            let (mut changes, mut swaps) = (Vec::new(), Vec::new());
            let audits = |config: &Config| Some(config.audit.as_ref()?.otlp.as_ref()?.collector.clone());
            let traces = |config: &Config| Some(config.trace.as_ref()?.collector.clone());
            for (name, current, was, is) in [
                ("audit.otlp", &audit, audits(before), audits(now)),
                ("trace", &trace, traces(before), traces(now)),
            ] {
                let (Some(current), Some(was), Some(is)) = (current, was, is) else { continue };
                if was == is {
                    continue;
                }
                let made = current.load().by(&is).map_err(|error| format!("{name}: {error}"))?;
                let change = is.tls.as_ref().filter(|_| was.tls != is.tls).map(collector_fingerprint);
                let headers = (was.headers != is.headers).then(|| "other headers".to_owned());
                changes.extend(change.into_iter().chain(headers).map(|change| format!("{name}: {change}")));
                swaps.push((Arc::clone(current), made));
            }
            let publish = move || swaps.into_iter().for_each(|(current, made)| current.publish(made));
            Ok((!changes.is_empty()).then(|| PreparedPart::new(changes, publish)))
        })
    }

    /// The endpoints or SRV name for finding members, as long as scheme and DNS servers stay the same.
    #[must_use]
    pub fn seeds(seeds: SeedList) -> Self {
        Self::new(move |before, now| {
            let same = |was: &Cluster, is: &Cluster| {
                (&was.endpoints, &was.discovery) == (&is.endpoints, &is.discovery)
            };
            if same(&before.cluster, &now.cluster) || !seeds.takes(&now.cluster) {
                return Ok(None);
            }
            let (seeds, cluster) = (seeds.clone(), Arc::clone(&now.cluster));
            let change = "cluster.endpoints, cluster.srv: members are looked up there from now on".to_owned();
            Ok(Some(PreparedPart::new(vec![change], move || _ = seeds.replace(&cluster))))
        })
    }

    /// The configuration in force: for lookups of limits and settings at every connection or call, and for
    /// display of the whole configuration.
    #[must_use]
    pub fn in_force(current: Arc<Published<Config>>) -> Self {
        Self::new(move |before, now| {
            let changed = key_table::changed(TakesEffect::Reload(ReloadPartName::InForce), before, now);
            let changes = changed
                .iter()
                .map(|name| format!("{name}: changed, in force for new connections and calls"))
                .collect();
            let (current, now) = (Arc::clone(&current), now.clone());
            Ok(Some(PreparedPart::new(changes, move || current.publish(now))))
        })
    }

    /// The mapping of peers to etcd users: rules, issuers and their keys, and the credentials of users proved
    /// without a client's password. If no credential changed, the existing credentials stay in use,
    /// certificate connections included.
    #[must_use]
    pub fn identities(
        current: Arc<Published<Identities>>,
        rules: Arc<Published<RulesInForce>>,
        credentials: Arc<Credentials>,
        pages: MetricsPages,
    ) -> Self {
        Self::new(move |before, now| {
            let changed = key_table::changed(TakesEffect::Reload(ReloadPartName::Identities), before, now);
            let mut changes: Vec<_> = changed.iter().map(|name| format!("{name} changed")).collect();
            let users = now.users.changes_since(&before.users);
            let trusts_others = before.cluster.tls.as_ref().map(|tls| &tls.trust)
                != now.cluster.tls.as_ref().map(|tls| &tls.trust);
            let acting = (!users.is_empty() || trusts_others)
                .then(|| credentials.build_acting(&now.users, &now.cluster, pages.clone()));
            let acting = acting.transpose().map_err(|error| format!("user: {error}"))?;
            changes.extend(users);
            let (current, credentials) = (Arc::clone(&current), Arc::clone(&credentials));
            let (now, rules) = (now.clone(), Arc::clone(&rules));
            // The rules are published last, and decisions by the old rules are discarded then.
            let publish = move || {
                if let Some(acting) = acting {
                    credentials.publish_acting(acting);
                }
                // Another generation of the stored policy may be in force since the preparation.
                current.publish(Identities::of(&now, &rules.load(), &credentials, SystemTime::now()));
            };
            Ok(Some(PreparedPart::new(changes, publish)))
        })
    }
}

/// The TLS state of a running listener. Clones share the state.
#[derive(Clone)]
pub struct RunningListenerTls {
    name: Arc<str>,
    /// Label of the client CA in the peer names of the listener's connections.
    ca: Option<Arc<str>>,
    current: CurrentListenerTls,
    /// Fingerprint of the TLS configuration published in `current`.
    published: Rc<RefCell<String>>,
}

impl RunningListenerTls {
    /// Returns the TLS state of a listener, `None` for a listener without TLS; `current` was built from the
    /// listener's configuration.
    #[must_use]
    pub fn new(listener: &Listener, current: CurrentListenerTls) -> Option<Self> {
        let tls = listener.tls.as_ref()?;
        let published = Rc::new(RefCell::new(fingerprint(tls)));
        Some(Self { ca: ca_name(tls).map(Arc::from), name: listener.name.clone(), current, published })
    }

    /// True if `current` belongs to the listener.
    #[must_use]
    pub fn is_of(&self, current: &CurrentListenerTls) -> bool {
        Arc::ptr_eq(&self.current, current)
    }
}

/// The session keys of the configuration, sealing key first.
///
/// # Errors
/// The configuration has no key.
pub fn session_keys(config: &Config) -> Result<SessionKeys, NoSessionKey> {
    SessionKeys::new(config.session.keys.iter().map(|key| &**key))
}

/// The part of a listener's TLS visible to clients.
fn fingerprint(tls: &ServerTls) -> String {
    let shown = digest(tls.identity.chain());
    let of = |ca: &ClientCa| {
        let crls = ca.crls.as_ref().map(|crls| format!(", revoked by {}", digest(crls.lists())));
        let strict = if ca.strictness == Strictness::Strict { ", strictly" } else { "" };
        format!("{}{}{strict}", digest(ca.roots.certificates()), crls.unwrap_or_default())
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
    HEXLOWER.encode(&hash.finalize()[..8])
}

/// The trust in members' certificates, as text.
fn member_trust(tls: &ClientTls) -> String {
    match &tls.trust {
        MemberTrust::Authorities(roots, strictness) => {
            let strict = if *strictness == Strictness::Strict { ", strictly" } else { "" };
            format!("members under {}{strict}", digest(roots.certificates()))
        }
        MemberTrust::Pinned(pins) => {
            let pins: Vec<String> = pins.iter().map(ToString::to_string).collect();
            format!("members pinned by {}", pins.join(", "))
        }
        MemberTrust::Unverified => "members NOT verified".to_owned(),
    }
}

/// The part of Keyward's TLS visible to members, and the trust in members' certificates.
fn cluster_tls_fingerprint(tls: &ClientTls) -> String {
    let believed = member_trust(tls);
    match &tls.identity {
        None => format!("{believed}, no certificate"),
        Some(identity) => format!("{believed}, certificate {}", digest(identity.chain())),
    }
}

/// The part of Keyward's TLS visible to a collector, and the authorities of the collector's certificate.
fn collector_fingerprint(tls: &ClientTls) -> String {
    let believed = digest(tls.authorities());
    match &tls.identity {
        None => format!("the collector under {believed}, no certificate"),
        Some(identity) => format!("the collector under {believed}, certificate {}", digest(identity.chain())),
    }
}

/// Label of the client CA in peer names.
fn ca_name(tls: &ServerTls) -> Option<&str> {
    tls.clients.ca().map(|ca| &*ca.name)
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader, Write as _};
    use std::net::{Ipv4Addr, TcpListener, TcpStream};
    use std::path::Path;
    use std::sync::mpsc::{Receiver, Sender, channel};

    use bytes::Bytes;
    use http::uri::PathAndQuery;
    use rcgen::{BasicConstraints, CertificateParams, IsCa, KeyPair};
    use rustls::pki_types::PrivatePkcs8KeyDer;
    use rustls::{ServerConfig, ServerConnection, StreamOwned};

    use super::*;
    use crate::reload::Reload;
    use keyward_config::reload_request::{ReloadOutcome, ReloadTrigger};
    use keyward_dial::names::NameResolver;
    use keyward_downstream::listener_tls::ListenerTls;
    use keyward_records::otlp::collector::CollectorClient;
    use keyward_records::otlp::collector_access::CollectorAccess;
    use keyward_telemetry::metrics::Metrics;

    /// Writes a new certificate and key.
    fn write(folder: &Path, name: &str) {
        write_until(folder, name, 2100);
    }

    /// Writes a new certificate, valid until the year begins, and its key.
    fn write_until(folder: &Path, name: &str, year: i32) {
        let mut params = CertificateParams::new([name.to_owned()]).unwrap();
        params.not_after = rcgen::date_time_ymd(year, 1, 1);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let write =
            |kind: &str, pem: String| std::fs::write(folder.join(name).with_extension(kind), pem).unwrap();
        write("crt", params.self_signed(&key).unwrap().pem());
        write("key", key.serialize_pem());
    }

    /// A listener under reload, and its published TLS.
    struct House {
        folder: tempfile::TempDir,
        reload: Reload,
        current: CurrentListenerTls,
    }

    impl House {
        /// `clients` is the client part of the listener's TLS table.
        fn new(clients: &str) -> Self {
            let folder = tempfile::tempdir().unwrap();
            for name in ["server", "staff", "partners"] {
                write(folder.path(), name);
            }
            let path = folder.path().join("keyward.toml");
            configure(&path, clients);
            let config = Arc::new(keyward_config::load(&path).unwrap().0);
            let listener = Arc::clone(&config.listeners[0]);
            let made = ListenerTls::new(listener.tls.as_ref().unwrap()).unwrap();
            let current: CurrentListenerTls = Arc::new(Published::new(made));
            let running = RunningListenerTls::new(&listener, Arc::clone(&current)).into_iter().collect();
            let parts = vec![ReloadPart::tls(Rc::new(RefCell::new(running)))];
            let (state, metrics) = (Arc::default(), Arc::new(Metrics::new(Vec::new())));
            let reload = Reload::new(
                keyward_config::ConfigSources::of_file(Some(path)),
                &config,
                Vec::new(),
                parts,
                state,
                metrics,
            );
            Self { folder, reload, current }
        }

        /// Reloads; returns true if new handshakes use a different TLS configuration.
        async fn changes(&mut self, clients: &str) -> bool {
            configure(&self.folder.path().join("keyward.toml"), clients);
            let before = self.current.load_full();
            assert!(self.reload.read_again(ReloadTrigger::Signal).await.is_applied());
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

    /// The peer names of connections contain the authority name from the start: no other authority may ever
    /// vouch for these peers, however often the files are read.
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

    /// A new certificate of the server, and a reading of the same authorities, verify no open connection.
    #[tokio::test]
    async fn the_trust_in_clients_is_another_one_only_for_other_authorities_or_a_stricter_setting() {
        let mut house = House::new(STAFF);
        let optional = format!("{STAFF}, client_auth = 'optional'");
        let changes: [(&str, &str, bool); 3] =
            [("server", STAFF, false), ("staff", STAFF, true), ("server", &optional, true)];
        for (renewed, clients, is_other) in changes {
            let before = Arc::clone(house.current.load().trust());
            house.renew(renewed);
            assert!(house.changes(clients).await);
            assert_eq!(!Arc::ptr_eq(&before, house.current.load().trust()), is_other, "{renewed}");
        }
    }

    /// The lines of the admin page about certificates, without their common name.
    fn certificates(reload: &Reload) -> Vec<String> {
        let text = reload.metrics.admin_text(Vec::new()).unwrap();
        let lines = text.lines().filter_map(|line| line.strip_prefix("keyward_certificate_not_after_"));
        let mut lines: Vec<_> = lines.map(str::to_owned).collect();
        lines.sort();
        lines
    }

    #[tokio::test]
    async fn the_metrics_follow_the_certificates_of_the_files() {
        let mut house = House::new(STAFF);
        assert!(!house.changes(STAFF).await);
        let shown = |usage, seconds| format!("timestamp_seconds{{use=\"{usage}\",name=\"a\"}} {seconds}");
        let staff = shown("listener_client_ca", 4_102_444_800_u64);
        assert_eq!(certificates(&house.reload), [shown("listener", 4_102_444_800), staff.clone()]);
        write_until(house.folder.path(), "server", 2101);
        assert!(house.changes(STAFF).await);
        let renewed = [shown("listener", 4_133_980_800), staff];
        assert_eq!(certificates(&house.reload), renewed);
        // A refused configuration leaves the certificates in force.
        std::fs::write(house.folder.path().join("server.crt"), "nonsense").unwrap();
        assert!(!house.reload.read_again(ReloadTrigger::Signal).await.is_applied());
        assert_eq!(certificates(&house.reload), renewed);
    }

    /// Answers each request with the pair of the moment, for each connection a handshake of its own. Returns
    /// the port, and the `authorization` of each request.
    fn collector(pair: Arc<Published<ServerConfig>>) -> (u16, Receiver<String>) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let (seen, requests) = channel();
        let serve = move |stream: TcpStream, tls: ServerConnection, seen: Sender<String>| {
            let (mut stream, mut line) = (BufReader::new(StreamOwned::new(tls, stream)), String::new());
            while stream.read_line(&mut line).is_ok_and(|length| length > 0) {
                if let Some(value) = line.strip_prefix("authorization: ") {
                    seen.send(value.trim().to_owned()).unwrap();
                }
                if line == "\r\n" {
                    stream.get_mut().write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").unwrap();
                }
                line.clear();
            }
        };
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (tls, seen) = (ServerConnection::new(pair.load_full()).unwrap(), seen.clone());
                std::thread::spawn(move || serve(stream.unwrap(), tls, seen));
            }
        });
        (port, requests)
    }

    /// Writes a new certificate of this machine, and returns the settings of a server with it.
    fn own_pair(path: &Path) -> ServerConfig {
        let key = KeyPair::generate().unwrap();
        let made = CertificateParams::new(["127.0.0.1".to_owned()]).unwrap().self_signed(&key).unwrap();
        std::fs::write(path, made.pem()).unwrap();
        let key = PrivatePkcs8KeyDer::from(key.serialize_der()).into();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let server = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        server.unwrap().with_no_client_auth().with_single_cert(vec![made.der().clone()], key).unwrap()
    }

    /// The collectors of audit records and of traces, each with a client of its own.
    #[tokio::test]
    async fn a_collectors_token_and_authorities_are_in_force_at_the_next_request_or_stay_if_faulty() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let server = Arc::new(Published::new(own_pair(&at("ca.crt"))));
        let (port, requests) = collector(Arc::clone(&server));
        let configure = |port: u16| {
            let text = format!(
                "listener = [{{ name = 'a', address = '127.0.0.1:1' }}]\n\
                 cluster.endpoints = ['http://127.0.0.1:2']\n\
                 [audit.otlp]\nurl = 'https://127.0.0.1:{port}'\nca = 'ca.crt'\n\
                 authorization_file = 'token'\n\
                 [trace]\nurl = 'https://127.0.0.1:{port}'\nca = 'ca.crt'\nheaders_file = 'headers'\n"
            );
            std::fs::write(at("keyward.toml"), text).unwrap();
        };
        let token = |token: &str| {
            std::fs::write(at("token"), token).unwrap();
            std::fs::write(at("headers"), format!("authorization: {token}\n")).unwrap();
        };
        configure(port);
        token("Bearer old");
        let config = keyward_config::load(&at("keyward.toml")).unwrap().0;
        let names = NameResolver::of_machine(None);
        let access = |settings| CollectorAccess::new(settings, &names).unwrap().in_force();
        let audit = access(&config.audit.as_ref().unwrap().otlp.as_ref().unwrap().collector);
        let trace = access(&config.trace.as_ref().unwrap().collector);
        let client =
            |access: &_| CollectorClient::new(Arc::clone(access), PathAndQuery::from_static("/v1/logs"));
        let mut clients = [client(&audit).unwrap(), client(&trace).unwrap()];
        // A client blocks its thread.
        let mut ask = || {
            std::thread::scope(|scope| {
                let asked = scope.spawn(|| clients.each_mut().map(|client| client.exchange(&Bytes::new())));
                asked.join().unwrap().map(|answer| answer.is_ok())
            })
        };
        let shown = || requests.try_iter().collect::<Vec<_>>();
        let mut reload = Reload::new(
            keyward_config::ConfigSources::of_file(Some(at("keyward.toml"))),
            &config,
            Vec::new(),
            vec![ReloadPart::collectors(Some(Arc::clone(&audit)), Some(Arc::clone(&trace)))],
            Arc::default(),
            Arc::new(Metrics::new(Vec::new())),
        );
        assert_eq!((ask(), shown()), ([true; 2], vec!["Bearer old".to_owned(); 2]));
        // The connections of the first requests are still open.
        token("Bearer new");
        assert!(reload.read_again(ReloadTrigger::ChangedFile).await.is_applied());
        assert_eq!((ask(), shown()), ([true; 2], vec!["Bearer new".to_owned(); 2]));
        for (name, faulty) in [("token", ""), ("ca.crt", "nonsense")] {
            let good = std::fs::read(at(name)).unwrap();
            std::fs::write(at(name), faulty).unwrap();
            assert!(!reload.read_again(ReloadTrigger::ChangedFile).await.is_applied(), "{name}");
            assert_eq!((ask(), shown()), ([true; 2], vec!["Bearer new".to_owned(); 2]));
            std::fs::write(at(name), good).unwrap();
        }
        server.publish(own_pair(&at("ca.crt")));
        assert!(reload.read_again(ReloadTrigger::ChangedFile).await.is_applied());
        assert_eq!((ask(), shown()), ([true; 2], vec!["Bearer new".to_owned(); 2]), "by the new authority");
        // With another address everything about the collector waits for the restart.
        configure(port + 1);
        token("Bearer for another");
        let ReloadOutcome::Applied(applied) = reload.read_again(ReloadTrigger::Signal).await else {
            panic!()
        };
        assert_eq!(applied.waiting, ["audit", "the collector of [trace]"]);
        assert_eq!((ask(), shown()), ([true; 2], vec!["Bearer new".to_owned(); 2]));
        std::thread::spawn(move || drop(clients)).join().unwrap();
    }
}
