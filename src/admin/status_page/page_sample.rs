//! The content of an event of the status page.
//!
//! Owns: the JSON of an event, the number of rows, and the fields left out of an anonymous page. Must not
//! know: listeners. Invariants: every value is one of `keyward show`, `status` or `doctor`, or of `/metrics`;
//! an anonymous event has the listed fields only, so a further field of a row is hidden until it is listed; a
//! selection sees no hidden field.

use std::collections::BTreeMap;
use std::sync::Arc;

use percent_encoding::percent_decode_str;
use serde::Serialize;
use serde_json::Value;
use tokio::time::Instant;

use crate::admin::doctor::{Doctor, DoctorReport, Severity};
use crate::admin::status::ReplicaStatus;
use crate::admin::view::{View, ViewRow, ViewTopic, Viewer};
use crate::admin::view_table::{RowFilter, ViewArgumentError};
use crate::config::PageContent;
use crate::refusal::RefusalReason;
use crate::telemetry::printable;

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
    /// A parameter that is not known, or not text.
    #[error("the parameters are sort=FIELD, reverse=1 and filter=CONDITION, {FILTERS} times at most")]
    Parameter,
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
    /// Parses the query of a URL.
    ///
    /// # Errors
    /// An unknown parameter, no condition, or a field that clients do not have.
    pub(super) fn of_query(query: &str) -> Result<Self, SelectionError> {
        let mut selection = Self::default();
        for parameter in query.split('&').filter(|parameter| !parameter.is_empty()) {
            let (name, value) = parameter.split_once('=').ok_or(SelectionError::Parameter)?;
            let value = percent_decode_str(value).decode_utf8().map_err(|_| SelectionError::Parameter)?;
            match name {
                "sort" => selection.order = Some(value.into_owned()),
                "reverse" => selection.is_reversed = value == "1",
                "filter" if selection.filters.len() < FILTERS => selection.filters.push(value.parse()?),
                _ => return Err(SelectionError::Parameter),
            }
        }
        selection.arrange(&mut empty_view(ViewTopic::Clients))?;
        Ok(selection)
    }

    fn arrange(&self, view: &mut View) -> Result<(), ViewArgumentError> {
        view.arrange(self.order.as_deref(), self.is_reversed, &self.filters)
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
        let (clients, watches) = earlier.map_or((None, None), |last| (last.clients.now, last.watches.now));
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
        let mut sample = Self {
            status: sources.viewer.state.status(),
            clients: SampledTopic { now: view(ViewTopic::Clients).await, before: clients },
            watches: SampledTopic { now: view(ViewTopic::Watches).await, before: watches },
            others,
        };
        for topic in [&mut sample.clients.now, &mut sample.watches.now].into_iter().flatten() {
            drop(topic.arrange(None, false, &[]));
        }
        sample
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

fn empty_view(topic: ViewTopic) -> View {
    View {
        schema_version: 0,
        topic,
        taken_at: String::new(),
        uptime_seconds: 0.0,
        rows: Vec::new(),
        left_out: 0,
    }
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
