//! A read that takes long is made at a second member too, where that is configured: one read, one second.

use std::time::Duration;

use futures_util::future::join_all;
use h2::Reason;
use keyward::identity::ClusterId;
use keyward::members::membership::AuthSetting;
use keyward::pb::etcdserverpb::RangeRequest;
use keyward::refusal::Code;
use keyward::tasks::Tasks;
use prost::Message as _;
use tokio::time::sleep;

use crate::client::Client;
use crate::logins::session;
use crate::member::{Call, Member, next_of};
use crate::rig::{Keyward, paused, settled, three, three_with};
use crate::words::{PUT, RANGE, TXN, put, range, ranged};

const ON: &str = "hedge_after = \"100ms\"\n";
const SOON: Duration = Duration::from_millis(90);
/// Past that, and before any other reason to send a call again.
const LATER: Duration = Duration::from_secs(2);
const NO_SUCH: (Code, &str) = (Code::OutOfRange, "etcdserver: mvcc: required revision is a future revision");

fn come(members: &[Member]) -> Vec<Call> {
    members.iter().flat_map(|member| std::iter::from_fn(|| member.was_called_again())).collect()
}

/// How many members see a call that nobody answers for a while.
async fn asked(client: &Client, members: &[Member], path: &str, message: &[u8]) -> usize {
    let stream = client.begin(path, message).await.expect("sent");
    sleep(LATER).await;
    let calls = come(members);
    stream.cancel();
    settled().await;
    calls.len()
}

#[test]
fn only_linearizable_reads_that_any_member_can_serve_are_made_twice_and_only_where_that_is_configured() {
    paused(async {
        let read = |serializable, limit| {
            let (key, range_end) = ("a".into(), if limit > 1 { "b".into() } else { "".into() });
            RangeRequest { key, range_end, limit, serializable, ..RangeRequest::default() }.encode_to_vec()
        };
        let (members, keyward) = three();
        let client = keyward.client().await;
        assert_eq!(asked(&client, &members, RANGE, &range("k")).await, 1, "off by default");
        let (members, keyward) = three_with(ON);
        let client = keyward.client().await;
        for (path, message, calls) in [
            (RANGE, read(false, 1), 2),
            (RANGE, read(false, 9), 2),
            (RANGE, read(true, 1), 1),
            (RANGE, read(false, 100_000), 1),
            (PUT, put(1), 1),
            (TXN, b"\x12\x02\x12\x00".to_vec(), 1),
        ] {
            assert_eq!(asked(&client, &members, path, &message).await, calls, "{path} {message:?}");
        }
        assert_eq!(keyward.metrics.tries.hedged.get(), 2);
        let (members, keyward) = three_with(&format!("{ON}reads = \"leader\"\n"));
        let client = keyward.client().await;
        assert_eq!(asked(&client, &members, RANGE, &range("k")).await, 1, "the leader is wanted");
    });
}

#[test]
fn the_second_answers_and_the_first_is_reset() {
    paused(async {
        let (members, keyward) = three_with(ON);
        let client = keyward.client().await;
        let script = async {
            let (slow, mut first) = next_of(&members).await;
            sleep(SOON).await;
            assert!(come(&members).is_empty(), "not yet");
            let (at, second) = next_of(&members).await;
            assert_ne!(at, slow);
            second.reply(&ranged(7)).await;
            assert_eq!(first.canceled().await, Reason::CANCEL);
        };
        let (outcome, ()) = tokio::join!(client.call(RANGE, range("k")), script);
        assert_eq!(outcome.message(), &ranged(7));
        let tries = &keyward.metrics.tries;
        assert_eq!((tries.hedged.get(), tries.hedges_won.get()), (1, 1));
        assert!(come(&members).is_empty());
        let in_flight =
            keyward.members.snapshot.load().members.iter().map(|m| m.load.in_flight()).sum::<u32>();
        assert_eq!(in_flight, 0);
    });
}

#[test]
fn the_first_good_answer_counts_whoever_gives_it() {
    paused(async {
        let (members, keyward) = three_with(ON);
        let client = keyward.client().await;
        // The second is lost, or has no leader: the first is waited for.
        for is_cut in [false, true] {
            let script = async {
                let (_, first) = next_of(&members).await;
                let (at, second) = next_of(&members).await;
                if is_cut {
                    members[at].cut();
                } else {
                    second.refuse(Code::Unavailable, "etcdserver: no leader");
                }
                sleep(SOON).await;
                first.reply(&ranged(7)).await;
            };
            let (outcome, ()) = tokio::join!(client.call(RANGE, range("k")), script);
            assert_eq!(outcome.message(), &ranged(7));
            keyward.probed();
        }
        // The first is: the second is waited for.
        let script = async {
            let (_, first) = next_of(&members).await;
            let (_, second) = next_of(&members).await;
            first.refuse(Code::Unavailable, "etcdserver: no leader");
            sleep(SOON).await;
            second.reply(&ranged(8)).await;
        };
        let (outcome, ()) = tokio::join!(client.call(RANGE, range("k")), script);
        assert_eq!(outcome.message(), &ranged(8));
        // What is true of the request is an answer.
        let script = async {
            let (_, _first) = next_of(&members).await;
            let (_, second) = next_of(&members).await;
            second.refuse(NO_SUCH.0, NO_SUCH.1);
            sleep(SOON).await;
        };
        let (outcome, ()) = tokio::join!(client.call(RANGE, range("k")), script);
        assert_eq!(outcome.end.told(), NO_SUCH);
        assert!(come(&members).is_empty(), "and nothing was sent beside");
    });
}

#[test]
fn second_members_are_asked_within_what_may_be_sent_again() {
    paused(async {
        let (members, keyward) = three_with(ON);
        let client = keyward.client().await;
        let reads = join_all((0..2000).map(|_| client.begin(RANGE, range("k")))).await;
        sleep(Duration::from_millis(200)).await;
        let calls = come(&members);
        let hedged = keyward.metrics.tries.hedged.get();
        // What a shard has saved up at first, a fifth of the calls, 20 a second.
        assert!((500..=500 + 400 + 20).contains(&hedged), "{hedged}");
        assert_eq!(calls.len() as u64, 2000 + hedged);
        drop((reads, calls));
    });
}

/// Who calls was decided of the cluster that was served when it came.
#[test]
fn no_second_is_asked_in_another_cluster() {
    paused(async {
        let (members, keyward) = three_with(ON);
        let client = keyward.client().await;
        let read = client.begin(RANGE, range("k")).await.expect("sent");
        let (_, first) = next_of(&members).await;
        keyward.publish(|membership| membership.cluster = Some(ClusterId(0xc2)));
        sleep(LATER).await;
        assert!(come(&members).is_empty());
        assert_eq!(keyward.metrics.tries.hedged.get(), 0);
        first.reply(&ranged(7)).await;
        assert_eq!(read.finish().await.end.code(), Some(Code::Ok));
    });
}

#[test]
fn the_first_may_answer_while_the_second_is_still_to_be_asked_as_whom() {
    paused(async {
        let tasks = Tasks::default();
        let members: Vec<_> = (1..=2).map(|id| Member::new(id, &tasks)).collect();
        let lines = format!("{ON}[limits]\nmember_in_flight = 1\n[runtime]\nshards = 1\n");
        let keyward = Keyward::configured(&members.iter().collect::<Vec<_>>(), AuthSetting::On, &lines);
        let token = keyward.sealer.seal(&session("alice", "right")).expect("it fits");
        let client = keyward.client().await.header("token", token.expose());
        let read = client.begin(RANGE, range("k")).await.expect("sent");
        let (at, first) = next_of(&members).await;
        let other = &members[1 - at];
        other.hold_logins(true);
        sleep(Duration::from_millis(200)).await;
        assert_eq!(other.logins(), 1, "it is proved there");
        let taken = keyward.members.snapshot.load().members[1 - at].load.queue.waiting();
        assert_eq!((taken, keyward.metrics.tries.hedged.get()), (0, 0));
        first.reply(&ranged(7)).await;
        assert_eq!(read.finish().await.message(), &ranged(7));
        other.hold_logins(false);
        settled().await;
        assert!(come(&members).is_empty());
    });
}
