//! Lease-bound streams and calls: keepalives, observed elections, waiting locks. Knows neither TLS nor
//! configuration.

pub mod keepalive;
pub mod lock_queue;
pub mod lock_wait;
pub mod lock_wait_register;
pub mod observe;
pub mod observed_leaders;
pub mod pending_renewals;
pub mod renewal_namespace;
pub mod renewal_permission;
pub mod renewed_leases;
