//! Whether all members have become another cluster (`cluster.identity = "follow"`): pure.
//!
//! Owns: what counts as agreement, and how long it must last. Must not know: what follows from it.
//! Invariants (rules 20): more than half of the configured endpoints name the new cluster and see a leader there; none that
//! answers names another, or none; all of that without a break for [`AGREED`].

use std::time::Duration;

use tokio::time::Instant;

use super::census::{Seen, Sight, Sighting, Source};
use crate::config::Endpoint;
use crate::identity::ClusterId;

/// How long they must have agreed.
pub(super) const AGREED: Duration = Duration::from_secs(3);

/// The other cluster that the configured endpoints agree on now. Addresses of one endpoint have one voice together; a member
/// without a leader, and an address where nobody answers, have none.
pub(super) fn agreed(pinned: ClusterId, sightings: &[Sighting]) -> Option<ClusterId> {
    let configured = || sightings.iter().filter(|sighting| sighting.source == Source::Configured);
    let mut endpoints: Vec<&Endpoint> = configured().map(|sighting| &sighting.endpoint).collect();
    endpoints.sort_unstable_by_key(|endpoint| (&endpoint.host, endpoint.port));
    endpoints.dedup();
    let mut named = None;
    let mut voices: Vec<&Endpoint> = Vec::new();
    for sighting in configured() {
        let Seen::Answered(answer) = &sighting.seen else { continue };
        // Who names none may be of the old cluster.
        let cluster = answer.cluster?;
        if cluster == pinned || named.is_some_and(|named| named != cluster) {
            return None;
        }
        named = Some(cluster);
        if answer.leader != Sight::Nobody && !voices.contains(&&sighting.endpoint) {
            voices.push(&sighting.endpoint);
        }
    }
    named.filter(|_| voices.len() * 2 > endpoints.len())
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
    fn all_who_answer_and_more_than_half_must_name_one_other_cluster() {
        assert_eq!(agreed(OLD, &[of(1, NEW), of(2, NEW), of(3, NEW)]), Some(NEW));
        assert_eq!(agreed(OLD, &[of(1, NEW), of(2, NEW), silent(3)]), Some(NEW));
        assert_eq!(agreed(OLD, &[of(1, NEW), silent(2), silent(3)]), None, "less than half");
        assert_eq!(agreed(OLD, &[of(1, NEW), silent(2)]), None, "a half is not more than half");
        assert_eq!(agreed(OLD, &[of(1, NEW)]), Some(NEW));
        assert_eq!(agreed(OLD, &[of(1, NEW), of(2, NEW), of(3, OLD)]), None, "one is still there");
        assert_eq!(agreed(OLD, &[of(1, NEW), of(2, NEW), of(3, THIRD)]), None, "they disagree");
        let unnamed = says(3, None, Sight::Somebody);
        assert_eq!(agreed(OLD, &[of(1, NEW), of(2, NEW), unnamed]), None, "it may be of the old one");
        assert_eq!(agreed(OLD, &[of(1, OLD), of(2, OLD), silent(3)]), None);
        assert_eq!(agreed(OLD, &[]), None);
    }

    #[test]
    fn who_sees_no_leader_has_no_voice_and_disagrees_all_the_same() {
        let leaderless = |port, cluster| says(port, Some(cluster), Sight::Nobody);
        assert_eq!(agreed(OLD, &[leaderless(1, NEW), leaderless(2, NEW), leaderless(3, NEW)]), None);
        assert_eq!(agreed(OLD, &[leaderless(1, NEW), of(2, NEW), of(3, NEW)]), Some(NEW));
        assert_eq!(agreed(OLD, &[leaderless(1, OLD), of(2, NEW), of(3, NEW)]), None);
    }

    #[test]
    fn addresses_of_one_endpoint_have_one_voice_and_listed_ones_none() {
        assert_eq!(agreed(OLD, &[of(1, NEW), of(1, NEW), silent(2), silent(3)]), None);
        let mut listed = of(4, OLD);
        listed.source = Source::Listed;
        assert_eq!(agreed(OLD, &[of(1, NEW), of(2, NEW), listed]), Some(NEW));
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
