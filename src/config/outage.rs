//! How long streams wait while no member serves.
//!
//! Owns: these times and their defaults. Must not know: what waits.

use std::time::Duration;

/// How long streams wait while no member serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutageTimes {
    /// etcd's `--election-timeout`.
    pub election_timeout: Duration,
    /// How long a stream waits while no member can be reached.
    pub unreachable_timeout: Duration,
}

impl Default for OutageTimes {
    fn default() -> Self {
        Self { election_timeout: Duration::from_secs(1), unreachable_timeout: Duration::from_secs(10) }
    }
}
