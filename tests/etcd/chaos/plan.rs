//! Which watches there are: of all kinds, at random, dealt to those who can open them.
//!
//! Owns: the mix. Must not know how a watch is opened. Invariant: every range has keys that are written, so that every watch that is
//! not filtered out has something to show.

use super::families::{Can, User};
use super::record::{Filter, Range, Watch};
use super::seeded::Rng;
use super::writers::{LARGE, PREFIXES, REVOCABLE, STEADY, keys};

/// Around the present, in revisions.
const FUTURE: usize = 200;
/// Of the first write in an empty etcd.
const FIRST: i64 = 2;
/// Kinds of ranges.
const KINDS: usize = 10;

/// Makes watches around a revision that is current now.
pub(crate) struct Plan {
    rng: Rng,
    /// A revision that is current.
    pub(crate) now: i64,
    made: usize,
    letter: char,
}

impl Plan {
    /// Its watches are named by `letter` and a number.
    pub(crate) fn new(rng: Rng, now: i64, letter: char) -> Plan {
        Plan { rng, now, made: 0, letter }
    }

    /// Watches of one stream. The right to the first one is never missing: clientv3 hangs for ever where its stream's last
    /// watch is refused while another is asked for (3.5.11, also directly).
    pub(crate) fn stream(&mut self, user: User, can: Can, count: usize) -> Vec<Watch> {
        let mut watches: Vec<Watch> = (0..count).map(|_| self.watch(user, can, FIRST)).collect();
        if let (User::Revocable, Some(first)) = (user, watches.first_mut()) {
            first.range = Range::prefix(STEADY);
        }
        watches
    }

    /// A watch that stays for a moment only; at times one that asks for what was compacted.
    pub(crate) fn guest(&mut self, user: User, can: Can, compacted: i64) -> Watch {
        let gone = compacted > FIRST && self.rng.percent(5);
        let watch = self.watch(user, can, compacted.max(FIRST));
        if gone { Watch { start: FIRST, ..watch } } else { watch }
    }

    /// How many it has made.
    pub(crate) fn made(&self) -> usize {
        self.made
    }

    /// `oldest` is the first revision that may be asked for.
    fn watch(&mut self, user: User, can: Can, oldest: i64) -> Watch {
        self.made += 1;
        let rng = &mut self.rng;
        let range = match user {
            User::Alice => range(rng, self.made, can),
            User::Tail => Range::tail(PREFIXES[rng.below(PREFIXES.len())]),
            User::Revocable if rng.percent(50) => Range::prefix(REVOCABLE),
            User::Revocable => Range::one(rng.one_of(&keys(REVOCABLE)).as_str()),
        };
        let start = match rng.below(10) {
            0..5 => 0,
            5..8 => oldest + between(rng, self.now - oldest),
            _ => self.now + 1 + between(rng, FUTURE as i64),
        };
        let filter = match rng.below(6) {
            0 if can.filters => Some(Filter::NoPut),
            1 if can.filters => Some(Filter::NoDelete),
            _ => None,
        };
        Watch {
            name: format!("{}{}", self.letter, self.made),
            range,
            start,
            prev_kv: rng.percent(50),
            progress_notify: rng.percent(40),
            fragment: can.fragment && rng.percent(40),
            filter,
        }
    }
}

/// In turn, so that every kind is there.
fn range(rng: &mut Rng, turn: usize, can: Can) -> Range {
    let prefix = *rng.one_of(&PREFIXES);
    match turn % KINDS {
        0..3 => Range::one(rng.one_of(&keys(prefix)).as_str()),
        3..7 => Range::prefix(prefix),
        7 => Range { key: PREFIXES[2].into(), end: PREFIXES[5].into() },
        8 => Range::prefix("/a/"),
        _ if can.joins => Range::prefix(LARGE),
        _ => Range::prefix(prefix),
    }
}

fn between(rng: &mut Rng, width: i64) -> i64 {
    let width = usize::try_from(width.max(1)).expect("small");
    i64::try_from(rng.below(width)).expect("small")
}
