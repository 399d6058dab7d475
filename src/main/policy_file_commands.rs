//! The commands that judge or learn a policy: `keyward policy check`, `test`, `explain`, `learn`.
//!
//! Owns: the arguments, the choice of the policy, and printing the answers. Must not know: how a policy
//! decides or is learned. Invariant: without `--policy` a call is judged by the policy in force on a running
//! replica, or by the configuration's policy file, never by an empty policy.

use std::io::{self, ErrorKind, Write as _};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::SystemTime;

use clap::{Args, Subcommand};
use keyward::admin::explained_calls::ExplainedCalls;
use keyward::admin::socket::{AdminAnswer, AdminCommand};
use keyward::admin::socket_client;
use keyward::app::policy_checks::{CheckedPolicy, PolicyCheckError, VerdictTable};
use keyward::app::policy_learning;
use keyward::audit::record::Timestamp;
use keyward::audit::search::AuditSearch;
use keyward::config::{self, ConfigSources};
use keyward::policy::described_call::{DescribedCall, Explanation};
use keyward::policy::learned::LearningBounds;

use super::config_arguments::ConfigFile;
use super::output_form::{OutputArgs, OutputForm};
use super::policy_answers::{print_checked, print_explained, print_tested};
use super::{AdminSocketArgs, UNUSABLE, fail, finish, no_process, not_refused, unexpected_answer};

/// Commands about policy files.
#[derive(Subcommand)]
pub(crate) enum PolicyFileArguments {
    /// Prints all faults of a policy file, and grants without effect.
    ///
    /// A rule that can apply to no caller of the configuration's listeners is an error.
    Check {
        /// The policy file.
        file: PathBuf,
        #[command(flatten)]
        as_what: OutputArgs,
        #[command(flatten)]
        config: ConfigFile,
    },
    /// Compares the verdicts on a table of calls with the expected ones.
    Test {
        /// The table: a TOML file with [[test]] tables.
        table: PathBuf,
        #[command(flatten)]
        as_what: OutputArgs,
        #[command(flatten)]
        policy: JudgedPolicy,
    },
    /// Explains the verdict on a call.
    Explain(ExplainArguments),
    /// Prints the smallest policy that would have allowed the calls in an audit log.
    Learn(LearnArguments),
}

/// The policy to judge by.
#[derive(Args)]
pub(crate) struct JudgedPolicy {
    /// The policy file, in place of the policy in force on the running replica. Without a running replica:
    /// the configuration's policy file.
    #[arg(long, value_name = "FILE")]
    policy: Option<PathBuf>,
    /// The admin socket of the running replica. Default: admin.socket of the configuration, else
    /// /run/keyward/admin.sock.
    #[arg(long, value_name = "PATH", conflicts_with = "policy")]
    socket: Option<PathBuf>,
    #[command(flatten)]
    config: ConfigFile,
}

/// Arguments of `keyward policy explain`.
#[derive(Args)]
pub(crate) struct ExplainArguments {
    /// The peer, as in a binding without *: file:alice, cert:CA:CN=web, jwt:ISSUER:SUBJECT.
    peer: String,
    /// The path of the method, or its last part, as in Put.
    method: String,
    /// The key, the name of a lock, or a key of the lease. Without it the keys of a lease are not judged.
    #[arg(default_value = "")]
    key: String,
    /// The end of the range, exclusive.
    #[arg(default_value = "")]
    range_end: String,
    /// All keys that begin with KEY.
    #[arg(long)]
    prefix: bool,
    /// The etcd user of the peer's calls. Default: the user that [[map]] gives the peer.
    #[arg(long, value_name = "USER")]
    etcd_user: Option<String>,
    /// The listener of the peer's connection.
    #[arg(long, value_name = "NAME")]
    listener: Option<String>,
    /// The address of the peer's connection.
    #[arg(long, value_name = "ADDRESS")]
    address: Option<IpAddr>,
    /// A claim of the JWT, as NAME=VALUE; may be repeated.
    #[arg(long, value_name = "NAME=VALUE")]
    claim: Vec<String>,
    #[command(flatten)]
    as_what: OutputArgs,
    #[command(flatten)]
    policy: JudgedPolicy,
}

/// Arguments of `keyward policy learn`.
#[derive(Args)]
pub(crate) struct LearnArguments {
    /// The files of the audit log, of all replicas, in any order.
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Only records of this time, as in 24h.
    #[arg(long, value_name = "DURATION")]
    since: Option<String>,
    /// Only calls of this peer, as in password:alice, or of this etcd user.
    #[arg(long)]
    peer: Option<String>,
    /// A folder with more observed names than this is granted as a whole.
    #[arg(long, value_name = "N", default_value_t = LearningBounds::default().names)]
    names: usize,
    /// The same for folders that the peer itself lists or watches.
    #[arg(long, value_name = "N", default_value_t = LearningBounds::default().listed_names)]
    listed_names: usize,
}

impl PolicyFileArguments {
    /// Runs the command.
    pub(crate) fn run(self) -> ExitCode {
        match self {
            Self::Check { file, as_what, config } => check(&config.sources(), &file, as_what.output),
            Self::Test { table, as_what, policy } => test(&table, &policy, as_what.output),
            Self::Explain(arguments) => arguments.run(),
            Self::Learn(arguments) => arguments.run(),
        }
    }
}

fn check(sources: &ConfigSources, file: &Path, form: OutputForm) -> ExitCode {
    match CheckedPolicy::read(sources, file) {
        Ok(checked) if form == OutputForm::Json => {
            let code = if checked.unreachable.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
            finish(print_checked(&checked.warnings, &checked.unreachable), code)
        }
        Ok(checked) => {
            let mut printed = Ok(());
            for warning in &checked.warnings {
                printed = printed.and(writeln!(io::stderr(), "warning: {warning}"));
            }
            for rule in &checked.unreachable {
                printed = printed.and(writeln!(io::stderr(), "error: {rule}"));
            }
            let (verdict, code) = match &checked.unreachable[..] {
                [] => ("policy is valid", ExitCode::SUCCESS),
                _ => ("policy can be loaded, and has errors", ExitCode::FAILURE),
            };
            finish(printed.and(writeln!(io::stdout(), "{verdict}")), code)
        }
        Err(error) => unusable(&error),
    }
}

fn test(table: &Path, policy: &JudgedPolicy, form: OutputForm) -> ExitCode {
    let table = match VerdictTable::read(table) {
        Ok(table) => table,
        Err(error) => return unusable(&error),
    };
    let judged = match policy.judge(&table.calls) {
        Ok(judged) => judged,
        Err(code) => return code,
    };
    let (source, count) = (judged.source_line(), table.calls.len());
    match table.compare(judged.verdicts) {
        Ok(others) if form == OutputForm::Json => {
            let code = if others.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
            finish(print_tested(judged.replicas_policy.as_deref(), count, &others), code)
        }
        Ok(others) if others.is_empty() => {
            finish(writeln!(io::stdout(), "{source}{count} calls: all as expected"), ExitCode::SUCCESS)
        }
        Ok(others) => {
            let text = others.join("\n");
            let wrong = others.len();
            finish(
                writeln!(io::stdout(), "{source}{text}\n{count} calls: {wrong} not as expected"),
                ExitCode::FAILURE,
            )
        }
        Err(error) => unusable(&error),
    }
}

/// The verdicts, and the policy that judged if a running replica did.
struct JudgedCalls {
    replicas_policy: Option<String>,
    verdicts: Vec<Result<Explanation, String>>,
}

impl JudgedCalls {
    /// A line that names the policy of a running replica; empty for a file's.
    fn source_line(&self) -> String {
        self.replicas_policy.as_ref().map_or_else(String::new, |policy| format!("policy   {policy}\n"))
    }
}

impl JudgedPolicy {
    /// Judges calls. Returns the exit code after printing an error.
    fn judge(&self, calls: &[DescribedCall]) -> Result<JudgedCalls, ExitCode> {
        let sources = self.config.sources();
        if let Some(file) = &self.policy {
            return by_file(CheckedPolicy::read(&sources, file), calls);
        }
        let at = AdminSocketArgs { socket: self.socket.clone(), config: self.config.path() };
        let socket = at.socket()?;
        if let Some(ExplainedCalls { policy, verdicts }) = self.ask_replica(&socket, calls)? {
            return Ok(JudgedCalls { replicas_policy: Some(policy), verdicts });
        }
        let judged = by_file(CheckedPolicy::configured(&sources), calls)?;
        let note =
            format!("no replica answers at {}: judged by the configuration's policy", socket.display());
        match writeln!(io::stderr(), "{note}") {
            Ok(()) => Ok(judged),
            Err(_) => Err(ExitCode::FAILURE),
        }
    }

    /// The verdicts of the replica that serves the socket; `None` if no process serves the usual socket.
    fn ask_replica(
        &self,
        socket: &Path,
        calls: &[DescribedCall],
    ) -> Result<Option<ExplainedCalls>, ExitCode> {
        let question = AdminCommand::Explain { calls: calls.to_vec() };
        match socket_client::send_command(socket, &question) {
            Ok(AdminAnswer::Explained(explained)) => Ok(Some(explained)),
            Ok(answer) => not_refused(answer).and_then(|_| Err(unexpected_answer())),
            Err(error) => {
                let is_absent = matches!(error.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused);
                if is_absent && self.socket.is_none() { Ok(None) } else { Err(no_process(socket, &error)) }
            }
        }
    }
}

fn by_file(
    checked: Result<CheckedPolicy, PolicyCheckError>,
    calls: &[DescribedCall],
) -> Result<JudgedCalls, ExitCode> {
    let checked = checked.map_err(|error| unusable(&error))?;
    let verdicts = checked.explain(calls).into_iter();
    let verdicts = verdicts.map(|verdict| verdict.map_err(|unjudged| unjudged.to_string())).collect();
    Ok(JudgedCalls { replicas_policy: None, verdicts })
}

impl ExplainArguments {
    fn run(self) -> ExitCode {
        let mut claims = std::collections::BTreeMap::<String, Vec<String>>::new();
        for claim in &self.claim {
            let Some((name, value)) = claim.split_once('=') else {
                return fail(&format!("--claim {claim}: NAME=VALUE is needed"), ExitCode::from(UNUSABLE));
            };
            claims.entry(name.to_owned()).or_default().push(value.to_owned());
        }
        let Self { peer, method, key, range_end, prefix, etcd_user, listener, address, .. } = self;
        let call =
            DescribedCall { peer, etcd_user, listener, address, claims, method, key, range_end, prefix };
        let judged = match self.policy.judge(&[call]) {
            Ok(judged) => judged,
            Err(code) => return code,
        };
        let source = judged.source_line();
        match judged.verdicts.into_iter().next() {
            Some(Ok(explained)) => {
                let code = if explained.is_allowed { ExitCode::SUCCESS } else { ExitCode::FAILURE };
                let printed = match self.as_what.output {
                    OutputForm::Table => write!(io::stdout(), "{source}{}", explained.text),
                    OutputForm::Json => {
                        let policy = judged.replicas_policy.as_deref();
                        print_explained(policy, explained.is_allowed, &explained.text)
                    }
                };
                finish(printed, code)
            }
            Some(Err(reason)) => fail(&reason, ExitCode::from(UNUSABLE)),
            None => unexpected_answer(),
        }
    }
}

impl LearnArguments {
    fn run(self) -> ExitCode {
        let since = match self.since.as_deref().map(config::duration).transpose() {
            Ok(since) => since.and_then(|since| SystemTime::now().checked_sub(since)).map(Timestamp),
            Err(malformed) => return fail(&format!("--since: {malformed}"), ExitCode::from(UNUSABLE)),
        };
        let conditions = AuditSearch { since, peer: self.peer, ..AuditSearch::default() };
        let bounds = LearningBounds { names: self.names, listed_names: self.listed_names };
        match policy_learning::learn(&self.files, &conditions, bounds) {
            Ok(learned) if learned.records == 0 => fail("no record of a call was found", ExitCode::FAILURE),
            Ok(learned) => {
                let warned = learned
                    .warnings
                    .iter()
                    .try_for_each(|warning| writeln!(io::stderr(), "warning: {warning}"));
                finish(warned.and(write!(io::stdout(), "{}", learned.text)), ExitCode::SUCCESS)
            }
            Err(error) => fail(&error.to_string(), ExitCode::FAILURE),
        }
    }
}

fn unusable(error: &PolicyCheckError) -> ExitCode {
    fail(&error.to_string(), ExitCode::from(UNUSABLE))
}
