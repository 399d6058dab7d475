//! The checks of configured certificates.
//!
//! Owns: the thresholds of a finding. Must not know: the files of a certificate. Invariant: each use of a
//! certificate is one finding at most.

use std::time::{Duration, SystemTime};

use super::{DoctorFindings, Severity};
use crate::config::Config;
use crate::config::certificate_expiry::configured_certificates;

/// A certificate expiring within `ENDS_SOON` is a warning, within `ENDS_NOW` an error.
const ENDS_SOON: Duration = Duration::from_secs(30 * 24 * 3600);
const ENDS_NOW: Duration = Duration::from_secs(7 * 24 * 3600);

/// Checks the certificates of the configuration.
pub(super) fn check(config: &Config, now: SystemTime, findings: &mut DoctorFindings) {
    for certificate in configured_certificates(config) {
        let left = certificate.ends.duration_since(now).unwrap_or_default();
        if left > ENDS_SOON {
            continue;
        }
        let (severity, when) = match left {
            Duration::ZERO => (Severity::Error, "it has ended".to_owned()),
            left if left < ENDS_NOW => {
                (Severity::Error, format!("it ends in {} hours", left.as_secs() / 3600))
            }
            left => (Severity::Warning, format!("it ends in {} days", left.as_secs() / 86_400)),
        };
        let what = format!("{when}: then {}", certificate.usage.loss());
        findings.add(
            severity,
            "certificate",
            certificate.key(),
            what,
            "renew it in place: files are followed",
        );
    }
}
