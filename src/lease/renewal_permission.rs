//! The permission to renew a lease, asked of etcd where a member would renew every lease for everybody
//! (docs/decisions.md#d55).
//!
//! Owns: the question before a renewal, one at a time as in etcd, and the leases proved lately. Must not know:
//! upstream streams, the order of renewals.
//! Invariants: while a member of an old version may be asked, no renewal goes upstream before its lease was
//! proved within [`PROVED_FOR`]; a patched cluster is asked no question.

use std::collections::HashMap;
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt as _;
use futures_util::future::LocalBoxFuture;
use tokio::time::Instant;

use crate::members::membership::AuthSetting;
use crate::refusal::Refusal;
use crate::rpc::txn_permissions::KeyAccess;
use crate::upstream::permission_probe::PermissionProbe;
use crate::upstream::send::{UpstreamClient, UpstreamUser};

/// How long a proof counts. A question about a lease with keys is a raft entry, a renewal is none, so a question
/// for each renewal would multiply the load of keepalives.
const PROVED_FOR: Duration = Duration::from_secs(15);
/// Leases remembered as proved, of one stream.
const MOST_PROVED: usize = 1024;

/// The proofs of one stream.
pub struct RenewalPermissions {
    probe: Rc<PermissionProbe>,
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

impl RenewalPermissions {
    /// Nothing is proved yet.
    #[must_use]
    pub fn new(upstream: Rc<UpstreamClient>, user: UpstreamUser) -> Self {
        let probe = Rc::new(PermissionProbe { upstream, user });
        Self { probe, proved: HashMap::new(), question: None }
    }

    /// Returns `message` if the renewal needs no question now. Otherwise asks etcd: the renewal comes out of
    /// [`RenewalPermissions::next`]. Call this only while no question is open.
    pub fn admit(&mut self, lease: i64, message: Bytes, now: Instant) -> Option<Bytes> {
        if !self.is_unguarded() || self.is_proved(lease, now) {
            return Some(message);
        }
        let probe = Rc::clone(&self.probe);
        let verdict = async move { probe.has(Vec::new(), &[lease], KeyAccess::Write).await }.boxed_local();
        self.question = Some(RenewalQuestion { lease, message, verdict });
        None
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
