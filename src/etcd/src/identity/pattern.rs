//! Patterns in rules: patterns of text, of peers, and of source addresses.
//!
//! Owns: the grammar of patterns, and matching. Must not know: the consequences of a match.
//! Invariants: a `*` never matches across a peer's kind, authority or issuer; a pattern without a `*` matches
//! exactly one text, byte for byte; a malformed pattern is a fault, never a pattern without matches.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;
use std::sync::Arc;

use ipnet::IpNet;

use super::peer::Peer;

/// A text pattern. `*` stands for any run of characters, including an empty run. No further character is
/// special.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Glob(Arc<str>);

impl Glob {
    /// The pattern as written.
    #[must_use]
    pub fn new(text: &str) -> Self {
        Self(text.into())
    }

    /// True if the pattern matches exactly one text.
    #[must_use]
    pub fn is_exact(&self) -> bool {
        !self.0.contains('*')
    }

    /// The only matching text, if the pattern has no `*`.
    #[must_use]
    pub fn exact(&self) -> Option<&str> {
        self.is_exact().then_some(&self.0)
    }

    /// True if every text that `other` matches is matched, as far as the patterns show.
    #[must_use]
    pub fn covers(&self, other: &Self) -> bool {
        let begins = || {
            let prefix = self.0.strip_suffix('*').filter(|prefix| !prefix.contains('*'));
            let fixed = other.0.split('*').next().unwrap_or_default();
            prefix.is_some_and(|prefix| fixed.starts_with(prefix))
        };
        self == other || other.exact().is_some_and(|text| self.matches(text)) || begins()
    }

    /// True if `text` matches. Takes time linear in the length of `text` for a given pattern.
    #[must_use]
    pub fn matches(&self, text: &str) -> bool {
        let mut parts = self.0.split('*');
        let Some(mut rest) = parts.next().and_then(|first| text.strip_prefix(first)) else { return false };
        let Some(last) = parts.next_back() else { return rest.is_empty() };
        for part in parts {
            let Some(at) = rest.find(part) else { return false };
            rest = &rest[at + part.len()..];
        }
        rest.ends_with(last)
    }
}

/// The certificate field matched by a pattern.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attribute {
    /// The common name of the subject.
    CommonName,
    /// Any DNS name of the certificate.
    Dns,
    /// Any URI of the certificate.
    Uri,
}

/// A pattern of peers, as written in `peer = "…"`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PeerPattern {
    /// `password:NAME`.
    Password(Glob),
    /// `file:NAME`.
    File(Glob),
    /// `cert:CA:CN=NAME`, `cert:CA:DNS=NAME` or `cert:CA:URI=NAME`. The authority is never a pattern.
    Certificate {
        /// The listener's label for the client CA.
        ca: Arc<str>,
        /// The certificate field to match.
        attribute: Attribute,
        /// The pattern for the field's value.
        name: Glob,
    },
    /// `jwt:ISSUER:SUBJECT`. The issuer is never a pattern.
    Jwt {
        /// A configured issuer.
        issuer: Arc<str>,
        /// The pattern for the token's subject.
        subject: Glob,
    },
    /// `etcd_jwt:NAME`.
    EtcdToken(Glob),
    /// `listener:NAME`.
    Listener(Glob),
}

impl fmt::Display for Glob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Formats the pattern as written.
impl fmt::Display for PeerPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Password(name) => write!(f, "password:{name}"),
            Self::File(name) => write!(f, "file:{name}"),
            Self::Certificate { ca, attribute, name } => {
                let attribute = match attribute {
                    Attribute::CommonName => "CN",
                    Attribute::Dns => "DNS",
                    Attribute::Uri => "URI",
                };
                write!(f, "cert:{ca}:{attribute}={name}")
            }
            Self::Jwt { issuer, subject } => write!(f, "jwt:{issuer}:{subject}"),
            Self::EtcdToken(name) => write!(f, "etcd_jwt:{name}"),
            Self::Listener(name) => write!(f, "listener:{name}"),
        }
    }
}

/// Reasons for rejecting the text of a pattern.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MalformedPattern {
    /// Not of any known kind of peer.
    #[error(
        "a peer is \"password:NAME\", \"file:NAME\", \"cert:CA:CN=NAME\", \"cert:CA:DNS=NAME\", \
         \"cert:CA:URI=NAME\", \"jwt:ISSUER:SUBJECT\", \"etcd_jwt:NAME\" or \"listener:NAME\", \
         where NAME and SUBJECT may hold *"
    )]
    Peer,
    /// `jwt:` with an unknown issuer.
    #[error("names the issuer of no [[jwt]]")]
    Issuer,
    /// Not an address range.
    #[error(
        "a network is an address and a prefix length, as in \"10.0.0.0/8\" or \"fd00::/8\", \
         with no bits set beyond it"
    )]
    Network,
}

impl PeerPattern {
    /// Parses a pattern. Issuers and subjects may contain colons; `issuers` decides where the issuer ends.
    ///
    /// # Errors
    /// [`MalformedPattern`].
    pub fn parse(text: &str, issuers: &[Arc<str>]) -> Result<Self, MalformedPattern> {
        let (kind, name) =
            text.split_once(':').filter(|(_, name)| !name.is_empty()).ok_or(MalformedPattern::Peer)?;
        match kind {
            "password" => Ok(Self::Password(Glob::new(name))),
            "file" => Ok(Self::File(Glob::new(name))),
            "etcd_jwt" => Ok(Self::EtcdToken(Glob::new(name))),
            "listener" => Ok(Self::Listener(Glob::new(name))),
            "cert" => {
                let (ca, name) = name.split_once(':').ok_or(MalformedPattern::Peer)?;
                let (attribute, name) = name.split_once('=').ok_or(MalformedPattern::Peer)?;
                let attribute = match attribute {
                    "CN" => Attribute::CommonName,
                    "DNS" => Attribute::Dns,
                    "URI" => Attribute::Uri,
                    _ => return Err(MalformedPattern::Peer),
                };
                if ca.is_empty() || ca.contains('*') || name.is_empty() {
                    return Err(MalformedPattern::Peer);
                }
                Ok(Self::Certificate { ca: ca.into(), attribute, name: Glob::new(name) })
            }
            "jwt" => {
                let known = issuers.iter().filter_map(|issuer| {
                    let subject = name.strip_prefix(&**issuer)?.strip_prefix(':')?;
                    (!subject.is_empty()).then_some((issuer, subject))
                });
                // Prefer the longest issuer, in case one issuer is a prefix of another.
                let (issuer, subject) =
                    known.max_by_key(|(issuer, _)| issuer.len()).ok_or(MalformedPattern::Issuer)?;
                Ok(Self::Jwt { issuer: Arc::clone(issuer), subject: Glob::new(subject) })
            }
            _ => Err(MalformedPattern::Peer),
        }
    }

    /// True if the pattern matches exactly one name.
    #[must_use]
    pub fn is_exact(&self) -> bool {
        match self {
            Self::Password(name) | Self::File(name) | Self::EtcdToken(name) | Self::Listener(name) => {
                name.is_exact()
            }
            Self::Certificate { name, .. } => name.is_exact(),
            Self::Jwt { subject, .. } => subject.is_exact(),
        }
    }

    /// True if every peer that `other` matches is matched, as far as the patterns show.
    #[must_use]
    pub fn covers(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Password(one), Self::Password(other))
            | (Self::File(one), Self::File(other))
            | (Self::EtcdToken(one), Self::EtcdToken(other))
            | (Self::Listener(one), Self::Listener(other)) => one.covers(other),
            (
                Self::Certificate { ca, attribute, name },
                Self::Certificate { ca: other_ca, attribute: other_attribute, name: other_name },
            ) => ca == other_ca && attribute == other_attribute && name.covers(other_name),
            (Self::Jwt { issuer, subject }, Self::Jwt { issuer: other_issuer, subject: other_subject }) => {
                issuer == other_issuer && subject.covers(other_subject)
            }
            _ => false,
        }
    }

    /// True if the pattern matches `peer`.
    #[must_use]
    pub fn matches(&self, peer: &Peer) -> bool {
        match (self, peer) {
            (Self::Password(name), Peer::Password(user))
            | (Self::File(name), Peer::File(user))
            | (Self::EtcdToken(name), Peer::EtcdToken(user)) => name.matches(user.as_str()),
            (
                Self::Certificate { ca, attribute, name },
                Peer::Certificate { ca: shown, common_name, dns, uris },
            ) => {
                let one = |text: &Arc<str>| name.matches(text);
                ca == shown
                    && match attribute {
                        Attribute::CommonName => common_name.as_ref().is_some_and(one),
                        Attribute::Dns => dns.iter().any(one),
                        Attribute::Uri => uris.iter().any(one),
                    }
            }
            (Self::Jwt { issuer, subject }, Peer::Jwt { issuer: shown, subject: about, .. }) => {
                issuer == shown && subject.matches(about)
            }
            (Self::Listener(name), Peer::Listener(listener)) => name.matches(listener),
            _ => false,
        }
    }
}

/// A range of addresses, such as `10.0.0.0/8`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddressRange(IpNet);

impl AddressRange {
    /// True if the range contains every address of the range's family (IPv4 or IPv6).
    #[must_use]
    pub fn is_everybody(&self) -> bool {
        self.0.prefix_len() == 0
    }

    /// True if every address of `other` is of this range.
    #[must_use]
    pub fn covers(&self, other: &Self) -> bool {
        self.0.contains(&other.0)
    }

    /// True if a client of the range may connect to a socket bound to this address: both are of one family. A
    /// socket bound to `::` takes both.
    #[must_use]
    pub fn may_reach(&self, bound: IpAddr) -> bool {
        match (self.0, bound.to_canonical()) {
            (IpNet::V4(_), IpAddr::V4(_)) | (IpNet::V6(_), IpAddr::V6(_)) => true,
            (IpNet::V4(_), IpAddr::V6(bound)) => bound.is_unspecified(),
            (IpNet::V6(_), IpAddr::V4(_)) => false,
        }
    }

    /// True if the range contains the address. An IPv4-mapped IPv6 address counts as an IPv4 address.
    #[must_use]
    pub fn contains(&self, address: IpAddr) -> bool {
        self.0.contains(&address.to_canonical())
    }
}

impl FromStr for AddressRange {
    type Err = MalformedPattern;

    fn from_str(text: &str) -> Result<Self, MalformedPattern> {
        const FORM: MalformedPattern = MalformedPattern::Network;
        // `IpNet::from_str` accepts leading zeros in an IPv4 address, read as octal by some programs.
        let (address, length) = text.split_once('/').ok_or(FORM)?;
        if !length.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(FORM);
        }
        let address = address.parse().map_err(|_| FORM)?;
        let range = IpNet::new(address, length.parse().map_err(|_| FORM)?).map_err(|_| FORM)?;
        if range.trunc() == range { Ok(Self(range)) } else { Err(FORM) }
    }
}

impl fmt::Display for AddressRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Of short texts of two letters, every text that the covered pattern matches.
        #[test]
        fn a_pattern_that_covers_another_matches_all_of_its_texts(one in "[ab*]{0,4}", other in "[ab*]{0,4}") {
            let (one, other) = (Glob::new(&one), Glob::new(&other));
            if one.covers(&other) {
                let texts = (0..=5_u32).flat_map(|length| (0..1_u32 << length).map(move |bits| {
                    (0..length).map(|at| if bits & (1 << at) == 0 { 'a' } else { 'b' }).collect::<String>()
                }));
                for text in texts {
                    prop_assert!(!other.matches(&text) || one.matches(&text), "{:?} {:?} {}", one, other, text);
                }
            }
        }
    }

    #[test]
    fn what_a_pattern_covers_is_seen_where_it_is_plain() {
        for (one, other, covers) in [
            ("*", "a", true),
            ("*", "a*b", true),
            ("a*", "ab*", true),
            ("a*", "ab*c", true),
            ("a", "a", true),
            ("a*c", "abc", true),
            ("a", "a*", false),
            ("ab*", "a*", false),
            ("a*", "*", false),
        ] {
            assert_eq!(Glob::new(one).covers(&Glob::new(other)), covers, "{one} {other}");
        }
    }

    #[test]
    fn a_star_stands_for_any_run_and_nothing_else_is_special() {
        for (pattern, text, expected) in [
            ("alice", "alice", true),
            ("alice", "Alice", false),
            ("alice", "alice2", false),
            ("", "", true),
            ("", "a", false),
            ("*", "", true),
            ("*", "any:thing/at=all", true),
            ("web-*", "web-", true),
            ("web-*", "web-1", true),
            ("web-*", "aweb-1", false),
            ("*.example.com", "a.example.com", true),
            ("*.example.com", "a.exampleXcom", false),
            ("a*b", "ab", true),
            ("a*a", "a", false),
            ("a*b*c", "a-b-b-c", true),
            ("a*b*c", "a-c-b", false),
            ("a**b", "ab", true),
            ("[a-z]?", "[a-z]?", true),
            ("[a-z]?", "bc", false),
        ] {
            assert_eq!(Glob::new(pattern).matches(text), expected, "{pattern} {text}");
        }
    }

    #[test]
    fn a_pattern_says_of_whom() {
        let issuers = ["https://a:8443".into(), "https://a:8443:b".into()];
        let jwt = |issuer: &str, subject: &str| {
            Ok(PeerPattern::Jwt { issuer: issuer.into(), subject: Glob::new(subject) })
        };
        let parse = |text| PeerPattern::parse(text, &issuers);
        assert_eq!(parse("jwt:https://a:8443:system:x"), jwt("https://a:8443", "system:x"));
        assert_eq!(parse("jwt:https://a:8443:b:x"), jwt("https://a:8443:b", "x"));
        assert_eq!(parse("jwt:https://b:x"), Err(MalformedPattern::Issuer));
        assert_eq!(parse("jwt:https://a:8443:"), Err(MalformedPattern::Issuer));
        assert_eq!(
            parse("cert:clients:CN=a=b:c*"),
            Ok(PeerPattern::Certificate {
                ca: "clients".into(),
                attribute: Attribute::CommonName,
                name: Glob::new("a=b:c*")
            })
        );
        for bad in [
            "",
            "alice",
            "password:",
            "user:alice",
            "cert:alice",
            "cert:clients:alice",
            "cert:clients:CN=",
            "cert::CN=alice",
            "cert:*:CN=alice",
            "cert:c*:CN=alice",
            "cert:clients:cn=alice",
            "cert:clients:O=alice",
        ] {
            assert_eq!(parse(bad), Err(MalformedPattern::Peer), "{bad}");
        }
    }

    #[test]
    fn a_pattern_is_shown_as_written() {
        for text in [
            "password:a*",
            "file:alice",
            "cert:clients:CN=a:b",
            "cert:clients:DNS=*.example.com",
            "cert:clients:URI=spiffe://a/*",
            "jwt:https://issuer.example.com:system:*",
            "etcd_jwt:alice",
            "listener:*",
        ] {
            let issuers = ["https://issuer.example.com".into()];
            assert_eq!(PeerPattern::parse(text, &issuers).unwrap().to_string(), text);
        }
    }

    #[test]
    fn a_network_is_an_address_and_a_length() {
        for (network, inside, outside) in [
            ("10.0.0.0/8", "10.255.1.2", "11.0.0.0"),
            ("10.1.2.3/32", "10.1.2.3", "10.1.2.2"),
            ("0.0.0.0/0", "255.255.255.255", "::1"),
            ("::/0", "fd00::1", "1.2.3.4"),
            ("fd00::/8", "fdff::1", "fe00::1"),
            ("::1/128", "::1", "::2"),
            ("127.0.0.0/8", "::ffff:127.0.0.1", "::127.0.0.1"),
        ] {
            let parsed = network.parse::<AddressRange>().unwrap();
            assert!(parsed.contains(inside.parse().unwrap()), "{inside} in {network}");
            assert!(!parsed.contains(outside.parse().unwrap()), "{outside} not in {network}");
            assert_eq!(parsed.to_string(), network);
        }
        for bad in [
            "",
            "10.0.0.0",
            "010.0.0.0/8",
            "10.0.0.1/8",
            "10.0.0.0/33",
            "10.0.0.0/+8",
            "10.0.0.0/",
            "::/129",
            "a/8",
        ] {
            assert!(bad.parse::<AddressRange>().is_err(), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn what_a_glob_matches_is_made_of_its_parts(
            parts in prop::collection::vec("[ab]{0,3}", 1..5),
            fill in prop::collection::vec("[ab]{0,3}", 4),
        ) {
            let mut text = String::new();
            for (index, part) in parts.iter().enumerate() {
                if index > 0 {
                    text.push_str(&fill[index - 1]);
                }
                text.push_str(part);
            }
            prop_assert!(Glob::new(&parts.join("*")).matches(&text));
        }

        #[test]
        fn a_glob_without_a_star_matches_itself_only(pattern in "[ab]{0,4}", text in "[ab]{0,4}") {
            prop_assert_eq!(Glob::new(&pattern).matches(&text), pattern == text);
        }

        #[test]
        fn no_text_panics(text in ".{0,40}", other in ".{0,20}") {
            let glob = Glob::new(&text);
            prop_assert!(glob.is_exact() || glob.matches(&text.replace('*', &other)));
            if let Ok(network) = text.parse::<AddressRange>() {
                prop_assert_eq!(network.to_string().parse::<AddressRange>(), Ok(network));
            }
            if let Ok(pattern) = PeerPattern::parse(&text, &[]) {
                prop_assert_eq!(pattern.is_exact(), !text.contains('*'));
            }
        }
    }
}
