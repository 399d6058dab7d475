//! A policy decides on every request of a client, before the request is sent, and again on open streams after a
//! change of the rules.

use std::time::{Duration, SystemTime};

use keyward::admin::view::ViewTopic;
use keyward::members::membership::AuthSetting;
use keyward::pb::etcdserverpb::{
    LeaseRevokeRequest, LeaseTimeToLiveRequest, LeaseTimeToLiveResponse, RangeRequest, TxnRequest,
};
use keyward::pb::v3lockpb::LockRequest;
use keyward::refusal::Code;
use keyward::tasks::Tasks;
use prost::Message as _;
use time::format_description::well_known::Rfc3339;

use crate::client::Client;
use crate::member::Member;
use crate::rig::{Keyward, paused, real, settled};
use crate::words::{
    KEEP_ALIVE, PUT, RANGE, TXN, WATCH, cancel_watch, create_of, created, event, header, put, range, ranged,
    renew, renewed, txn_done, watch, watched,
};

const LOCK: &str = "/v3lockpb.Lock/Lock";
const REVOKE: &str = "/etcdserverpb.Lease/LeaseRevoke";
const TIME_TO_LIVE: &str = "/etcdserverpb.Lease/LeaseTimeToLive";
const DENIED: (Code, &str) = (Code::PermissionDenied, "etcdserver: permission denied");

/// The reason of a canceled watch, as etcd writes it.
const DENIED_WATCH: &str = "rpc error: code = PermissionDenied desc = etcdserver: permission denied";

/// A grant of these actions on these keys.
fn allow(actions: &str, keys: &str) -> String {
    format!("[[role.allow]]\nactions = [{actions}]\n{keys}\n")
}

/// Keyward with a policy, in front of a member with auth on.
struct Guarded {
    folder: tempfile::TempDir,
    member: Member,
    keyward: Keyward,
}

impl Guarded {
    /// The role of alice has these grants; the binding has these further lines.
    fn new(mode: &str, grants: &str, binding: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        write_policy(&folder, grants, binding);
        let member = Member::new(1, &Tasks::default());
        let keyward = Keyward::at(&[&member], AuthSetting::On, folder.path(), "", &settings(mode));
        Self { folder, member, keyward }
    }

    /// Publishes other grants, as a reload does.
    fn publish(&self, mode: &str, grants: &str, binding: &str) {
        write_policy(&self.folder, grants, binding);
        self.keyward.publish_rules(self.folder.path(), "", &settings(mode));
    }

    async fn alice(&self) -> Client {
        self.keyward.logged_in("alice").await
    }

    /// The client is refused, and nothing reaches the member.
    async fn refuses(&self, client: &Client, path: &str, message: &[u8]) {
        let outcome = client.call(path, message).await;
        assert_eq!(outcome.end.told(), DENIED, "{path}");
        assert!(self.member.was_called_again().is_none(), "{path} has reached the member");
    }

    /// The call reaches the member and is answered.
    async fn serves(&self, client: &Client, path: &str, message: &[u8], answer: &[u8]) {
        let script = async { self.member.called(path).await.reply(answer).await };
        let (outcome, ()) = tokio::join!(client.call(path, message), script);
        assert_eq!(outcome.end.code(), Some(Code::Ok), "{path}: {:?}", outcome.end);
    }

    fn counted(&self, line: &str) -> bool {
        self.keyward.metrics.text().expect("text").lines().any(|counted| counted == line)
    }
}

fn settings(mode: &str) -> String {
    format!("[maintenance]\netcd_prefix = \"/own/\"\n[policy]\nmode = \"{mode}\"\nfile = \"policy.toml\"\n")
}

fn write_policy(folder: &tempfile::TempDir, grants: &str, binding: &str) {
    let text = format!(
        "[[role]]\nname = \"team\"\n{grants}[[binding]]\npeer = \"password:alice\"\nroles = [\"team\"]\n{binding}\n"
    );
    std::fs::write(folder.path().join("policy.toml"), text).expect("written");
}

fn keys_of_lease(keys: &[&str]) -> Vec<u8> {
    let keys = keys.iter().map(|key| key.to_string().into()).collect();
    LeaseTimeToLiveResponse { header: Some(header(7)), id: 7, ttl: 5, granted_ttl: 9, keys }.encode_to_vec()
}

#[test]
fn a_request_without_a_grant_is_refused_before_it_is_sent() {
    paused(async {
        let grants = allow("'read', 'write', 'watch'", "prefix = '/a/'") + &allow("'lease'", "");
        let guarded = Guarded::new("enforce", &grants, "");
        let alice = guarded.alice().await;
        guarded.serves(&alice, RANGE, &range("/a/x"), &ranged(5)).await;
        guarded.refuses(&alice, RANGE, &range("/b")).await;
        guarded.refuses(&alice, PUT, &put(1)).await;
        let whole = RangeRequest { key: "\0".into(), range_end: "\0".into(), ..RangeRequest::default() };
        guarded.refuses(&alice, RANGE, &whole.encode_to_vec()).await;
        let inner = TxnRequest { success: vec![op(&range("/b"))], ..TxnRequest::default() };
        let outer = TxnRequest { failure: vec![nested(inner)], ..TxnRequest::default() };
        guarded.refuses(&alice, TXN, &outer.encode_to_vec()).await;
        guarded.serves(&alice, TXN, &TxnRequest::default().encode_to_vec(), &txn_done(5)).await;
        for path in ["/etcdserverpb.Auth/AuthDisable", "/etcdserverpb.Maintenance/Defragment"] {
            guarded.refuses(&alice, path, b"").await;
        }
        let snapshot =
            alice.begin("/etcdserverpb.Maintenance/Snapshot", b"").await.expect("open").finish().await;
        assert_eq!(snapshot.end.told(), DENIED);
        let unknown = alice.call("/etcdserverpb.KV/RangeBackwards", b"").await;
        assert_eq!(unknown.end.code(), Some(Code::Unimplemented));
        assert!(guarded.member.was_called_again().is_none());
        assert!(
            guarded.counted("keyward_policy_refused_total{action=\"write\"} 2"),
            "{}",
            "a put and a method"
        );

        let bob = guarded.keyward.logged_in("bob").await;
        guarded.refuses(&bob, RANGE, &range("/a/x")).await;
    });
}

/// The same text comes from etcd's roles and from Keyward's policy: only Keyward can tell which.
#[test]
fn the_last_error_of_a_client_tells_who_refused_and_by_which_rule() {
    paused(async {
        let grants = allow("'read', 'write', 'watch'", "prefix = '/a/'");
        let guarded = Guarded::new("enforce", &grants, "");
        let alice = guarded.alice().await;
        let last = async || {
            let rows = guarded.keyward.shown(ViewTopic::Clients).await;
            ["last_error", "last_error_by", "last_error_rule"].map(|field| rows[0][field].clone())
        };
        let denied = |by: &str, rule: serde_json::Value| ["PermissionDenied".into(), by.into(), rule];
        guarded.refuses(&alice, PUT, &put(1)).await;
        assert_eq!(last().await, denied("policy", "no_grant: write".into()));
        let script = async { guarded.member.called(RANGE).await.refuse(DENIED.0, DENIED.1) };
        let (outcome, ()) = tokio::join!(alice.call(RANGE, range("/a/x")), script);
        assert_eq!(outcome.end.told(), DENIED);
        assert_eq!(last().await, denied("etcd", serde_json::Value::Null));
        let mut stream = alice.open(WATCH).await.expect("open");
        stream.say(&watch("/b", 1)).await;
        assert!(watched(&stream.next().await.expect("an answer")).canceled);
        assert_eq!(last().await, denied("policy", "no_grant: watch".into()));
        let deny = "[[role.deny]]\nactions = ['read']\nkey = '/a/secret'\n";
        guarded.publish("enforce", &(grants.clone() + deny), "");
        guarded.refuses(&alice, RANGE, &range("/a/secret")).await;
        assert_eq!(last().await, denied("policy", "team.deny[0]".into()));
    });
}

fn op(range: &[u8]) -> keyward::pb::etcdserverpb::RequestOp {
    let range = RangeRequest::decode(range).expect("a Range");
    keyward::pb::etcdserverpb::RequestOp {
        request: Some(keyward::pb::etcdserverpb::request_op::Request::RequestRange(range)),
    }
}

fn nested(txn: TxnRequest) -> keyward::pb::etcdserverpb::RequestOp {
    keyward::pb::etcdserverpb::RequestOp {
        request: Some(keyward::pb::etcdserverpb::request_op::Request::RequestTxn(txn)),
    }
}

#[test]
fn keywards_own_keys_are_closed_to_everybody_also_in_ranges_around_them() {
    paused(async {
        let grants = allow("'read', 'write', 'maintenance'", "everything = true");
        let guarded = Guarded::new("enforce", &grants, "");
        let alice = guarded.alice().await;
        guarded.refuses(&alice, RANGE, &range("/own/x")).await;
        let around = |key: &str, end: &str| RangeRequest {
            key: key.to_owned().into(),
            range_end: end.to_owned().into(),
            ..RangeRequest::default()
        };
        guarded.refuses(&alice, RANGE, &around("/a", "/z").encode_to_vec()).await;
        guarded.refuses(&alice, RANGE, &around("\0", "\0").encode_to_vec()).await;
        guarded
            .refuses(&alice, "/etcdserverpb.KV/DeleteRange", &around("/own", "/own0").encode_to_vec())
            .await;
        guarded.serves(&alice, RANGE, &around("/own0", "\0").encode_to_vec(), &ranged(5)).await;
        let snapshot =
            alice.begin("/etcdserverpb.Maintenance/Snapshot", b"").await.expect("open").finish().await;
        assert_eq!(snapshot.end.told(), DENIED);
    });
}

#[test]
fn shadow_counts_and_changes_nothing_for_one_binding_alone() {
    paused(async {
        let guarded = Guarded::new("enforce", &allow("'read'", "prefix = '/a/'"), "mode = \"shadow\"");
        let alice = guarded.alice().await;
        guarded.serves(&alice, RANGE, &range("/b"), &ranged(5)).await;
        assert!(guarded.counted("keyward_policy_shadow_denied_total{action=\"read\"} 1"));
        let bob = guarded.keyward.logged_in("bob").await;
        guarded.refuses(&bob, RANGE, &range("/b")).await;

        let off = Guarded::new("off", "", "");
        off.serves(&off.alice().await, RANGE, &range("/own/x"), &ranged(5)).await;
        assert!(!off.keyward.metrics.text().expect("text").contains("_total{action"));
    });
}

#[test]
fn a_lease_is_revoked_only_by_who_may_write_its_keys() {
    paused(async {
        let grants = allow("'write'", "prefix = '/a/'") + &allow("'lease'", "");
        let guarded = Guarded::new("enforce", &grants, "");
        let alice = guarded.alice().await;
        let revoke = LeaseRevokeRequest { id: 7 }.encode_to_vec();
        for (keys, allowed) in [(&["/a/1", "/b"][..], false), (&["/a/1", "/a/2"], true), (&[], true)] {
            let script = async {
                let mut read = guarded.member.called(TIME_TO_LIVE).await;
                let asked = LeaseTimeToLiveRequest::decode(read.message().await).expect("a request");
                assert_eq!((asked.id, asked.keys), (7, true));
                read.reply(&keys_of_lease(keys)).await;
                if allowed {
                    guarded.member.called(REVOKE).await.reply(b"").await;
                }
            };
            let (outcome, ()) = tokio::join!(alice.call(REVOKE, &revoke), script);
            assert_eq!(
                outcome.end.code(),
                Some(if allowed { Code::Ok } else { Code::PermissionDenied }),
                "{keys:?}"
            );
            assert!(guarded.member.was_called_again().is_none());
        }
    });
}

/// A member that passes the question on to a lost leader answers after seven seconds, and the stream would end with the question.
#[test]
fn a_question_without_an_answer_is_asked_at_another_member() {
    paused(async {
        let folder = tempfile::tempdir().expect("a folder");
        write_policy(&folder, &(allow("'write'", "prefix = '/a/'") + &allow("'lease'", "")), "");
        let members = [Member::new(1, &Tasks::default()), Member::new(2, &Tasks::default())];
        let [one, two] = &members;
        let keyward = Keyward::at(&[one, two], AuthSetting::On, folder.path(), "", &settings("enforce"));
        let alice = keyward.logged_in("alice").await;
        let mut stream = alice.open(KEEP_ALIVE).await.expect("open");
        stream.say(&renew(7)).await;
        let (_silent, other) = tokio::select! {
            call = one.called(TIME_TO_LIVE) => (call, two),
            call = two.called(TIME_TO_LIVE) => (call, one),
        };
        other.called(TIME_TO_LIVE).await.reply(&keys_of_lease(&["/a/1"])).await;
        let mut call = tokio::select! {
            call = one.called(KEEP_ALIVE) => call,
            call = two.called(KEEP_ALIVE) => call,
        };
        call.messages.next().await.expect("a renewal");
        call.say(&renewed(7, 5)).await.expect("taken");
        stream.next().await.expect("renewed");
    });
}

#[test]
fn a_lease_is_renewed_only_by_who_may_write_its_keys() {
    paused(async {
        let grants = allow("'write'", "prefix = '/a/'") + &allow("'lease'", "");
        let guarded = Guarded::new("enforce", &grants, "");
        let alice = guarded.alice().await;
        for (keys, allowed) in [(&["/a/1", "/b"][..], false), (&["/a/1"], true)] {
            let mut stream = alice.open(KEEP_ALIVE).await.expect("open");
            stream.say(&renew(7)).await;
            guarded.member.called(TIME_TO_LIVE).await.reply(&keys_of_lease(keys)).await;
            if allowed {
                let mut call = guarded.member.called(KEEP_ALIVE).await;
                for _ in 0..2 {
                    call.messages.next().await.expect("a renewal");
                    call.say(&renewed(7, 5)).await.expect("taken");
                    stream.next().await.expect("renewed");
                    stream.say(&renew(7)).await;
                }
                settled().await;
                // The keys were judged by other rules.
                guarded.publish("enforce", &(grants.clone() + &allow("'read'", "key = '/c'")), "");
                call.messages.next().await.expect("a renewal");
                call.say(&renewed(7, 5)).await.expect("taken");
                stream.next().await.expect("renewed");
                stream.say(&renew(7)).await;
                guarded.member.called(TIME_TO_LIVE).await.reply(&keys_of_lease(&["/b"])).await;
            }
            assert_eq!(stream.finish().await.end.told(), DENIED, "{keys:?}");
        }
    });
}

/// The next message of a watch stream that is not a progress response.
async fn told(stream: &mut crate::client::Stream) -> keyward::pb::etcdserverpb::WatchResponse {
    watched(&stream.next().await.expect("a response"))
}

#[test]
fn a_watch_is_refused_as_etcd_refuses_and_ends_when_its_grant_does() {
    paused(async {
        let both = allow("'watch'", "prefix = '/a/'") + &allow("'watch'", "key = '/b'");
        let guarded = Guarded::new("enforce", &both, "");
        let alice = guarded.alice().await;
        let mut stream = alice.open(WATCH).await.expect("open");
        stream.say(&watch("/c", 0)).await;
        let refused = told(&mut stream).await;
        assert_eq!((refused.created, refused.canceled, refused.watch_id), (true, true, -1));
        assert_eq!(refused.cancel_reason, DENIED_WATCH);
        assert!(
            guarded.counted("keyward_calls_refused_total{reason=\"policy\"} 1"),
            "a watch, not its stream"
        );
        stream.say(&watch("/a/x", 5)).await;
        let mut call = guarded.member.called(WATCH).await;
        let mut upstream = Vec::new();
        for key in ["/a/x", "/b"] {
            if key == "/b" {
                stream.say(&watch(key, 5)).await;
            }
            let create = create_of(&call.messages.next().await.expect("a create")).expect("a create");
            assert_eq!(create.key, key);
            upstream.push(create.watch_id);
            call.say(&created(create.watch_id, 9)).await.expect("taken");
        }
        let (first, second) = (told(&mut stream).await, told(&mut stream).await);
        assert!(first.created && second.created && !second.canceled);

        // The same rules again, as after a change for others: nothing ends.
        guarded.publish("enforce", &both, "");
        settled().await;
        call.say(&event(upstream[0], 10, 1)).await.expect("taken");
        assert_eq!(told(&mut stream).await.events.len(), 1);

        guarded.publish("enforce", &allow("'watch'", "key = '/b'"), "");
        let ended = told(&mut stream).await;
        assert_eq!((ended.watch_id, ended.canceled), (first.watch_id, true));
        assert_eq!(ended.cancel_reason, DENIED_WATCH);
        assert_eq!(call.messages.next().await.expect("a cancel"), cancel_watch(upstream[0]));
        call.say(&event(upstream[1], 11, 1)).await.expect("taken");
        assert_eq!(told(&mut stream).await.watch_id, second.watch_id);
        assert!(guarded.counted("keyward_policy_watches_ended_total 1"));
    });
}

#[test]
fn a_keepalive_and_a_waiting_lock_end_with_their_grants() {
    paused(async {
        let grants = allow("'lease'", "") + &allow("'lock'", "prefix = '/locks/'");
        let guarded = Guarded::new("enforce", &grants, "");
        let alice = guarded.alice().await;
        let mut keepalive = alice.open(KEEP_ALIVE).await.expect("open");
        keepalive.say(&renew(7)).await;
        guarded.member.called(TIME_TO_LIVE).await.reply(&keys_of_lease(&[])).await;
        let mut call = guarded.member.called(KEEP_ALIVE).await;
        call.say(&renewed(7, 5)).await.expect("taken");
        keepalive.next().await.expect("renewed");
        let lock = LockRequest { name: "/locks/n".into(), lease: 7 }.encode_to_vec();
        guarded.refuses(&alice, LOCK, &LockRequest { name: "/other".into(), lease: 7 }.encode_to_vec()).await;
        let script = async {
            guarded.member.called(TIME_TO_LIVE).await.reply(&keys_of_lease(&["/locks/n/7"])).await;
            let waiting = guarded.member.called(LOCK).await;
            settled().await;
            guarded.publish("enforce", &allow("'read'", "prefix = '/locks/'"), "");
            waiting
        };
        let (outcome, _waiting) = tokio::join!(alice.call(LOCK, &lock), script);
        assert_eq!(outcome.end.told(), DENIED);
        keepalive.say(&renew(7)).await;
        let end = loop {
            match keepalive.next().await {
                Ok(_) => {}
                Err(end) => break end,
            }
        };
        assert_eq!(end.told(), DENIED);
        let mut again = alice.open(KEEP_ALIVE).await.expect("open");
        again.say(&renew(7)).await;
        assert_eq!(again.finish().await.end.told(), DENIED);
        // Two Locks and two keepalive streams.
        assert!(guarded.counted("keyward_calls_refused_total{reason=\"policy\"} 4"));
    });
}

#[test]
fn a_binding_ends_at_its_time_with_its_open_watch() {
    real(async {
        let grants = allow("'watch'", "prefix = '/a/'");
        let guarded = Guarded::new("enforce", &grants, "");
        let alice = guarded.alice().await;
        let mut stream = alice.open(WATCH).await.expect("open");
        stream.say(&watch("/a/x", 5)).await;
        let mut call = guarded.member.called(WATCH).await;
        let create = create_of(&call.messages.next().await.expect("a create")).expect("a create");
        call.say(&created(create.watch_id, 9)).await.expect("taken");
        assert!(told(&mut stream).await.created);
        // The end comes after the watch stands, however long the way to the watch took.
        let until = SystemTime::now() + Duration::from_secs(2);
        let moment = time::OffsetDateTime::from(until).format(&Rfc3339).expect("a moment");
        guarded.publish("enforce", &grants, &format!("until = \"{moment}\""));
        let ended = told(&mut stream).await;
        assert!(ended.canceled && SystemTime::now() >= until - Duration::from_secs(1));
        assert_eq!(ended.cancel_reason, DENIED_WATCH);
    });
}
