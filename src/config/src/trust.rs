//! Verification of the certificates of clients and members, as etcd does it.
//!
//! Owns: the reading of a certificate, the search for a chain to a trusted certificate, name constraints,
//! revocation, the verifiers of rustls for both sides, and what is weak in a certificate. Must not know:
//! files, the configuration, connections. The rules are those of Go's `crypto/x509`, by which etcd verifies
//! (`docs/decisions.md#d69`).
//! Invariants: a chain refused by Go is refused here. No bytes of a peer panic. A chain costs at most
//! [`chain_search::MAX_SIGNATURE_CHECKS`] signature checks, from the trusted certificate downwards, so a peer
//! without a certificate of a trusted authority never chooses the key of a check.

mod certificate_fields;
mod certificate_names;
mod chain_search;
mod der_reader;
mod name_constraints;
mod parsed_certificate;
mod refused_chain;
mod revocation_lists;
#[cfg(any(test, feature = "testing"))]
pub mod test_certificates;
#[cfg(test)]
mod tests;
mod verifier;
mod weakness;

pub use certificate_fields::NotAsGoReads;
pub use certificate_names::subject_text;
pub use chain_search::{ChainUse, MAX_CHAIN, MAX_SIGNATURE_CHECKS};
pub use parsed_certificate::ParsedCertificate;
pub use refused_chain::{Refusal, RefusedChain, with_refusal};
pub use verifier::{ChainVerifier, ChainVerifierError, HandshakeVersion, Strictness, verify_handshake};
pub use weakness::{CertificateWeakness, weaknesses};
