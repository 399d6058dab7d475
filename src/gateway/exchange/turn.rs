//! A call's turn at a member that has as many calls as it may have.
//!
//! Owns: which member is waited for, and when that is left; that a caller is proved first. Must not know: how the line is kept,
//! what becomes of the call. Invariants: nobody has a place, or stands in line, who is not proved yet: a login may take seconds, in
//! which nothing is sent; a call that finds room waits for nothing else; nothing of one that waits was sent, so it may go elsewhere
//! whatever it is; for being full alone it goes nowhere that it would not have gone otherwise; it waits no longer than a call is tried.

use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;

use futures_util::FutureExt as _;
use tokio::time::sleep_until;

use super::kept_place::KeptPlace;
use super::{Course, Exchange};
use crate::identity::MemberId;
use crate::refusal::Refusal;
use crate::rpc::method::Lane;
use crate::upstream::choose::Wanted;
use crate::upstream::credential::{LoginFailure, Shown};
use crate::upstream::membership::Member;
use crate::upstream::send::is_another;
use crate::upstream::turns::{Full, Place, Urgency};

/// Where a call may be sent, and with what.
pub(super) struct Pass {
    pub(super) member: Arc<Member>,
    /// What proves the caller there.
    pub(super) shown: Shown,
    /// Its place there. Streams need none.
    pub(super) place: Option<KeptPlace>,
}

/// What became of the wish to be sent to a member.
pub(super) enum Placed {
    /// It has its turn.
    With(Pass),
    /// Who calls cannot be proved to this one.
    Unproved(Arc<Member>, LoginFailure),
    /// This one serves no more, and another does.
    Elsewhere(Arc<Member>),
    /// Nor does another: there is no member for it now.
    Nowhere,
    /// It is not sent at all. This is where it waited.
    Refused(Arc<Member>, Refusal),
}

impl Exchange<'_> {
    /// A place at `member`, or at another that has room; where none has, this call's turn is waited for.
    pub(super) async fn place(&self, member: Arc<Member>, course: &Course) -> Placed {
        let shown = match self.proved(&member, course).await {
            Ok(shown) => shown,
            Err(placed) => return placed,
        };
        if self.lane == Lane::Stream {
            return Placed::With(Pass { member, shown, place: None });
        }
        match self.gateway.turns.at(&member).enter() {
            Some(place) => Placed::With(Pass { member, shown, place: Some(self.kept(place)) }),
            // Apart: no call is to be larger for it that finds room.
            None => Box::pin(self.turn(member, shown, course)).await,
        }
    }

    pub(super) fn kept(&self, place: Place) -> KeptPlace {
        KeptPlace::new(place, &self.gateway.tasks)
    }

    /// What proves the caller to `member`; where that took a while, only if the call is to be sent there still.
    async fn proved(&self, member: &Arc<Member>, course: &Course) -> Result<Shown, Placed> {
        let unproved = |failure| Placed::Unproved(Arc::clone(member), failure);
        let mut proving = pin!(self.gateway.door.shown(&self.whom, member));
        if let Some(known) = proving.as_mut().now_or_never() {
            return known.map_err(unproved);
        }
        let shown = proving.await.map_err(unproved)?;
        self.left(member, course).map_or(Ok(shown), Err)
    }

    /// What becomes of a call that has waited for `member`, where it is not to be sent there any more. Nothing of it was
    /// sent: it may leave a member that hangs or is to have rest, whatever it is.
    fn left(&self, member: &Arc<Member>, course: &Course) -> Option<Placed> {
        let members = self.gateway.door.members.snapshot.load();
        if is_another(course.served.flatten(), members.cluster) {
            return Some(Placed::Refused(Arc::clone(member), Refusal::NOTHING_SENT));
        }
        if self.is_still_at(&members, member) {
            return None;
        }
        let tried: Vec<MemberId> = course.tried.iter().copied().chain([member.id]).collect();
        if self.has_another(&members, &tried) {
            return Some(Placed::Elsewhere(Arc::clone(member)));
        }
        // One that is only suspected, or was named, it would be sent to if it came now.
        let now = self.choose_among(&members, &course.tried);
        now.is_none_or(|now| now.id != member.id || now.spot() != member.spot()).then_some(Placed::Nowhere)
    }

    async fn turn(&self, member: Arc<Member>, shown: Shown, course: &Course) -> Placed {
        let mut full: Vec<MemberId> = course.tried.clone();
        full.push(member.id);
        while matches!(self.wanted, Wanted::Any | Wanted::Near | Wanted::LeaderFirst)
            && let Some(other) =
                self.choose(&full).filter(|other| other.is_ready() && !full.contains(&other.id))
        {
            full.push(other.id);
            let turn = self.gateway.turns.at(&other);
            if !turn.has_room() {
                continue;
            }
            match self.proved(&other, course).await {
                Err(placed) => return placed,
                Ok(shown) => {
                    if let Some(place) = turn.enter() {
                        let place = Some(self.kept(place));
                        return Placed::With(Pass { member: other, shown, place });
                    }
                }
            }
        }
        let door = &self.gateway.door;
        let told = door.lingering.at(&member);
        let turn = self.gateway.turns.at(&member);
        let urgency = Urgency::of(self.method, self.effect, self.lane);
        let mut waiting = pin!(Rc::clone(&turn).wait(urgency));
        loop {
            let place = tokio::select! {
                biased; // a turn that has come counts
                placed = &mut waiting => match placed {
                    Ok(place) => Some(place),
                    Err(Full) => return Placed::Refused(member, Refusal::TOO_MANY_REQUESTS),
                },
                () = told.notified() => None,
                () = sleep_until(course.patience) => {
                    turn.refused();
                    return Placed::Refused(member, Refusal::TOO_MANY_REQUESTS);
                }
            };
            if let Some(left) = self.left(&member, course) {
                return left;
            }
            if let Some(place) = place {
                // It may be proved by something else now. What would take a while to get is not waited for on a place: what it
                // had is refused, if it must be, and renewed without one.
                let shown = match door.shown(&self.whom, &member).now_or_never() {
                    None => shown,
                    Some(Ok(now)) => now,
                    Some(Err(failure)) => return Placed::Unproved(member, failure),
                };
                return Placed::With(Pass { member, shown, place: Some(self.kept(place)) });
            }
        }
    }
}
