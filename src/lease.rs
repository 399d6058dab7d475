//! Leases: keepalive streams that outlive tokens and members. Knows nothing of TLS or configuration.

pub mod keepalive;
pub mod pending;
