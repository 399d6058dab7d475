//! Whether any member serves, and how long a client's stream waits while none does.
//!
//! Owns: what the readiness of all members comes to, since when, and when it ends a stream. Must not know: how members are probed,
//! what a stream carries. Invariants: a stream is told that there is no leader only while a member that answers says so, since
//! clientv3 ends its watches upon that text for good; a stream that no member can serve is ended in the end, with a status upon which
//! clients open it again.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::{ArcSwap, ArcSwapOption};
use tokio::time::{Instant, sleep_until};

use crate::config::OutageTimes;
use crate::refusal::Refusal;
use crate::upstream::membership::{
    Changes, ChangesSender, Member, MembersHandle, Membership, Readiness, Reason,
};

/// Whether any member serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outage {
    /// At least one voter is ready.
    None,
    /// No voter is ready, and at least one answers and sees no leader.
    NoLeader {
        /// The first moment at which that was so.
        since: Instant,
    },
    /// No voter is ready, and none answers.
    Unreachable {
        /// The first moment at which that was so.
        since: Instant,
    },
}

impl Outage {
    /// What the readiness of `members` comes to `now`, where it came to `self` before. An outage that goes on keeps its begin.
    #[must_use]
    pub fn next(self, members: &[Arc<Member>], now: Instant) -> Self {
        let has = |readiness| members.iter().any(|member| member.readiness == readiness);
        if has(Readiness::Ready) {
            return Self::None;
        }
        match (has(Readiness::NotReady(Reason::NoLeader)), self) {
            (true, Self::NoLeader { .. }) | (false, Self::Unreachable { .. }) => self,
            (true, _) => Self::NoLeader { since: now },
            (false, _) => Self::Unreachable { since: now },
        }
    }
}

/// Where changes of the [`Outage`] are told. They are rare, so that streams can listen at no cost: who serves what changes more often.
#[derive(Debug)]
pub struct OutageChanges {
    sender: ChangesSender,
    changes: Changes,
    /// When a member last ended a stream that stood, since it has no leader.
    stream_ended: ArcSwapOption<Instant>,
}

impl Default for OutageChanges {
    fn default() -> Self {
        let (sender, changes) = Changes::channel();
        Self { sender, changes, stream_ended: ArcSwapOption::empty() }
    }
}

/// Publishes what the members are now in `slot`, and tells of an outage that begins, ends, or is another one.
pub fn publish(slot: &ArcSwap<Membership>, outages: &OutageChanges, mut after: Membership) {
    let before = slot.load().outage;
    after.outage = before.next(&after.members, Instant::now());
    let changed = after.outage != before;
    slot.store(Arc::new(after));
    if changed {
        outages.sender.tell();
    }
}

impl MembersHandle {
    /// See [`publish`]. It tells no change but that of the outage.
    pub fn publish(&self, after: Membership) {
        publish(&self.snapshot, &self.outages, after);
    }

    /// A member has ended a stream that stood, since it has no leader: it has looked as often as etcd does. Where all members that
    /// answer are without one, every stream ends now whose client asked for one.
    pub fn stream_ended_without_leader(&self) {
        if matches!(self.snapshot.load().outage, Outage::NoLeader { .. }) {
            self.outages.stream_ended.store(Some(Arc::new(Instant::now())));
            self.outages.sender.tell();
        }
    }
}

/// Whether an upstream stream serves a client's stream. The client's stream says so; [`ended`] looks at it.
#[derive(Debug)]
pub struct UpstreamLink {
    down_since: Cell<Option<Instant>>,
}

impl Default for UpstreamLink {
    fn default() -> Self {
        Self { down_since: Cell::new(Some(Instant::now())) }
    }
}

impl UpstreamLink {
    /// A message came from a member.
    pub fn set_up(&self) {
        self.down_since.set(None);
    }

    /// No upstream stream is left.
    pub fn set_down(&self) {
        if self.down_since.get().is_none() {
            self.down_since.set(Some(Instant::now()));
        }
    }
}

/// How long a client's stream waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamPatience {
    /// While members answer and see no leader; for ever where the client did not ask for a leader.
    no_leader: Option<Duration>,
    /// An outage without a leader lasts at least so long before a member's own end of a stream ends the others: a member that was cut off
    /// alone ends its streams at the end of its own wait, when the others may have begun an election a moment ago.
    election: Duration,
    /// While no member answers.
    unreachable: Duration,
}

impl StreamPatience {
    /// That of a stream whose client asked for a leader (`hasleader: true`), or did not.
    #[must_use]
    pub fn new(times: OutageTimes, wants_leader: bool) -> Self {
        // etcd looks once each election timeout whether it has a leader, and ends such streams at the third time that it has none
        // (monitorLeader in etcdserver/api/v3rpc/interceptor.go): two to three election timeouts after it lost its leader.
        let no_leader = wants_leader.then(|| times.election_timeout * 5 / 2);
        Self { no_leader, election: times.election_timeout, unreachable: times.unreachable_timeout }
    }

    /// What follows from an outage, for a stream without an upstream stream since `down_since`.
    fn look(self, outage: Outage, down_since: Option<Instant>, now: Instant) -> Next {
        let (at, refusal) = match (outage, self.no_leader, down_since) {
            (Outage::None, _, _) | (Outage::NoLeader { .. }, None, _) => return Next::AtChange,
            (Outage::NoLeader { since }, Some(limit), _) => (since + limit, Refusal::NO_LEADER),
            // Probes fail, and its member may be slow only: a stream of etcd stays open as well.
            (Outage::Unreachable { .. }, _, None) => return Next::LookAgain(now + self.unreachable),
            (Outage::Unreachable { since }, _, Some(down)) => {
                (since.max(down) + self.unreachable, Refusal::REQUEST_TIMED_OUT_CONNECTION_LOST)
            }
        };
        if at <= now { Next::End(refusal) } else { Next::LookAgain(at) }
    }
}

/// What a look at the outage comes to.
#[derive(Debug, PartialEq)]
enum Next {
    End(Refusal),
    /// Then, or when the outage is another one.
    LookAgain(Instant),
    /// When the outage is another one.
    AtChange,
}

/// Waits until an outage ends the client's stream that has this link; the status that its client is told. Cancel-safe.
pub async fn ended(members: &MembersHandle, link: &UpstreamLink, patience: StreamPatience) -> Refusal {
    let mut changes = members.outages.changes.clone();
    loop {
        changes.mark_unchanged();
        let outage = members.snapshot.load().outage;
        let stream_ended = members.outages.stream_ended.load_full();
        if let (Outage::NoLeader { since }, Some(_)) = (outage, patience.no_leader)
            && stream_ended.is_some_and(|ended| *ended >= since + patience.election)
        {
            return Refusal::NO_LEADER;
        }
        let at = match patience.look(outage, link.down_since.get(), Instant::now()) {
            Next::End(refusal) => return refusal,
            Next::LookAgain(at) => Some(at),
            Next::AtChange => None,
        };
        let due = async {
            match at {
                Some(at) => sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased; // in any order, but always the same
            Ok(()) = changes.changed() => {}
            () = due => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::upstream::membership::tests::member;

    const ALONE: Readiness = Readiness::NotReady(Reason::NoLeader);
    const DOWN: Readiness = Readiness::NotReady(Reason::Unreachable);
    const SECOND: Duration = Duration::from_secs(1);
    const TIMES: OutageTimes =
        OutageTimes { election_timeout: SECOND, unreachable_timeout: Duration::from_secs(10) };

    fn next(before: Outage, readiness: &[Readiness], now: Instant) -> Outage {
        let members: Vec<_> = (1..).zip(readiness).map(|(id, readiness)| member(id, *readiness)).collect();
        before.next(&members, now)
    }

    #[test]
    fn an_outage_is_of_all_members_and_keeps_its_begin_until_it_is_another() {
        let start = Instant::now();
        let at = |seconds| start + SECOND * seconds;
        let mut outage = Outage::Unreachable { since: start };
        for (second, readiness, expected) in [
            (1, &[DOWN, DOWN][..], Outage::Unreachable { since: start }),
            (2, &[DOWN, Readiness::Ready], Outage::None),
            (3, &[ALONE, Readiness::Ready], Outage::None),
            (4, &[ALONE, DOWN], Outage::NoLeader { since: at(4) }),
            (5, &[DOWN, ALONE], Outage::NoLeader { since: at(4) }),
            (6, &[DOWN, DOWN], Outage::Unreachable { since: at(6) }),
            (7, &[], Outage::Unreachable { since: at(6) }),
            (8, &[ALONE], Outage::NoLeader { since: at(8) }),
            (9, &[Readiness::NotReady(Reason::ForeignCluster)], Outage::Unreachable { since: at(9) }),
        ] {
            outage = next(outage, readiness, at(second));
            assert_eq!(outage, expected, "second {second}");
        }
    }

    #[test]
    fn only_who_asked_for_a_leader_is_told_that_there_is_none_and_only_by_members_that_answer() {
        let start = Instant::now();
        let at = |millis| start + Duration::from_millis(millis);
        let (asked, plain) = (StreamPatience::new(TIMES, true), StreamPatience::new(TIMES, false));
        let no_leader = Outage::NoLeader { since: start };
        for down_since in [None, Some(start)] {
            assert_eq!(asked.look(Outage::None, down_since, at(60_000)), Next::AtChange);
            assert_eq!(plain.look(no_leader, down_since, at(60_000)), Next::AtChange);
            assert_eq!(asked.look(no_leader, down_since, at(2499)), Next::LookAgain(at(2500)));
            assert_eq!(asked.look(no_leader, down_since, at(2500)), Next::End(Refusal::NO_LEADER));
        }
        let slow = OutageTimes { election_timeout: 5 * SECOND, ..TIMES };
        let slow = StreamPatience::new(slow, true).look(no_leader, None, at(0));
        assert_eq!(slow, Next::LookAgain(at(12_500)));
    }

    #[test]
    fn while_nobody_answers_a_stream_ends_once_it_was_without_a_member_for_so_long() {
        let start = Instant::now();
        let at = |seconds| start + SECOND * seconds;
        let lost = || Next::End(Refusal::REQUEST_TIMED_OUT_CONNECTION_LOST);
        let unreachable = Outage::Unreachable { since: at(20) };
        for patience in [StreamPatience::new(TIMES, true), StreamPatience::new(TIMES, false)] {
            let look = |down_since, now| patience.look(unreachable, down_since, now);
            assert_eq!(look(Some(at(0)), at(29)), Next::LookAgain(at(30)), "from the outage's begin");
            assert_eq!(look(Some(at(0)), at(30)), lost());
            assert_eq!(look(Some(at(25)), at(30)), Next::LookAgain(at(35)), "or from the loss of its member");
            assert_eq!(look(Some(at(25)), at(35)), lost());
            assert_eq!(look(None, at(300)), Next::LookAgain(at(310)), "it has a member");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_stream_hears_of_an_outage_and_of_its_end() {
        let membership = |readiness| Membership {
            members: vec![member(1, readiness)],
            ..Membership::unknown(Instant::now())
        };
        let (handle, _changed, _hinted) = MembersHandle::showing(membership(Readiness::Ready));
        let link = UpstreamLink::default();
        let script = async {
            for trouble in [ALONE, DOWN] {
                tokio::time::sleep(60 * SECOND).await;
                handle.publish(membership(trouble));
                tokio::time::sleep(2 * SECOND).await;
                handle.publish(membership(Readiness::Ready));
            }
            tokio::time::sleep(60 * SECOND).await;
            handle.publish(membership(DOWN));
            std::future::pending::<()>().await;
        };
        let began = Instant::now();
        tokio::select! {
            refusal = ended(&handle, &link, StreamPatience::new(TIMES, true)) => {
                assert_eq!(refusal, Refusal::REQUEST_TIMED_OUT_CONNECTION_LOST);
            }
            () = script => {}
        }
        assert_eq!(began.elapsed(), Duration::from_secs(3 * 60 + 2 * 2 + 10));
    }

    /// etcd may look earlier than we would.
    #[tokio::test(start_paused = true)]
    async fn a_member_that_ends_its_streams_ends_those_of_all_who_asked_for_a_leader() {
        let membership = |readiness| Membership {
            members: vec![member(1, readiness)],
            ..Membership::unknown(Instant::now())
        };
        let (handle, _changed, _hinted) = MembersHandle::showing(membership(Readiness::Ready));
        handle.stream_ended_without_leader();
        let link = UpstreamLink::default();
        let patience = |wants_leader| StreamPatience::new(TIMES, wants_leader);
        let script = async {
            tokio::time::sleep(60 * SECOND).await;
            handle.publish(membership(ALONE));
            tokio::time::sleep(SECOND / 2).await;
            handle.stream_ended_without_leader();
            tokio::time::sleep(SECOND * 3 / 2).await;
            handle.stream_ended_without_leader();
            std::future::pending::<()>().await;
        };
        let began = Instant::now();
        tokio::select! {
            refusal = ended(&handle, &link, patience(true)) => assert_eq!(refusal, Refusal::NO_LEADER),
            _ = ended(&handle, &link, patience(false)) => panic!("it did not ask"),
            () = script => {}
        }
        assert_eq!(
            began.elapsed(),
            62 * SECOND,
            "not by what was before this outage, or in its first moments"
        );
    }
}
