//! Dialling: from a member's address to a connected byte stream, TLS included.
//!
//! Owns: dialling, TLS to members, the time limit on both. Must not know: HTTP, members' health, credentials.
//! Invariants: an `https` endpoint is never spoken to in the clear, and its certificate is verified for the
//! requested host, whatever the address. Without a given address the name is resolved at every connect, and a
//! dead address does not use up the time of the remaining addresses, however many there are. Replaced TLS
//! settings apply to all clones from the next connect on. [`Dial`] is the upstream seam of the tests.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwap;
use futures_util::StreamExt as _;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use rustls::ClientConfig;
use rustls::pki_types::{CertificateDer, ServerName};
use tokio::time::sleep;

use crate::member_tls;
use crate::names::NameResolver;
use keyward_base::io::ByteStream;
use keyward_base::io::tcp_connect::connect_tcp;
use keyward_config::trust::with_refusal;
use keyward_config::{Endpoint, Scheme};

/// Opens the byte stream under TLS: over TCP in production, over an in-process pipe in tests.
pub type Dial = Arc<dyn Fn(&Endpoint) -> BoxFuture<'static, io::Result<ByteStream>> + Send + Sync>;

/// Time without a connection after which the next address of a name is tried, too (RFC 8305, 5: 250 ms).
const NEXT_ADDRESS: Duration = Duration::from_millis(250);

/// Why a connection failed. In every case, no request was sent.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ConnectError {
    /// Name resolution or TCP failed.
    #[error("cannot connect to {endpoint}: {reason}")]
    Failed {
        /// The endpoint.
        endpoint: Endpoint,
        /// The message of the system or the TLS library.
        reason: Arc<str>,
    },
    /// The TLS handshake failed: Keyward or the member rejects the certificate or parameters of the peer.
    #[error("no TLS with {endpoint}: {reason}")]
    Handshake {
        /// The endpoint.
        endpoint: Endpoint,
        /// The message of the TLS library.
        reason: Arc<str>,
    },
    /// The member refused the client certificate shown, by an alert of TLS.
    #[error("no TLS with {endpoint}: the certificate is not accepted: {reason}")]
    NotAccepted {
        /// The endpoint.
        endpoint: Endpoint,
        /// The alert.
        reason: Arc<str>,
    },
    /// No client certificate to show; no member is at fault.
    #[error("no certificate to show: {0}")]
    NoCertificate(Arc<str>),
    /// The connect took longer than `cluster.connect_timeout`.
    #[error("no connection to {endpoint} within {limit:?}")]
    TimedOut {
        /// The endpoint.
        endpoint: Endpoint,
        /// The exceeded limit.
        limit: Duration,
    },
    /// The address took the connection, and no TLS handshake followed in time: the member's process hangs.
    /// The operating system takes connections for a process that is stopped.
    #[error("TCP connects to {endpoint}, and TLS is not answered within {limit:?}: its process hangs")]
    HandshakeTimedOut {
        /// The endpoint.
        endpoint: Endpoint,
        /// The exceeded limit, which counts from the begin of the connect.
        limit: Duration,
    },
    /// `limits.certificate_connections` connections are open, and all are in use.
    #[error("limits.certificate_connections are in use")]
    NoRoom,
}

/// Connects to members. Cheap to clone.
#[derive(Clone)]
pub struct Connector {
    dial: Dial,
    names: NameResolver,
    tls: Option<Tls>,
    limit: Duration,
}

/// The TLS settings in force, for HTTP/2 or HTTP/1.1.
#[derive(Clone)]
struct Tls {
    current: Arc<ArcSwap<ClientConfig>>,
    http1: bool,
    /// The last certificate shown by each endpoint, for the doctor.
    shown: Arc<Mutex<ShownCertificates>>,
}

/// The certificates of members by `host:port`. The accepted ones only, so the number follows the member list.
type ShownCertificates = BTreeMap<String, CertificateDer<'static>>;

/// Maximum number of endpoints whose certificates are kept.
const MAX_SHOWN: usize = 64;

impl Tls {
    fn new(config: Arc<ClientConfig>) -> Self {
        Self { current: Arc::new(ArcSwap::new(config)), http1: false, shown: Arc::default() }
    }

    fn keep_shown(&self, endpoint: &Endpoint, certificate: &CertificateDer<'_>) {
        let name = format!("{}:{}", endpoint.host, endpoint.port);
        let mut shown = self.shown.lock().unwrap_or_else(PoisonError::into_inner);
        if shown.len() < MAX_SHOWN || shown.contains_key(&name) {
            shown.insert(name, certificate.clone().into_owned());
        }
    }

    fn config(&self) -> Arc<ClientConfig> {
        let config = self.current.load_full();
        if !self.http1 {
            return config;
        }
        let mut config = ClientConfig::clone(&config);
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Arc::new(config)
    }
}

impl Connector {
    /// Creates a connector over TCP. `tls` applies to `https` endpoints; `limit` bounds resolving, dialling
    /// and handshake.
    #[must_use]
    pub fn tcp(tls: Option<Arc<ClientConfig>>, limit: Duration) -> Self {
        Self::resolving(NameResolver::of_machine(None), tls, limit)
    }

    /// As [`Connector::tcp`], with names resolved by `names`.
    #[must_use]
    pub fn resolving(names: NameResolver, tls: Option<Arc<ClientConfig>>, limit: Duration) -> Self {
        let asked = names.clone();
        let dial: Dial = Arc::new(move |endpoint| Box::pin(dial_tcp(endpoint.clone(), asked.clone())));
        Self { names, ..Self::over(dial, tls, limit) }
    }

    /// Creates a connector over any byte stream; the dialler resolves names.
    #[must_use]
    pub fn over(dial: Dial, tls: Option<Arc<ClientConfig>>, limit: Duration) -> Self {
        Self { dial, names: NameResolver::of_dialler(), tls: tls.map(Tls::new), limit }
    }

    /// Returns the resolver of names.
    #[must_use]
    pub fn names(&self) -> &NameResolver {
        &self.names
    }

    /// Replaces the TLS settings of the connector, its clones, and connectors made by [`Self::http1`]. A
    /// connector without TLS settings stays without.
    pub fn replace_tls(&self, tls: Arc<ClientConfig>) {
        if let Some(current) = &self.tls {
            current.current.store(tls);
        }
    }

    /// The certificate last shown by each member, by `host:port`.
    #[must_use]
    pub fn shown_certificates(&self) -> Vec<(String, CertificateDer<'static>)> {
        let Some(tls) = &self.tls else { return Vec::new() };
        let shown = tls.shown.lock().unwrap_or_else(PoisonError::into_inner);
        shown.iter().map(|(name, certificate)| (name.clone(), certificate.clone())).collect()
    }

    /// Returns a connector with different TLS settings for `https` endpoints, for example a different client
    /// certificate.
    #[must_use]
    pub fn showing(&self, tls: Arc<ClientConfig>) -> Self {
        Self { tls: Some(Tls::new(tls)), ..self.clone() }
    }

    /// The TLS settings in force, if any.
    pub(super) fn current_tls(&self) -> Option<Arc<ClientConfig>> {
        self.tls.as_ref().map(Tls::config)
    }

    /// Returns a connector for the HTTP/1.1 pages of members; only the protocol offered by TLS (ALPN)
    /// differs.
    #[must_use]
    pub fn http1(&self) -> Self {
        let tls = self.tls.as_ref().map(|tls| Tls { http1: true, ..tls.clone() });
        Self { tls, ..self.clone() }
    }

    /// Connects, with the TLS handshake for an `https` endpoint. Cancel-safe: a dropped attempt leaves no
    /// connection behind.
    ///
    /// # Errors
    /// [`ConnectError`]; no request was sent to the member.
    pub async fn connect(&self, endpoint: &Endpoint) -> Result<ByteStream, ConnectError> {
        self.connect_at(endpoint, None).await
    }

    /// As [`Self::connect`], at the given address of the endpoint's name; no further address is tried.
    ///
    /// # Errors
    /// [`ConnectError`]; no request was sent to the member.
    pub async fn connect_at(
        &self,
        endpoint: &Endpoint,
        at: Option<IpAddr>,
    ) -> Result<ByteStream, ConnectError> {
        let has_connected = AtomicBool::new(false);
        let opening = self.open(endpoint, at, &has_connected);
        let Ok(opened) = tokio::time::timeout(self.limit, opening).await else {
            let (endpoint, limit) = (endpoint.clone(), self.limit);
            return Err(match has_connected.into_inner() {
                true => ConnectError::HandshakeTimedOut { endpoint, limit },
                false => ConnectError::TimedOut { endpoint, limit },
            });
        };
        opened
    }

    /// Connects without a time limit. `has_connected` tells how far a connect came that is given up.
    async fn open(
        &self,
        endpoint: &Endpoint,
        at: Option<IpAddr>,
        has_connected: &AtomicBool,
    ) -> Result<ByteStream, ConnectError> {
        let failed = |error: io::Error| ConnectError::Failed {
            endpoint: endpoint.clone(),
            reason: error.to_string().into(),
        };
        let dialled = match at {
            None => (self.dial)(endpoint),
            Some(at) => (self.dial)(&Endpoint { host: at.to_string(), ..endpoint.clone() }),
        };
        let stream = dialled.await.map_err(failed)?;
        has_connected.store(true, Ordering::Relaxed);
        if endpoint.scheme == Scheme::Http {
            return Ok(stream);
        }
        let Some(tls) = &self.tls else {
            let reason = "no TLS is configured for https endpoints";
            return Err(failed(io::Error::new(io::ErrorKind::Unsupported, reason)));
        };
        let name = ServerName::try_from(endpoint.host.to_string())
            .map_err(|error| failed(io::Error::new(io::ErrorKind::InvalidInput, error)))?;
        let shaken = with_refusal(tokio_rustls::TlsConnector::from(tls.config()).connect(name, stream)).await;
        let stream = shaken.map_err(|(error, refused)| match member_tls::certificate_alert(&error) {
            Some(reason) => ConnectError::NotAccepted { endpoint: endpoint.clone(), reason },
            None => ConnectError::Handshake {
                endpoint: endpoint.clone(),
                reason: member_tls::describe_handshake_failure(&error, refused.as_ref()).into(),
            },
        })?;
        if let Some(certificate) = stream.get_ref().1.peer_certificates().and_then(<[_]>::first) {
            tls.keep_shown(endpoint, certificate);
        }
        Ok(Box::new(stream))
    }
}

/// Connects to the first address of the endpoint's name that answers. Each address has all of the caller's
/// time: a silent one delays the next by [`NEXT_ADDRESS`] only.
async fn dial_tcp(endpoint: Endpoint, names: NameResolver) -> io::Result<ByteStream> {
    let addresses = names.addresses(&endpoint.host).await.map_err(io::Error::other)?.all;
    let mut later = addresses.into_iter().map(|address| SocketAddr::new(address, endpoint.port));
    let mut failure = io::Error::from(io::ErrorKind::NotFound);
    let mut connecting: FuturesUnordered<_> = later.next().into_iter().map(connect_tcp).collect();
    while !connecting.is_empty() {
        tokio::select! {
            biased; // A connection before a further address.
            Some(connected) = connecting.next() => match connected {
                Ok(stream) => {
                    stream.set_nodelay(true)?;
                    return Ok(Box::new(stream));
                }
                Err(error) => {
                    failure = error;
                    connecting.extend(later.next().map(connect_tcp));
                }
            },
            () = sleep(NEXT_ADDRESS), if later.len() > 0 => connecting.extend(later.next().map(connect_tcp)),
        }
    }
    Err(failure)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_process_that_takes_no_handshake_hangs_and_one_without_tcp_does_not() {
        let tls = || {
            let config = ClientConfig::builder().with_root_certificates(rustls::RootCertStore::empty());
            Some(Arc::new(config.with_no_client_auth()))
        };
        let endpoint = Endpoint { scheme: Scheme::Https, host: "m1".into(), port: 2379 };
        let limit = Duration::from_secs(2);
        let deaf: Dial = Arc::new(|_| {
            Box::pin(async {
                let (ours, theirs) = tokio::io::duplex(1 << 16);
                std::mem::forget(theirs);
                Ok(Box::new(ours) as ByteStream)
            })
        });
        let hung = Connector::over(deaf, tls(), limit).connect(&endpoint).await.err();
        assert!(matches!(hung, Some(ConnectError::HandshakeTimedOut { .. })), "{hung:?}");
        assert!(hung.is_some_and(|error| error.to_string().contains("TCP connects to https://m1:2379")));
        let silent: Dial = Arc::new(|_| Box::pin(std::future::pending()));
        let silent = Connector::over(silent, tls(), limit).connect(&endpoint).await.err();
        assert!(matches!(silent, Some(ConnectError::TimedOut { .. })), "{silent:?}");
    }
}
