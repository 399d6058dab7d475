//! The checks of the last reload of the configuration.
//!
//! Owns: the words for faults and waiting keys. Must not know: how a configuration is read. Invariant: a
//! refused configuration is one finding, with every fault.

use super::DoctorFindings;
use keyward_config::reload_request::ReloadState;

/// Checks for a configuration on disk that is not in force.
pub(super) fn check(state: &ReloadState, findings: &mut DoctorFindings) {
    if !state.faults.is_empty() {
        let what = format!(
            "the configuration on disk has faults and is not in force; the process keeps the one before, and \
             a start may refuse it, too: {}",
            state.faults.join("; ")
        );
        let fix = "keyward check names every fault of the file; correct them, then keyward reload";
        findings.error("config_not_reloaded", "configuration", what, fix);
    }
    for key in &state.pending_restart {
        let what = "the file has another value than the one in force: the change waits for a restart";
        let fix = "keyward drain, then start the service again; with several replicas, one after the other";
        findings.warning("restart_pending", *key, what, fix);
    }
    for weaker in &state.weaker {
        let fix =
            "if this was not intended, put the former value back; the audit log has the reload and its cause";
        let what = format!("a reload within the last day has weakened the protection: {}", weaker.change);
        findings.warning("configuration_weaker", "configuration", what, fix);
    }
}
