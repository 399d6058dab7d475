//! A real etcd cluster on loopback: started, broken, mended, and gone with the test.
//!
//! Owns: the members' processes and their folder. Must not know Keyward. Invariants: a member keeps its addresses and its data over
//! restarts; members are named by their index, in the order in which they were added.

use std::{net::SocketAddr, path::Path, sync::Arc, time::Duration};

use futures_util::future::join_all;
use keyward::{config::MemberTrust, dial::member_tls::MemberTls};
use rustix::process::Signal;
use tempfile::TempDir;

use crate::raw::Endpoint;

use super::{
    binary::{Version, full},
    ctl::Ctl,
    evidence, http,
    pki::Pki,
    ports,
    process::Process,
    setup, wait,
};

/// For an election, a start, a restart: generous, since it is a limit and never a pause.
const LIMIT: Duration = Duration::from_secs(60);
/// How often a start is tried when a port that was free is not free any more.
const STARTS: u32 = 5;

/// A member's environment, but with --full: as on a machine of one core, and with garbage collected less often. A sixth of its processor time
/// goes where many members share two cores.
const SMALL_MACHINE: [(&str, &str); 2] = [("GOMAXPROCS", "1"), ("GOGC", "400")];

/// What a cluster is like. `..Options::default()` is one member, plain, without auth.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    /// Voters at the start.
    pub(crate) members: usize,
    pub(crate) auth: Auth,
    pub(crate) tls: Tls,
    pub(crate) peer_tls: PeerTls,
    /// `--auth-token-ttl` in seconds; etcd's own default is 300.
    pub(crate) token_ttl: Option<u32>,
    /// `--bcrypt-cost`; 4 is the least and quick, 10 is etcd's own default.
    pub(crate) bcrypt_cost: u32,
    /// Whether writes wait for the disk. etcd 3.4 always does.
    pub(crate) fsync: bool,
    /// `--heartbeat-interval` and `--election-timeout` in milliseconds; etcd's own defaults are 100 and 1000.
    pub(crate) timing: Option<(u32, u32)>,
    /// Where clients are told to reach each member, if not at the member itself: relays.
    pub(crate) advertise: Vec<SocketAddr>,
    /// Where other members reach each member, if not at the member itself: relays, and where each leads.
    pub(crate) peer_relays: Vec<(SocketAddr, SocketAddr)>,
    /// Whether clients show it tokens that are not its own, which some versions write into their log.
    pub(crate) strangers: bool,
    /// An authority that other clusters have too; none: its own.
    pub(crate) authority: Option<Arc<Pki>>,
    /// Further flags of etcd, as they are.
    pub(crate) flags: Vec<String>,
}

/// Whether the cluster wants to know who calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Auth {
    Off,
    /// With root; alice, who may read and write `/a/`; bob, who may do nothing; and `u00`, `u01`, ... who may read and write `/u/`.
    On {
        extra_users: usize,
    },
}

/// How members reach each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PeerTls {
    Off,
    /// With certificates of the authority that clients' certificates are of.
    Shared,
    /// With certificates of an authority of their own.
    Own,
}

/// How clients reach it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tls {
    Off,
    /// `--auto-tls`: TLS by a certificate that each member made itself.
    Auto,
    /// TLS without client certificates.
    Server,
    /// `--client-cert-auth`: a certificate is required, and its common name is a user.
    Mutual,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            members: 1,
            auth: Auth::Off,
            tls: Tls::Off,
            peer_tls: PeerTls::Off,
            token_ttl: None,
            bcrypt_cost: 4,
            fsync: false,
            timing: None,
            advertise: Vec::new(),
            peer_relays: Vec::new(),
            strangers: false,
            authority: None,
            flags: Vec::new(),
        }
    }
}

/// The password that the harness gives a user.
pub(crate) fn password(user: &str) -> String {
    let password = format!("{user}-secret");
    evidence::secret(&format!("the password of {user}"), &password);
    password
}

/// A running cluster.
pub(crate) struct Cluster {
    version: Version,
    options: Options,
    pki: Arc<Pki>,
    peer_pki: Arc<Pki>,
    members: Vec<Member>,
    /// Last, so that the processes end before their folder goes.
    folder: TempDir,
}

struct Member {
    name: String,
    client: SocketAddr,
    peer: SocketAddr,
    peer_relay: Option<SocketAddr>,
    metrics: SocketAddr,
    /// The etcd that it was started with last.
    version: Version,
    /// Taken out of the cluster: it has no part in the list any more.
    removed: bool,
    state: State,
}

enum State {
    Running(Process),
    Stopped(Process),
    Dead,
}

impl Cluster {
    /// Starts a cluster and waits until every member serves and, where asked for, auth is on in every member.
    pub(crate) async fn start(version: &Version, options: Options) -> Cluster {
        for _ in 0..STARTS {
            let mut cluster = Cluster::prepare(version.clone(), options.clone());
            (0..options.members).for_each(|i| cluster.launch(i, "new"));
            let started = join_all((0..options.members).map(|i| cluster.serves(i))).await;
            if started.iter().all(Result::is_ok) {
                if let Auth::On { extra_users } = options.auth {
                    Box::pin(setup::auth(&cluster, extra_users)).await;
                }
                return cluster;
            }
            let fault = started.into_iter().find_map(Result::err).expect("one is not ok");
            assert_eq!(fault, Fault::AddressInUse, "etcd {version} does not start: {}", cluster.tails());
        }
        panic!("etcd {version} found its addresses in use {STARTS} times");
    }

    fn prepare(version: Version, options: Options) -> Cluster {
        let folder = tempfile::Builder::new().prefix("keyward-etcd-").tempdir().expect("a temporary folder");
        let authority = |name| Arc::new(Pki::new(&folder.path().join(name)));
        let pki = options.authority.clone().unwrap_or_else(|| authority("pki"));
        let peer_pki = authority("peers");
        let mut members: Vec<_> = (0..options.members).map(|i| Member::new(i, &version)).collect();
        for (member, (relay, behind)) in members.iter_mut().zip(&options.peer_relays) {
            (member.peer, member.peer_relay) = (*behind, Some(*relay));
        }
        Cluster { version, options, pki, peer_pki, members, folder }
    }

    fn launch(&mut self, i: usize, cluster_state: &str) {
        let member = &self.members[i];
        let peers: Vec<String> = self.present().map(|m| format!("{}={}", m.name, self.peer_url(m))).collect();
        let data = self.folder.path().join(&member.name);
        let mut args = vec![
            format!("--name={}", member.name),
            format!("--data-dir={}", data.display()),
            format!("--listen-peer-urls={}", self.peer_url_at(member.peer)),
            format!("--initial-advertise-peer-urls={}", self.peer_url(member)),
            format!("--listen-client-urls={}", self.url(i)),
            format!("--advertise-client-urls={}", self.advertised(i)),
            format!("--listen-metrics-urls=http://{}", member.metrics),
            format!("--initial-cluster={}", peers.join(",")),
            format!("--initial-cluster-state={cluster_state}"),
            format!("--initial-cluster-token={}", self.folder.path().display()),
            format!("--bcrypt-cost={}", self.options.bcrypt_cost),
            "--logger=zap".into(),
        ];
        args.extend(self.options.token_ttl.map(|seconds| format!("--auth-token-ttl={seconds}")));
        if let Some((heartbeat, election)) = self.options.timing {
            args.extend([
                format!("--heartbeat-interval={heartbeat}"),
                format!("--election-timeout={election}"),
            ]);
        }
        if !self.options.fsync && member.version.at_least("3.5") {
            args.push("--unsafe-no-fsync".into());
        }
        if self.options.tls == Tls::Auto {
            args.push("--auto-tls".into());
        } else if self.options.tls != Tls::Off {
            let pair = self.pki.server();
            args.extend([
                format!("--cert-file={}", pair.cert.display()),
                format!("--key-file={}", pair.key.display()),
            ]);
        }
        if self.options.tls == Tls::Mutual {
            args.extend([
                format!("--trusted-ca-file={}", self.pki.ca.display()),
                "--client-cert-auth".into(),
            ]);
        }
        if self.options.peer_tls != PeerTls::Off {
            let pair = self.peer_pki().server();
            args.extend([
                format!("--peer-cert-file={}", pair.cert.display()),
                format!("--peer-key-file={}", pair.key.display()),
                format!("--peer-trusted-ca-file={}", self.peer_pki().ca.display()),
                "--peer-client-cert-auth".into(),
            ]);
        }
        args.extend(self.options.flags.iter().cloned());
        let strangers = if self.options.strangers { " strangers" } else { "" };
        let name = format!("etcd {} {}{strangers}", member.version, member.name);
        let env = if full() { &[][..] } else { &SMALL_MACHINE };
        let process = Process::start(&name, &member.version.etcd(), args, env, &data.with_extension("log"));
        self.members[i].state = State::Running(process);
    }

    /// Waits until the member answers `/health` well, which it does when it can read from a quorum.
    async fn serves(&self, i: usize) -> Result<(), Fault> {
        let member = &self.members[i];
        let look = async || {
            if let Some(fault) = member.fault() {
                return Some(Err(fault));
            }
            http::get(member.metrics, "/health").await.filter(|(status, _)| *status == 200).map(|_| Ok(()))
        };
        wait::within_limit(LIMIT, look).await.unwrap_or(Err(Fault::NotHealthy))
    }

    /// Members that were not taken out.
    fn present(&self) -> impl Iterator<Item = &Member> {
        self.members.iter().filter(|member| !member.removed)
    }

    /// Which etcd its members were at the start.
    pub(crate) fn version(&self) -> &Version {
        &self.version
    }

    /// What its members were started with.
    pub(crate) fn options(&self) -> &Options {
        &self.options
    }

    /// The authority of its certificates; there is one without TLS too.
    pub(crate) fn pki(&self) -> &Pki {
        &self.pki
    }

    /// The authority under which members reach each other; there is one without TLS too.
    pub(crate) fn peer_pki(&self) -> &Pki {
        if self.options.peer_tls == PeerTls::Own { &self.peer_pki } else { &self.pki }
    }

    /// Where other members reach it.
    fn peer_url(&self, member: &Member) -> String {
        self.peer_url_at(member.peer_relay.unwrap_or(member.peer))
    }

    fn peer_url_at(&self, address: SocketAddr) -> String {
        let scheme = if self.options.peer_tls == PeerTls::Off { "http" } else { "https" };
        format!("{scheme}://{address}")
    }

    /// The folder of this cluster, gone when it goes: room for a test's own files.
    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The process of a member that runs.
    pub(crate) fn process_id(&self, i: usize) -> u32 {
        self.members[i].process().id()
    }

    /// How many members it has, learners and dead ones too.
    pub(crate) fn len(&self) -> usize {
        self.members.len()
    }

    /// Where clients reach this member.
    pub(crate) fn address(&self, i: usize) -> SocketAddr {
        self.members[i].client
    }

    /// Where other members reach this member.
    pub(crate) fn peer_address(&self, i: usize) -> SocketAddr {
        self.members[i].peer
    }

    /// Where clients reach this member, as a URL.
    pub(crate) fn url(&self, i: usize) -> String {
        let scheme = if self.options.tls == Tls::Off { "http" } else { "https" };
        format!("{scheme}://{}", self.members[i].client)
    }

    /// How to call this member, naming no user.
    pub(crate) fn endpoint(&self, i: usize) -> Endpoint {
        let (address, pki) = (self.address(i), self.pki());
        match self.options.tls {
            Tls::Off => Endpoint::plain(address),
            Tls::Auto => {
                let any = MemberTls::new(&MemberTrust::Unverified).and_then(|tls| tls.anonymous());
                Endpoint::with_tls(address, any.expect("TLS without a file"))
            }
            Tls::Server => Endpoint::tls(address, pki, None),
            Tls::Mutual => Endpoint::tls(address, pki, Some(&pki.nobody())),
        }
    }

    /// Where clients are told to reach this member.
    pub(crate) fn advertised(&self, i: usize) -> String {
        self.options.advertise.get(i).map_or_else(|| self.url(i), |relay| format!("http://{relay}"))
    }

    /// The client URLs of all members that were not taken out.
    pub(crate) fn urls(&self) -> Vec<String> {
        (0..self.members.len()).filter(|i| !self.members[*i].removed).map(|i| self.url(i)).collect()
    }

    /// etcdctl of this version for all members, naming no user.
    pub(crate) fn ctl(&self) -> Ctl {
        let ctl = Ctl::new(&self.version, self.urls());
        match self.options.tls {
            Tls::Off => ctl,
            Tls::Auto => ctl.with_unverified_tls(),
            Tls::Server => ctl.with_tls(&self.pki, None),
            Tls::Mutual => ctl.with_tls(&self.pki, Some(self.pki.nobody())),
        }
    }

    /// etcdctl as the harness itself needs it: root where auth is on.
    pub(crate) fn ctl_as_root(&self) -> Ctl {
        if self.options.auth == Auth::Off { self.ctl() } else { self.ctl().as_user("root") }
    }

    /// Kills a member (SIGKILL). Its data and addresses stay for `restart`.
    pub(crate) fn kill(&mut self, i: usize) {
        self.members[i].process().kill();
        self.members[i].state = State::Dead;
    }

    /// Stops a member (SIGSTOP): the kernel keeps its connections open, it answers nothing.
    pub(crate) fn stop(&mut self, i: usize) {
        self.members[i].process().signal(Signal::STOP);
        self.members[i].change(State::Stopped);
    }

    /// Lets a stopped member go on (SIGCONT).
    pub(crate) fn resume(&mut self, i: usize) {
        self.members[i].process().signal(Signal::CONT);
        self.members[i].change(State::Running);
    }

    /// Restarts a member with other flags of TLS: asked to end (SIGTERM), and back when this returns. Clients reach it by the same
    /// scheme before and after. The harness itself speaks as to members that all have these flags.
    pub(crate) async fn roll(&mut self, i: usize, tls: Tls) {
        assert!(self.options.tls != Tls::Off && tls != Tls::Off, "the URLs of members would change");
        self.options.tls = tls;
        self.end(i).await;
        self.restart(i).await;
    }

    /// Restarts a member as an operator does, as another etcd where that is given, and returns when it serves.
    pub(crate) async fn bounce(&mut self, i: usize, version: Option<&Version>) {
        self.end(i).await;
        if let Some(version) = version {
            self.members[i].version = version.clone();
        }
        self.restart(i).await;
    }

    /// Asks a member to end (SIGTERM) and waits until it has. Its data and addresses stay for `restart`.
    async fn end(&mut self, i: usize) {
        self.members[i].process().signal(Signal::TERM);
        self.members[i].process().ended(LIMIT).await;
        self.members[i].state = State::Dead;
    }

    /// Takes note that a member was taken out of the cluster, and waits until it has ended, which it does by itself.
    pub(crate) async fn removed(&mut self, i: usize) {
        self.removed_with_output(i).await;
    }

    /// The same; how it ended, and what it wrote.
    pub(crate) async fn removed_with_output(&mut self, i: usize) -> (std::process::ExitStatus, String) {
        self.members[i].removed = true;
        let status = self.members[i].process().ended(LIMIT).await;
        let output = self.members[i].process().settled_output();
        self.members[i].state = State::Dead;
        (status, output)
    }

    /// Starts a killed member again, and returns when it serves.
    pub(crate) async fn restart(&mut self, i: usize) {
        self.relaunch(i);
        self.serving(i).await;
    }

    /// Starts a killed member again, without waiting: for when there is no quorum yet.
    pub(crate) fn relaunch(&mut self, i: usize) {
        assert!(matches!(self.members[i].state, State::Dead), "member {i} was not killed");
        self.launch(i, "existing");
    }

    /// Waits until a running member serves.
    pub(crate) async fn serving(&self, i: usize) {
        let served = self.serves(i).await;
        assert_eq!(served, Ok(()), "member {i} does not serve: {}", self.tails());
    }

    /// Adds a learner, starts it and waits until it has caught up; returns its index. For the first five seconds of its life a
    /// cluster refuses that.
    pub(crate) async fn add_learner(&mut self) -> usize {
        let ctl = self.ctl_as_root();
        self.add_learner_by(&ctl).await
    }

    /// The same, asked for by this etcdctl.
    pub(crate) async fn add_learner_by(&mut self, ctl: &Ctl) -> usize {
        let i = self.members.len();
        let member = Member::new(i, &self.version);
        let peer_urls = format!("--peer-urls={}", self.peer_url(&member));
        let name = member.name.clone();
        let added = async || {
            let ended = ctl.run(&["member", "add", &name, &peer_urls, "--learner"]).await;
            let refused = ended.stderr.contains("unhealthy cluster");
            assert!(ended.code == Some(0) || refused, "member add failed: {}", ended.stderr);
            (!refused).then_some(())
        };
        wait::until(LIMIT, "a learner is added", added).await;
        self.members.push(member);
        self.launch(i, "existing");
        let committed = self.counter(self.leader().await, "etcd_server_proposals_committed_total", &[]).await;
        let caught_up = async || {
            let text = self.metrics(i).await?;
            (http::sum(&text, "etcd_server_proposals_applied_total", &[]) >= committed).then_some(())
        };
        wait::until(LIMIT, "the learner catches up", caught_up).await;
        i
    }

    /// Forgets the newest member, which was removed from the cluster: its process and its data.
    pub(crate) fn forget_newest(&mut self) {
        let Some(member) = self.members.pop() else { return };
        let data = self.folder.path().join(&member.name);
        if let Some(process) = member.running() {
            process.kill();
        }
        std::fs::remove_dir_all(data).expect("its data can be removed");
    }

    /// True if a member's process has ended by itself.
    pub(crate) fn has_ended(&self, i: usize) -> bool {
        self.members[i].process().exit().is_some()
    }

    /// Everything that a member has logged, over all its starts.
    pub(crate) fn log(&self, i: usize) -> String {
        self.members[i].process().output()
    }

    /// Waits until exactly one running member leads and every running member knows a leader, and returns the one.
    pub(crate) async fn leader(&self) -> usize {
        let look = async || {
            let running =
                (0..self.members.len()).filter(|i| matches!(self.members[*i].state, State::Running(_)));
            let mut leaders = Vec::new();
            for i in running {
                let text = self.metrics(i).await?;
                if http::sum(&text, "etcd_server_has_leader", &[]) == 0.0 {
                    return None;
                }
                if http::sum(&text, "etcd_server_is_leader", &[]) == 1.0 {
                    leaders.push(i);
                }
            }
            <[usize; 1]>::try_from(leaders).ok().map(|[leader]| leader)
        };
        wait::until(LIMIT, "one member leads", look).await
    }

    /// The id by which etcd knows this member.
    pub(crate) async fn member_id(&self, i: usize) -> u64 {
        let text = self.shown(i).await;
        let labels = text.lines().find_map(|line| line.strip_prefix("etcd_server_id{server_id=\""));
        let id = labels.and_then(|rest| rest.split('"').next()).expect("the member shows its id");
        u64::from_str_radix(id, 16).expect("an id is a hexadecimal number")
    }

    /// The sum of the samples of a member's metric that have all of these labels; it starts at zero with each restart. Such as
    /// `counter(0, "grpc_server_started_total", &[("grpc_method", "Authenticate")])`.
    pub(crate) async fn counter(&self, i: usize, metric: &str, labels: &[(&str, &str)]) -> f64 {
        http::sum(&self.shown(i).await, metric, labels)
    }

    /// The metrics of a member that runs. One that makes nothing but bcrypts may take a while.
    async fn shown(&self, i: usize) -> String {
        wait::until(LIMIT, "a member that runs shows its metrics", async || self.metrics(i).await).await
    }

    async fn metrics(&self, i: usize) -> Option<String> {
        let (status, text) = http::get(self.members[i].metrics, "/metrics").await?;
        (status == 200).then_some(text)
    }

    fn tails(&self) -> String {
        self.members.iter().filter_map(|member| Some(member.running()?.tail())).collect()
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Fault {
    AddressInUse,
    Ended,
    NotHealthy,
}

impl Member {
    fn new(i: usize, version: &Version) -> Member {
        let (client, peer, metrics) = (ports::free(), ports::free(), ports::free());
        let name = format!("m{i}");
        let (version, state) = (version.clone(), State::Dead);
        Member { name, client, peer, peer_relay: None, metrics, version, removed: false, state }
    }

    fn running(&self) -> Option<&Process> {
        match &self.state {
            State::Running(process) | State::Stopped(process) => Some(process),
            State::Dead => None,
        }
    }

    fn process(&self) -> &Process {
        self.running().expect("the member was not killed")
    }

    fn change(&mut self, to: fn(Process) -> State) {
        self.state = match std::mem::replace(&mut self.state, State::Dead) {
            State::Running(process) | State::Stopped(process) => to(process),
            State::Dead => State::Dead,
        };
    }

    /// Why it ended by itself, if it did.
    fn fault(&self) -> Option<Fault> {
        let process = self.running()?;
        process.exit()?;
        let in_use = process.output().contains("address already in use");
        Some(if in_use { Fault::AddressInUse } else { Fault::Ended })
    }
}
