//! Requests as clients write them, of every method, with the keys and ends at which readers go wrong.

use bytes::Bytes;
use keyward::pb::{etcdserverpb as pb, v3electionpb as election, v3lockpb as lock};
use keyward::rpc::method::{METHODS, Method, lookup};
use keyward::rpc::schema::MessageId;
use pb::request_op::Request as Op;
use pb::watch_request::RequestUnion;
use prost::Message as _;

use crate::bodies::{self, Style};
use crate::choices::Choices;

/// The depth of Txns in one another.
const DEPTH: u32 = 3;

/// Methods whose touches depend on the body: most requests are of these.
const WITH_KEYS: [&str; 16] = [
    "/etcdserverpb.KV/Range",
    "/etcdserverpb.KV/RangeStream",
    "/etcdserverpb.KV/Put",
    "/etcdserverpb.KV/DeleteRange",
    "/etcdserverpb.KV/Txn",
    "/etcdserverpb.KV/Txn",
    "/etcdserverpb.KV/Txn",
    "/etcdserverpb.Watch/Watch",
    "/etcdserverpb.Lease/LeaseKeepAlive",
    "/etcdserverpb.Lease/LeaseTimeToLive",
    "/v3lockpb.Lock/Lock",
    "/v3lockpb.Lock/Unlock",
    "/v3electionpb.Election/Campaign",
    "/v3electionpb.Election/Proclaim",
    "/v3electionpb.Election/Observe",
    "/v3electionpb.Election/Resign",
];

/// Any method that etcd serves.
pub(crate) fn method(choices: &mut Choices<'_>) -> &'static Method {
    if choices.one_in(4) {
        let served = METHODS.iter().filter(|method| method.service != "grpc.health.v1.Health");
        let served: Vec<_> = served.collect();
        return served[choices.below(served.len())];
    }
    lookup(WITH_KEYS[choices.below(WITH_KEYS.len())]).expect("a row")
}

/// A request as prost writes it.
pub(crate) fn structured(choices: &mut Choices<'_>, method: &Method) -> Vec<u8> {
    match method.body {
        MessageId::RangeRequest => range(choices).encode_to_vec(),
        MessageId::PutRequest => put(choices).encode_to_vec(),
        MessageId::DeleteRangeRequest => delete(choices).encode_to_vec(),
        MessageId::TxnRequest => txn(choices, DEPTH).encode_to_vec(),
        MessageId::WatchRequest => watch(choices).encode_to_vec(),
        MessageId::LeaseTimeToLiveRequest => {
            pb::LeaseTimeToLiveRequest { id: lease(choices), keys: choices.flag() }.encode_to_vec()
        }
        MessageId::LeaseRevokeRequest | MessageId::LeaseKeepAliveRequest => {
            pb::LeaseRevokeRequest { id: lease(choices) }.encode_to_vec()
        }
        MessageId::LockRequest => {
            lock::LockRequest { name: key(choices), lease: lease(choices) }.encode_to_vec()
        }
        MessageId::UnlockRequest => lock::UnlockRequest { key: key(choices) }.encode_to_vec(),
        MessageId::CampaignRequest => {
            let (name, lease, value) = (key(choices), lease(choices), key(choices));
            election::CampaignRequest { name, lease, value }.encode_to_vec()
        }
        MessageId::LeaderRequest => election::LeaderRequest { name: key(choices) }.encode_to_vec(),
        MessageId::ProclaimRequest => {
            election::ProclaimRequest { leader: leader(choices), value: key(choices) }.encode_to_vec()
        }
        MessageId::ResignRequest => election::ResignRequest { leader: leader(choices) }.encode_to_vec(),
        schema => bodies::body(choices, schema, Style::Canonical, DEPTH),
    }
}

/// A key, or the name of a queue, mostly of few bytes from few values, so that keys are near one another.
fn key(choices: &mut Choices<'_>) -> Bytes {
    const BYTES: [u8; 8] = [0, 1, b'/', b'a', b'b', b'c', 0xfe, 0xff];
    match choices.below(10) {
        0 => Bytes::new(),
        1 => Bytes::from_static(b"\0"),
        2 => Bytes::from(vec![0xff; 1 + choices.below(3)]),
        3 => Bytes::copy_from_slice(choices.bytes(8)),
        _ => (0..=choices.below(4)).map(|_| BYTES[choices.below(BYTES.len())]).collect(),
    }
}

/// The end of a range that begins at `key`: most of what an end may mean, and what it may not.
fn end(choices: &mut Choices<'_>, start: &Bytes) -> Bytes {
    match choices.below(10) {
        0..3 => Bytes::new(),
        3 => Bytes::from_static(b"\0"),
        4 => start.clone(),
        5 => [start, &b"\0"[..]].concat().into(),
        6 => start.slice(..start.len().saturating_sub(1)),
        7 => Bytes::from_static(b"\0\0"),
        8 => {
            let mut next = start.to_vec();
            if let Some(last) = next.last_mut() {
                *last = last.wrapping_add(1);
            }
            next.into()
        }
        _ => key(choices),
    }
}

fn lease(choices: &mut Choices<'_>) -> i64 {
    if choices.flag() { i64::from(choices.byte() % 3) } else { choices.number().cast_signed() }
}

fn range(choices: &mut Choices<'_>) -> pb::RangeRequest {
    let key = key(choices);
    pb::RangeRequest {
        range_end: end(choices, &key),
        key,
        limit: choices.number().cast_signed(),
        serializable: choices.flag(),
        keys_only: choices.flag(),
        ..Default::default()
    }
}

fn put(choices: &mut Choices<'_>) -> pb::PutRequest {
    pb::PutRequest {
        key: key(choices),
        value: key(choices),
        lease: lease(choices),
        prev_kv: choices.flag(),
        ignore_value: choices.one_in(4),
        ignore_lease: choices.one_in(4),
    }
}

fn delete(choices: &mut Choices<'_>) -> pb::DeleteRangeRequest {
    let key = key(choices);
    pb::DeleteRangeRequest { range_end: end(choices, &key), key, prev_kv: choices.flag() }
}

fn txn(choices: &mut Choices<'_>, depth: u32) -> pb::TxnRequest {
    let compare = (0..choices.below(3)).map(|_| {
        let key = key(choices);
        pb::Compare { range_end: end(choices, &key), key, ..Default::default() }
    });
    let compare = compare.collect();
    // A Txn of ranges alone takes another way through etcd.
    let reads_only = choices.one_in(3);
    let mut branch = || (0..choices.below(4)).map(|_| op(choices, depth, reads_only)).collect();
    pb::TxnRequest { compare, success: branch(), failure: branch() }
}

fn op(choices: &mut Choices<'_>, depth: u32, reads_only: bool) -> pb::RequestOp {
    let request = match choices.below(8) {
        _ if reads_only => Some(Op::RequestRange(range(choices))),
        0 => None,
        1 | 2 => Some(Op::RequestPut(put(choices))),
        3 | 4 => Some(Op::RequestDeleteRange(delete(choices))),
        5 | 6 if depth > 1 => Some(Op::RequestTxn(txn(choices, depth - 1))),
        _ => Some(Op::RequestRange(range(choices))),
    };
    pb::RequestOp { request }
}

fn watch(choices: &mut Choices<'_>) -> pb::WatchRequest {
    let request_union = match choices.below(8) {
        0 => None,
        1 => Some(RequestUnion::CancelRequest(pb::WatchCancelRequest { watch_id: lease(choices) })),
        2 => Some(RequestUnion::ProgressRequest(pb::WatchProgressRequest {})),
        _ => {
            let key = key(choices);
            Some(RequestUnion::CreateRequest(pb::WatchCreateRequest {
                range_end: end(choices, &key),
                key,
                start_revision: choices.number().cast_signed(),
                prev_kv: choices.flag(),
                fragment: choices.flag(),
                ..Default::default()
            }))
        }
    };
    pb::WatchRequest { request_union }
}

fn leader(choices: &mut Choices<'_>) -> Option<election::LeaderKey> {
    let present = !choices.one_in(6);
    present.then(|| election::LeaderKey {
        name: key(choices),
        key: key(choices),
        rev: choices.number().cast_signed(),
        lease: lease(choices),
    })
}
