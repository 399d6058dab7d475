//! A policy ready for decisions: published whole, and replaced whole.
//!
//! Owns: the selection of a caller's bindings, roles and mode, and the sharing of compiled grants. Must not
//! know: sockets, clocks (the time is an argument of the compilation). Invariants: a policy has one
//! generation; a binding that has ended gives nothing; callers with the same roles share the compiled grants.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use super::caller_namespace::CallerNamespace;
use super::grants::{ActionGrants, GrantPart, VariableTexts};
use super::interval_set::{GrantId, IntervalSet, KeyInterval};
use super::permit_set::{PermitSet, PolicyGeneration};
use super::rules_in_force::RulesInForce;
use crate::config::policy_document::{PolicyBinding, PolicyDocument};
use crate::config::{Config, PolicyMode, PolicySettings};
use crate::identity::Peer;
use crate::rpc::key_range::end_of_prefix;

/// Most sets of roles whose compiled grants are kept.
const MOST_ROLE_SETS: usize = 1024;

/// A compiled policy.
#[derive(Debug)]
pub struct Policy {
    settings: Arc<PolicySettings>,
    document: Arc<PolicyDocument>,
    number: u64,
    is_known: bool,
    compiled_at: SystemTime,
    closed: Arc<IntervalSet>,
    /// Compiled grants by roles. The lock is held while a caller's permissions are looked up, once a caller.
    by_roles: Mutex<HashMap<Box<[usize]>, Arc<ActionGrants>>>,
}

/// A caller, as far as bindings tell callers apart.
#[derive(Clone, Copy, Debug)]
pub struct PolicySubject<'a> {
    /// The peer.
    pub peer: &'a Peer,
    /// The etcd user of the peer's calls.
    pub etcd_user: Option<&'a str>,
    /// The client's address; `None` on a unix socket.
    pub address: Option<IpAddr>,
    /// The listener's name.
    pub listener: &'a str,
}

impl Policy {
    /// Compiles `rules` under a configuration for decisions from `now` on, up to [`Policy::next_end`].
    #[must_use]
    pub fn of(config: &Config, rules: &RulesInForce, now: SystemTime) -> Self {
        let (number, document) = rules.generation(config);
        let is_known = !matches!(rules, RulesInForce::Unknown);
        let settings = Arc::clone(&config.policy);
        Self { document, number, is_known, ..Self::new(settings, config.own_prefixes(), now) }
    }

    /// Compiles a policy, with key prefixes closed to every client.
    pub(super) fn new<'a>(
        settings: Arc<PolicySettings>,
        own_prefixes: impl Iterator<Item = &'a str>,
        now: SystemTime,
    ) -> Self {
        let closed = own_prefixes.map(|prefix| KeyInterval {
            start: prefix.as_bytes().into(),
            end: end_of_prefix(prefix.as_bytes()).map(Into::into),
            grant: GrantId { role: 0, grant: 0 },
        });
        let closed = Arc::new(IntervalSet::new(closed.collect()));
        let document = Arc::clone(&settings.document);
        let by_roles = Mutex::default();
        Self { settings, document, number: 0, is_known: true, compiled_at: now, closed, by_roles }
    }

    /// False before the stored policy was read: no caller may be admitted then.
    #[must_use]
    pub fn is_known(&self) -> bool {
        self.is_known
    }

    /// The rules.
    #[must_use]
    pub fn document(&self) -> &PolicyDocument {
        &self.document
    }

    /// The settings of the policy. The rules in force are those of [`Policy::document`], which may be stored.
    #[must_use]
    pub fn settings(&self) -> &PolicySettings {
        &self.settings
    }

    /// The end of the next binding to end, if any: the policy is to be compiled again then.
    #[must_use]
    pub fn next_end(&self) -> Option<SystemTime> {
        let ends = self.document.bindings.iter().filter_map(|binding| binding.until);
        ends.filter(|end| *end > self.compiled_at).min()
    }

    /// The bindings of a caller, in the order of the document.
    pub fn bindings<'p>(
        &'p self,
        subject: PolicySubject<'p>,
    ) -> impl Iterator<Item = (usize, &'p PolicyBinding)> {
        let all = self.document.bindings.iter().enumerate();
        all.filter(move |(_, binding)| self.binds(binding, subject))
    }

    fn binds(&self, binding: &PolicyBinding, subject: PolicySubject<'_>) -> bool {
        let PolicyBinding { conditions, group, etcd_user, listener, until, .. } = binding;
        let in_group = |at: &usize| {
            let group = self.document.groups.get(*at);
            group.is_some_and(|group| group.members.iter().any(|member| member.matches(subject.peer)))
        };
        until.is_none_or(|until| until > self.compiled_at)
            && listener.as_ref().is_none_or(|name| **name == *subject.listener)
            && etcd_user.as_ref().is_none_or(|user| Some(&**user) == subject.etcd_user)
            && group.as_ref().is_none_or(in_group)
            && conditions.hold(subject.peer, subject.address)
    }

    /// The permissions of a caller.
    #[must_use]
    pub fn permits(&self, subject: PolicySubject<'_>) -> PermitSet {
        let mut roles = Vec::new();
        let mut mode = None;
        let of_listener = self.settings.listener_namespaces.iter();
        let mut namespaces: Vec<_> = of_listener
            .filter(|(listener, _)| **listener == *subject.listener)
            .map(|(_, namespace)| namespace)
            .collect();
        for (_, binding) in self.bindings(subject) {
            namespaces.extend(&binding.namespace);
            roles.extend_from_slice(&binding.roles);
            // Of several modes, the strictest holds.
            mode = mode.max(binding.mode);
        }
        roles.sort_unstable();
        roles.dedup();
        let mode = mode.unwrap_or(self.settings.mode);
        let texts = VariableTexts { peer: subject.peer, etcd_user: subject.etcd_user };
        let own = (mode != PolicyMode::Off && ActionGrants::have_variables(&self.document, &roles))
            .then(|| Box::new(ActionGrants::new(&self.document, &roles, GrantPart::Own(texts))));
        PermitSet {
            mode,
            namespace: CallerNamespace::of(&namespaces, texts),
            unknown_methods: self.settings.unknown_methods,
            generation: PolicyGeneration { number: self.number, digest: self.document.digest },
            shared: if mode == PolicyMode::Off { Arc::default() } else { self.shared(&roles) },
            roles: roles.into(),
            document: Arc::clone(&self.document),
            own,
            closed: Arc::clone(&self.closed),
        }
    }

    fn shared(&self, roles: &[usize]) -> Arc<ActionGrants> {
        let mut by_roles = self.by_roles.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = by_roles.get(roles) {
            return Arc::clone(known);
        }
        if by_roles.len() >= MOST_ROLE_SETS {
            by_roles.clear();
        }
        let made = Arc::new(ActionGrants::new(&self.document, roles, GrantPart::Shared));
        by_roles.insert(roles.into(), Arc::clone(&made));
        made
    }
}
