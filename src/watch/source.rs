//! One upstream Watch stream: from "wanted" to its end.
//!
//! Owns: choosing its member, waiting before it where others failed or resume too, having its credential proven. Must
//! not know what a watch is: the hub's business. Invariants: every wait and read has a limit; `hasleader` always goes
//! upstream, so that a member without a leader ends the stream instead of going silent; a stream that is resumed waits
//! for its turn on its member, and nobody waits longer than `STANDING` for one that does not come to stand.

use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::LocalBoxFuture;
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderName, HeaderValue};
use tokio::time::Instant;

use crate::downstream::floor::Floor;
use crate::identity::MemberId;
use crate::refusal::{Code, Refusal, Status};
use crate::rpc::method::lookup;
use crate::rpc::outcome::{Asked, Verdict, verdict};
use crate::upstream::bidi::{Bidi, Next, TooMuch};
use crate::upstream::choose::Wanted;
use crate::upstream::credential::{LoginFailure, Shown};
use crate::upstream::membership::{Auth, Hint, Member};
use crate::upstream::read::{ReadError, local_revision};
use crate::upstream::resumes::{Coming, Turn};
use crate::upstream::send::{As, Door, upstream_headers};
use crate::watch::budget::{FREE, Held, Share};
use crate::watch::hub::{Credential, Loss, Traits};

/// The method's path.
pub const PATH: &str = "/etcdserverpb.Watch/Watch";
const HAS_LEADER: HeaderName = HeaderName::from_static("hasleader");
const FIRST_PAUSE: Duration = Duration::from_millis(25);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// How far apart the streams of a lost member are resumed, on average and at first: a dial and a create take about as
/// long. A lone stream does not wait.
const APART: Duration = Duration::from_millis(1);
/// How long a resumed stream may take to stand again before the next has its turn all the same: a hundred times what a
/// member needs that is well, so that it is spent only where a client does not read, or the member is stuck.
const STANDING: Duration = Duration::from_secs(1);

/// What opening a stream takes.
#[derive(Clone)]
pub struct Route {
    /// The way upstream.
    pub door: Rc<Door>,
    /// As whom.
    pub whom: As,
    /// The client's header.
    pub headers: HeaderMap,
    /// The client connection's own member.
    pub home: Option<MemberId>,
    /// What the client's connection was shown.
    pub floor: Rc<Floor>,
    /// What the client's stream may hold.
    pub share: Rc<Share>,
}

/// A stream that is open, or whose request is on the way.
pub struct Source {
    /// Which member carries it.
    pub member: Arc<Member>,
    /// What its version says.
    pub traits: Traits,
    stream: Bidi,
    shown: Shown,
    share: Rc<Share>,
    /// Of an unfinished message.
    held: Held,
    /// While it is being resumed, and until when at most.
    turn: Option<(Turn, Instant)>,
    /// A message came.
    stood: bool,
}

/// A stream that is being opened.
pub type Opening = LocalBoxFuture<'static, Result<Source, Failed>>;

/// No stream, and which member that speaks against.
pub struct Failed {
    /// Why.
    pub why: Loss,
    /// The member that failed, if it was one.
    pub member: Option<MemberId>,
}

/// What came from a stream.
pub enum Came {
    /// A WatchResponse.
    Message(bytes::Bytes),
    /// Its end.
    Lost(Loss),
}

impl Route {
    /// Opens a stream on a member that is not among `tried`, where there is another. `attempt` counts the losses
    /// before it.
    #[must_use]
    pub fn open(&self, credential: Credential, attempt: u32, tried: Vec<MemberId>) -> Opening {
        let route = self.clone();
        async move { route.opened(credential, attempt, &tried).await }.boxed_local()
    }

    async fn opened(
        &self,
        credential: Credential,
        attempt: u32,
        tried: &[MemberId],
    ) -> Result<Source, Failed> {
        let resuming = (attempt > 0).then(|| self.door.resumes.begin());
        self.pause(attempt).await;
        let nobody = Failed { why: Loss::Upstream, member: None };
        let wanted = Wanted::Current { home: self.home, floor: self.floor.revision() };
        let member = self.door.choose(wanted, tried).ok_or(nobody)?;
        let failed = |why| Failed { why, member: Some(member.id) };
        let coming = resuming.map(|resuming| self.door.resumes.on(member.id, resuming));
        if credential == Credential::Fresh {
            if matches!(self.whom, As::User(_)) && self.door.members.auth.now() == Auth::Off {
                // Only with auth on is a credential refused. Where it is off after all, the login says so.
                self.door.auth_is(Auth::On);
            }
            // A read with the token at hand proves it, or renews it where the member refuses it.
            match local_revision(&self.door, &self.whom, &member).await {
                Ok(_) => {}
                // Refused for good: let the create be refused in etcd's own words.
                Err(ReadError::Refused(status)) if refuses_credential(&status) => {}
                // It proved nothing, so that a second refusal would not be the truth.
                Err(ReadError::Refused(_) | ReadError::Lost | ReadError::NoRoom) => {
                    return Err(failed(Loss::Upstream));
                }
                Err(ReadError::Login(failure)) => return Err(failed(login_loss(&failure))),
            }
        }
        let shown = self.door.shown(&self.whom, &member).await;
        let shown = shown.map_err(|failure| failed(login_loss(&failure)))?;
        let turn = match coming {
            Some(coming) => Some(self.turn(coming, &member).await.ok_or(failed(Loss::Upstream))?),
            None => None,
        };
        let mut head = upstream_headers(&self.headers, &shown);
        head.fields.insert(HAS_LEADER, HeaderValue::from_static("true"));
        head.fields.remove("grpc-timeout");
        let stream = Bidi::open(&self.door, &member, PathAndQuery::from_static(PATH), head);
        let told = member.traits();
        let traits = Traits {
            progress_trusted: told.progress_ordered && told.progress_after_idle,
            exact_refusals: told.exact_watch_refusals,
            late_created: told.late_created,
            refuses_negative_start: told.refuses_negative_start,
        };
        let turn = turn.map(|turn| (turn, Instant::now() + STANDING));
        let share = Rc::clone(&self.share);
        let held = share.hold(0);
        Ok(Source { member, traits, stream, shown, share, held, turn, stood: false })
    }

    /// The more losses before, the longer. After the first, only as long as keeps those apart that lost the same member.
    async fn pause(&self, attempt: u32) {
        let door = &self.door;
        match attempt {
            0 => {}
            1 => {
                let others = u32::try_from(door.resumes.all().saturating_sub(1)).unwrap_or(u32::MAX);
                let most = APART.saturating_mul(2).saturating_mul(others).min(LONGEST_PAUSE);
                let drawn = door.chooser.draw(u64::try_from(most.as_micros()).unwrap_or(0));
                tokio::time::sleep(Duration::from_micros(drawn)).await;
            }
            _ => {
                let pause = (FIRST_PAUSE * 2_u32.saturating_pow(attempt - 2)).min(LONGEST_PAUSE);
                // Half of it to one and a half: the watches of a lost member do not come back all at once.
                let half = u64::try_from(pause.as_millis() / 2).unwrap_or(0);
                door.pause_or_change(Duration::from_millis(half + door.chooser.draw(2 * half))).await;
            }
        }
    }

    /// Waits for the stream's turn on `member`; none where the member was lost meanwhile.
    async fn turn(&self, coming: Coming, member: &Member) -> Option<Turn> {
        // One that was not ready when it was chosen was the best there is.
        let was = member.is_ready();
        let is = || self.door.members.snapshot.load().get(member.id).is_some_and(|member| member.is_ready());
        let lost = || was && !is();
        let mut changes = self.door.members.changes.clone();
        changes.mark_unchanged();
        let mut turn = pin!(coming.turn());
        loop {
            tokio::select! {
                biased; // in any order, but always the same
                turn = &mut turn => return (!lost()).then_some(turn),
                Ok(()) = changes.changed() => {}
            }
            if lost() {
                return None;
            }
        }
    }

    /// What it takes to read the cluster's revision through `source`'s member.
    pub fn reader(&self, source: &Source) -> (Rc<Door>, As, Arc<Member>) {
        (Rc::clone(&self.door), self.whom.clone(), Arc::clone(&source.member))
    }
}

impl Source {
    /// Puts a WatchRequest in line.
    pub fn send(&mut self, message: &[u8]) {
        self.stream.send(message);
    }

    /// Until when others wait for this stream at most; none where nobody waits for it.
    #[must_use]
    pub fn turn_ends(&self) -> Option<Instant> {
        self.turn.as_ref().map(|(_, until)| *until)
    }

    /// Whoever waits may go on: its watches stand, or it took too long.
    pub fn end_turn(&mut self) {
        self.turn = None;
    }

    /// What comes next, unless too much is held. Cancel-safe.
    ///
    /// # Errors
    /// [`TooMuch`]: give it up, and open another later.
    pub async fn next(&mut self) -> Result<Next, TooMuch> {
        let (share, held) = (&self.share, &mut self.held);
        let room = |unfinished: usize| {
            held.resize(unfinished.saturating_sub(FREE));
            held.bytes() == 0 || share.fits()
        };
        let next = self.stream.next_within(room).await;
        self.stood |= matches!(next, Ok(Next::Message(_)));
        next
    }

    /// What the end of the stream means to the hub; tells those who keep members and tokens.
    #[must_use]
    pub fn ended(&self, door: &Door, whom: &As, end: &Next) -> Loss {
        match end {
            Next::Message(_) => Loss::Upstream,
            Next::Broken(reason) => {
                tracing::debug!(member = %self.member.id, %reason, "a watch stream broke");
                self.member.suspect();
                door.members.hints.send(Hint::Unreachable(self.member.id));
                Loss::Upstream
            }
            Next::Left => {
                tracing::debug!(member = %self.member.id, "a watch stream leaves its member");
                Loss::Upstream
            }
            Next::Unopened(reason) => {
                tracing::debug!(member = %self.member.id, %reason, "a watch stream was not opened");
                Loss::Upstream
            }
            Next::NoRoom => {
                tracing::debug!("a watch stream found no room");
                Loss::Upstream
            }
            Next::Ended(status) => {
                tracing::debug!(member = %self.member.id, ?status, "a member ended a watch stream");
                if self.stood && *status == Refusal::NO_LEADER.status() {
                    door.members.stream_ended_without_leader();
                }
                self.refused(whom, status)
            }
        }
    }

    fn refused(&self, whom: &As, status: &Status) -> Loss {
        let proof = self.shown.proof();
        let verdict =
            lookup(PATH).map(|method| verdict(&Asked { method, effect: method.effect, proof }, status));
        match (verdict, whom) {
            (Some(Verdict::Heal), As::User(identity)) if identity.renew(self.member.id, &self.shown) => {
                Loss::Credential
            }
            _ => Loss::Upstream,
        }
    }
}

/// Whether a status judges who asks, rather than saying that the member could not answer now.
#[must_use]
pub fn refuses_credential(status: &Status) -> bool {
    matches!(status.code, Code::Unauthenticated | Code::PermissionDenied | Code::InvalidArgument)
}

/// What the hub is told when no token can be had.
#[must_use]
pub fn login_loss(failure: &LoginFailure) -> Loss {
    match failure {
        LoginFailure::WrongPassword | LoginFailure::NoPassword => {
            Loss::Denied(Refusal::INVALID_AUTH_TOKEN.status().cancel_reason())
        }
        _ => Loss::Upstream,
    }
}
