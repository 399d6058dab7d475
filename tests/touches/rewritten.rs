//! The same message in other bytes: in an order, with defaults, unknown fields and long varints that no client writes, and now and then
//! with what decoders read differently.

use keyward::rpc::scan::{WireFields, WireValue};
use keyward::rpc::schema::{FieldKind, MessageId, SchemaField};

use crate::bodies::put_varint;
use crate::choices::Choices;

/// How often a message gets a fault, once in so many.
const FAULT: usize = 32;

/// Writes `body` again.
pub(crate) fn rewritten(choices: &mut Choices<'_>, schema: MessageId, body: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    let mut fields: Vec<_> = WireFields::new(body).map(|field| field.expect("prost wrote it")).collect();
    if fields.len() > 1 && choices.one_in(4) {
        let at = choices.below(fields.len() - 1);
        fields.swap(at, at + 1);
    }
    for field in &fields {
        put(choices, schema, field.number, field.value, &mut out);
        if choices.one_in(FAULT) {
            put(choices, schema, field.number, field.value, &mut out);
        }
    }
    let known = schema.message().fields;
    if !known.is_empty() && choices.one_in(5) {
        let default = &known[choices.below(known.len())];
        let is_absent = fields.iter().all(|field| field.number != default.number);
        if is_absent && default.oneof.is_none() {
            put_default(choices, default, &mut out);
        }
    }
    if choices.one_in(10) {
        put_unknown(choices, &mut out);
    }
    if !known.is_empty() && choices.one_in(FAULT) {
        let field = &known[choices.below(known.len())];
        put_fault(choices, field, &mut out);
    }
    out
}

fn put(choices: &mut Choices<'_>, schema: MessageId, number: u32, value: WireValue<'_>, out: &mut Vec<u8>) {
    let tag = u64::from(number) << 3;
    match value {
        WireValue::Varint(value) => {
            put_padded(choices, tag, 5, out);
            put_padded(choices, value, 10, out);
        }
        WireValue::Bytes(bytes) => {
            let nested = match schema.field(number).map(|field| field.kind) {
                Some(FieldKind::Message(nested)) => Some(rewritten(choices, nested, bytes)),
                _ => None,
            };
            let bytes = nested.as_deref().unwrap_or(bytes);
            put_padded(choices, tag | 2, 5, out);
            put_padded(choices, bytes.len() as u64, 10, out);
            out.extend(bytes);
        }
        WireValue::Fixed64(value) => {
            put_varint(tag | 1, out);
            out.extend(value.to_le_bytes());
        }
        WireValue::Fixed32(value) => {
            put_varint(tag | 5, out);
            out.extend(value.to_le_bytes());
        }
    }
}

/// A varint, perhaps in more bytes than it needs, up to `most`.
fn put_padded(choices: &mut Choices<'_>, value: u64, most: usize, out: &mut Vec<u8>) {
    let start = out.len();
    put_varint(value, out);
    let free = most.saturating_sub(out.len() - start);
    if free > 0 && choices.one_in(12) {
        let more = 1 + choices.below(free);
        *out.last_mut().expect("a varint has a byte") |= 0x80;
        out.resize(out.len() + more - 1, 0x80);
        out.push(0);
    }
}

/// A field that is present with the value that it has when absent.
fn put_default(choices: &mut Choices<'_>, field: &SchemaField, out: &mut Vec<u8>) {
    let is_number = matches!(field.kind, FieldKind::Bool | FieldKind::Integer | FieldKind::Enum);
    let wire_type = if is_number && !field.repeated { 0 } else { 2 };
    put_padded(choices, u64::from(field.number) << 3 | wire_type, 5, out);
    put_padded(choices, 0, 10, out);
}

fn put_unknown(choices: &mut Choices<'_>, out: &mut Vec<u8>) {
    let number = 200 + u64::from(choices.byte());
    match choices.below(3) {
        0 => {
            put_varint(number << 3, out);
            put_varint(choices.number(), out);
        }
        1 => {
            put_varint(number << 3 | 5, out);
            out.extend([choices.byte(); 4]);
        }
        _ => {
            let bytes = choices.bytes(5);
            put_varint(number << 3 | 2, out);
            put_varint(bytes.len() as u64, out);
            out.extend(bytes);
        }
    }
}

/// A fault: another value of a known field, another wire type, a field number above 32 bits, a flipped bit, or a missing end.
fn put_fault(choices: &mut Choices<'_>, field: &SchemaField, out: &mut Vec<u8>) {
    let number = u64::from(field.number);
    match choices.below(6) {
        0 | 1 => {
            let bytes = choices.bytes(6);
            put_varint(number << 3 | 2, out);
            put_varint(bytes.len() as u64, out);
            out.extend(bytes);
        }
        2 => {
            put_varint(number << 3, out);
            put_varint(choices.number(), out);
        }
        3 => {
            put_varint((number + (1 << 32)) << 3 | 2, out);
            put_varint(1, out);
            out.push(b'a');
        }
        4 if !out.is_empty() => {
            let at = choices.below(out.len().min(256));
            out[at] ^= 1 << choices.below(8);
        }
        _ => drop(out.pop()),
    }
}
