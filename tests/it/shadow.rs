//! What mode `shadow` lets pass is named: each kind of request that the policy would refuse stands in the view and, once for each
//! stream, in the audit log; and what lasts leaves a record when it begins.

use std::time::Duration;

use keyward::admin::view::ViewTopic;
use keyward::members::membership::AuthSetting;
use keyward::pb::etcdserverpb::{LeaseTimeToLiveRequest, LeaseTimeToLiveResponse};
use keyward::pb::v3electionpb::LeaderRequest;
use keyward::pb::v3lockpb::{LockRequest, LockResponse};
use keyward::refusal::Code;
use prost::Message as _;
use serde_json::{Value, json};

use crate::audit::{Audited, assert_all_valid};
use crate::client::{Client, Stream};
use crate::http1::told;
use crate::member::Call;
use crate::rest::post;
use crate::rest_websockets::open;
use crate::rig::{paused, settled};
use crate::words::{
    KEEP_ALIVE, RANGE, WATCH, create_of, created, header, range, ranged, renew, renewed, watch,
};

const LOCK: &str = "/v3lockpb.Lock/Lock";
const OBSERVE: &str = "/v3electionpb.Election/Observe";
const TIME_TO_LIVE: &str = "/etcdserverpb.Lease/LeaseTimeToLive";
const PEER: &str = "listener:clients";
const DENIED: (Code, &str) = (Code::PermissionDenied, "etcdserver: permission denied");
/// The grants of a role that lacks all that the tests do.
const NONE: &str = "[[role.allow]]\nactions = ['read']\nkey = '/none'\n";

/// The lines of a policy for everybody, which is written into the folder.
fn policy(folder: &tempfile::TempDir, mode: &str, grants: &str) -> String {
    let text = format!("[[role]]\nname = 'r'\n{grants}[[binding]]\neveryone = true\nroles = ['r']\n");
    std::fs::write(folder.path().join("policy.toml"), text).expect("written");
    format!("[policy]\nmode = '{mode}'\nfile = 'policy.toml'\n")
}

fn audited(events: &str, mode: &str, grants: &str) -> Audited {
    let folder = tempfile::tempdir().expect("a folder");
    let lines = policy(&folder, mode, grants);
    let file = folder.path().join("audit.log");
    Audited::writing(folder, &file, AuthSetting::Off, &format!("events = {events}\n{lines}"))
}

/// The rows of the view: action, keys, reason, last method, requests. All are the listener's.
async fn missing(audited: &Audited) -> Vec<String> {
    let view = audited.keyward.admin().viewer.view(ViewTopic::Shadow).await.expect("the shard answers");
    let text = |row: &serde_json::Map<String, Value>| {
        assert_eq!(row["peer"], PEER);
        let text = |field: &str| row[field].as_str().unwrap_or("-").to_owned();
        format!(
            "{} {} ({}) {} {}",
            text("action"),
            text("keys"),
            text("rule"),
            text("method"),
            row["requests"]
        )
    };
    let mut rows: Vec<String> = view.rows.iter().map(text).collect();
    rows.sort();
    rows
}

/// The records with a verdict or about the begin of something.
async fn records(audited: Audited) -> Vec<Value> {
    let (all, _) = audited.ended().await;
    assert_all_valid(&all);
    let is_told = |record: &Value| record["event"] == "begin" || record["verdict"].is_string();
    all.into_iter().filter(is_told).collect()
}

async fn renewals(audited: &Audited, client: &Client, count: usize) -> (Stream, Call) {
    let mut stream = client.open(KEEP_ALIVE).await.expect("open");
    stream.say(&renew(7)).await;
    let mut call = audited.member.called(KEEP_ALIVE).await;
    for at in 0..count {
        if at > 0 {
            stream.say(&renew(7)).await;
        }
        call.messages.next().await.expect("a renewal");
        call.say(&renewed(7, 60)).await.expect("taken");
        stream.next().await.expect("renewed");
    }
    (stream, call)
}

#[test]
fn a_keepalive_stream_leaves_one_record_for_all_of_its_renewals() {
    paused(async {
        for (events, mode, event, verdict) in [
            ("['leases']", "off", Some("begin"), Value::Null),
            ("['leases']", "shadow", Some("begin"), json!("would_refuse")),
            ("['refusals']", "shadow", Some("refusal"), json!("would_refuse")),
            ("['leases', 'refusals']", "shadow", Some("begin"), json!("would_refuse")),
            ("['refusals']", "off", None, Value::Null),
            ("['changes']", "shadow", None, Value::Null),
        ] {
            let audited = audited(events, mode, NONE);
            let client = audited.keyward.client().await.header("user-agent", "grpc-go/1.2");
            let streams = renewals(&audited, &client, 5).await;
            let rows = missing(&audited).await;
            let denied = "lease - (no_grant: lease) LeaseKeepAlive 5".to_owned();
            assert_eq!(rows, if mode == "shadow" { vec![denied] } else { Vec::new() });
            drop((streams, client));
            let records = records(audited).await;
            let Some(event) = event else {
                assert_eq!(records, [Value::Null; 0], "{events} {mode}");
                continue;
            };
            let [record] = &records[..] else { panic!("{events} {mode}: {records:#?}") };
            assert_eq!((&record["event"], &record["method"]), (&event.into(), &KEEP_ALIVE.into()));
            assert_eq!((&record["peer"], &record["code"]), (&PEER.into(), &"OK".into()));
            assert_eq!((&record["lease"], &record["actions"]), (&"7".into(), &json!(["lease"])));
            assert_eq!((&record["verdict"], &record["user_agent"]), (&verdict, &"grpc-go/1.2".into()));
            let is_judged = verdict.is_string();
            assert_eq!(record["rule"] == "no_grant: lease", is_judged, "{record}");
            assert_eq!(record["policy_generation"].is_string(), is_judged, "{record}");
        }
    });
}

#[test]
fn renewals_over_json_and_by_a_websocket_are_named_alike() {
    paused(async {
        let audited = audited("['refusals']", "shadow", NONE);
        let request = post("/v3/lease/keepalive", "", r#"{"ID":"7"}{"ID":"7"}"#);
        let script = async {
            let mut call = audited.member.called(KEEP_ALIVE).await;
            for _ in 0..2 {
                call.messages.next().await.expect("a renewal");
                call.say(&renewed(7, 60)).await.expect("taken");
            }
            while call.messages.next().await.is_ok() {}
        };
        drop(tokio::join!(told(audited.keyward.connect(), request.as_bytes()), script));
        let mut socket = open(&audited.keyward, "/v3/lease/keepalive", "").await;
        let message = tokio_tungstenite::tungstenite::Message::text(r#"{"ID":"8"}"#);
        futures_util::SinkExt::send(&mut socket, message).await.expect("sent");
        let mut call = audited.member.called(KEEP_ALIVE).await;
        call.messages.next().await.expect("a renewal");
        call.say(&renewed(8, 60)).await.expect("taken");
        assert_eq!(missing(&audited).await, ["lease - (no_grant: lease) LeaseKeepAlive 3"]);
        drop((socket, call));
        let records = records(audited).await;
        let leases: Vec<_> =
            records.iter().map(|record| record["lease"].as_str().expect("a lease")).collect();
        assert_eq!(leases, ["7", "8"], "{records:#?}");
    });
}

#[test]
fn a_refused_renewal_leaves_one_record_with_the_rule_and_the_lease() {
    paused(async {
        let audited = audited("['refusals']", "enforce", NONE);
        let client = audited.keyward.client().await;
        let mut stream = client.open(KEEP_ALIVE).await.expect("open");
        stream.say(&renew(7)).await;
        assert_eq!(stream.next().await.expect_err("refused").told(), DENIED);
        assert_eq!(missing(&audited).await, [""; 0], "it was refused");
        drop((stream, client));
        let records = records(audited).await;
        let [record] = &records[..] else { panic!("{records:#?}") };
        assert_eq!((&record["event"], &record["verdict"]), (&"refusal".into(), &"refused".into()));
        assert_eq!((&record["rule"], &record["lease"]), (&"no_grant: lease".into(), &"7".into()));
        assert_eq!((&record["refused"], &record["refused_by"]), (&true.into(), &"policy".into()));
    });
}

/// The member's answer about the keys of a lease.
async fn keys_read(audited: &Audited, lease: i64, keys: &[&str]) {
    let mut call = audited.member.called(TIME_TO_LIVE).await;
    let asked = LeaseTimeToLiveRequest::decode(call.message().await).expect("a request");
    assert_eq!(asked.id, lease);
    let keys = keys.iter().map(|key| (*key).to_owned().into()).collect();
    let answer = LeaseTimeToLiveResponse { header: Some(header(7)), id: lease, ttl: 5, granted_ttl: 9, keys };
    call.reply(&answer.encode_to_vec()).await;
}

/// The stream renews another lease too, so that a forbidden renewal only stays without an answer.
#[test]
fn the_keys_of_a_lease_that_may_not_be_written_are_named() {
    paused(async {
        let grants =
            "[[role.allow]]\nactions = ['lease']\n[[role.allow]]\nactions = ['write']\nprefix = '/a/'\n";
        for (mode, verdict) in [("shadow", "would_refuse"), ("enforce", "refused")] {
            let audited = audited("['refusals']", mode, grants);
            let client = audited.keyward.client().await;
            let mut stream = client.open(KEEP_ALIVE).await.expect("open");
            stream.say(&renew(7)).await;
            keys_read(&audited, 7, &["/a/1"]).await;
            let mut call = audited.member.called(KEEP_ALIVE).await;
            call.messages.next().await.expect("a renewal");
            call.say(&renewed(7, 60)).await.expect("taken");
            stream.next().await.expect("renewed");
            stream.say(&renew(8)).await;
            keys_read(&audited, 8, &["/a/2", "/b/1", "/b/2", "/c/1"]).await;
            settled().await;
            let rows: &[&str] = match mode {
                "shadow" => &[
                    "write /b/* (no_grant: write) LeaseKeepAlive 1",
                    "write /c/1 (no_grant: write) LeaseKeepAlive 1",
                ],
                _ => &[],
            };
            assert_eq!(missing(&audited).await, rows);
            stream.cancel();
            drop((call, client));
            let records = records(audited).await;
            let [record] = &records[..] else { panic!("{mode}: {records:#?}") };
            assert_eq!((&record["verdict"], &record["rule"]), (&verdict.into(), &"no_grant: write".into()));
            let ranges = record["ranges"].as_array().expect("ranges");
            assert!(ranges.contains(&json!({"action": "write", "keys_of_lease": "8"})), "{record}");
            assert!(ranges.contains(&json!({"action": "write", "key": "/c/1"})), "{record}");
        }
    });
}

/// A watch, an Observe and a Lock that waits.
struct Lasting {
    watching: (Stream, Call),
    observing: (Stream, Call),
    locking: (Stream, Call),
}

impl Lasting {
    async fn begin(audited: &Audited, client: &Client) -> Self {
        let mut stream = client.open(WATCH).await.expect("open");
        stream.say(&watch("/w/1", 5)).await;
        let mut call = audited.member.called(WATCH).await;
        let create = create_of(&call.messages.next().await.expect("a create")).expect("a create");
        call.say(&created(create.watch_id, 9)).await.expect("taken");
        stream.next().await.expect("created");
        let request = LeaderRequest { name: "/e".into() }.encode_to_vec();
        let observing = client.begin(OBSERVE, request).await.expect("sent");
        let observing = (observing, audited.member.called(OBSERVE).await);
        let request = LockRequest { name: "/l".into(), lease: 0 }.encode_to_vec();
        let lock = client.begin(LOCK, request).await.expect("sent");
        let call_of_lock = audited.member.called(LOCK).await;
        Self { watching: (stream, call), observing, locking: (lock, call_of_lock) }
    }

    /// The Lock is answered; the streams end with their client.
    async fn end(self) {
        let (mut stream, call) = self.locking;
        call.reply(&LockResponse { key: "/l/7".into(), header: Some(header(9)) }.encode_to_vec()).await;
        stream.next().await.expect("locked");
        drop((self.watching, self.observing));
    }
}

/// Method, event and verdict.
fn told_of(records: &[Value]) -> Vec<String> {
    let text = |value: &Value| value.as_str().unwrap_or("-").to_owned();
    let name = |record: &Value| text(&record["method"]).rsplit('/').next().unwrap_or_default().to_owned();
    let told =
        |record: &Value| format!("{} {} {}", name(record), text(&record["event"]), text(&record["verdict"]));
    let mut told: Vec<String> = records.iter().map(told).collect();
    told.sort();
    told
}

#[test]
fn each_kind_of_request_is_named_once_also_where_refusals_alone_have_records() {
    paused(async {
        let audited = audited("['refusals']", "shadow", NONE);
        let client = audited.keyward.client().await;
        let script = async { audited.member.called(RANGE).await.reply(&ranged(42)).await };
        // On a connection of its own: nothing is read for a revision that another stream was shown.
        let reader = audited.keyward.client().await;
        tokio::join!(reader.call(RANGE, range("/r")), script).0.message();
        let lasting = Lasting::begin(&audited, &client).await;
        let streams = renewals(&audited, &client, 2).await;
        // The Lock waits.
        tokio::time::sleep(Duration::from_secs(2)).await;
        let rows = missing(&audited).await;
        assert_eq!(
            rows,
            [
                "lease - (no_grant: lease) LeaseKeepAlive 2",
                "lock /e/* (no_grant: lock) Observe 1",
                "lock /l/* (no_grant: lock) Lock 1",
                "read /r (no_grant: read) Range 1",
                "watch /w/1 (no_grant: watch) Watch 1",
            ]
        );
        lasting.end().await;
        drop((streams, client, reader));
        let records = records(audited).await;
        let all = ["LeaseKeepAlive", "Lock", "Observe", "Range", "Watch"];
        assert_eq!(told_of(&records), all.map(|name| format!("{name} refusal would_refuse")), "{records:#?}");
        assert!(
            records.iter().all(|record| record["peer"] == PEER && record["code"] == "OK"),
            "{records:#?}"
        );
        let keys = |record: &&Value| record["method"] == LOCK && record["ranges"][0]["key"] == "/l/";
        assert_eq!(records.iter().filter(keys).count(), 1, "{records:#?}");
    });
}

#[test]
fn what_lasts_leaves_a_record_when_it_begins() {
    paused(async {
        let audited = audited("['changes', 'watches', 'leases']", "off", NONE);
        let client = audited.keyward.client().await;
        // A Lock that is answered at once has its one record at the end.
        let request = LockRequest { name: "/free".into(), lease: 0 }.encode_to_vec();
        let answer = LockResponse { key: "/free/7".into(), header: Some(header(9)) }.encode_to_vec();
        let script = async { audited.member.called(LOCK).await.reply(&answer).await };
        tokio::join!(client.call(LOCK, request), script).0.message();
        let lasting = Lasting::begin(&audited, &client).await;
        let streams = renewals(&audited, &client, 2).await;
        tokio::time::sleep(Duration::from_secs(2)).await;
        lasting.end().await;
        drop((streams, client));
        let (all, _) = audited.ended().await;
        assert_all_valid(&all);
        let of_calls: Vec<Value> = all.into_iter().filter(|record| record["method"].is_string()).collect();
        assert_eq!(
            told_of(&of_calls),
            [
                "LeaseKeepAlive begin -",
                "Lock begin -",
                "Lock change -",
                "Lock change -",
                "Observe begin -",
                "Observe watch_end -",
                "Watch watch_create -",
                "Watch watch_end -"
            ],
            "{of_calls:#?}"
        );
    });
}

#[test]
fn what_is_open_when_the_policy_changes_is_named_once_by_the_new_policy() {
    paused(async {
        let audited = audited("['refusals']", "off", NONE);
        let client = audited.keyward.client().await;
        let lasting = Lasting::begin(&audited, &client).await;
        let (mut stream, mut call) = renewals(&audited, &client, 1).await;
        assert_eq!(missing(&audited).await, [""; 0]);
        let folder = &audited.folder;
        let publish = |mode: &str, grants: &str| {
            let lines = policy(folder, mode, grants);
            audited.keyward.publish_rules(folder.path(), "", &lines);
        };
        publish("shadow", NONE);
        settled().await;
        let open = [
            "lock /e/* (no_grant: lock) Observe 1",
            "lock /l/* (no_grant: lock) Lock 1",
            "watch /w/1 (no_grant: watch) Watch 1",
        ];
        assert_eq!(missing(&audited).await, open);
        // The same policy again is no other.
        publish("shadow", NONE);
        settled().await;
        assert_eq!(missing(&audited).await, open);
        stream.say(&renew(7)).await;
        call.messages.next().await.expect("a renewal");
        call.say(&renewed(7, 60)).await.expect("taken");
        stream.next().await.expect("renewed");
        assert_eq!(missing(&audited).await.len(), 4);
        // Another policy begins anew, with what it denies.
        publish("shadow", "[[role.allow]]\nactions = ['lock', 'watch']\neverything = true\n");
        settled().await;
        assert_eq!(missing(&audited).await, [""; 0]);
        stream.say(&renew(7)).await;
        call.messages.next().await.expect("a renewal");
        call.say(&renewed(7, 60)).await.expect("taken");
        stream.next().await.expect("renewed");
        assert_eq!(missing(&audited).await, ["lease - (no_grant: lease) LeaseKeepAlive 1"]);
        lasting.end().await;
        drop((stream, call, client));
        let records = records(audited).await;
        assert_eq!(
            told_of(&records),
            [
                "LeaseKeepAlive refusal would_refuse",
                "LeaseKeepAlive refusal would_refuse",
                "Lock refusal would_refuse",
                "Observe refusal would_refuse",
                "Watch refusal would_refuse"
            ],
            "{records:#?}"
        );
        assert!(records.iter().any(|record| record["ranges"][0]["key"] == "/w/1"), "{records:#?}");
    });
}
