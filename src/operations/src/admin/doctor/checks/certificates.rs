//! The checks of configured certificates and revocation lists.
//!
//! Owns: the thresholds of a finding. Must not know: the files of a certificate. Invariant: each use of a
//! certificate is one finding at most.

use std::time::{Duration, SystemTime};

use super::{DoctorFindings, Severity};
use keyward_config::Config;
use keyward_config::certificate_expiry::{CertificateExpiry, CertificateUse, configured_certificates};

/// A certificate expiring within `ENDS_SOON` is a warning, within `ENDS_NOW` an error.
const ENDS_SOON: Duration = Duration::from_secs(30 * 24 * 3600);
const ENDS_NOW: Duration = Duration::from_secs(7 * 24 * 3600);

/// The part of a revocation list's time that is left when a warning begins: lists live for days.
const LIST_PART: u32 = 4;

/// The times left at which a warning and an error begin.
fn thresholds(certificate: &CertificateExpiry) -> (Duration, Duration) {
    match certificate.usage {
        CertificateUse::ListenerCrl => {
            let lives = certificate.ends.duration_since(certificate.begins).unwrap_or_default();
            (lives / LIST_PART, Duration::ZERO)
        }
        _ => (ENDS_SOON, ENDS_NOW),
    }
}

/// Checks the certificates of the configuration.
pub(super) fn check(config: &Config, now: SystemTime, findings: &mut DoctorFindings) {
    for certificate in configured_certificates(config) {
        if let Some(ahead) = certificate.begins.duration_since(now).ok().filter(|ahead| !ahead.is_zero()) {
            let what = format!(
                "it is not good yet, but in {} hours: until then {}",
                ahead.as_secs() / 3600,
                certificate.usage.loss()
            );
            let fix = "put one in its place that is good now, or look at this machine's clock";
            findings.add(Severity::Error, "certificate", certificate.key(), what, fix);
            continue;
        }
        let (soon, at_once) = thresholds(&certificate);
        let left = certificate.ends.duration_since(now).unwrap_or_default();
        if left > soon {
            continue;
        }
        let (severity, when) = match left {
            Duration::ZERO => (Severity::Error, "it has ended".to_owned()),
            left if left < at_once => {
                (Severity::Error, format!("it ends in {} hours", left.as_secs() / 3600))
            }
            left => (Severity::Warning, format!("it ends in {} days", left.as_secs() / 86_400)),
        };
        let then = if left.is_zero() { "" } else { "then " };
        let what = format!("{when}: {then}{}", certificate.usage.loss());
        findings.add(
            severity,
            "certificate",
            certificate.key(),
            what,
            // `CertificateUse::file_key` names the file, and `reload::key_table` follows each of them.
            "renew it in place: Keyward follows the file",
        );
    }
}
