//! Resolves `[[map]]` and `[mapping]`: the rules from peers to etcd users.
//!
//! Owns: the validity of a rule. Must not know: the precedence of rules. Invariants: a rule without possible
//! peers, or for a user without a credential, is a fault; `root` is reached only by a rule with one exact
//! peer.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::Resolver;
use super::user_tables::{SAME, UserRows};
use crate::{Conditions, Listener, MapRule, MappingOutcome, MappingRules, ROOT, toml_file};
use keyward_etcd::identity::UserName;
use keyward_etcd::identity::pattern::{AddressRange, Attribute, Glob, PeerPattern};

/// Names available to conditions on peers.
pub(super) struct PeerNames<'a> {
    issuers: Vec<Arc<str>>,
    authorities: Vec<Arc<str>>,
    listeners: &'a [Arc<Listener>],
}

impl<'a> PeerNames<'a> {
    /// The names of these listeners, of their authorities, and of these issuers.
    pub(super) fn of(listeners: &'a [Arc<Listener>], issuers: Vec<Arc<str>>) -> Self {
        let mut authorities: Vec<Arc<str>> = Vec::new();
        for listener in listeners {
            let ca = listener.tls.as_ref().and_then(|tls| tls.clients.ca());
            authorities.extend(ca.map(|ca| Arc::clone(&ca.name)));
        }
        authorities.sort();
        authorities.dedup();
        Self { issuers, authorities, listeners }
    }

    /// True if a listener has the name.
    pub(super) fn has_listener(&self, name: &str) -> bool {
        self.listeners.iter().any(|listener| *listener.name == *name)
    }
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
        let known = PeerNames::of(listeners, issuers);
        let mut rules = Vec::new();
        for (index, row) in rows.into_iter().enumerate() {
            rules.extend(self.map_rule(&format!("map[{index}]"), row, users, &known));
        }
        let written = rules.len();
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
        MappingRules { rules, default, written }
    }

    fn map_rule(
        &mut self,
        path: &str,
        row: toml_file::TomlMap,
        users: &UserRows,
        known: &PeerNames<'_>,
    ) -> Option<MapRule> {
        let who = self.conditions(
            path,
            row.peer.as_deref(),
            (row.san_uri.as_deref(), row.san_dns.as_deref()),
            (row.issuer.as_deref(), row.claim),
            row.network.as_deref(),
            known,
        );
        if who == Conditions::default() {
            self.findings.missing(path, "says of nobody: `peer`, or another condition, is needed");
        }
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
            (Some(name), _) => MappingOutcome::User(self.user_named(&as_path, name, users)?),
            (None, _) => {
                self.findings.missing(&as_path, "the etcd user is needed, or \"same\", or `deny = true`");
                return None;
            }
        };
        self.checked(&as_path, MapRule::new(who, outcome))
    }

    /// Resolves the conditions of a rule: the peer, the names of a certificate, the issuer and claims of a
    /// JWT, and the network.
    pub(super) fn conditions(
        &mut self,
        path: &str,
        peer: Option<&str>,
        (san_uri, san_dns): (Option<&str>, Option<&str>),
        (issuer, claims): (Option<&str>, Option<BTreeMap<String, String>>),
        network: Option<&str>,
        known: &PeerNames<'_>,
    ) -> Conditions {
        let network_path = format!("{path}.network");
        Conditions {
            peer: peer.and_then(|text| self.peer(&format!("{path}.peer"), text, known)),
            san_uri: san_uri.map(Glob::new),
            san_dns: san_dns.map(Glob::new),
            issuer: issuer.and_then(|name| self.issuer(&format!("{path}.issuer"), name, known)),
            claims: claims
                .unwrap_or_default()
                .iter()
                .map(|(name, value)| (name.clone(), Glob::new(value)))
                .collect(),
            network: network.and_then(|text| self.checked(&network_path, text.parse::<AddressRange>())),
        }
    }

    /// Resolves the pattern of a peer.
    pub(super) fn peer(&mut self, path: &str, text: &str, known: &PeerNames<'_>) -> Option<PeerPattern> {
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

    fn issuer(&mut self, path: &str, name: &str, known: &PeerNames<'_>) -> Option<Arc<str>> {
        let found = known.issuers.iter().find(|issuer| &***issuer == name).cloned();
        if found.is_none() {
            self.findings.fault(path, "names the issuer of no [[jwt]]");
        }
        found
    }

    /// Checks the combination of well-formed conditions.
    pub(super) fn check_conditions(&mut self, path: &str, who: &Conditions, known: &PeerNames<'_>) {
        let Conditions { peer, san_uri, san_dns, issuer, claims, network: _ } = who;
        let by_name = san_uri.is_some() || san_dns.is_some();
        let by_claim = issuer.is_some() || !claims.is_empty();
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
