//! The outage state of the cluster, and the time limits of client streams during an outage.
//!
//! Owns: the outage state derived from the readiness of all members, its start, and the end of a stream. Must
//! not know: how members are probed, the content of streams. Invariants: a stream is told `no leader` only
//! while an answering member reports the missing leader, because clientv3 ends its watches for good upon this
//! text; a stream without a serving member is eventually ended, with a status upon which clients open the
//! stream again.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio::time::{Instant, sleep_until};

use crate::membership::{Member, MembersHandle, Membership, Readiness, UnreadyReason};
use crate::outage_state::{Outage, OutageChanges};
use keyward_config::OutageTimes;
use keyward_etcd::refusal::Refusal;

impl Outage {
    /// The state at `now`, given the previous state `self` and the readiness of `members`. A continuing
    /// outage keeps its start.
    #[must_use]
    pub fn next(self, members: &[Arc<Member>], now: Instant) -> Self {
        let has = |readiness| members.iter().any(|member| member.readiness == readiness);
        if has(Readiness::Ready) {
            return Self::None;
        }
        match (has(Readiness::NotReady(UnreadyReason::NoLeader)), self) {
            (true, Self::NoLeader { .. }) | (false, Self::Unreachable { .. }) => self,
            (true, _) => Self::NoLeader { since: now },
            (false, _) => Self::Unreachable { since: now },
        }
    }
}

/// Publishes `after` in `slot`, and notifies listeners if the outage state changed.
pub fn publish(slot: &ArcSwap<Membership>, outages: &OutageChanges, mut after: Membership) {
    let before = slot.load().outage;
    after.outage = before.next(&after.members, Instant::now());
    after.holes = after.open_holes();
    let changed = after.outage != before;
    slot.store(Arc::new(after));
    if changed {
        outages.sender.tell();
    }
}

impl MembersHandle {
    /// See [`publish`]. Notifies only of outage changes.
    pub fn publish(&self, after: Membership) {
        publish(&self.snapshot, &self.outages, after);
    }

    /// Records that a member ended an established stream for a missing leader, after as many checks as etcd
    /// makes. If every answering member is without a leader, all streams whose client required a leader end
    /// now.
    pub fn stream_ended_without_leader(&self) {
        if matches!(self.snapshot.load().outage, Outage::NoLeader { .. }) {
            self.outages.stream_ended.store(Some(Arc::new(Instant::now())));
            self.outages.sender.tell();
        }
    }
}

/// Shows if an upstream stream serves a client's stream. Written by the client's stream, read by
/// [`wait_for_stream_end`].
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
    /// Records a message from a member.
    pub fn set_up(&self) {
        self.down_since.set(None);
    }

    /// Records the loss of the upstream stream.
    pub fn set_down(&self) {
        if self.down_since.get().is_none() {
            self.down_since.set(Some(Instant::now()));
        }
    }
}

/// The time limits of a client's stream during an outage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamPatience {
    /// Limit while members answer and see no leader; `None` (no limit) unless the client required a leader.
    no_leader: Option<Duration>,
    /// Minimum duration of a `NoLeader` outage before a stream ended by a member ends all streams. An
    /// isolated member ends its streams at the end of its own wait, while the remaining members may have
    /// begun an election a moment ago.
    election: Duration,
    /// Limit while no member answers.
    unreachable: Duration,
}

impl StreamPatience {
    /// The limits for a stream; `wants_leader` is true if the client required a leader (`hasleader: true`).
    #[must_use]
    pub fn new(times: OutageTimes, wants_leader: bool) -> Self {
        // etcd checks for a leader once per election timeout, and ends such streams at the third check
        // without a leader (monitorLeader in etcdserver/api/v3rpc/interceptor.go): two to three election
        // timeouts after the loss of the leader.
        let no_leader = wants_leader.then(|| times.election_timeout * 5 / 2);
        Self { no_leader, election: times.election_timeout, unreachable: times.unreachable_timeout }
    }

    /// The consequence of `outage` for a stream without an upstream stream since `down_since`.
    fn look(self, outage: Outage, down_since: Option<Instant>, now: Instant) -> OutageVerdict {
        let (at, refusal) = match (outage, self.no_leader, down_since) {
            (Outage::None, _, _) | (Outage::NoLeader { .. }, None, _) => return OutageVerdict::AtChange,
            (Outage::NoLeader { since }, Some(limit), _) => (since + limit, Refusal::NO_LEADER),
            // The upstream stream is established, so the member may only be slow to answer probes; etcd keeps
            // such a stream open too.
            (Outage::Unreachable { .. }, _, None) => return OutageVerdict::LookAgain(now + self.unreachable),
            (Outage::Unreachable { since }, _, Some(down)) => {
                (since.max(down) + self.unreachable, Refusal::REQUEST_TIMED_OUT_CONNECTION_LOST)
            }
        };
        if at <= now { OutageVerdict::End(refusal) } else { OutageVerdict::LookAgain(at) }
    }
}

/// The consequence of a check of the outage state.
#[derive(Debug, PartialEq)]
enum OutageVerdict {
    End(Refusal),
    /// Check again at this time, or at the next outage change.
    LookAgain(Instant),
    /// Check again at the next outage change.
    AtChange,
}

/// Waits until an outage ends the client's stream with this link, and returns the status for the client.
/// Cancel-safe.
pub async fn wait_for_stream_end(
    members: &MembersHandle,
    link: &UpstreamLink,
    patience: StreamPatience,
) -> Refusal {
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
            OutageVerdict::End(refusal) => return refusal,
            OutageVerdict::LookAgain(at) => Some(at),
            OutageVerdict::AtChange => None,
        };
        let due = async {
            match at {
                // Boxed: the timer is large, and streams live without an outage.
                Some(at) => Box::pin(sleep_until(at)).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased; // No arm has priority; the fixed order makes runs reproducible.
            Ok(()) = changes.changed() => {}
            () = due => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_member::member;

    const ALONE: Readiness = Readiness::NotReady(UnreadyReason::NoLeader);
    const DOWN: Readiness = Readiness::NotReady(UnreadyReason::Unreachable);
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
            (9, &[Readiness::NotReady(UnreadyReason::ForeignCluster)], Outage::Unreachable { since: at(9) }),
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
            assert_eq!(asked.look(Outage::None, down_since, at(60_000)), OutageVerdict::AtChange);
            assert_eq!(plain.look(no_leader, down_since, at(60_000)), OutageVerdict::AtChange);
            assert_eq!(asked.look(no_leader, down_since, at(2499)), OutageVerdict::LookAgain(at(2500)));
            assert_eq!(asked.look(no_leader, down_since, at(2500)), OutageVerdict::End(Refusal::NO_LEADER));
        }
        let slow = OutageTimes { election_timeout: 5 * SECOND, ..TIMES };
        let slow = StreamPatience::new(slow, true).look(no_leader, None, at(0));
        assert_eq!(slow, OutageVerdict::LookAgain(at(12_500)));
    }

    #[test]
    fn while_nobody_answers_a_stream_ends_once_it_was_without_a_member_for_so_long() {
        let start = Instant::now();
        let at = |seconds| start + SECOND * seconds;
        let lost = || OutageVerdict::End(Refusal::REQUEST_TIMED_OUT_CONNECTION_LOST);
        let unreachable = Outage::Unreachable { since: at(20) };
        for patience in [StreamPatience::new(TIMES, true), StreamPatience::new(TIMES, false)] {
            let look = |down_since, now| patience.look(unreachable, down_since, now);
            assert_eq!(
                look(Some(at(0)), at(29)),
                OutageVerdict::LookAgain(at(30)),
                "from the outage's begin"
            );
            assert_eq!(look(Some(at(0)), at(30)), lost());
            assert_eq!(
                look(Some(at(25)), at(30)),
                OutageVerdict::LookAgain(at(35)),
                "or from the loss of its member"
            );
            assert_eq!(look(Some(at(25)), at(35)), lost());
            assert_eq!(look(None, at(300)), OutageVerdict::LookAgain(at(310)), "it has a member");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_stream_hears_of_an_outage_and_of_its_end() {
        let membership = |readiness| Membership {
            members: vec![member(1, readiness)],
            ..Membership::unknown(Instant::now())
        };
        let (handle, _changed, _hinted) = MembersHandle::publishing(membership(Readiness::Ready));
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
            refusal = wait_for_stream_end(&handle, &link, StreamPatience::new(TIMES, true)) => {
                assert_eq!(refusal, Refusal::REQUEST_TIMED_OUT_CONNECTION_LOST);
            }
            () = script => {}
        }
        assert_eq!(began.elapsed(), Duration::from_secs(3 * 60 + 2 * 2 + 10));
    }

    /// etcd may check for a leader earlier than Keyward.
    #[tokio::test(start_paused = true)]
    async fn a_member_that_ends_its_streams_ends_those_of_all_who_asked_for_a_leader() {
        let membership = |readiness| Membership {
            members: vec![member(1, readiness)],
            ..Membership::unknown(Instant::now())
        };
        let (handle, _changed, _hinted) = MembersHandle::publishing(membership(Readiness::Ready));
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
            refusal = wait_for_stream_end(&handle, &link, patience(true)) => assert_eq!(refusal, Refusal::NO_LEADER),
            _ = wait_for_stream_end(&handle, &link, patience(false)) => panic!("it did not ask"),
            () = script => {}
        }
        assert_eq!(
            began.elapsed(),
            62 * SECOND,
            "not by what was before this outage, or in its first moments"
        );
    }
}
