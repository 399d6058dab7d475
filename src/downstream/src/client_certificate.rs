//! The names and the expiry in a verified client certificate.
//!
//! Owns: reading the names and the expiry. Must not know: how the certificate was verified, the use of the
//! names.
//! Invariants: an ambiguous name is never used: two common names, bytes in a non-text encoding, control
//! characters. An unreadable certificate is an error, not a certificate without a name.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rustls::pki_types::CertificateDer;
use x509_parser::prelude::{FromDer as _, GeneralName, X509Certificate};

use keyward_etcd::identity::Peer;

/// A client's certificate, already verified.
#[derive(Clone, Debug)]
pub struct ClientCertificate {
    /// The peer named in the certificate.
    pub peer: Peer,
    /// End of the certificate's validity.
    pub expires: SystemTime,
}

/// The certificate was verified but could not be parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the client's certificate could not be read")]
pub struct UnreadableCertificate;

impl ClientCertificate {
    /// Reads a certificate verified under the authority with the listener's label `ca`.
    ///
    /// # Errors
    /// [`UnreadableCertificate`].
    pub fn read(der: &CertificateDer<'_>, ca: &Arc<str>) -> Result<Self, UnreadableCertificate> {
        let (_, certificate) = X509Certificate::from_der(der).map_err(|_| UnreadableCertificate)?;
        let mut names = certificate.subject().iter_common_name();
        let common_name = match (names.next(), names.next()) {
            (Some(only), None) => only.as_str().ok().and_then(plain),
            _ => None,
        };
        let (mut dns, mut uris) = (Vec::new(), Vec::new());
        let alternatives = certificate.subject_alternative_name().map_err(|_| UnreadableCertificate)?;
        for name in alternatives.iter().flat_map(|extension| &extension.value.general_names) {
            match name {
                GeneralName::DNSName(name) => dns.extend(plain(name)),
                GeneralName::URI(uri) => uris.extend(plain(uri)),
                _ => {}
            }
        }
        let end = u64::try_from(certificate.validity().not_after.timestamp()).unwrap_or(0);
        let expires =
            SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(end)).ok_or(UnreadableCertificate)?;
        let peer = Peer::Certificate { ca: Arc::clone(ca), common_name, dns: dns.into(), uris: uris.into() };
        Ok(Self { peer, expires })
    }
}

fn plain(name: &str) -> Option<Arc<str>> {
    (!name.is_empty() && !name.chars().any(char::is_control)).then(|| name.into())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rcgen::{CertificateParams, DnType, DnValue, KeyPair, SanType, date_time_ymd};

    use super::*;
    use keyward_etcd::identity::pattern::Glob;

    fn read(change: impl FnOnce(&mut CertificateParams)) -> ClientCertificate {
        let mut params = CertificateParams::default();
        params.distinguished_name = rcgen::DistinguishedName::new();
        change(&mut params);
        let made = params.self_signed(&KeyPair::generate().unwrap()).unwrap();
        ClientCertificate::read(made.der(), &"clients".into()).unwrap()
    }

    #[test]
    fn names_and_the_end_are_read() {
        let shown = read(|params| {
            params.distinguished_name.push(DnType::CommonName, "web-1");
            params.not_after = date_time_ymd(2040, 1, 1);
            params.subject_alt_names = vec![
                SanType::DnsName("a.test".try_into().unwrap()),
                SanType::URI("spiffe://a/b".try_into().unwrap()),
                SanType::DnsName("b.test".try_into().unwrap()),
                SanType::IpAddress([127, 0, 0, 1].into()),
            ];
        });
        let Peer::Certificate { ca, common_name, dns, uris } = &shown.peer else {
            panic!("{:?}", shown.peer)
        };
        assert_eq!((&**ca, common_name.as_deref()), ("clients", Some("web-1")));
        assert_eq!(dns[..], ["a.test".into(), "b.test".into()]);
        assert_eq!(uris[..], ["spiffe://a/b".into()]);
        assert_eq!(shown.peer.to_string(), "cert:clients:CN=web-1");
        let end = shown.expires.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
        assert_eq!(end, 2_208_988_800);
    }

    #[test]
    fn a_name_that_could_be_read_in_two_ways_is_none() {
        let name_of = |values: &[DnValue]| {
            let shown = read(|params| {
                for value in values {
                    // rcgen keeps one value per type of name, so this test cannot produce two common names.
                    params.distinguished_name.push(DnType::CommonName, value.clone());
                }
            });
            match shown.peer {
                Peer::Certificate { common_name, .. } => common_name,
                other => panic!("{other}"),
            }
        };
        assert_eq!(name_of(&[DnValue::Utf8String("älice".into())]).as_deref(), Some("älice"));
        assert_eq!(name_of(&[]), None);
        assert_eq!(name_of(&[DnValue::Utf8String(String::new())]), None);
        assert_eq!(name_of(&[DnValue::Utf8String("al\nice".into())]), None);
        assert_eq!(name_of(&[DnValue::Utf8String("alice\0".into())]), None);
    }

    /// Parsers disagree on other string types: etcd's (Go's) parser accepts T61String and BMPString as text.
    #[test]
    fn a_name_in_a_kind_of_text_that_readers_differ_in_is_none() {
        let name_of =
            |value: DnValue| match read(|params| params.distinguished_name.push(DnType::CommonName, value))
                .peer
            {
                Peer::Certificate { common_name, .. } => common_name,
                other => panic!("{other}"),
            };
        let root = || "root".to_owned();
        for text in [
            DnValue::TeletexString(root().try_into().unwrap()),
            DnValue::BmpString(root().try_into().unwrap()),
            DnValue::UniversalString(root().try_into().unwrap()),
        ] {
            assert_eq!(name_of(text.clone()), None, "{text:?}");
        }
        for text in [
            DnValue::Utf8String(root()),
            DnValue::PrintableString(root().try_into().unwrap()),
            DnValue::Ia5String(root().try_into().unwrap()),
        ] {
            assert_eq!(name_of(text.clone()).as_deref(), Some("root"), "{text:?}");
        }
        // Names are not trimmed, case-folded or normalised: none of these is root.
        for other in ["root ", " root", "Root", "ro\u{200b}ot", "ｒｏｏｔ", "\u{202e}toor", "*"] {
            assert_eq!(name_of(DnValue::Utf8String(other.to_owned())).as_deref(), Some(other));
        }
    }

    #[test]
    fn a_wildcard_among_the_names_stands_for_itself_and_one_with_an_end_in_it_for_nothing() {
        let names = ["*.example.com", "a.test\0.example.com", ""];
        let shown = read(|params| {
            params.subject_alt_names = names.map(|name| SanType::DnsName(name.try_into().unwrap())).into();
            let uri = "spiffe://a/web\0/../admin".try_into().unwrap();
            params.subject_alt_names.push(SanType::URI(uri));
        });
        let Peer::Certificate { dns, uris, .. } = &shown.peer else { panic!("{}", shown.peer) };
        assert_eq!((&dns[..], uris.len()), (&["*.example.com".into()][..], 0));
        assert!(!Glob::new("a.example.com").matches(&dns[0]), "one host is not all");
    }

    #[test]
    fn two_common_names_are_none() {
        let made = {
            let mut params = CertificateParams::default();
            params.distinguished_name = rcgen::DistinguishedName::new();
            params.distinguished_name.push(DnType::CommonName, "alice");
            // Organization has the object identifier 2.5.4.10, a common name 2.5.4.3.
            params.distinguished_name.push(DnType::OrganizationName, "bobby");
            params.self_signed(&KeyPair::generate().unwrap()).unwrap()
        };
        let mut der = made.der().to_vec();
        let oid = [0x06, 0x03, 0x55, 0x04, 0x0a];
        let places: Vec<_> = (0..der.len() - 5).filter(|&at| der[at..at + 5] == oid).collect();
        assert!(!places.is_empty());
        for at in places {
            der[at + 4] = 0x03;
        }
        let shown = ClientCertificate::read(&der.into(), &"clients".into()).unwrap();
        assert!(matches!(&shown.peer, Peer::Certificate { common_name: None, .. }), "{}", shown.peer);
        assert_eq!(shown.peer.to_string(), "cert:clients:");
    }

    proptest! {
        #[test]
        fn no_bytes_panic(
            mut flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
            cut in any::<prop::sample::Index>(),
        ) {
            let mut params = CertificateParams::new(vec!["a.test".to_owned()]).unwrap();
            params.distinguished_name.push(DnType::CommonName, "alice");
            let made = params.self_signed(&KeyPair::generate().unwrap()).unwrap();
            let mut der = made.der().to_vec();
            for (at, value) in flips.drain(..) {
                let at = at.index(der.len());
                der[at] = value;
            }
            der.truncate(der.len() - cut.index(8));
            drop(ClientCertificate::read(&der.into(), &"clients".into()));
        }
    }
}
