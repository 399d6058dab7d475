//! The member list as read by the probes: which list is accepted, and when the list is read again.
//!
//! Must not know: how a list is read.

use super::census::{self, ListedMember};
use super::probe::{IdentifiedMember, ProbeFailure, ProbeRefusal, ProbeReport};
use super::{MembersTask, is_ours};

impl MembersTask {
    /// True if the member's own list differs from the accepted list.
    pub(super) fn is_other_list(&self, report: &ProbeReport) -> bool {
        let ours = report.told.as_ref().is_ok_and(|told| is_ours(told.answer.cluster, self.pinned));
        let (Some(ids), Some(list)) = (&report.ids, &self.list) else { return false };
        ours && (ids.len() != list.len() || !list.iter().all(|listed| ids.contains(&listed.id)))
    }

    /// Stores a member list, or the reason for its absence. Lists from members of a different cluster are
    /// ignored.
    pub(super) fn listed(
        &mut self,
        list: Result<Vec<ListedMember>, ProbeRefusal>,
        told: &Result<IdentifiedMember, ProbeFailure>,
    ) {
        let cluster = told.as_ref().ok().and_then(|told| told.answer.cluster);
        if !is_ours(cluster, self.pinned) {
            self.schedule_list_read();
            return;
        }
        match list {
            Ok(list) => {
                self.notices.list_given();
                self.list_refused = false;
                let leads = told.as_ref().is_ok_and(|told| told.answer.leader != census::LeaderView::Nobody);
                if leads || self.list.is_none() {
                    self.known = list.iter().map(|listed| listed.id).collect();
                    self.list = Some(list);
                }
            }
            Err(refusal @ (ProbeRefusal::NoUser | ProbeRefusal::Denied)) => {
                self.notices.list_refused(refusal);
                self.list = None;
                self.list_refused = true;
            }
            Err(ProbeRefusal::Learner | ProbeRefusal::NoLeader | ProbeRefusal::Silent(_)) => {
                self.schedule_list_read()
            }
        }
    }
}
