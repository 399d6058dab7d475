//! The answers of one replica in two forms: `keyward sessions`, `keyward reload`.
//!
//! Owns: printing the answers, and their exit codes. Must not know: the socket, the fields of an answer.

use std::process::ExitCode;

use keyward::admin::socket::{AdminAnswer, AdminCommand as Ask};
use keyward::config::reload_request::ReloadOutcome;

use super::output_form::{OutputForm, TableForm, print};
use super::{AdminSocketArgs, fail, finish, send_command_or_exit, unexpected_answer};

/// Prints the sessions and the revoked users.
pub(super) fn sessions(at: AdminSocketArgs, form: TableForm) -> ExitCode {
    match send_command_or_exit(at, &Ask::Sessions {}) {
        Ok(AdminAnswer::Sessions(listing)) => {
            finish(form.print(&listing, |listing, width| listing.text(width)), ExitCode::SUCCESS)
        }
        Ok(_) => unexpected_answer(),
        Err(code) => code,
    }
}

/// Reloads the configuration. Faults are an error as text, and an answer as JSON.
pub(super) fn reload(at: AdminSocketArgs, form: OutputForm) -> ExitCode {
    match send_command_or_exit(at, &Ask::Reload {}) {
        Ok(AdminAnswer::Reloaded(outcome)) => {
            let code = if outcome.is_applied() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
            match (form, &outcome) {
                (OutputForm::Table, ReloadOutcome::Refused { .. }) => fail(&outcome.to_string(), code),
                _ => finish(print(&outcome, form), code),
            }
        }
        Ok(_) => unexpected_answer(),
        Err(code) => code,
    }
}
