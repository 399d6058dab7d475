//! Everything known about the etcd cluster, as one immutable snapshot read by every shard.
//!
//! Owns: the published snapshot ([`Membership`]), the paths by which the data path reports a failure at once
//! ([`Member::suspect`], [`HintSender`]), and the auth state of the cluster ([`SharedAuthSetting`]). Must not
//! know: how members are probed.
//! Invariants: only a ready voter of the pinned cluster takes traffic; a suspected member takes no traffic
//! until a probe begun after the suspicion has succeeded; sending a hint never blocks.

use std::collections::HashMap;
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tonic::transport::Channel;

use crate::alarm_sighting::AlarmSighting;
use crate::fitness::member_load::MemberLoad;
use crate::fitness::quarantine::{MaintenanceWindow, Suspicion};
use crate::fitness::store_status::StoreStatus;
use crate::open_holes::OpenHoles;
use crate::outage_state::{Outage, OutageChanges};
use crate::version::{Version, VersionTraits};
use keyward_config::Endpoint;
use keyward_etcd::identity::{ClusterId, MemberId, Revision};

pub use crate::change_notifications::{ChangeReceiver, ChangeSender, NoMoreChanges};
pub use crate::fitness::{Fitness, Readiness, UnreadyReason};

/// Capacity of the hint channel to the control task. Each hint requests a probe; hints beyond this capacity
/// are dropped, because the queued hints already request the same probes.
const HINTS: usize = 64;

/// A snapshot of the cluster at one moment.
#[derive(Clone, Debug)]
pub struct Membership {
    /// The cluster served by Keyward; `None` until a member has named its cluster.
    pub cluster: Option<ClusterId>,
    /// The leader named by the members of the highest term, reachable or not.
    pub leader: Option<MemberId>,
    /// The highest raft term seen; 0 if no term is known.
    pub term: u64,
    /// The members with an address, by id.
    pub members: Vec<Arc<Member>>,
    /// Members of the cluster's list without a usable address.
    pub absent: Vec<AbsentMember>,
    /// Addresses at which a different cluster answers. Keyward never uses them.
    pub foreign: Vec<ForeignAddress>,
    /// Addresses without a known member, and the cause.
    pub unanswered: Vec<UnansweredAddress>,
    /// The peer URLs of the members.
    pub peer_urls: PeerUrls,
    /// True if etcd refuses the name and password of the probing user (`cluster.probe`).
    pub is_probe_login_refused: bool,
    /// When a member of the cluster with a known leader last answered a probe; before the first answer, when
    /// probing began.
    pub confirmed: Instant,
    /// The outage state of the cluster. [`publish`](crate::cluster_outage::publish) sets this
    /// field.
    pub outage: Outage,
    /// The published holes in etcd's access control that are open at some member. `publish` sets this field
    /// too.
    pub holes: OpenHoles,
}

/// One member and how to reach it.
#[derive(Clone, Debug)]
pub struct Member {
    /// The id reported by the member itself.
    pub id: MemberId,
    /// The name in the member list; empty if no list could be read.
    pub name: Arc<str>,
    /// The address used for connections: a configured endpoint if one leads to the member, else one of its
    /// client URLs.
    pub endpoint: Endpoint,
    /// The resolved IP address at which the member last answered; `None` if the endpoint's host is an IP
    /// address or was never resolved.
    pub resolved_ip: Option<IpAddr>,
    /// Voter or learner.
    pub role: Role,
    /// The version reported by the member itself; `None` before its first answer.
    pub version: Option<Version>,
    /// Ready or not to take traffic, as of the last probe.
    pub readiness: Readiness,
    /// The raft term in the member's last answer; 0 if the member reported no term.
    pub term: u64,
    /// State of the member's store and raft log in its last answer; `None` if the member hides this state
    /// from the probing user.
    pub store_status: Option<Arc<StoreStatus>>,
    /// The client URLs in the member list.
    pub client_urls: Arc<[String]>,
    /// The suspicion against the member, shared by all snapshots with the member at this address.
    pub suspicion: Arc<Suspicion>,
    /// The member's maintenance window, shared by all snapshots.
    pub maintenance: Arc<MaintenanceWindow>,
    /// The member's load and health counters, shared by all snapshots.
    pub load: Arc<MemberLoad>,
}

/// The target of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ConnectionTarget {
    /// The IP address, resolved or written as the endpoint's host; `None` if the host is a name without a
    /// known address.
    pub ip: Option<IpAddr>,
    /// The port.
    pub port: u16,
}

/// Voter or learner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The member votes.
    Voter,
    /// The member only follows, and refuses nearly every call.
    Learner,
}

impl Role {
    /// The role, for the log.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Voter => "voter",
            Self::Learner => "learner",
        }
    }
}

/// A listed member without a usable address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AbsentMember {
    /// The id in the member list.
    pub id: MemberId,
    /// The name in the member list; empty for a member that was never started.
    pub name: Arc<str>,
    /// The role in the member list.
    pub role: Role,
    /// Why the member has no address.
    pub why: AbsenceReason,
}

/// Why a listed member has no address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AbsenceReason {
    /// The member was added and never started: no name, no client URLs.
    Unstarted,
    /// No client URL is usable: every scheme differs from the scheme of the configured endpoints, or no URL
    /// is listed.
    NoUsableUrl,
    /// The hosts of the client URLs are not among `cluster.allowed_hosts`.
    NotAllowed,
}

impl AbsenceReason {
    /// The reason, as the end of a sentence about the member.
    #[must_use]
    pub fn text(self) -> &'static str {
        match self {
            Self::Unstarted => "was added and never started",
            Self::NoUsableUrl => "has no client URL of the configured endpoints' scheme",
            Self::NotAllowed => "no host of its client URLs is among cluster.allowed_hosts",
        }
    }
}

/// An address without a known member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnansweredAddress {
    /// The endpoint probed. For an SRV record that should name endpoints: the record, with port 0.
    pub endpoint: Endpoint,
    /// The IP address probed, among the addresses of the endpoint's name; `None` if the host is an IP address
    /// or was not resolved.
    pub at: Option<IpAddr>,
    /// The kind of fault.
    pub trouble: AddressFault,
    /// The fault as worded by its source (DNS, TLS, the connector). For operators; contains no secret.
    pub why: Arc<str>,
}

/// The kind of fault at an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddressFault {
    /// The name does not resolve.
    Name,
    /// DNS names the address, and its host is not among `cluster.allowed_hosts`: Keyward sends nothing to the
    /// address.
    NotAllowed,
    /// No connection could be made.
    Connection,
    /// A connection, but no TLS session: the certificate is for a different name, from an unknown authority
    /// or expired, or the member rejected Keyward's certificate.
    Tls,
    /// A connection, but no answer in time: the process hangs.
    Hung,
    /// The connection broke, or the member is starting or stopping.
    NoAnswer,
    /// An answer, but the probing user learned neither the member id nor the leader.
    Unidentified,
}

/// An address at which a different cluster answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForeignAddress {
    /// The address.
    pub endpoint: Endpoint,
    /// The cluster answering at the address.
    pub cluster: ClusterId,
}

/// The peer URLs of the members, as far as the member list is known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum PeerUrls {
    /// No member list was read yet.
    #[default]
    Unknown,
    /// etcd refuses the member list to the probing user.
    Refused,
    /// The peer URLs of all listed members.
    Listed(Arc<[MemberPeerUrls]>),
}

/// The peer URLs of one member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberPeerUrls {
    /// The member's id.
    pub member: MemberId,
    /// The member's name; empty for a member that was never started.
    pub name: Arc<str>,
    /// The member's peer URLs.
    pub urls: Arc<[String]>,
}

/// The calls that can be served now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServingState {
    /// At least one voter is ready, and the leader is known.
    Ready,
    /// No member has answered yet.
    NothingKnown,
    /// No voter is ready, and at least one voter answers without a leader. Only calls answered from a
    /// member's own store are served.
    LocalReadsOnly,
    /// No voter is ready, and no voter answers.
    NoReadyVoter,
    /// Voters are ready, but the leader is unknown.
    NoKnownLeader,
}

impl Membership {
    /// The snapshot before the first answer.
    #[must_use]
    pub fn unknown(now: Instant) -> Self {
        Self {
            cluster: None,
            leader: None,
            term: 0,
            members: Vec::new(),
            absent: Vec::new(),
            foreign: Vec::new(),
            unanswered: Vec::new(),
            peer_urls: PeerUrls::Unknown,
            is_probe_login_refused: false,
            confirmed: now,
            outage: Outage::Unreachable { since: now },
            holes: OpenHoles::default(),
        }
    }

    /// The members that may take traffic now; suspected members and members in a maintenance window are left
    /// out.
    pub fn ready_voters(&self) -> impl Iterator<Item = &Arc<Member>> {
        self.members.iter().filter(|member| member.is_ready())
    }

    /// The voters of this cluster that answer and see no leader; suspected members are left out. These voters
    /// answer from their own store.
    pub fn leaderless_voters(&self) -> impl Iterator<Item = &Arc<Member>> {
        self.members.iter().filter(|member| member.is_leaderless_voter())
    }

    /// The leader, if an operator has paused the leader: calls that only the leader can serve still go there.
    #[must_use]
    pub fn paused_leader(&self) -> Option<&Arc<Member>> {
        let serves = |member: &&Arc<Member>| {
            member.maintenance.is_paused()
                && member.readiness == Readiness::Ready
                && !member.suspicion.is_raised()
        };
        self.get(self.leader?).filter(serves)
    }

    /// The leader, if the leader may take traffic now.
    #[must_use]
    pub fn leader(&self) -> Option<&Arc<Member>> {
        self.get(self.leader?).filter(|member| member.is_ready())
    }

    /// A member's lag: the number of raft entries not applied by the member, but applied by the most advanced
    /// ready member. `None` if either member does not report its applied index. Every use of the word "lag"
    /// has this meaning.
    #[must_use]
    pub fn lag(&self, member: &Member) -> Option<u64> {
        let serve = self.members.iter().filter(|member| member.readiness == Readiness::Ready);
        let furthest = serve.filter_map(|member| Some(member.store_status.as_ref()?.applied)).max()?;
        Some(furthest.saturating_sub(member.store_status.as_ref()?.applied))
    }

    /// The member with this id, ready or not.
    #[must_use]
    pub fn get(&self, id: MemberId) -> Option<&Arc<Member>> {
        self.members.iter().find(|member| member.id == id)
    }

    /// The calls that can be served now; the source of the `/readyz` answer.
    #[must_use]
    pub fn serving(&self) -> ServingState {
        if self.members.is_empty() {
            ServingState::NothingKnown
        } else if self.ready_voters().next().is_none() {
            let local = self.leaderless_voters().next().is_some();
            if local { ServingState::LocalReadsOnly } else { ServingState::NoReadyVoter }
        } else if self.leader.is_none() {
            ServingState::NoKnownLeader
        } else {
            ServingState::Ready
        }
    }
}

impl Membership {
    /// True if an alarm may be raised as far as the members tell: one tells an alarm in its Status, or one
    /// that takes calls hides its Status.
    #[must_use]
    pub fn may_have_alarm(&self) -> bool {
        self.members.iter().any(|member| match &member.store_status {
            Some(status) => status.errors.iter().any(|error| error.contains("alarm:")),
            None => member.is_ready(),
        })
    }

    /// The holes in etcd's access control open at any member in use.
    #[must_use]
    pub fn open_holes(&self) -> OpenHoles {
        let in_use = self.members.iter().filter(|member| member.is_in_use());
        OpenHoles::of(in_use.map(|member| member.traits()))
    }
}

impl Member {
    /// True if the member takes calls or may take calls before the next snapshot: a suspicion or a restart
    /// may end. A member that never told its version counts only while the member takes calls, else a dead
    /// member of a patched cluster would count as vulnerable.
    fn is_in_use(&self) -> bool {
        let takes_calls =
            matches!(self.readiness, Readiness::Ready | Readiness::NotReady(UnreadyReason::NoLeader));
        takes_calls || (self.version.is_some() && self.is_ours())
    }

    /// True if the member may take traffic now. The shared suspicion is part of the answer: call this at
    /// every choice.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.obstacle().is_none()
    }

    /// The member's fitness at `now`, by the last probe and by the state shared with all other snapshots.
    #[must_use]
    pub fn fitness(&self, now: Instant) -> Fitness {
        self.obstacle().unwrap_or_else(|| Fitness::by_load(&self.load, now))
    }

    fn obstacle(&self) -> Option<Fitness> {
        Fitness::obstacle(self.readiness, &self.suspicion, &self.maintenance)
    }

    /// True if the member votes, answers, and sees no leader now.
    #[must_use]
    pub fn is_leaderless_voter(&self) -> bool {
        self.role == Role::Voter
            && self.obstacle() == Some(Fitness::Unready(UnreadyReason::NoLeader))
            && !self.suspicion.is_raised()
    }

    /// Takes the member out of every shard's choice at once, until a probe begun later has succeeded. Call
    /// this after a connection could not be made or was lost, then send [`MembershipHint::Unreachable`]. The
    /// suspicion is bound to the member at this address: if the member was found at a new address meanwhile,
    /// the new entry is not suspected.
    pub fn suspect(&self) {
        self.suspicion.raise();
        self.load.begin_slow_start();
    }

    /// The highest revision known to be applied by the member, from its answers to calls and probes.
    #[must_use]
    pub fn known_revision(&self) -> Revision {
        let told = self.store_status.as_ref().map_or(0, |store_status| store_status.revision);
        self.load.revision().max(Revision(told))
    }

    /// The target of the member's connections. A connection to a different target no longer belongs to the
    /// member.
    #[must_use]
    pub fn connection_target(&self) -> ConnectionTarget {
        let literal = || self.endpoint.host.parse().ok();
        ConnectionTarget { ip: self.resolved_ip.or_else(literal), port: self.endpoint.port }
    }

    /// True if the member is known to belong to the served cluster. Keyward sends nothing to a member of a
    /// different cluster, even if a client names that member.
    #[must_use]
    pub fn is_ours(&self) -> bool {
        !matches!(
            self.readiness,
            Readiness::NotReady(
                UnreadyReason::ForeignCluster
                    | UnreadyReason::UnverifiedCluster
                    | UnreadyReason::Unlisted
                    | UnreadyReason::Unprobed
            )
        )
    }

    /// False if the member list is known and lacks the member.
    #[must_use]
    pub fn is_listed(&self) -> bool {
        self.readiness != Readiness::NotReady(UnreadyReason::Unlisted)
    }

    /// The behaviour of the member's version.
    #[must_use]
    pub fn traits(&self) -> VersionTraits {
        self.version.map_or(VersionTraits::CAUTIOUS, Version::traits)
    }
}

/// An observation of the data path for the control task to verify now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MembershipHint {
    /// A connection to the member could not be made or was lost.
    Unreachable(MemberId),
    /// The member refused a leader-only call.
    NotLeader(MemberId),
    /// A response header carried this raft term.
    LeaderMoved {
        /// The term.
        term: u64,
    },
    /// A member was added, removed, moved or promoted through Keyward.
    ListChanged,
    /// A call without a token was refused because its user name is empty.
    AuthOn,
    /// A login was answered "authentication is not enabled".
    AuthOff,
}

/// Sender of hints to the control task. Cheap to clone.
#[derive(Clone, Debug)]
pub struct HintSender(mpsc::Sender<MembershipHint>);

impl HintSender {
    /// Creates the hint channel.
    #[must_use]
    pub fn channel() -> (Self, mpsc::Receiver<MembershipHint>) {
        let (sender, receiver) = mpsc::channel(HINTS);
        (Self(sender), receiver)
    }

    /// Sends a hint to the control task without blocking. A hint for a full channel is dropped: the queued
    /// hints already request the same probes.
    pub fn send(&self, hint: MembershipHint) {
        if self.0.try_send(hint).is_err() {
            tracing::trace!(?hint, "hint dropped");
        }
    }
}

/// The auth setting of the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AuthSetting {
    /// No member has told yet.
    Unknown,
    /// The cluster checks credentials.
    On,
    /// The cluster checks no credentials: a token must not be sent, and a login proves nothing.
    Off,
}

/// The auth setting of the cluster, shared by every shard. Writers: the control task after asking a member,
/// and the data path after an answer showed the setting. The data path also sends the [`MembershipHint`], so
/// that the control task verifies the setting.
#[derive(Debug, Default)]
pub struct SharedAuthSetting(AtomicU8);

impl SharedAuthSetting {
    /// The last known setting.
    #[must_use]
    pub fn now(&self) -> AuthSetting {
        match self.0.load(Ordering::Relaxed) {
            1 => AuthSetting::On,
            2 => AuthSetting::Off,
            _ => AuthSetting::Unknown,
        }
    }

    /// Publishes a new setting.
    pub fn set(&self, auth: AuthSetting) {
        let value = match auth {
            AuthSetting::Unknown => 0,
            AuthSetting::On => 1,
            AuthSetting::Off => 2,
        };
        self.0.store(value, Ordering::Relaxed);
    }
}

/// The control runtime's channel to every member that has answered, for logins and similarly rare calls.
pub type ControlChannels = Arc<ArcSwap<HashMap<MemberId, Channel>>>;

/// Everything published by the control task, and the hint channel to the control task. Cheap to clone; may be
/// sent to any thread.
#[derive(Clone)]
pub struct MembersHandle {
    /// The last snapshot. Load the snapshot once per call.
    pub snapshot: Arc<ArcSwap<Membership>>,
    /// Notified when the snapshot or the auth state changed in more than times and raft indexes.
    pub changes: ChangeReceiver,
    /// Notified when the snapshot's [`Outage`] changed.
    pub outages: Arc<OutageChanges>,
    /// Hints to the control task.
    pub hints: HintSender,
    /// The auth setting of the cluster.
    pub auth: Arc<SharedAuthSetting>,
    /// The alarms that answers have shown.
    pub alarms: Arc<AlarmSighting>,
}

impl MembersHandle {
    /// A handle publishing `membership`, with unknown auth state; also returns the sender of changes and the
    /// receiver of hints.
    #[must_use]
    pub fn publishing(mut membership: Membership) -> (Self, ChangeSender, mpsc::Receiver<MembershipHint>) {
        let (hints, hinted) = HintSender::channel();
        let (changed, changes) = ChangeReceiver::channel();
        membership.outage = membership.outage.next(&membership.members, Instant::now());
        membership.holes = membership.open_holes();
        let snapshot = Arc::new(ArcSwap::from_pointee(membership));
        let (outages, auth, alarms) = Default::default();
        (Self { snapshot, changes, outages, hints, auth, alarms }, changed, hinted)
    }

    /// Stores the auth setting shown by an answer, for all shards at once, and asks the control task to
    /// verify it. An unchanged setting sends no hint: with auth on, every call without a token shows the
    /// setting.
    pub fn record_auth(&self, auth: AuthSetting) {
        if self.auth.now() == auth {
            return;
        }
        self.auth.set(auth);
        self.hints.send(if auth == AuthSetting::Off {
            MembershipHint::AuthOff
        } else {
            MembershipHint::AuthOn
        });
    }

    /// Notifies the holders of streams that a maintenance window has begun or ended.
    pub fn maintenance_changed(&self) {
        self.changes.announce();
    }

    /// Waits for `pause`, or until the published state changes, if that is sooner. Cancel-safe.
    pub async fn pause_or_change(&self, pause: Duration) {
        let mut changes = self.changes.clone();
        changes.mark_unchanged();
        tokio::select! {
            biased; // No arm has priority; the fixed order makes runs reproducible.
            () = tokio::time::sleep(pause) => {}
            Ok(()) = changes.changed() => {}
        }
    }
}

impl fmt::Display for ServingState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ready => "ready",
            Self::NothingKnown => "no member has answered yet",
            Self::LocalReadsOnly => "no voting member has a leader, local reads only",
            Self::NoReadyVoter => "no voting member is ready",
            Self::NoKnownLeader => "the leader is not known",
        })
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;
    use crate::test_member::member;
    use keyward_etcd::rpc::fatal_request::Weaknesses;

    fn ready_ids(membership: &Membership) -> Vec<u64> {
        membership.ready_voters().map(|member| member.id.0).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn a_suspected_member_is_out_of_every_snapshot_until_a_later_probe() {
        let mut membership = Membership::unknown(Instant::now());
        membership.leader = Some(MemberId(1));
        membership.members = vec![
            member(1, Readiness::Ready),
            member(2, Readiness::Ready),
            member(3, Readiness::NotReady(UnreadyReason::NoLeader)),
        ];
        let older = membership.clone();
        assert_eq!(ready_ids(&membership), [1, 2]);
        assert_eq!(membership.leader().map(|member| member.id), Some(MemberId(1)));

        let suspicion = Arc::clone(&membership.members[0].suspicion);
        let before = suspicion.mark();
        older.members[0].suspect();
        assert_eq!(ready_ids(&membership), [2]);
        assert!(membership.leader().is_none());

        suspicion.clear(before);
        assert_eq!(ready_ids(&membership), [2], "a probe that began before the suspicion proves nothing");
        suspicion.clear(suspicion.mark());
        assert_eq!(ready_ids(&membership), [1, 2]);
    }

    #[tokio::test(start_paused = true)]
    async fn serving_needs_a_ready_voter_and_a_known_leader() {
        let mut membership = Membership::unknown(Instant::now());
        assert_eq!(membership.serving(), ServingState::NothingKnown);
        membership.members = vec![member(1, Readiness::NotReady(UnreadyReason::Unreachable))];
        assert_eq!(membership.serving(), ServingState::NoReadyVoter);
        membership.members.push(member(2, Readiness::Ready));
        assert_eq!(membership.serving(), ServingState::NoKnownLeader);
        membership.leader = Some(MemberId(1));
        assert_eq!(
            membership.serving(),
            ServingState::Ready,
            "the leader itself need not be reachable from here"
        );
        membership.members[1].suspect();
        assert_eq!(membership.serving(), ServingState::NoReadyVoter);
    }

    #[tokio::test]
    async fn hints_past_the_bound_are_dropped_and_block_nobody() {
        let (hints, mut waiting) = HintSender::channel();
        for _ in 0..HINTS + 5 {
            hints.send(MembershipHint::AuthOn);
        }
        let mut count = 0;
        while waiting.try_recv().is_ok() {
            count += 1;
        }
        assert_eq!(count, HINTS);
    }

    #[tokio::test]
    async fn changes_wake_everybody_in_order_and_end_with_their_sender() {
        let (sender, changes) = ChangeReceiver::channel();
        let order = std::cell::RefCell::new(Vec::new());
        let wait = async |name: usize| {
            let mut changes = changes.clone();
            assert_eq!(changes.changed().await, Ok(()));
            order.borrow_mut().push(name);
            assert_eq!(changes.changed().await, Err(NoMoreChanges));
        };
        let mut waiting: futures_util::stream::FuturesUnordered<_> = (0..20).map(wait).collect();
        assert!(futures_util::StreamExt::next(&mut waiting).now_or_never().is_none());
        sender.tell();
        assert!(futures_util::StreamExt::next(&mut waiting).now_or_never().is_none());
        // FuturesUnordered polls the newest future first, so the futures began to wait in reverse order.
        let began: Vec<usize> = order.borrow().clone();
        assert!(began.is_sorted() || began.iter().rev().is_sorted(), "{began:?}");
        assert_eq!(began.len(), 20);
        drop(sender);
        assert_eq!(futures_util::StreamExt::collect::<Vec<()>>(waiting).await.len(), 20);
        let mut late = changes.clone();
        assert_eq!(late.changed().await, Ok(()), "what was told before counts");
        assert_eq!(late.changed().await, Err(NoMoreChanges));
    }

    #[test]
    fn auth_is_unknown_until_told() {
        let auth = SharedAuthSetting::default();
        assert_eq!(auth.now(), AuthSetting::Unknown);
        for state in [AuthSetting::On, AuthSetting::Off, AuthSetting::Unknown] {
            auth.set(state);
            assert_eq!(auth.now(), state);
        }
    }

    fn holes(members: Vec<Arc<Member>>) -> OpenHoles {
        Membership { members, ..Membership::unknown(Instant::now()) }.open_holes()
    }

    fn of_version(version: &str, readiness: Readiness) -> Arc<Member> {
        let mut member = Arc::unwrap_or_clone(member(1, readiness));
        member.version = Version::parse(version).ok();
        Arc::new(member)
    }

    #[test]
    fn one_vulnerable_member_is_enough() {
        let patched = of_version("3.7.3", Readiness::Ready);
        assert_eq!(holes(vec![]), OpenHoles::default());
        assert_eq!(holes(vec![Arc::clone(&patched)]), OpenHoles::default());
        let all = holes(vec![Arc::clone(&patched), of_version("3.5.1", Readiness::Ready)]);
        assert!(all.unguarded_methods && all.unchecked_txns && all.told_lease_keys && all.unchecked_watches);
        let between = holes(vec![patched, of_version("3.5.29", Readiness::Ready)]);
        let weaknesses = Weaknesses { sort_options: true, split_txns: true, lost_leases: false };
        let expected = OpenHoles {
            unchecked_txns: true,
            unchecked_watches: true,
            unchecked_under_alarm: true,
            weaknesses,
            ..OpenHoles::default()
        };
        assert_eq!(between, expected);
        assert!(between.needs_probe());
        let watches = holes(vec![of_version("3.5.30", Readiness::Ready)]);
        assert!(watches.unchecked_watches && !watches.needs_probe());
        let split = Weaknesses { split_txns: true, ..Weaknesses::default() };
        assert_eq!(holes(vec![of_version("3.6.16", Readiness::Ready)]).weaknesses, split);
    }

    #[test]
    fn a_version_counts_while_its_member_may_take_calls() {
        let silent = Readiness::NotReady(UnreadyReason::Unprobed);
        let stopped = Readiness::NotReady(UnreadyReason::NoLeader);
        assert_eq!(holes(vec![of_version("unknown", silent)]), OpenHoles::default());
        assert!(holes(vec![of_version("unknown", Readiness::Ready)]).needs_probe());
        assert!(holes(vec![of_version("unknown", stopped)]).needs_probe());
        assert!(holes(vec![of_version("3.4.23", stopped)]).needs_probe());
        let foreign = Readiness::NotReady(UnreadyReason::ForeignCluster);
        assert_eq!(holes(vec![of_version("3.4.23", foreign)]), OpenHoles::default());
    }
}
