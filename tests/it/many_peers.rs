//! Many peers over one connection: each call goes upstream as whoever it shows, whatever came before it or comes beside it.

use std::path::Path;

use data_encoding::BASE64URL_NOPAD;
use futures_util::future::join_all;
use http::HeaderValue;
use keyward::members::membership::AuthSetting;
use keyward::pb::etcdserverpb::RangeRequest;
use keyward::refusal::Code;
use keyward::secret::Secret;
use keyward::tasks::Tasks;
use keyward::users::{self, Cost};
use prost::Message as _;
use ring::rand::SystemRandom;
use ring::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair};
use serde_json::json;

use crate::authority::{Authority, connect};
use crate::client::{Client, Stream};
use crate::member::Member;
use crate::rig::{Keyward, log_in, log_in_with, paused, settled};
use crate::words::{INVALID_TOKEN, RANGE, range, ranged};

const ISSUER: &str = "https://ci.test";
const LISTENER: &str = "tls = { cert = 'server.crt', key = 'server.key', client_ca = 'ca.crt', \
                        client_ca_name = 'staff', client_auth = 'optional' }\n";

/// Everybody is the etcd user of its own name, but carol, whose certificate the connection shows.
struct Door {
    authority: Authority,
    issuer: rcgen::KeyPair,
    member: Member,
    keyward: Keyward,
}

impl Door {
    fn new(folder: &Path) -> Self {
        let (authority, issuer) = (Authority::new(), rcgen::KeyPair::generate().expect("a key"));
        authority.write(folder, "ca");
        let hash = users::hash(&Secret::new("hers".to_owned()), Cost { memory: 8, passes: 1 });
        let write = |name: &str, text: &str| std::fs::write(folder.join(name), text).expect("written");
        write("users", &format!("fiona:{}\n", hash.expect("hashed")));
        write("ci.pem", &issuer.public_key_pem());
        write("password", "right");
        let mut lines = format!(
            "[login]\nsources = ['file', 'etcd']\nusers_file = 'users'\n\
             [[jwt]]\nissuer = '{ISSUER}'\naudience = 'etcd'\nkeys = 'ci.pem'\n\
             [[map]]\npeer = 'file:*'\nas = 'same'\n\
             [[map]]\npeer = 'cert:staff:CN=*'\nas = 'same'\n\
             [[map]]\npeer = 'jwt:{ISSUER}:*'\nas = 'same'\n"
        );
        for user in ["fiona", "carol", "ci", "cd"] {
            lines += &format!("[[user]]\nname = '{user}'\npassword_file = 'password'\n");
        }
        let member = Member::new(1, &Tasks::default());
        let keyward = Keyward::at(&[&member], AuthSetting::On, folder, LISTENER, &lines);
        Self { authority, issuer, member, keyward }
    }

    /// Over one connection, with carol's certificate.
    async fn client(&self) -> Client {
        let shown = self.authority.client("carol");
        let io = connect(self.keyward.connect(), self.authority.tls(Some(&shown))).await;
        Client::over(io.expect("a handshake"), &self.keyward.tasks).await
    }

    fn jwt(&self, subject: &str) -> String {
        let claims = json!({ "iss": ISSUER, "aud": "etcd", "sub": subject, "exp": 99_999_999_999_u64 });
        let part = |text: String| BASE64URL_NOPAD.encode(text.as_bytes());
        let signed = format!("{}.{}", part(json!({ "alg": "ES256" }).to_string()), part(claims.to_string()));
        let (random, by) = (SystemRandom::new(), &ECDSA_P256_SHA256_FIXED_SIGNING);
        let key = EcdsaKeyPair::from_pkcs8(by, &self.issuer.serialize_der(), &random).expect("P-256");
        let signature = key.sign(&random, signed.as_bytes()).expect("signed");
        format!("{signed}.{}", BASE64URL_NOPAD.encode(signature.as_ref()))
    }
}

/// Begins a read of its own name, so that a member knows whose it is.
async fn begin(client: &mut Client, (name, token): &(&'static str, Option<String>)) -> Stream {
    client.headers.clear();
    if let Some(token) = token {
        client.headers.insert("token", HeaderValue::try_from(token).expect("a header"));
    }
    client.begin(RANGE, range(name)).await.expect("a call")
}

#[test]
fn each_call_is_whom_it_shows_whatever_was_shown_before_it_or_is_beside_it() {
    paused(async {
        let folder = tempfile::tempdir().expect("a folder");
        let door = Door::new(folder.path());
        let mut client = door.client().await;
        let peers = [
            ("alice", Some(log_in(&client, "alice").await)),
            ("bob", Some(log_in(&client, "bob").await)),
            ("fiona", Some(log_in_with(&client, "fiona", "hers").await)),
            ("ci", Some(door.jwt("ci"))),
            ("cd", Some(door.jwt("cd"))),
            ("carol", None),
        ];
        let mut served = 0;
        for turn in 0..40 {
            // Another order each time, and now and then a token that is none.
            let order: Vec<_> = (0..peers.len()).map(|n| (n * (turn % 5 + 1) + turn) % peers.len()).collect();
            let bad = ("mallory", Some(["", "kw1_x", "a.b.c", "x.1"][turn % 4].to_owned()));
            let refused = begin(&mut client, &bad).await;
            let mut calls = Vec::new();
            for &n in &order {
                calls.push(begin(&mut client, &peers[n]).await.finish());
            }
            let script = async {
                for _ in 0..order.len() {
                    let mut upstream = door.member.called(RANGE).await;
                    let token = upstream.token().map(str::to_owned);
                    let asked = RangeRequest::decode(upstream.message().await).expect("a Range");
                    let name = String::from_utf8(asked.key.to_vec()).expect("a name");
                    let user = token.as_deref().and_then(|token| token.split('.').next());
                    assert_eq!(user, Some(name.as_str()), "turn {turn}");
                    upstream.reply(&ranged(1)).await;
                }
            };
            let (refused, answers, ()) = tokio::join!(refused.finish(), join_all(calls), script);
            assert_eq!(refused.end.told(), (Code::Unauthenticated, INVALID_TOKEN));
            assert!(answers.iter().all(|answer| answer.end.code() == Some(Code::Ok)), "turn {turn}");
            served += answers.len();
        }
        settled().await;
        assert!(door.member.was_called_again().is_none());
        assert_eq!(served, 240);
    });
}
