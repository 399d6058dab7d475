//! Publishes the rules in force: of the configuration, or of the stored policy, and at the end of each binding.
//!
//! Owns: the publication, and waiting for the next end. Must not know: rules. Invariants: the rules are published
//! whole, under the configuration in force; at the end of a binding the rules are published again, without the
//! binding, so that every live stream is decided again.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::time::sleep;

use super::shard_service::ShardParts;
use crate::config::Config;
use crate::credentials::Credentials;
use crate::gateway::caller::Identities;
use crate::policy::rules_in_force::RulesInForce;
use crate::published::Published;

/// The clock of the system may be set back: the wait for an end is divided.
const LONGEST_WAIT: Duration = Duration::from_secs(60);

/// The rules in force, and their publication to every shard. Clones share their state.
#[derive(Clone)]
pub(super) struct PublishedRules {
    config: Arc<Published<Config>>,
    current: Arc<Published<RulesInForce>>,
    identities: Arc<Published<Identities>>,
    credentials: Arc<Credentials>,
}

impl PublishedRules {
    /// The rules by which the identities of `parts` were made.
    pub(super) fn new(at_start: RulesInForce, parts: &ShardParts) -> Self {
        Self {
            config: Arc::clone(&parts.config),
            current: Arc::new(Published::new(at_start)),
            identities: Arc::clone(&parts.identities),
            credentials: Arc::clone(&parts.credentials),
        }
    }

    /// The rules in force.
    pub(super) fn current(&self) -> Arc<Published<RulesInForce>> {
        Arc::clone(&self.current)
    }

    /// Puts rules in force.
    pub(super) fn publish(&self, rules: RulesInForce) {
        self.current.publish(rules);
        self.publish_again();
    }

    fn publish_again(&self) {
        let (config, rules) = (self.config.load(), self.current.load());
        self.identities.publish(Identities::of(&config, &rules, &self.credentials, SystemTime::now()));
    }

    /// Publishes the rules again at the end of each binding, for ever.
    pub(super) async fn end_bindings(self) {
        let mut changes = self.identities.changes();
        loop {
            let end = self.identities.load().next_end();
            let left = end.map(|end| end.duration_since(SystemTime::now()).unwrap_or_default());
            if left == Some(Duration::ZERO) {
                self.publish_again();
                tracing::info!("a binding of the policy has ended");
                continue;
            }
            let wait = async {
                match left {
                    Some(left) => sleep(left.min(LONGEST_WAIT)).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = wait => {}
                changed = changes.changed() => if changed.is_err() { return },
            }
        }
    }
}
