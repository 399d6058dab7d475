//! Somebody whose JWTs Keyward takes.
//!
//! Owns: its key, what it signs. Must not know what a token is good for. Invariant: what it signed, and its key, are searched for in
//! every log.

use std::time::{SystemTime, UNIX_EPOCH};

use data_encoding::BASE64URL_NOPAD;
use rcgen::{KeyPair, PublicKeyData as _};
use ring::{
    hmac,
    rand::SystemRandom,
    signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair},
};
use serde_json::{Value, json};

use super::evidence;

/// Its name, and what it calls us.
pub(crate) const ISSUER: &str = "https://ci.test";
pub(crate) const AUDIENCE: &str = "etcd";

/// Signs JWTs.
pub(crate) struct Issuer(KeyPair);

impl Issuer {
    pub(crate) fn new() -> Issuer {
        let key = KeyPair::generate().expect("a key can be made");
        evidence::key("the key of an issuer", &key.serialize_pem());
        Issuer(key)
    }

    /// Its public key, in PEM.
    pub(crate) fn public_key(&self) -> String {
        self.0.public_key_pem()
    }

    /// Its private key, in PEM.
    pub(crate) fn private_key(&self) -> String {
        self.0.serialize_pem()
    }

    /// A token that says of itself that it is signed by `alg`.
    pub(crate) fn sign(&self, alg: &str, claims: &Value) -> String {
        self.sign_with(&json!({ "alg": alg }), claims)
    }

    /// The same with another header.
    pub(crate) fn sign_with(&self, header: &Value, claims: &Value) -> String {
        let signed = unsigned(header, claims);
        let (random, pkcs8) = (SystemRandom::new(), self.0.serialize_der());
        let key = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &pkcs8, &random).expect("P-256");
        let signature = key.sign(&random, signed.as_bytes()).expect("the key signs");
        finished(signed, signature.as_ref())
    }

    /// Tokens of somebody who takes the public key, in each of its forms, for a shared secret.
    pub(crate) fn confused(&self, claims: &Value) -> Vec<String> {
        let (pem, der) = (self.public_key(), self.0.subject_public_key_info());
        let forms = [pem.as_bytes(), pem.trim_end().as_bytes(), &der, self.0.public_key_raw()];
        let sign = |secret: &[u8]| {
            let signed = unsigned(&json!({ "alg": "HS256", "typ": "JWT" }), claims);
            let tag = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, secret), signed.as_bytes());
            finished(signed, tag.as_ref())
        };
        forms.map(sign).into()
    }
}

fn unsigned(header: &Value, claims: &Value) -> String {
    let part = |value: &Value| BASE64URL_NOPAD.encode(value.to_string().as_bytes());
    format!("{}.{}", part(header), part(claims))
}

fn finished(signed: String, signature: &[u8]) -> String {
    let token = format!("{signed}.{}", BASE64URL_NOPAD.encode(signature));
    evidence::secret("a client's JWT", &token);
    token
}

/// What a JWT says that ends so many seconds from now.
pub(crate) fn claims(subject: &str, left: i64) -> Value {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_secs();
    let end = i64::try_from(now).expect("this age") + left;
    json!({ "iss": ISSUER, "aud": AUDIENCE, "sub": subject, "exp": end })
}
