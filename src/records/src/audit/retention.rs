//! How long the kept files of the audit log reach back, and how long they will at the present rate.
//!
//! Owns: the forecast, and the count of files removed too early. Must not know: how a file is rotated or
//! removed. Invariants: no file is kept for its age, since a disk is finite: that records go before
//! `audit.keep_for` is told before, and counted.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use keyward_config::audit_settings::AuditFileSettings;
use keyward_telemetry::audit_metrics::AuditMetrics;

/// The retention of the audit log of the process.
#[derive(Debug, Default)]
pub struct AuditRetention {
    /// The number of old files kept, and how long records are to be kept; `None` for no such time.
    wanted: Option<(usize, Duration)>,
    kept: Mutex<KeptFiles>,
    metrics: Option<AuditMetrics>,
}

#[derive(Debug, Default)]
struct KeptFiles {
    /// The number of files with records; the part of the youngest one that is used.
    files: f64,
    oldest: Option<SystemTime>,
    is_short: bool,
    removed_early: u64,
}

/// The state of the retention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetentionReport {
    /// How long records are to be kept.
    pub keep_for: Duration,
    /// How long records are kept at the rate of the kept files, if shorter.
    pub short: Option<Duration>,
    /// The number of files removed since the start with a record younger than that.
    pub removed_early: u64,
}

impl AuditRetention {
    /// The retention of a file with these settings.
    #[must_use]
    pub fn new(file: Option<&AuditFileSettings>, metrics: AuditMetrics) -> Self {
        let wanted = |file: &AuditFileSettings| file.keep_for.map(|time| (file.keep, time));
        Self { wanted: file.and_then(wanted), kept: Mutex::default(), metrics: Some(metrics) }
    }

    fn kept(&self) -> MutexGuard<'_, KeptFiles> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes the number of files, with the used part of the youngest, and the time of the oldest record.
    pub(super) fn note(&self, files: f64, oldest: Option<SystemTime>, now: SystemTime) {
        let Some((_, keep_for)) = self.wanted else { return };
        let mut kept = self.kept();
        (kept.files, kept.oldest) = (files, oldest);
        let short = self.short(&kept, now);
        if std::mem::replace(&mut kept.is_short, short.is_some()) == short.is_some() {
            return;
        }
        match short {
            Some(lasts) => tracing::warn!(
                lasts_hours = lasts.as_secs() / 3600,
                keep_for_hours = keep_for.as_secs() / 3600,
                "at the present rate audit records are removed before audit.keep_for"
            ),
            None => tracing::info!("audit records are kept for audit.keep_for again"),
        }
        if let Some(metrics) = &self.metrics {
            metrics.kept_too_short.set(short.is_some().into());
        }
    }

    /// How long records are kept at the rate of the kept files, if shorter than wanted. A first file that was
    /// not rotated yet says nothing.
    fn short(&self, kept: &KeptFiles, now: SystemTime) -> Option<Duration> {
        let (keep, keep_for) = self.wanted?;
        let reach = now.duration_since(kept.oldest?).ok()?;
        if kept.files < 1.0 || reach >= keep_for {
            return None;
        }
        #[expect(clippy::cast_precision_loss, reason = "a forecast")]
        let lasts = reach.mul_f64((keep as f64 + 1.0) / kept.files);
        Some(lasts).filter(|lasts| *lasts < keep_for)
    }

    /// Notes that a file was removed, whose youngest record is of `youngest`.
    pub(super) fn note_removed(&self, file: &str, youngest: Option<SystemTime>, now: SystemTime) {
        let Some((_, keep_for)) = self.wanted else { return };
        let age = youngest.and_then(|youngest| now.duration_since(youngest).ok());
        if age.is_some_and(|age| age < keep_for) {
            self.kept().removed_early += 1;
            tracing::error!(file, "audit records younger than audit.keep_for were removed");
            if let Some(metrics) = &self.metrics {
                metrics.removed_early.inc();
            }
        }
    }

    /// The state now; `None` without a wanted time.
    #[must_use]
    pub fn report(&self, now: SystemTime) -> Option<RetentionReport> {
        let (_, keep_for) = self.wanted?;
        let kept = self.kept();
        let short = self.short(&kept, now);
        Some(RetentionReport { keep_for, short, removed_early: kept.removed_early })
    }
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    #[test]
    fn what_will_be_removed_too_early_is_foretold_at_the_rate_of_the_kept_files() {
        let retention = AuditRetention { wanted: Some((30, 24 * HOUR)), ..AuditRetention::default() };
        let short = |files, hours| {
            retention.note(files, Some(UNIX_EPOCH), UNIX_EPOCH + hours * HOUR);
            retention.report(UNIX_EPOCH + hours * HOUR).and_then(|report| report.short)
        };
        assert_eq!(short(0.9, 1), None, "nothing was rotated yet");
        assert_eq!(short(1.0, 1), None, "31 hours");
        assert_eq!(short(2.0, 1), Some(HOUR * 31 / 2));
        assert_eq!(short(31.0, 23), Some(23 * HOUR));
        assert_eq!(short(31.0, 25), None, "the files reach back further");
        retention.note_removed("a", Some(UNIX_EPOCH), UNIX_EPOCH + 24 * HOUR);
        retention.note_removed("b", None, UNIX_EPOCH);
        assert_eq!(retention.report(UNIX_EPOCH).map(|report| report.removed_early), Some(0));
        retention.note_removed("c", Some(UNIX_EPOCH), UNIX_EPOCH + 23 * HOUR);
        assert_eq!(retention.report(UNIX_EPOCH).map(|report| report.removed_early), Some(1));
        assert_eq!(AuditRetention::default().report(UNIX_EPOCH), None);
    }
}
