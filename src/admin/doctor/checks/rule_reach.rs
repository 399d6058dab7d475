//! The check of rules that can apply to no caller.
//!
//! Owns: the words of the finding. Must not know: how such rules are found.

use super::DoctorFindings;
use crate::policy::unreachable_rules::UnreachableRule;

/// Reports each rule that can apply to no caller.
pub(super) fn check(unreachable: &[UnreachableRule], findings: &mut DoctorFindings) {
    for UnreachableRule { rule, reason } in unreachable {
        let what = format!("it applies to no caller of any listener, and confines nobody: {reason}");
        let fix =
            "mend the rule, or the listeners; keyward policy explain shows the roles and the mode of a peer";
        findings.error("rule_unreachable", rule.as_str(), what, fix);
    }
}
