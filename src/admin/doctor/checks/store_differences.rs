//! The check of members that have come to differ.
//!
//! Owns: the finding. Must not know: how a store is read. Invariant: only stores behind the same raft entries
//! are compared, while nothing is being applied.

use super::{DoctorFindings, DoctorInputs, name_of};

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
                let fix = "compare etcdctl endpoint hashkv; keep the member that the others agree with, \
                           remove and add the rest";
                findings.error("members_differ", name_of(behind), what, fix);
            }
        }
    }
}
