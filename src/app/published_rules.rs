//! Publishes the rules in force: of the configuration, or of the stored policy, and at the end of each
//! binding.
//!
//! Owns: the publication, waiting for the next end, the log of rules that can apply to no caller, and the
//! start of the audit records of changes. Must not know: the meaning of rules. Invariants: the rules are
//! published whole, under the configuration in force; at the end of a binding the rules are published again,
//! without the binding, so that every live stream is decided again.

use std::sync::Arc;
use std::time::SystemTime;

use super::shard_service::ShardParts;
use crate::reload::ChangeRecords;
use keyward_access::policy::rules_in_force::RulesInForce;
use keyward_access::policy::unreachable_rules::{UnreachableRule, unreachable_rules};
use keyward_base::published::Published;
use keyward_base::tasks::Tasks;
use keyward_base::wall_deadline::{WallDeadline, passed_if_any};
use keyward_config::Config;
use keyward_gateway::caller::Identities;
use keyward_operations::policy_store::{PolicyKeeper, PolicyRegister};
use keyward_telemetry::metrics::Metrics;
use keyward_upstream::credentials::Credentials;
use keyward_upstream::own_keys::OwnKeysUpstream;

/// The rules before the first reading of a stored policy.
pub(super) struct RulesAtStart {
    rules: RulesInForce,
    stored: Option<(PolicyRegister, PolicyKeeper)>,
}

impl RulesAtStart {
    /// Opens the policy stored in etcd, if configured.
    pub(super) fn open(config: &Config, upstream: &OwnKeysUpstream, metrics: &Metrics) -> Self {
        let Some(settings) = &config.policy.stored else {
            return Self { rules: RulesInForce::Configured, stored: None };
        };
        let metrics = metrics.policy_store.clone();
        let (register, keeper, rules) = PolicyRegister::open(settings, config, upstream.clone(), metrics);
        Self { rules, stored: Some((register, keeper)) }
    }

    /// The identities by these rules.
    pub(super) fn identities(&self, config: &Config, credentials: &Arc<Credentials>) -> Identities {
        Identities::of(config, &self.rules, credentials, SystemTime::now())
    }

    /// Starts to publish rules into the identities of `parts`, and to follow the stored policy.
    pub(super) fn start(self, parts: &ShardParts, tasks: &Tasks) -> (PublishedRules, Option<PolicyRegister>) {
        let rules = PublishedRules::new(self.rules, parts);
        tasks.spawn("policy expiry", rules.clone().end_bindings()).detach();
        tasks.spawn("unreachable rules", rules.clone().log_unreachable()).detach();
        if let Some(records) = rules.records() {
            tasks.spawn("policy records", records.follow()).detach();
        }
        let register = self.stored.map(|(register, keeper)| {
            let (config, rules) = (Arc::clone(&parts.config), rules.clone());
            tasks.spawn("stored policy", keeper.run(config, move |now| rules.publish(now))).detach();
            register
        });
        (rules, register)
    }
}

/// The rules in force, and their publication to every shard. Clones share their state.
#[derive(Clone)]
pub(super) struct PublishedRules {
    config: Arc<Published<Config>>,
    current: Arc<Published<RulesInForce>>,
    identities: Arc<Published<Identities>>,
    credentials: Arc<Credentials>,
    records: Option<ChangeRecords>,
}

impl PublishedRules {
    /// The rules by which the identities of `parts` were made.
    fn new(at_start: RulesInForce, parts: &ShardParts) -> Self {
        Self {
            config: Arc::clone(&parts.config),
            current: Arc::new(Published::new(at_start)),
            identities: Arc::clone(&parts.identities),
            credentials: Arc::clone(&parts.credentials),
            records: ChangeRecords::new(parts.audit.as_ref(), &parts.identities),
        }
    }

    /// The audit records of changes, if the audit log has such records.
    pub(super) fn records(&self) -> Option<ChangeRecords> {
        self.records.clone()
    }

    /// The rules in force.
    pub(super) fn current(&self) -> Arc<Published<RulesInForce>> {
        Arc::clone(&self.current)
    }

    /// Puts rules in force.
    fn publish(&self, rules: RulesInForce) {
        self.current.publish(rules);
        self.publish_again();
    }

    fn publish_again(&self) {
        let (config, rules) = (self.config.load(), self.current.load());
        self.identities.publish(Identities::of(&config, &rules, &self.credentials, SystemTime::now()));
    }

    /// Logs each rule that can apply to no caller, at the start and when it comes into force, for ever.
    async fn log_unreachable(self) {
        let mut changes = self.identities.changes();
        let mut known = Vec::new();
        loop {
            let found = unreachable_rules(&self.config.load(), self.identities.load().policy().document());
            for UnreachableRule { rule, reason } in found.iter().filter(|rule| !known.contains(*rule)) {
                tracing::error!(rule, reason, "a rule can apply to no caller of any listener");
            }
            known = found;
            if changes.changed().await.is_err() {
                return;
            }
        }
    }

    /// Publishes the rules again at the end of each binding, for ever.
    async fn end_bindings(self) {
        let mut changes = self.identities.changes();
        loop {
            let end = self.identities.load().next_end();
            let end = end.map(WallDeadline::from_now);
            if end.is_some_and(|end| end.is_over()) {
                self.publish_again();
                tracing::info!("a binding of the policy has ended");
                continue;
            }
            tokio::select! {
                () = passed_if_any(end) => {}
                changed = changes.changed() => if changed.is_err() { return },
            }
        }
    }
}
