//! STUB for compiling only.
use crate::config::Cluster;
use crate::tasks::Tasks;
use crate::upstream::connect::Connector;
use crate::upstream::credential::Credentials;
use crate::upstream::membership::ControlChannels;
use crate::upstream::membership::MembersHandle;
use std::sync::Arc;
/// s
pub struct Members;
impl Members {
    /// s
    pub fn new(_c: &Cluster, _k: Connector) -> Result<Self, std::io::Error> {
        Ok(Self)
    }
    /// s
    pub fn channels(&self) -> ControlChannels {
        ControlChannels::default()
    }
    /// s
    pub fn start(self, _c: Arc<Credentials>, _t: &Tasks) -> MembersHandle {
        unimplemented!()
    }
}
