//! The permissions needed by a request, as keys and ranges, and the Txn by which etcd itself judges them.
//!
//! Owns: the parts of a TxnRequest left unchecked by etcd before 3.4.44, 3.5.30 and 3.6.11 (nested Txns;
//! `prev_kv` and `lease` of an operation), and by all members but the answering one before 3.7 (top-level
//! ranges beside writes); and the judge Txn. Must not know: users, members, sending.
//! Invariants: the judge Txn never changes the store, whatever its operations: it has no compare, so its
//! empty success branch runs, and its operations stand in the failure branch; etcd checks the permissions of
//! both branches before running either (`checkTxnAuth` in server/etcdserver/apply). A write is asked as a
//! DeleteRange: etcd refuses a Txn with two puts of one key, and needs room in the database for a put. Bodies
//! come here after `canonical::check`.

use bytes::Bytes;
use prost::Message as _;

use super::scan::{ScanFault, WireFields, WireValue};
use super::txn_parts::{TxnPart, TxnParts};
use crate::pb::etcdserverpb::request_op::Request;
use crate::pb::etcdserverpb::{DeleteRangeRequest, RangeRequest, RequestOp, TxnRequest};

/// Operations in a judge Txn: etcd's default for `--max-txn-ops`.
pub const MOST_OPS: usize = 128;

/// The end of a range without an end, and the smallest key.
const ZERO: Bytes = Bytes::from_static(b"\0");

/// Permission to read or to write a range.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct KeyPermission {
    /// Read or write.
    pub access: KeyAccess,
    /// The first key.
    pub key: Bytes,
    /// The end of the range, in etcd's form; empty for a single key.
    pub range_end: Bytes,
}

/// Read or write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum KeyAccess {
    /// As for a Range.
    Read,
    /// As for a Put or a DeleteRange.
    Write,
}

impl KeyPermission {
    /// Permission for a single key.
    #[must_use]
    pub fn of_key(access: KeyAccess, key: Bytes) -> Self {
        Self { access, key, range_end: Bytes::new() }
    }

    /// Permission for the whole keyspace.
    #[must_use]
    pub fn of_everything(access: KeyAccess) -> Self {
        Self { access, key: ZERO, range_end: ZERO }
    }

    /// Permission for all keys below `name` and a slash, as a lock's and an election's are.
    #[must_use]
    pub fn below_name(access: KeyAccess, name: &[u8]) -> Self {
        // The byte after the slash: no carry is needed.
        let (key, range_end) = ([name, b"/"].concat().into(), [name, b"0"].concat().into());
        Self { access, key, range_end }
    }

    fn operation(&self) -> RequestOp {
        let (key, range_end) = (self.key.clone(), self.range_end.clone());
        let request = match self.access {
            KeyAccess::Read => Request::RequestRange(RangeRequest {
                key,
                range_end,
                limit: 1,
                count_only: true,
                ..RangeRequest::default()
            }),
            KeyAccess::Write => {
                let request = DeleteRangeRequest { key, range_end, ..DeleteRangeRequest::default() };
                Request::RequestDeleteRange(request)
            }
        };
        RequestOp { request: Some(request) }
    }
}

/// The message of the Txn that succeeds if the caller has all of `needed` (at most [`MOST_OPS`]), is refused
/// otherwise, and never changes the store.
#[must_use]
pub fn judge_txn(needed: &[KeyPermission]) -> Bytes {
    let failure = needed.iter().map(KeyPermission::operation).collect();
    TxnRequest { failure, ..TxnRequest::default() }.encode_to_vec().into()
}

/// The kinds of parts that members in use leave unchecked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TxnHoles {
    /// Nested Txns, and `prev_kv` and `lease` of operations.
    pub unchecked_parts: bool,
    /// The top-level ranges of a Txn that writes: all members but the answering one leave these ranges out,
    /// also from their check, and so apply a Txn that the answering member refuses.
    pub ranges_left_out: bool,
}

/// The permissions of a TxnRequest left unchecked by an old etcd.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UncheckedTxnParts {
    /// Permissions for keys and ranges, sorted, each once.
    pub permissions: Vec<KeyPermission>,
    /// Leases named by puts: the user must have permission to write every key of each. Sorted, each once.
    pub leases: Vec<i64>,
}

impl UncheckedTxnParts {
    /// True if etcd checks the whole Txn by itself.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.permissions.is_empty() && self.leases.is_empty()
    }
}

/// Reads the parts of `txn`, a TxnRequest, left unchecked by members with `holes`. Allocates nothing for a
/// flat Txn without such parts.
///
/// # Errors
/// The body is unreadable, or an operation is of an unknown kind: its permissions are unknown.
pub fn unchecked_parts(txn: &[u8], holes: TxnHoles) -> Result<UncheckedTxnParts, ScanFault> {
    let mut unchecked = UncheckedTxnParts::default();
    if holes.ranges_left_out {
        unchecked.add_ranges_beside_writes(txn)?;
    }
    if !holes.unchecked_parts {
        unchecked.sort();
        return Ok(unchecked);
    }
    let mut parts = TxnParts::new(txn);
    while let Some(part) = parts.next().transpose()? {
        let is_nested = parts.is_nested();
        match part {
            TxnPart::Compare(compare) if is_nested => unchecked.add_read(compare, (3, 64))?,
            TxnPart::Range(range) if is_nested => unchecked.add_read(range, (1, 2))?,
            TxnPart::Put(put) => unchecked.add_put(put, is_nested)?,
            TxnPart::DeleteRange(delete) => unchecked.add_delete(delete, is_nested)?,
            TxnPart::UnknownOperation if is_nested => return Err(UNKNOWN_OPERATION),
            _ => {}
        }
    }
    unchecked.sort();
    Ok(unchecked)
}

const UNKNOWN_OPERATION: ScanFault = ScanFault("an operation of an unknown kind");

impl UncheckedTxnParts {
    fn sort(&mut self) {
        self.permissions.sort_unstable();
        self.permissions.dedup();
        self.leases.sort_unstable();
        self.leases.dedup();
    }

    /// Adds permission to read the top-level ranges of both branches, if any part of the Txn writes.
    fn add_ranges_beside_writes(&mut self, txn: &[u8]) -> Result<(), ScanFault> {
        let writes = |part| matches!(part, Ok(TxnPart::Put(_) | TxnPart::DeleteRange(_)));
        if !TxnParts::new(txn).any(writes) {
            return Ok(());
        }
        let mut parts = TxnParts::new(txn);
        while let Some(part) = parts.next().transpose()? {
            if let TxnPart::Range(range) = part
                && !parts.is_nested()
            {
                self.add_read(range, (1, 2))?;
            }
        }
        Ok(())
    }

    /// Adds permission to read the range in these fields of `body`: key and end.
    fn add_read(&mut self, body: &[u8], fields: (u32, u32)) -> Result<(), ScanFault> {
        let RangeFields { key, range_end, .. } = RangeFields::read(body, fields, NONE)?;
        self.permissions.push(KeyPermission { access: KeyAccess::Read, key, range_end });
        Ok(())
    }

    fn add_put(&mut self, put: &[u8], is_nested: bool) -> Result<(), ScanFault> {
        let RangeFields { key, numbers: [lease, prev_kv], .. } = RangeFields::read(put, (1, 0), (3, 4))?;
        if lease != 0 {
            self.leases.push(lease);
        }
        if prev_kv != 0 {
            self.permissions.push(KeyPermission::of_key(KeyAccess::Read, key.clone()));
        }
        if is_nested {
            self.permissions.push(KeyPermission::of_key(KeyAccess::Write, key));
        }
        Ok(())
    }

    fn add_delete(&mut self, delete: &[u8], is_nested: bool) -> Result<(), ScanFault> {
        let RangeFields { key, range_end, numbers: [prev_kv, _] } =
            RangeFields::read(delete, (1, 2), (3, 0))?;
        if prev_kv != 0 {
            let (key, range_end) = (key.clone(), range_end.clone());
            self.permissions.push(KeyPermission { access: KeyAccess::Read, key, range_end });
        }
        if is_nested {
            self.permissions.push(KeyPermission { access: KeyAccess::Write, key, range_end });
        }
        Ok(())
    }
}

/// No numbers are read.
const NONE: (u32, u32) = (0, 0);

/// The range named by an operation or a compare, and two of its numbers.
#[derive(Default)]
struct RangeFields {
    key: Bytes,
    range_end: Bytes,
    numbers: [i64; 2],
}

impl RangeFields {
    /// Reads the fields `key` and `range_end`, and two numbers, by field number; 0 for an absent field.
    fn read(body: &[u8], (key, end): (u32, u32), numbers: (u32, u32)) -> Result<Self, ScanFault> {
        let mut read = Self::default();
        for field in WireFields::new(body) {
            let field = field?;
            match field.value {
                WireValue::Bytes(bytes) if field.number == key => read.key = Bytes::copy_from_slice(bytes),
                WireValue::Bytes(bytes) if field.number == end => {
                    read.range_end = Bytes::copy_from_slice(bytes);
                }
                value if field.number == numbers.0 => read.numbers[0] = value.signed().unwrap_or_default(),
                value if field.number == numbers.1 => read.numbers[1] = value.signed().unwrap_or_default(),
                _ => {}
            }
        }
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::pb::etcdserverpb::{Compare, PutRequest};

    fn operation(request: Request) -> RequestOp {
        RequestOp { request: Some(request) }
    }

    fn put(key: &'static str, lease: i64, prev_kv: bool) -> RequestOp {
        let value = Bytes::from_static(b"v");
        operation(Request::RequestPut(PutRequest {
            key: key.into(),
            value,
            lease,
            prev_kv,
            ..Default::default()
        }))
    }

    fn delete(key: &'static str, end: &'static str, prev_kv: bool) -> RequestOp {
        let request = DeleteRangeRequest { key: key.into(), range_end: end.into(), prev_kv };
        operation(Request::RequestDeleteRange(request))
    }

    fn range(key: &'static str, end: &'static str) -> RequestOp {
        let request = RangeRequest { key: key.into(), range_end: end.into(), ..Default::default() };
        operation(Request::RequestRange(request))
    }

    fn nested(compare: Vec<Compare>, success: Vec<RequestOp>, failure: Vec<RequestOp>) -> RequestOp {
        operation(Request::RequestTxn(TxnRequest { compare, success, failure }))
    }

    fn parts(success: Vec<RequestOp>, failure: Vec<RequestOp>) -> UncheckedTxnParts {
        let compare = vec![Compare { key: "outer".into(), ..Default::default() }];
        let txn = TxnRequest { compare, success, failure };
        unchecked_parts(&txn.encode_to_vec(), OLD).expect("readable")
    }

    const OLD: TxnHoles = TxnHoles { unchecked_parts: true, ranges_left_out: false };
    const SPLIT: TxnHoles = TxnHoles { unchecked_parts: false, ranges_left_out: true };

    #[test]
    fn top_level_ranges_of_both_branches_count_beside_any_write() {
        let read = |key| permission(KeyAccess::Read, key, "");
        let ranges = |success: Vec<RequestOp>, failure: Vec<RequestOp>| {
            let txn = TxnRequest { compare: vec![], success, failure }.encode_to_vec();
            let parts = unchecked_parts(&txn, SPLIT).expect("readable");
            assert!(parts.leases.is_empty());
            parts.permissions
        };
        let within = |operation| nested(vec![], vec![operation], vec![]);
        assert_eq!(
            ranges(vec![put("k", 7, true), range("b", "")], vec![range("a", "")]),
            [read("a"), read("b")]
        );
        assert_eq!(ranges(vec![range("a", "")], vec![delete("k", "", true)]), [read("a")]);
        assert_eq!(ranges(vec![range("a", "")], vec![within(put("k", 0, false))]), [read("a")]);
        assert_eq!(ranges(vec![put("k", 0, false)], vec![within(range("a", ""))]), []);
        assert_eq!(ranges(vec![range("a", "")], vec![range("b", "")]), [], "nothing is written");
    }

    fn permission(access: KeyAccess, key: &'static str, end: &'static str) -> KeyPermission {
        KeyPermission { access, key: key.into(), range_end: end.into() }
    }

    #[test]
    fn a_txn_that_every_etcd_checks_has_no_unchecked_parts() {
        let flat = vec![put("a", 0, false), delete("b", "c", false), range("d", "")];
        assert!(parts(flat.clone(), flat).is_empty());
        assert!(parts(vec![nested(vec![], vec![], vec![])], vec![]).is_empty());
    }

    #[test]
    fn nested_operations_and_compares_need_the_permissions_of_plain_ones() {
        use KeyAccess::{Read, Write};
        let compare = Compare { key: "g".into(), range_end: "h".into(), ..Default::default() };
        let deep =
            nested(vec![compare], vec![range("a", "b"), put("c", 0, false)], vec![delete("d", "e", false)]);
        let expected = [
            permission(Read, "a", "b"),
            permission(Read, "g", "h"),
            permission(Write, "c", ""),
            permission(Write, "d", "e"),
        ];
        assert_eq!(parts(vec![], vec![deep.clone()]).permissions, expected);
        let deeper = nested(vec![], vec![nested(vec![], vec![], vec![deep.clone()])], vec![]);
        assert_eq!(parts(vec![deeper, deep], vec![]).permissions, expected, "each once, from any depth");
    }

    #[test]
    fn previous_values_and_leases_count_at_every_depth() {
        use KeyAccess::{Read, Write};
        let here = vec![put("a", 7, true), put("b", 7, false), delete("c", "d", true)];
        let outer = parts(here.clone(), vec![]);
        assert_eq!(outer.permissions, [permission(Read, "a", ""), permission(Read, "c", "d")]);
        assert_eq!(outer.leases, [7]);
        let inner = parts(vec![], vec![nested(vec![], here, vec![put("e", 9, false)])]);
        let expected = [
            permission(Read, "a", ""),
            permission(Read, "c", "d"),
            permission(Write, "a", ""),
            permission(Write, "b", ""),
            permission(Write, "c", "d"),
            permission(Write, "e", ""),
        ];
        assert_eq!((inner.permissions.as_slice(), inner.leases.as_slice()), (&expected[..], &[7, 9][..]));
    }

    #[test]
    fn the_judge_has_an_empty_success_branch_and_no_compare() {
        let needed = [
            permission(KeyAccess::Read, "a", "b"),
            permission(KeyAccess::Write, "c", ""),
            KeyPermission::of_everything(KeyAccess::Write),
        ];
        let judge = TxnRequest::decode(judge_txn(&needed)).expect("a Txn");
        assert!(judge.compare.is_empty() && judge.success.is_empty());
        let [reads, deletes, all] = &judge.failure[..] else { panic!("{judge:?}") };
        assert!(matches!(&reads.request, Some(Request::RequestRange(range)) if range.key == "a"
            && range.range_end == "b" && range.count_only && !range.serializable));
        assert_eq!(*deletes, delete("c", "", false));
        assert_eq!(*all, delete("\0", "\0", false));
    }

    #[test]
    fn an_operation_of_an_unknown_kind_has_unknown_permissions() {
        // Field 5 of an operation, in a nested Txn: Txn { success { request_txn { success { 5: "" } } } }.
        let unknown = b"\x12\x06\x22\x04\x12\x02\x2a\x00";
        assert_eq!(unchecked_parts(unknown, OLD), Err(UNKNOWN_OPERATION));
        // etcd reads the same bytes: nested Txn { success { 1: "" } }.
        let known = b"\x12\x06\x22\x04\x12\x02\x0a\x00";
        assert_eq!(unchecked_parts(known, OLD).map(|parts| parts.permissions.len()), Ok(1));
    }

    #[test]
    fn as_many_levels_as_a_client_likes_are_read_without_recursion() {
        let mut deep = nested(vec![], vec![put("k", 0, false)], vec![]);
        for _ in 2..900 {
            deep = nested(vec![], vec![], vec![deep]);
        }
        assert_eq!(parts(vec![deep], vec![]).permissions, [permission(KeyAccess::Write, "k", "")]);
    }

    proptest! {
        #[test]
        fn any_bytes_are_read(body: Vec<u8>) {
            let _either = unchecked_parts(&body, OLD);
            let _either = unchecked_parts(&body, SPLIT);
        }
    }
}
