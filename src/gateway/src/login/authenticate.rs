//! The Authenticate RPC, answered by Keyward itself.
//!
//! Owns: turning a proved password into a sealed session. Must not know: how a password is proved.
//! Invariants: an Authenticate never goes upstream unchanged; a login gets a token even with auth off
//! upstream, since a Go client told "not enabled" never authenticates again, but the session then proves
//! nothing (docs/decisions.md#d11); neither a password nor a token reaches a log; the session's id does.

use std::time::SystemTime;

use bytes::{Bytes, BytesMut};
use prost::Message as _;
use tokio::time::timeout;
use zeroize::{Zeroize as _, Zeroizing};

use crate::access_log::AccessRecord;
use crate::audited_request;
use crate::call::Call;
use crate::login::password_sources::LoginDenial;
use crate::pipeline_result::PipelineResult;
use crate::request_body::collect_of_anybody;
use crate::retries::PATIENCE;
use crate::{ClientConnection, Gateway};
use keyward_base::secret::Secret;
use keyward_config::Identify;
use keyward_downstream::request_messages::RequestBody;
use keyward_downstream::session::{
    LoginInadmissible, PeerNamespace, SealFailure, Session, SessionPeer, SessionProof,
};
use keyward_etcd::identity::UserName;
use keyward_etcd::pb::etcdserverpb::{AuthenticateRequest, AuthenticateResponse, ResponseHeader};
use keyward_etcd::refusal::{Refusal, RefusalReason};
use keyward_etcd::rpc::{canonical, frame, method::Method};
use keyward_upstream::credentials::{LoginProof, PasswordRefusal};

/// Checks the password and seals a session.
///
/// # Errors
/// The password is wrong, or unchecked, or this listener accepts no session tokens.
pub async fn serve(call: &Call<'_>, body: RequestBody) -> Result<PipelineResult, Refusal> {
    // Where no session token is accepted, a login would be useless: no password is checked.
    if !call.gateway.callers.may_identify_by(call.client, Identify::Token) {
        return Err(Refusal::AUTH_NOT_ENABLED);
    }
    authenticate(call, body).await.map(PipelineResult::Ours)
}

async fn authenticate(call: &Call<'_>, body: RequestBody) -> Result<Bytes, Refusal> {
    let (gateway, client, record) = (call.gateway, call.client, &call.record);
    let (framed, _held) = collect_of_anybody(body).await?;
    let (user, password) = login_of(call.method, framed)?;
    let peer = SessionPeer::Password { user, password: password.clone() };
    // A peer too long for a session stays out of the log and of the identities in memory.
    if !peer.fits() {
        return Err(Refusal::AUTH_FAILED);
    }
    record.note_peer(peer.to_string().into());
    record.note_user(Some(peer.user().clone()), false);
    if let Some(waiting) = audited_request::begin(call, call.method.effect, None) {
        waiting.await?;
    }
    let tracker = gateway.logins.auth_revision();
    // Read before the check: if users or roles change during the check, the session is proved again
    // (docs/decisions.md#d12).
    let auth_revision = tracker.settled();
    if gateway.upstream.credentials.act_as(peer.user()).is_some() {
        tracker.request();
    }
    // Read before the check: a revocation during the check ends this login too.
    let generation = match gateway.sealer.admit_login(peer.user()) {
        Err(LoginInadmissible::NotKnown) => return Err(Refusal::NOTHING_SENT),
        Err(LoginInadmissible::Blocked) => None,
        Ok(generation) => Some(generation),
    };
    let proof = prove(gateway, (client, record), peer.user(), &password, generation);
    let checked = timeout(PATIENCE, proof).await.map_err(|_| Refusal::REQUEST_TIMED_OUT)?;
    let (proved, generation) = checked?;
    if gateway.sealer.admit_login(peer.user()).is_err() {
        return Err(Refusal::NOTHING_SENT);
    }
    let (peer, proof) = evidence(peer, proved, auth_revision);
    record.note_peer(peer.to_string().into());
    record.note_user(Some(peer.user().clone()), true);
    let session = Session::begin(peer, proof, generation, SystemTime::now());
    let sealed = session.and_then(|session| gateway.sealer.seal(&session).map(|token| (session, token)));
    let (session, token) = sealed.map_err(|failure| match failure {
        SealFailure::TooLong => Refusal::AUTH_FAILED,
        SealFailure::NotPinned => Refusal::NOTHING_SENT,
        SealFailure::NoRandomness => Refusal::PANICKED,
    })?;
    gateway.metrics.sessions_issued.inc();
    if client.listener.lend_login_identity {
        client.remembered.borrow_mut().note_peer(&session.peer, token.expose().as_bytes());
    }
    tracing::info!(
        session = %session.id,
        user = session.peer.user().as_str(),
        "session issued"
    );
    let mut answer =
        AuthenticateResponse { header: Some(header(gateway, client)), token: token.expose().clone() };
    let message = Zeroizing::new(answer.encode_to_vec());
    answer.token.zeroize();
    Ok(frame::encode(&message))
}

/// Decodes the login and wipes the request body, if no other handle shares the buffer.
fn login_of(method: &Method, framed: Bytes) -> Result<(UserName, Secret<String>), Refusal> {
    let framed = WipedBytes(framed);
    let message = frame::unary(&framed.0).map_err(|fault| fault.refusal(None))?;
    canonical::check(method.body, &message)?;
    let login = AuthenticateRequest::decode(message).map_err(|_| Refusal::not_canonical("not a message"));
    let mut login = login?;
    Ok((UserName::from(login.name.as_str()), Secret::new(std::mem::take(&mut login.password))))
}

/// Checks the password. Returns the proof and the user's generation as of the proof. `generation` is `None`
/// for a blocked user.
async fn prove(
    gateway: &Gateway,
    (client, record): (&ClientConnection, &AccessRecord),
    user: &UserName,
    password: &Secret<String>,
    generation: Option<u64>,
) -> Result<(LoginProof, u64), Refusal> {
    let from = client.origin.remote.map(|remote| remote.ip());
    if let Some(generation) = generation {
        let held = |denied| record.note_held_refusal(refusal(denied).reason());
        let proved = gateway.logins.check(user, password, from, &held).await.map_err(refusal)?;
        if gateway.sealer.admit_login(user) != Err(LoginInadmissible::Blocked) {
            return Ok((proved, generation));
        }
    }
    client.origin.figures.note_blocked_login(user);
    if gateway.log_limiter.may_log() {
        tracing::info!(%user, "login of a blocked user refused");
    }
    // The client is told what it would be told of a wrong password; the records tell the two apart.
    let held = |denied| record.note_held_refusal(refusal_of_blocked(denied).reason());
    Err(refusal_of_blocked(gateway.logins.refuse(user, password, from, &held).await))
}

/// Bytes to be wiped on drop, if no other handle shares the buffer. A body received in a single piece is part
/// of the connection's read buffer; later reads overwrite that part.
struct WipedBytes(Bytes);

impl WipedBytes {
    /// Wipes the bytes and returns the wiped buffer; `None` if the buffer is shared.
    fn wipe(&mut self) -> Option<BytesMut> {
        let mut ours = std::mem::take(&mut self.0).try_into_mut().ok()?;
        ours.as_mut().zeroize();
        Some(ours)
    }
}

impl Drop for WipedBytes {
    fn drop(&mut self) {
        drop(self.wipe());
    }
}

/// The peer and the proof of a session. The session carries the password only if etcd must see the password
/// later.
fn evidence(peer: SessionPeer, proved: LoginProof, auth_revision: u64) -> (SessionPeer, SessionProof) {
    match proved {
        LoginProof::Etcd => (peer, SessionProof::Etcd { auth_revision }),
        LoginProof::Nothing => (peer, SessionProof::None),
        LoginProof::File(line) => {
            let user = peer.user().clone();
            (SessionPeer::Known { namespace: PeerNamespace::File, user }, SessionProof::File { line: line.0 })
        }
    }
}

/// The client's status, in etcd's words.
fn refusal(denied: LoginDenial) -> Refusal {
    match denied {
        LoginDenial::Refused(PasswordRefusal::WrongPassword) => Refusal::AUTH_FAILED,
        LoginDenial::Refused(PasswordRefusal::NoPassword) => Refusal::NO_PASSWORD_USER,
        LoginDenial::Limited => Refusal::TOO_MANY_REQUESTS,
        LoginDenial::Untold => Refusal::REQUEST_TIMED_OUT,
    }
}

/// As [`refusal`], of a blocked user: the client is told the same.
fn refusal_of_blocked(denied: LoginDenial) -> Refusal {
    let is_judged = matches!(denied, LoginDenial::Refused(_));
    let refusal = refusal(denied);
    if is_judged { refusal.because(RefusalReason::Blocked) } else { refusal }
}

/// A response header like a member's: real ids and term, and the highest revision already shown on this
/// connection.
fn header(gateway: &Gateway, client: &ClientConnection) -> ResponseHeader {
    let members = gateway.upstream.members.snapshot.load();
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
        let mut ours = WipedBytes(Bytes::from(b"hunter2".to_vec()));
        assert_eq!(ours.wipe().as_deref(), Some(&[0; 7][..]));
        let theirs = Bytes::from(b"hunter2".to_vec());
        let mut shared = WipedBytes(theirs.clone());
        assert_eq!(shared.wipe(), None);
        assert_eq!(theirs, "hunter2");
    }
}
