//! Views on a terminal: columns, order, conditions, rates.
//!
//! Owns: the columns of each topic, `--sort`, `--filter`, and the rates between two views. Must not know: the
//! source of a view. Invariants: a field of `--sort` and `--filter` is a field of the rows, so an unknown one
//! is told with the known ones; rows without a value come last in any order.

use std::cmp::Ordering;
use std::collections::{BTreeSet, HashMap};
use std::str::FromStr;

use serde_json::Value;

use super::column_layout::shortened;
use super::status::{ready_word, why_not};
use super::table::{ColumnKind, TableColumn, TableWidth, TerminalTable, size};
use super::view::{View, ViewRow, ViewTopic};
use CellForm::{Age, Bytes, Count, Exact, Micros, Rate, Text};
use Shown::{Rank, WideOnly};

/// The form of a cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CellForm {
    /// A text, which may be shortened.
    Text,
    /// A text that is worthless in part: an address, an id, a time.
    Exact,
    /// A whole number.
    Count,
    /// Bytes.
    Bytes,
    /// Something per second.
    Rate,
    /// Seconds.
    Age,
    /// Microseconds.
    Micros,
}

/// The tables with a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shown {
    /// Every table with room for it. The column with the highest rank is left out first.
    Rank(u8),
    /// Wide tables.
    WideOnly,
}

/// A column: field of the rows, head, form.
pub type ViewColumn = (&'static str, &'static str, CellForm, Shown);

/// The first column of a view of several replicas.
const REPLICA_COLUMN: ViewColumn = ("replica", "REPLICA", Exact, Rank(0));

/// Fields with keys that clients choose: a table in a pipe has their first [`LONGEST_KEYS`] characters,
/// because one long binary key would make every row as long.
const KEY_FIELDS: [&str; 4] = ["ranges", "range", "prefix", "keys"];
const LONGEST_KEYS: usize = 120;

/// A condition on rows: `user=alice`, `range~/registry/`, `watches>100`, `calls<5`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowFilter {
    field: String,
    comparison: Comparison,
    value: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Comparison {
    Equal,
    Contains,
    Above,
    Below,
}

/// The text is no condition, or names a field that the rows do not have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ViewArgumentError {
    /// The text is no condition.
    #[error("{0:?} is no condition: FIELD=TEXT, FIELD~PART, FIELD>NUMBER or FIELD<NUMBER")]
    NoCondition(String),
    /// The rows have no such field.
    #[error("no field {0:?}: {1}")]
    UnknownField(String, String),
}

/// Columns of `keyward show TOPIC`.
#[must_use]
pub const fn columns(topic: ViewTopic) -> &'static [ViewColumn] {
    match topic {
        ViewTopic::Clients => &CLIENT_COLUMNS,
        ViewTopic::Watches => &[
            ("client", "CLIENT", Count, Rank(1)),
            ("address", "ADDRESS", Exact, WideOnly),
            ("user", "USER", Text, Rank(2)),
            ("range", "RANGE", Text, Rank(3)),
            ("watches", "WATCHES", Count, Rank(4)),
            ("live", "LIVE", Count, Rank(9)),
            ("events", "EVENTS", Count, Rank(8)),
            ("events_per_second", "EVENTS/S", Rate, Rank(5)),
            ("behind", "BEHIND", Count, Rank(6)),
            ("held_bytes", "HELD", Bytes, Rank(7)),
            ("client_is_behind", "CLIENT BEHIND", Text, WideOnly),
        ],
        ViewTopic::Leases => &[
            ("client", "CLIENT", Count, Rank(2)),
            ("address", "ADDRESS", Exact, Rank(4)),
            ("user", "USER", Text, Rank(3)),
            ("lease", "LEASE", Exact, Rank(1)),
            ("ttl", "TTL", Age, Rank(5)),
            ("renewed_seconds", "RENEWED", Age, Rank(6)),
            ("renewals", "RENEWALS", Count, Rank(7)),
        ],
        ViewTopic::Locks => &[
            ("client", "CLIENT", Count, Rank(2)),
            ("address", "ADDRESS", Exact, Rank(7)),
            ("user", "USER", Text, Rank(3)),
            ("method", "METHOD", Text, Rank(6)),
            ("name", "NAME", Text, Rank(1)),
            ("lease", "LEASE", Exact, Rank(5)),
            ("waiting_seconds", "WAITING", Age, Rank(4)),
        ],
        ViewTopic::Hot => &[
            ("prefix", "PREFIX", Text, Rank(1)),
            ("calls", "CALLS", Count, Rank(2)),
            ("calls_at_least", "AT LEAST", Count, Rank(5)),
            ("calls_per_second", "CALLS/S", Rate, Rank(3)),
            ("seconds", "OF THE LAST", Age, Rank(4)),
        ],
        ViewTopic::Slow => &SLOW_COLUMNS,
        ViewTopic::Members => &MEMBER_COLUMNS,
        ViewTopic::Users => &[
            ("user", "USER", Text, Rank(1)),
            ("connections", "CONNECTIONS", Count, Rank(6)),
            ("calls", "CALLS", Count, Rank(2)),
            ("calls_per_second", "CALLS/S", Rate, Rank(3)),
            ("failed", "FAILED", Count, Rank(4)),
            ("open", "OPEN", Count, Rank(8)),
            ("bytes_in", "IN", Bytes, Rank(9)),
            ("bytes_out", "OUT", Bytes, Rank(10)),
            ("watches", "WATCHES", Count, Rank(5)),
            ("leases", "LEASES", Count, Rank(7)),
            ("unread_bytes", "UNREAD", Bytes, WideOnly),
        ],
        topic => process_columns(topic),
    }
}

const CLIENT_COLUMNS: [ViewColumn; 24] = [
    ("client", "CLIENT", Count, Rank(1)),
    ("address", "ADDRESS", Exact, Rank(3)),
    ("user", "USER", Text, Rank(2)),
    ("peer", "PEER", Text, WideOnly),
    ("blocked_login", "BLOCKED LOGIN", Text, WideOnly),
    ("listener", "LISTENER", Text, WideOnly),
    ("user_agent", "USER-AGENT", Text, WideOnly),
    ("age_seconds", "AGE", Age, Rank(9)),
    ("calls", "CALLS", Count, Rank(5)),
    ("calls_per_second", "CALLS/S", Rate, Rank(4)),
    ("failed", "FAILED", Count, Rank(6)),
    ("open", "OPEN", Count, WideOnly),
    ("bytes_in", "IN", Bytes, Rank(10)),
    ("bytes_out", "OUT", Bytes, Rank(11)),
    ("bytes_in_per_second", "IN/S", Bytes, WideOnly),
    ("bytes_out_per_second", "OUT/S", Bytes, WideOnly),
    ("watches", "WATCHES", Count, Rank(7)),
    ("leases", "LEASES", Count, Rank(12)),
    ("unread_bytes", "UNREAD", Bytes, WideOnly),
    ("last_error", "LAST ERROR", Text, Rank(8)),
    ("last_error_by", "REFUSED BY", Text, WideOnly),
    ("last_error_rule", "RULE", Text, WideOnly),
    ("last_error_seconds", "ERROR AGE", Age, WideOnly),
    ("kicked", "KICKED", Text, WideOnly),
];

const SLOW_COLUMNS: [ViewColumn; 13] = [
    ("ended_seconds", "AGO", Age, Rank(9)),
    ("method", "METHOD", Text, Rank(1)),
    ("ranges", "RANGES", Text, Rank(5)),
    ("client", "CLIENT", Count, Rank(3)),
    ("address", "ADDRESS", Exact, WideOnly),
    ("user", "USER", Text, Rank(4)),
    ("member", "MEMBER", Exact, Rank(8)),
    ("attempts", "ATTEMPTS", Count, WideOnly),
    ("code", "CODE", Text, Rank(6)),
    ("took_micros", "TOOK", Micros, Rank(2)),
    ("before_micros", "BEFORE", Micros, Rank(10)),
    ("member_micros", "MEMBER TIME", Micros, Rank(7)),
    ("after_micros", "AFTER", Micros, Rank(11)),
];

const MEMBER_COLUMNS: [ViewColumn; 20] = [
    ("name", "NAME", Exact, Rank(1)),
    ("id", "ID", Exact, WideOnly),
    ("endpoint", "ENDPOINT", Exact, Rank(5)),
    ("version", "VERSION", Exact, Rank(11)),
    ("is_leader", "LEADER", Exact, Rank(3)),
    ("is_learner", "LEARNER", Exact, WideOnly),
    ("ready", "READY", Exact, Rank(2)),
    ("ejected", "EJECTED", Exact, WideOnly),
    ("in_flight", "IN FLIGHT", Count, Rank(7)),
    ("watch_streams", "WATCH", Count, Rank(10)),
    ("keepalive_streams", "KEEPALIVE", Count, WideOnly),
    ("other_streams", "OTHER", Count, WideOnly),
    ("latency_micros", "LATENCY", Micros, Rank(6)),
    ("status_micros", "STATUS TOOK", Micros, WideOnly),
    ("raft_lag", "LAG", Count, Rank(8)),
    ("db_size", "DB SIZE", Bytes, Rank(9)),
    ("db_size_in_use", "IN USE", Bytes, WideOnly),
    ("raft_applied_index", "APPLIED", Count, WideOnly),
    ("errors", "ERRORS", Text, WideOnly),
    ("why", "WHY NOT", Text, Rank(4)),
];

/// Columns of the topics about the process as a whole.
const fn process_columns(topic: ViewTopic) -> &'static [ViewColumn] {
    match topic {
        ViewTopic::Sessions => &[
            ("session", "SESSION", Exact, Rank(1)),
            ("issued_at", "ISSUED", Exact, Rank(4)),
            ("valid", "VALID", Exact, Rank(3)),
            ("peer", "PEER", Text, Rank(2)),
        ],
        ViewTopic::Limits => &[
            ("scope", "SCOPE", Text, Rank(5)),
            ("name", "NAME", Text, Rank(1)),
            ("limit", "LIMIT", Text, Rank(2)),
            ("used", "USED", Count, Rank(3)),
            ("allowed", "ALLOWED", Count, Rank(4)),
        ],
        ViewTopic::Shadow => &[
            ("peer", "PEER", Text, Rank(1)),
            ("action", "ACTION", Text, Rank(2)),
            ("keys", "KEYS", Text, Rank(3)),
            ("rule", "RULE", Text, WideOnly),
            ("method", "LAST METHOD", Text, Rank(7)),
            ("requests", "REQUESTS", Count, Rank(4)),
            ("since_seconds", "SINCE", Age, Rank(6)),
            ("last_seconds", "LAST", Age, Rank(5)),
            ("policy_generation", "POLICY", Text, WideOnly),
        ],
        ViewTopic::Certs => &[
            ("usage", "USE", Text, Rank(1)),
            ("name", "NAME", Text, Rank(2)),
            ("expires_at", "EXPIRES", Exact, Rank(4)),
            ("days_left", "DAYS LEFT", Count, Rank(3)),
            ("consequence", "CONSEQUENCE", Text, Rank(5)),
        ],
        ViewTopic::Config => &[
            ("key", "KEY", Exact, Rank(1)),
            ("value", "VALUE", Text, Rank(2)),
            ("restart_pending", "RESTART PENDING", Text, Rank(3)),
        ],
        ViewTopic::Replicas => &[
            ("host", "HOST", Exact, Rank(1)),
            ("address", "ADDRESS", Exact, Rank(4)),
            ("pid", "PID", Count, WideOnly),
            ("version", "VERSION", Exact, Rank(8)),
            ("state", "STATE", Text, Rank(2)),
            ("why", "WHY", Text, Rank(3)),
            ("started_at", "STARTED", Exact, Rank(10)),
            ("configuration", "CONFIGURATION", Exact, Rank(9)),
            ("connections", "CONNECTIONS", Count, Rank(5)),
            ("calls", "CALLS", Count, Rank(6)),
            ("streams", "STREAMS", Count, Rank(7)),
            ("sessions", "SESSIONS", Count, WideOnly),
            ("shards", "SHARDS", Count, WideOnly),
        ],
        _ => &[("part", "PART", Text, Rank(1)), ("version", "VERSION", Exact, Rank(2))],
    }
}

/// The order of rows without `--sort`: what an operator looks for stands at the top.
const fn default_order(topic: ViewTopic) -> &'static str {
    match topic {
        ViewTopic::Clients | ViewTopic::Users | ViewTopic::Hot => "calls",
        ViewTopic::Watches => "watches",
        ViewTopic::Leases => "renewals",
        ViewTopic::Locks => "waiting_seconds",
        ViewTopic::Slow => "took_micros",
        ViewTopic::Shadow => "requests",
        ViewTopic::Sessions => "peer",
        ViewTopic::Members => "name",
        ViewTopic::Limits => "scope",
        ViewTopic::Certs => "expires_at",
        ViewTopic::Config => "key",
        ViewTopic::Replicas => "host",
        ViewTopic::Version => "part",
    }
}

impl FromStr for RowFilter {
    type Err = ViewArgumentError;

    fn from_str(text: &str) -> Result<Self, ViewArgumentError> {
        let wrong = || ViewArgumentError::NoCondition(text.to_owned());
        let at = text.find(['=', '~', '>', '<']).ok_or_else(wrong)?;
        let (field, rest) = text.split_at(at);
        let (sign, value) = rest.split_at(1);
        let comparison = match sign {
            "=" => Comparison::Equal,
            "~" => Comparison::Contains,
            ">" => Comparison::Above,
            _ => Comparison::Below,
        };
        let is_number = value.parse::<f64>().is_ok();
        if field.is_empty() || (matches!(comparison, Comparison::Above | Comparison::Below) && !is_number) {
            return Err(wrong());
        }
        Ok(Self { field: field.to_owned(), comparison, value: value.to_owned() })
    }
}

impl RowFilter {
    /// The field of the condition.
    #[must_use]
    pub fn field(&self) -> &str {
        &self.field
    }

    fn holds(&self, row: &ViewRow) -> bool {
        let value = row.get(&self.field).unwrap_or(&Value::Null);
        let number = || Some((value.as_f64()?, self.value.parse().ok()?));
        match self.comparison {
            Comparison::Equal => text_of(value) == self.value,
            Comparison::Contains => text_of(value).contains(&self.value),
            Comparison::Above => number().is_some_and(|(value, bound): (f64, f64)| value > bound),
            Comparison::Below => number().is_some_and(|(value, bound): (f64, f64)| value < bound),
        }
    }
}

impl View {
    /// Keeps the rows for which all conditions hold, in the wanted order: numbers from the highest, texts
    /// from the first in the alphabet; `is_reversed` for the other way round.
    ///
    /// # Errors
    /// A field that the rows do not have.
    pub fn arrange(
        &mut self,
        order: Option<&str>,
        is_reversed: bool,
        filters: &[RowFilter],
    ) -> Result<(), ViewArgumentError> {
        let fields = self.fields();
        for field in filters.iter().map(|filter| filter.field.as_str()).chain(order) {
            if !fields.contains(field) {
                let known = fields.into_iter().collect::<Vec<_>>().join(", ");
                return Err(ViewArgumentError::UnknownField(field.to_owned(), known));
            }
        }
        self.rows.retain(|row| filters.iter().all(|filter| filter.holds(row)));
        let order = order.unwrap_or_else(|| default_order(self.topic));
        let value = |row: &ViewRow| row.get(order).cloned().unwrap_or(Value::Null);
        self.rows.sort_by(|a, b| compare(&value(a), &value(b), is_reversed));
        Ok(())
    }

    /// The fields of the rows. A topic without a row still has the fields of its columns.
    fn fields(&self) -> BTreeSet<String> {
        let replica = self.is_of_replicas.then_some(&REPLICA_COLUMN);
        let columns = replica.into_iter().chain(columns(self.topic)).map(|(field, ..)| (*field).to_owned());
        columns.chain(self.rows.iter().flat_map(|row| row.keys().cloned())).collect()
    }

    /// Adds rates per second since an earlier view of the same topic: `calls_per_second` and so on. A row
    /// that is new since then has no rate.
    pub fn add_rates(&mut self, earlier: &Self) {
        let time = self.uptime_seconds - earlier.uptime_seconds;
        let has_rates = matches!(self.topic, ViewTopic::Clients | ViewTopic::Users | ViewTopic::Watches);
        if time <= 0.0 || !has_rates {
            return;
        }
        let before: HashMap<String, &ViewRow> =
            earlier.rows.iter().map(|row| (identity(self.topic, row), row)).collect();
        for row in &mut self.rows {
            let Some(before) = before.get(&identity(self.topic, row)) else { continue };
            for field in ["calls", "bytes_in", "bytes_out", "events"] {
                let count = |row: &ViewRow| row.get(field).and_then(Value::as_f64);
                if let (Some(now), Some(then)) = (count(row), count(before)) {
                    let rate = ((now - then).max(0.0) / time * 10.0).round() / 10.0;
                    row.insert(format!("{field}_per_second"), rate.into());
                }
            }
        }
    }

    /// The rows as a table.
    #[must_use]
    pub fn table(&self, width: TableWidth) -> String {
        let has_rates = self.rows.iter().any(|row| row.keys().any(|field| field.ends_with("_per_second")));
        let is_shown = |(field, _, _, shown): &&ViewColumn| {
            (*shown != WideOnly || width == TableWidth::Wide)
                && (has_rates || !field.ends_with("_per_second"))
        };
        let replica = self.is_of_replicas.then_some(&REPLICA_COLUMN);
        let shown = columns(self.topic).iter().filter(is_shown);
        let shown: Vec<&ViewColumn> = replica.into_iter().chain(shown).collect();
        let heads: Vec<TableColumn> = shown.iter().map(|column| head_of(column)).collect();
        let mut table = TerminalTable::new(&heads, width);
        for row in &self.rows {
            table.row(shown.iter().map(|column| {
                let cell = cell_of(row, column);
                let is_cut = width == TableWidth::Uncut && KEY_FIELDS.contains(&column.0);
                if is_cut { shortened(&cell, LONGEST_KEYS) } else { cell }
            }));
        }
        match self.left_out {
            0 => table.to_string(),
            more => format!("{table}{more} rows more are left out\n"),
        }
    }
}

/// The head of a column in a table. A column of wide tables alone is less needed than any other.
pub(super) fn head_of((_, name, form, shown): &ViewColumn) -> TableColumn {
    let kind = match form {
        Text => ColumnKind::Text,
        Exact => ColumnKind::Exact,
        Count | Bytes | Rate | Age | Micros => ColumnKind::Number,
    };
    let rank = match shown {
        Rank(rank) => *rank,
        WideOnly => u8::MAX,
    };
    TableColumn { name, kind, rank }
}

/// The text of a row's cell. READY and WHY NOT of a member are told by several fields.
#[must_use]
pub fn cell_of(row: &ViewRow, (field, _, form, _): &ViewColumn) -> String {
    let is = |field: &str| row.get(field).and_then(Value::as_bool);
    match (*field, is("ready"), is("ejected"), row.get("alarms").and_then(Value::as_array)) {
        ("ready", Some(is_ready), Some(is_ejected), _) => ready_word(is_ready, is_ejected).to_owned(),
        ("why", _, _, Some(alarms)) => {
            why_not(alarms.iter().filter_map(Value::as_str), row.get("why").and_then(Value::as_str))
        }
        _ => cell_text(row.get(*field), *form),
    }
}

/// The text of a value.
#[must_use]
pub fn cell_text(value: Option<&Value>, form: CellForm) -> String {
    let Some(value) = value.filter(|value| !value.is_null()) else { return String::new() };
    let number = value.as_f64().unwrap_or_default().max(0.0);
    // A number of a row is far below 2^53.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped above, saturating")]
    let whole = number as u64;
    match form {
        Text | Exact | Count => text_of(value),
        Bytes => size(whole),
        Rate => format!("{number:.1}"),
        Age => age(whole),
        Micros => format!("{}.{} ms", whole / 1000, whole % 1000 / 100),
    }
}

/// The fields that make a row the same row in a later view.
fn identity(topic: ViewTopic, row: &ViewRow) -> String {
    let fields: &[&str] = match topic {
        ViewTopic::Users => &["user"],
        ViewTopic::Watches => &["client", "key", "range_end"],
        _ => &["client"],
    };
    let texts: Vec<String> =
        fields.iter().map(|field| text_of(row.get(*field).unwrap_or(&Value::Null))).collect();
    texts.join("\0")
}

fn compare(a: &Value, b: &Value, is_reversed: bool) -> Ordering {
    let turned = |order: Ordering| if is_reversed { order.reverse() } else { order };
    match (a, b) {
        (Value::Null, Value::Null) => Ordering::Equal,
        (Value::Null, _) => Ordering::Greater,
        (_, Value::Null) => Ordering::Less,
        (Value::Number(a), Value::Number(b)) => {
            turned(b.as_f64().partial_cmp(&a.as_f64()).unwrap_or(Ordering::Equal))
        }
        (a, b) => turned(text_of(a).cmp(&text_of(b))),
    }
}

fn text_of(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// Seconds in the two largest units.
fn age(seconds: u64) -> String {
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds}s"),
        (0, 0, _) => format!("{minutes}m{:02}s", seconds % 60),
        (0, _, _) => format!("{hours}h{:02}m", minutes % 60),
        _ => format!("{days}d{:02}h", hours % 24),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn view(topic: ViewTopic, rows: Value) -> View {
        let rows = serde_json::from_value(rows).expect("rows");
        let taken_at = "2026-01-01T00:00:00Z".to_owned();
        View {
            schema_version: 1,
            topic,
            taken_at,
            uptime_seconds: 10.0,
            rows,
            left_out: 0,
            is_of_replicas: false,
        }
    }

    fn clients() -> View {
        view(
            ViewTopic::Clients,
            json!([
                {"client": 1, "user": "alice", "address": "10.0.0.1:1", "calls": 5, "watches": 1},
                {"client": 2, "user": null, "address": "10.0.0.2:1", "calls": 70, "watches": 0},
                {"client": 3, "user": "bob", "address": "10.0.0.3:1", "calls": 6, "watches": 9000},
            ]),
        )
    }

    fn order(view: &View) -> Vec<u64> {
        view.rows.iter().filter_map(|row| row["client"].as_u64()).collect()
    }

    #[test]
    fn the_highest_number_stands_at_the_top_and_the_unknown_at_the_bottom() {
        for (field, is_reversed, expected) in [
            (None, false, [2, 3, 1]),
            (Some("watches"), false, [3, 1, 2]),
            (Some("watches"), true, [2, 1, 3]),
            (Some("user"), false, [1, 3, 2]),
            (Some("user"), true, [3, 1, 2]),
        ] {
            let mut view = clients();
            view.arrange(field, is_reversed, &[]).unwrap();
            assert_eq!(order(&view), expected, "{field:?} {is_reversed}");
        }
    }

    #[test]
    fn rows_are_kept_for_which_every_condition_holds() {
        for (filters, expected) in [
            (&["user=alice"][..], &[1][..]),
            (&["user="], &[2]),
            (&["address~10.0.0."], &[2, 3, 1]),
            (&["calls>5", "watches<10"], &[2]),
        ] {
            let filters: Vec<RowFilter> = filters.iter().map(|text| text.parse().unwrap()).collect();
            let mut view = clients();
            view.arrange(None, false, &filters).unwrap();
            assert_eq!(order(&view), expected, "{filters:?}");
        }
        for wrong in ["", "user", "=alice", "calls>many"] {
            assert!(wrong.parse::<RowFilter>().is_err(), "{wrong}");
        }
        let unknown = clients().arrange(Some("cals"), false, &[]).unwrap_err().to_string();
        assert!(unknown.contains("\"cals\"") && unknown.contains("calls, "), "{unknown}");
        let filter = "nobody=1".parse().unwrap();
        assert!(clients().arrange(None, false, &[filter]).is_err());
    }

    #[test]
    fn rates_are_between_two_views_of_the_same_row() {
        let earlier = clients();
        let mut later = clients();
        later.uptime_seconds = 14.0;
        later.rows[0]["calls"] = 25.into();
        later.rows[1]["client"] = 4.into();
        later.add_rates(&earlier);
        assert_eq!(later.rows[0]["calls_per_second"], 5.0);
        assert!(!later.rows[1].contains_key("calls_per_second"), "it is a new connection");
        later.arrange(Some("calls_per_second"), false, &[]).unwrap();
        assert_eq!(order(&later), [1, 3, 4]);
        assert!(later.table(TableWidth::Uncut).contains("  CALLS/S  "), "{}", later.table(TableWidth::Uncut));
        assert!(!earlier.table(TableWidth::Uncut).contains("CALLS/S"));
    }

    /// A row with a long value in each column.
    fn long_row(topic: ViewTopic) -> serde_json::Map<String, Value> {
        let value = |form| match form {
            Text => "a rather long text with 1234567 in it, and more".into(),
            Exact => "https://10.11.12.13:2379".into(),
            _ => 123_456_789.into(),
        };
        columns(topic).iter().map(|(field, _, form, _)| ((*field).to_owned(), value(*form))).collect()
    }

    /// The heads or the cells of a line.
    fn cells(line: &str) -> Vec<&str> {
        line.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).collect()
    }

    #[test]
    fn every_table_fits_and_no_number_or_address_is_ever_cut() {
        for ((_, topic), width) in ViewTopic::ALL
            .iter()
            .flat_map(|topic| [20, 40, 60, 80, 81, 90, 100, 120, 200].map(|width| (topic, width)))
        {
            let row = long_row(*topic);
            let view = view(*topic, json!([row]));
            let table = view.table(TableWidth::Terminal(width));
            assert!(table.lines().all(|line| line.chars().count() <= usize::from(width)), "{width}: {table}");
            let lines: Vec<&str> = table.lines().collect();
            let Ok([head, line]) = <[&str; 2]>::try_from(lines) else {
                assert!(width < 40 && table.contains("-o wide"), "{topic:?} {width}: {table}");
                continue;
            };
            let (heads, shown) = (cells(head), cells(line));
            assert!(!shown.is_empty() && heads.len() == shown.len(), "{table}");
            for (name, cell) in heads.into_iter().zip(shown) {
                let (field, _, form, _) = columns(*topic).iter().find(|(_, head, ..)| *head == name).unwrap();
                let whole = cell_text(row.get(*field), *form);
                let has_part = !cell.contains("1234567") && cell.contains(|one: char| one.is_ascii_digit());
                let is_shortened = *form == Text && cell.ends_with('…') && !has_part;
                assert!(whole == cell || is_shortened, "{width} {name}: {cell:?} of {whole:?}\n{table}");
            }
        }
    }

    #[test]
    fn a_pipe_gets_whole_rows_and_a_wide_table_has_all_columns() {
        for (_, topic) in ViewTopic::ALL {
            let view = view(topic, json!([long_row(topic)]));
            let (piped, wide) = (view.table(TableWidth::Uncut), view.table(TableWidth::Wide));
            let is_default = |(_, _, _, shown): &&ViewColumn| *shown != WideOnly;
            for (field, head, form, _) in columns(topic).iter().filter(is_default) {
                let whole = cell_text(long_row(topic).get(*field), *form);
                assert!(piped.contains(head) && piped.contains(&whole), "{piped}");
            }
            assert_eq!((piped.lines().count(), wide.lines().count()), (2, 2));
            assert!(columns(topic).iter().all(|(_, head, ..)| wide.contains(head)), "{wide}");
            assert!(columns(topic).iter().any(|(field, ..)| *field == default_order(topic)), "{topic:?}");
        }
    }

    #[test]
    fn every_column_of_a_topic_has_a_rank_of_its_own() {
        for (_, topic) in ViewTopic::ALL {
            let ranked = columns(topic).iter().filter_map(|(_, _, _, shown)| match shown {
                Rank(rank) => Some(*rank),
                WideOnly => None,
            });
            let mut ranks: Vec<u8> = ranked.collect();
            ranks.sort_unstable();
            assert!(ranks.iter().copied().eq(1..=u8::try_from(ranks.len()).unwrap()), "{topic:?}: {ranks:?}");
        }
    }

    #[test]
    fn a_member_that_is_ejected_or_has_an_alarm_does_not_look_healthy() {
        let why = "is ejected, slow: gets no calls that others can serve";
        let rows = json!([
            {"name": "m1", "ready": true, "ejected": true, "alarms": [], "why": why},
            {"name": "m2", "ready": true, "ejected": false, "alarms": ["nospace"], "why": null},
            {"name": "m3", "ready": false, "ejected": true, "alarms": ["corrupt"], "why": "unreachable"},
            {"name": "m4", "ready": true, "ejected": false, "alarms": [], "why": null},
        ]);
        let table = view(ViewTopic::Members, rows).table(TableWidth::Uncut);
        let lines: Vec<Vec<&str>> = table.lines().skip(1).map(cells).collect();
        let wanted = [
            vec!["m1", "ejected", why],
            vec!["m2", "true", "alarm NOSPACE: the cluster refuses writes"],
            vec!["m3", "false", "alarm CORRUPT: its data differ; unreachable"],
            vec!["m4", "true"],
        ];
        assert_eq!(lines, wanted, "{table}");
    }

    #[test]
    fn numbers_are_told_in_their_units() {
        for (value, form, text) in [
            (json!(null), Age, ""),
            (json!(59), Age, "59s"),
            (json!(3_599), Age, "59m59s"),
            (json!(7_300), Age, "2h01m"),
            (json!(90_000), Age, "1d01h"),
            (json!(1234), Micros, "1.2 ms"),
            (json!(1_500_000), Bytes, "1.5 MB"),
            (json!(2.25), Rate, "2.2"),
            (json!(true), Text, "true"),
            (json!(-3), Count, "-3"),
        ] {
            assert_eq!(cell_text(Some(&value), form), text);
        }
    }
    #[test]
    fn a_table_of_replicas_without_a_row_has_the_column_of_the_replica() {
        let mut nothing = View { is_of_replicas: true, ..view(ViewTopic::Clients, json!([])) };
        assert!(nothing.table(TableWidth::Uncut).starts_with("REPLICA  CLIENT"));
        assert!(nothing.arrange(Some("replica"), false, &["replica=kw-2".parse().unwrap()]).is_ok());
        let mut own = view(ViewTopic::Clients, json!([]));
        assert!(own.table(TableWidth::Uncut).starts_with("CLIENT"));
        assert!(own.arrange(Some("replica"), false, &[]).is_err());
    }

    #[test]
    fn a_long_key_makes_no_long_rows_in_a_pipe_and_a_wide_table_has_it_whole() {
        let key = "k".repeat(800);
        let slow = view(ViewTopic::Slow, json!([{"method": "Put", "ranges": key, "member": "1f"}]));
        let piped = slow.table(TableWidth::Uncut);
        assert!(piped.lines().all(|line| line.chars().count() < 300) && piped.contains('…'), "{piped}");
        assert!(piped.contains("MEMBER") && piped.contains("1f"), "{piped}");
        assert!(slow.table(TableWidth::Wide).contains(&key));
    }
}
