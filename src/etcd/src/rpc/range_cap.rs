//! A limit on the keys of a Range, set by Keyward.
//!
//! Owns: setting `limit` in a RangeRequest, and reading `more` from a RangeResponse. Must not know: who is
//! limited, the consequence for a client. Invariants: every other field crosses byte for byte, unknown fields
//! too; a Range of one key and a Range of a count only are never limited.
//!
//! etcd limits as follows in all versions (`server/etcdserver/txn/range.go`, `apply.go` before 3.6): with a
//! sort order, or with a bound on revisions, every key of the range is fetched, filtered and sorted before
//! the limit applies; `more` tells that the limit left keys out; `count` is the number of keys without the
//! limit. So an answer without `more` has every key that matches, whatever the order.

use bytes::{BufMut as _, Bytes, BytesMut};

use super::frame::{PREFIX, write_prefix};
use super::scan::{WireFields, WireValue, append_varint_field};
use super::txn_parts::{TxnPart, TxnParts};

/// The number of `limit` in a RangeRequest.
const LIMIT: u32 = 3;

/// A RangeRequest under a limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CappedRange {
    /// The request cannot return more keys than the limit.
    Within,
    /// The framed request with the limit, and the place of the next key after the answer.
    Limited(Bytes, Continuation),
}

/// The way in which a client can ask for the keys behind a limited answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Continuation {
    /// The keys left out lie behind the last key, in the order asked for.
    BehindLastKey,
    /// The answer has another order, or its order does not tell which keys were left out.
    None,
}

/// The fields of a RangeRequest that matter for a limit.
#[derive(Clone, Copy, Default)]
struct RangeFields {
    has_end: bool,
    limit: i64,
    sort_target: u64,
    count_only: bool,
}

impl RangeFields {
    /// Reads a request checked before; an unreadable request counts as unlimited.
    fn read(body: &[u8]) -> Self {
        let mut read = Self::default();
        for field in WireFields::new(body).map_while(Result::ok) {
            match (field.number, field.value) {
                (2, WireValue::Bytes(_)) => read.has_end = true,
                (LIMIT, value) => read.limit = value.signed().unwrap_or_default(),
                (6, WireValue::Varint(target)) => read.sort_target = target,
                (9, value) => read.count_only = value != WireValue::Varint(0),
                _ => {}
            }
        }
        read
    }

    /// True if the answer has at most `most` keys.
    fn is_within(&self, most: u32) -> bool {
        let limited = self.limit > 0 && self.limit <= i64::from(most);
        !self.has_end || self.count_only || limited
    }
}

/// True if no Range with this message returns more than `most` keys.
#[must_use]
pub fn is_within(range: &[u8], most: u32) -> bool {
    RangeFields::read(range).is_within(most)
}

/// Sets the limit of a RangeRequest that may return more than `most` keys.
#[must_use]
pub fn cap(range: &[u8], most: u32) -> CappedRange {
    let fields = RangeFields::read(range);
    if fields.is_within(most) {
        return CappedRange::Within;
    }
    let mut out = BytesMut::with_capacity(PREFIX + range.len() + 6);
    out.put_bytes(0, PREFIX);
    for field in WireFields::new(range).map_while(Result::ok) {
        if field.number != LIMIT {
            out.put_slice(&range[field.range]);
        }
    }
    append_varint_field(&mut out, LIMIT, u64::from(most));
    write_prefix(&mut out);
    // By key, etcd's answer has the first keys, or with a descending order the last keys. With another
    // target, the answer has the first keys by that target, or, without an order, the first keys sorted by
    // the target.
    let continuation = if fields.sort_target == 0 { Continuation::BehindLastKey } else { Continuation::None };
    CappedRange::Limited(out.freeze(), continuation)
}

/// True if a RangeResponse tells that its limit left keys out; `None` for an unreadable message.
#[must_use]
pub fn has_more(response: &[u8]) -> Option<bool> {
    let mut more = false;
    for field in WireFields::new(response) {
        let field = field.ok()?;
        if field.number == 3 {
            more = field.value != WireValue::Varint(0);
        }
    }
    Some(more)
}

/// The number of keys in a RangeResponse of `whole` bytes, of which `begun` is the beginning: exact for a
/// whole message, otherwise by the average size of a key so far.
#[must_use]
pub fn estimated_keys(begun: &[u8], whole: usize) -> usize {
    let keys = WireFields::new(begun).map_while(Result::ok).filter(|field| field.number == 2).count();
    keys.saturating_mul(whole) / begun.len().max(1)
}

/// True if no Range of a TxnRequest, at any depth, returns more than `most` keys. An unreadable Txn is not
/// within.
#[must_use]
pub fn txn_is_within(txn: &[u8], most: u32) -> bool {
    TxnParts::new(txn).all(|part| match part {
        Ok(TxnPart::Range(range)) => is_within(range, most),
        Ok(_) => true,
        Err(_) => false,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use prost::Message as _;

    use super::*;
    use crate::pb::etcdserverpb::{RangeRequest, RangeResponse, RequestOp, TxnRequest, request_op};
    use crate::rpc::canonical::MAX_TXN_DEPTH;
    use crate::rpc::frame;

    fn range_of_all() -> RangeRequest {
        RangeRequest { key: b"\0"[..].into(), range_end: b"\0"[..].into(), ..RangeRequest::default() }
    }

    fn limited(request: &RangeRequest, most: u32) -> Option<(RangeRequest, Continuation)> {
        match cap(&request.encode_to_vec(), most) {
            CappedRange::Within => None,
            CappedRange::Limited(framed, continuation) => {
                let body = frame::unary(&framed).expect("a frame");
                Some((RangeRequest::decode(body).expect("a Range"), continuation))
            }
        }
    }

    #[test]
    fn only_a_range_that_may_return_more_is_limited() {
        let all = range_of_all();
        let with_limit = |limit| RangeRequest { limit, ..all.clone() };
        for limit in [0, -1, 11, i64::MAX] {
            let (request, continuation) = limited(&with_limit(limit), 10).expect("limited");
            assert_eq!(request, with_limit(10));
            assert_eq!(continuation, Continuation::BehindLastKey);
        }
        assert_eq!(limited(&with_limit(10), 10), None);
        assert_eq!(limited(&with_limit(1), 10), None);
        assert_eq!(limited(&RangeRequest { count_only: true, ..all.clone() }, 10), None);
        assert_eq!(limited(&RangeRequest { range_end: Default::default(), ..all.clone() }, 10), None);
        let sorted = RangeRequest { sort_order: 2, sort_target: 3, ..all.clone() };
        assert_eq!(limited(&sorted, 10).expect("limited").1, Continuation::None);
        let descending = RangeRequest { sort_order: 2, ..all };
        assert_eq!(limited(&descending, 10).expect("limited").1, Continuation::BehindLastKey);
    }

    #[test]
    fn a_txn_is_within_if_each_range_at_any_depth_is() {
        let op = |request| RequestOp { request: Some(request) };
        let range = |limit| op(request_op::Request::RequestRange(RangeRequest { limit, ..range_of_all() }));
        let txn = |ops| TxnRequest { failure: ops, ..TxnRequest::default() };
        let nested = |inner| op(request_op::Request::RequestTxn(inner));
        for (limit, within) in [(5, true), (11, false), (0, false)] {
            let flat = txn(vec![range(1), range(limit)]);
            assert_eq!(txn_is_within(&flat.encode_to_vec(), 10), within);
            let deep = txn(vec![nested(txn(vec![nested(flat)]))]);
            assert_eq!(txn_is_within(&deep.encode_to_vec(), 10), within);
        }
        assert!(!txn_is_within(&[0xff], 10));
        let endless = (0..MAX_TXN_DEPTH).fold(txn(Vec::new()), |inner, _| txn(vec![nested(inner)]));
        assert!(!txn_is_within(&endless.encode_to_vec(), 10));
    }

    #[test]
    fn more_is_read_behind_the_keys() {
        let answer = |more| RangeResponse { more, count: 9, ..RangeResponse::default() }.encode_to_vec();
        assert_eq!((has_more(&answer(true)), has_more(&answer(false))), (Some(true), Some(false)));
        assert_eq!(has_more(&[0xff]), None);
    }

    #[test]
    fn the_keys_of_a_begun_answer_are_estimated() {
        let key_value = crate::pb::mvccpb::KeyValue { value: vec![b'x'; 90].into(), ..Default::default() };
        let answer = RangeResponse { kvs: vec![key_value; 100], ..RangeResponse::default() }.encode_to_vec();
        assert_eq!(estimated_keys(&answer, answer.len()), 100);
        let estimate = estimated_keys(&answer[..answer.len() / 3], answer.len());
        assert!((90..=100).contains(&estimate), "{estimate}");
        assert_eq!(estimated_keys(b"", 9), 0);
    }

    proptest! {
        /// Every field but the limit is kept, unknown fields too.
        #[test]
        fn other_fields_cross_as_they_are(
            limit in any::<i64>(), revision in any::<i64>(), target in 0..5, order in 0..3,
            unknown in proptest::collection::vec(any::<u8>(), 0..20), most in 1u32..1_000_000,
        ) {
            let request = RangeRequest {
                limit, revision, sort_order: order, sort_target: target, ..range_of_all()
            };
            let mut body = BytesMut::from(&request.encode_to_vec()[..]);
            crate::rpc::scan::append_bytes_field(&mut body, 999, &unknown);
            let CappedRange::Limited(framed, _) = cap(&body, most) else {
                prop_assert!(limit > 0 && limit <= i64::from(most));
                return Ok(());
            };
            let kept = frame::unary(&framed).expect("a frame");
            let fields = |body: &[u8]| -> Vec<Vec<u8>> {
                let fields = WireFields::new(body).map(|field| field.expect("a field"));
                fields.filter(|field| field.number != LIMIT).map(|field| body[field.range].to_vec()).collect()
            };
            prop_assert_eq!(fields(&body), fields(&kept));
            let decoded = RangeRequest::decode(kept).expect("a Range");
            prop_assert_eq!(decoded, RangeRequest { limit: most.into(), ..request });
        }
    }
}
