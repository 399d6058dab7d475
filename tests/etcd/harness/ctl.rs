//! etcdctl of a chosen version, as a person would run it.
//!
//! Owns: its command line. Must not know whether etcd or Keyward answers.

use std::{path::PathBuf, time::Duration};

use tokio::{io::AsyncWriteExt, process::Command, time::timeout};

use super::{
    binary::Version,
    pki::{Pair, Pki},
    process::Process,
    wait,
};

/// Past every timeout of etcdctl itself.
const LIMIT: Duration = Duration::from_secs(60);

/// How to call etcdctl: which one, whom, and as whom.
#[derive(Clone)]
pub(crate) struct Ctl {
    program: PathBuf,
    endpoints: Vec<String>,
    user: Option<(String, String)>,
    tls: Option<(PathBuf, Option<Pair>)>,
    flags: Vec<&'static str>,
}

/// What one call of it ended with.
#[derive(Debug)]
pub(crate) struct Ended {
    /// The exit code; `None` where a signal ended it.
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Ctl {
    /// Without a user and without TLS.
    pub(crate) fn new(version: &Version, endpoints: Vec<String>) -> Ctl {
        Ctl { program: version.etcdctl(), endpoints, user: None, tls: None, flags: Vec::new() }
    }

    /// The same for other endpoints.
    pub(crate) fn to(&self, endpoints: Vec<String>) -> Ctl {
        Ctl { endpoints, ..self.clone() }
    }

    /// The same as `user`, with the password that the harness gave that user.
    pub(crate) fn as_user(&self, user: &str) -> Ctl {
        self.with_password(user, &super::password(user))
    }

    /// The same as `user` with this password.
    pub(crate) fn with_password(&self, user: &str, password: &str) -> Ctl {
        Ctl { user: Some((user.into(), password.into())), ..self.clone() }
    }

    /// The same over TLS, showing `client` where there is one.
    pub(crate) fn with_tls(&self, pki: &Pki, client: Option<Pair>) -> Ctl {
        Ctl { tls: Some((pki.ca.clone(), client)), ..self.clone() }
    }

    /// The same over TLS, whatever certificate is shown.
    pub(crate) fn with_unverified_tls(&self) -> Ctl {
        Ctl { flags: vec!["--insecure-transport=false", "--insecure-skip-tls-verify"], ..self.clone() }
    }

    /// Runs one command to its end.
    pub(crate) async fn run(&self, args: &[&str]) -> Ended {
        self.run_with(args, "").await
    }

    /// The same with something typed into it.
    pub(crate) async fn run_with(&self, args: &[&str], typed: &str) -> Ended {
        let mut command = Command::new(&self.program);
        let pipe = std::process::Stdio::piped;
        command.args(self.arguments(args)).env("ETCDCTL_API", "3").kill_on_drop(true);
        command.stdin(pipe()).stdout(pipe()).stderr(pipe());
        let mut child = command.spawn().expect("etcdctl can be run");
        let mut stdin = child.stdin.take().expect("it was piped");
        let ended = async {
            // It may have ended without reading.
            let heard = stdin.write_all(typed.as_bytes()).await;
            drop((stdin, heard));
            child.wait_with_output().await
        };
        let output = timeout(LIMIT, ended).await.expect("etcdctl ends").expect("etcdctl can be waited for");
        Ended {
            code: output.status.code(),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    /// Runs one command that must succeed, and returns what it printed.
    pub(crate) async fn ok(&self, args: &[&str]) -> String {
        let ended = self.run(args).await;
        assert_eq!(ended.code, Some(0), "etcdctl {args:?} failed: {}{}", ended.stdout, ended.stderr);
        ended.stdout
    }

    /// Removes the member. For the first five seconds of its connection to a member, etcd counts that member as unhealthy and refuses a
    /// removal beside it: asked until it does not. Keyward asks by itself, for longer than etcdctl waits unless told to.
    pub(crate) async fn remove_member(&self, id: u64) {
        let asked = async || {
            let ended = self.run(&["--command-timeout=20s", "member", "remove", &format!("{id:x}")]).await;
            let early = ended.stderr.contains("unhealthy cluster");
            assert!(early || ended.code == Some(0), "etcdctl member remove failed: {}", ended.stderr);
            (!early).then_some(())
        };
        wait::until(LIMIT, "etcd takes the removal of a member", asked).await;
    }

    /// Promotes the learner, also one that etcd still finds behind its leader.
    pub(crate) async fn promote(&self, id: u64) {
        let is_voter = |refusal: &str| {
            refusal.contains("can only promote a learner member") && !refusal.contains("in sync with leader")
        };
        self.until_done(&["member", "promote", &format!("{id:x}")], is_voter).await;
    }

    /// Adds a learner that nobody starts, also while etcd counts a member as unhealthy.
    pub(crate) async fn add_unstarted_learner(&self, name: &str, peer_url: &str) {
        let is_member = |refusal: &str| refusal.contains("Peer URLs already exists");
        let peer_urls = format!("--peer-urls={peer_url}");
        self.until_done(&["member", "add", name, &peer_urls, "--learner"], is_member).await;
    }

    /// Runs a command until it succeeds, or until its refusal says that it succeeded before: the answer to an earlier attempt may have
    /// been lost.
    async fn until_done(&self, args: &[&str], is_done: impl Fn(&str) -> bool) {
        let last = std::cell::RefCell::new(String::new());
        let asked = async || {
            let ended = self.run(args).await;
            let done = ended.code == Some(0) || is_done(&ended.stderr);
            last.replace(ended.stderr);
            done.then_some(())
        };
        let done = wait::within_limit(LIMIT, asked).await;
        assert!(done.is_some(), "etcdctl {args:?} failed within {LIMIT:?}: {}", last.borrow());
    }

    /// Starts one command that goes on, such as `watch`, with its output in `log`.
    pub(crate) fn start(&self, args: &[&str], log: &std::path::Path) -> Process {
        let name = format!("etcdctl {}", args.join(" "));
        Process::start(&name, &self.program, self.arguments(args), &[("ETCDCTL_API", "3")], log)
    }

    fn arguments(&self, args: &[&str]) -> Vec<String> {
        let mut all = vec![format!("--endpoints={}", self.endpoints.join(","))];
        if let Some((user, password)) = &self.user {
            all.push(format!("--user={user}:{password}"));
        }
        if let Some((ca, client)) = &self.tls {
            all.push(format!("--cacert={}", ca.display()));
            if let Some(pair) = client {
                all.push(format!("--cert={}", pair.cert.display()));
                all.push(format!("--key={}", pair.key.display()));
            }
        }
        all.extend(self.flags.iter().chain(args).map(ToString::to_string));
        all
    }
}
