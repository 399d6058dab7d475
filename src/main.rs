//! The command line: `keyward serve`, `check`, `keygen`, `hash-password`, what is asked of a running Keyward, `--version`.
//!
//! Owns: arguments, what is printed, exit codes: 0, 1 (it failed while running, and nothing has changed; `status`: it does not
//! serve; `doctor`: warnings; `drain`: something was cut), 2 (`doctor`: errors), 64 (the command line or the configuration cannot
//! be used), 69 (`doctor`, `drain`: nobody listens at the socket), 74 (in force on this replica, but not kept), 75 (not known whether it is done: to be
//! asked for again). Must not know: how anything is done.
//! Invariant: an answer goes to stdout, what is wrong to stderr.

use std::fmt::Display;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand, ValueEnum};
use keyward::admin::doctor::Severity;
use keyward::admin::drain::{Phase, Progress};
use keyward::admin::socket::{self, Answer, Command as Ask};
use keyward::admin::status::State;
use keyward::config::{self, Config, Faults, Warning};
use keyward::{app, telemetry};
use serde::Serialize;

/// Gives freed memory back to the system (see `Cargo.toml`).
#[cfg(target_os = "linux")]
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// `EX_USAGE` of sysexits.h.
const UNUSABLE: u8 = 64;
/// What `doctor` ends with where something does not work.
const ERRORS: u8 = 2;
/// `EX_UNAVAILABLE`.
const UNREACHABLE: u8 = 69;
/// `EX_IOERR`.
const NOT_KEPT: u8 = 74;
/// `EX_TEMPFAIL`.
const UNKNOWN: u8 = 75;

/// One address for an etcd cluster: an etcd-aware gRPC reverse proxy.
#[derive(Parser)]
#[command(name = "keyward", version, arg_required_else_help = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Serves until SIGTERM or SIGINT, which drain; SIGHUP, or a file that changed, reads the configuration again.
    Serve(ConfigFile),
    /// Reads the configuration and every file that it names, and tells all faults at once.
    Check(ConfigFile),
    /// Reads a password from standard input, and prints its hash for a line `name:hash` of the users file.
    HashPassword,
    /// Writes a new session key into a file that is not there yet, for session.key_files.
    Keygen {
        /// The file; only its owner may read it.
        file: PathBuf,
    },
    /// Ends all sessions that a user has, and the streams of everybody who is that etcd user; or one session.
    #[command(group = clap::ArgGroup::new("whom").required(true))]
    Revoke {
        /// The user, byte by byte.
        #[arg(group = "whom")]
        user: Option<String>,
        /// The id of one session, as the log shows it at login.
        #[arg(long, group = "whom", value_name = "ID")]
        session: Option<String>,
        #[command(flatten)]
        at: Place,
    },
    /// As revoke, and refuses the user's logins and the calls of everybody who is that etcd user from now on.
    Block {
        /// The user, byte by byte.
        user: String,
        #[command(flatten)]
        at: Place,
    },
    /// Lets a blocked user log in and call again.
    Unblock {
        /// The user, byte by byte.
        user: String,
        #[command(flatten)]
        at: Place,
    },
    /// Lists the sessions that one replica has seen, and the users that were revoked or blocked.
    Sessions {
        #[command(flatten)]
        at: Place,
    },
    /// Tells how one replica and the members are doing. Exit code 0 where it serves, else 1.
    Status {
        #[command(flatten)]
        as_what: Output,
        #[command(flatten)]
        at: Place,
    },
    /// Looks for what is wrong, and says how to mend it. Exit code 0 where nothing was found, 1 for warnings, 2 for errors.
    Doctor {
        #[command(flatten)]
        as_what: Output,
        #[command(flatten)]
        at: Place,
    },
    /// Has one replica end as by SIGTERM, and waits for that. Exit code 0 where nothing open was cut, else 1.
    Drain {
        #[command(flatten)]
        at: Place,
    },
}

/// Where a running Keyward listens to commands.
#[derive(Args)]
struct Place {
    /// Its admin socket.
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Its configuration, which names the socket (admin.socket).
    #[arg(long, env = "KEYWARD_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
}

/// How an answer is written.
#[derive(Args)]
struct Output {
    /// How it is written.
    #[arg(short = 'o', long = "output", value_enum, default_value_t = Form::Table)]
    output: Form,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Form {
    /// For people.
    Table,
    /// One line, for programs.
    Json,
}

#[derive(Args)]
struct ConfigFile {
    /// The configuration file; the repository's config.toml describes every key.
    #[arg(long, env = "KEYWARD_CONFIG", value_name = "FILE")]
    config: PathBuf,
}

fn main() -> ExitCode {
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => {
            // --help and --version come this way too; they are answers, and no fault.
            let code = if error.use_stderr() { ExitCode::from(UNUSABLE) } else { ExitCode::SUCCESS };
            return finish(error.print(), code);
        }
    };
    match arguments.command {
        Command::Serve(file) => serve(file.config),
        Command::Check(file) => check(&file.config),
        Command::HashPassword => hash_password(),
        Command::Keygen { file } => keygen(&file),
        Command::Revoke { session: Some(session), at, .. } => ask(at, &Ask::RevokeSession { session }),
        Command::Revoke { user, at, .. } => ask(at, &Ask::Revoke { user: user.unwrap_or_default() }),
        Command::Block { user, at } => ask(at, &Ask::Block { user }),
        Command::Unblock { user, at } => ask(at, &Ask::Unblock { user }),
        Command::Sessions { at } => ask(at, &Ask::Sessions {}),
        Command::Status { as_what, at } => status(at, as_what.output),
        Command::Doctor { as_what, at } => doctor(at, as_what.output),
        Command::Drain { at } => drain(at),
    }
}

fn keygen(file: &Path) -> ExitCode {
    match config::write_session_key(file) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(&format!("{}: {error}", file.display()), ExitCode::FAILURE),
    }
}

impl Place {
    /// The socket, or how it ends where there is none.
    fn socket(self) -> Result<PathBuf, ExitCode> {
        match (self.socket, self.config) {
            (Some(socket), _) => Ok(socket),
            (None, Some(file)) => {
                config::admin_socket(&file).map_err(|none| fail(&none.to_string(), ExitCode::from(UNUSABLE)))
            }
            (None, None) => Err(fail("--socket or --config is needed", ExitCode::from(UNUSABLE))),
        }
    }
}

/// Asks a running Keyward, and says how it ends where that is no answer to the question; `unreachable` where there is none.
fn asked(at: Place, question: &Ask, unreachable: u8) -> Result<Answer, ExitCode> {
    let socket = at.socket()?;
    match socket::ask(&socket, question) {
        Ok(answer) => not_refused(answer),
        Err(error) => Err(fail(&format!("{}: {error}", socket.display()), ExitCode::from(unreachable))),
    }
}

fn not_refused(answer: Answer) -> Result<Answer, ExitCode> {
    match answer {
        Answer::Failed(reason) => Err(fail(&reason, ExitCode::FAILURE)),
        Answer::NotKept(reason) => Err(fail(&reason, ExitCode::from(NOT_KEPT))),
        Answer::Unknown(reason) => Err(fail(&reason, ExitCode::from(UNKNOWN))),
        answer => Ok(answer),
    }
}

fn ask(at: Place, question: &Ask) -> ExitCode {
    match asked(at, question, 1) {
        Ok(Answer::Done(said)) => finish(writeln!(io::stdout(), "{said}"), ExitCode::SUCCESS),
        Ok(Answer::Sessions(listing)) => finish(write!(io::stdout(), "{listing}"), ExitCode::SUCCESS),
        Ok(_) => another_answer(),
        Err(code) => code,
    }
}

fn status(at: Place, form: Form) -> ExitCode {
    match asked(at, &Ask::Status {}, 1) {
        Ok(Answer::Status(status)) => {
            let code = match status.replica.state {
                State::Serving | State::Degraded => ExitCode::SUCCESS,
                State::NotReady | State::Draining => ExitCode::FAILURE,
            };
            finish(print(&*status, form), code)
        }
        Ok(_) => another_answer(),
        Err(code) => code,
    }
}

fn doctor(at: Place, form: Form) -> ExitCode {
    match asked(at, &Ask::Doctor {}, UNREACHABLE) {
        Ok(Answer::Doctor(report)) => {
            let code = match report.worst() {
                None => ExitCode::SUCCESS,
                Some(Severity::Warning) => ExitCode::FAILURE,
                Some(Severity::Error) => ExitCode::from(ERRORS),
            };
            finish(print(&report, form), code)
        }
        Ok(_) => another_answer(),
        Err(code) => code,
    }
}

fn drain(at: Place) -> ExitCode {
    let socket = match at.socket() {
        Ok(socket) => socket,
        Err(code) => return code,
    };
    let mut told = None;
    let mut printed = Ok(());
    let tell = |progress: Progress| {
        // The time that is left is news with other news only.
        let news = Progress { left_ms: 0, ..progress };
        if progress.phase != Phase::Serving && told.replace(news) != Some(news) {
            printed = writeln!(io::stdout(), "{progress}");
        }
    };
    let ended = match socket::drain(&socket, tell) {
        Ok(Ok(last)) => last,
        Ok(Err(answer)) => return not_refused(answer).map_or_else(|code| code, |_| another_answer()),
        Err(error) => return fail(&format!("{}: {error}", socket.display()), ExitCode::from(UNREACHABLE)),
    };
    match ended {
        Progress { phase: Phase::Ended, cut: 0, .. } => finish(printed, ExitCode::SUCCESS),
        Progress { phase: Phase::Ended, cut, .. } => {
            fail(&format!("{cut} connections were cut with something open"), ExitCode::FAILURE)
        }
        _ => fail("it is gone, and has not said that it ended well", ExitCode::from(UNKNOWN)),
    }
}

fn print<T: Display + Serialize>(what: &T, form: Form) -> io::Result<()> {
    match form {
        Form::Table => write!(io::stdout(), "{what}"),
        Form::Json => writeln!(io::stdout(), "{}", serde_json::to_string(what)?),
    }
}

/// Of a Keyward of another version.
fn another_answer() -> ExitCode {
    fail("it answered something else: is it of this version?", ExitCode::FAILURE)
}

fn fail(reason: &str, code: ExitCode) -> ExitCode {
    finish(writeln!(io::stderr(), "{reason}"), code)
}

fn serve(file: PathBuf) -> ExitCode {
    match config::load(&file) {
        Ok((config, warnings)) => serve_with(config, &warnings, file),
        Err(faults) => refuse(&faults),
    }
}

fn serve_with(config: Config, warnings: &[Warning], file: PathBuf) -> ExitCode {
    // Dropped last: it waits until what was logged is written.
    let _flush = match telemetry::init(&config.log) {
        Ok(flush) => flush,
        Err(error) => return fail(&format!("cannot log to stderr: {error}"), ExitCode::FAILURE),
    };
    telemetry::log_panics();
    for warning in warnings {
        tracing::warn!(%warning, "configuration");
    }
    match app::serve(config, file) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(%error, "ended by a failure");
            ExitCode::FAILURE
        }
    }
}

fn check(file: &Path) -> ExitCode {
    match config::load(file) {
        Ok((_, warnings)) => finish(print_valid(&warnings), ExitCode::SUCCESS),
        Err(faults) => refuse(&faults),
    }
}

fn hash_password() -> ExitCode {
    match app::hash_password::from_stdin() {
        Ok(hash) => finish(writeln!(io::stdout(), "{hash}"), ExitCode::SUCCESS),
        Err(error) => finish(writeln!(io::stderr(), "{error}"), ExitCode::FAILURE),
    }
}

/// The log is not set up yet, and where it should go may be among the faults.
fn refuse(faults: &Faults) -> ExitCode {
    finish(writeln!(io::stderr(), "{faults}"), ExitCode::from(UNUSABLE))
}

fn print_valid(warnings: &[Warning]) -> io::Result<()> {
    for warning in warnings {
        writeln!(io::stderr(), "warning: {warning}")?;
    }
    writeln!(io::stdout(), "configuration is valid")
}

/// The code, unless what was to be said could not be said.
fn finish(printed: io::Result<()>, code: ExitCode) -> ExitCode {
    if printed.is_ok() || code != ExitCode::SUCCESS { code } else { ExitCode::FAILURE }
}
