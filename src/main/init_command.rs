//! `keyward init`: writes a configuration for a running cluster.
//!
//! Owns: the arguments, the file, and a session key beside it. Must not know: the text. Invariants: an
//! existing file is replaced with `--force` only, a session key never; their owner alone may read both.

use std::fs::{OpenOptions, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use keyward::app::config_writer::configuration_of_cluster;
use keyward::config::{self, ConfigSources, FlagSetting};

use super::config_arguments::ConfigFlags;
use super::{UNUSABLE, fail, finish};

/// The address for clients without `--listen`.
const LISTEN: &str = "127.0.0.1:2379";

/// Arguments of `keyward init`.
#[derive(Args)]
pub(crate) struct InitArguments {
    /// The file to write, with a new session key beside it unless --session-key names one; stdout without
    /// this flag.
    #[arg(short = 'o', long = "output", value_name = "FILE")]
    output: Option<PathBuf>,
    /// Replaces an existing file.
    #[arg(long, requires = "output")]
    force: bool,
    #[command(flatten)]
    flags: ConfigFlags,
}

impl InitArguments {
    /// Runs the command.
    pub(crate) fn run(self) -> ExitCode {
        // Told before the members are asked.
        if let Some(file) = self.output.as_deref().filter(|file| !self.force && file.exists()) {
            return fail(&format!("{} exists; --force replaces it", file.display()), ExitCode::FAILURE);
        }
        let mut flags = self.flags.settings();
        if !flags.iter().any(|flag| flag.key == "listener[0].address") {
            for (key, value) in [("listener[0].address", LISTEN), ("listener[0].name", "clients")] {
                flags.push(FlagSetting { flag: "--listen", key, value: value.to_owned(), yields: false });
            }
        }
        let config = match ConfigSources::default().with_flags(flags.clone()).load() {
            Ok((config, _)) => config,
            Err(faults) => return fail(&faults.to_string(), ExitCode::from(UNUSABLE)),
        };
        let key = self.output.as_deref().and_then(|file| key_beside(file, &mut flags));
        match (configuration_of_cluster(&config, &flags), self.output) {
            (Err(error), _) => fail(&error.to_string(), ExitCode::FAILURE),
            (Ok(text), None) => finish(write!(io::stdout(), "{text}"), ExitCode::SUCCESS),
            (Ok(text), Some(file)) => write_and_tell(&file, &text, key.as_deref(), self.force),
        }
    }
}

/// Names a session key beside the file in `flags`, unless `flags` name one. Returns the key's path if the key
/// has to be made.
fn key_beside(file: &Path, flags: &mut Vec<FlagSetting>) -> Option<PathBuf> {
    if flags.iter().any(|flag| flag.key == "session.key_files") {
        return None;
    }
    let key = file.with_file_name("session.key");
    let value = key.to_str()?.to_owned();
    flags.push(FlagSetting { flag: "--session-key", key: "session.key_files", value, yields: false });
    (!key.exists()).then_some(key)
}

/// Writes the files, and prints their names and the next commands.
fn write_and_tell(file: &Path, text: &str, key: Option<&Path>, force: bool) -> ExitCode {
    let failed =
        |path: &Path, error: &io::Error| fail(&format!("{}: {error}", path.display()), ExitCode::FAILURE);
    if let Some(key) = key
        && let Err(error) = config::write_session_key(key)
    {
        return failed(key, &error);
    }
    if let Err(error) = write_file(file, text, force) {
        return failed(file, &error);
    }
    let name = file.display();
    let key = key.map(|key| format!(", {} (new, the same on every replica)", key.display()));
    let told = writeln!(
        io::stdout(),
        "written: {name}{}\n\
         next:    keyward check --dial --config {name}\n\
         \x20        keyward serve --config {name}",
        key.unwrap_or_default()
    );
    finish(told, ExitCode::SUCCESS)
}

fn write_file(path: &Path, text: &str, force: bool) -> io::Result<()> {
    let mut options = OpenOptions::new();
    options.write(true).mode(0o600);
    let mut file = match force {
        true => options.create(true).truncate(true).open(path)?,
        false => options.create_new(true).open(path)?,
    };
    // The mode of an existing file stays otherwise.
    file.set_permissions(Permissions::from_mode(0o600))?;
    file.write_all(text.as_bytes())?;
    file.sync_all()
}
