//! Compiles `proto/` without `protoc`: the messages and clients of `src/etcd/src/pb.rs`, the descriptor set
//! that tests read, and the table of request fields that `src/etcd/src/rpc/schema.rs` includes.

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{env, fs};

use prost::Message as _;
use prost_types::field_descriptor_proto::{Label, Type};
use prost_types::{DescriptorProto, FieldDescriptorProto, FileDescriptorSet};

/// The folder of the API, as this package sees it.
const PROTO: &str = "../../proto";

/// Messages that carry a password or a token: `src/etcd/src/pb.rs` writes their `Debug` by hand.
const SECRET: [&str; 4] = [
    "etcdserverpb.AuthenticateRequest",
    "etcdserverpb.AuthenticateResponse",
    "etcdserverpb.AuthUserAddRequest",
    "etcdserverpb.AuthUserChangePasswordRequest",
];

fn main() -> Result<(), Box<dyn Error>> {
    let out = PathBuf::from(env::var("OUT_DIR")?);
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed={PROTO}");

    let descriptors = protox::compile(proto_files()?, [PROTO])?;
    fs::write(out.join("descriptors.bin"), descriptors.encode_to_vec())?;
    fs::write(out.join("schema.rs"), schema(&descriptors)?)?;
    tonic_prost_build::configure()
        .build_server(false)
        .build_transport(false)
        .emit_rerun_if_changed(false)
        .bytes(".")
        .skip_debug(SECRET)
        .compile_fds(descriptors)?;
    Ok(())
}

/// Every file of `proto/`, sorted, so that the output does not depend on the file system.
fn proto_files() -> Result<Vec<PathBuf>, Box<dyn Error>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(PROTO)? {
        let path = entry?.path();
        if path.extension().is_some_and(|ext| ext == "proto") {
            files.push(Path::new(path.file_name().ok_or("a file has a name")?).to_path_buf());
        }
    }
    files.sort();
    Ok(files)
}

/// Rust source of the request schema: `enum MessageId` and `static MESSAGES`, for every message that a client
/// can send, nested ones included.
fn schema(descriptors: &FileDescriptorSet) -> Result<String, Box<dyn Error>> {
    let mut known: BTreeMap<String, &DescriptorProto> = BTreeMap::new();
    let mut wanted = Vec::new();
    for file in &descriptors.file {
        for message in &file.message_type {
            known.insert(format!(".{}.{}", file.package(), message.name()), message);
        }
        let inputs =
            file.service.iter().flat_map(|service| &service.method).map(|method| method.input_type());
        wanted.extend(inputs.map(str::to_owned));
    }

    let mut reached: BTreeMap<String, &DescriptorProto> = BTreeMap::new();
    while let Some(name) = wanted.pop() {
        let message = *known.get(&name).ok_or_else(|| format!("no message {name}"))?;
        if reached.insert(name, message).is_none() {
            let nested = message.field.iter().filter(|field| field.r#type() == Type::Message);
            wanted.extend(nested.map(|field| field.type_name().to_owned()));
        }
    }

    let mut source = String::from(
        "/// A message that a client can send, at the top of a body or inside another.\n\
         #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]\n#[repr(u8)]\npub enum MessageId {\n",
    );
    for name in reached.keys() {
        writeln!(source, "    /// `{}`.\n    {},", &name[1..], short(name))?;
    }
    source.push_str("}\n\nstatic MESSAGES: &[MessageSchema] = &[\n");
    for (name, message) in &reached {
        writeln!(source, "    MessageSchema {{ name: \"{}\", fields: &[", &name[1..])?;
        let mut fields: Vec<_> = message.field.iter().collect();
        fields.sort_by_key(|field| field.number());
        for field in fields {
            writeln!(source, "        {},", row(field)?)?;
        }
        source.push_str("    ] },\n");
    }
    source.push_str("];\n");
    Ok(source)
}

fn row(field: &FieldDescriptorProto) -> Result<String, Box<dyn Error>> {
    let kind = match field.r#type() {
        Type::Bool => "FieldKind::Bool".to_owned(),
        Type::Int64 | Type::Uint64 => "FieldKind::Integer".to_owned(),
        Type::Enum => "FieldKind::Enum".to_owned(),
        Type::Bytes => "FieldKind::Bytes".to_owned(),
        Type::String => "FieldKind::Text".to_owned(),
        Type::Message => format!("FieldKind::Message(MessageId::{})", short(field.type_name())),
        other => {
            return Err(format!("request field {} has the unforeseen type {other:?}", field.name()).into());
        }
    };
    let repeated = field.label() == Label::Repeated;
    let oneof = field.oneof_index;
    Ok(format!(
        "SchemaField {{ number: {}, kind: {kind}, repeated: {repeated}, oneof: {oneof:?} }}",
        field.number()
    ))
}

fn short(name: &str) -> &str {
    name.rsplit('.').next().unwrap_or(name)
}
