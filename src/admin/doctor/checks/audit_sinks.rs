//! The checks of the audit sinks beside the file.
//!
//! Owns: the words of the findings. Must not know: how records are sent.

use std::time::SystemTime;

use super::DoctorFindings;
use crate::audit::log::AuditSinksReport;

/// Reports sinks that take no records, and calls that are refused for that.
pub(super) fn check(report: &AuditSinksReport, now: SystemTime, findings: &mut DoctorFindings) {
    for sink in &report.sinks {
        let Some(trouble) = &sink.trouble else { continue };
        let since = now.duration_since(trouble.since).unwrap_or_default().as_secs();
        let mut what =
            format!("no audit records are taken for {since} s ({}), and {} wait", trouble.error, sink.unsent);
        let subject = format!("audit.{}", sink.name);
        let fix = "repair the receiver: the records that wait in the audit files arrive by themselves";
        if report.is_behind {
            what.push_str(
                "; calls with records may be refused: a sink is behind by more than audit.keep files",
            );
            findings.error("audit_sinks", subject, what, fix);
        } else {
            findings.warning("audit_sinks", subject, what, fix);
        }
    }
}
