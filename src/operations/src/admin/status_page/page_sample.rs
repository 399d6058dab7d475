//! The content of an event of the status page.
//!
//! Owns: the JSON of an event, the number of rows, and the fields left out of an anonymous page. Must not
//! know: listeners. Invariants: every value is one of `keyward show`, `status` or `doctor`, or of `/metrics`;
//! an anonymous event has the listed fields only, so a further field of a row is hidden until it is listed; a
//! selection sees no hidden field.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use percent_encoding::percent_decode_str;
use serde::Serialize;
use serde_json::Value;
use tokio::time::Instant;

use crate::admin::doctor::{Doctor, DoctorReport, Severity};
use crate::admin::status::ReplicaStatus;
use crate::admin::view::{View, ViewRow, ViewTopic, Viewer};
use crate::admin::view_table::{RowFilter, ViewArgumentError, columns};
use keyward_config::PageContent;
use keyward_etcd::refusal::RefusalReason;
use keyward_telemetry::printable;

use super::recent_calls::{RECENT_CALLS, RecentCalls};

/// Rows of clients, and of watches, in an event.
const ROWS: usize = 200;
/// Conditions of one listener on clients.
const FILTERS: usize = 8;

/// The topics that are shown as they are, with their names in an event.
const OTHER_TOPICS: [(&str, ViewTopic); 6] = [
    ("slow", ViewTopic::Slow),
    ("limits", ViewTopic::Limits),
    ("certs", ViewTopic::Certs),
    ("config", ViewTopic::Config),
    ("version", ViewTopic::Version),
    ("replicas", ViewTopic::Replicas),
];

/// A text that an anonymous page leaves out.
const HIDDEN: &str = "(hidden)";

/// The doctor's checks whose findings name members, limits and keys of the configuration only.
const IMPERSONAL_CHECKS: [&str; 31] = [
    "quorum_lost",
    "serving",
    "member_unreachable",
    "member_without_leader",
    "cluster_unverified",
    "member_unlisted",
    "member_unstarted",
    "member_without_address",
    "foreign_cluster",
    "address_unanswered",
    "no_probe_user",
    "learner",
    "alarm_nospace",
    "alarm_corrupt",
    "unhealthy",
    "db_quota",
    "no_compaction",
    "apply_lag",
    "raft_lag",
    "open_holes",
    "member_weaknesses",
    "version_skew",
    "members_unverified",
    "plaintext_passwords",
    "clock",
    "auth_off",
    "session_keys",
    "revocation_forgotten",
    "revocation_unknown",
    "connections_full",
    "restart_pending",
];

/// The sources of the page.
pub(super) struct PageSources {
    pub(super) viewer: Arc<Viewer>,
    pub(super) doctor: Arc<Doctor>,
    pub(super) content: PageContent,
}

/// The clients wanted by a listener, as by `--sort`, `--reverse` and `--filter` of `keyward show clients`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ClientSelection {
    order: Option<String>,
    is_reversed: bool,
    filters: Vec<RowFilter>,
}

/// The query is no selection.
#[derive(Debug, thiserror::Error)]
pub(super) enum SelectionError {
    /// A parameter that is not known, not text, or given too often.
    #[error("the parameters are sort=FIELD, reverse=1 and filter=CONDITION, {FILTERS} times at most")]
    Parameter,
    /// A field that clients have, and that an anonymous page hides.
    #[error("the field {0:?} is hidden: the page is anonymous (admin.page)")]
    HiddenField(String),
    /// No condition, or a field that clients do not have.
    #[error("{0}")]
    Argument(#[from] ViewArgumentError),
}

/// The doctor's report, with the time of the examination.
#[derive(Debug)]
pub(super) struct PageVerdict {
    taken: Instant,
    worst: Option<Severity>,
    report: DoctorReport,
}

#[derive(Serialize)]
struct VerdictPart<'a> {
    age_seconds: u64,
    worst: Option<Severity>,
    #[serde(flatten)]
    report: &'a DoctorReport,
}

/// The state at one moment, before any selection.
pub(super) struct PageSample {
    status: ReplicaStatus,
    recent_calls: RecentCalls,
    clients: SampledTopic,
    watches: SampledTopic,
    /// The other topics, as they are shown.
    others: BTreeMap<&'static str, Option<View>>,
}

/// A topic now and at the sample before, for rates; `None` if a shard has not answered.
struct SampledTopic {
    now: Option<View>,
    before: Option<View>,
}

#[derive(Serialize)]
struct RefusedRow {
    reason: &'static str,
    calls: u64,
}

/// An event.
#[derive(Serialize)]
struct PageEvent<'a> {
    content: &'static str,
    digest: &'a str,
    status: &'a ReplicaStatus,
    /// Null before the end of the first examination.
    doctor: Option<VerdictPart<'a>>,
    refusals: Vec<RefusedRow>,
    clients: Option<View>,
    watches: Option<View>,
    #[serde(flatten)]
    others: &'a BTreeMap<&'static str, Option<View>>,
}

impl ClientSelection {
    /// Parses the query of a URL, for a page with this content.
    ///
    /// # Errors
    /// An unknown parameter, no condition, or a field that clients do not have on this page.
    pub(super) fn of_query(query: &str, content: PageContent) -> Result<Self, SelectionError> {
        let mut selection = Self::default();
        for parameter in query.split('&').filter(|parameter| !parameter.is_empty()) {
            let (name, value) = parameter.split_once('=').ok_or(SelectionError::Parameter)?;
            let value = percent_decode_str(value).decode_utf8().map_err(|_| SelectionError::Parameter)?;
            match name {
                "sort" if selection.order.is_none() => selection.order = Some(value.into_owned()),
                "reverse" if value == "1" => selection.is_reversed = true,
                "filter" if selection.filters.len() < FILTERS => selection.filters.push(value.parse()?),
                _ => return Err(SelectionError::Parameter),
            }
        }
        let shown: BTreeSet<&str> = impersonal_fields(ViewTopic::Clients).iter().copied().collect();
        let all: BTreeSet<&str> = shown
            .iter()
            .copied()
            .chain(columns(ViewTopic::Clients).iter().map(|(field, ..)| *field))
            .collect();
        let known = if content == PageContent::Full { &all } else { &shown };
        for field in selection.filters.iter().map(RowFilter::field).chain(selection.order.as_deref()) {
            if known.contains(field) {
                continue;
            }
            return Err(if all.contains(field) {
                SelectionError::HiddenField(field.to_owned())
            } else {
                let known = known.iter().copied().collect::<Vec<_>>().join(", ");
                ViewArgumentError::UnknownField(field.to_owned(), known).into()
            });
        }
        Ok(selection)
    }

    fn arrange(&self, view: &mut View) -> Result<(), ViewArgumentError> {
        let order = self.order.as_deref().unwrap_or(RECENT_CALLS);
        view.arrange(Some(order), self.is_reversed, &self.filters)
    }
}

impl PageVerdict {
    /// A report as shown on a page with this content.
    pub(super) fn of(mut report: DoctorReport, content: PageContent) -> Self {
        if content != PageContent::Full {
            for finding in &mut report.findings {
                if !IMPERSONAL_CHECKS.contains(&finding.check.as_str()) {
                    finding.about.clone_from(&finding.check);
                    "its text may name somebody: hidden here".clone_into(&mut finding.what);
                    "keyward doctor shows it".clone_into(&mut finding.fix);
                }
            }
            report.unseen.clear();
        }
        Self { taken: Instant::now(), worst: report.worst(), report }
    }
}

impl PageSample {
    /// Reads the state now.
    pub(super) async fn take(sources: &PageSources, earlier: Option<Self>) -> Self {
        let (mut recent_calls, clients, watches) = earlier
            .map_or_else(Default::default, |last| (last.recent_calls, last.clients.now, last.watches.now));
        let view = async |topic| sources.viewer.view(topic).await.ok();
        let mut others = BTreeMap::new();
        for (name, topic) in OTHER_TOPICS {
            let mut shown = view(topic).await;
            if let Some(shown) = &mut shown {
                // The default order is always of the topic's own fields.
                drop(shown.arrange(None, false, &[]));
                cut(shown);
                hide(shown, sources.content);
            }
            others.insert(name, shown);
        }
        let status = sources.viewer.state.status();
        let mut clients = SampledTopic { now: view(ViewTopic::Clients).await, before: clients };
        let mut watches = SampledTopic { now: view(ViewTopic::Watches).await, before: watches };
        for topic in [&mut clients.now, &mut watches.now].into_iter().flatten() {
            drop(topic.arrange(None, false, &[]));
        }
        if let Some(clients) = &mut clients.now {
            recent_calls.add_to(clients);
            // Clients with equal counts stay in the order of their calls since the start.
            drop(clients.arrange(Some(RECENT_CALLS), false, &[]));
        }
        Self { status, recent_calls, clients, watches, others }
    }

    /// The event of a listener, as JSON.
    pub(super) fn text(
        &self,
        sources: &PageSources,
        verdict: Option<&PageVerdict>,
        selection: &ClientSelection,
    ) -> String {
        let none = ClientSelection::default();
        let event = PageEvent {
            content: if sources.content == PageContent::Full { "full" } else { "anonymous" },
            digest: &sources.viewer.config.load().digest,
            status: &self.status,
            doctor: verdict.map(|verdict| VerdictPart {
                age_seconds: verdict.taken.elapsed().as_secs(),
                worst: verdict.worst,
                report: &verdict.report,
            }),
            refusals: refusals(sources),
            clients: self.clients.selected(selection, sources.content),
            watches: self.watches.selected(&none, sources.content),
            others: &self.others,
        };
        printable::json(&serde_json::to_string(&event).unwrap_or_default()).into_owned()
    }
}

impl SampledTopic {
    /// The first rows of a selection, with rates. Rows are in their default order.
    fn selected(&self, selection: &ClientSelection, content: PageContent) -> Option<View> {
        let now = self.now.as_ref()?;
        let is_default = *selection == ClientSelection::default();
        let most = if is_default { ROWS } else { usize::MAX };
        let mut shown = View {
            rows: now.rows.iter().take(most).cloned().collect(),
            taken_at: now.taken_at.clone(),
            left_out: now.left_out + now.rows.len().saturating_sub(most),
            ..*now
        };
        if let Some(before) = &self.before {
            shown.add_rates(before);
        }
        hide(&mut shown, content);
        if !is_default {
            // The selection was tried when the listener came, and a field without a value sorts last.
            drop(selection.arrange(&mut shown));
            cut(&mut shown);
        }
        Some(shown)
    }
}

fn refusals(sources: &PageSources) -> Vec<RefusedRow> {
    let counts = sources.viewer.state.metrics.refusals.counts();
    RefusalReason::NAMES.into_iter().zip(counts).map(|(reason, calls)| RefusedRow { reason, calls }).collect()
}

/// Leaves out the rows that are too many for an event.
fn cut(view: &mut View) {
    view.left_out += view.rows.len().saturating_sub(ROWS);
    view.rows.truncate(ROWS);
}

/// Removes the fields that identify people from the rows of an anonymous page.
fn hide(view: &mut View, content: PageContent) {
    if content == PageContent::Full {
        return;
    }
    let topic = view.topic;
    for row in &mut view.rows {
        row.retain(|field, _| impersonal_fields(topic).contains(&field.as_str()));
        let names_user = |row: &ViewRow| match topic {
            ViewTopic::Certs => row.get("usage").is_some_and(|usage| usage == "user"),
            ViewTopic::Config => row.get("key").is_some_and(|key| key == "cluster.probe"),
            _ => false,
        };
        if names_user(row) {
            let field = if topic == ViewTopic::Certs { "name" } else { "value" };
            row.insert(field.to_owned(), Value::from(HIDDEN));
        }
    }
}

/// The fields of an anonymous page: none names a user, a peer, a client's address or user-agent, or a key.
const fn impersonal_fields(topic: ViewTopic) -> &'static [&'static str] {
    match topic {
        ViewTopic::Clients => &[
            "client",
            "listener",
            "age_seconds",
            "calls",
            RECENT_CALLS,
            "calls_per_second",
            "failed",
            "open",
            "bytes_in",
            "bytes_out",
            "bytes_in_per_second",
            "bytes_out_per_second",
            "watches",
            "leases",
            "unread_bytes",
            "last_error",
            "last_error_by",
            "last_error_seconds",
            "kicked",
        ],
        ViewTopic::Watches => &[
            "client",
            "watches",
            "live",
            "events",
            "events_per_second",
            "behind",
            "held_bytes",
            "client_is_behind",
        ],
        ViewTopic::Slow => &[
            "method",
            "client",
            "member",
            "attempts",
            "code",
            "ended_seconds",
            "took_micros",
            "before_micros",
            "member_micros",
            "after_micros",
        ],
        ViewTopic::Limits => &["scope", "limit", "used", "allowed"],
        ViewTopic::Certs => &["usage", "name", "expires_at", "days_left", "consequence"],
        ViewTopic::Config => &["key", "value", "restart_pending"],
        ViewTopic::Version => &["part", "version"],
        ViewTopic::Replicas => &[
            "host",
            "address",
            "pid",
            "version",
            "state",
            "why",
            "started_at",
            "configuration",
            "connections",
            "calls",
            "streams",
            "sessions",
            "shards",
        ],
        _ => &[],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The fields by which the page's own table of clients is sorted.
    fn page_columns() -> Vec<&'static str> {
        let page = include_str!("page.html");
        let (_, columns) = page.split_once("  clients: [[").expect("the columns of clients");
        let (columns, _) = columns.split_once("]],").expect("their end");
        columns.split('[').filter_map(|column| column.split('"').nth(1)).collect()
    }

    #[test]
    fn every_head_of_the_page_is_a_field_to_sort_by() {
        let fields = page_columns();
        assert!(fields.len() > 15 && fields.contains(&RECENT_CALLS), "{fields:?}");
        for field in fields {
            let query = format!("sort={field}&reverse=1");
            assert!(ClientSelection::of_query(&query, PageContent::Full).is_ok(), "{field}");
            let is_shown = impersonal_fields(ViewTopic::Clients).contains(&field);
            assert_eq!(
                ClientSelection::of_query(&query, PageContent::Anonymous).is_ok(),
                is_shown,
                "{field}"
            );
        }
    }

    #[test]
    fn a_query_with_a_fault_is_refused_with_the_reason() {
        for (query, content, reason) in [
            ("filter=usr=bob", PageContent::Full, "no field \"usr\": address, age_seconds, "),
            ("filter=usr=bob", PageContent::Anonymous, "no field \"usr\": age_seconds, "),
            ("filter=user=bob", PageContent::Anonymous, "the field \"user\" is hidden"),
            ("sort=address", PageContent::Anonymous, "the field \"address\" is hidden"),
            ("filter=nonsense", PageContent::Full, "\"nonsense\" is no condition"),
            ("filter=calls%3Emany", PageContent::Full, "is no condition"),
            ("filter=%FF", PageContent::Full, "the parameters are"),
            ("sort", PageContent::Full, "the parameters are"),
            ("sort=calls&sort=failed", PageContent::Full, "the parameters are"),
            ("reverse=yes", PageContent::Full, "the parameters are"),
            ("filters=calls%3E1", PageContent::Full, "the parameters are"),
            (&"filter=calls%3E1&".repeat(FILTERS + 1), PageContent::Full, "the parameters are"),
        ] {
            let refused = ClientSelection::of_query(query, content).unwrap_err().to_string();
            assert!(refused.contains(reason), "{query}: {refused}");
        }
        let most = "filter=calls%3E1&".repeat(FILTERS);
        for query in ["", "filter=user=bob&sort=failed&reverse=1", &most] {
            assert!(ClientSelection::of_query(query, PageContent::Full).is_ok(), "{query}");
        }
    }
}
