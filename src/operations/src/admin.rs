//! The operator's HTTP address: liveness, readiness, metrics and the status page.
//!
//! Owns: the answers of `/livez`, `/readyz` and `/metrics`; `http_server` serves them and the pages of
//! `status_page`. Must not know: the sockets of the data path. Invariants: no request on the admin address
//! changes state, unless another replica has sealed it (`fleet`; all other commands come by `socket`);
//! answers hold no secret, and, unless `admin.page` is `full` or the answer is sealed, no key, and no user
//! except for those with a certificate in the configuration.

mod column_layout;
pub mod doctor;
pub mod drain;
pub mod explained_calls;
pub mod fleet;
mod grant_effect;
mod http_server;
pub mod local_commands;
mod log_level;
pub mod machine_troubles;
mod member_figures;
pub mod operator_actions;
pub mod other_replicas;
mod policy_listing;
mod request_origin;
mod revocation_effect;
pub mod session_listing;
pub mod socket;
pub mod socket_client;
pub mod socket_owner;
pub mod socket_protocol;
pub mod status;
pub mod status_page;
pub mod table;
pub mod take_over;
pub mod top_screen;
pub mod view;
pub mod view_table;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use http::{Method, StatusCode};
use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::policy_store::PolicyRegister;
use crate::revocation::RevocationRegister;
use drain::{Exit, Stage};
pub use http_server::serve;
use keyward_cluster::membership::{ForeignAddress, MembersHandle, ServingState};
use keyward_downstream::session::Sealer;
use keyward_etcd::identity::ClusterId;
use keyward_records::audit::log::{AuditLog, AuditObstacle};
use keyward_telemetry::conditions::standing_conditions;
use keyward_telemetry::exposition::ExpositionFormat;
use keyward_telemetry::metrics::{CounterFamily, Metrics};
use keyward_telemetry::printable::escaped;
use keyward_telemetry::writer::LOSSES;
use keyward_upstream::credentials::Credentials;
use machine_troubles::MachineTroubles;
use status::{
    AbsentRow, ClusterStatus, ForeignRow, MemberRow, Replica, ReplicaStatus, UnansweredRow, WarnedRow,
};

/// Interval for polling the parts of readiness without a change notification.
const LOOK: Duration = Duration::from_millis(250);
/// Readiness ends when no member seeing a leader has answered a probe for this long. Probes run every 0.5 s,
/// and an unanswered probe adds its own time limit.
const UNSEEN: Duration = Duration::from_secs(20);
/// The answer to an unknown path.
const NOT_FOUND: &str =
    "there are /livez, /readyz, /metrics, /replica and, unless admin.page is off, the page /\n";
/// The `degraded` text of `/readyz` while the cluster has no quorum.
const LOCAL_READS_ONLY: &str = "local reads only";
/// The `degraded` text of `/readyz` while calls are refused for an audit sink.
const AUDIT_SINK_BEHIND: &str = "calls with audit records are refused, a sink takes none";
/// The text of `/readyz` while the audit file of this replica cannot be written.
const AUDIT_UNWRITABLE: &str = "the audit log cannot be written";

/// Sources of the admin answers.
pub struct AdminState {
    members: MembersHandle,
    credentials: Arc<Credentials>,
    sealer: Arc<Sealer>,
    register: RevocationRegister,
    policy: Option<PolicyRegister>,
    metrics: Arc<Metrics>,
    audit: Option<Arc<AuditLog>>,
    shards_alive: Arc<AtomicBool>,
    exit: Arc<Exit>,
    troubles: MachineTroubles,
}

impl AdminState {
    /// The admin state of a process ending by `exit`.
    #[must_use]
    pub fn new(
        members: MembersHandle,
        credentials: Arc<Credentials>,
        sealer: Arc<Sealer>,
        (register, policy, troubles): (RevocationRegister, Option<PolicyRegister>, MachineTroubles),
        (metrics, audit): (Arc<Metrics>, Option<Arc<AuditLog>>),
        shards_turn: Arc<AtomicBool>,
        exit: Arc<Exit>,
    ) -> Self {
        let shards_alive = shards_turn;
        Self { members, credentials, sealer, register, policy, metrics, audit, shards_alive, exit, troubles }
    }

    /// Reason to send no calls to this replica; `None` if calls should be sent.
    #[must_use]
    pub fn unready_reason(&self) -> Option<String> {
        if self.exit.stage() != Stage::Serving {
            return Some("draining".into());
        }
        if !self.shards_alive.load(Ordering::Relaxed) {
            return Some("a shard is stuck".into());
        }
        let members = self.members.snapshot.load();
        if !self.register.is_known_for(members.serving()) {
            let unread = self.register.unread_reason();
            return Some(with_reason("the revocations are not known", unread.as_deref().map(String::as_str)));
        }
        if let Some(policy) =
            self.policy.as_ref().map(PolicyRegister::status).filter(|policy| !policy.is_known)
        {
            return Some(with_reason("the stored policy is not known yet", policy.unread.as_deref()));
        }
        // The disk is this replica's own: another replica takes the writes that this one refuses.
        if self.audit_obstacle() == Some(AuditObstacle::File) {
            return Some(AUDIT_UNWRITABLE.into());
        }
        match members.serving() {
            ServingState::Ready if members.confirmed.elapsed() > UNSEEN => {
                Some("the members have not been looked at for long".into())
            }
            ServingState::Ready if !self.credentials.may_mint() => {
                Some("mint.ca was not held against the members' peer URLs yet".into())
            }
            // `/readyz` answers 200 `degraded: …`: without a quorum every replica is equally degraded, and a
            // load balancer dropping all replicas would leave no way to read, or save a snapshot, from the
            // remaining member.
            ServingState::Ready | ServingState::LocalReadsOnly => None,
            not_yet => Some(not_yet.to_string()),
        }
    }

    /// Description of the missing calls while only a part of the calls is served; `None` if all calls or no
    /// calls are served.
    fn degraded_reason(&self) -> Option<&'static str> {
        if self.unready_reason().is_some() {
            return None;
        }
        if self.has_local_reads_only() {
            return Some(LOCAL_READS_ONLY);
        }
        // Replicas share the receiver: a balancer that drops all of them would leave no way to read.
        (self.audit_obstacle() == Some(AuditObstacle::Sink)).then_some(AUDIT_SINK_BEHIND)
    }

    /// The served cluster, once known.
    fn cluster(&self) -> Option<ClusterId> {
        self.members.snapshot.load().cluster
    }

    fn has_local_reads_only(&self) -> bool {
        self.members.snapshot.load().serving() == ServingState::LocalReadsOnly
    }

    fn audit_obstacle(&self) -> Option<AuditObstacle> {
        self.audit.as_ref().and_then(|audit| audit.obstacle())
    }

    /// Publishes readiness for gRPC's health service at every change, until the end of the process.
    pub async fn publish_readiness(self: Arc<Self>, ready: watch::Sender<bool>) {
        let mut changes = self.members.changes.clone();
        let mut stages = self.exit.listen();
        let mut looks = tokio::time::interval(LOOK);
        loop {
            let now = self.unready_reason().is_none();
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

    /// The state in a line, for `systemctl status`.
    #[must_use]
    pub fn line(&self) -> String {
        match (self.unready_reason(), self.degraded_reason()) {
            (None, None) => "serving".into(),
            (None, Some(missing)) => format!("serving, degraded: {missing}"),
            (Some(_), _) if self.exit.stage() != Stage::Serving => "draining".into(),
            (Some(why), _) => format!("not ready: {why}"),
        }
    }

    /// The report of `keyward status`.
    #[must_use]
    pub fn status(&self) -> ReplicaStatus {
        let (unready, degraded) = (self.unready_reason(), self.degraded_reason());
        let state = match &unready {
            None if degraded.is_some() => status::ReplicaState::Degraded,
            None => status::ReplicaState::Serving,
            Some(_) if self.exit.stage() != Stage::Serving => status::ReplicaState::Draining,
            Some(_) => status::ReplicaState::NotReady,
        };
        let members = self.members.snapshot.load();
        let foreign = |foreign: &ForeignAddress| ForeignRow {
            endpoint: foreign.endpoint.to_string(),
            cluster: foreign.cluster.to_string(),
        };
        ReplicaStatus {
            replica: Replica {
                version: env!("CARGO_PKG_VERSION").to_owned(),
                state,
                why: unready.or(degraded.map(Into::into)),
                connections: self.metrics.connections.get(),
                calls: self.metrics.calls_open.get(),
                streams: self.metrics.streams_open.get(),
                sessions: self.sealer.listed_sessions().len(),
            },
            cluster: ClusterStatus::of(&members, self.members.auth.now()),
            members: members.members.iter().map(|member| MemberRow::of(member, &members)).collect(),
            absent: members.absent.iter().map(AbsentRow::of).collect(),
            foreign: members.foreign.iter().map(foreign).collect(),
            unanswered: members.unanswered.iter().map(UnansweredRow::of).collect(),
            warned: standing_conditions().iter().map(WarnedRow::of).collect(),
        }
    }

    fn answer(&self, verb: &Method, path: &str) -> (StatusCode, String) {
        match (verb, path) {
            (&Method::GET, "/livez") if self.shards_alive.load(Ordering::Relaxed) => {
                (StatusCode::OK, "ok\n".into())
            }
            (&Method::GET, "/livez") => (StatusCode::SERVICE_UNAVAILABLE, "a shard is stuck\n".into()),
            (&Method::GET, "/readyz") => match self.unready_reason() {
                None => match self.degraded_reason() {
                    None => (StatusCode::OK, "ok\n".into()),
                    Some(what) => (StatusCode::OK, format!("degraded: {what}\n")),
                },
                Some(why) => (StatusCode::SERVICE_UNAVAILABLE, why + "\n"),
            },
            (&Method::GET, _) => (StatusCode::NOT_FOUND, NOT_FOUND.into()),
            _ => (StatusCode::METHOD_NOT_ALLOWED, "GET only\n".into()),
        }
    }

    /// The metrics, with the counters kept outside of the registry, in this format.
    fn metrics_text(&self, format: ExpositionFormat) -> Result<String, std::fmt::Error> {
        self.metrics.revocation_age.set(self.register.age().as_secs_f64());
        self.metrics
            .revocation_entries
            .set(i64::try_from(self.register.revocations().len()).unwrap_or(i64::MAX));
        self.troubles.measure(&self.metrics);
        self.metrics.conditions.put(&standing_conditions());
        if let Some(policy) = self.policy.as_ref().map(PolicyRegister::status) {
            let metrics = &self.metrics.policy_store;
            metrics.age.set(policy.age().as_secs_f64());
            metrics.generation.set(i64::try_from(policy.generation).unwrap_or(i64::MAX));
            metrics.temporary_grants.set(i64::try_from(policy.grants).unwrap_or(i64::MAX));
        }
        self.metrics.readiness.ready.set(self.unready_reason().is_none().into());
        let is_degraded = self.degraded_reason() == Some(LOCAL_READS_ONLY);
        self.metrics.readiness.degraded.set(is_degraded.into());
        let members = self.members.snapshot.load();
        self.metrics.members_age.set(members.confirmed.elapsed().as_secs_f64());
        self.metrics.member_figures.put(&member_figures::of(&members));
        let counters = self.credentials.counters();
        let count = |value: &std::sync::atomic::AtomicU64| value.load(Ordering::Relaxed);
        let family = |name, help, label, rows: Vec<(&str, u64)>| {
            let rows = rows.into_iter().map(|(value, count)| (value.to_owned(), count)).collect();
            CounterFamily { name, help, label, rows }
        };
        let logins = vec![
            ("accepted", count(&counters.logins_accepted)),
            ("refused", count(&counters.logins_refused)),
            ("failed", count(&counters.logins_failed)),
        ];
        let touches = vec![
            ("alive", count(&counters.touches_alive)),
            ("dead", count(&counters.touches_dead)),
            ("unknown", count(&counters.touches_unknown)),
            ("postponed", count(&counters.touches_postponed)),
        ];
        let (minted, signed) = self.credentials.minted_and_signed();
        let made = vec![("certificate", minted), ("token", signed)];
        let keys: Vec<_> =
            self.sealer.opened_by_key().into_iter().map(|(key, opened)| (key.to_string(), opened)).collect();
        let keys = keys.iter().map(|(key, opened)| (key.as_str(), *opened)).collect();
        let losses = vec![("queue_full", LOSSES.queue_full()), ("write_failed", LOSSES.write_failed())];
        let open_metrics = self.metrics.admin_text(vec![
            family("upstream_logins", "Logins at members, by result", "result", logins),
            family("upstream_touches", "Idle tokens kept alive by a read, by result", "result", touches),
            family(
                "upstream_credentials_made",
                "Credentials made here for etcd users, by kind",
                "kind",
                made,
            ),
            family("sessions_opened", "Session tokens opened, by key id; the sealing key first", "key", keys),
            family("log_records_lost", "Log records that were lost, by reason", "reason", losses),
        ])?;
        Ok(match format {
            ExpositionFormat::OpenMetrics => self.metrics.with_exemplars(open_metrics),
            ExpositionFormat::PrometheusText => format.convert(open_metrics),
        })
    }
}

/// A state with the reason for it, if known. The reason may have a text of a member.
fn with_reason(state: &str, reason: Option<&str>) -> String {
    let reason = reason.map(|reason| format!(": {}", escaped(reason)));
    format!("{state}{}", reason.unwrap_or_default())
}

/// Binds the admin address.
///
/// # Errors
/// The operating system's error.
pub async fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    TcpListener::bind(address).await
}
