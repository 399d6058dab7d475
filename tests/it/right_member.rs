//! Which member gets a call while one of them hangs, lags or knows more; and how much trouble is multiplied.

use std::cell::Cell;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use keyward::admin::view::ViewTopic;
use keyward::identity::MemberId;
use keyward::members::fitness::member_load::Ejection;
use keyward::members::membership::MembershipHint;
use keyward::pb::etcdserverpb::{
    AuthUserAddRequest, AuthUserAddResponse, LeaseLeasesResponse, LeaseStatus, LeaseTimeToLiveRequest,
    LeaseTimeToLiveResponse, RangeRequest, RangeResponse,
};
use keyward::refusal::Code;
use prost::Message as _;
use tokio::time::Instant;

use crate::client::{Client, Outcome};
use crate::member::{Member, next_called, next_of};
use crate::rig::{Keyward, paused, settled, three, three_with};
use crate::words::{
    PUT, RANGE, TXN, WATCH, create_of, created, event, header, put, range, ranged, was_put, watch, watched,
};

const USER_ADD: &str = "/etcdserverpb.Auth/UserAdd";
const LEASES: &str = "/etcdserverpb.Lease/LeaseLeases";
const TIME_TO_LIVE: &str = "/etcdserverpb.Lease/LeaseTimeToLive";
const TOO_MANY: &str = "etcdserver: too many requests";

/// Answers one call after another, and tells where each came.
async fn answered(
    members: &[Member],
    client: &Client,
    path: &str,
    message: &[u8],
    calls: usize,
) -> Vec<usize> {
    let mut at = Vec::new();
    for _ in 0..calls {
        let script = async {
            let (member, call) = next_of(members).await;
            call.reply(&ranged(5)).await;
            member
        };
        let (outcome, member) = tokio::join!(client.call(path, message), script);
        outcome.message();
        at.push(member);
    }
    at
}

fn revision(outcome: &Outcome) -> i64 {
    let answer = RangeResponse::decode(outcome.message().clone()).expect("an answer");
    answer.header.expect("a header").revision
}

fn local(key: &str) -> Vec<u8> {
    RangeRequest { key: key.to_owned().into(), serializable: true, ..RangeRequest::default() }.encode_to_vec()
}

fn is_local(message: &Bytes) -> bool {
    RangeRequest::decode(message.clone()).expect("a request").serializable
}

/// The first member answers nothing; no probe says so.
#[test]
fn reads_leave_a_member_that_hangs_and_none_comes_until_a_probe_succeeds() {
    paused(async {
        let (members, mut keyward) = three();
        let client = keyward.client().await;
        let hung = Cell::new(0);
        let script = async {
            let mut held = Vec::new();
            loop {
                let (at, call) = next_of(&members).await;
                if at == 0 {
                    hung.set(hung.get() + 1);
                    held.push(call);
                } else {
                    call.reply(&ranged(5)).await;
                }
            }
        };
        let calls = async {
            let outcomes = join_all((0..12).map(|_| client.call(RANGE, range("k")))).await;
            assert!(outcomes.iter().all(|outcome| !outcome.message().is_empty()));
            assert_eq!(hung.get(), 4, "its share, and each of them was answered elsewhere");
            let hints = std::iter::from_fn(|| keyward.hints.try_recv().ok()).collect::<Vec<_>>();
            assert!(hints.contains(&MembershipHint::Unreachable(MemberId(1))), "{hints:?}");
            let outcomes = join_all((0..12).map(|_| client.call(RANGE, range("k")))).await;
            assert!(outcomes.iter().all(|outcome| !outcome.message().is_empty()));
            assert_eq!(hung.get(), 4, "none comes any more");
            keyward.probed();
            let (outcomes, ()) =
                tokio::join!(join_all((0..12).map(|_| client.call(RANGE, range("k")))), async {
                    settled().await;
                    // A lone call would wait until a probe says so again.
                    keyward.members.snapshot.load().members[0].suspect();
                });
            assert!(outcomes.iter().all(|outcome| !outcome.message().is_empty()));
            assert_eq!(hung.get(), 5, "then one to see");
        };
        tokio::select! {
            () = calls => {}
            () = script => {}
        }
    });
}

/// Its disk is slow, and it delivers late for as long as that lasts, while the others deliver at once.
#[test]
fn a_watch_leaves_a_member_that_is_far_slower_than_the_others() {
    paused(async {
        let (members, keyward) = three();
        let client = keyward.client().await;
        let mut stream = client.open(WATCH).await.expect("open");
        stream.say(&watch("k", 5)).await;
        let (home, mut watching) = next_called(&members, WATCH).await;
        let create = create_of(&watching.messages.next().await.expect("a create")).expect("a create");
        watching.say(&created(create.watch_id, 9)).await.expect("taken");
        assert!(watched(&stream.next().await.expect("created")).created);
        watching.say(&event(create.watch_id, 10, 1)).await.expect("taken");
        assert_eq!(watched(&stream.next().await.expect("an event")).events.len(), 1);

        let calls = async {
            for _ in 0..400 {
                client.call(RANGE, range("k")).await.message();
                // A slow member is tried again after seconds only.
                tokio::time::sleep(Duration::from_millis(300)).await;
            }
            panic!("the watch stays");
        };
        let moved = async {
            loop {
                let (at, call) = next_of(&members).await;
                if call.uri.path() == WATCH {
                    break (at, call);
                }
                tokio::time::sleep(Duration::from_millis(if at == home { 400 } else { 2 })).await;
                call.reply(&ranged(10)).await;
            }
        };
        let (at, mut again) = tokio::select! {
            moved = moved => moved,
            () = calls => unreachable!("it panics"),
        };
        assert_ne!(at, home);
        let load = &keyward.members.snapshot.load().members[home].load;
        assert_eq!(load.ejected(Instant::now()).map(|(why, _)| why), Some(Ejection::Slow));
        let rows = keyward.shown(ViewTopic::Members).await;
        let why = rows[home]["why"].as_str().expect("a reason");
        assert!(why.starts_with("is ejected, slow: "), "status and show say so too: {why}");
        let create = create_of(&again.messages.next().await.expect("a create")).expect("a create");
        assert!((10..=11).contains(&create.start_revision), "where the client is: {create:?}");
        again.say(&created(create.watch_id, 11)).await.expect("taken");
        for revision in create.start_revision..=11 {
            again.say(&event(create.watch_id, revision, 1)).await.expect("taken");
        }
        let told = watched(&stream.next().await.expect("an event"));
        assert_eq!((told.events.len(), told.created, told.canceled), (1, false, false));
        assert_eq!(told.events[0].kv.as_ref().expect("a pair").mod_revision, 11, "neither lost nor twice");
    });
}

#[test]
fn a_write_at_a_member_that_hangs_is_never_sent_again_and_told_as_unknown() {
    paused(async {
        let (members, keyward) = three();
        let client = keyward.client().await;
        let (outcome, call) = tokio::join!(client.call(PUT, put(5)), async {
            let (at, call) = next_of(&members).await;
            keyward.members.snapshot.load().members[at].suspect();
            call
        });
        assert_eq!(outcome.end.told(), (Code::Unavailable, "etcdserver: request timed out"));
        assert!(members.iter().all(|member| member.was_called_again().is_none()));
        drop(call);
    });
}

/// It hangs, and is gone from the list; or it is listed elsewhere, where another process is.
#[test]
fn a_read_leaves_a_member_that_was_removed_or_has_moved_and_a_write_ends_as_unknown() {
    paused(async {
        for is_moved in [false, true] {
            let (members, keyward) = three();
            let client = keyward.client().await;
            let (outcome, _held) = tokio::join!(client.call(RANGE, range("k")), async {
                let (at, held) = next_of(&members).await;
                change(&keyward, at, is_moved);
                let (other, call) = next_of(&members).await;
                assert_ne!(other, at);
                call.reply(&ranged(5)).await;
                held
            });
            outcome.message();
            let (outcome, _held) = tokio::join!(client.call(PUT, put(1)), async {
                let (at, held) = next_of(&members).await;
                change(&keyward, at, is_moved);
                held
            });
            assert_eq!(outcome.end.told(), (Code::Unavailable, "etcdserver: request timed out"));
            assert!(members.iter().all(|member| member.was_called_again().is_none()));
        }
    });
}

fn change(keyward: &Keyward, at: usize, is_moved: bool) {
    let id = MemberId(at as u64 + 1);
    keyward.publish(|membership| {
        let place = membership.members.iter().position(|member| member.id == id).expect("listed");
        let mut moved = keyward::members::membership::Member::clone(&membership.members.remove(place));
        if is_moved {
            moved.endpoint.port += 1;
            membership.members.insert(place, moved.into());
        }
    });
}

/// How often members were ejected when a client gave up 20 calls, each after a second, while the other members answered.
async fn ejections_by_giving_up(path: &str, message: &[u8]) -> u32 {
    let (members, keyward) = three();
    let client = keyward.client().await;
    for _ in 0..20 {
        let stream = client.begin(path, message).await.expect("sent");
        let (at, call) = next_of(&members).await;
        tokio::time::sleep(Duration::from_millis(1100)).await;
        for (other, member) in keyward.members.snapshot.load().members.iter().enumerate() {
            if other != at {
                member.load.record_answer(Instant::now());
            }
        }
        stream.cancel();
        settled().await;
        drop(call);
    }
    keyward.members.snapshot.load().members.iter().map(|member| member.load.ejections()).sum()
}

#[test]
fn a_client_that_gives_up_what_may_take_long_speaks_against_no_member() {
    paused(async {
        assert_eq!(ejections_by_giving_up(TXN, b"").await, 0);
        let many =
            RangeRequest { key: "a".into(), range_end: "b".into(), limit: 9, ..RangeRequest::default() };
        assert_eq!(ejections_by_giving_up(RANGE, &many.encode_to_vec()).await, 0);
        assert!(ejections_by_giving_up(RANGE, &range("k")).await > 0, "one key is never slow");
    });
}

/// It answered the write and shows less a moment later: another process behind the same address, say.
#[test]
fn a_local_read_below_what_was_shown_is_made_anew_after_a_linearizable_one() {
    paused(async {
        let (members, keyward) = three();
        let client = keyward.client().await;
        let (written, wrote) = tokio::join!(client.call(PUT, put(5)), async {
            let (at, call) = next_of(&members).await;
            call.reply(&was_put(10)).await;
            at
        });
        written.message();
        // At last the whole cluster has less: a history that is gone counts no more.
        for (caught_up, shown, steps) in [(12, 12, 3), (12, 12, 1), (4, 4, 3), (4, 4, 1)] {
            let script = async {
                let mut behind = steps > 1;
                for step in 0..steps {
                    let (at, mut call) = next_of(&members).await;
                    let message = call.message().await;
                    assert_eq!(at, wrote, "known to be there");
                    assert_eq!(is_local(&message), step != 1);
                    call.reply(&ranged(if behind { 3 } else { caught_up })).await;
                    behind = false;
                }
            };
            let (outcome, ()) = tokio::join!(client.call(RANGE, local("k")), script);
            assert_eq!(revision(&outcome), shown);
        }
        assert_eq!(keyward.metrics.tries.behind.get(), 2);
        assert!(members.iter().all(|member| member.was_called_again().is_none()));
    });
}

/// A grant moves no revision: no answer tells whether its member knows of it yet.
#[test]
fn leases_are_listed_by_a_member_that_has_caught_up() {
    paused(async {
        let (members, keyward) = three();
        let client = keyward.client().await;
        let script = async {
            let (asked, mut call) = next_of(&members).await;
            assert!(call.uri.path() == RANGE && !is_local(&call.message().await));
            call.reply(&ranged(7)).await;
            let (at, call) = next_of(&members).await;
            assert_eq!(call.uri.path(), LEASES);
            assert_eq!(at, asked);
            let answer = LeaseLeasesResponse { header: Some(header(7)), leases: Vec::new() };
            call.reply(&answer.encode_to_vec()).await;
        };
        let (outcome, ()) = tokio::join!(client.call(LEASES, b""), script);
        outcome.message();
    });
}

/// The member that caught up may be lost before it lists them: the next one catches up as well.
#[test]
fn leases_are_listed_elsewhere_where_the_member_is_lost() {
    paused(async {
        let (members, keyward) = three();
        let client = keyward.client().await;
        let script = async {
            let mut asked = Vec::new();
            for lost in [true, false] {
                // An answer of one that has not caught up is not passed on.
                loop {
                    let (at, call) = next_of(&members).await;
                    if call.uri.path() == RANGE {
                        call.reply(&ranged(7)).await;
                        asked.push(at);
                        break;
                    }
                    call.reply(&LeaseLeasesResponse::default().encode_to_vec()).await;
                }
                let (at, call) = next_of(&members).await;
                assert_eq!((call.uri.path(), Some(&at)), (LEASES, asked.last()));
                if lost {
                    call.reset(h2::Reason::INTERNAL_ERROR);
                } else {
                    let leases = vec![LeaseStatus { id: 5 }];
                    let answer = LeaseLeasesResponse { header: Some(header(7)), leases };
                    call.reply(&answer.encode_to_vec()).await;
                }
            }
            assert_ne!(asked[0], asked[1]);
        };
        let (outcome, ()) = tokio::join!(client.call(LEASES, b""), script);
        let told = LeaseLeasesResponse::decode(outcome.message().clone()).expect("an answer");
        assert_eq!(told.leases, [LeaseStatus { id: 5 }]);
    });
}

/// The leader may apply what it agreed on later than a follower.
#[test]
fn the_time_to_live_of_a_lease_is_not_told_from_before_what_was_shown() {
    paused(async {
        let (members, keyward) = three();
        let client = keyward.client().await;
        let (written, ()) = tokio::join!(client.call(PUT, put(5)), async {
            next_of(&members).await.1.reply(&was_put(10)).await;
        });
        written.message();
        let lives =
            |revision| LeaseTimeToLiveResponse { header: Some(header(revision)), ..Default::default() };
        let script = async {
            let (leader, call) = next_of(&members).await;
            call.reply(&lives(9).encode_to_vec()).await;
            for (path, answer) in [(RANGE, ranged(11)), (TIME_TO_LIVE, lives(11).encode_to_vec())] {
                let (at, call) = next_of(&members).await;
                assert_eq!(call.uri.path(), path);
                assert_eq!(at, leader);
                call.reply(&answer).await;
            }
        };
        let asked = LeaseTimeToLiveRequest { id: 5, keys: true }.encode_to_vec();
        let (outcome, ()) = tokio::join!(client.call(TIME_TO_LIVE, asked), script);
        let told = LeaseTimeToLiveResponse::decode(outcome.message().clone()).expect("an answer");
        assert_eq!(told.header.expect("a header").revision, 11);
    });
}

#[test]
fn trouble_upstream_is_multiplied_by_a_fifth_only() {
    paused(async {
        let (members, keyward) = three();
        let client = keyward.client().await;
        let seen = Cell::new(0);
        let script = async {
            loop {
                let (_, call) = next_of(&members).await;
                seen.set(seen.get() + 1);
                call.refuse(Code::Unknown, TOO_MANY);
            }
        };
        let calls = async {
            for _ in 0..20 {
                for outcome in join_all((0..200).map(|_| client.call(RANGE, range("k")))).await {
                    assert_eq!(outcome.end.told(), (Code::Unknown, TOO_MANY));
                }
            }
        };
        tokio::select! {
            () = calls => {}
            () = script => {}
        }
        // 4,000 calls, a fifth of them, what a shard has saved up at first, and 20 a second.
        let most = 4000 + 800 + 500 + 20 * 60;
        assert!((4800..=most).contains(&seen.get()), "{}", seen.get());
        assert!(keyward.metrics.tries.refused.get() > 1000);
    });
}

#[test]
fn writes_go_to_the_leader_where_that_is_configured_and_elsewhere_while_it_is_not_ready() {
    paused(async {
        let (members, keyward) = three_with("writes = \"leader\"\n");
        let client = keyward.client().await;
        assert_eq!(answered(&members, &client, PUT, &put(1), 6).await, [0; 6]);
        let reads = answered(&members, &client, RANGE, &range("k"), 6).await;
        assert!((0..3).all(|member| reads.contains(&member)), "{reads:?}");
        keyward.members.snapshot.load().members[0].suspect();
        let writes = answered(&members, &client, PUT, &put(1), 6).await;
        assert!(!writes.contains(&0), "{writes:?}");
    });
}

#[test]
fn reads_go_to_the_leader_or_to_the_near_where_that_is_configured() {
    paused(async {
        let (members, keyward) = three_with("reads = \"leader\"\n");
        let client = keyward.client().await;
        assert_eq!(answered(&members, &client, RANGE, &range("k"), 6).await, [0; 6]);
        let (members, keyward) = three_with("near = [\"m3\"]\n");
        // The members' task, which this rig does without, would say so.
        keyward.members.snapshot.load().members[2].load.set_lag_and_nearness(0, true);
        let client = keyward.client().await;
        assert_eq!(answered(&members, &client, RANGE, &range("k"), 6).await, [2; 6]);
        let writes = answered(&members, &client, PUT, &put(1), 6).await;
        assert!((0..3).all(|member| writes.contains(&member)), "{writes:?}");
    });
}

#[test]
fn after_a_change_of_users_a_client_stays_where_it_is_known() {
    paused(async {
        let (members, keyward) = three();
        let client = keyward.client().await;
        let add = AuthUserAddRequest { name: "alice".into(), ..AuthUserAddRequest::default() };
        let (added, at) = tokio::join!(client.call(USER_ADD, add.encode_to_vec()), async {
            let (at, call) = next_of(&members).await;
            call.reply(&AuthUserAddResponse { header: Some(header(5)) }.encode_to_vec()).await;
            at
        });
        added.message();
        assert_eq!(answered(&members, &client, RANGE, &range("k"), 6).await, [at; 6]);
        tokio::time::sleep(Duration::from_secs(2)).await;
        let later = answered(&members, &client, RANGE, &range("k"), 6).await;
        assert!((0..3).all(|member| later.contains(&member)), "{later:?}");
    });
}
