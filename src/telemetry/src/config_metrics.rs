//! Metrics of the configuration: the last reading of its files, and the expiry of its certificates.
//!
//! Owns: names and labels. Must not know: the configuration, the triggers of a reload. Invariants: the labels
//! of certificates come from the configuration alone; the names of etcd users are shown on the admin address
//! only, never on a listener for clients.

use std::time::SystemTime;

use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

use crate::single_label::{SingleLabel, one};

/// The use and the name of a certificate.
type CertificateLabels = [(&'static str, String); 2];

/// Metrics of the configuration.
pub struct ConfigMetrics {
    last_successful: Gauge,
    last_attempt: Gauge,
    certificates: Family<CertificateLabels, Gauge>,
    limits: Family<SingleLabel, Gauge>,
}

impl ConfigMetrics {
    /// Registers the metrics; those in `admin` are shown on the admin address only.
    pub(super) fn registered(registry: &mut Registry, admin: &mut Registry) -> Self {
        let (last_successful, last_attempt) = (Gauge::default(), Gauge::default());
        let help = "1 if the configuration was accepted when last read, at the start or by a reload; else 0";
        registry.register("config_last_reload_successful", help, Gauge::clone(&last_successful));
        let name = "config_last_reload_attempt_timestamp";
        let help = "When the configuration was last read, accepted or not, in seconds of the Unix epoch";
        registry.register_with_unit(name, help, Unit::Seconds, Gauge::clone(&last_attempt));
        let certificates = Family::default();
        let help = "Expiry of a configured certificate, by use, in seconds of the Unix epoch";
        let name = "certificate_not_after_timestamp";
        admin.register_with_unit(name, help, Unit::Seconds, Family::clone(&certificates));
        let limits = Family::default();
        let help = "Limit in force, by the key of the configuration: a number, or bytes";
        registry.register("configured_limit", help, Family::clone(&limits));
        Self { last_successful, last_attempt, certificates, limits }
    }

    /// Notes that the configuration was read, and if it was accepted.
    pub fn reload_attempted(&self, is_accepted: bool, now: SystemTime) {
        self.last_successful.set(is_accepted.into());
        self.last_attempt.set(unix_seconds(now));
    }

    /// Replaces all certificates, each by its use, its name and its expiry.
    pub fn put_certificates(
        &self,
        certificates: impl IntoIterator<Item = (&'static str, String, SystemTime)>,
    ) {
        self.certificates.clear();
        for (usage, name, ends) in certificates {
            let labels = [("use", usage.to_owned()), ("name", name)];
            self.certificates.get_or_create(&labels).set(unix_seconds(ends));
        }
    }
}

impl ConfigMetrics {
    /// Shows limits in force, each by its key.
    pub fn put_limits(&self, limits: &[(&'static str, usize)]) {
        for (key, limit) in limits {
            self.limits.get_or_create(&one("limit", *key)).set(i64::try_from(*limit).unwrap_or(i64::MAX));
        }
    }
}

/// Seconds of the Unix epoch; 0 for earlier times.
fn unix_seconds(time: SystemTime) -> i64 {
    let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
}
