//! A watch of the crate etcd-client (on h2, as Keyward) that is not read, while small events come: as at etcd directly. h2's client ends a
//! connection on which very many small DATA frames are unread, and etcd and Keyward send a frame for each event (decision 37).

use std::net::SocketAddr;
use std::process::ExitStatus;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream;
use keyward::pb::etcdserverpb::PutRequest;
use keyward::pb::etcdserverpb::kv_client::KvClient;
use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;
use tonic::transport::{Channel, Endpoint};

use crate::harness::client::lines;
use crate::harness::client_program::client_program;
use crate::harness::keyward::{Keyward, Site};
use crate::harness::process::Process;
use crate::harness::{Cluster, Options, versions};

const LIMIT: Duration = Duration::from_secs(60);
const KEY: &str = "/unread/k";
/// Bytes of an event's value.
const VALUE: usize = 40;
/// Puts under way at a time: few, so that etcd has sent the event of each before it would join many in one message.
const AT_ONCE: usize = 16;

struct UnreadWatch {
    process: Process,
    /// After the process, whose log is in it.
    _folder: TempDir,
}

impl UnreadWatch {
    async fn start(address: SocketAddr) -> UnreadWatch {
        let folder = tempfile::Builder::new().prefix("unread-").tempdir().expect("a temporary folder");
        let address = address.to_string();
        let args = ["unread", "--endpoints", &address, "--prefix", "/unread/"];
        let program = client_program("rust", &[]);
        let process = Process::start("etcd-client", &program, args, &[], &folder.path().join("record"));
        let ready = |output: &str, exit: Option<ExitStatus>| {
            assert!(exit.is_none(), "it ended: {output}");
            output.contains("\"ready\"").then_some(())
        };
        process.wrote_or_ended(LIMIT, "that it is ready", ready).await;
        UnreadWatch { process, _folder: folder }
    }

    /// What it sees once it reads.
    async fn read(&self) -> Value {
        self.process.signal(Signal::USR2);
        let read = |output: &str| lines(output).into_iter().find(|line| line["kind"] == "read");
        self.process.wrote(LIMIT, "what it has read", read).await
    }
}

async fn write(kv: &KvClient<Channel>, events: usize) {
    let put = |value: Vec<u8>| {
        let mut kv = kv.clone();
        async move {
            let put = PutRequest { key: KEY.into(), value: value.into(), ..PutRequest::default() };
            kv.put(put).await.expect("a put");
        }
    };
    stream::iter(0..events)
        .map(|_| put(vec![b'v'; VALUE]))
        .buffer_unordered(AT_ONCE)
        .collect::<Vec<()>>()
        .await;
    put(b"last".to_vec()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unread_watch_of_h2s_client_ends_where_it_ends_at_etcd() {
    for version in versions() {
        for events in [5_000, 40_000] {
            let cluster = Cluster::start(&version, Options::default()).await;
            let site = Site::new();
            let config = site.in_front_of(&cluster);
            let keyward = Keyward::start(site, &config).await;
            let directly = UnreadWatch::start(cluster.address(0)).await;
            let through = UnreadWatch::start(keyward.site().listen).await;
            let endpoint = Endpoint::new(format!("http://{}", cluster.address(0))).expect("an address");
            let kv = KvClient::new(endpoint.connect().await.expect("a connection"));
            write(&kv, events).await;
            let (directly, through) = (directly.read().await, through.read().await);
            println!("etcd {version}: {events} events: directly {directly}, through Keyward {through}");
            assert_eq!(directly["code"], through["code"], "{version}: {directly}, through Keyward {through}");
        }
    }
}
