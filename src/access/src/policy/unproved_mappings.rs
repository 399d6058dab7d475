//! Rules that map peers to etcd users for whom Keyward has no credential.
//!
//! Owns: finding such rules. Must not know: the consequence of a finding, how a user is proved.
//! Invariant: a reported rule maps no peer to a user with a credential, so while auth is on at etcd it
//! refuses all of its peers; the state of etcd and the users file change no finding.

use keyward_config::upstream_users::UpstreamUsers;
use keyward_config::{Conditions, Config, MapRule, MappingOutcome, ROOT};
use keyward_etcd::identity::pattern::{Attribute, PeerPattern};

/// The rules of `[[map]]`, as `map[0]`, whose users nobody can prove. Rules for a user by name are no such
/// rules: a name without a `[[user]]` is a fault of the configuration.
#[must_use]
pub fn unproved_mappings(config: &Config) -> Vec<String> {
    let written = config.mapping.rules.iter().take(config.mapping.written).enumerate();
    let unproved = written.filter(|(_, rule)| is_unproved(rule, &config.users));
    unproved.map(|(at, _)| format!("map[{at}]")).collect()
}

fn is_unproved(rule: &MapRule, users: &UpstreamUsers) -> bool {
    let Conditions { peer, .. } = rule.conditions();
    let own_name = match peer {
        // A password accepted by etcd, and a token of etcd's own kind, prove their user by themselves.
        Some(PeerPattern::Password(_) | PeerPattern::EtcdToken(_)) => return false,
        Some(PeerPattern::File(name) | PeerPattern::Jwt { subject: name, .. }) => Some(name),
        Some(PeerPattern::Certificate { attribute: Attribute::CommonName, name, .. }) => Some(name),
        Some(PeerPattern::Certificate { .. } | PeerPattern::Listener(_)) | None => None,
    };
    let may_be = |user: &str| user != ROOT && own_name.is_none_or(|name| name.matches(user));
    *rule.outcome() == MappingOutcome::Same
        && users.others.is_none()
        && !users.named.keys().any(|user| may_be(user.as_str()))
}
