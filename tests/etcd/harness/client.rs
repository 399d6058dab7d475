//! The real Go clients of `tests/clients/go`: started, and their record read.
//!
//! Owns: running `kwclient`, its JSON lines. Must not know what a scenario proves.

use std::process::ExitStatus;
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;

use super::client_program::client_program;
use super::process::Process;
use super::{password, wait};

/// Beyond the longest scenario at full length.
const LIMIT: Duration = Duration::from_secs(400);

/// A running client.
pub(crate) struct Client {
    process: Process,
    /// After the process, whose log is in it.
    _folder: TempDir,
}

/// What a client recorded.
pub(crate) struct Record {
    /// How it ended: 0 ran to its end, 1 could not, 2 panicked.
    pub(crate) exit: ExitStatus,
    lines: Vec<Value>,
    tail: String,
}

impl Client {
    /// Starts `scenario` on clientv3 `version` as `user` against `endpoints` (`host:port`).
    pub(crate) fn start(
        version: &str,
        scenario: &str,
        user: &str,
        endpoints: &[String],
        args: &[&str],
    ) -> Client {
        let folder = tempfile::Builder::new().prefix("kwclient-").tempdir().expect("a temporary folder");
        let secret = folder.path().join("password");
        std::fs::write(&secret, password(user)).expect("a file can be written");
        let endpoints = endpoints.join(",");
        let secret = secret.display().to_string();
        let mut all = vec![scenario, "--endpoints", &endpoints, "--user", user, "--password-file", &secret];
        all.extend(args);
        let process = Process::start(
            "kwclient",
            &client_program("go", &[version]),
            all,
            &[],
            &folder.path().join("record"),
        );
        Client { process, _folder: folder }
    }

    /// Waits until it has recorded a line of `kind`.
    pub(crate) async fn says(&self, kind: &str) {
        let wanted = format!("\"kind\":\"{kind}\"");
        let found =
            |text: &str| (text.contains(&wanted) || text.contains("\"kind\":\"fatal\"")).then_some(());
        self.process.wrote(LIMIT, kind, found).await;
    }

    /// Waits until it has recorded so many more lines of `kind` than now.
    pub(crate) async fn says_more(&self, kind: &str, more: usize) {
        let wanted = format!("\"kind\":\"{kind}\"");
        let count = |text: &str| text.matches(&wanted).count();
        let enough = count(&self.process.output()) + more;
        let found = |text: &str| {
            assert!(self.process.exit().is_none(), "kwclient ended: {}", self.process.tail());
            (count(text) >= enough).then_some(())
        };
        self.process.wrote(LIMIT, &format!("{more} more of {kind}"), found).await;
    }

    /// Waits until all of these are served by this cluster (the scenario `tenant`).
    pub(crate) async fn serves(&self, ops: &[&str], cluster: &str) {
        let all = |text: &str| {
            assert!(self.process.exit().is_none(), "kwclient ended: {}", self.process.tail());
            let served: Vec<Value> =
                lines(text).into_iter().filter(|line| line["kind"] == "served").collect();
            let by = |op: &&str| served.iter().any(|line| line["op"] == **op && line["cluster"] == cluster);
            ops.iter().all(by).then_some(())
        };
        self.process.wrote(LIMIT, &format!("{ops:?} by {cluster}"), all).await;
    }

    /// Waits until its watches have shown so many events in all (the scenario `watchers`).
    pub(crate) async fn has_seen(&self, events: usize) {
        let enough = |text: &str| {
            assert!(self.process.exit().is_none(), "kwclient ended: {}", self.process.tail());
            let seen = lines(text).into_iter().filter(|line| line["kind"] == "response");
            let seen: usize = seen.map(|line| line["events"].as_array().map_or(0, Vec::len)).sum();
            (seen >= events).then_some(())
        };
        self.process.wrote(LIMIT, &format!("{events} events"), enough).await;
    }

    /// What a load has done until now.
    pub(crate) async fn so_far(&self) -> Value {
        let all = |text: &str| -> Vec<Value> {
            lines(text).into_iter().filter(|line| line["kind"] == "so_far").collect()
        };
        let before = all(&self.process.output()).len();
        self.process.signal(rustix::process::Signal::USR1);
        let told = |text: &str| {
            assert!(self.process.exit().is_none(), "kwclient ended: {}", self.process.tail());
            all(text).into_iter().nth(before)
        };
        self.process.wrote(LIMIT, "so_far", told).await
    }

    /// Asks a load to end its calls and to judge itself.
    pub(crate) fn finish(&self) {
        self.process.signal(rustix::process::Signal::TERM);
    }

    /// Waits for its end.
    pub(crate) async fn record(self) -> Record {
        let exit = self.process.ended(LIMIT).await;
        Record { exit, lines: lines(&self.process.output()), tail: self.process.tail() }
    }
}

impl Record {
    /// The only line of this kind.
    pub(crate) fn the<'a>(&'a self, kind: &'a str) -> &'a Value {
        let mut found = self.all(kind);
        let one = found.next().unwrap_or_else(|| panic!("no {kind} line: {}", self.tail));
        assert!(found.next().is_none(), "several {kind} lines");
        one
    }

    /// The lines of this kind.
    pub(crate) fn all<'a>(&'a self, kind: &'a str) -> impl Iterator<Item = &'a Value> {
        self.lines.iter().filter(move |line| line["kind"] == kind)
    }

    /// A number in the summary.
    pub(crate) fn summed(&self, field: &str) -> i64 {
        self.the("summary")[field]
            .as_i64()
            .unwrap_or_else(|| panic!("no number {field}: {}", self.the("summary")))
    }

    /// How many entries a list in the summary has.
    pub(crate) fn listed(&self, field: &str) -> usize {
        self.the("summary")[field].as_array().map_or(0, Vec::len)
    }

    /// Errors that the application saw, as text.
    pub(crate) fn errors(&self) -> Vec<String> {
        self.all("error").map(ToString::to_string).collect()
    }

    /// The end of everything that it wrote.
    pub(crate) fn tail(&self) -> &str {
        &self.tail
    }
}

/// What a client program has recorded: its lines of JSON. The last one may not be whole yet.
pub(crate) fn lines(output: &str) -> Vec<Value> {
    output
        .lines()
        .filter(|line| line.starts_with('{'))
        .filter_map(|line| serde_json::from_str(line).ok())
        .collect()
}

/// Waits for `duration` of real time: for a token to expire, which has no event.
pub(crate) async fn lifetime(duration: Duration) {
    wait::until(duration * 2, "time to pass", async || {
        tokio::time::sleep(duration).await;
        Some(())
    })
    .await;
}
