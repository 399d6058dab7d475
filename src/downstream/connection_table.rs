//! The open client connections of all listeners and shards.
//!
//! Owns: how many there are, in all and of each client address; which one makes room when a limit is reached, and which newcomer is refused.
//! Must not know: sockets, HTTP, shards.
//! Invariants: a connection counts until its [`ConnectionPlace`] is dropped or it is asked to make room; those that make room at the same time
//! are at most an eighth of the limit at which they do (or 64), so the number of sockets is bounded, and newcomers of an address that is at its limit
//! use up nothing that those of others need; only a connection without an open stream, or one on which no call was ever let in, makes room;
//! at the limit of an address a connection of that address makes room, and nobody else's; the lock is held for a look at the table at most.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::config::Config;
use crate::downstream::connection_activity::{ConnectionActivity, Rank};
use crate::published::Published;
use crate::telemetry::connections::{ConnectionFigures, ConnectionLimit};
use crate::telemetry::seldom::Seldom;

/// Of the connections that are looked at, this part is remembered as the next that make room. Looking at all takes about a millisecond.
const REMEMBERED: usize = 64;
/// For how long they are remembered; and how long nobody looks again where none was found.
const REMEMBERED_FOR: Duration = Duration::from_millis(100);
/// Connections that make room at the same time, as a part of the limit: one that never called takes 50 ms, another up to a second.
const MAKING_ROOM: usize = 8;
/// At least so many.
const MAKING_ROOM_LEAST: usize = 64;

/// Who counts as one client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ClientAddress {
    /// An IP address. Of IPv6 all that begin with the same 64 bits are one.
    Ip(IpAddr),
    /// A user of this machine, over a unix socket.
    UnixUser(u32),
}

/// The open client connections.
pub struct ConnectionTable {
    config: Arc<Published<Config>>,
    figures: ConnectionFigures,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    connections: HashMap<u64, Entry>,
    addresses: HashMap<ClientAddress, AddressEntry>,
    next: u64,
    /// Connections that do not make room.
    staying: usize,
    /// Those that make room since all together are at their limit.
    making_room_of_all: usize,
    candidates: Candidates,
    reached: Reached,
}

struct Entry {
    address: Option<ClientAddress>,
    activity: Arc<ConnectionActivity>,
    makes_room: Option<ConnectionLimit>,
}

/// The connections of one address.
#[derive(Default)]
struct AddressEntry {
    /// Those that do not make room.
    staying: usize,
    /// Those that make room since this address is at its limit.
    making_room: usize,
    /// All.
    listed: usize,
    candidates: Candidates,
}

/// Connections that make room next, as found at one look at the table.
#[derive(Default)]
struct Candidates {
    next: VecDeque<(u64, Rank)>,
    /// Nobody could make room.
    found_none: bool,
    until: Option<Instant>,
}

/// When a limit was reached last, and what the log was not told yet.
#[derive(Default)]
struct Reached {
    connections: Option<Instant>,
    address: Option<(Instant, ClientAddress)>,
    made_room: u64,
    refused: u64,
    log: Seldom,
}

/// No place for a newcomer: everybody who has one uses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{} is reached, and every connection is in use", .0.key())]
pub struct Full(pub ConnectionLimit);

/// The place of one connection in the table, until dropped.
pub struct ConnectionPlace {
    activity: Arc<ConnectionActivity>,
    listed: Option<(Arc<ConnectionTable>, u64)>,
}

/// How full the table is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Occupancy {
    /// Open connections, without those that make room.
    pub open: usize,
    /// Who has most of them, and how many.
    pub most: Option<(ClientAddress, usize)>,
    /// How long ago `limits.connections` was reached.
    pub full: Option<Duration>,
    /// How long ago an address was at `limits.connections_per_address`, and which.
    pub address_full: Option<(Duration, ClientAddress)>,
}

impl ClientAddress {
    /// Whom an IP address stands for.
    #[must_use]
    pub fn of(address: IpAddr) -> Self {
        Self::Ip(match address.to_canonical() {
            IpAddr::V6(address) => IpAddr::V6((address.to_bits() >> 64 << 64).into()),
            v4 @ IpAddr::V4(_) => v4,
        })
    }
}

impl fmt::Display for ClientAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ip(address @ IpAddr::V4(_)) => address.fmt(f),
            Self::Ip(network @ IpAddr::V6(_)) => write!(f, "{network}/64"),
            Self::UnixUser(user) => write!(f, "unix user {user}"),
        }
    }
}

impl ConnectionTable {
    /// An empty one, with the limits that `config` has at each moment.
    #[must_use]
    pub fn new(config: Arc<Published<Config>>, figures: ConnectionFigures) -> Arc<Self> {
        Arc::new(Self { config, figures, state: Mutex::default() })
    }

    /// A place for a newcomer. `address` is none where only a balancer's header will tell it ([`ConnectionPlace::set_address`]).
    ///
    /// # Errors
    /// A limit is reached, and no connection can make room.
    pub fn admit(self: &Arc<Self>, address: Option<ClientAddress>) -> Result<ConnectionPlace, Full> {
        let now = Instant::now();
        let mut state = self.lock();
        if let Some(address) = address {
            self.room_of_address(&mut state, address, now)?;
        }
        let limit = self.config.load().limits.connections;
        if state.staying >= limit {
            let made = state.make_room(None, limit, now);
            self.note(&mut state, ConnectionLimit::Connections, address, made, now)?;
        }
        let number = state.next;
        state.next += 1;
        let activity = Arc::new(ConnectionActivity::default());
        let entry = Entry { address: None, activity: Arc::clone(&activity), makes_room: None };
        state.connections.insert(number, entry);
        state.staying += 1;
        if let Some(address) = address {
            state.set_address(number, address);
        }
        drop(state);
        Ok(ConnectionPlace { activity, listed: Some((Arc::clone(self), number)) })
    }

    /// How full it is.
    #[must_use]
    pub fn occupancy(&self) -> Occupancy {
        let now = Instant::now();
        let state = self.lock();
        let most = state.addresses.iter().max_by_key(|(_, entry)| entry.listed);
        Occupancy {
            open: state.staying,
            most: most.map(|(address, entry)| (*address, entry.listed)),
            full: state.reached.connections.map(|at| now.saturating_duration_since(at)),
            address_full: state
                .reached
                .address
                .map(|(at, address)| (now.saturating_duration_since(at), address)),
        }
    }

    /// Has one of the address make room where that is at its limit.
    fn room_of_address(&self, state: &mut State, address: ClientAddress, now: Instant) -> Result<(), Full> {
        let limits = self.config.load().limits;
        let limit = limits.client_connections.per_address;
        if state.addresses.get(&address).map_or(0, |entry| entry.staying) < limit {
            return Ok(());
        }
        let made = state.make_room(Some(address), limit, now);
        self.note(state, ConnectionLimit::Address, Some(address), made, now)
    }

    /// Counts that a limit was reached, and tells the log now and then.
    fn note(
        &self,
        state: &mut State,
        limit: ConnectionLimit,
        address: Option<ClientAddress>,
        made_room: bool,
        now: Instant,
    ) -> Result<(), Full> {
        let reached = &mut state.reached;
        match (limit, address) {
            (ConnectionLimit::Address, Some(address)) => reached.address = Some((now, address)),
            _ => reached.connections = Some(now),
        }
        if made_room {
            self.figures.made_room(limit).inc();
            reached.made_room += 1;
        } else {
            self.figures.refused(limit).inc();
            reached.refused += 1;
        }
        if reached.log.count().is_some() {
            tracing::warn!(
                limit = limit.key(),
                newcomer = address.map(tracing::field::display),
                made_room = std::mem::take(&mut reached.made_room),
                refused = std::mem::take(&mut reached.refused),
                "a limit of client connections is reached: idle ones make room, or else newcomers are refused"
            );
        }
        if made_room { Ok(()) } else { Err(Full(limit)) }
    }

    /// A thread that panicked with the lock left numbers, which are whole after each statement.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Asks the connection that is first in rank, of this address or of all, to make room. Whether there was one. `limit` is how many there
    /// may be.
    fn make_room(&mut self, of: Option<ClientAddress>, limit: usize, now: Instant) -> bool {
        let making_room = match of {
            None => self.making_room_of_all,
            Some(address) => self.addresses.get(&address).map_or(0, |entry| entry.making_room),
        };
        if making_room >= (limit / MAKING_ROOM).max(MAKING_ROOM_LEAST) {
            return false;
        }
        let Some(number) = self.next_candidate(of, now) else { return false };
        self.set_makes_room(
            number,
            Some(of.map_or(ConnectionLimit::Connections, |_| ConnectionLimit::Address)),
        );
        if let Some(entry) = self.connections.get(&number) {
            entry.activity.ask_for_room();
        }
        true
    }

    /// At which limit a connection makes room, if it does.
    fn set_makes_room(&mut self, number: u64, at: Option<ConnectionLimit>) {
        let Some(entry) = self.connections.get_mut(&number) else { return };
        let before = std::mem::replace(&mut entry.makes_room, at);
        let mut unknown = AddressEntry::default();
        let address = entry.address.and_then(|address| self.addresses.get_mut(&address));
        let address = address.unwrap_or(&mut unknown);
        let (of_all, of_address) = (&mut self.making_room_of_all, &mut address.making_room);
        match before {
            None => {}
            Some(ConnectionLimit::Connections) => *of_all -= 1,
            Some(ConnectionLimit::Address) => *of_address -= 1,
        }
        match at {
            None => {}
            Some(ConnectionLimit::Connections) => *of_all += 1,
            Some(ConnectionLimit::Address) => *of_address += 1,
        }
        match (before.is_some(), at.is_some()) {
            (false, true) => {
                self.staying -= 1;
                address.staying = address.staying.saturating_sub(1);
            }
            (true, false) => {
                self.staying += 1;
                address.staying += 1;
            }
            _ => {}
        }
    }

    /// The connection that is first in rank, of this address or of all.
    fn next_candidate(&mut self, of: Option<ClientAddress>, now: Instant) -> Option<u64> {
        let mut candidates = std::mem::take(self.candidates(of)?);
        if candidates.until.is_none_or(|until| until <= now) {
            candidates = Candidates::default();
        }
        let found = loop {
            match candidates.next.pop_front() {
                Some((number, rank)) if self.has_rank(number, rank) => break Some(number),
                Some(_) => {}
                None if candidates.found_none => break None,
                None => {
                    candidates.next = self.first_in_rank(of);
                    candidates.found_none = candidates.next.is_empty();
                    candidates.until = Some(now + REMEMBERED_FOR);
                }
            }
        };
        if let Some(place) = self.candidates(of) {
            *place = candidates;
        }
        found
    }

    fn candidates(&mut self, of: Option<ClientAddress>) -> Option<&mut Candidates> {
        match of {
            None => Some(&mut self.candidates),
            Some(address) => self.addresses.get_mut(&address).map(|entry| &mut entry.candidates),
        }
    }

    fn has_rank(&self, number: u64, rank: Rank) -> bool {
        let entry = self.connections.get(&number).filter(|entry| entry.makes_room.is_none());
        entry.is_some_and(|entry| entry.activity.rank() == Some(rank))
    }

    fn first_in_rank(&self, of: Option<ClientAddress>) -> VecDeque<(u64, Rank)> {
        let considered = self.connections.iter().filter(|(_, entry)| {
            entry.makes_room.is_none() && of.is_none_or(|address| entry.address == Some(address))
        });
        let ranked = considered.filter_map(|(number, entry)| Some((entry.activity.rank()?, *number)));
        let mut ranked: Vec<_> = ranked.collect();
        ranked.sort_unstable();
        ranked.truncate((ranked.len() / REMEMBERED).max(1));
        ranked.into_iter().map(|(rank, number)| (number, rank)).collect()
    }

    fn set_address(&mut self, number: u64, address: ClientAddress) {
        let Some(entry) = self.connections.get_mut(&number).filter(|entry| entry.address.is_none()) else {
            return;
        };
        entry.address = Some(address);
        let of = self.addresses.entry(address).or_default();
        of.listed += 1;
        of.staying += usize::from(entry.makes_room.is_none());
    }

    fn remove(&mut self, number: u64) {
        self.set_makes_room(number, None);
        let Some(entry) = self.connections.remove(&number) else { return };
        self.staying -= 1;
        let Some(address) = entry.address else { return };
        if let Some(of) = self.addresses.get_mut(&address) {
            of.listed -= 1;
            of.staying -= 1;
            if of.listed == 0 {
                self.addresses.remove(&address);
            }
        }
    }
}

impl ConnectionPlace {
    /// Of a connection that no table lists: in-process tests have no acceptor.
    #[must_use]
    pub fn unlisted() -> Self {
        Self { activity: Arc::default(), listed: None }
    }

    /// Whether the connection is in use.
    #[must_use]
    pub fn activity(&self) -> &Arc<ConnectionActivity> {
        &self.activity
    }

    /// Counts the connection for the client that a balancer's header names.
    ///
    /// # Errors
    /// This client has as many connections as it may have, and all are in use.
    pub fn set_address(&self, address: ClientAddress) -> Result<(), Full> {
        let Some((table, number)) = &self.listed else { return Ok(()) };
        let mut state = table.lock();
        table.room_of_address(&mut state, address, Instant::now())?;
        state.set_address(*number, address);
        Ok(())
    }

    /// Counts the connection again: it was asked to make room, and has come into use.
    pub fn stay(&self) {
        if let Some((table, number)) = &self.listed {
            table.lock().set_makes_room(*number, None);
        }
    }
}

impl Drop for ConnectionPlace {
    fn drop(&mut self) {
        if let Some((table, number)) = &self.listed {
            table.lock().remove(*number);
        }
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::registry::Registry;

    use super::*;

    /// A table with these limits.
    fn table(connections: usize, per_address: usize) -> Arc<ConnectionTable> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keyward.toml");
        let text = format!(
            "listener = [{{ name = 'a', address = '127.0.0.1:1' }}]\ncluster.endpoints = ['http://127.0.0.1:2']\n\
             limits = {{ connections = {connections}, connections_per_address = {per_address} }}\n"
        );
        std::fs::write(&path, text).unwrap();
        let config = crate::config::load(&path).unwrap_or_else(|faults| panic!("{faults}")).0;
        let figures = ConnectionFigures::registered(&mut Registry::default());
        ConnectionTable::new(Arc::new(Published::new(config)), figures)
    }

    fn address(last: u8) -> ClientAddress {
        ClientAddress::of([10, 0, 0, last].into())
    }

    fn asked(place: &ConnectionPlace) -> bool {
        use futures_util::FutureExt as _;
        place.activity.room_wanted().now_or_never().is_some()
    }

    #[tokio::test(start_paused = true)]
    async fn at_the_limit_one_that_never_called_makes_room_and_then_the_longest_idle_and_then_nobody() {
        let table = table(3, 3);
        let admit = |last| table.admit(Some(address(last)));
        let [idle, busy, silent] = [1, 2, 3].map(|last| admit(last).unwrap());
        for place in [&idle, &busy] {
            place.activity.note_call();
            place.activity.begin_stream();
        }
        idle.activity.end_stream();
        let fourth = admit(4).unwrap();
        assert_eq!([&idle, &busy, &silent, &fourth].map(asked), [false, false, true, false]);
        fourth.activity.note_call();
        fourth.activity.begin_stream();
        let fifth = admit(5).unwrap();
        assert_eq!([&idle, &busy, &fourth, &fifth].map(asked), [true, false, false, false]);
        fifth.activity.note_call();
        fifth.activity.begin_stream();
        assert_eq!(admit(6).err(), Some(Full(ConnectionLimit::Connections)));
        // The place of one that has gone is free, and that of one that stays is not.
        drop(silent);
        assert_eq!(table.occupancy().open, 3);
        assert!(admit(6).is_err(), "it had made room for another already");
        drop(busy);
        let sixth = admit(6).unwrap();
        sixth.activity.note_call();
        sixth.activity.begin_stream();
        idle.activity.begin_stream();
        idle.stay();
        drop(fourth);
        assert!(admit(7).is_err(), "three are in use");
        drop(fifth);
        assert!(admit(7).is_ok());
        let [made_room, refused] = [
            table.figures.made_room(ConnectionLimit::Connections).get(),
            table.figures.refused(ConnectionLimit::Connections).get(),
        ];
        assert_eq!((made_room, refused), (2, 3));
    }

    #[tokio::test(start_paused = true)]
    async fn an_address_at_its_limit_gets_room_from_its_own_connections_only() {
        let table = table(100, 2);
        let other = table.admit(Some(address(9))).unwrap();
        let [first, second] = [1, 1].map(|last| table.admit(Some(address(last))).unwrap());
        let third = table.admit(Some(address(1))).unwrap();
        assert_eq!([&other, &first, &second, &third].map(asked), [false, true, false, false]);
        for place in [&second, &third] {
            place.activity.note_call();
            place.activity.begin_stream();
        }
        assert_eq!(table.admit(Some(address(1))).err(), Some(Full(ConnectionLimit::Address)));
        // Behind a balancer the address is known later.
        let proxied = table.admit(None).unwrap();
        assert_eq!(proxied.set_address(address(1)), Err(Full(ConnectionLimit::Address)));
        assert_eq!(proxied.set_address(address(9)), Ok(()));
        let occupancy = table.occupancy();
        assert_eq!(occupancy.open, 4);
        assert_eq!(occupancy.most.map(|(_, count)| count), Some(3));
        assert_eq!((occupancy.full, occupancy.address_full), (None, Some((Duration::ZERO, address(1)))));
        drop((other, first, second, third, proxied));
        assert_eq!(
            table.occupancy(),
            Occupancy { address_full: occupancy.address_full, ..Occupancy::default() }
        );
        assert!(table.lock().addresses.is_empty(), "an address without connections is forgotten");
    }

    /// However fast newcomers come: a connection that makes room keeps its socket for up to a second.
    #[tokio::test(start_paused = true)]
    async fn those_that_make_room_at_the_same_time_are_bounded() {
        let table = table(1000, 1000);
        let mut places: Vec<_> = (0..1000).map(|_| table.admit(Some(address(1))).unwrap()).collect();
        let admitted = std::iter::from_fn(|| table.admit(Some(address(2))).ok()).take(1000);
        let admitted: Vec<_> = admitted.collect();
        assert_eq!(admitted.len(), 1000 / MAKING_ROOM);
        // The oldest of all were asked, each once.
        assert!(places[..admitted.len()].iter().all(asked) && !places[admitted.len()..].iter().any(asked));
        // Those of an address at its limit are counted apart.
        assert!(table.admit(Some(address(1))).is_err(), "all together are at their limit");
        drop(places.drain(..10));
        let more: Vec<_> = std::iter::from_fn(|| table.admit(Some(address(2))).ok()).take(1000).collect();
        assert_eq!(more.len(), 10, "as many as have gone");
    }

    #[test]
    fn one_network_of_ipv6_is_one_client_and_a_mapped_address_is_that_of_ipv4() {
        let of = |text: &str| ClientAddress::of(text.parse().unwrap());
        assert_eq!(of("2001:db8::1"), of("2001:db8::ffff:1"));
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
        assert_eq!(of("::ffff:10.0.0.1"), of("10.0.0.1"));
        assert_eq!(of("2001:db8::1").to_string(), "2001:db8::/64");
        assert_eq!(ClientAddress::UnixUser(7).to_string(), "unix user 7");
    }
}
