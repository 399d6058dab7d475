//! Clients whose `:authority` is none: served where the listener says so, and only they are touched.

use keyward::members::membership::AuthSetting;
use keyward::tasks::Tasks;

use crate::client::Client;
use crate::member::Member;
use crate::raw_client::{GOAWAY, PROTOCOL_ERROR, RST_STREAM, RawClient, SETTINGS};
use crate::rig::{Keyward, paused};
use crate::words::{RANGE, range, ranged};

const ODD: &str = "#initially=[127.0.0.1:2379]";

fn keyward(accept: &str) -> (Member, Keyward) {
    let member = Member::new(1, &Tasks::default());
    let folder = tempfile::tempdir().expect("a folder");
    let keyward = Keyward::at(&[&member], AuthSetting::Off, folder.path(), accept, "");
    (member, keyward)
}

fn counted(keyward: &Keyward) -> (u64, String) {
    let text = keyward.metrics.text().expect("text");
    let refused = text.lines().filter(|line| line.starts_with("keyward_odd_authority_refused_total"));
    (keyward.metrics.odd_authority.connections.get(), refused.collect())
}

#[test]
fn such_a_client_is_served_call_after_call() {
    paused(async {
        let (member, keyward) = keyward("");
        for odd in [ODD, "/run/keyward.sock", "run%2Fkeyward.sock"] {
            let mut raw = RawClient::connect(&keyward).await;
            for call in 0..3 {
                raw.asks(2 * call + 1, odd).await;
                let mut called = member.called(RANGE).await;
                assert_eq!(called.message().await, range("k"));
                called.reply(&ranged(7)).await;
                let data = raw.next(0).await.expect("an answer");
                assert!(data.ends_with(&ranged(7)), "{data:?}");
            }
        }
        assert_eq!(counted(&keyward), (3, String::new()));
    });
}

#[test]
fn where_the_listener_says_no_the_library_refuses_it() {
    paused(async {
        let (member, keyward) = keyward("accept_odd_authority = false\n");
        let mut raw = RawClient::connect(&keyward).await;
        raw.asks(1, ODD).await;
        assert_eq!(raw.next(RST_STREAM).await.expect("refused"), PROTOCOL_ERROR);
        assert_eq!(counted(&keyward).0, 0);
        // It was that stream's fault only.
        raw.asks(3, "etcd").await;
        member.called(RANGE).await.reply(&ranged(1)).await;
        assert!(raw.next(0).await.is_some());
    });
}

/// The first request decides for its connection: a later odd one on an ordinary connection is refused as ever.
#[test]
fn an_ordinary_connection_stays_in_the_librarys_hands() {
    paused(async {
        let (member, keyward) = keyward("");
        let mut raw = RawClient::connect(&keyward).await;
        raw.asks(1, "etcd").await;
        member.called(RANGE).await.reply(&ranged(1)).await;
        assert!(raw.next(0).await.is_some());
        raw.asks(3, ODD).await;
        assert_eq!(raw.next(RST_STREAM).await.expect("refused"), PROTOCOL_ERROR);
        assert_eq!(counted(&keyward), (0, String::new()));
    });
}

#[test]
fn what_is_in_doubt_ends_with_goaway_and_is_counted() {
    paused(async {
        let (member, keyward) = keyward("");
        let mut raw = RawClient::connect(&keyward).await;
        raw.asks(1, ODD).await;
        member.called(RANGE).await.reply(&ranged(1)).await;
        assert!(raw.next(0).await.is_some());
        // A request without an authority.
        raw.frame(1, 5, 3, &[0x83, 0x86, 0x84]).await;
        let last = raw.next(GOAWAY).await.expect("a GOAWAY");
        assert_eq!(last[4..8], PROTOCOL_ERROR);
        assert_eq!(raw.next(255).await, None, "closed");
        let refused = "keyward_odd_authority_refused_total{reason=\"authority\"} 1";
        assert_eq!(counted(&keyward), (1, refused.to_owned()));
    });
}

/// Our table's size is HTTP/2's default: that of the shim, which reads by a table of its own.
#[test]
fn no_other_table_size_is_announced() {
    paused(async {
        let (_member, keyward) = keyward("");
        let mut raw = RawClient::connect(&keyward).await;
        let settings = raw.next(SETTINGS).await.expect("settings");
        assert!(
            !settings.is_empty() && settings.chunks(6).all(|setting| setting[..2] != [0, 1]),
            "{settings:?}"
        );
    });
}

#[test]
fn a_client_of_another_library_is_untouched() {
    paused(async {
        let (member, keyward) = keyward("");
        let client = Client::over(keyward.connect(), &keyward.tasks).await;
        let script = async { member.called(RANGE).await.reply(&ranged(1)).await };
        tokio::join!(client.call(RANGE, range("k")), script).0.message();
        assert_eq!(counted(&keyward), (0, String::new()));
    });
}
