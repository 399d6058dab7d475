//! The audit log: each audited call leaves one record with who, what and how it ended, and never a secret; a call whose record
//! cannot be written is not made, or is made and its loss counted.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use keyward::admin::socket::{self, AdminAnswer, AdminCommand};
use keyward::audit::verify::ChainCheck;
use keyward::members::membership::AuthSetting;
use keyward::pb::etcdserverpb::{AuthenticateRequest, DeleteRangeRequest, PutRequest};
use keyward::pb::v3lockpb::{LockRequest, LockResponse};
use keyward::refusal::{Code, Refusal};
use keyward::tasks::Tasks;
use prost::Message as _;
use serde_json::Value;
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::UnixStream;

use crate::client::Client;
use crate::log_records::Log;
use crate::member::Member;
use crate::rig::{Keyward, log_in, paused, real};
use crate::words::{PUT, RANGE, WATCH, create_of, created, put, range, ranged, refused, was_put, watch};

const LOCK: &str = "/v3lockpb.Lock/Lock";
const DELETE: &str = "/etcdserverpb.KV/DeleteRange";
const ALL: &str = "events = ['changes', 'reads', 'watches', 'leases', 'logins', 'refusals', 'admin']\n";
/// A word of every secret in these tests.
const SECRET: &str = "hunter2";

/// A Keyward with an audit log.
pub(crate) struct Audited {
    pub(crate) member: Member,
    pub(crate) keyward: Keyward,
    pub(crate) folder: TempDir,
}

impl Audited {
    fn new(auth: AuthSetting, lines: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("audit.log");
        Self::writing(folder, &file, auth, lines)
    }

    pub(crate) fn writing(folder: TempDir, file: &Path, auth: AuthSetting, lines: &str) -> Self {
        let member = Member::new(1, &Tasks::default());
        let lines = format!("[audit]\nfile = {file:?}\nreplica = \"a\"\n{lines}");
        let keyward = Keyward::at(&[&member], auth, folder.path(), "", &lines);
        Self { member, keyward, folder }
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("audit.log")
    }

    /// The records of these events, once there are so many of them.
    async fn records(&self, events: &[&str], count: usize) -> Vec<Value> {
        loop {
            let found = of_events(&self.file(), events);
            if found.len() >= count {
                assert_eq!(found.len(), count, "{found:#?}");
                return found;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// The first record that `is_wanted`, once there is one.
    async fn records_until(&self, is_wanted: impl Fn(&Value) -> bool) -> Value {
        loop {
            if let Some(found) = of_events(&self.file(), &[]).into_iter().find(&is_wanted) {
                return found;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Ends Keyward, and returns all records.
    pub(crate) async fn ended(self) -> (Vec<Value>, String) {
        let Self { mut keyward, folder, .. } = self;
        keyward.ended().await;
        drop(keyward);
        let file = folder.path().join("audit.log");
        // The end of the process waits for the writer's last lines for two seconds at most: a disk may take longer.
        let events = || of_events(&file, &[]).into_iter().map(|record| record["event"].clone());
        while !events().collect::<Vec<_>>().ends_with(&["stop".into(), "head".into()]) {
            std::thread::yield_now();
        }
        let mut check = ChainCheck::new(None);
        let open = std::io::BufReader::new(std::fs::File::open(&file).expect("the file"));
        check.file(open, &mut 0).expect("a whole chain");
        (of_events(&file, &[]), std::fs::read_to_string(&file).expect("UTF-8"))
    }

    async fn put(&self, client: &Client, key: &str, revision: i64) {
        let script = async { self.member.called(PUT).await.reply(&was_put(revision)).await };
        let (outcome, _) = tokio::join!(client.call(PUT, put_of(key)), script);
        assert_eq!(outcome.end.code(), Some(Code::Ok), "{:?}", outcome.end);
    }
}

/// A policy of one role for everybody.
fn policy_in(folder: &TempDir, mode: &str, binding: &str) -> String {
    let text = format!(
        "[[role]]\nname = 'app'\n[[role.allow]]\nactions = ['read', 'write', 'watch']\nprefix = '/app/'\n\
         [[role.deny]]\nactions = ['write']\nkey = '/app/fixed'\n\
         [[binding]]\neveryone = true\nroles = ['app']\n{binding}"
    );
    std::fs::write(folder.path().join("policy.toml"), text).expect("written");
    format!("[policy]\nmode = '{mode}'\nfile = 'policy.toml'\n")
}

fn of_events(file: &Path, events: &[&str]) -> Vec<Value> {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    // The last line may be under way.
    let whole = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
    let records = whole.map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    records
        .filter(|record| events.is_empty() || events.iter().any(|event| record["event"] == *event))
        .collect()
}

fn put_of(key: &str) -> Vec<u8> {
    PutRequest { key: key.to_owned().into(), value: SECRET.into(), ..PutRequest::default() }.encode_to_vec()
}

#[test]
fn a_put_leaves_exactly_one_record_with_peer_user_range_and_outcome() {
    real(async {
        let audited = Audited::new(AuthSetting::On, "");
        let client = audited.keyward.logged_in("alice").await.header("user-agent", "grpc-go/1.2");
        audited.put(&client, "/a/b", 42).await;
        let records = audited.records(&["change"], 1).await;
        let record = &records[0];
        assert_eq!(record["method"], PUT);
        assert_eq!(record["peer"], "password:alice");
        assert_eq!(record["user"], "alice");
        assert_eq!(record["code"], "OK");
        assert_eq!(record["revision"], 42);
        assert_eq!(record["attempts"], 1);
        assert_eq!(record["listener"], "clients");
        assert_eq!(record["replica"], "a");
        assert_eq!(record["user_agent"], "grpc-go/1.2");
        assert_eq!(record["ranges"], serde_json::json!([{"action": "write", "key": "/a/b"}]));
        assert!(record["received"].as_u64() > Some(10) && record["sent"].as_u64() > Some(10), "{record}");
        // Reads and watches are not configured.
        let script = async { audited.member.called(RANGE).await.reply(&ranged(42)).await };
        tokio::join!(client.call(RANGE, range("k")), script).0.message();
        drop(client);
        let (all, _) = audited.ended().await;
        let events: Vec<_> = all.iter().map(|record| record["event"].as_str().expect("text")).collect();
        assert_eq!(events, ["start", "login", "change", "stop", "head"]);
    });
}

#[test]
fn refusals_and_denials_leave_one_record_each() {
    real(async {
        let audited = Audited::new(AuthSetting::On, "");
        let stranger = audited.keyward.client().await.header("token", "kw1_forged").header("user-agent", "x");
        assert_eq!(stranger.call(PUT, put_of("/a")).await.end.code(), Some(Code::Unauthenticated));
        let refused = audited.records(&["refusal"], 1).await.remove(0);
        assert_eq!((&refused["code"], &refused["refused"]), (&"Unauthenticated".into(), &true.into()));
        assert_eq!((&refused["method"], &refused["user_agent"]), (&PUT.into(), &"x".into()));
        assert_eq!(refused["peer"], Value::Null);
        let client = audited.keyward.logged_in("alice").await;
        let denial = (Code::PermissionDenied, "etcdserver: permission denied");
        let script = async { audited.member.called(RANGE).await.refuse(denial.0, denial.1) };
        let (outcome, ()) = tokio::join!(client.call(RANGE, range("/root")), script);
        assert_eq!(outcome.end.code(), Some(Code::PermissionDenied));
        let denied = audited.records(&["refusal"], 2).await.remove(1);
        assert_eq!((&denied["user"], &denied["attempts"]), (&"alice".into(), &1.into()));
        assert_eq!(denied["ranges"], serde_json::json!([{"action": "read", "key": "/root"}]));
        let wrong = AuthenticateRequest { name: "bob".into(), password: SECRET.into() }.encode_to_vec();
        assert_ne!(stranger.call("/etcdserverpb.Auth/Authenticate", wrong).await.end.code(), Some(Code::Ok));
        let logins = audited.records(&["login"], 2).await;
        assert_eq!((&logins[0]["code"], &logins[0]["peer"]), (&"OK".into(), &"password:alice".into()));
        assert_eq!(
            (&logins[1]["code"], &logins[1]["peer"]),
            (&"InvalidArgument".into(), &"password:bob".into())
        );
    });
}

#[test]
fn a_record_names_the_verdict_and_the_rule_of_the_policy() {
    real(async {
        for (mode, verdict) in [("enforce", "refused"), ("shadow", "would_refuse")] {
            let folder = tempfile::tempdir().expect("a folder");
            let policy = policy_in(&folder, mode, "");
            let file = folder.path().join("audit.log");
            let audited = Audited::writing(folder, &file, AuthSetting::On, &format!("{ALL}{policy}"));
            let client = audited.keyward.logged_in("alice").await;
            audited.put(&client, "/app/a", 1).await;
            for (key, rule) in [("/app/fixed", "app.deny[0]"), ("/other", "no_grant: write")] {
                if verdict == "refused" {
                    assert_eq!(client.call(PUT, put_of(key)).await.end.code(), Some(Code::PermissionDenied));
                } else {
                    audited.put(&client, key, 2).await;
                }
                let seen = audited.records_until(|record| record["ranges"][0]["key"] == key).await;
                assert_eq!((&seen["verdict"], &seen["rule"]), (&verdict.into(), &rule.into()), "{seen}");
                assert_eq!(seen["refused"] == true, verdict == "refused", "{seen}");
                assert_eq!(seen["policy_generation"].as_str().map(str::len), Some(16), "{seen}");
            }
            let allowed = audited.records_until(|record| record["ranges"][0]["key"] == "/app/a").await;
            assert_eq!(
                (&allowed["verdict"], &allowed["rule"]),
                (&"allowed".into(), &"app.allow[0]".into()),
                "{allowed}"
            );
            drop(client);
            assert_all_valid(&audited.ended().await.0);
        }
    });
}

#[test]
fn a_refused_read_and_a_refused_watch_leave_their_keys_though_only_refusals_have_records() {
    real(async {
        let folder = tempfile::tempdir().expect("a folder");
        let policy = policy_in(&folder, "enforce", "");
        let file = folder.path().join("audit.log");
        let lines = format!("events = ['refusals']\n{policy}");
        let audited = Audited::writing(folder, &file, AuthSetting::On, &lines);
        let client = audited.keyward.logged_in("alice").await;
        let read = client.call(RANGE, range("/other")).await;
        assert_eq!(read.end.code(), Some(Code::PermissionDenied));
        let script = async { audited.member.called(RANGE).await.reply(&ranged(42)).await };
        tokio::join!(client.call(RANGE, range("/app/a")), script).0.message();
        let mut stream = client.open(WATCH).await.expect("open");
        stream.say(&watch("/foreign", 5)).await;
        stream.say(&watch("/app/w", 5)).await;
        stream.next().await.expect("refused");
        let records = audited.records(&["refusal"], 2).await;
        let [read, watch] = &records[..] else { panic!("{records:#?}") };
        assert_eq!(read["ranges"], serde_json::json!([{"action": "read", "key": "/other"}]));
        assert_eq!(watch["ranges"], serde_json::json!([{"action": "watch", "key": "/foreign"}]));
        for record in [read, watch] {
            assert_eq!((&record["code"], &record["refused"]), (&"PermissionDenied".into(), &true.into()));
            assert_eq!((&record["peer"], &record["verdict"]), (&"password:alice".into(), &"refused".into()));
        }
        drop((client, stream));
        assert_all_valid(&audited.ended().await.0);
    });
}

/// The record of the create is made before anything is sent; one of its own tells of the refusal.
#[test]
fn a_watch_refused_by_a_member_or_by_a_limit_leaves_a_record_of_the_refusal() {
    paused(async {
        for (events, event) in [
            ("['refusals']", "refusal"),
            ("['watches', 'refusals']", "refusal"),
            ("['watches']", "watch_create"),
        ] {
            let lines = format!("events = {events}\n[policy.peer_limits]\nwatches = 1\n");
            let audited = Audited::new(AuthSetting::On, &lines);
            let client = audited.keyward.logged_in("alice").await;
            let mut stream = client.open(WATCH).await.expect("open");
            stream.say(&watch("/a/1", 1)).await;
            let mut call = audited.member.called(WATCH).await;
            call.messages.next().await.expect("a create");
            stream.say(&watch("/a/2", 1)).await;
            crate::rig::settled().await;
            call.say(&refused("rpc error: code = PermissionDenied desc = etcdserver: permission denied"))
                .await
                .expect("taken");
            stream.next().await.expect("the refusal of the member");
            stream.next().await.expect("the refusal by the limit");
            drop((stream, client));
            let (all, _) = audited.ended().await;
            assert_all_valid(&all);
            for (by, key, code, is_refused, attempts) in [
                ("limit", "/a/2", "ResourceExhausted", true, 0),
                ("etcd", "/a/1", "PermissionDenied", false, 1),
            ] {
                let of: Vec<_> = all.iter().filter(|record| record["refused_by"] == by).collect();
                let [record] = &of[..] else { panic!("{by}: {all:#?}") };
                assert_eq!((&record["event"], &record["code"]), (&event.into(), &code.into()), "{events}");
                assert_eq!(record["ranges"][0]["key"], key);
                assert_eq!(
                    (&record["peer"], &record["attempts"]),
                    (&"password:alice".into(), &attempts.into())
                );
                assert_eq!(record["refused"] == true, is_refused, "{record}");
                assert_eq!(record["limit"] == "peer watches", by == "limit", "{record}");
            }
        }
    });
}

#[test]
fn a_record_of_a_caller_with_a_namespace_has_the_real_keys() {
    real(async {
        let folder = tempfile::tempdir().expect("a folder");
        let policy = policy_in(&folder, "off", "namespace = '/tenants/{user}/'\n");
        let file = folder.path().join("audit.log");
        let audited = Audited::writing(folder, &file, AuthSetting::On, &format!("{ALL}{policy}"));
        let client = audited.keyward.logged_in("alice").await;
        audited.put(&client, "a", 1).await;
        // An empty key is refused in the namespace, and no real key is touched.
        assert_eq!(client.call(PUT, put_of("")).await.end.code(), Some(Code::InvalidArgument));
        let records = audited.records(&["change"], 2).await;
        assert_eq!(records[0]["ranges"], serde_json::json!([{"action": "write", "key": "/tenants/alice/a"}]));
        assert_eq!((&records[1]["refused"], &records[1]["ranges"]), (&true.into(), &Value::Null));
        // A foreign lease has another id at the member, and a list of leases tells of no key.
        let leased = PutRequest { key: "a".into(), lease: 0x7a, ..PutRequest::default() }.encode_to_vec();
        let script = async { audited.member.called(PUT).await.reply(&was_put(2)).await };
        drop(tokio::join!(client.call(PUT, &leased), script));
        assert_eq!(audited.records(&["change"], 3).await[2]["lease"], "7a");
        let leases = "/etcdserverpb.Lease/LeaseLeases";
        let script = async {
            audited.member.called(RANGE).await.reply(&ranged(7)).await;
            audited.member.called(leases).await.reply(b"").await;
        };
        drop(tokio::join!(client.call(leases, b""), script));
        let listed = audited.records(&["read"], 1).await.remove(0);
        assert_eq!((&listed["code"], &listed["ranges"]), (&"OK".into(), &Value::Null), "{listed}");
        let mut stream = client.open(WATCH).await.expect("open");
        stream.say(&watch("k", 5)).await;
        let watched = audited.records(&["watch_create"], 1).await.remove(0);
        assert_eq!(watched["ranges"], serde_json::json!([{"action": "watch", "key": "/tenants/alice/k"}]));
    });
}

#[test]
fn refused_strangers_leave_a_bounded_number_of_records() {
    paused(async {
        let audited = Audited::new(AuthSetting::On, "");
        let stranger = audited.keyward.client().await.header("token", "kw1_forged");
        for _ in 0..500 {
            stranger.call(RANGE, range("k")).await;
        }
        let left_out = audited.keyward.metrics.log_records_left_out.get();
        drop(stranger);
        let (all, _) = audited.ended().await;
        let refusals = all.iter().filter(|record| record["event"] == "refusal").count();
        // The access log has a limiter of its own with the same counter.
        assert_eq!((refusals, left_out), (100, 2 * 400));
    });
}

/// Whoever is refused as often as he likes neither fills the disk nor pushes out the records of others.
#[test]
fn the_refused_calls_of_a_peer_leave_a_bounded_number_of_records_and_the_rest_is_told() {
    paused(async {
        let folder = tempfile::tempdir().expect("a folder");
        let policy = policy_in(&folder, "enforce", "");
        let file = folder.path().join("audit.log");
        let lines = format!("events = ['changes', 'refusals']\n{policy}");
        let audited = Audited::writing(folder, &file, AuthSetting::On, &lines);
        let client = audited.keyward.logged_in("alice").await;
        for _ in 0..300 {
            let end = client.call(RANGE, range("/other")).await.end;
            assert_eq!(end.code(), Some(Code::PermissionDenied));
        }
        drop(client);
        let (all, _) = audited.ended().await;
        let refusals = all.iter().filter(|record| record["event"] == "refusal").count();
        assert_eq!(refusals, 100);
        assert_eq!(left_out_of(&all, "password:alice"), (200, 200));
        assert_all_valid(&all);
    });
}

/// How many records are told as left out: in all, and of the peer.
fn left_out_of(all: &[Value], peer: &str) -> (u64, u64) {
    let left_out = || all.iter().filter(|record| record["event"] == "left_out");
    let of = |row: &&Value| row["peer"] == peer;
    let rows = left_out().filter_map(|record| record["peers"].as_array()).flatten();
    let counts = rows.filter(of).filter_map(|row| row["count"].as_u64());
    (left_out().filter_map(|record| record["count"].as_u64()).sum(), counts.sum())
}

/// A call that etcd fails changes nothing either: its records are as few and as short as those of refused ones.
#[test]
fn the_calls_that_etcd_fails_for_a_peer_leave_a_bounded_number_of_short_records() {
    paused(async {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("audit.log");
        let lines = "events = ['changes']\n[log]\nkeys = true\n";
        let audited = Audited::writing(folder, &file, AuthSetting::On, lines);
        let log = Log::default();
        let _listening = log.listen();
        let client = audited.keyward.logged_in("alice").await;
        let key = "k".repeat(40_000);
        for (code, text) in [
            (Code::NotFound, "etcdserver: requested lease not found"),
            (Code::PermissionDenied, "etcdserver: permission denied"),
        ] {
            for _ in 0..150 {
                let script = async { audited.member.called(PUT).await.refuse(code, text) };
                assert_eq!(tokio::join!(client.call(PUT, put_of(&key)), script).0.end.code(), Some(code));
            }
        }
        // Nobody knows what became of this one.
        let script = async { audited.member.called(PUT).await.refuse(Code::Unknown, "odd") };
        tokio::join!(client.call(PUT, put_of("/unknown")), script);
        assert_eq!(log.lines_with("etcdserver: requested lease not found"), 100);
        assert_eq!(log.lines_with("etcdserver: permission denied"), 0);
        drop(client);
        let (all, _) = audited.ended().await;
        let changes: Vec<_> = all.iter().filter(|record| record["event"] == "change").collect();
        assert_eq!(changes.len(), 101);
        assert_eq!(changes[100]["code"], "Unknown");
        assert_eq!(left_out_of(&all, "password:alice"), (200, 200));
        assert_all_valid(&all);
    });
}

/// Every kind of record, for the schema.
#[test]
fn every_kind_of_record_fits_the_schema_and_has_no_secret() {
    real(async {
        let audited = Audited::new(AuthSetting::On, ALL);
        let client = audited.keyward.client().await;
        let token = log_in(&client, "alice").await;
        let client = client.header("token", &token).header("user-agent", "grpc-go/1.2");
        audited.put(&client, "/a/b", 42).await;
        let script = async { audited.member.called(RANGE).await.reply(&ranged(42)).await };
        tokio::join!(client.call(RANGE, range("k")), script).0.message();
        let deleted = DeleteRangeRequest { key: vec![0xff].into(), range_end: vec![0].into(), prev_kv: true };
        let script = async { audited.member.called(DELETE).await.reply(&was_put(43)).await };
        tokio::join!(client.call(DELETE, deleted.encode_to_vec()), script).0.message();
        // An odd body is refused.
        assert_eq!(client.call(PUT, [0x0f]).await.end.code(), Some(Code::InvalidArgument));
        let mut stream = client.open(WATCH).await.expect("open");
        stream.say(&watch("k", 5)).await;
        let mut call = audited.member.called(WATCH).await;
        let create = create_of(&call.messages.next().await.expect("a create")).expect("a create");
        call.say(&created(create.watch_id, 9)).await.expect("taken");
        stream.next().await.expect("created");
        drop((stream, call));
        let path = audited.folder.path().join("admin.sock");
        let bound = socket::bind(&path).expect("bound");
        let serve = socket::serve(
            bound,
            path.as_path().into(),
            audited.keyward.admin(),
            audited.keyward.tasks.clone(),
        );
        audited.keyward.tasks.spawn("admin socket", serve).detach();
        let mut visitor = BufReader::new(UnixStream::connect(&path).await.expect("it listens"));
        let command = serde_json::to_string(&AdminCommand::Block { user: "mallory".into() }).expect("JSON");
        visitor.write_all(format!("{command}\n").as_bytes()).await.expect("taken");
        let mut answer = String::new();
        visitor.read_line(&mut answer).await.expect("answered");
        assert!(matches!(serde_json::from_str(&answer).expect("JSON"), AdminAnswer::Done(_)));
        let admin = audited.records(&["admin"], 1).await.remove(0);
        assert_eq!((&admin["command"], &admin["target"]), (&"block".into(), &"mallory".into()));
        assert_eq!(admin["uid"], rustix::process::getuid().as_raw());
        drop((client, visitor));
        let (all, text) = audited.ended().await;
        for secret in [SECRET, &*token, "right"] {
            assert!(!text.contains(secret), "{secret} in {text}");
        }
        let events: BTreeSet<_> = all.iter().map(|record| record["event"].as_str().expect("text")).collect();
        let calls = ["change", "read", "watch_create", "watch_end", "login", "refusal", "admin"];
        assert_eq!(events, calls.into_iter().chain(["start", "stop", "head"]).collect());
        assert_all_valid(&all);
    });
}

/// Records that no call of this test makes.
#[test]
fn the_schema_takes_records_of_losses_and_rotations_and_no_other_fields() {
    let line = |fields: &str| -> Value {
        let hash = "0".repeat(64);
        let line = format!(
            "{{\"v\":1,\"seq\":7,\"replica\":\"a\",\"prev\":\"{hash}\",\"time\":\"2026-01-02T00:00:00.000000Z\",\
             {fields},\"hash\":\"{hash}\"}}"
        );
        serde_json::from_str(&line).expect("JSON")
    };
    let signature = format!("{}==", "A".repeat(86));
    let head = format!("\"event\":\"head\",\"signature\":\"{signature}\"");
    assert_all_valid(
        &[
            "\"event\":\"continue\",\"previous_file\":\"audit.log.00000000000000000001\"",
            "\"event\":\"continue\",\"previous_file\":\"audit.log.1\",\"moved\":true",
            "\"event\":\"continue\",\"previous_file\":\"audit.log\",\"moved\":true,\"removed_file\":\"audit.log\"",
            "\"event\":\"start\",\"version\":\"1\",\"previous_file\":\"audit.log\",\"moved\":true",
            "\"event\":\"lost\",\"count\":3",
            "\"event\":\"lost\",\"count\":3,\"sink\":\"syslog\"",
            "\"event\":\"left_out\",\"count\":3",
            "\"event\":\"left_out\",\"count\":3,\"peers\":[{\"peer\":\"password:a\",\"count\":2}]",
            "\"event\":\"removed\",\"removed_file\":\"audit.log.00000000000000000001\"",
            "\"event\":\"admin\",\"command\":\"kick\",\"target\":\"7\",\"result\":\"done\",\"uid\":0",
            "\"event\":\"admin\",\"command\":\"pause\",\"target\":\"m0\",\"result\":\"failed\"",
            "\"event\":\"admin\",\"command\":\"resume\",\"target\":\"m0\",\"result\":\"done\"",
            &head,
        ]
        .map(line),
    );
    for wrong in ["\"event\":\"lost\"", "\"event\":\"stop\",\"value\":\"x\"", "\"event\":\"unknown\""] {
        assert!(std::panic::catch_unwind(|| assert_all_valid(&[line(wrong)])).is_err(), "{wrong}");
    }
}

pub(crate) fn assert_all_valid(records: &[Value]) {
    let text = include_str!("../../docs/audit.schema.json");
    let mut compiler = boon::Compiler::new();
    compiler.add_resource("audit.json", serde_json::from_str(text).expect("JSON")).expect("a schema");
    let mut schemas = boon::Schemas::new();
    let schema = compiler.compile("audit.json", &mut schemas).expect("a schema");
    assert!(!records.is_empty());
    for record in records {
        schemas.validate(record, schema).unwrap_or_else(|error| panic!("{record}: {error:#}"));
    }
}

#[test]
fn with_a_full_disk_no_change_is_made_and_reads_go_on() {
    real(async {
        let folder = tempfile::tempdir().expect("a folder");
        let lines = "queue = '64KiB'\n";
        let audited = Audited::writing(folder, Path::new("/dev/full"), AuthSetting::Off, lines);
        let client = audited.keyward.client().await;
        let mut made = 0;
        let refused = loop {
            let mut outcome = std::pin::pin!(client.call(PUT, put_of("/a")));
            tokio::select! {
                call = audited.member.call() => {
                    call.reply(&was_put(1 + made)).await;
                    assert_eq!(outcome.await.end.code(), Some(Code::Ok));
                    made += 1;
                }
                refused = &mut outcome => break refused.end,
            }
            assert!(made < 200, "the queue has an end");
        };
        assert_eq!(refused.told(), (Code::Unavailable, Refusal::AUDIT_UNWRITABLE.message()));
        assert!((36..=44).contains(&made), "{made} changes had room in the queue");
        assert!(audited.member.was_called_again().is_none(), "nothing was sent");
        assert!(audited.keyward.metrics.audit.refused.get() > 0);
        let line = audited.keyward.admin().state.line();
        assert_eq!(line, "not ready: the audit log cannot be written");
        let script = async { audited.member.called(RANGE).await.reply(&ranged(1)).await };
        tokio::join!(client.call(RANGE, range("k")), script).0.message();
    });
}

/// A Lock holds no room while it waits: what it owes at its end is paid before others are served.
#[test]
fn with_a_full_disk_locks_do_not_fill_memory() {
    real(async {
        let folder = tempfile::tempdir().expect("a folder");
        let lines = "queue = '64KiB'\n";
        let audited = Audited::writing(folder, Path::new("/dev/full"), AuthSetting::Off, lines);
        let client = audited.keyward.client().await;
        let mut made = 0;
        let request = LockRequest { name: "/name".into(), lease: 7 }.encode_to_vec();
        let refused = loop {
            let mut outcome = std::pin::pin!(client.call(LOCK, request.clone()));
            tokio::select! {
                call = audited.member.call() => {
                    call.reply(&LockResponse { key: "/name/7".into(), header: None }.encode_to_vec()).await;
                    assert_eq!(outcome.await.end.code(), Some(Code::Ok));
                    made += 1;
                }
                refused = &mut outcome => break refused.end,
            }
            assert!(made < 200, "the queue has an end");
        };
        assert_eq!(refused.told(), (Code::Unavailable, Refusal::AUDIT_UNWRITABLE.message()));
        assert!((36..=45).contains(&made), "{made} locks had room in the queue");
    });
}

#[test]
fn with_a_full_disk_and_drop_all_calls_are_served_and_losses_counted() {
    real(async {
        let folder = tempfile::tempdir().expect("a folder");
        let lines = "queue = '64KiB'\non_full = 'drop'\n";
        let audited = Audited::writing(folder, Path::new("/dev/full"), AuthSetting::Off, lines);
        let client = audited.keyward.client().await;
        for revision in 1..=200 {
            audited.put(&client, "/a", revision).await;
        }
        while audited.keyward.metrics.audit.lost("all").get() < 200 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert_eq!(audited.keyward.metrics.audit.lost("all").get(), 200);
        assert_eq!(audited.keyward.metrics.audit.refused.get(), 0);
    });
}

/// The folder vanishes, so that no new file can be begun: the records go into the old file.
#[test]
fn a_failed_rotation_loses_no_record() {
    real(async {
        let audited = Audited::new(AuthSetting::Off, "max_size = '64KiB'\n");
        let client = audited.keyward.client().await;
        // The name of the old file is taken by a folder: the rename fails, also for root.
        let taken = audited.folder.path().join("audit.log.00000000000000000001");
        std::fs::create_dir_all(taken.join("x")).expect("made");
        let key = "k".repeat(1000);
        for revision in 1..=100 {
            audited.put(&client, &key, revision).await;
        }
        audited.records(&["change"], 100).await;
        assert!(audited.file().metadata().expect("there").len() > 100_000);
        drop(client);
        audited.ended().await;
    });
}

#[test]
fn without_an_audit_log_no_call_has_facts_for_one() {
    real(async {
        let member = Member::new(1, &Tasks::default());
        let keyward = Keyward::before(&[&member]);
        let client = keyward.client().await;
        let script = async { member.called(PUT).await.reply(&was_put(1)).await };
        tokio::join!(client.call(PUT, put(8)), script).0.message();
        assert!(keyward.audit.is_none());
        assert_eq!(keyward.metrics.audit.written.get(), 0);
    });
}
