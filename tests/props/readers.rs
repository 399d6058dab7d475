//! One message as three readers understand it: our scan, prost, and etcd 3.4-3.6's gogo/protobuf.
//!
//! Each gives what it understood as prost would write it: known fields by number, defaults left out. Two readings
//! are the same exactly where these bytes are.

use std::collections::BTreeMap;

use keyward::pb::{authpb, etcdserverpb as pb, health, v3electionpb as election, v3lockpb as lock};
use keyward::rpc::scan::{self, WireFields};
use keyward::rpc::schema::{FieldKind, MessageId, SchemaField};
use prost::Message;

use crate::bodies::{put_bytes, put_varint};

/// What our scan understands; `None` where it finds a fault.
pub(crate) fn ours(schema: MessageId, body: &[u8]) -> Option<Vec<u8>> {
    read_ours(schema, body).map(|read| read.write())
}

/// What gogo/protobuf understands; `None` where it refuses.
pub(crate) fn gogo(schema: MessageId, body: &[u8]) -> Option<Vec<u8>> {
    let mut read = Read::new(schema);
    read_gogo(&mut read, body)?;
    Some(read.write())
}

/// What prost understands; `None` where it refuses.
pub(crate) fn prost(schema: MessageId, body: &[u8]) -> Option<Vec<u8>> {
    fn again<M: Message + Default>(body: &[u8]) -> Option<Vec<u8>> {
        M::decode(body).ok().map(|message| message.encode_to_vec())
    }
    let read = match schema {
        MessageId::AlarmRequest => again::<pb::AlarmRequest>,
        MessageId::AuthDisableRequest => again::<pb::AuthDisableRequest>,
        MessageId::AuthEnableRequest => again::<pb::AuthEnableRequest>,
        MessageId::AuthRoleAddRequest => again::<pb::AuthRoleAddRequest>,
        MessageId::AuthRoleDeleteRequest => again::<pb::AuthRoleDeleteRequest>,
        MessageId::AuthRoleGetRequest => again::<pb::AuthRoleGetRequest>,
        MessageId::AuthRoleGrantPermissionRequest => again::<pb::AuthRoleGrantPermissionRequest>,
        MessageId::AuthRoleListRequest => again::<pb::AuthRoleListRequest>,
        MessageId::AuthRoleRevokePermissionRequest => again::<pb::AuthRoleRevokePermissionRequest>,
        MessageId::AuthStatusRequest => again::<pb::AuthStatusRequest>,
        MessageId::AuthUserAddRequest => again::<pb::AuthUserAddRequest>,
        MessageId::AuthUserChangePasswordRequest => again::<pb::AuthUserChangePasswordRequest>,
        MessageId::AuthUserDeleteRequest => again::<pb::AuthUserDeleteRequest>,
        MessageId::AuthUserGetRequest => again::<pb::AuthUserGetRequest>,
        MessageId::AuthUserGrantRoleRequest => again::<pb::AuthUserGrantRoleRequest>,
        MessageId::AuthUserListRequest => again::<pb::AuthUserListRequest>,
        MessageId::AuthUserRevokeRoleRequest => again::<pb::AuthUserRevokeRoleRequest>,
        MessageId::AuthenticateRequest => again::<pb::AuthenticateRequest>,
        MessageId::CampaignRequest => again::<election::CampaignRequest>,
        MessageId::CompactionRequest => again::<pb::CompactionRequest>,
        MessageId::Compare => again::<pb::Compare>,
        MessageId::DefragmentRequest => again::<pb::DefragmentRequest>,
        MessageId::DeleteRangeRequest => again::<pb::DeleteRangeRequest>,
        MessageId::DowngradeRequest => again::<pb::DowngradeRequest>,
        MessageId::HashKVRequest => again::<pb::HashKvRequest>,
        MessageId::HashRequest => again::<pb::HashRequest>,
        MessageId::HealthCheckRequest => again::<health::HealthCheckRequest>,
        MessageId::LeaderKey => again::<election::LeaderKey>,
        MessageId::LeaderRequest => again::<election::LeaderRequest>,
        MessageId::LeaseGrantRequest => again::<pb::LeaseGrantRequest>,
        MessageId::LeaseKeepAliveRequest => again::<pb::LeaseKeepAliveRequest>,
        MessageId::LeaseLeasesRequest => again::<pb::LeaseLeasesRequest>,
        MessageId::LeaseRevokeRequest => again::<pb::LeaseRevokeRequest>,
        MessageId::LeaseTimeToLiveRequest => again::<pb::LeaseTimeToLiveRequest>,
        MessageId::LockRequest => again::<lock::LockRequest>,
        MessageId::MemberAddRequest => again::<pb::MemberAddRequest>,
        MessageId::MemberListRequest => again::<pb::MemberListRequest>,
        MessageId::MemberPromoteRequest => again::<pb::MemberPromoteRequest>,
        MessageId::MemberRemoveRequest => again::<pb::MemberRemoveRequest>,
        MessageId::MemberUpdateRequest => again::<pb::MemberUpdateRequest>,
        MessageId::MoveLeaderRequest => again::<pb::MoveLeaderRequest>,
        MessageId::Permission => again::<authpb::Permission>,
        MessageId::ProclaimRequest => again::<election::ProclaimRequest>,
        MessageId::PutRequest => again::<pb::PutRequest>,
        MessageId::RangeRequest => again::<pb::RangeRequest>,
        MessageId::RequestOp => again::<pb::RequestOp>,
        MessageId::ResignRequest => again::<election::ResignRequest>,
        MessageId::SnapshotRequest => again::<pb::SnapshotRequest>,
        MessageId::StatusRequest => again::<pb::StatusRequest>,
        MessageId::TxnRequest => again::<pb::TxnRequest>,
        MessageId::UnlockRequest => again::<lock::UnlockRequest>,
        MessageId::UserAddOptions => again::<authpb::UserAddOptions>,
        MessageId::WatchCancelRequest => again::<pb::WatchCancelRequest>,
        MessageId::WatchCreateRequest => again::<pb::WatchCreateRequest>,
        MessageId::WatchProgressRequest => again::<pb::WatchProgressRequest>,
        MessageId::WatchRequest => again::<pb::WatchRequest>,
    };
    read(body)
}

enum Value {
    Number(u64),
    Bytes(Vec<u8>),
    Nested(Read),
}

/// What a reader understood of a message.
struct Read {
    schema: MessageId,
    fields: BTreeMap<u32, Vec<Value>>,
}

impl Read {
    fn new(schema: MessageId) -> Self {
        Self { schema, fields: BTreeMap::new() }
    }

    /// The last of a singular field counts, all of a repeated one, and one member of a oneof.
    fn take(&mut self, field: &SchemaField, value: Value) {
        if let Some(oneof) = field.oneof {
            let others = self.schema.message().fields.iter().filter(|other| other.oneof == Some(oneof));
            others.for_each(|other| drop(self.fields.remove(&other.number)));
        }
        let values = self.fields.entry(field.number).or_default();
        if !field.repeated {
            values.clear();
        }
        values.push(value);
    }

    fn write(&self) -> Vec<u8> {
        let mut out = Vec::new();
        for (number, values) in &self.fields {
            let field = self.schema.field(*number).expect("only known fields are taken");
            let mut packed = Vec::new();
            for value in values {
                let kept = field.repeated || field.oneof.is_some();
                match value {
                    Value::Number(value) if field.repeated => put_varint(*value, &mut packed),
                    Value::Number(value) if *value != 0 || kept => {
                        put_varint(u64::from(*number) << 3, &mut out);
                        put_varint(*value, &mut out);
                    }
                    Value::Bytes(bytes) if !bytes.is_empty() || kept => {
                        put_bytes(u64::from(*number), bytes, &mut out);
                    }
                    Value::Nested(nested) => put_bytes(u64::from(*number), &nested.write(), &mut out),
                    Value::Number(_) | Value::Bytes(_) => {}
                }
            }
            if !packed.is_empty() {
                put_bytes(u64::from(*number), &packed, &mut out);
            }
        }
        out
    }
}

fn read_ours(schema: MessageId, body: &[u8]) -> Option<Read> {
    let mut read = Read::new(schema);
    for field in WireFields::new(body) {
        let found = field.ok()?;
        let Some(known) = schema.field(found.number) else { continue };
        match (known.kind, found.value) {
            (FieldKind::Message(nested), value) => {
                read.take(known, Value::Nested(read_ours(nested, value.bytes()?)?));
            }
            (FieldKind::Bytes | FieldKind::Text, value) => {
                read.take(known, Value::Bytes(value.bytes()?.to_vec()))
            }
            (_, scan::WireValue::Varint(value)) => read.take(known, Value::Number(value)),
            (_, value) => {
                let mut packed = value.bytes()?;
                while !packed.is_empty() {
                    let (value, length) = scan::varint(packed).ok()?;
                    read.take(known, Value::Number(value));
                    packed = &packed[length..];
                }
            }
        }
    }
    Some(read)
}

/// As the generated `Unmarshal` methods of etcd 3.4-3.6 do it: lenient varints, field numbers cut to 32 bits, a oneof
/// member replaced and any other message merged, numbers cut to their type, text unchecked.
fn read_gogo(read: &mut Read, body: &[u8]) -> Option<()> {
    let mut rest = body;
    while !rest.is_empty() {
        let before = rest;
        let tag = gogo_varint(&mut rest)?;
        let number = u32::try_from((tag >> 3) & u64::from(u32::MAX)).ok()?.cast_signed();
        let wire_type = tag & 7;
        if wire_type == 4 || number <= 0 {
            return None;
        }
        let Some(known) = read.schema.field(number.unsigned_abs()) else {
            rest = gogo_skipped(before)?;
            continue;
        };
        match (known.kind, wire_type) {
            (FieldKind::Bytes | FieldKind::Text, 2) => {
                read.take(known, Value::Bytes(gogo_bytes(&mut rest)?.to_vec()));
            }
            (FieldKind::Message(nested), 2) => {
                let body = gogo_bytes(&mut rest)?;
                let merged = !known.repeated && known.oneof.is_none();
                let before = if merged { read.fields.remove(&known.number) } else { None };
                let mut into = match before.and_then(|mut values| values.pop()) {
                    Some(Value::Nested(before)) => before,
                    _ => Read::new(nested),
                };
                read_gogo(&mut into, body)?;
                read.take(known, Value::Nested(into));
            }
            (FieldKind::Bool | FieldKind::Integer | FieldKind::Enum, 0) => {
                let value = gogo_number(known.kind, gogo_varint(&mut rest)?);
                read.take(known, Value::Number(value));
            }
            (FieldKind::Bool | FieldKind::Integer | FieldKind::Enum, 2) if known.repeated => {
                let mut packed = gogo_bytes(&mut rest)?;
                while !packed.is_empty() {
                    let value = gogo_number(known.kind, gogo_varint(&mut packed)?);
                    read.take(known, Value::Number(value));
                }
            }
            _ => return None,
        }
    }
    Some(())
}

fn gogo_number(kind: FieldKind, value: u64) -> u64 {
    match kind {
        FieldKind::Bool => u64::from(value != 0),
        FieldKind::Enum => {
            let cut = u32::try_from(value & u64::from(u32::MAX)).expect("32 bits");
            i64::from(cut.cast_signed()).cast_unsigned()
        }
        _ => value,
    }
}

fn gogo_varint(rest: &mut &[u8]) -> Option<u64> {
    let mut value = 0_u64;
    for shift in (0..64).step_by(7) {
        let (first, left) = rest.split_first()?;
        *rest = left;
        value |= u64::from(first & 0x7f) << shift;
        if *first < 0x80 {
            return Some(value);
        }
    }
    None
}

fn gogo_bytes<'a>(rest: &mut &'a [u8]) -> Option<&'a [u8]> {
    let length = usize::try_from(gogo_varint(rest)?).ok()?;
    let (taken, left) = rest.split_at_checked(length)?;
    *rest = left;
    Some(taken)
}

/// What is left after one field of any kind, groups included.
fn gogo_skipped(mut rest: &[u8]) -> Option<&[u8]> {
    let mut depth = 0_u32;
    loop {
        match gogo_varint(&mut rest)? & 7 {
            0 => drop(gogo_varint(&mut rest)?),
            1 => rest = rest.get(8..)?,
            2 => drop(gogo_bytes(&mut rest)?),
            3 => depth += 1,
            4 => depth = depth.checked_sub(1)?,
            5 => rest = rest.get(4..)?,
            _ => return None,
        }
        if depth == 0 {
            return Some(rest);
        }
    }
}

/// The readers differ where they are known to: else their agreement would say nothing.
#[test]
fn the_readers_differ_where_decoders_do() {
    // An op that names request_range twice: replaced by gogo, merged by prost.
    let op = b"\x0a\x03\x0a\x01a\x0a\x03\x12\x01b";
    assert_eq!(gogo(MessageId::RequestOp, op).as_deref(), Some(&b"\x0a\x03\x12\x01b"[..]));
    assert_eq!(prost(MessageId::RequestOp, op).as_deref(), Some(&b"\x0a\x06\x0a\x01a\x12\x01b"[..]));
    // Field 2^32 + 1 is field 1 for gogo.
    let wide = b"\x8a\x80\x80\x80\x80\x01\x01a";
    assert_eq!(gogo(MessageId::RangeRequest, wide).as_deref(), Some(&b"\x0a\x01a"[..]));
    assert_eq!(prost(MessageId::RangeRequest, wide), None);
    // A number that its field cannot hold, and text that is none.
    assert_eq!(gogo(MessageId::RangeRequest, b"\x28\x81\x80\x80\x80\x10").as_deref(), Some(&b"\x28\x01"[..]));
    assert!(gogo(MessageId::AuthUserGetRequest, b"\x0a\x01\xff").is_some());
    assert_eq!(prost(MessageId::AuthUserGetRequest, b"\x0a\x01\xff"), None);
    // A group, which both skip, is a fault for us.
    assert_eq!(gogo(MessageId::RangeRequest, b"\xa3\x06\xa4\x06").as_deref(), Some(&b""[..]));
    assert_eq!(prost(MessageId::RangeRequest, b"\xa3\x06\xa4\x06").as_deref(), Some(&b""[..]));
    assert_eq!(ours(MessageId::RangeRequest, b"\xa3\x06\xa4\x06"), None);
}
