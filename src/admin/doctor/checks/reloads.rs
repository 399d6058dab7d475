//! The checks of the last reload of the configuration.
//!
//! Owns: the words for faults and waiting keys. Must not know: how a configuration is read. Invariant: a
//! refused configuration is one finding, with every fault.

use super::DoctorFindings;
use crate::config::reload_request::ReloadState;

/// Checks for a configuration on disk that is not in force.
pub(super) fn check(state: &ReloadState, findings: &mut DoctorFindings) {
    if !state.faults.is_empty() {
        let what = format!(
            "the configuration on disk has faults and is not in force; the process keeps the one before, and \
             a start may refuse it, too: {}",
            state.faults.join("; ")
        );
        let fix = "mend the file: keyward check tells all faults; then keyward reload";
        findings.error("config_not_reloaded", "configuration", what, fix);
    }
    for key in &state.pending_restart {
        let what = "it says otherwise in the file: that is not in force, and waits for a restart";
        let fix = "keyward drain, and start it again; with several replicas, one after the other";
        findings.warning("restart_pending", *key, what, fix);
    }
    for weaker in &state.weaker {
        let fix =
            "if nobody meant it, put the former value back; the audit log has the reload with its cause";
        let what = format!("a reload has weakened it within the last day: {}", weaker.change);
        findings.warning("configuration_weaker", "configuration", what, fix);
    }
}
