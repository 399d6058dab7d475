//! The steady state of a session: events are passed on, and watches move to feeds.
//!
//! Owns: which messages go past the hub's other steps. Must not know: the conditions (the hub's).

use bytes::Bytes;
use futures_util::FutureExt;

use super::finished_reads::FinishedRead;
use super::{DIRECT, RunningWatchSession};
use crate::watch::feed_joins::JoiningStream;
use crate::watch::hub::{UpstreamStreamId, WatchKey};
use keyward_etcd::identity::Revision;

impl RunningWatchSession {
    /// Passes on events in the steady state, without the hub's other steps: see [`Hub::deliver_directly`].
    /// Returns false if the hub must handle the message.
    pub(super) fn deliver(&mut self, stream: UpstreamStreamId, message: &Bytes) -> bool {
        if message.len() > DIRECT {
            return false;
        }
        let of_feed = self.hub.watches_of_feed(stream);
        if !of_feed.is_empty() {
            // The hub passes over the watches served here if it handles the message after all.
            return of_feed.into_iter().all(|watch| self.deliver_to(stream, Some(watch), message));
        }
        self.deliver_to(stream, None, message)
    }

    fn deliver_to(&mut self, stream: UpstreamStreamId, watch: Option<WatchKey>, message: &Bytes) -> bool {
        let (client, hub) = (&self.client, &mut self.hub);
        let delivered =
            client.send_written(message.len() + 16, |to| hub.deliver_directly(stream, watch, message, to));
        if let Some(Revision(revision)) = delivered {
            self.note_reply(revision);
        }
        delivered.is_some()
    }

    /// Tries again after a feed has caught up.
    pub(super) fn join_caught_up(&mut self) {
        if let Some(joins) = &mut self.session.joins {
            joins.end_wait();
        }
        self.join_feeds();
    }

    /// Lets the watches join feeds that can.
    pub(super) fn join_feeds(&mut self) {
        let Some(joins) = &mut self.session.joins else { return };
        let mut outputs = Vec::new();
        let (hub, upstream) = (&mut self.hub, &mut self.upstream);
        let behind = joins.join(JoiningStream { hub, route: &self.session.route, upstream }, &mut outputs);
        if let Some(behind) = behind {
            self.wait_for(behind.caught_up().map(|()| FinishedRead::FeedCaughtUp).boxed_local());
        }
        for output in outputs {
            self.carry_out(output);
        }
    }
}
