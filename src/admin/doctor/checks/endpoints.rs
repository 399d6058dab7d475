//! The checks of the configured endpoints, and of the addresses in the member list.
//!
//! Owns: the findings about addresses without a member of the cluster. Must not know: members, how an address
//! is asked.

use super::{DoctorFindings, DoctorInputs};
use crate::members::discovery::keyward_page::KeywardEndpoint;
use crate::members::membership::AddressFault;

impl DoctorInputs<'_> {
    /// Checks the addresses where no member of the cluster answers.
    pub(super) fn endpoints(&self, findings: &mut DoctorFindings) {
        for foreign in &self.members.foreign {
            let what =
                format!("cluster {} answers there, which is not the one that is served", foreign.cluster);
            let fix = "take it out of cluster.endpoints, or name the cluster that is meant: cluster.id";
            findings.error("foreign_cluster", foreign.endpoint.to_string(), what, fix);
        }
        for address in &self.members.unanswered {
            let fix = match address.trouble {
                AddressFault::Name => "mend the name's records, or cluster.endpoints",
                AddressFault::NotAllowed => "mend the SRV records, or add its host to cluster.allowed_hosts",
                AddressFault::Connection => "start the member, or look at the firewall between",
                AddressFault::Tls => {
                    "mend its certificate, or cluster.tls: its ca or pinned_sha256, and the certificate that \
                     we show"
                }
                AddressFault::NoAnswer => "look at its log: it is starting, stopping, or stuck",
                AddressFault::Unidentified => {
                    self.probe_fix("set cluster.probe to a user that may see Status")
                }
            };
            findings.warning(
                "address_unanswered",
                address.endpoint.to_string(),
                address.why.to_string(),
                fix,
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
