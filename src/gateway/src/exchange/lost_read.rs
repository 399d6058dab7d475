//! Whether a call is tried again after a lost reply to a read, and where no member has a leader.
//!
//! Owns: these two decisions. Must not know: how an attempt is made. Invariant: a read that may have ended a
//! member is sent to no other member (docs/decisions.md#d68).

use std::sync::Arc;

use tokio::time::Instant;

use super::{CallProgress, Exchange};
use keyward_cluster::membership::Member;
use keyward_etcd::refusal::Refusal;
use keyward_etcd::rpc::body_shape;
use keyward_etcd::rpc::method::Effect;
use keyward_upstream::answer::OnLoss;

impl Exchange<'_> {
    /// Decides about another attempt for a read whose reply was lost with the connection to `member`: once,
    /// never at the last ready member, and never for a read that may be the cause, which is a suspect from
    /// now on (docs/decisions.md#d68).
    pub(super) fn repeats_lost_read(&self, progress: &CallProgress, member: &Member) -> Result<(), Refusal> {
        if let Some(on_loss) = self.on_loss_of_heavy(member) {
            return Err(on_loss());
        }
        let members = self.call.gateway.upstream.members.snapshot.load();
        let ready = members.members.iter().filter(|other| other.is_ready() && other.id != member.id).count();
        let may_repeat = !progress.lost && !progress.hedged && ready > 1;
        if may_repeat { Ok(()) } else { Err(Refusal::REQUEST_TIMED_OUT_CONNECTION_LOST) }
    }

    /// True if the client asked to be told at once of a missing leader (`hasleader`), and every member that
    /// answers has none. A member that is cut off alone is not asked again while another is ready.
    pub(super) fn is_told_of_no_leader(&self, progress: &CallProgress) -> bool {
        if !self.call.wants_leader() {
            return false;
        }
        let members = self.call.gateway.upstream.members.snapshot.load();
        let answered = progress.last.0.as_ref().and_then(|answer| answer.status());
        match answered {
            Some(status) => *status == Refusal::NO_LEADER.status(),
            None => members.ready_voters().next().is_none() && members.leaderless_voters().next().is_some(),
        }
    }

    /// Suspects this read, if `member` may end over it.
    pub(super) fn on_loss_of_heavy(&self, member: &Member) -> Option<OnLoss> {
        let (method, message) = (self.call.method, self.message());
        if self.effect != Effect::ReadOnly || !body_shape::is_heavy(method, message) {
            return None;
        }
        let (usage, member, name) =
            (Arc::clone(&self.call.gateway.usage), member.id, Arc::clone(&member.name));
        let digest = usage.suspect_reads.digest(method.path, message);
        Some(Box::new(move || {
            usage.suspect_reads.suspect(digest, Instant::now());
            let (name, method) = (&*name, method.name);
            tracing::warn!(%member, name, method, "a member was lost while it answered a large read");
            Refusal::SUSPECT_READ
        }))
    }
}
