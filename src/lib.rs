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
//! Each module belongs to a floor and imports strictly lower floors only, as checked by `tests/tidy`. From
//! the top: `app` · `admin`, `reload`, `rest` · `gateway` · `watch`, `lease`, `revocation`, `policy_store`
//! · `downstream`, `upstream`, `own_keys` · `credentials`, `audit` · `members`, `otlp` · `dial`, `policy`,
//! `usage` · `config` · `rpc` · `refusal`, `shard`, `jwt`, `users`, `authority`, `trust` · `pb`, `pem`,
//! `identity`, `published`, `secret`, `tasks`, `telemetry`, `io`.

pub mod admin;
pub mod app;
pub mod audit;
pub mod authority;
pub mod byte_account;
pub mod config;
pub mod credentials;
pub mod dial;
pub mod downstream;
pub mod gateway;
pub mod identity;
pub mod io;
pub mod jwt;
pub mod lease;
pub mod members;
pub mod otlp;
pub mod own_keys;
pub mod pb;
pub mod pem;
pub mod policy;
pub mod policy_store;
pub mod published;
pub mod refusal;
pub mod reload;
pub mod rest;
pub mod revocation;
pub mod rpc;
pub mod secret;
pub mod shard;
pub mod tasks;
pub mod telemetry;
pub mod trust;
pub mod upstream;
pub mod usage;
pub mod users;
pub mod wall_deadline;
pub mod watch;
