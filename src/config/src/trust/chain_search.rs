//! The search for a chain from a peer's certificate to a trusted certificate.
//!
//! Owns: the rules for every certificate of a chain (Go, `crypto/x509/verify.go`), and the limits of the
//! search. Must not know: names of hosts, revocation, connections.
//! Invariants: a chain is accepted only after every signature in it. Signatures are checked from the trusted
//! certificate downwards, and the same signature once only.

use rustls::crypto::WebPkiSupportedAlgorithms;
use rustls::pki_types::{CertificateDer, UnixTime};

use super::certificate_names::subject_text;
use super::name_constraints::{self, MAX_COMPARISONS, NameOutside};
use super::parsed_certificate::ParsedCertificate;
use super::refused_chain::{Refusal, RefusedChain};

/// Maximum number of certificates in a chain, with the trusted certificate.
pub const MAX_CHAIN: usize = 8;
/// Maximum number of signature checks for a peer's certificates, failed checks included.
pub const MAX_SIGNATURE_CHECKS: usize = 32;
/// Maximum number of certificates that a peer may send. Servers send two or three.
const MAX_SENT: usize = 32;
/// Maximum number of certificates considered as an issuer, over all chains.
const MAX_STEPS: usize = 1000;

/// The use of a peer's certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChainUse {
    /// A client shows it.
    Client,
    /// A member shows it.
    Server,
}

/// The last word on a chain whose signatures are good.
pub(super) type AcceptChain<'f, 'a> =
    dyn FnMut(&[&'a ParsedCertificate], &mut WorkLeft) -> Result<(), RefusedChain> + 'f;

/// The limits of one search, and its results so far.
pub(super) struct ChainSearch<'a> {
    pub(super) anchors: &'a [ParsedCertificate],
    pub(super) algorithms: &'a WebPkiSupportedAlgorithms,
    pub(super) usage: ChainUse,
    pub(super) now: UnixTime,
    pub(super) work: WorkLeft,
}

/// What a search may still do.
#[derive(Debug)]
pub(super) struct WorkLeft {
    steps: usize,
    signatures: usize,
    /// Comparisons of names with name constraints.
    comparisons: usize,
    /// The checked signatures, by the positions of certificate and issuer.
    checked: Vec<(*const ParsedCertificate, *const ParsedCertificate, Result<(), SignatureFault>)>,
}

/// The reason for a failed signature check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SignatureFault {
    Wrong,
    Unsupported,
    TooMany,
}

impl From<SignatureFault> for Refusal {
    fn from(fault: SignatureFault) -> Self {
        match fault {
            SignatureFault::Wrong => Self::BadSignature,
            SignatureFault::Unsupported => Self::UnsupportedSignature,
            SignatureFault::TooMany => Self::TooMuchWork,
        }
    }
}

impl ChainUse {
    /// Go's rule: a certificate without purposes, and the purpose "any", are good for every use.
    pub(super) fn is_allowed(self, certificate: &ParsedCertificate) -> bool {
        let purposes = certificate.purposes;
        let named = match self {
            Self::Client => purposes.client,
            Self::Server => purposes.server,
        };
        !purposes.are_limited || purposes.any || named
    }

    pub(super) fn purpose(self) -> &'static str {
        match self {
            Self::Client => "clientAuth",
            Self::Server => "serverAuth",
        }
    }
}

impl WorkLeft {
    pub(super) fn new() -> Self {
        Self {
            steps: MAX_STEPS,
            signatures: MAX_SIGNATURE_CHECKS,
            comparisons: MAX_COMPARISONS,
            checked: Vec::new(),
        }
    }

    /// Checks a signature by the key of `issuer`, with an algorithm of the provider.
    pub(super) fn check_signature(
        &mut self,
        algorithms: &WebPkiSupportedAlgorithms,
        issuer: &ParsedCertificate,
        (signed, algorithm, signature): (&[u8], &[u8], &[u8]),
    ) -> Result<(), SignatureFault> {
        let mut fitting = algorithms
            .all
            .iter()
            .filter(|known| *known.signature_alg_id() == *algorithm)
            .filter(|known| *known.public_key_alg_id() == *issuer.key_algorithm)
            .peekable();
        if fitting.peek().is_none() {
            return Err(SignatureFault::Unsupported);
        }
        for known in fitting {
            self.signatures = self.signatures.checked_sub(1).ok_or(SignatureFault::TooMany)?;
            if known.verify_signature(&issuer.key, signed, signature).is_ok() {
                return Ok(());
            }
        }
        Err(SignatureFault::Wrong)
    }

    fn check_issued(
        &mut self,
        algorithms: &WebPkiSupportedAlgorithms,
        certificate: &ParsedCertificate,
        issuer: &ParsedCertificate,
    ) -> Result<(), SignatureFault> {
        let pair = (std::ptr::from_ref(certificate), std::ptr::from_ref(issuer));
        let known = self.checked.iter().find(|(of, by, _)| (*of, *by) == pair);
        if let Some((_, _, result)) = known {
            return *result;
        }
        let signature = (&*certificate.signed, &*certificate.signature_algorithm, &*certificate.signature);
        let result = self.check_signature(algorithms, issuer, signature);
        self.checked.push((pair.0, pair.1, result));
        result
    }

    #[cfg(test)]
    pub(super) fn signature_checks(&self) -> usize {
        MAX_SIGNATURE_CHECKS - self.signatures
    }

    #[cfg(test)]
    pub(super) fn comparisons(&self) -> usize {
        MAX_COMPARISONS - self.comparisons
    }
}

/// Reads a peer's certificates, leaf first. As in Go, a chain with a certificate that cannot be read is
/// refused.
pub(super) fn read_sent(
    leaf: &CertificateDer<'_>,
    others: &[CertificateDer<'_>],
) -> Result<(ParsedCertificate, Vec<ParsedCertificate>), RefusedChain> {
    if others.len() >= MAX_SENT {
        let refusal = Refusal::TooMany(MAX_SENT - 1);
        return Err(RefusedChain { subject: subject_text(leaf), refusal });
    }
    let read = |der: &CertificateDer<'_>| {
        ParsedCertificate::read(der)
            .map_err(|why| RefusedChain { subject: subject_text(der), refusal: Refusal::Unreadable(why) })
    };
    Ok((read(leaf)?, others.iter().map(read).collect::<Result<_, _>>()?))
}

impl<'a> ChainSearch<'a> {
    /// Finds chains from `leaf` to a trusted certificate, and returns the first that `accept` takes.
    ///
    /// # Errors
    /// The reason for the first refused chain.
    pub(super) fn find(
        &mut self,
        leaf: &'a ParsedCertificate,
        others: &'a [ParsedCertificate],
        accept: &mut AcceptChain<'_, 'a>,
    ) -> Result<(), RefusedChain> {
        self.is_good(leaf, 0).map_err(Fault::told)?;
        // A trusted certificate is believed itself, whoever signed it.
        if self.anchors.iter().any(|anchor| anchor.der == leaf.der) {
            self.judge(&[leaf]).map_err(Fault::told)?;
            return accept(&[leaf], &mut self.work);
        }
        let mut first = None;
        match self.extend(&mut vec![leaf], others, accept, &mut first) {
            true => Ok(()),
            false => Err(first.unwrap_or_else(|| refused(leaf, Refusal::UnknownIssuer))),
        }
    }

    /// Tries every issuer of the chain's last certificate. True once a chain is accepted; the first reason
    /// against a chain is kept in `first`.
    fn extend(
        &mut self,
        chain: &mut Vec<&'a ParsedCertificate>,
        others: &'a [ParsedCertificate],
        accept: &mut AcceptChain<'_, 'a>,
        first: &mut Option<RefusedChain>,
    ) -> bool {
        let Some(&last) = chain.last() else { return false };
        let anchors = self.anchors;
        for anchor in in_order(last, anchors) {
            if !self.may_step(chain, first) || is_in_chain(anchor, chain) {
                continue;
            }
            chain.push(anchor);
            let judged = self.is_issuer_good(anchor, chain.len() - 1);
            let accepted = match judged.and_then(|()| self.judge(chain)) {
                Ok(()) => accept(chain, &mut self.work).map_err(|why| _ = first.get_or_insert(why)),
                Err(fault) => {
                    fault.keep(first);
                    Err(())
                }
            };
            chain.pop();
            if accepted.is_ok() {
                return true;
            }
        }
        if chain.len() + 1 >= MAX_CHAIN {
            return false;
        }
        for other in in_order(last, others) {
            if !self.may_step(chain, first) || is_in_chain(other, chain) {
                continue;
            }
            let is_authority = other.basic.is_some_and(|basic| basic.is_authority);
            let judged = self.is_issuer_good(other, chain.len());
            let judged = if is_authority { judged } else { Err(Fault(other, Refusal::NoAuthority)) };
            if let Err(fault) = judged {
                fault.keep(first);
                continue;
            }
            chain.push(other);
            let is_found = self.extend(chain, others, accept, first);
            chain.pop();
            if is_found {
                return true;
            }
        }
        false
    }

    fn may_step(&mut self, chain: &[&ParsedCertificate], first: &mut Option<RefusedChain>) -> bool {
        let left = self.work.steps.checked_sub(1);
        self.work.steps = left.unwrap_or(0);
        if let (None, Some(leaf)) = (left, chain.first()) {
            Fault(leaf, Refusal::TooMuchWork).keep(first);
        }
        left.is_some()
    }

    /// As Go's `isValid`, for a certificate that would stand behind `below` others.
    fn is_good(&self, certificate: &'a ParsedCertificate, below: usize) -> Result<(), Fault<'a>> {
        let now = i64::try_from(self.now.as_secs()).unwrap_or(i64::MAX);
        let (begins, ends) = certificate.validity;
        let length = certificate.basic.and_then(|basic| basic.path_length);
        let authorities_below = u64::try_from(below.saturating_sub(1)).unwrap_or(u64::MAX);
        let refusal = if certificate.has_unknown_critical {
            Refusal::UnknownCritical
        } else if now < begins {
            Refusal::NotYet
        } else if now > ends {
            Refusal::Expired
        } else if length.is_some_and(|length| authorities_below > length) {
            Refusal::PathTooLong
        } else {
            return Ok(());
        };
        Err(Fault(certificate, refusal))
    }

    /// As Go's `CheckSignatureFrom` without the signature, and `isValid`.
    fn is_issuer_good(&self, issuer: &'a ParsedCertificate, below: usize) -> Result<(), Fault<'a>> {
        if !issuer.may_sign_certificates() {
            return Err(Fault(issuer, Refusal::NoAuthority));
        }
        self.is_good(issuer, below)
    }

    /// Judges a whole chain, leaf first: its use, its signatures from the top, and its names. Names come
    /// last: the number of comparisons is a stranger's choice until the signatures are known to be good.
    fn judge(&mut self, chain: &[&'a ParsedCertificate]) -> Result<(), Fault<'a>> {
        for certificate in chain.iter().rev() {
            if !self.usage.is_allowed(certificate) {
                return Err(Fault(certificate, Refusal::OtherPurpose(self.usage.purpose())));
            }
        }
        let (_, below) = chain.split_last().unwrap_or((&chain[0], &[]));
        if let Some(with_rules) = below.iter().find(|certificate| certificate.has_policy_rules) {
            return Err(Fault(with_rules, Refusal::PolicyRules));
        }
        for pair in chain.windows(2).rev() {
            let &[certificate, issuer] = pair else { continue };
            let checked = self.work.check_issued(self.algorithms, certificate, issuer);
            checked.map_err(|fault| Fault(certificate, fault.into()))?;
        }
        let names = |certificate: &&'a ParsedCertificate| {
            (certificate.alternative.as_ref(), certificate.constraints.as_ref())
        };
        let names: Vec<_> = chain.iter().map(names).collect();
        name_constraints::check(&names, &mut self.work.comparisons)
            .map_err(|NameOutside| Fault(chain[0], Refusal::NameOutside))
    }
}

pub(super) fn refused(certificate: &ParsedCertificate, refusal: Refusal) -> RefusedChain {
    RefusedChain { subject: subject_text(&certificate.der), refusal }
}

/// A certificate at fault. Its subject becomes text once for a search, since a stranger's chain has many
/// faults.
struct Fault<'a>(&'a ParsedCertificate, Refusal);

impl Fault<'_> {
    fn told(self) -> RefusedChain {
        refused(self.0, self.1)
    }

    fn keep(self, first: &mut Option<RefusedChain>) {
        first.get_or_insert_with(|| self.told());
    }
}

/// The certificates with the name of the issuer of `of`: the ones with its key identifier first, as in Go.
fn in_order<'a>(
    of: &ParsedCertificate,
    candidates: &'a [ParsedCertificate],
) -> impl Iterator<Item = &'a ParsedCertificate> {
    let (issuer, key) = (of.issuer.clone(), of.authority_key.clone());
    let mut named: Vec<_> = candidates.iter().filter(|candidate| candidate.subject == issuer).collect();
    named.sort_by_key(|candidate| match (&candidate.subject_key, &key) {
        (one, other) if one == other => 0,
        (None, _) | (_, None) => 1,
        _ => 2,
    });
    named.into_iter()
}

/// As Go's `alreadyInChain`: the same subject, key and alternative names.
fn is_in_chain(candidate: &ParsedCertificate, chain: &[&ParsedCertificate]) -> bool {
    let own = candidate.alternative.as_ref().map(|names| &names.raw);
    let is_same = |other: &&ParsedCertificate| {
        candidate.subject == other.subject
            && candidate.key_info == other.key_info
            && own == other.alternative.as_ref().map(|names| &names.raw)
    };
    chain.iter().any(is_same)
}
