//! Revocation lists.
//!
//! Owns: the lists of a listener's authorities, and the question to them about a chain. Must not know: files.
//! Invariants: every certificate below the trusted one needs a list of its issuer, signed by its issuer; a
//! certificate not covered by a list may be revoked. A revocation counts whatever else is missing.

use std::collections::HashSet;

use rustls::crypto::WebPkiSupportedAlgorithms;
use rustls::pki_types::CertificateRevocationListDer;
use x509_parser::extensions::ParsedExtension;
use x509_parser::prelude::FromDer as _;
use x509_parser::revocation_list::CertificateRevocationList;

use super::chain_search::{WorkLeft, refused};
use super::der_reader::{DerReader, SEQUENCE};
use super::parsed_certificate::{CRL_SIGN, ParsedCertificate};
use super::refused_chain::{Refusal, RefusedChain};

/// A revocation list.
#[derive(Debug)]
pub(super) struct RevocationList {
    issuer: Box<[u8]>,
    revoked: HashSet<Box<[u8]>>,
    scope: ListScope,
    signed: Box<[u8]>,
    signature_algorithm: Box<[u8]>,
    signature: Box<[u8]>,
}

/// The certificates that a list is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ListScope {
    All,
    Users,
    Authorities,
    /// The list is about a part of the certificates, which is not told here.
    Unclear,
}

impl RevocationList {
    /// Reads a list. `None` if it is malformed.
    pub(super) fn read(der: &CertificateRevocationListDer<'_>) -> Option<Self> {
        let ([], list) = CertificateRevocationList::from_der(der).ok()? else { return None };
        let mut parts = DerReader::within(der, SEQUENCE)?;
        parts.read(SEQUENCE)?;
        let signature_algorithm = parts.read(SEQUENCE)?;
        let revoked = list.iter_revoked_certificates().map(|revoked| revoked.raw_serial().into()).collect();
        Some(Self {
            issuer: list.issuer().as_raw().into(),
            revoked,
            scope: scope_of(&list),
            signed: list.tbs_cert_list.as_ref().into(),
            signature_algorithm: signature_algorithm.into(),
            signature: list.signature_value.data.as_ref().into(),
        })
    }

    fn covers(&self, certificate: &ParsedCertificate) -> bool {
        let is_authority = certificate.basic.is_some_and(|basic| basic.is_authority);
        self.issuer == certificate.issuer
            && match self.scope {
                ListScope::All => true,
                ListScope::Users => !is_authority,
                ListScope::Authorities => is_authority,
                ListScope::Unclear => false,
            }
    }
}

fn scope_of(list: &CertificateRevocationList<'_>) -> ListScope {
    let mut scope = ListScope::All;
    for extension in list.extensions() {
        match extension.parsed_extension() {
            ParsedExtension::IssuingDistributionPoint(point) => {
                let is_partial = point.distribution_point.is_some()
                    || point.only_some_reasons.is_some()
                    || point.indirect_crl
                    || point.only_contains_attribute_certs;
                scope = match (is_partial, point.only_contains_user_certs, point.only_contains_ca_certs) {
                    (true, _, _) | (_, true, true) => ListScope::Unclear,
                    (_, true, false) => ListScope::Users,
                    (_, false, true) => ListScope::Authorities,
                    (_, false, false) => ListScope::All,
                };
            }
            ParsedExtension::CRLNumber(_) | ParsedExtension::AuthorityKeyIdentifier(_) => {}
            _ if extension.critical => return ListScope::Unclear,
            _ => {}
        }
    }
    scope
}

/// Asks the lists about a chain, leaf first, the trusted certificate last.
///
/// # Errors
/// A certificate is revoked, or not covered by a list.
pub(super) fn check(
    lists: &[RevocationList],
    chain: &[&ParsedCertificate],
    algorithms: &WebPkiSupportedAlgorithms,
    work: &mut WorkLeft,
) -> Result<(), RefusedChain> {
    if let &[only] = chain {
        // The file of trusted certificates names the certificate itself: no list need tell of it.
        let is_revoked =
            lists.iter().any(|list| list.issuer == only.issuer && list.revoked.contains(&only.serial));
        return if is_revoked { Err(refused(only, Refusal::Revoked)) } else { Ok(()) };
    }
    let mut unknown = None;
    for pair in chain.windows(2) {
        let &[certificate, issuer] = pair else { continue };
        let may_sign = issuer.key_usage == 0 || issuer.key_usage & CRL_SIGN != 0;
        let mut is_covered = false;
        for list in lists.iter().filter(|list| list.issuer == certificate.issuer) {
            let parts = (&*list.signed, &*list.signature_algorithm, &*list.signature);
            if work.check_signature(algorithms, issuer, parts).is_err() {
                continue;
            }
            if list.revoked.contains(&certificate.serial) {
                return Err(refused(certificate, Refusal::Revoked));
            }
            is_covered |= may_sign && list.covers(certificate);
        }
        if !is_covered {
            unknown.get_or_insert_with(|| refused(certificate, Refusal::UnknownRevocation));
        }
    }
    unknown.map_or(Ok(()), Err)
}
