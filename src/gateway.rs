//! The way of a call: from the client's request to an honest reply.
//!
//! Owns: what a shard needs for every call, and the pipeline. Must not know: TOML, TLS, how streams are accepted.
//! Invariant: everything here belongs to one shard; what shards share is immutable, atomic or published whole.

pub mod access_log;
pub mod caller;
pub mod exchange;
pub mod health;
pub mod login;
pub mod member_answers;
pub mod pipeline;
pub mod reply;
pub mod streams;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use tokio::sync::watch;
use tokio::time::Instant;

use crate::downstream::session::{Sealer, Session};
use crate::gateway::caller::{Caller, Callers};
use crate::identity::{MemberId, Revision};
use crate::tasks::Tasks;
use crate::telemetry::metrics::Metrics;
use crate::upstream::choose::Wanted;
use crate::upstream::send::Door;

/// What the gateway takes from the configuration.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The client URLs that member answers name.
    pub client_urls: Arc<[String]>,
    /// The largest request message, in bytes.
    pub request_size: usize,
    /// Bytes of requests that a shard may hold at once.
    pub request_budget: usize,
    /// Whether every call leaves a record in the log.
    pub access_log: bool,
}

/// Everything that a shard's calls share.
pub struct Gateway {
    /// The way upstream.
    pub door: Rc<Door>,
    /// Seals and opens sessions.
    pub sealer: Arc<Sealer>,
    /// Who presented tokens here lately.
    pub callers: Callers,
    /// What is counted.
    pub metrics: Arc<Metrics>,
    /// What the configuration says.
    pub settings: Settings,
    /// The tasks of this shard's streams.
    pub tasks: Tasks,
    /// Tells when the process drains, and until when.
    pub drain: watch::Receiver<Option<Instant>>,
    held: Cell<usize>,
}

/// One client connection, as its calls see it.
pub struct Client {
    /// Where it came from.
    pub origin: Rc<access_log::Origin>,
    /// As whom it calls where it shows no credential.
    pub default: Rc<Caller>,
    /// The highest revision that it was shown: nothing older may follow (rules 21).
    pub floor: Rc<Cell<Revision>>,
    home: Cell<Option<MemberId>>,
    /// Who called last: nearly always who calls next.
    last: RefCell<Option<(Rc<Session>, Rc<Caller>)>>,
}

impl Client {
    /// A connection that has seen nothing yet.
    #[must_use]
    pub fn new(origin: Rc<access_log::Origin>, default: Rc<Caller>) -> Self {
        Self { origin, default, floor: Rc::default(), home: Cell::default(), last: RefCell::default() }
    }

    /// Notes a revision that goes downstream.
    pub fn shown(&self, revision: Revision) {
        self.floor.set(self.floor.get().max(revision));
    }
}

impl Gateway {
    /// A gateway for one shard.
    #[must_use]
    pub fn new(
        door: Rc<Door>,
        sealer: Arc<Sealer>,
        metrics: Arc<Metrics>,
        settings: Settings,
        tasks: Tasks,
        drain: watch::Receiver<Option<Instant>>,
    ) -> Self {
        Self {
            door,
            callers: Callers::new(Arc::clone(&sealer)),
            sealer,
            metrics,
            settings,
            tasks,
            drain,
            held: Cell::default(),
        }
    }

    /// The connection's own member, chosen when first asked for and again when it is not ready.
    #[must_use]
    pub fn home(&self, client: &Client) -> Option<MemberId> {
        let chosen = self.door.choose(Wanted::Home(client.home.get()), &[]).map(|member| member.id);
        client.home.set(chosen.or(client.home.get()));
        chosen
    }

    /// Nothing yet of the shard's budget for requests in memory.
    #[must_use]
    pub fn hold(self: &Rc<Self>) -> Held {
        Held { gateway: Rc::clone(self), bytes: 0 }
    }
}

/// A part of the shard's budget for requests in memory, given back on drop.
pub struct Held {
    gateway: Rc<Gateway>,
    bytes: usize,
}

impl Held {
    /// Takes `bytes` more; false where the budget is used up.
    #[must_use]
    pub fn more(&mut self, bytes: usize) -> bool {
        let all = self.gateway.held.get() + bytes;
        if all > self.gateway.settings.request_budget {
            return false;
        }
        self.gateway.held.set(all);
        self.bytes += bytes;
        true
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.gateway.held.set(self.gateway.held.get().saturating_sub(self.bytes));
    }
}
