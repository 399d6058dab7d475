//! A call's turn at a member that has as many calls as it may have.
//!
//! Owns: which member is waited for, and when that is left. Must not know: how the line is kept, what becomes of the call.
//! Invariants: a call that finds room waits for nothing; nothing of one that waits was sent, so it may go elsewhere whatever it
//! is; it goes nowhere only for being full where it would not have gone otherwise; it waits no longer than a call is tried.

use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;

use tokio::time::sleep_until;

use super::{Course, Exchange};
use crate::identity::MemberId;
use crate::refusal::Refusal;
use crate::rpc::method::Lane;
use crate::upstream::balance::is_still_served;
use crate::upstream::choose::{Chooser, Wanted};
use crate::upstream::membership::Member;
use crate::upstream::send::is_another;
use crate::upstream::turns::{Full, Place, Urgency};

/// What became of the wish to be sent to a member.
pub(super) enum Placed {
    /// It has its turn at this one. Streams need none.
    At(Arc<Member>, Option<Place>),
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
        if self.lane == Lane::Stream {
            return Placed::At(member, None);
        }
        match self.gateway.turns.at(&member).enter() {
            Some(place) => Placed::At(member, Some(place)),
            // Apart: no call is to be larger for it that finds room.
            None => Box::pin(self.turn(member, course)).await,
        }
    }

    async fn turn(&self, member: Arc<Member>, course: &Course) -> Placed {
        let mut full: Vec<MemberId> = course.tried.clone();
        full.push(member.id);
        while matches!(self.wanted, Wanted::Any | Wanted::Near | Wanted::LeaderFirst)
            && let Some(other) =
                self.choose(&full).filter(|other| other.is_ready() && !full.contains(&other.id))
        {
            if let Some(place) = self.gateway.turns.at(&other).enter() {
                return Placed::At(other, Some(place));
            }
            full.push(other.id);
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
            // Nothing was sent: it may leave a member that hangs or is to have rest, whatever it is.
            let members = door.members.snapshot.load();
            if is_another(course.served.flatten(), members.cluster) {
                return Placed::Refused(member, Refusal::NOTHING_SENT);
            }
            if !is_still_served(&members, &member) {
                let tried: Vec<MemberId> = course.tried.iter().copied().chain([member.id]).collect();
                if Chooser::another(&members, self.wanted, &tried) {
                    return Placed::Elsewhere(member);
                }
                // One that is only suspected, or was named, it would be sent to if it came now.
                let now = self.choose_among(&members, &course.tried);
                if now.is_none_or(|now| now.id != member.id || now.spot() != member.spot()) {
                    return Placed::Nowhere;
                }
            }
            if let Some(place) = place {
                return Placed::At(member, Some(place));
            }
        }
    }
}
