//! Which etcd users hold the role `root`: they may do everything, whatever they are called.
//!
//! Owns: how that is found out with the credentials that Keyward has. Must not know: which users a rule leads to, what follows.
//! Invariant: what nobody tells is told as unknown, never as no.

use std::time::Duration;

use tokio::time::timeout;

use super::wire::{self, Roles};
use super::{As, Credentials, Shown};
use crate::config::{Login, ROOT};
use crate::identity::{MemberId, UserName};

/// How long one question may take.
const LIMIT: Duration = Duration::from_secs(2);
/// Users that are asked about: more are told as unknown.
const MOST: usize = 200;

/// Whose roles are wanted.
#[derive(Clone, Debug, Default)]
pub struct Wanted {
    /// These users'.
    pub named: Vec<UserName>,
    /// Every user's that etcd has.
    pub all: bool,
}

/// What was found out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RootHolders {
    /// Users other than `root` that have its role.
    pub found: Vec<UserName>,
    /// Users of whom nobody told.
    pub untold: Vec<UserName>,
    /// Whether the list of users was wanted and not told, or is too long.
    pub unlisted: bool,
}

impl Credentials {
    /// Asks `member`: as the probing user, who may see all users only as root; a user of its own that is denied to it, as that
    /// user itself, where Keyward proves it by a token.
    pub async fn root_holders(&self, probe: Option<&Login>, wanted: Wanted, member: MemberId) -> RootHolders {
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
                Some(token) => timeout(LIMIT, wire::users(channel.clone(), token)).await.ok().flatten(),
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
            let mut roles = Roles::Untold;
            if let Some(token) = &asking {
                let asked = timeout(LIMIT, wire::roles(channel.clone(), token, &name));
                roles = asked.await.unwrap_or(Roles::Untold);
            }
            if roles == Roles::Untold
                && let Some(As::User(identity)) = self.acting(&name)
                && let Ok(Ok(Shown::Token(token))) = timeout(LIMIT, identity.shown(member)).await
            {
                let asked = timeout(LIMIT, wire::roles(channel.clone(), &token, &name));
                roles = asked.await.unwrap_or(Roles::Untold);
            }
            match roles {
                Roles::Told(roles) if roles.iter().any(|role| role == ROOT) => holders.found.push(name),
                Roles::Told(_) | Roles::NoUser => {}
                Roles::Untold => holders.untold.push(name),
            }
        }
        holders
    }
}
