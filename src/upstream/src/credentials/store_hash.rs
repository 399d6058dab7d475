//! Asks a member for the hash of its store, which etcd tells to the role `root` alone while auth is on.
//!
//! Owns: the credentials of the question, and their order: of `cluster.probe`, else of the connection's
//! certificate; where etcd denies these, of `root`, if the configuration lets Keyward prove `root` by a
//! token. Must not know: the members asked, the comparison.
//! Invariant: no credential that came from a client is shown.

use std::time::Duration;

use tokio::time::timeout;
use tonic::metadata::AsciiMetadataValue;
use tonic::transport::Channel;

use super::{Credentials, UpstreamIdentity, UpstreamUser};
use keyward_cluster::discovery::store_hashes::{HashAnswer, hash_kv};
use keyward_cluster::membership::AuthSetting;
use keyward_config::{EtcdLogin, ROOT};
use keyward_etcd::identity::{MemberId, UserName};

/// Time limit of a login.
const LOGIN: Duration = Duration::from_secs(5);

impl Credentials {
    /// Asks `member` for the hash of its store behind `revision`.
    pub async fn store_hash(
        &self,
        (auth, probe): (AuthSetting, Option<&EtcdLogin>),
        member: MemberId,
        revision: i64,
    ) -> HashAnswer {
        let Some(channel) = self.shared.channels.load().get(&member).cloned() else {
            return HashAnswer::Nothing;
        };
        let answer = match (auth, probe) {
            (AuthSetting::Unknown, _) => return HashAnswer::Denied,
            (AuthSetting::Off, _) => return hash_kv(channel, None, revision).await,
            (AuthSetting::On, None) => hash_kv(channel.clone(), None, revision).await,
            (AuthSetting::On, Some(login)) => {
                let identity = UpstreamIdentity::Password(self.identity(&login.user, &login.password));
                hash_as(&identity, &channel, member, revision).await
            }
        };
        match self.act_as(&UserName::from(ROOT)) {
            Some(UpstreamUser::User(root)) if answer == HashAnswer::Denied => {
                hash_as(&root, &channel, member, revision).await
            }
            _ => answer,
        }
    }
}

/// Asks as a user that is proved by a token. A token that the member does not know is renewed once.
async fn hash_as(
    identity: &UpstreamIdentity,
    channel: &Channel,
    member: MemberId,
    revision: i64,
) -> HashAnswer {
    let mut answer = HashAnswer::Denied;
    for _ in 0..2 {
        let shown = match timeout(LOGIN, identity.credential_for(member)).await {
            Ok(Ok(shown)) => shown,
            Ok(Err(failure)) if failure.is_refusal() => return HashAnswer::Denied,
            Ok(Err(_)) | Err(_) => return HashAnswer::Nothing,
        };
        let token =
            shown.token().and_then(|token| AsciiMetadataValue::try_from(token.header().as_bytes()).ok());
        // A user with a certificate has connections of its own, which carry clients' calls only.
        let Some(token) = token else { return HashAnswer::Denied };
        answer = hash_kv(channel.clone(), Some(token), revision).await;
        if answer != HashAnswer::BadToken {
            break;
        }
        identity.renew(member, &shown);
    }
    answer
}
