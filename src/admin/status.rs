//! What one replica says of itself and of the members: `keyward status`.
//!
//! Owns: the names of its fields, which scripts rely on, and the table. Must not know: how any of it is found out. Invariants: what is
//! not known is null and an empty cell, never a zero; ids are hexadecimal, as etcdctl shows them.

use std::fmt;

use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::table::{Table, plain, size};
use crate::upstream::membership::{
    Absence, Absent, Auth, Member, Membership, Readiness, Reason, Role, Unanswered,
};

/// One replica's view, all of it.
#[derive(Debug, Serialize, Deserialize)]
pub struct Status {
    /// The replica itself.
    pub replica: Replica,
    /// The cluster behind it.
    pub cluster: Cluster,
    /// The members that have an address.
    pub members: Vec<Row>,
    /// Listed members without an address.
    pub absent: Vec<AbsentRow>,
    /// Addresses behind which another cluster answers.
    pub foreign: Vec<ForeignRow>,
    /// Addresses where nobody is known to be.
    pub unanswered: Vec<UnansweredRow>,
}

/// How the replica is doing.
#[derive(Debug, Serialize, Deserialize)]
pub struct Replica {
    /// Keyward's version.
    pub version: String,
    /// Whether it serves.
    pub state: State,
    /// Why it does not.
    pub why: Option<String>,
    /// Connections of clients.
    pub connections: i64,
    /// Unary calls under way.
    pub calls: i64,
    /// Streams that are open.
    pub streams: i64,
    /// Sessions that it has seen lately.
    pub sessions: usize,
}

/// Whether the replica serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// `/readyz` says yes.
    Serving,
    /// It says yes, and that only what a member answers alone is served: the cluster has no quorum.
    Degraded,
    /// It says no, and something is missing.
    NotReady,
    /// It says no, since it ends.
    Draining,
}

/// The cluster as a whole.
#[derive(Debug, Serialize, Deserialize)]
pub struct Cluster {
    /// Its id, hexadecimal.
    pub id: Option<String>,
    /// `"on"`, `"off"`, or null where no member has told.
    pub auth: Option<String>,
    /// The leader's id.
    pub leader: Option<String>,
    /// The highest term seen.
    pub raft_term: Option<u64>,
}

/// One member.
#[derive(Debug, Serialize, Deserialize)]
pub struct Row {
    /// Where it is spoken to.
    pub endpoint: String,
    /// Hexadecimal.
    pub id: String,
    /// As in the member list.
    pub name: String,
    /// etcd's.
    pub version: Option<String>,
    /// Of the storage format: from 3.6 on.
    pub storage_version: Option<String>,
    /// Bytes of the database file.
    pub db_size: Option<u64>,
    /// Bytes of it in use.
    pub db_size_in_use: Option<u64>,
    /// Its quota in bytes: from 3.6 on.
    pub db_size_quota: Option<u64>,
    /// Whether it leads.
    pub is_leader: bool,
    /// Whether it does not vote yet.
    pub is_learner: bool,
    /// Its raft term.
    pub raft_term: Option<u64>,
    /// The newest entry of its log.
    pub raft_index: Option<u64>,
    /// The newest that it has applied.
    pub raft_applied_index: Option<u64>,
    /// What it complains about itself.
    pub errors: Vec<String>,
    /// Whether it gets calls.
    pub ready: bool,
    /// Why it gets none.
    pub why: Option<String>,
    /// How many entries it has not applied that the furthest member has ([`Membership::lag`]).
    pub raft_lag: Option<u64>,
    /// How long its last Status took.
    pub status_micros: Option<u64>,
    /// How much it is used by this replica.
    #[serde(flatten)]
    pub load: Load,
}

/// What a replica's own calls know of a member.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Load {
    /// Whether it is left out since it failed, or is far slower than the others.
    pub ejected: bool,
    /// Unary calls that wait for its answer, over all shards.
    pub in_flight: u32,
    /// How long its calls took lately.
    pub latency_micros: Option<u64>,
    /// Streams that it carries, over all shards.
    pub streams: Streams,
}

/// Streams that a member carries, by what they are.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Streams {
    /// Watches of one client stream share one.
    pub watch: u32,
    /// Of leases.
    pub keepalive: u32,
    /// Observe, and Lock and Campaign that wait.
    pub other: u32,
}

impl Load {
    /// What is counted of a member, over all shards.
    pub(super) fn of(member: &Member) -> Self {
        let latency = member.conduct.latency();
        let streams = member.conduct.streams().counts();
        Self {
            ejected: member.conduct.ejected(Instant::now()).is_some(),
            in_flight: member.conduct.in_flight(),
            latency_micros: latency.map(|latency| u64::try_from(latency.as_micros()).unwrap_or(u64::MAX)),
            streams: Streams { watch: streams.watches, keepalive: streams.keepalives, other: streams.others },
        }
    }
}

/// A listed member without an address.
#[derive(Debug, Serialize, Deserialize)]
pub struct AbsentRow {
    /// Hexadecimal.
    pub id: String,
    /// Empty for one that was never started.
    pub name: String,
    /// Why it has no address.
    pub why: String,
}

/// An address of another cluster.
#[derive(Debug, Serialize, Deserialize)]
pub struct ForeignRow {
    /// The address.
    pub endpoint: String,
    /// The cluster that answers there, hexadecimal.
    pub cluster: String,
}

/// An address where nobody is known to be.
#[derive(Debug, Serialize, Deserialize)]
pub struct UnansweredRow {
    /// What was asked; for an SRV record that names nothing, that one.
    pub endpoint: String,
    /// At which address of its name.
    pub at: Option<String>,
    /// What is wrong, in the words of whoever said so.
    pub why: String,
}

impl Cluster {
    pub(super) fn of(members: &Membership, auth: Auth) -> Self {
        Self {
            id: members.cluster.map(|id| id.to_string()),
            auth: match auth {
                Auth::Unknown => None,
                Auth::On => Some("on".into()),
                Auth::Off => Some("off".into()),
            },
            leader: members.leader.map(|id| id.to_string()),
            raft_term: Some(members.term).filter(|term| *term > 0),
        }
    }
}

impl Row {
    pub(super) fn of(member: &Member, members: &Membership) -> Self {
        let vitals = member.vitals.as_deref();
        Self {
            endpoint: member.endpoint.to_string(),
            id: member.id.to_string(),
            name: (*member.name).to_owned(),
            version: member.version.map(|version| version.to_string()),
            storage_version: vitals.and_then(|vitals| Some(vitals.storage_version.as_deref()?.to_owned())),
            db_size: vitals.map(|vitals| vitals.db_size),
            db_size_in_use: vitals.map(|vitals| vitals.db_in_use),
            db_size_quota: vitals.and_then(|vitals| vitals.db_quota),
            is_leader: members.leader == Some(member.id),
            is_learner: member.role == Role::Learner,
            raft_term: Some(member.term).filter(|term| *term > 0),
            raft_index: vitals.map(|vitals| vitals.raft_index),
            raft_applied_index: vitals.map(|vitals| vitals.applied),
            errors: vitals.map(|vitals| vitals.errors.to_vec()).unwrap_or_default(),
            ready: member.is_ready(),
            why: why_not(member),
            raft_lag: members.lag(member),
            status_micros: vitals.map(|vitals| u64::try_from(vitals.took.as_micros()).unwrap_or(u64::MAX)),
            load: Load::of(member),
        }
    }
}

impl AbsentRow {
    pub(super) fn of(absent: &Absent) -> Self {
        let why = match absent.why {
            Absence::Unstarted => "was added and never started",
            Absence::NoUsableUrl => "has no client URL of the configured endpoints' scheme",
            Absence::NotAllowed => "no host of its client URLs is among cluster.allowed_hosts",
        };
        Self { id: absent.id.to_string(), name: (*absent.name).to_owned(), why: why.into() }
    }
}

impl UnansweredRow {
    pub(super) fn of(unanswered: &Unanswered) -> Self {
        let Unanswered { endpoint, at, why, .. } = unanswered;
        let endpoint = if endpoint.port == 0 { endpoint.host.clone() } else { endpoint.to_string() };
        Self { endpoint, at: at.map(|at| at.to_string()), why: (**why).to_owned() }
    }
}

fn why_not(member: &Member) -> Option<String> {
    match member.readiness {
        _ if member.is_ready() => None,
        // With auth on it tells nobody of which cluster it is.
        Readiness::NotReady(Reason::UnverifiedCluster) if member.role == Role::Learner => {
            Some(Reason::Learner.to_string())
        }
        Readiness::NotReady(reason) => Some(reason.to_string()),
        Readiness::Ready if member.rest.is_taken() => Some("is spared: it is being defragmented".into()),
        Readiness::Ready => Some("a connection to it was lost a moment ago".into()),
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { replica, cluster, members, absent, foreign, unanswered } = self;
        let state = match replica.state {
            State::Serving => "serving",
            State::Degraded => "degraded",
            State::NotReady => "not ready",
            State::Draining => "draining",
        };
        let why = replica.why.as_ref().filter(|why| *why != state);
        writeln!(
            f,
            "keyward {}: {state}{}; {} connections, {} calls, {} streams, {} sessions seen",
            replica.version,
            why.map(|why| format!(" ({why})")).unwrap_or_default(),
            replica.connections,
            replica.calls,
            replica.streams,
            replica.sessions
        )?;
        let unknown = || "unknown".to_owned();
        writeln!(
            f,
            "cluster {}: auth {}, leader {}, raft term {}",
            cluster.id.clone().unwrap_or_else(unknown),
            cluster.auth.clone().unwrap_or_else(unknown),
            cluster.leader.clone().unwrap_or_else(unknown),
            cluster.raft_term.map_or_else(unknown, |term| term.to_string())
        )?;
        write!(f, "{}{}", etcds_view(members), our_view(members))?;
        for absent in absent {
            let name = if absent.name.is_empty() { "without a name" } else { &absent.name };
            writeln!(f, "absent: {} ({}) {}", absent.id, plain(name), absent.why)?;
        }
        for foreign in foreign {
            writeln!(f, "foreign: at {} cluster {} answers", foreign.endpoint, foreign.cluster)?;
        }
        for UnansweredRow { endpoint, at, why } in unanswered {
            let at = at.as_ref().map(|at| format!(" ({at})")).unwrap_or_default();
            writeln!(f, "unanswered: {}{at}: {}", plain(endpoint), plain(why))?;
        }
        Ok(())
    }
}

fn told<T: ToString>(value: Option<T>) -> String {
    value.map(|value| value.to_string()).unwrap_or_default()
}

/// As `etcdctl endpoint status -w table`.
fn etcds_view(members: &[Row]) -> Table {
    let head = [
        "ENDPOINT",
        "ID",
        "VERSION",
        "DB SIZE",
        "IN USE",
        "IS LEADER",
        "IS LEARNER",
        "RAFT TERM",
        "RAFT INDEX",
        "RAFT APPLIED INDEX",
        "ERRORS",
    ];
    let mut table = Table::new(&head);
    for row in members {
        table.row([
            row.endpoint.clone(),
            row.id.clone(),
            told(row.version.as_ref()),
            told(row.db_size.map(size)),
            told(row.db_size_in_use.map(size)),
            row.is_leader.to_string(),
            row.is_learner.to_string(),
            told(row.raft_term),
            told(row.raft_index),
            told(row.raft_applied_index),
            row.errors.join(", "),
        ]);
    }
    table
}

/// What Keyward makes of it.
fn our_view(members: &[Row]) -> Table {
    let head = [
        "ID",
        "NAME",
        "READY",
        "EJECTED",
        "IN FLIGHT",
        "WATCH",
        "KEEPALIVE",
        "OTHER STREAMS",
        "LATENCY",
        "STATUS TOOK",
        "RAFT LAG",
        "WHY NOT",
    ];
    let mut table = Table::new(&head);
    let millis = |micros: u64| format!("{}.{} ms", micros / 1000, micros % 1000 / 100);
    for row in members {
        table.row([
            row.id.clone(),
            row.name.clone(),
            row.ready.to_string(),
            row.load.ejected.to_string(),
            row.load.in_flight.to_string(),
            row.load.streams.watch.to_string(),
            row.load.streams.keepalive.to_string(),
            row.load.streams.other.to_string(),
            told(row.load.latency_micros.map(millis)),
            told(row.status_micros.map(millis)),
            told(row.raft_lag),
            told(row.why.as_ref()),
        ]);
    }
    table
}
