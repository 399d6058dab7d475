//! Finds the etcd users holding the role `root`: such users may do everything, whatever their name.
//!
//! Owns: the search, with the credentials available to Keyward. Must not know: the rules mapping peers to
//! users, the consequences of a finding.
//! Invariant: a user without an answer is reported as unknown, never as not holding the role.

use std::time::Duration;

use tokio::time::timeout;

use super::auth_calls::{self, RolesAnswer};
use super::{CallCredential, Credentials, UpstreamUser};
use keyward_config::{EtcdLogin, ROOT};
use keyward_etcd::identity::{MemberId, UserName};

/// Time limit of one question.
const LIMIT: Duration = Duration::from_secs(2);
/// Maximum of users asked about; further users are reported as unknown.
const MOST: usize = 200;

/// The users to look up.
#[derive(Clone, Debug, Default)]
pub struct RootHolderQuery {
    /// Users given by name.
    pub named: Vec<UserName>,
    /// True to look up every user of etcd.
    pub all: bool,
}

/// The result of the search.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RootHolders {
    /// Users holding the role `root`, except `root`.
    pub found: Vec<UserName>,
    /// Users without an answer.
    pub untold: Vec<UserName>,
    /// True if the list of all users was wanted, and was unavailable or too long.
    pub unlisted: bool,
}

impl Credentials {
    /// Asks `member` for the roles of the wanted users. Asks as the probe's user, who can see all users only
    /// as root; if denied, asks as the looked-up user, if Keyward proves the user by a token.
    pub async fn root_holders(
        &self,
        probe: Option<&EtcdLogin>,
        wanted: RootHolderQuery,
        member: MemberId,
    ) -> RootHolders {
        let mut holders = RootHolders::default();
        let asking = match probe {
            Some(login) => self.identity(&login.user, &login.password).token(member).await.ok(),
            None => None,
        };
        let Some(channel) = self.shared.channels.load().get(&member).cloned() else {
            return RootHolders { untold: wanted.named, unlisted: wanted.all, ..holders };
        };
        let mut names = wanted.named;
        if wanted.all {
            let listed = match &asking {
                Some(token) => timeout(LIMIT, auth_calls::users(channel.clone(), token)).await.ok().flatten(),
                None => None,
            };
            holders.unlisted = listed.as_ref().is_none_or(|listed| listed.len() > MOST);
            names.extend(listed.unwrap_or_default());
        }
        names.retain(|name| name.as_str() != ROOT);
        names.sort_unstable();
        names.dedup();
        holders.untold = names.split_off(names.len().min(MOST));
        for name in names {
            let mut roles = RolesAnswer::Unknown;
            if let Some(token) = &asking {
                let asked = timeout(LIMIT, auth_calls::roles(channel.clone(), token, &name));
                roles = asked.await.unwrap_or(RolesAnswer::Unknown);
            }
            if roles == RolesAnswer::Unknown
                && let Some(UpstreamUser::User(identity)) = self.act_as(&name)
                && let Ok(Ok(CallCredential::Token(token))) =
                    timeout(LIMIT, identity.credential_for(member)).await
            {
                let asked = timeout(LIMIT, auth_calls::roles(channel.clone(), &token, &name));
                roles = asked.await.unwrap_or(RolesAnswer::Unknown);
            }
            match roles {
                RolesAnswer::Roles(roles) if roles.iter().any(|role| role == ROOT) => {
                    holders.found.push(name)
                }
                RolesAnswer::Roles(_) | RolesAnswer::NoUser => {}
                RolesAnswer::Unknown => holders.untold.push(name),
            }
        }
        holders
    }
}
