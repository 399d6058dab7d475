//! The page `/metrics` of the admin address: its formats, its series and their labels.

use std::net::SocketAddr;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use keyward::admin;
use keyward::members::membership::AuthSetting;
use keyward::refusal::Code;
use keyward::tasks::Tasks;
use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair, date_time_ymd};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::member::Member;
use crate::rig::{Keyward, one_member, real};
use crate::words::{RANGE, range, ranged};

/// Opens the admin address of `keyward`.
async fn admin_address(keyward: &Keyward) -> SocketAddr {
    let listener = admin::bind(([127, 0, 0, 1], 0).into()).await.expect("bound");
    let address = listener.local_addr().expect("an address");
    keyward.tasks.spawn("admin", keyward.serve_admin(listener)).detach();
    address
}

/// The head and the body of `/metrics`, requested with further header lines.
async fn scrape(address: SocketAddr, headers: &str) -> (String, String) {
    let mut stream = TcpStream::connect(address).await.expect("connected");
    let request = format!("GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{headers}\r\n");
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

#[test]
fn calls_bytes_and_refusals_are_told_by_listener_and_reason() {
    real(async {
        let member = Member::new(1, &Tasks::default());
        let keyward = Keyward::with_auth(&[&member]);
        let address = admin_address(&keyward).await;
        let nobody = keyward.client().await;
        let refused = nobody.call(RANGE, range("k")).await;
        assert_eq!(refused.end.code(), Some(Code::InvalidArgument));
        let (_, before) = scrape(address, "").await;
        for line in [
            "keyward_calls_refused_total{reason=\"no_identity\"} 1",
            "keyward_calls_refused_total{reason=\"policy\"} 0",
            "keyward_listener_calls_total{listener=\"clients\",code=\"InvalidArgument\"} 1",
            "keyward_listener_call_duration_seconds_count{listener=\"clients\"} 1",
            "keyward_configured_limit{limit=\"limits.connections\"} 10000",
            "keyward_member_alarm{member=\"1\",alarm=\"nospace\"} 0",
            "keyward_member_learner{member=\"1\"} 0",
            "keyward_degraded 0",
        ] {
            assert!(before.lines().any(|found| found == line), "{line}: {before}");
        }
        let client = keyward.logged_in("alice").await;
        let (sent, received) = ("keyward_listener_sent_bytes_total", "keyward_listener_received_bytes_total");
        let script = async { member.called(RANGE).await.reply(&ranged(1)).await };
        let (answer, ()) = tokio::join!(client.call(RANGE, range("k")), script);
        assert_eq!(answer.end.code(), Some(Code::Ok));
        let (_, after) = scrape(address, "").await;
        assert!(value(&after, sent) > value(&before, sent), "{after}");
        // The login is no request of a member, and not counted.
        assert!(value(&after, received) > 5.0, "{after}");
        assert!(
            !keyward.metrics.text().expect("text").contains("keyward_ready"),
            "on the admin address only"
        );
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
        // A test runner may run the test on its own thread.
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let other = std::thread::spawn(move || ended.recv());
        let (_, page) = scrape(admin_address(&keyward).await, "").await;
        drop(end);
        assert!(other.join().expect("no panic").is_err());
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
        assert!(value(&page, "process_threads") >= 2.0, "this thread, and the other");
        let (resident, all) =
            (value(&page, "process_resident_memory_bytes"), value(&page, "process_virtual_memory_bytes"));
        assert!(resident > 1_000_000.0 && resident < all, "{resident} {all}");
        // The page of a client listener tells nothing about the process.
        assert!(!keyward.metrics.text().expect("text").contains("process_"));
    });
}

/// Writes a certificate with this common name, valid until the year begins, and its key.
fn write_certificate(folder: &Path, name: &str, year: i32) {
    let mut params = CertificateParams::new(vec!["keyward.test".to_owned()]).expect("a name");
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    params.not_after = date_time_ymd(year, 1, 1);
    let key = KeyPair::generate().expect("a key");
    let write = |kind: &str, pem: String| {
        std::fs::write(folder.join(name).with_extension(kind), pem).expect("written");
    };
    write("crt", params.self_signed(&key).expect("signed").pem());
    write("key", key.serialize_pem());
}

#[test]
fn the_configuration_and_its_certificates_are_shown() {
    real(async {
        let folder = tempfile::tempdir().expect("a folder");
        write_certificate(folder.path(), "server", 2100);
        write_certificate(folder.path(), "client", 2101);
        write_certificate(folder.path(), "alice", 2102);
        let listener = "tls = { cert = \"server.crt\", key = \"server.key\" }\n";
        let lines = "endpoints = [\"https://127.0.0.1:1\"]\n\
                     tls = { ca = \"client.crt\", cert = \"client.crt\", key = \"client.key\" }\n\
                     [[user]]\nname = \"alice\"\ncert = \"alice.crt\"\nkey = \"alice.key\"\n";
        let member = Member::new(1, &Tasks::default());
        let keyward = Keyward::at(&[&member], AuthSetting::On, folder.path(), listener, lines);
        let (_, page) = scrape(admin_address(&keyward).await, "").await;
        let ends = "keyward_certificate_not_after_timestamp_seconds";
        let mut shown: Vec<&str> = page.lines().filter_map(|line| line.strip_prefix(ends)).collect();
        shown.sort_unstable();
        let expected = [
            "{use=\"listener\",name=\"clients\"} 4102444800",
            "{use=\"members\",name=\"cluster.tls\"} 4133980800",
            "{use=\"members_ca\",name=\"cluster.tls\"} 4133980800",
            "{use=\"user\",name=\"alice\"} 4165516800",
        ];
        assert_eq!(shown, expected);
        assert_eq!(value(&page, "keyward_config_last_reload_successful"), 1.0);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("a time after 1970").as_secs_f64();
        let age = now - value(&page, "keyward_config_last_reload_attempt_timestamp_seconds");
        assert!((0.0..120.0).contains(&age), "{age}");
        // The page of a client listener names no etcd user.
        assert!(!keyward.metrics.text().expect("text").contains("alice"));
    });
}
