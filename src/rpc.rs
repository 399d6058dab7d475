//! etcd's RPCs: what each is, how its frames and bodies read, and what an answer proves.
//!
//! Owns: the method table, gRPC frames, the field scan and the canonical check of bodies, what routing reads from
//! a body, and the meaning of a member's status. Must not know: who is calling, configuration, sockets.

pub mod call;
pub mod canonical;
pub mod frame;
pub mod header;
pub mod inflate;
pub mod method;
pub mod outcome;
pub mod quorum;
pub mod scan;
pub mod schema;
pub mod shape;
