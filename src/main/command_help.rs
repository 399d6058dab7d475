//! The help of each command beside its arguments: the groups of commands, exit codes, examples, files.
//!
//! Owns: these texts, for `keyward help` and for the man pages, and the hints for words that are no command.
//! Must not know: the effect of a command. Invariant: a command in no group is still listed.

use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::process::ExitCode;

use clap::builder::StyledStr;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Command, CommandFactory as _};
use keyward::admin::view::ViewTopic;

use super::{Arguments, UNUSABLE, finish};

/// The groups of commands, by what one does with them.
const GROUPS: [(&str, &[&str]); 7] = [
    ("Set up", &["init", "check", "keygen", "hash-password"]),
    ("Run", &["serve", "reload", "log-level", "drain"]),
    ("Look", &["status", "doctor", "show", "top", "sessions", "version"]),
    ("Act", &["kick", "revoke", "block", "unblock", "pause", "resume"]),
    ("Policy", &["policy", "grant", "ungrant", "grants"]),
    ("Audit", &["audit"]),
    ("Install", &["completions", "man"]),
];

/// Words that one tries, and what does it.
const GUESSES: [(&str, &str); 8] = [
    ("defrag", "etcdctl defrag through Keyward: one member at a time, drained first"),
    ("compact", "etcdctl compact through Keyward"),
    ("snapshot", "etcdctl snapshot save through Keyward"),
    ("start", "keyward serve"),
    ("stop", "keyward drain"),
    ("shutdown", "keyward drain"),
    ("validate", "keyward check"),
    ("login", "nobody logs in at the admin socket: it is for root and for Keyward's own user"),
];

/// The end of a command as its exit code tells it.
type ExitCodes = &'static [(u8, &'static str)];

/// The help of one command.
pub(super) struct CommandNotes {
    /// The words of the command, as in `policy apply`.
    command: &'static str,
    exit: ExitCodes,
    /// Further exit codes, which several commands have.
    more_exit: ExitCodes,
    /// Command lines, each with its purpose.
    examples: &'static [(&'static str, &'static str)],
    files: &'static [(&'static str, &'static str)],
}

const LOCAL: ExitCodes = &[(64, "the command line cannot be used")];
const ASKING: ExitCodes = &[
    (64, "the command line, or the configuration that names the socket, cannot be used"),
    (69, "no process answers at the admin socket, so nothing was asked"),
];
const CHANGING: ExitCodes = &[
    (64, "the command line, or the configuration that names the socket, cannot be used"),
    (69, "no process answers at the admin socket, so nothing was sent"),
    (74, "in force on this replica, but not kept: a restart forgets it"),
    (75, "the outcome is unknown: repeat the command"),
];
const STORING: ExitCodes = &[
    (64, "the command line, or the configuration that names the socket, cannot be used"),
    (69, "no process answers at the admin socket, so nothing was sent"),
    (75, "the outcome is unknown: look with keyward policy history or keyward grants"),
];
const ORDERING: ExitCodes = &[
    (64, "the command line, or the configuration that names the socket, cannot be used"),
    (69, "no process answers at the admin socket, so nothing was asked"),
    (75, "the outcome at a replica is unknown: look with keyward show, then repeat the command"),
];
const SOCKET: &[(&str, &str)] = &[(
    "/run/keyward/admin.sock",
    "the admin socket, unless --socket, KEYWARD_ADMIN__SOCKET or admin.socket names another",
)];
const CONFIG: &[(&str, &str)] =
    &[("/etc/keyward/keyward.toml", "the configuration of the package's service (--config)")];
const NONE: &[(&str, &str)] = &[];

const DONE: (u8, &str) = (0, "done");
const REFUSED: (u8, &str) = (1, "refused: nothing has changed");
const REFUSED_OR_MISSING: (u8, &str) =
    (1, "refused, or nothing to do; with --all also: a replica is missing");

/// Without a named socket, and without a process, the configuration's policy judges.
const NAMED_SOCKET: (u8, &str) = (69, "no process answers at the socket of --socket");

const NOTES: [CommandNotes; 39] = [
    notes(
        "serve",
        &[
            (0, "ended after a drain"),
            (1, "failed while starting or running"),
            (64, "the command line or the configuration cannot be used: keyward check tells why"),
            (74, "ended after a drain, and audit records were not written"),
        ],
        &[],
        &[
            ("keyward serve --config /etc/keyward/keyward.toml", "as a service"),
            ("keyward serve --endpoints http://127.0.0.1:2379 --listen 127.0.0.1:12379", "a first try"),
            (
                "keyward serve --config keyward.toml --take-over",
                "in the place of the process that serves now",
            ),
        ],
        CONFIG,
    ),
    notes(
        "check",
        &[
            (0, "no error; with --strict no warning either"),
            (1, "an error at the cluster or in a certificate; with --strict also a warning"),
            (64, "a fault: keyward serve would not start"),
        ],
        &[],
        &[
            ("keyward check --config keyward.toml", "the file and every file that it names"),
            ("keyward check --dial --strict --config keyward.toml", "the cluster too, before a start"),
            ("keyward check -o json --config keyward.toml", "for a program"),
        ],
        CONFIG,
    ),
    notes(
        "init",
        &[(0, "written"), (1, "no member answers, a password is refused, or the file exists")],
        LOCAL,
        &[
            ("keyward init --endpoints http://127.0.0.1:2379", "print a configuration"),
            ("keyward init -o keyward.toml --endpoints https://etcd-1:2379 --cacert ca.crt", "write it"),
        ],
        NONE,
    ),
    notes(
        "hash-password",
        &[(0, "printed"), (1, "no password was given, or twice a different one")],
        LOCAL,
        &[("keyward hash-password", "ask for a password")],
        NONE,
    ),
    notes(
        "keygen",
        &[(0, "written"), (1, "the file exists, or cannot be written")],
        LOCAL,
        &[("keyward keygen /etc/keyward/session.key", "one key for all replicas")],
        NONE,
    ),
    notes(
        "revoke",
        &[DONE, REFUSED],
        CHANGING,
        &[
            ("keyward revoke alice", "all sessions of a user"),
            ("keyward revoke --session 2188fb71f3e76d20bc325cea09efdc7c", "one of keyward sessions"),
        ],
        SOCKET,
    ),
    notes(
        "block",
        &[DONE, REFUSED],
        CHANGING,
        &[("keyward block alice", "until keyward unblock alice")],
        SOCKET,
    ),
    notes("unblock", &[DONE, REFUSED], CHANGING, &[("keyward unblock alice", "alice logs in again")], SOCKET),
    notes(
        "sessions",
        &[(0, "listed"), (1, "the replica refused")],
        ASKING,
        &[("keyward sessions", "who has logged in"), ("keyward sessions -o json", "for a program")],
        SOCKET,
    ),
    notes(
        "show",
        &[(0, "shown"), (1, "the replica refused; with --all: the rows of a replica are missing")],
        ASKING,
        &[
            ("keyward show clients --over 2s --sort calls_per_second", "the busiest clients now"),
            ("keyward show clients --all --over 2s --sort calls_per_second", "the same of all replicas"),
            ("keyward show watches --filter range~/registry/", "who watches a prefix"),
            ("keyward show slow -o wide", "the slowest calls, with the member that was slow"),
            ("keyward show limits -o json", "for a program"),
        ],
        SOCKET,
    ),
    notes(
        "top",
        &[(0, "ended by q"), (1, "the terminal failed")],
        ASKING,
        &[("keyward top", "the busiest clients first")],
        SOCKET,
    ),
    notes(
        "kick",
        &[DONE, REFUSED_OR_MISSING],
        ORDERING,
        &[
            ("keyward kick 17", "a number of keyward show clients"),
            ("keyward kick --all file:bob", "all connections of a peer, on every replica"),
            ("keyward kick 17 --replica kw-2", "a number of keyward show clients --all"),
        ],
        SOCKET,
    ),
    notes(
        "pause",
        &[DONE, REFUSED_OR_MISSING],
        ORDERING,
        &[
            ("keyward pause m1", "before m1 is repaired"),
            ("keyward pause m1 --all", "the same on every replica"),
        ],
        SOCKET,
    ),
    notes(
        "resume",
        &[DONE, REFUSED_OR_MISSING],
        ORDERING,
        &[("keyward resume m1 --all", "m1 gets calls again, from every replica")],
        SOCKET,
    ),
    notes(
        "status",
        &[
            (0, "the replica serves, also when degraded"),
            (1, "it does not serve; with --all: one of them, or no answer"),
        ],
        ASKING,
        &[
            ("keyward status", "the replica and the members"),
            ("keyward status --all", "a line for each replica"),
            ("keyward status -o wide", "all columns"),
            ("keyward status -o json", "for a program"),
        ],
        SOCKET,
    ),
    notes(
        "doctor",
        &[(0, "no finding, or notes only"), (1, "warnings"), (2, "errors")],
        ASKING,
        &[("keyward doctor", "what is wrong, and what to do"), ("keyward doctor -o json", "for a program")],
        SOCKET,
    ),
    notes(
        "policy check",
        &[(0, "valid"), (1, "valid, but rules can apply to no caller"), (64, "faults")],
        &[],
        &[("keyward policy check policy.toml --config keyward.toml", "before it is applied")],
        NONE,
    ),
    notes(
        "policy test",
        &[(0, "all as expected"), (1, "another verdict than expected"), (64, "faults"), NAMED_SOCKET],
        &[],
        &[
            ("keyward policy test calls.toml --policy policy.toml --config keyward.toml", "in a pipeline"),
            ("keyward policy test calls.toml", "against the policy in force"),
        ],
        SOCKET,
    ),
    notes(
        "policy explain",
        &[(0, "allowed"), (1, "refused"), (64, "faults"), NAMED_SOCKET],
        &[],
        &[
            ("keyward policy explain file:alice Put /teams/a/x", "why a call is refused now"),
            ("keyward policy explain file:alice Put /teams/a/x --policy policy.toml", "by another policy"),
        ],
        SOCKET,
    ),
    notes(
        "policy shadow",
        &[(0, "shown"), (1, "the replica refused")],
        ASKING,
        &[
            ("keyward policy shadow", "who would be refused what, if enforce were the mode"),
            ("keyward policy shadow --filter peer~alice -o wide", "one peer, with the reasons"),
        ],
        SOCKET,
    ),
    notes(
        "policy learn",
        &[(0, "printed"), (1, "a file cannot be read, or has no record of a call")],
        LOCAL,
        &[("keyward policy learn --since 24h /var/log/keyward/audit.log", "what was done in a day")],
        &[("/var/log/keyward/audit.log", "the audit log of the package's service (audit.file)")],
    ),
    notes(
        "policy apply",
        &[(0, "stored"), REFUSED],
        STORING,
        &[
            ("keyward policy apply policy.toml --comment \"team b\"", "for every replica"),
            ("keyward policy apply policy.toml --if-generation 7", "unless somebody else has changed it"),
        ],
        SOCKET,
    ),
    notes(
        "policy diff",
        &[(0, "no difference"), (1, "a difference"), (64, "a fault in FILE, or no policy.etcd_prefix")],
        ASKING,
        &[("keyward policy diff policy.toml", "against the rules in force")],
        SOCKET,
    ),
    notes(
        "policy history",
        &[(0, "listed"), (1, "the replica refused")],
        ASKING,
        &[
            ("keyward policy history", "who has changed the policy, and when"),
            ("keyward policy history -o json", "for a program"),
        ],
        SOCKET,
    ),
    notes(
        "policy rollback",
        &[(0, "stored"), REFUSED],
        STORING,
        &[("keyward policy rollback 6", "as the next generation")],
        SOCKET,
    ),
    notes(
        "policy show",
        &[(0, "printed"), (1, "there is none, or the replica refused")],
        ASKING,
        &[("keyward policy show", "the generation in force"), ("keyward policy show 6", "an earlier one")],
        SOCKET,
    ),
    notes(
        "grant",
        &[(0, "given"), REFUSED],
        STORING,
        &[("keyward grant file:alice operator --for 30m --reason \"disk full\"", "for half an hour")],
        SOCKET,
    ),
    notes(
        "ungrant",
        &[(0, "taken back"), REFUSED],
        STORING,
        &[("keyward ungrant file:alice operator", "before its end")],
        SOCKET,
    ),
    notes(
        "grants",
        &[(0, "listed"), (1, "the replica refused")],
        ASKING,
        &[("keyward grants", "those in force"), ("keyward grants -o json", "for a program")],
        SOCKET,
    ),
    notes(
        "audit verify",
        &[(0, "whole"), (1, "a line was changed, or a file cannot be read")],
        LOCAL,
        &[
            ("keyward audit verify /var/log/keyward/audit.log", "nobody has changed it"),
            ("keyward audit verify audit.log.1 audit.log --public-key audit.key.pub", "nor made it anew"),
        ],
        NONE,
    ),
    notes(
        "audit search",
        &[(0, "searched"), (1, "a file cannot be read")],
        LOCAL,
        &[
            ("keyward audit search --key /teams/a/x --event change audit.log", "who has changed a key"),
            ("keyward audit search --since 1h --event refusal audit.log", "who was refused what"),
        ],
        NONE,
    ),
    notes(
        "audit keygen",
        &[(0, "written"), (1, "the file exists, or cannot be written")],
        LOCAL,
        &[("keyward audit keygen /etc/keyward/audit.key", "for audit.signing_key_file")],
        NONE,
    ),
    notes(
        "reload",
        &[(0, "the configuration is in force"), (1, "a fault left everything unchanged")],
        &[
            (64, "the command line cannot be used"),
            (69, "no process answers at the admin socket"),
            (75, "the reload still runs: the log has its outcome"),
        ],
        &[("keyward reload", "after the file was changed")],
        SOCKET,
    ),
    notes(
        "log-level",
        &[DONE, REFUSED],
        ASKING,
        &[
            ("keyward log-level debug", "until the next reload"),
            ("keyward log-level info,watch=debug", "one module only"),
        ],
        SOCKET,
    ),
    notes(
        "drain",
        &[
            (0, "no open connection was cut"),
            (1, "connections were cut with something open, or it was refused: audit records would be lost"),
        ],
        &[
            (64, "the command line cannot be used"),
            (69, "no process answers at the admin socket"),
            (74, "audit records were not written, and are lost"),
            (75, "the process is gone without a word of its end"),
        ],
        &[("keyward drain", "before the machine is stopped")],
        SOCKET,
    ),
    notes("version", &[(0, "printed")], LOCAL, &[("keyward version -o json", "for a program")], NONE),
    notes("completions", &[(0, "printed")], LOCAL, &[("keyward completions bash", "for bash")], NONE),
    notes(
        "man",
        &[(0, "written"), (1, "a page cannot be written")],
        LOCAL,
        &[("keyward man /usr/local/share/man/man1", "for man keyward")],
        NONE,
    ),
    notes(
        "",
        &[(0, "done"), (1, "failed, or found what the command looks for: see the command's own page")],
        &[
            (64, "the command line or the configuration cannot be used"),
            (69, "no process answers at the admin socket"),
        ],
        &[
            ("keyward init -o keyward.toml --endpoints http://127.0.0.1:2379", "write a configuration"),
            ("keyward check --dial --config keyward.toml", "judge it, and the cluster"),
            ("keyward serve --config keyward.toml", "serve"),
            ("keyward status", "how is it?"),
            ("keyward doctor", "what is wrong?"),
        ],
        SOCKET,
    ),
];

const fn notes(
    command: &'static str,
    exit: ExitCodes,
    more_exit: ExitCodes,
    examples: &'static [(&'static str, &'static str)],
    files: &'static [(&'static str, &'static str)],
) -> CommandNotes {
    CommandNotes { command, exit, more_exit, examples, files }
}

/// The command line with its help: the groups, and the notes of each command.
pub(super) fn command() -> Command {
    let command = with_notes(Arguments::command(), "");
    let groups = grouped(&command);
    command.help_template(format!(
        "{{about-with-newline}}\n{{usage-heading}} {{usage}}\n\n{groups}\
         All about a command, its exit codes and examples: keyward help COMMAND\n\nOptions:\n{{options}}"
    ))
}

/// The notes of a command; `None` for a group of commands such as `policy`.
pub(super) fn notes_of(path: &str) -> Option<&'static CommandNotes> {
    NOTES.iter().find(|notes| notes.command == path)
}

fn with_notes(command: Command, path: &str) -> Command {
    let command = match notes_of(path) {
        Some(notes) => command.after_long_help(notes.text()),
        None => command,
    };
    command.mut_subcommands(|below| {
        let path = format!("{path} {}", below.get_name());
        with_notes(below, path.trim_start())
    })
}

/// The commands by group, one a line.
fn grouped(command: &Command) -> String {
    let is_grouped = |name: &str| GROUPS.iter().any(|(_, names)| names.contains(&name));
    let all = || command.get_subcommands().filter(|below| !below.is_hide_set());
    let others: Vec<&str> = all().map(Command::get_name).filter(|name| !is_grouped(name)).collect();
    let groups = GROUPS.iter().map(|(title, names)| (*title, names.to_vec()));
    let mut text = String::new();
    for (title, names) in groups.chain([("Others", others)]).filter(|(_, names)| !names.is_empty()) {
        let _infallible = writeln!(text, "{title}:");
        for below in names.iter().filter_map(|name| command.find_subcommand(name)) {
            let about = below.get_about().map(StyledStr::to_string).unwrap_or_default();
            let _infallible = writeln!(text, "  {:13}  {about}", below.get_name());
        }
        text.push('\n');
    }
    text
}

/// Prints the help, the version, or the fault of the command line.
pub(super) fn print(error: &clap::Error) -> ExitCode {
    // --help and --version come here too; both are answers, not errors.
    if !error.use_stderr() {
        return finish(error.print(), ExitCode::SUCCESS);
    }
    let printed = match hint(error) {
        Some(hint) => writeln!(io::stderr(), "{hint}"),
        None => error.print(),
    };
    finish(printed, ExitCode::from(UNUSABLE))
}

/// The command for an unknown word that one is likely to try. clap would name a command with a similar name:
/// `drain` for `defrag`.
fn hint(error: &clap::Error) -> Option<String> {
    let Some(ContextValue::String(word)) = error.get(ContextKind::InvalidSubcommand) else { return None };
    if error.kind() != ErrorKind::InvalidSubcommand {
        return None;
    }
    let guess = GUESSES.iter().find(|(guess, _)| guess == word).map(|(_, instead)| (*instead).to_owned());
    let topic = || {
        let topic = ViewTopic::ALL.iter().find(|(name, _)| name == word);
        topic.map(|(name, _)| format!("keyward show {name}"))
    };
    let instead = guess.or_else(topic)?;
    Some(format!("error: there is no command '{word}'\n\n  instead: {instead}"))
}

impl CommandNotes {
    fn exit_codes(&self) -> impl Iterator<Item = &'static (u8, &'static str)> {
        self.exit.iter().chain(self.more_exit)
    }

    /// The sections after a command's arguments.
    fn text(&self) -> String {
        let mut text = String::from("Exit status:\n");
        for (code, meaning) in self.exit_codes() {
            let _infallible = writeln!(text, "  {code:<3} {meaning}");
        }
        text += "\nExamples:\n";
        for (line, purpose) in self.examples {
            let _infallible = writeln!(text, "  # {purpose}\n  {line}");
        }
        if !self.files.is_empty() {
            text += "\nFiles:\n";
        }
        for (file, meaning) in self.files {
            let _infallible = writeln!(text, "  {file}\n      {meaning}");
        }
        text
    }

    /// The same sections of a man page.
    pub(super) fn roff(&self) -> String {
        let mut page = String::from(".SH \"EXIT STATUS\"\n");
        for (code, meaning) in self.exit_codes() {
            let _infallible = writeln!(page, ".TP\n\\fB{code}\\fR\n{}", roff_text(meaning));
        }
        page += ".SH EXAMPLES\n";
        for (line, purpose) in self.examples {
            let _infallible = writeln!(
                page,
                ".PP\n{}:\n.PP\n.RS 4\n.nf\n{}\n.fi\n.RE",
                roff_text(purpose),
                roff_text(line)
            );
        }
        if !self.files.is_empty() {
            page += ".SH FILES\n";
        }
        for (file, meaning) in self.files {
            let _infallible = writeln!(page, ".TP\n\\fI{}\\fR\n{}", roff_text(file), roff_text(meaning));
        }
        page
    }
}

/// A text in which no character is an order of roff. No text begins with a dot.
fn roff_text(text: &str) -> String {
    text.replace('\\', "\\e").replace('-', "\\-").replace('\'', "\\(aq")
}
