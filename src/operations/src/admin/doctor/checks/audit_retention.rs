//! The checks of how long audit records are kept.
//!
//! Owns: the words of the findings. Must not know: how the files are rotated.

use std::time::Duration;

use super::DoctorFindings;
use keyward_records::audit::retention::RetentionReport;

/// Reports records that were removed, or are going to be removed, before `audit.keep_for`.
pub(super) fn check(report: Option<RetentionReport>, findings: &mut DoctorFindings) {
    let Some(RetentionReport { keep_for, short, removed_early }) = report else { return };
    let hours = |time: Duration| time.as_secs() / 3600;
    let fix = "raise audit.max_size or audit.keep, record fewer events, or limit whoever fills the log: \
               keyward audit search shows whose records they are";
    if removed_early > 0 {
        let what = format!(
            "{removed_early} files were removed since the start with records younger than {} h",
            hours(keep_for)
        );
        findings.error("audit_retention", "audit.keep_for", what, fix);
    } else if let Some(lasts) = short {
        let what = format!(
            "at the present rate records are removed after {} h, and are to be kept for {} h",
            hours(lasts),
            hours(keep_for)
        );
        findings.warning("audit_retention", "audit.keep_for", what, fix);
    }
}
