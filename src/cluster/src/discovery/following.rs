//! Decides if all members have become a different cluster (`cluster.identity = "follow"`). Pure.
//!
//! Owns: the definition of agreement, and its minimum duration. Must not know: the consequences of a
//! decision.
//! Invariants: each configured endpoint, or target of an SRV record, names the new cluster with a leader at
//! more than half of the addresses of the endpoint's name; no answer at any of these addresses, nor at an
//! address left out by the last DNS answers, hides the cluster id or names any cluster but the new one; all
//! conditions hold without interruption for [`AGREED`]. Silence is no agreement: a single endpoint without
//! any answer keeps Keyward on the old cluster until the endpoint answers, resolves to new addresses, or is
//! removed from the configuration. Reason: `docs/decisions.md#d20`.

use std::time::Duration;

use tokio::time::Instant;

use super::census::{AddressObservation, AddressSource, LeaderView, ProbeObservation};
use keyward_config::Endpoint;
use keyward_etcd::identity::ClusterId;

/// Minimum duration of the agreement.
pub(super) const AGREED: Duration = Duration::from_secs(3);

/// The different cluster agreed on by the configured endpoints. `sightings` has each current address of the
/// endpoints, and left-out addresses still answered by our cluster; for an unresolvable endpoint, one
/// sighting without an answer.
pub(super) fn agreed(pinned: ClusterId, sightings: &[AddressObservation]) -> Option<ClusterId> {
    let configured = || sightings.iter().filter(|sighting| sighting.source == AddressSource::Configured);
    let mut endpoints: Vec<EndpointAgreement<'_>> = Vec::new();
    let mut named = None;
    for sighting in configured() {
        let at = endpoints.iter().position(|known| known.of == &sighting.endpoint);
        let at = at.unwrap_or_else(|| {
            endpoints.push(EndpointAgreement { of: &sighting.endpoint, all: 0, agree: 0 });
            endpoints.len() - 1
        });
        endpoints[at].all += 1;
        let ProbeObservation::Answered(answer) = &sighting.seen else { continue };
        // A member hiding its cluster id may belong to the old cluster.
        let cluster = answer.cluster?;
        if cluster == pinned || named.is_some_and(|named| named != cluster) {
            return None;
        }
        named = Some(cluster);
        endpoints[at].agree += usize::from(answer.leader != LeaderView::Nobody);
    }
    named.filter(|_| endpoints.iter().all(|endpoint| endpoint.agree * 2 > endpoint.all))
}

/// The number of an endpoint's addresses, and the number of addresses agreeing on the new cluster with a
/// leader.
struct EndpointAgreement<'a> {
    of: &'a Endpoint,
    all: usize,
    agree: usize,
}

/// The cluster agreed on, and the start of the agreement.
#[derive(Debug, Default)]
pub(super) struct FollowAgreement(Option<(ClusterId, Instant)>);

impl FollowAgreement {
    /// Takes in the current agreement; returns the cluster to follow once the agreement has lasted long
    /// enough.
    pub(super) fn look(&mut self, agreed: Option<ClusterId>, now: Instant) -> Option<ClusterId> {
        match (agreed, self.0) {
            (Some(agreed), Some((cluster, since))) if agreed == cluster => {
                (now >= since + AGREED).then_some(cluster)
            }
            (agreed, _) => {
                if let Some(cluster) = agreed {
                    tracing::warn!(
                        %cluster, within = ?AGREED,
                        "all endpoints name another cluster: Keyward follows it if that lasts"
                    );
                }
                self.0 = agreed.map(|cluster| (cluster, now));
                None
            }
        }
    }

    /// The time of the next check if no new answer arrives.
    pub(super) fn due(&self) -> Option<Instant> {
        self.0.map(|(_, since)| since + AGREED)
    }

    /// Forgets the agreement, after following the cluster.
    pub(super) fn end(&mut self) {
        self.0 = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::discovery::census::MemberProbeAnswer;
    use crate::membership::Role;
    use keyward_config::Scheme;
    use keyward_etcd::identity::MemberId;

    const OLD: ClusterId = ClusterId(1);
    const NEW: ClusterId = ClusterId(2);
    const THIRD: ClusterId = ClusterId(3);

    fn at(port: u16, source: AddressSource, seen: ProbeObservation) -> AddressObservation {
        let endpoint = Endpoint { scheme: Scheme::Http, host: "m".into(), port };
        AddressObservation { endpoint, at: None, source, seen }
    }

    fn says(port: u16, cluster: Option<ClusterId>, leader: LeaderView) -> AddressObservation {
        let seen = ProbeObservation::Answered(MemberProbeAnswer {
            member: MemberId(port.into()),
            cluster,
            version: None,
            role: Role::Voter,
            leader,
            term: 1,
            store_status: None,
        });
        at(port, AddressSource::Configured, seen)
    }

    fn of(port: u16, cluster: ClusterId) -> AddressObservation {
        says(port, Some(cluster), LeaderView::Somebody)
    }

    fn silent(port: u16) -> AddressObservation {
        at(port, AddressSource::Configured, ProbeObservation::Silent(None))
    }

    #[test]
    fn every_endpoint_must_name_one_other_cluster() {
        assert_eq!(agreed(OLD, &[of(1, NEW), of(2, NEW), of(3, NEW)]), Some(NEW));
        assert_eq!(agreed(OLD, &[of(1, NEW), of(2, NEW), silent(3)]), None, "one says nothing");
        let lost = at(3, AddressSource::Configured, ProbeObservation::NotAsked);
        assert_eq!(agreed(OLD, &[of(1, NEW), of(2, NEW), lost]), None, "one was not asked yet");
        assert_eq!(agreed(OLD, &[of(1, NEW), silent(2)]), None);
        assert_eq!(agreed(OLD, &[of(1, NEW)]), Some(NEW));
        assert_eq!(agreed(OLD, &[of(1, NEW), of(2, NEW), of(3, OLD)]), None, "one is still there");
        assert_eq!(agreed(OLD, &[of(1, NEW), of(2, NEW), of(3, THIRD)]), None, "they disagree");
        let unnamed = says(3, None, LeaderView::Somebody);
        assert_eq!(agreed(OLD, &[of(1, NEW), of(2, NEW), unnamed]), None, "it may be of the old one");
        assert_eq!(agreed(OLD, &[of(1, OLD), of(2, OLD), silent(3)]), None);
        assert_eq!(agreed(OLD, &[]), None);
    }

    #[test]
    fn who_sees_no_leader_agrees_to_nothing_and_disagrees_all_the_same() {
        let leaderless = |port, cluster| says(port, Some(cluster), LeaderView::Nobody);
        assert_eq!(agreed(OLD, &[leaderless(1, NEW), leaderless(2, NEW), leaderless(3, NEW)]), None);
        assert_eq!(agreed(OLD, &[leaderless(1, NEW), of(2, NEW), of(3, NEW)]), None);
        assert_eq!(agreed(OLD, &[leaderless(1, OLD), of(2, NEW), of(3, NEW)]), None);
    }

    #[test]
    fn of_the_addresses_of_each_endpoint_more_than_half_must_agree_and_none_differ() {
        // Sightings with an equal port are addresses of one endpoint.
        assert_eq!(agreed(OLD, &[of(1, NEW), silent(1)]), None, "a half is not more than half");
        assert_eq!(agreed(OLD, &[of(1, NEW), of(1, NEW), silent(1)]), Some(NEW));
        let leaderless = says(1, Some(NEW), LeaderView::Nobody);
        assert_eq!(agreed(OLD, &[of(1, NEW), of(1, NEW), leaderless.clone()]), Some(NEW));
        assert_eq!(agreed(OLD, &[of(1, NEW), leaderless]), None);
        assert_eq!(agreed(OLD, &[of(1, NEW), of(1, NEW), of(1, NEW), of(1, OLD)]), None, "one differs");
        assert_eq!(
            agreed(OLD, &[of(1, NEW), of(1, NEW), silent(2)]),
            None,
            "the other endpoint says nothing"
        );
        assert_eq!(agreed(OLD, &[of(1, NEW), of(2, NEW), of(2, NEW), silent(2)]), Some(NEW));
    }

    #[test]
    fn what_only_the_member_list_names_has_no_voice() {
        for cluster in [OLD, NEW] {
            let mut listed = of(4, cluster);
            listed.source = AddressSource::Listed;
            assert_eq!(agreed(OLD, &[of(1, NEW), of(2, NEW), listed.clone()]), Some(NEW));
            assert_eq!(agreed(OLD, &[of(1, NEW), silent(2), listed]), None);
        }
    }

    #[test]
    fn they_must_agree_without_a_break() {
        let (mut following, start) = (FollowAgreement::default(), Instant::now());
        let after = |millis| start + Duration::from_millis(millis);
        assert_eq!(following.look(Some(NEW), start), None);
        assert_eq!(following.due(), Some(start + AGREED));
        assert_eq!(following.look(Some(NEW), after(2999)), None);
        assert_eq!(following.look(None, after(2999)), None, "one went back");
        assert_eq!(following.due(), None);
        assert_eq!(following.look(Some(NEW), after(3000)), None, "it begins anew");
        assert_eq!(following.look(Some(THIRD), after(5999)), None, "and so for another");
        assert_eq!(following.look(Some(THIRD), after(8998)), None);
        assert_eq!(following.look(Some(THIRD), after(8999)), Some(THIRD));
    }
}
