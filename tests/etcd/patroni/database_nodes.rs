//! Three machines with Patroni and PostgreSQL on loopback, each with its own data folder.
//!
//! Owns: their processes, configurations and folders. Must not know what answers Patroni's calls. Invariants: PostgreSQL never runs as
//! root; nothing of a node outlives this value (`node` of tests/clients/patroni kills what Patroni leaves behind).

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::Signal;
use tempfile::TempDir;

use crate::harness::client_program::client_program;
use crate::harness::process::Process;
use crate::harness::{password, ports, wait};

const LIMIT: Duration = Duration::from_secs(60);
/// The user that PostgreSQL runs as where the tests run as root; Debian's package creates it.
const OWNER: &str = "postgres";
pub(super) const SCOPE: &str = "orders";

/// Patroni's own limits, in seconds.
#[derive(Clone, Copy, Debug)]
pub(super) struct PatroniTiming {
    pub(super) ttl: u32,
    pub(super) loop_wait: u32,
    pub(super) retry_timeout: u32,
}

struct DatabaseNode {
    name: String,
    sql: SocketAddr,
    rest: SocketAddr,
    process: Option<Process>,
}

/// The machines.
pub(super) struct DatabaseNodes {
    /// Whose they are, in the names of logs.
    label: &'static str,
    nodes: Vec<DatabaseNode>,
    /// The folder with `node`, `observe` and `patronictl`.
    programs: PathBuf,
    /// Last, so that the processes end before their folder goes.
    folder: TempDir,
}

impl DatabaseNodes {
    /// Starts three nodes that have this section `etcd3`.
    pub(super) fn start(label: &'static str, etcd3: &str, timing: PatroniTiming) -> DatabaseNodes {
        let folder = tempfile::Builder::new().prefix("patroni-").tempdir().expect("a temporary folder");
        let programs = client_program("patroni", &[]);
        let programs = programs.parent().expect("a program has a folder").to_owned();
        let node = |i: usize| DatabaseNode {
            name: format!("pg{i}"),
            sql: ports::free(),
            rest: ports::free(),
            process: None,
        };
        let mut nodes = DatabaseNodes { label, nodes: (0..3).map(node).collect(), programs, folder };
        for i in 0..nodes.nodes.len() {
            nodes.configure(i, etcd3, timing);
            nodes.launch(i);
        }
        nodes
    }

    /// The program that tells each node's role, and its arguments.
    pub(super) fn observer(&self) -> (PathBuf, Vec<String>) {
        let secret = self.folder.path().join("superuser.password");
        fs::write(&secret, password("superuser")).expect("the folder is ours");
        let mut args = vec!["--user".into(), "superuser".into()];
        args.extend(["--password-file".into(), secret.display().to_string()]);
        args.extend(
            self.nodes.iter().map(|node| format!("{}={},{}", node.name, node.sql.port(), node.rest.port())),
        );
        (self.programs.join("observe"), args)
    }

    pub(super) fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub(super) fn names(&self) -> Vec<String> {
        self.nodes.iter().map(|node| node.name.clone()).collect()
    }

    /// Kills Patroni and PostgreSQL of this node (SIGKILL), and returns when they are gone.
    pub(super) async fn cut_power(&mut self, name: &str) {
        let process = self.node(name).process.take().expect("the node runs");
        process.signal(Signal::TERM);
        process.ended(LIMIT).await;
    }

    /// Starts it again.
    pub(super) fn start_again(&mut self, name: &str) {
        let i = self.nodes.iter().position(|node| node.name == name).expect("a node has this name");
        self.launch(i);
    }

    /// Asks Patroni, as an operator does, to make another node the primary; returns what `patronictl` printed.
    pub(super) async fn switch_over(&self, from: &str, to: &str) -> String {
        let log = self.folder.path().join("patronictl.log");
        let config = self.config(from).display().to_string();
        let args = ["-c", &config, "switchover", SCOPE, "--leader", from, "--candidate", to, "--force"];
        let name = format!("patronictl {}", self.label);
        let process = Process::start(&name, &self.programs.join("patronictl"), args, &[], &log);
        let exit = process.ended(LIMIT).await;
        assert!(exit.success(), "{}", process.tail());
        process.output()
    }

    /// Patroni's log of a node, over all its starts.
    pub(super) fn log(&self, name: &str) -> PathBuf {
        self.folder.path().join(format!("{name}.logs/patroni.log"))
    }

    fn node(&mut self, name: &str) -> &mut DatabaseNode {
        self.nodes.iter_mut().find(|node| node.name == name).expect("a node has this name")
    }

    fn config(&self, name: &str) -> PathBuf {
        self.folder.path().join(format!("{name}.yml"))
    }

    fn launch(&mut self, i: usize) {
        let node = &self.nodes[i];
        let config = self.config(&node.name);
        let program = self.programs.join("node");
        let log = config.with_extension("log");
        let mut args = vec![program.into_os_string(), config.into_os_string()];
        if rustix::process::geteuid().is_root() {
            // With the right to read, which it needs for programs and files of root's.
            let rights = ["--inh-caps=+dac_override", "--ambient-caps=+dac_override", "--"];
            let user = ["setpriv", "--reuid", OWNER, "--regid", OWNER, "--init-groups"];
            args = user.into_iter().chain(rights).map(Into::into).chain(args).collect();
        }
        let program = PathBuf::from(args.remove(0));
        let name = format!("patroni {} {}", self.label, node.name);
        self.nodes[i].process = Some(Process::start(&name, &program, args, &[], &log));
    }

    fn configure(&self, i: usize, etcd3: &str, timing: PatroniTiming) {
        let DatabaseNode { name, sql, rest, .. } = &self.nodes[i];
        let folder = self.folder.path();
        let at = |what: &str| folder.join(format!("{name}.{what}")).display().to_string();
        let (data, logs, pgpass) = (at("data"), at("logs"), at("pgpass"));
        fs::create_dir(&logs).expect("the folder is ours");
        let programs = client_program("patroni", &["--postgres"]).display().to_string();
        let PatroniTiming { ttl, loop_wait, retry_timeout } = timing;
        let login = |user: &str| format!("{{username: {user}, password: {}}}", password(user));
        let (superuser, replicator) = (login("superuser"), login("replicator"));
        let sockets = folder.display();
        let text = format!(
            "scope: {SCOPE}
name: {name}
namespace: /service/
log: {{dir: {logs}, level: INFO, file_num: 1, file_size: 100000000}}
restapi: {{listen: {rest}, connect_address: {rest}}}
bootstrap:
  dcs:
    ttl: {ttl}
    loop_wait: {loop_wait}
    retry_timeout: {retry_timeout}
    maximum_lag_on_failover: 1048576
    postgresql:
      use_pg_rewind: true
      parameters: {{fsync: 'off', shared_buffers: 8MB, max_connections: 20, max_wal_senders: 5, wal_keep_size: 128MB}}
  initdb: [{{encoding: UTF8}}, {{locale: C.UTF-8}}, data-checksums, no-sync]
postgresql:
  listen: {sql}
  connect_address: {sql}
  data_dir: {data}
  bin_dir: {programs}
  pgpass: {pgpass}
  authentication:
    superuser: {superuser}
    replication: {replicator}
  parameters: {{unix_socket_directories: {sockets}}}
  pg_hba:
    - host replication replicator 127.0.0.1/32 scram-sha-256
    - host all all 127.0.0.1/32 scram-sha-256
    - local all all trust
{etcd3}"
        );
        fs::write(self.config(name), text).expect("the folder is ours");
    }
}

impl Drop for DatabaseNodes {
    fn drop(&mut self) {
        let running: Vec<_> = self.nodes.iter_mut().filter_map(|node| node.process.take()).collect();
        running.iter().for_each(|process| process.signal(Signal::TERM));
        // Each kills what is below it, and then ends; a panic may have brought us here, so that nothing is awaited.
        let begun = std::time::Instant::now();
        while begun.elapsed() < LIMIT && running.iter().any(|process| process.exit().is_none()) {
            std::thread::park_timeout(Duration::from_millis(10));
        }
    }
}

/// Waits until `look` says yes, and not longer than Patroni may take for anything.
pub(super) async fn seen(what: &str, look: impl AsyncFn() -> bool) {
    wait::until(Duration::from_secs(120), what, async || look().await.then_some(())).await;
}
