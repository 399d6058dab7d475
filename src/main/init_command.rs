//! `keyward init`: writes a configuration for a running cluster.
//!
//! Owns: the arguments, and the file. Must not know: the text. Invariants: an existing file is replaced with
//! `--force` only; the file is readable by its owner alone.

use std::fs::{OpenOptions, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use keyward::app::config_writer::configuration_of_cluster;
use keyward::config::{ConfigSources, FlagSetting};

use super::config_arguments::ConfigFlags;
use super::{UNUSABLE, fail, finish};

/// The address for clients without `--listen`.
const LISTEN: &str = "127.0.0.1:2379";

/// Arguments of `keyward init`.
#[derive(Args)]
pub(crate) struct InitArguments {
    /// The file to write; stdout without this flag.
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
        match (configuration_of_cluster(&config, &flags), self.output) {
            (Err(error), _) => fail(&error.to_string(), ExitCode::FAILURE),
            (Ok(text), None) => finish(write!(io::stdout(), "{text}"), ExitCode::SUCCESS),
            (Ok(text), Some(file)) => match write_file(&file, &text, self.force) {
                Ok(()) => ExitCode::SUCCESS,
                Err(error) => fail(&format!("{}: {error}", file.display()), ExitCode::FAILURE),
            },
        }
    }
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
