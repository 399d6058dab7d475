//! The settings of a collector of OTLP over HTTP.
//!
//! Must not know: the data sent to the collector.

use http::HeaderName;

use crate::{ClientTls, Endpoint};
use keyward_base::secret::Secret;

/// A collector that takes OTLP over HTTP.
#[derive(Clone, Debug, PartialEq)]
pub struct CollectorSettings {
    /// The collector's address.
    pub endpoint: Endpoint,
    /// TLS towards the collector; `None` for an `http` address.
    pub tls: Option<ClientTls>,
    /// Further headers of each request, such as `authorization`.
    pub headers: Vec<(HeaderName, Secret<String>)>,
}
