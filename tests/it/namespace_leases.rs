//! The leases of a caller in a namespace are those that it was granted there; every other lease is gone for it.

use keyward::pb::etcdserverpb::{
    LeaseGrantRequest, LeaseGrantResponse, LeaseLeasesResponse, LeaseRevokeRequest, LeaseRevokeResponse,
    LeaseStatus, LeaseTimeToLiveRequest, LeaseTimeToLiveResponse, PutRequest, RequestOp, TxnRequest,
    request_op::Request,
};
use keyward::pb::v3electionpb::{CampaignRequest, LeaderKey, ProclaimRequest};
use keyward::pb::v3lockpb::{LockRequest, LockResponse};
use keyward::refusal::Code;
use keyward::rpc::namespace::Namespace;
use prost::Message as _;

use crate::client::Client;
use crate::member::{Call, Member};
use crate::namespaces::{OF_USERS, Tenants, lease_of};
use crate::rig::{paused, settled};
use crate::words::{KEEP_ALIVE, PUT, RANGE, TXN, header, ranged, renew, renewal, renewal_of, renewed};

const GRANT: &str = "/etcdserverpb.Lease/LeaseGrant";
const REVOKE: &str = "/etcdserverpb.Lease/LeaseRevoke";
const TIME_TO_LIVE: &str = "/etcdserverpb.Lease/LeaseTimeToLive";
const LEASES: &str = "/etcdserverpb.Lease/LeaseLeases";
const LOCK: &str = "/v3lockpb.Lock/Lock";
const CAMPAIGN: &str = "/v3electionpb.Election/Campaign";
const PROCLAIM: &str = "/v3electionpb.Election/Proclaim";
const NOT_FOUND: (Code, &str) = (Code::NotFound, "etcdserver: requested lease not found");
const EXISTS: &str = "etcdserver: lease already exists";
const ROLE: &str = "[[role]]\nname = 'r'\n[[role.allow]]\nactions = ['read', 'write', 'lock', 'watch']\n\
    prefix = '/t/{user}/'\n[[role.allow]]\nactions = ['lease']\n";

/// The two ends of what a policy may do: nothing, and everything that it must allow.
fn policies() -> [(&'static str, String); 2] {
    [("off", OF_USERS.to_owned()), ("enforce", format!("{ROLE}{OF_USERS}roles = ['r']\n"))]
}

fn of_alice() -> Namespace {
    Namespace::new(b"/t/alice/").expect("a namespace")
}

/// The next call of `path`; questions about the keys of a lease before it find none, and are about `lease`.
async fn called_after_questions(member: &Member, path: &str, lease: i64) -> Call {
    loop {
        let mut call =
            if path.starts_with("/v3") { member.call_after_judges().await } else { member.call().await };
        if call.path() == path {
            return call;
        }
        assert_eq!(call.path(), TIME_TO_LIVE);
        let asked = LeaseTimeToLiveRequest::decode(call.message().await).expect("a question");
        assert_eq!(asked, LeaseTimeToLiveRequest { id: lease, keys: true });
        let none =
            LeaseTimeToLiveResponse { header: Some(header(7)), id: lease, ttl: -1, ..Default::default() };
        call.reply(&none.encode_to_vec()).await;
    }
}

/// A call that names `named` reaches the member as one that names `sent`, and is answered there.
async fn reaches<M: prost::Message + Default + PartialEq + std::fmt::Debug>(
    tenants: &Tenants,
    client: &Client,
    path: &str,
    request: impl Fn(i64) -> M,
    in_store: impl Fn(M) -> M,
    (named, sent): (i64, i64),
) {
    let script = async {
        let mut call = called_after_questions(&tenants.member, path, sent).await;
        let asked = M::decode(call.message().await).expect("a request");
        assert_eq!(asked, in_store(request(sent)), "{path}");
        call.refuse(NOT_FOUND.0, NOT_FOUND.1);
    };
    let message = request(named).encode_to_vec();
    let (outcome, ()) = tokio::join!(client.call(path, &message), script);
    assert_eq!(outcome.end.told(), NOT_FOUND, "{path}");
}

#[test]
fn a_granted_lease_has_an_id_of_its_namespace() {
    paused(async {
        let tenants = Tenants::new("off", OF_USERS);
        let alice = tenants.alice().await;
        let grant = LeaseGrantRequest { ttl: 5, id: 0 }.encode_to_vec();
        let mut drawn = Vec::new();
        for exists in [0, 3] {
            let script = async {
                for turn in 0..=exists {
                    let mut call = tenants.member.called(GRANT).await;
                    let asked = LeaseGrantRequest::decode(call.message().await).expect("a grant");
                    assert!(of_alice().has_lease(asked.id) && !drawn.contains(&asked.id), "{asked:?}");
                    assert_eq!(asked.ttl, 5);
                    drawn.push(asked.id);
                    if turn < exists {
                        call.refuse(Code::FailedPrecondition, EXISTS);
                    } else {
                        let granted = LeaseGrantResponse {
                            header: Some(header(9)),
                            id: asked.id,
                            ttl: 5,
                            ..Default::default()
                        };
                        call.reply(&granted.encode_to_vec()).await;
                    }
                }
            };
            let (outcome, ()) = tokio::join!(alice.call(GRANT, &grant), script);
            let granted = LeaseGrantResponse::decode(outcome.message().clone()).expect("a grant");
            assert_eq!(Some(&granted.id), drawn.last());
        }
        // Ids are not drawn for ever.
        let script = async {
            for _ in 0..5 {
                tenants.member.called(GRANT).await.refuse(Code::FailedPrecondition, EXISTS);
            }
        };
        let (outcome, ()) = tokio::join!(alice.call(GRANT, &grant), script);
        assert_eq!(outcome.end.told(), (Code::FailedPrecondition, EXISTS));
        assert!(tenants.member.was_called_again().is_none());
    });
}

#[test]
fn an_id_of_the_clients_choice_is_one_of_its_namespace() {
    paused(async {
        let tenants = Tenants::new("off", OF_USERS);
        let alice = tenants.alice().await;
        let text = "keyward: a lease id outside of the namespace; leave it out, and an id is drawn";
        for id in [7, -7, lease_of("bob"), of_alice().lease_bits()] {
            let grant = LeaseGrantRequest { ttl: 5, id }.encode_to_vec();
            tenants.refuses(&alice, GRANT, &grant, (Code::InvalidArgument, text)).await;
        }
        let grant = LeaseGrantRequest { ttl: 5, id: lease_of("alice") };
        let (asked, _) = tenants.served(&alice, GRANT, &grant, &LeaseGrantResponse::default()).await;
        assert_eq!(asked, grant);
        // It exists: another id is not what the client wants.
        let message = grant.encode_to_vec();
        let script = async { tenants.member.called(GRANT).await.refuse(Code::FailedPrecondition, EXISTS) };
        let (outcome, ()) = tokio::join!(alice.call(GRANT, &message), script);
        assert_eq!(outcome.end.told(), (Code::FailedPrecondition, EXISTS));
    });
}

#[test]
fn a_foreign_lease_is_gone_for_every_call() {
    paused(async {
        for (mode, policy) in policies() {
            let tenants = Tenants::new(mode, &policy);
            let alice = tenants.alice().await;
            let (mine, none) = (lease_of("alice"), of_alice().lease_bits());
            for ids in [(lease_of("bob"), none), (7, none), (none, none), (mine, mine)] {
                let revoke = |id| LeaseRevokeRequest { id };
                reaches(&tenants, &alice, REVOKE, revoke, |same| same, ids).await;
                let put = |lease| PutRequest { key: "k".into(), lease, ..Default::default() };
                let long =
                    |put: PutRequest| PutRequest { key: [b"/t/alice/", &put.key[..]].concat().into(), ..put };
                reaches(&tenants, &alice, PUT, put, long, ids).await;
                let op = |lease| vec![RequestOp { request: Some(Request::RequestPut(put(lease))) }];
                let txn = |lease| {
                    let inner = TxnRequest { failure: op(lease), ..Default::default() };
                    let inner = RequestOp { request: Some(Request::RequestTxn(inner)) };
                    TxnRequest { success: vec![inner], failure: op(lease), ..Default::default() }
                };
                fn in_store(txn: TxnRequest) -> TxnRequest {
                    let long = |op: RequestOp| RequestOp {
                        request: op.request.map(|request| match request {
                            Request::RequestPut(put) => Request::RequestPut(PutRequest {
                                key: [b"/t/alice/", &put.key[..]].concat().into(),
                                ..put
                            }),
                            Request::RequestTxn(txn) => Request::RequestTxn(in_store(txn)),
                            other => other,
                        }),
                    };
                    let all = |ops: Vec<RequestOp>| ops.into_iter().map(long).collect();
                    TxnRequest { success: all(txn.success), failure: all(txn.failure), ..txn }
                }
                reaches(&tenants, &alice, TXN, txn, in_store, ids).await;
                let proclaim = |lease| ProclaimRequest {
                    leader: Some(LeaderKey { name: "e".into(), key: "e/1".into(), rev: 3, lease }),
                    value: "v".into(),
                };
                let in_store = |proclaim: ProclaimRequest| ProclaimRequest {
                    leader: proclaim.leader.map(|leader| LeaderKey {
                        name: "/t/alice/e".into(),
                        key: "/t/alice/e/1".into(),
                        ..leader
                    }),
                    ..proclaim
                };
                reaches(&tenants, &alice, PROCLAIM, proclaim, in_store, ids).await;
                let lock = |lease| LockRequest { name: "n".into(), lease };
                let in_store = |lock| LockRequest { name: "/t/alice/n".into(), ..lock };
                reaches(&tenants, &alice, LOCK, lock, in_store, ids).await;
                let campaign = |lease| CampaignRequest { name: "n".into(), lease, value: "v".into() };
                let in_store = |campaign| CampaignRequest { name: "/t/alice/n".into(), ..campaign };
                reaches(&tenants, &alice, CAMPAIGN, campaign, in_store, ids).await;
            }
            let text = tenants.keyward.metrics.text().expect("text");
            assert!(
                text.lines().any(|line| line == "keyward_policy_foreign_leases_total 18"),
                "{mode}: {text}"
            );
        }
    });
}

/// etcd has no error for the life of a lease that is gone.
#[test]
fn the_life_of_a_foreign_lease_is_over() {
    paused(async {
        for (mode, policy) in policies() {
            let tenants = Tenants::new(mode, &policy);
            let alice = tenants.alice().await;
            let none = of_alice().lease_bits();
            let gone =
                |id| LeaseTimeToLiveResponse { header: Some(header(7)), id, ttl: -1, ..Default::default() };
            for (id, keys) in [(lease_of("bob"), false), (7, false), (none, false)] {
                let ask = LeaseTimeToLiveRequest { id, keys };
                let (asked, told) = tenants.served(&alice, TIME_TO_LIVE, &ask, &gone(none)).await;
                assert_eq!((asked, told), (LeaseTimeToLiveRequest { id: none, keys }, gone(id)), "{mode}");
            }
            let id = lease_of("alice");
            let ask = LeaseTimeToLiveRequest { id, keys: false };
            let (asked, told) = tenants.served(&alice, TIME_TO_LIVE, &ask, &gone(id)).await;
            assert_eq!((asked, told), (ask, gone(id)));
        }
    });
}

#[test]
fn a_foreign_lease_is_not_renewed_and_costs_no_other() {
    paused(async {
        for (mode, policy) in policies() {
            let tenants = Tenants::new(mode, &policy);
            let alice = tenants.alice().await;
            let (mine, bobs, none) = (lease_of("alice"), lease_of("bob"), of_alice().lease_bits());
            let mut stream = alice.open(KEEP_ALIVE).await.expect("open");
            stream.say(&renew(bobs)).await;
            let mut call = called_after_questions(&tenants.member, KEEP_ALIVE, none).await;
            assert_eq!(renewal_of(&call.messages.next().await.expect("a renewal")), none);
            call.say(&renewed(none, 0)).await.expect("taken");
            assert_eq!(renewal(&stream.next().await.expect("an answer")), (bobs, 0), "{mode}");

            stream.say(&renew(mine)).await;
            if mode == "enforce" {
                let mut question = tenants.member.called(TIME_TO_LIVE).await;
                let asked = LeaseTimeToLiveRequest::decode(question.message().await).expect("a question");
                assert_eq!(asked.id, mine);
                question
                    .reply(
                        &LeaseTimeToLiveResponse { header: Some(header(7)), id: mine, ..Default::default() }
                            .encode_to_vec(),
                    )
                    .await;
            }
            assert_eq!(renewal_of(&call.messages.next().await.expect("a renewal")), mine);
            call.say(&renewed(mine, 5)).await.expect("taken");
            assert_eq!(renewal(&stream.next().await.expect("an answer")), (mine, 5), "{mode}");

            // Another stream at the member begins with what was not answered: the same lease is asked about.
            stream.say(&renew(7)).await;
            assert_eq!(renewal_of(&call.messages.next().await.expect("a renewal")), none);
            call.refuse_later();
            let mut call = tenants.member.called(KEEP_ALIVE).await;
            assert_eq!(renewal_of(&call.messages.next().await.expect("a renewal")), none);
            call.say(&renewed(none, 0)).await.expect("taken");
            assert_eq!(renewal(&stream.next().await.expect("an answer")), (7, 0), "{mode}");
        }
    });
}

/// Sessions of before the upgrade have etcd's own ids: an operator lets them end first.
#[test]
fn leases_of_before_count_as_long_as_the_operator_wants() {
    paused(async {
        let tenants = Tenants::new("off", OF_USERS);
        tenants.publish_leases("off", "any");
        let alice = tenants.alice().await;
        let (bobs, none) = (lease_of("bob"), of_alice().lease_bits());
        let long = |put: PutRequest| PutRequest { key: [b"/t/alice/", &put.key[..]].concat().into(), ..put };
        let put = |lease| PutRequest { key: "k".into(), lease, ..Default::default() };
        for id in [7, bobs] {
            reaches(&tenants, &alice, PUT, put, long, (id, id)).await;
        }
        let grant = LeaseGrantRequest { ttl: 5, id: 7 };
        let (asked, _) = tenants.served(&alice, GRANT, &grant, &LeaseGrantResponse::default()).await;
        assert_eq!(asked, grant);
        let grant = LeaseGrantRequest { ttl: 5, id: 0 };
        let (asked, _) = tenants.served(&alice, GRANT, &grant, &LeaseGrantResponse::default()).await;
        assert!(of_alice().has_lease(asked.id), "new leases have an id of the namespace");

        // The change ends no stream.
        let mut stream = alice.open(KEEP_ALIVE).await.expect("open");
        stream.say(&renew(7)).await;
        let mut call = tenants.member.called(KEEP_ALIVE).await;
        assert_eq!(renewal_of(&call.messages.next().await.expect("a renewal")), 7);
        call.say(&renewed(7, 5)).await.expect("taken");
        assert_eq!(renewal(&stream.next().await.expect("an answer")), (7, 5));
        let text = tenants.keyward.metrics.text().expect("text");
        assert!(text.lines().any(|line| line == "keyward_policy_foreign_leases_total 4"), "{text}");
        tenants.publish_leases("off", "own");
        settled().await;
        stream.say(&renew(7)).await;
        assert_eq!(renewal_of(&call.messages.next().await.expect("a renewal")), none);
        call.say(&renewed(none, 0)).await.expect("taken");
        assert_eq!(renewal(&stream.next().await.expect("an answer")), (7, 0));
    });
}

/// etcd would grant a lease with an id of its own, and show the id.
#[test]
fn a_lock_without_a_lease_gets_one_of_its_namespace() {
    paused(async {
        for (mode, policy) in policies() {
            let tenants = Tenants::new(mode, &policy);
            let alice = tenants.alice().await;
            let script = async {
                tenants.member.called(GRANT).await.refuse(Code::FailedPrecondition, EXISTS);
                let mut call = tenants.member.called(GRANT).await;
                let granted = LeaseGrantRequest::decode(call.message().await).expect("a grant");
                assert!(of_alice().has_lease(granted.id) && granted.ttl == 60, "{granted:?}");
                call.reply(
                    &LeaseGrantResponse {
                        header: Some(header(9)),
                        id: granted.id,
                        ttl: 60,
                        ..Default::default()
                    }
                    .encode_to_vec(),
                )
                .await;
                let mut call = tenants.member.called(LOCK).await;
                let asked = LockRequest::decode(call.message().await).expect("a lock");
                assert_eq!(asked, LockRequest { name: "/t/alice/n".into(), lease: granted.id });
                let key = format!("/t/alice/n/{:x}", granted.id);
                call.reply(&LockResponse { header: Some(header(9)), key: key.into() }.encode_to_vec()).await;
                granted.id
            };
            let lock = LockRequest { name: "n".into(), lease: 0 }.encode_to_vec();
            let (outcome, lease) = tokio::join!(alice.call(LOCK, &lock), script);
            let told = LockResponse::decode(outcome.message().clone()).expect("a lock");
            assert_eq!(told.key, format!("n/{lease:x}"), "{mode}");

            let script = async {
                tenants
                    .member
                    .called(GRANT)
                    .await
                    .refuse(Code::PermissionDenied, "etcdserver: permission denied");
            };
            let (outcome, ()) = tokio::join!(alice.call(LOCK, &lock), script);
            assert_eq!(outcome.end.code(), Some(Code::PermissionDenied), "{mode}");
            assert!(tenants.member.was_called_again().is_none());
        }
    });
}

#[test]
fn a_list_of_leases_has_those_of_the_namespace() {
    paused(async {
        for (mode, policy) in policies() {
            let tenants = Tenants::new(mode, &policy);
            let alice = tenants.alice().await;
            let [first, second] = [0, 1].map(|_| lease_of("alice"));
            let list = |ids: &[i64]| LeaseLeasesResponse {
                header: Some(header(7)),
                leases: ids.iter().map(|id| LeaseStatus { id: *id }).collect(),
            };
            let script = async {
                tenants.member.called(RANGE).await.reply(&ranged(7)).await;
                let all = list(&[7, first, lease_of("bob"), second]);
                tenants.member.called(LEASES).await.reply(&all.encode_to_vec()).await;
            };
            let (outcome, ()) = tokio::join!(alice.call(LEASES, b""), script);
            let told = LeaseLeasesResponse::decode(outcome.message().clone()).expect("a list");
            assert_eq!(told, list(&[first, second]), "{mode}");
        }
        // Without the action it is refused as before.
        let role = "[[role]]\nname = 'r'\n[[role.allow]]\nactions = ['read']\nprefix = '/t/{user}/'\n";
        let tenants = Tenants::new("enforce", &format!("{role}{OF_USERS}roles = ['r']\n"));
        let denied = (Code::PermissionDenied, "etcdserver: permission denied");
        tenants.refuses(&tenants.alice().await, LEASES, b"", denied).await;
    });
}

#[test]
fn a_caller_without_a_namespace_names_every_lease() {
    paused(async {
        let tenants = Tenants::new("off", "[[binding]]\npeer = 'password:bob'\nnamespace = '/t/bob/'\n");
        let alice = tenants.alice().await;
        let grant = LeaseGrantRequest { ttl: 5, id: 0 };
        let (asked, _) = tenants.served(&alice, GRANT, &grant, &LeaseGrantResponse::default()).await;
        assert_eq!(asked, grant, "etcd draws the id");
        let revoke = LeaseRevokeRequest { id: lease_of("bob") };
        let (asked, _) = tenants.served(&alice, REVOKE, &revoke, &LeaseRevokeResponse::default()).await;
        assert_eq!(asked, revoke);
    });
}
