//! How many connections a client may have, and which are of no use.
//!
//! Owns: the resolved values of `limits.connections_per_address`, `limits.first_call_timeout`, `limits.client_ping_interval` and
//! `limits.client_ping_timeout`. Must not know: what is done with them.

use std::time::Duration;

/// Bounds on client connections beside their number in all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientConnections {
    /// Open connections of one client address.
    pub per_address: usize,
    /// A connection on which no call was let in for so long is told to go.
    pub first_call_timeout: Option<Duration>,
    /// How clients that are gone are noticed, if at all.
    pub pings: Option<ClientPings>,
}

/// When a silent client is asked whether it is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientPings {
    /// After so long without a byte of a client it is sent a PING.
    pub interval: Duration,
    /// If it sends nothing for so long after that, its connection is ended.
    pub timeout: Duration,
}

impl ClientPings {
    /// After so long at most without a sign of life a connection is ended.
    #[must_use]
    pub fn limit(&self) -> Duration {
        self.interval + self.timeout
    }
}
