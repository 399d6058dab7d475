//! A login that stands for calls which show nothing (rules 14): leases and members only, and only while it is alone.

use keyward::members::membership::AuthSetting;
use keyward::pb::etcdserverpb::{LeaseGrantRequest, MemberListRequest};
use keyward::refusal::Code;
use keyward::tasks::Tasks;
use prost::Message as _;

use crate::client::Client;
use crate::http1::told;
use crate::member::Member;
use crate::rig::{Keyward, log_in, paused};
use crate::words::{KEEP_ALIVE, RANGE, range, ranged, renew, renewed};

const GRANT: &str = "/etcdserverpb.Lease/LeaseGrant";
const LIST: &str = "/etcdserverpb.Cluster/MemberList";

fn door(listener: &str) -> (Member, Keyward) {
    let member = Member::new(1, &Tasks::default());
    let folder = tempfile::tempdir().expect("a folder");
    let lines = "[policy]\nrequire_identity = \"as-etcd\"\n";
    let keyward = Keyward::at(&[&member], AuthSetting::On, folder.path(), listener, lines);
    (member, keyward)
}

fn body(path: &str) -> Vec<u8> {
    match path {
        RANGE => range("k"),
        GRANT => LeaseGrantRequest { ttl: 5, id: 1 }.encode_to_vec(),
        _ => MemberListRequest::default().encode_to_vec(),
    }
}

/// With which token a call that shows nothing reaches the member.
async fn token_of(member: &Member, client: &Client, path: &'static str) -> Option<String> {
    let script = async {
        let call = member.called(path).await;
        let token = call.token().map(str::to_owned);
        call.reply(&ranged(1)).await;
        token
    };
    let (_, token) = tokio::join!(client.call(path, body(path)), script);
    token
}

#[test]
fn a_login_stands_for_leases_and_members_and_nothing_else() {
    paused(async {
        let (member, keyward) = door("lend_login_identity = true\n");
        let client = keyward.client().await;
        assert_eq!(token_of(&member, &client, GRANT).await, None, "nobody has logged in");
        log_in(&client, "alice").await;
        assert_eq!(token_of(&member, &client, GRANT).await.as_deref(), Some("alice.1"));
        assert_eq!(token_of(&member, &client, LIST).await.as_deref(), Some("alice.1"));
        assert_eq!(token_of(&member, &client, RANGE).await, None);
        let mut stream = client.begin(KEEP_ALIVE, renew(7)).await.expect("a stream");
        let mut upstream = member.called(KEEP_ALIVE).await;
        assert_eq!(upstream.token(), Some("alice.1"));
        upstream.messages.next().await.expect("a renewal");
        upstream.say(&renewed(7, 9)).await.expect("said");
        stream.next().await.expect("renewed");
        let other = keyward.client().await;
        assert_eq!(token_of(&member, &other, GRANT).await, None, "another connection");
    });
}

#[test]
fn not_where_two_have_appeared_however_they_did() {
    paused(async {
        let (member, keyward) = door("lend_login_identity = true\n");
        let client = keyward.client().await;
        log_in(&client, "alice").await;
        log_in(&client, "alice").await;
        assert_eq!(token_of(&member, &client, GRANT).await.as_deref(), Some("alice.1"));
        log_in(&client, "bob").await;
        assert_eq!(token_of(&member, &client, GRANT).await, None);
        log_in(&client, "alice").await;
        assert_eq!(token_of(&member, &client, GRANT).await, None, "for good");

        let client = keyward.client().await;
        log_in(&client, "alice").await;
        let elsewhere = log_in(&keyward.client().await, "bob").await;
        let client = client.header("token", &elsewhere);
        assert_eq!(token_of(&member, &client, RANGE).await.as_deref(), Some("bob.2"));
        let mut client = client;
        client.headers.clear();
        assert_eq!(token_of(&member, &client, GRANT).await, None);
    });
}

/// A reverse proxy shares its connections among its clients.
#[test]
fn not_on_a_connection_with_calls_over_json() {
    paused(async {
        let (member, keyward) = door("lend_login_identity = true\n");
        let post = |path: &str, fields: &str, body: &str| {
            let length = body.len();
            format!("POST {path} HTTP/1.1\r\nHost: x\r\n{fields}Content-Length: {length}\r\n\r\n{body}")
        };
        let login = post("/v3/auth/authenticate", "", r#"{"name":"alice","password":"right"}"#);
        let grant = post("/v3/lease/grant", "Connection: close\r\n", r#"{"TTL":"5","ID":"1"}"#);
        let script = async {
            let call = member.called(GRANT).await;
            let token = call.token().map(str::to_owned);
            call.reply(&[]).await;
            token
        };
        let both = login + &grant;
        let (token, answers) = tokio::join!(script, told(keyward.connect(), both.as_bytes()));
        assert_eq!(answers.matches("HTTP/1.1 200 OK").count(), 2, "{answers}");
        assert_eq!(token, None);
    });
}

#[test]
fn not_where_nobody_asked_for_it() {
    paused(async {
        let (member, keyward) = door("");
        let client = keyward.client().await;
        log_in(&client, "alice").await;
        assert_eq!(token_of(&member, &client, GRANT).await, None);
    });
}

#[test]
fn a_login_that_ended_stands_for_nobody() {
    paused(async {
        let (member, keyward) = door("lend_login_identity = true\nidentify = [\"token\"]\n");
        let client = keyward.client().await;
        let end = client.call(GRANT, body(GRANT)).await.end;
        assert_eq!(end.told(), (Code::InvalidArgument, "etcdserver: user name is empty"));
        log_in(&client, "alice").await;
        assert_eq!(token_of(&member, &client, GRANT).await.as_deref(), Some("alice.1"));
        keyward.sealer.refuse_before(u64::MAX);
        let end = client.call(GRANT, body(GRANT)).await.end;
        assert_eq!(end.told(), (Code::Unauthenticated, "etcdserver: invalid auth token"));
        assert!(member.was_called_again().is_none());
    });
}
