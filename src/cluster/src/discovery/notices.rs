//! Log messages about probes, each logged once; only an outage of all members is logged again every minute.
//!
//! Owns: the log texts, and the messages already logged. Must not know: the consequences of a probe.

use std::time::Duration;

use tokio::time::Instant;

use super::census::ProbeObservation;
use super::probe::{ProbeFailure, ProbeRefusal, ProbeReport};
use super::probed_address::ProbedAddress;
use crate::version::{Version, VersionKnowledge};
use keyward_config::Endpoint;

/// The pause between two messages about an outage of all members.
const OUTAGE_PAUSE: Duration = Duration::from_secs(60);

/// The messages already logged.
#[derive(Default)]
pub(super) struct Notices {
    /// The last message about the present outage of all members.
    outage_told: Option<Instant>,
    makeshift: bool,
    no_list: bool,
    unidentified: bool,
    refused_login: bool,
    versions: Vec<Version>,
}

impl Notices {
    pub(super) fn probe(&mut self, endpoint: &Endpoint, report: &ProbeReport) {
        if report.login_refused && !std::mem::replace(&mut self.refused_login, true) {
            tracing::error!("etcd refuses the name and password of the probing user (cluster.probe)");
        }
        match &report.told {
            Ok(told) => {
                if self.outage_told.take().is_some() {
                    tracing::info!(%endpoint, "a member answers again");
                }
                if told.is_standing && !std::mem::replace(&mut self.makeshift, true) {
                    tracing::warn!(
                        "members refuse their status to the probing user (cluster.probe): instead each is \
                         asked for its metrics page every 2 s, some milliseconds of its time, and a new \
                         leader is noticed that much later; a probing user with the role root avoids it"
                    );
                }
                if !told.makeshift && std::mem::take(&mut self.refused_login) {
                    tracing::info!("etcd takes the name and password of the probing user again");
                }
                told.answer.version.into_iter().for_each(|version| self.version(version));
            }
            Err(ProbeFailure::Unidentified) if !std::mem::replace(&mut self.unidentified, true) => {
                tracing::error!(
                    %endpoint,
                    "a member answers and tells nobody its id: give Keyward a probing user (cluster.probe)"
                );
            }
            Err(_) => {}
        }
    }

    /// Logs an outage of all members, and the fault of each address, at the begin of the outage and every
    /// minute.
    pub(super) fn outage(&mut self, places: &[ProbedAddress]) {
        let is_silent = |place: &ProbedAddress| matches!(place.sighting.seen, ProbeObservation::Silent(_));
        let is_told = self.outage_told.is_some_and(|told| told.elapsed() < OUTAGE_PAUSE);
        if is_told || !places.iter().all(is_silent) {
            return;
        }
        self.outage_told = Some(Instant::now());
        let fault = |place: &ProbedAddress| {
            let (_, fault) = place.trouble.as_ref()?;
            Some(format!("{}: {fault}", place.sighting.endpoint))
        };
        let faults: Vec<String> = places.iter().filter_map(fault).collect();
        tracing::warn!(faults = faults.join("; "), "no member answers");
    }

    pub(super) fn list_given(&mut self) {
        if std::mem::take(&mut self.no_list) {
            tracing::info!("the member list is given to the probing user again");
        }
    }

    pub(super) fn list_refused(&mut self, refusal: ProbeRefusal) {
        if !std::mem::replace(&mut self.no_list, true) {
            tracing::warn!(
                refusal = refusal.name(),
                "the member list is refused to the probing user (cluster.probe): only the configured \
                 endpoints are used, and members that are added or moved are not found"
            );
        }
    }

    fn version(&mut self, version: Version) {
        if self.versions.contains(&version) {
            return;
        }
        self.versions.push(version);
        match version.knowledge() {
            VersionKnowledge::Known => {}
            VersionKnowledge::Newer => {
                tracing::warn!(%version, "etcd is newer than any known here: treated as the newest known")
            }
            VersionKnowledge::Older => {
                tracing::warn!(%version, "etcd is older than any known here: treated as the oldest known")
            }
        }
    }
}
