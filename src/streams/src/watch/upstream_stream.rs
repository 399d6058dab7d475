//! An upstream Watch stream, from the decision to open to the end.
//!
//! Owns: the member wanted, the wait among resuming streams, the proof of a credential. Must not know:
//! watches (see the hub).
//! Invariants: every wait and read has a limit; `hasleader` always goes upstream, so that a member without a
//! leader ends the stream instead of going silent; a resumed stream waits for its turn on its member, and
//! blocks the next stream for at most `STANDING`.

use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::LocalBoxFuture;
use tokio::time::Instant;

use crate::watch::hub::{StreamCredential, StreamLoss, WatchTraits};
use keyward_base::byte_account::HeldBytes;
use keyward_cluster::choose::MemberTarget;
use keyward_cluster::membership::{AuthSetting, Member};
use keyward_downstream::revision_watermark::RevisionWatermark;
use keyward_downstream::stream_budget::{FREE, StreamByteShare};
use keyward_etcd::identity::MemberId;
use keyward_etcd::refusal::{Code, Refusal, Status};
use keyward_etcd::rpc::outcome::{StatusVerdict, verdict};
use keyward_upstream::bidi::{BidiEvent, UnfinishedMessageTooLarge};
use keyward_upstream::credentials::LoginFailure;
use keyward_upstream::own_requests::{ReadError, local_revision};
use keyward_upstream::reopening_stream::{OpenStream, StreamRoute, StreamRules};
use keyward_upstream::resume_limiter::{QueuedResume, ResumePermit};
use keyward_upstream::send::{UpstreamClient, UpstreamUser};

/// The rules of upstream Watch streams.
pub const RULES: StreamRules = StreamRules {
    first_pause: Duration::from_millis(25),
    longest_pause: Duration::from_secs(1),
    has_jitter: true,
    requires_leader: true,
};
/// Average distance between the resumes of the streams of a lost member, for the first attempt: about the
/// duration of a dial and a create. A lone stream does not wait.
const APART: Duration = Duration::from_millis(1);
/// Maximum time for a resumed stream to restore its watches before the next stream gets a turn: a hundred
/// times the need of a healthy member. The limit is reached only if a client does not read or the member is
/// stuck.
const STANDING: Duration = Duration::from_secs(1);

/// The requirements for opening a stream.
#[derive(Clone)]
pub struct WatchRoute {
    /// The sender, the user and the headers of every upstream stream, with [`RULES`].
    pub stream: Rc<StreamRoute>,
    /// The client connection's home member.
    pub home: Option<MemberId>,
    /// The revision floor of the client's connection.
    pub floor: Rc<RevisionWatermark>,
    /// The client stream's share of the shard's byte budget.
    pub share: Rc<StreamByteShare>,
}

/// A stream on the way to a member, or open.
pub struct WatchSource {
    /// Traits of the member's version.
    pub traits: WatchTraits,
    stream: OpenStream,
    share: Rc<StreamByteShare>,
    /// Counts the bytes of an unfinished message.
    held: HeldBytes,
    /// The stream's turn to be resumed, and its latest end. Boxed: most streams are never resumed.
    turn: Option<Box<(ResumePermit, Instant)>>,
    /// True once a message arrived.
    has_received: bool,
}

/// A stream being opened.
pub type WatchSourceOpening = LocalBoxFuture<'static, Result<WatchSource, SourceOpenFailure>>;

/// A failure to open a stream.
pub struct SourceOpenFailure {
    /// The reason of the failure, for the hub.
    pub why: StreamLoss,
    /// The failed member; `None` if no member is to blame.
    pub member: Option<MemberId>,
}

impl WatchRoute {
    /// Opens a stream on a member outside `tried`, if there is another. `attempt` is the number of losses
    /// before.
    #[must_use]
    pub fn open(
        &self,
        credential: StreamCredential,
        attempt: u32,
        tried: Vec<MemberId>,
    ) -> WatchSourceOpening {
        let route = self.clone();
        async move { route.opened(credential, attempt, &tried).await }.boxed_local()
    }

    async fn opened(
        &self,
        credential: StreamCredential,
        attempt: u32,
        tried: &[MemberId],
    ) -> Result<WatchSource, SourceOpenFailure> {
        let resuming = (attempt > 0).then(|| self.stream.upstream.resumes.begin());
        let nobody = SourceOpenFailure { why: StreamLoss::Upstream, member: None };
        let StreamRoute { upstream, user, .. } = &*self.stream;
        if attempt == 1 {
            self.spread().await;
        }
        self.stream.pause(attempt).await;
        let wanted = MemberTarget::Current { home: self.home, floor: self.floor.revision() };
        let member = upstream.choose(wanted, tried).ok_or(nobody)?;
        let failed = |why| SourceOpenFailure { why, member: Some(member.id) };
        let coming = resuming.map(|resuming| upstream.resumes.queue_on(member.id, resuming));
        if credential == StreamCredential::Fresh {
            if matches!(user, UpstreamUser::User(_)) && upstream.members.auth.now() == AuthSetting::Off {
                // A member refuses credentials only with auth on. If auth is off after all, the login reports
                // so.
                upstream.report_auth(AuthSetting::On);
            }
            // A read with the token at hand proves the token, or renews it if the member refuses it.
            match local_revision(upstream, user, &member).await {
                Ok(_) => {}
                // Refused for good: the create is still sent, and etcd refuses the create in its own words.
                Err(ReadError::Refused(status)) if refuses_credential(&status) => {}
                // The read proved neither a valid nor an invalid token, so a second refusal would not be
                // final.
                Err(ReadError::Refused(_) | ReadError::Lost | ReadError::TooLarge | ReadError::NoRoom) => {
                    return Err(failed(StreamLoss::Upstream));
                }
                Err(ReadError::Login(failure)) => return Err(failed(login_loss(&failure))),
            }
        }
        let shown = upstream.credential_for(user, &member).await;
        let shown = shown.map_err(|failure| failed(login_loss(&failure)))?;
        let turn = match coming {
            Some(coming) => Some(self.turn(coming, &member).await.ok_or(failed(StreamLoss::Upstream))?),
            None => None,
        };
        let told = member.traits();
        let traits = WatchTraits {
            progress_trusted: told.progress_ordered && told.progress_after_idle,
            exact_refusals: told.exact_watch_refusals,
            late_created: told.late_created,
            refuses_negative_start: told.refuses_negative_start,
            // A watch of a caller without a user is refused by the member, whatever the range.
            misjudges_open_end: !told.checks_open_watches
                && matches!(self.stream.user, UpstreamUser::User(_))
                && upstream.members.auth.now() != AuthSetting::Off,
        };
        let turn = turn.map(|turn| Box::new((turn, Instant::now() + STANDING)));
        let share = Rc::clone(&self.share);
        let held = share.hold(0);
        let stream = Rc::clone(&self.stream).start(member, shown);
        Ok(WatchSource { traits, stream, share, held, turn, has_received: false })
    }

    /// Spreads the first attempts of the streams that lost the same member.
    async fn spread(&self) {
        let others = self.stream.upstream.resumes.all().saturating_sub(1);
        let others = u32::try_from(others).unwrap_or(u32::MAX);
        let most = APART.saturating_mul(2).saturating_mul(others).min(RULES.longest_pause);
        let drawn = self.stream.upstream.chooser.draw(u64::try_from(most.as_micros()).unwrap_or(0));
        tokio::time::sleep(Duration::from_micros(drawn)).await;
    }

    /// Waits for the stream's turn on `member`; `None` if the member was lost meanwhile.
    async fn turn(&self, coming: QueuedResume, member: &Member) -> Option<ResumePermit> {
        // An unready member was chosen for lack of a better one; its readiness is no sign of a loss.
        let was = member.is_ready();
        let is = || {
            self.stream
                .upstream
                .members
                .snapshot
                .load()
                .get(member.id)
                .is_some_and(|member| member.is_ready())
        };
        let lost = || was && !is();
        let mut changes = self.stream.upstream.members.changes.clone();
        changes.mark_unchanged();
        let mut turn = pin!(coming.turn());
        loop {
            tokio::select! {
                biased; // the order does not matter, but must be deterministic
                turn = &mut turn => return (!lost()).then_some(turn),
                Ok(()) = changes.changed() => {}
            }
            if lost() {
                return None;
            }
        }
    }
}

impl WatchSource {
    /// The member carrying the stream.
    #[must_use]
    pub fn member(&self) -> &Arc<Member> {
        &self.stream.member
    }

    /// Queues a WatchRequest.
    pub fn send(&mut self, message: &[u8]) {
        self.stream.bidi.send(message);
    }

    /// The latest end of the stream's turn; `None` if no stream waits for the end of the turn.
    #[must_use]
    pub fn turn_ends(&self) -> Option<Instant> {
        self.turn.as_ref().map(|turn| turn.1)
    }

    /// Lets the next waiting stream go on: the watches are restored, or took too long.
    pub fn end_turn(&mut self) {
        self.turn = None;
    }

    /// The next message or end, unless too many bytes are held. Cancel-safe.
    ///
    /// # Errors
    /// [`UnfinishedMessageTooLarge`]: the caller should give up the stream and open another later.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Result<BidiEvent, UnfinishedMessageTooLarge>> {
        let (share, held) = (&self.share, &mut self.held);
        let room = |unfinished: usize| {
            held.resize(unfinished.saturating_sub(FREE));
            held.bytes() == 0 || share.fits()
        };
        let next = self.stream.bidi.poll_next_within(cx, room);
        self.has_received |= matches!(next, Poll::Ready(Ok(BidiEvent::Message(_))));
        next
    }

    /// Translates the end of the stream into a [`StreamLoss`]. Reports an unreachable member, a missing
    /// leader and a refused token to the state kept for members and tokens.
    #[must_use]
    pub fn ended(&self, upstream: &UpstreamClient, end: &BidiEvent) -> StreamLoss {
        self.stream.report_end(end);
        let BidiEvent::Ended(status) = end else { return StreamLoss::Upstream };
        if self.has_received && *status == Refusal::NO_LEADER.status() {
            upstream.members.stream_ended_without_leader();
        }
        let is_refused = verdict(&self.stream.judged(), status) == StatusVerdict::Heal;
        if is_refused && self.stream.renew_credential() {
            StreamLoss::Credential
        } else {
            StreamLoss::Upstream
        }
    }
}

/// True if the status judges the caller, not the member's present ability to answer.
#[must_use]
pub fn refuses_credential(status: &Status) -> bool {
    matches!(status.code, Code::Unauthenticated | Code::PermissionDenied | Code::InvalidArgument)
}

/// The [`StreamLoss`] for a failed login.
#[must_use]
pub fn login_loss(failure: &LoginFailure) -> StreamLoss {
    match failure {
        LoginFailure::WrongPassword | LoginFailure::NoPassword => {
            StreamLoss::Denied(Refusal::INVALID_AUTH_TOKEN.status().cancel_reason())
        }
        _ => StreamLoss::Upstream,
    }
}
