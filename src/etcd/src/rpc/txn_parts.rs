//! The compares and operations of a Txn, at every depth.
//!
//! Owns: the way through nested Txns. Must not know: the fields of a compare or an operation. Invariants: no
//! byte of a Txn is skipped: a field or an operation of an unknown kind is a part too, and after a fault the
//! Txn has no further parts. Bodies not yet checked may come here. Allocates for nested Txns only.

use super::canonical::MAX_TXN_DEPTH;
use super::scan::{ScanFault, WireFields};

const TOO_DEEP: ScanFault = ScanFault("too deep a Txn");

/// A part of a Txn, with its message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TxnPart<'a> {
    /// A Compare.
    Compare(&'a [u8]),
    /// An operation: a RangeRequest.
    Range(&'a [u8]),
    /// An operation: a PutRequest.
    Put(&'a [u8]),
    /// An operation: a DeleteRangeRequest.
    DeleteRange(&'a [u8]),
    /// An operation of an unknown kind, or of the wrong wire type.
    UnknownOperation,
    /// A field of the Txn that is neither a compare nor an operation, or has the wrong wire type.
    UnknownField,
}

/// The parts of a Txn in the order of their bytes. A nested Txn is no part itself: its parts follow in its
/// place.
#[derive(Debug)]
pub struct TxnParts<'a> {
    txn: WireFields<'a>,
    operation: Option<WireFields<'a>>,
    /// The rest of the enclosing Txns, and of the operations in which the nested Txns lie. On the heap: a
    /// client determines their number.
    enclosing: Vec<(WireFields<'a>, Option<WireFields<'a>>)>,
}

impl<'a> TxnParts<'a> {
    /// Reads `txn`, a TxnRequest.
    #[must_use]
    pub fn new(txn: &'a [u8]) -> Self {
        Self { txn: WireFields::new(txn), operation: None, enclosing: Vec::new() }
    }

    /// True if the part returned last lies in a Txn inside the Txn.
    #[must_use]
    pub fn is_nested(&self) -> bool {
        !self.enclosing.is_empty()
    }

    /// The next part of the current operation; `None` at the operation's end, and before a nested Txn.
    fn next_of_operation(&mut self) -> Result<Option<TxnPart<'a>>, ScanFault> {
        let Some(field) = self.operation.as_mut().and_then(Iterator::next).transpose()? else {
            self.operation = None;
            return Ok(None);
        };
        Ok(Some(match (field.number, field.value.bytes()) {
            (1, Some(range)) => TxnPart::Range(range),
            (2, Some(put)) => TxnPart::Put(put),
            (3, Some(delete)) => TxnPart::DeleteRange(delete),
            (4, Some(nested)) => {
                if self.enclosing.len() + 1 >= MAX_TXN_DEPTH {
                    return Err(TOO_DEEP);
                }
                let outer = std::mem::replace(&mut self.txn, WireFields::new(nested));
                self.enclosing.push((outer, self.operation.take()));
                return Ok(None);
            }
            _ => TxnPart::UnknownOperation,
        }))
    }

    fn next_part(&mut self) -> Result<Option<TxnPart<'a>>, ScanFault> {
        loop {
            if self.operation.is_some() {
                match self.next_of_operation()? {
                    Some(part) => return Ok(Some(part)),
                    None => continue,
                }
            }
            let Some(field) = self.txn.next().transpose()? else {
                let Some((txn, operation)) = self.enclosing.pop() else { return Ok(None) };
                (self.txn, self.operation) = (txn, operation);
                continue;
            };
            match (field.number, field.value.bytes()) {
                (1, Some(compare)) => return Ok(Some(TxnPart::Compare(compare))),
                (2 | 3, Some(operation)) => self.operation = Some(WireFields::new(operation)),
                _ => return Ok(Some(TxnPart::UnknownField)),
            }
        }
    }
}

impl<'a> Iterator for TxnParts<'a> {
    type Item = Result<TxnPart<'a>, ScanFault>;

    fn next(&mut self) -> Option<Self::Item> {
        let next = self.next_part().transpose();
        if matches!(next, Some(Err(_))) {
            *self = Self::new(b"");
        }
        next
    }
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::*;
    use crate::pb::etcdserverpb::request_op::Request;
    use crate::pb::etcdserverpb::{
        Compare, DeleteRangeRequest, PutRequest, RangeRequest, RequestOp, TxnRequest,
    };

    fn operation(request: Request) -> RequestOp {
        RequestOp { request: Some(request) }
    }

    fn nested(depth: usize, innermost: &TxnRequest) -> TxnRequest {
        (0..depth).fold(innermost.clone(), |inner, _| TxnRequest {
            success: vec![operation(Request::RequestTxn(inner))],
            ..TxnRequest::default()
        })
    }

    /// Names of the parts, nested ones in brackets.
    fn names(txn: &[u8]) -> Vec<String> {
        let mut parts = TxnParts::new(txn);
        let mut names = Vec::new();
        while let Some(part) = parts.next() {
            let name = match part {
                Ok(TxnPart::Compare(_)) => "compare",
                Ok(TxnPart::Range(_)) => "range",
                Ok(TxnPart::Put(_)) => "put",
                Ok(TxnPart::DeleteRange(_)) => "delete",
                Ok(TxnPart::UnknownOperation) => "operation?",
                Ok(TxnPart::UnknownField) => "field?",
                Err(ScanFault(reason)) => reason,
            };
            names.push(if parts.is_nested() { format!("[{name}]") } else { name.into() });
        }
        names
    }

    #[test]
    fn every_part_at_every_depth_in_the_order_of_the_bytes() {
        let range = || operation(Request::RequestRange(RangeRequest::default()));
        let put = || operation(Request::RequestPut(PutRequest::default()));
        let delete = || operation(Request::RequestDeleteRange(DeleteRangeRequest::default()));
        let inner = TxnRequest {
            compare: vec![Compare { key: "k".into(), ..Compare::default() }],
            success: vec![put()],
            failure: vec![delete()],
        };
        let txn = TxnRequest {
            compare: vec![Compare::default()],
            success: vec![range(), operation(Request::RequestTxn(inner)), put()],
            failure: vec![delete()],
        };
        let expected = ["compare", "range", "[compare]", "[put]", "[delete]", "put", "delete"];
        assert_eq!(names(&txn.encode_to_vec()), expected);
        assert_eq!(names(b""), [""; 0]);
    }

    #[test]
    fn nothing_unknown_is_skipped_and_nothing_follows_a_fault() {
        // An operation with a nested Txn and, behind it, a put.
        assert_eq!(names(b"\x12\x06\x22\x02\x0a\x00\x12\x00"), ["[compare]", "put"]);
        assert_eq!(
            names(b"\x22\x00\x12\x02\x2a\x00\x12\x02\x08\x01"),
            ["field?", "operation?", "operation?"]
        );
        assert_eq!(names(b"\x12\x02\x0a\x00\x12"), ["range", "the body ends within a field"]);
        assert_eq!(names(b"\x12\x03\x0a\x00\x07\x12\x02\x0a\x00").len(), 2);
        let put = operation(Request::RequestPut(PutRequest::default()));
        let innermost = TxnRequest { success: vec![put], ..TxnRequest::default() };
        assert_eq!(names(&nested(MAX_TXN_DEPTH - 1, &innermost).encode_to_vec()), ["[put]"]);
        assert_eq!(names(&nested(MAX_TXN_DEPTH, &innermost).encode_to_vec()), [TOO_DEEP.0]);
    }
}
