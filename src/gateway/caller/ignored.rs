//! Tokens that nobody looks at: while auth is off, etcd ignores whatever token a call shows, and so does Keyward.
//!
//! Owns: which tokens are ignored, and as whom a call goes that shows one. Must not know: how tokens are sealed or signed.
//! Invariants: a token is ignored only while a member has said that auth is off; one that Keyward knows is never ignored, be it
//! good, revoked or not decided yet; a call with an ignored token goes upstream as nobody, so that a bad token falls back to no
//! etcd user when auth is turned on meanwhile; rules with `deny`, and blocks, hold for it.

use std::rc::Rc;
use std::sync::Arc;
use std::time::SystemTime;

use super::identities::{Brought, Rank, Standing};
use super::{Caller, Callers, Evidence, Grounds, Identities, kind_of, way};
use crate::config::Identify;
use crate::downstream::session::{OpenFailure, Presented};
use crate::gateway::{Client, Gateway};
use crate::identity::Peer;
use crate::refusal::Refusal;
use crate::upstream::membership::Auth;
use crate::upstream::send::As;

impl Callers {
    /// Whether this token is ignored: auth is off, and it is neither a session of Keyward's nor a JWT of a configured issuer that
    /// counts here.
    pub(super) fn ignores(&self, gateway: &Gateway, client: &Client, presented: Presented<'_>) -> bool {
        let Presented::Token(token) = presented else { return false };
        if gateway.door.members.auth.now() != Auth::Off {
            return false;
        }
        let identities = Arc::clone(&client.remembered.borrow().identities);
        let (ways, kind) = (identities.ways(client), kind_of(presented));
        if matches!(way(ways, client, kind), Ok(Identify::Certificate)) {
            // A certificate decides here, whatever else is shown.
            return false;
        }
        if kind == Some(Identify::Jwt) {
            let is_taken = ways.contains(&Identify::Jwt);
            return !is_taken || self.verified.verify(&identities.issuers, token, SystemTime::now()).is_err();
        }
        match self.opened.open(token) {
            Ok(_session) => false,
            // What was revoked, or may have been, is refused as ever.
            Err(
                OpenFailure::Revoked | OpenFailure::TooOld | OpenFailure::NotKnown | OpenFailure::NotPinned,
            ) => false,
            Err(
                OpenFailure::NotOurs
                | OpenFailure::UnknownKey
                | OpenFailure::ForeignRealm
                | OpenFailure::Tampered,
            ) => true,
        }
    }

    /// Who calls beside an ignored token: the connection's certificate, or its listener.
    ///
    /// # Errors
    /// Nobody on this listener may call without showing something that counts: the token stays a bad one. Or the connection's own
    /// user is blocked.
    pub(super) fn beside_ignored(&self, gateway: &Gateway, client: &Client) -> Result<Standing, Refusal> {
        let peer = {
            let remembered = client.remembered.borrow();
            peer_beside(&remembered.identities, client)?
        };
        let grounds = Grounds { peer, shown: Evidence::Ignored };
        let identities = Arc::clone(&client.remembered.borrow().identities);
        self.as_nobody(gateway, &identities, client, grounds)
    }

    /// What the rules say of a connection whose token is ignored.
    ///
    /// # Errors
    /// Its own user is blocked, or it is not known who is.
    pub(super) fn as_nobody(
        &self,
        gateway: &Gateway,
        identities: &Identities,
        client: &Client,
        grounds: Grounds,
    ) -> Result<Standing, Refusal> {
        let standing = identities.standing(client, grounds, None, Brought::Nothing);
        let rank = match standing.rank {
            Rank::Denied => Rank::Denied,
            Rank::Known(caller) => {
                self.generation(gateway, &caller)?;
                Rank::Known(Rc::new(Caller::new(As::Nobody, None, standing.grounds.clone())))
            }
            Rank::Unknown | Rank::Unproved => {
                Rank::Known(Rc::new(Caller::new(As::Nobody, None, standing.grounds.clone())))
            }
        };
        Ok(Standing { rank, ..standing })
    }
}

fn peer_beside(identities: &Identities, client: &Client) -> Result<Peer, Refusal> {
    let ways = identities.ways(client);
    match (way(ways, client, None)?, &client.certificate) {
        (Identify::Certificate, Some(certificate)) => Ok(certificate.clone()),
        (Identify::Default, _) if ways.contains(&Identify::Default) => {
            Ok(Peer::Listener(Arc::clone(&client.listener.name)))
        }
        _ => Err(Refusal::INVALID_AUTH_TOKEN),
    }
}
