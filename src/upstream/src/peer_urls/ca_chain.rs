//! The test for trust: would a member accept a minted certificate at its peer URL? Pure.
//!
//! Owns: the names of the minting CA and of every CA above. Must not know: sockets, the member's identity.
//! Invariant: CAs are compared by name, since a member's list of accepted CAs holds only names; a different
//! CA of the same name counts as the same.

use std::collections::BTreeSet;

use rustls::pki_types::CertificateDer;
use x509_parser::certificate::X509Certificate;
use x509_parser::prelude::FromDer as _;

use super::peer_handshake::{PeerClientAuth, PeerHandshake};

/// The minting CA and every CA above.
pub(super) struct CaChain<'a> {
    names: BTreeSet<Vec<u8>>,
    authority: &'a [CertificateDer<'static>],
    roots: &'a [CertificateDer<'static>],
}

/// Returns the subject and issuer of a certificate; `None` if unreadable.
fn names<'a>(certificate: &'a CertificateDer<'_>) -> Option<(&'a [u8], &'a [u8])> {
    let (_, parsed) = X509Certificate::from_der(certificate).ok()?;
    Some((parsed.subject.as_raw(), parsed.issuer.as_raw()))
}

impl<'a> CaChain<'a> {
    /// Builds the ancestry of the first certificate of `authority`; the rest, and `roots`, may lead further
    /// up.
    pub(super) fn of(authority: &'a [CertificateDer<'static>], roots: &'a [CertificateDer<'static>]) -> Self {
        let own = authority.first().and_then(names);
        let names = own.into_iter().flat_map(|(subject, issuer)| [subject.to_vec(), issuer.to_vec()]);
        Self { names: names.collect(), authority, roots }.with(&[])
    }

    /// Adds the issuers found through the certificates of `more`.
    fn with(mut self, more: &[CertificateDer<'_>]) -> Self {
        let known = self.authority.iter().chain(self.roots).chain(more);
        let known: Vec<_> = known.filter_map(names).collect();
        loop {
            let above = known
                .iter()
                .find(|(subject, issuer)| self.names.contains(*subject) && !self.names.contains(*issuer));
            match above {
                Some((_, issuer)) => self.names.insert(issuer.to_vec()),
                None => return self,
            };
        }
    }

    /// True if the member would accept a certificate signed by the CA as another member's.
    pub(super) fn is_trusted(&self, sight: &PeerHandshake) -> bool {
        let above = Self { names: self.names.clone(), ..*self }.with(&sight.certificates);
        match &sight.client_auth {
            // The member accepts every peer anyway; a minted certificate adds no access.
            PeerClientAuth::Nothing => false,
            // Without named CAs, the issuer of the member's own certificate is the best guess at the accepted
            // CA.
            PeerClientAuth::CertificateBy(wanted) if wanted.is_empty() => {
                let leaf = sight.certificates.first().and_then(names);
                leaf.is_some_and(|(_, issuer)| above.names.contains(issuer))
            }
            PeerClientAuth::CertificateBy(wanted) => wanted.iter().any(|name| above.names.contains(name)),
        }
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{
        BasicConstraints, CertificateParams, CertifiedIssuer, DistinguishedName, DnType, IsCa, KeyPair,
    };

    use super::*;

    type Authority = CertifiedIssuer<'static, KeyPair>;

    fn params(name: &str) -> CertificateParams {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, name);
        params
    }

    fn root(name: &str) -> Authority {
        CertifiedIssuer::self_signed(params(name), KeyPair::generate().unwrap()).unwrap()
    }

    fn below(name: &str, issuer: &Authority) -> Authority {
        CertifiedIssuer::signed_by(params(name), KeyPair::generate().unwrap(), issuer).unwrap()
    }

    fn der(authorities: &[&Authority]) -> Vec<CertificateDer<'static>> {
        authorities.iter().map(|authority| authority.der().clone()).collect()
    }

    fn named(authorities: &[&Authority]) -> PeerClientAuth {
        let subject = |authority: &&Authority| names(authority.der()).unwrap().0.to_vec();
        PeerClientAuth::CertificateBy(authorities.iter().map(subject).collect())
    }

    /// CA hierarchy: root ← middle ← mint; root ← peers; `other` alone.
    struct House {
        root: Authority,
        middle: Authority,
        mint: Authority,
        peers: Authority,
        other: Authority,
    }

    fn house() -> House {
        let top = root("root");
        let middle = below("middle", &top);
        let (mint, peers) = (below("mint", &middle), below("peers", &top));
        House { root: top, middle, mint, peers, other: root("other") }
    }

    #[test]
    fn an_authority_is_trusted_where_the_member_names_it_or_one_above_it() {
        let House { root, middle, mint, peers, other } = house();
        let leaf = below("m1", &peers);
        let trusted =
            |authority: &[&Authority], roots: &[&Authority], shown: &[&Authority], wanted: &[&Authority]| {
                let (authority, roots) = (der(authority), der(roots));
                CaChain::of(&authority, &roots)
                    .is_trusted(&PeerHandshake { certificates: der(shown), client_auth: named(wanted) })
            };
        assert!(trusted(&[&mint], &[], &[], &[&mint]), "itself");
        assert!(trusted(&[&mint], &[], &[], &[&other, &middle]), "who signed it");
        assert!(!trusted(&[&mint], &[], &[], &[&root]), "nobody shows who is above that");
        assert!(trusted(&[&mint, &middle], &[], &[], &[&root]), "its own chain does");
        assert!(trusted(&[&mint], &[&middle], &[], &[&root]), "cluster.tls.ca does");
        assert!(trusted(&[&mint], &[], &[&leaf, &middle], &[&root]), "the member does");
        assert!(!trusted(&[&mint, &middle], &[&root], &[&leaf], &[&other]), "others");
        // The same root, yet minted certificates are not below the CA named by the member.
        assert!(!trusted(&[&mint, &middle], &[&root], &[&leaf, &peers], &[&peers]), "a sister");
    }

    #[test]
    fn a_member_that_does_not_say_whom_it_believes_is_judged_by_who_vouches_for_it() {
        let House { root, middle, mint, peers, other } = house();
        let trusted = |issuer: &Authority| {
            let (authority, roots) = (der(&[&mint, &middle]), der(&[&root]));
            let shown = der(&[&below("m1", issuer)]);
            CaChain::of(&authority, &roots)
                .is_trusted(&PeerHandshake { certificates: shown, client_auth: named(&[]) })
        };
        assert!(trusted(&root) && trusted(&middle) && trusted(&mint));
        assert!(!trusted(&peers) && !trusted(&other));
    }

    #[test]
    fn a_member_that_asks_for_nothing_trusts_nobody_more_for_what_is_minted() {
        let House { root, mint, .. } = house();
        let authority = der(&[&mint]);
        let sight =
            PeerHandshake { certificates: der(&[&below("m1", &root)]), client_auth: PeerClientAuth::Nothing };
        assert!(!CaChain::of(&authority, &[]).is_trusted(&sight));
    }
}
