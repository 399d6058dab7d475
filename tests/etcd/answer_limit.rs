//! The limit on the bytes of one answer, before real etcd servers: a request is refused if and only if etcd would gather more for its
//! answer, whatever the order, the bounds and the revision; everything else is answered as by the member itself.

use std::time::Duration;

use keyward::pb::etcdserverpb::kv_client::KvClient;
use keyward::pb::etcdserverpb::request_op::Request;
use keyward::pb::etcdserverpb::{
    Compare, DeleteRangeRequest, PutRequest, RangeRequest, RangeResponse, RequestOp, TxnRequest,
};
use keyward::pb::v3electionpb::election_client::ElectionClient;
use keyward::pb::v3electionpb::{CampaignRequest, LeaderRequest};
use keyward::pb::v3lockpb::LockRequest;
use keyward::pb::v3lockpb::lock_client::LockClient;
use prost::Message as _;
use tonic::{Code, Status};

use crate::caller::Caller;
use crate::harness::keyward::{Keyward, Site};
use crate::harness::{Auth, Cluster, Options, versions, wait};

const LIMIT: usize = 1024 * 1024;
/// Bytes of a value, some of which make the limit.
const VALUE: usize = 100_000;
const KEYS: usize = 30;

async fn range(caller: &Caller, request: RangeRequest) -> Result<RangeResponse, Status> {
    let mut client = KvClient::new(caller.channel.clone());
    Ok(client.range(caller.request(request)).await?.into_inner())
}

/// Every order, target, limit, bound and revision.
fn requests(revision: i64) -> Vec<RangeRequest> {
    let mut requests = Vec::new();
    for (sort_order, sort_target) in [(0, 0), (0, 3), (1, 0), (2, 4)] {
        for limit in [0, 5, 10, 11] {
            for (at, min_mod_revision) in [(0, 0), (revision - 15, 0), (0, revision - 1)] {
                for (end, keys_only, count_only) in [
                    ("/a0", false, false),
                    ("/a/005", false, false),
                    ("/a0", true, false),
                    ("/a0", false, true),
                ] {
                    requests.push(RangeRequest {
                        key: "/a/".into(),
                        range_end: end.to_owned().into(),
                        limit,
                        revision: at,
                        sort_order,
                        sort_target,
                        min_mod_revision,
                        keys_only,
                        count_only,
                        ..RangeRequest::default()
                    });
                }
            }
        }
    }
    requests
}

/// Bytes that etcd gathers for the answer: all pairs of the range with their values, or the first ones.
async fn gathered(direct: &Caller, request: &RangeRequest) -> usize {
    if request.count_only {
        return 0;
    }
    let is_picked = request.sort_order != 0 || request.min_mod_revision != 0;
    let read = RangeRequest {
        // etcd reads one pair more, for `more`.
        limit: if is_picked || request.limit == 0 { 0 } else { request.limit + 1 },
        sort_order: 0,
        sort_target: 0,
        min_mod_revision: 0,
        keys_only: false,
        ..request.clone()
    };
    range(direct, read).await.expect("a range at the member").encoded_len()
}

fn operation(request: Request) -> RequestOp {
    RequestOp { request: Some(request) }
}

/// Requests whose answers are short, or that read what they have written, or that are nested deeper than most decoders read: all are
/// refused for what etcd would gather.
async fn gathered_without_an_answer(through: &Caller) {
    let all = RangeRequest { key: "/a/".into(), range_end: "/a0".into(), ..RangeRequest::default() };
    let compare = Compare { key: "/a/".into(), range_end: "/a0".into(), ..Compare::default() };
    let value = vec![7; 900_000];
    let put = PutRequest { key: "/a/own".into(), value: value.into(), ..PutRequest::default() };
    let own = RangeRequest { key: "/a/own".into(), ..RangeRequest::default() };
    let innermost =
        TxnRequest { success: vec![operation(Request::RequestRange(all))], ..TxnRequest::default() };
    let nested = (0..60).fold(innermost, |inner, _| TxnRequest {
        success: vec![operation(Request::RequestTxn(inner))],
        ..TxnRequest::default()
    });
    let own_twice = [put.clone()].map(Request::RequestPut).map(operation);
    let own_twice =
        [own_twice.as_slice(), &[own.clone(), own].map(Request::RequestRange).map(operation)].concat();
    let txns = [
        ("a compare", TxnRequest { compare: vec![compare], ..TxnRequest::default() }),
        ("its own Put", TxnRequest { success: own_twice, ..TxnRequest::default() }),
        ("nested", nested),
    ];
    let mut client = KvClient::new(through.channel.clone());
    for (name, txn) in txns {
        let status = client.txn(through.request(txn)).await.expect_err(name);
        assert!(status.message().contains("more than 1048576 bytes"), "{name}: {status}");
    }
    let mut election = ElectionClient::new(through.channel.clone());
    let leader = LeaderRequest { name: "/a".into() };
    let status = election.leader(through.request(leader)).await.expect_err("a prefix that is no election's");
    assert!(status.message().contains("more than 1048576 bytes"), "{status}");
    let campaign = CampaignRequest { name: "/a".into(), lease: 7, ..CampaignRequest::default() };
    let status = election.campaign(through.request(campaign)).await.expect_err("refused");
    assert!(status.message().contains("more than 1048576 bytes"), "{status}");
    let lock = LockRequest { name: "/a".into(), lease: 7 };
    let status =
        LockClient::new(through.channel.clone()).lock(through.request(lock)).await.expect_err("refused");
    assert!(status.message().contains("more than 1048576 bytes"), "{status}");
}

#[tokio::test]
async fn what_is_refused_is_what_etcd_would_gather() {
    for version in versions() {
        let options = Options { members: 1, auth: Auth::On { extra_users: 0 }, ..Options::default() };
        let cluster = Cluster::start(&version, options).await;
        let direct = Caller::log_in(cluster.address(0), "alice").await;
        for number in 0..KEYS {
            direct.put(&format!("/a/{number:03}"), vec![7; VALUE], 0).await.expect("put");
        }
        let site = Site::new();
        let limits = "[policy.peer_limits]\nbytes_per_answer = '1MiB'\n";
        let config = site.in_front_of(&cluster) + limits;
        let keyward = Keyward::start(site, &config).await;
        wait::until(Duration::from_secs(20), "the members' Status of after the writes", async || {
            let in_use = keyward.metric("keyward_member_db_in_use_bytes", &[]).await;
            (in_use > 3e6).then_some(())
        })
        .await;
        let through = Caller::log_in(keyward.site().listen, "alice").await;
        let newest = range(&direct, RangeRequest { key: "/a/000".into(), ..RangeRequest::default() }).await;
        let revision = newest.expect("a range").header.expect("a header").revision;
        let (mut refused, mut same) = (0, 0);
        for request in requests(revision) {
            let whole = range(&direct, request.clone()).await.expect("a range at the member");
            let fits = gathered(&direct, &request).await <= LIMIT;
            match range(&through, request.clone()).await {
                Ok(answer) => {
                    assert!(fits, "{version} {request:?}");
                    assert_eq!((answer.kvs, answer.more), (whole.kvs, whole.more), "{version} {request:?}");
                    same += 1;
                }
                Err(status) => {
                    assert!(!fits, "{version} {request:?}: {status}");
                    assert_eq!(status.code(), Code::ResourceExhausted, "{status}");
                    assert!(status.message().contains("more than 1048576 bytes"), "{status}");
                    refused += 1;
                }
            }
        }
        println!("{version}: {same} the same, {refused} refused");
        assert!(same > 50 && refused > 50);
        gathered_without_an_answer(&through).await;
        let all = |prev_kv| DeleteRangeRequest { key: "/a/".into(), range_end: "/a0".into(), prev_kv };
        let mut client = KvClient::new(through.channel.clone());
        let status = client.delete_range(through.request(all(true))).await.expect_err("refused");
        assert_eq!(status.code(), Code::ResourceExhausted);
        let delete = RequestOp { request: Some(Request::RequestDeleteRange(all(true))) };
        let txn = TxnRequest { failure: vec![delete], ..TxnRequest::default() };
        let status = client.txn(through.request(txn)).await.expect_err("refused");
        assert_eq!(status.code(), Code::ResourceExhausted);
        assert_eq!(direct.keys("/a/").await.len(), KEYS, "nothing is deleted");
        let deleted = client.delete_range(through.request(all(false))).await.expect("deleted").into_inner();
        assert_eq!(deleted.deleted, i64::try_from(KEYS).expect("few"));
    }
}
