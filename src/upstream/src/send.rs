//! The single way to send a request to a member: [`UpstreamClient::send`].
//!
//! Owns: the header fields seen by a member (an allow-list: a client's claims about itself are never
//! forwarded), and the token or certificate of the call's user. Must not know: which calls are worth
//! retrying.
//! Invariants (`docs/decisions.md#d06`, `docs/decisions.md#d09`): the path is the method table's, or proven
//! canonical. A request carries at most one `token`, always Keyward's. A call without a token has no etcd
//! user, even if Keyward's own certificate names a user. The exception is a connection with a user's own
//! certificate: a [`UpstreamHead`] with a certificate goes only on connections showing the same certificate,
//! and no different head goes on such a connection.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{Either, ready};
use futures_util::{FutureExt as _, TryFutureExt as _};
use http::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, TE};
use http::uri::PathAndQuery;
use http::{Method as Verb, Request, Response};
use tokio::time::{Instant, timeout};

use crate::answer::LostReply;
use crate::connection_slots::Seat;
use crate::credentials::{CallCredential, CertificateIdentity, Credentials, LoginFailure, UpstreamIdentity};
use crate::member_connection::{Connection, InFlight, SendError};
use crate::pool::ConnectionPool;
use crate::resume_limiter::ResumeLimiter;
use crate::upstream_request::UpstreamRequestBody;
use crate::waiting_calls::WaitingCalls;
use keyward_access::policy::permit::Permit;
use keyward_base::io::http2_body::Http2Body;
use keyward_cluster::choose::{MemberChooser, MemberComparison, MemberTarget};
use keyward_cluster::membership::{AuthSetting, Member, MembersHandle, Membership, MembershipHint, Role};
use keyward_dial::connect::ConnectError;
use keyward_etcd::identity::{ClusterId, MemberId};
use keyward_etcd::rpc::method::Lane;

/// Client API version sent to etcd. etcd counts clients by version, so the value is constant, never the
/// client's.
const CLIENT_API_VERSION: HeaderValue = HeaderValue::from_static("3.5");
const API_VERSION_NAME: HeaderName = HeaderName::from_static("client-api-version");
const NOT_OUR_CERTIFICATE: HeaderName = HeaderName::from_static("grpcgateway-accept");
const TOKEN: HeaderName = HeaderName::from_static("token");
const TRAILERS: HeaderValue = HeaderValue::from_static("trailers");
const GRPC: HeaderValue = HeaderValue::from_static("application/grpc");

/// Time limit on obtaining a credential, for calls without a shorter deadline: etcd's own limit on a request.
const PROOF: Duration = Duration::from_secs(7);

/// Number of the header fields copied from the client's request; see [`is_forwarded`].
const FORWARDED: usize = 5;

pub use crate::credentials::UpstreamUser;

/// The header of a call to a member, and the user certificate required of its connection.
#[derive(Clone)]
pub struct UpstreamHead {
    /// The header fields, with Keyward's token already set.
    pub fields: HeaderMap,
    certificate: Option<Arc<CertificateIdentity>>,
}

/// Why a call got no answer from a member.
pub enum NoReply {
    /// No byte was sent: the call may go to another member, whatever its method.
    NeverSent(Arc<str>),
    /// No byte was sent, for want of a connection with the user's own certificate. The fault may be the
    /// user's alone.
    NotShown(Arc<str>),
    /// No byte was sent: the member does not accept this certificate of the user.
    NotAccepted(Arc<CertificateIdentity>),
    /// No byte was sent: a limit of Keyward's is reached, and another member would not help.
    NoRoom,
    /// The member may have seen the call. The outcome is unknown.
    Lost(LostReply),
}

/// Sends calls to members; each shard has its own instance.
pub struct UpstreamClient {
    /// The shard's connections.
    pub pool: ConnectionPool,
    /// The published members, and the channel for hints to the members' task.
    pub members: MembersHandle,
    /// Tokens per identity and member, shared by all shards.
    pub credentials: Arc<Credentials>,
    /// Chooses the member of each call.
    pub chooser: MemberChooser,
    /// The shard's streams being resumed.
    pub resumes: ResumeLimiter,
    /// The shard's calls waiting for a member's answer.
    pub waiting_calls: WaitingCalls,
    /// The highest raft term sent in a hint.
    pub term: Cell<u64>,
}

impl UpstreamClient {
    /// Returns the credential of `user` for `member`, within seconds, logging in if needed. Returns
    /// [`CallCredential::Nothing`] for a call without a user, and for a user proved by token while auth is
    /// off.
    ///
    /// # Errors
    /// The login failed; see [`LoginFailure`].
    pub async fn credential_for(
        &self,
        user: &UpstreamUser,
        member: &Member,
    ) -> Result<CallCredential, LoginFailure> {
        let UpstreamUser::User(identity) = user else { return Ok(CallCredential::Nothing) };
        // Resolve once for both checks: a reload may change the user's credential in between.
        let identity = identity.current_identity();
        // A connection's certificate is present whether auth is on or off.
        let takes_token = !matches!(&*identity, UpstreamIdentity::Certificate(_));
        if takes_token && self.members.auth.now() == AuthSetting::Off {
            return Ok(CallCredential::Nothing);
        }
        if member.is_leaderless_voter() {
            identity.adopt_token(member.id);
        }
        let login_member = self.login_member(member);
        let shown = match identity.credential_for(login_member).now_or_never() {
            Some(known) => known,
            // Boxed, so that calls with a known credential do not pay for a larger future.
            None => timeout(PROOF, Box::pin(identity.credential_for(login_member)))
                .await
                .unwrap_or(Err(LoginFailure::NoAnswer)),
        };
        match shown {
            Err(LoginFailure::AuthDisabled) => {
                self.report_auth(AuthSetting::Off);
                Ok(CallCredential::Nothing)
            }
            shown => shown,
        }
    }

    /// Returns the member to log in at for a call to `member`: a voter itself, or the leader or any ready
    /// voter in place of a learner. A learner answers no login, but knows the tokens issued through voters.
    #[must_use]
    pub fn login_member(&self, member: &Member) -> MemberId {
        if member.role == Role::Voter {
            return member.id;
        }
        let members = self.members.snapshot.load();
        let voter = members.leader().or_else(|| members.ready_voters().next());
        voter.map_or(member.id, |voter| voter.id)
    }

    /// Chooses a member for a call wanting `wanted`; members in `tried` come last. Streams being resumed on a
    /// member already count as its load.
    #[must_use]
    pub fn choose(&self, wanted: MemberTarget, tried: &[MemberId]) -> Option<Arc<Member>> {
        self.choose_among(&self.members.snapshot.load(), wanted, tried)
    }

    /// As [`UpstreamClient::choose`], among the members of a given snapshot.
    #[must_use]
    pub fn choose_among(
        &self,
        members: &Membership,
        wanted: MemberTarget,
        tried: &[MemberId],
    ) -> Option<Arc<Member>> {
        let load = |id| self.pool.in_flight(id) + self.resumes.resuming_on(id);
        self.chooser.choose(members, wanted, tried, MemberComparison::Load(&load), Instant::now())
    }

    /// As [`UpstreamClient::choose_among`], for a short call at `now`: by the members' latency and calls in
    /// flight.
    #[must_use]
    pub fn choose_for_call(
        &self,
        members: &Membership,
        wanted: MemberTarget,
        tried: &[MemberId],
        now: Instant,
    ) -> Option<Arc<Member>> {
        self.chooser.choose(members, wanted, tried, MemberComparison::Latency, now)
    }

    /// Adds `failed` to the members tried last. Once every ready member for `wanted` was tried, the list
    /// starts anew.
    pub fn try_last(&self, wanted: MemberTarget, tried: &mut Vec<MemberId>, failed: Option<MemberId>) {
        tried.extend(failed);
        if !MemberChooser::has_another_member(&self.members.snapshot.load(), wanted, tried) {
            tried.clear();
        }
    }

    /// Hints at a leader change: an answer carried a raft term not reported by its member before.
    pub fn report_term(&self, term: u64) {
        if term > self.term.get() {
            self.term.set(term);
            self.members.hints.send(MembershipHint::LeaderMoved { term });
        }
    }

    /// True if the followed cluster differs from `before`: decisions made for the previous cluster must be
    /// made again.
    #[must_use]
    pub fn has_followed(&self, before: Option<ClusterId>) -> bool {
        is_different_cluster(before, self.members.snapshot.load().cluster)
    }

    /// True if each ready member for `wanted` refused the certificate a moment ago: a further attempt would
    /// find the same.
    #[must_use]
    pub fn is_refused_everywhere(&self, wanted: MemberTarget, shown: &CertificateIdentity) -> bool {
        self.pool.is_refused_everywhere(&self.members.snapshot.load(), wanted, shown.showing())
    }

    /// See [`MembersHandle::pause_or_change`].
    pub async fn pause_or_change(&self, pause: Duration) {
        self.members.pause_or_change(pause).await;
    }

    /// See [`MembersHandle::record_auth`].
    pub fn report_auth(&self, auth: AuthSetting) {
        self.members.record_auth(auth);
    }

    /// Sends a request to `member` and waits for the reply's headers. Dropping the future resets the stream.
    ///
    /// # Errors
    /// [`NoReply`] tells if the member may have seen the request.
    pub fn send(
        &self,
        member: &Arc<Member>,
        lane: Lane,
        path: PathAndQuery,
        head: UpstreamHead,
        body: UpstreamRequestBody,
    ) -> impl Future<Output = Result<BegunReply, NoReply>> {
        let UpstreamHead { fields, certificate } = head;
        let unsent = match self.pool.seat_now(member, lane, certificate.as_ref()) {
            None => Err(Box::new((fields, body))),
            Some(seat) => send_on(seat, member, lane, &path, (fields, body)),
        };
        match unsent {
            Ok(sent) => Either::Left(sent),
            // Boxed, so that calls finding an open connection do not pay for a larger future.
            Err(unsent) => {
                Either::Right(Box::pin(self.send_when_connected(member, lane, path, certificate, unsent)))
            }
        }
    }

    /// Waits for a connection, and sends a request that no open connection has taken.
    async fn send_when_connected(
        &self,
        member: &Arc<Member>,
        lane: Lane,
        path: PathAndQuery,
        certificate: Option<Arc<CertificateIdentity>>,
        mut unsent: Box<UnsentRequest>,
    ) -> Result<BegunReply, NoReply> {
        // A pooled connection may be closing: a request handed back unsent goes on a new connection, once.
        for _ in 0..2 {
            let seat = self.pool.seat(member, lane, certificate.as_ref()).await;
            let seat = seat.map_err(|error| never_sent(error, certificate.as_ref()))?;
            match send_on(seat, member, lane, &path, *unsent) {
                Ok(sent) => return sent.await,
                Err(returned) => unsent = returned,
            }
        }
        Err(NoReply::NeverSent("the connection to the member was closing".into()))
    }
}

/// A member's reply whose header has arrived, and the guard that counts the call on its connection.
type BegunReply = (Response<Http2Body>, InFlight);
/// The header and the body of a request that was not sent.
type UnsentRequest = (HeaderMap, UpstreamRequestBody);

/// Sends a request on the connection of `seat` at once; the future waits for the reply's headers.
///
/// # Errors
/// The connection takes no request any more: the request, of which the member saw no part.
fn send_on(
    seat: Seat,
    member: &Member,
    lane: Lane,
    path: &PathAndQuery,
    (fields, body): UnsentRequest,
) -> Result<impl Future<Output = Result<BegunReply, NoReply>> + use<>, Box<UnsentRequest>> {
    let request = request(&seat.connection, path.clone(), fields);
    let in_flight = match lane {
        Lane::Stream => seat.in_flight.with_stream_count(member.load.streams().carry(path.path())),
        Lane::Unary | Lane::Bulk => seat.in_flight.with_busy_count(member.maintenance.count_call()),
    };
    match seat.connection.send(request, body, in_flight) {
        Ok(sent) => Ok(Either::Left(sent.map_err(no_reply))),
        Err(SendError::NeverSent(returned)) => {
            let (head, body) = *returned;
            Err(Box::new((head.into_parts().0.headers, body)))
        }
        Err(failed) => Ok(Either::Right(ready(Err(no_reply(failed))))),
    }
}

/// The failure of a request handed over to a connection.
fn no_reply(failed: SendError) -> NoReply {
    match failed {
        SendError::Refused => NoReply::NeverSent("the member refused the stream".into()),
        SendError::Lost(error) => NoReply::Lost(error.into()),
        SendError::NeverSent(_) => NoReply::NeverSent("the connection to the member was closing".into()),
    }
}

/// True if the clusters `before` and `now` are both known and differ.
#[must_use]
pub fn is_different_cluster(before: Option<ClusterId>, now: Option<ClusterId>) -> bool {
    before.is_some() && now.is_some() && now != before
}

/// Copies the client's header fields used by [`upstream_headers`], for callers keeping the fields.
#[must_use]
pub fn copy_forwarded_fields(client: &HeaderMap) -> HeaderMap {
    let mut headers = HeaderMap::with_capacity(FORWARDED);
    forward(client, &mut headers);
    headers
}

/// True for the header fields copied from the client's request, in addition to Keyward's own fields.
fn is_forwarded(name: &HeaderName) -> bool {
    matches!(name.as_str(), "grpc-timeout" | "hasleader" | "user-agent" | "traceparent" | "tracestate")
}

/// Copies the first value of each forwarded field. A pass over the client's fields costs less than a lookup
/// of each forwarded field.
fn forward(client: &HeaderMap, headers: &mut HeaderMap) {
    let mut last: Option<&HeaderName> = None;
    for (name, value) in client {
        // All values of a field follow each other, with the same `name`.
        let is_first = !last.is_some_and(|last| std::ptr::eq(last, name));
        if is_first && is_forwarded(name) {
            headers.insert(name.clone(), value.clone());
        }
        last = Some(name);
    }
}

/// Builds the header for a member: the allowed fields of the client's header, then Keyward's own. Only a
/// permitted request has a header, so nothing goes upstream without a permit.
#[must_use]
pub fn upstream_headers(client: &HeaderMap, shown: &CallCredential, _permit: Permit) -> UpstreamHead {
    let mut headers = HeaderMap::with_capacity(8);
    headers.insert(CONTENT_TYPE, GRPC);
    headers.insert(TE, TRAILERS);
    forward(client, &mut headers);
    headers.insert(API_VERSION_NAME, CLIENT_API_VERSION);
    let mut certificate = None;
    match shown {
        CallCredential::Token(token) => {
            headers.insert(TOKEN, token.header().clone());
        }
        // If Keyward's own certificate names an etcd user, a call without a token would run as the named
        // user. etcd ignores the certificate for a call with this field, the mark of etcd's JSON gateway
        // (auth/store.go, AuthInfoFromTLS).
        CallCredential::Nothing => {
            headers.insert(NOT_OUR_CERTIFICATE, HeaderValue::from_static("*/*"));
        }
        // The user's own certificate is meant to decide the etcd user.
        CallCredential::Certificate(identity) => certificate = Some(Arc::clone(identity)),
    }
    UpstreamHead { fields: headers, certificate }
}

fn request(connection: &Connection, path: PathAndQuery, headers: HeaderMap) -> Request<()> {
    let mut request = Request::new(());
    *request.method_mut() = Verb::POST;
    *request.uri_mut() = connection.uri(path);
    *request.headers_mut() = headers;
    request
}

fn never_sent(error: ConnectError, shown: Option<&Arc<CertificateIdentity>>) -> NoReply {
    match (error, shown) {
        (ConnectError::NoRoom, _) => NoReply::NoRoom,
        (ConnectError::NotAccepted { .. }, Some(shown)) => NoReply::NotAccepted(Arc::clone(shown)),
        (error @ (ConnectError::Handshake { .. } | ConnectError::NoCertificate(_)), Some(_)) => {
            NoReply::NotShown(error.to_string().into())
        }
        (error, _) => NoReply::NeverSent(error.to_string().into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fields not listed here are not forwarded, whatever their name.
    #[test]
    fn a_member_sees_the_allowed_fields_once_and_nothing_else() {
        let mut client = HeaderMap::new();
        let forwarded = ["grpc-timeout", "hasleader", "user-agent", "traceparent", "tracestate"];
        assert_eq!(forwarded.len(), FORWARDED);
        for value in ["first", "second"] {
            for name in forwarded {
                client.append(name, HeaderValue::from_static(value));
            }
        }
        for name in [
            "token",
            "authorization",
            "cookie",
            "grpcgateway-accept",
            "grpcgateway-authorization",
            "grpc-metadata-token",
            "client-api-version",
            "content-type",
            "te",
            "connection",
            "forwarded",
            "x-anything",
        ] {
            client.append(name, HeaderValue::from_static("the client's"));
        }
        let headers = upstream_headers(&client, &CallCredential::Nothing, Permit::for_own_request()).fields;
        let mut seen: Vec<_> =
            headers.iter().map(|(name, value)| (name.as_str(), value.to_str().unwrap())).collect();
        seen.sort_unstable();
        let expected = [
            ("client-api-version", "3.5"),
            ("content-type", "application/grpc"),
            ("grpc-timeout", "first"),
            // Keyward's value, not the client's: the call has no token.
            ("grpcgateway-accept", "*/*"),
            ("hasleader", "first"),
            ("te", "trailers"),
            ("traceparent", "first"),
            ("tracestate", "first"),
            ("user-agent", "first"),
        ];
        assert_eq!(seen, expected);
    }
}
