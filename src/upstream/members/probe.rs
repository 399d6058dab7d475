//! Asking one address who is there: Status, and where that is refused what else tells it.
//!
//! Owns: the calls of a probe, its own login (so that finding members depends on nothing that depends on members),
//! what etcd's refusals mean. Must not know: other addresses, what follows from an answer.
//! Invariants: a token goes only where the call without one was refused, and only after this address gave it; a
//! refused password is not tried again for half a minute; a probe never writes.

use std::future::Future;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use arc_swap::ArcSwapOption;
use futures_util::StreamExt as _;
use futures_util::stream;
use tokio::time::{Instant, timeout};
use tonic::metadata::{AsciiMetadataValue, MetadataValue};
use tonic::transport::Channel;
use tonic::{Code, Request, Response, Status};

use crate::config::{Endpoint, Login};
use crate::identity::{ClusterId, MemberId};
use crate::pb::etcdserverpb::auth_client::AuthClient;
use crate::pb::etcdserverpb::cluster_client::ClusterClient;
use crate::pb::etcdserverpb::kv_client::KvClient;
use crate::pb::etcdserverpb::maintenance_client::MaintenanceClient;
use crate::pb::etcdserverpb::watch_client::WatchClient;
use crate::pb::etcdserverpb::watch_request::RequestUnion;
use crate::pb::etcdserverpb::{
    AuthenticateRequest, MemberListRequest, MemberListResponse, RangeRequest, ResponseHeader, StatusRequest,
    StatusResponse, WatchCreateRequest, WatchRequest,
};
use crate::upstream::connect::{ConnectError, Connector};
use crate::upstream::members::census::{Answer, Listed, Sight};
use crate::upstream::members::metrics_page::{self, Page};
use crate::upstream::membership::{Auth, Role};
use crate::upstream::version::Version;
use crate::upstream::vitals::Vitals;

/// How long one call of a probe may take.
const CALL: Duration = Duration::from_secs(1);
/// How long a login may take: etcd's own limit. One that is given up still burns bcrypt there.
const LOGIN: Duration = Duration::from_secs(8);
/// Between logins that failed: for the password, and for anything else.
const AFTER_REFUSED_LOGIN: Duration = Duration::from_secs(30);
const AFTER_FAILED_LOGIN: Duration = Duration::from_secs(1);
/// How old a metrics page may be: each costs the member some milliseconds.
const PAGE_AGE: Duration = Duration::from_secs(2);
/// How old it may be where no newer one is to be had: who the member is seldom changes.
const PAGE_KEPT: Duration = Duration::from_secs(10);
/// A user that should not exist: asks etcd whether auth is on, without a password and without its bcrypt.
const NOBODY: &str = "keyward-asks-whether-auth-is-on";

/// Members of a list. Real clusters have at most some nine.
const LISTED: usize = 64;

/// As whom members are probed; replaced at run time.
pub type ProbeLogin = Arc<ArcSwapOption<Login>>;

/// What became of the connections to one address.
#[derive(Default)]
pub(super) struct Dialled {
    /// How many there were.
    pub(super) times: AtomicU32,
    /// Why there is none, where the last one could not be made.
    pub(super) failure: ArcSwapOption<ConnectError>,
}

/// Asks one address. Lives in the probe's future while one is under way.
pub(super) struct Prober {
    pub(super) endpoint: Endpoint,
    pub(super) at: Option<IpAddr>,
    /// Which place it is of: one that was dropped may come again.
    pub(super) serial: u64,
    channel: Channel,
    dialled: Arc<Dialled>,
    http1: Connector,
    identity: Identity,
    login: ProbeLogin,
    /// The login that the rest is about.
    user: Option<Arc<Login>>,
    token: Option<AsciiMetadataValue>,
    /// The connection over which it came.
    token_of: u32,
    no_login_before: Option<Instant>,
    page: Option<Read>,
    named: Option<Named>,
}

/// Who was found at the end of a connection, and over which one, when.
struct Named {
    of: u32,
    at: Instant,
    who: Option<(MemberId, ClusterId)>,
}

/// A metrics page and when it was read, at which term.
struct Read {
    at: Instant,
    term: u64,
    page: Page,
}

/// Whether a connection alone proves a user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Identity {
    None,
    /// We show a client certificate, whose common name may be a user.
    Certificate,
}

/// What a probe shall ask beyond who is there.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Want {
    pub(super) list: bool,
    /// Whether auth is on; with what is believed so far.
    pub(super) auth: Option<Auth>,
    /// A new leader is suspected: nothing remembered counts.
    pub(super) fresh: bool,
}

/// What a probe told.
#[derive(Debug)]
pub(super) struct Report {
    pub(super) told: Result<Told, Silence>,
    /// `None` where it was not asked for or not answered.
    pub(super) list: Option<Result<Vec<Listed>, Refusal>>,
    pub(super) auth: Option<Auth>,
    pub(super) login_refused: bool,
}

/// Who answered.
#[derive(Clone, Debug)]
pub(super) struct Told {
    pub(super) answer: Answer,
    /// Status was refused: this comes from the metrics page and what else is told to anybody.
    pub(super) makeshift: bool,
}

/// Why nobody is known to be there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Silence {
    /// No connection, or it broke, or the member is starting or stopping.
    Gone,
    /// No answer in time.
    Late,
    /// Somebody answers and says to the probing user neither its member id nor its leader.
    Unidentified,
}

/// Why a call has no result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// It needs a user, and there is none.
    NoUser,
    /// The user may not.
    Denied,
    /// A learner does not serve it.
    Learner,
    NoLeader,
    Silent(Silence),
}

impl Prober {
    pub(super) fn new(
        endpoint: Endpoint,
        at: Option<IpAddr>,
        serial: u64,
        (channel, dialled): (Channel, Arc<Dialled>),
        http1: Connector,
        identity: Identity,
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
            login,
            user,
            token: None,
            token_of: 0,
            no_login_before: None,
            page: None,
            named: None,
        }
    }

    /// Takes another channel to the same address.
    pub(super) fn use_channel(&mut self, channel: Channel) {
        self.channel = channel;
    }

    /// Forgets a token that came over another connection than this one: at its end there may be another member by now, even of
    /// another cluster, which would wait for a token's index without an answer.
    fn follow_connection(&mut self) {
        if self.token_of != self.dialled.times.load(Ordering::Relaxed) {
            self.token = None;
        }
    }

    /// One probe. Never fails: what it could not learn is in the report.
    pub(super) async fn ask(mut self, want: Want) -> (Self, Report) {
        self.follow_login();
        self.follow_connection();
        let mut login_refused = false;
        let began = Instant::now();
        let told = match self.as_user(&mut login_refused, status).await {
            Ok(status) => told_by_status(&status, began.elapsed())
                .map(|answer| Told { answer, makeshift: false })
                .ok_or(Silence::Gone),
            Err(Refusal::Silent(silence)) => Err(silence),
            Err(_) => self.makeshift(want.fresh).await.map(|answer| Told { answer, makeshift: true }),
        };
        let mut report = Report { told, list: None, auth: None, login_refused };
        if report.told.is_ok() {
            if want.list {
                let list = self.as_user(&mut report.login_refused, member_list).await;
                report.list = Some(list.and_then(|list| listed(&list)));
            }
            if let Some(believed) = want.auth {
                report.auth = self.auth(believed).await;
            }
        }
        (self, report)
    }

    /// Whoever is somebody else now has neither the token nor the refusals of who was before.
    fn follow_login(&mut self) {
        let now = self.login.load_full();
        if now.as_ref().map(Arc::as_ptr) != self.user.as_ref().map(Arc::as_ptr) {
            (self.user, self.token, self.no_login_before) = (now, None, None);
        }
    }

    /// Makes a call with the token if there is one; where it is refused for want of a good one, once more after a
    /// login.
    async fn as_user<T, F>(
        &mut self,
        login_refused: &mut bool,
        call: impl Fn(Channel, Option<AsciiMetadataValue>) -> F,
    ) -> Result<T, Refusal>
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        let mut result = limited(call(self.channel.clone(), self.token.clone())).await;
        if let Err(refused @ (Heard::BadToken | Heard::NoUser)) = result {
            self.token = None;
            *login_refused |= self.log_in().await;
            // A bad token may be worse than none: where auth was turned off meanwhile.
            if self.token.is_some() || refused == Heard::BadToken {
                result = limited(call(self.channel.clone(), self.token.clone())).await;
            }
        }
        result.map_err(|heard| match heard {
            Heard::BadToken | Heard::NoUser => Refusal::NoUser,
            Heard::Denied => Refusal::Denied,
            Heard::Learner => Refusal::Learner,
            Heard::NoLeader => Refusal::NoLeader,
            Heard::Gone => Refusal::Silent(Silence::Gone),
            Heard::Late => Refusal::Silent(Silence::Late),
        })
    }

    /// Logs in as the probing user, if there is one and it is time. Says whether etcd refused the password.
    async fn log_in(&mut self) -> bool {
        let Some(login) = &self.user else { return false };
        if self.no_login_before.is_some_and(|time| Instant::now() < time) {
            return false;
        }
        let request = AuthenticateRequest {
            name: login.user.as_str().to_owned(),
            password: login.password.expose().clone(),
        };
        let mut client = AuthClient::new(self.channel.clone());
        let answered = timeout(LOGIN, client.authenticate(request)).await;
        let (pause, refused) = match answered {
            Ok(Ok(answer)) => {
                self.token = MetadataValue::try_from(answer.into_inner().token).ok();
                self.token.iter_mut().for_each(|token| token.set_sensitive(true));
                self.token_of = self.dialled.times.load(Ordering::Relaxed);
                (None, false)
            }
            Ok(Err(status)) if is_refused_login(&status) => (Some(AFTER_REFUSED_LOGIN), true),
            Ok(Err(_)) | Err(_) => (Some(AFTER_FAILED_LOGIN), false),
        };
        self.no_login_before = pause.map(|pause| Instant::now() + pause);
        refused
    }

    /// Who is there, from what is told to anybody: whether it answers and sees a leader, by a call that needs
    /// neither quorum nor rights; the rest from its metrics page.
    async fn makeshift(&mut self, fresh: bool) -> Result<Answer, Silence> {
        let (leads, header) = self.sees_leader().await?;
        let (now, term) = (Instant::now(), header.as_ref().map_or(0, |header| header.raft_term));
        let good = |read: &Read| {
            !fresh && now < read.at + PAGE_AGE && read.term == term && read.page.has_leader == leads
        };
        if !self.page.as_ref().is_some_and(good) {
            let fetched =
                timeout(CALL, metrics_page::fetch(&self.http1, &self.endpoint, self.at)).await.ok().flatten();
            self.page = match fetched {
                Some(page) => Some(Read { at: now, term, page }),
                None => self.page.take().filter(|read| now < read.at + PAGE_KEPT),
            };
        }
        let page = self.page.as_ref().map(|read| read.page);
        let named = match &header {
            Some(header) => Some((MemberId(header.member_id), ClusterId(header.cluster_id))),
            // A learner tells nobody.
            None if page.is_some_and(|page| page.role == Role::Learner) => None,
            None => self.named().await,
        };
        let member = named
            .map(|(member, _)| member)
            .or_else(|| page.map(|page| page.member))
            .ok_or(Silence::Unidentified)?;
        let leader = match page {
            _ if !leads => Sight::Nobody,
            Some(page) if page.is_leader => Sight::Member(member),
            Some(_) | None => Sight::Somebody,
        };
        Ok(Answer {
            member,
            cluster: named.map(|(_, cluster)| cluster),
            version: page.and_then(|page| page.version),
            role: page.map_or(Role::Voter, |page| page.role),
            leader,
            term,
            vitals: None,
        })
    }

    /// Who is at the end of the connection, where every call is refused: asked once per connection, since that leads to one
    /// process; where it was not told, again when a metrics page would be.
    async fn named(&mut self) -> Option<(MemberId, ClusterId)> {
        let (now, of) = (Instant::now(), self.dialled.times.load(Ordering::Relaxed));
        let good = |named: &&Named| named.of == of && (named.who.is_some() || now < named.at + PAGE_AGE);
        if let Some(named) = self.named.as_ref().filter(good) {
            return named.who;
        }
        let header = timeout(CALL, header_of_a_watch(self.channel.clone())).await.ok().flatten();
        let who = header
            .filter(|header| header.cluster_id != 0 && header.member_id != 0)
            .map(|header| (MemberId(header.member_id), ClusterId(header.cluster_id)));
        // Which of two connections it came over is not known.
        let who = who.filter(|_| self.dialled.times.load(Ordering::Relaxed) == of);
        self.named = Some(Named { of, at: now, who });
        who
    }

    /// Whether the member sees a leader, and its header where it gives one to this user.
    async fn sees_leader(&mut self) -> Result<(bool, Option<ResponseHeader>), Silence> {
        // A user without further rights may list members from the version on that checks at all; without a user even
        // the refusal tells that the check for a leader before it was passed. No read: a learner would serve that.
        match limited(member_list_with_leader(self.channel.clone(), self.token.clone())).await {
            Ok(list) => Ok((true, list.header)),
            Err(Heard::NoLeader) => Ok((false, None)),
            Err(Heard::NoUser | Heard::BadToken | Heard::Denied | Heard::Learner) => Ok((true, None)),
            Err(Heard::Late) => Err(Silence::Late),
            Err(Heard::Gone) => Err(Silence::Gone),
        }
    }

    /// Whether auth is on. A refusal of a read without a token says on; that such a read is allowed says off only
    /// where no client certificate names a user, and a member may lag behind: a change is believed only when a
    /// login, which is linearizable, confirms it.
    async fn auth(&self, believed: Auth) -> Option<Auth> {
        let seems = match limited(peek(self.channel.clone())).await {
            Ok(_) => Auth::Off,
            Err(Heard::NoUser | Heard::Denied) => Auth::On,
            Err(_) => return None,
        };
        let certain = match seems {
            Auth::On => believed != Auth::Off,
            _ => believed == Auth::Off && self.identity == Identity::None,
        };
        if certain {
            return Some(seems);
        }
        let request = AuthenticateRequest { name: NOBODY.to_owned(), password: String::new() };
        let mut client = AuthClient::new(self.channel.clone());
        match timeout(CALL, client.authenticate(request)).await {
            Ok(Ok(_)) => Some(Auth::On),
            Ok(Err(status)) if status.message() == "etcdserver: authentication is not enabled" => {
                Some(Auth::Off)
            }
            Ok(Err(status)) if is_refused_login(&status) => Some(Auth::On),
            Ok(Err(_)) | Err(_) => None,
        }
    }
}

async fn status(
    channel: Channel,
    token: Option<AsciiMetadataValue>,
) -> Result<Response<StatusResponse>, Status> {
    MaintenanceClient::new(channel).status(with_token(StatusRequest {}, token)).await
}

async fn member_list(
    channel: Channel,
    token: Option<AsciiMetadataValue>,
) -> Result<Response<MemberListResponse>, Status> {
    ClusterClient::new(channel)
        .member_list(with_token(MemberListRequest { linearizable: false }, token))
        .await
}

async fn member_list_with_leader(
    channel: Channel,
    token: Option<AsciiMetadataValue>,
) -> Result<Response<MemberListResponse>, Status> {
    let mut request = with_token(MemberListRequest { linearizable: false }, token);
    request.metadata_mut().insert("hasleader", MetadataValue::from_static("true"));
    ClusterClient::new(channel).member_list(request).await
}

/// The cheapest read: a count of one key of the member's own store. Never with a token.
async fn peek(channel: Channel) -> Result<Response<crate::pb::etcdserverpb::RangeResponse>, Status> {
    let request = Request::new(RangeRequest {
        key: b"\0".as_slice().into(),
        limit: 1,
        serializable: true,
        count_only: true,
        ..RangeRequest::default()
    });
    KvClient::new(channel).range(request).await
}

/// What every version tells to anybody: the answer that refuses a watch for want of a user has a header. Where it is allowed
/// instead, by a certificate or since auth is off, the watch ends with its stream. Never with a token. No empty transaction, though
/// that is answered too: at a member that is out of space it raises the alarm.
async fn header_of_a_watch(channel: Channel) -> Option<ResponseHeader> {
    let create = WatchCreateRequest { key: b"\0".as_slice().into(), ..WatchCreateRequest::default() };
    let create = WatchRequest { request_union: Some(RequestUnion::CreateRequest(create)) };
    let requests = stream::iter([create]).chain(stream::pending());
    let mut answers = WatchClient::new(channel).watch(requests).await.ok()?.into_inner();
    answers.message().await.ok()??.header
}

fn with_token<T>(message: T, token: Option<AsciiMetadataValue>) -> Request<T> {
    let mut request = Request::new(message);
    if let Some(token) = token {
        request.metadata_mut().insert("token", token);
    }
    request
}

/// What a call without a result means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Heard {
    BadToken,
    NoUser,
    Denied,
    Learner,
    NoLeader,
    Gone,
    Late,
}

async fn limited<T>(call: impl Future<Output = Result<Response<T>, Status>>) -> Result<T, Heard> {
    match timeout(CALL, call).await {
        Ok(Ok(response)) => Ok(response.into_inner()),
        Ok(Err(status)) => Err(heard(&status)),
        Err(_) => Err(Heard::Late),
    }
}

/// By etcd's texts (rpctypes/error.go, and auth/store.go where a version passes them on raw).
fn heard(status: &Status) -> Heard {
    match status.message() {
        "etcdserver: user name is empty" | "auth: user name is empty" => Heard::NoUser,
        "etcdserver: invalid auth token"
        | "auth: invalid auth token"
        | "etcdserver: revision of auth store is old"
        | "auth: revision in header is old" => Heard::BadToken,
        "etcdserver: permission denied"
        | "auth: permission denied"
        | "etcdserver: user name not found"
        | "auth: user not found" => Heard::Denied,
        "etcdserver: rpc not supported for learner" => Heard::Learner,
        "etcdserver: no leader" => Heard::NoLeader,
        _ => Heard::Gone,
    }
}

/// Whether etcd said no to this name and password (and so has auth on).
fn is_refused_login(status: &Status) -> bool {
    matches!(
        (status.code(), status.message()),
        (Code::InvalidArgument, "etcdserver: authentication failed, invalid user ID or password")
            | (Code::Unknown, "auth: authentication failed, password was given for no password user")
    )
}

fn told_by_status(status: &StatusResponse, took: Duration) -> Option<Answer> {
    let header = status.header.as_ref()?;
    Some(Answer {
        member: MemberId(header.member_id),
        cluster: Some(ClusterId(header.cluster_id)),
        version: Version::parse(&status.version).ok(),
        role: role(status.is_learner),
        leader: if status.leader == 0 { Sight::Nobody } else { Sight::Member(MemberId(status.leader)) },
        term: status.raft_term,
        vitals: Some(Arc::new(Vitals::read(status, took))),
    })
}

/// A list that is longer than any real one is none.
fn listed(list: &MemberListResponse) -> Result<Vec<Listed>, Refusal> {
    if list.members.len() > LISTED {
        return Err(Refusal::Silent(Silence::Gone));
    }
    let members = list.members.iter().map(|member| Listed {
        id: MemberId(member.id),
        name: member.name.as_str().into(),
        role: role(member.is_learner),
        client_urls: member.client_ur_ls.clone().into(),
        peer_urls: member.peer_ur_ls.clone().into(),
    });
    Ok(members.collect())
}

fn role(is_learner: bool) -> Role {
    if is_learner { Role::Learner } else { Role::Voter }
}
