//! Keyward in a test: control and one shard on one local runtime, in front of scripted members.

use std::future::Future;
use std::net::SocketAddr;
use std::ops::Deref;
use std::path::Path;
use std::rc::Rc;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

use futures_util::FutureExt as _;
use hyper_util::rt::TokioIo;
use keyward::admin::drain::Exit;
use keyward::admin::fleet::FleetDoor;
use keyward::admin::socket::AdminCommandService;
use keyward::admin::status_page::StatusPage;
use keyward::admin::view::{ViewRow, ViewTopic};
use keyward::app::shard_service::{ShardParts, ShardService};
use keyward::app::{self, MemberSource, Running};
use keyward::config::{self, Config, Endpoint, PasswordSources, Passwords, Scheme};
use keyward::credentials::MetricsPages;
use keyward::dial::connect::{Connector, Dial};
use keyward::downstream::acceptor::OpenListener;
use keyward::downstream::listener_tls::ListenerTls;
use keyward::gateway::caller::Identities;
use keyward::identity::{ClusterId, MemberId};
use keyward::io::ByteStream;
use keyward::members::fitness::store_status::StoreStatus;
use keyward::members::membership::{
    self, AuthSetting, ChangeSender, ControlChannels, MembersHandle, Membership, Readiness, Role,
};
use keyward::own_keys::OwnKeysUpstream;
use keyward::pb::etcdserverpb::{AuthenticateRequest, AuthenticateResponse, StatusResponse};
use keyward::policy::rules_in_force::RulesInForce;
use keyward::published::Published;
use keyward::refusal::Code;
use keyward::tasks::Tasks;
use keyward::users::UserPasswordHashes;
use prost::Message as _;
use tokio::runtime::{Builder, LocalOptions};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tracing::Dispatch;
use tracing_subscriber::filter::dynamic_filter_fn;
use tracing_subscriber::layer::SubscriberExt as _;

use crate::client::{Client, Stream as ClientStream};
use crate::member::{Address, Call, Member};
use crate::words::{KEEP_ALIVE, RANGE, WATCH, create_of, created, range, ranged, renew, renewed, watch};

/// A test that hangs is a test that fails: in a test's own time, which is paused unless it says otherwise.
const LIMIT: Duration = Duration::from_secs(3600);
/// In real time, for what meets real sockets.
pub(crate) const REAL_LIMIT: Duration = Duration::from_secs(60);

/// Runs a test under a paused clock.
pub(crate) fn paused(test: impl Future<Output = ()>) {
    run(true, LIMIT, test);
}

/// Runs a test in real time, beside real sockets.
pub(crate) fn real(test: impl Future<Output = ()>) {
    run(false, REAL_LIMIT, test);
}

fn run(paused: bool, limit: Duration, test: impl Future<Output = ()>) {
    ask_all_log_listeners();
    let mut builder = Builder::new_current_thread();
    builder.enable_all().start_paused(paused);
    let runtime = builder.build_local(LocalOptions::default()).expect("a runtime");
    runtime.block_on(async { tokio::time::timeout(limit, test).await.expect("the test ends") });
}

/// `tracing` asks at the first use of a log line which subscribers want the line, and keeps the answer. While the process has
/// one subscriber at most, `tracing` asks the subscriber of the asking thread alone: another test without a listener would
/// silence the line for every thread. Two further subscribers, before any test logs, end both: then `tracing` asks all
/// subscribers, and these two want no line and want to be asked each time.
fn ask_all_log_listeners() {
    static ASKED_EACH_TIME: OnceLock<[Dispatch; 2]> = OnceLock::new();
    ASKED_EACH_TIME.get_or_init(|| {
        [(); 2].map(|()| Dispatch::new(tracing_subscriber::registry().with(dynamic_filter_fn(|_, _| false))))
    });
}

fn listener_tls(tls: &config::ServerTls) -> ListenerTls {
    ListenerTls::new(tls).unwrap_or_else(|error| panic!("{error}"))
}

/// Keyward and what a test needs of it; the inputs of its shard by themselves.
pub(crate) struct Keyward {
    running: Running,
    pub(crate) serving: Option<ShardService>,
    pub(crate) tasks: Tasks,
    changes: ChangeSender,
    pub(crate) hints: mpsc::Receiver<membership::MembershipHint>,
}

impl Deref for Keyward {
    type Target = ShardParts;

    fn deref(&self) -> &ShardParts {
        &self.running.parts
    }
}

impl Keyward {
    /// In front of `members`, the first of which leads; auth is off.
    pub(crate) fn before(members: &[&Member]) -> Self {
        Self::configured(members, AuthSetting::Off, "")
    }

    /// The same with auth on.
    pub(crate) fn with_auth(members: &[&Member]) -> Self {
        Self::configured(members, AuthSetting::On, "")
    }

    /// With lines of configuration.
    pub(crate) fn configured(members: &[&Member], auth: AuthSetting, lines: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        Self::at(members, auth, folder.path(), "", lines)
    }

    /// The same, with lines of the listener's before them, and with files in `folder`.
    pub(crate) fn at(
        members: &[&Member],
        auth: AuthSetting,
        folder: &Path,
        listener: &str,
        lines: &str,
    ) -> Self {
        let tasks = Tasks::default();
        let config = Arc::new(configuration(folder, listener, lines));
        let addresses: Arc<[Address]> = members.iter().map(|member| member.address.clone()).collect();
        let known = members.iter().map(|member| Arc::new(published(member))).collect();
        let cluster = Some(ClusterId(0xc1));
        let leader = members.first().map(|member| member.address.id);
        let begun = Membership::unknown(Instant::now());
        let membership = Membership { cluster, leader, term: 2, members: known, ..begun };
        let (handle, changes, hints) = MembersHandle::publishing(membership);
        handle.auth.set(auth);
        let source = MemberSource::Published(handle, channels_to(&addresses));
        let connector = Connector::over(dial(addresses), None, Duration::from_secs(2));
        let running = app::build(&config, connector, source, &tasks);
        let running = running.unwrap_or_else(|error| panic!("{error}"));
        running.ready.send_replace(true);
        let serving = Some(ShardService::new(running.parts.clone()));
        Self { running, serving, tasks, changes, hints }
    }

    /// A byte stream to Keyward.
    pub(crate) fn connect(&self) -> tokio::io::DuplexStream {
        self.connect_to(0, None)
    }

    /// The same to the listener of this place, from an address.
    pub(crate) fn connect_to(&self, listener: usize, from: Option<SocketAddr>) -> tokio::io::DuplexStream {
        let (ours, theirs) = tokio::io::duplex(256 * 1024);
        self.serving.as_ref().expect("still serving").take(listener, Box::new(theirs), from, ());
        ours
    }

    /// A client of its own connection.
    pub(crate) async fn client(&self) -> Client {
        Client::over(self.connect(), &self.tasks).await
    }

    /// A client that has logged in.
    pub(crate) async fn logged_in(&self, user: &str) -> Client {
        let client = self.client().await;
        let token = log_in(&client, user).await;
        client.header("token", &token)
    }

    /// Publishes another order of sources, or another users file, where they differ from those of the start.
    pub(crate) fn publish_passwords(
        &self,
        sources: Option<PasswordSources>,
        users: Option<UserPasswordHashes>,
    ) {
        let mut passwords = Passwords::clone(&self.config.load().passwords);
        passwords.sources = sources.unwrap_or(passwords.sources);
        passwords.users = users.map_or(passwords.users, Arc::new);
        self.logins.replace(Arc::new(passwords));
    }

    /// Publishes the rules and the users of another configuration, with the files in `folder`.
    pub(crate) fn publish_rules(&self, folder: &Path, listener: &str, lines: &str) {
        let config = configuration(folder, listener, lines);
        self.logins.replace(Arc::clone(&config.passwords));
        let acted = self.credentials.act_for(&config.users, &config.cluster, self.pages());
        acted.expect("users that can be proved");
        self.config.publish(config.clone());
        self.identities.publish(Identities::of(
            &config,
            &RulesInForce::Configured,
            &self.credentials,
            SystemTime::now(),
        ));
    }

    /// Publishes the certificates, authorities and lists of another configuration, with the files in `folder`.
    pub(crate) fn publish_tls(&self, folder: &Path, listener: &str, lines: &str) {
        let config = configuration(folder, listener, lines);
        for (current, listener) in self.tls.iter().zip(&config.listeners) {
            if let (Some(current), Some(tls)) = (current, &listener.tls) {
                current.publish(listener_tls(tls));
            }
        }
    }

    /// How what runs beside the shards reaches the members.
    pub(crate) fn upstream(&self) -> OwnKeysUpstream {
        self.running.upstream.clone()
    }

    /// The pages of the members.
    pub(crate) fn pages(&self) -> MetricsPages {
        self.running.pages.clone()
    }

    /// What answers commands, and at the admin address.
    pub(crate) fn admin(&self) -> Arc<AdminCommandService> {
        Arc::clone(&self.running.admin)
    }

    /// The rows of a view, as an operator's command shows them.
    pub(crate) async fn shown(&self, topic: ViewTopic) -> Vec<ViewRow> {
        self.running.admin.viewer.view(topic).await.expect("every shard answers").rows
    }

    /// Serves the admin address, with the status page.
    pub(crate) fn serve_admin(
        &self,
        listener: tokio::net::TcpListener,
    ) -> impl Future<Output = ()> + 'static {
        let AdminCommandService { state, viewer, doctor, .. } = &*self.running.admin;
        let page = StatusPage::new(Arc::clone(viewer), Arc::clone(doctor), self.tasks.clone());
        let fleet = FleetDoor::new(Arc::clone(&self.running.admin.fleet), self.tasks.clone());
        keyward::admin::serve(listener, Arc::clone(state), (page, fleet), self.tasks.clone())
    }

    /// How far the end of the process is.
    pub(crate) fn exit(&self) -> &Exit {
        &self.running.exit
    }

    /// Publishes what gRPC's health service says: yes, unless a test publishes another readiness.
    pub(crate) fn readiness(&self) -> watch::Sender<bool> {
        self.running.ready.clone()
    }

    /// Its first listener, for a socket.
    pub(crate) fn opened(&self) -> Arc<Published<OpenListener>> {
        let config = Arc::clone(&self.config.load().listeners[0]);
        Arc::new(Published::new(OpenListener { config, tls: self.tls[0].clone(), drain: self.drain.clone() }))
    }

    /// Begins the drain; it may take `limit`.
    pub(crate) fn drain(&self, limit: Duration) {
        self.running.drain.send_replace(Some(Instant::now() + limit));
    }

    /// Waits for the shard's end.
    pub(crate) async fn ended(&mut self) {
        self.serving.take().expect("not ended before").join_connections().await;
    }

    /// Publishes another view of the members.
    pub(crate) fn publish(&self, change: impl FnOnce(&mut Membership)) {
        let mut membership = Membership::clone(&self.members.snapshot.load());
        change(&mut membership);
        self.members.publish(membership);
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

/// The token that a login over this connection brings.
pub(crate) async fn log_in(client: &Client, user: &str) -> String {
    log_in_with(client, user, "right").await
}

/// The same with a password that may be wrong.
pub(crate) async fn log_in_with(client: &Client, user: &str, password: &str) -> String {
    let login = AuthenticateRequest { name: user.into(), password: password.into() };
    let answer = client.call("/etcdserverpb.Auth/Authenticate", &login.encode_to_vec()).await;
    AuthenticateResponse::decode(answer.message().clone()).expect("an answer").token
}

fn configuration(folder: &Path, listener: &str, lines: &str) -> Config {
    let path = folder.join("keyward.toml");
    // Only where users have certificates it matters what is said of the endpoints: members are reached by script.
    let endpoints =
        if lines.starts_with("endpoints") { "" } else { "endpoints = [\"http://127.0.0.1:1\"]\n" };
    let text = format!(
        "[[listener]]\nname = \"clients\"\naddress = \"127.0.0.1:2379\"\n{listener}[cluster]\n{endpoints}{lines}"
    );
    std::fs::write(&path, text).expect("written");
    let mut config = config::load(&path).unwrap_or_else(|faults| panic!("{faults:?}")).0;
    if !lines.contains("share_from") {
        // Many tests open equal watches and look at each one's own stream: `shared_watches` has the others.
        config.watch.share_from = None;
    }
    config
}

fn published(member: &Member) -> membership::Member {
    let id = member.address.id;
    membership::Member {
        id,
        name: format!("m{id}").into(),
        endpoint: Endpoint { scheme: Scheme::Http, host: host(id), port: 2379 },
        resolved_ip: None,
        role: Role::Voter,
        version: Some(member.version),
        readiness: Readiness::Ready,
        term: 2,
        store_status: Some(StoreStatus::read(&StatusResponse::default(), Duration::ZERO).into()),
        client_urls: Arc::default(),
        suspicion: Arc::default(),
        maintenance: Arc::default(),
        load: Arc::default(),
    }
}

fn host(id: MemberId) -> String {
    format!("{}.member.test", id.0)
}

fn dial(addresses: Arc<[Address]>) -> Dial {
    Arc::new(move |endpoint| {
        let address = addresses.iter().find(|address| host(address.id) == endpoint.host);
        let dialled = address.map_or_else(|| Err(std::io::ErrorKind::NotFound.into()), Address::dial);
        std::future::ready(dialled.map(|pipe| Box::new(pipe) as ByteStream)).boxed()
    })
}

fn channel(address: Address) -> tonic::transport::Channel {
    let dial = tower::service_fn(move |_| std::future::ready(address.dial().map(TokioIo::new)));
    tonic::transport::Endpoint::from_static("http://member.test").connect_with_connector_lazy(dial)
}

/// Waits until nothing is left to run: a paused clock moves only then. For tests under a paused clock.
pub(crate) const NOBODY_IN_FILE: &str = concat!(
    "nobody:$argon2id$v=19$m=8,t=1,p=1$AAAAAAAAAAAAAAAAAAAAAA$",
    "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA\n"
);

pub(crate) async fn settled() {
    tokio::time::sleep(Duration::from_millis(1)).await;
}

/// A member and a Keyward before it.
pub(crate) fn one_member() -> (Rc<Member>, Keyward) {
    let member = Rc::new(Member::new(1, &Tasks::default()));
    let keyward = Keyward::before(&[&member]);
    (member, keyward)
}

/// Three members and a Keyward before them.
pub(crate) fn three() -> (Vec<Member>, Keyward) {
    three_with("")
}

/// The same with lines of configuration.
pub(crate) fn three_with(lines: &str) -> (Vec<Member>, Keyward) {
    let tasks = Tasks::default();
    let members: Vec<_> = (1..=3).map(|id| Member::new(id, &tasks)).collect();
    let keyward = Keyward::configured(&members.iter().collect::<Vec<_>>(), AuthSetting::Off, lines);
    (members, keyward)
}

/// A watch that stands.
pub(crate) async fn watching(client: &Client, member: &Member) -> (ClientStream, Call) {
    let mut stream = client.open(WATCH).await.expect("open");
    stream.say(&watch("k", 5)).await;
    let mut call = member.called(WATCH).await;
    let create = create_of(&call.messages.next().await.expect("a create")).expect("a create");
    call.say(&created(create.watch_id, 9)).await.expect("taken");
    stream.next().await.expect("created");
    (stream, call)
}

/// A lease's keepalive that stands.
pub(crate) async fn renewing(client: &Client, member: &Member) -> (ClientStream, Call) {
    let mut stream = client.open(KEEP_ALIVE).await.expect("open");
    stream.say(&renew(7)).await;
    let mut call = member.called(KEEP_ALIVE).await;
    call.say(&renewed(7, 5)).await.expect("taken");
    stream.next().await.expect("renewed");
    (stream, call)
}

fn channels_to(addresses: &[Address]) -> ControlChannels {
    let channels = ControlChannels::default();
    channels
        .store(Arc::new(addresses.iter().map(|address| (address.id, channel(address.clone()))).collect()));
    channels
}

/// The token with which a call of this client reaches the member.
pub(crate) async fn token_of(member: &Member, client: &Client) -> Option<String> {
    let script = async {
        let call = member.called(RANGE).await;
        assert!(!call.headers.contains_key("authorization"), "what a client shows is never passed on");
        let token = call.token().map(str::to_owned);
        call.reply(&ranged(1)).await;
        token
    };
    let (outcome, token) = tokio::join!(client.call(RANGE, range("k")), script);
    assert_eq!(outcome.end.code(), Some(Code::Ok), "{:?}", outcome.end);
    token
}
