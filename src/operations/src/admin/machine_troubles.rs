//! The troubles of this machine and of its network: state files that are not on the disk, names without an
//! answer.
//!
//! Owns: their collection for doctor and metrics. Must not know: the content of a file, the lookups.

use std::collections::BTreeMap;

use keyward_base::io::kept_file::{KeptFileStatus, UnwrittenFile};
use keyward_dial::names::{NameResolver, NameTrouble};
use keyward_telemetry::metrics::Metrics;

/// The parts of the process that know of such troubles.
#[derive(Clone, Default)]
pub struct MachineTroubles {
    /// All state files.
    pub state_files: Vec<KeptFileStatus>,
    /// All resolvers.
    pub resolvers: Vec<NameResolver>,
}

impl MachineTroubles {
    /// The state files that are not on the disk.
    #[must_use]
    pub fn unwritten(&self) -> Vec<UnwrittenFile> {
        self.state_files.iter().filter_map(KeptFileStatus::unwritten).collect()
    }

    /// The names and name servers that fail now.
    #[must_use]
    pub fn names(&self) -> Vec<NameTrouble> {
        let mut troubles = Vec::new();
        for trouble in self.resolvers.iter().flat_map(NameResolver::troubles) {
            if !troubles.contains(&trouble) {
                troubles.push(trouble);
            }
        }
        troubles
    }

    /// Puts the state of now into the metrics.
    pub(super) fn measure(&self, metrics: &Metrics) {
        let mut unwritten = BTreeMap::new();
        for file in &self.state_files {
            *unwritten.entry(file.setting()).or_default() |= file.unwritten().is_some();
        }
        metrics.put_state_files(&Vec::from_iter(unwritten));
        let names = self.names().iter().filter(|trouble| !trouble.is_server).count();
        metrics.names_failing.set(i64::try_from(names).unwrap_or(i64::MAX));
    }
}
