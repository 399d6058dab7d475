//! Streams that outlive a connection: watches and keepalives of leases.

pub mod lease;
pub mod watch;
