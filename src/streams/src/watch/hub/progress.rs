//! Progress: trust in upstream's progress, answers to the client's progress requests, and refresh of idle
//! watches.
//!
//! Owns: manual progress on both sides, and timed progress. Must not know: how a watch gets onto a stream.
//! Invariants: a stream-wide progress counts only for watches certainly registered when the member spoke; the
//! client is told a single revision for all of its watches, never below a revision told before.

use tokio::time::Instant;

use super::{
    Hub, HubStream, HubWatch, NO_WATCH, SplicedWatchResponse, UpstreamStreamId, WatchPlacement,
    WatchRegistration, watch_messages,
};

/// Number of immediate repeats of the upstream requests when the progress of several streams does not allow a
/// common answer.
const TRIES: u32 = 3;

/// A progress request of the client, until answered. etcd drops a request if it cannot answer at once; a
/// client that asks only once would wait for ever, so the hub keeps the request.
#[derive(Debug, Default)]
pub(super) struct ProgressRound {
    /// Time to answer from known progress, or to ask upstream again; set once upstream was asked.
    deadline: Option<Instant>,
    tries: u32,
    /// Every watch was covered and no answer was possible: no action before the deadline.
    in_vain: bool,
    /// The client asked again meanwhile: this answer may be older than the second request.
    requested_again: bool,
}

impl ProgressRound {
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.deadline
    }
}

impl Hub {
    /// Starts a round for the client's progress request, once its turn has come.
    pub(super) fn ask_progress(&mut self) {
        match &mut self.round {
            Some(round) => round.requested_again = true,
            None => self.round = Some(ProgressRound::default()),
        }
    }

    /// Restarts the round after a watch was moved: the request waits until all watches are registered
    /// upstream again.
    pub(super) fn interrupt_round(&mut self) {
        if let Some(round) = &mut self.round {
            round.deadline = None;
        }
    }

    pub(super) fn tick(&mut self, now: Instant) {
        if self.round.as_ref().and_then(ProgressRound::deadline).is_some_and(|deadline| now >= deadline)
            && !self.answer_round()
        {
            self.interrupt_round();
        }
        if self.refresh_at.is_some_and(|at| now >= at) {
            self.refresh_at = self.timing.idle_progress.map(|idle| now + idle);
            self.ask_upstream();
        }
    }

    /// Starts, answers or drops the client's progress request, as far as possible now.
    pub(super) fn advance_progress_round(&mut self, now: Instant) {
        if self.round.is_none() {
            return;
        }
        let told = || self.watches.values().filter(|watch| watch.id.is_some());
        if told().next().is_none() {
            // As in etcd, a stream without watches gets no answer.
            self.round = None;
        } else if self.streams.values().any(|stream| stream.is_restoring()) {
            // A cheap test: a walk over all watches for each answer to thousands of creates would be
            // expensive.
        } else if told().all(|watch| watch.is_live()) {
            if self.round.as_ref().is_some_and(|round| round.deadline.is_none()) {
                self.begin_round(now);
            }
            self.finish_round(now);
        }
    }

    fn begin_round(&mut self, now: Instant) {
        self.ask_upstream();
        for watch in self.watches.values_mut() {
            let trusts = |stream| self.streams.get(&stream).is_some_and(|stream| stream.trusts_progress());
            // A member whose progress may run ahead of its events is not asked: the known progress must
            // suffice.
            watch.confirmed = !watch.place.stream().is_some_and(trusts);
        }
        if let Some(round) = &mut self.round {
            round.deadline = Some(now + self.timing.progress_grace);
            round.in_vain = false;
        }
    }

    fn finish_round(&mut self, now: Instant) {
        if self.round.as_ref().is_none_or(|round| round.in_vain)
            || self.watches.values().any(|watch| watch.id.is_some() && !watch.confirmed)
            || self.answer_round()
        {
            return;
        }
        let several = self.streams.len() > 1;
        let Some(round) = &mut self.round else { return };
        if !several {
            round.in_vain = true;
        } else if round.tries < TRIES {
            round.tries += 1;
            self.begin_round(now);
        } else {
            // Under steady writes the streams never agree: move the watches onto fewer streams.
            round.tries = 0;
            self.leave_feeds();
            if self.streams.len() > 1 {
                self.retire_oldest();
            }
            self.assign_streams(now);
            self.send_creates();
        }
    }

    fn ask_upstream(&mut self) {
        let mut asked = Vec::new();
        for (id, stream) in self.streams.iter_mut() {
            if stream.trusts_progress() && !stream.ids.is_empty() {
                stream.progress_requests += 1;
                asked.push(*id);
            }
        }
        for id in asked {
            self.send(id, watch_messages::progress_message());
        }
    }

    /// Tells the client the lowest revision reached by all watches, unless the revision would go back or is
    /// not known to be reached by the cluster. Returns true if told.
    fn answer_round(&mut self) -> bool {
        let (mut lowest, mut highest, mut begun) = (i64::MAX, 0, 0);
        for cursor in self.watches.values().filter(|watch| watch.id.is_some()).map(|watch| &watch.cursor) {
            lowest = lowest.min(cursor.floor());
            begun = begun.max(cursor.first().saturating_sub(1));
            highest = highest.max(cursor.floor());
        }
        if self.streams.values().any(|stream| stream.checking.is_some()) {
            // The cluster's revision is not known before the linearizable read is back.
            return false;
        }
        // A watch that begins later than the cluster's revision of today proves nothing by its start: after a
        // restore of an older backup, the cluster may not have reached the start again.
        if self.watches.values().any(|watch| watch.id.is_some() && !self.is_floor_proven(watch)) {
            return false;
        }
        // Never below the start of a watch, below a revision told before, or above the cluster's revision.
        if highest > self.cluster_view.reached || lowest < begun.max(self.cluster_view.delivered).max(1) {
            return false;
        }
        self.cluster_view.delivered = lowest;
        let header = Some(self.header_at(lowest));
        self.emit(&SplicedWatchResponse { header, watch_id: NO_WATCH, ..SplicedWatchResponse::default() });
        self.round =
            self.round.take().filter(|round| round.requested_again).map(|_| ProgressRound::default());
        true
    }

    /// True if upstream has reached the watch's floor: by the watch's own messages, or by the watch's stream.
    fn is_floor_proven(&self, watch: &HubWatch) -> bool {
        let floor = watch.cursor.floor();
        let WatchPlacement::Upstream(id, incarnation) = &watch.place else { return true };
        let told = self.streams.get(id).map_or(0, |stream| stream.highest.max(stream.verified));
        floor <= watch.cursor.seen().max(told).max(incarnation.created.unwrap_or(0))
    }

    /// Handles upstream's progress up to `revision`: of a single watch, or of all watches registered when the
    /// member spoke.
    pub(super) fn progressed(&mut self, id: UpstreamStreamId, revision: i64, response: SplicedWatchResponse) {
        if response.watch_id == NO_WATCH {
            return self.stream_progressed(id, revision);
        }
        let Some(key) = self.streams.get(&id).and_then(|stream| stream.ids.get(response.watch_id)) else {
            return;
        };
        let Some(watch) = self.watches.get_mut(&key) else { return };
        let (Some(watch_id), WatchPlacement::Upstream(_, incarnation)) = (watch.id, &mut watch.place) else {
            return;
        };
        if incarnation.created.is_none() {
            return;
        }
        incarnation.has_messages = true;
        if watch.cursor.progress(revision) && watch.create.progress_notify {
            self.cluster_view.delivered = self.cluster_view.delivered.max(revision);
            self.emit(&SplicedWatchResponse { watch_id, ..response });
        }
    }

    /// Applies a stream-wide progress. The client may receive such a progress after a watch's Created
    /// although the member sent it before the registration: etcd delivers the two on different channels. The
    /// progress counts for a watch only with proof of the order: the watch received an event or a progress of
    /// its own; or a revision later than its Created arrived on the stream (etcd sends revisions in order
    /// there); or more progress answers arrived than were requested before the create.
    fn stream_progressed(&mut self, id: UpstreamStreamId, revision: i64) {
        let Some(stream) = self.streams.get_mut(&id).filter(|stream| stream.trusts_progress()) else {
            return;
        };
        stream.progress_settled += 1;
        for watch in self.watches.values() {
            if let Some((incarnation, created)) = watch.live_on(id)
                && stream.highest > created
            {
                // Every progress request sent before the create was answered, or never will be.
                stream.progress_settled = stream.progress_settled.max(incarnation.asked_before + 1);
            }
        }
        let mut unsure = false;
        for watch in self.watches.values_mut().filter(|watch| watch.id.is_some()) {
            let Some((incarnation, _)) = watch.live_on(id) else { continue };
            if incarnation.has_messages || stream.progress_settled > incarnation.asked_before {
                watch.confirmed = true;
                watch.cursor.progress(revision);
            } else {
                unsure = true;
            }
        }
        if unsure && self.round.is_some() {
            // A further answer will certainly come after the create.
            stream.progress_requests += 1;
            self.send(id, watch_messages::progress_message());
        }
    }
}

impl HubStream {
    fn is_restoring(&self) -> bool {
        self.restoring > 0 || !self.waiting.is_empty() || self.checking.is_some()
    }
}

impl HubWatch {
    /// The watch's registration on the stream, and the Created's revision; `None` before the Created.
    fn live_on(&self, stream: UpstreamStreamId) -> Option<(&WatchRegistration, i64)> {
        match &self.place {
            WatchPlacement::Upstream(at, incarnation) if *at == stream => {
                Some((incarnation, incarnation.created?))
            }
            _ => None,
        }
    }
}
