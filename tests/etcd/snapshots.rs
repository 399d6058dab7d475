//! A snapshot comes from one member, as slowly as its reader reads, and a cut in the middle is told as a cut.

use std::time::Duration;

use keyward::pb::etcdserverpb::maintenance_client::MaintenanceClient;
use keyward::pb::etcdserverpb::{SnapshotRequest, SnapshotResponse};
use tokio::time::timeout;
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
