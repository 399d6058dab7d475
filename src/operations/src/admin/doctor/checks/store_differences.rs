//! The checks of members that have come to differ.
//!
//! Owns: the findings. Must not know: how a store is read, or hashed. Invariants: revisions are compared of
//! stores behind the same raft entries, while nothing is being applied; hashes, behind the same revision and
//! compaction.

use std::collections::BTreeMap;

use super::{DoctorFindings, DoctorInputs, name_of};
use keyward_cluster::discovery::store_hashes::{HashObstacle, StoreHash};
use keyward_cluster::membership::Role;
use keyward_etcd::identity::MemberId;

impl DoctorInputs<'_> {
    /// Compares the stores of members that have applied the same entries.
    pub(super) fn stores(&self, findings: &mut DoctorFindings) {
        let mut settled: Vec<_> = self
            .members
            .members
            .iter()
            .filter_map(|member| {
                let status = member.store_status.as_ref()?;
                Some((status.applied, status.settled_revision()?, member))
            })
            .collect();
        settled.sort_unstable_by_key(|(applied, revision, member)| (*applied, *revision, member.id));
        for pair in settled.windows(2) {
            let [(applied, low, behind), (same, high, ahead)] = pair else { continue };
            if applied == same && low != high {
                let what = format!(
                    "differs from {}: with raft entry {applied} applied by both, the revisions are {low} and \
                     {high}",
                    name_of(ahead)
                );
                let fix = "compare etcdctl endpoint hashkv of the members themselves; keep the member that \
                           the others agree with, remove and add the rest";
                findings.error("members_differ", name_of(behind), what, fix);
            }
        }
        self.hashes(findings);
    }

    /// Compares the hashes of the stores.
    fn hashes(&self, findings: &mut DoctorFindings) {
        for group in self.hashes.comparable() {
            self.hash_group(&group, findings);
        }
        for (member, why) in &self.hashes.unread {
            let why = match why {
                HashObstacle::Large => {
                    "it has more than 2 GiB: etcdctl endpoint hashkv, at the members themselves".to_owned()
                }
                HashObstacle::NoAnswer => "it did not answer in time".to_owned(),
                HashObstacle::OtherRevision => {
                    format!("revision {} is not there, or compacted", self.hashes.revision)
                }
            };
            findings.unseen(format!("{}: the hash of its store: {why}", self.name(*member)));
        }
    }

    /// Compares hashes behind the same revision and compaction. Most of all voters are right against the
    /// rest.
    fn hash_group(&self, group: &[&StoreHash], findings: &mut DoctorFindings) {
        let mut by_hash = BTreeMap::<u32, Vec<MemberId>>::new();
        for one in group {
            by_hash.entry(one.hash).or_default().push(one.member);
        }
        let Some(compacted) = group.first().map(|one| one.compact_revision).filter(|_| by_hash.len() > 1)
        else {
            return;
        };
        let voters = self.members.members.iter().filter(|member| member.role == Role::Voter).count();
        let right = by_hash.iter().find(|(_, members)| members.len() * 2 > voters).map(|(hash, _)| *hash);
        let names = |members: &[MemberId]| {
            members.iter().map(|member| self.name(*member)).collect::<Vec<_>>().join(", ")
        };
        let told: Vec<_> =
            by_hash.iter().map(|(hash, members)| format!("{hash} at {}", names(members))).collect();
        let compacted = if compacted > 0 { format!(", compacted at {compacted},") } else { String::new() };
        let what = format!(
            "the stores differ: at revision {}{compacted} the HashKV hashes are {}",
            self.hashes.revision,
            told.join("; ")
        );
        let differing: Vec<_> = by_hash
            .iter()
            .filter(|(hash, _)| Some(**hash) != right)
            .flat_map(|(_, members)| members.clone())
            .collect();
        let fix = match right.and_then(|right| by_hash.get(&right)) {
            Some(right) => format!(
                "keep {}, which agree; remove the rest one by one and add each again, empty: etcdctl member \
                 remove ID, then member add",
                names(right)
            ),
            None => "no majority agrees: save a snapshot of each member, at its own address, and decide \
                     whose content is right before members are removed and added again, empty"
                .to_owned(),
        };
        findings.error("members_differ", names(&differing), what, fix);
    }

    fn name(&self, member: MemberId) -> String {
        self.members.get(member).map_or_else(|| format!("member {member}"), |member| name_of(member))
    }
}
