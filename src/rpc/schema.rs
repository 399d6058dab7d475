//! The fields of every message that a client can send, as a table that the build makes from `proto/`.
//!
//! Owns: [`MessageId`] and the kinds of fields. Must not know: how a body is read.

include!(concat!(env!("OUT_DIR"), "/schema.rs"));

/// One message: its full name and its fields, by rising number.
#[derive(Debug)]
pub struct Message {
    /// The name with its package.
    pub name: &'static str,
    /// The fields that we know; etcd grows, so a body may have more.
    pub fields: &'static [Field],
}

/// One field of a message.
#[derive(Clone, Copy, Debug)]
pub struct Field {
    /// Its number on the wire.
    pub number: u32,
    /// What it holds.
    pub kind: Kind,
    /// Whether it may come more than once.
    pub repeated: bool,
    /// The oneof of its message that it belongs to.
    pub oneof: Option<u8>,
}

/// What a field holds, as far as reading it the one right way needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// 0 or 1.
    Bool,
    /// `int64` or `uint64`.
    Integer,
    /// An `int32` on the wire.
    Enum,
    /// Any bytes.
    Bytes,
    /// UTF-8.
    Text,
    /// A message of its own.
    Message(MessageId),
}

impl MessageId {
    /// The message's fields.
    #[must_use]
    pub fn message(self) -> &'static Message {
        &MESSAGES[self as usize]
    }

    /// The field of that number, if we know it.
    #[must_use]
    pub fn field(self, number: u32) -> Option<&'static Field> {
        self.message().fields.iter().find(|field| field.number == number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_known_message_has_its_fields() {
        let op = MessageId::RequestOp.message();
        assert_eq!(op.name, "etcdserverpb.RequestOp");
        let found: Vec<_> = op.fields.iter().map(|f| (f.number, f.oneof, f.repeated)).collect();
        assert_eq!(
            found,
            [(1, Some(0), false), (2, Some(0), false), (3, Some(0), false), (4, Some(0), false)]
        );
        let nested = MessageId::RequestOp.field(4).map(|field| field.kind);
        assert_eq!(nested, Some(Kind::Message(MessageId::TxnRequest)));
        let compare = MessageId::TxnRequest.field(1).unwrap();
        assert!(compare.repeated);
        assert_eq!(MessageId::Compare.field(64).unwrap().kind, Kind::Bytes);
        assert!(MessageId::Compare.field(9).is_none());
    }
}
