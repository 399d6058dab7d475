//! What a connection knows of who calls over it.
//!
//! Owns: what was decided for it lately, and whose login may stand for calls that show nothing (rules 14). Must not
//! know: how it was decided. Invariants: what was decided by other rules than those that hold is forgotten; a login
//! stands for calls about leases and members only, and for none once a second peer has appeared.

use std::rc::Rc;
use std::sync::Arc;

use super::{Evidence, Identities, Standing};
use crate::downstream::session::{Session, SessionPeer};
use crate::jwt::Verified;
use crate::rpc::method::Method;
use crate::secret::Secret;

/// A connection's memory.
pub struct Remembered {
    /// The rules by which the rest was decided.
    pub(super) identities: Arc<Identities>,
    pub(super) by_certificate: Option<Standing>,
    pub(super) by_default: Option<Standing>,
    /// What was shown last: nearly always what is shown next.
    last: Option<Standing>,
    logins: Logins,
}

/// Who has logged in.
enum Logins {
    Nobody,
    /// One peer, by this name, with this token.
    One(String, Rc<Secret<Vec<u8>>>),
    /// Whose a call is that shows nothing, nobody can say.
    Several,
}

impl Remembered {
    pub(super) fn nothing(identities: Arc<Identities>) -> Self {
        Self { identities, by_certificate: None, by_default: None, last: None, logins: Logins::Nobody }
    }

    /// Forgets what was decided by other rules than these.
    pub(super) fn follow(&mut self, identities: &Arc<Identities>) {
        if !Arc::ptr_eq(&self.identities, identities) {
            self.identities = Arc::clone(identities);
            (self.by_certificate, self.by_default, self.last) = (None, None, None);
        }
    }

    /// What was decided for whoever shows this session's token, if it was the last that was shown.
    pub(super) fn of_session(&self, shown: &Rc<Session>) -> Option<Standing> {
        let last = self.last.as_ref()?;
        let same = matches!(&last.grounds.shown, Evidence::Session(known) if Rc::ptr_eq(known, shown));
        same.then(|| last.clone())
    }

    /// The same of a JWT.
    pub(super) fn of_jwt(&self, shown: &Rc<Verified>) -> Option<Standing> {
        let last = self.last.as_ref()?;
        let same = matches!(&last.grounds.shown, Evidence::Jwt(known, _) if Rc::ptr_eq(known, shown));
        same.then(|| last.clone())
    }

    pub(super) fn keep(&mut self, standing: Standing) -> Standing {
        self.last.insert(standing).clone()
    }

    /// Somebody appeared who did not log in: whose a call is that shows nothing, nobody can say any more.
    pub(super) fn nobody_lends(&mut self) {
        self.logins = Logins::Several;
    }

    /// `peer` was identified by `token`, or has just got it.
    pub fn appeared(&mut self, peer: &SessionPeer, token: &[u8]) {
        let name = peer.to_string();
        self.logins = match &self.logins {
            Logins::Several => Logins::Several,
            Logins::One(known, _) if *known != name => Logins::Several,
            Logins::Nobody | Logins::One(..) => Logins::One(name, Rc::new(Secret::new(token.to_vec()))),
        };
    }

    /// The token of the login that stands for a call of `method` that shows nothing.
    pub(super) fn lent(&self, method: &Method) -> Option<Rc<Secret<Vec<u8>>>> {
        let lends =
            method.service == "etcdserverpb.Lease" || method.path == "/etcdserverpb.Cluster/MemberList";
        match &self.logins {
            Logins::One(_, token) if lends => Some(Rc::clone(token)),
            _ => None,
        }
    }
}
