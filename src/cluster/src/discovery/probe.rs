//! Probes one address for its member: Status, and fallback calls if Status is refused.
//!
//! Owns: the calls of a probe, a login of its own (so that finding members depends on no known member), the
//! meaning of etcd's refusals. Must not know: other addresses, the conclusions drawn from an answer.
//! Invariants: a token is sent only after a call without a token was refused, and only to the address that
//! issued the token; a refused password is not tried again for half a minute; without a verified certificate
//! a password is sent only if the served cluster has named itself at the address, or the address is
//! configured and names no different cluster; a probe never writes. Status is requested only from a member
//! that has just listed itself in its own member list: in the second before its end, a removed member panics
//! on Status (`failed to find local ID`, 3.4 to 3.7) and answers MemberList safely.

mod calls;

use std::collections::BTreeSet;
use std::future::Future;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use arc_swap::ArcSwapOption;
use tokio::time::{Instant, timeout};
use tonic::metadata::{AsciiMetadataValue, MetadataValue};
use tonic::transport::Channel;
use tonic::{Response, Status};

use crate::discovery::census::{AddressSource, LeaderView, ListedMember, MemberProbeAnswer};
use crate::discovery::metrics_page::{self, MemberMetricsPage};
use crate::discovery::probe_time_limit::LEAST;
use crate::membership::{AuthSetting, Role};
pub(super) use calls::{ProbeCallError, heard, is_refused_login, with_token};
use calls::{
    count_one_key, header_of_a_watch, is_in_its_list, listed, member_list, member_list_with_leader, status,
    told_by_list, told_by_status,
};
use keyward_config::{Endpoint, EtcdLogin};
use keyward_dial::connect::{ConnectError, Connector};
use keyward_etcd::identity::{ClusterId, MemberId};
use keyward_etcd::pb::etcdserverpb::auth_client::AuthClient;
use keyward_etcd::pb::etcdserverpb::{AuthenticateRequest, MemberListResponse, ResponseHeader};

/// Time limit of a login, long enough for etcd's own request limit. A login given up earlier still costs the
/// member a bcrypt computation.
const LOGIN: Duration = Duration::from_secs(8);
/// Pauses after a failed login: after a refused password, and after any different failure.
const AFTER_REFUSED_LOGIN: Duration = Duration::from_secs(30);
const AFTER_FAILED_LOGIN: Duration = Duration::from_secs(1);
/// Maximum age of a metrics page before a fresh one is fetched: each page costs the member some milliseconds.
const PAGE_AGE: Duration = Duration::from_secs(2);
/// Maximum age of a metrics page when no fresh page can be fetched: the member at an address seldom changes.
const PAGE_KEPT: Duration = Duration::from_secs(10);
/// A user that should not exist. A login as this user shows if auth is on, without a password and without
/// bcrypt on etcd.
const NOBODY: &str = "keyward-asks-whether-auth-is-on";

/// The credentials of the probing user; replaced at run time.
pub type ProbeLogin = Arc<ArcSwapOption<EtcdLogin>>;

/// Record of the connections made to one address.
#[derive(Default)]
pub(super) struct DialHistory {
    /// Number of connections made so far.
    pub(super) times: AtomicU32,
    /// The error of the last connection attempt; empty if the attempt succeeded.
    pub(super) failure: ArcSwapOption<ConnectError>,
}

/// Probes one address. Owned by the probe's future while a probe is in flight.
pub(super) struct Prober {
    pub(super) endpoint: Endpoint,
    pub(super) at: Option<IpAddr>,
    /// Serial of the place being probed: a dropped place may come back with a new serial.
    pub(super) serial: u64,
    channel: Channel,
    dialled: Arc<DialHistory>,
    http1: Connector,
    identity: ProbeIdentity,
    verified: MemberVerification,
    login: ProbeLogin,
    /// The login to which `token` and `no_login_before` belong.
    user: Option<Arc<EtcdLogin>>,
    token: Option<AsciiMetadataValue>,
    /// The connection that delivered the token.
    token_of: u32,
    no_login_before: Option<Instant>,
    /// True if etcd refused the last login, and no call has succeeded since.
    login_refused: bool,
    page: Option<CachedMetricsPage>,
    named: Option<ConnectionMember>,
    /// The content and limits of the current probe.
    want: ProbeRequest,
    /// Duration of the fastest answered call of the current probe.
    took: Option<Duration>,
}

/// The member identified over connection number `of`, and the time of identification.
struct ConnectionMember {
    of: u32,
    at: Instant,
    who: Option<(MemberId, ClusterId)>,
}

/// A metrics page, the time of reading, and the term at that time.
struct CachedMetricsPage {
    at: Instant,
    term: u64,
    page: MemberMetricsPage,
}

/// The user proven by the connection alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ProbeIdentity {
    None,
    /// Keyward presents a client certificate; its common name may be an etcd user.
    Certificate,
}

/// The proof by TLS that the server is a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MemberVerification {
    /// Verified by an authority of `cluster.tls.ca`, or by a pinned fingerprint.
    Yes,
    /// Plaintext, or `cluster.tls.insecure_skip_verify`.
    No,
}

/// The content of a probe beyond the member's identity, and the limits of the probe.
#[derive(Clone, Copy, Debug)]
pub(super) struct ProbeRequest {
    pub(super) list: bool,
    /// If set, the probe also determines the auth setting.
    pub(super) auth: Option<AuthQuestion>,
    /// A leader change is suspected: cached results are ignored.
    pub(super) fresh: bool,
    /// The member at this address is in no list of the cluster. The member may be about to learn of its
    /// removal, so Status is not requested.
    pub(super) unlisted: bool,
    /// The member was a learner at its last probe: only Status is requested, because a learner refuses
    /// MemberList.
    pub(super) learner: bool,
    /// Time limit of one call.
    pub(super) limit: Duration,
    /// The served cluster.
    pub(super) pinned: Option<ClusterId>,
    /// The origin of the address.
    pub(super) source: AddressSource,
}

/// The question about the auth setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AuthQuestion {
    /// The current belief.
    pub(super) believed: AuthSetting,
    /// True if a belief is confirmed by a login where a read proves nothing: Keyward's own certificate may
    /// name a user of etcd.
    pub(super) confirms: bool,
}

impl Default for ProbeRequest {
    fn default() -> Self {
        Self {
            list: false,
            auth: None,
            fresh: false,
            unlisted: false,
            learner: false,
            limit: LEAST,
            pinned: None,
            source: AddressSource::Listed,
        }
    }
}

/// The result of a probe.
#[derive(Debug)]
pub(super) struct ProbeReport {
    pub(super) told: Result<IdentifiedMember, ProbeFailure>,
    /// `None` if the list was not requested or not answered.
    pub(super) list: Option<Result<Vec<ListedMember>, ProbeRefusal>>,
    pub(super) auth: Option<AuthSetting>,
    /// True if etcd refuses the name and password of the probing user.
    pub(super) login_refused: bool,
    /// The ids in the member's own list, if the member answered MemberList.
    pub(super) ids: Option<BTreeSet<MemberId>>,
    /// Duration of the fastest answered call.
    pub(super) took: Option<Duration>,
}

/// The answer of an identified member.
#[derive(Clone, Debug)]
pub(super) struct IdentifiedMember {
    pub(super) answer: MemberProbeAnswer,
    /// Status was refused; the answer is assembled from the metrics page and from calls that need no rights.
    pub(super) makeshift: bool,
    /// The refusal is about the probing user, and stands until somebody changes the user or the member. False
    /// for a member that answers again soon, such as one without a leader or in the middle of a login.
    pub(super) is_standing: bool,
}

/// Why no member is known at an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ProbeFailure {
    /// No connection, or the connection broke, or the member is starting or stopping.
    Gone,
    /// No answer in time.
    Late,
    /// A server answers, but the probing user learned neither the member id nor the leader.
    Unidentified,
    /// The member is missing from its own member list: the member was removed, and ends within a second.
    Removed,
}

/// Why a call has no result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ProbeRefusal {
    /// The call needs a user, and no valid credential is available.
    NoUser,
    /// The user lacks the permission.
    Denied,
    /// A learner refuses the call.
    Learner,
    NoLeader,
    Silent(ProbeFailure),
}

impl ProbeRefusal {
    /// The reason, for the log.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::NoUser => "no user",
            Self::Denied => "permission denied",
            Self::Learner => "learner",
            Self::NoLeader => "no leader",
            Self::Silent(_) => "no answer",
        }
    }
}

impl ProbeRefusal {
    /// True for a refusal that stands until somebody changes the probing user or the member. A login that did
    /// not come to an end, as without a leader, is tried again, and so is a token unknown to a member.
    fn is_standing(self, is_login_tried_again: bool) -> bool {
        match self {
            Self::Denied => true,
            Self::NoUser => !is_login_tried_again,
            Self::Learner | Self::NoLeader | Self::Silent(_) => false,
        }
    }
}

impl Prober {
    pub(super) fn new(
        endpoint: Endpoint,
        at: Option<IpAddr>,
        serial: u64,
        (channel, dialled): (Channel, Arc<DialHistory>),
        http1: Connector,
        (identity, verified): (ProbeIdentity, MemberVerification),
        login: ProbeLogin,
    ) -> Self {
        let user = login.load_full();
        Self {
            endpoint,
            at,
            serial,
            channel,
            dialled,
            http1,
            identity,
            verified,
            login,
            user,
            token: None,
            token_of: 0,
            no_login_before: None,
            login_refused: false,
            page: None,
            named: None,
            want: ProbeRequest::default(),
            took: None,
        }
    }

    /// Replaces the channel by a new channel to the same address.
    pub(super) fn use_channel(&mut self, channel: Channel) {
        self.channel = channel;
    }

    /// Drops a token delivered by an earlier connection: the new connection may end at a different member,
    /// even of a different cluster, and such a member would wait for the token's index without answering.
    fn follow_connection(&mut self) {
        if self.token_of != self.dialled.times.load(Ordering::Relaxed) {
            self.token = None;
        }
    }

    /// Runs one probe. Never fails: missing results are marked in the report.
    pub(super) async fn ask(mut self, want: ProbeRequest) -> (Self, ProbeReport) {
        (self.want, self.took) = (want, None);
        self.follow_login();
        self.follow_connection();
        let own_list =
            if want.learner { Err(ProbeRefusal::Learner) } else { self.as_user(member_list).await };
        let told = self.identify_member(&own_list).await;
        let ids =
            own_list.as_ref().ok().map(|list| list.members.iter().map(|one| MemberId(one.id)).collect());
        let login_refused = self.login_refused;
        let mut report = ProbeReport { told, list: None, auth: None, login_refused, ids, took: None };
        if report.told.is_ok() {
            if want.list {
                report.list = Some(own_list.and_then(|list| listed(&list)));
            }
            if let Some(question) = want.auth {
                report.auth = self.auth(question).await;
            }
        }
        report.took = self.took;
        (self, report)
    }

    /// Identifies the member, given its own member list or the refusal of MemberList. Every etcd version
    /// refusing MemberList to a user also refuses Status to the same user.
    async fn identify_member(
        &mut self,
        own_list: &Result<MemberListResponse, ProbeRefusal>,
    ) -> Result<IdentifiedMember, ProbeFailure> {
        match own_list {
            Ok(list) if !is_in_its_list(list) => return Err(ProbeFailure::Removed),
            Ok(list) if self.want.unlisted => {
                let answer = told_by_list(list).ok_or(ProbeFailure::Gone)?;
                return Ok(IdentifiedMember { answer, makeshift: false, is_standing: false });
            }
            // A learner refuses MemberList, and so reveals its role.
            Ok(_) | Err(ProbeRefusal::Learner) => {}
            Err(ProbeRefusal::Silent(silence)) => return Err(*silence),
            Err(refusal @ (ProbeRefusal::NoUser | ProbeRefusal::Denied | ProbeRefusal::NoLeader)) => {
                return self.told_without_status(*refusal).await;
            }
        }
        let began = Instant::now();
        match self.as_user(status).await {
            Ok(status) => told_by_status(&status, began.elapsed())
                .map(|answer| IdentifiedMember { answer, makeshift: false, is_standing: false })
                .ok_or(ProbeFailure::Gone),
            Err(ProbeRefusal::Silent(silence)) => Err(silence),
            Err(refusal) => self.told_without_status(refusal).await,
        }
    }

    async fn told_without_status(&mut self, refusal: ProbeRefusal) -> Result<IdentifiedMember, ProbeFailure> {
        let answer = self.identify_without_status(self.want.fresh).await?;
        let is_login_tried_again =
            self.token.is_some() || (self.no_login_before.is_some() && !self.login_refused);
        let is_standing = refusal.is_standing(is_login_tried_again);
        Ok(IdentifiedMember { answer, makeshift: true, is_standing })
    }

    /// After a change of the probing user, drops the token and the login pause of the previous user.
    fn follow_login(&mut self) {
        let now = self.login.load_full();
        if now.as_ref().map(Arc::as_ptr) != self.user.as_ref().map(Arc::as_ptr) {
            (self.user, self.token, self.no_login_before) = (now, None, None);
            self.login_refused = false;
        }
    }

    /// Makes a call with the token, if a token is present. If the call is refused for its credential, logs in
    /// and makes the call once more.
    async fn as_user<T, F>(
        &mut self,
        call: impl Fn(Channel, Option<AsciiMetadataValue>) -> F,
    ) -> Result<T, ProbeRefusal>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        let mut result = self.limited(call(self.channel.clone(), self.token.clone())).await;
        if let Err(refused @ (ProbeCallError::BadToken | ProbeCallError::NoUser)) = result {
            self.token = None;
            if self.may_send_password().await {
                self.log_in().await;
            }
            // A bad token may be worse than no token: auth may have been turned off meanwhile.
            if self.token.is_some() || refused == ProbeCallError::BadToken {
                result = self.limited(call(self.channel.clone(), self.token.clone())).await;
            }
        }
        self.login_refused &= result.is_err();
        result.map_err(|heard| match heard {
            ProbeCallError::BadToken | ProbeCallError::NoUser => ProbeRefusal::NoUser,
            ProbeCallError::Denied => ProbeRefusal::Denied,
            ProbeCallError::Learner => ProbeRefusal::Learner,
            ProbeCallError::NoLeader => ProbeRefusal::NoLeader,
            ProbeCallError::Gone => ProbeRefusal::Silent(ProbeFailure::Gone),
            ProbeCallError::Late => ProbeRefusal::Silent(ProbeFailure::Late),
        })
    }

    /// Runs a call within the time limit, and records the duration of an answered call.
    async fn limited<T>(
        &mut self,
        call: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<T, ProbeCallError> {
        let began = Instant::now();
        let result = calls::limited(self.want.limit, call).await;
        if !matches!(result, Err(ProbeCallError::Gone | ProbeCallError::Late)) {
            let took = began.elapsed();
            self.took = Some(self.took.map_or(took, |before| before.min(took)));
        }
        result
    }

    /// True if the probing user's password may be sent to this address. A verified handshake proves the
    /// member. Without a verified handshake any server may answer, so the server must have named the served
    /// cluster, by a call that needs no user. If the cluster id is unavailable, a configured endpoint is
    /// trusted as the operator's choice; an address from the member list is not.
    async fn may_send_password(&mut self) -> bool {
        if self.verified == MemberVerification::Yes || self.user.is_none() {
            return true;
        }
        let named = self.identify_connection().await.map(|(_, cluster)| cluster);
        let may = may_send_password(named, self.want.pinned, self.want.source);
        if !may {
            tracing::debug!(
                endpoint = %self.endpoint, ?named,
                "the password of cluster.probe is not sent: nothing shows that a member of the cluster is \
                 here"
            );
        }
        may
    }

    /// Logs in as the probing user, unless no user is configured or the login pause lasts.
    async fn log_in(&mut self) {
        let Some(login) = &self.user else { return };
        if self.no_login_before.is_some_and(|time| Instant::now() < time) {
            return;
        }
        let request = AuthenticateRequest {
            name: login.user.as_str().to_owned(),
            password: login.password.expose().clone(),
        };
        let mut client = AuthClient::new(self.channel.clone());
        let answered = timeout(LOGIN, client.authenticate(request)).await;
        let pause = match answered {
            Ok(Ok(answer)) => {
                self.token = MetadataValue::try_from(answer.into_inner().token).ok();
                self.token.iter_mut().for_each(|token| token.set_sensitive(true));
                self.token_of = self.dialled.times.load(Ordering::Relaxed);
                self.login_refused = false;
                None
            }
            Ok(Err(status)) if is_refused_login(&status) => {
                self.login_refused = true;
                Some(AFTER_REFUSED_LOGIN)
            }
            Ok(Err(_)) | Err(_) => Some(AFTER_FAILED_LOGIN),
        };
        self.no_login_before = pause.map(|pause| Instant::now() + pause);
    }

    /// Identifies the member by calls that need no rights. A call that needs neither quorum nor rights shows
    /// the presence of a leader; the metrics page shows the rest.
    async fn identify_without_status(&mut self, fresh: bool) -> Result<MemberProbeAnswer, ProbeFailure> {
        let (leads, header) = self.sees_leader().await?;
        let (now, term) = (Instant::now(), header.as_ref().map_or(0, |header| header.raft_term));
        let good = |read: &CachedMetricsPage| {
            !fresh && now < read.at + PAGE_AGE && read.term == term && read.page.has_leader == leads
        };
        if !self.page.as_ref().is_some_and(good) {
            let fetched = timeout(self.want.limit, metrics_page::fetch(&self.http1, &self.endpoint, self.at))
                .await
                .ok()
                .flatten();
            self.page = match fetched {
                Some(page) => Some(CachedMetricsPage { at: now, term, page }),
                None => self.page.take().filter(|read| now < read.at + PAGE_KEPT),
            };
        }
        let page = self.page.as_ref().map(|read| read.page);
        let named = match &header {
            Some(header) => Some((MemberId(header.member_id), ClusterId(header.cluster_id))),
            // A learner is identified by its metrics page alone.
            None if page.is_some_and(|page| page.role == Role::Learner) => None,
            None => self.identify_connection().await,
        };
        let member = named
            .map(|(member, _)| member)
            .or_else(|| page.map(|page| page.member))
            .ok_or(ProbeFailure::Unidentified)?;
        let leader = match page {
            _ if !leads => LeaderView::Nobody,
            Some(page) if page.is_leader => LeaderView::Member(member),
            Some(_) | None => LeaderView::Somebody,
        };
        Ok(MemberProbeAnswer {
            member,
            cluster: named.map(|(_, cluster)| cluster),
            version: page.and_then(|page| page.version),
            role: page.map_or(Role::Voter, |page| page.role),
            leader,
            term,
            store_status: None,
        })
    }

    /// Identifies the member behind the connection when every call is refused. A result holds for the whole
    /// connection, because a connection leads to one process; a failed attempt is repeated at the age limit
    /// of a metrics page. A known learner is not asked: a learner reveals its id to no caller.
    async fn identify_connection(&mut self) -> Option<(MemberId, ClusterId)> {
        if self.want.learner {
            return None;
        }
        let (now, of) = (Instant::now(), self.dialled.times.load(Ordering::Relaxed));
        let good =
            |named: &&ConnectionMember| named.of == of && (named.who.is_some() || now < named.at + PAGE_AGE);
        if let Some(named) = self.named.as_ref().filter(good) {
            return named.who;
        }
        let header = timeout(self.want.limit, header_of_a_watch(self.channel.clone())).await.ok().flatten();
        let who = header
            .filter(|header| header.cluster_id != 0 && header.member_id != 0)
            .map(|header| (MemberId(header.member_id), ClusterId(header.cluster_id)));
        // If the connection changed meanwhile, the answer cannot be assigned to either connection.
        let who = who.filter(|_| self.dialled.times.load(Ordering::Relaxed) == of);
        self.named = Some(ConnectionMember { of, at: now, who });
        who
    }

    /// True if the member sees a leader; also the response header, if the member grants one to this user.
    async fn sees_leader(&mut self) -> Result<(bool, Option<ResponseHeader>), ProbeFailure> {
        // MemberList with `hasleader`: a refusal for a missing user or missing rights also proves that the
        // earlier check for a leader passed. Most versions checking rights allow the call to any user (not
        // 3.4.42, 3.5.28 and 3.6.9, which require root). A read would not do: learners serve reads.
        match self.limited(member_list_with_leader(self.channel.clone(), self.token.clone())).await {
            Ok(list) => Ok((true, list.header)),
            Err(ProbeCallError::NoLeader) => Ok((false, None)),
            Err(
                ProbeCallError::NoUser
                | ProbeCallError::BadToken
                | ProbeCallError::Denied
                | ProbeCallError::Learner,
            ) => Ok((true, None)),
            Err(ProbeCallError::Late) => Err(ProbeFailure::Late),
            Err(ProbeCallError::Gone) => Err(ProbeFailure::Gone),
        }
    }

    /// Determines the auth setting. A refused read without a token means on. An allowed read means off only
    /// if no client certificate names a user, and the member may lag behind: a change is believed only after
    /// confirmation by a login, which is linearizable.
    async fn auth(&self, question: AuthQuestion) -> Option<AuthSetting> {
        let AuthQuestion { believed, confirms } = question;
        let seems = match calls::limited(self.want.limit, count_one_key(self.channel.clone())).await {
            Ok(_) => AuthSetting::Off,
            Err(ProbeCallError::NoUser | ProbeCallError::Denied) => AuthSetting::On,
            Err(_) => return None,
        };
        let certain = match seems {
            AuthSetting::On => believed != AuthSetting::Off,
            _ => believed == AuthSetting::Off && self.identity == ProbeIdentity::None,
        };
        if certain {
            return Some(seems);
        }
        let may_be_a_certificate = seems == AuthSetting::Off && self.identity != ProbeIdentity::None;
        if may_be_a_certificate && !confirms && believed != AuthSetting::Unknown {
            return Some(believed);
        }
        let request = AuthenticateRequest { name: NOBODY.to_owned(), password: String::new() };
        let mut client = AuthClient::new(self.channel.clone());
        match timeout(self.want.limit, client.authenticate(request)).await {
            // No etcd has such a user. A Keyward before etcd takes every login while auth is off, and refuses
            // a read without a token while auth is on.
            Ok(Ok(_)) => Some(seems),
            Ok(Err(status)) if status.message() == "etcdserver: authentication is not enabled" => {
                Some(AuthSetting::Off)
            }
            Ok(Err(status)) if is_refused_login(&status) => Some(AuthSetting::On),
            Ok(Err(_)) | Err(_) => None,
        }
    }
}

/// True if a password may be sent, without a verified handshake, to an address that named cluster `named`.
fn may_send_password(named: Option<ClusterId>, pinned: Option<ClusterId>, source: AddressSource) -> bool {
    match (named, pinned) {
        (Some(named), Some(pinned)) => named == pinned,
        (Some(_) | None, None) | (None, Some(_)) => source == AddressSource::Configured,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_refusal_of_the_user_stands() {
        assert!(ProbeRefusal::Denied.is_standing(false) && ProbeRefusal::NoUser.is_standing(false));
        assert!(!ProbeRefusal::NoUser.is_standing(true), "the login is tried again");
        for passing in [ProbeRefusal::NoLeader, ProbeRefusal::Learner] {
            assert!(!passing.is_standing(false), "{passing:?}");
        }
    }

    #[test]
    fn a_password_goes_unverified_only_where_the_served_cluster_named_itself_or_the_configuration_says_so() {
        const OURS: ClusterId = ClusterId(1);
        const OTHER: ClusterId = ClusterId(2);
        for (named, pinned, configured, listed) in [
            (Some(OURS), Some(OURS), true, true),
            (Some(OTHER), Some(OURS), false, false),
            (None, Some(OURS), true, false),
            (Some(OURS), None, true, false),
            (None, None, true, false),
        ] {
            assert_eq!(
                may_send_password(named, pinned, AddressSource::Configured),
                configured,
                "{named:?} {pinned:?}"
            );
            assert_eq!(
                may_send_password(named, pinned, AddressSource::Listed),
                listed,
                "{named:?} {pinned:?}"
            );
        }
    }
}
