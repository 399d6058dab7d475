//! Finds the members: one task reads the configured endpoints, the member list, health and the leader.
//!
//! Owns: the schedule of probes, the control runtime's channels, publishing the conclusions. Must not know:
//! the calls of a probe (`probe`), name resolution (`seeds`), the conclusions (`census`, `following`), calls
//! of clients.
//! Invariants: an address has at most one probe in flight; hints bring a probe forward, never more often than
//! every 100 ms per address; a member list is accepted only from a member with a leader, and from a member
//! without a leader only while no list is known; only conclusions of `census` are published; before a member
//! of a different cluster is published, the callback of [`Members::before_following`] has dropped all state
//! of the old cluster.

mod addresses;
mod auth_schedule;
mod census;
mod following;
pub mod keyward_page;
pub mod member_flags;
mod member_list;
mod membership_changes;
pub mod metrics_page;
mod notices;
mod probe;
mod probe_time_limit;
mod probed_address;
mod seeds;
pub mod store_hashes;
pub mod survey;
#[cfg(test)]
mod tests;
mod unlisted_leader;

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use arc_swap::{ArcSwap, ArcSwapOption};
use futures_util::StreamExt as _;
use futures_util::future::{BoxFuture, FutureExt as _};
use futures_util::stream::FuturesUnordered;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};
use tonic::transport::Channel;

use crate::cluster_outage::publish;
use crate::fitness;
use crate::fitness::quarantine::{Suspicion, SuspicionMark};
use crate::membership::{
    AuthSetting, ChangeSender, ControlChannels, MembersHandle, Membership, MembershipHint, Readiness, Role,
    SharedAuthSetting, UnreadyReason,
};
use crate::outage_state::OutageChanges;
use keyward_base::tasks::Tasks;
use keyward_config::{ClientTls, Cluster, ClusterPin};
use keyward_dial::connect::Connector;
use keyward_etcd::identity::{ClusterId, MemberId};

use auth_schedule::AuthSchedule;
pub use census::usable;
use census::{CensusInput, ListedMember, ProbeObservation, is_ours};
use following::{FollowAgreement, agreed};
use notices::Notices;
pub use probe::ProbeLogin;
use probe::{
    AuthQuestion, MemberVerification, ProbeFailure, ProbeIdentity, ProbeReport, ProbeRequest, Prober,
};
use probe_time_limit::{OtherVoters, ProbeTimeLimit};
use probed_address::{FORCED, ProbeSetup, ProbedAddress};
pub use seeds::SeedList;
use seeds::Seeds;

/// Interval between two probes of an address.
const PROBE: Duration = Duration::from_millis(500);
/// Interval between two reads of the member list.
const LIST: Duration = Duration::from_secs(10);
/// Minimum interval between two reads of the member list while a change is suspected.
const LIST_AGAIN: Duration = Duration::from_secs(1);
/// Maximum number of addresses taken from the member list. Real clusters have at most some nine members.
const LISTED_ADDRESSES: usize = 64;
/// Maximum number of members remembered as belonging to the cluster.
const KNOWN: usize = 128;
/// The members' task before its start.
pub struct Members {
    setup: ProbeSetup,
    seeds: SeedList,
    channels: ControlChannels,
    forget: Box<ForgetCluster>,
    tokens_lost: Box<TokensLostCallback>,
}

/// Callback dropping all state of the first cluster, before the second cluster is followed.
type ForgetCluster = dyn Fn(ClusterId, ClusterId);

/// Callback reporting that tokens may be lost: the tokens of one member, or of all members.
type TokensLostCallback = dyn Fn(Option<MemberId>);

impl Members {
    /// Prepares the task for the configured cluster, reached by `connector`. Sends no request yet.
    #[must_use]
    pub fn new(config: &Cluster, connector: Connector) -> Self {
        let certificate = config.tls.as_ref().is_some_and(|tls| tls.identity.is_some());
        let setup = ProbeSetup {
            pin: config.pin,
            scheme: config.scheme(),
            http1: connector.http1(),
            connector,
            identity: if certificate { ProbeIdentity::Certificate } else { ProbeIdentity::None },
            verified: if config.tls.as_ref().is_some_and(ClientTls::verifies_members) {
                MemberVerification::Yes
            } else {
                MemberVerification::No
            },
            login: Arc::new(ArcSwapOption::from_pointee(config.probe.clone())),
            near: config.near.clone(),
        };
        let (seeds, channels) = (SeedList::new(config), ControlChannels::default());
        Self { setup, seeds, channels, forget: Box::new(|_, _| {}), tokens_lost: Box::new(|_| {}) }
    }

    /// The configured endpoints and the DNS discovery; replaced at run time.
    #[must_use]
    pub fn seeds(&self) -> SeedList {
        self.seeds.clone()
    }

    /// Sets the callback to run before a different cluster is followed (`cluster.identity = "follow"`).
    /// `forget` must drop all state of the old cluster synchronously: no member of the new cluster is
    /// published before `forget` has returned.
    pub fn before_following(&mut self, forget: impl Fn(ClusterId, ClusterId) + 'static) {
        self.forget = Box::new(forget);
    }

    /// Sets the callback for possible token loss: called after a new connection to a member, because each
    /// restart of a member breaks the connection, and after auth was turned on or off. Tokens lost after such
    /// an event are no evidence of an expired TTL.
    pub fn when_tokens_may_be_lost(&mut self, tell: impl Fn(Option<MemberId>) + 'static) {
        self.tokens_lost = Box::new(tell);
    }

    /// The control runtime's channel to every member that has answered; filled once the task runs.
    #[must_use]
    pub fn channels(&self) -> ControlChannels {
        self.channels.clone()
    }

    /// The credentials used for probes; a stored value takes effect at the next probe.
    #[must_use]
    pub fn login(&self) -> ProbeLogin {
        Arc::clone(&self.setup.login)
    }

    /// Starts the task on this thread. The task ends with the last clone of the handle, or with `tasks`.
    pub fn start(self, tasks: &Tasks) -> MembersHandle {
        let (handle, changed, hinted) = MembersHandle::publishing(Membership::unknown(Instant::now()));
        let task = MembersTask::new(self, MembershipPublisher::of(&handle, changed));
        tasks.spawn("members", task.run(hinted)).detach();
        handle
    }
}

/// The published state, written by the task.
struct MembershipPublisher {
    snapshot: Arc<ArcSwap<Membership>>,
    changed: ChangeSender,
    outages: Arc<OutageChanges>,
    auth: Arc<SharedAuthSetting>,
}

impl MembershipPublisher {
    /// Copies single fields instead of the handle: the task ends with the last handle.
    fn of(handle: &MembersHandle, changed: ChangeSender) -> Self {
        let MembersHandle { snapshot, outages, auth, .. } = handle.clone();
        Self { snapshot, changed, outages, auth }
    }
}

type ProbeFuture = BoxFuture<'static, (Prober, ProbeReport)>;

struct MembersTask {
    setup: ProbeSetup,
    channels: ControlChannels,
    published: MembershipPublisher,
    forget: Box<ForgetCluster>,
    tokens_lost: Box<TokensLostCallback>,
    seeds: Seeds,
    /// Configured addresses first, in configured order.
    places: Vec<ProbedAddress>,
    /// Number of places created so far.
    serials: u64,
    probes: FuturesUnordered<ProbeFuture>,
    pace: ProbeTimeLimit,
    list: Option<Vec<ListedMember>>,
    list_refused: bool,
    pinned: Option<ClusterId>,
    /// See [`CensusInput::known`].
    known: BTreeSet<MemberId>,
    /// See [`Membership::confirmed`].
    confirmed: Instant,
    following: FollowAgreement,
    list_asked: Option<Instant>,
    list_due: Instant,
    auth_schedule: AuthSchedule,
    /// The published channels: member, serial of the place, and the place's channel generation.
    routes: Vec<(MemberId, u64, u32)>,
    notices: Notices,
}

impl MembersTask {
    fn new(members: Members, published: MembershipPublisher) -> Self {
        let Members { setup, seeds, channels, forget, tokens_lost } = members;
        let now = Instant::now();
        let pinned = match setup.pin {
            ClusterPin::Id(cluster) => Some(cluster),
            ClusterPin::FirstAnswer | ClusterPin::Follow => None,
        };
        Self {
            places: Vec::new(),
            serials: 0,
            seeds: Seeds::new(setup.connector.names().clone(), &seeds, now),
            setup,
            channels,
            published,
            forget,
            tokens_lost,
            probes: FuturesUnordered::new(),
            pace: ProbeTimeLimit::default(),
            list: None,
            list_refused: false,
            pinned,
            known: BTreeSet::new(),
            confirmed: now,
            following: FollowAgreement::default(),
            list_asked: None,
            list_due: now,
            auth_schedule: AuthSchedule::due(now),
            routes: Vec::new(),
            notices: Notices::default(),
        }
    }

    async fn run(mut self, mut hints: mpsc::Receiver<MembershipHint>) {
        self.update_probed_addresses();
        loop {
            if self.following.due().is_some_and(|due| due <= Instant::now()) {
                self.conclude();
            }
            self.begin_due();
            let asked = self.places.iter().filter(|place| place.prober.is_some()).map(|place| place.due);
            let next = asked.chain(self.following.due()).min();
            // Every arm is cancel-safe: an unfinished probe stays in `probes`.
            tokio::select! {
                Some((prober, report)) = self.probes.next() => self.handle_report(prober, report),
                hint = hints.recv() => match hint {
                    Some(hint) => self.handle_hint(hint),
                    None => return,
                },
                moved = self.seeds.next() => if moved {
                    self.pin();
                    self.conclude();
                } else {
                    self.update_probed_addresses();
                },
                () = sleep_until(next.unwrap_or_else(Instant::now)), if next.is_some() => {}
            }
        }
    }

    /// Starts every probe that is due.
    fn begin_due(&mut self) {
        let now = Instant::now();
        self.assign(now);
        let snapshot = self.published.snapshot.load();
        let limit = self.limit();
        for place in self.places.iter_mut().filter(|place| place.due <= now && place.prober.is_some()) {
            let known = place.member().and_then(|id| snapshot.get(id));
            // Count the probe before checking for a removal: a removal begun after the check then waits for
            // this probe.
            let counted = known.map(|member| member.maintenance.count_call());
            if place.hold(known.is_some_and(|member| member.maintenance.is_being_removed()), now) {
                continue;
            }
            let Some(prober) = place.prober.take() else { continue };
            place.mark_all(&snapshot);
            place.asked = Some(now);
            place.due = now + PROBE;
            let unlisted = known.is_some_and(|member| !member.is_listed());
            let (pinned, source) = (self.pinned, place.sighting.source);
            let learner = known.is_some_and(|member| member.role == Role::Learner);
            let want =
                ProbeRequest { unlisted, learner, limit, pinned, source, ..std::mem::take(&mut place.want) };
            place.limit = limit;
            let probe = async move {
                let reported = prober.ask(want).await;
                drop(counted);
                reported
            };
            self.probes.push(probe.boxed());
        }
    }

    /// Time limit of one call of a probe, derived from the fastest ready voter.
    fn limit(&self) -> Duration {
        let serve = self.places.iter().filter(|place| match &place.sighting.seen {
            ProbeObservation::Answered(answer) => self.serves(answer),
            ProbeObservation::NotAsked | ProbeObservation::Silent(_) => false,
        });
        self.pace.limit(serve.filter_map(|place| place.took).min())
    }

    /// True for the answer of a voter that may take traffic.
    fn serves(&self, answer: &census::MemberProbeAnswer) -> bool {
        answer.role == Role::Voter && self.is_from_quorum(answer)
    }

    /// Returns [`OtherVoters::Silent`] if the probe timed out and no voter answered meanwhile. Adjusts the
    /// time limit of later probes.
    fn note_pace(&mut self, report: &ProbeReport, began: Option<Instant>, limit: Duration) -> OtherVoters {
        let now = Instant::now();
        match &report.told {
            Ok(told) if self.serves(&told.answer) => self.pace.answered(now),
            Err(ProbeFailure::Late) => return self.pace.late(began.unwrap_or(now), limit, now),
            Ok(_) | Err(_) => {}
        }
        OtherVoters::Answered
    }

    /// Selects the member to ask for the member list and the auth setting, when due: the leader, else a ready
    /// voter, else any answering member. Members revealing their cluster id come first, because members
    /// hiding the id also refuse the list.
    fn assign(&mut self, now: Instant) {
        if now < self.list_due && !self.auth_schedule.is_due(now) {
            return;
        }
        let snapshot = self.published.snapshot.load();
        let rank = |place: &ProbedAddress| {
            let ProbeObservation::Answered(answer) = &place.sighting.seen else { return None };
            let member = snapshot.get(answer.member)?;
            let stands = place.is_at(&member.endpoint, member.resolved_ip) && place.prober.is_some();
            let rank = match member.readiness {
                Readiness::Ready if snapshot.leader == Some(member.id) => 0,
                Readiness::Ready => 1,
                Readiness::NotReady(UnreadyReason::NoLeader | UnreadyReason::Unlisted) => 2,
                Readiness::NotReady(_) => return None,
            };
            stands.then_some((answer.cluster.is_none(), rank))
        };
        let ranked = self.places.iter_mut().filter_map(|place| Some((rank(place)?, place)));
        let Some((_, place)) = ranked.min_by_key(|(rank, _)| *rank) else { return };
        place.due = now;
        if now >= self.list_due {
            place.want.list = true;
            self.list_asked = Some(now);
            self.list_due = now + LIST;
        }
        if self.auth_schedule.is_due(now) {
            let confirms = self.auth_schedule.note_asked(now);
            place.want.auth = Some(AuthQuestion { believed: self.published.auth.now(), confirms });
        }
    }

    /// Schedules an early read of the member list, because a change is suspected.
    fn schedule_list_read(&mut self) {
        let again = self.list_asked.map_or_else(Instant::now, |asked| asked + LIST_AGAIN);
        self.list_due = self.list_due.min(again);
    }

    fn handle_hint(&mut self, hint: MembershipHint) {
        tracing::debug!(?hint, "hint");
        let snapshot = self.published.snapshot.load_full();
        match hint {
            MembershipHint::Unreachable(member) => {
                if let Some(member) = snapshot.get(member) {
                    self.seeds.doubt(&member.endpoint.host);
                    self.places
                        .iter_mut()
                        .filter(|p| p.sighting.endpoint == member.endpoint)
                        .for_each(ProbedAddress::force);
                }
            }
            MembershipHint::NotLeader(_) => self.look_for_leader(),
            MembershipHint::LeaderMoved { term } if term > snapshot.term => self.look_for_leader(),
            MembershipHint::LeaderMoved { .. } => {}
            MembershipHint::ListChanged => {
                self.list_due = self.list_asked.map_or_else(Instant::now, |asked| asked + FORCED)
            }
            MembershipHint::AuthOn | MembershipHint::AuthOff => {
                self.auth_schedule.hurry();
                self.published.changed.tell();
                (self.tokens_lost)(None);
            }
        }
    }

    fn look_for_leader(&mut self) {
        for place in &mut self.places {
            place.want.fresh = true;
            place.force();
        }
    }

    fn handle_report(&mut self, prober: Prober, report: ProbeReport) {
        // The address may have been dropped during the probe, so that no place is left.
        let Some(index) = self.places.iter().position(|place| place.serial == prober.serial) else {
            return;
        };
        self.notices.probe(&prober.endpoint, &report);
        let (began, limit) = (self.places[index].asked, self.places[index].limit);
        let others = self.note_pace(&report, began, limit);
        let place = &mut self.places[index];
        place.prober = Some(prober);
        let marks = std::mem::take(&mut place.marks);
        let lost = place.note(&report, (limit, others), &self.setup);
        if report.told.is_err() {
            self.notices.outage(&self.places);
        }
        let place = &mut self.places[index];
        if let Some(member) = place.connected_anew() {
            (self.tokens_lost)(Some(member));
        }
        if lost {
            self.seeds.doubt(&place.sighting.endpoint.host);
            self.schedule_list_read();
        }
        if self.is_other_list(&report) {
            self.schedule_list_read();
        }
        self.pin();
        if let Some(list) = report.list {
            self.listed(list, &report.told);
        }
        if let Some(auth) = report.auth {
            self.authenticated(auth);
        }
        if report.told.as_ref().is_ok_and(|told| self.is_from_quorum(&told.answer)) {
            self.confirmed = Instant::now();
        }
        self.conclude();
        if let Ok(told) = &report.told {
            self.clear(index, told.answer.member, &marks);
        }
    }

    /// True for the answer of a cluster member that sees a leader, and therefore a quorum.
    fn is_from_quorum(&self, answer: &census::MemberProbeAnswer) -> bool {
        let ours = match answer.cluster {
            Some(cluster) => self.pinned == Some(cluster),
            None => self.pinned.is_none() || self.known.contains(&answer.member),
        };
        ours && answer.leader != census::LeaderView::Nobody
    }

    /// Ends the suspicion against a member after a successful probe, if the probed address is the address
    /// used for the member; this includes a member found at the address by the same probe.
    fn clear(&self, index: usize, member: MemberId, marks: &[(MemberId, Arc<Suspicion>, SuspicionMark)]) {
        let snapshot = self.published.snapshot.load();
        let Some(known) = snapshot.get(member) else { return };
        let here = self.places.get(index).is_some_and(|place| place.sighting.is_of(known));
        let Some((_, suspicion, mark)) = marks.iter().find(|(marked, _, _)| *marked == member) else {
            return;
        };
        if here && known.suspicion.is_raised() {
            if Arc::ptr_eq(&known.suspicion, suspicion) {
                known.suspicion.clear(*mark);
                known.load.restart_stall_timer(Instant::now());
            } else {
                known.suspicion.clear_carried(*mark);
            }
            if !known.suspicion.is_raised() {
                tracing::debug!(%member, "member answers again");
                self.published.changed.tell();
            }
        }
    }

    fn authenticated(&mut self, auth: AuthSetting) {
        if self.published.auth.now() != auth {
            tracing::info!(?auth, "found out whether the cluster asks for credentials");
            self.published.auth.set(auth);
            self.published.changed.tell();
            (self.tokens_lost)(None);
        }
    }

    /// Pins the cluster once the first round of probes is complete.
    fn pin(&mut self) {
        if self.pinned.is_some() {
            return;
        }
        if self.seeds.is_asking() {
            return;
        }
        if let Some(pinning) = census::choose_cluster(&self.sightings()) {
            if !pinning.rivals.is_empty() {
                tracing::error!(
                    cluster = %pinning.cluster,
                    "the configured endpoints belong to different clusters: the one that most of them name \
                     is served; set cluster.id to choose"
                );
            }
            self.pinned = Some(pinning.cluster);
        }
    }

    /// Derives addresses, snapshot and channels from the current observations, and publishes the result.
    fn conclude(&mut self) {
        self.follow();
        self.update_probed_addresses();
        let named =
            self.places.iter().filter(|place| place.cluster().is_some() && place.cluster() == self.pinned);
        let room = KNOWN.saturating_sub(self.known.len());
        let new: Vec<MemberId> = named
            .filter_map(ProbedAddress::answers)
            .filter(|id| !self.known.contains(id))
            .take(room)
            .collect();
        self.known.extend(new);
        let before = self.published.snapshot.load_full();
        let sightings = self.sightings();
        let facts = CensusInput {
            pin: self.setup.pin,
            pinned: self.pinned,
            scheme: self.setup.scheme,
            discovery: &self.seeds.discovery(),
            sightings: &sightings,
            list: self.list.as_deref(),
            refused: self.list_refused,
            known: &self.known,
            before: &before,
        };
        let mut after = census::derive_membership(&facts, self.confirmed);
        after.unanswered = self.unanswered();
        after.is_probe_login_refused = self.places.iter().any(|place| place.login_refused);
        let by_list = |readiness| match readiness {
            Readiness::NotReady(UnreadyReason::Unlisted) => true,
            Readiness::NotReady(UnreadyReason::UnverifiedCluster) => {
                !matches!(self.setup.pin, ClusterPin::Id(_))
            }
            Readiness::Ready | Readiness::NotReady(_) => false,
        };
        if after.members.iter().any(|member| by_list(member.readiness)) {
            self.schedule_list_read();
        }
        self.find_unlisted_leader(&before, &after);
        if before.serving() != after.serving() || before.cluster != after.cluster {
            self.auth_schedule.restart(Instant::now());
        }
        fitness::lag::place(&after, &self.setup.near);
        let changes = membership_changes::between(&before, &after);
        membership_changes::log(&changes, &after);
        self.route(&after);
        let relisted = before.peer_urls != after.peer_urls;
        publish(&self.published.snapshot, &self.published.outages, after);
        if relisted || !changes.is_empty() {
            self.published.changed.tell();
        }
    }

    /// Moves to a different cluster once the configured endpoints have agreed on that cluster for long
    /// enough.
    fn follow(&mut self) {
        let (ClusterPin::Follow, Some(left)) = (self.setup.pin, self.pinned) else { return };
        let agreed = agreed(left, &self.sightings_of_now());
        let Some(followed) = self.following.look(agreed, Instant::now()) else { return };
        self.following.end();
        membership_changes::log_followed(left, followed);
        (self.forget)(left, followed);
        self.pinned = Some(followed);
        (self.list, self.list_refused) = (None, false);
        self.known.clear();
        self.published.auth.set(AuthSetting::Unknown);
        let now = Instant::now();
        self.list_due = now;
        self.auth_schedule.restart(now);
    }

    /// Publishes the channels of the answering members, by the address used for each member.
    fn route(&mut self, after: &Membership) {
        let routes: Vec<(MemberId, &ProbedAddress)> = after
            .members
            .iter()
            .filter_map(|member| {
                let here = |place: &&ProbedAddress| {
                    place.is_at(&member.endpoint, member.resolved_ip) && place.member() == Some(member.id)
                };
                Some((member.id, self.places.iter().find(here)?))
            })
            .collect();
        let named: Vec<_> = routes.iter().map(|(id, place)| (*id, place.serial, place.renewed)).collect();
        if named != self.routes {
            let channels: HashMap<MemberId, Channel> =
                routes.into_iter().map(|(id, place)| (id, place.channel.clone())).collect();
            self.channels.store(Arc::new(channels));
            self.routes = named;
        }
    }
}
