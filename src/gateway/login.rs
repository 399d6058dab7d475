//! Authenticate, which we answer ourselves. Below: `desk` deals with logins, `flights` has those under way, `sources` knows
//! who is asked in which order, `file` is one of them, `limits` counts wrong passwords, `refused` remembers them,
//! `refusal_schedule` says when one is answered.
//!
//! Owns: turning a proved password into a sealed session. Must not know how a password is proved. Invariants: an Authenticate is never forwarded as it is; a login always gets a token, also with auth
//! off upstream (a Go client that is told "not enabled" never authenticates again), but such a session proves
//! nothing (rules 11); neither name, password nor token reaches a log, but the session's id.

pub mod desk;
mod file;
mod flights;
pub mod limits;
mod refusal_schedule;
mod refused;
pub mod sources;

use std::rc::Rc;
use std::time::SystemTime;

use bytes::{Bytes, BytesMut};
use prost::Message as _;
use tokio::time::{Instant, timeout_at};
use zeroize::{Zeroize as _, Zeroizing};

use crate::downstream::requests::RequestBody;
use crate::downstream::session::{Inadmissible, Namespace, Proof, SealFailure, Session, SessionPeer};
use crate::gateway::access_log::Record;
use crate::gateway::exchange::PATIENCE;
use crate::gateway::gathering::collect_of_anybody;
use crate::gateway::login::sources::{Denied, Proved};
use crate::gateway::pipeline::Served;
use crate::gateway::{Client, Gateway};
use crate::identity::UserName;
use crate::pb::etcdserverpb::{AuthenticateRequest, AuthenticateResponse, ResponseHeader};
use crate::refusal::Refusal;
use crate::rpc::{canonical, frame, method::Method};
use crate::secret::Secret;

/// The method's path.
pub const PATH: &str = "/etcdserverpb.Auth/Authenticate";

/// Proves a password and seals a session for it.
pub async fn authenticate(
    gateway: &Rc<Gateway>,
    client: &Client,
    method: &'static Method,
    body: RequestBody,
    deadline: Option<Instant>,
    record: &mut Record,
) -> Result<Served, Refusal> {
    let (framed, _held) = collect_of_anybody(body).await?;
    let (user, password) = login_of(method, framed)?;
    let peer = SessionPeer::Password { user, password: password.clone() };
    // Neither the log nor the identities in memory take what could not become a session.
    if !peer.fits() {
        return Err(Refusal::AUTH_FAILED);
    }
    record.peer = Some(peer.to_string().into());
    record.user = Some(peer.user().clone());
    let moves = gateway.logins.moves();
    // Before the check begins: what changes meanwhile has it proved once more (rules 12).
    let auth_revision = moves.settled();
    if gateway.door.credentials.acting(peer.user()).is_some() {
        moves.want();
    }
    // As of now: what is revoked while the password is looked at ends this login too.
    let generation = match gateway.sealer.admit(peer.user()) {
        Err(Inadmissible::NotKnown) => return Err(Refusal::NOTHING_SENT),
        Err(Inadmissible::Blocked) => None,
        Ok(generation) => Some(generation),
    };
    let until = Instant::now() + PATIENCE;
    let until = deadline.map_or(until, |deadline| deadline.min(until));
    let proving = prove(gateway, client, peer.user(), &password, generation);
    let (proved, generation) = match timeout_at(until, proving).await {
        Ok(looked_at) => looked_at.map_err(refusal)?,
        Err(_) if deadline == Some(until) => return Err(Refusal::DEADLINE_EXCEEDED),
        Err(_) => return Err(Refusal::REQUEST_TIMED_OUT),
    };
    if gateway.sealer.admit(peer.user()).is_err() {
        return Err(Refusal::NOTHING_SENT);
    }
    let (peer, proof) = evidence(peer, proved, auth_revision);
    record.peer = Some(peer.to_string().into());
    record.is_proved = true;
    let session = Session::begin(peer, proof, generation, SystemTime::now());
    let sealed = session.and_then(|session| gateway.sealer.seal(&session).map(|token| (session, token)));
    let (session, token) = sealed.map_err(|failure| match failure {
        SealFailure::TooLong => Refusal::AUTH_FAILED,
        SealFailure::NotPinned => Refusal::NOTHING_SENT,
        SealFailure::NoRandomness => Refusal::PANICKED,
    })?;
    gateway.metrics.sessions_issued.inc();
    if client.listener.lend_login_identity {
        client.remembered.borrow_mut().appeared(&session.peer, token.expose().as_bytes());
    }
    tracing::info!(session = %session.id, user = record.user.as_ref().map(UserName::as_str), "session issued");
    let mut answer =
        AuthenticateResponse { header: Some(header(gateway, client)), token: token.expose().clone() };
    let message = Zeroizing::new(answer.encode_to_vec());
    answer.token.zeroize();
    Ok(Served::Ours(frame::encode(&message)))
}

/// What a body says, which is wiped as far as it is ours.
fn login_of(method: &Method, framed: Bytes) -> Result<(UserName, Secret<String>), Refusal> {
    let framed = Wiped(framed);
    let message = frame::unary(&framed.0).map_err(|fault| fault.refusal(None))?;
    canonical::check(method.body, &message)?;
    let login = AuthenticateRequest::decode(message).map_err(|_| Refusal::not_canonical("not a message"));
    let mut login = login?;
    Ok((UserName::from(login.name.as_str()), Secret::new(std::mem::take(&mut login.password))))
}

/// What the password proves, and the generation of which that is true. None begins with one who is blocked.
async fn prove(
    gateway: &Gateway,
    client: &Client,
    user: &UserName,
    password: &Secret<String>,
    generation: Option<u64>,
) -> Result<(Proved, u64), Denied> {
    let from = client.origin.remote.map(|remote| remote.ip());
    if let Some(generation) = generation {
        let proved = gateway.logins.check(user, password, from).await?;
        if gateway.sealer.admit(user) != Err(Inadmissible::Blocked) {
            return Ok((proved, generation));
        }
    }
    if gateway.log_limiter.may_log() {
        tracing::info!(?user, "login of a user who is blocked");
    }
    Err(gateway.logins.refuse(user, password, from).await)
}

/// Bytes that are wiped when they go, where nobody else holds them: what came in one piece is part of the buffer of its
/// connection, which is written over as it goes on.
struct Wiped(Bytes);

impl Wiped {
    /// What is left.
    fn wipe(&mut self) -> Option<BytesMut> {
        let mut ours = std::mem::take(&mut self.0).try_into_mut().ok()?;
        ours.as_mut().zeroize();
        Some(ours)
    }
}

impl Drop for Wiped {
    fn drop(&mut self) {
        drop(self.wipe());
    }
}

/// Who a session speaks for, and by what right. The password is carried only where etcd is to be shown it.
fn evidence(peer: SessionPeer, proved: Proved, auth_revision: u64) -> (SessionPeer, Proof) {
    match proved {
        Proved::Etcd => (peer, Proof::Etcd { auth_revision }),
        Proved::Nothing => (peer, Proof::None),
        Proved::File(line) => {
            let user = peer.user().clone();
            (SessionPeer::Known { namespace: Namespace::File, user }, Proof::File { line: line.0 })
        }
    }
}

/// What a client is told: etcd's words.
fn refusal(denied: Denied) -> Refusal {
    match denied {
        Denied::WrongPassword => Refusal::AUTH_FAILED,
        Denied::NoPassword => Refusal::NO_PASSWORD_USER,
        Denied::Limited => Refusal::TOO_MANY_REQUESTS,
        Denied::Untold => Refusal::REQUEST_TIMED_OUT,
    }
}

/// A header as a member would send it: real ids and term, and a revision that this client may have seen.
fn header(gateway: &Gateway, client: &Client) -> ResponseHeader {
    let members = gateway.door.members.snapshot.load();
    ResponseHeader {
        cluster_id: members.cluster.map_or(0, |id| id.0),
        member_id: members
            .ready_voters()
            .chain(members.leaderless_voters())
            .next()
            .map_or(0, |member| member.id.0),
        revision: client.floor.revision().0,
        raft_term: members.term,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nobody_else_holds_is_wiped() {
        let mut ours = Wiped(Bytes::from(b"hunter2".to_vec()));
        assert_eq!(ours.wipe().as_deref(), Some(&[0; 7][..]));
        let theirs = Bytes::from(b"hunter2".to_vec());
        let mut shared = Wiped(theirs.clone());
        assert_eq!(shared.wipe(), None);
        assert_eq!(theirs, "hunter2");
    }
}
