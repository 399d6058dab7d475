//! The files that packages install beside the program: `keyward completions`, `keyward man`.
//!
//! Owns: the generation of both from the command line's own description. Must not know: any command.

use std::io::{self, Write as _};
use std::path::Path;
use std::process::ExitCode;

use clap::CommandFactory as _;
use clap_complete::Shell;

use super::{Arguments, fail, finish};

/// Prints the completion script of a shell.
pub(super) fn print_completions(shell: Shell) -> ExitCode {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Arguments::command(), "keyward", &mut script);
    finish(io::stdout().write_all(&script), ExitCode::SUCCESS)
}

/// Writes the man pages, one for each command, into an existing folder.
pub(super) fn write_man_pages(folder: &Path) -> ExitCode {
    match clap_mangen::generate_to(Arguments::command().disable_help_subcommand(true), folder) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(&format!("{}: {error}", folder.display()), ExitCode::FAILURE),
    }
}
