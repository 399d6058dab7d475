//! Every field that etcd's types have in a request is known to Keyward, with the same kind.
//!
//! A field unknown to Keyward passes `rpc::canonical` unread: it must not be one that names keys.

use std::collections::BTreeMap;

use keyward::rpc::method::{METHODS, lookup};
use keyward::rpc::schema::{FieldKind, MessageId};

use crate::etcd_types::{schema, versions};

/// The messages of all requests, by name.
fn known_messages() -> BTreeMap<&'static str, MessageId> {
    let mut known = BTreeMap::new();
    let mut rest: Vec<MessageId> = METHODS.iter().map(|method| method.body).collect();
    while let Some(id) = rest.pop() {
        if known.insert(id.message().name, id).is_some() {
            continue;
        }
        for field in id.message().fields {
            if let FieldKind::Message(nested) = field.kind {
                rest.push(nested);
            }
        }
    }
    known
}

fn is_same(kind: FieldKind, described: &str) -> bool {
    match kind {
        FieldKind::Bool => described == "bool",
        FieldKind::Integer => described == "int64" || described == "uint64",
        FieldKind::Enum => described == "enum" || described == "int32",
        FieldKind::Bytes => described == "bytes",
        FieldKind::Text => described == "string",
        FieldKind::Message(_) => described == "message",
    }
}

#[test]
fn every_field_of_a_request_is_known() {
    let known = known_messages();
    for version in versions() {
        let (mut requests, mut fields, mut faults) = (0, 0, Vec::new());
        for line in schema(&version).lines() {
            match line.split(' ').collect::<Vec<_>>()[..] {
                ["request", path, message] => {
                    requests += 1;
                    let method = lookup(path);
                    let same = method.is_some_and(|method| method.body.message().name == message);
                    faults.extend((!same).then(|| line.to_owned()));
                }
                ["field", message, number, kind, cardinality] => {
                    fields += 1;
                    let number = number.parse().expect("a field number");
                    let field = known.get(message).and_then(|id| id.field(number));
                    let same = field.is_some_and(|field| {
                        is_same(field.kind, kind) && field.repeated == (cardinality == "repeated")
                    });
                    faults.extend((!same).then(|| line.to_owned()));
                }
                _ => panic!("not a line of a schema: {line:?}"),
            }
        }
        assert!(requests >= 48 && fields >= 100, "{requests} requests with {fields} fields");
        assert!(faults.is_empty(), "{version} has other fields than proto/: {faults:#?}");
        println!("{version}: {requests} requests with {fields} fields");
    }
}
