//! Watches able to survive the loss of members and tokens.
//!
//! Owns: all state between a client's Watch stream and the upstream streams. [`hub`] decides; drivers move
//! bytes. Must not know: TLS, configuration files.

pub mod access;
mod cursor;
mod feed;
pub mod feed_joins;
mod feed_log;
pub mod feeds;
pub mod hub;
pub mod limited_watches;
pub mod planted_fault;
pub mod request_gate;
mod revision_check;
pub mod session_driver;
pub mod shared_session;
pub mod stream_state;
pub mod upstream_stream;
mod watch_messages;
