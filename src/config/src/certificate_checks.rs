//! Checks a certificate against its intended use.
//!
//! Owns: these checks. Must not know: the configuration key naming the certificate, the verifier. Invariant:
//! a certificate without the user's name as its common name is never accepted as the user's.

use std::time::{SystemTime, UNIX_EPOCH};

use rustls::pki_types::CertificateDer;
use x509_parser::certificate::X509Certificate;
use x509_parser::extensions::ParsedExtension;
use x509_parser::prelude::FromDer as _;

/// Reasons for rejecting a certificate.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum UnfitCertificate {
    #[error("is no X.509 certificate that can be read")]
    Unreadable,
    #[error("has the common name {found:?}; etcd would take its bearer for that user, not for {wanted:?}")]
    OtherName { found: String, wanted: String },
    #[error("is not good for clients: its extended key usage lacks clientAuth")]
    NotForClients,
    #[error("is not good now: it begins or ended at another time")]
    NotNow,
    #[error("is not an authority's: it lacks basicConstraints CA:TRUE, or keyCertSign")]
    NoAuthority,
    #[error(
        "may sign authorities in its turn; an authority to mint from needs basicConstraints pathlen:0, so \
         that whoever steals its key can make no other"
    )]
    LongPath,
    #[error(
        "may vouch for more than clients; an authority to mint from needs the extended key usage clientAuth \
         and no other, so that whoever steals its key cannot pose as a member"
    )]
    ForMore,
}

/// Checks a user's own certificate. Validity is left to the caller: the certificate may be renewed in time.
pub(super) fn of_user(certificate: &CertificateDer<'_>, user: &str) -> Result<(), UnfitCertificate> {
    let certificate = parse(certificate)?;
    // Go uses the last of several common names: a certificate with several names is rejected.
    let names: Vec<_> = certificate.subject().iter_common_name().collect();
    let found = match &names[..] {
        [name] => name.as_str().unwrap_or_default(),
        _ => "",
    };
    if found != user {
        return Err(UnfitCertificate::OtherName { found: found.to_owned(), wanted: user.to_owned() });
    }
    let usages = certificate.extended_key_usage().map_err(|_| UnfitCertificate::Unreadable)?;
    match usages {
        Some(usages) if !usages.value.client_auth && !usages.value.any => {
            Err(UnfitCertificate::NotForClients)
        }
        _ => Ok(()),
    }
}

/// Checks an authority for minting client certificates (docs/decisions.md#d19).
pub(super) fn of_mint(certificate: &CertificateDer<'_>, now: SystemTime) -> Result<(), UnfitCertificate> {
    let parsed = parse(certificate)?;
    let constraints = parsed.basic_constraints().map_err(|_| UnfitCertificate::Unreadable)?;
    let Some(constraints) = constraints.filter(|constraints| constraints.value.ca) else {
        return Err(UnfitCertificate::NoAuthority);
    };
    let usage = parsed.key_usage().map_err(|_| UnfitCertificate::Unreadable)?;
    if usage.is_some_and(|usage| !usage.value.key_cert_sign()) {
        return Err(UnfitCertificate::NoAuthority);
    }
    if constraints.value.path_len_constraint != Some(0) {
        return Err(UnfitCertificate::LongPath);
    }
    let usages = parsed.extended_key_usage().map_err(|_| UnfitCertificate::Unreadable)?;
    let clients_only = usages.is_some_and(|usages| {
        let usages = usages.value;
        let others = [
            usages.any,
            usages.server_auth,
            usages.code_signing,
            usages.email_protection,
            usages.time_stamping,
            usages.ocsp_signing,
            !usages.other.is_empty(),
        ];
        usages.client_auth && !others.contains(&true)
    });
    if !clients_only {
        return Err(UnfitCertificate::ForMore);
    }
    good_at(certificate, now)
}

/// True if both certificates have the same public key: a holder of the private key can sign in the name of
/// either.
pub(super) fn same_key(
    one: &CertificateDer<'_>,
    other: &CertificateDer<'_>,
) -> Result<bool, UnfitCertificate> {
    Ok(parse(one)?.public_key().raw == parse(other)?.public_key().raw)
}

/// Checks that `now` is within the certificate's validity.
pub(super) fn good_at(certificate: &CertificateDer<'_>, now: SystemTime) -> Result<(), UnfitCertificate> {
    let validity = parse(certificate)?.validity().clone();
    let now = now.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let now = i64::try_from(now).unwrap_or(i64::MAX);
    let within = validity.not_before.timestamp() <= now && now < validity.not_after.timestamp();
    if within { Ok(()) } else { Err(UnfitCertificate::NotNow) }
}

fn parse<'a>(certificate: &'a CertificateDer<'_>) -> Result<X509Certificate<'a>, UnfitCertificate> {
    let (rest, parsed) = X509Certificate::from_der(certificate).map_err(|_| UnfitCertificate::Unreadable)?;
    let readable = rest.is_empty()
        && parsed
            .extensions()
            .iter()
            .all(|extension| !matches!(extension.parsed_extension(), ParsedExtension::ParseError { .. }));
    if readable { Ok(parsed) } else { Err(UnfitCertificate::Unreadable) }
}
