//! The history of Patroni's leader key, read from etcd itself when everything has happened.
//!
//! Owns: the marks that a test writes between its faults, and reading all revisions from the first one on. Must not know Keyward.
//! Invariants: nothing is compacted, so no change of the key can be missed; marks and changes have one order, etcd's.

use std::time::Duration;

use data_encoding::BASE64;
use serde_json::Value;

use crate::harness::{Cluster, wait};

const LIMIT: Duration = Duration::from_secs(60);
const MARK: &str = "/marks";

/// What happened to the leader key, or a mark between.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum LeaderEvent {
    /// A node wrote it, with this lease.
    Held { holder: String, lease: i64 },
    /// It was deleted: by its holder, or with its lease.
    Lost,
    /// The test wrote this.
    Mark(String),
}

/// Writes a mark. A member may be away.
pub(super) async fn mark(cluster: &Cluster, text: &str) {
    let ctl = cluster.ctl_as_root();
    let written = async || (ctl.run(&["put", MARK, text]).await.code == Some(0)).then_some(());
    wait::until(LIMIT, "a mark is written", written).await;
}

/// Everything from the first revision to the mark `end`, which is written here.
pub(super) async fn read(cluster: &Cluster, leader_key: &str) -> Vec<LeaderEvent> {
    const END: &str = "the end";
    mark(cluster, END).await;
    let log = cluster.folder().join("history");
    let watch = cluster.ctl_as_root().start(&["watch", "--prefix", "/", "--rev=1", "-w=json"], &log);
    let end = BASE64.encode(END.as_bytes());
    watch.wrote(LIMIT, "the end", |text| text.contains(&end).then_some(())).await;
    let output = watch.output();
    // The last line may be cut anywhere after the mark's.
    let lines = output.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let mut events: Vec<LeaderEvent> = Vec::new();
    for line in lines {
        assert_ne!(line["Canceled"], true, "etcd has its history: {line}");
        let told = line["Events"].as_array().cloned().unwrap_or_default();
        events.extend(told.iter().filter_map(|event| leader_event(event, leader_key)));
    }
    assert_eq!(events.pop(), Some(LeaderEvent::Mark(END.into())));
    events
}

fn leader_event(event: &Value, leader_key: &str) -> Option<LeaderEvent> {
    let text = |field: &str| {
        let encoded = event["kv"][field].as_str().unwrap_or_default();
        String::from_utf8(BASE64.decode(encoded.as_bytes()).expect("base64")).unwrap_or_default()
    };
    let key = text("key");
    if key == MARK {
        return Some(LeaderEvent::Mark(text("value")));
    }
    let deleted = event["type"] == 1;
    (key == leader_key).then(|| {
        if deleted {
            return LeaderEvent::Lost;
        }
        LeaderEvent::Held { holder: text("value"), lease: event["kv"]["lease"].as_i64().unwrap_or_default() }
    })
}
