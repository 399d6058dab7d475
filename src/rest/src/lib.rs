//! The HTTP face of the listeners: etcd's JSON gateway, `/version`, `/health` and the like, for clients
//! that do not speak gRPC.
//!
//! Owns: the way from an HTTP request to a call, and from the call's answer to an HTTP response. A JSON
//! request becomes a gRPC request and takes the path of every call ([`pipeline`]): identities, policy,
//! limits, members, audit. Must not know: how a call is served, TLS, HTTP framing. Invariants: a header
//! asserts an identity only as etcd's gateway lets it (`request_headers`); an accepted JSON document is
//! accepted by one of etcd's gateways with the same meaning, and its message is canonical for
//! `rpc::canonical` (`json_request`); a response that breaks off is broken off for the client too.

mod call_request;
mod cors;
mod error_form;
mod http_answer;
mod json_bytes;
pub mod json_documents;
pub mod json_fault;
mod json_integer;
pub mod json_reply;
pub mod json_request;
pub mod json_style;
pub mod message_fields;
mod pages;
mod request_headers;
mod routes;
mod rpc_answer;
mod stream_answer;
mod websocket;
pub mod websocket_frames;

use std::rc::Rc;

use bytes::{Bytes, BytesMut};
use futures_util::FutureExt as _;
use futures_util::future::LocalBoxFuture;
use http::header::{CONTENT_TYPE, USER_AGENT, WWW_AUTHENTICATE};
use http::{HeaderMap, HeaderName, HeaderValue, Method as HttpMethod, Request, Response, StatusCode, Uri};
use http_body::Body as _;

use keyward_config::JsonGateway;
use keyward_downstream::client_body::{ClientBody, MadeBody};
use keyward_downstream::request_memory::Requester;
use keyward_etcd::refusal::{Code, Status};
use keyward_etcd::rpc::method::{Method, StreamingSides};
use keyward_gateway::{ClientConnection, Gateway, pipeline};
use keyward_telemetry::access_settings::CallOutcome;
use keyward_telemetry::rest_metrics::RestLabels;

use call_request::{DocumentFault, StreamJson, UnaryJson};
use error_form::{error_json, http_status, stream_error_json};
use json_reply::append_json_of_message;
use json_style::{JsonPlace, JsonStyle};
use message_fields::{MethodMessages, of_method};
use request_headers::{framing_fault, grpc_headers, is_encoded};
use routes::PathKind;
use rpc_answer::AnswerBytes;
use stream_answer::{JsonLines, StreamStart};

pub use http_answer::AnswerBody;

/// Limit on the nesting of objects and arrays in a document. A level of Txn takes three.
pub const MAX_JSON_DEPTH: usize = 100;

/// The longest part of a client's user agent in the log.
const LONGEST_AGENT: usize = 128;

const GRPC_CONTENT_TYPE: HeaderName = HeaderName::from_static("grpc-metadata-content-type");

/// The answer to every request of a listener with `rest = false`.
const OFF: &str = "This is Keyward, in front of an etcd cluster. It speaks gRPC here, over HTTP/2.\n";

/// The answer to a request for a host that is not this listener's, as by etcd's `--host-whitelist`.
const FOREIGN_HOST: &str = "The Host of this request is not among listener.hosts.\n";
/// The answer to a request of a web page of another site.
const FOREIGN_PAGE: &str = "This request comes from a web page of a site that rest.cors does not name.\n";

/// The HTTP face of one connection.
#[derive(Clone)]
pub struct RestFace {
    /// The shard's gateway.
    pub gateway: Rc<Gateway>,
    /// The client's connection.
    pub client: Rc<ClientConnection>,
}

/// True if the request is not for gRPC: the content type decides, and HTTP/1 never carries gRPC.
#[must_use]
pub fn is_rest(request: &Request<ClientBody>) -> bool {
    const GRPC: &[u8] = b"application/grpc";
    let is_grpc = |value: &HeaderValue| value.as_bytes().starts_with(GRPC);
    !matches!(request.body(), ClientBody::Http2(_))
        || !request.headers().get(CONTENT_TYPE).is_some_and(is_grpc)
}

impl RestFace {
    /// Answers a request without gRPC.
    #[must_use]
    pub fn serve(self, request: Request<ClientBody>) -> LocalBoxFuture<'static, Response<AnswerBody>> {
        async move {
            let noted = NotedRequest::of(&request);
            let origin = cors::allowed_origin(&self.gateway.config.load().rest.cors, request.headers());
            let mut response = self.answer(request).await;
            cors::allow(origin, response.headers_mut());
            if noted.method == HttpMethod::HEAD {
                response = without_body(response);
            }
            self.note(&noted, response.status());
            response
        }
        .boxed_local()
    }

    async fn answer(&self, request: Request<ClientBody>) -> Response<AnswerBody> {
        if !self.client.listener.http.is_served {
            return http_answer::text(StatusCode::NOT_FOUND, OFF);
        }
        if let Some((status, text)) = framing_fault(request.version(), request.headers()) {
            return http_answer::closing(http_answer::text(status, text));
        }
        if !self.client.listener.http.hosts.include(cors::host(request.headers(), request.uri()).as_ref()) {
            return http_answer::text(StatusCode::MISDIRECTED_REQUEST, FOREIGN_HOST);
        }
        let config = self.gateway.config.load();
        let acts = request.method() == HttpMethod::POST || websocket::is_upgrade(&request);
        if acts && cors::is_of_foreign_page(&config.rest.cors, request.headers(), request.uri()) {
            return http_answer::text(StatusCode::FORBIDDEN, FOREIGN_PAGE);
        }
        if request.method() == HttpMethod::OPTIONS {
            return http_answer::empty(StatusCode::OK);
        }
        let form = self.form();
        match PathKind::of_cluster(request.uri().path(), form) {
            PathKind::Route(_) if websocket::is_upgrade(&request) => websocket::accept(self.clone(), request),
            PathKind::Route(method) if request.method() == HttpMethod::POST => match of_method(method.path) {
                Some(messages) => self.call(method, messages, request, form).await,
                None => http_answer::not_found(),
            },
            PathKind::Route(_) => unrouted(StatusCode::METHOD_NOT_ALLOWED, form),
            PathKind::UnknownRoute => unrouted(StatusCode::NOT_FOUND, form),
            PathKind::Page(page) => pages::answer(self, page, &request, form),
            PathKind::V2 | PathKind::Other => http_answer::not_found(),
        }
    }

    /// The form of JSON: the configured form, or the form of the oldest member.
    fn form(&self) -> JsonGateway {
        let configured = self.gateway.config.load().rest.style;
        let members = self.gateway.upstream.members.snapshot.load();
        let of_cluster = || pages::oldest_version(&members).map(|version| version.json_gateway());
        configured.or_else(of_cluster).unwrap_or(JsonGateway::Etcd36)
    }

    /// Serves a JSON request as a gRPC call.
    async fn call(
        &self,
        method: &'static Method,
        messages: MethodMessages,
        request: Request<ClientBody>,
        form: JsonGateway,
    ) -> Response<AnswerBody> {
        let (head, body) = request.into_parts();
        // A connection with JSON may be a reverse proxy's, shared by its clients.
        self.client.remembered.borrow_mut().stop_lending();
        if let ClientBody::Http1(body) = &body
            && method.is_lasting()
        {
            body.bond().end_with_client();
        }
        let headers = match grpc_headers(&head.headers) {
            Ok(_) if is_encoded(&head.headers) => Err(encoded_body()),
            made => made,
        };
        let headers = match headers {
            Ok(headers) => headers,
            Err(status) => return refused(&status, form),
        };
        let fault = DocumentFault::default();
        let mut grpc = Request::new(ClientBody::Made(self.body(method, messages, body, &fault)));
        *grpc.method_mut() = HttpMethod::POST;
        *grpc.uri_mut() = Uri::from(method.path_and_query());
        *grpc.headers_mut() = headers;
        let rewrite = match stream_answer::json_style(form) {
            JsonStyle::GatewayV1 => rewrite_v1,
            JsonStyle::GatewayV2 => rewrite_v2,
        };
        let (gateway, client) = (Rc::clone(&self.gateway), Rc::clone(&self.client));
        let reply = pipeline::serve(gateway, client, grpc, Some(rewrite)).await;
        if method.stream == StreamingSides::Unary {
            return match AnswerBytes::begin(reply).await {
                Ok(message) => answered(AnswerBody::Message(Box::new(message))),
                Err(status) => refused(&status, form),
            };
        }
        match JsonLines::begin(reply, messages.reply, form).await {
            StreamStart::Lines(lines) => answered(AnswerBody::Lines(lines)),
            StreamStart::Ended(status) if status.is_ok() => http_answer::json(StatusCode::OK, ""),
            // etcd reads the first document before it opens the stream.
            StreamStart::Ended(status) if fault.was_found() => refused(&status, form),
            StreamStart::Ended(status) => {
                http_answer::json(http_status(status.code, form), stream_error_json(&status, form))
            }
            StreamStart::Broken => refused(&rpc_answer::without_answer(), form),
        }
    }

    /// The body of the gRPC request.
    fn body(
        &self,
        method: &'static Method,
        messages: MethodMessages,
        body: ClientBody,
        fault: &DocumentFault,
    ) -> MadeBody {
        let anybody = method.handler.is_for_anybody();
        let requester = if anybody { Requester::Anybody } else { Requester::Known };
        let held = self.gateway.hold(&self.client, requester);
        let request_size = self.gateway.config.load().limits.request_size;
        match method.stream {
            StreamingSides::Bidi | StreamingSides::Client => {
                Box::pin(StreamJson::new(body, messages.request, request_size, held, fault))
            }
            StreamingSides::Unary | StreamingSides::Server => {
                Box::pin(UnaryJson::new(body, messages.request, request_size, held, fault))
            }
        }
    }

    /// Counts a request, and logs a request that is no call: a call has a record of its own.
    fn note(&self, noted: &NotedRequest, status: StatusCode) {
        let kind = PathKind::of(noted.uri.path());
        let labels = RestLabels { path: kind.label(), status: status.as_u16() };
        self.gateway.metrics.rest_requests.get_or_create(&labels).inc();
        let is_call = matches!(kind, PathKind::Route(_)) && noted.method == HttpMethod::POST;
        if is_call && self.client.listener.http.is_served {
            return;
        }
        let log = &self.gateway.records.log;
        let is_error = status.is_client_error() || status.is_server_error();
        let chosen = log.settings.get().choose(CallOutcome { is_error, took: None }, &log.samples);
        let Some(chosen_by) = chosen.filter(|_| log.limiter.may_log()) else { return };
        tracing::info!(
            target: keyward_telemetry::ACCESS,
            method = noted.method_name(),
            path = kind.shown(noted.uri.path()),
            status = status.as_u16(),
            user_agent = noted.agent,
            listener = &*self.client.listener.name,
            remote = self.client.origin.remote.map(tracing::field::display),
            chosen_by,
            "request without gRPC"
        );
    }
}

/// The answer to a path or an HTTP method without a route.
fn unrouted(status: StatusCode, form: JsonGateway) -> Response<AnswerBody> {
    let (code, text) = match status {
        StatusCode::NOT_FOUND => (Code::NotFound, "Not Found"),
        _ => (Code::Unimplemented, "Method Not Allowed"),
    };
    match form {
        JsonGateway::Etcd34 | JsonGateway::Etcd35 => http_answer::text(status, format!("{text}\n")),
        JsonGateway::Etcd36 => refused(&Status { code, message: text.into() }, form),
    }
}

/// An error that is the whole answer.
fn refused(status: &Status, form: JsonGateway) -> Response<AnswerBody> {
    let mut response = http_answer::json(http_status(status.code, form), error_json(status, form));
    if status.code == Code::Unauthenticated
        && form == JsonGateway::Etcd36
        && let Ok(text) = HeaderValue::try_from(&*status.message)
    {
        response.headers_mut().insert(WWW_AUTHENTICATE, text);
    }
    response
}

/// The parts of a request that are counted and logged.
struct NotedRequest {
    method: HttpMethod,
    uri: Uri,
    agent: Option<String>,
}

impl NotedRequest {
    fn of(request: &Request<ClientBody>) -> Self {
        let agent = agent_of(request.headers());
        Self { method: request.method().clone(), uri: request.uri().clone(), agent }
    }

    /// The method in the log. A client could put any text into a method that is not standard HTTP.
    fn method_name(&self) -> &str {
        let standard = [
            HttpMethod::GET,
            HttpMethod::POST,
            HttpMethod::PUT,
            HttpMethod::DELETE,
            HttpMethod::HEAD,
            HttpMethod::OPTIONS,
            HttpMethod::PATCH,
        ];
        if standard.contains(&self.method) { self.method.as_str() } else { "other" }
    }
}

fn agent_of(headers: &HeaderMap) -> Option<String> {
    let agent = String::from_utf8_lossy(headers.get(USER_AGENT)?.as_bytes()).into_owned();
    Some(agent.chars().take(LONGEST_AGENT).collect())
}

/// A response with JSON of a member's answer.
fn answered(body: AnswerBody) -> Response<AnswerBody> {
    let headers = [
        (CONTENT_TYPE, HeaderValue::from_static("application/json")),
        (GRPC_CONTENT_TYPE, HeaderValue::from_static("application/grpc")),
    ];
    http_answer::response(StatusCode::OK, headers, body)
}

/// The response to HEAD: the length of the body, and no body.
fn without_body(mut response: Response<AnswerBody>) -> Response<AnswerBody> {
    let body = std::mem::replace(response.body_mut(), AnswerBody::Whole(Bytes::new()));
    if let Some(length) = body.size_hint().exact() {
        http_answer::announce_length(response.headers_mut(), length);
    }
    response
}

fn encoded_body() -> Status {
    Status { code: Code::InvalidArgument, message: "keyward: the body has a Content-Encoding".into() }
}

fn rewrite_v1(method: &'static Method, message: &[u8], json: &mut BytesMut) -> bool {
    rewrite(method, message, JsonStyle::GatewayV1, json)
}

fn rewrite_v2(method: &'static Method, message: &[u8], json: &mut BytesMut) -> bool {
    rewrite(method, message, JsonStyle::GatewayV2, json)
}

fn rewrite(method: &'static Method, message: &[u8], style: JsonStyle, json: &mut BytesMut) -> bool {
    let written = of_method(method.path)
        .map(|messages| append_json_of_message(style, JsonPlace::Body, messages.reply, message, json));
    written.is_some_and(|written| written.is_ok())
}
