//! The requests that the status page answers.
//!
//! Owns: the checks of Host, Origin and Sec-Fetch-Site. Must not know: the page. Invariants: a name that is
//! not listed is refused, so a web site cannot make its own name point at the admin address and read
//! (DNS rebinding); a request of another origin is refused, whatever it asks for.

use std::net::IpAddr;

use http::header::{HOST, HeaderName, ORIGIN};
use http::uri::Authority;
use http::{HeaderMap, Request, Uri};

const FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// The reason for refusing a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum PageRefusal {
    /// The Host header is missing, or names a host that is not this process's.
    #[error("the Host header is neither an IP address nor localhost nor in admin.hosts")]
    Host,
    /// The request comes from a page of another origin.
    #[error("the request comes from another origin")]
    Origin,
}

/// Checks that a request comes from this page, or from an address typed by a human.
pub(super) fn check_request<B>(request: &Request<B>, hosts: &[String]) -> Result<(), PageRefusal> {
    let headers = request.headers();
    let host = single(headers, &HOST).and_then(|host| host.parse::<Authority>().ok());
    let host = host.filter(|host| request.uri().authority().is_none() && is_own(host, hosts));
    let host = host.ok_or(PageRefusal::Host)?;
    let is_same = |origin: &str| {
        let origin = origin.parse::<Uri>().ok();
        origin.and_then(|origin| Some(origin.authority()? == &host)).unwrap_or(false)
    };
    if headers.contains_key(ORIGIN) && !single(headers, &ORIGIN).is_some_and(is_same) {
        return Err(PageRefusal::Origin);
    }
    // Another site may link to the document. A browser sends no Origin with a request for an image.
    let site = headers.get(FETCH_SITE).map(http::HeaderValue::as_bytes);
    let is_foreign = !matches!(site, None | Some(b"same-origin" | b"none"));
    if is_foreign && request.uri().path() != "/" {
        return Err(PageRefusal::Origin);
    }
    Ok(())
}

/// The value of a header that stands once in the request.
fn single<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    let mut values = headers.get_all(name).iter();
    let value = values.next()?.to_str().ok()?;
    values.next().is_none().then_some(value)
}

fn is_own(authority: &Authority, hosts: &[String]) -> bool {
    let host = authority.host();
    let address = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host);
    let is_known = host.eq_ignore_ascii_case("localhost")
        || address.parse::<IpAddr>().is_ok()
        || hosts.iter().any(|own| host.eq_ignore_ascii_case(own));
    is_known && !authority.as_str().contains('@')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(path: &str, headers: &[(&str, &str)]) -> Result<(), PageRefusal> {
        let mut request = Request::builder().uri(path);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        check_request(&request.body(()).unwrap(), &["ops.example.com".to_owned()])
    }

    #[test]
    fn only_addresses_and_listed_names_are_hosts() {
        for host in ["127.0.0.1:2389", "10.0.0.7", "[::1]:2389", "localhost:1", "Ops.Example.Com:2389"] {
            assert_eq!(checked("/", &[("host", host)]), Ok(()), "{host}");
        }
        for host in ["evil.example", "ops.example.com.evil.example", "127.0.0.1.nip.io", "a@127.0.0.1", ""] {
            assert_eq!(checked("/", &[("host", host)]), Err(PageRefusal::Host), "{host}");
        }
        assert_eq!(checked("/", &[]), Err(PageRefusal::Host));
        assert_eq!(checked("/", &[("host", "localhost"), ("host", "evil")]), Err(PageRefusal::Host));
        assert_eq!(checked("http://evil/", &[("host", "localhost")]), Err(PageRefusal::Host));
    }

    #[test]
    fn another_origin_is_refused() {
        let with = |name, value| checked("/page/events", &[("host", "127.0.0.1:2389"), (name, value)]);
        for (name, value) in [
            ("origin", "http://127.0.0.1:2389"),
            ("sec-fetch-site", "same-origin"),
            ("sec-fetch-site", "none"),
        ] {
            assert_eq!(with(name, value), Ok(()), "{value}");
        }
        for (name, value) in [
            ("origin", "http://127.0.0.1:2390"),
            ("origin", "http://evil.example"),
            ("origin", "null"),
            ("origin", ""),
            ("sec-fetch-site", "cross-site"),
            ("sec-fetch-site", "same-site"),
        ] {
            assert_eq!(with(name, value), Err(PageRefusal::Origin), "{value}");
        }
        assert_eq!(checked("/", &[("host", "localhost"), ("sec-fetch-site", "cross-site")]), Ok(()));
        assert_eq!(checked("/", &[("host", "localhost"), ("origin", "http://e")]), Err(PageRefusal::Origin));
    }
}
