//! The source of the rules in force: the configuration, or a generation of the stored policy.
//!
//! Owns: the choice between both. Must not know: how a policy is stored. Invariant (docs/decisions.md#d58):
//! before a stored policy is known no rule is known, neither a mode nor a namespace, so no caller is
//! admitted.

use std::sync::Arc;

use crate::config::Config;
use crate::config::policy_document::PolicyDocument;

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
    /// The number of the generation, 0 for the configuration's rules, and the document.
    pub(super) fn generation(&self, config: &Config) -> (u64, Arc<PolicyDocument>) {
        match self {
            Self::Configured => (0, Arc::clone(&config.policy.document)),
            Self::Unknown => (0, Arc::default()),
            Self::Stored { number, document } => (*number, Arc::clone(document)),
        }
    }
}
