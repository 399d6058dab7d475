//! From what a request presents to as whom it goes upstream.
//!
//! Owns: that decision. Must not know: how tokens are sealed, what the call is. Invariants (rules 9): a token beats
//! everything else; one that is present but bad is refused and never falls back; without a token a request is the
//! connection's default.

use std::rc::Rc;
use std::sync::Arc;

use http::HeaderMap;

use crate::downstream::session::{OpenedSessions, Presented, Sealer, Session, SessionPeer};
use crate::gateway::{Client, Gateway};
use crate::identity::UserName;
use crate::refusal::Refusal;
use crate::upstream::credential::InUse;
use crate::upstream::send::As;

/// Sessions that one shard keeps opened: some 500 bytes each.
const OPENED: usize = 8192;

/// A peer that was identified.
#[derive(Clone)]
pub struct Caller {
    /// As whom it goes upstream.
    pub whom: As,
    /// That user's name, for the record.
    pub user: Option<UserName>,
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
        Self { whom, user, session: None }
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

/// The peers whose tokens were opened on this shard lately.
pub struct Callers {
    opened: OpenedSessions,
}

impl Callers {
    /// Nobody yet.
    #[must_use]
    pub fn new(sealer: Arc<Sealer>) -> Self {
        Self { opened: OpenedSessions::new(sealer, OPENED) }
    }

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
        let token = match Presented::in_headers(headers) {
            Presented::None => return Ok(Rc::clone(&client.default)),
            Presented::Token(token) => token,
        };
        let session = self.opened.open(token).map_err(|failure| {
            gateway.metrics.sessions_refused.inc();
            tracing::debug!(%failure, "a session token was refused");
            if failure.is_ours() { Refusal::NOTHING_SENT } else { Refusal::INVALID_AUTH_TOKEN }
        })?;
        let mut last = client.last.borrow_mut();
        if let Some((known, caller)) = &*last
            && Rc::ptr_eq(known, &session)
        {
            return Ok(Rc::clone(caller));
        }
        let SessionPeer::Password { user, password } = &session.peer else {
            // Nothing here has a credential of its own for it, and nothing seals such.
            return Err(Refusal::INVALID_AUTH_TOKEN);
        };
        let whom = As::User(gateway.door.credentials.identity(user, password));
        let caller = Rc::new(Caller { session: Some(Rc::clone(&session)), ..Caller::new(whom) });
        *last = Some((session, Rc::clone(&caller)));
        Ok(caller)
    }
}
