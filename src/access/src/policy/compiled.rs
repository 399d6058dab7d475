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
use super::own_grants::OwnGrants;
use super::permit_set::{PermitSet, PolicyGeneration};
use super::rules_in_force::{RulesGeneration, RulesInForce};
use keyward_config::policy_document::{PolicyBinding, PolicyDocument};
use keyward_config::{Config, PolicyMode, PolicySettings};
use keyward_etcd::identity::Peer;
use keyward_etcd::rpc::key_range::end_of_prefix;

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
    own_grants: OwnGrants,
}

/// A caller, as far as bindings tell callers apart.
#[derive(Clone, Copy, Debug)]
pub struct PolicySubject<'a> {
    /// The proved peer that gives the caller its name.
    pub peer: &'a Peer,
    /// A second proved peer: the listener, beside a certificate that no way of identification takes.
    pub also: Option<&'a Peer>,
    /// A login that nothing proved.
    pub claimed: Option<ClaimedLogin<'a>>,
    /// The etcd user of the peer's calls.
    pub etcd_user: Option<&'a str>,
    /// The client's address; `None` on a unix socket.
    pub address: Option<IpAddr>,
    /// The listener's name.
    pub listener: &'a str,
}

/// A login that nothing proved, since auth is off at etcd (docs/decisions.md#d11). Its bindings confine and
/// limit the caller, and give no role.
#[derive(Clone, Copy, Debug)]
pub struct ClaimedLogin<'a> {
    /// The peer that the login claims to be.
    pub peer: &'a Peer,
    /// The etcd user of this peer.
    pub etcd_user: Option<&'a str>,
}

impl<'a> PolicySubject<'a> {
    /// A caller with one proved peer and no claim.
    #[must_use]
    pub fn of(
        peer: &'a Peer,
        etcd_user: Option<&'a str>,
        address: Option<IpAddr>,
        listener: &'a str,
    ) -> Self {
        Self { peer, also: None, claimed: None, etcd_user, address, listener }
    }

    /// The caller that the claim would be if it were proved.
    fn as_claimed(self) -> Option<Self> {
        let ClaimedLogin { peer, etcd_user } = self.claimed?;
        Some(Self { peer, also: None, claimed: None, etcd_user, ..self })
    }
}

impl Policy {
    /// Compiles `rules` under a configuration for decisions from `now` on, up to [`Policy::next_end`].
    #[must_use]
    pub fn of(config: &Config, rules: &RulesInForce, now: SystemTime) -> Self {
        let settings = Arc::clone(&config.policy);
        Self::new(settings, rules.generation(config), config.own_prefixes(), now)
    }

    /// Compiles rules under the settings of a policy, with key prefixes closed to every client. Nothing but
    /// the settings is taken from the settings: their own document may not be in force.
    pub(super) fn new<'a>(
        settings: Arc<PolicySettings>,
        rules: RulesGeneration,
        own_prefixes: impl Iterator<Item = &'a str>,
        now: SystemTime,
    ) -> Self {
        let RulesGeneration { number, document, is_known } = rules;
        let closed = own_prefixes.map(|prefix| KeyInterval {
            start: prefix.as_bytes().into(),
            end: end_of_prefix(prefix.as_bytes()).map(Into::into),
            grant: GrantId { role: 0, grant: 0 },
        });
        let closed = Arc::new(IntervalSet::new(closed.collect()));
        let by_roles = Mutex::default();
        let own_grants = OwnGrants::new(Arc::clone(&document));
        Self { settings, document, number, is_known, compiled_at: now, closed, by_roles, own_grants }
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

    /// The generation of the rules.
    #[must_use]
    pub fn generation(&self) -> PolicyGeneration {
        PolicyGeneration { number: self.number, digest: self.document.digest }
    }

    /// The bindings with an end that had not ended when the policy was compiled.
    pub fn temporary_bindings(&self) -> impl Iterator<Item = &PolicyBinding> {
        let holds = |binding: &&PolicyBinding| binding.until.is_some_and(|end| end > self.compiled_at);
        self.document.bindings.iter().filter(holds)
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
        let is_bound = |peer: &Peer| {
            let in_group = |at: &usize| {
                let group = self.document.groups.get(*at);
                group.is_some_and(|group| group.members.iter().any(|member| member.matches(peer)))
            };
            group.as_ref().is_none_or(in_group) && conditions.hold(peer, subject.address)
        };
        until.is_none_or(|until| until > self.compiled_at)
            && listener.as_ref().is_none_or(|name| **name == *subject.listener)
            && etcd_user.as_ref().is_none_or(|user| Some(&**user) == subject.etcd_user)
            && (is_bound(subject.peer) || subject.also.is_some_and(is_bound))
    }

    /// The permissions of a caller.
    #[must_use]
    pub fn permits<'p>(&'p self, subject: PolicySubject<'p>) -> PermitSet {
        let mut roles = Vec::new();
        let mut mode = None;
        let texts = VariableTexts { peer: subject.peer, etcd_user: subject.etcd_user };
        let claimed = subject.as_claimed();
        let claimed_texts =
            |subject: PolicySubject<'p>| VariableTexts { peer: subject.peer, etcd_user: subject.etcd_user };
        let of_listener = self.settings.listener_namespaces.iter();
        let mut namespaces: Vec<_> = of_listener
            .filter(|(listener, _)| **listener == *subject.listener)
            .map(|(_, namespace)| (namespace, claimed.map_or(texts, claimed_texts)))
            .collect();
        let mut claimed_roles = Vec::new();
        let mut claimed_mode = PolicyMode::Off;
        for (_, binding) in claimed.into_iter().flat_map(|claimed| self.bindings(claimed)) {
            namespaces.extend(binding.namespace.iter().zip(claimed.map(claimed_texts)));
            claimed_roles.extend_from_slice(&binding.roles);
            claimed_mode = claimed_mode.max(binding.mode.unwrap_or_default());
        }
        for (_, binding) in self.bindings(subject) {
            namespaces.extend(binding.namespace.iter().map(|namespace| (namespace, texts)));
            roles.extend_from_slice(&binding.roles);
            // Of several modes, the strictest holds.
            mode = mode.max(binding.mode);
        }
        roles.sort_unstable();
        roles.dedup();
        claimed_roles.retain(|role| !roles.contains(role));
        claimed_roles.sort_unstable();
        claimed_roles.dedup();
        // A claim never makes the mode weaker.
        let mode = mode.unwrap_or(self.settings.mode).max(claimed_mode);
        let own = (mode != PolicyMode::Off && ActionGrants::have_variables(&self.document, &roles))
            .then(|| self.own_grants.of(&roles, texts));
        PermitSet {
            mode,
            namespace: CallerNamespace::of(&namespaces),
            lease_scope: self.settings.namespace_leases,
            unknown_methods: self.settings.unknown_methods,
            generation: self.generation(),
            shared: if mode == PolicyMode::Off { Arc::default() } else { self.shared(&roles) },
            roles: roles.into(),
            claimed_roles: claimed_roles.into(),
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
