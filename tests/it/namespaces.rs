//! A caller in a namespace sees the keys below its prefix as if they were all keys, and no others.

use keyward::members::membership::AuthSetting;
use keyward::pb::etcdserverpb::{
    LeaseRevokeRequest, LeaseTimeToLiveRequest, LeaseTimeToLiveResponse, PutRequest, PutResponse,
    RangeRequest, RangeResponse, TxnRequest, TxnResponse, WatchResponse,
};
use keyward::pb::mvccpb::{Event, KeyValue};
use keyward::pb::v3electionpb::{
    CampaignRequest, CampaignResponse, LeaderKey, LeaderRequest, LeaderResponse,
};
use keyward::pb::v3lockpb::{LockRequest, LockResponse};
use keyward::refusal::{Code, Refusal};
use keyward::rpc::namespace::Namespace;
use keyward::tasks::Tasks;
use prost::Message as _;

use crate::client::{Client, Stream};
use crate::member::{Call, Member};
use crate::rig::{Keyward, paused, settled};
use crate::words::{
    KEEP_ALIVE, PUT, RANGE, TXN, WATCH, create_of, created, header, range, ranged, renew, watch, watched,
};

const DELETE: &str = "/etcdserverpb.KV/DeleteRange";
const LOCK: &str = "/v3lockpb.Lock/Lock";
const CAMPAIGN: &str = "/v3electionpb.Election/Campaign";
const OBSERVE: &str = "/v3electionpb.Election/Observe";
const REVOKE: &str = "/etcdserverpb.Lease/LeaseRevoke";
const TIME_TO_LIVE: &str = "/etcdserverpb.Lease/LeaseTimeToLive";
const DENIED: (Code, &str) = (Code::PermissionDenied, "etcdserver: permission denied");

/// Every user has a namespace of its own.
pub(crate) const OF_USERS: &str = "[[binding]]\npeer = 'password:*'\nnamespace = '/t/{user}/'\n";

/// Keyward with a policy, in front of a member.
pub(crate) struct Tenants {
    folder: tempfile::TempDir,
    pub(crate) member: Member,
    pub(crate) keyward: Keyward,
}

fn settings(mode: &str) -> String {
    format!("[policy]\nmode = \"{mode}\"\nunknown_methods = \"allow\"\nfile = \"policy.toml\"\n")
}

impl Tenants {
    pub(crate) fn new(mode: &str, policy: &str) -> Self {
        Self::at(mode, policy, "")
    }

    fn at(mode: &str, policy: &str, listener: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("policy.toml"), policy).expect("written");
        let member = Member::new(1, &Tasks::default());
        let keyward = Keyward::at(&[&member], AuthSetting::On, folder.path(), listener, &settings(mode));
        Self { folder, member, keyward }
    }

    /// Publishes another policy, as a reload does.
    fn publish(&self, mode: &str, policy: &str) {
        std::fs::write(self.folder.path().join("policy.toml"), policy).expect("written");
        self.keyward.publish_rules(self.folder.path(), "", &settings(mode));
    }

    /// Publishes the leases that callers in a namespace can name.
    pub(crate) fn publish_leases(&self, mode: &str, leases: &str) {
        let lines = format!("{}namespace_leases = \"{leases}\"\n", settings(mode));
        self.keyward.publish_rules(self.folder.path(), "", &lines);
    }

    pub(crate) async fn alice(&self) -> Client {
        self.keyward.logged_in("alice").await
    }

    /// A call answered by the member: the request upstream, and the answer downstream.
    pub(crate) async fn served<Q: prost::Message + Default, A: prost::Message + Default>(
        &self,
        client: &Client,
        path: &str,
        request: &Q,
        answer: &A,
    ) -> (Q, A) {
        let script = async {
            let mut call = self.member.called(path).await;
            let asked = Q::decode(call.message().await).expect("a request");
            call.reply(&answer.encode_to_vec()).await;
            asked
        };
        let message = request.encode_to_vec();
        let (outcome, asked) = tokio::join!(client.call(path, &message), script);
        assert_eq!(outcome.end.code(), Some(Code::Ok), "{path}: {:?}", outcome.end);
        (asked, A::decode(outcome.message().clone()).expect("an answer"))
    }

    /// The client is refused, and nothing reaches the member.
    pub(crate) async fn refuses(&self, client: &Client, path: &str, message: &[u8], told: (Code, &str)) {
        let outcome = client.call(path, message).await;
        assert_eq!(outcome.end.told(), told, "{path}");
        assert!(self.member.was_called_again().is_none(), "{path} has reached the member");
    }
}

/// A lease of the user's namespace.
pub(crate) fn lease_of(user: &str) -> i64 {
    let namespace = Namespace::new(format!("/t/{user}/").as_bytes()).expect("a namespace");
    namespace.draw_lease().expect("random bytes")
}

fn kv(key: &str, revision: i64) -> KeyValue {
    KeyValue { key: key.to_owned().into(), value: "v".into(), mod_revision: revision, ..KeyValue::default() }
}

fn found(kvs: &[KeyValue]) -> RangeResponse {
    let count = i64::try_from(kvs.len()).expect("few");
    RangeResponse { header: Some(header(9)), kvs: kvs.to_vec(), count, ..RangeResponse::default() }
}

#[test]
fn requests_get_the_prefix_and_answers_lose_it() {
    paused(async {
        let tenants = Tenants::new("off", OF_USERS);
        let alice = tenants.alice().await;
        let all = RangeRequest { key: "\0".into(), range_end: "\0".into(), ..RangeRequest::default() };
        let answer = found(&[kv("/t/alice/a", 5), kv("/t/alice/b", 7)]);
        let (asked, told) = tenants.served(&alice, RANGE, &all, &answer).await;
        assert_eq!((&asked.key[..], &asked.range_end[..]), (&b"/t/alice/\0"[..], &b"/t/alice0"[..]));
        assert_eq!(told, found(&[kv("a", 5), kv("b", 7)]), "all but the keys as the member sent it");

        let put = PutRequest { key: "k".into(), value: "v".into(), prev_kv: true, ..PutRequest::default() };
        let was = |key| PutResponse { header: Some(header(9)), prev_kv: Some(kv(key, 5)) };
        let (asked, told) = tenants.served(&alice, PUT, &put, &was("/t/alice/k")).await;
        assert_eq!(asked, PutRequest { key: "/t/alice/k".into(), ..put });
        assert_eq!(told, was("k"));

        // The same request of another user is one for another key.
        let bob = tenants.keyward.logged_in("bob").await;
        let one = RangeRequest { key: "k".into(), ..RangeRequest::default() };
        let (asked, told) = tenants.served(&bob, RANGE, &one, &found(&[kv("/t/bob/k", 5)])).await;
        assert_eq!((asked.key, told.kvs[0].key.clone()), ("/t/bob/k".into(), "k".into()));

        let empty = (Code::InvalidArgument, "etcdserver: key is not provided");
        for path in [RANGE, PUT, DELETE] {
            tenants.refuses(&alice, path, b"", empty).await;
        }
    });
}

/// An answer above the bytes held back for every call is gathered whole, however it arrives.
#[test]
fn a_large_answer_is_spliced_too() {
    paused(async {
        let tenants = Tenants::new("off", OF_USERS);
        let alice = tenants.alice().await;
        let large = |prefix: &str| {
            let kvs = (0..2000)
                .map(|n| KeyValue { value: vec![7; 500].into(), ..kv(&format!("{prefix}{n:04}"), 5) });
            found(&kvs.collect::<Vec<_>>())
        };
        let all = RangeRequest { key: "\0".into(), range_end: "\0".into(), ..RangeRequest::default() };
        let (_, told) = tenants.served(&alice, RANGE, &all, &large("/t/alice/")).await;
        assert_eq!(told, large(""));
        assert!(tenants.keyward.metrics.text().expect("text").contains("keyward_unread_answer_bytes 0"));
    });
}

/// Its keys are rewritten, so it is held whole, at most a quarter of the room for unread answers.
#[test]
fn an_answer_too_large_to_be_held_whole_is_refused() {
    paused(async {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("policy.toml"), OF_USERS).expect("written");
        let member = Member::new(1, &Tasks::default());
        let lines = settings("off") + "[limits]\nunread_buffer = \"16MiB\"\n[runtime]\nshards = 1\n";
        let keyward = Keyward::at(&[&member], AuthSetting::On, folder.path(), "", &lines);
        let alice = keyward.logged_in("alice").await;
        let all = RangeRequest { key: "\0".into(), range_end: "\0".into(), ..RangeRequest::default() };
        for (size, is_served) in [(1 << 20, true), (12 << 20, false)] {
            let answer = found(&[KeyValue { value: vec![7; size].into(), ..kv("/t/alice/a", 5) }]);
            let script = async { member.called(RANGE).await.reply(&answer.encode_to_vec()).await };
            let (outcome, ()) = tokio::join!(alice.call(RANGE, all.encode_to_vec()), script);
            if is_served {
                outcome.message();
            } else {
                let told = Refusal::ANSWER_TOO_LARGE;
                assert_eq!(outcome.end.told(), (Code::ResourceExhausted, told.message()));
            }
        }
    });
}

#[test]
fn an_answer_with_a_foreign_key_is_not_shown() {
    paused(async {
        let tenants = Tenants::new("off", OF_USERS);
        let alice = tenants.alice().await;
        let script = async {
            let foreign = found(&[kv("/t/alice/a", 5), kv("/t/bob/secret", 5)]);
            tenants.member.called(RANGE).await.reply(&foreign.encode_to_vec()).await;
        };
        let (outcome, ()) = tokio::join!(alice.call(RANGE, range("a")), script);
        let unreadable = "keyward: the member's answer could not be read";
        assert_eq!(outcome.end.told(), (Code::Internal, unreadable));
        assert!(outcome.messages.is_empty());
    });
}

#[test]
fn what_is_about_the_whole_cluster_is_refused_unless_granted() {
    paused(async {
        let tenants = Tenants::new("off", OF_USERS);
        let alice = tenants.alice().await;
        for path in [
            "/etcdserverpb.KV/Compact",
            "/etcdserverpb.Maintenance/Snapshot",
            "/etcdserverpb.Maintenance/Hash",
            "/etcdserverpb.Maintenance/HashKV",
            "/etcdserverpb.Maintenance/Status",
            "/etcdserverpb.Maintenance/Alarm",
            "/etcdserverpb.Maintenance/Defragment",
            "/etcdserverpb.Maintenance/MoveLeader",
            "/etcdserverpb.Cluster/MemberAdd",
            "/etcdserverpb.Auth/UserList",
            "/etcdserverpb.Auth/AuthDisable",
        ] {
            tenants.refuses(&alice, path, b"", DENIED).await;
        }
        let outcome = alice.call("/etcdserverpb.KV/RangeStream", range("a")).await;
        assert_eq!(outcome.end.code(), Some(Code::Unimplemented));
        let outcome = alice.call("/etcdserverpb.KV/RangeBackwards", b"").await;
        assert_eq!(outcome.end.code(), Some(Code::Unimplemented), "allowed, but not in a namespace");
        assert!(tenants.member.was_called_again().is_none());

        // A shadow policy refuses nothing, and confines all the same.
        tenants.publish("shadow", OF_USERS);
        tenants.refuses(&tenants.alice().await, "/etcdserverpb.KV/Compact", b"", DENIED).await;

        let role =
            "[[role]]\nname = 'r'\n[[role.allow]]\nactions = ['maintenance', 'read']\neverything = true\n";
        let granted = format!("{role}{OF_USERS}roles = ['r']\n");
        tenants.publish("enforce", &granted);
        let alice = tenants.alice().await;
        let script = async { tenants.member.called("/etcdserverpb.KV/Compact").await.reply(b"").await };
        let (outcome, ()) = tokio::join!(alice.call("/etcdserverpb.KV/Compact", b""), script);
        assert_eq!(outcome.end.code(), Some(Code::Ok));
        tenants
            .refuses(
                &alice,
                PUT,
                &PutRequest { key: "k".into(), ..PutRequest::default() }.encode_to_vec(),
                DENIED,
            )
            .await;
    });
}

/// Grants name real keys.
#[test]
fn the_policy_judges_the_keys_with_their_prefix() {
    paused(async {
        let role = "[[role]]\nname = 'r'\n[[role.allow]]\nactions = ['read']\nprefix = '/t/alice/public/'\n";
        let tenants = Tenants::new("enforce", &format!("{role}{OF_USERS}roles = ['r']\n"));
        let alice = tenants.alice().await;
        let one = |key: &'static str| RangeRequest { key: key.into(), ..RangeRequest::default() };
        let (asked, _) = tenants.served(&alice, RANGE, &one("public/x"), &found(&[])).await;
        assert_eq!(asked.key, "/t/alice/public/x");
        tenants.refuses(&alice, RANGE, &one("private").encode_to_vec(), DENIED).await;
        tenants.refuses(&alice, RANGE, &one("/t/alice/public/x").encode_to_vec(), DENIED).await;
    });
}

async fn told(stream: &mut Stream) -> WatchResponse {
    watched(&stream.next().await.expect("a response"))
}

/// The member registers the watch; returns its id.
async fn register(call: &mut Call, key: &str, start: i64) -> i64 {
    let create = create_of(&call.messages.next().await.expect("a create")).expect("a create");
    assert_eq!((create.key, create.start_revision), (key.to_owned().into(), start));
    call.say(&created(create.watch_id, start.max(9))).await.expect("taken");
    create.watch_id
}

fn event(watch_id: i64, key: &str, revision: i64) -> Vec<u8> {
    let event = Event { kv: Some(kv(key, revision)), prev_kv: Some(kv(key, 3)), ..Event::default() };
    WatchResponse {
        header: Some(header(revision)),
        watch_id,
        events: vec![event],
        ..WatchResponse::default()
    }
    .encode_to_vec()
}

fn keys(response: &WatchResponse) -> Vec<(String, i64)> {
    let of = |event: &Event| {
        let (kv, prev) = (event.kv.as_ref().expect("a key"), event.prev_kv.as_ref().expect("a key"));
        assert_eq!(kv.key, prev.key);
        (String::from_utf8_lossy(&kv.key).into_owned(), kv.mod_revision)
    };
    response.events.iter().map(of).collect()
}

#[test]
fn a_watch_resumes_in_its_namespace() {
    paused(async {
        let tenants = Tenants::new("off", OF_USERS);
        let alice = tenants.alice().await;
        let mut stream = alice.open(WATCH).await.expect("open");
        stream.say(&watch("k", 5)).await;
        let mut call = tenants.member.called(WATCH).await;
        let id = register(&mut call, "/t/alice/k", 5).await;
        assert!(told(&mut stream).await.created);
        call.say(&event(id, "/t/alice/k", 10)).await.expect("taken");
        assert_eq!(keys(&told(&mut stream).await), [("k".to_owned(), 10)]);
        call.refuse_later();
        // The prefix stands there once.
        let mut call = tenants.member.called(WATCH).await;
        let id = register(&mut call, "/t/alice/k", 10).await;
        call.say(&event(id, "/t/alice/k", 12)).await.expect("taken");
        assert_eq!(keys(&told(&mut stream).await), [("k".to_owned(), 12)]);

        // A foreign event is not shown, and the watch goes on elsewhere.
        call.say(&event(id, "/t/bob/k", 13)).await.expect("taken");
        let mut call = tenants.member.called(WATCH).await;
        let id = register(&mut call, "/t/alice/k", 12).await;
        call.say(&event(id, "/t/alice/k", 14)).await.expect("taken");
        assert_eq!(keys(&told(&mut stream).await), [("k".to_owned(), 14)]);
    });
}

#[test]
fn another_namespace_ends_the_streams_of_the_old_one() {
    paused(async {
        let tenants = Tenants::new("off", OF_USERS);
        let alice = tenants.alice().await;
        let mut stream = alice.open(WATCH).await.expect("open");
        stream.say(&watch("k", 5)).await;
        let mut call = tenants.member.called(WATCH).await;
        register(&mut call, "/t/alice/k", 5).await;
        assert!(told(&mut stream).await.created);
        tenants.publish("off", &format!("{OF_USERS}\n# another text, the same rules\n"));
        settled().await;
        tenants.publish("off", &OF_USERS.replace("/t/", "/u/"));
        let end = loop {
            match stream.next().await {
                Ok(_) => {}
                Err(end) => break end,
            }
        };
        assert_eq!(end.told(), DENIED);
        let one = RangeRequest { key: "k".into(), ..RangeRequest::default() };
        let (asked, _) = tenants.served(&alice, RANGE, &one, &found(&[])).await;
        assert_eq!(asked.key, "/u/alice/k");
    });
}

#[test]
fn locks_and_elections_are_in_the_namespace() {
    paused(async {
        let tenants = Tenants::new("off", OF_USERS);
        let alice = tenants.alice().await;
        let lease = lease_of("alice");
        let lock = LockRequest { name: "n".into(), lease };
        let locked = LockResponse { header: Some(header(9)), key: "/t/alice/n/7".into() };
        let (asked, told) = tenants.served(&alice, LOCK, &lock, &locked).await;
        assert_eq!((asked.name, told.key), ("/t/alice/n".into(), "n/7".into()));

        let campaign = CampaignRequest { name: "e".into(), lease, value: "v".into() };
        let leader = |name: &'static str, key: &'static str| {
            let leader = LeaderKey { name: name.into(), key: key.into(), rev: 9, lease };
            CampaignResponse { header: Some(header(9)), leader: Some(leader) }
        };
        let real = leader("/t/alice/e", "/t/alice/e/7");
        let (asked, told) = tenants.served(&alice, CAMPAIGN, &campaign, &real).await;
        assert_eq!((asked.name, told), ("/t/alice/e".into(), leader("e", "e/7")));

        let observe = LeaderRequest { name: "e".into() }.encode_to_vec();
        let mut stream = alice.begin(OBSERVE, observe).await.expect("sent");
        let mut call = tenants.member.called(OBSERVE).await;
        assert_eq!(LeaderRequest::decode(call.message().await).expect("a request").name, "/t/alice/e");
        let leads = |key| LeaderResponse { header: Some(header(9)), kv: Some(kv(key, 9)) };
        call.say(&leads("/t/alice/e/7").encode_to_vec()).await.expect("taken");
        let told = stream.next().await.expect("a leader");
        assert_eq!(LeaderResponse::decode(told).expect("a leader"), leads("e/7"));
    });
}

#[test]
fn a_lease_shows_its_keys_of_the_namespace_and_is_revoked_only_with_those() {
    paused(async {
        let tenants = Tenants::new("shadow", OF_USERS);
        let alice = tenants.alice().await;
        let id = lease_of("alice");
        let keys = |keys: &[&'static str]| {
            let keys = keys.iter().map(|key| (*key).into()).collect();
            LeaseTimeToLiveResponse { header: Some(header(7)), id, ttl: 5, granted_ttl: 9, keys }
        };
        let ask = LeaseTimeToLiveRequest { id, keys: true };
        let revoke = LeaseRevokeRequest { id }.encode_to_vec();
        let all = keys(&["/t/alice/1", "/t/bob/2"]);
        let (_, told) = tenants.served(&alice, TIME_TO_LIVE, &ask, &all).await;
        assert_eq!(told, keys(&["1"]));

        for (attached, allowed) in
            [(&["/t/alice/1", "/t/bob/2"][..], false), (&["/t/alice/1"], true), (&[], true)]
        {
            let script = async {
                tenants.member.called(TIME_TO_LIVE).await.reply(&keys(attached).encode_to_vec()).await;
                if allowed {
                    tenants.member.called(REVOKE).await.reply(b"").await;
                }
            };
            let (outcome, ()) = tokio::join!(alice.call(REVOKE, &revoke), script);
            let code = if allowed { Code::Ok } else { Code::PermissionDenied };
            assert_eq!(outcome.end.code(), Some(code), "{attached:?}");
            assert!(tenants.member.was_called_again().is_none());
        }
    });
}

#[test]
fn a_nested_txn_is_in_the_namespace_at_every_depth() {
    use keyward::pb::etcdserverpb::{RequestOp, ResponseOp, request_op::Request, response_op::Response};
    paused(async {
        let tenants = Tenants::new("off", OF_USERS);
        let alice = tenants.alice().await;
        let request = |key: &'static str| {
            let range = Request::RequestRange(RangeRequest { key: key.into(), ..RangeRequest::default() });
            let inner =
                TxnRequest { failure: vec![RequestOp { request: Some(range) }], ..TxnRequest::default() };
            let inner = RequestOp { request: Some(Request::RequestTxn(inner)) };
            TxnRequest { success: vec![inner], ..TxnRequest::default() }
        };
        let answer = |key| {
            let range = ResponseOp { response: Some(Response::ResponseRange(found(&[kv(key, 5)]))) };
            let inner = TxnResponse { responses: vec![range], ..TxnResponse::default() };
            let inner = ResponseOp { response: Some(Response::ResponseTxn(inner)) };
            TxnResponse { header: Some(header(9)), succeeded: true, responses: vec![inner] }
        };
        let (asked, told) = tenants.served(&alice, TXN, &request("k"), &answer("/t/alice/k")).await;
        assert_eq!(asked, request("/t/alice/k"));
        assert_eq!(told, answer("k"));
    });
}

/// Never unconfined: no namespace to decide on means no service.
#[test]
fn a_caller_whose_namespace_is_undecided_is_refused() {
    paused(async {
        let two = "[[binding]]\npeer = 'password:a*'\nnamespace = '/a/'\n[[binding]]\npeer = 'password:*e'\nnamespace = '/b/'\n";
        let tenants = Tenants::new("off", two);
        let (alice, adam) = (tenants.alice().await, tenants.keyward.logged_in("adam").await);
        tenants.refuses(&alice, RANGE, &range("k"), DENIED).await;
        for (path, message) in [(WATCH, watch("k", 0)), (KEEP_ALIVE, renew(7))] {
            let stream = alice.begin(path, &message).await.expect("open");
            assert_eq!(stream.finish().await.end.told(), DENIED, "{path}");
        }
        let one = RangeRequest { key: "k".into(), ..RangeRequest::default() };
        let (asked, _) = tenants.served(&adam, RANGE, &one, &found(&[])).await;
        assert_eq!(asked.key, "/a/k");

        // A name that would leave its place is refused, and so is a caller without a name.
        tenants.publish("off", OF_USERS);
        for name in ["a/b", "..", "."] {
            tenants.refuses(&tenants.keyward.logged_in(name).await, RANGE, &range("k"), DENIED).await;
        }
    });
}

#[test]
fn a_listener_has_a_namespace_for_all_its_callers() {
    paused(async {
        let tenants = Tenants::at("off", "", "namespace = '/legacy/'\n");
        let alice = tenants.alice().await;
        let one = RangeRequest { key: "k".into(), ..RangeRequest::default() };
        let (asked, _) = tenants.served(&alice, RANGE, &one, &found(&[])).await;
        assert_eq!(asked.key, "/legacy/k");
        tenants.keyward.publish_rules(tenants.folder.path(), "", &settings("off"));
        let (asked, _) = tenants.served(&alice, RANGE, &one, &found(&[])).await;
        assert_eq!(asked.key, "k");
        let script = async { tenants.member.called(RANGE).await.reply(&ranged(5)).await };
        let (outcome, ()) = tokio::join!(alice.call(RANGE, range("k")), script);
        assert_eq!(outcome.message()[..], ranged(5)[..]);
    });
}
