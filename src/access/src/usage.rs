//! The usage of the cluster by peers, roles and listeners, the limits on usage, and shedding for the cluster.
//!
//! Owns: token buckets, counts, and the pressure on the cluster. Must not know: sockets, members, how a call
//! is refused. Invariants: one step of a call takes atomics only; a caller without limits has no usage at
//! all.

mod bucket;
mod byte_bucket;
pub mod call_usage;
pub mod caller_usage;
pub mod exceeded;
mod lease_ledger;
pub mod limiter;
pub mod live_usage;
pub mod refusal_pace;
pub mod register;
pub mod shedding;
pub mod suspect_reads;
