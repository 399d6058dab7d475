//! The fleet: all replicas of `admin.replicas`, for the commands of an operator at any of them.
//!
//! Owns: the commands that other replicas take, and the messages between replicas. Must not know: the
//! execution of a command. Invariants: another replica is believed for a session key alone
//! (docs/decisions.md#d76), never for its address or name; without `session.key_files` and `admin.replicas`
//! no replica asks and none answers; what another replica may ask is a closed set, without secrets, and
//! without anything that outlives the process.
//!
//! A command takes two sealed requests (`fleet_seal`) to each replica, by POST at its admin address: a
//! hello, by which the replica names its process and its time, then the command for this process at this
//! time.

mod fleet_door;
mod fleet_questions;
pub mod fleet_report;
pub mod fleet_seal;
pub mod request_freshness;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use data_encoding::HEXLOWER;
use serde::{Deserialize, Serialize};
use tokio::sync::Semaphore;

use super::local_commands::LocalCommands;
use super::operator_actions::CommandOrigin;
use super::socket_protocol::{AdminAnswer, FleetCommand};
use super::view::Viewer;
pub use fleet_door::FleetDoor;
use keyward_config::{Config, KeySource, RealmSetting};
use keyward_downstream::session::Sealer;
use keyward_telemetry::fleet_metrics::{FleetMetrics, FleetResult};
use request_freshness::{ProcessMark, RequestFreshness, ToldTime};

/// The path of sealed requests at the admin address.
pub(super) const PATH: &str = "/fleet";
/// Commands of other replicas under way at a time, in one process.
const PLACES: usize = 4;
/// Bytes of the answers of all replicas to one command: the client of the admin socket reads 64 MiB.
const MOST_ANSWER_BYTES: usize = 48 << 20;

/// The set of replicas that belong together: those in front of one cluster, in one realm.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct FleetScope {
    /// `session.realm`, if set.
    realm: Option<String>,
    /// The id of the served cluster, once known.
    cluster: Option<String>,
}

impl FleetScope {
    /// True unless the replicas are known to belong to two sets.
    fn may_be(&self, other: &Self) -> bool {
        let is_same = match (&self.cluster, &other.cluster) {
            (Some(cluster), Some(other)) => cluster == other,
            _ => true,
        };
        is_same && self.realm == other.realm
    }
}

/// A request, as sealed.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum FleetRequest {
    /// Asks for a [`FleetWelcome`]. Changes nothing, so a repetition is harmless.
    Hello(FleetScope),
    /// A command for one process.
    Command(Box<FleetOrder>),
}

/// A command for one process, which takes it once.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct FleetOrder {
    scope: FleetScope,
    /// The mark of the process, hexadecimal.
    process: String,
    /// Its time when it said so.
    millis: u64,
    by: CommandOrigin,
    command: FleetCommand,
    /// Bytes of the answer at most.
    most_bytes: usize,
}

/// An answer, as sealed.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum FleetReply {
    Welcome(FleetWelcome),
    Answer(Box<AdminAnswer>),
    /// The replica executes other commands.
    Busy {},
}

/// A process, as named by itself.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct FleetWelcome {
    /// The mark of the process, hexadecimal.
    process: String,
    /// Milliseconds since the process began.
    millis: u64,
    /// Name of its machine.
    host: Option<String>,
    pid: u32,
}

/// One process of the fleet, which asks the others and answers them.
pub struct Fleet {
    commands: Arc<LocalCommands>,
    sealer: Arc<Sealer>,
    viewer: Arc<Viewer>,
    /// False if the system gave no random bytes for the mark of the process.
    has_mark: bool,
    freshness: Mutex<RequestFreshness>,
    places: Semaphore,
    metrics: FleetMetrics,
}

impl Fleet {
    /// The fleet of this process.
    #[must_use]
    pub fn new(commands: Arc<LocalCommands>, metrics: FleetMetrics) -> Self {
        let mut process = ProcessMark::default();
        let has_mark = getrandom::fill(&mut process).is_ok();
        let freshness = Mutex::new(RequestFreshness::new(process));
        let (sealer, viewer) = (Arc::clone(&commands.sealer), Arc::clone(&commands.viewer));
        Self { commands, sealer, viewer, has_mark, freshness, places: Semaphore::new(PLACES), metrics }
    }

    /// Why this replica asks no other replica, and answers none; `None` if it does.
    fn lack(&self) -> Option<&'static str> {
        if !self.has_mark {
            return Some("the system gave no random bytes when this process began: restart this replica");
        }
        lack(&self.viewer.config.load())
    }

    fn scope(&self) -> FleetScope {
        let realm = match &self.viewer.config.load().session.realm {
            RealmSetting::Named(name) => Some(name.to_string()),
            RealmSetting::ClusterId => None,
        };
        FleetScope { realm, cluster: self.viewer.state.cluster().map(|cluster| cluster.to_string()) }
    }

    /// This process, as told to another replica now.
    fn welcome(&self) -> FleetWelcome {
        let row = self.viewer.replica();
        let ToldTime { process, millis } = self.freshness().time();
        let process = HEXLOWER.encode(&process);
        FleetWelcome { process, millis, host: row.host, pid: std::process::id() }
    }

    fn freshness(&self) -> MutexGuard<'_, RequestFreshness> {
        self.freshness.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn count(&self, result: FleetResult) {
        self.metrics.requests(result).inc();
    }
}

impl FleetWelcome {
    /// The process and the time at which it said so; `None` for text that is no mark.
    fn told_time(process: &str, millis: u64) -> Option<ToldTime> {
        let process = HEXLOWER.decode(process.as_bytes()).ok()?.try_into().ok()?;
        Some(ToldTime { process, millis })
    }
}

fn lack(config: &Config) -> Option<&'static str> {
    if config.admin.replicas.is_empty() {
        return Some(
            "admin.replicas is not set: it names the admin addresses of the other replicas, which take \
             commands if it is set there too",
        );
    }
    match config.session.key_source {
        KeySource::Files => None,
        KeySource::Random => Some(
            "session.key_files is not set: replicas believe each other by the session key that all of them \
             have (keyward keygen FILE, then the same file for every replica)",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replicas_of_another_cluster_or_realm_are_another_fleet() {
        let scope = |realm: Option<&str>, cluster: Option<&str>| FleetScope {
            realm: realm.map(str::to_owned),
            cluster: cluster.map(str::to_owned),
        };
        let here = scope(Some("r"), Some("c"));
        assert!(here.may_be(&here) && here.may_be(&scope(Some("r"), None)));
        assert!(scope(None, None).may_be(&scope(None, Some("c"))));
        assert!(!here.may_be(&scope(Some("r"), Some("d"))));
        assert!(!here.may_be(&scope(Some("s"), Some("c"))));
        assert!(!here.may_be(&scope(None, Some("c"))));
    }
}
