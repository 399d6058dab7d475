//! The count and the log record of the end of a client connection.
//!
//! Owns: the choice of counter, level and text. Must not know: the serving of a connection. Invariant: ends
//! that clients can cause at will are logged at most once per interval, with their number.

use std::net::SocketAddr;
use std::sync::Arc;

use keyward_downstream::client_connection::{ClientConnectionEnd, HandshakeError};
use keyward_telemetry::log_throttle::LogThrottle;
use keyward_telemetry::metrics::Metrics;

/// Reports the ends of the client connections of one shard.
pub(super) struct ConnectionEndReport {
    metrics: Arc<Metrics>,
    /// Connections ended for too many stream resets.
    floods: LogThrottle,
    failed_handshakes: LogThrottle,
}

impl ConnectionEndReport {
    pub(super) fn new(metrics: Arc<Metrics>) -> Self {
        Self { metrics, floods: LogThrottle::default(), failed_handshakes: LogThrottle::default() }
    }

    /// Counts and logs the end of a connection of `listener` from `remote`.
    pub(super) fn ended(
        &self,
        end: Result<ClientConnectionEnd, HandshakeError>,
        listener: &str,
        remote: Option<SocketAddr>,
    ) {
        let remote = remote.map(tracing::field::display);
        match end {
            Ok(ClientConnectionEnd::Well) => {}
            Ok(ClientConnectionEnd::Silent) => {
                tracing::debug!(remote, listener, "a client answers no pings: its connection ends")
            }
            // The connection table counts and logs this refusal.
            Err(HandshakeError::Full(_)) => {}
            Ok(ClientConnectionEnd::Cut) => _ = self.metrics.connections_cut.inc(),
            Ok(ClientConnectionEnd::Flooded) => {
                self.metrics.connections_flooded.inc();
                if let Some(connections) = self.floods.count() {
                    tracing::warn!(
                        remote,
                        listener,
                        connections,
                        "connections were ended: their clients reset too many streams"
                    );
                }
            }
            Err(error) => {
                self.metrics.handshakes_failed.inc();
                self.handshake_failed(&error, listener, remote);
            }
        }
    }

    fn handshake_failed(
        &self,
        error: &HandshakeError,
        listener: &str,
        remote: Option<tracing::field::DisplayValue<SocketAddr>>,
    ) {
        if error.is_disconnect() {
            tracing::debug!(%error, remote, listener, "a handshake failed");
        } else if let Some(failures) = self.failed_handshakes.count() {
            tracing::warn!(
                %error, remote, listener, failures,
                "handshakes of clients failed; the reason is that of the last one"
            );
        }
    }
}
