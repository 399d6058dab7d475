//! Queueing a call for an in-flight slot at a member that already has `limits.member_in_flight` calls.
//!
//! Owns: the choice of the member to wait for, when to stop waiting, and authenticating the caller first.
//! Must not know: how the queue is ordered, the result of the call. Invariants: a call takes a slot or queues
//! only after authentication, because a login may take seconds without sending anything; a call finding a
//! free slot waits for nothing else; a queued call has sent nothing, so the call may go to any member; a full
//! queue alone never diverts a call to a member outside the usual choices of the call; no call queues longer
//! than the call is tried.

use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;

use futures_util::FutureExt as _;
use tokio::time::{Instant, sleep_until};

use super::tracked_slot::TrackedSlot;
use super::{CallProgress, Exchange};
use crate::call_trace::CallWait;
use keyward_cluster::choose::MemberTarget;
use keyward_cluster::membership::Member;
use keyward_etcd::identity::MemberId;
use keyward_etcd::refusal::Refusal;
use keyward_etcd::rpc::method::Lane;
use keyward_upstream::credentials::{CallCredential, LoginFailure};
use keyward_upstream::member_queue::{MemberQueueFull, MemberSlot, Urgency};
use keyward_upstream::send::is_different_cluster;

/// Permission to send a call to a member.
pub(super) struct SendPermit {
    pub(super) member: Arc<Member>,
    /// The caller's credential for the member.
    pub(super) credential: CallCredential,
    /// The in-flight slot at the member. Streams need none.
    pub(super) slot: Option<TrackedSlot>,
}

/// The result of asking for an in-flight slot at a member.
pub(super) enum SlotOutcome {
    /// The call may be sent.
    With(SendPermit),
    /// The caller could not be authenticated to this member.
    Unproved(Arc<Member>, LoginFailure),
    /// This member stopped serving, and another member is available.
    Elsewhere(Arc<Member>),
    /// The member stopped serving, and no other member is available now.
    Nowhere,
    /// The call is not sent.
    Refused(Refusal),
}

impl Exchange<'_> {
    /// Takes an in-flight slot at `member`, or at another member with a free slot; if no slot is free, queues
    /// at `member`.
    pub(super) async fn take_slot(&self, member: Arc<Member>, progress: &CallProgress) -> SlotOutcome {
        let shown = match self.authenticate_at(&member, progress).await {
            Ok(shown) => shown,
            Err(outcome) => return outcome,
        };
        if self.lane == Lane::Stream {
            return SlotOutcome::With(SendPermit { member, credential: shown, slot: None });
        }
        match self.call.gateway.member_queues.at(&member).enter() {
            Some(place) => SlotOutcome::With(SendPermit {
                member,
                credential: shown,
                slot: Some(self.track_slot(place)),
            }),
            // Boxed, so that calls finding a free slot do not pay for a larger future.
            None => Box::pin(self.wait_for_slot(member, shown, progress)).await,
        }
    }

    pub(super) fn track_slot(&self, place: MemberSlot) -> TrackedSlot {
        TrackedSlot::new(place, &self.call.gateway.tasks)
    }

    /// Authenticates the caller to `member`. If a login was needed, checks that `member` still suits the
    /// call.
    async fn authenticate_at(
        &self,
        member: &Arc<Member>,
        progress: &CallProgress,
    ) -> Result<CallCredential, SlotOutcome> {
        let unproved = |failure| SlotOutcome::Unproved(Arc::clone(member), failure);
        let mut proving = pin!(self.call.gateway.upstream.credential_for(&self.user, member));
        if let Some(known) = proving.as_mut().now_or_never() {
            return known.map_err(unproved);
        }
        self.call.record.begin_wait(CallWait::Credential);
        let shown = proving.await;
        self.call.record.end_wait(CallWait::Credential);
        let shown = shown.map_err(unproved)?;
        self.recheck_member(member, progress).map_or(Ok(shown), Err)
    }

    /// The result for a call that may not be sent to `member` any more; `None` if the call may still be sent.
    /// A queued call has sent nothing, so even a write may leave a hanging member or a member about to be
    /// defragmented.
    fn recheck_member(&self, member: &Arc<Member>, progress: &CallProgress) -> Option<SlotOutcome> {
        let members = self.call.gateway.upstream.members.snapshot.load();
        if is_different_cluster(progress.served.flatten(), members.cluster) {
            return Some(SlotOutcome::Refused(Refusal::NOTHING_SENT));
        }
        if self.is_still_at(&members, member) {
            return None;
        }
        let tried: Vec<MemberId> = progress.tried.iter().copied().chain([member.id]).collect();
        if self.has_another(&members, &tried) {
            return Some(SlotOutcome::Elsewhere(Arc::clone(member)));
        }
        // Keep waiting if a new call would be sent to the same member and address, as for a suspected or an
        // addressed member.
        let now = self.choose_among(&members, &progress.tried, Instant::now());
        now.is_none_or(|now| now.id != member.id || now.connection_target() != member.connection_target())
            .then_some(SlotOutcome::Nowhere)
    }

    async fn wait_for_slot(
        &self,
        member: Arc<Member>,
        shown: CallCredential,
        progress: &CallProgress,
    ) -> SlotOutcome {
        self.call.record.begin_wait(CallWait::Turn);
        let outcome = self.slot_after_wait(member, shown, progress).await;
        self.call.record.end_wait(CallWait::Turn);
        outcome
    }

    async fn slot_after_wait(
        &self,
        member: Arc<Member>,
        shown: CallCredential,
        progress: &CallProgress,
    ) -> SlotOutcome {
        let mut full: Vec<MemberId> = progress.tried.clone();
        full.push(member.id);
        while matches!(self.wanted, MemberTarget::Any | MemberTarget::Near | MemberTarget::LeaderFirst)
            && let Some(other) =
                self.choose(&full).filter(|other| other.is_ready() && !full.contains(&other.id))
        {
            full.push(other.id);
            let queue = self.call.gateway.member_queues.at(&other);
            if !queue.has_room() {
                continue;
            }
            match self.authenticate_at(&other, progress).await {
                Err(outcome) => return outcome,
                Ok(shown) => {
                    if let Some(place) = queue.enter() {
                        let slot = Some(self.track_slot(place));
                        return SlotOutcome::With(SendPermit { member: other, credential: shown, slot });
                    }
                }
            }
        }
        let upstream = &self.call.gateway.upstream;
        let displaced = upstream.waiting_calls.at(&member);
        let queue = self.call.gateway.member_queues.at(&member);
        let urgency = Urgency::of(self.call.method, self.effect, self.lane);
        let mut waiting = pin!(Rc::clone(&queue).wait(urgency));
        loop {
            let place = tokio::select! {
                biased; // prefer a slot that was granted
                outcome = &mut waiting => match outcome {
                    Ok(place) => Some(place),
                    Err(MemberQueueFull) => return SlotOutcome::Refused(Refusal::TOO_MANY_REQUESTS),
                },
                () = displaced.notified() => None,
                () = sleep_until(progress.patience) => {
                    queue.refused();
                    return SlotOutcome::Refused(Refusal::TOO_MANY_REQUESTS);
                }
            };
            if let Some(left) = self.recheck_member(&member, progress) {
                return left;
            }
            if let Some(place) = place {
                // The credential may have been replaced while the call queued. The call does not wait for a
                // slow login while holding a slot: the old credential is sent, and renewed without a slot if
                // the member refuses.
                let shown = match upstream.credential_for(&self.user, &member).now_or_never() {
                    None => shown,
                    Some(Ok(now)) => now,
                    Some(Err(failure)) => return SlotOutcome::Unproved(member, failure),
                };
                return SlotOutcome::With(SendPermit {
                    member,
                    credential: shown,
                    slot: Some(self.track_slot(place)),
                });
            }
        }
    }
}
