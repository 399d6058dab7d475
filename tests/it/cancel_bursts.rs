//! Many streams cancelled at once end nothing but themselves (rules 39), towards clients and towards members.

use std::collections::HashSet;

use keyward::refusal::Code;

use crate::rig::{one_member, paused, settled};
use crate::words::{RANGE, range, ranged};

/// Cancels `count` calls at once while one goes on.
async fn burst(count: usize) {
    let (member, keyward) = one_member();
    let client = keyward.client().await;
    let survivor = client.begin(RANGE, range("survivor")).await.expect("sent");
    let mut streams = Vec::new();
    for _ in 0..count {
        streams.push(client.begin(RANGE, range("k")).await.expect("sent"));
    }
    let mut calls = Vec::new();
    for _ in 0..=count {
        calls.push(member.call().await);
    }
    let dialled = member.dials();
    streams.into_iter().for_each(|stream| stream.cancel());
    let at = calls.iter().position(|call| call.path() == RANGE).expect("calls came");
    let survived = calls.remove(at);
    for call in &mut calls {
        call.canceled().await;
    }
    settled().await;
    assert!(!client.is_closed(), "the client's connection lives");
    let script = async { survived.reply(&ranged(1)).await };
    let (outcome, ()) = tokio::join!(survivor.finish(), script);
    assert_eq!(outcome.end.code(), Some(Code::Ok));
    let script = async { member.called(RANGE).await.reply(&ranged(2)).await };
    let (outcome, ()) = tokio::join!(client.call(RANGE, range("after")), script);
    assert_eq!(outcome.end.code(), Some(Code::Ok));
    assert_eq!(member.dials(), dialled, "the connections to the member live");
    assert_eq!(keyward.metrics.calls_with(Code::Canceled as u8), count as u64);
}

#[test]
fn sixty_cancelled_streams_end_only_themselves() {
    paused(burst(60));
}

#[test]
fn a_thousand_cancelled_streams_end_only_themselves() {
    paused(burst(1000));
}

/// Cancelled before any of them was answered or even sent on.
#[test]
fn streams_cancelled_as_soon_as_they_are_opened_end_only_themselves() {
    paused(async {
        let (member, keyward) = one_member();
        let client = keyward.client().await;
        for _ in 0..1000 {
            client.begin(RANGE, range("k")).await.expect("sent").cancel();
        }
        settled().await;
        assert!(!client.is_closed());
        while member.was_called_again().is_some() {}
        let script = async { member.called(RANGE).await.reply(&ranged(2)).await };
        let (outcome, ()) = tokio::join!(client.call(RANGE, range("after")), script);
        assert_eq!(outcome.end.code(), Some(Code::Ok));
    });
}

/// A burst of calls is spread over as many connections as the member's limit on streams asks for (rules 22, 41).
#[test]
fn a_burst_of_calls_does_not_pile_up_on_one_connection() {
    paused(async {
        let mut settings = h2::server::Builder::new();
        settings.max_concurrent_streams(100).initial_connection_window_size(64 << 20);
        let tasks = keyward::tasks::Tasks::default();
        let member = crate::member::Member::with(1, &tasks, settings);
        let keyward = crate::rig::Keyward::before(&[&member]);
        let client = keyward.client().await;
        let mut streams = Vec::new();
        for _ in 0..300 {
            streams.push(client.begin(RANGE, range("k")).await.expect("sent"));
        }
        let mut calls = Vec::new();
        for _ in 0..300 {
            calls.push(member.call().await);
        }
        assert!(member.dials() >= 3, "{} connections", member.dials());
        assert!(member.dials() <= 6, "{} connections", member.dials());
        let paths: HashSet<_> = calls.iter().map(|call| call.path().to_owned()).collect();
        assert_eq!(paths.len(), 1);
    });
}
