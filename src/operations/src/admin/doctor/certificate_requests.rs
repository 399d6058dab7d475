//! The members that ask for no client certificate, although etcd users are proved to them by certificates.
//!
//! Owns: when members are looked at. Must not know: the handshake, the finding. Invariants: the answer is
//! that of a handshake, and no flag of a member is guessed; without a user who is proved by a certificate,
//! and while auth is not on, no member is looked at.

use futures_util::future::join_all;

use keyward_cluster::membership::{AuthSetting, Membership};
use keyward_config::Config;
use keyward_dial::certificate_request::asks_for_certificate;
use keyward_dial::connect::Connector;
use keyward_etcd::identity::MemberId;

/// Returns the members that ask for no client certificate.
pub async fn members_without_request(
    config: &Config,
    (members, auth): (&Membership, AuthSetting),
    connector: &Connector,
) -> Vec<MemberId> {
    if auth != AuthSetting::On || !config.users.show_certificates() {
        return Vec::new();
    }
    let asked = members.members.iter().map(async |member| {
        let asks = asks_for_certificate(connector, &member.endpoint, member.resolved_ip).await;
        // A member that is not reached has findings of its own.
        matches!(asks, Ok(Some(false))).then_some(member.id)
    });
    join_all(asked).await.into_iter().flatten().collect()
}
