//! `keyward status`: one replica's view of itself and of the members.
//!
//! Owns: the field names used by scripts, and the table for a terminal. Must not know: the source of any
//! value. Invariants: an unknown value is null in JSON and an empty cell in the table, never zero; ids are
//! hexadecimal, as in etcdctl.

use std::fmt;

use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::table::{TerminalTable, plain, size};
use crate::members::membership::{
    AbsentMember, AuthSetting, Fitness, Member, Membership, Role, UnansweredAddress, UnreadyReason,
};

/// The status of one replica.
#[derive(Debug, Serialize, Deserialize)]
pub struct ReplicaStatus {
    /// The replica itself.
    pub replica: Replica,
    /// The cluster behind the replica.
    pub cluster: ClusterStatus,
    /// The members with an address.
    pub members: Vec<MemberRow>,
    /// Listed members without an address.
    pub absent: Vec<AbsentRow>,
    /// Addresses answered by a member of another cluster.
    pub foreign: Vec<ForeignRow>,
    /// Addresses without a known member.
    pub unanswered: Vec<UnansweredRow>,
}

/// State and load of the replica.
#[derive(Debug, Serialize, Deserialize)]
pub struct Replica {
    /// Keyward's version.
    pub version: String,
    /// Serving state.
    pub state: ReplicaState,
    /// Reason for the state, unless serving.
    pub why: Option<String>,
    /// Open client connections.
    pub connections: i64,
    /// Unary calls in flight.
    pub calls: i64,
    /// Open streams.
    pub streams: i64,
    /// Sessions seen recently.
    pub sessions: usize,
}

/// Serving state of the replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReplicaState {
    /// `/readyz` answers 200 "ok".
    Serving,
    /// `/readyz` answers 200 "degraded": the cluster has no quorum, and only calls answerable by one member
    /// alone are served.
    Degraded,
    /// `/readyz` answers 503, for lack of a requirement.
    NotReady,
    /// `/readyz` answers 503, because of a drain.
    Draining,
}

/// The cluster as a whole.
#[derive(Debug, Serialize, Deserialize)]
pub struct ClusterStatus {
    /// Cluster id, hexadecimal.
    pub id: Option<String>,
    /// `"on"`, `"off"`, or null before the first member's answer.
    pub auth: Option<String>,
    /// Id of the leader.
    pub leader: Option<String>,
    /// Highest raft term seen.
    pub raft_term: Option<u64>,
}

/// One member.
#[derive(Debug, Serialize, Deserialize)]
pub struct MemberRow {
    /// Endpoint of the member used by Keyward.
    pub endpoint: String,
    /// Member id, hexadecimal.
    pub id: String,
    /// Name in the member list.
    pub name: String,
    /// etcd version.
    pub version: Option<String>,
    /// Version of the storage format; reported from etcd 3.6 on.
    pub storage_version: Option<String>,
    /// Size of the database file, in bytes.
    pub db_size: Option<u64>,
    /// Used part of the database file, in bytes.
    pub db_size_in_use: Option<u64>,
    /// Database quota, in bytes; reported from etcd 3.6 on.
    pub db_size_quota: Option<u64>,
    /// True if the member is the leader.
    pub is_leader: bool,
    /// True if the member is a learner.
    pub is_learner: bool,
    /// Raft term of the member.
    pub raft_term: Option<u64>,
    /// Index of the newest raft entry.
    pub raft_index: Option<u64>,
    /// Index of the newest applied raft entry.
    pub raft_applied_index: Option<u64>,
    /// Errors reported by the member's Status.
    pub errors: Vec<String>,
    /// True if the member gets calls.
    pub ready: bool,
    /// Reason for getting no calls.
    pub why: Option<String>,
    /// Raft entries not applied by this member and applied by the furthest ready member
    /// ([`Membership::lag`]).
    pub raft_lag: Option<u64>,
    /// Duration of the last Status call, in microseconds.
    pub status_micros: Option<u64>,
    /// Load of the member by this replica.
    #[serde(flatten)]
    pub load: MemberLoadRow,
}

/// One member's load and health, as measured by a replica's own calls.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct MemberLoadRow {
    /// True if the member is ejected for failures, or for being far slower than the rest.
    pub ejected: bool,
    /// Unary calls waiting for an answer of the member, over all shards.
    pub in_flight: u32,
    /// Recent latency of calls, in microseconds.
    pub latency_micros: Option<u64>,
    /// Open upstream streams, over all shards.
    pub streams: MemberStreamsRow,
}

/// Open upstream streams of a member, by kind.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct MemberStreamsRow {
    /// Watch streams; all watches of one client stream share an upstream stream.
    pub watch: u32,
    /// Lease keepalive streams.
    pub keepalive: u32,
    /// Observe streams, and waiting Lock and Campaign calls.
    pub other: u32,
}

impl MemberLoadRow {
    /// Reads the counters of a member, over all shards.
    pub(super) fn of(member: &Member) -> Self {
        let latency = member.load.latency();
        let streams = member.load.streams().counts();
        Self {
            ejected: member.load.ejected(Instant::now()).is_some(),
            in_flight: member.load.in_flight(),
            latency_micros: latency.map(|latency| u64::try_from(latency.as_micros()).unwrap_or(u64::MAX)),
            streams: MemberStreamsRow {
                watch: streams.watches,
                keepalive: streams.keepalives,
                other: streams.others,
            },
        }
    }
}

/// A listed member without an address.
#[derive(Debug, Serialize, Deserialize)]
pub struct AbsentRow {
    /// Member id, hexadecimal.
    pub id: String,
    /// Name of the member; empty for a member never started.
    pub name: String,
    /// Reason for having no address.
    pub why: String,
}

/// An address of another cluster.
#[derive(Debug, Serialize, Deserialize)]
pub struct ForeignRow {
    /// The address.
    pub endpoint: String,
    /// Id of the cluster answering at the address, hexadecimal.
    pub cluster: String,
}

/// An address without a known member.
#[derive(Debug, Serialize, Deserialize)]
pub struct UnansweredRow {
    /// The endpoint; for an SRV record without targets, the record's name.
    pub endpoint: String,
    /// The IP address of the endpoint's name.
    pub at: Option<String>,
    /// The error, in the words of its source.
    pub why: String,
}

impl ClusterStatus {
    pub(super) fn of(members: &Membership, auth: AuthSetting) -> Self {
        Self {
            id: members.cluster.map(|id| id.to_string()),
            auth: match auth {
                AuthSetting::Unknown => None,
                AuthSetting::On => Some("on".into()),
                AuthSetting::Off => Some("off".into()),
            },
            leader: members.leader.map(|id| id.to_string()),
            raft_term: Some(members.term).filter(|term| *term > 0),
        }
    }
}

impl MemberRow {
    pub(super) fn of(member: &Member, members: &Membership) -> Self {
        let store_status = member.store_status.as_deref();
        Self {
            endpoint: member.endpoint.to_string(),
            id: member.id.to_string(),
            name: (*member.name).to_owned(),
            version: member.version.map(|version| version.to_string()),
            storage_version: store_status
                .and_then(|store_status| Some(store_status.storage_version.as_deref()?.to_owned())),
            db_size: store_status.map(|store_status| store_status.db_size),
            db_size_in_use: store_status.map(|store_status| store_status.db_in_use),
            db_size_quota: store_status.and_then(|store_status| store_status.db_quota),
            is_leader: members.leader == Some(member.id),
            is_learner: member.role == Role::Learner,
            raft_term: Some(member.term).filter(|term| *term > 0),
            raft_index: store_status.map(|store_status| store_status.raft_index),
            raft_applied_index: store_status.map(|store_status| store_status.applied),
            errors: store_status.map(|store_status| store_status.errors.to_vec()).unwrap_or_default(),
            ready: member.is_ready(),
            why: unready_reason_of(member),
            raft_lag: members.lag(member),
            status_micros: store_status
                .map(|store_status| u64::try_from(store_status.took.as_micros()).unwrap_or(u64::MAX)),
            load: MemberLoadRow::of(member),
        }
    }
}

impl AbsentRow {
    pub(super) fn of(absent: &AbsentMember) -> Self {
        let why = absent.why.text().to_owned();
        Self { id: absent.id.to_string(), name: (*absent.name).to_owned(), why }
    }
}

impl UnansweredRow {
    pub(super) fn of(unanswered: &UnansweredAddress) -> Self {
        let UnansweredAddress { endpoint, at, why, .. } = unanswered;
        let endpoint = if endpoint.port == 0 { endpoint.host.clone() } else { endpoint.to_string() };
        Self { endpoint, at: at.map(|at| at.to_string()), why: (**why).to_owned() }
    }
}

fn unready_reason_of(member: &Member) -> Option<String> {
    match member.fitness(Instant::now()) {
        Fitness::InMaintenance => Some("is spared: it is being defragmented".into()),
        // With auth on, a learner does not disclose its cluster id.
        Fitness::Unready(UnreadyReason::UnverifiedCluster) if member.role == Role::Learner => {
            Some(UnreadyReason::Learner.to_string())
        }
        Fitness::Unready(reason) => Some(reason.to_string()),
        Fitness::Suspected => Some("a connection to it was lost a moment ago".into()),
        Fitness::Lagging | Fitness::Ejected(_) | Fitness::Fit => None,
    }
}

impl fmt::Display for ReplicaStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { replica, cluster, members, absent, foreign, unanswered } = self;
        let state = match replica.state {
            ReplicaState::Serving => "serving",
            ReplicaState::Degraded => "degraded",
            ReplicaState::NotReady => "not ready",
            ReplicaState::Draining => "draining",
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

fn cell_text<T: ToString>(value: Option<T>) -> String {
    value.map(|value| value.to_string()).unwrap_or_default()
}

/// The table of `etcdctl endpoint status -w table`.
fn etcds_view(members: &[MemberRow]) -> TerminalTable {
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
    let mut table = TerminalTable::new(&head);
    for row in members {
        table.row([
            row.endpoint.clone(),
            row.id.clone(),
            cell_text(row.version.as_ref()),
            cell_text(row.db_size.map(size)),
            cell_text(row.db_size_in_use.map(size)),
            row.is_leader.to_string(),
            row.is_learner.to_string(),
            cell_text(row.raft_term),
            cell_text(row.raft_index),
            cell_text(row.raft_applied_index),
            row.errors.join(", "),
        ]);
    }
    table
}

/// The table of Keyward's own measurements.
fn our_view(members: &[MemberRow]) -> TerminalTable {
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
    let mut table = TerminalTable::new(&head);
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
            cell_text(row.load.latency_micros.map(millis)),
            cell_text(row.status_micros.map(millis)),
            cell_text(row.raft_lag),
            cell_text(row.why.as_ref()),
        ]);
    }
    table
}
