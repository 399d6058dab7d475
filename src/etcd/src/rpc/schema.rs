//! The fields of every message sent by clients, as a table generated from `proto/` by the build.
//!
//! Owns: [`MessageId`] and the kinds of fields. Must not know: how a body is read.

include!(concat!(env!("OUT_DIR"), "/schema.rs"));

/// A message: its full name, and its fields by rising number.
#[derive(Debug)]
pub struct MessageSchema {
    /// The name with its package.
    pub name: &'static str,
    /// The known fields. etcd grows, so a body may have more.
    pub fields: &'static [SchemaField],
}

/// A field of a message.
#[derive(Clone, Copy, Debug)]
pub struct SchemaField {
    /// The field's number on the wire.
    pub number: u32,
    /// The kind of value.
    pub kind: FieldKind,
    /// True if the field may occur several times.
    pub repeated: bool,
    /// Index of the field's oneof in the message, if any.
    pub oneof: Option<u8>,
}

/// The kind of a field's value, as far as needed for an unambiguous reading.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FieldKind {
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
    /// A nested message.
    Message(MessageId),
}

impl MessageId {
    /// Returns the message's name and fields.
    #[must_use]
    pub fn message(self) -> &'static MessageSchema {
        &MESSAGES[self as usize]
    }

    /// Returns the field with the given number, if known.
    #[must_use]
    pub fn field(self, number: u32) -> Option<&'static SchemaField> {
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
        assert_eq!(nested, Some(FieldKind::Message(MessageId::TxnRequest)));
        let compare = MessageId::TxnRequest.field(1).unwrap();
        assert!(compare.repeated);
        assert_eq!(MessageId::Compare.field(64).unwrap().kind, FieldKind::Bytes);
        assert!(MessageId::Compare.field(9).is_none());
    }
}
