//! Audit records of changes of the configuration and of the policy in force, whatever made them.
//!
//! Owns: the comparison of the policy in force with the policy recorded last, and the words of the records.
//! Must not know: who publishes rules, how a stored policy is read. Invariants: every published policy that
//! differs from the one before leaves one record, since the publication itself is followed; a reload leaves
//! one record, which tells the policy's change too.

use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;
use std::sync::Arc;

use keyward_access::policy::compiled::Policy;
use keyward_access::policy::permit_set::PolicyGeneration;
use keyward_base::published::Published;
use keyward_config::PolicyMode;
use keyward_config::audit_settings::AuditEvent;
use keyward_config::policy_document::{PolicyBinding, PolicyDocument};
use keyward_config::reload_request::{ReloadOutcome, ReloadTrigger};
use keyward_gateway::caller::Identities;
use keyward_records::audit::log::AuditLog;
use keyward_records::audit::queue::RoomShare;
use keyward_records::audit::record::{AdminAuditRecord, Timestamp};

/// Makes the records. Clones share their state.
#[derive(Clone)]
pub struct ChangeRecords {
    audit: Arc<AuditLog>,
    identities: Arc<Published<Identities>>,
    state: Rc<RefCell<RecordedPolicy>>,
}

/// The policy recorded last, and the change by a reload whose record is still to come.
#[derive(Debug)]
struct RecordedPolicy {
    policy: PolicyInForce,
    /// The change by the reload under way. Later changes are recorded after it.
    by_reload: Option<Option<PolicyChange>>,
}

/// The parts of a policy in force by which records tell one policy from another.
#[derive(Clone, Debug, PartialEq, Eq)]
struct PolicyInForce {
    is_known: bool,
    generation: PolicyGeneration,
    mode: PolicyMode,
    /// The bindings with an end that hold now, in words.
    temporary: Vec<String>,
}

/// The differences of the policy in force from the policy before.
#[derive(Debug)]
struct PolicyChange {
    generation: String,
    /// The modes before and now, if they differ.
    modes: Option<(&'static str, &'static str)>,
    is_stored: bool,
    is_other_document: bool,
    begun: Vec<String>,
    ended: Vec<String>,
}

impl ChangeRecords {
    /// Records for `audit`, if it has records of admin events. The policy of `identities` is known.
    #[must_use]
    pub fn new(audit: Option<&Arc<AuditLog>>, identities: &Arc<Published<Identities>>) -> Option<Self> {
        let audit = Arc::clone(audit.filter(|audit| audit.has(AuditEvent::Admin))?);
        let policy = PolicyInForce::of(identities.load().policy());
        let state = Rc::new(RefCell::new(RecordedPolicy { policy, by_reload: None }));
        Some(Self { audit, identities: Arc::clone(identities), state })
    }

    /// Records every change of the policy in force that no reload made, for ever.
    pub async fn follow(self) {
        let mut changes = self.identities.changes();
        loop {
            self.record_published();
            if changes.changed().await.is_err() {
                return;
            }
        }
    }

    /// Records the policy in force, if it was not yet recorded and no reload's record is to come before.
    fn record_published(&self) {
        if self.state.borrow().by_reload.is_none()
            && let Some(change) = self.take_change()
        {
            let reason = change.to_string();
            self.record("policy", Some(&change), &reason, "done", None);
        }
    }

    /// Publishes the parts of a reload by `publish`, without a wait, and keeps the change of the policy for
    /// the reload's record: the reload waits for files in between, and a change that others publish
    /// meanwhile is not the reload's.
    pub(super) fn of_reload<T>(&self, publish: impl FnOnce() -> T) -> T {
        self.record_published();
        let published = publish();
        let change = self.take_change();
        self.state.borrow_mut().by_reload = Some(change);
        published
    }

    /// Records a reload with its outcome and the change of the policy by the reload, then what others
    /// published since.
    pub(super) fn record_reload(&self, trigger: ReloadTrigger, outcome: &ReloadOutcome) {
        let (result, sentences) = match outcome {
            ReloadOutcome::Applied(applied) => ("done", &applied.changes),
            ReloadOutcome::Refused(faults) => ("failed", faults),
        };
        let reason = match &sentences[..] {
            [] => trigger.to_string(),
            sentences => format!("{trigger}: {}", sentences.join("; ")),
        };
        let uid = match trigger {
            ReloadTrigger::Command { uid } => uid,
            ReloadTrigger::Signal | ReloadTrigger::ChangedFile => None,
        };
        let change = self.state.borrow_mut().by_reload.take().flatten();
        self.record("reload", change.as_ref(), &reason, result, uid);
        self.record_published();
    }

    fn take_change(&self) -> Option<PolicyChange> {
        let now = PolicyInForce::of(self.identities.load().policy());
        let before = std::mem::replace(&mut self.state.borrow_mut().policy, now.clone());
        (now != before).then(|| PolicyChange::between(before, now))
    }

    fn record(
        &self,
        command: &'static str,
        change: Option<&PolicyChange>,
        reason: &str,
        result: &'static str,
        uid: Option<u32>,
    ) {
        let modes = change.and_then(|change| change.modes);
        let record = AdminAuditRecord {
            reason: Some(reason),
            policy_generation: change.map(|change| &*change.generation),
            policy_mode_before: modes.map(|(before, _)| before),
            policy_mode: modes.map(|(_, now)| now),
            uid,
            ..AdminAuditRecord::new(command, result)
        };
        self.audit.record(None, RoomShare::Commands, &record);
    }
}

impl PolicyInForce {
    fn of(policy: &Policy) -> Self {
        let document = policy.document();
        Self {
            is_known: policy.is_known(),
            generation: policy.generation(),
            mode: policy.settings().mode,
            temporary: policy.temporary_bindings().map(|binding| describe(document, binding)).collect(),
        }
    }
}

/// A binding with an end, in words: `reader to password:alice until 2026-01-02T00:00:00.000000Z`.
fn describe(document: &PolicyDocument, binding: &PolicyBinding) -> String {
    let roles = binding.roles.iter().filter_map(|role| document.roles.get(*role));
    let roles: Vec<_> = roles.map(|role| &*role.name).collect();
    let peer = binding.conditions.peer.as_ref().map_or_else(|| "callers".into(), ToString::to_string);
    let until = binding.until.map(|end| format!(" until {}", Timestamp(end))).unwrap_or_default();
    format!("{} to {peer}{until}", roles.join(", "))
}

impl PolicyChange {
    fn between(before: PolicyInForce, now: PolicyInForce) -> Self {
        let not_in = |one: &[String], other: &[String]| -> Vec<String> {
            one.iter().filter(|binding| !other.contains(binding)).cloned().collect()
        };
        Self {
            generation: now.generation.to_string(),
            modes: (now.mode != before.mode).then(|| (before.mode.name(), now.mode.name())),
            is_stored: now.generation.number > 0,
            is_other_document: (now.is_known, now.generation) != (before.is_known, before.generation),
            begun: not_in(&now.temporary, &before.temporary),
            ended: not_in(&before.temporary, &now.temporary),
        }
    }
}

impl fmt::Display for PolicyChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut separator = "";
        if self.is_other_document {
            let source = if self.is_stored { "the stored policy" } else { "the policy of the configuration" };
            write!(f, "{source} is in force")?;
            separator = "; ";
        }
        for (verb, bindings) in [("begins", &self.begun), ("ends", &self.ended)] {
            for binding in bindings {
                write!(f, "{}{verb}: {binding}", std::mem::replace(&mut separator, "; "))?;
            }
        }
        if separator.is_empty() {
            write!(f, "the policy's settings changed")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use super::*;
    use keyward_access::policy::rules_in_force::RulesInForce;
    use keyward_cluster::membership::ControlChannels;
    use keyward_config::Config;
    use keyward_config::reload_request::AppliedReload;
    use keyward_dial::names::NameResolver;
    use keyward_telemetry::metrics::Metrics;
    use keyward_upstream::credentials::{CredentialSettings, Credentials};

    fn configured(folder: &tempfile::TempDir, mode: &str, binding: &str) -> Config {
        let rules = format!(
            "[[role]]\nname = 'reader'\nallow = [{{ actions = ['read'], everything = true }}]\n\
             [[binding]]\npeer = 'listener:a'\nroles = ['reader']\n{binding}"
        );
        std::fs::write(folder.path().join("policy.toml"), rules).unwrap();
        let path = folder.path().join("keyward.toml");
        let text = format!(
            "listener = [{{ name = 'a', address = '127.0.0.1:1' }}]\ncluster.endpoints = ['http://127.0.0.1:2']\n\
             policy = {{ mode = '{mode}', file = 'policy.toml' }}\naudit.file = 'audit.log'\n"
        );
        std::fs::write(&path, text).unwrap();
        keyward_config::load(&path).unwrap_or_else(|faults| panic!("{faults}")).0
    }

    fn policy(mode: &str, binding: &str, at: SystemTime) -> PolicyInForce {
        let config = configured(&tempfile::tempdir().unwrap(), mode, binding);
        PolicyInForce::of(&Policy::of(&config, &RulesInForce::Configured, at))
    }

    #[test]
    fn a_binding_that_ends_is_a_change_though_the_document_is_the_same() {
        let until = "until = '2030-01-02T00:00:00Z'\n";
        let end = SystemTime::UNIX_EPOCH + Duration::from_secs(1_893_542_400);
        let before = policy("enforce", until, end - Duration::from_secs(1));
        assert_eq!(before, policy("enforce", until, end - Duration::from_secs(2)), "no change");
        let change = PolicyChange::between(before, policy("enforce", until, end));
        assert_eq!(change.to_string(), "ends: reader to listener:a until 2030-01-02T00:00:00.000000Z");
        assert!(change.modes.is_none());
    }

    #[test]
    fn another_mode_and_another_document_are_told() {
        let now = SystemTime::now();
        let change =
            PolicyChange::between(policy("enforce", "", now), policy("off", "listener = 'a'\n", now));
        assert_eq!(change.modes, Some(("enforce", "off")));
        assert_eq!(change.to_string(), "the policy of the configuration is in force");
        let change = PolicyChange::between(policy("off", "", now), policy("shadow", "", now));
        assert_eq!(
            (change.modes, &*change.to_string()),
            (Some(("off", "shadow")), "the policy's settings changed")
        );
    }

    /// A reload waits for files between its publication and its record. The task that follows publications
    /// runs meanwhile, and others publish.
    #[test]
    fn a_change_is_recorded_by_the_reload_that_made_it_and_later_ones_after_it() {
        let folder = tempfile::tempdir().unwrap();
        let config = configured(&folder, "enforce", "");
        let (credentials, _) =
            Credentials::new(CredentialSettings::default(), ControlChannels::default()).unwrap();
        let identities = |config: &Config| {
            Identities::of(config, &RulesInForce::Configured, &credentials, SystemTime::now())
        };
        let published = Arc::new(Published::new(identities(&config)));
        let metrics = Metrics::new(Vec::new()).audit;
        let settings = config.audit.as_ref().expect("an audit log");
        let (audit, closed) = AuditLog::start(settings, &NameResolver::of_machine(None), metrics).unwrap();
        let records = ChangeRecords::new(Some(&audit), &published).expect("admin events");
        let publish = |mode| published.publish(identities(&configured(&folder, mode, "")));

        records.of_reload(|| publish("off"));
        records.record_published();
        publish("shadow");
        records.record_published();
        records.record_reload(ReloadTrigger::Signal, &ReloadOutcome::Applied(AppliedReload::default()));
        publish("enforce");
        records.record_published();
        records.record_published();
        drop((records, audit, closed));

        let text = std::fs::read_to_string(folder.path().join("audit.log")).unwrap();
        let told = text.lines().filter(|line| line.contains("\"admin\"")).map(|line| {
            let record: serde_json::Value = serde_json::from_str(line).unwrap();
            ["command", "policy_mode_before", "policy_mode"]
                .map(|key| record[key].as_str().unwrap().to_owned())
        });
        let expected =
            [["reload", "enforce", "off"], ["policy", "off", "shadow"], ["policy", "shadow", "enforce"]];
        assert_eq!(told.collect::<Vec<_>>(), expected.map(|one| one.map(str::to_owned)));
    }
}
