//! Name constraints of authorities.
//!
//! Owns: the extension `nameConstraints`, and the check of a chain's names (Go,
//! `crypto/x509/constraints.go`). Must not know: signatures, validity. Invariants: a name that cannot be
//! compared with a constraint is not allowed; the number of comparisons is limited.

use std::net::IpAddr;

use super::certificate_names::{AlternativeNames, is_domain};
use super::der_reader::{DerReader, SEQUENCE};

/// Maximum number of comparisons for a peer's certificates, as in Go and in webpki.
pub(super) const MAX_COMPARISONS: usize = 250_000;

/// The extension `nameConstraints`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NameConstraints {
    /// The contents of the extension's sequence.
    pub(super) raw: Box<[u8]>,
    permitted: Subtrees,
    excluded: Subtrees,
}

/// An address, and a mask of the same length.
type Network = (Box<[u8]>, Box<[u8]>);

/// Constraints by the kind of name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Subtrees {
    dns: Vec<String>,
    mail: Vec<String>,
    uris: Vec<String>,
    addresses: Vec<Network>,
    /// A kind that Go does not evaluate. A critical extension with such a kind is refused, another is not.
    has_unknown: bool,
}

/// A name of the chain is outside of an authority's constraints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NameOutside;

impl NameConstraints {
    /// As Go's `parseNameConstraintsExtension`.
    pub(super) fn read(value: &[u8]) -> Option<Self> {
        let mut both = DerReader::within(value, SEQUENCE)?;
        let permitted = if both.is_next(0xa0) { both.read(0xa0)? } else { &[] };
        let excluded = if both.is_next(0xa1) { both.read(0xa1)? } else { &[] };
        if !both.is_at_end() || permitted.is_empty() && excluded.is_empty() {
            return None;
        }
        let raw = DerReader::new(value).read(SEQUENCE)?.into();
        Some(Self { raw, permitted: Subtrees::read(permitted)?, excluded: Subtrees::read(excluded)? })
    }

    pub(super) fn has_unknown_names(&self) -> bool {
        self.permitted.has_unknown || self.excluded.has_unknown
    }

    fn allow(&self, names: &ComparableNames<'_>, left: &mut usize) -> bool {
        let Self { permitted, excluded, .. } = self;
        let dns = names.dns.iter().all(|name| {
            is_domain(name)
                && within(&permitted.dns, left, |constraint| is_below(constraint, name))
                && outside(&excluded.dns, left, |constraint| {
                    is_below(constraint, name) || is_beside_wildcard(constraint, name)
                })
        });
        let addresses = names.addresses.iter().all(|address| {
            let is_in = |(network, mask): &Network| is_in_network(network, mask, address);
            within(&permitted.addresses, left, is_in) && outside(&excluded.addresses, left, is_in)
        });
        let uris = names.hosts.iter().all(|host| {
            is_domain(host)
                && within(&permitted.uris, left, |constraint| is_below(constraint, host))
                && outside(&excluded.uris, left, |constraint| is_below(constraint, host))
        });
        let mail = names.mail.iter().all(|&(local, domain)| {
            let is_of = |constraint: &String| match constraint.split_once('@') {
                Some((user, host)) => user == local && host.eq_ignore_ascii_case(domain),
                None => is_below(constraint, domain),
            };
            is_domain(domain) && within(&permitted.mail, left, is_of) && outside(&excluded.mail, left, is_of)
        });
        dns && addresses && uris && mail
    }
}

/// True if there is no constraint, or a constraint matches. Comparisons are taken from `left`.
fn within<T>(constraints: &[T], left: &mut usize, matches: impl Fn(&T) -> bool) -> bool {
    *left = left.saturating_sub(constraints.len());
    *left > 0 && (constraints.is_empty() || constraints.iter().any(matches))
}

fn outside<T>(constraints: &[T], left: &mut usize, matches: impl Fn(&T) -> bool) -> bool {
    *left = left.saturating_sub(constraints.len());
    *left > 0 && !constraints.iter().any(matches)
}

impl Subtrees {
    fn read(contents: &[u8]) -> Option<Self> {
        let mut all = DerReader::new(contents);
        let mut subtrees = Self::default();
        while !all.is_at_end() {
            let base = DerReader::new(all.read(SEQUENCE)?).read_any()?;
            let text =
                || base.contents.is_ascii().then(|| String::from_utf8(base.contents.to_vec()).ok()).flatten();
            match base.tag {
                0x81 => subtrees.mail.push(text().filter(|constraint| match constraint.split_once('@') {
                    Some((local, domain)) => is_plain_mailbox(local) && is_domain(domain),
                    None => is_constraint(constraint),
                })?),
                0x82 => subtrees.dns.push(text().filter(|constraint| is_constraint(constraint))?),
                0x86 => {
                    let is_host = |host: &String| host.parse::<IpAddr>().is_err() && is_constraint(host);
                    subtrees.uris.push(text().filter(is_host)?);
                }
                0x87 => {
                    if !matches!(base.contents.len(), 8 | 32) {
                        return None;
                    }
                    let (network, mask) = base.contents.split_at(base.contents.len() / 2);
                    if !is_mask(mask) {
                        return None;
                    }
                    subtrees.addresses.push((network.into(), mask.into()));
                }
                _ => subtrees.has_unknown = true,
            }
        }
        Some(subtrees)
    }
}

/// As Go's `domainNameValid` for a constraint, which may begin with a period.
fn is_constraint(text: &str) -> bool {
    text.is_empty()
        || text.strip_prefix('.').map_or(is_domain(text), |rest| !rest.is_empty() && is_domain(rest))
}

fn is_mask(mask: &[u8]) -> bool {
    let ones: u32 = mask.iter().map(|byte| byte.leading_ones()).take_while(|&ones| ones == 8).sum();
    let set: u32 = mask.iter().map(|byte| byte.count_ones()).sum();
    let whole = usize::try_from(ones / 8).unwrap_or(mask.len());
    let partly = mask.get(whole).map_or(0, |byte| byte.leading_ones());
    set == ones + partly
}

/// As Go's `dnsHasSuffix`: `example.com` has itself and everything below, `.example.com` only what is below.
fn is_below(constraint: &str, name: &str) -> bool {
    if constraint.is_empty() {
        return true;
    }
    let (constraint, name) = (constraint.as_bytes(), name.as_bytes());
    let Some(at) = name.len().checked_sub(constraint.len()) else { return false };
    let (before, end) = name.split_at(at);
    end.eq_ignore_ascii_case(constraint)
        && (constraint[0] == b'.' || before.last().is_none_or(|&last| last == b'.'))
}

/// True if the wildcard name could be the excluded name: `*.example.com` could be `a.example.com`.
fn is_beside_wildcard(constraint: &str, name: &str) -> bool {
    let parent = |name: &str| name.split_once('.').map(|(_, parent)| parent.to_ascii_lowercase());
    name.starts_with('*') && parent(name).is_some_and(|of_name| parent(constraint) == Some(of_name))
}

fn is_in_network(network: &[u8], mask: &[u8], address: &[u8]) -> bool {
    network.len() == address.len()
        && network.iter().zip(mask).zip(address).all(|((net, mask), byte)| net & mask == byte & mask)
}

/// The names of a certificate in the form in which constraints are compared.
struct ComparableNames<'a> {
    dns: &'a [String],
    addresses: &'a [Box<[u8]>],
    hosts: Vec<String>,
    mail: Vec<(&'a str, &'a str)>,
}

impl<'a> ComparableNames<'a> {
    /// `None` if a name cannot be compared.
    fn of(names: &'a AlternativeNames) -> Option<Self> {
        let hosts = names.uris.iter().map(|uri| host_of(uri)).collect::<Option<_>>()?;
        let mailbox = |mail: &'a String| {
            let (local, domain) = mail.split_once('@')?;
            (is_plain_mailbox(local) && !domain.is_empty() && is_domain(domain)).then_some((local, domain))
        };
        let mail = names.mail.iter().map(mailbox).collect::<Option<_>>()?;
        Some(Self { dns: &names.dns, addresses: &names.addresses, hosts, mail })
    }
}

/// The host of a URI; `None` without a host, and for an address.
fn host_of(uri: &str) -> Option<String> {
    let (_, rest) = uri.split_once(':')?;
    let authority = rest.strip_prefix("//")?.split(['/', '?', '#']).next()?;
    let host = authority.split(':').next()?;
    (!host.is_empty() && host.parse::<IpAddr>().is_err()).then(|| host.to_ascii_lowercase())
}

/// The local part of a mailbox without quotes. Go reads quoted parts too.
fn is_plain_mailbox(local: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-/=?^_`{|}~".contains(&byte);
    local.split('.').all(|part| !part.is_empty() && part.bytes().all(is_plain))
}

/// The names of a certificate, and the constraints on the certificates below.
pub(super) type NamesAndLimits<'a> = (Option<&'a AlternativeNames>, Option<&'a NameConstraints>);

/// Checks the names of every certificate of a chain, leaf first, against the authorities above. Comparisons
/// are taken from `left`.
pub(super) fn check(chain: &[NamesAndLimits<'_>], left: &mut usize) -> Result<(), NameOutside> {
    for (index, (names, _)) in chain.iter().enumerate() {
        let Some(names) = names else { continue };
        let mut above = chain.iter().skip(index + 1).filter_map(|(_, limits)| *limits).peekable();
        if above.peek().is_none() {
            continue;
        }
        let names = ComparableNames::of(names).ok_or(NameOutside)?;
        if !above.all(|constraints| constraints.allow(&names, left)) {
            return Err(NameOutside);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_domain_has_itself_and_what_is_below() {
        for (constraint, name) in [
            ("", "a"),
            ("example.com", "example.com"),
            ("example.com", "a.Example.com"),
            (".example.com", "a.example.com"),
        ] {
            assert!(is_below(constraint, name), "{constraint} {name}");
        }
        for (constraint, name) in
            [("example.com", "anexample.com"), (".example.com", "example.com"), ("example.com", "com")]
        {
            assert!(!is_below(constraint, name), "{constraint} {name}");
        }
        assert!(is_beside_wildcard("a.example.com", "*.example.com"));
        assert!(!is_beside_wildcard("a.b.example.com", "*.example.com"));
        assert!(!is_beside_wildcard("com", "*"));
    }

    #[test]
    fn masks_are_ones_and_then_zeros() {
        for good in [&[0xff, 0xff, 0, 0][..], &[0; 4], &[0xff; 4], &[0xfe, 0, 0, 0]] {
            assert!(is_mask(good), "{good:?}");
        }
        for bad in [&[0, 0xff, 0, 0][..], &[0xfd, 0, 0, 0], &[0xff, 0x7f, 0, 0]] {
            assert!(!is_mask(bad), "{bad:?}");
        }
        assert!(is_in_network(&[10, 0, 0, 0], &[255, 0, 0, 0], &[10, 9, 9, 9]));
        assert!(!is_in_network(&[10, 0, 0, 0], &[255, 0, 0, 0], &[11, 9, 9, 9]));
        assert!(!is_in_network(&[0; 4], &[0; 4], &[0; 16]));
    }

    #[test]
    fn comparisons_are_limited() {
        let constraints = NameConstraints {
            raw: Box::default(),
            permitted: Subtrees::default(),
            excluded: Subtrees { dns: vec!["b.test".to_owned(); 600], ..Subtrees::default() },
        };
        let dns = vec!["a.test".to_owned(); 600];
        let names = ComparableNames { dns: &dns, addresses: &[], hosts: Vec::new(), mail: Vec::new() };
        assert!(!constraints.allow(&names, &mut MAX_COMPARISONS.clone()));
        let few = ComparableNames { dns: &dns[..9], ..names };
        assert!(constraints.allow(&few, &mut MAX_COMPARISONS.clone()));
    }
}
