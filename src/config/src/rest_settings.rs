//! The resolved `[rest]`, and a listener's part of it: the HTTP/JSON face of the listeners.
//!
//! Owns: the settings. Must not know: requests, the version of the cluster.

use std::sync::Arc;

use super::OwnHosts;

/// The HTTP/JSON face of one listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListenerHttp {
    /// True if HTTP clients without gRPC are served: JSON, `/version`, `/health`.
    pub is_served: bool,
    /// True if `/metrics` is served to these clients.
    pub metrics_page: bool,
    /// The names in the Host header that are served.
    pub hosts: OwnHosts,
}

/// The settings of `[rest]`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RestSettings {
    /// The form of JSON and HTTP statuses; `None` for the form of the cluster's version.
    pub style: Option<JsonGateway>,
    /// The web origins that may read answers.
    pub cors: AllowedOrigins,
}

/// The form in which a release line's JSON gateway writes JSON and HTTP statuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JsonGateway {
    /// 3.4: grpc-gateway 1.9.
    Etcd34,
    /// 3.5: grpc-gateway 1.16.
    Etcd35,
    /// From 3.6 on: grpc-gateway 2.
    Etcd36,
}

/// Web origins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AllowedOrigins {
    /// Every origin.
    Any,
    /// These origins, as browsers send them.
    Listed(Arc<[String]>),
}

impl Default for AllowedOrigins {
    fn default() -> Self {
        Self::Listed([].into())
    }
}
