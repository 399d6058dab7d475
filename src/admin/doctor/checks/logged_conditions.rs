//! The conditions that the log tells and no other check examines.
//!
//! Owns: the severity of each, and the form of the finding. Must not know: the list of conditions. Invariant:
//! a condition that another check examines gives no second finding.

use super::{DoctorFindings, Severity};
use crate::telemetry::conditions::{ConditionTelling, EVENT_HOLDS, StandingCondition};

/// Checks the conditions that hold.
pub(super) fn check(standing: &[StandingCondition], findings: &mut DoctorFindings) {
    for condition in standing {
        let StandingCondition { row, is_error, .. } = condition;
        let (is_event, fix) = match row.telling {
            ConditionTelling::Event { fix, .. } => (true, fix),
            ConditionTelling::Until { fix, .. } | ConditionTelling::Lasting { fix } => (false, fix),
            ConditionTelling::Check(_) | ConditionTelling::NoProcess { .. } => continue,
        };
        let severity = match (is_error, is_event) {
            (true, false) => Severity::Error,
            (true, true) | (false, false) => Severity::Warning,
            (false, true) => Severity::Note,
        };
        findings.add(severity, "logged", row.name, what(condition, is_event), fix);
    }
}

fn what(condition: &StandingCondition, is_event: bool) -> String {
    let StandingCondition { row, records, last, details, .. } = condition;
    let gap = if details.is_empty() { "" } else { ": " };
    let times = match (records, is_event) {
        (1, _) => "once".to_owned(),
        (_, true) => {
            format!("{records} times, with less than {} minutes between", EVENT_HOLDS.as_secs() / 60)
        }
        (_, false) => format!("{records} times"),
    };
    format!("the log has {:?}{gap}{details} ({times}, the last time {} s ago)", row.message, last.as_secs())
}
