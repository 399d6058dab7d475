//! Reads that were under way at a member when the member was lost: perhaps the cause, so refused for a while.
//!
//! Owns: which reads, and for how long. Must not know: which reads can end a member
//! (`rpc::body_shape::is_heavy`), members, how a call is refused. Invariants: memory is bounded, whatever
//! clients send; without any suspect a look costs one atomic.

use std::hash::{BuildHasher as _, RandomState};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// How long a read is a suspect: time for a lost member to come back, and for the others to give memory back.
pub const SUSPECTED_FOR: Duration = Duration::from_secs(60);
/// The most suspects. Beyond, the oldest is forgotten: so many reads of one moment have no single cause.
const MOST: usize = 1024;

/// The suspects, of all shards.
#[derive(Debug, Default)]
pub struct SuspectReads {
    /// Keyed, so that nobody can make a request that is taken for another's.
    hasher: RandomState,
    /// Digest and end of each suspect, the oldest first.
    suspects: Mutex<Vec<(ReadDigest, Instant)>>,
    count: AtomicUsize,
}

/// Tells reads apart: equal for equal paths and messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadDigest(u64);

impl SuspectReads {
    /// The digest of the read with this path and message.
    #[must_use]
    pub fn digest(&self, path: &str, message: &[u8]) -> ReadDigest {
        ReadDigest(self.hasher.hash_one((path, message)))
    }

    /// Suspects a read.
    pub fn suspect(&self, digest: ReadDigest, now: Instant) {
        let mut suspects = self.suspects.lock().unwrap_or_else(PoisonError::into_inner);
        suspects.retain(|(other, until)| *other != digest && *until > now);
        if suspects.len() >= MOST {
            suspects.remove(0);
        }
        suspects.push((digest, now + SUSPECTED_FOR));
        self.count.store(suspects.len(), Ordering::Release);
    }

    /// True if there is any suspect.
    #[must_use]
    pub fn is_any(&self) -> bool {
        self.count.load(Ordering::Acquire) > 0
    }

    /// True while the read is a suspect.
    #[must_use]
    pub fn is_suspect(&self, digest: ReadDigest, now: Instant) -> bool {
        let mut suspects = self.suspects.lock().unwrap_or_else(PoisonError::into_inner);
        suspects.retain(|(_, until)| *until > now);
        self.count.store(suspects.len(), Ordering::Release);
        suspects.iter().any(|(other, _)| *other == digest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_read_is_a_suspect_for_a_minute_and_no_other_read_is() {
        let reads = SuspectReads::default();
        let now = Instant::now();
        let read = reads.digest("/a", b"all");
        assert!(!reads.is_suspect(read, now));
        reads.suspect(read, now);
        let late = now + SUSPECTED_FOR - Duration::from_millis(1);
        assert!(reads.is_suspect(reads.digest("/a", b"all"), late));
        assert!(!reads.is_suspect(reads.digest("/b", b"all"), now));
        assert!(!reads.is_suspect(reads.digest("/a", b"some"), now));
        reads.suspect(read, late);
        assert!(reads.is_suspect(read, now + SUSPECTED_FOR), "again lost, again a minute");
        assert!(!reads.is_suspect(read, late + SUSPECTED_FOR));
        assert!(!reads.is_any());
    }

    #[test]
    fn a_flood_of_suspects_takes_no_more_memory_than_there_is() {
        let reads = SuspectReads::default();
        let now = Instant::now();
        let digest = |number: usize| reads.digest("/a", &number.to_le_bytes());
        (0..=MOST).for_each(|number| reads.suspect(digest(number), now));
        assert_eq!(reads.count.load(Ordering::Relaxed), MOST);
        assert!(!reads.is_suspect(digest(0), now));
        assert!(reads.is_suspect(digest(MOST), now));
    }
}
