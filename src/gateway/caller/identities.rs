//! Who is which etcd user, by the rules of one configuration.
//!
//! Owns: what the rules and Keyward's credentials make of a peer. Must not know: how a peer proved itself, whether it was
//! revoked. Invariants (rules 9, 11): a peer that is no etcd user is nobody; one that proved nothing is lent nothing.

use std::rc::Rc;
use std::sync::Arc;

use tokio::time::Instant;

use super::{Caller, Grounds};
use crate::config::{Config, Identify, Listener};
use crate::gateway::Client;
use crate::identity::{Peer, UserName};
use crate::jwt::Issuers;
use crate::policy::mapping::{Mapped, Mapping};
use crate::upstream::credential::{Credentials, Identity, PasswordIdentity};
use crate::upstream::send::As;
use crate::users::{LineMark, Users};

/// Who is which etcd user, and as whom Keyward can act. Published whole; one of them holds for one call.
#[derive(Debug)]
pub struct Identities {
    pub(super) issuers: Arc<Issuers>,
    mapping: Mapping,
    /// The users file that was read with them: a rule for its users counts together with their lines.
    users: Arc<Users>,
    ways: Vec<Ways>,
    credentials: Arc<Credentials>,
}

/// What clients of a listener may show, in the order in which it is looked at. It follows from the rules and issuers, too:
/// those that are replaced take it along.
#[derive(Debug)]
struct Ways {
    listener: Arc<str>,
    ca: Option<Arc<str>>,
    identify: Vec<Identify>,
}

/// A peer, and what the rules say of it.
#[derive(Clone)]
pub(super) struct Standing {
    /// Its name, for the record.
    pub(super) peer: Rc<str>,
    pub(super) rank: Rank,
    pub(super) grounds: Grounds,
}

impl Standing {
    /// The session's password was accepted once, and is not what the call goes upstream with: nobody there looks at it.
    pub(super) fn proved_elsewhere(self) -> Self {
        match self.rank {
            Rank::Known(caller) => {
                let rank = Rank::Known(Rc::new(Caller { again: true, ..Caller::clone(&caller) }));
                Self { rank, ..self }
            }
            _ => self,
        }
    }

    /// Whether that is so.
    pub(super) fn again(&self) -> bool {
        matches!(&self.rank, Rank::Known(caller) if caller.again)
    }
}

#[derive(Clone)]
pub(super) enum Rank {
    /// It is somebody upstream, or may go there as nobody.
    Known(Rc<Caller>),
    /// No rule knows it, or Keyward has no credential for the user: refused, except where there are no users.
    Unknown,
    /// A rule refuses it.
    Denied,
    /// A rule knows whom it says it is, but it has proved nothing: auth was off when it logged in.
    Unproved,
}

/// The credential that a peer brought itself, made when it is needed.
#[derive(Clone, Copy)]
pub(super) enum Brought<'a> {
    Nothing,
    /// One that etcd has accepted.
    Proved(&'a dyn Fn() -> Arc<PasswordIdentity>),
    /// One that etcd has not looked at.
    Unproved(&'a dyn Fn() -> Arc<PasswordIdentity>),
}

impl Identities {
    /// What a configuration says. `credentials` have its users.
    #[must_use]
    pub fn of(config: &Config, credentials: &Arc<Credentials>) -> Self {
        Self {
            issuers: Arc::clone(&config.issuers),
            mapping: Mapping::new(config.mapping.as_ref().clone()),
            users: Arc::clone(&config.passwords.users),
            ways: config.listeners.iter().map(|listener| Ways::of(listener)).collect(),
            credentials: Arc::clone(credentials),
        }
    }

    /// What this client may show. As its listener was started where that is gone, or asks for other certificates since:
    /// that waits for a restart, and what follows from it as well.
    pub(super) fn ways<'a>(&'a self, client: &'a Client) -> &'a [Identify] {
        let listener = &client.listener;
        let found = self.ways.iter().find(|ways| ways.listener == listener.name);
        let same = found.filter(|ways| ways.ca.as_deref() == listener.client_ca().map(|ca| &*ca.name));
        same.map_or(&listener.identify, |ways| &ways.identify)
    }

    /// Whether these rules were read with this line of the user's.
    pub(super) fn know(&self, user: &UserName, line: LineMark) -> bool {
        self.users.line(user) == Some(line)
    }

    /// As that user, without a password of the client's. None where Keyward has no credential for it.
    fn acting(&self, user: &UserName) -> Option<As> {
        self.credentials.acting(user)
    }

    /// What the rules say of a peer, whose proof ends at `until`.
    pub(super) fn standing(
        &self,
        client: &Client,
        grounds: Grounds,
        until: Option<Instant>,
        brought: Brought<'_>,
    ) -> Standing {
        let peer = &grounds.peer;
        let address = client.origin.remote.map(|remote| remote.ip());
        let known = |whom| Rank::Known(Rc::new(Caller::new(whom, until, grounds.clone())));
        let mut again = matches!(brought, Brought::Proved(_));
        let rank = match (self.mapping.user_of(peer, address), brought) {
            (Mapped::Denied, _) => Rank::Denied,
            // Once its password was accepted, a user is proved by its entry, where it has one.
            (Mapped::Itself, Brought::Proved(own)) => {
                let (whom, by_own) = self.credentials.acting_or(own());
                again = !by_own;
                known(whom)
            }
            (Mapped::Itself, Brought::Unproved(own)) => known(As::User(Identity::Password(own()))),
            // Its password, which upstream will be looked at, is all that it has: no rule lends it more (rules 11).
            (_, Brought::Unproved(_)) => Rank::Unproved,
            (Mapped::Anonymous, _) => known(As::Nobody),
            (Mapped::User(user), _) => self.acting(&user).map_or(Rank::Unknown, known),
            // By Keyward's own credential: the client's token never goes upstream.
            (Mapped::Itself, Brought::Nothing) => match peer {
                Peer::EtcdToken(user) => self.credentials.acting_or_signed(user).map_or(Rank::Unknown, known),
                _ => Rank::Unknown,
            },
            (Mapped::Unknown, _) => Rank::Unknown,
        };
        let standing = Standing { peer: peer.to_string().into(), rank, grounds };
        if again { standing.proved_elsewhere() } else { standing }
    }
}

impl Ways {
    fn of(listener: &Listener) -> Self {
        Self {
            listener: Arc::clone(&listener.name),
            ca: listener.client_ca().map(|ca| Arc::clone(&ca.name)),
            identify: listener.identify.clone(),
        }
    }
}
