//! Signed JSON Web Tokens: whether one is genuine, and whom it is about (RFC 7515, 7519).
//!
//! Owns: reading a token, and every check of it. Below, `keys` has what signatures are checked with, and `etcd` takes tokens of
//! etcd's own kind. Must not know: who
//! shows a token, which etcd user its subject is. Invariants: nothing of a token is believed before its signature was
//! checked with a key of its own issuer, by an algorithm that fits the key; time is an argument; a token without an end
//! is not taken; whatever is wrong, bytes of a peer never panic.
//!
//! Not a crate: jsonwebtoken reads the clock by itself, keeps its provider in a global, and has none on ring; of those
//! that it brings, aws-lc is banned here, and rsa has RUSTSEC-2023-0071.

mod etcd;
mod keys;

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::de::{Error as _, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};

use crate::identity::Peer;
use crate::identity::peer::Claims;

pub use etcd::{EtcdTokens, Hash};
pub use keys::{Algorithm, Keys, KeysError};

/// More than any token has that fits into a header list of 64 KiB beside other headers.
const LONGEST: usize = 16 * 1024;

/// Takes the tokens of one issuer.
#[derive(Debug)]
pub struct Verifier {
    /// Its `iss`, byte for byte.
    pub issuer: Arc<str>,
    /// Who we are: `aud` must name it.
    pub audience: String,
    /// What its signatures are checked with.
    pub keys: Keys,
    /// By which algorithms it signs. Empty: by any that fits the key.
    pub algorithms: Vec<Algorithm>,
    /// The claim that names the subject.
    pub subject: String,
    /// How far its clock and ours may be apart.
    pub leeway: Duration,
}

/// Whose tokens are taken.
#[derive(Debug, Default)]
pub struct Issuers {
    /// Each is told by its `iss`.
    pub listed: Vec<Verifier>,
    /// Who signs with etcd's own key, where that is known. Their tokens name no listed issuer.
    pub etcd: Option<EtcdTokens>,
}

/// A token that is genuine.
#[derive(Clone, Debug)]
pub struct Verified {
    /// Whom it is about.
    pub peer: Peer,
    /// When it stops being good, leeway included.
    pub expires: SystemTime,
    /// The auth revision that a token of etcd's own kind is for: it counts at no other.
    pub auth_revision: Option<u64>,
}

/// Why a token is not taken. For logs: a client is never told which.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Bad {
    /// No JWT at all, or longer than any.
    #[error("not a JWT")]
    NotJwt,
    /// It has extensions that must be understood, and we understand none.
    #[error("its header has critical extensions")]
    Critical,
    /// Of nobody whom we know.
    #[error("of an unknown issuer")]
    Issuer,
    /// `none`, `HS256` and the like, or one that the issuer does not sign by.
    #[error("signed by an algorithm that is not taken")]
    Algorithm,
    /// No key of the issuer made the signature.
    #[error("not signed by a key of its issuer")]
    Signature,
    /// For somebody else.
    #[error("for another audience")]
    Audience,
    /// A claim that is needed is missing, or of another type.
    #[error("a claim is missing or malformed")]
    Claim,
    /// Its end has passed.
    #[error("expired")]
    Expired,
    /// Its time has not come.
    #[error("not valid yet")]
    NotYet,
}

/// Keys that a token brings, or says where to get, are not looked at.
#[derive(Deserialize)]
struct Header {
    alg: String,
    kid: Option<String>,
    /// Whether it is there, whatever it says.
    #[serde(default, deserialize_with = "is_there")]
    crit: bool,
}

fn is_there<'de, D: Deserializer<'de>>(value: D) -> Result<bool, D::Error> {
    IgnoredAny::deserialize(value).map(|_| true)
}

/// The claims. Of a name that is given twice readers differ in which one counts: such a token is none.
struct Once(Map<String, Value>);

impl<'de> Deserialize<'de> for Once {
    fn deserialize<D: Deserializer<'de>>(object: D) -> Result<Self, D::Error> {
        object.deserialize_map(EachOnce)
    }
}

struct EachOnce;

impl<'de> Visitor<'de> for EachOnce {
    type Value = Once;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<Once, A::Error> {
        let mut claims = Map::new();
        while let Some((name, value)) = object.next_entry()? {
            if claims.insert(name, value).is_some() {
                return Err(A::Error::custom("a name is given twice"));
            }
        }
        Ok(Once(claims))
    }
}

/// A token's parts, none of which is believed yet.
struct Parts<'a> {
    header: Header,
    claims: Map<String, Value>,
    signed: &'a [u8],
    signature: Vec<u8>,
}

impl Issuers {
    /// Whether there is nobody.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.listed.is_empty() && self.etcd.is_none()
    }

    /// Takes a token of whichever issuer it is from.
    ///
    /// # Errors
    /// [`Bad`].
    pub fn verify(&self, token: &[u8], now: SystemTime) -> Result<Verified, Bad> {
        let parts = Parts::read(token)?;
        let issuer = parts.claims.get("iss").and_then(Value::as_str);
        let is_listed = self.listed.iter().any(|verifier| issuer == Some(&*verifier.issuer));
        match &self.etcd {
            Some(etcd) if !is_listed && parts.claims.contains_key("username") => {
                etcd.check(&parts.header.alg, parts.signed, &parts.signature)?;
                EtcdTokens::judge(&parts.claims, now)
            }
            _ => Verifier::verify_parts(&self.listed, &parts, now),
        }
    }
}

impl Verified {
    /// When it stops being good; none where it tells no end.
    #[must_use]
    pub fn ends(&self) -> Option<SystemTime> {
        Some(self.expires).filter(|expires| *expires < UNIX_EPOCH + etcd::NEVER)
    }
}

impl<'a> Parts<'a> {
    fn read(token: &'a [u8]) -> Result<Self, Bad> {
        if token.len() > LONGEST {
            return Err(Bad::NotJwt);
        }
        let mut parts = token.split(|byte| *byte == b'.');
        let (Some(header), Some(payload), Some(signature), None) =
            (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return Err(Bad::NotJwt);
        };
        let signed = &token[..header.len() + 1 + payload.len()];
        let header: Header = serde_json::from_slice(&decode(header)?).map_err(|_| Bad::NotJwt)?;
        let Once(claims) = serde_json::from_slice(&decode(payload)?).map_err(|_| Bad::NotJwt)?;
        let signature = decode(signature)?;
        if header.crit {
            return Err(Bad::Critical);
        }
        Ok(Self { header, claims, signed, signature })
    }
}

impl Verifier {
    /// Takes a token of whichever of these issuers it is from.
    ///
    /// # Errors
    /// [`Bad`].
    pub fn verify_one_of(verifiers: &[Self], token: &[u8], now: SystemTime) -> Result<Verified, Bad> {
        Self::verify_parts(verifiers, &Parts::read(token)?, now)
    }

    fn verify_parts(verifiers: &[Self], parts: &Parts<'_>, now: SystemTime) -> Result<Verified, Bad> {
        let Parts { header, claims, signed, signature } = parts;
        let algorithm = Algorithm::named(&header.alg).ok_or(Bad::Algorithm)?;
        let issuer = claims.get("iss").and_then(Value::as_str).ok_or(Bad::Claim)?;
        let verifier = verifiers.iter().find(|verifier| &*verifier.issuer == issuer).ok_or(Bad::Issuer)?;
        if !verifier.algorithms.is_empty() && !verifier.algorithms.contains(&algorithm) {
            return Err(Bad::Algorithm);
        }
        if !verifier.keys.verify(algorithm, header.kid.as_deref(), signed, signature) {
            return Err(Bad::Signature);
        }
        verifier.judge(claims, now)
    }

    /// What a genuine token says.
    fn judge(&self, claims: &Map<String, Value>, now: SystemTime) -> Result<Verified, Bad> {
        let audience = claims.get("aud").ok_or(Bad::Claim)?;
        if !texts(audience).ok_or(Bad::Claim)?.contains(&self.audience) {
            return Err(Bad::Audience);
        }
        let expires = instant(claims.get("exp").ok_or(Bad::Claim)?).ok_or(Bad::Claim)? + self.leeway;
        if now >= expires {
            return Err(Bad::Expired);
        }
        if let Some(not_before) = claims.get("nbf")
            && now + self.leeway < instant(not_before).ok_or(Bad::Claim)?
        {
            return Err(Bad::NotYet);
        }
        let subject = claims.get(&self.subject).and_then(Value::as_str).filter(|text| is_plain(text));
        let subject = subject.ok_or(Bad::Claim)?.into();
        let said = claims.iter().filter_map(|(name, value)| Some((name.clone(), texts(value)?)));
        let claims = Arc::new(said.collect::<Claims>());
        Ok(Verified {
            peer: Peer::Jwt { issuer: Arc::clone(&self.issuer), subject, claims },
            expires,
            auth_revision: None,
        })
    }
}

impl fmt::Display for Verified {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.peer.fmt(f)
    }
}

fn decode(part: &[u8]) -> Result<Vec<u8>, Bad> {
    URL_SAFE_NO_PAD.decode(part).map_err(|_| Bad::NotJwt)
}

/// A name that shows in logs as it is.
fn is_plain(text: &str) -> bool {
    !text.is_empty() && !text.chars().any(char::is_control)
}

/// A claim's values as text: a list has several. None for an object, or a list of other things.
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

/// Seconds of the Unix epoch, perhaps with a fraction; none for what lies before it, or in an age that no clock reaches.
fn instant(value: &Value) -> Option<SystemTime> {
    const YEAR_9999: f64 = 253_402_300_800.0;
    let seconds = value.as_f64().filter(|seconds| (0.0..YEAR_9999).contains(seconds))?;
    UNIX_EPOCH.checked_add(Duration::try_from_secs_f64(seconds).ok()?)
}

#[cfg(test)]
pub(crate) mod tests;
