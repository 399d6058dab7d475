//! Graceful and forced end of a client connection.
//!
//! Owns: the reasons for an end, and the grace period of each for open streams. Must not know: HTTP/2, the
//! services served. Invariants: an unused or evicted connection is closed only while no stream is open or no
//! call was admitted. The client's certificate chain is judged again on every change of the listener's trust
//! in clients, including changes during the handshake, in turns (`docs/decisions.md#d16`). Age alone cuts no
//! stream: streams continue for as long as the client wants.

use std::future::pending;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rustls::pki_types::{CertificateDer, UnixTime};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use crate::client_trust::{ClientTrust, VerificationTurns};
use crate::connection_table::ConnectionPlace;
use crate::listener_tls::CurrentListenerTls;
use keyward_base::wall_deadline::{WallDeadline, passed_if_any};
use keyward_telemetry::connection_metrics::{ConnectionMetrics, EndReason};

/// Grace period for open streams after the client's certificate has expired or become invalid, or after an
/// operator has asked the connection to close.
pub const LAST_CALLS: Duration = Duration::from_secs(10);
/// Grace period for a client without an open stream to read the GOAWAY; shorter for a client without any
/// call, which loses no work.
const GOODBYE: Duration = Duration::from_secs(1);
const SHORT_GOODBYE: Duration = Duration::from_millis(5);
/// Grace period for a client whose first call is late, in whose place nobody waits: longer than a leaving
/// connection of HTTP/1 may be idle, whose requests may be no calls.
const LONG_GOODBYE: Duration = Duration::from_secs(6);

/// The reasons and times for ending a connection from Keyward's side.
pub(super) struct ConnectionShutdown {
    /// Carries the process's drain deadline once the process drains.
    drain: Option<watch::Receiver<Option<Instant>>>,
    /// End of the client's admission: GOAWAY, and the cut after [`LAST_CALLS`].
    pub(super) until: Option<WallDeadline>,
    /// Time of the GOAWAY for age.
    pub(super) old_at: Option<Instant>,
    /// The client's certificate chain, if certificates are requested.
    pub(super) shown: Option<PeerCertificateChain>,
    /// Called when the certificate becomes invalid.
    dismiss: Option<Box<dyn FnOnce()>>,
    /// Time at which open streams are cut.
    limit: Option<Instant>,
    /// The place in the connection table: reports activity and eviction requests.
    place: ConnectionPlace,
    /// Time limit until the first admitted call, and its start.
    pub(super) first_call: Option<(Duration, Instant)>,
    /// Set after a GOAWAY for being unused or evicted: the connection is closed at this time if still unused.
    unused_until: Option<Instant>,
    /// Counts connections closed for making no call.
    figures: ConnectionMetrics,
}

/// The next step in the connection's end.
pub(super) enum ShutdownStep {
    /// Accept no new streams; the connection ends with its last stream.
    Leave,
    /// End now, cutting open streams.
    Cut,
    /// End now, with no admitted stream open.
    Close,
}

/// The client's certificate chain, and the TLS settings for verifying the chain.
pub(super) struct PeerCertificateChain {
    tls: CurrentListenerTls,
    changes: watch::Receiver<()>,
    chain: Vec<CertificateDer<'static>>,
    /// Expiry of the certificate. A timer acts on expiry, or the configuration ignores expiry, so the chain
    /// is verified as of a time no later than the expiry.
    expires: Option<SystemTime>,
    /// The trust by which the chain was judged last.
    judged_by: Arc<ClientTrust>,
    turns: VerificationTurns,
}

impl ConnectionShutdown {
    /// Only the drain and an eviction end the connection until further fields are set.
    pub(super) fn new(
        drain: watch::Receiver<Option<Instant>>,
        dismiss: Box<dyn FnOnce()>,
        place: ConnectionPlace,
        figures: ConnectionMetrics,
    ) -> Self {
        Self {
            drain: Some(drain),
            until: None,
            old_at: None,
            shown: None,
            dismiss: Some(dismiss),
            limit: None,
            place,
            first_call: None,
            unused_until: None,
            figures,
        }
    }

    /// The next step in the connection's end. Cancel-safe.
    pub(super) async fn next(&mut self) -> ShutdownStep {
        loop {
            if let Some(turn) = self.next_event().await {
                return turn;
            }
        }
    }

    async fn next_event(&mut self) -> Option<ShutdownStep> {
        let Self { drain, until, old_at, shown, dismiss, limit, place, first_call, unused_until, .. } = self;
        let first_call_by = first_call.map(|(time, from)| from + time);
        let latest = |limit: Option<Instant>, at: Instant| Some(limit.map_or(at, |limit| limit.min(at)));
        // All arms are cancel-safe, and no arm's handler awaits.
        tokio::select! {
            by = drain_deadline(drain) => {
                *drain = None;
                *limit = latest(*limit, by);
            }
            () = passed_if_any(*until) => {
                *until = None;
                *limit = latest(*limit, Instant::now() + LAST_CALLS);
            }
            () = chain_invalid(shown) => {
                tracing::info!("a client's certificate is no longer valid: its connection ends");
                *shown = None;
                if let Some(dismiss) = dismiss.take() {
                    dismiss();
                }
                *limit = latest(*limit, Instant::now() + LAST_CALLS);
            }
            () = sleep_until_some(*old_at) => {
                *old_at = None;
                if place.activity().is_age_spared() {
                    return None;
                }
            }
            () = sleep_until_some(*limit) => return Some(ShutdownStep::Cut),
            () = place.activity().room_wanted() => return self.make_room(),
            () = sleep_until_some(first_call_by) => return self.first_call_is_late(),
            () = sleep_until_some(*unused_until) => return self.close_unused(),
        }
        Some(ShutdownStep::Leave)
    }

    /// Handles an eviction, or an operator's request to close. An evicted connection in use again is kept.
    fn make_room(&mut self) -> Option<ShutdownStep> {
        let activity = self.place.activity();
        if activity.is_kicked() {
            let by = Instant::now() + LAST_CALLS;
            self.limit = Some(self.limit.map_or(by, |limit| limit.min(by)));
            return Some(ShutdownStep::Leave);
        }
        if !activity.may_make_room() {
            self.place.stay();
            return None;
        }
        let goodbye = if activity.has_called() { GOODBYE } else { SHORT_GOODBYE };
        self.unused_until = Some(Instant::now() + goodbye);
        Some(ShutdownStep::Leave)
    }

    fn first_call_is_late(&mut self) -> Option<ShutdownStep> {
        let activity = self.place.activity();
        let first_call = self.first_call.take()?;
        if activity.has_called() {
            return None;
        }
        if activity.has_health_checks() {
            // Only health checks are running: keep the connection, and check again later.
            self.first_call = Some((first_call.0, Instant::now()));
            return None;
        }
        self.figures.ended(EndReason::NoCall).inc();
        // The open stream is another protocol, which has taken the connection over.
        let goodbye = if activity.has_streams() { GOODBYE } else { LONG_GOODBYE };
        self.unused_until = Some(Instant::now() + goodbye);
        Some(ShutdownStep::Leave)
    }

    fn close_unused(&mut self) -> Option<ShutdownStep> {
        self.unused_until = None;
        if self.place.activity().may_make_room() {
            return Some(ShutdownStep::Close);
        }
        // GOAWAY was sent already: the connection ends with the streams begun meanwhile.
        self.place.stay();
        None
    }
}

impl PeerCertificateChain {
    /// A chain that the handshake has judged by `judged_by`. `changes` must be subscribed before the
    /// handshake loads the TLS settings.
    pub(super) fn new(
        tls: CurrentListenerTls,
        changes: watch::Receiver<()>,
        chain: &[CertificateDer<'static>],
        judged_by: Arc<ClientTrust>,
        turns: VerificationTurns,
    ) -> Self {
        Self { tls, changes, chain: chain.to_vec(), expires: None, judged_by, turns }
    }

    /// The client's own certificate.
    pub(super) fn leaf(&self) -> Option<&CertificateDer<'static>> {
        self.chain.first()
    }

    /// Sets the expiry; verification ignores expiry.
    pub(super) fn expires(&mut self, at: Option<SystemTime>) {
        self.expires = at;
    }

    /// Judges the chain by `trust`.
    fn is_good(&self, trust: &ClientTrust) -> bool {
        let now = SystemTime::now();
        let when = self.expires.map_or(now, |end| end.min(now));
        let when = when.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        trust.admits_chain(&self.chain, UnixTime::since_unix_epoch(when))
    }
}

/// Waits until the chain no longer verifies. Cancel-safe.
async fn chain_invalid(shown: &mut Option<PeerCertificateChain>) {
    let Some(shown) = shown else { return pending().await };
    loop {
        let trust = Arc::clone(shown.tls.load().trust());
        if Arc::ptr_eq(&trust, &shown.judged_by) {
            if shown.changes.changed().await.is_err() {
                return pending().await;
            }
            continue;
        }
        let is_good = shown.turns.judge(|| shown.is_good(&trust)).await;
        shown.judged_by = trust;
        if !is_good {
            return;
        }
    }
}

/// Waits for the drain; returns the drain deadline.
async fn drain_deadline(drain: &mut Option<watch::Receiver<Option<Instant>>>) -> Instant {
    let Some(drain) = drain else { return pending().await };
    let at = drain.wait_for(Option::is_some).await.map_or(None, |at| *at);
    at.unwrap_or_else(Instant::now)
}

async fn sleep_until_some(at: Option<Instant>) {
    match at {
        Some(at) => sleep_until(at).await,
        None => pending().await,
    }
}
