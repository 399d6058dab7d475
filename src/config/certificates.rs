//! What a certificate says of itself, held against what it is to be used for.
//!
//! Owns: those checks. Must not know: which key of the configuration named it, who verifies it.
//! Invariant: a certificate whose name is not the user's own never becomes that user's.

use std::time::{SystemTime, UNIX_EPOCH};

use rustls::pki_types::CertificateDer;
use x509_parser::certificate::X509Certificate;
use x509_parser::extensions::ParsedExtension;
use x509_parser::prelude::FromDer as _;

/// Why a certificate is not what it should be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Unfit {
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
        "may sign authorities in its turn; an authority to mint from needs basicConstraints pathlen:0, so that whoever \
         steals its key can make no other"
    )]
    LongPath,
    #[error(
        "may vouch for more than clients; an authority to mint from needs the extended key usage clientAuth and no other, \
         so that whoever steals its key cannot pose as a member"
    )]
    ForMore,
}

/// A user's own certificate. That it is not good now is for the caller to judge: it may be replaced in time.
pub(super) fn of_user(certificate: &CertificateDer<'_>, user: &str) -> Result<(), Unfit> {
    let certificate = parse(certificate)?;
    // Of several, Go takes the last: one that has several is nobody's.
    let names: Vec<_> = certificate.subject().iter_common_name().collect();
    let found = match &names[..] {
        [name] => name.as_str().unwrap_or_default(),
        _ => "",
    };
    if found != user {
        return Err(Unfit::OtherName { found: found.to_owned(), wanted: user.to_owned() });
    }
    let usages = certificate.extended_key_usage().map_err(|_| Unfit::Unreadable)?;
    match usages {
        Some(usages) if !usages.value.client_auth && !usages.value.any => Err(Unfit::NotForClients),
        _ => Ok(()),
    }
}

/// An authority that certificates for clients are minted from (rules 19).
pub(super) fn of_mint(certificate: &CertificateDer<'_>, now: SystemTime) -> Result<(), Unfit> {
    let parsed = parse(certificate)?;
    let constraints = parsed.basic_constraints().map_err(|_| Unfit::Unreadable)?;
    let Some(constraints) = constraints.filter(|constraints| constraints.value.ca) else {
        return Err(Unfit::NoAuthority);
    };
    let usage = parsed.key_usage().map_err(|_| Unfit::Unreadable)?;
    if usage.is_some_and(|usage| !usage.value.key_cert_sign()) {
        return Err(Unfit::NoAuthority);
    }
    if constraints.value.path_len_constraint != Some(0) {
        return Err(Unfit::LongPath);
    }
    let usages = parsed.extended_key_usage().map_err(|_| Unfit::Unreadable)?;
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
        return Err(Unfit::ForMore);
    }
    good_at(certificate, now)
}

/// Whether the two have the same public key: whoever has the one's private key can sign in the other's name.
pub(super) fn same_key(one: &CertificateDer<'_>, other: &CertificateDer<'_>) -> Result<bool, Unfit> {
    Ok(parse(one)?.public_key().raw == parse(other)?.public_key().raw)
}

/// Whether `now` is within its time.
pub(super) fn good_at(certificate: &CertificateDer<'_>, now: SystemTime) -> Result<(), Unfit> {
    let validity = parse(certificate)?.validity().clone();
    let now = now.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let now = i64::try_from(now).unwrap_or(i64::MAX);
    let within = validity.not_before.timestamp() <= now && now < validity.not_after.timestamp();
    if within { Ok(()) } else { Err(Unfit::NotNow) }
}

fn parse<'a>(certificate: &'a CertificateDer<'_>) -> Result<X509Certificate<'a>, Unfit> {
    let (rest, parsed) = X509Certificate::from_der(certificate).map_err(|_| Unfit::Unreadable)?;
    let readable = rest.is_empty()
        && parsed
            .extensions()
            .iter()
            .all(|extension| !matches!(extension.parsed_extension(), ParsedExtension::ParseError { .. }));
    if readable { Ok(parsed) } else { Err(Unfit::Unreadable) }
}
