//! The way to a member: name resolution, TCP, and TLS with the verification of members' certificates.
//!
//! Must not know: HTTP, members' health, credentials.

pub mod certificate_request;
pub mod connect;
pub mod member_tls;
pub mod names;
