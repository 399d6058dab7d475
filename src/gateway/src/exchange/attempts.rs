//! The attempts of one call: the result of each, and the progress through all of them.
//!
//! Must not know: how an attempt is made.

use std::time::Duration;

use tokio::time::Instant;

use crate::retries::PATIENCE;
use keyward_cluster::membership::Member;
use keyward_etcd::identity::{ClusterId, MemberId};
use keyward_etcd::refusal::Refusal;
use keyward_upstream::answer::MemberReply;
use keyward_upstream::credentials::LoginFailure;

pub(super) const FIRST_PAUSE: Duration = Duration::from_millis(10);

/// The result of a single attempt.
pub(super) enum Attempt {
    /// An answer for the client.
    Answered(Box<MemberReply>),
    /// Not applied, or safe to repeat: try again at another member, or after a pause. The answer, or else the
    /// refusal, goes to the client if no later attempt succeeds.
    Again(Option<Box<MemberReply>>, Refusal),
    /// The reply to a read was lost with the connection: the read may be the cause.
    ReadLost,
    /// Nothing was sent, because the caller could not be authenticated to this member. Other callers are not
    /// affected.
    NotAuthenticated(Refusal),
    /// The caller's credential for this member was renewed: try again without marking the member as tried.
    Healed,
    /// The member refused the Lock or Campaign with the error of another caller's token (etcd-io/etcd#14850):
    /// try another member, or this member later.
    SharedWatchRefusal(Box<MemberReply>),
    /// Final: no further attempt.
    Refused(Refusal),
}

impl Attempt {
    /// The result of an attempt whose login failed.
    pub(super) fn without_login(failure: &LoginFailure) -> Self {
        // The session's password is no longer the user's password at etcd: the client must log in again.
        if failure.is_refusal() {
            Self::Refused(Refusal::INVALID_AUTH_TOKEN)
        } else {
            Self::NotAuthenticated(Refusal::NOTHING_SENT)
        }
    }

    /// The result of an attempt at a member that refused the user's certificate: final, once each ready
    /// member did.
    pub(super) fn not_accepted(is_refused_everywhere: bool) -> Self {
        if is_refused_everywhere {
            Self::Refused(Refusal::CERTIFICATE_NOT_ACCEPTED)
        } else {
            Self::NotAuthenticated(Refusal::CERTIFICATE_NOT_ACCEPTED)
        }
    }
}

/// The step after an attempt.
pub(super) enum NextStep {
    /// The client is answered.
    Answer(Result<Box<MemberReply>, Refusal>),
    /// Another member is tried at once.
    AnotherMember,
    /// Any member is tried after this time, since a credential was renewed.
    After(Duration),
    /// All members were tried: any member is tried after the usual pause.
    AfterPause,
}

/// The progress of a call through its attempts.
pub(super) struct CallProgress {
    /// The cluster served when the call began.
    pub(super) served: Option<Option<ClusterId>>,
    /// When the call is given up.
    pub(super) patience: Instant,
    /// The members tried since the last pause.
    pub(super) tried: Vec<MemberId>,
    /// The members at which a credential was renewed, an entry per renewal.
    pub(super) healed: Vec<MemberId>,
    pub(super) pause: Duration,
    /// True once a hedged read was sent to a second member.
    pub(super) hedged: bool,
    /// True once the reply to a read was lost with the connection.
    pub(super) lost: bool,
    /// The answer or refusal for the client if no later attempt succeeds.
    pub(super) last: (Option<Box<MemberReply>>, Refusal),
}

impl CallProgress {
    /// The progress of a call that begins at `now`.
    pub(super) fn new(now: Instant) -> Self {
        Self {
            served: None,
            patience: now + PATIENCE,
            tried: Vec::new(),
            healed: Vec::new(),
            pause: FIRST_PAUSE,
            hedged: false,
            lost: false,
            last: (None, Refusal::NO_LEADER),
        }
    }

    /// The current time at the beginning of a turn. Only later turns read the clock.
    pub(super) fn turn_time(&self) -> Instant {
        match self.served {
            None => self.patience - PATIENCE,
            Some(_) => Instant::now(),
        }
    }

    /// Resets the counters and limits, keeping only the last result.
    pub(super) fn begin_anew(&mut self) {
        let last = std::mem::replace(&mut self.last, (None, Refusal::NO_LEADER));
        *self = Self { last, ..Self::new(Instant::now()) };
    }

    /// The pause after renewing a credential at `member`: zero after the first renewal, then doubling from
    /// `FIRST_PAUSE`.
    pub(super) fn after_healing(&self, member: &Member) -> Duration {
        let before = self.healed.iter().filter(|id| **id == member.id).skip(1);
        before.fold(Duration::ZERO, |pause, _| (2 * pause).max(FIRST_PAUSE))
    }

    /// The result of a call that is given up.
    pub(super) fn end(&mut self) -> Result<Box<MemberReply>, Refusal> {
        let (answer, refusal) = std::mem::replace(&mut self.last, (None, Refusal::NO_LEADER));
        answer.ok_or(refusal)
    }
}
