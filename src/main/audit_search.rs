//! `keyward audit search`: the records of a question, from the files of any replicas.
//!
//! Owns: the arguments. Must not know: the conditions' meaning, the form of a record.

use std::io::{self, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::Args;
use keyward::app::audit_files;
use keyward::audit::record::Timestamp;
use keyward::audit::search::{AuditSearch, FoundRecord, SearchedVerdict};
use keyward::config;

use super::fail;
use super::output_form::{OutputArgs, OutputForm};

/// The conditions of a search. All must hold.
#[derive(Args)]
pub(crate) struct AuditSearchArguments {
    /// The files, in any order.
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// A key: ranges that cover the key match too.
    #[arg(long, conflicts_with = "prefix")]
    key: Option<String>,
    /// The beginning of keys.
    #[arg(long)]
    prefix: Option<String>,
    /// Age of the oldest record: "90s", "30m", "2h".
    #[arg(long, value_parser = config::duration, value_name = "AGE")]
    since: Option<Duration>,
    /// Age of the newest record.
    #[arg(long, value_parser = config::duration, value_name = "AGE")]
    until: Option<Duration>,
    /// The peer, or the etcd user.
    #[arg(long)]
    peer: Option<String>,
    /// The etcd user.
    #[arg(long)]
    user: Option<String>,
    /// The method, such as Put or DeleteRange; a word that names no method stands for all that contain it,
    /// such as delete.
    #[arg(long)]
    method: Option<String>,
    /// The event, such as change or refusal.
    #[arg(long)]
    event: Option<String>,
    /// The gRPC code, such as `PermissionDenied`, or the result of a command.
    #[arg(long)]
    code: Option<String>,
    /// The verdict of the policy.
    #[arg(long, value_enum)]
    verdict: Option<SearchedVerdict>,
    /// The replica that wrote the record (audit.replica).
    #[arg(long)]
    replica: Option<String>,
    #[command(flatten)]
    as_what: OutputArgs,
}

/// Prints the records found, one a line, those of several replicas in the order of their times.
pub(crate) fn search(asked: AuditSearchArguments) -> ExitCode {
    let at = |age| Timestamp(SystemTime::now().checked_sub(age).unwrap_or(UNIX_EPOCH));
    let search = AuditSearch {
        key: asked.key.map(String::into_bytes),
        prefix: asked.prefix.map(String::into_bytes),
        since: asked.since.map(at),
        until: asked.until.map(at),
        peer: asked.peer,
        user: asked.user,
        method: asked.method,
        event: asked.event,
        code: asked.code,
        verdict: asked.verdict,
        replica: asked.replica,
    };
    let print = |line: &[u8], found: &FoundRecord| match asked.as_what.output {
        OutputForm::Table => writeln!(io::stdout(), "{found}"),
        // The last line of a torn file may lack its line break.
        OutputForm::Json => io::stdout().write_all(&[line.trim_ascii_end(), b"\n"].concat()),
    };
    match audit_files::search(&asked.files, &search, print) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(&error.to_string(), ExitCode::FAILURE),
    }
}
