//! From what a request presents to as whom it goes upstream.
//!
//! Owns: that decision, and a cache of it per shard so that a token is opened once. Must not know: how tokens are
//! sealed, what the call is. Invariants (rules 9): a token beats everything else; one that is present but bad is
//! refused and never falls back; without a token a request is the connection's default.

use std::rc::Rc;

use http::HeaderMap;

use crate::downstream::session::{OpenFailure, OpenedSessions, Presented, SessionPeer, presented};
use crate::gateway::{Client, Gateway};
use crate::identity::UserName;
use crate::refusal::Refusal;
use crate::upstream::credential::InUse;
use crate::upstream::send::As;

/// A peer that was identified.
#[derive(Clone)]
pub struct Caller {
    /// As whom it goes upstream.
    pub whom: As,
    /// That user's name, for the record.
    pub user: Option<UserName>,
}

impl Caller {
    fn new(whom: As) -> Self {
        let user = match &whom {
            As::Nobody => None,
            As::User(identity) => Some(identity.user().clone()),
        };
        Self { whom, user }
    }

    /// Keeps the credential fresh for as long as it is held: for streams and calls that block.
    #[must_use]
    pub fn in_use(&self) -> Option<InUse> {
        match &self.whom {
            As::Nobody => None,
            As::User(identity) => Some(identity.in_use()),
        }
    }
}

/// The peers whose tokens were opened here lately.
#[derive(Default)]
pub struct Callers {
    opened: OpenedSessions<Rc<Caller>>,
}

impl Callers {
    /// Who is calling.
    ///
    /// # Errors
    /// The token is bad; all ways of being bad look the same.
    pub fn identify(
        &self,
        gateway: &Gateway,
        client: &Client,
        headers: &HeaderMap,
    ) -> Result<Rc<Caller>, Refusal> {
        let token = match presented(headers) {
            Presented::None => return Ok(Rc::new(Caller::new(client.default.clone()))),
            Presented::Token(token) => token,
        };
        let caller = self.opened.get_or_open(&gateway.sealer, token, |session| {
            let SessionPeer::Password { user, password } = session.peer;
            Rc::new(Caller::new(As::User(gateway.door.credentials.identity(&user, &password))))
        });
        caller.map_err(|failure| {
            gateway.metrics.sessions_refused.inc();
            tracing::debug!(%failure, "a session token was refused");
            match failure {
                OpenFailure::NotPinned => Refusal::nothing_sent(),
                _ => Refusal::invalid_auth_token(),
            }
        })
    }
}
