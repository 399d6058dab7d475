//! `keyward status`: one replica's view of itself and of the members.
//!
//! Owns: the field names used by scripts, and the table for a terminal. Must not know: the source of any
//! value. Invariants: an unknown value is null in JSON and an empty cell in the table, never zero; ids are
//! hexadecimal, as in etcdctl.

use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::member_figures::alarms_of;
use super::table::{TableColumn, TableWidth, TerminalTable, size};
use keyward_cluster::membership::{
    AbsentMember, AuthSetting, Fitness, Member, Membership, Role, UnansweredAddress, UnreadyReason,
};
use keyward_telemetry::conditions::StandingCondition;
use keyward_telemetry::printable::escaped;

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
    /// Conditions that the log tells now.
    #[serde(default)]
    pub warned: Vec<WarnedRow>,
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
    /// alone are served; or calls with audit records are refused for a sink.
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
    /// Alarms of the member itself, as told by any member: `"nospace"`, `"corrupt"`.
    #[serde(default)]
    pub alarms: Vec<String>,
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

/// A condition that the log tells, and that holds.
#[derive(Debug, Serialize, Deserialize)]
pub struct WarnedRow {
    /// Name of the condition.
    pub condition: String,
    /// `"error"` or `"warn"`, as in the log.
    pub level: String,
    /// Message of the record.
    pub message: String,
    /// Number of records since the condition began.
    pub records: u64,
    /// Seconds since the last record.
    pub last_seconds: u64,
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
            alarms: alarms_of(members, member).into_iter().map(str::to_owned).collect(),
            ready: member.is_ready(),
            why: unready_reason_of(member),
            raft_lag: members.lag(member),
            status_micros: store_status
                .map(|store_status| u64::try_from(store_status.took.as_micros()).unwrap_or(u64::MAX)),
            load: MemberLoadRow::of(member),
        }
    }
}

impl MemberRow {
    /// True if the member gets every call that it could serve.
    #[must_use]
    pub fn gets_calls(&self) -> bool {
        self.ready && !self.load.ejected
    }

    /// The alarms of the member, and why it gets no calls.
    #[must_use]
    pub fn why_text(&self) -> String {
        why_not(self.alarms.iter().map(String::as_str), self.why.as_deref())
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

impl WarnedRow {
    pub(super) fn of(standing: &StandingCondition) -> Self {
        Self {
            condition: standing.row.name.to_owned(),
            level: if standing.is_error { "error" } else { "warn" }.to_owned(),
            message: standing.row.message.to_owned(),
            records: standing.records,
            last_seconds: standing.last.as_secs(),
        }
    }

    fn line(&self) -> String {
        let Self { condition, level, records, last_seconds, .. } = self;
        let times = if *records == 1 { "once".to_owned() } else { format!("{records} times, last") };
        format!("logged: {level} {condition}, {times} {last_seconds} s ago")
    }
}

fn unready_reason_of(member: &Member) -> Option<String> {
    match member.fitness(Instant::now()) {
        Fitness::InMaintenance if member.maintenance.is_paused() => {
            Some("is paused by an operator (keyward resume)".into())
        }
        Fitness::InMaintenance => Some("is spared: it is being defragmented".into()),
        // With auth on, a learner does not disclose its cluster id.
        Fitness::Unready(UnreadyReason::UnverifiedCluster) if member.role == Role::Learner => {
            Some(UnreadyReason::Learner.to_string())
        }
        Fitness::Unready(reason) => Some(reason.to_string()),
        Fitness::Suspected => Some("a connection to it was lost a moment ago".into()),
        Fitness::Lagging => {
            Some("lags too far behind (RAFT LAG): gets no calls that others can serve".into())
        }
        Fitness::Ejected(why) => {
            Some(format!("is ejected, {}: gets no calls that others can serve", why.name()))
        }
        Fitness::Fit => None,
    }
}

impl ReplicaStatus {
    /// The replica's state in one line.
    #[must_use]
    pub fn line(&self) -> String {
        self.replica.line()
    }

    /// The report as text for a terminal.
    #[must_use]
    pub fn text(&self, width: TableWidth) -> String {
        let Self { replica, cluster, members, absent, foreign, unanswered, warned } = self;
        let mut lines = vec![replica.line(), cluster.line()];
        let tables = [etcds_view(members, width), our_view(members, width)];
        lines.extend(tables.map(|table| table.to_string().trim_end().to_owned()));
        lines.extend(absent.iter().map(|AbsentRow { id, name, why }| {
            let name = if name.is_empty() { "without a name" } else { name };
            format!("absent: {id} ({}) {why}", escaped(name))
        }));
        lines.extend(foreign.iter().map(|ForeignRow { endpoint, cluster }| {
            format!("foreign: at {endpoint} cluster {cluster} answers")
        }));
        lines.extend(unanswered.iter().map(|UnansweredRow { endpoint, at, why }| {
            let at = at.as_ref().map(|at| format!(" ({at})")).unwrap_or_default();
            format!("unanswered: {}{at}: {}", escaped(endpoint), escaped(why))
        }));
        lines.extend(warned.iter().map(WarnedRow::line));
        if !warned.is_empty() {
            lines.push("what of it still holds, and what to do: keyward doctor".into());
        }
        lines.join("\n") + "\n"
    }
}

impl ReplicaState {
    fn text(self) -> &'static str {
        match self {
            Self::Serving => "serving",
            Self::Degraded => "degraded",
            Self::NotReady => "not ready",
            Self::Draining => "draining",
        }
    }
}

impl Replica {
    fn line(&self) -> String {
        let state = self.state.text();
        let why = self.why.as_ref().filter(|why| *why != state);
        format!(
            "keyward {}: {state}{}; {} connections, {} calls, {} streams, {} sessions seen",
            self.version,
            why.map(|why| format!(" ({why})")).unwrap_or_default(),
            self.connections,
            self.calls,
            self.streams,
            self.sessions
        )
    }
}

impl ClusterStatus {
    fn line(&self) -> String {
        let unknown = || "unknown".to_owned();
        format!(
            "cluster {}: auth {}, leader {}, raft term {}",
            self.id.clone().unwrap_or_else(unknown),
            self.auth.clone().unwrap_or_else(unknown),
            self.leader.clone().unwrap_or_else(unknown),
            self.raft_term.map_or_else(unknown, |term| term.to_string())
        )
    }
}

fn cell_text<T: ToString>(value: Option<T>) -> String {
    value.map(|value| value.to_string()).unwrap_or_default()
}

fn millis(micros: u64) -> String {
    format!("{}.{} ms", micros / 1000, micros % 1000 / 100)
}

/// The column and its cell of one row; the flag is true for a column of a wide table only.
type MemberColumn = (TableColumn, bool, fn(&MemberRow) -> String);

fn member_table(columns: &[MemberColumn], members: &[MemberRow], width: TableWidth) -> TerminalTable {
    let shown = || columns.iter().filter(|(_, is_wide, _)| width == TableWidth::Wide || !is_wide);
    let heads: Vec<TableColumn> = shown().map(|(head, ..)| *head).collect();
    let mut table = TerminalTable::new(&heads, width);
    for row in members {
        table.row(shown().map(|(.., cell)| cell(row)));
    }
    table
}

/// The table of `etcdctl endpoint status -w table`.
fn etcds_view(members: &[MemberRow], width: TableWidth) -> TerminalTable {
    const COLUMNS: [MemberColumn; 11] = [
        (TableColumn::exact("ENDPOINT", 1), false, |row| row.endpoint.clone()),
        (TableColumn::exact("ID", 7), false, |row| row.id.clone()),
        (TableColumn::exact("VERSION", 6), false, |row| cell_text(row.version.as_ref())),
        (TableColumn::number("DB SIZE", 3), false, |row| cell_text(row.db_size.map(size))),
        (TableColumn::number("IN USE", 4), false, |row| cell_text(row.db_size_in_use.map(size))),
        (TableColumn::exact("LEADER", 2), false, |row| row.is_leader.to_string()),
        (TableColumn::exact("LEARNER", 8), true, |row| row.is_learner.to_string()),
        (TableColumn::number("RAFT TERM", 9), true, |row| cell_text(row.raft_term)),
        (TableColumn::number("RAFT INDEX", 10), true, |row| cell_text(row.raft_index)),
        (TableColumn::number("RAFT APPLIED INDEX", 11), true, |row| cell_text(row.raft_applied_index)),
        (TableColumn::text("ERRORS", 5), false, |row| row.errors.join(", ")),
    ];
    member_table(&COLUMNS, members, width)
}

fn ready_text(row: &MemberRow) -> String {
    ready_word(row.ready, row.load.ejected).to_owned()
}

/// The cell READY of a member, the same in every table: an ejected member gets only calls that no other
/// member can serve.
pub(super) fn ready_word(is_ready: bool, is_ejected: bool) -> &'static str {
    match (is_ready, is_ejected) {
        (true, true) => "ejected",
        (true, false) => "true",
        (false, _) => "false",
    }
}

/// The cell WHY NOT of a member, the same in every table: its alarms, and why it gets no calls.
pub(super) fn why_not<'t>(alarms: impl IntoIterator<Item = &'t str>, why: Option<&'t str>) -> String {
    let alarms = alarms.into_iter().map(|alarm| -> &'t str {
        match alarm {
            "nospace" => "alarm NOSPACE: the cluster refuses writes",
            "corrupt" => "alarm CORRUPT: its data differ",
            _ => "an alarm",
        }
    });
    alarms.chain(why).collect::<Vec<_>>().join("; ")
}

/// The table of Keyward's own measurements.
fn our_view(members: &[MemberRow], width: TableWidth) -> TerminalTable {
    const COLUMNS: [MemberColumn; 12] = [
        (TableColumn::exact("ID", 9), true, |row| row.id.clone()),
        (TableColumn::exact("NAME", 1), false, |row| row.name.clone()),
        (TableColumn::exact("READY", 2), false, ready_text),
        (TableColumn::exact("EJECTED", 10), true, |row| row.load.ejected.to_string()),
        (TableColumn::number("IN FLIGHT", 5), false, |row| row.load.in_flight.to_string()),
        (TableColumn::number("WATCH", 6), false, |row| row.load.streams.watch.to_string()),
        (TableColumn::number("KEEPALIVE", 7), false, |row| row.load.streams.keepalive.to_string()),
        (TableColumn::number("OTHER STREAMS", 11), true, |row| row.load.streams.other.to_string()),
        (TableColumn::number("LATENCY", 4), false, |row| cell_text(row.load.latency_micros.map(millis))),
        (TableColumn::number("STATUS TOOK", 12), true, |row| cell_text(row.status_micros.map(millis))),
        (TableColumn::number("RAFT LAG", 8), false, |row| cell_text(row.raft_lag)),
        (TableColumn::text("WHY NOT", 3), false, MemberRow::why_text),
    ];
    member_table(&COLUMNS, members, width)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_fits_a_terminal_unless_a_wide_one_is_wanted() {
        let member = |number: u64| MemberRow {
            endpoint: format!("https://etcd-{number}.internal.example.com:2379"),
            id: "fc1a52c693549432".into(),
            name: format!("etcd-{number}.internal.example.com"),
            version: Some("3.5.35".into()),
            storage_version: None,
            db_size: Some(8_123_456_789),
            db_size_in_use: Some(7_123_456_789),
            db_size_quota: None,
            is_leader: number == 1,
            is_learner: false,
            raft_term: Some(1234),
            raft_index: Some(123_456_789),
            raft_applied_index: Some(123_456_789),
            errors: vec!["memberID:18163123 alarm:NOSPACE".into()],
            alarms: vec!["nospace".into()],
            ready: false,
            why: Some("a connection to it was lost a moment ago".into()),
            raft_lag: Some(123_456),
            status_micros: Some(123_456),
            load: MemberLoadRow { latency_micros: Some(1_234_567), ..MemberLoadRow::default() },
        };
        let cluster = ClusterStatus { id: None, auth: None, leader: None, raft_term: None };
        let replica = Replica {
            version: "0.1.0".into(),
            state: ReplicaState::Serving,
            why: None,
            connections: 12,
            calls: 3,
            streams: 41,
            sessions: 12,
        };
        let members = (1..=3).map(member).collect();
        let (absent, foreign, unanswered) = (Vec::new(), Vec::new(), Vec::new());
        let warned = Vec::new();
        let status = ReplicaStatus { replica, cluster, members, absent, foreign, unanswered, warned };
        let widest = |text: String| text.lines().map(|line| line.chars().count()).max().unwrap();
        for width in [60, 80, 100, 200] {
            let text = status.text(TableWidth::Terminal(width));
            let tables = text.lines().skip(2).collect::<Vec<_>>().join("\n");
            assert!(widest(tables.clone()) <= width.into(), "{tables}");
            // The names and addresses are whole: an operator copies them.
            assert!(tables.contains("https://etcd-2.internal.example.com:2379"), "{tables}");
            assert!(tables.lines().any(|line| line.starts_with("etcd-3.internal.example.com  false")));
        }
        let wide = status.text(TableWidth::Wide);
        assert!(wide.contains("alarm NOSPACE: the cluster refuses writes; a connection to it"), "{wide}");
        assert!(wide.contains("RAFT APPLIED INDEX") && wide.contains("STATUS TOOK"), "{wide}");
    }
}
