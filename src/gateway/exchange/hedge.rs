//! A second member that is asked beside the first, which takes long to answer.
//!
//! Owns: when there is a second, and which answer counts. Must not know: how one is asked. Invariants: none unless
//! `cluster.hedge_after` says so; only a linearizable read that any member can serve has a second, one, within what may be sent
//! again, and where there is room at once; the first good answer counts, and the other stream is reset.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::turn::Pass;
use super::{Attempt, Course, Exchange};
use crate::gateway::access_log::Record;
use crate::gateway::retries::Trouble;
use crate::identity::{ClusterId, MemberId};
use crate::lease::claim::Claim;
use crate::rpc::method::{Effect, Lane, Stream};
use crate::upstream::balance::is_still_served;
use crate::upstream::choose::Wanted;
use crate::upstream::membership::Member;
use crate::upstream::send::is_another;

impl Exchange<'_> {
    /// After what time a second member is asked; none where that is not to be.
    pub(super) fn hedge_after(&self, claim: Option<&Claim>, course: &Course) -> Option<Duration> {
        let after = self.gateway.hedge_after?;
        // What is local goes home, what names a member or the leader to that one: only these may go anywhere.
        let anywhere = matches!(self.wanted, Wanted::Any | Wanted::Near);
        let reads = self.effect == Effect::ReadOnly && self.method.stream == Stream::Unary;
        let short = self.lane == Lane::Unary && !self.takes_long();
        (anywhere && reads && short && claim.is_none() && !course.hedged).then_some(after)
    }

    /// One attempt at `member`, and after that time another beside it. Returns who came first, and with what.
    pub(super) async fn hedged(
        &self,
        after: Duration,
        pass: &Pass,
        course: &mut Course,
        record: &mut Record,
    ) -> (Arc<Member>, Attempt) {
        let member = Arc::clone(&pass.member);
        let Course { served, tried, healed, hedged, .. } = course;
        let served = served.flatten();
        let tried: &[MemberId] = tried;
        let mut first = pin!(self.attempt(None, pass, tried, healed, record.attempts));
        let second = async {
            sleep(after).await;
            self.second(&member, served, tried).await
        };
        let second = tokio::select! {
            biased; // what was answered needs no second
            attempt = &mut first => return (Arc::clone(&member), attempt),
            second = second => second,
        };
        let Some(other) = second else {
            return (Arc::clone(&member), first.await);
        };
        let second_member = Arc::clone(&other.member);
        *hedged = true;
        record.attempts += 1;
        self.gateway.metrics.tries.hedged.inc();
        let mut renewed = Vec::new();
        let mut second = pin!(self.attempt(None, &other, tried, &mut renewed, record.attempts));
        let first_ended = tokio::select! {
            biased; // of two good answers the first
            attempt = &mut first => Some(attempt),
            attempt = &mut second => match attempt {
                Attempt::Answered(_) => {
                    self.gateway.metrics.tries.hedges_won.inc();
                    return (Arc::clone(&second_member), attempt);
                }
                // The first decides, as if there had been no other.
                _ => None,
            },
        };
        let ended = match first_ended {
            None => first.await,
            Some(Attempt::Answered(answer)) => Attempt::Answered(answer),
            Some(ended) => {
                let other = second.await;
                if let Attempt::Answered(_) = &other {
                    self.gateway.metrics.tries.hedges_won.inc();
                    return (Arc::clone(&second_member), other);
                }
                ended
            }
        };
        (member, ended)
    }

    /// Another ready member of the cluster that was `served`, with room, to which the caller is proved, within what may be
    /// sent again. Dropped where the first answers meanwhile.
    async fn second(&self, first: &Member, served: Option<ClusterId>, tried: &[MemberId]) -> Option<Pass> {
        let mut avoid = tried.to_vec();
        avoid.push(first.id);
        let door = &self.gateway.door;
        // Both of one snapshot.
        let member = {
            let members = door.members.snapshot.load();
            let chosen = self.choose_among(&members, &avoid)?;
            let suits = chosen.is_ready() && !avoid.contains(&chosen.id);
            (suits && !is_another(served, members.cluster)).then_some(chosen)?
        };
        let turn = self.gateway.turns.at(&member);
        if !turn.has_room() {
            return None;
        }
        let shown = door.shown(&self.whom, &member).await.ok()?;
        // A login may have taken a while.
        let members = door.members.snapshot.load();
        if is_another(served, members.cluster) || !is_still_served(&members, &member) {
            return None;
        }
        let place = turn.enter()?;
        if !self.gateway.retries.take(Trouble::Members, Instant::now()) {
            self.gateway.metrics.tries.refused.inc();
            return None;
        }
        Some(Pass { member, shown, place: Some(self.kept(place)) })
    }
}
