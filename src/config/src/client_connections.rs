//! Limits on client connections per address, and on idle and dead connections.
//!
//! Owns: the resolved values of `limits.connections_per_address`, `limits.first_call_timeout`,
//! `limits.client_ping_interval` and `limits.client_ping_timeout`. Must not know: their enforcement.

use std::time::Duration;

/// Limits on client connections, apart from their total number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientConnections {
    /// Open connections of one client address.
    pub per_address: usize,
    /// A connection without an admitted call for so long gets a GOAWAY; `None` for no limit.
    pub first_call_timeout: Option<Duration>,
    /// Detection of dead clients, if enabled.
    pub pings: Option<ClientPings>,
}

/// Times of the PINGs to silent clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientPings {
    /// A client silent for so long is sent a PING.
    pub interval: Duration,
    /// A client silent for so long after the PING is disconnected.
    pub timeout: Duration,
}

impl ClientPings {
    /// Maximum silence of a connection before it is closed.
    #[must_use]
    pub fn limit(&self) -> Duration {
        self.interval + self.timeout
    }
}
