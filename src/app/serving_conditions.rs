//! The conditions of readiness that a look at the cluster can tell, for `keyward check --dial`.
//!
//! Owns: one reading of everything that `keyward serve` reads before it is ready: the revocations and the
//! policy stored in etcd, and the members' trust in `mint.ca`. Must not know: the consequences of a reading
//! (`admin::doctor`). Invariants: each reading is made by the code that serves, so both have one outcome;
//! nothing is written, neither to etcd nor to a file.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::reload;
use keyward_base::published::Published;
use keyward_base::tasks::Tasks;
use keyward_cluster::discovery::survey::ClusterSurvey;
use keyward_cluster::membership::{ControlChannels, MembersHandle, ServingState};
use keyward_config::{Config, PolicyInEtcd, RevocationPersistence};
use keyward_dial::connect::Connector;
use keyward_downstream::session::Sealer;
use keyward_operations::admin::doctor::SurveyedConditions;
use keyward_operations::admin::doctor::certificate_requests::members_without_request;
use keyward_operations::policy_store::{PolicyRegister, PolicyStoreStatus};
use keyward_operations::revocation::RevocationRegister;
use keyward_telemetry::metrics::Metrics;
use keyward_upstream::credentials::{CredentialSettings, Credentials, NoRandomness};
use keyward_upstream::own_keys::OwnKeysUpstream;
use keyward_upstream::peer_urls::{look_at_peer_urls, roots_of};

/// Time limit for one reading: the limit of a poll, and a margin.
const READING: Duration = Duration::from_secs(6);
/// Interval between two looks at the outcome of a reading.
const LOOK: Duration = Duration::from_millis(50);

/// Reads everything that `keyward serve` waits for. Without a serving member there is nothing to read.
///
/// # Errors
/// There are no random bytes.
pub(super) async fn look(
    config: &Arc<Config>,
    survey: &ClusterSurvey,
    (members, channels): (MembersHandle, ControlChannels),
    connector: &Connector,
    tasks: &Tasks,
) -> Result<SurveyedConditions, NoRandomness> {
    let mut conditions = SurveyedConditions::default();
    if let Some(mint) = &config.users.mint {
        let (authority, roots) = (mint.authority.chain(), roots_of(&config.cluster));
        let trust = look_at_peer_urls(connector, &survey.membership, authority, &roots).await;
        conditions.peer_trust = Some(trust);
    }
    let seen = (&survey.membership, survey.auth);
    conditions.without_request = members_without_request(config, seen, connector).await;
    if survey.membership.serving() != ServingState::Ready {
        return Ok(conditions);
    }
    let settings =
        CredentialSettings { token_ttl: config.cluster.token_ttl, ..CredentialSettings::default() };
    let (credentials, control) = Credentials::new(settings, channels.clone())?;
    tasks.spawn("credentials", control.run(tasks.clone())).detach();
    let upstream = OwnKeysUpstream { members, channels, credentials };
    conditions.revocations_unread = unread_revocations(config, &upstream, tasks).await;
    if let Some(settings) = &config.policy.stored {
        conditions.stored_policy = Some(stored_policy(config, settings, upstream, tasks).await);
    }
    Ok(conditions)
}

/// Why the revocations in etcd cannot be read, if they cannot.
async fn unread_revocations(config: &Config, upstream: &OwnKeysUpstream, tasks: &Tasks) -> Option<String> {
    // A state file would be written.
    let RevocationPersistence::Etcd { .. } = &config.revocation.keep else { return None };
    let sealer = match reload::session_keys(config).map(Sealer::new) {
        Ok(sealer) => Arc::new(sealer),
        Err(error) => return Some(error.to_string()),
    };
    let opened = RevocationRegister::open(&config.revocation, upstream.clone(), sealer);
    let (register, keeper) = match opened {
        Ok(opened) => opened,
        Err(error) => return Some(error.to_string()),
    };
    tasks.spawn("revocations", keeper.run()).detach();
    let is_read = || register.is_known() || register.unread_reason().is_some();
    if !until(is_read).await {
        return Some("etcd did not answer in time".to_owned());
    }
    register.unread_reason().map(|reason| reason.to_string())
}

/// The state of the stored policy after one reading.
async fn stored_policy(
    config: &Arc<Config>,
    settings: &PolicyInEtcd,
    upstream: OwnKeysUpstream,
    tasks: &Tasks,
) -> PolicyStoreStatus {
    // A state file would be written.
    let settings = PolicyInEtcd { state_file: None, ..settings.clone() };
    let metrics = Metrics::new(Vec::new()).policy_store;
    let (register, keeper, _) = PolicyRegister::open(&settings, config, upstream, metrics);
    let config = Arc::new(Published::new(Arc::clone(config)));
    tasks.spawn("stored policy", keeper.run(config, |_| ())).detach();
    let is_read = |status: &PolicyStoreStatus| {
        status.confirmed_at.is_some() || status.fault.is_some() || status.unread.is_some()
    };
    until(|| is_read(&register.status())).await;
    PolicyStoreStatus::clone(&register.status())
}

/// Waits until the condition holds; false if it does not hold in time.
async fn until(holds: impl Fn() -> bool) -> bool {
    let end = Instant::now() + READING;
    while !holds() {
        if Instant::now() >= end {
            return false;
        }
        sleep(LOOK).await;
    }
    true
}
