//! Certificates, revocation lists and private keys read from PEM files.
//!
//! Owns: the only use of `rustls-pemfile`, and the check for usable content. Must not know: the owner of a
//! certificate, or its connection. Invariants: a chain is never empty; the key of a key pair matches its
//! certificate; an error names the file and the reason, never the content; of a private key only its signer
//! is kept.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use data_encoding::{HEXLOWER, HEXLOWER_PERMISSIVE};
use rustls::RootCertStore;
use rustls::crypto::ring::default_provider;
use rustls::crypto::ring::sign::any_supported_type;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer};
use rustls::server::{VerifierBuilderError, WebPkiClientVerifier};
use rustls::sign::SigningKey;
use rustls_pemfile::Item;
use sha2::{Digest as _, Sha256};
use x509_parser::prelude::{FromDer as _, X509Certificate};
use zeroize::Zeroizing;

/// Larger than any chain or bundle (Debian's whole CA bundle has 220 KiB); limits the memory spent on
/// `/dev/zero`.
const MAX_FILE: u64 = 4 << 20;

/// A certificate chain, leaf first. Never empty.
#[derive(Clone, Debug, PartialEq)]
pub struct Chain(Vec<CertificateDer<'static>>);

/// A private key for signing. Masked when printed; the bytes of the file are wiped.
#[derive(Debug)]
pub struct PrivateKey {
    signing: Arc<dyn SigningKey>,
}

/// A certificate chain with the private key of its leaf. Clones share the data.
#[derive(Clone, Debug, PartialEq)]
pub struct KeyPair {
    chain: Arc<Chain>,
    key: Arc<PrivateKey>,
}

/// Certificates of trusted authorities. Never empty; clones share the data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Roots(Arc<[CertificateDer<'static>]>);

/// The SHA-256 of a certificate, identifying the certificate. Written in hexadecimal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CertificateFingerprint([u8; 32]);

/// Certificate revocation lists. Never empty; clones share the data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Crls(Arc<[CertificateRevocationListDer<'static>]>);

/// The private key belongs to a different certificate.
#[derive(Debug, thiserror::Error)]
#[error("the private key does not belong to the certificate")]
pub struct Mismatch;

/// An unusable PEM file.
#[derive(Debug)]
pub struct PemError {
    /// Path of the file.
    pub path: PathBuf,
    /// The fault.
    pub reason: PemErrorReason,
}

/// Faults of a PEM file.
#[derive(Debug, thiserror::Error)]
pub enum PemErrorReason {
    /// The file cannot be opened or read.
    #[error("{0}")]
    Unreadable(io::Error),
    /// The file is larger than any sensible PEM file.
    #[error("is larger than {} MiB", MAX_FILE >> 20)]
    TooLarge,
    /// A header without its footer, or invalid base64 in between.
    #[error("is not valid PEM")]
    NotPem,
    /// The file holds no certificate.
    #[error("holds no certificate (BEGIN CERTIFICATE)")]
    NoCertificate,
    /// A certificate is not X.509.
    #[error("certificate {position} is no X.509 certificate")]
    BadCertificate {
        /// Position of the certificate, counted from 1.
        position: usize,
    },
    /// The file holds no revocation list.
    #[error("holds no certificate revocation list (BEGIN X509 CRL)")]
    NoCrl,
    /// A revocation list is not usable.
    #[error("holds a revocation list that cannot be used: {0}")]
    BadCrl(VerifierBuilderError),
    /// The file holds no private key.
    #[error("holds no private key (BEGIN PRIVATE KEY, RSA PRIVATE KEY or EC PRIVATE KEY)")]
    NoKey,
    /// The key needs a passphrase, and no user is present for typing it.
    #[error("holds an encrypted private key; it must be stored decrypted, readable by Keyward only")]
    EncryptedKey,
    /// The key is damaged, or of a kind unable to sign.
    #[error("holds a private key that is damaged or of an unsupported kind")]
    BadKey,
}

impl fmt::Display for PemError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = self.path.display();
        match &self.reason {
            PemErrorReason::Unreadable(error) => write!(f, "cannot read {path}: {error}"),
            reason => write!(f, "{path} {reason}"),
        }
    }
}

impl std::error::Error for PemError {}

impl Chain {
    /// Reads every certificate of the file.
    ///
    /// # Errors
    /// [`PemError`] with the file's fault.
    pub fn read(path: &Path) -> Result<Self, PemError> {
        let at = |reason| PemError { path: path.to_owned(), reason };
        let pem = read(path).map_err(at)?;
        let chain: Vec<_> = rustls_pemfile::certs(&mut &pem[..])
            .collect::<Result<_, _>>()
            .map_err(|_| at(PemErrorReason::NotPem))?;
        for (index, certificate) in chain.iter().enumerate() {
            if !matches!(X509Certificate::from_der(certificate), Ok(([], _))) {
                return Err(at(PemErrorReason::BadCertificate { position: index + 1 }));
            }
        }
        if chain.is_empty() { Err(at(PemErrorReason::NoCertificate)) } else { Ok(Self(chain)) }
    }
}

impl PrivateKey {
    /// Reads the first private key of the file (certificates beside the key are allowed).
    ///
    /// # Errors
    /// [`PemError`] with the file's fault.
    pub fn read(path: &Path) -> Result<Self, PemError> {
        let at = |reason| PemError { path: path.to_owned(), reason };
        let pem = read(path).map_err(at)?;
        let der = match rustls_pemfile::private_key(&mut &pem[..]) {
            Ok(Some(key)) => Zeroizing::new(key),
            // PKCS #8 and the older OpenSSL form: the reader skips the former and reports the latter as
            // damaged.
            _ if has(&pem, b"BEGIN ENCRYPTED PRIVATE KEY") || has(&pem, b"Proc-Type: 4,ENCRYPTED") => {
                return Err(at(PemErrorReason::EncryptedKey));
            }
            Ok(None) => return Err(at(PemErrorReason::NoKey)),
            Err(_) => return Err(at(PemErrorReason::NotPem)),
        };
        let signing = any_supported_type(&der).map_err(|_| at(PemErrorReason::BadKey))?;
        Ok(Self { signing })
    }
}

/// Private keys are compared by their public keys.
impl PartialEq for PrivateKey {
    fn eq(&self, other: &Self) -> bool {
        self.signing.public_key() == other.signing.public_key()
    }
}

impl PrivateKey {
    /// The signer of this key.
    #[must_use]
    pub fn signing(&self) -> &Arc<dyn SigningKey> {
        &self.signing
    }
}

impl KeyPair {
    /// Combines a chain with its key.
    ///
    /// # Errors
    /// [`Mismatch`] if the key does not belong to the chain's first certificate.
    pub fn new(chain: Chain, key: PrivateKey) -> Result<Self, Mismatch> {
        // Without rustls' own comparison, which reads X.509 version 3 only.
        let leaf = chain.0.first().and_then(|leaf| X509Certificate::from_der(leaf).ok());
        let own = key.signing.public_key();
        let is_same = leaf.zip(own).is_some_and(|((_, leaf), own)| *leaf.public_key().raw == *own);
        if !is_same {
            return Err(Mismatch);
        }
        Ok(Self { chain: Arc::new(chain), key: Arc::new(key) })
    }

    /// The certificates, leaf first.
    #[must_use]
    pub fn chain(&self) -> &[CertificateDer<'static>] {
        &self.chain.0
    }

    /// The signer of the leaf's private key.
    #[must_use]
    pub fn signing(&self) -> &Arc<dyn SigningKey> {
        &self.key.signing
    }
}

impl Roots {
    /// Reads every certificate of the file. The verifier decides on their use (`trust`).
    ///
    /// # Errors
    /// [`PemError`] with the file's fault.
    pub fn read(path: &Path) -> Result<Self, PemError> {
        let Chain(roots) = Chain::read(path)?;
        Ok(Self(roots.into()))
    }

    /// The certificates.
    #[must_use]
    pub fn certificates(&self) -> &[CertificateDer<'static>] {
        &self.0
    }
}

impl CertificateFingerprint {
    /// The fingerprint of a certificate in DER.
    #[must_use]
    pub fn of(certificate: &CertificateDer<'_>) -> Self {
        Self(Sha256::digest(certificate).into())
    }

    /// Parses the output of `openssl x509 -fingerprint -sha256`: 64 hexadecimal digits, with or without
    /// colons between the bytes.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let has_colons = text.len() == 95 && text.bytes().skip(2).step_by(3).all(|byte| byte == b':');
        let digits = if has_colons { text.replace(':', "") } else { text.to_owned() };
        HEXLOWER_PERMISSIVE.decode(digits.as_bytes()).ok()?.try_into().ok().map(Self)
    }
}

impl fmt::Display for CertificateFingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        HEXLOWER.encode_display(&self.0).fmt(f)
    }
}

impl Crls {
    /// Reads every revocation list of the file, each required to be usable for certificates under `roots`.
    ///
    /// # Errors
    /// [`PemError`] with the file's fault.
    pub fn read(path: &Path, roots: &Roots) -> Result<Self, PemError> {
        let at = |reason| PemError { path: path.to_owned(), reason };
        let pem = read(path).map_err(at)?;
        let crls: Vec<_> = rustls_pemfile::crls(&mut &pem[..])
            .collect::<Result<_, _>>()
            .map_err(|_| at(PemErrorReason::NotPem))?;
        if crls.is_empty() {
            return Err(at(PemErrorReason::NoCrl));
        }
        let mut store = RootCertStore::empty();
        store.add_parsable_certificates(roots.certificates().iter().cloned());
        WebPkiClientVerifier::builder_with_provider(Arc::new(store), Arc::new(default_provider()))
            .with_crls(crls.iter().cloned())
            .build()
            .map_err(|error| at(PemErrorReason::BadCrl(error)))?;
        Ok(Self(crls.into()))
    }

    /// The revocation lists.
    #[must_use]
    pub fn lists(&self) -> &[CertificateRevocationListDer<'static>] {
        &self.0
    }
}

/// Reasons for rejecting a file of public keys.
#[derive(Debug, thiserror::Error)]
pub enum NoPublicKeys {
    /// A header without its footer, or invalid base64 in between.
    #[error("is not valid PEM")]
    NotPem,
    /// The text holds a private key.
    #[error("holds a private key")]
    Private,
}

/// Returns the public keys (`BEGIN PUBLIC KEY`) in a text, as `SubjectPublicKeyInfo` in DER.
///
/// # Errors
/// [`NoPublicKeys`].
pub fn public_keys(mut text: &[u8]) -> Result<Vec<Vec<u8>>, NoPublicKeys> {
    let mut keys = Vec::new();
    for item in rustls_pemfile::read_all(&mut text) {
        match item.map_err(|_| NoPublicKeys::NotPem)? {
            Item::SubjectPublicKeyInfo(key) => keys.push(key.to_vec()),
            Item::Pkcs1Key(_) | Item::Pkcs8Key(_) | Item::Sec1Key(_) => return Err(NoPublicKeys::Private),
            _ => {}
        }
    }
    Ok(keys)
}

fn has(pem: &[u8], words: &[u8]) -> bool {
    pem.windows(words.len()).any(|window| window == words)
}

/// Reads into a buffer wiped on drop, allocated once: a growing buffer would leave copies in freed memory.
fn read(path: &Path) -> Result<Zeroizing<Vec<u8>>, PemErrorReason> {
    let file = File::open(path).map_err(PemErrorReason::Unreadable)?;
    let expected = file.metadata().map_err(PemErrorReason::Unreadable)?.len().min(MAX_FILE);
    let mut bytes = Zeroizing::new(Vec::with_capacity(usize::try_from(expected).unwrap_or(0) + 1));
    file.take(MAX_FILE + 1).read_to_end(&mut bytes).map_err(PemErrorReason::Unreadable)?;
    if bytes.len() as u64 > MAX_FILE { Err(PemErrorReason::TooLarge) } else { Ok(bytes) }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    struct Files {
        folder: tempfile::TempDir,
    }

    impl Files {
        fn new() -> Self {
            Self { folder: tempfile::tempdir().unwrap() }
        }

        fn with(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
            let path = self.folder.path().join(name);
            fs::write(&path, content).unwrap();
            path
        }
    }

    fn pair() -> (String, String) {
        let made = rcgen::generate_simple_self_signed(["keyward.test".to_owned()]).unwrap();
        (made.cert.pem(), made.signing_key.serialize_pem())
    }

    #[test]
    fn a_pair_may_share_one_file_and_a_chain_keeps_its_order() {
        let files = Files::new();
        let ((leaf, key), (issuer, _)) = (pair(), pair());
        let path = files.with("all.pem", format!("some prose\n{leaf}{key}{issuer}"));
        let chain = Chain::read(&path).unwrap();
        let leaf_der = chain.0[0].clone();
        let pair = KeyPair::new(chain, PrivateKey::read(&path).unwrap()).unwrap();
        assert_eq!(pair.chain().len(), 2);
        assert_eq!(pair.chain()[0], leaf_der);
        assert_eq!(Roots::read(&path).unwrap().certificates().len(), 2);
    }

    #[test]
    fn a_fingerprint_is_read_as_openssl_writes_it() {
        let of = CertificateFingerprint::of(&CertificateDer::from(b"abc".to_vec()));
        let text = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(of.to_string(), text);
        let upper = text.to_uppercase();
        let colons: Vec<&str> = (0..32).map(|at| &upper[2 * at..2 * at + 2]).collect();
        for good in [text, &upper, &colons.join(":")] {
            assert_eq!(CertificateFingerprint::parse(good), Some(of), "{good}");
        }
        let long = format!("{text}00");
        for bad in [
            "",
            "ba78",
            &text[1..],
            &long,
            &text.replace('b', "g"),
            &colons.join("-"),
            &text.replace("ba", "+a"),
        ] {
            assert_eq!(CertificateFingerprint::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_key_of_another_certificate_is_refused() {
        let files = Files::new();
        let ((certificate, _), (_, key)) = (pair(), pair());
        let chain = Chain::read(&files.with("cert.pem", certificate)).unwrap();
        let key = PrivateKey::read(&files.with("key.pem", key)).unwrap();
        assert!(KeyPair::new(chain, key).is_err());
    }

    #[test]
    fn a_useless_file_says_why() {
        let files = Files::new();
        let (certificate, key) = pair();
        let damaged = "-----BEGIN CERTIFICATE-----\nMIIBSECRET\n-----END CERTIFICATE-----\n";
        let chain = |content: &str| Chain::read(&files.with("x.pem", content)).unwrap_err().reason;
        assert!(matches!(chain(&key), PemErrorReason::NoCertificate));
        assert!(matches!(
            chain(damaged),
            PemErrorReason::NotPem | PemErrorReason::BadCertificate { position: 1, .. }
        ));
        assert!(matches!(chain("-----BEGIN CERTIFICATE-----\n!!"), PemErrorReason::NotPem));
        let other = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
        let second = chain(&format!("{certificate}{other}"));
        assert!(matches!(second, PemErrorReason::BadCertificate { position: 2, .. }), "{second}");

        let private = |content: &str| PrivateKey::read(&files.with("x.pem", content)).unwrap_err().reason;
        assert!(matches!(private(&certificate), PemErrorReason::NoKey));
        let encrypted = "-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n";
        assert!(matches!(private(encrypted), PemErrorReason::EncryptedKey));
        let old = "-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,00\n\n\
                   AAAA\n-----END RSA PRIVATE KEY-----\n";
        assert!(matches!(private(old), PemErrorReason::EncryptedKey));
        let damaged = "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n";
        assert!(matches!(private(damaged), PemErrorReason::BadKey));
    }

    #[test]
    fn a_file_that_cannot_be_read_is_named_and_an_endless_one_is_left() {
        let absent = Path::new("/nowhere/at/all.pem");
        let error = Chain::read(absent).unwrap_err();
        assert!(error.to_string().contains("/nowhere/at/all.pem"), "{error}");
        assert!(
            matches!(error.reason, PemErrorReason::Unreadable(cause) if cause.kind() == io::ErrorKind::NotFound)
        );
        assert!(matches!(Chain::read(Path::new("/dev/zero")).unwrap_err().reason, PemErrorReason::TooLarge));
    }

    #[test]
    fn no_key_is_printed() {
        let files = Files::new();
        let (certificate, key) = pair();
        let chain = Chain::read(&files.with("cert.pem", certificate)).unwrap();
        let pair = KeyPair::new(chain, PrivateKey::read(&files.with("key.pem", &key)).unwrap()).unwrap();
        let printed = format!("{pair:?}");
        let der = rustls_pemfile::private_key(&mut key.as_bytes()).unwrap().unwrap();
        // Eight bytes of the private P-256 scalar.
        let bytes = format!("{:?}", &der.secret_der()[36..44]);
        assert!(printed.contains("PrivateKey") && !printed.contains(&bytes[1..30]), "{printed}");
    }
}
