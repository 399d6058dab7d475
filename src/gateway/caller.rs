//! From what a request presents to as whom it goes upstream.
//!
//! Owns: that decision. Must not know: how tokens are sealed, how certificates are verified, what a call does.
//! Invariants (rules 9, 14): of the ways that a listener allows, the first that a request shows decides; what is shown
//! and bad is refused, and never falls back to another; a peer that is no etcd user sends nothing upstream, unless auth
//! is off there; rules that were replaced decide no call that came later.

mod remembered;

use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

use arc_swap::ArcSwap;
use http::HeaderMap;
use tokio::time::Instant;

use crate::config::{Config, Identify};
use crate::downstream::session::{OpenFailure, OpenedSessions, Presented, Sealer, SessionPeer};
use crate::gateway::access_log::Record;
use crate::gateway::{Client, Gateway};
use crate::identity::{Peer, UserName};
use crate::policy::mapping::{Mapped, Mapping};
use crate::refusal::Refusal;
use crate::rpc::method::Method;
use crate::upstream::credential::{Credentials, InUse, PasswordIdentity};
use crate::upstream::membership::Auth;
use crate::upstream::send::As;

pub use remembered::Remembered;

/// Sessions that one shard keeps opened: some 500 bytes each.
const OPENED: usize = 8192;

/// Who is which etcd user, and as whom Keyward can act. Published whole; one of them holds for one call.
#[derive(Debug)]
pub struct Identities {
    mapping: Mapping,
    acting: HashMap<UserName, Arc<PasswordIdentity>>,
}

impl Identities {
    /// What a configuration says.
    #[must_use]
    pub fn of(config: &Config, credentials: &Credentials) -> Self {
        let acting = config.users.iter();
        let acting =
            acting.map(|login| (login.user.clone(), credentials.identity(&login.user, &login.password)));
        Self { mapping: Mapping::new(config.mapping.as_ref().clone()), acting: acting.collect() }
    }

    /// As that user, without a password of the client's. None where Keyward has no credential for it.
    fn acting(&self, user: &UserName) -> Option<As> {
        self.acting.get(user).map(|identity| As::User(Arc::clone(identity)))
    }

    /// What the rules say of `peer`. `own` makes the credential that it brought itself.
    fn standing(&self, client: &Client, peer: &Peer, own: Option<&dyn Fn() -> As>) -> Standing {
        let address = client.origin.remote.map(|remote| remote.ip());
        let whom = match self.mapping.user_of(peer, address) {
            Mapped::Itself => own.map(|own| own()),
            Mapped::Anonymous => Some(As::Nobody),
            Mapped::User(user) => self.acting(&user),
            Mapped::Unknown => None,
            Mapped::Denied => return Standing { peer: peer.to_string().into(), rank: Rank::Denied },
        };
        let known = |whom| Rank::Known(Rc::new(Caller::new(whom)));
        Standing { peer: peer.to_string().into(), rank: whom.map_or(Rank::Unknown, known) }
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
}

impl Caller {
    /// A peer that goes upstream as `whom`.
    #[must_use]
    pub fn new(whom: As) -> Self {
        let user = match &whom {
            As::Nobody => None,
            As::User(identity) => Some(identity.user().clone()),
        };
        Self { whom, user, until: None }
    }

    /// Keeps the credential fresh for as long as it is held: for streams and calls that block.
    #[must_use]
    pub fn in_use(&self) -> Option<InUse> {
        match &self.whom {
            As::Nobody => None,
            As::User(identity) => Some(identity.hold()),
        }
    }
}

/// A peer, and what the rules say of it.
#[derive(Clone)]
struct Standing {
    /// Its name, for the record.
    peer: Rc<str>,
    rank: Rank,
}

#[derive(Clone)]
enum Rank {
    /// It is somebody upstream, or may go there as nobody.
    Known(Rc<Caller>),
    /// No rule knows it, or Keyward has no credential for the user: refused, except where there are no users.
    Unknown,
    /// A rule refuses it.
    Denied,
}

/// The peers whose tokens were opened on this shard lately, and who they are upstream.
pub struct Callers {
    opened: OpenedSessions,
    identities: Arc<ArcSwap<Identities>>,
    nobody: Rc<Caller>,
}

impl Callers {
    /// Nobody yet.
    #[must_use]
    pub fn new(sealer: Arc<Sealer>, identities: Arc<ArcSwap<Identities>>) -> Self {
        let nobody = Rc::new(Caller::new(As::Nobody));
        Self { opened: OpenedSessions::new(sealer, OPENED), identities, nobody }
    }

    /// Who is calling, which is noted in the record. `method` is none for one that we do not know.
    ///
    /// # Errors
    /// What it shows is bad, all ways of which look the same; or it is no etcd user.
    pub fn identify(
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
            (Identify::Certificate, _) => self.by_certificate(client),
            (Identify::Token | Identify::Default, _) => {
                let lent = method.and_then(|method| client.remembered.borrow().lent(method));
                match lent {
                    Some(token) => self.by_token(gateway, client, token.expose())?,
                    None if client.listener.identify.contains(&Identify::Default) => self.by_default(client),
                    None => return Err(Refusal::USER_EMPTY),
                }
            }
        };
        record.peer = Some(standing.peer);
        let caller = match standing.rank {
            Rank::Known(caller) => caller,
            Rank::Unknown if gateway.door.members.auth.now() == Auth::Off => Rc::clone(&self.nobody),
            Rank::Unknown | Rank::Denied => {
                gateway.metrics.peers_refused.inc();
                return Err(Refusal::PERMISSION_DENIED);
            }
        };
        record.user = caller.user.clone();
        Ok(caller)
    }

    fn by_token(&self, gateway: &Gateway, client: &Client, token: &[u8]) -> Result<Standing, Refusal> {
        let session = self.opened.open(token).map_err(|failure| {
            gateway.metrics.sessions_refused.inc();
            tracing::debug!(%failure, "a session token was refused");
            match failure {
                OpenFailure::NotPinned => Refusal::NOTHING_SENT,
                _ => Refusal::INVALID_AUTH_TOKEN,
            }
        })?;
        let mut remembered = client.remembered.borrow_mut();
        if let Some((known, standing)) = &remembered.last
            && Rc::ptr_eq(known, &session)
        {
            return Ok(standing.clone());
        }
        let SessionPeer::Password { user, password } = &session.peer;
        let own = || As::User(gateway.door.credentials.identity(user, password));
        let standing = remembered.identities.standing(client, &Peer::Password(user.clone()), Some(&own));
        if client.listener.lend_login_identity {
            remembered.appeared(&session.peer, token);
        }
        remembered.last = Some((session, standing.clone()));
        Ok(standing)
    }

    fn by_certificate(&self, client: &Client) -> Standing {
        let Some(peer) = &client.certificate else { return self.by_default(client) };
        let mut remembered = client.remembered.borrow_mut();
        if let Some(standing) = &remembered.by_certificate {
            return standing.clone();
        }
        let standing = remembered.identities.standing(client, peer, None);
        remembered.by_certificate.insert(standing).clone()
    }

    fn by_default(&self, client: &Client) -> Standing {
        let mut remembered = client.remembered.borrow_mut();
        if let Some(standing) = &remembered.by_default {
            return standing.clone();
        }
        let peer = Peer::Listener(Arc::clone(&client.listener.name));
        let standing = remembered.identities.standing(client, &peer, None);
        remembered.by_default.insert(standing).clone()
    }

    /// What a new connection remembers.
    #[must_use]
    pub fn remembered(&self) -> Remembered {
        Remembered::nothing(self.identities.load_full())
    }
}

/// The way that decides: the first of the listener's that the request shows. The default is also who shows nothing where
/// that is not allowed: a login of its connection may still stand for it.
fn way(client: &Client, presented: Presented<'_>) -> Result<Identify, Refusal> {
    let shows_token = matches!(presented, Presented::Token(_));
    let mut ways = client.listener.identify.iter().copied();
    let way = ways.find(|way| match way {
        Identify::Token => shows_token,
        Identify::Certificate => client.certificate.is_some(),
        Identify::Default => true,
    });
    match way {
        // A token where none counts is a bad token, and bad ones never fall back.
        None | Some(Identify::Default) if shows_token => Err(Refusal::INVALID_AUTH_TOKEN),
        way => Ok(way.unwrap_or(Identify::Default)),
    }
}
