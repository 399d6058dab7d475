//! The authenticated caller, before a rule maps the caller to an etcd user.
//!
//! Owns: the kinds of peers and their text form. Must not know: how a peer authenticated, the permissions of
//! a peer.
//! Invariants (docs/decisions.md#d09): peers of two kinds, two authorities or two issuers are never the same
//! peer, even if the names are equal; names are compared byte for byte.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use super::UserName;

/// The authenticated caller. Clones share their data.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Peer {
    /// Logged in with a password accepted by etcd: `password:alice`.
    Password(UserName),
    /// Logged in with a password accepted by the users file: `file:alice`.
    File(UserName),
    /// Presented a client certificate: `cert:<ca>:CN=alice`.
    Certificate {
        /// The listener's label for the client CA that issued the certificate.
        ca: Arc<str>,
        /// The common name of the subject. None if the subject has no common name, or more than one.
        common_name: Option<Arc<str>>,
        /// DNS names of the certificate.
        dns: Arc<[Arc<str>]>,
        /// URIs of the certificate, such as a SPIFFE id.
        uris: Arc<[Arc<str>]>,
    },
    /// Presented a signed JWT: `jwt:<issuer>:alice`.
    Jwt {
        /// The token's `iss` claim.
        issuer: Arc<str>,
        /// The subject of the token.
        subject: Arc<str>,
        /// All claims of the token.
        claims: Arc<JwtClaims>,
    },
    /// Presented a token signed with etcd's own key, as etcd itself would accept for the user:
    /// `etcd_jwt:alice`.
    EtcdToken(UserName),
    /// Presented no credential, on the listener of the given name: `listener:local`.
    Listener(Arc<str>),
}

/// The claims of a JWT as text. Contains claims that are text, a number, a boolean, or a list of text,
/// numbers and booleans.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct JwtClaims(BTreeMap<String, Vec<String>>);

impl JwtClaims {
    /// The values of a claim: several for a list, none for a missing claim.
    #[must_use]
    pub fn values(&self, name: &str) -> &[String] {
        self.0.get(name).map_or(&[], Vec::as_slice)
    }
}

impl FromIterator<(String, Vec<String>)> for JwtClaims {
    fn from_iter<T: IntoIterator<Item = (String, Vec<String>)>>(claims: T) -> Self {
        Self(claims.into_iter().collect())
    }
}

impl Peer {
    /// The peer's own name: the login, the certificate's common name, or the JWT's subject. A listener's
    /// clients have none.
    #[must_use]
    pub fn own_name(&self) -> Option<&str> {
        match self {
            Self::Password(user) | Self::File(user) | Self::EtcdToken(user) => Some(user.as_str()),
            Self::Certificate { common_name, .. } => common_name.as_deref(),
            Self::Jwt { subject, .. } => Some(subject),
            Self::Listener(_) => None,
        }
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Password(user) => write!(f, "password:{user}"),
            Self::File(user) => write!(f, "file:{user}"),
            Self::Certificate { ca, common_name: Some(name), .. } => write!(f, "cert:{ca}:CN={name}"),
            Self::Certificate { ca, dns, uris, .. } => match (uris.first(), dns.first()) {
                (Some(uri), _) => write!(f, "cert:{ca}:URI={uri}"),
                (None, Some(name)) => write!(f, "cert:{ca}:DNS={name}"),
                (None, None) => write!(f, "cert:{ca}:"),
            },
            Self::Jwt { issuer, subject, .. } => write!(f, "jwt:{issuer}:{subject}"),
            Self::EtcdToken(user) => write!(f, "etcd_jwt:{user}"),
            Self::Listener(name) => write!(f, "listener:{name}"),
        }
    }
}
