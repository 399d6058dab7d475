//! A kube-apiserver under the policies of docs/kubernetes.md: each request that its etcd3 storage sends is served, and a defragmentation, a
//! disarmed alarm and a key of somebody else are refused. In a namespace, nobody's control plane compacts the store of all.
//!
//! The requests are those of `staging/src/k8s.io/apiserver/pkg/storage/etcd3` of Kubernetes 1.30 to 1.37: `store.go`, `watcher.go`,
//! `lease_manager.go`, `compact.go`, and the Status of `storage/feature`. That package asks for no alarms and no members.

use bytes::Bytes;
use futures_util::stream;
use keyward::pb::etcdserverpb as pb;
use keyward::pb::etcdserverpb::alarm_request::AlarmAction;
use keyward::pb::etcdserverpb::auth_client::AuthClient;
use keyward::pb::etcdserverpb::cluster_client::ClusterClient;
use keyward::pb::etcdserverpb::compare::{CompareResult, CompareTarget, TargetUnion};
use keyward::pb::etcdserverpb::kv_client::KvClient;
use keyward::pb::etcdserverpb::lease_client::LeaseClient;
use keyward::pb::etcdserverpb::maintenance_client::MaintenanceClient;
use keyward::pb::etcdserverpb::request_op::Request as Op;
use keyward::pb::etcdserverpb::watch_client::WatchClient;
use keyward::pb::etcdserverpb::watch_request::RequestUnion;
use keyward::rpc::key_range::end_of_prefix;
use tonic::transport::Channel;
use tonic::{Code, Status};

use crate::caller::Caller;
use crate::harness::keyward::{Keyward, Site};
use crate::harness::{Auth, Cluster, Options, page, password, versions};

const PAGE: &str = include_str!("../../docs/kubernetes.md");
/// The key by which apiservers agree on who compacts.
const COMPACT_REV_KEY: &str = "compact_rev_key";
/// Seconds of the lease of an Event, with what the lease manager adds.
const EVENT_TTL: i64 = 3660;

type Done<T = ()> = Result<T, Status>;

/// The policy of the page for one apiserver, and the one for control planes in namespaces.
fn documented() -> [String; 2] {
    let found = page::blocks(PAGE, "toml");
    let policies: Vec<String> = found.into_iter().filter(|block| block.contains("[[binding]]")).collect();
    policies.try_into().expect("the page has two policies")
}

fn key(name: &str) -> Bytes {
    name.to_owned().into()
}

/// The storage of a kube-apiserver.
struct Storage {
    caller: Caller,
}

impl Storage {
    fn kv(&self) -> KvClient<Channel> {
        KvClient::new(self.caller.channel.clone())
    }

    fn maintenance(&self) -> MaintenanceClient<Channel> {
        MaintenanceClient::new(self.caller.channel.clone())
    }

    async fn range(&self, range: pb::RangeRequest) -> Done<pb::RangeResponse> {
        Ok(self.kv().range(self.caller.request(range)).await?.into_inner())
    }

    async fn get(&self, name: &str) -> Done<pb::RangeResponse> {
        self.range(pb::RangeRequest { key: key(name), ..Default::default() }).await
    }

    /// A list by pages at one revision, and its count.
    async fn list(&self, folder: &str) -> Done<usize> {
        let range_end: Bytes = end_of_prefix(folder.as_bytes()).expect("text").into();
        let first = pb::RangeRequest { key: key(folder), range_end, limit: 1, ..Default::default() };
        let page = self.range(first.clone()).await?;
        let revision = page.header.as_ref().map_or(0, |header| header.revision);
        let mut found = page.kvs.len();
        if let (true, Some(last)) = (page.more, page.kvs.last()) {
            let next = [&last.key[..], &[0]].concat();
            let rest = pb::RangeRequest { key: next.into(), limit: 500, revision, ..first.clone() };
            found += self.range(rest).await?.kvs.len();
        }
        for counted in [
            pb::RangeRequest { count_only: true, limit: 0, ..first.clone() },
            pb::RangeRequest { keys_only: true, limit: 0, ..first.clone() },
        ] {
            assert_eq!(self.range(counted).await?.count, i64::try_from(found).expect("few"), "{folder}");
        }
        Ok(found)
    }

    /// The Txn by which the storage creates (at revision 0), changes and deletes.
    async fn change(&self, name: &str, revision: i64, change: Op) -> Done<pb::TxnResponse> {
        let compare = pb::Compare {
            result: CompareResult::Equal.into(),
            target: CompareTarget::Mod.into(),
            key: key(name),
            target_union: Some(TargetUnion::ModRevision(revision)),
            ..Default::default()
        };
        let read = pb::RangeRequest { key: key(name), ..Default::default() };
        let txn = pb::TxnRequest {
            compare: vec![compare],
            success: vec![pb::RequestOp { request: Some(change) }],
            failure: vec![pb::RequestOp { request: Some(Op::RequestRange(read)) }],
        };
        Ok(self.kv().txn(self.caller.request(txn)).await?.into_inner())
    }

    async fn put(&self, name: &str, revision: i64, lease: i64) -> Done<i64> {
        let put = pb::PutRequest { key: key(name), value: "v".into(), lease, ..Default::default() };
        let done = self.change(name, revision, Op::RequestPut(put)).await?;
        assert!(done.succeeded, "{name} is at revision {revision}");
        Ok(done.header.map_or(0, |header| header.revision))
    }

    async fn delete(&self, name: &str, revision: i64) -> Done {
        let delete = pb::DeleteRangeRequest { key: key(name), ..Default::default() };
        let done = self.change(name, revision, Op::RequestDeleteRange(delete)).await?;
        assert!(done.succeeded, "{name} is at revision {revision}");
        Ok(())
    }

    async fn lease(&self) -> Done<i64> {
        let grant = self.caller.request(pb::LeaseGrantRequest { ttl: EVENT_TTL, id: 0 });
        Ok(LeaseClient::new(self.caller.channel.clone()).lease_grant(grant).await?.into_inner().id)
    }

    /// Opens a watch from a revision, waits for the first event, then for the progress that a consistent read from the cache asks for.
    async fn watch(&self, name: &str, range_end: Bytes, revision: i64) -> Done {
        let create = pb::WatchCreateRequest {
            key: key(name),
            range_end,
            start_revision: revision,
            prev_kv: true,
            progress_notify: true,
            ..Default::default()
        };
        let progress = RequestUnion::ProgressRequest(pb::WatchProgressRequest {});
        let requests = [RequestUnion::CreateRequest(create), progress];
        let requests = requests.map(|union| pb::WatchRequest { request_union: Some(union) });
        // The client goes on listening when it has said what it wants.
        let requests = futures_util::StreamExt::chain(stream::iter(requests), stream::pending());
        let mut request = self.caller.request(requests);
        request.metadata_mut().insert("hasleader", "true".parse().expect("a header"));
        let mut answers = WatchClient::new(self.caller.channel.clone()).watch(request).await?.into_inner();
        let (mut events, mut progressed) = (0, false);
        while events == 0 || !progressed {
            let answer = answers.message().await?.ok_or_else(|| Status::unknown("the watch ended"))?;
            if answer.canceled {
                return Err(Status::permission_denied(answer.cancel_reason));
            }
            events += answer.events.len();
            progressed |= answer.events.is_empty() && !answer.created;
        }
        Ok(())
    }

    async fn watch_folder(&self, folder: &str, revision: i64) -> Done {
        self.watch(folder, end_of_prefix(folder.as_bytes()).expect("text").into(), revision).await
    }

    async fn status(&self) -> Done {
        self.maintenance().status(self.caller.request(pb::StatusRequest {})).await.map(drop)
    }

    /// What the storage does for each resource.
    async fn serve(&self) -> Done {
        self.status().await?;
        self.get("/registry/health").await?;
        let lease = self.lease().await?;
        for (resource, lease) in [("pods", 0), ("leases", 0), ("events", lease)] {
            let (folder, one) = (format!("/registry/{resource}/"), format!("/registry/{resource}/ns/one"));
            let created = self.put(&one, 0, lease).await?;
            self.put(&format!("/registry/{resource}/ns/two"), 0, lease).await?;
            assert_eq!(self.list(&folder).await?, 2, "{resource}");
            self.watch_folder(&folder, created).await?;
            let changed = self.put(&one, created, lease).await?;
            assert_eq!(self.get(&one).await?.kvs.len(), 1, "{one}");
            self.delete(&one, changed).await?;
        }
        Ok(())
    }

    /// A round of the compactor that believes that the key has this version: the revision to compact at next.
    async fn compactor_txn(&self, version: i64, revision: i64) -> Done<i64> {
        let compare = pb::Compare {
            result: CompareResult::Equal.into(),
            target: CompareTarget::Version.into(),
            key: key(COMPACT_REV_KEY),
            target_union: Some(TargetUnion::Version(version)),
            ..Default::default()
        };
        let value = revision.to_string().into();
        let put = pb::PutRequest { key: key(COMPACT_REV_KEY), value, ..Default::default() };
        let read = pb::RangeRequest { key: key(COMPACT_REV_KEY), ..Default::default() };
        let txn = pb::TxnRequest {
            compare: vec![compare],
            success: vec![pb::RequestOp { request: Some(Op::RequestPut(put)) }],
            failure: vec![pb::RequestOp { request: Some(Op::RequestRange(read)) }],
        };
        let done = self.kv().txn(self.caller.request(txn)).await?.into_inner();
        assert!(done.succeeded, "nobody else compacts");
        Ok(done.header.map_or(0, |header| header.revision))
    }

    async fn compact(&self, revision: i64) -> Done {
        let compact = pb::CompactionRequest { revision, physical: false };
        self.kv().compact(self.caller.request(compact)).await.map(drop)
    }

    /// Two rounds of the compactor, and the watch by which other apiservers learn of a compaction (1.34 and later).
    async fn compactor(&self) -> Done {
        self.get(COMPACT_REV_KEY).await?;
        let first = self.compactor_txn(0, 0).await?;
        self.watch(COMPACT_REV_KEY, Bytes::new(), first).await?;
        self.compactor_txn(1, first).await?;
        self.compact(first).await
    }

    /// Calls that the storage never makes, each with its name.
    async fn misuse(&self) -> Vec<(&'static str, Done)> {
        let caller = &self.caller;
        let disarm =
            pb::AlarmRequest { action: AlarmAction::Deactivate.into(), member_id: 0, ..Default::default() };
        let move_leader = pb::MoveLeaderRequest { target_id: 1 };
        let snapshot = async {
            let answers = self.maintenance().snapshot(caller.request(pb::SnapshotRequest {})).await?;
            answers.into_inner().message().await.map(drop)
        };
        let user = pb::AuthUserAddRequest { name: "mallory".into(), ..Default::default() };
        let mut auth = AuthClient::new(caller.channel.clone());
        let add = pb::MemberAddRequest { peer_ur_ls: vec!["http://127.0.0.1:1".into()], is_learner: true };
        let mut cluster = ClusterClient::new(caller.channel.clone());
        vec![
            (
                "Defragment",
                self.maintenance().defragment(caller.request(pb::DefragmentRequest {})).await.map(drop),
            ),
            ("disarm", self.maintenance().alarm(caller.request(disarm)).await.map(drop)),
            ("MoveLeader", self.maintenance().move_leader(caller.request(move_leader)).await.map(drop)),
            ("Snapshot", snapshot.await),
            ("UserAdd", auth.user_add(caller.request(user)).await.map(drop)),
            ("MemberAdd", cluster.member_add(caller.request(add)).await.map(drop)),
        ]
    }
}

fn is_denied(done: &Done) -> bool {
    matches!(done, Err(status) if status.code() == Code::PermissionDenied
        && status.message().ends_with("etcdserver: permission denied"))
}

/// Keyward with a policy of the page, enforced, whose callers come by this listener or password.
async fn keyward(site: Site, config: &str, policy: &str) -> Keyward {
    site.write("policy.toml", policy);
    let enforced = "policy.mode = \"enforce\"\npolicy.file = \"policy.toml\"\n";
    // Dotted keys at the top come before tables.
    let (dotted, tables) = config.split_once("[[").unwrap_or((config, ""));
    let tables = if tables.is_empty() { String::new() } else { format!("[[{tables}") };
    Keyward::start(site, &format!("{dotted}{enforced}{tables}")).await
}

#[tokio::test]
async fn an_apiserver_has_all_it_needs_and_no_more() {
    let [policy, _] = documented();
    let policy =
        page::placed(&policy, &[("cert:clients:CN=kube-apiserver-etcd-client", "listener:main".into())]);
    for version in versions() {
        let cluster = Cluster::start(&version, Options { members: 1, ..Options::default() }).await;
        let site = Site::new();
        let (config, listen) = (site.in_front_of(&cluster), site.listen);
        let keyward = keyward(site, &config, &policy).await;
        let storage = Storage { caller: Caller::anybody(listen).await };
        storage.serve().await.unwrap_or_else(|status| panic!("{version}: {status}: {}", keyward.log()));
        storage.compactor().await.unwrap_or_else(|status| panic!("{version}: {status}: {}", keyward.log()));
        let mut refused = storage.misuse().await;
        refused.push(("a key outside", storage.put("/other/key", 0, 0).await.map(drop)));
        refused.push(("the root", storage.list("/").await.map(drop)));
        refused.push(("another key beside", storage.get("compact_rev_key_of_another").await.map(drop)));
        refused.push(("a watch outside", storage.watch("k", Bytes::new(), 1).await));
        for (call, done) in &refused {
            assert!(is_denied(done), "{version}: {call}: {done:?}");
        }
        println!("{version}: all of the storage served, {} other calls refused", refused.len());
    }
}

#[tokio::test]
async fn hosted_control_planes_have_a_store_of_their_own_and_compact_none() {
    let [_, policy] = documented();
    let policy = page::placed(&policy, &[("cert:clients:CN=cp-*", "password:*".into())]);
    for version in versions() {
        let auth = Auth::On { extra_users: 1 };
        let cluster = Cluster::start(&version, Options { members: 1, auth, ..Options::default() }).await;
        let site = Site::new();
        let secret = site.write("shared", &password("root"));
        let mut config = site.in_front_of(&cluster);
        config += &format!("[[user]]\nname = \"root\"\npassword_file = {secret:?}\n");
        for user in ["alice", "u00"] {
            config += &format!("[[map]]\npeer = \"password:{user}\"\nas = \"root\"\n");
        }
        let listen = site.listen;
        let keyward = keyward(site, &config, &policy).await;
        for user in ["alice", "u00"] {
            let storage = Storage { caller: Caller::log_in(listen, user).await };
            storage
                .serve()
                .await
                .unwrap_or_else(|status| panic!("{version} {user}: {status}: {}", keyward.log()));
            // The key of the compactor is the namespace's own, the history is everybody's.
            let revision = storage.compactor_txn(0, 0).await.expect("a key of its own");
            let mut refused = storage.misuse().await;
            refused.push(("Compact", storage.compact(revision).await));
            for (call, done) in &refused {
                assert!(is_denied(done), "{version} {user}: {call}: {done:?}");
            }
        }
        let keys = cluster.ctl_as_root().ok(&["get", "--prefix", "--keys-only", "/clusters/"]).await;
        for user in ["alice", "u00"] {
            for name in ["/registry/pods/ns/two", COMPACT_REV_KEY] {
                assert!(keys.contains(&format!("/clusters/{user}/{name}\n")), "{version}: {keys}");
            }
        }
    }
}
