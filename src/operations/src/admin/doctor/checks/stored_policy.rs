//! The checks of the policy stored in etcd.
//!
//! Owns: findings and fixes. Must not know: the keys of the policy.

use std::time::Duration;

use super::{DoctorFindings, readiness};
use crate::policy_store::PolicyStoreStatus;
use keyward_config::Config;

/// Age of the last confirmation reported as an error: polls are a quarter of a second apart.
const OLD: Duration = Duration::from_secs(10);

/// Checks the stored policy.
pub(super) fn check(config: &Config, status: Option<&PolicyStoreStatus>, findings: &mut DoctorFindings) {
    let about = "policy.etcd_prefix";
    let Some(status) = status else { return };
    if !status.is_known {
        let why = status.unread.as_ref().map(|why| format!(" ({why})")).unwrap_or_default();
        let what = format!("the stored policy was never read{why}, so every call is refused");
        let stored = config.policy.stored.as_ref();
        let role = stored.and_then(|stored| Some(readiness::role_of(stored.login.as_ref()?, &stored.prefix)));
        let fix = format!(
            "restore the policy there (keyward policy apply), or let cluster.probe or policy.user read and \
             write the prefix{}",
            role.unwrap_or_default()
        );
        findings.error("policy_unknown", about, what, fix);
    }
    if let Some(fault) = &status.fault {
        let in_force = status.generation;
        let what =
            format!("the stored policy cannot be used, and generation {in_force} stays in force: {fault}");
        let fix = "store a good policy again: keyward policy show >FILE, then keyward policy apply FILE";
        findings.error("policy_faulty", about, what, fix);
    } else if status.age() > OLD {
        let (seconds, in_force) = (status.age().as_secs(), status.generation);
        let what = format!("for {seconds} s the policy was not read: generation {in_force} stays in force");
        let fix = "start members, and let policy.user read and write the prefix; see keyward status";
        findings.error("policy_old", about, what, fix);
    }
    if status.is_known && status.generation == 0 && status.fault.is_none() {
        let source = if config.policy.document.roles.is_empty() {
            "nobody has a role"
        } else {
            "policy.file is in force"
        };
        let what = format!("nothing was ever applied there: {source}");
        findings.warning("policy_not_applied", about, what, "keyward policy apply FILE");
    }
}
