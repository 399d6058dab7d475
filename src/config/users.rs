//! As whom calls may go upstream without the client's own password, and what proves each of those etcd users.
//!
//! Owns: the resolved `[[user]]`, `[mint]` and `[sign_jwt]`. Must not know: how a certificate or token is made of it.
//! Invariants: what a row refers to is there; `root` is only in `named`.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use rustls::SignatureScheme;
use sha2::{Digest as _, Sha256};

use crate::identity::UserName;
use crate::pem::{KeyPair, PrivateKey};
use crate::secret::Secret;

/// The etcd users that we can prove.
#[derive(Clone, Debug, Default)]
pub struct Users {
    /// By name.
    pub named: BTreeMap<UserName, Credential>,
    /// What proves all others but `root`; `None`: there are no others.
    pub others: Option<Maker>,
    /// The authority that certificates are minted from, where any user needs it.
    pub mint: Option<Arc<Mint>>,
    /// What tokens are signed with, where any user needs it.
    pub sign_jwt: Option<Arc<SignJwt>>,
}

/// What proves one etcd user.
#[derive(Clone, Debug)]
pub enum Credential {
    /// Its password, for a token.
    Password(Arc<Secret<String>>),
    /// A certificate with its name.
    Certificate(KeyPair),
    /// What we make ourselves.
    Made(Maker),
}

/// What we make ourselves for a user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Maker {
    /// A certificate from [`Users::mint`].
    Mint,
    /// A token by [`Users::sign_jwt`].
    Jwt,
}

/// The authority that certificates are minted from.
#[derive(Clone, Debug)]
pub struct Mint {
    /// Its certificate (what follows leads to one that members trust), and its key.
    pub authority: KeyPair,
    /// How long a certificate is good.
    pub lifetime: Duration,
}

/// What etcd's tokens are signed with.
#[derive(Debug)]
pub struct SignJwt {
    /// etcd's `sign-method`.
    pub method: JwtMethod,
    /// The key that goes with it.
    pub key: JwtKey,
    /// How long a token is good, if the auth revision does not move.
    pub lifetime: Duration,
}

/// A key for tokens.
#[derive(Debug)]
pub enum JwtKey {
    /// For RS, PS, ES and EdDSA.
    Private(PrivateKey),
    /// For HS.
    Shared(Secret<Vec<u8>>),
}

/// A signature method, by its name in a token's header.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct JwtMethod {
    /// As etcd and RFC 7518 call it.
    pub name: &'static str,
    /// How it signs.
    pub kind: JwtKind,
}

/// How a token is signed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JwtKind {
    /// By a private key.
    Private(SignatureScheme),
    /// HMAC with SHA-256.
    Hs256,
    /// HMAC with SHA-384.
    Hs384,
    /// HMAC with SHA-512.
    Hs512,
}

/// All that etcd takes but ES512: nothing here signs with P-521.
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

impl Credential {
    fn is_same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Password(one), Self::Password(other)) => digest(one.expose()) == digest(other.expose()),
            // A chain has one key.
            (Self::Certificate(one), Self::Certificate(other)) => one.chain() == other.chain(),
            (Self::Made(one), Self::Made(other)) => one == other,
            _ => false,
        }
    }

    fn kind(&self) -> &'static str {
        match self {
            Self::Password(_) => "another password",
            Self::Certificate(_) => "another certificate",
            Self::Made(Maker::Mint) => "minted certificates",
            Self::Made(Maker::Jwt) => "signed tokens",
        }
    }
}

impl JwtKey {
    /// Other keys have others.
    fn known_by(&self) -> Vec<u8> {
        match self {
            Self::Private(key) => key.signing().public_key().map(|key| key.to_vec()).unwrap_or_default(),
            Self::Shared(secret) => digest(secret.expose()),
        }
    }
}

fn digest(secret: impl AsRef<[u8]>) -> Vec<u8> {
    Sha256::digest(secret).to_vec()
}

impl JwtMethod {
    /// By its name, as etcd's flag has it.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        METHODS.into_iter().find(|method| method.name == name)
    }

    /// The names that there are.
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

impl Users {
    /// What is another than `before`, told by names alone.
    #[must_use]
    pub fn changes_since(&self, before: &Self) -> Vec<String> {
        let mut changes = Vec::new();
        for (user, is) in &self.named {
            match before.named.get(user) {
                None => changes.push(format!("user {user:?} added")),
                Some(was) if !was.is_same(is) => {
                    changes.push(format!("user {user:?}: {} from now on", is.kind()))
                }
                Some(_) => {}
            }
        }
        let gone = before.named.keys().filter(|user| !self.named.contains_key(user));
        changes.extend(gone.map(|user| format!("user {user:?} taken away")));
        if self.others != before.others {
            changes.push("user \"*\" changed".into());
        }
        let mint =
            |users: &Self| users.mint.as_ref().map(|mint| (mint.authority.chain().to_vec(), mint.lifetime));
        if mint(self) != mint(before) {
            changes.push("[mint] changed".into());
        }
        let sign = |users: &Self| {
            users.sign_jwt.as_ref().map(|sign| (sign.method, sign.lifetime, sign.key.known_by()))
        };
        if sign(self) != sign(before) {
            changes.push("[sign_jwt] changed".into());
        }
        changes
    }

    /// Whether there is something that proves this user.
    #[must_use]
    pub fn prove(&self, user: &UserName) -> bool {
        self.named.contains_key(user) || (self.others.is_some() && user.as_str() != "root")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn users(passwords: &[(&str, &str)], secret: &str) -> Users {
        let credential = |text: &str| Credential::Password(Arc::new(Secret::new(text.to_owned())));
        let named = passwords.iter().map(|(user, text)| (UserName::from(*user), credential(text)));
        let sign = SignJwt {
            method: JwtMethod::named("HS256").unwrap(),
            key: JwtKey::Shared(Secret::new(secret.as_bytes().to_vec())),
            lifetime: Duration::from_secs(60),
        };
        Users { named: named.collect(), sign_jwt: Some(Arc::new(sign)), ..Users::default() }
    }

    #[test]
    fn changes_are_seen_in_secrets_too_and_told_by_names() {
        let before = users(&[("alice", "one"), ("bob", "two")], "three");
        assert!(users(&[("alice", "one"), ("bob", "two")], "three").changes_since(&before).is_empty());
        let now = Users { others: Some(Maker::Jwt), ..users(&[("alice", "new"), ("carol", "two")], "newer") };
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
        minted.named.insert("alice".into(), Credential::Made(Maker::Mint));
        assert_eq!(minted.changes_since(&before), ["user \"alice\": minted certificates from now on"]);
    }
}
