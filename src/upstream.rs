//! The etcd side: which members there are, how to reach them, what proves a user to them, and the one door by which
//! calls go out. Knows nothing of downstream or of policy.

pub mod connect;
pub mod membership;
pub mod version;
