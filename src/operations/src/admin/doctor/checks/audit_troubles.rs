//! The checks of the audit log: its file is written and at its path, and its sinks take the records.
//!
//! Owns: the words of the findings. Must not know: how records are written and sent.

use std::time::{Duration, SystemTime};

use super::DoctorFindings;
use keyward_config::audit_settings::{AuditEvent, AuditSettings, OnFull};
use keyward_records::audit::log::{AuditReport, AuditSinksReport};
use keyward_records::audit::log_trouble::LogTroubleReport;

/// How long a file that somebody moved is told.
const TOLD: Duration = Duration::from_secs(24 * 3600);
/// A loss that began so many seconds ago is told in seconds.
const SECONDS_TOLD: u64 = 300;
/// The advice on a file that somebody moved.
const LEAVE: &str = "leave the file to Keyward, which rotates it by audit.max_size and audit.max_age: take \
                     it out of logrotate";

/// Reports what keeps records from the file and from the sinks.
pub(super) fn check(
    settings: Option<&AuditSettings>,
    report: &AuditReport,
    now: SystemTime,
    findings: &mut DoctorFindings,
) {
    check_file(settings, &report.trouble, now, findings);
    check_sinks(&report.sinks, now, findings);
    check_losses(report, now, findings);
}

/// Reports records that were lost within a day.
fn check_losses(report: &AuditReport, now: SystemTime, findings: &mut DoctorFindings) {
    let of_sinks = report.sinks.sinks.iter().map(|sink| (format!("audit.{}", sink.name), sink.lost));
    for (subject, lost) in [("audit".to_owned(), report.lost)].into_iter().chain(of_sinks) {
        let since = |time: SystemTime| now.duration_since(time).unwrap_or_default();
        let Some(lost) = lost.filter(|lost| since(lost.last) < TOLD) else { continue };
        let what = format!(
            "{} audit records are lost, {}",
            lost.records,
            between(since(lost.since).as_secs(), since(lost.last).as_secs())
        );
        let fix = "keyward audit search --event lost FILES has the times of the gaps; runbook \
                   KeywardAuditRecordsLost";
        findings.warning("audit_records_lost", subject, what, fix);
    }
}

/// The time of a happening, in seconds where its begin is less than some minutes ago.
fn between(from: u64, to: u64) -> String {
    let (unit, noun) = if from < SECONDS_TOLD { (1, "seconds") } else { (60, "minutes") };
    let (from, to) = (from / unit, to / unit);
    if from == to { format!("{to} {noun} ago") } else { format!("from {from} to {to} {noun} ago") }
}

/// Reports a file that cannot be written, and a file that somebody else moved or removed.
fn check_file(
    settings: Option<&AuditSettings>,
    report: &LogTroubleReport,
    now: SystemTime,
    findings: &mut DoctorFindings,
) {
    let since = |time: SystemTime| now.duration_since(time).unwrap_or_default();
    if let Some(trouble) = &report.unwritable {
        let what = format!(
            "{} cannot be written for {} s ({}): {}",
            settings
                .and_then(|settings| settings.file.as_ref())
                .map_or_else(|| "the file".to_owned(), |file| file.path.display().to_string()),
            since(trouble.since).as_secs(),
            trouble.error,
            effect_of_a_full_log(settings)
        );
        let fix = "make room on the disk, or repair it: Keyward goes on by itself";
        findings.error("audit_unwritable", "audit.file", what, fix);
    }
    if let Some((last, at)) = report.unstopped.filter(|(_, at)| since(*at) < TOLD) {
        let what = format!(
            "the process before wrote up to record {last} and did not end with a stop, as this one saw {}: \
             records of its last calls may be missing",
            between(since(at).as_secs(), since(at).as_secs())
        );
        let fix = "the log of the process before tells why it ended: killed, crashed, or the disk was full; \
                   keyward audit verify FILES names each such end; runbook KeywardAuditRecordsLost";
        findings.warning("audit_not_stopped", "audit.file", what, fix);
    }
    if let Some(trouble) = &report.lost_path {
        let what = format!(
            "was moved, and no new file can be begun ({}): the records go on into the moved file",
            trouble.error
        );
        findings.error("audit_file_moved", "audit.file", what, LEAVE);
    } else if let Some((moved, at)) = report.moved.as_ref().filter(|(_, at)| since(*at) < TOLD) {
        let (name, minutes) = (&moved.name, since(*at).as_secs() / 60);
        let deed = if moved.is_removed {
            format!("removed {name} with its records")
        } else {
            format!("moved the file to {name}")
        };
        let what = format!("somebody {deed}, {minutes} minutes ago; the records go on in a new file");
        findings.warning("audit_file_moved", "audit.file", what, LEAVE);
    }
}

/// What calls with records have to expect.
fn effect_of_a_full_log(settings: Option<&AuditSettings>) -> &'static str {
    let has_logins = settings.is_some_and(|settings| settings.events.has(AuditEvent::Login));
    match (settings.map(|settings| settings.on_full), has_logins) {
        (Some(OnFull::Drop), _) => "changes are made without a record (audit.on_full is \"drop\")",
        (_, true) => {
            "once the queue is full, calls with records are refused, logins too (audit.on_full is \"block\")"
        }
        (_, false) => "once the queue is full, calls with records are refused (audit.on_full is \"block\")",
    }
}

/// Reports sinks that take no records, and calls that are refused for that.
fn check_sinks(report: &AuditSinksReport, now: SystemTime, findings: &mut DoctorFindings) {
    for sink in &report.sinks {
        let Some(trouble) = &sink.trouble else { continue };
        let since = now.duration_since(trouble.since).unwrap_or_default().as_secs();
        let mut what =
            format!("no audit records are taken for {since} s ({}), and {} wait", trouble.error, sink.unsent);
        let subject = format!("audit.{}", sink.name);
        let fix = "repair the receiver: the records that wait in the audit files arrive by themselves";
        if report.is_behind {
            what.push_str("; calls with records are refused: a sink is behind by more than audit.keep files");
            findings.error("audit_sinks", subject, what, fix);
        } else {
            findings.warning("audit_sinks", subject, what, fix);
        }
    }
}
