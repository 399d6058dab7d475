//! A gRPC server like a member of an etcd cluster, with auth on: the cheapest upstream for a proxy.
//!
//! Owns: connections, unary answers, leases' keepalives. Must not know: the proxy in front. Invariants: the
//! revision grows with every Put, as at etcd, and no answer shows a smaller revision than an earlier answer;
//! calls on keys need a token; every login gets another token of the same length; the password of every user
//! is [`PASSWORD`]. Several canned members name the same cluster and leader, but replicate nothing: loads
//! through several members only read.

use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::rc::Rc;

use bytes::Bytes;
use futures_util::FutureExt as _;
use h2::server::{self, SendResponse};
use h2::{RecvStream, SendStream};
use http::{HeaderMap, HeaderValue, Request, Response, header};
use keyward::io::coalesce::coalesce;
use keyward::pb::etcdserverpb::{
    AuthStatusResponse, AuthenticateRequest, AuthenticateResponse, LeaseGrantRequest, LeaseGrantResponse,
    LeaseKeepAliveRequest, LeaseKeepAliveResponse, LeaseRevokeResponse, Member, MemberListResponse,
    PutRequest, PutResponse, RangeRequest, RangeResponse, ResponseHeader, StatusResponse,
};
use keyward::pb::mvccpb::KeyValue;
use keyward::rpc::frame;
use keyward::tasks::Tasks;
use prost::Message;
use tokio::net::{TcpListener, TcpStream};

use crate::Failure;
use crate::canned_watches::CannedWatches;
use crate::grpc_client::MessageStream;

/// The password of every user.
pub(crate) const PASSWORD: &str = "canned";
/// The keys of the loads: their answers are built once for each revision.
pub(crate) const SMALL_KEY: &[u8] = b"small";
/// A Range of this key is answered with a value of [`LARGE_VALUE`] bytes, of any other key with [`VALUE`].
pub(crate) const LARGE_KEY: &[u8] = b"large";
const LARGE_VALUE: usize = 64 * 1024;
const VALUE: usize = 256;
const CLUSTER: u64 = 0xcafe;
/// The id of the first member, the leader. The ids of the other members follow.
const LEADER: u64 = 0xbeef;
/// Tokens repeat after as many logins: a token has five digits for the login.
const TOKENS: u32 = 100_000;
const TERM: u64 = 2;
/// The first revision. The encoding of revisions, and so the length of answers, stays the same for 250 million
/// Puts.
const FIRST_REVISION: i64 = 10_000_000;
const WINDOW: u32 = 1024 * 1024;
/// Reset streams that the member has not accepted yet: a proxy resets all streams of a client that leaves. By
/// default h2 ends the connection at 20 such streams; etcd does not.
const STREAMS: usize = 4096;

/// A refusal in etcd's words.
struct Refused {
    code: &'static str,
    text: &'static str,
}

const NO_USER: Refused = Refused { code: "3", text: "etcdserver: user name is empty" };
const WRONG_PASSWORD: Refused =
    Refused { code: "3", text: "etcdserver: authentication failed, invalid user ID or password" };
const UNKNOWN_METHOD: Refused = Refused { code: "12", text: "the canned member has no such method" };
const UNREADABLE: Refused = Refused { code: "13", text: "the canned member cannot read the request" };

/// A framed Range answer of one revision.
#[derive(Default)]
struct RangeAnswer {
    revision: i64,
    frame: Bytes,
}

/// The member.
pub(crate) struct CannedMember {
    id: u64,
    /// All members of the cluster, the leader first.
    cluster: Vec<SocketAddr>,
    logins: Cell<u32>,
    revision: Cell<i64>,
    small: RefCell<RangeAnswer>,
    large: RefCell<RangeAnswer>,
    watches: CannedWatches,
}

/// Serves until the listener fails. `cluster` lists all members with this member, and none if `listen` is the
/// only member.
pub(crate) async fn serve(listen: SocketAddr, mut cluster: Vec<SocketAddr>) -> Result<(), Failure> {
    if cluster.is_empty() {
        cluster.push(listen);
    }
    let ids = (LEADER..).zip(&cluster);
    let (id, _) = ids.into_iter().find(|(_, address)| **address == listen).ok_or("not in the cluster")?;
    let listener = TcpListener::bind(listen).await?;
    let member = Rc::new(CannedMember {
        id,
        cluster,
        logins: Cell::new(0),
        revision: Cell::new(FIRST_REVISION),
        small: RefCell::default(),
        large: RefCell::default(),
        watches: CannedWatches::default(),
    });
    let tasks = Tasks::default();
    loop {
        let (socket, _) = listener.accept().await?;
        socket.set_nodelay(true)?;
        let serving = serve_connection(Rc::clone(&member), socket, tasks.clone());
        // A connection's failure is the proxy's to notice.
        tasks.spawn("connection", async { drop(serving.await) }).detach();
    }
}

async fn serve_connection(
    member: Rc<CannedMember>,
    socket: TcpStream,
    tasks: Tasks,
) -> Result<(), h2::Error> {
    let (io, flusher) = coalesce(socket);
    tasks.spawn("flusher", flusher).detach();
    let mut settings = server::Builder::new();
    settings
        .initial_window_size(WINDOW)
        .initial_connection_window_size(64 * WINDOW)
        .max_pending_accept_reset_streams(STREAMS);
    let mut connection = settings.handshake(io.into_inner()).await?;
    while let Some(accepted) = connection.accept().await {
        let (request, respond) = accepted?;
        let member = Rc::clone(&member);
        let mut answering = Box::pin(async move { drop(member.answer(request, respond).await) });
        // The body of a unary call has nearly always arrived with the headers: the call needs no task then.
        if (&mut answering).now_or_never().is_none() {
            tasks.spawn("call", answering).detach();
        }
    }
    Ok(())
}

/// The header of a gRPC answer.
fn begin(respond: &mut SendResponse<Bytes>) -> Result<SendStream<Bytes>, h2::Error> {
    let mut response = Response::new(());
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    respond.send_response(response, false)
}

/// The trailers of a call without a fault.
fn end(stream: &mut SendStream<Bytes>) -> Result<(), h2::Error> {
    let mut trailers = HeaderMap::with_capacity(1);
    trailers.insert("grpc-status", HeaderValue::from_static("0"));
    stream.send_trailers(trailers)
}

fn refuse(respond: &mut SendResponse<Bytes>, refused: &Refused) -> Result<(), h2::Error> {
    let mut response = Response::new(());
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    headers.insert("grpc-status", HeaderValue::from_static(refused.code));
    headers.insert("grpc-message", HeaderValue::from_static(refused.text));
    respond.send_response(response, true).map(drop)
}

fn decode<M: Message + Default>(message: &[u8]) -> Result<M, Refused> {
    M::decode(message).map_err(|_| UNREADABLE)
}

fn framed(message: &impl Message) -> Bytes {
    frame::encode(&message.encode_to_vec())
}

impl CannedMember {
    async fn answer(
        &self,
        request: Request<RecvStream>,
        mut respond: SendResponse<Bytes>,
    ) -> Result<(), Failure> {
        let (head, body) = request.into_parts();
        let mut messages = MessageStream::new(body);
        match head.uri.path() {
            "/etcdserverpb.Watch/Watch" => {
                let stream = Rc::new(RefCell::new(begin(&mut respond)?));
                let served = self.watches.serve(&mut messages, &stream, || self.header()).await;
                self.watches.forget(&stream);
                served?;
                end(&mut stream.borrow_mut())?;
            }
            "/etcdserverpb.Lease/LeaseKeepAlive" => {
                let mut stream = begin(&mut respond)?;
                while let Some(message) = messages.next().await? {
                    let asked = LeaseKeepAliveRequest::decode(message)?;
                    let header = Some(self.header());
                    let kept = LeaseKeepAliveResponse { header, id: asked.id, ttl: 60 };
                    stream.send_data(framed(&kept), false)?;
                }
                end(&mut stream)?;
            }
            path => {
                let message = messages.only().await?;
                match self.unary(path, head.headers.contains_key("token"), &message) {
                    Ok(frame) => {
                        let mut stream = begin(&mut respond)?;
                        stream.send_data(frame, false)?;
                        end(&mut stream)?;
                    }
                    Err(refused) => refuse(&mut respond, &refused)?,
                }
            }
        }
        Ok(())
    }

    /// The framed answer of a unary call.
    fn unary(&self, path: &str, has_token: bool, message: &[u8]) -> Result<Bytes, Refused> {
        match path {
            "/etcdserverpb.KV/Range" if has_token => Ok(self.range(&decode(message)?)),
            "/etcdserverpb.KV/Put" if has_token => Ok(self.put(decode(message)?)),
            "/etcdserverpb.KV/Range" | "/etcdserverpb.KV/Put" => Err(NO_USER),
            "/etcdserverpb.Auth/Authenticate" => self.authenticate(&decode(message)?),
            "/etcdserverpb.Auth/AuthStatus" => {
                let header = Some(self.header());
                Ok(framed(&AuthStatusResponse { header, enabled: true, auth_revision: 5 }))
            }
            "/etcdserverpb.Maintenance/Status" => Ok(framed(&self.status())),
            "/etcdserverpb.Cluster/MemberList" => Ok(framed(&self.member_list())),
            "/etcdserverpb.Lease/LeaseGrant" => {
                let asked: LeaseGrantRequest = decode(message)?;
                let (header, id) = (Some(self.header()), if asked.id == 0 { 77 } else { asked.id });
                Ok(framed(&LeaseGrantResponse { header, id, ttl: asked.ttl, ..Default::default() }))
            }
            "/etcdserverpb.Lease/LeaseRevoke" => {
                Ok(framed(&LeaseRevokeResponse { header: Some(self.header()) }))
            }
            _ => Err(UNKNOWN_METHOD),
        }
    }

    fn header(&self) -> ResponseHeader {
        let revision = self.revision.get();
        ResponseHeader { cluster_id: CLUSTER, member_id: self.id, revision, raft_term: TERM }
    }

    fn authenticate(&self, asked: &AuthenticateRequest) -> Result<Bytes, Refused> {
        if asked.password != PASSWORD {
            return Err(WRONG_PASSWORD);
        }
        let login = self.logins.replace((self.logins.get() + 1) % TOKENS);
        // As long as etcd's own simple tokens. Members that share a cluster give different tokens.
        let token = format!("canned-{:05x}-{login:05}.17", self.id);
        Ok(framed(&AuthenticateResponse { header: Some(self.header()), token }))
    }

    fn range(&self, asked: &RangeRequest) -> Bytes {
        let answer = match asked.key.as_ref() {
            SMALL_KEY => &self.small,
            LARGE_KEY => &self.large,
            _ => return self.range_answer(&asked.key, VALUE),
        };
        let (mut answer, revision) = (answer.borrow_mut(), self.revision.get());
        if answer.revision != revision {
            let length = if asked.key == LARGE_KEY { LARGE_VALUE } else { VALUE };
            *answer = RangeAnswer { revision, frame: self.range_answer(&asked.key, length) };
        }
        answer.frame.clone()
    }

    fn range_answer(&self, key: &Bytes, length: usize) -> Bytes {
        let kv = KeyValue {
            key: key.clone(),
            create_revision: FIRST_REVISION,
            mod_revision: FIRST_REVISION,
            version: 1,
            value: vec![b'v'; length].into(),
            lease: 0,
        };
        framed(&RangeResponse { header: Some(self.header()), kvs: vec![kv], more: false, count: 1 })
    }

    fn put(&self, asked: PutRequest) -> Bytes {
        self.revision.set(self.revision.get() + 1);
        let header = self.header();
        self.watches.deliver(asked, &header);
        framed(&PutResponse { header: Some(header), prev_kv: None })
    }

    fn status(&self) -> StatusResponse {
        StatusResponse {
            header: Some(self.header()),
            version: "3.5.30".to_owned(),
            db_size: 1024 * 1024,
            leader: LEADER,
            raft_index: 1000,
            raft_term: TERM,
            raft_applied_index: 1000,
            db_size_in_use: 1024 * 1024,
            ..StatusResponse::default()
        }
    }

    fn member_list(&self) -> MemberListResponse {
        let members = (LEADER..).zip(&self.cluster).map(|(id, address)| {
            let url = format!("http://{address}");
            Member {
                id,
                name: format!("canned-{}", id - LEADER),
                peer_ur_ls: vec![url.clone()],
                client_ur_ls: vec![url],
                is_learner: false,
            }
        });
        MemberListResponse { header: Some(self.header()), members: members.collect() }
    }
}
