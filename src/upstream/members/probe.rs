//! Asking one address who is there: Status, and where that is refused what else tells it.
//!
//! Owns: the calls of a probe, its own login (so that finding members depends on nothing that depends on members),
//! what etcd's refusals mean. Must not know: other addresses, what follows from an answer.
//! Invariants: a token goes only where the call without one was refused, and only after this address gave it; a
//! refused password is not tried again for half a minute; in plaintext a password goes only where the cluster that is served has
//! named itself; a probe never writes. Status is asked only of a member that has just said that it is in its own member list: one
//! that was removed panics at it (`failed to find local ID`, 3.4 to 3.7) in the second before it ends, at MemberList none does.

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

use crate::config::{Endpoint, Login};
use crate::identity::{ClusterId, MemberId};
use crate::pb::etcdserverpb::auth_client::AuthClient;
use crate::pb::etcdserverpb::{AuthenticateRequest, MemberListResponse, ResponseHeader};
use crate::upstream::connect::{ConnectError, Connector};
use crate::upstream::members::census::{Answer, Listed, Sight, Source};
use crate::upstream::members::metrics_page::{self, Page};
use crate::upstream::members::pace::LEAST;
use crate::upstream::membership::{Auth, Role};
use calls::{
    Heard, header_of_a_watch, is_in_its_list, is_refused_login, listed, member_list, member_list_with_leader,
    peek, status, told_by_list, told_by_status,
};

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
    verified: Verified,
    login: ProbeLogin,
    /// The login that the rest is about.
    user: Option<Arc<Login>>,
    token: Option<AsciiMetadataValue>,
    /// The connection over which it came.
    token_of: u32,
    no_login_before: Option<Instant>,
    page: Option<Read>,
    named: Option<Named>,
    /// What this probe shall ask, and within which limits.
    want: Want,
    /// What the fastest call of this probe took that was answered.
    took: Option<Duration>,
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

/// Whether a TLS handshake has shown that a member is at the other end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verified {
    /// By an authority of `cluster.tls.ca`, or a pinned fingerprint.
    Yes,
    /// Plaintext, or `cluster.tls.insecure_skip_verify`.
    No,
}

/// What a probe shall ask beyond who is there, and how.
#[derive(Clone, Copy, Debug)]
pub(super) struct Want {
    pub(super) list: bool,
    /// Whether auth is on; with what is believed so far.
    pub(super) auth: Option<Auth>,
    /// A new leader is suspected: nothing remembered counts.
    pub(super) fresh: bool,
    /// The member here is in no list of the cluster: it may be about to learn that it was removed, and is not asked for its Status.
    pub(super) unlisted: bool,
    /// The member was a learner at its last probe: it is asked for Status alone, since a learner serves no member list.
    pub(super) learner: bool,
    /// How long one call may take.
    pub(super) limit: Duration,
    /// The cluster that is served.
    pub(super) pinned: Option<ClusterId>,
    /// How we came to the address.
    pub(super) source: Source,
}

impl Default for Want {
    fn default() -> Self {
        Self {
            list: false,
            auth: None,
            fresh: false,
            unlisted: false,
            learner: false,
            limit: LEAST,
            pinned: None,
            source: Source::Listed,
        }
    }
}

/// What a probe told.
#[derive(Debug)]
pub(super) struct Report {
    pub(super) told: Result<Told, Silence>,
    /// `None` where it was not asked for or not answered.
    pub(super) list: Option<Result<Vec<Listed>, Refusal>>,
    pub(super) auth: Option<Auth>,
    pub(super) login_refused: bool,
    /// Who is in the member's own list, wherever it told one.
    pub(super) ids: Option<BTreeSet<MemberId>>,
    /// What its fastest call took that was answered.
    pub(super) took: Option<Duration>,
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
    /// The member is not in its own member list: it was removed, and ends within a second.
    Removed,
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
        (identity, verified): (Identity, Verified),
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
            page: None,
            named: None,
            want: Want::default(),
            took: None,
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
        (self.want, self.took) = (want, None);
        self.follow_login();
        self.follow_connection();
        let mut login_refused = false;
        let own_list = if want.learner {
            Err(Refusal::Learner)
        } else {
            self.as_user(&mut login_refused, member_list).await
        };
        let told = self.told(&own_list, &mut login_refused).await;
        let ids =
            own_list.as_ref().ok().map(|list| list.members.iter().map(|one| MemberId(one.id)).collect());
        let mut report = Report { told, list: None, auth: None, login_refused, ids, took: None };
        if report.told.is_ok() {
            if want.list {
                report.list = Some(own_list.and_then(|list| listed(&list)));
            }
            if let Some(believed) = want.auth {
                report.auth = self.auth(believed).await;
            }
        }
        report.took = self.took;
        (self, report)
    }

    /// Who is there, after its own member list or what was said instead. Wherever a version refuses the list to a user it refuses
    /// Status too.
    async fn told(
        &mut self,
        own_list: &Result<MemberListResponse, Refusal>,
        login_refused: &mut bool,
    ) -> Result<Told, Silence> {
        match own_list {
            Ok(list) if !is_in_its_list(list) => return Err(Silence::Removed),
            Ok(list) if self.want.unlisted => {
                let answer = told_by_list(list).ok_or(Silence::Gone)?;
                return Ok(Told { answer, makeshift: false });
            }
            // A learner serves no list, and says by that that it is one.
            Ok(_) | Err(Refusal::Learner) => {}
            Err(Refusal::Silent(silence)) => return Err(*silence),
            Err(Refusal::NoUser | Refusal::Denied | Refusal::NoLeader) => {
                return self.told_without_status().await;
            }
        }
        let began = Instant::now();
        match self.as_user(login_refused, status).await {
            Ok(status) => told_by_status(&status, began.elapsed())
                .map(|answer| Told { answer, makeshift: false })
                .ok_or(Silence::Gone),
            Err(Refusal::Silent(silence)) => Err(silence),
            Err(_) => self.told_without_status().await,
        }
    }

    async fn told_without_status(&mut self) -> Result<Told, Silence> {
        let answer = self.makeshift(self.want.fresh).await?;
        Ok(Told { answer, makeshift: true })
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
        let mut result = self.limited(call(self.channel.clone(), self.token.clone())).await;
        if let Err(refused @ (Heard::BadToken | Heard::NoUser)) = result {
            self.token = None;
            if self.may_send_password().await {
                *login_refused |= self.log_in().await;
            }
            // A bad token may be worse than none: where auth was turned off meanwhile.
            if self.token.is_some() || refused == Heard::BadToken {
                result = self.limited(call(self.channel.clone(), self.token.clone())).await;
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

    /// The call's answer within the limit, whose time is noted.
    async fn limited<T>(
        &mut self,
        call: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<T, Heard> {
        let began = Instant::now();
        let result = calls::limited(self.want.limit, call).await;
        if !matches!(result, Err(Heard::Gone | Heard::Late)) {
            let took = began.elapsed();
            self.took = Some(self.took.map_or(took, |before| before.min(took)));
        }
        result
    }

    /// Whether the probing user's password may go to this address. A verified handshake shows a member. Without one anybody may
    /// answer, so that whoever is there must have named the cluster that is served, which needs no user. Where that cannot be had, an
    /// endpoint of the configuration is the operator's word, and an address that others told is not.
    async fn may_send_password(&mut self) -> bool {
        if self.verified == Verified::Yes || self.user.is_none() {
            return true;
        }
        let named = self.named().await.map(|(_, cluster)| cluster);
        let may = may_send_password(named, self.want.pinned, self.want.source);
        if !may {
            tracing::debug!(
                endpoint = %self.endpoint, ?named,
                "the password of cluster.probe is not sent: nothing shows that a member of the cluster is here"
            );
        }
        may
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
            let fetched = timeout(self.want.limit, metrics_page::fetch(&self.http1, &self.endpoint, self.at))
                .await
                .ok()
                .flatten();
            self.page = match fetched {
                Some(page) => Some(Read { at: now, term, page }),
                None => self.page.take().filter(|read| now < read.at + PAGE_KEPT),
            };
        }
        let page = self.page.as_ref().map(|read| read.page);
        let named = match &header {
            Some(header) => Some((MemberId(header.member_id), ClusterId(header.cluster_id))),
            // One that only its page tells of.
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
    /// process; where it was not told, again when a metrics page would be. A known learner is not asked: it tells nobody.
    async fn named(&mut self) -> Option<(MemberId, ClusterId)> {
        if self.want.learner {
            return None;
        }
        let (now, of) = (Instant::now(), self.dialled.times.load(Ordering::Relaxed));
        let good = |named: &&Named| named.of == of && (named.who.is_some() || now < named.at + PAGE_AGE);
        if let Some(named) = self.named.as_ref().filter(good) {
            return named.who;
        }
        let header = timeout(self.want.limit, header_of_a_watch(self.channel.clone())).await.ok().flatten();
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
        match self.limited(member_list_with_leader(self.channel.clone(), self.token.clone())).await {
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
        let seems = match calls::limited(self.want.limit, peek(self.channel.clone())).await {
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
        match timeout(self.want.limit, client.authenticate(request)).await {
            Ok(Ok(_)) => Some(Auth::On),
            Ok(Err(status)) if status.message() == "etcdserver: authentication is not enabled" => {
                Some(Auth::Off)
            }
            Ok(Err(status)) if is_refused_login(&status) => Some(Auth::On),
            Ok(Err(_)) | Err(_) => None,
        }
    }
}

/// Whether a password may go, unverified, to an address that named this cluster.
fn may_send_password(named: Option<ClusterId>, pinned: Option<ClusterId>, source: Source) -> bool {
    match (named, pinned) {
        (Some(named), Some(pinned)) => named == pinned,
        (Some(_) | None, None) | (None, Some(_)) => source == Source::Configured,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
                may_send_password(named, pinned, Source::Configured),
                configured,
                "{named:?} {pinned:?}"
            );
            assert_eq!(may_send_password(named, pinned, Source::Listed), listed, "{named:?} {pinned:?}");
        }
    }
}
