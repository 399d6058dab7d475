//! From what was heard at each address to who the members are: pure.
//!
//! Owns: which cluster is pinned, which address stands for which member, who is ready, who leads. Must not know: how
//! anything was asked, time (it only passes on when the cluster was last seen whole).
//! Invariants: a member's identity is what it says itself, never its address; an answer from another cluster makes
//! nobody ready; the leader is named only where the members of the highest term do not contradict each other; a member stays
//! where it was found for as long as it answers there, in whatever order addresses are told, and leaves only for a configured
//! endpoint; a suspicion is of a member at one address; one that moves while it is suspected is so at the other address too, until it
//! has answered there.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use tokio::time::Instant;

use crate::config::{ClusterPin, Discovery, Endpoint, Scheme};
use crate::identity::{ClusterId, MemberId};
use crate::upstream::membership::{
    Absence, Absent, Foreign, Member, Membership, PeerUrls, Peering, Readiness, Reason, Role,
};
use crate::upstream::version::Version;
use crate::upstream::vitals::Vitals;

/// What a member said of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Answer {
    pub(super) member: MemberId,
    /// `None` where it tells none to the probing user.
    pub(super) cluster: Option<ClusterId>,
    pub(super) version: Option<Version>,
    pub(super) role: Role,
    pub(super) leader: Sight,
    /// 0 where it tells none.
    pub(super) term: u64,
    /// `None` where it tells none.
    pub(super) vitals: Option<Arc<Vitals>>,
}

/// Which leader a member sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sight {
    Nobody,
    /// One that it does not name.
    Somebody,
    Member(MemberId),
}

/// One address and what was heard there last.
#[derive(Clone, Debug)]
pub(super) struct Sighting {
    pub(super) endpoint: Endpoint,
    /// At which address of the endpoint's name; `None` where the host is one itself.
    pub(super) at: Option<IpAddr>,
    pub(super) source: Source,
    pub(super) seen: Seen,
}

impl Sighting {
    /// Whether it is where the member was found.
    pub(super) fn is_of(&self, member: &Member) -> bool {
        self.endpoint == member.endpoint && self.at == member.at
    }
}

/// How we came to an address. The order is the preference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Source {
    Configured,
    Listed,
}

/// What was heard at an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Seen {
    NotAsked,
    Answered(Answer),
    /// Nothing, where this member answered before.
    Silent(Option<Answer>),
}

/// A member as the member list has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Listed {
    pub(super) id: MemberId,
    pub(super) name: Arc<str>,
    pub(super) role: Role,
    pub(super) client_urls: Arc<[String]>,
    pub(super) peer_urls: Arc<[String]>,
}

/// Everything that the membership follows from.
pub(super) struct Facts<'a> {
    pub(super) pin: ClusterPin,
    pub(super) pinned: Option<ClusterId>,
    /// Of the configured endpoints: no other is used.
    pub(super) scheme: Scheme,
    /// What hosts of the list may be used.
    pub(super) discovery: &'a Discovery,
    pub(super) sightings: &'a [Sighting],
    pub(super) list: Option<&'a [Listed]>,
    /// Whether the list was refused where it was last asked for.
    pub(super) refused: bool,
    /// Who is known to be of the pinned cluster: by an answer of its own that named it, or by the last list that was had.
    pub(super) known: &'a BTreeSet<MemberId>,
    /// For the suspicions, which outlive snapshots.
    pub(super) before: &'a Membership,
}

/// Which cluster was chosen when none was configured, and who named another.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Pinning {
    pub(super) cluster: ClusterId,
    pub(super) rivals: Vec<Foreign>,
}

/// Chooses the cluster that most configured endpoints name, once every one was asked; of equals the one that has a
/// leader, then the one named first. `None` while some were not asked, or none names a cluster.
pub(super) fn choose_cluster(sightings: &[Sighting]) -> Option<Pinning> {
    let configured = || sightings.iter().filter(|sighting| sighting.source == Source::Configured);
    if configured().any(|sighting| sighting.seen == Seen::NotAsked) {
        return None;
    }
    let named: Vec<(&Endpoint, ClusterId, bool)> = configured()
        .filter_map(|sighting| match &sighting.seen {
            Seen::Answered(answer) => {
                Some((&sighting.endpoint, answer.cluster?, answer.leader != Sight::Nobody))
            }
            _ => None,
        })
        .collect();
    let rank = |cluster: ClusterId| {
        let voices = named.iter().filter(|(_, named, _)| *named == cluster).count();
        let led = named.iter().any(|(_, named, led)| *named == cluster && *led);
        (voices, led)
    };
    // min_by_key keeps the first of equals.
    let (_, cluster, _) = *named.iter().min_by_key(|(_, cluster, _)| Reverse(rank(*cluster)))?;
    let rivals = named
        .iter()
        .filter(|(_, named, _)| *named != cluster)
        .map(|(endpoint, cluster, _)| Foreign { endpoint: (*endpoint).clone(), cluster: *cluster })
        .collect();
    Some(Pinning { cluster, rivals })
}

/// Who the members are.
pub(super) fn take(facts: &Facts<'_>, confirmed: Instant) -> Membership {
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
    let answers: Vec<&Answer> = ours.filter_map(|member| facts.answer(member.id)).collect();
    found.term = answers.iter().map(|answer| answer.term).max().unwrap_or(0);
    found.leader = leader(&answers);
    found
}

/// The address of a URL that may be used: of the scheme of the configured endpoints, with a host and a port.
pub(in crate::upstream) fn usable(url: &str, scheme: Scheme) -> Option<Endpoint> {
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

/// Whether who says this of its cluster may be of the pinned one: it names no other.
pub(super) fn is_ours(cluster: Option<ClusterId>, pinned: Option<ClusterId>) -> bool {
    cluster.is_none() || cluster == pinned
}

/// The leader that most voters of the highest term name; nobody where two are named equally often.
fn leader(answers: &[&Answer]) -> Option<MemberId> {
    let named =
        answers.iter().filter(|answer| answer.role == Role::Voter).filter_map(|answer| match answer.leader {
            Sight::Member(leader) => Some((answer.term, leader)),
            Sight::Nobody | Sight::Somebody => None,
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

/// What it says itself, if it says enough of itself to be believed; else what the list says.
fn role(answer: &Answer, listed: Option<&Listed>) -> Role {
    match (answer.cluster, listed) {
        (None, Some(listed)) if listed.role == Role::Learner => Role::Learner,
        _ => answer.role,
    }
}

impl Facts<'_> {
    fn peer_urls(&self) -> PeerUrls {
        let of_one = |listed: &Listed| Peering {
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

    /// Every member that is listed or answers; without a list those too that answered before.
    fn ids(&self) -> BTreeSet<MemberId> {
        let listed = self.list.into_iter().flatten().map(|listed| listed.id);
        let heard = self.sightings.iter().filter_map(|sighting| match &sighting.seen {
            Seen::Answered(answer) if self.is_ours(answer) => Some(answer.member),
            Seen::Silent(Some(answer)) if self.list.is_none() && self.is_ours(answer) => Some(answer.member),
            _ => None,
        });
        listed.chain(heard).collect()
    }

    /// An answer of no other cluster, as far as it tells. While none is pinned yet an answer that names one is nobody's.
    fn is_ours(&self, answer: &Answer) -> bool {
        is_ours(answer.cluster, self.pinned)
    }

    /// Whether it is certain of which cluster the answer is. Where auth is on learners tell nobody; voters do (see `probe`), unless
    /// something in between lets no watch pass: as long as nobody has named a cluster there is nothing to hold them against. Once one
    /// has, who names none must have done so before, or be in the list of those who did. Where an id is configured only that counts.
    fn is_verified(&self, answer: &Answer, listed: Option<&Listed>) -> bool {
        answer.cluster.is_some()
            || match (self.pin, self.pinned) {
                (ClusterPin::Id(_), _) => false,
                (ClusterPin::FirstAnswer | ClusterPin::Follow, None) => true,
                (ClusterPin::FirstAnswer | ClusterPin::Follow, Some(_)) => {
                    listed.is_some() || self.known.contains(&answer.member)
                }
            }
    }

    fn foreign(&self, sighting: &Sighting) -> Option<Foreign> {
        let Seen::Answered(answer) = &sighting.seen else { return None };
        let cluster = answer.cluster?;
        (self.pinned? != cluster).then(|| Foreign { endpoint: sighting.endpoint.clone(), cluster })
    }

    /// The address that stands for a member: one that answers before one that does not, a configured one before a
    /// listed one, the one that stood for it before any other, then in their order.
    fn stands_for(&self, id: MemberId) -> Option<&Sighting> {
        let stood = self.before.get(id);
        let rank = |sighting: &&Sighting| match &sighting.seen {
            Seen::Answered(answer) if self.is_ours(answer) && answer.member == id => Some(0),
            Seen::Silent(Some(answer)) if self.is_ours(answer) && answer.member == id => Some(1),
            _ => None,
        };
        let moves = |sighting: &Sighting| stood.is_none_or(|member| !sighting.is_of(member));
        let candidates =
            self.sightings.iter().filter_map(|sighting| Some((rank(&sighting)?, sighting.source, sighting)));
        let best = candidates.min_by_key(|(rank, source, sighting)| (*rank, *source, moves(sighting)));
        best.map(|(_, _, sighting)| sighting)
    }

    /// What the member says now.
    fn answer(&self, id: MemberId) -> Option<&Answer> {
        match &self.stands_for(id)?.seen {
            Seen::Answered(answer) => Some(answer),
            _ => None,
        }
    }

    fn member(&self, id: MemberId) -> Result<Member, Absent> {
        let listed = self.list.into_iter().flatten().find(|listed| listed.id == id);
        let known = self.before.get(id);
        let stands = self.stands_for(id);
        let (endpoint, at, readiness) = match (stands, listed) {
            (Some(sighting), _) => (sighting.endpoint.clone(), sighting.at, self.readiness(sighting, listed)),
            (None, Some(listed)) => {
                let (endpoint, readiness) = self.by_list(listed)?;
                (endpoint, None, readiness)
            }
            (None, None) => return Err(Absent { id, name: "".into(), why: Absence::NoUsableUrl }),
        };
        let last = stands.and_then(|sighting| match &sighting.seen {
            Seen::Answered(answer) | Seen::Silent(Some(answer)) => Some(answer),
            Seen::NotAsked | Seen::Silent(None) => None,
        });
        let listed_role = listed.map_or(Role::Voter, |listed| listed.role);
        let stayed = known.filter(|member| member.endpoint == endpoint && member.at == at);
        let suspicion = match (stayed, known) {
            (Some(member), _) => Arc::clone(&member.suspicion),
            (None, Some(member)) => Arc::new(member.suspicion.carried()),
            (None, None) => Arc::default(),
        };
        Ok(Member {
            id,
            name: listed.map_or_else(|| "".into(), |listed| Arc::clone(&listed.name)),
            endpoint,
            at,
            role: last.map_or(listed_role, |answer| role(answer, listed)),
            version: last.and_then(|answer| answer.version),
            readiness,
            term: last.map_or(0, |answer| answer.term),
            vitals: last.and_then(|answer| answer.vitals.clone()),
            client_urls: listed.map_or_else(Arc::default, |listed| Arc::clone(&listed.client_urls)),
            suspicion,
            rest: known.map_or_else(Arc::default, |member| Arc::clone(&member.rest)),
            conduct: known.map_or_else(Arc::default, |member| Arc::clone(&member.conduct)),
        })
    }

    fn readiness(&self, sighting: &Sighting, listed: Option<&Listed>) -> Readiness {
        let Seen::Answered(answer) = &sighting.seen else {
            return Readiness::NotReady(Reason::Unreachable);
        };
        let learns = role(answer, listed) == Role::Learner;
        if learns && listed.is_some() {
            // The list knows it, and a learner tells nobody of which cluster it is where auth is on.
            Readiness::NotReady(Reason::Learner)
        } else if !self.is_verified(answer, listed) {
            Readiness::NotReady(Reason::UnverifiedCluster)
        } else if self.list.is_some() && listed.is_none() {
            Readiness::NotReady(Reason::Unlisted)
        } else if learns {
            Readiness::NotReady(Reason::Learner)
        } else if answer.leader == Sight::Nobody {
            Readiness::NotReady(Reason::NoLeader)
        } else {
            Readiness::Ready
        }
    }

    /// A listed member that never answered anywhere: its first usable URL, and what is there.
    fn by_list(&self, listed: &Listed) -> Result<(Endpoint, Readiness), Absent> {
        let absent = |why| Absent { id: listed.id, name: Arc::clone(&listed.name), why };
        if listed.name.is_empty() && listed.client_urls.is_empty() {
            return Err(absent(Absence::Unstarted));
        }
        let usable = || listed.client_urls.iter().filter_map(|url| usable(url, self.scheme));
        let mut allowed = usable().filter(|endpoint| self.discovery.allows(&endpoint.host));
        let endpoint = allowed.next().ok_or_else(|| {
            absent(if usable().next().is_some() { Absence::NotAllowed } else { Absence::NoUsableUrl })
        })?;
        let there = || self.sightings.iter().filter(|sighting| sighting.endpoint == endpoint);
        let reason = if there().any(|sighting| self.foreign(sighting).is_some()) {
            Reason::ForeignCluster
        } else if there().any(|sighting| matches!(sighting.seen, Seen::Answered(_) | Seen::Silent(_))) {
            Reason::Unreachable
        } else {
            Reason::Unprobed
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

    fn answer(member: u64, leader: Sight, term: u64) -> Answer {
        Answer {
            member: MemberId(member),
            cluster: Some(OURS),
            version: Version::parse("3.5.1").ok(),
            role: Role::Voter,
            leader,
            term,
            vitals: None,
        }
    }

    fn led_by(member: u64, leader: u64) -> Seen {
        Seen::Answered(answer(member, Sight::Member(MemberId(leader)), 2))
    }

    fn configured(port: u16, seen: Seen) -> Sighting {
        Sighting { endpoint: endpoint(port), at: None, source: Source::Configured, seen }
    }

    fn by_url(port: u16, seen: Seen) -> Sighting {
        Sighting { endpoint: endpoint(port), at: None, source: Source::Listed, seen }
    }

    fn listed(id: u64, port: u16) -> Listed {
        Listed {
            id: MemberId(id),
            name: format!("m{id}").into(),
            role: Role::Voter,
            client_urls: [format!("http://127.0.0.1:{port}")].into(),
            peer_urls: [format!("https://127.0.0.1:{}", port + 1)].into(),
        }
    }

    fn facts<'a>(sightings: &'a [Sighting], list: Option<&'a [Listed]>, before: &'a Membership) -> Facts<'a> {
        static DISCOVERY: LazyLock<Discovery> = LazyLock::new(Discovery::default);
        static NOBODY: BTreeSet<MemberId> = BTreeSet::new();
        Facts {
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

    fn census(sightings: &[Sighting], list: Option<&[Listed]>) -> Membership {
        census_of(ClusterPin::FirstAnswer, Some(OURS), sightings, list)
    }

    fn census_of(
        pin: ClusterPin,
        pinned: Option<ClusterId>,
        sightings: &[Sighting],
        list: Option<&[Listed]>,
    ) -> Membership {
        let now = Instant::now();
        let before = Membership::unknown(now);
        take(&Facts { pin, pinned, ..facts(sightings, list, &before) }, now)
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
        let silent = Seen::Silent(Some(answer(1, Sight::Nobody, 1)));
        let one = [configured(11, silent.clone()), by_url(21, led_by(1, 1))];
        assert_eq!(states(&census(&one, Some(&list))), [(1, 21, Ready)]);
        let none = [configured(11, silent), by_url(21, Seen::Silent(None))];
        assert_eq!(states(&census(&none, Some(&list))), [(1, 11, NotReady(Reason::Unreachable))]);
    }

    fn resolved(last: u8, seen: Seen) -> Sighting {
        Sighting { at: Some(IpAddr::from([127, 0, 0, last])), ..configured(11, seen) }
    }

    fn after(before: &Membership, sightings: &[Sighting], list: Option<&[Listed]>) -> Membership {
        take(&facts(sightings, list, before), Instant::now())
    }

    fn at(membership: &Membership) -> (Option<IpAddr>, u16) {
        let member = membership.get(MemberId(1)).unwrap();
        (member.at, member.endpoint.port)
    }

    #[test]
    fn a_member_stays_where_it_was_found_in_whatever_order_addresses_are_told() {
        let ours = || led_by(1, 1);
        let ip = |last: u8| Some(IpAddr::from([127, 0, 0, last]));
        let first = census(&[resolved(1, ours()), resolved(2, ours())], None);
        assert_eq!(at(&first), (ip(1), 11));
        let turned = after(&first, &[resolved(2, ours()), resolved(1, ours())], None);
        assert_eq!(at(&turned), (ip(1), 11), "another order moves nobody");
        // It moves when nobody answers there any more, or somebody else; and stays then, too.
        let silent = Seen::Silent(Some(answer(1, Sight::Nobody, 1)));
        for gone in [silent.clone(), led_by(2, 1)] {
            let moved = after(&turned, &[resolved(2, ours()), resolved(1, gone)], None);
            assert_eq!(at(&moved), (ip(2), 11));
            let back = after(&moved, &[resolved(1, ours()), resolved(2, ours())], None);
            assert_eq!(at(&back), (ip(2), 11));
        }
        // A name leads there no more.
        assert_eq!(at(&after(&turned, &[resolved(2, ours())], None)), (ip(2), 11));
        // Where nobody answers nowhere it is shown where it was.
        let down = after(&turned, &[resolved(2, silent.clone()), resolved(1, silent)], None);
        assert_eq!(at(&down), (ip(1), 11));
        // A configured endpoint is preferred all the same.
        let list = [listed(1, 21)];
        let by_list = census(&[by_url(21, ours())], Some(&list));
        assert_eq!(at(&by_list), (None, 21));
        let both = after(&by_list, &[by_url(21, ours()), resolved(1, ours())], Some(&list));
        assert_eq!(at(&both), (ip(1), 11));
    }

    /// What was sent to the first address says nothing of the second.
    #[test]
    fn a_suspicion_is_of_a_member_at_one_address() {
        let before = census(&[resolved(1, led_by(1, 1))], None);
        let stays = after(&before, &[resolved(1, led_by(1, 1))], None);
        let moved = after(&before, &[resolved(2, led_by(1, 1))], None);
        before.members[0].suspect();
        assert!(!stays.members[0].is_ready());
        assert!(moved.members[0].is_ready());
        // Where it was lost before it was found elsewhere, that nobody has answered there since may be the same loss.
        let moved = after(&stays, &[resolved(2, led_by(1, 1))], None);
        assert!(!moved.members[0].is_ready());
    }

    #[test]
    fn learners_the_leaderless_and_the_unlisted_take_no_traffic() {
        let mut learner = answer(3, Sight::Member(MemberId(1)), 2);
        learner.role = Role::Learner;
        let sightings = [
            configured(11, led_by(1, 1)),
            configured(12, Seen::Answered(answer(2, Sight::Nobody, 3))),
            configured(13, Seen::Answered(learner)),
            configured(14, led_by(4, 1)),
        ];
        let list = [listed(1, 11), listed(2, 12), listed(3, 13)];
        let seen = census(&sightings, Some(&list));
        let expected = [
            (1, 11, Ready),
            (2, 12, NotReady(Reason::NoLeader)),
            (3, 13, NotReady(Reason::Learner)),
            (4, 14, NotReady(Reason::Unlisted)),
        ];
        assert_eq!(states(&seen), expected);
        assert_eq!(seen.get(MemberId(3)).unwrap().role, Role::Learner);
        // Without a list whoever answers is a member.
        assert_eq!(states(&census(&sightings, None))[3], (4, 14, Ready));
    }

    #[test]
    fn another_cluster_is_quarantined() {
        let mut stranger = answer(1, Sight::Member(MemberId(1)), 9);
        stranger.cluster = Some(OTHER);
        let sightings = [configured(11, Seen::Answered(stranger)), configured(12, led_by(2, 2))];
        let list = [listed(1, 11), listed(2, 12)];
        let seen = census(&sightings, Some(&list));
        assert_eq!(states(&seen), [(1, 11, NotReady(Reason::ForeignCluster)), (2, 12, Ready)]);
        assert_eq!(seen.foreign, [Foreign { endpoint: endpoint(11), cluster: OTHER }]);
        assert_eq!((seen.leader, seen.term), (Some(MemberId(2)), 2), "its word counts for nothing");
        // Not even the same member id without a list makes it a member.
        assert_eq!(states(&census(&sightings, None)), [(2, 12, Ready)]);
    }

    #[test]
    fn a_cluster_id_that_is_not_told_is_enough_only_where_none_is_configured() {
        let mut silent_on_cluster = answer(1, Sight::Member(MemberId(1)), 0);
        silent_on_cluster.cluster = None;
        let sightings = [configured(11, Seen::Answered(silent_on_cluster))];
        let of = |pin, pinned| states(&census_of(pin, pinned, &sightings, None));
        assert_eq!(of(ClusterPin::FirstAnswer, None), [(1, 11, Ready)]);
        assert_eq!(of(ClusterPin::Id(OURS), Some(OURS)), [(1, 11, NotReady(Reason::UnverifiedCluster))]);
    }

    #[test]
    fn once_a_cluster_is_known_who_tells_none_must_be_known_or_listed() {
        let nameless = |member: u64, port| {
            let mut answer = answer(member, Sight::Member(MemberId(member)), 9);
            answer.cluster = None;
            configured(port, Seen::Answered(answer))
        };
        let sightings = [configured(11, led_by(1, 1)), nameless(2, 12)];
        let seen = |pinned, list: Option<&[Listed]>, known: &[u64]| {
            let known = known.iter().copied().map(MemberId).collect();
            let before = Membership::unknown(Instant::now());
            take(&Facts { pinned, known: &known, ..facts(&sightings, list, &before) }, Instant::now())
        };
        let unverified = NotReady(Reason::UnverifiedCluster);
        let stranger = seen(Some(OURS), None, &[1]);
        assert_eq!(states(&stranger), [(1, 11, Ready), (2, 12, unverified)]);
        assert_eq!((stranger.leader, stranger.term), (Some(MemberId(1)), 2), "its word counts for nothing");
        assert_eq!(
            states(&seen(Some(OURS), Some(&[listed(1, 11)]), &[1])),
            [(1, 11, Ready), (2, 12, unverified)]
        );
        // Auth was turned on, or there is no list to be had any more: it is who it was.
        assert_eq!(states(&seen(Some(OURS), None, &[1, 2]))[1], (2, 12, Ready));
        assert_eq!(states(&seen(Some(OURS), Some(&[listed(1, 11), listed(2, 12)]), &[]))[1], (2, 12, Ready));
        assert_eq!(states(&seen(None, None, &[])), [(2, 12, Ready)], "nobody is held against nothing");
    }

    #[test]
    fn a_learner_that_the_list_has_is_one_whether_or_not_it_tells_its_cluster() {
        let mut shy = answer(2, Sight::Somebody, 0);
        shy.cluster = None;
        let sightings = [configured(11, led_by(1, 1)), configured(12, Seen::Answered(shy))];
        let list = [listed(1, 11), Listed { role: Role::Learner, ..listed(2, 12) }];
        for pin in [ClusterPin::Id(OURS), ClusterPin::FirstAnswer] {
            let seen = census_of(pin, Some(OURS), &sightings, Some(&list));
            assert_eq!(states(&seen)[1], (2, 12, NotReady(Reason::Learner)));
            assert_eq!(seen.members[1].role, Role::Learner);
            let promoted = census_of(pin, Some(OURS), &[configured(12, led_by(2, 1))], Some(&list));
            assert_eq!(states(&promoted)[1], (2, 12, Ready), "it says itself that it votes by now");
        }
    }

    #[test]
    fn listed_members_without_a_usable_address_are_shown_as_absent() {
        let mut https = listed(2, 12);
        https.client_urls = ["https://127.0.0.1:12".to_owned()].into();
        let unstarted =
            Listed { name: "".into(), role: Role::Learner, client_urls: Arc::default(), ..listed(3, 13) };
        let list = [listed(1, 11), https, unstarted, listed(4, 14)];
        let seen = census(&[configured(11, led_by(1, 1)), by_url(14, Seen::Silent(None))], Some(&list));
        assert_eq!(states(&seen), [(1, 11, Ready), (4, 14, NotReady(Reason::Unreachable))]);
        let absent: Vec<_> = seen.absent.iter().map(|absent| (absent.id.0, absent.why)).collect();
        assert_eq!(absent, [(2, Absence::NoUsableUrl), (3, Absence::Unstarted)]);
    }

    #[test]
    fn a_member_that_left_the_list_and_is_silent_is_gone() {
        let sightings = [
            configured(11, led_by(1, 1)),
            configured(12, Seen::Silent(Some(answer(2, Sight::Member(MemberId(1)), 2)))),
        ];
        assert_eq!(states(&census(&sightings, Some(&[listed(1, 11)]))), [(1, 11, Ready)]);
        let shown = states(&census(&sightings, None));
        assert_eq!(shown, [(1, 11, Ready), (2, 12, NotReady(Reason::Unreachable))]);
    }

    #[test]
    fn the_leader_is_whom_the_highest_term_names() {
        let named = |member: u16, leader: Option<u64>, term| {
            configured(member, {
                let leader = leader.map_or(Sight::Nobody, |id| Sight::Member(MemberId(id)));
                Seen::Answered(answer(u64::from(member), leader, term))
            })
        };
        let leader = |sightings: &[Sighting]| census(sightings, None).leader.map(|id| id.0);
        // The old leader, cut off, still believes in itself.
        assert_eq!(leader(&[named(1, Some(1), 2), named(2, Some(3), 3), named(3, Some(3), 3)]), Some(3));
        assert_eq!(leader(&[named(1, Some(1), 2), named(2, None, 3)]), Some(1), "nobody names one in term 3");
        assert_eq!(leader(&[named(1, None, 4), named(2, None, 4)]), None);
        assert_eq!(leader(&[named(1, Some(1), 0), named(2, Some(2), 0)]), None, "a draw is no leader");
        assert_eq!(leader(&[named(1, Some(9), 2)]), Some(9), "it need not be reachable from here");
        let dead = configured(3, Seen::Silent(Some(answer(3, Sight::Member(MemberId(3)), 7))));
        assert_eq!(leader(&[named(1, Some(1), 2), dead]), Some(1), "the silent have no voice");
    }

    #[test]
    fn the_cluster_most_endpoints_name_is_pinned_once_all_were_asked() {
        let of = |port, cluster, leader| {
            let mut answer = answer(u64::from(port), leader, 1);
            answer.cluster = Some(cluster);
            configured(port, Seen::Answered(answer))
        };
        let led = Sight::Member(MemberId(1));
        assert_eq!(choose_cluster(&[of(1, OURS, led), configured(2, Seen::NotAsked)]), None);
        assert_eq!(choose_cluster(&[configured(2, Seen::Silent(None))]), None);
        let chosen =
            |sightings: &[Sighting]| choose_cluster(sightings).map(|p| (p.cluster, p.rivals.len())).unwrap();
        assert_eq!(chosen(&[of(1, OURS, led), configured(2, Seen::Silent(None))]), (OURS, 0));
        assert_eq!(chosen(&[of(1, OTHER, led), of(2, OURS, led), of(3, OURS, led)]), (OURS, 1));
        assert_eq!(chosen(&[of(1, OTHER, Sight::Nobody), of(2, OURS, led)]), (OURS, 1));
        assert_eq!(chosen(&[of(1, OTHER, led), of(2, OURS, led)]), (OTHER, 1));
        let rivals = choose_cluster(&[of(1, OURS, led), of(2, OURS, led), of(3, OTHER, led)]).unwrap().rivals;
        assert_eq!(rivals, [Foreign { endpoint: endpoint(3), cluster: OTHER }]);
        let not_asked_yet = Sighting { source: Source::Listed, ..configured(9, Seen::NotAsked) };
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
        let of_one = |listed: &Listed| Peering {
            member: listed.id,
            name: Arc::clone(&listed.name),
            urls: Arc::clone(&listed.peer_urls),
        };
        assert_eq!(told, PeerUrls::Listed(list.iter().map(of_one).collect()));
        assert_eq!(census(&[], None).peer_urls, PeerUrls::Unknown);
        let before = Membership::unknown(Instant::now());
        let facts = Facts { pinned: None, refused: true, ..facts(&[], None, &before) };
        assert_eq!(take(&facts, Instant::now()).peer_urls, PeerUrls::Refused);
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
