//! A watch that is told nothing for long does not lose its place to compaction: Keyward asks for its progress, or where the member
//! cannot be asked, takes what the member tells by itself.

use std::time::Duration;

use keyward::pb::etcdserverpb::WatchResponse;
use keyward::tasks::Tasks;
use tokio::time::timeout;

use crate::harness::binary::Version;
use crate::harness::keyward::{Keyward, Site};
use crate::harness::{Cluster, Options, every_version, side_by_side, wait};
use crate::rewatch::local;
use crate::steady::of_each;
use crate::streams::{Connection, Stream, watch_of};

const LIMIT: Duration = Duration::from_secs(60);

/// How a watch comes to know that the cluster went on without it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    /// Not at all.
    Never,
    /// Keyward asks.
    Asked,
    /// The member tells it.
    Told,
}

/// Old members cannot be asked: their answer may run ahead of events, or never come (V2 and V3 of the fact sheet).
fn keeps_fresh(version: &Version, progress: Progress) -> bool {
    let can_be_asked = version.at_least("3.5.13") || (version.at_least("3.4.31") && !version.at_least("3.5"));
    match progress {
        Progress::Never => false,
        Progress::Asked => can_be_asked,
        Progress::Told => true,
    }
}

/// Messages that the members sent on Watch streams.
async fn said(cluster: &Cluster) -> f64 {
    of_each(cluster, "grpc_server_msg_sent_total", &[("grpc_method", "Watch")]).await.iter().sum()
}

async fn next(stream: &mut Stream) -> WatchResponse {
    timeout(LIMIT, stream.says.next()).await.expect("something comes").expect("the stream goes on")
}

/// What an idle watch is told first after writes elsewhere, a compaction of all of them, the kill of its member, and a write to its
/// key.
async fn told_after(version: &Version, progress: Progress) -> WatchResponse {
    let tasks = Tasks::default();
    // What a member tells on its own, where it is told to.
    let own = if version.at_least("3.6") { "" } else { "experimental-" };
    let own = format!("--{own}watch-progress-notify-interval=500ms");
    let flags = if progress == Progress::Told { vec![own] } else { Vec::new() };
    let mut cluster = Cluster::start(version, Options { members: 3, flags, ..Options::default() }).await;
    let site = Site::new();
    let idle = if progress == Progress::Asked { "500ms" } else { "0s" };
    let config = format!("{}watch.idle_progress = \"{idle}\"\n", site.in_front_of(&cluster));
    let keyward = Keyward::start(site, &config).await;
    let client = Connection::open(&tasks, keyward.site().listen).await;
    let mut stream = client.watch().await;
    stream.asks.create(watch_of("k", false, 0));
    assert!(next(&mut stream).await.created);
    let watchers = of_each(&cluster, "etcd_debugging_mvcc_watcher_total", &[]).await;
    let carries = watchers.iter().position(|count| *count > 0.0).expect("a member carries it");
    let survivor = (carries + 1) % 3;

    let direct = Connection::open(&tasks, cluster.address(survivor)).await;
    for _ in 0..5 {
        direct.put([("elsewhere".into(), Vec::new())].into_iter()).await.expect("written");
    }
    let head = direct.head().await;
    if keeps_fresh(version, progress) {
        // The second one from now on was asked for, or sent, after the writes; when the third is sent, it has arrived.
        let before = said(&cluster).await;
        let told = async || (said(&cluster).await >= before + 3.0).then_some(());
        wait::until(LIMIT, "the member tells its progress", told).await;
    }
    let ctl = cluster.ctl();
    ctl.ok(&["compact", &head.to_string()]).await;
    for at in (0..3).filter(|at| *at != carries) {
        let ctl = cluster.ctl().to(vec![cluster.url(at)]);
        let old = format!("--rev={}", head - 1);
        let gone = async || {
            let read = ctl.run(&["get", "k", &old, "--consistency=s"]).await;
            read.stderr.contains("required revision has been compacted").then_some(())
        };
        wait::until(LIMIT, "the compaction reaches the member", gone).await;
    }
    cluster.kill(carries);
    cluster.leader().await;
    let written = async || direct.put([("k".into(), b"news".to_vec())].into_iter()).await;
    wait::until(LIMIT, "a write is taken", written).await;
    next(&mut stream).await
}

#[test]
fn an_idle_watch_outlives_compaction_where_its_progress_is_known() {
    let of_version = async |version: &Version| {
        for progress in [Progress::Never, Progress::Asked, Progress::Told] {
            let told = told_after(version, progress).await;
            let what = if told.canceled { "ended as compacted" } else { "went on" };
            println!("{version}, progress {progress:?}: {what}");
            if keeps_fresh(version, progress) {
                let keys: Vec<_> = told.events.iter().filter_map(|event| event.kv.as_ref()).collect();
                let is_news = keys.len() == 1 && *keys[0].value == *b"news";
                assert!(!told.canceled && is_news, "{version}: {told:?}");
            } else {
                assert!(told.canceled && told.compact_revision > 0, "{version}: {told:?}");
            }
        }
    };
    local(async {
        side_by_side(&every_version(), of_version).await;
    });
}
