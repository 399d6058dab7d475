//! The command line: `keyward serve`, `check`, `keygen`, `hash-password`, `audit`, the commands to a running
//! Keyward, `--version`.
//!
//! Owns: arguments, printed output, exit codes: 0; 1 (failed while running, without any change; `status`:
//! not serving; `reload`: refused because of faults; `audit verify`: a bad file; `policy test`: another
//! verdict; `policy explain`: refused; `policy diff`: a difference; `doctor`: warnings; `drain`: connections
//! were cut, or it is refused since audit records would be lost); 2 (`doctor`: errors); 64 (unusable command
//! line or configuration); 69 (no process answers at the admin socket, so no command was sent); 74 (in force
//! on this replica, but not persisted; `serve` and `drain`: audit records of answered calls were not
//! written); 75 (unknown outcome: the command may be repeated; after `policy apply`, `policy rollback` and
//! `grant` look first).
//! Must not know: the implementation of a command. Invariant: an answer goes to stdout, an error to stderr.

#[path = "main/audit_search.rs"]
mod audit_search;
#[path = "main/check_command.rs"]
mod check_command;
#[path = "main/command_help.rs"]
mod command_help;
#[path = "main/config_arguments.rs"]
mod config_arguments;
#[path = "main/drain_command.rs"]
mod drain_command;
#[path = "main/fleet_commands.rs"]
mod fleet_commands;
#[path = "main/generated_files.rs"]
mod generated_files;
#[path = "main/init_command.rs"]
mod init_command;
#[path = "main/output_form.rs"]
mod output_form;
#[path = "main/policy_answers.rs"]
mod policy_answers;
#[path = "main/policy_file_commands.rs"]
mod policy_file_commands;
#[path = "main/replica_answers.rs"]
mod replica_answers;
#[path = "main/stored_policy_commands.rs"]
mod stored_policy_commands;
#[path = "main/top_command.rs"]
mod top_command;
#[path = "main/version_command.rs"]
mod version_command;
#[path = "main/view_commands.rs"]
mod view_commands;

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, FromArgMatches as _, Parser, Subcommand};
use clap_complete::Shell;
use keyward::admin::doctor::Severity;
use keyward::admin::socket::{AdminAnswer, AdminCommand as Ask};
use keyward::admin::socket_client;
use keyward::admin::socket_protocol::FleetCommand;
use keyward::admin::status::ReplicaState;
use keyward::app::control_runtime::ControlRuntime;
use keyward::app::{self, ServeError, audit_files};
use keyward::audit::head_signature;
use keyward::config::{self, Config, ConfigFault, ConfigFaults, ConfigSources, ConfigWarning};
use keyward::reload;
use keyward::telemetry;

use audit_search::AuditSearchArguments;
use config_arguments::ConfigArguments;
use fleet_commands::{FleetArgs, KickArguments};
use output_form::{OutputArgs, OutputForm, TableArgs, TableForm, print, print_json};

/// jemalloc returns freed memory to the operating system (see `Cargo.toml`).
#[cfg(target_os = "linux")]
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// `EX_USAGE` of sysexits.h.
const UNUSABLE: u8 = 64;
/// Exit code of `doctor` upon findings of severity "error".
const ERRORS: u8 = 2;
/// `EX_UNAVAILABLE`.
const UNREACHABLE: u8 = 69;
/// `EX_IOERR`.
const NOT_KEPT: u8 = 74;
/// `EX_TEMPFAIL`.
const UNKNOWN: u8 = 75;

/// Follows the lack of a required key where no file is named.
const WITHOUT_FILE: &str = "no configuration file is named: give --config FILE, or --endpoints URLS and \
    --listen ADDRESS, or set keys by variables (KEYWARD_CLUSTER__ENDPOINTS=…)";

/// One address for an etcd cluster: an etcd-aware gRPC reverse proxy.
#[derive(Parser)]
#[command(name = "keyward", version, arg_required_else_help = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Args)]
struct ServeArguments {
    #[command(flatten)]
    source: ConfigArguments,
    /// Takes the listening sockets of the Keyward that serves at admin.socket, which drains once this process
    /// is ready: no connection is refused. Without such a process: an ordinary start.
    #[arg(long)]
    take_over: bool,
}

#[derive(Subcommand)]
enum Command {
    /// Serves until SIGTERM, which drains; SIGHUP reloads.
    ///
    /// SIGINT drains, too, and a changed file of the configuration reloads it.
    Serve(Box<ServeArguments>),
    /// Judges a configuration, and the cluster with --dial.
    ///
    /// Reads the configuration and every file named by it, and prints all faults at once, and advice. No
    /// address is bound, and no file written.
    Check(Box<check_command::CheckArguments>),
    /// Looks at a running cluster, and writes a configuration.
    ///
    /// Each key has its reason. Passwords do not stand in the text.
    Init(Box<init_command::InitArguments>),
    /// Makes the hash of a password, for a users file.
    ///
    /// Reads the password from standard input, and prints its hash for a line `name:hash`.
    HashPassword,
    /// Writes a new session key, for session.key_files.
    ///
    /// An existing file is never replaced.
    Keygen {
        /// The file; only its owner may read it.
        file: PathBuf,
    },
    /// Ends the sessions and streams of a user, or one session.
    ///
    /// All sessions of the user end, and all streams running as this etcd user. The user may log in again.
    #[command(group = clap::ArgGroup::new("whom").required(true))]
    Revoke {
        /// The exact name of the etcd user.
        #[arg(group = "whom")]
        user: Option<String>,
        /// The id of one session, as logged at login.
        #[arg(long, group = "whom", value_name = "ID")]
        session: Option<String>,
        #[command(flatten)]
        at: AdminSocketArgs,
    },
    /// As revoke, and refuses further logins and calls.
    ///
    /// Further logins of the user are refused, and further calls as this etcd user.
    Block {
        /// The exact name of the etcd user.
        user: String,
        #[command(flatten)]
        at: AdminSocketArgs,
    },
    /// Lets a blocked user log in and call again.
    Unblock {
        /// The exact name of the etcd user.
        user: String,
        #[command(flatten)]
        at: AdminSocketArgs,
    },
    /// Lists the sessions of one replica, and revoked users.
    ///
    /// The sessions are those seen by this replica; the users are revoked or blocked everywhere.
    Sessions {
        #[command(flatten)]
        as_what: TableArgs,
        #[command(flatten)]
        at: AdminSocketArgs,
    },
    /// Shows who is connected and does what, now.
    ///
    /// Reads one replica's own state, or that of all replicas (--all), at this moment. Nothing is collected
    /// while nobody asks.
    Show(view_commands::ShowArguments),
    /// Shows live in the terminal who does what.
    ///
    /// The last line names the keys.
    Top {
        #[command(flatten)]
        at: AdminSocketArgs,
    },
    /// Ends client connections, as a drain does.
    ///
    /// A connection gets a GOAWAY, its streams end with Unavailable, calls under way have ten seconds. The
    /// client may connect again.
    Kick(KickArguments),
    /// Takes one member out of service on one replica, or on all.
    ///
    /// The member gets no new calls, and streams move to other members.
    Pause {
        /// The member's name or id.
        member: String,
        #[command(flatten)]
        fleet: FleetArgs,
        #[command(flatten)]
        at: AdminSocketArgs,
    },
    /// Returns a paused member to service.
    Resume {
        /// The member's name or id.
        member: String,
        #[command(flatten)]
        fleet: FleetArgs,
        #[command(flatten)]
        at: AdminSocketArgs,
    },
    /// Reports the state of a replica and the members, or of all.
    Status {
        #[command(flatten)]
        fleet: FleetArgs,
        #[command(flatten)]
        as_what: TableArgs,
        #[command(flatten)]
        at: AdminSocketArgs,
    },
    /// Looks for faults, and names their remedies.
    ///
    /// Present and foreseeable faults of the cluster, of the configuration and of this replica.
    Doctor {
        #[command(flatten)]
        as_what: OutputArgs,
        #[command(flatten)]
        at: AdminSocketArgs,
    },
    /// Judges and learns policies, and changes the stored one.
    ///
    /// The stored policy is in etcd, below policy.etcd_prefix.
    Policy {
        #[command(subcommand)]
        command: PolicyArguments,
    },
    /// Gives a role to a peer for a while, on every replica.
    ///
    /// The role is one of the policy stored in etcd.
    Grant(stored_policy_commands::GrantArguments),
    /// Takes back a role given by `keyward grant`.
    Ungrant(stored_policy_commands::UngrantArguments),
    /// Lists the roles given for a while that are in force.
    Grants {
        #[command(flatten)]
        as_what: TableArgs,
        #[command(flatten)]
        at: AdminSocketArgs,
    },
    /// Verifies and searches the files of the audit log.
    Audit {
        #[command(subcommand)]
        command: AuditCommand,
    },
    /// Reloads the configuration, and prints the changes.
    ///
    /// Prints all faults where there is one: then nothing has changed.
    Reload {
        #[command(flatten)]
        as_what: OutputArgs,
        #[command(flatten)]
        at: AdminSocketArgs,
    },
    /// Changes the log level of one replica for a while.
    ///
    /// The level holds until the next reload or restart. Prints the former level.
    LogLevel {
        /// off, error, warn, info, debug or trace; then levels of single modules, if any:
        /// info,watch=debug,upstream::pool=trace.
        level: String,
        #[command(flatten)]
        at: AdminSocketArgs,
    },
    /// Prints a completion script for a shell.
    Completions {
        /// The shell.
        #[arg(value_enum)]
        shell: Shell,
    },
    /// Writes the man pages, one for each command.
    Man {
        /// An existing folder, such as /usr/local/share/man/man1.
        folder: PathBuf,
    },
    /// Prints the version of this program.
    ///
    /// `keyward show version` has the versions of a running Keyward and of the members.
    Version(version_command::VersionArguments),
    /// Drains and ends one replica, and waits for its end.
    ///
    /// As SIGTERM does, with the progress. Refused while audit records of answered calls wait in memory
    /// because the audit file cannot be written: they end with the process.
    Drain(drain_command::DrainArguments),
}

/// Commands to a policy: in files, or in etcd.
#[derive(Subcommand)]
enum PolicyArguments {
    #[command(flatten)]
    File(policy_file_commands::PolicyFileArguments),
    #[command(flatten)]
    Stored(stored_policy_commands::StoredPolicyArguments),
    /// Shows what enforce would refuse on one replica: who lacks which grant, since when, how often. Counted
    /// for callers in mode shadow since the policy in force began.
    Shadow(view_commands::ShadowArguments),
}

#[derive(Subcommand)]
enum AuditCommand {
    /// Checks that no line was changed, removed, added or moved.
    ///
    /// Each replica has a chain of its own.
    Verify {
        #[command(flatten)]
        as_what: OutputArgs,
        /// The files, in any order.
        #[arg(required = true, value_name = "FILE")]
        files: Vec<PathBuf>,
        /// The public key of the signed heads, written by `keyward audit keygen`.
        #[arg(long, value_name = "FILE")]
        public_key: Option<PathBuf>,
    },
    /// Prints the records for which all conditions hold.
    Search(Box<AuditSearchArguments>),
    /// Writes a new signing key into a new file, for audit.signing_key_file, and its public key beside.
    Keygen {
        /// The file; only its owner may read it.
        file: PathBuf,
    },
}

/// The admin socket of a running Keyward.
#[derive(Args)]
struct AdminSocketArgs {
    /// The admin socket. Default: admin.socket of the configuration, else /run/keyward/admin.sock.
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// The configuration naming the socket (admin.socket); no other key is read.
    #[arg(long, env = "KEYWARD_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
}

fn main() -> ExitCode {
    // First of all: until then SIGHUP ends the process, and supervisors may send it at once.
    let is_server = std::env::args_os().nth(1).is_some_and(|first| first == "serve");
    let control = is_server.then(ControlRuntime::new);
    let parsed = command_help::command().try_get_matches();
    let arguments = match parsed.and_then(|matches| Arguments::from_arg_matches(&matches)) {
        Ok(arguments) => arguments,
        Err(error) => return command_help::print(&error),
    };
    match arguments.command {
        Command::Serve(arguments) => {
            let control = control.unwrap_or_else(ControlRuntime::new);
            serve(arguments.source.sources(), arguments.take_over, control)
        }
        Command::Check(arguments) => arguments.run(),
        Command::Init(arguments) => arguments.run(),
        Command::HashPassword => hash_password(),
        Command::Keygen { file } => keygen(&file),
        Command::Revoke { session: Some(session), at, .. } => ask(at, &Ask::RevokeSession { session }),
        Command::Revoke { user, at, .. } => ask(at, &Ask::Revoke { user: user.unwrap_or_default() }),
        Command::Block { user, at } => ask(at, &Ask::Block { user }),
        Command::Unblock { user, at } => ask(at, &Ask::Unblock { user }),
        Command::Sessions { as_what, at } => replica_answers::sessions(at, as_what.output),
        Command::Show(show) => show.run(),
        Command::Top { at } => top_command::run(at),
        Command::Kick(kick) => kick.run(),
        Command::Pause { member, fleet, at } => fleet.order(at, FleetCommand::Pause { member }),
        Command::Resume { member, fleet, at } => fleet.order(at, FleetCommand::Resume { member }),
        Command::Status { as_what, fleet, at } if fleet.is_here() => status(at, as_what.output),
        Command::Status { as_what, fleet, at } => fleet.status(at, as_what.output),
        Command::Doctor { as_what, at } => doctor(at, as_what.output),
        Command::Policy { command: PolicyArguments::File(command) } => command.run(),
        Command::Policy { command: PolicyArguments::Stored(command) } => command.run(),
        Command::Policy { command: PolicyArguments::Shadow(command) } => command.run(),
        Command::Grant(grant) => grant.run(),
        Command::Ungrant(grant) => grant.run(),
        Command::Grants { as_what, at } => stored_policy_commands::list_grants(at, as_what.output),
        Command::Reload { as_what, at } => replica_answers::reload(at, as_what.output),
        Command::LogLevel { level, at } => ask(at, &Ask::LogLevel { filter: level }),
        Command::Drain(drain) => drain.run(),
        Command::Completions { shell } => generated_files::print_completions(shell),
        Command::Man { folder } => generated_files::write_man_pages(&folder),
        Command::Audit { command } => audit(command),
        Command::Version(arguments) => arguments.run(),
    }
}

fn audit(command: AuditCommand) -> ExitCode {
    match command {
        AuditCommand::Verify { as_what, files, public_key } => {
            match audit_files::verify(&files, public_key.as_deref()) {
                Ok(verified) if as_what.output == OutputForm::Json => {
                    let code = if verified.is_whole() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
                    finish(print_json(&verified), code)
                }
                Ok(verified) if verified.is_whole() => {
                    finish(write!(io::stdout(), "{verified}"), ExitCode::SUCCESS)
                }
                Ok(verified) => finish(write!(io::stderr(), "{verified}"), ExitCode::FAILURE),
                Err(error) => fail(&error.to_string(), ExitCode::FAILURE),
            }
        }
        AuditCommand::Search(asked) => audit_search::search(*asked),
        AuditCommand::Keygen { file } => match head_signature::write_key_pair(&file) {
            Ok(public) => {
                let told = writeln!(io::stdout(), "the public key is in {}", public.display());
                finish(told, ExitCode::SUCCESS)
            }
            Err(error) => fail(&format!("{}: {error}", file.display()), ExitCode::FAILURE),
        },
    }
}

fn keygen(file: &Path) -> ExitCode {
    match config::write_session_key(file) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(&format!("{}: {error}", file.display()), ExitCode::FAILURE),
    }
}

impl AdminSocketArgs {
    /// Returns the socket's path, or the exit code after printing an error.
    fn socket(self) -> Result<PathBuf, ExitCode> {
        if let Some(socket) = self.socket {
            return Ok(socket);
        }
        let sources = ConfigSources::of_file(self.config).with_environment(std::env::vars_os());
        config::admin_socket(&sources).map_err(|none| fail(&none.to_string(), ExitCode::from(UNUSABLE)))
    }
}

/// Sends a command to a running Keyward. Returns the exit code upon a refusal, or if no process answers.
fn send_command_or_exit(at: AdminSocketArgs, question: &Ask) -> Result<AdminAnswer, ExitCode> {
    let socket = at.socket()?;
    match socket_client::send_command(&socket, question) {
        Ok(answer) => not_refused(answer),
        Err(error) => Err(no_process(&socket, &error)),
    }
}

fn no_process(socket: &Path, error: &io::Error) -> ExitCode {
    let hint = match (error.kind(), error.raw_os_error()) {
        (io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused, _) => {
            ": no Keyward serves this socket. --socket PATH, --config FILE or KEYWARD_ADMIN__SOCKET names \
             another; `keyward serve` takes the same file or variable, and without them needs /run/keyward"
        }
        (io::ErrorKind::PermissionDenied, Some(_)) => {
            ": only Keyward's own user, and root, may use the socket"
        }
        _ => "",
    };
    fail(&format!("{}: {error}{hint}", socket.display()), ExitCode::from(UNREACHABLE))
}

fn not_refused(answer: AdminAnswer) -> Result<AdminAnswer, ExitCode> {
    match answer {
        AdminAnswer::Failed(reason) | AdminAnswer::Idle(reason) => Err(fail(&reason, ExitCode::FAILURE)),
        AdminAnswer::NotKept(reason) => Err(fail(&reason, ExitCode::from(NOT_KEPT))),
        AdminAnswer::Unknown(reason) => Err(fail(&reason, ExitCode::from(UNKNOWN))),
        answer => Ok(answer),
    }
}

fn ask(at: AdminSocketArgs, question: &Ask) -> ExitCode {
    match send_command_or_exit(at, question) {
        Ok(AdminAnswer::Done(said)) => finish(writeln!(io::stdout(), "{said}"), ExitCode::SUCCESS),
        Ok(_) => unexpected_answer(),
        Err(code) => code,
    }
}

fn status(at: AdminSocketArgs, form: TableForm) -> ExitCode {
    match send_command_or_exit(at, &Ask::Status {}) {
        Ok(AdminAnswer::Status(status)) => {
            let code = match status.replica.state {
                ReplicaState::Serving | ReplicaState::Degraded => ExitCode::SUCCESS,
                ReplicaState::NotReady | ReplicaState::Draining => ExitCode::FAILURE,
            };
            finish(form.print(&*status, |status, width| status.text(width)), code)
        }
        Ok(_) => unexpected_answer(),
        Err(code) => code,
    }
}

fn doctor(at: AdminSocketArgs, form: OutputForm) -> ExitCode {
    match send_command_or_exit(at, &Ask::Doctor {}) {
        Ok(AdminAnswer::Doctor(report)) => {
            let code = match report.worst() {
                None | Some(Severity::Note) => ExitCode::SUCCESS,
                Some(Severity::Warning) => ExitCode::FAILURE,
                Some(Severity::Error) => ExitCode::from(ERRORS),
            };
            finish(print(&report, form), code)
        }
        Ok(_) => unexpected_answer(),
        Err(code) => code,
    }
}

/// Reports an answer of an unexpected kind: the running Keyward may have a different version.
fn unexpected_answer() -> ExitCode {
    fail("it answered something else: is it of this version?", ExitCode::FAILURE)
}

fn fail(reason: &str, code: ExitCode) -> ExitCode {
    finish(writeln!(io::stderr(), "{reason}"), code)
}

fn serve(sources: ConfigSources, takes_over: bool, control: io::Result<ControlRuntime>) -> ExitCode {
    let control = match control {
        Ok(control) => control,
        Err(error) => return fail(&format!("cannot start: {error}"), ExitCode::FAILURE),
    };
    match reload::load_for_start(&sources) {
        Ok((config, warnings)) => serve_with(config, warnings, sources, (takes_over, control)),
        Err(faults) => refuse(&faults, &sources),
    }
}

fn serve_with(
    config: Config,
    warnings: Vec<ConfigWarning>,
    sources: ConfigSources,
    (takes_over, control): (bool, ControlRuntime),
) -> ExitCode {
    // Dropped last: waits until all log records are written.
    let _flush = match telemetry::init(&config.log) {
        Ok(flush) => flush,
        Err(error) => return fail(&format!("cannot log to stderr: {error}"), ExitCode::FAILURE),
    };
    telemetry::log_panics();
    for warning in &warnings {
        tracing::warn!(%warning, "configuration");
    }
    match app::serve(config, warnings, sources, takes_over, control) {
        Ok(()) => ExitCode::SUCCESS,
        // The log tells of them already.
        Err(ServeError::RecordsLost(_)) => ExitCode::from(NOT_KEPT),
        Err(error) => {
            tracing::error!(%error, "ended by a failure");
            ExitCode::FAILURE
        }
    }
}

fn hash_password() -> ExitCode {
    match app::hash_password::from_stdin() {
        Ok(hash) => finish(writeln!(io::stdout(), "{hash}"), ExitCode::SUCCESS),
        Err(error) => finish(writeln!(io::stderr(), "{error}"), ExitCode::FAILURE),
    }
}

/// Prints the faults to stderr: the log is not set up yet, and its settings may be among the faults.
fn refuse(faults: &ConfigFaults, sources: &ConfigSources) -> ExitCode {
    // A flag or variable with a fault is a way to give the key.
    let is_lacking = |fault: &ConfigFault| {
        ["cluster.endpoints", "listener"].contains(&fault.path.as_str()) && fault.place.is_none()
    };
    let has_no_way = sources.file().is_none() && faults.iter().any(is_lacking);
    let told = writeln!(io::stderr(), "{faults}").and_then(|()| match has_no_way {
        true => writeln!(io::stderr(), "{WITHOUT_FILE}"),
        false => Ok(()),
    });
    finish(told, ExitCode::from(UNUSABLE))
}

/// Returns the code, or a failure if printing an answer failed.
fn finish(printed: io::Result<()>, code: ExitCode) -> ExitCode {
    if printed.is_ok() || code != ExitCode::SUCCESS { code } else { ExitCode::FAILURE }
}
