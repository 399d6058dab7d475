//! Tokens that clients show which are signed with etcd's own key (`etcdctl --auth-jwt-token`).
//!
//! Owns: whether such a token counts now. Must not know: signatures (`jwt`), as whom its bearer goes upstream (`identities`).
//! Invariants: as at etcd, a token counts at the auth revision that it names and at no other, which is found out within a second;
//! where it cannot be found out nobody is let in; one counts for the cluster only that was served when Keyward started, since the
//! key is that one's; the token itself never goes upstream.

use std::time::Duration;

use tokio::time::{Instant, sleep, timeout_at};

use super::Evidence;
use super::identities::Standing;
use crate::gateway::Gateway;
use crate::gateway::exchange::PATIENCE;
use crate::refusal::Refusal;
use crate::upstream::membership::Auth;

/// What was heard of the auth revision is at most a second old: a token that names a later one may be right by then.
const SETTLES: Duration = Duration::from_millis(1500);
/// Between two questions for it.
const AGAIN: Duration = Duration::from_millis(250);

/// The auth revision that decides whether this caller's token counts; none where none does.
pub(super) fn revision_of(standing: &Standing) -> Option<u64> {
    match &standing.grounds.shown {
        Evidence::Jwt(verified, _) => verified.auth_revision,
        Evidence::Session(_) | Evidence::Connection | Evidence::Ignored => None,
    }
}

/// Whether a token of `revision` counts now.
///
/// # Errors
/// It does not, in etcd's words; or it is not known.
pub(super) async fn counts(gateway: &Gateway, revision: u64) -> Result<(), Refusal> {
    if gateway.sealer.has_followed() {
        return Err(Refusal::INVALID_AUTH_TOKEN);
    }
    // There are no users, and etcd looks at no token.
    if gateway.door.members.auth.now() == Auth::Off {
        return Ok(());
    }
    let begun = Instant::now();
    loop {
        let current = timeout_at(begun + PATIENCE, gateway.logins.moves().current()).await;
        match current.ok().flatten() {
            None => return Err(Refusal::NOTHING_SENT),
            Some(current) if revision == current => return Ok(()),
            Some(current) if revision > current && begun.elapsed() < SETTLES => sleep(AGAIN).await,
            Some(_) => return Err(Refusal::AUTH_OLD_REVISION),
        }
    }
}
