//! Driver of a client's Watch stream: moves bytes between client, hub and upstream streams. Holds no rules.
//!
//! Owns: the order in which inputs are polled. Must not know: the meaning of a message.
//! Invariants: while the client does not take the queued messages, no upstream stream is read, so that flow
//! control reaches etcd and no other client waits; the client's departure ends the whole session; a client
//! without any answer so far is refused when a limit leaves no room for an upstream connection.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::future::pending;
use std::ops::ControlFlow;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::StreamExt;
use futures_util::future::LocalBoxFuture;
use futures_util::stream::FuturesUnordered;
use smallvec::SmallVec;
use tokio::time::{Instant, Sleep};

use crate::watch::feed_joins::FeedJoins;
use crate::watch::hub::{
    Hub, HubInput, HubOutput, HubTiming, StreamLoss, UpstreamStreamId, WatchKey, WatchStreamEnd,
    WatchStreamReport,
};
use crate::watch::limited_watches::WatchPauses;
use crate::watch::request_gate::{RuleChange, WatchRequestGate};
use crate::watch::stream_state::{UpstreamStreamEvent, UpstreamStreamState};
use crate::watch::upstream_stream::{SourceOpenFailure, WatchRoute};
use crate::watch::watch_messages::progress_message;
use keyward_base::byte_account::HeldBytes;
use keyward_base::tasks::poll_timer::poll_timer;
use keyward_base::tasks::wake_gate::WakeGate;
use keyward_cluster::choose::MemberTarget;
use keyward_cluster::cluster_outage::UpstreamLink;
use keyward_downstream::client_replies::ReplySender;
use keyward_downstream::request_messages::{ClientRequestItem, RequestBody, RequestMessages};
use keyward_downstream::stream_budget::{FREE, SMALL};
use keyward_downstream::watch_starts::{WatchStart, WatchStarts};
use keyward_etcd::identity::MemberId;
use keyward_etcd::refusal::Refusal;
use keyward_etcd::rpc::frame::{PREFIX, encode};
use keyward_etcd::rpc::header::{self, AnswerProgress};
use keyward_etcd::rpc::namespace::Namespace;
use keyward_etcd::rpc::namespace::lease_ids::LeaseScope;
use keyward_etcd::rpc::schema::MessageId;
use keyward_upstream::bidi::BidiEvent;

mod feed_delivery;
mod finished_reads;

use finished_reads::FinishedRead;

/// The surroundings of a Watch stream.
pub struct WatchSession {
    /// The upstream sender, the etcd user and the client's headers.
    pub route: WatchRoute,
    /// The size limit of a request message, in bytes.
    pub largest_request: usize,
    /// Counts upstream streams opened to resume watches.
    pub resumed: prometheus_client::metrics::counter::Counter,
    /// The connection's watches "from now" not yet registered by a member.
    pub starts: Rc<WatchStarts>,
    /// The link state of this client stream: up while an upstream stream serves it.
    pub link: Rc<UpstreamLink>,
    /// The decision on each request.
    pub gate: Box<WatchRequestGate>,
    /// The feeds that the stream's watches may join; `None` if none may.
    pub joins: Option<Box<FeedJoins>>,
    /// The caller's namespace: the hub holds creates with its prefix, and events without.
    pub namespace: Option<Arc<Namespace>>,
}

/// Messages up to this size may be delivered without the hub's other steps; larger ones are counted as held.
const DIRECT: usize = SMALL - 64;

/// Events of upstream taken in a row before the task yields to other tasks.
const IN_A_ROW: u32 = 128;

/// The state of a running session.
pub(super) struct RunningWatchSession {
    session: WatchSession,
    hub: Hub,
    client: ReplySender,
    requests: RequestMessages,
    /// False after the client's half-close.
    reads_requests: bool,
    /// In the order of opening; nearly always a single one.
    upstream: SmallVec<[(UpstreamStreamId, UpstreamStreamState); 1]>,
    /// `None` without a read: the set holds memory even when empty.
    reads: Option<Box<FuturesUnordered<LocalBoxFuture<'static, FinishedRead>>>>,
    /// Counts the bytes of unfinished revisions in the hub.
    unfinished: HeldBytes,
    tried: Box<[MemberId]>,
    /// True once the client was sent a message.
    has_replied: bool,
    /// As in `session.link`, which lies in memory of its own: an event does not touch the link.
    is_linked: bool,
    /// Watches "from now" not yet registered by a member: writes of the same connection wait behind them.
    starts: BTreeMap<WatchKey, WatchStart>,
    /// Rotates the upstream stream polled first, so that a busy stream does not starve the others.
    turn: u32,
    ended: Option<Box<Refusal>>,
    /// Ready when a reason outside the stream ends the stream.
    limits: LocalBoxFuture<'static, Refusal>,
    /// True if `session.gate` has limits of the caller: an event of most streams does not touch the gate.
    has_usage_limits: bool,
    /// Stands before the waits that are rarely over: limits, permissions, requests, reads and the timer.
    gate: WakeGate,
    /// The waits polled behind the gate last.
    gated: GatedWaits,
    timer: Option<Pin<Box<Sleep>>>,
}

/// The waits behind the gate that are wanted now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct GatedWaits {
    requests: bool,
    reads: bool,
    /// The end of the wait for the timer.
    due: Option<Instant>,
}

/// An event behind the gate.
enum GatedEvent {
    Limit(Refusal),
    Change(RuleChange),
    Request(ClientRequestItem),
    Read(FinishedRead),
    Timer,
}

/// The end of a session: with a refusal for the client, or without a client.
pub(super) type SessionEnd = Option<Refusal>;

impl RunningWatchSession {
    pub(super) fn new(
        session: WatchSession,
        timing: HubTiming,
        body: RequestBody,
        client: ReplySender,
    ) -> Self {
        Self {
            hub: Hub::new(Instant::now(), timing),
            client,
            requests: RequestMessages::new(body, session.largest_request),
            reads_requests: true,
            unfinished: session.route.share.hold(0),
            limits: pending().boxed_local(),
            has_usage_limits: session.gate.usage.is_some(),
            session,
            upstream: SmallVec::new(),
            reads: None,
            tried: Box::default(),
            has_replied: false,
            is_linked: false,
            starts: BTreeMap::new(),
            turn: 0,
            ended: None,
            gate: WakeGate::default(),
            gated: GatedWaits::default(),
            timer: None,
        }
    }

    /// Ends the stream once `limits` is ready.
    pub(super) fn set_limits(&mut self, limits: LocalBoxFuture<'static, Refusal>) {
        self.limits = limits;
        self.gate.open();
    }

    /// Carries on with every input that is ready. Ready at the end of the stream.
    ///
    /// The order: the client's departure, limits (a revoked client gets no further message), changed
    /// permissions, the client's requests, reads and timers, upstream. While the client leaves messages
    /// untaken, upstream is not read; streams being opened and the turns of resumed streams go on.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<SessionEnd> {
        for _ in 0..IN_A_ROW {
            if let Some(refusal) = self.ended.take() {
                return Poll::Ready(Some(*refusal));
            }
            if self.client.poll_gone(cx).is_ready() {
                return Poll::Ready(None);
            }
            let quiet = self.is_quiet(cx);
            let pauses = self.pauses();
            if let Poll::Ready(event) = self.poll_gated(cx, quiet, pauses) {
                if let ControlFlow::Break(end) = self.gated_event(event, quiet) {
                    return Poll::Ready(end);
                }
                continue;
            }
            let reads = quiet && pauses.events.is_none();
            let Poll::Ready((stream, event)) = self.poll_upstream(cx, reads) else { return Poll::Pending };
            self.event(stream, event);
            if !quiet {
                // The stream's turn is of no use before the client has taken the queued messages.
                self.end_turns(|_, _, _| true);
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Ends the stream: upstream first, then the client, if there is one.
    pub(super) fn close(&mut self, end: SessionEnd) {
        self.upstream.clear();
        if let Some(refusal) = end {
            self.client.end(refusal);
        }
    }

    /// The stream's watches now.
    pub(super) fn report(&self) -> WatchStreamReport {
        WatchStreamReport {
            ranges: self.hub.list_watches(),
            is_behind: !self.client.has_room(),
            next_revision: self.hub.lowest_next_revision(),
        }
    }

    /// The number of watches, and the bytes held for the client.
    pub(super) fn held(&self) -> (u64, u64) {
        (self.hub.watch_count() as u64, self.session.route.share.held() as u64)
    }

    /// True if the client has taken enough of its messages. Otherwise the task is woken once the client has.
    fn is_quiet(&self, cx: &Context<'_>) -> bool {
        // Over the shard's budget, a client with untaken messages is sent no further messages.
        if self.client.is_behind() && !self.session.route.share.fits() {
            self.client.poll_all_taken(cx).is_ready()
        } else {
            self.client.has_room() || self.client.poll_room(cx).is_ready()
        }
    }

    /// Most streams need not look into the gate.
    fn pauses(&mut self) -> WatchPauses {
        if self.has_usage_limits { self.session.gate.pauses() } else { WatchPauses::NONE }
    }

    fn poll_gated(&mut self, cx: &Context<'_>, quiet: bool, pauses: WatchPauses) -> Poll<GatedEvent> {
        let hub_due = self.hub.next_deadline().filter(|_| quiet);
        let wanted = GatedWaits {
            requests: quiet && pauses.requests.is_none() && self.reads_requests && self.hub.accepts_client(),
            reads: quiet && self.reads.is_some(),
            due: hub_due
                .into_iter()
                .chain(self.turn_ends())
                .chain(pauses.requests)
                .chain(pauses.events)
                .min(),
        };
        if wanted != self.gated {
            self.gated = wanted;
            self.gate.open();
        }
        let Self { limits, requests, reads, timer, session, .. } = self;
        self.gate.poll(cx, |cx| {
            if let Poll::Ready(refusal) = limits.poll_unpin(cx) {
                return Poll::Ready(GatedEvent::Limit(refusal));
            }
            if let Some(change) = session.gate.take_change(cx) {
                return Poll::Ready(GatedEvent::Change(change));
            }
            if wanted.requests
                && let Poll::Ready(asked) = pin!(requests.next()).poll(cx)
            {
                return Poll::Ready(GatedEvent::Request(asked));
            }
            if wanted.reads
                && let Some(all) = reads
            {
                match all.poll_next_unpin(cx) {
                    Poll::Ready(Some(read)) => return Poll::Ready(GatedEvent::Read(read)),
                    Poll::Ready(None) => *reads = None,
                    Poll::Pending => {}
                }
            }
            match wanted.due {
                Some(due) => poll_timer(timer, due, cx).map(|()| GatedEvent::Timer),
                None => Poll::Pending,
            }
        })
    }

    fn gated_event(&mut self, event: GatedEvent, quiet: bool) -> ControlFlow<SessionEnd> {
        match event {
            GatedEvent::Limit(refusal) => return ControlFlow::Break(Some(refusal)),
            GatedEvent::Change(RuleChange::Permissions) => self.end_denied(),
            GatedEvent::Change(RuleChange::Limits) => {
                self.has_usage_limits = self.session.gate.follow_limits(self.hub.watch_count());
            }
            GatedEvent::Request(asked) => {
                let start = self.session.starts.begin();
                self.asked(asked, &start)?;
            }
            GatedEvent::Read(read) => self.read(read),
            GatedEvent::Timer => {
                let now = Instant::now();
                if quiet && self.hub.next_deadline().is_some_and(|due| due <= now) {
                    self.join_feeds();
                    self.input(HubInput::Tick);
                }
                self.end_turns(|_, _, until| until <= now);
            }
        }
        ControlFlow::Continue(())
    }

    /// The next event of any upstream stream; open streams are polled only with `read`. A stream being opened
    /// is always polled: it may hold a place in a member's resume queue ahead of other streams.
    fn poll_upstream(
        &mut self,
        cx: &mut Context<'_>,
        read: bool,
    ) -> Poll<(UpstreamStreamId, UpstreamStreamEvent)> {
        let count = self.upstream.len();
        for step in 0..count {
            let (stream, state) = &mut self.upstream[(self.turn as usize % count + step) % count];
            let is_driven = read || matches!(state, UpstreamStreamState::Opening(_));
            if is_driven && let Poll::Ready(event) = state.poll(cx) {
                return Poll::Ready((*stream, event));
            }
        }
        Poll::Pending
    }

    /// Takes every request that arrived with the stream's header, unless the stream has ended meanwhile. A
    /// write behind the stream waits until then.
    pub(super) fn take_first_requests(&mut self, start: &WatchStart) -> ControlFlow<SessionEnd> {
        if let Some(refusal) = (&mut self.limits).now_or_never() {
            return ControlFlow::Break(Some(refusal));
        }
        while self.reads_requests
            && self.ended.is_none()
            && self.hub.accepts_client()
            && let Some(asked) = self.requests.next_without_yield().now_or_never()
        {
            self.asked(asked, start)?;
        }
        ControlFlow::Continue(())
    }

    /// Takes a request of the client; `start` is kept for a watch "from now".
    fn asked(&mut self, asked: ClientRequestItem, start: &WatchStart) -> ControlFlow<SessionEnd> {
        match asked {
            ClientRequestItem::Message(message) => {
                let floor = &self.session.route.floor;
                self.hub.raise_shown_revision(floor.cluster(), floor.revision());
                let Some(message) = self.in_namespace(message) else {
                    return ControlFlow::Break(Some(WatchStreamEnd::InvalidRequest.refusal()));
                };
                let newest = self.hub.newest();
                let input = self.session.gate.input(message);
                self.input(input);
                if self.hub.newest() != newest && self.hub.is_unregistered(self.hub.newest()) {
                    self.starts.insert(self.hub.newest(), start.clone());
                }
            }
            ClientRequestItem::End => self.reads_requests = false,
            ClientRequestItem::Bad(refusal) => return ControlFlow::Break(Some(refusal)),
            ClientRequestItem::Gone => return ControlFlow::Break(None),
        }
        ControlFlow::Continue(())
    }

    /// The request with the namespace's prefix; `None` if a request cannot be spliced.
    fn in_namespace(&self, message: Bytes) -> Option<Bytes> {
        let Some(namespace) = &self.session.namespace else { return Some(message) };
        let max = self.session.largest_request;
        let spliced =
            namespace.splice_request(MessageId::WatchRequest, &message, max, LeaseScope::Own).ok()?;
        Some(spliced.map_or(message, |spliced| spliced.framed.slice(PREFIX..)))
    }

    /// The response without the namespace's prefix; `None` if a response shows another key.
    fn out_of_namespace(&self, message: Bytes) -> Option<Bytes> {
        let Some(namespace) = &self.session.namespace else { return Some(message) };
        let spliced = namespace.splice_answer(self.session.route.stream.method, &message).ok()?;
        Some(spliced.map_or(message, |framed| framed.slice(PREFIX..)))
    }

    fn input(&mut self, input: HubInput) {
        self.step(|hub, now, outputs| hub.handle(now, input, outputs));
    }

    /// Lets the hub take a step, and carries out the outputs.
    fn step(&mut self, step: impl FnOnce(&mut Hub, Instant, &mut Vec<HubOutput>)) {
        let mut outputs = Vec::new();
        let before = self.hub.cluster();
        for (watch, start) in &self.starts {
            if let Some(revision) = start.overtaken() {
                self.hub.note_overtaking_write(*watch, revision);
            }
        }
        step(&mut self.hub, Instant::now(), &mut outputs);
        self.starts.retain(|watch, _| self.hub.is_unregistered(*watch));
        self.session.gate.keep_watches(self.hub.watch_count());
        if before.is_some() && before != self.hub.cluster() {
            self.session.route.floor.follow(self.hub.cluster());
        }
        for output in outputs {
            self.carry_out(output);
        }
        if let Some(joins) = &mut self.session.joins {
            joins.take_in(&self.hub, &self.session.route);
        }
        self.unfinished.resize(self.hub.held().saturating_sub(FREE));
        self.end_turns(|hub, stream, _| hub.is_restored(stream));
    }

    /// Ends the watches that the caller's changed permissions do not permit any more.
    fn end_denied(&mut self) {
        let Some(access) = self.session.gate.access.take() else { return };
        let rules = RefCell::new(Vec::new());
        let is_permitted = |create: &[u8]| {
            let permitted = access.permit_again(create);
            permitted.map_err(|rule| rules.borrow_mut().push(rule)).is_ok()
        };
        self.step(|hub, now, outputs| hub.end_denied(now, is_permitted, outputs));
        for rule in rules.into_inner() {
            (self.session.gate.refused)(&Refusal::PERMISSION_DENIED, Some(&rule));
        }
        self.session.gate.access = Some(access);
    }

    /// The earliest end of a stream's turn to be resumed. Applies also while upstream is unread because the
    /// client takes no messages.
    fn turn_ends(&self) -> Option<Instant> {
        self.upstream.iter().filter_map(|(_, state)| state.turn_ends()).min()
    }

    /// Ends the turn of each stream for which `is_over` is true, given the latest end of the turn.
    fn end_turns(&mut self, is_over: impl Fn(&Hub, UpstreamStreamId, Instant) -> bool) {
        for (stream, upstream) in &mut self.upstream {
            if let UpstreamStreamState::Open(source) = upstream
                && source.turn_ends().is_some_and(|until| is_over(&self.hub, *stream, until))
            {
                source.end_turn();
            }
        }
    }

    fn carry_out(&mut self, output: HubOutput) {
        match output {
            HubOutput::Open { stream, credential, attempt, resumes } => {
                if resumes {
                    self.session.resumed.inc();
                }
                let opening = self.session.route.open(credential, attempt, self.tried.to_vec());
                self.upstream.push((stream, UpstreamStreamState::Opening(Box::new(opening))));
            }
            HubOutput::Close { stream } => {
                self.remove(stream);
                self.note_loss();
            }
            HubOutput::Send { stream, message } => match self.state_of(stream) {
                Some(UpstreamStreamState::Open(source)) => source.send(&message),
                Some(UpstreamStreamState::Feed(reader)) if message == progress_message() => {
                    reader.ask_progress();
                }
                // A feed goes on without the watch.
                Some(UpstreamStreamState::Feed(_) | UpstreamStreamState::Opening(_)) | None => {}
            },
            HubOutput::Check { watch, stream, key } => self.check(watch, stream, key),
            HubOutput::Refused(create, refusal) => self.session.gate.note_refused(&create, &refusal),
            HubOutput::Emit(message) => {
                if let Some(revision) = header::revision_of(&message) {
                    self.note_reply(revision);
                }
                self.has_replied = true;
                let framed = encode(&message);
                let keep = self.session.route.share.hold_message(framed.len());
                self.client.send(framed, keep);
            }
            HubOutput::End(end) => self.end(end.refusal()),
        }
    }

    /// Notes a response to the client with this revision in its header.
    fn note_reply(&mut self, revision: i64) {
        self.has_replied = true;
        let floor = &self.session.route.floor;
        // Responses of a cluster no longer served by calls do not raise the connection's floor.
        if self.hub.cluster().zip(floor.cluster()).is_none_or(|(ours, its)| ours == its) {
            floor.raise(AnswerProgress { revision, term: 0 });
        }
    }

    fn end(&mut self, refusal: Refusal) {
        // A client that does not read its end of stream must not hold upstream resources.
        self.upstream.clear();
        self.ended = Some(Box::new(refusal));
    }

    fn state_of(&mut self, stream: UpstreamStreamId) -> Option<&mut UpstreamStreamState> {
        self.upstream.iter_mut().find(|(id, _)| *id == stream).map(|(_, state)| state)
    }

    fn remove(&mut self, stream: UpstreamStreamId) -> Option<UpstreamStreamState> {
        let at = self.upstream.iter().position(|(id, _)| *id == stream)?;
        Some(self.upstream.remove(at).1)
    }

    fn event(&mut self, stream: UpstreamStreamId, event: UpstreamStreamEvent) {
        self.turn = self.turn.wrapping_add(1);
        match event {
            UpstreamStreamEvent::Opened(source) => {
                let traits = source.traits;
                if let Some(state) = self.state_of(stream) {
                    *state = UpstreamStreamState::Open(source);
                }
                self.input(HubInput::Opened { stream, traits });
            }
            UpstreamStreamEvent::Failed(SourceOpenFailure { why, member }) => {
                self.try_member_last(member);
                self.remove(stream);
                self.input(HubInput::Lost { stream, why });
            }
            UpstreamStreamEvent::Came(BidiEvent::Message(message)) => {
                self.tried = Box::default();
                if !std::mem::replace(&mut self.is_linked, true) {
                    self.session.link.set_up();
                }
                let Some(message) = self.out_of_namespace(message) else { return self.give_up(stream) };
                if !self.deliver(stream, &message) {
                    self.input(HubInput::Upstream { stream, message });
                    if self.unfinished.bytes() > 0 && !self.session.route.share.fits() {
                        self.give_up(stream);
                    }
                }
                if FeedJoins::is_turn(self.turn) {
                    self.join_feeds();
                }
            }
            UpstreamStreamEvent::FeedEnd(failed) => {
                self.try_member_last(failed);
                self.remove(stream);
                self.note_loss();
                self.input(HubInput::Lost { stream, why: StreamLoss::Upstream });
            }
            UpstreamStreamEvent::TooMuch => self.give_up(stream),
            UpstreamStreamEvent::Came(end) if self.is_refused_by(&end) => {}
            UpstreamStreamEvent::Came(end) => {
                let Some(UpstreamStreamState::Open(source)) = self.remove(stream) else { return };
                let why = source.ended(&self.session.route.stream.upstream, &end);
                if why == StreamLoss::Upstream {
                    self.try_member_last(Some(source.member().id));
                }
                self.note_loss();
                self.input(HubInput::Lost { stream, why });
            }
        }
    }

    /// Handles a stream that could not be opened, for want of room or since no member accepts the user's
    /// certificate. A client without any answer so far is refused (returns true); a client with watches
    /// waits, as for a member.
    fn is_refused_by(&mut self, end: &BidiEvent) -> bool {
        let WatchRoute { stream, home, .. } = &self.session.route;
        let refusal = stream.refusal_of(MemberTarget::Home(*home), end);
        match refusal.filter(|_| !self.has_replied) {
            Some(refusal) => self.end(refusal),
            None => return false,
        }
        true
    }

    /// Gives up a stream because the shard holds too many bytes, or a response cannot be shown in the
    /// client's namespace. The stream is opened again later, and its
    /// unfinished revision is received again. The member is not suspected, and no missing leader is reported.
    fn give_up(&mut self, stream: UpstreamStreamId) {
        tracing::debug!("a watch stream is given up: too much is held, or a key outside of a namespace");
        self.remove(stream);
        self.note_loss();
        self.input(HubInput::Lost { stream, why: StreamLoss::Upstream });
    }

    fn try_member_last(&mut self, member: Option<MemberId>) {
        let WatchRoute { stream, home, .. } = &self.session.route;
        let mut tried = std::mem::take(&mut self.tried).into_vec();
        stream.upstream.try_last(MemberTarget::Home(*home), &mut tried, member);
        self.tried = tried.into_boxed_slice();
    }

    /// Marks the link as down if no upstream stream is open any more.
    fn note_loss(&mut self) {
        if self.upstream.iter().all(|(_, state)| matches!(state, UpstreamStreamState::Opening(_))) {
            self.is_linked = false;
            self.session.link.set_down();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each idle watch with a stream of its own holds a session.
    #[test]
    fn a_session_is_small() {
        // With the counts of its `Rc` and `RefCell` within a size class of the allocator.
        assert!(size_of::<RunningWatchSession>() <= 1536 - 24, "{}", size_of::<RunningWatchSession>());
    }
}
