//! Driver of a client's Watch stream: moves bytes between the client, the hub and the upstream streams. Holds
//! no rules.
//!
//! Owns: the order in which inputs are polled. Must not know: the meaning of a message.
//! Invariants: while the client does not take the queued messages, no upstream stream is read, so that flow
//! control reaches etcd and no other client waits; the client's departure ends the whole session; a client
//! without any answer so far is refused when a limit leaves no room for an upstream connection.

use std::any::Any;
use std::collections::{BTreeMap, VecDeque};
use std::ops::ControlFlow;
use std::rc::Rc;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::StreamExt;
use futures_util::future::{LocalBoxFuture, select_all};
use futures_util::stream::FuturesUnordered;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::byte_account::HeldBytes;
use crate::downstream::client_replies::{ReplySender, TakenGuard};
use crate::downstream::request_messages::{ClientRequestItem, RequestBody, RequestMessages};
use crate::downstream::watch_starts::{WatchStart, WatchStarts};
use crate::identity::{MemberId, Revision};
use crate::members::choose::MemberTarget;
use crate::members::cluster_outage::UpstreamLink;
use crate::refusal::{Refusal, Status};
use crate::rpc::frame::encode;
use crate::rpc::header::{self, AnswerProgress};
use crate::upstream::bidi::{BidiEvent, UnfinishedMessageTooLarge};
use crate::upstream::own_requests::{MemberRevision, ReadError, linearizable_revision};
use crate::watch::budget::{FREE, SMALL};
use crate::watch::hub::{
    Hub, HubInput, HubOutput, HubTiming, StreamLoss, UpstreamStreamId, WatchKey, WatchStreamEnd,
};
use crate::watch::upstream_stream::{
    SourceOpenFailure, WatchRoute, WatchSource, WatchSourceOpening, login_loss, refuses_credential,
};

/// The surroundings of a Watch stream.
pub struct WatchSession {
    /// The upstream sender, the etcd user and the client's headers.
    pub route: WatchRoute,
    /// The hub's intervals.
    pub timing: HubTiming,
    /// The size limit of a request message, in bytes.
    pub largest_request: usize,
    /// Signals the drain of the process.
    pub drain: watch::Receiver<Option<Instant>>,
    /// Counts upstream streams opened to resume watches.
    pub resumed: prometheus_client::metrics::counter::Counter,
    /// The connection's watches "from now" not yet registered by a member.
    pub starts: Rc<WatchStarts>,
    /// The link state of this client stream: up while an upstream stream serves it.
    pub link: Rc<UpstreamLink>,
}

/// The present state of an upstream stream.
enum UpstreamStreamState {
    Opening(WatchSourceOpening),
    Open(Box<WatchSource>),
}

impl UpstreamStreamState {
    fn turn_ends(&self) -> Option<Instant> {
        match self {
            Self::Opening(_) => None,
            Self::Open(source) => source.turn_ends(),
        }
    }
}

/// The outcome of a read: a connection was available, or a limit left no room.
#[derive(Clone, Copy, PartialEq, Eq)]
enum CheckConnection {
    Found,
    None,
}

/// An event of an upstream stream.
enum UpstreamStreamEvent {
    Opened(Box<WatchSource>),
    Failed(SourceOpenFailure),
    Came(BidiEvent),
    TooMuch,
}

/// The state of a running session.
struct RunningWatchSession {
    session: WatchSession,
    hub: Hub,
    upstream: BTreeMap<UpstreamStreamId, UpstreamStreamState>,
    reads: FuturesUnordered<LocalBoxFuture<'static, (HubInput, CheckConnection)>>,
    outputs: Vec<HubOutput>,
    client_replies: VecDeque<(Bytes, TakenGuard)>,
    /// Counts the bytes of unfinished revisions in the hub.
    unfinished: HeldBytes,
    tried: Vec<MemberId>,
    /// True once the client was sent a message.
    has_replied: bool,
    /// Watches "from now" not yet registered by a member: writes of the same connection wait behind them.
    starts: BTreeMap<WatchKey, WatchStart>,
    /// Rotates the upstream stream polled first, so that a busy stream does not starve the others.
    turn: usize,
    ended: Option<Status>,
}

impl WatchSession {
    /// Serves the client's stream to its end. `first` stands for the creates that may have arrived with the
    /// stream's header.
    pub async fn run(self, body: RequestBody, client: ReplySender, first: WatchStart) {
        let mut requests = RequestMessages::new(body, self.largest_request);
        let mut drain = self.drain.clone();
        let mut running = RunningWatchSession::new(self);
        let mut reading = match running.asked_first(&mut requests, &first) {
            ControlFlow::Continue(more) => more,
            ControlFlow::Break(None) => return,
            ControlFlow::Break(Some(status)) => return client.end(status).await,
        };
        drop(first);
        let status = loop {
            if running.client_replies.is_empty()
                && let Some(status) = running.ended.take()
            {
                break status;
            }
            // Over the shard's budget, a client with untaken messages is sent no further messages.
            let waits = client.is_behind() && !running.session.route.share.fits();
            let quiet = running.client_replies.is_empty() && running.ended.is_none() && !waits;
            let deadline = running.hub.next_deadline();
            let turn = running.turn_ends();
            tokio::select! {
                biased; // order: client's departure, queued messages, client's requests, upstream
                () = client.gone() => return,
                room = client.room(), if !running.client_replies.is_empty() => {
                    let Ok(room) = room else { return };
                    if let Some((framed, keep)) = running.client_replies.pop_front() {
                        room.send(framed, keep);
                    }
                }
                taken = client.all_taken(), if waits && running.client_replies.is_empty() => {
                    if taken.is_err() {
                        return;
                    }
                }
                _ = drain.wait_for(Option::is_some) => break Refusal::SHUTTING_DOWN.status(),
                asked = requests.next(), if reading && quiet && running.hub.accepts_client() => {
                    let start = running.session.starts.begin();
                    match running.asked(asked, &start) {
                        ControlFlow::Continue(more) => reading = more,
                        ControlFlow::Break(None) => return,
                        ControlFlow::Break(Some(status)) => break status,
                    }
                }
                Some((input, room)) = running.reads.next(), if quiet => running.read(input, room),
                (stream, event) = next_event(&mut running.upstream, running.turn, quiet) => {
                    running.event(stream, event);
                    if !quiet {
                        // The stream's turn is of no use before the client has taken the queued messages.
                        running.end_turns(|_, _, _| true);
                    }
                }
                () = at(deadline), if quiet => running.input(HubInput::Tick),
                () = at(turn) => running.end_turns(|_, _, until| until <= Instant::now()),
            }
        };
        // A client that does not read its end of stream must not hold upstream resources.
        drop(running);
        client.end(status).await;
    }
}

impl RunningWatchSession {
    fn new(session: WatchSession) -> Self {
        Self {
            hub: Hub::new(Instant::now(), session.timing),
            unfinished: session.route.share.hold(0),
            session,
            upstream: BTreeMap::new(),
            reads: FuturesUnordered::new(),
            outputs: Vec::new(),
            client_replies: VecDeque::new(),
            tried: Vec::new(),
            has_replied: false,
            starts: BTreeMap::new(),
            turn: 0,
            ended: None,
        }
    }

    /// Takes every request that arrived with the stream's header. A write behind the stream waits until then.
    fn asked_first(
        &mut self,
        requests: &mut RequestMessages,
        start: &WatchStart,
    ) -> ControlFlow<Option<Status>, bool> {
        let mut more = true;
        while more
            && self.ended.is_none()
            && self.hub.accepts_client()
            && let Some(asked) = requests.next_without_yield().now_or_never()
        {
            more = self.asked(asked, start)?;
        }
        ControlFlow::Continue(more)
    }

    /// Takes a request of the client; `start` is kept for a watch "from now". Returns true to read on, or the
    /// end of the stream.
    fn asked(&mut self, asked: ClientRequestItem, start: &WatchStart) -> ControlFlow<Option<Status>, bool> {
        match asked {
            ClientRequestItem::Message(message) => {
                let floor = &self.session.route.floor;
                self.hub.raise_shown_revision(floor.cluster(), floor.revision());
                let newest = self.hub.newest();
                self.input(HubInput::Client(message));
                if self.hub.newest() != newest && self.hub.is_unregistered(self.hub.newest()) {
                    self.starts.insert(self.hub.newest(), start.clone());
                }
                ControlFlow::Continue(true)
            }
            ClientRequestItem::End => ControlFlow::Continue(false),
            ClientRequestItem::Bad(refusal) => ControlFlow::Break(Some(refusal.status())),
            ClientRequestItem::Gone => ControlFlow::Break(None),
        }
    }

    fn read(&mut self, input: HubInput, room: CheckConnection) {
        if room == CheckConnection::Found || !self.refused_for_room() {
            self.input(input);
        }
    }

    fn input(&mut self, input: HubInput) {
        let mut outputs = std::mem::take(&mut self.outputs);
        let before = self.hub.cluster();
        for (watch, start) in &self.starts {
            if let Some(revision) = start.overtaken() {
                self.hub.note_overtaking_write(*watch, revision);
            }
        }
        self.hub.handle(Instant::now(), input, &mut outputs);
        self.starts.retain(|watch, _| self.hub.is_unregistered(*watch));
        if before.is_some() && before != self.hub.cluster() {
            self.session.route.floor.follow(self.hub.cluster());
        }
        for output in outputs.drain(..) {
            self.carry_out(output);
        }
        self.outputs = outputs;
        self.unfinished.resize(self.hub.held().saturating_sub(FREE));
        self.end_turns(|hub, stream, _| hub.is_restored(stream));
    }

    /// The earliest end of a stream's turn to be resumed. Applies also while upstream is unread because the
    /// client takes no messages.
    fn turn_ends(&self) -> Option<Instant> {
        self.upstream.values().filter_map(UpstreamStreamState::turn_ends).min()
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
                let opening = self.session.route.open(credential, attempt, self.tried.clone());
                self.upstream.insert(stream, UpstreamStreamState::Opening(opening));
            }
            HubOutput::Close { stream } => {
                self.upstream.remove(&stream);
                self.note_loss();
            }
            HubOutput::Send { stream, message } => {
                if let Some(UpstreamStreamState::Open(source)) = self.upstream.get_mut(&stream) {
                    source.send(&message);
                }
            }
            HubOutput::Check { watch, stream, key } => self.check(watch, stream, key),
            HubOutput::Emit(message) => {
                self.has_replied = true;
                let floor = &self.session.route.floor;
                // Responses of a cluster no longer served by calls do not raise the connection's floor.
                let ours = self.hub.cluster().zip(floor.cluster()).is_none_or(|(ours, its)| ours == its);
                if let Some(revision) = header::revision_of(&message).filter(|_| ours) {
                    floor.raise(AnswerProgress { revision, term: 0 });
                }
                let framed = encode(&message);
                let large = framed.len() > SMALL;
                let keep =
                    large.then(|| Box::new(self.session.route.share.hold(framed.len())) as Box<dyn Any>);
                self.client_replies.push_back((framed, keep));
            }
            HubOutput::End(end) => {
                self.upstream.clear();
                self.ended = Some(status(end));
            }
        }
    }

    fn check(&mut self, watch: WatchKey, stream: UpstreamStreamId, key: Bytes) {
        let Some(UpstreamStreamState::Open(source)) = self.upstream.get(&stream) else { return };
        let WatchRoute { upstream, user, floor, .. } = self.session.route.clone();
        let member = Arc::clone(source.member());
        let reading = async move {
            let shown = floor.revision();
            let revealed = linearizable_revision(&upstream, &user, &member, &key).await;
            if let Ok(whole) = &revealed {
                floor.lower_to(shown, whole.revision);
            }
            let room = if matches!(revealed, Err(ReadError::NoRoom)) {
                CheckConnection::None
            } else {
                CheckConnection::Found
            };
            let input = match revealed {
                Ok(MemberRevision { header, revision }) => {
                    HubInput::Checked { watch, stream, header, revision: Revision(revision) }
                }
                Err(ReadError::Login(failure)) => {
                    HubInput::CheckFailed { watch, stream, why: login_loss(&failure) }
                }
                Err(ReadError::Refused(status)) if refuses_credential(&status) => {
                    HubInput::CheckFailed { watch, stream, why: StreamLoss::Denied(status.cancel_reason()) }
                }
                Err(ReadError::Refused(_) | ReadError::Lost | ReadError::NoRoom) => {
                    HubInput::CheckFailed { watch, stream, why: StreamLoss::Upstream }
                }
            };
            (input, room)
        };
        self.reads.push(reading.boxed_local());
    }

    fn event(&mut self, stream: UpstreamStreamId, event: UpstreamStreamEvent) {
        self.turn = self.turn.wrapping_add(1);
        match event {
            UpstreamStreamEvent::Opened(source) => {
                let traits = source.traits;
                self.upstream.insert(stream, UpstreamStreamState::Open(source));
                self.input(HubInput::Opened { stream, traits });
            }
            UpstreamStreamEvent::Failed(SourceOpenFailure { why, member }) => {
                self.try_member_last(member);
                self.upstream.remove(&stream);
                self.input(HubInput::Lost { stream, why });
            }
            UpstreamStreamEvent::Came(BidiEvent::Message(message)) => {
                self.tried.clear();
                self.session.link.set_up();
                self.input(HubInput::Upstream { stream, message });
                if self.unfinished.bytes() > 0 && !self.session.route.share.fits() {
                    self.give_up(stream);
                }
            }
            UpstreamStreamEvent::TooMuch => self.give_up(stream),
            UpstreamStreamEvent::Came(BidiEvent::NoRoom) if self.refused_for_room() => {}
            UpstreamStreamEvent::Came(end) => {
                let Some(UpstreamStreamState::Open(source)) = self.upstream.remove(&stream) else { return };
                let why = source.ended(&self.session.route.upstream, &end);
                if why == StreamLoss::Upstream {
                    self.try_member_last(Some(source.member().id));
                }
                self.note_loss();
                self.input(HubInput::Lost { stream, why });
            }
        }
    }

    /// Handles the lack of room for an upstream connection. A client without any answer so far is refused
    /// (returns true); a client with watches waits for room, as for a member.
    fn refused_for_room(&mut self) -> bool {
        if !self.has_replied {
            self.upstream.clear();
            self.ended = Some(Refusal::TOO_MANY_REQUESTS.status());
        }
        !self.has_replied
    }

    /// Gives up a stream because the shard holds too many bytes. The stream is opened again later, and its
    /// unfinished revision is received again. The member is not suspected, and no missing leader is reported.
    fn give_up(&mut self, stream: UpstreamStreamId) {
        tracing::debug!("a watch stream is given up: too much is held");
        self.upstream.remove(&stream);
        self.note_loss();
        self.input(HubInput::Lost { stream, why: StreamLoss::Upstream });
    }

    fn try_member_last(&mut self, member: Option<MemberId>) {
        let WatchRoute { upstream, home, .. } = &self.session.route;
        upstream.try_last(MemberTarget::Home(*home), &mut self.tried, member);
    }

    /// Marks the link as down if no upstream stream is open any more.
    fn note_loss(&self) {
        if !self.upstream.values().any(|upstream| matches!(upstream, UpstreamStreamState::Open(_))) {
            self.session.link.set_down();
        }
    }
}

async fn at(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

/// The next event of any upstream stream; open streams are polled only with `read`. A stream being opened is
/// always polled: it may hold a place in a member's resume queue ahead of other streams. Cancel-safe.
async fn next_event(
    upstream: &mut BTreeMap<UpstreamStreamId, UpstreamStreamState>,
    turn: usize,
    read: bool,
) -> (UpstreamStreamId, UpstreamStreamEvent) {
    let driven =
        |upstream: &UpstreamStreamState| read || matches!(upstream, UpstreamStreamState::Opening(..));
    if upstream.len() > 1 {
        let all = upstream.iter_mut().filter(|(_, state)| driven(state));
        let mut all: Vec<_> = all.map(|(stream, state)| one_event(*stream, state).boxed_local()).collect();
        if !all.is_empty() {
            let first = turn % all.len();
            all.rotate_left(first);
            return select_all(all).await.0;
        }
    }
    match upstream.iter_mut().find(|(_, state)| driven(state)) {
        Some((stream, state)) => one_event(*stream, state).await,
        None => std::future::pending().await,
    }
}

async fn one_event(
    stream: UpstreamStreamId,
    state: &mut UpstreamStreamState,
) -> (UpstreamStreamId, UpstreamStreamEvent) {
    let event = match state {
        UpstreamStreamState::Opening(opening) => match opening.await {
            Ok(source) => UpstreamStreamEvent::Opened(Box::new(source)),
            Err(failed) => UpstreamStreamEvent::Failed(failed),
        },
        UpstreamStreamState::Open(source) => match source.next().await {
            Ok(next) => UpstreamStreamEvent::Came(next),
            Err(UnfinishedMessageTooLarge) => UpstreamStreamEvent::TooMuch,
        },
    };
    (stream, event)
}

fn status(end: WatchStreamEnd) -> Status {
    match end {
        WatchStreamEnd::InvalidRequest => Refusal::not_canonical("not a WatchRequest").status(),
        WatchStreamEnd::RevisionTooLarge => Refusal::REVISION_TOO_LARGE.status(),
        WatchStreamEnd::Denied(_) => Refusal::INVALID_AUTH_TOKEN.status(),
    }
}
