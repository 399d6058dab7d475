//! Limits on usage, before real etcd servers: a limit of keys changes no answer that it does not refuse, whatever the order and the
//! bounds of a Range, and a client that pages gets the very same keys as without the limit.

use std::time::Duration;

use keyward::pb::etcdserverpb::kv_client::KvClient;
use keyward::pb::etcdserverpb::lease_client::LeaseClient;
use keyward::pb::etcdserverpb::{
    LeaseGrantRequest, LeaseRevokeRequest, RangeRequest, RangeResponse, TxnRequest,
};
use keyward::pb::etcdserverpb::{RequestOp, request_op};
use tonic::{Code, Status};

use crate::caller::Caller;
use crate::harness::keyward::{Keyward, Site};
use crate::harness::{Auth, Cluster, Options, versions, wait};

const KEYS: usize = 40;
const CAP: i64 = 7;

fn options() -> Options {
    Options { members: 1, auth: Auth::On { extra_users: 0 }, ..Options::default() }
}

async fn keyward(cluster: &Cluster, limits: &str) -> Keyward {
    let site = Site::new();
    let config = site.in_front_of(cluster) + &format!("[policy.peer_limits]\n{limits}\n");
    Keyward::start(site, &config).await
}

async fn range(caller: &Caller, request: RangeRequest) -> Result<RangeResponse, Status> {
    let mut client = KvClient::new(caller.channel.clone());
    Ok(client.range(caller.request(request)).await?.into_inner())
}

/// Keys of several revisions, versions and values, so that every order differs.
async fn fill(caller: &Caller) {
    for number in 0..KEYS {
        let value = vec![b'a' + u8::try_from(number * 7 % 26).expect("a letter"); 1 + number % 5];
        let key = format!("/a/{:03}", number * 17 % KEYS);
        for _ in 0..=number % 3 {
            caller.put(&key, value.clone(), 0).await.expect("put");
        }
    }
}

/// Every order, target, limit and bound.
fn requests(revision: i64) -> Vec<RangeRequest> {
    let mut requests = Vec::new();
    for sort_order in 0..3 {
        for sort_target in 0..5 {
            for limit in [0, 3, CAP, CAP + 1, 1000] {
                let bounds = [(0, 0), (revision - 30, 0), (0, revision - 60), (revision - 5, revision)];
                for (min_mod_revision, max_mod_revision) in bounds {
                    for (keys_only, end) in [(false, "/a0"), (true, "/a/004")] {
                        requests.push(RangeRequest {
                            key: "/a/".into(),
                            range_end: end.to_owned().into(),
                            limit,
                            sort_order,
                            sort_target,
                            min_mod_revision,
                            max_mod_revision,
                            keys_only,
                            ..RangeRequest::default()
                        });
                    }
                }
            }
        }
    }
    requests
}

fn keys(response: &RangeResponse) -> Vec<String> {
    response.kvs.iter().map(|kv| String::from_utf8_lossy(&kv.key).into_owned()).collect()
}

#[tokio::test]
async fn a_limit_of_keys_refuses_or_changes_nothing_in_every_order() {
    for version in versions() {
        let cluster = Cluster::start(&version, options()).await;
        let direct = Caller::log_in(cluster.address(0), "alice").await;
        fill(&direct).await;
        let revision = range(&direct, RangeRequest { key: "/a/000".into(), ..RangeRequest::default() }).await;
        let revision = revision.expect("a range").header.expect("a header").revision;
        for on_exceed in ["refuse", "page"] {
            let limits = format!("keys_per_range = {CAP}\non_exceed = '{on_exceed}'");
            let keyward = keyward(&cluster, &limits).await;
            let through = Caller::log_in(keyward.site().listen, "alice").await;
            let (mut refused, mut same, mut paged) = (0, 0, 0);
            for request in requests(revision) {
                let whole = range(&direct, request.clone()).await.expect("a range at the member");
                let unlimited = RangeRequest { limit: 0, ..request.clone() };
                let matching = range(&direct, unlimited).await.expect("a range at the member");
                let is_within = request.limit > 0 && request.limit <= CAP;
                let fits = is_within || matching.kvs.len() <= usize::try_from(CAP).expect("small");
                match range(&through, request.clone()).await {
                    Ok(answer) if fits => {
                        assert_eq!(keys(&answer), keys(&whole), "{version} {request:?}");
                        assert_eq!((answer.more, answer.count), (whole.more, whole.count), "{request:?}");
                        same += 1;
                    }
                    Ok(answer) => {
                        assert!(on_exceed == "page" && request.sort_target == 0, "{version} {request:?}");
                        assert_eq!(keys(&answer), keys(&whole)[..7], "{version} {request:?}");
                        assert!(answer.more && answer.count == whole.count, "{request:?}");
                        paged += 1;
                    }
                    Err(status) => {
                        assert!(!fits, "{version} {request:?}: {status}");
                        assert_eq!(status.code(), Code::ResourceExhausted, "{status}");
                        assert!(status.message().contains("more than 7 keys"), "{status}");
                        refused += 1;
                    }
                }
            }
            println!("{version} {on_exceed}: {same} the same, {paged} paged, {refused} refused");
            assert!(same > 100 && refused > 50 && (paged > 20) == (on_exceed == "page"));
        }
    }
}

#[tokio::test]
async fn a_client_that_pages_gets_the_very_same_keys() {
    for version in versions() {
        let cluster = Cluster::start(&version, options()).await;
        let direct = Caller::log_in(cluster.address(0), "alice").await;
        fill(&direct).await;
        let keyward = keyward(&cluster, "keys_per_range = 7\non_exceed = 'page'").await;
        let through = Caller::log_in(keyward.site().listen, "alice").await;
        for (sort_order, min_mod_revision) in [(0, 0), (1, 0), (2, 0), (1, 40)] {
            let first = RangeRequest {
                key: "/a/".into(),
                range_end: "/a0".into(),
                sort_order,
                min_mod_revision,
                ..RangeRequest::default()
            };
            let whole = keys(&range(&direct, first.clone()).await.expect("a range"));
            let (mut next, mut found) = (first, Vec::new());
            loop {
                let page = range(&through, next.clone()).await.expect("a page");
                found.extend(keys(&page));
                if !page.more {
                    break;
                }
                let last = page.kvs.last().expect("keys beside `more`").key.clone();
                // As every client pages: behind the last key, or before the last key in a descending order.
                if sort_order == 2 {
                    next.range_end = last;
                } else {
                    next.key = [&last[..], &[0]].concat().into();
                }
            }
            assert_eq!(found, whole, "{version} order {sort_order}");
            assert!(whole.len() > 14, "{version}: several pages");
        }
        let nested = RangeRequest { key: "/a/".into(), range_end: "/a0".into(), ..RangeRequest::default() };
        let op = RequestOp { request: Some(request_op::Request::RequestRange(nested)) };
        let txn = TxnRequest { success: vec![op], ..TxnRequest::default() };
        let status = KvClient::new(through.channel.clone()).txn(through.request(txn)).await;
        assert_eq!(status.expect_err("refused").code(), Code::ResourceExhausted);
    }
}

#[tokio::test]
async fn leases_and_calls_of_one_user_are_limited_and_others_are_not() {
    for version in versions() {
        let cluster = Cluster::start(&version, options()).await;
        let keyward = keyward(&cluster, "leases = 3\ncalls_per_second = 50\nburst = 60").await;
        let alice = Caller::log_in(keyward.site().listen, "alice").await;
        let grant = async |ttl| {
            let request = LeaseGrantRequest { ttl, id: 0 };
            LeaseClient::new(alice.channel.clone())
                .lease_grant(alice.request(request))
                .await
                .map(|granted| granted.into_inner().id)
        };
        let (first, _second, _third) = (
            grant(60).await.expect("a lease"),
            grant(60).await.expect("a lease"),
            grant(60).await.expect("one"),
        );
        let status = grant(60).await.expect_err("the fourth");
        assert_eq!(
            (status.code(), status.message()),
            (Code::ResourceExhausted, "etcdserver: too many requests")
        );
        let revoke = LeaseRevokeRequest { id: first };
        LeaseClient::new(alice.channel.clone()).lease_revoke(alice.request(revoke)).await.expect("revoked");
        grant(2).await.expect("after the revocation");
        wait::until(Duration::from_secs(20), "the short lease is over", async || grant(60).await.ok()).await;
        let root = Caller::log_in(keyward.site().listen, "root").await;
        let (mut served, mut refused) = (0, 0);
        for number in 0..400 {
            let put = alice.put(&format!("/a/{number}"), Vec::new(), 0).await;
            match put {
                Ok(_) => served += 1,
                Err(status) => {
                    assert_eq!(status.message(), "etcdserver: too many requests");
                    refused += 1;
                }
            }
            if number % 10 == 0 {
                root.put("/b", Vec::new(), 0).await.expect("another user is not limited by alice");
            }
        }
        println!("{version}: {served} served, {refused} refused");
        assert!(served >= 40, "{served}");
        let counted = [("scope", "peer"), ("limit", "calls_per_second")];
        let metric = keyward.metric("keyward_limit_refused_total", &counted).await;
        assert!(metric >= f64::from(refused), "{metric} of {refused}");
        if refused > 0 {
            let tells = |line: &str| line.contains("limit=\"peer calls_per_second\"");
            keyward.logged("the limit in the access log", tells).await;
        }
    }
}
