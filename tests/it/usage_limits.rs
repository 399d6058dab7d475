//! Limits on the usage of a peer, of a role's peers and of a listener: the call past a limit is refused at once and never
//! sent, a stream past a rate only slows down, and "shadow" counts.

use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use keyward::admin::view::ViewTopic;
use keyward::members::fitness::store_status::StoreStatus;
use keyward::members::membership::AuthSetting;
use keyward::pb::etcdserverpb::{
    LeaseGrantRequest, LeaseGrantResponse, LeaseKeepAliveRequest, LeaseRevokeRequest, LeaseRevokeResponse,
    RangeRequest, RangeResponse, RequestOp, TxnRequest, request_op,
};
use keyward::pb::mvccpb::KeyValue;
use keyward::pb::v3lockpb::LockRequest;
use keyward::refusal::Code;
use keyward::tasks::{TaskHandle, Tasks};
use prost::Message as _;
use tokio::time::Instant;

use crate::client::{Client, Stream};
use crate::member::{Call, Member};
use crate::rig::{Keyward, paused, settled};
use crate::words::{
    KEEP_ALIVE, PUT, RANGE, TXN, WATCH, cancel_watch, create_of, created, event, header, put, range, ranged,
    renew, renewed, txn_done, was_put, watch, watched,
};

const GRANT: &str = "/etcdserverpb.Lease/LeaseGrant";
const REVOKE: &str = "/etcdserverpb.Lease/LeaseRevoke";
const LOCK: &str = "/v3lockpb.Lock/Lock";
const TOO_MANY: (Code, &str) = (Code::ResourceExhausted, "etcdserver: too many requests");

/// Keyward with limits, before a member that answers every unary call at once.
struct Limited {
    folder: tempfile::TempDir,
    member: Rc<Member>,
    keyward: Keyward,
    _answers: TaskHandle,
}

impl Limited {
    /// With a policy of these lines, limits of the listener, and lines of configuration.
    fn new(policy: &str, listener: &str, lines: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("policy.toml"), policy).expect("written");
        let member = Rc::new(Member::new(1, &Tasks::default()));
        let keyward = Keyward::at(&[&member], AuthSetting::On, folder.path(), listener, &configured(lines));
        let answers = keyward.tasks.spawn("answers of the test", answer_all(Rc::clone(&member)));
        Self { folder, member, keyward, _answers: answers }
    }

    /// With limits of each peer.
    fn of_peers(limits: &str) -> Self {
        Self::new("", "", &format!("[policy.peer_limits]\n{limits}\n"))
    }

    async fn client(&self, user: &str) -> Client {
        self.keyward.logged_in(user).await
    }

    fn counted(&self, line: &str) -> bool {
        self.keyward.metrics.text().expect("text").lines().any(|counted| counted == line)
    }
}

fn configured(lines: &str) -> String {
    format!("[policy]\nfile = \"policy.toml\"\n{lines}")
}

/// Answers unary calls, and grants leases in order.
async fn answer_all(member: Rc<Member>) {
    let mut leases = 0;
    loop {
        let mut call = member.call().await;
        match call.path() {
            PUT => call.reply(&was_put(9)).await,
            TXN => call.reply(&txn_done(9)).await,
            GRANT => {
                leases += 1;
                call.reply(&granted(leases)).await;
            }
            REVOKE => {
                let answer = LeaseRevokeResponse { header: Some(header(9)) };
                call.reply(&answer.encode_to_vec()).await;
            }
            LOCK | WATCH | KEEP_ALIVE => drop(Box::leak(Box::new(call))),
            RANGE => {
                let asked = RangeRequest::decode(call.message().await).expect("a Range");
                call.reply(&keys(&asked, 100, 10)).await;
            }
            other => panic!("{other}"),
        }
    }
}

fn granted(id: i64) -> Vec<u8> {
    let answer = LeaseGrantResponse { header: Some(header(9)), id, ttl: 60, error: String::new() };
    answer.encode_to_vec()
}

/// The answer to a Range over this many keys of this size.
fn keys(asked: &RangeRequest, count: i64, size: usize) -> Vec<u8> {
    let wanted = match (asked.range_end.is_empty(), asked.limit) {
        (true, _) => 1,
        (false, 1..) => count.min(asked.limit),
        (false, _) => count,
    };
    let key = |number: i64| KeyValue {
        key: format!("k{number:03}").into(),
        value: vec![7; size].into(),
        ..KeyValue::default()
    };
    let kvs: Vec<_> = (0..wanted).map(key).collect();
    let more = wanted < count && !asked.range_end.is_empty();
    RangeResponse { header: Some(header(9)), kvs, more, count }.encode_to_vec()
}

fn all_keys(limit: i64) -> RangeRequest {
    RangeRequest { key: "\0".into(), range_end: "\0".into(), limit, ..RangeRequest::default() }
}

/// The number of calls, of `count` at once, that are served; the others are refused as etcd refuses.
async fn served(client: &Client, count: usize) -> usize {
    let calls = (0..count).map(|_| client.call(RANGE, range("k")));
    let outcomes = join_all(calls).await;
    for outcome in &outcomes {
        assert!(outcome.end.code() == Some(Code::Ok) || outcome.end.told() == TOO_MANY, "{outcome:?}");
    }
    outcomes.iter().filter(|outcome| outcome.end.code() == Some(Code::Ok)).count()
}

/// Waits for a call of the stream kind at a member that answers nothing by itself.
async fn open_watch(client: &Client, member: &Member) -> (Stream, Call) {
    let mut stream = client.open(WATCH).await.expect("open");
    stream.say(&watch("k", 1)).await;
    let mut call = loop {
        let call = member.call().await;
        match call.path() {
            WATCH => break call,
            // Keeps a token alive.
            _ => call.reply(&ranged(9)).await,
        }
    };
    let create = create_of(&call.messages.next().await.expect("a create")).expect("a create");
    call.begin();
    call.say(&created(create.watch_id, 1)).await.expect("said");
    assert!(watched(&stream.next().await.expect("created")).created);
    (stream, call)
}

#[test]
fn calls_beyond_burst_and_rate_are_refused_and_never_sent() {
    paused(async {
        let limited = Limited::of_peers("calls_per_second = 10\nburst = 15");
        let alice = limited.client("alice").await;
        assert_eq!(served(&alice, 30).await, 15);
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(served(&alice, 15).await, 10);
        // Another connection of the same peer has the same bucket, another peer its own.
        assert_eq!(served(&limited.client("alice").await, 5).await, 0);
        assert_eq!(served(&limited.client("bob").await, 20).await, 15);
        assert!(limited.counted("keyward_limit_refused_total{scope=\"peer\",limit=\"calls_per_second\"} 30"));
        // LeaseRevoke has a bucket of its own behind the bucket of all calls, and no way around both.
        let revoke = LeaseRevokeRequest { id: 7 }.encode_to_vec();
        let revokes = join_all((0..20).map(|_| alice.call(REVOKE, &revoke))).await;
        let done = revokes.iter().filter(|outcome| outcome.end.code() == Some(Code::Ok)).count();
        assert_eq!(done, 15);
    });
}

#[test]
fn a_connection_with_many_refusals_is_answered_late_and_never_hangs() {
    paused(async {
        let limited = Limited::of_peers("calls_per_second = 1");
        let alice = limited.client("alice").await;
        let begun = Instant::now();
        assert_eq!(served(&alice, 21).await, 1);
        assert!(begun.elapsed() < Duration::from_millis(50), "{:?}", begun.elapsed());
        assert_eq!(served(&alice, 500).await, 0);
        let took = begun.elapsed();
        assert!((100..200).contains(&took.as_millis()), "{took:?}");
        assert!(limited.counted("keyward_limit_delayed_refusals_total 500"));
        // The calls were not slow: Keyward held their refusals back.
        assert_eq!(limited.keyward.shown(ViewTopic::Slow).await, []);
        let clients = limited.keyward.shown(ViewTopic::Clients).await;
        assert_eq!(clients[0]["last_error_by"], "limit");
        assert_eq!(clients[0]["last_error_rule"], "peer calls_per_second");
    });
}

#[test]
fn roles_and_listeners_limit_their_peers_together_and_a_role_replaces_the_default() {
    paused(async {
        let policy = "[[role]]\nname = 'batch'\n[role.limits]\ncalls_per_second = 20\n\
                      [role.total_limits]\ncalls_per_second = 25\n\
                      [[binding]]\npeer = 'password:batch-*'\nroles = ['batch']\n";
        let lines = "[policy.peer_limits]\ncalls_per_second = 5\n";
        let limited = Limited::new(policy, "limits = { calls_per_second = 32 }\n", lines);
        assert_eq!(served(&limited.client("batch-1").await, 30).await, 20, "its role's");
        assert_eq!(served(&limited.client("batch-2").await, 20).await, 5, "what the role has left");
        assert_eq!(served(&limited.client("alice").await, 20).await, 5, "the default");
        assert_eq!(served(&limited.client("bob").await, 20).await, 2, "what the listener has left");
        for (scope, count) in [("peer", 10 + 15 + 15), ("role", 15), ("listener", 3)] {
            let line = format!(
                "keyward_limit_refused_total{{scope=\"{scope}\",limit=\"calls_per_second\"}} {count}"
            );
            assert!(limited.counted(&line), "{line}: {}", limited.keyward.metrics.text().expect("text"));
        }
    });
}

#[test]
fn shadow_counts_and_off_does_not_and_a_reload_takes_effect_at_once() {
    paused(async {
        let lines = |mode: &str, rate| {
            configured(&format!(
                "limits_mode = '{mode}'\n[policy.peer_limits]\ncalls_per_second = {rate}\nwatches = 0\n"
            ))
        };
        let limited = Limited::new(
            "",
            "",
            "limits_mode = 'shadow'\n[policy.peer_limits]\ncalls_per_second = 5\nkeys_per_range = 10\n",
        );
        let alice = limited.client("alice").await;
        assert_eq!(served(&alice, 30).await, 30);
        let refused =
            "keyward_limit_shadow_refused_total{scope=\"peer\",limit=\"calls_per_second\"} 25".to_owned();
        assert!(limited.counted(&refused));
        let outcome = alice.call(RANGE, all_keys(0).encode_to_vec()).await;
        let answer = RangeResponse::decode(outcome.message().clone()).expect("an answer");
        assert_eq!(answer.kvs.len(), 100, "the answer is the member's");
        assert!(
            limited.counted("keyward_limit_shadow_refused_total{scope=\"peer\",limit=\"keys_per_range\"} 1")
        );
        let publish = |text: &str| limited.keyward.publish_rules(limited.folder.path(), "", text);
        publish(&lines("off", 5));
        assert_eq!(served(&alice, 30).await, 30);
        publish(&lines("enforce", 5));
        assert_eq!(served(&alice, 30).await, 0, "the bucket of before is still empty");
        publish(&lines("enforce", 7));
        assert_eq!(served(&alice, 30).await, 7, "a new limit begins with a full bucket");
        publish(&lines("enforce", 7));
        assert_eq!(served(&alice, 30).await, 0, "the same limit keeps its bucket");
    });
}

#[test]
fn calls_under_way_count_until_their_end_and_a_waiting_lock_is_one() {
    paused(async {
        let limited = Limited::of_peers("calls_in_flight = 2");
        let alice = limited.client("alice").await;
        let lock = LockRequest { name: "l".into(), lease: 5 }.encode_to_vec();
        let first = alice.begin(LOCK, &lock).await.expect("begun");
        let second = alice.begin(LOCK, &lock).await.expect("begun");
        settled().await;
        assert_eq!(served(&alice, 3).await, 0);
        first.cancel();
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert_eq!(served(&alice, 1).await, 1);
        second.cancel();
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert_eq!(served(&alice, 2).await, 2);
    });
}

/// A peer that opens 10,000 watches.
#[test]
fn ten_thousand_watches_of_one_peer_end_at_the_limit_and_its_stream_goes_on() {
    paused(async {
        let member = Rc::new(Member::new(1, &Tasks::default()));
        let lines = "[policy.peer_limits]\nwatches = 50\n";
        let keyward = Keyward::configured(&[&member], AuthSetting::On, lines);
        let alice = keyward.logged_in("alice").await;
        let serving = Rc::clone(&member);
        let answers = keyward.tasks.spawn("answers of the test", async move {
            let mut call = serving.called(WATCH).await;
            call.begin();
            let mut creates = 0;
            while let Ok(message) = call.messages.next().await {
                if let Some(create) = create_of(&message) {
                    creates += 1;
                    assert!(creates <= 51, "no refused watch is sent");
                    call.say(&created(create.watch_id, 1)).await.expect("said");
                }
            }
        });
        let mut stream = alice.open(WATCH).await.expect("open");
        let (mut live, mut refused) = (Vec::new(), 0);
        for _ in 0..10_000 {
            stream.say(&watch("k", 1)).await;
            let told = watched(&stream.next().await.expect("an answer"));
            assert!(told.created);
            if told.canceled {
                refused += 1;
                assert_eq!(told.watch_id, -1);
                assert_eq!(
                    told.cancel_reason,
                    "rpc error: code = ResourceExhausted desc = etcdserver: too many requests"
                );
            } else {
                live.push(told.watch_id);
            }
        }
        assert_eq!((live.len(), refused), (50, 9950));
        // Another stream of the peer counts too; another peer does not.
        let mut second = alice.open(WATCH).await.expect("open");
        second.say(&watch("k", 1)).await;
        assert!(watched(&second.next().await.expect("an answer")).canceled);
        // A watch that ended makes room.
        stream.say(&cancel_watch(live[0])).await;
        assert!(watched(&stream.next().await.expect("canceled")).canceled);
        stream.say(&watch("k", 1)).await;
        let told = watched(&stream.next().await.expect("an answer"));
        assert!(told.created && !told.canceled, "{told:?}");
        // The end of the stream releases all of its watches.
        stream.cancel();
        settled().await;
        drop(answers);
        let (_other, _call) = open_watch(&keyward.logged_in("alice").await, &member).await;
    });
}

#[test]
fn creates_beyond_the_rate_of_calls_wait_and_are_not_refused() {
    paused(async {
        let member = Rc::new(Member::new(1, &Tasks::default()));
        let lines = "[policy.peer_limits]\ncalls_per_second = 10\n";
        let keyward = Keyward::configured(&[&member], AuthSetting::On, lines);
        let alice = keyward.logged_in("alice").await;
        let (mut stream, mut call) = open_watch(&alice, &member).await;
        let begun = Instant::now();
        let answers = keyward.tasks.spawn("answers of the test", async move {
            while let Ok(message) = call.messages.next().await {
                if let Some(create) = create_of(&message) {
                    call.say(&created(create.watch_id, 1)).await.expect("said");
                }
            }
        });
        for _ in 0..48 {
            stream.say(&watch("k", 1)).await;
        }
        for _ in 0..48 {
            let told = watched(&stream.next().await.expect("an answer"));
            assert!(told.created && !told.canceled, "{told:?}");
        }
        let took = begun.elapsed().as_secs_f64();
        assert!((3.5..4.5).contains(&took), "{took}");
        drop(answers);
    });
}

#[test]
fn leases_count_until_they_are_revoked_or_over() {
    paused(async {
        let limited = Limited::of_peers("leases = 2");
        let alice = limited.client("alice").await;
        let grant = || async {
            let request = LeaseGrantRequest { ttl: 60, id: 0 }.encode_to_vec();
            let outcome = alice.call(GRANT, &request).await;
            let id = outcome
                .messages
                .first()
                .map(|answer| LeaseGrantResponse::decode(answer.clone()).expect("granted").id);
            id.ok_or_else(|| assert_eq!(outcome.end.told(), TOO_MANY))
        };
        assert_eq!((grant().await, grant().await, grant().await), (Ok(1), Ok(2), Err(())));
        let revoke = LeaseRevokeRequest { id: 2 }.encode_to_vec();
        assert_eq!(alice.call(REVOKE, &revoke).await.end.code(), Some(Code::Ok));
        assert_eq!((grant().await, grant().await), (Ok(3), Err(())));
        tokio::time::sleep(Duration::from_secs(61)).await;
        assert_eq!((grant().await, grant().await, grant().await), (Ok(4), Ok(5), Err(())));
    });
}

#[test]
fn a_renewed_lease_goes_on_counting() {
    paused(async {
        let member = Rc::new(Member::new(1, &Tasks::default()));
        let keyward = Keyward::configured(&[&member], AuthSetting::On, "[policy.peer_limits]\nleases = 1\n");
        let alice = keyward.logged_in("alice").await;
        let request = LeaseGrantRequest { ttl: 60, id: 0 }.encode_to_vec();
        let script = async { member.called(GRANT).await.reply(&granted(7)).await };
        let (outcome, ()) = tokio::join!(alice.call(GRANT, &request), script);
        assert_eq!(outcome.end.code(), Some(Code::Ok));
        tokio::time::sleep(Duration::from_secs(40)).await;
        let mut stream = alice.open(KEEP_ALIVE).await.expect("open");
        stream.say(&renew(7)).await;
        let mut call = member.called(KEEP_ALIVE).await;
        call.messages.next().await.expect("a renewal");
        call.begin();
        call.say(&renewed(7, 60)).await.expect("said");
        stream.next().await.expect("renewed");
        tokio::time::sleep(Duration::from_secs(40)).await;
        assert_eq!(alice.call(GRANT, &request).await.end.told(), TOO_MANY);
        // etcd says that the lease is gone.
        stream.say(&renew(7)).await;
        call.messages.next().await.expect("a renewal");
        call.say(&renewed(7, 0)).await.expect("said");
        stream.next().await.expect("gone");
        let script = async { member.called(GRANT).await.reply(&granted(8)).await };
        let (outcome, ()) = tokio::join!(alice.call(GRANT, &request), script);
        assert_eq!(outcome.end.code(), Some(Code::Ok));
    });
}

/// Answers the streams of a client, and leaves a lock waiting.
async fn answer_streams(member: Rc<Member>, tasks: Tasks) {
    loop {
        let mut call = member.call().await;
        match call.path() {
            WATCH => tasks.spawn("watches of the test", serve_watches(call)).detach(),
            KEEP_ALIVE => tasks.spawn("renewals of the test", serve_renewals(call)).detach(),
            LOCK => drop(Box::leak(Box::new(call))),
            GRANT => call.reply(&granted(9)).await,
            // Removes the key of a lock that was given up.
            TXN => call.reply(&txn_done(9)).await,
            RANGE => {
                let asked = RangeRequest::decode(call.message().await).expect("a Range");
                call.reply(&keys(&asked, 1, 1)).await;
            }
            other => panic!("{other}"),
        }
    }
}

async fn serve_watches(mut call: Call) {
    call.begin();
    while let Ok(message) = call.messages.next().await {
        if let Some(create) = create_of(&message)
            && call.say(&created(create.watch_id, 1)).await.is_err()
        {
            return;
        }
    }
}

async fn serve_renewals(mut call: Call) {
    call.begin();
    while let Ok(message) = call.messages.next().await {
        let id = LeaseKeepAliveRequest::decode(message).expect("a renewal").id;
        if call.say(&renewed(id, 60)).await.is_err() {
            return;
        }
    }
}

/// The use of a limit with this value, as an operator is shown.
async fn used(keyward: &Keyward, limit: &str, allowed: u64) -> Option<u64> {
    let rows = keyward.shown(ViewTopic::Limits).await;
    rows.iter().find(|row| row["limit"] == limit && row["allowed"] == allowed)?["used"].as_u64()
}

async fn create(stream: &mut Stream, key: &str) -> bool {
    stream.say(&watch(key, 1)).await;
    let told = watched(&stream.next().await.expect("an answer"));
    assert!(told.created);
    !told.canceled
}

/// Watches, leases kept alive and waiting calls that began without any limit, or under other limits.
#[test]
fn what_was_open_before_a_limit_counts_at_once() {
    paused(async {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("policy.toml"), "").expect("written");
        let member = Rc::new(Member::new(1, &Tasks::default()));
        let keyward = Keyward::at(&[&member], AuthSetting::On, folder.path(), "", &configured(""));
        let serving = answer_streams(Rc::clone(&member), keyward.tasks.clone());
        let answers = keyward.tasks.spawn("answers of the test", serving);
        let publish = async |policy: &str, lines: &str| {
            std::fs::write(folder.path().join("policy.toml"), policy).expect("written");
            keyward.publish_rules(folder.path(), "", &configured(lines));
            settled().await;
        };
        let alice = keyward.logged_in("alice").await;
        let (mut one, mut two) =
            (alice.open(WATCH).await.expect("open"), alice.open(WATCH).await.expect("open"));
        for key in ["a", "b", "c"] {
            assert!(create(&mut one, key).await);
        }
        assert!(create(&mut two, "d").await && create(&mut two, "e").await);
        let mut leases = alice.open(KEEP_ALIVE).await.expect("open");
        for id in [7, 8] {
            leases.say(&renew(id)).await;
            leases.next().await.expect("renewed");
        }
        let lock = LockRequest { name: "l".into(), lease: 5 }.encode_to_vec();
        let _waiting = alice.begin(LOCK, &lock).await.expect("begun");
        settled().await;

        publish("", "[policy.peer_limits]\nwatches = 3\nleases = 1\ncalls_in_flight = 2\n").await;
        assert_eq!(used(&keyward, "watches", 3).await, Some(5));
        assert_eq!(used(&keyward, "leases", 1).await, Some(2));
        assert_eq!(used(&keyward, "calls_in_flight", 2).await, Some(1));
        let mut third = alice.open(WATCH).await.expect("open");
        assert!(!create(&mut one, "f").await && !create(&mut third, "f").await, "five of three are open");
        let grant = LeaseGrantRequest { ttl: 60, id: 0 }.encode_to_vec();
        assert_eq!(alice.call(GRANT, &grant).await.end.told(), TOO_MANY);
        let second = alice.begin(LOCK, &lock).await.expect("begun");
        settled().await;
        assert_eq!(alice.call(RANGE, range("k")).await.end.told(), TOO_MANY, "two locks wait");
        second.cancel();
        two.cancel();
        settled().await;
        assert_eq!(used(&keyward, "watches", 3).await, Some(3));
        assert!(!create(&mut one, "f").await);

        // A role with limits of its own is another scope: the same watches count there, and here no more.
        let role = "[[role]]\nname = 'team'\n[role.limits]\nwatches = 4\n\
                    [role.total_limits]\nwatches = 6\n\
                    [[binding]]\npeer = 'password:alice'\nroles = ['team']\n";
        publish(role, "[policy.peer_limits]\nwatches = 3\nleases = 2\n").await;
        assert_eq!(used(&keyward, "watches", 3).await, Some(0));
        assert_eq!(used(&keyward, "watches", 4).await, Some(3));
        assert_eq!(used(&keyward, "watches", 6).await, Some(3), "the role's peers together");
        assert_eq!(used(&keyward, "leases", 2).await, Some(2));
        assert!(create(&mut one, "g").await && !create(&mut one, "h").await);

        // Without limits nothing counts, and again with them everything does.
        publish("", "").await;
        assert!(create(&mut one, "h").await && create(&mut third, "i").await);
        publish("", "[policy.peer_limits]\nwatches = 9\n").await;
        assert_eq!(used(&keyward, "watches", 9).await, Some(6));
        one.cancel();
        third.cancel();
        settled().await;
        assert_eq!(used(&keyward, "watches", 9).await, Some(0));
        drop(answers);
    });
}

#[test]
fn bytes_of_requests_and_replies_are_made_up_for() {
    paused(async {
        let limited = Limited::of_peers("request_bytes_per_second = '10KiB'");
        let alice = limited.client("alice").await;
        let outcome = alice.call(PUT, put(100 * 1024)).await;
        assert_eq!(outcome.end.code(), Some(Code::Ok), "a call of any size passes");
        assert_eq!(alice.call(PUT, put(1)).await.end.told(), TOO_MANY);
        tokio::time::sleep(Duration::from_millis(8500)).await;
        assert_eq!(alice.call(PUT, put(1)).await.end.told(), TOO_MANY);
        tokio::time::sleep(Duration::from_millis(1000)).await;
        assert_eq!(alice.call(PUT, put(1)).await.end.code(), Some(Code::Ok));

        let limited = Limited::of_peers("reply_bytes_per_second = '1KiB'");
        let bob = limited.client("bob").await;
        let outcome = bob.call(RANGE, all_keys(0).encode_to_vec()).await;
        assert_eq!(outcome.end.code(), Some(Code::Ok));
        assert!((1200..3000).contains(&outcome.message().len()));
        assert_eq!(served(&bob, 1).await, 0);
        tokio::time::sleep(Duration::from_secs(3)).await;
        assert_eq!(served(&bob, 1).await, 1);
    });
}

#[test]
fn a_watch_beyond_its_bytes_slows_down_and_loses_nothing() {
    paused(async {
        let member = Rc::new(Member::new(1, &Tasks::default()));
        let lines = "[policy.peer_limits]\nreply_bytes_per_second = '100KiB'\n";
        let keyward = Keyward::configured(&[&member], AuthSetting::On, lines);
        let alice = keyward.logged_in("alice").await;
        let (mut stream, mut call) = open_watch(&alice, &member).await;
        let begun = Instant::now();
        let say = async {
            for revision in 2..102 {
                call.say(&event(1, revision, 10 * 1024)).await.expect("said");
            }
            call
        };
        let read = async {
            for revision in 2..102 {
                let told = watched(&stream.next().await.expect("an event"));
                assert_eq!(told.events[0].kv.as_ref().expect("a kv").mod_revision, revision);
            }
        };
        let (call, ()) = tokio::join!(say, read);
        // 1,000 KiB, of which a second's worth was there at the beginning.
        let took = begun.elapsed().as_secs_f64();
        assert!((8.0..11.0).contains(&took), "{took}");
        drop(call);
    });
}

#[test]
fn a_range_of_too_many_keys_is_refused_or_paged() {
    paused(async {
        for (size, on_exceed) in [(10, "refuse"), (10, "page"), (9000, "refuse"), (9000, "page")] {
            let member = Rc::new(Member::new(1, &Tasks::default()));
            let lines = format!("[policy.peer_limits]\nkeys_per_range = 10\non_exceed = '{on_exceed}'\n");
            let keyward = Keyward::configured(&[&member], AuthSetting::On, &lines);
            let alice = keyward.logged_in("alice").await;
            let ask = async |request: RangeRequest, count: i64| {
                let script = async {
                    let mut call = member.called(RANGE).await;
                    let asked = RangeRequest::decode(call.message().await).expect("a Range");
                    let answer = keys(&asked, count, size);
                    call.reply(&answer).await;
                    asked.limit
                };
                tokio::join!(alice.call(RANGE, request.encode_to_vec()), script)
            };
            let read = |message: &Bytes| RangeResponse::decode(message.clone()).expect("an answer");
            for limit in [0, 11, -1] {
                let (outcome, asked) = ask(all_keys(limit), 100).await;
                assert_eq!(asked, 10);
                if on_exceed == "refuse" {
                    let text = "keyward: the range has more than 10 keys; set a limit of at most 10";
                    assert_eq!(outcome.end.told(), (Code::ResourceExhausted, text));
                    assert!(outcome.messages.is_empty());
                } else {
                    let answer = read(outcome.message());
                    assert_eq!((answer.kvs.len(), answer.more, answer.count), (10, true, 100));
                }
            }
            let (outcome, _) = ask(all_keys(0), 10).await;
            assert_eq!((read(outcome.message()).kvs.len(), read(outcome.message()).more), (10, false));
            let (outcome, asked) = ask(all_keys(3), 100).await;
            assert_eq!((read(outcome.message()).kvs.len(), asked), (3, 3));
            let sorted = RangeRequest { sort_order: 1, sort_target: 3, ..all_keys(0) };
            let (outcome, _) = ask(sorted.clone(), 100).await;
            assert_eq!(outcome.end.code(), Some(Code::ResourceExhausted), "no client can continue");
            let (outcome, _) = ask(sorted, 9).await;
            assert_eq!(read(outcome.message()).kvs.len(), 9);
        }
    });
}

/// The member has fetched and sent the keys.
#[test]
fn an_answer_refused_for_its_keys_is_charged() {
    paused(async {
        let limited = Limited::of_peers("keys_per_range = 10\nreply_bytes_per_second = '1KiB'");
        let alice = limited.client("alice").await;
        let text = "keyward: the range has more than 10 keys; set a limit of at most 10";
        let mut answers = 0;
        loop {
            let outcome = alice.call(RANGE, all_keys(0).encode_to_vec()).await;
            if outcome.end.told() == TOO_MANY {
                break;
            }
            assert_eq!(outcome.end.told(), (Code::ResourceExhausted, text));
            answers += 1;
            assert!(answers < 100, "the answers owe nothing");
        }
        assert!(answers > 0);
        assert_eq!(alice.call(RANGE, range("k")).await.end.told(), TOO_MANY, "bytes are owed");
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(alice.call(RANGE, all_keys(1).encode_to_vec()).await.end.code(), Some(Code::Ok));
    });
}

#[test]
fn a_txn_with_a_range_without_a_limit_is_not_sent() {
    paused(async {
        let limited = Limited::of_peers("keys_per_range = 10\non_exceed = 'page'");
        let alice = limited.client("alice").await;
        let txn = |limit| {
            let range = request_op::Request::RequestRange(all_keys(limit));
            TxnRequest { success: vec![RequestOp { request: Some(range) }], ..TxnRequest::default() }
                .encode_to_vec()
        };
        for (limit, served) in [(10, true), (0, false), (11, false)] {
            let outcome = alice.call(TXN, txn(limit)).await;
            if served {
                assert_eq!(outcome.end.code(), Some(Code::Ok));
            } else {
                let text = "keyward: a range in a txn needs a limit of at most 10";
                assert_eq!(outcome.end.told(), (Code::ResourceExhausted, text));
            }
        }
        let stream = alice.begin("/etcdserverpb.KV/RangeStream", all_keys(0).encode_to_vec()).await;
        assert_eq!(stream.expect("begun").finish().await.end.code(), Some(Code::ResourceExhausted));
        assert!(limited.member.was_called_again().is_none());
    });
}

#[test]
fn a_full_database_sheds_writes_of_low_priority_first() {
    paused(async {
        let policy = "[[role]]\nname = 'batch'\nlimits = { priority = 'low' }\n\
                      [[role]]\nname = 'core'\nlimits = { priority = 'high' }\n\
                      [[binding]]\npeer = 'password:batch'\nroles = ['batch']\n\
                      [[binding]]\npeer = 'password:core'\nroles = ['core']\n";
        let lines = "[protection]\nmode = 'enforce'\ndb_share = 0.8\ndb_quota = '1000B'\n";
        let limited = Limited::new(policy, "", lines);
        let filled = async |db_size: u64| {
            limited.keyward.publish(|members| {
                let mut member = keyward::members::membership::Member::clone(&members.members[0]);
                let status = StoreStatus { db_size, ..StoreStatus::default() };
                member.store_status = Some(status.into());
                members.members[0] = member.into();
            });
            tokio::time::sleep(Duration::from_secs(1)).await;
        };
        let (batch, plain, core) =
            (limited.client("batch").await, limited.client("alice").await, limited.client("core").await);
        let writes = async |client: &Client| {
            let outcome = client.call(PUT, put(1)).await;
            let served = outcome.end.code() == Some(Code::Ok);
            assert!(served || outcome.end.told() == TOO_MANY);
            served
        };
        for (db_size, expected) in [(700, [true; 3]), (800, [false, true, true]), (950, [false, false, true])]
        {
            filled(db_size).await;
            let found = [writes(&batch).await, writes(&plain).await, writes(&core).await];
            assert_eq!(found, expected, "{db_size}");
            assert_eq!(served(&batch, 3).await, 3, "reads are served");
            let revoke = LeaseRevokeRequest { id: 7 }.encode_to_vec();
            assert_eq!(batch.call(REVOKE, &revoke).await.end.code(), Some(Code::Ok));
        }
        assert!(limited.counted("keyward_shedding_pressure{cause=\"db_size\"} 2"));
        assert!(limited.counted("keyward_limit_refused_total{scope=\"cluster\",limit=\"db_share\"} 3"));
        filled(100).await;
        assert!(writes(&batch).await);
    });
}

#[test]
fn slow_members_shed_calls_of_low_priority_until_they_are_fast_again() {
    paused(async {
        let member = Rc::new(Member::new(1, &Tasks::default()));
        let lines = "[policy.peer_limits]\npriority = 'low'\n\
                     [protection]\nmode = 'enforce'\nlatency_target = '100ms'\n";
        let keyward = Keyward::configured(&[&member], AuthSetting::On, lines);
        let alice = keyward.logged_in("alice").await;
        let answered = async |after: u64| {
            let script = async {
                let call = member.called(PUT).await;
                tokio::time::sleep(Duration::from_millis(after)).await;
                call.reply(&was_put(9)).await;
            };
            tokio::select! {
                outcome = alice.call(PUT, put(1)) => outcome.end.code() == Some(Code::Ok),
                () = async { script.await; std::future::pending().await } => false,
            }
        };
        let mut refused = 0;
        for _ in 0..60 {
            refused += usize::from(!answered(300).await);
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        assert!(refused > 5, "{refused}");
        for _ in 0..400 {
            answered(1).await;
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        let mut served = 0;
        for _ in 0..20 {
            served += usize::from(answered(1).await);
        }
        assert_eq!(served, 20);
    });
}

#[test]
fn without_limits_nothing_is_counted() {
    paused(async {
        let limited = Limited::new("", "", "");
        let alice = limited.client("alice").await;
        assert_eq!(served(&alice, 500).await, 500);
        assert_eq!(alice.call(RANGE, ranged(1)).await.end.code(), Some(Code::Ok));
        assert!(limited.counted("keyward_limiters 0"));
        let text = limited.keyward.metrics.text().expect("text");
        assert!(!text.lines().any(|line| line.starts_with("keyward_limit_refused") && !line.ends_with(" 0")));
    });
}
