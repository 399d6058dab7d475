//! Keyward: an etcd-aware gRPC reverse proxy, one address for an etcd cluster.
//!
//! Each module belongs to a floor and imports strictly lower floors only, as checked by `tests/tidy.rs`. From
//! the top: `app` · `admin`, `reload` · `gateway` · `watch`, `lease`, `revocation` · `downstream`, `upstream`
//! · `policy` · `config` · `rpc` · `refusal`, `shard`, `jwt`, `users`, `authority` · `pb`, `pem`, `identity`,
//! `published`, `secret`, `tasks`, `telemetry`, `io`.

pub mod admin;
pub mod app;
pub mod authority;
pub mod config;
pub mod downstream;
pub mod gateway;
pub mod identity;
pub mod io;
pub mod jwt;
pub mod lease;
pub mod pb;
pub mod pem;
pub mod policy;
pub mod published;
pub mod refusal;
pub mod reload;
pub mod revocation;
pub mod rpc;
pub mod secret;
pub mod shard;
pub mod tasks;
pub mod telemetry;
pub mod upstream;
pub mod users;
pub mod watch;
