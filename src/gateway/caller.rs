//! From what a request presents to as whom it goes upstream.
//!
//! Owns: that decision. Must not know: how tokens are sealed, what the call is. Invariants (rules 9): a token beats
//! everything else; one that is present but bad is refused and never falls back; without a token a request is the
//! connection's default.

use std::rc::Rc;
use std::sync::Arc;

use http::HeaderMap;

use crate::downstream::session::{OpenFailure, OpenedSessions, Presented, Proof, Sealer, SessionPeer};
use crate::gateway::{Client, Gateway};
use crate::identity::UserName;
use crate::refusal::Refusal;
use crate::upstream::credential::{Identity, InUse};
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
}

impl Caller {
    /// A peer that goes upstream as `whom`.
    #[must_use]
    pub fn new(whom: As) -> Self {
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
            As::User(identity) => identity.hold(),
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
            match failure {
                OpenFailure::NotPinned => Refusal::NOTHING_SENT,
                _ => Refusal::INVALID_AUTH_TOKEN,
            }
        })?;
        let mut last = client.last.borrow_mut();
        if let Some((known, caller)) = &*last
            && Rc::ptr_eq(known, &session)
        {
            return Ok(Rc::clone(caller));
        }
        let SessionPeer::Password { user, password } = &session.peer;
        let credentials = &gateway.door.credentials;
        // A password that etcd accepted proves that user, however we prove it to etcd. One that nobody looked at proves
        // nothing until it has logged in.
        let acting = match session.proof {
            Proof::Etcd => credentials.acting(user),
            Proof::None => None,
        };
        let own = || As::User(Identity::Password(credentials.identity(user, password)));
        let caller = Rc::new(Caller::new(acting.unwrap_or_else(own)));
        *last = Some((session, Rc::clone(&caller)));
        Ok(caller)
    }
}
