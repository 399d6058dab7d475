//! The page `/metrics` of the admin address: its formats, its series and their labels.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

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

const OPEN_METRICS: &str = "content-type: application/openmetrics-text; version=1.0.0; charset=utf-8\r\n";
const PROMETHEUS_TEXT: &str = "content-type: text/plain; version=0.0.4; charset=utf-8\r\n";

/// Two scrapes at the same time share a text only if they have the same format.
#[test]
fn each_client_gets_the_format_of_its_accept_header() {
    real(async {
        let (_member, keyward) = one_member();
        let address = admin_address(&keyward).await;
        keyward.metrics.panics.inc();
        let open = "Accept: application/openmetrics-text;version=1.0.0;q=0.5,text/plain;q=0.2\r\n";
        let ((head, body), (old_head, old_body)) = tokio::join!(scrape(address, open), scrape(address, ""));
        assert!(head.contains(OPEN_METRICS), "{head}");
        assert!(body.contains("# TYPE keyward_panics counter\nkeyward_panics_total 1\n"), "{body}");
        assert!(body.contains("\n# UNIT ") && body.ends_with("\n# EOF\n"), "{body}");
        assert!(old_head.contains(PROMETHEUS_TEXT), "{old_head}");
        let counter = "# TYPE keyward_panics_total counter\nkeyward_panics_total 1\n";
        assert!(old_body.contains(counter), "{old_body}");
        assert!(!old_body.contains("# UNIT") && !old_body.contains("# EOF"), "{old_body}");
        let refused = "Accept: application/openmetrics-text;q=0, text/plain\r\n";
        let (head, _) = scrape(address, refused).await;
        assert!(head.contains(PROMETHEUS_TEXT), "{head}");
    });
}

/// The value of the first sample of this name on a page of either format.
fn value(page: &str, name: &str) -> f64 {
    let sample = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix([' ', '{']));
    let value = sample.and_then(|sample| sample.rsplit(' ').next()?.parse().ok());
    value.unwrap_or_else(|| panic!("{name}: {page}"))
}

#[test]
fn the_program_tells_its_version_and_its_process() {
    real(async {
        let (_member, keyward) = one_member();
        let (_, page) = scrape(admin_address(&keyward).await, "").await;
        let version = format!("keyward_build_info{{version=\"{}\"", env!("CARGO_PKG_VERSION"));
        assert!(page.contains(&version), "{page}");
        assert_eq!(value(&page, "keyward_build_info"), 1.0);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("a time after 1970").as_secs_f64();
        let age = now - value(&page, "process_start_time_seconds");
        assert!((-2.0..24.0 * 3600.0).contains(&age), "{age}");
        let cpu = value(&page, "process_cpu_seconds_total");
        assert!((0.0..24.0 * 3600.0).contains(&cpu), "{cpu}");
        let (open, most) = (value(&page, "process_open_fds"), value(&page, "process_max_fds"));
        assert!(open > 3.0 && open < most, "{open} {most}");
        assert!(value(&page, "process_threads") >= 2.0, "the test runner's thread, and this one");
        let (resident, all) =
            (value(&page, "process_resident_memory_bytes"), value(&page, "process_virtual_memory_bytes"));
        assert!(resident > 1_000_000.0 && resident < all, "{resident} {all}");
        // The page of a client listener tells nothing about the process.
        assert!(!keyward.metrics.text().expect("text").contains("process_"));
    });
}
