//! Questions of an operator to the shards.
//!
//! Owns: the way of a question to every shard, and of the answers back. Must not know: the askers, the state
//! of a shard. Invariants: a shard is asked by a message and answers in a task of its own, so that a call
//! takes no lock; a shard that does not answer in time delays the asker only.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use crate::shard_rows::{ClientRow, HotPrefixRow, KickedClient, LeaseRow, LockRow, SlowCallRow, WatchRow};
use keyward_access::policy::shadow_register::MissingGrant;

/// Questions queued per shard; the admin socket has fewer clients at a time.
const QUEUED: usize = 16;
/// Time limit for the answer of a shard.
const ANSWER: Duration = Duration::from_secs(5);

/// A question, with the way back.
pub enum ShardQuestion {
    /// The client connections.
    Clients(oneshot::Sender<Vec<ClientRow>>),
    /// The watches, by client stream and range.
    Watches(oneshot::Sender<Vec<WatchRow>>),
    /// The leases kept alive.
    Leases(oneshot::Sender<Vec<LeaseRow>>),
    /// The waiting Lock and Campaign calls.
    Locks(oneshot::Sender<Vec<LockRow>>),
    /// The slowest calls of the last minutes.
    SlowCalls(oneshot::Sender<Vec<SlowCallRow>>),
    /// The key prefixes with the most calls.
    HotPrefixes(oneshot::Sender<Vec<HotPrefixRow>>),
    /// The grants that callers lack, where the policy only counts denials; with the peer.
    Shadow(oneshot::Sender<Vec<(Option<Box<str>>, MissingGrant)>>),
    /// Asks connections to end; empty where the shard has no such connection.
    Kick(KickTarget, oneshot::Sender<Vec<KickedClient>>),
}

/// The connections that an operator asks to end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KickTarget {
    /// The connection with this number.
    Number(u64),
    /// All connections of a peer, of an etcd user, or of an address with or without its port, in the form of
    /// the view of clients.
    Named(Arc<str>),
}

impl fmt::Display for KickTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(client) => write!(f, "{client}"),
            Self::Named(name) => f.write_str(name),
        }
    }
}

/// A shard has not answered in time: it is stuck, or ending.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a shard does not answer")]
pub struct ShardSilent;

/// The shards to ask.
#[derive(Default)]
pub struct ShardQuestions {
    shards: Mutex<Vec<mpsc::Sender<ShardQuestion>>>,
    last_client: AtomicU64,
}

impl ShardQuestions {
    /// Registers a shard: the receiver gets every question from now on.
    #[must_use]
    pub fn join(&self) -> mpsc::Receiver<ShardQuestion> {
        let (sender, receiver) = mpsc::channel(QUEUED);
        self.shards.lock().unwrap_or_else(PoisonError::into_inner).push(sender);
        receiver
    }

    /// A number for a new client connection.
    #[must_use]
    pub fn next_client(&self) -> u64 {
        self.last_client.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Asks every shard, and joins the answers.
    ///
    /// # Errors
    /// A shard has not answered in time.
    pub async fn ask<T>(
        &self,
        question: impl Fn(oneshot::Sender<Vec<T>>) -> ShardQuestion,
    ) -> Result<Vec<T>, ShardSilent> {
        let shards = self.shards.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let mut answers = Vec::with_capacity(shards.len());
        for shard in shards {
            let (answer, answered) = oneshot::channel();
            // A queue of this length is full only while the shard is stuck.
            shard.try_send(question(answer)).map_err(|_| ShardSilent)?;
            answers.push(answered);
        }
        let mut rows = Vec::new();
        for answered in answers {
            let answer = timeout(ANSWER, answered).await.map_err(|_| ShardSilent)?;
            rows.extend(answer.map_err(|_| ShardSilent)?);
        }
        Ok(rows)
    }
}
