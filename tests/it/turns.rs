//! A member that has as many calls as it may have gets the next ones in their turn, and streams at once.

use std::time::Duration;

use futures_util::future::join_all;
use keyward::identity::ClusterId;
use keyward::members::membership::{AuthSetting, Readiness, UnreadyReason};
use keyward::pb::etcdserverpb::{LeaseGrantRequest, RangeRequest};
use keyward::refusal::Code;
use keyward::tasks::Tasks;
use prost::Message as _;

use crate::client::{Client, Stream};
use crate::logins::session;
use crate::member::{Call, Member};
use crate::rig::{Keyward, paused, settled};
use crate::words::{
    KEEP_ALIVE, PUT, RANGE, WATCH, created, put, range, ranged, ranged_value, renew, watch, watched,
};

const GRANT: &str = "/etcdserverpb.Lease/LeaseGrant";
const SNAPSHOT: &str = "/etcdserverpb.Maintenance/Snapshot";
const NOTHING_SENT: (Code, &str) = (Code::Unavailable, "there is no connection available");
const TOO_MANY: (Code, &str) = (Code::ResourceExhausted, "etcdserver: too many requests");
/// Places at each member.
const PLACES: usize = 2;
/// How many may wait for one.
const LINE: usize = 4 * PLACES;

fn site(count: u64) -> (Vec<Member>, Keyward) {
    site_with(count, AuthSetting::Off)
}

fn site_with(count: u64, auth: AuthSetting) -> (Vec<Member>, Keyward) {
    let tasks = Tasks::default();
    let members: Vec<_> = (1..=count).map(|id| Member::new(id, &tasks)).collect();
    let lines = format!("[limits]\nmember_in_flight = {PLACES}\n[runtime]\nshards = 1\n");
    let keyward = Keyward::configured(&members.iter().collect::<Vec<_>>(), auth, &lines);
    (members, keyward)
}

async fn begin(client: &Client, path: &str, message: impl AsRef<[u8]>) -> Stream {
    let stream = client.begin(path, message).await.expect("sent");
    settled().await;
    stream
}

/// A client with a session that no member has seen yet: its first call logs in there.
async fn of(keyward: &Keyward, user: &str) -> Client {
    let token = keyward.sealer.seal(&session(user, "right")).expect("it fits");
    keyward.client().await.header("token", token.expose())
}

fn come(member: &Member) -> Vec<Call> {
    std::iter::from_fn(|| member.was_called_again()).collect()
}

fn large() -> Vec<u8> {
    RangeRequest { key: "a".into(), range_end: "b".into(), ..RangeRequest::default() }.encode_to_vec()
}

/// As many reads as there are places, held.
async fn filled(member: &Member, client: &Client) -> (Vec<Stream>, Vec<Call>) {
    let mut reads = Vec::new();
    for _ in 0..PLACES {
        reads.push(begin(client, RANGE, range("k")).await);
    }
    let held = come(member);
    assert_eq!(held.len(), PLACES);
    (reads, held)
}

#[test]
fn what_is_more_urgent_has_its_turn_first_and_streams_never_wait() {
    paused(async {
        let (members, keyward) = site(1);
        let (member, client) = (&members[0], keyward.client().await);
        let (reads, mut held) = filled(member, &client).await;
        let grant = LeaseGrantRequest { ttl: 5, id: 0 }.encode_to_vec();
        let mut waiting = Vec::new();
        for (path, message) in
            [(RANGE, large()), (RANGE, range("k")), (PUT, put(1)), (GRANT, grant), (PUT, put(1))]
        {
            waiting.push(begin(&client, path, message).await);
        }
        assert!(come(member).is_empty(), "as many as may be");
        let conduct = keyward.members.snapshot.load().members[0].load.clone();
        assert_eq!((conduct.queue.waiting(), conduct.in_flight()), (5, 2));
        let mut streams = Vec::new();
        for (path, message) in [(WATCH, watch("k", 10)), (KEEP_ALIVE, renew(7))] {
            let mut stream = client.open(path).await.expect("a stream");
            stream.say(&message).await;
            let mut call = member.called(path).await;
            call.messages.next().await.expect("a request");
            if path == WATCH {
                call.say(&created(1, 9)).await.expect("said");
                assert!(watched(&stream.next().await.expect("created")).created);
            }
            streams.push((stream, call));
        }
        let mut order = Vec::new();
        for _ in 0..waiting.len() {
            held.remove(0).reply(&ranged(5)).await;
            settled().await;
            let [call] =
                <[Call; 1]>::try_from(come(member)).unwrap_or_else(|calls| panic!("{}", calls.len()));
            order.push(call.path().to_owned());
            held.push(call);
        }
        assert_eq!(order, [GRANT, PUT, PUT, RANGE, RANGE]);
        let mut last = held.pop().expect("held");
        assert_eq!(last.message().await, large(), "what is large comes last");
        last.reply(&ranged(5)).await;
        held.pop().expect("held").reply(&ranged(5)).await;
        let ended = join_all(reads.into_iter().chain(waiting).map(Stream::finish)).await;
        assert!(ended.iter().all(|outcome| outcome.end.code() == Some(Code::Ok)));
        assert_eq!((conduct.queue.waiting(), conduct.queue.ended(), conduct.in_flight()), (0, 5, 0));
    });
}

#[test]
fn who_gives_up_waiting_leaves_the_line_and_who_finds_it_full_is_refused() {
    paused(async {
        let (members, keyward) = site(1);
        let (member, client) = (&members[0], keyward.client().await);
        let (_reads, mut held) = filled(member, &client).await;
        let mut waiting = Vec::new();
        for _ in 0..LINE {
            waiting.push(begin(&client, RANGE, range("k")).await);
        }
        assert_eq!(client.call(RANGE, range("k")).await.end.told(), TOO_MANY);
        waiting.remove(0).cancel();
        settled().await;
        let conduct = keyward.members.snapshot.load().members[0].load.clone();
        assert_eq!(conduct.queue.waiting() as usize, LINE - 1);
        waiting.push(begin(&client, RANGE, range("k")).await);
        let put = begin(&client, PUT, put(1)).await;
        let pushed = waiting.pop().expect("the last").finish().await;
        assert_eq!(pushed.end.told(), TOO_MANY, "a write takes the last read's place in the line");
        held.remove(0).reply(&ranged(5)).await;
        settled().await;
        let come = come(member);
        assert_eq!(come.iter().map(Call::path).collect::<Vec<_>>(), [PUT]);
        drop(put);
        assert_eq!(conduct.refused(), 2);
    });
}

#[test]
fn who_has_no_turn_within_its_time_is_refused_and_was_not_sent() {
    paused(async {
        let (members, keyward) = site(1);
        let client = keyward.client().await;
        let (_reads, held) = filled(&members[0], &client).await;
        let soon = client.again().header("grpc-timeout", "500m");
        assert_eq!(soon.call(PUT, put(1)).await.end.code(), Some(Code::DeadlineExceeded));
        // What is held must not be told as hanging before that.
        let refused = client.call(PUT, put(1)).await;
        assert_eq!(refused.end.told(), TOO_MANY);
        assert!(come(&members[0]).is_empty());
        drop(held);
    });
}

/// Who calls was decided of the cluster that was served when it came.
#[test]
fn who_waits_while_another_cluster_is_followed_is_not_sent_there() {
    paused(async {
        let (members, keyward) = site(1);
        let client = keyward.client().await;
        let (_reads, mut held) = filled(&members[0], &client).await;
        let put = begin(&client, PUT, put(1)).await;
        keyward.publish(|membership| membership.cluster = Some(ClusterId(0xc2)));
        held.remove(0).reply(&ranged(5)).await;
        let end = put.finish().await.end;
        assert_eq!(end.told(), NOTHING_SENT);
        assert!(come(&members[0]).is_empty());
    });
}

#[test]
fn another_member_that_has_room_is_taken_first_and_what_hangs_is_left() {
    paused(async {
        let (members, keyward) = site(3);
        let client = keyward.client().await;
        let mut reads = Vec::new();
        for _ in 0..3 * PLACES {
            reads.push(begin(&client, RANGE, range("k")).await);
        }
        let mut held: Vec<_> = members.iter().map(come).collect();
        assert_eq!(held.iter().map(Vec::len).collect::<Vec<_>>(), [PLACES; 3]);
        held[1].remove(0).reply(&ranged(5)).await;
        settled().await;
        let write = begin(&client, PUT, put(1)).await;
        let written = come(&members[1]);
        assert_eq!(written.len(), 1, "the only one that has room");
        held[1].extend(written);
        // Whichever it waits for: that one is no longer served.
        let next = begin(&client, PUT, put(2)).await;
        let known = keyward.members.snapshot.load().members.clone();
        let waits = known.iter().position(|member| member.load.queue.waiting() > 0).expect("it waits");
        known[waits].suspect();
        tokio::time::sleep(Duration::from_millis(500)).await;
        assert_eq!(known[waits].load.queue.waiting(), 0, "nobody waits there any more");
        for call in (0..3)
            .filter(|at| *at != waits)
            .flat_map(|other| std::mem::take(&mut held[other]))
            .collect::<Vec<_>>()
        {
            call.reply(&ranged(5)).await;
        }
        settled().await;
        let come = [0, 1, 2].map(|at| come(&members[at]));
        assert!(come[waits].is_empty());
        assert!(come.iter().flatten().any(|call| call.path() == PUT), "it had its turn elsewhere");
        drop((write, next));
    });
}

#[test]
fn a_call_rather_waits_than_goes_to_a_member_that_hangs_or_rests() {
    paused(async {
        for rests in [false, true] {
            let (members, keyward) = site(3);
            let client = keyward.client().await;
            let known = keyward.members.snapshot.load().members.clone();
            let _rest = if rests {
                Some(known[1].maintenance.open())
            } else {
                known[1].suspect();
                None
            };
            let mut reads = Vec::new();
            for _ in 0..2 * PLACES {
                reads.push(begin(&client, RANGE, range("k")).await);
            }
            let mut held: Vec<_> = members.iter().map(come).collect();
            assert_eq!(held.iter().map(Vec::len).collect::<Vec<_>>(), [PLACES, 0, PLACES]);
            let write = begin(&client, PUT, put(1)).await;
            assert!(come(&members[1]).is_empty(), "nothing of it is known there, and it had only to wait");
            let waits = [0, 2].into_iter().find(|at| known[*at].load.queue.waiting() == 1);
            let waits = waits.expect("it waits for one that serves");
            held[waits].remove(0).reply(&ranged(5)).await;
            settled().await;
            let come = come(&members[waits]);
            assert_eq!(come.iter().map(Call::path).collect::<Vec<_>>(), [PUT]);
            drop((reads, write));
        }
    });
}

#[test]
fn who_waited_for_a_member_that_serves_no_more_is_not_sent_there() {
    paused(async {
        for is_removed in [false, true] {
            let (members, keyward) = site(1);
            let client = keyward.client().await;
            let (_reads, mut held) = filled(&members[0], &client).await;
            let write = begin(&client, PUT, put(1)).await;
            let known = keyward.members.snapshot.load().members.clone();
            keyward.publish(|membership| match (is_removed, &mut membership.members) {
                (true, members) => members.clear(),
                (false, members) => {
                    let mut down = keyward::members::membership::Member::clone(&members[0]);
                    down.readiness = Readiness::NotReady(UnreadyReason::Unreachable);
                    members[0] = down.into();
                }
            });
            held.remove(0).reply(&ranged(5)).await;
            tokio::time::sleep(Duration::from_millis(500)).await;
            assert!(come(&members[0]).is_empty(), "removed: {is_removed}");
            keyward.publish(|membership| membership.members = known);
            tokio::time::sleep(Duration::from_millis(500)).await;
            let come = come(&members[0]);
            assert_eq!(come.iter().map(Call::path).collect::<Vec<_>>(), [PUT], "it serves again");
            drop(write);
        }
    });
}

#[test]
fn who_is_not_proved_yet_takes_nobodys_place() {
    paused(async {
        let (members, keyward) = site_with(1, AuthSetting::On);
        let member = &members[0];
        let alice = keyward.logged_in("alice").await;
        member.hold_logins(true);
        let mut logging_in = Vec::new();
        for user in 0..3 * PLACES {
            let client = of(&keyward, &format!("user{user}")).await;
            logging_in.push((begin(&client, PUT, put(1)).await, client));
        }
        let _read = begin(&alice, RANGE, range("k")).await;
        let calls = come(member);
        assert_eq!(calls.iter().map(Call::token).collect::<Vec<_>>(), [Some("alice.1")]);
        let conduct = keyward.members.snapshot.load().members[0].load.clone();
        assert_eq!(conduct.queue.waiting(), 0, "nor do they stand in line");
        member.hold_logins(false);
        settled().await;
        assert_eq!(come(member).len(), PLACES - 1, "proved, they do");
        assert_eq!(conduct.queue.waiting() as usize, 3 * PLACES - (PLACES - 1));
        drop((calls, logging_in));
    });
}

#[test]
fn who_finds_room_at_another_member_is_proved_there() {
    paused(async {
        let (members, keyward) = site_with(2, AuthSetting::On);
        // What a token is called tells who gave it.
        for user in ["bob", "carol", "dave"] {
            let bob = of(&keyward, user).await;
            keyward.members.snapshot.load().members[0].suspect();
            let read = begin(&bob, RANGE, range("k")).await;
            assert_eq!(come(&members[1]).len(), 1);
            drop(read);
            settled().await;
            keyward.probed();
        }
        let (at_first, at_second) = (members[0].logins(), members[1].logins());
        assert_eq!((at_first, at_second), (0, 3));
        let alice = of(&keyward, "alice").await;
        let mut reads = Vec::new();
        for _ in 0..2 * PLACES {
            reads.push(begin(&alice, RANGE, range("k")).await);
        }
        let held: Vec<_> = members.iter().map(come).collect();
        assert_eq!(held.iter().map(Vec::len).collect::<Vec<_>>(), [PLACES; 2]);
        for (held, token) in held.iter().zip(["alice.1", "alice.4"]) {
            assert!(held.iter().all(|call| call.token() == Some(token)));
        }
        drop((reads, held));
    });
}

#[test]
fn who_is_proved_while_another_cluster_is_followed_is_not_sent_there() {
    paused(async {
        let (members, keyward) = site_with(1, AuthSetting::On);
        members[0].hold_logins(true);
        let alice = of(&keyward, "alice").await;
        let put = begin(&alice, PUT, put(1)).await;
        keyward.publish(|membership| membership.cluster = Some(ClusterId(0xc2)));
        members[0].hold_logins(false);
        assert_eq!(put.finish().await.end.told(), NOTHING_SENT);
        assert!(come(&members[0]).is_empty());
    });
}

/// For how long a large answer takes its client says.
#[test]
fn who_does_not_read_a_large_answer_keeps_nobody_waiting() {
    paused(async {
        let (members, keyward) = site(1);
        let (member, client) = (&members[0], keyward.client().await);
        let reads = [begin(&client, RANGE, large()).await, begin(&client, SNAPSHOT, Vec::new()).await];
        let mut held = come(member);
        assert_eq!(held.len(), PLACES);
        let waiting = [begin(&client, PUT, put(1)).await, begin(&client, PUT, put(1)).await];
        let conduct = keyward.members.snapshot.load().members[0].load.clone();
        assert_eq!((come(member).len(), conduct.queue.waiting()), (0, 2), "nothing of the answers came yet");
        for call in &mut held {
            call.say(&ranged_value(200 << 10)).await.expect("it is read");
        }
        settled().await;
        assert_eq!((come(member).len(), conduct.queue.waiting()), (2, 0));
        drop((waiting, reads, held));
    });
}
