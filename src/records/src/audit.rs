//! The audit log: one record for each audited event, chained by hashes, written by a thread of its own.
//!
//! Owns: the form of a record, the queue between the serving threads and the writer, the chain with its
//! signed heads, the sinks, and reading the files again. Must not know: calls, sessions, policies; the
//! gateway collects the facts of a call.
//! Invariants: no record holds a value, a token or a password (docs/decisions.md#d55); a serving thread never
//! writes to a sink; the file waits for no other sink; the memory of waiting records is bounded; a lost
//! record is counted, and a record of the loss follows in the chain.

mod audit_folder;
pub mod chain;
mod chain_end_file;
mod file;
pub mod head_signature;
mod left_out;
mod line_follower;
pub mod log;
pub mod log_trouble;
pub mod loss_counter;
pub mod moved_file;
mod otlp_collector;
mod otlp_request;
pub mod queue;
pub mod record;
mod record_relay;
pub mod recorder;
mod refusal_share;
pub mod retention;
mod rotation;
pub mod search;
mod secondary_sink;
mod sink_lines;
mod sink_progress;
mod sink_queue;
pub mod sink_state;
mod syslog;
pub mod verify;
mod written_lines;
