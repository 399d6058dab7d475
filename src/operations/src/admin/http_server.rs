//! The connections of the admin address.
//!
//! Owns: HTTP/1.1 on the admin address, and the bounds of an admin client. Must not know: the content of an
//! answer. Invariants: a client sending no request or not reading its answer is disconnected within [`LIFE`]
//! and [`LAST`], unless the client reads the status page's events; no client can lock out another: at the
//! connection limit the oldest connection is closed, so a liveness probe always gets a connection; concurrent
//! scrapes of the metrics in one format share one text.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::pin;
use std::rc::Rc;
use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderValue};
use http::{Method, Request, Response, StatusCode};
use http_body_util::{Either, Full};
use hyper::body::Incoming;
use hyper::server::conn::http1::Builder;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, timeout};

use super::AdminState;
use super::fleet::FleetDoor;
use super::request_origin::check_host;
use super::status_page::StatusPage;
use keyward_base::tasks::{TaskHandle, Tasks};
use keyward_telemetry::exposition::ExpositionFormat;

/// Time limit for receiving a request's header.
const HEADER_TIMEOUT: Duration = Duration::from_secs(5);
/// A connection accepts no further request after this age.
const LIFE: Duration = Duration::from_secs(10);
/// Time limit for reading the last answer after [`LIFE`] has passed.
const LAST: Duration = Duration::from_secs(5);
/// Maximum of concurrent connections; a probe's connection lasts for milliseconds.
const PEERS: usize = 64;
/// Maximum size of a request's header, in bytes.
const HEAD: usize = 16 * 1024;
/// Maximum age of a metrics text shared with a further scrape.
const FRESH: Duration = Duration::from_secs(1);
const PLAIN: HeaderValue = HeaderValue::from_static("text/plain; charset=utf-8");

/// Serves the admin address forever.
pub async fn serve(
    listener: TcpListener,
    state: Arc<AdminState>,
    (page, fleet): (StatusPage, FleetDoor),
    tasks: Tasks,
) {
    let answers = Rc::new(Answers { state, page, fleet, pages: MetricsPages::default() });
    let mut open: VecDeque<TaskHandle> = VecDeque::new();
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "an admin connection could not be accepted");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        open.retain(|connection| !connection.is_finished());
        if open.len() >= PEERS {
            // Dropping the task's handle closes the connection.
            drop(open.pop_front());
        }
        open.push_back(tasks.spawn("admin connection", serve_connection(stream, Rc::clone(&answers))));
        // Yields, so that every accepted connection runs before later connections can evict it.
        tokio::task::yield_now().await;
    }
}

/// The sources of all answers.
struct Answers {
    state: Arc<AdminState>,
    page: StatusPage,
    fleet: FleetDoor,
    pages: MetricsPages,
}

async fn serve_connection(stream: TcpStream, answers: Rc<Answers>) {
    let (listener_end, remote) = (RefCell::new(None), stream.peer_addr().ok());
    let (answers, page_end) = (&*answers, &listener_end);
    let service = service_fn(move |request: Request<Incoming>| async move {
        let response = if let Err(refused) = check_host(&request, answers.page.hosts()) {
            text(StatusCode::FORBIDDEN, PLAIN, format!("{refused}\n").into()).map(Either::Left)
        } else if let Some((response, end)) = answers.page.answer(&request) {
            page_end.replace(end);
            response
        } else if answers.fleet.may_answer(&request) {
            let (method, path) = (request.method().clone(), request.uri().path().to_owned());
            let sealed = answers.fleet.answer(request, remote).await;
            sealed.unwrap_or_else(|| other_answer(&answers.state, &method, &path)).map(Either::Left)
        } else {
            respond(&answers.state, &answers.pages, &request).map(Either::Left)
        };
        Ok::<_, Infallible>(response)
    });
    let mut builder = Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(HEADER_TIMEOUT).max_buf_size(HEAD);
    let mut connection = pin!(builder.serve_connection(TokioIo::new(stream), service));
    let ended = match timeout(LIFE, connection.as_mut()).await {
        Ok(ended) => Ok(ended),
        Err(_) => {
            let events = listener_end.take();
            if let Some(events) = events {
                // Both arms are cancel-safe: the connection goes on below.
                tokio::select! {
                    _ = connection.as_mut() => return,
                    () = events.reached() => {}
                }
            }
            connection.as_mut().graceful_shutdown();
            timeout(LAST, connection).await
        }
    };
    match ended {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!(%error, "admin connection ended"),
        Err(_) => tracing::debug!("an admin connection was cut: its peer does not read"),
    }
}

fn respond(state: &AdminState, pages: &MetricsPages, request: &Request<Incoming>) -> Response<Full<Bytes>> {
    let path = request.uri().path();
    if request.method() != Method::GET || path != "/metrics" {
        return other_answer(state, request.method(), path);
    }
    let format = ExpositionFormat::accepted_by(request.headers());
    match pages.of(format).text(|| state.metrics_text(format)) {
        Ok(page) => text(StatusCode::OK, format.content_type(), page),
        Err(error) => text(StatusCode::INTERNAL_SERVER_ERROR, PLAIN, error.to_string().into()),
    }
}

/// The answer to a request for none of the pages.
fn other_answer(state: &AdminState, method: &Method, path: &str) -> Response<Full<Bytes>> {
    let (status, body) = state.answer(method, path);
    text(status, PLAIN, body.into())
}

fn text(status: StatusCode, content_type: HeaderValue, text: Bytes) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(text));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, content_type);
    response
}

/// The metrics texts of the scrapes in progress, by format.
#[derive(Default)]
struct MetricsPages {
    open_metrics: MetricsPage,
    prometheus_text: MetricsPage,
}

impl MetricsPages {
    fn of(&self, format: ExpositionFormat) -> &MetricsPage {
        match format {
            ExpositionFormat::OpenMetrics => &self.open_metrics,
            ExpositionFormat::PrometheusText => &self.prometheus_text,
        }
    }
}

/// The metrics text of the scrapes in progress, in one format.
#[derive(Default)]
struct MetricsPage(RefCell<Option<(Instant, Weak<String>)>>);

/// A metrics text, freed with its last reader.
struct MetricsText(Arc<String>);

impl AsRef<[u8]> for MetricsText {
    fn as_ref(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

impl MetricsPage {
    /// Returns the text of a concurrent scrape if it was made within the last second, else a new text from
    /// `make`: a scrape without concurrent scrapes always gets the latest values.
    fn text<E>(&self, make: impl FnOnce() -> Result<String, E>) -> Result<Bytes, E> {
        let now = Instant::now();
        let mut known = self.0.borrow_mut();
        let shared =
            known.as_ref().filter(|(made, _)| now < *made + FRESH).and_then(|(_, text)| text.upgrade());
        let text = match shared {
            Some(text) => text,
            None => {
                let text = Arc::new(make()?);
                *known = Some((now, Arc::downgrade(&text)));
                text
            }
        };
        Ok(Bytes::from_owner(MetricsText(text)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn readers_at_the_same_time_share_one_text_and_a_single_reader_has_the_latest() {
        let page = MetricsPage::default();
        let made = std::cell::Cell::new(0);
        let read = || {
            let make = || {
                made.set(made.get() + 1);
                Ok::<_, Infallible>(made.get().to_string())
            };
            page.text(make).unwrap()
        };
        let (first, second) = (read(), read());
        assert_eq!((&first[..], first.as_ptr()), (&b"1"[..], second.as_ptr()));
        drop((first, second));
        let third = read();
        assert_eq!(&third[..], b"2", "nobody read the first any more");
        tokio::time::advance(FRESH).await;
        assert_eq!((&read()[..], &third[..]), (&b"3"[..], &b"2"[..]), "it was too old");
    }
}
