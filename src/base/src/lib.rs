//! The ground of all rooms: tasks, shards, published values, secrets, byte accounts, PEM, and I/O.

pub mod byte_account;
pub mod io;
pub mod pem;
pub mod published;
pub mod secret;
pub mod shard;
pub mod tasks;
pub mod wall_deadline;
