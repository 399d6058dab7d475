//! Derives the membership from the last answer of each address. Pure.
//!
//! Owns: the pinned cluster, the address standing for each member, readiness, the leader. Must not know: how
//! addresses are probed, time (the time of the last confirmation is passed through).
//! Invariants: a member's identity is the id in its answer, never its address; an answer from a different
//! cluster makes no member ready; the leader is the member named by most voters of the highest term with a
//! named leader; a member keeps its address as long as the member answers at that address, regardless of the
//! order of addresses, and moves only to a configured endpoint; a suspicion is bound to a member at one
//! address; a member moved while suspected stays suspected at the new address, until the member has answered
//! at the new address.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use tokio::time::Instant;

use crate::fitness::store_status::StoreStatus;
use crate::membership::{
    AbsenceReason, AbsentMember, ForeignAddress, Member, MemberPeerUrls, Membership, PeerUrls, Readiness,
    Role, UnreadyReason,
};
use crate::version::Version;
use keyward_config::{ClusterPin, Discovery, Endpoint, Scheme};
use keyward_etcd::identity::{ClusterId, MemberId};

/// A member's answer about itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct MemberProbeAnswer {
    pub(super) member: MemberId,
    /// `None` if the member hides its cluster id from the probing user.
    pub(super) cluster: Option<ClusterId>,
    pub(super) version: Option<Version>,
    pub(super) role: Role,
    pub(super) leader: LeaderView,
    /// 0 if the member reports no term.
    pub(super) term: u64,
    /// `None` if the member reports no store state.
    pub(super) store_status: Option<Arc<StoreStatus>>,
}

/// The leader as seen by a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LeaderView {
    Nobody,
    /// A leader exists, but the member does not name its id.
    Somebody,
    Member(MemberId),
}

/// One address and the last answer at this address.
#[derive(Clone, Debug)]
pub(super) struct AddressObservation {
    pub(super) endpoint: Endpoint,
    /// The IP address probed, among the addresses of the endpoint's name; `None` if the host is an IP
    /// address.
    pub(super) at: Option<IpAddr>,
    pub(super) source: AddressSource,
    pub(super) seen: ProbeObservation,
}

impl AddressObservation {
    /// True if `member` was found at this address.
    pub(super) fn is_of(&self, member: &Member) -> bool {
        self.endpoint == member.endpoint && self.at == member.resolved_ip
    }
}

/// The origin of an address. The order of the variants is the order of preference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum AddressSource {
    Configured,
    Listed,
}

impl MemberProbeAnswer {
    /// The answer, behind the observation before it at its address.
    pub(super) fn after(&self, before: &ProbeObservation) -> Self {
        let ProbeObservation::Answered(earlier) = before else { return self.clone() };
        let known = earlier.store_status.as_deref().filter(|_| earlier.member == self.member);
        let status = self.store_status.as_ref();
        let store_status = status.map(|status| Arc::new(StoreStatus::clone(status).after(known)));
        Self { store_status, ..self.clone() }
    }
}

/// The last observation at an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ProbeObservation {
    NotAsked,
    Answered(MemberProbeAnswer),
    /// No answer; the value is the last answer received earlier at this address.
    Silent(Option<MemberProbeAnswer>),
}

/// A member as described by the member list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ListedMember {
    pub(super) id: MemberId,
    pub(super) name: Arc<str>,
    pub(super) role: Role,
    pub(super) client_urls: Arc<[String]>,
    pub(super) peer_urls: Arc<[String]>,
}

/// All inputs of the membership.
pub(super) struct CensusInput<'a> {
    pub(super) pin: ClusterPin,
    pub(super) pinned: Option<ClusterId>,
    /// The scheme of the configured endpoints; URLs with a different scheme are not used.
    pub(super) scheme: Scheme,
    /// The host patterns allowed for listed addresses.
    pub(super) discovery: &'a Discovery,
    pub(super) sightings: &'a [AddressObservation],
    pub(super) list: Option<&'a [ListedMember]>,
    /// True if etcd refused the last request for the member list.
    pub(super) refused: bool,
    /// Members known to belong to the pinned cluster: each named the cluster in an answer, or is in the last
    /// member list.
    pub(super) known: &'a BTreeSet<MemberId>,
    /// The previous snapshot, source of suspicions and counters that outlive snapshots.
    pub(super) before: &'a Membership,
}

/// The cluster chosen when no cluster id is configured, and the endpoints naming a different cluster.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ClusterVote {
    pub(super) cluster: ClusterId,
    pub(super) rivals: Vec<ForeignAddress>,
}

/// Chooses the cluster named by most configured endpoints, after all configured endpoints were probed. A tie
/// goes to a cluster with a leader, then to the cluster named first. `None` if an endpoint was not probed
/// yet, or no endpoint names a cluster.
pub(super) fn choose_cluster(sightings: &[AddressObservation]) -> Option<ClusterVote> {
    let configured = || sightings.iter().filter(|sighting| sighting.source == AddressSource::Configured);
    if configured().any(|sighting| sighting.seen == ProbeObservation::NotAsked) {
        return None;
    }
    let named: Vec<(&Endpoint, ClusterId, bool)> = configured()
        .filter_map(|sighting| match &sighting.seen {
            ProbeObservation::Answered(answer) => {
                Some((&sighting.endpoint, answer.cluster?, answer.leader != LeaderView::Nobody))
            }
            _ => None,
        })
        .collect();
    let rank = |cluster: ClusterId| {
        let voices = named.iter().filter(|(_, named, _)| *named == cluster).count();
        let led = named.iter().any(|(_, named, led)| *named == cluster && *led);
        (voices, led)
    };
    // min_by_key keeps the first of equal elements.
    let (_, cluster, _) = *named.iter().min_by_key(|(_, cluster, _)| Reverse(rank(*cluster)))?;
    let rivals = named
        .iter()
        .filter(|(_, named, _)| *named != cluster)
        .map(|(endpoint, cluster, _)| ForeignAddress { endpoint: (*endpoint).clone(), cluster: *cluster })
        .collect();
    Some(ClusterVote { cluster, rivals })
}

/// Derives the membership from `facts`.
pub(super) fn derive_membership(facts: &CensusInput<'_>, confirmed: Instant) -> Membership {
    let mut found = Membership { cluster: facts.pinned, ..Membership::unknown(confirmed) };
    found.peer_urls = facts.peer_urls();
    found.foreign = facts.sightings.iter().filter_map(|sighting| facts.foreign(sighting)).collect();
    for id in facts.ids() {
        match facts.member(id) {
            Ok(member) => found.members.push(Arc::new(member)),
            Err(absent) => found.absent.push(absent),
        }
    }
    let ours = found.members.iter().filter(|member| member.is_ours());
    let answers: Vec<&MemberProbeAnswer> = ours.filter_map(|member| facts.answer(member.id)).collect();
    found.term = answers.iter().map(|answer| answer.term).max().unwrap_or(0);
    found.leader = leader(&answers);
    found
}

/// The endpoint of a usable URL: the URL has the scheme of the configured endpoints, a host and a port.
pub fn usable(url: &str, scheme: Scheme) -> Option<Endpoint> {
    let uri: http::Uri = url.parse().ok()?;
    let wanted = match scheme {
        Scheme::Http => "http",
        Scheme::Https => "https",
    };
    let host = uri.host()?.trim_start_matches('[').trim_end_matches(']');
    if uri.scheme_str() != Some(wanted) || host.is_empty() {
        return None;
    }
    Some(Endpoint { scheme, host: host.to_owned(), port: uri.port_u16()? })
}

/// True if an answer with this cluster id may come from the pinned cluster: the id is absent or equal.
pub(super) fn is_ours(cluster: Option<ClusterId>, pinned: Option<ClusterId>) -> bool {
    cluster.is_none() || cluster == pinned
}

/// The leader named by most voters of the highest term with a named leader; `None` on a tie.
fn leader(answers: &[&MemberProbeAnswer]) -> Option<MemberId> {
    let named =
        answers.iter().filter(|answer| answer.role == Role::Voter).filter_map(|answer| match answer.leader {
            LeaderView::Member(leader) => Some((answer.term, leader)),
            LeaderView::Nobody | LeaderView::Somebody => None,
        });
    let named: Vec<(u64, MemberId)> = named.collect();
    let newest = named.iter().map(|(term, _)| *term).max()?;
    let mut voices: BTreeMap<MemberId, usize> = BTreeMap::new();
    for (_, leader) in named.iter().filter(|(term, _)| *term == newest) {
        *voices.entry(*leader).or_default() += 1;
    }
    let (leader, most) = voices.iter().max_by_key(|(_, count)| **count)?;
    (voices.values().filter(|count| *count == most).count() == 1).then_some(*leader)
}

/// The role in the member's answer. If the answer hides the cluster id, a learner in the list is a learner.
fn role(answer: &MemberProbeAnswer, listed: Option<&ListedMember>) -> Role {
    match (answer.cluster, listed) {
        (None, Some(listed)) if listed.role == Role::Learner => Role::Learner,
        _ => answer.role,
    }
}

impl CensusInput<'_> {
    fn peer_urls(&self) -> PeerUrls {
        let of_one = |listed: &ListedMember| MemberPeerUrls {
            member: listed.id,
            name: Arc::clone(&listed.name),
            urls: Arc::clone(&listed.peer_urls),
        };
        match self.list {
            Some(list) => PeerUrls::Listed(list.iter().map(of_one).collect()),
            None if self.refused => PeerUrls::Refused,
            None => PeerUrls::Unknown,
        }
    }

    /// The id of every member listed or answering. Without a list, members that answered earlier are
    /// included.
    fn ids(&self) -> BTreeSet<MemberId> {
        let listed = self.list.into_iter().flatten().map(|listed| listed.id);
        let heard = self.sightings.iter().filter_map(|sighting| match &sighting.seen {
            ProbeObservation::Answered(answer) if self.is_ours(answer) => Some(answer.member),
            ProbeObservation::Silent(Some(answer)) if self.list.is_none() && self.is_ours(answer) => {
                Some(answer.member)
            }
            _ => None,
        });
        listed.chain(heard).collect()
    }

    /// True unless the answer names a different cluster. While no cluster is pinned, an answer naming any
    /// cluster is not ours.
    fn is_ours(&self, answer: &MemberProbeAnswer) -> bool {
        is_ours(answer.cluster, self.pinned)
    }

    /// True if the answer proves membership in the pinned cluster. With auth on, a learner hides its cluster
    /// id; voters reveal the id (see `probe`), unless an intermediary blocks watches. While no cluster is
    /// pinned, an answer without an id is accepted, because no id exists to compare with. Afterwards, a
    /// member without an id must have named the cluster earlier or be listed. If the configuration pins an
    /// id, only an answer with an id is accepted.
    fn is_verified(&self, answer: &MemberProbeAnswer, listed: Option<&ListedMember>) -> bool {
        answer.cluster.is_some()
            || match (self.pin, self.pinned) {
                (ClusterPin::Id(_), _) => false,
                (ClusterPin::FirstAnswer | ClusterPin::Follow, None) => true,
                (ClusterPin::FirstAnswer | ClusterPin::Follow, Some(_)) => {
                    listed.is_some() || self.known.contains(&answer.member)
                }
            }
    }

    fn foreign(&self, sighting: &AddressObservation) -> Option<ForeignAddress> {
        let ProbeObservation::Answered(answer) = &sighting.seen else { return None };
        let cluster = answer.cluster?;
        (self.pinned? != cluster).then(|| ForeignAddress { endpoint: sighting.endpoint.clone(), cluster })
    }

    /// The address standing for a member. Preferred, in this order: an address that answers, a configured
    /// address, the previous address of the member, the first in the list.
    fn choose_address(&self, id: MemberId) -> Option<&AddressObservation> {
        let stood = self.before.get(id);
        let rank = |sighting: &&AddressObservation| match &sighting.seen {
            ProbeObservation::Answered(answer) if self.is_ours(answer) && answer.member == id => Some(0),
            ProbeObservation::Silent(Some(answer)) if self.is_ours(answer) && answer.member == id => Some(1),
            _ => None,
        };
        let moves = |sighting: &AddressObservation| stood.is_none_or(|member| !sighting.is_of(member));
        let candidates =
            self.sightings.iter().filter_map(|sighting| Some((rank(&sighting)?, sighting.source, sighting)));
        let best = candidates.min_by_key(|(rank, source, sighting)| (*rank, *source, moves(sighting)));
        best.map(|(_, _, sighting)| sighting)
    }

    /// The member's current answer.
    fn answer(&self, id: MemberId) -> Option<&MemberProbeAnswer> {
        match &self.choose_address(id)?.seen {
            ProbeObservation::Answered(answer) => Some(answer),
            _ => None,
        }
    }

    fn member(&self, id: MemberId) -> Result<Member, AbsentMember> {
        let listed = self.list.into_iter().flatten().find(|listed| listed.id == id);
        let known = self.before.get(id);
        let stands = self.choose_address(id);
        let (endpoint, at, readiness) = match (stands, listed) {
            (Some(sighting), _) => (sighting.endpoint.clone(), sighting.at, self.readiness(sighting, listed)),
            (None, Some(listed)) => {
                let (endpoint, readiness) = self.by_list(listed)?;
                (endpoint, None, readiness)
            }
            (None, None) => {
                return Err(AbsentMember {
                    id,
                    name: "".into(),
                    role: Role::Voter,
                    why: AbsenceReason::NoUsableUrl,
                });
            }
        };
        let last = stands.and_then(|sighting| match &sighting.seen {
            ProbeObservation::Answered(answer) | ProbeObservation::Silent(Some(answer)) => Some(answer),
            ProbeObservation::NotAsked | ProbeObservation::Silent(None) => None,
        });
        let listed_role = listed.map_or(Role::Voter, |listed| listed.role);
        let stayed = known.filter(|member| member.endpoint == endpoint && member.resolved_ip == at);
        let suspicion = match (stayed, known) {
            (Some(member), _) => Arc::clone(&member.suspicion),
            (None, Some(member)) => Arc::new(member.suspicion.carried()),
            (None, None) => Arc::default(),
        };
        Ok(Member {
            id,
            name: listed.map_or_else(|| "".into(), |listed| Arc::clone(&listed.name)),
            endpoint,
            resolved_ip: at,
            role: last.map_or(listed_role, |answer| role(answer, listed)),
            version: last.and_then(|answer| answer.version),
            readiness,
            term: last.map_or(0, |answer| answer.term),
            store_status: last.and_then(|answer| answer.store_status.clone()),
            client_urls: listed.map_or_else(Arc::default, |listed| Arc::clone(&listed.client_urls)),
            suspicion,
            maintenance: known.map_or_else(Arc::default, |member| Arc::clone(&member.maintenance)),
            load: known.map_or_else(Arc::default, |member| Arc::clone(&member.load)),
        })
    }

    fn readiness(&self, sighting: &AddressObservation, listed: Option<&ListedMember>) -> Readiness {
        let ProbeObservation::Answered(answer) = &sighting.seen else {
            return Readiness::NotReady(UnreadyReason::Unreachable);
        };
        let learns = role(answer, listed) == Role::Learner;
        if learns && listed.is_some() {
            // The member is listed, and with auth on a learner hides its cluster id.
            Readiness::NotReady(UnreadyReason::Learner)
        } else if !self.is_verified(answer, listed) {
            Readiness::NotReady(UnreadyReason::UnverifiedCluster)
        } else if self.list.is_some() && listed.is_none() {
            Readiness::NotReady(UnreadyReason::Unlisted)
        } else if learns {
            Readiness::NotReady(UnreadyReason::Learner)
        } else if answer.leader == LeaderView::Nobody {
            Readiness::NotReady(UnreadyReason::NoLeader)
        } else {
            Readiness::Ready
        }
    }

    /// The first usable URL of a listed member that never answered at any address, and the member's
    /// readiness.
    fn by_list(&self, listed: &ListedMember) -> Result<(Endpoint, Readiness), AbsentMember> {
        let absent =
            |why| AbsentMember { id: listed.id, name: Arc::clone(&listed.name), role: listed.role, why };
        if listed.name.is_empty() && listed.client_urls.is_empty() {
            return Err(absent(AbsenceReason::Unstarted));
        }
        let usable = || listed.client_urls.iter().filter_map(|url| usable(url, self.scheme));
        let mut allowed = usable().filter(|endpoint| self.discovery.allows(&endpoint.host));
        let endpoint = allowed.next().ok_or_else(|| {
            absent(if usable().next().is_some() {
                AbsenceReason::NotAllowed
            } else {
                AbsenceReason::NoUsableUrl
            })
        })?;
        let there = || self.sightings.iter().filter(|sighting| sighting.endpoint == endpoint);
        let reason = if there().any(|sighting| self.foreign(sighting).is_some()) {
            UnreadyReason::ForeignCluster
        } else if there().any(|sighting| {
            matches!(sighting.seen, ProbeObservation::Answered(_) | ProbeObservation::Silent(_))
        }) {
            UnreadyReason::Unreachable
        } else {
            UnreadyReason::Unprobed
        };
        Ok((endpoint, Readiness::NotReady(reason)))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use super::*;

    const OURS: ClusterId = ClusterId(0xc1);
    const OTHER: ClusterId = ClusterId(0xc2);

    fn endpoint(port: u16) -> Endpoint {
        Endpoint { scheme: Scheme::Http, host: "127.0.0.1".into(), port }
    }

    fn answer(member: u64, leader: LeaderView, term: u64) -> MemberProbeAnswer {
        MemberProbeAnswer {
            member: MemberId(member),
            cluster: Some(OURS),
            version: Version::parse("3.5.1").ok(),
            role: Role::Voter,
            leader,
            term,
            store_status: None,
        }
    }

    fn led_by(member: u64, leader: u64) -> ProbeObservation {
        ProbeObservation::Answered(answer(member, LeaderView::Member(MemberId(leader)), 2))
    }

    fn configured(port: u16, seen: ProbeObservation) -> AddressObservation {
        AddressObservation { endpoint: endpoint(port), at: None, source: AddressSource::Configured, seen }
    }

    fn by_url(port: u16, seen: ProbeObservation) -> AddressObservation {
        AddressObservation { endpoint: endpoint(port), at: None, source: AddressSource::Listed, seen }
    }

    fn listed(id: u64, port: u16) -> ListedMember {
        ListedMember {
            id: MemberId(id),
            name: format!("m{id}").into(),
            role: Role::Voter,
            client_urls: [format!("http://127.0.0.1:{port}")].into(),
            peer_urls: [format!("https://127.0.0.1:{}", port + 1)].into(),
        }
    }

    fn facts<'a>(
        sightings: &'a [AddressObservation],
        list: Option<&'a [ListedMember]>,
        before: &'a Membership,
    ) -> CensusInput<'a> {
        static DISCOVERY: LazyLock<Discovery> = LazyLock::new(Discovery::default);
        static NOBODY: BTreeSet<MemberId> = BTreeSet::new();
        CensusInput {
            pin: ClusterPin::FirstAnswer,
            pinned: Some(OURS),
            scheme: Scheme::Http,
            discovery: &DISCOVERY,
            sightings,
            list,
            refused: false,
            known: &NOBODY,
            before,
        }
    }

    fn census(sightings: &[AddressObservation], list: Option<&[ListedMember]>) -> Membership {
        census_of(ClusterPin::FirstAnswer, Some(OURS), sightings, list)
    }

    fn census_of(
        pin: ClusterPin,
        pinned: Option<ClusterId>,
        sightings: &[AddressObservation],
        list: Option<&[ListedMember]>,
    ) -> Membership {
        let now = Instant::now();
        let before = Membership::unknown(now);
        derive_membership(&CensusInput { pin, pinned, ..facts(sightings, list, &before) }, now)
    }

    fn states(membership: &Membership) -> Vec<(u64, u16, Readiness)> {
        let members = membership.members.iter();
        members.map(|member| (member.id.0, member.endpoint.port, member.readiness)).collect()
    }

    use Readiness::{NotReady, Ready};

    #[test]
    fn members_are_who_they_say_they_are_wherever_they_answer() {
        let list = [listed(1, 11), listed(2, 12), listed(3, 13)];
        let before =
            [configured(11, led_by(1, 1)), configured(12, led_by(2, 1)), configured(13, led_by(3, 1))];
        assert_eq!(states(&census(&before, Some(&list))), [(1, 11, Ready), (2, 12, Ready), (3, 13, Ready)]);
        let swapped =
            [configured(11, led_by(2, 1)), configured(12, led_by(1, 1)), configured(13, led_by(3, 1))];
        assert_eq!(states(&census(&swapped, Some(&list))), [(1, 12, Ready), (2, 11, Ready), (3, 13, Ready)]);
    }

    #[test]
    fn a_configured_endpoint_is_preferred_and_a_listed_url_steps_in() {
        let list = [listed(1, 21)];
        let both = [by_url(21, led_by(1, 1)), configured(11, led_by(1, 1))];
        assert_eq!(states(&census(&both, Some(&list))), [(1, 11, Ready)]);
        let silent = ProbeObservation::Silent(Some(answer(1, LeaderView::Nobody, 1)));
        let one = [configured(11, silent.clone()), by_url(21, led_by(1, 1))];
        assert_eq!(states(&census(&one, Some(&list))), [(1, 21, Ready)]);
        let none = [configured(11, silent), by_url(21, ProbeObservation::Silent(None))];
        assert_eq!(states(&census(&none, Some(&list))), [(1, 11, NotReady(UnreadyReason::Unreachable))]);
    }

    fn resolved(last: u8, seen: ProbeObservation) -> AddressObservation {
        AddressObservation { at: Some(IpAddr::from([127, 0, 0, last])), ..configured(11, seen) }
    }

    fn after(
        before: &Membership,
        sightings: &[AddressObservation],
        list: Option<&[ListedMember]>,
    ) -> Membership {
        derive_membership(&facts(sightings, list, before), Instant::now())
    }

    fn at(membership: &Membership) -> (Option<IpAddr>, u16) {
        let member = membership.get(MemberId(1)).unwrap();
        (member.resolved_ip, member.endpoint.port)
    }

    #[test]
    fn a_member_stays_where_it_was_found_in_whatever_order_addresses_are_told() {
        let ours = || led_by(1, 1);
        let ip = |last: u8| Some(IpAddr::from([127, 0, 0, last]));
        let first = census(&[resolved(1, ours()), resolved(2, ours())], None);
        assert_eq!(at(&first), (ip(1), 11));
        let turned = after(&first, &[resolved(2, ours()), resolved(1, ours())], None);
        assert_eq!(at(&turned), (ip(1), 11), "another order moves nobody");
        // The member moves if its address is silent or has a different member, and keeps the new address
        // afterwards.
        let silent = ProbeObservation::Silent(Some(answer(1, LeaderView::Nobody, 1)));
        for gone in [silent.clone(), led_by(2, 1)] {
            let moved = after(&turned, &[resolved(2, ours()), resolved(1, gone)], None);
            assert_eq!(at(&moved), (ip(2), 11));
            let back = after(&moved, &[resolved(1, ours()), resolved(2, ours())], None);
            assert_eq!(at(&back), (ip(2), 11));
        }
        // The name no longer resolves to the first address.
        assert_eq!(at(&after(&turned, &[resolved(2, ours())], None)), (ip(2), 11));
        // If all addresses are silent, the member keeps its last address.
        let down = after(&turned, &[resolved(2, silent.clone()), resolved(1, silent)], None);
        assert_eq!(at(&down), (ip(1), 11));
        // A configured endpoint is preferred over the previous address.
        let list = [listed(1, 21)];
        let by_list = census(&[by_url(21, ours())], Some(&list));
        assert_eq!(at(&by_list), (None, 21));
        let both = after(&by_list, &[by_url(21, ours()), resolved(1, ours())], Some(&list));
        assert_eq!(at(&both), (ip(1), 11));
    }

    /// A connection lost at the first address proves no fault of the second.
    #[test]
    fn a_suspicion_is_of_a_member_at_one_address() {
        let before = census(&[resolved(1, led_by(1, 1))], None);
        let stays = after(&before, &[resolved(1, led_by(1, 1))], None);
        let moved = after(&before, &[resolved(2, led_by(1, 1))], None);
        before.members[0].suspect();
        assert!(!stays.members[0].is_ready());
        assert!(moved.members[0].is_ready());
        // The member was lost before it was found at the second address: until an answer arrives, the second
        // address may be lost too.
        let moved = after(&stays, &[resolved(2, led_by(1, 1))], None);
        assert!(!moved.members[0].is_ready());
    }

    #[test]
    fn learners_the_leaderless_and_the_unlisted_take_no_traffic() {
        let mut learner = answer(3, LeaderView::Member(MemberId(1)), 2);
        learner.role = Role::Learner;
        let sightings = [
            configured(11, led_by(1, 1)),
            configured(12, ProbeObservation::Answered(answer(2, LeaderView::Nobody, 3))),
            configured(13, ProbeObservation::Answered(learner)),
            configured(14, led_by(4, 1)),
        ];
        let list = [listed(1, 11), listed(2, 12), listed(3, 13)];
        let seen = census(&sightings, Some(&list));
        let expected = [
            (1, 11, Ready),
            (2, 12, NotReady(UnreadyReason::NoLeader)),
            (3, 13, NotReady(UnreadyReason::Learner)),
            (4, 14, NotReady(UnreadyReason::Unlisted)),
        ];
        assert_eq!(states(&seen), expected);
        assert_eq!(seen.get(MemberId(3)).unwrap().role, Role::Learner);
        // Without a list, every answering member of the cluster is accepted.
        assert_eq!(states(&census(&sightings, None))[3], (4, 14, Ready));
    }

    #[test]
    fn another_cluster_is_quarantined() {
        let mut stranger = answer(1, LeaderView::Member(MemberId(1)), 9);
        stranger.cluster = Some(OTHER);
        let sightings = [configured(11, ProbeObservation::Answered(stranger)), configured(12, led_by(2, 2))];
        let list = [listed(1, 11), listed(2, 12)];
        let seen = census(&sightings, Some(&list));
        assert_eq!(states(&seen), [(1, 11, NotReady(UnreadyReason::ForeignCluster)), (2, 12, Ready)]);
        assert_eq!(seen.foreign, [ForeignAddress { endpoint: endpoint(11), cluster: OTHER }]);
        assert_eq!((seen.leader, seen.term), (Some(MemberId(2)), 2), "its word counts for nothing");
        // Without a list, even an equal member id does not make the stranger a member.
        assert_eq!(states(&census(&sightings, None)), [(2, 12, Ready)]);
    }

    #[test]
    fn a_cluster_id_that_is_not_told_is_enough_only_where_none_is_configured() {
        let mut silent_on_cluster = answer(1, LeaderView::Member(MemberId(1)), 0);
        silent_on_cluster.cluster = None;
        let sightings = [configured(11, ProbeObservation::Answered(silent_on_cluster))];
        let of = |pin, pinned| states(&census_of(pin, pinned, &sightings, None));
        assert_eq!(of(ClusterPin::FirstAnswer, None), [(1, 11, Ready)]);
        assert_eq!(
            of(ClusterPin::Id(OURS), Some(OURS)),
            [(1, 11, NotReady(UnreadyReason::UnverifiedCluster))]
        );
    }

    #[test]
    fn once_a_cluster_is_known_who_tells_none_must_be_known_or_listed() {
        let nameless = |member: u64, port| {
            let mut answer = answer(member, LeaderView::Member(MemberId(member)), 9);
            answer.cluster = None;
            configured(port, ProbeObservation::Answered(answer))
        };
        let sightings = [configured(11, led_by(1, 1)), nameless(2, 12)];
        let seen = |pinned, list: Option<&[ListedMember]>, known: &[u64]| {
            let known = known.iter().copied().map(MemberId).collect();
            let before = Membership::unknown(Instant::now());
            derive_membership(
                &CensusInput { pinned, known: &known, ..facts(&sightings, list, &before) },
                Instant::now(),
            )
        };
        let unverified = NotReady(UnreadyReason::UnverifiedCluster);
        let stranger = seen(Some(OURS), None, &[1]);
        assert_eq!(states(&stranger), [(1, 11, Ready), (2, 12, unverified)]);
        assert_eq!((stranger.leader, stranger.term), (Some(MemberId(1)), 2), "its word counts for nothing");
        assert_eq!(
            states(&seen(Some(OURS), Some(&[listed(1, 11)]), &[1])),
            [(1, 11, Ready), (2, 12, unverified)]
        );
        // Auth was turned on, or the list became unavailable: a known member stays known.
        assert_eq!(states(&seen(Some(OURS), None, &[1, 2]))[1], (2, 12, Ready));
        assert_eq!(states(&seen(Some(OURS), Some(&[listed(1, 11), listed(2, 12)]), &[]))[1], (2, 12, Ready));
        assert_eq!(states(&seen(None, None, &[])), [(2, 12, Ready)], "nobody is held against nothing");
    }

    #[test]
    fn a_learner_that_the_list_has_is_one_whether_or_not_it_tells_its_cluster() {
        let mut shy = answer(2, LeaderView::Somebody, 0);
        shy.cluster = None;
        let sightings = [configured(11, led_by(1, 1)), configured(12, ProbeObservation::Answered(shy))];
        let list = [listed(1, 11), ListedMember { role: Role::Learner, ..listed(2, 12) }];
        for pin in [ClusterPin::Id(OURS), ClusterPin::FirstAnswer] {
            let seen = census_of(pin, Some(OURS), &sightings, Some(&list));
            assert_eq!(states(&seen)[1], (2, 12, NotReady(UnreadyReason::Learner)));
            assert_eq!(seen.members[1].role, Role::Learner);
            let promoted = census_of(pin, Some(OURS), &[configured(12, led_by(2, 1))], Some(&list));
            assert_eq!(states(&promoted)[1], (2, 12, Ready), "it says itself that it votes by now");
        }
    }

    #[test]
    fn listed_members_without_a_usable_address_are_shown_as_absent() {
        let mut https = listed(2, 12);
        https.client_urls = ["https://127.0.0.1:12".to_owned()].into();
        let unstarted = ListedMember {
            name: "".into(),
            role: Role::Learner,
            client_urls: Arc::default(),
            ..listed(3, 13)
        };
        let list = [listed(1, 11), https, unstarted, listed(4, 14)];
        let seen =
            census(&[configured(11, led_by(1, 1)), by_url(14, ProbeObservation::Silent(None))], Some(&list));
        assert_eq!(states(&seen), [(1, 11, Ready), (4, 14, NotReady(UnreadyReason::Unreachable))]);
        let absent: Vec<_> = seen.absent.iter().map(|absent| (absent.id.0, absent.why)).collect();
        assert_eq!(absent, [(2, AbsenceReason::NoUsableUrl), (3, AbsenceReason::Unstarted)]);
    }

    #[test]
    fn a_member_that_left_the_list_and_is_silent_is_gone() {
        let sightings = [
            configured(11, led_by(1, 1)),
            configured(12, ProbeObservation::Silent(Some(answer(2, LeaderView::Member(MemberId(1)), 2)))),
        ];
        assert_eq!(states(&census(&sightings, Some(&[listed(1, 11)]))), [(1, 11, Ready)]);
        let shown = states(&census(&sightings, None));
        assert_eq!(shown, [(1, 11, Ready), (2, 12, NotReady(UnreadyReason::Unreachable))]);
    }

    #[test]
    fn the_leader_is_whom_the_highest_term_names() {
        let named = |member: u16, leader: Option<u64>, term| {
            configured(member, {
                let leader = leader.map_or(LeaderView::Nobody, |id| LeaderView::Member(MemberId(id)));
                ProbeObservation::Answered(answer(u64::from(member), leader, term))
            })
        };
        let leader = |sightings: &[AddressObservation]| census(sightings, None).leader.map(|id| id.0);
        // The isolated old leader still names itself.
        assert_eq!(leader(&[named(1, Some(1), 2), named(2, Some(3), 3), named(3, Some(3), 3)]), Some(3));
        assert_eq!(leader(&[named(1, Some(1), 2), named(2, None, 3)]), Some(1), "nobody names one in term 3");
        assert_eq!(leader(&[named(1, None, 4), named(2, None, 4)]), None);
        assert_eq!(leader(&[named(1, Some(1), 0), named(2, Some(2), 0)]), None, "a draw is no leader");
        assert_eq!(leader(&[named(1, Some(9), 2)]), Some(9), "it need not be reachable from here");
        let dead =
            configured(3, ProbeObservation::Silent(Some(answer(3, LeaderView::Member(MemberId(3)), 7))));
        assert_eq!(leader(&[named(1, Some(1), 2), dead]), Some(1), "the silent have no voice");
    }

    #[test]
    fn the_cluster_most_endpoints_name_is_pinned_once_all_were_asked() {
        let of = |port, cluster, leader| {
            let mut answer = answer(u64::from(port), leader, 1);
            answer.cluster = Some(cluster);
            configured(port, ProbeObservation::Answered(answer))
        };
        let led = LeaderView::Member(MemberId(1));
        assert_eq!(choose_cluster(&[of(1, OURS, led), configured(2, ProbeObservation::NotAsked)]), None);
        assert_eq!(choose_cluster(&[configured(2, ProbeObservation::Silent(None))]), None);
        let chosen = |sightings: &[AddressObservation]| {
            choose_cluster(sightings).map(|p| (p.cluster, p.rivals.len())).unwrap()
        };
        assert_eq!(chosen(&[of(1, OURS, led), configured(2, ProbeObservation::Silent(None))]), (OURS, 0));
        assert_eq!(chosen(&[of(1, OTHER, led), of(2, OURS, led), of(3, OURS, led)]), (OURS, 1));
        assert_eq!(chosen(&[of(1, OTHER, LeaderView::Nobody), of(2, OURS, led)]), (OURS, 1));
        assert_eq!(chosen(&[of(1, OTHER, led), of(2, OURS, led)]), (OTHER, 1));
        let rivals = choose_cluster(&[of(1, OURS, led), of(2, OURS, led), of(3, OTHER, led)]).unwrap().rivals;
        assert_eq!(rivals, [ForeignAddress { endpoint: endpoint(3), cluster: OTHER }]);
        let not_asked_yet =
            AddressObservation { source: AddressSource::Listed, ..configured(9, ProbeObservation::NotAsked) };
        assert_eq!(chosen(&[of(1, OURS, led), not_asked_yet]), (OURS, 0));
    }

    #[test]
    fn nothing_counts_before_a_cluster_is_pinned() {
        let seen = census_of(ClusterPin::FirstAnswer, None, &[configured(1, led_by(1, 1))], None);
        assert!(seen.members.is_empty() && seen.foreign.is_empty() && seen.leader.is_none());
    }

    #[test]
    fn urls_are_used_only_with_the_configured_scheme() {
        let host = |url, scheme| usable(url, scheme).map(|endpoint| (endpoint.host, endpoint.port));
        assert_eq!(host("http://10.0.0.1:2379", Scheme::Http), Some(("10.0.0.1".into(), 2379)));
        assert_eq!(host("https://m1.example:2379", Scheme::Https), Some(("m1.example".into(), 2379)));
        assert_eq!(host("http://[::1]:2379", Scheme::Http), Some(("::1".into(), 2379)));
        for url in [
            "https://m1:2379",
            "http://m1",
            "unix:///run/etcd",
            "m1:2379",
            "",
            "http://:2379",
            "http://m1:0x",
        ] {
            assert_eq!(usable(url, Scheme::Http), None, "{url:?}");
        }
        assert_eq!(usable("http://m1:2379", Scheme::Https), None);
    }

    #[test]
    fn peer_urls_are_those_of_the_list_and_a_refused_list_is_told_apart() {
        let list = [listed(1, 11), listed(2, 12)];
        let told = census(&[], Some(&list)).peer_urls;
        let of_one = |listed: &ListedMember| MemberPeerUrls {
            member: listed.id,
            name: Arc::clone(&listed.name),
            urls: Arc::clone(&listed.peer_urls),
        };
        assert_eq!(told, PeerUrls::Listed(list.iter().map(of_one).collect()));
        assert_eq!(census(&[], None).peer_urls, PeerUrls::Unknown);
        let before = Membership::unknown(Instant::now());
        let facts = CensusInput { pinned: None, refused: true, ..facts(&[], None, &before) };
        assert_eq!(derive_membership(&facts, Instant::now()).peer_urls, PeerUrls::Refused);
    }

    #[test]
    fn a_suspicion_outlives_the_snapshot_in_which_it_was_raised() {
        let sightings = [configured(1, led_by(1, 1))];
        let first = census(&sightings, None);
        let second = after(&first, &sightings, None);
        first.members[0].suspect();
        assert!(!second.members[0].is_ready());
    }
}
