//! The status page of the admin address: one HTML document, and the events that keep it live.
//!
//! Owns: the routes `/`, `/page/events` and `/replica`, and the headers of their answers. Must not know:
//! connections, the content of an event. Invariants: a web site that is not this page reads nothing: a
//! request by a foreign name or from a foreign origin is refused, and no answer allows another origin; the
//! document loads and runs nothing but itself.

mod page_events;
mod page_sample;
mod recent_calls;

use std::rc::Rc;
use std::sync::Arc;

use bytes::Bytes;
use data_encoding::BASE64;
use http::header::{self, HeaderName, HeaderValue};
use http::{HeaderMap, Method, Request, Response, StatusCode};
use http_body_util::{Either, Full};
use sha2::{Digest as _, Sha256};

use super::doctor::Doctor;
use super::drain::Stage;
use super::other_replicas;
use super::request_origin::check_page;
use super::view::Viewer;
use keyward_base::tasks::Tasks;
use keyward_config::{OwnHosts, PageContent};
use page_events::PageEvents;
pub(super) use page_events::{EventBody, ListenerEnd};
use page_sample::{ClientSelection, PageSources};

/// The document, with its style and its script.
const DOCUMENT: &str = include_str!("status_page/page.html");
const HTML: HeaderValue = HeaderValue::from_static("text/html; charset=utf-8");
const EVENT_STREAM: HeaderValue = HeaderValue::from_static("text/event-stream");
const JSON: HeaderValue = HeaderValue::from_static("application/json");
const TEXT: HeaderValue = HeaderValue::from_static("text/plain; charset=utf-8");

/// The body of an answer at the admin address.
pub(super) type PageBody = Either<Full<Bytes>, EventBody>;

/// The status page.
pub struct StatusPage {
    hosts: OwnHosts,
    security_headers: HeaderMap,
    events: Rc<PageEvents>,
    sources: Rc<PageSources>,
}

impl StatusPage {
    /// The page of a process, with the settings of its configuration.
    #[must_use]
    pub fn new(viewer: Arc<Viewer>, doctor: Arc<Doctor>, tasks: Tasks) -> Self {
        let settings = viewer.config.load().admin.page.clone();
        let sources = Rc::new(PageSources { viewer, doctor, content: settings.content });
        Self {
            hosts: settings.hosts,
            security_headers: security_headers(),
            events: Rc::new(PageEvents::new(Rc::clone(&sources), tasks)),
            sources,
        }
    }

    /// The names of the admin address.
    pub(super) fn hosts(&self) -> &OwnHosts {
        &self.hosts
    }

    /// The answer to a request for the page, and the end of its events if the request begins to listen;
    /// `None` for any other request.
    pub(super) fn answer<B>(
        &self,
        request: &Request<B>,
    ) -> Option<(Response<PageBody>, Option<ListenerEnd>)> {
        let path = request.uri().path();
        if request.method() == Method::GET && path == other_replicas::PATH {
            return Some((self.own_replica(), None));
        }
        let is_page = self.sources.content != PageContent::Off && request.method() == Method::GET;
        if !is_page || !["/", "/page/events"].contains(&path) {
            return None;
        }
        let (mut response, end) = match check_page(request, &self.hosts) {
            Err(refused) => (text(StatusCode::FORBIDDEN, refused.to_string()), None),
            Ok(()) if path == "/" => (whole(StatusCode::OK, HTML, DOCUMENT.into()), None),
            Ok(()) => self.listen(request.uri().query().unwrap_or_default()),
        };
        response.headers_mut().extend(self.security_headers.clone());
        Some((response, end))
    }

    /// The row of this replica, for the other replicas. It names nobody, as the metrics.
    fn own_replica(&self) -> Response<PageBody> {
        let row = serde_json::to_vec(&self.sources.viewer.replica()).unwrap_or_default();
        let mut response = whole(StatusCode::OK, JSON, row.into());
        response.headers_mut().insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
        response
    }

    fn listen(&self, query: &str) -> (Response<PageBody>, Option<ListenerEnd>) {
        let selection = match ClientSelection::of_query(query, self.sources.content) {
            Ok(selection) => selection,
            Err(error) => return (text(StatusCode::BAD_REQUEST, error.to_string()), None),
        };
        if self.sources.viewer.state.exit.stage() != Stage::Serving {
            return (text(StatusCode::SERVICE_UNAVAILABLE, "the process is ending".into()), None);
        }
        let (body, end) = self.events.listen(selection);
        let mut response = Response::new(Either::Right(body));
        response.headers_mut().insert(header::CONTENT_TYPE, EVENT_STREAM);
        (response, Some(end))
    }
}

fn text(status: StatusCode, text: String) -> Response<PageBody> {
    whole(status, TEXT, (text + "\n").into())
}

fn whole(status: StatusCode, content_type: HeaderValue, body: Bytes) -> Response<PageBody> {
    let mut response = Response::new(Either::Left(Full::new(body)));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, content_type);
    response
}

fn security_headers() -> HeaderMap {
    let policy = format!(
        "default-src 'none'; script-src '{}'; style-src '{}'; connect-src 'self'; base-uri 'none'; \
         form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'",
        source_hash("script"),
        source_hash("style"),
    );
    let resource_policy = HeaderName::from_static("cross-origin-resource-policy");
    let mut headers: HeaderMap = [
        (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
        (header::REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
        (header::X_FRAME_OPTIONS, HeaderValue::from_static("DENY")),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-store")),
        (resource_policy, HeaderValue::from_static("same-origin")),
    ]
    .into_iter()
    .collect();
    // Base64 and the texts above are ASCII; a policy without its value would allow everything.
    let policy = HeaderValue::try_from(policy).unwrap_or(HeaderValue::from_static("default-src 'none'"));
    headers.insert(header::CONTENT_SECURITY_POLICY, policy);
    headers
}

/// The source expression of the document's only element of this name, as in
/// <https://www.w3.org/TR/CSP3/#grammardef-hash-source>.
fn source_hash(element: &str) -> String {
    let content = DOCUMENT
        .split_once(&format!("<{element}>"))
        .and_then(|(_, rest)| rest.split_once(&format!("</{element}>")))
        .map_or("", |(content, _)| content);
    format!("sha256-{}", BASE64.encode(&Sha256::digest(content)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_document_has_one_style_and_one_script_and_loads_nothing() {
        for element in ["style", "script"] {
            assert_eq!(DOCUMENT.matches(&format!("<{element}")).count(), 1, "{element}");
            let empty = format!("sha256-{}", BASE64.encode(&Sha256::digest("")));
            assert_ne!(source_hash(element), empty, "{element}");
        }
        // The name of a namespace is no address to load.
        let rest = DOCUMENT.replace("http://www.w3.org/2000/svg", "").to_lowercase();
        for loading in ["http:", "https:", "src=", "url(", "@import", "innerhtml", " style=", " onclick="] {
            assert!(!rest.contains(loading), "{loading}");
        }
    }
}
