//! A client's keepalive stream, carried by as many upstream streams in turn as needed.
//!
//! Owns: moving messages between the client and a member, and the next step after an end. The meaning of an
//! answer is decided by [`PendingRenewals`], streams are opened by [`ReopeningStream`]. Must not know: TLS,
//! sessions, how a member is connected.
//! Invariants: the leader is asked first; an upstream stream is opened only for an unanswered request; a
//! half-close ends the stream only after all requests were answered; the loss of the client ends the stream
//! at once.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::HeaderMap;
use prost::Message as _;
use tokio::time::Instant;

use crate::lease::pending_renewals::{PendingRenewals, RenewalVerdict, ZeroTtl};
use crate::lease::renewal_namespace::RenewalNamespace;
use crate::lease::renewal_permission::{JudgedRenewal, RenewalAccess, RenewalPermissions};
use crate::lease::renewed_leases::RenewedLeases;
use keyward_access::policy::permit::Permit;
use keyward_access::usage::live_usage::LiveUsage;
use keyward_cluster::choose::MemberTarget;
use keyward_cluster::cluster_outage::UpstreamLink;
use keyward_cluster::membership::{Member, MembershipHint};
use keyward_cluster::outage_state::Outage;
use keyward_downstream::client_replies::ReplySender;
use keyward_downstream::request_messages::{ClientRequestItem, RequestBody, RequestMessages};
use keyward_etcd::pb::etcdserverpb::{LeaseKeepAliveRequest, LeaseKeepAliveResponse};
use keyward_etcd::refusal::{AnswerEnd, Code, Refusal, Status};
use keyward_etcd::rpc::frame::encode;
use keyward_etcd::rpc::method::lookup;
use keyward_etcd::rpc::outcome::{StatusVerdict, is_outdated, verdict};
use keyward_upstream::bidi::BidiEvent;
use keyward_upstream::own_requests::linearizable_revision;
use keyward_upstream::reopening_stream::{
    ReopenStep, ReopeningEvent, ReopeningStream, StreamRoute, StreamRules,
};
use keyward_upstream::send::{UpstreamClient, UpstreamUser};

const PATH: &str = "/etcdserverpb.Lease/LeaseKeepAlive";
/// Largest keepalive request. A request is a single number; the rest is room for fields added by later
/// versions of etcd.
const LARGEST_REQUEST: usize = 64 * 1024;
const RULES: StreamRules = StreamRules {
    first_pause: Duration::from_millis(20),
    longest_pause: Duration::from_millis(500),
    has_jitter: false,
    requires_leader: false,
};
/// Time for which a request may stay unanswered before the client's stream ends: etcd's own limit.
const PATIENCE: Duration = Duration::from_secs(7);
/// Time after which a member without an answer is left for another member. etcd answers requests singly,
/// nearly always in milliseconds; a renewal sent twice renews once.
const ANSWER: Duration = Duration::from_secs(5);

/// The environment of a keepalive stream.
pub struct KeepAliveStream {
    /// The sender of upstream requests.
    pub upstream: Rc<UpstreamClient>,
    /// The upstream user.
    pub user: UpstreamUser,
    /// The client's request headers.
    pub headers: HeaderMap,
    /// The policy's permit for the stream.
    pub permit: Permit,
    /// The caller's permissions, for the decision on each renewal.
    pub access: Option<RenewalAccess>,
    /// The caller's namespace.
    pub namespace: Option<RenewalNamespace>,
    /// The caller's limits, which know the caller's leases; `None` for a caller that no limit counts.
    pub usage: Option<Rc<LiveUsage>>,
    /// Counter of upstream streams opened to resume a client's stream.
    pub resumed: prometheus_client::metrics::counter::Counter,
    /// Notes if an upstream stream serves the client's stream.
    pub link: Rc<UpstreamLink>,
    /// Notes the leases kept alive, for an operator's questions.
    pub renewed: Rc<RenewedLeases>,
}

/// The state of a served stream.
struct KeepAliveDriver {
    /// Checked by a linearizable read after a doubtful answer, before the request is sent again.
    upstream: ReopeningStream<()>,
    pending: PendingRenewals,
    namespace: Option<RenewalNamespace>,
    usage: Option<Rc<LiveUsage>>,
    renewed: Rc<RenewedLeases>,
    /// Start of the front request's wait on the present stream.
    waiting_since: Instant,
    /// Start of the front request's whole wait, if a stream was lost meanwhile.
    stuck_since: Option<Instant>,
    /// The client has half-closed the stream.
    half_closed: bool,
}

impl KeepAliveStream {
    /// Serves the client's stream to the end.
    pub async fn run(self, body: RequestBody, client: ReplySender) {
        let Self { upstream, user, headers, permit, access, namespace, usage, resumed, link, renewed } = self;
        let Some(method) = lookup(PATH) else { return };
        let mut permissions = RenewalPermissions::new(Rc::clone(&upstream), user.clone(), access);
        let route = StreamRoute { upstream, user, headers, method, rules: &RULES, request: None, permit };
        let mut requests = RequestMessages::new(body, LARGEST_REQUEST);
        let mut running = KeepAliveDriver {
            upstream: ReopeningStream::new(route, MemberTarget::LeaderFirst, resumed, link),
            pending: PendingRenewals::default(),
            namespace,
            usage,
            renewed,
            waiting_since: Instant::now(),
            stuck_since: None,
            half_closed: false,
        };
        loop {
            if running.half_closed && running.pending.is_empty() && !permissions.is_asking() {
                return client.end(Status::OK);
            }
            running.send_pending();
            let asks = !running.half_closed && !running.pending.is_full() && !permissions.is_asking();
            tokio::select! {
                biased; // the client's end first: no answer can be delivered afterwards
                () = client.gone() => return,
                asked = requests.next(), if asks => match asked {
                    ClientRequestItem::Message(message) => {
                        let Some(lease) = running.renewed_lease(&message) else {
                            let refusal = Refusal::not_canonical("not a LeaseKeepAliveRequest");
                            return client.end(refusal);
                        };
                        match permissions.admit(method, lease, message, Instant::now()) {
                            Ok(Some(message)) => running.asked(message),
                            Ok(None) => {}
                            Err(refusal) => return client.end(permissions.end(refusal)),
                        }
                    }
                    ClientRequestItem::End => running.half_closed = true,
                    ClientRequestItem::Bad(refusal) => return client.end(refusal),
                    ClientRequestItem::Gone => return,
                },
                judged = permissions.next(), if permissions.is_asking() => {
                    if let Err(refusal) = running.judged(judged) {
                        return client.end(permissions.end(refusal));
                    }
                }
                event = running.event() => match running.handle(event) {
                    Ok(None) => {}
                    Ok(Some(answer)) => if client.say(encode(&answer)).await.is_err() {
                        return;
                    },
                    Err(end) => return client.end(end),
                }
            }
        }
    }
}

impl KeepAliveDriver {
    /// The lease renewed for a client's request; `None` if the request cannot be read.
    fn renewed_lease(&self, message: &Bytes) -> Option<i64> {
        match &self.namespace {
            Some(namespace) => namespace.admit(message),
            None => LeaseKeepAliveRequest::decode(message.clone()).ok().map(|request| request.id),
        }
    }

    fn asked(&mut self, message: Bytes) {
        if self.pending.is_empty() {
            self.waiting_since = Instant::now();
            // A request stuck before may have been withheld.
            self.stuck_since = None;
        }
        self.pending.push(message);
    }

    /// Takes a renewal with etcd's verdict. A forbidden renewal is withheld, as one refused by a patched
    /// member is (docs/decisions.md#d26).
    ///
    /// # Errors
    /// The refusal ends the client's stream: the stream knows no other lease, or etcd gave no verdict.
    fn judged(&mut self, renewal: JudgedRenewal) -> Result<(), Refusal> {
        match renewal.verdict {
            Ok(()) => self.asked(renewal.message),
            Err(refusal)
                if refusal.code() == Code::PermissionDenied
                    && self.pending.has_other_lease(&renewal.message) => {}
            Err(refusal) => return Err(refusal),
        }
        Ok(())
    }

    /// Opens a stream if a request is unanswered; on an open stream, sends the requests not yet sent.
    fn send_pending(&mut self) {
        if let Some(stream) = self.upstream.open_stream() {
            while let Some(message) = self.pending.next_to_ask() {
                let namespace = self.namespace.as_ref();
                let message = namespace.map_or_else(|| message.clone(), |own| own.request(message.clone()));
                stream.bidi.send(&message);
            }
        } else if !self.pending.is_empty() {
            self.upstream.open();
        }
    }

    /// The next event of the upstream stream; `None` if the member did not answer within [`ANSWER`].
    /// Cancel-safe.
    async fn event(&mut self) -> Option<ReopeningEvent<()>> {
        if self.pending.is_empty() || self.upstream.open_stream().is_none() {
            return Some(self.upstream.next().await);
        }
        let limit = Instant::now().max(self.waiting_since + ANSWER);
        tokio::time::timeout_at(limit, self.upstream.next()).await.ok()
    }

    /// Returns the answer for the client, if complete. An error ends the client's stream.
    fn handle(&mut self, event: Option<ReopeningEvent<()>>) -> Result<Option<Bytes>, AnswerEnd> {
        let step = match event {
            None => self.upstream.leave_member(),
            Some(ReopeningEvent::Opened) => {
                self.waiting_since = Instant::now();
                return Ok(None);
            }
            Some(ReopeningEvent::NotOpened(step)) => step,
            Some(ReopeningEvent::Checked(())) => ReopenStep::Now,
            Some(ReopeningEvent::Received(BidiEvent::Message(message))) => return self.answered(message),
            Some(ReopeningEvent::Received(BidiEvent::Ended(status))) => self.ended(&status),
            Some(ReopeningEvent::Received(end)) => self.upstream.step_after(&end),
        };
        self.reopen(step).map(|()| None)
    }

    fn answered(&mut self, message: Bytes) -> Result<Option<Bytes>, AnswerEnd> {
        let Some(at) = self.upstream.open_stream() else { return Ok(None) };
        let zero = if at.member.traits().keepalive_false_zero { ZeroTtl::Confirm } else { ZeroTtl::Final };
        let answer = LeaseKeepAliveResponse::decode(message.clone()).ok();
        let asked = self.namespace.is_some().then(|| self.pending.first().cloned()).flatten();
        match answer.as_ref().map(|answer| self.pending.answered(answer.ttl, zero)) {
            Some(RenewalVerdict::Deliver) => {
                let usage = self.usage.as_ref().and_then(|usage| usage.now());
                if let (Some(usage), Some(answer)) = (usage, &answer) {
                    usage.note_renewal(answer.id, answer.ttl);
                }
                self.upstream.note_delivery();
                self.upstream.forget_losses();
                self.stuck_since = None;
                self.waiting_since = Instant::now();
                let Some(answer) = &answer else { return Ok(Some(message)) };
                self.renewed.note(answer.id, answer.ttl, self.waiting_since);
                Ok(Some(match &asked {
                    Some(asked) => RenewalNamespace::answer(asked, answer, message),
                    None => message,
                }))
            }
            Some(RenewalVerdict::Confirm) => {
                let member = Arc::clone(&at.member);
                self.upstream.check(confirm(Rc::clone(&self.upstream.route), member));
                self.pending.lost();
                Ok(None)
            }
            Some(RenewalVerdict::Stray) | None => {
                let step = self.upstream.leave_member();
                self.reopen(step).map(|()| None)
            }
        }
    }

    /// any → closed: unanswered requests are sent again, the first time at once.
    fn reopen(&mut self, mut step: ReopenStep) -> Result<(), AnswerEnd> {
        self.pending.lost();
        if matches!(step, ReopenStep::Elsewhere(_)) {
            if self.pending.is_empty() {
                step = ReopenStep::Now;
            } else if self.stuck_since.get_or_insert(self.waiting_since).elapsed() > PATIENCE {
                step = ReopenStep::End(self.unanswered().into());
            }
        }
        self.upstream.close(step)
    }

    /// The refusal of a request left unanswered by all members. A Go client with `WithRequireLeader` gives up
    /// its keepalives when told that the cluster has no leader.
    fn unanswered(&self) -> Refusal {
        match self.upstream.route.upstream.members.snapshot.load().outage {
            Outage::None => Refusal::REQUEST_TIMED_OUT,
            Outage::NoLeader { .. } => Refusal::NO_LEADER,
            Outage::Unreachable { .. } => Refusal::REQUEST_TIMED_OUT_CONNECTION_LOST,
        }
    }

    fn ended(&mut self, status: &Status) -> ReopenStep {
        let has_user = matches!(self.upstream.route.user, UpstreamUser::User(_));
        let Some(at) = self.upstream.open_stream() else { return ReopenStep::Now };
        let (asked, member) = (at.judged(), at.member.id);
        let verdict = verdict(&asked, status);
        let is_refused = at.reports_auth_on(status) && has_user
            || match verdict {
                // After a change of users or roles, the next request may pass with the same certificate.
                StatusVerdict::Heal if has_user && at.renew_credential() => true,
                StatusVerdict::Heal if has_user && is_outdated(&asked, status) => true,
                StatusVerdict::Heal | StatusVerdict::Final => status.code == Code::PermissionDenied,
                StatusVerdict::Elsewhere | StatusVerdict::Unclear => false,
            };
        // A lease that may not be renewed must not end the renewals of other leases (docs/decisions.md#d26).
        // A request refused twice by a member, the second time with a fresh credential, is truly forbidden.
        if is_refused && (!self.pending.refused(member) || self.pending.withhold()) {
            return ReopenStep::Now;
        }
        match verdict {
            _ if is_refused => ReopenStep::End(status.clone().into()),
            // etcd ended the stream with requests unanswered.
            StatusVerdict::Final if status.is_ok() => ReopenStep::Elsewhere(Some(member)),
            StatusVerdict::Heal | StatusVerdict::Final => ReopenStep::End(status.clone().into()),
            // The error concerns the member only; another member may do better.
            StatusVerdict::Elsewhere | StatusVerdict::Unclear => {
                let hints = &self.upstream.route.upstream.members.hints;
                hints.send(MembershipHint::NotLeader(member));
                ReopenStep::Elsewhere(Some(member))
            }
        }
    }
}

/// A linearizable read: the answering member has applied every grant acknowledged before.
async fn confirm(route: Rc<StreamRoute>, member: Arc<Member>) {
    let read = linearizable_revision(&route.upstream, &route.user, &member, b"\0").await;
    tracing::debug!(member = %member.id, confirmed = read.is_ok(), "a lease was told as gone");
}
