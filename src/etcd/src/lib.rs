//! etcd's API: messages, methods, what a request touches, refusals, and the names of callers and members.

pub mod identity;
pub mod pb;
pub mod refusal;
pub mod rpc;
