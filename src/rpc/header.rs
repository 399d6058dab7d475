//! The ResponseHeader of a member's answer, as bytes.
//!
//! Owns: finding it (field 1 of every answer that has one) and reading its revision. Must not know which answer it is
//! of. Invariant: what cannot be read is "none", never a guess; a revision that is not there is 0, as protobuf has it.

use bytes::Bytes;

use super::scan::{Fields, Value};

/// How far a member was when it wrote a header.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Of its store; 0 where the answer tells none.
    pub revision: i64,
    /// Of raft.
    pub term: u64,
}

/// How far the member was that wrote `message`.
#[must_use]
pub fn seen(message: &[u8]) -> Option<Seen> {
    let mut seen = Seen::default();
    for field in Fields::new(slice(message)?) {
        let field = field.ok()?;
        match (field.number, field.value) {
            (3, value) => seen.revision = value.signed()?,
            (4, Value::Varint(term)) => seen.term = term,
            _ => {}
        }
    }
    Some(seen)
}

/// The raw header of `message`.
#[must_use]
pub fn of(message: &Bytes) -> Option<Bytes> {
    slice(message).map(|header| message.slice_ref(header))
}

/// The revision in the header of `message`.
#[must_use]
pub fn revision_of(message: &[u8]) -> Option<i64> {
    slice(message).and_then(revision)
}

/// The revision in a raw header; 0 is not written on the wire.
#[must_use]
pub fn revision(header: &[u8]) -> Option<i64> {
    let mut revision = 0;
    for field in Fields::new(header) {
        let field = field.ok()?;
        if field.number == 3 {
            revision = field.value.signed()?;
        }
    }
    Some(revision)
}

fn slice(message: &[u8]) -> Option<&[u8]> {
    // etcd writes fields in order: the first is the header or there is none.
    match Fields::new(message).next()?.ok()? {
        field if field.number == 1 => match field.value {
            Value::Bytes(header) => Some(header),
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
        assert_eq!(of(&answer).map(|raw| raw.to_vec()), Some(header.encode_to_vec()));
        assert_eq!(seen(&answer), Some(Seen { revision: 77, term: 3 }));
        assert_eq!(seen(b"\x0a\x09junk"), None);
        assert_eq!(revision_of(b""), None);
        assert_eq!(revision_of(b"\x0a\x09junk"), None);
    }
}
