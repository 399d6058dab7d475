//! A certificate, read as Go reads it.
//!
//! Owns: the fields by which a chain is judged. Must not know: other certificates, the time.
//! Invariants: a certificate that Go cannot parse (`crypto/x509/parser.go`) is not read here either. The
//! exception is a key that is no point of its curve: by such a key no handshake ends well. A certificate of
//! an older version has no extensions.

use rustls::pki_types::CertificateDer;

use super::certificate_fields::{CertificateFields, NotAsGoReads, RawExtension};
use super::certificate_names::{AlternativeNames, is_name_readable};
use super::der_reader::{
    BIT_STRING, BOOLEAN, DerReader, INTEGER, OCTET_STRING, OID, SEQUENCE, bits, is_any_oid, is_der, is_oid,
    small_number,
};
use super::name_constraints::NameConstraints;

/// A certificate's fields. Owns its bytes, since trusted certificates live as long as a configuration.
#[derive(Clone, Debug)]
pub struct ParsedCertificate {
    /// The whole certificate.
    pub(super) der: CertificateDer<'static>,
    pub(super) version: u64,
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

const fn fault<T>(why: &'static str) -> Result<T, NotAsGoReads> {
    Err(NotAsGoReads(why))
}

/// True for an extension in the right form.
const fn demand(is_well_formed: bool, why: &'static str) -> Result<bool, NotAsGoReads> {
    if is_well_formed { Ok(true) } else { fault(why) }
}

impl ParsedCertificate {
    /// Reads a certificate in DER.
    ///
    /// # Errors
    /// [`NotAsGoReads`].
    pub fn read(der: &CertificateDer<'_>) -> Result<Self, NotAsGoReads> {
        let fields = CertificateFields::read(der)?;
        if !is_name_readable(fields.issuer) || !is_name_readable(fields.subject) {
            return fault("a name has text that is invalid or of an unknown kind");
        }
        if !is_key_readable(fields.key_algorithm, fields.key) {
            return fault("its public key is malformed");
        }
        if fields.version < 2 && !fields.extensions.is_empty() {
            // Go ignores them. A certificate of two meanings is worth no client.
            return fault("it has extensions, which its version does not have");
        }
        let mut certificate = Self {
            der: CertificateDer::from(der.to_vec()),
            version: fields.version,
            issuer: fields.issuer.into(),
            subject: fields.subject.into(),
            serial: fields.serial.into(),
            validity: fields.validity,
            key_info: fields.key_info.into(),
            key_algorithm: fields.key_algorithm.into(),
            key: fields.key.into(),
            signed: fields.signed.into(),
            signature_algorithm: fields.signature_algorithm.into(),
            signature: fields.signature.into(),
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
        for (index, extension) in fields.extensions.iter().enumerate() {
            if fields.extensions.iter().take(index).any(|earlier| earlier.oid == extension.oid) {
                return fault("an extension occurs twice");
            }
            certificate.add(extension)?;
        }
        Ok(certificate)
    }

    /// As Go's `processExtensions`. An extension that Go parses and that is malformed is a fault.
    fn add(&mut self, extension: &RawExtension<'_>) -> Result<(), NotAsGoReads> {
        let value = extension.value;
        let is_handled = match extension.oid {
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
            [0x55, 0x1d, 31] => demand(
                are_distribution_points(value),
                "its revocation list distribution points are malformed",
            )?,
            [0x55, 0x1d, 32] => demand(are_policies(value), "its certificate policies are malformed")?,
            [0x55, 0x1d, 33] => {
                self.has_policy_rules = true;
                demand(are_policy_mappings(value), "its policy mappings are malformed")?
            }
            // requireExplicitPolicy, inhibitPolicyMapping
            [0x55, 0x1d, 36] => {
                self.has_policy_rules = true;
                demand(are_policy_constraints(value), "its policy constraints are malformed")?
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
                let number = DerReader::new(value).read(INTEGER).and_then(small_number);
                demand(number.is_some(), "its policy limits are malformed")?
            }
            [0x2b, 6, 1, 5, 5, 7, 1, 1] => {
                let is_good = !extension.critical && is_information_access(value);
                demand(is_good, "its authority information access is malformed or critical")?
            }
            _ => false,
        };
        self.has_unknown_critical |= extension.critical && !is_handled;
        Ok(())
    }

    /// True if the certificate may sign others, as Go's `CheckSignatureFrom` has it: before version 3 there
    /// was no extension for it.
    pub(super) fn may_sign_certificates(&self) -> bool {
        let is_authority = match self.basic {
            None => self.version < 2,
            Some(basic) => basic.is_authority,
        };
        is_authority && (self.key_usage == 0 || self.key_usage & KEY_CERT_SIGN != 0)
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
            Some(policy) if is_any_oid(policy) && !seen.contains(&policy) && seen.len() < 256 => {
                seen.push(policy);
            }
            _ => return false,
        }
    }
    true
}

fn are_policy_mappings(value: &[u8]) -> bool {
    let Some(mappings) = DerReader::new(value).read(SEQUENCE) else { return false };
    let mut mappings = DerReader::new(mappings);
    while !mappings.is_at_end() {
        let Some(mapping) = mappings.read(SEQUENCE) else { return false };
        let mut mapping = DerReader::new(mapping);
        if mapping.read(OID).is_none() || mapping.read(OID).is_none() {
            return false;
        }
    }
    true
}

fn are_policy_constraints(value: &[u8]) -> bool {
    let Some(constraints) = DerReader::new(value).read(SEQUENCE) else { return false };
    let mut constraints = DerReader::new(constraints);
    [0x80, 0x81].iter().all(|&tag| {
        constraints
            .read_if(tag)
            .is_some_and(|number| number.is_none_or(|number| small_number(number).is_some()))
    })
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
        if access.read(OID).is_none_or(|oid| !is_oid(oid))
            || access.is_next(0x86) && access.read(0x86).is_none()
        {
            return false;
        }
    }
    true
}
