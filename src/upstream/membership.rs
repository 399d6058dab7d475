//! What is known about the cluster, as one immutable value that every shard reads.
//!
//! Owns: the published snapshot ([`Membership`]), the ways by which the data path tells at once what it saw
//! ([`Member::suspect`], [`Hints`]), and whether auth is on ([`AuthState`]). Must not know: how any of it was found.
//! Invariants: only a ready voter of the pinned cluster takes traffic; a suspected member takes none until a probe that
//! began after the suspicion has succeeded; a hint never blocks its sender.

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

use crate::config::Endpoint;
use crate::identity::{ClusterId, MemberId, Revision};
use crate::upstream::conduct::Conduct;
use crate::upstream::outage::{Outage, OutageChanges};
use crate::upstream::standing::{Rest, Suspicion};
use crate::upstream::version::{Traits, Version};
use crate::upstream::vitals::Vitals;

pub use crate::upstream::changes::{Changes, ChangesSender, NoMoreChanges};

/// Hints that wait for the control task. Each asks for a probe; past this many, the probes that are asked for already
/// tell the same, so that further ones are dropped.
const HINTS: usize = 64;

/// What is known about the cluster at one moment.
#[derive(Clone, Debug)]
pub struct Membership {
    /// The cluster that we serve; `None` until a member has told it.
    pub cluster: Option<ClusterId>,
    /// The leader that the members of the highest term agree on, whether or not it can be reached.
    pub leader: Option<MemberId>,
    /// The highest raft term seen; 0 where none is known.
    pub term: u64,
    /// The members that have an address, by id.
    pub members: Vec<Arc<Member>>,
    /// Members of the cluster's list without an address that we may use.
    pub absent: Vec<Absent>,
    /// Addresses behind which another cluster answers. Never used.
    pub foreign: Vec<Foreign>,
    /// Addresses where nobody is known to be, and why.
    pub unanswered: Vec<Unanswered>,
    /// Where members speak to each other.
    pub peer_urls: PeerUrls,
    /// When a member of the cluster that sees a leader last answered a probe; before the first, when we began to ask.
    pub confirmed: Instant,
    /// Whether any member serves. [`publish`](crate::upstream::outage::publish) sets it.
    pub outage: Outage,
}

/// One member and how to reach it.
#[derive(Clone, Debug)]
pub struct Member {
    /// As it says itself.
    pub id: MemberId,
    /// As in the member list; empty where no list could be had.
    pub name: Arc<str>,
    /// Where it is spoken to: a configured endpoint where one leads to it, else one of its client URLs.
    pub endpoint: Endpoint,
    /// Where its endpoint's name led when it last answered there; `None` where the host is an address itself.
    pub at: Option<IpAddr>,
    /// Whether it votes.
    pub role: Role,
    /// As it says itself; `None` before it answered.
    pub version: Option<Version>,
    /// Whether it may take traffic, as of the last probe.
    pub readiness: Readiness,
    /// Its raft term when it last answered; 0 where it does not tell.
    pub term: u64,
    /// What it last said of its store and log; `None` where it does not tell the probing user.
    pub vitals: Option<Arc<Vitals>>,
    /// As in the member list.
    pub client_urls: Arc<[String]>,
    /// Shared by all snapshots that have it at this address.
    pub suspicion: Arc<Suspicion>,
    /// Shared by all snapshots.
    pub rest: Arc<Rest>,
    /// Shared by all snapshots.
    pub conduct: Arc<Conduct>,
}

/// Where a connection leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Spot {
    /// `None` where the host is an address itself.
    pub ip: Option<IpAddr>,
    /// The port.
    pub port: u16,
}

/// Whether a member votes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// It votes.
    Voter,
    /// It only follows, and refuses nearly every call.
    Learner,
}

/// Whether a member may take traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// It answers, has a leader, votes, and belongs to the pinned cluster.
    Ready,
    /// It may not.
    NotReady(Reason),
}

/// Why a member takes no traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// Not asked yet.
    Unprobed,
    /// It refuses connections, or does not answer.
    Unreachable,
    /// It answers, and sees no leader.
    NoLeader,
    /// It does not vote yet.
    Learner,
    /// Another cluster answers at its address.
    ForeignCluster,
    /// It does not tell the probing user of which cluster it is, and the configuration pins an id, or others have told theirs and
    /// their list does not have it.
    UnverifiedCluster,
    /// It is not in the member list: removed, or added a moment ago.
    Unlisted,
}

/// A member of the list that cannot be spoken to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Absent {
    /// As in the member list.
    pub id: MemberId,
    /// As in the member list; empty for one that was never started.
    pub name: Arc<str>,
    /// Why it has no address.
    pub why: Absence,
}

/// Why a listed member has no address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Absence {
    /// It was added and never started: no name, no client URLs.
    Unstarted,
    /// None of its client URLs may be used: another scheme than the configured endpoints', or no URL at all.
    NoUsableUrl,
    /// The hosts of its client URLs are not among `cluster.allowed_hosts`.
    NotAllowed,
}

/// An address where nobody is known to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unanswered {
    /// What was asked; for a record that should name endpoints, that one, with port 0.
    pub endpoint: Endpoint,
    /// At which address of its name; `None` where the host is one itself, or has none.
    pub at: Option<IpAddr>,
    /// What is wrong.
    pub trouble: Trouble,
    /// The same in the words of whoever said so. For operators; no secret.
    pub why: Arc<str>,
}

/// What is wrong with an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// Its name leads nowhere.
    Name,
    /// DNS names it, and its host is not among `cluster.allowed_hosts`: nothing is sent there.
    NotAllowed,
    /// No connection.
    Connection,
    /// A connection, and no TLS on it: the certificate is for another name, by another authority or too old, or ours is not
    /// taken.
    Tls,
    /// A connection, and no answer in time, or one that broke.
    NoAnswer,
    /// An answer that tells the probing user neither the member nor its leader.
    Unidentified,
}

/// An address behind which another cluster answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Foreign {
    /// The address.
    pub endpoint: Endpoint,
    /// The cluster that answers there.
    pub cluster: ClusterId,
}

/// Where members speak to each other, as far as the member list was had.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum PeerUrls {
    /// It was not had yet.
    #[default]
    Unknown,
    /// It is refused to the probing user.
    Refused,
    /// Of all its members.
    Listed(Arc<[Peering]>),
}

/// Where other members speak to one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peering {
    /// Which member.
    pub member: MemberId,
    /// Its name; empty for one that was never started.
    pub name: Arc<str>,
    /// Its peer URLs.
    pub urls: Arc<[String]>,
}

/// Whether calls can be served now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Serving {
    /// At least one ready voter, and the leader is known.
    Ready,
    /// No member has answered yet.
    NothingKnown,
    /// No voter is ready, and at least one answers without a leader: what a member answers from its own store is served, nothing
    /// else.
    LocalReadsOnly,
    /// No voter is ready, and none answers.
    NoReadyVoter,
    /// Voters are ready, and their leader is not known.
    NoKnownLeader,
}

impl Membership {
    /// Before anything is known.
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
            confirmed: now,
            outage: Outage::Unreachable { since: now },
        }
    }

    /// The members that may take traffic now, suspected ones left out.
    pub fn ready_voters(&self) -> impl Iterator<Item = &Arc<Member>> {
        self.members.iter().filter(|member| member.is_ready())
    }

    /// The voters of this cluster that answer and see no leader, suspected ones left out: they answer from their own store.
    pub fn leaderless_voters(&self) -> impl Iterator<Item = &Arc<Member>> {
        self.members.iter().filter(|member| member.is_leaderless_voter())
    }

    /// The leader, where it may take traffic now.
    #[must_use]
    pub fn leader(&self) -> Option<&Arc<Member>> {
        self.get(self.leader?).filter(|member| member.is_ready())
    }

    /// How far a member is behind: the raft entries that it has not applied and that the furthest of those that serve has. None where
    /// either does not tell. This is what "lag" means everywhere.
    #[must_use]
    pub fn lag(&self, member: &Member) -> Option<u64> {
        let serve = self.members.iter().filter(|member| member.readiness == Readiness::Ready);
        let furthest = serve.filter_map(|member| Some(member.vitals.as_ref()?.applied)).max()?;
        Some(furthest.saturating_sub(member.vitals.as_ref()?.applied))
    }

    /// The member of this id, ready or not.
    #[must_use]
    pub fn get(&self, id: MemberId) -> Option<&Arc<Member>> {
        self.members.iter().find(|member| member.id == id)
    }

    /// Whether calls can be served now: what `/readyz` is made of.
    #[must_use]
    pub fn serving(&self) -> Serving {
        if self.members.is_empty() {
            Serving::NothingKnown
        } else if self.ready_voters().next().is_none() {
            let local = self.leaderless_voters().next().is_some();
            if local { Serving::LocalReadsOnly } else { Serving::NoReadyVoter }
        } else if self.leader.is_none() {
            Serving::NoKnownLeader
        } else {
            Serving::Ready
        }
    }
}

impl Member {
    /// Whether it may take traffic now. Looks at the shared suspicion too: ask at every choice.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.readiness == Readiness::Ready && !self.suspicion.is_raised() && !self.rest.is_taken()
    }

    /// Whether it votes, answers, and sees no leader now.
    #[must_use]
    pub fn is_leaderless_voter(&self) -> bool {
        self.role == Role::Voter
            && self.readiness == Readiness::NotReady(Reason::NoLeader)
            && !self.suspicion.is_raised()
            && !self.rest.is_taken()
    }

    /// Takes the member out of every shard's choice at once, until a probe that begins later has succeeded. For a
    /// connection that could not be made or was lost; follow it with [`Hint::Unreachable`]. It is of the member at this
    /// address: of one that is found elsewhere by now it says nothing.
    pub fn suspect(&self) {
        self.suspicion.raise();
        self.conduct.begin_anew();
    }

    /// The highest revision that it is known to have applied, by its answers to anybody.
    #[must_use]
    pub fn known_revision(&self) -> Revision {
        let told = self.vitals.as_ref().map_or(0, |vitals| vitals.revision);
        self.conduct.revision().max(Revision(told))
    }

    /// Where its connections lead: those to elsewhere are not its any more.
    #[must_use]
    pub fn spot(&self) -> Spot {
        let literal = || self.endpoint.host.parse().ok();
        Spot { ip: self.at.or_else(literal), port: self.endpoint.port }
    }

    /// Whether it is known to be of our cluster: nothing is said to another, whoever names it.
    #[must_use]
    pub fn is_ours(&self) -> bool {
        !matches!(
            self.readiness,
            Readiness::NotReady(
                Reason::ForeignCluster | Reason::UnverifiedCluster | Reason::Unlisted | Reason::Unprobed
            )
        )
    }

    /// Whether the member list has it, as far as that is known.
    #[must_use]
    pub fn is_listed(&self) -> bool {
        self.readiness != Readiness::NotReady(Reason::Unlisted)
    }

    /// How its version behaves.
    #[must_use]
    pub fn traits(&self) -> Traits {
        self.version.map_or(Traits::CAUTIOUS, Version::traits)
    }
}

/// What the data path saw, and the control task should look into now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hint {
    /// A connection to the member could not be made or was lost.
    Unreachable(MemberId),
    /// The member refused a leader-only call.
    NotLeader(MemberId),
    /// A response header carried this raft term.
    LeaderMoved {
        /// The term.
        term: u64,
    },
    /// A member was added, removed, moved or promoted through us.
    ListChanged,
    /// A call without a token was refused for want of a user.
    AuthOn,
    /// A login was answered "authentication is not enabled".
    AuthOff,
}

/// Where hints go. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Hints(mpsc::Sender<Hint>);

impl Hints {
    /// A pair of ends.
    #[must_use]
    pub fn channel() -> (Self, mpsc::Receiver<Hint>) {
        let (sender, receiver) = mpsc::channel(HINTS);
        (Self(sender), receiver)
    }

    /// Tells the control task, never blocks. Where too many wait the hint is dropped: the probes that it would ask for
    /// are asked for already.
    pub fn send(&self, hint: Hint) {
        if self.0.try_send(hint).is_err() {
            tracing::trace!(?hint, "hint dropped");
        }
    }
}

/// Whether the cluster checks credentials.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Auth {
    /// No member has told yet.
    Unknown,
    /// It does.
    On,
    /// It does not: a token must not be sent, and a login proves nothing.
    Off,
}

/// Whether the cluster checks credentials, for every shard. Whoever is told by a member sets it: the control task when it
/// asked, the data path when an answer says so; the latter sends the [`Hint`] too, so that it is looked into.
#[derive(Debug, Default)]
pub struct AuthState(AtomicU8);

impl AuthState {
    /// As last found out.
    #[must_use]
    pub fn now(&self) -> Auth {
        match self.0.load(Ordering::Relaxed) {
            1 => Auth::On,
            2 => Auth::Off,
            _ => Auth::Unknown,
        }
    }

    /// Publishes what was found out.
    pub fn set(&self, auth: Auth) {
        let value = match auth {
            Auth::Unknown => 0,
            Auth::On => 1,
            Auth::Off => 2,
        };
        self.0.store(value, Ordering::Relaxed);
    }
}

/// The control runtime's channel to every member that has answered, for logins and other rare calls.
pub type ControlChannels = Arc<ArcSwap<HashMap<MemberId, Channel>>>;

/// Everything that the control task publishes, and the way to tell it something. Cheap to clone, goes to any thread.
#[derive(Clone)]
pub struct MembersHandle {
    /// The last snapshot. Load it once per call.
    pub snapshot: Arc<ArcSwap<Membership>>,
    /// Moves whenever the snapshot or the auth state changed in anything but times and indexes.
    pub changes: Changes,
    /// Moves when the snapshot's [`Outage`] is another one.
    pub outages: Arc<OutageChanges>,
    /// The way back.
    pub hints: Hints,
    /// Whether the cluster checks credentials.
    pub auth: Arc<AuthState>,
}

impl MembersHandle {
    /// One that shows this, before anything is known of auth; how changes are told, and where hints arrive.
    #[must_use]
    pub fn showing(mut membership: Membership) -> (Self, ChangesSender, mpsc::Receiver<Hint>) {
        let (hints, hinted) = Hints::channel();
        let (changed, changes) = Changes::channel();
        membership.outage = membership.outage.next(&membership.members, Instant::now());
        let snapshot = Arc::new(ArcSwap::from_pointee(membership));
        let outages = Arc::default();
        (Self { snapshot, changes, outages, hints, auth: Arc::default() }, changed, hinted)
    }

    /// Notes what an answer told of auth, for all shards at once, and has the members asked. What is known already wakes
    /// nobody: with auth on, every call without a token is told so.
    pub fn auth_is(&self, auth: Auth) {
        if self.auth.now() == auth {
            return;
        }
        self.auth.set(auth);
        self.hints.send(if auth == Auth::Off { Hint::AuthOff } else { Hint::AuthOn });
    }

    /// A member is to have rest, or has had it: whoever has streams there looks.
    pub fn rest_changed(&self) {
        self.changes.tell();
    }

    /// Waits for `pause`, or less if what is published changes meanwhile. Cancel-safe.
    pub async fn pause_or_change(&self, pause: Duration) {
        let mut changes = self.changes.clone();
        changes.mark_unchanged();
        tokio::select! {
            biased; // in any order, but always the same
            () = tokio::time::sleep(pause) => {}
            Ok(()) = changes.changed() => {}
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Unprobed => "not asked yet",
            Self::Unreachable => "unreachable",
            Self::NoLeader => "sees no leader",
            Self::Learner => "is a learner",
            Self::ForeignCluster => "another cluster answers at its address",
            Self::UnverifiedCluster => "its cluster id cannot be verified",
            Self::Unlisted => "is not in the member list",
        })
    }
}

impl fmt::Display for Serving {
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
pub(super) mod tests {
    use futures_util::FutureExt as _;

    use super::*;
    use crate::config::Scheme;

    /// A voter, as far as that matters.
    pub(in crate::upstream) fn member(id: u64, readiness: Readiness) -> Arc<Member> {
        Arc::new(Member {
            id: MemberId(id),
            name: "m".into(),
            endpoint: Endpoint { scheme: Scheme::Http, host: "127.0.0.1".into(), port: 1 },
            at: None,
            role: Role::Voter,
            version: None,
            readiness,
            term: 1,
            vitals: None,
            client_urls: Arc::default(),
            suspicion: Arc::default(),
            rest: Arc::default(),
            conduct: Arc::default(),
        })
    }

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
            member(3, Readiness::NotReady(Reason::NoLeader)),
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
        assert_eq!(membership.serving(), Serving::NothingKnown);
        membership.members = vec![member(1, Readiness::NotReady(Reason::Unreachable))];
        assert_eq!(membership.serving(), Serving::NoReadyVoter);
        membership.members.push(member(2, Readiness::Ready));
        assert_eq!(membership.serving(), Serving::NoKnownLeader);
        membership.leader = Some(MemberId(1));
        assert_eq!(membership.serving(), Serving::Ready, "the leader itself need not be reachable from here");
        membership.members[1].suspect();
        assert_eq!(membership.serving(), Serving::NoReadyVoter);
    }

    #[tokio::test]
    async fn hints_past_the_bound_are_dropped_and_block_nobody() {
        let (hints, mut waiting) = Hints::channel();
        for _ in 0..HINTS + 5 {
            hints.send(Hint::AuthOn);
        }
        let mut count = 0;
        while waiting.try_recv().is_ok() {
            count += 1;
        }
        assert_eq!(count, HINTS);
    }

    #[tokio::test]
    async fn changes_wake_everybody_in_order_and_end_with_their_sender() {
        let (sender, changes) = Changes::channel();
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
        // FuturesUnordered polls the newest first, so that they began to wait in that order.
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
        let auth = AuthState::default();
        assert_eq!(auth.now(), Auth::Unknown);
        for state in [Auth::On, Auth::Off, Auth::Unknown] {
            auth.set(state);
            assert_eq!(auth.now(), state);
        }
    }
}
