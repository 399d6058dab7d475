//! A client's Observe stream, carried by as many upstream streams in turn as needed.
//!
//! Owns: opening the next stream, finding the reason of a stream's end. [`ObservedLeaders`] decides which
//! leaders are news. Must not know: TLS, sessions, how a member is connected.
//! Invariants: a silent end is believed only if etcd also refuses the user to read the election, or for the
//! second time in a row after a successful read; `hasleader` always goes upstream, so a member without a
//! leader ends the stream instead of going silent; while the client does not read, no upstream message is
//! read.
//!
//! etcd ends an Observe with OK and without a message if the token is unknown, if the permission is missing,
//! and if etcd's own watch breaks (server/etcdserver/api/v3election/election.go).

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

use crate::credentials::CallCredential;
use crate::downstream::client_replies::ReplySender;
use crate::identity::MemberId;
use crate::lease::lock_queue::LockQueue;
use crate::lease::observed_leaders::{LeaderNews, ObservedLeaders};
use crate::members::choose::MemberTarget;
use crate::members::cluster_outage::UpstreamLink;
use crate::members::membership::{AuthSetting, Member, MembershipHint};
use crate::pb::etcdserverpb::{RangeRequest, RangeResponse};
use crate::pb::v3electionpb::LeaderRequest;
use crate::refusal::{Refusal, Status};
use crate::rpc::frame::encode;
use crate::rpc::method::{Method, lookup};
use crate::rpc::outcome::{self, StatusVerdict, is_trouble};
use crate::upstream::bidi::{Bidi, BidiEvent};
use crate::upstream::own_requests::{ReadError, ask};
use crate::upstream::send::{UpstreamClient, UpstreamUser, upstream_headers};

/// The method's path.
pub const PATH: &str = "/v3electionpb.Election/Observe";
const RANGE: &str = "/etcdserverpb.KV/Range";
const HAS_LEADER: HeaderName = HeaderName::from_static("hasleader");
const FIRST_PAUSE: Duration = Duration::from_millis(25);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// A stream open for longer at a member was not refused: a refusal comes at once.
const NOT_REFUSED: Duration = Duration::from_secs(3);
/// Interval, before jitter, between two checks that a stream has held no leader back.
const WATCH: Duration = Duration::from_secs(15);
/// Time for etcd to report a proclamation; etcd takes milliseconds.
const ANSWER: Duration = Duration::from_secs(2);
/// Silent ends in a row, each after a successful read, needed to end the client's stream.
const SILENT: u32 = 2;

/// The environment of an Observe stream.
pub struct ObserveStream {
    /// The sender of upstream requests.
    pub door: Rc<UpstreamClient>,
    /// The upstream user.
    pub whom: UpstreamUser,
    /// The client's request headers.
    pub headers: HeaderMap,
    /// The LeaderRequest, without its frame.
    pub request: Bytes,
    /// Set when the process drains.
    pub drain: tokio::sync::watch::Receiver<Option<Instant>>,
    /// Counter of upstream streams opened to resume a client's stream.
    pub resumed: prometheus_client::metrics::counter::Counter,
    /// Notes if an upstream stream serves the client's stream.
    pub link: Rc<UpstreamLink>,
}

/// An open upstream stream.
struct ObserveUpstream {
    stream: Bidi,
    member: Arc<Member>,
    shown: CallCredential,
    opened_at: Instant,
    /// A delayed read of the present leader.
    looking: LocalBoxFuture<'static, Option<ProclamationOrder>>,
    /// The last read found a leader not reported by the stream.
    behind: bool,
}

/// A proclamation by create and mod revision.
type ProclamationOrder = (i64, i64);

/// State of the upstream stream.
enum ObserveLink {
    /// No stream until the backoff has ended.
    Closed,
    /// Choosing a member and getting a credential.
    Opening(LocalBoxFuture<'static, Result<Box<ObserveUpstream>, ObserveNotOpened>>),
    Open(Box<ObserveUpstream>),
    /// The stream has ended; reading the election proves token and permission.
    Proving(LocalBoxFuture<'static, ObserveNextStep>),
}

/// An event of the upstream stream.
enum ObserveEvent {
    /// The backoff has ended.
    Due,
    Opened(Result<Box<ObserveUpstream>, ObserveNotOpened>),
    Came(BidiEvent),
    Looked(Option<ProclamationOrder>),
    Proved(ObserveNextStep),
}

/// The next step after the end of an upstream stream.
enum ObserveNextStep {
    /// Token and permission are valid at the member. The status is the client's if silent ends continue.
    Again(Status, MemberId),
    /// Open the next stream, at another member if possible, with growing backoff.
    Elsewhere(Option<MemberId>),
    /// End the client's stream with this status.
    Tell(Status),
}

/// A failed attempt to open a stream, and the member at fault.
struct ObserveNotOpened(ObserveNextStep);

/// The state of a served stream.
struct ObserveDriver {
    parts: Rc<ObserveStream>,
    method: &'static Method,
    leaders: ObservedLeaders,
    link: ObserveLink,
    /// Members that failed since the last news.
    tried: Vec<MemberId>,
    /// Streams ended since the last news.
    losses: u32,
    /// Silent ends in a row.
    silent: u32,
    not_before: Instant,
    opened: u64,
    /// A member has reported a leader.
    has_delivered: bool,
}

impl ObserveStream {
    /// Serves the client's stream to the end.
    pub async fn run(self, client: ReplySender) {
        let Some(method) = lookup(PATH) else { return };
        let mut drain = self.drain.clone();
        let mut running = ObserveDriver {
            parts: Rc::new(self),
            method,
            leaders: ObservedLeaders::default(),
            link: ObserveLink::Closed,
            tried: Vec::new(),
            losses: 0,
            silent: 0,
            not_before: Instant::now(),
            opened: 0,
            has_delivered: false,
        };
        let mut said: Option<Bytes> = None;
        loop {
            running.advance();
            tokio::select! {
                biased; // the client's end first, then the message owed, then upstream events
                () = client.gone() => return,
                _ = drain.wait_for(Option::is_some) =>
                    return client.end(Refusal::SHUTTING_DOWN.status()).await,
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

impl ObserveDriver {
    /// closed → opening, once the backoff has ended.
    fn advance(&mut self) {
        if matches!(self.link, ObserveLink::Closed) && Instant::now() >= self.not_before {
            if self.opened > 0 {
                self.parts.resumed.inc();
            }
            self.opened += 1;
            let (parts, tried) = (Rc::clone(&self.parts), self.tried.clone());
            self.link = ObserveLink::Opening(async move { parts.open(&tried).await }.boxed_local());
        }
    }

    /// The next event upstream. Cancel-safe.
    async fn event(&mut self) -> ObserveEvent {
        match &mut self.link {
            ObserveLink::Closed => {
                let wait = self.not_before.saturating_duration_since(Instant::now());
                self.parts.door.pause_or_change(wait).await;
                ObserveEvent::Due
            }
            ObserveLink::Opening(opening) => ObserveEvent::Opened(opening.await),
            ObserveLink::Open(upstream) => tokio::select! {
                biased; // a message makes the read needless
                came = upstream.stream.next() => ObserveEvent::Came(came),
                seen = &mut upstream.looking => ObserveEvent::Looked(seen),
            },
            ObserveLink::Proving(proving) => ObserveEvent::Proved(proving.await),
        }
    }

    /// Returns a message for the client, if any. An error ends the client's stream.
    fn handle(&mut self, event: ObserveEvent) -> Result<Option<Bytes>, Status> {
        let after = match event {
            ObserveEvent::Due => {
                self.not_before = Instant::now();
                return Ok(None);
            }
            ObserveEvent::Opened(Ok(upstream)) => {
                self.link = ObserveLink::Open(upstream);
                return Ok(None);
            }
            ObserveEvent::Opened(Err(ObserveNotOpened(after))) | ObserveEvent::Proved(after) => after,
            ObserveEvent::Looked(seen) => match self.looked(seen) {
                Some(member) => ObserveNextStep::Elsewhere(Some(member)),
                None => return Ok(None),
            },
            ObserveEvent::Came(BidiEvent::Message(message)) => return self.came(message),
            ObserveEvent::Came(BidiEvent::Ended(status)) => {
                match std::mem::replace(&mut self.link, ObserveLink::Closed) {
                    ObserveLink::Open(at) => return self.ended(*at, status),
                    _ => ObserveNextStep::Elsewhere(None),
                }
            }
            ObserveEvent::Came(BidiEvent::Unopened(reason)) => {
                tracing::debug!(%reason, "an observe stream was not opened");
                match &self.link {
                    ObserveLink::Open(at) => ObserveNextStep::Elsewhere(Some(at.member.id)),
                    _ => ObserveNextStep::Elsewhere(None),
                }
            }
            ObserveEvent::Came(BidiEvent::Left) => ObserveNextStep::Elsewhere(None),
            ObserveEvent::Came(BidiEvent::NoRoom) if self.has_delivered => ObserveNextStep::Elsewhere(None),
            ObserveEvent::Came(BidiEvent::NoRoom) => {
                ObserveNextStep::Tell(Refusal::TOO_MANY_REQUESTS.status())
            }
            ObserveEvent::Came(BidiEvent::Broken(reason)) => match &self.link {
                ObserveLink::Open(at) => {
                    tracing::debug!(member = %at.member.id, %reason, "an observe stream broke");
                    at.member.suspect();
                    self.parts.door.members.hints.send(MembershipHint::Unreachable(at.member.id));
                    ObserveNextStep::Elsewhere(Some(at.member.id))
                }
                _ => ObserveNextStep::Elsewhere(None),
            },
        };
        self.again(after).map(|()| None)
    }

    /// The member to be left, if the member holds a leader back: with auth on, a member serves all its
    /// observers by a single watch, and on 3.4 the watch goes silent when the token of the first user expires
    /// (etcd-io/etcd#14850).
    fn looked(&mut self, seen: Option<ProclamationOrder>) -> Option<MemberId> {
        let ObserveLink::Open(at) = &mut self.link else { return None };
        let behind = seen.is_some_and(|seen| !self.leaders.knows(seen));
        if behind && at.behind && self.parts.door.members.auth.now() == AuthSetting::On {
            return Some(at.member.id);
        }
        at.behind = behind;
        at.looking = ObserveStream::look(&self.parts, if behind { ANSWER } else { WATCH });
        None
    }

    fn came(&mut self, message: Bytes) -> Result<Option<Bytes>, Status> {
        self.silent = 0;
        self.has_delivered = true;
        self.parts.link.set_up();
        match self.leaders.told(&message) {
            LeaderNews::News => {
                if let ObserveLink::Open(at) = &mut self.link {
                    at.behind = false;
                }
                self.tried.clear();
                self.losses = 0;
                Ok(Some(message))
            }
            // Each stream begins with the present leader, so a known leader does not prove a stream good.
            LeaderNews::Known => Ok(None),
            // Perhaps a restored cluster: the client must begin anew.
            LeaderNews::Older | LeaderNews::Unreadable => {
                Err(Refusal::REQUEST_TIMED_OUT_CONNECTION_LOST.status())
            }
        }
    }

    /// open → proving: a read tells the reason of the end. An explicit refusal takes the same path, since the
    /// read renews the refused credential.
    fn ended(&mut self, at: ObserveUpstream, status: Status) -> Result<Option<Bytes>, Status> {
        tracing::debug!(member = %at.member.id, ?status, "a member ended an observe stream");
        let proof = at.shown.proof();
        let asked = outcome::JudgedCall { method: self.method, effect: self.method.effect, proof };
        if outcome::auth_state(&asked, &status) == Some(outcome::RevealedAuth::On) {
            self.parts.door.report_auth(AuthSetting::On);
        }
        if outcome::verdict(&asked, &status) == StatusVerdict::Elsewhere
            || (!status.is_ok() && is_trouble(&status))
        {
            return self.again(ObserveNextStep::Elsewhere(Some(at.member.id))).map(|()| None);
        }
        if at.opened_at.elapsed() > NOT_REFUSED {
            (self.silent, self.losses) = (0, 0);
        }
        let (parts, told) = (Rc::clone(&self.parts), outcome::translate(&asked, &status, false));
        let told = told.unwrap_or(status);
        self.link = ObserveLink::Proving(async move { parts.prove(&at.member, told).await }.boxed_local());
        Ok(None)
    }

    /// any → closed, or the end of the client's stream.
    fn again(&mut self, after: ObserveNextStep) -> Result<(), Status> {
        self.link = ObserveLink::Closed;
        self.parts.link.set_down();
        match after {
            ObserveNextStep::Tell(status) => return Err(status),
            ObserveNextStep::Again(told, member) => {
                self.silent += 1;
                if self.silent >= SILENT {
                    return Err(told);
                }
                // The first silent end is retried at the same member, with the credential renewed by the
                // read. A member may refuse a user for another user's token: the member's own watch keeps the
                // token of the first user (etcd-io/etcd#14850).
                self.tried.extend((self.losses > 0).then_some(member));
            }
            ObserveNextStep::Elsewhere(member) => self.tried.extend(member),
        }
        if !self.parts.door.has_another_ready_member(MemberTarget::Any, &self.tried) {
            self.tried.clear();
        }
        if self.losses > 0 {
            let pause = FIRST_PAUSE * 2_u32.saturating_pow(self.losses - 1);
            let half = u64::try_from(pause.min(LONGEST_PAUSE).as_millis() / 2).unwrap_or_default();
            // Half of the pause to one and a half: the observers of a lost member do not all return at once.
            let drawn = Duration::from_millis(half + self.parts.door.chooser.draw(2 * half));
            self.not_before = Instant::now() + drawn;
        }
        self.losses += 1;
        Ok(())
    }
}

impl ObserveStream {
    /// Reads the present leader after `pause` and jitter, serializable at any member.
    fn look(parts: &Rc<Self>, pause: Duration) -> LocalBoxFuture<'static, Option<ProclamationOrder>> {
        let parts = Rc::clone(parts);
        async move {
            let spread = Duration::from_millis(parts.door.chooser.draw(1000));
            tokio::time::sleep(pause + spread).await;
            let member = parts.door.choose(MemberTarget::Any, &[])?;
            let first = RangeRequest { serializable: true, ..parts.first() };
            let answer = ask(&parts.door, &parts.whom, &member, RANGE, &first.encode_to_vec()).await.ok()?;
            let leader = RangeResponse::decode(answer).ok()?.kvs.into_iter().next()?;
            Some((leader.create_revision, leader.mod_revision))
        }
        .boxed_local()
    }

    /// A Range of the present leader.
    fn first(&self) -> RangeRequest {
        let name = LeaderRequest::decode(self.request.clone()).unwrap_or_default().name;
        LockQueue::of(&name).first()
    }

    async fn open(self: &Rc<Self>, tried: &[MemberId]) -> Result<Box<ObserveUpstream>, ObserveNotOpened> {
        let nobody = ObserveNotOpened(ObserveNextStep::Elsewhere(None));
        let member = self.door.choose(MemberTarget::Any, tried).ok_or(nobody)?;
        let shown = self.door.credential_for(&self.whom, &member).await.map_err(|failure| {
            ObserveNotOpened(if failure.is_refusal() {
                ObserveNextStep::Tell(Refusal::INVALID_AUTH_TOKEN.status())
            } else {
                ObserveNextStep::Elsewhere(Some(member.id))
            })
        })?;
        let mut head = upstream_headers(&self.headers, &shown);
        head.fields.insert(HAS_LEADER, HeaderValue::from_static("true"));
        // The client's deadline is kept downstream; upstream the timeout would restart with each stream.
        head.fields.remove("grpc-timeout");
        let path = PathAndQuery::from_static(PATH);
        let stream = Bidi::ask(&self.door, &member, path, head, encode(&self.request));
        let looking = Self::look(self, WATCH);
        Ok(Box::new(ObserveUpstream {
            stream,
            member,
            shown,
            opened_at: Instant::now(),
            looking,
            behind: false,
        }))
    }

    /// Reads the election as the client: the read needs the same permission and the same token.
    async fn prove(&self, member: &Arc<Member>, told: Status) -> ObserveNextStep {
        let first = self.first().encode_to_vec();
        match ask(&self.door, &self.whom, member, RANGE, &first).await {
            Ok(_) => ObserveNextStep::Again(told, member.id),
            Err(ReadError::Refused(status)) if !is_trouble(&status) => ObserveNextStep::Tell(told),
            Err(ReadError::Login(failure)) if failure.is_refusal() => {
                ObserveNextStep::Tell(Refusal::INVALID_AUTH_TOKEN.status())
            }
            Err(_) => ObserveNextStep::Elsewhere(Some(member.id)),
        }
    }
}
