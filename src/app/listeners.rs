//! The listeners that are open, and what a reload makes of them.
//!
//! Owns: which sockets are open, for which listener each is, and who is told to leave. Must not know: how one is accepted on or a
//! connection served. Invariants: a socket is known by its address, and is kept for as long as any listener of the configuration has it;
//! nothing is opened, closed or changed unless all that is new could be bound; whose listener is gone, or takes its clients for others
//! than before, leaves as in a drain.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use super::Error;
use crate::config::{Address, Config, Listener};
use crate::downstream::connection_table::ConnectionTable;
use crate::downstream::listener::{Intake, Listening, Opened, accept};
use crate::downstream::tls::{Current, ListenerTls};
use crate::published::Published;
use crate::reload::{Part, Ready, Running};
use crate::tasks::{Owned, Tasks};
use crate::telemetry::metrics::Metrics;

/// The open listeners. Dropped, it accepts nothing more.
pub(super) struct Listeners {
    open: RefCell<Vec<Open>>,
    /// Those with TLS, for [`Part::tls`].
    running: Rc<RefCell<Vec<Running>>>,
    /// None once it accepts nothing more: shards end when nobody can send them a connection.
    intakes: RefCell<Vec<Intake>>,
    table: Arc<ConnectionTable>,
    config: Arc<Published<Config>>,
    metrics: Arc<Metrics>,
    tasks: Tasks,
}

/// Tells the clients of a listener to leave, and until when.
type Leave = watch::Sender<Option<Instant>>;

/// One socket, and the listener that it is for now.
struct Open {
    address: Address,
    now: Arc<Published<Opened>>,
    leave: Leave,
    acceptor: Owned,
}

/// What becomes of the listeners.
#[derive(Default)]
struct Changes {
    /// Sockets that were bound, for whom.
    opened: Vec<(Listening, Opened, Leave)>,
    /// Those that stay, by their places: whom they are for from now on, and, where those who are there leave, who tells the next.
    changed: Vec<(usize, Opened, Option<Leave>)>,
    /// Addresses that are to be closed.
    closed: Vec<Address>,
    told: Vec<String>,
}

impl Listeners {
    /// Opens those of the start, with `tls` in the configuration's order.
    ///
    /// # Errors
    /// An address cannot be bound.
    pub(super) fn open(
        config: &Arc<Published<Config>>,
        tls: &[Option<Current>],
        intakes: Vec<Intake>,
        table: Arc<ConnectionTable>,
        metrics: Arc<Metrics>,
    ) -> Result<Rc<Self>, Error> {
        let this = Self {
            open: RefCell::default(),
            running: Rc::default(),
            intakes: RefCell::new(intakes),
            table,
            config: Arc::clone(config),
            metrics,
            tasks: Tasks::default(),
        };
        for (listener, tls) in config.load().listeners.iter().zip(tls) {
            let bound = Listening::bind(&listener.address)
                .map_err(|source| Error::Bind { address: listener.address.to_string(), source })?;
            let (leave, drain) = watch::channel(None);
            this.begin(bound, Opened { config: Arc::clone(listener), tls: tls.clone(), drain }, leave);
        }
        this.follow_tls();
        Ok(Rc::new(this))
    }

    /// Those whose certificates are followed.
    pub(super) fn running(&self) -> Rc<RefCell<Vec<Running>>> {
        Rc::clone(&self.running)
    }

    /// Accepts nothing more.
    pub(super) async fn close(&self) {
        self.intakes.borrow_mut().clear();
        self.tasks.abort_all();
        self.tasks.joined().await;
        self.open.borrow().iter().for_each(|open| remove_file(&open.address));
    }

    /// Tells everybody to leave.
    pub(super) fn leave(&self, until: Instant) {
        self.open.borrow().iter().for_each(|open| _ = open.leave.send_replace(Some(until)));
    }

    /// Listeners come, go and change by a reload.
    pub(super) fn part(self: &Rc<Self>) -> Part {
        let this = Rc::clone(self);
        Part::new(move |_, now| {
            if this.intakes.borrow().is_empty() {
                return Ok(None);
            }
            let changes = this.changes(now)?;
            let (this, wait) = (Rc::clone(&this), now.drain.timeout);
            let told = changes.told.clone();
            Ok((!told.is_empty()).then(|| Ready::new(told, move || this.make(changes, wait))))
        })
    }

    fn begin(&self, bound: Listening, opened: Opened, leave: Leave) {
        let listener = &opened.config;
        tracing::info!(listener = &*listener.name, address = %listener.address, "listening");
        let address = listener.address.clone();
        let now = Arc::new(Published::new(opened));
        let accept = accept(
            bound,
            Arc::clone(&now),
            self.intakes.borrow().clone(),
            Arc::clone(&self.table),
            Arc::clone(&self.config),
            Arc::clone(&self.metrics),
        );
        let acceptor = self.tasks.spawn("acceptor", accept);
        self.open.borrow_mut().push(Open { address, now, leave, acceptor });
    }

    /// What is to change for this configuration. Binds what is new, and changes nothing.
    fn changes(&self, config: &Config) -> Result<Changes, String> {
        let mut changes = Changes::default();
        let open = self.open.borrow();
        for listener in &config.listeners {
            let name = &listener.name;
            let found = open.iter().enumerate().find(|(_, open)| open.address == listener.address);
            let Some((place, open)) = found else {
                let bound = Listening::bind(&listener.address).map_err(|error| {
                    format!("listener {name}: cannot listen on {}: {error}", listener.address)
                })?;
                let (leave, drain) = watch::channel(None);
                let opened = Opened { config: Arc::clone(listener), tls: tls_of(listener)?, drain };
                changes.told.push(format!("listener {name}: opened at {}", listener.address));
                changes.opened.push((bound, opened, leave));
                continue;
            };
            let was = open.now.load_full();
            if settings(&was.config) == settings(listener) {
                continue;
            }
            if same_clients(&was.config, listener) {
                changes.told.push(format!("listener {name}: changed, for connections that come"));
                let opened = Opened { config: Arc::clone(listener), ..Opened::clone(&was) };
                changes.changed.push((place, opened, None));
            } else {
                changes.told.push(format!(
                    "listener {name}: takes its clients for others, so those who are there leave"
                ));
                let (leave, drain) = watch::channel(None);
                let opened = Opened { config: Arc::clone(listener), tls: tls_of(listener)?, drain };
                changes.changed.push((place, opened, Some(leave)));
            }
        }
        for open in open.iter() {
            if config.listeners.iter().all(|listener| listener.address != open.address) {
                let name = Arc::clone(&open.now.load().config.name);
                changes.told.push(format!("listener {name}: closed at {}", open.address));
                changes.closed.push(open.address.clone());
            }
        }
        Ok(changes)
    }

    fn make(&self, changes: Changes, wait: Duration) {
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
            all.retain(|open| {
                let stays = !changes.closed.contains(&open.address);
                if !stays {
                    // The socket goes first: nobody who leaves comes back by it.
                    open.acceptor.end();
                    remove_file(&open.address);
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

    /// Has certificates followed of those that are open now. What is known of one that stays is what it was made by last, which
    /// need not be what its listener was opened with.
    fn follow_tls(&self) {
        let open = self.open.borrow();
        let before = self.running.take();
        let with_tls = |open: &Open| {
            let opened = open.now.load();
            let current = opened.tls.clone()?;
            let known = before.iter().find(|running| running.is_of(&current)).cloned();
            known.or_else(|| Running::new(&opened.config, current))
        };
        *self.running.borrow_mut() = open.iter().filter_map(with_tls).collect();
    }
}

/// Whether who comes by it is the same peer to both: then whoever came by the one may stay for the other.
fn same_clients(one: &Listener, other: &Listener) -> bool {
    let ca = |listener: &Listener| listener.client_ca().map(|ca| Arc::clone(&ca.name));
    one.name == other.name && one.tls.is_some() == other.tls.is_some() && ca(one) == ca(other)
}

/// What of a listener is not followed otherwise, as certificates and `identify` are.
fn settings(listener: &Listener) -> String {
    let ca = listener.client_ca().map(|ca| &ca.name);
    let Listener { name, lend_login_identity, accept_odd_authority, on_expiry, .. } = listener;
    let Listener { proxy_protocol_from, member, server_names, .. } = listener;
    let tls = listener.tls.is_some();
    format!(
        "{name} {tls} {ca:?} {lend_login_identity} {accept_odd_authority} {on_expiry:?} {proxy_protocol_from:?} \
         {member:?} {server_names:?}"
    )
}

fn tls_of(listener: &Listener) -> Result<Option<Current>, String> {
    let made = listener.tls.as_ref().map(ListenerTls::new).transpose();
    let made = made.map_err(|error| format!("listener {}: {error}", listener.name))?;
    Ok(made.map(|made| Arc::new(Published::new(made))))
}

/// What a closed unix socket leaves behind.
fn remove_file(address: &Address) {
    if let Address::Unix(path) = address
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
    use crate::config;
    use crate::reload::Reload;

    /// A configuration whose first listener shows this certificate, with further listeners.
    fn configure(folder: &Path, shows: &str, further: &str) {
        let text = format!(
            "[[listener]]\nname = 'a'\naddress = 'unix:a.sock'\ntls = {{ cert = '{shows}.crt', key = '{shows}.key' }}\n\
             {further}[cluster]\nendpoints = ['http://127.0.0.1:2']\n"
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

    /// What a listener was opened with is not what it shows now: when others come, change and go, that stays known.
    #[test]
    fn a_certificate_is_taken_back_whatever_becomes_of_other_listeners() {
        let runtime =
            Builder::new_current_thread().enable_all().build_local(LocalOptions::default()).unwrap();
        runtime.block_on(async {
            let folder = tempfile::tempdir().unwrap();
            ["one", "two"].into_iter().for_each(|name| write(folder.path(), name));
            configure(folder.path(), "one", "");
            let path = folder.path().join("keyward.toml");
            let config = config::load(&path).unwrap().0;
            let current: Current = tls_of(&config.listeners[0]).unwrap().unwrap();
            let in_force = Arc::new(Published::new(config.clone()));
            let metrics = Arc::new(Metrics::new(Vec::new()));
            let (intake, _taken) = Intake::new();
            let tls = [Some(Arc::clone(&current))];
            let table = ConnectionTable::new(Arc::clone(&in_force), metrics.connection_figures.clone());
            let listeners = Listeners::open(&in_force, &tls, vec![intake], table, Arc::clone(&metrics))
                .unwrap_or_else(|error| panic!("{error}"));
            let parts = vec![Part::tls(listeners.running()), listeners.part()];
            let waiting = Arc::new(Published::new(Vec::new()));
            let mut reload = Reload::new(path, &config, Vec::new(), parts, waiting, metrics);
            let mut changed = Vec::new();
            for (shows, further, open) in [
                ("two", "", 1),
                // Its own certificate is followed by who knows what it shows, not by what it was opened with.
                ("two", B, 2),
                ("one", B, 2),
                ("two", OTHER_B, 2),
                ("one", OTHER_B, 2),
                ("two", "", 1),
                // Both at once.
                ("one", B, 2),
                ("one", "", 1),
            ] {
                configure(folder.path(), shows, further);
                let before = current.load_full();
                assert!(reload.read_again().await);
                assert_eq!(listeners.open.borrow().len(), open, "{shows} {further}");
                changed.push(!Arc::ptr_eq(&before, &current.load_full()));
            }
            assert_eq!(changed, [true, false, true, true, true, true, true, false]);
            listeners.close().await;
        });
    }
}
