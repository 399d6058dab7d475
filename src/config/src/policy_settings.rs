//! The resolved `[policy]`: the mode, and the rules in force.
//!
//! Owns: the settings. Must not know: the decision on a call.

use std::path::PathBuf;
use std::sync::Arc;

use crate::EtcdLogin;
use crate::policy_document::{KeyTemplate, PolicyDocument};
use crate::usage_limits::UsageLimits;
use keyward_etcd::rpc::namespace::lease_ids::LeaseScope;

/// The settings of `[policy]`.
#[derive(Clone, Debug, PartialEq)]
pub struct PolicySettings {
    /// The mode for callers without a binding of their own mode.
    pub mode: PolicyMode,
    /// The treatment of methods without a row in the method table, for callers under
    /// [`PolicyMode::Enforce`].
    pub unknown_methods: UnknownMethods,
    /// The treatment of calls without an etcd user while auth is on, whatever the mode.
    pub require_identity: RequireIdentity,
    /// The policy file, if any.
    pub file: Option<PathBuf>,
    /// The rules of the policy file; empty without a file.
    pub document: Arc<PolicyDocument>,
    /// The policy in etcd, which replaces the file's rules.
    pub stored: Option<PolicyInEtcd>,
    /// The namespaces of listeners, by the listener's name.
    pub listener_namespaces: Vec<(Arc<str>, KeyTemplate)>,
    /// The leases that callers in a namespace can name.
    pub namespace_leases: LeaseScope,
    /// The consequence of an exceeded limit on usage.
    pub limits_mode: PolicyMode,
    /// The limits of each peer, where no role of the peer says otherwise.
    pub peer_limits: UsageLimits,
    /// The limits of all peers of a listener together, by the listener's name.
    pub listener_limits: Vec<(Arc<str>, UsageLimits)>,
}

impl Default for PolicySettings {
    fn default() -> Self {
        Self {
            mode: PolicyMode::Off,
            unknown_methods: UnknownMethods::Refuse,
            require_identity: RequireIdentity::Strict,
            file: None,
            document: Arc::default(),
            stored: None,
            listener_namespaces: Vec::new(),
            namespace_leases: LeaseScope::Own,
            limits_mode: PolicyMode::Enforce,
            peer_limits: UsageLimits::default(),
            listener_limits: Vec::new(),
        }
    }
}

/// The place of the policy in etcd.
#[derive(Clone, Debug, PartialEq)]
pub struct PolicyInEtcd {
    /// Key prefix, ending with a slash.
    pub prefix: Arc<str>,
    /// The etcd user for reading and writing the prefix; `None` with auth off.
    pub login: Option<EtcdLogin>,
    /// The file of the last good generation, for a restart without etcd.
    pub state_file: Option<PathBuf>,
}

/// The consequence of a denial. Later variants are stricter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PolicyMode {
    /// No call is judged.
    #[default]
    Off,
    /// Denials are counted and logged, and the call goes on.
    Shadow,
    /// Denied calls are refused.
    Enforce,
}

impl PolicyMode {
    /// The mode's name in the configuration.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Shadow => "shadow",
            Self::Enforce => "enforce",
        }
    }
}

/// The treatment of a method without a row in the method table: no rule can name its keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnknownMethods {
    /// Refused as unimplemented.
    Refuse,
    /// Passed on.
    Allow,
}

/// The treatment of calls without an etcd user while auth is on at etcd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequireIdentity {
    /// Such calls are refused as by the newest etcd, and nothing is sent.
    Strict,
    /// Such calls go to a member, which decides by its version.
    AsEtcd,
}
