//! An authority of ours: what it signs, and that members take it.
//!
//! Owns: what a certificate for an etcd user says, and the check that one of this authority verifies. Must not know: who
//! asks for which user, how long a certificate is used, where the authority comes from.
//! Invariant (rules 19): what it signs is good for clients only. It is checked by making one: etcd looks for the authority
//! by the issuer's name, byte for byte, and that is written here anew.

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

use crate::identity::UserName;
use crate::pem;

/// Signs certificates for etcd users.
pub struct Authority {
    issuer: Issuer<'static, Key>,
    good: (SystemTime, SystemTime),
}

/// Why nobody would take what an authority signs.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Useless {
    /// It cannot be read.
    #[error("is no X.509 certificate that can be read")]
    Unreadable,
    /// Its key.
    #[error(
        "has a key of a kind that nothing is signed with here; ECDSA P-256, P-384, Ed25519 or RSA will do"
    )]
    Key,
    /// Its name.
    #[error(
        "has a subject that cannot be written as an issuer here: an attribute that stands there twice, as in \
         DC=corp,DC=example, or two in one place, or text of an odd kind; members would refuse all that is minted from it, \
         so mint from an authority with a plain subject, as CN=keyward"
    )]
    Subject,
    /// Whatever else.
    #[error("signs what no member would take: {0}")]
    Refused(Arc<str>),
}

/// The authority's key, in whatever form it is stored.
struct Key {
    signing: Arc<dyn SigningKey>,
    scheme: SignatureScheme,
    algorithm: &'static rcgen::SignatureAlgorithm,
    public: Vec<u8>,
}

impl Authority {
    /// Of a certificate and its key.
    ///
    /// # Errors
    /// [`Useless`]: one that it signed was not taken.
    pub fn new(pair: &pem::KeyPair) -> Result<Self, Useless> {
        let certificate = pair.chain().first().ok_or(Useless::Unreadable)?;
        let parsed = parse(certificate)?;
        let at = |seconds: i64| UNIX_EPOCH + Duration::from_secs(u64::try_from(seconds).unwrap_or(0));
        let validity = parsed.validity();
        let good = (at(validity.not_before.timestamp()), at(validity.not_after.timestamp()));
        let key = Key::new(Arc::clone(pair.signing()), parsed.public_key().subject_public_key.data.to_vec())?;
        let issuer = Issuer::from_ca_cert_der(certificate, key).map_err(|_| Useless::Subject)?;
        let authority = Self { issuer, good };
        authority.taken(certificate, parsed.subject().as_raw())?;
        Ok(authority)
    }

    /// From when until when it is good itself.
    #[must_use]
    pub fn good(&self) -> (SystemTime, SystemTime) {
        self.good
    }

    /// A certificate that names this user and is good for a client.
    ///
    /// # Errors
    /// The library's.
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

    /// Signs one for nobody, and looks at it as a member does that trusts `ca`.
    fn taken(&self, ca: &CertificateDer<'static>, subject: &[u8]) -> Result<(), Useless> {
        let refused = |error: &dyn fmt::Display| Useless::Refused(error.to_string().into());
        let key = KeyPair::generate().map_err(|error| refused(&error))?;
        let (begins, ends) = self.good;
        let leaf = self.sign(&"keyward".into(), begins, ends, &key).map_err(|error| refused(&error))?;
        if parse(leaf.der())?.issuer().as_raw() != subject {
            return Err(Useless::Subject);
        }
        let mut roots = RootCertStore::empty();
        roots.add(ca.clone()).map_err(|error| refused(&error))?;
        let verifier =
            WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::new(default_provider()));
        let verifier = verifier.build().map_err(|error| refused(&error))?;
        // Whether it is good now is another question.
        let at = UnixTime::since_unix_epoch(begins.duration_since(UNIX_EPOCH).unwrap_or_default());
        verifier.verify_client_cert(leaf.der(), &[], at).map(drop).map_err(|error| refused(&error))
    }
}

fn parse<'a>(certificate: &'a CertificateDer<'_>) -> Result<X509Certificate<'a>, Useless> {
    X509Certificate::from_der(certificate).map(|(_, parsed)| parsed).map_err(|_| Useless::Unreadable)
}

impl Key {
    fn new(signing: Arc<dyn SigningKey>, public: Vec<u8>) -> Result<Self, Useless> {
        let forms = [
            (SignatureScheme::ECDSA_NISTP256_SHA256, &rcgen::PKCS_ECDSA_P256_SHA256),
            (SignatureScheme::ECDSA_NISTP384_SHA384, &rcgen::PKCS_ECDSA_P384_SHA384),
            (SignatureScheme::ED25519, &rcgen::PKCS_ED25519),
            (SignatureScheme::RSA_PKCS1_SHA256, &rcgen::PKCS_RSA_SHA256),
        ];
        let fits = |scheme: &SignatureScheme| signing.choose_scheme(&[*scheme]).is_some();
        let (scheme, algorithm) = forms.into_iter().find(|(scheme, _)| fits(scheme)).ok_or(Useless::Key)?;
        Ok(Self { signing, scheme, algorithm, public })
    }
}

impl rcgen::PublicKeyData for Key {
    fn der_bytes(&self) -> &[u8] {
        &self.public
    }

    fn algorithm(&self) -> &'static rcgen::SignatureAlgorithm {
        self.algorithm
    }
}

impl rcgen::SigningKey for Key {
    fn sign(&self, message: &[u8]) -> Result<Vec<u8>, rcgen::Error> {
        let signer = self.signing.choose_scheme(&[self.scheme]).ok_or(rcgen::Error::RemoteKeyError)?;
        signer.sign(message).map_err(|_| rcgen::Error::RemoteKeyError)
    }
}

#[cfg(test)]
mod tests {
    use base64::Engine as _;
    use base64::engine::general_purpose::STANDARD;
    use rcgen::BasicConstraints;

    use super::*;
    use crate::pem::{Chain, PrivateKey};

    /// An authority of this name, with other bytes of the same length in its certificate.
    fn authority(name: &DistinguishedName, from: &[u8], to: &[u8]) -> Result<Authority, Useless> {
        let mut params = CertificateParams::default();
        params.distinguished_name = name.clone();
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        let key = KeyPair::generate().unwrap();
        let mut der = params.self_signed(&key).unwrap().der().to_vec();
        let places =
            (0..der.len() - from.len()).filter(|&at| der[at..].starts_with(from)).collect::<Vec<_>>();
        assert_eq!(places.len(), 2, "issuer and subject");
        places.into_iter().for_each(|at| der[at..at + to.len()].copy_from_slice(to));
        let text = STANDARD.encode(der);
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
        // domainComponent, and its neighbour.
        let dc = |last| DnType::CustomDnType(vec![0, 9, 2342, 19_200_300, 100, 1, last]);
        let oid = |last: u8| [&b"\x06\x0a\x09\x92\x26\x89\x93\xf2\x2c\x64\x01"[..], &[last]].concat();
        let mut name = DistinguishedName::new();
        for (kind, value) in [(dc(25), "corp"), (dc(26), "example"), (DnType::CommonName, "mint")] {
            name.push(kind, value);
        }
        let with = |from: &[u8], to: &[u8]| authority(&name, from, to).map(drop);
        assert_eq!(with(&oid(26), &oid(26)), Ok(()));
        assert_eq!(with(&oid(26), &oid(25)), Err(Useless::Subject), "DC=corp,DC=example");
        assert_eq!(with(b"\x0c\x04mint", b"\x13\x04mint"), Ok(()));
        assert_eq!(with(b"\x0c\x04mint", b"\x12\x041234"), Err(Useless::Subject), "text of an odd kind");
    }
}
