//! What is going on in this process: one model for the console, a page and programs.
//!
//! Owns: the topics, the rows of each, and the schema's version. Must not know: how rows are printed or
//! sorted. Invariants: a view reads the state by which calls are served, and changes nothing; the field names
//! of rows are stable within a schema version; texts of clients are escaped; a view holds no value of a key,
//! no token and no password.

mod process_rows;
mod shadow_rows;

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use tokio::time::Instant;

use super::AdminState;
use super::other_replicas::OtherReplicas;
use keyward_access::usage::register::UsageRegister;
use keyward_base::published::Published;
use keyward_config::Config;
use keyward_config::reload_request::ReloadState;
use keyward_downstream::connection_table::ConnectionTable;
use keyward_downstream::session::Sealer;
use keyward_gateway::shard_questions::{ShardQuestion, ShardQuestions, ShardSilent};
use keyward_gateway::shard_rows::{ClientRow, HotPrefixRow, WatchRow};

/// Version of the field names and their meaning: raised by a change that a program could notice, except for
/// further fields.
const SCHEMA_VERSION: u32 = 1;

/// Rows of one view. A view with more rows names the number of rows left out.
const MOST_ROWS: usize = 100_000;

/// What can be asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ViewTopic {
    /// Client connections.
    Clients,
    /// Watches, by client stream and range.
    Watches,
    /// Leases kept alive by clients.
    Leases,
    /// Waiting Lock and Campaign calls.
    Locks,
    /// The key prefixes with the most calls, estimated.
    Hot,
    /// The slowest calls of the last five minutes.
    Slow,
    /// Sessions seen by the replica.
    Sessions,
    /// The members, as in `keyward status`.
    Members,
    /// Client connections, added up by etcd user.
    Users,
    /// Limits and their use.
    Limits,
    /// Grants that peers lack, where the policy only counts denials.
    Shadow,
    /// Certificates of the configuration.
    Certs,
    /// The configuration in force, in outline.
    Config,
    /// The replica itself, and the replicas of `admin.replicas`.
    Replicas,
    /// Versions of Keyward and of the members.
    Version,
}

impl ViewTopic {
    /// All topics with their names.
    pub const ALL: [(&'static str, Self); 15] = [
        ("clients", Self::Clients),
        ("watches", Self::Watches),
        ("leases", Self::Leases),
        ("locks", Self::Locks),
        ("hot", Self::Hot),
        ("slow", Self::Slow),
        ("sessions", Self::Sessions),
        ("members", Self::Members),
        ("users", Self::Users),
        ("limits", Self::Limits),
        ("shadow", Self::Shadow),
        ("certs", Self::Certs),
        ("config", Self::Config),
        ("replicas", Self::Replicas),
        ("version", Self::Version),
    ];

    /// The topic with this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().find(|(known, _)| *known == name).map(|(_, topic)| *topic)
    }
}

/// A row: values by field name.
pub type ViewRow = Map<String, Value>;

/// The rows of one topic at one moment.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct View {
    /// Version of the field names and their meaning, in the answering process.
    pub schema_version: u32,
    /// The topic.
    pub topic: ViewTopic,
    /// The time of the view, as RFC 3339.
    pub taken_at: String,
    /// Seconds since the process began, for rates between two views.
    pub uptime_seconds: f64,
    /// The rows, in no order.
    pub rows: Vec<ViewRow>,
    /// Rows left out because there are too many.
    pub left_out: usize,
    /// True if the rows are of several replicas: each has the field `replica`, and a table without rows has
    /// the column.
    #[serde(skip)]
    pub is_of_replicas: bool,
}

/// Reads views.
pub struct Viewer {
    /// The members, the metrics, the status.
    pub state: Arc<AdminState>,
    /// The shards.
    pub questions: Arc<ShardQuestions>,
    /// The configuration in force.
    pub config: Arc<Published<Config>>,
    /// The outcome of the last reload.
    pub reload_state: Arc<Published<ReloadState>>,
    /// The limits on usage.
    pub usage: Arc<UsageRegister>,
    /// The table of client connections.
    pub connections: Arc<ConnectionTable>,
    /// Knows the recent sessions.
    pub sealer: Arc<Sealer>,
    /// The other replicas.
    pub others: OtherReplicas,
    /// Begin of the process.
    pub started: std::time::Instant,
}

/// Sums over the connections of one etcd user.
#[derive(Default, Serialize)]
struct UserRow {
    /// The etcd user; null for connections without an identified call, or without an etcd user.
    user: Option<String>,
    connections: u64,
    calls: u64,
    failed: u64,
    open: u64,
    bytes_in: u64,
    bytes_out: u64,
    watches: u64,
    leases: u64,
    unread_bytes: u64,
}

impl Viewer {
    /// The view of a topic now.
    ///
    /// # Errors
    /// A shard has not answered in time.
    pub async fn view(&self, topic: ViewTopic) -> Result<View, ShardSilent> {
        let mut rows = match topic {
            ViewTopic::Clients => rows_of(&self.clients().await?),
            ViewTopic::Users => rows_of(&users(self.clients().await?)),
            ViewTopic::Watches => {
                let mut watches: Vec<WatchRow> = self.questions.ask(ShardQuestion::Watches).await?;
                watches.sort_by_key(|row| std::cmp::Reverse(row.watches));
                rows_of(&watches)
            }
            ViewTopic::Leases => rows_of(&self.questions.ask(ShardQuestion::Leases).await?),
            ViewTopic::Locks => rows_of(&self.questions.ask(ShardQuestion::Locks).await?),
            ViewTopic::Hot => rows_of(&hot(self.questions.ask(ShardQuestion::HotPrefixes).await?)),
            ViewTopic::Slow => rows_of(&self.questions.ask(ShardQuestion::SlowCalls).await?),
            ViewTopic::Sessions => rows_of(&self.sessions()),
            ViewTopic::Members => self.members(),
            ViewTopic::Limits => rows_of(&self.limits()),
            ViewTopic::Shadow => rows_of(&shadow_rows::joined(
                self.questions.ask(ShardQuestion::Shadow).await?,
                Instant::now(),
            )),
            ViewTopic::Certs => rows_of(&self.certificates()),
            ViewTopic::Config => rows_of(&self.configuration()),
            ViewTopic::Replicas => rows_of(&self.others.beside(self.replica()).await),
            ViewTopic::Version => rows_of(&self.versions()),
        };
        let left_out = rows.len().saturating_sub(MOST_ROWS);
        rows.truncate(MOST_ROWS);
        Ok(View {
            schema_version: SCHEMA_VERSION,
            topic,
            taken_at: moment(OffsetDateTime::now_utc()),
            uptime_seconds: self.started.elapsed().as_secs_f64(),
            rows,
            left_out,
            is_of_replicas: false,
        })
    }

    async fn clients(&self) -> Result<Vec<ClientRow>, ShardSilent> {
        let mut clients: Vec<ClientRow> = self.questions.ask(ShardQuestion::Clients).await?;
        clients.sort_by_key(|row| std::cmp::Reverse(row.calls));
        Ok(clients)
    }
}

fn users(clients: Vec<ClientRow>) -> Vec<UserRow> {
    let mut users: BTreeMap<Option<String>, UserRow> = BTreeMap::new();
    for client in clients {
        let row = users.entry(client.user).or_default();
        row.connections += 1;
        row.calls += client.calls;
        row.failed += client.failed;
        row.open += client.open;
        row.bytes_in += client.bytes_in;
        row.bytes_out += client.bytes_out;
        row.watches += client.watches;
        row.leases += client.leases;
        row.unread_bytes += client.unread_bytes;
    }
    users.into_iter().map(|(user, row)| UserRow { user, ..row }).collect()
}

/// Joins the prefixes of all shards.
fn hot(of_shards: Vec<HotPrefixRow>) -> Vec<HotPrefixRow> {
    let mut prefixes: BTreeMap<String, HotPrefixRow> = BTreeMap::new();
    for row in of_shards {
        match prefixes.entry(row.prefix.clone()) {
            Entry::Vacant(entry) => _ = entry.insert(row),
            Entry::Occupied(mut entry) => {
                let known = entry.get_mut();
                known.calls += row.calls;
                known.calls_at_least += row.calls_at_least;
                known.seconds = known.seconds.max(row.seconds);
            }
        }
    }
    let rate = |row: HotPrefixRow| {
        let time = f64::from(u32::try_from(row.seconds.max(1)).unwrap_or(u32::MAX));
        let calls = f64::from(u32::try_from(row.calls).unwrap_or(u32::MAX));
        HotPrefixRow { calls_per_second: (calls / time * 10.0).round() / 10.0, ..row }
    };
    prefixes.into_values().map(rate).collect()
}

fn rows_of<T: Serialize>(rows: &[T]) -> Vec<ViewRow> {
    let row = |row: &T| match serde_json::to_value(row) {
        Ok(Value::Object(row)) => Some(row),
        Ok(_) | Err(_) => None,
    };
    rows.iter().filter_map(row).collect()
}

/// A time as RFC 3339, to the second.
fn moment(at: OffsetDateTime) -> String {
    at.replace_nanosecond(0).unwrap_or(at).format(&Rfc3339).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(client: u64, user: Option<&str>, calls: u64) -> ClientRow {
        ClientRow {
            client,
            address: None,
            listener: "clients".into(),
            user: user.map(str::to_owned),
            peer: None,
            blocked_login: None,
            user_agent: None,
            age_seconds: 7,
            calls,
            failed: 1,
            open: 2,
            bytes_in: 10,
            bytes_out: 100,
            watches: 3,
            leases: 1,
            unread_bytes: 0,
            last_error: None,
            last_error_by: None,
            last_error_rule: None,
            last_error_seconds: None,
            kicked: false,
        }
    }

    #[test]
    fn connections_are_added_up_by_user_and_nobody_is_a_user_of_its_own() {
        let clients = vec![client(1, Some("alice"), 5), client(2, None, 1), client(3, Some("alice"), 6)];
        let rows = rows_of(&users(clients));
        assert_eq!(rows.len(), 2);
        assert_eq!((&rows[0]["user"], &rows[0]["connections"]), (&Value::Null, &1.into()));
        let alice = &rows[1];
        assert_eq!((&alice["user"], &alice["connections"]), (&"alice".into(), &2.into()));
        assert_eq!((&alice["calls"], &alice["watches"]), (&11.into(), &6.into()));
        assert_eq!((&alice["bytes_out"], &alice["failed"]), (&200.into(), &2.into()));
    }

    #[test]
    fn prefixes_of_all_shards_are_joined() {
        let row = |prefix: &str, calls, seconds| HotPrefixRow {
            prefix: prefix.into(),
            calls,
            calls_at_least: calls / 2,
            calls_per_second: 0.0,
            seconds,
        };
        let joined = rows_of(&hot(vec![row("/a/", 32, 50), row("/b/", 16, 50), row("/a/", 68, 100)]));
        assert_eq!(joined.len(), 2);
        assert_eq!((&joined[0]["prefix"], &joined[0]["calls"]), (&"/a/".into(), &100.into()));
        assert_eq!((&joined[0]["calls_at_least"], &joined[0]["calls_per_second"]), (&50.into(), &1.0.into()));
    }

    #[test]
    fn every_topic_has_a_name_which_is_its_name_in_json() {
        for (name, topic) in ViewTopic::ALL {
            assert_eq!(ViewTopic::named(name), Some(topic));
            assert_eq!(serde_json::to_value(topic).unwrap(), name);
        }
        assert_eq!(ViewTopic::named("everything"), None);
    }
}
