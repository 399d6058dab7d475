//! The page `/metrics` of the admin address: its series, their labels and their units.

use std::net::SocketAddr;
use std::sync::Arc;

use keyward::admin;
use keyward::refusal::Code;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::rig::{Keyward, one_member, real};
use crate::words::{RANGE, range, ranged};

/// Opens the admin address of `keyward`.
async fn admin_address(keyward: &Keyward) -> SocketAddr {
    let listener = admin::bind(([127, 0, 0, 1], 0).into()).await.expect("bound");
    let address = listener.local_addr().expect("an address");
    let state = Arc::clone(&keyward.admin().state);
    keyward.tasks.spawn("admin", admin::serve(listener, state, keyward.tasks.clone())).detach();
    address
}

/// The head and the body of `/metrics`, requested with further header lines.
async fn scrape(address: SocketAddr, headers: &str) -> (String, String) {
    let mut stream = TcpStream::connect(address).await.expect("connected");
    let request = format!("GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{headers}\r\n");
    stream.write_all(request.as_bytes()).await.expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.expect("UTF-8");
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head and a body");
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
    (head.to_owned(), body.to_owned())
}

#[test]
fn calls_are_counted_by_the_name_of_their_code() {
    real(async {
        let (member, keyward) = one_member();
        let address = admin_address(&keyward).await;
        let client = keyward.client().await;
        let script = async {
            member.called(RANGE).await.reply(&ranged(1)).await;
            member.called(RANGE).await.refuse(Code::PermissionDenied, "etcdserver: permission denied");
        };
        let calls = async {
            client.call(RANGE, range("k")).await;
            client.call(RANGE, range("k")).await
        };
        let (last, ()) = tokio::join!(calls, script);
        assert_eq!(last.end.code(), Some(Code::PermissionDenied));
        let (_, body) = scrape(address, "").await;
        for code in ["OK", "PermissionDenied"] {
            let line = format!("keyward_calls_total{{method=\"{RANGE}\",code=\"{code}\"}} 1\n");
            assert!(body.contains(&line), "{line}{body}");
        }
    });
}
