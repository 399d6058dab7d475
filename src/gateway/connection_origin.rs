//! The origin of a client connection, as repeated in the records of its calls.
//!
//! Owns: listener and address. Must not know: calls, records.

use std::net::SocketAddr;
use std::sync::Arc;

/// The facts of a connection repeated in each record.
#[derive(Debug)]
pub struct ConnectionOrigin {
    /// The listener's name.
    pub listener: Arc<str>,
    /// The client's address; `None` on a unix socket.
    pub remote: Option<SocketAddr>,
    /// The text of `remote`.
    pub remote_text: Option<Box<str>>,
}

impl ConnectionOrigin {
    /// The origin of a connection accepted by `listener`.
    #[must_use]
    pub fn new(listener: Arc<str>, remote: Option<SocketAddr>) -> Self {
        Self { listener, remote, remote_text: remote.map(|remote| remote.to_string().into()) }
    }
}
