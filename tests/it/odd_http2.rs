//! HTTP/2 that no client library writes and etcd serves: refused here, and how much goes with it.

use std::time::Duration;

use http::Request;
use keyward::rpc::frame::unary;

use crate::member::Member;
use crate::raw_client::{DATA, GOAWAY, PROTOCOL_ERROR, RST_STREAM, RawClient};
use crate::rig::{Keyward, one_member, paused, settled};
use crate::words::{RANGE, WATCH, create_of, created, event, range, ranged, watch};

const ENHANCE_YOUR_CALM: [u8; 4] = [0, 0, 0, 0xb];

/// A connection with an ordinary call behind it, which is out of the hands of the authority shim.
async fn in_use(keyward: &Keyward, member: &Member) -> RawClient {
    let mut raw = RawClient::connect(keyward).await;
    raw.asks(1, "etcd").await;
    served(&mut raw, member).await;
    raw
}

async fn served(raw: &mut RawClient, member: &Member) {
    member.called(RANGE).await.reply(&ranged(7)).await;
    assert!(raw.next(DATA).await.expect("an answer").ends_with(&ranged(7)));
}

#[test]
fn an_upper_case_name_of_a_field_ends_the_connection() {
    paused(async {
        let (member, keyward) = one_member();
        let mut raw = in_use(&keyward, &member).await;
        raw.asks_with(3, "etcd", &[("X-Upper", "x")]).await;
        let last = raw.next(GOAWAY).await.expect("a GOAWAY");
        assert_eq!(last[4..8], PROTOCOL_ERROR);
        assert_eq!(raw.next(255).await, None, "closed");
        assert!(member.was_called_again().is_none());
    });
}

#[test]
fn a_head_of_many_frames_ends_the_connection() {
    paused(async {
        let (member, keyward) = one_member();
        let mut raw = in_use(&keyward, &member).await;
        raw.asks_in_frames(3, 6).await;
        served(&mut raw, &member).await;
        raw.asks_in_frames(5, 30).await;
        let last = raw.next(GOAWAY).await.expect("a GOAWAY");
        assert_eq!(last[4..8], ENHANCE_YOUR_CALM);
        assert!(member.was_called_again().is_none());
    });
}

#[test]
fn fields_that_http2_forbids_end_their_stream_alone() {
    paused(async {
        let (member, keyward) = one_member();
        let mut raw = in_use(&keyward, &member).await;
        let mut stream = 3;
        for field in
            [("te", "gzip"), ("transfer-encoding", "chunked"), ("connection", "x"), ("content-length", "1")]
        {
            raw.asks_with(stream, "etcd", &[field]).await;
            assert_eq!(raw.next(RST_STREAM).await.expect("refused"), PROTOCOL_ERROR, "{field:?}");
            stream += 2;
        }
        raw.asks(stream, "").await;
        assert_eq!(raw.next(RST_STREAM).await.expect("refused"), PROTOCOL_ERROR, "an empty authority");
        settled().await;
        assert!(member.was_called_again().is_none());
        raw.asks(stream + 2, "etcd").await;
        served(&mut raw, &member).await;
    });
}

#[test]
fn of_two_time_limits_the_first_counts() {
    paused(async {
        let (member, keyward) = one_member();
        let mut raw = in_use(&keyward, &member).await;
        raw.asks_with(3, "etcd", &[("grpc-timeout", "9S"), ("grpc-timeout", "1S")]).await;
        let call = member.called(RANGE).await;
        assert_eq!(call.headers.get_all("grpc-timeout").iter().count(), 1);
        tokio::time::sleep(Duration::from_secs(5)).await;
        call.reply(&ranged(7)).await;
        assert!(raw.next(DATA).await.expect("an answer").ends_with(&ranged(7)));
    });
}

/// etcd answers it with the status 400 of HTTP, and the same status of gRPC.
#[test]
fn a_malformed_time_limit_is_refused_over_a_status_of_200() {
    paused(async {
        let (member, keyward) = one_member();
        let client = keyward.client().await;
        let request = Request::post(format!("http://keyward.test{RANGE}"))
            .version(http::Version::HTTP_2)
            .header("content-type", "application/grpc")
            .header("grpc-timeout", "soon")
            .body(())
            .expect("a request");
        let (response, _sending) = client.sender().send_request(request, true).expect("sent");
        let answer = response.await.expect("an answer");
        assert_eq!(
            (answer.status(), &answer.headers()["grpc-status"]),
            (http::StatusCode::OK, &"13".parse().expect("a value"))
        );
        assert!(member.was_called_again().is_none());
    });
}

/// etcd takes lists of up to 16 MiB.
#[test]
fn a_header_list_over_the_limit_is_answered_with_431_and_touches_no_other_call() {
    paused(async {
        let (member, keyward) = one_member();
        let client = keyward.client().await;
        let mut request = Request::post(format!("http://keyward.test{RANGE}"))
            .version(http::Version::HTTP_2)
            .header("content-type", "application/grpc");
        for _ in 0..80 {
            request = request.header("x-more", "v".repeat(1000));
        }
        let request = request.body(()).expect("a request");
        let (response, _sending) = client.sender().send_request(request, true).expect("sent");
        let status = response.await.expect("an answer").status();
        assert_eq!(status, http::StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE);
        let script = async { member.called(RANGE).await.reply(&ranged(1)).await };
        tokio::join!(client.call(RANGE, range("k")), script).0.message();
    });
}

/// As at etcd: Erlang's eetcd takes one message from a frame, and leaves the others unseen.
#[test]
fn each_message_of_a_stream_begins_in_a_frame_of_its_own() {
    paused(async {
        let (member, keyward) = one_member();
        let client = keyward.client().await;
        let mut stream = client.open(WATCH).await.expect("open");
        stream.say(&watch("k", 5)).await;
        let mut call = member.called(WATCH).await;
        let create = create_of(&call.messages.next().await.expect("a create")).expect("a create");
        call.say(&created(create.watch_id, 9)).await.expect("taken");
        let mut body = stream.body().await;
        let first = body.data().await.expect("created").expect("created");
        body.flow_control().release_capacity(first.len()).expect("released");
        // More than a queue of the stream holds, the messages of one revision in one write of the member.
        for revision in 10..210 {
            call.say(&event(create.watch_id, revision, 1)).await.expect("taken");
        }
        settled().await;
        for revision in 10..210 {
            let data = body.data().await.expect("more").expect("more");
            body.flow_control().release_capacity(data.len()).expect("released");
            assert!(unary(&data).is_ok(), "one message in a frame, at {revision}");
        }
    });
}
