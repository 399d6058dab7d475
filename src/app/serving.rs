//! What serves clients on one thread: everything of a connection, put together.
//!
//! Owns: what a shard is made of ([`Parts`]), its gateway, and the task of each of its connections. Must not know:
//! how many shards there are, who accepts, signals. It runs wherever a local runtime runs: the binary gives each shard
//! a thread of its own; beside the control plane on one runtime it does as well.
//! Invariant: a connection takes nothing that is shared and mutable but its shard's own.

use std::cell::Cell;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use crate::config::Config;
use crate::downstream::certificate::ClientCertificate;
use crate::downstream::connection::{self, Admitted, Beginning, Bounds, Ended, HandshakeError, Introduced};
use crate::downstream::connection_table::ConnectionPlace;
use crate::downstream::http1::Http1Log;
use crate::downstream::listener::{Accepted, Opened, Socket};
use crate::downstream::session::Sealer;
use crate::downstream::tls::Current;
use crate::gateway::access_log::{AccessLog, Origin};
use crate::gateway::caller::Identities;
use crate::gateway::login::desk::Logins;
use crate::gateway::{Client, Gateway, cut_at, defragment, live, pipeline, proofs, unread};
use crate::io::Stream;
use crate::lease::claims::Claims;
use crate::published::Published;
use crate::tasks::{Owned, Tasks};
use crate::telemetry::metrics::Metrics;
use crate::telemetry::seldom::Seldom;
use crate::upstream::balance::{Lingering, look_after};
use crate::upstream::choose::Chooser;
use crate::upstream::connect::Connector;
use crate::upstream::credential::Credentials;
use crate::upstream::departures::leave_unfit_members;
use crate::upstream::fleet::Fleet;
use crate::upstream::membership::MembersHandle;
use crate::upstream::pool::Pool;
use crate::upstream::resumes::Resumes;
use crate::upstream::send::Door;

/// How long what is left upstream may take to end once no client is left.
const LAST: Duration = Duration::from_secs(1);

/// What every shard gets: all of it may cross threads.
#[derive(Clone)]
pub struct Parts {
    /// The configuration, as it is now.
    pub config: Arc<Published<Config>>,
    /// TLS of each listener of the start, in the configuration's order.
    pub tls: Vec<Option<Current>>,
    /// Reaches the members.
    pub connector: Connector,
    /// The published members.
    pub members: MembersHandle,
    /// Tokens per identity and member.
    pub credentials: Arc<Credentials>,
    /// Who is which etcd user.
    pub identities: Arc<Published<Identities>>,
    /// Seals and opens sessions.
    pub sealer: Arc<Sealer>,
    /// Checks passwords.
    pub logins: Arc<Logins>,
    /// What is counted.
    pub metrics: Arc<Metrics>,
    /// Whether calls should be sent here, as `/readyz` says.
    pub ready: watch::Receiver<bool>,
    /// Tells when the process drains, and until when.
    pub drain: watch::Receiver<Option<Instant>>,
    /// Locks and campaigns that are being waited for.
    pub claims: Arc<Claims>,
    /// Defragmentations.
    pub defragmentations: Arc<defragment::Register>,
    /// Connections with users' certificates.
    pub fleet: Arc<Fleet>,
}

/// One shard's part of the data path.
pub struct Serving {
    gateway: Rc<Gateway>,
    /// Those of the start.
    listeners: Vec<Arc<Opened>>,
    metrics: Arc<Metrics>,
    /// Client connections: a drain waits for them.
    connections: Tasks,
    /// Everything else: streams, upstream connections, flushers.
    tasks: Tasks,
    /// Take streams and calls off members that do not serve.
    departures: [Owned; 2],
    /// Ends what stands no more, and answers that nobody reads.
    fallen: [Owned; 3],
    /// Of connections that were ended for too many resets.
    floods: Rc<Seldom>,
}

impl Serving {
    /// Puts a shard together on this thread. Its dice are its own, so that shards do not march in step.
    #[must_use]
    pub fn new(parts: Parts) -> Self {
        Self::choosing(parts, Chooser::default())
    }

    /// The same with a chooser of the caller's: what a shard does follows from what it is told and from the chooser's
    /// seed.
    #[must_use]
    pub fn choosing(parts: Parts, chooser: Chooser) -> Self {
        let tasks = Tasks::default();
        let config = parts.config.load_full();
        let listeners = config.listeners.iter().zip(parts.tls);
        let listeners = listeners.map(|(listener, tls)| {
            Arc::new(Opened { config: Arc::clone(listener), tls, drain: parts.drain.clone() })
        });
        let listeners = listeners.collect();
        let door = Rc::new(Door {
            pool: Pool::new(
                parts.connector,
                parts.members.hints.clone(),
                tasks.clone(),
                parts.fleet,
                config.cluster.idle_timeout,
            ),
            members: parts.members,
            credentials: parts.credentials,
            chooser,
            resumes: Resumes::default(),
            lingering: Lingering::default(),
            term: Cell::default(),
        });
        let departures = [
            tasks.spawn("departures", leave_unfit_members(Rc::clone(&door))),
            tasks.spawn("what hangs", look_after(Rc::clone(&door))),
        ];
        let gateway = Rc::new(Gateway::new(
            door,
            parts.sealer,
            parts.logins,
            Arc::clone(&parts.metrics),
            parts.config,
            tasks.clone(),
            parts.ready,
            parts.drain,
            parts.claims,
            parts.defragmentations,
            parts.identities,
        ));
        let fallen = [
            tasks.spawn("what stands no more", live::follow(Rc::clone(&gateway))),
            tasks.spawn("proofs", proofs::follow(Rc::clone(&gateway))),
            tasks.spawn("unread answers", unread::give_up_unread(Rc::clone(&gateway))),
        ];
        Self {
            gateway,
            listeners,
            metrics: parts.metrics,
            connections: Tasks::default(),
            tasks,
            departures,
            fallen,
            floods: Rc::default(),
        }
    }

    /// Takes connections until the acceptors are gone, then waits for the last one's end.
    pub async fn run(self, mut intake: mpsc::Receiver<Accepted>) {
        while let Some(accepted) = intake.recv().await {
            match adopt(accepted.socket) {
                Ok(stream) => {
                    let Accepted { listener, remote, slot, place, .. } = accepted;
                    self.serve(&listener, stream, remote, place, slot);
                }
                Err(error) => tracing::debug!(%error, "a socket could not be taken over"),
            }
        }
        self.ended().await;
    }

    /// Serves one connection of the listener with this place in the configuration of the start, in a task. `keep` is
    /// dropped when the connection has ended.
    pub fn take(
        &self,
        listener: usize,
        stream: Stream,
        remote: Option<SocketAddr>,
        keep: impl Sized + 'static,
    ) {
        if let Some(listener) = self.listeners.get(listener) {
            self.serve(listener, stream, remote, ConnectionPlace::unlisted(), keep);
        }
    }

    /// The same for whichever listener.
    fn serve(
        &self,
        listener: &Arc<Opened>,
        stream: Stream,
        remote: Option<SocketAddr>,
        place: ConnectionPlace,
        keep: impl Sized + 'static,
    ) {
        let limits = self.gateway.config.load().limits;
        let bounds = Bounds {
            streams: limits.streams_per_connection,
            header_size: limits.header_size,
            handshake: limits.handshake_timeout,
            first_call: limits.client_connections.first_call_timeout,
            pings: limits.client_connections.pings,
        };
        let (gateway, config) = (Rc::clone(&self.gateway), Arc::clone(&listener.config));
        let proxied = remote.is_some_and(|remote| config.believes(remote.ip()));
        let age = limits.connection_age;
        let (tls, drain) = (listener.tls.clone(), listener.drain.clone());
        let leaves = drain.clone();
        let activity = Arc::clone(place.activity());
        let admit = move |introduced: Introduced<'_>| {
            let remote = introduced.source.or(remote);
            let origin = Rc::new(Origin { listener: Arc::clone(&config.name), remote });
            let ca = config.tls.as_ref().and_then(|tls| tls.clients.ca());
            let leaf = introduced.certificate;
            let shown = leaf.zip(ca).map(|(leaf, ca)| ClientCertificate::read(leaf, &ca.name)).transpose()?;
            let expires = shown.as_ref().map(|shown| shown.expires);
            let until = expires.and_then(|expires| cut_at(&config, expires, SystemTime::now()));
            // On another connection, who lives by a login of this one would be nobody.
            let age = age.filter(|_| !config.lend_login_identity);
            let old_at = age.map(|age| Instant::now() + about(age, &gateway.door.chooser));
            let peer = shown.map(|shown| shown.peer);
            let member = config.member_of(introduced.server_name.as_deref()).cloned();
            let client =
                Rc::new(Client::new(&gateway, origin, config, peer, member, until, leaves, activity));
            let dismissed = (Rc::clone(&gateway), Rc::clone(&client));
            let dismiss = Box::new(move || dismissed.1.dismiss(&dismissed.0));
            let answer = move |request| pipeline::serve(Rc::clone(&gateway), Rc::clone(&client), request);
            Ok(Admitted { answer, until, old_at, expires, dismiss })
        };
        let odd_authority = listener.config.accept_odd_authority.then(|| Arc::clone(&self.metrics));
        let limiter = match &self.gateway.access_log {
            AccessLog::On(limiter) => Some(Rc::clone(limiter)),
            AccessLog::Off => None,
        };
        let name = Arc::clone(&listener.config.name);
        let http1 = Http1Log { metrics: Arc::clone(&self.metrics), limiter, listener: name, remote };
        let figures = self.metrics.connection_figures.clone();
        let beginning = Beginning { place, figures, proxied, tls, odd_authority, http1 };
        let (metrics, tasks) = (Arc::clone(&self.metrics), self.tasks.clone());
        let floods = Rc::clone(&self.floods);
        let serve = async move {
            let _keep = keep;
            match connection::serve(stream, beginning, bounds, &tasks, drain, admit).await {
                Ok(Ended::Well) => {}
                Ok(Ended::Silent) => {
                    tracing::debug!(?remote, "a client answers no pings: its connection ends")
                }
                // The table of connections counts and tells it.
                Err(HandshakeError::Full(_)) => {}
                Ok(Ended::Cut) => _ = metrics.connections_cut.inc(),
                Ok(Ended::Flooded) => {
                    metrics.connections_flooded.inc();
                    if let Some(connections) = floods.count() {
                        tracing::warn!(
                            ?remote,
                            connections,
                            "connections were ended: their clients reset too many streams"
                        );
                    }
                }
                Err(error) => {
                    metrics.handshakes_failed.inc();
                    tracing::debug!(%error, ?remote, "no connection");
                }
            }
        };
        self.connections.spawn("client connection", serve).detach();
    }

    /// Waits until every connection has ended; then what is left upstream has a moment to end, too.
    pub async fn ended(self) {
        self.connections.joined().await;
        // Other shards' calls on connections that this one drives.
        self.gateway.door.pool.lent().joined().await;
        // What is left are streams upstream and flushers: nobody downstream waits for them any more.
        self.gateway.door.pool.retire();
        drop((self.gateway, self.departures, self.fallen));
        if tokio::time::timeout(LAST, self.tasks.joined()).await.is_err() {
            self.tasks.abort_all();
        }
    }
}

/// A tenth more or less, so that connections that came together do not go together.
fn about(age: Duration, chooser: &Chooser) -> Duration {
    let tenth = age / 10;
    let more = chooser.draw(u64::try_from(tenth.as_millis() * 2).unwrap_or(u64::MAX));
    age - tenth + Duration::from_millis(more)
}

fn adopt(socket: Socket) -> io::Result<Stream> {
    Ok(match socket {
        Socket::Tcp(stream) => Box::new(tokio::net::TcpStream::from_std(stream)?),
        Socket::Unix(stream) => Box::new(tokio::net::UnixStream::from_std(stream)?),
    })
}
