//! Rules 21, must show 6: a client that writes, then reads serializably or watches, never sees less than it wrote, whichever
//! member is behind.

use std::time::Duration;

use futures_util::{StreamExt, stream};
use keyward::pb::etcdserverpb::kv_client::KvClient;
use keyward::pb::etcdserverpb::watch_client::WatchClient;
use keyward::pb::etcdserverpb::watch_request::RequestUnion;
use keyward::pb::etcdserverpb::{PutRequest, RangeRequest, WatchCreateRequest, WatchRequest};
use keyward::tasks::Tasks;
use tonic::transport::{Channel, Endpoint};

use crate::crowd::connect;
use crate::harness::binary::full;
use crate::harness::keyward::{Keyward, Site};
use crate::harness::relay::Relay;
use crate::harness::{Cluster, Options, ports, versions, wait};

/// For a return: a limit, never a pause.
const LIMIT: Duration = Duration::from_secs(60);
/// How much later members hear each other. A follower learns that a write was agreed on so much later than who made it at the
/// leader.
const LATER: Duration = Duration::from_millis(30);
const CLIENTS: usize = 8;

#[tokio::test]
async fn nobody_sees_less_than_it_wrote_where_followers_lag() {
    tokio::task::LocalSet::new()
        .run_until(async {
            for version in versions() {
                let tasks = Tasks::default();
                let (mut relays, mut options) =
                    (Vec::new(), Options { members: 3, ..Options::default() });
                for _ in 0..3 {
                    let (relay, behind) = (Relay::start(&tasks).await, ports::free());
                    relay.open(behind);
                    options.peer_relays.push((relay.address, behind));
                    relays.push(relay);
                }
                let cluster = Cluster::start(&version, options).await;
                relays.iter().for_each(|relay| relay.delay(LATER));
                let site = Site::new();
                let config = site.in_front_of(&cluster);
                let keyward = Keyward::start(site, &config).await;
                let steps = if full() { 50 } else { 10 };
                let all = (0..CLIENTS).map(|number| writes_and_looks(keyward.url(), number, steps));
                futures_util::future::join_all(all).await;
                let behind = keyward.metric("keyward_reads_behind_total", &[]).await;
                println!(
                    "{version}: {CLIENTS} clients wrote {steps} times and read and watched after each; nobody saw less; \
                     {behind} reads were behind and made anew"
                );
            }
        })
        .await;
}

/// Each time a connection of its own: where its home lags, and what it was shown, differ.
async fn writes_and_looks(url: String, number: usize, steps: usize) {
    for step in 0..steps {
        let channel =
            Endpoint::from_shared(url.clone()).expect("a URL").connect().await.expect("a connection");
        let (mut kv, key) = (KvClient::new(channel.clone()), format!("c{number}"));
        // The connection's home.
        kv.range(local(&key)).await.expect("an answer");
        let written = put(&mut kv, &key, step).await;
        let read = kv.range(local(&key)).await.expect("an answer").into_inner();
        let shown = read.header.expect("a header").revision;
        assert!(shown >= written, "{written} was written, {shown} is shown");
        assert_eq!(read.kvs[0].value, step.to_string());
        // Written anew: the read may have had its member catch up.
        let written = put(&mut kv, &key, step).await;
        watches(&channel, &mut kv, &key, written).await;
    }
}

/// A watch from now begins after what was written.
async fn watches(channel: &Channel, kv: &mut KvClient<Channel>, key: &str, written: i64) {
    let create = WatchCreateRequest { key: key.to_owned().into(), ..WatchCreateRequest::default() };
    let request = WatchRequest { request_union: Some(RequestUnion::CreateRequest(create)) };
    let asked = stream::iter([request]).chain(stream::pending());
    let opened = WatchClient::new(channel.clone()).watch(asked).await;
    let mut answers = opened.expect("a stream").into_inner();
    let created = answers.message().await.expect("the watch lives").expect("an answer");
    let from = created.header.expect("a header").revision;
    assert!(created.created && from >= written, "{written} was written, the watch is from {from}");
    let next = put(kv, key, 0).await;
    let told = answers.message().await.expect("the watch lives").expect("an answer");
    let revisions: Vec<i64> =
        told.events.iter().map(|event| event.kv.as_ref().expect("a key").mod_revision).collect();
    assert_eq!(revisions, [next], "written at {written}, watched from {from}");
}

async fn put(kv: &mut KvClient<Channel>, key: &str, value: usize) -> i64 {
    let put =
        PutRequest { key: key.to_owned().into(), value: value.to_string().into(), ..PutRequest::default() };
    kv.put(put).await.expect("written").into_inner().header.expect("a header").revision
}

/// Raft reaches a follower that was stopped a moment later than its clients do.
#[tokio::test]
async fn nobody_reads_less_than_it_wrote_while_a_member_lags() {
    for version in versions() {
        let mut cluster = Cluster::start(&version, Options { members: 3, ..Options::default() }).await;
        let site = Site::new();
        let config = site.in_front_of(&cluster);
        let keyward = Keyward::start(site, &config).await;
        let mut reads = 0;
        for round in 0..if full() { 3 } else { 1 } {
            let mut clients = Vec::new();
            for number in 0..9 {
                let mut client = connect(&keyward.url()).await;
                // Its home is chosen while all members serve: those of some are the one that will lag.
                client.range(local(&format!("{round}/{number}"))).await.expect("an answer");
                clients.push(client);
            }
            let lagging = (cluster.leader().await + 1) % cluster.len();
            cluster.stop(lagging);
            for write in 0..50 {
                let value = vec![b'v'; 100_000];
                let put = PutRequest { key: "large".into(), value: value.into(), ..PutRequest::default() };
                // One that was under way to it may fail.
                drop(clients[write % 9].put(put).await);
            }
            cluster.resume(lagging);
            for step in 0..20 {
                for (number, client) in clients.iter_mut().enumerate() {
                    let key = format!("{round}/{number}");
                    let put = PutRequest {
                        key: key.clone().into(),
                        value: step.to_string().into(),
                        ..PutRequest::default()
                    };
                    let Ok(written) = client.put(put).await else { continue };
                    let written = written.into_inner().header.expect("a header");
                    let read = client.range(local(&key)).await.expect("an answer").into_inner();
                    let header = read.header.expect("a header");
                    assert!(
                        header.revision >= written.revision && header.raft_term >= written.raft_term,
                        "{version}: {written:?} was written, {header:?} is shown"
                    );
                    assert_eq!(read.kvs[0].value, step.to_string(), "{version}");
                    reads += 1;
                }
            }
            let ready = async || (keyward.metric("keyward_member_ready", &[]).await == 3.0).then_some(());
            wait::until(LIMIT, "all are ready", ready).await;
        }
        assert!(reads > 100, "{version}: {reads}");
        let behind = keyward.metric("keyward_reads_behind_total", &[]).await;
        println!(
            "{version}: {reads} local reads, none below its client's write; {behind} were behind and made anew"
        );
    }
}

fn local(key: &str) -> RangeRequest {
    RangeRequest { key: key.to_owned().into(), serializable: true, ..RangeRequest::default() }
}
