//! The operator's own address: is it alive, is it ready, what does it count.
//!
//! Owns: `/livez`, `/readyz` and `/metrics` over HTTP/1.1. Must not know the data path's sockets. Invariants: nothing
//! here changes state (`socket` does); a slow or silent peer costs a bounded time; answers hold no key, user or secret.

pub mod doctor;
pub mod drain;
mod figures;
pub mod socket;
pub mod status;
mod table;

use std::convert::Infallible;
use std::fmt::Write as _;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use http::header::{CONTENT_TYPE, HeaderValue};
use http::{Method, Request, Response, StatusCode};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpListener;

use crate::downstream::session::Sealer;
use crate::revocation::Register;
use crate::tasks::Tasks;
use crate::telemetry::metrics::Metrics;
use crate::upstream::credential::Credentials;
use crate::upstream::membership::{Foreign, MembersHandle, Serving};
use drain::{Exit, Stage};
use status::{AbsentRow, Cluster, ForeignRow, Replica, Row, Status, UnansweredRow};

/// How long a peer may take to send a request's header.
const HEADER_TIMEOUT: Duration = Duration::from_secs(5);
/// Probes are half a second apart, and one that is not answered takes some more.
const UNSEEN: Duration = Duration::from_secs(20);
/// What is served without a quorum.
const LOCAL_READS_ONLY: &str = "local reads only";
const PLAIN: HeaderValue = HeaderValue::from_static("text/plain; charset=utf-8");
/// The exposition format of the metrics library; Prometheus reads it since 2.5.
const METRICS: HeaderValue =
    HeaderValue::from_static("application/openmetrics-text; version=1.0.0; charset=utf-8");
/// Peers served at once: probes and scrapers.
const PEERS: usize = 64;

/// What the answers are made of.
pub struct State {
    members: MembersHandle,
    credentials: Arc<Credentials>,
    sealer: Arc<Sealer>,
    register: Register,
    metrics: Arc<Metrics>,
    shards_turn: Arc<AtomicBool>,
    exit: Arc<Exit>,
}

impl State {
    /// The state of a process that ends by `exit`.
    #[must_use]
    pub fn new(
        members: MembersHandle,
        credentials: Arc<Credentials>,
        sealer: Arc<Sealer>,
        register: Register,
        metrics: Arc<Metrics>,
        shards_turn: Arc<AtomicBool>,
        exit: Arc<Exit>,
    ) -> Self {
        Self { members, credentials, sealer, register, metrics, shards_turn, exit }
    }

    /// Why no calls should be sent here; none where they should.
    fn unready(&self) -> Option<String> {
        if self.exit.stage() != Stage::Serving {
            return Some("draining".into());
        }
        if !self.shards_turn.load(Ordering::Relaxed) {
            return Some("a shard is stuck".into());
        }
        if !self.register.is_known() {
            return Some("it is not known who was revoked".into());
        }
        let members = self.members.snapshot.load();
        match members.serving() {
            Serving::Ready if members.confirmed.elapsed() > UNSEEN => {
                Some("the members have not been looked at for long".into())
            }
            Serving::Ready if !self.credentials.may_mint() => {
                Some("mint.ca was not held against the members' peer URLs yet".into())
            }
            // The answer is 200 with the words: without a quorum every replica is as degraded, and a balancer that took all of
            // them out would leave no way to read, or to save a snapshot from, the member that is left.
            Serving::Ready | Serving::LocalReadsOnly => None,
            not_yet => Some(not_yet.to_string()),
        }
    }

    /// What is not served, where some calls are; none where all are, or none.
    fn degraded(&self) -> Option<&'static str> {
        let serving = self.members.snapshot.load().serving();
        (serving == Serving::LocalReadsOnly && self.unready().is_none()).then_some(LOCAL_READS_ONLY)
    }

    /// What `keyward status` tells.
    #[must_use]
    pub fn status(&self) -> Status {
        let (unready, degraded) = (self.unready(), self.degraded());
        let state = match &unready {
            None if degraded.is_some() => status::State::Degraded,
            None => status::State::Serving,
            Some(_) if self.exit.stage() != Stage::Serving => status::State::Draining,
            Some(_) => status::State::NotReady,
        };
        let members = self.members.snapshot.load();
        let foreign = |foreign: &Foreign| ForeignRow {
            endpoint: foreign.endpoint.to_string(),
            cluster: foreign.cluster.to_string(),
        };
        Status {
            replica: Replica {
                version: env!("CARGO_PKG_VERSION").to_owned(),
                state,
                why: unready.or(degraded.map(Into::into)),
                connections: self.metrics.connections.get(),
                calls: self.metrics.calls_open.get(),
                streams: self.metrics.streams_open.get(),
                sessions: self.sealer.seen().len(),
            },
            cluster: Cluster::of(&members, self.members.auth.now()),
            members: members.members.iter().map(|member| Row::of(member, &members)).collect(),
            absent: members.absent.iter().map(AbsentRow::of).collect(),
            foreign: members.foreign.iter().map(foreign).collect(),
            unanswered: members.unanswered.iter().map(UnansweredRow::of).collect(),
        }
    }

    fn answer(&self, verb: &Method, path: &str) -> (StatusCode, String) {
        match (verb, path) {
            (&Method::GET, "/livez") if self.shards_turn.load(Ordering::Relaxed) => {
                (StatusCode::OK, "ok\n".into())
            }
            (&Method::GET, "/livez") => (StatusCode::SERVICE_UNAVAILABLE, "a shard is stuck\n".into()),
            (&Method::GET, "/readyz") => match self.unready() {
                None => match self.degraded() {
                    None => (StatusCode::OK, "ok\n".into()),
                    Some(what) => (StatusCode::OK, format!("degraded: {what}\n")),
                },
                Some(why) => (StatusCode::SERVICE_UNAVAILABLE, why + "\n"),
            },
            (&Method::GET, "/metrics") => match self.metrics_text() {
                Ok(text) => (StatusCode::OK, text),
                Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()),
            },
            (&Method::GET, _) => (StatusCode::NOT_FOUND, "there are /livez, /readyz and /metrics\n".into()),
            _ => (StatusCode::METHOD_NOT_ALLOWED, "GET only\n".into()),
        }
    }

    /// The registry's text, and the counts that their owners keep themselves.
    fn metrics_text(&self) -> Result<String, std::fmt::Error> {
        self.metrics.revocation_age.set(self.register.age().as_secs_f64());
        self.metrics
            .revocation_entries
            .set(i64::try_from(self.register.revocations().len()).unwrap_or(i64::MAX));
        let members = self.members.snapshot.load();
        self.metrics.members_age.set(members.confirmed.elapsed().as_secs_f64());
        self.metrics.member_figures.put(&figures::of(&members));
        let mut text = self.metrics.text()?;
        text.truncate(text.trim_end_matches("# EOF\n").len());
        let counters = self.credentials.counters();
        let count = |value: &std::sync::atomic::AtomicU64| value.load(Ordering::Relaxed);
        let mut family = |name: &str, help: &str, label: &str, rows: &[(String, u64)]| {
            writeln!(text, "# HELP keyward_{name} {help}.\n# TYPE keyward_{name} counter")?;
            rows.iter().try_for_each(|(value, count)| {
                writeln!(text, "keyward_{name}_total{{{label}=\"{value}\"}} {count}")
            })
        };
        family(
            "upstream_logins",
            "Logins at members, by result",
            "result",
            &[
                ("accepted".into(), count(&counters.logins_accepted)),
                ("refused".into(), count(&counters.logins_refused)),
                ("failed".into(), count(&counters.logins_failed)),
            ],
        )?;
        family(
            "upstream_touches",
            "Idle tokens kept alive by a read, by result",
            "result",
            &[
                ("alive".into(), count(&counters.touches_alive)),
                ("dead".into(), count(&counters.touches_dead)),
                ("unknown".into(), count(&counters.touches_unknown)),
            ],
        )?;
        let (minted, signed) = self.credentials.made();
        family(
            "upstream_credentials_made",
            "Credentials made here for etcd users, by kind",
            "kind",
            &[("certificate".into(), minted), ("token".into(), signed)],
        )?;
        let keys: Vec<_> =
            self.sealer.opened_by_key().into_iter().map(|(key, opened)| (key.to_string(), opened)).collect();
        family("sessions_opened", "Session tokens opened, by key id; the sealing key first", "key", &keys)?;
        text.push_str("# EOF\n");
        Ok(text)
    }
}

/// Binds the admin address.
///
/// # Errors
/// The system's.
pub async fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    TcpListener::bind(address).await
}

/// Serves for ever.
pub async fn serve(listener: TcpListener, state: Arc<State>, tasks: Tasks) {
    let places = Arc::new(tokio::sync::Semaphore::new(PEERS));
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "an admin connection could not be accepted");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        let state = Arc::clone(&state);
        let peer = async move {
            let _place = place;
            let service = service_fn(move |request: Request<Incoming>| {
                let (status, text) = state.answer(request.method(), request.uri().path());
                let content_type = if request.uri().path() == "/metrics" { METRICS } else { PLAIN };
                async move { Ok::<_, Infallible>(answer(status, content_type, text)) }
            });
            let mut builder = http1::Builder::new();
            builder.timer(TokioTimer::new()).header_read_timeout(HEADER_TIMEOUT);
            if let Err(error) = builder.serve_connection(TokioIo::new(stream), service).await {
                tracing::debug!(%error, "admin connection ended");
            }
        };
        tasks.spawn("admin connection", peer).detach();
    }
}

fn answer(status: StatusCode, content_type: HeaderValue, text: String) -> Response<String> {
    let mut response = Response::new(text);
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, content_type);
    response
}
