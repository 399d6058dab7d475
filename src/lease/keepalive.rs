//! One client's keepalive stream, over as many upstream streams as it takes.
//!
//! Owns: moving messages between the client and a member, choosing the next member, renewing a refused credential.
//! What an answer means is [`Pending`]'s to say. Must not know: TLS, sessions, how a member is connected.
//! Invariants: the leader first; a stream is opened only when something is to be asked; a half-close ends the stream
//! only after everything was answered; the client going away ends everything at once.

use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::HeaderMap;
use http::uri::PathAndQuery;
use http_body::Body;
use hyper::body::Incoming;
use prost::Message as _;
use tokio::time::Instant;

use crate::downstream::said::Speaker;
use crate::identity::MemberId;
use crate::lease::pending::{Pending, Verdict, Zero};
use crate::pb::etcdserverpb::{LeaseKeepAliveRequest, LeaseKeepAliveResponse};
use crate::refusal::{Code, Refusal, Status};
use crate::rpc::frame::{FrameReader, encode};
use crate::rpc::method::{Method, lookup};
use crate::rpc::outcome::{self, Proof};
use crate::upstream::bidi::{Bidi, Next};
use crate::upstream::choose::Wanted;
use crate::upstream::credential::{LoginFailure, Token};
use crate::upstream::membership::{Auth, Hint, Member};
use crate::upstream::read::linearizable_revision;
use crate::upstream::send::{As, Door, upstream_headers};

const PATH: &str = "/etcdserverpb.Lease/LeaseKeepAlive";
/// A keepalive request is one number; this leaves room for what etcd may add.
const LARGEST_REQUEST: usize = 64 * 1024;
/// Past so many unanswered requests the client is not read any further: HTTP/2 holds it back.
const MOST_PENDING: usize = 1024;
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);
/// How long a request may stay without any member that can answer it, before the client is told so: etcd's own limit.
const PATIENCE: Duration = Duration::from_secs(7);
/// A request that is refused this often, each time with a fresh credential, is refused in truth.
const REFUSALS: u32 = 2;

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
}

/// An open upstream stream.
struct Upstream {
    stream: Bidi,
    member: Arc<Member>,
    token: Option<Token>,
}

/// What is to be done after an upstream stream ended.
enum After {
    /// Open another at once.
    Now,
    /// Open another after a pause.
    Pause,
    /// Tell the client.
    Tell(Status),
}

/// Everything that moves while a stream is served.
struct Running {
    parts: KeepAlive,
    method: &'static Method,
    pending: Pending,
    upstream: Option<Upstream>,
    /// Members that could not answer since one last did.
    tried: Vec<MemberId>,
    pause: Duration,
    not_before: Instant,
    stuck_since: Option<Instant>,
    opened: u64,
    /// The client will ask nothing more.
    half_closed: bool,
}

impl KeepAlive {
    /// Serves the client's stream to its end.
    pub async fn run(self, mut body: Incoming, client: Speaker) {
        let Some(method) = lookup(PATH) else { return };
        let mut drain = self.drain.clone();
        let mut requests = FrameReader::new(LARGEST_REQUEST);
        let mut running = Running {
            parts: self,
            method,
            pending: Pending::default(),
            upstream: None,
            tried: Vec::new(),
            pause: FIRST_PAUSE,
            not_before: Instant::now(),
            stuck_since: None,
            opened: 0,
            half_closed: false,
        };
        loop {
            if let Err(status) = running.prepare().await {
                return client.end(status).await;
            }
            let door = Rc::clone(&running.parts.door);
            let wait = running.not_before.saturating_duration_since(Instant::now());
            let waiting = running.upstream.is_none() && !running.pending.is_empty();
            let asks = !running.half_closed && running.pending.len() < MOST_PENDING;
            tokio::select! {
                biased; // the client's end first: nobody is left to tell
                () = client.gone() => return,
                _ = drain.wait_for(Option::is_some) => return client.end(Refusal::SHUTTING_DOWN.status()).await,
                asked = next_request(&mut body, &mut requests), if asks => match asked {
                    Asked::Message(message) => running.pending.push(message),
                    Asked::End => running.half_closed = true,
                    Asked::Bad(refusal) => return client.end(refusal.status()).await,
                    Asked::Gone => return,
                },
                () = door.pause_or_change(wait), if waiting => running.not_before = Instant::now(),
                came = next_answer(&mut running.upstream) => match running.came(came).await {
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
    /// Opens a stream where one is needed, and asks on it what was not asked yet. An error is for the client: the
    /// stream's end.
    async fn prepare(&mut self) -> Result<(), Status> {
        if self.half_closed && self.pending.is_empty() {
            return Err(Status::OK);
        }
        if self.upstream.is_none() && !self.pending.is_empty() && Instant::now() >= self.not_before {
            match self.parts.open(&self.tried).await {
                Ok(stream) => {
                    if self.opened > 0 {
                        self.parts.resumed.inc();
                    }
                    self.opened += 1;
                    self.upstream = Some(stream);
                }
                Err(After::Tell(status)) => return Err(status),
                Err(After::Now | After::Pause) => {
                    self.tried.clear();
                    self.wait()?;
                }
            }
        }
        if let Some(upstream) = &mut self.upstream {
            while let Some(message) = self.pending.next_to_ask() {
                upstream.stream.send(&message);
            }
        }
        Ok(())
    }

    /// What came from upstream: an answer for the client, or none yet.
    async fn came(&mut self, came: Next) -> Result<Option<Bytes>, Status> {
        let Some(at) = &self.upstream else { return Ok(None) };
        let after = match came {
            Next::Message(message) => match self.parts.answer(&mut self.pending, at, &message).await {
                Some(Verdict::Deliver) => {
                    self.stuck_since = None;
                    self.pause = FIRST_PAUSE;
                    self.tried.clear();
                    return Ok(Some(message));
                }
                Some(Verdict::Confirm) => After::Now,
                Some(Verdict::Stray) | None => After::Pause,
            },
            Next::Ended(status) => self.parts.ended(self.method, &mut self.pending, at, &status),
            Next::Broken(reason) => {
                tracing::debug!(member = %at.member.id, %reason, "a keepalive stream broke");
                at.member.suspect();
                self.parts.door.members.hints.send(Hint::Unreachable(at.member.id));
                After::Now
            }
        };
        if let After::Tell(status) = after {
            return Err(status);
        }
        if let After::Pause = after {
            self.tried.push(at.member.id);
            self.wait()?;
        }
        self.pending.lost();
        self.upstream = None;
        Ok(None)
    }

    /// The next attempt is made after a pause; past all patience the client is told.
    fn wait(&mut self) -> Result<(), Status> {
        self.not_before = Instant::now() + self.pause;
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        let since = *self.stuck_since.get_or_insert_with(Instant::now);
        if since.elapsed() > PATIENCE { Err(Refusal::NO_LEADER.status()) } else { Ok(()) }
    }
}

impl KeepAlive {
    async fn open(&self, tried: &[MemberId]) -> Result<Upstream, After> {
        let member = self.door.choose(Wanted::LeaderFirst, tried).ok_or(After::Pause)?;
        let token = match self.door.token(&self.whom, &member).await {
            Ok(token) => token,
            Err(LoginFailure::WrongPassword | LoginFailure::NoPassword) => {
                return Err(After::Tell(Refusal::INVALID_AUTH_TOKEN.status()));
            }
            Err(_) => return Err(After::Pause),
        };
        let headers = upstream_headers(&self.headers, token.as_ref());
        let stream = Bidi::open(&self.door, &member, PathAndQuery::from_static(PATH), headers);
        Ok(Upstream { stream, member, token })
    }

    /// What an answer means; None where it cannot be read.
    async fn answer(&self, pending: &mut Pending, at: &Upstream, message: &Bytes) -> Option<Verdict> {
        let answer = LeaseKeepAliveResponse::decode(message.clone()).ok()?;
        let zero = if at.member.traits().keepalive_false_zero { Zero::Confirm } else { Zero::Final };
        let verdict = pending.answered(answer.ttl, zero);
        if verdict == Verdict::Confirm {
            // The member has applied every grant that was acknowledged before this read.
            let read = linearizable_revision(&self.door, &self.whom, &at.member, b"\0").await;
            tracing::debug!(member = %at.member.id, confirmed = read.is_ok(), "a lease was told as gone");
        }
        if let Some(token) = &at.token {
            token.mark_used();
        }
        Some(verdict)
    }

    fn ended(&self, method: &'static Method, pending: &mut Pending, at: &Upstream, status: &Status) -> After {
        let proof = if at.token.is_some() { Proof::Token } else { Proof::NoToken };
        let asked = outcome::Asked { method, effect: method.effect, proof };
        if outcome::auth_state(&asked, status) == Some(outcome::AuthState::On) {
            self.door.auth_is(Auth::On);
            if matches!(self.whom, As::User(_)) {
                return self.refused(pending, status);
            }
        }
        match (outcome::verdict(&asked, status), &self.whom, &at.token) {
            (outcome::Verdict::Heal, As::User(identity), Some(token)) => {
                identity.invalidate(at.member.id, token);
                self.refused(pending, status)
            }
            (outcome::Verdict::Heal | outcome::Verdict::Final, _, _)
                if status.code == Code::PermissionDenied =>
            {
                self.refused(pending, status)
            }
            (outcome::Verdict::Heal | outcome::Verdict::Final, _, _) => After::Tell(status.clone()),
            // Whatever a member says of itself, another may do better.
            (outcome::Verdict::Elsewhere | outcome::Verdict::Unclear, _, _) => {
                self.door.members.hints.send(Hint::NotLeader(at.member.id));
                After::Pause
            }
        }
    }

    /// One lease that may not be renewed must not end the renewals of the others (rules 26).
    fn refused(&self, pending: &mut Pending, status: &Status) -> After {
        if pending.refused() >= REFUSALS && !pending.withhold() {
            return After::Tell(status.clone());
        }
        After::Now
    }
}

async fn next_answer(upstream: &mut Option<Upstream>) -> Next {
    match upstream {
        Some(upstream) => upstream.stream.next().await,
        None => std::future::pending().await,
    }
}

/// What comes from a client's stream of requests.
enum Asked {
    Message(Bytes),
    End,
    Bad(Refusal),
    Gone,
}

/// The client's next request. Cancel-safe: what was read stays in `reader`.
async fn next_request(body: &mut Incoming, reader: &mut FrameReader) -> Asked {
    loop {
        match reader.next() {
            Some(Ok(message)) if LeaseKeepAliveRequest::decode(message.clone()).is_ok() => {
                return Asked::Message(message);
            }
            Some(Ok(_)) => return Asked::Bad(Refusal::not_canonical("not a LeaseKeepAliveRequest")),
            Some(Err(fault)) => return Asked::Bad(fault.refusal(None)),
            None => {}
        }
        match std::future::poll_fn(|cx| Pin::new(&mut *body).poll_frame(cx)).await {
            Some(Ok(frame)) => {
                if let Ok(data) = frame.into_data() {
                    reader.push(data);
                }
            }
            Some(Err(_)) => return Asked::Gone,
            None => {
                return reader.finish().map_or_else(|fault| Asked::Bad(fault.refusal(None)), |()| Asked::End);
            }
        }
    }
}
