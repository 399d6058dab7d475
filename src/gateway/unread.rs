//! Answers that members have given and that clients have not taken yet, on one shard.
//!
//! Owns: how many bytes of such answers the shard and each of its connections may hold, who waits for room, and which answers are given
//! up because nobody reads them. Must not know: what was asked, how an answer is asked for again.
//! Invariants: an answer of more than [`SMALL`] bytes counts from before its first byte goes downstream until its reply is dropped or given
//! up; one connection never has more than half of the shard's room, except for answers to calls that may not be made again; of those who
//! wait the connection that holds least has room first; an answer is given up for want of room only if its client took nothing of it for
//! `GRACE`, and only for a connection that then holds no more; an answer that waits for its member is never given up.

use std::cell::{Cell, RefCell};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::time::{Instant, sleep, sleep_until};

use crate::gateway::Gateway;
use crate::gateway::access_log::Origin;
use crate::gateway::contents::{Contents, Piece};
use crate::refusal::Refusal;
use crate::rpc::frame::{self, PREFIX};
use crate::rpc::method::{Lane, Method, Stream};
use crate::telemetry::seldom::Seldom;
use crate::telemetry::unread::{GivenUp, UnreadFigures};
use crate::upstream::answer::{Answer, HELD, Rest};
use crate::upstream::connection::stream_window;

/// An answer up to this size is not counted: the stream that carries it costs about as much.
pub const SMALL: usize = 4 * 1024;

/// Room is counted in units of this many bytes.
const UNIT: usize = 1024;

/// Room for less than this is given back only at the end of an answer.
const STEP: u32 = 64;

/// An answer of which nothing was taken for this long may have to make room for a connection that holds less.
const GRACE: Duration = Duration::from_secs(1);

/// A shard's room is at least this: two of the largest answers for each of two connections.
const LEAST: usize = 4 * (2 * 1024 * 1024 + 2 * HELD);

/// The unread answers of one shard.
pub struct UnreadAnswers {
    /// Room that is free, in units.
    free: Cell<u32>,
    of_connection: u32,
    waiting: RefCell<BTreeMap<u64, Waiting>>,
    /// Connections with answers that stand, by number.
    connections: RefCell<BTreeMap<u64, Rc<ConnectionUnread>>>,
    next: Cell<u64>,
    /// Tells that an answer stands.
    began: Notify,
    figures: UnreadFigures,
    /// Of answers that were given up.
    log: Seldom,
}

/// A connection that waits for room, and for how much.
struct Waiting {
    of: Rc<ConnectionUnread>,
    units: u32,
    grant: oneshot::Sender<Share>,
}

/// The unread answers of one connection.
pub struct ConnectionUnread {
    shard: Rc<UnreadAnswers>,
    number: u64,
    origin: Rc<Origin>,
    room: Arc<Semaphore>,
    /// Whose turn it is to wait for the shard's room: one answer of a connection at a time.
    turn: Semaphore,
    /// In units, also what is beyond its room.
    used: Cell<u32>,
    standing: RefCell<BTreeMap<u64, Rc<Entry>>>,
}

/// Room for the bytes of one answer, until dropped.
pub struct Room {
    of_connection: Option<OwnedSemaphorePermit>,
    share: Share,
    length: Option<usize>,
}

/// A part of the shard's room, counted for a connection, until dropped.
struct Share {
    of: Rc<ConnectionUnread>,
    units: u32,
}

/// A place among those who wait for the shard's room, until dropped.
struct Place<'a> {
    shard: &'a UnreadAnswers,
    number: u64,
}

/// What is left of an answer and its place in the register, until dropped.
pub struct Standing(Rc<Entry>);

struct Entry {
    of: Rc<ConnectionUnread>,
    number: u64,
    contents: RefCell<Contents>,
    room: RefCell<Option<Room>>,
    /// Bytes that were not given yet, where their number is known.
    left: Cell<Option<usize>>,
    /// When a byte was taken last.
    taken_at: Cell<Instant>,
    waits_for: Cell<Party>,
}

/// Whose turn it is in passing an answer on.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Party {
    Client,
    Member,
}

/// Room that an answer needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Need {
    units: u32,
    /// How many bytes the whole answer has, where it says so.
    length: Option<usize>,
}

impl Need {
    /// That of a stream on `lane` whose end nobody knows.
    #[must_use]
    pub fn of_stream(lane: Lane) -> Self {
        Self { units: units(stream_window(lane) as usize), length: None }
    }

    /// That of an answer to `method` on `lane`; none for a small one.
    #[must_use]
    pub fn of(answer: &Answer, method: &Method, lane: Lane) -> Option<Self> {
        let held: usize = answer.data.iter().map(Bytes::len).sum();
        let length = match (&answer.rest, method.stream) {
            (Rest::Whole(_), _) => Some(held),
            // Only a unary answer is one message, whose prefix tells how long it is.
            (Rest::More(_), Stream::Unary) => {
                let announced = answer.data.front().and_then(|begun| frame::announced(begun));
                announced.map(|message| message + PREFIX)
            }
            (Rest::More(_), _) => None,
        };
        let largest = held + stream_window(lane) as usize;
        let bytes = length.map_or(largest, |length| length.min(largest));
        (bytes > SMALL).then(|| Self { units: units(bytes), length })
    }
}

fn units(bytes: usize) -> u32 {
    u32::try_from(bytes.div_ceil(UNIT)).unwrap_or(u32::MAX)
}

impl UnreadAnswers {
    /// Room for `bytes`; `figures` adds up all shards.
    #[must_use]
    pub fn new(bytes: usize, figures: UnreadFigures) -> Self {
        let room = units(bytes.max(LEAST));
        Self {
            free: Cell::new(room),
            of_connection: room / 2,
            waiting: RefCell::default(),
            connections: RefCell::default(),
            next: Cell::default(),
            began: Notify::new(),
            figures,
            log: Seldom::default(),
        }
    }

    /// Gives free room to those who wait: first to the connection that holds least.
    fn serve_waiting(&self) {
        loop {
            let granted = {
                let mut waiting = self.waiting.borrow_mut();
                let first = waiting.iter().min_by_key(|(number, waiting)| (waiting.of.used.get(), **number));
                let Some((number, next)) = first else { return };
                if next.units > self.free.get() {
                    return;
                }
                let number = *number;
                waiting.remove(&number)
            };
            let Some(Waiting { of, units, grant }) = granted else { return };
            // Whoever left meanwhile gives it back.
            drop(grant.send(Share::new(&of, units)));
        }
    }

    fn number(&self) -> u64 {
        self.next.replace(self.next.get() + 1)
    }

    /// Gives up answers of connections that hold as much as `of` will, or more, until there is room for `wanted` or none is left that may go.
    fn make_room(&self, of: &ConnectionUnread, wanted: u32) {
        let will_hold = of.used.get().saturating_add(wanted);
        let mut larger: Vec<_> = self.connections.borrow().values().map(Rc::clone).collect();
        larger.retain(|other| other.number != of.number && other.used.get() >= will_hold);
        larger.sort_unstable_by_key(|other| Reverse(other.used.get()));
        // Room that is given back goes to whoever waits, so it is counted here.
        let mut free = self.free.get();
        for other in larger {
            let mut stalled = other.stalled(GRACE);
            stalled.sort_unstable_by_key(|entry| entry.taken_at.get());
            for entry in stalled {
                if free >= wanted {
                    return;
                }
                if other.used.get() >= will_hold {
                    free += entry.give_up(GivenUp::ForRoom);
                }
            }
        }
    }

    /// Gives up the answers of which nothing was taken for `limit`. Returns when to look again; none where no answer stands.
    fn give_up_stalled(&self, limit: Duration) -> Option<Instant> {
        let connections: Vec<_> = self.connections.borrow().values().map(Rc::clone).collect();
        for connection in &connections {
            for entry in connection.stalled(limit) {
                entry.give_up(GivenUp::ForTime);
            }
        }
        let connections = self.connections.borrow();
        let entries = connections.values().filter_map(|connection| connection.earliest(limit));
        entries.min()
    }

    fn tell(&self, of: &ConnectionUnread, why: GivenUp, bytes: usize) {
        self.figures.given_up(why).inc();
        if let Some(answers) = self.log.count() {
            tracing::warn!(
                remote = of.origin.remote.map(tracing::field::display),
                listener = &*of.origin.listener,
                reason = why.name(),
                bytes,
                answers,
                "answers were given up because their client does not read them"
            );
        }
    }
}

impl ConnectionUnread {
    /// Nothing yet.
    #[must_use]
    pub fn new(shard: &Rc<UnreadAnswers>, origin: Rc<Origin>) -> Rc<Self> {
        Rc::new(Self {
            shard: Rc::clone(shard),
            number: shard.number(),
            origin,
            room: Arc::new(Semaphore::new(shard.of_connection as usize)),
            turn: Semaphore::new(1),
            used: Cell::default(),
            standing: RefCell::default(),
        })
    }

    /// Room for an answer, where there is some now.
    #[must_use]
    pub fn take(self: &Rc<Self>, need: Need) -> Option<Room> {
        let of_connection = Arc::clone(&self.room).try_acquire_many_owned(need.units).ok()?;
        let shard = &self.shard;
        if need.units > shard.free.get() {
            shard.make_room(self, need.units);
        }
        let free = need.units <= shard.free.get() && shard.waiting.borrow().is_empty();
        free.then(|| Room {
            of_connection: Some(of_connection),
            share: Share::new(self, need.units),
            length: need.length,
        })
    }

    /// Waits for room for an answer: first for this connection's own, then for the shard's. Cancel-safe.
    ///
    /// # Errors
    /// Never in practice: the room is not closed.
    pub async fn wait(self: &Rc<Self>, need: Need) -> Result<Room, Refusal> {
        let of_connection = Arc::clone(&self.room).acquire_many_owned(need.units).await;
        let of_connection = of_connection.map_err(|_| Refusal::TOO_MANY_REQUESTS)?;
        let share = self.wait_for_share(need.units).await?;
        Ok(Room { of_connection: Some(of_connection), share, length: need.length })
    }

    /// Waits for room for an answer, also beyond this connection's own: for answers to calls that may not be made again. Cancel-safe.
    ///
    /// # Errors
    /// Never in practice: the room is not closed.
    pub async fn wait_beyond(self: &Rc<Self>, need: Need) -> Result<Room, Refusal> {
        let share = self.wait_for_share(need.units).await?;
        Ok(Room { of_connection: None, share, length: need.length })
    }

    async fn wait_for_share(self: &Rc<Self>, units: u32) -> Result<Share, Refusal> {
        let _turn = self.turn.acquire().await.map_err(|_| Refusal::TOO_MANY_REQUESTS)?;
        let (grant, mut granted) = oneshot::channel();
        let place = Place { shard: &self.shard, number: self.shard.number() };
        let waiting = Waiting { of: Rc::clone(self), units, grant };
        self.shard.waiting.borrow_mut().insert(place.number, waiting);
        loop {
            self.shard.serve_waiting();
            tokio::select! {
                biased; // room that was granted counts
                granted = &mut granted => return granted.map_err(|_| Refusal::TOO_MANY_REQUESTS),
                // Answers that stand may have become old enough to go.
                () = sleep(GRACE) => self.shard.make_room(self, units),
            }
        }
    }

    /// Answers that wait for their client, who took nothing of them for `limit`.
    fn stalled(&self, limit: Duration) -> Vec<Rc<Entry>> {
        let standing = self.standing.borrow();
        let stalled = standing.values().filter(|entry| {
            entry.waits_for.get() == Party::Client && entry.taken_at.get().elapsed() >= limit
        });
        stalled.map(Rc::clone).collect()
    }

    /// When the first of its answers may have stood for `limit`.
    fn earliest(&self, limit: Duration) -> Option<Instant> {
        let standing = self.standing.borrow();
        let ends = standing.values().map(|entry| match entry.waits_for.get() {
            Party::Client => entry.taken_at.get() + limit,
            Party::Member => Instant::now() + limit,
        });
        ends.min()
    }
}

fn bytes_of(units: u32) -> i64 {
    i64::from(units) * 1024
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        // It may have kept others from room that is too little for it.
        if self.shard.waiting.borrow_mut().remove(&self.number).is_some() {
            self.shard.serve_waiting();
        }
    }
}

impl Share {
    /// Takes free room.
    fn new(of: &Rc<ConnectionUnread>, units: u32) -> Self {
        of.shard.free.set(of.shard.free.get().saturating_sub(units));
        of.used.set(of.used.get().saturating_add(units));
        of.shard.figures.bytes.inc_by(bytes_of(units));
        Self { of: Rc::clone(of), units }
    }

    fn shrink(&mut self, units: u32) {
        let more = self.units.saturating_sub(units);
        let Self { of, .. } = self;
        of.used.set(of.used.get().saturating_sub(more));
        of.shard.figures.bytes.dec_by(bytes_of(more));
        of.shard.free.set(of.shard.free.get().saturating_add(more));
        self.units -= more;
        self.of.shard.serve_waiting();
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.shrink(0);
    }
}

impl Room {
    /// The same room for another answer, where it is large enough for that.
    #[must_use]
    pub fn fit(mut self, need: Need) -> Option<Self> {
        if need.units > self.share.units {
            return None;
        }
        self.length = need.length;
        self.shrink(need.units);
        Some(self)
    }

    /// Gives back what is more than `units`.
    fn shrink(&mut self, units: u32) {
        let more = self.share.units.saturating_sub(units);
        if let Some(of_connection) = &mut self.of_connection {
            drop(of_connection.split(more as usize));
        }
        self.share.shrink(units);
    }

    /// Registers an answer that has this room.
    #[must_use]
    pub(super) fn hold(self, contents: Contents) -> Standing {
        let of = Rc::clone(&self.share.of);
        let entry = Rc::new(Entry {
            number: of.shard.number(),
            contents: RefCell::new(contents),
            left: Cell::new(self.length),
            room: RefCell::new(Some(self)),
            taken_at: Cell::new(Instant::now()),
            waits_for: Cell::new(Party::Client),
            of,
        });
        let of = &entry.of;
        let mut standing = of.standing.borrow_mut();
        if standing.is_empty() {
            of.shard.connections.borrow_mut().insert(of.number, Rc::clone(of));
        }
        standing.insert(entry.number, Rc::clone(&entry));
        drop(standing);
        of.shard.began.notify_one();
        Standing(entry)
    }
}

impl Standing {
    /// What the reply gives next. Cancel-safe.
    pub(super) fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<Piece> {
        let polled = self.0.contents.borrow_mut().poll_piece(cx);
        match &polled {
            Poll::Pending => self.0.waits_for.set(Party::Member),
            Poll::Ready(piece) => {
                self.0.waits_for.set(Party::Client);
                self.0.taken_at.set(Instant::now());
                self.0.shrink_to(piece);
            }
        }
        polled
    }

    pub(super) fn is_over(&self) -> bool {
        self.0.contents.borrow().is_over()
    }
}

impl Drop for Standing {
    fn drop(&mut self) {
        self.0.leave();
    }
}

impl Entry {
    /// Room for what is left and for `piece`, which HTTP/2 has taken and may not have sent yet.
    fn shrink_to(&self, piece: &Piece) {
        let Some(left) = self.left.get() else { return };
        let taken = match piece {
            Piece::Data(bytes) => bytes.len(),
            Piece::End(_) | Piece::Nothing => 0,
        };
        let needed = units(left);
        self.left.set(Some(left.saturating_sub(taken)));
        if let Some(room) = &mut *self.room.borrow_mut()
            && needed.saturating_add(STEP) <= room.share.units
        {
            room.shrink(needed);
        }
    }

    /// Drops what is left, and returns how many units of room that gives back. The client is told, when it reads again, that the outcome
    /// is unknown.
    fn give_up(&self, why: GivenUp) -> u32 {
        let units = self.room.borrow().as_ref().map_or(0, |room| room.share.units);
        self.leave();
        let told = Contents::only(Refusal::REQUEST_TIMED_OUT_CONNECTION_LOST.trailers());
        let contents = self.contents.replace(told);
        drop((self.room.take(), contents));
        self.of.shard.tell(&self.of, why, units as usize * UNIT);
        units
    }

    /// Leaves the register.
    fn leave(&self) {
        let mut standing = self.of.standing.borrow_mut();
        let was_there = standing.remove(&self.number).is_some();
        let is_last = standing.is_empty();
        drop(standing);
        if was_there && is_last {
            self.of.shard.connections.borrow_mut().remove(&self.of.number);
        }
    }
}

/// Gives up answers that nobody reads, until dropped.
pub async fn give_up_unread(gateway: Rc<Gateway>) {
    loop {
        let limit = gateway.config.load().limits.unread.timeout;
        match gateway.unread.give_up_stalled(limit) {
            None => gateway.unread.began.notified().await,
            Some(at) => sleep_until(at).await,
        }
    }
}
