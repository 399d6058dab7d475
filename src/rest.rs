//! The JSON face of etcd's API: JSON requests become the messages of gRPC, and replies become JSON.
//!
//! Owns: the translation between JSON and protobuf, in the forms of etcd's JSON gateways. Must not know:
//! who calls, and what a request touches; a request in JSON takes the same way as a request by gRPC.
//! Invariant: an accepted document is accepted by Go's `protojson` (which ignores unknown fields, as etcd's
//! gateway does) with the same meaning, and its message is canonical for `rpc::canonical`.

pub mod json_documents;
pub mod json_fault;
mod json_integer;
pub mod json_reply;
pub mod json_request;
pub mod json_style;
pub mod message_fields;

/// Limit on the nesting of objects and arrays in a document. A level of Txn takes three.
pub const MAX_JSON_DEPTH: usize = 100;
