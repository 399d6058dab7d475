//! Keyward itself: the built program with a configuration of the test's own.
//!
//! Owns: its process, its addresses and the folder of its files. Must not know what the configuration means, save for the two
//! addresses that it must listen on.

use std::{
    fs::{self, File, Permissions},
    io::PipeReader,
    net::SocketAddr,
    os::{fd::OwnedFd, unix::fs::PermissionsExt},
    path::{Path, PathBuf},
    process::ExitStatus,
    time::Duration,
};

use rustix::process::Signal;
use tempfile::TempDir;

use super::{
    cluster::{Auth, Cluster, Tls, password},
    evidence, http, ports,
    process::Process,
    wait,
};

const PROGRAM: &str = env!("CARGO_BIN_EXE_keyward");
/// Another build to run instead, such as a release, for figures as an operator has them.
const ANOTHER: &str = "KEYWARD_TEST_PROGRAM";
/// A users file that knows nobody who logs in: its line is of a user without a known password. One without users is refused.
pub(crate) const NOBODY_IN_FILE: &str = concat!(
    "nobody:$argon2id$v=19$m=8,t=1,p=1$AAAAAAAAAAAAAAAAAAAAAA$",
    "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA\n"
);
/// The line of a test's configuration that makes every call leave a record, which is not the default.
pub(crate) const ALL_CALLS: &str = "log.access = \"all\"";
const LIMIT: Duration = Duration::from_secs(30);

/// Where one Keyward lives: its folder and its addresses, before it is started.
pub(crate) struct Site {
    folder: TempDir,
    /// Where its clients reach it.
    pub(crate) listen: SocketAddr,
    /// Where health and metrics are.
    pub(crate) admin: SocketAddr,
}

impl Site {
    pub(crate) fn new() -> Site {
        let folder = tempfile::Builder::new().prefix("keyward-").tempdir().expect("a temporary folder");
        Site { folder, listen: ports::free(), admin: ports::free() }
    }

    /// Writes a file, such as a password, into its folder; only its owner may read it.
    pub(crate) fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.folder.path().join(name);
        evidence::file(name, text);
        fs::write(&path, text).expect("the file can be written");
        fs::set_permissions(&path, Permissions::from_mode(0o600)).expect("the file is ours");
        path
    }

    /// A file in its folder.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The configuration for one plain listener in front of `cluster`, probing as root where auth is on. It has dotted keys at the
    /// top only, so that a test appends what it is about: `session.realm = "r"`, then tables such as `[[user]]`.
    pub(crate) fn in_front_of(&self, cluster: &Cluster) -> String {
        self.listening(cluster, "")
    }

    /// The same with further fields of the listener, such as `, default_user = "alice"`.
    pub(crate) fn listening(&self, cluster: &Cluster, fields: &str) -> String {
        let advertised: Vec<String> = (0..cluster.len()).map(|i| cluster.advertised(i)).collect();
        let mut lines = vec![
            format!("listener = [{{ name = \"main\", address = \"{}\"{fields} }}]", self.listen),
            format!("admin.address = \"{}\"", self.admin),
            // Every record may hold a secret, or tell where a call went.
            ALL_CALLS.to_owned(),
            format!("cluster.endpoints = {:?}", advertised),
        ];
        lines
            .extend(cluster.options().token_ttl.map(|seconds| format!("cluster.token_ttl = \"{seconds}s\"")));
        // What else is believed, a test says.
        if !matches!(cluster.options().tls, Tls::Off | Tls::Auto) {
            lines.push(format!("cluster.tls.ca = {:?}", cluster.pki().ca));
        }
        if cluster.options().tls == Tls::Mutual {
            let pair = cluster.pki().nobody();
            lines.push(format!("cluster.tls.cert = {:?}\ncluster.tls.key = {:?}", pair.cert, pair.key));
        }
        if cluster.options().auth != Auth::Off {
            let file = self.write("root-password", &password("root"));
            lines.push(format!("cluster.probe.user = \"root\"\ncluster.probe.password_file = {file:?}"));
        }
        lines.join("\n") + "\n"
    }
}

/// A running Keyward.
pub(crate) struct Keyward {
    process: Process,
    /// The build that it runs, which also runs the commands that talk to it.
    program: PathBuf,
    site: Site,
}

impl Keyward {
    /// Starts it and waits until it is ready.
    pub(crate) async fn start(site: Site, config: &str) -> Keyward {
        let keyward = Keyward::start_unready(site, config).await;
        keyward.ready().await;
        keyward
    }

    /// Starts it and waits until it lives: for when there is no cluster to be ready for.
    pub(crate) async fn start_unready(site: Site, config: &str) -> Keyward {
        Keyward::start_build(&program(), site, config).await
    }

    /// Starts another build of Keyward, and waits until it lives.
    pub(crate) async fn start_build(program: &Path, site: Site, config: &str) -> Keyward {
        let file = site.write("keyward.toml", config);
        let log = site.folder.path().join("keyward.log");
        let args = [Path::new("serve"), Path::new("--config"), &file];
        let process = Process::start("keyward", program, args, &[], &log);
        let keyward = Keyward { process, program: program.to_owned(), site };
        keyward.answers("/livez").await;
        keyward
    }

    /// Starts it without a file, and waits until it is ready.
    pub(crate) async fn start_by_flags(site: Site, flags: &[&str]) -> Keyward {
        let log = site.folder.path().join("keyward.log");
        let args = [&["serve"], flags].concat();
        let process = Process::start("keyward", &program(), args, &[], &log);
        let keyward = Keyward { process, program: program(), site };
        keyward.ready().await;
        keyward
    }

    /// Starts it with a stderr that leads into a pipe, which the caller reads or does not, and waits until it is ready.
    pub(crate) async fn start_with_pipe(site: Site, config: &str) -> (Keyward, PipeReader) {
        let file = site.write("keyward.toml", config);
        let log = site.folder.path().join("keyward.log");
        let out = File::create(&log).expect("the log file can be made");
        let (reader, writer) = std::io::pipe().expect("a pipe");
        let args = [Path::new("serve"), Path::new("--config"), &file];
        let outputs = (out, writer.into());
        let process = Process::start_with_stderr("keyward", &program(), args, &[], &log, outputs);
        let keyward = Keyward { process, program: program(), site };
        keyward.ready().await;
        (keyward, reader)
    }

    /// Starts it with a stdout that leads into a pipe, which the caller does not read, and waits until it is ready.
    pub(crate) async fn start_with_unread_stdout(site: Site, config: &str) -> (Keyward, PipeReader) {
        let file = site.write("keyward.toml", config);
        let log = site.folder.path().join("keyward.log");
        let err = File::options().create(true).append(true).open(&log).expect("the log file can be made");
        let (reader, writer) = std::io::pipe().expect("a pipe");
        let args = [Path::new("serve"), Path::new("--config"), &file];
        let outputs = (File::from(OwnedFd::from(writer)), err.into());
        let process = Process::start_with_stderr("keyward", &program(), args, &[], &log, outputs);
        let keyward = Keyward { process, program: program(), site };
        keyward.ready().await;
        (keyward, reader)
    }

    /// Starts it where `/etc/hosts` is this file, in a mount namespace of its own, and waits until it is ready. `flags` are those
    /// of [`namespace`].
    pub(crate) async fn start_with_hosts(site: Site, config: &str, hosts: &Path, flags: &str) -> Keyward {
        let file = site.write("keyward.toml", config);
        let log = site.folder.path().join("keyward.log");
        // Once more at the end: entering a namespace may take back that it ends with us.
        let script = "mount --bind \"$0\" /etc/hosts && exec setpriv --pdeathsig KILL -- \"$@\"";
        let mut args: Vec<PathBuf> =
            [flags, "--propagation", "private", "--", "sh", "-c", script].map(PathBuf::from).to_vec();
        args.extend([hosts.to_owned(), program(), "serve".into(), "--config".into(), file]);
        let process = Process::start("keyward", Path::new("unshare"), args, &[], &log);
        let keyward = Keyward { process, program: program(), site };
        keyward.ready().await;
        keyward
    }

    /// Starts it and waits for its end, since it is to refuse what it finds; hands on what it logged.
    pub(crate) async fn refused(site: Site, config: &str) -> (ExitStatus, String) {
        let file = site.write("keyward.toml", config);
        let log = site.folder.path().join("keyward.log");
        let args = [Path::new("serve"), Path::new("--config"), &file];
        let process = Process::start("keyward", &program(), args, &[], &log);
        (process.ended(LIMIT).await, process.output())
    }

    /// Waits until `/readyz` says yes.
    pub(crate) async fn ready(&self) {
        self.answers("/readyz").await;
    }

    async fn answers(&self, path: &str) {
        let look = async || {
            assert!(self.process.exit().is_none(), "keyward ended by itself: {}", self.process.tail());
            http::get(self.site.admin, path).await.filter(|(status, _)| *status == 200)
        };
        wait::until(LIMIT, &format!("keyward answers {path}"), look).await;
    }

    /// The id of its process.
    pub(crate) fn id(&self) -> u32 {
        self.process.id()
    }

    /// The build that it runs.
    pub(crate) fn program(&self) -> &Path {
        &self.program
    }

    /// Its folder and addresses.
    pub(crate) fn site(&self) -> &Site {
        &self.site
    }

    /// The endpoint for clients of its plain listener.
    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.site.listen)
    }

    /// Status and body of a path of its admin address.
    pub(crate) async fn admin(&self, path: &str) -> (u16, String) {
        let look = async || http::get(self.site.admin, path).await;
        let answer = wait::until(LIMIT, "the admin address answers", look).await;
        evidence::text(&format!("keyward {path}"), &answer.1);
        answer
    }

    /// The sum of the samples of one of its metrics that have all of these labels.
    pub(crate) async fn metric(&self, metric: &str, labels: &[(&str, &str)]) -> f64 {
        http::sum(&self.admin("/metrics").await.1, metric, labels)
    }

    /// Waits until it sends calls to the member of this id.
    pub(crate) async fn uses(&self, id: u64, within: Duration) {
        let label = format!("{id:x}");
        let ready = async || {
            let ready = self.metric("keyward_member_ready", &[("member", &label)]).await;
            (ready == 1.0).then_some(())
        };
        wait::until(within, "keyward uses the member", ready).await;
    }

    /// Bytes of memory that it has in use, as the system counts them.
    pub(crate) fn resident(&self) -> usize {
        let status = fs::read_to_string(format!("/proc/{}/status", self.process.id())).expect("it runs");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("every process has it");
        line.trim().trim_end_matches(" kB").parse::<usize>().expect("a number") * 1024
    }

    /// Everything that it logged, over all its starts: what must *not* be there. What must be there is waited for by `logged`.
    pub(crate) fn log(&self) -> String {
        self.process.settled_output()
    }

    /// Waits until the log has a line of this kind, and returns the log. The thread that writes the log may have to wait for a processor
    /// for longer than the call or the metric by which a test knows that the line is to come.
    pub(crate) async fn logged(&self, what: &str, is_wanted: impl Fn(&str) -> bool) -> String {
        let find = |log: &str| log.lines().any(&is_wanted).then(|| log.to_owned());
        self.process.wrote(LIMIT, what, find).await
    }

    /// Changes its configuration and asks it to read that (SIGHUP), which it does in its own time.
    pub(crate) fn reload(&self, config: &str) {
        self.site.write("keyward.toml", config);
        self.process.signal(Signal::HUP);
    }

    /// Starts another process with `--take-over` and this configuration in its place, and waits until the one before has ended.
    /// Hands on how the one before ended.
    pub(crate) async fn succeeded(self, config: &str) -> (ExitStatus, Keyward) {
        let Keyward { process, program, site } = self;
        let next = Keyward::taking_over(&program, site, config);
        let ended = process.ended(LIMIT).await;
        next.ready().await;
        (ended, next)
    }

    /// Starts it with `--take-over` where none serves, and waits until it is ready.
    pub(crate) async fn start_taking_over(site: Site, config: &str) -> Keyward {
        let keyward = Keyward::taking_over(&program(), site, config);
        keyward.ready().await;
        keyward
    }

    fn taking_over(program: &Path, site: Site, config: &str) -> Keyward {
        let file = site.write("keyward.toml", config);
        let log = site.folder.path().join("keyward.log");
        let args = [Path::new("serve"), Path::new("--take-over"), Path::new("--config"), &file];
        let process = Process::start("keyward", program, args, &[], &log);
        Keyward { process, program: program.to_owned(), site }
    }

    /// Starts another process with `--take-over` and a configuration of this name in its folder, which is to end by itself while
    /// this one serves. Hands on how it ended, and what it printed.
    pub(crate) async fn not_succeeded(&self, name: &str, config: &str) -> (ExitStatus, String) {
        let file = self.site.write(name, config);
        let log = self.site.folder.path().join(format!("{name}.log"));
        let args = [Path::new("serve"), Path::new("--take-over"), Path::new("--config"), &file];
        let process = Process::start("keyward", &self.program, args, &[], &log);
        (process.ended(LIMIT).await, process.output())
    }

    /// Sends it a signal.
    pub(crate) fn signal(&self, signal: Signal) {
        self.process.signal(signal);
    }

    /// Waits for its end, which others have caused, and hands its place on for another start.
    pub(crate) async fn ended(self) -> (ExitStatus, Site) {
        (self.process.ended(LIMIT).await, self.site)
    }

    /// Asks it to end (SIGTERM), waits for that, and hands its place on for another start.
    pub(crate) async fn terminate(self) -> (ExitStatus, Site) {
        self.process.signal(Signal::TERM);
        let ended = self.process.ended(LIMIT).await;
        (ended, self.site)
    }

    /// Kills it (SIGKILL) while others still use it.
    pub(crate) fn kill_only(&self) {
        self.process.kill();
    }

    /// Kills it (SIGKILL), and hands its place on for another start.
    pub(crate) fn kill(self) -> Site {
        self.process.kill();
        self.site
    }
}

/// The flags of `unshare` by which this machine lets us mount a file for one process only; none where it does not.
pub(crate) fn namespace() -> Option<&'static str> {
    let works = |flags: &&str| {
        let script = "mount --bind /etc/hosts /etc/hosts";
        let args = [flags, "--propagation", "private", "--", "sh", "-c", script];
        let mut unshare = std::process::Command::new("unshare");
        let quiet =
            unshare.args(args).stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null());
        let ended = quiet.status();
        ended.is_ok_and(|status| status.success())
    };
    ["-m", "-rm"].into_iter().find(works)
}

/// The build that runs.
pub(crate) fn program() -> PathBuf {
    std::env::var_os(ANOTHER).map_or_else(|| PathBuf::from(PROGRAM), PathBuf::from)
}
