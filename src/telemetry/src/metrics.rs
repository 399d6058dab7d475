//! The metrics of `/metrics`, as handles resolved once.
//!
//! Owns: names, help texts, units, label sets. Must not know: the callers that count. Invariant: every
//! label comes from a closed set (such as method row, gRPC code, member, reason, result) or from the
//! configuration; never a key of the store, a client's text, a watch ID or an error text.

use std::collections::HashMap;
use std::sync::OnceLock;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, SystemTime};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::{encode, encode_registry};
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric as _, LabelSetEncoder};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Metric, Registry, Unit};

use crate::audit_metrics::AuditMetrics;
use crate::condition_metrics::ConditionMetrics;
use crate::config_metrics::ConfigMetrics;
use crate::connection_metrics::ConnectionMetrics;
use crate::export_metrics::ExportMetrics;
use crate::fleet_metrics::FleetMetrics;
use crate::latency_histogram::LatencyHistogram;
use crate::limit_metrics::LimitMetrics;
use crate::listener_metrics::ListenerMetrics;
use crate::member_metrics::MemberMetrics;
use crate::policy_metrics::PolicyMetrics;
use crate::policy_store_metrics::PolicyStoreMetrics;
use crate::printable::MetricsText;
use crate::process_metrics::ProcessCollector;
use crate::refusal_metrics::RefusalMetrics;
use crate::request_memory_metrics::RequestMemoryMetrics;
use crate::rest_metrics::RestLabels;
use crate::single_label::{SingleLabel, one};
use crate::unread_metrics::UnreadMetrics;
use crate::user_metrics::UserMetrics;
use crate::watch_feed_metrics::WatchFeedMetrics;

/// Prefix of every metric's name.
const PREFIX: &str = "keyward";
/// gRPC has codes 0 to 16.
const CODES: usize = 17;
/// The begin of the samples of the durations of calls.
const DURATION_BUCKET: &str = "keyward_call_duration_seconds_bucket{";

/// Labels of a finished call.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct CallLabels {
    method: &'static str,
    code: &'static str,
}

impl EncodeLabelSet for CallLabels {
    fn encode(&self, encoder: &mut LabelSetEncoder<'_>) -> Result<(), std::fmt::Error> {
        use prometheus_client::encoding::EncodeLabel as _;
        ("method", self.method).encode(encoder.encode_label())?;
        ("code", self.code).encode(encoder.encode_label())
    }
}

struct MethodMetrics {
    codes: [OnceLock<Counter>; CODES],
    latency: OnceLock<LatencyHistogram>,
    lifetime: OnceLock<LatencyHistogram>,
}

type Durations = Family<SingleLabel, LatencyHistogram, fn() -> LatencyHistogram>;

/// Counters of tries not included in the retried calls.
pub struct TryMetrics {
    /// Calls not sent again because the retry budget was used up.
    pub refused: Counter,
    /// Reads also sent to a second member (hedged).
    pub hedged: Counter,
    /// Hedged reads answered first by the second member.
    pub hedges_won: Counter,
    /// Local reads repeated because the answer was older than an answer already shown to the client.
    pub behind: Counter,
}

impl TryMetrics {
    fn registered(registry: &mut Registry) -> Self {
        let help = "Calls not sent again because the retry budget was used up";
        let refused = registered(registry, "calls_not_retried", help);
        let hedged = registered(registry, "calls_hedged", "Reads also sent to a second member");
        let hedges_won =
            registered(registry, "calls_hedges_won", "Hedged reads that the second member answered first");
        let help = "Local reads repeated because the answer was older than one already shown to the client";
        Self { refused, hedged, hedges_won, behind: registered(registry, "reads_behind", help) }
    }
}

/// All metrics of the process. Counting is a single atomic operation.
pub struct Metrics {
    registry: Registry,
    /// Metrics for the admin address only.
    admin_registry: Registry,
    methods: Vec<&'static str>,
    rows: Vec<MethodMetrics>,
    calls: Family<CallLabels, Counter>,
    latency: Durations,
    lifetimes: Durations,
    /// Calls and bytes by listener.
    pub listeners: ListenerMetrics,
    /// Calls by etcd user, on the admin address only.
    pub users: UserMetrics,
    /// Calls refused by Keyward.
    pub refusals: RefusalMetrics,
    /// Calls replayed after their credential was refused and renewed.
    pub healed: Counter,
    /// Calls sent again, to the same or another member, because the first attempt provably did not apply.
    pub retried: Counter,
    /// Counters of refused retries, hedged reads and repeated reads.
    pub tries: TryMetrics,
    /// Upstream watch streams opened to resume an ended stream.
    pub watch_resumes: Counter,
    /// Upstream watches shared by several client streams, and their readers.
    pub watch_feeds: WatchFeedMetrics,
    /// Bytes held by watch streams: incomplete revisions, and events not yet read by clients.
    pub watch_held_bytes: Gauge,
    /// Upstream keepalive streams opened to resume an ended stream.
    pub keepalive_resumes: Counter,
    /// Upstream Observe streams opened to resume an ended stream.
    pub observe_resumes: Counter,
    /// Removed keys of failed Lock and Campaign calls.
    pub lock_keys_removed: Counter,
    /// Open client connections.
    pub connections: Gauge,
    /// Client connections refused or closed.
    pub connection_figures: ConnectionMetrics,
    /// Limits on usage, and shedding.
    pub limits: LimitMetrics,
    /// Decisions of the policy.
    pub policy: PolicyMetrics,
    /// Metrics of the policy stored in etcd.
    pub policy_store: PolicyStoreMetrics,
    /// Connections closed by a drain with calls or streams still open.
    pub connections_cut: Counter,
    /// Connections closed because the client reset too many streams before their answer.
    pub connections_flooded: Counter,
    /// Unary calls of clients in flight.
    pub calls_open: Gauge,
    /// Open streams of clients.
    pub streams_open: Gauge,
    /// Failed or timed-out TLS handshakes of clients.
    pub handshakes_failed: Counter,
    /// Connections with invalid `:authority` headers.
    pub odd_authority: OddAuthority,
    /// Password logins, by result.
    pub logins: Family<SingleLabel, Counter>,
    /// Session tokens issued.
    pub sessions_issued: Counter,
    /// Session tokens refused: not opened, revoked, or no longer proved.
    pub sessions_refused: Counter,
    /// Calls with an unchecked token, because auth is off.
    pub tokens_ignored: Counter,
    /// JWTs refused.
    pub jwts_refused: Counter,
    /// Calls of peers not mapped to an etcd user, or mapped to a blocked user.
    pub peers_refused: Counter,
    /// Successful configuration reloads.
    pub reloads: Counter,
    /// Reloads rejected because of a fault in the configuration; the previous configuration stays in force.
    pub reloads_refused: Counter,
    /// The last reading of the configuration, and its certificates.
    pub config: ConfigMetrics,
    /// The answer of `/readyz`.
    pub readiness: ReadinessMetrics,
    /// The age of the known revocations in seconds.
    pub revocation_age: Gauge<f64, AtomicU64>,
    state_file_unwritten: Family<SingleLabel, Gauge>,
    /// Names without an answer, whether or not their last known addresses serve.
    pub names_failing: Gauge,
    /// The conditions that the log tells, on the admin address only.
    pub conditions: ConditionMetrics,
    /// Seconds since the last probe answered by a member of the cluster that sees a leader.
    pub members_age: Gauge<f64, AtomicU64>,
    /// 1 if members are accepted without verification (`cluster.tls.insecure_skip_verify`).
    pub members_unverified: Gauge,
    /// Revoked users and sessions.
    pub revocation_entries: Gauge,
    /// Upstream connections with a user's own certificate.
    pub certificate_connections: Gauge,
    /// Connections with a user's certificate refused at the limit of such connections.
    pub certificate_connections_refused: Counter,
    /// Unary requests of identified callers refused for their bytes, and malformed paths.
    pub not_canonical: Counter,
    /// Panics in request handlers.
    pub panics: Counter,
    /// Suppressed records of calls without effect, and of callers without a proved identity.
    pub log_records_left_out: Counter,
    /// Requests without gRPC, by kind of path and HTTP status.
    pub rest_requests: Family<RestLabels, Counter>,
    /// Switches to another cluster.
    pub cluster_changes: Counter,
    /// 1 for members receiving calls, 0 for other members.
    pub member_ready: Family<SingleLabel, Gauge>,
    /// 1 for the leader.
    pub member_leader: Family<SingleLabel, Gauge>,
    /// The further metrics of each member.
    pub member_figures: MemberMetrics,
    /// Sealed requests of other replicas; on the admin address only.
    pub fleet: FleetMetrics,
    /// Answers not yet read by clients.
    pub unread: UnreadMetrics,
    /// Memory held by requests.
    pub request_memory: RequestMemoryMetrics,
    /// The audit log.
    pub audit: AuditMetrics,
    /// Spans and log records for a collector.
    pub export: ExportMetrics,
}

impl Metrics {
    /// Registers all metrics. `methods` has the method table's paths in table order, followed by an entry for
    /// unknown methods.
    #[expect(clippy::too_many_lines, reason = "a line or two for each metric, and no branch")]
    #[must_use]
    pub fn new(methods: Vec<&'static str>) -> Self {
        let (mut registry, mut admin_registry) =
            (Registry::with_prefix(PREFIX), Registry::with_prefix(PREFIX));
        register_build_info(&mut registry);
        let calls = Family::default();
        registry.register("calls", "Calls that ended, by method and gRPC code", calls.clone());
        let latency: Durations = Family::new_with_constructor(LatencyHistogram::of_calls);
        registry.register_with_unit("call_duration", "Time of unary calls", Unit::Seconds, latency.clone());
        let lifetimes: Durations = Family::new_with_constructor(LatencyHistogram::of_streams);
        let help = "Lifetime of ended streams";
        registry.register_with_unit("stream_duration", help, Unit::Seconds, lifetimes.clone());
        let rows = methods.iter().map(|_| MethodMetrics {
            codes: Default::default(),
            latency: OnceLock::new(),
            lifetime: OnceLock::new(),
        });
        let mut counter = |name: &str, help: &str| registered::<Counter>(&mut registry, name, help);
        let healed = counter("calls_healed", "Calls replayed with a fresh credential");
        let retried = counter("calls_retried", "Calls sent again since the first attempt did not apply");
        let watch_resumes = counter("watch_resumes", "Upstream watch streams opened to go on");
        let keepalive_resumes = counter("keepalive_resumes", "Upstream keepalive streams opened to go on");
        let observe_resumes = counter("observe_resumes", "Upstream Observe streams opened to go on");
        let lock_keys_removed = counter("lock_keys_removed", "Keys of failed Locks and Campaigns removed");
        let connections_cut =
            counter("downstream_connections_cut", "Connections that a drain ended with something open");
        let help = "Connections ended since their client reset too many streams";
        let connections_flooded = counter("downstream_connections_flooded", help);
        let handshakes_failed = counter("downstream_handshakes_failed", "TLS handshakes that failed");
        let sessions_issued = counter("sessions_issued", "Session tokens issued");
        let sessions_refused = counter("sessions_refused", "Session tokens that were refused");
        let help = "Calls whose token was not looked at, since auth is off upstream";
        let tokens_ignored = counter("tokens_ignored", help);
        let jwts_refused = counter("jwts_refused", "JWTs that were refused");
        let peers_refused = counter("peers_refused", "Calls of peers that are no etcd user here");
        let reloads = counter("config_reloads", "Times that the configuration was read again");
        let reloads_refused =
            counter("config_reloads_refused", "Times that the configuration was read and had a fault");
        let not_canonical = counter("calls_not_canonical", "Requests refused as not canonical");
        let cluster_changes = counter("cluster_changes", "Times that another cluster was followed");
        let panics = counter("panics", "Handlers that panicked");
        let help = "Records of the access log and the audit log left out, of calls without effect";
        let log_records_left_out = counter("log_records_left_out", help);
        let help = "Connections with a user's certificate over the limit";
        let certificate_connections_refused = counter("upstream_certificate_connections_refused", help);
        let tries = TryMetrics::registered(&mut registry);
        let revocation_age = Gauge::<f64, AtomicU64>::default();
        let help = "Age of the copy of the revocations in force";
        registry.register_with_unit("revocation_age", help, Unit::Seconds, revocation_age.clone());
        let help =
            "1 while a state file is not on the disk, by the configuration key of the file or its folder";
        let state_file_unwritten = registered(&mut registry, "state_file_unwritten", help);
        let names_failing =
            registered(&mut registry, "names_failing", "Names that no name server answers for");
        let members_age = Gauge::<f64, AtomicU64>::default();
        let help = "Time since a member that sees a leader last answered a probe";
        registry.register_with_unit("members_age", help, Unit::Seconds, members_age.clone());
        let help = "1 where members are not verified: cluster.tls.insecure_skip_verify";
        let members_unverified = registered(&mut registry, "members_unverified", help);
        let revocation_entries =
            registered(&mut registry, "revocation_entries", "Users and sessions revoked");
        let watch_feeds = WatchFeedMetrics::registered(&mut registry);
        let watch_held_bytes = registered(&mut registry, "watch_held_bytes", "Bytes that watch streams hold");
        let help = "Open connections with a user's certificate";
        let certificate_connections = registered(&mut registry, "upstream_certificate_connections", help);
        let connections = registered(&mut registry, "downstream_connections", "Open connections of clients");
        let calls_open = registered(&mut registry, "calls_open", "Unary calls of clients under way");
        let streams_open = registered(&mut registry, "streams_open", "Open streams of clients");
        let logins = registered(&mut registry, "logins", "Password logins, by result");
        let help = "Requests without gRPC, by kind of path and HTTP status";
        let rest_requests = registered(&mut registry, "rest_requests", help);
        let member_ready = registered(&mut registry, "member_ready", "1 for members that get calls");
        let member_leader: Family<SingleLabel, Gauge> =
            registered(&mut registry, "member_leader", "1 for the leader");
        let member_figures =
            MemberMetrics::registered(&mut registry, Family::clone(&member_ready), member_leader.clone());
        Self {
            readiness: ReadinessMetrics::registered(&mut admin_registry),
            conditions: ConditionMetrics::registered(&mut admin_registry),
            listeners: ListenerMetrics::registered(&mut registry),
            users: UserMetrics::registered(&mut admin_registry),
            refusals: RefusalMetrics::registered(&mut registry),
            config: ConfigMetrics::registered(&mut registry, &mut admin_registry),
            fleet: FleetMetrics::registered(&mut admin_registry),
            unread: UnreadMetrics::registered(&mut registry),
            connection_figures: ConnectionMetrics::registered(&mut registry),
            limits: LimitMetrics::registered(&mut registry),
            policy: PolicyMetrics::registered(&mut registry),
            policy_store: PolicyStoreMetrics::registered(&mut registry),
            request_memory: RequestMemoryMetrics::registered(&mut registry),
            audit: AuditMetrics::registered(&mut registry, log_records_left_out.clone()),
            export: ExportMetrics::registered(&mut registry),
            odd_authority: OddAuthority::registered(&mut registry),
            rows: rows.collect(),
            registry,
            admin_registry,
            methods,
            calls,
            latency,
            lifetimes,
            healed,
            retried,
            tries,
            watch_resumes,
            watch_feeds,
            watch_held_bytes,
            keepalive_resumes,
            observe_resumes,
            lock_keys_removed,
            connections,
            connections_cut,
            connections_flooded,
            calls_open,
            streams_open,
            handshakes_failed,
            logins,
            sessions_issued,
            sessions_refused,
            tokens_ignored,
            jwts_refused,
            peers_refused,
            reloads,
            reloads_refused,
            revocation_age,
            state_file_unwritten,
            names_failing,
            members_age,
            members_unverified,
            revocation_entries,
            certificate_connections,
            certificate_connections_refused,
            not_canonical,
            panics,
            log_records_left_out,
            rest_requests,
            cluster_changes,
            member_ready,
            member_leader,
            member_figures,
        }
    }

    /// Counts a finished call. `row` is the method's index in the list given to [`Metrics::new`]; `code_name`
    /// returns the label of `code`, and is called for the first such call only. `took` is given for unary
    /// calls only: a stream's lifetime is no measure of speed.
    pub fn call_ended(
        &self,
        row: usize,
        code: u8,
        code_name: impl FnOnce() -> &'static str,
        took: Option<Duration>,
    ) {
        let (Some(cells), Some(method)) = (self.rows.get(row), self.methods.get(row)) else { return };
        if let Some(cell) = cells.codes.get(usize::from(code)) {
            let labels = || CallLabels { method, code: code_name() };
            cell.get_or_init(|| self.calls.get_or_create(&labels()).clone()).inc();
        }
        if let Some(took) = took {
            let labels = || [("method", (*method).to_owned())];
            cells.latency.get_or_init(|| self.latency.get_or_create_owned(&labels())).observe(took);
        }
    }

    /// Notes the trace of a unary call as the example of its bucket of durations. `row` is as in
    /// [`call_ended`](Self::call_ended), which counts the call.
    pub fn note_exemplar(&self, row: usize, took: Duration, trace: &str, ended: SystemTime) {
        if let Some(latency) = self.rows.get(row).and_then(|cells| cells.latency.get()) {
            latency.note_exemplar(took, trace, ended);
        }
    }

    /// Adds the traces of calls to an OpenMetrics text: each bucket of the durations of calls gets the last
    /// call with a trace as its exemplar. The metrics library writes exemplars of its own histograms only.
    #[must_use]
    pub fn with_exemplars(&self, open_metrics: String) -> String {
        let mut exemplars = HashMap::new();
        for (cells, method) in self.rows.iter().zip(&self.methods) {
            for (bound, exemplar) in cells.latency.get().into_iter().flat_map(LatencyHistogram::exemplars) {
                let bound = if bound.is_finite() { format!("{bound:?}") } else { "+Inf".to_owned() };
                let sample = format!("{DURATION_BUCKET}le=\"{bound}\",method=\"{method}\"}}");
                exemplars.insert(sample, exemplar);
            }
        }
        if exemplars.is_empty() {
            return open_metrics;
        }
        let mut text = String::with_capacity(open_metrics.len() + exemplars.len() * 128);
        for line in open_metrics.lines() {
            text.push_str(line);
            let sample = || line.rsplit_once(' ').map(|(sample, _)| sample);
            if line.starts_with(DURATION_BUCKET)
                && let Some(exemplar) = sample().and_then(|sample| exemplars.get(sample))
            {
                text.push_str(&exemplar.to_string());
            }
            text.push('\n');
        }
        text
    }

    /// Notes the lifetime of an ended stream. `row` is as in [`call_ended`](Self::call_ended).
    pub fn stream_ended(&self, row: usize, lasted: Duration) {
        let (Some(cells), Some(method)) = (self.rows.get(row), self.methods.get(row)) else { return };
        let labels = || one("method", *method);
        cells.lifetime.get_or_init(|| self.lifetimes.get_or_create_owned(&labels())).observe(lasted);
    }

    /// Notes for the state files of this key if one of them is not on the disk.
    pub fn put_state_files(&self, unwritten: &[(&'static str, bool)]) {
        for (setting, is_unwritten) in unwritten {
            self.state_file_unwritten.get_or_create(&one("setting", *setting)).set((*is_unwritten).into());
        }
    }

    /// The number of calls ended with `code`, over all methods. For tests and the admin page.
    #[must_use]
    pub fn calls_with(&self, code: u8) -> u64 {
        let cells = self.rows.iter().filter_map(|row| row.codes.get(usize::from(code)));
        cells.filter_map(OnceLock::get).map(Counter::<u64, AtomicU64>::get).sum()
    }

    /// The metrics in the OpenMetrics text format, without those for the admin address only.
    ///
    /// # Errors
    /// Never in practice: writing to a string does not fail.
    pub fn text(&self) -> Result<String, std::fmt::Error> {
        let mut text = MetricsText::with_capacity(16 * 1024);
        encode(&mut text, &self.registry)?;
        Ok(text.into_text())
    }

    /// The page of the admin address: the same, followed by the metrics for this page only, by the process's
    /// figures, and by counters kept outside of the registry.
    ///
    /// # Errors
    /// As [`text`](Self::text).
    pub fn admin_text(&self, families: Vec<CounterFamily>) -> Result<String, std::fmt::Error> {
        let mut process = Registry::default();
        process.register_collector(Box::new(ProcessCollector));
        let mut further = Registry::with_prefix(PREFIX);
        families.into_iter().for_each(|family| further.register_collector(Box::new(family)));
        let mut text = MetricsText::with_capacity(16 * 1024);
        encode_registry(&mut text, &self.registry)?;
        encode_registry(&mut text, &self.admin_registry)?;
        encode_registry(&mut text, &process)?;
        encode(&mut text, &further)?;
        Ok(text.into_text())
    }
}

/// Counters kept outside of the registry, with their values at a scrape.
#[derive(Debug)]
pub struct CounterFamily {
    /// The name, without prefix and suffix.
    pub name: &'static str,
    /// The help text, without a full stop.
    pub help: &'static str,
    /// The name of the label.
    pub label: &'static str,
    /// The label values with their counts, in the order of the page.
    pub rows: Vec<(String, u64)>,
}

impl Collector for CounterFamily {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let help = format!("{}.", self.help);
        let mut family = encoder.encode_descriptor(self.name, &help, None, MetricType::Counter)?;
        self.rows.iter().try_for_each(|(value, count)| {
            ConstCounter::new(*count).encode(family.encode_family(&one(self.label, value.as_str()))?)
        })
    }
}

/// Connections with invalid `:authority` headers.
pub struct OddAuthority {
    /// Connections served.
    pub connections: Counter,
    /// Connections closed, by reason.
    pub refused: Family<SingleLabel, Counter>,
}

impl OddAuthority {
    fn registered(registry: &mut Registry) -> Self {
        let help = "Connections with an authority that is none";
        let connections = registered(registry, "odd_authority_connections", help);
        let help = "Connections with an authority that is none that were ended, by reason";
        Self { connections, refused: registered(registry, "odd_authority_refused", help) }
    }
}

/// The answer of `/readyz`, written at every scrape of the admin address.
pub struct ReadinessMetrics {
    /// 1 if `/readyz` answers 200.
    pub ready: Gauge,
    /// 1 if only a part of the calls is served, since the cluster has no quorum.
    pub degraded: Gauge,
}

impl ReadinessMetrics {
    fn registered(registry: &mut Registry) -> Self {
        let ready = registered(registry, "ready", "1 if calls are served: the answer of /readyz");
        let help = "1 if only local reads are served, since the cluster has no quorum";
        Self { ready, degraded: registered(registry, "degraded", help) }
    }
}

/// Registers a gauge of 1 with the program's version and platform.
fn register_build_info(registry: &mut Registry) {
    let info = Family::<[(&str, &str); 3], Gauge>::default();
    let labels = [
        ("version", env!("CARGO_PKG_VERSION")),
        ("os", std::env::consts::OS),
        ("arch", std::env::consts::ARCH),
    ];
    info.get_or_create(&labels).set(1);
    registry.register("build_info", "1, with the version and the platform of the program", info);
}

/// Registers an empty metric.
fn registered<M: Metric + Clone + Default>(registry: &mut Registry, name: &str, help: &str) -> M {
    let metric = M::default();
    registry.register(name, help, metric.clone());
    metric
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_counted_by_method_and_code() {
        let metrics = Metrics::new(vec!["/a/B", "/a/C"]);
        metrics.call_ended(1, 16, || "Unauthenticated", Some(Duration::from_millis(2)));
        metrics.call_ended(1, 16, || unreachable!("the counter exists"), None);
        metrics.call_ended(7, 0, || "OK", None);
        metrics.member_ready.get_or_create(&one("member", "1f")).set(1);
        let text = metrics.text().expect("text");
        assert!(text.contains("keyward_calls_total{method=\"/a/C\",code=\"Unauthenticated\"} 2"), "{text}");
        assert!(text.contains("keyward_call_duration_seconds_count{method=\"/a/C\"} 1"), "{text}");
        assert!(text.contains("keyward_member_ready{member=\"1f\"} 1"), "{text}");
        assert!(!text.contains("/a/B"), "{text}");
        assert_eq!(metrics.calls_with(16), 2);
    }

    #[test]
    fn the_last_call_with_a_trace_is_the_exemplar_of_its_bucket_alone() {
        let metrics = Metrics::new(vec!["/a/B"]);
        let plain = metrics.text().expect("text");
        assert_eq!(metrics.with_exemplars(plain.clone()), plain);
        let ended = SystemTime::UNIX_EPOCH + Duration::from_millis(1500);
        for (millis, trace) in [(2, "aa"), (2, "bb"), (60_000, "cc")] {
            let took = Duration::from_millis(millis);
            metrics.call_ended(0, 0, || "OK", Some(took));
            metrics.note_exemplar(0, took, trace, ended);
        }
        let plain = metrics.text().expect("text");
        let text = metrics.with_exemplars(plain.clone());
        let sample = |bound: &str| format!("{DURATION_BUCKET}le=\"{bound}\",method=\"/a/B\"}}");
        for (bound, line) in [
            ("0.0025", "2 # {trace_id=\"bb\"} 0.002 1.500"),
            ("0.005", "2"),
            ("+Inf", "3 # {trace_id=\"cc\"} 60 1.500"),
        ] {
            let line = format!("{} {line}", sample(bound));
            assert!(text.lines().any(|found| found == line), "{line}: {text}");
        }
        let differing = text.lines().zip(plain.lines()).filter(|(with, without)| with != without).count();
        assert_eq!((differing, text.lines().count()), (2, plain.lines().count()));
    }

    #[test]
    fn counters_of_a_scrape_follow_the_registry_in_their_own_order() {
        let rows = vec![("b".to_owned(), 2), ("a".to_owned(), 1)];
        let family = CounterFamily { name: "things", help: "Things, by name", label: "name", rows };
        let metrics = Metrics::new(Vec::new());
        let begin = metrics.text().expect("text");
        let text = metrics.admin_text(vec![family]).expect("text");
        let further = "# HELP keyward_things Things, by name.\n# TYPE keyward_things counter\n\
                       keyward_things_total{name=\"b\"} 2\nkeyward_things_total{name=\"a\"} 1\n";
        let begin = begin.strip_suffix("# EOF\n").expect("an end");
        let end = text.strip_prefix(begin).expect("the registry comes first");
        let process = end.strip_suffix(&format!("{further}# EOF\n")).expect("the families come last");
        let mut own = process.lines().filter(|line| line.starts_with("keyward_"));
        let is_expected = |line: &str| {
            ["keyward_ready 0", "keyward_degraded 0"].contains(&line)
                || line.starts_with("keyward_fleet_requests_total{")
        };
        assert!(own.all(is_expected), "{process}");
    }

    /// The conversion to the old text leaves help texts as they are.
    #[test]
    fn every_family_has_a_type_and_a_help_text_without_escapes() {
        let text = Metrics::new(Vec::new()).admin_text(Vec::new()).expect("text");
        let mut types = 0;
        for line in text.lines().filter(|line| line.starts_with('#')) {
            assert!(!line.contains(['\\', '"']), "{line}");
            if let Some(described) = line.strip_prefix("# TYPE ") {
                let kind = described.split_once(' ').map(|(_, kind)| kind);
                assert!(matches!(kind, Some("counter" | "gauge" | "histogram")), "{line}");
                types += 1;
            }
        }
        assert!(types > 50, "{types}");
    }
}
