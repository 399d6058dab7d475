//! The etcd side: the cluster's members, the connections to members, users' credentials, and the single way
//! to send calls ([`send`]). Must not know: downstream, policy.

pub mod answer;
pub mod bidi;
pub mod certificate_pool;
pub mod change_notifications;
pub mod choose;
pub mod cluster_outage;
pub mod connect;
mod connection_slots;
pub mod credential;
pub mod delay_counters;
pub mod ejection;
pub mod evacuation;
pub mod leaderless;
pub mod member_connection;
pub mod member_health;
pub mod member_load;
pub mod member_queue;
pub mod member_tls;
pub mod members;
pub mod membership;
pub mod names;
pub mod outage_state;
pub mod own_requests;
pub mod peer_urls;
pub mod pool;
pub mod quarantine;
pub mod resume_limiter;
pub mod send;
pub mod store_status;
pub mod stream_counts;
pub mod version;
pub mod waiting_calls;
