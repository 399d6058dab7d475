//! Resolves `[rest]`.
//!
//! Owns: the form of an origin. Must not know: listeners, requests.

use http::Uri;

use super::Resolver;
use crate::toml_rest::{TomlRest, TomlRestStyle};
use crate::{AllowedOrigins, JsonGateway, RestSettings};

/// The entry for every origin.
const ANY: &str = "*";

impl Resolver<'_> {
    /// Resolves `[rest]`.
    pub(super) fn rest(&mut self, row: TomlRest) -> RestSettings {
        let style = match row.style {
            None | Some(TomlRestStyle::Auto) => None,
            Some(TomlRestStyle::Etcd34) => Some(JsonGateway::Etcd34),
            Some(TomlRestStyle::Etcd35) => Some(JsonGateway::Etcd35),
            Some(TomlRestStyle::Etcd36) => Some(JsonGateway::Etcd36),
        };
        let origins = row.cors.unwrap_or_default();
        if origins.iter().any(|origin| origin == ANY) {
            if origins.len() > 1 {
                self.findings.fault("rest.cors", "\"*\" allows every origin; leave the others out");
            }
            return RestSettings { style, cors: AllowedOrigins::Any };
        }
        for (index, origin) in origins.iter().enumerate() {
            if !is_origin(origin) {
                let path = format!("rest.cors[{index}]");
                self.findings.fault(&path, "must be an origin, as https://ui.example.com, or \"*\"");
            }
        }
        RestSettings { style, cors: AllowedOrigins::Listed(origins.into()) }
    }
}

/// True for `scheme://host` or `scheme://host:port`, in lower case as browsers send origins.
fn is_origin(text: &str) -> bool {
    let Ok(uri) = text.parse::<Uri>() else { return false };
    let (Some(scheme), Some(authority)) = (uri.scheme_str(), uri.authority()) else { return false };
    text == format!("{scheme}://{authority}")
        && text == text.to_lowercase()
        && !authority.as_str().contains('@')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_origin_has_a_scheme_and_a_host_and_no_more() {
        for origin in ["https://ui.example.com", "http://localhost:8080", "http://[::1]:80"] {
            assert!(is_origin(origin), "{origin}");
        }
        for other in
            ["", "null", "ui.example.com", "https://", "https://a/", "https://A", "https://u@a", "a b"]
        {
            assert!(!is_origin(other), "{other}");
        }
    }
}
