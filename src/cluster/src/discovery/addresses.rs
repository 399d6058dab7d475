//! The set of probed addresses, and the current observations.
//!
//! Owns: the places, exactly one for each address named by the configuration, DNS or the member list; how
//! long a used member may stay at an address no longer named. Must not know: the schedule of probes, the
//! conclusions.
//! Invariants: an address has one place; the address of a used and answering member keeps its place until
//! every candidate address for the member was probed, so that replacing endpoints leaves no moment without
//! members.

use std::net::IpAddr;

use tokio::time::Instant;

use super::census::{AddressObservation, AddressSource, ProbeObservation, is_ours, usable};
use super::probed_address::ProbedAddress;
use super::seeds::EndpointAddresses;
use super::{LISTED_ADDRESSES, MembersTask};
use crate::membership::{AddressFault, UnansweredAddress};
use keyward_config::Endpoint;
use keyward_etcd::identity::MemberId;

/// An address to probe, and its origin.
type AddressToProbe = (Endpoint, Option<IpAddr>, AddressSource);

fn has(spots: &[AddressToProbe], endpoint: &Endpoint, at: Option<IpAddr>) -> bool {
    spots.iter().any(|(known, known_at, _)| (known, *known_at) == (endpoint, at))
}

impl MembersTask {
    /// Updates the places: the current addresses of the configured endpoints, and the listed addresses of
    /// members not answering at a configured endpoint. An address used by a member also stays while the name
    /// may lead to the address again, or while a candidate for the member's new address was not probed yet.
    /// All remaining places are removed.
    pub(super) fn update_probed_addresses(&mut self) {
        let now = Instant::now();
        let listed = self.listed_endpoints();
        self.seeds.ask(&listed, now);
        let configured = self.seeds.endpoints();
        let mut wanted: Vec<AddressToProbe> = Vec::new();
        let of =
            |endpoints: Vec<Endpoint>, source| endpoints.into_iter().map(move |endpoint| (endpoint, source));
        let mut stay: Vec<AddressToProbe> = Vec::new();
        for (endpoint, source) in
            of(configured, AddressSource::Configured).chain(of(listed, AddressSource::Listed))
        {
            if let EndpointAddresses::To(addresses) = self.seeds.lead(&endpoint) {
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
                self.places.extend(ProbedAddress::new(
                    &self.setup,
                    (&endpoint, at),
                    source,
                    self.serials,
                    now,
                ));
            }
        }
    }

    /// True while an endpoint is unresolved, or one of the wanted addresses was not probed yet. Always
    /// becomes false: lookups and probes end.
    fn is_looking(&self, wanted: &[AddressToProbe]) -> bool {
        let asked = |(endpoint, at, _): &AddressToProbe| {
            let place = self.places.iter().find(|place| place.is_at(endpoint, *at));
            place.is_some_and(|place| place.sighting.seen != ProbeObservation::NotAsked)
        };
        let unknown = |endpoint: &Endpoint| self.seeds.lead(endpoint) == EndpointAddresses::Unknown;
        self.seeds.is_asking() || self.seeds.endpoints().iter().any(unknown) || !wanted.iter().all(asked)
    }

    /// True if a member of our cluster is used at this place, and answers.
    fn uses(&self, place: &ProbedAddress) -> bool {
        let snapshot = self.published.snapshot.load();
        let member = place.answers().and_then(|id| snapshot.get(id));
        member.is_some_and(|member| place.sighting.is_of(member)) && is_ours(place.cluster(), self.pinned)
    }

    /// The listed endpoints of members not answering at a current address of a configured endpoint.
    fn listed_endpoints(&self) -> Vec<Endpoint> {
        let configured = self.seeds.endpoints();
        let is_configured = |AddressObservation { endpoint, at, .. }: &AddressObservation| {
            configured.contains(endpoint)
                && (self.seeds.leads_to(endpoint, *at) || self.seeds.leaves_out(endpoint, *at))
        };
        let answering: Vec<MemberId> = self
            .places
            .iter()
            .filter(|place| is_configured(&place.sighting))
            .filter(|place| is_ours(place.cluster(), self.pinned))
            .filter_map(ProbedAddress::answers)
            .collect();
        let list = self.list.iter().flatten().filter(|listed| !answering.contains(&listed.id));
        let urls = list.flat_map(|listed| listed.client_urls.iter());
        let usable = urls.filter_map(|url| usable(url, self.setup.scheme));
        usable.filter(|endpoint| self.seeds.allows(&endpoint.host)).take(LISTED_ADDRESSES).collect()
    }

    /// The observations of all places, and of the endpoints without a resolved address.
    pub(super) fn sightings(&self) -> Vec<AddressObservation> {
        let configured =
            self.seeds.endpoints().into_iter().map(|endpoint| (endpoint, AddressSource::Configured));
        let listed = self.listed_endpoints().into_iter().map(|endpoint| (endpoint, AddressSource::Listed));
        let mut sightings: Vec<AddressObservation> =
            self.places.iter().map(|place| place.sighting.clone()).collect();
        for (endpoint, source) in configured.chain(listed) {
            let seen = match self.seeds.lead(&endpoint) {
                EndpointAddresses::Unknown => ProbeObservation::NotAsked,
                EndpointAddresses::Nowhere(_) => ProbeObservation::Silent(None),
                EndpointAddresses::To(_) => continue,
            };
            if sightings.iter().all(|sighting| sighting.endpoint != endpoint) {
                sightings.push(AddressObservation { endpoint, at: None, source, seen });
            }
        }
        sightings
    }

    /// The observations at current addresses of configured endpoints. Excludes addresses kept only for the
    /// members still in use at the address. Includes left-out addresses still answered by our cluster,
    /// because the name may lead there again.
    pub(super) fn sightings_of_now(&self) -> Vec<AddressObservation> {
        let configured = self.seeds.endpoints();
        let ours = |sighting: &AddressObservation| match &sighting.seen {
            ProbeObservation::Answered(answer) => is_ours(answer.cluster, self.pinned),
            ProbeObservation::NotAsked | ProbeObservation::Silent(_) => false,
        };
        let counts = |sighting: &AddressObservation| {
            let AddressObservation { endpoint, at, .. } = sighting;
            self.seeds.leads_to(endpoint, *at) || (self.seeds.leaves_out(endpoint, *at) && ours(sighting))
        };
        let mut sightings = self.sightings();
        sightings.retain(|sighting| configured.contains(&sighting.endpoint) && counts(sighting));
        sightings
    }

    /// The addresses without a known member, and the causes.
    pub(super) fn unanswered(&self) -> Vec<UnansweredAddress> {
        let of_place = |place: &ProbedAddress| {
            let AddressObservation { endpoint, at, .. } = &place.sighting;
            let (trouble, why) = place.trouble.clone()?;
            Some(UnansweredAddress { endpoint: endpoint.clone(), at: *at, trouble, why })
        };
        let nowhere = self.seeds.endpoints().into_iter().chain(self.listed_endpoints());
        let nowhere = nowhere.filter_map(|endpoint| match self.seeds.lead(&endpoint) {
            EndpointAddresses::Nowhere(why) => {
                Some(UnansweredAddress { endpoint, at: None, trouble: AddressFault::Name, why })
            }
            EndpointAddresses::Unknown | EndpointAddresses::To(_) => None,
        });
        let no_record = self.seeds.fault().map(|(endpoint, why)| UnansweredAddress {
            endpoint,
            at: None,
            trouble: AddressFault::Name,
            why,
        });
        let not_allowed = self.seeds.not_allowed().into_iter().map(|endpoint| UnansweredAddress {
            endpoint,
            at: None,
            trouble: AddressFault::NotAllowed,
            why: "its host is not among cluster.allowed_hosts: it is not spoken to".into(),
        });
        let mut all: Vec<UnansweredAddress> = self.places.iter().filter_map(of_place).collect();
        for one in nowhere.chain(no_record).chain(not_allowed) {
            if !all.contains(&one) {
                all.push(one);
            }
        }
        all
    }
}
