//! The names in a certificate.
//!
//! Owns: subject alternative names, the comparison of a member's host name with them, and the text of a
//! subject for logs. Must not know: the chain. Invariants: names that Go cannot parse are not read; the
//! common name is never a host name (Go, `Certificate.VerifyHostname`).

use std::net::IpAddr;

use rustls::pki_types::{CertificateDer, ServerName};
use x509_parser::prelude::{FromDer as _, X509Certificate};

use super::certificate_fields::name_attributes;
use super::der_reader::{DerReader, SEQUENCE};

/// Most characters of a subject in a log line.
const MAX_TEXT: usize = 200;

/// The extension `subjectAltName`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct AlternativeNames {
    /// The extension's value, by which Go recognises a certificate that is already in a chain.
    pub(super) raw: Box<[u8]>,
    pub(super) dns: Vec<String>,
    pub(super) mail: Vec<String>,
    pub(super) uris: Vec<String>,
    /// Four or sixteen bytes each.
    pub(super) addresses: Vec<Box<[u8]>>,
}

impl AlternativeNames {
    /// As Go's `parseSANExtension`.
    pub(super) fn read(value: &[u8]) -> Option<Self> {
        let mut all = DerReader::new(DerReader::new(value).read(SEQUENCE)?);
        let mut names = Self { raw: value.into(), ..Self::default() };
        while !all.is_at_end() {
            let name = all.read_any()?;
            match name.tag ^ 0x80 {
                1 => names.mail.push(ascii(name.contents)?),
                2 => names.dns.push(ascii(name.contents)?),
                6 => names.uris.push(ascii(name.contents).filter(|uri| is_plain_uri(uri))?),
                7 if matches!(name.contents.len(), 4 | 16) => names.addresses.push(name.contents.into()),
                7 => return None,
                // otherName, x400Address, directoryName, ediPartyName, registeredID
                0x20 | 0x23..=0x25 | 8 => {}
                // Go ignores other tags, and x509-parser takes some of them for names of a client.
                _ => return None,
            }
        }
        Some(names)
    }

    pub(super) fn has_known_names(&self) -> bool {
        !(self.dns.is_empty() && self.mail.is_empty() && self.uris.is_empty() && self.addresses.is_empty())
    }

    /// As Go's `VerifyHostname`.
    pub(super) fn is_for(&self, name: &ServerName<'_>) -> bool {
        match name {
            ServerName::IpAddress(wanted) => {
                let wanted = IpAddr::from(*wanted).to_canonical();
                self.addresses.iter().any(|address| address_of(address) == Some(wanted))
            }
            ServerName::DnsName(wanted) => {
                let wanted = wanted.as_ref().to_ascii_lowercase();
                self.dns.iter().any(|pattern| is_host(&pattern.to_ascii_lowercase(), &wanted))
            }
            _ => false,
        }
    }
}

fn address_of(bytes: &[u8]) -> Option<IpAddr> {
    match bytes.len() {
        4 => <[u8; 4]>::try_from(bytes).ok().map(IpAddr::from),
        _ => <[u8; 16]>::try_from(bytes).ok().map(|bytes| IpAddr::from(bytes).to_canonical()),
    }
}

fn ascii(bytes: &[u8]) -> Option<String> {
    bytes.is_ascii().then(|| std::str::from_utf8(bytes).ok().map(str::to_owned)).flatten()
}

/// Compares a pattern of a certificate with a host's name, both in lower case.
fn is_host(pattern: &str, wanted: &str) -> bool {
    let is_valid = |name: &str, is_pattern: bool| {
        let name = if is_pattern { name } else { name.strip_suffix('.').unwrap_or(name) };
        !name.is_empty()
            && name != "*"
            && name.split('.').enumerate().all(|(index, label)| {
                let is_wildcard = is_pattern && index == 0 && label == "*";
                let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
                is_wildcard || !label.is_empty() && !label.starts_with('-') && label.bytes().all(is_plain)
            })
    };
    if !(is_valid(wanted, false) && is_valid(pattern, true)) {
        return pattern == wanted && !matches!(wanted, "" | ".");
    }
    let wanted = wanted.strip_suffix('.').unwrap_or(wanted);
    let (mut patterns, mut labels) = (pattern.split('.'), wanted.split('.'));
    let mut index = 0;
    loop {
        match (patterns.next(), labels.next()) {
            (None, None) => return true,
            (Some("*"), Some(_)) if index == 0 => {}
            (Some(pattern), Some(label)) if pattern == label => {}
            _ => return false,
        }
        index += 1;
    }
}

/// A URI that Go's `url.Parse` takes for certain, and whose host is a valid domain. Go takes some more: with
/// a user, an IPv6 address, escapes in the host, or without a scheme.
fn is_plain_uri(uri: &str) -> bool {
    let Some((scheme, rest)) = uri.split_once(':') else { return false };
    let mut letters = scheme.bytes();
    let is_scheme = letters.next().is_some_and(|first| first.is_ascii_alphabetic())
        && letters.all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'-' | b'.'));
    let is_escaped = rest.split('%').skip(1).all(|after| {
        after.as_bytes().get(..2).is_some_and(|digits| digits.iter().all(u8::is_ascii_hexdigit))
    });
    if !is_scheme || !is_escaped || !rest.bytes().all(|byte| byte.is_ascii_graphic()) {
        return false;
    }
    let authority =
        rest.strip_prefix("//").map(|rest| rest.split(['/', '?', '#']).next().unwrap_or_default());
    authority.is_none_or(|authority| {
        let (host, port) = authority.split_once(':').unwrap_or((authority, ""));
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
        port.bytes().all(|byte| byte.is_ascii_digit())
            && host.bytes().all(is_plain)
            && (authority.is_empty() || is_domain(host))
    })
}

/// As Go's `domainNameValid` for a name: labels of printable characters, none of them empty.
pub(super) fn is_domain(name: &str) -> bool {
    name.is_empty()
        || name.bytes().all(|byte| byte.is_ascii_graphic()) && name.split('.').all(|l| !l.is_empty())
}

/// True if Go reads the texts of a name (`parseASN1String`). Other texts make the certificate unreadable.
pub(super) fn is_name_readable(name: &[u8]) -> bool {
    let Some(attributes) = name_attributes(name) else { return false };
    attributes.iter().all(|&(_, tag, text)| match tag {
        12 => std::str::from_utf8(text).is_ok(),
        18 => text.iter().all(|&byte| byte.is_ascii_digit() || byte == b' '),
        19 => text.iter().all(|&byte| byte.is_ascii_alphanumeric() || b" '()+,-./:=?*&".contains(&byte)),
        20 => true,
        22 => text.is_ascii(),
        30 => is_bmp(text),
        _ => false,
    })
}

fn is_bmp(text: &[u8]) -> bool {
    let (points, rest) = text.as_chunks::<2>();
    let points = points.strip_suffix(&[[0, 0]]).unwrap_or(points);
    rest.is_empty()
        && points.iter().all(|&point| {
            !matches!(u16::from_be_bytes(point), 0xfffe | 0xffff | 0xfdd0..=0xfdef | 0xd800..=0xdfff)
        })
}

/// A certificate's subject for a log line: printable, and of limited length.
#[must_use]
pub fn subject_text(der: &CertificateDer<'_>) -> String {
    let Ok((_, certificate)) = X509Certificate::from_der(der) else { return "unreadable".to_owned() };
    let subject = certificate.subject().to_string();
    let mut text: String = subject.chars().take(MAX_TEXT).flat_map(char::escape_debug).collect();
    if subject.chars().nth(MAX_TEXT).is_some() {
        text.push('…');
    }
    if text.is_empty() { "an empty subject".to_owned() } else { text }
}
