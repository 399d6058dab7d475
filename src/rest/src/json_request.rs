//! A JSON document becomes the bytes of a protobuf message, strictly.
//!
//! Owns: the rules of acceptance. Must not know: the route and the caller. `serde_json` reads the grammar;
//! here every value is judged by its field. The reader of `prost-reflect` is not used: it takes the last of
//! two equal names, rounds integers written with a fraction or an exponent, and skips unknown enum names.
//! Invariants: see [`rest`](super). A name occurs once, by whichever of its two spellings; of a oneof at
//! most one member occurs; `null` is an absent field; unknown fields are skipped, and still have to be
//! JSON. A document is read once: the time is linear in its length, times the depth of its messages for
//! copying.
//!
//! Follows `protobuf-go/encoding/protojson/decode.go`. Refused beyond it: unknown enum names, and anything
//! after a number in a string.

use std::borrow::Cow;
use std::fmt;

use bytes::BytesMut;
use serde::de::{Deserialize as _, DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

use super::MAX_JSON_DEPTH;
use super::json_bytes::bytes_of_base64;
use super::json_fault::{JsonFault, JsonFaultReason};
use super::json_integer::integer;
use super::message_fields::{EnumNames, FieldType, MessageField, MessageFields, nested};
use keyward_etcd::rpc::scan::{append_bytes_field, append_length, append_present_varint, append_varint};

/// Reads a JSON document as a message. An empty document is an empty message, as for etcd.
///
/// # Errors
/// The first fault. Its text has no value of the document.
pub fn message_of_json(json: &[u8], message: &'static MessageFields) -> Result<BytesMut, JsonFault> {
    let document = |reason| JsonFault { path: String::new(), reason };
    let text = std::str::from_utf8(json).map_err(|_| document(JsonFaultReason::NotUtf8))?;
    let mut reading = DocumentReading::default();
    if text.bytes().all(|byte| b" \t\r\n".contains(&byte)) {
        return Ok(reading.out);
    }
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let read = MessageSeed { message, reading: &mut reading }.deserialize(&mut deserializer);
    match read {
        Ok(Presence::Given) => {}
        Ok(Presence::Null) => return Err(document(JsonFaultReason::WrongType)),
        Err(error) => return Err(reading.fault(&error)),
    }
    deserializer.end().map_err(|_| document(JsonFaultReason::Trailing))?;
    Ok(reading.out)
}

/// Whether a value was there, or was `null`.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Presence {
    Given,
    Null,
}

/// The state of reading one document.
#[derive(Default)]
struct DocumentReading {
    out: BytesMut,
    depth: usize,
    /// Fields and list positions down to the value being read. After an error, the place of the fault.
    path: Vec<PathStep>,
    /// The reason of the error, unless `serde_json` found it.
    reason: Option<JsonFaultReason>,
}

enum PathStep {
    Field(&'static str),
    Position(usize),
}

impl DocumentReading {
    /// Notes the reason. The returned error only ends the reading; its text is never shown.
    fn refuse<E: serde::de::Error>(&mut self, reason: JsonFaultReason) -> E {
        self.reason = Some(reason);
        E::custom("refused")
    }

    /// Enters an object or array.
    fn descend<E: serde::de::Error>(&mut self) -> Result<(), E> {
        self.depth += 1;
        if self.depth > MAX_JSON_DEPTH { Err(self.refuse(JsonFaultReason::TooDeep)) } else { Ok(()) }
    }

    fn fault(self, error: &serde_json::Error) -> JsonFault {
        let reason = self.reason.unwrap_or(match error.classify() {
            serde_json::error::Category::Eof => JsonFaultReason::Incomplete,
            // A value for which the visitor has no method.
            serde_json::error::Category::Data => JsonFaultReason::WrongType,
            _ => JsonFaultReason::Syntax,
        });
        let mut path = String::new();
        for step in &self.path {
            match step {
                PathStep::Field(name) if path.is_empty() => path.push_str(name),
                PathStep::Field(name) => path.extend([".", name]),
                PathStep::Position(position) => path.push_str(&format!("[{position}]")),
            }
        }
        JsonFault { path, reason }
    }
}

/// Reads an object as the fields of a message.
struct MessageSeed<'a> {
    message: &'static MessageFields,
    reading: &'a mut DocumentReading,
}

impl<'de> DeserializeSeed<'de> for MessageSeed<'_> {
    type Value = Presence;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Presence, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for MessageSeed<'_> {
    type Value = Presence;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Presence, A::Error> {
        let Self { message, reading } = self;
        reading.descend()?;
        let (mut fields, mut oneofs) = (0_u64, 0_u64);
        while let Some(name) = map.next_key_seed(NameSeed)? {
            let Some(position) = message.by_name(&name) else {
                if name.starts_with('[') && name.ends_with(']') {
                    return Err(reading.refuse(JsonFaultReason::Extension));
                }
                map.next_value_seed(SkippedValue { reading: &mut *reading })?;
                continue;
            };
            let field = &message.fields()[position];
            reading.path.push(PathStep::Field(&field.name));
            if !set_bit_once(&mut fields, position) {
                return Err(reading.refuse(JsonFaultReason::Twice));
            }
            let start = reading.out.len();
            let presence = map.next_value_seed(FieldSeed { field, reading: &mut *reading })?;
            let is_second = presence == Presence::Given
                && field.oneof.is_some_and(|oneof| !set_bit_once(&mut oneofs, oneof));
            if is_second {
                return Err(reading.refuse(JsonFaultReason::SecondOfOneof));
            }
            debug_assert!(presence == Presence::Given || reading.out.len() == start);
            reading.path.pop();
        }
        reading.depth -= 1;
        Ok(Presence::Given)
    }

    fn visit_unit<E: serde::de::Error>(self) -> Result<Presence, E> {
        Ok(Presence::Null)
    }
}

/// Sets bit `place`. Returns true if the bit was not set before.
fn set_bit_once(seen: &mut u64, place: usize) -> bool {
    let bit = 1u64 << place;
    let first = *seen & bit == 0;
    *seen |= bit;
    first
}

/// Reads the value of a field, and appends the field to the message.
struct FieldSeed<'a> {
    field: &'static MessageField,
    reading: &'a mut DocumentReading,
}

impl<'de> DeserializeSeed<'de> for FieldSeed<'_> {
    type Value = Presence;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Presence, D::Error> {
        let Self { field, reading } = self;
        if field.is_repeated {
            return deserializer.deserialize_any(ListVisitor { field, reading });
        }
        match &field.kind {
            FieldType::Message(position) => {
                append_message(field.number, *position, reading, |seed| seed.deserialize(deserializer))
            }
            kind => {
                let raw = <&RawValue>::deserialize(deserializer)?.get();
                if raw == "null" {
                    return Ok(Presence::Null);
                }
                let value = ScalarValue::read(kind, raw).map_err(|reason| reading.refuse(reason))?;
                if field.has_presence || !value.is_default() {
                    value.append(field.number, &mut reading.out);
                }
                Ok(Presence::Given)
            }
        }
    }
}

/// Reads a nested message with `read`, and puts its tag and length before it. `null` appends nothing.
fn append_message<E>(
    number: u32,
    position: usize,
    reading: &mut DocumentReading,
    read: impl FnOnce(MessageSeed<'_>) -> Result<Presence, E>,
) -> Result<Presence, E> {
    let start = reading.out.len();
    let presence = read(MessageSeed { message: nested(position), reading: &mut *reading })?;
    if presence == Presence::Given {
        let end = reading.out.len();
        append_length(&mut reading.out, number, end - start);
        // The length is known only now. The prefix was appended after the message, and changes places with
        // it.
        let prefix = reading.out.len() - end;
        reading.out[start..].rotate_right(prefix);
    }
    Ok(presence)
}

/// Reads an array as the elements of a repeated field.
struct ListVisitor<'a> {
    field: &'static MessageField,
    reading: &'a mut DocumentReading,
}

impl<'de> Visitor<'de> for ListVisitor<'_> {
    type Value = Presence;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Presence, A::Error> {
        let Self { field, reading } = self;
        reading.descend()?;
        // Numbers of a list stand in one packed field, as every encoder of proto3 writes them.
        let mut packed = BytesMut::new();
        let mut position = 0;
        loop {
            reading.path.push(PathStep::Position(position));
            let element = ElementSeed { field, packed: &mut packed, reading: &mut *reading };
            if list.next_element_seed(element)?.is_none() {
                break;
            }
            reading.path.pop();
            position += 1;
        }
        reading.path.pop();
        if !packed.is_empty() {
            append_bytes_field(&mut reading.out, field.number, &packed);
        }
        reading.depth -= 1;
        Ok(Presence::Given)
    }

    fn visit_unit<E: serde::de::Error>(self) -> Result<Presence, E> {
        Ok(Presence::Null)
    }
}

/// Reads one element of a repeated field. An element is never `null`.
struct ElementSeed<'a> {
    field: &'static MessageField,
    packed: &'a mut BytesMut,
    reading: &'a mut DocumentReading,
}

impl<'de> DeserializeSeed<'de> for ElementSeed<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        let Self { field, packed, reading } = self;
        if let FieldType::Message(position) = field.kind {
            return match append_message(field.number, position, reading, |seed| {
                seed.deserialize(deserializer)
            })? {
                Presence::Given => Ok(()),
                Presence::Null => Err(reading.refuse(JsonFaultReason::WrongType)),
            };
        }
        let raw = <&RawValue>::deserialize(deserializer)?.get();
        match ScalarValue::read(&field.kind, raw).map_err(|reason| reading.refuse(reason))? {
            ScalarValue::Varint(value) => append_varint(packed, value),
            text => text.append(field.number, &mut reading.out),
        }
        Ok(())
    }
}

/// A value that is no message, as its field has it on the wire.
enum ScalarValue<'a> {
    Varint(u64),
    Text(Cow<'a, str>),
    Bytes(Vec<u8>),
}

impl<'a> ScalarValue<'a> {
    /// Reads the JSON text of a value. `raw` is one value without white space around it, as `serde_json`
    /// found it.
    fn read(kind: &FieldType, raw: &'a str) -> Result<Self, JsonFaultReason> {
        Ok(match kind {
            FieldType::Bool => match raw {
                "true" => Self::Varint(1),
                "false" => Self::Varint(0),
                _ => return Err(JsonFaultReason::WrongType),
            },
            FieldType::Int32 => Self::Varint(signed(i64::from(in_range::<i32>(number_or_text(raw)?)?))),
            FieldType::Int64 => Self::Varint(signed(in_range::<i64>(number_or_text(raw)?)?)),
            FieldType::Uint32 => Self::Varint(u64::from(in_range::<u32>(number_or_text(raw)?)?)),
            FieldType::Uint64 => Self::Varint(in_range::<u64>(number_or_text(raw)?)?),
            FieldType::Enum(names) => Self::Varint(signed(i64::from(enum_value(names, raw)?))),
            FieldType::Text => Self::Text(string(raw)?),
            FieldType::Bytes => {
                Self::Bytes(bytes_of_base64(&string(raw)?).ok_or(JsonFaultReason::NotBase64)?)
            }
            FieldType::Message(_) => return Err(JsonFaultReason::WrongType),
        })
    }

    fn is_default(&self) -> bool {
        match self {
            Self::Varint(value) => *value == 0,
            Self::Text(text) => text.is_empty(),
            Self::Bytes(bytes) => bytes.is_empty(),
        }
    }

    fn append(&self, number: u32, out: &mut BytesMut) {
        match self {
            Self::Varint(value) => append_present_varint(out, number, *value),
            Self::Text(text) => append_bytes_field(out, number, text.as_bytes()),
            Self::Bytes(bytes) => append_bytes_field(out, number, bytes),
        }
    }
}

fn signed(value: i64) -> u64 {
    value.cast_unsigned()
}

fn in_range<T: TryFrom<i128>>(value: i128) -> Result<T, JsonFaultReason> {
    T::try_from(value).map_err(|_| JsonFaultReason::OutOfRange)
}

fn is_number(raw: &str) -> bool {
    raw.starts_with(|first: char| first == '-' || first.is_ascii_digit())
}

/// Reads a JSON number, or a string with a JSON number.
fn number_or_text(raw: &str) -> Result<i128, JsonFaultReason> {
    if is_number(raw) { integer(raw) } else { integer(&string(raw)?) }
}

/// Reads an enum's value: its name, or a number, known or not.
fn enum_value(names: &EnumNames, raw: &str) -> Result<i32, JsonFaultReason> {
    if is_number(raw) {
        in_range::<i32>(integer(raw)?)
    } else {
        names.number(&string(raw)?).ok_or(JsonFaultReason::UnknownEnumName)
    }
}

/// Reads a JSON string. A lone surrogate is a fault of the grammar.
fn string(raw: &str) -> Result<Cow<'_, str>, JsonFaultReason> {
    if !raw.starts_with('"') {
        return Err(JsonFaultReason::WrongType);
    }
    if let Some(inner) = raw.get(1..raw.len() - 1)
        && !inner.contains('\\')
    {
        // Nearly all keys and values: `serde_json` has checked the string already.
        return Ok(Cow::Borrowed(inner));
    }
    serde_json::from_str(raw).map(Cow::Owned).map_err(|_| JsonFaultReason::Syntax)
}

/// Reads the name of a field.
struct NameSeed;

impl<'de> DeserializeSeed<'de> for NameSeed {
    type Value = Cow<'de, str>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Cow<'de, str>, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl<'de> Visitor<'de> for NameSeed {
    type Value = Cow<'de, str>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a name")
    }

    fn visit_borrowed_str<E: serde::de::Error>(self, name: &'de str) -> Result<Cow<'de, str>, E> {
        Ok(Cow::Borrowed(name))
    }

    fn visit_str<E: serde::de::Error>(self, name: &str) -> Result<Cow<'de, str>, E> {
        Ok(Cow::Owned(name.to_owned()))
    }
}

/// Skips the value of an unknown field. Unlike `IgnoredAny`, every string is decoded: a lone surrogate is a
/// fault for Go.
struct SkippedValue<'a> {
    reading: &'a mut DocumentReading,
}

impl<'de> DeserializeSeed<'de> for SkippedValue<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for SkippedValue<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        self.reading.descend()?;
        while map.next_key_seed(NameSeed)?.is_some() {
            map.next_value_seed(SkippedValue { reading: &mut *self.reading })?;
        }
        self.reading.depth -= 1;
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        self.reading.descend()?;
        while list.next_element_seed(SkippedValue { reading: &mut *self.reading })?.is_some() {}
        self.reading.depth -= 1;
        Ok(())
    }

    fn visit_unit<E: serde::de::Error>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_bool<E: serde::de::Error>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_i64<E: serde::de::Error>(self, _: i64) -> Result<(), E> {
        Ok(())
    }

    fn visit_u64<E: serde::de::Error>(self, _: u64) -> Result<(), E> {
        Ok(())
    }

    fn visit_f64<E: serde::de::Error>(self, _: f64) -> Result<(), E> {
        Ok(())
    }

    fn visit_str<E: serde::de::Error>(self, _: &str) -> Result<(), E> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use data_encoding::BASE64;

    use super::*;
    use crate::message_fields::of_message;
    use keyward_etcd::pb::etcdserverpb as pb;
    use keyward_etcd::rpc::canonical;
    use keyward_etcd::rpc::schema::MessageId;

    fn read(message: &str, json: impl AsRef<[u8]>) -> Result<BytesMut, JsonFault> {
        message_of_json(json.as_ref(), of_message(message).unwrap())
    }

    fn range(json: &str) -> pb::RangeRequest {
        let body = read("etcdserverpb.RangeRequest", json).unwrap_or_else(|fault| panic!("{json}: {fault}"));
        assert_eq!(canonical::check(MessageId::RangeRequest, &body), Ok(()), "{json}");
        pb::RangeRequest::decode(&body[..]).unwrap()
    }

    fn refused(message: &str, json: impl AsRef<[u8]>) -> String {
        read(message, json).expect_err("refused").to_string()
    }

    #[test]
    fn fields_have_two_names_and_numbers_three_forms() {
        let wanted = pb::RangeRequest {
            key: "foo".into(),
            range_end: vec![0xfb, 0xff].into(),
            limit: 1000,
            sort_order: 2,
            serializable: true,
            min_mod_revision: i64::MAX,
            ..Default::default()
        };
        for json in [
            r#"{"key":"Zm9v","range_end":"+/8=","limit":"1000","sort_order":"DESCEND","serializable":true,
               "min_mod_revision":"9223372036854775807"}"#,
            r#" {"min\u004dodRevision" : 9223372036854775807.0, "rangeEnd":"-_8","sortOrder":2,"limit":1e3,
               "key":"Zm\u0039v", "serializable":true} "#,
            r#"{"key":"Zm9v","range_end":"-_8=","limit":"1.0e+3","sort_order":2.0,"serializable":true,"keys_only":null,
               "revision":0,"count_only":false,"min_mod_revision":"9223372036854775807","unknown":[{"a":[1.5,"x"]}]}"#,
        ] {
            assert_eq!(range(json), wanted, "{json}");
        }
    }

    #[test]
    fn an_empty_document_is_an_empty_message() {
        for json in
            ["", " \r\n\t ", "{}", "{ }", r#"{"key":"","limit":0,"sort_order":"NONE","serializable":null}"#]
        {
            assert_eq!(read("etcdserverpb.RangeRequest", json), Ok(BytesMut::new()), "{json}");
        }
        assert_eq!(refused("etcdserverpb.RangeRequest", "null"), "JSON: wrong JSON type");
    }

    #[test]
    fn nested_messages_and_oneofs_are_present_with_defaults() {
        let json = r#"{"compare":[{"key":"YQ","version":"0"},{"value":"","target":"VALUE"}],
            "success":[{"request_put":{"key":"YQ==","value":"Yg=="}},{"requestRange":{}},{}],"failure":[]}"#;
        let body = read("etcdserverpb.TxnRequest", json).unwrap();
        assert_eq!(canonical::check(MessageId::TxnRequest, &body), Ok(()));
        let txn = pb::TxnRequest::decode(&body[..]).unwrap();
        let unions: Vec<_> = txn.compare.iter().map(|compare| compare.target_union.clone()).collect();
        let value = pb::compare::TargetUnion::Value(bytes::Bytes::new());
        assert_eq!(unions, [Some(pb::compare::TargetUnion::Version(0)), Some(value)]);
        let put = pb::PutRequest { key: "a".into(), value: "b".into(), ..Default::default() };
        let ops: Vec<_> = txn.success.into_iter().map(|op| op.request).collect();
        let range = pb::request_op::Request::RequestRange(pb::RangeRequest::default());
        assert_eq!(ops, [Some(pb::request_op::Request::RequestPut(put)), Some(range), None]);
        assert!(txn.failure.is_empty());
    }

    #[test]
    fn lists_of_enums_are_packed() {
        let body =
            read("etcdserverpb.WatchRequest", r#"{"create_request":{"filters":["NOPUT",1,-7]}}"#).unwrap();
        let create = pb::WatchCreateRequest { filters: vec![0, 1, -7], ..Default::default() };
        let union = pb::watch_request::RequestUnion::CreateRequest(create);
        assert_eq!(body, pb::WatchRequest { request_union: Some(union) }.encode_to_vec());
    }

    #[test]
    fn a_long_message_has_a_long_prefix() {
        let key = BASE64.encode(&[7; 300]);
        let body = read(
            "etcdserverpb.TxnRequest",
            format!(
                r#"{{"success":[{{"request_range":{{"key":"{key}"}}}},{{"request_range":{{"key":"YQ"}}}}]}}"#
            ),
        )
        .unwrap();
        let txn = pb::TxnRequest::decode(&body[..]).unwrap();
        assert_eq!(txn.encode_to_vec(), body);
        assert_eq!(txn.success.len(), 2);
    }

    #[test]
    fn every_fault_is_told_with_its_place_and_without_a_value() {
        let range = "etcdserverpb.RangeRequest";
        let txn = "etcdserverpb.TxnRequest";
        let name = "etcdserverpb.AuthUserAddRequest";
        let told: &[(&str, &[u8], &str)] = &[
            (range, br#"{"key":"YQ","key":"YQ"}"#, "JSON field key: given twice"),
            (range, br#"{"range_end":null,"rangeEnd":"YQ"}"#, "JSON field range_end: given twice"),
            (range, br#"{"limit":{}}"#, "JSON field limit: wrong JSON type"),
            (range, br#"{"limit":true}"#, "JSON field limit: wrong JSON type"),
            (range, br#"{"limit":[]}"#, "JSON field limit: wrong JSON type"),
            (range, br#"{"serializable":"true"}"#, "JSON field serializable: wrong JSON type"),
            (range, br#"{"serializable":1}"#, "JSON field serializable: wrong JSON type"),
            (range, br#"{"key":1}"#, "JSON field key: wrong JSON type"),
            (range, br#"{"limit":1.5}"#, "JSON field limit: not an integer"),
            (range, br#"{"limit":""}"#, "JSON field limit: not an integer"),
            (range, br#"{"limit":" 1"}"#, "JSON field limit: not an integer"),
            (range, br#"{"limit":"1 2"}"#, "JSON field limit: not an integer"),
            (range, br#"{"limit":9223372036854775808}"#, "JSON field limit: integer out of range"),
            (range, br#"{"limit":"-9223372036854775809"}"#, "JSON field limit: integer out of range"),
            (range, br#"{"sort_order":2147483648}"#, "JSON field sort_order: integer out of range"),
            (range, br#"{"sort_order":"descend"}"#, "JSON field sort_order: no such enum value"),
            (range, br#"{"sort_order":"2"}"#, "JSON field sort_order: no such enum value"),
            (range, br#"{"sort_order":true}"#, "JSON field sort_order: wrong JSON type"),
            (range, br#"{"key":"YQ="}"#, "JSON field key: not base64"),
            (range, br#"{"key":"YQ==Yg=="}"#, "JSON field key: not base64"),
            (range, br#"{"key":"qA==true"}"#, "JSON field key: not base64"),
            (range, br#"{"key":"===="}"#, "JSON field key: not base64"),
            (range, br#"{"key":"+-AA"}"#, "JSON field key: not base64"),
            (range, br#"{"key":"secret!"}"#, "JSON field key: not base64"),
            (range, br#"{"[x.y]":1}"#, "JSON: extensions are not known"),
            (range, br#"{} {}"#, "JSON: more bytes after the document"),
            (range, br#"{}x"#, "JSON: more bytes after the document"),
            (range, br#"[]"#, "JSON: wrong JSON type"),
            (range, br#""secret""#, "JSON: wrong JSON type"),
            (range, br#"{"key":"YQ""#, "JSON: the document ends early"),
            (range, br#"{"key""#, "JSON field key: the document ends early"),
            (range, br#"{"key":"YQ",}"#, "JSON: not valid JSON"),
            (range, br#"{key:1}"#, "JSON: not valid JSON"),
            (range, br#"{"limit":01}"#, "JSON field limit: not valid JSON"),
            (range, b"{\"key\":\"Y\0\"}", "JSON field key: not valid JSON"),
            (range, b"\xef\xbb\xbf{}", "JSON: not valid JSON"),
            (range, b"{\"x\":\"\xff\"}", "JSON: not UTF-8"),
            (name, br#"{"name":"\ud800"}"#, "JSON field name: not valid JSON"),
            (name, br#"{"name":"\udc00\ud800"}"#, "JSON field name: not valid JSON"),
            (name, br#"{"x":"\ud800x"}"#, "JSON: not valid JSON"),
            (name, br#"{"\ud800":1}"#, "JSON: not valid JSON"),
            (txn, br#"{"success":{}}"#, "JSON field success: wrong JSON type"),
            (txn, br#"{"success":[null]}"#, "JSON field success[0]: wrong JSON type"),
            (
                txn,
                br#"{"success":[{},{"request_put":{},"requestRange":{}}]}"#,
                "JSON field success[1].request_range: another field of the same oneof is given too",
            ),
            (
                txn,
                br#"{"failure":[{},{"request_txn":{"compare":[{"key":"?"}]}}]}"#,
                "JSON field failure[1].request_txn.compare[0].key: not base64",
            ),
        ];
        for (message, json, text) in told {
            assert_eq!(refused(message, json), *text, "{}", json.escape_ascii());
        }
    }

    #[test]
    fn a_null_is_no_member_of_its_oneof() {
        let body =
            read("etcdserverpb.Compare", r#"{"version":null,"lease":"7","createRevision":null}"#).unwrap();
        let compare = pb::Compare::decode(&body[..]).unwrap();
        assert_eq!(compare.target_union, Some(pb::compare::TargetUnion::Lease(7)));
    }

    #[test]
    fn a_nul_in_a_text_is_text() {
        let body = read("etcdserverpb.AuthUserAddRequest", r#"{"name":"a\u0000\ud83d\ude00"}"#).unwrap();
        assert_eq!(pb::AuthUserAddRequest::decode(&body[..]).unwrap().name, "a\0\u{1f600}");
    }

    #[test]
    fn nesting_is_limited() {
        let unknown = |depth: usize| format!(r#"{{"x":{}{}}}"#, "[".repeat(depth), "]".repeat(depth));
        let fields = of_message("etcdserverpb.RangeRequest").unwrap();
        assert!(message_of_json(unknown(MAX_JSON_DEPTH - 1).as_bytes(), fields).is_ok());
        for depth in [MAX_JSON_DEPTH, 100_000] {
            let fault = message_of_json(unknown(depth).as_bytes(), fields).unwrap_err();
            assert_eq!(fault.reason, JsonFaultReason::TooDeep);
        }
        let txn = |depth: usize| {
            format!("{}{{}}{}", r#"{"success":[{"request_txn":"#.repeat(depth), "}]}".repeat(depth))
        };
        assert!(read("etcdserverpb.TxnRequest", txn(33)).is_ok());
        let fault = read("etcdserverpb.TxnRequest", txn(34)).unwrap_err();
        assert_eq!(fault.reason, JsonFaultReason::TooDeep);
    }
}
