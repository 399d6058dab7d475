//! One client's keepalive stream, over as many upstream streams as it takes.
//!
//! Owns: moving messages between the client and a member, choosing the next member, renewing a refused credential.
//! What an answer means is [`Pending`]'s to say. Must not know: TLS, sessions, how a member is connected.
//! Invariants: the leader first; a stream is opened only when something is to be asked; a half-close ends the stream
//! only after everything was answered; the client going away ends everything at once.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::future::LocalBoxFuture;
use http::HeaderMap;
use http::uri::PathAndQuery;
use prost::Message as _;
use tokio::time::Instant;

use crate::downstream::requests::{Asked, RequestBody, Requests};
use crate::downstream::said::Speaker;
use crate::identity::MemberId;
use crate::lease::pending::{Pending, Verdict, Zero};
use crate::pb::etcdserverpb::{LeaseKeepAliveRequest, LeaseKeepAliveResponse};
use crate::refusal::{Code, Refusal, Status};
use crate::rpc::frame::encode;
use crate::rpc::method::{Method, lookup};
use crate::rpc::outcome;
use crate::upstream::bidi::{Bidi, Next};
use crate::upstream::choose::Wanted;
use crate::upstream::credential::{LoginFailure, Shown};
use crate::upstream::membership::{Auth, Hint, Member};
use crate::upstream::outage::{Outage, UpstreamLink};
use crate::upstream::read::linearizable_revision;
use crate::upstream::send::{As, Door, upstream_headers};

const PATH: &str = "/etcdserverpb.Lease/LeaseKeepAlive";
/// A keepalive request is one number; this leaves room for what etcd may add.
const LARGEST_REQUEST: usize = 64 * 1024;
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);
/// How long a request may stay without any member that can answer it, before the client is told so: etcd's own limit.
const PATIENCE: Duration = Duration::from_secs(7);
/// A member that has not answered after so long is left for another. etcd answers one by one, nearly always in
/// milliseconds; a renewal that is asked twice renews once.
const ANSWER: Duration = Duration::from_secs(5);

/// What a keepalive stream needs of its surroundings.
pub struct KeepAlive {
    /// The way upstream.
    pub door: Rc<Door>,
    /// As whom.
    pub whom: As,
    /// The client's header.
    pub headers: HeaderMap,
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
}

/// The way upstream now.
enum Link {
    /// None: nothing is to be asked, or the next attempt waits for its time.
    Closed,
    /// A member and a token are being found.
    Opening(LocalBoxFuture<'static, Result<Box<Upstream>, NotOpened>>),
    /// Requests go out.
    Open(Box<Upstream>),
    /// A doubtful answer came; the member is being read before it is asked again.
    Confirming(LocalBoxFuture<'static, ()>),
}

/// What the way upstream did.
enum Event {
    /// Its time has come.
    Due,
    Opened(Result<Box<Upstream>, NotOpened>),
    Came(Next),
    /// An answer did not come in time.
    Silent,
    Confirmed,
}

/// What is to be done after an upstream stream ended.
enum After {
    /// Open another at once.
    Now,
    /// Open another, elsewhere if there is a choice, and slower each time.
    Elsewhere,
    /// Tell the client.
    Tell(Status),
}

/// No stream, and which member that speaks against.
struct NotOpened {
    after: After,
    member: Option<MemberId>,
}

/// Everything that moves while a stream is served.
struct Running {
    parts: Rc<KeepAlive>,
    method: &'static Method,
    pending: Pending,
    link: Link,
    /// Members that could not answer since one last did.
    tried: Vec<MemberId>,
    /// Losses since the last answer.
    losses: u32,
    not_before: Instant,
    /// Since when the request in front has waited on the present stream.
    waiting_since: Instant,
    /// Since when it has waited at all, where a stream was lost meanwhile.
    stuck_since: Option<Instant>,
    opened: u64,
    /// Something was answered.
    stood: bool,
    /// The client will ask nothing more.
    half_closed: bool,
}

impl KeepAlive {
    /// Serves the client's stream to its end.
    pub async fn run(self, body: RequestBody, client: Speaker) {
        let Some(method) = lookup(PATH) else { return };
        let mut drain = self.drain.clone();
        let mut requests = Requests::new(body, LARGEST_REQUEST);
        let mut running = Running {
            parts: Rc::new(self),
            method,
            pending: Pending::default(),
            link: Link::Closed,
            tried: Vec::new(),
            losses: 0,
            not_before: Instant::now(),
            waiting_since: Instant::now(),
            stuck_since: None,
            opened: 0,
            stood: false,
            half_closed: false,
        };
        loop {
            if running.half_closed && running.pending.is_empty() {
                return client.end(Status::OK).await;
            }
            running.advance();
            let asks = !running.half_closed && !running.pending.is_full();
            tokio::select! {
                biased; // the client's end first: nobody is left to tell
                () = client.gone() => return,
                _ = drain.wait_for(Option::is_some) => return client.end(Refusal::SHUTTING_DOWN.status()).await,
                asked = requests.next(), if asks => match asked {
                    Asked::Message(message) if LeaseKeepAliveRequest::decode(message.clone()).is_ok() => {
                        running.asked(message);
                    }
                    Asked::Message(_) => {
                        let refusal = Refusal::not_canonical("not a LeaseKeepAliveRequest");
                        return client.end(refusal.status()).await;
                    }
                    Asked::End => running.half_closed = true,
                    Asked::Bad(refusal) => return client.end(refusal.status()).await,
                    Asked::Gone => return,
                },
                event = running.event() => match running.handle(event) {
                    Ok(None) => {}
                    Ok(Some(answer)) => if client.say(encode(&answer)).await.is_err() {
                        return;
                    },
                    Err(status) => return client.end(status).await,
                }
            }
        }
    }
}

impl Running {
    fn asked(&mut self, message: Bytes) {
        if self.pending.is_empty() {
            self.waiting_since = Instant::now();
            // What was stuck before may have been withheld.
            self.stuck_since = None;
        }
        self.pending.push(message);
    }

    /// closed → opening, where something is to be asked; asks on an open stream what it was not asked yet.
    fn advance(&mut self) {
        match &mut self.link {
            Link::Closed if !self.pending.is_empty() && Instant::now() >= self.not_before => {
                if self.opened > 0 {
                    self.parts.resumed.inc();
                }
                self.opened += 1;
                let (parts, tried) = (Rc::clone(&self.parts), self.tried.clone());
                self.link = Link::Opening(async move { parts.open(&tried).await }.boxed_local());
            }
            Link::Open(upstream) => {
                while let Some(message) = self.pending.next_to_ask() {
                    upstream.stream.send(&message);
                }
            }
            Link::Closed | Link::Opening(_) | Link::Confirming(_) => {}
        }
    }

    /// What happens next on the way upstream. Cancel-safe.
    async fn event(&mut self) -> Event {
        match &mut self.link {
            Link::Closed if self.pending.is_empty() => std::future::pending().await,
            Link::Closed => {
                let wait = self.not_before.saturating_duration_since(Instant::now());
                self.parts.door.pause_or_change(wait).await;
                Event::Due
            }
            Link::Opening(opening) => Event::Opened(opening.await),
            Link::Open(upstream) if self.pending.is_empty() => Event::Came(upstream.stream.next().await),
            Link::Open(upstream) => {
                let limit = Instant::now().max(self.waiting_since + ANSWER);
                tokio::time::timeout_at(limit, upstream.stream.next())
                    .await
                    .map_or(Event::Silent, Event::Came)
            }
            Link::Confirming(read) => {
                read.await;
                Event::Confirmed
            }
        }
    }

    /// An answer for the client, or none yet. An error is the end of the client's stream.
    fn handle(&mut self, event: Event) -> Result<Option<Bytes>, Status> {
        let after = match event {
            Event::Due => {
                self.not_before = Instant::now();
                return Ok(None);
            }
            Event::Opened(Ok(upstream)) => {
                self.waiting_since = Instant::now();
                self.link = Link::Open(upstream);
                return Ok(None);
            }
            Event::Opened(Err(NotOpened { after, member })) => {
                self.tried.extend(member);
                after
            }
            Event::Confirmed => After::Now,
            Event::Silent => After::Elsewhere,
            Event::Came(Next::Message(message)) => return self.answered(message),
            Event::Came(Next::Ended(status)) => match &self.link {
                Link::Open(at) => self.parts.ended(self.method, &mut self.pending, at, &status),
                _ => After::Now,
            },
            Event::Came(Next::Unopened(reason)) => {
                tracing::debug!(%reason, "a keepalive stream was not opened");
                After::Elsewhere
            }
            Event::Came(Next::Left) => After::Elsewhere,
            Event::Came(Next::NoRoom) if self.stood => After::Elsewhere,
            Event::Came(Next::NoRoom) => After::Tell(Refusal::TOO_MANY_REQUESTS.status()),
            Event::Came(Next::Broken(reason)) => {
                if let Link::Open(at) = &self.link {
                    tracing::debug!(member = %at.member.id, %reason, "a keepalive stream broke");
                    at.member.suspect();
                    self.parts.door.members.hints.send(Hint::Unreachable(at.member.id));
                }
                After::Elsewhere
            }
        };
        self.again(after).map(|()| None)
    }

    fn answered(&mut self, message: Bytes) -> Result<Option<Bytes>, Status> {
        let Link::Open(at) = &self.link else { return Ok(None) };
        let zero = if at.member.traits().keepalive_false_zero { Zero::Confirm } else { Zero::Final };
        let answer = LeaseKeepAliveResponse::decode(message.clone()).ok();
        match answer.map(|answer| self.pending.answered(answer.ttl, zero)) {
            Some(Verdict::Deliver) => {
                self.stood = true;
                self.parts.link.set_up();
                self.losses = 0;
                self.stuck_since = None;
                self.tried.clear();
                self.waiting_since = Instant::now();
                Ok(Some(message))
            }
            Some(Verdict::Confirm) => {
                let (parts, member) = (Rc::clone(&self.parts), Arc::clone(&at.member));
                self.link = Link::Confirming(async move { parts.read(&member).await }.boxed_local());
                self.pending.lost();
                Ok(None)
            }
            Some(Verdict::Stray) | None => self.again(After::Elsewhere).map(|()| None),
        }
    }

    /// any → closed: what was not answered is asked again, the first time at once.
    fn again(&mut self, after: After) -> Result<(), Status> {
        self.pending.lost();
        self.parts.link.set_down();
        let link = std::mem::replace(&mut self.link, Link::Closed);
        match after {
            After::Tell(status) => return Err(status),
            After::Now => return Ok(()),
            After::Elsewhere if self.pending.is_empty() => return Ok(()),
            After::Elsewhere => {}
        }
        if let Link::Open(at) = link {
            self.tried.push(at.member.id);
        }
        if !self.parts.door.another(Wanted::LeaderFirst, &self.tried) {
            self.tried.clear();
        }
        let since = *self.stuck_since.get_or_insert(self.waiting_since);
        if since.elapsed() > PATIENCE {
            return Err(self.parts.unanswered().status());
        }
        if self.losses > 0 {
            let pause = FIRST_PAUSE * 2_u32.saturating_pow(self.losses - 1);
            self.not_before = Instant::now() + pause.min(LONGEST_PAUSE);
        }
        self.losses += 1;
        Ok(())
    }
}

impl KeepAlive {
    /// What a client is told whose request no member has answered in time. A Go client that asked for a leader gives its keepalives up
    /// where it is told that there is none.
    fn unanswered(&self) -> Refusal {
        match self.door.members.snapshot.load().outage {
            Outage::None => Refusal::REQUEST_TIMED_OUT,
            Outage::NoLeader { .. } => Refusal::NO_LEADER,
            Outage::Unreachable { .. } => Refusal::REQUEST_TIMED_OUT_CONNECTION_LOST,
        }
    }

    async fn open(&self, tried: &[MemberId]) -> Result<Box<Upstream>, NotOpened> {
        let nobody = NotOpened { after: After::Elsewhere, member: None };
        let member = self.door.choose(Wanted::LeaderFirst, tried).ok_or(nobody)?;
        let shown = self.door.shown(&self.whom, &member).await.map_err(|failure| {
            let after = match failure {
                LoginFailure::WrongPassword | LoginFailure::NoPassword => {
                    After::Tell(Refusal::INVALID_AUTH_TOKEN.status())
                }
                _ => After::Elsewhere,
            };
            NotOpened { after, member: Some(member.id) }
        })?;
        let mut head = upstream_headers(&self.headers, &shown);
        // The client's time is kept downstream; upstream it would begin anew with each stream.
        head.fields.remove("grpc-timeout");
        let stream = Bidi::open(&self.door, &member, PathAndQuery::from_static(PATH), head);
        Ok(Box::new(Upstream { stream, member, shown }))
    }

    /// Once it has answered, the member has applied every grant that was acknowledged before.
    async fn read(&self, member: &Arc<Member>) {
        let read = linearizable_revision(&self.door, &self.whom, member, b"\0").await;
        tracing::debug!(member = %member.id, confirmed = read.is_ok(), "a lease was told as gone");
    }

    fn ended(&self, method: &'static Method, pending: &mut Pending, at: &Upstream, status: &Status) -> After {
        let asked = outcome::Asked { method, effect: method.effect, proof: at.shown.proof() };
        if outcome::auth_state(&asked, status) == Some(outcome::AuthState::On) {
            self.door.auth_is(Auth::On);
            if matches!(self.whom, As::User(_)) {
                return self.refused(pending, at, status);
            }
        }
        match (outcome::verdict(&asked, status), &self.whom) {
            // Where users or roles changed under it, the next one may pass with the same certificate.
            (outcome::Verdict::Heal, As::User(identity))
                if identity.renew(at.member.id, &at.shown) || outcome::is_outdated(&asked, status) =>
            {
                self.refused(pending, at, status)
            }
            (outcome::Verdict::Heal | outcome::Verdict::Final, _)
                if status.code == Code::PermissionDenied =>
            {
                self.refused(pending, at, status)
            }
            // No answer to what was asked.
            (outcome::Verdict::Final, _) if status.is_ok() => After::Elsewhere,
            (outcome::Verdict::Heal | outcome::Verdict::Final, _) => After::Tell(status.clone()),
            // Whatever a member says of itself, another may do better.
            (outcome::Verdict::Elsewhere | outcome::Verdict::Unclear, _) => {
                self.door.members.hints.send(Hint::NotLeader(at.member.id));
                After::Elsewhere
            }
        }
    }

    /// One lease that may not be renewed must not end the renewals of the others (rules 26). What one member refuses
    /// twice, the second time with a fresh credential, is refused in truth.
    fn refused(&self, pending: &mut Pending, at: &Upstream, status: &Status) -> After {
        if pending.refused(at.member.id) && !pending.withhold() {
            return After::Tell(status.clone());
        }
        After::Now
    }
}
