//! The limit on the bytes of one answer: what a request would make etcd gather is read in pages before the request is sent.

use std::rc::Rc;

use bytes::Bytes;
use keyward::downstream::session::{RevocationChange, Revocations};
use keyward::members::membership::AuthSetting;
use keyward::pb::etcdserverpb::request_op::Request;
use keyward::pb::etcdserverpb::{
    DeleteRangeRequest, DeleteRangeResponse, RangeRequest, RangeResponse, RequestOp, TxnRequest,
};
use keyward::pb::mvccpb::KeyValue;
use keyward::refusal::Code;
use keyward::tasks::{TaskHandle, Tasks};
use prost::Message as _;

use crate::client::{Client, Outcome};
use crate::member::Member;
use crate::revocations::decide;
use crate::rig::{Keyward, paused};
use crate::words::{INVALID_TOKEN, PUT, RANGE, TXN, header, put, txn_done, was_put};

const DELETE: &str = "/etcdserverpb.KV/DeleteRange";
const MIB: usize = 1024 * 1024;
/// Requests, and so values, are small.
const SMALL: &str = "[limits]\nrequest_size = '64KiB'";
const TOO_LARGE: &str = "keyward: the answer has more than 4194304 bytes; ask for fewer keys at a time";

/// A request as the member received it.
#[derive(Clone, Debug, PartialEq)]
enum Asked {
    Range(RangeRequest),
    Other(&'static str),
}

/// A configuration of these lines, and a limit of 4 MiB.
fn limited(lines: &str) -> String {
    format!("[policy.peer_limits]\nbytes_per_answer = '4MiB'\n{lines}\n")
}

/// Keyward before a member with keys of these sizes.
struct Measured {
    alice: Client,
    keyward: Keyward,
    asked: Rc<std::cell::RefCell<Vec<Asked>>>,
    _answers: TaskHandle,
}

impl Measured {
    async fn new(lines: &str, sizes: &[usize]) -> Self {
        let member = Rc::new(Member::new(1, &Tasks::default()));
        let keyward = Keyward::configured(&[&member], AuthSetting::On, &limited(lines));
        let asked = Rc::default();
        let serving = answer_all(Rc::clone(&member), sizes.to_vec(), Rc::clone(&asked));
        let answers = keyward.tasks.spawn("answers of the test", serving);
        let alice = keyward.logged_in("alice").await;
        Self { alice, keyward, asked, _answers: answers }
    }

    async fn range(&self, range: &RangeRequest) -> Outcome {
        self.alice.call(RANGE, range.encode_to_vec()).await
    }

    /// What the member received since the last call of this function.
    fn asked(&self) -> Vec<Asked> {
        self.asked.take()
    }

    fn ranges(&self) -> Vec<RangeRequest> {
        let ranges = self.asked().into_iter().filter_map(|asked| match asked {
            Asked::Range(range) => Some(range),
            Asked::Other(_) => None,
        });
        ranges.collect()
    }
}

async fn answer_all(member: Rc<Member>, sizes: Vec<usize>, asked: Rc<std::cell::RefCell<Vec<Asked>>>) {
    loop {
        let mut call = member.call().await;
        match call.path() {
            RANGE => {
                let range = RangeRequest::decode(call.message().await).expect("a Range");
                asked.borrow_mut().push(Asked::Range(range.clone()));
                if range.key.starts_with(b"secret") {
                    call.refuse(Code::PermissionDenied, "etcdserver: permission denied");
                } else {
                    call.reply(&in_store(&range, &sizes).encode_to_vec()).await;
                }
            }
            PUT => {
                asked.borrow_mut().push(Asked::Other("Put"));
                call.reply(&was_put(9)).await;
            }
            TXN => {
                asked.borrow_mut().push(Asked::Other("Txn"));
                call.reply(&txn_done(9)).await;
            }
            DELETE => {
                asked.borrow_mut().push(Asked::Other("DeleteRange"));
                let answer =
                    DeleteRangeResponse { header: Some(header(9)), ..DeleteRangeResponse::default() };
                call.reply(&answer.encode_to_vec()).await;
            }
            other => panic!("{other}"),
        }
    }
}

fn key(number: usize) -> Bytes {
    format!("k{number:05}").into()
}

/// The answer of a store with a key of each size.
fn in_store(asked: &RangeRequest, sizes: &[usize]) -> RangeResponse {
    let matches = |key: &Bytes| match &asked.range_end[..] {
        b"" => *key == asked.key,
        b"\0" => *key >= asked.key,
        end => *key >= asked.key && &key[..] < end,
    };
    let keys = sizes.iter().enumerate().map(|(number, size)| (key(number), *size));
    let found: Vec<_> = keys.filter(|(key, _)| matches(key)).collect();
    let most = usize::try_from(asked.limit).ok().filter(|limit| *limit > 0).unwrap_or(usize::MAX);
    let kvs = found.iter().take(most).map(|(key, size)| KeyValue {
        key: key.clone(),
        value: if asked.keys_only { Bytes::new() } else { vec![7; *size].into() },
        ..KeyValue::default()
    });
    let count = i64::try_from(found.len()).expect("few keys");
    RangeResponse { header: Some(header(9)), kvs: kvs.collect(), more: found.len() > most, count }
}

fn all() -> RangeRequest {
    RangeRequest { key: "k".into(), range_end: "l".into(), ..RangeRequest::default() }
}

#[test]
fn an_answer_of_too_many_bytes_is_measured_in_pages_and_refused() {
    paused(async {
        let measured = Measured::new(SMALL, &[10_000; 1000]).await;
        let outcome = measured.range(&all()).await;
        assert_eq!(outcome.end.told(), (Code::ResourceExhausted, TOO_LARGE));
        let pages = measured.ranges();
        let largest = pages.iter().map(|page| page.limit).max();
        assert!(pages.iter().all(|page| page.limit > 0), "the request itself is not sent: {pages:?}");
        assert!(pages.len() < 30 && largest <= Some(32), "pages of some 256 KiB: {pages:?}");
        // No page begins before the end of the one before.
        assert!(pages.is_sorted_by(|one, two| one.key < two.key));
        let limited = RangeRequest { limit: 300, ..all() };
        let outcome = measured.range(&limited).await;
        assert_eq!(outcome.end.code(), Some(Code::Ok), "3 MB");
        let pages = measured.ranges();
        assert_eq!(pages.iter().filter(|page| page.limit == 300 && page.key == limited.key).count(), 1);
        assert!(pages.len() > 5, "measured first: {pages:?}");
        // etcd reads all pairs before it sorts.
        let sorted = RangeRequest { sort_order: 2, sort_target: 3, ..limited };
        assert_eq!(measured.range(&sorted).await.end.told(), (Code::ResourceExhausted, TOO_LARGE));
        let keys_only = RangeRequest { keys_only: true, ..all() };
        assert_eq!(measured.range(&keys_only).await.end.told(), (Code::ResourceExhausted, TOO_LARGE));
        assert!(measured.ranges().iter().all(|page| page.sort_order == 0 && !page.keys_only));
        let text = measured.keyward.metrics.text().expect("text");
        let line = "keyward_limit_refused_total{scope=\"peer\",limit=\"bytes_per_answer\"} 3";
        assert!(text.contains(line), "{text}");
    });
}

#[test]
fn what_cannot_be_too_large_is_asked_for_at_once() {
    paused(async {
        let measured = Measured::new(SMALL, &[10_000; 1000]).await;
        let one = RangeRequest { range_end: Bytes::new(), key: key(3), ..all() };
        let two = RangeRequest { limit: 2, ..all() };
        let count = RangeRequest { count_only: true, ..all() };
        for range in [one, two, count] {
            assert_eq!(measured.range(&range).await.end.code(), Some(Code::Ok));
            assert_eq!(measured.ranges(), [range]);
        }
        assert_eq!(measured.alice.call(PUT, put(100)).await.end.code(), Some(Code::Ok));
        assert_eq!(measured.asked(), [Asked::Other("Put")]);
        // What etcd refuses is refused by etcd.
        let secret = RangeRequest { key: "secret".into(), range_end: "t".into(), ..all() };
        let told = measured.range(&secret).await;
        assert_eq!(told.end.told(), (Code::PermissionDenied, "etcdserver: permission denied"));
        assert_eq!(measured.ranges().len(), 2, "a page, and the request");
    });
}

#[test]
fn values_larger_than_a_page_are_counted_one_by_one() {
    paused(async {
        let sizes = [100, MIB, 100, 100, 2 * MIB, 100];
        let measured = Measured::new("", &sizes).await;
        assert_eq!(measured.range(&all()).await.end.code(), Some(Code::Ok), "3 MiB");
        let measured = Measured::new("", &[sizes.as_slice(), &[MIB]].concat()).await;
        assert_eq!(measured.range(&all()).await.end.told(), (Code::ResourceExhausted, TOO_LARGE));
        // A value larger than a request through Keyward may be.
        let measured = Measured::new("", &[100, 3 * MIB, 100]).await;
        assert_eq!(measured.range(&all()).await.end.told(), (Code::ResourceExhausted, TOO_LARGE));
    });
}

/// A member counts all keys of a page's range: pages to the end of a large range would cost the square of its keys.
#[test]
fn many_small_keys_are_measured_without_counting_them_again_for_each_page() {
    paused(async {
        let sizes = vec![10; 8_000];
        let measured = Measured::new("", &sizes).await;
        let answer = in_store(&all(), &sizes).encoded_len();
        assert!(answer < 4 * MIB && answer > MIB / 8, "{answer}");
        assert_eq!(measured.range(&all()).await.end.code(), Some(Code::Ok));
        let pages = measured.ranges();
        let counted = pages.iter().map(|page| in_store(page, &sizes).count).sum::<i64>();
        // 16 keys of 2 MiB are 32 MiB; the request itself and the first page count all.
        assert!(pages.iter().all(|page| page.limit <= 16), "{pages:?}");
        assert!(counted < 64 * 8_000, "{} pages, {counted} counted", pages.len());
        assert!(pages.len() < 4 * 8_000 / 16, "{} pages", pages.len());
    });
}

/// Every Go client has one connection.
#[test]
fn many_calls_at_once_are_measured_in_turn() {
    for lines in ["", "[policy]\nlimits_mode = 'shadow'"] {
        paused(async {
            let measured = Measured::new(lines, &[100; 3]).await;
            let calls = (0..200).map(|_| async { measured.range(&all()).await.end.code() });
            let codes = futures_util::future::join_all(calls).await;
            assert!(codes.iter().all(|code| *code == Some(Code::Ok)), "{codes:?}");
        });
    }
}

#[test]
fn writes_that_return_what_was_there_and_all_branches_of_a_txn_are_measured() {
    paused(async {
        let measured = Measured::new(SMALL, &[10_000; 1000]).await;
        let delete =
            |prev_kv| DeleteRangeRequest { key: "k".into(), range_end: "l".into(), prev_kv }.encode_to_vec();
        let outcome = measured.alice.call(DELETE, delete(true)).await;
        assert_eq!(outcome.end.told(), (Code::ResourceExhausted, TOO_LARGE));
        assert!(!measured.asked().contains(&Asked::Other("DeleteRange")), "nothing is deleted");
        assert_eq!(measured.alice.call(DELETE, delete(false)).await.end.code(), Some(Code::Ok));
        assert_eq!(measured.asked(), [Asked::Other("DeleteRange")]);
        let read =
            |limit| RequestOp { request: Some(Request::RequestRange(RangeRequest { limit, ..all() })) };
        let txn = |success: &[RequestOp], failure: &[RequestOp]| {
            let (success, failure) = (success.to_vec(), failure.to_vec());
            TxnRequest { success, failure, ..TxnRequest::default() }.encode_to_vec()
        };
        // etcd refuses a read at a compacted revision in the branch that is taken alone.
        let refused = [RequestOp {
            request: Some(Request::RequestRange(RangeRequest {
                key: "secret".into(),
                range_end: "t".into(),
                ..all()
            })),
        }];
        for (message, is_within) in [
            (txn(&[read(0)], &refused), false),
            (txn(&[read(300)], &refused), true),
            // etcd reads one of both; what is read to know it is bounded by the limit.
            (txn(&[read(300)], &[read(301)]), false),
            (txn(&[read(150)], &[read(151)]), true),
            (txn(&[read(300), read(300)], &[]), false),
            (txn(&[], &[read(1), read(0)]), false),
        ] {
            let outcome = measured.alice.call(TXN, message).await;
            let asked = measured.asked();
            assert_eq!(outcome.end.code() == Some(Code::Ok), is_within, "{outcome:?}");
            assert_eq!(asked.contains(&Asked::Other("Txn")), is_within, "{asked:?}");
        }
        // Equal parts are measured once.
        let twice = txn(&[read(130), read(130)], &[read(130)]);
        assert_eq!(measured.alice.call(TXN, twice).await.end.code(), Some(Code::Ok));
        let first_pages = measured.ranges().into_iter().filter(|page| page.key == all().key);
        assert_eq!(first_pages.count(), 1);
    });
}

#[test]
fn in_shadow_too_large_answers_are_counted_and_served() {
    paused(async {
        let measured =
            Measured::new(&format!("{SMALL}\n[policy]\nlimits_mode = 'shadow'"), &[10_000; 1000]).await;
        assert_eq!(measured.range(&all()).await.end.code(), Some(Code::Ok));
        let text = measured.keyward.metrics.text().expect("text");
        let line = "keyward_limit_shadow_refused_total{scope=\"peer\",limit=\"bytes_per_answer\"} 1";
        assert!(text.contains(line), "{text}");
    });
}

/// The pages take time, however their measure ends: within the limit, past one that is only counted, at etcd's refusal.
#[test]
fn a_call_of_who_was_revoked_while_its_answer_was_measured_is_not_sent() {
    paused(async {
        let shadow = format!("{SMALL}\n[policy]\nlimits_mode = 'shadow'");
        for (lines, keys, refuses) in [(SMALL, 300, false), (&shadow, 1000, false), (SMALL, 300, true)] {
            let member = Rc::new(Member::new(1, &Tasks::default()));
            let keyward = Keyward::configured(&[&member], AuthSetting::On, &limited(lines));
            let alice = keyward.logged_in("alice").await;
            let sizes = vec![10_000; keys];
            let mut known = Revocations::default();
            let pages = async {
                loop {
                    let mut page = member.called(RANGE).await;
                    let asked = RangeRequest::decode(page.message().await).expect("a Range");
                    assert!(asked.limit > 0, "the request itself is not sent");
                    known = decide(&keyward, &known, &RevocationChange::Revoke("alice".into()));
                    if refuses {
                        page.refuse(Code::PermissionDenied, "etcdserver: permission denied");
                    } else {
                        page.reply(&in_store(&asked, &sizes).encode_to_vec()).await;
                    }
                }
            };
            let outcome = tokio::select! {
                outcome = alice.call(RANGE, all().encode_to_vec()) => outcome,
                () = pages => unreachable!("pages are answered for as long as the call lasts"),
            };
            assert_eq!(outcome.end.told(), (Code::Unauthenticated, INVALID_TOKEN), "{lines}");
        }
    });
}
