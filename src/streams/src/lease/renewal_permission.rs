//! The permission to renew a lease: decided by the policy, and asked of etcd where a member would renew every
//! lease for everybody (docs/decisions.md#d31, docs/decisions.md#d57).
//!
//! Owns: the question before a renewal, one at a time as in etcd, telling of decisions, and the leases proved
//! lately. Must not know: upstream streams, the order of renewals.
//! Invariants: while a member of an old version may be asked, or the policy judges the keys of a lease, no
//! renewal goes upstream before its lease was proved within `PROVED_FOR`; a patched cluster without such a
//! policy is asked no question; proofs under other permissions do not count.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt as _;
use futures_util::future::LocalBoxFuture;
use tokio::time::Instant;

use keyward_access::policy::interval_set::GrantId;
use keyward_access::policy::live_permits::LivePermits;
use keyward_access::policy::permit::Permit;
use keyward_access::policy::permit_set::{Decision, Denial, PermitSet};
use keyward_access::policy::shadow_register::{DeniedPart, StreamDenials};
use keyward_cluster::membership::AuthSetting;
use keyward_config::PolicyMode;
use keyward_etcd::refusal::{AnswerEnd, Refusal, RefusalReason};
use keyward_etcd::rpc::method::Method;
use keyward_etcd::rpc::touch::Action;
use keyward_etcd::rpc::txn_permissions::KeyAccess;
use keyward_upstream::permission_probe::PermissionProbe;
use keyward_upstream::send::{UpstreamClient, UpstreamUser};

/// How long a proof counts. A question about a lease with keys is a raft entry, a renewal is none, so a
/// question for each renewal would multiply the load of keepalives.
const PROVED_FOR: Duration = Duration::from_secs(15);
/// Leases remembered as proved, of one stream.
const MOST_PROVED: usize = 1024;

/// A decision of the policy on the renewal of a lease.
pub struct RenewalDecision<'d> {
    /// The lease.
    pub lease: i64,
    /// The keys of the lease, if they were read for the decision.
    pub keys: &'d [Bytes],
    /// The permissions that decided.
    pub permits: &'d Rc<PermitSet>,
    /// The grant that allowed the renewal, or the denial.
    pub decided: Result<Option<GrantId>, Denial>,
}

/// Hears of the policy's decisions on renewals.
pub type RenewalObserver = Box<dyn Fn(RenewalDecision<'_>)>;

/// The policy's decision on each renewal of a stream.
pub struct RenewalAccess {
    /// The caller's permissions.
    pub permits: Rc<LivePermits>,
    /// Counts denials.
    pub denials: StreamDenials,
    /// The observer of decisions, if any.
    pub observer: Option<RenewalObserver>,
    /// The rule of the last denial that is enforced.
    pub enforced_rule: RefCell<Option<Box<str>>>,
}

/// The proofs of one stream.
pub struct RenewalPermissions {
    probe: Rc<PermissionProbe>,
    access: Option<Rc<RenewalAccess>>,
    /// The permissions under which leases were proved.
    proved_under: Option<Rc<PermitSet>>,
    proved: HashMap<i64, Instant>,
    question: Option<RenewalQuestion>,
}

/// A renewal waiting for etcd's verdict.
struct RenewalQuestion {
    lease: i64,
    message: Bytes,
    verdict: LocalBoxFuture<'static, Result<(), Refusal>>,
}

/// A renewal with etcd's verdict.
pub struct JudgedRenewal {
    /// The client's message.
    pub message: Bytes,
    /// Permission to renew, or the refusal.
    pub verdict: Result<(), Refusal>,
}

impl RenewalAccess {
    /// Decides on a renewal without its keys. Returns the permissions that must allow the keys as well, with
    /// the permit that holds then.
    ///
    /// # Errors
    /// The policy refuses the renewal.
    fn decide(
        &self,
        method: &'static Method,
        lease: i64,
        message: &[u8],
    ) -> Result<Option<(Rc<PermitSet>, Permit)>, Refusal> {
        let permits = self.permits.now();
        match permits.decide(method, message) {
            Decision::Allowed(permit) => {
                self.observe(lease, &[], &permits, Ok(permit.grant()));
                Ok(None)
            }
            Decision::Denied(denial) => {
                self.observe(lease, &[], &permits, Err(denial));
                let part = DeniedPart::Message(message);
                let counted = self.denials.count(&permits, denial, method, part);
                counted.map(|_| None).inspect_err(|_| self.note_rule(&permits, denial))
            }
            Decision::NeedsLeaseKeys(permit, _) => Ok(Some((permits, permit))),
        }
    }

    /// Decides on the keys of a renewed lease, which is allowed by `permit` without them.
    ///
    /// # Errors
    /// The policy refuses the renewal.
    fn decide_keys(
        &self,
        (permits, permit): (&Rc<PermitSet>, Permit),
        method: &'static Method,
        lease: i64,
        keys: &[Bytes],
    ) -> Result<(), Refusal> {
        match permits.decide_keys(Action::Write, keys.iter().map(|key| &key[..])) {
            Decision::Denied(denial) => {
                self.observe(lease, keys, permits, Err(denial));
                let part = DeniedPart::KeysOfLease(Action::Write, keys);
                let counted = self.denials.count(permits, denial, method, part).map(drop);
                counted.inspect_err(|_| self.note_rule(permits, denial))
            }
            Decision::Allowed(_) | Decision::NeedsLeaseKeys(..) => {
                self.observe(lease, keys, permits, Ok(permit.grant()));
                Ok(())
            }
        }
    }

    fn note_rule(&self, permits: &PermitSet, denial: Denial) {
        self.enforced_rule.replace(Some(permits.denying_rule(denial).into()));
    }

    fn observe(
        &self,
        lease: i64,
        keys: &[Bytes],
        permits: &Rc<PermitSet>,
        decided: Result<Option<GrantId>, Denial>,
    ) {
        if let Some(observer) = &self.observer {
            observer(RenewalDecision { lease, keys, permits, decided });
        }
    }
}

impl RenewalPermissions {
    /// Nothing is proved yet.
    #[must_use]
    pub fn new(upstream: Rc<UpstreamClient>, user: UpstreamUser, access: Option<RenewalAccess>) -> Self {
        let probe = Rc::new(PermissionProbe { upstream, user });
        let access = access.map(Rc::new);
        Self { probe, access, proved_under: None, proved: HashMap::new(), question: None }
    }

    /// Returns `message`, a request of `method`, if the renewal needs no question now. Otherwise asks etcd:
    /// the renewal comes out of [`RenewalPermissions::next`]. Call this only while no question is open.
    ///
    /// # Errors
    /// The policy refuses every renewal.
    pub fn admit(
        &mut self,
        method: &'static Method,
        lease: i64,
        message: Bytes,
        now: Instant,
    ) -> Result<Option<Bytes>, Refusal> {
        let judges_keys = match &self.access {
            Some(access) => access.decide(method, lease, &message)?,
            None => None,
        };
        if let Some((permits, _)) = &judges_keys
            && !self.proved_under.as_ref().is_some_and(|known| known.is_same(permits))
        {
            self.proved.clear();
            self.proved_under = Some(Rc::clone(permits));
        }
        let is_unguarded = self.is_unguarded();
        if !is_unguarded && judges_keys.is_none() || self.is_proved(lease, now) {
            return Ok(Some(message));
        }
        let (probe, access) = (Rc::clone(&self.probe), self.access.clone());
        let verdict = async move {
            if is_unguarded {
                probe.has(Vec::new(), &[lease], KeyAccess::Write).await?;
            }
            if let (Some(access), Some((permits, permit))) = (access, judges_keys) {
                match probe.keys_of_lease(lease).await {
                    Ok(keys) => access.decide_keys((&permits, permit), method, lease, &keys)?,
                    // A denial would only be counted.
                    Err(_) if permits.mode != PolicyMode::Enforce => {
                        access.observe(lease, &[], &permits, Ok(permit.grant()));
                    }
                    Err(refusal) => return Err(refusal),
                }
            }
            Ok(())
        };
        self.question = Some(RenewalQuestion { lease, message, verdict: verdict.boxed_local() });
        Ok(None)
    }

    /// The end of a stream whose renewal is refused, with the rule if the policy refuses.
    #[must_use]
    pub fn end(&self, refusal: Refusal) -> AnswerEnd {
        let is_of_policy = refusal.reason() == RefusalReason::Policy;
        let access = self.access.as_ref().filter(|_| is_of_policy);
        AnswerEnd::by_rule(refusal, access.and_then(|access| access.enforced_rule.take()))
    }

    /// True if a renewal waits for etcd's verdict.
    #[must_use]
    pub fn is_asking(&self) -> bool {
        self.question.is_some()
    }

    /// The renewal that waited, with the verdict; never without an open question. Cancel-safe.
    pub async fn next(&mut self) -> JudgedRenewal {
        let Some(question) = &mut self.question else { return std::future::pending().await };
        let verdict = question.verdict.as_mut().await;
        let (lease, message) = (question.lease, question.message.clone());
        self.question = None;
        if verdict.is_ok() {
            self.note_proof(lease, Instant::now());
        }
        JudgedRenewal { message, verdict }
    }

    /// True if a member may renew the lease without asking for the user's permission.
    fn is_unguarded(&self) -> bool {
        let members = &self.probe.upstream.members;
        matches!(self.probe.user, UpstreamUser::User(_))
            && members.snapshot.load().holes.unguarded_methods
            && members.auth.now() != AuthSetting::Off
    }

    fn is_proved(&self, lease: i64, now: Instant) -> bool {
        self.proved.get(&lease).is_some_and(|at| now.saturating_duration_since(*at) < PROVED_FOR)
    }

    fn note_proof(&mut self, lease: i64, now: Instant) {
        if self.proved.len() >= MOST_PROVED {
            self.proved.retain(|_, at| now.saturating_duration_since(*at) < PROVED_FOR);
        }
        if self.proved.len() >= MOST_PROVED {
            self.proved.clear();
        }
        self.proved.insert(lease, now);
    }
}
