//! `keyward doctor`: present and foreseeable faults of the cluster and of Keyward.
//!
//! Owns: the type of a finding, gathering the inputs, printing the report. `checks` below holds the checks.
//! Must not know: the data path. Invariants: an examination changes no state; inputs that could not be read
//! are reported and never count as healthy; no finding contains a secret.

pub mod certificate_requests;
mod checks;
mod member_hashes;

use std::fmt;
use std::sync::Arc;
use std::time::SystemTime;

use futures_util::future::join_all;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::machine_troubles::MachineTroubles;
use crate::policy_store::{PolicyRegister, PolicyStoreStatus};
use crate::revocation::RevocationRegister;
use certificate_requests::members_without_request;
use checks::DoctorInputs;
use keyward_access::policy::unreachable_rules::unreachable_rules;
use keyward_access::usage::register::UsageRegister;
use keyward_base::published::Published;
use keyward_cluster::discovery::keyward_page::keywards_among;
use keyward_cluster::discovery::metrics_page::{MemberHealthFigures, examine};
use keyward_cluster::discovery::store_hashes::StoreHashes;
use keyward_cluster::discovery::survey::ClusterSurvey;
use keyward_cluster::membership::{AuthSetting, MembersHandle, Membership};
use keyward_config::reload_request::ReloadState;
use keyward_config::{Config, MappingOutcome};
use keyward_downstream::connection_table::{ConnectionOccupancy, ConnectionTable};
use keyward_etcd::identity::MemberId;
use keyward_gateway::caller::Identities;
use keyward_records::audit::log::{AuditLog, AuditReport};
use keyward_telemetry::conditions::{StandingCondition, standing_conditions};
use keyward_telemetry::printable::escaped;
use keyward_upstream::credentials::{Credentials, MetricsPages, RootHolderQuery, RootHolders};
use keyward_upstream::peer_urls::PeerTrustLook;

pub use member_hashes::LastHashes;

/// The result of one examination.
#[derive(Debug, Serialize, Deserialize)]
pub struct DoctorReport {
    /// Findings, worst first.
    pub findings: Vec<Finding>,
    /// Inputs that could not be read, with the reason.
    pub unseen: Vec<String>,
}

/// One present or foreseeable fault.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Finding {
    /// Severity of the finding.
    pub severity: Severity,
    /// Name of the check, stable between versions.
    pub check: String,
    /// Subject of the finding: a member's name and id, an address, or a configuration key.
    pub about: String,
    /// Description of the fault.
    pub what: String,
    /// The remedy, in one line.
    pub fix: String,
}

/// Severity of a finding, worst first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// A function fails now, or will fail within days.
    Error,
    /// A function will fail upon a further event.
    Warning,
    /// Nothing fails now through Keyward. Says what others than Keyward's clients are open to, or what has
    /// happened within minutes.
    Note,
}

/// Inputs of an examination.
pub struct Doctor {
    /// The configuration in force.
    pub config: Arc<Published<Config>>,
    /// The state after the last reload of the configuration.
    pub reload_state: Arc<Published<ReloadState>>,
    /// The members.
    pub members: MembersHandle,
    /// Reads the HTTP/1.1 pages of the members (`/metrics`, `/health`).
    pub pages: MetricsPages,
    /// The revocations.
    pub register: RevocationRegister,
    /// The rules in force.
    pub identities: Arc<Published<Identities>>,
    /// The policy stored in etcd, if configured.
    pub policy: Option<PolicyRegister>,
    /// Reads the roles of etcd users.
    pub credentials: Arc<Credentials>,
    /// The table of client connections.
    pub connections: Arc<ConnectionTable>,
    /// The limits on usage.
    pub usage: Arc<UsageRegister>,
    /// The audit log, if on.
    pub audit: Option<Arc<AuditLog>>,
    /// The hashes of the members' stores.
    pub last_hashes: LastHashes,
    /// The state files and the resolvers.
    pub troubles: MachineTroubles,
}

/// The purpose of an examination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExaminedFor {
    /// A command of an operator.
    Command,
    /// A page that is open, and has an examination again and again.
    Page,
}

impl Doctor {
    /// Runs one examination.
    pub async fn examine(&self, examined_for: ExaminedFor) -> DoctorReport {
        let members = self.members.snapshot.load_full();
        let asked = members.members.iter().map(async |member| {
            (member.id, examine(&self.pages.connector, &member.endpoint, member.resolved_ip).await)
        });
        let config = self.config.load_full();
        let (connector, auth) = (&self.pages.connector, self.members.auth.now());
        let keywards = keywards_among(connector, &config.cluster.endpoints);
        let without_request = members_without_request(&config, (&members, auth), connector);
        let (examined, keywards, without_request): (Vec<(MemberId, Option<MemberHealthFigures>)>, _, _) =
            tokio::join!(join_all(asked), keywards, without_request);
        let root_holders = self.root_holders(&config, &members).await;
        let hashes = self.member_hashes(examined_for).await;
        let unread = self.register.unread_reason();
        DoctorInputs {
            now: SystemTime::now(),
            instant: Instant::now(),
            config: &config,
            reload: &self.reload_state.load_full(),
            members: &members,
            auth,
            examined: &examined,
            keywards: &keywards,
            without_request: &without_request,
            hashes: &hashes,
            revocations_known: self.register.is_known_for(members.serving()),
            revocations_unread: unread.as_deref().map(String::as_str),
            peer_trust: None,
            stored_policy: self.policy.as_ref().map(PolicyRegister::status).as_deref(),
            unreachable: &unreachable_rules(&config, self.identities.load().policy().document()),
            root_holders: &root_holders,
            connections: &self.connections.occupancy(),
            name_troubles: &self.troubles.names(),
            unwritten: &self.troubles.unwritten(),
            constant_limits: &self.usage.counters().constant(),
            shown: &self.pages.connector.shown_certificates(),
            audit: &self.audit.as_ref().map(|audit| audit.report()).unwrap_or_default(),
            logged: &logged(examined_for),
        }
        .report()
    }

    /// Finds the etcd users with the role `root` among the users reached by a mapping rule without an exact
    /// peer. Sends no request if there is no such rule, or if auth is not on.
    async fn root_holders(&self, config: &Config, members: &Membership) -> RootHolders {
        let patterns = config.mapping.rules.iter().filter(|rule| !rule.names_one_peer());
        let mut wanted =
            RootHolderQuery { named: config.mapping.default.iter().cloned().collect(), all: false };
        for rule in patterns {
            match rule.outcome() {
                MappingOutcome::User(user) => wanted.named.push(user.clone()),
                MappingOutcome::Same => wanted.all = true,
                MappingOutcome::Deny => {}
            }
        }
        let member = members.leader().or_else(|| members.ready_voters().next());
        let is_asked = self.members.auth.now() == AuthSetting::On && (wanted.all || !wanted.named.is_empty());
        match member.filter(|_| is_asked) {
            Some(member) => {
                self.credentials.root_holders(config.cluster.probe.as_ref(), wanted, member.id).await
            }
            None => RootHolders::default(),
        }
    }
}

/// The conditions that the log tells now. A page without a login shows no fields of a record, which can name
/// a peer.
fn logged(examined_for: ExaminedFor) -> Vec<StandingCondition> {
    let mut standing = standing_conditions();
    if examined_for == ExaminedFor::Page {
        standing.iter_mut().for_each(|condition| condition.details.clear());
    }
    standing
}

/// The conditions of readiness as a survey saw them.
#[derive(Debug, Default)]
pub struct SurveyedConditions {
    /// Why the revocations stored in etcd cannot be read.
    pub revocations_unread: Option<String>,
    /// The policy stored in etcd, if configured.
    pub stored_policy: Option<PolicyStoreStatus>,
    /// The members' trust in `mint.ca`, if configured.
    pub peer_trust: Option<PeerTrustLook>,
    /// The members that ask for no client certificate, where users are proved by certificates.
    pub without_request: Vec<MemberId>,
}

/// Judges a configuration without a running process, and the cluster by a survey, if any.
#[must_use]
pub fn judge_configuration(
    config: &Config,
    surveyed: Option<(&ClusterSurvey, &SurveyedConditions)>,
) -> DoctorReport {
    let (survey, conditions) = surveyed.unzip();
    let unread = conditions.and_then(|conditions| conditions.revocations_unread.as_deref());
    let unknown = Membership::unknown(Instant::now());
    DoctorInputs {
        now: SystemTime::now(),
        instant: Instant::now(),
        config,
        reload: &ReloadState::default(),
        members: survey.map_or(&unknown, |survey| &survey.membership),
        auth: survey.map_or(AuthSetting::Unknown, |survey| survey.auth),
        examined: survey.map_or(&[], |survey| &survey.examined),
        keywards: survey.map_or(&[], |survey| &survey.keywards),
        without_request: conditions.map_or(&[], |conditions| &conditions.without_request),
        hashes: survey.map_or(&StoreHashes::default(), |survey| &survey.hashes),
        revocations_known: unread.is_none(),
        revocations_unread: unread,
        stored_policy: conditions.and_then(|conditions| conditions.stored_policy.as_ref()),
        peer_trust: conditions.and_then(|conditions| conditions.peer_trust.as_ref()),
        unreachable: &unreachable_rules(config, &config.policy.document),
        root_holders: &RootHolders::default(),
        connections: &ConnectionOccupancy::default(),
        name_troubles: &[],
        unwritten: &[],
        constant_limits: &[],
        shown: survey.map_or(&[], |survey| &survey.certificates),
        audit: &AuditReport::default(),
        logged: &[],
    }
    .report_for_check(survey.is_some())
}

impl DoctorReport {
    /// The worst severity among the findings.
    #[must_use]
    pub fn worst(&self) -> Option<Severity> {
        self.findings.iter().map(|finding| finding.severity).min()
    }
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Error => "error",
            Self::Warning => "warning",
            Self::Note => "note",
        })
    }
}

/// Formats the report for a terminal.
impl fmt::Display for DoctorReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (notes, findings): (Vec<_>, Vec<_>) =
            self.findings.iter().partition(|finding| finding.severity == Severity::Note);
        findings.iter().try_for_each(|finding| write_finding(f, finding))?;
        for unseen in &self.unseen {
            writeln!(f, "not looked at: {}", escaped(unseen))?;
        }
        match (findings.len(), self.unseen.len()) {
            (0, 0) => writeln!(f, "nothing found")?,
            (0, _) => writeln!(f, "nothing found in what could be looked at")?,
            _ => {}
        }
        notes.iter().try_for_each(|finding| write_finding(f, finding))
    }
}

fn write_finding(f: &mut fmt::Formatter<'_>, finding: &Finding) -> fmt::Result {
    let Finding { severity, check, about, what, fix } = finding;
    let (about, what, fix) = (escaped(about), escaped(what), escaped(fix));
    writeln!(f, "{severity} [{check}] {about}: {what}\n    fix: {fix}")
}
