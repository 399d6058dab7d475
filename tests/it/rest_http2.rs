//! JSON over HTTP/2, beside gRPC on the same connection: the content type decides, a stream goes on whether or not the
//! client has ended its half, and a reset ends the watch at the member.

use bytes::Bytes;
use h2::client::ResponseFuture;
use h2::{Reason, RecvStream, SendStream};
use http::{Request, Response};
use serde_json::{Value, json};

use crate::client::Client;
use crate::member::Call;
use crate::rig::{one_member, paused, settled};
use crate::words::{RANGE, WATCH, create_of, created, event, range, ranged, ranged_value};

const CREATE: &str = r#"{"create_request":{"key":"aw==","start_revision":"10"}}"#;

/// Begins a JSON request on the connection of a gRPC client.
pub(crate) async fn post(
    client: &Client,
    path: &str,
    body: &str,
    ends: bool,
) -> (ResponseFuture, SendStream<Bytes>) {
    let mut send = client.sender().ready().await.expect("a stream");
    let request = Request::post(format!("http://keyward.test{path}"))
        .version(http::Version::HTTP_2)
        .header("content-type", "application/json")
        .body(())
        .expect("a request");
    let (response, mut body_of) = send.send_request(request, false).expect("sent");
    body_of.send_data(Bytes::copy_from_slice(body.as_bytes()), ends).expect("sent");
    (response, body_of)
}

/// The next line of a stream; `None` at its end.
async fn line(body: &mut RecvStream) -> Option<Value> {
    let piece = body.data().await?.expect("a piece");
    body.flow_control().release_capacity(piece.len()).expect("released");
    let line = serde_json::from_slice(&piece);
    Some(line.unwrap_or_else(|_| panic!("no JSON: {piece:?}")))
}

async fn whole(response: Response<RecvStream>) -> Value {
    let mut body = response.into_body();
    let value = line(&mut body).await.expect("a document");
    assert_eq!(line(&mut body).await, None);
    value
}

async fn accept(call: &mut Call) -> i64 {
    let create = create_of(&call.messages.next().await.expect("a request")).expect("a create");
    assert_eq!(create.start_revision, 10);
    call.say(&created(create.watch_id, 9)).await.expect("taken");
    create.watch_id
}

#[test]
fn the_content_type_divides_json_from_grpc_on_one_connection() {
    paused(async {
        let (member, keyward) = one_member();
        let client = keyward.client().await;
        let (response, _) = post(&client, "/v3/kv/range", r#"{"key":"aw=="}"#, true).await;
        member.called(RANGE).await.reply(&ranged_value(2)).await;
        let response = response.await.expect("an answer");
        assert_eq!(
            (response.status().as_u16(), &response.headers()["content-type"]),
            (200, &"application/json".parse().unwrap())
        );
        assert_eq!(whole(response).await["kvs"], json!([{"key": "aw==", "value": "Bwc="}]));

        let (response, _) = post(&client, "/v3/kv/range", r#"{"key":1}"#, true).await;
        let response = response.await.expect("an answer");
        assert_eq!(response.status(), 400);
        assert_eq!(whole(response).await["code"], json!(3));
        // The path of gRPC with JSON in the body is no call.
        let (response, _) = post(&client, RANGE, "{}", true).await;
        assert_eq!(response.await.expect("an answer").status(), 404);
        settled().await;
        assert!(member.was_called_again().is_none());

        let served = async { member.called(RANGE).await.reply(&ranged(7)).await };
        let (outcome, ()) = tokio::join!(client.call(RANGE, range("k")), served);
        assert_eq!(outcome.messages, [ranged(7)]);
    });
}

#[test]
fn a_watch_goes_on_with_and_without_the_clients_half() {
    paused(async {
        let (member, keyward) = one_member();
        let client = keyward.client().await;
        for ends in [true, false] {
            let (response, mut half) = post(&client, "/v3/watch", CREATE, ends).await;
            let mut call = member.called(WATCH).await;
            let id = accept(&mut call).await;
            let response = response.await.expect("an answer");
            assert_eq!(response.status(), 200);
            let mut body = response.into_body();
            assert_eq!(line(&mut body).await.expect("created")["result"]["created"], json!(true));
            for revision in [11, 12] {
                call.say(&event(id, revision, 2)).await.expect("taken");
                let told = line(&mut body).await.expect("an event");
                let expected = json!(revision.to_string());
                assert_eq!(told["result"]["events"][0]["kv"]["mod_revision"], expected, "ends: {ends}");
            }
            assert_eq!(keyward.metrics.streams_open.get(), 1);
            if !ends {
                half.send_reset(Reason::CANCEL);
            }
            drop((half, body));
            call.canceled().await;
            settled().await;
            assert_eq!(keyward.metrics.streams_open.get(), 0, "ends: {ends}");
        }
    });
}
