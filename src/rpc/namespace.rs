//! A namespace: the keys below one prefix, shown to a client as if they were all keys.
//!
//! Owns: the splice of requests on the way to a member, and of answers on the way to a client. Must not know:
//! which caller has which namespace. Invariants (docs/decisions.md#d56): a spliced request names keys of the
//! namespace only; a spliced answer shows keys of the namespace only, without the prefix, or is a fault; all
//! other bytes cross as received, unknown fields included.
//!
//! The keys are those of clientv3's `namespace` package, except that the end of a prefix is never too high
//! (see [`Namespace::new`]).
//! <https://github.com/etcd-io/etcd/blob/main/client/v3/namespace/util.go>

mod key_fields;
mod splice;

use bytes::Bytes;

use self::key_fields::KeyedMessage;
use self::splice::{SpliceDirection, splice};
use super::key_range::{KeyRange, RangeEnd, end_of_prefix};
use super::method::Method;
use super::schema::MessageId;

/// The keys below a prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Namespace {
    prefix: Box<[u8]>,
    /// The `range_end` of a range up to the last key of the namespace.
    end: Box<[u8]>,
}

/// Why a message cannot cross the border of a namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NamespaceFault {
    /// The bytes have no single reading.
    #[error("a message that cannot be read")]
    Unreadable,
    /// A Txn or a watch request with an operation unknown here: its keys are unknown too.
    #[error("an operation unknown to Keyward, which cannot be confined to a namespace")]
    UnknownOperation,
    /// A request without the key needed by etcd.
    #[error("a request without a key")]
    EmptyKey,
    /// The message with its prefixes has this many bytes, above the limit.
    #[error("a request too large with the prefix of its namespace")]
    TooLarge(usize),
    /// An answer with a key outside of the namespace.
    #[error("an answer with a key outside of the namespace")]
    Outside,
}

impl Namespace {
    /// The namespace of a prefix; `None` for an empty prefix, which confines nobody.
    ///
    /// The end of a prefix with 0xff as its last byte is the next shorter key that no key of the namespace
    /// reaches. clientv3's package takes a longer end, `b\0` after `a\xff`, and so shows the foreign key `b`.
    #[must_use]
    pub fn new(prefix: &[u8]) -> Option<Self> {
        let end = end_of_prefix(prefix).unwrap_or_else(|| vec![0]);
        (!prefix.is_empty()).then(|| Self { prefix: prefix.into(), end: end.into() })
    }

    /// The prefix of every key.
    #[must_use]
    pub fn prefix(&self) -> &[u8] {
        &self.prefix
    }

    /// True if every key of the range has the prefix.
    #[must_use]
    pub fn contains(&self, range: &KeyRange<'_>) -> bool {
        if !range.start.starts_with(&self.prefix) {
            return false;
        }
        match (range.end, &*self.end) {
            (RangeEnd::StartKey, _) | (RangeEnd::Unbounded | RangeEnd::Before(_), [0]) => true,
            (RangeEnd::Before(end), last) => end <= last,
            (RangeEnd::Unbounded, _) => false,
        }
    }

    /// Splices a request of the schema `request`, which may have `max` bytes afterwards. Returns the framed
    /// request; `None` for a request without keys, which crosses as received.
    ///
    /// # Errors
    /// [`NamespaceFault`].
    pub fn splice_request(
        &self,
        request: MessageId,
        body: &[u8],
        max: usize,
    ) -> Result<Option<Bytes>, NamespaceFault> {
        let Some(message) = KeyedMessage::of_request(request) else { return Ok(None) };
        splice(body, message, SpliceDirection::Upstream(self), max).map(Some)
    }

    /// Splices an answer to a call of `method`. Returns the framed answer; `None` for an answer without keys,
    /// which crosses as received.
    ///
    /// # Errors
    /// [`NamespaceFault`]: the answer must not be shown.
    pub fn splice_answer(&self, method: &Method, body: &[u8]) -> Result<Option<Bytes>, NamespaceFault> {
        let Some(message) = KeyedMessage::of_answer(method) else { return Ok(None) };
        splice(body, message, SpliceDirection::Downstream(self), usize::MAX).map(Some)
    }

    /// True if answers to `method` show keys.
    #[must_use]
    pub fn has_keyed_answers(method: &Method) -> bool {
        KeyedMessage::of_answer(method).is_some()
    }
}

#[cfg(test)]
mod tests;
