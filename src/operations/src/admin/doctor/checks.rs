//! The checks of `keyward doctor`.
//!
//! Owns: every check, its threshold and its fix. Must not know: how the inputs were gathered; the time is an
//! argument. Invariants: a check without its inputs adds an entry to `unseen` and no finding, unless a sound
//! configuration keeps the inputs from Keyward (the hashes of the stores); every command in a fix exists in
//! etcdctl, etcdutl or keyward.

mod alarms;
mod audit_retention;
mod audit_troubles;
mod certificates;
mod endpoints;
mod exposure;
mod limits;
mod logged_conditions;
mod member_readiness;
mod member_speed;
mod name_servers;
mod readiness;
mod reloads;
mod rule_reach;
mod state_files;
mod store_differences;
mod stored_policy;
mod versions;
mod weak_certificates;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rustls::pki_types::CertificateDer;
use tokio::time::Instant;

use super::{DoctorReport, Finding, Severity};
use crate::policy_store::PolicyStoreStatus;
use keyward_access::policy::unreachable_rules::UnreachableRule;
use keyward_access::usage::exceeded::Exceeded;
use keyward_base::io::kept_file::UnwrittenFile;
use keyward_cluster::discovery::keyward_page::KeywardEndpoint;
use keyward_cluster::discovery::metrics_page::MemberHealthFigures;
use keyward_cluster::discovery::store_hashes::StoreHashes;
use keyward_cluster::fitness::LAG;
use keyward_cluster::membership::{
    AbsenceReason, AuthSetting, Member, Membership, PeerUrls, Readiness, Role,
};
use keyward_config::reload_request::ReloadState;
use keyward_config::{Config, KeySource, RevocationPersistence, Scheme};
use keyward_dial::names::NameTrouble;
use keyward_downstream::connection_table::ConnectionOccupancy;
use keyward_etcd::identity::{MemberId, UserName};
use keyward_records::audit::log::AuditReport;
use keyward_telemetry::conditions::StandingCondition;
use keyward_upstream::credentials::RootHolders;
use keyward_upstream::peer_urls::PeerTrustLook;

/// Thresholds of the database size, in percent of the quota.
const QUOTA_NEAR: u64 = 80;
const QUOTA_REACHED: u64 = 95;
/// Number of kept revisions to report if no compaction ever ran.
const NEVER_COMPACTED: u64 = 10_000;
/// Number of kept revisions to report if the last compaction was longer than `LONG_AGO` ago.
const LONG_KEPT: u64 = 100_000;
const LONG_AGO: Duration = Duration::from_secs(24 * 3600);
/// etcd refuses proposals above this gap between committed and applied entries
/// (server/etcdserver/v3_server.go, `maxGapBetweenApplyAndCommitIndex`).
const UNAPPLIED: u64 = 5_000;
/// Clock difference reported as an error while Keyward mints certificates or signs tokens. Minted
/// certificates are valid from five minutes before their issue (docs/decisions.md#d19); half of the five
/// minutes is left for latency.
const CLOCK: Duration = Duration::from_secs(150);
/// Clock difference reported as a warning: it shifts lease expiry and log times, and breaks no tokens.
const CLOCK_NOTED: Duration = Duration::from_secs(5);
/// The checks of the whole cluster, from which the findings about single members follow.
const CAUSES: [&str; 2] = ["quorum_lost", "serving"];

/// Inputs of the checks.
pub(super) struct DoctorInputs<'a> {
    pub(super) now: SystemTime,
    /// The same moment, for the load of members.
    pub(super) instant: Instant,
    pub(super) config: &'a Config,
    /// The state after the last reload of the configuration.
    pub(super) reload: &'a ReloadState,
    pub(super) members: &'a Membership,
    pub(super) auth: AuthSetting,
    /// The unauthenticated answers of each member; `None` for a member without an answer.
    pub(super) examined: &'a [(MemberId, Option<MemberHealthFigures>)],
    /// The configured endpoints that are no members, but a Keyward.
    pub(super) keywards: &'a [KeywardEndpoint],
    /// The members that ask for no client certificate, where users are proved by certificates.
    pub(super) without_request: &'a [MemberId],
    /// The hashes of the members' stores; empty where etcd tells them to root alone.
    pub(super) hashes: &'a StoreHashes,
    pub(super) revocations_known: bool,
    /// Why the last read of the revocations failed.
    pub(super) revocations_unread: Option<&'a str>,
    /// The members' trust in `mint.ca`; a running process looks at it by itself.
    pub(super) peer_trust: Option<&'a PeerTrustLook>,
    /// The state of the policy stored in etcd, if configured.
    pub(super) stored_policy: Option<&'a PolicyStoreStatus>,
    /// The rules in force that can apply to no caller.
    pub(super) unreachable: &'a [UnreachableRule],
    pub(super) root_holders: &'a RootHolders,
    pub(super) connections: &'a ConnectionOccupancy,
    /// The names and name servers that fail now.
    pub(super) name_troubles: &'a [NameTrouble],
    /// The state files that are not on the disk.
    pub(super) unwritten: &'a [UnwrittenFile],
    /// The limits that refuse calls all the time.
    pub(super) constant_limits: &'a [Exceeded],
    /// The certificate last shown by each member, by `host:port`.
    pub(super) shown: &'a [(String, CertificateDer<'static>)],
    /// The state of the audit log.
    pub(super) audit: &'a AuditReport,
    /// The conditions that the log tells now.
    pub(super) logged: &'a [StandingCondition],
}

impl DoctorInputs<'_> {
    /// Runs all checks; findings are sorted, worst first.
    pub(super) fn report(&self) -> DoctorReport {
        let mut findings = DoctorFindings::default();
        self.whole_cluster(&mut findings);
        self.roots(&mut findings);
        self.kept_state(&mut findings);
        certificates::check(self.config, self.now, &mut findings);
        weak_certificates::check(self.config, self.shown, &mut findings);
        self.connections(&mut findings);
        name_servers::check(self.config, self.name_troubles, &mut findings);
        stored_policy::check(self.config, self.stored_policy, &mut findings);
        rule_reach::check(self.config, self.unreachable, &mut findings);
        self.limits(&mut findings);
        self.memory_budgets(&mut findings);
        audit_retention::check(self.audit.retention, &mut findings);
        audit_troubles::check(self.config.audit.as_deref(), self.audit, self.now, &mut findings);
        reloads::check(self.reload, &mut findings);
        state_files::check(self.unwritten, self.now, &mut findings);
        member_speed::check(self.members, self.instant, &mut findings);
        logged_conditions::check(self.logged, self.members, &mut findings);
        findings.into_report()
    }

    /// Runs the checks that need no process: of the configuration, and of the members if `dialled`.
    pub(super) fn report_for_check(&self, dialled: bool) -> DoctorReport {
        let mut findings = DoctorFindings::default();
        certificates::check(self.config, self.now, &mut findings);
        weak_certificates::check(self.config, self.shown, &mut findings);
        exposure::check(self.config, &mut findings);
        self.kept_state(&mut findings);
        self.memory_budgets(&mut findings);
        rule_reach::check(self.config, self.unreachable, &mut findings);
        if dialled {
            self.whole_cluster(&mut findings);
            stored_policy::check(self.config, self.stored_policy, &mut findings);
            readiness::check(self.peer_trust, &mut findings);
        } else {
            readiness::foresee(self.config, &mut findings);
        }
        findings.into_report()
    }

    /// Checks everything told by the members.
    fn whole_cluster(&self, findings: &mut DoctorFindings) {
        self.cluster(findings);
        self.alarms(findings);
        for member in &self.members.members {
            self.member(member, findings);
            self.store(member, findings);
        }
        self.certificate_requests(findings);
        self.absent(findings);
        self.stores(findings);
        self.versions(findings);
        self.open_holes(findings);
        self.weaknesses(findings);
        self.identities(findings);
    }

    /// Warns of each member that takes no user from a certificate.
    fn certificate_requests(&self, findings: &mut DoctorFindings) {
        let is_without = |member: &&Arc<Member>| self.without_request.contains(&member.id);
        for member in self.members.members.iter().filter(is_without) {
            let what = "it asks for no client certificate, so it takes no user from one: it refuses the \
                        calls of each user with mint or cert in [[user]] (user name is empty)";
            let fix = "start the member with --client-cert-auth and --trusted-ca-file; until every member \
                       has them, no [[user]] row has mint or cert";
            findings.warning("certificate_not_asked", name_of(member), what, fix);
        }
    }

    fn member(&self, member: &Member, findings: &mut DoctorFindings) {
        let about = name_of(member);
        self.unready(member, findings);
        self.unhealthy(member, findings);
        let Some(status) = &member.store_status else {
            if member.readiness == Readiness::Ready {
                let older = if member.traits().tells_status_to_users {
                    ""
                } else {
                    " (before 3.5.32 and 3.6.12 it may need the role root)"
                };
                findings.unseen(format!(
                    "{about}: its raft log, since Status is refused to cluster.probe{older}"
                ));
            }
            return;
        };
        if status.unapplied() > UNAPPLIED {
            let what =
                format!("{} entries of its log are not applied, so it refuses writes", status.unapplied());
            let fix = "look at its disk: etcd_disk_backend_commit_duration_seconds in its /metrics";
            findings.error("apply_lag", about.clone(), what, fix);
        }
        let lag = self.members.lag(member).unwrap_or(0);
        if lag > LAG && member.role == Role::Voter {
            let what = format!(
                "it has {lag} entries left to apply that the furthest member has applied, and gets no calls"
            );
            findings.warning("raft_lag", about, what, "look at its disk and at its network to the leader");
        }
    }

    /// Checks the database, compaction and clock of a member.
    fn store(&self, member: &Member, findings: &mut DoctorFindings) {
        let about = name_of(member);
        let status = member.store_status.as_deref();
        let Some(told) = self.examined_answers(member.id) else {
            if member.readiness == Readiness::Ready {
                findings.unseen(format!(
                    "{about}: its /metrics at {}, for quota, compactions and clock",
                    member.endpoint
                ));
            }
            return;
        };
        let quota = status.and_then(|status| status.db_quota).or(told.quota).unwrap_or(0);
        let size = status.map(|status| status.db_size).or(told.db_size).unwrap_or(0);
        let used = status.map(|status| status.db_in_use).or(told.db_in_use).unwrap_or(0);
        let percent = size.saturating_mul(100).checked_div(quota).unwrap_or(0);
        if percent >= QUOTA_NEAR {
            let of = super::super::table::size;
            let what = format!(
                "its database has {} of {} ({percent} %), {} of it in use",
                of(size),
                of(quota),
                of(used)
            );
            let fix = if used < size / 2 {
                "etcdctl defrag: more than half of the file is free"
            } else {
                "compact and defragment, or raise --quota-backend-bytes (at most 8 GiB)"
            };
            let severity = if percent >= QUOTA_REACHED { Severity::Error } else { Severity::Warning };
            findings.add(severity, "db_quota", about.clone(), what, fix);
        }
        self.compaction(member, told, findings);
        if let Some((theirs, ours)) = told.clock {
            self.clock(about, theirs, ours, findings);
        }
    }

    fn compaction(&self, member: &Member, told: &MemberHealthFigures, findings: &mut DoctorFindings) {
        let (Some(revision), Some(compacted)) = (told.revision, told.compacted) else { return };
        // Compaction is replicated, so one member is enough.
        let first = self.examined.iter().find(|(_, told)| told.is_some()).map(|(id, _)| *id);
        if first != Some(member.id) {
            return;
        }
        let kept = revision.saturating_sub(compacted);
        let ago = told.compacted_at.and_then(|at| self.now.duration_since(at).ok());
        let what = match (compacted, ago) {
            (0, _) if kept > NEVER_COMPACTED => {
                format!("nothing was ever compacted: all {kept} revisions are kept")
            }
            (1.., Some(ago)) if kept > LONG_KEPT && ago > LONG_AGO => {
                format!(
                    "the last compaction was {} hours ago: {kept} revisions are kept",
                    ago.as_secs() / 3600
                )
            }
            _ => return,
        };
        let fix = "set both auto-compaction-mode and auto-compaction-retention (a file without the mode \
            compacts nothing); now: etcdctl compact REVISION";
        findings.warning("no_compaction", "cluster", what, fix);
    }

    fn clock(&self, about: String, theirs: SystemTime, ours: SystemTime, findings: &mut DoctorFindings) {
        let apart = theirs.duration_since(ours).unwrap_or_else(|ahead| ahead.duration());
        if apart < CLOCK_NOTED {
            return;
        }
        let makes = self.config.users.mint.is_some() || self.config.users.sign_jwt.is_some();
        let what = format!("its clock and ours are {} s apart", apart.as_secs());
        if makes && apart > CLOCK {
            let what = what + ": it will refuse what we mint or sign";
            findings.error("clock", about, what, "set both clocks by NTP");
        } else {
            findings.warning("clock", about, what, "set both clocks by NTP");
        }
    }

    fn absent(&self, findings: &mut DoctorFindings) {
        for absent in &self.members.absent {
            let id = absent.id;
            match absent.why {
                AbsenceReason::Unstarted => {
                    let fix =
                        format!("start it{}", self.or_by_list(&format!("or etcdctl member remove {id}")));
                    let what = match absent.role {
                        Role::Voter => "it was added and never started; it counts for the quorum",
                        Role::Learner => {
                            "it was added as a learner and never started; it does not count for the quorum, \
                             and by default etcd adds no other learner meanwhile"
                        }
                    };
                    findings.warning("member_unstarted", format!("member {id}"), what, fix);
                }
                AbsenceReason::NoUsableUrl => {
                    let https = self.config.cluster.scheme() == Scheme::Https;
                    let scheme = if https { "https" } else { "http" };
                    let what = "none of its client URLs can be used: Keyward does not reach it";
                    let fix = format!("restart it with --advertise-client-urls that begin with {scheme}://");
                    findings.error("member_without_address", format!("{} ({id})", absent.name), what, fix);
                }
                AbsenceReason::NotAllowed => {
                    let what = "no host of its client URLs is among cluster.allowed_hosts: Keyward does not \
                        reach it";
                    let fix = "add its host to cluster.allowed_hosts, or restart it with other \
                        --advertise-client-urls";
                    findings.error("member_without_address", format!("{} ({id})", absent.name), what, fix);
                }
            }
        }
        if self.members.peer_urls == PeerUrls::Refused {
            let fix = self.probe_fix(
                "set cluster.probe to a user (any, from 3.5.29 and 3.6.10 on; root in the patch before)",
            );
            findings.warning(
                "member_list_refused",
                "cluster",
                "MemberList is refused: members that are added are not found",
                fix,
            );
        }
    }

    /// Checks the recipients of the passwords and tokens sent to members.
    fn passwords(&self, findings: &mut DoctorFindings) {
        let cluster = &self.config.cluster;
        match &cluster.tls {
            Some(tls) if !tls.verifies_members() => {
                let what = "members are not verified: whoever answers at their addresses, or stands between, \
                            gets every password, token and value";
                let fix = "take insecure_skip_verify out, and set cluster.tls.ca, or pinned_sha256 to the \
                           SHA-256 of each member's certificate";
                findings.error("members_unverified", "cluster.tls.insecure_skip_verify", what, fix);
            }
            None if self.auth == AuthSetting::On && cluster.discovery.allowed_hosts.is_empty() => {
                let configured = |member: &&Arc<Member>| {
                    cluster.endpoints.iter().any(|one| one.host == member.endpoint.host)
                };
                let found = self.members.members.iter().filter(|member| !configured(member));
                let hosts: BTreeSet<&str> = found.map(|member| member.endpoint.host.as_str()).collect();
                if !hosts.is_empty() {
                    let hosts = Vec::from_iter(hosts).join(", ");
                    let what = format!(
                        "passwords go in plaintext to hosts that only the member list names: {hosts}"
                    );
                    let fix = "TLS towards members, or name these hosts in cluster.allowed_hosts";
                    findings.warning("plaintext_passwords", "cluster.allowed_hosts", what, fix);
                }
            }
            Some(_) | None => {}
        }
    }

    /// Checks auth, and Keyward's own user.
    fn identities(&self, findings: &mut DoctorFindings) {
        let config = self.config;
        let shows = config.cluster.tls.as_ref().is_some_and(|tls| tls.identity.is_some());
        self.passwords(findings);
        match self.auth {
            AuthSetting::Off => {
                let fix = "etcdctl user add root && etcdctl user grant-role root root && etcdctl auth enable";
                findings.warning(
                    "auth_off",
                    "cluster",
                    "auth is off: whoever reaches etcd or Keyward may do all",
                    fix,
                );
            }
            AuthSetting::On if config.cluster.probe.is_none() && !shows => {
                let what = "auth is on, and Keyward has no user to ask for Status and MemberList";
                let fix = "etcdctl user add keyward, then cluster.probe";
                findings.warning("no_probe_user", "cluster.probe", what, fix);
            }
            AuthSetting::On if self.members.is_probe_login_refused => {
                let what = "etcd refuses its name and password: members tell Keyward less than they could";
                let fix = "put the user's present password into cluster.probe.password_file (the file is \
                           followed), or set it: etcdctl user passwd";
                findings.error("probe_login_refused", "cluster.probe", what, fix);
            }
            AuthSetting::On => {}
            AuthSetting::Unknown => findings.unseen("whether auth is on: no member has told".to_owned()),
        }
    }

    /// Checks the session keys and the persistence of revocations.
    fn kept_state(&self, findings: &mut DoctorFindings) {
        let config = self.config;
        if config.session.key_source == KeySource::Random {
            let what =
                "no key file: a restart logs all clients out, and replicas do not take each other's sessions";
            findings.warning(
                "session_keys",
                "session.key_files",
                what,
                "keyward keygen FILE, the same on every replica",
            );
        }
        match config.revocation.keep {
            RevocationPersistence::Memory => {
                let what = "a restart forgets who was revoked, and no other replica knows";
                let fix = "set revocation.etcd_prefix, or revocation.state_file where there is one replica";
                findings.warning("revocation_forgotten", "revocation", what, fix);
            }
            RevocationPersistence::Etcd { .. } if self.auth == AuthSetting::Off => {
                let what = "auth is off: whoever reaches etcd can undo a revocation";
                findings.warning("revocation_open", "revocation.etcd_prefix", what, "turn auth on");
            }
            RevocationPersistence::Etcd { .. } | RevocationPersistence::File(_) => {}
        }
        if !self.revocations_known {
            let why = self.revocations_unread.map(|why| format!(" ({why})")).unwrap_or_default();
            let what = format!("the revocations are not known{why}: logins and calls are refused");
            let fix = readiness::revocation_fix(config, self.members.serving());
            findings.error("revocation_unknown", "revocation", what, fix);
        }
    }

    /// Checks for etcd users with the role `root` reached by a rule without an exact peer.
    fn roots(&self, findings: &mut DoctorFindings) {
        let RootHolders { found, untold, unlisted } = self.root_holders;
        for user in found {
            let what = "this user has the role root, and a [[map]] rule, or mapping.default, leads to it \
                        that spells no peer out: whoever matches may do everything";
            let fix = format!("spell the peer out in the rule, or etcdctl user revoke-role {user} root");
            findings.warning("root_by_pattern", format!("user {user}"), what, fix);
        }
        // Keyward's own user needs no role, and etcd tells the roles of another user to root alone.
        let look = "; look as root, with etcdctl user get USER for each of etcdctl user list";
        if !untold.is_empty() {
            let names: Vec<_> = untold.iter().map(UserName::as_str).collect();
            let names = names.join(", ");
            findings.unseen(format!(
                "whether these users of rules for many peers have the role root: {names}{look}"
            ));
        }
        if *unlisted {
            findings.unseen(format!(
                "which users of rules with as = \"same\" have the role root: cluster.probe may not list \
                 users, or there are too many{look}"
            ));
        }
    }

    /// The remedy for a request refused to the probing user: the login comes first if etcd refuses it.
    fn probe_fix(&self, otherwise: &'static str) -> &'static str {
        if self.members.is_probe_login_refused && self.config.cluster.probe.is_some() {
            "mend the password of cluster.probe: see probe_login_refused"
        } else {
            otherwise
        }
    }

    fn examined_answers(&self, member: MemberId) -> Option<&MemberHealthFigures> {
        self.examined.iter().find(|(id, _)| *id == member)?.1.as_ref()
    }
}

/// Findings and unreadable inputs so far.
#[derive(Default)]
struct DoctorFindings {
    found: Vec<Finding>,
    unseen: Vec<String>,
}

impl DoctorFindings {
    fn add(
        &mut self,
        severity: Severity,
        check: &str,
        about: impl Into<String>,
        what: impl Into<String>,
        fix: impl Into<String>,
    ) {
        let (about, what, fix) = (about.into(), what.into(), fix.into());
        self.found.push(Finding { severity, check: check.to_owned(), about, what, fix });
    }

    fn error(
        &mut self,
        check: &str,
        about: impl Into<String>,
        what: impl Into<String>,
        fix: impl Into<String>,
    ) {
        self.add(Severity::Error, check, about, what, fix);
    }

    fn warning(
        &mut self,
        check: &str,
        about: impl Into<String>,
        what: impl Into<String>,
        fix: impl Into<String>,
    ) {
        self.add(Severity::Warning, check, about, what, fix);
    }

    fn note(
        &mut self,
        check: &str,
        about: impl Into<String>,
        what: impl Into<String>,
        fix: impl Into<String>,
    ) {
        self.add(Severity::Note, check, about, what, fix);
    }

    fn unseen(&mut self, what: String) {
        self.unseen.push(what);
    }

    fn into_report(self) -> DoctorReport {
        let Self { mut found, unseen } = self;
        found.sort_by(|one, other| rank(one).cmp(&rank(other)));
        DoctorReport { findings: found, unseen }
    }
}

/// The order of the report: the worst first, and a cause before the findings that follow from the cause.
fn rank(finding: &Finding) -> (Severity, bool, &Finding) {
    (finding.severity, !CAUSES.contains(&&*finding.check), finding)
}

/// The word by which commands name a member.
fn command_name(member: &Member) -> String {
    if member.name.is_empty() { member.id.to_string() } else { member.name.to_string() }
}

fn name_of(member: &Member) -> String {
    if member.name.is_empty() {
        format!("member {}", member.id)
    } else {
        format!("{} ({})", member.name, member.id)
    }
}

#[cfg(test)]
mod tests;
