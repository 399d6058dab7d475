//! The operator's own address: is it alive, is it ready, what does it count.
//!
//! Owns: what `/livez`, `/readyz` and `/metrics` say; `connections` serves them. Must not know the data path's sockets. Invariants:
//! nothing here changes state (`socket` does); answers hold no key, user or secret.

mod connections;
pub mod doctor;
pub mod drain;
mod figures;
pub mod socket;
pub mod status;
mod table;

use std::fmt::Write as _;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use http::{Method, StatusCode};
use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::downstream::session::Sealer;
use crate::revocation::Register;
use crate::telemetry::metrics::Metrics;
use crate::telemetry::writer::LOSSES;
use crate::upstream::credential::Credentials;
use crate::upstream::membership::{Foreign, MembersHandle, Serving};
pub use connections::serve;
use drain::{Exit, Stage};
use status::{AbsentRow, Cluster, ForeignRow, Replica, Row, Status, UnansweredRow};

/// Between two looks at the parts of readiness that tell of no change.
const LOOK: Duration = Duration::from_millis(250);
/// Probes are half a second apart, and one that is not answered takes some more.
const UNSEEN: Duration = Duration::from_secs(20);
/// What is served without a quorum.
const LOCAL_READS_ONLY: &str = "local reads only";

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

    /// Publishes whether calls should be sent here, for gRPC's health service, whenever that changes, until the end of the process.
    pub async fn publish_readiness(self: Arc<Self>, ready: watch::Sender<bool>) {
        let mut changes = self.members.changes.clone();
        let mut stages = self.exit.listen();
        let mut looks = tokio::time::interval(LOOK);
        loop {
            let now = self.unready().is_none();
            if *stages.borrow_and_update() == Stage::Ended {
                return;
            }
            ready.send_if_modified(|known| std::mem::replace(known, now) != now);
            // Every arm is cancel-safe.
            tokio::select! {
                _ = looks.tick() => {}
                Ok(()) = changes.changed() => {}
                Ok(()) = stages.changed() => {}
            }
        }
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
                ("postponed".into(), count(&counters.touches_postponed)),
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
        let losses =
            [("queue_full".into(), LOSSES.queue_full()), ("write_failed".into(), LOSSES.write_failed())];
        family("log_records_lost", "Log records that were lost, by reason", "reason", &losses)?;
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
