//! Whether what was decided of a caller still holds.
//!
//! Owns: that decision, for what lives longer than the one that let it begin, from everything that the first was made of: the
//! session, its line in the users file, the JWT's signature, the rules, the credentials, who is blocked. Must not know: what
//! lives, when it is looked at. Invariants (rules 16, 29): whoever is another etcd user now, or nobody, does not go on; whoever
//! is the same does; where it cannot be told who was revoked, what lives goes on, and nothing begins.

use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use super::identities::{Brought, Rank, Standing};
use super::{Caller, Callers, Evidence, Grounds, Identities, way};
use crate::config::Identify;
use crate::downstream::session::{Inadmissible, Namespace, Proof, Session, SessionPeer};
use crate::gateway::live::Life;
use crate::gateway::{Client, Gateway};
use crate::identity::Peer;
use crate::refusal::Refusal;
use crate::upstream::membership::Auth;
use crate::upstream::send::As;
use crate::users::LineMark;

/// Before its end, a JWT was good; that its end has come is told by timers.
const BEFORE: Duration = Duration::from_millis(1);

impl Callers {
    /// Whether what was let in may go on: nothing that it was decided by says otherwise now.
    ///
    /// # Errors
    /// What its client is told: what the next call would be told, or that its token is bad, where that would be somebody else's.
    pub fn stands(&self, gateway: &Gateway, life: &Life) -> Result<(), Refusal> {
        let now = self.stands_on(gateway, life, life.caller.grounds.clone())?;
        life.is_looked_at(gateway, now.again);
        Ok(())
    }

    /// The same of a session whose user has moved into the users file.
    ///
    /// # Errors
    /// As there.
    pub fn stands_by_file(&self, gateway: &Gateway, life: &Life) -> Result<(), Refusal> {
        let Some(session) = life.caller.session() else { return Ok(()) };
        self.stands_on(gateway, life, by_file(Rc::clone(session))).map(drop)
    }

    fn stands_on(&self, gateway: &Gateway, life: &Life, grounds: Grounds) -> Result<Rc<Caller>, Refusal> {
        let Life { client, caller, generation, .. } = life;
        if client.is_dismissed() {
            return Err(Refusal::SHUTTING_DOWN);
        }
        let identities = self.identities.load();
        let shown = grounds.shown.clone();
        let (grounds, way) = grounds_now(&identities, client, grounds)?;
        let standing = match &shown {
            Evidence::Session(session) => {
                if !gateway.sealer.stands(session) {
                    return Err(Refusal::INVALID_AUTH_TOKEN);
                }
                // Its user may be etcd's again, and its client log in there: it comes again, and is told by what it shows.
                if !line_is_same(gateway, session) || has_left_the_file(gateway, &grounds) {
                    return Err(Refusal::SHUTTING_DOWN);
                }
                of_session(gateway, &identities, client, grounds, session)
            }
            Evidence::Jwt(verified, token) => {
                // It was signed with the key of the cluster that was left.
                if verified.auth_revision.is_some() && gateway.sealer.has_followed() {
                    return Err(Refusal::INVALID_AUTH_TOKEN);
                }
                let when = verified.expires.checked_sub(BEFORE).unwrap_or(verified.expires);
                let when = when.min(SystemTime::now());
                let good = self.verified.verify(&identities.issuers, token.expose(), when);
                let good = good.map_err(|_bad| Refusal::INVALID_AUTH_TOKEN)?;
                let grounds = match way {
                    Identify::Certificate => grounds,
                    _ => Grounds { peer: good.peer.clone(), ..grounds },
                };
                identities.standing(client, grounds, None, Brought::Nothing)
            }
            Evidence::Connection => identities.standing(client, grounds, None, Brought::Nothing),
            Evidence::Ignored => match gateway.door.members.auth.now() {
                Auth::Off => self.as_nobody(gateway, &identities, client, grounds)?,
                Auth::Unknown => return Err(Refusal::NOTHING_SENT),
                Auth::On => return Err(Refusal::INVALID_AUTH_TOKEN),
            },
        };
        let now = decided(gateway, standing)?;
        if now.user != caller.user {
            let nobody = now.user.is_none() && gateway.door.members.auth.now() != Auth::Off;
            return Err(if nobody { Refusal::USER_EMPTY } else { Refusal::INVALID_AUTH_TOKEN });
        }
        let Some(user) = &caller.user else { return Ok(now) };
        match gateway.sealer.admit(user) {
            Err(Inadmissible::Blocked) => Err(Refusal::PERMISSION_DENIED),
            Ok(is) if generation.is_some_and(|then| then < is) => Err(Refusal::INVALID_AUTH_TOKEN),
            Ok(_) | Err(Inadmissible::NotKnown) => Ok(now),
        }
    }

    /// The generation of the user as whom it goes upstream; none where it goes as nobody.
    ///
    /// # Errors
    /// The user is blocked, or it is not known who is.
    pub fn generation(&self, gateway: &Gateway, caller: &Caller) -> Result<Option<u64>, Refusal> {
        let Some(user) = &caller.user else { return Ok(None) };
        gateway.sealer.admit(user).map(Some).map_err(|why| match why {
            Inadmissible::Blocked => Refusal::PERMISSION_DENIED,
            Inadmissible::NotKnown => Refusal::NOTHING_SENT,
        })
    }
}

/// What a session is when its user has moved into the users file, and its password is that of the line there.
pub(super) fn by_file(session: Rc<Session>) -> Grounds {
    let peer = Peer::File(session.peer.user().clone());
    Grounds { peer, shown: Evidence::Session(session) }
}

/// Who calls by what was shown, by the way that decides now: what listeners look at follows the rules.
fn grounds_now(
    identities: &Identities,
    client: &Client,
    then: Grounds,
) -> Result<(Grounds, Identify), Refusal> {
    let ways = identities.ways(client);
    let shown = match &then.shown {
        Evidence::Session(_) => Some(Identify::Token),
        Evidence::Jwt(..) => Some(Identify::Jwt),
        Evidence::Connection | Evidence::Ignored => None,
    };
    let way = match (way(ways, client, shown), &then.shown) {
        (Ok(way), _) => way,
        // It was lent, where no token is looked at.
        (Err(_), Evidence::Session(_)) if client.listener.lend_login_identity => Identify::Token,
        (Err(refusal), _) => return Err(refusal),
    };
    let peer = match (way, &client.certificate) {
        (Identify::Certificate, Some(certificate)) => certificate.clone(),
        (Identify::Default, _) if ways.contains(&way) => Peer::Listener(Arc::clone(&client.listener.name)),
        (Identify::Default, _) => return Err(Refusal::USER_EMPTY),
        _ => then.peer,
    };
    Ok((Grounds { peer, shown: then.shown }, way))
}

/// Whose line in the users file is gone, or another, has another password or none (rules 12).
pub(super) fn line_is_same(gateway: &Gateway, session: &Session) -> bool {
    match session.proof {
        Proof::File { line } => gateway.logins.line(session.peer.user()) == Some(LineMark(line)),
        Proof::None | Proof::Etcd { .. } => true,
    }
}

/// Whoever was taken for a user of the users file that has no line there any more.
fn has_left_the_file(gateway: &Gateway, grounds: &Grounds) -> bool {
    matches!(&grounds.peer, Peer::File(user) if gateway.logins.line(user).is_none())
}

/// Whom a session says its bearer is.
pub(super) fn peer_of(session: &Session) -> Peer {
    let user = session.peer.user().clone();
    match session.peer.namespace() {
        Namespace::Password => Peer::Password(user),
        Namespace::File => Peer::File(user),
    }
}

/// What the rules say of a session's bearer.
pub(super) fn of_session(
    gateway: &Gateway,
    identities: &Identities,
    client: &Client,
    grounds: Grounds,
    session: &Session,
) -> Standing {
    // One whose user has moved into the users file is that file's, and brings nothing of its own.
    let (SessionPeer::Password { user, password }, Peer::Password(_)) = (&session.peer, &grounds.peer) else {
        return identities.standing(client, grounds, None, Brought::Nothing);
    };
    let own = || gateway.door.credentials.identity(user, password);
    let proved = matches!(session.proof, Proof::Etcd { .. });
    let brought = if proved { Brought::Proved(&own) } else { Brought::Unproved(&own) };
    identities.standing(client, grounds, None, brought)
}

/// As whom a peer goes upstream that the rules say this of.
///
/// # Errors
/// It does not.
pub(super) fn decided(gateway: &Gateway, standing: Standing) -> Result<Rc<Caller>, Refusal> {
    match standing.rank {
        Rank::Known(caller) => Ok(caller),
        Rank::Unknown | Rank::Unproved if gateway.door.members.auth.now() == Auth::Off => {
            Ok(Rc::new(Caller::new(As::Nobody, None, standing.grounds)))
        }
        // Whether there are users at all nobody has told yet: a refusal would be for good.
        Rank::Unknown | Rank::Unproved if gateway.door.members.auth.now() == Auth::Unknown => {
            Err(Refusal::NOTHING_SENT)
        }
        Rank::Unproved => Err(Refusal::INVALID_AUTH_TOKEN),
        Rank::Unknown | Rank::Denied => Err(Refusal::PERMISSION_DENIED),
    }
}
