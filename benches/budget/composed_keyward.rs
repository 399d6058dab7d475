//! Keyward as composed by its binary, on the current runtime, with one shard and one member. Auth is on, the log is as
//! by default, and goes nowhere.

use std::collections::HashMap;
use std::io::{self, Write};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::FutureExt as _;
use hyper_util::rt::TokioIo;
use keyward::app::shard_service::ShardService;
use keyward::app::{self, MemberSource, Running};
use keyward::config::{self, Config, Endpoint, Scheme};
use keyward::dial::connect::Connector;
use keyward::identity::{ClusterId, MemberId};
use keyward::io::ByteStream;
use keyward::members::choose::MemberChooser;
use keyward::members::membership::{
    AuthSetting, ControlChannels, Member, MembersHandle, Membership, Readiness, Role,
};
use keyward::members::version::Version;
use keyward::tasks::Tasks;
use keyward::telemetry::{LogSettings, subscriber};
use tokio::io::DuplexStream;
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::http2_pipe::PIPE;
use crate::workload::{CLUSTER, MEMBER};

/// The log's records are dropped at this size, as after a write to stderr.
const LOG_QUEUE: usize = 16 * 1024;
/// Further lines of the configuration, at its beginning, for `run --with`.
const FURTHER: &str = "KEYWARD_TEST_BUDGET_CONFIGURATION";
const CONFIGURATION: &str = "[[listener]]\nname = \"clients\"\naddress = \"127.0.0.1:2379\"\n\n\
    [cluster]\nendpoints = [\"http://127.0.0.1:2380\"]\n\
    [watch]\nshare_from = 0\n";
/// The member's only client, as named in the log.
const CLIENT: ([u8; 4], u16) = ([10, 0, 0, 7], 40_000);

/// A running Keyward.
pub(crate) struct ComposedKeyward {
    _running: Running,
    shard: ShardService,
    _tasks: Tasks,
}

/// Where Keyward dials the member.
#[derive(Clone)]
pub(crate) struct MemberDoors {
    /// For the calls of clients.
    pub(crate) calls: mpsc::Sender<DuplexStream>,
    /// For logins.
    pub(crate) logins: mpsc::Sender<DuplexStream>,
}

impl ComposedKeyward {
    pub(crate) fn start(doors: MemberDoors, tasks: Tasks) -> Self {
        let config = Arc::new(configuration());
        log_to_memory(&config.log);
        let member = Arc::new(member());
        let begun = Membership::unknown(Instant::now());
        let (cluster, leader) = (Some(ClusterId(CLUSTER)), Some(member.id));
        let membership = Membership { cluster, leader, term: 2, members: vec![member], ..begun };
        // The receivers are the control runtime's: nothing changes here.
        let (handle, _changes, _hints) = MembersHandle::publishing(membership);
        handle.auth.set(AuthSetting::On);
        let source = MemberSource::Published(handle, login_channels(doors.logins));
        let calls = doors.calls;
        let dial = Arc::new(move |_: &Endpoint| {
            let dialled = dial(&calls).map(|stream| Box::new(stream) as ByteStream);
            std::future::ready(dialled).boxed()
        });
        let connector = Connector::over(dial, None, Duration::from_secs(2));
        let running = app::build(&config, connector, source, &tasks).expect("a valid configuration");
        running.ready.send_replace(true);
        let shard = ShardService::with_chooser(running.parts.clone(), MemberChooser::seeded(1));
        Self { _running: running, shard, _tasks: tasks }
    }

    /// A connection of the client.
    pub(crate) fn connect(&self) -> DuplexStream {
        let (ours, theirs) = tokio::io::duplex(PIPE);
        self.shard.take(0, Box::new(theirs), Some(SocketAddr::from(CLIENT)), ());
        ours
    }
}

/// Opens a connection through a door of the member.
pub(crate) fn dial(door: &mpsc::Sender<DuplexStream>) -> io::Result<DuplexStream> {
    let (ours, theirs) = tokio::io::duplex(PIPE);
    door.try_send(theirs).map_err(io::Error::other)?;
    Ok(ours)
}

fn login_channels(door: mpsc::Sender<DuplexStream>) -> ControlChannels {
    let dial = tower::service_fn(move |_| std::future::ready(dial(&door).map(TokioIo::new)));
    let channel =
        tonic::transport::Endpoint::from_static("http://member.test").connect_with_connector_lazy(dial);
    let channels = ControlChannels::default();
    channels.store(Arc::new(HashMap::from([(MemberId(MEMBER), channel)])));
    channels
}

fn member() -> Member {
    Member {
        id: MemberId(MEMBER),
        name: "m1".into(),
        endpoint: Endpoint { scheme: Scheme::Http, host: "m1.member.test".to_owned(), port: 2379 },
        resolved_ip: None,
        role: Role::Voter,
        version: Version::parse("3.6.16").ok(),
        readiness: Readiness::Ready,
        term: 2,
        store_status: None,
        client_urls: Arc::default(),
        suspicion: Arc::default(),
        maintenance: Arc::default(),
        load: Arc::default(),
    }
}

fn configuration() -> Config {
    let path = std::env::temp_dir().join(format!("keyward-budget-{}.toml", std::process::id()));
    let further = std::env::var(FURTHER).unwrap_or_default();
    std::fs::write(&path, format!("{further}\n{CONFIGURATION}"))
        .expect("the folder for temporary files is writable");
    let loaded = config::load(&path);
    std::fs::remove_file(&path).expect("the file was just written");
    loaded.expect("a valid configuration").0
}

/// Formats records as the binary does, and keeps them in memory until the binary would write them. The binary's writer
/// is a thread with a clock: its instructions depend on the machine.
fn log_to_memory(settings: &LogSettings) {
    let queue = Arc::new(Mutex::new(Vec::with_capacity(2 * LOG_QUEUE)));
    let log = subscriber(settings, move || MemoryLog(Arc::clone(&queue)));
    tracing::subscriber::set_global_default(log).expect("the first subscriber");
}

struct MemoryLog(Arc<Mutex<Vec<u8>>>);

impl Write for MemoryLog {
    fn write(&mut self, record: &[u8]) -> io::Result<usize> {
        let mut queue = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        queue.extend_from_slice(record);
        if queue.len() >= LOG_QUEUE {
            queue.clear();
        }
        Ok(record.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
