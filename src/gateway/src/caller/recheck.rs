//! Deciding again about callers with open streams or waiting calls.
//!
//! Owns: the second decision, from everything behind the first: the session, its line in the users file, the
//! JWT's signature, the rules, the credentials, the blocks. Must not know: the kinds of streams, the times of
//! the decision.
//! Invariants (docs/decisions.md#d16, docs/decisions.md#d29): a stream ends if its caller is another etcd
//! user now, or no user, or has another namespace; any other stream of the same user goes on; while the
//! revocations are unknown, open streams go on and new streams are refused.

use std::rc::Rc;
use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use super::connection_peers::{ConnectionPeers, is_claim};
use super::identities::{OwnCredential, PeerRank, PeerStanding};
use super::ignored_tokens::as_nobody;
use super::{Caller, CallerEvidence, CallerGrounds, CallerIdentification, Identities, deciding_way};
use crate::active_streams::ActiveStream;
use crate::{ClientConnection, Gateway, audited_request};
use keyward_access::policy::permit_set::{Decision, PermitSet};
use keyward_access::policy::shadow_register::DeniedPart;
use keyward_cluster::membership::AuthSetting;
use keyward_config::users::UserLineMark;
use keyward_config::{Identify, PolicyMode};
use keyward_downstream::session::{LoginInadmissible, PeerNamespace, Session, SessionPeer, SessionProof};
use keyward_etcd::identity::Peer;
use keyward_etcd::refusal::{Refusal, RefusalReason};
use keyward_etcd::rpc::method::{Handler, Method};
use keyward_upstream::send::UpstreamUser;

/// JWTs are verified as of a moment before expiry at the latest; timers handle the expiry itself.
const BEFORE_EXPIRY: Duration = Duration::from_millis(1);

impl CallerIdentification {
    /// Decides whether an admitted stream or call may go on.
    ///
    /// # Errors
    /// The status for the client: the answer to the client's next call, or "invalid auth token" if the next
    /// call would go as another user.
    pub fn may_continue(&self, gateway: &Gateway, stream: &ActiveStream) -> Result<(), Refusal> {
        let now = self.recheck_grounds(gateway, stream, stream.caller.grounds.clone())?;
        let permits = Rc::clone(self.permits(&now, &stream.client));
        // In another namespace the same keys are other keys. A client must not resume by itself.
        if stream.permits.now().namespace != permits.namespace {
            return Err(Refusal::OUTSIDE_NAMESPACE);
        }
        decide_again(gateway, stream, &permits)?;
        stream.permits.replace(permits);
        stream.replace_usage(now.usage(gateway, &self.identities.load(), &stream.client));
        stream.set_password_recheck(gateway, now.needs_recheck);
        Ok(())
    }

    /// As [`CallerIdentification::may_continue`], for a session of a user moved into the users file.
    ///
    /// # Errors
    /// As [`CallerIdentification::may_continue`].
    pub fn may_continue_by_file(&self, gateway: &Gateway, stream: &ActiveStream) -> Result<(), Refusal> {
        let Some(session) = stream.caller.session() else { return Ok(()) };
        self.recheck_grounds(gateway, stream, by_file(Rc::clone(session))).map(drop)
    }

    fn recheck_grounds(
        &self,
        gateway: &Gateway,
        stream: &ActiveStream,
        grounds: CallerGrounds,
    ) -> Result<Rc<Caller>, Refusal> {
        let ActiveStream { client, caller, generation, .. } = stream;
        if client.is_dismissed() {
            return Err(Refusal::CERTIFICATE_ENDED);
        }
        let identities = self.identities.load();
        let evidence = grounds.evidence.clone();
        let auth = gateway.upstream.members.auth.now();
        let (grounds, way) = grounds_now(&identities, client, auth, grounds)?;
        let standing = match &evidence {
            CallerEvidence::Session(session) => {
                if !gateway.sealer.is_valid(session) {
                    return Err(invalid_session(gateway, session));
                }
                // etcd may decide about the user again, and the client may log in there. The status makes the
                // client come back with a token to be judged afresh.
                if !is_line_unchanged(gateway, session) || has_left_the_file(gateway, &grounds) {
                    return Err(Refusal::SHUTTING_DOWN.because(RefusalReason::Token));
                }
                of_session(gateway, &identities, client, grounds, session)
            }
            CallerEvidence::Jwt(verified, token) => {
                // etcd's key signed the JWT, and the key belongs to the former cluster.
                if verified.auth_revision.is_some() && gateway.sealer.has_followed() {
                    return Err(Refusal::INVALID_AUTH_TOKEN);
                }
                let when = verified.expires.checked_sub(BEFORE_EXPIRY).unwrap_or(verified.expires);
                let when = when.min(SystemTime::now());
                let good = self.verified.verify(&identities.issuers, token.expose(), when);
                let good = good.map_err(|_bad| Refusal::INVALID_AUTH_TOKEN)?;
                let grounds = match way {
                    Identify::Certificate => grounds,
                    _ => CallerGrounds { peer: good.peer.clone(), connection: None, ..grounds },
                };
                identities.standing(client, grounds, None, OwnCredential::Nothing)
            }
            CallerEvidence::Connection => identities.standing(client, grounds, None, OwnCredential::Nothing),
            CallerEvidence::Ignored => match auth {
                AuthSetting::Off => as_nobody(&identities, client, grounds),
                AuthSetting::Unknown => return Err(Refusal::NOTHING_SENT),
                AuthSetting::On => return Err(Refusal::INVALID_AUTH_TOKEN),
            },
        };
        let now = upstream_caller(gateway, standing)?;
        if now.user != caller.user {
            let nobody = now.user.is_none() && auth != AuthSetting::Off;
            return Err(if nobody { Refusal::USER_EMPTY } else { Refusal::INVALID_AUTH_TOKEN });
        }
        let Some(user) = &now.grounds.etcd_user else { return Ok(now) };
        match gateway.sealer.admit_login(user) {
            Err(LoginInadmissible::Blocked) => Err(Refusal::BLOCKED),
            Ok(is) if generation.is_some_and(|then| then < is) => Err(Refusal::INVALID_AUTH_TOKEN),
            Ok(_) | Err(LoginInadmissible::NotKnown) => Ok(now),
        }
    }

    /// The generation of the caller's etcd user; `None` if the rules name no user for the caller.
    ///
    /// # Errors
    /// The user is blocked, or the revocations are unknown.
    pub fn generation(&self, gateway: &Gateway, caller: &Caller) -> Result<Option<u64>, Refusal> {
        let Some(user) = &caller.grounds.etcd_user else { return Ok(None) };
        gateway.sealer.admit_login(user).map(Some).map_err(|why| match why {
            LoginInadmissible::Blocked => Refusal::BLOCKED,
            LoginInadmissible::NotKnown => Refusal::NOTHING_SENT,
        })
    }
}

/// Decides again on the request of a waiting call or stream, by the caller's permissions after a change. The
/// keys of leases are not looked up again. A request too large to be kept is refused wherever a policy is
/// enforced.
///
/// # Errors
/// The policy refuses the request.
fn decide_again(gateway: &Gateway, stream: &ActiveStream, permits: &Rc<PermitSet>) -> Result<(), Refusal> {
    let Some(request) = &stream.request else { return Ok(()) };
    let Some(message) = request.message() else {
        let is_refused = permits.mode == PolicyMode::Enforce;
        return if is_refused { Err(Refusal::PERMISSION_DENIED) } else { Ok(()) };
    };
    let Decision::Denied(denial) = permits.decide(request.method, message) else { return Ok(()) };
    if permits.enforce(denial).is_err() {
        return Err(Refusal::PERMISSION_DENIED);
    }
    // A change of sessions or users decides again too: a denial counts once for each change of permissions.
    if !stream.permits.now().is_same(permits) {
        gateway.metrics.policy.count_shadow_denied(denial.action.name());
        let part = DeniedPart::Message(message);
        gateway.shadow.note(permits, &request.peer, (request.method, denial), part, Instant::now());
        let request = (request.method, &request.peer, message);
        audited_request::note_open_denial(
            gateway,
            &stream.client,
            &stream.caller,
            request,
            (permits, denial),
        );
    }
    Ok(())
}

/// The grounds of a session whose user has moved into the users file with an unchanged password.
pub(super) fn by_file(session: Rc<Session>) -> CallerGrounds {
    let peer = Peer::File(session.peer.user().clone());
    CallerGrounds::of(peer, CallerEvidence::Session(session))
}

/// The grounds, and the deciding way, by the listener's present ways: replaced rules change the ways.
fn grounds_now(
    identities: &Identities,
    client: &ClientConnection,
    auth: AuthSetting,
    then: CallerGrounds,
) -> Result<(CallerGrounds, Identify), Refusal> {
    let ways = identities.ways(client);
    let kind = match &then.evidence {
        CallerEvidence::Session(_) => Some(Identify::Token),
        CallerEvidence::Jwt(..) => Some(Identify::Jwt),
        CallerEvidence::Connection | CallerEvidence::Ignored => None,
    };
    let way = match (deciding_way(ways, client, kind), &then.evidence) {
        (Ok(way), _) => way,
        // The connection's login was lent to the call, on a listener without tokens.
        (Err(_), CallerEvidence::Session(_)) if client.listener.lend_login_identity => Identify::Token,
        (Err(refusal), _) => return Err(refusal),
    };
    let grounds = match (way, &client.certificate) {
        (Identify::Certificate, Some(certificate)) => CallerGrounds::of(certificate.clone(), then.evidence),
        (Identify::Default, _) if ways.contains(&way) => {
            CallerGrounds::of_listener(ways, client, then.evidence)
        }
        (Identify::Default, _) => return Err(Refusal::USER_EMPTY),
        _ => {
            let claims = match (&then.evidence, &then.peer) {
                (CallerEvidence::Session(session), Peer::Password(_)) => is_claim(session, auth),
                _ => false,
            };
            let connection = claims.then(|| Rc::new(ConnectionPeers::of(ways, client)));
            CallerGrounds { connection, ..CallerGrounds::of(then.peer, then.evidence) }
        }
    };
    Ok((grounds, way))
}

/// The refusal of a session that is not valid any more. A client of a blocked user is told the same as one of
/// a revoked session, and the records tell the two apart.
pub(super) fn invalid_session(gateway: &Gateway, session: &Session) -> Refusal {
    match gateway.sealer.admit_login(session.peer.user()) {
        Err(LoginInadmissible::Blocked) => Refusal::INVALID_AUTH_TOKEN.because(RefusalReason::Blocked),
        Ok(_) | Err(LoginInadmissible::NotKnown) => Refusal::INVALID_AUTH_TOKEN,
    }
}

/// False if the session was proved by a line of the users file and the line is gone or changed, so the
/// password is another (docs/decisions.md#d12).
pub(super) fn is_line_unchanged(gateway: &Gateway, session: &Session) -> bool {
    match session.proof {
        SessionProof::File { line } => gateway.logins.line(session.peer.user()) == Some(UserLineMark(line)),
        SessionProof::None | SessionProof::Etcd { .. } => true,
    }
}

/// The refusal of a session of a line that this replica does not have. While the replicas are of two minds
/// about the line, a stream is told to come back: clientv3 logs in anew for each stream that it opens, and
/// ends a watch for good on an invalid token. A unary call is not: on an invalid token clientv3 logs in anew
/// (docs/decisions.md#d12).
pub(super) fn of_another_line(gateway: &Gateway, method: &Method, session: &Session) -> Refusal {
    let is_stream = matches!(method.handler, Handler::Watch | Handler::KeepAlive | Handler::Observe);
    if is_stream && gateway.logins.is_unsettled(session) {
        return Refusal::SHUTTING_DOWN.because(RefusalReason::Token);
    }
    Refusal::INVALID_AUTH_TOKEN
}

/// True for a peer of the users file without a line there any more.
fn has_left_the_file(gateway: &Gateway, grounds: &CallerGrounds) -> bool {
    matches!(&grounds.peer, Peer::File(user) if gateway.logins.line(user).is_none())
}

/// The peer named by a session.
pub(super) fn peer_of(session: &Session) -> Peer {
    let user = session.peer.user().clone();
    match session.peer.namespace() {
        PeerNamespace::Password => Peer::Password(user),
        PeerNamespace::File => Peer::File(user),
    }
}

/// The rules' decision on a session's peer.
pub(super) fn of_session(
    gateway: &Gateway,
    identities: &Identities,
    client: &ClientConnection,
    grounds: CallerGrounds,
    session: &Session,
) -> PeerStanding {
    // A user moved into the users file belongs to the file; the session's password is no upstream credential.
    let (SessionPeer::Password { user, password }, Peer::Password(_)) = (&session.peer, &grounds.peer) else {
        return identities.standing(client, grounds, None, OwnCredential::Nothing);
    };
    let own = || gateway.upstream.credentials.identity(user, password);
    let proved = matches!(session.proof, SessionProof::Etcd { .. });
    let own_credential = if proved { OwnCredential::Proved(&own) } else { OwnCredential::Unproved(&own) };
    identities.standing(client, grounds, None, own_credential)
}

/// The upstream user of a peer with this standing.
///
/// # Errors
/// The peer may not go upstream.
pub(super) fn upstream_caller(gateway: &Gateway, standing: PeerStanding) -> Result<Rc<Caller>, Refusal> {
    match standing.rank {
        PeerRank::Known(caller) => Ok(caller),
        PeerRank::Unknown | PeerRank::Unproved if gateway.upstream.members.auth.now() == AuthSetting::Off => {
            Ok(Rc::new(Caller::new(UpstreamUser::Nobody, None, standing.grounds)))
        }
        // No member has said yet whether auth is on, and a denial would be final for the client.
        PeerRank::Unknown | PeerRank::Unproved
            if gateway.upstream.members.auth.now() == AuthSetting::Unknown =>
        {
            Err(Refusal::NOTHING_SENT)
        }
        PeerRank::Unproved => Err(Refusal::INVALID_AUTH_TOKEN),
        PeerRank::Unknown | PeerRank::Denied => Err(Refusal::NO_ETCD_USER),
    }
}
