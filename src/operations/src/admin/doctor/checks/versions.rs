//! The checks of the members' versions.
//!
//! Owns: the findings about versions. Must not know: version numbers (`members::version`).

use std::collections::BTreeSet;

use super::{DoctorFindings, DoctorInputs};
use keyward_cluster::membership::AuthSetting;
use keyward_cluster::open_holes::OpenHoles;
use keyward_config::RequireIdentity;

impl DoctorInputs<'_> {
    /// Checks if the members run versions that etcd supports together.
    pub(super) fn versions(&self, findings: &mut DoctorFindings) {
        let known = || self.members.members.iter().filter_map(|member| member.version);
        let lines: BTreeSet<_> = known().map(|version| version.line()).collect();
        let all: BTreeSet<_> = known().map(|version| version.to_string()).collect();
        let what = || format!("members run {}", all.iter().cloned().collect::<Vec<_>>().join(", "));
        match (lines.first(), lines.last()) {
            (Some(oldest), Some(newest)) if oldest.0 != newest.0 || newest.1 - oldest.1 > 1 => {
                let fix = "etcd supports one minor version apart: bring the oldest to the next minor first";
                findings.error("version_skew", "cluster", what(), fix);
            }
            _ if all.len() > 1 => {
                let fix = "finish the upgrade: until then the cluster does what its oldest member can";
                findings.warning("version_skew", "cluster", what(), fix);
            }
            _ => {}
        }
    }

    /// Notes what members of their version do on a direct connection, and not through Keyward: end or split
    /// over a request, and apply writes without permission while an alarm is raised.
    pub(super) fn weaknesses(&self, findings: &mut DoctorFindings) {
        let OpenHoles { weaknesses, unchecked_under_alarm, .. } = self.members.open_holes();
        let mut open = Vec::new();
        if weaknesses.sort_options {
            open.push("ends over a range with an unknown sort target (etcd-io/etcd#13554)");
        }
        if weaknesses.split_txns {
            open.push(
                "may differ from the others after a txn that writes, and reads at a revision or without \
                 permission (etcd-io/etcd#18667)",
            );
        }
        if weaknesses.lost_leases {
            open.push("forgets leases with a negative or the largest id at a restart");
        }
        if unchecked_under_alarm {
            open.push(
                "applies deletions and changes of users without permission while an alarm is raised \
                 (etcd-io/etcd#22386)",
            );
        }
        if !open.is_empty() {
            let what =
                format!("some member, on a direct connection: {}; not through Keyward", open.join("; "));
            let fix = "let nobody but Keyward reach the members' client URLs, or bring the members to \
                       etcd 3.7; protection.mode sheds writes before the quota is reached";
            findings.note("member_weaknesses", "cluster", what, fix);
        }
    }

    /// Checks the members for published holes in etcd's access control: open on a direct connection, and
    /// closed through Keyward.
    pub(super) fn open_holes(&self, findings: &mut DoctorFindings) {
        let holes = self.members.open_holes();
        if self.auth != AuthSetting::On {
            return;
        }
        let mut open = Vec::new();
        if holes.unguarded_methods {
            open.push("leases, members and maintenance without a user or without root (CVE-2026-33413)");
        }
        if holes.unchecked_txns {
            open.push("nested Txns, and prev_kv and leases in Txns (CVE-2026-33343, etcd-io/etcd#21683)");
        }
        if holes.told_lease_keys {
            open.push("the keys of every lease");
        }
        if holes.unchecked_watches {
            open.push("watches beyond the permitted key (GHSA-xg4h-6gfc-h4m8)");
        }
        if open.is_empty() {
            return;
        }
        let through = match self.config.policy.require_identity {
            RequireIdentity::AsEtcd if holes.unguarded_methods => {
                "closed, except for calls without a user (policy.require_identity = \"as-etcd\")"
            }
            RequireIdentity::AsEtcd | RequireIdentity::Strict => "closed",
        };
        let what = format!(
            "some member's version does not check, on a direct connection: {}; through Keyward this is \
             {through}",
            open.join("; "),
        );
        let fix = "let nobody but Keyward reach the members' client URLs, or bring the members to the newest \
                   patch release of a supported line";
        findings.warning("open_holes", "cluster", what, fix);
    }
}
