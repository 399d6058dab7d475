//! Limit on a shard's calls in flight at each member, and the priority queue of calls waiting for a slot.
//!
//! Owns: the slots and the queue. Must not know: a call beyond its urgency; streams, which never queue here.
//! A call holds its slot until its answer begins to arrive: the client determines how long the rest of a
//! large answer takes, and a client not reading must not delay further calls.
//! Invariants: never more calls than slots. No slot is free while a call waits. A freed slot goes to the most
//! urgent call, among equals to the first. A call leaving the queue leaves no entry behind; a slot granted to
//! a departed call goes to the next.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

use tokio::sync::oneshot;

use keyward_cluster::fitness::member_load::MemberLoad;
use keyward_cluster::membership::Member;
use keyward_etcd::identity::MemberId;
use keyward_etcd::rpc::method::{Class, Effect, Lane, Method};

/// Waiting calls allowed per slot: a backlog a healthy member answers within seconds.
const LINE: usize = 4;

/// A call's urgency; the first variant is the most urgent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Urgency {
    /// Lease calls: delay may cost a client its lease.
    Lease,
    /// Writes.
    Write,
    /// Reads.
    Read,
    /// Large reads.
    Bulk,
}

const URGENCIES: usize = 4;

impl Urgency {
    /// Derives the urgency from the method's row, the call's effect and its lane.
    #[must_use]
    pub fn of(method: &Method, effect: Effect, lane: Lane) -> Self {
        match (method.class, lane, effect) {
            (Class::Lease, ..) => Self::Lease,
            (_, Lane::Bulk, _) => Self::Bulk,
            (_, _, Effect::ReadOnly) => Self::Read,
            _ => Self::Write,
        }
    }
}

/// The queue is full, and no waiting call is less urgent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemberQueueFull;

/// Slots and waiting calls; pure.
#[derive(Debug)]
struct SlotQueue<T> {
    places: usize,
    taken: usize,
    waiting: [VecDeque<(u64, T)>; URGENCIES],
    tickets: u64,
}

impl<T> SlotQueue<T> {
    fn new(places: usize) -> Self {
        let waiting = std::array::from_fn(|_| VecDeque::new());
        Self { places, taken: 0, waiting, tickets: 0 }
    }

    /// Takes a free slot. Returns false if all are taken.
    fn enter(&mut self) -> bool {
        let free = self.taken < self.places;
        self.taken += usize::from(free);
        free
    }

    /// Queues a call. Returns its ticket, and the call evicted to make room, if any.
    fn wait(&mut self, urgency: Urgency, who: T) -> Result<(u64, Option<T>), MemberQueueFull> {
        let mut pushed = None;
        if self.waiting.iter().map(VecDeque::len).sum::<usize>() >= self.places.saturating_mul(LINE) {
            let less = self.waiting.iter_mut().skip(urgency as usize + 1).rev().find(|line| !line.is_empty());
            pushed = Some(less.and_then(VecDeque::pop_back).ok_or(MemberQueueFull)?.1);
        }
        self.tickets += 1;
        self.waiting[urgency as usize].push_back((self.tickets, who));
        Ok((self.tickets, pushed))
    }

    /// Releases a slot. The returned call, if any, holds the slot now.
    fn leave(&mut self) -> Option<T> {
        let next = self.waiting.iter_mut().find_map(VecDeque::pop_front);
        if next.is_none() {
            self.taken -= 1;
        }
        next.map(|(_, who)| who)
    }

    /// Removes a waiting call from the queue.
    fn quit(&mut self, ticket: u64) {
        self.waiting.iter_mut().for_each(|line| line.retain(|(waits, _)| *waits != ticket));
    }
}

/// A shard's slots at all members.
#[derive(Debug)]
pub struct MemberQueues {
    places: usize,
    members: RefCell<Vec<(MemberId, Rc<MemberQueue>)>>,
}

/// The slots and the queue of a single member.
#[derive(Debug)]
pub struct MemberQueue {
    line: RefCell<SlotQueue<oneshot::Sender<()>>>,
    load: Arc<MemberLoad>,
}

/// A call's slot, released on drop.
#[derive(Debug)]
pub struct MemberSlot(Rc<MemberQueue>);

impl MemberQueues {
    /// Creates queues with `places` slots per member, at least 1.
    #[must_use]
    pub fn new(places: usize) -> Self {
        Self { places: places.max(1), members: RefCell::default() }
    }

    /// Returns the queue of `member`.
    #[must_use]
    pub fn at(&self, member: &Member) -> Rc<MemberQueue> {
        let mut members = self.members.borrow_mut();
        if let Some((_, turn)) = members.iter().find(|(id, _)| *id == member.id) {
            return Rc::clone(turn);
        }
        // Forget queues without calls: members come and go.
        members.retain(|(_, turn)| Rc::strong_count(turn) > 1);
        let line = RefCell::new(SlotQueue::new(self.places));
        let turn = Rc::new(MemberQueue { line, load: Arc::clone(&member.load) });
        members.push((member.id, Rc::clone(&turn)));
        turn
    }
}

impl MemberQueue {
    /// True if a slot is free now.
    #[must_use]
    pub fn has_room(&self) -> bool {
        let line = self.line.borrow();
        line.taken < line.places
    }

    /// Takes a free slot; `None` if all are taken.
    #[must_use]
    pub fn enter(self: &Rc<Self>) -> Option<MemberSlot> {
        self.line.borrow_mut().enter().then(|| MemberSlot(Rc::clone(self)))
    }

    /// Waits in the queue for a slot. Dropping the future leaves the queue.
    ///
    /// # Errors
    /// The queue is full, or more urgent calls have evicted the call.
    pub async fn wait(self: Rc<Self>, urgency: Urgency) -> Result<MemberSlot, MemberQueueFull> {
        let (tell, told) = oneshot::channel();
        let entered = self.line.borrow_mut().wait(urgency, tell);
        let (ticket, pushed) = entered.inspect_err(|_| self.refused())?;
        drop(pushed);
        let _counted = self.load.queue.begin();
        let mut waits = QueuedCall { turn: Rc::clone(&self), ticket, told };
        match (&mut waits.told).await {
            Ok(()) => Ok(MemberSlot(Rc::clone(&self))),
            Err(_) => {
                self.refused();
                Err(MemberQueueFull)
            }
        }
    }

    /// Counts a call refused for want of a slot.
    pub fn refused(&self) {
        self.load.count_refused();
    }

    fn leave(&self) {
        loop {
            let next = self.line.borrow_mut().leave();
            // The slot of a departed waiter goes to the next waiter.
            if next.is_none_or(|next| next.send(()).is_ok()) {
                return;
            }
        }
    }
}

impl Drop for MemberSlot {
    fn drop(&mut self) {
        self.0.leave();
    }
}

/// A call in the queue; leaves on drop.
struct QueuedCall {
    turn: Rc<MemberQueue>,
    ticket: u64,
    told: oneshot::Receiver<()>,
}

impl Drop for QueuedCall {
    fn drop(&mut self) {
        match self.told.try_recv() {
            // Granted, but dropped before seeing the grant: pass the slot on.
            Ok(()) => self.turn.leave(),
            Err(oneshot::error::TryRecvError::Empty) => self.turn.line.borrow_mut().quit(self.ticket),
            // Evicted, or granted and taken.
            Err(oneshot::error::TryRecvError::Closed) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use futures_util::FutureExt as _;

    use super::*;
    use keyward_cluster::membership::Readiness;
    use keyward_cluster::test_member::member;
    use keyward_etcd::rpc::method::lookup;

    const ALL: [Urgency; URGENCIES] = [Urgency::Lease, Urgency::Write, Urgency::Read, Urgency::Bulk];

    #[test]
    fn leases_come_before_writes_before_reads_before_what_is_large() {
        let of = |path, effect, lane| Urgency::of(lookup(path).unwrap(), effect, lane);
        let (read, write) = (Effect::ReadOnly, Effect::Mutates);
        assert_eq!(of("/etcdserverpb.Lease/LeaseGrant", write, Lane::Unary), Urgency::Lease);
        assert_eq!(of("/etcdserverpb.Lease/LeaseTimeToLive", read, Lane::Unary), Urgency::Lease);
        assert_eq!(of("/etcdserverpb.KV/Txn", write, Lane::Unary), Urgency::Write);
        assert_eq!(of("/etcdserverpb.KV/Txn", read, Lane::Unary), Urgency::Read);
        assert_eq!(of("/etcdserverpb.KV/Range", read, Lane::Bulk), Urgency::Bulk);
        let mut line = SlotQueue::new(1);
        assert!(line.enter());
        let come = [3, 2, 1, 0].into_iter().flat_map(|at| [(at, 'a'), (at, 'b')]).take(4);
        for (at, who) in come {
            line.wait(ALL[at], (at, who)).unwrap();
        }
        line.waiting[0].push_back((90, (0, 'a')));
        line.waiting[1].push_back((91, (1, 'a')));
        let order: Vec<_> = std::iter::from_fn(|| line.leave()).collect();
        assert_eq!(order, [(0, 'a'), (1, 'a'), (2, 'a'), (2, 'b'), (3, 'a'), (3, 'b')]);
        assert_eq!(line.taken, 0);
    }

    #[test]
    fn a_full_line_takes_what_is_more_urgent_than_its_last() {
        let mut line = SlotQueue::new(1);
        assert!(line.enter());
        (0..LINE).for_each(|who| assert!(line.wait(Urgency::Bulk, who).is_ok()));
        assert_eq!(line.wait(Urgency::Bulk, 10).unwrap_err(), MemberQueueFull);
        assert_eq!(line.wait(Urgency::Read, 11).unwrap().1, Some(LINE - 1), "the last of the least urgent");
        (1..LINE).for_each(|who| assert!(line.wait(Urgency::Write, who).unwrap().1.is_some()));
        assert_eq!(line.wait(Urgency::Read, 12).unwrap_err(), MemberQueueFull);
        assert_eq!(line.wait(Urgency::Lease, 13).unwrap().1, Some(11));
    }

    /// Walks through every reachable state: whatever the order of arrivals, grants, releases and departures,
    /// the invariants hold, and no call waits for ever.
    #[test]
    fn no_place_and_no_turn_is_ever_lost() {
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        enum Call {
            Out,
            Waits(usize),
            Has,
        }
        // State: each call's position, and the waiting calls in order of arrival.
        type State = (Vec<Call>, Vec<usize>);
        const CALLS: usize = 5;
        let rebuilt = |(calls, order): &State| {
            let mut line = SlotQueue::new(2);
            line.taken = calls.iter().filter(|call| **call == Call::Has).count();
            for who in order {
                let Call::Waits(at) = calls[*who] else { panic!("it stands in line") };
                line.wait(ALL[at], *who).unwrap();
            }
            line
        };
        let first_of = |(calls, order): &State| {
            let urgency = |who: &usize| match calls[*who] {
                Call::Waits(at) => at,
                _ => panic!("it stands in line"),
            };
            order.iter().copied().min_by_key(urgency)
        };
        let mut seen: HashSet<State> = HashSet::new();
        let mut left = vec![(vec![Call::Out; CALLS], Vec::new())];
        while let Some(state) = left.pop() {
            if !seen.insert(state.clone()) {
                continue;
            }
            let have = state.0.iter().filter(|call| **call == Call::Has).count();
            assert!(have <= 2 && (have == 2 || state.1.is_empty()), "{state:?}");
            for who in 0..CALLS {
                let ways: &[usize] = if state.0[who] == Call::Out { &[0, 1, 2, 3] } else { &[0] };
                for way in ways {
                    let (mut line, mut next) = (rebuilt(&state), state.clone());
                    match state.0[who] {
                        Call::Out if line.enter() => next.0[who] = Call::Has,
                        Call::Out => {
                            line.wait(ALL[*way], who).unwrap();
                            next.0[who] = Call::Waits(*way);
                            next.1.push(who);
                        }
                        Call::Waits(_) => {
                            let ticket = 1 + state.1.iter().position(|waits| *waits == who).unwrap() as u64;
                            line.quit(ticket);
                            next.0[who] = Call::Out;
                            next.1.retain(|waits| *waits != who);
                        }
                        Call::Has => {
                            let given = line.leave();
                            assert_eq!(given, first_of(&state), "{state:?}");
                            next.0[who] = Call::Out;
                            if let Some(given) = given {
                                next.0[given] = Call::Has;
                                next.1.retain(|waits| *waits != given);
                            }
                        }
                    }
                    let waiting: usize = line.waiting.iter().map(VecDeque::len).sum();
                    assert_eq!(waiting, next.1.len());
                    assert_eq!(line.taken, next.0.iter().filter(|call| **call == Call::Has).count());
                    left.push(next);
                }
            }
        }
        assert!(seen.len() > 1000, "{}", seen.len());
    }

    #[test]
    fn who_leaves_the_line_or_a_place_unseen_leaves_nothing_behind() {
        let (turns, member) = (MemberQueues::new(1), member(1, Readiness::Ready));
        let turn = turns.at(&member);
        let place = turn.enter().expect("free");
        assert!(turn.enter().is_none());
        let mut waits: Vec<_> = (0..3).map(|_| Box::pin(Rc::clone(&turn).wait(Urgency::Read))).collect();
        waits.iter_mut().for_each(|waits| assert!(waits.now_or_never().is_none()));
        assert_eq!(member.load.queue.waiting(), 3);
        drop(waits.remove(0));
        assert_eq!(member.load.queue.waiting(), 2);
        drop(place);
        // The waiter got the slot and leaves before seeing the grant.
        drop(waits.remove(0));
        let place = (&mut waits[0]).now_or_never().expect("its turn").expect("a place");
        assert!(turn.enter().is_none());
        drop(place);
        assert!(turn.enter().is_some());
        assert_eq!((member.load.queue.waiting(), member.load.queue.ended()), (0, 3));
    }

    #[test]
    fn who_is_pushed_out_is_told_and_counted() {
        let (turns, member) = (MemberQueues::new(1), member(1, Readiness::Ready));
        let turn = turns.at(&member);
        let _place = turn.enter().expect("free");
        let mut large: Vec<_> = (0..=LINE).map(|_| Box::pin(Rc::clone(&turn).wait(Urgency::Bulk))).collect();
        let refused = large.pop().map(|mut last| {
            large.iter_mut().for_each(|waits| assert!(waits.now_or_never().is_none()));
            (&mut last).now_or_never().expect("at once").err()
        });
        assert_eq!(refused, Some(Some(MemberQueueFull)));
        let mut write = Box::pin(Rc::clone(&turn).wait(Urgency::Write));
        assert!((&mut write).now_or_never().is_none());
        let ended: Vec<_> =
            large.iter_mut().map(|waits| waits.now_or_never().map(|ended| ended.err())).collect();
        assert_eq!(ended, [None, None, None, Some(Some(MemberQueueFull))]);
        assert_eq!(member.load.refused(), 2);
    }
}
