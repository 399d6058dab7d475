//! Policy decisions about callers.
//!
//! Owns: decisions, as plain functions of the known facts. Must not know: sockets, tasks, clocks.

pub mod mapping;
