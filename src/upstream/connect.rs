//! From a member's address to a connected byte stream, TLS included.
//!
//! Owns: dialling, TLS to members, the time that both may take. Must not know: HTTP, members' health, credentials.
//! Invariants: an `https` endpoint is never spoken to in the clear, and its certificate is verified for the host
//! that was asked for, whatever address that was reached by. Where no address is given the name is resolved at every connect,
//! and one dead address does not use up the time of the others. TLS that is replaced is that of all clones, from the next
//! connect on. [`Dial`] is the upstream seam of the tests.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use futures_util::future::BoxFuture;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;

use crate::config::{Endpoint, Scheme};
use crate::io::Stream;
use crate::upstream::names::Names;
use crate::upstream::tls;

/// Opens the byte stream under TLS. The real one is TCP; tests give an in-process pipe.
pub type Dial = Arc<dyn Fn(&Endpoint) -> BoxFuture<'static, io::Result<Stream>> + Send + Sync>;

/// Why there is no connection. Nothing was sent in any of these cases.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ConnectError {
    /// Name resolution or TCP failed.
    #[error("cannot connect to {endpoint}: {reason}")]
    Failed {
        /// Which endpoint.
        endpoint: Endpoint,
        /// The system's or TLS library's words.
        reason: Arc<str>,
    },
    /// The TLS handshake failed: one of the two does not take what the other shows.
    #[error("no TLS with {endpoint}: {reason}")]
    Handshake {
        /// Which endpoint.
        endpoint: Endpoint,
        /// The TLS library's words.
        reason: Arc<str>,
    },
    /// There is no certificate to show: no member has anything to do with it.
    #[error("no certificate to show: {0}")]
    NoCertificate(Arc<str>),
    /// It took longer than `cluster.connect_timeout`.
    #[error("no connection to {endpoint} within {limit:?}")]
    TimedOut {
        /// Which endpoint.
        endpoint: Endpoint,
        /// The limit that passed.
        limit: Duration,
    },
    /// `limits.certificate_connections` are open, and all are in use.
    #[error("limits.certificate_connections are in use")]
    NoRoom,
}

/// Connects to members. Cheap to clone.
#[derive(Clone)]
pub struct Connector {
    dial: Dial,
    names: Names,
    tls: Option<Tls>,
    limit: Duration,
}

/// TLS as it is now, for whichever HTTP.
#[derive(Clone)]
struct Tls {
    current: Arc<ArcSwap<ClientConfig>>,
    http1: bool,
}

impl Tls {
    fn new(config: Arc<ClientConfig>) -> Self {
        Self { current: Arc::new(ArcSwap::new(config)), http1: false }
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
    /// A connector over TCP. `tls` serves the `https` endpoints, `limit` bounds resolving, dialling and handshake.
    #[must_use]
    pub fn tcp(tls: Option<Arc<ClientConfig>>, limit: Duration) -> Self {
        Self::resolving(Names::System, tls, limit)
    }

    /// The same where names mean what `names` say.
    #[must_use]
    pub fn resolving(names: Names, tls: Option<Arc<ClientConfig>>, limit: Duration) -> Self {
        let asked = names.clone();
        let dial: Dial = Arc::new(move |endpoint| Box::pin(dial_tcp(endpoint.clone(), asked.clone(), limit)));
        Self { names, ..Self::over(dial, tls, limit) }
    }

    /// A connector over any byte stream. What a name means is the dialler's.
    #[must_use]
    pub fn over(dial: Dial, tls: Option<Arc<ClientConfig>>, limit: Duration) -> Self {
        Self { dial, names: Names::Dialler, tls: tls.map(Tls::new), limit }
    }

    /// What names mean.
    #[must_use]
    pub fn names(&self) -> &Names {
        &self.names
    }

    /// From now on, other TLS: for this one, all its clones, and what [`Self::http1`] made of them. Where there was none
    /// there is none.
    pub fn replace_tls(&self, tls: Arc<ClientConfig>) {
        if let Some(current) = &self.tls {
            current.current.store(tls);
        }
    }

    /// The same, with other TLS towards `https` endpoints: other certificates, perhaps.
    #[must_use]
    pub fn showing(&self, tls: Arc<ClientConfig>) -> Self {
        Self { tls: Some(Tls::new(tls)), ..self.clone() }
    }

    /// The same, for the pages that members serve by HTTP/1.1: only what TLS offers (ALPN) differs.
    #[must_use]
    pub fn http1(&self) -> Self {
        let tls = self.tls.as_ref().map(|tls| Tls { http1: true, ..tls.clone() });
        Self { tls, ..self.clone() }
    }

    /// Connects, with the TLS handshake where the endpoint is `https`. Cancel-safe: a dropped attempt leaves nothing.
    ///
    /// # Errors
    /// [`ConnectError`]; nothing was sent to the member.
    pub async fn connect(&self, endpoint: &Endpoint) -> Result<Stream, ConnectError> {
        self.connect_at(endpoint, None).await
    }

    /// The same at this address of the endpoint's name, where one is given: no other answers there for it.
    ///
    /// # Errors
    /// [`ConnectError`]; nothing was sent to the member.
    pub async fn connect_at(&self, endpoint: &Endpoint, at: Option<IpAddr>) -> Result<Stream, ConnectError> {
        match tokio::time::timeout(self.limit, self.open(endpoint, at)).await {
            Ok(opened) => opened,
            Err(_) => Err(ConnectError::TimedOut { endpoint: endpoint.clone(), limit: self.limit }),
        }
    }

    async fn open(&self, endpoint: &Endpoint, at: Option<IpAddr>) -> Result<Stream, ConnectError> {
        let failed = |error: io::Error| ConnectError::Failed {
            endpoint: endpoint.clone(),
            reason: error.to_string().into(),
        };
        let dialled = match at {
            None => (self.dial)(endpoint),
            Some(at) => (self.dial)(&Endpoint { host: at.to_string(), ..endpoint.clone() }),
        };
        let stream = dialled.await.map_err(failed)?;
        if endpoint.scheme == Scheme::Http {
            return Ok(stream);
        }
        let Some(tls) = &self.tls else {
            let reason = "no TLS is configured for https endpoints";
            return Err(failed(io::Error::new(io::ErrorKind::Unsupported, reason)));
        };
        let name = ServerName::try_from(endpoint.host.to_string())
            .map_err(|error| failed(io::Error::new(io::ErrorKind::InvalidInput, error)))?;
        let shaken = tokio_rustls::TlsConnector::from(tls.config()).connect(name, stream).await;
        let stream = shaken.map_err(|error| ConnectError::Handshake {
            endpoint: endpoint.clone(),
            reason: tls::why_no_handshake(&error).into(),
        })?;
        Ok(Box::new(stream))
    }
}

async fn dial_tcp(endpoint: Endpoint, names: Names, limit: Duration) -> io::Result<Stream> {
    let addresses = match endpoint.host.parse::<IpAddr>() {
        Ok(address) => vec![address],
        Err(_) => names.addresses(&endpoint.host).await.map_err(io::Error::other)?.all,
    };
    // One that swallows everything leaves the others their share of the time.
    let share = limit / u32::try_from(addresses.len().max(1)).unwrap_or(u32::MAX);
    let mut failure = io::Error::from(io::ErrorKind::NotFound);
    for address in addresses {
        let connecting = TcpStream::connect(SocketAddr::new(address, endpoint.port));
        match tokio::time::timeout(share, connecting).await {
            Ok(Ok(stream)) => {
                stream.set_nodelay(true)?;
                return Ok(Box::new(stream));
            }
            Ok(Err(error)) => failure = error,
            Err(_) => failure = io::ErrorKind::TimedOut.into(),
        }
    }
    Err(failure)
}
