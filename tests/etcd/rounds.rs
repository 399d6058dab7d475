//! The `rounds` program of each client library: an application that logs in once and does one thing of each kind when asked.
//!
//! Owns: the list of libraries, the process, the contract of its lines (tests/clients/README.md). Must not know what is between the
//! rounds, nor what is right.

use std::cell::Cell;
use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

use crate::harness::client::lines;
use crate::harness::client_program::client_program;
use crate::harness::pki::Pair;
use crate::harness::process::Process;
use crate::harness::{Cluster, password, wait};

/// Six things that may take 10 s each, on a slow machine.
const LIMIT: Duration = Duration::from_secs(120);

/// One client library.
#[derive(Debug)]
pub(crate) struct Family {
    pub(crate) name: &'static str,
    folder: &'static str,
    args: &'static [&'static str],
    /// Over TLS only: the library sends no password without.
    pub(crate) tls: bool,
}

pub(crate) const FAMILIES: &[Family] = &[
    plain("clientv3 3.4.23", "go", &["3.4.23"]),
    plain("clientv3 3.5.1", "go", &["3.5.1"]),
    plain("clientv3 3.5.11", "go", &["3.5.11"]),
    plain("clientv3 3.6.16", "go", &["3.6.16"]),
    Family { name: "python etcd3 0.12.0", folder: "python", args: &[], tls: true },
    plain("aetcd 1.0.0", "aetcd", &[]),
    plain("npm etcd3 1.1.2", "node", &[]),
    plain("etcd-client 0.17.0", "rust", &["0.17.0"]),
    plain("etcd-client 0.19.0", "rust", &["0.19.0"]),
    plain("etcd-client 0.21.1", "rust", &["0.21.1"]),
];

const fn plain(name: &'static str, folder: &'static str, args: &'static [&'static str]) -> Family {
    Family { name, folder, args, tls: false }
}

impl Family {
    /// The program. Asked for before anything runs on this thread: asking blocks.
    pub(crate) fn program(&self) -> PathBuf {
        client_program(self.folder, self.args)
    }
}

/// A running program, as alice.
pub(crate) struct Application {
    pub(crate) family: &'static Family,
    process: Process,
    rounds: Cell<u32>,
    _folder: TempDir,
}

/// What became of one thing that the application did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Did {
    pub(crate) op: String,
    /// gRPC's, or the library's own name of the error, or `Timeout`.
    pub(crate) code: String,
    pub(crate) message: String,
    pub(crate) ms: u64,
}

impl Did {
    pub(crate) fn ok(&self) -> bool {
        self.code == "OK"
    }
}

impl fmt::Display for Did {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Did { op, code, message, ms } = self;
        write!(f, "{op}: {code} {message} ({ms} ms)")
    }
}

impl Application {
    /// Starts it and waits until it is logged in and its watch and lease stand.
    pub(crate) async fn start(
        family: &'static Family,
        address: SocketAddr,
        cluster: &Cluster,
    ) -> Application {
        Application::start_showing(family, address, cluster, None).await
    }

    /// The same over plaintext or TLS as the library needs it, with requests that the library compresses with gzip; only
    /// the Go clients and python's know how.
    pub(crate) async fn start_compressing(
        family: &'static Family,
        address: SocketAddr,
        cluster: &Cluster,
    ) -> Application {
        let folder = tempfile::Builder::new().prefix("rounds-").tempdir().expect("a temporary folder");
        let secret = folder.path().join("password");
        std::fs::write(&secret, password("alice")).expect("a file can be written");
        let (address, secret) = (address.to_string(), secret.display().to_string());
        let (prefix, ca) = (prefix(family), cluster.pki().ca.display().to_string());
        let mut args = vec!["rounds", "--gzip", "--endpoints", &address, "--prefix", &prefix];
        args.extend(["--user", "alice", "--password-file", &secret]);
        if family.tls {
            args.extend(["--cacert", &ca]);
        }
        Application::run(family, &args, folder).await
    }

    /// The same with a certificate in place of a password, over TLS; only the Go clients know how.
    pub(crate) async fn start_showing(
        family: &'static Family,
        address: SocketAddr,
        cluster: &Cluster,
        shown: Option<&Pair>,
    ) -> Application {
        let folder = tempfile::Builder::new().prefix("rounds-").tempdir().expect("a temporary folder");
        let secret = folder.path().join("password");
        std::fs::write(&secret, password("alice")).expect("a file can be written");
        let (address, secret) = (address.to_string(), secret.display().to_string());
        let (prefix, ca) = (prefix(family), cluster.pki().ca.display().to_string());
        let shown = shown.map(|pair| (pair.cert.display().to_string(), pair.key.display().to_string()));
        let mut args = vec!["rounds", "--endpoints", &address, "--prefix", &prefix];
        match &shown {
            None => args.extend(["--user", "alice", "--password-file", &secret]),
            Some((cert, key)) => args.extend(["--cert", cert, "--key", key]),
        }
        if family.tls || shown.is_some() {
            args.extend(["--cacert", &ca]);
        }
        Application::run(family, &args, folder).await
    }

    /// The same over a unix socket; as nobody where the library shows no password in plaintext.
    pub(crate) async fn start_over_unix(family: &'static Family, socket: &Path) -> Application {
        let folder = tempfile::Builder::new().prefix("rounds-").tempdir().expect("a temporary folder");
        let secret = folder.path().join("password");
        std::fs::write(&secret, password("alice")).expect("a file can be written");
        let slashes = if family.folder == "go" { "//" } else { "" };
        let (address, secret) = (format!("unix:{slashes}{}", socket.display()), secret.display().to_string());
        let prefix = prefix(family);
        let mut args = vec!["rounds", "--endpoints", &address, "--prefix", &prefix];
        if !family.tls {
            args.extend(["--user", "alice", "--password-file", &secret]);
        }
        Application::run(family, &args, folder).await
    }

    async fn run(family: &'static Family, args: &[&str], folder: TempDir) -> Application {
        let process =
            Process::start(family.name, &family.program(), args.iter(), &[], &folder.path().join("record"));
        let application = Application { family, process, rounds: Cell::new(0), _folder: folder };
        let ready = |output: &str, exit: Option<ExitStatus>| {
            assert!(exit.is_none(), "{} ended: {}", family.name, application.process.tail());
            lines(output).iter().any(|line| line["kind"] == "ready").then_some(())
        };
        application.process.wrote_or_ended(LIMIT, "that it is ready", ready).await;
        application
    }

    /// Writes what its watch must show, straight to the cluster, has it do its things, and returns what became of them. The last
    /// is `exit` where it ended by itself.
    pub(crate) async fn round(&self, cluster: &Cluster) -> Vec<Did> {
        let number = self.rounds.get() + 1;
        self.rounds.set(number);
        let key = format!("{}watched", prefix(self.family));
        let (ctl, value) = (cluster.ctl_as_root(), number.to_string());
        // A library that is stuck may keep the server busy.
        let written = async || (ctl.run(&["put", &key, &value]).await.code == Some(0)).then_some(());
        wait::until(LIMIT, "what the watch must show is written", written).await;
        self.process.signal(Signal::USR2);
        let done = |output: &str, exit: Option<ExitStatus>| {
            let lines = lines(output);
            let over = lines.iter().any(|line| line["kind"] == "round" && line["round"] == number);
            (over || exit.is_some()).then_some((lines, exit))
        };
        let (lines, exit) = self.process.wrote_or_ended(LIMIT, "the end of a round", done).await;
        let text = |line: &Value, field: &str| line[field].as_str().unwrap_or_default().to_owned();
        let did = |line: &Value| Did {
            op: text(line, "op"),
            code: text(line, "code"),
            message: text(line, "message"),
            ms: line["ms"].as_u64().unwrap_or_default(),
        };
        let of_round = lines.iter().filter(|line| line["kind"] == "did" && line["round"] == number);
        let mut all: Vec<Did> = of_round.map(did).collect();
        if let Some(exit) = exit {
            let last = lines.iter().rev().find(|line| line["kind"] == "fatal" || line["kind"] == "panic");
            let (code, message) =
                last.map_or_else(Default::default, |line| (text(line, "code"), text(line, "message")));
            all.push(Did { op: "exit".into(), code: format!("{exit} {code}"), message, ms: 0 });
        }
        all
    }
}

/// Where its keys are.
fn prefix(family: &Family) -> String {
    format!("/a/{}/", family.name.replace(' ', "-"))
}
