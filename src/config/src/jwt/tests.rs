//! Tokens made for tests, and all kinds of bad tokens.

use proptest::prelude::*;
use ring::rand::SystemRandom;
use ring::signature::{self as made_by, EcdsaKeyPair, Ed25519KeyPair};
use serde_json::json;

use super::test_tokens::*;
use super::*;

fn with(name: &str, value: Value) -> Value {
    let mut claims = claims("alice");
    claims[name] = value;
    claims
}

fn without(name: &str) -> Value {
    let mut claims = claims("alice");
    claims.as_object_mut().unwrap().remove(name);
    claims
}

#[test]
fn every_algorithm_is_taken_with_its_own_key_and_no_other() {
    let all = Signer::all();
    let verifiers: Vec<_> = all.iter().map(|signer| [verifier(signer)]).collect();
    for (own, signer) in all.iter().enumerate() {
        let token = signer.sign(&claims("alice"));
        let mut taken = Vec::new();
        for (index, verifier) in verifiers.iter().enumerate() {
            match Verifier::verify_one_of(verifier, token.as_bytes(), now()) {
                Ok(verified) => {
                    assert_eq!(verified.to_string(), format!("jwt:{ISSUER}:alice"));
                    taken.push(index);
                }
                Err(bad) => assert_eq!(bad, JwtRejection::Signature, "{} by key {index}", signer.algorithm),
            }
        }
        // The six RSA algorithms share a key.
        let expected = if own < 6 { (0..6).collect() } else { vec![own] };
        assert_eq!(taken, expected, "{}", signer.algorithm);
    }
}

#[test]
fn what_a_token_says_is_its_peer() {
    let signer = Signer::es256();
    let verified =
        Verifier::verify_one_of(&[verifier(&signer)], signer.sign(&claims("a:b")).as_bytes(), now()).unwrap();
    let Peer::Jwt { issuer, subject, claims } = &verified.peer else { panic!("{}", verified.peer) };
    assert_eq!((&**issuer, &**subject), (ISSUER, "a:b"));
    assert_eq!(claims.values("groups"), ["a", "b"]);
    assert_eq!((claims.values("n"), claims.values("yes")), (&["7".to_owned()][..], &["true".to_owned()][..]));
    assert!(claims.values("o").is_empty() && claims.values("absent").is_empty());
    assert_eq!(verified.expires, UNIX_EPOCH + Duration::from_secs(1_800_003_630), "leeway included");
    let mut of_another = verifier(&signer);
    of_another.subject = "user".to_owned();
    let named = signer.sign(&with("user", json!("bob")));
    let verified = Verifier::verify_one_of(&[of_another], named.as_bytes(), now()).unwrap();
    assert_eq!(verified.to_string(), format!("jwt:{ISSUER}:bob"));
}

#[test]
fn claims_that_are_missing_wrong_or_out_of_time_are_refused() {
    let signer = Signer::es256();
    let verify = |claims: &Value, now| {
        Verifier::verify_one_of(&[verifier(&signer)], signer.sign(claims).as_bytes(), now).err()
    };
    for (claims, expected) in [
        (claims("alice"), None),
        (with("aud", json!(["x", "etcd"])), None),
        (with("exp", json!(1_800_000_000.5)), None),
        (with("exp", json!(1_799_999_971)), None),
        (with("exp", json!(1_799_999_970)), Some(JwtRejection::Expired)),
        (with("exp", json!(0)), Some(JwtRejection::Expired)),
        (with("nbf", json!(1_800_000_030)), None),
        (with("nbf", json!(1_800_000_031)), Some(JwtRejection::NotYet)),
        (without("exp"), Some(JwtRejection::Claim)),
        (without("sub"), Some(JwtRejection::Claim)),
        (without("aud"), Some(JwtRejection::Claim)),
        (without("iss"), Some(JwtRejection::Claim)),
        (with("exp", json!("1900000000")), Some(JwtRejection::Claim)),
        (with("exp", json!(-1)), Some(JwtRejection::Claim)),
        (with("exp", json!(1e300)), Some(JwtRejection::Claim)),
        (with("exp", Value::Null), Some(JwtRejection::Claim)),
        (with("nbf", json!("soon")), Some(JwtRejection::Claim)),
        (with("sub", json!("")), Some(JwtRejection::Claim)),
        (with("sub", json!(7)), Some(JwtRejection::Claim)),
        (with("sub", json!("al\nice")), Some(JwtRejection::Claim)),
        (with("aud", json!("etcd2")), Some(JwtRejection::Audience)),
        (with("aud", json!([])), Some(JwtRejection::Audience)),
        (with("aud", json!({})), Some(JwtRejection::Claim)),
        (with("iss", json!("https://ci.test")), Some(JwtRejection::Issuer)),
        (with("iss", json!(["https://ci.test:8443"])), Some(JwtRejection::Claim)),
        (json!([]), Some(JwtRejection::NotJwt)),
    ] {
        assert_eq!(verify(&claims, now()), expected, "{claims}");
    }
}

#[test]
fn only_a_signature_of_the_issuers_key_counts() {
    let (signer, foreign) = (Signer::es256(), Signer::es256());
    let verifiers = [verifier(&signer)];
    let verify = |token: &str| Verifier::verify_one_of(&verifiers, token.as_bytes(), now()).err();
    let good = signer.sign(&claims("alice"));
    assert_eq!(verify(&good), None);
    assert_eq!(verify(&foreign.sign(&claims("alice"))), Some(JwtRejection::Signature));
    let (signed, _) = good.rsplit_once('.').unwrap();
    let (header, payload) = signed.split_once('.').unwrap();
    for (token, expected) in [
        (format!("{signed}."), JwtRejection::Signature),
        (signed.to_owned(), JwtRejection::NotJwt),
        (format!("{good}.x"), JwtRejection::NotJwt),
        (format!("{good}="), JwtRejection::NotJwt),
        (format!(" {good}"), JwtRejection::NotJwt),
        (String::new(), JwtRejection::NotJwt),
        ("..".to_owned(), JwtRejection::NotJwt),
        (format!("{header}.{payload}.{}", "A".repeat(LONGEST)), JwtRejection::NotJwt),
    ] {
        assert_eq!(verify(&token), Some(expected), "{token:.80}");
    }
    for alg in ["none", "None", "HS256", "HS384", "HS512", "ES256K", "es256", "RS1", ""] {
        let token = signer.sign_with(&json!({ "alg": alg }), &claims("alice"));
        assert_eq!(verify(&token), Some(JwtRejection::Algorithm), "{alg}");
    }
    assert_eq!(
        verify(&signer.sign_with(&json!({ "alg": "ES384" }), &claims("alice"))),
        Some(JwtRejection::Signature)
    );
    assert_eq!(
        verify(&signer.sign_with(&json!({ "typ": "JWT" }), &claims("alice"))),
        Some(JwtRejection::NotJwt)
    );
    let critical = json!({ "alg": "ES256", "crit": ["b64"], "b64": false });
    assert_eq!(verify(&signer.sign_with(&critical, &claims("alice"))), Some(JwtRejection::Critical));
    let mut pinned = verifier(&signer);
    pinned.algorithms = vec![Algorithm::Rs256];
    assert_eq!(
        Verifier::verify_one_of(&[pinned], good.as_bytes(), now()).err(),
        Some(JwtRejection::Algorithm)
    );
}

#[test]
fn a_secret_is_never_made_of_a_public_key() {
    let signer = Signer::rsa("RS256", &made_by::RSA_PKCS1_SHA256);
    let header = BASE64URL_NOPAD.encode(br#"{"alg":"HS256"}"#);
    let signed = format!("{header}.{}", BASE64URL_NOPAD.encode(claims("root").to_string().as_bytes()));
    let key = ring::hmac::Key::new(ring::hmac::HMAC_SHA256, signer.jwk()["n"].as_str().unwrap().as_bytes());
    let tag = BASE64URL_NOPAD.encode(ring::hmac::sign(&key, signed.as_bytes()).as_ref());
    let verify = Verifier::verify_one_of(&[verifier(&signer)], format!("{signed}.{tag}").as_bytes(), now());
    assert_eq!(verify.err(), Some(JwtRejection::Algorithm));
}

#[test]
fn an_issuer_speaks_for_itself_alone() {
    let (one, other) = (Signer::es256(), Signer::es256());
    let second = Verifier { issuer: "https://other.test".into(), ..verifier(&other) };
    let verifiers = [verifier(&one), second];
    let verify = |token: String| Verifier::verify_one_of(&verifiers, token.as_bytes(), now());
    let of_other = with("iss", json!("https://other.test"));
    assert_eq!(verify(other.sign(&of_other)).unwrap().to_string(), "jwt:https://other.test:alice");
    assert_eq!(verify(one.sign(&of_other)).err(), Some(JwtRejection::Signature));
    assert_eq!(verify(other.sign(&claims("alice"))).err(), Some(JwtRejection::Signature));
}

#[test]
fn a_header_brings_no_key_and_no_extension() {
    let (signer, thief) = (Signer::es256(), Signer::es256());
    let verifiers = [verifier(&signer)];
    let verify = |by: &Signer, name: &str, value: &Value| {
        let mut header = json!({ "alg": "ES256" });
        header[name] = value.clone();
        Verifier::verify_one_of(&verifiers, by.sign_with(&header, &claims("alice")).as_bytes(), now()).err()
    };
    for (name, value) in [
        ("jwk", thief.jwk()),
        ("jku", json!("https://thief.test/keys")),
        ("x5u", json!("https://thief.test/chain")),
        ("x5c", json!(["AAAA"])),
        ("kid", json!("../../../etc/passwd")),
        ("kid", json!("")),
        ("typ", json!("JOSE+JSON")),
        ("cty", json!("JWT")),
        ("zip", json!("DEF")),
        ("b64", json!(false)),
    ] {
        assert_eq!(verify(&thief, name, &value), Some(JwtRejection::Signature), "{name}");
        assert_eq!(verify(&signer, name, &value), None, "{name}: the issuer may say what it likes");
    }
    for value in [Value::Null, json!([]), json!(["exp"]), json!("exp"), json!({}), json!(false)] {
        assert_eq!(verify(&signer, "crit", &value), Some(JwtRejection::Critical), "{value}");
    }
}

#[test]
fn a_name_that_is_given_twice_is_read_by_nobody() {
    let signer = Signer::es256();
    let verify = |header: &str, payload: &str| {
        Verifier::verify_one_of(&[verifier(&signer)], signer.sign_text(header, payload).as_bytes(), now())
            .err()
    };
    let (header, good) = (r#"{"alg":"ES256"}"#, claims("alice").to_string());
    assert_eq!(verify(header, &good), None);
    let more = |more: &str| format!("{},{more}}}", good.trim_end_matches('}'));
    // The last member of `good` is an empty object, and trimming also removed the object's brace; put the
    // brace back.
    let more = |text: &str| more(text).replace(r#""o":{,"#, r#""o":{},"#);
    assert_eq!(verify(header, &more(r#""x":1"#)), None);
    for twice in [
        r#""sub":"root""#,
        r#""sub":"alice""#,
        r#""\u0073ub":"root""#,
        r#""iss":"https://ci.test:8443""#,
        r#""exp":9999999999"#,
        r#""aud":"etcd""#,
        r#""groups":["admins"]"#,
    ] {
        assert_eq!(verify(header, &more(twice)), Some(JwtRejection::NotJwt), "{twice}");
    }
    for twice in [r#"{"alg":"none","alg":"ES256"}"#, r#"{"alg":"ES256","kid":"1","kid":"2"}"#] {
        assert_eq!(verify(twice, &good), Some(JwtRejection::NotJwt), "{twice}");
    }
    // Names are not case-folded either.
    assert_eq!(verify(r#"{"ALG":"ES256"}"#, &good), Some(JwtRejection::NotJwt));
    assert_eq!(verify(header, &good.replace("\"sub\"", "\"Sub\"")), Some(JwtRejection::Claim));
}

#[test]
fn a_token_that_names_its_key_is_checked_with_that_key() {
    let (one, two) = (Signer::es256(), Signer::es256());
    let named = |signer: &Signer, id: &str| {
        let mut jwk = signer.jwk();
        jwk["kid"] = json!(id);
        jwk
    };
    let mut verifier = verifier(&one);
    verifier.keys = set(&[named(&one, "1"), named(&two, "2")]);
    let verifiers = [verifier];
    let verify = |signer: &Signer, header: Value| {
        Verifier::verify_one_of(&verifiers, signer.sign_with(&header, &claims("alice")).as_bytes(), now())
            .err()
    };
    assert_eq!(verify(&two, json!({ "alg": "ES256", "kid": "2" })), None);
    assert_eq!(verify(&two, json!({ "alg": "ES256" })), None);
    assert_eq!(verify(&two, json!({ "alg": "ES256", "kid": "1" })), Some(JwtRejection::Signature));
    assert_eq!(verify(&two, json!({ "alg": "ES256", "kid": "3" })), Some(JwtRejection::Signature));
    assert_eq!(verify(&two, json!({ "alg": "ES256", "kid": 2 })), Some(JwtRejection::NotJwt));
}

#[test]
fn a_key_is_used_for_what_its_file_says() {
    let signer = Signer::rsa("PS256", &made_by::RSA_PSS_SHA256);
    let token = signer.sign(&claims("alice"));
    let changed = |name: &str, value: Value| {
        let mut jwk = signer.jwk();
        jwk[name] = value;
        jwk
    };
    let mut verifier = verifier(&signer);
    for (jwk, expected) in [
        (changed("alg", json!("PS256")), None),
        (changed("use", json!("sig")), None),
        (changed("alg", json!("RS256")), Some(JwtRejection::Signature)),
    ] {
        verifier.keys = set(std::slice::from_ref(&jwk));
        let verified = Verifier::verify_one_of(std::slice::from_ref(&verifier), token.as_bytes(), now());
        assert_eq!(verified.err(), expected, "{jwk}");
    }
    let fault = |content: &str| read(content).unwrap_err().to_string();
    let of_set = |jwk: Value| fault(&json!({ "keys": [jwk] }).to_string());
    assert!(of_set(changed("use", json!("enc"))).contains("no public key"));
    assert!(of_set(changed("alg", json!("HS256"))).contains("no public key"));
    assert!(of_set(changed("d", json!("AA"))).contains("private"));
    assert!(of_set(changed("n", json!("AA"))).contains("key 1 is damaged"));
    assert!(of_set(changed("n", json!("!"))).contains("key 1 is damaged"));
    assert!(of_set(json!({ "kty": "oct", "k": "AA" })).contains("no public key"));
    assert!(of_set(json!({ "kty": "EC", "crv": "P-256", "x": "AA", "y": "AA" })).contains("damaged"));
    for content in ["", "{}", "[]", "keys", "{\"keys\": 1}"] {
        assert!(fault(content).contains("neither PEM nor"), "{content}");
    }
    assert!(fault(&json!({ "keys": vec![signer.jwk(); 65] }).to_string()).contains("more than"));
    assert!(
        IssuerKeys::read(std::path::Path::new("/nowhere/at/all"))
            .unwrap_err()
            .to_string()
            .contains("/nowhere")
    );
}

#[test]
fn keys_come_as_pem_too() {
    for algorithm in [&rcgen::PKCS_ECDSA_P256_SHA256, &rcgen::PKCS_ECDSA_P384_SHA384, &rcgen::PKCS_ED25519] {
        let pair = rcgen::KeyPair::generate_for(algorithm).unwrap();
        let pkcs8 = pair.serialize_der();
        let random = SystemRandom::new();
        let ecdsa = |by| EcdsaKeyPair::from_pkcs8(by, &pkcs8, &random).ok().map(SigningKey::Ecdsa);
        let p256 = ecdsa(&made_by::ECDSA_P256_SHA256_FIXED_SIGNING).map(|key| ("ES256", key));
        let p384 = ecdsa(&made_by::ECDSA_P384_SHA384_FIXED_SIGNING).map(|key| ("ES384", key));
        let ed25519 = Ed25519KeyPair::from_pkcs8(&pkcs8).ok().map(|key| ("EdDSA", SigningKey::Ed25519(key)));
        let (algorithm, key) = p256.or(p384).or(ed25519).unwrap();
        let signer = Signer { algorithm, key };
        let mut verifier = verifier(&Signer::es256());
        verifier.keys = read(&pair.public_key_pem()).unwrap();
        let token = signer.sign_with(&json!({ "alg": algorithm, "kid": "any" }), &claims("alice"));
        assert!(Verifier::verify_one_of(&[verifier], token.as_bytes(), now()).is_ok(), "{algorithm}");
        assert!(read(&pair.serialize_pem()).unwrap_err().to_string().contains("private"));
    }
    let pair =
        rcgen::KeyPair::from_pkcs8_der_and_sign_algo(&rsa().as_slice().into(), &rcgen::PKCS_RSA_SHA256);
    let signer = Signer::rsa("RS256", &made_by::RSA_PKCS1_SHA256);
    let mut verifier = verifier(&Signer::es256());
    verifier.keys = read(&pair.unwrap().public_key_pem()).unwrap();
    assert!(Verifier::verify_one_of(&[verifier], signer.sign(&claims("alice")).as_bytes(), now()).is_ok());
}

proptest! {
    #[test]
    fn no_bytes_panic_and_none_but_the_signed_ones_are_taken(
        at in any::<prop::sample::Index>(),
        byte in any::<u8>(),
        noise in prop::collection::vec(any::<u8>(), 0..60),
    ) {
        let signer = Signer::ed25519();
        let verifiers = [verifier(&signer)];
        let mut token = signer.sign(&claims("alice")).into_bytes();
        let at = at.index(token.len());
        let changed = token[at] != byte;
        token[at] = byte;
        prop_assert_eq!(Verifier::verify_one_of(&verifiers, &token, now()).is_err(), changed);
        prop_assert!(Verifier::verify_one_of(&verifiers, &noise, now()).is_err());
    }
}
