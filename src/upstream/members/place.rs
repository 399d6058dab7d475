//! One address: its channel, its prober, what was heard there last, and when it is asked next.
//!
//! Owns: how a report changes what is believed of an address. Must not know: other addresses, members.
//! Invariants: one late answer is no silence, a broken connection is; hints bring a probe forward within bounds.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::time::Instant;
use tonic::transport::Channel;

use super::census::{Seen, Sighting, Source};
use super::probe::{Dialled, Identity, ProbeLogin, Prober, Report, Silence, Want};
use crate::config::{ClusterPin, Endpoint, Scheme};
use crate::identity::{ClusterId, MemberId};
use crate::upstream::connect::{ConnectError, Connector};
use crate::upstream::membership::{Member, Membership, Trouble};
use crate::upstream::standing::{Mark, Suspicion};

/// Between two probes of an address that hints ask for.
pub(super) const FORCED: Duration = Duration::from_millis(100);
/// Probes in a row without an answer in time, past which the member is unreachable: one may be a busy moment.
const LATE: u32 = 2;
/// The same, past which the connection is given up too: the network may have forgotten it.
const LATE_CONNECTION: u32 = 4;
/// etcd's own limit is 5 s (rules 45).
const PING: Duration = Duration::from_secs(10);

/// What does not change.
pub(super) struct Setup {
    pub(super) pin: ClusterPin,
    pub(super) scheme: Scheme,
    pub(super) connector: Connector,
    pub(super) http1: Connector,
    pub(super) identity: Identity,
    pub(super) login: ProbeLogin,
    pub(super) near: Vec<String>,
}

/// One address, and when it is asked next.
pub(super) struct Place {
    pub(super) sighting: Sighting,
    pub(super) channel: Channel,
    /// None while a probe is under way.
    pub(super) prober: Option<Prober>,
    pub(super) due: Instant,
    pub(super) asked: Option<Instant>,
    /// What the probe under way has to clear when it succeeds, of whoever then turns out to be here.
    pub(super) marks: Vec<(MemberId, Arc<Suspicion>, Mark)>,
    pub(super) late: u32,
    /// Why nobody is known to be here, where that is so.
    pub(super) trouble: Option<(Trouble, Arc<str>)>,
    dialled: Arc<Dialled>,
    /// How many connections had been made when that was last looked at.
    connections: u32,
    /// Tells it from one that was here before.
    pub(super) serial: u64,
    /// How often the channel was made anew.
    pub(super) renewed: u32,
    /// What the next probe asks beside who is there.
    pub(super) want: Want,
}

impl Place {
    /// None where the address cannot be written as a URL, which no configured one is.
    pub(super) fn new(
        setup: &Setup,
        (endpoint, at): (&Endpoint, Option<IpAddr>),
        source: Source,
        serial: u64,
        now: Instant,
    ) -> Option<Self> {
        let dialled = Arc::new(Dialled::default());
        let channel = channel(&setup.connector, endpoint, at, &dialled)?;
        let prober = Prober::new(
            endpoint.clone(),
            at,
            serial,
            (channel.clone(), Arc::clone(&dialled)),
            setup.http1.clone(),
            setup.identity,
            Arc::clone(&setup.login),
        );
        Some(Self {
            sighting: Sighting { endpoint: endpoint.clone(), at, source, seen: Seen::NotAsked },
            channel,
            prober: Some(prober),
            due: now,
            asked: None,
            marks: Vec::new(),
            late: 0,
            trouble: None,
            dialled,
            connections: 0,
            serial,
            renewed: 0,
            want: Want::default(),
        })
    }

    /// Who answered here last.
    pub(super) fn member(&self) -> Option<MemberId> {
        match &self.sighting.seen {
            Seen::Answered(answer) | Seen::Silent(Some(answer)) => Some(answer.member),
            Seen::NotAsked | Seen::Silent(None) => None,
        }
    }

    /// Who answers here now.
    pub(super) fn answers(&self) -> Option<MemberId> {
        match &self.sighting.seen {
            Seen::Answered(answer) => Some(answer.member),
            Seen::NotAsked | Seen::Silent(_) => None,
        }
    }

    /// A probe begins: it clears what was raised against any of these before.
    pub(super) fn mark_all(&mut self, members: &Membership) {
        let marked = members.members.iter();
        let mark = |member: &Arc<Member>| (member.id, Arc::clone(&member.suspicion), member.suspicion.mark());
        self.marks = marked.map(mark).collect();
    }

    /// Whether this is that address.
    pub(super) fn is_at(&self, endpoint: &Endpoint, at: Option<IpAddr>) -> bool {
        self.sighting.endpoint == *endpoint && self.sighting.at == at
    }

    /// Which cluster answers here now; none where that is not told.
    pub(super) fn cluster(&self) -> Option<ClusterId> {
        match &self.sighting.seen {
            Seen::Answered(answer) => answer.cluster,
            Seen::NotAsked | Seen::Silent(_) => None,
        }
    }

    /// Brings the next probe forward, within bounds. A probe under way does not count: it began before.
    pub(super) fn force(&mut self) {
        let earliest = self.asked.map_or_else(Instant::now, |asked| asked + FORCED);
        self.due = self.due.min(earliest);
    }

    /// Takes in what a probe told. Says whether a member was lost by it.
    pub(super) fn note(&mut self, report: &Report, setup: &Setup) -> bool {
        match &report.told {
            Ok(told) => {
                self.late = 0;
                self.trouble = None;
                self.sighting.seen = Seen::Answered(told.answer.clone());
                false
            }
            Err(silence) => {
                self.late = if *silence == Silence::Late { self.late + 1 } else { 0 };
                if self.late > 0 && self.late.is_multiple_of(LATE_CONNECTION) {
                    self.reconnect(setup);
                }
                self.trouble = Some(self.trouble_of(*silence));
                let answered = self.answers().is_some();
                if answered && (1..LATE).contains(&self.late) {
                    self.due = Instant::now();
                    return false;
                }
                if let Seen::Answered(answer) = &self.sighting.seen {
                    self.sighting.seen = Seen::Silent(Some(answer.clone()));
                } else if self.sighting.seen == Seen::NotAsked {
                    self.sighting.seen = Seen::Silent(None);
                }
                answered
            }
        }
    }

    /// The member here, where it was connected to anew since this was last asked. Each restart of its process ends the connection.
    pub(super) fn connected_anew(&mut self) -> Option<MemberId> {
        let member = self.member()?;
        let connections = self.dialled.times.load(Ordering::Relaxed);
        (std::mem::replace(&mut self.connections, connections) != connections).then_some(member)
    }

    fn trouble_of(&self, silence: Silence) -> (Trouble, Arc<str>) {
        let failure = self.dialled.failure.load_full();
        match (silence, failure) {
            (Silence::Unidentified, _) => (
                Trouble::Unidentified,
                "it tells the probing user (cluster.probe) neither its id nor its leader".into(),
            ),
            (_, Some(failure)) => {
                let trouble = match &*failure {
                    ConnectError::Handshake { .. } => Trouble::Tls,
                    _ => Trouble::Connection,
                };
                (trouble, failure.to_string().into())
            }
            (Silence::Late, None) => (Trouble::NoAnswer, "it does not answer in time".into()),
            (Silence::Gone, None) => {
                (Trouble::NoAnswer, "the connection broke, or it is starting or stopping".into())
            }
        }
    }

    fn reconnect(&mut self, setup: &Setup) {
        let Sighting { endpoint, at, .. } = &self.sighting;
        if let Some(channel) = channel(&setup.connector, endpoint, *at, &self.dialled) {
            if let Some(prober) = &mut self.prober {
                prober.use_channel(channel.clone());
            }
            self.channel = channel;
            self.renewed += 1;
        }
    }
}

/// A channel that connects when first used, and again when its connection is gone. The scheme that etcd sees is the
/// endpoint's: over TLS, Go's HTTP/2 hides the client certificate from a call that says `http`.
fn channel(
    connector: &Connector,
    endpoint: &Endpoint,
    at: Option<IpAddr>,
    dialled: &Arc<Dialled>,
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
    use crate::upstream::members::census::{Answer, Sight};
    use crate::upstream::members::probe::Told;
    use crate::upstream::membership::Role;

    fn setup() -> Setup {
        let nowhere =
            Connector::over(Arc::new(|_| Box::pin(std::future::pending())), None, Duration::from_secs(1));
        Setup {
            pin: ClusterPin::FirstAnswer,
            scheme: Scheme::Http,
            http1: nowhere.http1(),
            connector: nowhere,
            identity: Identity::None,
            login: ProbeLogin::default(),
            near: Vec::new(),
        }
    }

    fn place(setup: &Setup) -> Place {
        let endpoint = Endpoint { scheme: Scheme::Http, host: "127.0.0.1".into(), port: 1 };
        Place::new(setup, (&endpoint, None), Source::Configured, 0, Instant::now()).unwrap()
    }

    fn report(told: Result<Told, Silence>) -> Report {
        Report { told, list: None, auth: None, login_refused: false }
    }

    fn answered() -> Report {
        let answer = Answer {
            member: MemberId(1),
            cluster: Some(ClusterId(1)),
            version: None,
            role: Role::Voter,
            leader: Sight::Somebody,
            term: 1,
            vitals: None,
        };
        report(Ok(Told { answer, makeshift: false }))
    }

    #[tokio::test(start_paused = true)]
    async fn one_late_answer_is_no_silence_and_a_second_is() {
        let setup = setup();
        let mut place = place(&setup);
        let late = || report(Err(Silence::Late));
        place.note(&answered(), &setup);
        for _ in 0..3 {
            place.due = Instant::now() + Duration::from_secs(9);
            assert!(!place.note(&late(), &setup));
            assert_eq!(place.answers(), Some(MemberId(1)));
            assert_eq!(place.due, Instant::now(), "it is asked again at once");
            place.note(&answered(), &setup);
        }
        place.note(&late(), &setup);
        assert!(place.note(&late(), &setup), "the member is lost");
        assert_eq!((place.answers(), place.member()), (None, Some(MemberId(1))));
        assert_eq!(place.renewed, 0);
        place.note(&late(), &setup);
        assert!(!place.note(&late(), &setup), "it is lost once");
        assert_eq!(place.renewed, 1, "a connection that answers nothing is given up");
    }

    #[tokio::test(start_paused = true)]
    async fn a_broken_connection_is_silence_at_once() {
        let setup = setup();
        let mut place = place(&setup);
        place.note(&report(Err(Silence::Gone)), &setup);
        assert_eq!(place.sighting.seen, Seen::Silent(None));
        place.note(&answered(), &setup);
        assert!(place.note(&report(Err(Silence::Gone)), &setup));
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
