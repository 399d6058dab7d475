//! How many calls of a shard a member answers at a time, and whose turn it is where more want to.
//!
//! Owns: the places and the line before them. Must not know: what a call is beyond how urgent it is; streams, which never
//! stand in this line. A call has its place until its answer has begun to come: for how long the rest of a large one takes its client
//! says, and who does not read keeps nobody waiting. Invariants: never more calls than places; while somebody waits no place is
//! free; a place that becomes free goes to the most urgent, of those to the first; who leaves the line leaves nothing behind, and a place that was given
//! to somebody who has left goes to the next.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

use tokio::sync::oneshot;

use crate::identity::MemberId;
use crate::rpc::method::{Class, Effect, Lane, Method};
use crate::upstream::conduct::Conduct;
use crate::upstream::membership::Member;

/// So many times as many as there are places may wait: what a member in good health has answered within seconds.
const LINE: usize = 4;

/// How urgent a call is; the first is the most urgent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Urgency {
    /// It keeps somebody's lease.
    Lease,
    /// It changes something.
    Write,
    /// It reads.
    Read,
    /// It reads much.
    Bulk,
}

const URGENCIES: usize = 4;

impl Urgency {
    /// That of a call with this row, effect and lane.
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

/// Everybody who may wait does, and none of them is less urgent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

/// Places, and who waits for one; pure.
#[derive(Debug)]
struct Line<T> {
    places: usize,
    taken: usize,
    waiting: [VecDeque<(u64, T)>; URGENCIES],
    tickets: u64,
}

impl<T> Line<T> {
    fn new(places: usize) -> Self {
        let waiting = std::array::from_fn(|_| VecDeque::new());
        Self { places, taken: 0, waiting, tickets: 0 }
    }

    /// Takes a place where one is free.
    fn enter(&mut self) -> bool {
        let free = self.taken < self.places;
        self.taken += usize::from(free);
        free
    }

    /// Stands in line; who is pushed out for that comes back.
    fn wait(&mut self, urgency: Urgency, who: T) -> Result<(u64, Option<T>), Full> {
        let mut pushed = None;
        if self.waiting.iter().map(VecDeque::len).sum::<usize>() >= self.places.saturating_mul(LINE) {
            let less = self.waiting.iter_mut().skip(urgency as usize + 1).rev().find(|line| !line.is_empty());
            pushed = Some(less.and_then(VecDeque::pop_back).ok_or(Full)?.1);
        }
        self.tickets += 1;
        self.waiting[urgency as usize].push_back((self.tickets, who));
        Ok((self.tickets, pushed))
    }

    /// Gives a place back. Who comes back has it now.
    fn leave(&mut self) -> Option<T> {
        let next = self.waiting.iter_mut().find_map(VecDeque::pop_front);
        if next.is_none() {
            self.taken -= 1;
        }
        next.map(|(_, who)| who)
    }

    /// Leaves the line.
    fn quit(&mut self, ticket: u64) {
        self.waiting.iter_mut().for_each(|line| line.retain(|(waits, _)| *waits != ticket));
    }
}

/// The members' places on one shard.
#[derive(Debug)]
pub struct Turns {
    places: usize,
    members: RefCell<Vec<(MemberId, Rc<Turn>)>>,
}

/// One member's.
#[derive(Debug)]
pub struct Turn {
    line: RefCell<Line<oneshot::Sender<()>>>,
    conduct: Arc<Conduct>,
}

/// A call's place, for as long as this lives.
#[derive(Debug)]
pub struct Place(Rc<Turn>);

impl Turns {
    /// With so many places at each member.
    #[must_use]
    pub fn new(places: usize) -> Self {
        Self { places: places.max(1), members: RefCell::default() }
    }

    /// Those at `member`.
    #[must_use]
    pub fn at(&self, member: &Member) -> Rc<Turn> {
        let mut members = self.members.borrow_mut();
        if let Some((_, turn)) = members.iter().find(|(id, _)| *id == member.id) {
            return Rc::clone(turn);
        }
        // Where no call is: members come and go.
        members.retain(|(_, turn)| Rc::strong_count(turn) > 1);
        let line = RefCell::new(Line::new(self.places));
        let turn = Rc::new(Turn { line, conduct: Arc::clone(&member.conduct) });
        members.push((member.id, Rc::clone(&turn)));
        turn
    }
}

impl Turn {
    /// Whether a place is free now.
    #[must_use]
    pub fn has_room(&self) -> bool {
        let line = self.line.borrow();
        line.taken < line.places
    }

    /// A place, where one is free.
    #[must_use]
    pub fn enter(self: &Rc<Self>) -> Option<Place> {
        self.line.borrow_mut().enter().then(|| Place(Rc::clone(self)))
    }

    /// Waits for a place in the line. Dropped, it waits no more.
    ///
    /// # Errors
    /// The line is full, or became so of calls that are more urgent.
    pub async fn wait(self: Rc<Self>, urgency: Urgency) -> Result<Place, Full> {
        let (tell, told) = oneshot::channel();
        let entered = self.line.borrow_mut().wait(urgency, tell);
        let (ticket, pushed) = entered.inspect_err(|_| self.refused())?;
        drop(pushed);
        let _counted = self.conduct.queue.begin();
        let mut waits = Waits { turn: Rc::clone(&self), ticket, told };
        match (&mut waits.told).await {
            Ok(()) => Ok(Place(Rc::clone(&self))),
            Err(_) => {
                self.refused();
                Err(Full)
            }
        }
    }

    /// A call is refused since it had no turn.
    pub fn refused(&self) {
        self.conduct.count_refused();
    }

    fn leave(&self) {
        loop {
            let next = self.line.borrow_mut().leave();
            // Who is not there any more gives it back.
            if next.is_none_or(|next| next.send(()).is_ok()) {
                return;
            }
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.leave();
    }
}

/// Stands in line until told.
struct Waits {
    turn: Rc<Turn>,
    ticket: u64,
    told: oneshot::Receiver<()>,
}

impl Drop for Waits {
    fn drop(&mut self) {
        match self.told.try_recv() {
            // It has a place that it knows nothing of yet.
            Ok(()) => self.turn.leave(),
            Err(oneshot::error::TryRecvError::Empty) => self.turn.line.borrow_mut().quit(self.ticket),
            // Pushed out, or it was told and took its place.
            Err(oneshot::error::TryRecvError::Closed) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use futures_util::FutureExt as _;

    use super::*;
    use crate::rpc::method::lookup;
    use crate::upstream::membership::Readiness;
    use crate::upstream::membership::tests::member;

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
        let mut line = Line::new(1);
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
        let mut line = Line::new(1);
        assert!(line.enter());
        (0..LINE).for_each(|who| assert!(line.wait(Urgency::Bulk, who).is_ok()));
        assert_eq!(line.wait(Urgency::Bulk, 10).unwrap_err(), Full);
        assert_eq!(line.wait(Urgency::Read, 11).unwrap().1, Some(LINE - 1), "the last of the least urgent");
        (1..LINE).for_each(|who| assert!(line.wait(Urgency::Write, who).unwrap().1.is_some()));
        assert_eq!(line.wait(Urgency::Read, 12).unwrap_err(), Full);
        assert_eq!(line.wait(Urgency::Lease, 13).unwrap().1, Some(11));
    }

    /// Whatever the order in which calls come, get places, leave and give up: what the invariants say, in every state that
    /// can be reached, and nobody waits for ever.
    #[test]
    fn no_place_and_no_turn_is_ever_lost() {
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        enum Call {
            Out,
            Waits(usize),
            Has,
        }
        // A state is who has a place and who waits, in which order.
        type State = (Vec<Call>, Vec<usize>);
        const CALLS: usize = 5;
        let rebuilt = |(calls, order): &State| {
            let mut line = Line::new(2);
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
        let (turns, member) = (Turns::new(1), member(1, Readiness::Ready));
        let turn = turns.at(&member);
        let place = turn.enter().expect("free");
        assert!(turn.enter().is_none());
        let mut waits: Vec<_> = (0..3).map(|_| Box::pin(Rc::clone(&turn).wait(Urgency::Read))).collect();
        waits.iter_mut().for_each(|waits| assert!(waits.now_or_never().is_none()));
        assert_eq!(member.conduct.queue.waiting(), 3);
        drop(waits.remove(0));
        assert_eq!(member.conduct.queue.waiting(), 2);
        drop(place);
        // It was given the place, and goes without having looked.
        drop(waits.remove(0));
        let place = (&mut waits[0]).now_or_never().expect("its turn").expect("a place");
        assert!(turn.enter().is_none());
        drop(place);
        assert!(turn.enter().is_some());
        assert_eq!((member.conduct.queue.waiting(), member.conduct.queue.ended()), (0, 3));
    }

    #[test]
    fn who_is_pushed_out_is_told_and_counted() {
        let (turns, member) = (Turns::new(1), member(1, Readiness::Ready));
        let turn = turns.at(&member);
        let _place = turn.enter().expect("free");
        let mut large: Vec<_> = (0..=LINE).map(|_| Box::pin(Rc::clone(&turn).wait(Urgency::Bulk))).collect();
        let refused = large.pop().map(|mut last| {
            large.iter_mut().for_each(|waits| assert!(waits.now_or_never().is_none()));
            (&mut last).now_or_never().expect("at once").err()
        });
        assert_eq!(refused, Some(Some(Full)));
        let mut write = Box::pin(Rc::clone(&turn).wait(Urgency::Write));
        assert!((&mut write).now_or_never().is_none());
        let ended: Vec<_> =
            large.iter_mut().map(|waits| waits.now_or_never().map(|ended| ended.err())).collect();
        assert_eq!(ended, [None, None, None, Some(Some(Full))]);
        assert_eq!(member.conduct.refused(), 2);
    }
}
