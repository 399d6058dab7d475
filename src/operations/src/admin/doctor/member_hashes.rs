//! The hashes of the members' stores for an examination.
//!
//! Owns: the last hashes, and when an examination reads them anew. Must not know: how a hash is asked for,
//! the findings. Invariants: the hashes are read once at a time, whoever examines; an examination repeated
//! for a page that is open reads them once in [`KEPT`].

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::Instant;

use super::{Doctor, ExaminedFor};
use keyward_cluster::discovery::store_hashes::{StoreHashes, read_hashes};

/// How long an examination for a page uses hashes again: hashing a store of 2 GB takes the member a third of
/// a second.
const KEPT: Duration = Duration::from_secs(600);

/// The hashes last read. The lock is held while hashes are read.
#[derive(Debug, Default)]
pub struct LastHashes(Mutex<Option<ReadHashes>>);

#[derive(Debug)]
struct ReadHashes {
    begun: Instant,
    hashes: Arc<StoreHashes>,
}

impl Doctor {
    /// The hashes of the members' stores: for a command read after the command's arrival.
    pub(super) async fn member_hashes(&self, examined_for: ExaminedFor) -> Arc<StoreHashes> {
        let arrived = Instant::now();
        let mut last = self.last_hashes.0.lock().await;
        let may_use = |read: &&ReadHashes| match examined_for {
            ExaminedFor::Command => read.begun >= arrived,
            ExaminedFor::Page => read.begun.elapsed() < KEPT,
        };
        if let Some(read) = last.as_ref().filter(may_use) {
            return Arc::clone(&read.hashes);
        }
        let begun = Instant::now();
        let config = self.config.load_full();
        let ask = async |member, revision| {
            let asked = (self.members.auth.now(), config.cluster.probe.as_ref());
            self.credentials.store_hash(asked, member, revision).await
        };
        let hashes = Arc::new(read_hashes(|| self.members.snapshot.load_full(), ask).await);
        *last = Some(ReadHashes { begun, hashes: Arc::clone(&hashes) });
        hashes
    }
}
