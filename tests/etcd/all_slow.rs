//! Members that are all slow, by a loaded disk or a long link, are as fit as members can be: no call is refused that etcd answers.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use keyward::pb::etcdserverpb::kv_client::KvClient;
use keyward::pb::etcdserverpb::lease_client::LeaseClient;
use keyward::pb::etcdserverpb::{LeaseGrantRequest, PutRequest, RangeRequest};
use keyward::tasks::Tasks;
use tonic::transport::{Channel, Endpoint};

use crate::harness::binary::{Version, full};
use crate::harness::keyward::{Keyward, Site};
use crate::harness::relay::Relay;
use crate::harness::{Cluster, Options, ports, versions, wait};

const LIMIT: Duration = Duration::from_secs(60);
const CLIENTS: usize = 4;

/// What was refused, of some writes, reads and grants by several clients at once; and what the slowest took.
async fn refused(url: &str) -> (Vec<String>, Duration) {
    let of_one = |number: usize| async move {
        let channel = Endpoint::from_shared(url.to_owned()).expect("a URL").connect_lazy();
        let (mut refused, mut slowest) = (Vec::new(), Duration::ZERO);
        for step in 0..2 {
            let began = Instant::now();
            if let Err(status) = one_of_each(&channel, format!("{number}/{step}").into_bytes()).await {
                refused.push(format!("{:?} {}", status.code(), status.message()));
            }
            slowest = slowest.max(began.elapsed());
        }
        (refused, slowest)
    };
    let all = join_all((0..CLIENTS).map(of_one)).await;
    let slowest = all.iter().map(|(_, slowest)| *slowest).max().unwrap_or_default();
    (all.into_iter().flat_map(|(refused, _)| refused).collect(), slowest)
}

async fn one_of_each(channel: &Channel, key: Vec<u8>) -> Result<(), tonic::Status> {
    let mut kv = KvClient::new(channel.clone());
    let mut lease = LeaseClient::new(channel.clone());
    let range =
        |serializable| RangeRequest { key: key.clone().into(), serializable, ..RangeRequest::default() };
    let (mut lin, mut local) = (kv.clone(), kv.clone());
    let put = PutRequest { key: key.clone().into(), value: "v".into(), ..PutRequest::default() };
    let (written, read, read_here, granted) = tokio::join!(
        kv.put(put),
        lin.range(range(false)),
        local.range(range(true)),
        lease.lease_grant(LeaseGrantRequest { ttl: 60, ..LeaseGrantRequest::default() })
    );
    written.map(drop).and(read.map(drop)).and(read_here.map(drop)).and(granted.map(drop))
}

async fn all_ready(keyward: &Keyward) {
    let ready = async || (keyward.metric("keyward_member_ready", &[]).await == 3.0).then_some(());
    wait::until(LIMIT, "all members are ready", ready).await;
}

#[expect(clippy::print_stdout, reason = "what was measured is a result too")]
async fn slow_members(version: &Version) {
    let tasks = Tasks::default();
    let (mut relays, mut options) = (Vec::new(), Options { members: 3, ..Options::default() });
    for _ in 0..3 {
        let relay = Relay::at(ports::free(), &tasks).await;
        options.advertise.push(relay.address);
        relays.push(relay);
    }
    let cluster = Cluster::start(version, options).await;
    for (i, relay) in relays.iter().enumerate() {
        relay.open(cluster.address(i));
    }
    let site = Site::new();
    let config = site.in_front_of(&cluster);
    let keyward = Keyward::start(site, &config).await;
    all_ready(&keyward).await;
    let millis: &[u64] = if full() { &[200, 1200, 3000] } else { &[1200, 3000] };
    for delay in millis.iter().map(|millis| Duration::from_millis(*millis)) {
        relays.iter().for_each(|relay| relay.delay(delay));
        // One that finds its members slow all at once, and one that never knew them otherwise.
        let urls = [keyward.url(), cluster.advertised(0)];
        let [through, direct] =
            join_all(urls.iter().map(|url| refused(url))).await.try_into().expect("two URLs");
        let site = Site::new();
        let config = site.in_front_of(&cluster);
        let fresh = Keyward::start(site, &config).await;
        let begun = refused(&fresh.url()).await;
        for keyward in [&keyward, &fresh] {
            all_ready(keyward).await;
        }
        println!(
            "{version}, members slower by {delay:?}: refused through Keyward {:?} (slowest {:?}), through one that began so {:?} \
             ({:?}), directly {:?} ({:?})",
            through.0, through.1, begun.0, begun.1, direct.0, direct.1
        );
        let refusals = [direct.0, through.0, begun.0];
        assert_eq!(refusals, [const { Vec::<String>::new() }; 3], "{version} {delay:?}");
        assert!(!keyward.log().contains("member is not ready"), "{version} {delay:?}: {}", keyward.log());
    }
    // One that alone is slow gets no calls.
    relays.iter().for_each(|relay| relay.delay(Duration::ZERO));
    all_ready(&keyward).await;
    relays[0].delay(Duration::from_secs(3));
    let alone = async || {
        // The limit falls little by little.
        (keyward.metric("keyward_member_ready", &[]).await == 2.0).then_some(())
    };
    wait::until(2 * LIMIT, "the slow one is left", alone).await;
}

#[tokio::test]
async fn no_call_is_refused_where_all_members_are_slow() {
    let all = async {
        join_all(versions().iter().map(slow_members)).await;
    };
    tokio::task::LocalSet::new().run_until(all).await;
}
