//! Chains of certificates that have lost an intermediate since the last reading.
//!
//! Owns: the comparison of a new chain with the one in force. Must not know: files, reloads. A file that is
//! cut at the border of a certificate is whole for every parser; the peers miss the certificate between the
//! first one and their trusted root. Invariant: a chain by another authority, and one without the root, has
//! lost nothing.

use rustls::pki_types::CertificateDer;
use x509_parser::prelude::{FromDer as _, X509Certificate};

use crate::Config;
use crate::certificate_expiry::configured_certificates;

/// A new chain that ends below a certificate which the chain in force has.
#[derive(Debug, PartialEq, Eq)]
pub struct LostIntermediate {
    /// Configuration key naming the chain.
    pub key: String,
    /// The subject of the missing certificate.
    pub subject: String,
}

/// The chains of `read` that have lost an intermediate of the chain in their place in `in_force`.
#[must_use]
pub fn lost_intermediates(in_force: &Config, read: &Config) -> Vec<LostIntermediate> {
    let before = configured_certificates(in_force);
    let lost = configured_certificates(read).into_iter().filter_map(|new| {
        let old = before.iter().find(|old| (old.usage, &old.name) == (new.usage, &new.name))?;
        Some(LostIntermediate { key: new.key(), subject: missing_issuer(&old.chain, &new.chain)? })
    });
    lost.collect()
}

/// The subject of the certificate of `old` that signs for the end of `new` and is missing there.
fn missing_issuer(old: &[CertificateDer<'_>], new: &[CertificateDer<'_>]) -> Option<String> {
    let (_, last) = X509Certificate::from_der(new.last()?).ok()?;
    let signs_last = |parsed: &X509Certificate<'_>| {
        parsed.subject().as_raw() == last.issuer().as_raw() && parsed.subject() != parsed.issuer()
    };
    // The first of a chain is the peer's own.
    let others = old.iter().skip(1).filter(|der| !new.contains(der));
    let mut parsed = others.filter_map(|der| X509Certificate::from_der(der).ok());
    parsed.find_map(|(_, parsed)| signs_last(&parsed).then(|| parsed.subject().to_string()))
}

#[cfg(test)]
mod tests {
    use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};

    use super::*;

    type Issuer = CertifiedIssuer<'static, KeyPair>;

    fn authority(name: &str, above: Option<&Issuer>) -> Issuer {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().unwrap();
        match above {
            None => CertifiedIssuer::self_signed(params, key).unwrap(),
            Some(above) => CertifiedIssuer::signed_by(params, key, above).unwrap(),
        }
    }

    fn leaf(issuer: &Issuer) -> CertificateDer<'static> {
        let params = CertificateParams::new(["a.test".to_owned()]).unwrap();
        params.signed_by(&KeyPair::generate().unwrap(), issuer).unwrap().der().clone()
    }

    #[test]
    fn a_chain_that_ends_below_a_certificate_of_the_one_before_has_lost_it() {
        let root = authority("root", None);
        let (upper, stranger) = (authority("upper", Some(&root)), authority("stranger", None));
        let lower = authority("lower", Some(&upper));
        let [root_der, upper_der, lower_der] = [&root, &upper, &lower].map(|ca| ca.der().clone());
        let new = || leaf(&lower);
        let whole = [leaf(&lower), lower_der.clone(), upper_der.clone(), root_der.clone()];
        for (chain, lost) in [
            (vec![new()], Some("lower")),
            (vec![new(), lower_der.clone()], Some("upper")),
            // The root is the peers' own.
            (vec![new(), lower_der.clone(), upper_der.clone()], None),
            (whole.to_vec(), None),
            // Another authority, and an intermediate that signs by itself.
            (vec![leaf(&stranger)], None),
            (vec![leaf(&root)], None),
            (vec![leaf(&upper), upper_der.clone()], None),
        ] {
            let missing = missing_issuer(&whole, &chain);
            assert_eq!(
                missing.as_deref().map(|name| name.contains(lost.unwrap_or("none"))),
                lost.map(|_| true),
                "{lost:?}"
            );
        }
        assert_eq!(missing_issuer(&[leaf(&lower)], &[new()]), None, "the one before was no longer");
    }
}
