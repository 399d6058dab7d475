//! When a client connection is told to leave, and when what is left of it is cut.
//!
//! Owns: the reasons, and the time that each leaves to what is open. Must not know: HTTP/2, what is served. Invariants
//! (rules 16): a connection that is of no use, or makes room for another, is cut only while no stream is open on it or no call was let
//! in; what was shown at the handshake is looked at again whenever the listener's TLS changes, from that which the
//! handshake was made by on; age alone cuts nothing: streams go on for as long as their client wants.

use std::future::pending;
use std::time::{Duration, SystemTime};

use rustls::pki_types::{CertificateDer, UnixTime};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use crate::downstream::connection_table::ConnectionPlace;
use crate::downstream::tls::Current;
use crate::telemetry::connections::{ConnectionFigures, EndReason};

/// After its welcome was over, what is open on a connection has this long to end.
pub const LAST_CALLS: Duration = Duration::from_secs(10);
/// A client without an open stream has this long to read that it is to go; one that has never called loses nothing if it does not.
const GOODBYE: Duration = Duration::from_secs(1);
const SHORT_GOODBYE: Duration = Duration::from_millis(50);

/// Why and when a connection ends that its client does not end.
pub(super) struct Ends {
    /// The process drains, and until when.
    drain: Option<watch::Receiver<Option<Instant>>>,
    /// Its welcome is over then.
    pub(super) until: Option<Instant>,
    /// It has become old then.
    pub(super) old_at: Option<Instant>,
    /// What its client has shown, where it was asked.
    pub(super) shown: Option<Shown>,
    /// To be called when that counts no more.
    dismiss: Option<Box<dyn FnOnce()>>,
    /// What is left is cut then.
    limit: Option<Instant>,
    /// Whether it is in use, and who else wants its place.
    place: ConnectionPlace,
    /// How long it may be open without a call that was let in, and from when on.
    pub(super) first_call: Option<(Duration, Instant)>,
    /// It was told to go since it is of no use or makes room, and is cut then if that is still so.
    unused_until: Option<Instant>,
    /// Counts those that never called.
    figures: ConnectionFigures,
}

/// What becomes of a connection.
pub(super) enum Turn {
    /// It takes no more streams, and ends with its last.
    Leave,
    /// It ends now.
    Cut,
    /// It ends now, with nothing open on it that was let in.
    Close,
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
    /// Nothing but the drain and the wish for its place ends it.
    pub(super) fn new(
        drain: watch::Receiver<Option<Instant>>,
        dismiss: Box<dyn FnOnce()>,
        place: ConnectionPlace,
        figures: ConnectionFigures,
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

    /// The next turn of the connection. Cancel-safe.
    pub(super) async fn next(&mut self) -> Turn {
        loop {
            if let Some(turn) = self.next_event().await {
                return turn;
            }
        }
    }

    async fn next_event(&mut self) -> Option<Turn> {
        let Self { drain, until, old_at, shown, dismiss, limit, place, first_call, unused_until, .. } = self;
        let first_call_by = first_call.map(|(time, from)| from + time);
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
            () = over(*limit) => return Some(Turn::Cut),
            () = place.activity().room_wanted() => return self.make_room(),
            () = over(first_call_by) => return self.first_call_is_late(),
            () = over(*unused_until) => return self.close_unused(),
        }
        Some(Turn::Leave)
    }

    /// Another connection wants the place of this one. What is in use since then stays.
    fn make_room(&mut self) -> Option<Turn> {
        let activity = self.place.activity();
        if !activity.may_make_room() {
            self.place.stay();
            return None;
        }
        let goodbye = if activity.has_called() { GOODBYE } else { SHORT_GOODBYE };
        self.unused_until = Some(Instant::now() + goodbye);
        Some(Turn::Leave)
    }

    fn first_call_is_late(&mut self) -> Option<Turn> {
        let activity = self.place.activity();
        let first_call = self.first_call.take()?;
        if activity.has_called() {
            return None;
        }
        if activity.has_streams() {
            // Health checks go on; it is looked at again.
            self.first_call = Some((first_call.0, Instant::now()));
            return None;
        }
        self.figures.ended(EndReason::NoCall).inc();
        self.unused_until = Some(Instant::now() + GOODBYE);
        Some(Turn::Leave)
    }

    fn close_unused(&mut self) -> Option<Turn> {
        self.unused_until = None;
        if self.place.activity().may_make_room() {
            return Some(Turn::Close);
        }
        // It has been told to go: it ends with the streams that began meanwhile.
        self.place.stay();
        None
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
