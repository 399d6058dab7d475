//! Who is calling, before anybody says which etcd user that is.
//!
//! Owns: the kinds of peers and how they are written. Must not know: how a peer proved itself, what it may do.
//! Invariants (rules 9): peers of two kinds, of two authorities or of two issuers are never the same peer, whatever
//! their names; names are compared byte for byte.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use super::UserName;

/// Who is calling. Cloning shares.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Peer {
    /// Logged in by a password that etcd accepted: `password:alice`.
    Password(UserName),
    /// Logged in by a password that the users file accepted: `file:alice`.
    File(UserName),
    /// Showed a client certificate: `cert:<ca>:CN=alice`.
    Certificate {
        /// What the listener calls the authority that vouched for it.
        ca: Arc<str>,
        /// The subject's common name. None where there is none, or more than one.
        common_name: Option<Arc<str>>,
        /// DNS names.
        dns: Arc<[Arc<str>]>,
        /// URIs, such as a SPIFFE id.
        uris: Arc<[Arc<str>]>,
    },
    /// Showed a signed JWT: `jwt:<issuer>:alice`.
    Jwt {
        /// Its `iss`.
        issuer: Arc<str>,
        /// Whom it is about.
        subject: Arc<str>,
        /// What else the issuer says.
        claims: Arc<Claims>,
    },
    /// Showed a token signed with etcd's own key, which etcd would take for this user: `etcd_jwt:alice`.
    EtcdToken(UserName),
    /// Showed nothing, on the listener of this name: `listener:local`.
    Listener(Arc<str>),
}

/// The claims of a JWT that are text, a number, a truth value, or a list of such; each as text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Claims(BTreeMap<String, Vec<String>>);

impl Claims {
    /// The values of a claim: several for a list, none for a claim that is not there.
    #[must_use]
    pub fn values(&self, name: &str) -> &[String] {
        self.0.get(name).map_or(&[], Vec::as_slice)
    }
}

impl FromIterator<(String, Vec<String>)> for Claims {
    fn from_iter<T: IntoIterator<Item = (String, Vec<String>)>>(claims: T) -> Self {
        Self(claims.into_iter().collect())
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
