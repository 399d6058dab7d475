//! Watches that outlive the members and tokens that carry them.
//!
//! Owns: everything between one client's Watch stream and the upstream streams that serve it. [`hub`] decides; drivers
//! move its bytes. Must not know: TLS, configuration files.

pub mod budget;
mod cursor;
pub mod fault;
pub mod hub;
pub mod session;
pub mod source;
mod wire;
