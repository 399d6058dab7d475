//! What callers may be and do here.
//!
//! Owns: decisions, as plain functions of what is known. Must not know: sockets, tasks, clocks.

pub mod mapping;
