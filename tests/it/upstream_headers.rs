//! A member sees what we let it see, and as whom we say (rules 6, 9).

use std::collections::BTreeMap;

use keyward::members::membership::AuthSetting;
use keyward::tasks::Tasks;

use crate::member::Member;
use crate::rig::{Keyward, one_member, paused};
use crate::words::{RANGE, WATCH, range, ranged, watch};

fn seen(headers: &http::HeaderMap) -> BTreeMap<&str, Vec<&str>> {
    let mut seen: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (name, value) in headers {
        seen.entry(name.as_str()).or_default().push(value.to_str().expect("text"));
    }
    seen
}

#[test]
fn only_what_is_on_the_list_arrives() {
    paused(async {
        let (member, keyward) = one_member();
        let client = keyward.client().await;
        let client = [
            ("grpcgateway-accept", "x"),
            ("grpcgateway-authorization", "stolen"),
            ("grpc-metadata-token", "stolen"),
            ("cookie", "c"),
            ("x-forwarded-for", "1.1.1.1"),
            ("client-api-version", "99.9"),
            ("hasleader", "true"),
            ("user-agent", "grpc-go/1.72"),
            ("traceparent", "00-1-1-00"),
            ("tracestate", "a=b"),
            ("grpc-timeout", "30S"),
        ]
        .into_iter()
        .fold(client, |client, (name, value)| client.header(name, value));
        let script = async {
            let call = member.called(RANGE).await;
            let expected = [
                ("client-api-version", "3.5"),
                ("content-type", "application/grpc"),
                ("grpc-timeout", "30S"),
                // Ours: this client shows no token, and is not whom our certificate names.
                ("grpcgateway-accept", "*/*"),
                ("hasleader", "true"),
                ("te", "trailers"),
                ("traceparent", "00-1-1-00"),
                ("tracestate", "a=b"),
                ("user-agent", "grpc-go/1.72"),
            ];
            let mut arrived = seen(&call.headers);
            arrived.remove("content-length");
            assert_eq!(arrived, expected.map(|(name, value)| (name, vec![value])).into());
            assert_eq!(call.uri.authority().map(|authority| authority.as_str()), Some("1.member.test:2379"));
            call.reply(&ranged(1)).await;
        };
        let (outcome, ()) = tokio::join!(client.call(RANGE, range("k")), script);
        outcome.message();
    });
}

#[test]
fn exactly_one_token_arrives_and_it_is_ours() {
    paused(async {
        let member = Member::new(1, &Tasks::default());
        let keyward = Keyward::with_auth(&[&member]);
        let client = keyward.logged_in("alice").await.header("grpcgateway-accept", "x");
        let session = client.headers["token"].to_str().expect("text").to_owned();
        let script = async {
            for _ in 0..2 {
                let call = member.call().await;
                assert_eq!(seen(&call.headers)["token"], ["alice.1"]);
                assert!(!call.headers.contains_key("authorization"));
                assert!(!format!("{:?}", call.headers).contains(&session), "the session stays here");
                match call.path() {
                    RANGE => call.reply(&ranged(1)).await,
                    path => assert_eq!(path, WATCH),
                }
            }
        };
        let calls = async {
            client.call(RANGE, range("k")).await.message();
            let mut stream = client.open(WATCH).await.expect("open");
            stream.say(&watch("k", 5)).await;
            stream
        };
        let (_stream, ()) = tokio::join!(calls, script);
        assert_eq!(member.logins(), 1);
    });
}

#[test]
fn no_token_is_injected_while_auth_is_off() {
    paused(async {
        let member = Member::new(1, &Tasks::default());
        let keyward = Keyward::configured(&[&member], AuthSetting::Off, "");
        let client = keyward.logged_in("alice").await;
        let script = async {
            let call = member.called(RANGE).await;
            assert_eq!(call.token(), None);
            call.reply(&ranged(1)).await;
        };
        let (outcome, ()) = tokio::join!(client.call(RANGE, range("k")), script);
        outcome.message();
        assert_eq!(member.logins(), 0, "such a login proves nothing and asks nobody");
    });
}

#[test]
fn a_bad_token_is_refused_here_and_never_falls_back() {
    paused(async {
        let (member, keyward) = one_member();
        keyward.members.auth.set(AuthSetting::On);
        for (name, value) in
            [("token", "kw1_garbage"), ("authorization", "Bearer foreign.12"), ("authorization", "x.1")]
        {
            let client = keyward.client().await.header(name, value);
            let outcome = client.call(RANGE, range("k")).await;
            let told = (keyward::refusal::Code::Unauthenticated, crate::words::INVALID_TOKEN);
            assert_eq!(outcome.end.told(), told);
        }
        assert!(member.was_called_again().is_none(), "nothing was sent");
    });
}
