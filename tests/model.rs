//! A small, honest etcd: its history, its members and its Watch service, without I/O, clock, threads or dice.
//!
//! Owns: what a member of a chosen version answers on a Watch stream, move by move, as `watch.go`, `watchable_store.go` and
//! `watcher_group.go` of etcd 3.4.23, 3.5.1 and 3.5.35 do it. Must not know Keyward: it speaks etcd's messages. Invariants: the same
//! moves give the same answers; the only choice is the caller's, which move comes next. Not here: leases (they are ids), authentication
//! (the caller says whether a create is permitted), gRPC and its flow control.
//!
//! `tests/etcd/model_replay.rs` holds it to real servers: its answers at rest to all kinds of requests, watches that catch up or are overtaken
//! by a compaction, full channels, progress by the clock. By etcd's source alone stand: what a snapshot does to watches, revisions that
//! slip in between the two halves of a create, and the row of 3.5.16.
//!
//! Other rings include this file by `#[path]`.

#[path = "model/flavor.rs"]
pub(crate) mod flavor;
#[path = "model/interval.rs"]
pub(crate) mod interval;
#[path = "model/member.rs"]
pub(crate) mod member;
#[path = "model/send.rs"]
pub(crate) mod send;
#[path = "model/store.rs"]
pub(crate) mod store;
#[path = "model/stream.rs"]
pub(crate) mod stream;
#[path = "model/watcher.rs"]
pub(crate) mod watcher;

#[cfg(test)]
#[path = "model/tests.rs"]
mod tests;
