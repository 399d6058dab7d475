//! Resolves the configured endpoints to addresses: by SRV records, by DNS, by the hosts file.
//!
//! Owns: the last answer for each name, the time of the next lookup, the fingerprint of the hosts file. Must
//! not know: the servers at the addresses.
//! Invariants: a name has at most one lookup in flight; a failed lookup keeps the last answer; a name no
//! longer used is forgotten; an IP address needs no lookup. A name server may return only some addresses of a
//! name at a time: an address absent from answers is reported as left out for [`LEFT_OUT`] answers, and a
//! member used at such an address is abandoned only afterwards, as long as the member answers. After a change
//! of the hosts file the next answer is complete. The SRV records of a domain are complete; SRV targets with
//! a host that is not allowed are reported and never resolved.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures_util::StreamExt as _;
use futures_util::future::{BoxFuture, FutureExt as _};
use futures_util::stream::FuturesUnordered;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use keyward_config::{Cluster, Discovery, Endpoint, Scheme, Srv};
use keyward_dial::names::{NameAnswer, NameError, NameResolver};

/// Interval between two checks of the hosts file, each a `stat`.
const HOSTS: Duration = Duration::from_millis(250);
/// Interval between two lookups of a name without a known TTL.
const NAME: Duration = Duration::from_secs(5);
/// Bounds of a TTL.
const SOONEST: Duration = Duration::from_secs(1);
const LATEST: Duration = Duration::from_secs(30);
const LATEST_SRV: Duration = Duration::from_secs(60);
/// Pause after a failed lookup.
const AFTER_FAILURE: Duration = Duration::from_secs(2);
/// Minimum interval between two lookups while a change is suspected.
const AGAIN: Duration = Duration::from_millis(500);

/// Number of consecutive answers without an address after which the name no longer leads to the address.
const LEFT_OUT: u32 = 8;

/// The configured endpoints and discovery settings.
#[derive(Clone, Debug, PartialEq, Eq)]
struct SeedConfig {
    endpoints: Arc<[Endpoint]>,
    discovery: Discovery,
    scheme: Scheme,
}

impl SeedConfig {
    fn of(cluster: &Cluster) -> Self {
        let (endpoints, discovery) = (cluster.endpoints.clone().into(), cluster.discovery.clone());
        Self { endpoints, discovery, scheme: cluster.scheme() }
    }
}

/// Replaces the configured endpoints at run time. Cheap to clone.
#[derive(Clone, Debug)]
pub struct SeedList(Arc<watch::Sender<SeedConfig>>);

impl SeedList {
    pub(super) fn new(cluster: &Cluster) -> Self {
        Self(Arc::new(watch::Sender::new(SeedConfig::of(cluster))))
    }

    /// True if [`Self::replace`] accepts `cluster`: the scheme of the endpoints and the name servers are
    /// unchanged since the start.
    #[must_use]
    pub fn takes(&self, cluster: &Cluster) -> bool {
        let (was, is) = (self.0.borrow(), SeedConfig::of(cluster));
        was.scheme == is.scheme && was.discovery.dns == is.discovery.dns
    }

    /// Replaces `cluster.endpoints` or `cluster.srv`, and `cluster.allowed_hosts`. Removed endpoints are
    /// probed no more; the pinned cluster stays. Returns true if a setting changed; an unacceptable `cluster`
    /// changes no setting.
    pub fn replace(&self, cluster: &Cluster) -> bool {
        if !self.takes(cluster) {
            return false;
        }
        let is = SeedConfig::of(cluster);
        self.0.send_if_modified(|now| {
            let changed = *now != is;
            *now = is;
            changed
        })
    }
}

/// The addresses of an endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum EndpointAddresses {
    /// Not resolved yet.
    Unknown,
    /// The name resolves to no address, with the reason.
    Nowhere(Arc<str>),
    /// The addresses; `None` stands for the endpoint's host itself, which needs no lookup.
    To(Vec<Option<IpAddr>>),
}

pub(super) struct Seeds {
    names: NameResolver,
    configured: watch::Receiver<SeedConfig>,
    srv: Option<SrvLookup>,
    hosts: BTreeMap<String, NameLookup>,
    questions: FuturesUnordered<BoxFuture<'static, LookupAnswer>>,
    /// The last fingerprint of the hosts file, and the time of the next check.
    print: Option<HostsFileStamp>,
    look_at_file: Option<Instant>,
}

/// The last answer for one name.
struct NameLookup {
    found: Result<Option<Vec<IpAddr>>, Arc<str>>,
    /// Addresses in earlier answers, and for each the number of consecutive answers without the address.
    left_out: Vec<(IpAddr, u32)>,
    /// Lookups begun from this time on return complete answers: the hosts file has changed.
    complete_from: Option<Instant>,
    turn: LookupSchedule,
}

/// The last answer for a domain's SRV records.
struct SrvLookup {
    srv: Srv,
    found: Result<Option<Vec<Endpoint>>, Arc<str>>,
    turn: LookupSchedule,
}

/// The schedule of one lookup.
struct LookupSchedule {
    due: Instant,
    asked: Option<Instant>,
    under_way: bool,
}

type HostsFileStamp = (Option<SystemTime>, u64);

enum LookupAnswer {
    Host(String, Result<NameAnswer<IpAddr>, NameError>),
    Service(Srv, Result<NameAnswer<Endpoint>, NameError>),
    HostsFile(Option<HostsFileStamp>),
}

impl LookupSchedule {
    fn now(now: Instant) -> Self {
        Self { due: now, asked: None, under_way: false }
    }

    /// Starts the lookup, if due.
    fn take(&mut self, now: Instant) -> bool {
        let takes = !self.under_way && self.due <= now;
        if takes {
            (self.under_way, self.asked) = (true, Some(now));
        }
        takes
    }

    fn next(&self) -> Option<Instant> {
        (!self.under_way).then_some(self.due)
    }

    fn ended(&mut self, good_for: Option<Duration>, latest: Duration, failed: bool) {
        let pause = match good_for {
            _ if failed => AFTER_FAILURE,
            Some(told) => told.clamp(SOONEST, latest),
            None => NAME,
        };
        let soonest = self.asked.map_or_else(Instant::now, |asked| asked + pause);
        // Keeps an earlier due time set while the lookup was in flight.
        self.due = if self.under_way && self.asked.is_some_and(|asked| self.due > asked) {
            self.due.min(soonest)
        } else {
            soonest
        };
        self.under_way = false;
    }

    fn soon(&mut self) {
        let soon = self.asked.map_or_else(Instant::now, |asked| asked + AGAIN);
        self.due = if self.under_way { soon } else { self.due.min(soon) };
    }
}

impl Seeds {
    pub(super) fn new(names: NameResolver, list: &SeedList, now: Instant) -> Self {
        let configured = list.0.subscribe();
        let mut seeds = Self {
            names,
            configured,
            srv: None,
            hosts: BTreeMap::new(),
            questions: FuturesUnordered::new(),
            print: None,
            look_at_file: None,
        };
        seeds.follow(now);
        seeds
    }

    /// Adopts the current configuration.
    fn follow(&mut self, now: Instant) {
        let configured = self.configured.borrow_and_update();
        let srv = configured.discovery.srv.as_ref();
        if self.srv.as_ref().map(|service| &service.srv) != srv {
            self.srv = srv.map(|srv| SrvLookup {
                srv: srv.clone(),
                found: Ok(None),
                turn: LookupSchedule::now(now),
            });
        }
    }

    /// The current endpoints; empty while DNS has not answered.
    pub(super) fn endpoints(&self) -> Vec<Endpoint> {
        let configured = self.configured.borrow();
        match &self.srv {
            None => configured.endpoints.to_vec(),
            Some(service) => {
                let found = service.found.iter().flatten().flatten();
                found.filter(|found| configured.discovery.allows(&found.host)).cloned().collect()
            }
        }
    }

    /// Endpoints named by DNS with a host that is not allowed.
    pub(super) fn not_allowed(&self) -> Vec<Endpoint> {
        let configured = self.configured.borrow();
        let found = self.srv.iter().filter_map(|service| service.found.as_ref().ok()?.as_ref()).flatten();
        found.filter(|found| !configured.discovery.allows(&found.host)).cloned().collect()
    }

    /// The SRV record that could not be resolved, and the reason.
    pub(super) fn fault(&self) -> Option<(Endpoint, Arc<str>)> {
        let SrvLookup { srv, found, .. } = self.srv.as_ref()?;
        let why = found.as_ref().err()?;
        Some((Endpoint { scheme: srv.scheme, host: srv.record(), port: 0 }, Arc::clone(why)))
    }

    /// True while the endpoints are unknown.
    pub(super) fn is_asking(&self) -> bool {
        self.srv.as_ref().is_some_and(|service| service.found == Ok(None))
    }

    /// True if a host from the member list may be used.
    pub(super) fn allows(&self, host: &str) -> bool {
        self.configured.borrow().discovery.allows(host)
    }

    /// The patterns of allowed hosts.
    pub(super) fn discovery(&self) -> Discovery {
        self.configured.borrow().discovery.clone()
    }

    /// The current addresses of an endpoint.
    pub(super) fn lead(&self, endpoint: &Endpoint) -> EndpointAddresses {
        if !self.names.asks_for(&endpoint.host) {
            return EndpointAddresses::To(vec![None]);
        }
        match self.hosts.get(&endpoint.host).map(|name| &name.found) {
            Some(Ok(Some(found))) => EndpointAddresses::To(found.iter().copied().map(Some).collect()),
            Some(Err(why)) => EndpointAddresses::Nowhere(Arc::clone(why)),
            Some(Ok(None)) | None => EndpointAddresses::Unknown,
        }
    }

    /// True if the endpoint leads to this address now, or does not resolve at all.
    pub(super) fn leads_to(&self, endpoint: &Endpoint, at: Option<IpAddr>) -> bool {
        match self.lead(endpoint) {
            EndpointAddresses::To(addresses) => addresses.contains(&at),
            EndpointAddresses::Unknown | EndpointAddresses::Nowhere(_) => true,
        }
    }

    /// True if the endpoint led to this address a few answers ago, and may lead there again.
    pub(super) fn leaves_out(&self, endpoint: &Endpoint, at: Option<IpAddr>) -> bool {
        let name = self.hosts.get(&endpoint.host);
        name.zip(at).is_some_and(|(name, at)| name.left_out.iter().any(|(left_out, _)| *left_out == at))
    }

    /// Starts the lookups due, for the configured endpoints and for `listed` endpoints, and forgets all names
    /// used by neither.
    pub(super) fn ask(&mut self, listed: &[Endpoint], now: Instant) {
        if let Some(service) = &mut self.srv
            && service.turn.take(now)
        {
            let (names, srv) = (self.names.clone(), service.srv.clone());
            let question = async move {
                let found = names.services(&srv.record(), srv.scheme).await;
                LookupAnswer::Service(srv, found)
            };
            self.questions.push(question.boxed());
        }
        let endpoints = self.endpoints();
        let wanted = || endpoints.iter().chain(listed).map(|endpoint| &endpoint.host);
        self.hosts.retain(|host, _| wanted().any(|wanted| wanted == host));
        for host in wanted().filter(|host| self.names.asks_for(host)) {
            if !self.hosts.contains_key(host) {
                self.hosts.insert(host.clone(), NameLookup::new(now));
            }
        }
        for (host, name) in self.hosts.iter_mut() {
            if name.turn.take(now) {
                let (names, host) = (self.names.clone(), host.clone());
                let question = async move {
                    let found = names.addresses(&host).await;
                    LookupAnswer::Host(host, found)
                };
                self.questions.push(question.boxed());
            }
        }
        let read_file = self.names.hosts_file().filter(|_| !self.hosts.is_empty());
        match self.look_at_file {
            Some(_) if read_file.is_none() => self.look_at_file = None,
            None if read_file.is_some() => self.look_at_file = Some(now),
            _ => {}
        }
        if let Some(file) = read_file
            && self.look_at_file.is_some_and(|due| due <= now)
        {
            self.look_at_file = Some(now + HOSTS);
            self.questions.push(look_at_hosts_file(file.to_owned()).boxed());
        }
    }

    /// Takes in an answer as if sent by a name server.
    #[cfg(test)]
    pub(super) fn told(&mut self, host: &str, all: Vec<IpAddr>) {
        let found = Ok(NameAnswer { all, good_for: None, is_old: false });
        if let Some(name) = self.hosts.get_mut(host) {
            name.take_in(found, Some(Instant::now()), host);
        }
    }

    /// Brings the lookup of a host forward, because a member was lost at its address and the name may have
    /// changed.
    pub(super) fn doubt(&mut self, host: &str) {
        if let Some(name) = self.hosts.get_mut(host) {
            name.turn.soon();
        }
        if let Some(service) = &mut self.srv {
            service.turn.soon();
        }
    }

    /// Waits until the addresses of an endpoint may have changed, or a lookup is due. Returns true for a
    /// possible change. Cancel-safe: unfinished lookups stay in `questions`.
    pub(super) async fn next(&mut self) -> bool {
        let names = self.hosts.values().map(|name| &name.turn);
        let turns = names.chain(self.srv.as_ref().map(|service| &service.turn));
        let due = turns.filter_map(LookupSchedule::next).chain(self.look_at_file).min();
        tokio::select! {
            biased; // Finished lookups first.
            Some(answered) = self.questions.next() => self.answered(answered),
            Ok(()) = self.configured.changed() => {
                self.follow(Instant::now());
                true
            }
            () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => false,
            else => std::future::pending().await,
        }
    }

    /// Takes in an answer. Returns true if the addresses of an endpoint may have changed.
    fn answered(&mut self, answered: LookupAnswer) -> bool {
        match answered {
            LookupAnswer::Host(host, found) => {
                let Some(name) = self.hosts.get_mut(&host) else { return false };
                let good_for = found.as_ref().ok().and_then(|found| found.good_for);
                let asked = name.turn.asked;
                name.turn.ended(good_for, LATEST, found.is_err());
                name.take_in(found, asked, &host)
            }
            LookupAnswer::Service(srv, found) => {
                let Some(service) = self.srv.as_mut().filter(|service| service.srv == srv) else {
                    return false;
                };
                let good_for = found.as_ref().ok().and_then(|found| found.good_for);
                service.turn.ended(good_for, LATEST_SRV, found.is_err());
                let changed = take_in(&mut service.found, found, &srv.record());
                for endpoint in changed.then(|| self.not_allowed()).into_iter().flatten() {
                    tracing::warn!(
                        %endpoint,
                        "an SRV record names a host that is not among cluster.allowed_hosts: nothing is \
                         sent there"
                    );
                }
                changed
            }
            LookupAnswer::HostsFile(print) => {
                if std::mem::replace(&mut self.print, print) != print {
                    // The first check may follow the first answers, which may be older than the file.
                    let now = Instant::now();
                    for name in self.hosts.values_mut() {
                        (name.turn.due, name.complete_from) = (now, Some(now));
                    }
                }
                false
            }
        }
    }
}

impl NameLookup {
    fn new(now: Instant) -> Self {
        Self { found: Ok(None), left_out: Vec::new(), complete_from: None, turn: LookupSchedule::now(now) }
    }

    /// Takes in the answer to a lookup begun at `asked`. Returns true if the addresses may have changed; the
    /// order of addresses is ignored.
    fn take_in(
        &mut self,
        found: Result<NameAnswer<IpAddr>, NameError>,
        asked: Option<Instant>,
        name: &str,
    ) -> bool {
        let (Ok(Some(before)), Ok(now)) = (&mut self.found, &found) else {
            return take_in(&mut self.found, found, name);
        };
        // The answer of earlier questions says nothing about the time since.
        if now.is_old {
            return false;
        }
        let complete = self.complete_from.take_if(|from| asked.is_some_and(|asked| asked >= *from)).is_some();
        let gone = before.iter().filter(|address| !now.all.contains(address)).map(|address| (*address, 0));
        let mut left_out: Vec<(IpAddr, u32)> = self
            .left_out
            .iter()
            .copied()
            .chain(gone)
            .filter(|(address, _)| !now.all.contains(address))
            .collect();
        left_out.iter_mut().for_each(|(_, answers)| *answers += 1);
        left_out.retain(|(_, answers)| !complete && *answers < LEFT_OUT);
        let known = |address: &IpAddr| {
            before.contains(address) || self.left_out.iter().any(|(known, _)| known == address)
        };
        if !now.all.iter().all(known) {
            tracing::info!(name, addresses = joined(&now.all), "a name was looked up");
        }
        let same = before.len() == now.all.len() && now.all.iter().all(|address| before.contains(address));
        let forgotten = self.left_out.len() != left_out.len() || complete;
        self.left_out = left_out;
        if !same {
            before.clone_from(&now.all);
        }
        !same || forgotten
    }
}

/// The answers in one text.
fn joined<T: Display>(all: &[T]) -> String {
    all.iter().map(T::to_string).collect::<Vec<_>>().join(", ")
}

/// Takes in an answer. Returns true if it differs from the last answer.
fn take_in<T: PartialEq + Display>(
    known: &mut Result<Option<Vec<T>>, Arc<str>>,
    found: Result<NameAnswer<T>, NameError>,
    name: &str,
) -> bool {
    match found {
        Ok(found) if found.is_old && matches!(known, Ok(Some(_))) => false,
        Ok(found) => {
            let same = matches!(known, Ok(Some(before)) if *before == found.all);
            if !same {
                tracing::info!(name, addresses = joined(&found.all), "a name was looked up");
                *known = Ok(Some(found.all));
            }
            !same
        }
        Err(error) => {
            let first = !matches!(known, Ok(Some(_)));
            let why: Arc<str> = error.to_string().into();
            if first {
                if *known == Ok(None) {
                    tracing::warn!(name, why = &*why, "a name cannot be looked up");
                }
                *known = Err(why);
            } else {
                tracing::debug!(name, why = &*why, "a name cannot be looked up; its last answer stays");
            }
            first
        }
    }
}

async fn look_at_hosts_file(file: PathBuf) -> LookupAnswer {
    let print = tokio::fs::metadata(file).await.ok().map(|found| (found.modified().ok(), found.len()));
    LookupAnswer::HostsFile(print)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unanswered() -> NameError {
        NameError::because("no name server answers")
    }

    fn turn_at(now: Instant) -> LookupSchedule {
        let mut turn = LookupSchedule::now(now);
        assert!(turn.take(now) && !turn.take(now), "one question at a time");
        turn
    }

    #[tokio::test(start_paused = true)]
    async fn it_is_asked_again_when_the_answer_is_not_good_any_more_within_bounds() {
        let now = Instant::now();
        let after = |good_for: Option<u64>, failed| {
            let mut turn = turn_at(now);
            turn.ended(good_for.map(Duration::from_secs), LATEST, failed);
            turn.next().map(|due| due - now)
        };
        assert_eq!(after(Some(7), false), Some(Duration::from_secs(7)));
        assert_eq!(after(Some(0), false), Some(SOONEST));
        assert_eq!(after(Some(3600), false), Some(LATEST));
        assert_eq!(after(None, false), Some(NAME));
        assert_eq!(after(None, true), Some(AFTER_FAILURE));
    }

    #[tokio::test(start_paused = true)]
    async fn a_doubt_brings_it_forward_also_while_it_is_asked_and_never_more_often() {
        let now = Instant::now();
        let mut turn = turn_at(now);
        assert_eq!(turn.next(), None, "it is under way");
        turn.ended(None, LATEST, false);
        turn.soon();
        turn.soon();
        assert_eq!(turn.next(), Some(now + AGAIN));
        let mut turn = turn_at(now);
        turn.soon();
        turn.ended(None, LATEST, false);
        assert_eq!(turn.next(), Some(now + AGAIN), "what was asked before the doubt may be of before");
    }

    #[tokio::test(start_paused = true)]
    async fn an_address_is_left_once_enough_answers_leave_it_out_or_the_hosts_file_has_changed() {
        let address = |last: u8| IpAddr::from([127, 0, 0, last]);
        let mut name = NameLookup::new(Instant::now());
        let told = |name: &mut NameLookup, all: &[u8]| {
            let all = all.iter().copied().map(address).collect();
            name.take_in(Ok(NameAnswer { all, good_for: None, is_old: false }), Some(Instant::now()), "m")
        };
        let left_out =
            |name: &NameLookup| name.left_out.iter().map(|(address, _)| *address).collect::<Vec<_>>();
        assert!(told(&mut name, &[1, 2, 3]));
        assert!(!told(&mut name, &[3, 1, 2]), "another order is no news");
        assert!(told(&mut name, &[2, 3]));
        for _ in 2..LEFT_OUT {
            assert_eq!(left_out(&name), [address(1)]);
            assert!(!told(&mut name, &[3, 2]));
        }
        assert!(told(&mut name, &[2, 3]), "that is enough");
        assert!(left_out(&name).is_empty());
        // A name server returning some addresses at a time: each address comes back before it is dropped.
        for some in [[1], [2], [3], [1]] {
            assert!(told(&mut name, &some));
        }
        assert_eq!(left_out(&name), [address(2), address(3)]);
        name.take_in(Err(unanswered()), Some(Instant::now()), "m");
        assert_eq!(
            (left_out(&name).len(), &name.found),
            (2, &Ok(Some(vec![address(1)]))),
            "a failure says nothing"
        );
        // The answer to a lookup begun before the change may be older than the change.
        let before = Instant::now();
        tokio::time::advance(Duration::from_secs(1)).await;
        name.complete_from = Some(Instant::now());
        let late = NameAnswer { all: vec![address(1)], good_for: None, is_old: false };
        name.take_in(Ok(late), Some(before), "m");
        assert_eq!(left_out(&name).len(), 2);
        assert!(told(&mut name, &[4]));
        assert!(left_out(&name).is_empty());
        assert!(told(&mut name, &[5]));
        assert_eq!(left_out(&name), [address(4)], "it was one answer");
    }

    #[test]
    fn a_failure_leaves_the_last_answer_in_place() {
        let found = |all: &[u8]| Ok(NameAnswer { all: all.to_vec(), good_for: None, is_old: false });
        let mut known = Ok(None);
        assert!(take_in(&mut known, Err(unanswered()), "m"), "that it leads nowhere is news");
        assert!(known.is_err());
        assert!(take_in(&mut known, found(&[1, 2]), "m"));
        assert!(!take_in(&mut known, found(&[1, 2]), "m"), "the same is none");
        assert!(!take_in(&mut known, Err(unanswered()), "m"));
        assert_eq!(known, Ok(Some(vec![1, 2])));
        assert!(take_in(&mut known, found(&[3]), "m"));
        // At a start while name servers fail, an old answer is all there is; later it says less than the last.
        let old = |all: &[u8]| Ok(NameAnswer { is_old: true, all: all.to_vec(), good_for: None });
        assert!(!take_in(&mut known, old(&[1]), "m"));
        assert!(take_in(&mut Ok(None), old(&[1]), "m"));
        assert!(take_in(&mut Err("no name server answers".into()), old(&[1]), "m"));
    }
}
