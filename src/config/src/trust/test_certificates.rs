//! Certificates of any form for tests: every field is free, and the signature is made last.
//!
//! Shared with `tests/chains`.
//!
//! Owns: the writing of DER. Must not know: what is right.

use rcgen::{KeyPair, SigningKey as _};
use rustls::pki_types::CertificateDer;

/// An element of DER.
pub fn der(tag: u8, parts: &[&[u8]]) -> Vec<u8> {
    let contents = parts.concat();
    let length = contents.len();
    let length = match u8::try_from(length) {
        Ok(short @ 0..=0x7f) => vec![short],
        Ok(byte) => vec![0x81, byte],
        Err(_) => {
            let bytes = u16::try_from(length).expect("a test's certificate is short").to_be_bytes();
            vec![0x82, bytes[0], bytes[1]]
        }
    };
    [&[tag][..], &length, &contents].concat()
}

/// A name with a common name of the given kind of text.
pub fn name_of(tag: u8, common_name: &[u8]) -> Vec<u8> {
    let attribute = der(0x30, &[&[6, 3, 0x55, 4, 3], &der(tag, &[common_name])]);
    der(0x30, &[&der(0x31, &[&attribute])])
}

/// An extension.
pub fn extension(oid: &[u8], critical: bool, value: &[u8]) -> Vec<u8> {
    let critical: &[u8] = if critical { &[1, 1, 0xff] } else { &[] };
    der(0x30, &[&der(6, &[oid]), critical, &der(4, &[value])])
}

/// `basicConstraints`.
pub fn basic(is_authority: bool, path_length: Option<u8>) -> Vec<u8> {
    let authority: &[u8] = if is_authority { &[1, 1, 0xff] } else { &[] };
    let length = path_length.map(|length| vec![2, 1, length]).unwrap_or_default();
    extension(&[0x55, 0x1d, 19], true, &der(0x30, &[authority, &length]))
}

/// `keyUsage` with the given first byte of bits.
pub fn usage(bits: u8) -> Vec<u8> {
    let unused = u8::try_from(bits.trailing_zeros().min(7)).expect("at most 7");
    extension(&[0x55, 0x1d, 15], true, &[3, 2, unused, bits])
}

/// The purposes clientAuth, serverAuth, codeSigning, and "any".
pub const CLIENT: &[u8] = &[0x2b, 6, 1, 5, 5, 7, 3, 2];
/// See [`CLIENT`].
pub const SERVER: &[u8] = &[0x2b, 6, 1, 5, 5, 7, 3, 1];
/// See [`CLIENT`].
pub const CODE: &[u8] = &[0x2b, 6, 1, 5, 5, 7, 3, 3];
/// See [`CLIENT`].
pub const ANY: &[u8] = &[0x55, 0x1d, 0x25, 0];

/// `extKeyUsage`.
pub fn purposes(all: &[&[u8]]) -> Vec<u8> {
    let all: Vec<u8> = all.iter().flat_map(|oid| der(6, &[oid])).collect();
    extension(&[0x55, 0x1d, 37], false, &der(0x30, &[&all]))
}

/// `subjectAltName` of elements like `der(0x82, name)`.
pub fn alternative(names: &[&[u8]]) -> Vec<u8> {
    extension(&[0x55, 0x1d, 17], false, &der(0x30, names))
}

/// `nameConstraints`: the bases of the permitted and the excluded subtrees.
pub fn constraints(permitted: &[&[u8]], excluded: &[&[u8]]) -> Vec<u8> {
    let subtrees = |tag: u8, bases: &[&[u8]]| {
        let all: Vec<u8> = bases.iter().flat_map(|base| der(0x30, &[base])).collect();
        if all.is_empty() { Vec::new() } else { der(tag, &[&all]) }
    };
    let both = [subtrees(0xa0, permitted), subtrees(0xa1, excluded)];
    extension(&[0x55, 0x1d, 30], true, &der(0x30, &[&both[0], &both[1]]))
}

/// A certificate before its signature. Each field is DER.
#[derive(Clone, Debug)]
pub struct Draft {
    /// `[0]` with the version, or nothing for version 1.
    pub version: Vec<u8>,
    /// The contents of the serial number.
    pub serial: Vec<u8>,
    /// The signature algorithm within the signed part.
    pub algorithm: Vec<u8>,
    /// The signature algorithm beside the signature.
    pub outer_algorithm: Vec<u8>,
    /// The issuer's name.
    pub issuer: Vec<u8>,
    /// Both times.
    pub validity: Vec<u8>,
    /// The subject's name.
    pub subject: Vec<u8>,
    /// `SubjectPublicKeyInfo`.
    pub key: Vec<u8>,
    /// Behind the key, before the extensions.
    pub unique_ids: Vec<u8>,
    /// The extensions; without any, the field is left out.
    pub extensions: Vec<Vec<u8>>,
}

/// ecdsa-with-SHA256.
pub const ECDSA_SHA256: &[u8] = &[0x30, 10, 6, 8, 0x2a, 0x86, 0x48, 0xce, 0x3d, 4, 3, 2];

impl Draft {
    /// A certificate of version 3 without extensions, valid from 2020 to 2049.
    pub fn new(subject: &str, issuer: &str, key: &KeyPair) -> Self {
        Self {
            version: vec![0xa0, 3, 2, 1, 2],
            serial: vec![9],
            algorithm: ECDSA_SHA256.to_vec(),
            outer_algorithm: ECDSA_SHA256.to_vec(),
            issuer: name_of(12, issuer.as_bytes()),
            validity: der(0x30, &[&der(0x17, &[b"200101000000Z"]), &der(0x17, &[b"491231235959Z"])]),
            subject: name_of(12, subject.as_bytes()),
            key: rcgen::PublicKeyData::subject_public_key_info(key),
            unique_ids: Vec::new(),
            extensions: Vec::new(),
        }
    }

    /// With these extensions.
    pub fn with(mut self, extensions: &[Vec<u8>]) -> Self {
        self.extensions.extend_from_slice(extensions);
        self
    }

    /// As version 1.
    pub fn v1(self) -> Self {
        Self { version: Vec::new(), ..self }
    }

    /// The part to be signed.
    pub fn signed_part(&self) -> Vec<u8> {
        let all: Vec<&[u8]> = self.extensions.iter().map(Vec::as_slice).collect();
        let extensions = if all.is_empty() { Vec::new() } else { der(0xa3, &[&der(0x30, &all)]) };
        der(
            0x30,
            &[
                &self.version,
                &der(2, &[&self.serial]),
                &self.algorithm,
                &self.issuer,
                &self.validity,
                &self.subject,
                &self.key,
                &self.unique_ids,
                &extensions,
            ],
        )
    }

    /// The certificate, signed by `key`.
    pub fn sign(&self, key: &KeyPair) -> CertificateDer<'static> {
        assemble(&self.signed_part(), &self.outer_algorithm, key)
    }
}

/// A certificate of any signed part.
pub fn assemble(signed: &[u8], algorithm: &[u8], key: &KeyPair) -> CertificateDer<'static> {
    let signature = key.sign(signed).expect("a key of a test signs");
    CertificateDer::from(der(0x30, &[signed, algorithm, &der(3, &[&[0], &signature])]))
}
