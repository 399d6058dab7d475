//! Properties of a request's body needed for routing.
//!
//! Owns: the few questions left open by a row of the method table. Must not know: members, policy.
//! Invariants: unchecked bodies may come here. For a body unreadable, or read differently by different
//! decoders, every answer is the cautious answer: the call writes, and is not sent again.

use super::method::{Effect, Lane, Method};
use super::range_cap;
use super::scan::{WireFields, WireValue};
use super::schema::MessageId;
use super::txn_parts::{TxnPart, TxnParts};
use crate::identity::MemberId;

/// Largest limit of a Range not counted as bulk.
const BULK_LIMIT: i64 = 1000;

/// Largest limit of a Range not counted as heavy.
const HEAVY_LIMIT: u32 = 1000;

/// Properties of a Range needed for routing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RangeShape {
    /// The Range may be answered from a member's own state.
    pub serializable: bool,
    /// The answer may be large enough to delay short calls on its connection.
    pub bulk: bool,
}

/// Reads the shape of a RangeRequest; an unreadable request is linearizable and not bulk.
#[must_use]
pub fn range(body: &[u8]) -> RangeShape {
    let (mut serializable, mut has_end, mut limit, mut lean) = (false, false, 0, [false; 2]);
    for field in WireFields::new(body) {
        let Ok(field) = field else { return RangeShape::default() };
        match (field.number, field.value) {
            // For etcd 3.4 to 3.6 an empty end is no end: `docs/etcd-facts.md#v23`.
            (2, WireValue::Bytes(_)) => has_end = true,
            (3, value) => limit = value.signed().unwrap_or_default(),
            (7, value) => serializable = value != WireValue::Varint(0),
            (8, value) => lean[0] = value != WireValue::Varint(0),
            (9, value) => lean[1] = value != WireValue::Varint(0),
            _ => {}
        }
    }
    // etcd takes a limit below 1 as no limit.
    let many = limit <= 0 || limit > BULK_LIMIT;
    RangeShape { serializable, bulk: has_end && many && lean == [false; 2] }
}

/// True if the answer to a read may be as large as the store, so that a member short of memory may end over
/// it: a Range without a small limit, alone or at any depth of a Txn. A mere count is not; keys without
/// values are, since etcd reads the values too.
#[must_use]
pub fn is_heavy(method: &Method, body: &[u8]) -> bool {
    match method.body {
        MessageId::RangeRequest => !range_cap::is_within(body, HEAVY_LIMIT),
        MessageId::TxnRequest => !range_cap::txn_is_within(body, HEAVY_LIMIT),
        _ => false,
    }
}

/// True if the call is about a single key, so no client can make it slow.
#[must_use]
pub fn is_of_one_key(method: &Method, body: &[u8]) -> bool {
    let ends = || WireFields::new(body).any(|field| field.map_or(true, |field| field.number == 2));
    match method.body {
        MessageId::PutRequest => true,
        MessageId::RangeRequest => !ends(),
        _ => false,
    }
}

/// Returns the lane of a call, by its row and body.
#[must_use]
pub fn lane(method: &Method, body: &[u8]) -> Lane {
    let bulk = method.lane == Lane::Unary && method.body == MessageId::RangeRequest && range(body).bulk;
    if bulk { Lane::Bulk } else { method.lane }
}

/// Returns the effect of a call, by its row and body: a Txn without writes, a question about alarms and a
/// check of a downgrade are reads.
#[must_use]
pub fn effect(method: &Method, body: &[u8]) -> Effect {
    let reads = match method.body {
        MessageId::TxnRequest => txn_is_read_only(body),
        MessageId::AlarmRequest | MessageId::DowngradeRequest => asks_only(body),
        _ => false,
    };
    if reads { Effect::ReadOnly } else { method.effect }
}

/// True if no branch of a TxnRequest, at any depth, puts or deletes.
#[must_use]
pub fn txn_is_read_only(body: &[u8]) -> bool {
    TxnParts::new(body).all(|part| matches!(part, Ok(TxnPart::Compare(_) | TxnPart::Range(_))))
}

/// True if a member answers the call from its own store: a serializable Range, or a Txn of serializable
/// ranges only (`etcdserver/txn/util.go`, `IsTxnSerializable`).
#[must_use]
pub fn is_local(method: &Method, body: &[u8]) -> bool {
    match method.body {
        MessageId::RangeRequest => range(body).serializable,
        MessageId::TxnRequest => {
            WireFields::new(body).all(|field| match field.map(|field| (field.number, field.value)) {
                Ok((1, _)) => true,
                Ok((2 | 3, WireValue::Bytes(op))) => {
                    op_range(op).is_some_and(|body| range(body).serializable)
                }
                _ => false,
            })
        }
        _ => false,
    }
}

/// Returns the first key named by a Range or a Txn of ranges.
#[must_use]
pub fn first_key(method: &Method, body: &[u8]) -> Option<Vec<u8>> {
    let range = match method.body {
        MessageId::RangeRequest => body,
        _ => WireFields::new(body).map_while(Result::ok).find_map(|field| {
            match (field.number, field.value) {
                (2 | 3, WireValue::Bytes(op)) => op_range(op),
                _ => None,
            }
        })?,
    };
    let mut fields = WireFields::new(range).map_while(Result::ok);
    Some(fields.find(|field| field.number == 1)?.value.bytes()?.to_vec())
}

/// Returns the RangeRequest of a RequestOp without further fields.
fn op_range(op: &[u8]) -> Option<&[u8]> {
    let mut fields = WireFields::new(op);
    let field = fields.next()?.ok()?;
    if field.number != 1 || fields.next().is_some() {
        return None;
    }
    field.value.bytes()
}

/// True if the action of an AlarmRequest or a DowngradeRequest is 0, a mere question.
fn asks_only(body: &[u8]) -> bool {
    WireFields::new(body)
        .all(|field| field.is_ok_and(|field| field.number != 1 || field.value == WireValue::Varint(0)))
}

/// True if the call may be sent again after a refusal proving the call not applied.
///
/// A Lock or Campaign without a lease may not: the server has granted a lease by then, and the key of the
/// first attempt may wait in the queue under the lease. With a lease the key is the same, and a second
/// attempt finds the queue position of the first.
#[must_use]
pub fn may_reissue(method: &Method, body: &[u8]) -> bool {
    match method.body {
        MessageId::LockRequest | MessageId::CampaignRequest => lock_lease(body) != 0,
        _ => true,
    }
}

/// Returns the lease of a LockRequest or a CampaignRequest; 0 if absent or unreadable.
#[must_use]
pub fn lock_lease(body: &[u8]) -> i64 {
    last_number(body, 2).unwrap_or_default()
}

/// Returns the name in field 1 of a LockRequest or a CampaignRequest; empty if absent.
#[must_use]
pub fn lock_name(body: &[u8]) -> &[u8] {
    let named = WireFields::new(body).map_while(Result::ok).filter(|field| field.number == 1).last();
    named.and_then(|field| field.value.bytes()).unwrap_or_default()
}

/// Returns the user named by a UserAdd, UserDelete or UserChangePassword, in field 1 of each.
#[must_use]
pub fn user_name(body: &[u8]) -> Option<&str> {
    let named = WireFields::new(body).map_while(Result::ok).filter(|field| field.number == 1).last()?;
    std::str::from_utf8(named.value.bytes()?).ok()
}

/// Returns the member named by a MemberRemove.
#[must_use]
pub fn member_id(body: &[u8]) -> MemberId {
    MemberId(last_number(body, 1).unwrap_or(0).cast_unsigned())
}

/// Returns the last value of a singular number, or 0; `None` if unreadable.
fn last_number(body: &[u8], number: u32) -> Option<i64> {
    let mut found = 0;
    for field in WireFields::new(body) {
        let field = field.ok()?;
        if field.number == number {
            found = field.value.signed()?;
        }
    }
    Some(found)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use prost::Message as _;

    use super::*;
    use crate::pb::etcdserverpb::{
        AlarmRequest, AuthUserChangePasswordRequest, Compare, DeleteRangeRequest, DowngradeRequest,
        PutRequest, RangeRequest, RequestOp, TxnRequest, request_op::Request,
    };
    use crate::pb::{v3electionpb::CampaignRequest, v3lockpb::LockRequest};
    use crate::rpc::method::lookup;

    fn txn(success: Vec<Request>, failure: Vec<Request>) -> TxnRequest {
        let ops = |requests: Vec<_>| requests.into_iter().map(|r| RequestOp { request: Some(r) }).collect();
        TxnRequest { compare: vec![Compare::default()], success: ops(success), failure: ops(failure) }
    }

    fn a_range() -> Request {
        Request::RequestRange(RangeRequest { key: "a".into(), ..Default::default() })
    }

    #[test]
    fn local_is_what_asks_nobody_else() {
        let (range, kv) =
            (lookup("/etcdserverpb.KV/Range").unwrap(), lookup("/etcdserverpb.KV/Txn").unwrap());
        let read = |serializable| RangeRequest { key: "a".into(), serializable, ..Default::default() };
        assert!(is_local(range, &read(true).encode_to_vec()));
        assert!(!is_local(range, &read(false).encode_to_vec()));
        let of = |success: Vec<Request>| txn(success, vec![]).encode_to_vec();
        let local = || Request::RequestRange(read(true));
        assert!(is_local(kv, &of(vec![local(), local()])));
        assert!(is_local(kv, &of(vec![])), "as etcd has it");
        assert!(!is_local(kv, &of(vec![local(), a_range()])));
        assert!(!is_local(kv, &of(vec![Request::RequestPut(PutRequest::default())])));
        assert!(!is_local(kv, &of(vec![Request::RequestTxn(txn(vec![local()], vec![]))])), "as etcd has it");
        assert!(!is_local(lookup("/etcdserverpb.KV/Put").unwrap(), b""));
        assert_eq!(first_key(range, &read(true).encode_to_vec()).as_deref(), Some(&b"a"[..]));
        assert_eq!(first_key(kv, &of(vec![local()])).as_deref(), Some(&b"a"[..]));
        assert_eq!(first_key(kv, &of(vec![])), None);
    }

    #[test]
    fn bulk_is_a_large_range_with_values() {
        let request = |range_end: &'static str, limit, keys_only, count_only| {
            let range_end = range_end.into();
            let request = RangeRequest {
                key: "a".into(),
                range_end,
                limit,
                keys_only,
                count_only,
                ..Default::default()
            };
            range(&request.encode_to_vec()).bulk
        };
        assert!(request("z", 0, false, false));
        assert!(request("\0", 0, false, false));
        assert!(request("z", 1001, false, false));
        assert!(request("z", -1, false, false));
        assert!(!request("z", 1000, false, false));
        assert!(!request("", 0, false, false));
        assert!(!request("z", 0, true, false));
        assert!(!request("z", 0, false, true));
    }

    #[test]
    fn a_large_range_moves_to_the_bulk_lane_and_nothing_else_does() {
        let large =
            RangeRequest { key: "a".into(), range_end: "b".into(), ..Default::default() }.encode_to_vec();
        let of = |path| lane(lookup(path).unwrap(), &large);
        assert_eq!(of("/etcdserverpb.KV/Range"), Lane::Bulk);
        assert_eq!(of("/etcdserverpb.KV/RangeStream"), Lane::Bulk);
        assert_eq!(of("/etcdserverpb.KV/DeleteRange"), Lane::Unary);
        assert_eq!(of("/v3lockpb.Lock/Lock"), Lane::Stream);
    }

    #[test]
    fn serializable_is_read_and_a_broken_range_is_linearizable() {
        let mut body = RangeRequest { serializable: true, ..Default::default() }.encode_to_vec();
        assert!(range(&body).serializable);
        body.push(7);
        assert_eq!(range(&body), RangeShape::default());
    }

    #[test]
    fn a_txn_writes_wherever_the_write_lies() {
        let put = || Request::RequestPut(PutRequest::default());
        let delete = || Request::RequestDeleteRange(DeleteRangeRequest::default());
        let reads = |txn: &TxnRequest| txn_is_read_only(&txn.encode_to_vec());
        assert!(reads(&TxnRequest::default()));
        assert!(reads(&txn(vec![a_range()], vec![a_range()])));
        assert!(reads(&txn(vec![], vec![Request::RequestTxn(txn(vec![a_range()], vec![]))])));
        assert!(!reads(&txn(vec![a_range(), put()], vec![])));
        assert!(!reads(&txn(vec![a_range()], vec![delete()])));
        assert!(!reads(&txn(vec![Request::RequestTxn(txn(vec![], vec![put()]))], vec![])));
    }

    /// Decoders differ on the bodies below; some decoder may see a write.
    #[test]
    fn a_txn_that_can_be_read_in_two_ways_writes() {
        // An op with a range and a put, in either order.
        assert!(!txn_is_read_only(b"\x12\x04\x0a\x00\x12\x00"));
        assert!(!txn_is_read_only(b"\x12\x04\x12\x00\x0a\x00"));
        // An op of an unknown kind, and an unknown field of Txn.
        assert!(!txn_is_read_only(b"\x12\x02\x2a\x00"));
        assert!(!txn_is_read_only(b"\x22\x00"));
        // Bytes without readable fields.
        assert!(!txn_is_read_only(b"\x12\x01\x07"));
        assert!(!txn_is_read_only(b"\x12"));
        // request_put as field 2^32 + 2, read by gogo/protobuf as field 2.
        assert!(!txn_is_read_only(b"\x12\x07\x92\x80\x80\x80\x80\x01\x00"));
        assert!(txn_is_read_only(b"\x12\x02\x0a\x00"));
    }

    #[test]
    fn the_effect_follows_the_body() {
        let of = |path, body: Vec<u8>| effect(lookup(path).unwrap(), &body);
        let alarm = |action| AlarmRequest { action, member_id: 7, alarm: 1 }.encode_to_vec();
        assert_eq!(of("/etcdserverpb.Maintenance/Alarm", alarm(0)), Effect::ReadOnly);
        assert_eq!(of("/etcdserverpb.Maintenance/Alarm", alarm(1)), Effect::Mutates);
        assert_eq!(of("/etcdserverpb.Maintenance/Alarm", alarm(2)), Effect::Mutates);
        assert_eq!(of("/etcdserverpb.Maintenance/Alarm", vec![7]), Effect::Mutates);
        let downgrade = |action| DowngradeRequest { action, version: "3.5".into() }.encode_to_vec();
        assert_eq!(of("/etcdserverpb.Maintenance/Downgrade", downgrade(0)), Effect::ReadOnly);
        assert_eq!(of("/etcdserverpb.Maintenance/Downgrade", downgrade(1)), Effect::Mutates);
        let reads = txn(vec![a_range()], vec![]).encode_to_vec();
        assert_eq!(of("/etcdserverpb.KV/Txn", reads), Effect::ReadOnly);
        assert_eq!(of("/etcdserverpb.KV/Txn", b"\x12\x02\x12\x00".to_vec()), Effect::Mutates);
        assert_eq!(of("/etcdserverpb.KV/Put", vec![]), Effect::Mutates);
        assert_eq!(of("/etcdserverpb.KV/Range", vec![]), Effect::ReadOnly);
    }

    #[test]
    fn a_lock_without_a_lease_is_never_sent_again() {
        let lock = lookup("/v3lockpb.Lock/Lock").unwrap();
        let campaign = lookup("/v3electionpb.Election/Campaign").unwrap();
        for lease in [0, 5, -5] {
            let asked = LockRequest { name: "n".into(), lease }.encode_to_vec();
            assert_eq!(lock_lease(&asked), lease);
            assert_eq!(may_reissue(lock, &asked), lease != 0);
            let asked = CampaignRequest { name: "n".into(), lease, value: "v".into() }.encode_to_vec();
            assert_eq!(may_reissue(campaign, &asked), lease != 0);
        }
        assert!(!may_reissue(lock, b"\x10\x05\x07"));
        assert!(may_reissue(lookup("/v3lockpb.Lock/Unlock").unwrap(), b""));
    }

    #[test]
    fn a_change_of_users_names_its_user() {
        let change = AuthUserChangePasswordRequest {
            name: "alice".into(),
            password: "p".into(),
            ..Default::default()
        };
        assert_eq!(user_name(&change.encode_to_vec()), Some("alice"));
        assert_eq!(user_name(b""), None);
        assert_eq!(user_name(b"\x0a\x01\xff"), None, "no text");
        assert_eq!(user_name(b"\x08\x01"), None, "a number");
    }

    proptest! {
        /// A body decoded by prost to a Txn with a write is never called read-only.
        #[test]
        fn no_write_is_overlooked(body: Vec<u8>) {
            if txn_is_read_only(&body) && let Ok(txn) = TxnRequest::decode(&body[..]) {
                prop_assert!(!writes(&txn), "{:?}", txn);
            }
            let _shape = range(&body);
        }

        /// As above, on bytes resembling ops.
        #[test]
        fn no_write_is_overlooked_among_ops(
            ops in prop::collection::vec((2u8..4, 0u8..6, any::<bool>()), 0..6),
        ) {
            let mut body = Vec::new();
            for (branch, kind, wide) in ops {
                let op = if wide { vec![kind << 3 | 2, 2, 0x0a, 0] } else { vec![kind << 3 | 2, 0] };
                body.push(branch << 3 | 2);
                body.push(u8::try_from(op.len()).unwrap());
                body.extend(op);
            }
            if let Ok(txn) = TxnRequest::decode(&body[..]) {
                prop_assert!(!(txn_is_read_only(&body) && writes(&txn)), "{:?}", txn);
            }
        }
    }

    fn writes(txn: &TxnRequest) -> bool {
        txn.success.iter().chain(&txn.failure).any(|op| match &op.request {
            Some(Request::RequestPut(_) | Request::RequestDeleteRange(_)) => true,
            Some(Request::RequestTxn(nested)) => writes(nested),
            Some(Request::RequestRange(_)) | None => false,
        })
    }
}
