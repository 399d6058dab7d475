//! The command line: `keyward serve`, `check`, `keygen`, `hash-password`, what is asked of a running Keyward, `--version`.
//!
//! Owns: arguments, what is printed, exit codes: 0, 1 (it failed while running, and nothing has changed), 64 (the command line
//! or the configuration cannot be used), 74 (in force on this replica, but not kept), 75 (not known whether it is done: to be
//! asked for again). Must not know: how anything is done.
//! Invariant: an answer goes to stdout, what is wrong to stderr.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use keyward::admin::socket::{self, Answer, Command as Ask};
use keyward::config::{self, Config, Faults, Warning};
use keyward::{app, telemetry};

/// `EX_USAGE` of sysexits.h.
const UNUSABLE: u8 = 64;
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
    }
}

fn keygen(file: &Path) -> ExitCode {
    match config::write_session_key(file) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(&format!("{}: {error}", file.display()), ExitCode::FAILURE),
    }
}

/// Asks a running Keyward.
fn ask(at: Place, question: &Ask) -> ExitCode {
    let socket = match (at.socket, at.config) {
        (Some(socket), _) => socket,
        (None, Some(file)) => match config::load(&file) {
            Ok((config, _)) => match config.admin.socket {
                Some(socket) => socket,
                None => return fail("admin.socket is not set", ExitCode::from(UNUSABLE)),
            },
            Err(faults) => return refuse(&faults),
        },
        (None, None) => return fail("--socket or --config is needed", ExitCode::from(UNUSABLE)),
    };
    match socket::ask(&socket, question) {
        Ok(Answer::Done(said)) => finish(writeln!(io::stdout(), "{said}"), ExitCode::SUCCESS),
        Ok(Answer::Sessions(listing)) => finish(write!(io::stdout(), "{listing}"), ExitCode::SUCCESS),
        Ok(Answer::Failed(reason)) => fail(&reason, ExitCode::FAILURE),
        Ok(Answer::NotKept(reason)) => fail(&reason, ExitCode::from(NOT_KEPT)),
        Ok(Answer::Unknown(reason)) => fail(&reason, ExitCode::from(UNKNOWN)),
        Err(error) => fail(&format!("{}: {error}", socket.display()), ExitCode::FAILURE),
    }
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
    telemetry::init(&config.log);
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
