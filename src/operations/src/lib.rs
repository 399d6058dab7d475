//! The doors of operators: the admin socket and address, revocations, and the stored policy.

pub mod admin;
pub mod policy_store;
pub mod revocation;
