//! Kept connections of HTTP/1.1, of clients that do not repeat a POST by themselves: none is closed under a request, at its age, in a
//! hand-over, or in a drain. etcd never closes one.

use std::net::SocketAddr;
use std::process::ExitStatus;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;

use crate::harness::binary::full;
use crate::harness::client::{lifetime, lines};
use crate::harness::client_program::client_program;
use crate::harness::keyward::{Keyward, Site};
use crate::harness::process::Process;
use crate::harness::{Cluster, Options, versions};

/// Of http.client (below requests), Node's agent, Java's HttpClient.
const CLIENTS: [&str; 3] = ["python", "node", "java"];
const PATH: &str = "/v3/kv/put";
const DOCUMENT: &str = r#"{"key":"L2tlcHQ=","value":"dg=="}"#;
/// Connections of each client.
const CONNECTIONS: usize = 8;
const AGE: Duration = Duration::from_secs(2);
const LIMIT: Duration = Duration::from_secs(60);
/// Between two tries to connect.
const PAUSE: Duration = Duration::from_millis(20);

/// A program with connections of its own.
struct Requests {
    process: Process,
    /// After the process, whose log is in it.
    _folder: TempDir,
}

impl Requests {
    async fn start(client: &str, address: SocketAddr) -> Requests {
        let folder = tempfile::Builder::new().prefix("kept-").tempdir().expect("a temporary folder");
        let (address, connections) = (address.to_string(), CONNECTIONS.to_string());
        let args = [address.as_str(), PATH, DOCUMENT, &connections];
        let program = client_program("kept", &[client]);
        let process = Process::start(client, &program, args, &[], &folder.path().join("record"));
        let ready = |output: &str, exit: Option<ExitStatus>| {
            assert!(exit.is_none(), "{client} ended: {output}");
            output.contains("\"ready\"").then_some(())
        };
        process.wrote_or_ended(LIMIT, "that it is ready", ready).await;
        Requests { process, _folder: folder }
    }

    /// Its summary, after SIGTERM.
    async fn summary(self) -> Value {
        self.process.signal(Signal::TERM);
        let summary = |output: &str| lines(output).into_iter().find(|line| line["kind"] == "summary");
        self.process.wrote(LIMIT, "a summary", summary).await
    }
}

/// The same over bare sockets.
#[derive(Default)]
struct BareSockets {
    answered: AtomicU64,
    unanswered: AtomicU64,
    closes: AtomicU64,
    has_ended: AtomicBool,
}

impl BareSockets {
    async fn run(&self, address: SocketAddr) {
        let request = format!(
            "POST {PATH} HTTP/1.1\r\nHost: {address}\r\nContent-Length: {}\r\n\r\n{DOCUMENT}",
            DOCUMENT.len()
        );
        while !self.has_ended.load(Ordering::Relaxed) {
            let Ok(socket) = TcpStream::connect(address).await else {
                tokio::time::sleep(PAUSE).await;
                continue;
            };
            let mut socket = BufReader::new(socket);
            while !self.has_ended.load(Ordering::Relaxed) {
                let Ok(closes) = BareSockets::ask(&mut socket, &request).await else {
                    self.unanswered.fetch_add(1, Ordering::Relaxed);
                    break;
                };
                self.answered.fetch_add(1, Ordering::Relaxed);
                if closes {
                    self.closes.fetch_add(1, Ordering::Relaxed);
                    break;
                }
            }
        }
    }

    /// One request; whether its answer says that the connection closes.
    async fn ask(socket: &mut BufReader<TcpStream>, request: &str) -> std::io::Result<bool> {
        socket.write_all(request.as_bytes()).await?;
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            if socket.read_line(&mut head).await? == 0 {
                return Err(std::io::ErrorKind::UnexpectedEof.into());
            }
        }
        let head = head.to_ascii_lowercase();
        assert!(head.starts_with("http/1.1 200"), "{head}");
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).expect("a length");
        let mut body = vec![0; length.parse().expect("a number")];
        socket.read_exact(&mut body).await?;
        Ok(head.contains("connection: close\r\n"))
    }

    fn summary(&self) -> Value {
        let [answered, unanswered, closes] =
            [&self.answered, &self.unanswered, &self.closes].map(|count| count.load(Ordering::Relaxed));
        serde_json::json!({"answered": answered, "unanswered": unanswered, "wrong": 0, "closes": closes})
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_request_on_a_kept_connection_is_left_without_an_answer() {
    let version = versions().pop().expect("a version");
    let cluster = Cluster::start(&version, Options::default()).await;
    let site = Site::new();
    let config = format!(
        "{}admin.socket = {:?}\nlimits.connection_age = \"{}s\"\n",
        site.in_front_of(&cluster),
        site.file("admin.sock"),
        AGE.as_secs(),
    );
    let keyward = Keyward::start(site, &config).await;
    let address = keyward.site().listen;
    let bare = BareSockets::default();
    let script = async {
        let mut clients = Vec::new();
        for client in CLIENTS {
            clients.push((client, Requests::start(client, address).await));
        }
        lifetime(if full() { Duration::from_secs(60) } else { 2 * AGE }).await;
        let (ended, keyward) = keyward.succeeded(&config).await;
        assert_eq!(ended.code(), Some(0), "the process before drains and ends well");
        lifetime(AGE).await;
        let (ended, _site) = keyward.terminate().await;
        assert_eq!(ended.code(), Some(0), "the drain ends well");
        bare.has_ended.store(true, Ordering::Relaxed);
        clients
    };
    let sockets = join_all((0..CONNECTIONS).map(|_| bare.run(address)));
    let (clients, _) = tokio::join!(script, sockets);

    let mut summaries = vec![("bare sockets", bare.summary())];
    for (client, requests) in clients {
        summaries.push((client, requests.summary().await));
    }
    for (client, summary) in &summaries {
        println!("{version}: {client}: {summary}");
    }
    for (client, summary) in &summaries {
        assert!(summary["answered"].as_u64().is_some_and(|count| count > 100), "{client}: {summary}");
        assert_eq!(summary["unanswered"], 0, "{client}: {summary}");
        assert_eq!(summary["wrong"], 0, "{client}: {summary}");
        // Java's client hides the field.
        let is_told = *client == "java" || summary["closes"].as_u64().is_some_and(|count| count > 0);
        assert!(is_told, "{client}: {summary}");
    }
}
