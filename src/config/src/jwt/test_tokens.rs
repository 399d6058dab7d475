//! Tokens made for tests, of this room and of others.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use data_encoding::{BASE64, BASE64URL_NOPAD};
use ring::rand::SystemRandom;
use ring::signature::{
    self as made_by, EcdsaKeyPair, Ed25519KeyPair, KeyPair as _, RsaKeyPair, RsaPublicKeyComponents,
};
use serde_json::{Value, json};

use super::{IssuerKeys, KeysError, Verifier};

/// A key for signing test tokens only, because generating RSA keys is slow. PKCS #8.
const RSA: &str = include_str!("../../../../tests/rsa-key.base64");

pub(super) fn rsa() -> Vec<u8> {
    BASE64.decode(RSA.replace('\n', "").as_bytes()).expect("made for this test")
}

/// The moment at which tokens of tests are verified.
pub fn now() -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(1_800_000_000)
}

pub(super) const ISSUER: &str = "https://ci.test:8443";

/// Signs tokens.
pub struct Signer {
    pub(super) algorithm: &'static str,
    pub(super) key: SigningKey,
}

pub(super) enum SigningKey {
    Ecdsa(EcdsaKeyPair),
    Ed25519(Ed25519KeyPair),
    Rsa(RsaKeyPair, &'static dyn made_by::RsaEncoding),
}

impl Signer {
    /// A signer with a new key for ES256.
    pub fn es256() -> Self {
        Self::ecdsa("ES256", &made_by::ECDSA_P256_SHA256_FIXED_SIGNING)
    }

    pub(super) fn ecdsa(algorithm: &'static str, by: &'static made_by::EcdsaSigningAlgorithm) -> Self {
        let random = SystemRandom::new();
        let pkcs8 = EcdsaKeyPair::generate_pkcs8(by, &random).expect("made for this test");
        let key = EcdsaKeyPair::from_pkcs8(by, pkcs8.as_ref(), &random).expect("made for this test");
        Self { algorithm, key: SigningKey::Ecdsa(key) }
    }

    pub(super) fn ed25519() -> Self {
        let pkcs8 = Ed25519KeyPair::generate_pkcs8(&SystemRandom::new()).expect("made for this test");
        let key = Ed25519KeyPair::from_pkcs8(pkcs8.as_ref()).expect("made for this test");
        Self { algorithm: "EdDSA", key: SigningKey::Ed25519(key) }
    }

    pub(super) fn rsa(algorithm: &'static str, by: &'static dyn made_by::RsaEncoding) -> Self {
        let key = RsaKeyPair::from_pkcs8(&rsa()).expect("made for this test");
        Self { algorithm, key: SigningKey::Rsa(key, by) }
    }

    /// A signer per algorithm.
    pub fn all() -> Vec<Self> {
        vec![
            Self::rsa("RS256", &made_by::RSA_PKCS1_SHA256),
            Self::rsa("RS384", &made_by::RSA_PKCS1_SHA384),
            Self::rsa("RS512", &made_by::RSA_PKCS1_SHA512),
            Self::rsa("PS256", &made_by::RSA_PSS_SHA256),
            Self::rsa("PS384", &made_by::RSA_PSS_SHA384),
            Self::rsa("PS512", &made_by::RSA_PSS_SHA512),
            Self::es256(),
            Self::ecdsa("ES384", &made_by::ECDSA_P384_SHA384_FIXED_SIGNING),
            Self::ed25519(),
        ]
    }

    /// A token with these claims.
    pub fn sign(&self, claims: &Value) -> String {
        self.sign_with(&json!({ "alg": self.algorithm }), claims)
    }

    pub(super) fn sign_with(&self, header: &Value, claims: &Value) -> String {
        self.sign_text(&header.to_string(), &claims.to_string())
    }

    pub(super) fn sign_text(&self, header: &str, claims: &str) -> String {
        let signed = format!(
            "{}.{}",
            BASE64URL_NOPAD.encode(header.as_bytes()),
            BASE64URL_NOPAD.encode(claims.as_bytes())
        );
        let random = SystemRandom::new();
        let signature = match &self.key {
            SigningKey::Ecdsa(key) => {
                key.sign(&random, signed.as_bytes()).expect("made for this test").as_ref().to_vec()
            }
            SigningKey::Ed25519(key) => key.sign(signed.as_bytes()).as_ref().to_vec(),
            SigningKey::Rsa(key, by) => {
                let mut signature = vec![0; key.public().modulus_len()];
                key.sign(*by, &random, signed.as_bytes(), &mut signature).expect("made for this test");
                signature
            }
        };
        format!("{signed}.{}", BASE64URL_NOPAD.encode(&signature))
    }

    /// The public key.
    pub fn keys(&self) -> IssuerKeys {
        set(&[self.jwk()])
    }

    /// The public key, as a JWK.
    pub fn jwk(&self) -> Value {
        let text = |bytes: &[u8]| BASE64URL_NOPAD.encode(bytes);
        match &self.key {
            SigningKey::Ecdsa(key) => {
                let point = key.public_key().as_ref();
                let (x, y) = point[1..].split_at(point.len() / 2);
                let curve = if point.len() == 65 { "P-256" } else { "P-384" };
                json!({ "kty": "EC", "crv": curve, "x": text(x), "y": text(y) })
            }
            SigningKey::Ed25519(key) => {
                json!({ "kty": "OKP", "crv": "Ed25519", "x": text(key.public_key().as_ref()) })
            }
            SigningKey::Rsa(key, _) => {
                let public: RsaPublicKeyComponents<Vec<u8>> = key.public().into();
                json!({ "kty": "RSA", "n": text(&public.n), "e": text(&public.e) })
            }
        }
    }
}

pub(super) fn read(content: &str) -> Result<IssuerKeys, KeysError> {
    let folder = tempfile::tempdir().expect("made for this test");
    let path = folder.path().join("keys");
    std::fs::write(&path, content).expect("made for this test");
    IssuerKeys::read(&path)
}

pub(super) fn set(keys: &[Value]) -> IssuerKeys {
    read(&json!({ "keys": keys }).to_string()).expect("made for this test")
}

/// Takes the tokens of this signer.
pub fn verifier(signer: &Signer) -> Verifier {
    Verifier {
        issuer: ISSUER.into(),
        audience: "etcd".to_owned(),
        keys: set(&[signer.jwk()]),
        algorithms: Vec::new(),
        subject: "sub".to_owned(),
        leeway: Duration::from_secs(30),
    }
}

/// The claims of a good token for `subject`, one hour before expiry.
pub fn claims(subject: &str) -> Value {
    json!({
        "iss": ISSUER, "aud": "etcd", "sub": subject, "exp": 1_800_003_600,
        "groups": ["a", "b"], "n": 7, "yes": true, "o": {}
    })
}
