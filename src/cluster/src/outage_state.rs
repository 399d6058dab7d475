//! The outage state of the cluster as a value, and the notification of its changes.
//!
//! Must not know: members, streams.

use arc_swap::ArcSwapOption;
use tokio::time::Instant;

use crate::change_notifications::{ChangeReceiver, ChangeSender};

/// The outage state of the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outage {
    /// At least one voter is ready.
    None,
    /// No voter is ready, and at least one voter answers and sees no leader.
    NoLeader {
        /// The start of this state.
        since: Instant,
    },
    /// No voter is ready, and no voter answers.
    Unreachable {
        /// The start of this state.
        since: Instant,
    },
}

/// Notifies streams of changes of the [`Outage`]. Separate from the membership changes, which are more
/// frequent: listening costs an idle stream nothing.
#[derive(Debug)]
pub struct OutageChanges {
    pub(super) sender: ChangeSender,
    pub(super) changes: ChangeReceiver,
    /// When a member last ended an established stream for a missing leader.
    pub(super) stream_ended: ArcSwapOption<Instant>,
}

impl Default for OutageChanges {
    fn default() -> Self {
        let (sender, changes) = ChangeReceiver::channel();
        Self { sender, changes, stream_ended: ArcSwapOption::empty() }
    }
}
