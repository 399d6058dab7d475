//! A call with a single request message: sending, credential renewal, retries, and the answer for the client.
//!
//! Owns: how often and where a call is tried. Must not know: the peer's identity, how a member is reached,
//! TLS.
//! Invariants: a call with a possible effect on the store is sent again only if the answer, or the failure to
//! send, proves the call was not applied; each call renews its credential once per member, and a second
//! refusal goes to the client, except that an outdated auth revision is retried several times; a read whose
//! reply was lost with the connection is repeated once at most, and a large one never; no retry happens after
//! a byte of the reply went downstream; every attempt ends after [`PATIENCE`] or before.

mod attempts;
mod hedge;
mod lost_read;
mod member_slot;
mod tracked_slot;

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::TryFutureExt as _;
use http::HeaderValue;
use tokio::time::Instant;

use crate::call::Call;
use crate::exchange::attempts::{Attempt, CallProgress, NextStep};
use crate::exchange::member_slot::{SendPermit, SlotOutcome};
use crate::exchange::tracked_slot::TrackedSlot;
use crate::local_reads;
use crate::retries::{PATIENCE, RetryCause};
use keyward_access::policy::permit::Permit;
use keyward_cluster::choose::{MemberChooser, MemberTarget};
use keyward_cluster::leaderless::{choose_leaderless, is_another_leaderless, is_still_asked};
use keyward_cluster::membership::{AuthSetting, Member, Membership, MembershipHint};
use keyward_etcd::identity::{MemberId, Revision};
use keyward_etcd::refusal::{Code, Refusal, Status};
use keyward_etcd::rpc::body_shape;
use keyward_etcd::rpc::frame::PREFIX;
use keyward_etcd::rpc::method::{Class, Effect, Lane, StreamingSides};
use keyward_etcd::rpc::outcome::{
    JudgedCall, RevealedAuth, StatusVerdict, auth_state, is_of_shared_watch, is_outdated, is_timeout,
    is_trouble, translate, verdict,
};
use keyward_etcd::rpc::quorum::QuorumNeed;
use keyward_streams::lease::lock_wait::LockWait;
use keyward_upstream::answer::{HELD, LostReply, MemberReply, ReplyRemainder};
use keyward_upstream::credentials::CallCredential;
use keyward_upstream::ejection::{InFlightCall, LatencySampling};
use keyward_upstream::own_requests::ReadError;
use keyward_upstream::send::{NoReply, UpstreamHead, UpstreamUser, is_different_cluster, upstream_headers};
use keyward_upstream::upstream_request::UpstreamRequestBody;
use keyward_upstream::waiting_calls::is_still_served;

const LONGEST_PAUSE: Duration = Duration::from_millis(250);
/// How many times per call a member may answer "users or roles changed meanwhile" before the client gets the
/// error. While a script grants one role after another, each change refuses the calls in flight.
const OUTDATED: usize = 5;
/// Tolerance when deciding if a time-out was caused by the client's deadline: the member sees the deadline a
/// little earlier.
const MOMENT: Duration = Duration::from_millis(100);
/// Pause between attempts of a Lock or Campaign refused by the member's shared watch stream, where the call
/// cannot wait (etcd-io/etcd#14850). Each attempt may find the lock free.
const TURN: Duration = Duration::from_secs(1);

/// A call ready to be sent upstream.
#[derive(Clone)]
pub struct Exchange<'a> {
    /// The client's call.
    pub call: &'a Call<'a>,
    /// The kind of member for this call.
    pub wanted: MemberTarget,
    /// The connection class carrying the call.
    pub lane: Lane,
    /// The call's effect on the store: a read may be sent again after any failure.
    pub effect: Effect,
    /// Says if the answer needs a quorum. Without any ready voter, a member without a leader answers calls
    /// needing no quorum.
    pub quorum: QuorumNeed,
    /// True if the call may be sent again after a refusal by a member (false for a Lock without a lease).
    pub may_reissue: bool,
    /// The etcd user of the call, or no user.
    pub user: UpstreamUser,
    /// The framed request message.
    pub body: Bytes,
    /// The policy's permit for the request.
    pub permit: Permit,
}

impl Exchange<'_> {
    /// Tries the call until an answer for the client exists. A call with a lock wait is idempotent: the lock
    /// wait permits sending again although the call may have been applied, and each sighting of the call in
    /// the lock queue resets the counters and limits.
    ///
    /// # Errors
    /// A refusal of ours, if no member's answer can be passed on.
    pub async fn run(&self, lock_wait: Option<&LockWait>) -> Result<Box<MemberReply>, Refusal> {
        let gateway = self.call.gateway;
        gateway.retries.called();
        let mut progress = CallProgress::new(Instant::now());
        loop {
            // The member and the cluster must come from the same snapshot.
            let (chosen, cluster) = {
                let members = gateway.upstream.members.snapshot.load();
                (self.choose_among(&members, &progress.tried, progress.turn_time()), members.cluster)
            };
            // The caller was authenticated against the previous cluster and may be revoked in the current
            // cluster, so the call is refused. A lock wait is authorized again elsewhere.
            if lock_wait.is_none() && is_different_cluster(*progress.served.get_or_insert(cluster), cluster) {
                return Err(Refusal::NOTHING_SENT);
            }
            let outcome = match chosen {
                Some(member) => self.take_slot(member, &progress).await,
                None => SlotOutcome::Nowhere,
            };
            let attempted = match outcome {
                SlotOutcome::With(permit) if !local_reads::may_go_to(self.call, &permit.member) => {
                    return Err(Refusal::NOTHING_SENT);
                }
                SlotOutcome::With(permit) => Some(match self.hedge_after(lock_wait, &progress) {
                    None => self.attempt(lock_wait, permit, &progress.tried, &mut progress.healed).await,
                    Some(after) => Box::pin(self.hedged(after, permit, &mut progress)).await,
                }),
                SlotOutcome::Unproved(member, failure) => {
                    self.call.record.count_attempt(member.id);
                    Some((member, Attempt::without_login(&failure)))
                }
                SlotOutcome::Elsewhere(left) => {
                    progress.tried.push(left.id);
                    continue;
                }
                SlotOutcome::Refused(refusal) => return Err(refusal),
                SlotOutcome::Nowhere => None,
            };
            if let Some((member, attempt)) = attempted {
                if lock_wait.is_some_and(LockWait::take_in_line) {
                    progress.begin_anew();
                }
                match self.next_step(lock_wait, &mut progress, &member, attempt) {
                    NextStep::Answer(answer) => return answer,
                    NextStep::AnotherMember => continue,
                    NextStep::After(pause) => {
                        tokio::time::sleep(pause).await;
                        continue;
                    }
                    NextStep::AfterPause => {}
                }
            }
            let is_without_leader = lock_wait.is_none() && self.is_told_of_no_leader(&progress);
            if is_without_leader || Instant::now() + progress.pause > progress.patience {
                return progress.end();
            }
            gateway.upstream.pause_or_change(progress.pause).await;
            progress.pause = (progress.pause * 2).min(LONGEST_PAUSE);
            gateway.metrics.retried.inc();
        }
    }

    /// The step after an attempt at `member`.
    fn next_step(
        &self,
        lock_wait: Option<&LockWait>,
        progress: &mut CallProgress,
        member: &Arc<Member>,
        attempt: Attempt,
    ) -> NextStep {
        let gateway = self.call.gateway;
        self.call.record.member.set(Some(member.id));
        let mut cause = RetryCause::Members;
        match attempt {
            Attempt::Answered(answer) => return NextStep::Answer(Ok(answer)),
            Attempt::Refused(refusal) => return NextStep::Answer(Err(refusal)),
            Attempt::Healed => {
                gateway.metrics.healed.inc();
                return NextStep::After(progress.after_healing(member));
            }
            Attempt::Again(answer, refusal) => progress.last = (answer, refusal),
            Attempt::ReadLost => {
                progress.last = (None, Refusal::REQUEST_TIMED_OUT_CONNECTION_LOST);
                if let Err(refusal) = self.repeats_lost_read(progress, member) {
                    return NextStep::Answer(Err(refusal));
                }
                progress.lost = true;
            }
            Attempt::NotAuthenticated(refusal) => {
                progress.last = (None, refusal);
                cause = self.retry_cause();
            }
            Attempt::SharedWatchRefusal(answer) => {
                progress.last = (Some(answer), Refusal::NO_LEADER);
                progress.patience = Instant::now() + PATIENCE;
                progress.pause = TURN;
            }
        }
        // A lock wait is limited separately, not by the retry budget.
        if lock_wait.is_none() && !gateway.retries.take(cause, Instant::now()) {
            gateway.metrics.tries.refused.inc();
            return NextStep::Answer(progress.end());
        }
        if !progress.tried.contains(&member.id) {
            progress.tried.push(member.id);
        }
        // Try an untried member at once. After all members were tried, pause to give etcd time.
        if self.has_another(&gateway.upstream.members.snapshot.load(), &progress.tried) {
            gateway.metrics.retried.inc();
            return NextStep::AnotherMember;
        }
        progress.tried.clear();
        NextStep::AfterPause
    }

    /// The request message without its frame.
    fn message(&self) -> &[u8] {
        self.body.get(PREFIX..).unwrap_or_default()
    }

    fn choose(&self, tried: &[MemberId]) -> Option<Arc<Member>> {
        self.choose_among(&self.call.gateway.upstream.members.snapshot.load(), tried, Instant::now())
    }

    fn choose_among(&self, members: &Membership, tried: &[MemberId], now: Instant) -> Option<Arc<Member>> {
        if let Some(member) = choose_leaderless(members, self.wanted, self.quorum, tried) {
            return Some(member);
        }
        match self.lane {
            Lane::Unary => self.call.gateway.upstream.choose_for_call(members, self.wanted, tried, now),
            Lane::Stream | Lane::Bulk => self.call.gateway.upstream.choose_among(members, self.wanted, tried),
        }
    }

    /// True while a call waiting at `member` would still be served: the member is ready at the same address,
    /// or is a member without a leader still able to answer the call.
    fn is_still_at(&self, members: &Membership, member: &Member) -> bool {
        is_still_served(members, member) || is_still_asked(members, member, self.quorum)
    }

    /// True if a member outside `tried` may serve the call.
    fn has_another(&self, members: &Membership, tried: &[MemberId]) -> bool {
        MemberChooser::has_another_member(members, self.wanted, tried)
            || is_another_leaderless(members, self.wanted, self.quorum, tried)
    }

    /// Sends the call to the permit's member, and judges the member's answer.
    fn attempt(
        &self,
        lock_wait: Option<&LockWait>,
        permit: SendPermit,
        tried: &[MemberId],
        healed: &mut Vec<MemberId>,
    ) -> impl Future<Output = (Arc<Member>, Attempt)> {
        let SendPermit { member, credential, slot } = permit;
        // A block, not an `async fn`: an `async fn` stores its arguments twice.
        async move {
            let upstream = &self.call.gateway.upstream;
            let attempts = self.call.record.count_attempt(member.id);
            let began = Instant::now();
            let in_flight = (self.lane == Lane::Unary)
                .then(|| InFlightCall::begin(upstream, &member, self.latency_use(), began));
            let read = {
                let mut reading =
                    pin!(self.read(&member, self.head(&credential, attempts, &member, began), slot.as_ref()));
                match lock_wait {
                    // No time limit: HTTP/2 pings detect a lost member.
                    None if self.takes_long() => Some(reading.await),
                    None => {
                        let displaced = upstream.waiting_calls.at(&member);
                        loop {
                            tokio::select! {
                                biased; // prefer a result that is already available
                                read = &mut reading => break Some(read),
                                () = displaced.notified() => {}
                            }
                            if self.leaves_hung(&member, tried, began) {
                                break None;
                            }
                        }
                    }
                    // Boxed, as is every step of a Lock or Campaign here, so that the other calls do not pay.
                    Some(lock_wait) => Box::pin(lock_wait.await_answer(reading)).await,
                }
            };
            self.call.record.end_attempt(member.id, || {
                let answer = read.as_ref()?.as_ref().ok()?;
                Some(answer.status().map_or(Code::Ok, |status| status.code))
            });
            let attempt = match read {
                None if lock_wait.is_some() || self.effect == Effect::ReadOnly => {
                    Attempt::Again(None, Refusal::REQUEST_TIMED_OUT)
                }
                None => Attempt::Refused(Refusal::REQUEST_TIMED_OUT),
                Some(Ok(answer)) if answer.status().is_some_and(is_of_shared_watch) => match lock_wait {
                    Some(lock_wait) => Box::pin(judge_shared_watch_refusal(answer, lock_wait)).await,
                    None => Attempt::Answered(answer),
                },
                Some(Ok(answer)) => {
                    let sent = (began, in_flight);
                    self.judge(answer, lock_wait, &member, &credential, healed, sent)
                }
                Some(Err(reason)) => self.judge_no_reply(reason, lock_wait, &member, in_flight),
            };
            (Arc::clone(&member), attempt)
        }
    }

    /// True if the call leaves a member that may hang: a read as soon as another member is available, every
    /// other call after [`PATIENCE`].
    fn leaves_hung(&self, member: &Member, tried: &[MemberId], began: Instant) -> bool {
        let members = self.call.gateway.upstream.members.snapshot.load();
        if self.is_still_at(&members, member) {
            return false;
        }
        let tried: Vec<MemberId> = tried.iter().copied().chain([member.id]).collect();
        // If the member is ready but not at this call's address, the member has moved to another address.
        let moved = members.get(member.id).is_some_and(|now| now.is_ready());
        let another = moved || self.has_another(&members, &tried);
        let leaves = (self.effect == Effect::ReadOnly && another) || began.elapsed() >= PATIENCE;
        if leaves {
            tracing::debug!(member = %member.id, "a call leaves a member that hangs");
        }
        leaves
    }

    fn judge_no_reply(
        &self,
        reason: NoReply,
        lock_wait: Option<&LockWait>,
        member: &Member,
        in_flight: Option<InFlightCall<'_>>,
    ) -> Attempt {
        match reason {
            NoReply::NeverSent(reason) => {
                tracing::debug!(member = %member.id, %reason, "not sent");
                Attempt::Again(None, Refusal::NOTHING_SENT)
            }
            NoReply::NotShown(reason) => {
                tracing::debug!(
                    member = %member.id,
                    %reason,
                    "not sent: no connection with the user's certificate"
                );
                Attempt::NotAuthenticated(Refusal::NOTHING_SENT)
            }
            NoReply::NotAccepted(shown) => {
                tracing::debug!(member = %member.id, user = %shown.user(), "the certificate is refused");
                Attempt::not_accepted(self.call.gateway.upstream.is_refused_everywhere(self.wanted, &shown))
            }
            NoReply::NoRoom => Attempt::Refused(Refusal::TOO_MANY_REQUESTS),
            NoReply::Lost(LostReply { reason, with_connection }) => {
                tracing::debug!(member = %member.id, %reason, "the reply was lost");
                if let Some(in_flight) = in_flight {
                    in_flight.failed();
                }
                self.report_lost_reply(member);
                if let Some(lock_wait) = lock_wait {
                    lock_wait.lost();
                }
                match (self.effect, lock_wait) {
                    (Effect::ReadOnly, None) if with_connection => Attempt::ReadLost,
                    (Effect::ReadOnly, _) | (_, Some(_)) => {
                        Attempt::Again(None, Refusal::REQUEST_TIMED_OUT_CONNECTION_LOST)
                    }
                    (_, None) => Attempt::Refused(Refusal::REQUEST_TIMED_OUT_CONNECTION_LOST),
                }
            }
        }
    }

    /// The retry budget charged when the caller could not be authenticated: the identity's own, so that
    /// callers with a failing credential do not use up the shared budget.
    fn retry_cause(&self) -> RetryCause {
        match &self.user {
            UpstreamUser::User(identity) => RetryCause::Own(identity.key()),
            UpstreamUser::Nobody => RetryCause::Members,
        }
    }

    fn report_lost_reply(&self, member: &Member) {
        member.suspect();
        let members = &self.call.gateway.upstream.members;
        members.hints.send(MembershipHint::Unreachable(member.id));
        if members.snapshot.load().leader == Some(member.id) {
            members.hints.send(MembershipHint::NotLeader(member.id));
        }
    }

    /// Says if this call's latency may be used as a sample of the member's speed. Reads from the member's own
    /// store are excluded because they do not ask the leader; calls spanning more than a single key are
    /// excluded because the client decides how slow they are.
    fn latency_use(&self) -> LatencySampling {
        let balanced = matches!(
            self.wanted,
            MemberTarget::Any | MemberTarget::Near | MemberTarget::Home(_) | MemberTarget::LeaderFirst
        );
        let small = || body_shape::is_of_one_key(self.call.method, self.message());
        if balanced && small() { LatencySampling::Tells } else { LatencySampling::TellsNothing }
    }

    /// True if a missing answer is not a sign of a hanging member, as for streams, large answers and
    /// maintenance.
    fn takes_long(&self) -> bool {
        self.lane != Lane::Unary || self.call.method.class == Class::Maintenance
    }

    /// True if the client's own deadline, not the member, ended the call.
    fn is_over(&self) -> bool {
        self.call.deadline.is_some_and(|deadline| Instant::now() + MOMENT >= deadline)
    }

    /// Learns the member's revision and raft term from an answer.
    fn note(&self, answer: &mut MemberReply, member: &Member) {
        if self.call.method.stream != StreamingSides::Unary {
            return;
        }
        answer.read_progress();
        if let Some(seen) = answer.progress {
            member.load.record_revision(Revision(seen.revision));
            if seen.term > member.term {
                self.call.gateway.upstream.report_term(seen.term);
            }
        }
    }

    /// The header for an attempt at `member` begun at `began`. The first attempt has the client's time limit
    /// as sent by the client, a later attempt the time left.
    fn head(
        &self,
        credential: &CallCredential,
        attempts: u32,
        member: &Member,
        began: Instant,
    ) -> UpstreamHead {
        let mut head = upstream_headers(self.call.headers, credential, self.permit);
        if attempts > 1
            && let Some(deadline) = self.call.deadline
        {
            head.fields.insert("grpc-timeout", timeout_value(deadline));
        }
        self.call.record.begin_attempt(member, began, &mut head.fields);
        head
    }

    fn read(
        &self,
        member: &Arc<Member>,
        head: UpstreamHead,
        slot: Option<&TrackedSlot>,
    ) -> impl Future<Output = Result<Box<MemberReply>, NoReply>> {
        let message = self.body.clone();
        let body = match slot {
            Some(slot) => UpstreamRequestBody::Tracked(message, slot.track()),
            None => UpstreamRequestBody::Once(message),
        };
        let hold = if self.call.method.stream == StreamingSides::Unary { HELD } else { 0 };
        let path = self.call.method.path_and_query();
        let sent = self.call.gateway.upstream.send(member, self.lane, path, head, body);
        sent.and_then(move |(response, in_flight)| {
            MemberReply::read(response, in_flight, hold).map_err(NoReply::Lost)
        })
    }

    fn judge(
        &self,
        mut answer: Box<MemberReply>,
        lock_wait: Option<&LockWait>,
        member: &Member,
        shown: &CallCredential,
        healed: &mut Vec<MemberId>,
        (began, in_flight): (Instant, Option<InFlightCall<'_>>),
    ) -> Attempt {
        let now = Instant::now();
        self.call.record.note_answered(self.message(), began, now);
        let Some(status) = answer.status().filter(|status| !status.is_ok()).cloned() else {
            if let Some(took) = in_flight.and_then(|in_flight| in_flight.answered(true, now)) {
                self.call.gateway.usage.shedding.note_latency(took);
            }
            self.extended(shown, now);
            self.note(&mut answer, member);
            if matches!(answer.rest, ReplyRemainder::More(_)) {
                answer.on_loss = self.on_loss_of_heavy(member);
            }
            return Attempt::Answered(answer);
        };
        match in_flight {
            Some(in_flight) if is_timeout(&status) && !self.is_over() => in_flight.failed(),
            Some(in_flight) => {
                in_flight.answered(false, now);
            }
            None => {}
        }
        self.call.gateway.upstream.members.alarms.note(&status, now);
        if is_trouble(&status) {
            // The leader may be lost or replaced: request a probe.
            self.call.gateway.upstream.members.hints.send(MembershipHint::NotLeader(member.id));
        }
        let asked = self.asked(shown);
        if auth_state(&asked, &status) == Some(RevealedAuth::On) {
            self.call.gateway.upstream.report_auth(AuthSetting::On);
            // No token was sent because auth was believed to be off; auth is on now.
            let unproved = matches!((&self.user, shown), (UpstreamUser::User(_), CallCredential::Nothing));
            if unproved && self.may_reissue && !healed.contains(&member.id) {
                healed.push(member.id);
                return Attempt::Healed;
            }
        }
        match verdict(&asked, &status) {
            StatusVerdict::Heal if self.may_reissue => self.heal(answer, &status, member, shown, healed),
            // A client addressing a member gets the answer of exactly this member.
            StatusVerdict::Elsewhere if self.may_reissue && !matches!(self.wanted, MemberTarget::This(_)) => {
                self.call.gateway.upstream.members.hints.send(MembershipHint::NotLeader(member.id));
                Attempt::Again(Some(translated(answer, &asked, &status)), Refusal::NO_LEADER)
            }
            StatusVerdict::Unclear if lock_wait.is_some() && is_trouble(&status) => {
                lock_wait.inspect(|lock_wait| lock_wait.lost());
                Attempt::Again(Some(translated(answer, &asked, &status)), Refusal::NO_LEADER)
            }
            StatusVerdict::Final => {
                self.extended(shown, now);
                Attempt::Answered(translated(answer, &asked, &status))
            }
            // A Lock without a lease made etcd grant a lease before the refusal, so the call is not sent
            // again.
            StatusVerdict::Heal | StatusVerdict::Elsewhere | StatusVerdict::Unclear => {
                Attempt::Answered(translated(answer, &asked, &status))
            }
        }
    }

    /// Records that the call extended the token's TTL at the member at `now`. Only reads and writes of keys
    /// are counted: every etcd version checks the token for these, and some versions skip the check for the
    /// rest.
    fn extended(&self, shown: &CallCredential, now: Instant) {
        if let Some(token) = shown.token()
            && matches!(self.call.method.class, Class::Read | Class::Write)
        {
            token.mark_used(now);
        }
    }

    fn heal(
        &self,
        answer: Box<MemberReply>,
        status: &Status,
        member: &Member,
        shown: &CallCredential,
        healed: &mut Vec<MemberId>,
    ) -> Attempt {
        let asked = self.asked(shown);
        let times = healed.iter().filter(|id| **id == member.id).count();
        let prover = self.call.gateway.upstream.login_member(member);
        let outdated = is_outdated(&asked, status) && times < OUTDATED;
        match &self.user {
            UpstreamUser::User(identity) if times == 0 && identity.renew(prover, shown) => {}
            // The next attempt may pass with the same token or certificate. Only a credential containing the
            // auth revision must be renewed.
            UpstreamUser::User(identity) if outdated => {
                if identity.is_bound_to_revision() {
                    identity.renew(prover, shown);
                }
            }
            _ => return Attempt::Answered(translated(answer, &asked, status)),
        }
        healed.push(member.id);
        Attempt::Healed
    }

    fn asked(&self, shown: &CallCredential) -> JudgedCall {
        JudgedCall { method: self.call.method, effect: self.effect, proof: shown.proof() }
    }
}

/// The answer, with etcd's raw status replaced by the form known to clients (docs/decisions.md#d07).
fn translated(mut answer: Box<MemberReply>, asked: &JudgedCall, status: &Status) -> Box<MemberReply> {
    if let Some(better) = translate(asked, status, false) {
        answer.replace_status(&better);
    }
    answer
}

/// Decides about a Lock or Campaign refused by the member's shared watch stream: the call may wait if the
/// user may read the lock queue.
async fn judge_shared_watch_refusal(answer: Box<MemberReply>, lock_wait: &LockWait) -> Attempt {
    lock_wait.lost();
    match lock_wait.is_permitted().await {
        Ok(()) => Attempt::SharedWatchRefusal(answer),
        Err(ReadError::Refused(status)) if !is_trouble(&status) => Attempt::Answered(answer),
        Err(_) => Attempt::Again(Some(answer), Refusal::NO_LEADER),
    }
}

/// The time left until `deadline` as a `grpc-timeout` value of at most 8 digits.
fn timeout_value(deadline: Instant) -> HeaderValue {
    let left = deadline.saturating_duration_since(Instant::now());
    let text = match (left.as_millis(), left.as_secs()) {
        (millis @ 0..100_000_000, _) => format!("{millis}m"),
        (_, seconds @ 0..100_000_000) => format!("{seconds}S"),
        (_, seconds) => format!("{}H", (seconds / 3600).min(99_999_999)),
    };
    HeaderValue::try_from(text).unwrap_or_else(|_| HeaderValue::from_static("0m"))
}
