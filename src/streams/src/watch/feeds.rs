//! The feeds of a shard, by upstream user and range.
//!
//! Owns: which watches may share a feed, the opening of feeds. Must not know: a watch's position, clients.
//! Invariants: watches share a feed only if the upstream identity and every field of the create that a member
//! sees are equal; each has been created under its own client's permissions before; a feed ends with the last
//! watch of its range.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::future::poll_fn;
use std::rc::{Rc, Weak};
use std::time::Duration;

use bytes::Bytes;
use http::HeaderMap;
use prometheus_client::metrics::gauge::Gauge;
use tokio::time::Instant;

use crate::watch::feed::{Feed, FeedEnd};
use crate::watch::hub::StreamCredential;
use crate::watch::upstream_stream::WatchRoute;
use crate::watch::watch_messages::ClientWatchCreate;
use keyward_base::tasks::{TaskHandle, Tasks};
use keyward_downstream::stream_budget::{StreamByteBudget, StreamByteShare};
use keyward_telemetry::watch_feed_metrics::WatchFeedMetrics;
use keyward_upstream::credentials::{IdentityKey, UpstreamIdentity, UpstreamUser};
use keyward_upstream::reopening_stream::StreamRoute;

/// Time after which a feed that ended may be opened again, doubled for each feed in a row that did not last
/// ([`SETTLED`]).
const PAUSE: Duration = Duration::from_secs(1);

/// Maximum number of doublings.
const DOUBLINGS: u32 = 6;

/// A feed that served watches for this time ended by a new cause.
const SETTLED: Duration = Duration::from_secs(30);

/// Maximum number of feeds per shard. Further ranges stay on the streams of their clients.
const MAX_FEEDS: usize = 1024;

/// The feeds of a shard.
pub struct WatchFeeds {
    ranges: RefCell<HashMap<FeedKey, Weak<FeedRange>>>,
    tasks: Tasks,
    /// Number of open feeds.
    open: Rc<Cell<usize>>,
    budget: Rc<StreamByteBudget>,
    figures: WatchFeedMetrics,
}

/// Watches with equal keys receive equal events from a member.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct FeedKey {
    /// The upstream identity; `None` for no credential.
    user: Option<IdentityKey>,
    /// The create, without the fields that Keyward replaces upstream.
    create: Bytes,
}

/// The watches of an upstream user and a range.
pub(super) struct FeedRange {
    feeds: Rc<WatchFeeds>,
    key: FeedKey,
    /// Keeps the identity of `key` alive, so that no other identity has the same key.
    _user: Option<UpstreamIdentity>,
    open: RefCell<Option<OpenFeed>>,
    /// No feed is opened before.
    paused_until: Cell<Option<Instant>>,
    /// Feeds in a row that did not last.
    failures: Cell<u32>,
    /// The credential for the next feed.
    credential: Cell<StreamCredential>,
}

/// A feed and its task, which ends with the range.
struct OpenFeed {
    feed: Rc<Feed>,
    _task: TaskHandle,
}

/// Drives a feed, and ends the feed with the task, also after a panic: readers must not wait for ever. The
/// feed counts as open until then.
struct FeedDriver {
    feed: Rc<Feed>,
    shown: Gauge,
    open: Rc<Cell<usize>>,
}

impl WatchFeeds {
    /// No feeds. `tasks` owns the tasks of feeds, `budget` limits the bytes held.
    #[must_use]
    pub fn new(tasks: Tasks, budget: Rc<StreamByteBudget>, figures: WatchFeedMetrics) -> Rc<Self> {
        Rc::new(Self { ranges: RefCell::default(), tasks, open: Rc::default(), budget, figures })
    }

    /// The range of a watch with `create`, as `user`. The watch counts for the range while the value is held.
    pub(super) fn range(self: &Rc<Self>, user: &UpstreamUser, create: &ClientWatchCreate) -> Rc<FeedRange> {
        // Each connection has an acting identity of its own: the identity that now proves the user is shared.
        let user = match user {
            UpstreamUser::Nobody => None,
            UpstreamUser::User(identity) => Some(identity.current_identity().into_owned()),
        };
        let key = FeedKey { user: user.as_ref().map(UpstreamIdentity::key), create: create.kept().clone() };
        let mut ranges = self.ranges.borrow_mut();
        if let Some(range) = ranges.get(&key).and_then(Weak::upgrade) {
            return range;
        }
        let range = Rc::new(FeedRange {
            feeds: Rc::clone(self),
            key: key.clone(),
            _user: user,
            open: RefCell::default(),
            paused_until: Cell::default(),
            failures: Cell::default(),
            credential: Cell::new(StreamCredential::Current),
        });
        ranges.insert(key, Rc::downgrade(&range));
        range
    }

    /// The figures of all shards.
    pub(super) fn figures(&self) -> &WatchFeedMetrics {
        &self.figures
    }
}

impl FeedRange {
    /// The number of watches of the range.
    pub(super) fn watches(self: &Rc<Self>) -> usize {
        Rc::strong_count(self)
    }

    /// The range's feed, if there is one.
    pub(super) fn open_feed(&self) -> Option<Rc<Feed>> {
        let mut open = self.open.borrow_mut();
        let feed = &open.as_ref()?.feed;
        let Some(end) = feed.ended() else { return Some(Rc::clone(feed)) };
        *open = None;
        self.note_end(end);
        None
    }

    /// Begins to open a feed with the `route` of a client stream, unless feeds of the range ended lately or
    /// the shard has too many. Returns true if begun.
    pub(super) fn begin_feed(
        &self,
        route: &WatchRoute,
        create: impl FnOnce() -> Option<ClientWatchCreate>,
    ) -> bool {
        let is_paused = self.paused_until.get().is_some_and(|until| Instant::now() < until);
        if is_paused || self.feeds.open.get() >= MAX_FEEDS {
            return false;
        }
        let Some(create) = create() else { return false };
        let feed = OpenFeed::begin(&self.feeds, route, create, self.credential.get());
        *self.open.borrow_mut() = Some(feed);
        true
    }

    fn note_end(&self, end: FeedEnd) {
        let failures = if end.served >= SETTLED { 0 } else { self.failures.get() + 1 };
        self.failures.set(failures);
        let pause = PAUSE * 2_u32.pow(failures.min(DOUBLINGS));
        self.paused_until.set(Some(Instant::now() + pause));
        let fresh = end.wants_fresh;
        self.credential.set(if fresh { StreamCredential::Fresh } else { StreamCredential::Current });
    }
}

impl Drop for FeedRange {
    fn drop(&mut self) {
        // Without this range's entry, another range of the same key may have been added.
        let mut ranges = self.feeds.ranges.borrow_mut();
        if ranges.get(&self.key).is_some_and(|range| range.strong_count() == 0) {
            ranges.remove(&self.key);
        }
    }
}

impl OpenFeed {
    fn begin(
        feeds: &WatchFeeds,
        route: &WatchRoute,
        create: ClientWatchCreate,
        credential: StreamCredential,
    ) -> Self {
        let StreamRoute { upstream, user, method, rules, permit, .. } = &*route.stream;
        let stream = StreamRoute {
            upstream: Rc::clone(upstream),
            user: user.clone(),
            // The feed outlives the client's request.
            headers: HeaderMap::new(),
            method,
            rules,
            request: None,
            permit: *permit,
        };
        let share = StreamByteShare::new(&feeds.budget, 1);
        let route = WatchRoute { stream: Rc::new(stream), home: None, floor: Rc::clone(&route.floor), share };
        let feed = Feed::open(route, create, credential);
        let driver = FeedDriver::new(Rc::clone(&feed), feeds);
        let task = feeds.tasks.spawn("watch feed", poll_fn(move |cx| driver.feed.poll(cx)));
        Self { feed, _task: task }
    }
}

impl FeedDriver {
    fn new(feed: Rc<Feed>, feeds: &WatchFeeds) -> Self {
        let (shown, open) = (feeds.figures.feeds.clone(), Rc::clone(&feeds.open));
        shown.inc();
        open.update(|open| open + 1);
        Self { feed, shown, open }
    }
}

impl Drop for FeedDriver {
    fn drop(&mut self) {
        self.shown.dec();
        self.open.update(|open| open - 1);
        self.feed.end();
    }
}
