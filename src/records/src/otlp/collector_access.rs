//! What a collector is shown, and who is believed to be the collector: replaced while running.
//!
//! Owns: the TLS settings and the headers of requests, made of the configuration. Must not know: requests,
//! connections, the triggers of a replacement. Invariants: the settings are replaced whole, and only by ones
//! that can be used; the headers of the configuration stand in no log and no error.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use http::HeaderValue;
use http::header::{CONTENT_TYPE, HOST, HeaderMap, USER_AGENT};

use keyward_base::published::Published;
use keyward_config::Endpoint;
use keyward_config::collector_settings::CollectorSettings;
use keyward_dial::connect::Connector;
use keyward_dial::member_tls;
use keyward_dial::names::NameResolver;

/// Time limit for resolving, connecting and the handshake.
const CONNECTING: Duration = Duration::from_secs(5);

/// The address of a collector, the way to connect to the collector, and the headers of each request.
pub struct CollectorAccess {
    /// The address.
    pub(super) endpoint: Endpoint,
    /// The headers of each request, the configured ones among them.
    pub(super) headers: HeaderMap,
    /// Opens connections.
    pub(super) connector: Connector,
}

/// The access in force. Each request is made by the newest one.
pub type CurrentCollectorAccess = Arc<Published<CollectorAccess>>;

impl CollectorAccess {
    /// The access to a collector. `names` resolves the collector's name.
    ///
    /// # Errors
    /// The TLS settings or the headers cannot be used.
    pub fn new(settings: &CollectorSettings, names: &NameResolver) -> io::Result<Self> {
        let tls = settings.tls.as_ref().map(member_tls::client_config).transpose();
        let tls = tls.map_err(io::Error::other)?;
        let mut headers = HeaderMap::new();
        for (name, value) in &settings.headers {
            let mut value = HeaderValue::from_str(value.expose()).map_err(io::Error::other)?;
            value.set_sensitive(true);
            headers.append(name, value);
        }
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/x-protobuf"));
        headers.insert(HOST, settings.endpoint.authority().parse().map_err(io::Error::other)?);
        let agent = concat!("keyward/", env!("CARGO_PKG_VERSION"));
        headers.insert(USER_AGENT, HeaderValue::from_static(agent));
        let connector = Connector::resolving(names.clone(), tls, CONNECTING).http1();
        Ok(Self { endpoint: settings.endpoint.clone(), headers, connector })
    }

    /// The access by other settings, with the same resolver of names.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn by(&self, settings: &CollectorSettings) -> io::Result<Self> {
        Self::new(settings, self.connector.names())
    }

    /// The access in force, from now on.
    #[must_use]
    pub fn in_force(self) -> CurrentCollectorAccess {
        Arc::new(Published::new(self))
    }
}
