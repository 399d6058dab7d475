//! Whether all members have become another cluster (`cluster.identity = "follow"`): pure.
//!
//! Owns: what counts as agreement, and how long it must last. Must not know: what follows from it.
//! Invariants (rules 20): every configured endpoint, or target of an SRV record, names the new cluster and sees a leader there, and
//! does so at more than half of the addresses that its name leads to; at none of them, nor at one that the last answers for its name
//! have left out, anybody names another cluster, or none;
//! all of that without a break for [`AGREED`]. Who is silent agrees to nothing: one endpoint that answers nowhere keeps us where we
//! are, until it answers, leads elsewhere, or is taken out of the configuration.

use std::time::Duration;

use tokio::time::Instant;

use super::census::{Seen, Sight, Sighting, Source};
use crate::config::Endpoint;
use crate::identity::ClusterId;

/// How long they must have agreed.
pub(super) const AGREED: Duration = Duration::from_secs(3);

/// The other cluster that the configured endpoints agree on now. `sightings` has each address that their names lead to now, and
/// those left out where ours still answer; of an endpoint that leads nowhere, one without an answer.
pub(super) fn agreed(pinned: ClusterId, sightings: &[Sighting]) -> Option<ClusterId> {
    let configured = || sightings.iter().filter(|sighting| sighting.source == Source::Configured);
    let mut endpoints: Vec<Addresses<'_>> = Vec::new();
    let mut named = None;
    for sighting in configured() {
        let at = endpoints.iter().position(|known| known.of == &sighting.endpoint);
        let at = at.unwrap_or_else(|| {
            endpoints.push(Addresses { of: &sighting.endpoint, all: 0, agree: 0 });
            endpoints.len() - 1
        });
        endpoints[at].all += 1;
        let Seen::Answered(answer) = &sighting.seen else { continue };
        // Who names none may be of the old cluster.
        let cluster = answer.cluster?;
        if cluster == pinned || named.is_some_and(|named| named != cluster) {
            return None;
        }
        named = Some(cluster);
        endpoints[at].agree += usize::from(answer.leader != Sight::Nobody);
    }
    named.filter(|_| endpoints.iter().all(|endpoint| endpoint.agree * 2 > endpoint.all))
}

/// Where one endpoint leads, and at how many of these addresses the other cluster is seen with a leader.
struct Addresses<'a> {
    of: &'a Endpoint,
    all: usize,
    agree: usize,
}

/// Since when they agree, on what.
#[derive(Debug, Default)]
pub(super) struct Following(Option<(ClusterId, Instant)>);

impl Following {
    /// Takes in what is agreed on now; the cluster to go to, once it is time.
    pub(super) fn look(&mut self, agreed: Option<ClusterId>, now: Instant) -> Option<ClusterId> {
        match (agreed, self.0) {
            (Some(agreed), Some((cluster, since))) if agreed == cluster => {
                (now >= since + AGREED).then_some(cluster)
            }
            (agreed, _) => {
                if let Some(cluster) = agreed {
                    tracing::warn!(%cluster, within = ?AGREED, "all endpoints name another cluster: followed if that lasts");
                }
                self.0 = agreed.map(|cluster| (cluster, now));
                None
            }
        }
    }

    /// When to look again though nothing new was heard.
    pub(super) fn due(&self) -> Option<Instant> {
        self.0.map(|(_, since)| since + AGREED)
    }

    /// Gone there, or nowhere.
    pub(super) fn end(&mut self) {
        self.0 = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Scheme;
    use crate::identity::MemberId;
    use crate::upstream::members::census::Answer;
    use crate::upstream::membership::Role;

    const OLD: ClusterId = ClusterId(1);
    const NEW: ClusterId = ClusterId(2);
    const THIRD: ClusterId = ClusterId(3);

    fn at(port: u16, source: Source, seen: Seen) -> Sighting {
        let endpoint = Endpoint { scheme: Scheme::Http, host: "m".into(), port };
        Sighting { endpoint, at: None, source, seen }
    }

    fn says(port: u16, cluster: Option<ClusterId>, leader: Sight) -> Sighting {
        let seen = Seen::Answered(Answer {
            member: MemberId(port.into()),
            cluster,
            version: None,
            role: Role::Voter,
            leader,
            term: 1,
            vitals: None,
        });
        at(port, Source::Configured, seen)
    }

    fn of(port: u16, cluster: ClusterId) -> Sighting {
        says(port, Some(cluster), Sight::Somebody)
    }

    fn silent(port: u16) -> Sighting {
        at(port, Source::Configured, Seen::Silent(None))
    }

    #[test]
    fn every_endpoint_must_name_one_other_cluster() {
        assert_eq!(agreed(OLD, &[of(1, NEW), of(2, NEW), of(3, NEW)]), Some(NEW));
        assert_eq!(agreed(OLD, &[of(1, NEW), of(2, NEW), silent(3)]), None, "one says nothing");
        let lost = at(3, Source::Configured, Seen::NotAsked);
        assert_eq!(agreed(OLD, &[of(1, NEW), of(2, NEW), lost]), None, "one was not asked yet");
        assert_eq!(agreed(OLD, &[of(1, NEW), silent(2)]), None);
        assert_eq!(agreed(OLD, &[of(1, NEW)]), Some(NEW));
        assert_eq!(agreed(OLD, &[of(1, NEW), of(2, NEW), of(3, OLD)]), None, "one is still there");
        assert_eq!(agreed(OLD, &[of(1, NEW), of(2, NEW), of(3, THIRD)]), None, "they disagree");
        let unnamed = says(3, None, Sight::Somebody);
        assert_eq!(agreed(OLD, &[of(1, NEW), of(2, NEW), unnamed]), None, "it may be of the old one");
        assert_eq!(agreed(OLD, &[of(1, OLD), of(2, OLD), silent(3)]), None);
        assert_eq!(agreed(OLD, &[]), None);
    }

    #[test]
    fn who_sees_no_leader_agrees_to_nothing_and_disagrees_all_the_same() {
        let leaderless = |port, cluster| says(port, Some(cluster), Sight::Nobody);
        assert_eq!(agreed(OLD, &[leaderless(1, NEW), leaderless(2, NEW), leaderless(3, NEW)]), None);
        assert_eq!(agreed(OLD, &[leaderless(1, NEW), of(2, NEW), of(3, NEW)]), None);
        assert_eq!(agreed(OLD, &[leaderless(1, OLD), of(2, NEW), of(3, NEW)]), None);
    }

    #[test]
    fn of_the_addresses_of_each_endpoint_more_than_half_must_agree_and_none_differ() {
        // All of one port are addresses of one endpoint.
        assert_eq!(agreed(OLD, &[of(1, NEW), silent(1)]), None, "a half is not more than half");
        assert_eq!(agreed(OLD, &[of(1, NEW), of(1, NEW), silent(1)]), Some(NEW));
        let leaderless = says(1, Some(NEW), Sight::Nobody);
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
            listed.source = Source::Listed;
            assert_eq!(agreed(OLD, &[of(1, NEW), of(2, NEW), listed.clone()]), Some(NEW));
            assert_eq!(agreed(OLD, &[of(1, NEW), silent(2), listed]), None);
        }
    }

    #[test]
    fn they_must_agree_without_a_break() {
        let (mut following, start) = (Following::default(), Instant::now());
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
