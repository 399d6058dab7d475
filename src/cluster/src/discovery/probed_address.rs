//! One address: its channel, its prober, the last observation, and the time of the next probe.
//!
//! Owns: how a probe report changes the state of an address. Must not know: other addresses, members.
//! Invariants: one timeout does not make an address silent, a broken connection does; hints bring a probe
//! forward within bounds.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::time::Instant;
use tonic::transport::Channel;

use super::census::{AddressObservation, AddressSource, ProbeObservation};
use super::probe::{
    DialHistory, MemberVerification, ProbeFailure, ProbeIdentity, ProbeLogin, ProbeReport, ProbeRequest,
    Prober,
};
use super::probe_time_limit::{self, OtherVoters};
use crate::fitness::quarantine::{Suspicion, SuspicionMark};
use crate::membership::{AddressFault, Member, Membership};
use keyward_config::{ClusterPin, Endpoint, Scheme};
use keyward_dial::connect::{ConnectError, Connector};
use keyward_etcd::identity::{ClusterId, MemberId};

/// Minimum interval between two probes of an address requested by hints.
pub(super) const FORCED: Duration = Duration::from_millis(100);
/// Number of consecutive timeouts after which the member is unreachable if a different voter answers; a
/// single timeout may be a busy moment.
const LATE: u32 = 2;
/// Time without an answer after which a member is unreachable while no member answers, since all may be slow.
/// Equals etcd's own limit for a request.
const ALL_LATE: Duration = Duration::from_secs(7);
/// Time without an answer after which the connection is replaced too: the network may have dropped the
/// connection's state.
const LATE_CONNECTION: Duration = Duration::from_secs(4);
/// Maximum pause of probes during a removal: the call requesting the removal may wait for ever.
const REMOVAL: Duration = Duration::from_secs(20);
/// HTTP/2 ping interval, above the minimum of 5 s enforced by etcd; see `docs/decisions.md#d45`.
const PING: Duration = Duration::from_secs(10);

/// Settings that never change.
pub(super) struct ProbeSetup {
    pub(super) pin: ClusterPin,
    pub(super) scheme: Scheme,
    pub(super) connector: Connector,
    pub(super) http1: Connector,
    pub(super) identity: ProbeIdentity,
    pub(super) verified: MemberVerification,
    pub(super) login: ProbeLogin,
    pub(super) near: Vec<String>,
}

/// One address and its probe schedule.
pub(super) struct ProbedAddress {
    pub(super) sighting: AddressObservation,
    pub(super) channel: Channel,
    /// `None` while a probe is in flight.
    pub(super) prober: Option<Prober>,
    pub(super) due: Instant,
    pub(super) asked: Option<Instant>,
    /// Marks of all suspicions at the start of the probe in flight. Success clears the mark of the answering
    /// member.
    pub(super) marks: Vec<(MemberId, Arc<Suspicion>, SuspicionMark)>,
    late: u32,
    /// Time limit of each call of the probe in flight.
    pub(super) limit: Duration,
    /// Total time without an answer: since the last answer, and over the current connection.
    silent: (Duration, Duration),
    /// Smoothed duration of an answer; `None` if the last probe timed out.
    pub(super) took: Option<Duration>,
    /// When the pause of probes for a removal began.
    held: Option<Instant>,
    /// The fault of the address, if no member is known at the address.
    pub(super) trouble: Option<(AddressFault, Arc<str>)>,
    /// True if etcd at the address refuses the name and password of the probing user.
    pub(super) login_refused: bool,
    dialled: Arc<DialHistory>,
    /// Number of connections made at the last check.
    connections: u32,
    /// Distinguishes the place from an earlier place with the same address.
    pub(super) serial: u64,
    /// Number of times the channel was replaced.
    pub(super) renewed: u32,
    /// Additional content of the next probe.
    pub(super) want: ProbeRequest,
}

impl ProbedAddress {
    /// `None` if the address cannot be written as a URL; never for a configured address.
    pub(super) fn new(
        setup: &ProbeSetup,
        (endpoint, at): (&Endpoint, Option<IpAddr>),
        source: AddressSource,
        serial: u64,
        now: Instant,
    ) -> Option<Self> {
        let dialled = Arc::new(DialHistory::default());
        let channel = channel(&setup.connector, endpoint, at, &dialled)?;
        let prober = Prober::new(
            endpoint.clone(),
            at,
            serial,
            (channel.clone(), Arc::clone(&dialled)),
            setup.http1.clone(),
            (setup.identity, setup.verified),
            Arc::clone(&setup.login),
        );
        Some(Self {
            sighting: AddressObservation {
                endpoint: endpoint.clone(),
                at,
                source,
                seen: ProbeObservation::NotAsked,
            },
            channel,
            prober: Some(prober),
            due: now,
            asked: None,
            marks: Vec::new(),
            late: 0,
            limit: probe_time_limit::LEAST,
            silent: (Duration::ZERO, Duration::ZERO),
            took: None,
            held: None,
            trouble: None,
            login_refused: false,
            dialled,
            connections: 0,
            serial,
            renewed: 0,
            want: ProbeRequest::default(),
        })
    }

    /// The member in the last answer.
    pub(super) fn member(&self) -> Option<MemberId> {
        match &self.sighting.seen {
            ProbeObservation::Answered(answer) | ProbeObservation::Silent(Some(answer)) => {
                Some(answer.member)
            }
            ProbeObservation::NotAsked | ProbeObservation::Silent(None) => None,
        }
    }

    /// The member answering now.
    pub(super) fn answers(&self) -> Option<MemberId> {
        match &self.sighting.seen {
            ProbeObservation::Answered(answer) => Some(answer.member),
            ProbeObservation::NotAsked | ProbeObservation::Silent(_) => None,
        }
    }

    /// Records a mark of every suspicion at the start of a probe: success clears only suspicions raised
    /// before the probe.
    pub(super) fn mark_all(&mut self, members: &Membership) {
        let marked = members.members.iter();
        let mark = |member: &Arc<Member>| (member.id, Arc::clone(&member.suspicion), member.suspicion.mark());
        self.marks = marked.map(mark).collect();
    }

    /// True for the place with this endpoint and IP address.
    pub(super) fn is_at(&self, endpoint: &Endpoint, at: Option<IpAddr>) -> bool {
        self.sighting.endpoint == *endpoint && self.sighting.at == at
    }

    /// The cluster answering now; `None` if the answer hides the cluster id.
    pub(super) fn cluster(&self) -> Option<ClusterId> {
        match &self.sighting.seen {
            ProbeObservation::Answered(answer) => answer.cluster,
            ProbeObservation::NotAsked | ProbeObservation::Silent(_) => None,
        }
    }

    /// Brings the next probe forward, within bounds. A probe in flight does not count, because it began
    /// earlier.
    pub(super) fn force(&mut self) {
        let earliest = self.asked.map_or_else(Instant::now, |asked| asked + FORCED);
        self.due = self.due.min(earliest);
    }

    /// Delays the next probe while the member's removal is in progress. Returns true if the probe is delayed.
    pub(super) fn hold(&mut self, is_being_removed: bool, now: Instant) -> bool {
        if !is_being_removed {
            self.held = None;
            return false;
        }
        let since = *self.held.get_or_insert(now);
        let holds = now < since + REMOVAL;
        if holds {
            self.due = now + FORCED;
        }
        holds
    }

    /// Takes in the report of a probe with time limit `limit` per call. Returns true if a member was lost by
    /// this report.
    pub(super) fn note(
        &mut self,
        report: &ProbeReport,
        (limit, others): (Duration, OtherVoters),
        setup: &ProbeSetup,
    ) -> bool {
        self.login_refused = report.login_refused;
        let silence = match &report.told {
            Ok(told) => {
                (self.late, self.silent) = (0, Default::default());
                if self.trouble.take().is_some_and(|(fault, _)| fault == AddressFault::Tls) {
                    tracing::info!(
                        endpoint = %self.sighting.endpoint,
                        "a member answers where a TLS handshake failed"
                    );
                }
                self.took = report.took.map(|took| probe_time_limit::smoothed(self.took, took));
                self.sighting.seen = ProbeObservation::Answered(told.answer.after(&self.sighting.seen));
                return false;
            }
            Err(silence) => *silence,
        };
        if silence == ProbeFailure::Late {
            self.late += 1;
            self.silent = (self.silent.0 + limit, self.silent.1 + limit);
            self.took = None;
        } else {
            (self.late, self.silent) = (0, Default::default());
        }
        if self.silent.1 >= LATE_CONNECTION {
            self.reconnect(setup);
            self.silent.1 = Duration::ZERO;
        }
        let trouble = self.trouble_of(silence);
        if trouble.0 == AddressFault::Tls && self.trouble.as_ref() != Some(&trouble) {
            tracing::warn!(
                endpoint = %self.sighting.endpoint, why = &*trouble.1,
                "a TLS handshake with a member failed"
            );
        }
        self.trouble = Some(trouble);
        let answered = self.answers().is_some();
        let may_be_slow = match others {
            OtherVoters::Answered => self.late < LATE,
            OtherVoters::Silent => self.late < LATE || self.silent.0 < ALL_LATE,
        };
        if answered && self.late > 0 && may_be_slow {
            self.due = Instant::now();
            return false;
        }
        if let ProbeObservation::Answered(answer) = &self.sighting.seen {
            self.sighting.seen = ProbeObservation::Silent(Some(answer.clone()));
        } else if self.sighting.seen == ProbeObservation::NotAsked {
            self.sighting.seen = ProbeObservation::Silent(None);
        }
        answered
    }

    /// Returns the member if a new connection was made since the last call. Each restart of the member's
    /// process ends the connection.
    pub(super) fn connected_anew(&mut self) -> Option<MemberId> {
        let member = self.member()?;
        let connections = self.dialled.times.load(Ordering::Relaxed);
        (std::mem::replace(&mut self.connections, connections) != connections).then_some(member)
    }

    fn trouble_of(&self, silence: ProbeFailure) -> (AddressFault, Arc<str>) {
        let failure = self.dialled.failure.load_full();
        match (silence, failure) {
            (ProbeFailure::Unidentified, _) => (
                AddressFault::Unidentified,
                "it tells the probing user (cluster.probe) neither its id nor its leader".into(),
            ),
            (ProbeFailure::Removed, _) => {
                (AddressFault::NoAnswer, "it says that it was removed from its cluster".into())
            }
            (_, Some(failure)) => {
                let trouble = match &*failure {
                    ConnectError::Handshake { .. } => AddressFault::Tls,
                    ConnectError::HandshakeTimedOut { .. } => AddressFault::Hung,
                    _ => AddressFault::Connection,
                };
                (trouble, failure.to_string().into())
            }
            (ProbeFailure::Late, None) => (AddressFault::Hung, "it does not answer in time".into()),
            (ProbeFailure::Gone, None) => {
                (AddressFault::NoAnswer, "the connection broke, or it is starting or stopping".into())
            }
        }
    }

    fn reconnect(&mut self, setup: &ProbeSetup) {
        let AddressObservation { endpoint, at, .. } = &self.sighting;
        if let Some(channel) = channel(&setup.connector, endpoint, *at, &self.dialled) {
            if let Some(prober) = &mut self.prober {
                prober.use_channel(channel.clone());
            }
            self.channel = channel;
            self.renewed += 1;
        }
    }
}

/// A channel that connects on first use, and reconnects after a loss. etcd must see the endpoint's scheme:
/// over TLS, Go's HTTP/2 hides the client certificate from a call with scheme `http`.
fn channel(
    connector: &Connector,
    endpoint: &Endpoint,
    at: Option<IpAddr>,
    dialled: &Arc<DialHistory>,
) -> Option<Channel> {
    let uri = tonic::transport::Endpoint::from_shared(endpoint.to_string()).ok()?;
    let (connector, endpoint, dialled) = (connector.clone(), endpoint.clone(), Arc::clone(dialled));
    let connect = tower::service_fn(move |_: http::Uri| {
        let (connector, endpoint, dialled) = (connector.clone(), endpoint.clone(), Arc::clone(&dialled));
        async move {
            let connected = connector.connect_at(&endpoint, at).await;
            dialled.failure.store(connected.as_ref().err().cloned().map(Arc::new));
            let stream = connected?;
            dialled.times.fetch_add(1, Ordering::Relaxed);
            Ok::<_, ConnectError>(TokioIo::new(stream))
        }
    });
    let built = uri.http2_keep_alive_interval(PING).keep_alive_timeout(PING).keep_alive_while_idle(false);
    Some(built.connect_with_connector_lazy(connect))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::discovery::census::{LeaderView, MemberProbeAnswer};
    use crate::discovery::probe::IdentifiedMember;
    use crate::membership::Role;

    fn setup() -> ProbeSetup {
        let nowhere =
            Connector::over(Arc::new(|_| Box::pin(std::future::pending())), None, Duration::from_secs(1));
        ProbeSetup {
            pin: ClusterPin::FirstAnswer,
            scheme: Scheme::Http,
            http1: nowhere.http1(),
            connector: nowhere,
            identity: ProbeIdentity::None,
            verified: MemberVerification::No,
            login: ProbeLogin::default(),
            near: Vec::new(),
        }
    }

    fn place(setup: &ProbeSetup) -> ProbedAddress {
        let endpoint = Endpoint { scheme: Scheme::Http, host: "127.0.0.1".into(), port: 1 };
        ProbedAddress::new(setup, (&endpoint, None), AddressSource::Configured, 0, Instant::now()).unwrap()
    }

    fn report(told: Result<IdentifiedMember, ProbeFailure>) -> ProbeReport {
        ProbeReport { told, list: None, auth: None, login_refused: false, ids: None, took: None }
    }

    fn answered() -> ProbeReport {
        let answer = MemberProbeAnswer {
            member: MemberId(1),
            cluster: Some(ClusterId(1)),
            version: None,
            role: Role::Voter,
            leader: LeaderView::Somebody,
            term: 1,
            store_status: None,
        };
        report(Ok(IdentifiedMember { answer, makeshift: false, is_standing: false }))
    }

    /// Another member answers meanwhile; the shortest time limit.
    const IN_TIME: (Duration, OtherVoters) = (probe_time_limit::LEAST, OtherVoters::Answered);

    #[tokio::test(start_paused = true)]
    async fn one_late_answer_is_no_silence_and_a_second_is() {
        let setup = setup();
        let mut place = place(&setup);
        let late = || report(Err(ProbeFailure::Late));
        place.note(&answered(), IN_TIME, &setup);
        for _ in 0..3 {
            place.due = Instant::now() + Duration::from_secs(9);
            assert!(!place.note(&late(), IN_TIME, &setup));
            assert_eq!(place.answers(), Some(MemberId(1)));
            assert_eq!(place.due, Instant::now(), "it is asked again at once");
            place.note(&answered(), IN_TIME, &setup);
        }
        place.note(&late(), IN_TIME, &setup);
        assert!(place.note(&late(), IN_TIME, &setup), "the member is lost");
        assert_eq!((place.answers(), place.member()), (None, Some(MemberId(1))));
        assert_eq!(place.renewed, 0);
        place.note(&late(), IN_TIME, &setup);
        assert!(!place.note(&late(), IN_TIME, &setup), "it is lost once");
        assert_eq!(place.renewed, 1, "a connection that answers nothing is given up");
    }

    #[tokio::test(start_paused = true)]
    async fn where_nobody_answers_in_time_a_member_is_lost_after_etcds_own_limit() {
        let setup = setup();
        let mut place = place(&setup);
        place.note(&answered(), IN_TIME, &setup);
        let late = |place: &mut ProbedAddress, seconds| {
            let limit = Duration::from_secs(seconds);
            place.note(&report(Err(ProbeFailure::Late)), (limit, OtherVoters::Silent), &setup)
        };
        assert!(!late(&mut place, 1) && !late(&mut place, 2));
        assert_eq!((place.answers(), place.renewed), (Some(MemberId(1)), 0));
        assert!(late(&mut place, 4), "7 s in all");
        assert_eq!((place.answers(), place.renewed), (None, 1));
        place.note(&answered(), IN_TIME, &setup);
        assert!(!late(&mut place, 1), "from the beginning");
        assert!(
            place.note(&report(Err(ProbeFailure::Late)), IN_TIME, &setup),
            "another answers: this one is slow"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn probes_are_held_for_a_removal_and_not_for_ever() {
        let setup = setup();
        let mut place = place(&setup);
        let start = Instant::now();
        assert!(!place.hold(false, start));
        assert!(place.hold(true, start));
        assert_eq!(place.due, start + FORCED, "it is looked again");
        assert!(place.hold(true, start + REMOVAL - FORCED) && !place.hold(true, start + REMOVAL));
        assert!(!place.hold(false, start + REMOVAL));
        assert!(place.hold(true, start + REMOVAL), "another one");
    }

    #[tokio::test(start_paused = true)]
    async fn a_broken_connection_is_silence_at_once() {
        let setup = setup();
        let mut place = place(&setup);
        place.note(&report(Err(ProbeFailure::Gone)), IN_TIME, &setup);
        assert_eq!(place.sighting.seen, ProbeObservation::Silent(None));
        place.note(&answered(), IN_TIME, &setup);
        assert!(place.note(&report(Err(ProbeFailure::Gone)), IN_TIME, &setup));
        assert_eq!((place.answers(), place.member()), (None, Some(MemberId(1))));
    }

    #[tokio::test(start_paused = true)]
    async fn a_hint_brings_a_probe_forward_within_bounds() {
        let setup = setup();
        let mut place = place(&setup);
        let now = Instant::now();
        place.asked = Some(now);
        for _ in 0..2 {
            place.due = now + Duration::from_millis(500);
            place.force();
            place.force();
            assert_eq!(place.due, now + FORCED);
        }
        place.due = now;
        place.force();
        assert_eq!(place.due, now, "never later than it was due anyway");
    }
}
