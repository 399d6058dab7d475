//! Reads and writes the messages of a Watch stream without re-encoding unchanged fields.
//!
//! Owns: the fields of WatchRequest and WatchResponse read by Keyward, and the splice of the fields set by
//! Keyward (watch_id, start_revision, progress_notify, fragment upstream; watch_id, header.revision and flags
//! downstream).
//! Must not know: the state of a watch, or when an answer is due.
//! Invariants: events, key-values, headers and unknown fields cross as the received bytes; bytes that two
//! decoders could understand differently are [`MalformedWatchMessage`], never guessed at.

use std::ops::Range;

use bytes::{BufMut, Bytes, BytesMut};
use smallvec::SmallVec;

use keyward_etcd::rpc::canonical;
use keyward_etcd::rpc::scan::{self, WireFields, append_bytes_field, append_varint_field};
use keyward_etcd::rpc::schema::MessageId;

/// The watch id that names no watch: used in refused creates and in stream-wide progress.
pub(super) const NO_WATCH: i64 = -1;

/// The `range_end` of a watch to the end of the keyspace.
const OPEN_END: &[u8] = b"\0";
/// The end sent in place of [`OPEN_END`] to a member that checks no permission for `OPEN_END`. The watch
/// shows no key at or above this end: no key that begins with 64 bytes of 0xff.
const LAST_KEY: [u8; 64] = [0xff; 64];

/// The form in which the end of the keyspace goes upstream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OpenEnd {
    /// As the client sent it.
    AsSent,
    /// An explicit end, judged as a range by every etcd.
    Explicit,
}

/// The bytes are no message of the Watch service, or are ambiguous to protobuf decoders.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("malformed watch message")]
pub(super) struct MalformedWatchMessage;

/// A client's WatchRequest.
#[derive(Clone, Debug)]
pub(super) enum ClientWatchRequest {
    Create(ClientWatchCreate),
    Cancel(i64),
    Progress,
    /// No known member of the union: as in etcd, the request is skipped without an answer.
    Unknown,
}

/// A client's WatchCreateRequest: the decoded fields, and the remaining bytes as received.
#[derive(Clone, Debug)]
pub(super) struct ClientWatchCreate {
    /// The watched key. Empty means `\0`, as in etcd.
    pub(super) key: Bytes,
    pub(super) watch_id: i64,
    pub(super) start_revision: i64,
    pub(super) progress_notify: bool,
    pub(super) fragment: bool,
    /// Every field except the four fields replaced upstream.
    kept: Bytes,
    /// The field `range_end` in `kept`, if the field means the end of the keyspace. Boxed, as it is rare.
    open_end: Option<Box<Range<usize>>>,
    /// Fields beside the union.
    beside: Bytes,
}

/// A ResponseHeader as received, with the decoded fields.
#[derive(Clone, Debug, Default)]
pub(super) struct WatchResponseHeader {
    raw: Bytes,
    pub(super) cluster: u64,
    pub(super) revision: i64,
}

/// The newest header of a member, in memory that is written again for each header: inside, if of usual size.
#[derive(Debug, Default)]
pub(super) struct NewestHeader(SmallVec<[u8; 32]>);

/// An event: the whole field, tag and length included.
#[derive(Clone, Debug)]
pub(super) struct WatchEventBytes {
    pub(super) raw: Bytes,
    /// `kv.mod_revision`.
    pub(super) revision: i64,
}

/// A WatchResponse, split into slices of the message.
#[derive(Clone, Debug, Default)]
pub(super) struct SplicedWatchResponse {
    pub(super) header: Option<WatchResponseHeader>,
    pub(super) watch_id: i64,
    pub(super) created: bool,
    pub(super) canceled: bool,
    pub(super) compact_revision: i64,
    pub(super) cancel_reason: Bytes,
    pub(super) fragment: bool,
    pub(super) events: Vec<WatchEventBytes>,
    /// Unknown fields, as received.
    pub(super) unknown: Bytes,
}

impl ClientWatchRequest {
    pub(super) fn read(message: &Bytes) -> Result<Self, MalformedWatchMessage> {
        canonical::check(MessageId::WatchRequest, message).map_err(|_| MalformedWatchMessage)?;
        let mut request = Self::Unknown;
        let mut beside = BytesMut::new();
        for field in fields(message) {
            let field = field?;
            match field.number {
                1 => request = Self::Create(ClientWatchCreate::read(&field.bytes()?)?),
                2 => request = Self::Cancel(read_cancel(&field.bytes()?)?),
                3 => request = Self::Progress,
                _ => beside.put_slice(field.raw()),
            }
        }
        if let Self::Create(create) = &mut request {
            create.beside = beside.freeze();
        }
        Ok(request)
    }
}

fn read_cancel(message: &Bytes) -> Result<i64, MalformedWatchMessage> {
    let mut id = 0;
    for field in fields(message) {
        let field = field?;
        if field.number == 1 {
            id = field.int64()?;
        }
    }
    Ok(id)
}

impl ClientWatchCreate {
    /// The end of the watched range, as sent by the client: empty for a single key, a zero byte for the end
    /// of the keyspace.
    pub(super) fn range_end(&self) -> Bytes {
        let end = fields(&self.kept).filter_map(Result::ok).filter(|field| field.number == 2).last();
        end.and_then(|end| end.bytes().ok()).unwrap_or_default()
    }

    /// True if the request has no fields beside the create.
    pub(super) fn stands_alone(&self) -> bool {
        self.beside.is_empty()
    }

    /// The fields of the create, except for the fields replaced upstream.
    pub(super) fn kept(&self) -> &Bytes {
        &self.kept
    }

    fn read(message: &Bytes) -> Result<Self, MalformedWatchMessage> {
        // Copied, not sliced: a watch lives for days, and a slice would keep the whole received frame alive.
        let mut kept = BytesMut::with_capacity(message.len());
        let mut key = 0..0;
        let mut create = Self {
            key: Bytes::new(),
            watch_id: 0,
            start_revision: 0,
            progress_notify: false,
            fragment: false,
            kept: Bytes::new(),
            open_end: None,
            beside: Bytes::new(),
        };
        for field in fields(message) {
            let field = field?;
            match field.number {
                3 => create.start_revision = field.int64()?,
                4 => create.progress_notify = field.bool()?,
                7 => create.watch_id = field.int64()?,
                8 => create.fragment = field.bool()?,
                number => {
                    let from = kept.len();
                    kept.put_slice(field.raw());
                    if number == 1 {
                        key = kept.len() - field.bytes()?.len()..kept.len();
                    } else if number == 2 && field.bytes()? == OPEN_END {
                        create.open_end = Some(Box::new(from..kept.len()));
                    }
                }
            }
        }
        create.kept = kept.freeze();
        create.key = create.kept.slice(key);
        Ok(create)
    }

    /// The WatchRequest to send upstream: the client's own bytes, with Keyward's watch id, from `start`,
    /// always with progress and fragments.
    pub(super) fn message(&self, watch_id: i64, start: i64, end: OpenEnd) -> Bytes {
        let mut create = BytesMut::with_capacity(self.kept.len() + LAST_KEY.len() + 32);
        match (&self.open_end, end) {
            (Some(field), OpenEnd::Explicit) => {
                create.put_slice(&self.kept[..field.start]);
                append_bytes_field(&mut create, 2, &LAST_KEY);
                create.put_slice(&self.kept[field.end..]);
            }
            (_, OpenEnd::AsSent) | (None, OpenEnd::Explicit) => create.put_slice(&self.kept),
        }
        put_int64(&mut create, 3, start);
        put_bool(&mut create, 4, true);
        put_int64(&mut create, 7, watch_id);
        put_bool(&mut create, 8, true);
        let mut message = BytesMut::with_capacity(create.len() + self.beside.len() + 8);
        append_bytes_field(&mut message, 1, &create);
        message.put_slice(&self.beside);
        message.freeze()
    }
}

/// The WatchRequest to cancel `watch_id`.
pub(super) fn cancel_message(watch_id: i64) -> Bytes {
    let mut cancel = BytesMut::new();
    put_int64(&mut cancel, 1, watch_id);
    let mut message = BytesMut::new();
    append_bytes_field(&mut message, 2, &cancel);
    message.freeze()
}

/// The WatchRequest for the stream's progress.
pub(super) fn progress_message() -> Bytes {
    Bytes::from_static(&[0x1a, 0x00])
}

impl WatchResponseHeader {
    pub(super) fn read(raw: &Bytes) -> Result<Self, MalformedWatchMessage> {
        let mut once = SingularFieldCheck::default();
        let mut header = Self { raw: raw.clone(), cluster: 0, revision: 0 };
        for field in fields(raw) {
            let field = field?;
            match field.number {
                1 => {
                    once.check(1)?;
                    header.cluster = field.varint()?;
                }
                3 => {
                    once.check(3)?;
                    header.revision = field.int64()?;
                }
                // member_id and raft_term are not needed here, but a client's decoder refuses the message if
                // the wire type is wrong.
                2 | 4 => {
                    field.varint()?;
                }
                _ => {}
            }
        }
        Ok(header)
    }

    /// The bytes as received.
    pub(super) fn raw(&self) -> &[u8] {
        &self.raw
    }

    /// The same header with another revision; every other byte stays.
    pub(super) fn with_revision(&self, revision: i64) -> Self {
        if revision == self.revision {
            return self.clone();
        }
        let mut raw = BytesMut::with_capacity(self.raw.len() + 10);
        let mut written = false;
        // Parsed successfully before: a malformed field cannot occur.
        for field in fields(&self.raw).flatten() {
            if field.number >= 3 && !written {
                put_int64(&mut raw, 3, revision);
                written = true;
            }
            if field.number != 3 {
                raw.put_slice(field.raw());
            }
        }
        if !written {
            put_int64(&mut raw, 3, revision);
        }
        Self { raw: raw.freeze(), cluster: self.cluster, revision }
    }
}

impl NewestHeader {
    pub(super) fn store(&mut self, raw: &[u8]) {
        self.0.clear();
        self.0.extend_from_slice(raw);
    }

    /// The header; `None` before the first one.
    pub(super) fn read(&self) -> Option<WatchResponseHeader> {
        let raw = Bytes::copy_from_slice(&self.0);
        WatchResponseHeader::read(&raw).ok().filter(|_| !raw.is_empty())
    }
}

impl WatchEventBytes {
    fn read(field: &WatchMessageField<'_>) -> Result<Self, MalformedWatchMessage> {
        let event = field.value.bytes().ok_or(MalformedWatchMessage)?;
        Ok(Self { raw: field.message.slice(field.range.clone()), revision: event_revision(event)? })
    }
}

/// The `kv.mod_revision` of an event, after a check of the wire types of all known fields.
fn event_revision(event: &[u8]) -> Result<i64, MalformedWatchMessage> {
    let mut once = SingularFieldCheck::default();
    let mut revision = None;
    for part in WireFields::new(event) {
        let part = part?;
        match part.number {
            1 => {
                varint(&part)?;
            }
            2 => {
                once.check(2)?;
                revision = Some(mod_revision(submessage(&part)?)?);
            }
            3 => {
                mod_revision(submessage(&part)?)?;
            }
            _ => {}
        }
    }
    revision.ok_or(MalformedWatchMessage)
}

/// The `mod_revision` of a KeyValue, after a check of the wire types of all known fields.
fn mod_revision(kv: &[u8]) -> Result<i64, MalformedWatchMessage> {
    let mut once = SingularFieldCheck::default();
    let mut revision = 0;
    for field in WireFields::new(kv) {
        let field = field?;
        match field.number {
            1 | 5 => {
                submessage(&field)?;
            }
            3 => {
                once.check(3)?;
                revision = varint(&field)?.cast_signed();
            }
            2 | 4 | 6 => {
                varint(&field)?;
            }
            _ => {}
        }
    }
    Ok(revision)
}

fn varint(field: &scan::WireField<'_>) -> Result<u64, MalformedWatchMessage> {
    if let scan::WireValue::Varint(value) = field.value { Ok(value) } else { Err(MalformedWatchMessage) }
}

fn submessage<'a>(field: &scan::WireField<'a>) -> Result<&'a [u8], MalformedWatchMessage> {
    field.value.bytes().ok_or(MalformedWatchMessage)
}

/// A response with nothing but whole revisions: a header at the last event's revision, a watch id and events.
/// Nearly all responses are of this form.
#[derive(Debug)]
pub(super) struct PlainEvents<'a> {
    pub(super) header: &'a [u8],
    pub(super) cluster: u64,
    pub(super) watch_id: i64,
    /// The first event's revision.
    pub(super) first: i64,
    /// The last event's revision, and the header's.
    pub(super) last: i64,
    /// The number of events.
    pub(super) count: u64,
    /// The fields of all events, tags included.
    events: &'a [u8],
}

impl<'a> PlainEvents<'a> {
    /// Reads a response; `None` for a response of any other form, malformed or not.
    pub(super) fn read(message: &'a [u8]) -> Option<Self> {
        let mut parts = WireFields::new(message).peekable();
        let header = parts.next()?.ok().filter(|part| part.number == 1)?.value.bytes()?;
        let (cluster, revision) = plain_header(header)?;
        let watch_id = match parts.peek()? {
            Ok(part) if part.number == 2 => part.value.signed()?,
            Ok(_) => 0,
            Err(_) => return None,
        };
        if watch_id != 0 {
            parts.next();
        }
        let (mut begin, mut first, mut last, mut count) = (None, 0, 0, 0);
        for part in parts {
            let part = part.ok().filter(|part| part.number == 11)?;
            let event = event_revision(part.value.bytes()?).ok().filter(|event| *event >= last)?;
            if begin.is_none() {
                (begin, first) = (Some(part.range.start), event);
            }
            last = event;
            count += 1;
        }
        let events = message.get(begin?..)?;
        (last == revision).then_some(Self { header, cluster, watch_id, first, last, count, events })
    }

    /// Appends the response with the client's watch id.
    pub(super) fn write(&self, watch_id: i64, to: &mut BytesMut) {
        append_bytes_field(to, 1, self.header);
        put_int64(to, 2, watch_id);
        to.put_slice(self.events);
    }
}

/// Cluster id and revision of a header with each known field at most once.
fn plain_header(header: &[u8]) -> Option<(u64, i64)> {
    let (mut cluster, mut revision, mut previous) = (0, 0, 0);
    for field in WireFields::new(header) {
        let field = field.ok().filter(|field| field.number > previous)?;
        previous = field.number;
        match field.number {
            1 => cluster = varint(&field).ok()?,
            3 => revision = varint(&field).ok()?.cast_signed(),
            2 | 4 => drop(varint(&field).ok()?),
            _ => {}
        }
    }
    Some((cluster, revision))
}

impl From<scan::ScanFault> for MalformedWatchMessage {
    fn from(_: scan::ScanFault) -> Self {
        Self
    }
}

impl SplicedWatchResponse {
    pub(super) fn read(message: &Bytes) -> Result<Self, MalformedWatchMessage> {
        let mut once = SingularFieldCheck::default();
        let mut unknown = BytesMut::new();
        let mut response = Self::default();
        for field in fields(message) {
            let field = field?;
            if matches!(field.number, 1..=7) {
                once.check(field.number)?;
            }
            match field.number {
                1 => response.header = Some(WatchResponseHeader::read(&field.bytes()?)?),
                2 => response.watch_id = field.int64()?,
                3 => response.created = field.bool()?,
                4 => response.canceled = field.bool()?,
                5 => response.compact_revision = field.int64()?,
                6 => response.cancel_reason = field.text()?,
                7 => response.fragment = field.bool()?,
                11 => response.events.push(WatchEventBytes::read(&field)?),
                _ => unknown.put_slice(field.raw()),
            }
        }
        response.unknown = unknown.freeze();
        Ok(response)
    }

    /// The encoded message, with the fields in etcd's order.
    pub(super) fn write(&self) -> Bytes {
        let events: usize = self.events.iter().map(|event| event.raw.len()).sum();
        let header = self.header.as_ref().map_or(0, |header| header.raw.len());
        let mut message =
            BytesMut::with_capacity(events + header + self.cancel_reason.len() + self.unknown.len() + 48);
        if let Some(header) = &self.header {
            append_bytes_field(&mut message, 1, &header.raw);
        }
        put_int64(&mut message, 2, self.watch_id);
        put_bool(&mut message, 3, self.created);
        put_bool(&mut message, 4, self.canceled);
        put_int64(&mut message, 5, self.compact_revision);
        if !self.cancel_reason.is_empty() {
            append_bytes_field(&mut message, 6, &self.cancel_reason);
        }
        put_bool(&mut message, 7, self.fragment);
        for event in &self.events {
            message.put_slice(&event.raw);
        }
        message.put_slice(&self.unknown);
        message.freeze()
    }
}

/// A field of a message, and its byte range.
struct WatchMessageField<'a> {
    message: &'a Bytes,
    number: u32,
    value: scan::WireValue<'a>,
    range: Range<usize>,
}

impl<'a> WatchMessageField<'a> {
    fn varint(&self) -> Result<u64, MalformedWatchMessage> {
        if let scan::WireValue::Varint(value) = self.value { Ok(value) } else { Err(MalformedWatchMessage) }
    }

    fn int64(&self) -> Result<i64, MalformedWatchMessage> {
        self.value.signed().ok_or(MalformedWatchMessage)
    }

    fn bool(&self) -> Result<bool, MalformedWatchMessage> {
        Ok(self.varint()? != 0)
    }

    fn bytes(&self) -> Result<Bytes, MalformedWatchMessage> {
        Ok(self.message.slice_ref(self.value.bytes().ok_or(MalformedWatchMessage)?))
    }

    /// The bytes of a string field, checked to be UTF-8: some decoders refuse other text.
    fn text(&self) -> Result<Bytes, MalformedWatchMessage> {
        let bytes = self.bytes()?;
        std::str::from_utf8(&bytes).map_err(|_| MalformedWatchMessage)?;
        Ok(bytes)
    }

    /// Tag and value.
    fn raw(&self) -> &'a [u8] {
        &self.message[self.range.clone()]
    }
}

/// The fields of a message, strictly decoded; the iteration ends after an error.
fn fields(message: &Bytes) -> impl Iterator<Item = Result<WatchMessageField<'_>, MalformedWatchMessage>> {
    WireFields::new(message).map(move |field| {
        let scan::WireField { number, value, range } =
            field.map_err(|scan::ScanFault(_)| MalformedWatchMessage)?;
        Ok(WatchMessageField { message, number, value, range })
    })
}

/// Refuses a repeated singular field: decoders differ on the occurrence to keep.
#[derive(Default)]
struct SingularFieldCheck(u32);

impl SingularFieldCheck {
    fn check(&mut self, number: u32) -> Result<(), MalformedWatchMessage> {
        let bit = 1 << number;
        if self.0 & bit != 0 {
            return Err(MalformedWatchMessage);
        }
        self.0 |= bit;
        Ok(())
    }
}

fn put_int64(to: &mut BytesMut, number: u32, value: i64) {
    append_varint_field(to, number, value.cast_unsigned());
}

fn put_bool(to: &mut BytesMut, number: u32, value: bool) {
    append_varint_field(to, number, u64::from(value));
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use prost::Message as _;

    use super::*;
    use keyward_etcd::pb::{etcdserverpb as pb, mvccpb};

    fn read(message: &[u8]) -> Result<SplicedWatchResponse, MalformedWatchMessage> {
        SplicedWatchResponse::read(&Bytes::copy_from_slice(message))
    }

    #[test]
    fn a_field_that_comes_twice_is_malformed() {
        let twice: [&[u8]; 4] = [
            b"\x0a\x04\x0a\x02\x38\x01\x12\x00",
            b"\x0a\x04\x38\x01\x38\x02",
            b"\x12\x04\x08\x01\x08\x02",
            b"\x1a\x00\x1a\x00",
        ];
        for message in twice {
            let read = ClientWatchRequest::read(&Bytes::from_static(message));
            assert!(matches!(read, Err(MalformedWatchMessage)), "{read:?}");
        }
        assert!(read(b"\x10\x01\x10\x02").is_err());
        assert!(read(b"\x0a\x04\x18\x01\x18\x02").is_err());
        assert!(read(b"\x5a\x06\x12\x04\x18\x01\x18\x02").is_err());
    }

    #[test]
    fn odd_encodings_are_malformed() {
        let odd: [&[u8]; 7] = [
            b"\x10\xff\xff\xff\xff\xff\xff\xff\xff\xff\x02",
            b"\x90\x80\x80\x80\x80\x01\x01",
            b"\x12\x00",
            b"\x13\x14",
            b"\x00\x01",
            b"\x5a\x02\x08\x01",
            b"\x32\x01\xff",
        ];
        for message in odd {
            assert!(read(message).is_err(), "{message:x?}");
        }
    }

    #[test]
    fn a_header_keeps_all_but_its_revision() {
        let with = |raw: &'static [u8], revision| {
            WatchResponseHeader::read(&Bytes::from_static(raw)).unwrap().with_revision(revision)
        };
        assert_eq!(
            with(b"\x08\x07\x18\x09\x20\x03\x28\x05", 300).raw,
            &b"\x08\x07\x18\xac\x02\x20\x03\x28\x05"[..]
        );
        assert_eq!(with(b"\x08\x07\x20\x03", 4).raw, &b"\x08\x07\x18\x04\x20\x03"[..]);
        assert_eq!(with(b"\x08\x07", 4).raw, &b"\x08\x07\x18\x04"[..]);
        assert_eq!(with(b"\x08\x07\x18\x09\x20\x03", 0).raw, &b"\x08\x07\x20\x03"[..]);
    }

    fn any_response() -> impl Strategy<Value = pb::WatchResponse> {
        let header = (any::<u64>(), any::<u64>(), any::<i64>(), any::<u64>());
        let event = (any::<bool>(), any::<i64>(), any::<Vec<u8>>());
        let flags = (any::<bool>(), any::<bool>(), any::<bool>());
        (header, any::<i64>(), flags, any::<i64>(), "[a-z :]{0,40}", prop::collection::vec(event, 0..6))
            .prop_map(
                |(
                    (cluster_id, member_id, revision, raft_term),
                    watch_id,
                    flags,
                    compact_revision,
                    reason,
                    events,
                )| {
                    let event = |(delete, mod_revision, value): (bool, i64, Vec<u8>)| {
                        let kv = mvccpb::KeyValue { mod_revision, value: value.into(), ..Default::default() };
                        mvccpb::Event { r#type: i32::from(delete), kv: Some(kv), prev_kv: None }
                    };
                    pb::WatchResponse {
                        header: Some(pb::ResponseHeader { cluster_id, member_id, revision, raft_term }),
                        watch_id,
                        created: flags.0,
                        canceled: flags.1,
                        compact_revision,
                        cancel_reason: reason,
                        fragment: flags.2,
                        events: events.into_iter().map(event).collect(),
                    }
                },
            )
    }

    /// Unknown fields: numbers not assigned by etcd so far, of every wire type.
    fn unknown() -> impl Strategy<Value = Vec<u8>> {
        let value = prop_oneof![
            any::<u16>().prop_map(|value| (0, vec![u8::try_from(value % 128).unwrap()])),
            any::<[u8; 8]>().prop_map(|value| (1, value.to_vec())),
            prop::collection::vec(any::<u8>(), 0..9)
                .prop_map(|value| (2, [vec![u8::try_from(value.len()).unwrap()], value].concat())),
            any::<[u8; 4]>().prop_map(|value| (5, value.to_vec())),
        ];
        (32_u32..64, value).prop_map(|(number, (wire_type, value))| {
            let tag = number << 3 | wire_type;
            [vec![tag.to_le_bytes()[0] & 0x7f | 0x80, (tag >> 7).to_le_bytes()[0]], value].concat()
        })
    }

    /// The fields of `message`, each as bytes, with the unknown fields interleaved.
    fn strewn(message: &[u8], unknown: &[Vec<u8>]) -> Vec<u8> {
        let message = Bytes::copy_from_slice(message);
        let mut strewn = Vec::new();
        let mut unknown = unknown.iter();
        for field in fields(&message) {
            strewn.extend(unknown.next().into_iter().flatten());
            strewn.extend(field.unwrap().raw());
        }
        strewn.extend(unknown.flatten());
        strewn
    }

    fn nested(number: u32, body: &[u8]) -> Vec<u8> {
        let mut field = BytesMut::new();
        append_bytes_field(&mut field, number, body);
        field.to_vec()
    }

    /// The fields with a wanted number, each as bytes.
    fn of_number(message: &Bytes, wanted: impl Fn(u32) -> bool) -> Vec<Vec<u8>> {
        let wanted = fields(message).map(Result::unwrap).filter(|field| wanted(field.number));
        wanted.map(|field| field.raw().to_vec()).collect()
    }

    proptest! {
        /// Fields added by a future etcd cross: in the response, in the header, in events and in key-values.
        #[test]
        fn unknown_fields_cross_wherever_they_stand(
            response in any_response(),
            unknown in prop::collection::vec(unknown(), 0..24),
            watch_id: i64,
            revision in 1_i64..,
        ) {
            let mut parts = unknown.chunks(3).cycle();
            let mut next = || parts.next().unwrap_or_default();
            let header = strewn(&response.header.unwrap().encode_to_vec(), next());
            let mut message = nested(1, &header);
            let bare = pb::WatchResponse { header: None, events: Vec::new(), ..response.clone() };
            message.extend(strewn(&bare.encode_to_vec(), next()));
            for event in &response.events {
                let kv = strewn(&event.kv.as_ref().unwrap().encode_to_vec(), next());
                let bare = mvccpb::Event { kv: None, ..event.clone() };
                let event = [strewn(&bare.encode_to_vec(), next()), nested(2, &kv)].concat();
                message.extend(nested(11, &event));
                message.extend(next().concat());
            }
            let message = Bytes::from(message);
            let mut read = SplicedWatchResponse::read(&message).unwrap();
            let revisions: Vec<i64> = read.events.iter().map(|event| event.revision).collect();
            let expected: Vec<i64> =
                response.events.iter().map(|event| event.kv.as_ref().unwrap().mod_revision).collect();
            prop_assert_eq!(revisions, expected);
            read.watch_id = watch_id;
            read.header = read.header.map(|header| header.with_revision(revision));
            let written = read.write();
            // Events are the same bytes in the same order; so are unknown fields.
            prop_assert_eq!(of_number(&written, |n| n == 11), of_number(&message, |n| n == 11));
            prop_assert_eq!(of_number(&written, |n| n > 11), of_number(&message, |n| n > 11));
            // Of the header only the revision differs, wherever the field is placed.
            let raw = Bytes::copy_from_slice(SplicedWatchResponse::read(&written).unwrap().header.unwrap().raw.as_ref());
            let others = |n| n != 3;
            prop_assert_eq!(of_number(&raw, others), of_number(&Bytes::from(header), others));
            let mut expected = response;
            expected.watch_id = watch_id;
            expected.header.as_mut().unwrap().revision = revision;
            prop_assert_eq!(pb::WatchResponse::decode(written).unwrap(), expected);
        }

        /// A create goes upstream with all of the client's fields except the fields set by Keyward.
        #[test]
        fn a_create_keeps_what_we_do_not_know(
            key: Vec<u8>,
            filters in prop::collection::vec(0..2_i32, 0..3),
            mine in prop::collection::vec(unknown(), 0..6),
            beside in prop::collection::vec(unknown(), 0..3),
            ids: (i64, i64),
            range_end in prop::sample::select(vec!["", "\0", "\0\0", "z"]),
            explicit_end: bool,
        ) {
            let create = pb::WatchCreateRequest {
                key: key.into(), range_end: range_end.into(), filters, prev_kv: true, watch_id: 9, start_revision: 8, ..Default::default()
            };
            let body = strewn(&create.encode_to_vec(), &mine);
            let message = Bytes::from([nested(1, &body), beside.concat()].concat());
            let Ok(ClientWatchRequest::Create(read)) = ClientWatchRequest::read(&message) else { panic!("a create") };
            let end = if explicit_end { OpenEnd::Explicit } else { OpenEnd::AsSent };
            let sent = read.message(ids.0, ids.1, end);
            let mut expected = pb::WatchCreateRequest {
                watch_id: ids.0, start_revision: ids.1, progress_notify: true, fragment: true, ..create
            };
            if explicit_end && expected.range_end == OPEN_END {
                expected.range_end = Bytes::from_static(&LAST_KEY);
            }
            let union = pb::watch_request::RequestUnion::CreateRequest(expected);
            prop_assert_eq!(
                pb::WatchRequest::decode(sent.clone()).unwrap(),
                pb::WatchRequest { request_union: Some(union) }
            );
            prop_assert_eq!(of_number(&sent, |n| n > 8).concat(), beside.concat());
            let inside = fields(&sent).next().unwrap().unwrap().bytes().unwrap();
            prop_assert_eq!(of_number(&inside, |n| n > 8).concat(), mine.concat());
        }

        #[test]
        fn an_untouched_response_is_the_same_bytes(response in any_response()) {
            let message = Bytes::from(response.encode_to_vec());
            prop_assert_eq!(SplicedWatchResponse::read(&message).unwrap().write(), message);
        }

        #[test]
        fn only_what_is_ours_changes(response in any_response(), watch_id: i64, revision: i64) {
            let mut read = SplicedWatchResponse::read(&response.encode_to_vec().into()).unwrap();
            read.watch_id = watch_id;
            read.header = read.header.map(|header| header.with_revision(revision));
            let mut expected = response;
            expected.watch_id = watch_id;
            expected.header.as_mut().unwrap().revision = revision;
            prop_assert_eq!(read.write(), expected.encode_to_vec());
        }

        #[test]
        fn no_bytes_panic(bytes: Vec<u8>) {
            let bytes = Bytes::from(bytes);
            let response = SplicedWatchResponse::read(&bytes);
            prop_assert!(response.is_err() || SplicedWatchResponse::read(&response.unwrap().write()).is_ok());
            // Bytes accepted as a request decode as a request in etcd too.
            prop_assert!(ClientWatchRequest::read(&bytes).is_err() || pb::WatchRequest::decode(bytes).is_ok());
        }
    }
}
