//! Checks of limits on usage, of shedding, and of the memory budgets.
//!
//! Owns: the words for limits. Must not know: how usage and memory are counted. Invariant: a limit that
//! refuses now and then does its work, and is no finding.

use super::{DoctorFindings, DoctorInputs};
use crate::usage::exceeded::{LimitKind, LimitScope};

impl DoctorInputs<'_> {
    /// Checks that the process's memory has room for its budgets, and as much again as a third of them for
    /// connections and the allocator.
    pub(super) fn memory_budgets(&self, findings: &mut DoctorFindings) {
        let Some(limit) = self.config.memory_limit else { return };
        let budgets = self.config.memory_budgets();
        let sum = self.config.memory_budget() as u64;
        if sum <= limit / 4 * 3 {
            return;
        }
        let rows = budgets.iter().filter(|budget| budget.bytes > 0);
        let rows: Vec<_> = rows.map(|row| format!("{} {} MiB", row.key, row.bytes >> 20)).collect();
        let what = format!(
            "clients may make Keyward hold {} MiB ({}), and its control group allows {} MiB",
            sum >> 20,
            rows.join(", "),
            limit >> 20
        );
        let fix = "raise the memory limit of the service or the pod, or take the keys out of the \
                   configuration: their defaults fit the limit";
        findings.warning("memory_budgets", "limits", what, fix);
    }

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
