//! What is to be seen at one peer URL without being a member: one TLS handshake that trusts nobody and proves nothing.
//!
//! Owns: that handshake. Must not know: whose address it is, what follows from it.
//! Invariants: nothing is sent over the connection; no certificate of ours is shown; whether the handshake ends well does
//! not matter, since the member has told what it accepts before it refuses us.

use std::sync::{Arc, Mutex, PoisonError};

use rustls::client::ResolvesClientCert;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{self, CryptoProvider};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::sign::CertifiedKey;
use rustls::{ClientConfig, DigitallySignedStruct, SignatureScheme};

use crate::config::Endpoint;
use crate::upstream::connect::{ConnectError, Connector};

/// What a member shows and wants at its peer URL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Sight {
    /// Its own certificate, and those that it sends along.
    pub(super) shown: Vec<CertificateDer<'static>>,
    /// What it wants of others.
    pub(super) wants: Wants,
}

/// What a member wants of who connects to its peer URL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Wants {
    /// Nothing: whoever reaches it is heard.
    Nothing,
    /// A certificate by one of the authorities of these names, in DER. None: it does not say by which.
    CertificateBy(Vec<Vec<u8>>),
}

/// Takes down what is to be seen.
#[derive(Debug)]
struct Eyes {
    provider: Arc<CryptoProvider>,
    seen: Mutex<Seen>,
}

#[derive(Debug, Default)]
struct Seen {
    shown: Vec<CertificateDer<'static>>,
    asked: Option<Vec<Vec<u8>>>,
}

/// Connects to `endpoint` and looks. Cancel-safe.
///
/// # Errors
/// There is no TLS to be had at the endpoint; nothing was seen.
pub(super) async fn look(connector: &Connector, endpoint: &Endpoint) -> Result<Sight, ConnectError> {
    let failed = |reason: String| ConnectError::Failed { endpoint: endpoint.clone(), reason: reason.into() };
    let provider = Arc::new(crypto::ring::default_provider());
    let eyes = Arc::new(Eyes { provider: Arc::clone(&provider), seen: Mutex::default() });
    let config =
        ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().map(|config| {
            let config = config.dangerous().with_custom_certificate_verifier(Arc::clone(&eyes) as _);
            config.with_client_cert_resolver(Arc::clone(&eyes) as _)
        });
    let config = config.map_err(|error| failed(error.to_string()))?;
    let connected = connector.showing(Arc::new(config)).connect(endpoint).await;
    let seen = std::mem::take(&mut *eyes.seen());
    match (seen.asked, connected) {
        (Some(names), _) => Ok(Sight { shown: seen.shown, wants: Wants::CertificateBy(names) }),
        (None, Ok(_)) => Ok(Sight { shown: seen.shown, wants: Wants::Nothing }),
        (None, Err(error)) => Err(error),
    }
}

impl Eyes {
    fn seen(&self) -> std::sync::MutexGuard<'_, Seen> {
        // Nothing under this lock can panic half-way.
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ServerCertVerifier for Eyes {
    /// Whoever it is: nothing is entrusted to it.
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

impl ResolvesClientCert for Eyes {
    fn resolve(
        &self,
        root_hint_subjects: &[&[u8]],
        _sigschemes: &[SignatureScheme],
    ) -> Option<Arc<CertifiedKey>> {
        self.seen().asked = Some(root_hint_subjects.iter().map(|name| name.to_vec()).collect());
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
    use crate::config::Scheme;

    fn authority(name: &str) -> CertifiedIssuer<'static, KeyPair> {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, name);
        CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
    }

    /// What is seen at a peer URL of a member that shows a certificate of `own` and wants one of `wanted`, where there are any.
    async fn looked(
        own: &CertifiedIssuer<'static, KeyPair>,
        wanted: &[&CertifiedIssuer<'static, KeyPair>],
        version: &'static SupportedProtocolVersion,
    ) -> (Sight, CertificateDer<'static>) {
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
            async move { Ok(Box::new(ours) as crate::io::Stream) }.boxed()
        };
        let connector = Connector::over(Arc::new(dial), None, Duration::from_secs(60));
        let accepting = tokio_rustls::TlsAcceptor::from(Arc::new(server)).accept(theirs).map(drop);
        let look = async move { look(&connector, &endpoint()).await.unwrap() };
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
            assert_eq!(sight.shown, [shown, own.der().clone()]);
            assert_eq!(sight.wants, Wants::CertificateBy(vec![subject(&one), subject(&two)]));

            let (sight, shown) = looked(&own, &[], version).await;
            assert_eq!((&sight.shown[0], &sight.wants), (&shown, &Wants::Nothing));
        }
    }

    #[tokio::test]
    async fn where_no_tls_is_spoken_nothing_was_seen() {
        let deaf = |_: &Endpoint| {
            let (ours, _) = tokio::io::duplex(64);
            async move { Ok(Box::new(ours) as crate::io::Stream) }.boxed()
        };
        let connector = Connector::over(Arc::new(deaf), None, Duration::from_secs(60));
        assert!(look(&connector, &endpoint()).await.is_err());
    }
}
