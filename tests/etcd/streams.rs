//! Many gRPC streams over few connections, all driven by the test's own thread.
//!
//! Owns: connections, streams, and the words of the Watch service as a test says them. Must not know Keyward: it speaks to a member
//! as well.

use std::net::SocketAddr;

use bytes::Bytes;
use h2::client::{ResponseFuture, SendRequest};
use h2::{RecvStream, SendStream};
use http::{Method, Request};
use keyward::pb::etcdserverpb::watch_request::RequestUnion;
use keyward::pb::etcdserverpb::{
    DeleteRangeRequest, DeleteRangeResponse, PutRequest, RangeRequest, RangeResponse, RequestOp, TxnRequest,
    TxnResponse, WatchCreateRequest, WatchRequest, WatchResponse, request_op,
};
use keyward::rpc::frame::{FrameReader, encode};
use keyward::tasks::{TaskHandle, Tasks};
use prost::Message;
use tokio::net::TcpStream;

const WATCH: &str = "/etcdserverpb.Watch/Watch";
const LARGEST: usize = 1 << 30;

/// A connection, to Keyward or to a member.
pub(crate) struct Connection {
    requests: SendRequest<Bytes>,
    authority: SocketAddr,
    _driven: TaskHandle,
}

/// One open Watch stream.
pub(crate) struct Stream {
    pub(crate) asks: Asks,
    pub(crate) says: Says,
}

/// The client's half.
pub(crate) struct Asks(SendStream<Bytes>);

/// The server's half.
pub(crate) struct Says {
    response: Option<ResponseFuture>,
    body: Option<RecvStream>,
    reader: FrameReader,
}

impl Connection {
    pub(crate) async fn open(tasks: &Tasks, address: SocketAddr) -> Connection {
        let tcp = TcpStream::connect(address).await.expect("it listens");
        tcp.set_nodelay(true).expect("TCP takes nodelay");
        let mut builder = h2::client::Builder::new();
        builder.initial_window_size(1 << 20).initial_connection_window_size(1 << 30);
        let (requests, connection) = builder.handshake(tcp).await.expect("HTTP/2");
        let drive = async move { drop(connection.await) };
        Connection { requests, authority: address, _driven: tasks.spawn("a test's connection", drive) }
    }

    async fn begin(&self, path: &str) -> (ResponseFuture, SendStream<Bytes>) {
        self.begin_with(path, &[]).await
    }

    async fn begin_with(&self, path: &str, fields: &[(&str, &str)]) -> (ResponseFuture, SendStream<Bytes>) {
        let mut request = Request::builder()
            .method(Method::POST)
            .uri(format!("http://{}{path}", self.authority))
            .header("content-type", "application/grpc")
            .header("te", "trailers");
        for (name, value) in fields {
            request = request.header(*name, *value);
        }
        let request = request.body(()).expect("a request");
        let mut requests = self.requests.clone().ready().await.expect("the connection lives");
        requests.send_request(request, false).expect("the connection lives")
    }

    /// Sends a put of this key and does not wait for its answer, a PutResponse.
    pub(crate) async fn send_put(&self, key: &str) -> Says {
        let put = PutRequest { key: key.to_owned().into(), value: "v".into(), ..PutRequest::default() };
        let (response, mut send) = self.begin("/etcdserverpb.KV/Put").await;
        send.send_data(encode(&put.encode_to_vec()), true).expect("the stream lives");
        Says::new(response)
    }

    /// A unary call's answer; `None` where it failed.
    pub(crate) async fn call<T: Message + Default>(&self, path: &str, message: &impl Message) -> Option<T> {
        let (response, mut send) = self.begin(path).await;
        // h2 keeps what the window has no room for yet.
        send.send_data(encode(&message.encode_to_vec()), true).ok()?;
        let mut says = Says::new(response);
        T::decode(says.message().await?).ok()
    }

    /// Writes all of these in one transaction. Its revision, where it was answered.
    pub(crate) async fn put(&self, pairs: impl Iterator<Item = (String, Vec<u8>)>) -> Option<i64> {
        let put = |(key, value): (String, Vec<u8>)| RequestOp {
            request: Some(request_op::Request::RequestPut(PutRequest {
                key: key.into(),
                value: value.into(),
                ..PutRequest::default()
            })),
        };
        let txn = TxnRequest { success: pairs.map(put).collect(), ..TxnRequest::default() };
        let done: TxnResponse = self.call("/etcdserverpb.KV/Txn", &txn).await?;
        done.header.map(|header| header.revision)
    }

    /// Deletes all keys that begin with this. The revision of that, where it was answered.
    pub(crate) async fn delete(&self, prefix: &str) -> Option<i64> {
        let WatchCreateRequest { key, range_end, .. } = watch_of(prefix, true, 0);
        let delete = DeleteRangeRequest { key, range_end, ..DeleteRangeRequest::default() };
        let done: DeleteRangeResponse = self.call("/etcdserverpb.KV/DeleteRange", &delete).await?;
        done.header.map(|header| header.revision)
    }

    /// The revision that the cluster is at.
    pub(crate) async fn head(&self) -> i64 {
        let range = RangeRequest { key: "k".into(), count_only: true, ..RangeRequest::default() };
        let ranged: Option<RangeResponse> = self.call("/etcdserverpb.KV/Range", &range).await;
        ranged.and_then(|ranged| ranged.header).expect("an answer").revision
    }

    /// Opens a stream of this path with these fields of metadata; nothing is sent on it.
    pub(crate) async fn open_with(&self, path: &str, fields: &[(&str, &str)]) -> Stream {
        let (response, send) = self.begin_with(path, fields).await;
        Stream { asks: Asks(send), says: Says::new(response) }
    }

    /// Opens a Watch stream; it comes to be with its first message.
    pub(crate) async fn watch(&self) -> Stream {
        let (response, send) = self.begin(WATCH).await;
        Stream { asks: Asks(send), says: Says::new(response) }
    }
}

impl Asks {
    /// Creates a watch. Whatever it is sent, the window has room for it in these tests.
    pub(crate) fn create(&mut self, create: WatchCreateRequest) {
        let request = RequestUnion::CreateRequest(create);
        let message = WatchRequest { request_union: Some(request) }.encode_to_vec();
        self.0.send_data(encode(&message), false).expect("the stream lives");
    }
}

impl Asks {
    /// Sends a message, and nothing after it where it is the last.
    pub(crate) fn send(&mut self, message: &impl Message, last: bool) {
        self.0.send_data(encode(&message.encode_to_vec()), last).expect("the stream lives");
    }
}

impl Says {
    fn new(response: ResponseFuture) -> Says {
        Says { response: Some(response), body: None, reader: FrameReader::new(LARGEST) }
    }

    /// The next message; `None` at the end, whatever it is. Cancel-safe.
    pub(crate) async fn message(&mut self) -> Option<Bytes> {
        if let Some(response) = &mut self.response {
            let body = response.await.ok()?.into_body();
            self.response = None;
            self.body = Some(body);
        }
        let body = self.body.as_mut()?;
        loop {
            if let Some(message) = self.reader.next() {
                return Some(message.expect("frames are sound"));
            }
            let data = body.data().await?.ok()?;
            // The window may be gone with its connection.
            drop(body.flow_control().release_capacity(data.len()));
            self.reader.push(data);
        }
    }

    /// Reads to the end: gRPC's code and text; `None` where the stream or its connection broke.
    pub(crate) async fn status(&mut self) -> Option<(String, String)> {
        let told = |fields: &http::HeaderMap| {
            let field = |name| fields.get(name)?.to_str().ok().map(str::to_owned);
            Some((field("grpc-status")?, field("grpc-message").unwrap_or_default()))
        };
        if let Some(response) = self.response.take() {
            let (head, body) = response.await.ok()?.into_parts();
            if let Some(status) = told(&head.headers) {
                return Some(status);
            }
            self.body = Some(body);
        }
        let body = self.body.as_mut()?;
        while let Some(data) = body.data().await {
            drop(body.flow_control().release_capacity(data.ok()?.len()));
        }
        told(&body.trailers().await.ok()??)
    }

    /// The next WatchResponse; `None` at the end.
    pub(crate) async fn next(&mut self) -> Option<WatchResponse> {
        Some(WatchResponse::decode(self.message().await?).expect("a WatchResponse"))
    }
}

/// A create of a watch of `key`, or of all that begin with it, from `start` on.
pub(crate) fn watch_of(key: &str, prefix: bool, start_revision: i64) -> WatchCreateRequest {
    let mut end = key.as_bytes().to_vec();
    if let Some(last) = end.last_mut() {
        *last += 1;
    }
    let range_end = if prefix { end } else { Vec::new() };
    WatchCreateRequest {
        key: key.to_owned().into(),
        range_end: range_end.into(),
        start_revision,
        ..WatchCreateRequest::default()
    }
}
