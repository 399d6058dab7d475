//! Flow control for answers received from members and not yet read by clients, on a single shard.
//!
//! Owns: how many bytes of unread answers the shard and each connection may hold, the queue for buffer room,
//! and dropping answers whose clients do not read. Must not know: the request behind an answer, how a read is
//! repeated.
//! Invariants: an answer above `unread_need::SMALL` is counted from before its first byte goes downstream
//! until its reply is dropped or given up; a connection never has more than half of the shard's room, except
//! for answers to calls not safe to repeat; free room goes first to the waiting connection with the least
//! room; an answer in whose place nobody waits is not given up, except for the 17th and further answers of a
//! connection unread for `limits.unread_timeout`; an answer is given up only if its client read no byte of
//! the answer for `GRACE`, in favour of a connection then holding no more than the connection losing the
//! answer, or for `limits.unread_timeout`, in favour of any; an answer waiting for its member is never given
//! up; an answer given up ends behind a whole message, as far as the message's rest is short.

use std::cell::{Cell, RefCell};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::Gateway;
use crate::connection_origin::ConnectionOrigin;
use crate::reply_contents::{ReplyContents, ReplyPiece};
use crate::retries::PATIENCE;
use crate::unread_need::{UNIT, UnreadRoomNeed, units};
use keyward_base::byte_account::{ByteAccount, ByteShare, HeldBytes};
use keyward_base::published::Published;
use keyward_config::Config;
use keyward_etcd::refusal::Refusal;
use keyward_telemetry::log_throttle::LogThrottle;
use keyward_telemetry::unread_metrics::{GiveUpReason, UnreadMetrics};
use keyward_upstream::answer::HELD;

/// Smaller amounts of room (in units) are returned only at the end of an answer.
const STEP: u32 = 64;

/// An answer unread for this long may be dropped in favour of a connection holding less.
const GRACE: Duration = Duration::from_secs(1);

/// Answers of one connection that may stay unread for longer than `limits.unread_timeout`, while nobody waits
/// for their room: each keeps a stream of a member open.
const PAUSED: usize = 16;

/// The longest rest of a message kept for an answer given up: a snapshot's messages have 32 KiB.
const REST: usize = 64 * 1024;

/// The minimum room of a shard: two of the largest answers for each of two connections.
const LEAST: usize = 4 * (2 * 1024 * 1024 + 2 * HELD);

/// The unread answers of a shard.
pub struct UnreadAnswers {
    /// Has `limits.unread_timeout`.
    config: Arc<Published<Config>>,
    /// The whole room in units.
    room: u32,
    account: Rc<ByteAccount>,
    of_connection: u32,
    waiting: RefCell<BTreeMap<u64, UnreadRoomWaiter>>,
    /// Connections with registered answers, by number.
    connections: RefCell<BTreeMap<u64, Rc<ConnectionUnread>>>,
    next: Cell<u64>,
    /// Notified when an answer is registered.
    began: Notify,
    figures: UnreadMetrics,
    /// Rate limiter for the log record about dropped answers.
    log: LogThrottle,
}

/// A connection queued for room, and the amount needed.
struct UnreadRoomWaiter {
    of: Rc<ConnectionUnread>,
    units: u32,
    grant: oneshot::Sender<UnreadRoomShare>,
}

/// The unread answers of a connection.
pub struct ConnectionUnread {
    shard: Rc<UnreadAnswers>,
    number: u64,
    origin: Rc<ConnectionOrigin>,
    room: Arc<Semaphore>,
    /// A single permit: only a single answer per connection queues for the shard's room.
    turn: Semaphore,
    /// Bytes held by the connection, including bytes beyond the connection's own limit.
    share: ByteShare,
    standing: RefCell<BTreeMap<u64, Rc<UnreadAnswer>>>,
}

/// Room for the bytes of an answer, until dropped.
pub struct UnreadRoom {
    of_connection: Option<OwnedSemaphorePermit>,
    share: UnreadRoomShare,
    length: Option<usize>,
}

/// A part of the shard's room, counted for a connection, until dropped.
struct UnreadRoomShare {
    of: Rc<ConnectionUnread>,
    held: HeldBytes,
}

/// An entry in the queue for the shard's room, until dropped.
struct UnreadQueueEntry<'a> {
    shard: &'a UnreadAnswers,
    number: u64,
}

/// The rest of a registered answer, until dropped.
pub struct RegisteredAnswer(Rc<UnreadAnswer>);

struct UnreadAnswer {
    of: Rc<ConnectionUnread>,
    number: u64,
    contents: RefCell<ReplyContents>,
    room: RefCell<Option<UnreadRoom>>,
    /// Bytes not yet passed on, if the answer's length is known.
    left: Cell<Option<usize>>,
    /// When the client last took a byte.
    taken_at: Cell<Instant>,
    waits_for: Cell<Party>,
    /// Only the rest of a message is left.
    is_given_up: Cell<bool>,
}

/// The party delaying an answer.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Party {
    Client,
    Member,
}

impl UnreadAnswers {
    /// The buffer of one of the configured shards; `figures` sums up all shards.
    #[must_use]
    pub fn new(config: &Arc<Published<Config>>, figures: UnreadMetrics) -> Self {
        let begun = config.load();
        let room = units((begun.limits.unread.buffer / begun.runtime.shards.get()).max(LEAST));
        Self {
            config: Arc::clone(config),
            room,
            account: ByteAccount::new(0, figures.bytes.clone()),
            of_connection: room / 2,
            waiting: RefCell::default(),
            connections: RefCell::default(),
            next: Cell::default(),
            began: Notify::new(),
            figures,
            log: LogThrottle::default(),
        }
    }

    /// `limits.unread_timeout`.
    fn timeout(&self) -> Duration {
        self.config.load().limits.unread.timeout
    }

    /// Free room in units.
    fn free(&self) -> u32 {
        self.room.saturating_sub(units(self.account.used()))
    }

    /// Grants free room to queued connections, first to the connection holding least.
    fn serve_waiting(&self) {
        loop {
            let granted = {
                let mut waiting = self.waiting.borrow_mut();
                let first = waiting.iter().min_by_key(|(number, waiting)| (waiting.of.share.own(), **number));
                let Some((number, next)) = first else { return };
                if next.units > self.free() {
                    return;
                }
                let number = *number;
                waiting.remove(&number)
            };
            let Some(UnreadRoomWaiter { of, units, grant }) = granted else { return };
            // A waiter already dropped returns the share.
            drop(grant.send(UnreadRoomShare::new(&of, units)));
        }
    }

    fn number(&self) -> u64 {
        self.next.replace(self.next.get() + 1)
    }

    /// Gives up answers until `wanted` units are free or no candidate is left. Candidates are the answers
    /// unread for [`GRACE`] of connections holding at least as much as `of` will hold, and all answers unread
    /// for `limits.unread_timeout`. The connection holding most loses first, and the answer unread for
    /// longest.
    fn make_room(&self, of: &ConnectionUnread, wanted: u32) {
        let timeout = self.timeout();
        let will_hold = of.share.own() + wanted as usize * UNIT;
        let mut candidates = Vec::new();
        for other in self.connections.borrow().values() {
            let own = other.share.own();
            let is_larger = other.number != of.number && own >= will_hold;
            let unread_for = if is_larger { GRACE.min(timeout) } else { timeout };
            candidates.extend(other.stalled(unread_for).into_iter().map(|entry| (own, entry)));
        }
        candidates.sort_unstable_by_key(|(own, entry)| {
            (entry.is_given_up.get(), Reverse(*own), entry.taken_at.get())
        });
        // Returned room goes to the queued connections, so the freed amount is counted here.
        let mut free = self.free();
        for (_, entry) in candidates {
            if free >= wanted {
                return;
            }
            if entry.taken_at.get().elapsed() >= timeout {
                free += entry.give_up(GiveUpReason::ForTime);
            } else if entry.of.share.own() >= will_hold {
                free += entry.give_up(GiveUpReason::ForRoom);
            }
        }
    }

    /// Gives up the answers of a connection unread for `limits.unread_timeout` beyond [`PAUSED`], those
    /// unread for longest. Returns when to look again; `None` if no answer is registered.
    fn give_up_paused(&self) -> Option<Instant> {
        let limit = self.timeout();
        let connections: Vec<_> = self.connections.borrow().values().map(Rc::clone).collect();
        for connection in &connections {
            let mut paused = connection.stalled(limit);
            paused.retain(|entry| !entry.is_given_up.get());
            paused.sort_unstable_by_key(|entry| entry.taken_at.get());
            paused.truncate(paused.len().saturating_sub(PAUSED));
            for entry in paused {
                entry.give_up(GiveUpReason::ForTime);
            }
        }
        let connections = self.connections.borrow();
        let entries = connections.values().filter_map(|connection| connection.next_look(limit));
        entries.min()
    }

    fn tell(&self, of: &ConnectionUnread, why: GiveUpReason, bytes: usize) {
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
    /// A connection without unread answers.
    #[must_use]
    pub fn new(shard: &Rc<UnreadAnswers>, origin: Rc<ConnectionOrigin>) -> Rc<Self> {
        Rc::new(Self {
            shard: Rc::clone(shard),
            number: shard.number(),
            origin,
            room: Arc::new(Semaphore::new(shard.of_connection as usize)),
            turn: Semaphore::new(1),
            share: ByteShare::new(&shard.account, &Rc::default()),
            standing: RefCell::default(),
        })
    }

    /// Bytes of answers that the client has not read yet.
    #[must_use]
    pub fn held(&self) -> usize {
        self.share.own()
    }

    /// True if the connection may ever have this much room.
    #[must_use]
    pub fn has_limit_above(&self, need: UnreadRoomNeed) -> bool {
        need.units <= self.shard.of_connection
    }

    /// Takes room for an answer if available now, or in the place of answers unread for
    /// `limits.unread_timeout`.
    #[must_use]
    pub fn take(self: &Rc<Self>, need: UnreadRoomNeed) -> Option<UnreadRoom> {
        let of_connection = Arc::clone(&self.room).try_acquire_many_owned(need.units).ok()?;
        let shard = &self.shard;
        if need.units > shard.free() {
            shard.make_room(self, need.units);
        }
        let free = need.units <= shard.free() && shard.waiting.borrow().is_empty();
        free.then(|| UnreadRoom {
            of_connection: Some(of_connection),
            share: UnreadRoomShare::new(self, need.units),
            length: need.length,
        })
    }

    /// Waits for room for an answer: first within the connection's own limit, then in the shard's buffer.
    /// Answers unread for `limits.unread_timeout` are given up meanwhile. Cancel-safe.
    ///
    /// # Errors
    /// Never in practice: the semaphores are never closed.
    pub async fn wait(self: &Rc<Self>, need: UnreadRoomNeed) -> Result<UnreadRoom, Refusal> {
        let of_connection = self.wait_within_limit(need.units).await?;
        let share = self.wait_for_share(need.units).await?;
        Ok(UnreadRoom { of_connection: Some(of_connection), share, length: need.length })
    }

    /// Waits for room for an answer, also beyond the connection's own limit, for calls not safe to repeat.
    /// `None` if no room has come within [`PATIENCE`]. Cancel-safe.
    pub async fn wait_beyond(self: &Rc<Self>, need: UnreadRoomNeed) -> Option<UnreadRoom> {
        let share = timeout(PATIENCE, self.wait_for_share(need.units)).await.ok()?.ok()?;
        Some(UnreadRoom { of_connection: None, share, length: need.length })
    }

    async fn wait_within_limit(&self, units: u32) -> Result<OwnedSemaphorePermit, Refusal> {
        let mut acquiring = pin!(Arc::clone(&self.room).acquire_many_owned(units));
        loop {
            tokio::select! {
                biased; // prefer room already given back
                acquired = &mut acquiring => return acquired.map_err(|_| Refusal::TOO_MANY_REQUESTS),
                () = sleep(GRACE) => self.make_room_within_limit(units),
            }
        }
    }

    /// Gives up answers of this connection unread for `limits.unread_timeout`, until its own limit leaves
    /// `wanted` units.
    fn make_room_within_limit(&self, wanted: u32) {
        let mut free = self.shard.of_connection.saturating_sub(units(self.share.own()));
        let mut stalled = self.stalled(self.shard.timeout());
        stalled.sort_unstable_by_key(|entry| (entry.is_given_up.get(), entry.taken_at.get()));
        for entry in stalled {
            if free >= wanted {
                return;
            }
            free += entry.give_up(GiveUpReason::ForTime);
        }
    }

    async fn wait_for_share(self: &Rc<Self>, units: u32) -> Result<UnreadRoomShare, Refusal> {
        let _turn = self.turn.acquire().await.map_err(|_| Refusal::TOO_MANY_REQUESTS)?;
        let (grant, mut granted) = oneshot::channel();
        let place = UnreadQueueEntry { shard: &self.shard, number: self.shard.number() };
        let waiting = UnreadRoomWaiter { of: Rc::clone(self), units, grant };
        self.shard.waiting.borrow_mut().insert(place.number, waiting);
        loop {
            self.shard.serve_waiting();
            tokio::select! {
                biased; // prefer room already granted
                granted = &mut granted => return granted.map_err(|_| Refusal::TOO_MANY_REQUESTS),
                // Registered answers may have become old enough to be dropped.
                () = sleep(GRACE) => self.shard.make_room(self, units),
            }
        }
    }

    /// The answers delayed by the client and unread for `limit`.
    fn stalled(&self, limit: Duration) -> Vec<Rc<UnreadAnswer>> {
        let standing = self.standing.borrow();
        let stalled = standing.values().filter(|entry| {
            entry.waits_for.get() == Party::Client && entry.taken_at.get().elapsed() >= limit
        });
        stalled.map(Rc::clone).collect()
    }

    /// The earliest time at which a further answer may have been unread for `limit`.
    fn next_look(&self, limit: Duration) -> Option<Instant> {
        let (standing, now) = (self.standing.borrow(), Instant::now());
        let times =
            standing.values().map(|entry| match (entry.waits_for.get(), entry.taken_at.get() + limit) {
                (Party::Client, at) if at > now => at,
                _ => now + limit,
            });
        times.min()
    }
}

impl Drop for UnreadQueueEntry<'_> {
    fn drop(&mut self) {
        // The dropped entry may have blocked the queue with a larger demand than the free room.
        if self.shard.waiting.borrow_mut().remove(&self.number).is_some() {
            self.shard.serve_waiting();
        }
    }
}

impl UnreadRoomShare {
    /// Takes free room.
    fn new(of: &Rc<ConnectionUnread>, units: u32) -> Self {
        Self { of: Rc::clone(of), held: of.share.hold(units as usize * UNIT) }
    }

    fn units(&self) -> u32 {
        units(self.held.bytes())
    }

    fn shrink(&mut self, units: u32) {
        self.held.resize(self.held.bytes().min(units as usize * UNIT));
        self.of.shard.serve_waiting();
    }
}

impl Drop for UnreadRoomShare {
    fn drop(&mut self) {
        self.shrink(0);
    }
}

impl UnreadRoom {
    /// Reuses the room for another answer, if large enough.
    #[must_use]
    pub fn fit(self, need: UnreadRoomNeed) -> Option<Self> {
        self.covers(need).then(|| self.resized(need))
    }

    /// True if the room is enough for `need`.
    #[must_use]
    pub fn covers(&self, need: UnreadRoomNeed) -> bool {
        need.units <= self.share.units()
    }

    /// The room with another size, for an answer that is held: a larger need counts at once, beyond all
    /// limits if need be.
    #[must_use]
    pub fn resized(mut self, need: UnreadRoomNeed) -> Self {
        self.length = need.length;
        if self.covers(need) {
            self.shrink(need.units);
        } else {
            self.share.held.resize(need.units as usize * UNIT);
        }
        self
    }

    /// Returns all room beyond `units`.
    fn shrink(&mut self, units: u32) {
        let more = self.share.units().saturating_sub(units);
        if let Some(of_connection) = &mut self.of_connection {
            drop(of_connection.split(more as usize));
        }
        self.share.shrink(units);
    }

    /// Registers an answer holding this room.
    #[must_use]
    pub(super) fn hold(self, contents: ReplyContents) -> RegisteredAnswer {
        let of = Rc::clone(&self.share.of);
        let entry = Rc::new(UnreadAnswer {
            number: of.shard.number(),
            contents: RefCell::new(contents),
            left: Cell::new(self.length),
            room: RefCell::new(Some(self)),
            taken_at: Cell::new(Instant::now()),
            waits_for: Cell::new(Party::Client),
            is_given_up: Cell::new(false),
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
        RegisteredAnswer(entry)
    }
}

impl RegisteredAnswer {
    /// The next piece of the reply. Cancel-safe.
    pub(super) fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<ReplyPiece> {
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

impl Drop for RegisteredAnswer {
    fn drop(&mut self) {
        self.0.leave();
    }
}

impl UnreadAnswer {
    /// Keeps room for the rest of the answer and for `piece`, because HTTP/2 took `piece` and may not have
    /// sent the bytes yet.
    fn shrink_to(&self, piece: &ReplyPiece) {
        let Some(left) = self.left.get() else { return };
        let taken = match piece {
            ReplyPiece::Data(bytes) => bytes.len(),
            ReplyPiece::End(..) | ReplyPiece::Nothing => 0,
        };
        let needed = units(left);
        self.left.set(Some(left.saturating_sub(taken)));
        if let Some(room) = &mut *self.room.borrow_mut()
            && needed.saturating_add(STEP) <= room.share.units()
        {
            room.shrink(needed);
        }
    }

    /// Drops the rest of the answer and returns the number of units freed. The client, on reading again, gets
    /// the rest of a message that it has in part, and the reason. A second call drops the message too.
    fn give_up(&self, why: GiveUpReason) -> u32 {
        let of_room = || self.room.borrow().as_ref().map_or(0, |room| room.share.units());
        let before = of_room();
        let is_first = !self.is_given_up.replace(true);
        let rest = if is_first { self.contents.borrow_mut().rest_of_message(REST) } else { None };
        let rest = rest.filter(|rest| !rest.is_empty());
        let kept = rest.as_ref().map_or(0, |rest| units(rest.len()));
        let told = ReplyContents::ended(rest, refusal(why).trailers());
        drop(self.contents.replace(told));
        self.left.set(None);
        if kept == 0 {
            self.leave();
            drop(self.room.take());
        } else if let Some(room) = &mut *self.room.borrow_mut() {
            room.shrink(kept);
        }
        let freed = before.saturating_sub(of_room());
        if is_first {
            self.of.shard.tell(&self.of, why, freed as usize * UNIT);
        }
        freed
    }

    /// Removes the answer from the register.
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

/// The reason, as told to the client.
fn refusal(why: GiveUpReason) -> Refusal {
    match why {
        GiveUpReason::ForTime => Refusal::UNREAD_FOR_LONG,
        GiveUpReason::ForRoom => Refusal::UNREAD_AND_FULL,
    }
}

/// Gives up answers of connections with too many unread answers, until dropped.
pub async fn give_up_unread(gateway: Rc<Gateway>) {
    loop {
        match gateway.unread.give_up_paused() {
            None => gateway.unread.began.notified().await,
            Some(at) => sleep_until(at).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use bytes::Bytes;

    use super::*;
    use crate::client_figures::ClientFigures;
    use crate::reply_contents::ReplyRest;
    use keyward_etcd::rpc::frame::{encode, pieces};
    use keyward_telemetry::metrics::Metrics;

    const LIMIT: Duration = Duration::from_secs(60);

    fn config() -> Arc<Published<Config>> {
        let text = "[[listener]]\nname = 'clients'\naddress = '127.0.0.1:2379'\n\
                    [cluster]\nendpoints = ['http://127.0.0.1:1']\n\
                    [limits]\nunread_buffer = '16MiB'\nunread_timeout = '60s'\n";
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.toml");
        std::fs::write(&path, text).unwrap();
        let config = keyward_config::load(&path).unwrap_or_else(|faults| panic!("{faults}")).0;
        Arc::new(Published::new(Arc::new(config)))
    }

    fn poll(answer: &mut RegisteredAnswer) -> Option<Bytes> {
        match answer.poll_piece(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(ReplyPiece::Data(bytes)) => Some(bytes),
            _ => None,
        }
    }

    /// The rest of a message has room of its own, and makes room last of all.
    #[tokio::test(start_paused = true)]
    async fn an_answer_given_up_keeps_the_rest_of_a_message_for_as_long_as_there_is_room() {
        let metrics = Metrics::new(vec![]);
        let shard = Rc::new(UnreadAnswers::new(&config(), metrics.unread.clone()));
        let listener = metrics.listeners.of(&"main".into());
        let origin =
            ConnectionOrigin::new("main".into(), None, listener, ClientFigures::new(1, Rc::default()));
        let connection = ConnectionUnread::new(&shard, Rc::new(origin));
        let message = encode(&vec![7; 30 * 1024]);
        let begin = || {
            let parts = [pieces(message.clone()), pieces(message.clone())].into_iter().flatten().collect();
            let contents = ReplyContents::new(parts, ReplyRest::Trailers(http::HeaderMap::new()), None);
            let room = connection.take(UnreadRoomNeed::of_whole(2 * message.len())).expect("free");
            let mut answer = room.hold(contents);
            let first = poll(&mut answer).expect("a piece").len();
            (answer, first)
        };
        let ((mut old, first), (mut new, _)) = (begin(), begin());
        tokio::time::advance(LIMIT).await;
        let of_two = units(2 * message.len());
        connection.make_room_within_limit(shard.of_connection - 2 * of_two + 1);
        assert_eq!(metrics.unread.given_up(GiveUpReason::ForTime).get(), 1, "the oldest");
        let kept = units(message.len() - first);
        assert_eq!(units(connection.held()), of_two + kept);
        assert_eq!(poll(&mut old).map(|rest| rest.len()), Some(message.len() - first));
        assert!(poll(&mut old).is_none() && old.is_over(), "the reason comes behind the message");

        let (other, _) = begin();
        tokio::time::advance(LIMIT).await;
        // All that the connection may hold: first the rests of messages are left, then nothing.
        for left in [2 * kept, 0] {
            connection.make_room_within_limit(shard.of_connection);
            assert_eq!(metrics.unread.given_up(GiveUpReason::ForTime).get(), 3, "each once");
            assert_eq!(units(connection.held()), left);
        }
        assert!(poll(&mut new).is_none() && new.is_over());
        drop((old, new, other));
        assert_eq!((connection.held(), metrics.unread.bytes.get()), (0, 0));
    }
}
