//! The queue key of a Lock or Campaign in etcd: position and removal. Pure.
//!
//! Owns: the requests for both, and decoding the answers. Must not know: members, calls, clocks.
//! Invariants (docs/decisions.md#d28): only the exact key `name/hex(lease)` is ever removed, and only as of a
//! revision with the key queued and not first, so never a key by which the lease held the lock before; a call
//! without a lease of the client's has no ticket, since only etcd knows the key.
//!
//! etcd: client/v3/concurrency/mutex.go and election.go. Locks and elections both queue under `name/`, by
//! create revision.

use bytes::{Bytes, BytesMut};
use prost::Message as _;

use keyward_etcd::pb::etcdserverpb::compare::{CompareResult, CompareTarget, TargetUnion};
use keyward_etcd::pb::etcdserverpb::range_request::{SortOrder, SortTarget};
use keyward_etcd::pb::etcdserverpb::request_op::Request;
use keyward_etcd::pb::etcdserverpb::response_op::Response;
use keyward_etcd::pb::etcdserverpb::{
    Compare, DeleteRangeRequest, RangeRequest, RequestOp, TxnRequest, TxnResponse,
};
use keyward_etcd::pb::v3electionpb::{CampaignRequest, CampaignResponse};
use keyward_etcd::pb::v3lockpb::LockRequest;
use keyward_etcd::rpc::method::Method;
use keyward_etcd::rpc::schema::MessageId;

/// A key in a lock queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LockQueueKey {
    key: Bytes,
    line: LockQueue,
}

/// The queue of all keys under a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LockQueue {
    begin: Bytes,
    end: Bytes,
}

/// The position of a key in the queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LockQueuePosition {
    /// Not in the queue: the key does not exist.
    Absent,
    /// Created at this revision, behind other keys; with the first of the queue's keys.
    Behind(i64, Bytes),
    /// Created at this revision, first in the queue: the key holds the lock.
    First(i64),
}

impl LockQueue {
    /// The queue under `name`.
    #[must_use]
    pub fn of(name: &[u8]) -> Self {
        let with = |last: u8| -> Bytes { [name, &[last]].concat().into() };
        // The first key after all keys with the prefix `name/`.
        Self { begin: with(b'/'), end: with(b'/' + 1) }
    }

    /// A Range reading the first key of the queue. Observe makes the same read and needs the same permission.
    #[must_use]
    pub fn first(&self) -> RangeRequest {
        RangeRequest {
            key: self.begin.clone(),
            range_end: self.end.clone(),
            limit: 1,
            sort_order: SortOrder::Ascend.into(),
            sort_target: SortTarget::Create.into(),
            keys_only: true,
            ..RangeRequest::default()
        }
    }
}

impl LockQueueKey {
    /// The ticket of a Lock or Campaign with this message; `None` if the message names no lease, or for
    /// another method.
    #[must_use]
    pub fn of(method: &Method, message: &[u8]) -> Option<Self> {
        let (name, lease) = Self::name_and_lease(method, message)?;
        let line = LockQueue::of(&name);
        // As Go prints `%x` of an int64.
        let sign = if lease < 0 { "-" } else { "" };
        let lease = (lease != 0).then(|| format!("{sign}{:x}", lease.unsigned_abs()))?;
        let mut key = BytesMut::from(&line.begin[..]);
        key.extend_from_slice(lease.as_bytes());
        Some(Self { key: key.freeze(), line })
    }

    /// The name and the lease of a Lock or Campaign with this message, 0 for no lease; `None` for another
    /// method.
    #[must_use]
    pub fn name_and_lease(method: &Method, message: &[u8]) -> Option<(Bytes, i64)> {
        match method.body {
            MessageId::LockRequest => {
                let request = LockRequest::decode(message).ok()?;
                Some((request.name, request.lease))
            }
            MessageId::CampaignRequest => {
                let request = CampaignRequest::decode(message).ok()?;
                Some((request.name, request.lease))
            }
            _ => None,
        }
    }

    /// The queue key.
    #[must_use]
    pub fn key(&self) -> &Bytes {
        &self.key
    }

    /// A read-only TxnRequest for the key's position.
    #[must_use]
    pub fn look(&self) -> Vec<u8> {
        reads([one(&self.key), self.line.first()])
    }

    /// As [`LockQueueKey::look`], valid as long as `first` is the first key. Serializable, and cheap however
    /// long the queue is.
    #[must_use]
    pub fn glance(&self, first: &Bytes) -> Vec<u8> {
        reads([one(&self.key), one(first)].map(|range| RangeRequest { serializable: true, ..range }))
    }

    /// Decodes the answer to [`LockQueueKey::look`]; `None` if malformed.
    #[must_use]
    pub fn place(answer: &Bytes) -> Option<LockQueuePosition> {
        let answer = TxnResponse::decode(answer.clone()).ok()?;
        let mut found = answer.responses.into_iter().map(|op| match op.response? {
            Response::ResponseRange(range) => Some(range.kvs.into_iter().next()),
            _ => None,
        });
        let (own, first) = (found.next()??, found.next()??);
        let Some(own) = own.map(|kv| kv.create_revision) else { return Some(LockQueuePosition::Absent) };
        Some(match first.filter(|first| first.create_revision < own) {
            Some(first) => LockQueuePosition::Behind(own, first.key),
            None => LockQueuePosition::First(own),
        })
    }

    /// A TxnRequest to remove the key if created at `since` or later.
    #[must_use]
    pub fn remove(&self, since: i64) -> Vec<u8> {
        let created = Compare {
            result: CompareResult::Greater.into(),
            target: CompareTarget::Create.into(),
            key: self.key.clone(),
            // A missing key has create revision 0.
            target_union: Some(TargetUnion::CreateRevision(since.max(1) - 1)),
            ..Compare::default()
        };
        let delete = DeleteRangeRequest { key: self.key.clone(), ..DeleteRangeRequest::default() };
        let delete = RequestOp { request: Some(Request::RequestDeleteRange(delete)) };
        TxnRequest { compare: vec![created], success: vec![delete], ..TxnRequest::default() }.encode_to_vec()
    }

    /// True if [`LockQueueKey::remove`] found and removed the key; `None` if the answer is malformed.
    #[must_use]
    pub fn removed(answer: &Bytes) -> Option<bool> {
        TxnResponse::decode(answer.clone()).ok().map(|answer| answer.succeeded)
    }

    /// True if a success of `method` with this message is true of a key at `place`: a Campaign does not check
    /// that its key still exists, nor does a Lock before 3.5.
    #[must_use]
    pub fn holds(method: &Method, message: &Bytes, place: &LockQueuePosition) -> bool {
        let LockQueuePosition::First(created) = *place else { return false };
        match method.body {
            MessageId::CampaignRequest => CampaignResponse::decode(message.clone())
                .is_ok_and(|answer| answer.leader.is_some_and(|leader| leader.rev == created)),
            _ => true,
        }
    }
}

fn one(key: &Bytes) -> RangeRequest {
    RangeRequest { key: key.clone(), keys_only: true, ..RangeRequest::default() }
}

fn reads(ranges: [RangeRequest; 2]) -> Vec<u8> {
    let read = |range| RequestOp { request: Some(Request::RequestRange(range)) };
    TxnRequest { success: ranges.map(read).into(), ..TxnRequest::default() }.encode_to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyward_etcd::pb::etcdserverpb::{RangeResponse, ResponseOp};
    use keyward_etcd::pb::mvccpb::KeyValue;
    use keyward_etcd::pb::v3electionpb::LeaderKey;
    use keyward_etcd::rpc::method::lookup;

    fn lock() -> &'static Method {
        lookup("/v3lockpb.Lock/Lock").unwrap()
    }

    fn campaign() -> &'static Method {
        lookup("/v3electionpb.Election/Campaign").unwrap()
    }

    fn ticket(lease: i64) -> Option<LockQueueKey> {
        let asked = LockRequest { name: "n".into(), lease }.encode_to_vec();
        LockQueueKey::of(lock(), &asked)
    }

    #[test]
    fn the_key_is_etcds() {
        assert_eq!(ticket(0x333e_a1fd_d12f_6006).unwrap().key(), &"n/333ea1fdd12f6006");
        assert_eq!(ticket(-31).unwrap().key(), &"n/-1f");
        assert_eq!(ticket(i64::MIN).unwrap().key(), &"n/-8000000000000000");
        assert_eq!(ticket(0), None, "only etcd knows that lease");
        let asked = CampaignRequest { name: "n".into(), lease: 31, value: "v".into() }.encode_to_vec();
        assert_eq!(
            LockQueueKey::of(campaign(), &asked).unwrap().key(),
            &"n/1f",
            "elections and locks share their keys"
        );
        assert_eq!(LockQueueKey::of(lookup("/v3lockpb.Lock/Unlock").unwrap(), &asked), None);
        assert_eq!(LockQueueKey::of(lock(), &Bytes::from_static(b"\xff")), None);
    }

    #[test]
    fn a_look_reads_its_own_key_and_who_is_first_and_no_values() {
        let txn = TxnRequest::decode(&ticket(31).unwrap().look()[..]).unwrap();
        assert!(txn.compare.is_empty() && txn.failure.is_empty());
        let ranges: Vec<_> = txn
            .success
            .into_iter()
            .map(|op| match op.request.unwrap() {
                Request::RequestRange(range) => range,
                other => panic!("{other:?}"),
            })
            .collect();
        let [own, first] = &ranges[..] else { panic!("two") };
        assert_eq!((&own.key[..], &own.range_end[..]), (&b"n/1f"[..], &b""[..]));
        assert_eq!((&first.key[..], &first.range_end[..], first.limit), (&b"n/"[..], &b"n0"[..], 1));
        assert_eq!((first.sort_order(), first.sort_target()), (SortOrder::Ascend, SortTarget::Create));
        assert!(ranges.iter().all(|range| range.keys_only && !range.serializable));
    }

    #[test]
    fn a_glance_reads_two_keys_from_what_a_member_has() {
        let txn = TxnRequest::decode(&ticket(31).unwrap().glance(&"n/3".into())[..]).unwrap();
        let range = |op: &RequestOp| match &op.request {
            Some(Request::RequestRange(range)) => range.clone(),
            other => panic!("{other:?}"),
        };
        let ranges: Vec<_> = txn.success.iter().map(range).collect();
        assert!(
            ranges.iter().all(|range| range.serializable && range.keys_only && range.range_end.is_empty())
        );
        assert_eq!(ranges.iter().map(|range| &range.key[..]).collect::<Vec<_>>(), [&b"n/1f"[..], b"n/3"]);
    }

    fn looked(own: Option<i64>, first: Option<i64>) -> Option<LockQueuePosition> {
        let ranged = |created: Option<i64>| {
            let key = Bytes::from_static(b"n/3");
            let kvs = created.map(|create_revision| KeyValue { key, create_revision, ..KeyValue::default() });
            let range = RangeResponse { kvs: kvs.into_iter().collect(), ..RangeResponse::default() };
            ResponseOp { response: Some(Response::ResponseRange(range)) }
        };
        let answer = TxnResponse { responses: vec![ranged(own), ranged(first)], ..TxnResponse::default() };
        LockQueueKey::place(&answer.encode_to_vec().into())
    }

    #[test]
    fn the_place_is_by_create_revision() {
        assert_eq!(looked(None, None), Some(LockQueuePosition::Absent));
        assert_eq!(looked(None, Some(3)), Some(LockQueuePosition::Absent));
        assert_eq!(looked(Some(5), Some(3)), Some(LockQueuePosition::Behind(5, "n/3".into())));
        assert_eq!(looked(Some(5), Some(5)), Some(LockQueuePosition::First(5)));
        assert_eq!(LockQueueKey::place(&Bytes::new()), None);
        assert_eq!(LockQueueKey::place(&Bytes::from_static(b"\xff")), None);
    }

    #[test]
    fn only_the_ticket_itself_is_removed_and_only_as_of_its_revision() {
        let txn = TxnRequest::decode(&ticket(31).unwrap().remove(7)[..]).unwrap();
        let [compare] = &txn.compare[..] else { panic!("one condition") };
        assert_eq!((&compare.key[..], &compare.range_end[..]), (&b"n/1f"[..], &b""[..]));
        assert_eq!((compare.result(), compare.target()), (CompareResult::Greater, CompareTarget::Create));
        assert_eq!(compare.target_union, Some(TargetUnion::CreateRevision(6)));
        let [RequestOp { request: Some(Request::RequestDeleteRange(delete)) }] = &txn.success[..] else {
            panic!("one delete")
        };
        assert_eq!((&delete.key[..], &delete.range_end[..]), (&b"n/1f"[..], &b""[..]));
        assert!(txn.failure.is_empty());
    }

    #[test]
    fn a_success_is_true_only_of_who_is_first() {
        let won = |rev| {
            let leader = LeaderKey { rev, ..LeaderKey::default() };
            Bytes::from(CampaignResponse { header: None, leader: Some(leader) }.encode_to_vec())
        };
        assert!(LockQueueKey::holds(campaign(), &won(5), &LockQueuePosition::First(5)));
        assert!(
            !LockQueueKey::holds(campaign(), &won(5), &LockQueuePosition::First(6)),
            "that is another candidacy of the lease"
        );
        for place in [LockQueuePosition::Absent, LockQueuePosition::Behind(5, Bytes::new())] {
            assert!(!LockQueueKey::holds(campaign(), &won(5), &place));
            assert!(!LockQueueKey::holds(lock(), &Bytes::new(), &place));
        }
        assert!(LockQueueKey::holds(lock(), &Bytes::new(), &LockQueuePosition::First(5)));
    }
}
