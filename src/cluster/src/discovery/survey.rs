//! A single look at a cluster, for a command without a running Keyward.
//!
//! Owns: the end of the look: once every known member has answered, or after a time limit. Must not know: the
//! use of the answers. Invariants: the look writes nothing to etcd; the password of `cluster.probe` is sent
//! to a verified member or a configured address only.

use std::collections::HashMap;
use std::time::Duration;

use futures_util::future::join_all;
use rustls::pki_types::CertificateDer;
use tokio::time::{Instant, sleep, timeout};

use super::Members;
use super::keyward_page::{KeywardEndpoint, keywards_among};
use super::member_flags::{MemberFlags, read_flags};
use super::metrics_page::{MemberHealthFigures, examine};
use super::probe::is_refused_login;
use super::store_hashes::{HashAnswer, StoreHashes, hash_kv, read_hashes};
use crate::membership::{
    AuthSetting, ControlChannels, Member, MembersHandle, Membership, PeerUrls, Readiness, UnreadyReason,
};
use keyward_base::tasks::Tasks;
use keyward_config::{ClientTls, Cluster, EtcdLogin};
use keyward_dial::connect::Connector;
use keyward_etcd::identity::MemberId;
use keyward_etcd::pb::etcdserverpb::AuthenticateRequest;
use keyward_etcd::pb::etcdserverpb::auth_client::AuthClient;

/// Interval between two looks at the published members.
const LOOK: Duration = Duration::from_millis(50);
/// Time limit of a login: the time limit of a request in etcd, and a margin.
const LOGIN: Duration = Duration::from_secs(8);

/// The answers of a cluster.
pub struct ClusterSurvey {
    /// The members. A login refused to `cluster.probe` is marked even if no member asked for a login.
    pub membership: Membership,
    /// The auth setting.
    pub auth: AuthSetting,
    /// The health figures of each member; `None` for a member without an answer.
    pub examined: Vec<(MemberId, Option<MemberHealthFigures>)>,
    /// The flags of each member, where the member tells its command line.
    pub flags: HashMap<MemberId, MemberFlags>,
    /// The hashes of the members' stores, if wanted and told without a login.
    pub hashes: StoreHashes,
    /// The configured endpoints that are no members, but a Keyward.
    pub keywards: Vec<KeywardEndpoint>,
    /// The certificate shown by each member, by `host:port`.
    pub certificates: Vec<(String, CertificateDer<'static>)>,
    /// Why the login of `cluster.probe` has no result, if a login was needed.
    pub login_failure: Option<String>,
}

/// The extent of a survey.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SurveyExtent {
    /// The members and their pages.
    Members,
    /// The hashes of the members' stores too, which cost each member time.
    MembersAndStores,
}

/// Looks at the cluster, for `limit` at most while a member is silent. Returns the access to the members too,
/// for further questions; it ends with `tasks`.
pub async fn survey(
    config: &Cluster,
    connector: Connector,
    (limit, extent): (Duration, SurveyExtent),
    tasks: &Tasks,
) -> (ClusterSurvey, MembersHandle, ControlChannels) {
    let discovery = Members::new(config, connector.clone());
    let channels = discovery.channels();
    let handle = discovery.start(tasks);
    let end = Instant::now() + limit;
    while !is_settled(config, &handle.snapshot.load(), handle.auth.now()) && Instant::now() < end {
        sleep(LOOK).await;
    }
    let (mut membership, auth) = (Membership::clone(&handle.snapshot.load()), handle.auth.now());
    let mut login_failure = None;
    if let (AuthSetting::On, Some(login)) = (auth, &config.probe) {
        match log_in(config, login, &membership, &channels).await {
            LoginAnswer::Accepted => membership.is_probe_login_refused = false,
            LoginAnswer::Refused => membership.is_probe_login_refused = true,
            LoginAnswer::Failed(why) => login_failure = Some(why),
        }
    }
    let http1 = connector.http1();
    let asked = membership.members.iter().map(async |member| {
        let (endpoint, at) = (&member.endpoint, member.resolved_ip);
        let (figures, flags) = tokio::join!(examine(&http1, endpoint, at), read_flags(&http1, endpoint, at));
        (member.id, figures, flags)
    });
    let (mut examined, mut flags) = (Vec::new(), HashMap::new());
    let (asked, keywards) = tokio::join!(join_all(asked), keywards_among(&http1, &config.endpoints));
    for (id, figures, told) in asked {
        examined.push((id, figures));
        flags.extend(told.map(|told| (id, told)));
    }
    let mut hashes = StoreHashes::default();
    if extent == SurveyExtent::MembersAndStores && auth != AuthSetting::Unknown {
        let ask = async |member, revision| match channels.load().get(&member).cloned() {
            Some(channel) => hash_kv(channel, None, revision).await,
            None => HashAnswer::Nothing,
        };
        hashes = read_hashes(|| handle.snapshot.load_full(), ask).await;
    }
    let certificates = connector.shown_certificates();
    let seen =
        ClusterSurvey { membership, auth, examined, flags, hashes, keywards, certificates, login_failure };
    (seen, handle, channels)
}

/// True if nothing more is to be learned: every address and every listed member has answered well.
fn is_settled(config: &Cluster, members: &Membership, auth: AuthSetting) -> bool {
    // Without a login, a refusal is final.
    let is_list_known = match members.peer_urls {
        PeerUrls::Listed(_) => true,
        PeerUrls::Refused => config.probe.is_none(),
        PeerUrls::Unknown => false,
    };
    let answers = |member: &Member| {
        !matches!(
            member.readiness,
            Readiness::NotReady(
                UnreadyReason::Unprobed | UnreadyReason::Unreachable | UnreadyReason::NoLeader
            )
        )
    };
    members.leader.is_some()
        && auth != AuthSetting::Unknown
        && is_list_known
        && members.unanswered.is_empty()
        && members.members.iter().all(|member| answers(member))
}

enum LoginAnswer {
    Accepted,
    Refused,
    Failed(String),
}

/// Logs in as the probing user: members of older versions answer the probes without any login, so that a
/// wrong password would stay unnoticed.
async fn log_in(
    config: &Cluster,
    login: &EtcdLogin,
    members: &Membership,
    channels: &ControlChannels,
) -> LoginAnswer {
    let is_verified = config.tls.as_ref().is_some_and(ClientTls::verifies_members);
    let may_see_password =
        |member: &&std::sync::Arc<Member>| is_verified || config.endpoints.contains(&member.endpoint);
    let channels = channels.load();
    let channel = members.ready_voters().filter(may_see_password).find_map(|one| channels.get(&one.id));
    let Some(channel) = channel else {
        return LoginAnswer::Failed("no configured member is ready".to_owned());
    };
    let request = AuthenticateRequest {
        name: login.user.as_str().to_owned(),
        password: login.password.expose().clone(),
    };
    match timeout(LOGIN, AuthClient::new(channel.clone()).authenticate(request)).await {
        Ok(Ok(_)) => LoginAnswer::Accepted,
        Ok(Err(status)) if is_refused_login(&status) => LoginAnswer::Refused,
        Ok(Err(status)) => LoginAnswer::Failed(status.message().to_owned()),
        Err(_) => LoginAnswer::Failed(format!("no answer within {LOGIN:?}")),
    }
}
