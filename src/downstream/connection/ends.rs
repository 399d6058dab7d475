//! When a client connection is told to leave, and when what is left of it is cut.
//!
//! Owns: the reasons, and the time that each leaves to what is open. Must not know: HTTP/2, what is served. Invariants
//! (rules 16): what was shown at the handshake is looked at again whenever the listener's TLS changes, from that which the
//! handshake was made by on; age alone cuts nothing: streams go on for as long as their client wants.

use std::future::pending;
use std::time::{Duration, SystemTime};

use rustls::pki_types::{CertificateDer, UnixTime};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use crate::downstream::tls::Current;

/// After its welcome was over, what is open on a connection has this long to end.
pub const LAST_CALLS: Duration = Duration::from_secs(10);

/// Why and when a connection ends that its client does not end.
pub(super) struct Ends {
    /// The process drains, and until when.
    pub(super) drain: Option<watch::Receiver<Option<Instant>>>,
    /// Its welcome is over then.
    pub(super) until: Option<Instant>,
    /// It has become old then.
    pub(super) old_at: Option<Instant>,
    /// What its client has shown, where it was asked.
    pub(super) shown: Option<Shown>,
    /// To be called when that counts no more.
    pub(super) dismiss: Option<Box<dyn FnOnce()>>,
    /// What is left is cut then.
    pub(super) limit: Option<Instant>,
}

/// What becomes of a connection.
pub(super) enum Turn {
    /// It takes no more streams, and ends with its last.
    Leave,
    /// It ends now.
    Cut,
}

/// What a client has shown at the handshake, and what it is held against.
pub(super) struct Shown {
    tls: Current,
    changes: watch::Receiver<()>,
    chain: Vec<CertificateDer<'static>>,
    /// Its end is told by a timer, or does not count.
    expires: Option<SystemTime>,
}

impl Ends {
    /// The next turn of the connection. Cancel-safe.
    pub(super) async fn next(&mut self) -> Turn {
        let Self { drain, until, old_at, shown, dismiss, limit } = self;
        let latest = |limit: Option<Instant>, at: Instant| Some(limit.map_or(at, |limit| limit.min(at)));
        // All arms are cancel-safe, and what follows one does not wait.
        tokio::select! {
            by = drained(drain) => {
                *drain = None;
                *limit = latest(*limit, by);
            }
            () = over(*until) => {
                *until = None;
                *limit = latest(*limit, Instant::now() + LAST_CALLS);
            }
            () = fallen(shown) => {
                tracing::info!("a client's certificate is good no more: its connection ends");
                *shown = None;
                if let Some(dismiss) = dismiss.take() {
                    dismiss();
                }
                *limit = latest(*limit, Instant::now() + LAST_CALLS);
            }
            () = over(*old_at) => *old_at = None,
            () = over(*limit) => return Turn::Cut,
        }
        Turn::Leave
    }
}

impl Shown {
    /// `changes` began before the handshake took what it was made by.
    pub(super) fn new(tls: Current, changes: watch::Receiver<()>, chain: &[CertificateDer<'static>]) -> Self {
        Self { tls, changes, chain: chain.to_vec(), expires: None }
    }

    /// The client's own certificate.
    pub(super) fn leaf(&self) -> Option<&CertificateDer<'static>> {
        self.chain.first()
    }

    /// When that expires, which is for others to judge.
    pub(super) fn expires(&mut self, at: Option<SystemTime>) {
        self.expires = at;
    }

    fn is_good(&self) -> bool {
        let now = SystemTime::now();
        let when = self.expires.map_or(now, |end| end.min(now));
        let when = when.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        self.tls.load().admits(&self.chain, UnixTime::since_unix_epoch(when))
    }
}

/// Waits until what was shown is good no more.
async fn fallen(shown: &mut Option<Shown>) {
    let Some(shown) = shown else { return pending().await };
    while shown.changes.changed().await.is_ok() {
        if !shown.is_good() {
            return;
        }
    }
    pending().await
}

/// Waits for the drain, and says until when it goes.
async fn drained(drain: &mut Option<watch::Receiver<Option<Instant>>>) -> Instant {
    let Some(drain) = drain else { return pending().await };
    let at = drain.wait_for(Option::is_some).await.map_or(None, |at| *at);
    at.unwrap_or_else(Instant::now)
}

async fn over(at: Option<Instant>) {
    match at {
        Some(at) => sleep_until(at).await,
        None => pending().await,
    }
}
