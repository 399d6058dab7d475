//! Watches served by a feed: an upstream watch that also serves other client streams.
//!
//! Owns: the conditions under which a watch joins a feed, and the fan-out of a feed's messages to the hub's
//! watches. Must not know: how a feed is opened, the other client streams.
//! Invariants: a watch joins between two revisions, and only a feed that still delivers every event from the
//! watch's next revision on and has proven the revision before; a lost feed is a lost stream, so that each
//! watch resumes on a stream of the client's own; new watches are never created on a feed.

use smallvec::SmallVec;
use tokio::time::Instant;

use super::direct_delivery::WatchesByUpstreamId;
use super::{
    Hub, HubOutput, HubStream, HubWatch, PendingClientRequest, SplicedWatchResponse, StreamCredential,
    UpstreamStreamId, WatchKey, WatchPlacement, WatchRegistration, WatchStreamEnd, WatchTraits,
};
use crate::watch::watch_messages::{ClientWatchCreate, NO_WATCH};
use keyward_etcd::identity::Revision;

/// Maximum number of feeds per client stream. The watches of further ranges stay on streams of their own.
const MAX_FEEDS: usize = 2;

/// A feed at the moment of a join.
#[derive(Clone, Copy, Debug)]
pub struct FeedPosition {
    /// Traits of the feed's member.
    pub traits: WatchTraits,
    /// The cluster id in the feed's headers.
    pub cluster: u64,
    /// The feed delivers every event of this revision and later to a watch that joins now.
    pub first: i64,
    /// The highest revision that the feed's member is known to have reached.
    pub proven: i64,
}

impl FeedPosition {
    /// True if a watch can join whose next revision is `next`.
    #[must_use]
    pub fn serves(&self, next: i64) -> bool {
        self.first <= next && next.saturating_sub(1) <= self.proven
    }
}

impl Hub {
    /// The watches after `last` whose create was answered, in the order of their creation.
    pub(in crate::watch) fn told_after(&self, last: WatchKey) -> impl Iterator<Item = WatchKey> + use<> {
        let untold = self.pending.iter().find_map(|pending| match pending {
            PendingClientRequest::Create(key) => Some(key.0),
            PendingClientRequest::Cancel(_) | PendingClientRequest::Progress => None,
        });
        (last.0 + 1..untold.unwrap_or(self.last_key + 1)).map(WatchKey)
    }

    /// The create by which a watch is compared with the watches of other client streams; `None` if the watch
    /// is gone or its create has fields unknown to Keyward beside the create.
    pub(in crate::watch) fn feed_create(&self, key: WatchKey) -> Option<ClientWatchCreate> {
        let create = self.watches.get(&key).map(|watch| &watch.create)?;
        create.stands_alone().then(|| create.clone())
    }

    /// True if any watch may join a feed now.
    #[must_use]
    pub fn may_join(&self) -> bool {
        // Pending requests and rounds have begun with the streams as they are.
        self.pending.is_empty() && self.round.is_none() && !self.ended && !self.avoids_feeds
    }

    /// True if the client stream may read another feed.
    #[must_use]
    pub fn has_room_for_feed(&self) -> bool {
        self.streams.values().filter(|stream| stream.is_feed).count() < MAX_FEEDS
    }

    /// Moves the watches of all feeds to streams of the client's own, for good.
    pub(super) fn leave_feeds(&mut self) {
        self.avoids_feeds = true;
        let feeds: Vec<_> = self.streams.iter().filter(|(_, it)| it.is_feed).map(|(id, _)| *id).collect();
        for stream in feeds {
            self.give_up(stream);
        }
    }

    /// The watch's next revision, if the watch could join a feed now.
    #[must_use]
    pub fn next_to_join(&self, key: WatchKey) -> Option<Revision> {
        let watch = self.watches.get(&key).filter(|watch| self.may_join() && watch.is_whole())?;
        let stream = watch.place.stream().and_then(|id| self.streams.get(&id))?;
        (!stream.is_feed && stream.checking.is_none()).then(|| Revision(watch.cursor.next()))
    }

    /// True if the hub has the watch.
    #[must_use]
    pub fn is_watch(&self, key: WatchKey) -> bool {
        self.watches.contains_key(&key)
    }

    /// Moves a watch to a feed: to `stream`, if the feed serves other watches of this hub, or to a new
    /// stream. Returns the feed's stream. `None`, with everything unchanged, if the watch cannot join.
    pub fn join_feed(
        &mut self,
        now: Instant,
        key: WatchKey,
        stream: Option<UpstreamStreamId>,
        feed: FeedPosition,
        out: &mut Vec<HubOutput>,
    ) -> Option<UpstreamStreamId> {
        let Revision(next) = self.next_to_join(key)?;
        if !feed.serves(next) || self.cluster_view.cluster != Some(feed.cluster) {
            return None;
        }
        let stream = match stream {
            Some(stream) => self.streams.get(&stream).filter(|it| it.is_feed).map(|_| stream)?,
            None if self.has_room_for_feed() => self.add_feed(feed.traits),
            None => return None,
        };
        self.last_upstream_id += 1;
        let registration = WatchRegistration {
            id: self.last_upstream_id,
            start: next,
            created: Some(feed.proven),
            asked_before: 0,
            // The feed's member has spoken since the registration of the feed.
            has_messages: true,
        };
        let carrier = self.streams.get_mut(&stream)?;
        carrier.ids.insert(registration.id, key);
        carrier.highest = carrier.highest.max(feed.proven);
        self.cluster_view.reached = self.cluster_view.reached.max(feed.proven);
        let watch = self.watches.get_mut(&key)?;
        let left = std::mem::replace(&mut watch.place, WatchPlacement::Upstream(stream, registration));
        self.forget_upstream(&left);
        self.advance(now);
        out.append(&mut self.out);
        Some(stream)
    }

    fn add_feed(&mut self, traits: WatchTraits) -> UpstreamStreamId {
        self.last_stream += 1;
        let stream = UpstreamStreamId(self.last_stream);
        let feed =
            HubStream { is_feed: true, traits: Some(traits), ..HubStream::new(StreamCredential::Current) };
        self.streams.insert(stream, feed);
        stream
    }

    /// The watches served by the feed `stream`; none for another stream.
    pub fn watches_of_feed(&self, stream: UpstreamStreamId) -> SmallVec<[WatchKey; 1]> {
        let feed = self.streams.get(&stream).filter(|stream| stream.is_feed);
        feed.into_iter().flat_map(|feed| feed.ids.iter().map(|(_, key)| key)).collect()
    }

    /// Handles a feed's message with events or progress, for each watch served by the feed.
    pub(super) fn feed_message(
        &mut self,
        now: Instant,
        stream: UpstreamStreamId,
        response: &SplicedWatchResponse,
    ) -> Result<(), WatchStreamEnd> {
        let revision = response.header.as_ref().map_or(0, |header| header.revision);
        if response.events.is_empty() && response.watch_id == NO_WATCH && revision > 0 {
            self.progressed(stream, revision, response.clone());
            return Ok(());
        }
        let registered = self.streams.get(&stream).map(|feed| &feed.ids);
        let ids: Vec<i64> =
            registered.into_iter().flat_map(WatchesByUpstreamId::iter).map(|(id, _)| id).collect();
        for watch_id in ids {
            let response = SplicedWatchResponse { watch_id, ..response.clone() };
            if !response.events.is_empty() {
                self.events(now, stream, response)?;
            } else if revision > 0 {
                self.progressed(stream, revision, response);
            }
        }
        Ok(())
    }
}

impl WatchKey {
    /// Before the first watch.
    pub const NONE: Self = Self(0);
}

impl HubWatch {
    /// True if the client knows the watch, a member serves it, and no revision is half delivered.
    fn is_whole(&self) -> bool {
        self.id.is_some() && self.is_live() && !self.cursor.holds() && self.compacted_at.is_none()
    }
}
