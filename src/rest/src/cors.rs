//! Access for web pages (CORS), as by etcd's `--cors`, and requests of pages without access.
//!
//! Owns: the decision for an origin, and the header fields that tell the decision. Must not know: paths,
//! callers.
//! Invariant: no origin is allowed unless listed; the fields never allow credentials of the browser. A
//! browser hides an answer from a page without access, and neither the effect of the request nor a WebSocket:
//! such a request is refused.

use http::HeaderMap;
use http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN, HOST,
    HeaderName, HeaderValue, ORIGIN, VARY,
};
use http::uri::{Authority, Uri};

use keyward_config::AllowedOrigins;

const FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");
const ANY: HeaderValue = HeaderValue::from_static("*");
const METHODS: HeaderValue = HeaderValue::from_static("POST, GET, OPTIONS, PUT, DELETE");
const HEADERS: HeaderValue = HeaderValue::from_static("accept, content-type, authorization");

/// The origin that may read the answer to a request with `headers`; `None` if none may.
pub(super) fn allowed_origin(origins: &AllowedOrigins, headers: &HeaderMap) -> Option<HeaderValue> {
    match origins {
        AllowedOrigins::Any => Some(ANY),
        AllowedOrigins::Listed(listed) => {
            let origin = headers.get(ORIGIN)?;
            listed.iter().any(|allowed| allowed.as_bytes() == origin.as_bytes()).then(|| origin.clone())
        }
    }
}

/// True if the request comes from a page of another site without access: by its origin, which every browser
/// tells with a POST and with a WebSocket, or by the browser's own word.
pub(super) fn is_of_foreign_page(origins: &AllowedOrigins, headers: &HeaderMap, uri: &Uri) -> bool {
    let AllowedOrigins::Listed(listed) = origins else { return false };
    let Some(origin) = headers.get(ORIGIN) else {
        return headers.get(&FETCH_SITE).is_some_and(|site| site == "cross-site");
    };
    if listed.iter().any(|allowed| allowed.as_bytes() == origin.as_bytes()) {
        return false;
    }
    let own = origin.to_str().ok().and_then(|origin| origin.parse::<Uri>().ok());
    !own.zip(host(headers, uri)).is_some_and(|(origin, host)| is_of_host(&origin, &host))
}

/// The host that a request is for: of the URI, as over HTTP/2, else of the Host header.
pub(super) fn host(headers: &HeaderMap, uri: &Uri) -> Option<Authority> {
    let told = || headers.get(HOST)?.to_str().ok()?.parse().ok();
    uri.authority().cloned().or_else(told)
}

/// True if the origin is that of a page of this host. A port that the scheme implies is left out by some.
fn is_of_host(origin: &Uri, host: &Authority) -> bool {
    let implied = match origin.scheme_str() {
        Some("http") => 80,
        Some("https") => 443,
        _ => return false,
    };
    let Some(from) = origin.authority() else { return false };
    let port = |authority: &Authority| authority.port_u16().unwrap_or(implied);
    from.host().eq_ignore_ascii_case(host.host()) && port(from) == port(host)
}

/// Tells a browser that pages of `origin` may read the answer.
pub(super) fn allow(origin: Option<HeaderValue>, headers: &mut HeaderMap) {
    let Some(origin) = origin else { return };
    if origin != ANY {
        headers.append(VARY, HeaderValue::from_static("Origin"));
    }
    headers.insert(ACCESS_CONTROL_ALLOW_HEADERS, HEADERS);
    headers.insert(ACCESS_CONTROL_ALLOW_METHODS, METHODS);
    headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allowed(origins: &AllowedOrigins, origin: Option<&'static str>) -> Option<String> {
        let headers = origin.map(|origin| (ORIGIN, HeaderValue::from_static(origin))).into_iter().collect();
        allowed_origin(origins, &headers).map(|value| value.to_str().unwrap().to_owned())
    }

    #[test]
    fn an_origin_is_allowed_only_if_it_is_listed_byte_for_byte() {
        let listed = AllowedOrigins::Listed(["https://a.example".to_owned()].into());
        assert_eq!(allowed(&listed, Some("https://a.example")).as_deref(), Some("https://a.example"));
        for other in ["https://a.example:443", "http://a.example", "https://b.a.example", "null", "*"] {
            assert_eq!(allowed(&listed, Some(other)), None, "{other}");
        }
        assert_eq!(allowed(&listed, None), None);
        assert_eq!(allowed(&AllowedOrigins::default(), Some("https://a.example")), None);
        assert_eq!(allowed(&AllowedOrigins::Any, None).as_deref(), Some("*"));
    }

    #[test]
    fn a_foreign_page_is_told_by_its_origin_or_by_the_browser() {
        let listed = AllowedOrigins::Listed(["https://ui.example".to_owned()].into());
        let is_foreign = |origins: &AllowedOrigins, fields: &[(HeaderName, &'static str)]| {
            let field =
                |(name, value): &(HeaderName, &'static str)| (name.clone(), HeaderValue::from_static(value));
            let headers = fields.iter().map(field).collect();
            is_of_foreign_page(origins, &headers, &Uri::from_static("/v3/kv/range"))
        };
        for (host, origin, expected) in [
            ("etcd.example:2379", "http://etcd.example:2379", false),
            ("etcd.example:2379", "http://ETCD.example:2379", false),
            ("etcd.example", "https://etcd.example", false),
            ("etcd.example:443", "https://etcd.example", false),
            ("etcd.example", "https://ui.example", false),
            ("etcd.example:2379", "http://etcd.example", true),
            ("etcd.example:2379", "http://etcd.example:2380", true),
            ("etcd.example", "http://ui.example", true),
            ("etcd.example", "http://evil.example", true),
            ("etcd.example", "null", true),
            ("etcd.example", "ftp://etcd.example", true),
            ("etcd.example", "http://etcd.example.evil.example", true),
        ] {
            let fields = [(HOST, host), (ORIGIN, origin)];
            assert_eq!(is_foreign(&listed, &fields), expected, "{origin} at {host}");
            assert!(!is_foreign(&AllowedOrigins::Any, &fields));
        }
        assert!(!is_foreign(&listed, &[]), "no browser");
        assert!(is_foreign(&listed, &[(FETCH_SITE, "cross-site")]));
        assert!(!is_foreign(&listed, &[(FETCH_SITE, "same-origin")]));
        // Over HTTP/2 the host is in the URI.
        let headers = [(ORIGIN, HeaderValue::from_static("https://etcd.example"))].into_iter().collect();
        assert!(!is_of_foreign_page(&listed, &headers, &Uri::from_static("https://etcd.example/v3/watch")));
    }
}
