//! Certificates and private keys read from PEM files.
//!
//! Owns: the one use of `rustls-pemfile`, and the check that what was read can be used at all. Must not know: whose
//! certificate it is, or for which connection.
//! Invariants: a chain is never empty; a key pair belongs together; an error names the file and the reason, never
//! the content; a key is wiped when dropped.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::RootCertStore;
use rustls::crypto::ring::sign::any_supported_type;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::ParsedCertificate;
use rustls::sign::CertifiedKey;
use zeroize::Zeroizing;

/// More than any chain or bundle needs (Debian's whole CA bundle has 220 KiB); keeps `/dev/zero` from eating us.
const MAX_FILE: u64 = 4 << 20;

/// A certificate chain, leaf first, with the private key of the leaf. Clones share it.
#[derive(Clone, Debug)]
pub struct KeyPair {
    chain: Arc<[CertificateDer<'static>]>,
    key: Arc<Zeroizing<PrivateKeyDer<'static>>>,
}

/// The certificates of the authorities that are trusted. Never empty; clones share it.
#[derive(Clone, Debug)]
pub struct Roots(Arc<[CertificateDer<'static>]>);

/// Why a PEM file is of no use.
#[derive(Debug, thiserror::Error)]
#[error("{}: {reason}", path.display())]
pub struct Error {
    /// The file.
    pub path: PathBuf,
    /// What is wrong with it.
    pub reason: Reason,
}

/// What is wrong with a PEM file.
#[derive(Debug, thiserror::Error)]
pub enum Reason {
    /// It cannot be opened or read.
    #[error("cannot be read: {0}")]
    Unreadable(io::Error),
    /// It is larger than a PEM file has a reason to be.
    #[error("is larger than {} MiB", MAX_FILE >> 20)]
    TooLarge,
    /// It is no PEM: a broken header or footer, or bad base64 between them.
    #[error("is not valid PEM")]
    NotPem,
    /// There is no certificate in it.
    #[error("holds no certificate (no BEGIN CERTIFICATE)")]
    NoCertificate,
    /// The certificate of this position, from 1, is no X.509 that we can use.
    #[error("certificate {position} cannot be used: {error}")]
    BadCertificate {
        /// Counted from 1.
        position: usize,
        /// What the certificate parser says.
        error: rustls::Error,
    },
    /// There is no private key in it.
    #[error("holds no private key (BEGIN PRIVATE KEY, RSA PRIVATE KEY or EC PRIVATE KEY)")]
    NoKey,
    /// The key needs a passphrase, which nobody could type.
    #[error("holds an encrypted private key; store it decrypted, readable by Keyward only")]
    EncryptedKey,
    /// The key is of a kind that cannot sign.
    #[error("the private key cannot be used: unsupported kind or damaged")]
    BadKey,
    /// The key belongs to another certificate.
    #[error("the private key does not belong to the certificate in {}", .0.display())]
    Mismatch(PathBuf),
}

impl KeyPair {
    /// Reads the chain from `certificate` and the first private key from `key`, and checks that they belong together.
    ///
    /// # Errors
    /// Every fault of both files.
    pub fn read(certificate: &Path, key: &Path) -> Result<Self, Vec<Error>> {
        let (chain, private) = match (read_chain(certificate), read_key(key)) {
            (Ok(chain), Ok(private)) => (chain, private),
            (chain, private) => return Err(chain.err().into_iter().chain(private.err()).collect()),
        };
        let at_key = |reason| vec![Error { path: key.to_owned(), reason }];
        let signing = any_supported_type(&private).map_err(|_| at_key(Reason::BadKey))?;
        let mismatch = |_| at_key(Reason::Mismatch(certificate.to_owned()));
        CertifiedKey::new(chain.clone(), signing).keys_match().map_err(mismatch)?;
        Ok(Self { chain: chain.into(), key: Arc::new(private) })
    }

    /// The certificates, leaf first.
    #[must_use]
    pub fn chain(&self) -> &[CertificateDer<'static>] {
        &self.chain
    }

    /// The leaf's private key. It is wiped when the last clone of the pair goes, and masked when printed.
    #[must_use]
    pub fn key(&self) -> &PrivateKeyDer<'static> {
        &self.key
    }
}

impl Roots {
    /// Reads every certificate of the file, each of which must be usable as a trust anchor.
    ///
    /// # Errors
    /// What is wrong with the file.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let roots = read_chain(path)?;
        let mut store = RootCertStore::empty();
        for (index, root) in roots.iter().enumerate() {
            store.add(root.clone()).map_err(|error| Error {
                path: path.to_owned(),
                reason: Reason::BadCertificate { position: index + 1, error },
            })?;
        }
        Ok(Self(roots.into()))
    }

    /// The certificates.
    #[must_use]
    pub fn certificates(&self) -> &[CertificateDer<'static>] {
        &self.0
    }
}

fn read_chain(path: &Path) -> Result<Vec<CertificateDer<'static>>, Error> {
    let at = |reason| Error { path: path.to_owned(), reason };
    let pem = read(path).map_err(at)?;
    let chain: Vec<_> =
        rustls_pemfile::certs(&mut &pem[..]).collect::<Result<_, _>>().map_err(|_| at(Reason::NotPem))?;
    for (index, certificate) in chain.iter().enumerate() {
        ParsedCertificate::try_from(certificate)
            .map_err(|error| at(Reason::BadCertificate { position: index + 1, error }))?;
    }
    if chain.is_empty() { Err(at(Reason::NoCertificate)) } else { Ok(chain) }
}

fn read_key(path: &Path) -> Result<Zeroizing<PrivateKeyDer<'static>>, Error> {
    let at = |reason| Error { path: path.to_owned(), reason };
    let pem = read(path).map_err(at)?;
    match rustls_pemfile::private_key(&mut &pem[..]) {
        Ok(Some(key)) => Ok(Zeroizing::new(key)),
        // PKCS #8 and the older OpenSSL form; both are skipped, or taken for damaged, by the reader.
        _ if has(&pem, b"BEGIN ENCRYPTED PRIVATE KEY") || has(&pem, b"Proc-Type: 4,ENCRYPTED") => {
            Err(at(Reason::EncryptedKey))
        }
        Ok(None) => Err(at(Reason::NoKey)),
        Err(_) => Err(at(Reason::NotPem)),
    }
}

fn has(pem: &[u8], words: &[u8]) -> bool {
    pem.windows(words.len()).any(|window| window == words)
}

/// The buffer is wiped on drop; it is allocated once, so that no copy stays behind in a smaller one.
fn read(path: &Path) -> Result<Zeroizing<Vec<u8>>, Reason> {
    let file = File::open(path).map_err(Reason::Unreadable)?;
    let expected = file.metadata().map_err(Reason::Unreadable)?.len().min(MAX_FILE);
    let mut bytes = Zeroizing::new(Vec::with_capacity(usize::try_from(expected).unwrap_or(0) + 1));
    file.take(MAX_FILE + 1).read_to_end(&mut bytes).map_err(Reason::Unreadable)?;
    if bytes.len() as u64 > MAX_FILE { Err(Reason::TooLarge) } else { Ok(bytes) }
}
