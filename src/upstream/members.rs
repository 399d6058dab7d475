//! Who the members are: one task that goes from the configured endpoints to the member list, health and leader.
//!
//! Owns: when which address is asked, the control runtime's channels, and publishing what follows. Must not know: how a
//! probe is made (`probe`), where names lead (`seeds`), what follows from it (`census`, `following`), calls of clients.
//! Invariants: an address has at most one probe under way; hints bring a probe forward, never more often than every
//! 100 ms per address; a list is believed from a member with a leader only, and from another only while there is
//! none; nothing is published that `census` did not conclude; before a member of another cluster is published, whoever
//! asked for it has forgotten the old one.

mod census;
mod changes;
mod following;
pub(super) mod metrics_page;
mod notices;
mod pace;
mod place;
mod probe;
mod seeds;
mod standing;
#[cfg(test)]
mod tests;
mod unlisted_leader;
mod whereabouts;

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

use crate::config::{ClientTls, Cluster, ClusterPin};
use crate::identity::{ClusterId, MemberId};
use crate::tasks::Tasks;
use crate::upstream::connect::Connector;
use crate::upstream::membership::{
    Auth, AuthState, ChangesSender, ControlChannels, Hint, MembersHandle, Membership, Readiness, Reason, Role,
};
use crate::upstream::outage::{OutageChanges, publish};
use crate::upstream::standing::{Mark, Suspicion};

pub(super) use census::usable;
use census::{Facts, Listed, Seen, is_ours};
use following::{Following, agreed};
use notices::Notices;
use pace::{Others, Pace};
use place::{FORCED, Place, Setup};
pub use probe::ProbeLogin;
use probe::{Identity, Prober, Refusal, Report, Silence, Told, Verified, Want};
pub use seeds::SeedList;
use seeds::Seeds;

/// Between two probes of an address.
const PROBE: Duration = Duration::from_millis(500);
/// Between two looks at the member list, and at whether auth is on.
const LIST: Duration = Duration::from_secs(10);
/// Between two looks at the member list when something points to a change.
const LIST_AGAIN: Duration = Duration::from_secs(1);
/// Addresses taken from the member list. Real clusters have at most some nine members.
const LISTED_ADDRESSES: usize = 64;
/// Members that are remembered to be of the cluster.
const KNOWN: usize = 128;
/// The members' task before it runs.
pub struct Members {
    setup: Setup,
    seeds: SeedList,
    channels: ControlChannels,
    forget: Box<Forget>,
    tokens_lost: Box<TokensLost>,
}

/// Forgets a cluster that is left, for one that is followed.
type Forget = dyn Fn(ClusterId, ClusterId);

/// Tells that tokens may be lost: those of one member, or of all.
type TokensLost = dyn Fn(Option<MemberId>);

impl Members {
    /// For the cluster of the configuration, reached by `connector`. Nothing is asked yet.
    #[must_use]
    pub fn new(config: &Cluster, connector: Connector) -> Self {
        let certificate = config.tls.as_ref().is_some_and(|tls| tls.identity.is_some());
        let setup = Setup {
            pin: config.pin,
            scheme: config.scheme(),
            http1: connector.http1(),
            connector,
            identity: if certificate { Identity::Certificate } else { Identity::None },
            verified: if config.tls.as_ref().is_some_and(ClientTls::verifies_members) {
                Verified::Yes
            } else {
                Verified::No
            },
            login: Arc::new(ArcSwapOption::from_pointee(config.probe.clone())),
            near: config.near.clone(),
        };
        let (seeds, channels) = (SeedList::new(config), ControlChannels::default());
        Self { setup, seeds, channels, forget: Box::new(|_, _| {}), tokens_lost: Box::new(|_| {}) }
    }

    /// Where members are found first; replaced at run time.
    #[must_use]
    pub fn seeds(&self) -> SeedList {
        self.seeds.clone()
    }

    /// Before another cluster is followed (`cluster.identity = "follow"`): what is known of the first is to be forgotten at
    /// once, since nobody is a member of the second before `forget` has returned.
    pub fn before_following(&mut self, forget: impl Fn(ClusterId, ClusterId) + 'static) {
        self.forget = Box::new(forget);
    }

    /// When a member was connected to anew, which it is after each of its restarts, and when auth was turned on or off: no token
    /// that was lost since then was lost for its age.
    pub fn when_tokens_may_be_lost(&mut self, tell: impl Fn(Option<MemberId>) + 'static) {
        self.tokens_lost = Box::new(tell);
    }

    /// The control runtime's channel to every member that has answered; filled once the task runs.
    #[must_use]
    pub fn channels(&self) -> ControlChannels {
        self.channels.clone()
    }

    /// As whom members are probed: what is stored there serves from the next probe on.
    #[must_use]
    pub fn login(&self) -> ProbeLogin {
        Arc::clone(&self.setup.login)
    }

    /// Starts the task on this thread. It ends with the last clone of the handle, or with `tasks`.
    pub fn start(self, tasks: &Tasks) -> MembersHandle {
        let (handle, changed, hinted) = MembersHandle::showing(Membership::unknown(Instant::now()));
        let task = Task::new(self, Published::of(&handle, changed));
        tasks.spawn("members", task.run(hinted)).detach();
        handle
    }
}

/// Where the task's conclusions go.
struct Published {
    snapshot: Arc<ArcSwap<Membership>>,
    changed: ChangesSender,
    outages: Arc<OutageChanges>,
    auth: Arc<AuthState>,
}

impl Published {
    /// Not the handle itself: the task ends with its last clone.
    fn of(handle: &MembersHandle, changed: ChangesSender) -> Self {
        let MembersHandle { snapshot, outages, auth, .. } = handle.clone();
        Self { snapshot, changed, outages, auth }
    }
}

type Probe = BoxFuture<'static, (Prober, Report)>;

struct Task {
    setup: Setup,
    channels: ControlChannels,
    published: Published,
    forget: Box<Forget>,
    tokens_lost: Box<TokensLost>,
    seeds: Seeds,
    /// The configured ones first, in their order.
    places: Vec<Place>,
    /// How many there were.
    serials: u64,
    probes: FuturesUnordered<Probe>,
    pace: Pace,
    list: Option<Vec<Listed>>,
    list_refused: bool,
    pinned: Option<ClusterId>,
    /// See [`Facts::known`].
    known: BTreeSet<MemberId>,
    /// See [`Membership::confirmed`].
    confirmed: Instant,
    following: Following,
    list_asked: Option<Instant>,
    list_due: Instant,
    auth_asked: Option<Instant>,
    auth_due: Instant,
    /// Which channels are published: whose, to where, and which renewal of it.
    routes: Vec<(MemberId, u64, u32)>,
    notices: Notices,
}

impl Task {
    fn new(members: Members, published: Published) -> Self {
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
            pace: Pace::default(),
            list: None,
            list_refused: false,
            pinned,
            known: BTreeSet::new(),
            confirmed: now,
            following: Following::default(),
            list_asked: None,
            list_due: now,
            auth_asked: None,
            auth_due: now,
            routes: Vec::new(),
            notices: Notices::default(),
        }
    }

    async fn run(mut self, mut hints: mpsc::Receiver<Hint>) {
        self.settle();
        loop {
            if self.following.due().is_some_and(|due| due <= Instant::now()) {
                self.conclude();
            }
            self.begin_due();
            let asked = self.places.iter().filter(|place| place.prober.is_some()).map(|place| place.due);
            let next = asked.chain(self.following.due()).min();
            // Every arm is cancel-safe: a probe that was not polled to its end stays among the probes.
            tokio::select! {
                Some((prober, report)) = self.probes.next() => self.heard(prober, report),
                hint = hints.recv() => match hint {
                    Some(hint) => self.hinted(hint),
                    None => return,
                },
                moved = self.seeds.next() => if moved {
                    self.pin();
                    self.conclude();
                } else {
                    self.settle();
                },
                () = sleep_until(next.unwrap_or_else(Instant::now)), if next.is_some() => {}
            }
        }
    }

    /// Begins every probe that is due.
    fn begin_due(&mut self) {
        let now = Instant::now();
        self.assign(now);
        let snapshot = self.published.snapshot.load();
        let limit = self.limit();
        for place in self.places.iter_mut().filter(|place| place.due <= now && place.prober.is_some()) {
            let known = place.member().and_then(|id| snapshot.get(id));
            // Counted before the look: a removal that begins after it waits for this probe.
            let counted = known.map(|member| member.rest.begin());
            if place.hold(known.is_some_and(|member| member.rest.is_being_removed()), now) {
                continue;
            }
            let Some(prober) = place.prober.take() else { continue };
            place.mark_all(&snapshot);
            place.asked = Some(now);
            place.due = now + PROBE;
            let unlisted = known.is_some_and(|member| !member.is_listed());
            let (pinned, source) = (self.pinned, place.sighting.source);
            let learner = known.is_some_and(|member| member.role == Role::Learner);
            let want = Want { unlisted, learner, limit, pinned, source, ..std::mem::take(&mut place.want) };
            place.limit = limit;
            let probe = async move {
                let reported = prober.ask(want).await;
                drop(counted);
                reported
            };
            self.probes.push(probe.boxed());
        }
    }

    /// How long a call of a probe may take now, by how fast those voters answer that serve.
    fn limit(&self) -> Duration {
        let serve = self.places.iter().filter(|place| match &place.sighting.seen {
            Seen::Answered(answer) => self.serves(answer),
            Seen::NotAsked | Seen::Silent(_) => false,
        });
        self.pace.limit(serve.filter_map(|place| place.took).min())
    }

    /// Whether it is the answer of a voter that may take traffic.
    fn serves(&self, answer: &census::Answer) -> bool {
        answer.role == Role::Voter && self.confirms(answer)
    }

    /// Whether others answered meanwhile, where a probe had no answer in time; the limit of later ones follows from it.
    fn note_pace(&mut self, report: &Report, began: Option<Instant>, limit: Duration) -> Others {
        let now = Instant::now();
        match &report.told {
            Ok(told) if self.serves(&told.answer) => self.pace.answered(now),
            Err(Silence::Late) => return self.pace.late(began.unwrap_or(now), limit, now),
            Ok(_) | Err(_) => {}
        }
        Others::Answered
    }

    /// Chooses who is asked for the member list and about auth, when they are due: the leader, else a ready voter,
    /// else anybody who answers; but first those who tell of which cluster they are, since others tell no list either.
    fn assign(&mut self, now: Instant) {
        if now < self.list_due && now < self.auth_due {
            return;
        }
        let snapshot = self.published.snapshot.load();
        let rank = |place: &Place| {
            let Seen::Answered(answer) = &place.sighting.seen else { return None };
            let member = snapshot.get(answer.member)?;
            let stands = place.is_at(&member.endpoint, member.at) && place.prober.is_some();
            let rank = match member.readiness {
                Readiness::Ready if snapshot.leader == Some(member.id) => 0,
                Readiness::Ready => 1,
                Readiness::NotReady(Reason::NoLeader | Reason::Unlisted) => 2,
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
        if now >= self.auth_due {
            place.want.auth = Some(self.published.auth.now());
            self.auth_asked = Some(now);
            self.auth_due = now + LIST;
        }
    }

    /// Something points to a change of the member list.
    fn look_at_list_soon(&mut self) {
        let again = self.list_asked.map_or_else(Instant::now, |asked| asked + LIST_AGAIN);
        self.list_due = self.list_due.min(again);
    }

    fn hinted(&mut self, hint: Hint) {
        tracing::debug!(?hint, "hint");
        let snapshot = self.published.snapshot.load_full();
        match hint {
            Hint::Unreachable(member) => {
                if let Some(member) = snapshot.get(member) {
                    self.seeds.doubt(&member.endpoint.host);
                    self.places
                        .iter_mut()
                        .filter(|p| p.sighting.endpoint == member.endpoint)
                        .for_each(Place::force);
                }
            }
            Hint::NotLeader(_) => self.look_for_leader(),
            Hint::LeaderMoved { term } if term > snapshot.term => self.look_for_leader(),
            Hint::LeaderMoved { .. } => {}
            Hint::ListChanged => {
                self.list_due = self.list_asked.map_or_else(Instant::now, |asked| asked + FORCED)
            }
            Hint::AuthOn | Hint::AuthOff => {
                self.auth_due = self.auth_asked.map_or_else(Instant::now, |asked| asked + FORCED);
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

    fn heard(&mut self, prober: Prober, report: Report) {
        // An address that was dropped meanwhile has no place any more.
        let Some(index) = self.places.iter().position(|place| place.serial == prober.serial) else {
            return;
        };
        self.notices.probe(&prober.endpoint, &report, &self.places);
        let (began, limit) = (self.places[index].asked, self.places[index].limit);
        let others = self.note_pace(&report, began, limit);
        let place = &mut self.places[index];
        place.prober = Some(prober);
        let marks = std::mem::take(&mut place.marks);
        let lost = place.note(&report, (limit, others), &self.setup);
        if let Some(member) = place.connected_anew() {
            (self.tokens_lost)(Some(member));
        }
        if lost {
            self.seeds.doubt(&place.sighting.endpoint.host);
            self.look_at_list_soon();
        }
        if self.is_other_list(&report) {
            self.look_at_list_soon();
        }
        self.pin();
        if let Some(list) = report.list {
            self.listed(list, &report.told);
        }
        if let Some(auth) = report.auth {
            self.authenticated(auth);
        }
        if report.told.as_ref().is_ok_and(|told| self.confirms(&told.answer)) {
            self.confirmed = Instant::now();
        }
        self.conclude();
        if let Ok(told) = &report.told {
            self.clear(index, told.answer.member, &marks);
        }
    }

    /// Whether a member's own list has other members than the one that is believed.
    fn is_other_list(&self, report: &Report) -> bool {
        let ours = report.told.as_ref().is_ok_and(|told| is_ours(told.answer.cluster, self.pinned));
        let (Some(ids), Some(list)) = (&report.ids, &self.list) else { return false };
        ours && (ids.len() != list.len() || !list.iter().all(|listed| ids.contains(&listed.id)))
    }

    /// Whether it is the answer of a member of the cluster that sees a leader, and so most of the others too.
    fn confirms(&self, answer: &census::Answer) -> bool {
        let ours = match answer.cluster {
            Some(cluster) => self.pinned == Some(cluster),
            None => self.pinned.is_none() || self.known.contains(&answer.member),
        };
        ours && answer.leader != census::Sight::Nobody
    }

    /// A probe that succeeded ends the suspicion against the member, if it is at this address that it is used; also where it is
    /// found here only by this probe.
    fn clear(&self, index: usize, member: MemberId, marks: &[(MemberId, Arc<Suspicion>, Mark)]) {
        let snapshot = self.published.snapshot.load();
        let Some(known) = snapshot.get(member) else { return };
        let here = self.places.get(index).is_some_and(|place| place.sighting.is_of(known));
        let Some((_, suspicion, mark)) = marks.iter().find(|(marked, _, _)| *marked == member) else {
            return;
        };
        if here && known.suspicion.is_raised() {
            if Arc::ptr_eq(&known.suspicion, suspicion) {
                known.suspicion.clear(*mark);
                known.conduct.cleared(Instant::now());
            } else {
                known.suspicion.clear_carried(*mark);
            }
            if !known.suspicion.is_raised() {
                tracing::debug!(%member, "member answers again");
                self.published.changed.tell();
            }
        }
    }

    /// Takes in a member list, or why there is none; from nobody who answers by now for another cluster than ours.
    fn listed(&mut self, list: Result<Vec<Listed>, Refusal>, told: &Result<Told, Silence>) {
        let cluster = told.as_ref().ok().and_then(|told| told.answer.cluster);
        if !is_ours(cluster, self.pinned) {
            self.look_at_list_soon();
            return;
        }
        match list {
            Ok(list) => {
                self.notices.list_given();
                self.list_refused = false;
                let leads = told.as_ref().is_ok_and(|told| told.answer.leader != census::Sight::Nobody);
                if leads || self.list.is_none() {
                    self.known = list.iter().map(|listed| listed.id).collect();
                    self.list = Some(list);
                }
            }
            Err(refusal @ (Refusal::NoUser | Refusal::Denied)) => {
                self.notices.list_refused(refusal);
                self.list = None;
                self.list_refused = true;
            }
            Err(Refusal::Learner | Refusal::NoLeader | Refusal::Silent(_)) => self.look_at_list_soon(),
        }
    }

    fn authenticated(&mut self, auth: Auth) {
        if self.published.auth.now() != auth {
            tracing::info!(?auth, "found out whether the cluster asks for credentials");
            self.published.auth.set(auth);
            self.published.changed.tell();
            (self.tokens_lost)(None);
        }
    }

    /// Chooses the cluster once the first round is complete.
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
                    "the configured endpoints belong to different clusters: the one that most of them name is served; \
                     set cluster.id to choose"
                );
            }
            self.pinned = Some(pinning.cluster);
        }
    }

    /// Follows what is known to its end: addresses, snapshot, channels.
    fn conclude(&mut self) {
        self.follow();
        self.settle();
        let named =
            self.places.iter().filter(|place| place.cluster().is_some() && place.cluster() == self.pinned);
        let room = KNOWN.saturating_sub(self.known.len());
        let new: Vec<MemberId> =
            named.filter_map(Place::answers).filter(|id| !self.known.contains(id)).take(room).collect();
        self.known.extend(new);
        let before = self.published.snapshot.load_full();
        let sightings = self.sightings();
        let facts = Facts {
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
        let mut after = census::take(&facts, self.confirmed);
        after.unanswered = self.unanswered();
        let by_list = |readiness| match readiness {
            Readiness::NotReady(Reason::Unlisted) => true,
            Readiness::NotReady(Reason::UnverifiedCluster) => !matches!(self.setup.pin, ClusterPin::Id(_)),
            Readiness::Ready | Readiness::NotReady(_) => false,
        };
        if after.members.iter().any(|member| by_list(member.readiness)) {
            self.look_at_list_soon();
        }
        self.find_unlisted_leader(&before, &after);
        if before.serving() != after.serving() || before.cluster != after.cluster {
            self.auth_due = Instant::now();
        }
        standing::place(&after, &self.setup.near);
        let changes = changes::between(&before, &after);
        changes::log(&changes, &after);
        self.route(&after);
        let relisted = before.peer_urls != after.peer_urls;
        publish(&self.published.snapshot, &self.published.outages, after);
        if relisted || !changes.is_empty() {
            self.published.changed.tell();
        }
    }

    /// Goes to another cluster once the configured endpoints have agreed on it for long enough.
    fn follow(&mut self) {
        let (ClusterPin::Follow, Some(left)) = (self.setup.pin, self.pinned) else { return };
        let agreed = agreed(left, &self.sightings_of_now());
        let Some(followed) = self.following.look(agreed, Instant::now()) else { return };
        self.following.end();
        changes::log_followed(left, followed);
        (self.forget)(left, followed);
        self.pinned = Some(followed);
        (self.list, self.list_refused) = (None, false);
        self.known.clear();
        self.published.auth.set(Auth::Unknown);
        (self.list_due, self.auth_due) = (Instant::now(), Instant::now());
    }

    /// Publishes the channels of the members that answered, by the addresses at which they are used.
    fn route(&mut self, after: &Membership) {
        let routes: Vec<(MemberId, &Place)> = after
            .members
            .iter()
            .filter_map(|member| {
                let here = |place: &&Place| {
                    place.is_at(&member.endpoint, member.at) && place.member() == Some(member.id)
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
