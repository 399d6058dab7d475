//! Calls without an etcd user, refused while auth is on (docs/decisions.md#d32).
//!
//! Owns: the refusal, and the wait for the auth setting after the start. Must not know: versions of members,
//! how a caller is identified.

use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::LocalBoxFuture;
use tokio::time::Instant;

use keyward_cluster::membership::{AuthSetting, MembersHandle};
use keyward_config::{PolicySettings, RequireIdentity};
use keyward_etcd::refusal::Refusal;
use keyward_etcd::rpc::method::{Class, Handler, Method};
use keyward_etcd::rpc::schema::MessageId;
use keyward_upstream::send::UpstreamUser;

/// Pause before the auth setting is read again while the setting is unknown.
const PAUSE: Duration = Duration::from_millis(100);
/// Time for the first members to tell if auth is on: members with a slow link or disk take several answers of
/// some seconds each.
const LONGEST_WAIT: Duration = Duration::from_secs(30);

/// Refuses a call without an etcd user, as the newest etcd does, if auth is on and the configuration
/// requires an identity. `None` if the call needs no user, as nearly every call: a watch is refused in its
/// own stream, by the member; AuthStatus is open in etcd 3.7. Boxed, so that the other calls do not pay for
/// a larger future.
pub(super) fn identity_check<'a>(
    members: &'a MembersHandle,
    policy: &PolicySettings,
    method: &Method,
    user: &UpstreamUser,
) -> Option<LocalBoxFuture<'a, Result<(), Refusal>>> {
    let auth = members.auth.now();
    // Every etcd asks for a user who reads or writes keys.
    let guarded = matches!(method.class, Class::Read | Class::Write | Class::Lock);
    let needs_user = matches!(user, UpstreamUser::Nobody)
        && method.handler != Handler::Watch
        && method.body != MessageId::AuthStatusRequest
        && (auth == AuthSetting::On || auth == AuthSetting::Unknown && !guarded)
        && policy.require_identity == RequireIdentity::Strict;
    let checked = async {
        let limit = Instant::now() + LONGEST_WAIT;
        loop {
            match members.auth.now() {
                AuthSetting::Off => return Ok(()),
                AuthSetting::On => return Err(Refusal::USER_EMPTY),
                AuthSetting::Unknown if Instant::now() >= limit => return Err(Refusal::NOTHING_SENT),
                // For a moment after the start. The member would serve the call.
                AuthSetting::Unknown => members.pause_or_change(PAUSE).await,
            }
        }
    };
    needs_user.then(|| checked.boxed_local())
}
