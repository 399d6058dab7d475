//! Messages of any schema, from choices: as clients write them, or with the oddities on which decoders differ.

use keyward::rpc::scan::MAX_NUMBER;
use keyward::rpc::schema::{FieldKind, MessageId, SchemaField};

use crate::choices::Choices;

/// How far from what clients write.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Style {
    /// Canonical by construction, though perhaps in an order, or with defaults and unknown fields, that no client writes.
    Canonical,
    /// Now and then, something on which decoders differ.
    Odd,
}

/// A message of that schema. Txns lie in one another at most `depth` deep.
pub(crate) fn body(choices: &mut Choices<'_>, schema: MessageId, style: Style, depth: u32) -> Vec<u8> {
    let known = schema.message().fields;
    let mut out = Vec::new();
    let (mut written, mut oneofs) = (0_u64, 0_u64);
    for _ in 0..choices.below(2 * known.len() + 2) {
        if style == Style::Odd && choices.one_in(16) {
            put_oddity(choices, known, &mut out);
            continue;
        }
        if known.is_empty() || choices.one_in(12) {
            put_unknown(choices, known, &mut out);
            continue;
        }
        let place = choices.below(known.len());
        let field = &known[place];
        let nested_txn = field.kind == FieldKind::Message(MessageId::TxnRequest);
        let twice = style == Style::Odd && choices.one_in(16);
        let taken = (!field.repeated && written & (1 << place) != 0)
            || field.oneof.is_some_and(|oneof| oneofs & (1 << oneof) != 0);
        if (taken && !twice) || (nested_txn && depth == 0) {
            continue;
        }
        written |= 1 << place;
        oneofs |= field.oneof.map_or(0, |oneof| 1 << oneof);
        put_field(choices, field, style, if nested_txn { depth - 1 } else { depth }, &mut out);
    }
    if style == Style::Odd && choices.one_in(8) {
        spoil(choices, &mut out);
    }
    out
}

fn put_field(choices: &mut Choices<'_>, field: &SchemaField, style: Style, depth: u32, out: &mut Vec<u8>) {
    let number = u64::from(field.number);
    match field.kind {
        FieldKind::Message(nested) => {
            let nested = body(choices, nested, style, depth);
            put_bytes(number, &nested, out);
        }
        FieldKind::Bytes => put_bytes(number, choices.bytes(6), out),
        FieldKind::Text => {
            let text = choices.bytes(6);
            let lossy = String::from_utf8_lossy(text);
            put_bytes(number, if style == Style::Odd { text } else { lossy.as_bytes() }, out);
        }
        kind if field.repeated && choices.flag() => {
            let mut packed = Vec::new();
            for _ in 0..choices.below(4) {
                put_varint(scalar(choices, kind, style), &mut packed);
            }
            put_bytes(number, &packed, out);
        }
        kind => {
            put_varint(number << 3, out);
            put_varint(scalar(choices, kind, style), out);
        }
    }
}

fn scalar(choices: &mut Choices<'_>, kind: FieldKind, style: Style) -> u64 {
    match kind {
        _ if style == Style::Odd && choices.one_in(6) => choices.number(),
        FieldKind::Bool => u64::from(choices.flag()),
        // Negative ones are ten bytes on the wire, as protobuf has it.
        FieldKind::Enum if choices.one_in(6) => i64::from(i32::MIN).cast_unsigned(),
        FieldKind::Enum => u64::from(choices.byte() % 6),
        _ => choices.number(),
    }
}

/// A field that this schema does not have.
fn put_unknown(choices: &mut Choices<'_>, known: &[SchemaField], out: &mut Vec<u8>) {
    let number = 1 + u32::try_from(choices.number() % u64::from(MAX_NUMBER)).expect("29 bits");
    let number = if known.iter().any(|field| field.number == number) { MAX_NUMBER } else { number };
    let tag = u64::from(number) << 3;
    match choices.below(4) {
        0 => {
            put_varint(tag, out);
            put_varint(choices.number(), out);
        }
        1 => put_bytes(u64::from(number), choices.bytes(5), out),
        2 => {
            put_varint(tag | 1, out);
            out.extend(choices.number().to_le_bytes());
        }
        _ => {
            put_varint(tag | 5, out);
            out.extend(&choices.number().to_le_bytes()[..4]);
        }
    }
}

/// One of the things on which decoders differ, or which some of them refuse.
fn put_oddity(choices: &mut Choices<'_>, known: &[SchemaField], out: &mut Vec<u8>) {
    let number = match known.len() {
        0 => 1,
        count => u64::from(known[choices.below(count)].number),
    };
    match choices.below(8) {
        // gogo takes it for the field itself.
        0 => put_bytes(number + (1 << 32), choices.bytes(4), out),
        // A group, closed or not.
        1 => {
            put_varint(number << 3 | 3, out);
            if choices.flag() {
                put_varint(number << 3 | 4, out);
            }
        }
        // A tag longer than it needs to be.
        2 => {
            put_long_varint(number << 3 | 2, out);
            put_varint(0, out);
        }
        3 => {
            put_varint(number << 3, out);
            put_long_varint(choices.number(), out);
        }
        // A length longer than it needs to be.
        4 => {
            put_varint(number << 3 | 2, out);
            put_long_varint(1, out);
            out.push(choices.byte());
        }
        // Another wire type.
        5 => {
            put_varint(number << 3 | 1, out);
            out.extend(choices.number().to_le_bytes());
        }
        6 => put_bytes(0, choices.bytes(2), out),
        // More than 64 bits.
        _ => {
            put_varint(number << 3, out);
            out.extend([0xff; 9]);
            out.push(choices.byte());
        }
    }
}

/// As a broken peer or a broken wire does.
fn spoil(choices: &mut Choices<'_>, out: &mut Vec<u8>) {
    if out.is_empty() {
        return;
    }
    let at = usize::try_from(choices.number() % out.len() as u64).expect("an index");
    match choices.below(4) {
        0 => out[at] ^= 1 << choices.below(8),
        1 => out.truncate(at),
        2 => out.insert(at, choices.byte()),
        _ => {
            let again = out[at..].to_vec();
            out.extend(again);
        }
    }
}

pub(crate) fn put_bytes(number: u64, value: &[u8], out: &mut Vec<u8>) {
    put_varint(number << 3 | 2, out);
    put_varint(value.len() as u64, out);
    out.extend(value);
}

pub(crate) fn put_varint(mut value: u64, out: &mut Vec<u8>) {
    while value >= 0x80 {
        out.push(value.to_le_bytes()[0] | 0x80);
        value >>= 7;
    }
    out.push(value.to_le_bytes()[0]);
}

/// One byte more than it needs to be.
fn put_long_varint(value: u64, out: &mut Vec<u8>) {
    put_varint(value, out);
    if let Some(last) = out.last_mut() {
        *last |= 0x80;
    }
    out.push(0);
}
