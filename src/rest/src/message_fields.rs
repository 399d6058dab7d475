//! The fields of every message by name and by number, compiled once from the descriptors of `proto/`.
//!
//! Owns: the tables behind reading and writing JSON. Must not know: JSON. A look-up here neither locks nor
//! allocates, unlike the descriptors of `prost-reflect`, whose every look-up counts a reference.

use std::collections::HashMap;
use std::sync::LazyLock;

use prost_reflect::{DescriptorPool, EnumDescriptor, FieldDescriptor, Kind, MessageDescriptor};

use keyward_etcd::pb;

static TABLES: LazyLock<MessageTables> = LazyLock::new(|| {
    let pool = DescriptorPool::decode(pb::DESCRIPTORS).expect("the build encoded the descriptors");
    MessageTables::of(&pool).expect("a unit test builds the same tables from the same descriptors")
});

/// The messages of one RPC.
#[derive(Clone, Copy, Debug)]
pub struct MethodMessages {
    /// The message sent by the client.
    pub request: &'static MessageFields,
    /// The message sent by the member.
    pub reply: &'static MessageFields,
}

/// Returns the messages of the RPC with the path `/package.Service/Method`.
#[must_use]
pub fn of_method(path: &str) -> Option<MethodMessages> {
    let tables = &*TABLES;
    let (request, reply) = *tables.methods.get(path)?;
    Some(MethodMessages { request: &tables.messages[request], reply: &tables.messages[reply] })
}

/// Returns the fields of the message with the given full name.
#[must_use]
pub fn of_message(full_name: &str) -> Option<&'static MessageFields> {
    TABLES.messages.iter().find(|message| message.full_name == full_name)
}

/// The fields of a message.
#[derive(Debug)]
pub struct MessageFields {
    full_name: String,
    /// In the order of declaration, which is the order in JSON.
    fields: Vec<MessageField>,
    by_name: HashMap<String, usize>,
}

/// A field of a message.
#[derive(Debug)]
pub(super) struct MessageField {
    pub(super) number: u32,
    pub(super) name: String,
    pub(super) kind: FieldType,
    pub(super) is_repeated: bool,
    /// True if the field is written also with its default value: messages and members of a oneof.
    pub(super) has_presence: bool,
    /// The position of the field's oneof in the message.
    pub(super) oneof: Option<usize>,
}

/// The type of a field's value. A message type is a position in the tables.
#[derive(Debug)]
pub(super) enum FieldType {
    Bool,
    Int32,
    Int64,
    Uint32,
    Uint64,
    Text,
    Bytes,
    Enum(EnumNames),
    Message(usize),
}

/// The values of an enum by declaration.
#[derive(Debug)]
pub(super) struct EnumNames(Vec<(String, i32)>);

impl EnumNames {
    pub(super) fn number(&self, name: &str) -> Option<i32> {
        self.0.iter().find(|(known, _)| known == name).map(|(_, number)| *number)
    }

    pub(super) fn name(&self, number: i32) -> Option<&str> {
        self.0.iter().find(|(_, known)| *known == number).map(|(name, _)| name.as_str())
    }
}

impl MessageFields {
    /// Returns the message's name with its package.
    #[must_use]
    pub fn full_name(&self) -> &str {
        &self.full_name
    }

    pub(super) fn fields(&self) -> &[MessageField] {
        &self.fields
    }

    /// Finds a field by its name in `proto/` or by its lowerCamelCase name. Returns its position.
    pub(super) fn by_name(&self, name: &str) -> Option<usize> {
        self.by_name.get(name).copied()
    }

    /// Finds a field by its number. Returns its position.
    pub(super) fn by_number(&self, number: u32) -> Option<usize> {
        // Nearly all messages number their fields from 1 without a gap.
        let guess = (number as usize).wrapping_sub(1);
        match self.fields.get(guess) {
            Some(field) if field.number == number => Some(guess),
            _ => self.fields.iter().position(|field| field.number == number),
        }
    }
}

/// Returns the message at a position named by [`FieldType::Message`].
pub(super) fn nested(position: usize) -> &'static MessageFields {
    &TABLES.messages[position]
}

struct MessageTables {
    messages: Vec<MessageFields>,
    methods: HashMap<String, (usize, usize)>,
}

/// A field of a kind that no message of etcd has.
#[derive(Debug)]
struct UnforeseenKind {
    #[expect(dead_code, reason = "shown by Debug where the tables cannot be built")]
    field: String,
}

impl MessageTables {
    fn of(pool: &DescriptorPool) -> Result<Self, UnforeseenKind> {
        let all: Vec<MessageDescriptor> = pool.all_messages().collect();
        let positions: HashMap<String, usize> = all
            .iter()
            .enumerate()
            .map(|(position, message)| (message.full_name().to_owned(), position))
            .collect();
        let messages = all.iter().map(|message| message_fields(message, &positions));
        let methods = pool.services().flat_map(|service| {
            let methods: Vec<_> = service.methods().collect();
            methods
                .into_iter()
                .map(|method| {
                    let path = format!("/{}/{}", service.full_name(), method.name());
                    let messages =
                        (positions[method.input().full_name()], positions[method.output().full_name()]);
                    (path, messages)
                })
                .collect::<Vec<_>>()
        });
        Ok(Self { methods: methods.collect(), messages: messages.collect::<Result<_, _>>()? })
    }
}

fn message_fields(
    message: &MessageDescriptor,
    positions: &HashMap<String, usize>,
) -> Result<MessageFields, UnforeseenKind> {
    let mut declared: Vec<FieldDescriptor> = message.fields().collect();
    // A path ends with the field's place among the declarations of its message.
    declared.sort_by_key(|field| field.path().last().copied());
    let oneofs: Vec<String> = message.oneofs().map(|oneof| oneof.full_name().to_owned()).collect();
    let mut by_name = HashMap::new();
    let mut fields = Vec::with_capacity(declared.len());
    for (position, field) in declared.iter().enumerate() {
        by_name.insert(field.json_name().to_owned(), position);
        let oneof = field.containing_oneof();
        fields.push(MessageField {
            number: field.number(),
            name: field.name().to_owned(),
            kind: field_type(field, positions)?,
            is_repeated: field.is_list(),
            has_presence: field.supports_presence(),
            oneof: oneof.and_then(|oneof| oneofs.iter().position(|name| name == oneof.full_name())),
        });
    }
    // Go looks a name up among the lowerCamelCase names first.
    for (position, field) in declared.iter().enumerate() {
        by_name.entry(field.name().to_owned()).or_insert(position);
    }
    Ok(MessageFields { full_name: message.full_name().to_owned(), fields, by_name })
}

fn field_type(
    field: &FieldDescriptor,
    positions: &HashMap<String, usize>,
) -> Result<FieldType, UnforeseenKind> {
    Ok(match field.kind() {
        Kind::Bool => FieldType::Bool,
        Kind::Int32 => FieldType::Int32,
        Kind::Int64 => FieldType::Int64,
        Kind::Uint32 => FieldType::Uint32,
        Kind::Uint64 => FieldType::Uint64,
        Kind::String => FieldType::Text,
        Kind::Bytes => FieldType::Bytes,
        Kind::Enum(values) => FieldType::Enum(enum_names(&values)),
        Kind::Message(message) if !field.is_map() => FieldType::Message(positions[message.full_name()]),
        _ => return Err(UnforeseenKind { field: field.full_name().to_owned() }),
    })
}

fn enum_names(values: &EnumDescriptor) -> EnumNames {
    EnumNames(values.values().map(|value| (value.name().to_owned(), value.number())).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyward_etcd::rpc::method::METHODS;

    #[test]
    fn every_method_has_its_messages() {
        for method in METHODS {
            let messages = of_method(method.path).unwrap_or_else(|| panic!("{}", method.path));
            assert_eq!(messages.request.full_name(), method.body.message().name);
            assert!(messages.request.fields().len() <= 64 && messages.reply.fields().len() <= 64);
        }
        assert!(of_method("/etcdserverpb.KV/Nothing").is_none());
    }

    #[test]
    fn fields_are_found_by_both_names_and_by_number() {
        let compare = of_message("etcdserverpb.Compare").unwrap();
        assert_eq!(compare.by_name("range_end"), compare.by_name("rangeEnd"));
        let range_end = compare.by_name("range_end").unwrap();
        assert_eq!(compare.by_number(64), Some(range_end));
        assert_eq!(compare.fields()[range_end].number, 64);
        assert_eq!((compare.by_number(0), compare.by_number(9), compare.by_name("end")), (None, None, None));
        let version = &compare.fields()[compare.by_name("version").unwrap()];
        assert!(version.has_presence && version.oneof == Some(0));
        let names: Vec<_> = compare.fields().iter().map(|field| field.number).collect();
        assert_eq!(names, [1, 2, 3, 4, 5, 6, 7, 8, 64]);
    }
}
