//! `[[map]]` and `[mapping]`: who is which etcd user.
//!
//! Owns: what a rule may say. Must not know: which rule wins.
//! Invariants: a rule that could never apply, or that leads to a user as whom Keyward cannot act, is a fault; nothing
//! but a peer that is spelled out leads to `root`.

use std::sync::Arc;

use super::Resolver;
use super::users::Rows;
use crate::config::{Conditions, Listener, MapRule, Mapping, Outcome, ROOT, file};
use crate::identity::UserName;
use crate::identity::pattern::{Attribute, Glob, Network, PeerPattern};

/// What the name of the peer itself is called in `as`.
pub(super) const SAME: &str = "same";

/// What a rule may name.
struct Known<'a> {
    users: &'a Rows,
    issuers: Vec<Arc<str>>,
    authorities: Vec<Arc<str>>,
    listeners: &'a [Arc<Listener>],
}

impl Resolver<'_> {
    /// `defaults` are the users of clients that show nothing, by listener.
    pub(super) fn mapping(
        &mut self,
        rows: Vec<file::Map>,
        mapping: file::Mapping,
        users: &Rows,
        issuers: Vec<Arc<str>>,
        listeners: &[Arc<Listener>],
        defaults: Vec<(Arc<str>, UserName)>,
    ) -> Mapping {
        let mut authorities: Vec<Arc<str>> = Vec::new();
        for listener in listeners {
            let ca = listener.tls.as_ref().and_then(|tls| tls.clients.ca());
            authorities.extend(ca.map(|ca| Arc::clone(&ca.name)));
        }
        authorities.sort();
        authorities.dedup();
        let known = Known { users, issuers, authorities, listeners };
        let mut rules = Vec::new();
        for (index, row) in rows.into_iter().enumerate() {
            rules.extend(self.map_rule(&format!("map[{index}]"), row, &known));
        }
        for (listener, user) in defaults {
            let peer = Some(PeerPattern::Listener(Glob::new(&listener)));
            let rule = MapRule::new(Conditions { peer, ..Conditions::default() }, Outcome::User(user));
            rules.extend(self.checked("listener", rule));
        }
        let path = "mapping.default";
        let default = mapping.default.and_then(|name| self.user_named(path, &name, users));
        if default.as_ref().is_some_and(|user| user.as_str() == ROOT) {
            self.findings.fault(path, "would make everybody root");
        }
        Mapping { rules, default }
    }

    fn map_rule(&mut self, path: &str, row: file::Map, known: &Known<'_>) -> Option<MapRule> {
        let peer_path = format!("{path}.peer");
        let peer = row.peer.and_then(|text| self.peer(&peer_path, &text, known));
        let network_path = format!("{path}.network");
        let network = row.network.and_then(|text| self.checked(&network_path, text.parse::<Network>()));
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
            (None, Some(true)) => Outcome::Deny,
            (Some(SAME), _) => {
                self.check_same(&as_path, &who);
                Outcome::Same
            }
            (Some(name), _) => Outcome::User(self.user_named(&as_path, name, known.users)?),
            (None, _) => {
                self.findings.missing(&as_path, "the etcd user is needed, or \"same\", or `deny = true`");
                return None;
            }
        };
        self.checked(&as_path, MapRule::new(who, outcome))
    }

    fn peer(&mut self, path: &str, text: &str, known: &Known<'_>) -> Option<PeerPattern> {
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

    fn issuer(&mut self, path: &str, name: &str, known: &Known<'_>) -> Option<Arc<str>> {
        let found = known.issuers.iter().find(|issuer| &***issuer == name).cloned();
        if found.is_none() {
            self.findings.fault(path, "names the issuer of no [[jwt]]");
        }
        found
    }

    /// What the conditions must be, beside well-formed.
    fn check_conditions(&mut self, path: &str, who: &Conditions, known: &Known<'_>) {
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

    /// A certificate's own name is its common name, and no other.
    fn check_same(&mut self, path: &str, who: &Conditions) {
        let by_other_name = who.san_uri.is_some()
            || who.san_dns.is_some()
            || matches!(&who.peer, Some(PeerPattern::Certificate { attribute, .. }) if *attribute != Attribute::CommonName);
        if by_other_name || matches!(&who.peer, Some(PeerPattern::Listener(_))) {
            self.findings
                .fault(path, "\"same\" takes the common name, the subject or the login; name the user");
        }
    }
}
