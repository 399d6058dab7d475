//! Keyward in a test: control and one shard on one local runtime, in front of scripted members.

use std::future::Future;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use futures_util::FutureExt as _;
use hyper_util::rt::TokioIo;
use keyward::app::serving::{Parts, Serving};
use keyward::config::{self, Endpoint, Scheme};
use keyward::downstream::session::{Realm, Sealer};
use keyward::identity::{ClusterId, MemberId};
use keyward::io::Stream;
use keyward::pb::etcdserverpb::{AuthenticateRequest, AuthenticateResponse};
use keyward::rpc::method::METHODS;
use keyward::tasks::Tasks;
use keyward::telemetry::metrics::Metrics;
use keyward::upstream::connect::{Connector, Dial};
use keyward::upstream::credential::{CredentialSettings, Credentials};
use keyward::upstream::fleet::Fleet;
use keyward::upstream::membership::{
    self, Auth, AuthState, Changes, ChangesSender, ControlChannels, Hints, MembersHandle, Membership,
    Readiness, Role,
};
use prost::Message as _;
use tokio::runtime::{Builder, LocalOptions};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use crate::client::Client;
use crate::member::{Address, Member};

/// A test that hangs is a test that fails: in a test's own time, which is paused unless it says otherwise.
const LIMIT: Duration = Duration::from_secs(3600);
/// In real time, for what meets real sockets.
const REAL_LIMIT: Duration = Duration::from_secs(60);

/// Runs a test under a paused clock.
pub(crate) fn paused(test: impl Future<Output = ()>) {
    run(true, LIMIT, test);
}

/// Runs a test in real time, beside real sockets.
pub(crate) fn real(test: impl Future<Output = ()>) {
    run(false, REAL_LIMIT, test);
}

fn run(paused: bool, limit: Duration, test: impl Future<Output = ()>) {
    let mut builder = Builder::new_current_thread();
    builder.enable_all().start_paused(paused);
    let runtime = builder.build_local(LocalOptions::default()).expect("a runtime");
    runtime.block_on(async { tokio::time::timeout(limit, test).await.expect("the test ends") });
}

/// Keyward and what a test needs of it.
pub(crate) struct Keyward {
    pub(crate) serving: Option<Serving>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) members: MembersHandle,
    pub(crate) tasks: Tasks,
    drain: watch::Sender<Option<Instant>>,
    changes: ChangesSender,
    pub(crate) hints: mpsc::Receiver<membership::Hint>,
}

impl Keyward {
    /// In front of `members`, the first of which leads; auth is off.
    pub(crate) fn before(members: &[&Member]) -> Self {
        Self::configured(members, Auth::Off, "")
    }

    /// The same with auth on.
    pub(crate) fn with_auth(members: &[&Member]) -> Self {
        Self::configured(members, Auth::On, "")
    }

    /// With lines of configuration.
    pub(crate) fn configured(members: &[&Member], auth: Auth, lines: &str) -> Self {
        let tasks = Tasks::default();
        let config = Arc::new(configuration(lines));
        let addresses: Arc<[Address]> = members.iter().map(|member| member.address.clone()).collect();
        let known = members.iter().map(|member| Arc::new(published(member))).collect();
        let cluster = ClusterId(0xc1);
        let membership = Membership {
            cluster: Some(cluster),
            leader: members.first().map(|member| member.address.id),
            term: 2,
            members: known,
            ..Membership::unknown(Instant::now())
        };
        let (hints, hinted) = Hints::channel();
        let (changes, changed) = Changes::channel();
        let handle = MembersHandle {
            snapshot: Arc::new(ArcSwap::from_pointee(membership)),
            changes: changed,
            hints,
            auth: Arc::new(AuthState::default()),
        };
        handle.auth.set(auth);
        let channels = ControlChannels::default();
        channels.store(Arc::new(
            addresses.iter().map(|address| (address.id, channel(address.clone()))).collect(),
        ));
        let settings =
            CredentialSettings { token_ttl: Duration::from_secs(300), ..CredentialSettings::default() };
        let (credentials, control) = Credentials::new(settings, channels).expect("random bytes");
        tasks.spawn("credentials", control.run(tasks.clone())).detach();
        let sealer = Sealer::new(keyward::reload::session_keys(&config).expect("keys"));
        sealer.pin(&Realm::new(None, cluster));
        let metrics = Arc::new(Metrics::new(
            METHODS.iter().map(|method| method.path).chain(std::iter::once("unknown")).collect(),
        ));
        let (drain, draining) = watch::channel(None);
        let fleet = Arc::new(Fleet::new(config.limits.certificate_connections, Arc::clone(&metrics)));
        let serving = Serving::new(Parts {
            config,
            tls: vec![None],
            connector: Connector::over(dial(addresses), None, Duration::from_secs(2)),
            members: handle.clone(),
            credentials,
            sealer: Arc::new(sealer),
            metrics: Arc::clone(&metrics),
            drain: draining,
            claims: Arc::default(),
            fleet,
        });
        Self { serving: Some(serving), metrics, members: handle, tasks, drain, changes, hints: hinted }
    }

    /// A byte stream to Keyward.
    pub(crate) fn connect(&self) -> tokio::io::DuplexStream {
        let (ours, theirs) = tokio::io::duplex(256 * 1024);
        self.serving.as_ref().expect("still serving").take(0, Box::new(theirs), None, ());
        ours
    }

    /// A client of its own connection.
    pub(crate) async fn client(&self) -> Client {
        Client::over(self.connect(), &self.tasks).await
    }

    /// A client that has logged in.
    pub(crate) async fn logged_in(&self, user: &str) -> Client {
        let client = self.client().await;
        let login = AuthenticateRequest { name: user.into(), password: "right".into() };
        let answer = client.call("/etcdserverpb.Auth/Authenticate", &login.encode_to_vec()).await;
        let answer = AuthenticateResponse::decode(answer.message().clone()).expect("an answer");
        client.header("token", &answer.token)
    }

    /// Begins the drain; it may take `limit`.
    pub(crate) fn drain(&self, limit: Duration) {
        self.drain.send_replace(Some(Instant::now() + limit));
    }

    /// Waits for the shard's end.
    pub(crate) async fn ended(&mut self) {
        self.serving.take().expect("not ended before").ended().await;
    }

    /// Publishes another view of the members.
    pub(crate) fn publish(&self, change: impl FnOnce(&mut Membership)) {
        let mut membership = Membership::clone(&self.members.snapshot.load());
        change(&mut membership);
        self.members.snapshot.store(Arc::new(membership));
        self.changes.tell();
    }

    /// Lifts the suspicions that lost connections raised, as a probe does that succeeds.
    pub(crate) fn probed(&self) {
        for member in &self.members.snapshot.load().members {
            member.suspicion.clear(member.suspicion.mark());
        }
        self.changes.tell();
    }
}

fn configuration(lines: &str) -> config::Config {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("keyward.toml");
    let fixed = "[[listener]]\nname = \"clients\"\naddress = \"127.0.0.1:2379\"\n\
                 [cluster]\nendpoints = [\"http://127.0.0.1:1\"]\n";
    std::fs::write(&path, format!("{fixed}{lines}")).expect("written");
    config::load(&path).unwrap_or_else(|faults| panic!("{faults:?}")).0
}

fn published(member: &Member) -> membership::Member {
    let id = member.address.id;
    membership::Member {
        id,
        name: format!("m{id}").into(),
        endpoint: Endpoint { scheme: Scheme::Http, host: host(id), port: 2379 },
        role: Role::Voter,
        version: Some(member.version),
        readiness: Readiness::Ready,
        term: 2,
        applied: 1,
        client_urls: Arc::default(),
        suspicion: Arc::default(),
    }
}

fn host(id: MemberId) -> String {
    format!("{}.member.test", id.0)
}

fn dial(addresses: Arc<[Address]>) -> Dial {
    Arc::new(move |endpoint| {
        let address = addresses.iter().find(|address| host(address.id) == endpoint.host);
        let dialled = address.map_or_else(|| Err(std::io::ErrorKind::NotFound.into()), Address::dial);
        std::future::ready(dialled.map(|pipe| Box::new(pipe) as Stream)).boxed()
    })
}

fn channel(address: Address) -> tonic::transport::Channel {
    let dial = tower::service_fn(move |_| std::future::ready(address.dial().map(TokioIo::new)));
    tonic::transport::Endpoint::from_static("http://member.test").connect_with_connector_lazy(dial)
}

/// Waits until nothing is left to run: a paused clock moves only then. For tests under a paused clock.
pub(crate) async fn settled() {
    tokio::time::sleep(Duration::from_millis(1)).await;
}

/// A member and a Keyward before it.
pub(crate) fn one_member() -> (Rc<Member>, Keyward) {
    let member = Rc::new(Member::new(1, &Tasks::default()));
    let keyward = Keyward::before(&[&member]);
    (member, keyward)
}
