//! A scripted etcd member for the tests of `credential`: gRPC frames by hyper, over in-process pipes, under a
//! paused clock.
//!
//! Owns: the member's users and tokens, and a record of received calls. Answers are copied from real members.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::{BufMut as _, Bytes, BytesMut};
use futures_util::stream;
use http::{HeaderMap, HeaderValue, Request, Response};
use http_body::Frame;
use http_body_util::{BodyExt as _, StreamBody};
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo};
use prost::Message;
use tokio::io::DuplexStream;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tonic::transport::{Channel, Endpoint};

use super::lock;
use keyward_base::tasks::Tasks;
use keyward_etcd::pb::etcdserverpb::{
    AuthenticateRequest, AuthenticateResponse, RangeRequest, RangeResponse,
};

/// Duration of bcrypt at etcd's default cost.
pub(super) const BCRYPT: Duration = Duration::from_millis(50);

type Trailers = (i32, &'static str);

#[derive(Clone)]
pub(super) struct ScriptedMember(Arc<Mutex<ScriptedMemberState>>);

pub(super) struct ScriptedMemberState {
    /// Name to password; `None` for a user without a password.
    pub(super) users: HashMap<String, Option<String>>,
    pub(super) auth: bool,
    /// Answer to every call, if set.
    pub(super) down: Option<Trailers>,
    /// If true, the member never answers.
    pub(super) silent: bool,
    pub(super) token_ttl: Duration,
    pub(super) logins: Vec<RecordedLogin>,
    pub(super) touches: Vec<RecordedTouch>,
    pub(super) most_at_a_time: usize,
    tokens: HashMap<String, (String, Instant)>,
    at_a_time: usize,
    issued: usize,
}

/// A received login.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RecordedLogin {
    pub(super) user: String,
    pub(super) accepted: bool,
    pub(super) with_token: bool,
}

/// A received read with a token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RecordedTouch {
    pub(super) at: Instant,
    pub(super) alive: bool,
}

impl ScriptedMember {
    pub(super) fn new(users: &[(&str, &str)]) -> Self {
        let users = users.iter().map(|(name, password)| (name.to_string(), Some(password.to_string())));
        Self(Arc::new(Mutex::new(ScriptedMemberState {
            users: users.collect(),
            auth: true,
            down: None,
            silent: false,
            token_ttl: Duration::from_secs(300),
            logins: Vec::new(),
            touches: Vec::new(),
            most_at_a_time: 0,
            tokens: HashMap::new(),
            at_a_time: 0,
            issued: 0,
        })))
    }

    pub(super) fn with<T>(&self, look: impl FnOnce(&mut ScriptedMemberState) -> T) -> T {
        look(&mut lock(&self.0))
    }

    /// Drops all tokens, as a restart does.
    pub(super) fn restart(&self) {
        self.with(|state| state.tokens.clear());
    }

    /// Uses the token as a call would. True if the member knows the token.
    pub(super) fn knows(&self, token: &HeaderValue) -> bool {
        self.with(|state| state.use_token(token.to_str().unwrap()))
    }

    /// A channel to the member, dialled at the first call.
    pub(super) fn channel(&self, tasks: &Tasks) -> Channel {
        let (pipes, mut incoming) = mpsc::channel::<DuplexStream>(4);
        let (member, connections) = (self.clone(), tasks.clone());
        let accept = async move {
            while let Some(pipe) = incoming.recv().await {
                let member = member.clone();
                let service = hyper::service::service_fn(move |request| member.clone().answer(request));
                let connection = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
                    .serve_connection(TokioIo::new(pipe), service);
                let served = async move { drop(connection.await) };
                connections.spawn("member's connection", served).detach();
            }
        };
        tasks.spawn("member", accept).detach();
        let dial = tower::service_fn(move |_| {
            let (ours, theirs) = tokio::io::duplex(64 * 1024);
            let taken = pipes.try_send(theirs).map_err(std::io::Error::other);
            std::future::ready(taken.map(|()| TokioIo::new(ours)))
        });
        Endpoint::from_static("http://member.test").connect_with_connector_lazy(dial)
    }

    async fn answer(
        self,
        request: Request<Incoming>,
    ) -> Result<Response<impl http_body::Body<Data = Bytes, Error = Infallible>>, Infallible> {
        let (head, body) = request.into_parts();
        let body = body.collect().await.map(|body| body.to_bytes()).unwrap_or_default();
        let message = body.get(5..).unwrap_or_default();
        let token = head.headers.get("token").and_then(|token| token.to_str().ok());
        let (down, silent) = self.with(|state| (state.down, state.silent));
        if silent {
            std::future::pending::<()>().await;
        }
        let outcome = match (down, head.uri.path()) {
            (Some(status), _) => Err(status),
            (None, "/etcdserverpb.Auth/Authenticate") => self.authenticate(message, token).await,
            (None, "/etcdserverpb.KV/Range") => self.range(message, token),
            _ => Err((12, "unknown method")),
        };
        Ok(reply(outcome))
    }

    async fn authenticate(&self, message: &[u8], token: Option<&str>) -> Result<Vec<u8>, Trailers> {
        let login = AuthenticateRequest::decode(message).unwrap();
        let known = self.with(|state| {
            state.at_a_time += 1;
            state.most_at_a_time = state.most_at_a_time.max(state.at_a_time);
            if state.auth { Ok(state.users.get(&login.name).cloned()) } else { Err(()) }
        });
        tokio::time::sleep(BCRYPT).await;
        self.with(|state| {
            state.at_a_time -= 1;
            let outcome = match known {
                Err(()) => Err((9, "etcdserver: authentication is not enabled")),
                Ok(Some(None)) => {
                    Err((2, "auth: authentication failed, password was given for no password user"))
                }
                Ok(Some(Some(password))) if password == login.password => Ok(state.issue(&login.name)),
                Ok(_) => Err((3, "etcdserver: authentication failed, invalid user ID or password")),
            };
            let (accepted, with_token) = (outcome.is_ok(), token.is_some());
            state.logins.push(RecordedLogin { user: login.name.clone(), accepted, with_token });
            outcome.map(|token| AuthenticateResponse { header: None, token }.encode_to_vec())
        })
    }

    /// Denies every read for lack of permission, but checks and extends the token first.
    fn range(&self, message: &[u8], token: Option<&str>) -> Result<Vec<u8>, Trailers> {
        let range = RangeRequest::decode(message).unwrap();
        assert!(range.serializable && range.count_only, "a touch is cheap: {range:?}");
        self.with(|state| {
            if !state.auth {
                return Ok(RangeResponse::default().encode_to_vec());
            }
            let Some(token) = token else { return Err((3, "etcdserver: user name is empty")) };
            let alive = state.use_token(token);
            state.touches.push(RecordedTouch { at: Instant::now(), alive });
            let denied = (7, "etcdserver: permission denied");
            Err(if alive { denied } else { (16, "etcdserver: invalid auth token") })
        })
    }
}

impl ScriptedMemberState {
    fn issue(&mut self, user: &str) -> String {
        self.issued += 1;
        let token = format!("{user}.{}", self.issued);
        self.tokens.insert(token.clone(), (user.to_owned(), Instant::now() + self.token_ttl));
        token
    }

    fn use_token(&mut self, token: &str) -> bool {
        let now = Instant::now();
        self.tokens.retain(|_, (_, end)| now <= *end);
        let until = now + self.token_ttl;
        self.tokens.get_mut(token).map(|(_, end)| *end = until).is_some()
    }

    /// Drops the user's tokens, as etcd does.
    pub(super) fn change_password(&mut self, user: &str, password: &str) {
        self.users.insert(user.to_owned(), Some(password.to_owned()));
        self.tokens.retain(|_, (owner, _)| owner != user);
    }

    pub(super) fn accepted(&self, user: &str) -> usize {
        self.logins.iter().filter(|login| login.user == user && login.accepted).count()
    }
}

fn reply(
    outcome: Result<Vec<u8>, Trailers>,
) -> Response<impl http_body::Body<Data = Bytes, Error = Infallible>> {
    let mut response = Response::builder().header("content-type", "application/grpc");
    let mut frames = Vec::new();
    match outcome {
        Ok(message) => {
            let mut data = BytesMut::new();
            data.put_u8(0);
            data.put_u32(u32::try_from(message.len()).unwrap());
            data.put_slice(&message);
            frames.push(Ok(Frame::data(data.freeze())));
            let mut trailers = HeaderMap::new();
            trailers.insert("grpc-status", HeaderValue::from_static("0"));
            frames.push(Ok(Frame::trailers(trailers)));
        }
        Err((code, text)) => {
            response = response.header("grpc-status", code).header("grpc-message", text);
        }
    }
    response.body(StreamBody::new(stream::iter(frames))).unwrap()
}
