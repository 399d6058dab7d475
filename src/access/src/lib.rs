//! Policies, and limits of usage: the permissions of a caller, and their amounts.

pub mod policy;
pub mod usage;
