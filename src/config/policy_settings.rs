//! The protections kept whatever the rules of a policy say.
//!
//! Owns: the resolved value of `policy.require_identity`. Must not know: the enforcement.

/// The settings of the section `[policy]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PolicySettings {
    /// The treatment of calls without an etcd user while auth is on.
    pub require_identity: RequireIdentity,
}

/// The treatment of calls without an etcd user while auth is on at etcd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequireIdentity {
    /// Such calls are refused as by the newest etcd, and nothing is sent.
    Strict,
    /// Such calls go to a member, which decides by its version.
    AsEtcd,
}
