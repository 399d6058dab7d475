//! The checks of rules that can apply to no caller, or refuse all of their callers unsaid.
//!
//! Owns: the words of the findings. Must not know: how such rules are found.

use super::DoctorFindings;
use keyward_access::policy::unproved_mappings::unproved_mappings;
use keyward_access::policy::unreachable_rules::UnreachableRule;
use keyward_config::Config;

/// Reports each rule that can apply to no caller, and each rule to users whom Keyward cannot prove.
pub(super) fn check(config: &Config, unreachable: &[UnreachableRule], findings: &mut DoctorFindings) {
    for UnreachableRule { rule, reason } in unreachable {
        let what = format!("it applies to no caller of any listener, and confines nobody: {reason}");
        let fix =
            "mend the rule, or the listeners; keyward policy explain shows the roles and the mode of a peer";
        findings.error("rule_unreachable", rule.as_str(), what, fix);
    }
    for rule in unproved_mappings(config) {
        let what = "as = \"same\", and no [[user]] row is for any of its users: while auth is on at etcd \
                    every call of its peers is refused (permission denied, refused_by=\"mapping\")";
        let fix = "add a [[user]] row with what proves the users (name = \"*\" with mint or jwt for all of \
                   them), or remove the rule";
        findings.warning("mapping_unproved", rule, what, fix);
    }
}
