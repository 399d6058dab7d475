//! Resolves the limits on client connections.
//!
//! Owns: the defaults and bounds of `limits.connections_per_address`, `limits.first_call_timeout`,
//! `limits.client_ping_interval` and `limits.client_ping_timeout`. Must not know: further limits.

use std::time::Duration;

use super::{DAY, Resolver, SECOND, toml_file};
use crate::{ClientConnections, ClientPings};

impl Resolver<'_> {
    /// Resolves the limits; `connections` is the limit over all addresses.
    pub(super) fn client_connections(
        &mut self,
        limits: &mut toml_file::TomlLimits,
        connections: usize,
    ) -> ClientConnections {
        let half = u32::try_from(connections.div_ceil(2).max(1)).unwrap_or(u32::MAX);
        let path = "limits.connections_per_address";
        let per_address = self.count(path, limits.connections_per_address, half, 1..=1 << 24);
        let path = "limits.first_call_timeout";
        let first_call =
            self.optional_duration(path, limits.first_call_timeout.take(), Duration::from_secs(600));
        let path = "limits.client_ping_interval";
        let interval =
            self.optional_duration(path, limits.client_ping_interval.take(), Duration::from_secs(30));
        let path = "limits.client_ping_timeout";
        let default = Duration::from_secs(15);
        let timeout = self.duration(path, limits.client_ping_timeout.take(), default, SECOND..=DAY);
        let pings = interval.map(|interval| ClientPings { interval, timeout });
        ClientConnections { per_address, first_call_timeout: first_call, pings }
    }

    /// Resolves a time of at least a second; `0s` disables the feature.
    pub(super) fn optional_duration(
        &mut self,
        path: &str,
        text: Option<String>,
        default: Duration,
    ) -> Option<Duration> {
        let time = self.duration(path, text, default, Duration::ZERO..=DAY);
        if !time.is_zero() && time < SECOND {
            self.findings.fault(path, format!("must be 0s or at least {SECOND:?}"));
        }
        Some(time).filter(|time| !time.is_zero())
    }
}
