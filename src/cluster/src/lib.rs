//! The cluster as Keyward sees it: its members, their fitness, and the choice of a member for a call.
//!
//! Must not know: credentials, the connections that carry calls, downstream, policy.

pub mod alarm_sighting;
pub mod change_notifications;
pub mod choose;
pub mod cluster_outage;
pub mod discovery;
pub mod fitness;
pub mod leaderless;
pub mod membership;
pub mod open_holes;
pub mod outage_state;
#[cfg(any(test, feature = "testing"))]
pub mod test_member;
pub mod version;
