//! `keyward check`: judges a configuration before a start.
//!
//! Owns: the arguments, the printed report, the exit codes: 0 (no error), 1 (an error found at the cluster or
//! in a certificate; with `--strict` a warning, too), 64 (a fault: `keyward serve` would not start). Must not
//! know: the checks.

use std::io::{self, Write as _};
use std::process::ExitCode;
use std::sync::Arc;

use clap::{Args, ValueEnum};
use keyward::app::config_check::{ConfigReport, ConfigVerdict};
use keyward::config::{ConfigFaults, ConfigSources};
use keyward::reload;
use keyward::telemetry::printable;

use super::config_arguments::ConfigArguments;
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
    /// Output format.
    #[arg(short = 'o', long = "output", value_enum, default_value_t = CheckForm::Text)]
    output: CheckForm,
    #[command(flatten)]
    config: ConfigArguments,
}

/// Output format of `keyward check`.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum CheckForm {
    /// Findings on stderr, and the verdict on stdout.
    Text,
    /// One line of JSON on stdout, for programs.
    Json,
}

impl CheckArguments {
    /// Runs the command.
    pub(crate) fn run(self) -> ExitCode {
        let sources = self.config.sources();
        let (config, warnings) = match reload::load_for_start(&sources) {
            Ok(loaded) => loaded,
            Err(faults) => return unusable(self.output, &faults, &sources),
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
        let printed = match self.output {
            CheckForm::Json => print_json(&report),
            CheckForm::Text => write!(io::stderr(), "{report}")
                .and_then(|()| writeln!(io::stdout(), "configuration is valid")),
        };
        finish(printed, code)
    }
}

fn unusable(form: CheckForm, faults: &ConfigFaults, sources: &ConfigSources) -> ExitCode {
    match form {
        CheckForm::Json => finish(print_json(&ConfigReport::of_faults(faults)), ExitCode::from(UNUSABLE)),
        CheckForm::Text => refuse(faults, sources),
    }
}

fn print_json(report: &ConfigReport) -> io::Result<()> {
    writeln!(io::stdout(), "{}", printable::json(&serde_json::to_string(report)?))
}
