//! A policy learned from the audit log of a load allows the load with other names, and nothing else.
//!
//! The load is that of Patroni, APISIX and a Kubernetes API server, by the keys and calls that they use.

use std::fs;
use std::time::Duration;

use bytes::Bytes;
use keyward::pb::etcdserverpb as pb;
use keyward::pb::etcdserverpb::auth_client::AuthClient;
use keyward::pb::etcdserverpb::cluster_client::ClusterClient;
use keyward::pb::etcdserverpb::compare::{CompareResult, CompareTarget, TargetUnion};
use keyward::pb::etcdserverpb::kv_client::KvClient;
use keyward::pb::etcdserverpb::lease_client::LeaseClient;
use keyward::pb::etcdserverpb::maintenance_client::MaintenanceClient;
use keyward::pb::etcdserverpb::request_op::Request;
use keyward::pb::etcdserverpb::watch_client::WatchClient;
use keyward::pb::etcdserverpb::watch_request::RequestUnion;
use keyward::pb::v3lockpb::LockRequest;
use keyward::pb::v3lockpb::lock_client::LockClient;
use tokio::time::timeout;
use tonic::Status;
use tonic::transport::Channel;

use crate::harness::binary::{Version, full};
use crate::harness::keyward::{Keyward, Site, program};
use crate::harness::{Cluster, Options, ports};
use crate::lent::connection;
use crate::rewatch::local;

const LIMIT: Duration = Duration::from_secs(20);
const IDENTITIES: [&str; 3] = ["patroni", "apisix", "kube"];

/// The end of all keys with the prefix.
fn end(prefix: &str) -> Bytes {
    keyward::rpc::key_range::end_of_prefix(prefix.as_bytes()).expect("text").into()
}

/// A client of one identity, with names drawn from a seed.
struct Load {
    channel: Channel,
    random: u64,
    calls: usize,
}

type Done = Result<(), Status>;

impl Load {
    fn kv(&mut self) -> KvClient<Channel> {
        self.calls += 1;
        KvClient::new(self.channel.clone())
    }

    /// The next number of a linear congruential generator.
    fn draw(&mut self) -> u64 {
        self.random = self.random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        self.random >> 32
    }

    fn name(&mut self) -> String {
        format!("{:08x}", self.draw())
    }

    async fn put(&mut self, key: &str, lease: i64) -> Done {
        let put =
            pb::PutRequest { key: key.to_owned().into(), value: "v".into(), lease, ..Default::default() };
        self.kv().put(put).await.map(drop)
    }

    async fn get(&mut self, key: &str) -> Done {
        self.kv().range(pb::RangeRequest { key: key.to_owned().into(), ..Default::default() }).await.map(drop)
    }

    async fn list(&mut self, prefix: &str) -> Done {
        let list =
            pb::RangeRequest { key: prefix.to_owned().into(), range_end: end(prefix), ..Default::default() };
        self.kv().range(list).await.map(drop)
    }

    /// The next page behind a key, as an API server asks for it.
    async fn page(&mut self, prefix: &str, after: &str) -> Done {
        let page = pb::RangeRequest {
            key: format!("{after}\0").into(),
            range_end: end(prefix),
            limit: 10,
            ..Default::default()
        };
        self.kv().range(page).await.map(drop)
    }

    async fn delete(&mut self, key: &str) -> Done {
        self.kv()
            .delete_range(pb::DeleteRangeRequest { key: key.to_owned().into(), ..Default::default() })
            .await
            .map(drop)
    }

    /// Puts the key if it is unchanged, and reads it otherwise.
    async fn guarded(&mut self, key: &str, operation: Request) -> Done {
        let key: Bytes = key.to_owned().into();
        let compare = pb::Compare {
            result: CompareResult::Equal.into(),
            target: CompareTarget::Mod.into(),
            key: key.clone(),
            target_union: Some(TargetUnion::ModRevision(0)),
            ..Default::default()
        };
        let read = pb::RangeRequest { key, ..Default::default() };
        let txn = pb::TxnRequest {
            compare: vec![compare],
            success: vec![pb::RequestOp { request: Some(operation) }],
            failure: vec![pb::RequestOp { request: Some(Request::RequestRange(read)) }],
        };
        self.kv().txn(txn).await.map(drop)
    }

    async fn guarded_put(&mut self, key: &str, lease: i64) -> Done {
        let put =
            pb::PutRequest { key: key.to_owned().into(), value: "v".into(), lease, ..Default::default() };
        self.guarded(key, Request::RequestPut(put)).await
    }

    async fn guarded_delete(&mut self, key: &str) -> Done {
        let delete = pb::DeleteRangeRequest { key: key.to_owned().into(), ..Default::default() };
        self.guarded(key, Request::RequestDeleteRange(delete)).await
    }

    async fn lease(&mut self) -> Result<i64, Status> {
        self.calls += 1;
        let granted = LeaseClient::new(self.channel.clone())
            .lease_grant(pb::LeaseGrantRequest { ttl: 60, id: 0 })
            .await?;
        Ok(granted.into_inner().id)
    }

    async fn revoke(&mut self, id: i64) -> Done {
        self.calls += 1;
        LeaseClient::new(self.channel.clone()).lease_revoke(pb::LeaseRevokeRequest { id }).await.map(drop)
    }

    async fn keep_alive(&mut self, id: i64) -> Done {
        self.calls += 1;
        let requests = futures_util::stream::iter([pb::LeaseKeepAliveRequest { id }]);
        let mut answers =
            LeaseClient::new(self.channel.clone()).lease_keep_alive(requests).await?.into_inner();
        let answer = answers.message().await?.ok_or_else(|| Status::unknown("no answer"))?;
        assert!(answer.ttl > 0, "the lease lives");
        Ok(())
    }

    /// Creates a watch of the prefix, waits for the member's confirmation, and ends it.
    async fn watch(&mut self, prefix: &str) -> Done {
        self.calls += 1;
        let create = pb::WatchCreateRequest {
            key: prefix.to_owned().into(),
            range_end: end(prefix),
            prev_kv: true,
            ..Default::default()
        };
        let request = pb::WatchRequest { request_union: Some(RequestUnion::CreateRequest(create)) };
        let (send, requests) = tokio::sync::mpsc::channel(1);
        send.send(request).await.expect("there is room");
        let requests = futures_util::stream::unfold(requests, async |mut requests| {
            Some((requests.recv().await?, requests))
        });
        let mut answers = WatchClient::new(self.channel.clone()).watch(requests).await?.into_inner();
        let created = answers.message().await?.ok_or_else(|| Status::unknown("no answer"))?;
        drop(send);
        if created.canceled { Err(Status::permission_denied(created.cancel_reason)) } else { Ok(()) }
    }

    async fn patroni(&mut self) -> Done {
        let lease = self.lease().await?;
        ClusterClient::new(self.channel.clone()).member_list(pb::MemberListRequest::default()).await?;
        for name in ["pg0", "pg1", "pg2"] {
            self.put(&format!("/service/batman/members/{name}"), lease).await?;
        }
        self.list("/service/batman/").await?;
        self.guarded_put("/service/batman/leader", lease).await?;
        self.keep_alive(lease).await?;
        for key in ["config", "status", "history", "initialize", "sync"] {
            self.put(&format!("/service/batman/{key}"), 0).await?;
        }
        self.watch("/service/batman/").await?;
        self.delete("/service/batman/failover").await?;
        self.revoke(lease).await
    }

    async fn apisix(&mut self) -> Done {
        for folder in ["routes", "upstreams", "services", "ssls", "consumers", "plugin_configs"] {
            self.list(&format!("/apisix/{folder}/")).await?;
        }
        self.watch("/apisix/").await?;
        let lease = self.lease().await?;
        let instance = self.name();
        self.put(&format!("/apisix/data_plane/server_info/{instance}"), lease).await?;
        self.keep_alive(lease).await?;
        for folder in ["routes", "upstreams"] {
            let name = self.name();
            self.get(&format!("/apisix/{folder}/{name}")).await?;
            self.put(&format!("/apisix/{folder}/{name}"), 0).await?;
            self.delete(&format!("/apisix/{folder}/{name}")).await?;
        }
        Ok(())
    }

    async fn kube(&mut self) -> Done {
        let space = format!("ns-{}", self.draw() % 40);
        for resource in ["pods", "configmaps", "secrets", "events", "leases"] {
            let folder = format!("/registry/{resource}/");
            let key = format!("{folder}{space}/{}", self.name());
            let lease = if resource == "events" { self.lease().await? } else { 0 };
            self.guarded_put(&key, lease).await?;
            self.get(&key).await?;
            self.list(&folder).await?;
            self.page(&folder, &key).await?;
            self.watch(&folder).await?;
            self.guarded_delete(&key).await?;
        }
        for cluster_wide in ["minions", "namespaces"] {
            let key = format!("/registry/{cluster_wide}/{}", self.name());
            self.guarded_put(&key, 0).await?;
            self.list(&format!("/registry/{cluster_wide}/")).await?;
        }
        self.guarded_put("compact_rev_key", 0).await?;
        self.calls += 1;
        MaintenanceClient::new(self.channel.clone()).status(pb::StatusRequest::default()).await.map(drop)
    }
}

/// Runs every load for `rounds`. Returns the number of calls, and the refusals.
async fn run(doors: &[(&str, String)], seed: u64, rounds: usize) -> (usize, Vec<String>) {
    let (mut calls, mut refused) = (0, Vec::new());
    for (at, (identity, url)) in doors.iter().enumerate() {
        let channel = connection(url).await;
        let mut load = Load { channel, random: seed + at as u64, calls: 0 };
        for _ in 0..rounds {
            let done = match *identity {
                "patroni" => load.patroni().await,
                "apisix" => load.apisix().await,
                _ => load.kube().await,
            };
            refused.extend(done.err().map(|status| format!("{identity}: {status}")));
        }
        calls += load.calls;
    }
    (calls, refused)
}

/// The calls of an identity that its load never makes: the number of calls, and those not refused.
async fn outside(identity: &str, url: &str) -> (usize, Vec<String>) {
    let channel = connection(url).await;
    let mut load = Load { channel: channel.clone(), random: 9, calls: 0 };
    let folders = [
        "/service/batman/leader",
        "/apisix/routes/1",
        "/registry/pods/ns-1/p",
        "/registry/roles/x",
        "/other",
        "k",
    ];
    let own = match identity {
        "patroni" => "/service/batman/",
        "apisix" => "/apisix/",
        _ => "/registry/pods",
    };
    let mut judged: Vec<(String, Done)> = Vec::new();
    for key in folders.into_iter().filter(|key| !key.starts_with(own)) {
        judged.push((format!("Range {key}"), load.get(key).await));
        judged.push((format!("Put {key}"), load.put(key, 0).await));
        judged.push((format!("DeleteRange {key}"), load.delete(key).await));
        judged.push((format!("Txn {key}"), load.guarded_put(key, 0).await));
        judged.push((format!("Watch {key}"), load.watch(key).await));
    }
    // The listed folders may not all be written.
    if identity == "apisix" {
        judged.push(("Put into a listed folder".into(), load.put("/apisix/consumers/x", 0).await));
    }
    judged.push(("Range of all keys".into(), load.list("/").await));
    let everything = pb::DeleteRangeRequest { key: "\0".into(), range_end: "\0".into(), prev_kv: false };
    judged.push(("DeleteRange of all keys".into(), load.kv().delete_range(everything).await.map(drop)));
    let compact = pb::CompactionRequest { revision: 1, physical: false };
    judged.push(("Compact".into(), load.kv().compact(compact).await.map(drop)));
    let lock = LockRequest { name: "mine".into(), lease: 0 };
    let locked = timeout(LIMIT, LockClient::new(channel.clone()).lock(lock)).await.expect("answered");
    judged.push(("Lock".into(), locked.map(drop)));
    let mut maintenance = MaintenanceClient::new(channel.clone());
    judged.push(("Defragment".into(), maintenance.defragment(pb::DefragmentRequest {}).await.map(drop)));
    let snapshot =
        async { maintenance.snapshot(pb::SnapshotRequest {}).await?.into_inner().message().await.map(drop) };
    judged.push(("Snapshot".into(), snapshot.await));
    let user = pb::AuthUserAddRequest { name: "mallory".into(), ..Default::default() };
    judged.push(("UserAdd".into(), AuthClient::new(channel.clone()).user_add(user).await.map(drop)));
    judged.push((
        "AuthEnable".into(),
        AuthClient::new(channel.clone()).auth_enable(pb::AuthEnableRequest {}).await.map(drop),
    ));
    let add = pb::MemberAddRequest { peer_ur_ls: vec!["http://127.0.0.1:1".into()], is_learner: true };
    judged.push(("MemberAdd".into(), ClusterClient::new(channel).member_add(add).await.map(drop)));
    let is_refused = |done: &Done| matches!(done, Err(status) if status.code() == tonic::Code::PermissionDenied || status.message().contains("permission denied"));
    let served = judged
        .iter()
        .filter(|(_, done)| !is_refused(done))
        .map(|(call, done)| format!("{identity}: {call}: {done:?}"));
    (judged.len(), served.collect())
}

/// Three listeners, one for each identity.
fn config(site: &Site, cluster: &Cluster, further: &str) -> (String, Vec<(&'static str, String)>) {
    let doors: Vec<_> =
        IDENTITIES.into_iter().map(|name| (name, format!("127.0.0.1:{}", ports::free().port()))).collect();
    let fields: String = doors
        .iter()
        .map(|(name, address)| format!(" }}, {{ name = {name:?}, address = {address:?}"))
        .collect();
    let urls = doors.into_iter().map(|(name, address)| (name, format!("http://{address}"))).collect();
    (site.listening(cluster, &fields) + further, urls)
}

fn learn(site: &Site) -> String {
    let output = std::process::Command::new(program())
        .args(["policy", "learn", "--since", "24h"])
        .arg(site.file("audit.log"))
        .output()
        .expect("it runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    println!("{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("UTF-8")
}

async fn learned(version: &Version) {
    let rounds = if full() { 200 } else { 40 };
    let cluster = Cluster::start(version, Options::default()).await;
    let site = Site::new();
    let audit = format!(
        "audit.file = {:?}\naudit.events = [\"changes\", \"reads\", \"watches\"]\n",
        site.file("audit.log")
    );
    let (text, doors) = config(&site, &cluster, &audit);
    let keyward = Keyward::start(site, &text).await;
    let (calls, refused) = run(&doors, 1, rounds).await;
    assert_eq!(refused, Vec::<String>::new(), "{version}: without a policy");
    let (_, site) = keyward.terminate().await;

    let policy = learn(&site);
    println!("{version}: learned from {calls} calls:\n{policy}");
    let file = site.write("policy.toml", &policy);
    let (text, doors) =
        config(&site, &cluster, &format!("policy.mode = \"enforce\"\npolicy.file = {file:?}\n"));
    let keyward = Keyward::start(site, &text).await;
    let (again, refused) = run(&doors, 1000, rounds).await;
    assert_eq!(refused, Vec::<String>::new(), "{version}: under the learned policy");
    let mut foreign = 0;
    for (identity, url) in &doors {
        let (count, served) = outside(identity, url).await;
        assert_eq!(served, Vec::<String>::new(), "{version}");
        foreign += count;
    }
    println!(
        "{version}: {again} calls with other names: 0 refused; {foreign} calls outside of the load: {foreign} refused"
    );
    // The file can be judged and explained as it is.
    fs::write(keyward.site().file("table.toml"), "[[test]]\npeer = \"listener:kube\"\nlistener = \"kube\"\nmethod = \"Put\"\nkey = \"/registry/pods/ns-99/new\"\nexpect = \"allow\"\n").expect("written");
    let tested = std::process::Command::new(program())
        .args(["policy", "test"])
        .arg(keyward.site().file("table.toml"))
        .arg("--config")
        .arg(keyward.site().file("keyward.toml"))
        .output()
        .expect("it runs");
    assert!(tested.status.success(), "{}", String::from_utf8_lossy(&tested.stdout));
}

#[test]
fn a_learned_policy_allows_the_load_again_and_nothing_else() {
    local(async { learned(&Version::parse("3.5.35")).await });
}
