//! The one door to a member: whatever goes upstream goes through [`Door::send`].
//!
//! Owns: the header fields that a member sees (an allow-list: what a client says of itself is never forwarded), the
//! token or certificate of whom the call goes as. Must not know: which calls are worth retrying.
//! Invariants (rules 6, 9): the path is the method table's or one proven canonical; exactly one `token`, ours or none;
//! without one a call is nobody's, whatever our own certificate says, unless it goes on a connection of a user's own
//! certificate: a [`Head`] made for that goes nowhere else, and no other goes there.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use http::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, TE, USER_AGENT};
use http::uri::PathAndQuery;
use http::{Method as Verb, Request, Response};
use hyper::body::Incoming;
use tokio::time::Instant;

use crate::identity::{ClusterId, MemberId};
use crate::rpc::method::Lane;
use crate::upstream::balance::Lingering;
use crate::upstream::choose::{By, Chooser, Wanted};
use crate::upstream::connect::ConnectError;
use crate::upstream::connection::{Connection, InFlight, Outgoing, SendError};
use crate::upstream::credential::{CertificateIdentity, Credentials, Identity, LoginFailure, Shown};
use crate::upstream::membership::{Auth, Hint, Member, MembersHandle, Membership, Role};
use crate::upstream::pool::Pool;
use crate::upstream::resumes::Resumes;

/// The version of the client API that we speak; etcd counts clients by it, so ours is one value, never the client's.
const CLIENT_API_VERSION: HeaderValue = HeaderValue::from_static("3.5");
const API_VERSION_NAME: HeaderName = HeaderName::from_static("client-api-version");
const NOT_OUR_CERTIFICATE: HeaderName = HeaderName::from_static("grpcgateway-accept");
const TOKEN: HeaderName = HeaderName::from_static("token");
const TRAILERS: HeaderValue = HeaderValue::from_static("trailers");
const GRPC: HeaderValue = HeaderValue::from_static("application/grpc");

/// How long whoever has no deadline waits for what proves a user: as long as etcd itself takes over a request.
const PROOF: Duration = Duration::from_secs(7);

/// What crosses from the client's header to the member's, beside what we set ourselves.
const FORWARDED: [HeaderName; 5] = [
    HeaderName::from_static("grpc-timeout"),
    HeaderName::from_static("hasleader"),
    USER_AGENT,
    HeaderName::from_static("traceparent"),
    HeaderName::from_static("tracestate"),
];

pub use crate::upstream::credential::As;

/// The header of a call as a member sees it, and what it may go on.
#[derive(Clone)]
pub struct Head {
    /// The fields. The token's is ours already.
    pub fields: HeaderMap,
    certificate: Option<Arc<CertificateIdentity>>,
}

/// Why a call did not get an answer from a member.
pub enum NoAnswer {
    /// Nothing was sent: safe to go elsewhere, whatever the call.
    NeverSent(Arc<str>),
    /// The same, since there is no connection to it that shows the user's own certificate: that may be the user's trouble alone.
    NotShown(Arc<str>),
    /// Nothing was sent: a limit of ours is reached, and no other member helps.
    NoRoom,
    /// The member may have seen it. The outcome is unknown.
    Lost(Arc<str>),
}

/// The door, one per shard.
pub struct Door {
    /// Connections of this shard.
    pub pool: Pool,
    /// The published members, and the way to tell of what was seen.
    pub members: MembersHandle,
    /// Tokens per identity and member, shared by all shards.
    pub credentials: Arc<Credentials>,
    /// Who is next.
    pub chooser: Chooser,
    /// Streams of this shard that are being resumed.
    pub resumes: Resumes,
    /// Calls of this shard that wait for a member's answer.
    pub lingering: Lingering,
    /// The highest raft term that was hinted at.
    pub term: Cell<u64>,
}

impl Door {
    /// What proves `whom` to `member`, got by logging in if need be, within seconds. Nothing where etcd wants nothing.
    ///
    /// # Errors
    /// The login failed; see [`LoginFailure`].
    pub async fn shown(&self, whom: &As, member: &Member) -> Result<Shown, LoginFailure> {
        let As::User(identity) = whom else { return Ok(Shown::Nothing) };
        // Once for both questions: what proves the user may be another a moment later.
        let identity = identity.now();
        // A connection's certificate is there whether or not auth is on.
        let takes_token = !matches!(&*identity, Identity::Certificate(_));
        if takes_token && self.members.auth.now() == Auth::Off {
            return Ok(Shown::Nothing);
        }
        if member.is_leaderless_voter() {
            identity.adopt_token(member.id);
        }
        let shown = tokio::time::timeout(PROOF, identity.shown(self.prover(member))).await;
        match shown.unwrap_or(Err(LoginFailure::NoAnswer)) {
            Err(LoginFailure::AuthDisabled) => {
                self.auth_is(Auth::Off);
                Ok(Shown::Nothing)
            }
            shown => shown,
        }
    }

    /// The member at which whoever is to be proved to `member` logs in: a learner answers no login, and knows the tokens
    /// that voters have given.
    #[must_use]
    pub fn prover(&self, member: &Member) -> MemberId {
        if member.role == Role::Voter {
            return member.id;
        }
        let members = self.members.snapshot.load();
        let voter = members.leader().or_else(|| members.ready_voters().next());
        voter.map_or(member.id, |voter| voter.id)
    }

    /// A member for a call that wants `wanted`; members in `tried` come last. A stream that is on its way to a member
    /// counts there already.
    #[must_use]
    pub fn choose(&self, wanted: Wanted, tried: &[MemberId]) -> Option<Arc<Member>> {
        self.choose_among(&self.members.snapshot.load(), wanted, tried)
    }

    /// The same of this snapshot.
    #[must_use]
    pub fn choose_among(
        &self,
        members: &Membership,
        wanted: Wanted,
        tried: &[MemberId],
    ) -> Option<Arc<Member>> {
        let load = |id| self.pool.in_flight(id) + self.resumes.coming(id);
        self.chooser.choose(members, wanted, tried, By::Load(&load), Instant::now())
    }

    /// The same for a short call, by how members bear those.
    #[must_use]
    pub fn choose_for_call(
        &self,
        members: &Membership,
        wanted: Wanted,
        tried: &[MemberId],
    ) -> Option<Arc<Member>> {
        self.chooser.choose(members, wanted, tried, By::Conduct, Instant::now())
    }

    /// Whether a ready member is left that is not among `tried`.
    #[must_use]
    pub fn another(&self, wanted: Wanted, tried: &[MemberId]) -> bool {
        Chooser::another(&self.members.snapshot.load(), wanted, tried)
    }

    /// An answer carried a raft term that its member had not told before.
    pub fn term_moved(&self, term: u64) {
        if term > self.term.get() {
            self.term.set(term);
            self.members.hints.send(Hint::LeaderMoved { term });
        }
    }

    /// Whether another cluster is followed by now than `before`: what was decided for that one is to be decided anew.
    #[must_use]
    pub fn has_followed(&self, before: Option<ClusterId>) -> bool {
        is_another(before, self.members.snapshot.load().cluster)
    }

    /// See [`MembersHandle::pause_or_change`].
    pub async fn pause_or_change(&self, pause: Duration) {
        self.members.pause_or_change(pause).await;
    }

    /// See [`MembersHandle::auth_is`].
    pub fn auth_is(&self, auth: Auth) {
        self.members.auth_is(auth);
    }

    /// Sends one request to `member` and waits for the reply's headers. Dropping the future resets the stream.
    ///
    /// # Errors
    /// [`NoAnswer`] says whether the member may have seen the request.
    pub async fn send(
        &self,
        member: &Arc<Member>,
        lane: Lane,
        path: PathAndQuery,
        head: Head,
        body: Outgoing,
    ) -> Result<(Response<Incoming>, InFlight), NoAnswer> {
        let mut body = Some(body);
        let Head { fields, certificate } = head;
        let mut headers = Some(fields);
        // A pooled connection may turn out to be closing: what comes back unsent goes on a new one, once.
        for _ in 0..2 {
            let seat = self.pool.seat(member, lane, certificate.as_ref()).await;
            let seat = seat.map_err(|error| never_sent(error, certificate.is_some()))?;
            let (Some(taken), Some(fields)) = (body.take(), headers.take()) else { break };
            let request = request(&seat.connection, path.clone(), fields, taken);
            let in_flight = match lane {
                Lane::Stream => seat.in_flight.of_stream(member.conduct.streams().carry(path.path())),
                Lane::Unary | Lane::Bulk => seat.in_flight.of_busy(member.rest.begin()),
            };
            match seat.connection.send(request, in_flight).await {
                Ok(answered) => return Ok(answered),
                Err(SendError::Refused) => {
                    return Err(NoAnswer::NeverSent("the member refused the stream".into()));
                }
                Err(SendError::Lost(error)) => return Err(NoAnswer::Lost(error.to_string().into())),
                Err(SendError::NeverSent(unsent)) => {
                    let (head, unsent) = unsent.into_parts();
                    body = Some(unsent);
                    headers = Some(head.headers);
                }
            }
        }
        Err(NoAnswer::NeverSent("the connection to the member was closing".into()))
    }
}

/// Whether another cluster is served `now` than `before`.
#[must_use]
pub fn is_another(before: Option<ClusterId>, now: Option<ClusterId>) -> bool {
    before.is_some() && now.is_some() && now != before
}

/// What of a client's header [`upstream_headers`] looks at: for whoever keeps it.
#[must_use]
pub fn forwarded(client: &HeaderMap) -> HeaderMap {
    let mut headers = HeaderMap::with_capacity(FORWARDED.len());
    forward(client, &mut headers);
    headers
}

fn forward(client: &HeaderMap, headers: &mut HeaderMap) {
    for name in &FORWARDED {
        if let Some(value) = client.get(name) {
            headers.insert(name.clone(), value.clone());
        }
    }
}

/// The header that a member sees: the allowed fields of `client`'s, then ours.
#[must_use]
pub fn upstream_headers(client: &HeaderMap, shown: &Shown) -> Head {
    let mut headers = HeaderMap::with_capacity(8);
    headers.insert(CONTENT_TYPE, GRPC);
    headers.insert(TE, TRAILERS);
    forward(client, &mut headers);
    headers.insert(API_VERSION_NAME, CLIENT_API_VERSION);
    let mut certificate = None;
    match shown {
        Shown::Token(token) => {
            headers.insert(TOKEN, token.header().clone());
        }
        // Where our own certificate names an etcd user, a call without a token would be that user's. A call that came
        // by the JSON gateway is not (auth/store.go, AuthInfoFromTLS), and only this field says that it did.
        Shown::Nothing => {
            headers.insert(NOT_OUR_CERTIFICATE, HeaderValue::from_static("*/*"));
        }
        // There it is meant to be.
        Shown::Certificate(identity) => certificate = Some(Arc::clone(identity)),
    }
    Head { fields: headers, certificate }
}

fn request(
    connection: &Connection,
    path: PathAndQuery,
    headers: HeaderMap,
    body: Outgoing,
) -> Request<Outgoing> {
    let mut request = Request::new(body);
    *request.method_mut() = Verb::POST;
    *request.uri_mut() = connection.uri(path);
    *request.headers_mut() = headers;
    request
}

fn never_sent(error: ConnectError, showing: bool) -> NoAnswer {
    match error {
        ConnectError::NoRoom => NoAnswer::NoRoom,
        error @ (ConnectError::Handshake { .. } | ConnectError::NoCertificate(_)) if showing => {
            NoAnswer::NotShown(error.to_string().into())
        }
        error => NoAnswer::NeverSent(error.to_string().into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is not named here stays where it is, whatever it is called.
    #[test]
    fn a_member_sees_the_allowed_fields_once_and_nothing_else() {
        let mut client = HeaderMap::new();
        for name in FORWARDED {
            client.append(name.clone(), HeaderValue::from_static("first"));
            client.append(name, HeaderValue::from_static("second"));
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
        let headers = upstream_headers(&client, &Shown::Nothing).fields;
        let mut seen: Vec<_> =
            headers.iter().map(|(name, value)| (name.as_str(), value.to_str().unwrap())).collect();
        seen.sort_unstable();
        let expected = [
            ("client-api-version", "3.5"),
            ("content-type", "application/grpc"),
            ("grpc-timeout", "first"),
            // Ours, not the client's: there is no token.
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
