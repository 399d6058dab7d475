//! A client's Observe stream, carried by as many upstream streams in turn as needed.
//!
//! Owns: finding the reason of a stream's end. [`ObservedLeaders`] decides which leaders are news, streams
//! are opened by [`ReopeningStream`]. Must not know: TLS, sessions, how a member is connected.
//! Invariants: a silent end is believed only if etcd also refuses the user to read the election, or for the
//! second time in a row after a successful read; `hasleader` always goes upstream, so a member without a
//! leader ends the stream instead of going silent; while the client does not read, no upstream message is
//! read.
//!
//! etcd ends an Observe with OK and without a message if the token is unknown, if the permission is missing,
//! and if etcd's own watch breaks (server/etcdserver/api/v3election/election.go).

use std::future::poll_fn;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::future::LocalBoxFuture;
use http::HeaderMap;
use prost::Message as _;
use tokio::time::Instant;

use crate::lease::lock_queue::LockQueue;
use crate::lease::observed_leaders::{LeaderNews, ObservedLeaders};
use keyward_access::policy::permit::Permit;
use keyward_cluster::choose::MemberTarget;
use keyward_cluster::cluster_outage::UpstreamLink;
use keyward_cluster::membership::{AuthSetting, Member};
use keyward_downstream::client_replies::{ClientGone, ReplySender, TakenGuard};
use keyward_downstream::stream_budget::StreamByteShare;
use keyward_etcd::identity::MemberId;
use keyward_etcd::pb::etcdserverpb::{RangeRequest, RangeResponse};
use keyward_etcd::pb::v3electionpb::LeaderRequest;
use keyward_etcd::refusal::{AnswerEnd, Refusal, Status};
use keyward_etcd::rpc::frame::encode;
use keyward_etcd::rpc::method::{Method, lookup};
use keyward_etcd::rpc::namespace::Namespace;
use keyward_etcd::rpc::outcome::{StatusVerdict, is_trouble, translate, verdict};
use keyward_upstream::bidi::BidiEvent;
use keyward_upstream::own_requests::{ReadError, ask};
use keyward_upstream::reopening_stream::{
    ReopenStep, ReopeningEvent, ReopeningStream, StreamRoute, StreamRules,
};
use keyward_upstream::send::{UpstreamClient, UpstreamUser};

/// The method's path.
pub const PATH: &str = "/v3electionpb.Election/Observe";
const RANGE: &str = "/etcdserverpb.KV/Range";
const RULES: StreamRules = StreamRules {
    first_pause: Duration::from_millis(25),
    longest_pause: Duration::from_secs(1),
    has_jitter: true,
    requires_leader: true,
};
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
    pub upstream: Rc<UpstreamClient>,
    /// The upstream user.
    pub user: UpstreamUser,
    /// The client's request headers.
    pub headers: HeaderMap,
    /// The LeaderRequest, without its frame.
    pub request: Bytes,
    /// The policy's permit for the request.
    pub permit: Permit,
    /// The caller's namespace: the request has its prefix, the client's answers have not.
    pub namespace: Option<Arc<Namespace>>,
    /// Counter of upstream streams opened to resume a client's stream.
    pub resumed: prometheus_client::metrics::counter::Counter,
    /// Notes if an upstream stream serves the client's stream.
    pub link: Rc<UpstreamLink>,
    /// Counts the messages that the client has not taken.
    pub share: Rc<StreamByteShare>,
}

/// The leaders held back by an open stream.
struct LeaderCheck {
    opened_at: Instant,
    /// A delayed read of the present leader.
    reading: LocalBoxFuture<'static, Option<ProclamationOrder>>,
    /// The last read found a leader not reported by the stream.
    behind: bool,
}

/// A proclamation by create and mod revision.
type ProclamationOrder = (i64, i64);

/// The outcome of reading the election after the end of a stream.
enum ElectionRead {
    /// Token and permission are valid at the member. The status is the client's if silent ends continue.
    Allowed(Status, MemberId),
    Failed(ReopenStep),
}

/// An event of the upstream stream.
enum ObserveEvent {
    Upstream(ReopeningEvent<ElectionRead>),
    LeaderRead(Option<ProclamationOrder>),
}

/// The state of a served stream.
struct ObserveDriver {
    /// Checked by reading the election after the end of a stream: the read proves token and permission.
    upstream: ReopeningStream<ElectionRead>,
    /// Present while a stream is open.
    leader_check: Option<LeaderCheck>,
    leaders: ObservedLeaders,
    /// Silent ends in a row.
    silent: u32,
}

impl ObserveStream {
    /// Serves the client's stream to the end.
    pub async fn run(self, client: ReplySender) {
        let Self { upstream, user, headers, request, permit, namespace, resumed, link, share } = self;
        let Some(method) = lookup(PATH) else { return };
        let route =
            StreamRoute { upstream, user, headers, method, rules: &RULES, request: Some(request), permit };
        let mut running = ObserveDriver {
            upstream: ReopeningStream::new(route, MemberTarget::Any, resumed, link),
            leader_check: None,
            leaders: ObservedLeaders::default(),
            silent: 0,
        };
        let mut owed: Option<(Bytes, TakenGuard)> = None;
        loop {
            running.upstream.open();
            tokio::select! {
                biased; // the client's end first, then the message owed, then upstream events
                () = client.gone() => return,
                room = poll_fn(|cx| poll_room(&client, &share, cx)), if owed.is_some() => {
                    let (Ok(()), Some((framed, keep))) = (room, owed.take()) else { return };
                    client.send(framed, keep);
                }
                event = running.event(), if owed.is_none() => match running.handle(event) {
                    Ok(None) => {}
                    Ok(Some(message)) => match shown(namespace.as_deref(), method, &message) {
                        Ok(framed) => {
                            let keep = share.hold_message(framed.len());
                            owed = Some((framed, keep));
                        }
                        Err(end) => return client.end(end),
                    },
                    Err(end) => return client.end(end),
                },
            }
        }
    }
}

/// Ready once the client may be sent a message: over the shard's budget, a client with untaken messages is
/// sent no further messages.
fn poll_room(
    client: &ReplySender,
    share: &StreamByteShare,
    cx: &Context<'_>,
) -> Poll<Result<(), ClientGone>> {
    if client.is_behind() && !share.fits() { client.poll_all_taken(cx) } else { client.poll_room(cx) }
}

/// The framed message for the client.
fn shown(namespace: Option<&Namespace>, method: &Method, message: &Bytes) -> Result<Bytes, AnswerEnd> {
    let spliced = namespace.map(|namespace| namespace.splice_answer(method, message)).transpose();
    match spliced {
        Ok(spliced) => Ok(spliced.flatten().unwrap_or_else(|| encode(message))),
        Err(_) => Err(Refusal::UNREADABLE_ANSWER.into()),
    }
}

impl ObserveDriver {
    /// The next event upstream. Cancel-safe.
    async fn event(&mut self) -> ObserveEvent {
        let Some(check) = &mut self.leader_check else {
            return ObserveEvent::Upstream(self.upstream.next().await);
        };
        tokio::select! {
            biased; // a message makes the read needless
            event = self.upstream.next() => ObserveEvent::Upstream(event),
            leader = &mut check.reading => ObserveEvent::LeaderRead(leader),
        }
    }

    /// Returns a message for the client, if any. An error ends the client's stream.
    fn handle(&mut self, event: ObserveEvent) -> Result<Option<Bytes>, AnswerEnd> {
        let step = match event {
            ObserveEvent::LeaderRead(leader) => match self.compare_leader(leader) {
                Some(member) => ReopenStep::Elsewhere(Some(member)),
                None => return Ok(None),
            },
            ObserveEvent::Upstream(ReopeningEvent::Opened) => {
                let reading = read_leader(&self.upstream.route, WATCH);
                self.leader_check = Some(LeaderCheck { opened_at: Instant::now(), reading, behind: false });
                return Ok(None);
            }
            ObserveEvent::Upstream(ReopeningEvent::NotOpened(step)) => step,
            ObserveEvent::Upstream(ReopeningEvent::Checked(read)) => self.step_after_read(read),
            ObserveEvent::Upstream(ReopeningEvent::Received(event)) => match event {
                BidiEvent::Message(message) => return self.received(message),
                BidiEvent::Ended(status) => return self.ended(status).map(|()| None),
                end => match self.upstream.step_after(&end) {
                    // Neither end says anything against the member.
                    ReopenStep::Elsewhere(_) if matches!(end, BidiEvent::Left | BidiEvent::NoRoom) => {
                        ReopenStep::Elsewhere(None)
                    }
                    step => step,
                },
            },
        };
        self.reopen(step).map(|()| None)
    }

    /// The member to be left, if the member holds a leader back: with auth on, a member serves all its
    /// observers by a single watch, and on 3.4 the watch goes silent when the token of the first user expires
    /// (etcd-io/etcd#14850).
    fn compare_leader(&mut self, leader: Option<ProclamationOrder>) -> Option<MemberId> {
        let (at, check) = (self.upstream.open_stream()?.member.id, self.leader_check.as_mut()?);
        let behind = leader.is_some_and(|leader| !self.leaders.knows(leader));
        let route = &self.upstream.route;
        if behind && check.behind && route.upstream.members.auth.now() == AuthSetting::On {
            return Some(at);
        }
        check.behind = behind;
        check.reading = read_leader(route, if behind { ANSWER } else { WATCH });
        None
    }

    fn received(&mut self, message: Bytes) -> Result<Option<Bytes>, AnswerEnd> {
        self.silent = 0;
        self.upstream.note_delivery();
        match self.leaders.told(&message) {
            LeaderNews::News => {
                if let Some(check) = &mut self.leader_check {
                    check.behind = false;
                }
                self.upstream.forget_losses();
                Ok(Some(message))
            }
            // Each stream begins with the present leader, so a known leader does not prove a stream good.
            LeaderNews::Known => Ok(None),
            // Perhaps a restored cluster: the client must begin anew.
            LeaderNews::Older | LeaderNews::Unreadable => {
                Err(Refusal::REQUEST_TIMED_OUT_CONNECTION_LOST.into())
            }
        }
    }

    /// open → checking: a read tells the reason of the end. An explicit refusal takes the same path, since
    /// the read renews the refused credential.
    fn ended(&mut self, status: Status) -> Result<(), AnswerEnd> {
        let check = self.leader_check.take();
        let Some(at) = self.upstream.open_stream() else { return self.reopen(ReopenStep::Elsewhere(None)) };
        let (asked, member) = (at.judged(), Arc::clone(&at.member));
        at.reports_auth_on(&status);
        if verdict(&asked, &status) == StatusVerdict::Elsewhere || (!status.is_ok() && is_trouble(&status)) {
            return self.reopen(ReopenStep::Elsewhere(Some(member.id)));
        }
        if check.is_some_and(|check| check.opened_at.elapsed() > NOT_REFUSED) {
            self.silent = 0;
            self.upstream.losses = 0;
        }
        let told = translate(&asked, &status, false).unwrap_or(status);
        self.upstream.check(read_election(Rc::clone(&self.upstream.route), member, told));
        Ok(())
    }

    fn step_after_read(&mut self, read: ElectionRead) -> ReopenStep {
        match read {
            ElectionRead::Failed(step) => step,
            ElectionRead::Allowed(told, member) => {
                self.silent += 1;
                if self.silent >= SILENT {
                    return ReopenStep::End(told.into());
                }
                // The first silent end is retried at the same member, with the credential renewed by the
                // read. A member may refuse a user for another user's token: the member's own watch keeps the
                // token of the first user (etcd-io/etcd#14850).
                ReopenStep::Elsewhere((self.upstream.losses > 0).then_some(member))
            }
        }
    }

    /// any → closed, or the end of the client's stream.
    fn reopen(&mut self, step: ReopenStep) -> Result<(), AnswerEnd> {
        self.leader_check = None;
        self.upstream.close(step)
    }
}

/// Reads the present leader after `pause` and jitter, serializable at any member.
fn read_leader(
    route: &Rc<StreamRoute>,
    pause: Duration,
) -> LocalBoxFuture<'static, Option<ProclamationOrder>> {
    let route = Rc::clone(route);
    async move {
        let upstream = &route.upstream;
        let spread = Duration::from_millis(upstream.chooser.draw(1000));
        tokio::time::sleep(pause + spread).await;
        let member = upstream.choose(MemberTarget::Any, &[])?;
        let first = RangeRequest { serializable: true, ..first_in_queue(&route) };
        let answer = ask(upstream, &route.user, &member, RANGE, &first.encode_to_vec()).await.ok()?;
        let leader = RangeResponse::decode(answer).ok()?.kvs.into_iter().next()?;
        Some((leader.create_revision, leader.mod_revision))
    }
    .boxed_local()
}

/// A Range of the present leader.
fn first_in_queue(route: &StreamRoute) -> RangeRequest {
    let request = route.request.clone().unwrap_or_default();
    let name = LeaderRequest::decode(request).unwrap_or_default().name;
    LockQueue::of(&name).first()
}

/// Reads the election as the client: the read needs the same permission and the same token.
async fn read_election(route: Rc<StreamRoute>, member: Arc<Member>, told: Status) -> ElectionRead {
    let first = first_in_queue(&route).encode_to_vec();
    ElectionRead::Failed(match ask(&route.upstream, &route.user, &member, RANGE, &first).await {
        Ok(_) => return ElectionRead::Allowed(told, member.id),
        Err(ReadError::Refused(status)) if !is_trouble(&status) => ReopenStep::End(told.into()),
        Err(ReadError::Login(failure)) if failure.is_refusal() => {
            ReopenStep::End(Refusal::INVALID_AUTH_TOKEN.into())
        }
        Err(_) => ReopenStep::Elsewhere(Some(member.id)),
    })
}
