//! A connection's memory of its callers.
//!
//! Owns: the latest decisions on the connection's callers, and the login lent to calls without a credential
//! (docs/decisions.md#d14). Must not know: how the decisions were made.
//! Invariants: decisions by replaced rules are forgotten; a login is lent only to gRPC calls about leases and
//! members, and to no call once a second peer or a call over JSON has appeared.

use std::rc::Rc;
use std::sync::Arc;

use super::{CallerEvidence, Identities, PeerStanding};
use keyward_base::secret::Secret;
use keyward_config::jwt::VerifiedJwt;
use keyward_downstream::session::{LastOpened, Session, SessionPeer};
use keyward_etcd::rpc::method::{Class, Method};
use keyward_etcd::rpc::schema::MessageId;

/// A connection's memory of its callers.
pub struct ConnectionCallers {
    /// The rules behind the remembered decisions.
    pub(super) identities: Arc<Identities>,
    pub(super) by_certificate: Option<PeerStanding>,
    pub(super) by_default: Option<PeerStanding>,
    /// The decision on the last token shown, nearly always shown again next.
    last: Option<PeerStanding>,
    /// The session of the last session token shown.
    pub(super) last_opened: LastOpened,
    logins: ConnectionLogins,
}

/// The peers logged in on the connection.
enum ConnectionLogins {
    Nobody,
    /// A single peer: name and token.
    One(String, Rc<Secret<Vec<u8>>>),
    /// Several peers, so a call without a token belongs to none for certain.
    Several,
}

impl ConnectionCallers {
    pub(super) fn nothing(identities: Arc<Identities>) -> Self {
        Self {
            identities,
            by_certificate: None,
            by_default: None,
            last: None,
            last_opened: LastOpened::default(),
            logins: ConnectionLogins::Nobody,
        }
    }

    /// Forgets decisions by rules other than `identities`.
    pub(super) fn follow(&mut self, identities: &Arc<Identities>) {
        if !Arc::ptr_eq(&self.identities, identities) {
            self.identities = Arc::clone(identities);
            (self.by_certificate, self.by_default, self.last) = (None, None, None);
        }
    }

    /// The decision on the bearer of this session's token, if the session was shown last, and proved as much
    /// as now: `claims` is true for a session that proves nothing.
    pub(super) fn of_session(&self, shown: &Rc<Session>, claims: bool) -> Option<PeerStanding> {
        let last = self.last.as_ref()?;
        let same =
            matches!(&last.grounds.evidence, CallerEvidence::Session(known) if Rc::ptr_eq(known, shown));
        (same && last.grounds.claimed().is_some() == claims).then(|| last.clone())
    }

    /// The decision on the bearer of this JWT, if shown last.
    pub(super) fn of_jwt(&self, shown: &Rc<VerifiedJwt>) -> Option<PeerStanding> {
        let last = self.last.as_ref()?;
        let same =
            matches!(&last.grounds.evidence, CallerEvidence::Jwt(known, _) if Rc::ptr_eq(known, shown));
        same.then(|| last.clone())
    }

    pub(super) fn keep(&mut self, standing: PeerStanding) -> PeerStanding {
        self.last.insert(standing).clone()
    }

    /// Ends the lending of logins: a peer without a login has appeared, or a call that is no gRPC call, so a
    /// call without a token is ambiguous.
    pub fn stop_lending(&mut self) {
        self.logins = ConnectionLogins::Several;
    }

    /// Notes that `token` identified `peer`, or was just issued to `peer`.
    pub fn note_peer(&mut self, peer: &SessionPeer, token: &[u8]) {
        let name = peer.to_string();
        self.logins = match &self.logins {
            ConnectionLogins::Several => ConnectionLogins::Several,
            ConnectionLogins::One(known, _) if *known != name => ConnectionLogins::Several,
            ConnectionLogins::Nobody | ConnectionLogins::One(..) => {
                ConnectionLogins::One(name, Rc::new(Secret::new(token.to_vec())))
            }
        };
    }

    /// The token of the login lent to a call of `method` without a credential.
    pub(super) fn lent_token(&self, method: &Method) -> Option<Rc<Secret<Vec<u8>>>> {
        let lends = method.class == Class::Lease || method.body == MessageId::MemberListRequest;
        match &self.logins {
            ConnectionLogins::One(_, token) if lends => Some(Rc::clone(token)),
            _ => None,
        }
    }
}
