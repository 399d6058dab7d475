//! The client side: connections, authentication evidence and sessions of clients.
//!
//! Owns: the evidence received from a client, and the bytes sent to a client. Must not know: the upstream
//! side, policy.

pub mod acceptor;
pub mod client_body;
pub mod client_certificate;
pub mod client_connection;
pub mod client_replies;
pub mod client_trust;
pub mod connection_activity;
pub mod connection_table;
mod http1_server;
mod http2_server;
mod inbound;
pub mod listener_tls;
mod message_frames;
pub mod odd_authority;
pub mod proxy_protocol;
mod read_turns;
pub mod request_memory;
pub mod request_messages;
mod reset_rate;
pub mod revision_watermark;
mod served_streams;
pub mod session;
mod sniff;
pub mod socket_progress;
pub mod stream_budget;
mod stream_turns;
pub mod turn_length;
pub mod verified_jwts;
pub mod watch_starts;
mod watched_end;
