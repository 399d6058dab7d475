//! The files that packages install beside the program: `keyward completions`, `keyward man`.
//!
//! Owns: the generation of both from the command line's own description. Must not know: any command.

use std::fs::File;
use std::io::{self, Write as _};
use std::path::Path;
use std::process::ExitCode;

use clap::Command;
use clap_complete::Shell;
use clap_mangen::Man;

use super::command_help::{command, notes_of};
use super::{fail, finish};

/// Prints the completion script of a shell.
pub(super) fn print_completions(shell: Shell) -> ExitCode {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command(), "keyward", &mut script);
    finish(io::stdout().write_all(&script), ExitCode::SUCCESS)
}

/// Writes the man pages, one for each command, into an existing folder.
pub(super) fn write_man_pages(folder: &Path) -> ExitCode {
    let mut whole = command().disable_help_subcommand(true);
    whole.build();
    match write_page(&whole, "", folder) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(&format!("{}: {error}", folder.display()), ExitCode::FAILURE),
    }
}

/// Writes the page of a command, and the pages of the commands below. `path` has the words of the command.
fn write_page(command: &Command, path: &str, folder: &Path) -> io::Result<()> {
    for below in command.get_subcommands().filter(|below| !below.is_hide_set()) {
        write_page(below, format!("{path} {}", below.get_name()).trim_start(), folder)?;
    }
    let page = Man::new(command.clone());
    let mut file = File::create(folder.join(page.get_filename()))?;
    page.render_title(&mut file)?;
    page.render_name_section(&mut file)?;
    page.render_synopsis_section(&mut file)?;
    page.render_description_section(&mut file)?;
    page.render_options_section(&mut file)?;
    if command.has_subcommands() {
        page.render_subcommands_section(&mut file)?;
    }
    if let Some(notes) = notes_of(path) {
        file.write_all(notes.roff().as_bytes())?;
    }
    if command.get_version().is_some() {
        page.render_version_section(&mut file)?;
    }
    file.flush()
}
