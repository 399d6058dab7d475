//! The check that a request body reads the same for Keyward, for gogo/protobuf (etcd 3.4-3.6) and for Go's
//! own protobuf (3.7).
//!
//! Owns: the rules of a canonical body (`docs/decisions.md#d02`). Must not know: the decisions made on a
//! body.
//! Invariant: in an accepted body, every known singular field occurs at most once, with its own wire type and
//! a value no decoder truncates; of a oneof at most one member occurs. (A repeated oneof member is *replaced*
//! by gogo and *merged* by the rest, so the executed call would differ from the allowed call.) Unknown fields
//! pass: etcd grows.

use super::scan::{self, ScanFault, WireFields, WireValue};
use super::schema::{FieldKind, MessageId};
use crate::refusal::Refusal;

/// Limit on the depth of nested Txns, the outermost included. etcd counts the operations of all levels
/// together against `--max-txn-ops`, by default 128, and accepts as many levels.
pub const MAX_TXN_DEPTH: usize = 1024;

/// A body with different readings by different decoders.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason} in {message}")]
pub struct NotCanonical {
    /// The name of the faulty message.
    pub message: &'static str,
    /// The fault.
    pub reason: &'static str,
}

impl NotCanonical {
    /// Returns the refusal for the client.
    #[must_use]
    pub fn refusal(self) -> Refusal {
        Refusal::not_canonical(&self.to_string())
    }
}

impl From<NotCanonical> for Refusal {
    fn from(fault: NotCanonical) -> Self {
        fault.refusal()
    }
}

/// Checks `body`, a message without its frame.
///
/// # Errors
/// The first fault found.
pub fn check(schema: MessageId, body: &[u8]) -> Result<(), NotCanonical> {
    let mut level = MessageLevel::new(schema, body);
    // Levels lie on the heap: a client determines their number.
    let mut outer: Vec<MessageLevel<'_>> = Vec::new();
    let mut txns = usize::from(schema == MessageId::TxnRequest);
    loop {
        if let Some((nested, body)) = level.next_nested()? {
            if nested == MessageId::TxnRequest {
                txns += 1;
                if txns > MAX_TXN_DEPTH {
                    let message = nested.message().name;
                    return Err(NotCanonical { message, reason: "too deep a Txn" });
                }
            }
            outer.push(std::mem::replace(&mut level, MessageLevel::new(nested, body)));
        } else {
            txns -= usize::from(level.id == MessageId::TxnRequest);
            match outer.pop() {
                Some(up) => level = up,
                None => return Ok(()),
            }
        }
    }
}

/// A message being checked.
struct MessageLevel<'a> {
    id: MessageId,
    rest: WireFields<'a>,
    /// Singular fields and oneofs met so far, as bits.
    seen: u64,
    oneofs: u64,
}

impl<'a> MessageLevel<'a> {
    fn new(id: MessageId, body: &'a [u8]) -> Self {
        Self { id, rest: WireFields::new(body), seen: 0, oneofs: 0 }
    }

    /// Checks fields up to the next nested message, and returns the nested message for its own check. `None`
    /// at the end.
    fn next_nested(&mut self) -> Result<Option<(MessageId, &'a [u8])>, NotCanonical> {
        let message = self.id.message();
        let fault = |reason| NotCanonical { message: message.name, reason };
        while let Some(field) = self.rest.next() {
            let field = field.map_err(|ScanFault(reason)| fault(reason))?;
            let Some(place) = message.fields.iter().position(|known| known.number == field.number) else {
                continue;
            };
            let known = &message.fields[place];
            if !known.repeated && !set_bit_once(&mut self.seen, place) {
                return Err(fault("a field given twice"));
            }
            if known.oneof.is_some_and(|oneof| !set_bit_once(&mut self.oneofs, usize::from(oneof))) {
                return Err(fault("a oneof given twice"));
            }
            match (known.kind, field.value) {
                (FieldKind::Bytes, WireValue::Bytes(_)) => {}
                (FieldKind::Text, WireValue::Bytes(text)) => {
                    std::str::from_utf8(text).map_err(|_| fault("text that is not UTF-8"))?;
                }
                (FieldKind::Message(nested), WireValue::Bytes(body)) => return Ok(Some((nested, body))),
                (kind, WireValue::Varint(value)) => check_number(kind, value).map_err(fault)?,
                (kind, WireValue::Bytes(packed)) if known.repeated => {
                    check_packed(kind, packed).map_err(fault)?;
                }
                _ => return Err(fault(WRONG_TYPE)),
            }
        }
        Ok(None)
    }
}

/// Sets bit `place`. Returns true if the bit was not set before.
fn set_bit_once(seen: &mut u64, place: usize) -> bool {
    let bit = 1u64 << place;
    let first = *seen & bit == 0;
    *seen |= bit;
    first
}

const WRONG_TYPE: &str = "a field of the wrong wire type";

fn check_number(kind: FieldKind, value: u64) -> Result<(), &'static str> {
    let whole = match kind {
        FieldKind::Bool => value <= 1,
        FieldKind::Enum => i32::try_from(value.cast_signed()).is_ok(),
        FieldKind::Integer => true,
        FieldKind::Bytes | FieldKind::Text | FieldKind::Message(_) => return Err(WRONG_TYPE),
    };
    if whole { Ok(()) } else { Err("a number too large for its field") }
}

fn check_packed(kind: FieldKind, mut packed: &[u8]) -> Result<(), &'static str> {
    while !packed.is_empty() {
        let (value, length) = scan::varint(packed).map_err(|ScanFault(reason)| reason)?;
        check_number(kind, value)?;
        packed = &packed[length..];
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use bytes::BytesMut;
    use proptest::prelude::*;
    use prost::Message as _;

    use super::*;
    use crate::pb::etcdserverpb::{
        Compare, DeleteRangeRequest, PutRequest, RangeRequest, RequestOp, TxnRequest, WatchCreateRequest,
        WatchRequest, compare::TargetUnion, request_op::Request, watch_request::RequestUnion,
    };
    use crate::rpc::method::METHODS;
    use crate::rpc::scan::append_bytes_field;

    fn reason(schema: MessageId, body: &[u8]) -> &'static str {
        check(schema, body).expect_err("not canonical").reason
    }

    fn wrapped(number: u32, body: &[u8]) -> BytesMut {
        let mut out = BytesMut::new();
        append_bytes_field(&mut out, number, body);
        out
    }

    /// Returns `depth` nested Txns, the outermost included.
    fn nested_txn(depth: usize) -> TxnRequest {
        let mut txn = TxnRequest::default();
        for _ in 1..depth {
            txn = TxnRequest {
                failure: vec![RequestOp { request: Some(Request::RequestTxn(txn)) }],
                ..Default::default()
            };
        }
        txn
    }

    #[test]
    fn singular_fields_come_once() {
        assert_eq!(check(MessageId::RangeRequest, b"\x0a\x01a\x12\x01b"), Ok(()));
        assert_eq!(reason(MessageId::RangeRequest, b"\x0a\x01a\x0a\x01b"), "a field given twice");
        assert_eq!(reason(MessageId::RangeRequest, b"\x38\x01\x38\x01"), "a field given twice");
        assert_eq!(check(MessageId::TxnRequest, b"\x12\x00\x12\x00\x1a\x00\x1a\x00"), Ok(()));
    }

    /// An op naming request_range twice has different ranges for gogo and for prost
    /// (`docs/decisions.md#d02`).
    #[test]
    fn a_oneof_comes_once() {
        let range = wrapped(1, b"\x0a\x01a");
        let twice = [&range[..], &range[..]].concat();
        assert_eq!(check(MessageId::TxnRequest, &wrapped(2, &range)), Ok(()));
        assert_eq!(reason(MessageId::TxnRequest, &wrapped(2, &twice)), "a field given twice");
        let mixed = [&range[..], &wrapped(2, b"")[..]].concat();
        assert_eq!(reason(MessageId::TxnRequest, &wrapped(2, &mixed)), "a oneof given twice");
        assert_eq!(reason(MessageId::Compare, b"\x20\x01\x28\x01"), "a oneof given twice");
    }

    #[test]
    fn wire_types_are_right() {
        assert_eq!(reason(MessageId::RangeRequest, b"\x08\x01"), WRONG_TYPE);
        assert_eq!(reason(MessageId::RangeRequest, b"\x1a\x00"), WRONG_TYPE);
        assert_eq!(reason(MessageId::RangeRequest, b"\x1d\0\0\0\0"), WRONG_TYPE);
        assert_eq!(reason(MessageId::TxnRequest, b"\x10\x01"), WRONG_TYPE);
    }

    #[test]
    fn numbers_fit_their_fields() {
        let large = "a number too large for its field";
        assert_eq!(reason(MessageId::RangeRequest, b"\x38\x02"), large);
        assert_eq!(reason(MessageId::RangeRequest, b"\x28\x80\x80\x80\x80\x10"), large);
        assert_eq!(check(MessageId::RangeRequest, b"\x28\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"), Ok(()));
        assert_eq!(reason(MessageId::AuthenticateRequest, b"\x0a\x01\xff"), "text that is not UTF-8");
        assert_eq!(check(MessageId::RangeRequest, b"\x0a\x01\xff"), Ok(()));
    }

    #[test]
    fn repeated_scalars_may_be_packed_or_not() {
        assert_eq!(check(MessageId::WatchCreateRequest, b"\x2a\x02\x00\x01\x28\x01"), Ok(()));
        assert_eq!(check(MessageId::WatchCreateRequest, b"\x2a\x02\x81\x00"), Ok(()));
        assert_eq!(reason(MessageId::WatchCreateRequest, b"\x2a\x01\x81"), "the body ends within a field");
        assert_eq!(
            reason(MessageId::WatchCreateRequest, b"\x2a\x06\x00\x80\x80\x80\x80\x10"),
            "a number too large for its field"
        );
    }

    #[test]
    fn unknown_fields_pass_with_a_canonical_tag_only() {
        assert_eq!(check(MessageId::RangeRequest, b"\xb2\x06\x01x\xb2\x06\x01x\xb0\x06\x01"), Ok(()));
        assert_eq!(
            reason(MessageId::RangeRequest, b"\x8a\x80\x80\x80\x80\x01\x00"),
            "a tag of more than 32 bits"
        );
    }

    #[test]
    fn txns_nest_as_deep_as_etcd_takes_them() {
        for depth in [16, 17, 60, 128] {
            assert_eq!(check(MessageId::TxnRequest, &nested_txn(depth).encode_to_vec()), Ok(()));
        }
        let mut body = BytesMut::new();
        for _ in 1..MAX_TXN_DEPTH {
            body = wrapped(2, &wrapped(4, &body));
        }
        assert_eq!(check(MessageId::TxnRequest, &body), Ok(()));
        let deeper = wrapped(2, &wrapped(4, &body));
        assert_eq!(reason(MessageId::TxnRequest, &deeper), "too deep a Txn");
        // Only levels are counted: the same depth twice, side by side, is no deeper.
        let twice = [&body[..], &body[..]].concat();
        assert_eq!(check(MessageId::TxnRequest, &twice), Ok(()));
    }

    #[test]
    fn a_fault_says_where() {
        let fault = check(MessageId::TxnRequest, &wrapped(2, b"\x0f")).unwrap_err();
        assert_eq!(
            Refusal::from(fault).message(),
            "keyward: request body is not canonical: \
             a group or an unknown wire type in etcdserverpb.RequestOp"
        );
    }

    /// `first` tracks fields and oneofs in 64 bits.
    #[test]
    fn no_message_has_more_fields_than_are_counted() {
        for method in METHODS {
            let message = method.body.message();
            assert!(message.fields.len() <= 64, "{}", message.name);
            assert!(message.fields.iter().all(|field| field.oneof.is_none_or(|oneof| oneof < 64)));
        }
    }

    fn request(depth: u32) -> BoxedStrategy<RequestOp> {
        let bytes = || prop::collection::vec(any::<u8>(), 0..6).prop_map(bytes::Bytes::from);
        let range = (bytes(), bytes(), any::<i64>(), any::<bool>(), 0i32..3).prop_map(
            |(key, range_end, limit, serializable, sort_order)| {
                let request =
                    RangeRequest { key, range_end, limit, serializable, sort_order, ..Default::default() };
                Request::RequestRange(request)
            },
        );
        let put = (bytes(), bytes(), any::<i64>(), any::<bool>()).prop_map(|(key, value, lease, prev_kv)| {
            Request::RequestPut(PutRequest { key, value, lease, prev_kv, ..Default::default() })
        });
        let delete = (bytes(), bytes()).prop_map(|(key, range_end)| {
            Request::RequestDeleteRange(DeleteRangeRequest { key, range_end, ..Default::default() })
        });
        let leaf = prop_oneof![range, put, delete];
        let wrap = |request| RequestOp { request: Some(request) };
        if depth == 0 {
            return leaf.prop_map(wrap).boxed();
        }
        let txn = txn(depth - 1).prop_map(Request::RequestTxn);
        prop_oneof![4 => leaf, 1 => txn].prop_map(wrap).boxed()
    }

    fn txn(depth: u32) -> impl Strategy<Value = TxnRequest> {
        let compare =
            (any::<i64>(), 0i32..4, any::<Option<i64>>()).prop_map(|(key, result, version)| Compare {
                key: key.to_string().into(),
                result,
                target_union: version.map(TargetUnion::Version),
                ..Default::default()
            });
        let ops = || prop::collection::vec(request(depth), 0..3);
        (prop::collection::vec(compare, 0..3), ops(), ops())
            .prop_map(|(compare, success, failure)| TxnRequest { compare, success, failure })
    }

    proptest! {
        #[test]
        fn what_clients_write_is_canonical(txn in txn(3), filters in prop::collection::vec(0i32..2, 0..4)) {
            prop_assert_eq!(check(MessageId::TxnRequest, &txn.encode_to_vec()), Ok(()));
            let create = WatchCreateRequest { filters, watch_id: -1, ..Default::default() };
            let watch = WatchRequest { request_union: Some(RequestUnion::CreateRequest(create)) };
            prop_assert_eq!(check(MessageId::WatchRequest, &watch.encode_to_vec()), Ok(()));
        }

        /// An accepted body decodes.
        #[test]
        fn what_is_canonical_decodes(txn in txn(2), at: prop::sample::Index, byte: u8) {
            let mut body = txn.encode_to_vec();
            if !body.is_empty() {
                let at = at.index(body.len());
                body[at] = byte;
            }
            if check(MessageId::TxnRequest, &body).is_ok() {
                prop_assert!(TxnRequest::decode(&body[..]).is_ok());
            }
        }

        #[test]
        fn any_bytes_are_checked(body: Vec<u8>, at: prop::sample::Index) {
            let schema = METHODS[at.index(METHODS.len())].body;
            let _either = check(schema, &body);
        }
    }
}
