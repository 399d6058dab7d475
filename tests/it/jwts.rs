//! Signed JWTs as peers: where they may stand, who they are upstream, when they are refused, and when they end.

use std::time::{SystemTime, UNIX_EPOCH};

use data_encoding::BASE64URL_NOPAD;
use http::HeaderValue;
use keyward::members::membership::AuthSetting;
use keyward::pb::etcdserverpb::LeaseGrantRequest;
use keyward::refusal::Code;
use keyward::tasks::Tasks;
use prost::Message as _;
use ring::rand::SystemRandom;
use ring::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair};
use serde_json::{Value, json};

use crate::certificates::in_half_an_hour;
use crate::client::Client;
use crate::member::Member;
use crate::revocations::watching;
use crate::rig::{Keyward, paused, settled, token_of};
use crate::words::{INVALID_TOKEN, RANGE, range};

pub(crate) const ISSUER: &str = "https://ci.test:8443";
const RULES: &str = "\
    [[map]]\npeer = \"jwt:https://ci.test:8443:mallory\"\ndeny = true\n\
    [[map]]\nissuer = \"https://ci.test:8443\"\nclaim = { repository = \"org/*\", groups = \"deploy\" }\nas = \"app\"\n\
    [[map]]\npeer = \"jwt:https://ci.test:8443:*\"\nas = \"same\"\n";

/// Somebody who signs.
pub(crate) struct Issuer(pub(crate) rcgen::KeyPair);

impl Issuer {
    pub(crate) fn new() -> Self {
        Self(rcgen::KeyPair::generate().expect("a key"))
    }

    fn sign(&self, header: &Value, claims: &Value) -> String {
        let part = |value: &Value| BASE64URL_NOPAD.encode(value.to_string().as_bytes());
        let signed = format!("{}.{}", part(header), part(claims));
        let (random, pkcs8) = (SystemRandom::new(), self.0.serialize_der());
        let key = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &pkcs8, &random).expect("P-256");
        let signature = key.sign(&random, signed.as_bytes()).expect("signed");
        format!("{signed}.{}", BASE64URL_NOPAD.encode(signature.as_ref()))
    }

    pub(crate) fn token(&self, claims: &Value) -> String {
        self.sign(&json!({ "alg": "ES256", "typ": "JWT" }), claims)
    }
}

/// Seconds of the epoch, so far from now.
fn seconds(from_now: i64) -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_secs();
    i64::try_from(now).expect("this age") + from_now
}

/// The end of a token of ten minutes.
pub(crate) fn lasting() -> i64 {
    seconds(600)
}

/// What a token of ten minutes says of `subject`.
pub(crate) fn claims(subject: &str) -> Value {
    json!({ "iss": ISSUER, "aud": ["etcd"], "sub": subject, "exp": lasting() })
}

/// Keyward that takes the tokens of one issuer, in front of one scripted member.
struct Door {
    issuer: Issuer,
    member: Member,
    keyward: Keyward,
}

impl Door {
    fn new(listener: &str) -> Self {
        let issuer = Issuer::new();
        let folder = tempfile::tempdir().expect("a folder");
        let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).expect("written");
        write("ci.pem", &issuer.0.public_key_pem());
        let mut lines =
            format!("[[jwt]]\nissuer = \"{ISSUER}\"\naudience = \"etcd\"\nkeys = \"ci.pem\"\n{RULES}");
        for user in ["app", "alice", "root", "bob"] {
            write(user, "right");
            lines += &format!("[[user]]\nname = \"{user}\"\npassword_file = \"{user}\"\n");
        }
        let member = Member::new(1, &Tasks::default());
        let keyward = Keyward::at(&[&member], AuthSetting::On, folder.path(), listener, &lines);
        Self { issuer, member, keyward }
    }

    /// The token with which a call of this client reaches the member.
    async fn token_of(&self, client: &Client) -> Option<String> {
        token_of(&self.member, client).await
    }

    async fn shows(&self, token: &str) -> Client {
        self.keyward.client().await.header("token", token)
    }

    /// A call with this token is refused so, and nothing of it reaches the member.
    async fn refuses(&self, token: &str, code: Code, text: &str) {
        let client = self.shows(token).await;
        let end = client.call(RANGE, range("k")).await.end;
        assert_eq!(end.told(), (code, text), "{token}");
        settled().await;
        assert!(self.member.was_called_again().is_none(), "{token}");
        assert_eq!(self.member.logins(), 0, "{token}");
    }
}

#[test]
fn a_jwt_stands_wherever_a_token_may() {
    paused(async {
        let door = Door::new("");
        let alice = door.issuer.token(&claims("alice"));
        for (name, value) in [
            ("token", alice.clone()),
            ("token", format!("Bearer {alice}")),
            ("authorization", alice.clone()),
            ("authorization", format!("bearer {alice}")),
        ] {
            let client = door.keyward.client().await.header(name, &value);
            assert_eq!(door.token_of(&client).await.as_deref(), Some("alice.1"), "{name}");
        }
        // As Python sends it, over TLS.
        let mut twice = door.shows(&alice).await;
        twice.headers.append("token", HeaderValue::try_from(&alice).expect("a header"));
        assert_eq!(door.token_of(&twice).await.as_deref(), Some("alice.1"));
        assert_eq!(door.keyward.metrics.jwts_refused.get(), 0);
    });
}

#[test]
fn rules_know_a_jwt_by_its_claims_and_its_subject() {
    paused(async {
        let door = Door::new("");
        let mut deploy = claims("run-17");
        deploy["repository"] = json!("org/web");
        deploy["groups"] = json!(["test", "deploy"]);
        let client = door.shows(&door.issuer.token(&deploy)).await;
        assert_eq!(door.token_of(&client).await.as_deref(), Some("app.1"));
        let client = door.shows(&door.issuer.token(&claims("alice"))).await;
        assert_eq!(door.token_of(&client).await.as_deref(), Some("alice.2"));
    });
}

#[test]
fn a_subject_that_is_no_user_is_refused_and_nothing_is_sent() {
    paused(async {
        let door = Door::new("default_user = \"bob\"\n");
        for subject in ["mallory", "carol", "root"] {
            let token = door.issuer.token(&claims(subject));
            door.refuses(&token, Code::PermissionDenied, "etcdserver: permission denied").await;
        }
        assert_eq!(door.keyward.metrics.peers_refused.get(), 3);
    });
}

#[test]
fn a_jwt_that_is_not_genuine_is_a_bad_token() {
    paused(async {
        let door = Door::new("default_user = \"bob\"\n");
        let header = json!({ "alg": "ES256" });
        let changed = |name: &str, value: Value| {
            let mut claims = claims("alice");
            claims[name] = value;
            door.issuer.token(&claims)
        };
        let without = |name: &str| {
            let mut claims = claims("alice");
            claims.as_object_mut().expect("claims").remove(name);
            door.issuer.token(&claims)
        };
        let good = door.issuer.token(&claims("alice"));
        let unsigned = door.issuer.sign(&json!({ "alg": "none" }), &claims("alice"));
        let (signed, _) = unsigned.rsplit_once('.').expect("a signature");
        let bad = [
            unsigned.clone(),
            format!("{signed}."),
            door.issuer.sign(&json!({ "alg": "HS256" }), &claims("alice")),
            door.issuer.sign(&json!({ "alg": "RS256" }), &claims("alice")),
            Issuer::new().sign(&header, &claims("alice")),
            changed("exp", json!(seconds(-31))),
            changed("nbf", json!(seconds(3600))),
            changed("aud", json!("another")),
            changed("iss", json!("https://ci.test")),
            changed("exp", json!("never")),
            without("exp"),
            without("sub"),
            without("aud"),
            without("iss"),
            good.replacen("ey", "eX", 1),
            format!("{good}x"),
        ];
        for token in &bad {
            door.refuses(token, Code::Unauthenticated, INVALID_TOKEN).await;
        }
        assert_eq!(door.keyward.metrics.jwts_refused.get(), bad.len() as u64);
        assert_eq!(door.token_of(&door.shows(&good).await).await.as_deref(), Some("alice.1"), "the good one");
    });
}

#[test]
fn where_jwts_do_not_count_one_is_a_bad_token() {
    paused(async {
        let door = Door::new("identify = [\"token\", \"default\"]\ndefault_user = \"bob\"\n");
        let good = door.issuer.token(&claims("alice"));
        door.refuses(&good, Code::Unauthenticated, INVALID_TOKEN).await;
    });
}

#[test]
fn rules_and_keys_that_were_replaced_decide_no_later_call() {
    paused(async {
        let door = Door::new("");
        let (mine, another) = (door.issuer.token(&claims("alice")), Issuer::new());
        let client = door.shows(&mine).await;
        assert_eq!(door.token_of(&client).await.as_deref(), Some("alice.1"));
        let folder = tempfile::tempdir().expect("a folder");
        let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).expect("written");
        write("bob", "right");
        write("ci.pem", &door.issuer.0.public_key_pem());
        let lines = format!(
            "[[jwt]]\nissuer = \"{ISSUER}\"\naudience = \"etcd\"\nkeys = \"ci.pem\"\n\
             [mapping]\ndefault = \"bob\"\n[[user]]\nname = \"bob\"\npassword_file = \"bob\"\n"
        );
        door.keyward.publish_rules(folder.path(), "", &lines);
        assert_eq!(door.token_of(&client).await.as_deref(), Some("bob.2"));
        write("ci.pem", &another.0.public_key_pem());
        door.keyward.publish_rules(folder.path(), "", &lines);
        let end = client.call(RANGE, range("k")).await.end;
        assert_eq!(end.told(), (Code::Unauthenticated, INVALID_TOKEN));
        let client = door.shows(&another.token(&claims("alice"))).await;
        assert_eq!(door.token_of(&client).await.as_deref(), Some("bob.2"));
    });
}

#[test]
fn a_jwt_is_no_login_that_could_stand_for_others() {
    paused(async {
        let door = Door::new("lend_login_identity = true\nidentify = [\"token\", \"jwt\"]\n");
        let client = door.keyward.client().await;
        let grant = LeaseGrantRequest { ttl: 5, id: 1 }.encode_to_vec();
        crate::rig::log_in(&client, "alice").await;
        let mut client = client.header("token", &door.issuer.token(&claims("bob")));
        assert_eq!(door.token_of(&client).await.as_deref(), Some("bob.2"));
        client.headers.clear();
        let end = client.call("/etcdserverpb.Lease/LeaseGrant", &grant).await.end;
        assert_eq!(end.told(), (Code::InvalidArgument, "etcdserver: user name is empty"));
        assert!(door.member.was_called_again().is_none());
    });
}

/// A watch of a client whose JWT ends in ten minutes, half an hour later: what ended it, if anything.
async fn outlived(listener: &str) -> Option<(Code, String)> {
    let door = Door::new(listener);
    let client = door.shows(&door.issuer.token(&claims("alice"))).await;
    let (mut stream, _upstream) = watching(&client, &door.member).await;
    let ended = in_half_an_hour(&mut stream).await;
    assert!(!client.is_closed(), "others may call over the connection");
    ended
}

#[test]
fn a_stream_ends_with_the_jwt_that_opened_it() {
    paused(async {
        assert_eq!(outlived("").await, Some((Code::Unauthenticated, INVALID_TOKEN.to_owned())));
    });
}

#[test]
fn or_goes_on_where_the_listener_says_so() {
    paused(async {
        assert_eq!(outlived("on_expiry = \"keep\"\n").await, None);
    });
}
