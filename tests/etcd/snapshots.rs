//! A snapshot comes from one member, as slowly as its reader reads, with any pause, and a cut in the middle is told as a cut.

use std::time::Duration;

use data_encoding::BASE64;
use keyward::pb::etcdserverpb::maintenance_client::MaintenanceClient;
use keyward::pb::etcdserverpb::{SnapshotRequest, SnapshotResponse};
use serde_json::Value;
use sha2::{Digest as _, Sha256};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpSocket;
use tokio::time::{sleep, timeout};
use tonic::{Code, Streaming};

use crate::caller::Caller;
use crate::harness::keyward::{Keyward, Site};
use crate::harness::{Cluster, Options, versions};

const SOON: Duration = Duration::from_secs(60);
/// The keys of the cluster: some 40 MB.
const KEYS: usize = 40;
const SIZE: usize = 1 << 20;

async fn snapshot(caller: &Caller) -> Streaming<SnapshotResponse> {
    let mut client = MaintenanceClient::new(caller.channel.clone());
    client.snapshot(caller.request(SnapshotRequest::default())).await.expect("a stream").into_inner()
}

/// Snapshots that a member has begun and not ended.
async fn open(cluster: &Cluster, member: usize) -> f64 {
    let of = [("grpc_method", "Snapshot")];
    let started = cluster.counter(member, "grpc_server_started_total", &of).await;
    started - cluster.counter(member, "grpc_server_handled_total", &of).await
}

#[tokio::test]
async fn a_snapshot_whose_member_dies_ends_as_cut_and_is_not_begun_again() {
    for version in versions() {
        let mut cluster = Cluster::start(&version, Options { members: 3, ..Options::default() }).await;
        let site = Site::new();
        let config = site.in_front_of(&cluster);
        let keyward = Keyward::start(site, &config).await;
        let caller = Caller::anybody(keyward.site().listen).await;
        for key in 0..KEYS {
            caller.put(&format!("/{key}"), vec![7; SIZE], 0).await.expect("written");
        }
        // Whole first: what is left after the last part is nothing, and etcd's sum over all of it comes last.
        let mut whole = snapshot(&caller).await;
        let (mut bytes, mut left) = (0, u64::MAX);
        while let Some(part) = timeout(SOON, whole.message()).await.expect("in time").expect("no error") {
            bytes += part.blob.len();
            left = part.remaining_bytes;
        }
        assert_eq!(left, 0, "{version}: the whole file");
        assert!(bytes > KEYS * SIZE && bytes % 512 == 32, "{version}: {bytes} bytes and their sum");

        let mut cut = snapshot(&caller).await;
        let mut read = timeout(SOON, cut.message())
            .await
            .expect("in time")
            .expect("no error")
            .expect("a part")
            .blob
            .len();
        let mut carriers = Vec::new();
        for member in 0..cluster.len() {
            carriers.extend((open(&cluster, member).await == 1.0).then_some(member));
        }
        let [carrier] = carriers[..] else { panic!("{version}: carried by {carriers:?}") };
        cluster.kill(carrier);
        let end = loop {
            match timeout(SOON, cut.message()).await.expect("in time") {
                Ok(Some(part)) => read += part.blob.len(),
                Ok(None) => panic!("{version}: {read} of {bytes} bytes were told as all"),
                Err(status) => break status,
            }
        };
        assert_eq!(end.code(), Code::Unavailable, "{version}: {end:?}");
        assert_eq!(end.message(), "etcdserver: request timed out, possibly due to connection lost");
        assert!(read < bytes);
        for other in (0..cluster.len()).filter(|member| *member != carrier) {
            assert_eq!(open(&cluster, other).await, 0.0, "{version}: nobody else was asked");
        }
        println!(
            "{version}: {read} of {bytes} bytes of a snapshot came, then {:?} {:?}",
            end.code(),
            end.message()
        );
    }
}

/// Longer than all times of `PAUSES`.
const PAUSE: Duration = Duration::from_secs(5);
const PAUSES: &str =
    "[limits]\nunread_timeout = \"1s\"\nclient_ping_interval = \"1s\"\nclient_ping_timeout = \"1s\"\n";

/// etcd's own sum of the file stands behind the file.
fn assert_whole(version: impl std::fmt::Display, file: &[u8]) {
    let (data, sum) = file.split_last_chunk::<32>().expect("more than the sum");
    assert_eq!(data.len() % 512, 0, "{version}");
    assert!(data.len() > KEYS * SIZE, "{version}: {} bytes", data.len());
    assert_eq!(Sha256::digest(data)[..], sum[..], "{version}");
}

#[tokio::test]
async fn a_snapshot_whose_reader_pauses_is_whole() {
    for version in versions() {
        let cluster = Cluster::start(&version, Options::default()).await;
        let site = Site::new();
        let config = site.in_front_of(&cluster) + PAUSES;
        let keyward = Keyward::start(site, &config).await;
        let caller = Caller::anybody(keyward.site().listen).await;
        for key in 0..KEYS {
            caller.put(&format!("/{key}"), vec![7; SIZE], 0).await.expect("written");
        }
        let (by_grpc, by_http) = tokio::join!(read_grpc(&caller), read_http1(keyward.site().listen));
        assert_whole(&version, &by_grpc);
        assert_whole(&version, &by_http);
        println!("{version}: snapshots of {} bytes came whole after a pause of {PAUSE:?}", by_grpc.len());
    }
}

async fn read_grpc(caller: &Caller) -> Vec<u8> {
    let mut stream = snapshot(caller).await;
    let mut file = Vec::new();
    while let Some(part) = timeout(SOON, stream.message()).await.expect("in time").expect("no error") {
        if file.is_empty() {
            sleep(PAUSE).await;
        }
        file.extend_from_slice(&part.blob);
    }
    file
}

/// As JSON, with little room in the kernel: the member's bytes wait in Keyward.
async fn read_http1(address: std::net::SocketAddr) -> Vec<u8> {
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.set_recv_buffer_size(64 * 1024).expect("small");
    let mut stream = socket.connect(address).await.expect("connected");
    let request = "POST /v3/maintenance/snapshot HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}";
    stream.write_all(request.as_bytes()).await.expect("sent");
    let mut answer = vec![0; 1024];
    stream.read_exact(&mut answer).await.expect("the beginning");
    sleep(PAUSE).await;
    timeout(SOON, stream.read_to_end(&mut answer)).await.expect("in time").expect("no cut");
    let mut file = Vec::new();
    // A chunk is a line of JSON.
    for line in answer.split(|byte| *byte == b'\n').filter(|line| line.starts_with(b"{")) {
        let line: Value = serde_json::from_slice(line).expect("JSON");
        let blob = line["result"]["blob"].as_str().unwrap_or_else(|| panic!("no part: {line}"));
        file.extend(BASE64.decode(blob.as_bytes()).expect("base64"));
    }
    file
}
