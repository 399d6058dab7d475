//! Tracks changes of users and roles at etcd by the auth revision, as shown by members.
//!
//! Owns: the auth revision last heard; members are asked only on demand, at most twice per [`CONFIRMED`].
//! Must not know: the consequences of a change. Invariants (docs/decisions.md#d12): a revision is reported as
//! current only if a member was asked within [`CONFIRMED`]; a revision recorded with a proof was heard before
//! any evidence used by the proof.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep_until, timeout};

use super::password_memory::CONFIRMED;
use super::signing_revision::{LIMIT, MetricsPages};

/// Time after which a new proof uses no evidence from before: neither a token's last answer, nor a password
/// accepted while under revalidation.
const SETTLED: Duration = Duration::from_secs(4);

/// The auth revision, shared by all threads.
#[derive(Clone, Default)]
pub struct AuthRevisionTracker(Arc<TrackerShared>);

#[derive(Default)]
struct TrackerShared {
    requested: Notify,
    heard: watch::Sender<HeardRevisions>,
}

/// The auth revisions heard so far. 0 means unknown: etcd's auth revisions begin at 1.
#[derive(Clone, Copy, Default)]
struct HeardRevisions {
    /// The last answer, and when the question was sent.
    last: Option<(u64, Instant)>,
    /// When the last revision was first heard.
    since: Option<Instant>,
    /// The previous revision.
    before: u64,
}

impl HeardRevisions {
    /// Returns the state after an answer to a question sent at `asked`. A revision of 0, from no member
    /// showing a revision, also replaces the last revision, because the last revision may be outdated.
    fn after(self, revision: u64, asked: Instant) -> Self {
        match self.last {
            Some((last, _)) if last == revision => Self { last: Some((last, asked)), ..self },
            last => Self {
                last: Some((revision, asked)),
                since: Some(Instant::now()),
                before: last.map_or(0, |(last, _)| last),
            },
        }
    }

    fn current(&self) -> Option<u64> {
        self.last.filter(|(_, asked)| asked.elapsed() < CONFIRMED).map(|(revision, _)| revision)
    }

    /// The revision settled now: the last revision if first heard at least `SETTLED` ago, otherwise the
    /// previous revision. `SETTLED` is far longer than the maximum age of an answer used by a proof.
    fn settled(&self) -> u64 {
        match (self.last, self.since) {
            (Some((last, _)), Some(since)) if since.elapsed() >= SETTLED => last,
            _ => self.before,
        }
    }
}

impl AuthRevisionTracker {
    /// Returns the current auth revision; asks members if the last answer is too old. None if no member
    /// answers in time.
    ///
    /// Cancel-safe: a question already sent continues.
    pub async fn current(&self) -> Option<u64> {
        let mut heard = self.0.heard.subscribe();
        if let Some(revision) = heard.borrow_and_update().current() {
            return Some(revision).filter(|revision| *revision != 0);
        }
        self.0.requested.notify_one();
        let answered = timeout(LIMIT, heard.wait_for(|heard| heard.current().is_some())).await;
        let revision = answered.ok()?.ok()?.current();
        revision.filter(|revision| *revision != 0)
    }

    /// The revision to record with a proof that begins now: a revision in force before any evidence the proof
    /// may use. 0 if unknown. Never waits.
    #[must_use]
    pub fn settled(&self) -> u64 {
        self.0.heard.borrow().settled()
    }

    /// Requests a fresh auth revision ahead of use.
    pub fn request(&self) {
        self.0.requested.notify_one();
    }

    /// Asks members on demand, until dropped.
    pub async fn run(self, pages: MetricsPages) {
        loop {
            self.0.requested.notified().await;
            let asked = Instant::now();
            let revision = pages.auth_revision().await.unwrap_or(0);
            self.0.heard.send_modify(|heard| *heard = heard.after(revision, asked));
            sleep_until(asked + CONFIRMED / 2).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_proof_is_noted_with_what_held_before_it() {
        let mut heard = HeardRevisions::default();
        assert_eq!((heard.current(), heard.settled()), (None, 0));
        heard = heard.after(7, Instant::now());
        assert_eq!((heard.current(), heard.settled()), (Some(7), 0), "what is known may be of before");
        advance(CONFIRMED).await;
        assert_eq!((heard.current(), heard.settled()), (None, 0));
        advance(SETTLED - CONFIRMED).await;
        assert_eq!(heard.settled(), 7);
        heard = heard.after(7, Instant::now());
        assert_eq!((heard.current(), heard.settled()), (Some(7), 7));
        heard = heard.after(8, Instant::now());
        assert_eq!((heard.current(), heard.settled()), (Some(8), 7));
        advance(SETTLED).await;
        assert_eq!(heard.settled(), 8);
        heard = heard.after(0, Instant::now());
        assert_eq!(heard.settled(), 8);
        advance(SETTLED).await;
        assert_eq!(heard.settled(), 0, "nobody shows it any more");
    }
}
