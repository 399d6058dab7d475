//! One client's Watch stream: moves bytes between the client, the hub and the upstream streams. Holds no rules.
//!
//! Owns: the order in which things are looked at. Must not know what a message means. Invariants: while the client
//! does not take what is said, nothing more is read from upstream, so that flow control reaches etcd and nobody else
//! waits; the client's going away ends everything; a client that was told nothing yet is told when there is no room for it.

use std::any::Any;
use std::collections::{BTreeMap, VecDeque};
use std::ops::ControlFlow;
use std::rc::Rc;

use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::StreamExt;
use futures_util::future::{LocalBoxFuture, select_all};
use futures_util::stream::FuturesUnordered;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::downstream::requests::{Asked, RequestBody, Requests};
use crate::downstream::said::{Keep, Speaker};
use crate::downstream::watch_starts::{WatchStart, WatchStarts};
use crate::identity::{MemberId, Revision};
use crate::refusal::{Refusal, Status};
use crate::rpc::frame::encode;
use crate::rpc::header::{self, Seen};
use crate::upstream::bidi::{Next, TooMuch};
use crate::upstream::choose::Wanted;
use crate::upstream::outage::UpstreamLink;
use crate::upstream::read::{ReadError, Revealed, linearizable_revision};
use crate::watch::budget::{FREE, Held, SMALL};
use crate::watch::hub::{End, Hub, Input, Loss, Output, StreamId, Timing, WatchKey};
use crate::watch::source::{Failed, Opening, Route, Source, login_loss, refuses_credential};

/// What a Watch stream needs of its surroundings.
pub struct Session {
    /// The way upstream, and as whom.
    pub route: Route,
    /// The hub's times.
    pub timing: Timing,
    /// The largest request message.
    pub largest_request: usize,
    /// Tells when the process drains.
    pub drain: watch::Receiver<Option<Instant>>,
    /// Counts streams that were opened to go on.
    pub resumed: prometheus_client::metrics::counter::Counter,
    /// The connection's watches "from now" that no member has registered yet.
    pub starts: Rc<WatchStarts>,
    /// Told whether an upstream stream serves this one.
    pub link: Rc<UpstreamLink>,
}

/// An upstream stream's present state.
enum Upstream {
    Opening(Opening),
    Open(Box<Source>),
}

impl Upstream {
    fn turn_ends(&self) -> Option<Instant> {
        match self {
            Self::Opening(_) => None,
            Self::Open(source) => source.turn_ends(),
        }
    }
}

/// Whether a read found room for its connection.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Room {
    Found,
    None,
}

/// What one upstream stream did.
enum Event {
    Opened(Box<Source>),
    Failed(Failed),
    Came(Next),
    TooMuch,
}

/// Everything that moves while a session runs.
struct Running {
    session: Session,
    hub: Hub,
    upstream: BTreeMap<StreamId, Upstream>,
    reads: FuturesUnordered<LocalBoxFuture<'static, (Input, Room)>>,
    outputs: Vec<Output>,
    said: VecDeque<(Bytes, Keep)>,
    /// Of revisions that have not ended.
    unfinished: Held,
    tried: Vec<MemberId>,
    /// Whether the client was told anything.
    told: bool,
    /// Watches "from now" that no member has registered yet: writes of the same connection wait behind them.
    starts: BTreeMap<WatchKey, WatchStart>,
    /// Which upstream stream is looked at first: each in turn, so that a busy one does not starve the others.
    turn: usize,
    ended: Option<Status>,
}

impl Session {
    /// Serves the client's stream to its end. `first` stands for the creates that may have arrived with the stream's header.
    pub async fn run(self, body: RequestBody, client: Speaker, first: WatchStart) {
        let mut requests = Requests::new(body, self.largest_request);
        let mut drain = self.drain.clone();
        let mut running = Running::new(self);
        let mut reading = match running.asked_first(&mut requests, &first) {
            ControlFlow::Continue(more) => more,
            ControlFlow::Break(None) => return,
            ControlFlow::Break(Some(status)) => return client.end(status).await,
        };
        drop(first);
        let status = loop {
            if running.said.is_empty()
                && let Some(status) = running.ended.take()
            {
                break status;
            }
            // Where too much is held, whoever has not taken what was said is told nothing more.
            let waits = client.is_behind() && !running.session.route.share.fits();
            let quiet = running.said.is_empty() && running.ended.is_none() && !waits;
            let deadline = running.hub.next_deadline();
            let turn = running.turn_ends();
            tokio::select! {
                biased; // the client's end first, then what it is owed, then what it asks, then what comes
                () = client.gone() => return,
                room = client.room(), if !running.said.is_empty() => {
                    let Ok(room) = room else { return };
                    if let Some((framed, keep)) = running.said.pop_front() {
                        room.say(framed, keep);
                    }
                }
                taken = client.taken(), if waits && running.said.is_empty() => {
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
                        // Nothing would come of its turn before the client has taken what it is owed.
                        running.let_others_on();
                    }
                }
                () = at(deadline), if quiet => running.input(Input::Tick),
                () = at(turn) => running.end_turns(),
            }
        };
        // A client that does not listen to the end must hold nothing upstream.
        drop(running);
        client.end(status).await;
    }
}

impl Running {
    fn new(session: Session) -> Self {
        Self {
            hub: Hub::new(Instant::now(), session.timing),
            unfinished: session.route.share.hold(0),
            session,
            upstream: BTreeMap::new(),
            reads: FuturesUnordered::new(),
            outputs: Vec::new(),
            said: VecDeque::new(),
            tried: Vec::new(),
            told: false,
            starts: BTreeMap::new(),
            turn: 0,
            ended: None,
        }
    }

    /// Takes all that has arrived with the stream's header: a write behind it goes on only then.
    fn asked_first(
        &mut self,
        requests: &mut Requests,
        start: &WatchStart,
    ) -> ControlFlow<Option<Status>, bool> {
        let mut more = true;
        while more
            && self.ended.is_none()
            && self.hub.accepts_client()
            && let Some(asked) = requests.next_at_once().now_or_never()
        {
            more = self.asked(asked, start)?;
        }
        ControlFlow::Continue(more)
    }

    /// Takes what the client said; `start` is held for a watch "from now". Whether to read on, or how the stream ends.
    fn asked(&mut self, asked: Asked, start: &WatchStart) -> ControlFlow<Option<Status>, bool> {
        match asked {
            Asked::Message(message) => {
                let floor = &self.session.route.floor;
                self.hub.was_shown(floor.cluster(), floor.revision());
                let newest = self.hub.newest();
                self.input(Input::Client(message));
                if self.hub.newest() != newest && self.hub.is_unregistered(self.hub.newest()) {
                    self.starts.insert(self.hub.newest(), start.clone());
                }
                ControlFlow::Continue(true)
            }
            Asked::End => ControlFlow::Continue(false),
            Asked::Bad(refusal) => ControlFlow::Break(Some(refusal.status())),
            Asked::Gone => ControlFlow::Break(None),
        }
    }

    fn read(&mut self, input: Input, room: Room) {
        if room == Room::Found || !self.refused_for_room() {
            self.input(input);
        }
    }

    fn input(&mut self, input: Input) {
        let mut outputs = std::mem::take(&mut self.outputs);
        let before = self.hub.cluster();
        for (watch, start) in &self.starts {
            if let Some(revision) = start.overtaken() {
                self.hub.overtaken(*watch, revision);
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
        for (stream, upstream) in &mut self.upstream {
            if let Upstream::Open(source) = upstream
                && source.turn_ends().is_some()
                && self.hub.stands(*stream)
            {
                source.end_turn();
            }
        }
    }

    /// When the first stream's turn to be resumed is over. Also while nothing is read because the client takes nothing.
    fn turn_ends(&self) -> Option<Instant> {
        self.upstream.values().filter_map(Upstream::turn_ends).min()
    }

    fn end_turns(&mut self) {
        let now = Instant::now();
        for upstream in self.upstream.values_mut() {
            if let Upstream::Open(source) = upstream
                && source.turn_ends().is_some_and(|until| until <= now)
            {
                source.end_turn();
            }
        }
    }

    fn carry_out(&mut self, output: Output) {
        match output {
            Output::Open { stream, credential, attempt, resumes } => {
                if resumes {
                    self.session.resumed.inc();
                }
                let opening = self.session.route.open(credential, attempt, self.tried.clone());
                self.upstream.insert(stream, Upstream::Opening(opening));
            }
            Output::Close { stream } => {
                self.upstream.remove(&stream);
                self.note_loss();
            }
            Output::Send { stream, message } => {
                if let Some(Upstream::Open(source)) = self.upstream.get_mut(&stream) {
                    source.send(&message);
                }
            }
            Output::Check { watch, stream, key } => self.check(watch, stream, key),
            Output::Emit(message) => {
                self.told = true;
                let floor = &self.session.route.floor;
                // Where calls go to another cluster by now, what is told of the old one binds nobody.
                let ours = self.hub.cluster().zip(floor.cluster()).is_none_or(|(ours, its)| ours == its);
                if let Some(revision) = header::revision_of(&message).filter(|_| ours) {
                    floor.raise(Seen { revision, term: 0 });
                }
                let framed = encode(&message);
                let large = framed.len() > SMALL;
                let keep =
                    large.then(|| Box::new(self.session.route.share.hold(framed.len())) as Box<dyn Any>);
                self.said.push_back((framed, keep));
            }
            Output::End(end) => {
                self.upstream.clear();
                self.ended = Some(status(end));
            }
        }
    }

    fn check(&mut self, watch: WatchKey, stream: StreamId, key: Bytes) {
        let Some(Upstream::Open(source)) = self.upstream.get(&stream) else { return };
        let (door, whom, member) = self.session.route.reader(source);
        let floor = Rc::clone(&self.session.route.floor);
        let reading = async move {
            let shown = floor.revision();
            let revealed = linearizable_revision(&door, &whom, &member, &key).await;
            if let Ok(whole) = &revealed {
                floor.forget_above(shown, whole.revision);
            }
            let room = if matches!(revealed, Err(ReadError::NoRoom)) { Room::None } else { Room::Found };
            let input = match revealed {
                Ok(Revealed { header, revision }) => {
                    Input::Checked { watch, stream, header, revision: Revision(revision) }
                }
                Err(ReadError::Login(failure)) => {
                    Input::CheckFailed { watch, stream, why: login_loss(&failure) }
                }
                Err(ReadError::Refused(status)) if refuses_credential(&status) => {
                    Input::CheckFailed { watch, stream, why: Loss::Denied(status.cancel_reason()) }
                }
                Err(ReadError::Refused(_) | ReadError::Lost | ReadError::NoRoom) => {
                    Input::CheckFailed { watch, stream, why: Loss::Upstream }
                }
            };
            (input, room)
        };
        self.reads.push(reading.boxed_local());
    }

    fn event(&mut self, stream: StreamId, event: Event) {
        self.turn = self.turn.wrapping_add(1);
        match event {
            Event::Opened(source) => {
                let traits = source.traits;
                self.upstream.insert(stream, Upstream::Open(source));
                self.input(Input::Opened { stream, traits });
            }
            Event::Failed(Failed { why, member }) => {
                self.avoid(member);
                self.upstream.remove(&stream);
                self.input(Input::Lost { stream, why });
            }
            Event::Came(Next::Message(message)) => {
                self.tried.clear();
                self.session.link.set_up();
                self.input(Input::Upstream { stream, message });
                if self.unfinished.bytes() > 0 && !self.session.route.share.fits() {
                    self.give_up(stream);
                }
            }
            Event::TooMuch => self.give_up(stream),
            Event::Came(Next::NoRoom) if self.refused_for_room() => {}
            Event::Came(end) => {
                let Some(Upstream::Open(source)) = self.upstream.remove(&stream) else { return };
                let why = source.ended(&self.session.route.door, &self.session.route.whom, &end);
                if why == Loss::Upstream {
                    self.avoid(Some(source.member.id));
                }
                self.note_loss();
                self.input(Input::Lost { stream, why });
            }
        }
    }

    /// There is no room for a connection. Who was told nothing yet is told that; a client that has watches waits for room,
    /// as for a member.
    fn refused_for_room(&mut self) -> bool {
        if !self.told {
            self.upstream.clear();
            self.ended = Some(Refusal::TOO_MANY_REQUESTS.status());
        }
        !self.told
    }

    /// Too much is held on this shard: the stream is opened again later, and what it began to tell comes again. Speaks against
    /// no member, and for no missing leader.
    fn give_up(&mut self, stream: StreamId) {
        tracing::debug!("a watch stream is given up: too much is held");
        self.upstream.remove(&stream);
        self.note_loss();
        self.input(Input::Lost { stream, why: Loss::Upstream });
    }

    /// Tries this one last; when every ready member had its turn, it begins again.
    fn avoid(&mut self, member: Option<MemberId>) {
        self.tried.extend(member);
        let Route { door, home, .. } = &self.session.route;
        if !door.another(Wanted::Home(*home), &self.tried) {
            self.tried.clear();
        }
    }

    fn let_others_on(&mut self) {
        for upstream in self.upstream.values_mut() {
            if let Upstream::Open(source) = upstream {
                source.end_turn();
            }
        }
    }

    /// An upstream stream is gone, perhaps the last that served.
    fn note_loss(&self) {
        if !self.upstream.values().any(|upstream| matches!(upstream, Upstream::Open(_))) {
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

/// The next thing that any upstream stream does; with `read`, what open ones say, too. One that is being opened is always
/// driven: it may stand in line before others. Cancel-safe.
async fn next_event(
    upstream: &mut BTreeMap<StreamId, Upstream>,
    turn: usize,
    read: bool,
) -> (StreamId, Event) {
    let driven = |upstream: &Upstream| read || matches!(upstream, Upstream::Opening(..));
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

async fn one_event(stream: StreamId, state: &mut Upstream) -> (StreamId, Event) {
    let event = match state {
        Upstream::Opening(opening) => match opening.await {
            Ok(source) => Event::Opened(Box::new(source)),
            Err(failed) => Event::Failed(failed),
        },
        Upstream::Open(source) => match source.next().await {
            Ok(next) => Event::Came(next),
            Err(TooMuch) => Event::TooMuch,
        },
    };
    (stream, event)
}

fn status(end: End) -> Status {
    match end {
        End::InvalidRequest => Refusal::not_canonical("not a WatchRequest").status(),
        End::RevisionTooLarge => Refusal::REVISION_TOO_LARGE.status(),
        End::Denied(_) => Refusal::INVALID_AUTH_TOKEN.status(),
    }
}
