//! Single flight: callers wanting the same result at the same time share one run of the work.
//!
//! Owns: the work under way by key, and the callers waiting for each result. Must not know: the work.
//! Invariants (docs/decisions.md#d42): the work goes on after any caller has left; work is admitted and
//! entered under one lock, so no two callers begin work with the same key; the key is free before the waiting
//! callers are woken, and the worker has published the result before.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex};

use futures_util::FutureExt as _;
use futures_util::future::Shared;
use tokio::sync::oneshot;

use super::lock;

/// Work under way, by key. Clones share the state.
pub struct SingleFlight<K, V>(Arc<Mutex<HashMap<K, SharedResult<V>>>>);

type SharedResult<V> = Shared<oneshot::Receiver<V>>;

/// Work under way, as seen by a waiting caller. Callers are woken in the order of their arrival.
pub struct RunningWork<V> {
    result: SharedResult<V>,
    /// True if another caller began the work.
    pub has_joined: bool,
}

/// Reports a result to the waiting callers. If dropped, the callers learn that no result will come.
pub struct WorkReport<K: Copy + Eq + Hash, V: Clone> {
    all: SingleFlight<K, V>,
    key: K,
    waiting: Option<oneshot::Sender<V>>,
}

/// The work under way that a caller joins.
#[derive(Clone, Copy)]
pub enum Joinable {
    /// Work with the caller's key.
    SameKey,
    /// Work with any key.
    AnyKey,
}

impl<K: Copy + Eq + Hash, V: Clone> SingleFlight<K, V> {
    /// Joins work under way, or begins work with this key: `admit` decides, and returns the function that
    /// starts the work and hands the worker the [`WorkReport`].
    ///
    /// # Errors
    /// The answer of `admit`, if no work may begin.
    pub fn join_or_begin<S: FnOnce(WorkReport<K, V>), E>(
        &self,
        key: K,
        joinable: Joinable,
        admit: impl FnOnce() -> Result<S, E>,
    ) -> Result<RunningWork<V>, E> {
        let mut running = lock(&self.0);
        let joined = match joinable {
            Joinable::SameKey => running.get(&key),
            Joinable::AnyKey => running.values().next(),
        };
        if let Some(result) = joined {
            return Ok(RunningWork { result: result.clone(), has_joined: true });
        }
        let start = admit()?;
        let (waiting, result) = oneshot::channel();
        let result = result.shared();
        running.insert(key, result.clone());
        drop(running);
        start(WorkReport { all: self.clone(), key, waiting: Some(waiting) });
        Ok(RunningWork { result, has_joined: false })
    }
}

impl<V: Clone> RunningWork<V> {
    /// Waits for the result. `None` if the work ended without a result, or if `workers_ended` came first,
    /// since no task would finish the work. Cancel-safe; a result takes precedence.
    pub async fn result_unless(self, workers_ended: impl Future<Output = ()>) -> Option<V> {
        tokio::select! {
            biased;
            result = self.result => result.ok(),
            () = workers_ended => None,
        }
    }
}

impl<K: Copy + Eq + Hash, V: Clone> WorkReport<K, V> {
    /// Ends the work: no caller joins from here on, and the waiting callers get the result.
    pub fn report(mut self, result: V) {
        if let Some(waiting) = self.leave()
            && waiting.send(result).is_err()
        {
            tracing::trace!("no caller waits for a login any more");
        }
    }

    fn leave(&mut self) -> Option<oneshot::Sender<V>> {
        let waiting = self.waiting.take()?;
        lock(&self.all.0).remove(&self.key);
        Some(waiting)
    }
}

impl<K: Copy + Eq + Hash, V: Clone> Drop for WorkReport<K, V> {
    fn drop(&mut self) {
        drop(self.leave());
    }
}

impl<K, V> Clone for SingleFlight<K, V> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<K, V> Default for SingleFlight<K, V> {
    fn default() -> Self {
        Self(Arc::default())
    }
}
