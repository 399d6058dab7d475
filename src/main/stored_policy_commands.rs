//! The commands to the policy stored in etcd: `keyward policy`, `grant`, `ungrant`, `grants`.
//!
//! Owns: the arguments, and printing the answers. Must not know: the storage. Invariant: a change is asked
//! for once; an unknown outcome has its own exit code.

use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Subcommand};
use keyward::admin::socket::{AdminAnswer, AdminCommand};
use keyward::config;
use keyward::policy_store::{PolicyAnswer, PolicyCommand};
use serde::Serialize;

use super::output_form::{OutputArgs, OutputForm, TableArgs, TableForm, print_json};
use super::{AdminSocketArgs, UNUSABLE, fail, finish, send_command_or_exit, unexpected_answer};

/// Commands to the stored policy.
#[derive(Subcommand)]
pub(crate) enum StoredPolicyArguments {
    /// Stores a document as the next generation.
    ///
    /// The generation is in force on every replica within 1 s.
    Apply {
        /// The document; - reads standard input.
        file: PathBuf,
        /// Applies only if this generation is current; 0 if nothing was ever applied.
        #[arg(long, value_name = "N")]
        if_generation: Option<u64>,
        /// A comment for the history.
        #[arg(long, value_name = "TEXT", default_value = "")]
        comment: String,
        /// Applies also rules that can apply to no caller of this replica's listeners: another replica may
        /// have listeners for them.
        #[arg(long)]
        allow_unreachable: bool,
        #[command(flatten)]
        at: AdminSocketArgs,
    },
    /// Prints the roles, groups and bindings changed by a document.
    Diff {
        /// The document; - reads standard input.
        file: PathBuf,
        #[command(flatten)]
        as_what: OutputArgs,
        #[command(flatten)]
        at: AdminSocketArgs,
    },
    /// Lists the kept generations.
    History {
        #[command(flatten)]
        as_what: TableArgs,
        #[command(flatten)]
        at: AdminSocketArgs,
    },
    /// Stores the document of an earlier generation as the next generation.
    Rollback {
        /// The earlier generation.
        generation: u64,
        #[command(flatten)]
        at: AdminSocketArgs,
    },
    /// Prints the exact text of a generation.
    Show {
        /// The generation; without it, the generation in force on this replica.
        generation: Option<u64>,
        #[command(flatten)]
        at: AdminSocketArgs,
    },
}

/// Arguments of `keyward grant`.
#[derive(Args)]
pub(crate) struct GrantArguments {
    /// The pattern of the peer, as in a binding: file:alice, cert:CA:CN=web-*, jwt:ISSUER:SUBJECT.
    peer: String,
    /// A role of the policy.
    role: String,
    /// The duration, as in 90s, 30m or 24h.
    #[arg(long = "for", value_name = "DURATION")]
    duration: String,
    /// The reason, for the log.
    #[arg(long, value_name = "TEXT")]
    reason: String,
    #[command(flatten)]
    at: AdminSocketArgs,
}

/// Arguments of `keyward ungrant`.
#[derive(Args)]
pub(crate) struct UngrantArguments {
    /// The pattern of the peer, as given.
    peer: String,
    /// The role.
    role: String,
    #[command(flatten)]
    at: AdminSocketArgs,
}

impl StoredPolicyArguments {
    /// Runs the command.
    pub(crate) fn run(self) -> ExitCode {
        match self {
            Self::Apply { file, if_generation, comment, allow_unreachable, at } => {
                with_document(&file, |text| {
                    let sudo_user = sudo_user();
                    let apply =
                        PolicyCommand::Apply { text, if_generation, comment, allow_unreachable, sudo_user };
                    ask(at, apply)
                })
            }
            Self::Diff { file, as_what, at } => {
                with_document(&file, |text| diff(at, PolicyCommand::Diff { text }, as_what.output))
            }
            Self::History { as_what, at } => list(at, PolicyCommand::History {}, as_what.output),
            Self::Rollback { generation, at } => {
                ask(at, PolicyCommand::Rollback { generation, sudo_user: sudo_user() })
            }
            Self::Show { generation, at } => ask(at, PolicyCommand::Show { generation }),
        }
    }
}

impl GrantArguments {
    /// Runs the command.
    pub(crate) fn run(self) -> ExitCode {
        let Self { peer, role, duration, reason, at } = self;
        match config::duration(&duration) {
            Ok(duration) => {
                let (seconds, sudo_user) = (whole_seconds(duration), sudo_user());
                ask(at, PolicyCommand::Grant { peer, role, seconds, reason, sudo_user })
            }
            Err(malformed) => fail(&format!("--for {duration}: {malformed}"), ExitCode::from(UNUSABLE)),
        }
    }
}

impl UngrantArguments {
    /// Runs the command.
    pub(crate) fn run(self) -> ExitCode {
        let Self { peer, role, at } = self;
        ask(at, PolicyCommand::Ungrant { peer, role, sudo_user: sudo_user() })
    }
}

/// Runs `keyward grants`.
pub(crate) fn list_grants(at: AdminSocketArgs, form: TableForm) -> ExitCode {
    list(at, PolicyCommand::Grants {}, form)
}

/// Prints the rows of a listing.
fn list(at: AdminSocketArgs, command: PolicyCommand, form: TableForm) -> ExitCode {
    match send_command_or_exit(at, &AdminCommand::Policy(command)) {
        Ok(AdminAnswer::Policy(PolicyAnswer { listing: Some(listing), .. })) => {
            finish(form.print(&listing, |listing, width| listing.table(width)), ExitCode::SUCCESS)
        }
        Ok(_) => unexpected_answer(),
        Err(code) => code,
    }
}

/// The difference of a document, for programs.
#[derive(Serialize)]
struct PolicyDifference<'a> {
    differs: bool,
    lines: Vec<&'a str>,
}

fn diff(at: AdminSocketArgs, command: PolicyCommand, form: OutputForm) -> ExitCode {
    match send_command_or_exit(at, &AdminCommand::Policy(command)) {
        Ok(AdminAnswer::Policy(PolicyAnswer { text, differs, .. })) => {
            let code = if differs { ExitCode::FAILURE } else { ExitCode::SUCCESS };
            let printed = match form {
                OutputForm::Table => write!(io::stdout(), "{text}"),
                OutputForm::Json => print_json(&PolicyDifference { differs, lines: text.lines().collect() }),
            };
            finish(printed, code)
        }
        Ok(_) => unexpected_answer(),
        // The usual code of a refused command is that of a difference here.
        Err(code) if code == ExitCode::FAILURE => ExitCode::from(UNUSABLE),
        Err(code) => code,
    }
}

/// The user who became root by sudo; `None` for a user who is not root.
fn sudo_user() -> Option<String> {
    rustix::process::geteuid().is_root().then(|| std::env::var("SUDO_USER").ok()).flatten()
}

/// The duration in seconds; a part of a second counts as none.
fn whole_seconds(duration: Duration) -> u64 {
    duration.as_secs()
}

fn with_document(file: &Path, use_text: impl FnOnce(String) -> ExitCode) -> ExitCode {
    let read = if file == Path::new("-") {
        let mut text = String::new();
        io::stdin().read_to_string(&mut text).map(|_| text).map_err(|error| error.to_string())
    } else {
        config::read_policy(file)
    };
    match read {
        Ok(text) => use_text(text),
        Err(reason) => fail(&reason, ExitCode::from(UNUSABLE)),
    }
}

fn ask(at: AdminSocketArgs, command: PolicyCommand) -> ExitCode {
    match send_command_or_exit(at, &AdminCommand::Policy(command)) {
        Ok(AdminAnswer::Policy(answer)) => finish(write!(io::stdout(), "{}", answer.text), ExitCode::SUCCESS),
        Ok(_) => unexpected_answer(),
        Err(code) => code,
    }
}
