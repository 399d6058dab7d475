//! Requests that end or split members of etcd: through Keyward they reach no member, and a read that ends one ends no other.

use std::time::Duration;

use bytes::Bytes;
use keyward::pb::authpb::Permission;
use keyward::pb::etcdserverpb::kv_client::KvClient;
use keyward::pb::etcdserverpb::request_op::Request as Op;
use keyward::pb::etcdserverpb::{
    AlarmRequest, AuthRoleAddRequest, AuthRoleGrantPermissionRequest, AuthUserAddRequest, DeleteRangeRequest,
    LeaseGrantRequest, MemberUpdateRequest, PutRequest, RangeRequest, RequestOp, TxnRequest,
};
use keyward::pb::v3lockpb::LockRequest;
use keyward::pb::v3lockpb::lock_client::LockClient;
use keyward::refusal::{Code, Refusal};
use prost::Message;

use crate::caller::Caller;
use crate::harness::binary::{Version, full};
use crate::harness::client::lifetime;
use crate::harness::keyward::{Keyward, Site};
use crate::harness::{Auth, Cluster, Options, every_version, password, wait};
use crate::raw::{Call, Endpoint};

const LIMIT: Duration = Duration::from_secs(30);
/// How long a member is watched that should live on.
const LIVES_ON: Duration = Duration::from_secs(1);
const RANGE: &str = "/etcdserverpb.KV/Range";
const TXN: &str = "/etcdserverpb.KV/Txn";
const PUT: &str = "/etcdserverpb.KV/Put";
const ALARM: &str = "/etcdserverpb.Maintenance/Alarm";

/// Where a request is fatal to a member that is asked directly.
#[derive(Clone, Copy, Debug)]
enum Fatal {
    Everywhere,
    Before(&'static str),
    Within(&'static str, &'static str),
    /// Not by itself: it splits the members of versions before this one.
    Splits,
    /// Not by itself: members of these versions forget it at a restart. Others serve it.
    Forgets(&'static str, &'static str),
}

impl Fatal {
    fn is_at(self, version: &Version) -> bool {
        match self {
            Self::Everywhere => true,
            Self::Before(first) => !version.at_least(first),
            Self::Within(first, behind) => version.at_least(first) && !version.at_least(behind),
            Self::Splits | Self::Forgets(..) => false,
        }
    }
}

struct Row {
    name: &'static str,
    path: &'static str,
    message: Vec<u8>,
    fatal: Fatal,
    /// What Keyward says; for a request of another version etcd's own words.
    told: (Code, String),
}

fn row(name: &'static str, path: &'static str, message: &impl Message, fatal: Fatal, told: &Refusal) -> Row {
    let told = (told.code(), told.message().to_owned());
    Row { name, path, message: message.encode_to_vec(), fatal, told }
}

fn txn(success: Vec<Op>) -> TxnRequest {
    let success = success.into_iter().map(|op| RequestOp { request: Some(op) }).collect();
    TxnRequest { success, ..TxnRequest::default() }
}

fn sorted(sort_order: i32, sort_target: i32) -> RangeRequest {
    let (key, range_end) = (Bytes::from_static(b"/p/"), Bytes::from_static(b"/p0"));
    RangeRequest { key, range_end, sort_order, sort_target, ..RangeRequest::default() }
}

fn put(key: &str) -> PutRequest {
    PutRequest { key: key.to_owned().into(), value: "v".into(), ..PutRequest::default() }
}

/// The requests, of which each needs the keys `/p/1` to `/p/3` and the role `role`.
fn rows() -> Vec<Row> {
    let sort = Refusal::SORT_OPTION;
    let before_36 = Fatal::Before("3.6.0");
    let local = RangeRequest { serializable: true, ..sorted(1, 9) };
    let delete = DeleteRangeRequest { key: "/p/".into(), range_end: b"\0"[..].into(), prev_kv: false };
    let kept = |ignore_value, ignore_lease| {
        let value = if ignore_value { "".into() } else { "v".into() };
        let put = PutRequest { ignore_value, ignore_lease, value, ..put("/p/2") };
        txn(vec![Op::RequestDeleteRange(delete.clone()), Op::RequestPut(put)])
    };
    let alarm = |action, alarm| AlarmRequest { action, member_id: 0, alarm };
    let unknown_alarm = Refusal::fatal("an unknown alarm");
    let name = "n".repeat(32_769);
    let long_name = Refusal::fatal("a name of more than 32768 bytes");
    let user =
        AuthUserAddRequest { name: name.clone(), password: "p".into(), ..AuthUserAddRequest::default() };
    let grant = AuthRoleGrantPermissionRequest { name: "role".into(), perm: None };
    let update = |urls: &[&str]| MemberUpdateRequest {
        id: 0,
        peer_ur_ls: urls.iter().map(|url| (*url).into()).collect(),
    };
    let nested =
        txn(vec![Op::RequestTxn(txn(vec![Op::RequestRange(sorted(1, 9))])), Op::RequestPut(put("/q"))]);
    let at_revision = RangeRequest { revision: 1_000_000, key: "/p/1".into(), ..RangeRequest::default() };
    let split = txn(vec![Op::RequestRange(at_revision), Op::RequestPut(put("/q"))]);
    let lost_lease = LeaseGrantRequest { ttl: 60, id: -5 };
    vec![
        row("sort target", RANGE, &sorted(1, 9), before_36, &sort),
        row("local sort target", RANGE, &local, before_36, &sort),
        row("sort target in a Txn", TXN, &txn(vec![Op::RequestRange(sorted(1, 9))]), before_36, &sort),
        row("sort target in a nested Txn", TXN, &nested, before_36, &sort),
        row("deleted, value kept", TXN, &kept(true, false), Fatal::Everywhere, &Refusal::DUPLICATE_KEY),
        row("deleted, lease kept", TXN, &kept(false, true), Fatal::Everywhere, &Refusal::DUPLICATE_KEY),
        row("alarm action", ALARM, &alarm(9, 0), Fatal::Everywhere, &unknown_alarm),
        row("alarm type", ALARM, &alarm(1, 9), Fatal::Within("3.5.0", "3.6.0"), &unknown_alarm),
        row("no alarm", ALARM, &alarm(1, 0), Fatal::Before("3.5.0"), &unknown_alarm),
        row("user name", "/etcdserverpb.Auth/UserAdd", &user, Fatal::Everywhere, &long_name),
        row(
            "role name",
            "/etcdserverpb.Auth/RoleAdd",
            &AuthRoleAddRequest { name },
            Fatal::Everywhere,
            &long_name,
        ),
        row(
            "no permission",
            "/etcdserverpb.Auth/RoleGrantPermission",
            &grant,
            Fatal::Before("3.5.0"),
            &Refusal::NO_PERMISSION_GIVEN,
        ),
        row(
            "lost lease",
            "/etcdserverpb.Lease/LeaseGrant",
            &lost_lease,
            Fatal::Forgets("3.5.0", "3.5.3"),
            &Refusal::fatal("a lease with an id that is lost at a restart"),
        ),
        row("no peer URL", UPDATE, &update(&[]), Fatal::Splits, &Refusal::MEMBER_URLS),
        row("bad peer URL", UPDATE, &update(&["a b"]), Fatal::Splits, &Refusal::MEMBER_URLS),
        row("range at a revision", TXN, &split, Fatal::Splits, &Refusal::SPLITTING_TXN),
    ]
}

const UPDATE: &str = "/etcdserverpb.Cluster/MemberUpdate";

async fn prepare(endpoint: &Endpoint) {
    for key in ["/p/1", "/p/2", "/p/3"] {
        endpoint.call(&Call::unary(PUT, &put(key).encode_to_vec())).await;
    }
    let role = AuthRoleAddRequest { name: "role".into() }.encode_to_vec();
    endpoint.call(&Call::unary("/etcdserverpb.Auth/RoleAdd", &role)).await;
    let perm = Some(Permission { key: "/p/".into(), ..Permission::default() });
    let grant = AuthRoleGrantPermissionRequest { name: "role".into(), perm }.encode_to_vec();
    endpoint.call(&Call::unary("/etcdserverpb.Auth/RoleGrantPermission", &grant)).await;
}

#[tokio::test]
async fn no_request_that_ends_members_reaches_one() {
    for version in every_version() {
        let cluster = Cluster::start(&version, Options { members: 3, ..Options::default() }).await;
        let site = Site::new();
        let config = site.in_front_of(&cluster);
        let keyward = Keyward::start(site, &config).await;
        let through = Endpoint::plain(keyward.site().listen);
        prepare(&through).await;
        for Row { name, path, message, fatal, told } in rows() {
            let answer = through.call(&Call::unary(path, &message)).await;
            let got = (answer.code(), answer.message());
            // etcd 3.7 applies such a Txn alike on all members, and says that the revision is to come.
            if matches!(fatal, Fatal::Splits) && path == TXN && version.at_least("3.7.0") {
                assert_eq!(got.0, Some(Code::OutOfRange as u32), "{version}: {name}: {got:?}");
            } else if matches!(fatal, Fatal::Forgets(first, behind) if !Fatal::Within(first, behind).is_at(&version))
            {
                assert_eq!(got.0, Some(0), "{version}: {name}: {got:?}");
            } else {
                assert_eq!(got, (Some(told.0 as u32), told.1), "{version}: {name}");
            }
        }
        lifetime(LIVES_ON).await;
        for member in 0..cluster.len() {
            assert!(!cluster.has_ended(member), "{version}: member {member} has ended");
        }
        let revisions = revisions(&cluster).await;
        assert!(revisions.windows(2).all(|pair| pair[0] == pair[1]), "{version}: {revisions:?}");
    }
}

/// Where another member answers, a member before 3.7 leaves out the ranges of a Txn that writes, also from its check of permissions.
#[tokio::test]
async fn a_write_beside_a_range_that_may_not_be_read_is_applied_by_no_member() {
    for version in every_version() {
        let auth = Auth::On { extra_users: 0 };
        let cluster = Cluster::start(&version, Options { members: 3, auth, ..Options::default() }).await;
        let site = Site::new();
        let config = site.in_front_of(&cluster);
        let keyward = Keyward::start(site, &config).await;
        let ctl = cluster.ctl_as_root();
        ctl.ok(&["user", "add", &format!("writer:{}", password("writer"))]).await;
        ctl.ok(&["role", "add", "writer"]).await;
        ctl.ok(&["role", "grant-permission", "writer", "--prefix=true", "write", "/w/"]).await;
        ctl.ok(&["user", "grant-role", "writer", "writer"]).await;
        let writer = Caller::log_in(keyward.site().listen, "writer").await;
        let range = |key: &'static str| RangeRequest { key: key.into(), ..RangeRequest::default() };
        let ops = |key, put_key| txn(vec![Op::RequestRange(range(key)), Op::RequestPut(put(put_key))]);
        let nested = txn(vec![
            Op::RequestRange(range("/secret")),
            Op::RequestTxn(txn(vec![Op::RequestPut(put("/w/2"))])),
        ]);
        let mut otherwise = TxnRequest {
            failure: txn(vec![Op::RequestRange(range("/w/1"))]).success,
            ..TxnRequest::default()
        };
        otherwise.success = txn(vec![Op::RequestPut(put("/w/3"))]).success;
        for (name, txn) in
            [("range", ops("/secret", "/w/1")), ("nested", nested), ("other branch", otherwise)]
        {
            let refused =
                KvClient::new(writer.channel.clone()).txn(writer.request(txn)).await.expect_err(name);
            assert_eq!(refused.message(), "etcdserver: permission denied", "{version} {name}");
        }
        let lock = LockRequest { name: "/w/lock".into(), lease: 0 };
        let refused = LockClient::new(writer.channel.clone())
            .lock(writer.request(lock))
            .await
            .expect_err("no permission to read");
        assert_eq!(refused.message(), "etcdserver: permission denied", "{version} lock");
        writer.put("/w/0", b"v".to_vec(), 0).await.expect("permitted");
        let root = Caller::log_in(keyward.site().listen, "root").await;
        let both = KvClient::new(root.channel.clone()).txn(root.request(ops("/w/0", "/w/4"))).await;
        assert!(both.is_ok(), "{version}: {both:?}");
        let mut stores = Vec::new();
        for member in 0..cluster.len() {
            let direct = Caller::log_in(cluster.address(member), "root").await;
            stores.push(direct.keys("/w/").await);
        }
        assert!(stores.iter().all(|keys| *keys == ["/w/0", "/w/4"]), "{version}: {stores:?}");
    }
}

/// Each member's revision, by a read of its own store.
async fn revisions(cluster: &Cluster) -> Vec<i64> {
    let read = RangeRequest { key: "/p/1".into(), ..RangeRequest::default() }.encode_to_vec();
    let mut revisions = Vec::new();
    for member in 0..cluster.len() {
        let answer = cluster.endpoint(member).call(&Call::unary(RANGE, &read)).await;
        let message = answer.messages().pop().expect("an answer");
        let answer = keyward::pb::etcdserverpb::RangeResponse::decode(message).expect("a RangeResponse");
        revisions.push(answer.header.expect("a header").revision);
    }
    revisions
}

/// What the rows say of each version is so: each request goes to a member of its own.
#[tokio::test]
async fn each_request_ends_a_member_that_is_asked_directly() {
    if !full() {
        return;
    }
    for version in every_version() {
        let mut wrong = Vec::new();
        for Row { name, path, message, fatal, .. } in rows() {
            let cluster = Cluster::start(&version, Options::default()).await;
            prepare(&cluster.endpoint(0)).await;
            cluster.endpoint(0).call(&Call::unary(path, &message)).await;
            let ends =
                wait::within_limit(LIVES_ON, async || cluster.has_ended(0).then_some(())).await.is_some();
            println!("{version}: {name}: {}", if ends { "the member ends" } else { "lives on" });
            if ends != fatal.is_at(&version) {
                wrong.push(name);
            }
        }
        assert!(wrong.is_empty(), "{version}: {wrong:?}");
    }
}

/// Members that are short of memory, and a read of everything: one ends, and the client's own repetitions end no other. Behind a limit
/// on the bytes of an answer no member gathers them.
#[tokio::test]
async fn a_read_that_ends_a_member_for_want_of_memory_ends_one() {
    const MIB: usize = 1 << 20;
    // So many that no memory which Go's collector happens to have spared is enough.
    const VALUES: usize = 320;
    if !full() {
        return;
    }
    let version = crate::harness::binary::newest("3.5");
    // A member that has read few entries after its start has little that its collector could free for the list.
    let flags = vec!["--snapshot-count=20".into()];
    let mut cluster = Cluster::start(&version, Options { members: 3, flags, ..Options::default() }).await;
    let site = Site::new();
    let config = site.in_front_of(&cluster);
    let keyward = Keyward::start(site, &config).await;
    let through = Endpoint::plain(keyward.site().listen);
    for number in 0..VALUES {
        let value = Bytes::from(vec![b'v'; MIB - 1024]);
        let put = PutRequest { key: format!("/big/{number:03}").into(), value, ..PutRequest::default() };
        assert_eq!(through.call(&Call::unary(PUT, &put.encode_to_vec())).await.code(), Some(0));
    }
    // After its writes a member has memory to spare.
    for member in 0..cluster.len() {
        cluster.bounce(member, None).await;
        limit_data(cluster.process_id(member), 30 * MIB);
    }
    for member in 0..cluster.len() {
        keyward.uses(cluster.member_id(member).await, LIMIT).await;
    }
    let list = RangeRequest {
        key: "/big/".into(),
        range_end: "/big0".into(),
        serializable: true,
        ..RangeRequest::default()
    };
    let list = Call::unary(RANGE, &list.encode_to_vec());
    let ended = || (0..cluster.len()).filter(|member| cluster.has_ended(*member)).count();
    let refusal = (Some(Code::ResourceExhausted as u32), Refusal::SUSPECT_READ.message().to_owned());
    for _ in 0..3 {
        let answer = through.call(&list).await;
        assert_eq!((answer.code(), answer.message()), refusal);
    }
    wait::until(LIMIT, "the member has ended", async || (ended() > 0).then_some(())).await;
    lifetime(LIVES_ON).await;
    assert_eq!(ended(), 1);
    // Everything else is served.
    let small = RangeRequest { key: "/big/000".into(), ..RangeRequest::default() }.encode_to_vec();
    assert_eq!(through.call(&Call::unary(RANGE, &small)).await.code(), Some(0));
    // With a limit on the bytes of an answer the members do not even gather them.
    let site = Site::new();
    let limit = "[policy.peer_limits]\nbytes_per_answer = '16MiB'\n";
    let config = site.in_front_of(&cluster) + limit;
    let limiting = Keyward::start(site, &config).await;
    let limited = Endpoint::plain(limiting.site().listen);
    let alive: Vec<u32> = (0..cluster.len())
        .filter(|member| !cluster.has_ended(*member))
        .map(|member| cluster.process_id(member))
        .collect();
    let before: Vec<usize> = alive.iter().map(|process| memory(*process, "VmRSS")).collect();
    for process in &alive {
        std::fs::write(format!("/proc/{process}/clear_refs"), "5").expect("the peak begins anew");
    }
    let too_large = (Some(Code::ResourceExhausted as u32), Refusal::answer_too_large(16 << 20));
    for _ in 0..9 {
        let answer = limited.call(&list).await;
        assert_eq!((answer.code(), answer.message()), (too_large.0, too_large.1.message().to_owned()));
    }
    for (process, before) in alive.iter().zip(before) {
        let more = memory(*process, "VmHWM").saturating_sub(before);
        assert!(more < 100 * MIB, "{more} bytes");
    }
    assert_eq!(ended(), 1);
}

/// Bytes of a process's memory, as this line of its status says.
fn memory(process: u32, name: &str) -> usize {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).expect("it runs");
    let line = status.lines().find(|line| line.starts_with(name)).expect("a line of memory");
    let kib: usize = line.split_whitespace().nth(1).expect("a number").parse().expect("a number");
    kib * 1024
}

/// Bounds a process's private memory to what it holds now and so many bytes.
fn limit_data(process: u32, more: usize) {
    let limit = format!("--data={}", memory(process, "VmData") + more);
    let done = std::process::Command::new("prlimit").args(["--pid", &process.to_string(), &limit]).status();
    assert!(done.expect("prlimit is there").success());
}
