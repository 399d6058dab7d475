//! Reads and waits of a session beside its streams.
//!
//! Owns: the begin and the end of each. Must not know: why the hub asks for a read.

use std::sync::Arc;

use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::future::LocalBoxFuture;

use super::RunningWatchSession;
use crate::watch::hub::{HubInput, UpstreamStreamId, WatchKey};
use crate::watch::revision_check::{CheckConnection, RevisionCheck};
use crate::watch::stream_state::UpstreamStreamState;
use keyward_upstream::bidi::BidiEvent;

/// The end of a read or of a wait beside the streams.
pub(super) enum FinishedRead {
    Revision(HubInput, CheckConnection),
    FeedCaughtUp,
}

impl RunningWatchSession {
    pub(super) fn read(&mut self, read: FinishedRead) {
        match read {
            FinishedRead::Revision(input, room) => {
                if room == CheckConnection::Found || !self.is_refused_by(&BidiEvent::NoRoom) {
                    self.input(input);
                }
            }
            FinishedRead::FeedCaughtUp => self.join_caught_up(),
        }
    }

    pub(super) fn check(&mut self, watch: WatchKey, stream: UpstreamStreamId, key: Bytes) {
        let Some(UpstreamStreamState::Open(source)) = self.state_of(stream) else { return };
        let check = RevisionCheck { watch, stream, key, member: Arc::clone(source.member()) };
        let reading = check.read(self.session.route.clone());
        self.wait_for(reading.map(|(input, room)| FinishedRead::Revision(input, room)).boxed_local());
    }

    pub(super) fn wait_for(&mut self, read: LocalBoxFuture<'static, FinishedRead>) {
        self.reads.get_or_insert_default().push(read);
        self.gate.open();
    }
}
