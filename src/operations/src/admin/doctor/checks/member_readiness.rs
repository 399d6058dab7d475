//! The checks of a cluster that does not serve, and of the members that get no calls.
//!
//! Owns: the findings, and the remedy by the kind of silence. Must not know: how members are asked.
//! Invariants: one dead member is one finding; a change of the member list is advised only where a quorum can
//! make the change.

use super::{DoctorFindings, DoctorInputs, name_of};
use keyward_cluster::membership::{
    AddressFault, Member, Readiness, Role, ServingState, UnansweredAddress, UnreadyReason,
};

impl DoctorInputs<'_> {
    /// Checks if the cluster serves.
    pub(super) fn cluster(&self, findings: &mut DoctorFindings) {
        let serving = self.members.serving();
        if serving == ServingState::LocalReadsOnly {
            let what = "no member has a leader: the cluster has lost its quorum, only local reads are served \
                (degraded)";
            let fix = "save what is there: etcdctl snapshot save FILE, as a user who was logged in here \
                       before (a login needs a quorum), or by a certificate; where that fails, stop a member \
                       that is left and copy member/snap/db of its data; then start the other members, or, \
                       where they are gone for good, restore the snapshot to a new cluster (etcdutl \
                       snapshot restore FILE, with --skip-hash-check for a copy): without a quorum etcd \
                       adds and removes no member";
            findings.error("quorum_lost", "cluster", what, fix);
        } else if serving != ServingState::Ready {
            let fix = "start members, or look at what stands between: etcdctl endpoint health, at their own \
                       addresses";
            findings.error("serving", "cluster", format!("no calls can be served: {serving}"), fix);
        }
        self.endpoints(findings);
    }

    /// Checks why a member gets no calls.
    pub(super) fn unready(&self, member: &Member, findings: &mut DoctorFindings) {
        let Readiness::NotReady(reason) = member.readiness else { return };
        let about = name_of(member);
        let at = format!("at {}: {reason}", member.endpoint);
        match reason {
            UnreadyReason::Unprobed | UnreadyReason::ForeignCluster => {}
            UnreadyReason::Learner => self.learner(member, findings),
            // With auth on, a learner does not disclose its cluster id.
            UnreadyReason::UnverifiedCluster if member.role == Role::Learner => {
                self.learner(member, findings)
            }
            UnreadyReason::Unreachable => {
                let (what, fix) = self.silence_of(member);
                findings.error("member_unreachable", about, what, fix);
            }
            UnreadyReason::NoLeader => {
                let fix = "look at the network between the members' peer URLs, and at their disks";
                findings.error("member_without_leader", about, at, fix);
            }
            UnreadyReason::UnverifiedCluster => {
                let fix = self.probe_fix("set cluster.probe to a user that may ask for Status");
                findings.error("cluster_unverified", about, at, fix);
            }
            UnreadyReason::Unlisted => {
                let fix = "stop it: it was removed from the cluster, or take it out of cluster.endpoints";
                findings.warning("member_unlisted", about, at, fix);
            }
        }
    }

    /// Why a member does not answer, as its address tells, and the remedy.
    fn silence_of(&self, member: &Member) -> (String, String) {
        let Member { id, endpoint, .. } = member;
        let or_replace =
            self.or_by_list(&format!("if it is gone for good: etcdctl member remove {id}, then member add"));
        let silent = self.members.unanswered.iter().find(|address| is_of(address, member));
        let Some(UnansweredAddress { trouble, why, .. }) = silent else {
            return (format!("at {endpoint}: unreachable"), format!("start it{or_replace}"));
        };
        let is_named = why.contains(&endpoint.to_string());
        let at = if is_named { String::new() } else { format!("at {endpoint}: ") };
        let fix = self.silence_fix(*trouble);
        let fix = match trouble {
            AddressFault::Connection | AddressFault::Hung | AddressFault::NoAnswer => {
                format!("{fix}{or_replace}")
            }
            AddressFault::Name
            | AddressFault::NotAllowed
            | AddressFault::Tls
            | AddressFault::Unidentified => fix.to_owned(),
        };
        (format!("{at}unreachable: {why}"), fix)
    }

    /// The remedy by the kind of silence of an address.
    pub(super) fn silence_fix(&self, trouble: AddressFault) -> &'static str {
        match trouble {
            AddressFault::Name => "mend the name's records, or cluster.endpoints",
            AddressFault::NotAllowed => "mend the SRV records, or add its host to cluster.allowed_hosts",
            AddressFault::Connection => "start the member, or look at the firewall between",
            AddressFault::Tls => {
                "mend its certificate, or cluster.tls: its ca or pinned_sha256, and the certificate that \
                 we show"
            }
            AddressFault::Hung => {
                "its process hangs, or packets to it are lost: look at its disk and at its log, then \
                 restart it"
            }
            AddressFault::NoAnswer => "look at its log: it is starting, stopping, or stuck",
            AddressFault::Unidentified => self.probe_fix("set cluster.probe to a user that may see Status"),
        }
    }

    /// True if the finding about an unreachable member has the reason of this address.
    pub(super) fn is_told_of_a_member(&self, address: &UnansweredAddress) -> bool {
        let is_unreachable =
            |member: &Member| member.readiness == Readiness::NotReady(UnreadyReason::Unreachable);
        self.members.members.iter().any(|member| is_unreachable(member) && is_of(address, member))
    }

    /// A remedy by a change of the member list, as the end of another remedy: etcd changes the list with a
    /// quorum only.
    pub(super) fn or_by_list(&self, change: &str) -> String {
        if self.members.serving() == ServingState::Ready {
            format!("; {change}")
        } else {
            "; without a quorum etcd adds and removes no member".to_owned()
        }
    }

    /// Checks if a learner can be promoted.
    fn learner(&self, member: &Member, findings: &mut DoctorFindings) {
        let about = name_of(member);
        let leader = self.members.leader.and_then(|id| self.members.get(id));
        let leader = leader.and_then(|leader| leader.store_status.as_ref());
        let (what, fix) = match (member.store_status.as_ref(), leader) {
            // etcd's own condition for a promotion (server/etcdserver/server.go, `readyPercent`).
            (Some(learner), Some(leader))
                if learner.applied.saturating_mul(10) > leader.raft_index.saturating_mul(9) =>
            {
                (
                    "it is a learner that has caught up, and does not vote".to_owned(),
                    format!("etcdctl member promote {}", member.id),
                )
            }
            (Some(learner), Some(leader)) => {
                let behind = leader.raft_index.saturating_sub(learner.applied);
                let what = format!("it is a learner, {behind} entries behind the leader");
                (what, "look again in a minute; if it is no nearer, look at its disk and network".to_owned())
            }
            _ => (
                "it is a learner: it does not vote and gets no calls".to_owned(),
                format!("etcdctl member promote {} once it has caught up", member.id),
            ),
        };
        findings.warning("learner", about, what, fix);
    }
}

/// True if the address is the one by which the member is known.
fn is_of(address: &UnansweredAddress, member: &Member) -> bool {
    let is_same_ip = address.at.is_none() || member.resolved_ip.is_none() || address.at == member.resolved_ip;
    address.endpoint == member.endpoint && is_same_ip
}
