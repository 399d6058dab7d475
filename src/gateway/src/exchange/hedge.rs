//! Hedged reads: asking a second member when the first member is slow to answer.
//!
//! Owns: when a second member is asked, and the choice between the two answers. Must not know: how a member
//! is asked. Invariants: reads are hedged only if `cluster.hedge_after` is set; only a linearizable read
//! servable by any member is hedged, at most once, within the retry budget, and only if the second member has
//! a free in-flight slot now; the first good answer is used, and the other stream is reset.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::member_slot::SendPermit;
use super::{Attempt, CallProgress, Exchange};
use crate::retries::RetryCause;
use keyward_cluster::choose::MemberTarget;
use keyward_cluster::membership::Member;
use keyward_etcd::identity::{ClusterId, MemberId};
use keyward_etcd::rpc::body_shape;
use keyward_etcd::rpc::method::{Effect, Lane, StreamingSides};
use keyward_streams::lease::lock_wait::LockWait;
use keyward_upstream::send::is_different_cluster;
use keyward_upstream::waiting_calls::is_still_served;

impl Exchange<'_> {
    /// The delay before a second member is asked; `None` if the call may not be hedged.
    pub(super) fn hedge_after(
        &self,
        lock_wait: Option<&LockWait>,
        progress: &CallProgress,
    ) -> Option<Duration> {
        let after = self.call.gateway.hedge_after?;
        // A local read goes to the home member, and a call may name a member or the leader: only the
        // remaining calls may go to any member.
        let anywhere = matches!(self.wanted, MemberTarget::Any | MemberTarget::Near);
        let reads = self.effect == Effect::ReadOnly && self.call.method.stream == StreamingSides::Unary;
        let short = self.lane == Lane::Unary && !self.takes_long();
        let is_eligible = anywhere && reads && short && lock_wait.is_none() && !progress.hedged;
        // A read that may end a member is asked of one member.
        let is_heavy = || body_shape::is_heavy(self.call.method, self.message());
        (is_eligible && !progress.lost && !is_heavy()).then_some(after)
    }

    /// Makes an attempt at the permit's member, and after the delay `after` another attempt at a second
    /// member. Returns the deciding member and its result.
    pub(super) async fn hedged(
        &self,
        after: Duration,
        permit: SendPermit,
        progress: &mut CallProgress,
    ) -> (Arc<Member>, Attempt) {
        let member = Arc::clone(&permit.member);
        let CallProgress { served, tried, healed, hedged, .. } = progress;
        let served = served.flatten();
        let tried: &[MemberId] = tried;
        let mut first = pin!(self.attempt(None, permit, tried, healed));
        let second = async {
            sleep(after).await;
            self.second(&member, served, tried).await
        };
        let second = tokio::select! {
            biased; // an answered call needs no second attempt
            ended = &mut first => return ended,
            second = second => second,
        };
        let Some(other) = second else {
            return first.await;
        };
        *hedged = true;
        self.call.gateway.metrics.tries.hedged.inc();
        let mut renewed = Vec::new();
        let mut second = pin!(self.attempt(None, other, tried, &mut renewed));
        let first_ended = tokio::select! {
            biased; // prefer the first member's answer if both answered
            ended = &mut first => Some(ended),
            ended = &mut second => match ended {
                (_, Attempt::Answered(_)) => {
                    self.call.gateway.metrics.tries.hedges_won.inc();
                    return ended;
                }
                // The second attempt failed: the first attempt decides, as if no second attempt had been
                // made.
                _ => None,
            },
        };
        match first_ended {
            None => first.await,
            Some(ended @ (_, Attempt::Answered(_))) => ended,
            Some(ended) => {
                let other = second.await;
                if let (_, Attempt::Answered(_)) = &other {
                    self.call.gateway.metrics.tries.hedges_won.inc();
                    return other;
                }
                ended
            }
        }
    }

    /// Chooses a second ready member of the cluster `served`, with a free in-flight slot, authenticates the
    /// caller there and draws on the retry budget. The future is dropped if the first member answers
    /// meanwhile.
    async fn second(
        &self,
        first: &Member,
        served: Option<ClusterId>,
        tried: &[MemberId],
    ) -> Option<SendPermit> {
        let mut avoid = tried.to_vec();
        avoid.push(first.id);
        let upstream = &self.call.gateway.upstream;
        // The member and the cluster must come from the same snapshot.
        let member = {
            let members = upstream.members.snapshot.load();
            let chosen = self.choose_among(&members, &avoid, Instant::now())?;
            let suits = chosen.is_ready() && !avoid.contains(&chosen.id);
            (suits && !is_different_cluster(served, members.cluster)).then_some(chosen)?
        };
        let queue = self.call.gateway.member_queues.at(&member);
        if !queue.has_room() {
            return None;
        }
        let shown = upstream.credential_for(&self.user, &member).await.ok()?;
        // A login may have taken seconds, so check the member again.
        let members = upstream.members.snapshot.load();
        if is_different_cluster(served, members.cluster) || !is_still_served(&members, &member) {
            return None;
        }
        let place = queue.enter()?;
        if !self.call.gateway.retries.take(RetryCause::Members, Instant::now()) {
            self.call.gateway.metrics.tries.refused.inc();
            return None;
        }
        Some(SendPermit { member, credential: shown, slot: Some(self.track_slot(place)) })
    }
}
