//! Calls while the known revocations suffice for local reads only: without a quorum, and past
//! `revocation.max_age`.
//!
//! Owns: the refusal of every other call of a session or an etcd user. Must not know: how old the revocations
//! are, the revocations. Invariant (docs/decisions.md#d77): a call identified in that state goes to a member
//! without a leader, or nowhere, also if a quorum is back while the call waits; its client comes again, and
//! is identified by revocations that a quorum has told.

use crate::call::Call;
use keyward_cluster::membership::Member;
use keyward_etcd::refusal::Refusal;
use keyward_etcd::rpc::quorum::{self, QuorumNeed};

/// Refuses a call that no member can answer alone, whatever its message.
///
/// # Errors
/// The revocations suffice for local reads only.
pub(super) fn refuse_method(call: &Call<'_>) -> Result<(), Refusal> {
    if call.is_for_local_reads() { Err(refusal(call)) } else { Ok(()) }
}

/// Refuses a request that needs a quorum.
///
/// # Errors
/// The revocations suffice for local reads only.
pub(super) fn refuse(call: &Call<'_>, message: &[u8]) -> Result<(), Refusal> {
    if !call.is_for_local_reads() || quorum::need(call.method, message) != QuorumNeed::Always {
        return Ok(());
    }
    Err(refusal(call))
}

/// True if the call may be sent to `member`.
#[must_use]
pub(super) fn may_go_to(call: &Call<'_>, member: &Member) -> bool {
    !call.is_for_local_reads() || member.is_leaderless_voter()
}

/// A quorum that is back is followed by a read of the revocations: the client may send its call again, also a
/// write. Without a quorum the client is told so at once, where nothing can come of waiting.
fn refusal(call: &Call<'_>) -> Refusal {
    let members = call.gateway.upstream.members.snapshot.load();
    if members.ready_voters().next().is_some() { Refusal::NOTHING_SENT } else { Refusal::NO_LEADER }
}
