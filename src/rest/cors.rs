//! Access for web pages (CORS), as by etcd's `--cors`.
//!
//! Owns: the decision for an origin, and the header fields that tell the decision. Must not know: paths,
//! callers.
//! Invariant: no origin is allowed unless listed; the fields never allow credentials of the browser.

use http::HeaderMap;
use http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN, HeaderValue,
    ORIGIN, VARY,
};

use crate::config::AllowedOrigins;

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
}
