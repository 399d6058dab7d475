//! How much memory the requests of a shard's clients may hold: header lists, messages that are not whole or may be sent again, streams.
//!
//! Owns: what a request counts, the accounts of a shard and of a connection, and when there is no room. Must not know: who a client is, what
//! a refused client is told.
//! Invariants: bytes count until their [`Held`] is dropped; each connection has [`RESERVE`], whatever all others hold; what it holds beyond
//! that comes from an account that all share, of which it has at most a third of what it leaves free; those who have not said who they are
//! share an account of their own, and take nothing from the others.

use std::cell::Cell;
use std::rc::Rc;

use http::HeaderMap;
use prometheus_client::metrics::counter::Counter;

use crate::telemetry::request_memory::RequestMemoryFigures;

/// What a request counts beside its header list and its message: HTTP/2's state of its stream, its task and its record.
pub const REQUEST: usize = 2 * 1024;
/// What a header field counts beside its name and its value: its bucket and its place in the map's index, and the spare room of both.
pub const FIELD: usize = 128;
/// What a connection may hold whatever others hold: some ordinary calls. It counts in no account.
pub const RESERVE: usize = 16 * 1024;
/// A connection holds at most this part of what it leaves free of an account.
const OF_WHAT_IS_FREE: usize = 3;
/// What clients may hold together who have not said who they are, as a part of what the others may.
const ANYBODYS_PART: usize = 4;

/// On whose account a request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Requester {
    /// The client has said who it is, or need not.
    Known,
    /// The request is answered whoever makes it, as a login is, or its client has proved nothing where etcd asks for a proof.
    Anybody,
}

/// The accounts of one shard.
pub struct RequestMemory {
    all: Rc<Account>,
    anybodys: Rc<Account>,
    waiting: Rc<Account>,
    figures: RequestMemoryFigures,
}

/// The accounts of one connection.
#[derive(Default)]
pub struct ConnectionRequests {
    all: Rc<Cell<usize>>,
    anybodys: Rc<Cell<usize>>,
    waiting: Rc<Cell<usize>>,
}

/// What a shard may hold now.
#[derive(Clone, Copy, Debug)]
pub struct RequestLimits {
    /// Bytes of all requests. At least one of the largest size.
    pub all: usize,
    /// The largest request: what a connection may hold of a whole that has no room for several.
    pub largest: usize,
}

struct Account {
    /// Of all connections, what each holds beyond its reserve.
    used: Cell<usize>,
    refused: Counter,
}

/// An account, and its limit as it was when something was to be held.
#[derive(Clone)]
struct Share {
    account: Rc<Account>,
    limit: usize,
}

/// Bytes of one request that are held, until dropped.
pub struct Held {
    share: Share,
    connection: Rc<Cell<usize>>,
    /// So much a connection may hold of an account that has room for it, whatever it leaves free.
    least: usize,
    bytes: usize,
    figures: RequestMemoryFigures,
}

/// What a header list counts.
#[must_use]
pub fn header_bytes(headers: &HeaderMap) -> usize {
    let field = |(name, value): (&http::HeaderName, &http::HeaderValue)| {
        name.as_str().len() + value.as_bytes().len() + FIELD
    };
    headers.iter().map(field).sum()
}

impl RequestMemory {
    /// Nothing is held.
    #[must_use]
    pub fn new(figures: RequestMemoryFigures) -> Self {
        let account = |share| Rc::new(Account { used: Cell::default(), refused: figures.refused(share) });
        Self { all: account("all"), anybodys: account("anybody"), waiting: account("waiting"), figures }
    }

    /// Nothing yet of what `requester` may hold on `connection`.
    #[must_use]
    pub fn hold(&self, connection: &ConnectionRequests, requester: Requester, limits: RequestLimits) -> Held {
        let share = |account: &Rc<Account>, limit| Share { account: Rc::clone(account), limit };
        match requester {
            // An account that has no room for several of the largest requests may be one connection's.
            Requester::Known => {
                let least = if limits.all < 4 * limits.largest { limits.largest + RESERVE } else { 0 };
                self.held(share(&self.all, limits.all), &connection.all, least)
            }
            Requester::Anybody => {
                self.held(share(&self.anybodys, limits.all / ANYBODYS_PART), &connection.anybodys, 0)
            }
        }
    }

    /// Nothing yet of the requests that wait at a member without limit, which have room of their own.
    #[must_use]
    pub fn hold_waiting(&self, connection: &ConnectionRequests, limits: RequestLimits) -> Held {
        let share = Share { account: Rc::clone(&self.waiting), limit: limits.all };
        self.held(share, &connection.waiting, limits.largest)
    }

    fn held(&self, share: Share, connection: &Rc<Cell<usize>>, least: usize) -> Held {
        let (connection, figures) = (Rc::clone(connection), self.figures.clone());
        Held { share, connection, least, bytes: 0, figures }
    }
}

fn beyond_reserve(own: usize) -> usize {
    own.saturating_sub(RESERVE)
}

impl Share {
    fn left(&self) -> usize {
        self.limit.saturating_sub(self.account.used.get())
    }
}

impl Held {
    /// Nothing yet of the same accounts.
    #[must_use]
    pub fn beside(&self) -> Self {
        Self {
            share: self.share.clone(),
            connection: Rc::clone(&self.connection),
            bytes: 0,
            figures: self.figures.clone(),
            ..*self
        }
    }

    /// Holds `bytes` more. False where there is no room for them, which is counted.
    #[must_use]
    pub fn more(&mut self, bytes: usize) -> bool {
        let (before, own) = (self.connection.get(), self.connection.get() + bytes);
        let needed = beyond_reserve(own) - beyond_reserve(before);
        let has_room = match self.share.left().checked_sub(needed) {
            Some(free) => needed == 0 || own <= (free / OF_WHAT_IS_FREE).max(self.least),
            None => false,
        };
        if !has_room {
            self.share.account.refused.inc();
            return false;
        }
        self.resize(self.bytes + bytes);
        true
    }

    /// Holds `bytes` of what it held.
    pub fn shrink(&mut self, bytes: usize) {
        self.resize(bytes.min(self.bytes));
    }

    /// How many bytes are held.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    fn resize(&mut self, bytes: usize) {
        let before = self.connection.get();
        let own = (before + bytes).saturating_sub(self.bytes);
        self.connection.set(own);
        let used = &self.share.account.used;
        used.set((used.get() + beyond_reserve(own)).saturating_sub(beyond_reserve(before)));
        self.figures.held(self.bytes, bytes);
        self.bytes = bytes;
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.resize(0);
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::registry::Registry;

    use super::*;

    const MIB: usize = 1024 * 1024;
    const LIMITS: RequestLimits = RequestLimits { all: 64 * MIB, largest: MIB };
    const PIECE: usize = 1_000;

    fn memory() -> RequestMemory {
        RequestMemory::new(RequestMemoryFigures::registered(&mut Registry::default()))
    }

    fn connections(count: usize) -> Vec<ConnectionRequests> {
        (0..count).map(|_| ConnectionRequests::default()).collect()
    }

    /// Takes pieces until there is no room.
    fn fill(memory: &RequestMemory, connection: &ConnectionRequests, requester: Requester) -> Held {
        let mut held = memory.hold(connection, requester, LIMITS);
        while held.more(PIECE) {}
        held
    }

    #[test]
    fn whoever_takes_all_that_there_is_leaves_room_for_whoever_comes_next() {
        let memory = memory();
        let connections = connections(200);
        let all: Vec<Held> = connections.iter().map(|one| fill(&memory, one, Requester::Known)).collect();
        let about = |bytes: usize, of: usize| (of - 2 * PIECE..=of + RESERVE + PIECE).contains(&bytes);
        assert!(about(all[0].bytes(), LIMITS.all / 4), "{}", all[0].bytes());
        assert!(about(all[1].bytes(), LIMITS.all * 3 / 16), "{}", all[1].bytes());
        assert!(all.iter().all(|held| held.bytes() > RESERVE - PIECE), "the last has its reserve, too");
        let sum = all.iter().map(Held::bytes).sum::<usize>();
        assert!(memory.all.used.get() <= LIMITS.all && sum <= LIMITS.all + 200 * RESERVE);
        assert_eq!(memory.figures.bytes.get(), i64::try_from(sum).unwrap());
        assert_eq!(memory.all.refused.get(), 200);
        drop(all);
        assert_eq!((memory.all.used.get(), memory.figures.bytes.get()), (0, 0));
        assert!(connections.iter().all(|connection| connection.all.get() == 0), "all was given back");
    }

    #[test]
    fn those_who_have_not_said_who_they_are_take_nothing_from_the_others() {
        let memory = memory();
        let strangers = connections(100);
        let held: Vec<_> = strangers.iter().map(|one| fill(&memory, one, Requester::Anybody)).collect();
        let part = LIMITS.all / ANYBODYS_PART;
        assert!((part * 9 / 10..=part).contains(&memory.anybodys.used.get()));
        let known = fill(&memory, &ConnectionRequests::default(), Requester::Known);
        assert!(known.bytes() >= LIMITS.all / 4, "{} bytes are left to whoever is known", known.bytes());
        drop(held);
        assert_eq!(memory.anybodys.used.get(), 0);
    }

    #[test]
    fn a_small_whole_has_room_for_a_request_of_the_largest_size() {
        let memory = memory();
        let limits = RequestLimits { all: 3 * MIB / 2, largest: MIB };
        let connections = connections(2);
        let mut one = memory.hold(&connections[0], Requester::Known, limits);
        assert!(one.more(MIB + RESERVE) && !one.more(1));
        let mut other = memory.hold(&connections[1], Requester::Known, limits);
        assert!(!other.more(MIB / 2 + RESERVE + 1) && other.more(MIB / 2));
        one.shrink(MIB / 4);
        assert!(other.more(MIB / 4));
        assert_eq!(memory.all.used.get(), MIB - 2 * RESERVE);
        let mut beside = other.beside();
        assert!(!beside.more(MIB / 4 + RESERVE + 1), "of the same connection");
        assert!(beside.more(MIB / 4));
    }
}
