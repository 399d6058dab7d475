//! Metrics of client connections that Keyward refuses or ends.
//!
//! Owns: their names and labels. Must not know: when a connection is refused or ended.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

use crate::telemetry::metrics::{One, one};

/// Metrics of client connections that Keyward refuses or ends.
#[derive(Clone)]
pub struct ConnectionFigures {
    refused: Family<One, Counter>,
    ended: Family<One, Counter>,
}

/// A limit on the number of connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectionLimit {
    /// Of all.
    Connections,
    /// Of one client address.
    Address,
}

/// Why an idle connection was told to go, or one was ended without a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndReason {
    /// No call was let in within `limits.first_call_timeout`.
    NoCall,
    /// Its client answers no pings.
    NoAnswer,
}

impl ConnectionLimit {
    /// The key of the configuration.
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

impl ConnectionFigures {
    pub(crate) fn registered(registry: &mut Registry) -> Self {
        let figures = Self { refused: Family::default(), ended: Family::default() };
        let help = "Connections refused since a limit was reached and all others were in use, by limit";
        registry.register("downstream_connections_refused", help, figures.refused.clone());
        let help = "Connections that were ended to make room or since they were of no use, by reason";
        registry.register("downstream_connections_ended", help, figures.ended.clone());
        figures
    }

    /// Newcomers that were refused at this limit.
    #[must_use]
    pub fn refused(&self, limit: ConnectionLimit) -> Counter {
        self.refused.get_or_create(&one("limit", limit.label())).clone()
    }

    /// Connections that made room for a newcomer at this limit.
    #[must_use]
    pub fn made_room(&self, limit: ConnectionLimit) -> Counter {
        self.ended.get_or_create(&one("reason", limit.label())).clone()
    }

    /// Connections that were ended for this reason.
    #[must_use]
    pub fn ended(&self, reason: EndReason) -> Counter {
        self.ended.get_or_create(&one("reason", reason.label())).clone()
    }
}
