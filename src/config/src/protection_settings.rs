//! The resolved `[protection]`: when calls are shed for the whole cluster's sake.
//!
//! Owns: the settings and their defaults. Must not know: the present pressure.

use std::time::Duration;

use crate::PolicyMode;

/// Default of `protection.db_share`, in thousandths.
const DB_SHARE: u32 = 800;

/// The settings of `[protection]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProtectionSettings {
    /// Off, counting only, or shedding.
    pub mode: PolicyMode,
    /// The part of the database quota from which on writes are shed, in thousandths.
    pub db_share: u32,
    /// The quota in bytes of members that report none.
    pub db_quota: Option<u64>,
    /// The latency that the fastest calls of an interval may not exceed; `None` for any latency.
    pub latency_target: Option<Duration>,
}

impl Default for ProtectionSettings {
    fn default() -> Self {
        Self { mode: PolicyMode::Off, db_share: DB_SHARE, db_quota: None, latency_target: None }
    }
}
