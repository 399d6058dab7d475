//! A Defragment that names no member does all of them, one after the other and under nobody's calls; one that names a member
//! frees that one first. Story 11, without etcd.

use std::cell::{Cell, RefCell};
use std::time::Duration;

use keyward::members::membership::{self, Readiness, UnreadyReason};
use keyward::pb::etcdserverpb::response_op::Response;
use keyward::pb::etcdserverpb::{
    LeaseGrantRequest, LeaseGrantResponse, PutRequest, RangeRequest, RangeResponse, ResponseOp, TxnRequest,
    TxnResponse,
};
use keyward::pb::mvccpb::KeyValue;
use keyward::pb::v3lockpb::{LockRequest, LockResponse};
use keyward::refusal::Code;
use keyward::tasks::Tasks;
use prost::Message as _;
use tokio::sync::Notify;

use crate::client::Outcome;
use crate::log_records::Log;
use crate::member::{Call, Member, next_of};
use crate::rig::{Keyward, paused, settled};
use crate::words::{PUT, RANGE, TXN, WATCH, created, header, range, ranged, watch};

const DEFRAGMENT: &str = "/etcdserverpb.Maintenance/Defragment";
const USERS: &str = "/etcdserverpb.Auth/UserList";
const GRANT: &str = "/etcdserverpb.Lease/LeaseGrant";
const REVOKE: &str = "/etcdserverpb.Lease/LeaseRevoke";
const LOCK: &str = "/v3lockpb.Lock/Lock";
const PREFIX: &str = "/keyward-maintenance/defragment/";

/// Three members that do what is asked of them, the first of which leads, and what was done to them.
struct Scene {
    members: Vec<Member>,
    keyward: Keyward,
    /// Members in the order in which they were defragmented.
    done: RefCell<Vec<u64>>,
    /// Keys that were written, and the lives of leases that were granted.
    written: RefCell<Vec<String>>,
    granted: RefCell<Vec<i64>>,
    revoked: Cell<usize>,
    /// Who was done a while ago, as etcd has it.
    lately: Option<u64>,
    lock: Lock,
    /// Whom a Defragment is held back at until told.
    slow: Option<u64>,
    go_on: Notify,
    /// What members say to a question that only root may ask.
    refuses: Option<(Code, &'static str)>,
    /// Who refuses to be defragmented.
    broken: Option<u64>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Lock {
    Free,
    Anothers,
    Full,
    /// It fills up once the first member is under way.
    FillsUp,
}

impl Scene {
    fn new() -> Self {
        let tasks = Tasks::default();
        let members: Vec<_> = (1..=3).map(|id| Member::new(id, &tasks)).collect();
        let keyward = Keyward::before(&members.iter().collect::<Vec<_>>());
        Self {
            members,
            keyward,
            done: RefCell::default(),
            written: RefCell::default(),
            granted: RefCell::default(),
            revoked: Cell::default(),
            lately: None,
            lock: Lock::Free,
            slow: None,
            go_on: Notify::new(),
            refuses: None,
            broken: None,
        }
    }

    fn known(&self, id: u64) -> std::sync::Arc<membership::Member> {
        let members = self.keyward.members.snapshot.load_full();
        members.members.iter().find(|member| member.id.0 == id).cloned().expect("a member")
    }

    fn resting(&self) -> Vec<u64> {
        (1..=3).filter(|id| self.known(*id).maintenance.is_open()).collect()
    }

    /// Answers what the members are asked for as long as `client` goes on.
    async fn play<T>(&self, client: impl Future<Output = T>) -> T {
        let mut client = std::pin::pin!(client);
        loop {
            tokio::select! {
                biased;
                ended = client.as_mut() => return ended,
                (at, call) = next_of(&self.members) => {
                    self.answer(self.members[at].address.id.0, call).await;
                    // Whatever was suspected answers the next probe.
                    let keyward = &self.keyward;
                    let probe = async {
                        tokio::time::sleep(Duration::from_millis(50)).await;
                        keyward.probed();
                    };
                    probe.await;
                }
            }
        }
    }

    fn is_full(&self) -> bool {
        self.lock == Lock::Full || (self.lock == Lock::FillsUp && !self.done.borrow().is_empty())
    }

    async fn answer(&self, id: u64, mut call: Call) {
        let path = call.path().to_owned();
        let message = call.message().await;
        match path.as_str() {
            USERS => match self.refuses {
                Some((code, text)) => call.refuse(code, text),
                None => call.reply(&[]).await,
            },
            GRANT if self.is_full() => {
                call.refuse(Code::ResourceExhausted, "etcdserver: mvcc: database space exceeded");
            }
            GRANT => {
                let asked = LeaseGrantRequest::decode(message).expect("a grant");
                self.granted.borrow_mut().push(asked.ttl);
                let id = self.granted.borrow().len() as i64;
                call.reply(&LeaseGrantResponse { id, ttl: asked.ttl, ..Default::default() }.encode_to_vec())
                    .await;
            }
            TXN => {
                let asked = TxnRequest::decode(message).expect("a transaction");
                assert_eq!(asked.compare[0].key, format!("{PREFIX}lock"));
                let key = format!("{PREFIX}lock").into();
                let held = KeyValue { key, value: "b5".into(), ..Default::default() };
                let found = RangeResponse { kvs: vec![held], ..Default::default() };
                let answer = TxnResponse {
                    header: Some(header(5)),
                    succeeded: self.lock != Lock::Anothers,
                    responses: vec![ResponseOp { response: Some(Response::ResponseRange(found)) }],
                };
                call.reply(&answer.encode_to_vec()).await;
            }
            RANGE => {
                let asked = RangeRequest::decode(message).expect("a range");
                let kvs = match self.lately {
                    Some(id) if asked.key.starts_with(PREFIX.as_bytes()) => {
                        vec![KeyValue { key: format!("{PREFIX}done/{id:x}").into(), ..Default::default() }]
                    }
                    _ => Vec::new(),
                };
                call.reply(
                    &RangeResponse { header: Some(header(5)), kvs, ..Default::default() }.encode_to_vec(),
                )
                .await;
            }
            PUT => {
                let asked = PutRequest::decode(message).expect("a put");
                self.written.borrow_mut().push(String::from_utf8_lossy(&asked.key).into_owned());
                call.reply(&[]).await;
            }
            REVOKE => {
                self.revoked.set(self.revoked.get() + 1);
                call.reply(&[]).await;
            }
            DEFRAGMENT => {
                assert_eq!(self.resting(), [id], "nobody else");
                self.done.borrow_mut().push(id);
                if self.slow == Some(id) {
                    self.go_on.notified().await;
                }
                if self.broken == Some(id) {
                    call.refuse(Code::Internal, "etcdserver: it broke");
                } else {
                    call.reply(&[0x7a, 0]).await;
                }
            }
            path => panic!("{path} at {id}"),
        }
    }

    async fn defragment(&self, named: Option<&str>) -> Outcome {
        let client = self.keyward.client().await;
        let client = match named {
            Some(named) => client.header("x-keyward-member", named),
            None => client,
        };
        self.play(client.call(DEFRAGMENT, [])).await
    }

    /// The Defragment that comes to the first member as it is, after its caller was asked about.
    async fn passed_on(&self) -> Call {
        loop {
            let (at, call) = next_of(&self.members).await;
            match call.path() {
                DEFRAGMENT => {
                    assert_eq!(at, 0);
                    return call;
                }
                _ => self.answer(at as u64 + 1, call).await,
            }
        }
    }

    fn unready(&self, at: usize) {
        self.becomes(at, Readiness::NotReady(UnreadyReason::Unreachable));
    }

    fn ready(&self, at: usize) {
        self.becomes(at, Readiness::Ready);
    }

    fn becomes(&self, at: usize, readiness: Readiness) {
        self.keyward.publish(|membership| {
            let mut member = membership::Member::clone(&membership.members[at]);
            member.readiness = readiness;
            membership.members[at] = std::sync::Arc::new(member);
        });
    }
}

#[test]
fn all_are_done_one_after_the_other_the_leader_last_under_a_lock() {
    paused(async {
        let log = Log::default();
        let _listening = log.listen();
        let scene = Scene::new();
        let outcome = scene.defragment(None).await;
        assert_eq!(outcome.end.code(), Some(Code::Ok), "{:?}", outcome.end);
        assert_eq!(outcome.messages[0], &[0x7a, 0][..], "as the last member answered");
        assert_eq!(*scene.done.borrow(), [2, 3, 1]);
        assert_eq!(scene.resting(), [0; 0]);
        let noted: Vec<_> = ["2", "3", "1"].iter().map(|id| format!("{PREFIX}done/{id}")).collect();
        assert_eq!(*scene.written.borrow(), noted);
        // The lock, and each time anew before a member, whose own note lives for ten minutes.
        assert_eq!(*scene.granted.borrow(), [60, 60, 600, 60, 600, 60, 600]);
        assert_eq!(scene.revoked.get(), 1);

        // Again at once: they were done a moment ago.
        let outcome = scene.defragment(None).await;
        assert_eq!(outcome.end.code(), Some(Code::Ok));
        assert_eq!(scene.done.borrow().len(), 3);
        assert_eq!(log.lines_with("members defragmented lately are not defragmented again"), 1);
        let client = scene.keyward.client().await.header("keyward-force-defragment", "true");
        scene.play(client.call(DEFRAGMENT, [])).await;
        assert_eq!(scene.done.borrow().len(), 6);
        tokio::time::sleep(Duration::from_secs(601)).await;
        scene.defragment(None).await;
        assert_eq!(scene.done.borrow().len(), 9);
    });
}

#[test]
fn whom_another_replica_did_lately_is_passed_over() {
    paused(async {
        let scene = Scene { lately: Some(3), ..Scene::new() };
        scene.defragment(None).await;
        assert_eq!(*scene.done.borrow(), [2, 1]);
    });
}

#[test]
fn only_one_goes_on_at_a_time_and_a_full_store_is_helped_all_the_same() {
    paused(async {
        let scene = Scene { lock: Lock::Anothers, ..Scene::new() };
        let outcome = scene.defragment(None).await;
        let another = (Code::FailedPrecondition, "keyward: another defragmentation is under way");
        assert_eq!(outcome.end.told(), another);
        assert_eq!(
            (scene.done.borrow().len(), scene.revoked.get()),
            (0, 1),
            "its own lease is not left behind"
        );

        let scene = Scene { lock: Lock::Full, ..Scene::new() };
        assert_eq!(scene.defragment(None).await.end.code(), Some(Code::Ok));
        assert_eq!(*scene.done.borrow(), [2, 3, 1]);

        // On the same replica the other is known without etcd.
        let scene = Scene { lock: Lock::Full, slow: Some(2), ..Scene::new() };
        let (first, second) = (scene.keyward.client().await, scene.keyward.client().await);
        let both = async {
            let first = first.begin(DEFRAGMENT, []).await.expect("sent");
            settled().await;
            let second = second.begin(DEFRAGMENT, []).await.expect("sent");
            scene.go_on.notify_one();
            (first.finish().await, second.finish().await)
        };
        let (first, second) = scene.play(both).await;
        assert_eq!((first.end.code(), second.end.told()), (Some(Code::Ok), another));
    });
}

#[test]
fn a_store_that_fills_up_under_way_is_helped_to_the_end() {
    paused(async {
        let scene = Scene { lock: Lock::FillsUp, ..Scene::new() };
        assert_eq!(scene.defragment(None).await.end.code(), Some(Code::Ok));
        assert_eq!(*scene.done.borrow(), [2, 3, 1]);
    });
}

/// Between two members, or while it is waited for a voter, nobody rests.
#[test]
fn one_that_is_named_does_not_slip_past_one_that_waits() {
    paused(async {
        let another = (Code::FailedPrecondition, "keyward: another defragmentation is under way");
        let scene = Scene::new();
        scene.unready(2);
        let first = scene.keyward.client().await;
        let second = scene.keyward.client().await.header("x-keyward-member", "m1");
        let both = async {
            let first = first.begin(DEFRAGMENT, []).await.expect("sent");
            tokio::time::sleep(Duration::from_secs(5)).await;
            let second = second.call(DEFRAGMENT, []).await;
            (first.finish().await, second)
        };
        let (first, second) = scene.play(both).await;
        assert_eq!((first.end.code(), second.end.told()), (Some(Code::FailedPrecondition), another));
        assert_eq!(scene.done.borrow().len(), 0);
    });
}

/// It hangs at its member for as long as it likes: etcd would refuse it.
#[test]
fn who_may_not_defragment_keeps_nobody_from_it() {
    paused(async {
        let denied = (Code::PermissionDenied, "etcdserver: permission denied");
        let mut scene = Scene { refuses: Some(denied), ..Scene::new() };
        scene.unready(2);
        let client = scene.keyward.client().await.header("x-keyward-member", "m1");
        let hangs = client.begin(DEFRAGMENT, []).await.expect("sent");
        let _call = scene.passed_on().await;
        scene.refuses = None;
        scene.ready(2);
        assert_eq!(scene.defragment(Some("m2")).await.end.code(), Some(Code::Ok));
        drop(hangs);
    });
}

/// A voter is not ready: it is passed on, and under way all the same.
#[test]
fn none_is_begun_beside_one_that_was_passed_on() {
    paused(async {
        let another = (Code::FailedPrecondition, "keyward: another defragmentation is under way");
        let scene = Scene::new();
        scene.unready(2);
        let client = scene.keyward.client().await.header("x-keyward-member", "m1");
        let passed_on = client.begin(DEFRAGMENT, []).await.expect("sent");
        let call = scene.passed_on().await;
        scene.ready(2);
        assert_eq!(scene.defragment(None).await.end.told(), another);
        call.reply(&[]).await;
        assert_eq!(passed_on.finish().await.end.code(), Some(Code::Ok));
        assert_eq!(scene.defragment(None).await.end.code(), Some(Code::Ok));
    });
}

#[test]
fn none_is_begun_while_a_voter_is_not_ready() {
    paused(async {
        let scene = Scene::new();
        scene.unready(2);
        let outcome = scene.defragment(None).await;
        let text = "keyward: member m2 (2) was not defragmented: member m3 (3) is not ready";
        assert_eq!(outcome.end.told(), (Code::FailedPrecondition, text));
        assert_eq!((scene.done.borrow().len(), scene.revoked.get()), (0, 1));
        assert_eq!(scene.resting(), [0; 0]);
    });
}

#[test]
fn after_the_clients_deadline_no_further_member_is_begun_and_the_one_under_way_is_seen_to_its_end() {
    paused(async {
        let scene = Scene { slow: Some(2), ..Scene::new() };
        let client = scene.keyward.client().await.header("grpc-timeout", "5S");
        let late = async {
            let outcome = client.call(DEFRAGMENT, []).await;
            assert_eq!(outcome.end.told().0, Code::DeadlineExceeded);
            assert_eq!(scene.resting(), [2], "it is slow still");
            tokio::time::sleep(Duration::from_secs(60)).await;
            assert_eq!(scene.resting(), [2]);
        };
        // The member says nothing meanwhile: it is answered after that.
        let all = async {
            late.await;
            scene.go_on.notify_one();
            tokio::time::sleep(Duration::from_secs(5)).await;
        };
        let played = scene.play(std::future::pending::<()>());
        tokio::select! {
            () = all => {}
            () = played => {}
        }
        assert_eq!(scene.resting(), [0; 0]);
        assert_eq!(*scene.done.borrow(), [2]);
    });
}

/// The member sees to the one under way, and no other is begun.
#[test]
fn a_process_that_ends_waits_for_none_whose_client_has_left() {
    paused(async {
        let mut scene = Scene { slow: Some(2), ..Scene::new() };
        let client = scene.keyward.client().await;
        let begun = client.begin(DEFRAGMENT, []).await.expect("sent");
        let under_way = async {
            while scene.resting() != [2] || scene.done.borrow().is_empty() {
                settled().await;
            }
        };
        let played = scene.play(std::future::pending::<()>());
        tokio::select! {
            () = under_way => {}
            () = played => {}
        }
        begun.cancel();
        drop(client);
        let began = tokio::time::Instant::now();
        scene.keyward.drain(Duration::from_secs(30));
        scene.keyward.ended().await;
        assert!(began.elapsed() < Duration::from_millis(100), "{:?}", began.elapsed());
        assert_eq!(*scene.done.borrow(), [2]);
    });
}

#[test]
fn whoever_may_not_defragment_frees_no_member_of_its_calls() {
    paused(async {
        let denied = (Code::PermissionDenied, "etcdserver: permission denied");
        for named in [None, Some("m2")] {
            let scene = Scene { refuses: Some(denied), ..Scene::new() };
            let outcome = scene.defragment(named).await;
            assert_eq!(outcome.end.told(), denied);
            assert_eq!((scene.done.borrow().len(), scene.granted.borrow().len()), (0, 0));
        }
    });
}

#[test]
fn a_member_that_cannot_be_done_is_named_with_those_that_were() {
    paused(async {
        let scene = Scene { broken: Some(3), ..Scene::new() };
        let outcome = scene.defragment(None).await;
        let text = "keyward: member m3 (3) was not defragmented: etcdserver: it broke; done before it: m2";
        assert_eq!(outcome.end.told(), (Code::Internal, text));
        assert_eq!((&scene.done.borrow()[..], scene.resting()), (&[2, 3][..], vec![]));
        assert_eq!(scene.revoked.get(), 1);
    });
}

#[test]
fn one_that_is_named_is_freed_first_unless_the_others_are_not_all_ready() {
    paused(async {
        let scene = Scene::new();
        assert_eq!(scene.defragment(Some("m1")).await.end.code(), Some(Code::Ok));
        assert_eq!(*scene.done.borrow(), [1]);
        assert_eq!(*scene.granted.borrow(), [60, 60, 600], "nobody else's meanwhile");
        let others = Scene { lock: Lock::Anothers, ..Scene::new() };
        let another = (Code::FailedPrecondition, "keyward: another defragmentation is under way");
        assert_eq!(others.defragment(Some("m1")).await.end.told(), another);
        assert_eq!(others.done.borrow().len(), 0);
        scene.unready(2);
        let client = scene.keyward.client().await.header("x-keyward-member", "m1");
        let answers = async {
            let call = scene.passed_on().await;
            assert_eq!(scene.resting(), [0; 0], "it is one of the two that are left");
            call.reply(&[]).await;
        };
        let (outcome, ()) = tokio::join!(client.call(DEFRAGMENT, []), answers);
        assert_eq!(outcome.end.code(), Some(Code::Ok));
    });
}

/// The call at m2 that is under way when m2 is next.
#[test]
fn calls_under_way_end_and_streams_leave_before_a_member_is_begun() {
    paused(async {
        let scene = Scene::new();
        let client = scene.keyward.client().await;
        // Everything on m2: nobody else takes calls for now.
        scene.unready(0);
        scene.unready(2);
        let mut watcher = client.open(WATCH).await.expect("open");
        watcher.say(&watch("k", 7)).await;
        let mut watched = scene.members[1].called(WATCH).await;
        watched.messages.next().await.expect("a create");
        watched.say(&created(1, 6)).await.expect("taken");
        watcher.next().await.expect("created");
        let lock = LockRequest { name: "l".into(), lease: 0 };
        let waiting = client.begin(LOCK, lock.encode_to_vec()).await.expect("sent");
        let lock = scene.members[1].called(LOCK).await;
        let reading = client.begin(RANGE, range("k")).await.expect("sent");
        let read = scene.members[1].called(RANGE).await;
        scene.keyward.publish(|membership| {
            for at in [0, 2] {
                let mut member = membership::Member::clone(&membership.members[at]);
                member.readiness = Readiness::Ready;
                membership.members[at] = std::sync::Arc::new(member);
            }
        });
        let other = scene.keyward.client().await;
        let begun = other.begin(DEFRAGMENT, []).await.expect("sent");
        let watched_elsewhere = RefCell::new(None);
        let script = async {
            let asked = async {
                loop {
                    let (at, call) = next_of(&scene.members).await;
                    match call.path() {
                        WATCH => watched_elsewhere.replace(Some((at, call))).map_or((), |_| panic!("once")),
                        DEFRAGMENT => return (at, call),
                        _ => scene.answer(at as u64 + 1, call).await,
                    }
                }
            };
            let mut asked = std::pin::pin!(asked);
            let limit = tokio::time::timeout(Duration::from_secs(2), asked.as_mut()).await;
            assert!(limit.is_err(), "a read is under way");
            assert_eq!(scene.resting(), [2]);
            read.reply(&ranged(5)).await;
            asked.await
        };
        let (at, call) = script.await;
        assert_eq!(at, 1);
        assert_eq!(reading.finish().await.end.code(), Some(Code::Ok));
        let (moved_to, _call) = watched_elsewhere.take().expect("the watch went on elsewhere");
        assert_ne!(moved_to, 1);
        assert_eq!(watched.canceled().await, h2::Reason::CANCEL);
        // Nobody could have queued again for it.
        lock.reply(&LockResponse { header: Some(header(9)), key: "l/1".into() }.encode_to_vec()).await;
        assert_eq!(waiting.finish().await.end.code(), Some(Code::Ok), "a lock is not cut");
        call.reply(&[]).await;
        assert_eq!(scene.play(begun.finish()).await.end.code(), Some(Code::Ok));
    });
}
