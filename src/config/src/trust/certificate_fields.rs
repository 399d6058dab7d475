//! The fields of a certificate as they stand in its bytes.
//!
//! Owns: the structure of a certificate, as Go's `parseCertificate` walks it. Must not know: the meaning of a
//! field.
//! Invariants: every byte belongs to a field, and every tag is exactly the expected one: `x509-parser`, by
//! which the names of a client are read later, takes a tag of another class for the expected tag, so a
//! certificate that the two read differently is not read at all.

use x509_parser::prelude::{FromDer as _, X509Certificate};

use super::der_reader::{
    BIT_STRING, BOOLEAN, DerReader, INTEGER, OCTET_STRING, OID, SEQUENCE, SET, is_der, small_number,
};

/// Maximum number of extensions. Certificates have about ten; a stranger's may have thousands, each of which
/// is compared with all others.
const MAX_EXTENSIONS: usize = 64;

/// The reason for not reading a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct NotAsGoReads(pub(super) &'static str);

/// A certificate's fields. Names and the key with their headers, algorithms without.
#[derive(Debug)]
pub(super) struct CertificateFields<'a> {
    /// 0 for X.509 version 1.
    pub(super) version: u64,
    pub(super) serial: &'a [u8],
    pub(super) issuer: &'a [u8],
    pub(super) subject: &'a [u8],
    /// The first and the last second of validity, since 1970.
    pub(super) validity: (i64, i64),
    pub(super) key_info: &'a [u8],
    pub(super) key_algorithm: &'a [u8],
    pub(super) key: &'a [u8],
    pub(super) signed: &'a [u8],
    pub(super) signature_algorithm: &'a [u8],
    pub(super) signature: &'a [u8],
    pub(super) extensions: Vec<RawExtension<'a>>,
}

/// An extension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RawExtension<'a> {
    pub(super) oid: &'a [u8],
    pub(super) critical: bool,
    pub(super) value: &'a [u8],
}

impl<'a> CertificateFields<'a> {
    /// Reads the fields.
    ///
    /// # Errors
    /// [`NotAsGoReads`].
    pub(super) fn read(der: &'a [u8]) -> Result<Self, NotAsGoReads> {
        if !is_der(der) {
            return Err(NotAsGoReads("it is not DER"));
        }
        let mut certificate = Self::walk(der).ok_or(NotAsGoReads("it is no X.509 certificate"))?;
        let parsed = match X509Certificate::from_der(der) {
            Ok(([], parsed)) => parsed,
            Ok(_) | Err(_) => return Err(NotAsGoReads("it is no X.509 certificate")),
        };
        if !certificate.is_same(&parsed) {
            return Err(NotAsGoReads("readers of certificates differ about it"));
        }
        let validity = parsed.validity();
        certificate.validity = (validity.not_before.timestamp(), validity.not_after.timestamp());
        Ok(certificate)
    }

    /// As Go's `parseCertificate`, and no byte may be left over.
    fn walk(der: &'a [u8]) -> Option<Self> {
        let mut certificate = DerReader::within(der, SEQUENCE)?;
        let signed = certificate.read_whole(SEQUENCE)?;
        let outer_algorithm = certificate.read(SEQUENCE)?;
        let signature = whole_bytes(certificate.read(BIT_STRING)?)?;
        let mut fields = DerReader::within(signed, SEQUENCE)?;
        let version = match fields.read_if(0xa0)? {
            Some(tagged) => small_number(single(tagged, INTEGER)?)?,
            None => 0,
        };
        let serial = fields.read(INTEGER)?;
        let signature_algorithm = fields.read(SEQUENCE)?;
        let issuer = fields.read_whole(SEQUENCE)?;
        let times = fields.read(SEQUENCE)?;
        let subject = fields.read_whole(SEQUENCE)?;
        let key_info = fields.read_whole(SEQUENCE)?;
        let mut key_fields = DerReader::within(key_info, SEQUENCE)?;
        let key_algorithm = key_fields.read(SEQUENCE)?;
        let key = whole_bytes(key_fields.read(BIT_STRING)?)?;
        if version > 0 {
            // The unique ids of issuer and subject, which nobody uses.
            fields.read_if(0x81)?;
            fields.read_if(0x82)?;
        }
        let extensions = fields.read_if(0xa3)?.map_or(Some(Vec::new()), read_extensions)?;
        let is_whole = [certificate, fields, key_fields].iter().all(|rest| rest.is_at_end());
        let is_well_formed = is_whole
            && version <= 2
            // A negative number.
            && serial.first().is_some_and(|first| first & 0x80 == 0)
            && outer_algorithm == signature_algorithm
            && is_algorithm(signature_algorithm)
            && is_algorithm(key_algorithm)
            && are_plain_times(times);
        is_well_formed.then_some(Self {
            version,
            serial,
            issuer,
            subject,
            validity: (0, 0),
            key_info,
            key_algorithm,
            key,
            signed,
            signature_algorithm,
            signature,
            extensions,
        })
    }

    /// True if `x509-parser` has found the same fields.
    fn is_same(&self, parsed: &X509Certificate<'_>) -> bool {
        let extensions = parsed.extensions().iter().map(|extension| RawExtension {
            oid: extension.oid.as_bytes(),
            critical: extension.critical,
            value: extension.value,
        });
        u64::from(parsed.version().0) == self.version
            && parsed.raw_serial() == self.serial
            && parsed.issuer().as_raw() == self.issuer
            && parsed.subject().as_raw() == self.subject
            && parsed.public_key().raw == self.key_info
            && *parsed.public_key().subject_public_key.data == *self.key
            && parsed.tbs_certificate.as_ref() == self.signed
            && *parsed.signature_value.data == *self.signature
            && extensions.eq(self.extensions.iter().copied())
    }
}

/// The contents of the only element.
fn single(bytes: &[u8], tag: u8) -> Option<&[u8]> {
    let mut reader = DerReader::new(bytes);
    reader.read(tag).filter(|_| reader.is_at_end())
}

/// The bytes of a bit string without unused bits, as keys and signatures are.
fn whole_bytes(bits: &[u8]) -> Option<&[u8]> {
    bits.strip_prefix(&[0])
}

fn is_algorithm(contents: &[u8]) -> bool {
    let mut fields = DerReader::new(contents);
    fields.read(OID).is_some() && (fields.is_at_end() || fields.read_any().is_some() && fields.is_at_end())
}

fn read_extensions(tagged: &[u8]) -> Option<Vec<RawExtension<'_>>> {
    let mut all = DerReader::within(tagged, SEQUENCE)?;
    let mut extensions = Vec::new();
    while !all.is_at_end() {
        if extensions.len() >= MAX_EXTENSIONS {
            return None;
        }
        let mut fields = DerReader::new(all.read(SEQUENCE)?);
        let oid = fields.read(OID)?;
        let critical = matches!(fields.read_if(BOOLEAN)?, Some([0xff]));
        let value = fields.read(OCTET_STRING)?;
        if !fields.is_at_end() {
            return None;
        }
        extensions.push(RawExtension { oid, critical, value });
    }
    Some(extensions)
}

/// True for two times to the second and in UTC.
fn are_plain_times(contents: &[u8]) -> bool {
    let mut times = DerReader::new(contents);
    let is_plain = |times: &mut DerReader<'_>| {
        let Some(time) = times.read_any() else { return false };
        let digits = match time.tag {
            0x17 => 12,
            0x18 => 14,
            _ => return false,
        };
        let text = time.contents.strip_suffix(b"Z").filter(|text| text.len() == digits);
        text.is_some_and(|text| text.iter().all(u8::is_ascii_digit))
    };
    is_plain(&mut times) && is_plain(&mut times) && times.is_at_end()
}

/// An attribute of a name: the object identifier, and the tag and the bytes of the text.
pub(super) type NameAttribute<'a> = (&'a [u8], u8, &'a [u8]);

/// The attributes of a name. `None` for a malformed name (Go, `parseName`).
pub(super) fn name_attributes(name: &[u8]) -> Option<Vec<NameAttribute<'_>>> {
    let mut parts = DerReader::within(name, SEQUENCE)?;
    let mut attributes = Vec::new();
    while !parts.is_at_end() {
        let mut part = DerReader::new(parts.read(SET)?);
        while !part.is_at_end() {
            let mut attribute = DerReader::new(part.read(SEQUENCE)?);
            let oid = attribute.read(OID)?;
            let value = attribute.read_any()?;
            if !attribute.is_at_end() {
                return None;
            }
            attributes.push((oid, value.tag, value.contents));
        }
    }
    Some(attributes)
}
