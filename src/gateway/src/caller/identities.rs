//! The mapping from peers to etcd users, by the rules of a configuration.
//!
//! Owns: the result of the rules and of Keyward's credentials for a peer. Must not know: how a peer proved
//! itself, whether a session was revoked.
//! Invariants (docs/decisions.md#d09, docs/decisions.md#d11): a peer mapped to no etcd user goes upstream
//! without a user; a peer without proof gets none of Keyward's credentials.

use std::rc::Rc;
use std::sync::Arc;
use std::time::SystemTime;

use super::connection_peers::ConnectionPeers;
use super::{Caller, CallerGrounds};
use crate::ClientConnection;
use keyward_access::policy::compiled::Policy;
use keyward_access::policy::mapping::{Mapping, MappingResult};
use keyward_access::policy::permit_set::PolicyGeneration;
use keyward_access::policy::rules_in_force::RulesInForce;
use keyward_base::wall_deadline::WallDeadline;
use keyward_config::jwt::Issuers;
use keyward_config::users::{UserLineMark, UserPasswordHashes};
use keyward_config::{Config, Identify, Listener};
use keyward_etcd::identity::{Peer, UserName};
use keyward_upstream::credentials::{Credentials, PasswordIdentity, UpstreamIdentity};
use keyward_upstream::send::UpstreamUser;

/// The rules, and the etcd users that Keyward can prove. Published whole; a call keeps the same version from
/// start to end.
#[derive(Debug)]
pub struct Identities {
    pub(super) issuers: Arc<Issuers>,
    mapping: Mapping,
    /// The users file read together with the rules: rules for users of the file hold together with the users'
    /// lines.
    users: Arc<UserPasswordHashes>,
    ways: Vec<IdentificationWays>,
    credentials: Arc<Credentials>,
    pub(super) policy: Policy,
}

/// The ways of identification accepted by a listener, in order of precedence. The ways also follow from rules
/// and issuers, so all are replaced together.
#[derive(Debug)]
struct IdentificationWays {
    listener: Arc<str>,
    ca: Option<Arc<str>>,
    identify: Vec<Identify>,
}

/// A peer, and the rules' decision.
#[derive(Clone)]
pub(super) struct PeerStanding {
    /// The peer's name, for the access record.
    pub(super) peer: Rc<str>,
    pub(super) rank: PeerRank,
    pub(super) grounds: CallerGrounds,
}

impl Identities {
    /// The generation of the policy.
    #[must_use]
    pub fn policy_generation(&self) -> PolicyGeneration {
        self.policy.generation()
    }
}

impl PeerStanding {
    /// Marks a session whose password was accepted once and is not used upstream, so etcd does not see the
    /// password.
    pub(super) fn with_recheck(self) -> Self {
        match self.rank {
            PeerRank::Known(caller) => {
                let rank = PeerRank::Known(Rc::new(Caller { needs_recheck: true, ..Caller::clone(&caller) }));
                Self { rank, ..self }
            }
            _ => self,
        }
    }

    /// True if marked by [`PeerStanding::with_recheck`].
    pub(super) fn needs_recheck(&self) -> bool {
        matches!(&self.rank, PeerRank::Known(caller) if caller.needs_recheck)
    }
}

#[derive(Clone)]
pub(super) enum PeerRank {
    /// The peer is an etcd user, or may go upstream without a user.
    Known(Rc<Caller>),
    /// No rule matches, or Keyward has no credential for the user: refused, unless auth is off.
    Unknown,
    /// A rule denies the peer.
    Denied,
    /// A rule names a user, but the peer has no proof: auth was off at the login.
    Unproved,
}

/// The peer's own credential, created on demand.
#[derive(Clone, Copy)]
pub(super) enum OwnCredential<'a> {
    Nothing,
    /// A credential accepted by etcd.
    Proved(&'a dyn Fn() -> Arc<PasswordIdentity>),
    /// A credential not checked by etcd yet.
    Unproved(&'a dyn Fn() -> Arc<PasswordIdentity>),
}

impl Identities {
    /// The mapping of a configuration, and `rules` from `now` on; `credentials` hold the configured users.
    #[must_use]
    pub fn of(
        config: &Config,
        rules: &RulesInForce,
        credentials: &Arc<Credentials>,
        now: SystemTime,
    ) -> Self {
        Self {
            issuers: Arc::clone(&config.issuers),
            mapping: Mapping::new(config.mapping.as_ref().clone()),
            users: Arc::clone(&config.passwords.users),
            ways: config.listeners.iter().map(|listener| IdentificationWays::of(listener)).collect(),
            credentials: Arc::clone(credentials),
            policy: Policy::of(config, rules, now),
        }
    }

    /// The time at which a binding of the policy ends, and these rules are to be replaced.
    #[must_use]
    pub fn next_end(&self) -> Option<SystemTime> {
        self.policy.next_end()
    }

    /// The policy in force.
    #[must_use]
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// The ways accepted from this client. If the configuration has no such listener any more, or has the
    /// listener with another client CA, the ways at the listener's start hold until a restart.
    pub(super) fn ways<'a>(&'a self, client: &'a ClientConnection) -> &'a [Identify] {
        let listener = &client.listener;
        let found = self.ways.iter().find(|ways| ways.listener == listener.name);
        let same = found.filter(|ways| ways.ca.as_deref() == listener.client_ca().map(|ca| &*ca.name));
        same.map_or(&listener.identify, |ways| &ways.identify)
    }

    /// True if the rules were read together with this line of the user.
    pub(super) fn contains_line(&self, user: &UserName, line: UserLineMark) -> bool {
        self.users.line(user) == Some(line)
    }

    /// Keyward's own credential for the user, if configured.
    fn acting(&self, user: &UserName) -> Option<UpstreamUser> {
        self.credentials.act_as(user)
    }

    /// The rules' decision on a peer with a proof valid until `until`.
    pub(super) fn standing(
        &self,
        client: &ClientConnection,
        mut grounds: CallerGrounds,
        until: Option<WallDeadline>,
        own_credential: OwnCredential<'_>,
    ) -> PeerStanding {
        let address = client.origin.remote.map(|remote| remote.ip());
        let mapped = self.mapping.user_of(&grounds.peer, address);
        grounds.etcd_user = match (&mapped, &grounds.peer) {
            (MappingResult::User(user), _) => Some(user.clone()),
            (MappingResult::Itself, Peer::Password(user) | Peer::EtcdToken(user)) => Some(user.clone()),
            _ => None,
        };
        // A denied certificate is denied also where the etcd user is another's.
        let connection = grounds.connection.as_deref();
        let mapped = match connection {
            Some(ConnectionPeers { peer, .. }) if self.mapping.denies(peer, address) => MappingResult::Denied,
            _ => mapped,
        };
        let peer = &grounds.peer;
        let known = |user| PeerRank::Known(Rc::new(Caller::new(user, until, grounds.clone())));
        let mut needs_recheck = matches!(own_credential, OwnCredential::Proved(_));
        let rank = match (mapped, own_credential) {
            (MappingResult::Denied, _) => PeerRank::Denied,
            // After the password was accepted, the user's `[[user]]` row is the upstream credential, if
            // configured.
            (MappingResult::Itself, OwnCredential::Proved(own)) => {
                let (user, by_own) = self.credentials.act_as_or_password(own());
                needs_recheck = !by_own;
                known(user)
            }
            (MappingResult::Itself, OwnCredential::Unproved(own)) => {
                known(UpstreamUser::User(UpstreamIdentity::Password(own())))
            }
            // The unproved password, to be checked upstream, is the peer's only credential: no rule grants
            // another (docs/decisions.md#d11).
            (_, OwnCredential::Unproved(_)) => PeerRank::Unproved,
            (MappingResult::Anonymous, _) => known(UpstreamUser::Nobody),
            (MappingResult::User(user), _) => self.acting(&user).map_or(PeerRank::Unknown, known),
            // Goes upstream with Keyward's own credential, never with the client's token.
            (MappingResult::Itself, OwnCredential::Nothing) => match peer {
                Peer::EtcdToken(user) => {
                    self.credentials.act_as_or_signed(user).map_or(PeerRank::Unknown, known)
                }
                _ => PeerRank::Unknown,
            },
            (MappingResult::Unknown, _) => PeerRank::Unknown,
        };
        let shown = grounds.claimed().unwrap_or(grounds.proved_peer());
        let standing = PeerStanding { peer: shown.to_string().into(), rank, grounds };
        if needs_recheck { standing.with_recheck() } else { standing }
    }
}

impl IdentificationWays {
    fn of(listener: &Listener) -> Self {
        Self {
            listener: Arc::clone(&listener.name),
            ca: listener.client_ca().map(|ca| Arc::clone(&ca.name)),
            identify: listener.identify.clone(),
        }
    }
}
