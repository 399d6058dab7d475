//! The calls that we answer ourselves: Authenticate and gRPC's health check.
//!
//! Owns: turning a proved password into a sealed session, and saying whether we serve. Must not know how a password
//! is proved. Invariants: an Authenticate is never forwarded as it is; a login always gets a token, also with auth
//! off upstream (a Go client that is told "not enabled" never authenticates again), but such a session proves
//! nothing (rules 11); neither name, password nor token reaches a log, but the session's id.

use std::rc::Rc;
use std::time::SystemTime;

use hyper::body::Incoming;
use prost::Message as _;
use tokio::time::{Instant, timeout_at};

use crate::downstream::session::{Inadmissible, Proof, SealFailure, Session, SessionPeer};
use crate::gateway::access_log::Record;
use crate::gateway::exchange::PATIENCE;
use crate::gateway::pipeline::{Served, collect};
use crate::gateway::{Client, Gateway};
use crate::identity::UserName;
use crate::pb::etcdserverpb::{AuthenticateRequest, AuthenticateResponse, ResponseHeader};
use crate::refusal::Refusal;
use crate::rpc::{canonical, frame, method::Method};
use crate::secret::Secret;
use crate::upstream::credential::LoginFailure;
use crate::upstream::membership::Auth;

/// Proves a password and seals a session for it.
pub async fn authenticate(
    gateway: &Rc<Gateway>,
    client: &Client,
    method: &'static Method,
    body: Incoming,
    deadline: Option<Instant>,
    record: &mut Record,
) -> Result<Served, Refusal> {
    let (framed, _held) = collect(gateway, body).await?;
    let message = frame::unary(&framed).map_err(|fault| fault.refusal(None))?;
    canonical::check(method.body, &message)?;
    let login = AuthenticateRequest::decode(message).map_err(|_| Refusal::not_canonical("not a message"))?;
    let (user, password) = (UserName::from(login.name.as_str()), Secret::new(login.password));
    let peer = SessionPeer::Password { user, password: password.clone() };
    // Neither the log nor the identities in memory take what could not become a session.
    if !peer.fits() {
        return Err(Refusal::AUTH_FAILED);
    }
    let (user, password) = (peer.user(), &password);
    record.user = Some(user.clone());
    // As of now: what is revoked while the password is looked at ends this login too.
    let generation = match gateway.sealer.admit(user) {
        Err(Inadmissible::NotKnown) => return Err(Refusal::NOTHING_SENT),
        // Refused below, in the time that a right password takes.
        Err(Inadmissible::Blocked) => 0,
        Ok(generation) => generation,
    };
    let until = Instant::now() + PATIENCE;
    let until = deadline.map_or(until, |deadline| deadline.min(until));
    let proof = match timeout_at(until, prove(gateway, user, password)).await {
        Ok(proof) => proof?,
        Err(_) if deadline == Some(until) => return Err(Refusal::DEADLINE_EXCEEDED),
        Err(_) => return Err(Refusal::REQUEST_TIMED_OUT),
    };
    if let Err(why) = gateway.sealer.admit(user) {
        tracing::info!(?user, %why, "login refused");
        return Err(match why {
            Inadmissible::Blocked => Refusal::AUTH_FAILED,
            Inadmissible::NotKnown => Refusal::NOTHING_SENT,
        });
    }
    let session = Session::begin(peer, proof, generation, SystemTime::now());
    let sealed = session.and_then(|session| gateway.sealer.seal(&session).map(|token| (session.id, token)));
    let (id, token) = sealed.map_err(|failure| match failure {
        SealFailure::TooLong => Refusal::AUTH_FAILED,
        SealFailure::NotPinned => Refusal::NOTHING_SENT,
        SealFailure::NoRandomness => Refusal::PANICKED,
    })?;
    gateway.metrics.sessions_issued.inc();
    tracing::info!(session = %id, user = record.user.as_ref().map(UserName::as_str), "session issued");
    let answer =
        AuthenticateResponse { header: Some(header(gateway, client)), token: token.expose().clone() };
    Ok(Served::Ours(frame::encode(&answer.encode_to_vec())))
}

/// What a login proves; tried again while no member can tell.
async fn prove(gateway: &Gateway, user: &UserName, password: &Secret<String>) -> Result<Proof, Refusal> {
    loop {
        if gateway.door.members.auth.now() == Auth::Off {
            return Ok(Proof::None);
        }
        let members =
            gateway.door.members.snapshot.load().ready_voters().map(|member| member.id).collect::<Vec<_>>();
        match gateway.door.credentials.verify(user, password, &members).await {
            Ok(_) => return Ok(Proof::Etcd { auth_revision: 0 }),
            Err(LoginFailure::AuthDisabled) => gateway.door.auth_is(Auth::Off),
            Err(LoginFailure::WrongPassword) => return Err(Refusal::AUTH_FAILED),
            Err(LoginFailure::NoPassword) => return Err(Refusal::NO_PASSWORD_USER),
            Err(_) => gateway.door.pause_or_change(std::time::Duration::from_millis(100)).await,
        }
    }
}

/// A header as a member would send it: real ids and term, and a revision that this client may have seen.
fn header(gateway: &Gateway, client: &Client) -> ResponseHeader {
    let members = gateway.door.members.snapshot.load();
    ResponseHeader {
        cluster_id: members.cluster.map_or(0, |id| id.0),
        member_id: members.ready_voters().next().map_or(0, |member| member.id.0),
        revision: client.floor.get().0,
        raft_term: members.term,
    }
}
