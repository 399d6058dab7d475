//! One client's Observe stream, over as many upstream streams as it takes.
//!
//! Owns: opening the next stream, finding out what the end of one means. Which leaders are news is [`Leaders`]' to say.
//! Must not know: TLS, sessions, how a member is connected.
//! Invariants: a silent end is believed only of whom etcd also refuses to read the election, or the second time in a row
//! after a good read; `hasleader` always goes upstream, so that a member without a leader ends the stream instead of
//! going silent; while the client does not take what is said, nothing more is read.
//!
//! etcd ends an Observe with OK and without a word when its token is not known, when the right is missing, and when its
//! own watch breaks (server/etcdserver/api/v3election/election.go).

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::future::LocalBoxFuture;
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderName, HeaderValue};
use prost::Message as _;
use tokio::time::Instant;

use crate::downstream::said::Speaker;
use crate::identity::MemberId;
use crate::lease::leaders::{Leaders, Told};
use crate::lease::ticket::Line;
use crate::pb::etcdserverpb::{RangeRequest, RangeResponse};
use crate::pb::v3electionpb::LeaderRequest;
use crate::refusal::{Refusal, Status};
use crate::rpc::frame::encode;
use crate::rpc::method::{Method, lookup};
use crate::rpc::outcome::{self, Verdict, is_trouble};
use crate::upstream::bidi::{Bidi, Next};
use crate::upstream::choose::Wanted;
use crate::upstream::credential::Shown;
use crate::upstream::membership::{Auth, Hint, Member};
use crate::upstream::outage::UpstreamLink;
use crate::upstream::read::{ReadError, ask};
use crate::upstream::send::{As, Door, upstream_headers};

/// The method's path.
pub const PATH: &str = "/v3electionpb.Election/Observe";
const RANGE: &str = "/etcdserverpb.KV/Range";
const HAS_LEADER: HeaderName = HeaderName::from_static("hasleader");
const FIRST_PAUSE: Duration = Duration::from_millis(25);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// A stream that a member has left open for longer was not refused: a refusal comes at once.
const NOT_REFUSED: Duration = Duration::from_secs(3);
/// How often, and a little less, it is looked whether a stream kept something back.
const WATCH: Duration = Duration::from_secs(15);
/// What was proclaimed is told within this time; etcd takes milliseconds.
const ANSWER: Duration = Duration::from_secs(2);
/// Silent ends in a row, each after a good read, that are believed.
const SILENT: u32 = 2;

/// What an Observe stream needs of its surroundings.
pub struct Observe {
    /// The way upstream.
    pub door: Rc<Door>,
    /// As whom.
    pub whom: As,
    /// The client's header.
    pub headers: HeaderMap,
    /// The LeaderRequest, without its frame.
    pub request: Bytes,
    /// Tells when the process drains.
    pub drain: tokio::sync::watch::Receiver<Option<Instant>>,
    /// Counts streams that were opened to go on.
    pub resumed: prometheus_client::metrics::counter::Counter,
    /// Told whether an upstream stream serves this one.
    pub link: Rc<UpstreamLink>,
}

/// An open upstream stream.
struct Upstream {
    stream: Bidi,
    member: Arc<Member>,
    shown: Shown,
    opened_at: Instant,
    /// Who leads, looked at some time from now.
    looking: LocalBoxFuture<'static, Option<Proclaimed>>,
    /// Somebody led at the last look of whom it had not told.
    behind: bool,
}

/// A proclamation by create and mod revision.
type Proclaimed = (i64, i64);

/// The way upstream now.
enum Link {
    /// None until its time has come.
    Closed,
    /// A member and a token are being found.
    Opening(LocalBoxFuture<'static, Result<Box<Upstream>, NotOpened>>),
    Open(Box<Upstream>),
    /// The stream ended; the election is being read, which proves the token and the right.
    Proving(LocalBoxFuture<'static, After>),
}

/// What the way upstream did.
enum Event {
    /// Its time has come.
    Due,
    Opened(Result<Box<Upstream>, NotOpened>),
    Came(Next),
    Looked(Option<Proclaimed>),
    Proved(After),
}

/// What is to be done after an upstream stream ended.
enum After {
    /// Token and right are good on this member. The status is what is told if that goes on.
    Again(Status, MemberId),
    /// Open another, elsewhere if there is a choice, and slower each time.
    Elsewhere(Option<MemberId>),
    /// Tell the client.
    Tell(Status),
}

/// No stream, and which member that speaks against.
struct NotOpened(After);

/// Everything that moves while a stream is served.
struct Running {
    parts: Rc<Observe>,
    method: &'static Method,
    leaders: Leaders,
    link: Link,
    /// Members that failed since the last news.
    tried: Vec<MemberId>,
    /// Streams that ended since.
    losses: u32,
    /// Silent ends in a row.
    silent: u32,
    not_before: Instant,
    opened: u64,
    /// A member has told who leads.
    stood: bool,
}

impl Observe {
    /// Serves the client's stream to its end.
    pub async fn run(self, client: Speaker) {
        let Some(method) = lookup(PATH) else { return };
        let mut drain = self.drain.clone();
        let mut running = Running {
            parts: Rc::new(self),
            method,
            leaders: Leaders::default(),
            link: Link::Closed,
            tried: Vec::new(),
            losses: 0,
            silent: 0,
            not_before: Instant::now(),
            opened: 0,
            stood: false,
        };
        let mut said: Option<Bytes> = None;
        loop {
            running.advance();
            tokio::select! {
                biased; // the client's end first, then what it is owed, then what comes
                () = client.gone() => return,
                _ = drain.wait_for(Option::is_some) => return client.end(Refusal::SHUTTING_DOWN.status()).await,
                told = client.say(said.clone().unwrap_or_default()), if said.is_some() => {
                    if told.is_err() {
                        return;
                    }
                    said = None;
                }
                event = running.event(), if said.is_none() => match running.handle(event) {
                    Ok(message) => said = message.map(|message| encode(&message)),
                    Err(status) => return client.end(status).await,
                },
            }
        }
    }
}

impl Running {
    /// closed → opening, when its time has come.
    fn advance(&mut self) {
        if matches!(self.link, Link::Closed) && Instant::now() >= self.not_before {
            if self.opened > 0 {
                self.parts.resumed.inc();
            }
            self.opened += 1;
            let (parts, tried) = (Rc::clone(&self.parts), self.tried.clone());
            self.link = Link::Opening(async move { parts.open(&tried).await }.boxed_local());
        }
    }

    /// What happens next upstream. Cancel-safe.
    async fn event(&mut self) -> Event {
        match &mut self.link {
            Link::Closed => {
                let wait = self.not_before.saturating_duration_since(Instant::now());
                self.parts.door.pause_or_change(wait).await;
                Event::Due
            }
            Link::Opening(opening) => Event::Opened(opening.await),
            Link::Open(upstream) => tokio::select! {
                biased; // what it tells makes a look needless
                came = upstream.stream.next() => Event::Came(came),
                seen = &mut upstream.looking => Event::Looked(seen),
            },
            Link::Proving(proving) => Event::Proved(proving.await),
        }
    }

    /// A message for the client, or none yet. An error is the end of the client's stream.
    fn handle(&mut self, event: Event) -> Result<Option<Bytes>, Status> {
        let after = match event {
            Event::Due => {
                self.not_before = Instant::now();
                return Ok(None);
            }
            Event::Opened(Ok(upstream)) => {
                self.link = Link::Open(upstream);
                return Ok(None);
            }
            Event::Opened(Err(NotOpened(after))) | Event::Proved(after) => after,
            Event::Looked(seen) => match self.looked(seen) {
                Some(member) => After::Elsewhere(Some(member)),
                None => return Ok(None),
            },
            Event::Came(Next::Message(message)) => return self.came(message),
            Event::Came(Next::Ended(status)) => match std::mem::replace(&mut self.link, Link::Closed) {
                Link::Open(at) => return self.ended(*at, status),
                _ => After::Elsewhere(None),
            },
            Event::Came(Next::Unopened(reason)) => {
                tracing::debug!(%reason, "an observe stream was not opened");
                match &self.link {
                    Link::Open(at) => After::Elsewhere(Some(at.member.id)),
                    _ => After::Elsewhere(None),
                }
            }
            Event::Came(Next::Left) => After::Elsewhere(None),
            Event::Came(Next::NoRoom) if self.stood => After::Elsewhere(None),
            Event::Came(Next::NoRoom) => After::Tell(Refusal::TOO_MANY_REQUESTS.status()),
            Event::Came(Next::Broken(reason)) => match &self.link {
                Link::Open(at) => {
                    tracing::debug!(member = %at.member.id, %reason, "an observe stream broke");
                    at.member.suspect();
                    self.parts.door.members.hints.send(Hint::Unreachable(at.member.id));
                    After::Elsewhere(Some(at.member.id))
                }
                _ => After::Elsewhere(None),
            },
        };
        self.again(after).map(|()| None)
    }

    /// The member to be left, if it keeps something back: with auth on, one watch of its own serves all who wait there, and in
    /// 3.4 that goes silent when the token of whoever was first has expired (etcd-io/etcd#14850).
    fn looked(&mut self, seen: Option<Proclaimed>) -> Option<MemberId> {
        let Link::Open(at) = &mut self.link else { return None };
        let behind = seen.is_some_and(|seen| !self.leaders.knows(seen));
        if behind && at.behind && self.parts.door.members.auth.now() == Auth::On {
            return Some(at.member.id);
        }
        at.behind = behind;
        at.looking = Observe::look(&self.parts, if behind { ANSWER } else { WATCH });
        None
    }

    fn came(&mut self, message: Bytes) -> Result<Option<Bytes>, Status> {
        self.silent = 0;
        self.stood = true;
        self.parts.link.set_up();
        match self.leaders.told(&message) {
            Told::News => {
                if let Link::Open(at) = &mut self.link {
                    at.behind = false;
                }
                self.tried.clear();
                self.losses = 0;
                Ok(Some(message))
            }
            // Each stream begins with what is known: that does not make it a good one.
            Told::Known => Ok(None),
            // A restored cluster, perhaps: the client begins anew.
            Told::Older | Told::Unreadable => Err(Refusal::REQUEST_TIMED_OUT_CONNECTION_LOST.status()),
        }
    }

    /// open → proving: a read tells what the end does not. A refusal in words goes the same way, since the read renews
    /// what was refused.
    fn ended(&mut self, at: Upstream, status: Status) -> Result<Option<Bytes>, Status> {
        tracing::debug!(member = %at.member.id, ?status, "a member ended an observe stream");
        let proof = at.shown.proof();
        let asked = outcome::Asked { method: self.method, effect: self.method.effect, proof };
        if outcome::auth_state(&asked, &status) == Some(outcome::AuthState::On) {
            self.parts.door.auth_is(Auth::On);
        }
        if outcome::verdict(&asked, &status) == Verdict::Elsewhere || (!status.is_ok() && is_trouble(&status))
        {
            return self.again(After::Elsewhere(Some(at.member.id))).map(|()| None);
        }
        if at.opened_at.elapsed() > NOT_REFUSED {
            (self.silent, self.losses) = (0, 0);
        }
        let (parts, told) = (Rc::clone(&self.parts), outcome::translate(&asked, &status, false));
        let told = told.unwrap_or(status);
        self.link = Link::Proving(async move { parts.prove(&at.member, told).await }.boxed_local());
        Ok(None)
    }

    /// any → closed, or the client's end.
    fn again(&mut self, after: After) -> Result<(), Status> {
        self.link = Link::Closed;
        self.parts.link.set_down();
        match after {
            After::Tell(status) => return Err(status),
            After::Again(told, member) => {
                self.silent += 1;
                if self.silent >= SILENT {
                    return Err(told);
                }
                // The first time here, with what the read renewed. A member may refuse it in another's name: its own
                // watch goes by the token of whoever made it first (etcd-io/etcd#14850).
                self.tried.extend((self.losses > 0).then_some(member));
            }
            After::Elsewhere(member) => self.tried.extend(member),
        }
        if !self.parts.door.another(Wanted::Any, &self.tried) {
            self.tried.clear();
        }
        if self.losses > 0 {
            let pause = FIRST_PAUSE * 2_u32.saturating_pow(self.losses - 1);
            let half = u64::try_from(pause.min(LONGEST_PAUSE).as_millis() / 2).unwrap_or_default();
            // Half of it to one and a half: the observers of a lost member do not come back all at once.
            let drawn = Duration::from_millis(half + self.parts.door.chooser.draw(2 * half));
            self.not_before = Instant::now() + drawn;
        }
        self.losses += 1;
        Ok(())
    }
}

impl Observe {
    /// Who leads, after `pause` and a little more: from what any member has at hand.
    fn look(parts: &Rc<Self>, pause: Duration) -> LocalBoxFuture<'static, Option<Proclaimed>> {
        let parts = Rc::clone(parts);
        async move {
            let spread = Duration::from_millis(parts.door.chooser.draw(1000));
            tokio::time::sleep(pause + spread).await;
            let member = parts.door.choose(Wanted::Any, &[])?;
            let first = RangeRequest { serializable: true, ..parts.first() };
            let answer = ask(&parts.door, &parts.whom, &member, RANGE, &first.encode_to_vec()).await.ok()?;
            let leader = RangeResponse::decode(answer).ok()?.kvs.into_iter().next()?;
            Some((leader.create_revision, leader.mod_revision))
        }
        .boxed_local()
    }

    /// A Range of who leads.
    fn first(&self) -> RangeRequest {
        let name = LeaderRequest::decode(self.request.clone()).unwrap_or_default().name;
        Line::of(&name).first()
    }

    async fn open(self: &Rc<Self>, tried: &[MemberId]) -> Result<Box<Upstream>, NotOpened> {
        let nobody = NotOpened(After::Elsewhere(None));
        let member = self.door.choose(Wanted::Any, tried).ok_or(nobody)?;
        let shown = self.door.shown(&self.whom, &member).await.map_err(|failure| {
            NotOpened(if failure.is_refusal() {
                After::Tell(Refusal::INVALID_AUTH_TOKEN.status())
            } else {
                After::Elsewhere(Some(member.id))
            })
        })?;
        let mut head = upstream_headers(&self.headers, &shown);
        head.fields.insert(HAS_LEADER, HeaderValue::from_static("true"));
        // The client's time is kept downstream; upstream it would begin anew with each stream.
        head.fields.remove("grpc-timeout");
        let path = PathAndQuery::from_static(PATH);
        let stream = Bidi::ask(&self.door, &member, path, head, encode(&self.request));
        let looking = Self::look(self, WATCH);
        Ok(Box::new(Upstream { stream, member, shown, opened_at: Instant::now(), looking, behind: false }))
    }

    /// Reads the election as the client, which takes the same right and the same token.
    async fn prove(&self, member: &Arc<Member>, told: Status) -> After {
        let first = self.first().encode_to_vec();
        match ask(&self.door, &self.whom, member, RANGE, &first).await {
            Ok(_) => After::Again(told, member.id),
            Err(ReadError::Refused(status)) if !is_trouble(&status) => After::Tell(told),
            Err(ReadError::Login(failure)) if failure.is_refusal() => {
                After::Tell(Refusal::INVALID_AUTH_TOKEN.status())
            }
            Err(_) => After::Elsewhere(Some(member.id)),
        }
    }
}
