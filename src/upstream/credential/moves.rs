//! Whether users and roles at etcd have changed, as far as a member shows it.
//!
//! Owns: the auth revision as last heard, asked for only while somebody wants to know it, and then once a second at most. Must
//! not know: what is concluded from it. Invariants (rules 12): a revision is told as current only if it was asked for within
//! [`CONFIRMED`]; one that a proof is noted with was heard before anything that the proof may rest on.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep_until, timeout};

use super::recall::CONFIRMED;
use super::revision::{LIMIT, Pages};

/// After so long a proof rests on nothing that was said before: not on a token's last answer, nor on a password that was taken for
/// right while it was looked at again.
const SETTLED: Duration = Duration::from_secs(4);

/// The auth revision, for all threads.
#[derive(Clone, Default)]
pub struct Moves(Arc<Shared>);

#[derive(Default)]
struct Shared {
    wanted: Notify,
    heard: watch::Sender<Heard>,
}

/// What was heard so far. 0 is unknown: etcd's begin with 1.
#[derive(Clone, Copy, Default)]
struct Heard {
    /// The last answer, and when it was asked for.
    last: Option<(u64, Instant)>,
    /// When that revision was heard first.
    since: Option<Instant>,
    /// The one before it.
    before: u64,
}

impl Heard {
    /// After this answer to what was asked then. One that no member shows is unknown: what was heard earlier may be past.
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

    /// Far more than the age that an answer may have which a proof rests on.
    fn settled(&self) -> u64 {
        match (self.last, self.since) {
            (Some((last, _)), Some(since)) if since.elapsed() >= SETTLED => last,
            _ => self.before,
        }
    }
}

impl Moves {
    /// The revision that a member shows now, asked for if need be; none where none does in time.
    ///
    /// Cancel-safe: a question that was asked goes on.
    pub async fn current(&self) -> Option<u64> {
        let mut heard = self.0.heard.subscribe();
        if let Some(revision) = heard.borrow_and_update().current() {
            return Some(revision).filter(|revision| *revision != 0);
        }
        self.0.wanted.notify_one();
        let answered = timeout(LIMIT, heard.wait_for(|heard| heard.current().is_some())).await;
        let revision = answered.ok()?.ok()?.current();
        revision.filter(|revision| *revision != 0)
    }

    /// The revision to note with a proof that begins now: one that held before all that the proof may rest on. 0 where none is
    /// known. Never waits.
    #[must_use]
    pub fn settled(&self) -> u64 {
        self.0.heard.borrow().settled()
    }

    /// Somebody will want to know it soon.
    pub fn want(&self) {
        self.0.wanted.notify_one();
    }

    /// Asks while somebody wants to know, until dropped.
    pub async fn run(self, pages: Pages) {
        loop {
            self.0.wanted.notified().await;
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
        let mut heard = Heard::default();
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
