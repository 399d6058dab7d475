//! Requests that would end or split members, refused before anything is sent (docs/decisions.md#d68).
//!
//! Owns: the refusal. Must not know: the form of such a request (`rpc::fatal_request`), the versions
//! (`members::open_holes`), the suspects among reads (`usage::suspect_reads`). Invariant: every request with
//! a single message passes here, whatever its door.

use tokio::time::Instant;

use crate::call::Call;
use crate::unary_request::UnaryRequest;
use keyward_etcd::refusal::Refusal;
use keyward_etcd::rpc::fatal_request;

/// Refuses a request over which a member in use would end, a Txn that members in use would apply differently,
/// and a read that was under way when a member was lost.
///
/// # Errors
/// The refusal, in etcd's words where a newer etcd has some.
pub(super) fn refuse(call: &Call<'_>, request: &UnaryRequest) -> Result<(), Refusal> {
    let weaknesses = call.snapshot().members.holes.weaknesses;
    let refusal = match fatal_request::refusal(call.method, request.message(), weaknesses) {
        Some(refusal) => refusal,
        None if is_suspect(call, request) => Refusal::SUSPECT_READ,
        None => return Ok(()),
    };
    if call.gateway.log_limiter.may_log() {
        let peer = call.client.origin.remote_text.as_deref();
        tracing::warn!(method = call.method.name, peer, %refusal, "refused: members would end, or differ");
    }
    Err(refusal)
}

fn is_suspect(call: &Call<'_>, request: &UnaryRequest) -> bool {
    let suspects = &call.gateway.usage.suspect_reads;
    suspects.is_any() && {
        let digest = suspects.digest(call.method.path, request.message());
        suspects.is_suspect(digest, Instant::now())
    }
}
