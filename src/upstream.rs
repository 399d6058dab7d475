//! The etcd side: which members there are, how to reach them, what proves a user to them, and the one door by which
//! calls go out. Knows nothing of downstream or of policy.

pub mod answer;
pub mod balance;
pub mod bidi;
pub mod carried;
pub mod changes;
pub mod choose;
pub mod conduct;
pub mod connect;
pub mod connection;
pub mod credential;
pub mod delays;
pub mod departures;
pub mod examine;
pub mod fleet;
pub mod leaderless;
pub mod members;
pub mod membership;
pub mod names;
pub mod outage;
pub mod peer_urls;
pub mod pool;
pub mod read;
pub mod resumes;
pub mod send;
mod slots;
pub mod standing;
pub mod tls;
pub mod turns;
pub mod version;
pub mod vitals;
