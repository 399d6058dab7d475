//! A client's keepalive stream, carried by as many upstream streams in turn as needed.
//!
//! Owns: moving messages between the client and a member, choosing the next member, renewing a refused
//! credential. The meaning of an answer is decided by [`PendingRenewals`]. Must not know: TLS, sessions, how
//! a member is connected.
//! Invariants: the leader is asked first; an upstream stream is opened only for an unanswered request; a
//! half-close ends the stream only after all requests were answered; the loss of the client ends the stream
//! at once.

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

use crate::credentials::{CallCredential, LoginFailure};
use crate::downstream::client_replies::ReplySender;
use crate::downstream::request_messages::{ClientRequestItem, RequestBody, RequestMessages};
use crate::identity::MemberId;
use crate::lease::pending_renewals::{PendingRenewals, RenewalVerdict, ZeroTtl};
use crate::members::choose::MemberTarget;
use crate::members::cluster_outage::UpstreamLink;
use crate::members::membership::{AuthSetting, Member, MembershipHint};
use crate::members::outage_state::Outage;
use crate::pb::etcdserverpb::{LeaseKeepAliveRequest, LeaseKeepAliveResponse};
use crate::refusal::{Code, Refusal, Status};
use crate::rpc::frame::encode;
use crate::rpc::method::{Method, lookup};
use crate::rpc::outcome;
use crate::upstream::bidi::{Bidi, BidiEvent};
use crate::upstream::own_requests::linearizable_revision;
use crate::upstream::send::{UpstreamClient, UpstreamUser, upstream_headers};

const PATH: &str = "/etcdserverpb.Lease/LeaseKeepAlive";
/// Largest keepalive request. A request is a single number; the rest is room for fields added by later
/// versions of etcd.
const LARGEST_REQUEST: usize = 64 * 1024;
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);
/// Time for which a request may stay unanswered before the client's stream ends: etcd's own limit.
const PATIENCE: Duration = Duration::from_secs(7);
/// Time after which a member without an answer is left for another member. etcd answers requests singly,
/// nearly always in milliseconds; a renewal sent twice renews once.
const ANSWER: Duration = Duration::from_secs(5);

/// The environment of a keepalive stream.
pub struct KeepAliveStream {
    /// The sender of upstream requests.
    pub door: Rc<UpstreamClient>,
    /// The upstream user.
    pub whom: UpstreamUser,
    /// The client's request headers.
    pub headers: HeaderMap,
    /// Set when the process drains.
    pub drain: tokio::sync::watch::Receiver<Option<Instant>>,
    /// Counter of upstream streams opened to resume a client's stream.
    pub resumed: prometheus_client::metrics::counter::Counter,
    /// Notes if an upstream stream serves the client's stream.
    pub link: Rc<UpstreamLink>,
}

/// An open upstream stream.
struct KeepAliveUpstream {
    stream: Bidi,
    member: Arc<Member>,
    shown: CallCredential,
}

/// State of the upstream stream.
enum KeepAliveLink {
    /// No stream: no request is unanswered, or the backoff has not ended.
    Closed,
    /// Choosing a member and getting a credential.
    Opening(LocalBoxFuture<'static, Result<Box<KeepAliveUpstream>, KeepAliveNotOpened>>),
    /// Requests are sent, answers received.
    Open(Box<KeepAliveUpstream>),
    /// An answer was doubtful: a linearizable read runs before the request is sent again.
    Confirming(LocalBoxFuture<'static, ()>),
}

/// An event of the upstream stream.
enum KeepAliveEvent {
    /// The backoff has ended.
    Due,
    Opened(Result<Box<KeepAliveUpstream>, KeepAliveNotOpened>),
    Came(BidiEvent),
    /// No answer within [`ANSWER`].
    Silent,
    Confirmed,
}

/// The next step after the end of an upstream stream.
enum KeepAliveNextStep {
    /// Open the next stream at once.
    Now,
    /// Open the next stream, at another member if possible, with growing backoff.
    Elsewhere,
    /// End the client's stream with this status.
    Tell(Status),
}

/// A failed attempt to open a stream, and the member at fault.
struct KeepAliveNotOpened {
    after: KeepAliveNextStep,
    member: Option<MemberId>,
}

/// The state of a served stream.
struct KeepAliveDriver {
    parts: Rc<KeepAliveStream>,
    method: &'static Method,
    pending: PendingRenewals,
    link: KeepAliveLink,
    /// Members that failed since the last answer.
    tried: Vec<MemberId>,
    /// Streams lost since the last answer.
    losses: u32,
    not_before: Instant,
    /// Start of the front request's wait on the present stream.
    waiting_since: Instant,
    /// Start of the front request's whole wait, if a stream was lost meanwhile.
    stuck_since: Option<Instant>,
    opened: u64,
    /// A request of the client's stream was answered.
    stood: bool,
    /// The client has half-closed the stream.
    half_closed: bool,
}

impl KeepAliveStream {
    /// Serves the client's stream to the end.
    pub async fn run(self, body: RequestBody, client: ReplySender) {
        let Some(method) = lookup(PATH) else { return };
        let mut drain = self.drain.clone();
        let mut requests = RequestMessages::new(body, LARGEST_REQUEST);
        let mut running = KeepAliveDriver {
            parts: Rc::new(self),
            method,
            pending: PendingRenewals::default(),
            link: KeepAliveLink::Closed,
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
                biased; // the client's end first: no answer can be delivered afterwards
                () = client.gone() => return,
                _ = drain.wait_for(Option::is_some) =>
                    return client.end(Refusal::SHUTTING_DOWN.status()).await,
                asked = requests.next(), if asks => match asked {
                    ClientRequestItem::Message(message)
                        if LeaseKeepAliveRequest::decode(message.clone()).is_ok() =>
                    {
                        running.asked(message);
                    }
                    ClientRequestItem::Message(_) => {
                        let refusal = Refusal::not_canonical("not a LeaseKeepAliveRequest");
                        return client.end(refusal.status()).await;
                    }
                    ClientRequestItem::End => running.half_closed = true,
                    ClientRequestItem::Bad(refusal) => return client.end(refusal.status()).await,
                    ClientRequestItem::Gone => return,
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

impl KeepAliveDriver {
    fn asked(&mut self, message: Bytes) {
        if self.pending.is_empty() {
            self.waiting_since = Instant::now();
            // A request stuck before may have been withheld.
            self.stuck_since = None;
        }
        self.pending.push(message);
    }

    /// closed → opening, if a request is unanswered; on an open stream, sends the requests not yet sent.
    fn advance(&mut self) {
        match &mut self.link {
            KeepAliveLink::Closed if !self.pending.is_empty() && Instant::now() >= self.not_before => {
                if self.opened > 0 {
                    self.parts.resumed.inc();
                }
                self.opened += 1;
                let (parts, tried) = (Rc::clone(&self.parts), self.tried.clone());
                self.link = KeepAliveLink::Opening(async move { parts.open(&tried).await }.boxed_local());
            }
            KeepAliveLink::Open(upstream) => {
                while let Some(message) = self.pending.next_to_ask() {
                    upstream.stream.send(&message);
                }
            }
            KeepAliveLink::Closed | KeepAliveLink::Opening(_) | KeepAliveLink::Confirming(_) => {}
        }
    }

    /// The next event of the upstream stream. Cancel-safe.
    async fn event(&mut self) -> KeepAliveEvent {
        match &mut self.link {
            KeepAliveLink::Closed if self.pending.is_empty() => std::future::pending().await,
            KeepAliveLink::Closed => {
                let wait = self.not_before.saturating_duration_since(Instant::now());
                self.parts.door.pause_or_change(wait).await;
                KeepAliveEvent::Due
            }
            KeepAliveLink::Opening(opening) => KeepAliveEvent::Opened(opening.await),
            KeepAliveLink::Open(upstream) if self.pending.is_empty() => {
                KeepAliveEvent::Came(upstream.stream.next().await)
            }
            KeepAliveLink::Open(upstream) => {
                let limit = Instant::now().max(self.waiting_since + ANSWER);
                tokio::time::timeout_at(limit, upstream.stream.next())
                    .await
                    .map_or(KeepAliveEvent::Silent, KeepAliveEvent::Came)
            }
            KeepAliveLink::Confirming(read) => {
                read.await;
                KeepAliveEvent::Confirmed
            }
        }
    }

    /// Returns the answer for the client, if complete. An error ends the client's stream.
    fn handle(&mut self, event: KeepAliveEvent) -> Result<Option<Bytes>, Status> {
        let after = match event {
            KeepAliveEvent::Due => {
                self.not_before = Instant::now();
                return Ok(None);
            }
            KeepAliveEvent::Opened(Ok(upstream)) => {
                self.waiting_since = Instant::now();
                self.link = KeepAliveLink::Open(upstream);
                return Ok(None);
            }
            KeepAliveEvent::Opened(Err(KeepAliveNotOpened { after, member })) => {
                self.tried.extend(member);
                after
            }
            KeepAliveEvent::Confirmed => KeepAliveNextStep::Now,
            KeepAliveEvent::Silent => KeepAliveNextStep::Elsewhere,
            KeepAliveEvent::Came(BidiEvent::Message(message)) => return self.answered(message),
            KeepAliveEvent::Came(BidiEvent::Ended(status)) => match &self.link {
                KeepAliveLink::Open(at) => self.parts.ended(self.method, &mut self.pending, at, &status),
                _ => KeepAliveNextStep::Now,
            },
            KeepAliveEvent::Came(BidiEvent::Unopened(reason)) => {
                tracing::debug!(%reason, "a keepalive stream was not opened");
                KeepAliveNextStep::Elsewhere
            }
            KeepAliveEvent::Came(BidiEvent::Left) => KeepAliveNextStep::Elsewhere,
            KeepAliveEvent::Came(BidiEvent::NoRoom) if self.stood => KeepAliveNextStep::Elsewhere,
            KeepAliveEvent::Came(BidiEvent::NoRoom) => {
                KeepAliveNextStep::Tell(Refusal::TOO_MANY_REQUESTS.status())
            }
            KeepAliveEvent::Came(BidiEvent::Broken(reason)) => {
                if let KeepAliveLink::Open(at) = &self.link {
                    tracing::debug!(member = %at.member.id, %reason, "a keepalive stream broke");
                    at.member.suspect();
                    self.parts.door.members.hints.send(MembershipHint::Unreachable(at.member.id));
                }
                KeepAliveNextStep::Elsewhere
            }
        };
        self.again(after).map(|()| None)
    }

    fn answered(&mut self, message: Bytes) -> Result<Option<Bytes>, Status> {
        let KeepAliveLink::Open(at) = &self.link else { return Ok(None) };
        let zero = if at.member.traits().keepalive_false_zero { ZeroTtl::Confirm } else { ZeroTtl::Final };
        let answer = LeaseKeepAliveResponse::decode(message.clone()).ok();
        match answer.map(|answer| self.pending.answered(answer.ttl, zero)) {
            Some(RenewalVerdict::Deliver) => {
                self.stood = true;
                self.parts.link.set_up();
                self.losses = 0;
                self.stuck_since = None;
                self.tried.clear();
                self.waiting_since = Instant::now();
                Ok(Some(message))
            }
            Some(RenewalVerdict::Confirm) => {
                let (parts, member) = (Rc::clone(&self.parts), Arc::clone(&at.member));
                self.link = KeepAliveLink::Confirming(async move { parts.read(&member).await }.boxed_local());
                self.pending.lost();
                Ok(None)
            }
            Some(RenewalVerdict::Stray) | None => self.again(KeepAliveNextStep::Elsewhere).map(|()| None),
        }
    }

    /// any → closed: unanswered requests are sent again, the first time at once.
    fn again(&mut self, after: KeepAliveNextStep) -> Result<(), Status> {
        self.pending.lost();
        self.parts.link.set_down();
        let link = std::mem::replace(&mut self.link, KeepAliveLink::Closed);
        match after {
            KeepAliveNextStep::Tell(status) => return Err(status),
            KeepAliveNextStep::Now => return Ok(()),
            KeepAliveNextStep::Elsewhere if self.pending.is_empty() => return Ok(()),
            KeepAliveNextStep::Elsewhere => {}
        }
        if let KeepAliveLink::Open(at) = link {
            self.tried.push(at.member.id);
        }
        if !self.parts.door.has_another_ready_member(MemberTarget::LeaderFirst, &self.tried) {
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

impl KeepAliveStream {
    /// The refusal of a request left unanswered by all members. A Go client with `WithRequireLeader` gives up
    /// its keepalives when told that the cluster has no leader.
    fn unanswered(&self) -> Refusal {
        match self.door.members.snapshot.load().outage {
            Outage::None => Refusal::REQUEST_TIMED_OUT,
            Outage::NoLeader { .. } => Refusal::NO_LEADER,
            Outage::Unreachable { .. } => Refusal::REQUEST_TIMED_OUT_CONNECTION_LOST,
        }
    }

    async fn open(&self, tried: &[MemberId]) -> Result<Box<KeepAliveUpstream>, KeepAliveNotOpened> {
        let nobody = KeepAliveNotOpened { after: KeepAliveNextStep::Elsewhere, member: None };
        let member = self.door.choose(MemberTarget::LeaderFirst, tried).ok_or(nobody)?;
        let shown = self.door.credential_for(&self.whom, &member).await.map_err(|failure| {
            let after = match failure {
                LoginFailure::WrongPassword | LoginFailure::NoPassword => {
                    KeepAliveNextStep::Tell(Refusal::INVALID_AUTH_TOKEN.status())
                }
                _ => KeepAliveNextStep::Elsewhere,
            };
            KeepAliveNotOpened { after, member: Some(member.id) }
        })?;
        let mut head = upstream_headers(&self.headers, &shown);
        // The client's deadline is kept downstream; upstream the timeout would restart with each stream.
        head.fields.remove("grpc-timeout");
        let stream = Bidi::open(&self.door, &member, PathAndQuery::from_static(PATH), head);
        Ok(Box::new(KeepAliveUpstream { stream, member, shown }))
    }

    /// A linearizable read: the answering member has applied every grant acknowledged before.
    async fn read(&self, member: &Arc<Member>) {
        let read = linearizable_revision(&self.door, &self.whom, member, b"\0").await;
        tracing::debug!(member = %member.id, confirmed = read.is_ok(), "a lease was told as gone");
    }

    fn ended(
        &self,
        method: &'static Method,
        pending: &mut PendingRenewals,
        at: &KeepAliveUpstream,
        status: &Status,
    ) -> KeepAliveNextStep {
        let asked = outcome::JudgedCall { method, effect: method.effect, proof: at.shown.proof() };
        if outcome::auth_state(&asked, status) == Some(outcome::RevealedAuth::On) {
            self.door.report_auth(AuthSetting::On);
            if matches!(self.whom, UpstreamUser::User(_)) {
                return self.refused(pending, at, status);
            }
        }
        match (outcome::verdict(&asked, status), &self.whom) {
            // After a change of users or roles, the next request may pass with the same certificate.
            (outcome::StatusVerdict::Heal, UpstreamUser::User(identity))
                if identity.renew(at.member.id, &at.shown) || outcome::is_outdated(&asked, status) =>
            {
                self.refused(pending, at, status)
            }
            (outcome::StatusVerdict::Heal | outcome::StatusVerdict::Final, _)
                if status.code == Code::PermissionDenied =>
            {
                self.refused(pending, at, status)
            }
            // etcd ended the stream with requests unanswered.
            (outcome::StatusVerdict::Final, _) if status.is_ok() => KeepAliveNextStep::Elsewhere,
            (outcome::StatusVerdict::Heal | outcome::StatusVerdict::Final, _) => {
                KeepAliveNextStep::Tell(status.clone())
            }
            // The error concerns the member only; another member may do better.
            (outcome::StatusVerdict::Elsewhere | outcome::StatusVerdict::Unclear, _) => {
                self.door.members.hints.send(MembershipHint::NotLeader(at.member.id));
                KeepAliveNextStep::Elsewhere
            }
        }
    }

    /// A lease that may not be renewed must not end the renewals of other leases (docs/decisions.md#d26). A
    /// request refused twice by a member, the second time with a fresh credential, is truly forbidden.
    fn refused(
        &self,
        pending: &mut PendingRenewals,
        at: &KeepAliveUpstream,
        status: &Status,
    ) -> KeepAliveNextStep {
        if pending.refused(at.member.id) && !pending.withhold() {
            return KeepAliveNextStep::Tell(status.clone());
        }
        KeepAliveNextStep::Now
    }
}
