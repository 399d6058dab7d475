//! Identification: from a request's token, certificate or listener to the etcd user of the upstream call.
//!
//! Owns: the decision. Must not know: how tokens are sealed, how certificates are verified, the content of a
//! call.
//! Invariants (docs/decisions.md#d09, docs/decisions.md#d14): of the ways accepted by the listener, the first
//! way shown by the request decides; a bad credential is refused and never falls back to another way, unless
//! auth is off upstream (`ignored`); a peer without an etcd user sends nothing upstream, unless auth is off
//! upstream; replaced rules decide no later call; no peer may act as a blocked user; the rules of the policy
//! see the proved peers of a call, also where another peer is mapped to the etcd user.

mod connection_callers;
mod connection_peers;
mod etcd_tokens;
mod identities;
mod ignored_tokens;
mod recheck;

use std::cell::OnceCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use arc_swap::Guard;
use http::HeaderMap;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout_at};

use crate::access_log::AccessRecord;
use crate::login::password_sources::LoginDenial;
use crate::retries::PATIENCE;
use crate::{ClientConnection, Gateway, expiry_deadline};
use keyward_access::policy::compiled::{ClaimedLogin, PolicySubject};
use keyward_access::policy::permit_set::PermitSet;
use keyward_access::usage::caller_usage::CallerUsage;
use keyward_access::usage::register::LimitingRoles;
use keyward_base::published::Published;
use keyward_base::secret::Secret;
use keyward_cluster::membership::AuthSetting;
use keyward_config::Identify;
use keyward_config::jwt::VerifiedJwt;
use keyward_downstream::session::{OpenFailure, OpenedSessions, PresentedToken, Sealer, Session};
use keyward_downstream::verified_jwts::VerifiedJwts;
use keyward_etcd::identity::{Peer, UserName};
use keyward_etcd::refusal::{Code, Refusal, RefusalReason};
use keyward_etcd::rpc::method::Method;
use keyward_etcd::rpc::namespace::Namespace;
use keyward_upstream::credentials::{LoginProof, TokenUseGuard};
use keyward_upstream::send::UpstreamUser;

use connection_peers::{ConnectionPeers, is_claim};
use identities::{OwnCredential, PeerStanding};
use keyward_base::wall_deadline::WallDeadline;

pub use connection_callers::ConnectionCallers;
pub use identities::Identities;

/// Opened sessions cached per shard, of some 500 bytes each.
const OPENED_SESSIONS: usize = 8192;
/// Pause before a caller is decided again while rules and users file are being replaced.
const RELOAD_PAUSE: Duration = Duration::from_millis(5);
/// Verified JWTs cached per shard, of some 2 KiB each.
const VERIFIED_JWTS: usize = 4096;

/// An identified peer.
#[derive(Clone)]
pub struct Caller {
    /// The upstream user, with the credential.
    pub upstream_user: UpstreamUser,
    /// The upstream user's name, for the access record.
    pub user: Option<UserName>,
    /// Time of the proof's expiry, if the caller's streams and calls end with the proof.
    pub expires_at: Option<WallDeadline>,
    /// True if the peer's session password was accepted once and the call goes upstream with another
    /// credential, so etcd does not see the session's password any more.
    pub needs_recheck: bool,
    /// The caller's permissions, found at first use.
    permits: OnceCell<Rc<PermitSet>>,
    /// The caller's limits, found at first use; `None` without any limit.
    usage: OnceCell<Option<Rc<CallerUsage>>>,
    /// The basis of the decision: when void, the caller's streams and calls end.
    grounds: CallerGrounds,
}

/// The peer, and the evidence shown.
#[derive(Clone)]
struct CallerGrounds {
    /// The peer that the rules map to an etcd user.
    peer: Peer,
    /// The peers proved by the connection, where `peer` is not proved, or is not all that is proved.
    connection: Option<Rc<ConnectionPeers>>,
    /// The etcd user that the rules name for the peer, also if the call goes upstream without a user.
    etcd_user: Option<UserName>,
    evidence: CallerEvidence,
}

impl CallerGrounds {
    /// The grounds of a peer that is proved, and is all that is proved.
    fn of(peer: Peer, evidence: CallerEvidence) -> Self {
        Self { peer, connection: None, etcd_user: None, evidence }
    }

    /// The grounds of a client without a credential that a way of identification takes.
    fn of_listener(ways: &[Identify], client: &ClientConnection, evidence: CallerEvidence) -> Self {
        let peer = Peer::Listener(Arc::clone(&client.listener.name));
        let connection = ConnectionPeers::beside_listener(ways, client).map(Rc::new);
        Self { connection, ..Self::of(peer, evidence) }
    }

    /// The peer whose bindings, limits and name the caller has: a proved peer.
    fn proved_peer(&self) -> &Peer {
        self.connection.as_ref().map_or(&self.peer, |connection| &connection.peer)
    }

    /// The login that nothing proved, if the caller showed one.
    fn claimed(&self) -> Option<&Peer> {
        let is_session = matches!(self.evidence, CallerEvidence::Session(_));
        (is_session && self.connection.is_some()).then_some(&self.peer)
    }
}

/// The evidence shown by a request, after opening or verification.
#[derive(Clone)]
enum CallerEvidence {
    /// A session token.
    Session(Rc<Session>),
    /// A JWT: the claims, and the token itself for verification with the issuer's later keys.
    Jwt(Rc<VerifiedJwt>, Rc<Secret<Vec<u8>>>),
    /// The connection alone: a client certificate, or the listener.
    Connection,
    /// The connection, beside a token ignored because auth is off.
    Ignored,
}

impl Caller {
    fn new(upstream_user: UpstreamUser, expires_at: Option<WallDeadline>, grounds: CallerGrounds) -> Self {
        let user = match &upstream_user {
            UpstreamUser::Nobody => None,
            UpstreamUser::User(identity) => Some(identity.user().clone()),
        };
        let (permits, usage) = (OnceCell::new(), OnceCell::new());
        Self { upstream_user, user, expires_at, needs_recheck: false, permits, usage, grounds }
    }

    /// The caller's permissions under the rules by which the caller was identified.
    #[must_use]
    pub fn permits(&self, identities: &Identities, client: &ClientConnection) -> &Rc<PermitSet> {
        self.permits.get_or_init(|| {
            let CallerGrounds { connection, etcd_user, .. } = &self.grounds;
            let etcd_user = etcd_user.as_ref().map(UserName::as_str);
            let claimed = self.grounds.claimed().map(|peer| ClaimedLogin { peer, etcd_user });
            Rc::new(identities.policy.permits(PolicySubject {
                peer: self.grounds.proved_peer(),
                also: connection.as_ref().and_then(|connection| connection.also.as_ref()),
                claimed,
                etcd_user: if claimed.is_some() { None } else { etcd_user },
                address: client.origin.remote.map(|remote| remote.ip()),
                listener: &client.listener.name,
            }))
        })
    }

    /// The caller's limits under the rules by which the caller was identified; `None` without any limit.
    #[must_use]
    pub fn usage(
        &self,
        gateway: &Gateway,
        identities: &Identities,
        client: &ClientConnection,
    ) -> Option<&Rc<CallerUsage>> {
        let usage = self.usage.get_or_init(|| {
            let permits = self.permits(identities, client);
            let roles = LimitingRoles { own: &permits.roles, claimed: &permits.claimed_roles };
            let (settings, document) = (identities.policy.settings(), identities.policy.document());
            let (peer, listener) = (self.grounds.proved_peer(), &client.listener.name);
            gateway.usage.usage_of(settings, document, peer, roles, listener)
        });
        usage.as_ref()
    }

    /// The caller's namespace, if any, after the first use of the caller's permissions.
    #[must_use]
    pub fn namespace(&self) -> Option<&Arc<Namespace>> {
        self.permits.get()?.namespace.namespace()
    }

    /// The caller's session, if identified by a session token.
    #[must_use]
    pub fn session(&self) -> Option<&Rc<Session>> {
        match &self.grounds.evidence {
            CallerEvidence::Session(session) => Some(session),
            CallerEvidence::Jwt(..) | CallerEvidence::Connection | CallerEvidence::Ignored => None,
        }
    }

    /// True if a revocation can be about the caller: of its session, or of its etcd user.
    #[must_use]
    pub fn is_revocable(&self) -> bool {
        self.grounds.etcd_user.is_some() || self.session().is_some()
    }

    /// Keeps the credential fresh until dropped: for streams and blocking calls.
    #[must_use]
    pub fn in_use(&self) -> Option<TokenUseGuard> {
        match &self.upstream_user {
            UpstreamUser::Nobody => None,
            UpstreamUser::User(identity) => identity.keep_alive(),
        }
    }
}

/// Identification on a shard, with caches of opened sessions and verified JWTs.
pub struct CallerIdentification {
    opened: OpenedSessions,
    verified: VerifiedJwts,
    identities: Arc<Published<Identities>>,
}

impl CallerIdentification {
    /// Starts with empty caches.
    #[must_use]
    pub fn new(sealer: Arc<Sealer>, identities: Arc<Published<Identities>>) -> Self {
        let opened = OpenedSessions::new(sealer, OPENED_SESSIONS);
        Self { opened, verified: VerifiedJwts::new(VERIFIED_JWTS), identities }
    }

    /// The permissions of a caller under the current rules.
    #[must_use]
    pub fn permits<'c>(&self, caller: &'c Caller, client: &ClientConnection) -> &'c Rc<PermitSet> {
        caller.permits(&self.identities.load(), client)
    }

    /// Identifies the caller of a call with `headers` under the rules `identities`, and notes the peer in the
    /// call's record.
    ///
    /// # Errors
    /// The credential is bad, with the same answer for every kind of fault; or the peer is no etcd user, or a
    /// blocked user.
    pub async fn identify(
        &self,
        gateway: &Gateway,
        client: &ClientConnection,
        method: &Method,
        headers: &HeaderMap,
        identities: &Arc<Identities>,
        record: &AccessRecord,
    ) -> Result<Rc<Caller>, Refusal> {
        // Rules that were never read may have a namespace or a mode for any caller.
        if !identities.policy.is_known() {
            return Err(Refusal::NOTHING_SENT);
        }
        let presented = PresentedToken::in_headers(headers);
        client.remembered.borrow_mut().follow(identities);
        let standing = if self.ignores(gateway, client, presented) {
            // A call is identified again once its request is complete, but counted once.
            if !record.has_peer() {
                gateway.metrics.tokens_ignored.inc();
            }
            self.beside_ignored(client)?
        } else {
            self.by_presented(gateway, client, method, presented)?
        };
        let standing = match &standing.grounds.evidence {
            CallerEvidence::Session(session) if standing.needs_recheck() => {
                let session = Rc::clone(session);
                // Boxed, since few calls take this path.
                let proved =
                    Box::pin(self.prove_again(gateway, client, Rc::clone(&session), standing)).await?;
                // A revocation may have arrived during the proof.
                if !gateway.sealer.is_valid(&session) {
                    gateway.metrics.sessions_refused.inc();
                    return Err(recheck::invalid_session(gateway, &session));
                }
                proved
            }
            _ => standing,
        };
        if let Some(revision) = etcd_tokens::revision_of(&standing)
            && let Err(refusal) = Box::pin(etcd_tokens::counts(gateway, revision)).await
        {
            gateway.metrics.jwts_refused.inc();
            return Err(refusal);
        }
        record.note_peer(Rc::clone(&standing.peer));
        if let CallerEvidence::Session(session) = &standing.grounds.evidence {
            record.note_session(session.id);
        }
        let decided = recheck::upstream_caller(gateway, standing).and_then(|caller| {
            record.note_user(caller.user.clone(), caller.user.is_some());
            self.generation(gateway, &caller).map(|_| caller)
        });
        decided.inspect_err(|refusal| {
            if refusal.code() == Code::PermissionDenied {
                gateway.metrics.peers_refused.inc();
            }
        })
    }

    /// Identifies the caller by the deciding way.
    fn by_presented(
        &self,
        gateway: &Gateway,
        client: &ClientConnection,
        method: &Method,
        presented: PresentedToken<'_>,
    ) -> Result<PeerStanding, Refusal> {
        let (way, takes_default) = {
            let remembered = client.remembered.borrow();
            let ways = remembered.identities.ways(client);
            (deciding_way(ways, client, token_kind(presented))?, ways.contains(&Identify::Default))
        };
        match (way, presented) {
            (Identify::Token, PresentedToken::Token(token)) => self.by_token(gateway, client, method, token),
            (Identify::Jwt, PresentedToken::Token(token)) => self.by_jwt(gateway, client, token),
            (Identify::Certificate, _) => Ok(self.by_certificate(client)),
            (Identify::Token | Identify::Jwt | Identify::Default, _) => {
                let lent = client.remembered.borrow().lent_token(method);
                match lent {
                    Some(token) => self.by_token(gateway, client, method, token.expose()),
                    None if takes_default => Ok(self.by_default(client)),
                    None => Err(Refusal::USER_EMPTY),
                }
            }
        }
    }

    /// Checks that the session's password still proves the user, where etcd does not see the password.
    async fn prove_again(
        &self,
        gateway: &Gateway,
        client: &ClientConnection,
        session: Rc<Session>,
        standing: PeerStanding,
    ) -> Result<PeerStanding, Refusal> {
        let until = Instant::now() + PATIENCE;
        loop {
            let proved = timeout_at(until, gateway.logins.prove_again(&session)).await;
            match proved.unwrap_or(Err(LoginDenial::Untold)) {
                Ok(LoginProof::Etcd | LoginProof::Nothing) => return Ok(standing),
                // The user has moved into the users file since the login.
                Ok(LoginProof::File(line)) => {
                    let identities = self.identities.load();
                    if identities.contains_line(session.peer.user(), line) {
                        let grounds = recheck::by_file(session);
                        let standing = identities.standing(client, grounds, None, OwnCredential::Nothing);
                        return Ok(standing.with_recheck());
                    }
                }
                Err(LoginDenial::Refused(_)) => {
                    gateway.metrics.sessions_refused.inc();
                    return Err(Refusal::INVALID_AUTH_TOKEN);
                }
                Err(LoginDenial::Untold | LoginDenial::Limited) => return Err(Refusal::NOTHING_SENT),
            }
            // The line and the rules are of different versions of the users file; the second replacement
            // follows shortly.
            sleep(RELOAD_PAUSE).await;
        }
    }

    fn by_token(
        &self,
        gateway: &Gateway,
        client: &ClientConnection,
        method: &Method,
        token: &[u8],
    ) -> Result<PeerStanding, Refusal> {
        let mut remembered = client.remembered.borrow_mut();
        let session = self.opened.open_after(&mut remembered.last_opened, token).map_err(|failure| {
            gateway.metrics.sessions_refused.inc();
            tracing::debug!(%failure, "a session token was refused");
            match failure {
                failure if failure.is_ours() => Refusal::NOTHING_SENT,
                OpenFailure::Blocked => Refusal::INVALID_AUTH_TOKEN.because(RefusalReason::Blocked),
                _ => Refusal::INVALID_AUTH_TOKEN,
            }
        })?;
        if !recheck::is_line_unchanged(gateway, &session) {
            gateway.metrics.sessions_refused.inc();
            return Err(recheck::of_another_line(gateway, method, &session));
        }
        let auth = gateway.upstream.members.auth.now();
        let claims = is_claim(&session, auth);
        if claims && auth == AuthSetting::Unknown {
            // Unknown too is what the password proves.
            return Err(Refusal::NOTHING_SENT);
        }
        if let Some(standing) = remembered.of_session(&session, claims) {
            return Ok(standing);
        }
        if client.listener.lend_login_identity {
            remembered.note_peer(&session.peer, token);
        }
        let identities = Arc::clone(&remembered.identities);
        let connection = claims.then(|| Rc::new(ConnectionPeers::of(identities.ways(client), client)));
        let evidence = CallerEvidence::Session(Rc::clone(&session));
        let grounds = CallerGrounds { connection, ..CallerGrounds::of(recheck::peer_of(&session), evidence) };
        Ok(remembered.keep(recheck::of_session(gateway, &identities, client, grounds, &session)))
    }

    fn by_jwt(
        &self,
        gateway: &Gateway,
        client: &ClientConnection,
        token: &[u8],
    ) -> Result<PeerStanding, Refusal> {
        let mut remembered = client.remembered.borrow_mut();
        let now = SystemTime::now();
        let verified = self.verified.verify(&remembered.identities.issuers, token, now).map_err(|bad| {
            gateway.metrics.jwts_refused.inc();
            tracing::debug!(%bad, "a JWT was refused");
            Refusal::INVALID_AUTH_TOKEN
        })?;
        if let Some(standing) = remembered.of_jwt(&verified) {
            return Ok(standing);
        }
        let until = verified.expiry().and_then(|end| expiry_deadline(&client.listener, end));
        let peer = verified.peer.clone();
        let evidence = CallerEvidence::Jwt(verified, Rc::new(Secret::new(token.to_vec())));
        let grounds = CallerGrounds::of(peer, evidence);
        let standing = remembered.identities.standing(client, grounds, until, OwnCredential::Nothing);
        remembered.stop_lending();
        Ok(remembered.keep(standing))
    }

    fn by_certificate(&self, client: &ClientConnection) -> PeerStanding {
        let Some(peer) = &client.certificate else { return self.by_default(client) };
        let mut remembered = client.remembered.borrow_mut();
        if let Some(standing) = &remembered.by_certificate {
            return standing.clone();
        }
        let grounds = CallerGrounds::of(peer.clone(), CallerEvidence::Connection);
        let standing = remembered.identities.standing(client, grounds, None, OwnCredential::Nothing);
        remembered.by_certificate.insert(standing).clone()
    }

    fn by_default(&self, client: &ClientConnection) -> PeerStanding {
        let mut remembered = client.remembered.borrow_mut();
        if let Some(standing) = &remembered.by_default {
            return standing.clone();
        }
        let ways = remembered.identities.ways(client);
        let grounds = CallerGrounds::of_listener(ways, client, CallerEvidence::Connection);
        let standing = remembered.identities.standing(client, grounds, None, OwnCredential::Nothing);
        remembered.by_default.insert(standing).clone()
    }

    /// An empty memory for a new connection.
    #[must_use]
    pub fn remembered(&self) -> ConnectionCallers {
        ConnectionCallers::nothing(self.identities.load_full())
    }

    /// True if the client may identify itself in this way now.
    #[must_use]
    pub fn may_identify_by(&self, client: &ClientConnection, way: Identify) -> bool {
        self.identities.load().ways(client).contains(&way)
    }

    /// The current rules.
    #[must_use]
    pub fn rules(&self) -> Guard<Arc<Identities>> {
        self.identities.load()
    }

    /// Notifies when the rules are replaced.
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<()> {
        self.identities.changes()
    }
}

/// The kind of the request's token.
fn token_kind(presented: PresentedToken<'_>) -> Option<Identify> {
    match presented {
        PresentedToken::Token(_) if presented.is_jwt() => Some(Identify::Jwt),
        PresentedToken::Token(_) => Some(Identify::Token),
        PresentedToken::None => None,
    }
}

/// The deciding way: the first of the listener's ways shown by the request. `shown` is the kind of the token.
/// A token of a kind not accepted here is a bad token, and bad tokens never fall back. A request without
/// token and certificate gets `Default` even on a listener without default access, since the connection's
/// login may be lent to the call.
fn deciding_way(
    ways: &[Identify],
    client: &ClientConnection,
    shown: Option<Identify>,
) -> Result<Identify, Refusal> {
    let first = ways.iter().copied().find(|way| match way {
        Identify::Token | Identify::Jwt => shown.is_some(),
        Identify::Certificate => client.certificate.is_some(),
        Identify::Default => true,
    });
    match (first, shown) {
        (Some(Identify::Certificate), _) => Ok(Identify::Certificate),
        (_, Some(kind)) => ways.contains(&kind).then_some(kind).ok_or(Refusal::INVALID_AUTH_TOKEN),
        (_, None) => Ok(Identify::Default),
    }
}
