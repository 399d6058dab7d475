//! What is kept in etcd is what is obeyed, whatever becomes of a replica's own changes (rules 13).

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use keyward::config::{EtcdLogin, Revocation, RevocationPersistence};
use keyward::downstream::session::{LoginInadmissible, RevocationChange, Sealer};
use keyward::members::membership::{AuthSetting, Readiness, ServingState, UnreadyReason};
use keyward::pb::etcdserverpb::{RangeRequest, RangeResponse, TxnRequest, TxnResponse, request_op};
use keyward::pb::mvccpb::KeyValue;
use keyward::refusal::Code;
use keyward::revocation::{RevocationError, RevocationRegister, RevocationStorage};
use keyward::secret::Secret;
use keyward::tasks::Tasks;
use prost::Message as _;
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::member::{Call, Member};
use crate::rig::{Keyward, paused, settled};
use crate::words::{INVALID_TOKEN, RANGE, TXN, header};

const PREFIX: &str = "/p/";
const DENIED: (Code, &str) = (Code::PermissionDenied, "etcdserver: permission denied");

/// A replica whose revocations are in etcd, and a member whose rows a test writes.
struct Replica {
    member: Rc<Member>,
    keyward: Keyward,
    register: RevocationRegister,
}

impl Replica {
    fn start() -> Self {
        Self::with(AuthSetting::Off, None)
    }

    fn with(auth: AuthSetting, login: Option<EtcdLogin>) -> Self {
        let member = Rc::new(Member::new(1, &Tasks::default()));
        let keyward = Keyward::configured(&[&member], auth, "");
        let settings = settings(RevocationPersistence::Etcd { prefix: PREFIX.into(), login });
        let opened = RevocationRegister::open(&settings, keyward.upstream(), Arc::clone(&keyward.sealer));
        let (register, keeper) = opened.expect("nothing is read yet");
        keyward.tasks.spawn("revocations", keeper.run()).detach();
        Self { member, keyward, register }
    }

    fn sealer(&self) -> &Sealer {
        &self.keyward.sealer
    }

    /// An operator asks for the change: it comes before the next look.
    async fn order(
        &self,
        change: RevocationChange,
    ) -> oneshot::Receiver<Result<RevocationStorage, RevocationError>> {
        let (told, outcome) = oneshot::channel();
        let register = self.register.clone();
        let ask = async move { drop(told.send(register.change(change).await)) };
        self.keyward.tasks.spawn("operator", ask).detach();
        tokio::task::yield_now().await;
        outcome
    }

    /// Answers the next look or reading with all of these rows, as etcd does it: with those that changed since, where it is
    /// asked for them.
    async fn read(&self, revision: i64, rows: &[(&str, i64, bool)]) {
        let mut call = self.member.called(RANGE).await;
        let asked = RangeRequest::decode(call.message().await).expect("a Range");
        assert!(!asked.serializable, "a member that lags behind knows nothing");
        let kvs = rows.iter().filter(|(_, changed, _)| *changed >= asked.min_mod_revision);
        let mut kvs: Vec<_> = kvs.map(|(user, changed, blocked)| row(user, *changed, *blocked)).collect();
        if asked.limit > 0 {
            kvs.truncate(usize::try_from(asked.limit).expect("a number of rows"));
        }
        let count = i64::try_from(rows.len()).expect("few");
        let answer = RangeResponse { header: Some(header(revision)), kvs, count, ..RangeResponse::default() };
        call.reply(&answer.encode_to_vec()).await;
    }

    /// The next call, which is the compared put of a change, with the row that it would write.
    async fn put(&self) -> (Call, Bytes) {
        let mut call = self.member.called(TXN).await;
        let txn = TxnRequest::decode(call.message().await).expect("a Txn");
        let put = txn.success.into_iter().next().and_then(|op| op.request).expect("one request");
        let request_op::Request::RequestPut(put) = put else { panic!("not a put: {put:?}") };
        (call, put.value)
    }

    /// Lets the next look, however it compares, find these rows.
    async fn looks(&self, revision: i64, rows: &[(&str, i64, bool)]) {
        let begun = Instant::now();
        while self.register.age() >= begun.elapsed() {
            tokio::select! {
                biased;
                () = self.read(revision, rows) => {}
                () = tokio::time::sleep(Duration::from_millis(100)) => {}
            }
        }
    }
}

fn settings(keep: RevocationPersistence) -> Revocation {
    Revocation { keep, max_age: Duration::from_secs(60) }
}

fn row(user: &str, changed: i64, blocked: bool) -> KeyValue {
    KeyValue {
        key: format!("{PREFIX}user/{user}").into(),
        value: format!(r#"{{"user":{{"name":"{user}","generation":{changed},"blocked":{blocked}}}}}"#).into(),
        mod_revision: changed,
        ..KeyValue::default()
    }
}

async fn answered(call: Call) {
    let answer = TxnResponse { header: Some(header(9)), succeeded: true, ..TxnResponse::default() };
    call.reply(&answer.encode_to_vec()).await;
}

/// Another replica blocks alice; before the next look an operator asks here for something that cannot be kept.
#[test]
fn a_change_that_fails_hides_no_change_of_another_replica() {
    paused(async {
        let replica = Replica::start();
        replica.read(5, &[]).await;
        replica.looks(5, &[]).await;
        assert_eq!(replica.sealer().admit_login(&"alice".into()), Ok(0));
        let others = [("alice", 6, true)];
        let outcome = replica.order(RevocationChange::Block("bob".into())).await;
        replica.read(6, &others).await;
        replica.put().await.0.refuse(DENIED.0, DENIED.1);
        assert!(matches!(outcome.await.expect("told"), Err(RevocationError::Unchanged(_))));
        replica.looks(6, &others).await;
        assert_eq!(replica.sealer().admit_login(&"alice".into()), Err(LoginInadmissible::Blocked));
        assert_eq!(replica.sealer().admit_login(&"bob".into()), Ok(0));
    });
}

/// The first that is done is an operator's change, which cannot be kept.
#[test]
fn a_change_that_fails_before_anything_was_known_lets_nobody_in() {
    paused(async {
        let replica = Replica::start();
        let blocked = [("alice", 4, true)];
        let outcome = replica.order(RevocationChange::Revoke("bob".into())).await;
        // The first look was under way; it makes nothing known.
        let look = replica.member.called(RANGE).await;
        look.refuse(Code::Unavailable, "etcdserver: no leader");
        replica.read(5, &blocked).await;
        replica.put().await.0.refuse(DENIED.0, DENIED.1);
        assert!(matches!(outcome.await.expect("told"), Err(RevocationError::Unchanged(_))));
        assert_eq!(replica.sealer().admit_login(&"alice".into()), Err(LoginInadmissible::NotKnown));
        replica.looks(5, &blocked).await;
        assert_eq!(replica.sealer().admit_login(&"alice".into()), Err(LoginInadmissible::Blocked));
    });
}

/// A change is in force as soon as it is kept, with what others had kept before it; no look is needed for it.
#[test]
fn a_change_that_is_kept_is_in_force_when_its_operator_is_told() {
    paused(async {
        let replica = Replica::start();
        replica.read(5, &[]).await;
        let outcome = replica.order(RevocationChange::Block("bob".into())).await;
        replica.read(6, &[("alice", 6, true)]).await;
        let (call, value) = replica.put().await;
        let value = String::from_utf8(value.to_vec()).expect("a row");
        assert!(value.contains(r#""name":"bob""#) && value.contains(r#""blocked":true"#), "{value}");
        answered(call).await;
        assert!(matches!(outcome.await.expect("told"), Ok(RevocationStorage::Etcd)));
        for user in ["alice", "bob"] {
            assert_eq!(replica.sealer().admit_login(&user.into()), Err(LoginInadmissible::Blocked), "{user}");
        }
        replica.looks(7, &[("alice", 6, true), ("bob", 7, true)]).await;
        assert_eq!(replica.sealer().admit_login(&"bob".into()), Err(LoginInadmissible::Blocked));
    });
}

/// Whether a put was applied whose answer is lost nobody knows; what etcd says at the next look is obeyed.
#[test]
fn a_change_whose_answer_is_lost_is_told_to_be_unknown() {
    paused(async {
        let replica = Replica::start();
        replica.read(5, &[]).await;
        for (number, kept) in [(6, false), (7, true)] {
            let outcome = replica.order(RevocationChange::Block("bob".into())).await;
            replica.read(5, &[]).await;
            let (call, _) = replica.put().await;
            if kept {
                call.refuse(Code::Unavailable, "etcdserver: request timed out");
            } else {
                // Never answered.
                settled().await;
            }
            let outcome = outcome.await.expect("told");
            assert!(matches!(outcome, Err(RevocationError::Unknown(_))), "{outcome:?}");
            let rows = [("bob", number, true)];
            replica.looks(number, if kept { &rows } else { &[] }).await;
            let admitted = replica.sealer().admit_login(&"bob".into());
            assert_eq!(admitted.is_err(), kept, "{admitted:?}");
        }
    });
}

/// Keyward's own user has another password at etcd.
#[test]
fn a_login_that_is_replaced_serves_from_the_next_look_on() {
    paused(async {
        let replica = Replica::with(AuthSetting::On, Some(login("right")));
        let mut call = replica.member.called(RANGE).await;
        assert_eq!(call.token(), Some("keeper.1"));
        call.message().await;
        call.refuse(Code::Unavailable, "etcdserver: no leader");
        replica.member.change_password("new");
        replica.member.called(RANGE).await.refuse(Code::Unauthenticated, INVALID_TOKEN);
        // With the old password there is no token to look with.
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert!(replica.member.was_called_again().is_none());

        let elsewhere = RevocationPersistence::Etcd { prefix: "/other/".into(), login: Some(login("other")) };
        let renewed = RevocationPersistence::Etcd { prefix: PREFIX.into(), login: Some(login("new")) };
        let [elsewhere, renewed] = [elsewhere, renewed].map(settings);
        assert!(replica.register.has_login(&elsewhere), "another prefix says nothing of this one");
        assert!(!replica.register.has_login(&renewed));
        replica.register.set_login(&renewed);
        assert!(replica.register.has_login(&renewed));
        replica.read(5, &[("alice", 4, true)]).await;
        replica.looks(5, &[("alice", 4, true)]).await;
        assert_eq!(replica.sealer().admit_login(&"alice".into()), Err(LoginInadmissible::Blocked));
    });
}

/// Publishes whether the member has a leader.
fn publish_leader(replica: &Replica, has_leader: bool) {
    replica.keyward.publish(|membership| {
        for member in &mut membership.members {
            let mut changed = keyward::members::membership::Member::clone(member);
            let no_leader = Readiness::NotReady(UnreadyReason::NoLeader);
            changed.readiness = if has_leader { Readiness::Ready } else { no_leader };
            *member = changed.into();
        }
    });
}

/// Answers looks until one of them is asked of the member's own store, with these rows.
async fn read_locally(replica: &Replica, revision: i64, rows: &[(&str, i64, bool)]) -> RangeRequest {
    loop {
        let mut call = replica.member.called(RANGE).await;
        let asked = RangeRequest::decode(call.message().await).expect("a Range");
        let kvs = rows.iter().map(|(user, changed, blocked)| row(user, *changed, *blocked)).collect();
        let count = i64::try_from(rows.len()).expect("few");
        let answer = RangeResponse { header: Some(header(revision)), kvs, count, ..RangeResponse::default() };
        call.reply(&answer.encode_to_vec()).await;
        if asked.serializable {
            return asked;
        }
    }
}

/// Without a quorum the member that answers tells what is revoked in the store that it serves; known is that for its own store alone.
#[test]
fn without_a_quorum_a_members_store_tells_the_revocations_of_its_own_reads() {
    paused(async {
        let replica = Replica::start();
        replica.read(5, &[("bob", 4, true)]).await;
        replica.looks(5, &[("bob", 4, true)]).await;
        publish_leader(&replica, false);
        // Older than what is known: nobody comes back by it.
        for _ in 0..200 {
            read_locally(&replica, 4, &[]).await;
        }
        let (sealer, serving) = (replica.sealer(), ServingState::LocalReadsOnly);
        assert!(replica.register.age() > Duration::from_secs(60), "no quorum has told anything");
        assert!(sealer.is_for_local_reads() && !replica.register.is_known());
        assert!(
            replica.register.is_known_for(serving) && !replica.register.is_known_for(ServingState::Ready)
        );
        assert_eq!(sealer.admit_login(&"bob".into()), Err(LoginInadmissible::Blocked));
        assert_eq!(sealer.admit_login(&"alice".into()), Ok(0));
        // What was written at the last moment.
        for _ in 0..3 {
            read_locally(&replica, 6, &[("alice", 6, true), ("bob", 4, true)]).await;
        }
        assert_eq!(sealer.admit_login(&"alice".into()), Err(LoginInadmissible::Blocked));

        // The member is not heard for longer than a revocation may stay unknown: a quorum may have been back.
        replica.keyward.publish(|membership| membership.members.clear());
        tokio::time::sleep(Duration::from_secs(70)).await;
        assert_eq!(sealer.admit_login(&"carol".into()), Err(LoginInadmissible::NotKnown));
    });
}

/// A quorum that is back tells the revocations before anybody but a local read is admitted.
#[test]
fn with_a_quorum_again_its_word_alone_counts() {
    paused(async {
        let replica = Replica::start();
        replica.read(5, &[]).await;
        replica.looks(5, &[]).await;
        publish_leader(&replica, false);
        for _ in 0..200 {
            read_locally(&replica, 5, &[]).await;
        }
        assert!(replica.sealer().is_for_local_reads());
        publish_leader(&replica, true);
        let refused = async {
            let call = replica.member.called(RANGE).await;
            call.refuse(Code::Unavailable, "etcdserver: request timed out");
        };
        refused.await;
        settled().await;
        assert_eq!(replica.sealer().admit_login(&"alice".into()), Err(LoginInadmissible::NotKnown));
        replica.looks(6, &[("alice", 6, true)]).await;
        assert_eq!(replica.sealer().admit_login(&"alice".into()), Err(LoginInadmissible::Blocked));
        assert!(!replica.sealer().is_for_local_reads() && replica.register.is_known());
    });
}

fn login(password: &str) -> EtcdLogin {
    EtcdLogin { user: "keeper".into(), password: Arc::new(Secret::new(password.to_owned())) }
}
