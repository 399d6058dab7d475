//! Every change of the keys below a prefix, read from etcd itself when everything has happened.
//!
//! Owns: the reading, by etcdctl, from the first revision on. Must not know Keyward. Invariants: nothing is compacted, or the reading
//! fails; the changes have etcd's order.

use std::time::Duration;

use data_encoding::BASE64;
use serde_json::Value;

use super::{Cluster, wait};

const LIMIT: Duration = Duration::from_secs(60);
/// What the key behind the last change is called.
const END: &str = "~the end";

/// A change of one key.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct KeyChange {
    pub(crate) revision: i64,
    pub(crate) key: String,
    /// `None` where it was deleted.
    pub(crate) value: Option<String>,
}

/// Writes a key as root. A member may be away.
pub(crate) async fn write(cluster: &Cluster, key: &str, value: &str) {
    let ctl = cluster.ctl_as_root();
    let written = async || (ctl.run(&["put", key, value]).await.code == Some(0)).then_some(());
    wait::until(LIMIT, "a key is written", written).await;
}

/// All changes below `prefix` until now.
pub(crate) async fn below(cluster: &Cluster, prefix: &str) -> Vec<KeyChange> {
    let end = format!("{prefix}{END}");
    write(cluster, &end, "now").await;
    let log = cluster.folder().join(format!("history{}", prefix.replace('/', "-")));
    let watch = cluster.ctl_as_root().start(&["watch", "--prefix", prefix, "--rev=1", "-w=json"], &log);
    let encoded = BASE64.encode(end.as_bytes());
    watch.wrote(LIMIT, "the end", |text| text.contains(&encoded).then_some(())).await;
    let mut changes = Vec::new();
    loop {
        let output = watch.output();
        // The last line may be cut anywhere behind the key.
        for line in output.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()) {
            assert_ne!(line["Canceled"], true, "etcd has its history: {line}");
            changes.extend(line["Events"].as_array().into_iter().flatten().map(change));
        }
        if changes.last().is_some_and(|last| last.key == end) {
            break;
        }
        changes.clear();
        watch.wrote(LIMIT, "the whole line", |text| (text.len() > output.len()).then_some(())).await;
    }
    changes.pop();
    changes
}

fn change(event: &Value) -> KeyChange {
    let kv = &event["kv"];
    let text = |field: &str| {
        let encoded = kv[field].as_str().unwrap_or_default();
        String::from_utf8_lossy(&BASE64.decode(encoded.as_bytes()).expect("base64")).into_owned()
    };
    let is_delete = event["type"] == 1;
    KeyChange {
        revision: kv["mod_revision"].as_i64().expect("every event has its revision"),
        key: text("key"),
        value: (!is_delete).then(|| text("value")),
    }
}
