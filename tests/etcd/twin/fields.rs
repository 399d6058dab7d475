//! An answer's body as a list of its leaves, named by our own descriptors, so that one field can be left out of a comparison.
//!
//! Must not know which fields those are. Invariant: every byte of a body stands in exactly one leaf, save for the tags and lengths
//! of the messages around it: two bodies with equal leaves are equal bytes. One exception: etcd sorts members by their ids, which
//! are random, so here those that never started come last, and a leaf of its own says whether the ids were in order.

use std::{collections::HashMap, sync::LazyLock};

use keyward::pb::{DESCRIPTORS, etcdserverpb::Member};
use prost::Message as _;
use prost_types::{DescriptorProto, FileDescriptorSet, field_descriptor_proto::Type};

/// A field that holds no message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Leaf {
    /// The message that it stands in and its name there, such as `ResponseHeader.cluster_id`. A field that we do not know has its
    /// number for a name.
    pub(crate) field: String,
    /// From the top, such as `kvs[1].key` (the first has no number): no two leaves of a body have the same.
    pub(crate) path: String,
    /// Its tag and its value, as they came.
    pub(crate) bytes: Vec<u8>,
    /// The value, for people.
    pub(crate) shown: String,
}

/// An RPC of `proto/`.
pub(crate) struct Rpc {
    /// Such as `/etcdserverpb.KV/Range`.
    pub(crate) path: String,
    /// The full name of the message that answers.
    pub(crate) output: String,
}

struct Field {
    name: String,
    /// The full name of the message that it holds.
    message: Option<String>,
    text: bool,
}

struct Schema {
    messages: HashMap<String, HashMap<u64, Field>>,
    rpcs: Vec<Rpc>,
}

static SCHEMA: LazyLock<Schema> = LazyLock::new(|| {
    let set = FileDescriptorSet::decode(DESCRIPTORS).expect("our own descriptors");
    let mut schema = Schema { messages: HashMap::new(), rpcs: Vec::new() };
    for file in &set.file {
        for message in &file.message_type {
            schema.messages.insert(format!("{}.{}", file.package(), message.name()), fields(message));
        }
        for service in &file.service {
            schema.rpcs.extend(service.method.iter().map(|method| Rpc {
                path: format!("/{}.{}/{}", file.package(), service.name(), method.name()),
                output: method.output_type().trim_start_matches('.').into(),
            }));
        }
    }
    schema
});

fn fields(message: &DescriptorProto) -> HashMap<u64, Field> {
    let field = |field: &prost_types::FieldDescriptorProto| Field {
        name: field.name().into(),
        message: (field.r#type() == Type::Message).then(|| field.type_name().trim_start_matches('.').into()),
        text: matches!(field.r#type(), Type::String | Type::Bytes),
    };
    message
        .field
        .iter()
        .map(|f| (u64::try_from(f.number()).expect("numbers are positive"), field(f)))
        .collect()
}

/// Every RPC of `proto/`.
pub(crate) fn rpcs() -> &'static [Rpc] {
    &SCHEMA.rpcs
}

/// Whether `proto/` has this field, such as `ResponseHeader.cluster_id`.
pub(crate) fn knows(field: &str) -> bool {
    let of = |name: &str| name.rsplit('.').next().map(ToOwned::to_owned);
    field.split_once('.').is_some_and(|(message, field)| {
        let mut all = SCHEMA.messages.iter().filter(|(name, _)| of(name).as_deref() == Some(message));
        all.any(|(_, fields)| fields.values().any(|known| known.name == field))
    })
}

/// The leaves of a message in the order in which they came; `None` where it is not one.
pub(crate) fn leaves(message: &str, bytes: &[u8]) -> Option<Vec<Leaf>> {
    let mut out = Vec::new();
    collect(message, "", bytes, &mut out)?;
    Some(out)
}

fn collect(message: &str, above: &str, bytes: &[u8], out: &mut Vec<Leaf>) -> Option<()> {
    let known = SCHEMA.messages.get(message);
    let short = message.rsplit('.').next().unwrap_or(message);
    let sorted = members_sorted(known, bytes, short, out)?;
    let mut bytes = sorted.as_slice();
    let mut times: HashMap<u64, usize> = HashMap::new();
    while !bytes.is_empty() {
        let start = bytes;
        let tag = varint(&mut bytes)?;
        let field = known.and_then(|fields| fields.get(&(tag >> 3)));
        let name = field.map_or_else(|| format!("#{}", tag >> 3), |field| field.name.clone());
        let nth = times.entry(tag >> 3).or_default();
        let path = if *nth == 0 { format!("{above}{name}") } else { format!("{above}{name}[{nth}]") };
        *nth += 1;
        let shown = match tag & 7 {
            0 => varint(&mut bytes)?.cast_signed().to_string(),
            1 => format!("{:?}", bytes.split_off(..8)?),
            5 => format!("{:?}", bytes.split_off(..4)?),
            2 => {
                let length = usize::try_from(varint(&mut bytes)?).ok()?;
                let value = bytes.split_off(..length)?;
                if let Some(inner) = field.and_then(|field| field.message.as_deref()) {
                    // A message without fields would otherwise leave no trace.
                    if value.is_empty() {
                        out.push(Leaf {
                            field: format!("{short}.{name}"),
                            path,
                            bytes: Vec::new(),
                            shown: "{}".into(),
                        });
                    } else {
                        collect(inner, &format!("{path}."), value, out)?;
                    }
                    continue;
                }
                match field {
                    Some(field) if field.text => value.escape_ascii().to_string(),
                    _ => format!("{value:?}"),
                }
            }
            _ => return None,
        };
        let taken = &start[..start.len() - bytes.len()];
        out.push(Leaf { field: format!("{short}.{name}"), path, bytes: taken.to_vec(), shown });
    }
    Some(())
}

/// The same message with its members, which are last in it, in an order of ours.
fn members_sorted(
    known: Option<&HashMap<u64, Field>>,
    bytes: &[u8],
    short: &str,
    out: &mut Vec<Leaf>,
) -> Option<Vec<u8>> {
    let is_member = |field: &&Field| field.name == "members";
    if known.is_none_or(|fields| !fields.values().any(|field| is_member(&field))) {
        return Some(bytes.to_vec());
    }
    let number = known?.iter().find_map(|(number, field)| is_member(&field).then_some(*number))?;
    let (mut rest, mut others, mut members) = (bytes, Vec::new(), Vec::new());
    while !rest.is_empty() {
        let start = rest;
        let tag = varint(&mut rest)?;
        let length = usize::try_from(varint(&mut rest)?).ok()?;
        let value = if tag & 7 == 2 { rest.split_off(..length)? } else { &[] };
        let whole = &start[..start.len() - rest.len()];
        if tag >> 3 == number {
            members.push((whole, Member::decode(value).ok()?))
        } else {
            others.extend(whole)
        }
    }
    let ids = members.iter().map(|(_, member)| member.id);
    let shown = if ids.is_sorted() { "by id" } else { "not by id" };
    let leaf = Leaf {
        field: format!("{short}.members"),
        path: "members".into(),
        bytes: shown.into(),
        shown: shown.into(),
    };
    out.push(leaf);
    members.sort_by_key(|(_, member)| member.name.is_empty());
    members.iter().for_each(|(whole, _)| others.extend(*whole));
    Some(others)
}

fn varint(bytes: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let byte = *bytes.split_off_first()?;
        value |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Some(value);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use keyward::pb::{etcdserverpb, etcdserverpb::MemberListResponse, mvccpb};

    use super::*;

    #[test]
    fn names_every_leaf_and_keeps_its_bytes() {
        let header = etcdserverpb::ResponseHeader { cluster_id: 7, revision: 300, ..Default::default() };
        let kv = mvccpb::KeyValue { key: "k".into(), value: "\0v".into(), ..Default::default() };
        let kvs = vec![mvccpb::KeyValue::default(), kv];
        let answer = etcdserverpb::RangeResponse { header: Some(header), kvs, ..Default::default() };
        let mut bytes = answer.encode_to_vec();
        bytes.extend(b"\xa2\x06\x01x");
        let leaves = leaves("etcdserverpb.RangeResponse", &bytes).unwrap();
        let seen: Vec<_> =
            leaves.iter().map(|l| (l.field.as_str(), l.path.as_str(), l.shown.as_str())).collect();
        assert_eq!(
            seen,
            [
                ("ResponseHeader.cluster_id", "header.cluster_id", "7"),
                ("ResponseHeader.revision", "header.revision", "300"),
                ("RangeResponse.kvs", "kvs", "{}"),
                ("KeyValue.key", "kvs[1].key", "k"),
                ("KeyValue.value", "kvs[1].value", "\\x00v"),
                ("RangeResponse.#100", "#100", "[120]"),
            ]
        );
        assert_eq!(leaves[1].bytes, b"\x18\xac\x02");
    }

    #[test]
    fn members_have_one_order_and_their_own_is_noted() {
        let voter = Member { id: 9, name: "m0".into(), ..Member::default() };
        let learner = Member { id: 7, is_learner: true, ..Member::default() };
        let shown = |members: &[Member]| {
            let bytes =
                MemberListResponse { members: members.to_vec(), ..Default::default() }.encode_to_vec();
            let leaves = leaves("etcdserverpb.MemberListResponse", &bytes).unwrap();
            leaves.into_iter().map(|leaf| leaf.shown).collect::<Vec<_>>()
        };
        assert_eq!(shown(&[learner.clone(), voter.clone()]), ["by id", "9", "m0", "7", "1"]);
        assert_eq!(shown(&[voter, learner]), ["not by id", "9", "m0", "7", "1"]);
    }

    #[test]
    fn what_is_no_message_has_no_leaves() {
        for bytes in [b"\x0a\x05\x08".as_slice(), b"\x0b", b"\x80", b"\x08"] {
            assert_eq!(leaves("etcdserverpb.RangeResponse", bytes), None, "{bytes:?}");
        }
    }
}
