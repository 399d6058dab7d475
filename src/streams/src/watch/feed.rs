//! A feed: one upstream watch for the watches of many client streams.
//!
//! Owns: the upstream stream, its only watch, and the log of its messages. Must not know: clients, the choice
//! of the watches that join.
//! Invariants: a feed serves a single upstream user and a single range, with the options of the create; a
//! feed is never resumed: when its stream or its watch ends, each client stream resumes on a stream of its
//! own, from its own position; a message other than events and progress ends the feed.

use std::cell::RefCell;
use std::rc::Rc;
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use bytes::Bytes;
use prometheus_client::metrics::gauge::Gauge;
use tokio::time::Instant;

use crate::watch::feed_log::{Bounds, FeedLog, FeedRead};
use crate::watch::hub::{FeedPosition, StreamCredential, StreamLoss, WatchTraits};
use crate::watch::upstream_stream::{SourceOpenFailure, WatchRoute, WatchSource, WatchSourceOpening};
use crate::watch::watch_messages::{
    ClientWatchCreate, NO_WATCH, OpenEnd, PlainEvents, SplicedWatchResponse, progress_message,
};
use keyward_base::byte_account::HeldBytes;
use keyward_downstream::stream_budget::FREE;
use keyward_etcd::identity::MemberId;
use keyward_upstream::bidi::{BidiEvent, UnfinishedMessageTooLarge};

/// The id of the feed's watch.
const WATCH_ID: i64 = 1;

/// Messages taken in a row before the readers run. Far below the messages kept for the slowest reader, so
/// that a burst leaves no reader behind that only waits for its turn.
const IN_A_ROW: u32 = 32;

const BOUNDS: Bounds = Bounds { past: (16, 64 << 10), most: (1024, 4 << 20) };

/// Time after which a feed without a reader ends.
const UNREAD: Duration = Duration::from_secs(10);

/// Time after which an unanswered progress request counts as dropped: etcd drops a request that it cannot
/// answer at once.
const PROGRESS_LOST: Duration = Duration::from_millis(500);

/// The upstream watch.
pub(super) struct Feed(RefCell<FeedState>);

struct FeedState {
    route: WatchRoute,
    create: ClientWatchCreate,
    /// `None` after the end.
    stream: Option<FeedStream>,
    traits: WatchTraits,
    /// `None` before the Created.
    live: Option<LiveFeed>,
    held: HeldBytes,
    /// The member that ended the feed, if one is to blame.
    failed: Option<MemberId>,
    /// True if the member refused the create or the credential.
    is_refused: bool,
}

/// How a feed ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct FeedEnd {
    /// For how long the feed could serve watches.
    pub(super) served: Duration,
    /// A fresh credential may cure the cause.
    pub(super) wants_fresh: bool,
}

/// The feed's stream.
enum FeedStream {
    Opening(WatchSourceOpening),
    Open(Box<WatchSource>),
}

/// A feed that serves watches.
struct LiveFeed {
    log: FeedLog,
    cluster: u64,
    /// The highest revision that the member is known to have reached.
    proven: i64,
    /// The time of the progress request on its way.
    asked_at: Option<Instant>,
    since: Instant,
    /// From the beginning to the end, or zero before the end.
    served: Duration,
    /// Since when the feed has no reader.
    unread_since: Option<Instant>,
    /// Client streams ahead of the feed, to be woken by its next message.
    ahead: Vec<Waker>,
}

/// The side of a client stream.
pub struct FeedReader {
    feed: Rc<Feed>,
    reader: usize,
    /// Counts the readers.
    shown: Gauge,
}

/// An event of a feed for a reader.
pub(super) enum FeedEvent {
    Message(Bytes),
    /// The feed has ended, or the reader is too far behind.
    End(Option<MemberId>),
}

impl Feed {
    /// Begins to open a feed on any suitable member.
    pub(super) fn open(
        route: WatchRoute,
        create: ClientWatchCreate,
        credential: StreamCredential,
    ) -> Rc<Self> {
        let opening = route.open(credential, 0, Vec::new());
        Rc::new(Self(RefCell::new(FeedState {
            held: route.share.hold(0),
            route,
            create,
            stream: Some(FeedStream::Opening(opening)),
            traits: WatchTraits::UNKNOWN,
            live: None,
            failed: None,
            is_refused: false,
        })))
    }

    /// Takes in what the member has sent. Ready at the feed's end.
    pub(super) fn poll(&self, cx: &mut Context<'_>) -> Poll<()> {
        let mut state = self.0.borrow_mut();
        for _ in 0..IN_A_ROW {
            match &mut state.stream {
                Some(FeedStream::Opening(opening)) => {
                    let opened = ready!(opening.as_mut().poll(cx));
                    state.opened(opened);
                }
                Some(FeedStream::Open(source)) => {
                    let next = ready!(source.poll_next(cx));
                    state.next(next);
                    if state.is_over_budget() {
                        // The readers first: they free what they take.
                        break;
                    }
                }
                None => return Poll::Ready(()),
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Ends the feed, unless it has ended.
    pub(super) fn end(&self) {
        let mut state = self.0.borrow_mut();
        if state.stream.is_some() {
            state.end(None);
        }
    }

    /// How the feed ended; `None` while the feed goes on.
    pub(super) fn ended(&self) -> Option<FeedEnd> {
        let state = self.0.borrow();
        let served = state.live.as_ref().map_or(Duration::ZERO, |live| live.served);
        let end = FeedEnd { served, wants_fresh: state.is_refused };
        state.stream.is_none().then_some(end)
    }

    /// The feed's position for a reader that joins now; `None` before the Created.
    pub(super) fn position(&self) -> Option<FeedPosition> {
        self.0.borrow().position(|log| Some(log.first()))
    }

    /// Ready once the feed's member is known to have reached `revision`, or the feed has ended.
    pub(super) fn poll_reached(&self, revision: i64, cx: &Context<'_>) -> Poll<()> {
        let mut state = self.0.borrow_mut();
        let is_open = state.stream.is_some();
        match state.live.as_mut().filter(|live| is_open && live.proven < revision) {
            Some(live) => {
                live.ahead.push(cx.waker().clone());
                Poll::Pending
            }
            None => Poll::Ready(()),
        }
    }

    /// Adds a reader of all events from revision `next` on.
    pub(super) fn reader(self: &Rc<Self>, next: i64, shown: &Gauge) -> Option<Box<FeedReader>> {
        let mut state = self.0.borrow_mut();
        let live = state.live.as_mut()?;
        let reader = live.log.add_reader(next)?;
        live.unread_since = None;
        shown.inc();
        Some(Box::new(FeedReader { feed: Rc::clone(self), reader, shown: shown.clone() }))
    }
}

impl FeedState {
    fn opened(&mut self, opened: Result<WatchSource, SourceOpenFailure>) {
        match opened {
            Ok(mut source) => {
                self.traits = source.traits;
                let end = if self.traits.misjudges_open_end { OpenEnd::Explicit } else { OpenEnd::AsSent };
                source.send(&self.create.message(WATCH_ID, 0, end));
                self.stream = Some(FeedStream::Open(Box::new(source)));
            }
            Err(SourceOpenFailure { member, .. }) => self.end(member),
        }
    }

    /// Handles a message, or the end of the stream. A message that exceeds the memory ends the feed, too.
    fn next(&mut self, next: Result<BidiEvent, UnfinishedMessageTooLarge>) {
        match (next, &self.stream) {
            (Ok(BidiEvent::Message(message)), _) => {
                if self.received(&message).is_none() {
                    self.end(None);
                }
                self.live.iter_mut().for_each(LiveFeed::wake_ahead);
            }
            // No member is to blame for a lack of room.
            (Err(UnfinishedMessageTooLarge) | Ok(BidiEvent::NoRoom), _) => self.end(None),
            (Ok(end), Some(FeedStream::Open(source))) => {
                let why = source.ended(&self.route.stream.upstream, &end);
                self.is_refused = why == StreamLoss::Credential;
                let member = (why == StreamLoss::Upstream).then(|| source.member().id);
                self.end(member);
            }
            (Ok(_), _) => self.end(None),
        }
        self.count_held();
    }

    /// Charges the budget for the kept messages, and forgets them if the budget is used up.
    fn count_held(&mut self) {
        let kept = self.live.as_ref().map_or(0, |live| live.log.bytes());
        self.held.resize(kept.saturating_sub(FREE));
        if self.is_over_budget()
            && let Some(live) = &mut self.live
        {
            live.log.forget_for_room();
            self.held.resize(live.log.bytes().saturating_sub(FREE));
        }
    }

    /// The position of a reader that reads from the revision that `first` finds on.
    fn position(&self, first: impl FnOnce(&FeedLog) -> Option<i64>) -> Option<FeedPosition> {
        let live = self.live.as_ref().filter(|_| self.stream.is_some())?;
        let first = first(&live.log)?;
        Some(FeedPosition { traits: self.traits, cluster: live.cluster, first, proven: live.proven })
    }

    fn is_over_budget(&self) -> bool {
        self.held.bytes() > 0 && !self.route.share.fits()
    }

    fn end(&mut self, failed: Option<MemberId>) {
        self.stream = None;
        self.failed = failed;
        if let Some(live) = &mut self.live {
            live.served = live.since.elapsed();
            live.log.end();
            live.wake_ahead();
        }
    }

    /// Takes in a message; `None` if the feed cannot go on.
    fn received(&mut self, message: &Bytes) -> Option<()> {
        let Some(live) = &mut self.live else {
            self.live = LiveFeed::from_created(message);
            self.is_refused = self.live.is_none();
            return self.live.is_some().then_some(());
        };
        if live.unread_since.is_some_and(|since| since.elapsed() >= UNREAD) {
            return None;
        }
        if let Some(events) = PlainEvents::read(message) {
            let is_next = events.watch_id == WATCH_ID
                && events.cluster == live.cluster
                && events.first >= live.log.newest();
            return is_next.then(|| live.push(message, events.last));
        }
        let response = SplicedWatchResponse::read(message).ok()?;
        let header = response.header.as_ref()?;
        if response.created || response.canceled || header.cluster != live.cluster {
            return None;
        }
        if let (Some(first), Some(last)) = (response.events.first(), response.events.last()) {
            let is_next = response.watch_id == WATCH_ID && first.revision >= live.log.newest();
            return is_next.then(|| live.push(message, last.revision));
        }
        if header.revision == 0 {
            return Some(());
        }
        live.proven = live.proven.max(header.revision);
        match response.watch_id {
            WATCH_ID => live.log.push(message, None),
            NO_WATCH if self.traits.progress_trusted => {
                live.asked_at = None;
                if live.log.progress(message) {
                    self.ask_progress();
                }
            }
            _ => {}
        }
        Some(())
    }

    fn ask_progress(&mut self) {
        if let (Some(FeedStream::Open(source)), Some(live)) = (&mut self.stream, &mut self.live) {
            live.asked_at = Some(Instant::now());
            source.send(&progress_message());
        }
    }
}

impl LiveFeed {
    /// Reads the answer to the create; `None` for a refusal, and for any other message.
    fn from_created(message: &Bytes) -> Option<Self> {
        let created = SplicedWatchResponse::read(message).ok()?;
        let is_created = created.created && !created.canceled && created.watch_id == WATCH_ID;
        let header =
            created.header.filter(|header| is_created && header.cluster != 0 && header.revision > 0)?;
        let log = FeedLog::after(header.revision, BOUNDS);
        let now = Instant::now();
        Some(Self {
            log,
            cluster: header.cluster,
            proven: header.revision,
            asked_at: None,
            since: now,
            served: Duration::ZERO,
            unread_since: Some(now),
            ahead: Vec::new(),
        })
    }

    fn push(&mut self, message: &Bytes, last: i64) {
        self.proven = self.proven.max(last);
        self.log.push(message, Some(last));
    }

    fn wake_ahead(&mut self) {
        self.ahead.drain(..).for_each(Waker::wake);
    }
}

impl FeedReader {
    /// True for the feed that is read.
    pub(super) fn reads(&self, feed: &Rc<Feed>) -> bool {
        Rc::ptr_eq(&self.feed, feed)
    }

    /// The feed's position for a further watch of this reader; `None` if the feed serves no further watch.
    pub(super) fn position(&self) -> Option<FeedPosition> {
        self.feed.0.borrow().position(|log| log.next_of(self.reader))
    }

    /// The next message, or the end. Cancel-safe.
    pub(super) fn poll_next(&mut self, cx: &Context<'_>) -> Poll<FeedEvent> {
        let mut state = self.feed.0.borrow_mut();
        let FeedState { live, failed, .. } = &mut *state;
        let Some(live) = live else { return Poll::Ready(FeedEvent::End(*failed)) };
        live.log.poll_read(self.reader, cx).map(|read| match read {
            FeedRead::Message(message) => FeedEvent::Message(message),
            FeedRead::End => FeedEvent::End(*failed),
        })
    }

    /// Asks for the progress of the feed's watch; the answer comes as a message. Many requests are one
    /// upstream.
    pub(super) fn ask_progress(&self) {
        let mut state = self.feed.0.borrow_mut();
        if !state.traits.progress_trusted {
            return;
        }
        let Some(live) = &mut state.live else { return };
        let is_asked = live.asked_at.is_some_and(|at| at.elapsed() < PROGRESS_LOST);
        if live.log.wish_progress(self.reader, is_asked) {
            state.ask_progress();
        }
    }
}

impl Drop for FeedReader {
    fn drop(&mut self) {
        self.shown.dec();
        let mut state = self.feed.0.borrow_mut();
        if let Some(live) = &mut state.live {
            live.log.remove_reader(self.reader);
            live.unread_since = live.log.is_unread().then(Instant::now);
        }
        state.count_held();
    }
}
