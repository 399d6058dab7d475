//! What it means: from the mirror to a [`Config`] that is valid as a whole.
//!
//! Owns: defaults, required keys, bounds, and the checks across keys. Must not know: TOML.
//! Invariants: everything is looked at, whatever was wrong before; a fallback value that stands in for a faulty one
//! never leaves this file, since one fault is enough to refuse the whole.

mod cluster;
mod listener;

use std::fmt::Display;
use std::io::Read as _;
use std::num::NonZeroUsize;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use zeroize::Zeroize;

use super::file::{self, File};
use super::findings::{Faults, Findings, Warning};
use super::{Config, Drain, Limits, Login, Realm, Runtime, Session, SessionKey, secrets, shape, values};
use crate::identity::UserName;
use crate::pem::{Chain, KeyPair, PrivateKey, Roots};
use crate::secret::Secret;
use crate::telemetry;

/// A configuration larger than this is some other file.
const MAX_FILE: u64 = 1 << 20;
const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const MOMENT: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
const DAY: Duration = Duration::from_secs(24 * 3600);

/// Reads the file and all files that it names. Relative names are relative to the folder of the file.
///
/// # Errors
/// All faults at once.
pub fn load(path: &Path) -> Result<(Config, Vec<Warning>), Faults> {
    let folder = path.parent().unwrap_or(Path::new(""));
    match read(path) {
        Ok(text) => parse(&text, folder),
        Err(reason) => {
            let mut findings = Findings::default();
            findings.fault_at_line(None, reason);
            findings.conclude(None)
        }
    }
}

fn read(path: &Path) -> Result<String, String> {
    let mut text = String::new();
    let opened = std::fs::File::open(path).and_then(|file| file.take(MAX_FILE + 1).read_to_string(&mut text));
    match opened {
        Ok(_) if text.len() as u64 > MAX_FILE => Err(format!("{} is larger than 1 MiB", path.display())),
        Ok(_) => Ok(text),
        Err(error) => Err(format!("cannot read {}: {error}", path.display())),
    }
}

/// As [`load`], from text; relative names are relative to `folder`.
pub(super) fn parse(text: &str, folder: &Path) -> Result<(Config, Vec<Warning>), Faults> {
    let (file, findings) = shape::read(text);
    let mut resolver = Resolver { folder, findings };
    let config = file.and_then(|file| resolver.config(file));
    resolver.findings.conclude(config)
}

/// Where relative names begin, and what was found so far.
struct Resolver<'a> {
    folder: &'a Path,
    findings: Findings,
}

impl Resolver<'_> {
    fn config(&mut self, file: File) -> Option<Config> {
        let users = self.users(file.user);
        let listeners = self.listeners(file.listener, &users);
        let cluster = self.cluster(file.cluster);
        let admin = self.admin(file.admin, &listeners);
        Some(Config {
            advertise: Arc::new(self.advertise(file.advertise, &listeners)),
            session: Arc::new(self.session(file.session)),
            limits: self.limits(file.limits),
            log: self.log(file.log),
            drain: self.drain(file.drain),
            runtime: self.runtime(file.runtime),
            cluster: Arc::new(cluster),
            admin: admin?,
            listeners,
        })
    }

    fn session(&mut self, session: file::Session) -> Session {
        let path = "session.key_files";
        let names = session.key_files.unwrap_or_default();
        let mut keys: Vec<SessionKey> = Vec::new();
        for (index, name) in names.iter().enumerate() {
            let path = format!("{path}[{index}]");
            let Some(key) = self.secret(&path, name, secrets::session_key) else { continue };
            if keys.iter().any(|earlier| earlier.expose() == key.expose()) {
                self.findings.warn(&path, "holds the same key as an earlier file");
            } else {
                keys.push(Arc::new(key));
            }
        }
        if names.is_empty() {
            let reason = "no key file: sessions are sealed with a random key, so every client must log in again after \
                          a restart, and no other replica accepts its session";
            self.findings.warn(path, reason);
            let mut key = zeroize::Zeroizing::new([0; 32]);
            match getrandom::fill(key.as_mut()) {
                Ok(()) => keys.push(Arc::new(Secret::new(*key))),
                Err(error) => self.findings.fault(path, format!("the system gives no random key: {error}")),
            }
        }
        if session.realm.as_ref().is_some_and(|realm| realm.is_empty() || realm.len() > 128) {
            self.findings
                .fault("session.realm", "a realm is 1 to 128 bytes; leave it out for the cluster's id");
        }
        let realm = session.realm.map_or(Realm::ClusterId, |realm| Realm::Named(realm.into()));
        Session { keys, realm }
    }

    fn limits(&mut self, limits: file::Limits) -> Limits {
        let file::Limits { connections, streams_per_connection, logins_in_flight_per_member, .. } = limits;
        let streams = self.count("limits.streams_per_connection", streams_per_connection, 4096, 1..=1 << 20);
        let header = self.size("limits.header_size", limits.header_size, 64 * KIB, KIB..=16 * MIB);
        Limits {
            connections: self.count("limits.connections", connections, 10_000, 1..=1 << 24),
            streams_per_connection: fits(streams),
            header_size: fits(header),
            request_size: self.size("limits.request_size", limits.request_size, 2 * MIB, KIB..=GIB),
            handshake_timeout: self.duration(
                "limits.handshake_timeout",
                limits.handshake_timeout,
                10 * SECOND,
                MOMENT..=DAY,
            ),
            replay_buffer: self.size("limits.replay_buffer", limits.replay_buffer, 64 * MIB, 0..=64 * GIB),
            logins_in_flight_per_member: self.count(
                "limits.logins_in_flight_per_member",
                logins_in_flight_per_member,
                2,
                1..=64,
            ),
        }
    }

    fn log(&mut self, log: file::Log) -> telemetry::Settings {
        let default = telemetry::Settings::default();
        telemetry::Settings {
            format: match log.format {
                Some(file::LogFormat::Text) => telemetry::Format::Text,
                Some(file::LogFormat::Json) => telemetry::Format::Json,
                None => default.format,
            },
            level: log
                .level
                .and_then(|word| self.checked("log.level", word.parse()))
                .unwrap_or(default.level),
            access: log.access.unwrap_or(default.access),
        }
    }

    fn drain(&mut self, drain: file::Drain) -> Drain {
        Drain {
            wait: self.duration("drain.wait", drain.wait, Duration::ZERO, Duration::ZERO..=DAY),
            timeout: self.duration("drain.timeout", drain.timeout, 30 * SECOND, MOMENT..=DAY),
        }
    }

    /// More than four shards only pay on large machines (rules 34), where an operator says so.
    fn runtime(&mut self, runtime: file::Runtime) -> Runtime {
        let cores = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
        let asked = self.count("runtime.shards", runtime.shards.map(u32::from), 0, 0..=256);
        Runtime {
            shards: NonZeroUsize::new(asked).or(NonZeroUsize::new(cores.min(4))).unwrap_or(NonZeroUsize::MIN),
        }
    }
}

/// Single values.
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

    fn file(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    fn secret<T: Zeroize>(
        &mut self,
        path: &str,
        name: &str,
        read: impl FnOnce(&Path) -> Result<Secret<T>, secrets::Useless>,
    ) -> Option<Secret<T>> {
        let file = self.file(name);
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
    ) -> Option<Login> {
        let user = self.required(user_path, user, "the name of an etcd user is needed");
        if user.as_deref() == Some("") {
            self.findings.fault(user_path, "is empty; the name of an etcd user is needed");
        }
        let file = self.required(password_path, password_file, "the file of the user's password is needed");
        let password = file.and_then(|name| self.secret(password_path, &name, secrets::password));
        Some(Login { user: UserName::from(user?.as_str()), password: Arc::new(password?) })
    }

    fn roots(&mut self, path: &str, name: &str) -> Option<Roots> {
        let file = self.file(name);
        self.checked(path, Roots::read(&file))
    }

    /// The certificate and key of one table, of which one needs the other.
    fn key_pair(&mut self, path: &str, cert: Option<String>, key: Option<String>) -> Option<KeyPair> {
        let (cert_path, key_path) = (format!("{path}.cert"), format!("{path}.key"));
        let cert = self.required(&cert_path, cert, "the certificate file that goes with the key is needed");
        let key = self.required(&key_path, key, "the key file that goes with the certificate is needed");
        let chain = cert.and_then(|name| self.checked(&cert_path, Chain::read(&self.file(&name))));
        let key = key.and_then(|name| {
            let file = self.file(&name);
            self.warn_if_open(&key_path, &file);
            self.checked(&key_path, PrivateKey::read(&file))
        });
        self.checked(&key_path, KeyPair::new(chain?, key?))
    }
}

/// The bounds were checked; what did not fit them is refused with the whole.
fn fits(value: usize) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}
