//! Traces: what goes to members, and a collector that takes nothing. The spans themselves: `tests/etcd/traces.rs`.

use std::net::{Ipv4Addr, TcpListener};

use keyward::members::membership::AuthSetting;
use keyward::refusal::Code;
use keyward::rpc::trace_id::{TRACEPARENT, TRACESTATE, TraceParent};
use keyward::tasks::Tasks;

use crate::member::Member;
use crate::rig::{Keyward, real};
use crate::words::{PUT, put, was_put};

const CLIENTS: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331";

/// A Keyward with a collector that accepts connections and answers nothing.
fn traced(lines: &str) -> (Member, Keyward, TcpListener) {
    let silent = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let port = silent.local_addr().expect("bound").port();
    let member = Member::new(1, &Tasks::default());
    let lines = format!("[trace]\nurl = \"http://127.0.0.1:{port}\"\n{lines}");
    let keyward = Keyward::configured(&[&member], AuthSetting::Off, &lines);
    (member, keyward, silent)
}

/// The `traceparent` that a member sees for that of a client.
async fn seen_by_member(member: &Member, keyward: &Keyward, sent: Option<&str>) -> Option<String> {
    let client = keyward.client().await;
    let client = match sent {
        Some(sent) => client.header(TRACEPARENT, sent).header(TRACESTATE, "a=b"),
        None => client,
    };
    let script = async {
        let call = member.called(PUT).await;
        let seen = call.headers.get(TRACEPARENT).map(|value| value.to_str().expect("text").to_owned());
        call.reply(&was_put(1)).await;
        seen
    };
    let (outcome, seen) = tokio::join!(client.call(PUT, put(8)), script);
    assert_eq!(outcome.end.code(), Some(Code::Ok));
    seen
}

#[test]
fn a_member_sees_the_attempts_span_in_the_clients_trace_and_an_untraced_header_as_it_came() {
    real(async {
        let (member, keyward, _silent) = traced("parents_per_second = 1\n");
        let sampled = format!("{CLIENTS}-01");
        let seen = seen_by_member(&member, &keyward, Some(&sampled)).await.expect("a header");
        let parent = |text: &str| {
            let headers = [(http::HeaderName::from_static(TRACEPARENT), text.parse().expect("a value"))];
            TraceParent::in_headers(&headers.into_iter().collect()).expect("well formed")
        };
        let (ours, theirs) = (parent(&seen), parent(&sampled));
        assert_eq!((ours.id, ours.is_sampled), (theirs.id, true));
        assert_ne!(ours.span, theirs.span, "the attempt has a span of its own");
        // Without a trace: the rate is used up (or the second is over, and the call has a trace); the client wants none; there
        // is no header.
        let over = seen_by_member(&member, &keyward, Some(&sampled)).await.expect("a header");
        let not_followed = keyward.metrics.export.parents_not_followed.get();
        assert_eq!(over == sampled, not_followed == 1, "{over} {not_followed}");
        for other in [format!("{CLIENTS}-00"), "malformed".to_owned()] {
            assert_eq!(seen_by_member(&member, &keyward, Some(&other)).await, Some(other));
        }
        assert_eq!(seen_by_member(&member, &keyward, None).await, None);
    });
}

#[test]
fn a_trace_of_keywards_own_has_no_state_of_a_malformed_one() {
    real(async {
        let (member, keyward, _silent) = traced("sample = 1.0\n");
        let client = keyward.client().await.header(TRACEPARENT, "malformed").header(TRACESTATE, "a=b");
        let script = async {
            let call = member.called(PUT).await;
            assert!(TraceParent::in_headers(&call.headers).is_some_and(|parent| parent.is_sampled));
            assert!(!call.headers.contains_key(TRACESTATE));
            call.reply(&was_put(1)).await;
        };
        let (outcome, ()) = tokio::join!(client.call(PUT, put(8)), script);
        assert_eq!(outcome.end.code(), Some(Code::Ok));
    });
}

#[test]
fn a_collector_that_answers_nothing_delays_no_call_and_its_spans_are_bounded_and_counted() {
    real(async {
        let (member, keyward, silent) = traced("sample = 1.0\nqueue = \"64KiB\"\n");
        let client = keyward.client().await;
        for revision in 1..=300 {
            let script = async { member.called(PUT).await.reply(&was_put(revision)).await };
            let (outcome, ()) = tokio::join!(client.call(PUT, put(8)), script);
            assert_eq!(outcome.end.code(), Some(Code::Ok));
        }
        let export = &keyward.metrics.export;
        assert!(export.lost("spans", "queue_full").get() > 0, "300 spans are more than 64 KiB");
        assert_eq!(export.sent("spans").get(), 0);
        drop(silent);
    });
}
