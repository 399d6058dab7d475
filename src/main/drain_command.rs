//! `keyward drain`: begins the drain of a running Keyward, and waits for its end.
//!
//! Owns: the argument, the printed progress, the exit code. Must not know: the actions of a drain. Invariant:
//! the exit code is 0 only if the process said that nothing was cut and that no audit record is lost.

use std::io::{self, Write as _};
use std::process::ExitCode;

use clap::Args;
use keyward::admin::drain::{Phase, Progress};
use keyward::admin::socket_client;

use crate::{AdminSocketArgs, NOT_KEPT, UNKNOWN, fail, finish, no_process, not_refused, unexpected_answer};

/// The arguments of `keyward drain`.
#[derive(Args)]
pub(crate) struct DrainArguments {
    /// Drains also while audit records wait for the disk. They are lost unless there is room within
    /// drain.timeout.
    #[arg(long)]
    lose_audit_records: bool,
    #[command(flatten)]
    at: AdminSocketArgs,
}

impl DrainArguments {
    /// Begins the drain, and prints its progress until the end.
    pub(crate) fn run(self) -> ExitCode {
        let socket = match self.at.socket() {
            Ok(socket) => socket,
            Err(code) => return code,
        };
        let mut told = None;
        let mut printed = Ok(());
        let tell = |progress: Progress| {
            // Progress is printed only if more than the remaining time has changed.
            let news = Progress { left_ms: 0, ..progress };
            if progress.phase != Phase::Serving && told.replace(news) != Some(news) {
                printed = writeln!(io::stdout(), "{progress}");
            }
        };
        let ended = match socket_client::drain(&socket, self.lose_audit_records, tell) {
            Ok(Ok(last)) => last,
            Ok(Err(answer)) => return not_refused(answer).map_or_else(|code| code, |_| unexpected_answer()),
            Err(error) => return no_process(&socket, &error),
        };
        match ended {
            Progress { phase: Phase::Ended, audit_lost: lost @ 1.., .. } => {
                let reason = format!("{lost} audit records were not written, and are lost");
                fail(&reason, ExitCode::from(NOT_KEPT))
            }
            Progress { phase: Phase::Ended, cut: 0, .. } => finish(printed, ExitCode::SUCCESS),
            Progress { phase: Phase::Ended, cut, .. } => {
                fail(&format!("{cut} connections were cut with something open"), ExitCode::FAILURE)
            }
            _ => fail("it is gone, and has not said that it ended well", ExitCode::from(UNKNOWN)),
        }
    }
}
