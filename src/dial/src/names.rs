//! Resolves names to addresses, and the SRV records of a domain to endpoints: the only way of the program
//! from a name to an address, in every build.
//!
//! Owns: the choice of name servers, and the bounds of an answer; `names/` has the lookups. Must not know:
//! members, the time of the next lookup. Invariants: an IP address needs no lookup; an empty answer is an
//! error; a lookup ends by itself, and one that its caller gave up serves the next caller.
//!
//! The resolvers of C libraries are not used, because each has limits of its own: docs/decisions.md#d71.

mod followed_file;
mod hosts_file;
mod known_names;
mod lookup_thread;
mod name_lookup;
mod name_troubles;
mod resolv_conf;
mod server_question;

use std::cmp::Reverse;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use hickory_resolver::proto::rr::Name;
use tokio::sync::{mpsc, oneshot};

use self::known_names::KnownAnswer;
use self::lookup_thread::{LookupRequest, LookupThread};
use self::name_lookup::NameQuestion;
pub use self::name_troubles::NameTrouble;
use self::name_troubles::NameTroubles;
use self::resolv_conf::NameServers;
use keyward_base::io::kept_file::KeptFileStatus;
use keyward_config::{Endpoint, Scheme};

/// Maximum number of addresses of one name, and of endpoints of one domain. Real clusters have at most some
/// nine members.
const MOST: usize = 32;
/// Questions that wait for the thread, which takes them at once.
const QUESTIONS: usize = 64;
/// Limit of a lookup, whatever the settings of the name servers are.
const LONGEST_LIMIT: Duration = Duration::from_secs(60);
/// The loss at a restart while the file of the last known answers is not on the disk.
const UNKNOWN: &str = "a restart while no name server answers lacks the last known addresses";

/// The resolver of names. Cheap to clone: all clones share their lookups and the last known answers.
#[derive(Clone)]
pub struct NameResolver(Option<Arc<SharedResolver>>);

struct SharedResolver {
    settings: ResolverSettings,
    troubles: Arc<NameTroubles>,
    kept: Option<KeptFileStatus>,
    /// The way to the thread, which the first question starts.
    requests: Mutex<Option<mpsc::Sender<LookupRequest>>>,
}

/// The settings of a resolver.
#[derive(Clone, Debug)]
pub struct ResolverSettings {
    /// The sources of names.
    pub source: NameSource,
    /// The file of the last known answers; `None` keeps them in memory.
    pub kept: Option<PathBuf>,
    /// The times of a lookup.
    pub times: LookupTimes,
}

/// The sources of names.
#[derive(Clone, Debug)]
pub enum NameSource {
    /// The machine's hosts file, then the name servers of its resolv.conf; both files are followed.
    Machine {
        /// Usually `/etc/resolv.conf`.
        resolv_conf: PathBuf,
        /// Usually `/etc/hosts`.
        hosts: PathBuf,
        /// The port of the name servers.
        port: u16,
    },
    /// These name servers alone, preferred ones first. Never empty.
    Servers(Vec<SocketAddr>),
}

/// The times of a lookup that no file of the machine sets.
#[derive(Clone, Copy, Debug)]
pub struct LookupTimes {
    /// Time without an answer after which the next name server is asked, too.
    pub next_server: Duration,
    /// Time of a preferred server to know better than one that knows of no records.
    pub preferred_server: Duration,
    /// Time for which the answer for one family of addresses waits for the other.
    pub other_family: Duration,
    /// Time without an answer after which the last known answer serves. RFC 8767, 5, has the same time.
    pub old_after: Duration,
    /// A question ends after `timeout` times `attempts` of resolv.conf, and no sooner than after this time.
    pub shortest_limit: Duration,
}

impl Default for LookupTimes {
    fn default() -> Self {
        Self {
            next_server: Duration::from_millis(500),
            preferred_server: Duration::from_secs(2),
            other_family: Duration::from_millis(200),
            old_after: Duration::from_millis(1800),
            shortest_limit: Duration::from_secs(10),
        }
    }
}

impl LookupTimes {
    /// The limit of a question.
    fn limit(&self, settings: &NameServers) -> Duration {
        (settings.timeout * settings.attempts).max(self.shortest_limit).min(LONGEST_LIMIT)
    }
}

/// The result of a lookup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NameAnswer<T> {
    /// Never empty; without duplicates.
    pub all: Vec<T>,
    /// The TTL of the answer, if known.
    pub good_for: Option<Duration>,
    /// True if the answer is the last known one, because no name server answers now.
    pub is_old: bool,
}

/// Why a lookup has no result: the text names the name server.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{0}")]
pub struct NameError(Arc<str>);

impl NameError {
    /// An error with this text.
    #[must_use]
    pub fn because(why: impl AsRef<str>) -> Self {
        Self(why.as_ref().into())
    }
}

impl NameResolver {
    /// No resolution: the dialler interprets names, as in single-process tests.
    #[must_use]
    pub fn of_dialler() -> Self {
        Self(None)
    }

    /// The resolver of the machine. `kept` is the file of the last known answers.
    #[must_use]
    pub fn of_machine(kept: Option<PathBuf>) -> Self {
        let (resolv_conf, hosts) = ("/etc/resolv.conf".into(), "/etc/hosts".into());
        let source = NameSource::Machine { resolv_conf, hosts, port: resolv_conf::PORT };
        Self::new(ResolverSettings { source, kept, times: LookupTimes::default() })
    }

    /// The resolver that asks these name servers; the machine's resolver if `servers` is empty.
    #[must_use]
    pub fn by(servers: &[SocketAddr], kept: Option<PathBuf>) -> Self {
        if servers.is_empty() {
            return Self::of_machine(kept);
        }
        let source = NameSource::Servers(servers.to_vec());
        Self::new(ResolverSettings { source, kept, times: LookupTimes::default() })
    }

    /// A resolver with its first question to come.
    #[must_use]
    pub fn new(settings: ResolverSettings) -> Self {
        let (troubles, requests) = Default::default();
        let of_file = |path| KeptFileStatus::new("runtime.state_dir", path, UNKNOWN);
        let kept = settings.kept.clone().map(of_file);
        Self(Some(Arc::new(SharedResolver { settings, troubles, kept, requests })))
    }

    /// The hosts file that is consulted.
    #[must_use]
    pub fn hosts_file(&self) -> Option<&Path> {
        match &self.0.as_ref()?.settings.source {
            NameSource::Machine { hosts, .. } => Some(hosts),
            NameSource::Servers(_) => None,
        }
    }

    /// True if resolving this host needs a lookup.
    #[must_use]
    pub fn asks_for(&self, host: &str) -> bool {
        self.0.is_some() && host.parse::<IpAddr>().is_err()
    }

    /// The names and name servers that fail now.
    #[must_use]
    pub fn troubles(&self) -> Vec<NameTrouble> {
        self.0.as_ref().map(|shared| shared.troubles.report()).unwrap_or_default()
    }

    /// The state of the file of the last known answers, if there is one.
    #[must_use]
    pub fn kept_file(&self) -> Option<&KeptFileStatus> {
        self.0.as_ref()?.kept.as_ref()
    }

    /// Looks up the addresses of a host. Cancel-safe: the lookup goes on, and its answer serves the next
    /// caller.
    ///
    /// # Errors
    /// The text of [`NameError`].
    pub async fn addresses(&self, host: &str) -> Result<NameAnswer<IpAddr>, NameError> {
        if let Ok(address) = host.parse::<IpAddr>() {
            return Ok(NameAnswer { all: vec![address], good_for: None, is_old: false });
        }
        let KnownAnswer { addresses, ttl, is_old, .. } =
            self.ask(NameQuestion::Addresses(host.to_owned())).await?;
        bounded(addresses, ttl, is_old)
    }

    /// Looks up the endpoints named by SRV records, preferred endpoints first. Cancel-safe, as
    /// [`Self::addresses`].
    ///
    /// # Errors
    /// The text of [`NameError`].
    pub async fn services(&self, record: &str, scheme: Scheme) -> Result<NameAnswer<Endpoint>, NameError> {
        let KnownAnswer { mut services, ttl, is_old, .. } =
            self.ask(NameQuestion::Services(record.to_owned())).await?;
        services.sort_unstable_by_key(|target| {
            (target.priority, Reverse(target.weight), target.host.clone(), target.port)
        });
        let endpoints = services.iter().filter_map(|target| endpoint(scheme, &target.host, target.port));
        bounded(endpoints.collect(), ttl, is_old)
    }

    async fn ask(&self, question: NameQuestion) -> Result<KnownAnswer, NameError> {
        let shared = self.0.as_ref().ok_or_else(|| NameError::because("names are not resolved here"))?;
        let gone = || NameError::because("the thread of lookups is gone");
        let requests = shared.requests().map_err(|error| NameError::because(error.to_string()))?;
        let (reply, answer) = oneshot::channel();
        requests.send(LookupRequest { question, reply }).await.map_err(|_| gone())?;
        answer.await.map_err(|_| gone())?
    }
}

impl SharedResolver {
    /// The way to the thread, which is started by the first question. The thread ends with the last clone.
    fn requests(&self) -> io::Result<mpsc::Sender<LookupRequest>> {
        let mut requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(requests) = requests.as_ref().filter(|requests| !requests.is_closed()) {
            return Ok(requests.clone());
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (sender, receiver) = mpsc::channel(QUESTIONS);
        let (settings, troubles) = (self.settings.clone(), Arc::clone(&self.troubles));
        let kept = self.kept.clone();
        let serve = move || {
            runtime.block_on(LookupThread::new(settings, kept, troubles).run(receiver));
            // Does not wait for a hanging disk.
            runtime.shutdown_background();
        };
        thread::Builder::new().name("names".into()).spawn(serve)?;
        *requests = Some(sender.clone());
        Ok(sender)
    }
}

/// A whole name as a name server knows it. Unlike names that people register, a label may have an underscore,
/// as those of Docker Compose have.
fn whole_name(host: &str) -> Result<Name, NameError> {
    let failed = |error: hickory_resolver::proto::ProtoError| NameError::because(error.to_string());
    let mut name = if host.is_ascii() {
        let labels = host.strip_suffix('.').unwrap_or(host).split('.');
        Name::from_labels(labels.map(str::as_bytes)).map_err(failed)?
    } else {
        Name::from_utf8(host).map_err(failed)?
    };
    name.set_fqdn(true);
    Ok(name)
}

/// The endpoint named by a record; `None` for the root name, which means that the service does not exist.
fn endpoint(scheme: Scheme, target: &str, port: u16) -> Option<Endpoint> {
    let prefix = match scheme {
        Scheme::Http => "http",
        Scheme::Https => "https",
    };
    format!("{prefix}://{}:{port}", target.trim_end_matches('.')).parse().ok()
}

fn bounded<T: PartialEq>(
    found: Vec<T>,
    good_for: Option<Duration>,
    is_old: bool,
) -> Result<NameAnswer<T>, NameError> {
    let mut all: Vec<T> = Vec::with_capacity(found.len().min(MOST));
    for one in found {
        if all.len() < MOST && !all.contains(&one) {
            all.push(one);
        }
    }
    if all.is_empty() {
        return Err(NameError::because("the name leads nowhere"));
    }
    Ok(NameAnswer { all, good_for, is_old })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_needs_no_question_and_a_root_is_no_endpoint() {
        let machine = NameResolver::of_machine(None);
        for host in ["127.0.0.1", "::1"] {
            assert!(!machine.asks_for(host), "{host}");
        }
        assert!(machine.asks_for("localhost") && !NameResolver::of_dialler().asks_for("localhost"));
        let url = |scheme, target, port| endpoint(scheme, target, port).map(|endpoint| endpoint.to_string());
        assert_eq!(
            url(Scheme::Https, "M1.example.com.", 2379).as_deref(),
            Some("https://m1.example.com:2379")
        );
        assert_eq!(url(Scheme::Http, ".", 2379), None);
        assert_eq!(url(Scheme::Http, "m1.example.com.", 0), None);
    }

    /// Every name that the configuration takes is asked for.
    #[test]
    fn names_with_underscores_and_with_a_dot_at_their_end_are_names() {
        let name = |host: &str| whole_name(host).map(|name| name.to_ascii());
        for host in
            ["etcd-1", "etcd_1", "project_etcd_1.project_default", "_etcd", "a_", "etcd-1.example.com"]
        {
            assert_eq!(name(host).unwrap(), format!("{host}."));
        }
        assert_eq!(name("etcd-1.example.com.").unwrap(), "etcd-1.example.com.");
        assert!(name("b\u{fc}ro.example").unwrap().starts_with("xn--"));
        for host in ["", ".", "a..b", &"a".repeat(64)] {
            assert!(name(host).is_err(), "{host}");
        }
    }

    #[test]
    fn what_is_found_is_bounded_and_nothing_stands_twice() {
        let found = |all: Vec<usize>| bounded(all, None, false);
        assert_eq!(found(vec![1, 2, 1]).unwrap().all, [1, 2]);
        assert_eq!(found((0..99).collect()).unwrap().all.len(), MOST);
        assert!(found(Vec::new()).is_err());
    }
}
