//! From what a request presents to as whom it goes upstream.
//!
//! Owns: that decision. Must not know: how tokens are sealed, how certificates are verified, what a call does.
//! Invariants (rules 9, 14): of the ways that a listener allows, the first that a request shows decides; what is shown
//! and bad is refused, and never falls back to another, unless auth is off upstream (`ignored`); a peer that is no etcd user
//! sends nothing upstream, unless auth is off there; rules that were replaced decide no call that came later; a user who is blocked is nobody's.

mod again;
mod etcd_tokens;
mod identities;
mod ignored;
mod remembered;

use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use http::HeaderMap;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout_at};

use crate::config::Identify;
use crate::downstream::jwt::VerifiedJwts;
use crate::downstream::session::{OpenedSessions, Presented, Sealer, Session};
use crate::gateway::access_log::Record;
use crate::gateway::exchange::PATIENCE;
use crate::gateway::login::sources::{Denied, Proved};
use crate::gateway::{Client, Gateway, cut_at};
use crate::identity::{Peer, UserName};
use crate::jwt::Verified;
use crate::published::Published;
use crate::refusal::{Code, Refusal};
use crate::rpc::method::Method;
use crate::secret::Secret;
use crate::upstream::credential::InUse;
use crate::upstream::send::As;

use identities::{Brought, Standing};

pub use identities::Identities;
pub use remembered::Remembered;

/// Sessions that one shard keeps opened: some 500 bytes each.
const OPENED: usize = 8192;
/// After what time it is asked again who is right, while the configuration changes.
const BETWEEN: Duration = Duration::from_millis(5);
/// JWTs that one shard keeps verified: some 2 KiB each.
const VERIFIED: usize = 4096;

/// A peer that was identified.
#[derive(Clone)]
pub struct Caller {
    /// As whom it goes upstream.
    pub whom: As,
    /// That user's name, for the record.
    pub user: Option<UserName>,
    /// When its proof ends, where what it has under way ends with it.
    pub until: Option<Instant>,
    /// It lives by a session's password that was accepted once, and is not what it goes upstream with.
    pub again: bool,
    /// Why it does: when they hold no more, neither does what lives by them.
    grounds: Grounds,
}

/// Who is calling, and what it showed.
#[derive(Clone)]
struct Grounds {
    peer: Peer,
    shown: Evidence,
}

/// What a request shows, once it was opened or verified.
#[derive(Clone)]
enum Evidence {
    /// A session's token.
    Session(Rc<Session>),
    /// A JWT: what it says, and itself, since its issuer's keys may change.
    Jwt(Rc<Verified>, Rc<Secret<Vec<u8>>>),
    /// Nothing beside the connection itself: its certificate, or its listener.
    Connection,
    /// The same beside a token that etcd would not look at, since auth is off.
    Ignored,
}

impl Caller {
    fn new(whom: As, until: Option<Instant>, grounds: Grounds) -> Self {
        let user = match &whom {
            As::Nobody => None,
            As::User(identity) => Some(identity.user().clone()),
        };
        Self { whom, user, until, again: false, grounds }
    }

    /// The session that says so, if one does.
    #[must_use]
    pub fn session(&self) -> Option<&Rc<Session>> {
        match &self.grounds.shown {
            Evidence::Session(session) => Some(session),
            Evidence::Jwt(..) | Evidence::Connection | Evidence::Ignored => None,
        }
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

/// The peers whose tokens were opened on this shard lately, and who they are upstream.
pub struct Callers {
    opened: OpenedSessions,
    verified: VerifiedJwts,
    identities: Arc<Published<Identities>>,
}

impl Callers {
    /// Nobody yet.
    #[must_use]
    pub fn new(sealer: Arc<Sealer>, identities: Arc<Published<Identities>>) -> Self {
        let opened = OpenedSessions::new(sealer, OPENED);
        Self { opened, verified: VerifiedJwts::new(VERIFIED), identities }
    }

    /// Who is calling, which is noted in the record. `method` is none for one that we do not know.
    ///
    /// # Errors
    /// What it shows is bad, all ways of which look the same; or it is no etcd user, or one that is blocked.
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
        let standing = if self.ignores(gateway, client, presented) {
            // A call is looked at again once its request has come whole; it is counted once.
            if record.peer.is_none() {
                gateway.metrics.tokens_ignored.inc();
            }
            self.beside_ignored(gateway, client)?
        } else {
            self.by_presented(gateway, client, method, presented)?
        };
        let standing = match &standing.grounds.shown {
            Evidence::Session(session) if standing.again() => {
                let session = Rc::clone(session);
                // Apart: few calls are of this kind.
                let proved =
                    Box::pin(self.prove_again(gateway, client, Rc::clone(&session), standing)).await?;
                // That took a while: what was revoked meanwhile is revoked.
                if !gateway.sealer.stands(&session) {
                    gateway.metrics.sessions_refused.inc();
                    return Err(Refusal::INVALID_AUTH_TOKEN);
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
        record.peer = Some(Rc::clone(&standing.peer));
        let decided = again::decided(gateway, standing).and_then(|caller| {
            record.user = caller.user.clone();
            record.is_proved = caller.user.is_some();
            self.generation(gateway, &caller).map(|_| caller)
        });
        decided.inspect_err(|refusal| {
            if refusal.code() == Code::PermissionDenied {
                gateway.metrics.peers_refused.inc();
            }
        })
    }

    /// Who calls by what is shown first of what counts.
    fn by_presented(
        &self,
        gateway: &Gateway,
        client: &Client,
        method: Option<&Method>,
        presented: Presented<'_>,
    ) -> Result<Standing, Refusal> {
        let (way, takes_default) = {
            let remembered = client.remembered.borrow();
            let ways = remembered.identities.ways(client);
            (way(ways, client, kind_of(presented))?, ways.contains(&Identify::Default))
        };
        match (way, presented) {
            (Identify::Token, Presented::Token(token)) => self.by_token(gateway, client, token),
            (Identify::Jwt, Presented::Token(token)) => self.by_jwt(gateway, client, token),
            (Identify::Certificate, _) => Ok(self.by_certificate(client)),
            (Identify::Token | Identify::Jwt | Identify::Default, _) => {
                let lent = method.and_then(|method| client.remembered.borrow().lent(method));
                match lent {
                    Some(token) => self.by_token(gateway, client, token.expose()),
                    None if takes_default => Ok(self.by_default(client)),
                    None => Err(Refusal::USER_EMPTY),
                }
            }
        }
    }

    /// Whether what a session's password proved still holds, where nobody upstream looks at it.
    async fn prove_again(
        &self,
        gateway: &Gateway,
        client: &Client,
        session: Rc<Session>,
        standing: Standing,
    ) -> Result<Standing, Refusal> {
        let until = Instant::now() + PATIENCE;
        loop {
            let proved = timeout_at(until, gateway.logins.prove_again(&session)).await;
            match proved.unwrap_or(Err(Denied::Untold)) {
                Ok(Proved::Etcd | Proved::Nothing) => return Ok(standing),
                // The user has moved into the users file since.
                Ok(Proved::File(line)) => {
                    let identities = self.identities.load();
                    if identities.know(session.peer.user(), line) {
                        let grounds = again::by_file(session);
                        let standing = identities.standing(client, grounds, None, Brought::Nothing);
                        return Ok(standing.proved_elsewhere());
                    }
                }
                Err(Denied::WrongPassword | Denied::NoPassword) => {
                    gateway.metrics.sessions_refused.inc();
                    return Err(Refusal::INVALID_AUTH_TOKEN);
                }
                Err(Denied::Untold | Denied::Limited) => return Err(Refusal::NOTHING_SENT),
            }
            // The line is of another users file than the rules: one of them is about to come.
            sleep(BETWEEN).await;
        }
    }

    fn by_token(&self, gateway: &Gateway, client: &Client, token: &[u8]) -> Result<Standing, Refusal> {
        let session = self.opened.open(token).map_err(|failure| {
            gateway.metrics.sessions_refused.inc();
            tracing::debug!(%failure, "a session token was refused");
            if failure.is_ours() { Refusal::NOTHING_SENT } else { Refusal::INVALID_AUTH_TOKEN }
        })?;
        if !again::line_is_same(gateway, &session) {
            gateway.metrics.sessions_refused.inc();
            return Err(Refusal::INVALID_AUTH_TOKEN);
        }
        let mut remembered = client.remembered.borrow_mut();
        if let Some(standing) = remembered.of_session(&session) {
            return Ok(standing);
        }
        if client.listener.lend_login_identity {
            remembered.appeared(&session.peer, token);
        }
        let identities = Arc::clone(&remembered.identities);
        let grounds =
            Grounds { peer: again::peer_of(&session), shown: Evidence::Session(Rc::clone(&session)) };
        Ok(remembered.keep(again::of_session(gateway, &identities, client, grounds, &session)))
    }

    fn by_jwt(&self, gateway: &Gateway, client: &Client, token: &[u8]) -> Result<Standing, Refusal> {
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
        let until = verified.ends().and_then(|end| cut_at(&client.listener, end, now));
        let peer = verified.peer.clone();
        let grounds = Grounds { peer, shown: Evidence::Jwt(verified, Rc::new(Secret::new(token.to_vec()))) };
        let standing = remembered.identities.standing(client, grounds, until, Brought::Nothing);
        remembered.nobody_lends();
        Ok(remembered.keep(standing))
    }

    fn by_certificate(&self, client: &Client) -> Standing {
        let Some(peer) = &client.certificate else { return self.by_default(client) };
        let mut remembered = client.remembered.borrow_mut();
        if let Some(standing) = &remembered.by_certificate {
            return standing.clone();
        }
        let grounds = Grounds { peer: peer.clone(), shown: Evidence::Connection };
        let standing = remembered.identities.standing(client, grounds, None, Brought::Nothing);
        remembered.by_certificate.insert(standing).clone()
    }

    fn by_default(&self, client: &Client) -> Standing {
        let mut remembered = client.remembered.borrow_mut();
        if let Some(standing) = &remembered.by_default {
            return standing.clone();
        }
        let peer = Peer::Listener(Arc::clone(&client.listener.name));
        let grounds = Grounds { peer, shown: Evidence::Connection };
        let standing = remembered.identities.standing(client, grounds, None, Brought::Nothing);
        remembered.by_default.insert(standing).clone()
    }

    /// What a new connection remembers.
    #[must_use]
    pub fn remembered(&self) -> Remembered {
        Remembered::nothing(self.identities.load_full())
    }

    /// Whether this client may show that now.
    #[must_use]
    pub fn takes(&self, client: &Client, way: Identify) -> bool {
        self.identities.load().ways(client).contains(&way)
    }

    /// Moves whenever there are other rules.
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<()> {
        self.identities.changes()
    }
}

/// What kind of token a request shows.
fn kind_of(presented: Presented<'_>) -> Option<Identify> {
    match presented {
        Presented::Token(_) if presented.is_jwt() => Some(Identify::Jwt),
        Presented::Token(_) => Some(Identify::Token),
        Presented::None => None,
    }
}

/// The way that decides: the first of the listener's that the request shows; `shown` is its token's kind. A token is shown,
/// whatever its kind: one of a kind that does not count here is a bad token, and bad ones never fall back. The default is
/// also who shows nothing where that is not allowed: a login of its connection may still stand for it.
fn way(ways: &[Identify], client: &Client, shown: Option<Identify>) -> Result<Identify, Refusal> {
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
