//! Grants with variables, compiled once for a caller.
//!
//! Owns: the compiled grants by roles and texts of the caller, and their bound. Must not know: how grants are
//! compiled. Invariant: callers that alternate on a connection, as behind a gateway, do not compile their
//! grants again for each call.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::grants::{ActionGrants, GrantPart, VariableTexts};
use crate::config::policy_document::PolicyDocument;
use crate::identity::Peer;

/// Most runs of keys in all kept grants, of some 100 bytes each.
const MOST_RUNS: usize = 256 * 1024;
/// Most callers with kept grants.
const MOST_CALLERS: usize = 16 * 1024;

/// The compiled grants of callers.
#[derive(Debug, Default)]
pub(super) struct OwnGrants(Mutex<KeptGrants>);

#[derive(Debug, Default)]
struct KeptGrants {
    by_caller: HashMap<GrantedCaller, Arc<ActionGrants>>,
    runs: usize,
}

/// All that decides about the compiled grants of a caller.
#[derive(Debug, PartialEq, Eq, Hash)]
struct GrantedCaller {
    roles: Box<[usize]>,
    peer: Peer,
    etcd_user: Option<Box<str>>,
}

impl OwnGrants {
    /// The grants of `roles` with the texts of a caller.
    pub(super) fn of(
        &self,
        document: &PolicyDocument,
        roles: &[usize],
        texts: VariableTexts<'_>,
    ) -> Arc<ActionGrants> {
        let caller = GrantedCaller {
            roles: roles.into(),
            peer: texts.peer.clone(),
            etcd_user: texts.etcd_user.map(Into::into),
        };
        if let Some(known) = self.kept(|kept| kept.by_caller.get(&caller).map(Arc::clone)) {
            return known;
        }
        // Without the lock: another shard may compile the same.
        let made = Arc::new(ActionGrants::new(document, roles, GrantPart::Own(texts)));
        let runs = made.runs();
        self.kept(|kept| {
            if kept.runs + runs > MOST_RUNS || kept.by_caller.len() >= MOST_CALLERS {
                *kept = KeptGrants::default();
            }
            if runs <= MOST_RUNS && kept.by_caller.insert(caller, Arc::clone(&made)).is_none() {
                kept.runs += runs;
            }
        });
        made
    }

    fn kept<T>(&self, look: impl FnOnce(&mut KeptGrants) -> T) -> T {
        look(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
