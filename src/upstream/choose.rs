//! Which member gets a call.
//!
//! Owns: the choice among members as published, by what the call wants and how busy each is. Pure: no clock, no
//! sockets. Must not know: what the call is, who calls. Invariant: a learner, a member of another cluster or one that
//! is not ready is never chosen, unless nothing that is ready is left and it merely was suspected.

use std::cell::Cell;
use std::sync::Arc;

use crate::identity::MemberId;
use crate::rpc::method::{Method, Target};
use crate::upstream::membership::{Member, Membership, Readiness};

/// Chooses members; one per shard.
#[derive(Debug, Default)]
pub struct Chooser {
    turn: Cell<usize>,
}

impl Chooser {
    /// A member for a call that wants `target`. `home` is the client connection's own member, taken first where the
    /// target is `Home`. Members in `avoid` were just tried in vain and are taken last. `load` says how many calls a
    /// member has in flight. None where no member can serve it now.
    pub fn choose(
        &self,
        members: &Membership,
        wanted: Wanted,
        avoid: &[MemberId],
        load: impl Fn(MemberId) -> usize,
    ) -> Option<Arc<Member>> {
        let leader = || members.leader().cloned();
        match wanted {
            Wanted::Leader => leader(),
            Wanted::LeaderFirst => leader()
                .filter(|member| !avoid.contains(&member.id))
                .or_else(|| self.any(members, avoid, load)),
            Wanted::Spared => self.spared(members, avoid).or_else(leader),
            Wanted::Home(home) => home
                .and_then(|id| members.get(id))
                .filter(|member| member.is_ready() && !avoid.contains(&member.id))
                .cloned()
                .or_else(|| self.any(members, avoid, load)),
            Wanted::Any => self.any(members, avoid, load),
        }
    }

    /// Power of two choices, the two taken in turn: idle members are used evenly, busy ones less.
    fn any(
        &self,
        members: &Membership,
        avoid: &[MemberId],
        load: impl Fn(MemberId) -> usize,
    ) -> Option<Arc<Member>> {
        let voters = || members.members.iter().filter(|member| member.readiness == Readiness::Ready);
        let good = || members.ready_voters().filter(|member| !avoid.contains(&member.id));
        let count = good().count();
        if count == 0 {
            // Better a member that may be back than a sure refusal: the tried ones last.
            let tried = |member: &&Arc<Member>| avoid.contains(&member.id);
            return voters().find(|member| !tried(member)).or_else(|| voters().next()).cloned();
        }
        let turn = self.turn.get();
        self.turn.set(turn.wrapping_add(1));
        let first = good().nth(turn % count)?;
        let second = good().nth((turn + 1) % count)?;
        let chosen = if load(second.id) < load(first.id) { second } else { first };
        Some(Arc::clone(chosen))
    }

    /// A ready follower, always the same while it is there: maintenance spares the leader.
    fn spared(&self, members: &Membership, avoid: &[MemberId]) -> Option<Arc<Member>> {
        let followers = members
            .ready_voters()
            .filter(|member| Some(member.id) != members.leader && !avoid.contains(&member.id));
        followers.min_by_key(|member| member.id).cloned()
    }
}

/// What kind of member a call wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// Any ready voter.
    Any,
    /// The connection's own member, else any: what a client reads there never goes back.
    Home(Option<MemberId>),
    /// The leader and nobody else.
    Leader,
    /// The leader, else any.
    LeaderFirst,
    /// One member, a follower where there is one: Snapshot, Defragment.
    Spared,
}

impl Wanted {
    /// What the method table says. A call about one member's own state asks the leader where it only looks, so that
    /// Status, Hash and HashKV speak of the same member, and a follower where it is heavy.
    #[must_use]
    pub fn by(method: &Method) -> Self {
        match method.target {
            Target::AnyVoter => Self::Any,
            Target::Leader => Self::Leader,
            Target::LeaderFirst => Self::LeaderFirst,
            Target::OneMember if matches!(method.name, "Snapshot" | "Defragment") => Self::Spared,
            Target::OneMember => Self::LeaderFirst,
        }
    }
}
