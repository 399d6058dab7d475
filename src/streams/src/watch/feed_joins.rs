//! The step of a client stream's watches onto feeds.
//!
//! Owns: when a client stream tries to let its watches join. Must not know: the conditions of a join (the
//! hub's), the messages. Invariant: a watch is first created on a stream of its client, under the client's
//! own permissions, and joins a feed once it was told to the client.

use std::future::poll_fn;
use std::rc::Rc;

use smallvec::SmallVec;
use tokio::time::Instant;

use crate::watch::feed::Feed;
use crate::watch::feeds::{FeedRange, WatchFeeds};
use crate::watch::hub::{FeedPosition, Hub, HubOutput, UpstreamStreamId, WatchKey};
use crate::watch::stream_state::UpstreamStreamState;
use crate::watch::upstream_stream::WatchRoute;
use keyward_etcd::identity::Revision;

/// Maximum number of watches that a call looks at.
const LOOKS: usize = 64;

/// The watches of a client stream that may join a feed.
pub struct FeedJoins {
    feeds: Rc<WatchFeeds>,
    /// The number of watches of a range from which on they share a feed.
    least: usize,
    /// The newest watch that was taken in.
    last: WatchKey,
    watches: SmallVec<[(WatchKey, Rc<FeedRange>); 1]>,
    /// The place in `watches` at which the next call begins.
    turn: usize,
    /// True while the client stream waits for a feed that is behind.
    waits: bool,
}

/// A feed that is behind a watch.
pub(super) struct FeedBehind {
    feed: Rc<Feed>,
    /// The revision that the watch has reached.
    reached: i64,
}

impl FeedBehind {
    /// Waits until the feed has caught up, or has ended.
    pub(super) async fn caught_up(self) {
        poll_fn(|cx| self.feed.poll_reached(self.reached, cx)).await;
    }
}

/// A client stream that lets its watches join.
pub(super) struct JoiningStream<'a> {
    pub(super) hub: &'a mut Hub,
    pub(super) route: &'a WatchRoute,
    pub(super) upstream: &'a mut SmallVec<[(UpstreamStreamId, UpstreamStreamState); 1]>,
}

impl FeedJoins {
    /// Lets watches join feeds of `feeds` once at least `least` watches share a range.
    #[must_use]
    pub fn new(feeds: &Rc<WatchFeeds>, least: usize) -> Box<Self> {
        Box::new(Self {
            feeds: Rc::clone(feeds),
            least,
            last: WatchKey::NONE,
            watches: SmallVec::new(),
            turn: 0,
            waits: false,
        })
    }

    /// Takes in the watches that were told to the client since the last call.
    pub(super) fn take_in(&mut self, hub: &Hub, route: &WatchRoute) {
        for key in hub.told_after(self.last) {
            self.last = key;
            if let Some(create) = hub.feed_create(key) {
                let range = self.feeds.range(&route.stream.user, &create);
                self.watches.push((key, range));
            }
        }
        // Watches that are gone must not count for their range. Looking for them pays after some have gone.
        if self.watches.len() > hub.watch_count() + hub.watch_count() / 8 {
            self.watches.retain(|(key, _)| hub.is_watch(*key));
        }
    }

    /// True for the numbers of events after which a stream tries: often at the beginning, rarely later. The
    /// distance is odd, since the messages of two streams may alternate.
    pub(super) fn is_turn(events: u32) -> bool {
        events.is_power_of_two() || events.is_multiple_of(61)
    }

    /// Lets watches join that can, and appends the hub's outputs. A call looks at a few watches, and begins
    /// to open one feed at most. Returns a feed to wait for before the next call, unless the client stream
    /// waits already ([`FeedJoins::end_wait`]).
    pub(super) fn join(&mut self, stream: JoiningStream<'_>, out: &mut Vec<HubOutput>) -> Option<FeedBehind> {
        let JoiningStream { hub, route, upstream } = stream;
        if !hub.may_join() {
            return None;
        }
        let mut behind = None;
        for _ in 0..self.watches.len().min(LOOKS) {
            self.turn = (self.turn + 1) % self.watches.len();
            let (key, range) = &self.watches[self.turn];
            let Some(Revision(next)) = hub.next_to_join(*key).filter(|_| range.watches() >= self.least)
            else {
                continue;
            };
            let Some(feed) = range.open_feed() else {
                // Only for a watch that can read the feed.
                if hub.has_room_for_feed() && range.begin_feed(route, || hub.feed_create(*key)) {
                    return None;
                }
                continue;
            };
            let figures = self.feeds.figures();
            if let Some((stream, position)) = read_already(upstream, &feed) {
                let joined = hub.join_feed(Instant::now(), *key, Some(stream), position, out);
                figures.joins.inc_by(u64::from(joined.is_some()));
                continue;
            }
            let Some(position) = feed.position() else { continue };
            if !position.serves(next) {
                let reached = next.saturating_sub(1);
                behind =
                    behind.or_else(|| (reached > position.proven).then_some(FeedBehind { feed, reached }));
                continue;
            }
            let Some(reader) = feed.reader(next, &figures.readers) else { continue };
            if let Some(stream) = hub.join_feed(Instant::now(), *key, None, position, out) {
                upstream.push((stream, UpstreamStreamState::Feed(reader)));
                figures.joins.inc();
            }
        }
        let behind = behind.filter(|_| !self.waits);
        self.waits |= behind.is_some();
        behind
    }

    /// The wait for a feed is over.
    pub(super) fn end_wait(&mut self) {
        self.waits = false;
    }
}

/// The stream by which the client stream reads the feed, with the position for a further watch.
fn read_already(
    upstream: &[(UpstreamStreamId, UpstreamStreamState)],
    feed: &Rc<Feed>,
) -> Option<(UpstreamStreamId, FeedPosition)> {
    upstream.iter().find_map(|(stream, state)| match state {
        UpstreamStreamState::Feed(reader) if reader.reads(feed) => Some((*stream, reader.position()?)),
        _ => None,
    })
}
