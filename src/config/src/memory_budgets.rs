//! The memory that clients can make the process hold: its budgets, and their sum.
//!
//! Owns: the list of budgets, and their defaults within a limit on the process's memory. Must not know: how a
//! budget is counted, the source of the limit. Invariants: a key that bounds bytes held for clients has a row
//! here; the defaults together take at most half of the limit, so that connections and the allocator have the
//! other half (docs/decisions.md#d70).

use super::Config;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// Divisor: unauthenticated clients together have a quarter of `limits.replay_buffer` in addition.
pub const UNAUTHENTICATED_PART: usize = 4;
/// Memory for the requests of blocked calls (Lock, Campaign, Observe), per shard: a name, a lease, perhaps a
/// value each. The effective limit is never below a single request of the largest size.
pub const BLOCKED_REQUEST_MEMORY: usize = 8 << 20;

/// A budget of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryBudget {
    /// The key that sets the budget, or a name.
    pub key: &'static str,
    /// Its bytes.
    pub bytes: usize,
}

impl Config {
    /// All budgets.
    #[must_use]
    pub fn memory_budgets(&self) -> Vec<MemoryBudget> {
        let requests = self.limits.replay_buffer;
        let blocked = BLOCKED_REQUEST_MEMORY.max(self.limits.request_size) * self.runtime.shards.get();
        let rows = [
            ("limits.replay_buffer", requests),
            ("limits.replay_buffer, unauthenticated", requests / UNAUTHENTICATED_PART),
            ("blocked requests", blocked),
            ("limits.unread_buffer", self.limits.unread.buffer),
            ("watch.buffer", self.watch.buffer),
            ("log.buffer", self.log.buffer),
            ("audit.queue, and its sinks", self.audit.as_ref().map_or(0, |audit| audit.memory())),
        ];
        rows.map(|(key, bytes)| MemoryBudget { key, bytes }).to_vec()
    }

    /// The sum of all budgets, in bytes.
    #[must_use]
    pub fn memory_budget(&self) -> usize {
        self.memory_budgets().iter().map(|budget| budget.bytes).sum()
    }
}

/// The defaults of the large budgets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BudgetDefaults {
    /// Of `limits.replay_buffer`.
    pub(super) requests: u64,
    /// Of `limits.unread_buffer`.
    pub(super) unread: u64,
    /// Of `watch.buffer`.
    pub(super) streams: u64,
}

impl BudgetDefaults {
    /// The defaults within `limit` bytes for the process: 3/32, 3/16 and 3/16 of the limit, up to the
    /// defaults without a limit.
    pub(super) fn within(limit: Option<u64>) -> Self {
        let part = |of: u64, least: u64, most: u64| {
            limit.map_or(most, |limit| (limit / of * 3 / KIB * KIB).clamp(least, most))
        };
        let large = part(16, 16 * MIB, 512 * MIB);
        Self { requests: part(32, 8 * MIB, 256 * MIB), unread: large, streams: large }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resolve;

    const GIB: u64 = 1 << 30;

    fn configured(lines: &str, limit: Option<u64>) -> Config {
        let required = "listener = [{ name = 'a', address = '127.0.0.1:1' }]\n\
                        cluster.endpoints = ['http://127.0.0.1:2']\nruntime.shards = 4\n";
        resolve::within(&format!("{required}{lines}"), limit).expect("valid").0
    }

    fn sum(limit: Option<u64>) -> u64 {
        configured("", limit).memory_budget() as u64
    }

    #[test]
    fn the_defaults_take_half_of_a_limit() {
        let defaults = BudgetDefaults { requests: 256 * MIB, unread: 512 * MIB, streams: 512 * MIB };
        assert_eq!([None, Some(4 * GIB)].map(BudgetDefaults::within), [defaults; 2]);
        let third = BudgetDefaults { requests: 96 * MIB, unread: 192 * MIB, streams: 192 * MIB };
        assert_eq!(BudgetDefaults::within(Some(GIB)), third);
        assert_eq!(sum(None), 256 * MIB + 64 * MIB + 32 * MIB + 2 * 512 * MIB + 4 * MIB);
        for limit in [512 * MIB, GIB, 2 * GIB, 3 * GIB, 8 * GIB] {
            assert!(sum(Some(limit)) <= limit / 2 + 36 * MIB, "{limit}");
        }
        let own = configured("limits.unread_buffer = '700MiB'\n", Some(GIB));
        assert_eq!((own.limits.unread.buffer, own.watch.buffer), (700 << 20, 192 << 20));
    }

    /// The memory limit of the chart's pods.
    #[test]
    fn the_charts_limit_is_above_all_budgets() {
        let values = include_str!("../../../deploy/helm/keyward/values.yaml");
        let (_, limits) = values.split_once("\n  limits:\n    memory: ").expect("a limit");
        let gib: u64 = limits.split_once("Gi").expect("in GiB").0.parse().expect("a number");
        assert!(sum(None) * 5 / 4 <= gib * GIB, "also where the limit cannot be read");
    }
}
