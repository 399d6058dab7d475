//! A leader that the member list, as it was had last, does not have.
//!
//! Owns: when the list is asked for because of it. Must not know: how it is asked for.

use tokio::time::Instant;

use super::Task;
use super::place::FORCED;
use crate::upstream::membership::Membership;

impl Task {
    /// A leader that nobody knows the address of is newer than the member list: calls for the leader wait for the next list.
    pub(super) fn find_unlisted_leader(&mut self, before: &Membership, after: &Membership) {
        let Some(leader) = after.leader else { return };
        let has_no_address = after.absent.iter().any(|absent| absent.id == leader);
        if after.get(leader).is_some() || has_no_address {
            return;
        }
        if before.leader == Some(leader) {
            self.look_at_list_soon();
        } else {
            self.list_due = self.list_asked.map_or_else(Instant::now, |asked| asked + FORCED);
        }
    }
}
