//! One call whose request is one message: sent, healed, retried and delivered.
//!
//! Owns: how often and where a call is tried. Must not know: who the peer is, how a member is reached, TLS.
//! Invariants: a call that may have changed something is sent again only where what came back, or did not go out,
//! proves that it was not applied; one fresh credential per member and call, a second refusal is the truth; nothing
//! is retried once a byte of the reply went downstream; all of it within the client's deadline or [`PATIENCE`].

mod hedge;
mod kept_place;
mod turn;

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderValue};
use tokio::time::{Instant, timeout_at};

use crate::gateway::Gateway;
use crate::gateway::access_log::Record;
use crate::gateway::exchange::kept_place::KeptPlace;
use crate::gateway::exchange::turn::{Pass, Placed};
use crate::gateway::retries::Trouble;
use crate::identity::{ClusterId, MemberId, Revision};
use crate::lease::claim::Claim;
use crate::refusal::{Refusal, Status};
use crate::rpc::frame::PREFIX;
use crate::rpc::method::{Class, Effect, Lane, Method, Stream};
use crate::rpc::outcome::{
    Asked, AuthState, Verdict, auth_state, is_of_shared_watch, is_outdated, is_timeout, is_trouble,
    translate, verdict,
};
use crate::rpc::quorum::QuorumNeed;
use crate::rpc::shape;
use crate::upstream::answer::{Answer, HELD};
use crate::upstream::balance::{Time, Waiting, is_still_served};
use crate::upstream::choose::{Chooser, Wanted};
use crate::upstream::connection::Outgoing;
use crate::upstream::credential::{LoginFailure, Shown};
use crate::upstream::leaderless::{choose_leaderless, is_another_leaderless, is_still_asked};
use crate::upstream::membership::{Auth, Hint, Member, Membership};
use crate::upstream::read::ReadError;
use crate::upstream::send::{As, Head, NoAnswer, is_another, upstream_headers};

/// How long a call without an earlier deadline is tried: etcd's own limit for a request (5 s and two elections of
/// 1 s), after which its clients are used to `etcdserver: request timed out`.
pub const PATIENCE: Duration = Duration::from_secs(7);
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_millis(250);
/// How often a member may say that users or roles changed meanwhile, before that is told: while an operator's script grants
/// one role after another, each change refuses what is under way.
const OUTDATED: usize = 5;
/// A member sees a deadline a little earlier than we do.
const MOMENT: Duration = Duration::from_millis(100);
/// How often a call is sent that no member can keep waiting: its turn may have come.
const TURN: Duration = Duration::from_secs(1);

/// A call ready to go upstream.
#[derive(Clone)]
pub struct Exchange<'a> {
    /// Everything that is shared on this shard.
    pub gateway: &'a Gateway,
    /// The method's row.
    pub method: &'static Method,
    /// Its path, as it goes upstream.
    pub path: PathAndQuery,
    /// What kind of member it wants.
    pub wanted: Wanted,
    /// Which connection carries it.
    pub lane: Lane,
    /// Whether it may be sent again whatever happened to it.
    pub effect: Effect,
    /// Whether a member that has no leader answers it, where no member has one.
    pub quorum: QuorumNeed,
    /// Whether it may be sent again after a member answered it (a Lock without a lease may not).
    pub may_reissue: bool,
    /// As whom.
    pub whom: As,
    /// The client's header.
    pub headers: &'a HeaderMap,
    /// The request, framed.
    pub body: Bytes,
    /// The client's deadline.
    pub deadline: Option<Instant>,
}

/// What became of one attempt.
enum Attempt {
    /// An answer for the client.
    Answered(Answer),
    /// Nothing was applied: try again, elsewhere or after a pause. The answer is what the client is told if no
    /// later attempt goes better.
    Again(Option<Answer>, Refusal),
    /// The same, since the caller could not be proved to this member: nobody else's trouble.
    Unproved(Refusal),
    /// Try the same member again at once: its credential was renewed.
    Healed,
    /// This member refused the call in another's name: elsewhere, or here later.
    Mistaken(Answer),
    /// No further attempt.
    Refused(Refusal),
    /// None was made: this member serves no more, and another does.
    Left,
}

/// How far the attempts of one call have come.
struct Course {
    /// The cluster that was served when it began.
    served: Option<Option<ClusterId>>,
    /// Until when it is tried.
    patience: Instant,
    /// Members that had their turn since the last pause.
    tried: Vec<MemberId>,
    /// Members at which a credential was renewed, once for each time.
    healed: Vec<MemberId>,
    pause: Duration,
    /// Whether a second member was asked beside the first.
    hedged: bool,
    /// What the client is told if nothing goes better.
    last: (Option<Answer>, Refusal),
}

impl Course {
    fn new() -> Self {
        Self {
            served: None,
            patience: Instant::now() + PATIENCE,
            tried: Vec::new(),
            healed: Vec::new(),
            pause: FIRST_PAUSE,
            hedged: false,
            last: (None, Refusal::NO_LEADER),
        }
    }

    /// Its troubles are counted anew.
    fn begin_anew(&mut self) {
        let last = std::mem::replace(&mut self.last, (None, Refusal::NO_LEADER));
        *self = Self { last, ..Self::new() };
    }

    /// How long to wait once a credential was renewed: the first fresh one is tried at once.
    fn after_healing(&self, member: &Member) -> Duration {
        let before = self.healed.iter().filter(|id| **id == member.id).skip(1);
        before.fold(Duration::ZERO, |pause, _| (2 * pause).max(FIRST_PAUSE))
    }

    fn end(self) -> Result<Answer, Refusal> {
        let (answer, refusal) = self.last;
        answer.ok_or(refusal)
    }
}

impl Exchange<'_> {
    /// Tries until there is an answer for the client. A call with a claim is the same twice as once: it is also sent
    /// again where it may have been applied, and each time that it was seen in line its troubles are counted anew.
    ///
    /// # Errors
    /// Our own refusal, where no member's answer can be passed on.
    pub async fn run(&self, claim: Option<&Claim>, record: &mut Record) -> Result<Answer, Refusal> {
        self.gateway.retries.called();
        let Some(deadline) = self.deadline else { return self.attempts(claim, record).await };
        match timeout_at(deadline, self.attempts(claim, record)).await {
            Ok(ended) => ended,
            Err(_) => Err(Refusal::DEADLINE_EXCEEDED),
        }
    }

    async fn attempts(&self, claim: Option<&Claim>, record: &mut Record) -> Result<Answer, Refusal> {
        let mut course = Course::new();
        loop {
            // Both of one snapshot.
            let (chosen, cluster) = {
                let members = self.gateway.door.members.snapshot.load();
                (self.choose_among(&members, &course.tried), members.cluster)
            };
            // Who calls was decided of another cluster, perhaps revoked in this one. What waits in line was decided upon again.
            if claim.is_none() && is_another(*course.served.get_or_insert(cluster), cluster) {
                return Err(Refusal::NOTHING_SENT);
            }
            let came = match chosen {
                Some(member) => self.at(member, claim, &mut course, record).await,
                None => None,
            };
            if let Some((member, attempt)) = came {
                let mut trouble = Trouble::Members;
                match attempt {
                    Attempt::Answered(answer) => return Ok(answer),
                    Attempt::Refused(refusal) => return Err(refusal),
                    Attempt::Left => {
                        course.tried.push(member.id);
                        continue;
                    }
                    Attempt::Healed => {
                        self.gateway.metrics.healed.inc();
                        tokio::time::sleep(course.after_healing(&member)).await;
                        continue;
                    }
                    Attempt::Again(answer, refusal) => course.last = (answer, refusal),
                    Attempt::Unproved(refusal) => {
                        course.last = (None, refusal);
                        trouble = self.own_trouble();
                    }
                    Attempt::Mistaken(answer) => {
                        course.last = (Some(answer), Refusal::NO_LEADER);
                        course.patience = Instant::now() + PATIENCE;
                        course.pause = TURN;
                    }
                }
                // A call that waits in line for long has its own limits.
                if claim.is_none() && !self.gateway.retries.take(trouble, Instant::now()) {
                    self.gateway.metrics.tries.refused.inc();
                    return course.end();
                }
                if !course.tried.contains(&member.id) {
                    course.tried.push(member.id);
                }
                // Another member may do at once; when all had their turn, etcd needs time.
                if self.has_another(&self.gateway.door.members.snapshot.load(), &course.tried) {
                    self.gateway.metrics.retried.inc();
                    continue;
                }
                course.tried.clear();
            }
            if Instant::now() + course.pause > course.patience {
                return course.end();
            }
            self.gateway.door.pause_or_change(course.pause).await;
            course.pause = (course.pause * 2).min(LONGEST_PAUSE);
            self.gateway.metrics.retried.inc();
        }
    }

    /// One attempt, at `member` or at another that has room. None where the member that was waited for serves no more, nor does another.
    async fn at(
        &self,
        member: Arc<Member>,
        claim: Option<&Claim>,
        course: &mut Course,
        record: &mut Record,
    ) -> Option<(Arc<Member>, Attempt)> {
        let placed = self.place(member, course).await;
        if let Placed::With(Pass { member, .. }) | Placed::Unproved(member, _) = &placed {
            record.member = Some(member.id);
            record.attempts += 1;
        }
        let (member, attempt) = match &placed {
            Placed::With(pass) => match self.hedge_after(claim, course) {
                None => {
                    let Course { tried, healed, .. } = &mut *course;
                    let attempt = self.attempt(claim, pass, tried, healed, record.attempts).await;
                    (Arc::clone(&pass.member), attempt)
                }
                Some(after) => Box::pin(self.hedged(after, pass, course, record)).await,
            },
            Placed::Unproved(member, failure) => (Arc::clone(member), login_failed(failure)),
            Placed::Elsewhere(left) => return Some((Arc::clone(left), Attempt::Left)),
            Placed::Nowhere => return None,
            Placed::Refused(member, refusal) => {
                return Some((Arc::clone(member), Attempt::Refused(refusal.clone())));
            }
        };
        record.member = Some(member.id);
        if claim.is_some_and(Claim::take_in_line) {
            course.begin_anew();
        }
        Some((member, attempt))
    }

    fn choose(&self, tried: &[MemberId]) -> Option<Arc<Member>> {
        self.choose_among(&self.gateway.door.members.snapshot.load(), tried)
    }

    fn choose_among(&self, members: &Membership, tried: &[MemberId]) -> Option<Arc<Member>> {
        if let Some(member) = choose_leaderless(members, self.wanted, self.quorum, tried) {
            return Some(member);
        }
        match self.lane {
            Lane::Unary => self.gateway.door.choose_for_call(members, self.wanted, tried),
            Lane::Stream | Lane::Bulk => self.gateway.door.choose_among(members, self.wanted, tried),
        }
    }

    /// Whether a call that waits at `member` waits where that still is, and answers.
    fn is_still_at(&self, members: &Membership, member: &Member) -> bool {
        is_still_served(members, member) || is_still_asked(members, member, self.quorum)
    }

    /// Whether a member is left that may do better than those in `tried`.
    fn has_another(&self, members: &Membership, tried: &[MemberId]) -> bool {
        Chooser::another(members, self.wanted, tried)
            || is_another_leaderless(members, self.wanted, self.quorum, tried)
    }

    async fn attempt(
        &self,
        claim: Option<&Claim>,
        pass: &Pass,
        tried: &[MemberId],
        healed: &mut Vec<MemberId>,
        attempts: u32,
    ) -> Attempt {
        let door = &self.gateway.door;
        let Pass { member, shown, place } = pass;
        let mut head = upstream_headers(self.headers, shown);
        if attempts > 1
            && let Some(deadline) = self.deadline
        {
            head.fields.insert("grpc-timeout", timeout_value(deadline));
        }
        let waiting = (self.lane == Lane::Unary).then(|| Waiting::begin(door, member, self.time()));
        let reading = self.read(member, head, place.as_ref());
        let read = match claim {
            // It may take as long as it likes: pings tell when its member is gone.
            None if self.takes_long() => reading.await,
            None => match self.unless_hung(member, tried, reading).await {
                Some(read) => read,
                None if self.effect == Effect::ReadOnly => {
                    return Attempt::Again(None, Refusal::REQUEST_TIMED_OUT);
                }
                None => return Attempt::Refused(Refusal::REQUEST_TIMED_OUT),
            },
            Some(claim) => match claim.beside(reading).await {
                Some(read) => read,
                None => return Attempt::Again(None, Refusal::REQUEST_TIMED_OUT),
            },
        };
        match read {
            Ok(answer) if answer.status().is_some_and(|status| is_of_shared_watch(&status)) => match claim {
                Some(claim) => mistaken(answer, claim).await,
                None => Attempt::Answered(answer),
            },
            Ok(answer) => self.judge(answer, claim, member, shown, healed, waiting),
            Err(NoAnswer::NeverSent(reason)) => {
                tracing::debug!(member = %member.id, %reason, "not sent");
                Attempt::Again(None, Refusal::NOTHING_SENT)
            }
            Err(NoAnswer::NotShown(reason)) => {
                tracing::debug!(member = %member.id, %reason, "not sent: no connection with the user's certificate");
                Attempt::Unproved(Refusal::NOTHING_SENT)
            }
            Err(NoAnswer::NoRoom) => Attempt::Refused(Refusal::TOO_MANY_REQUESTS),
            Err(NoAnswer::Lost(reason)) => {
                tracing::debug!(member = %member.id, %reason, "the reply was lost");
                if let Some(waiting) = waiting {
                    waiting.failed();
                }
                self.lost(member);
                if let Some(claim) = claim {
                    claim.lost();
                }
                if self.effect == Effect::ReadOnly || claim.is_some() {
                    return Attempt::Again(None, Refusal::REQUEST_TIMED_OUT_CONNECTION_LOST);
                }
                Attempt::Refused(Refusal::REQUEST_TIMED_OUT_CONNECTION_LOST)
            }
        }
    }

    /// Of whoever cannot be proved.
    fn own_trouble(&self) -> Trouble {
        match &self.whom {
            As::User(identity) => Trouble::Own(identity.key()),
            As::Nobody => Trouble::Members,
        }
    }

    fn lost(&self, member: &Member) {
        member.suspect();
        let members = &self.gateway.door.members;
        members.hints.send(Hint::Unreachable(member.id));
        if members.snapshot.load().leader == Some(member.id) {
            members.hints.send(Hint::NotLeader(member.id));
        }
    }

    /// What `reading` comes to, unless the member hangs: then a read leaves as soon as another member may do, and whatever it
    /// is after etcd's own time. None for that.
    async fn unless_hung<T>(
        &self,
        member: &Member,
        tried: &[MemberId],
        reading: impl Future<Output = T>,
    ) -> Option<T> {
        let told = self.gateway.door.lingering.at(member);
        let began = Instant::now();
        let mut reading = pin!(reading);
        loop {
            tokio::select! {
                biased; // what was answered counts
                read = &mut reading => return Some(read),
                () = told.notified() => {}
            }
            let members = self.gateway.door.members.snapshot.load();
            if self.is_still_at(&members, member) {
                continue;
            }
            let tried: Vec<MemberId> = tried.iter().copied().chain([member.id]).collect();
            // One that is ready where this call does not wait has moved there.
            let moved = members.get(member.id).is_some_and(|now| now.is_ready());
            let another = moved || self.has_another(&members, &tried);
            let may_leave = self.effect == Effect::ReadOnly && another;
            if may_leave || began.elapsed() >= PATIENCE {
                tracing::debug!(member = %member.id, "a call leaves a member that hangs");
                return None;
            }
        }
    }

    /// Whether how long an answer takes tells how fast the member is: that of what asks the leader, not of what is local, nor of
    /// what a client can make as slow as it likes.
    fn time(&self) -> Time {
        let balanced =
            matches!(self.wanted, Wanted::Any | Wanted::Near | Wanted::Home(_) | Wanted::LeaderFirst);
        let small = || shape::is_of_one_key(self.method, self.body.get(PREFIX..).unwrap_or_default());
        if balanced && small() { Time::Tells } else { Time::TellsNothing }
    }

    /// Whether it is no sign of a member that hangs that it is not answered.
    fn takes_long(&self) -> bool {
        self.lane != Lane::Unary || self.method.class == Class::Maintenance
    }

    /// Whether the client's own deadline, and not the member, ended it.
    fn is_over(&self) -> bool {
        self.deadline.is_some_and(|deadline| Instant::now() + MOMENT >= deadline)
    }

    /// What an answer that is passed on tells of its member.
    fn note(&self, answer: &mut Answer, member: &Member) {
        if self.method.stream != Stream::Unary {
            return;
        }
        answer.read_seen();
        if let Some(seen) = answer.seen {
            member.conduct.saw(Revision(seen.revision));
            if seen.term > member.term {
                self.gateway.door.term_moved(seen.term);
            }
        }
    }

    async fn read(
        &self,
        member: &Arc<Member>,
        head: Head,
        place: Option<&KeptPlace>,
    ) -> Result<Answer, NoAnswer> {
        let message = Some(self.body.clone());
        let body = match place {
            Some(place) => Outgoing::Tracked(message, place.track()),
            None => Outgoing::Once(message),
        };
        let sent = self.gateway.door.send(member, self.lane, self.path.clone(), head, body).await;
        let hold = if self.method.stream == Stream::Unary { HELD } else { 0 };
        let (response, in_flight) = sent?;
        Answer::read(response, in_flight, hold).await.map_err(NoAnswer::Lost)
    }

    fn judge(
        &self,
        mut answer: Answer,
        claim: Option<&Claim>,
        member: &Member,
        shown: &Shown,
        healed: &mut Vec<MemberId>,
        waiting: Option<Waiting<'_>>,
    ) -> Attempt {
        let status = answer.status();
        let refused = status.as_ref().is_some_and(|status| !status.is_ok());
        let Some(status) = status.filter(|_| refused) else {
            if let Some(waiting) = waiting {
                waiting.answered(true);
            }
            self.extended(shown);
            self.note(&mut answer, member);
            return Attempt::Answered(answer);
        };
        match waiting {
            Some(waiting) if is_timeout(&status) && !self.is_over() => waiting.failed(),
            Some(waiting) => waiting.answered(false),
            None => {}
        }
        if is_trouble(&status) {
            // A leader may be gone, or new.
            self.gateway.door.members.hints.send(Hint::NotLeader(member.id));
        }
        let asked = self.asked(shown);
        if auth_state(&asked, &status) == Some(AuthState::On) {
            self.gateway.door.auth_is(Auth::On);
            // We sent no token since auth was off; it is on now.
            let unproved = matches!((&self.whom, shown), (As::User(_), Shown::Nothing));
            if unproved && self.may_reissue && !healed.contains(&member.id) {
                healed.push(member.id);
                return Attempt::Healed;
            }
        }
        match verdict(&asked, &status) {
            Verdict::Heal if self.may_reissue => self.heal(answer, &status, member, shown, healed),
            // Whoever named a member hears what that one says.
            Verdict::Elsewhere if self.may_reissue && !matches!(self.wanted, Wanted::This(_)) => {
                self.gateway.door.members.hints.send(Hint::NotLeader(member.id));
                Attempt::Again(Some(translated(answer, &asked, &status)), Refusal::NO_LEADER)
            }
            Verdict::Unclear if claim.is_some() && is_trouble(&status) => {
                claim.inspect(|claim| claim.lost());
                Attempt::Again(Some(translated(answer, &asked, &status)), Refusal::NO_LEADER)
            }
            Verdict::Final => {
                self.extended(shown);
                Attempt::Answered(translated(answer, &asked, &status))
            }
            // A Lock without a lease made one: what refused it came after that.
            Verdict::Heal | Verdict::Elsewhere | Verdict::Unclear => {
                Attempt::Answered(translated(answer, &asked, &status))
            }
        }
    }

    /// A call that the member looked at the token for has extended the token's life there. Reads and writes of keys
    /// are looked at in every version; others are not in some.
    fn extended(&self, shown: &Shown) {
        if let Some(token) = shown.token()
            && matches!(self.method.class, Class::Read | Class::Write)
        {
            token.mark_used();
        }
    }

    fn heal(
        &self,
        answer: Answer,
        status: &Status,
        member: &Member,
        shown: &Shown,
        healed: &mut Vec<MemberId>,
    ) -> Attempt {
        let asked = self.asked(shown);
        let times = healed.iter().filter(|id| **id == member.id).count();
        let prover = self.gateway.door.prover(member);
        let outdated = is_outdated(&asked, status) && times < OUTDATED;
        match &self.whom {
            As::User(identity) if times == 0 && identity.renew(prover, shown) => {}
            // The next one may pass with the same token or certificate, unless that says of which revision it is.
            As::User(identity) if outdated => {
                if identity.follows_revisions() {
                    identity.renew(prover, shown);
                }
            }
            _ => return Attempt::Answered(translated(answer, &asked, status)),
        }
        healed.push(member.id);
        Attempt::Healed
    }

    fn asked(&self, shown: &Shown) -> Asked {
        Asked { method: self.method, effect: self.effect, proof: shown.proof() }
    }
}

/// The answer with its status as clients know it (rules 7).
fn translated(mut answer: Answer, asked: &Asked, status: &Status) -> Answer {
    if let Some(better) = translate(asked, status, false) {
        answer.replace_status(&better);
    }
    answer
}

/// A Lock or Campaign of whoever may read the line may wait in it.
async fn mistaken(answer: Answer, claim: &Claim) -> Attempt {
    claim.lost();
    match claim.is_permitted().await {
        Ok(()) => Attempt::Mistaken(answer),
        Err(ReadError::Refused(status)) if !is_trouble(&status) => Attempt::Answered(answer),
        Err(_) => Attempt::Again(Some(answer), Refusal::NO_LEADER),
    }
}

fn login_failed(failure: &LoginFailure) -> Attempt {
    // The session's password is not the user's any more: the client must log in again.
    if failure.is_refusal() {
        Attempt::Refused(Refusal::INVALID_AUTH_TOKEN)
    } else {
        Attempt::Unproved(Refusal::NOTHING_SENT)
    }
}

/// What is left until `deadline`, as `grpc-timeout` says it: at most 8 digits.
fn timeout_value(deadline: Instant) -> HeaderValue {
    let left = deadline.saturating_duration_since(Instant::now());
    let text = match (left.as_millis(), left.as_secs()) {
        (millis @ 0..100_000_000, _) => format!("{millis}m"),
        (_, seconds @ 0..100_000_000) => format!("{seconds}S"),
        (_, seconds) => format!("{}H", (seconds / 3600).min(99_999_999)),
    };
    HeaderValue::try_from(text).unwrap_or_else(|_| HeaderValue::from_static("0m"))
}
