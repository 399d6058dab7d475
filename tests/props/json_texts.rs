//! JSON documents of any message, from choices: as clients write them, or with what readers take
//! differently.

use std::collections::HashSet;
use std::fmt::Write as _;
use std::sync::LazyLock;

use data_encoding::{BASE64, BASE64_NOPAD, BASE64URL, BASE64URL_NOPAD};
use prost_reflect::{DescriptorPool, EnumDescriptor, FieldDescriptor, Kind, MessageDescriptor};

use crate::bodies::Style;
use crate::choices::Choices;

static POOL: LazyLock<DescriptorPool> =
    LazyLock::new(|| DescriptorPool::decode(keyward::pb::DESCRIPTORS).expect("descriptors"));

/// Values on which readers of JSON differ, or which only some of them take.
const ODD_VALUES: [&str; 37] = [
    "null",
    "true",
    "[]",
    "{}",
    "[null]",
    "{\"a\":1}",
    "1.5",
    "1e400",
    "-0",
    "-1",
    "1e19",
    "1e3",
    "0.1e1",
    "00",
    "9223372036854775808",
    "18446744073709551615",
    "-9223372036854775809",
    "9007199254740993.0",
    "\"\"",
    "\" 1\"",
    "\"1 2\"",
    "\"1e3\"",
    "\"-1\"",
    "\"-0\"",
    "\"NaN\"",
    "\"NOPUT\"",
    "\"YQ=\"",
    "\"YR==\"",
    "\"YQ==\\n\"",
    "\"YWJj\\n\"",
    "\"+-AA\"",
    "\"\\ud800\"",
    "\"\\ud83d\\ude00\"",
    "\"\\u0000\"",
    "2147483648",
    "\"YQ==Yg==\"",
    "\"_-==\"",
];

/// A document of the message with that name. Txns lie in one another at most `depth` deep.
pub(crate) fn document(choices: &mut Choices<'_>, message: &str, style: Style, depth: u32) -> Vec<u8> {
    let message = POOL.get_message_by_name(message).expect("a message");
    let mut text = String::new();
    put_object(choices, &message, style, depth, &mut text);
    let mut bytes = text.into_bytes();
    if style == Style::Odd && choices.one_in(3) {
        spoil(choices, &mut bytes);
    }
    bytes
}

fn put_object(
    choices: &mut Choices<'_>,
    message: &MessageDescriptor,
    style: Style,
    depth: u32,
    out: &mut String,
) {
    let fields: Vec<FieldDescriptor> = message.fields().collect();
    let (mut written, mut oneofs) = (HashSet::new(), HashSet::new());
    let mut is_first = true;
    out.push('{');
    for _ in 0..choices.below(fields.len() + 2) {
        let unknown = fields.is_empty() || choices.one_in(12);
        let field = (!unknown).then(|| &fields[choices.below(fields.len())]);
        let twice = style == Style::Odd && choices.one_in(16);
        if let Some(field) = field {
            let is_txn = field.kind().as_message().is_some_and(is_txn);
            let oneof = field.containing_oneof().map(|oneof| oneof.full_name().to_owned());
            let is_new = written.insert(field.number()) & oneof.is_none_or(|oneof| oneofs.insert(oneof));
            if (is_txn && depth == 0) || (!is_new && !twice) {
                continue;
            }
        }
        if !std::mem::take(&mut is_first) {
            out.push(',');
        }
        put_space(choices, out);
        put_name(choices, field, out);
        put_space(choices, out);
        out.push(':');
        put_space(choices, out);
        match field {
            None => put_any(choices, 3, out),
            Some(_) if style == Style::Odd && choices.one_in(12) => {
                out.push_str(ODD_VALUES[choices.below(ODD_VALUES.len())]);
            }
            Some(_) if choices.one_in(16) => out.push_str("null"),
            Some(field) if field.is_list() => {
                out.push('[');
                for position in 0..choices.below(4) {
                    if position > 0 {
                        out.push(',');
                    }
                    put_value(choices, field, style, depth, out);
                }
                out.push(']');
            }
            Some(field) => put_value(choices, field, style, depth, out),
        }
    }
    put_space(choices, out);
    out.push('}');
}

fn is_txn(message: &MessageDescriptor) -> bool {
    ["TxnRequest", "TxnResponse"].contains(&message.name())
}

fn put_space(choices: &mut Choices<'_>, out: &mut String) {
    if choices.one_in(8) {
        out.push_str([" ", "\n", "\t", "\r\n "][choices.below(4)]);
    }
}

fn put_name(choices: &mut Choices<'_>, field: Option<&FieldDescriptor>, out: &mut String) {
    let unknown = ["", "x", "Key", "key ", "@type", "range-end", "\\u0000"][choices.below(7)];
    let name = match field {
        None => unknown,
        Some(field) if choices.flag() => field.json_name(),
        Some(field) => field.name(),
    };
    out.push('"');
    match name.chars().next() {
        Some(first) if field.is_some() && choices.one_in(16) => {
            write!(out, "\\u{:04x}{}", u32::from(first), &name[1..]).expect("a string");
        }
        _ => out.push_str(name),
    }
    out.push('"');
}

fn put_value(choices: &mut Choices<'_>, field: &FieldDescriptor, style: Style, depth: u32, out: &mut String) {
    match field.kind() {
        Kind::Message(nested) => {
            put_object(choices, &nested, style, depth.saturating_sub(u32::from(is_txn(&nested))), out);
        }
        Kind::Bool => out.push_str(if choices.flag() { "true" } else { "false" }),
        Kind::Int64 => {
            let value = choices.number().cast_signed();
            put_integer(choices, &value.to_string(), out);
        }
        Kind::Uint64 => {
            let value = choices.number();
            put_integer(choices, &value.to_string(), out);
        }
        Kind::Uint32 => {
            let value = choices.number() & u64::from(u32::MAX);
            put_integer(choices, &value.to_string(), out);
        }
        Kind::String => put_text(choices, out),
        Kind::Bytes => {
            let bytes = choices.bytes(6);
            let text = match choices.below(4) {
                0 => BASE64.encode(bytes),
                1 => BASE64URL.encode(bytes),
                2 => BASE64_NOPAD.encode(bytes),
                _ => BASE64URL_NOPAD.encode(bytes),
            };
            write!(out, "\"{text}\"").expect("a string");
        }
        Kind::Enum(values) => put_enum(choices, &values, out),
        other => panic!("{other:?} of {}", field.full_name()),
    }
}

fn put_integer(choices: &mut Choices<'_>, digits: &str, out: &mut String) {
    let text = match choices.below(8) {
        0..4 => digits.to_owned(),
        4 => format!("{digits}.0"),
        5 => format!("{digits}e0"),
        6 if digits != "0" => format!("{digits}0E-1"),
        _ => format!("{digits}.00e+0"),
    };
    let quote = if choices.flag() { "\"" } else { "" };
    write!(out, "{quote}{text}{quote}").expect("a string");
}

fn put_text(choices: &mut Choices<'_>, out: &mut String) {
    let text = String::from_utf8_lossy(choices.bytes(6)).into_owned();
    if choices.one_in(4) {
        out.push('"');
        text.encode_utf16().for_each(|unit| write!(out, "\\u{unit:04X}").expect("a string"));
        out.push('"');
    } else {
        out.push_str(&serde_json::to_string(&text).expect("a text"));
    }
}

fn put_enum(choices: &mut Choices<'_>, values: &EnumDescriptor, out: &mut String) {
    let known: Vec<_> = values.values().collect();
    let value = &known[choices.below(known.len())];
    match choices.below(4) {
        0 | 1 => write!(out, "\"{}\"", value.name()).expect("a string"),
        2 => write!(out, "{}", value.number()).expect("a string"),
        _ => write!(out, "{}", [9, -1, i32::MIN, i32::MAX][choices.below(4)]).expect("a string"),
    }
}

/// The value of an unknown field.
fn put_any(choices: &mut Choices<'_>, depth: u32, out: &mut String) {
    match choices.below(8) {
        0 if depth > 0 => {
            out.push('[');
            for position in 0..choices.below(3) {
                out.push_str(if position > 0 { "," } else { "" });
                put_any(choices, depth - 1, out);
            }
            out.push(']');
        }
        1 if depth > 0 => {
            out.push_str("{\"key\":");
            put_any(choices, depth - 1, out);
            out.push_str(",\"key\":1}");
        }
        2 => put_text(choices, out),
        3 => out.push_str("null"),
        4 => out.push_str("-1.5e-7"),
        5 => out.push_str("false"),
        _ => put_integer(choices, "18446744073709551616", out),
    }
}

/// As a broken client or a hostile one does.
fn spoil(choices: &mut Choices<'_>, out: &mut Vec<u8>) {
    for _ in 0..=choices.below(3) {
        if out.is_empty() {
            return;
        }
        let at = usize::try_from(choices.number() % out.len() as u64).expect("an index");
        match choices.below(8) {
            0 => out[at] ^= 1 << choices.below(8),
            1 => out.truncate(at),
            2 => out.insert(at, choices.byte()),
            3 => drop(out.remove(at)),
            4 => out.insert(at, b"{}[],:\"\\"[choices.below(8)]),
            5 => {
                let again = out[at..].to_vec();
                out.extend(again);
            }
            6 => {
                let odd = ODD_VALUES[choices.below(ODD_VALUES.len())].bytes();
                drop(out.splice(at..at, odd));
            }
            // A digit becomes another digit, or a dot.
            _ => {
                if let Some(digit) = out[at..].iter_mut().find(|byte| byte.is_ascii_digit()) {
                    *digit = b"0123456789.e"[choices.below(12)];
                }
            }
        }
    }
}
