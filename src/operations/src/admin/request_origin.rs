//! The requests that the admin address answers.
//!
//! Owns: the checks of Host, Origin and Sec-Fetch-Site. Must not know: the answers. Invariants: a request for
//! a host that is not this process's is refused, but for the probes, which tell nothing of anybody; a request
//! of another origin for the page is refused, whatever it asks for.

use http::header::{HOST, HeaderName, ORIGIN};
use http::uri::Authority;
use http::{HeaderMap, Request, Uri};

use keyward_config::OwnHosts;

/// Paths that balancers ask for by any name.
const PROBES: [&str; 2] = ["/livez", "/readyz"];
const FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// The reason for refusing a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum RequestRefusal {
    /// The Host header is missing, or names a host that is not this process's.
    #[error("the Host header is neither an IP address nor localhost nor in admin.hosts or admin.replicas")]
    Host,
    /// The request comes from a page of another origin.
    #[error("the request comes from another origin")]
    Origin,
}

/// Checks that a request is for this process. Every browser names a host, and every scraper over HTTP/1.1.
pub(super) fn check_host<B>(request: &Request<B>, hosts: &OwnHosts) -> Result<(), RequestRefusal> {
    let is_without = request.uri().authority().is_none() && !request.headers().contains_key(HOST);
    if is_without || PROBES.contains(&request.uri().path()) {
        return Ok(());
    }
    own_host(request, hosts).map(drop).ok_or(RequestRefusal::Host)
}

/// The host of this process that a request is for.
fn own_host<B>(request: &Request<B>, hosts: &OwnHosts) -> Option<Authority> {
    let host = single(request.headers(), &HOST)?.parse::<Authority>().ok()?;
    (request.uri().authority().is_none() && hosts.include(Some(&host))).then_some(host)
}

/// Checks that a request comes from this page, or from an address typed by a human.
pub(super) fn check_page<B>(request: &Request<B>, hosts: &OwnHosts) -> Result<(), RequestRefusal> {
    let headers = request.headers();
    let host = own_host(request, hosts).ok_or(RequestRefusal::Host)?;
    let is_same = |origin: &str| {
        let origin = origin.parse::<Uri>().ok();
        origin.and_then(|origin| Some(origin.authority()? == &host)).unwrap_or(false)
    };
    if headers.contains_key(ORIGIN) && !single(headers, &ORIGIN).is_some_and(is_same) {
        return Err(RequestRefusal::Origin);
    }
    // Another site may link to the document. A browser sends no Origin with a request for an image.
    let site = headers.get(FETCH_SITE).map(http::HeaderValue::as_bytes);
    let is_foreign = !matches!(site, None | Some(b"same-origin" | b"none"));
    if is_foreign && request.uri().path() != "/" {
        return Err(RequestRefusal::Origin);
    }
    Ok(())
}

/// The value of a header that stands once in the request.
fn single<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    let mut values = headers.get_all(name).iter();
    let value = values.next()?.to_str().ok()?;
    values.next().is_none().then_some(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(path: &str, headers: &[(&str, &str)]) -> Result<(), RequestRefusal> {
        let mut request = Request::builder().uri(path);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        check_page(&request.body(()).unwrap(), &OwnHosts::Listed(["ops.example.com".to_owned()].into()))
    }

    #[test]
    fn the_page_is_for_one_own_host() {
        for host in ["127.0.0.1:2389", "Ops.Example.Com:2389"] {
            assert_eq!(checked("/", &[("host", host)]), Ok(()), "{host}");
        }
        for host in ["evil.example", ""] {
            assert_eq!(checked("/", &[("host", host)]), Err(RequestRefusal::Host), "{host}");
        }
        assert_eq!(checked("/", &[]), Err(RequestRefusal::Host));
        assert_eq!(checked("/", &[("host", "localhost"), ("host", "evil")]), Err(RequestRefusal::Host));
        assert_eq!(checked("http://evil/", &[("host", "localhost")]), Err(RequestRefusal::Host));
    }

    #[test]
    fn all_but_probes_are_for_an_own_host() {
        let asked = |uri: &str, host: Option<&str>| {
            let mut request = Request::builder().uri(uri);
            if let Some(host) = host {
                request = request.header(HOST, host);
            }
            check_host(&request.body(()).unwrap(), &OwnHosts::default())
        };
        for path in ["/metrics", "/replica", "/", "/page/events", "/nowhere"] {
            assert_eq!(asked(path, Some("10.0.0.7:2389")), Ok(()), "{path}");
            // HTTP/1.0.
            assert_eq!(asked(path, None), Ok(()), "{path}");
            assert_eq!(asked(path, Some("evil.example")), Err(RequestRefusal::Host), "{path}");
        }
        assert_eq!(asked("http://evil.example/metrics", None), Err(RequestRefusal::Host));
        for path in PROBES {
            assert_eq!(asked(path, Some("keyward.example")), Ok(()), "{path}");
        }
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
            assert_eq!(with(name, value), Err(RequestRefusal::Origin), "{value}");
        }
        assert_eq!(checked("/", &[("host", "localhost"), ("sec-fetch-site", "cross-site")]), Ok(()));
        assert_eq!(
            checked("/", &[("host", "localhost"), ("origin", "http://e")]),
            Err(RequestRefusal::Origin)
        );
    }
}
