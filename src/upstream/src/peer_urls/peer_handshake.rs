//! A TLS handshake with a peer URL, to record the member's certificates and the client certificate demanded
//! of peers.
//!
//! Owns: the handshake. Must not know: the member behind the URL, the consequences.
//! Invariants: no application data is sent. Keyward shows no certificate, and accepts any server certificate.
//! The handshake may fail: the member names the accepted CAs before refusing Keyward.

use std::sync::{Arc, Mutex, PoisonError};

use rustls::client::ResolvesClientCert;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{self, CryptoProvider};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::sign::CertifiedKey;
use rustls::{ClientConfig, DigitallySignedStruct, SignatureScheme};

use keyward_config::Endpoint;
use keyward_dial::connect::{ConnectError, Connector};

/// A member's certificates at its peer URL, and the client certificate demanded of peers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PeerHandshake {
    /// The member's own certificate, then the rest of its chain.
    pub(super) certificates: Vec<CertificateDer<'static>>,
    /// The client certificate demanded of peers.
    pub(super) client_auth: PeerClientAuth,
}

/// A member's demand on connections to its peer URL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum PeerClientAuth {
    /// No certificate: every connection is accepted.
    Nothing,
    /// A certificate of a CA among these DER-encoded names. An empty list: the member demands a certificate
    /// without naming CAs.
    CertificateBy(Vec<Vec<u8>>),
}

/// Records a handshake: accepts every server certificate, and shows no client certificate.
#[derive(Debug)]
struct HandshakeRecorder {
    provider: Arc<CryptoProvider>,
    seen: Mutex<HandshakeRecord>,
}

#[derive(Debug, Default)]
struct HandshakeRecord {
    shown: Vec<CertificateDer<'static>>,
    ca_names: Option<Vec<Vec<u8>>>,
}

/// Connects to `endpoint` and records the handshake. Cancel-safe.
///
/// # Errors
/// The connection or handshake failed before the member asked for a client certificate.
pub(super) async fn record_handshake(
    connector: &Connector,
    endpoint: &Endpoint,
) -> Result<PeerHandshake, ConnectError> {
    let failed = |reason: String| ConnectError::Failed { endpoint: endpoint.clone(), reason: reason.into() };
    let provider = Arc::new(crypto::ring::default_provider());
    let eyes = Arc::new(HandshakeRecorder { provider: Arc::clone(&provider), seen: Mutex::default() });
    let config =
        ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().map(|config| {
            let config = config.dangerous().with_custom_certificate_verifier(Arc::clone(&eyes) as _);
            config.with_client_cert_resolver(Arc::clone(&eyes) as _)
        });
    let config = config.map_err(|error| failed(error.to_string()))?;
    let connected = connector.showing(Arc::new(config)).connect(endpoint).await;
    let seen = std::mem::take(&mut *eyes.seen());
    match (seen.ca_names, connected) {
        (Some(names), _) => {
            Ok(PeerHandshake { certificates: seen.shown, client_auth: PeerClientAuth::CertificateBy(names) })
        }
        (None, Ok(_)) => Ok(PeerHandshake { certificates: seen.shown, client_auth: PeerClientAuth::Nothing }),
        (None, Err(error)) => Err(error),
    }
}

impl HandshakeRecorder {
    fn seen(&self) -> std::sync::MutexGuard<'_, HandshakeRecord> {
        // No code under the lock can panic half-way.
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ServerCertVerifier for HandshakeRecorder {
    /// Accepts every certificate: no secret is sent over the connection.
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let chain = std::iter::once(end_entity).chain(intermediates);
        self.seen().shown = chain.map(|certificate| certificate.clone().into_owned()).collect();
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        crypto::verify_tls12_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        crypto::verify_tls13_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

impl ResolvesClientCert for HandshakeRecorder {
    fn resolve(
        &self,
        root_hint_subjects: &[&[u8]],
        _sigschemes: &[SignatureScheme],
    ) -> Option<Arc<CertifiedKey>> {
        self.seen().ca_names = Some(root_hint_subjects.iter().map(|name| name.to_vec()).collect());
        None
    }

    fn has_certs(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use futures_util::FutureExt as _;
    use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
    use rustls::pki_types::PrivateKeyDer;
    use rustls::server::{NoClientAuth, WebPkiClientVerifier};
    use rustls::version::{TLS12, TLS13};
    use rustls::{RootCertStore, ServerConfig, SupportedProtocolVersion};
    use x509_parser::certificate::X509Certificate;
    use x509_parser::prelude::FromDer as _;

    use super::*;
    use keyward_config::Scheme;

    fn authority(name: &str) -> CertifiedIssuer<'static, KeyPair> {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, name);
        CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
    }

    /// Returns the record of a handshake with a member showing a certificate of `own` and demanding a
    /// certificate of `wanted`, if any, and the member's certificate.
    async fn looked(
        own: &CertifiedIssuer<'static, KeyPair>,
        wanted: &[&CertifiedIssuer<'static, KeyPair>],
        version: &'static SupportedProtocolVersion,
    ) -> (PeerHandshake, CertificateDer<'static>) {
        let key = KeyPair::generate().unwrap();
        let shown = CertificateParams::new(["m1".to_owned()]).unwrap().signed_by(&key, own).unwrap();
        let provider = Arc::new(crypto::ring::default_provider());
        let mut roots = RootCertStore::empty();
        wanted.iter().for_each(|issuer| roots.add(issuer.der().clone()).unwrap());
        let verifier: Arc<dyn rustls::server::danger::ClientCertVerifier> = if wanted.is_empty() {
            Arc::new(NoClientAuth)
        } else {
            WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider))
                .build()
                .unwrap()
        };
        let server =
            ServerConfig::builder_with_provider(provider).with_protocol_versions(&[version]).unwrap();
        let private = PrivateKeyDer::Pkcs8(key.serialize_der().into());
        let chain = vec![shown.der().clone(), own.der().clone()];
        let server = server.with_client_cert_verifier(verifier).with_single_cert(chain, private).unwrap();
        let (ours, theirs) = tokio::io::duplex(64 * 1024);
        let ours = Mutex::new(Some(ours));
        let dial = move |_: &Endpoint| {
            let ours = ours.lock().unwrap().take().unwrap();
            async move { Ok(Box::new(ours) as keyward_base::io::ByteStream) }.boxed()
        };
        let connector = Connector::over(Arc::new(dial), None, Duration::from_secs(60));
        let accepting = tokio_rustls::TlsAcceptor::from(Arc::new(server)).accept(theirs).map(drop);
        let look = async move { record_handshake(&connector, &endpoint()).await.unwrap() };
        (tokio::join!(look, accepting).0, shown.der().clone())
    }

    fn subject(issuer: &CertifiedIssuer<'static, KeyPair>) -> Vec<u8> {
        X509Certificate::from_der(issuer.der()).unwrap().1.subject().as_raw().to_vec()
    }

    fn endpoint() -> Endpoint {
        Endpoint { scheme: Scheme::Https, host: "m1".into(), port: 2380 }
    }

    #[tokio::test]
    async fn what_a_member_shows_and_wants_is_seen_without_a_certificate() {
        let (own, one, two) = (authority("own"), authority("one"), authority("two"));
        for version in [&TLS12, &TLS13] {
            let (sight, shown) = looked(&own, &[&one, &two], version).await;
            assert_eq!(sight.certificates, [shown, own.der().clone()]);
            assert_eq!(sight.client_auth, PeerClientAuth::CertificateBy(vec![subject(&one), subject(&two)]));

            let (sight, shown) = looked(&own, &[], version).await;
            assert_eq!((&sight.certificates[0], &sight.client_auth), (&shown, &PeerClientAuth::Nothing));
        }
    }

    #[tokio::test]
    async fn where_no_tls_is_spoken_nothing_was_seen() {
        let deaf = |_: &Endpoint| {
            let (ours, _) = tokio::io::duplex(64);
            async move { Ok(Box::new(ours) as keyward_base::io::ByteStream) }.boxed()
        };
        let connector = Connector::over(Arc::new(deaf), None, Duration::from_secs(60));
        assert!(record_handshake(&connector, &endpoint()).await.is_err());
    }
}
