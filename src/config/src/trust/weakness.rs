//! Configured certificates that are weak, or that will be refused.
//!
//! Owns: the list of weaknesses. Must not know: files, the configuration's keys. Invariant: a certificate
//! named as refused here is refused by [`super::ChainVerifier`].

use rustls::crypto::WebPkiSupportedAlgorithms;
use rustls::pki_types::CertificateDer;

use super::certificate_names::subject_text;
use super::chain_search::ChainUse;
use super::parsed_certificate::ParsedCertificate;

/// A weak or refused certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertificateWeakness {
    /// The certificate's subject.
    pub subject: String,
    /// The weakness, as a sentence about "it".
    pub what: &'static str,
    /// The certificate, or every certificate below it, is refused.
    pub is_refused: bool,
}

/// Lists the weaknesses of a certificate: of an authority for `usage` if `is_trusted`, else of a peer.
#[must_use]
pub fn weaknesses(
    der: &CertificateDer<'_>,
    usage: ChainUse,
    is_trusted: bool,
    algorithms: &WebPkiSupportedAlgorithms,
) -> Vec<CertificateWeakness> {
    let subject = subject_text(der);
    let found =
        |what: &'static str, is_refused| CertificateWeakness { subject: subject.clone(), what, is_refused };
    let certificate = match ParsedCertificate::read(der) {
        Ok(certificate) => certificate,
        Err(_) => return vec![found("it cannot be read as etcd reads certificates", true)],
    };
    let mut all = Vec::new();
    if certificate.version < 2 {
        all.push(found(
            "it is of X.509 version 1 (openssl x509 -req without -extfile), so it has no limits",
            false,
        ));
    }
    if certificate.has_unknown_critical {
        all.push(found("it has a critical extension that etcd does not know", true));
    }
    if !usage.is_allowed(&certificate) {
        let what = match usage {
            ChainUse::Client => "its extended key usage lacks clientAuth",
            ChainUse::Server => "its extended key usage lacks serverAuth",
        };
        all.push(found(what, true));
    } else if !is_trusted && certificate.purposes.any {
        all.push(found("it is good for every purpose: its extended key usage is any", false));
    }
    if usage == ChainUse::Server && !is_trusted && certificate.alternative.is_none() {
        all.push(found("it has no subject alternative name, so it is valid for no host", true));
    }
    let is_authority = certificate.basic.is_some_and(|basic| basic.is_authority);
    if !is_trusted && is_authority {
        all.push(found("it is an authority's (CA:TRUE): its key can make further certificates", false));
    }
    if is_trusted && !certificate.may_sign_certificates() {
        let what = "it is no authority's, so it vouches for itself alone";
        all.push(found(what, false));
    }
    let is_usable = |known: &&dyn rustls::pki_types::SignatureVerificationAlgorithm| {
        *known.public_key_alg_id() == *certificate.key_algorithm
    };
    if !algorithms.all.iter().any(is_usable) {
        all.push(found("its key is of a kind that is not supported", true));
    } else if is_short_rsa(&certificate) {
        all.push(found("its RSA key has less than 2048 bits", true));
    }
    let is_known = |known: &&dyn rustls::pki_types::SignatureVerificationAlgorithm| {
        *known.signature_alg_id() == *certificate.signature_algorithm
    };
    if !is_trusted && !algorithms.all.iter().any(is_known) {
        all.push(found("it is signed by an algorithm that is not supported (SHA-1, for example)", true));
    }
    all
}

/// True for an RSA key with a modulus below 2048 bits: ring verifies nothing by it.
fn is_short_rsa(certificate: &ParsedCertificate) -> bool {
    const RSA: &[u8] = &[0x06, 9, 0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 1, 1];
    certificate.key_algorithm.starts_with(RSA) && certificate.key.len() < 256
}
