//! `keyward check`: judges a configuration before a start.
//!
//! Owns: the arguments, the printed report, the exit codes: 0 (no error), 1 (an error found at the cluster or
//! in a certificate; with `--strict` a warning, too), 64 (a fault: `keyward serve` would not start). Must not
//! know: the checks.

use std::io::{self, Write as _};
use std::process::ExitCode;
use std::sync::Arc;

use clap::Args;
use keyward::app::config_check::{ConfigReport, ConfigVerdict};
use keyward::config::{ConfigFaults, ConfigSources};
use keyward::reload;

use super::config_arguments::ConfigArguments;
use super::output_form::{OutputArgs, OutputForm, print_json};
use super::{UNUSABLE, fail, finish, refuse};

/// Arguments of `keyward check`.
#[derive(Args)]
pub(crate) struct CheckArguments {
    /// Fails upon warnings, too.
    #[arg(long)]
    strict: bool,
    /// Connects to the members, and logs in as cluster.probe; for five seconds at most while a member is
    /// silent.
    #[arg(long)]
    dial: bool,
    #[command(flatten)]
    as_what: OutputArgs,
    #[command(flatten)]
    config: ConfigArguments,
}

impl CheckArguments {
    /// Runs the command.
    pub(crate) fn run(self) -> ExitCode {
        let sources = self.config.sources();
        let (config, warnings) = match reload::load_for_start(&sources) {
            Ok(loaded) => loaded,
            Err(faults) => return unusable(self.as_what.output, &faults, &sources),
        };
        let report = match ConfigReport::of_config(&Arc::new(config), &warnings, self.dial) {
            Ok(report) => report,
            Err(error) => return fail(&error.to_string(), ExitCode::FAILURE),
        };
        let code = match report.verdict {
            ConfigVerdict::Errors => ExitCode::FAILURE,
            ConfigVerdict::Warnings if self.strict => ExitCode::FAILURE,
            ConfigVerdict::Warnings | ConfigVerdict::Fine => ExitCode::SUCCESS,
        };
        let printed = match self.as_what.output {
            OutputForm::Json => print_json(&report),
            OutputForm::Table => write!(io::stderr(), "{report}").and_then(|()| {
                let verdict = match report.verdict {
                    ConfigVerdict::Errors => "configuration can be loaded, and has errors",
                    ConfigVerdict::Warnings | ConfigVerdict::Fine => "configuration is valid",
                };
                writeln!(io::stdout(), "{verdict}")
            }),
        };
        finish(printed, code)
    }
}

fn unusable(form: OutputForm, faults: &ConfigFaults, sources: &ConfigSources) -> ExitCode {
    match form {
        OutputForm::Json => finish(print_json(&ConfigReport::of_faults(faults)), ExitCode::from(UNUSABLE)),
        OutputForm::Table => refuse(faults, sources),
    }
}
