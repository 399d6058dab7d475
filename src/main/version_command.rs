//! `keyward version`: what is installed here.
//!
//! Owns: the printed form. Must not know: a running process (`keyward show version` asks it). Invariant: the
//! same source and the same `KEYWARD_COMMIT` give the same bytes, so the build stays reproducible.

use std::fmt;
use std::process::ExitCode;

use clap::Args;
use serde::Serialize;

use super::finish;
use super::output_form::{OutputArgs, print};

/// Arguments of `keyward version`.
#[derive(Args)]
pub(super) struct VersionArguments {
    #[command(flatten)]
    as_what: OutputArgs,
}

/// The program's version.
#[derive(Serialize)]
struct ProgramVersion {
    version: &'static str,
    /// The commit of the source, if the build was told by the variable `KEYWARD_COMMIT`.
    commit: Option<&'static str>,
}

impl VersionArguments {
    /// Prints the version.
    pub(super) fn run(&self) -> ExitCode {
        let version =
            ProgramVersion { version: env!("CARGO_PKG_VERSION"), commit: option_env!("KEYWARD_COMMIT") };
        finish(print(&version, self.as_what.output), ExitCode::SUCCESS)
    }
}

impl fmt::Display for ProgramVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let commit = self.commit.map(|commit| format!(" ({commit})"));
        writeln!(f, "keyward {}{}", self.version, commit.unwrap_or_default())
    }
}
