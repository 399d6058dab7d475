//! The policy stored in etcd: followed by every replica, and changed by an operator's commands.
//!
//! Owns: one task on the control runtime; the task polls the prefix, judges each reading, publishes the rules
//! in force, and executes commands (`changes`). Must not know: the operator (`admin`), the decision on a call
//! (`policy`). Invariants (docs/decisions.md#d58): the last good generation stays in force, whatever happens
//! to etcd or to the keys; rules are published whole, with the number of their generation; before the first
//! good reading no rules are known.

mod changes;
mod command;
mod difference;
mod generation;
mod last_good;
mod limit_notes;
mod prefix;
mod state_file;
mod temporary_grant;

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwap;
use bytes::Bytes;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};

use self::last_good::{GoodGeneration, LastGood, ReadingVerdict};
use self::prefix::{PolicyPrefix, PrefixReading};
use self::state_file::PolicyState;
use self::temporary_grant::TemporaryGrant;
use keyward_access::policy::rules_in_force::RulesInForce;
use keyward_base::io::kept_file::{self, KeptFile, KeptFileStatus};
use keyward_base::published::Published;
use keyward_cluster::membership::ChangeReceiver;
use keyward_config::policy_document::PolicyDocument;
use keyward_config::{Config, PolicyInEtcd};
use keyward_telemetry::policy_store_metrics::PolicyStoreMetrics;
use keyward_upstream::own_keys::{OwnKeysUpstream, PrefixLogin, ReadFailures, SeenPrefix};

pub use command::{GenerationRow, GrantRow, PolicyAnswer, PolicyCommand, PolicyListing, PolicyStoreError};

/// Maximum of queued commands. Operators send commands one at a time.
const ORDERS: usize = 16;
/// Poll interval of the prefix: a change is in force on every replica well within 1 s.
const LOOK: Duration = Duration::from_millis(250);
/// Time limit of one poll, or of one request of a command, over all members.
const PATIENCE: Duration = Duration::from_secs(5);
/// Time limit for writing the state file.
const WRITING: Duration = Duration::from_secs(2);
/// Error text for a missing answer.
const LATE: &str = "etcd did not answer in time";

/// The state of the stored policy on this replica.
#[derive(Clone, Debug)]
pub struct PolicyStoreStatus {
    /// The number of the generation in force; 0 without one.
    pub generation: u64,
    /// Temporary grants in force.
    pub grants: usize,
    /// The fault of etcd's present state, if any: the last good generation stays in force.
    pub fault: Option<String>,
    /// Why the last read from etcd failed; `None` after a good one, and before the first.
    pub unread: Option<String>,
    /// False until the rules are known, from etcd or from the state file: no caller is admitted before.
    pub is_known: bool,
    /// The time of the last request whose answer confirmed that the rules in force are etcd's current state.
    pub confirmed_at: Option<Instant>,
    /// The time of the start.
    pub opened_at: Instant,
}

impl PolicyStoreStatus {
    /// The time since the rules in force were last confirmed as etcd's current state; before the first
    /// confirmation, since the start.
    #[must_use]
    pub fn age(&self) -> Duration {
        self.confirmed_at.unwrap_or(self.opened_at).elapsed()
    }
}

/// The interface to the task. Cheap to clone.
#[derive(Clone)]
pub struct PolicyRegister {
    orders: mpsc::Sender<PolicyOrder>,
    status: Arc<ArcSwap<PolicyStoreStatus>>,
    login: PrefixLogin,
    state_file: Option<KeptFileStatus>,
}

struct PolicyOrder {
    command: PolicyCommand,
    /// The operator's user id.
    uid: Option<u32>,
    done: oneshot::Sender<Result<PolicyAnswer, PolicyStoreError>>,
}

/// The task: follows the prefix, and executes commands.
pub struct PolicyKeeper {
    orders: mpsc::Receiver<PolicyOrder>,
    prefix: PolicyPrefix,
    state_file: Option<KeptFile>,
    status: Arc<ArcSwap<PolicyStoreStatus>>,
    metrics: PolicyStoreMetrics,
    good: LastGood,
    /// The temporary grants in force.
    grants: Vec<TemporaryGrant>,
    /// The keys of unreadable grants, as reported last.
    unreadable: Vec<Bytes>,
    /// The state of the prefix read last.
    seen: Option<SeenPrefix>,
    failures: ReadFailures,
}

/// The connections of the running task to the rest of the process.
struct PolicyOutlets {
    config: Arc<Published<Config>>,
    /// The configuration of the last reading: another configuration may accept a document with a fault.
    read_under: Arc<Config>,
    publish: Box<dyn Fn(RulesInForce)>,
}

impl PolicyRegister {
    /// Opens the stored policy, with the last good generation of the state file, if any. Returns the rules in
    /// force until [`PolicyKeeper::run`] has read others.
    #[must_use]
    pub fn open(
        settings: &PolicyInEtcd,
        config: &Config,
        upstream: OwnKeysUpstream,
        metrics: PolicyStoreMetrics,
    ) -> (Self, PolicyKeeper, RulesInForce) {
        let prefix = PolicyPrefix::new(settings, upstream);
        let (sender, orders) = mpsc::channel(ORDERS);
        let opened_at = Instant::now();
        let status = PolicyStoreStatus {
            generation: 0,
            grants: 0,
            fault: None,
            unread: None,
            is_known: false,
            confirmed_at: None,
            opened_at,
        };
        let status = Arc::new(ArcSwap::from_pointee(status));
        let older = "a restart without etcd begins with an older policy";
        let of_file = |path| KeptFileStatus::new("policy.state_file", path, older);
        let state_file = settings.state_file.clone().map(of_file);
        let register = Self {
            orders: sender,
            status: Arc::clone(&status),
            login: prefix.keys.login(),
            state_file: state_file.clone(),
        };
        let mut keeper = PolicyKeeper {
            orders,
            prefix,
            state_file: state_file.map(KeptFile::new),
            status,
            metrics,
            good: LastGood::default(),
            grants: Vec::new(),
            unreadable: Vec::new(),
            seen: None,
            failures: ReadFailures::default(),
        };
        keeper.read_state_file(config);
        keeper.note_status(None);
        let rules = keeper.rules(config);
        (register, keeper, rules)
    }

    /// Executes a command of the operator with this user id.
    ///
    /// # Errors
    /// See [`PolicyStoreError`].
    pub async fn execute(
        &self,
        command: PolicyCommand,
        uid: Option<u32>,
    ) -> Result<PolicyAnswer, PolicyStoreError> {
        let (done, answer) = oneshot::channel();
        let busy = |_| PolicyStoreError::Unchanged("Keyward is ending, or too many commands wait".into());
        self.orders.try_send(PolicyOrder { command, uid, done }).map_err(busy)?;
        answer.await.unwrap_or_else(|_gone| Err(PolicyStoreError::Unknown("Keyward is ending".into())))
    }

    /// The state of the stored policy.
    #[must_use]
    pub fn status(&self) -> Arc<PolicyStoreStatus> {
        self.status.load_full()
    }

    /// The state of the state file, if configured.
    #[must_use]
    pub fn state_file(&self) -> Option<&KeptFileStatus> {
        self.state_file.as_ref()
    }

    /// True if etcd is accessed with the login of `settings`. Another prefix in `settings` is not compared.
    #[must_use]
    pub fn has_login(&self, settings: Option<&PolicyInEtcd>) -> bool {
        settings.is_none_or(|settings| self.login.is(&settings.prefix, settings.login.as_ref()))
    }

    /// From now on accesses etcd with the login of `settings`.
    pub fn set_login(&self, settings: Option<&PolicyInEtcd>) {
        if let Some(settings) = settings {
            self.login.set(&settings.prefix, settings.login.as_ref());
        }
    }
}

impl PolicyKeeper {
    /// Runs until the last [`PolicyRegister`] is dropped. `publish` puts rules in force.
    pub async fn run(mut self, config: Arc<Published<Config>>, publish: impl Fn(RulesInForce) + 'static) {
        let read_under = config.load_full();
        let mut outlets = PolicyOutlets { config, read_under, publish: Box::new(publish) };
        let mut looks = interval(LOOK);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut members = Some(self.prefix.keys.member_changes());
        loop {
            let order = tokio::select! {
                biased; // an operator's command first; every arm is cancel-safe
                order = self.orders.recv() => match order {
                    Some(order) => order,
                    None => return,
                },
                () = kept_file::keep(self.state_file.as_mut()) => continue,
                () = changed(&mut members) => {
                    // Clients wait for the first reading.
                    if !self.status.load().is_known {
                        self.poll(&mut outlets).await;
                    }
                    continue;
                }
                _ = looks.tick() => {
                    self.poll(&mut outlets).await;
                    continue;
                }
            };
            let PolicyOrder { command, uid, done } = order;
            let outcome = self.execute(command, uid, &mut outlets).await;
            if done.send(outcome).is_err() {
                tracing::debug!("the operator did not wait for the answer");
            }
        }
    }

    /// Polls the prefix, and puts another generation in force.
    async fn poll(&mut self, outlets: &mut PolicyOutlets) {
        // Dated by the time of the request, because the answer may miss a later change.
        let asked = Instant::now();
        let looked = timeout(PATIENCE, self.look(outlets)).await;
        match looked.unwrap_or_else(|_| Err(LATE.into())) {
            Ok(()) => {
                if self.failures.end() {
                    tracing::info!("the policy is read from etcd again");
                }
                self.note_status(self.good.fault().is_none().then_some(asked));
            }
            Err(reason) => {
                let is_new = self.failures.note(&reason, self.prefix.keys.has_member());
                // Grants end without etcd too.
                self.note_status(None);
                if is_new {
                    tracing::warn!(%reason, "the policy cannot be read from etcd; the rules in force stay");
                }
            }
        }
    }

    async fn look(&mut self, outlets: &mut PolicyOutlets) -> Result<(), String> {
        let config = outlets.config.load_full();
        // A document with a fault may be good under another configuration.
        let may_differ = self.good.fault().is_some() && !Arc::ptr_eq(&config, &outlets.read_under);
        if let Some(seen) = self.seen.filter(|_| !may_differ)
            && !self.prefix.keys.has_changed(seen).await?
        {
            return Ok(());
        }
        let reading = self.prefix.read().await?;
        self.take(reading, &config, outlets).await
    }

    /// Judges a reading, and puts its state in force if good.
    async fn take(
        &mut self,
        reading: PrefixReading,
        config: &Arc<Config>,
        outlets: &mut PolicyOutlets,
    ) -> Result<(), String> {
        let fault_before = self.good.fault().cloned();
        let verdict = match self.good.observe_pointer(&reading.pointer) {
            ReadingVerdict::NeedsDocument(pointer) => {
                let value = self.prefix.generation(pointer.generation).await?;
                self.good.observe_document(&pointer, value.as_deref(), |text| parse(config, text))
            }
            verdict => verdict,
        };
        (self.seen, outlets.read_under) = (Some(reading.seen), Arc::clone(config));
        if let Some(fault) = self.good.fault().filter(|fault| Some(*fault) != fault_before.as_ref()) {
            self.metrics.count_fault(fault.label());
            tracing::error!(
                %fault, in_force = self.good.number(),
                "the stored policy cannot be used: the last good generation stays in force"
            );
        } else if fault_before.is_some() && self.good.fault().is_none() {
            tracing::info!(generation = self.good.number(), "the stored policy is good again");
        }
        if verdict == ReadingVerdict::Faulty {
            return Ok(());
        }
        let mut grants: Vec<_> = reading.grants.into_iter().map(|stored| stored.grant).collect();
        grants.retain(|grant| !grant.has_ended(SystemTime::now()));
        if reading.unreadable != self.unreadable {
            if !reading.unreadable.is_empty() {
                self.metrics.count_fault("grant_unreadable");
                tracing::error!(
                    keys = reading.unreadable.len(),
                    "temporary grants cannot be read, and give nothing"
                );
            } else {
                tracing::info!("all temporary grants can be read again");
            }
            self.unreadable = reading.unreadable;
        }
        let has_other_grants = grants != self.grants;
        self.grants = grants;
        if verdict == ReadingVerdict::Changed || has_other_grants {
            (outlets.publish)(self.rules(config));
            let generation = self.good.number();
            tracing::info!(generation, grants = self.grants.len(), "another policy is in force");
            self.write_state_file().await;
        }
        Ok(())
    }

    /// The rules in force.
    fn rules(&self, config: &Config) -> RulesInForce {
        let Some(good) = self.good.generation() else {
            let absent = self.good.is_never_applied();
            return if absent { RulesInForce::Configured } else { RulesInForce::Unknown };
        };
        let issuers = issuers(config);
        let bindings = self.grants.iter().filter_map(|grant| grant.binding(&good.document, &issuers));
        let bindings = good.document.bindings.iter().cloned().chain(bindings).collect();
        let document = PolicyDocument { bindings, ..good.document.clone() };
        RulesInForce::Stored { number: good.header.generation, document: Arc::new(document) }
    }

    fn note_status(&self, confirmed_at: Option<Instant>) {
        let before = self.status.load();
        self.status.store(Arc::new(PolicyStoreStatus {
            generation: self.good.number(),
            grants: self.grants.iter().filter(|grant| !grant.has_ended(SystemTime::now())).count(),
            fault: self.good.fault().map(ToString::to_string),
            unread: self.failures.last().map(str::to_owned),
            is_known: self.good.generation().is_some() || self.good.is_never_applied(),
            confirmed_at: confirmed_at.or(before.confirmed_at),
            opened_at: before.opened_at,
        }));
    }

    /// Begins with the last good generation of the state file. A file that cannot be used is reported; etcd
    /// decides then.
    fn read_state_file(&mut self, config: &Config) {
        let Some(file) = self.state_file.as_ref().map(KeptFile::status) else { return };
        let path = file.path();
        let state = match state_file::read(path) {
            Ok(Some(state)) => state,
            Ok(None) => return,
            Err(error) => {
                self.metrics.count_fault("state_file");
                return tracing::error!(path = %path.display(), %error, "policy.state_file cannot be used");
            }
        };
        let PolicyState { header, grants, text } = state;
        match parse(config, &text) {
            Ok(document) => {
                tracing::info!(generation = header.generation, "begun with the policy of policy.state_file");
                self.good.begin_with(GoodGeneration { header, text, document });
                self.grants = grants;
            }
            Err(fault) => {
                self.metrics.count_fault("state_file");
                tracing::error!(%fault, "policy.state_file has a policy with a fault");
            }
        }
    }

    async fn write_state_file(&mut self) {
        let (Some(file), Some(good)) = (&mut self.state_file, self.good.generation()) else { return };
        let (header, text) = (good.header.clone(), Arc::clone(&good.text));
        let state = PolicyState { header, grants: self.grants.clone(), text };
        let written = match state_file::content(state) {
            Ok(content) => {
                file.put(content);
                file.written(WRITING).await
            }
            Err(error) => {
                tracing::error!(%error, "policy.state_file cannot be made of the policy in force");
                Err(error)
            }
        };
        if written.is_err() {
            self.metrics.count_fault("state_file");
        }
    }
}

/// Parses a document under a configuration.
fn parse(config: &Config, text: &str) -> Result<PolicyDocument, String> {
    let parsed = keyward_config::policy(text, &config.listeners, &issuers(config));
    parsed.map(|(document, _)| document).map_err(|faults| faults.to_string())
}

fn issuers(config: &Config) -> Vec<Arc<str>> {
    config.issuers.listed.iter().map(|issuer| Arc::clone(&issuer.issuer)).collect()
}

/// Waits for a change of members. Cancel-safe.
async fn changed(changes: &mut Option<ChangeReceiver>) {
    if let Some(told) = changes {
        if told.changed().await.is_ok() {
            return;
        }
        *changes = None;
    }
    std::future::pending().await
}
