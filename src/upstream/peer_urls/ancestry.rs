//! Whether what a member accepts at its peer URL includes what is minted: pure.
//!
//! Owns: the names of the authorities that vouch for one. Must not know: sockets, which member it is.
//! Invariant: authorities are told apart by their names, as a member's own list has nothing else: one that is only called
//! like another counts as that other.

use std::collections::BTreeSet;

use rustls::pki_types::CertificateDer;
use x509_parser::certificate::X509Certificate;
use x509_parser::prelude::FromDer as _;

use super::sight::{Sight, Wants};

/// An authority, and those above it.
pub(super) struct Ancestry<'a> {
    names: BTreeSet<Vec<u8>>,
    authority: &'a [CertificateDer<'static>],
    roots: &'a [CertificateDer<'static>],
}

/// Subject and issuer of a certificate; none where it cannot be read.
fn names<'a>(certificate: &'a CertificateDer<'_>) -> Option<(&'a [u8], &'a [u8])> {
    let (_, parsed) = X509Certificate::from_der(certificate).ok()?;
    Some((parsed.subject.as_raw(), parsed.issuer.as_raw()))
}

impl<'a> Ancestry<'a> {
    /// Of the first of `authority`; the others, and `roots`, may lead further up.
    pub(super) fn of(authority: &'a [CertificateDer<'static>], roots: &'a [CertificateDer<'static>]) -> Self {
        let own = authority.first().and_then(names);
        let names = own.into_iter().flat_map(|(subject, issuer)| [subject.to_vec(), issuer.to_vec()]);
        Self { names: names.collect(), authority, roots }.with(&[])
    }

    /// With what `more` certificates tell about who is above whom.
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

    /// Whether the member would take a certificate that the authority signed for one of another member.
    pub(super) fn is_trusted(&self, sight: &Sight) -> bool {
        let above = Self { names: self.names.clone(), ..*self }.with(&sight.shown);
        match &sight.wants {
            // It trusts anybody, whatever is minted.
            Wants::Nothing => false,
            // What vouches for a member is then the best guess at whom it believes.
            Wants::CertificateBy(wanted) if wanted.is_empty() => {
                let leaf = sight.shown.first().and_then(names);
                leaf.is_some_and(|(_, issuer)| above.names.contains(issuer))
            }
            Wants::CertificateBy(wanted) => wanted.iter().any(|name| above.names.contains(name)),
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

    fn named(authorities: &[&Authority]) -> Wants {
        let subject = |authority: &&Authority| names(authority.der()).unwrap().0.to_vec();
        Wants::CertificateBy(authorities.iter().map(subject).collect())
    }

    /// root ← middle ← mint; root ← peers; other.
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
                Ancestry::of(&authority, &roots)
                    .is_trusted(&Sight { shown: der(shown), wants: named(wanted) })
            };
        assert!(trusted(&[&mint], &[], &[], &[&mint]), "itself");
        assert!(trusted(&[&mint], &[], &[], &[&other, &middle]), "who signed it");
        assert!(!trusted(&[&mint], &[], &[], &[&root]), "nobody shows who is above that");
        assert!(trusted(&[&mint, &middle], &[], &[], &[&root]), "its own chain does");
        assert!(trusted(&[&mint], &[&middle], &[], &[&root]), "cluster.tls.ca does");
        assert!(trusted(&[&mint], &[], &[&leaf, &middle], &[&root]), "the member does");
        assert!(!trusted(&[&mint, &middle], &[&root], &[&leaf], &[&other]), "others");
        // Of one root, and yet what is minted is not below what members name.
        assert!(!trusted(&[&mint, &middle], &[&root], &[&leaf, &peers], &[&peers]), "a sister");
    }

    #[test]
    fn a_member_that_does_not_say_whom_it_believes_is_judged_by_who_vouches_for_it() {
        let House { root, middle, mint, peers, other } = house();
        let trusted = |issuer: &Authority| {
            let (authority, roots) = (der(&[&mint, &middle]), der(&[&root]));
            let shown = der(&[&below("m1", issuer)]);
            Ancestry::of(&authority, &roots).is_trusted(&Sight { shown, wants: named(&[]) })
        };
        assert!(trusted(&root) && trusted(&middle) && trusted(&mint));
        assert!(!trusted(&peers) && !trusted(&other));
    }

    #[test]
    fn a_member_that_asks_for_nothing_trusts_nobody_more_for_what_is_minted() {
        let House { root, mint, .. } = house();
        let authority = der(&[&mint]);
        let sight = Sight { shown: der(&[&below("m1", &root)]), wants: Wants::Nothing };
        assert!(!Ancestry::of(&authority, &[]).is_trusted(&sight));
    }
}
