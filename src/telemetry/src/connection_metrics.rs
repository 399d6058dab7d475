//! Metrics of client connections refused or closed by Keyward.
//!
//! Owns: names and labels. Must not know: when a connection is refused or closed.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

use crate::single_label::{SingleLabel, one};

/// Metrics of client connections refused or closed by Keyward.
#[derive(Clone)]
pub struct ConnectionMetrics {
    refused: Family<SingleLabel, Counter>,
    ended: Family<SingleLabel, Counter>,
}

/// A limit on the number of connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectionLimit {
    /// The limit on all connections.
    Connections,
    /// The limit on connections from a single client address.
    Address,
}

/// Why Keyward told an idle connection to leave, or ended a connection without notice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndReason {
    /// No authorized call arrived within `limits.first_call_timeout`.
    NoCall,
    /// The client answers no pings.
    NoAnswer,
}

impl ConnectionLimit {
    /// The configuration key of the limit.
    #[must_use]
    pub fn key(self) -> &'static str {
        match self {
            Self::Connections => "limits.connections",
            Self::Address => "limits.connections_per_address",
        }
    }

    fn label(self) -> &'static str {
        match self {
            Self::Connections => "connections",
            Self::Address => "connections_per_address",
        }
    }
}

impl EndReason {
    fn label(self) -> &'static str {
        match self {
            Self::NoCall => "no_call",
            Self::NoAnswer => "no_answer",
        }
    }
}

impl ConnectionMetrics {
    /// Metrics that this registry has.
    pub fn registered(registry: &mut Registry) -> Self {
        let figures = Self { refused: Family::default(), ended: Family::default() };
        let help = "Connections refused since a limit was reached and all others were in use, by limit";
        registry.register("downstream_connections_refused", help, figures.refused.clone());
        // From 0 on: the first refusal is an increase.
        drop([ConnectionLimit::Connections, ConnectionLimit::Address].map(|limit| figures.refused(limit)));
        let help = "Connections that were ended to make room or since they were of no use, by reason";
        registry.register("downstream_connections_ended", help, figures.ended.clone());
        figures
    }

    /// New connections refused at this limit.
    #[must_use]
    pub fn refused(&self, limit: ConnectionLimit) -> Counter {
        self.refused.get_or_create(&one("limit", limit.label())).clone()
    }

    /// Connections closed in favour of a new connection at this limit.
    #[must_use]
    pub fn made_room(&self, limit: ConnectionLimit) -> Counter {
        self.ended.get_or_create(&one("reason", limit.label())).clone()
    }

    /// Connections closed for this reason.
    #[must_use]
    pub fn ended(&self, reason: EndReason) -> Counter {
        self.ended.get_or_create(&one("reason", reason.label())).clone()
    }
}
