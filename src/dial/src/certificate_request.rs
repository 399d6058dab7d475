//! The request of a member for a client certificate. A member without the request takes no user from any
//! certificate.
//!
//! Owns: one TLS handshake with a member, made for the answer. Must not know: users, the consequences.
//! Invariants: no application data is sent; the member sees the certificate of `cluster.tls`, as on every
//! other connection of Keyward's own, and its certificate is verified in the same way.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustls::client::{ResolvesClientCert, Resumption};
use rustls::sign::CertifiedKey;
use rustls::{ClientConfig, SignatureScheme};

use super::connect::{ConnectError, Connector};
use keyward_config::{Endpoint, Scheme};

/// Notes that a certificate was asked for, and answers as `inner` does.
#[derive(Debug)]
struct RequestRecorder {
    inner: Arc<dyn ResolvesClientCert>,
    is_asked: AtomicBool,
}

impl ResolvesClientCert for RequestRecorder {
    fn resolve(
        &self,
        root_hint_subjects: &[&[u8]],
        sigschemes: &[SignatureScheme],
    ) -> Option<Arc<CertifiedKey>> {
        self.is_asked.store(true, Ordering::Relaxed);
        self.inner.resolve(root_hint_subjects, sigschemes)
    }

    fn has_certs(&self) -> bool {
        true
    }
}

/// True if the member asks for a client certificate. `None` without TLS. A member with `--trusted-ca-file`
/// alone asks for one too, and takes no user from the certificate. Cancel-safe.
///
/// # Errors
/// The connection or the handshake failed before the member asked.
pub async fn asks_for_certificate(
    connector: &Connector,
    endpoint: &Endpoint,
    at: Option<IpAddr>,
) -> Result<Option<bool>, ConnectError> {
    let Some(tls) = connector.current_tls().filter(|_| endpoint.scheme == Scheme::Https) else {
        return Ok(None);
    };
    let mut tls = ClientConfig::clone(&tls);
    let inner = Arc::clone(&tls.client_auth_cert_resolver);
    let recorder = Arc::new(RequestRecorder { inner, is_asked: AtomicBool::new(false) });
    tls.client_auth_cert_resolver = Arc::clone(&recorder) as _;
    // In a session that is resumed no server asks for a certificate again.
    tls.resumption = Resumption::disabled();
    let connected = connector.showing(Arc::new(tls)).connect_at(endpoint, at).await;
    match (recorder.is_asked.load(Ordering::Relaxed), connected) {
        (true, _) => Ok(Some(true)),
        (false, Ok(_)) => Ok(Some(false)),
        (false, Err(error)) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::time::Duration;

    use futures_util::FutureExt as _;
    use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
    use rustls::pki_types::PrivateKeyDer;
    use rustls::server::WebPkiClientVerifier;
    use rustls::{RootCertStore, ServerConfig};
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio_rustls::TlsAcceptor;

    use super::*;
    use crate::connect::Dial;
    use keyward_base::io::ByteStream;

    /// Runs `work` with a connector for one connection to a server, which writes a byte.
    async fn towards<T>(
        tls: &Arc<ClientConfig>,
        server: &Arc<ServerConfig>,
        work: impl AsyncFnOnce(Connector) -> T,
    ) -> T {
        let (ours, theirs) = tokio::io::duplex(64 * 1024);
        let ours = Mutex::new(Some(ours));
        let dial: Dial = Arc::new(move |_| {
            let ours = ours.lock().unwrap().take().unwrap();
            async move { Ok(Box::new(ours) as ByteStream) }.boxed()
        });
        let connector = Connector::over(dial, Some(Arc::clone(tls)), Duration::from_secs(60));
        let serving = async {
            if let Ok(mut stream) = TlsAcceptor::from(Arc::clone(server)).accept(theirs).await {
                drop(stream.write_all(b"x").await);
                drop(stream.flush().await);
            }
        };
        tokio::join!(work(connector), serving).0
    }

    #[tokio::test]
    async fn a_member_that_asks_for_no_certificate_is_told_also_after_a_session_that_could_be_resumed() {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let key = KeyPair::generate().unwrap();
        let leaf = CertificateParams::new(["m1".to_owned()]).unwrap().signed_by(&key, &authority).unwrap();
        let mut roots = RootCertStore::empty();
        roots.add(authority.der().clone()).unwrap();
        let roots = Arc::new(roots);
        let pair = || (vec![leaf.der().clone()], PrivateKeyDer::Pkcs8(key.serialize_der().into()));
        for asks in [false, true] {
            let tls = ClientConfig::builder().with_root_certificates(Arc::clone(&roots));
            let (chain, private) = pair();
            let tls = Arc::new(tls.with_client_auth_cert(chain, private).unwrap());
            let server = match asks {
                false => ServerConfig::builder().with_no_client_auth(),
                true => {
                    let verifier = WebPkiClientVerifier::builder(Arc::clone(&roots)).build().unwrap();
                    ServerConfig::builder().with_client_cert_verifier(verifier)
                }
            };
            let (chain, private) = pair();
            let server = Arc::new(server.with_single_cert(chain, private).unwrap());
            let endpoint = Endpoint { scheme: Scheme::Https, host: "m1".into(), port: 2379 };
            let read = towards(&tls, &server, async |connector| {
                let mut stream = connector.connect(&endpoint).await.unwrap();
                stream.read_u8().await.unwrap()
            });
            assert_eq!(read.await, b'x');
            for _ in 0..2 {
                let told = towards(&tls, &server, async |connector| {
                    asks_for_certificate(&connector, &endpoint, None).await.unwrap()
                });
                assert_eq!(told.await, Some(asks));
            }
            let plain = Endpoint { scheme: Scheme::Http, ..endpoint };
            let connector = Connector::tcp(Some(tls), Duration::from_secs(60));
            assert_eq!(asks_for_certificate(&connector, &plain, None).await.unwrap(), None);
        }
    }
}
