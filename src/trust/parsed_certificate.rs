//! A certificate, read as Go reads it.
//!
//! Owns: the fields by which a chain is judged. Must not know: other certificates, the time.
//! Invariants: a certificate that Go cannot parse (`crypto/x509/parser.go`) is not read here either, nor one that
//! `x509-parser` cannot parse, by which the names of a client are read later. A certificate of an older version
//! has no extensions.

use rustls::pki_types::CertificateDer;
use x509_parser::extensions::X509Extension;
use x509_parser::prelude::{FromDer as _, X509Certificate};

use super::certificate_names::{AlternativeNames, is_name_readable};
use super::der_reader::{
    BIT_STRING, BOOLEAN, DerReader, INTEGER, OCTET_STRING, OID, SEQUENCE, bits, is_der, small_number,
};
use super::name_constraints::NameConstraints;

/// A certificate's fields. Owns its bytes, since trusted certificates live as long as a configuration.
#[derive(Clone, Debug)]
pub struct ParsedCertificate {
    /// The whole certificate.
    pub(super) der: CertificateDer<'static>,
    pub(super) version: u32,
    /// The issuer's name in DER.
    pub(super) issuer: Box<[u8]>,
    /// The subject's name in DER.
    pub(super) subject: Box<[u8]>,
    pub(super) serial: Box<[u8]>,
    /// The first and the last second of validity, since 1970.
    pub(super) validity: (i64, i64),
    /// `SubjectPublicKeyInfo` in DER.
    pub(super) key_info: Box<[u8]>,
    /// The algorithm of the key, as the contents of its sequence.
    pub(super) key_algorithm: Box<[u8]>,
    pub(super) key: Box<[u8]>,
    /// The signed part, the algorithm as the contents of its sequence, and the signature.
    pub(super) signed: Box<[u8]>,
    pub(super) signature_algorithm: Box<[u8]>,
    pub(super) signature: Box<[u8]>,
    /// Without the extension `basicConstraints`: `None`.
    pub(super) basic: Option<BasicConstraints>,
    /// The bits of the extension `keyUsage`; without it, or without a bit: zero.
    pub(super) key_usage: u16,
    pub(super) purposes: Purposes,
    pub(super) alternative: Option<AlternativeNames>,
    pub(super) constraints: Option<NameConstraints>,
    pub(super) subject_key: Option<Box<[u8]>>,
    pub(super) authority_key: Option<Box<[u8]>>,
    /// A critical extension is unknown to Go.
    pub(super) has_unknown_critical: bool,
    /// Policy constraints or mappings: these are not evaluated here, so no chain with them is accepted.
    pub(super) has_policy_rules: bool,
}

/// The extension `basicConstraints`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BasicConstraints {
    pub(super) is_authority: bool,
    pub(super) path_length: Option<u64>,
}

/// The extension `extKeyUsage`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Purposes {
    /// The extension names at least one purpose.
    pub(super) are_limited: bool,
    pub(super) any: bool,
    pub(super) server: bool,
    pub(super) client: bool,
}

/// `keyUsage`: the key may sign certificates.
pub(super) const KEY_CERT_SIGN: u16 = 1 << 5;
/// `keyUsage`: the key may sign revocation lists.
pub(super) const CRL_SIGN: u16 = 1 << 6;

/// The reason for not reading a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct NotAsGoReads(pub(super) &'static str);

const fn fault<T>(why: &'static str) -> Result<T, NotAsGoReads> {
    Err(NotAsGoReads(why))
}

impl ParsedCertificate {
    /// Reads a certificate in DER.
    ///
    /// # Errors
    /// [`NotAsGoReads`].
    pub fn read(der: &CertificateDer<'_>) -> Result<Self, NotAsGoReads> {
        if !is_der(der) {
            return fault("it is not DER");
        }
        let parsed = match X509Certificate::from_der(der) {
            Ok(([], parsed)) => parsed,
            Ok(_) => return fault("bytes follow it"),
            Err(_) => return fault("it is no X.509 certificate"),
        };
        let raw = RawFields::read(der).ok_or(NotAsGoReads("it is no X.509 certificate"))?;
        let version = parsed.version().0;
        if version > 2 {
            return fault("its version is unknown");
        }
        if parsed.raw_serial().first().is_none_or(|first| first & 0x80 != 0) {
            return fault("its serial number is negative");
        }
        if raw.signature_algorithm != raw.outer_algorithm {
            return fault("it names two signature algorithms");
        }
        if !is_name_readable(parsed.issuer()) || !is_name_readable(parsed.subject()) {
            return fault("a name has text that is invalid or of an unknown kind");
        }
        if !raw.has_plain_times() {
            return fault("its validity is not written as RFC 5280 demands");
        }
        if !is_key_readable(raw.key_algorithm, &parsed.public_key().subject_public_key.data) {
            return fault("its public key is malformed");
        }
        let validity = parsed.validity();
        let mut certificate = Self {
            der: CertificateDer::from(der.to_vec()),
            version,
            issuer: parsed.issuer().as_raw().into(),
            subject: parsed.subject().as_raw().into(),
            serial: parsed.raw_serial().into(),
            validity: (validity.not_before.timestamp(), validity.not_after.timestamp()),
            key_info: parsed.public_key().raw.into(),
            key_algorithm: raw.key_algorithm.into(),
            key: parsed.public_key().subject_public_key.data.as_ref().into(),
            signed: parsed.tbs_certificate.as_ref().into(),
            signature_algorithm: raw.signature_algorithm.into(),
            signature: parsed.signature_value.data.as_ref().into(),
            basic: None,
            key_usage: 0,
            purposes: Purposes::default(),
            alternative: None,
            constraints: None,
            subject_key: None,
            authority_key: None,
            has_unknown_critical: false,
            has_policy_rules: false,
        };
        if version < 2 && !parsed.extensions().is_empty() {
            // Go ignores them. A certificate of two meanings is worth no client.
            return fault("it has extensions, which its version does not have");
        }
        for (index, extension) in parsed.extensions().iter().enumerate() {
            if parsed.extensions().iter().take(index).any(|earlier| earlier.oid == extension.oid) {
                return fault("an extension occurs twice");
            }
            certificate.add(extension)?;
        }
        Ok(certificate)
    }

    /// As Go's `processExtensions`. An extension that Go parses and that is malformed is a fault.
    fn add(&mut self, extension: &X509Extension<'_>) -> Result<(), NotAsGoReads> {
        let value = extension.value;
        let is_handled = match extension.oid.as_bytes() {
            [0x55, 0x1d, 14] => {
                self.subject_key = Some(key_identifier(value, extension.critical)?);
                true
            }
            [0x55, 0x1d, 15] => {
                self.key_usage = key_usage(value).ok_or(NotAsGoReads("its key usage is malformed"))?;
                true
            }
            [0x55, 0x1d, 17] => {
                let names = AlternativeNames::read(value)
                    .ok_or(NotAsGoReads("its subject alternative names are malformed"))?;
                let is_handled = names.has_known_names();
                self.alternative = Some(names);
                is_handled
            }
            [0x55, 0x1d, 19] => {
                let basic = basic_constraints(value);
                self.basic = Some(basic.ok_or(NotAsGoReads("its basic constraints are malformed"))?);
                true
            }
            [0x55, 0x1d, 30] => {
                let constraints =
                    NameConstraints::read(value).ok_or(NotAsGoReads("its name constraints are malformed"))?;
                let is_handled = !constraints.has_unknown_names();
                self.constraints = Some(constraints);
                is_handled
            }
            [0x55, 0x1d, 31] => {
                if !are_distribution_points(value) {
                    return fault("its revocation list distribution points are malformed");
                }
                true
            }
            [0x55, 0x1d, 32] => {
                if !are_policies(value) {
                    return fault("its certificate policies are malformed");
                }
                true
            }
            // requireExplicitPolicy, inhibitPolicyMapping; mappings
            [0x55, 0x1d, 33 | 36] => {
                self.has_policy_rules = true;
                true
            }
            [0x55, 0x1d, 35] => {
                self.authority_key = authority_key(value, extension.critical)?;
                true
            }
            [0x55, 0x1d, 37] => {
                self.purposes = purposes(value).ok_or(NotAsGoReads("its extended key usage is malformed"))?;
                true
            }
            // inhibitAnyPolicy limits policies alone, which no verification here asks for
            [0x55, 0x1d, 54] => {
                if DerReader::new(value).read(INTEGER).and_then(small_number).is_none() {
                    return fault("its policy limits are malformed");
                }
                true
            }
            [0x2b, 6, 1, 5, 5, 7, 1, 1] => {
                if extension.critical || !is_information_access(value) {
                    return fault("its authority information access is malformed or critical");
                }
                true
            }
            _ => false,
        };
        self.has_unknown_critical |= extension.critical && !is_handled;
        Ok(())
    }

    /// True if the certificate may sign others, as Go's `CheckSignatureFrom` has it: before version 3 there was
    /// no extension for it.
    pub(super) fn may_sign_certificates(&self) -> bool {
        let is_authority = match self.basic {
            None => self.version < 2,
            Some(basic) => basic.is_authority,
        };
        is_authority && (self.key_usage == 0 || self.key_usage & KEY_CERT_SIGN != 0)
    }
}

/// Parts of a certificate as they stand in its bytes.
struct RawFields<'a> {
    outer_algorithm: &'a [u8],
    signature_algorithm: &'a [u8],
    validity: &'a [u8],
    key_algorithm: &'a [u8],
}

impl<'a> RawFields<'a> {
    fn read(der: &'a [u8]) -> Option<Self> {
        let mut certificate = DerReader::within(der, SEQUENCE)?;
        let mut signed = DerReader::new(certificate.read(SEQUENCE)?);
        let outer_algorithm = certificate.read(SEQUENCE)?;
        certificate.read(BIT_STRING)?;
        signed.read_optional(0xa0);
        signed.read(INTEGER)?;
        let signature_algorithm = signed.read(SEQUENCE)?;
        let _issuer = signed.read(SEQUENCE)?;
        let validity = signed.read(SEQUENCE)?;
        let _subject = signed.read(SEQUENCE)?;
        let mut key_info = DerReader::new(signed.read(SEQUENCE)?);
        let key_algorithm = key_info.read(SEQUENCE)?;
        Some(Self { outer_algorithm, signature_algorithm, validity, key_algorithm })
    }

    /// True if both times are to the second and in UTC.
    fn has_plain_times(&self) -> bool {
        let mut times = DerReader::new(self.validity);
        (0..2).all(|_| {
            times.read_any().is_some_and(|time| {
                let digits = match time.tag {
                    0x17 => 12,
                    0x18 => 14,
                    _ => return false,
                };
                time.contents
                    .strip_suffix(b"Z")
                    .is_some_and(|text| text.len() == digits && text.iter().all(u8::is_ascii_digit))
            })
        })
    }
}

/// As Go's `parsePublicKey`, without the mathematics: a key that is no point of its curve verifies nothing.
fn is_key_readable(algorithm: &[u8], key: &[u8]) -> bool {
    const RSA: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 1, 1];
    const EC: &[u8] = &[0x2a, 0x86, 0x48, 0xce, 0x3d, 2, 1];
    const ED25519: &[u8] = &[0x2b, 0x65, 0x70];
    const P224: &[u8] = &[0x2b, 0x81, 4, 0, 0x21];
    const P256: &[u8] = &[0x2a, 0x86, 0x48, 0xce, 0x3d, 3, 1, 7];
    const P384: &[u8] = &[0x2b, 0x81, 4, 0, 0x22];
    const P521: &[u8] = &[0x2b, 0x81, 4, 0, 0x23];
    let mut algorithm = DerReader::new(algorithm);
    match algorithm.read(OID) {
        None => false,
        Some(RSA) => {
            let numbers = DerReader::within(key, SEQUENCE).and_then(|mut numbers| {
                let positive = |number: &[u8]| number.iter().any(|&byte| byte != 0) && number[0] & 0x80 == 0;
                let modulus = numbers.read(INTEGER).filter(|modulus| positive(modulus))?;
                let exponent = numbers.read(INTEGER).filter(|exponent| positive(exponent))?;
                (exponent.len() <= 8).then_some(modulus)
            });
            algorithm.read_any().is_some_and(|parameters| parameters.tag == 5) && numbers.is_some()
        }
        Some(EC) => {
            let length = match algorithm.read(OID) {
                Some(P224) => 28,
                Some(P256) => 32,
                Some(P384) => 48,
                Some(P521) => 66,
                _ => return false,
            };
            key.len() == 1 + 2 * length && key.first() == Some(&4)
        }
        Some(ED25519) => algorithm.is_at_end() && key.len() == 32,
        // A key that verifies nothing here.
        Some(_) => true,
    }
}

fn key_identifier(value: &[u8], critical: bool) -> Result<Box<[u8]>, NotAsGoReads> {
    if critical {
        return fault("its subject key identifier is critical");
    }
    let contents = DerReader::new(value).read(OCTET_STRING);
    contents.map(Into::into).ok_or(NotAsGoReads("its subject key identifier is malformed"))
}

fn authority_key(value: &[u8], critical: bool) -> Result<Option<Box<[u8]>>, NotAsGoReads> {
    const MALFORMED: NotAsGoReads = NotAsGoReads("its authority key identifier is malformed");
    if critical {
        return fault("its authority key identifier is critical");
    }
    let contents = DerReader::new(value).read(SEQUENCE).ok_or(MALFORMED)?;
    let mut fields = DerReader::new(contents);
    if !fields.is_next(0x80) {
        return Ok(None);
    }
    fields.read(0x80).map(|key| Some(key.into())).ok_or(MALFORMED)
}

/// The bits in the order of RFC 5280: bit 0, `digitalSignature`, is the lowest.
fn key_usage(value: &[u8]) -> Option<u16> {
    let bits = bits(DerReader::new(value).read(BIT_STRING)?)?;
    let is_set = |bit: usize| bits.get(bit / 8).is_some_and(|byte| byte & (0x80 >> (bit % 8)) != 0);
    Some((0..9).filter(|&bit| is_set(bit)).fold(0, |all, bit| all | 1 << bit))
}

fn basic_constraints(value: &[u8]) -> Option<BasicConstraints> {
    let mut fields = DerReader::new(DerReader::new(value).read(SEQUENCE)?);
    let is_authority = if fields.is_next(BOOLEAN) {
        match fields.read(BOOLEAN)? {
            [0xff] => true,
            [0] => false,
            _ => return None,
        }
    } else {
        false
    };
    let path_length = if fields.is_next(INTEGER) {
        Some(small_number(fields.read(INTEGER)?).filter(|&length| i64::try_from(length).is_ok())?)
    } else {
        None
    };
    Some(BasicConstraints { is_authority, path_length })
}

fn purposes(value: &[u8]) -> Option<Purposes> {
    let all = DerReader::new(value).read(SEQUENCE)?;
    if !is_der(all) {
        return None;
    }
    let mut all = DerReader::new(all);
    let mut purposes = Purposes::default();
    while !all.is_at_end() {
        purposes.are_limited = true;
        match all.read(OID)? {
            [0x55, 0x1d, 0x25, 0] => purposes.any = true,
            [0x2b, 6, 1, 5, 5, 7, 3, 1] => purposes.server = true,
            [0x2b, 6, 1, 5, 5, 7, 3, 2] => purposes.client = true,
            _ => {}
        }
    }
    Some(purposes)
}

fn are_policies(value: &[u8]) -> bool {
    let Some(policies) = DerReader::new(value).read(SEQUENCE) else { return false };
    let mut policies = DerReader::new(policies);
    let mut seen: Vec<&[u8]> = Vec::new();
    while !policies.is_at_end() {
        let policy = policies.read(SEQUENCE).and_then(|policy| DerReader::new(policy).read(OID));
        match policy {
            // A client pays for the comparisons with its handshake: no certificate has so many policies.
            Some(policy) if !policy.is_empty() && !seen.contains(&policy) && seen.len() < 256 => {
                seen.push(policy);
            }
            _ => return false,
        }
    }
    true
}

fn are_distribution_points(value: &[u8]) -> bool {
    let Some(points) = DerReader::new(value).read(SEQUENCE) else { return false };
    let mut points = DerReader::new(points);
    while !points.is_at_end() {
        let Some(point) = points.read(SEQUENCE) else { return false };
        let mut point = DerReader::new(point);
        if !point.is_next(0xa0) {
            continue;
        }
        let names = point.read(0xa0).and_then(|name| DerReader::new(name).read(0xa0));
        let Some(names) = names else { return false };
        let mut names = DerReader::new(names);
        while names.is_next(0x86) {
            if names.read(0x86).is_none() {
                return false;
            }
        }
    }
    true
}

fn is_information_access(value: &[u8]) -> bool {
    let Some(all) = DerReader::new(value).read(SEQUENCE) else { return false };
    let mut all = DerReader::new(all);
    while !all.is_at_end() {
        let Some(access) = all.read(SEQUENCE) else { return false };
        let mut access = DerReader::new(access);
        if access.read(OID).is_none() || access.is_next(0x86) && access.read(0x86).is_none() {
            return false;
        }
    }
    true
}
