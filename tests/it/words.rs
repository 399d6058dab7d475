//! Messages as clients and members write them.

use bytes::Bytes;
use keyward::pb::etcdserverpb::watch_request::RequestUnion;
use keyward::pb::etcdserverpb::{
    LeaseKeepAliveRequest, LeaseKeepAliveResponse, PutRequest, PutResponse, RangeRequest, RangeResponse,
    ResponseHeader, TxnResponse, WatchCancelRequest, WatchCreateRequest, WatchRequest, WatchResponse,
};
use keyward::pb::mvccpb::{Event, KeyValue};
use prost::Message as _;

pub(crate) const RANGE: &str = "/etcdserverpb.KV/Range";
pub(crate) const PUT: &str = "/etcdserverpb.KV/Put";
pub(crate) const TXN: &str = "/etcdserverpb.KV/Txn";
pub(crate) const WATCH: &str = "/etcdserverpb.Watch/Watch";
pub(crate) const KEEP_ALIVE: &str = "/etcdserverpb.Lease/LeaseKeepAlive";

pub(crate) const INVALID_TOKEN: &str = "etcdserver: invalid auth token";
pub(crate) const LOST: &str = "etcdserver: request timed out, possibly due to connection lost";

pub(crate) fn header(revision: i64) -> ResponseHeader {
    ResponseHeader { cluster_id: 0xc1, member_id: 1, revision, raft_term: 2 }
}

pub(crate) fn range(key: &str) -> Vec<u8> {
    RangeRequest { key: key.to_owned().into(), ..RangeRequest::default() }.encode_to_vec()
}

pub(crate) fn ranged(revision: i64) -> Vec<u8> {
    RangeResponse { header: Some(header(revision)), ..RangeResponse::default() }.encode_to_vec()
}

/// A Range's answer with a value of `size` bytes.
pub(crate) fn ranged_value(size: usize) -> Vec<u8> {
    ranged_value_of("k", size)
}

pub(crate) fn ranged_value_of(key: &str, size: usize) -> Vec<u8> {
    let kv = KeyValue { key: key.to_owned().into(), value: vec![7; size].into(), ..KeyValue::default() };
    RangeResponse { header: Some(header(5)), kvs: vec![kv], ..RangeResponse::default() }.encode_to_vec()
}

pub(crate) fn put(value: usize) -> Vec<u8> {
    PutRequest { key: "k".into(), value: vec![7; value].into(), ..PutRequest::default() }.encode_to_vec()
}

pub(crate) fn was_put(revision: i64) -> Vec<u8> {
    PutResponse { header: Some(header(revision)), prev_kv: None }.encode_to_vec()
}

/// The answer to the empty Txn by which a revision is read.
pub(crate) fn txn_done(revision: i64) -> Vec<u8> {
    TxnResponse { header: Some(header(revision)), ..TxnResponse::default() }.encode_to_vec()
}

/// A create of a watch on `key` from `start` on.
pub(crate) fn watch(key: &str, start: i64) -> Vec<u8> {
    let create = WatchCreateRequest {
        key: key.to_owned().into(),
        start_revision: start,
        ..WatchCreateRequest::default()
    };
    WatchRequest { request_union: Some(RequestUnion::CreateRequest(create)) }.encode_to_vec()
}

pub(crate) fn cancel_watch(watch_id: i64) -> Vec<u8> {
    let cancel = WatchCancelRequest { watch_id };
    WatchRequest { request_union: Some(RequestUnion::CancelRequest(cancel)) }.encode_to_vec()
}

/// The create in a request, if it is one.
pub(crate) fn create_of(message: &Bytes) -> Option<WatchCreateRequest> {
    match WatchRequest::decode(message.clone()).expect("a WatchRequest").request_union {
        Some(RequestUnion::CreateRequest(create)) => Some(create),
        _ => None,
    }
}

pub(crate) fn created(watch_id: i64, revision: i64) -> Vec<u8> {
    WatchResponse { header: Some(header(revision)), watch_id, created: true, ..WatchResponse::default() }
        .encode_to_vec()
}

/// A refusal of a create.
pub(crate) fn refused(reason: &str) -> Vec<u8> {
    let cancel_reason = reason.to_owned();
    WatchResponse {
        header: Some(header(9)),
        watch_id: -1,
        created: true,
        canceled: true,
        cancel_reason,
        ..WatchResponse::default()
    }
    .encode_to_vec()
}

/// A put of `size` bytes at `revision`.
pub(crate) fn event(watch_id: i64, revision: i64, size: usize) -> Vec<u8> {
    let kv = KeyValue {
        key: "k".into(),
        value: vec![7; size].into(),
        mod_revision: revision,
        create_revision: 1,
        version: revision,
        lease: 0,
    };
    let event = Event { kv: Some(kv), ..Event::default() };
    WatchResponse {
        header: Some(header(revision)),
        watch_id,
        events: vec![event],
        ..WatchResponse::default()
    }
    .encode_to_vec()
}

pub(crate) fn watched(message: &Bytes) -> WatchResponse {
    WatchResponse::decode(message.clone()).expect("a WatchResponse")
}

/// The revisions of the events in a response.
pub(crate) fn revisions(response: &WatchResponse) -> Vec<i64> {
    response.events.iter().filter_map(|event| event.kv.as_ref()).map(|kv| kv.mod_revision).collect()
}

pub(crate) fn renew(id: i64) -> Vec<u8> {
    LeaseKeepAliveRequest { id }.encode_to_vec()
}

pub(crate) fn renewal_of(message: &Bytes) -> i64 {
    LeaseKeepAliveRequest::decode(message.clone()).expect("a renewal").id
}

pub(crate) fn renewed(id: i64, ttl: i64) -> Vec<u8> {
    LeaseKeepAliveResponse { header: Some(header(7)), id, ttl }.encode_to_vec()
}

/// Lease and TTL.
pub(crate) fn renewal(message: &Bytes) -> (i64, i64) {
    let renewed = LeaseKeepAliveResponse::decode(message.clone()).expect("a renewal");
    (renewed.id, renewed.ttl)
}
