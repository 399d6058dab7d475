//! The ResponseHeader of a member's answer, as bytes.
//!
//! Owns: finding the header (field 1 of every answer with a header) and reading its revision. Must not know:
//! the answer's type. Invariant: an unreadable header is `None`, never a guess; an absent revision is 0, as
//! in protobuf.

use bytes::Bytes;

use super::scan::{WireFields, WireValue};

/// A member's revision and raft term when writing a header.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AnswerProgress {
    /// The store's revision; 0 if the answer has none.
    pub revision: i64,
    /// The raft term.
    pub term: u64,
}

/// Returns the revision and raft term in the header of `message`.
#[must_use]
pub fn progress(message: &[u8]) -> Option<AnswerProgress> {
    let mut seen = AnswerProgress::default();
    for field in WireFields::new(slice(message)?) {
        let field = field.ok()?;
        match (field.number, field.value) {
            (3, value) => seen.revision = value.signed()?,
            (4, WireValue::Varint(term)) => seen.term = term,
            _ => {}
        }
    }
    Some(seen)
}

/// Returns the raw header of `message`.
#[must_use]
pub fn raw_header(message: &Bytes) -> Option<Bytes> {
    slice(message).map(|header| message.slice_ref(header))
}

/// Returns the revision in the header of `message`.
#[must_use]
pub fn revision_of(message: &[u8]) -> Option<i64> {
    slice(message).and_then(revision)
}

/// Returns the revision in a raw header; 0 is not written on the wire.
#[must_use]
pub fn revision(header: &[u8]) -> Option<i64> {
    let mut revision = 0;
    for field in WireFields::new(header) {
        let field = field.ok()?;
        if field.number == 3 {
            revision = field.value.signed()?;
        }
    }
    Some(revision)
}

fn slice(message: &[u8]) -> Option<&[u8]> {
    // etcd writes fields in order: a header comes first or is absent.
    match WireFields::new(message).next()?.ok()? {
        field if field.number == 1 => match field.value {
            WireValue::Bytes(header) => Some(header),
            _ => None,
        },
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::*;
    use crate::pb::etcdserverpb::{PutResponse, ResponseHeader};

    #[test]
    fn the_revision_of_an_answer_is_found() {
        let header = ResponseHeader { cluster_id: 1, member_id: 2, revision: 77, raft_term: 3 };
        let answer = Bytes::from(PutResponse { header: Some(header), prev_kv: None }.encode_to_vec());
        assert_eq!(revision_of(&answer), Some(77));
        assert_eq!(raw_header(&answer).map(|raw| raw.to_vec()), Some(header.encode_to_vec()));
        assert_eq!(progress(&answer), Some(AnswerProgress { revision: 77, term: 3 }));
        assert_eq!(progress(b"\x0a\x09junk"), None);
        assert_eq!(revision_of(b""), None);
        assert_eq!(revision_of(b"\x0a\x09junk"), None);
    }
}
