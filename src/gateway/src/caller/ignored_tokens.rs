//! Tokens ignored while auth is off, as etcd ignores them.
//!
//! Owns: the decision to ignore a token, and the upstream user of a call with an ignored token. Must not
//! know: how tokens are sealed or signed.
//! Invariants: a token is ignored only while a member has said that auth is off; a token known to Keyward is
//! never ignored, be it good, revoked or undecided; a call with an ignored token goes upstream without a
//! user, so a bad token never falls back to an etcd user if auth is turned on meanwhile; `deny` rules,
//! blocks, and the bindings of the connection's peers and of their etcd user still hold.

use std::rc::Rc;
use std::sync::Arc;
use std::time::SystemTime;

use super::identities::{OwnCredential, PeerRank, PeerStanding};
use super::{
    Caller, CallerEvidence, CallerGrounds, CallerIdentification, Identities, deciding_way, token_kind,
};
use crate::{ClientConnection, Gateway};
use keyward_cluster::membership::AuthSetting;
use keyward_config::Identify;
use keyward_downstream::session::{OpenFailure, PresentedToken};
use keyward_etcd::refusal::Refusal;
use keyward_upstream::send::UpstreamUser;

impl CallerIdentification {
    /// True if the token is ignored: auth is off, and the token is neither a session of Keyward's nor a JWT
    /// of a configured issuer accepted here.
    pub(super) fn ignores(
        &self,
        gateway: &Gateway,
        client: &ClientConnection,
        presented: PresentedToken<'_>,
    ) -> bool {
        let PresentedToken::Token(token) = presented else { return false };
        if gateway.upstream.members.auth.now() != AuthSetting::Off {
            return false;
        }
        let identities = Arc::clone(&client.remembered.borrow().identities);
        let (ways, kind) = (identities.ways(client), token_kind(presented));
        if matches!(deciding_way(ways, client, kind), Ok(Identify::Certificate)) {
            // A certificate decides here, with any token.
            return false;
        }
        if kind == Some(Identify::Jwt) {
            let is_taken = ways.contains(&Identify::Jwt);
            return !is_taken || self.verified.verify(&identities.issuers, token, SystemTime::now()).is_err();
        }
        match self.opened.open(token) {
            Ok(_session) => false,
            // A revoked session, or an undecided session, is refused as with auth on.
            Err(
                OpenFailure::Revoked
                | OpenFailure::Blocked
                | OpenFailure::TooOld
                | OpenFailure::NotKnown
                | OpenFailure::NotPinned,
            ) => false,
            Err(
                OpenFailure::NotOurs
                | OpenFailure::UnknownKey
                | OpenFailure::ForeignRealm
                | OpenFailure::Tampered,
            ) => true,
        }
    }

    /// The caller beside an ignored token: the connection's certificate, or the listener.
    ///
    /// # Errors
    /// The listener requires a valid credential, so the token stays a bad token.
    pub(super) fn beside_ignored(&self, client: &ClientConnection) -> Result<PeerStanding, Refusal> {
        let identities = Arc::clone(&client.remembered.borrow().identities);
        Ok(as_nobody(&identities, client, grounds_beside(&identities, client)?))
    }
}

/// The rules' decision on a connection with an ignored token.
pub(super) fn as_nobody(
    identities: &Identities,
    client: &ClientConnection,
    grounds: CallerGrounds,
) -> PeerStanding {
    let standing = identities.standing(client, grounds, None, OwnCredential::Nothing);
    let rank = match standing.rank {
        PeerRank::Denied => PeerRank::Denied,
        PeerRank::Known(_) | PeerRank::Unknown | PeerRank::Unproved => {
            PeerRank::Known(Rc::new(Caller::new(UpstreamUser::Nobody, None, standing.grounds.clone())))
        }
    };
    PeerStanding { rank, ..standing }
}

fn grounds_beside(identities: &Identities, client: &ClientConnection) -> Result<CallerGrounds, Refusal> {
    let ways = identities.ways(client);
    match (deciding_way(ways, client, None)?, &client.certificate) {
        (Identify::Certificate, Some(certificate)) => {
            Ok(CallerGrounds::of(certificate.clone(), CallerEvidence::Ignored))
        }
        (Identify::Default, _) if ways.contains(&Identify::Default) => {
            Ok(CallerGrounds::of_listener(ways, client, CallerEvidence::Ignored))
        }
        _ => Err(Refusal::INVALID_AUTH_TOKEN),
    }
}
