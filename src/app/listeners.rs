//! The open listeners, and their changes by a reload.
//!
//! Owns: the open sockets, the listener of each socket, and the drain of single listeners. Must not know:
//! accepting or serving a connection. Invariants: a socket is identified by its address, and is kept while
//! any listener of the configuration has the same address; no socket is opened, closed or changed unless all
//! new sockets could be bound; connections of a removed listener, or of a listener changing the identity of
//! its clients, are drained.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, timeout};

use super::{ServeError, activated_sockets};
use crate::reload::{PreparedPart, ReloadPart, RunningListenerTls};
use keyward_base::io::listening_sockets::ListeningSockets;
use keyward_base::published::Published;
use keyward_base::tasks::Tasks;
use keyward_config::{Address, Config, Listener};
use keyward_downstream::acceptor::{
    Acceptor, AcceptorEnd, BoundListener, OpenListener, ShardIntake, socket_name,
};
use keyward_downstream::connection_table::ConnectionTable;
use keyward_downstream::listener_tls::{CurrentListenerTls, ListenerTls};
use keyward_telemetry::metrics::Metrics;

/// The open listeners. Dropping the value stops accepting.
pub(super) struct Listeners {
    open: RefCell<Vec<OpenSocket>>,
    /// The TLS listeners, for [`ReloadPart::tls`].
    running: Rc<RefCell<Vec<RunningListenerTls>>>,
    /// Empty after [`close`](Self::close): a shard ends when no sender for its connections is left.
    intakes: RefCell<Vec<ShardIntake>>,
    table: Arc<ConnectionTable>,
    config: Arc<Published<Config>>,
    metrics: Arc<Metrics>,
    sockets: Arc<ListeningSockets>,
    tasks: Tasks,
}

/// Time for the clients in the queues of closing sockets to reach a shard: a stuck shard takes nobody.
const QUEUED: Duration = Duration::from_secs(1);

/// Drains the connections of a listener, with a time limit.
type ListenerDrainSender = watch::Sender<Option<Instant>>;

/// A socket and its current listener.
struct OpenSocket {
    address: Address,
    now: Arc<Published<OpenListener>>,
    leave: ListenerDrainSender,
    /// Ends the acceptor, once.
    end: Option<oneshot::Sender<AcceptorEnd>>,
}

/// The socket changes of a reload.
#[derive(Default)]
struct ListenerChanges {
    /// New sockets with listeners.
    opened: Vec<(BoundListener, OpenListener, ListenerDrainSender)>,
    /// Kept sockets by index, each with the new listener, and a new drain sender if the present connections
    /// must leave.
    changed: Vec<(usize, OpenListener, Option<ListenerDrainSender>)>,
    /// Addresses to close.
    closed: Vec<Address>,
    descriptions: Vec<String>,
}

impl Listeners {
    /// Opens the listeners of the start, with `tls` in the configuration's order.
    ///
    /// # Errors
    /// An address cannot be bound.
    pub(super) fn open(
        config: &Arc<Published<Config>>,
        tls: &[Option<CurrentListenerTls>],
        intakes: Vec<ShardIntake>,
        table: Arc<ConnectionTable>,
        metrics: Arc<Metrics>,
        sockets: Arc<ListeningSockets>,
    ) -> Result<Rc<Self>, ServeError> {
        let this = Self {
            open: RefCell::default(),
            running: Rc::default(),
            intakes: RefCell::new(intakes),
            table,
            config: Arc::clone(config),
            metrics,
            sockets,
            tasks: Tasks::default(),
        };
        for (listener, tls) in config.load().listeners.iter().zip(tls) {
            let bound = BoundListener::open(&listener.address, &this.sockets)
                .map_err(|source| ServeError::Bind { address: listener.address.to_string(), source })?;
            let (leave, drain) = watch::channel(None);
            this.begin(bound, OpenListener { config: Arc::clone(listener), tls: tls.clone(), drain }, leave);
        }
        this.follow_tls();
        Ok(Rc::new(this))
    }

    /// The listeners with followed certificates.
    pub(super) fn running(&self) -> Rc<RefCell<Vec<RunningListenerTls>>> {
        Rc::clone(&self.running)
    }

    /// Stops accepting. With `are_handed_over` another process accepts at the sockets, and their files
    /// stay, except for the sockets of which that process has no listener. Clients in a queue that find no
    /// descriptor are taken later, once others have left.
    pub(super) async fn close(&self, are_handed_over: bool) {
        self.intakes.borrow_mut().clear();
        for open in self.open.borrow_mut().iter_mut() {
            let closes = !are_handed_over || self.sockets.is_left(&socket_name(&open.address));
            if closes {
                remove_file(&open.address);
            }
            self.end(open, if closes { AcceptorEnd::Closes } else { AcceptorEnd::HandedOver });
        }
        if timeout(QUEUED, self.tasks.joined()).await.is_err() {
            tracing::warn!("clients wait for a listener that closes");
        }
    }

    /// Ends the acceptor of a socket.
    fn end(&self, open: &mut OpenSocket, end: AcceptorEnd) {
        // The acceptor's is the last descriptor then.
        self.sockets.closed(&socket_name(&open.address));
        if let Some(acceptor) = open.end.take() {
            // It has ended by itself where every shard is gone.
            let _unless_gone = acceptor.send(end);
        }
    }

    /// Drains the connections of all listeners.
    pub(super) fn leave(&self, until: Instant) {
        self.open.borrow().iter().for_each(|open| _ = open.leave.send_replace(Some(until)));
    }

    /// The reload part opening, closing and changing listeners.
    pub(super) fn part(self: &Rc<Self>) -> ReloadPart {
        let this = Rc::clone(self);
        ReloadPart::new(move |_, now| {
            if this.intakes.borrow().is_empty() {
                return Ok(None);
            }
            let changes = this.plan_changes(now)?;
            let (this, wait) = (Rc::clone(&this), now.drain.timeout);
            let told = changes.descriptions.clone();
            Ok((!told.is_empty()).then(|| PreparedPart::new(told, move || this.apply_changes(changes, wait))))
        })
    }

    fn begin(&self, bound: BoundListener, opened: OpenListener, leave: ListenerDrainSender) {
        let listener = &opened.config;
        tracing::info!(listener = &*listener.name, address = %listener.address, "listening");
        let address = listener.address.clone();
        if let Err(error) = self.sockets.opened(socket_name(&address), &bound) {
            tracing::warn!(%error, %address, "the listening socket of this address cannot be handed over");
        }
        let now = Arc::new(Published::new(opened));
        let acceptor = Acceptor {
            listener: Arc::clone(&now),
            intakes: self.intakes.borrow().clone(),
            table: Arc::clone(&self.table),
            config: Arc::clone(&self.config),
            metrics: Arc::clone(&self.metrics),
        };
        let (end, ended) = oneshot::channel();
        self.tasks.spawn("acceptor", acceptor.run(bound, ended)).detach();
        self.open.borrow_mut().push(OpenSocket { address, now, leave, end: Some(end) });
    }

    /// Computes the changes for a new configuration. Binds new sockets, and changes no open socket.
    fn plan_changes(&self, config: &Config) -> Result<ListenerChanges, String> {
        let mut changes = ListenerChanges::default();
        let open = self.open.borrow();
        for listener in &config.listeners {
            let name = &listener.name;
            let found = open.iter().enumerate().find(|(_, open)| open.address == listener.address);
            let Some((place, open)) = found else {
                let bound = BoundListener::open(&listener.address, &self.sockets).map_err(|error| {
                    format!("listener {name}: cannot listen on {}: {error}", listener.address)
                })?;
                let (leave, drain) = watch::channel(None);
                let opened = OpenListener { config: Arc::clone(listener), tls: tls_of(listener)?, drain };
                changes.descriptions.push(format!("listener {name}: opened at {}", listener.address));
                changes.opened.push((bound, opened, leave));
                continue;
            };
            let was = open.now.load_full();
            if settings(&was.config) == settings(listener) {
                continue;
            }
            if same_clients(&was.config, listener) {
                changes.descriptions.push(format!("listener {name}: changed, in force for new connections"));
                let opened = OpenListener { config: Arc::clone(listener), ..OpenListener::clone(&was) };
                changes.changed.push((place, opened, None));
            } else {
                changes.descriptions.push(format!(
                    "listener {name}: identifies its clients differently now, so the connected clients are \
                     asked to reconnect"
                ));
                let (leave, drain) = watch::channel(None);
                let opened = OpenListener { config: Arc::clone(listener), tls: tls_of(listener)?, drain };
                changes.changed.push((place, opened, Some(leave)));
            }
        }
        for open in open.iter() {
            if config.listeners.iter().all(|listener| listener.address != open.address) {
                let name = Arc::clone(&open.now.load().config.name);
                changes.descriptions.push(format!("listener {name}: closed at {}", open.address));
                changes.closed.push(open.address.clone());
            }
        }
        Ok(changes)
    }

    fn apply_changes(&self, changes: ListenerChanges, wait: Duration) {
        let until = Some(Instant::now() + wait);
        {
            let mut all = self.open.borrow_mut();
            for (place, opened, leave) in changes.changed {
                let Some(open) = all.get_mut(place) else { continue };
                open.now.publish(opened);
                if let Some(leave) = leave {
                    std::mem::replace(&mut open.leave, leave).send_replace(until);
                }
            }
            all.retain_mut(|open| {
                let stays = !changes.closed.contains(&open.address);
                if !stays {
                    // A client that leaves and connects again meanwhile leaves again.
                    remove_file(&open.address);
                    self.end(open, AcceptorEnd::Closes);
                    open.leave.send_replace(until);
                }
                stays
            });
        }
        for (bound, opened, leave) in changes.opened {
            self.begin(bound, opened, leave);
        }
        self.follow_tls();
    }

    /// Follows the certificates of the open listeners. A kept listener keeps the followed state: after a
    /// reload the current certificate may differ from the certificate of the opening.
    fn follow_tls(&self) {
        let open = self.open.borrow();
        let before = self.running.take();
        let with_tls = |open: &OpenSocket| {
            let opened = open.now.load();
            let current = opened.tls.clone()?;
            let known = before.iter().find(|running| running.is_of(&current)).cloned();
            known.or_else(|| RunningListenerTls::new(&opened.config, current))
        };
        *self.running.borrow_mut() = open.iter().filter_map(with_tls).collect();
    }
}

/// True if both listeners give a client the same peer, so connections of the old listener may stay with the
/// new listener.
fn same_clients(one: &Listener, other: &Listener) -> bool {
    let ca = |listener: &Listener| listener.client_ca().map(|ca| Arc::clone(&ca.name));
    one.name == other.name && one.tls.is_some() == other.tls.is_some() && ca(one) == ca(other)
}

/// The settings compared by a reload. Certificates and `identify` are followed elsewhere; the address
/// identifies the socket.
fn settings(listener: &Listener) -> impl PartialEq {
    // Without `..`: a new setting is either compared or left to another part.
    let Listener {
        name,
        address: _,
        tls,
        identify: _,
        lend_login_identity,
        accept_odd_authority,
        connection_age_spares,
        on_expiry,
        proxy_protocol_from,
        http,
        member,
        server_names,
    } = listener;
    let ca = listener.client_ca().map(|ca| &ca.name);
    let clients = (name, tls.is_some(), ca, lend_login_identity, accept_odd_authority, on_expiry);
    (clients, connection_age_spares, proxy_protocol_from, http, member, server_names)
}

fn tls_of(listener: &Listener) -> Result<Option<CurrentListenerTls>, String> {
    let made = listener.tls.as_ref().map(ListenerTls::new).transpose();
    let made = made.map_err(|error| format!("listener {}: {error}", listener.name))?;
    Ok(made.map(|made| Arc::new(Published::new(made))))
}

/// Removes the file of a closed unix socket, unless the service manager keeps the socket.
fn remove_file(address: &Address) {
    if let Address::Unix(path) = address
        && !activated_sockets::are_used()
        && let Err(error) = std::fs::remove_file(path)
    {
        tracing::debug!(%error, path = %path.display(), "a socket's file is left behind");
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use rcgen::{CertificateParams, KeyPair};
    use tokio::runtime::{Builder, LocalOptions};

    use super::*;
    use crate::reload::Reload;
    use keyward_config::reload_request::ReloadTrigger;

    /// Writes a configuration with the certificate `shows` for the first listener, and further listeners.
    fn configure(folder: &Path, shows: &str, further: &str) {
        let text = format!(
            "[[listener]]\nname = 'a'\naddress = 'unix:a.sock'\n\
             tls = {{ cert = '{shows}.crt', key = '{shows}.key' }}\n{further}[cluster]\n\
             endpoints = ['http://127.0.0.1:2']\n"
        )
        .replace("unix:", &format!("unix:{}/", folder.display()));
        std::fs::write(folder.join("keyward.toml"), text).unwrap();
    }

    fn write(folder: &Path, name: &str) {
        let key = KeyPair::generate().unwrap();
        let made = CertificateParams::new([name.to_owned()]).unwrap().self_signed(&key).unwrap();
        std::fs::write(folder.join(name).with_extension("crt"), made.pem()).unwrap();
        std::fs::write(folder.join(name).with_extension("key"), key.serialize_pem()).unwrap();
    }

    const B: &str = "[[listener]]\nname = 'b'\naddress = 'unix:b.sock'\n";
    const OTHER_B: &str = "[[listener]]\nname = 'c'\naddress = 'unix:b.sock'\n";

    /// After a reload a certificate is compared with the listener's current certificate, not with the
    /// certificate of its opening, while further listeners come, change and go.
    #[test]
    fn a_certificate_is_taken_back_whatever_becomes_of_other_listeners() {
        let runtime =
            Builder::new_current_thread().enable_all().build_local(LocalOptions::default()).unwrap();
        runtime.block_on(async {
            let folder = tempfile::tempdir().unwrap();
            ["one", "two"].into_iter().for_each(|name| write(folder.path(), name));
            configure(folder.path(), "one", "");
            let path = folder.path().join("keyward.toml");
            let config = keyward_config::load(&path).unwrap().0;
            let current: CurrentListenerTls = tls_of(&config.listeners[0]).unwrap().unwrap();
            let in_force = Arc::new(Published::new(config.clone()));
            let metrics = Arc::new(Metrics::new(Vec::new()));
            let (intake, _taken) = ShardIntake::new();
            let tls = [Some(Arc::clone(&current))];
            let table = ConnectionTable::new(Arc::clone(&in_force), metrics.connection_figures.clone());
            let sockets = Arc::default();
            let listeners =
                Listeners::open(&in_force, &tls, vec![intake], table, Arc::clone(&metrics), sockets)
                    .unwrap_or_else(|error| panic!("{error}"));
            let parts = vec![ReloadPart::tls(listeners.running()), listeners.part()];
            let state = Arc::default();
            let mut reload = Reload::new(
                keyward_config::ConfigSources::of_file(Some(path)),
                &config,
                Vec::new(),
                parts,
                state,
                metrics,
            );
            let mut changed = Vec::new();
            for (shows, further, open) in [
                ("two", "", 1),
                // The certificate is compared with the current certificate, not with the certificate of the
                // opening.
                ("two", B, 2),
                ("one", B, 2),
                ("two", OTHER_B, 2),
                ("one", OTHER_B, 2),
                ("two", "", 1),
                // A new certificate and a new listener in the same reload.
                ("one", B, 2),
                ("one", "", 1),
            ] {
                configure(folder.path(), shows, further);
                let before = current.load_full();
                assert!(reload.read_again(ReloadTrigger::Signal).await.is_applied());
                assert_eq!(listeners.open.borrow().len(), open, "{shows} {further}");
                changed.push(!Arc::ptr_eq(&before, &current.load_full()));
            }
            assert_eq!(changed, [true, false, true, true, true, true, true, false]);
            listeners.close(false).await;
        });
    }

    /// A client in the kernel's queue is connected: with the socket it would be reset.
    #[test]
    fn clients_that_wait_for_a_closing_listener_reach_a_shard() {
        let runtime =
            Builder::new_current_thread().enable_all().build_local(LocalOptions::default()).unwrap();
        runtime.block_on(async {
            let folder = tempfile::tempdir().unwrap();
            let text = format!(
                "[[listener]]\nname = 'tcp'\naddress = '127.0.0.1:0'\n[[listener]]\nname = 'unix'\n\
                 address = 'unix:{0}/a.sock'\n[cluster]\nendpoints = ['http://127.0.0.1:2']\n",
                folder.path().display()
            );
            let path = folder.path().join("keyward.toml");
            std::fs::write(&path, text).unwrap();
            let config = keyward_config::load(&path).unwrap_or_else(|faults| panic!("{faults}")).0;
            let config = Arc::new(Published::new(config));
            let metrics = Arc::new(Metrics::new(Vec::new()));
            let (intake, mut clients) = ShardIntake::new();
            let table = ConnectionTable::new(Arc::clone(&config), metrics.connection_figures.clone());
            let sockets = Arc::<ListeningSockets>::default();
            let opened =
                Listeners::open(&config, &[None, None], vec![intake], table, metrics, Arc::clone(&sockets));
            let listeners = opened.unwrap_or_else(|error| panic!("{error}"));
            let (_, copies) = sockets.copies().expect("copies");
            let tcp = std::net::TcpListener::from(copies.into_iter().next().expect("a socket"));
            let address = tcp.local_addr().expect("an address");
            drop(tcp);
            // No acceptor runs before the first await.
            let over_tcp: Vec<_> = (0..5).map(|_| std::net::TcpStream::connect(address).unwrap()).collect();
            let path = folder.path().join("a.sock");
            let over_unix: Vec<_> =
                (0..5).map(|_| std::os::unix::net::UnixStream::connect(&path).unwrap()).collect();
            listeners.close(false).await;
            let mut names = Vec::new();
            while let Some(client) = clients.recv().await {
                names.push(client.listener.config.name.to_string());
            }
            names.sort();
            assert_eq!(names, [["tcp"; 5], ["unix"; 5]].concat());
            assert!(std::net::TcpStream::connect(address).is_err(), "closed");
            drop((over_tcp, over_unix));
        });
    }
}
