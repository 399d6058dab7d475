//! Progress: what may be believed of upstream's, when the client is told, how idle watches stay fresh.
//!
//! Owns: manual progress on both sides, and the timed one. Must not know: how a watch gets onto a stream.
//! Invariants: a stream-wide progress counts only for watches that the member certainly knew when it spoke; the client is
//! told one revision for all of its watches, never below what it was told before.

use tokio::time::Instant;

use super::{Hub, Incarnation, NO_WATCH, Place, Response, Stream, StreamId, Watch, wire};

/// How often upstream is asked again at once when the answers of several streams do not meet.
const TRIES: u32 = 3;

/// One question of the client's, until it is answered. etcd drops those that it cannot answer at once; clients that
/// ask once would wait for ever, so it is kept.
#[derive(Debug, Default)]
pub(super) struct Round {
    /// When to answer from what is known, or ask again; set once upstream was asked.
    deadline: Option<Instant>,
    tries: u32,
    /// All have spoken, and it was not enough: nothing to do before the deadline.
    in_vain: bool,
    /// Asked again meanwhile: this answer may be older than that question.
    again: bool,
}

impl Round {
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.deadline
    }
}

impl Hub {
    /// The client's request has its turn.
    pub(super) fn ask_progress(&mut self) {
        match &mut self.round {
            Some(round) => round.again = true,
            None => self.round = Some(Round::default()),
        }
    }

    /// A watch moved: the question waits until all stand upstream again.
    pub(super) fn interrupt_round(&mut self) {
        if let Some(round) = &mut self.round {
            round.deadline = None;
        }
    }

    pub(super) fn tick(&mut self, now: Instant) {
        if self.round.as_ref().and_then(Round::deadline).is_some_and(|deadline| now >= deadline)
            && !self.answer_round()
        {
            self.interrupt_round();
        }
        if self.refresh_at.is_some_and(|at| now >= at) {
            self.refresh_at = self.timing.idle_progress.map(|idle| now + idle);
            self.ask_upstream();
        }
    }

    /// Starts, answers or drops the client's question, as far as it can go now.
    pub(super) fn go_round(&mut self, now: Instant) {
        if self.round.is_none() {
            return;
        }
        let told = || self.watches.values().filter(|watch| watch.id.is_some());
        if told().next().is_none() {
            // As etcd: nothing watches, nothing is said.
            self.round = None;
        } else if self.streams.values().any(|stream| stream.is_restoring()) {
            // Known without a look at every watch, which each answer to thousands of creates would cost.
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
            // A member whose progress may run ahead of its events is not asked: what is known must do.
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
            // The streams never agree while events go on: bring their watches together.
            round.tries = 0;
            self.retire_oldest();
            self.find_places(now);
            self.send_creates();
        }
    }

    fn ask_upstream(&mut self) {
        let mut asked = Vec::new();
        for (id, stream) in &mut self.streams {
            if stream.trusts_progress() && !stream.ids.is_empty() {
                stream.asked += 1;
                asked.push(*id);
            }
        }
        for id in asked {
            self.send(id, wire::progress_message());
        }
    }

    /// Tells the client how far all of its watches are, if that is no step back and the cluster got there.
    fn answer_round(&mut self) -> bool {
        let (mut lowest, mut highest, mut begun) = (i64::MAX, 0, 0);
        for cursor in self.watches.values().filter(|watch| watch.id.is_some()).map(|watch| &watch.cursor) {
            lowest = lowest.min(cursor.floor());
            begun = begun.max(cursor.first().saturating_sub(1));
            highest = highest.max(cursor.floor());
        }
        if self.streams.values().any(|stream| stream.checking.is_some()) {
            // How far the cluster is, is being asked.
            return false;
        }
        // Not below where any of them begins, nor below what was told, nor where the cluster never was.
        if highest > self.known.reached || lowest < begun.max(self.known.delivered).max(1) {
            return false;
        }
        self.known.delivered = lowest;
        let header = Some(self.header_at(lowest));
        self.emit(&Response { header, watch_id: NO_WATCH, ..Response::default() });
        self.round = self.round.take().filter(|round| round.again).map(|_| Round::default());
        true
    }

    /// Upstream has told everything up to `revision`: to one watch, or to all that it knew when it said so.
    pub(super) fn progressed(&mut self, id: StreamId, revision: i64, response: Response) {
        if response.watch_id == NO_WATCH {
            return self.stream_progressed(id, revision);
        }
        let Some(key) = self.streams.get(&id).and_then(|stream| stream.ids.get(&response.watch_id)) else {
            return;
        };
        let Some(watch) = self.watches.get_mut(key) else { return };
        let (Some(watch_id), Place::Upstream(_, incarnation)) = (watch.id, &mut watch.place) else { return };
        if incarnation.created.is_none() {
            return;
        }
        incarnation.heard = true;
        if watch.cursor.progress(revision) && watch.create.progress_notify {
            self.known.delivered = self.known.delivered.max(revision);
            self.emit(&Response { watch_id, ..response });
        }
    }

    /// A member may have spoken before it knew a watch and be heard only after that watch's Created: the two travel on
    /// different channels inside etcd. So it counts for a watch only where one of these proves the order: the watch
    /// told something itself; something later than its Created was told on the stream (etcd speaks of revisions in
    /// order there); or more answers came than there were questions before its create.
    fn stream_progressed(&mut self, id: StreamId, revision: i64) {
        let Some(stream) = self.streams.get_mut(&id).filter(|stream| stream.trusts_progress()) else {
            return;
        };
        stream.answered += 1;
        for watch in self.watches.values() {
            if let Some((incarnation, created)) = watch.live_on(id)
                && stream.highest > created
            {
                // Whatever was asked before its create has been answered, or never will be.
                stream.answered = stream.answered.max(incarnation.asked_before + 1);
            }
        }
        let mut unsure = false;
        for watch in self.watches.values_mut().filter(|watch| watch.id.is_some()) {
            let Some((incarnation, _)) = watch.live_on(id) else { continue };
            if incarnation.heard || stream.answered > incarnation.asked_before {
                watch.confirmed = true;
                watch.cursor.progress(revision);
            } else {
                unsure = true;
            }
        }
        if unsure && self.round.is_some() {
            // One more answer is one more that came after its create.
            stream.asked += 1;
            self.send(id, wire::progress_message());
        }
    }
}

impl Stream {
    fn is_restoring(&self) -> bool {
        self.restoring > 0 || !self.waiting.is_empty() || self.checking.is_some()
    }
}

impl Watch {
    /// Its incarnation on that stream, and its Created's revision, once that came.
    fn live_on(&self, stream: StreamId) -> Option<(&Incarnation, i64)> {
        match &self.place {
            Place::Upstream(at, incarnation) if *at == stream => Some((incarnation, incarnation.created?)),
            _ => None,
        }
    }
}
