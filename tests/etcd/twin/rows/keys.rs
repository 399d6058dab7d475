//! KV and Watch.

use keyward::pb::etcdserverpb::{
    CompactionRequest, Compare, DeleteRangeRequest, PutRequest, RangeRequest, RequestOp, TxnRequest,
    WatchCancelRequest, WatchCreateRequest, WatchProgressRequest, WatchRequest,
    compare::{CompareResult, CompareTarget, TargetUnion},
    request_op::Request,
    watch_request::RequestUnion,
};
use prost::Message;

use super::{Row, one, row, stream};
use crate::twin::side::Who;

const RANGE: &str = "/etcdserverpb.KV/Range";
const RANGE_STREAM: &str = "/etcdserverpb.KV/RangeStream";
const PUT: &str = "/etcdserverpb.KV/Put";
const DELETE: &str = "/etcdserverpb.KV/DeleteRange";
const TXN: &str = "/etcdserverpb.KV/Txn";
const COMPACT: &str = "/etcdserverpb.KV/Compact";
const WATCH: &str = "/etcdserverpb.Watch/Watch";

/// What the other rows find: alice's role covers `/a/`, not `/b/`.
pub(super) fn before() -> Vec<Row> {
    vec![
        row(PUT, "first", |_, _| one(&put("/a/k", "one"))).only(&[Who::Root]),
        row(PUT, "again", |_, _| one(&put("/a/k", "two"))).only(&[Who::Root]),
        row(PUT, "another", |_, _| one(&put("/a/m", "one"))).only(&[Who::Root]),
        row(PUT, "elsewhere", |_, _| one(&put("/b/k", "one"))).only(&[Who::Root]),
    ]
}

pub(super) fn kv() -> Vec<Row> {
    vec![
        row(RANGE, "a key", |_, _| one(&range("/a/k", ""))),
        row(RANGE, "a key outside the role", |_, _| one(&range("/b/k", ""))),
        row(RANGE, "a key that is not there", |_, _| one(&range("/a/none", ""))),
        row(RANGE, "a prefix, limited", |_, _| one(&RangeRequest { limit: 1, ..range("/a/", "/a0") })),
        row(RANGE, "everything", |_, _| one(&range("\0", "\0"))),
        row(RANGE, "the number of keys", |_, _| {
            one(&RangeRequest { count_only: true, ..range("/a/", "/a0") })
        }),
        row(RANGE, "sorted, keys only", |_, _| {
            one(&RangeRequest { sort_order: 2, sort_target: 3, keys_only: true, ..range("/a/", "/a0") })
        }),
        row(RANGE, "serializable", |_, _| one(&RangeRequest { serializable: true, ..range("/a/k", "") })),
        row(RANGE, "an older revision", |_, _| one(&RangeRequest { revision: 2, ..range("/a/k", "") })),
        row(RANGE, "a future revision", |_, _| one(&RangeRequest { revision: 99_999, ..range("/a/k", "") })),
        row(RANGE, "no key", |_, _| one(&range("", ""))),
        row(RANGE, "an unknown sort order", |_, _| one(&RangeRequest { sort_order: 9, ..range("/a/k", "") })),
        row(RANGE, "a field that nobody knows", |_, _| {
            vec![[range("/a/k", "").encode_to_vec(), b"\xba\x3e\x01x".to_vec()].concat()]
        }),
        row(RANGE_STREAM, "a prefix", |_, _| one(&range("/a/", "/a0"))),
        row(PUT, "a key", |_, who| {
            one(&PutRequest { prev_kv: true, ..put(&format!("/a/p/{}", who.name()), "x") })
        }),
        row(PUT, "a key outside the role", |_, who| one(&put(&format!("/b/p/{}", who.name()), "x"))),
        row(PUT, "no key", |_, _| one(&put("", "x"))),
        row(PUT, "with a lease", |_, who| {
            one(&PutRequest { lease: who.lease(), ..put(&format!("/a/leased/{}", who.name()), "x") })
        }),
        row(PUT, "with an unknown lease", |_, _| one(&PutRequest { lease: 4, ..put("/a/leased/no", "x") })),
        row(PUT, "keeping a value that is not there", |_, _| {
            one(&PutRequest { ignore_value: true, ..put("/a/none", "") })
        }),
        row(PUT, "keeping a value and giving one", |_, _| {
            one(&PutRequest { ignore_value: true, ..put("/a/k", "x") })
        }),
        row(PUT, "larger than etcd takes", |_, _| one(&put("/a/large", &"x".repeat(1_700_000)))),
        row(TXN, "compare, then write and read", |_, who| one(&txn(&format!("/a/t/{}", who.name())))),
        row(TXN, "outside the role", |_, who| one(&txn(&format!("/b/t/{}", who.name())))),
        row(TXN, "empty", |_, _| one(&TxnRequest::default())),
        row(TXN, "one key twice", |_, _| {
            let twice =
                [op(Request::RequestPut(put("/a/d", "1"))), op(Request::RequestPut(put("/a/d", "2")))];
            one(&TxnRequest { success: twice.into(), ..TxnRequest::default() })
        }),
        row(TXN, "too many operations", |_, _| {
            let many = (0..129).map(|n| op(Request::RequestPut(put(&format!("/a/o/{n}"), "1"))));
            one(&TxnRequest { success: many.collect(), ..TxnRequest::default() })
        }),
        row(TXN, "a Txn within", |_, who| {
            let inner = txn(&format!("/a/n/{}", who.name()));
            one(&TxnRequest { success: vec![op(Request::RequestTxn(inner))], ..TxnRequest::default() })
        })
        // Old members let everybody write so, and Keyward does not: the revisions would differ from here on. See `advisories.rs`.
        .only(&[Who::Alice, Who::Root]),
        row(DELETE, "a key", |_, who| {
            one(&DeleteRangeRequest { prev_kv: true, ..delete(&format!("/a/p/{}", who.name())) })
        }),
        row(DELETE, "a key outside the role", |_, _| one(&delete("/b/p/root"))),
        row(DELETE, "no key", |_, _| one(&delete(""))),
        row("/etcdserverpb.KV/Nope", "an unknown method", |_, _| one(&range("/a/k", ""))),
        row("/etcdserverpb.Nope/Range", "an unknown service", |_, _| one(&range("/a/k", ""))),
    ]
}

pub(super) fn watch() -> Vec<Row> {
    vec![
        stream(WATCH, "from now", 1, |_, _| vec![create(&watched("/a/k"))]),
        stream(WATCH, "a key outside the role", 1, |_, _| vec![create(&watched("/b/k"))]),
        stream(WATCH, "a prefix", 1, |_, _| {
            vec![create(&WatchCreateRequest { range_end: "/a0".into(), ..watched("/a/") })]
        }),
        stream(WATCH, "history", 2, |_, _| {
            vec![create(&WatchCreateRequest { start_revision: 2, prev_kv: true, ..watched("/a/k") })]
        }),
        stream(WATCH, "from the future", 1, |_, _| {
            vec![create(&WatchCreateRequest { start_revision: 99_999, ..watched("/a/k") })]
        }),
        stream(WATCH, "from a negative revision", 1, |_, _| {
            vec![create(&WatchCreateRequest { start_revision: -1, ..watched("/a/k") })]
        }),
        stream(WATCH, "an id of the client's", 1, |_, _| {
            vec![create(&WatchCreateRequest { watch_id: 77, ..watched("/a/k") })]
        }),
        stream(WATCH, "an id twice", 2, |_, _| {
            vec![create(&WatchCreateRequest { watch_id: 77, ..watched("/a/k") }); 2]
        }),
        stream(WATCH, "two, then cancel one", 3, |_, _| {
            let cancel = RequestUnion::CancelRequest(WatchCancelRequest { watch_id: 1 });
            vec![create(&watched("/a/k")), create(&watched("/a/m")), union(cancel)]
        }),
        stream(WATCH, "cancel an unknown one", 1, |_, _| {
            let cancel = RequestUnion::CancelRequest(WatchCancelRequest { watch_id: 9 });
            vec![create(&watched("/a/k")), union(cancel)]
        }),
        stream(WATCH, "ask for progress", 1, |_, _| {
            vec![create(&watched("/a/k")), union(RequestUnion::ProgressRequest(WatchProgressRequest {}))]
        }),
        stream(WATCH, "a request that says nothing", 0, |_, _| vec![Vec::new()]).only(&[Who::Alice]),
    ]
}

/// Rows that need a compaction: it can be made once.
pub(super) fn compacted() -> Vec<Row> {
    vec![
        row(COMPACT, "the future", |_, _| one(&CompactionRequest { revision: 99_999, physical: false })),
        row(COMPACT, "the past", |_, _| one(&CompactionRequest { revision: 3, physical: true })),
        row(COMPACT, "what was compacted", |_, _| one(&CompactionRequest { revision: 2, physical: false })),
        row(RANGE, "a compacted revision", |_, _| one(&RangeRequest { revision: 2, ..range("/a/k", "") })),
        stream(WATCH, "from a compacted revision", 2, |_, _| {
            vec![create(&WatchCreateRequest { start_revision: 2, ..watched("/a/k") })]
        })
        .only(&[Who::Alice, Who::Root]),
    ]
}

fn range(key: &str, end: &str) -> RangeRequest {
    RangeRequest { key: key.to_owned().into(), range_end: end.to_owned().into(), ..RangeRequest::default() }
}

fn put(key: &str, value: &str) -> PutRequest {
    PutRequest { key: key.to_owned().into(), value: value.to_owned().into(), ..PutRequest::default() }
}

fn delete(key: &str) -> DeleteRangeRequest {
    DeleteRangeRequest { key: key.to_owned().into(), ..DeleteRangeRequest::default() }
}

fn op(request: Request) -> RequestOp {
    RequestOp { request: Some(request) }
}

/// Where the key is not there: write it, read it, and read its neighbour.
fn txn(key: &str) -> TxnRequest {
    let not_there = Compare {
        result: CompareResult::Equal.into(),
        target: CompareTarget::Create.into(),
        key: key.to_owned().into(),
        target_union: Some(TargetUnion::CreateRevision(0)),
        ..Compare::default()
    };
    let write = op(Request::RequestPut(put(key, "x")));
    let read = op(Request::RequestRange(range(key, "")));
    let neighbour = op(Request::RequestRange(range("/a/k", "")));
    TxnRequest { compare: vec![not_there], success: vec![write, read], failure: vec![neighbour] }
}

fn watched(key: &str) -> WatchCreateRequest {
    WatchCreateRequest { key: key.to_owned().into(), ..WatchCreateRequest::default() }
}

fn create(request: &WatchCreateRequest) -> Vec<u8> {
    union(RequestUnion::CreateRequest(request.clone()))
}

fn union(request: RequestUnion) -> Vec<u8> {
    WatchRequest { request_union: Some(request) }.encode_to_vec()
}
