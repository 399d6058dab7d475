//! The resolved mapping rules from peers to etcd users.
//!
//! Owns: the rules, and the rejection of impossible rules. Must not know: the precedence of rules. Invariant
//! (docs/decisions.md#d09): a rule for `root` names one peer exactly.

use std::net::IpAddr;
use std::sync::Arc;

use keyward_etcd::identity::pattern::{AddressRange, Glob, PeerPattern};
use keyward_etcd::identity::{Peer, UserName};

/// etcd's superuser.
pub const ROOT: &str = "root";

/// Mapping of peers to etcd users.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MappingRules {
    /// Rules in order: the first applicable rule decides. The last rules stem from `listener.default_user`.
    pub rules: Vec<MapRule>,
    /// The etcd user of peers without an applicable rule, if any. Never `root`.
    pub default: Option<UserName>,
    /// The number of rules from `[[map]]`, before those from `listener.default_user`.
    pub written: usize,
}

/// One rule.
#[derive(Clone, Debug, PartialEq)]
pub struct MapRule {
    conditions: Conditions,
    outcome: MappingOutcome,
}

/// Conditions of a rule. All set conditions must hold.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Conditions {
    /// Pattern of the peer's name.
    pub peer: Option<PeerPattern>,
    /// Pattern of a URI name in the certificate.
    pub san_uri: Option<Glob>,
    /// Pattern of a DNS name in the certificate.
    pub san_dns: Option<Glob>,
    /// Issuer of the JWT.
    pub issuer: Option<Arc<str>>,
    /// Required claims of the JWT; of a list, one element must match.
    pub claims: Vec<(String, Glob)>,
    /// Network of the client's address. A client on a unix socket has no address.
    pub network: Option<AddressRange>,
}

/// Outcome of a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MappingOutcome {
    /// This etcd user.
    User(UserName),
    /// The etcd user with the peer's own name.
    Same,
    /// The call is refused.
    Deny,
}

/// A rule for `root` does not name one peer.
#[derive(Debug, thiserror::Error)]
#[error("root is reached only by a rule whose `peer` is spelled out, without *")]
pub struct RootNeedsExactPeer;

impl MapRule {
    /// Builds a rule.
    ///
    /// # Errors
    /// [`RootNeedsExactPeer`].
    pub fn new(who: Conditions, outcome: MappingOutcome) -> Result<Self, RootNeedsExactPeer> {
        let to_root = matches!(&outcome, MappingOutcome::User(user) if user.as_str() == ROOT);
        if to_root && !who.peer.as_ref().is_some_and(PeerPattern::is_exact) {
            return Err(RootNeedsExactPeer);
        }
        Ok(Self { conditions: who, outcome })
    }

    /// True if the rule names one exact peer.
    #[must_use]
    pub fn names_one_peer(&self) -> bool {
        self.conditions.peer.as_ref().is_some_and(PeerPattern::is_exact)
    }

    /// The rule's conditions.
    #[must_use]
    pub fn conditions(&self) -> &Conditions {
        &self.conditions
    }

    /// True if this rule applies to every peer to whom `other` applies, as far as their texts show.
    #[must_use]
    pub fn covers(&self, other: &Self) -> bool {
        let is_of_etcd =
            |pattern: &PeerPattern| matches!(pattern, PeerPattern::Password(_) | PeerPattern::EtcdToken(_));
        let other_denies = other.outcome == MappingOutcome::Deny;
        // Without `peer`, a rule to a user is about no peer proved by etcd.
        let is_about_all = self.conditions.peer.is_some()
            || self.outcome == MappingOutcome::Deny
            || match &other.conditions.peer {
                Some(pattern) => !is_of_etcd(pattern),
                None => !other_denies,
            };
        is_about_all && self.conditions.cover(&other.conditions)
    }

    /// The rule's outcome.
    #[must_use]
    pub fn outcome(&self) -> &MappingOutcome {
        &self.outcome
    }

    /// True if the rule applies to this peer, calling from this address. A peer proved by an etcd password or
    /// etcd token is mapped to a different user only by a rule with a `peer` condition.
    #[must_use]
    pub fn applies(&self, peer: &Peer, address: Option<IpAddr>) -> bool {
        let named = self.conditions.peer.is_some()
            || self.outcome == MappingOutcome::Deny
            || !matches!(peer, Peer::Password(_) | Peer::EtcdToken(_));
        named && self.conditions.hold(peer, address)
    }
}

impl Conditions {
    /// True if these conditions hold wherever `other` hold, as far as their texts show.
    fn cover(&self, other: &Self) -> bool {
        fn within<T>(one: &Option<T>, other: &Option<T>, covers: impl Fn(&T, &T) -> bool) -> bool {
            one.as_ref().is_none_or(|one| other.as_ref().is_some_and(|other| covers(one, other)))
        }
        let Self { peer, san_uri, san_dns, issuer, claims, network } = self;
        let is_claimed = |(name, value): &(String, Glob)| {
            other.claims.iter().any(|(known, narrow)| known == name && value.covers(narrow))
        };
        let is_issuer = |issuer: &Arc<str>| {
            let of_peer = match &other.peer {
                Some(PeerPattern::Jwt { issuer, .. }) => Some(issuer),
                _ => None,
            };
            other.issuer.as_ref().or(of_peer) == Some(issuer)
        };
        within(peer, &other.peer, PeerPattern::covers)
            && within(san_uri, &other.san_uri, Glob::covers)
            && within(san_dns, &other.san_dns, Glob::covers)
            && issuer.as_ref().is_none_or(is_issuer)
            && claims.iter().all(is_claimed)
            && within(network, &other.network, AddressRange::covers)
    }

    /// True if every set condition holds for this peer, calling from this address.
    #[must_use]
    pub fn hold(&self, peer: &Peer, address: Option<IpAddr>) -> bool {
        let Self { peer: pattern, san_uri, san_dns, issuer, claims, network } = self;
        let (dns, uris) = match peer {
            Peer::Certificate { dns, uris, .. } => (&dns[..], &uris[..]),
            _ => Default::default(),
        };
        let (said_by, said) = match peer {
            Peer::Jwt { issuer, claims, .. } => (Some(issuer), Some(claims)),
            _ => (None, None),
        };
        let one_of = |names: &[Arc<str>], glob: &Glob| names.iter().any(|name| glob.matches(name));
        let claimed = |(name, value): &(String, Glob)| {
            said.is_some_and(|claims| claims.values(name).iter().any(|said| value.matches(said)))
        };
        pattern.as_ref().is_none_or(|pattern| pattern.matches(peer))
            && san_uri.as_ref().is_none_or(|glob| one_of(uris, glob))
            && san_dns.as_ref().is_none_or(|glob| one_of(dns, glob))
            && issuer.as_ref().is_none_or(|issuer| said_by == Some(issuer))
            && claims.iter().all(claimed)
            && network.is_none_or(|network| address.is_some_and(|address| network.contains(address)))
    }
}
