//! Time limits of streams during an outage of all members.
//!
//! Owns: the times and their defaults. Must not know: the waiting streams.

use std::time::Duration;

/// Time limits of streams during an outage of all members.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutageTimes {
    /// etcd's `--election-timeout`.
    pub election_timeout: Duration,
    /// Maximum wait of a stream while no member is reachable.
    pub unreachable_timeout: Duration,
}

impl Default for OutageTimes {
    fn default() -> Self {
        Self { election_timeout: Duration::from_secs(1), unreachable_timeout: Duration::from_secs(10) }
    }
}
