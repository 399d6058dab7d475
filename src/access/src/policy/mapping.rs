//! Maps a peer to an etcd user.
//!
//! Owns: the order of the rules, and the result without an applicable rule. Must not know: the peer's proof,
//! or Keyward's credential for the user. Invariants (docs/decisions.md#d09): the first applicable rule
//! decides; without a rule, a password accepted by etcd or a token signed with etcd's key maps to its own
//! etcd user, and any further peer to no user; `root` is reached only by its own password at etcd, or by a
//! rule with an exact peer.

use std::net::IpAddr;

use keyward_config::{MappingOutcome, ROOT};
use keyward_etcd::identity::{Peer, UserName};

/// The mapping of peers to etcd users, by the rules of a configuration.
#[derive(Clone, Debug, Default)]
pub struct Mapping(keyward_config::MappingRules);

/// Result of the mapping.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MappingResult {
    /// The user whose password etcd accepted, or the user of a token signed with etcd's own key.
    Itself,
    /// The given etcd user.
    User(UserName),
    /// An anonymous caller: a client without a credential, on a listener without a default user.
    Anonymous,
    /// Refused by a rule.
    Denied,
    /// Refused for lack of a rule.
    Unknown,
}

impl Mapping {
    /// Builds the mapping from the rules of a configuration.
    #[must_use]
    pub fn new(rules: keyward_config::MappingRules) -> Self {
        Self(rules)
    }

    /// Maps `peer`, calling from `address`, to an etcd user.
    #[must_use]
    pub fn user_of(&self, peer: &Peer, address: Option<IpAddr>) -> MappingResult {
        let rule = self.0.rules.iter().find(|rule| rule.applies(peer, address));
        match rule.map(keyward_config::MapRule::outcome) {
            Some(MappingOutcome::User(user)) => MappingResult::User(user.clone()),
            Some(MappingOutcome::Same) => same(peer),
            Some(MappingOutcome::Deny) => MappingResult::Denied,
            None => self.without_rule(peer),
        }
    }

    /// True if a rule refuses `peer`, calling from `address`.
    #[must_use]
    pub fn denies(&self, peer: &Peer, address: Option<IpAddr>) -> bool {
        let rule = self.0.rules.iter().find(|rule| rule.applies(peer, address));
        rule.is_some_and(|rule| *rule.outcome() == MappingOutcome::Deny)
    }

    fn without_rule(&self, peer: &Peer) -> MappingResult {
        match peer {
            Peer::Password(_) | Peer::EtcdToken(_) => MappingResult::Itself,
            Peer::Listener(_) => MappingResult::Anonymous,
            Peer::File(_) | Peer::Certificate { .. } | Peer::Jwt { .. } => {
                let default = self.0.default.as_ref().filter(|user| user.as_str() != ROOT);
                default.map_or(MappingResult::Unknown, |user| MappingResult::User(user.clone()))
            }
        }
    }
}

/// The etcd user with the peer's own name.
fn same(peer: &Peer) -> MappingResult {
    let name = match peer {
        Peer::Password(_) | Peer::EtcdToken(_) => return MappingResult::Itself,
        Peer::File(user) => Some(user.as_str()),
        Peer::Certificate { common_name, .. } => common_name.as_deref(),
        Peer::Jwt { subject, .. } => Some(&**subject),
        Peer::Listener(_) => None,
    };
    match name.filter(|name| !name.is_empty() && *name != ROOT) {
        Some(name) => MappingResult::User(UserName::from(name)),
        None => MappingResult::Denied,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;
    use keyward_config::{Conditions, MapRule};
    use keyward_etcd::identity::pattern::{Glob, PeerPattern};
    use keyward_etcd::identity::peer::JwtClaims;

    const ISSUER: &str = "https://ci";
    const KINDS: [&str; 6] =
        ["password:", "file:", "cert:c:CN=", "cert:c:URI=", "jwt:https://ci:", "listener:"];

    fn pattern(text: &str) -> PeerPattern {
        PeerPattern::parse(text, &[ISSUER.into()]).unwrap()
    }

    fn rule(peer: &str, outcome: MappingOutcome) -> MapRule {
        MapRule::new(Conditions { peer: Some(pattern(peer)), ..Conditions::default() }, outcome).unwrap()
    }

    fn to(user: &str) -> MappingOutcome {
        MappingOutcome::User(user.into())
    }

    fn mapping(rules: Vec<MapRule>) -> Mapping {
        Mapping::new(keyward_config::MappingRules { rules, default: None, written: 0 })
    }

    fn user(name: &str) -> MappingResult {
        MappingResult::User(name.into())
    }

    fn certificate(ca: &str, name: Option<&str>, dns: &[&str], uris: &[&str]) -> Peer {
        let all = |names: &[&str]| names.iter().map(|name| Arc::from(*name)).collect();
        Peer::Certificate { ca: ca.into(), common_name: name.map(Arc::from), dns: all(dns), uris: all(uris) }
    }

    fn jwt(issuer: &str, subject: &str, claims: &[(&str, &[&str])]) -> Peer {
        let owned = |values: &[&str]| values.iter().map(|value| (*value).to_owned()).collect();
        let claims: JwtClaims =
            claims.iter().map(|(name, values)| ((*name).to_owned(), owned(values))).collect();
        Peer::Jwt { issuer: issuer.into(), subject: subject.into(), claims: claims.into() }
    }

    #[test]
    fn the_first_rule_that_applies_decides() {
        let mapping = mapping(vec![
            rule("cert:clients:CN=web-9", MappingOutcome::Deny),
            rule("cert:clients:CN=web-*", to("web")),
            rule("cert:clients:CN=*", MappingOutcome::Same),
        ]);
        let of = |name| mapping.user_of(&certificate("clients", Some(name), &[], &[]), None);
        assert_eq!(of("web-9"), MappingResult::Denied);
        assert_eq!(of("web-1"), user("web"));
        assert_eq!(of("alice"), user("alice"));
        assert_eq!(of("root"), MappingResult::Denied);
    }

    #[test]
    fn one_name_of_two_namespaces_is_two_peers() {
        let mapping = mapping(vec![rule("cert:clients:CN=alice", to("alice"))]);
        assert_eq!(mapping.user_of(&certificate("clients", Some("alice"), &[], &[]), None), user("alice"));
        for other in [
            certificate("partners", Some("alice"), &[], &[]),
            certificate("clients", Some("Alice"), &[], &[]),
            certificate("clients", None, &["alice"], &["alice"]),
            jwt(ISSUER, "alice", &[]),
            Peer::File("alice".into()),
        ] {
            assert_eq!(mapping.user_of(&other, None), MappingResult::Unknown, "{other}");
        }
        assert_eq!(mapping.user_of(&Peer::Password("alice".into()), None), MappingResult::Itself);
        assert_eq!(mapping.user_of(&Peer::Listener("alice".into()), None), MappingResult::Anonymous);
    }

    #[test]
    fn a_name_is_of_its_own_kind_however_it_is_written() {
        let by_kind = mapping(KINDS.map(|kind| rule(&format!("{kind}*"), to(kind))).into());
        let same = mapping(
            KINDS
                .into_iter()
                .filter(|kind| !kind.ends_with("URI="))
                .map(|kind| rule(&format!("{kind}*"), MappingOutcome::Same))
                .collect(),
        );
        for name in [
            "cert:c:CN=alice",
            "cert:c:CN=root",
            "password:root",
            "file:root",
            "jwt:https://ci:root",
            "listener:l",
            "c:CN=root",
            "CN=root",
            "alice:root",
            "alice/root",
            "root,CN=alice",
            "*",
            "root*",
            "*root",
            "Root",
            "root ",
            "ro\u{200b}ot",
            "\u{202e}toor",
            "ｒｏｏｔ",
            "ro\0ot",
            "root\n",
            &"x".repeat(100_000),
        ] {
            for (kind, peer) in [
                ("password:", Peer::Password(name.into())),
                ("file:", Peer::File(name.into())),
                ("cert:c:CN=", certificate("c", Some(name), &[], &[])),
                ("jwt:https://ci:", jwt(ISSUER, name, &[])),
                ("listener:", Peer::Listener(name.into())),
            ] {
                assert_eq!(by_kind.user_of(&peer, None), user(kind), "{peer:.80}");
                let mapped = same.user_of(&peer, None);
                let itself = match kind {
                    "password:" => MappingResult::Itself,
                    "listener:" => MappingResult::Denied,
                    _ => user(name),
                };
                assert_eq!(mapped, itself, "{peer:.80}");
            }
        }
    }

    #[test]
    fn subject_alternative_names_claims_and_networks_are_conditions() {
        let with = |who: Conditions| MapRule::new(who, to("it")).unwrap();
        let glob = |text| Some(Glob::new(text));
        let uri = with(Conditions { san_uri: glob("spiffe://a/*"), ..Conditions::default() });
        let spiffe = certificate("c", None, &["x.test"], &["spiffe://b/1", "spiffe://a/2"]);
        assert!(uri.applies(&spiffe, None));
        assert!(!uri.applies(&certificate("c", Some("spiffe://a/2"), &["spiffe://a/2"], &[]), None));
        let dns = with(Conditions { san_dns: glob("*.test"), ..Conditions::default() });
        assert!(dns.applies(&spiffe, None));
        assert!(!dns.applies(&certificate("c", Some("x.test"), &[], &["x.test"]), None));

        let claims = vec![("repo".to_owned(), Glob::new("org/*")), ("groups".to_owned(), Glob::new("ci"))];
        let claimed = with(Conditions { issuer: Some(ISSUER.into()), claims, ..Conditions::default() });
        let good: &[(&str, &[&str])] = &[("repo", &["org/app"]), ("groups", &["dev", "ci"])];
        assert!(claimed.applies(&jwt(ISSUER, "x", good), None));
        assert!(!claimed.applies(&jwt("https://ci2", "x", good), None));
        assert!(!claimed.applies(&jwt(ISSUER, "x", &good[..1]), None));
        assert!(!claimed.applies(&jwt(ISSUER, "x", &[("repo", &["other/app"]), good[1]]), None));

        let network = Some("10.0.0.0/8".parse().unwrap());
        let near = with(Conditions { network, ..Conditions::default() });
        let (inside, outside) = (Some("10.1.1.1".parse().unwrap()), Some("11.1.1.1".parse().unwrap()));
        assert!(near.applies(&spiffe, inside));
        assert!(!near.applies(&spiffe, outside));
        assert!(!near.applies(&spiffe, None));
        assert!(near.applies(&Peer::Listener("l".into()), inside));
        assert!(!near.applies(&Peer::Password("alice".into()), inside), "etcd has said who that is");
        let closed =
            MapRule::new(Conditions { network, ..Conditions::default() }, MappingOutcome::Deny).unwrap();
        assert!(closed.applies(&Peer::Password("alice".into()), inside));
    }

    #[test]
    fn a_default_is_for_whoever_proved_something() {
        let mapping = Mapping::new(keyward_config::MappingRules {
            default: Some("guest".into()),
            ..keyward_config::MappingRules::default()
        });
        assert_eq!(mapping.user_of(&certificate("c", None, &[], &[]), None), user("guest"));
        assert_eq!(mapping.user_of(&jwt(ISSUER, "x", &[]), None), user("guest"));
        assert_eq!(mapping.user_of(&Peer::File("x".into()), None), user("guest"));
        assert_eq!(mapping.user_of(&Peer::Listener("l".into()), None), MappingResult::Anonymous);
        assert_eq!(mapping.user_of(&Peer::Password("x".into()), None), MappingResult::Itself);
    }

    #[test]
    fn same_without_a_name_is_nobody() {
        let mapping = mapping(vec![
            rule("cert:c:DNS=*", MappingOutcome::Same),
            rule("listener:*", MappingOutcome::Same),
            rule("password:*", MappingOutcome::Same),
        ]);
        assert_eq!(mapping.user_of(&certificate("c", None, &["alice"], &[]), None), MappingResult::Denied);
        assert_eq!(
            mapping.user_of(&certificate("c", Some(""), &["alice"], &[]), None),
            MappingResult::Denied
        );
        assert_eq!(mapping.user_of(&Peer::Listener("l".into()), None), MappingResult::Denied);
        assert_eq!(mapping.user_of(&Peer::Password("root".into()), None), MappingResult::Itself);
    }

    fn name() -> impl Strategy<Value = String> {
        prop_oneof![Just("root".to_owned()), "[ab*]{0,3}", "[ro*t]{0,4}"]
    }

    fn peer() -> impl Strategy<Value = Peer> {
        (0..5, name()).prop_map(|(kind, name)| match kind {
            0 => Peer::Password(name.as_str().into()),
            1 => Peer::File(name.as_str().into()),
            2 => certificate("c", Some(&name), &[&name], &[&name]),
            3 => jwt(ISSUER, &name, &[("groups", &[&name])]),
            _ => Peer::Listener(name.as_str().into()),
        })
    }

    fn any_rule() -> impl Strategy<Value = Option<MapRule>> {
        let outcome = prop_oneof![
            name().prop_map(|name| to(&name)),
            Just(MappingOutcome::Same),
            Just(MappingOutcome::Deny)
        ];
        (prop::option::of((prop::sample::select(&KINDS[..]), name())), prop::option::of(name()), outcome)
            .prop_map(|(peer, uri, outcome)| {
                let parsed =
                    peer.map(|(kind, name)| PeerPattern::parse(&format!("{kind}{name}"), &[ISSUER.into()]));
                let who = Conditions {
                    peer: parsed.and_then(Result::ok),
                    san_uri: uri.map(|uri| Glob::new(&uri)),
                    ..Conditions::default()
                };
                MapRule::new(who, outcome).ok()
            })
    }

    proptest! {
        #[test]
        fn root_is_reached_by_a_rule_that_spells_the_peer_out_and_in_no_other_way(
            rules in prop::collection::vec(any_rule(), 0..6),
            default in prop::option::of(name()),
            peer in peer(),
        ) {
            let rules: Vec<_> = rules.into_iter().flatten().collect();
            let first = rules.iter().find(|rule| rule.applies(&peer, None)).cloned();
            let default = default.map(|name| UserName::from(name.as_str()));
            let mapped = Mapping::new(keyward_config::MappingRules { rules, default, written: 0 }).user_of(&peer, None);
            if mapped == user(ROOT) {
                let first = first.expect("a rule");
                prop_assert_eq!(first.outcome(), &to(ROOT));
                let (shown, name) = (
                    peer.to_string(),
                    peer.to_string().rsplit([':', '=']).next().unwrap().to_owned()
                );
                let spelled = KINDS.iter().any(|kind| {
                    MapRule::new(
                        Conditions {
                            peer: PeerPattern::parse(&format!("{kind}{name}"), &[ISSUER.into()]).ok(),
                            ..Conditions::default()
                        },
                        to(ROOT)
                    )
                    .is_ok_and(|rule| rule.applies(&peer, None))
                });
                prop_assert!(spelled, "{} is spelled out", shown);
            }
        }

        #[test]
        fn without_a_rule_only_etcds_own_users_are_somebody(peer in peer()) {
            let mapped = mapping(Vec::new()).user_of(&peer, None);
            prop_assert_eq!(mapped == MappingResult::Itself, matches!(peer, Peer::Password(_)));
            prop_assert!(!matches!(mapped, MappingResult::User(_)));
        }
    }
}
