//! Keyward as it is shipped, put together for one run: control and one shard on one runtime.
//!
//! Owns: the members' task's part of the composition, which the world plays. Must not know what a run does.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures_util::FutureExt;
use hyper_util::rt::TokioIo;
use keyward::app::shard_service::ShardService;
use keyward::app::{self, MemberSource, Running};
use keyward::config::{self, Endpoint, Scheme};
use keyward::dial::connect::{Connector, Dial};
use keyward::identity::{ClusterId, MemberId};
use keyward::io::ByteStream;
use keyward::members::choose::MemberChooser;
use keyward::members::membership::{
    self, AuthSetting, ChangeSender, ControlChannels, MembersHandle, Membership, MembershipHint, Readiness,
    Role,
};
use keyward::members::outage_state::Outage;
use keyward::members::version::Version;
use keyward::tasks::Tasks;
use tokio::io::DuplexStream;
use tokio::sync::mpsc;
use tokio::time::Instant;

/// Bytes in flight on a pipe: small, so that back-pressure is soon felt.
const PIPE: usize = 32 * 1024;

/// How long members must have no leader, and no member may be there, before streams end: as configured by default. Without a leader, a member
/// that ends its own stream ends the others after one election timeout; else they end after two and a half.
const LEADERLESS: Duration = Duration::from_millis(1000);
const UNREACHABLE: Duration = Duration::from_secs(10);

/// Keyward in a run.
pub(crate) struct Keyward {
    serving: ShardService,
    pub(crate) members: MembersHandle,
    pub(crate) tasks: Tasks,
    running: Running,
    changes: ChangeSender,
    hints: mpsc::Receiver<MembershipHint>,
    /// Whether members have said for long enough that there is no leader, and whether none was there for long enough.
    lacked: Cell<(bool, bool)>,
}

/// Where a member is dialled, from any thread. None: nobody listens.
#[derive(Clone)]
pub(crate) struct Address {
    pub(crate) id: MemberId,
    pub(crate) dialled: mpsc::Sender<DuplexStream>,
    pub(crate) listens: Arc<std::sync::atomic::AtomicBool>,
}

impl Address {
    fn dial(&self) -> std::io::Result<DuplexStream> {
        if !self.listens.load(std::sync::atomic::Ordering::Relaxed) {
            return Err(std::io::ErrorKind::ConnectionRefused.into());
        }
        let (ours, theirs) = tokio::io::duplex(PIPE);
        self.dialled.try_send(theirs).map_err(std::io::Error::other)?;
        Ok(ours)
    }
}

impl Keyward {
    pub(crate) fn before(
        members: &[(Address, Version)],
        cluster: u64,
        auth: AuthSetting,
        seed: u64,
        shares: bool,
        tasks: &Tasks,
    ) -> Self {
        let addresses: Arc<[Address]> = members.iter().map(|(address, _)| address.clone()).collect();
        let membership = Membership {
            cluster: Some(ClusterId(cluster)),
            leader: members.first().map(|(address, _)| address.id),
            term: 2,
            members: members
                .iter()
                .map(|(address, version)| Arc::new(published(address.id, *version)))
                .collect(),
            ..Membership::unknown(Instant::now())
        };
        let (handle, changes, hints) = MembersHandle::publishing(membership);
        handle.auth.set(auth);
        let channels = ControlChannels::default();
        let all: HashMap<_, _> =
            addresses.iter().map(|address| (address.id, channel(address.clone()))).collect();
        channels.store(Arc::new(all));
        let connector = Connector::over(dial(Arc::clone(&addresses)), None, Duration::from_secs(2));
        let source = MemberSource::Published(handle.clone(), channels);
        let running = app::build(&configuration(shares), connector, source, tasks);
        let running = running.unwrap_or_else(|error| panic!("{error}"));
        running.ready.send_replace(true);
        let serving = ShardService::with_chooser(running.parts.clone(), MemberChooser::seeded(seed));
        Self {
            serving,
            members: handle,
            tasks: tasks.clone(),
            running,
            changes,
            hints,
            lacked: Cell::default(),
        }
    }

    /// The watches that joined an upstream watch of several clients.
    pub(crate) fn joins(&self) -> u64 {
        self.running.parts.metrics.watch_feeds.joins.get()
    }

    /// A byte stream to Keyward.
    pub(crate) fn connect(&self) -> DuplexStream {
        let (ours, theirs) = tokio::io::duplex(PIPE);
        self.serving.take(0, Box::new(theirs), None, ());
        ours
    }

    /// Publishes another view of the members.
    pub(crate) fn publish(&self, change: impl FnOnce(&mut Membership)) {
        self.note_outage();
        let mut membership = Membership::clone(&self.members.snapshot.load());
        change(&mut membership);
        self.members.publish(membership);
        self.changes.tell();
    }

    fn note_outage(&self) {
        let (leader, members) = self.lacked.get();
        self.lacked.set(match self.members.snapshot.load().outage {
            Outage::NoLeader { since } => (leader || since.elapsed() >= LEADERLESS, members),
            Outage::Unreachable { since } => (leader, members || since.elapsed() >= UNREACHABLE),
            Outage::None => (leader, members),
        });
    }

    /// Whether a stream may have been ended by now because there was no leader, where its client asked for one.
    pub(crate) fn has_lacked_leader(&self) -> bool {
        self.note_outage();
        self.lacked.get().0
    }

    /// Whether a stream may have been ended by now because no member was there.
    pub(crate) fn has_lacked_members(&self) -> bool {
        self.note_outage();
        self.lacked.get().1
    }

    /// Whether something was seen that a probe should look into.
    pub(crate) fn hinted(&mut self) -> bool {
        let mut any = false;
        while self.hints.try_recv().is_ok() {
            any = true;
        }
        any
    }
}

/// A member with another readiness.
pub(crate) fn with_readiness(
    member: &Arc<membership::Member>,
    readiness: Readiness,
) -> Arc<membership::Member> {
    let mut member = membership::Member::clone(member);
    member.readiness = readiness;
    Arc::new(member)
}

/// Read once: a run needs no file of its own. Tokens die when the world says so: their TTL is longer than any run.
fn configuration(shares: bool) -> Arc<config::Config> {
    static READ: OnceLock<[Arc<config::Config>; 2]> = OnceLock::new();
    let read = |share_from: u32| {
        let folder = tempfile::tempdir().expect("a folder");
        let password = folder.path().join("password");
        std::fs::write(&password, "right").expect("written");
        let text = format!(
            "[[listener]]\nname = \"clients\"\naddress = \"127.0.0.1:2379\"\ndefault_user = \"sim\"\n\
             [cluster]\nendpoints = [\"http://127.0.0.1:1\"]\ntoken_ttl = \"24h\"\n\
             [[user]]\nname = \"sim\"\npassword_file = {password:?}\n\
             [watch]\nshare_from = {share_from}\n[log]\naccess = 'off'\n"
        );
        let path = folder.path().join("keyward.toml");
        std::fs::write(&path, text).expect("written");
        Arc::new(config::load(&path).unwrap_or_else(|faults| panic!("{faults:?}")).0)
    };
    Arc::clone(&READ.get_or_init(|| [read(0), read(2)])[usize::from(shares)])
}

fn published(id: MemberId, version: Version) -> membership::Member {
    membership::Member {
        id,
        name: format!("m{id}").into(),
        endpoint: Endpoint { scheme: Scheme::Http, host: host(id), port: 2379 },
        resolved_ip: None,
        role: Role::Voter,
        version: Some(version),
        readiness: Readiness::Ready,
        term: 2,
        store_status: None,
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
