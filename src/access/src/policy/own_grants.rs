//! Grants with variables, compiled once for a caller.
//!
//! Owns: the compiled grants by roles and by the texts that replace variables, and their bound. Must not
//! know: how grants are compiled. Invariants: callers that alternate on a connection, as behind a gateway, do
//! not compile their grants again for each call, and neither does a renewed token with the same texts; what
//! is kept is bounded in bytes, and a caller displaces those alone that were not seen for longest.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::grants::{ActionGrants, GrantPart, VariableTexts, values};
use keyward_config::policy_document::{KeyTemplate, KeyVariable, PolicyDocument, TemplatePart};

/// Bytes of all kept grants, at most. A caller's grants have some 4 MiB at most.
const MOST_BYTES: usize = 32 << 20;
/// Bytes of a kept entry beside its texts and grants, about.
const ENTRY: usize = 256;

/// The compiled grants of callers.
#[derive(Debug)]
pub(super) struct OwnGrants {
    document: Arc<PolicyDocument>,
    /// The variables of the document: all that tells one caller's grants from another's.
    variables: Vec<KeyVariable>,
    kept: Mutex<KeptGrants>,
}

/// The kept grants, in two generations: what is used moves to the younger one, and once that has half of the
/// room, the older one goes.
#[derive(Debug, Default)]
struct KeptGrants {
    young: GrantGeneration,
    old: HashMap<GrantedCaller, KeptEntry>,
}

#[derive(Debug, Default)]
struct GrantGeneration {
    by_caller: HashMap<GrantedCaller, KeptEntry>,
    bytes: usize,
}

#[derive(Debug)]
struct KeptEntry {
    grants: Arc<ActionGrants>,
    bytes: usize,
}

/// All that decides about the compiled grants of a caller: the roles, and the texts of each variable.
#[derive(Debug, PartialEq, Eq, Hash)]
struct GrantedCaller {
    roles: Box<[usize]>,
    texts: Box<[Box<[Box<str>]>]>,
}

impl KeptGrants {
    fn find(&mut self, caller: &GrantedCaller) -> Option<Arc<ActionGrants>> {
        if let Some(known) = self.young.by_caller.get(caller) {
            return Some(Arc::clone(&known.grants));
        }
        let (caller, known) = self.old.remove_entry(caller)?;
        let grants = Arc::clone(&known.grants);
        self.keep(caller, known);
        Some(grants)
    }

    fn keep(&mut self, caller: GrantedCaller, entry: KeptEntry) {
        if self.young.bytes + entry.bytes > MOST_BYTES / 2 {
            self.old = std::mem::take(&mut self.young).by_caller;
        }
        self.young.bytes += entry.bytes;
        if let Some(before) = self.young.by_caller.insert(caller, entry) {
            self.young.bytes -= before.bytes;
        }
    }
}

impl OwnGrants {
    /// Nothing yet, for a document.
    pub(super) fn new(document: Arc<PolicyDocument>) -> Self {
        let roles = document.roles.iter();
        let grants = roles.flat_map(|role| role.allow.iter().chain(&role.deny));
        let parts = grants.filter_map(|grant| grant.keys.as_ref()).flat_map(|keys| keys.templates());
        let mut variables = Vec::new();
        for part in parts.flat_map(KeyTemplate::parts) {
            if let TemplatePart::Variable(variable) = part
                && !variables.contains(variable)
            {
                variables.push(variable.clone());
            }
        }
        Self { document, variables, kept: Mutex::default() }
    }

    /// The grants of `roles` with the texts of a caller.
    pub(super) fn of(&self, roles: &[usize], texts: VariableTexts<'_>) -> Arc<ActionGrants> {
        let owned = |variable| values(variable, texts).into_iter().map(Into::into).collect();
        let caller = GrantedCaller { roles: roles.into(), texts: self.variables.iter().map(owned).collect() };
        if let Some(known) = self.kept(|kept| kept.find(&caller)) {
            return known;
        }
        // Without the lock: another shard may compile the same.
        let grants = Arc::new(ActionGrants::new(&self.document, roles, GrantPart::Own(texts)));
        let made = Arc::clone(&grants);
        self.kept(|kept| kept.keep_new(caller, grants));
        made
    }

    fn kept<T>(&self, look: impl FnOnce(&mut KeptGrants) -> T) -> T {
        look(&mut self.kept.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl KeptGrants {
    fn keep_new(&mut self, caller: GrantedCaller, grants: Arc<ActionGrants>) {
        let texts = caller.texts.iter().flatten().map(|text| text.len() + size_of::<Box<str>>());
        let bytes = ENTRY + size_of_val(&*caller.roles) + texts.sum::<usize>() + grants.bytes();
        if bytes <= MOST_BYTES / 2 {
            self.keep(caller, KeptEntry { grants, bytes });
        }
    }

    #[cfg(test)]
    fn bytes(&self) -> usize {
        self.young.bytes + self.old.values().map(|entry| entry.bytes).sum::<usize>()
    }
}

#[cfg(test)]
mod tests {
    use super::super::grants::MOST_OWN_INTERVALS;
    use super::*;
    use keyward_etcd::identity::Peer;
    use keyward_etcd::identity::peer::JwtClaims;
    use keyward_etcd::rpc::touch::Action;

    fn rules(count: usize) -> Arc<PolicyDocument> {
        let rule =
            |at| format!("[[role.allow]]\nactions = ['read', 'write']\nprefix = '/{{claim.groups}}/{at}/'\n");
        let rules: String = (0..count).map(rule).collect();
        let folder = tempfile::tempdir().unwrap();
        let text = format!("[[role]]\nname = 'r'\n{rules}[[binding]]\neveryone = true\nroles = ['r']\n");
        std::fs::write(folder.path().join("policy.toml"), text).unwrap();
        let text = "listener = [{ name = 'a', address = '127.0.0.1:1' }]\n\
                    cluster.endpoints = ['http://127.0.0.1:2']\npolicy.file = 'policy.toml'\n";
        let path = folder.path().join("config.toml");
        std::fs::write(&path, text).unwrap();
        let (config, _) = keyward_config::load(&path).unwrap_or_else(|faults| panic!("{faults}"));
        Arc::clone(&config.policy.document)
    }

    fn holder(number: usize, groups: usize, expiry: usize) -> Peer {
        let groups = (0..groups).map(|group| format!("g{number}-{group}")).collect();
        let claims = [("groups".to_owned(), groups), ("exp".to_owned(), vec![expiry.to_string()])];
        let claims = Arc::new(claims.into_iter().collect::<JwtClaims>());
        Peer::Jwt { issuer: "iss".into(), subject: "s".into(), claims }
    }

    fn grants(own: &OwnGrants, peer: &Peer) -> Arc<ActionGrants> {
        own.of(&[0], VariableTexts { peer, etcd_user: None })
    }

    #[test]
    fn callers_in_turn_and_renewed_tokens_are_compiled_once() {
        let own = OwnGrants::new(rules(300));
        let first = [0, 1].map(|number| grants(&own, &holder(number, 50, 0)));
        for expiry in 1..4 {
            for (number, first) in first.iter().enumerate() {
                let again = grants(&own, &holder(number, 50, expiry));
                assert!(Arc::ptr_eq(first, &again), "compiled again");
            }
        }
    }

    /// The grants of one caller are a small part of what is kept, however many values its claims have.
    #[test]
    fn a_caller_has_few_intervals_whatever_its_claims_and_rules() {
        for (count, values, is_granted) in
            [(300, 54, true), (300, 55, false), (300, 256, false), (30, 256, true), (30, 257, false)]
        {
            let own = OwnGrants::new(rules(count));
            let made = grants(&own, &holder(0, values, 0));
            let is_allowed = made.allowed_run(Action::Write, b"/g0-0/7/x").is_some();
            assert_eq!(is_allowed, is_granted, "{count} rules, {values} values");
            assert!(made.bytes() <= MOST_BYTES / 4, "{} bytes", made.bytes());
        }
        let document = rules(1);
        let most_bytes = |groups| {
            let claims = [("groups".to_owned(), groups)].into_iter().collect::<JwtClaims>();
            let peer = Peer::Jwt { issuer: "iss".into(), subject: "s".into(), claims: Arc::new(claims) };
            grants(&OwnGrants::new(Arc::clone(&document)), &peer).bytes()
        };
        assert!(most_bytes(vec!["x".repeat(1 << 20)]) == 0, "one long value");
        assert!(most_bytes(vec!["x".repeat(1000); 200]) == 0, "many long values");
        const { assert!(MOST_OWN_INTERVALS * 256 <= MOST_BYTES / 4) };
    }

    #[test]
    fn one_caller_more_displaces_those_not_seen_for_longest() {
        let own = OwnGrants::new(rules(100));
        let dear = holder(0, 100, 0);
        let kept = grants(&own, &dear);
        for number in 1..60 {
            drop(grants(&own, &holder(number, 100, 0)));
            assert!(Arc::ptr_eq(&kept, &grants(&own, &dear)), "displaced by {number}");
            assert!(own.kept(|kept| kept.bytes()) <= MOST_BYTES);
        }
        let again = grants(&own, &holder(1, 100, 0));
        assert!(again.allowed_run(Action::Read, b"/g1-0/7/x").is_some(), "the answer does not depend on it");
    }
}
