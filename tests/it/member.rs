//! An etcd member that answers by script.
//!
//! Owns: its address, its connections, and the calls that reached it, in order. A test takes a call and answers it
//! frame by frame; logins are answered by themselves, since the control side makes them. Must not know what a test
//! wants to show.

use std::cell::{Cell, RefCell};
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt as _;
use futures_util::future::select_all;
use h2::server::{self, SendResponse};
use h2::{Reason, SendStream};
use http::{HeaderMap, HeaderValue, Request, Response};
use keyward::identity::MemberId;
use keyward::members::version::Version;
use keyward::pb::etcdserverpb::{AuthenticateRequest, AuthenticateResponse, TxnRequest, TxnResponse};
use keyward::refusal::{Code, Status};
use keyward::rpc::frame::encode;
use keyward::tasks::{TaskHandle, Tasks};
use prost::Message as _;
use tokio::io::DuplexStream;
use tokio::sync::{Notify, mpsc, watch};

use crate::wire::{End, Messages, say};

/// The calls that wait for their turn.
const LOCKS: [&str; 2] = ["/v3lockpb.Lock/Lock", "/v3electionpb.Election/Campaign"];

/// Calls that no test has taken up yet: more than any test makes.
const CALLS: usize = 16 * 1024;
/// What etcd says to a wrong password, and to a user whom it does not have.
const WRONG: (Code, &str) =
    (Code::InvalidArgument, "etcdserver: authentication failed, invalid user ID or password");
/// Bytes in flight on a pipe: as a socket's buffer, so that back-pressure is real.
const PIPE: usize = 256 * 1024;

/// What of a member is shared with whoever dials it, on any thread.
#[derive(Clone)]
pub(crate) struct Address {
    pub(crate) id: MemberId,
    dialled: mpsc::Sender<DuplexStream>,
    refusing: Arc<AtomicBool>,
    dials: Arc<AtomicUsize>,
}

impl Address {
    /// A connection to the member, or as if nobody listened.
    pub(crate) fn dial(&self) -> io::Result<DuplexStream> {
        self.dials.fetch_add(1, Ordering::Relaxed);
        if self.refusing.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::ConnectionRefused.into());
        }
        let (ours, theirs) = tokio::io::duplex(PIPE);
        self.dialled.try_send(theirs).map_err(io::Error::other)?;
        Ok(ours)
    }
}

/// A scripted member.
pub(crate) struct Member {
    pub(crate) address: Address,
    pub(crate) version: Version,
    calls: RefCell<mpsc::Receiver<Call>>,
    state: Rc<State>,
    _accepting: TaskHandle,
}

struct State {
    tasks: Tasks,
    calls: mpsc::Sender<Call>,
    connections: RefCell<Vec<Connected>>,
    logins: Cell<usize>,
    password: RefCell<Option<&'static str>>,
    /// What a login takes.
    bcrypt: Cell<Duration>,
    /// How a login is refused that is not accepted.
    refusal: Cell<(Code, &'static str)>,
    held: watch::Sender<bool>,
    settings: server::Builder,
}

struct Connected {
    _task: TaskHandle,
    go_away: Rc<Notify>,
}

impl Member {
    pub(crate) fn new(id: u64, tasks: &Tasks) -> Self {
        let mut settings = server::Builder::new();
        settings.initial_window_size(4 << 20).initial_connection_window_size(64 << 20);
        Self::with(id, tasks, settings)
    }

    /// With HTTP/2 settings of the test's choice.
    pub(crate) fn with(id: u64, tasks: &Tasks, settings: server::Builder) -> Self {
        let (calls, taken) = mpsc::channel(CALLS);
        let (dialled, mut incoming) = mpsc::channel(64);
        let state = Rc::new(State {
            tasks: tasks.clone(),
            calls,
            connections: RefCell::default(),
            logins: Cell::new(0),
            password: RefCell::new(Some("right")),
            bcrypt: Cell::new(Duration::ZERO),
            refusal: Cell::new(WRONG),
            held: watch::Sender::new(false),
            settings,
        });
        let accepting = Rc::clone(&state);
        let accept = async move {
            while let Some(pipe) = incoming.recv().await {
                State::serve(&accepting, pipe);
            }
        };
        Self {
            address: Address { id: MemberId(id), dialled, refusing: Arc::default(), dials: Arc::default() },
            version: Version::parse("3.5.30").expect("a version"),
            calls: RefCell::new(taken),
            _accepting: tasks.spawn("scripted member", accept),
            state,
        }
    }

    /// The next call that reaches the member.
    pub(crate) async fn call(&self) -> Call {
        std::future::poll_fn(|cx| self.calls.borrow_mut().poll_recv(cx)).await.expect("the member lives")
    }

    /// The next call that is no Txn, but the Txns by which Keyward asks before a Lock or Campaign if the caller may
    /// read are answered with yes.
    pub(crate) async fn call_after_judges(&self) -> Call {
        loop {
            let mut call = self.call().await;
            if call.path() != "/etcdserverpb.KV/Txn" {
                return call;
            }
            let judge = TxnRequest::decode(call.message().await).expect("a Txn");
            assert!(judge.compare.is_empty() && judge.success.is_empty(), "{judge:?}");
            call.reply(&TxnResponse::default().encode_to_vec()).await;
        }
    }

    /// The next call, which must be of this method.
    pub(crate) async fn called(&self, path: &str) -> Call {
        let is_lock = LOCKS.contains(&path) || path.starts_with("/etcdserverpb.Lease/");
        let call = if is_lock { self.call_after_judges().await } else { self.call().await };
        assert_eq!(call.path(), path);
        call
    }

    /// Whether a call has reached the member that no test took up.
    pub(crate) fn was_called_again(&self) -> Option<Call> {
        self.calls.borrow_mut().try_recv().ok()
    }

    /// Logins that were asked for.
    pub(crate) fn logins(&self) -> usize {
        self.state.logins.get()
    }

    /// From now on it has all users without a password.
    pub(crate) fn has_no_passwords(&self) {
        self.state.password.replace(None);
        let text = "auth: authentication failed, password was given for no password user";
        self.state.refusal.set((Code::Unknown, text));
    }

    /// From now on it says to every login that auth is off.
    pub(crate) fn turns_auth_off(&self) {
        self.state.password.replace(None);
        let text = "etcdserver: authentication is not enabled";
        self.state.refusal.set((Code::FailedPrecondition, text));
    }

    /// From now on it can say nothing of any password.
    pub(crate) fn answers_no_login(&self) {
        self.state.password.replace(None);
        self.state.refusal.set((Code::Unavailable, "etcdserver: no leader"));
    }

    /// From now on it refuses every login in these words, which tell nothing of the password.
    pub(crate) fn refuses_logins_with(&self, text: &'static str) {
        self.state.password.replace(None);
        self.state.refusal.set((Code::Unavailable, text));
    }

    /// From now on a login takes so long.
    pub(crate) fn takes_for_a_login(&self, bcrypt: Duration) {
        self.state.bcrypt.set(bcrypt);
    }

    /// From now on logins wait for their answer, or no more.
    pub(crate) fn hold_logins(&self, hold: bool) {
        self.state.held.send_replace(hold);
    }

    /// From now on only this password is right.
    pub(crate) fn change_password(&self, password: &'static str) {
        self.state.password.replace(Some(password));
        self.state.refusal.set(WRONG);
    }

    /// How often it was dialled.
    pub(crate) fn dials(&self) -> usize {
        self.address.dials.load(Ordering::Relaxed)
    }

    /// From now on nobody listens; connections that are open live on.
    pub(crate) fn refuse_connections(&self, refuse: bool) {
        self.address.refusing.store(refuse, Ordering::Relaxed);
    }

    /// Cuts every connection, as a kill would.
    pub(crate) fn cut(&self) {
        self.state.connections.borrow_mut().clear();
    }

    /// Says on every connection that it will close: no new streams, the open ones finish.
    pub(crate) fn go_away(&self) {
        self.state.connections.borrow().iter().for_each(|connected| connected.go_away.notify_one());
    }
}

impl State {
    fn serve(state: &Rc<Self>, pipe: DuplexStream) {
        let go_away = Rc::new(Notify::new());
        let (this, told) = (Rc::clone(state), Rc::clone(&go_away));
        let serve = async move {
            let Ok(mut connection) = this.settings.handshake::<_, Bytes>(pipe).await else { return };
            loop {
                tokio::select! {
                    () = told.notified() => connection.graceful_shutdown(),
                    accepted = connection.accept() => match accepted {
                        Some(Ok((request, respond))) => this.take(Call::new(request, respond)),
                        _ => return,
                    },
                }
            }
        };
        let task = state.tasks.spawn("scripted connection", serve);
        state.connections.borrow_mut().push(Connected { _task: task, go_away });
    }

    fn take(self: &Rc<Self>, call: Call) {
        if call.path() != "/etcdserverpb.Auth/Authenticate" {
            return self.calls.try_send(call).unwrap_or_else(|_| panic!("no test takes these calls"));
        }
        self.logins.set(self.logins.get() + 1);
        let (number, password) = (self.logins.get(), *self.password.borrow());
        let (bcrypt, (code, text)) = (self.bcrypt.get(), self.refusal.get());
        let mut held = self.held.subscribe();
        let answer = async move {
            let mut call = call;
            drop(held.wait_for(|held| !held).await);
            assert!(!call.headers.contains_key("token"), "a login never carries a token");
            let message = call.messages.next().await.expect("a request");
            let login = AuthenticateRequest::decode(message).expect("a login");
            tokio::time::sleep(bcrypt).await;
            if Some(&*login.password) == password {
                let token = format!("{}.{number}", login.name);
                call.reply(&AuthenticateResponse { header: None, token }.encode_to_vec()).await;
            } else {
                call.refuse(code, text);
            }
        };
        self.tasks.spawn("scripted login", answer).detach();
    }
}

/// A call that reached a member.
pub(crate) struct Call {
    /// As they came.
    pub(crate) headers: HeaderMap,
    pub(crate) uri: http::Uri,
    pub(crate) messages: Messages,
    respond: SendResponse<Bytes>,
    stream: Option<SendStream<Bytes>>,
}

impl Call {
    fn new(request: Request<h2::RecvStream>, respond: SendResponse<Bytes>) -> Self {
        let (head, body) = request.into_parts();
        Self { headers: head.headers, uri: head.uri, messages: Messages::new(body), respond, stream: None }
    }

    pub(crate) fn path(&self) -> &str {
        self.uri.path()
    }

    /// The token that it carries.
    pub(crate) fn token(&self) -> Option<&str> {
        self.headers.get("token").and_then(|token| token.to_str().ok())
    }

    /// The one message of a unary request.
    pub(crate) async fn message(&mut self) -> Bytes {
        let message = self.messages.next().await.expect("one message");
        assert_eq!(self.messages.next().await, Err(End::NoStatus), "one message only");
        message
    }

    /// A status in the header, as plaintext ports send a refusal.
    pub(crate) fn refuse(mut self, code: Code, text: &'static str) {
        let status = Status { code, message: text.into() };
        let mut response = Response::new(());
        *response.headers_mut() = status.trailers_only();
        drop(self.respond.send_response(response, true));
    }

    /// A header without a status, nothing, then trailers, as TLS ports send a refusal.
    pub(crate) fn refuse_in_trailers(mut self, code: Code, text: &'static str) {
        self.begin();
        self.end(code, text);
    }

    /// The header of a reply that goes on.
    pub(crate) fn begin(&mut self) {
        let mut response = Response::new(());
        response.headers_mut().insert("content-type", HeaderValue::from_static("application/grpc"));
        self.stream = self.respond.send_response(response, false).ok();
    }

    /// A message, after the header if need be. `Err` when the caller does not want it any more.
    pub(crate) async fn say(&mut self, message: &[u8]) -> Result<(), End> {
        if self.stream.is_none() {
            self.begin();
        }
        say(self.stream.as_mut().ok_or(End::Gone)?, message).await
    }

    /// Bytes as they are, after the header if need be. `Err` when the caller does not want them any more.
    pub(crate) async fn say_framed(&mut self, framed: Bytes) -> Result<(), End> {
        if self.stream.is_none() {
            self.begin();
        }
        crate::wire::say_framed(self.stream.as_mut().ok_or(End::Gone)?, framed, false).await
    }

    /// The beginning of a message whose rest never comes.
    pub(crate) async fn say_half(&mut self, message: &[u8]) {
        self.begin();
        let framed = encode(message);
        let half = framed.slice(..framed.len() / 2);
        let stream = self.stream.as_mut().expect("begun");
        crate::wire::say_framed(stream, half, false).await.expect("the caller listens");
    }

    /// Trailers.
    pub(crate) fn end(mut self, code: Code, text: &'static str) {
        let status = Status { code, message: text.into() };
        if let Some(mut stream) = self.stream.take() {
            drop(stream.send_trailers(status.trailers()));
        }
    }

    /// The end of the stream without trailers, which gRPC does not allow.
    pub(crate) fn end_without_status(mut self) {
        if let Some(mut stream) = self.stream.take() {
            drop(stream.send_data(Bytes::new(), true));
        }
    }

    /// Trailers that say nothing.
    pub(crate) fn end_with_empty_trailers(mut self) {
        if let Some(mut stream) = self.stream.take() {
            drop(stream.send_trailers(HeaderMap::new()));
        }
    }

    /// One message and OK.
    pub(crate) async fn reply(mut self, message: &[u8]) {
        // A caller that left meanwhile is no fault of the script's.
        drop(self.say(message).await);
        self.end(Code::Ok, "");
    }

    pub(crate) fn reset(mut self, reason: Reason) {
        match &mut self.stream {
            Some(stream) => stream.send_reset(reason),
            None => self.respond.send_reset(reason),
        }
    }

    /// Ends a stream that has said something, as a member without a leader does.
    pub(crate) fn refuse_later(self) {
        self.end(Code::Unavailable, "etcdserver: no leader");
    }

    pub(crate) fn reset_canceled(self) {
        self.reset(Reason::CANCEL);
    }

    /// Waits until the caller has reset the stream.
    pub(crate) async fn canceled(&mut self) -> Reason {
        let reset = match &mut self.stream {
            Some(stream) => std::future::poll_fn(|cx| stream.poll_reset(cx)).await,
            None => std::future::poll_fn(|cx| self.respond.poll_reset(cx)).await,
        };
        reset.unwrap_or(Reason::INTERNAL_ERROR)
    }
}

/// The next call at any of the members, and at which.
pub(crate) async fn next_of(members: &[Member]) -> (usize, Call) {
    let (call, at, _) = select_all(members.iter().map(|member| Box::pin(member.call()))).await;
    (at, call)
}

/// The same, which must be of this method.
pub(crate) async fn next_called(members: &[Member], path: &str) -> (usize, Call) {
    let (call, at, _) = if LOCKS.contains(&path) {
        select_all(members.iter().map(|member| Box::pin(member.call_after_judges()).boxed_local())).await
    } else {
        select_all(members.iter().map(|member| Box::pin(member.call()).boxed_local())).await
    };
    assert_eq!(call.path(), path);
    (at, call)
}
