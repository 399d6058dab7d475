//! Metrics of the audit log.
//!
//! Owns: names and labels. Must not know: the contents of a record.

use std::sync::atomic::AtomicU64;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

use crate::single_label::{SingleLabel, one};

/// Metrics of the audit log.
#[derive(Clone, Debug)]
pub struct AuditMetrics {
    /// Records written.
    pub written: Counter,
    /// Records waiting for the writer.
    pub waiting: Gauge,
    /// The time of the last successful write, in seconds of the Unix epoch.
    pub written_at: Gauge<f64, AtomicU64>,
    /// Calls refused because their record found no room.
    pub refused: Counter,
    /// 1 while records are going to be removed before their time.
    pub kept_too_short: Gauge,
    /// Files removed before their time.
    pub removed_early: Counter,
    /// Records left out, of this log and of the access log.
    pub left_out: Counter,
    /// Files moved or removed by somebody else.
    pub moved: Counter,
    lost: Family<SingleLabel, Counter>,
    sent: Family<SingleLabel, Counter>,
    unsent: Family<SingleLabel, Gauge>,
    sink_failing: Family<SingleLabel, Gauge>,
}

impl AuditMetrics {
    pub(super) fn registered(registry: &mut Registry, left_out: Counter) -> Self {
        let figures = Self {
            written: Counter::default(),
            waiting: Gauge::default(),
            written_at: Gauge::default(),
            refused: Counter::default(),
            kept_too_short: Gauge::default(),
            removed_early: Counter::default(),
            left_out,
            moved: Counter::default(),
            lost: Family::default(),
            sent: Family::default(),
            unsent: Family::default(),
            sink_failing: Family::default(),
        };
        registry.register("audit_records", "Audit records written", figures.written.clone());
        let help = "Audit records waiting for the writer";
        registry.register("audit_records_waiting", help, figures.waiting.clone());
        let help = "The time of the last write of audit records that succeeded, synced to disk";
        registry.register_with_unit("audit_written_at", help, Unit::Seconds, figures.written_at.clone());
        let help = "Calls refused since their audit record had no room";
        registry.register("audit_calls_refused", help, figures.refused.clone());
        let help = "1 while audit records are removed before audit.keep_for at the present rate";
        registry.register("audit_kept_too_short", help, figures.kept_too_short.clone());
        let help = "Audit files removed with records younger than audit.keep_for";
        registry.register("audit_files_removed_early", help, figures.removed_early.clone());
        let help = "Audit files moved or removed by somebody else than Keyward";
        registry.register("audit_files_moved", help, figures.moved.clone());
        let help = "Audit records lost, by sink";
        registry.register("audit_lost", help, figures.lost.clone());
        let help = "Audit records that a sink beside the file has taken";
        registry.register("audit_sent", help, figures.sent.clone());
        let help = "Audit records that wait for a sink beside the file";
        registry.register("audit_unsent_records", help, figures.unsent.clone());
        let help = "1 while a sink beside the file takes no audit records";
        registry.register("audit_sink_failing", help, figures.sink_failing.clone());
        // From 0 on: the first lost record is an increase.
        drop(["all", "stdout", "syslog", "otlp"].map(|sink| figures.lost(sink)));
        drop(["stdout", "syslog", "otlp"].map(|sink| figures.sent(sink)));
        figures
    }

    /// Records lost by this sink; `all` if no sink has them.
    #[must_use]
    pub fn lost(&self, sink: &'static str) -> Counter {
        self.lost.get_or_create(&one("sink", sink)).clone()
    }

    /// Records that this sink has taken.
    #[must_use]
    pub fn sent(&self, sink: &'static str) -> Counter {
        self.sent.get_or_create(&one("sink", sink)).clone()
    }

    /// Records that wait for this sink.
    #[must_use]
    pub fn unsent(&self, sink: &'static str) -> Gauge {
        self.unsent.get_or_create(&one("sink", sink)).clone()
    }

    /// 1 while this sink takes no records.
    #[must_use]
    pub fn sink_failing(&self, sink: &'static str) -> Gauge {
        self.sink_failing.get_or_create(&one("sink", sink)).clone()
    }
}
