//! Signatures of the chain's head, by an Ed25519 key.
//!
//! Owns: the signed text, and the files of the key pair. Must not know: lines. Invariants: the signature
//! covers replica, number, time, and the hash of the line before, so that a head cannot stand anywhere else;
//! the private key's file is readable by its owner only, and no existing file is replaced.

use std::fs::OpenOptions;
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use data_encoding::BASE64;
use ring::rand::SystemRandom;
use ring::signature::{ED25519, Ed25519KeyPair, KeyPair as _, UnparsedPublicKey};
use rustls::SignatureScheme;
use rustls::sign::Signer;
use zeroize::Zeroizing;

use keyward_base::pem::{self, PrivateKey};

/// The beginning of a `SubjectPublicKeyInfo` of Ed25519 (RFC 8410); the 32 bytes of the key follow.
const SPKI: [u8; 12] = [0x30, 0x2a, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x03, 0x21, 0x00];

/// The facts of a head, as signed.
#[derive(Clone, Copy, Debug)]
pub struct SignedHead<'a> {
    /// The replica.
    pub replica: &'a str,
    /// The number of the head's line.
    pub seq: u64,
    /// The time of the head.
    pub time: &'a str,
    /// The hash of the line before.
    pub prev: &'a str,
}

impl SignedHead<'_> {
    fn text(&self) -> String {
        let Self { replica, seq, time, prev } = self;
        format!("keyward audit head 1\n{replica}\n{seq}\n{time}\n{prev}\n")
    }

    /// Signs the head; base64. `None` if the key does not sign.
    #[must_use]
    pub fn sign(&self, key: &PrivateKey) -> Option<String> {
        let signer: Box<dyn Signer> = key.signing().choose_scheme(&[SignatureScheme::ED25519])?;
        signer.sign(self.text().as_bytes()).ok().map(|signature| BASE64.encode(&signature))
    }

    /// True if the signature, in base64, is of this head and this key.
    #[must_use]
    pub fn is_signed(&self, signature: &str, key: &HeadPublicKey) -> bool {
        let Ok(signature) = BASE64.decode(signature.as_bytes()) else { return false };
        UnparsedPublicKey::new(&ED25519, &*key.0).verify(self.text().as_bytes(), &signature).is_ok()
    }
}

/// The public key of signed heads.
#[derive(Clone, Debug)]
pub struct HeadPublicKey(Arc<[u8]>);

/// The file has no usable public key.
#[derive(Debug, thiserror::Error)]
pub enum BadPublicKey {
    /// The file cannot be read.
    #[error("{0}")]
    Unreadable(#[from] io::Error),
    /// The file has no single Ed25519 public key.
    #[error("holds no Ed25519 public key (BEGIN PUBLIC KEY)")]
    NoKey,
}

impl HeadPublicKey {
    /// Reads a file made by [`write_key_pair`], or by `openssl pkey -pubout`.
    ///
    /// # Errors
    /// The file has no usable public key.
    pub fn read(path: &Path) -> Result<Self, BadPublicKey> {
        let text = std::fs::read(path)?;
        let keys = pem::public_keys(&text).map_err(|_| BadPublicKey::NoKey)?;
        match &keys[..] {
            [key] => Self::of(key).ok_or(BadPublicKey::NoKey),
            _ => Err(BadPublicKey::NoKey),
        }
    }

    fn of(spki: &[u8]) -> Option<Self> {
        let key = spki.strip_prefix(&SPKI)?;
        (key.len() == 32).then(|| Self(key.into()))
    }
}

/// Writes a new private key into `path`, and its public key into `path` with `.pub` appended. Returns the
/// path of the public key.
///
/// # Errors
/// The operating system's error, [`io::ErrorKind::AlreadyExists`] for an existing file.
pub fn write_key_pair(path: &Path) -> io::Result<PathBuf> {
    let failed = || io::Error::other("the system makes no random key");
    let pkcs8 = Ed25519KeyPair::generate_pkcs8(&SystemRandom::new()).map_err(|_| failed())?;
    let pair = Ed25519KeyPair::from_pkcs8(pkcs8.as_ref()).map_err(|_| failed())?;
    let private = Zeroizing::new(pem_text("PRIVATE KEY", pkcs8.as_ref()));
    let public = pem_text("PUBLIC KEY", &[&SPKI[..], pair.public_key().as_ref()].concat());
    let mut beside = path.as_os_str().to_owned();
    beside.push(".pub");
    let beside = PathBuf::from(beside);
    for (path, mode, text) in [(path, 0o600, &private[..]), (&beside, 0o644, &public[..])] {
        let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(path)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
    }
    Ok(beside)
}

fn pem_text(label: &str, der: &[u8]) -> String {
    let encoded = Zeroizing::new(BASE64.encode(der));
    let mut text = format!("-----BEGIN {label}-----\n");
    for line in encoded.as_bytes().chunks(64) {
        text.push_str(std::str::from_utf8(line).unwrap_or_default());
        text.push('\n');
    }
    text + &format!("-----END {label}-----\n")
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn a_signature_is_of_one_head_and_one_key() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("audit.key");
        let public = HeadPublicKey::read(&write_key_pair(&path).unwrap()).unwrap();
        let key = PrivateKey::read(&path).unwrap();
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(write_key_pair(&path).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        let head = SignedHead { replica: "a", seq: 7, time: "t", prev: "p" };
        let signature = head.sign(&key).unwrap();
        assert!(head.is_signed(&signature, &public));
        let others = [
            SignedHead { replica: "b", ..head },
            SignedHead { seq: 8, ..head },
            SignedHead { time: "u", ..head },
        ];
        for other in others.into_iter().chain([SignedHead { prev: "q", ..head }]) {
            assert!(!other.is_signed(&signature, &public), "{other:?}");
        }
        let second = write_key_pair(&folder.path().join("second")).unwrap();
        assert!(!head.is_signed(&signature, &HeadPublicKey::read(&second).unwrap()));
        assert!(!head.is_signed("", &public) && !head.is_signed("????", &public));
        assert!(matches!(HeadPublicKey::read(&path), Err(BadPublicKey::NoKey)), "a private key");
    }
}
