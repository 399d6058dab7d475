//! The member's side of Keyward's own calls: logins, and reads that keep a token alive. Few, so their cost is of no
//! account, and a library speaks HTTP/2.

use bytes::Bytes;
use h2::server::{self, SendResponse};
use http::{HeaderMap, HeaderValue, Request, Response};
use keyward::pb::etcdserverpb::{AuthenticateResponse, RangeResponse};
use keyward::rpc::frame::encode;
use keyward::tasks::Tasks;
use prost::Message as _;
use tokio::io::DuplexStream;
use tokio::sync::mpsc;

use crate::canned_member::header;
use crate::workload::FIRST_REVISION;

/// A token as etcd makes them.
pub(crate) const SIMPLE_TOKEN: &str = "CcqdDPNhVfcYlmaP.12";

/// Serves every connection of `dialled`.
pub(crate) async fn serve_logins(mut dialled: mpsc::Receiver<DuplexStream>, tasks: Tasks) {
    while let Some(stream) = dialled.recv().await {
        let answering = tasks.clone();
        let serve = async move {
            let mut connection = server::handshake(stream).await.expect("Keyward speaks HTTP/2");
            while let Some(Ok((request, respond))) = connection.accept().await {
                answering.spawn("answer to a call of Keyward's own", answer(request, respond)).detach();
            }
        };
        tasks.spawn("connection for logins", serve).detach();
    }
}

async fn answer(request: Request<h2::RecvStream>, mut respond: SendResponse<Bytes>) {
    let message = match request.uri().path() {
        "/etcdserverpb.Auth/Authenticate" => {
            AuthenticateResponse { header: Some(header(FIRST_REVISION)), token: SIMPLE_TOKEN.into() }
                .encode_to_vec()
        }
        "/etcdserverpb.KV/Range" => {
            RangeResponse { header: Some(header(FIRST_REVISION)), ..RangeResponse::default() }.encode_to_vec()
        }
        other => unreachable!("Keyward calls {other} by itself"),
    };
    let mut body = request.into_body();
    while let Some(data) = body.data().await {
        data.expect("a request");
    }
    let mut head = Response::new(());
    head.headers_mut().insert("content-type", HeaderValue::from_static("application/grpc"));
    let mut stream = respond.send_response(head, false).expect("Keyward waits");
    stream.send_data(encode(&message), false).expect("Keyward waits");
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", HeaderValue::from_static("0"));
    stream.send_trailers(trailers).expect("Keyward waits");
}
