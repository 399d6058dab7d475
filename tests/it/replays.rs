//! What is sent again, what never is, and within which time.

use std::time::Duration;

use h2::Reason;
use keyward::members::membership::{AuthSetting, MembershipHint};
use keyward::pb::etcdserverpb::{MemberAddRequest, MemberAddResponse};
use keyward::refusal::Code;
use keyward::tasks::Tasks;
use prost::Message as _;
use tokio::time::Instant;

use crate::client::{Client, Outcome};
use crate::member::{Call, Member, next_of};
use crate::rig::{Keyward, paused, settled, three};
use crate::words::{INVALID_TOKEN, LOST, PUT, RANGE, put, range, ranged, ranged_value, was_put};

type Refuse = fn(Call, Code, &'static str);

/// etcd's plaintext port sends a refusal in the header, its TLS port in trailers.
const FORMS: [Refuse; 2] = [Call::refuse, Call::refuse_in_trailers];

fn nothing_else(members: &[Member]) {
    assert!(members.iter().all(|member| member.was_called_again().is_none()), "no call but these");
}

async fn with_token() -> (Member, Keyward, Client) {
    let member = Member::new(1, &Tasks::default());
    let keyward = Keyward::with_auth(&[&member]);
    let client = keyward.logged_in("alice").await;
    (member, keyward, client)
}

#[test]
fn a_refused_token_is_healed_once_by_a_fresh_login() {
    paused(async {
        for refuse in FORMS {
            let (member, keyward, client) = with_token().await;
            let script = async {
                let mut first = member.called(PUT).await;
                let message = first.message().await;
                let before = first.token().map(str::to_owned);
                refuse(first, Code::Unauthenticated, INVALID_TOKEN);
                let mut second = member.called(PUT).await;
                assert_eq!(second.message().await, message, "the same bytes");
                assert_ne!(second.token().map(str::to_owned), before);
                second.reply(&was_put(3)).await;
            };
            let (outcome, ()) = tokio::join!(client.call(PUT, put(5)), script);
            outcome.message();
            assert_eq!(member.logins(), 2, "one when logging in, one for the fresh token");
            assert_eq!(keyward.metrics.healed.get(), 1);
        }
    });
}

#[test]
fn the_second_refusal_is_the_truth() {
    paused(async {
        for refuse in FORMS {
            let (member, _keyward, client) = with_token().await;
            let script = async {
                for _ in 0..2 {
                    refuse(member.called(RANGE).await, Code::Unauthenticated, INVALID_TOKEN);
                }
            };
            let (outcome, ()) = tokio::join!(client.call(RANGE, range("k")), script);
            assert_eq!(outcome.end.told(), (Code::Unauthenticated, INVALID_TOKEN));
            assert!(outcome.messages.is_empty());
            assert_eq!(member.logins(), 2);
            assert!(member.was_called_again().is_none());
        }
    });
}

/// While roles change one after another, each change refuses what is under way, with a good token too.
#[test]
fn a_write_outlives_a_row_of_changes_to_users_and_roles() {
    const OLD: &str = "etcdserver: revision of auth store is old";
    paused(async {
        for refuse in FORMS {
            for (changes, told) in [(4, None), (6, Some((Code::InvalidArgument, OLD)))] {
                let (member, _keyward, client) = with_token().await;
                let script = async {
                    for _ in 0..changes {
                        refuse(member.called(PUT).await, Code::InvalidArgument, OLD);
                    }
                    if told.is_none() {
                        member.called(PUT).await.reply(&was_put(3)).await;
                    }
                };
                let (outcome, ()) = tokio::join!(client.call(PUT, put(5)), script);
                match told {
                    None => drop(outcome.message()),
                    Some(told) => assert_eq!(outcome.end.told(), told),
                }
                assert_eq!(member.logins(), 2, "one fresh token is enough");
                assert!(member.was_called_again().is_none());
            }
        }
    });
}

/// Ten calls that find one token dead cause one login.
#[test]
fn many_refusals_of_one_token_cause_one_login() {
    paused(async {
        let (member, _keyward, client) = with_token().await;
        let script = async {
            let mut calls = Vec::new();
            for _ in 0..10 {
                calls.push(member.called(RANGE).await);
            }
            calls.into_iter().for_each(|call| call.refuse(Code::Unauthenticated, INVALID_TOKEN));
            for _ in 0..10 {
                member.called(RANGE).await.reply(&ranged(2)).await;
            }
        };
        let all = futures_util::future::join_all((0..10).map(|_| client.call(RANGE, b"\x0a\x01k")));
        let (outcomes, ()) = tokio::join!(all, script);
        for outcome in &outcomes {
            outcome.message();
        }
        assert_eq!(member.logins(), 2);
    });
}

#[test]
fn a_denial_is_passed_on_at_once() {
    paused(async {
        for refuse in FORMS {
            let (member, _keyward, client) = with_token().await;
            let script = async {
                refuse(member.called(PUT).await, Code::PermissionDenied, "etcdserver: permission denied");
            };
            let (outcome, ()) = tokio::join!(client.call(PUT, put(1)), script);
            assert_eq!(outcome.end.told(), (Code::PermissionDenied, "etcdserver: permission denied"));
            assert!(member.was_called_again().is_none());
        }
    });
}

/// Auth was off and is turned on: a call that went without a token says so, and is sent again with one.
#[test]
fn auth_that_was_turned_on_is_noticed_by_a_call() {
    paused(async {
        let member = Member::new(1, &Tasks::default());
        let keyward = Keyward::configured(&[&member], AuthSetting::Off, "");
        let client = keyward.logged_in("alice").await;
        let script = async {
            let call = member.called(PUT).await;
            assert_eq!(call.token(), None);
            call.refuse(Code::InvalidArgument, "etcdserver: user name is empty");
            let call = member.called(PUT).await;
            assert_eq!(call.token(), Some("alice.1"));
            call.reply(&was_put(3)).await;
        };
        let (outcome, ()) = tokio::join!(client.call(PUT, put(1)), script);
        outcome.message();
        assert_eq!(keyward.members.auth.now(), AuthSetting::On);
    });
}

async fn lost(client: &Client, members: &[Member], path: &str, message: &[u8]) -> (usize, Outcome) {
    let script = async {
        let (at, mut call) = next_of(members).await;
        call.message().await;
        call.reset(Reason::INTERNAL_ERROR);
        at
    };
    let (outcome, at) = tokio::join!(client.call(path, message), script);
    (at, outcome)
}

#[test]
fn a_write_whose_reply_was_lost_is_never_sent_again() {
    paused(async {
        let (members, keyward) = three();
        let client = keyward.client().await;
        for (path, message) in [
            (PUT, put(1)),
            ("/etcdserverpb.Lease/LeaseGrant", vec![]),
            ("/etcdserverpb.KV/DeleteRange", vec![]),
        ] {
            let (_, outcome) = lost(&client, &members, path, &message).await;
            assert_eq!(outcome.end.told(), (Code::Unavailable, LOST), "{path}");
            settled().await;
            nothing_else(&members);
            keyward.probed();
        }
    });
}

#[test]
fn a_read_whose_reply_was_lost_is_read_elsewhere() {
    paused(async {
        let (members, keyward) = three();
        let client = keyward.client().await;
        let script = async {
            let (first, call) = next_of(&members).await;
            call.reset(Reason::CANCEL);
            let (second, call) = next_of(&members).await;
            assert_ne!(first, second, "on another member");
            call.reply(&ranged(5)).await;
        };
        let (outcome, ()) = tokio::join!(client.call(RANGE, range("k")), script);
        outcome.message();
        nothing_else(&members);
    });
}

/// Even when the member dies half way through a reply that was held back.
#[test]
fn a_read_that_broke_half_way_is_read_elsewhere() {
    paused(async {
        let (members, keyward) = three();
        let client = keyward.client().await;
        let script = async {
            let (_, mut call) = next_of(&members).await;
            call.say_half(&ranged(5)).await;
            settled().await;
            call.reset(Reason::CANCEL);
            next_of(&members).await.1.reply(&ranged(5)).await;
        };
        let (outcome, ()) = tokio::join!(client.call(RANGE, range("k")), script);
        assert_eq!(outcome.message()[..], ranged(5)[..]);
    });
}

/// An answer is held back up to 64 KiB, by its announced length: a longer one goes to the client from its beginning.
#[test]
fn a_read_that_broke_half_way_is_not_read_again_if_its_answer_is_too_long_to_hold() {
    paused(async {
        let (members, keyward) = three();
        let client = keyward.client().await;
        for (length, is_read_again) in [(60_000, true), (70_000, false)] {
            let script = async {
                let (_, mut call) = next_of(&members).await;
                call.say_half(&ranged_value(length)).await;
                settled().await;
                call.reset(Reason::CANCEL);
                if is_read_again {
                    next_of(&members).await.1.reply(&ranged_value(length)).await;
                }
            };
            let (outcome, ()) = tokio::join!(client.call(RANGE, range("k")), script);
            if is_read_again {
                assert_eq!(outcome.message()[..], ranged_value(length)[..]);
            } else {
                assert_eq!(outcome.end.told(), (Code::Unavailable, LOST));
            }
            nothing_else(&members);
        }
    });
}

#[test]
fn a_write_that_was_never_sent_goes_elsewhere() {
    paused(async {
        let (members, keyward) = three();
        let client = keyward.client().await;
        members[0].refuse_connections(true);
        members[1].refuse_connections(true);
        for _ in 0..3 {
            let script = async { members[2].called(PUT).await.reply(&was_put(3)).await };
            let (outcome, ()) = tokio::join!(client.call(PUT, put(1)), script);
            outcome.message();
        }
        nothing_else(&members);
    });
}

/// REFUSED_STREAM says that the member did nothing (RFC 9113, 8.7).
#[test]
fn a_write_on_a_refused_stream_goes_elsewhere() {
    paused(async {
        let (members, keyward) = three();
        let client = keyward.client().await;
        let script = async {
            next_of(&members).await.1.reset(Reason::REFUSED_STREAM);
            next_of(&members).await.1.reply(&was_put(3)).await;
        };
        let (outcome, ()) = tokio::join!(client.call(PUT, put(1)), script);
        outcome.message();
        nothing_else(&members);
    });
}

#[test]
fn a_connection_that_says_goodbye_finishes_its_calls_and_takes_no_new_ones() {
    paused(async {
        let tasks = Tasks::default();
        let member = Member::new(1, &tasks);
        let keyward = Keyward::before(&[&member]);
        let client = keyward.client().await;
        let open = client.begin(PUT, put(1)).await.expect("sent");
        let before = member.called(PUT).await;
        member.go_away();
        settled().await;
        keyward.probed();
        let script = async {
            let call = member.called(PUT).await;
            assert_eq!(member.dials(), 2, "on a new connection");
            call.reply(&was_put(4)).await;
            before.reply(&was_put(3)).await;
        };
        let (outcome, old, ()) = tokio::join!(client.call(PUT, put(1)), open.finish(), script);
        assert_eq!(outcome.message()[..], was_put(4)[..]);
        assert_eq!(old.message()[..], was_put(3)[..]);
        assert!(member.was_called_again().is_none());
    });
}

#[test]
fn a_refusal_that_proves_nothing_was_applied_sends_a_write_elsewhere() {
    paused(async {
        for (code, text) in [
            (Code::Unavailable, "etcdserver: leader changed"),
            (Code::Unavailable, "etcdserver: no leader"),
            (Code::Unavailable, "etcdserver: rpc not supported for learner"),
            (Code::FailedPrecondition, "etcdserver: rpc not supported for learner"),
            (Code::Unknown, "etcdserver: too many requests"),
            (Code::Unknown, "raft proposal dropped"),
        ] {
            for refuse in FORMS {
                let (members, keyward) = three();
                let client = keyward.client().await;
                let script = async {
                    let (first, call) = next_of(&members).await;
                    refuse(call, code, text);
                    let (second, call) = next_of(&members).await;
                    assert_ne!(first, second);
                    call.reply(&was_put(3)).await;
                };
                let (outcome, ()) = tokio::join!(client.call(PUT, put(1)), script);
                outcome.message();
                nothing_else(&members);
            }
        }
    });
}

/// A member that started a moment ago knows nothing of its peers' health; the others do.
#[test]
fn a_member_is_added_by_another_where_one_calls_the_cluster_unhealthy() {
    const MEMBER_ADD: &str = "/etcdserverpb.Cluster/MemberAdd";
    const UNHEALTHY: &str = "etcdserver: unhealthy cluster";
    paused(async {
        let add = MemberAddRequest { peer_ur_ls: vec!["http://m4:2380".into()], is_learner: false };
        let (members, keyward) = three();
        let client = keyward.client().await;
        let script = async {
            let (first, call) = next_of(&members).await;
            call.refuse(Code::Unavailable, UNHEALTHY);
            let (second, call) = next_of(&members).await;
            assert_ne!(first, second);
            call.reply(&MemberAddResponse::default().encode_to_vec()).await;
        };
        tokio::join!(client.call(MEMBER_ADD, add.encode_to_vec()), script).0.message();
        // Where all say so it is the truth.
        let (asked, began) = (std::cell::Cell::new(0), Instant::now());
        let refusing = async {
            loop {
                next_of(&members).await.1.refuse(Code::Unavailable, UNHEALTHY);
                asked.set(asked.get() + 1);
            }
        };
        let outcome = tokio::select! {
            outcome = client.call(MEMBER_ADD, add.encode_to_vec()) => outcome,
            never = refusing => never,
        };
        assert_eq!(outcome.end.told(), (Code::Unavailable, UNHEALTHY));
        assert!(asked.get() >= 3, "asked {} times in {:?}", asked.get(), began.elapsed());
    });
}

#[test]
fn a_status_that_proves_nothing_ends_a_write() {
    paused(async {
        for (code, text) in [
            (Code::Unavailable, "etcdserver: request timed out"),
            (Code::Unavailable, "etcdserver: request timed out, possibly due to previous leader failure"),
            (Code::ResourceExhausted, "etcdserver: mvcc: database space exceeded"),
            (Code::Internal, "stream terminated"),
        ] {
            let (members, keyward) = three();
            let client = keyward.client().await;
            let script = async { next_of(&members).await.1.refuse(code, text) };
            let (outcome, ()) = tokio::join!(client.call(PUT, put(1)), script);
            assert_eq!(outcome.end.told(), (code, text));
            settled().await;
            nothing_else(&members);
        }
    });
}

/// Rules 7: clientv3 would send the write again.
#[test]
fn a_write_never_ends_as_canceled_or_too_late_unless_the_client_said_so() {
    paused(async {
        for (code, text) in [
            (Code::DeadlineExceeded, "context deadline exceeded"),
            (Code::Canceled, "context canceled"),
            (Code::Unknown, "context deadline exceeded"),
        ] {
            for refuse in FORMS {
                let (members, keyward) = three();
                let client = keyward.client().await;
                let script = async { refuse(next_of(&members).await.1, code, text) };
                let (outcome, ()) = tokio::join!(client.call(PUT, put(1)), script);
                assert_eq!(outcome.end.told(), (Code::Unavailable, "etcdserver: request timed out"));
            }
        }
    });
}

#[test]
fn the_clients_deadline_is_kept_and_told() {
    paused(async {
        let (members, keyward) = three();
        let client = keyward.client().await.header("grpc-timeout", "1500m");
        let began = Instant::now();
        let script = async {
            let (_, mut call) = next_of(&members).await;
            assert_eq!(call.headers["grpc-timeout"], "1500m");
            assert_eq!(call.canceled().await, Reason::CANCEL, "upstream is told");
        };
        let (outcome, ()) = tokio::join!(client.call(PUT, put(1)), script);
        assert_eq!(outcome.end.told(), (Code::DeadlineExceeded, "context deadline exceeded"));
        assert_eq!(began.elapsed(), Duration::from_millis(1500));
        nothing_else(&members);
    });
}

/// What is left of it goes with the second attempt.
#[test]
fn a_second_attempt_gets_what_is_left_of_the_deadline() {
    paused(async {
        let (members, keyward) = three();
        let client = keyward.client().await.header("grpc-timeout", "5S");
        let script = async {
            let (_, call) = next_of(&members).await;
            tokio::time::advance(Duration::from_secs(2)).await;
            call.refuse(Code::Unavailable, "etcdserver: leader changed");
            let (_, call) = next_of(&members).await;
            assert_eq!(call.headers["grpc-timeout"], "3000m");
            call.reply(&ranged(1)).await;
        };
        let (outcome, ()) = tokio::join!(client.call(RANGE, range("k")), script);
        outcome.message();
    });
}

/// A request that never comes whole ends at its deadline, too.
#[test]
fn the_deadline_covers_the_request_itself() {
    paused(async {
        let (members, keyward) = three();
        let client = keyward.client().await.header("grpc-timeout", "1S");
        let began = Instant::now();
        let mut stream = client.open(PUT).await.expect("open");
        let half = keyward::rpc::frame::encode(&put(100)).slice(..50);
        crate::wire::say_framed(&mut stream.send, half, false).await.expect("taken");
        let outcome = stream.finish().await;
        assert_eq!(outcome.end.told(), (Code::DeadlineExceeded, "context deadline exceeded"));
        assert_eq!(began.elapsed(), Duration::from_secs(1));
        nothing_else(&members);
    });
}

/// A Lock without a lease was given one before anything refused it: asked again, it would wait for itself (rules 28).
#[test]
fn a_lock_without_a_lease_is_asked_once_whatever_the_member_says() {
    const LOCK: &str = "/v3lockpb.Lock/Lock";
    paused(async {
        for (code, text) in [
            (Code::Unknown, "etcdserver: too many requests"),
            (Code::Unknown, "etcdserver: user name is empty"),
        ] {
            for lease in [&b""[..], b"\x10\x07"] {
                let member = Member::new(1, &Tasks::default());
                let keyward = Keyward::before(&[&member]);
                let client = keyward.logged_in("alice").await;
                let asked = [b"\x0a\x01k", lease].concat();
                let script = async {
                    member.called(LOCK).await.refuse(code, text);
                    if !lease.is_empty() {
                        member.called(LOCK).await.reply(b"").await;
                    }
                };
                let (outcome, ()) = tokio::join!(client.call(LOCK, asked), script);
                if lease.is_empty() {
                    assert_eq!(outcome.end.told(), (code, text));
                } else {
                    outcome.message();
                }
                assert!(member.was_called_again().is_none(), "{text}");
            }
        }
    });
}

/// A hint wakes whoever pauses before a retry: calls that anybody can make must not.
#[test]
fn a_call_without_a_token_is_no_news_where_auth_is_on() {
    paused(async {
        let member = Member::new(1, &Tasks::default());
        let lines = "[policy]\nrequire_identity = \"as-etcd\"\n";
        let mut keyward = Keyward::configured(&[&member], AuthSetting::Off, lines);
        let client = keyward.client().await;
        let empty = (Code::InvalidArgument, "etcdserver: user name is empty");
        for _ in 0..3 {
            let script = async { member.called(RANGE).await.refuse(empty.0, empty.1) };
            let (outcome, ()) = tokio::join!(client.call(RANGE, range("k")), script);
            assert_eq!(outcome.end.told(), empty);
        }
        assert!(matches!(keyward.hints.try_recv(), Ok(MembershipHint::AuthOn)), "the first told it");
        assert!(keyward.hints.try_recv().is_err(), "the others told nothing new");
    });
}
