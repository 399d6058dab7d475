//! Rules that can apply to no caller of any listener.
//!
//! Owns: the possible callers of a listener, and finding the rules of none of them. Must not know: who is
//! connected, the consequence of a finding. Invariants (docs/decisions.md#d30): a reported rule applies to
//! no caller under this configuration, so a rule is reported only if that is certain; the time, the state of
//! etcd and the users file change no finding.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use keyward_config::policy_document::{PolicyBinding, PolicyDocument};
use keyward_config::{
    Address, ClientAuth, Conditions, Config, Identify, Listener, MapRule, MappingOutcome, PasswordSources,
    ServerTls,
};
use keyward_etcd::identity::pattern::PeerPattern;

/// A rule that can apply to no caller, such as a namespace that confines nobody.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct UnreachableRule {
    /// The rule, as in `policy: binding[1]` or `map[0]`.
    pub rule: String,
    /// The reason.
    pub reason: String,
}

impl fmt::Display for UnreachableRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: applies to no caller of any listener: {}", self.rule, self.reason)
    }
}

/// The rules of a configuration, and of the policy in force, that can apply to no caller.
#[must_use]
pub fn unreachable_rules(config: &Config, policy: &PolicyDocument) -> Vec<UnreachableRule> {
    let reach = RuleReach::of(config);
    let mut found = reach.unreachable_map_rules();
    found.extend(reach.unreachable_bindings(policy));
    found
}

/// The rules of a policy that can apply to no caller under a configuration.
#[must_use]
pub fn unreachable_bindings(config: &Config, policy: &PolicyDocument) -> Vec<UnreachableRule> {
    RuleReach::of(config).unreachable_bindings(policy)
}

/// The reason why no caller can be a peer of this pattern; `None` if a caller can.
#[must_use]
pub fn unreachable_peer(config: &Config, peer: &PeerPattern) -> Option<String> {
    let reach = RuleReach::of(config);
    let conditions = Conditions { peer: Some(peer.clone()), ..Conditions::default() };
    let is_reachable = reach.callers.iter().any(|caller| caller.fits(&conditions));
    (!is_reachable).then(|| reason_of_peer(peer).to_owned())
}

/// The callers that there can be, and the rules that map them.
struct RuleReach<'c> {
    config: &'c Config,
    callers: Vec<PossibleCaller<'c>>,
}

/// The proof of a possible caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PeerKind<'c> {
    Password,
    File,
    /// A certificate of this authority.
    Certificate(&'c str),
    /// A JWT of this issuer.
    Jwt(&'c str),
    EtcdToken,
    Listener,
}

/// A caller that a listener can have.
#[derive(Clone, Copy, Debug)]
struct PossibleCaller<'c> {
    kind: PeerKind<'c>,
    listener: &'c Listener,
}

impl<'c> RuleReach<'c> {
    fn of(config: &'c Config) -> Self {
        let callers = config.listeners.iter().flat_map(|listener| callers_of(config, listener));
        Self { config, callers: callers.collect() }
    }

    fn unreachable_map_rules(&self) -> Vec<UnreachableRule> {
        let mapping = &self.config.mapping;
        let rules = mapping.rules.iter().take(mapping.written).enumerate();
        let mut found = Vec::new();
        for (at, rule) in rules {
            let earlier = mapping.rules.iter().take(at).position(|earlier| earlier.covers(rule));
            let is_met = self.callers.iter().any(|caller| caller.fits(rule.conditions()));
            let reason = if !self.callers.iter().any(|caller| caller.is_mapped_by(rule)) && is_met {
                "its peers are mapped by no rule: identify of their listener lacks \"certificate\", or the \
                 rule lacks `peer`, which a rule about passwords of etcd needs"
                    .to_owned()
            } else if !is_met {
                reason_of(rule.conditions(), |conditions| {
                    self.callers.iter().any(|caller| caller.fits(conditions))
                })
            } else if let Some(earlier) = earlier {
                format!("map[{earlier}] decides about all of its peers, and comes first")
            } else {
                continue;
            };
            found.push(UnreachableRule { rule: format!("map[{at}]"), reason });
        }
        found
    }

    fn unreachable_bindings(&self, policy: &PolicyDocument) -> Vec<UnreachableRule> {
        let mut found = Vec::new();
        for (at, group) in policy.groups.iter().enumerate() {
            for (member_at, member) in group.members.iter().enumerate() {
                let conditions = Conditions { peer: Some(member.clone()), ..Conditions::default() };
                if !self.callers.iter().any(|caller| caller.fits(&conditions)) {
                    let rule = format!("policy: group[{at}].members[{member_at}]");
                    found.push(UnreachableRule { rule, reason: reason_of_peer(member).to_owned() });
                }
            }
        }
        for (at, binding) in policy.bindings.iter().enumerate() {
            if self.callers.iter().any(|caller| self.is_bound(caller, binding, policy)) {
                continue;
            }
            let reason = self.reason_of_binding(binding, policy);
            found.push(UnreachableRule { rule: format!("policy: binding[{at}]"), reason });
        }
        found
    }

    fn is_bound(
        &self,
        caller: &PossibleCaller<'_>,
        binding: &PolicyBinding,
        policy: &PolicyDocument,
    ) -> bool {
        let PolicyBinding { conditions, group, etcd_user, listener, .. } = binding;
        let is_member = |at: &usize| {
            let members = policy.groups.get(*at).map_or(&[][..], |group| &group.members[..]);
            members.iter().any(|member| {
                caller.fits(&Conditions { peer: Some(member.clone()), ..Conditions::default() })
            })
        };
        listener.as_ref().is_none_or(|name| *name == caller.listener.name)
            && caller.fits(conditions)
            && group.as_ref().is_none_or(is_member)
            && etcd_user.as_ref().is_none_or(|user| self.may_be_user(caller, conditions, user))
    }

    /// True if a rule, or the peer itself, may lead the caller to the etcd user.
    fn may_be_user(&self, caller: &PossibleCaller<'_>, conditions: &Conditions, user: &str) -> bool {
        // The etcd user beside a certificate that no way takes is that of the listener.
        let is_taken = caller.listener.identify.contains(&Identify::Certificate);
        let mapped = match caller.kind {
            PeerKind::Certificate(_) if !is_taken => PossibleCaller { kind: PeerKind::Listener, ..*caller },
            _ => *caller,
        };
        let is_itself = match (mapped.kind, &conditions.peer) {
            (PeerKind::Password, Some(PeerPattern::Password(name)))
            | (PeerKind::EtcdToken, Some(PeerPattern::EtcdToken(name))) => name.matches(user),
            (PeerKind::Password | PeerKind::EtcdToken, _) => true,
            _ => false,
        };
        let has_default = matches!(mapped.kind, PeerKind::File | PeerKind::Certificate(_) | PeerKind::Jwt(_))
            && self.config.mapping.default.as_ref().is_some_and(|default| default.as_str() == user);
        let leads = |rule: &MapRule| match rule.outcome() {
            MappingOutcome::User(named) => named.as_str() == user && mapped.is_mapped_by(rule),
            MappingOutcome::Same => mapped.kind != PeerKind::Listener && mapped.is_mapped_by(rule),
            MappingOutcome::Deny => false,
        };
        is_itself || has_default || self.config.mapping.rules.iter().any(leads)
    }

    fn reason_of_binding(&self, binding: &PolicyBinding, policy: &PolicyDocument) -> String {
        let blank = || PolicyBinding {
            conditions: Conditions::default(),
            group: None,
            etcd_user: None,
            listener: binding.listener.clone(),
            ..binding.clone()
        };
        let is_bound = |binding: &PolicyBinding| {
            self.callers.iter().any(|caller| self.is_bound(caller, binding, policy))
        };
        if !is_bound(&blank()) {
            return "no client of its listener can be a caller".to_owned();
        }
        if !is_bound(&PolicyBinding { group: binding.group, ..blank() }) {
            return "no caller can be a member of its group".to_owned();
        }
        if !is_bound(&PolicyBinding { etcd_user: binding.etcd_user.clone(), ..blank() }) {
            let reason =
                "no login, [[map]] rule, mapping.default or listener.default_user leads to its etcd_user";
            return reason.to_owned();
        }
        reason_of(&binding.conditions, |conditions| {
            is_bound(&PolicyBinding { conditions: conditions.clone(), ..blank() })
        })
    }
}

impl PossibleCaller<'_> {
    /// True if some peer of this kind meets the conditions.
    fn fits(&self, conditions: &Conditions) -> bool {
        let Conditions { peer, san_uri, san_dns, issuer, claims, network } = conditions;
        let is_certificate = matches!(self.kind, PeerKind::Certificate(_));
        let is_peer = |pattern: &PeerPattern| match (pattern, self.kind) {
            (PeerPattern::Password(_), PeerKind::Password)
            | (PeerPattern::File(_), PeerKind::File)
            | (PeerPattern::EtcdToken(_), PeerKind::EtcdToken) => true,
            (PeerPattern::Certificate { ca, .. }, PeerKind::Certificate(own)) => **ca == *own,
            (PeerPattern::Jwt { issuer, .. }, PeerKind::Jwt(own)) => **issuer == *own,
            (PeerPattern::Listener(name), PeerKind::Listener) => name.matches(&self.listener.name),
            _ => false,
        };
        let is_issuer = |issuer: &Arc<str>| self.kind == PeerKind::Jwt(issuer);
        let has_address = || match &self.listener.address {
            Address::Unix(_) => false,
            Address::Tcp(bound) => network.is_none_or(|network| {
                let is_proxied = !self.listener.proxy_protocol_from.is_empty();
                is_proxied || network.may_reach(bound.ip())
            }),
        };
        peer.as_ref().is_none_or(is_peer)
            && (is_certificate || san_uri.is_none() && san_dns.is_none())
            && issuer.as_ref().is_none_or(is_issuer)
            && (claims.is_empty() || matches!(self.kind, PeerKind::Jwt(_)))
            && (network.is_none() || has_address())
    }

    /// True if the rule may decide about a peer of this kind.
    fn is_mapped_by(&self, rule: &MapRule) -> bool {
        let denies = *rule.outcome() == MappingOutcome::Deny;
        let is_etcds = matches!(self.kind, PeerKind::Password | PeerKind::EtcdToken);
        let is_named = rule.conditions().peer.is_some() || denies || !is_etcds;
        // A certificate that no way takes can be denied, and is no etcd user.
        let is_taken = !matches!(self.kind, PeerKind::Certificate(_))
            || self.listener.identify.contains(&Identify::Certificate);
        is_named && (is_taken || denies) && self.fits(rule.conditions())
    }
}

/// The callers that the clients of a listener can be.
fn callers_of<'c>(config: &'c Config, listener: &'c Listener) -> Vec<PossibleCaller<'c>> {
    let ways = &listener.identify;
    let place = |wanted| ways.iter().position(|way| *way == wanted);
    let authority = listener.client_ca().map(|ca| &*ca.name);
    let is_required = matches!(listener.tls, Some(ServerTls { clients: ClientAuth::Required(_), .. }));
    let certificate_at = place(Identify::Certificate).filter(|_| is_required);
    // Before a way that every client of the listener shows, no other way decides.
    let decides =
        |way| place(way).is_some_and(|at| certificate_at.is_none_or(|certificate| at < certificate));
    let mut kinds = Vec::new();
    if decides(Identify::Token) {
        match config.passwords.sources {
            PasswordSources::Etcd => kinds.push(PeerKind::Password),
            PasswordSources::File => kinds.push(PeerKind::File),
            PasswordSources::FileThenEtcd | PasswordSources::EtcdThenFile => {
                kinds.extend([PeerKind::Password, PeerKind::File]);
            }
        }
    }
    if decides(Identify::Jwt) {
        kinds.extend(config.issuers.listed.iter().map(|issuer| PeerKind::Jwt(&issuer.issuer)));
        kinds.extend(config.issuers.etcd.as_ref().map(|_| PeerKind::EtcdToken));
    }
    let takes_certificates = ways.contains(&Identify::Certificate) || ways.contains(&Identify::Default);
    kinds.extend(authority.filter(|_| takes_certificates).map(PeerKind::Certificate));
    if decides(Identify::Default) {
        kinds.push(PeerKind::Listener);
    }
    kinds.into_iter().map(|kind| PossibleCaller { kind, listener }).collect()
}

/// The first condition that no caller meets by itself.
fn reason_of(conditions: &Conditions, is_met: impl Fn(&Conditions) -> bool) -> String {
    let of_peer = Conditions { peer: conditions.peer.clone(), ..Conditions::default() };
    if let Some(peer) = conditions.peer.as_ref().filter(|_| !is_met(&of_peer)) {
        return reason_of_peer(peer).to_owned();
    }
    if !is_met(&Conditions { network: conditions.network, ..Conditions::default() }) {
        return "no client has an address of its network: a unix socket has none".to_owned();
    }
    let (san_uri, san_dns) = (conditions.san_uri.clone(), conditions.san_dns.clone());
    if !is_met(&Conditions { san_uri, san_dns, ..Conditions::default() }) {
        return "no client's certificate makes the caller: see tls.client_ca and identify".to_owned();
    }
    let (issuer, claims) = (conditions.issuer.clone(), conditions.claims.clone());
    if !is_met(&Conditions { issuer, claims, ..Conditions::default() }) {
        return "no listener takes JWTs: see identify".to_owned();
    }
    "no caller meets all of its conditions".to_owned()
}

fn reason_of_peer(peer: &PeerPattern) -> &'static str {
    match peer {
        PeerPattern::Password(_) => {
            "no listener takes logins by passwords of etcd: see identify and login.sources"
        }
        PeerPattern::File(_) => "no listener takes logins by the users file: see identify and login.sources",
        PeerPattern::Certificate { .. } => {
            "no client's certificate makes the caller: identify of its listener has neither \"certificate\" \
             nor \"default\""
        }
        PeerPattern::Jwt { .. } => "no listener takes JWTs: see identify",
        PeerPattern::EtcdToken(_) => {
            "no listener takes tokens signed with etcd's key: see identify, [etcd_jwt] and [sign_jwt]"
        }
        PeerPattern::Listener(_) => {
            "no client of its listener is without a credential: identify lacks \"default\", or each client \
             is its certificate"
        }
    }
}
