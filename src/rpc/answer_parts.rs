//! The parts of a request whose answers carry values, to bound the size of the answer before it is asked for.
//!
//! Owns: which operations of a Range, a DeleteRange, a Put and a Txn return key-value pairs, of which keys,
//! and the largest sum over the branches of a Txn. Must not know: the sizes, who is limited.
//! Invariant: the sum is never below what etcd gathers for the answer, whichever branch of a Txn it takes.
//!
//! etcd gathers as follows in all versions (`mvcc/kvstore_txn.go`, `etcdserver/apply*.go`): a Range of a
//! count only reads no values; one of keys only reads the values, and leaves them out of the answer; with a
//! sort order, or with a bound on revisions, all pairs of the range are read, whatever its limit.

use std::collections::HashMap;

use bytes::Bytes;
use prost::Message as _;

use crate::pb::etcdserverpb::request_op::Request;
use crate::pb::etcdserverpb::{DeleteRangeRequest, PutRequest, RangeRequest, RequestOp, TxnRequest};
use crate::rpc::schema::MessageId;

/// A range whose key-value pairs etcd gathers for an answer.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct AnswerPart {
    /// The first key.
    pub key: Bytes,
    /// The end as in a RangeRequest; empty for one key.
    pub range_end: Bytes,
    /// The revision; 0 for the newest.
    pub revision: i64,
    /// The most pairs, in the order of keys; `None` for all.
    pub most_keys: Option<u64>,
    /// True if the client takes the answer of a member without its leader.
    pub serializable: bool,
}

/// The parts of one request.
#[derive(Debug)]
pub enum AnswerParts {
    /// A part by itself.
    Part(AnswerPart),
    /// All of them.
    All(Vec<AnswerParts>),
    /// One or the other, whichever is larger.
    Either(Box<[AnswerParts; 2]>),
}

impl AnswerPart {
    fn of_range(range: RangeRequest) -> Option<Self> {
        if range.count_only {
            return None;
        }
        let bounds = [
            range.min_mod_revision,
            range.max_mod_revision,
            range.min_create_revision,
            range.max_create_revision,
        ];
        let is_picked = range.sort_order != 0 || bounds.iter().any(|bound| *bound != 0);
        let limit = u64::try_from(range.limit).ok().filter(|limit| *limit > 0 && !is_picked);
        Some(Self {
            most_keys: if range.range_end.is_empty() { Some(1) } else { limit },
            key: range.key,
            range_end: range.range_end,
            revision: range.revision,
            serializable: range.serializable,
        })
    }

    fn of_deletion(deletion: DeleteRangeRequest) -> Option<Self> {
        let DeleteRangeRequest { key, range_end, prev_kv } = deletion;
        let most_keys = range_end.is_empty().then_some(1);
        prev_kv.then_some(Self { key, range_end, revision: 0, most_keys, serializable: false })
    }
}

impl AnswerParts {
    /// The parts of a message checked before; `None` if its answer carries no values, and for one that is no
    /// request of keys.
    #[must_use]
    pub fn of(body: MessageId, message: &[u8]) -> Option<Self> {
        let part = match body {
            MessageId::RangeRequest => AnswerPart::of_range(RangeRequest::decode(message).ok()?)?,
            MessageId::DeleteRangeRequest => {
                AnswerPart::of_deletion(DeleteRangeRequest::decode(message).ok()?)?
            }
            MessageId::PutRequest => of_put(PutRequest::decode(message).ok()?)?,
            MessageId::TxnRequest => {
                let parts = Self::of_txn(TxnRequest::decode(message).ok()?);
                return (!parts.is_empty()).then_some(parts);
            }
            _ => return None,
        };
        Some(Self::Part(part))
    }

    fn of_txn(txn: TxnRequest) -> Self {
        let [success, failure] = [txn.success, txn.failure].map(Self::of_branch);
        match (success.is_empty(), failure.is_empty()) {
            (_, true) => success,
            (true, false) => failure,
            (false, false) => Self::Either(Box::new([success, failure])),
        }
    }

    /// Canonical Txns are nested to a bounded depth.
    fn of_branch(operations: Vec<RequestOp>) -> Self {
        let parts = operations.into_iter().filter_map(|operation| {
            let part = match operation.request? {
                Request::RequestRange(range) => AnswerPart::of_range(range)?,
                Request::RequestDeleteRange(deletion) => AnswerPart::of_deletion(deletion)?,
                Request::RequestPut(put) => of_put(put)?,
                Request::RequestTxn(nested) => return Some(Self::of_txn(nested)),
            };
            Some(Self::Part(part))
        });
        Self::All(parts.filter(|parts| !parts.is_empty()).collect())
    }

    fn is_empty(&self) -> bool {
        matches!(self, Self::All(parts) if parts.is_empty())
    }

    /// The largest sum of sizes, each given by `size_of`.
    pub fn largest(&self, size_of: &impl Fn(&AnswerPart) -> u64) -> u64 {
        match self {
            Self::Part(part) => size_of(part),
            Self::All(parts) => parts.iter().fold(0, |sum, part| part.largest(size_of).saturating_add(sum)),
            Self::Either(branches) => {
                let [one, other] = &**branches;
                one.largest(size_of).max(other.largest(size_of))
            }
        }
    }

    /// Each different part, with the size 0.
    #[must_use]
    pub fn distinct(&self) -> HashMap<AnswerPart, u64> {
        let mut found = HashMap::new();
        self.collect(&mut found);
        found
    }

    fn collect(&self, found: &mut HashMap<AnswerPart, u64>) {
        match self {
            Self::Part(part) => drop(found.insert(part.clone(), 0)),
            Self::All(parts) => parts.iter().for_each(|part| part.collect(found)),
            Self::Either(branches) => branches.iter().for_each(|branch| branch.collect(found)),
        }
    }
}

fn of_put(PutRequest { key, prev_kv, .. }: PutRequest) -> Option<AnswerPart> {
    let previous =
        AnswerPart { key, range_end: Bytes::new(), revision: 0, most_keys: Some(1), serializable: false };
    prev_kv.then_some(previous)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn operation(request: Request) -> RequestOp {
        RequestOp { request: Some(request) }
    }

    fn range(key: &'static str, limit: i64) -> RangeRequest {
        RangeRequest { key: key.into(), range_end: "z".into(), limit, ..RangeRequest::default() }
    }

    /// The largest answer, with a part of `n` keys being `n` bytes, and one of all keys 1000.
    fn largest(body: MessageId, message: &[u8]) -> Option<u64> {
        AnswerParts::of(body, message).map(|parts| parts.largest(&|part| part.most_keys.unwrap_or(1000)))
    }

    fn of_range(range: &RangeRequest) -> Option<u64> {
        largest(MessageId::RangeRequest, &range.encode_to_vec())
    }

    #[test]
    fn a_range_gathers_all_pairs_where_its_limit_applies_to_what_was_read() {
        let all = range("a", 0);
        assert_eq!(of_range(&all), Some(1000));
        assert_eq!(of_range(&RangeRequest { range_end: Bytes::new(), ..all.clone() }), Some(1));
        assert_eq!(of_range(&RangeRequest { count_only: true, ..all.clone() }), None);
        assert_eq!(of_range(&RangeRequest { keys_only: true, ..all }), Some(1000));
        let ten = range("a", 10);
        assert_eq!(of_range(&ten), Some(10));
        assert_eq!(of_range(&RangeRequest { limit: -1, ..ten.clone() }), Some(1000));
        assert_eq!(of_range(&RangeRequest { sort_order: 1, ..ten.clone() }), Some(1000));
        assert_eq!(of_range(&RangeRequest { sort_order: 2, sort_target: 3, ..ten.clone() }), Some(1000));
        assert_eq!(of_range(&RangeRequest { sort_target: 3, ..ten.clone() }), Some(10), "sorted afterwards");
        let bounded: [fn(&mut RangeRequest); 4] = [
            |range| range.min_mod_revision = 1,
            |range| range.max_mod_revision = 1,
            |range| range.min_create_revision = 1,
            |range| range.max_create_revision = 1,
        ];
        for bound in bounded {
            let mut range = ten.clone();
            bound(&mut range);
            assert_eq!(of_range(&range), Some(1000), "{range:?}");
        }
    }

    #[test]
    fn writes_count_where_they_return_what_was_there() {
        let deletion = |range_end: &'static str, prev_kv| {
            let request = DeleteRangeRequest { key: "a".into(), range_end: range_end.into(), prev_kv };
            largest(MessageId::DeleteRangeRequest, &request.encode_to_vec())
        };
        assert_eq!([deletion("", true), deletion("z", true)], [Some(1), Some(1000)]);
        assert_eq!([deletion("", false), deletion("z", false)], [None, None]);
        let put = |prev_kv| {
            let request = PutRequest { key: "a".into(), prev_kv, ..PutRequest::default() };
            largest(MessageId::PutRequest, &request.encode_to_vec())
        };
        assert_eq!([put(true), put(false)], [Some(1), None]);
        assert_eq!(largest(MessageId::LeaseGrantRequest, b""), None);
    }

    #[test]
    fn of_a_txn_the_larger_branch_counts_at_each_depth_and_equal_parts_are_one() {
        let read = |limit| operation(Request::RequestRange(range("a", limit)));
        let txn = |success, failure| TxnRequest { success, failure, ..TxnRequest::default() };
        let of = |txn: &TxnRequest| largest(MessageId::TxnRequest, &txn.encode_to_vec());
        assert_eq!(of(&txn(vec![], vec![])), None);
        assert_eq!(of(&txn(vec![read(3), read(4)], vec![read(5)])), Some(7));
        assert_eq!(of(&txn(vec![read(3)], vec![read(5)])), Some(5));
        let nested = operation(Request::RequestTxn(txn(vec![read(1)], vec![read(20), read(20)])));
        let whole = txn(vec![], vec![read(5), nested]);
        assert_eq!(of(&whole), Some(45));
        let parts = AnswerParts::of(MessageId::TxnRequest, &whole.encode_to_vec()).expect("parts");
        assert_eq!(parts.distinct().len(), 3);
    }
}
