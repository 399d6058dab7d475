//! Verification of signed JSON Web Tokens and their subjects (RFC 7515, 7519).
//!
//! Owns: parsing a token, and every check of a token. Submodule `keys` has the keys for checking signatures,
//! and `etcd` verifies tokens of etcd's own format. Must not know: the caller presenting a token, the etcd
//! user for a subject. Invariants: no part of a token is trusted before the signature was verified with a key
//! of the token's issuer, by an algorithm matching the key; time is an argument; a token of a listed issuer
//! must have an expiry; malformed bytes of a peer never cause a panic.
//!
//! No JWT crate is used: jsonwebtoken reads the clock by itself, keeps its provider in a global, and has no
//! provider based on ring; of the providers included, aws-lc is banned by Keyward, and rsa has
//! RUSTSEC-2023-0071.

mod etcd_verifier;
mod issuer_keys;

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use data_encoding::BASE64URL_NOPAD;
use serde::de::{Error as _, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};

use keyward_etcd::identity::Peer;
use keyward_etcd::identity::peer::JwtClaims;

pub use etcd_verifier::{EtcdTokens, HmacHash};
pub use issuer_keys::{Algorithm, IssuerKeys, KeysError};

/// Maximum length of a token. Longer than any token in a 64 KiB header list with further headers.
const LONGEST: usize = 16 * 1024;

/// Verifies tokens of one issuer.
#[derive(Debug, PartialEq)]
pub struct Verifier {
    /// The issuer's `iss`, byte for byte.
    pub issuer: Arc<str>,
    /// The audience of Keyward: a token's `aud` must contain the audience.
    pub audience: String,
    /// The issuer's public keys.
    pub keys: IssuerKeys,
    /// The allowed signature algorithms. Empty allows every algorithm matching the key.
    pub algorithms: Vec<Algorithm>,
    /// The name of the claim with the subject.
    pub subject: String,
    /// The tolerated difference between the issuer's clock and the clock of Keyward.
    pub leeway: Duration,
}

/// The accepted issuers.
#[derive(Debug, Default, PartialEq)]
pub struct Issuers {
    /// Issuers selected by the token's `iss`.
    pub listed: Vec<Verifier>,
    /// Verifier for tokens signed with etcd's own key, if the key is configured. Tokens of etcd's format name
    /// no listed issuer.
    pub etcd: Option<EtcdTokens>,
}

/// A verified token.
#[derive(Clone, Debug)]
pub struct VerifiedJwt {
    /// The caller proved by the token.
    pub peer: Peer,
    /// The token's expiry, leeway included.
    pub expires: SystemTime,
    /// The auth revision in a token of etcd's own format: etcd accepts the token at no different auth
    /// revision.
    pub auth_revision: Option<u64>,
}

/// Reasons for rejecting a token. For logs: a client never learns the reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JwtRejection {
    /// Not a JWT, or longer than the limit.
    #[error("not a JWT")]
    NotJwt,
    /// The header lists critical extensions; Keyward supports no extension.
    #[error("its header has critical extensions")]
    Critical,
    /// The issuer is unknown.
    #[error("of an unknown issuer")]
    Issuer,
    /// Signed by `none`, by `HS256` or a similar algorithm, or by an algorithm not allowed for the issuer.
    #[error("signed by an algorithm that is not taken")]
    Algorithm,
    /// No key of the issuer verifies the signature.
    #[error("not signed by a key of its issuer")]
    Signature,
    /// The audience is not Keyward's.
    #[error("for another audience")]
    Audience,
    /// A required claim is missing or has the wrong type.
    #[error("a claim is missing or malformed")]
    Claim,
    /// The token has expired.
    #[error("expired")]
    Expired,
    /// The token is not valid yet.
    #[error("not valid yet")]
    NotYet,
}

/// The header of a token. Keys embedded in a header, and URLs of keys, are ignored.
#[derive(Deserialize)]
struct JwtHeader {
    alg: String,
    kid: Option<String>,
    /// True if the header has a `crit` field, with any value.
    #[serde(default, deserialize_with = "is_there")]
    crit: bool,
}

fn is_there<'de, D: Deserializer<'de>>(value: D) -> Result<bool, D::Error> {
    IgnoredAny::deserialize(value).map(|_| true)
}

/// The claims of a token. A token with a duplicate claim name is rejected, because parsers differ in the
/// value chosen for a duplicate name.
struct UniqueClaims(Map<String, Value>);

impl<'de> Deserialize<'de> for UniqueClaims {
    fn deserialize<D: Deserializer<'de>>(object: D) -> Result<Self, D::Error> {
        object.deserialize_map(UniqueClaimsVisitor)
    }
}

struct UniqueClaimsVisitor;

impl<'de> Visitor<'de> for UniqueClaimsVisitor {
    type Value = UniqueClaims;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<UniqueClaims, A::Error> {
        let mut claims = Map::new();
        while let Some((name, value)) = object.next_entry()? {
            if claims.insert(name, value).is_some() {
                return Err(A::Error::custom("a name is given twice"));
            }
        }
        Ok(UniqueClaims(claims))
    }
}

/// The parts of a token, not verified yet.
struct JwtParts<'a> {
    header: JwtHeader,
    claims: Map<String, Value>,
    signed: &'a [u8],
    signature: Vec<u8>,
}

impl Issuers {
    /// True if no issuer is accepted.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.listed.is_empty() && self.etcd.is_none()
    }

    /// Verifies a token with the verifier of the token's issuer.
    ///
    /// # Errors
    /// [`JwtRejection`].
    pub fn verify(&self, token: &[u8], now: SystemTime) -> Result<VerifiedJwt, JwtRejection> {
        let parts = JwtParts::read(token)?;
        let issuer = parts.claims.get("iss").and_then(Value::as_str);
        let is_listed = self.listed.iter().any(|verifier| issuer == Some(&*verifier.issuer));
        match &self.etcd {
            Some(etcd) if !is_listed && parts.claims.contains_key("username") => {
                etcd.check(&parts.header.alg, parts.signed, &parts.signature)?;
                EtcdTokens::check_claims(&parts.claims, now)
            }
            _ => Verifier::verify_parts(&self.listed, &parts, now),
        }
    }
}

impl VerifiedJwt {
    /// The token's expiry. None for a token without an expiry.
    #[must_use]
    pub fn expiry(&self) -> Option<SystemTime> {
        Some(self.expires).filter(|expires| *expires < UNIX_EPOCH + etcd_verifier::NEVER)
    }
}

impl<'a> JwtParts<'a> {
    fn read(token: &'a [u8]) -> Result<Self, JwtRejection> {
        if token.len() > LONGEST {
            return Err(JwtRejection::NotJwt);
        }
        let mut parts = token.split(|byte| *byte == b'.');
        let (Some(header), Some(payload), Some(signature), None) =
            (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return Err(JwtRejection::NotJwt);
        };
        let signed = &token[..header.len() + 1 + payload.len()];
        let header: JwtHeader = serde_json::from_slice(&decode(header)?).map_err(|_| JwtRejection::NotJwt)?;
        let UniqueClaims(claims) =
            serde_json::from_slice(&decode(payload)?).map_err(|_| JwtRejection::NotJwt)?;
        let signature = decode(signature)?;
        if header.crit {
            return Err(JwtRejection::Critical);
        }
        Ok(Self { header, claims, signed, signature })
    }
}

impl Verifier {
    /// Verifies a token with the verifier of the token's issuer.
    ///
    /// # Errors
    /// [`JwtRejection`].
    pub fn verify_one_of(
        verifiers: &[Self],
        token: &[u8],
        now: SystemTime,
    ) -> Result<VerifiedJwt, JwtRejection> {
        Self::verify_parts(verifiers, &JwtParts::read(token)?, now)
    }

    fn verify_parts(
        verifiers: &[Self],
        parts: &JwtParts<'_>,
        now: SystemTime,
    ) -> Result<VerifiedJwt, JwtRejection> {
        let JwtParts { header, claims, signed, signature } = parts;
        let algorithm = Algorithm::named(&header.alg).ok_or(JwtRejection::Algorithm)?;
        let issuer = claims.get("iss").and_then(Value::as_str).ok_or(JwtRejection::Claim)?;
        let verifier =
            verifiers.iter().find(|verifier| &*verifier.issuer == issuer).ok_or(JwtRejection::Issuer)?;
        if !verifier.algorithms.is_empty() && !verifier.algorithms.contains(&algorithm) {
            return Err(JwtRejection::Algorithm);
        }
        if !verifier.keys.verify(algorithm, header.kid.as_deref(), signed, signature) {
            return Err(JwtRejection::Signature);
        }
        verifier.check_claims(claims, now)
    }

    /// Checks the claims of a token with a valid signature.
    fn check_claims(
        &self,
        claims: &Map<String, Value>,
        now: SystemTime,
    ) -> Result<VerifiedJwt, JwtRejection> {
        let audience = claims.get("aud").ok_or(JwtRejection::Claim)?;
        if !texts(audience).ok_or(JwtRejection::Claim)?.contains(&self.audience) {
            return Err(JwtRejection::Audience);
        }
        let expires =
            instant(claims.get("exp").ok_or(JwtRejection::Claim)?).ok_or(JwtRejection::Claim)? + self.leeway;
        if now >= expires {
            return Err(JwtRejection::Expired);
        }
        if let Some(not_before) = claims.get("nbf")
            && now + self.leeway < instant(not_before).ok_or(JwtRejection::Claim)?
        {
            return Err(JwtRejection::NotYet);
        }
        let subject = claims.get(&self.subject).and_then(Value::as_str).filter(|text| is_plain(text));
        let subject = subject.ok_or(JwtRejection::Claim)?.into();
        let said = claims.iter().filter_map(|(name, value)| Some((name.clone(), texts(value)?)));
        let claims = Arc::new(said.collect::<JwtClaims>());
        Ok(VerifiedJwt {
            peer: Peer::Jwt { issuer: Arc::clone(&self.issuer), subject, claims },
            expires,
            auth_revision: None,
        })
    }
}

impl fmt::Display for VerifiedJwt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.peer.fmt(f)
    }
}

fn decode(part: &[u8]) -> Result<Vec<u8>, JwtRejection> {
    BASE64URL_NOPAD.decode(part).map_err(|_| JwtRejection::NotJwt)
}

/// True if the name is not empty and has no control characters, so that the name appears in logs as written.
fn is_plain(text: &str) -> bool {
    !text.is_empty() && !text.chars().any(char::is_control)
}

/// The values of a claim as text; several for a list. None for null, an object, or a list containing null, a
/// list or an object.
fn texts(value: &Value) -> Option<Vec<String>> {
    let one = |value: &Value| match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(number) => Some(number.to_string()),
        Value::Bool(truth) => Some(truth.to_string()),
        Value::Null | Value::Array(_) | Value::Object(_) => None,
    };
    match value {
        Value::Array(values) => values.iter().map(one).collect(),
        value => one(value).map(|text| vec![text]),
    }
}

/// Converts seconds since the Unix epoch, possibly fractional. None for a negative number, or a time after
/// the year 9999.
fn instant(value: &Value) -> Option<SystemTime> {
    const YEAR_9999: f64 = 253_402_300_800.0;
    let seconds = value.as_f64().filter(|seconds| (0.0..YEAR_9999).contains(seconds))?;
    UNIX_EPOCH.checked_add(Duration::try_from_secs_f64(seconds).ok()?)
}

#[cfg(any(test, feature = "testing"))]
pub mod test_tokens;
#[cfg(test)]
mod tests;
