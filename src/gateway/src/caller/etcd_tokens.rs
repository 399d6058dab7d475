//! Client tokens signed with etcd's own key (`etcdctl --auth-jwt-token`).
//!
//! Owns: whether such a token is valid now. Must not know: signatures (`jwt`), the upstream user of the
//! bearer (`identities`).
//! Invariants: as at etcd, a token is valid only at the auth revision named in the token, and a change is
//! noticed within a second; while the auth revision is unknown the token is refused; a token is valid only
//! for the cluster served when Keyward started, the owner of the key; the token itself never goes upstream.

use std::time::Duration;

use tokio::time::{Instant, sleep, timeout_at};

use super::CallerEvidence;
use super::identities::PeerStanding;
use crate::Gateway;
use crate::retries::PATIENCE;
use keyward_cluster::membership::AuthSetting;
use keyward_etcd::refusal::Refusal;

/// Time granted to a token naming a later auth revision than the known revision, which may be a second old.
const SETTLES: Duration = Duration::from_millis(1500);
/// Pause between two looks at the auth revision.
const AGAIN: Duration = Duration::from_millis(250);

/// The auth revision required by the caller's token; `None` without an etcd-signed token.
pub(super) fn revision_of(standing: &PeerStanding) -> Option<u64> {
    match &standing.grounds.evidence {
        CallerEvidence::Jwt(verified, _) => verified.auth_revision,
        CallerEvidence::Session(_) | CallerEvidence::Connection | CallerEvidence::Ignored => None,
    }
}

/// Checks that a token of `revision` is valid now.
///
/// # Errors
/// The token is invalid, in etcd's words; or the auth revision is unknown.
pub(super) async fn counts(gateway: &Gateway, revision: u64) -> Result<(), Refusal> {
    if gateway.sealer.has_followed() {
        return Err(Refusal::INVALID_AUTH_TOKEN);
    }
    // With auth off, etcd has no users and checks no token.
    if gateway.upstream.members.auth.now() == AuthSetting::Off {
        return Ok(());
    }
    let begun = Instant::now();
    loop {
        let current = timeout_at(begun + PATIENCE, gateway.logins.auth_revision().current()).await;
        match current.ok().flatten() {
            None => return Err(Refusal::NOTHING_SENT),
            Some(current) if revision == current => return Ok(()),
            Some(current) if revision > current && begun.elapsed() < SETTLES => sleep(AGAIN).await,
            Some(_) => return Err(Refusal::AUTH_OLD_REVISION),
        }
    }
}
