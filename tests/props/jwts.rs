//! Signed tokens: only a token that its issuer signed is believed, byte for byte, and only within its claims.

use std::sync::LazyLock;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use data_encoding::BASE64URL_NOPAD;
use keyward::jwt::{IssuerKeys, JwtRejection, Verifier};
use ring::signature::{Ed25519KeyPair, KeyPair as _};
use serde_json::{Map, Value, json};

use crate::choices::Choices;

pub(crate) const TARGETS: [fn(&[u8]); 4] = [any_bytes, changed, signed, any_claims];

const ISSUER: &str = "https://ci.test";
const AUDIENCE: &str = "etcd";
const NOW: u64 = 1_800_000_000;
const LEEWAY: u64 = 60;

static SIGNER: LazyLock<Ed25519KeyPair> =
    LazyLock::new(|| Ed25519KeyPair::from_seed_unchecked(&[7; 32]).expect("a seed"));

static VERIFIERS: LazyLock<Vec<Verifier>> = LazyLock::new(|| {
    let public = BASE64URL_NOPAD.encode(SIGNER.public_key().as_ref());
    let set = json!({ "keys": [{ "kty": "OKP", "crv": "Ed25519", "x": public, "kid": "one" }] });
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("keys.json");
    std::fs::write(&path, set.to_string()).expect("written");
    vec![Verifier {
        issuer: ISSUER.into(),
        audience: AUDIENCE.into(),
        keys: IssuerKeys::read(&path).expect("a key"),
        algorithms: Vec::new(),
        subject: "sub".into(),
        leeway: Duration::from_secs(LEEWAY),
    }]
});

static TOKEN: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let claims = json!({ "iss": ISSUER, "aud": [AUDIENCE], "sub": "alice", "exp": NOW + 600 });
    sign(br#"{"alg":"EdDSA"}"#, claims.to_string().as_bytes())
});

fn now() -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(NOW)
}

fn sign(header: &[u8], claims: &[u8]) -> Vec<u8> {
    let signed = format!("{}.{}", BASE64URL_NOPAD.encode(header), BASE64URL_NOPAD.encode(claims));
    let signature = SIGNER.sign(signed.as_bytes());
    format!("{signed}.{}", BASE64URL_NOPAD.encode(signature.as_ref())).into_bytes()
}

/// The subject, or why the token is not taken.
fn verify(token: &[u8]) -> Result<String, JwtRejection> {
    let verified = Verifier::verify_one_of(&VERIFIERS, token, now())?;
    assert!(verified.expires > now(), "it has expired");
    Ok(verified.peer.to_string())
}

/// Nobody here can sign, so nothing is believed but the one token that is known.
fn any_bytes(input: &[u8]) {
    assert_eq!(verify(input).is_ok(), input == *TOKEN, "{input:?}");
}

fn changed(input: &[u8]) {
    let mut choices = Choices::new(input);
    let mut token = TOKEN.clone();
    for _ in 0..=choices.below(3) {
        let at = usize::from(choices.byte()) % token.len();
        match choices.below(6) {
            0 => token.truncate(at + 1),
            1 => token.insert(at, choices.byte()),
            2 => token.extend(choices.bytes(5)),
            3 => {
                token.remove(at);
            }
            _ => token[at] = choices.byte(),
        }
        if token.is_empty() {
            break;
        }
    }
    any_bytes(&token);
}

/// A token of its issuer's, with claims that are right, wrong, missing or of another type.
fn signed(input: &[u8]) {
    let mut choices = Choices::new(input);
    let mut claims = Map::new();
    let seconds = |choices: &mut Choices<'_>| match choices.below(8) {
        0 => json!(choices.number()),
        1 => json!("1800000600"),
        2 => json!(-1.5),
        3 => json!(f64::MAX),
        near => json!(NOW - 120 + 60 * u64::try_from(near - 4).expect("small") + u64::from(choices.flag())),
    };
    for name in ["iss", "aud", "sub", "exp", "nbf"] {
        if choices.one_in(9) || (name == "nbf" && choices.flag()) {
            continue;
        }
        let text = String::from_utf8_lossy(choices.bytes(4)).into_owned();
        let value = match (name, choices.below(8)) {
            (_, 0) => json!(text),
            (_, 1) => json!([text, 7, null]),
            ("exp" | "nbf", _) => seconds(&mut choices),
            ("iss", _) => json!(ISSUER),
            ("aud", 2) => json!(["other", AUDIENCE]),
            ("aud", _) => json!(AUDIENCE),
            _ => json!("alice"),
        };
        claims.insert(name.to_owned(), value);
    }
    let header = match choices.below(10) {
        0 => json!({ "alg": "none" }),
        1 => json!({ "alg": "EdDSA", "crit": ["x"] }),
        2 => json!({ "alg": "ES256" }),
        3 => json!({ "alg": "EdDSA", "kid": "two" }),
        4 => json!({ "alg": "HS256" }),
        5 => json!({ "alg": "EdDSA", "kid": "one" }),
        _ => json!({ "alg": "EdDSA" }),
    };
    judged(&header, &claims);
}

/// What is signed may be anything.
fn any_claims(input: &[u8]) {
    let header = json!({ "alg": "EdDSA" });
    let taken = verify(&sign(header.to_string().as_bytes(), input));
    match serde_json::from_slice::<Map<String, Value>>(input) {
        Ok(claims) => judged(&header, &claims),
        Err(_) => assert_eq!(taken, Err(JwtRejection::NotJwt)),
    }
}

/// Taken exactly where everything is as it must be, by another reading of the claims.
fn judged(header: &Value, claims: &Map<String, Value>) {
    let text = Value::Object(claims.clone()).to_string();
    let taken = verify(&sign(header.to_string().as_bytes(), text.as_bytes()));
    let lists = |value: &Value| match value {
        Value::Array(values) => {
            values.iter().all(|value| !value.is_null() && !value.is_array() && !value.is_object())
                && values.contains(&json!(AUDIENCE))
        }
        value => *value == json!(AUDIENCE),
    };
    let header_is_good = header["alg"] == "EdDSA" && header["crit"].is_null() && header["kid"] != "two";
    let (now, leeway) = (f64::from(u32::try_from(NOW).expect("32 bits")), f64::from(60_u8));
    let number =
        |name| claims.get(name).and_then(Value::as_f64).filter(|at| (0.0..253_402_300_800.0).contains(at));
    let subject = claims.get("sub").and_then(Value::as_str);
    let good = header_is_good
        && claims.get("iss") == Some(&json!(ISSUER))
        && claims.get("aud").is_some_and(lists)
        && number("exp").is_some_and(|at| at + leeway > now)
        && claims.get("nbf").is_none_or(|_| number("nbf").is_some_and(|at| at <= now + leeway))
        && subject.is_some_and(|text| !text.is_empty() && !text.chars().any(char::is_control));
    assert_eq!(taken.is_ok(), good, "{header} {text}: {taken:?}");
    if let (Ok(peer), Some(subject)) = (taken, subject) {
        assert_eq!(peer, format!("jwt:{ISSUER}:{subject}"));
    }
}
