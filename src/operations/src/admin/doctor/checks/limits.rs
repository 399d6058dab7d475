//! Checks of limits on usage and connections, of shedding, and of the memory budgets.
//!
//! Owns: the words for limits. Must not know: how usage and memory are counted. Invariant: a limit that
//! refuses now and then does its work, and is no finding.

use std::time::Duration;

use super::{DoctorFindings, DoctorInputs};
use keyward_access::usage::exceeded::{LimitKind, LimitScope};
use keyward_downstream::connection_table::ConnectionOccupancy;

/// Period for reporting a refused connection at a connection limit.
const LIMIT_REACHED_LATELY: Duration = Duration::from_secs(600);

impl DoctorInputs<'_> {
    /// Checks the occupancy of the client connection limits.
    pub(super) fn connections(&self, findings: &mut DoctorFindings) {
        let ConnectionOccupancy { open, most, descriptors, full, address_full } = self.connections;
        let limits = &self.config.limits;
        if let Some(room) = descriptors.filter(|room| room.clients < limits.connections) {
            let what = format!(
                "{} connections are allowed, and with a limit of {} open files {} fit: further clients are \
                 closed",
                limits.connections, room.limit, room.clients
            );
            let fix = "raise the hard limit on open files (LimitNOFILE= of the unit, --ulimit nofile= of the \
                       container) and restart, or lower limits.connections";
            findings.warning("descriptors", "limits.connections", what, fix);
        }
        let connections = descriptors.map_or(limits.connections, |room| limits.connections.min(room.clients));
        let lately = |ago: &Duration| *ago < LIMIT_REACHED_LATELY;
        let reached =
            full.filter(lately).map(|ago| format!(", and {} s ago there was no room", ago.as_secs()));
        if reached.is_some() || open.saturating_mul(10) >= connections.saturating_mul(9) {
            let most = most.map(|(address, count)| format!("; the most, {count}, are of {address}"));
            let what = format!(
                "{open} of {connections} connections are open{}{}: idle ones make room for newcomers, and \
                 where none is idle newcomers are refused",
                most.unwrap_or_default(),
                reached.unwrap_or_default(),
            );
            let fix = "see who they are; raise limits.connections with the limit of open files, or lower \
                limits.connections_per_address";
            findings.warning("connections_full", "limits.connections", what, fix);
        }
        if let Some((ago, address)) = address_full.filter(|(ago, _)| lately(ago)) {
            let what = format!(
                "{} s ago this address had all the {} connections that one may have",
                ago.as_secs(),
                limits.client_connections.per_address
            );
            let fix = "close connections there that nobody uses; where it stands for many clients, raise \
                       limits.connections_per_address, or have the balancer say who they are \
                       (listener.proxy_protocol_from)";
            findings.warning("address_full", address.to_string(), what, fix);
        }
    }

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
