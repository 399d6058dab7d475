//! Resolves the mirror of the TOML into a [`Config`] valid as a whole.
//!
//! Owns: defaults, required keys, bounds, and checks across keys. Must not know: TOML. Invariants: every key
//! is checked, whatever the earlier faults; the fallback for a faulty value is never returned, since any
//! fault rejects the whole configuration.

mod advertise;
mod audit_sinks;
mod cluster;
mod collector_tables;
mod connection_limits;
mod jwt_issuers;
mod limit_tables;
mod listener_tables;
mod login_limits;
mod map_tables;
mod namespace_tables;
mod own_prefixes;
mod policy_coverage;
mod policy_tables;
mod rest_table;
mod sessions;
mod unread_bounds;
mod user_tables;

use std::collections::BTreeSet;
use std::fmt::Display;
use std::num::NonZeroUsize;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use zeroize::Zeroize;

use super::findings::{ConfigFaults, ConfigFindings, ConfigWarning};
use super::memory_budgets::BudgetDefaults;
use super::setting_place::SettingSource;
use super::toml_file::{self, TomlFile};

use super::{Config, Drain, EtcdLogin, Limits, Runtime, WatchSettings, secrets, values};
use crate::jwt::Issuers;
use crate::trust::{ChainVerifier, Strictness};
use keyward_base::pem::{Chain, KeyPair, PrivateKey, Roots};
use keyward_base::secret::Secret;
use keyward_etcd::identity::UserName;
use keyward_telemetry::access_settings::{AccessLogSettings, RecordedCalls};
pub use policy_tables::{peer_pattern, policy, read_policy};

/// Availability of the ways of identification, on every listener.
#[derive(Clone, Copy)]
struct IdentifyAvailability {
    /// A mapping rule may apply to certificates.
    mapped: bool,
    /// At least one JWT issuer is accepted.
    jwts: bool,
}

/// Default key prefix for coordinating maintenance between replicas.
const MAINTENANCE: &str = "/keyward-maintenance/";
const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const MOMENT: Duration = Duration::from_millis(1);
/// The lower bound of etcd's own `--watch-progress-notify-interval`.
const LEAST_IDLE: Duration = Duration::from_millis(100);
const SECOND: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3600);
const DAY: Duration = Duration::from_secs(24 * 3600);

/// Parses a configuration text; relative names are relative to `folder`.
#[cfg(test)]
pub(super) fn parse(text: &str, folder: &Path) -> Result<(Config, Vec<ConfigWarning>), ConfigFaults> {
    let (file, findings) = super::toml_parse::read(text);
    resolve(file, findings, folder, BTreeSet::new(), "", None)
}

/// Parses a configuration text for a process with a limit on its memory.
#[cfg(test)]
pub(super) fn within(
    text: &str,
    memory_limit: Option<u64>,
) -> Result<(Config, Vec<ConfigWarning>), ConfigFaults> {
    let (file, findings) = super::toml_parse::read(text);
    resolve(file, findings, Path::new(""), BTreeSet::new(), "", memory_limit)
}

/// Resolves a mirror. `files` are the files read so far, `digest` identifies the texts; relative names of the
/// configuration file are relative to `folder`. The process has `memory_limit` bytes.
pub(super) fn resolve(
    file: Option<TomlFile>,
    findings: ConfigFindings,
    folder: &Path,
    files: BTreeSet<PathBuf>,
    digest: &str,
    memory_limit: Option<u64>,
) -> Result<(Config, Vec<ConfigWarning>), ConfigFaults> {
    let mut resolver = Resolver { folder, findings, files, memory_limit };
    let config = file.and_then(|file| resolver.config(file, digest.into()));
    resolver.findings.conclude(config)
}

/// The folder of relative names, and the findings so far.
struct Resolver<'a> {
    folder: &'a Path,
    findings: ConfigFindings,
    files: BTreeSet<PathBuf>,
    memory_limit: Option<u64>,
}

impl Resolver<'_> {
    fn config(&mut self, mut file: TomlFile, digest: Arc<str>) -> Option<Config> {
        let cluster = self.cluster(file.cluster);
        let rows = self.users(file.user, file.mint, file.sign_jwt, &cluster);
        let mapped = file.mapping.default.is_some() || file.map.iter().any(may_know_certificates);
        let etcd = self.etcd_tokens(file.etcd_jwt, rows.users.sign_jwt.as_deref());
        let issuers = Issuers { listed: self.issuers(file.jwt), etcd };
        let named: Vec<_> = issuers.listed.iter().map(|issuer| Arc::clone(&issuer.issuer)).collect();
        let (mut defaults, ways) = (Vec::new(), IdentifyAvailability { mapped, jwts: !issuers.is_empty() });
        let reached = self.reached(&mut file.listener);
        let namespaces = self.listener_namespaces(&mut file.listener);
        let listener_limits = self.listener_limits(&mut file.listener);
        let listeners = self.listeners(file.listener, &rows, ways, &mut defaults);
        let mapping = self.mapping(file.map, file.mapping, &rows, named.clone(), &listeners, defaults);
        let revocation = self.revocation(file.revocation, &rows, cluster.probe.as_ref());
        let admin = self.admin(file.admin, &listeners);
        let stored = self.policy_in_etcd(&mut file.policy, &rows, cluster.probe.as_ref(), &revocation);
        let maintenance = self.maintenance(file.maintenance, &revocation, stored.as_ref());
        let mut policy = self.policy_settings(file.policy, stored, &listeners, &named, namespaces);
        policy.listener_limits = listener_limits;
        let replica = self.replica(file.audit.replica.clone());
        let trace = self.trace(&file.trace, replica.clone());
        Some(Config {
            advertise: Arc::new(self.advertise(file.advertise, &reached, &listeners)),
            session: Arc::new(self.session(file.session)),
            passwords: Arc::new(self.passwords(file.login)),
            maintenance,
            policy: Arc::new(policy),
            protection: self.protection(file.protection),
            rest: Arc::new(self.rest(file.rest)),
            revocation: Arc::new(revocation),
            watch: self.watch(file.watch),
            limits: self.limits(file.limits),
            access_log: self.access_log(&file.log),
            log: self.log(file.log, trace.is_some()),
            trace_sampling: self.trace_sampling(&file.trace),
            trace: trace.map(Arc::new),
            drain: self.drain(file.drain),
            runtime: self.runtime(file.runtime),
            memory_limit: self.memory_limit,
            cluster: Arc::new(cluster),
            users: Arc::new(rows.users),
            audit: self.audit(file.audit, replica).map(Arc::new),
            admin: admin?,
            issuers: Arc::new(issuers),
            mapping: Arc::new(mapping),
            listeners,
            // The file list comes last: all steps above may read files.
            files: std::mem::take(&mut self.files).into_iter().collect(),
            digest,
        })
    }

    fn watch(&mut self, watch: toml_file::TomlWatch) -> WatchSettings {
        let path = "watch.idle_progress";
        let idle = self.duration(path, watch.idle_progress, 30 * SECOND, Duration::ZERO..=DAY);
        if !idle.is_zero() && idle < LEAST_IDLE {
            self.findings.fault(path, format!("must be 0s or at least {LEAST_IDLE:?}"));
        }
        let default = BudgetDefaults::within(self.memory_limit).streams;
        let buffer = self.size("watch.buffer", watch.buffer, default, MIB..=1024 * GIB);
        let path = "watch.share_from";
        let share_from = self.count(path, watch.share_from, 4, 0..=1_000_000);
        if share_from == 1 {
            self.findings.fault(path, "must be 0 or at least 2".to_owned());
        }
        let idle_progress = Some(idle).filter(|idle| !idle.is_zero());
        WatchSettings { idle_progress, share_from: NonZeroUsize::new(share_from), buffer }
    }

    fn limits(&mut self, mut limits: toml_file::TomlLimits) -> Limits {
        let toml_file::TomlLimits {
            connections, streams_per_connection, logins_in_flight_per_member, ..
        } = limits;
        let connections = self.count("limits.connections", connections, 10_000, 1..=1 << 24);
        let client_connections = self.client_connections(&mut limits, connections);
        let streams = self.count("limits.streams_per_connection", streams_per_connection, 4096, 1..=1 << 20);
        let header = self.size("limits.header_size", limits.header_size, 64 * KIB, KIB..=16 * MIB);
        Limits {
            unread: self.unread(limits.unread_buffer, limits.unread_timeout),
            connections,
            client_connections,
            streams_per_connection: fits(streams),
            header_size: fits(header),
            request_size: self.size("limits.request_size", limits.request_size, 2 * MIB, KIB..=GIB),
            handshake_timeout: self.duration(
                "limits.handshake_timeout",
                limits.handshake_timeout,
                10 * SECOND,
                MOMENT..=DAY,
            ),
            connection_age: self.optional_duration("limits.connection_age", limits.connection_age, HOUR),
            replay_buffer: self.size(
                "limits.replay_buffer",
                limits.replay_buffer,
                BudgetDefaults::within(self.memory_limit).requests,
                0..=64 * GIB,
            ),
            certificate_connections: self.count(
                "limits.certificate_connections",
                limits.certificate_connections,
                1024,
                1..=1 << 20,
            ),
            member_in_flight: self.count(
                "limits.member_in_flight",
                limits.member_in_flight,
                4096,
                1..=1 << 20,
            ),
            logins_in_flight_per_member: self.count(
                "limits.logins_in_flight_per_member",
                logins_in_flight_per_member,
                2,
                1..=64,
            ),
        }
    }

    fn log(&mut self, log: toml_file::TomlLog, has_collector: bool) -> keyward_telemetry::LogSettings {
        let default = keyward_telemetry::LogSettings::default();
        if log.otlp == Some(true) && !has_collector {
            self.findings.fault("log.otlp", "needs trace.url");
        }
        keyward_telemetry::LogSettings {
            format: match log.format {
                Some(toml_file::TomlLogFormat::Text) => keyward_telemetry::Format::Text,
                Some(toml_file::TomlLogFormat::Json) => keyward_telemetry::Format::Json,
                None => default.format,
            },
            level: log
                .level
                .and_then(|word| self.checked("log.level", word.parse()))
                .unwrap_or(default.level),
            buffer: self.size("log.buffer", log.buffer, 4 * MIB, 16 * KIB..=GIB),
            is_exported: log.otlp.unwrap_or(default.is_exported),
        }
    }

    fn access_log(&mut self, log: &toml_file::TomlLog) -> AccessLogSettings {
        let default = AccessLogSettings::default();
        let calls = log.access.map(|calls| match calls {
            toml_file::TomlRecordedCalls::Off => RecordedCalls::Off,
            toml_file::TomlRecordedCalls::Errors => RecordedCalls::Errors,
            toml_file::TomlRecordedCalls::Slow => RecordedCalls::Slow,
            toml_file::TomlRecordedCalls::All => RecordedCalls::All,
        });
        AccessLogSettings {
            calls: calls.unwrap_or(default.calls),
            slow: self.duration("log.slow", log.slow.clone(), default.slow, Duration::ZERO..=DAY),
            sample: self.count("log.sample", log.sample, 1000, 0..=1 << 20),
            has_keys: log.keys.unwrap_or(default.has_keys),
        }
    }

    fn drain(&mut self, drain: toml_file::TomlDrain) -> Drain {
        Drain {
            wait: self.duration("drain.wait", drain.wait, Duration::ZERO, Duration::ZERO..=DAY),
            timeout: self.duration("drain.timeout", drain.timeout, 30 * SECOND, MOMENT..=DAY),
        }
    }

    /// The default is at most four shards: more pay off on large machines only, where the operator configures
    /// them (docs/decisions.md#d34).
    fn runtime(&mut self, runtime: toml_file::TomlRuntime) -> Runtime {
        let cores = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
        let asked = self.count("runtime.shards", runtime.shards.map(u32::from), 0, 0..=256);
        Runtime {
            shards: NonZeroUsize::new(asked).or(NonZeroUsize::new(cores.min(4))).unwrap_or(NonZeroUsize::MIN),
            state_dir: runtime.state_dir.map(|name| self.written_path("runtime.state_dir", &name)),
        }
    }
}

/// Resolves single values.
impl Resolver<'_> {
    fn required<T>(&mut self, path: &str, value: Option<T>, reason: &str) -> Option<T> {
        if value.is_none() {
            self.findings.missing(path, reason);
        }
        value
    }

    fn checked<T, E: Display>(&mut self, path: &str, value: Result<T, E>) -> Option<T> {
        value.map_err(|error| self.findings.fault(path, error)).ok()
    }

    fn duration(
        &mut self,
        path: &str,
        text: Option<String>,
        default: Duration,
        bounds: RangeInclusive<Duration>,
    ) -> Duration {
        let value = text.and_then(|text| self.checked(path, values::duration(&text))).unwrap_or(default);
        if !bounds.contains(&value) {
            self.findings.fault(path, format!("must be from {:?} to {:?}", bounds.start(), bounds.end()));
        }
        value
    }

    fn size(&mut self, path: &str, text: Option<String>, default: u64, bounds: RangeInclusive<u64>) -> usize {
        let value = text.and_then(|text| self.checked(path, values::size(&text))).unwrap_or(default);
        if !bounds.contains(&value) {
            self.findings.fault(path, format!("must be from {} to {} bytes", bounds.start(), bounds.end()));
        }
        usize::try_from(value).unwrap_or(usize::MAX)
    }

    fn count(&mut self, path: &str, number: Option<u32>, default: u32, bounds: RangeInclusive<u32>) -> usize {
        let value = number.unwrap_or(default);
        if !bounds.contains(&value) {
            self.findings.fault(path, format!("must be from {} to {}", bounds.start(), bounds.end()));
        }
        usize::try_from(value).unwrap_or(usize::MAX)
    }

    /// A file read now, and again after a change; named by the key at `path`.
    fn file(&mut self, path: &str, name: &str) -> PathBuf {
        let file = self.written_path(path, name);
        self.files.insert(file.clone());
        file
    }

    /// The path of a file written by Keyward itself, not read here. A relative name is relative to the folder
    /// of the file with the key at `path`; in a variable or flag, to the working directory.
    fn written_path(&self, path: &str, name: &str) -> PathBuf {
        match self.findings.source(path) {
            None | Some(SettingSource::File) => self.folder.join(name),
            Some(SettingSource::IncludedFile(file)) => file.parent().unwrap_or(Path::new("")).join(name),
            Some(SettingSource::Variable(_) | SettingSource::Flag(_)) => name.into(),
        }
    }

    fn secret<T: Zeroize>(
        &mut self,
        path: &str,
        name: &str,
        read: impl FnOnce(&Path) -> Result<Secret<T>, secrets::UnusableSecret>,
    ) -> Option<Secret<T>> {
        let file = self.file(path, name);
        self.warn_if_open(path, &file);
        self.checked(path, read(&file).map_err(|useless| useless.of(&file)))
    }

    fn warn_if_open(&mut self, path: &str, file: &Path) {
        if secrets::readable_by_all(file) {
            self.findings.warn(path, format!("{0} is readable by every user; chmod o-r {0}", file.display()));
        }
    }

    fn login(
        &mut self,
        user_path: &str,
        user: Option<String>,
        password_path: &str,
        password_file: Option<String>,
    ) -> Option<EtcdLogin> {
        let user = self.required(user_path, user, "the name of an etcd user is needed");
        if user.as_deref() == Some("") {
            self.findings.fault(user_path, "is empty; the name of an etcd user is needed");
        }
        let file = self.required(password_path, password_file, "the file of the user's password is needed");
        let password = file.and_then(|name| self.secret(password_path, &name, secrets::password));
        Some(EtcdLogin { user: UserName::from(user?.as_str()), password: Arc::new(password?) })
    }

    fn roots(&mut self, path: &str, name: &str) -> Option<Roots> {
        let file = self.file(path, name);
        let roots = self.checked(path, Roots::read(&file))?;
        self.checked(path, ChainVerifier::read_trusted(roots.certificates()))?;
        Some(roots)
    }

    /// The rules for the certificates of peers. Without a CA there is nothing to be strict about.
    fn strictness(&mut self, path: &str, strict: Option<bool>, has_ca: bool) -> Strictness {
        if strict.is_some() && !has_ca {
            self.findings.warn(path, "has no effect: no CA vouches for certificates here");
        }
        if strict == Some(true) { Strictness::Strict } else { Strictness::AsEtcd }
    }

    /// The certificate and key of a table, each requiring its counterpart.
    fn key_pair(&mut self, path: &str, cert: Option<String>, key: Option<String>) -> Option<KeyPair> {
        let (cert_path, key_path) = (format!("{path}.cert"), format!("{path}.key"));
        let cert = self.required(&cert_path, cert, "the certificate file that goes with the key is needed");
        let key = self.required(&key_path, key, "the key file that goes with the certificate is needed");
        self.pair((&cert_path, cert), (&key_path, key))
    }

    /// Reads a certificate chain and a key, given as pairs of key path and file name.
    fn pair(
        &mut self,
        (cert_path, cert): (&str, Option<String>),
        (key_path, key): (&str, Option<String>),
    ) -> Option<KeyPair> {
        let chain = cert.and_then(|name| {
            let file = self.file(cert_path, &name);
            self.checked(cert_path, Chain::read(&file))
        });
        let key = key.and_then(|name| {
            let file = self.file(key_path, &name);
            self.warn_if_open(key_path, &file);
            self.checked(key_path, PrivateKey::read(&file))
        });
        self.checked(key_path, KeyPair::new(chain?, key?))
    }
}

/// True if the rule may apply to certificates, judged by its text: its meaning depends on the listeners.
fn may_know_certificates(rule: &toml_file::TomlMap) -> bool {
    rule.issuer.is_none() && rule.peer.as_deref().is_none_or(|peer| peer.starts_with("cert:"))
}

/// The bounds were checked before; a value out of bounds rejects the whole configuration.
fn fits(value: usize) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;
    use crate::RevocationPersistence;
    use crate::jwt::Algorithm;
    use crate::upstream_users::UserCredential;
    use crate::{Address, ClientAuth, ClusterPin, Identify, KeySource, MappingOutcome, OnExpiry};

    const CLUSTER: &str = "[cluster]\nendpoints = ['http://127.0.0.1:1']\n";
    const LISTENER: &str = "[[listener]]\nname = 'a'\naddress = '127.0.0.1:2'\n";

    /// A folder with one valid file of each kind: a.crt with a.key, b.crt with b.key, c.crt with c.crl, pw,
    /// session.key.
    fn folder() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, content: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, content).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        };
        for name in ["a", "b"] {
            let made = rcgen::generate_simple_self_signed(["keyward.test".to_owned()]).unwrap();
            write(&format!("{name}.crt"), &made.cert.pem());
            write(&format!("{name}.key"), &made.signing_key.serialize_pem());
        }
        let (ca, crl) = crate::test_reference::revoking_authority();
        write("c.crt", &ca);
        write("c.crl", &crl);
        write("jwt.pem", &rcgen::KeyPair::generate().unwrap().public_key_pem());
        write("pw", "hunter2\n");
        write("session.key", &"0123456789abcdef".repeat(4));
        folder
    }

    fn fault_paths(text: &str) -> Vec<String> {
        let folder = folder();
        match parse(text, folder.path()) {
            Ok((config, _)) => panic!("{text}\nis valid: {config:?}"),
            Err(faults) => {
                assert!(!faults.to_string().contains("hunter2"), "{faults}");
                faults.iter().map(|fault| fault.path.clone()).collect()
            }
        }
    }

    fn valid(text: &str) -> (Config, Vec<String>) {
        let folder = folder();
        let (config, warnings) =
            parse(text, folder.path()).unwrap_or_else(|faults| panic!("{text}\n{faults}"));
        (config, warnings.into_iter().map(|warning| warning.path).collect())
    }

    #[test]
    fn the_smallest_configuration_is_valid() {
        let (config, warnings) = valid(&format!("{CLUSTER}{LISTENER}"));
        assert_eq!(config.listeners.len(), 1);
        assert_eq!(told(&config, "a").client_urls, ["http://127.0.0.1:2"]);
        assert_eq!(config.cluster.pin, ClusterPin::FirstAnswer);
        assert_eq!(config.session.keys.len(), 1);
        assert_eq!(warnings, ["session.key_files"]);
    }

    #[test]
    fn an_empty_file_lacks_a_listener_and_an_endpoint() {
        assert_eq!(fault_paths(""), ["cluster.endpoints", "listener"]);
    }

    #[test]
    fn what_is_wrong_is_not_called_missing_too() {
        assert_eq!(fault_paths("listener = 1\ncluster = 2\n"), ["listener", "cluster"]);
        assert_eq!(fault_paths(&format!("{LISTENER}[cluster]\nendpoints = [1]\n")), ["cluster.endpoints[0]"]);
        assert_eq!(fault_paths(&format!("{CLUSTER}[[listener]]\nname = 1\naddress = 2\n")).len(), 2);
    }

    #[test]
    fn faults_of_all_floors_are_told_at_once_in_the_order_of_lines() {
        let text = "\
            [[listener]]\n\
            name = 'a'\n\
            address = 'here'\n\
            default_user = 'nobody'\n\
            tls = { cert = 'absent.crt', key = 'pw', client_auth = 'required' }\n\
            [[listener]]\n\
            [cluster]\n\
            endpoints = ['http://a:1', 'https://b:1', 'c']\n\
            token_ttl = '0s'\n\
            unknown = 1\n\
            [cluster.probe]\n\
            user = ''\n\
            [limits]\n\
            request_size = '2MB'\n\
            logins_in_flight_per_member = 0\n";
        let expected = [
            "listener[0].address",
            "listener[0].default_user",
            "listener[0].tls.cert",
            "listener[0].tls.key",
            "listener[0].tls.client_ca",
            "listener[1].name",
            "listener[1].address",
            "cluster.tls.ca",
            "cluster.endpoints",
            "cluster.endpoints[2]",
            "cluster.token_ttl",
            "cluster.unknown",
            "cluster.probe.password_file",
            "cluster.probe.user",
            "limits.request_size",
            "limits.logins_in_flight_per_member",
        ];
        let mut told = fault_paths(text);
        let mut wanted = expected.map(str::to_owned);
        told.sort();
        wanted.sort();
        assert_eq!(told, wanted);
        let lines: Vec<_> = parse(text, folder().path())
            .unwrap_err()
            .iter()
            .map(|fault| fault.place.as_ref()?.line)
            .collect();
        assert!(lines.is_sorted() && lines.iter().all(Option::is_some), "{lines:?}");
    }

    #[test]
    fn listeners_are_told_apart() {
        let two = |name: &str, address: &str| {
            format!("{CLUSTER}{LISTENER}[[listener]]\nname = '{name}'\naddress = '{address}'\n")
        };
        assert_eq!(fault_paths(&two("a", "127.0.0.1:3")), ["listener[1].name"]);
        assert_eq!(fault_paths(&two("b", "127.0.0.1:2")), ["listener[1].address"]);
        assert_eq!(fault_paths(&two("b", "0.0.0.0:2")), ["listener[1].address"]);
        assert_eq!(fault_paths(&two("b c", "127.0.0.1:3")), ["listener[1].name"]);
        assert_eq!(
            fault_paths(&format!("{}[admin]\naddress = '127.0.0.1:3'\n", two("b", "127.0.0.1:3"))),
            ["admin.address"]
        );
        let hosts = "[admin]\nhosts = ['ops.example.com', 'http://ops', 'ops:2389', '']\n";
        let named = fault_paths(&format!("{CLUSTER}{LISTENER}{hosts}"));
        assert_eq!(named, ["admin.hosts[1]", "admin.hosts[2]", "admin.hosts[3]"]);
        let replicas =
            "[admin]\nreplicas = ['10.0.0.8:2389', 'a.svc', 'http://b:1', '[::1]:2389', 'u@c:1']\n";
        let named = fault_paths(&format!("{CLUSTER}{LISTENER}{replicas}"));
        assert_eq!(named, ["admin.replicas[1]", "admin.replicas[2]", "admin.replicas[4]"]);
        for (page, address, warned) in
            [("full", "10.0.0.1:4", true), ("anonymous", "10.0.0.1:4", false), ("full", "[::1]:4", false)]
        {
            let admin = format!("[admin]\npage = '{page}'\naddress = '{address}'\n");
            let (_, warnings) = valid(&format!("{CLUSTER}{LISTENER}{admin}"));
            assert_eq!(warnings.contains(&"admin.page".to_owned()), warned, "{page} at {address}");
        }
        let (config, _) = valid(&two("b", "unix:/run/k.sock"));
        assert_eq!(config.listeners[1].address, Address::Unix("/run/k.sock".into()));
        let any = format!("{CLUSTER}{LISTENER}").replace(":2'", ":0'");
        valid(&format!(
            "{any}[[listener]]\nname = 'b'\naddress = '127.0.0.1:0'\n[admin]\naddress = '127.0.0.1:0'\n"
        ));
    }

    #[test]
    fn default_users_come_with_a_password() {
        let user = "[[user]]\nname = 'app'\npassword_file = 'pw'\n";
        let text = format!("{CLUSTER}{LISTENER}default_user = 'app'\n{user}");
        let (config, warnings) = valid(&text);
        let UserCredential::Password(password) = &config.users.named[&"app".into()] else {
            panic!("{config:?}")
        };
        assert_eq!(config.mapping.rules[0].outcome(), &MappingOutcome::User("app".into()));
        assert_eq!(password.expose().as_str(), "hunter2");
        assert_eq!(warnings, ["session.key_files"]);

        let (_, warnings) = valid(&text.replace("127.0.0.1:2", "10.0.0.1:2"));
        assert!(warnings.contains(&"listener[0].default_user".to_owned()), "{warnings:?}");
        assert_eq!(fault_paths(&text.replace("name = 'app'", "name = 'App'")), ["listener[0].default_user"]);
        assert_eq!(fault_paths(&text.replace("'pw'", "'absent'")), ["user[0].password_file"]);
        assert_eq!(fault_paths(&format!("{text}{user}")), ["user[1].name"]);
        assert_eq!(
            fault_paths(&format!("{CLUSTER}{LISTENER}[[user]]\n")),
            ["user[0].name", "user[0].password_file"]
        );
    }

    #[test]
    fn rules_name_peers_and_users_that_there_are() {
        let users =
            "[[user]]\nname = 'app'\npassword_file = 'pw'\n[[user]]\nname = 'root'\npassword_file = 'pw'\n";
        let tls = "tls = { cert = 'a.crt', key = 'a.key', client_ca = 'b.crt', client_ca_name = 'staff' }\n";
        let text = |rule: &str| format!("{CLUSTER}{LISTENER}{tls}{users}[[map]]\n{rule}\n");
        for good in [
            "peer = 'cert:staff:CN=*'\nas = 'same'",
            "peer = 'cert:staff:URI=spiffe://x'\nas = 'root'",
            "peer = 'password:x'\nnetwork = '10.0.0.0/8'\ndeny = true",
            "san_uri = 'spiffe://x/*'\nas = 'app'\ndeny = false",
            "network = 'fd00::/8'\nas = 'app'",
            "peer = 'listener:a'\nas = 'root'",
        ] {
            let (config, _) = valid(&text(good));
            assert_eq!(config.mapping.rules.len(), 1, "{good}");
            let counts = config.listeners[0].identify.contains(&Identify::Certificate);
            assert_eq!(
                counts,
                !good.starts_with("peer = 'password") && !good.starts_with("peer = 'listener")
            );
        }
        for (bad, path) in [
            ("", "map[0]"),
            ("as = 'app'", "map[0]"),
            ("peer = 'alice'\nas = 'app'", "map[0].peer"),
            ("peer = 'cert:a:CN=x'\nas = 'app'", "map[0].peer"),
            ("peer = 'listener:b'\nas = 'app'", "map[0].peer"),
            ("peer = 'jwt:x:y'\nas = 'app'", "map[0].peer"),
            ("network = '10.0.0.1/8'\nas = 'app'", "map[0].network"),
            ("peer = 'cert:staff:CN=x'\nas = 'nobody'", "map[0].as"),
            ("peer = 'cert:staff:CN=x'", "map[0].as"),
            ("peer = 'cert:staff:CN=x'\nas = 'app'\ndeny = true", "map[0].as"),
            ("peer = 'cert:staff:CN=r*'\nas = 'root'", "map[0].as"),
            ("san_uri = 'spiffe://x'\nas = 'root'", "map[0].as"),
            ("network = '10.0.0.0/8'\nas = 'root'", "map[0].as"),
            ("peer = 'cert:staff:DNS=*'\nas = 'same'", "map[0].as"),
            ("san_dns = '*'\nas = 'same'", "map[0].as"),
            ("peer = 'listener:a'\nas = 'same'", "map[0].as"),
            ("peer = 'password:x'\nsan_dns = 'x'\nas = 'app'", "map[0]"),
        ] {
            let told = fault_paths(&text(bad));
            assert!(told.iter().all(|told| told.starts_with(path)) && !told.is_empty(), "{bad}: {told:?}");
        }
        let two = format!(
            "{}[[listener]]\nname = 'b'\naddress = '127.0.0.1:3'\n\
             tls = {{ cert = 'a.crt', key = 'a.key', client_ca = 'b.crt' }}\n",
            text("san_uri = 'x'\nas = 'app'")
        );
        assert_eq!(fault_paths(&two), ["map[0]"], "of which authority?");
        valid(&two.replace("san_uri = 'x'", "san_uri = 'x'\npeer = 'cert:b:CN=*'"));
    }

    #[test]
    fn one_name_is_one_authority() {
        let listener = |name: &str, port: u16, ca: &str| {
            format!(
                "[[listener]]\nname = '{name}'\naddress = '127.0.0.1:{port}'\n\
                 tls = {{ cert = 'a.crt', key = 'a.key', client_ca = {ca} }}\n"
            )
        };
        let text = |ca: &str| format!("{CLUSTER}{}{}", listener("staff", 2, "'c.crt'"), listener("b", 3, ca));
        valid(&text("'c.crt', client_ca_name = 'staff'"));
        valid(&text("'a.crt', client_ca_name = 'partners'"));
        assert_eq!(
            fault_paths(&text("'a.crt', client_ca_name = 'staff'")),
            ["listener[1].tls.client_ca_name"]
        );
        let one = text("'c.crt', client_ca_name = 'staff', client_crl = 'c.crl'");
        assert_eq!(fault_paths(&one), ["listener[1].tls.client_ca_name"], "revoked at one listener only");
    }

    #[test]
    fn an_issuer_has_an_audience_and_keys() {
        let user = "[[user]]\nname = 'app'\npassword_file = 'pw'\n";
        let jwt = "[[jwt]]\nissuer = 'https://i:1'\naudience = 'etcd'\nkeys = 'jwt.pem'\n";
        let base = format!("{CLUSTER}{LISTENER}{user}{jwt}");
        let (config, _) = valid(&format!("{base}algorithms = ['ES256', 'EdDSA']\nleeway = '5s'\n"));
        assert_eq!(config.issuers.listed[0].subject, "sub");
        assert_eq!(config.issuers.listed[0].algorithms, [Algorithm::Es256, Algorithm::EdDsa]);
        assert_eq!(config.issuers.listed[0].leeway, 5 * SECOND);
        assert_eq!(config.listeners[0].identify, [Identify::Token, Identify::Jwt, Identify::Default]);
        for (bad, path) in [
            ("algorithms = []", "jwt[0].algorithms"),
            ("algorithms = ['ES256', 'none']", "jwt[0].algorithms[1]"),
            ("algorithms = ['HS256']", "jwt[0].algorithms[0]"),
            ("subject = ''", "jwt[0].subject"),
            ("leeway = '1h'", "jwt[0].leeway"),
            (jwt, "jwt[1].issuer"),
            ("[[map]]\nissuer = 'https://j'\nas = 'app'", "map[0].issuer"),
            ("[[map]]\nclaim = { a = 'b' }\nas = 'app'", "map[0]"),
            ("[[map]]\npeer = 'file:x'\nissuer = 'https://i:1'\nas = 'app'", "map[0]"),
            ("[[map]]\npeer = 'jwt:https://i:x'\nas = 'app'", "map[0].peer"),
        ] {
            assert_eq!(fault_paths(&format!("{base}{bad}\n")), [path], "{bad}");
        }
        for (key, path) in
            [("issuer", "jwt[0].issuer"), ("audience", "jwt[0].audience"), ("keys", "jwt[0].keys")]
        {
            let line = jwt.lines().find(|line| line.starts_with(key)).unwrap();
            assert_eq!(fault_paths(&base.replace(line, "")), [path]);
            assert_eq!(fault_paths(&base.replace(line, &format!("{key} = ''"))), [path]);
        }
        assert_eq!(fault_paths(&base.replace("jwt.pem", "a.key")), ["jwt[0].keys"], "a private one");
        for good in [
            "[[map]]\nissuer = 'https://i:1'\nclaim = { a = 'b*' }\nas = 'app'",
            "[[map]]\npeer = 'jwt:https://i:1:*'\nclaim = { a = 'b' }\nas = 'same'",
        ] {
            valid(&format!("{base}{good}\n"));
        }
        let unknown = format!("{CLUSTER}{LISTENER}identify = ['jwt']\n");
        assert_eq!(fault_paths(&unknown), ["listener[0].identify[0]"]);
    }

    #[test]
    fn a_users_file_without_users_is_refused_where_it_is_a_source() {
        let folder = folder();
        let text = format!("{CLUSTER}{LISTENER}[login]\nsources = ['file', 'etcd']\nusers_file = 'users'\n");
        let with_lines = |lines: &str| {
            std::fs::write(folder.path().join("users"), lines).unwrap();
            parse(&text, folder.path()).map(|(config, _)| config.passwords.users.len())
        };
        for emptied in ["", "\n", " \r\n\n", "# nobody yet\n", "# managed by a script\n\n"] {
            let faults = with_lines(emptied).expect_err("it is refused");
            assert_eq!(
                faults.iter().map(|fault| fault.path.as_str()).collect::<Vec<_>>(),
                ["login.users_file"]
            );
        }
        let line = "nobody:$argon2id$v=19$m=8,t=1,p=1$AAAAAAAAAAAAAAAAAAAAAA$\
            AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA\n";
        assert_eq!(with_lines(line).ok(), Some(1));
        std::fs::write(folder.path().join("users"), "").unwrap();
        let unused = text.replace("['file', 'etcd']", "['etcd']");
        assert!(parse(&unused, folder.path()).is_ok(), "nobody looks at it");
    }

    #[test]
    fn whoever_no_rule_knows_is_never_root() {
        let user = "[[user]]\nname = 'root'\npassword_file = 'pw'\n";
        let text = format!("{CLUSTER}{LISTENER}{user}[mapping]\ndefault = 'root'\n");
        assert_eq!(fault_paths(&text), ["mapping.default"]);
        assert_eq!(fault_paths(&text.replace("default = 'root'", "default = 'x'")), ["mapping.default"]);
        let (config, _) = valid(&text.replace("'root'", "'app'"));
        assert_eq!(config.mapping.default, Some("app".into()));
    }

    #[test]
    fn the_ways_to_say_who_one_is_are_in_order() {
        let tls = "tls = { cert = 'a.crt', key = 'a.key', client_ca = 'b.crt' }\n";
        let text = |ways: &str| format!("{CLUSTER}{LISTENER}{tls}identify = {ways}\n");
        let (config, _) = valid(&text("['certificate', 'token']"));
        let listener = &config.listeners[0];
        assert_eq!(listener.identify, [Identify::Certificate, Identify::Token]);
        assert!(!listener.lend_login_identity);
        assert!(listener.accept_odd_authority);
        assert!(listener.spares_age_of(None) && !listener.spares_age_of(Some("grpc-go/1.2")));
        assert_eq!(listener.on_expiry, OnExpiry::Cut);
        for (bad, path) in [
            ("[]", "listener[0].identify"),
            ("['token', 'token']", "listener[0].identify[1]"),
            ("['default', 'token']", "listener[0].identify[1]"),
            ("['password']", "listener[0].identify[0]"),
        ] {
            assert_eq!(fault_paths(&text(bad)), [path], "{bad}");
        }
        let without = text("['certificate']").replace(tls, "");
        assert_eq!(fault_paths(&without), ["listener[0].identify[0]"]);
        let (config, _) = valid(&format!("{CLUSTER}{LISTENER}{tls}"));
        assert_eq!(
            config.listeners[0].identify,
            [Identify::Token, Identify::Default],
            "no rule: a listener only"
        );
        let other = "[[map]]\npeer = 'password:x'\ndeny = true\n[[map]]\npeer = 'listener:a'\ndeny = true\n";
        let (config, _) = valid(&format!("{CLUSTER}{LISTENER}{tls}{other}"));
        assert_eq!(config.listeners[0].identify, [Identify::Token, Identify::Default], "none about any");
        let kept = format!(
            "{CLUSTER}{LISTENER}on_expiry = 'keep'\nlend_login_identity = true\n\
             accept_odd_authority = false\nconnection_age_spares = ['old/1.*']\n"
        );
        let (config, _) = valid(&kept);
        assert_eq!(config.listeners[0].on_expiry, OnExpiry::Keep);
        assert!(config.listeners[0].lend_login_identity);
        assert!(!config.listeners[0].accept_odd_authority);
        assert!(config.listeners[0].spares_age_of(Some("old/1.2 (x)")));
        assert!(
            !config.listeners[0].spares_age_of(Some("old/2")) && !config.listeners[0].spares_age_of(None)
        );
    }

    #[test]
    fn a_balancer_is_trusted_by_its_network_on_tcp_only() {
        let text = |from: &str| format!("{CLUSTER}{LISTENER}proxy_protocol_from = {from}\n");
        let (config, warnings) = valid(&text("['10.0.0.0/8', 'fd00::1/128']"));
        let trusted: Vec<String> =
            config.listeners[0].proxy_protocol_from.iter().map(ToString::to_string).collect();
        assert_eq!(trusted, ["10.0.0.0/8", "fd00::1/128"]);
        let (_, everybody) = valid(&text("['10.0.0.0/8', '0.0.0.0/0']"));
        assert_eq!(everybody.len(), warnings.len() + 1, "{everybody:?}");
        let path = "listener[0].proxy_protocol_from";
        assert_eq!(fault_paths(&text("[]")), [path]);
        assert_eq!(fault_paths(&text("['10.0.0.0/8', '10.0.0.1']")), [format!("{path}[1]")]);
        let unix =
            "[[listener]]\nname = 'b'\naddress = 'unix:/run/b'\nproxy_protocol_from = ['10.0.0.0/8']\n";
        let path = "listener[1].proxy_protocol_from";
        assert_eq!(fault_paths(&format!("{CLUSTER}{LISTENER}{unix}")), [path]);
    }

    #[test]
    fn tls_towards_clients_is_complete() {
        let tls = |inner: &str| format!("{CLUSTER}{LISTENER}tls = {{ {inner} }}\n");
        let pair = "cert = 'a.crt', key = 'a.key'";
        let clients = |inner: &str| {
            let (config, warnings) = valid(&tls(inner));
            (config.listeners[0].tls.clone().unwrap().clients, warnings.len() - 1)
        };
        assert!(matches!(clients(pair), (ClientAuth::None, 0)));
        assert!(matches!(clients(&format!("{pair}, client_ca = 'b.crt'")), (ClientAuth::Required(_), 0)));
        let with = |auth: &str| clients(&format!("{pair}, client_ca = 'b.crt', client_auth = '{auth}'"));
        assert!(matches!(with("optional"), (ClientAuth::Optional(_), 0)));
        assert!(matches!(with("required"), (ClientAuth::Required(_), 0)));
        assert!(matches!(with("none"), (ClientAuth::None, 1)));
        let strictness = |inner: &str| match clients(&format!("{pair}, {inner}")) {
            (ClientAuth::Required(ca), 0) => Some(ca.strictness),
            (ClientAuth::None, 1) => None,
            other => panic!("{other:?}"),
        };
        assert_eq!(strictness("client_ca = 'b.crt'"), Some(Strictness::AsEtcd));
        assert_eq!(strictness("client_ca = 'b.crt', strict_certificates = true"), Some(Strictness::Strict));
        assert_eq!(strictness("strict_certificates = true"), None, "a warning");

        assert_eq!(fault_paths(&tls("cert = 'a.crt'")), ["listener[0].tls.key"]);
        assert_eq!(fault_paths(&tls("key = 'a.key'")), ["listener[0].tls.cert"]);
        assert_eq!(fault_paths(&tls("")), ["listener[0].tls.cert", "listener[0].tls.key"]);
        assert_eq!(fault_paths(&tls("cert = 'a.crt', key = 'b.key'")), ["listener[0].tls.key"]);
        assert_eq!(
            fault_paths(&tls(&format!("{pair}, client_auth = 'optional'"))),
            ["listener[0].tls.client_ca"]
        );
        assert_eq!(fault_paths(&tls(&format!("{pair}, client_ca = 'a.key'"))), ["listener[0].tls.client_ca"]);
        for (bad, path) in [
            ("client_ca = 'b.crt', client_crl = 'absent'", "client_crl"),
            ("client_ca = 'b.crt', client_crl = 'b.crt'", "client_crl"),
            ("client_crl = 'b.crt'", "client_crl"),
            ("client_ca_name = 'x'", "client_ca_name"),
            ("client_ca = 'b.crt', client_ca_name = 'a:b'", "client_ca_name"),
        ] {
            assert_eq!(fault_paths(&tls(&format!("{pair}, {bad}"))), [format!("listener[0].tls.{path}")]);
        }
        let (config, _) = valid(&tls(pair));
        assert_eq!(told(&config, "a").client_urls, ["https://127.0.0.1:2"]);
    }

    #[test]
    fn tls_towards_members_is_there_exactly_where_they_are_https() {
        let cluster = |urls: &str, tls: &str| format!("[cluster]\nendpoints = [{urls}]\n{tls}\n{LISTENER}");
        let (config, _) = valid(&cluster("'https://a:1', 'https://b:1'", "tls = { ca = 'a.crt' }"));
        assert!(config.cluster.tls.as_ref().unwrap().identity.is_none());
        let all = "tls = { ca = 'a.crt', cert = 'b.crt', key = 'b.key' }";
        let (config, _) = valid(&cluster("'https://a:1'", all));
        assert!(config.cluster.tls.as_ref().unwrap().identity.is_some());

        assert_eq!(fault_paths(&cluster("'https://a:1'", "")), ["cluster.tls.ca"]);
        assert_eq!(fault_paths(&cluster("'https://a:1'", "tls = {}")), ["cluster.tls.ca"]);
        assert_eq!(fault_paths(&cluster("'http://a:1'", all)), ["cluster.tls"]);
        assert_eq!(fault_paths(&cluster("'http://a:1', 'https://a:2'", all)), ["cluster.endpoints"]);
        assert_eq!(
            fault_paths(&cluster("'https://a:1'", "tls = { ca = 'a.crt', cert = 'b.crt' }")),
            ["cluster.tls.key"]
        );
        let (config, warnings) = valid(&cluster("'http://a:1', 'http://A:1/'", ""));
        assert_eq!(config.cluster.endpoints.len(), 1);
        assert_eq!(warnings, ["cluster.endpoints[1]", "session.key_files"]);
        let leaky = cluster("'http://root:hunter2@a:1'", "");
        assert_eq!(fault_paths(&leaky), ["cluster.endpoints[0]"]);
    }

    #[test]
    fn session_keys_keep_their_order_and_doubles_are_dropped() {
        let session = |files: &str| format!("{CLUSTER}{LISTENER}[session]\nkey_files = [{files}]\n");
        let (config, warnings) = valid(&session("'session.key', 'session.key'"));
        assert_eq!(config.session.keys.len(), 1);
        assert_eq!(config.session.keys[0].expose()[..2], [0x01, 0x23]);
        assert_eq!(warnings, ["session.key_files[1]"]);
        assert_eq!(fault_paths(&session("'pw', 'absent'")), ["session.key_files[0]", "session.key_files[1]"]);
        let (one, _) = valid(&format!("{CLUSTER}{LISTENER}"));
        let (other, _) = valid(&format!("{CLUSTER}{LISTENER}"));
        assert_ne!(one.session.keys[0].expose(), other.session.keys[0].expose());
        assert_eq!(
            (config.session.key_source, one.session.key_source),
            (KeySource::Files, KeySource::Random)
        );
    }

    #[test]
    fn a_secret_that_others_may_read_is_a_warning() {
        let folder = folder();
        for name in ["session.key", "a.key"] {
            let open = std::fs::Permissions::from_mode(0o644);
            std::fs::set_permissions(folder.path().join(name), open).unwrap();
        }
        let text = format!(
            "{CLUSTER}{LISTENER}tls = {{ cert = 'a.crt', key = 'a.key' }}\n[session]\n\
             key_files = ['session.key']\n"
        );
        let (_, warnings) = parse(&text, folder.path()).unwrap();
        let paths: Vec<_> = warnings.iter().map(|warning| warning.path.as_str()).collect();
        assert_eq!(paths, ["listener[0].tls.key", "session.key_files[0]"]);
    }

    #[test]
    fn advertised_urls_must_lead_somewhere() {
        let advertise = |urls: &str| format!("{CLUSTER}{LISTENER}[advertise]\nclient_urls = [{urls}]\n");
        let (config, _) = valid(&advertise("'http://a:1/', 'https://b:1'"));
        assert_eq!(told(&config, "a").client_urls, ["http://a:1", "https://b:1"]);
        assert_eq!(fault_paths(&advertise("")), ["advertise.client_urls"]);
        assert_eq!(fault_paths(&advertise("'a:1'")), ["advertise.client_urls[0]"]);
        assert_eq!(valid(&advertise("'http://0.0.0.0:1'")).1[0], "advertise.client_urls[0]");
        for address in ["0.0.0.0:2", "[::]:2", "127.0.0.1:0"] {
            let (_, warnings) = valid(&format!("{CLUSTER}{LISTENER}").replace("127.0.0.1:2", address));
            assert!(warnings.contains(&"advertise.client_urls".to_owned()), "{address}");
        }
        let (config, _) = valid(&format!("{CLUSTER}{LISTENER}").replace("127.0.0.1:2", "unix:/run/k.sock"));
        assert_eq!(told(&config, "a").client_urls, ["unix:///run/k.sock"]);
    }

    /// The advertised URLs for clients of this listener.
    fn told<'a>(config: &'a Config, listener: &str) -> &'a crate::ListenerClientUrls {
        config.advertise.to_clients_of(listener).expect("there is a listener")
    }

    #[test]
    fn clients_are_led_back_by_the_way_that_they_came() {
        let one = |name: &str, address: &str, fields: &str| {
            format!("[[listener]]\nname = '{name}'\naddress = '{address}'\n{fields}\n")
        };
        let pair = "tls = { cert = 'a.crt', key = 'a.key' }";
        let listeners = [
            one("plain", "127.0.0.1:3", ""),
            one("tls", "127.0.0.1:4", pair),
            one("socket", "unix:/run/k.sock", ""),
            one("own", "0.0.0.0:5", "client_urls = ['https://k.test:5/', 'unix:///run/l.sock']"),
            one("m1", "127.0.0.1:6", &format!("member = 'm1'\n{pair}")),
            one("m2", "127.0.0.1:7", "member = 'm2'\nclient_urls = ['http://k.test:7']"),
        ]
        .concat();
        let shared = |config: &Config| {
            ["plain", "tls", "socket", "own", "m1", "m2"].map(|name| told(config, name).client_urls.join(" "))
        };
        let (config, warnings) = valid(&format!("{CLUSTER}{listeners}"));
        let own = "https://k.test:5 unix:///run/l.sock";
        let (plain, tls) = ("http://127.0.0.1:3", "https://127.0.0.1:4");
        assert_eq!(shared(&config), [plain, tls, "unix:///run/k.sock", own, tls, plain]);
        assert!(!warnings.contains(&"advertise.client_urls".to_owned()), "{warnings:?}");
        let members = |name: &str| {
            let members = &told(&config, name).members;
            members.iter().map(|(name, urls)| format!("{} {}", name.as_str(), urls[0])).collect::<Vec<_>>()
        };
        for name in ["plain", "own", "m2"] {
            assert_eq!(members(name), ["m2 http://k.test:7"], "{name}");
        }
        for name in ["tls", "m1"] {
            assert_eq!(members(name), ["m1 https://127.0.0.1:6"], "{name}");
        }
        assert!(members("socket").is_empty());

        // The shared URLs apply to all listeners without their own URLs.
        let (config, _) =
            valid(&format!("{CLUSTER}{listeners}[advertise]\nclient_urls = ['https://all:1']\n"));
        let all = "https://all:1";
        assert_eq!(shared(&config), [all, all, all, own, all, all]);

        for (urls, path) in [("", ""), ("'k.test:5'", "[0]"), ("'unix://run/k.sock'", "[0]")] {
            let text = format!("{CLUSTER}{LISTENER}client_urls = [{urls}]\n");
            assert_eq!(fault_paths(&text), [format!("listener[0].client_urls{path}")]);
        }
        let everywhere = format!("{}{}", one("b", "0.0.0.0:8", ""), one("c", "0.0.0.0:9", pair));
        let (_, warnings) = valid(&format!("{CLUSTER}{LISTENER}{everywhere}"));
        assert_eq!(
            warnings.iter().filter(|path| *path == "advertise.client_urls").count(),
            2,
            "{warnings:?}"
        );
    }

    #[test]
    fn members_have_urls_of_their_own_where_a_listener_is_about_them() {
        let own = |name: &str, port: u16, fields: &str| {
            format!("[[listener]]\nname = '{name}'\naddress = '127.0.0.1:{port}'\n{fields}\n")
        };
        let (m1, m2) = (own("x", 3, "member = 'm1'"), own("y", 4, "member = 'b2'"));
        let pair = "tls = { cert = 'a.crt', key = 'a.key' }";
        let hosts =
            own("z", 5, &format!("{pair}\nserver_names = {{ 'M3.kw.test' = 'm3', 'm1.kw.test' = 'm1' }}"));
        let (config, _) = valid(&format!("{CLUSTER}{m1}{m2}{hosts}{LISTENER}"));
        let told_by = |listener: &str| {
            let told = told(&config, listener);
            let members = told.members.iter().map(|(name, urls)| format!("{} {}", name.as_str(), urls[0]));
            (
                told.client_urls[0].clone(),
                members.collect::<BTreeSet<_>>().into_iter().collect::<Vec<_>>().join(", "),
            )
        };
        let expected = ("http://127.0.0.1:2", "b2 http://127.0.0.1:4, m1 http://127.0.0.1:3");
        for listener in ["a", "x", "y", "gone"] {
            let (shared, members) = told_by(listener);
            assert_eq!((&*shared, &*members), expected, "{listener}: what is one member's is not shared");
        }
        let (shared, members) = told_by("z");
        let expected = ("https://127.0.0.1:5", "m1 https://m1.kw.test:5, m3 https://m3.kw.test:5");
        assert_eq!((&*shared, &*members), expected, "who comes by TLS comes back by TLS");
        let about =
            |listener: usize, host| config.listeners[listener].member_of(host).map(|named| named.as_str());
        assert_eq!((about(0, None), about(0, Some("m3.kw.test"))), (Some("m1"), Some("m1")));
        assert_eq!((about(2, None), about(2, Some("m3.KW.test"))), (None, Some("m3")));
        assert_eq!(about(3, Some("m3.kw.test")), None);

        let named = "[advertise]\nmembers = { m1 = ['http://k:7/', 'http://l:7'] }\n";
        let (config, _) = valid(&format!("{CLUSTER}{m1}{LISTENER}{named}"));
        for listener in ["a", "x"] {
            let members = &told(&config, listener).members;
            assert_eq!((members.len(), &*members[0].1), (1, &["http://k:7".into(), "http://l:7".into()][..]));
        }
        let anywhere = m1.replace("127.0.0.1", "0.0.0.0");
        assert_eq!(valid(&format!("{CLUSTER}{LISTENER}{anywhere}")).1[0], "advertise.members.m1");

        for (lines, path) in [
            ("member = ''", "listener[0].member"),
            ("server_names = { 'a' = 'm1' }", "listener[0].server_names"),
            (&format!("{pair}\nserver_names = {{ 'a' = '' }}"), "listener[0].server_names.a"),
            (&format!("{pair}\nserver_names = {{ 'a:1' = 'm1' }}"), "listener[0].server_names.a:1"),
            (&format!("{pair}\nserver_names = {{ 'a' = 'm1', 'A' = 'm2' }}"), "listener[0].server_names.a"),
        ] {
            assert_eq!(fault_paths(&format!("{CLUSTER}{LISTENER}{lines}\n")), [path], "{lines}");
        }
        for (members, path) in [("m1 = []", "m1"), ("m1 = ['k:7']", "m1[0]"), ("'' = ['http://k:7']", "")] {
            let text = format!("{CLUSTER}{LISTENER}[advertise]\nmembers = {{ {members} }}\n");
            assert_eq!(fault_paths(&text), [format!("advertise.members.{path}")]);
        }
    }

    #[test]
    fn numbers_have_bounds() {
        for (section, line) in [
            ("limits", "connections = 0"),
            ("limits", "connections_per_address = 0"),
            ("limits", "first_call_timeout = '1ms'"),
            ("limits", "client_ping_interval = '1ms'"),
            ("limits", "client_ping_timeout = '0s'"),
            ("limits", "streams_per_connection = 0"),
            ("limits", "header_size = '1B'"),
            ("limits", "request_size = '0B'"),
            ("limits", "handshake_timeout = '0s'"),
            ("limits", "connection_age = '1ms'"),
            ("limits", "connection_age = '25h'"),
            ("limits", "replay_buffer = '999999GiB'"),
            ("watch", "idle_progress = '1ms'"),
            ("watch", "share_from = 1"),
            ("watch", "share_from = 1000001"),
            ("watch", "idle_progress = '25h'"),
            ("watch", "buffer = '1KiB'"),
            ("cluster", "connect_timeout = '0s'"),
            ("cluster", "id = 'none'"),
            ("drain", "timeout = '0s'"),
            ("drain", "wait = '25h'"),
            ("runtime", "shards = 257"),
            ("log", "level = 'loud'"),
            ("session", "realm = ''"),
        ] {
            let header = if section == "cluster" { String::new() } else { format!("[{section}]\n") };
            let text = format!("{LISTENER}{CLUSTER}{header}{line}\n");
            assert_eq!(
                fault_paths(&text),
                [format!("{section}.{}", line.split(' ').next().unwrap())],
                "{text}"
            );
        }
        let (config, _) =
            valid(&format!("{LISTENER}{CLUSTER}[limits]\nreplay_buffer = '0B'\n[runtime]\nshards = 7\n"));
        assert_eq!((config.limits.replay_buffer, config.runtime.shards.get()), (0, 7));
        let idle =
            |text: &str| valid(&format!("{LISTENER}{CLUSTER}[watch]\nidle_progress = '{text}'\n")).0.watch;
        assert_eq!(idle("7s").idle_progress, Some(7 * SECOND));
        assert_eq!(idle("0s").idle_progress, None);
        let aged = |text: &str| {
            valid(&format!("{LISTENER}{CLUSTER}[limits]\nconnection_age = '{text}'\n"))
                .0
                .limits
                .connection_age
        };
        assert_eq!((aged("7s"), aged("0s")), (Some(7 * SECOND), None));
        let (config, _) = valid(&format!("{LISTENER}{CLUSTER}[watch]\nbuffer = '3MiB'\n"));
        assert_eq!(config.watch.buffer, 3 << 20);
    }

    #[test]
    fn a_file_that_cannot_be_read_is_the_only_fault() {
        for path in ["/nowhere/keyward.toml", "/", "/dev/zero"] {
            let faults = crate::load(Path::new(path)).unwrap_err();
            assert_eq!(faults.iter().count(), 1, "{faults}");
            assert!(faults.to_string().contains(path), "{faults}");
        }
    }

    #[test]
    fn revocations_are_kept_in_one_place() {
        let keep = |lines: &str| {
            let (config, warnings) = valid(&format!("{CLUSTER}{LISTENER}{lines}"));
            (config.revocation.keep.clone(), warnings.len())
        };
        assert!(matches!(keep(""), (RevocationPersistence::Memory, 1)));
        let file = keep("[revocation]\nstate_file = 'state'\n");
        assert!(
            matches!(&file, (RevocationPersistence::File(path), 1) if path.ends_with("state")),
            "{file:?}"
        );
        let probe = "cluster.probe = { user = 'p', password_file = 'pw' }\n";
        let prefix = "revocation.etcd_prefix = '/p/'\nrevocation.state_file = 'state'\n";
        let (config, warnings) =
            valid(&format!("{probe}{prefix}cluster.endpoints = ['http://127.0.0.1:1']\n{LISTENER}"));
        let RevocationPersistence::Etcd { prefix, login: Some(login) } = &config.revocation.keep else {
            panic!("{config:?}")
        };
        assert_eq!((&**prefix, login.user.as_str()), ("/p/", "p"));
        assert_eq!(warnings, ["revocation.state_file", "session.key_files"]);
        for (lines, path) in [
            ("etcd_prefix = ''", "revocation.etcd_prefix"),
            ("etcd_prefix = '/'", "revocation.etcd_prefix"),
            ("etcd_prefix = '/p'", "revocation.etcd_prefix"),
            ("user = 'nobody'", "revocation.user"),
            ("max_age = '1s'", "revocation.max_age"),
        ] {
            let text = format!("{CLUSTER}{LISTENER}[revocation]\n{lines}\n");
            assert_eq!(fault_paths(&text), [path], "{lines}");
        }
    }

    #[test]
    fn what_replicas_tell_each_other_has_a_place_of_its_own() {
        let with = |lines: &str| format!("{CLUSTER}{LISTENER}{lines}\n");
        let prefix = |lines: &str| valid(&with(lines)).0.maintenance.etcd_prefix;
        assert_eq!(prefix("").as_deref(), Some("/keyward-maintenance/"));
        assert_eq!(prefix("[maintenance]\netcd_prefix = '/m/'").as_deref(), Some("/m/"));
        assert_eq!(prefix("[maintenance]\netcd_prefix = ''"), None);
        for bad in [
            "[maintenance]\netcd_prefix = '/m'",
            "[maintenance]\netcd_prefix = '//'",
            "[revocation]\netcd_prefix = '/keyward-maintenance/r/'",
            "[revocation]\netcd_prefix = '/m/r/'\n[maintenance]\netcd_prefix = '/m/'",
        ] {
            assert_eq!(fault_paths(&with(bad)), ["maintenance.etcd_prefix"], "{bad}");
        }
    }

    #[test]
    fn the_policy_in_etcd_has_a_prefix_of_its_own() {
        let with = |lines: &str| format!("{CLUSTER}{LISTENER}[policy]\n{lines}\n");
        let (config, warnings) = valid(&with("etcd_prefix = '/p/'\nstate_file = 'policy'\nmode = 'enforce'"));
        let stored = config.policy.stored.as_ref().expect("a place");
        assert_eq!((&*stored.prefix, stored.login.is_some()), ("/p/", config.cluster.probe.is_some()));
        assert!(stored.state_file.as_ref().is_some_and(|path| path.ends_with("policy")));
        assert!(config.own_prefixes().any(|prefix| prefix == "/p/"), "closed to every client");
        assert!(!warnings.iter().any(|path| path.contains("policy")), "{warnings:?}");
        let (config, warnings) = valid(&with("state_file = 'policy'"));
        assert_eq!(config.policy.stored, None);
        assert!(warnings.iter().any(|path| path == "policy.state_file"));
        for (lines, path) in [
            ("etcd_prefix = '/'", "policy.etcd_prefix"),
            ("etcd_prefix = '/p'", "policy.etcd_prefix"),
            ("etcd_prefix = ''", "policy.etcd_prefix"),
            ("etcd_prefix = '/p/'\nuser = 'nobody'", "policy.user"),
            ("etcd_prefix = '/keyward-maintenance/p/'", "maintenance.etcd_prefix"),
            ("etcd_prefix = '/r/p/'\n[revocation]\netcd_prefix = '/r/'", "policy.etcd_prefix"),
        ] {
            assert_eq!(fault_paths(&with(lines)), [path], "{lines}");
        }
    }

    #[test]
    fn the_break_glass_is_a_moment() {
        let (config, warnings) =
            valid(&format!("{CLUSTER}{LISTENER}[session]\nnot_before = '2023-11-14T22:13:20Z'\n"));
        assert_eq!((config.session.not_before, warnings.len()), (1_700_000_000, 1));
        let (_, warnings) =
            valid(&format!("{CLUSTER}{LISTENER}[session]\nnot_before = '2999-01-01T00:00:00Z'\n"));
        assert_eq!(warnings, ["session.key_files", "session.not_before"]);
        let text = format!("{CLUSTER}{LISTENER}[session]\nnot_before = 'now'\n");
        assert_eq!(fault_paths(&text), ["session.not_before"]);
    }
}
