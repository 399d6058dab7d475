//! The reasons for refusing a JSON document.
//!
//! Invariant: the text of a fault has names of known fields and positions in lists, and nothing else of the
//! document: values may be secrets, and unknown names come from a stranger.

use std::fmt;

/// A refused document: the place and the reason.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct JsonFault {
    /// The field with the fault, as `success[0].request_put.key`; empty for the document itself.
    pub path: String,
    /// The reason.
    pub reason: JsonFaultReason,
}

impl fmt::Display for JsonFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.path.is_empty() {
            write!(f, "JSON: {}", self.reason)
        } else {
            write!(f, "JSON field {}: {}", self.path, self.reason)
        }
    }
}

/// A reason for refusing a document.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, thiserror::Error)]
pub enum JsonFaultReason {
    /// The bytes are no UTF-8.
    #[error("not UTF-8")]
    NotUtf8,
    /// The document breaks the grammar of JSON: also lone surrogates and raw control characters in strings.
    #[error("not valid JSON")]
    Syntax,
    /// The document ends within a value.
    #[error("the document ends early")]
    Incomplete,
    /// Bytes after the document, perhaps a second document.
    #[error("more bytes after the document")]
    Trailing,
    /// More nesting than [`MAX_JSON_DEPTH`](super::MAX_JSON_DEPTH).
    #[error("nested too deeply")]
    TooDeep,
    /// A document longer than the caller's limit.
    #[error("the document is too long")]
    TooLong,
    /// A field by the same name twice, or once by each of its two names.
    #[error("given twice")]
    Twice,
    /// A second member of a oneof.
    #[error("another field of the same oneof is given too")]
    SecondOfOneof,
    /// A name in brackets: an extension, which no message of etcd has.
    #[error("extensions are not known")]
    Extension,
    /// Another JSON type than the field takes.
    #[error("wrong JSON type")]
    WrongType,
    /// A number with a fraction, or a text that is no number.
    #[error("not an integer")]
    NotInteger,
    /// An integer outside of the field's range.
    #[error("integer out of range")]
    OutOfRange,
    /// A text that is neither standard nor URL-safe base64.
    #[error("not base64")]
    NotBase64,
    /// An enum without a value of this name.
    #[error("no such enum value")]
    UnknownEnumName,
}
