//! The splice of a message: fields with keys and leases are replaced, and the lengths around them.
//!
//! Owns: the walk through nested messages, and the writing. Must not know: which fields hold keys or leases.
//! Invariants: time and memory are linear in the message and its inserted prefixes, however deep its Txns are
//! nested; nothing is recursive.

use std::ops::Range;

use bytes::{BufMut, Bytes, BytesMut};

use super::key_fields::{EmptyKey, FieldRole, KeyedMessage};
use super::lease_ids::LeaseScope;
use super::{Namespace, NamespaceFault, SplicedRequest};
use crate::rpc::frame;
use crate::rpc::scan::{
    ScanFault, WireField, WireFields, append_length, append_varint_field, length_of_prefix,
    length_of_varint_field,
};

/// The way of a message.
#[derive(Clone, Copy)]
pub(super) enum SpliceDirection<'n> {
    /// To a member: keys get the prefix, and leases outside of the scope become no lease.
    Upstream(&'n Namespace, LeaseScope),
    /// To a client: keys lose the prefix.
    Downstream(&'n Namespace),
}

/// A piece of the spliced message.
#[derive(Clone, Copy)]
enum Piece {
    /// These bytes of the received message.
    Copy { from: u32, to: u32 },
    /// The namespace's prefix.
    Prefix,
    /// The end of the namespace.
    End,
    /// The byte zero: the first key.
    Zero,
    /// The beginning of a field of bytes with this number.
    Open(u32),
    /// The end of the field opened last.
    Close,
    /// The field with this number with the id that is never a lease.
    NoLease(u32),
}

/// A message being walked through.
struct MessageLevel<'a> {
    kind: KeyedMessage,
    fields: WireFields<'a>,
    /// The place of the message in the whole message.
    base: usize,
    /// The required key was found.
    has_key: bool,
}

/// The pieces found so far.
struct Splicing<'n> {
    direction: SpliceDirection<'n>,
    pieces: Vec<Piece>,
    /// Bytes of all pieces without the beginnings of fields.
    length: usize,
    max: usize,
    /// A lease outside of the namespace.
    foreign_lease: Option<i64>,
}

/// Splices `body`, a message of the given kind. The result has at most `max` bytes without its frame.
pub(super) fn splice(
    body: &[u8],
    kind: KeyedMessage,
    direction: SpliceDirection<'_>,
    max: usize,
) -> Result<SplicedRequest, NamespaceFault> {
    if u32::try_from(body.len()).is_err() {
        return Err(NamespaceFault::Unreadable);
    }
    let mut splicing = Splicing { direction, pieces: Vec::new(), length: 0, max, foreign_lease: None };
    let mut level = MessageLevel { kind, fields: WireFields::new(body), base: 0, has_key: false };
    // The enclosing messages lie on the heap: a client determines their number.
    let mut enclosing = Vec::new();
    loop {
        let Some(field) = level.fields.next() else {
            splicing.end_message(&level)?;
            let Some(outer) = enclosing.pop() else { break };
            splicing.pieces.push(Piece::Close);
            level = outer;
            continue;
        };
        if let Some(nested) = splicing.take(&mut level, &field?)? {
            enclosing.push(std::mem::replace(&mut level, nested));
        }
    }
    let foreign_lease = splicing.foreign_lease;
    splicing.write(body).map(|framed| SplicedRequest { framed, foreign_lease })
}

impl From<ScanFault> for NamespaceFault {
    fn from(_: ScanFault) -> Self {
        Self::Unreadable
    }
}

impl Splicing<'_> {
    /// Takes a field of the message `level`. Returns a nested message to be walked through next.
    fn take<'a>(
        &mut self,
        level: &mut MessageLevel<'a>,
        field: &WireField<'a>,
    ) -> Result<Option<MessageLevel<'a>>, NamespaceFault> {
        let role = level.kind.role(field.number);
        let whole = level.base + field.range.start..level.base + field.range.end;
        let bytes = match role {
            FieldRole::Plain => return self.copy(whole).map(|()| None),
            FieldRole::Lease => {
                let lease = field.value.signed().ok_or(NamespaceFault::Unreadable)?;
                return self.lease(field.number, lease, whole).map(|()| None);
            }
            FieldRole::Unknown => return Err(NamespaceFault::UnknownOperation),
            _ => field.value.bytes().ok_or(NamespaceFault::Unreadable)?,
        };
        let at = whole.end - bytes.len()..whole.end;
        let number = field.number;
        match role {
            FieldRole::Message(kind) => {
                self.pieces.push(Piece::Open(number));
                let fields = WireFields::new(bytes);
                return Ok(Some(MessageLevel { kind, fields, base: at.start, has_key: false }));
            }
            FieldRole::Key(empty) => {
                level.has_key |= level.kind.required_key().is_some_and(|(required, _)| required == number);
                self.key(number, bytes, at, empty)?;
            }
            FieldRole::RangeEnd => self.range_end(number, bytes, at)?,
            FieldRole::ListedKey => match self.key(number, bytes, at, EmptyKey::Refused) {
                Ok(()) | Err(NamespaceFault::Outside) => {}
                Err(fault) => return Err(fault),
            },
            FieldRole::ListedLease if self.lists(bytes)? => self.copy(whole)?,
            FieldRole::ListedLease | FieldRole::Plain | FieldRole::Lease | FieldRole::Unknown => {}
        }
        Ok(None)
    }

    /// A lease; 0 is no lease. An answer shows leases as they are, since its keys are of the namespace.
    fn lease(&mut self, number: u32, lease: i64, at: Range<usize>) -> Result<(), NamespaceFault> {
        let SpliceDirection::Upstream(namespace, scope) = self.direction else {
            return self.copy(at);
        };
        if lease == 0 || namespace.has_lease(lease) {
            return self.copy(at);
        }
        self.foreign_lease = Some(lease);
        match scope {
            LeaseScope::Any => self.copy(at),
            LeaseScope::Own => {
                let length = length_of_varint_field(number, namespace.no_lease.cast_unsigned());
                self.insert(Piece::NoLease(number), length)
            }
        }
    }

    /// True if the lease of a message in an answer is shown.
    fn lists(&self, message: &[u8]) -> Result<bool, NamespaceFault> {
        let SpliceDirection::Downstream(namespace) = self.direction else {
            return Err(NamespaceFault::Unreadable);
        };
        let mut lease = 0;
        for field in WireFields::new(message) {
            let field = field?;
            if field.number == 1 {
                lease = field.value.signed().ok_or(NamespaceFault::Unreadable)?;
            }
        }
        Ok(namespace.has_lease(lease))
    }

    /// Adds the required key of a message that has none.
    fn end_message(&mut self, level: &MessageLevel<'_>) -> Result<(), NamespaceFault> {
        match level.kind.required_key().filter(|_| !level.has_key) {
            Some((number, empty)) => self.key(number, b"", 0..0, empty),
            None => Ok(()),
        }
    }

    fn key(
        &mut self,
        number: u32,
        key: &[u8],
        at: Range<usize>,
        empty: EmptyKey,
    ) -> Result<(), NamespaceFault> {
        match self.direction {
            SpliceDirection::Upstream(namespace, _) => {
                if key.is_empty() && empty == EmptyKey::Refused {
                    return Err(NamespaceFault::EmptyKey);
                }
                self.pieces.push(Piece::Open(number));
                self.insert(Piece::Prefix, namespace.prefix.len())?;
                if key.is_empty() && empty == EmptyKey::First {
                    self.insert(Piece::Zero, 1)?;
                }
                self.copy(at)?;
            }
            SpliceDirection::Downstream(namespace) => {
                if !key.starts_with(&namespace.prefix) {
                    return Err(NamespaceFault::Outside);
                }
                self.pieces.push(Piece::Open(number));
                self.copy(at.start + namespace.prefix.len()..at.end)?;
            }
        }
        self.pieces.push(Piece::Close);
        Ok(())
    }

    fn range_end(&mut self, number: u32, end: &[u8], at: Range<usize>) -> Result<(), NamespaceFault> {
        let SpliceDirection::Upstream(namespace, _) = self.direction else {
            return Err(NamespaceFault::Unreadable);
        };
        self.pieces.push(Piece::Open(number));
        match end {
            // The single key.
            b"" => {}
            b"\0" => self.insert(Piece::End, namespace.end.len())?,
            _ => {
                self.insert(Piece::Prefix, namespace.prefix.len())?;
                self.copy(at)?;
            }
        }
        self.pieces.push(Piece::Close);
        Ok(())
    }

    fn copy(&mut self, at: Range<usize>) -> Result<(), NamespaceFault> {
        let short = |place| u32::try_from(place).map_err(|_| NamespaceFault::Unreadable);
        let (from, to) = (short(at.start)?, short(at.end)?);
        match self.pieces.last_mut() {
            Some(Piece::Copy { to: end, .. }) if *end == from => *end = to,
            _ => self.pieces.push(Piece::Copy { from, to }),
        }
        self.grow(at.len())
    }

    fn insert(&mut self, piece: Piece, length: usize) -> Result<(), NamespaceFault> {
        self.pieces.push(piece);
        self.grow(length)
    }

    /// Counts bytes. A request of many small keys is refused before the prefixes take much memory.
    fn grow(&mut self, bytes: usize) -> Result<(), NamespaceFault> {
        self.length += bytes;
        if self.length > self.max { Err(NamespaceFault::TooLarge(self.length)) } else { Ok(()) }
    }

    /// Writes the pieces in a frame.
    fn write(self, body: &[u8]) -> Result<Bytes, NamespaceFault> {
        let (SpliceDirection::Upstream(namespace, _) | SpliceDirection::Downstream(namespace)) =
            self.direction;
        let no_lease = namespace.no_lease.cast_unsigned();
        // From the last piece to the first: the length of a field is known at its beginning.
        let (mut total, mut ends, mut lengths) = (0, Vec::new(), Vec::new());
        for piece in self.pieces.iter().rev() {
            match *piece {
                Piece::Copy { from, to } => total += (to - from) as usize,
                Piece::Prefix => total += namespace.prefix.len(),
                Piece::End => total += namespace.end.len(),
                Piece::Zero => total += 1,
                Piece::NoLease(number) => total += length_of_varint_field(number, no_lease),
                Piece::Close => ends.push(total),
                Piece::Open(number) => {
                    let length = total - ends.pop().unwrap_or_default();
                    lengths.push(length);
                    total += length_of_prefix(number, length);
                }
            }
        }
        if total > self.max || u32::try_from(total).is_err() {
            return Err(NamespaceFault::TooLarge(total));
        }
        let mut out = BytesMut::with_capacity(frame::PREFIX + total);
        out.put_bytes(0, frame::PREFIX);
        for piece in self.pieces {
            match piece {
                Piece::Copy { from, to } => out.put_slice(&body[from as usize..to as usize]),
                Piece::Prefix => out.put_slice(&namespace.prefix),
                Piece::End => out.put_slice(&namespace.end),
                Piece::Zero => out.put_u8(0),
                Piece::NoLease(number) => append_varint_field(&mut out, number, no_lease),
                Piece::Open(number) => append_length(&mut out, number, lengths.pop().unwrap_or_default()),
                Piece::Close => {}
            }
        }
        debug_assert_eq!(out.len(), frame::PREFIX + total, "the bytes counted before");
        frame::write_prefix(&mut out);
        Ok(out.freeze())
    }
}
