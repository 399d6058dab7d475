//! The client side: who is calling.
//!
//! Owns: what a client shows us and what we hand it. Must not know: the upstream side, policy.

pub mod certificate;
pub mod connection;
pub mod connection_activity;
pub mod connection_table;
mod first;
pub mod floor;
pub mod http1;
mod inbound;
pub mod jwt;
pub mod listener;
pub mod odd_authority;
pub mod proxied;
mod read_turns;
pub mod request_memory;
pub mod requests;
mod reset_rate;
pub mod said;
mod served_streams;
pub mod session;
mod socket_progress;
pub mod tls;
pub mod watch_starts;
