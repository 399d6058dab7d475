//! Keyward: an etcd-aware gRPC reverse proxy, one address for an etcd cluster.
//!
//! ```text
//!            downstream                     gateway                        upstream
//!  client ──► acceptor ─► connection ─► pipeline: identify the caller ─► exchange: choose a member,
//!             TLS, HTTP/2, limits        judge the body, register         prove the user, send,
//!                                        streams, apply limits            try again where safe ──► member
//!                                   Watch, LeaseKeepAlive, Lock and Observe: watch, lease
//! ```
//!
//! Reading order for a newcomer:
//! 1. [`app`]: the composition of the process in one visible order.
//! 2. [`gateway::pipeline`], [`gateway::exchange`]: the way of a call; [`rpc::method`], [`rpc::outcome`]: the
//!    tables behind both.
//! 3. [`gateway::caller`] and [`downstream::session`]: who calls; [`policy`]: as which etcd user.
//! 4. [`members::membership`], [`members::choose`] and [`upstream::send`]: members, and the choice of one.
//! 5. [`watch::hub`]: watches, a state machine without I/O.
//!
//! `ARCHITECTURE.md` has the invariants, `docs/glossary.md` the words, `docs/decisions.md` the reasons, and
//! `docs/etcd-facts.md` the behaviour of etcd by version.
//!
//! The rooms are packages below `src/`; this library has the composition, and shows all their modules.

pub mod app;
pub mod reload;

pub use keyward_access::{policy, usage};
pub use keyward_base::{byte_account, io, pem, published, secret, shard, tasks, wall_deadline};
pub use keyward_cluster as members;
pub use keyward_config as config;
pub use keyward_config::{authority, jwt, trust, users};
pub use keyward_dial as dial;
pub use keyward_downstream as downstream;
pub use keyward_etcd::{identity, pb, refusal, rpc};
pub use keyward_gateway as gateway;
pub use keyward_operations::{admin, policy_store, revocation};
pub use keyward_records::{audit, otlp};
pub use keyward_rest as rest;
pub use keyward_streams::{lease, watch};
pub use keyward_telemetry as telemetry;
pub use keyward_upstream as upstream;
pub use keyward_upstream::{credentials, own_keys};
