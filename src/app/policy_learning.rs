//! `keyward policy learn`: a policy from the audit log.
//!
//! Owns: what a record says about a peer's needs. Must not know: how keys are generalized. Invariants: calls
//! that were refused or denied are no needs; a call that `shadow` let pass is one, whatever the policy says;
//! a peer that writes or waits with a lease may renew leases, since its lease may be older than the log.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::PathBuf;

use serde::Deserialize;

use crate::app::audit_files::{self, AuditFilesError};
use keyward_access::policy::learned::{LearningBounds, PolicyLearner};
use keyward_etcd::rpc::key_range::KeyRange;
use keyward_etcd::rpc::method::lookup;
use keyward_etcd::rpc::touch::Action;
use keyward_records::audit::record::AuditedRange;
use keyward_records::audit::search::AuditSearch;

const COMPACT: &str = "/etcdserverpb.KV/Compact";

/// A policy learned from an audit log.
#[derive(Debug)]
pub struct LearnedPolicy {
    /// The policy file.
    pub text: String,
    /// Reasons why the policy may allow too little.
    pub warnings: Vec<String>,
    /// The number of records used.
    pub records: u64,
}

/// The fields of a record about a call.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct CallRecord {
    event: String,
    method: String,
    code: String,
    refused: bool,
    peer: Option<String>,
    ranges: Vec<AuditedRange>,
    ranges_omitted: u64,
    actions: Vec<String>,
    lease: Option<String>,
    verdict: Option<String>,
}

/// The path of the stream whose begin is a renewal.
const KEEP_ALIVE: &str = "/etcdserverpb.Lease/LeaseKeepAlive";
/// The words of `audit.events`, with a noun for the records of each, and what of it may be older than all
/// records.
const EVENTS: [(&str, &str, Option<&str>); 4] = [
    ("changes", "changes", None),
    ("reads", "reads", None),
    ("watches", "opened watches", Some("watches opened")),
    ("leases", "begun renewals of leases", Some("renewals begun")),
];

/// Leases named by a warning at most.
const NAMED_LEASES: usize = 5;

/// What the records show.
#[derive(Default)]
struct Records {
    learner: PolicyLearner,
    records: u64,
    /// Keys put with a lease.
    keys_of_leases: BTreeMap<String, BTreeSet<Vec<u8>>>,
    /// Actions on the keys of leases.
    uses_of_leases: BTreeSet<(String, Action, String)>,
    /// The words of `audit.events` with records.
    events: BTreeSet<&'static str>,
    omitted: u64,
    anonymous: u64,
    unknown_methods: BTreeSet<String>,
}

/// Learns the smallest policy that would have allowed the calls in the files, as far as `conditions` hold for
/// their records.
///
/// # Errors
/// A file cannot be read.
pub fn learn(
    files: &[PathBuf],
    conditions: &AuditSearch,
    bounds: LearningBounds,
) -> Result<LearnedPolicy, AuditFilesError> {
    let mut records = Records { learner: PolicyLearner::new(bounds), ..Records::default() };
    audit_files::search(files, conditions, |line, _| {
        if let Ok(record) = serde_json::from_slice::<CallRecord>(line) {
            records.take(&record);
        }
        Ok(())
    })?;
    Ok(records.finish(conditions))
}

impl Records {
    fn take(&mut self, record: &CallRecord) {
        let is_passed_denial = record.verdict.as_deref() == Some("would_refuse");
        let word = match &*record.event {
            "change" => Some("changes"),
            "read" => Some("reads"),
            "watch_create" => Some("watches"),
            "begin" if record.method == KEEP_ALIVE => Some("leases"),
            // Observe has watch_end, and Lock and Campaign a change, once they end.
            "begin" => None,
            // A call that shadow let pass.
            "refusal" if is_passed_denial => None,
            _ => return,
        };
        self.events.extend(word);
        let is_denied = ["PermissionDenied", "Unauthenticated"].contains(&&*record.code);
        if record.refused || is_denied {
            return;
        }
        let Some(peer) = &record.peer else {
            self.anonymous += 1;
            return;
        };
        self.records += 1;
        self.omitted += u64::from(record.ranges_omitted > 0);
        self.learner.note_call(peer);
        if lookup(&record.method).is_none() {
            self.unknown_methods.insert(record.method.clone());
        }
        if let Some(id) = record.lease.as_ref().and_then(|lease| u64::from_str_radix(lease, 16).ok()) {
            self.learner.note_lease(id);
            self.learner.note_action(peer, Action::Lease);
        }
        for action in record.actions.iter().filter_map(|word| action(word)) {
            self.learner.note_action(peer, needed_action(&record.method, action));
        }
        for range in &record.ranges {
            let Some(action) = action(&range.action) else { continue };
            match (&range.keys_of_lease, action.is_on_keys()) {
                (Some(lease), _) => {
                    self.uses_of_leases.insert((peer.clone(), action, lease.clone()));
                }
                (None, true) => self.note_keys(peer, action, range, record.lease.as_deref()),
                (None, false) => self.learner.note_action(peer, action),
            }
        }
    }

    fn note_keys(&mut self, peer: &str, action: Action, range: &AuditedRange, lease: Option<&str>) {
        range.judge_keys(|range| {
            self.learner.note_keys(peer, action, &range);
            if let Some(lease) = lease {
                let keys = self.keys_of_leases.entry(lease.to_owned()).or_default();
                // The key of a lock or an election is below its name, and whoever may lock may keep it.
                if action == Action::Write {
                    keys.insert(range.start.to_vec());
                }
            }
            true
        });
    }

    fn finish(mut self, conditions: &AuditSearch) -> LearnedPolicy {
        let mut unknown_leases = BTreeSet::new();
        for (peer, action, lease) in &self.uses_of_leases {
            match self.keys_of_leases.get(lease) {
                // A renewed or revoked lease needs the permission of an action on keys.
                Some(keys) if action.is_on_keys() => {
                    keys.iter().for_each(|key| self.learner.note_keys(peer, *action, &KeyRange::key(key)));
                }
                Some(_) => {}
                None => {
                    unknown_leases.insert((lease.clone(), peer.clone()));
                }
            }
            if !action.is_on_keys() {
                self.learner.note_action(peer, *action);
            }
        }
        let warnings = self.warnings(conditions, &unknown_leases);
        let mut text =
            format!("# Learned from {} records of the audit log. Review each grant.\n", self.records);
        for warning in &warnings {
            let _infallible = writeln!(text, "# Warning: {warning}.");
        }
        text.push('\n');
        text.push_str(&self.learner.policy());
        LearnedPolicy { text, warnings, records: self.records }
    }

    fn warnings(&self, conditions: &AuditSearch, unknown_leases: &BTreeSet<(String, String)>) -> Vec<String> {
        let mut warnings = Vec::new();
        for (word, what, older) in EVENTS.into_iter().filter(|(word, ..)| !self.events.contains(word)) {
            let mut warning = format!("there is no record of {what}");
            let scopes =
                [(conditions.peer.is_some(), " of --peer"), (conditions.since.is_some(), " within --since")];
            warning.extend(scopes.into_iter().filter(|(is_set, _)| *is_set).map(|(_, scope)| scope));
            let _infallible = write!(warning, ": {word:?} is not in audit.events, or there were none");
            if let Some(older) = older {
                let _infallible = write!(
                    warning,
                    "; {older} before may be missing here, and keyward policy shadow names them"
                );
            }
            warnings.push(warning);
        }
        let mut count = |count: u64, reason: &str| {
            if count > 0 {
                warnings.push(format!("{count} {reason}"));
            }
        };
        count(self.omitted, "records name a part of their keys only, and the rest may not be allowed");
        let unbound = self.learner.peers_without_binding() as u64;
        count(unbound, "peers have a name with *, which would bind other peers too: they have no binding");
        count(self.anonymous, "records have no peer, and no binding can name their callers");
        warnings.extend(warning_of_leases(unknown_leases));
        for method in &self.unknown_methods {
            warnings.push(format!(
                "{method:?} is unknown to Keyward, and needs policy.unknown_methods = \"allow\""
            ));
        }
        warnings
    }
}

/// The warning about leases, each with its peer, with which no record puts a key. Such a lease may have keys
/// from before the records, or none at all, as the session of a client that only observes an election.
fn warning_of_leases(unknown: &BTreeSet<(String, String)>) -> Option<String> {
    let named: Vec<String> =
        unknown.iter().take(NAMED_LEASES).map(|(lease, peer)| format!("{lease} of {peer:?}")).collect();
    let more = match unknown.len().saturating_sub(NAMED_LEASES) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    (!unknown.is_empty()).then(|| {
        format!(
            "no record puts a key with a lease that was renewed or revoked: {}{more}; if it has keys, they \
             are older than these records, and renewing may not be allowed: run policy.mode = \"shadow\", \
             then learn again",
            named.join(", ")
        )
    })
}

/// The action that the call needs. Records of a version without the action `compact` call a compaction
/// `maintenance`, with which a policy would grant far more.
fn needed_action(method: &str, recorded: Action) -> Action {
    match method {
        COMPACT => Action::Compact,
        _ => recorded,
    }
}

fn action(word: &str) -> Option<Action> {
    Action::ALL.into_iter().find(|action| action.name() == word)
}
