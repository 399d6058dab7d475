//! The conditions that the log tells and no other check examines.
//!
//! Owns: the severity of each, and the form of the finding. Must not know: the list of conditions. Invariant:
//! a condition that another check examines gives no second finding.

use super::{DoctorFindings, Severity, name_of};
use keyward_cluster::membership::Membership;
use keyward_cluster::version::VersionTraits;
use keyward_telemetry::conditions::{ConditionTelling, EVENT_HOLDS, StandingCondition};

/// The condition whose remedy depends on the members' versions.
const STATUS_REFUSED: &str = "probe_status_refused";

/// Checks the conditions that hold.
pub(super) fn check(standing: &[StandingCondition], members: &Membership, findings: &mut DoctorFindings) {
    for condition in standing {
        let StandingCondition { row, is_error, .. } = condition;
        let (is_event, fix) = match row.telling {
            ConditionTelling::Event { fix } => (true, fix),
            ConditionTelling::Until { fix } | ConditionTelling::Lasting { fix } => (false, fix),
            ConditionTelling::Check(_) | ConditionTelling::NoProcess { .. } => continue,
        };
        let severity = match (is_error, is_event) {
            (true, false) => Severity::Error,
            (true, true) | (false, false) => Severity::Warning,
            (false, true) => Severity::Note,
        };
        findings.add(severity, "logged", row.name, what(condition, is_event), fix_of(row.name, fix, members));
    }
}

/// The remedy: an upgrade of the members that hide their Status from users, and of no other.
fn fix_of(name: &str, fix: &'static str, members: &Membership) -> String {
    if name != STATUS_REFUSED {
        return fix.to_owned();
    }
    let hides = |traits: VersionTraits| !traits.tells_status_to_users;
    let hiding = members.members.iter().filter(|member| hides(member.traits()));
    let hiding: Vec<String> = hiding.map(|member| name_of(member)).collect();
    if hiding.is_empty() {
        return "give cluster.probe a user that exists, with its present password: members of these versions \
                tell every user their status"
            .to_owned();
    }
    format!("for {}: {fix}", hiding.join(", "))
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
