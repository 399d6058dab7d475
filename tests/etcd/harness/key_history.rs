//! Every change of the keys below a prefix, read from etcd itself when everything has happened.
//!
//! Owns: the reading, by etcdctl, from the first revision on. Must not know Keyward. Invariants: a history
//! that was compacted is not told at all; the changes have etcd's order.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use data_encoding::BASE64;
use serde_json::Value;
use tempfile::NamedTempFile;

use super::{Cluster, wait};

const LIMIT: Duration = Duration::from_secs(60);
/// The limit of one member, so that another one is asked too.
const MEMBER_LIMIT: Duration = Duration::from_secs(15);
/// What the key behind the last change is called, with a number of the reading.
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
    static READ: AtomicUsize = AtomicUsize::new(0);
    let end = format!("{prefix}{END} {}", READ.fetch_add(1, Ordering::Relaxed));
    write(cluster, &end, "now").await;
    let read = async || {
        for url in cluster.urls() {
            // One member alone: another one may not know the token yet.
            if let Some(changes) = of_member(cluster, url, prefix, &end).await {
                return Some(changes);
            }
        }
        None
    };
    wait::until(LIMIT, "etcd tells its history", read).await
}

/// The changes as one member tells them; `None` where it tells nothing.
async fn of_member(cluster: &Cluster, url: String, prefix: &str, end: &str) -> Option<Vec<KeyChange>> {
    let log = NamedTempFile::new_in(cluster.folder()).expect("the folder is ours");
    let ctl = cluster.ctl_as_root().to(vec![url]);
    let watch = ctl.start(&["watch", "--prefix", prefix, "--rev=1", "-w=json"], log.path());
    let look = async || {
        let mut changes = Vec::new();
        // The last line may be cut.
        for line in watch.output().lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()) {
            changes.extend(line["Events"].as_array().into_iter().flatten().map(change));
        }
        // Whoever still writes may write behind the end.
        match changes.iter().position(|change: &KeyChange| change.key == end) {
            Some(at) => {
                changes.truncate(at);
                Some(Some(changes))
            }
            None => watch.exit().map(|_| None),
        }
    };
    wait::within_limit(MEMBER_LIMIT, look).await.flatten()
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
