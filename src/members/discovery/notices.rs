//! Log messages about probes, each logged once.
//!
//! Owns: the log texts, and the messages already logged. Must not know: the consequences of a probe.

use super::census::ProbeObservation;
use super::probe::{ProbeFailure, ProbeRefusal, ProbeReport};
use super::probed_address::ProbedAddress;
use crate::config::Endpoint;
use crate::members::version::{Version, VersionKnowledge};

/// The messages already logged.
#[derive(Default)]
pub(super) struct Notices {
    nobody: bool,
    makeshift: bool,
    no_list: bool,
    unidentified: bool,
    refused_login: bool,
    versions: Vec<Version>,
}

impl Notices {
    pub(super) fn probe(&mut self, endpoint: &Endpoint, report: &ProbeReport, places: &[ProbedAddress]) {
        if report.login_refused && !std::mem::replace(&mut self.refused_login, true) {
            tracing::error!("etcd refuses the name and password of the probing user (cluster.probe)");
        }
        match &report.told {
            Ok(told) => {
                self.nobody = false;
                if told.makeshift && !std::mem::replace(&mut self.makeshift, true) {
                    tracing::warn!(
                        "members refuse their status to the probing user (cluster.probe): instead each is \
                         asked for its metrics page every 2 s, some milliseconds of its time, and a new \
                         leader is noticed that much later; a probing user with the role root avoids it"
                    );
                }
                self.refused_login &= told.makeshift;
                told.answer.version.into_iter().for_each(|version| self.version(version));
            }
            Err(ProbeFailure::Unidentified) if !std::mem::replace(&mut self.unidentified, true) => {
                tracing::error!(
                    %endpoint,
                    "a member answers and tells nobody its id: give Keyward a probing user (cluster.probe)"
                );
            }
            Err(silence) => {
                let nobody = places.iter().all(|place| {
                    place.sighting.endpoint == *endpoint
                        || matches!(place.sighting.seen, ProbeObservation::Silent(_))
                });
                if nobody && !std::mem::replace(&mut self.nobody, true) {
                    tracing::warn!(%endpoint, ?silence, "no member answers");
                }
            }
        }
    }

    pub(super) fn list_given(&mut self) {
        self.no_list = false;
    }

    pub(super) fn list_refused(&mut self, refusal: ProbeRefusal) {
        if !std::mem::replace(&mut self.no_list, true) {
            tracing::warn!(
                ?refusal,
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
