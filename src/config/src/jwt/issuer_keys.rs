//! The public keys of an issuer, and the supported signature algorithms.
//!
//! Owns: reading keys from PEM or JWKS files (RFC 7517, 7518, 8037), and verifying a signature. Must not
//! know: the signed content. Invariants: a key verifies only by algorithms of the key's own kind, so that a
//! public key is never used as a shared secret; a file with a private key is rejected, because only public
//! keys belong in the file.

use std::fmt;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use data_encoding::BASE64URL_NOPAD;
use ring::signature::{
    self, RsaParameters, RsaPublicKeyComponents, UnparsedPublicKey, VerificationAlgorithm,
};
use serde::Deserialize;
use x509_parser::prelude::FromDer as _;
use x509_parser::public_key::PublicKey;
use x509_parser::x509::SubjectPublicKeyInfo;

use keyward_base::pem;

/// Maximum of keys in a file; more than any issuer uses at once. A token without a `kid` is tried with every
/// matching key.
const MOST: usize = 64;
const MAX_FILE: u64 = 1 << 20;
const P256: &str = "1.2.840.10045.3.1.7";
const P384: &str = "1.3.132.0.34";
const EC: &str = "1.2.840.10045.2.1";
const ED25519: &str = "1.3.101.112";

/// A signature algorithm. Neither `none` nor algorithms with a shared secret exist here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "the names are RFC 7518's and 8037's")]
pub enum Algorithm {
    Rs256,
    Rs384,
    Rs512,
    Ps256,
    Ps384,
    Ps512,
    Es256,
    Es384,
    EdDsa,
}

/// The keys of an issuer. Never empty.
#[derive(Debug, PartialEq)]
pub struct IssuerKeys(Vec<IssuerKey>);

#[derive(PartialEq)]
struct IssuerKey {
    id: Option<String>,
    /// The only algorithm allowed for the key, if the file names an algorithm.
    only: Option<Algorithm>,
    material: Material,
}

#[derive(Clone, PartialEq)]
enum Material {
    Rsa { n: Vec<u8>, e: Vec<u8> },
    P256(Vec<u8>),
    P384(Vec<u8>),
    Ed25519(Vec<u8>),
}

/// Reasons for rejecting a key file.
#[derive(Debug)]
pub struct KeysError {
    path: PathBuf,
    reason: KeyFileFault,
}

#[derive(Debug, thiserror::Error)]
enum KeyFileFault {
    #[error("{0}")]
    Unreadable(io::Error),
    #[error("is larger than {} MiB", MAX_FILE >> 20)]
    TooLarge,
    #[error("is neither PEM nor a JWK set (JSON with `keys`)")]
    NoForm,
    #[error("holds a private key; only the public one belongs here")]
    Private,
    #[error("holds no public key of RSA (2048 to 8192 bits), P-256, P-384 or Ed25519")]
    NoKey,
    #[error("key {0} is damaged")]
    Damaged(usize),
    #[error("holds more than {MOST} keys")]
    TooMany,
}

#[derive(Deserialize)]
struct JwkSet {
    keys: Vec<serde_json::Value>,
}

#[derive(Deserialize)]
struct Jwk {
    kty: String,
    kid: Option<String>,
    alg: Option<String>,
    #[serde(rename = "use")]
    purpose: Option<String>,
    crv: Option<String>,
    n: Option<String>,
    e: Option<String>,
    x: Option<String>,
    y: Option<String>,
    d: Option<serde_json::Value>,
}

impl Algorithm {
    /// Returns the algorithm with the given name in a token's header or the configuration.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Some(match name {
            "RS256" => Self::Rs256,
            "RS384" => Self::Rs384,
            "RS512" => Self::Rs512,
            "PS256" => Self::Ps256,
            "PS384" => Self::Ps384,
            "PS512" => Self::Ps512,
            "ES256" => Self::Es256,
            "ES384" => Self::Es384,
            "EdDSA" => Self::EdDsa,
            _ => return None,
        })
    }
}

impl IssuerKeys {
    /// Reads all keys of a PEM or JWKS file. Keys of a JWK set with a different purpose are skipped.
    ///
    /// # Errors
    /// A [`KeysError`] with the fault of the file.
    pub fn read(path: &Path) -> Result<Self, KeysError> {
        let at = |reason| KeysError { path: path.to_owned(), reason };
        let mut text = String::new();
        let opened = File::open(path).and_then(|file| file.take(MAX_FILE + 1).read_to_string(&mut text));
        match opened {
            Ok(_) if text.len() as u64 > MAX_FILE => return Err(at(KeyFileFault::TooLarge)),
            Ok(_) => {}
            Err(error) => return Err(at(KeyFileFault::Unreadable(error))),
        }
        let keys = if text.contains("-----BEGIN") { of_pem(&text) } else { of_set(&text) };
        match keys.map_err(at)? {
            keys if keys.is_empty() => Err(at(KeyFileFault::NoKey)),
            keys if keys.len() > MOST => Err(at(KeyFileFault::TooMany)),
            keys => Ok(Self(keys)),
        }
    }

    /// Returns the key of a SubjectPublicKeyInfo (DER), if the key's kind is supported.
    #[must_use]
    pub fn of_public_key(der: &[u8]) -> Option<Self> {
        let (_, info) = SubjectPublicKeyInfo::from_der(der).ok()?;
        Some(Self(vec![IssuerKey { id: None, only: None, material: Material::of_info(&info)? }]))
    }

    /// True if a key verifies the signature. If the token names a key id, keys with a different id are
    /// skipped; keys without an id are tried.
    pub(super) fn verify(&self, by: Algorithm, id: Option<&str>, message: &[u8], signature: &[u8]) -> bool {
        let mut fit = self.0.iter().filter(|key| {
            let named = id.is_none() || key.id.is_none() || key.id.as_deref() == id;
            named && key.only.is_none_or(|only| only == by)
        });
        fit.any(|key| key.material.verifies(by, message, signature))
    }
}

fn of_pem(text: &str) -> Result<Vec<IssuerKey>, KeyFileFault> {
    let found = pem::public_keys(text.as_bytes()).map_err(|error| match error {
        pem::NoPublicKeys::NotPem => KeyFileFault::NoForm,
        pem::NoPublicKeys::Private => KeyFileFault::Private,
    })?;
    let key = |(index, der): (usize, &Vec<u8>)| {
        let (_, info) = SubjectPublicKeyInfo::from_der(der).map_err(|_| KeyFileFault::Damaged(index + 1))?;
        let material = Material::of_info(&info).ok_or(KeyFileFault::Damaged(index + 1))?;
        Ok(IssuerKey { id: None, only: None, material })
    };
    found.iter().enumerate().map(key).collect()
}

fn of_set(text: &str) -> Result<Vec<IssuerKey>, KeyFileFault> {
    let set: JwkSet = serde_json::from_str(text).map_err(|_| KeyFileFault::NoForm)?;
    let mut keys = Vec::new();
    for (index, value) in set.keys.into_iter().enumerate() {
        let jwk: Jwk = serde_json::from_value(value).map_err(|_| KeyFileFault::Damaged(index + 1))?;
        if jwk.d.is_some() {
            return Err(KeyFileFault::Private);
        }
        let only = jwk.alg.as_deref().map(Algorithm::named);
        // Skip a key for encryption or for an unsupported algorithm: the key has a different purpose.
        if jwk.purpose.as_deref().is_some_and(|purpose| purpose != "sig") || only == Some(None) {
            continue;
        }
        match Material::of_jwk(&jwk) {
            Ok(Some(material)) => keys.push(IssuerKey { id: jwk.kid, only: only.flatten(), material }),
            Ok(None) => {}
            Err(MalformedJwk) => return Err(KeyFileFault::Damaged(index + 1)),
        }
    }
    Ok(keys)
}

struct MalformedJwk;

impl Material {
    fn of_info(info: &SubjectPublicKeyInfo<'_>) -> Option<Self> {
        let bytes = info.subject_public_key.data.to_vec();
        let algorithm = info.algorithm.algorithm.to_id_string();
        if let Ok(PublicKey::RSA(key)) = info.parsed() {
            return Self::rsa(key.modulus, key.exponent);
        }
        let curve = info.algorithm.parameters.as_ref().and_then(|any| any.as_oid().ok());
        let curve = curve.map(|oid| oid.to_id_string());
        match (algorithm.as_str(), curve.as_deref()) {
            (EC, Some(P256)) => Some(Self::P256(bytes)),
            (EC, Some(P384)) => Some(Self::P384(bytes)),
            (ED25519, None) => Some(Self::Ed25519(bytes)),
            _ => None,
        }
        .filter(Self::is_whole)
    }

    /// Returns `None` for an unsupported kind of key.
    fn of_jwk(jwk: &Jwk) -> Result<Option<Self>, MalformedJwk> {
        let bytes = |field: &Option<String>| {
            let text = field.as_ref().ok_or(MalformedJwk)?;
            BASE64URL_NOPAD.decode(text.as_bytes()).map_err(|_| MalformedJwk)
        };
        let point = || Ok([&[4][..], &bytes(&jwk.x)?, &bytes(&jwk.y)?].concat());
        let material = match (jwk.kty.as_str(), jwk.crv.as_deref()) {
            ("RSA", _) => Self::rsa(&bytes(&jwk.n)?, &bytes(&jwk.e)?).ok_or(MalformedJwk)?,
            ("EC", Some("P-256")) => Self::P256(point()?),
            ("EC", Some("P-384")) => Self::P384(point()?),
            ("OKP", Some("Ed25519")) => Self::Ed25519(bytes(&jwk.x)?),
            _ => return Ok(None),
        };
        if material.is_whole() { Ok(Some(material)) } else { Err(MalformedJwk) }
    }

    /// Strips the leading zeros of both numbers, as some writers add zeros.
    fn rsa(n: &[u8], e: &[u8]) -> Option<Self> {
        let trimmed = |number: &[u8]| {
            let zeros = number.iter().take_while(|byte| **byte == 0).count();
            number[zeros..].to_vec()
        };
        Some(Self::Rsa { n: trimmed(n), e: trimmed(e) }).filter(Self::is_whole)
    }

    fn is_whole(&self) -> bool {
        match self {
            Self::Rsa { n, e } => (256..=1024).contains(&n.len()) && (1..=8).contains(&e.len()),
            Self::P256(point) => point.len() == 65 && point[0] == 4,
            Self::P384(point) => point.len() == 97 && point[0] == 4,
            Self::Ed25519(key) => key.len() == 32,
        }
    }

    fn verifies(&self, by: Algorithm, message: &[u8], signature: &[u8]) -> bool {
        match self {
            Self::Rsa { n, e } => rsa_parameters(by)
                .is_some_and(|by| RsaPublicKeyComponents { n, e }.verify(by, message, signature).is_ok()),
            Self::P256(key) | Self::P384(key) | Self::Ed25519(key) => self
                .parameters(by)
                .is_some_and(|by| UnparsedPublicKey::new(by, key).verify(message, signature).is_ok()),
        }
    }

    /// Returns the verification algorithm of `by` for the key's kind. None if `by` does not match the kind.
    fn parameters(&self, by: Algorithm) -> Option<&'static dyn VerificationAlgorithm> {
        match (self, by) {
            (Self::P256(_), Algorithm::Es256) => Some(&signature::ECDSA_P256_SHA256_FIXED),
            (Self::P384(_), Algorithm::Es384) => Some(&signature::ECDSA_P384_SHA384_FIXED),
            (Self::Ed25519(_), Algorithm::EdDsa) => Some(&signature::ED25519),
            _ => None,
        }
    }
}

fn rsa_parameters(by: Algorithm) -> Option<&'static RsaParameters> {
    match by {
        Algorithm::Rs256 => Some(&signature::RSA_PKCS1_2048_8192_SHA256),
        Algorithm::Rs384 => Some(&signature::RSA_PKCS1_2048_8192_SHA384),
        Algorithm::Rs512 => Some(&signature::RSA_PKCS1_2048_8192_SHA512),
        Algorithm::Ps256 => Some(&signature::RSA_PSS_2048_8192_SHA256),
        Algorithm::Ps384 => Some(&signature::RSA_PSS_2048_8192_SHA384),
        Algorithm::Ps512 => Some(&signature::RSA_PSS_2048_8192_SHA512),
        Algorithm::Es256 | Algorithm::Es384 | Algorithm::EdDsa => None,
    }
}

/// Prints the key's kind, id, algorithm and last bytes, but not the whole key.
impl fmt::Debug for IssuerKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (kind, bytes) = match &self.material {
            Material::Rsa { n, .. } => ("RSA", n),
            Material::P256(point) => ("P-256", point),
            Material::P384(point) => ("P-384", point),
            Material::Ed25519(key) => ("Ed25519", key),
        };
        let tail = &bytes[bytes.len().saturating_sub(8)..];
        write!(f, "{kind} {:?} {:?} …{tail:02x?}", self.id, self.only)
    }
}

impl fmt::Display for KeysError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = self.path.display();
        match &self.reason {
            KeyFileFault::Unreadable(error) => write!(f, "cannot read {path}: {error}"),
            reason => write!(f, "{path} {reason}"),
        }
    }
}

impl std::error::Error for KeysError {}
