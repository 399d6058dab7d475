//! The verifier of rustls for both sides.
//!
//! Owns: the trusted certificates of a listener or of the cluster, and the order of the checks. Must not
//! know: files, the configuration. Invariants: the peer proves possession of the key of its certificate, by
//! the algorithms of the provider. With [`Strictness::Strict`] the library's own verifier must accept the
//! chain, too.

use std::fmt;
use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, WebPkiSupportedAlgorithms, verify_tls13_signature_with_raw_key};
use rustls::pki_types::{
    CertificateDer, CertificateRevocationListDer, ServerName, SubjectPublicKeyInfoDer, TrustAnchor, UnixTime,
};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{VerifierBuilderError, WebPkiClientVerifier};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, PeerMisbehaved, RootCertStore,
    SignatureScheme,
};

use super::certificate_fields::NotAsGoReads;
use super::chain_search::{ChainSearch, ChainUse, WorkLeft, read_sent, refused};
use super::der_reader::{DerReader, SEQUENCE};
use super::parsed_certificate::ParsedCertificate;
use super::refused_chain::{Refusal, RefusedChain};
use super::revocation_lists::{self, RevocationList};

/// The rules for a peer's certificates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Strictness {
    /// etcd's rules.
    #[default]
    AsEtcd,
    /// etcd's rules and those of webpki: X.509 version 3 only, no authority's certificate as a peer's, and a
    /// purpose named by the certificate itself.
    Strict,
}

/// The trusted certificates or lists cannot be used.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ChainVerifierError {
    /// A trusted certificate cannot be read.
    #[error("certificate {position} cannot be used: {why}")]
    Unreadable {
        /// Position of the certificate, counted from 1.
        position: usize,
        /// The reason.
        why: NotAsGoReads,
    },
    /// rustls rejects a revocation list.
    #[error(transparent)]
    Lists(#[from] VerifierBuilderError),
}

/// Verifies the certificates of clients or of members.
pub struct ChainVerifier {
    usage: ChainUse,
    anchors: Vec<ParsedCertificate>,
    subjects: Vec<DistinguishedName>,
    algorithms: WebPkiSupportedAlgorithms,
    lists: Vec<RevocationList>,
    /// A client may come without a certificate.
    is_optional: bool,
    strictness: Strictness,
    library: LibraryVerifier,
}

/// webpki's verifier: the second opinion if strict, and about lists for parts of the certificates.
enum LibraryVerifier {
    Clients(Arc<dyn ClientCertVerifier>),
    Members(Arc<WebPkiServerVerifier>),
}

impl fmt::Debug for ChainVerifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChainVerifier")
            .field("usage", &self.usage)
            .field("anchors", &self.anchors.len())
            .field("strictness", &self.strictness)
            .finish_non_exhaustive()
    }
}

impl ChainVerifier {
    /// A verifier of clients under `roots`. With `lists`, every authority of a chain needs a list: a
    /// certificate not covered by a list may be revoked.
    ///
    /// # Errors
    /// [`ChainVerifierError`].
    pub fn of_clients(
        roots: &[CertificateDer<'static>],
        lists: &[CertificateRevocationListDer<'static>],
        is_optional: bool,
        strictness: Strictness,
        provider: &Arc<CryptoProvider>,
    ) -> Result<Self, ChainVerifierError> {
        let anchors = read_anchors(roots)?;
        let store = Arc::new(store(&anchors));
        let subjects = store.subjects();
        let library = WebPkiClientVerifier::builder_with_provider(store, Arc::clone(provider));
        let library = library.with_crls(lists.iter().cloned()).build()?;
        let lists = lists.iter().filter_map(RevocationList::read).collect();
        let library = LibraryVerifier::Clients(library);
        let usage = ChainUse::Client;
        let algorithms = provider.signature_verification_algorithms;
        Ok(Self { usage, anchors, subjects, algorithms, lists, is_optional, strictness, library })
    }

    /// A verifier of members under `roots`.
    ///
    /// # Errors
    /// [`ChainVerifierError`].
    pub fn of_members(
        roots: &[CertificateDer<'static>],
        strictness: Strictness,
        provider: &Arc<CryptoProvider>,
    ) -> Result<Self, ChainVerifierError> {
        let anchors = read_anchors(roots)?;
        let store = Arc::new(store(&anchors));
        let subjects = store.subjects();
        let library = WebPkiServerVerifier::builder_with_provider(store, Arc::clone(provider)).build()?;
        Ok(Self {
            usage: ChainUse::Server,
            anchors,
            subjects,
            algorithms: provider.signature_verification_algorithms,
            lists: Vec::new(),
            is_optional: false,
            strictness,
            library: LibraryVerifier::Members(library),
        })
    }

    /// Checks that trusted certificates can be used.
    ///
    /// # Errors
    /// [`ChainVerifierError`].
    pub fn read_trusted(roots: &[CertificateDer<'static>]) -> Result<(), ChainVerifierError> {
        read_anchors(roots).map(drop)
    }

    /// Verifies a chain, leaf first; a member's also for the name that was dialled.
    ///
    /// # Errors
    /// [`RefusedChain`] with the certificate at fault and the reason.
    pub fn verify(
        &self,
        leaf: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        name: Option<&ServerName<'_>>,
        now: UnixTime,
    ) -> Result<(), RefusedChain> {
        self.verify_within(leaf, others, name, now).0
    }

    /// As [`Self::verify`], with the work done.
    pub(super) fn verify_within(
        &self,
        leaf: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        name: Option<&ServerName<'_>>,
        now: UnixTime,
    ) -> (Result<(), RefusedChain>, WorkLeft) {
        let Self { anchors, algorithms, usage, .. } = self;
        let (parsed, intermediates) = match read_sent(leaf, others) {
            Ok(read) => read,
            Err(why) => return (Err(why), WorkLeft::new()),
        };
        let mut search = ChainSearch { anchors, algorithms, usage: *usage, now, work: WorkLeft::new() };
        let mut accept = |chain: &[&ParsedCertificate], work: &mut WorkLeft| {
            if self.lists.is_empty() {
                return Ok(());
            }
            revocation_lists::check(&self.lists, chain, algorithms, work).or_else(|why| {
                // webpki reads lists about a part of the certificates; a revocation stands.
                let is_settled = why.refusal == Refusal::Revoked || chain.len() == 1;
                let second = (!is_settled).then(|| self.ask_library(leaf, others, name, now));
                second.and_then(Result::ok).ok_or(why)
            })
        };
        let found = search.find(&parsed, &intermediates, &mut accept);
        let verdict = found.and_then(|()| {
            let mut known = algorithms.all.iter();
            if !known.any(|known| *known.public_key_alg_id() == *parsed.key_algorithm) {
                return Err(refused(&parsed, Refusal::UnsupportedKey));
            }
            if let Some(name) = name
                && !parsed.alternative.as_ref().is_some_and(|names| names.is_for(name))
            {
                return Err(refused(&parsed, Refusal::OtherHost(name.to_str().into_owned())));
            }
            match self.strictness {
                Strictness::AsEtcd => Ok(()),
                Strictness::Strict => self
                    .ask_library(leaf, others, name, now)
                    .map_err(|error| refused(&parsed, Refusal::Strict(error))),
            }
        });
        (verdict, search.work)
    }

    fn ask_library(
        &self,
        leaf: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        name: Option<&ServerName<'_>>,
        now: UnixTime,
    ) -> Result<(), rustls::Error> {
        match (&self.library, name) {
            (LibraryVerifier::Clients(library), _) => library.verify_client_cert(leaf, others, now).map(drop),
            (LibraryVerifier::Members(library), Some(name)) => {
                library.verify_server_cert(leaf, others, name, &[], now).map(drop)
            }
            (LibraryVerifier::Members(_), None) => Err(rustls::Error::General("no name".to_owned())),
        }
    }
}

/// The version of TLS of a handshake's signature.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HandshakeVersion {
    /// TLS 1.2.
    Tls12,
    /// TLS 1.3.
    Tls13,
}

/// Verifies the handshake's signature by the key of any certificate, also of version 1, which rustls' own
/// functions do not read.
///
/// # Errors
/// The signature is not of the certificate's key.
pub fn verify_handshake(
    version: HandshakeVersion,
    message: &[u8],
    leaf: &CertificateDer<'_>,
    signed: &DigitallySignedStruct,
    algorithms: &WebPkiSupportedAlgorithms,
) -> Result<HandshakeSignatureValid, rustls::Error> {
    let unreadable = |_| rustls::Error::InvalidCertificate(CertificateError::BadEncoding);
    let leaf = ParsedCertificate::read(leaf).map_err(unreadable)?;
    if version == HandshakeVersion::Tls13 {
        let key = SubjectPublicKeyInfoDer::from(&*leaf.key_info);
        return verify_tls13_signature_with_raw_key(message, &key, signed, algorithms);
    }
    // As rustls' verify_tls12_signature: a scheme of TLS 1.2 does not name the curve, so every algorithm with
    // the scheme and for the key is tried.
    let offered = algorithms.mapping.iter().find(|(scheme, _)| *scheme == signed.scheme);
    let (_, possible) = offered.ok_or(PeerMisbehaved::SignedHandshakeWithUnadvertisedSigScheme)?;
    let mut fitting = possible.iter().filter(|known| *known.public_key_alg_id() == *leaf.key_algorithm);
    if fitting.any(|known| known.verify_signature(&leaf.key, message, signed.signature()).is_ok()) {
        return Ok(HandshakeSignatureValid::assertion());
    }
    Err(rustls::Error::InvalidCertificate(CertificateError::BadSignature))
}

/// The trusted certificates for webpki, which itself reads no version 2 and no unique ids.
fn store(anchors: &[ParsedCertificate]) -> RootCertStore {
    let contents = |der: &[u8]| DerReader::new(der).read(SEQUENCE).unwrap_or_default().to_vec().into();
    let anchor = |anchor: &ParsedCertificate| TrustAnchor {
        subject: contents(&anchor.subject),
        subject_public_key_info: contents(&anchor.key_info),
        name_constraints: anchor.constraints.as_ref().map(|constraints| constraints.raw.to_vec().into()),
    };
    anchors.iter().map(anchor).collect()
}

fn read_anchors(roots: &[CertificateDer<'static>]) -> Result<Vec<ParsedCertificate>, ChainVerifierError> {
    let read = |(index, root): (usize, &CertificateDer<'static>)| {
        let position = index + 1;
        ParsedCertificate::read(root).map_err(|why| ChainVerifierError::Unreadable { position, why })
    };
    roots.iter().enumerate().map(read).collect()
}

impl ClientCertVerifier for ChainVerifier {
    fn client_auth_mandatory(&self) -> bool {
        !self.is_optional
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &self.subjects
    }

    fn verify_client_cert(
        &self,
        leaf: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        let verified = self.verify(leaf, others, None, now).map_err(RefusedChain::into_error);
        verified.map(|()| ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        leaf: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_handshake(HandshakeVersion::Tls12, message, leaf, signed, &self.algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        leaf: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_handshake(HandshakeVersion::Tls13, message, leaf, signed, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

impl ServerCertVerifier for ChainVerifier {
    fn verify_server_cert(
        &self,
        leaf: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let verified = self.verify(leaf, others, Some(name), now).map_err(RefusedChain::into_error);
        verified.map(|()| ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        leaf: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_handshake(HandshakeVersion::Tls12, message, leaf, signed, &self.algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        leaf: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_handshake(HandshakeVersion::Tls13, message, leaf, signed, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}
