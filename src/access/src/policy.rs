//! Policy decisions about callers: the etcd user of a peer, and the permissions of a caller.
//!
//! Owns: decisions, as plain functions of the known facts. Must not know: sockets, tasks, clocks.

pub mod caller_namespace;
pub mod compiled;
pub mod described_call;
mod grants;
pub mod interval_set;
pub mod learned;
pub mod live_permits;
pub mod mapping;
mod own_grants;
pub mod permit;
pub mod permit_set;
pub mod rules_in_force;
pub mod shadow_register;
pub mod unproved_mappings;
pub mod unreachable_rules;

#[cfg(test)]
mod tests;
