//! At which addresses somebody is asked now, and what is known of each.
//!
//! Owns: that every address which the configuration, DNS or the member list names has its place, that no other has, and how long a
//! member that we use may stay where none of them leads any more. Must not know: when somebody is asked, what follows from it.
//! Invariants: an address has one place; where a member is used and answers it has its place until all that may lead to it
//! elsewhere were asked, so that endpoints which are replaced leave no moment without members.

use std::net::IpAddr;

use tokio::time::Instant;

use super::census::{Seen, Sighting, Source, is_ours, usable};
use super::place::Place;
use super::seeds::Lead;
use super::{LISTED_ADDRESSES, Task};
use crate::config::Endpoint;
use crate::identity::MemberId;
use crate::upstream::membership::{Trouble, Unanswered};

/// An address at which somebody is to be asked, and how we came to it.
type Where = (Endpoint, Option<IpAddr>, Source);

fn has(spots: &[Where], endpoint: &Endpoint, at: Option<IpAddr>) -> bool {
    spots.iter().any(|(known, known_at, _)| (known, *known_at) == (endpoint, at))
}

impl Task {
    /// Asks where the configured endpoints lead now, and at the listed addresses of members for which none of them answers; and
    /// where a member that we use still is, while its name may lead there again, or nobody was asked yet where it may be found
    /// instead. At no others.
    pub(super) fn settle(&mut self) {
        let now = Instant::now();
        let listed = self.listed_endpoints();
        self.seeds.ask(&listed, now);
        let configured = self.seeds.endpoints();
        let mut wanted: Vec<Where> = Vec::new();
        let of =
            |endpoints: Vec<Endpoint>, source| endpoints.into_iter().map(move |endpoint| (endpoint, source));
        let mut stay: Vec<Where> = Vec::new();
        for (endpoint, source) in of(configured, Source::Configured).chain(of(listed, Source::Listed)) {
            if let Lead::To(addresses) = self.seeds.lead(&endpoint) {
                for at in addresses {
                    if !has(&wanted, &endpoint, at) {
                        wanted.push((endpoint.clone(), at, source));
                    }
                }
            }
            let used =
                self.places.iter().filter(|place| place.sighting.endpoint == endpoint && self.uses(place));
            let left_out = used.filter(|place| self.seeds.leaves_out(&endpoint, place.sighting.at));
            for at in left_out.map(|place| place.sighting.at) {
                if !has(&stay, &endpoint, at) {
                    stay.push((endpoint.clone(), at, source));
                }
            }
        }
        wanted.extend(stay);
        if self.is_looking(&wanted) {
            let used = self.places.iter().filter(|place| self.uses(place)).map(|place| &place.sighting);
            let left: Vec<_> = used
                .filter(|known| !has(&wanted, &known.endpoint, known.at))
                .map(|known| (known.endpoint.clone(), known.at, known.source))
                .collect();
            wanted.extend(left);
        }
        let mut before = std::mem::take(&mut self.places);
        for (endpoint, at, source) in wanted {
            if let Some(known) = before.iter().position(|place| place.is_at(&endpoint, at)) {
                let mut place = before.swap_remove(known);
                place.sighting.source = source;
                self.places.push(place);
            } else {
                self.serials += 1;
                self.places.extend(Place::new(&self.setup, (&endpoint, at), source, self.serials, now));
            }
        }
    }

    /// Whether it is still to be found out where endpoints lead, or who is at one of these addresses. It ends: questions and
    /// probes do.
    fn is_looking(&self, wanted: &[Where]) -> bool {
        let asked = |(endpoint, at, _): &Where| {
            let place = self.places.iter().find(|place| place.is_at(endpoint, *at));
            place.is_some_and(|place| place.sighting.seen != Seen::NotAsked)
        };
        let unknown = |endpoint: &Endpoint| self.seeds.lead(endpoint) == Lead::Unknown;
        self.seeds.is_asking() || self.seeds.endpoints().iter().any(unknown) || !wanted.iter().all(asked)
    }

    /// Whether a member of ours is found there, and answers.
    fn uses(&self, place: &Place) -> bool {
        let snapshot = self.published.snapshot.load();
        let member = place.answers().and_then(|id| snapshot.get(id));
        member.is_some_and(|member| place.sighting.is_of(member)) && is_ours(place.cluster(), self.pinned)
    }

    /// Where members are by the list that answer at no configured endpoint, as those lead now.
    fn listed_endpoints(&self) -> Vec<Endpoint> {
        let configured = self.seeds.endpoints();
        let is_configured = |Sighting { endpoint, at, .. }: &Sighting| {
            configured.contains(endpoint)
                && (self.seeds.leads_to(endpoint, *at) || self.seeds.leaves_out(endpoint, *at))
        };
        let answering: Vec<MemberId> = self
            .places
            .iter()
            .filter(|place| is_configured(&place.sighting))
            .filter(|place| is_ours(place.cluster(), self.pinned))
            .filter_map(Place::answers)
            .collect();
        let list = self.list.iter().flatten().filter(|listed| !answering.contains(&listed.id));
        let urls = list.flat_map(|listed| listed.client_urls.iter());
        let usable = urls.filter_map(|url| usable(url, self.setup.scheme));
        usable.filter(|endpoint| self.seeds.allows(&endpoint.host)).take(LISTED_ADDRESSES).collect()
    }

    /// What is known of every address, those included of which there is none yet.
    pub(super) fn sightings(&self) -> Vec<Sighting> {
        let configured = self.seeds.endpoints().into_iter().map(|endpoint| (endpoint, Source::Configured));
        let listed = self.listed_endpoints().into_iter().map(|endpoint| (endpoint, Source::Listed));
        let mut sightings: Vec<Sighting> = self.places.iter().map(|place| place.sighting.clone()).collect();
        for (endpoint, source) in configured.chain(listed) {
            let seen = match self.seeds.lead(&endpoint) {
                Lead::Unknown => Seen::NotAsked,
                Lead::Nowhere(_) => Seen::Silent(None),
                Lead::To(_) => continue,
            };
            if sightings.iter().all(|sighting| sighting.endpoint != endpoint) {
                sightings.push(Sighting { endpoint, at: None, source, seen });
            }
        }
        sightings
    }

    /// The same of what the configuration and DNS say now: without addresses where only members still are that are used there.
    /// An answer may leave addresses out: as long as a name may lead there again, who answers there as ours counts too.
    pub(super) fn sightings_of_now(&self) -> Vec<Sighting> {
        let configured = self.seeds.endpoints();
        let ours = |sighting: &Sighting| match &sighting.seen {
            Seen::Answered(answer) => is_ours(answer.cluster, self.pinned),
            Seen::NotAsked | Seen::Silent(_) => false,
        };
        let counts = |sighting: &Sighting| {
            let Sighting { endpoint, at, .. } = sighting;
            self.seeds.leads_to(endpoint, *at) || (self.seeds.leaves_out(endpoint, *at) && ours(sighting))
        };
        let mut sightings = self.sightings();
        sightings.retain(|sighting| configured.contains(&sighting.endpoint) && counts(sighting));
        sightings
    }

    /// The addresses where nobody is known to be, and why.
    pub(super) fn unanswered(&self) -> Vec<Unanswered> {
        let of_place = |place: &Place| {
            let Sighting { endpoint, at, .. } = &place.sighting;
            let (trouble, why) = place.trouble.clone()?;
            Some(Unanswered { endpoint: endpoint.clone(), at: *at, trouble, why })
        };
        let nowhere = self.seeds.endpoints().into_iter().chain(self.listed_endpoints());
        let nowhere = nowhere.filter_map(|endpoint| match self.seeds.lead(&endpoint) {
            Lead::Nowhere(why) => Some(Unanswered { endpoint, at: None, trouble: Trouble::Name, why }),
            Lead::Unknown | Lead::To(_) => None,
        });
        let no_record = self.seeds.fault().map(|(endpoint, why)| Unanswered {
            endpoint,
            at: None,
            trouble: Trouble::Name,
            why,
        });
        let not_allowed = self.seeds.not_allowed().into_iter().map(|endpoint| Unanswered {
            endpoint,
            at: None,
            trouble: Trouble::NotAllowed,
            why: "its host is not among cluster.allowed_hosts: it is not spoken to".into(),
        });
        let mut all: Vec<Unanswered> = self.places.iter().filter_map(of_place).collect();
        for one in nowhere.chain(no_record).chain(not_allowed) {
            if !all.contains(&one) {
                all.push(one);
            }
        }
        all
    }
}
