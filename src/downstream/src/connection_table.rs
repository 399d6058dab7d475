//! The open client connections of all listeners and shards.
//!
//! Owns: the number of connections in total and per client address, the choice of a connection to evict at a
//! limit, and the refusal of a new connection. Must not know: sockets, HTTP, shards.
//! Invariants:
//! - A connection counts until its [`ConnectionPlace`] is dropped or the connection is asked to close.
//! - The number of sockets is bounded: connections in eviction for a limit number at most an eighth of the
//!   limit, or 64 if an eighth is less. Evictions for an address limit are counted apart from evictions for
//!   the total limit, so new connections of an address at its limit cannot use up the evictions needed by
//!   other addresses.
//! - Only a connection without an open stream, or without any admitted call, is evicted.
//! - At the limit of an address, only connections of the same address are evicted.
//! - The lock is held for one scan of the table at most.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::connection_activity::{ConnectionActivity, EvictionRank};
use keyward_base::io::descriptor_limit::DescriptorRoom;
use keyward_base::published::Published;
use keyward_config::Config;
use keyward_telemetry::connection_metrics::{ConnectionLimit, ConnectionMetrics};
use keyward_telemetry::log_throttle::LogThrottle;
use keyward_telemetry::process_metrics::open_files;

/// Divisor: 1/64 of the scanned connections is remembered as the next eviction candidates. A scan of the
/// whole table takes about a millisecond.
const REMEMBERED: usize = 64;
/// Lifetime of the remembered candidates, and pause before the next scan if a scan found no candidate.
const REMEMBERED_FOR: Duration = Duration::from_millis(100);
/// Divisor: at most an eighth of the limit is in eviction at a time. Evicting a connection without a call
/// takes 5 ms, an idle connection up to a second.
const MAKING_ROOM: usize = 8;
/// Lower bound for the number of connections in eviction at a time.
const MAKING_ROOM_LEAST: usize = 64;

/// The address by which connections are counted as one client's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ClientAddress {
    /// An IP address. IPv6 addresses with the same first 64 bits count as one client.
    Ip(IpAddr),
    /// A user of the local machine, connected over a unix socket.
    UnixUser(u32),
}

/// The open client connections.
pub struct ConnectionTable {
    config: Arc<Published<Config>>,
    figures: ConnectionMetrics,
    /// The files of the process; unset without a limit on them.
    descriptors: OnceLock<DescriptorRoom>,
    state: Mutex<ConnectionTableState>,
}

#[derive(Default)]
struct ConnectionTableState {
    connections: HashMap<u64, ConnectionEntry>,
    addresses: HashMap<ClientAddress, AddressEntry>,
    next: u64,
    /// Connections not in eviction.
    staying: usize,
    /// Connections in eviction for the total limit.
    making_room_of_all: usize,
    candidates: EvictionCandidates,
    reached: ReachedLimits,
}

struct ConnectionEntry {
    address: Option<ClientAddress>,
    activity: Arc<ConnectionActivity>,
    makes_room: Option<ConnectionLimit>,
}

/// The connections of one address.
#[derive(Default)]
struct AddressEntry {
    /// Connections not in eviction.
    staying: usize,
    /// Connections in eviction for the limit of the address.
    making_room: usize,
    /// All connections of the address.
    listed: usize,
    candidates: EvictionCandidates,
}

/// The next connections to evict, as found by one scan of the table.
#[derive(Default)]
struct EvictionCandidates {
    next: VecDeque<(u64, EvictionRank)>,
    /// The scan found no connection to evict.
    found_none: bool,
    until: Option<Instant>,
}

/// The last time each limit was reached, and the counts not yet logged.
#[derive(Default)]
struct ReachedLimits {
    connections: Option<Instant>,
    address: Option<(Instant, ClientAddress)>,
    made_room: u64,
    refused: u64,
    log: LogThrottle,
}

/// No place for a new connection: every open connection is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{} is reached, and every connection is in use", .0.key())]
pub struct ConnectionsFull(pub ConnectionLimit);

/// A connection's place in the table, held until dropped.
pub struct ConnectionPlace {
    activity: Arc<ConnectionActivity>,
    listed: Option<(Arc<ConnectionTable>, u64)>,
}

/// The occupancy of the table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConnectionOccupancy {
    /// Open connections, without connections in eviction.
    pub open: usize,
    /// The client address with the most connections, and their number.
    pub most: Option<(ClientAddress, usize)>,
    /// The division of the limit on open files; `None` without a limit.
    pub descriptors: Option<DescriptorRoom>,
    /// Time since `limits.connections` was last reached.
    pub full: Option<Duration>,
    /// Time since an address last reached `limits.connections_per_address`, and the address.
    pub address_full: Option<(Duration, ClientAddress)>,
}

impl ClientAddress {
    /// The client address for an IP address: an IPv6 address is cut to its first 64 bits.
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
    /// An empty table; the limits are read from `config` at each use.
    #[must_use]
    pub fn new(config: Arc<Published<Config>>, figures: ConnectionMetrics) -> Arc<Self> {
        Arc::new(Self { config, figures, descriptors: OnceLock::new(), state: Mutex::default() })
    }

    /// Sets the bound by the limit on open files, which counts beside `limits.connections`. The process has
    /// one limit: a later bound has no effect.
    pub fn bound_by(&self, descriptors: DescriptorRoom) {
        self.descriptors.get_or_init(|| descriptors);
    }

    /// True while a further connection would take a file that is kept for others than clients. Connections
    /// have a second file until their protocol is known, so fewer of them than fit may be too many.
    #[must_use]
    pub fn lacks_descriptors(&self) -> bool {
        let Some(room) = self.descriptors.get() else { return false };
        // Most of the time a comparison is enough: the system is asked once half of the room is taken.
        let is_likely = self.lock().connections.len() >= room.clients / 2;
        is_likely && open_files().is_some_and(|open| room.is_short(open))
    }

    fn limit(&self) -> usize {
        let room = self.descriptors.get().map_or(usize::MAX, |room| room.clients);
        self.config.load().limits.connections.min(room)
    }

    /// Reserves a place for a new connection. `address` is `None` if the address comes later in a balancer's
    /// header ([`ConnectionPlace::set_address`]).
    ///
    /// # Errors
    /// A limit is reached, and no connection can be evicted.
    pub fn admit(
        self: &Arc<Self>,
        address: Option<ClientAddress>,
    ) -> Result<ConnectionPlace, ConnectionsFull> {
        let now = Instant::now();
        let mut state = self.lock();
        if let Some(address) = address {
            self.room_of_address(&mut state, address, now)?;
        }
        let limit = self.limit();
        if state.staying >= limit {
            let made = state.make_room(None, limit, now);
            self.note(&mut state, ConnectionLimit::Connections, address, made, now)?;
        }
        let number = state.next;
        state.next += 1;
        let activity = Arc::new(ConnectionActivity::default());
        let entry = ConnectionEntry { address: None, activity: Arc::clone(&activity), makes_room: None };
        state.connections.insert(number, entry);
        state.staying += 1;
        if let Some(address) = address {
            state.set_address(number, address);
        }
        drop(state);
        Ok(ConnectionPlace { activity, listed: Some((Arc::clone(self), number)) })
    }

    /// The present occupancy.
    #[must_use]
    pub fn occupancy(&self) -> ConnectionOccupancy {
        let now = Instant::now();
        let state = self.lock();
        let most = state.addresses.iter().max_by_key(|(_, entry)| entry.listed);
        ConnectionOccupancy {
            open: state.staying,
            most: most.map(|(address, entry)| (*address, entry.listed)),
            descriptors: self.descriptors.get().copied(),
            full: state.reached.connections.map(|at| now.saturating_duration_since(at)),
            address_full: state
                .reached
                .address
                .map(|(at, address)| (now.saturating_duration_since(at), address)),
        }
    }

    /// Evicts a connection of the address if the address is at its limit.
    fn room_of_address(
        &self,
        state: &mut ConnectionTableState,
        address: ClientAddress,
        now: Instant,
    ) -> Result<(), ConnectionsFull> {
        let limits = self.config.load().limits;
        let limit = limits.client_connections.per_address;
        if state.addresses.get(&address).map_or(0, |entry| entry.staying) < limit {
            return Ok(());
        }
        let made = state.make_room(Some(address), limit, now);
        self.note(state, ConnectionLimit::Address, Some(address), made, now)
    }

    /// Counts a reached limit, and logs at a limited rate.
    fn note(
        &self,
        state: &mut ConnectionTableState,
        limit: ConnectionLimit,
        address: Option<ClientAddress>,
        made_room: bool,
        now: Instant,
    ) -> Result<(), ConnectionsFull> {
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
        if made_room { Ok(()) } else { Err(ConnectionsFull(limit)) }
    }

    /// A poisoned lock is usable: the table is consistent after each statement.
    fn lock(&self) -> MutexGuard<'_, ConnectionTableState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ConnectionTableState {
    /// Evicts the connection with the lowest rank, of the address `of` or of all. False if no connection
    /// could be evicted. `limit` is the limit on connections of the address or of all.
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

    /// Sets the limit for which a connection is in eviction, or `None`, and updates the counts.
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

    /// The next connection to evict, of the address `of` or of all.
    fn next_candidate(&mut self, of: Option<ClientAddress>, now: Instant) -> Option<u64> {
        let mut candidates = std::mem::take(self.candidates(of)?);
        if candidates.until.is_none_or(|until| until <= now) {
            candidates = EvictionCandidates::default();
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

    fn candidates(&mut self, of: Option<ClientAddress>) -> Option<&mut EvictionCandidates> {
        match of {
            None => Some(&mut self.candidates),
            Some(address) => self.addresses.get_mut(&address).map(|entry| &mut entry.candidates),
        }
    }

    fn has_rank(&self, number: u64, rank: EvictionRank) -> bool {
        let entry = self.connections.get(&number).filter(|entry| entry.makes_room.is_none());
        entry.is_some_and(|entry| entry.activity.rank() == Some(rank))
    }

    fn first_in_rank(&self, of: Option<ClientAddress>) -> VecDeque<(u64, EvictionRank)> {
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
    /// The place of a connection outside any table: in-process tests have no acceptor.
    #[must_use]
    pub fn unlisted() -> Self {
        Self { activity: Arc::default(), listed: None }
    }

    /// The connection's activity.
    #[must_use]
    pub fn activity(&self) -> &Arc<ConnectionActivity> {
        &self.activity
    }

    /// True while a second file of the connection would be one that is kept for others than clients.
    #[must_use]
    pub fn lacks_descriptors(&self) -> bool {
        self.listed.as_ref().is_some_and(|(table, _)| table.lacks_descriptors())
    }

    /// Counts the connection for the client address from a balancer's header.
    ///
    /// # Errors
    /// The client address is at its limit, and all its connections are in use.
    pub fn set_address(&self, address: ClientAddress) -> Result<(), ConnectionsFull> {
        let Some((table, number)) = &self.listed else { return Ok(()) };
        let mut state = table.lock();
        table.room_of_address(&mut state, address, Instant::now())?;
        state.set_address(*number, address);
        Ok(())
    }

    /// Ends the eviction of a connection that came into use again: the connection counts again.
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

    /// A table with the given limits.
    fn table(connections: usize, per_address: usize) -> Arc<ConnectionTable> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keyward.toml");
        let text = format!(
            "listener = [{{ name = 'a', address = '127.0.0.1:1' }}]\n\
             cluster.endpoints = ['http://127.0.0.1:2']\n\
             limits = {{ connections = {connections}, connections_per_address = {per_address} }}\n"
        );
        std::fs::write(&path, text).unwrap();
        let config = keyward_config::load(&path).unwrap_or_else(|faults| panic!("{faults}")).0;
        let figures = ConnectionMetrics::registered(&mut Registry::default());
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
        assert_eq!(admit(6).err(), Some(ConnectionsFull(ConnectionLimit::Connections)));
        // Dropping an evicted connection frees no place; dropping a counted connection frees its place.
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
        assert_eq!(table.admit(Some(address(1))).err(), Some(ConnectionsFull(ConnectionLimit::Address)));
        // Behind a balancer, the address becomes known after the connection was admitted.
        let proxied = table.admit(None).unwrap();
        assert_eq!(proxied.set_address(address(1)), Err(ConnectionsFull(ConnectionLimit::Address)));
        assert_eq!(proxied.set_address(address(9)), Ok(()));
        let occupancy = table.occupancy();
        assert_eq!(occupancy.open, 4);
        assert_eq!(occupancy.most.map(|(_, count)| count), Some(3));
        assert_eq!((occupancy.full, occupancy.address_full), (None, Some((Duration::ZERO, address(1)))));
        drop((other, first, second, third, proxied));
        assert_eq!(
            table.occupancy(),
            ConnectionOccupancy { address_full: occupancy.address_full, ..ConnectionOccupancy::default() }
        );
        assert!(table.lock().addresses.is_empty(), "an address without connections is forgotten");
    }

    /// At any rate of new connections: an evicted connection keeps its socket for up to a second.
    #[tokio::test(start_paused = true)]
    async fn those_that_make_room_at_the_same_time_are_bounded() {
        let table = table(1000, 1000);
        let mut places: Vec<_> = (0..1000).map(|_| table.admit(Some(address(1))).unwrap()).collect();
        let admitted = std::iter::from_fn(|| table.admit(Some(address(2))).ok()).take(1000);
        let admitted: Vec<_> = admitted.collect();
        assert_eq!(admitted.len(), 1000 / MAKING_ROOM);
        // The oldest connections were evicted, each once.
        assert!(places[..admitted.len()].iter().all(asked) && !places[admitted.len()..].iter().any(asked));
        // Connections in eviction for an address limit are counted apart.
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
