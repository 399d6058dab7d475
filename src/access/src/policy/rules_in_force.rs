//! The source of the rules in force: the configuration, or a generation of the stored policy.
//!
//! Owns: the choice between both. Must not know: how a policy is stored. Invariant (docs/decisions.md#d58):
//! before a stored policy is known no rule is known, neither a mode nor a namespace, so no caller is
//! admitted.

use std::sync::Arc;

use keyward_config::policy_document::PolicyDocument;
use keyward_config::{Config, PolicySettings};

/// The rules in force.
#[derive(Clone, Debug)]
pub enum RulesInForce {
    /// The rules of the configuration's policy file.
    Configured,
    /// The stored policy is not known yet.
    Unknown,
    /// A stored generation.
    Stored {
        /// The generation's number, from 1.
        number: u64,
        /// The generation's document, with the temporary grants.
        document: Arc<PolicyDocument>,
    },
}

impl RulesInForce {
    pub(super) fn generation(&self, config: &Config) -> RulesGeneration {
        match self {
            Self::Configured => RulesGeneration::configured(&config.policy),
            Self::Unknown => RulesGeneration { number: 0, document: Arc::default(), is_known: false },
            Self::Stored { number, document } => {
                RulesGeneration { number: *number, document: Arc::clone(document), is_known: true }
            }
        }
    }
}

/// One generation of rules, for the compilation.
#[derive(Debug)]
pub(super) struct RulesGeneration {
    /// 0 for the configuration's rules.
    pub(super) number: u64,
    pub(super) document: Arc<PolicyDocument>,
    /// False before the stored policy was read.
    pub(super) is_known: bool,
}

impl RulesGeneration {
    /// The rules of the configuration's policy file.
    pub(super) fn configured(settings: &PolicySettings) -> Self {
        Self { number: 0, document: Arc::clone(&settings.document), is_known: true }
    }
}
