//! Leases and what lives by them: keepalives, elections that are observed, locks that are waited for. Knows nothing of TLS
//! or configuration.

pub mod claim;
pub mod claims;
pub mod keepalive;
pub mod leaders;
pub mod observe;
pub mod pending;
pub mod ticket;
