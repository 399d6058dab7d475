//! One address: its channel, its prober, what was heard there last, and when it is asked next.
//!
//! Owns: how a report changes what is believed of an address. Must not know: other addresses, members.
//! Invariants: one late answer is no silence, a broken connection is; hints bring a probe forward within bounds.

use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::time::Instant;
use tonic::transport::Channel;

use super::census::{Seen, Sighting, Source};
use super::probe::{Identity, Prober, Report, Silence, Want};
use crate::config::{ClusterPin, Endpoint, Login, Scheme};
use crate::identity::MemberId;
use crate::upstream::connect::{ConnectError, Connector};
use crate::upstream::membership::Mark;

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
    pub(super) endpoints: Vec<Endpoint>,
    pub(super) connector: Connector,
    pub(super) http1: Connector,
    pub(super) identity: Identity,
    pub(super) login: Option<Login>,
}

/// One address, and when it is asked next.
pub(super) struct Place {
    pub(super) sighting: Sighting,
    pub(super) channel: Channel,
    /// None while a probe is under way.
    pub(super) prober: Option<Prober>,
    pub(super) due: Instant,
    pub(super) asked: Option<Instant>,
    /// What the probe under way has to clear when it succeeds.
    pub(super) mark: Option<(MemberId, Mark)>,
    pub(super) late: u32,
    /// How often the channel was made anew.
    pub(super) renewed: u32,
    /// What the next probe asks beside who is there.
    pub(super) want: Want,
}

impl Place {
    /// None where the address cannot be written as a URL, which no configured one is.
    pub(super) fn new(setup: &Setup, endpoint: &Endpoint, source: Source, now: Instant) -> Option<Self> {
        let channel = channel(&setup.connector, endpoint)?;
        let prober = Prober::new(
            endpoint.clone(),
            channel.clone(),
            setup.http1.clone(),
            setup.identity,
            setup.login.clone(),
        );
        Some(Self {
            sighting: Sighting { endpoint: endpoint.clone(), source, seen: Seen::NotAsked },
            channel,
            prober: Some(prober),
            due: now,
            asked: None,
            mark: None,
            late: 0,
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
                self.sighting.seen = Seen::Answered(told.answer.clone());
                false
            }
            Err(silence) => {
                self.late = if *silence == Silence::Late { self.late + 1 } else { 0 };
                if self.late > 0 && self.late.is_multiple_of(LATE_CONNECTION) {
                    self.reconnect(setup);
                }
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

    fn reconnect(&mut self, setup: &Setup) {
        if let Some(channel) = channel(&setup.connector, &self.sighting.endpoint) {
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
fn channel(connector: &Connector, endpoint: &Endpoint) -> Option<Channel> {
    let uri = tonic::transport::Endpoint::from_shared(endpoint.to_string()).ok()?;
    let (connector, endpoint) = (connector.clone(), endpoint.clone());
    let connect = tower::service_fn(move |_: http::Uri| {
        let (connector, endpoint) = (connector.clone(), endpoint.clone());
        async move { Ok::<_, ConnectError>(TokioIo::new(connector.connect(&endpoint).await?)) }
    });
    let built = uri.http2_keep_alive_interval(PING).keep_alive_timeout(PING).keep_alive_while_idle(false);
    Some(built.connect_with_connector_lazy(connect))
}
