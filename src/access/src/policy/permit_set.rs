//! The permissions of one caller, and the decision on a request.
//!
//! Owns: the decision. Must not know: the caller's proof, clocks, the consequences of a denial. Invariants
//! (docs/decisions.md#d30, docs/decisions.md#d31): an action that no grant allows is denied; a denying grant
//! wins; every touch of a request is judged, and a request that cannot be read counts as reading and writing
//! every key; a decision on a request without a lease allocates nothing, except for what `rpc::touch` needs.

use std::cmp::Ordering;
use std::fmt;
use std::ops::ControlFlow;
use std::sync::Arc;

use super::caller_namespace::CallerNamespace;
use super::grants::{ActionGrants, AllowedRun, longer};
use super::interval_set::{GrantId, IntervalSet};
use super::permit::Permit;
use keyward_config::policy_document::PolicyDigest;
use keyward_config::policy_document::PolicyDocument;
use keyward_config::{PolicyMode, UnknownMethods};
use keyward_etcd::refusal::Refusal;
use keyward_etcd::rpc::key_range::KeyRange;
use keyward_etcd::rpc::method::{Handler, Method};
use keyward_etcd::rpc::namespace::lease_ids::LeaseScope;
use keyward_etcd::rpc::touch::{self, Action, Touch, TouchTarget, UnreadableRequest};
use keyward_telemetry::policy_metrics::PolicyMetrics;

/// The permissions of a caller under one generation of the policy.
#[derive(Debug)]
pub struct PermitSet {
    /// The consequence of a denial.
    pub mode: PolicyMode,
    /// The caller's namespace.
    pub namespace: CallerNamespace,
    /// The leases that the caller can name, in a namespace.
    pub lease_scope: LeaseScope,
    /// The treatment of methods without a row in the method table.
    pub unknown_methods: UnknownMethods,
    /// The generation of the policy.
    pub generation: PolicyGeneration,
    /// Indexes of the caller's roles in the document.
    pub roles: Box<[usize]>,
    /// Indexes of further roles, of a login that nothing proved: their limits hold, and their grants do not.
    pub claimed_roles: Box<[usize]>,
    pub(super) document: Arc<PolicyDocument>,
    pub(super) shared: Arc<ActionGrants>,
    pub(super) own: Option<Arc<ActionGrants>>,
    pub(super) closed: Arc<IntervalSet>,
}

/// Names one version of the policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PolicyGeneration {
    /// The number of the stored generation; 0 for the configuration's own rules.
    pub number: u64,
    /// The digest of the document.
    pub digest: PolicyDigest,
}

/// Formats the number and the digest; the digest alone for the configuration's own rules.
impl fmt::Display for PolicyGeneration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.number > 0 {
            write!(f, "{}-", self.number)?;
        }
        self.digest.fmt(f)
    }
}

/// The verdict on a request.
#[derive(Debug, PartialEq, Eq)]
pub enum Decision {
    /// Every touch is allowed.
    Allowed(Permit),
    /// A touch is not allowed.
    Denied(Denial),
    /// Every touch is allowed, if these actions on the keys of these leases are allowed.
    NeedsLeaseKeys(Permit, Vec<(Action, i64)>),
}

/// A denied touch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Denial {
    /// The action.
    pub action: Action,
    /// The reason.
    pub reason: DenialReason,
}

/// The reason for a denial.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DenialReason {
    /// No grant of the caller's roles allows the action on all of its keys.
    NoGrant,
    /// A grant denies the action.
    Grant(GrantId),
    /// The keys are Keyward's own.
    OwnKeys,
    /// The caller has no role.
    NoRole,
    /// The method has no row in the method table, so no rule can name its keys.
    UnknownMethod,
}

impl DenialReason {
    /// The reason as a word of the log.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::NoGrant => "no_grant",
            Self::Grant(_) => "denied",
            Self::OwnKeys => "own_keys",
            Self::NoRole => "no_role",
            Self::UnknownMethod => "unknown_method",
        }
    }
}

impl PermitSet {
    /// Decides on a request, given as the message of a call or one message of a stream. The verdict does not
    /// depend on [`PermitSet::mode`], except that under [`PolicyMode::Off`] every request is allowed.
    #[must_use]
    pub fn decide(&self, method: &Method, message: &[u8]) -> Decision {
        if self.mode == PolicyMode::Off {
            return Decision::Allowed(Permit::UNJUDGED);
        }
        let mut judged = self.begin(stream_action(method));
        let read = touch::visit(method, message, &mut |touch| match self.namespace.hides(method, &touch) {
            true => ControlFlow::Continue(()),
            false => judged.take(self, touch),
        });
        self.finish(judged, read)
    }

    /// Calls `each` with the verdict on each touch of a request. A touch of the keys of a lease is judged as
    /// a touch of all keys.
    pub fn explain(
        &self,
        method: &Method,
        message: &[u8],
        each: &mut dyn FnMut(Touch<'_>, Result<GrantId, Denial>),
    ) {
        let read = touch::visit(method, message, &mut |touch| {
            if !self.namespace.hides(method, &touch) {
                each(touch, self.judge(touch));
            }
            ControlFlow::Continue(())
        });
        self.explain_unread(read, each);
    }

    /// As [`PermitSet::explain`], for a watch given as its WatchCreateRequest.
    pub(super) fn explain_watch(
        &self,
        create: &[u8],
        each: &mut dyn FnMut(Touch<'_>, Result<GrantId, Denial>),
    ) {
        let read = touch::visit_watch_create(create, &mut |touch| {
            each(touch, self.judge(touch));
            ControlFlow::Continue(())
        });
        self.explain_unread(read, each);
    }

    /// As [`PermitSet::explain`], for an action on the keys of a lease: see [`PermitSet::decide_keys`].
    pub(super) fn explain_keys<'k>(
        &self,
        action: Action,
        keys: impl IntoIterator<Item = &'k [u8]>,
        each: &mut dyn FnMut(Touch<'_>, Result<GrantId, Denial>),
    ) {
        for key in keys {
            let range = KeyRange::key(key);
            if !self.is_allowed_otherwise(action, &range) {
                let touch = Touch { action, target: TouchTarget::Keys(range) };
                each(touch, self.judge(touch));
            }
        }
    }

    /// True if another action on a key of a lease allows `action` too: see [`PermitSet::decide_keys`]. A
    /// grant that denies `action` wins.
    fn is_allowed_otherwise(&self, action: Action, key: &KeyRange<'_>) -> bool {
        let other = match action {
            Action::Lock => Action::Write,
            Action::Write if self.judge_range(action, key) == Err(DenialReason::NoGrant) => Action::Lock,
            _ => return false,
        };
        self.judge_range(other, key).is_ok()
    }

    /// The verdict on a touch, for decisions and explanations alike: one refusal has one reason everywhere.
    fn judge(&self, Touch { action, target }: Touch<'_>) -> Result<GrantId, Denial> {
        let judged = match target {
            _ if self.roles.is_empty() => Err(DenialReason::NoRole),
            TouchTarget::Keys(range) => self.judge_range(action, &range),
            TouchTarget::Cluster => self.judge_cluster(action),
            TouchTarget::KeysOfLease(_) | TouchTarget::KeysSharingLease(_) => {
                self.judge_grants(action, &KeyRange::ALL)
            }
        };
        judged.map_err(|reason| Denial { action, reason })
    }

    /// Decides on a watch, given as its WatchCreateRequest.
    #[must_use]
    pub fn decide_watch(&self, create: &[u8]) -> Decision {
        if self.mode == PolicyMode::Off {
            return Decision::Allowed(Permit::UNJUDGED);
        }
        let mut judged = self.begin(Action::Watch);
        let read = touch::visit_watch_create(create, &mut |touch| judged.take(self, touch));
        self.finish(judged, read)
    }

    /// Decides on an action on the keys of a lease. Who may write a key may keep the key as part of a lock as
    /// well; and who may lock a queue may keep, and remove with its lease, a key in the queue, as by Unlock:
    /// otherwise a lock would last as long as its lease is not renewed.
    #[must_use]
    pub fn decide_keys<'k>(&self, action: Action, keys: impl IntoIterator<Item = &'k [u8]>) -> Decision {
        let mut judged = self.begin(action);
        for key in keys {
            let range = KeyRange::key(key);
            if self.is_allowed_otherwise(action, &range) {
                continue;
            }
            let touch = Touch { action, target: TouchTarget::Keys(range) };
            if judged.take(self, touch).is_break() {
                break;
            }
        }
        judged.finish()
    }

    /// Decides on a stream of requests of `method` as a whole: denied without any role, and otherwise decided
    /// request by request.
    #[must_use]
    pub fn decide_stream(&self, method: &Method) -> Decision {
        if self.mode == PolicyMode::Off {
            return Decision::Allowed(Permit::UNJUDGED);
        }
        self.begin(stream_action(method)).finish()
    }

    /// Names a grant that allows: role, and index among the role's `allow`.
    #[must_use]
    pub fn allowing_rule(&self, grant: GrantId) -> String {
        format!("{}.allow[{}]", self.role_name(grant), grant.grant)
    }

    /// Names the reason of a denial: the grant that denies, or a word and the action.
    #[must_use]
    pub fn denying_rule(&self, denial: Denial) -> String {
        match denial.reason {
            DenialReason::Grant(grant) => format!("{}.deny[{}]", self.role_name(grant), grant.grant),
            reason => format!("{}: {}", reason.word(), denial.action.name()),
        }
    }

    fn role_name(&self, grant: GrantId) -> &str {
        self.document.roles.get(usize::from(grant.role)).map_or("", |role| &role.name)
    }

    /// True if both sets of the same caller decide alike.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        (self.mode, self.generation, &self.roles) == (other.mode, other.generation, &other.roles)
            && self.claimed_roles == other.claimed_roles
            && (self.unknown_methods, self.lease_scope) == (other.unknown_methods, other.lease_scope)
            && self.namespace == other.namespace
    }

    /// Decides on a method that no rule can name.
    #[must_use]
    pub fn decide_unknown(&self, method: &Method) -> Decision {
        match (self.mode, self.unknown_methods) {
            (PolicyMode::Off, _) | (_, UnknownMethods::Allow) => self.decide_stream(method),
            (_, UnknownMethods::Refuse) => {
                Decision::Denied(Denial { action: Action::Write, reason: DenialReason::UnknownMethod })
            }
        }
    }

    /// The consequence of a denial: a permit if the denial is only counted.
    ///
    /// # Errors
    /// The denial is enforced.
    pub fn enforce(&self, denial: Denial) -> Result<Permit, Denial> {
        match self.mode {
            PolicyMode::Off | PolicyMode::Shadow => Ok(Permit::UNJUDGED),
            PolicyMode::Enforce => Err(denial),
        }
    }

    /// Counts a denial. Returns the permit of a denial that is only counted.
    ///
    /// # Errors
    /// The denial is enforced: the refusal for the client.
    pub fn enforce_and_count(&self, denial: Denial, metrics: &PolicyMetrics) -> Result<Permit, Refusal> {
        let action = denial.action.name();
        match self.enforce(denial) {
            Ok(permit) => {
                metrics.count_shadow_denied(action);
                Ok(permit)
            }
            Err(_) => {
                metrics.count_refused(action);
                Err(Refusal::PERMISSION_DENIED)
            }
        }
    }

    fn finish(&self, mut judged: JudgedTouches, read: Result<(), UnreadableRequest>) -> Decision {
        if read.is_err() {
            for touch in UNREADABLE {
                if judged.take(self, touch).is_break() {
                    break;
                }
            }
        }
        judged.finish()
    }

    /// Explains the verdict on a request that cannot be read.
    fn explain_unread(
        &self,
        read: Result<(), UnreadableRequest>,
        each: &mut dyn FnMut(Touch<'_>, Result<GrantId, Denial>),
    ) {
        if read.is_err() {
            UNREADABLE.into_iter().for_each(|touch| each(touch, self.judge(touch)));
        }
    }

    /// Begins with the verdict on a request without a touch: denied without any role, as this action.
    fn begin(&self, action: Action) -> JudgedTouches {
        let denied = Denial { action, reason: DenialReason::NoRole };
        JudgedTouches { grant: None, denied: self.roles.is_empty().then_some(denied), leases: Vec::new() }
    }

    /// Returns the grant for an action on a range of keys.
    fn judge_range(&self, action: Action, range: &KeyRange<'_>) -> Result<GrantId, DenialReason> {
        if !self.closed.is_empty() && self.closed.first_shared(range).is_some() {
            return Err(DenialReason::OwnKeys);
        }
        self.judge_grants(action, range)
    }

    /// The same without regard to Keyward's own keys.
    fn judge_grants(&self, action: Action, range: &KeyRange<'_>) -> Result<GrantId, DenialReason> {
        let own = self.own.as_deref();
        let denied = self.shared.denied(action, range);
        if let Some(grant) = denied.or_else(|| own?.denied(action, range)) {
            return Err(DenialReason::Grant(grant));
        }
        let (mut end, grant) = self.allowed_run(action, range.start).ok_or(DenialReason::NoGrant)?;
        while range.compare_end(end) == Ordering::Greater {
            // A run without an end contains the rest of every range.
            let key = end.ok_or(DenialReason::NoGrant)?;
            (end, _) = self.allowed_run(action, key).ok_or(DenialReason::NoGrant)?;
        }
        Ok(grant)
    }

    fn allowed_run(&self, action: Action, key: &[u8]) -> Option<AllowedRun<'_>> {
        let own = self.own.as_ref().and_then(|own| own.allowed_run(action, key));
        longer(self.shared.allowed_run(action, key), own)
    }

    fn judge_cluster(&self, action: Action) -> Result<GrantId, DenialReason> {
        match self.shared.on_cluster(action) {
            (_, Some(grant)) => Err(DenialReason::Grant(grant)),
            (Some(grant), None) => Ok(grant),
            (None, None) => Err(DenialReason::NoGrant),
        }
    }
}

/// The touches for which a request counts that cannot be read.
const UNREADABLE: [Touch<'static>; 2] = [
    Touch { action: Action::Read, target: TouchTarget::Keys(KeyRange::ALL) },
    Touch { action: Action::Write, target: TouchTarget::Keys(KeyRange::ALL) },
];

/// The action that names the denial of a request without a touch, such as the begin of a stream.
fn stream_action(method: &Method) -> Action {
    match method.handler {
        Handler::Watch => Action::Watch,
        Handler::KeepAlive => Action::Lease,
        _ => Action::Read,
    }
}

/// The verdict on the touches so far.
struct JudgedTouches {
    grant: Option<GrantId>,
    denied: Option<Denial>,
    leases: Vec<(Action, i64)>,
}

impl JudgedTouches {
    fn take(&mut self, permits: &PermitSet, touch: Touch<'_>) -> ControlFlow<()> {
        let action = touch.action;
        match touch.target {
            TouchTarget::Keys(_) | TouchTarget::Cluster => {}
            // No key is read for a caller without a role.
            _ if permits.roles.is_empty() => {}
            // The keys need not be known where every key is allowed.
            TouchTarget::KeysOfLease(lease) => {
                return self.ask_for_keys(permits.judge_range(action, &KeyRange::ALL), action, lease);
            }
            // Another key on a lease changes nothing for Keyward's own keys.
            TouchTarget::KeysSharingLease(lease) => {
                return self.ask_for_keys(permits.judge_grants(action, &KeyRange::ALL), action, lease);
            }
        }
        match permits.judge(touch) {
            Ok(grant) => {
                self.grant.get_or_insert(grant);
                ControlFlow::Continue(())
            }
            Err(denial) => {
                self.denied = Some(denial);
                ControlFlow::Break(())
            }
        }
    }

    fn ask_for_keys(
        &mut self,
        everything: Result<GrantId, DenialReason>,
        action: Action,
        lease: i64,
    ) -> ControlFlow<()> {
        if everything.is_err() {
            self.leases.push((action, lease));
        }
        ControlFlow::Continue(())
    }

    fn finish(self) -> Decision {
        if let Some(denied) = self.denied {
            return Decision::Denied(denied);
        }
        let permit = self.grant.map_or(Permit::UNJUDGED, Permit::granted);
        if self.leases.is_empty() {
            Decision::Allowed(permit)
        } else {
            Decision::NeedsLeaseKeys(permit, self.leases)
        }
    }
}
