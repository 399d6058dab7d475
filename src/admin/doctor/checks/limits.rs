//! Checks of limits on usage, and of shedding.
//!
//! Owns: the words for limits. Must not know: how usage is counted. Invariant: a limit that refuses now and
//! then does its work, and is no finding.

use super::{DoctorFindings, DoctorInputs};
use crate::usage::exceeded::{LimitKind, LimitScope};

impl DoctorInputs<'_> {
    /// Checks for limits that refuse all the time, and for shedding.
    pub(super) fn limits(&self, findings: &mut DoctorFindings) {
        for exceeded in self.constant_limits {
            let (scope, limit) = (exceeded.scope, exceeded.limit);
            if matches!(limit, LimitKind::DbSize | LimitKind::Latency) {
                let what = "calls of lower priority have been refused in nearly all of the last ten minutes";
                let fix = "look at the cluster: keyward status; compact and defragment, or add what it lacks";
                findings.warning("sheds", format!("protection.{}", limit.name()), what, fix);
                continue;
            }
            let table = match scope {
                LimitScope::Peer => "policy.peer_limits, or a role's limits",
                LimitScope::Role => "a role's total_limits",
                LimitScope::Listener => "listener.limits",
                LimitScope::Cluster => "protection",
            };
            let what =
                format!("{table}: {} has refused calls in nearly all of the last ten minutes", limit.name());
            let fix = "the access log names the peers (limit=...); change what they do, or raise the limit";
            findings.warning("limit_refuses", limit.name(), what, fix);
        }
    }
}
