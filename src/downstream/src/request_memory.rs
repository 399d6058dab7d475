//! Memory accounting for the requests of a shard's clients: header lists, incomplete or replayable messages,
//! streams.
//!
//! Owns: the size charged for a request, the [`ByteAccount`]s of a shard, and the refusal at a limit. Must
//! not know: the client's identity, the text of a refusal.
//! Invariants: bytes are charged until their [`RequestMemoryCharge`] is dropped. Each connection has a
//! reserve of `RESERVE` bytes, independent of all other connections. Bytes beyond the reserve are charged
//! to a shared account; a connection may hold at most a third of the bytes still free in the account after
//! the charge. Unauthenticated clients share a separate account and take no memory from authenticated
//! clients.

use std::cell::Cell;
use std::rc::Rc;

use http::HeaderMap;
use prometheus_client::metrics::counter::Counter;

use keyward_base::byte_account::{ByteAccount, ByteShare, HeldBytes};
use keyward_config::memory_budgets::UNAUTHENTICATED_PART;
use keyward_telemetry::request_memory_metrics::RequestMemoryMetrics;

/// Bytes charged for a request beside header list and message: HTTP/2's stream state, the task and the access
/// record.
pub const REQUEST: usize = 2 * 1024;
/// Bytes charged for a header field beside name and value: the bucket and the slot in the map's index, and
/// spare room for both.
const FIELD: usize = 128;
/// Reserve of a connection: enough for some ordinary calls. Charged to no account.
const RESERVE: usize = 16 * 1024;
/// Divisor: a connection may hold at most a third of the account's free bytes.
const OF_WHAT_IS_FREE: usize = 3;

/// The account charged for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Requester {
    /// The client is authenticated, or need not be.
    Known,
    /// The request needs no authentication, such as a login, or the client has proved no identity although
    /// etcd requires a proof.
    Anybody,
}

/// The accounts of one shard.
pub struct RequestMemory {
    all: Rc<MemoryAccount>,
    unauthenticated: Rc<MemoryAccount>,
    waiting: Rc<MemoryAccount>,
}

/// The bytes charged to one connection, by account.
#[derive(Default)]
pub struct ConnectionRequests {
    all: Rc<Cell<usize>>,
    anybodys: Rc<Cell<usize>>,
    waiting: Rc<Cell<usize>>,
}

/// The present limits of a shard.
#[derive(Clone, Copy, Debug)]
pub struct RequestLimits {
    /// Limit on the bytes of all requests. At least one request of the largest size.
    pub all: usize,
    /// Size of the largest request: a connection may hold one request of this size even where the account has
    /// no room for several.
    pub largest: usize,
}

struct MemoryAccount {
    bytes: Rc<ByteAccount>,
    refused: Counter,
}

/// Bytes charged for one request, until dropped.
pub struct RequestMemoryCharge {
    account: Rc<MemoryAccount>,
    /// The account's limit at the time of the request.
    limit: usize,
    /// Bytes allowed to the connection in an account with enough room, whatever stays free.
    least: usize,
    held: HeldBytes,
}

/// Bytes charged for a header list.
#[must_use]
pub fn header_bytes(headers: &HeaderMap) -> usize {
    let field = |(name, value): (&http::HeaderName, &http::HeaderValue)| {
        name.as_str().len() + value.as_bytes().len() + FIELD
    };
    headers.iter().map(field).sum()
}

impl RequestMemory {
    /// Accounts with no bytes charged.
    #[must_use]
    pub fn new(figures: &RequestMemoryMetrics) -> Self {
        let account = |share| {
            let bytes = ByteAccount::new(RESERVE, figures.bytes.clone());
            Rc::new(MemoryAccount { bytes, refused: figures.refused(share) })
        };
        Self { all: account("all"), unauthenticated: account("anybody"), waiting: account("waiting") }
    }

    /// An empty charge for a request of `requester` on `connection`.
    #[must_use]
    pub fn hold(
        &self,
        connection: &ConnectionRequests,
        requester: Requester,
        limits: RequestLimits,
    ) -> RequestMemoryCharge {
        match requester {
            // If the account has no room for several of the largest requests, one connection may use the
            // whole account.
            Requester::Known => {
                let least = if limits.all < 4 * limits.largest { limits.largest + RESERVE } else { 0 };
                RequestMemoryCharge::empty(&self.all, limits.all, &connection.all, least)
            }
            Requester::Anybody => {
                let limit = limits.all / UNAUTHENTICATED_PART;
                RequestMemoryCharge::empty(&self.unauthenticated, limit, &connection.anybodys, 0)
            }
        }
    }

    /// An empty charge for a request waiting at a member without a time limit. Waiting requests have an
    /// account of their own.
    #[must_use]
    pub fn hold_waiting(
        &self,
        connection: &ConnectionRequests,
        limits: RequestLimits,
    ) -> RequestMemoryCharge {
        RequestMemoryCharge::empty(&self.waiting, limits.all, &connection.waiting, limits.largest)
    }
}

impl RequestMemoryCharge {
    fn empty(account: &Rc<MemoryAccount>, limit: usize, own: &Rc<Cell<usize>>, least: usize) -> Self {
        let held = ByteShare::new(&account.bytes, own).hold(0);
        Self { account: Rc::clone(account), limit, least, held }
    }

    /// An empty charge to the same accounts.
    #[must_use]
    pub fn sibling(&self) -> Self {
        Self { account: Rc::clone(&self.account), held: self.held.share.hold(0), ..*self }
    }

    /// Charges `bytes` more. False if there is no room; the refusal is counted.
    #[must_use]
    pub fn charge(&mut self, bytes: usize) -> bool {
        let (used, own) = (self.account.bytes.used(), self.held.share.own() + bytes);
        let used_then = self.held.share.used_with(own);
        let within = |free: usize| own <= (free / OF_WHAT_IS_FREE).max(self.least);
        let has_room = used_then == used || self.limit.checked_sub(used_then).is_some_and(within);
        if !has_room {
            self.account.refused.inc();
            return false;
        }
        self.held.resize(self.bytes() + bytes);
        true
    }

    /// Reduces the charge to at most `bytes`.
    pub fn shrink(&mut self, bytes: usize) {
        self.held.resize(bytes.min(self.bytes()));
    }

    /// The number of bytes charged.
    fn bytes(&self) -> usize {
        self.held.bytes()
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::registry::Registry;

    use super::*;

    const MIB: usize = 1024 * 1024;
    const LIMITS: RequestLimits = RequestLimits { all: 64 * MIB, largest: MIB };
    const PIECE: usize = 1_000;

    fn figures() -> RequestMemoryMetrics {
        RequestMemoryMetrics::registered(&mut Registry::default())
    }

    fn memory() -> RequestMemory {
        RequestMemory::new(&figures())
    }

    fn connections(count: usize) -> Vec<ConnectionRequests> {
        (0..count).map(|_| ConnectionRequests::default()).collect()
    }

    /// Charges pieces until there is no room.
    fn fill(
        memory: &RequestMemory,
        connection: &ConnectionRequests,
        requester: Requester,
    ) -> RequestMemoryCharge {
        let mut held = memory.hold(connection, requester, LIMITS);
        while held.charge(PIECE) {}
        held
    }

    #[test]
    fn whoever_takes_all_that_there_is_leaves_room_for_whoever_comes_next() {
        let figures = figures();
        let memory = RequestMemory::new(&figures);
        let connections = connections(200);
        let all: Vec<RequestMemoryCharge> =
            connections.iter().map(|one| fill(&memory, one, Requester::Known)).collect();
        let about = |bytes: usize, of: usize| (of - 2 * PIECE..=of + RESERVE + PIECE).contains(&bytes);
        assert!(about(all[0].bytes(), LIMITS.all / 4), "{}", all[0].bytes());
        assert!(about(all[1].bytes(), LIMITS.all * 3 / 16), "{}", all[1].bytes());
        assert!(all.iter().all(|held| held.bytes() > RESERVE - PIECE), "the last has its reserve, too");
        let sum = all.iter().map(RequestMemoryCharge::bytes).sum::<usize>();
        assert!(memory.all.bytes.used() <= LIMITS.all && sum <= LIMITS.all + 200 * RESERVE);
        assert_eq!(figures.bytes.get(), i64::try_from(sum).unwrap());
        assert_eq!(memory.all.refused.get(), 200);
        drop(all);
        assert_eq!((memory.all.bytes.used(), figures.bytes.get()), (0, 0));
        assert!(connections.iter().all(|connection| connection.all.get() == 0), "all was given back");
    }

    #[test]
    fn those_who_have_not_said_who_they_are_take_nothing_from_the_others() {
        let memory = memory();
        let strangers = connections(100);
        let held: Vec<_> = strangers.iter().map(|one| fill(&memory, one, Requester::Anybody)).collect();
        let part = LIMITS.all / UNAUTHENTICATED_PART;
        assert!((part * 9 / 10..=part).contains(&memory.unauthenticated.bytes.used()));
        let known = fill(&memory, &ConnectionRequests::default(), Requester::Known);
        assert!(known.bytes() >= LIMITS.all / 4, "{} bytes are left to whoever is known", known.bytes());
        drop(held);
        assert_eq!(memory.unauthenticated.bytes.used(), 0);
    }

    #[test]
    fn a_small_whole_has_room_for_a_request_of_the_largest_size() {
        let memory = memory();
        let limits = RequestLimits { all: 3 * MIB / 2, largest: MIB };
        let connections = connections(2);
        let mut one = memory.hold(&connections[0], Requester::Known, limits);
        assert!(one.charge(MIB + RESERVE) && !one.charge(1));
        let mut other = memory.hold(&connections[1], Requester::Known, limits);
        assert!(!other.charge(MIB / 2 + RESERVE + 1) && other.charge(MIB / 2));
        one.shrink(MIB / 4);
        assert!(other.charge(MIB / 4));
        assert_eq!(memory.all.bytes.used(), MIB - 2 * RESERVE);
        let mut beside = other.sibling();
        assert!(!beside.charge(MIB / 4 + RESERVE + 1), "of the same connection");
        assert!(beside.charge(MIB / 4));
    }
}
