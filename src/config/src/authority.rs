//! A certificate authority held by Keyward, for minting client certificates.
//!
//! Owns: the content of a certificate for an etcd user, and the check that minted certificates verify. Must
//! not know: the requesting user, the use of a certificate, the source of the authority. Invariant
//! (docs/decisions.md#d19): minted certificates are valid for clients only. The check mints a certificate:
//! etcd looks up the authority by the issuer name, byte for byte, and the library encodes this name anew.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rcgen::{
    CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use rustls::crypto::ring::default_provider;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::sign::SigningKey;
use rustls::{RootCertStore, SignatureScheme};
use x509_parser::certificate::X509Certificate;
use x509_parser::prelude::FromDer as _;

use keyward_base::pem;
use keyward_etcd::identity::UserName;

/// Signs certificates for etcd users.
pub struct Authority {
    issuer: Issuer<'static, AuthorityKey>,
    validity: (SystemTime, SystemTime),
}

/// Reasons for members to reject certificates of an authority.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnusableAuthority {
    /// The certificate is not readable.
    #[error("is no X.509 certificate that can be read")]
    Unreadable,
    /// The key is of an unsupported kind.
    #[error(
        "has a key of a kind that nothing is signed with here; ECDSA P-256, P-384, Ed25519 or RSA will do"
    )]
    Key,
    /// The subject is not reproduced byte for byte as an issuer.
    #[error(
        "has a subject that cannot be written as an issuer here: an attribute that stands there twice, as in \
         DC=corp,DC=example, or two in one place, or text of an odd kind; members would refuse all that is \
         minted from it, so mint from an authority with a plain subject, as CN=keyward"
    )]
    Subject,
    /// The verifier's error.
    #[error("signs what no member would take: {0}")]
    Refused(Arc<str>),
}

/// The authority's private key, of any supported kind.
struct AuthorityKey {
    signing: Arc<dyn SigningKey>,
    scheme: SignatureScheme,
    algorithm: &'static rcgen::SignatureAlgorithm,
    public: Vec<u8>,
}

impl Authority {
    /// Builds an authority from a certificate and the private key.
    ///
    /// # Errors
    /// [`UnusableAuthority`]: a test certificate of the authority was not accepted.
    pub fn new(pair: &pem::KeyPair) -> Result<Self, UnusableAuthority> {
        let certificate = pair.chain().first().ok_or(UnusableAuthority::Unreadable)?;
        let parsed = parse(certificate)?;
        let at = |seconds: i64| UNIX_EPOCH + Duration::from_secs(u64::try_from(seconds).unwrap_or(0));
        let validity = parsed.validity();
        let good = (at(validity.not_before.timestamp()), at(validity.not_after.timestamp()));
        let key = AuthorityKey::new(
            Arc::clone(pair.signing()),
            parsed.public_key().subject_public_key.data.to_vec(),
        )?;
        let issuer = Issuer::from_ca_cert_der(certificate, key).map_err(|_| UnusableAuthority::Subject)?;
        let authority = Self { issuer, validity: good };
        authority.check_accepted(certificate, parsed.subject().as_raw())?;
        Ok(authority)
    }

    /// Begin and end of the authority's own validity.
    #[must_use]
    pub fn good(&self) -> (SystemTime, SystemTime) {
        self.validity
    }

    /// Signs a client certificate for the user.
    ///
    /// # Errors
    /// The library's error.
    pub fn sign(
        &self,
        user: &UserName,
        not_before: SystemTime,
        not_after: SystemTime,
        key: &KeyPair,
    ) -> Result<rcgen::Certificate, rcgen::Error> {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, user.as_str());
        params.not_before = not_before.into();
        params.not_after = not_after.into();
        params.is_ca = IsCa::ExplicitNoCa;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        params.use_authority_key_identifier_extension = true;
        params.signed_by(key, &self.issuer)
    }

    /// Signs a test certificate, and verifies it as a member trusting `ca` does.
    fn check_accepted(&self, ca: &CertificateDer<'static>, subject: &[u8]) -> Result<(), UnusableAuthority> {
        let refused = |error: &dyn fmt::Display| UnusableAuthority::Refused(error.to_string().into());
        let key = KeyPair::generate().map_err(|error| refused(&error))?;
        let (begins, ends) = self.validity;
        let leaf = self.sign(&"keyward".into(), begins, ends, &key).map_err(|error| refused(&error))?;
        if parse(leaf.der())?.issuer().as_raw() != subject {
            return Err(UnusableAuthority::Subject);
        }
        let mut roots = RootCertStore::empty();
        roots.add(ca.clone()).map_err(|error| refused(&error))?;
        let verifier =
            WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::new(default_provider()));
        let verifier = verifier.build().map_err(|error| refused(&error))?;
        // Verifies at the beginning of the validity: the present validity is checked elsewhere.
        let at = UnixTime::since_unix_epoch(begins.duration_since(UNIX_EPOCH).unwrap_or_default());
        verifier.verify_client_cert(leaf.der(), &[], at).map(drop).map_err(|error| refused(&error))
    }
}

fn parse<'a>(certificate: &'a CertificateDer<'_>) -> Result<X509Certificate<'a>, UnusableAuthority> {
    X509Certificate::from_der(certificate)
        .map(|(_, parsed)| parsed)
        .map_err(|_| UnusableAuthority::Unreadable)
}

impl AuthorityKey {
    fn new(signing: Arc<dyn SigningKey>, public: Vec<u8>) -> Result<Self, UnusableAuthority> {
        let forms = [
            (SignatureScheme::ECDSA_NISTP256_SHA256, &rcgen::PKCS_ECDSA_P256_SHA256),
            (SignatureScheme::ECDSA_NISTP384_SHA384, &rcgen::PKCS_ECDSA_P384_SHA384),
            (SignatureScheme::ED25519, &rcgen::PKCS_ED25519),
            (SignatureScheme::RSA_PKCS1_SHA256, &rcgen::PKCS_RSA_SHA256),
        ];
        let fits = |scheme: &SignatureScheme| signing.choose_scheme(&[*scheme]).is_some();
        let (scheme, algorithm) =
            forms.into_iter().find(|(scheme, _)| fits(scheme)).ok_or(UnusableAuthority::Key)?;
        Ok(Self { signing, scheme, algorithm, public })
    }
}

impl rcgen::PublicKeyData for AuthorityKey {
    fn der_bytes(&self) -> &[u8] {
        &self.public
    }

    fn algorithm(&self) -> &'static rcgen::SignatureAlgorithm {
        self.algorithm
    }
}

impl rcgen::SigningKey for AuthorityKey {
    fn sign(&self, message: &[u8]) -> Result<Vec<u8>, rcgen::Error> {
        let signer = self.signing.choose_scheme(&[self.scheme]).ok_or(rcgen::Error::RemoteKeyError)?;
        signer.sign(message).map_err(|_| rcgen::Error::RemoteKeyError)
    }
}

#[cfg(test)]
mod tests {
    use data_encoding::BASE64;
    use rcgen::BasicConstraints;

    use super::*;
    use keyward_base::pem::{Chain, PrivateKey};

    /// An authority of this name, with the bytes `from` replaced by `to` in its certificate.
    fn authority(name: &DistinguishedName, from: &[u8], to: &[u8]) -> Result<Authority, UnusableAuthority> {
        let mut params = CertificateParams::default();
        params.distinguished_name = name.clone();
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        let key = KeyPair::generate().unwrap();
        let mut der = params.self_signed(&key).unwrap().der().to_vec();
        let places =
            (0..der.len() - from.len()).filter(|&at| der[at..].starts_with(from)).collect::<Vec<_>>();
        assert_eq!(places.len(), 2, "issuer and subject");
        places.into_iter().for_each(|at| der[at..at + to.len()].copy_from_slice(to));
        let text = BASE64.encode(&der);
        let text = format!("-----BEGIN CERTIFICATE-----\n{text}\n-----END CERTIFICATE-----\n");
        let folder = tempfile::tempdir().unwrap();
        let (cert, private) = (folder.path().join("cert.pem"), folder.path().join("key.pem"));
        std::fs::write(&cert, text).unwrap();
        std::fs::write(&private, key.serialize_pem()).unwrap();
        let pair = pem::KeyPair::new(Chain::read(&cert).unwrap(), PrivateKey::read(&private).unwrap());
        Authority::new(&pair.unwrap())
    }

    #[test]
    fn an_authority_whose_name_comes_out_otherwise_is_refused_before_members_refuse_all() {
        // The OID of domainComponent, and its neighbour.
        let dc = |last| DnType::CustomDnType(vec![0, 9, 2342, 19_200_300, 100, 1, last]);
        let oid = |last: u8| [&b"\x06\x0a\x09\x92\x26\x89\x93\xf2\x2c\x64\x01"[..], &[last]].concat();
        let mut name = DistinguishedName::new();
        for (kind, value) in [(dc(25), "corp"), (dc(26), "example"), (DnType::CommonName, "mint")] {
            name.push(kind, value);
        }
        let with = |from: &[u8], to: &[u8]| authority(&name, from, to).map(drop);
        assert_eq!(with(&oid(26), &oid(26)), Ok(()));
        assert_eq!(with(&oid(26), &oid(25)), Err(UnusableAuthority::Subject), "DC=corp,DC=example");
        assert_eq!(with(b"\x0c\x04mint", b"\x13\x04mint"), Ok(()));
        assert_eq!(
            with(b"\x0c\x04mint", b"\x12\x041234"),
            Err(UnusableAuthority::Subject),
            "text of an odd kind"
        );
    }
}
