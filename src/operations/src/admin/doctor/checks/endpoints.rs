//! The checks of the configured endpoints, and of the addresses in the member list.
//!
//! Owns: the findings about addresses without a member of the cluster. Must not know: members, how an address
//! is asked.

use super::{DoctorFindings, DoctorInputs};
use keyward_cluster::discovery::keyward_page::KeywardEndpoint;

impl DoctorInputs<'_> {
    /// Checks the addresses where no member of the cluster answers.
    pub(super) fn endpoints(&self, findings: &mut DoctorFindings) {
        for foreign in &self.members.foreign {
            let what =
                format!("cluster {} answers there, which is not the one that is served", foreign.cluster);
            let fix = "take it out of cluster.endpoints, or name the cluster that is meant: cluster.id";
            findings.error("foreign_cluster", foreign.endpoint.to_string(), what, fix);
        }
        let unanswered = self.members.unanswered.iter();
        for address in unanswered.filter(|address| !self.is_told_of_a_member(address)) {
            let about = address.endpoint.to_string();
            findings.warning(
                "address_unanswered",
                about,
                address.why.to_string(),
                self.silence_fix(address.trouble),
            );
        }
        for KeywardEndpoint { endpoint, is_this } in self.keywards {
            let about = endpoint.to_string();
            if *is_this {
                let fix = "take it out of cluster.endpoints, and name the client URLs of the members";
                findings.error(
                    "endpoint_is_keyward",
                    about,
                    "is this Keyward itself: calls go in a circle",
                    fix,
                );
            } else {
                let what = "is another Keyward: calls pass both, and the other one decides who its client is";
                let fix = "intended at the edge of a site; see that its own endpoints do not lead back here";
                findings.note("endpoint_is_keyward", about, what, fix);
            }
        }
    }
}
