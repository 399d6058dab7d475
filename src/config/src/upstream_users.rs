//! The etcd users with a credential of Keyward's own, used upstream without the client's password.
//!
//! Owns: the resolved `[[user]]`, `[mint]` and `[sign_jwt]`. Must not know: minting or signing. Invariants:
//! the authority or key of every row exists; `root` is only in `named`.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use rustls::SignatureScheme;

use keyward_base::pem::{KeyPair, PrivateKey};
use keyward_base::secret::Secret;
use keyward_etcd::identity::UserName;

/// The etcd users with a credential.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct UpstreamUsers {
    /// Users by name.
    pub named: BTreeMap<UserName, UserCredential>,
    /// Credential of all further users except `root`; `None` if only named users have a credential.
    pub others: Option<CredentialMaker>,
    /// The authority for minting certificates, if any user needs minted certificates.
    pub mint: Option<Arc<MintAuthority>>,
    /// The key for signing tokens, if any user needs signed tokens.
    pub sign_jwt: Option<Arc<SignJwt>>,
}

impl UpstreamUsers {
    /// True if a user is proved to members by a certificate.
    #[must_use]
    pub fn show_certificates(&self) -> bool {
        let is_shown = |credential: &UserCredential| {
            matches!(credential, UserCredential::Certificate(_) | UserCredential::Made(CredentialMaker::Mint))
        };
        self.others == Some(CredentialMaker::Mint) || self.named.values().any(is_shown)
    }
}

/// Credential of an etcd user.
#[derive(Clone, Debug, PartialEq)]
pub enum UserCredential {
    /// The user's password, exchanged for a token.
    Password(Arc<Secret<String>>),
    /// A certificate with the user's name as its common name.
    Certificate(KeyPair),
    /// A credential made by Keyward.
    Made(CredentialMaker),
}

/// A kind of credential made by Keyward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CredentialMaker {
    /// A certificate from [`UpstreamUsers::mint`].
    Mint,
    /// A token by [`UpstreamUsers::sign_jwt`].
    Jwt,
}

/// The authority for minting certificates.
#[derive(Clone, Debug, PartialEq)]
pub struct MintAuthority {
    /// The authority's certificate, with the chain to an authority trusted by members, and the private key.
    pub authority: KeyPair,
    /// Validity of a minted certificate.
    pub lifetime: Duration,
}

/// The key for signing etcd's tokens.
#[derive(Debug, PartialEq)]
pub struct SignJwt {
    /// etcd's `sign-method`.
    pub method: JwtMethod,
    /// The key for this method.
    pub key: JwtKey,
    /// Validity of a token while the auth revision is unchanged.
    pub lifetime: Duration,
}

/// A key for tokens.
#[derive(Debug, PartialEq)]
pub enum JwtKey {
    /// A private key for RS, PS, ES and EdDSA.
    Private(PrivateKey),
    /// A shared secret for HS.
    Shared(Secret<Vec<u8>>),
}

/// A signature method.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct JwtMethod {
    /// Name in etcd's flag and RFC 7518.
    pub name: &'static str,
    /// The method's algorithm.
    pub kind: JwtKind,
}

/// A signature algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JwtKind {
    /// A signature by a private key.
    Private(SignatureScheme),
    /// HMAC with SHA-256.
    Hs256,
    /// HMAC with SHA-384.
    Hs384,
    /// HMAC with SHA-512.
    Hs512,
}

/// All methods of etcd except ES512: the crypto provider, ring, does not sign with P-521.
const METHODS: [JwtMethod; 12] = [
    private("RS256", SignatureScheme::RSA_PKCS1_SHA256),
    private("RS384", SignatureScheme::RSA_PKCS1_SHA384),
    private("RS512", SignatureScheme::RSA_PKCS1_SHA512),
    private("PS256", SignatureScheme::RSA_PSS_SHA256),
    private("PS384", SignatureScheme::RSA_PSS_SHA384),
    private("PS512", SignatureScheme::RSA_PSS_SHA512),
    private("ES256", SignatureScheme::ECDSA_NISTP256_SHA256),
    private("ES384", SignatureScheme::ECDSA_NISTP384_SHA384),
    private("EdDSA", SignatureScheme::ED25519),
    JwtMethod { name: "HS256", kind: JwtKind::Hs256 },
    JwtMethod { name: "HS384", kind: JwtKind::Hs384 },
    JwtMethod { name: "HS512", kind: JwtKind::Hs512 },
];

const fn private(name: &'static str, scheme: SignatureScheme) -> JwtMethod {
    JwtMethod { name, kind: JwtKind::Private(scheme) }
}

impl UserCredential {
    fn kind(&self) -> &'static str {
        match self {
            Self::Password(_) => "another password",
            Self::Certificate(_) => "another certificate",
            Self::Made(CredentialMaker::Mint) => "minted certificates",
            Self::Made(CredentialMaker::Jwt) => "signed tokens",
        }
    }
}

impl JwtMethod {
    /// Finds a method by its name in etcd's flag.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        METHODS.into_iter().find(|method| method.name == name)
    }

    /// The supported names.
    #[must_use]
    pub fn names() -> String {
        METHODS.map(|method| method.name).join(", ")
    }
}

impl fmt::Debug for JwtMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

impl UpstreamUsers {
    /// Describes the changes since `before`, naming users only.
    #[must_use]
    pub fn changes_since(&self, before: &Self) -> Vec<String> {
        let mut changes = Vec::new();
        for (user, is) in &self.named {
            match before.named.get(user) {
                None => changes.push(format!("user {user:?} added")),
                Some(was) if was != is => changes.push(format!("user {user:?}: {} from now on", is.kind())),
                Some(_) => {}
            }
        }
        let gone = before.named.keys().filter(|user| !self.named.contains_key(user));
        changes.extend(gone.map(|user| format!("user {user:?} taken away")));
        if self.others != before.others {
            changes.push("user \"*\" changed".into());
        }
        if self.mint != before.mint {
            changes.push("[mint] changed".into());
        }
        if self.sign_jwt != before.sign_jwt {
            changes.push("[sign_jwt] changed".into());
        }
        changes
    }

    /// True if this user has a credential.
    #[must_use]
    pub fn has_credential_for(&self, user: &UserName) -> bool {
        self.named.contains_key(user) || (self.others.is_some() && user.as_str() != "root")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn users(passwords: &[(&str, &str)], secret: &str) -> UpstreamUsers {
        let credential = |text: &str| UserCredential::Password(Arc::new(Secret::new(text.to_owned())));
        let named = passwords.iter().map(|(user, text)| (UserName::from(*user), credential(text)));
        let sign = SignJwt {
            method: JwtMethod::named("HS256").unwrap(),
            key: JwtKey::Shared(Secret::new(secret.as_bytes().to_vec())),
            lifetime: Duration::from_secs(60),
        };
        UpstreamUsers { named: named.collect(), sign_jwt: Some(Arc::new(sign)), ..UpstreamUsers::default() }
    }

    #[test]
    fn changes_are_seen_in_secrets_too_and_told_by_names() {
        let before = users(&[("alice", "one"), ("bob", "two")], "three");
        assert!(users(&[("alice", "one"), ("bob", "two")], "three").changes_since(&before).is_empty());
        let now = UpstreamUsers {
            others: Some(CredentialMaker::Jwt),
            ..users(&[("alice", "new"), ("carol", "two")], "newer")
        };
        assert_eq!(
            now.changes_since(&before),
            [
                "user \"alice\": another password from now on",
                "user \"carol\" added",
                "user \"bob\" taken away",
                "user \"*\" changed",
                "[sign_jwt] changed",
            ]
        );
        let mut minted = users(&[("bob", "two")], "three");
        minted.named.insert("alice".into(), UserCredential::Made(CredentialMaker::Mint));
        assert_eq!(minted.changes_since(&before), ["user \"alice\": minted certificates from now on"]);
    }
}
