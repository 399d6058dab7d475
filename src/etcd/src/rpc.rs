//! etcd's RPCs: the method table, the reading of frames and bodies, and the meaning of answers.
//!
//! Owns: the method table, gRPC frames, the field scan and the canonical check of bodies, the properties of a
//! body needed for routing, and the meaning of a member's status. Must not know: the caller, configuration,
//! sockets.

pub mod answer_parts;
pub mod body_shape;
pub mod call;
pub mod canonical;
pub mod encoding;
pub mod fatal_request;
pub mod frame;
pub mod header;
pub mod inflate;
pub mod key_range;
pub mod method;
pub mod namespace;
pub mod outcome;
pub mod quorum;
pub mod range_cap;
pub mod scan;
pub mod schema;
pub mod touch;
pub mod trace_id;
pub mod txn_parts;
pub mod txn_permissions;
