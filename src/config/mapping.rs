//! What the configuration says of who is which etcd user.
//!
//! Owns: the resolved rules, and that a rule which cannot be is none. Must not know: which rule wins.
//! Invariant (rules 9): a rule that leads to `root` names one peer, letter by letter.

use std::net::IpAddr;
use std::sync::Arc;

use crate::identity::pattern::{Glob, Network, PeerPattern};
use crate::identity::{Peer, UserName};

/// The user who may do everything.
pub const ROOT: &str = "root";

/// Who is which etcd user.
#[derive(Clone, Debug, Default)]
pub struct Mapping {
    /// In order: the first that applies decides. The last ones are those that `listener.default_user` stands for.
    pub rules: Vec<MapRule>,
    /// As whom peers go for whom there is no rule, where that is allowed. Never `root`.
    pub default: Option<UserName>,
}

/// One rule.
#[derive(Clone, Debug)]
pub struct MapRule {
    who: Conditions,
    outcome: Outcome,
}

/// Whom a rule is about. All that is set must hold.
#[derive(Clone, Debug, Default)]
pub struct Conditions {
    /// Peers of this form.
    pub peer: Option<PeerPattern>,
    /// A certificate with such a URI.
    pub san_uri: Option<Glob>,
    /// A certificate with such a DNS name.
    pub san_dns: Option<Glob>,
    /// A JWT of this issuer.
    pub issuer: Option<Arc<str>>,
    /// A JWT with these claims; of a list, one element must match.
    pub claims: Vec<(String, Glob)>,
    /// A client that connects from there. One on a unix socket connects from nowhere.
    pub network: Option<Network>,
}

/// What a rule says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// That user.
    User(UserName),
    /// The user of the peer's own name.
    Same,
    /// Nobody: refused.
    Deny,
}

/// A rule that leads to `root` does not name one peer.
#[derive(Debug, thiserror::Error)]
#[error("root is reached only by a rule whose `peer` is spelled out, without *")]
pub struct NotSpelledOut;

impl MapRule {
    /// A rule.
    ///
    /// # Errors
    /// [`NotSpelledOut`].
    pub fn new(who: Conditions, outcome: Outcome) -> Result<Self, NotSpelledOut> {
        let to_root = matches!(&outcome, Outcome::User(user) if user.as_str() == ROOT);
        if to_root && !who.peer.as_ref().is_some_and(PeerPattern::is_exact) {
            return Err(NotSpelledOut);
        }
        Ok(Self { who, outcome })
    }

    /// Whether it is about one peer, spelled out.
    #[must_use]
    pub fn names_one_peer(&self) -> bool {
        self.who.peer.as_ref().is_some_and(PeerPattern::is_exact)
    }

    /// What it says.
    #[must_use]
    pub fn outcome(&self) -> &Outcome {
        &self.outcome
    }

    /// Whether it is about this peer, calling from this address. One whom etcd itself accepts by its password or token is
    /// made somebody else only by a rule that names its `peer`.
    #[must_use]
    pub fn applies(&self, peer: &Peer, address: Option<IpAddr>) -> bool {
        let Conditions { peer: pattern, san_uri, san_dns, issuer, claims, network } = &self.who;
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
        let named = pattern.is_some()
            || self.outcome == Outcome::Deny
            || !matches!(peer, Peer::Password(_) | Peer::EtcdToken(_));
        named
            && pattern.as_ref().is_none_or(|pattern| pattern.matches(peer))
            && san_uri.as_ref().is_none_or(|glob| one_of(uris, glob))
            && san_dns.as_ref().is_none_or(|glob| one_of(dns, glob))
            && issuer.as_ref().is_none_or(|issuer| said_by == Some(issuer))
            && claims.iter().all(claimed)
            && network.is_none_or(|network| address.is_some_and(|address| network.contains(address)))
    }
}
