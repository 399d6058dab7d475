//! A member's fitness to take calls: load, quarantine, lag behind the leader, store status.
//!
//! Must not know: how a member is found, how calls are sent.

pub mod delay_counters;
pub mod lag;
pub mod member_load;
pub mod quarantine;
pub mod store_status;
pub mod stream_counts;
