//! While no member serves, streams wait, and end as at etcd: with `no leader` where members say so, else with Unavailable, upon which
//! clients open them again.

use std::time::Duration;

use futures_util::future::select_all;
use keyward::members::membership::{Readiness, UnreadyReason};
use keyward::pb::v3electionpb::LeaderRequest;
use keyward::refusal::Code;
use prost::Message as _;
use tokio::time::{Instant, sleep, timeout};

use crate::client::{Client, Stream};
use crate::member::{Call, Member};
use crate::rig::{Keyward, paused, renewing, three_with, watching};
use crate::words::{
    KEEP_ALIVE, WATCH, cancel_watch, create_of, created, event, renew, renewed, revisions, watch, watched,
};

const OBSERVE: &str = "/v3electionpb.Election/Observe";
const NO_LEADER: (Code, &str) = (Code::Unavailable, "etcdserver: no leader");
const LOST: (Code, &str) =
    (Code::Unavailable, "etcdserver: request timed out, possibly due to connection lost");
const ALONE: Readiness = Readiness::NotReady(UnreadyReason::NoLeader);
const DOWN: Readiness = Readiness::NotReady(UnreadyReason::Unreachable);
const MINUTE: Duration = Duration::from_secs(60);

/// Only who answers so may be connected to.
fn publish(members: &[Member], keyward: &Keyward, readiness: [Readiness; 3]) {
    for (member, readiness) in members.iter().zip(readiness) {
        member.refuse_connections(readiness == DOWN);
        if readiness == DOWN {
            member.cut();
        }
    }
    keyward.publish(|membership| {
        for (member, readiness) in membership.members.iter_mut().zip(readiness) {
            let mut changed = keyward::members::membership::Member::clone(member);
            changed.readiness = readiness;
            *member = changed.into();
        }
    });
    keyward.probed();
}

/// Three members, of which only the first is ready.
fn first_of_three(lines: &str) -> (Vec<Member>, Keyward) {
    let (members, keyward) = three_with(lines);
    publish(&members, &keyward, [Readiness::Ready, DOWN, DOWN]);
    (members, keyward)
}

async fn observing(client: &Client, member: &Member) -> (Stream, Call) {
    let request = LeaderRequest { name: "n".into() }.encode_to_vec();
    let stream = client.begin(OBSERVE, request).await.expect("sent");
    (stream, member.called(OBSERVE).await)
}

/// One stream of each kind, with its name; the calls stay open as long as they are kept.
async fn one_of_each(client: &Client, member: &Member) -> (Vec<(&'static str, Stream)>, Vec<Call>) {
    let (watch, watch_call) = watching(client, member).await;
    let (mut cancelled, cancelled_call) = watching(client, member).await;
    cancelled.say(&cancel_watch(0)).await;
    assert!(watched(&cancelled.next().await.expect("an answer")).canceled);
    let (renewal, renewal_call) = renewing(client, member).await;
    let (observe, observe_call) = observing(client, member).await;
    let streams = vec![
        ("watch", watch),
        ("watch that was cancelled", cancelled),
        ("keepalive", renewal),
        ("observe", observe),
        ("watch that nothing was sent on", client.open(WATCH).await.expect("open")),
        ("keepalive that nothing was sent on", client.open(KEEP_ALIVE).await.expect("open")),
    ];
    (streams, vec![watch_call, cancelled_call, renewal_call, observe_call])
}

/// How long each stream took to end, all of them with `end`.
async fn ends(streams: Vec<(&'static str, Stream)>, end: (Code, &str)) -> Vec<Duration> {
    let began = Instant::now();
    let mut took = Vec::new();
    for (name, mut stream) in streams {
        let told = timeout(MINUTE, stream.next()).await.unwrap_or_else(|_| panic!("{name}: still open"));
        assert_eq!(told.expect_err(name).told(), end, "{name}");
        took.push(began.elapsed());
    }
    took
}

async fn stay_open(streams: &mut [(&'static str, Stream)], time: Duration) {
    let all = streams.iter_mut().map(|(name, stream)| Box::pin(async { (*name, stream.next().await) }));
    let ended = timeout(time, select_all(all)).await;
    assert!(ended.is_err(), "{:?}", ended.map(|((name, end), ..)| (name, end)));
}

#[test]
fn without_a_leader_every_stream_ends_whose_client_asked_for_one() {
    paused(async {
        for (lines, limit) in [("", 2500), ("election_timeout = \"4s\"\n", 10_000)] {
            let (members, keyward) = first_of_three(lines);
            let asks = keyward.client().await.header("hasleader", "true");
            let (asked, _calls) = one_of_each(&asks, &members[0]).await;
            let client = keyward.client().await;
            let (mut plain, _others) = one_of_each(&client, &members[0]).await;
            publish(&members, &keyward, [ALONE, DOWN, DOWN]);
            let limit = Duration::from_millis(limit);
            assert!(ends(asked, NO_LEADER).await.into_iter().all(|took| took == limit), "{limit:?}");
            stay_open(&mut plain, MINUTE).await;
            // Whoever comes later is told at once, as at etcd.
            let mut late = asks.open(WATCH).await.expect("open");
            let began = Instant::now();
            assert_eq!(late.next().await.expect_err("ended").told(), NO_LEADER);
            assert_eq!(began.elapsed(), Duration::ZERO);
        }
    });
}

#[test]
fn an_election_ends_no_stream() {
    paused(async {
        let (members, keyward) = first_of_three("");
        let client = keyward.client().await.header("hasleader", "true");
        let (mut streams, _calls) = one_of_each(&client, &members[0]).await;
        for _ in 0..3 {
            publish(&members, &keyward, [ALONE, ALONE, DOWN]);
            stay_open(&mut streams, Duration::from_millis(2400)).await;
            publish(&members, &keyward, [ALONE, Readiness::Ready, DOWN]);
            stay_open(&mut streams, Duration::from_secs(30)).await;
        }
    });
}

/// While a whole cluster restarts nobody says that there is no leader.
#[test]
fn streams_outlive_a_restart_of_all_members() {
    paused(async {
        let (members, keyward) = first_of_three("");
        let client = keyward.client().await.header("hasleader", "true");
        let (mut watched_key, call) = watching(&client, &members[0]).await;
        let (mut renewed_lease, renewal) = renewing(&client, &members[0]).await;
        let (mut observed, observation) = observing(&client, &members[0]).await;
        publish(&members, &keyward, [DOWN; 3]);
        drop((call, renewal, observation));
        sleep(Duration::from_millis(9900)).await;
        publish(&members, &keyward, [DOWN, Readiness::Ready, DOWN]);

        let mut call = members[1].called(WATCH).await;
        let create = create_of(&call.messages.next().await.expect("a create")).expect("a create");
        assert_eq!(create.start_revision, 5, "where the client began, since nothing was delivered");
        call.say(&created(create.watch_id, 11)).await.expect("taken");
        call.say(&event(create.watch_id, 10, 5)).await.expect("taken");
        assert_eq!(revisions(&watched(&watched_key.next().await.expect("it lives"))), [10]);
        let _observation = members[1].called(OBSERVE).await;
        renewed_lease.say(&renew(7)).await;
        let mut renewal = members[1].called(KEEP_ALIVE).await;
        renewal.messages.next().await.expect("a renewal");
        renewal.say(&renewed(7, 5)).await.expect("taken");
        renewed_lease.next().await.expect("it lives");
        assert!(timeout(MINUTE, observed.next()).await.is_err(), "it lives");
    });
}

#[test]
fn where_no_member_comes_back_every_stream_ends_with_a_status_that_clients_resume() {
    paused(async {
        for (lines, seconds) in [("", 10), ("unreachable_timeout = \"25s\"\n", 25)] {
            let limit = Duration::from_secs(seconds);
            for asks in ["true", "false"] {
                let (members, keyward) = first_of_three(lines);
                let client = keyward.client().await.header("hasleader", asks);
                let (streams, calls) = one_of_each(&client, &members[0]).await;
                publish(&members, &keyward, [DOWN; 3]);
                drop(calls);
                let began = Instant::now();
                sleep(limit / 2).await;
                // One that begins later has its own time.
                let late = vec![("late", client.open(WATCH).await.expect("open"))];
                let took = ends(streams, LOST).await;
                assert!(took.iter().all(|took| *took == limit / 2), "{took:?}");
                ends(late, LOST).await;
                assert_eq!(began.elapsed(), limit + limit / 2);
            }
        }
    });
}

/// The time begins anew once a member was there.
#[test]
fn an_outage_that_ended_does_not_count() {
    paused(async {
        let (members, keyward) = first_of_three("");
        let client = keyward.client().await;
        let mut stream = client.open(WATCH).await.expect("open");
        stream.say(&watch("k", 10)).await;
        for _ in 0..4 {
            publish(&members, &keyward, [DOWN; 3]);
            sleep(Duration::from_secs(9)).await;
            publish(&members, &keyward, [Readiness::Ready, DOWN, DOWN]);
            drop(members[0].called(WATCH).await);
        }
        publish(&members, &keyward, [DOWN; 3]);
        let began = Instant::now();
        assert_eq!(stream.next().await.expect_err("ended").told(), LOST);
        assert_eq!(began.elapsed(), Duration::from_secs(10));
    });
}

/// Probes that fail say nothing of a stream that a slow member serves.
#[test]
fn a_stream_that_a_member_serves_goes_on_while_probes_fail() {
    paused(async {
        let (members, keyward) = first_of_three("");
        let client = keyward.client().await.header("hasleader", "true");
        let mut stream = client.open(WATCH).await.expect("open");
        stream.say(&watch("k", 5)).await;
        let mut call = members[0].called(WATCH).await;
        let id = create_of(&call.messages.next().await.expect("a create")).expect("a create").watch_id;
        call.say(&created(id, 9)).await.expect("taken");
        stream.next().await.expect("created");
        keyward.publish(|membership| {
            for member in &mut membership.members {
                let mut changed = keyward::members::membership::Member::clone(member);
                changed.readiness = DOWN;
                *member = changed.into();
            }
        });
        sleep(MINUTE).await;
        call.say(&event(id, 10, 5)).await.expect("taken");
        assert_eq!(revisions(&watched(&stream.next().await.expect("it lives"))), [10]);
        // From then on it has none.
        publish(&members, &keyward, [DOWN; 3]);
        let began = Instant::now();
        assert_eq!(stream.next().await.expect_err("ended").told(), LOST);
        assert_eq!(began.elapsed(), Duration::from_secs(10));
    });
}

/// clientv3 gives up the keepalives of a client that asked for a leader where it is told that there is none.
#[test]
fn a_renewal_that_no_member_answers_is_not_told_that_there_is_no_leader() {
    paused(async {
        for (readiness, end) in [([DOWN; 3], LOST), ([ALONE, DOWN, DOWN], NO_LEADER)] {
            let (members, keyward) = first_of_three("");
            let client = keyward.client().await;
            publish(&members, &keyward, readiness);
            let mut stream = client.open(KEEP_ALIVE).await.expect("open");
            stream.say(&renew(7)).await;
            let began = Instant::now();
            assert_eq!(stream.next().await.expect_err("ended").told(), end);
            assert!((7..9).contains(&began.elapsed().as_secs()), "{:?}", began.elapsed());
        }
    });
}
