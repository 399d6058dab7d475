//! From what a request presents to as whom it goes upstream.
//!
//! Owns: that decision. Must not know: how tokens are sealed, how certificates are verified, what a call does.
//! Invariants (rules 9, 14): of the ways that a listener allows, the first that a request shows decides; what is shown
//! and bad is refused, and never falls back to another; a peer that is no etcd user sends nothing upstream, unless auth
//! is off there; rules that were replaced decide no call that came later.

mod remembered;

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::SystemTime;

use arc_swap::ArcSwap;
use http::HeaderMap;
use tokio::time::{Instant, timeout};

use crate::config::{Config, Identify};
use crate::downstream::jwt::VerifiedJwts;
use crate::downstream::session::{Namespace, OpenedSessions, Presented, Proof, Sealer, Session, SessionPeer};
use crate::gateway::access_log::Record;
use crate::gateway::exchange::PATIENCE;
use crate::gateway::login::sources::{Denied, Proved};
use crate::gateway::{Client, Gateway, cut_at};
use crate::identity::{Peer, UserName};
use crate::jwt::Verifier;
use crate::policy::mapping::{Mapped, Mapping};
use crate::refusal::Refusal;
use crate::rpc::method::Method;
use crate::upstream::credential::{Credentials, Identity, InUse};
use crate::upstream::membership::Auth;
use crate::upstream::send::As;
use crate::users::LineMark;

use remembered::Evidence;
pub use remembered::Remembered;

/// Sessions that one shard keeps opened: some 500 bytes each.
const OPENED: usize = 8192;
/// JWTs that one shard keeps verified: some 2 KiB each.
const VERIFIED: usize = 4096;

/// Who is which etcd user, and as whom Keyward can act. Published whole; one of them holds for one call.
#[derive(Debug)]
pub struct Identities {
    issuers: Arc<[Verifier]>,
    mapping: Mapping,
    credentials: Arc<Credentials>,
}

impl Identities {
    /// What a configuration says. `credentials` have its users.
    #[must_use]
    pub fn of(config: &Config, credentials: &Arc<Credentials>) -> Self {
        Self {
            issuers: Arc::clone(&config.issuers),
            mapping: Mapping::new(config.mapping.as_ref().clone()),
            credentials: Arc::clone(credentials),
        }
    }

    /// As that user, without a password of the client's. None where Keyward has no credential for it.
    fn acting(&self, user: &UserName) -> Option<As> {
        self.credentials.acting(user)
    }

    /// What the rules say of `peer`, whose proof ends at `until`.
    fn standing(
        &self,
        client: &Client,
        peer: &Peer,
        until: Option<Instant>,
        brought: Brought<'_>,
    ) -> Standing {
        let address = client.origin.remote.map(|remote| remote.ip());
        let known = |whom| Rank::Known(Rc::new(Caller { until, ..Caller::new(whom) }));
        let rank = match (self.mapping.user_of(peer, address), brought) {
            (Mapped::Denied, _) => Rank::Denied,
            // Once its password was accepted, a user is proved by its entry, where it has one.
            (Mapped::Itself, Brought::Proved(own)) => {
                let entry = match peer {
                    Peer::Password(user) => self.acting(user),
                    _ => None,
                };
                known(entry.unwrap_or_else(own))
            }
            (Mapped::Itself, Brought::Unproved(own)) => known(own()),
            // Its password, which upstream will be looked at, is all that it has: no rule lends it more (rules 11).
            (_, Brought::Unproved(_)) => Rank::Unproved,
            (Mapped::Anonymous, _) => known(As::Nobody),
            (Mapped::User(user), _) => self.acting(&user).map_or(Rank::Unknown, known),
            (Mapped::Itself | Mapped::Unknown, _) => Rank::Unknown,
        };
        Standing { peer: peer.to_string().into(), rank, session: None, again: false }
    }
}

/// A peer that was identified.
#[derive(Clone)]
pub struct Caller {
    /// As whom it goes upstream.
    pub whom: As,
    /// That user's name, for the record.
    pub user: Option<UserName>,
    /// When its proof ends, where what it has under way ends with it.
    pub until: Option<Instant>,
    /// The session that says so, if one does: when it stands no more, neither does what lives by it.
    pub session: Option<Rc<Session>>,
}

impl Caller {
    /// A peer that goes upstream as `whom`.
    #[must_use]
    pub fn new(whom: As) -> Self {
        let user = match &whom {
            As::Nobody => None,
            As::User(identity) => Some(identity.user().clone()),
        };
        Self { whom, user, until: None, session: None }
    }

    /// Keeps the credential fresh for as long as it is held: for streams and calls that block.
    #[must_use]
    pub fn in_use(&self) -> Option<InUse> {
        match &self.whom {
            As::Nobody => None,
            As::User(identity) => identity.hold(),
        }
    }
}

/// A peer, and what the rules say of it.
#[derive(Clone)]
struct Standing {
    /// Its name, for the record.
    peer: Rc<str>,
    rank: Rank,
    /// The session that says so, if one does.
    session: Option<Rc<Session>>,
    /// The session's password was accepted once, and is not what the call goes upstream with: nobody there looks at it.
    again: bool,
}

impl Standing {
    /// The same, for as long as the session stands.
    fn by(self, session: Rc<Session>) -> Self {
        let rank = match self.rank {
            Rank::Known(caller) => {
                Rank::Known(Rc::new(Caller { session: Some(Rc::clone(&session)), ..Caller::clone(&caller) }))
            }
            rank => rank,
        };
        Self { rank, session: Some(session), ..self }
    }
}

#[derive(Clone)]
enum Rank {
    /// It is somebody upstream, or may go there as nobody.
    Known(Rc<Caller>),
    /// No rule knows it, or Keyward has no credential for the user: refused, except where there are no users.
    Unknown,
    /// A rule refuses it.
    Denied,
    /// A rule knows whom it says it is, but it has proved nothing: auth was off when it logged in.
    Unproved,
}

/// The credential that a peer brought itself, made when it is needed.
#[derive(Clone, Copy)]
enum Brought<'a> {
    Nothing,
    /// One that etcd has accepted.
    Proved(&'a dyn Fn() -> As),
    /// One that etcd has not looked at.
    Unproved(&'a dyn Fn() -> As),
}

/// The peers whose tokens were opened on this shard lately, and who they are upstream.
pub struct Callers {
    opened: OpenedSessions,
    verified: VerifiedJwts,
    identities: Arc<ArcSwap<Identities>>,
    nobody: Rc<Caller>,
}

impl Callers {
    /// Nobody yet.
    #[must_use]
    pub fn new(sealer: Arc<Sealer>, identities: Arc<ArcSwap<Identities>>) -> Self {
        let nobody = Rc::new(Caller::new(As::Nobody));
        let opened = OpenedSessions::new(sealer, OPENED);
        Self { opened, verified: VerifiedJwts::new(VERIFIED), identities, nobody }
    }

    /// Who is calling, which is noted in the record. `method` is none for one that we do not know.
    ///
    /// # Errors
    /// What it shows is bad, all ways of which look the same; or it is no etcd user.
    pub async fn identify(
        &self,
        gateway: &Gateway,
        client: &Client,
        method: Option<&Method>,
        headers: &HeaderMap,
        record: &mut Record,
    ) -> Result<Rc<Caller>, Refusal> {
        let presented = Presented::in_headers(headers);
        client.remembered.borrow_mut().follow(&self.identities.load());
        let standing = match (way(client, presented)?, presented) {
            (Identify::Token, Presented::Token(token)) => self.by_token(gateway, client, token)?,
            (Identify::Jwt, Presented::Token(token)) => self.by_jwt(gateway, client, token)?,
            (Identify::Certificate, _) => self.by_certificate(client),
            (Identify::Token | Identify::Jwt | Identify::Default, _) => {
                let lent = method.and_then(|method| client.remembered.borrow().lent(method));
                match lent {
                    Some(token) => self.by_token(gateway, client, token.expose())?,
                    None if client.listener.identify.contains(&Identify::Default) => self.by_default(client),
                    None => return Err(Refusal::USER_EMPTY),
                }
            }
        };
        let standing = match &standing.session {
            Some(session) if standing.again => {
                let session = Rc::clone(session);
                // Apart: few calls are of this kind.
                Box::pin(self.prove_again(gateway, client, session, standing)).await?
            }
            _ => standing,
        };
        record.peer = Some(standing.peer);
        let caller = match standing.rank {
            Rank::Known(caller) => caller,
            Rank::Unknown | Rank::Unproved if gateway.door.members.auth.now() == Auth::Off => {
                match standing.session {
                    None => Rc::clone(&self.nobody),
                    session => Rc::new(Caller { session, ..Caller::clone(&self.nobody) }),
                }
            }
            // Whether there are users at all nobody has told yet: a refusal would be for good.
            Rank::Unknown | Rank::Unproved if gateway.door.members.auth.now() == Auth::Unknown => {
                return Err(Refusal::NOTHING_SENT);
            }
            Rank::Unproved => return Err(Refusal::INVALID_AUTH_TOKEN),
            Rank::Unknown | Rank::Denied => {
                gateway.metrics.peers_refused.inc();
                return Err(Refusal::PERMISSION_DENIED);
            }
        };
        record.user = caller.user.clone();
        Ok(caller)
    }

    /// Whether what a session's password proved still holds, where nobody upstream looks at it.
    async fn prove_again(
        &self,
        gateway: &Gateway,
        client: &Client,
        session: Rc<Session>,
        standing: Standing,
    ) -> Result<Standing, Refusal> {
        let SessionPeer::Password { user, password } = &session.peer else { return Ok(standing) };
        let proved = timeout(PATIENCE, gateway.logins.prove_again(user, password)).await;
        match proved.unwrap_or(Err(Denied::Untold)) {
            Ok(Proved::Etcd | Proved::Nothing) => Ok(standing),
            // The user has moved into the users file since.
            Ok(Proved::File(_)) => {
                let identities = Arc::clone(&client.remembered.borrow().identities);
                let peer = Peer::File(user.clone());
                Ok(identities.standing(client, &peer, None, Brought::Nothing).by(Rc::clone(&session)))
            }
            Err(Denied::WrongPassword | Denied::NoPassword) => {
                gateway.metrics.sessions_refused.inc();
                Err(Refusal::INVALID_AUTH_TOKEN)
            }
            Err(Denied::Untold | Denied::Limited) => Err(Refusal::NOTHING_SENT),
        }
    }

    fn by_token(&self, gateway: &Gateway, client: &Client, token: &[u8]) -> Result<Standing, Refusal> {
        let session = self.opened.open(token).map_err(|failure| {
            gateway.metrics.sessions_refused.inc();
            tracing::debug!(%failure, "a session token was refused");
            if failure.is_ours() { Refusal::NOTHING_SENT } else { Refusal::INVALID_AUTH_TOKEN }
        })?;
        // Whose line in the users file is gone, or another, has another password or none (rules 12).
        if let Proof::File { line } = session.proof
            && gateway.logins.line(session.peer.user()) != Some(LineMark(line))
        {
            gateway.metrics.sessions_refused.inc();
            return Err(Refusal::INVALID_AUTH_TOKEN);
        }
        let mut remembered = client.remembered.borrow_mut();
        let shown = Evidence::Session(Rc::clone(&session));
        if let Some(standing) = remembered.of(&shown) {
            return Ok(standing);
        }
        let user = session.peer.user();
        let peer = match session.peer.namespace() {
            Namespace::Password => Peer::Password(user.clone()),
            Namespace::File => Peer::File(user.clone()),
        };
        let identities = Arc::clone(&remembered.identities);
        let standing = match &session.peer {
            SessionPeer::Password { password, .. } => {
                let looked_at = Cell::new(false);
                let own = || {
                    looked_at.set(true);
                    As::User(Identity::Password(gateway.door.credentials.identity(user, password)))
                };
                let brought = match session.proof {
                    Proof::Etcd { .. } => Brought::Proved(&own),
                    Proof::None | Proof::File { .. } => Brought::Unproved(&own),
                };
                let standing = identities.standing(client, &peer, None, brought);
                let again = matches!(session.proof, Proof::Etcd { .. }) && !looked_at.get();
                Standing { again, ..standing }
            }
            SessionPeer::Known { .. } => identities.standing(client, &peer, None, Brought::Nothing),
        };
        if client.listener.lend_login_identity {
            remembered.appeared(&session.peer, token);
        }
        Ok(remembered.keep(shown, standing.by(session)))
    }

    fn by_jwt(&self, gateway: &Gateway, client: &Client, token: &[u8]) -> Result<Standing, Refusal> {
        let mut remembered = client.remembered.borrow_mut();
        let now = SystemTime::now();
        let verified = self.verified.verify(&remembered.identities.issuers, token, now).map_err(|bad| {
            gateway.metrics.jwts_refused.inc();
            tracing::debug!(%bad, "a JWT was refused");
            Refusal::INVALID_AUTH_TOKEN
        })?;
        let shown = Evidence::Jwt(Rc::clone(&verified));
        if let Some(standing) = remembered.of(&shown) {
            return Ok(standing);
        }
        let until = cut_at(&client.listener, verified.expires, now);
        let standing = remembered.identities.standing(client, &verified.peer, until, Brought::Nothing);
        remembered.nobody_lends();
        Ok(remembered.keep(shown, standing))
    }

    fn by_certificate(&self, client: &Client) -> Standing {
        let Some(peer) = &client.certificate else { return self.by_default(client) };
        let mut remembered = client.remembered.borrow_mut();
        if let Some(standing) = &remembered.by_certificate {
            return standing.clone();
        }
        let standing = remembered.identities.standing(client, peer, None, Brought::Nothing);
        remembered.by_certificate.insert(standing).clone()
    }

    fn by_default(&self, client: &Client) -> Standing {
        let mut remembered = client.remembered.borrow_mut();
        if let Some(standing) = &remembered.by_default {
            return standing.clone();
        }
        let peer = Peer::Listener(Arc::clone(&client.listener.name));
        let standing = remembered.identities.standing(client, &peer, None, Brought::Nothing);
        remembered.by_default.insert(standing).clone()
    }

    /// What a new connection remembers.
    #[must_use]
    pub fn remembered(&self) -> Remembered {
        Remembered::nothing(self.identities.load_full())
    }
}

/// The way that decides: the first of the listener's that the request shows. A token is shown, whatever its kind: one of a
/// kind that does not count here is a bad token, and bad ones never fall back. The default is also who shows nothing where
/// that is not allowed: a login of its connection may still stand for it.
fn way(client: &Client, presented: Presented<'_>) -> Result<Identify, Refusal> {
    let ways = &client.listener.identify;
    let shows_token = matches!(presented, Presented::Token(_));
    let first = ways.iter().copied().find(|way| match way {
        Identify::Token | Identify::Jwt => shows_token,
        Identify::Certificate => client.certificate.is_some(),
        Identify::Default => true,
    });
    match first {
        Some(Identify::Certificate) => Ok(Identify::Certificate),
        _ if shows_token => {
            let kind = if presented.is_jwt() { Identify::Jwt } else { Identify::Token };
            ways.contains(&kind).then_some(kind).ok_or(Refusal::INVALID_AUTH_TOKEN)
        }
        _ => Ok(Identify::Default),
    }
}
