//! The sinks beside the audit file, dead, slow or false, in a process that is killed: the file waits for none of them, none counts as
//! sent what its receiver has not, and after the next start each has every line of the file.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::Duration;

use keyward::telemetry::otlp_messages::{OtlpLogsRequest, OtlpValueKind};
use prost::Message as _;
use socket2::{Domain, Socket, Type};

use crate::caller::Caller;
use crate::harness::binary::Version;
use crate::harness::keyward::{Keyward, Site, program};
use crate::harness::{Auth, Cluster, Options, wait};
use crate::revocations::command;
use crate::rewatch::local;

/// More than a pipe holds, and more than a few batches of the writer.
const CHANGES: usize = 300;
const LIMIT: Duration = Duration::from_secs(60);

/// What is wrong with a collector.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Fault {
    None,
    /// The port takes no connection.
    Dead,
    /// Each answer takes so long.
    Slow(Duration),
    /// A head of an answer, with its body, and nothing is taken.
    Answer(&'static str),
    /// No answer.
    Silent,
}

/// What the thread of the collector and the test share.
struct Shared {
    fault: Mutex<Fault>,
    healed: Condvar,
    lines: Mutex<BTreeSet<String>>,
}

/// A scripted collector of OTLP logs.
pub(crate) struct Collector {
    socket: Option<Socket>,
    pub(crate) address: SocketAddr,
    shared: Arc<Shared>,
}

impl Collector {
    pub(crate) fn new(fault: Fault) -> Collector {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
        socket.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into()).expect("a port");
        let address = socket.local_addr().expect("bound").as_socket().expect("IPv4");
        let (fault_now, healed) = (Mutex::new(fault), Condvar::new());
        let shared = Arc::new(Shared { fault: fault_now, healed, lines: Mutex::default() });
        let mut collector = Collector { socket: Some(socket), address, shared };
        if fault != Fault::Dead {
            collector.listen();
        }
        collector
    }

    fn listen(&mut self) {
        let Some(socket) = self.socket.take() else { return };
        socket.listen(64).expect("it listens");
        let (listener, shared): (TcpListener, _) = (socket.into(), Arc::clone(&self.shared));
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let shared = Arc::clone(&shared);
                thread::spawn(move || shared.serve(stream));
            }
        });
    }

    /// What is wrong with the answers from now on.
    pub(crate) fn set(&self, fault: Fault) {
        *self.shared.fault.lock().expect("no holder panics") = fault;
        self.shared.healed.notify_all();
    }

    fn heal(&mut self) {
        self.set(Fault::None);
        self.listen();
    }

    fn lines(&self) -> BTreeSet<String> {
        self.shared.lines.lock().expect("no holder panics").clone()
    }
}

impl Shared {
    fn serve(&self, stream: TcpStream) {
        let mut stream = BufReader::new(stream);
        while let Some(body) = body_of(&mut stream) {
            let fault = *self.fault.lock().expect("no holder panics");
            match fault {
                Fault::Silent => {
                    let fault = self.fault.lock().expect("no holder panics");
                    drop(self.healed.wait_while(fault, |fault| *fault == Fault::Silent));
                    return;
                }
                Fault::Answer(answer) => {
                    drop(stream.get_mut().write_all(answer.as_bytes()));
                    continue;
                }
                Fault::Slow(time) => {
                    let now = self.fault.lock().expect("no holder panics");
                    drop(self.healed.wait_timeout_while(now, time, |now| *now == fault));
                }
                Fault::None | Fault::Dead => {}
            }
            self.lines.lock().expect("no holder panics").extend(lines_of(&body));
            drop(stream.get_mut().write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"));
        }
    }
}

/// Reads a request, and returns its body; `None` at the end of the connection.
fn body_of(stream: &mut BufReader<TcpStream>) -> Option<Vec<u8>> {
    let mut length = 0;
    loop {
        let mut line = String::new();
        if stream.read_line(&mut line).ok()? == 0 {
            return None;
        }
        if line == "\r\n" {
            break;
        }
        if let Some(told) = line.to_ascii_lowercase().strip_prefix("content-length: ") {
            length = told.trim().parse().expect("a number");
        }
    }
    let mut body = vec![0; length];
    stream.read_exact(&mut body).ok()?;
    Some(body)
}

fn lines_of(body: &[u8]) -> Vec<String> {
    let request = OtlpLogsRequest::decode(body).expect("OTLP logs");
    let scopes = request.resource_logs.into_iter().flat_map(|resource| resource.scope_logs);
    let records = scopes.flat_map(|scope| scope.log_records);
    let text = |kind| match kind {
        Some(OtlpValueKind::Text(text)) => text,
        other => panic!("{other:?}"),
    };
    records.map(|record| text(record.body.expect("a body").value)).collect()
}

fn file_lines(site: &Site) -> BTreeSet<String> {
    let text = fs::read_to_string(site.file("audit.log")).unwrap_or_default();
    // The last line may be under way.
    let whole = text.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n'));
    whole.map(str::to_owned).collect()
}

async fn cluster() -> Cluster {
    let auth = Auth::On { extra_users: 0 };
    Cluster::start(&Version::parse("3.5.35"), Options { auth, ..Options::default() }).await
}

fn config(site: &Site, cluster: &Cluster, sink: &str) -> String {
    let file = site.file("audit.log");
    let text = format!("admin.socket = \"admin.sock\"\n[audit]\nfile = {file:?}\nreplica = \"a\"\n{sink}");
    site.in_front_of(cluster) + &text
}

/// Makes the changes, and waits until the writer has written what waits: some 10 ms where it waits for nobody.
async fn change(keyward: &Keyward) {
    let alice = Caller::log_in(keyward.site().listen, "alice").await;
    for number in 0..CHANGES {
        alice.put(&format!("/a/{number}"), b"v".to_vec(), 0).await.expect("answered");
    }
    let written = async || {
        let waiting = keyward.metric("keyward_audit_records_waiting", &[]).await;
        (waiting == 0.0).then_some(())
    };
    wait::until(LIMIT, "the file has all records", written).await;
}

async fn sent(keyward: &Keyward, sink: &str) -> f64 {
    keyward.metric("keyward_audit_sent_total", &[("sink", sink)]).await
}

/// Kills Keyward. Every answered change stands in the file once.
fn kill(keyward: Keyward) -> Site {
    let site = keyward.kill();
    let lines = file_lines(&site);
    for number in 0..CHANGES {
        let key = format!("\"key\":\"/a/{number}\"");
        assert_eq!(lines.iter().filter(|line| line.contains(&key)).count(), 1, "{key}");
    }
    site
}

/// Waits until the receiver has every line of the file.
async fn all_arrive(keyward: &Keyward, what: &str, received: impl Fn() -> BTreeSet<String>) {
    let missing = async || file_lines(keyward.site()).is_subset(&received()).then_some(());
    wait::until(LIMIT, what, missing).await;
    assert_eq!(keyward.metric("keyward_audit_lost_total", &[]).await, 0.0, "{what}");
    let file = keyward.site().file("audit.log");
    let verified = std::process::Command::new(program()).args(["audit", "verify"]).arg(file).output();
    assert!(verified.expect("it runs").status.success(), "{what}");
}

async fn killed_before(cluster: &Cluster, fault: Fault) {
    let mut collector = Collector::new(fault);
    let site = Site::new();
    let sink = format!("on_full = \"drop\"\n[audit.otlp]\nurl = \"http://{}\"\n", collector.address);
    let text = config(&site, cluster, &sink);
    let keyward = Keyward::start(site, &text).await;
    change(&keyward).await;
    let sent = sent(&keyward, "otlp").await;
    assert!(sent <= collector.lines().len() as f64, "{fault:?}: {sent} lines count as sent");
    let site = kill(keyward);
    collector.heal();
    let keyward = Keyward::start(site, &text).await;
    all_arrive(&keyward, &format!("all lines after {fault:?}"), || collector.lines()).await;
    assert!(keyward.terminate().await.0.success());
}

#[test]
fn no_sink_keeps_an_answered_change_out_of_the_file_and_all_lines_arrive_after_a_kill() {
    local(async {
        let cluster = cluster().await;
        let slow = |millis| Fault::Slow(Duration::from_millis(millis));
        for fault in [
            Fault::Dead,
            slow(50),
            slow(300),
            slow(5_000),
            Fault::Answer("HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\n\r\n"),
            Fault::Answer("HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 3\r\n\r\n<p>"),
            Fault::Answer("HTTP/1.1 400 Bad Request\r\ncontent-length: 3\r\n\r\n<p>"),
            Fault::Silent,
        ] {
            killed_before(&cluster, fault).await;
        }
    });
}

/// A slow collector is a healthy one: with `on_full = "drop"` nothing is lost, and nobody is killed.
#[test]
fn a_slow_collector_gets_every_line_although_on_full_is_drop() {
    local(async {
        let cluster = cluster().await;
        let collector = Collector::new(Fault::Slow(Duration::from_millis(300)));
        let site = Site::new();
        let url = collector.address;
        let sink = format!("on_full = \"drop\"\nqueue = \"1MiB\"\n[audit.otlp]\nurl = \"http://{url}\"\n");
        let text = config(&site, &cluster, &sink);
        let keyward = Keyward::start(site, &text).await;
        change(&keyward).await;
        all_arrive(&keyward, "all lines at a slow collector", || collector.lines()).await;
    });
}

/// The text of a syslog message behind its head.
fn line_of(message: &[u8]) -> String {
    let begin = message.iter().position(|byte| *byte == b'{').expect("a record");
    String::from_utf8(message[begin..].to_vec()).expect("UTF-8")
}

#[test]
fn a_syslog_server_that_is_missing_gets_all_lines_later() {
    local(async {
        let cluster = cluster().await;
        let site = Site::new();
        let socket = site.file("syslog");
        let text = config(&site, &cluster, &format!("syslog = \"unix:{}\"\n", socket.display()));
        let keyward = Keyward::start(site, &text).await;
        change(&keyward).await;
        assert_eq!(sent(&keyward, "syslog").await, 0.0);
        let site = kill(keyward);
        let (server, lines) = (UnixDatagram::bind(&socket).expect("bound"), Arc::new(Mutex::default()));
        let received: Arc<Mutex<BTreeSet<String>>> = Arc::clone(&lines);
        thread::spawn(move || {
            let mut buffer = [0; 65_536];
            while let Ok(length) = server.recv(&mut buffer) {
                received.lock().expect("no holder panics").insert(line_of(&buffer[..length]));
            }
        });
        let keyward = Keyward::start(site, &text).await;
        let all = || lines.lock().expect("no holder panics").clone();
        all_arrive(&keyward, "all lines at the syslog server", all).await;
    });
}

/// The server's port is closed at first, though nobody else may take it.
#[test]
fn a_closed_udp_port_has_taken_nothing() {
    local(async {
        let cluster = cluster().await;
        let server = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("bound");
        let address = server.local_addr().expect("bound");
        // Connected elsewhere, the socket takes no datagram of Keyward.
        server.connect((Ipv4Addr::LOCALHOST, 9)).expect("no packet is sent");
        let site = Site::new();
        let text = config(&site, &cluster, &format!("syslog = \"udp:{address}\"\n"));
        let keyward = Keyward::start(site, &text).await;
        change(&keyward).await;
        assert_eq!(sent(&keyward, "syslog").await, 0.0);
        kill(keyward);
    });
}

#[test]
fn an_unread_stdout_delays_nothing_and_gets_the_rest_after_a_kill() {
    local(async {
        let cluster = cluster().await;
        let site = Site::new();
        let text = config(&site, &cluster, "stdout = true\n");
        let (keyward, mut unread) = Keyward::start_with_unread_stdout(site, &text).await;
        change(&keyward).await;
        let sent = sent(&keyward, "stdout").await;
        let site = kill(keyward);
        let mut piped = String::new();
        unread.read_to_string(&mut piped).expect("UTF-8");
        let piped: BTreeSet<String> = piped.lines().map(str::to_owned).collect();
        assert!(sent > 0.0 && sent <= piped.len() as f64, "{sent} of {} lines", piped.len());
        let keyward = Keyward::start(site, &text).await;
        let all = || piped.iter().cloned().chain(keyward.log().lines().map(str::to_owned)).collect();
        all_arrive(&keyward, "all lines on standard output", all).await;
    });
}

/// As logrotate does it, without a signal; the collector is dead meanwhile, and Keyward is killed.
#[test]
fn a_log_that_is_moved_goes_on_at_its_path_and_a_sink_gets_the_lines_of_the_moved_file() {
    local(async {
        let cluster = cluster().await;
        let mut collector = Collector::new(Fault::Dead);
        let site = Site::new();
        let text =
            config(&site, &cluster, &format!("[audit.otlp]\nurl = \"http://{}\"\n", collector.address));
        let keyward = Keyward::start(site, &text).await;
        change(&keyward).await;
        let file = keyward.site().file("audit.log");
        let moved = file.with_file_name("audit.log-20260102");
        fs::rename(&file, &moved).expect("moved");
        fs::write(&file, "").expect("made");
        let seen =
            async || (keyward.metric("keyward_audit_files_moved_total", &[]).await > 0.0).then_some(());
        wait::until(LIMIT, "the move is seen", seen).await;
        let alice = Caller::log_in(keyward.site().listen, "alice").await;
        alice.put("/a/later", b"v".to_vec(), 0).await.expect("answered");
        let has_later = |site: &Site| file_lines(site).iter().any(|line| line.contains("\"/a/later\""));
        let later = async || has_later(keyward.site()).then_some(());
        wait::until(LIMIT, "the record of a change in the new file", later).await;
        let (status, doctor) = command(&keyward, &["doctor"]).await;
        assert!(
            doctor.contains("audit_file_moved") && doctor.contains("audit.log-20260102"),
            "{status:?}: {doctor}"
        );
        let site = keyward.kill();
        collector.heal();
        let keyward = Keyward::start(site, &text).await;
        let all = |name: &Path| -> BTreeSet<String> {
            fs::read_to_string(name).expect("UTF-8").lines().map(str::to_owned).collect()
        };
        let of_both = || &all(&moved) | &all(&file);
        let arrived = async || of_both().is_subset(&collector.lines()).then_some(());
        wait::until(LIMIT, "the lines of both files", arrived).await;
        assert_eq!(keyward.metric("keyward_audit_lost_total", &[]).await, 0.0);
        let (_, verified) = run(&["audit".as_ref(), "verify".as_ref(), file.as_os_str(), moved.as_os_str()]);
        assert!(verified.contains("the chain is whole"), "{verified}");
    });
}

fn run(arguments: &[&OsStr]) -> (Option<i32>, String) {
    let output = std::process::Command::new(program()).args(arguments).output().expect("it runs");
    (output.status.code(), String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned())
}
