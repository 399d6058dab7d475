//! Handles a leader missing from the last member list.
//!
//! Owns: when a missing leader triggers a read of the list. Must not know: how the list is read.

use tokio::time::Instant;

use super::MembersTask;
use super::probed_address::FORCED;
use crate::membership::Membership;

impl MembersTask {
    /// Schedules a read of the member list if the leader is missing from it: the leader is newer than the
    /// list, and calls for the leader wait for the next list.
    pub(super) fn find_unlisted_leader(&mut self, before: &Membership, after: &Membership) {
        let Some(leader) = after.leader else { return };
        let has_no_address = after.absent.iter().any(|absent| absent.id == leader);
        if after.get(leader).is_some() || has_no_address {
            return;
        }
        if before.leader == Some(leader) {
            self.schedule_list_read();
        } else {
            self.list_due = self.list_asked.map_or_else(Instant::now, |asked| asked + FORCED);
        }
    }
}
