//! A namespace: the keys below one prefix, shown to a client as if they were all keys, and its leases.
//!
//! Owns: the splice of requests on the way to a member, and of answers on the way to a client. Must not know:
//! which caller has which namespace. Invariants (docs/decisions.md#d56): a spliced request names keys of the
//! namespace only, and under [`LeaseScope::Own`] leases of the namespace only; a spliced answer shows keys of
//! the namespace only, without the prefix, or is a fault, and lists leases of the namespace only; all other
//! bytes cross as received, unknown fields included.
//!
//! The keys are those of clientv3's `namespace` package, except that the end of a prefix is never too high
//! (see [`Namespace::new`]).
//! <https://github.com/etcd-io/etcd/blob/main/client/v3/namespace/util.go>

mod key_fields;
pub mod lease_ids;
mod splice;

use bytes::Bytes;

use self::key_fields::KeyedMessage;
use self::lease_ids::LeaseScope;
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
    /// The id sent to etcd in place of a lease of another namespace: never a lease.
    no_lease: i64,
}

/// A request on the way to a member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SplicedRequest {
    /// The framed request.
    pub framed: Bytes,
    /// A lease outside of the namespace, as the client has named it.
    pub foreign_lease: Option<i64>,
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
        let no_lease = || lease_ids::no_lease(prefix);
        (!prefix.is_empty()).then(|| Self { prefix: prefix.into(), end: end.into(), no_lease: no_lease() })
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

    /// Splices a request of the schema `request`, which may have `max` bytes afterwards; `None` for a request
    /// without keys and leases, which crosses as received. etcd finds no lease in place of a lease that
    /// `scope` leaves out, and answers as for a lease that is gone.
    ///
    /// # Errors
    /// [`NamespaceFault`].
    pub fn splice_request(
        &self,
        request: MessageId,
        body: &[u8],
        max: usize,
        scope: LeaseScope,
    ) -> Result<Option<SplicedRequest>, NamespaceFault> {
        let Some(message) = KeyedMessage::of_request(request) else { return Ok(None) };
        splice(body, message, SpliceDirection::Upstream(self, scope), max).map(Some)
    }

    /// Splices an answer to a call of `method`. Returns the framed answer; `None` for an answer without keys
    /// and without a list of leases, which crosses as received.
    ///
    /// # Errors
    /// [`NamespaceFault`]: the answer must not be shown.
    pub fn splice_answer(&self, method: &Method, body: &[u8]) -> Result<Option<Bytes>, NamespaceFault> {
        let Some(message) = KeyedMessage::of_answer(method) else { return Ok(None) };
        let spliced = splice(body, message, SpliceDirection::Downstream(self), usize::MAX)?;
        Ok(Some(spliced.framed))
    }

    /// True if answers to `method` show keys, or list leases.
    #[must_use]
    pub fn has_keyed_answers(method: &Method) -> bool {
        KeyedMessage::of_answer(method).is_some()
    }
}

#[cfg(test)]
mod tests;
