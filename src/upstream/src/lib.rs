//! Connections to the members and the single way to send calls ([`send`]).
//!
//! Must not know: downstream, policy, how members are found and users are proved.

pub mod answer;
pub mod answer_size;
pub mod bidi;
pub mod certificate_pool;
mod certificate_refusals;
pub mod connection_load;
mod connection_slots;
pub mod credentials;
pub mod ejection;
pub mod evacuation;
pub mod lease_grant;
pub mod member_connection;
pub mod member_queue;
pub mod outbox;
pub mod own_keys;
pub mod own_requests;
pub mod peer_urls;
pub mod permission_probe;
pub mod pool;
pub mod reopening_stream;
pub mod resume_limiter;
pub mod send;
pub mod upstream_request;
pub mod waiting_calls;
