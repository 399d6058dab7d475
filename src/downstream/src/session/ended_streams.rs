//! The streams ended because their session or user is no longer valid, counted over all shards.
//!
//! Owns: the count, and the newest change of the sealer that each shard has applied. Must not know: streams,
//! revocations. Invariant: once every shard has applied a change, the count has every stream that the change
//! has ended.

use std::collections::HashMap;
use std::sync::Arc;

use tokio::sync::watch;

/// The count of all shards.
#[derive(Default)]
pub struct EndedStreams {
    state: watch::Sender<EndedStreamsState>,
}

#[derive(Default)]
struct EndedStreamsState {
    /// The number of the next shard.
    next: u64,
    /// The newest change applied by each running shard.
    applied: HashMap<u64, u64>,
    ended: u64,
}

/// One shard's part in the count, until dropped.
pub struct EndedStreamsOfShard {
    streams: Arc<EndedStreams>,
    number: u64,
}

impl EndedStreams {
    /// Adds a shard without streams, which has nothing to do for `change` and earlier changes.
    #[must_use]
    pub fn join(self: &Arc<Self>, change: u64) -> EndedStreamsOfShard {
        let mut number = 0;
        self.state.send_modify(|state| {
            number = state.next;
            state.next += 1;
            state.applied.insert(number, change);
        });
        EndedStreamsOfShard { streams: Arc::clone(self), number }
    }

    /// The number of streams ended since the start.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.state.borrow().ended
    }

    /// Waits until every shard has applied `change`. Cancel-safe.
    pub async fn wait_until_applied(&self, change: u64) {
        let mut states = self.state.subscribe();
        let applied = |state: &EndedStreamsState| state.applied.values().all(|applied| *applied >= change);
        // The sender is `self`, so the wait cannot fail.
        drop(states.wait_for(applied).await);
    }
}

impl EndedStreamsOfShard {
    /// The shard has applied `change`, and has ended streams for it.
    pub fn note(&self, change: u64, ended: u64) {
        self.streams.state.send_modify(|state| {
            state.ended += ended;
            state.applied.insert(self.number, change);
        });
    }
}

impl Drop for EndedStreamsOfShard {
    fn drop(&mut self) {
        self.streams.state.send_modify(|state| {
            state.applied.remove(&self.number);
        });
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[test]
    fn a_change_is_applied_once_every_running_shard_has_applied_it() {
        let streams = Arc::new(EndedStreams::default());
        assert!(streams.wait_until_applied(7).now_or_never().is_some(), "no shard has streams");
        let (first, second) = (streams.join(6), streams.join(7));
        let mut applied = Box::pin(streams.wait_until_applied(7));
        assert!(applied.as_mut().now_or_never().is_none());
        first.note(7, 3);
        assert!(applied.as_mut().now_or_never().is_some());
        assert_eq!(streams.total(), 3);
        assert!(streams.wait_until_applied(8).now_or_never().is_none());
        first.note(8, 0);
        drop(second);
        assert!(streams.wait_until_applied(8).now_or_never().is_some(), "an ended shard holds up nobody");
    }
}
