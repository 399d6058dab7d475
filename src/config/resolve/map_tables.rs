//! Resolves `[[map]]` and `[mapping]`: the rules from peers to etcd users.
//!
//! Owns: the validity of a rule. Must not know: the precedence of rules. Invariants: a rule without possible
//! peers, or for a user without a credential, is a fault; `root` is reached only by a rule with one exact
//! peer.

use std::sync::Arc;

use super::Resolver;
use super::user_tables::{SAME, UserRows};
use crate::config::{Conditions, Listener, MapRule, MappingOutcome, MappingRules, ROOT, toml_file};
use crate::identity::UserName;
use crate::identity::pattern::{AddressRange, Attribute, Glob, PeerPattern};

/// Names available to a rule.
struct RuleNames<'a> {
    users: &'a UserRows,
    issuers: Vec<Arc<str>>,
    authorities: Vec<Arc<str>>,
    listeners: &'a [Arc<Listener>],
}

impl Resolver<'_> {
    /// Resolves the rules; `defaults` are the default users by listener.
    pub(super) fn mapping(
        &mut self,
        rows: Vec<toml_file::TomlMap>,
        mapping: toml_file::TomlMapping,
        users: &UserRows,
        issuers: Vec<Arc<str>>,
        listeners: &[Arc<Listener>],
        defaults: Vec<(Arc<str>, UserName)>,
    ) -> MappingRules {
        let mut authorities: Vec<Arc<str>> = Vec::new();
        for listener in listeners {
            let ca = listener.tls.as_ref().and_then(|tls| tls.clients.ca());
            authorities.extend(ca.map(|ca| Arc::clone(&ca.name)));
        }
        authorities.sort();
        authorities.dedup();
        let known = RuleNames { users, issuers, authorities, listeners };
        let mut rules = Vec::new();
        for (index, row) in rows.into_iter().enumerate() {
            rules.extend(self.map_rule(&format!("map[{index}]"), row, &known));
        }
        for (listener, user) in defaults {
            let peer = Some(PeerPattern::Listener(Glob::new(&listener)));
            let rule = MapRule::new(Conditions { peer, ..Conditions::default() }, MappingOutcome::User(user));
            rules.extend(self.checked("listener", rule));
        }
        let path = "mapping.default";
        let default = mapping.default.and_then(|name| self.user_named(path, &name, users));
        if default.as_ref().is_some_and(|user| user.as_str() == ROOT) {
            self.findings.fault(path, "would make everybody root");
        }
        MappingRules { rules, default }
    }

    fn map_rule(&mut self, path: &str, row: toml_file::TomlMap, known: &RuleNames<'_>) -> Option<MapRule> {
        let peer_path = format!("{path}.peer");
        let peer = row.peer.and_then(|text| self.peer(&peer_path, &text, known));
        let network_path = format!("{path}.network");
        let network = row.network.and_then(|text| self.checked(&network_path, text.parse::<AddressRange>()));
        let who = Conditions {
            peer,
            san_uri: row.san_uri.as_deref().map(Glob::new),
            san_dns: row.san_dns.as_deref().map(Glob::new),
            issuer: row
                .issuer
                .as_deref()
                .and_then(|name| self.issuer(&format!("{path}.issuer"), name, known)),
            claims: row
                .claim
                .unwrap_or_default()
                .iter()
                .map(|(name, value)| (name.clone(), Glob::new(value)))
                .collect(),
            network,
        };
        self.check_conditions(path, &who, known);
        let as_path = format!("{path}.as");
        let outcome = match (row.user.as_deref(), row.deny) {
            (Some(_), Some(true)) => {
                self.findings.fault(&as_path, "a rule says either `as` or `deny = true`");
                return None;
            }
            (None, Some(true)) => MappingOutcome::Deny,
            (Some(SAME), _) => {
                self.check_same(&as_path, &who);
                MappingOutcome::Same
            }
            (Some(name), _) => MappingOutcome::User(self.user_named(&as_path, name, known.users)?),
            (None, _) => {
                self.findings.missing(&as_path, "the etcd user is needed, or \"same\", or `deny = true`");
                return None;
            }
        };
        self.checked(&as_path, MapRule::new(who, outcome))
    }

    fn peer(&mut self, path: &str, text: &str, known: &RuleNames<'_>) -> Option<PeerPattern> {
        let peer = self.checked(path, PeerPattern::parse(text, &known.issuers))?;
        match &peer {
            PeerPattern::Certificate { ca, .. } if !known.authorities.contains(ca) => {
                self.findings.fault(path, format!("no listener has a client_ca of the name {ca:?}"));
            }
            PeerPattern::Listener(name)
                if !known.listeners.iter().any(|listener| name.matches(&listener.name)) =>
            {
                self.findings.fault(path, "names no listener");
            }
            _ => {}
        }
        Some(peer)
    }

    fn issuer(&mut self, path: &str, name: &str, known: &RuleNames<'_>) -> Option<Arc<str>> {
        let found = known.issuers.iter().find(|issuer| &***issuer == name).cloned();
        if found.is_none() {
            self.findings.fault(path, "names the issuer of no [[jwt]]");
        }
        found
    }

    /// Checks the combination of well-formed conditions.
    fn check_conditions(&mut self, path: &str, who: &Conditions, known: &RuleNames<'_>) {
        let Conditions { peer, san_uri, san_dns, issuer, claims, network } = who;
        let by_name = san_uri.is_some() || san_dns.is_some();
        let by_claim = issuer.is_some() || !claims.is_empty();
        if peer.is_none() && !by_name && !by_claim && network.is_none() {
            self.findings.missing(path, "says of nobody: `peer`, or another condition, is needed");
        }
        if by_name && peer.is_none() && known.authorities.len() != 1 {
            let reason =
                "a name means something only under one authority: say which by `peer = \"cert:CA:…\"`";
            self.findings.missing(path, reason);
        }
        if !claims.is_empty() && issuer.is_none() && !matches!(peer, Some(PeerPattern::Jwt { .. })) {
            self.findings.missing(path, "a claim means something only with its `issuer`");
        }
        let of_certificates =
            peer.as_ref().is_none_or(|peer| matches!(peer, PeerPattern::Certificate { .. }));
        let of_jwts = peer.as_ref().is_none_or(|peer| matches!(peer, PeerPattern::Jwt { .. }));
        if by_name && (by_claim || !of_certificates) || by_claim && !of_jwts {
            self.findings.fault(path, "no peer is of two kinds: this rule never applies");
        }
    }

    /// Checks `as = "same"`: a certificate's own name is its common name only.
    fn check_same(&mut self, path: &str, who: &Conditions) {
        let by_other_name = who.san_uri.is_some()
            || who.san_dns.is_some()
            || matches!(
                &who.peer,
                Some(PeerPattern::Certificate { attribute, .. }) if *attribute != Attribute::CommonName
            );
        if by_other_name || matches!(&who.peer, Some(PeerPattern::Listener(_))) {
            self.findings
                .fault(path, "\"same\" takes the common name, the subject or the login; name the user");
        }
    }
}
