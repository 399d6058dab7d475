//! A stderr that nobody reads stops nothing: calls, logins, the admin address and the end of the process go on, the records that
//! find no room are counted, and the log says so once it is read again.

use std::io::{PipeReader, Read as _};
use std::time::Duration;

use serde_json::Value;
use tokio::task::spawn_blocking;

use crate::caller::Caller;
use crate::harness::keyward::{Keyward, Site};
use crate::harness::{Auth, Cluster, Options, evidence, versions, wait};

/// A pipe holds 64 KiB, and the log's buffer as much again: some 300 records each.
const CALLS: usize = 2_000;
const LIMIT: Duration = Duration::from_secs(60);
const LOST: &str = "keyward_log_records_lost_total";

async fn start(cluster: &Cluster) -> (Keyward, PipeReader) {
    let site = Site::new();
    let config = format!("{}log.format = \"json\"\nlog.buffer = \"64KiB\"\n", site.in_front_of(cluster));
    Keyward::start_with_pipe(site, &config).await
}

/// Many calls, and logins before, between and after them; nothing of it waits for the log.
async fn calls_and_logins(keyward: &Keyward) {
    let address = keyward.site().listen;
    let alice = Caller::log_in(address, "alice").await;
    for number in 0..CALLS {
        if number % 500 == 0 {
            Caller::log_in(address, "alice").await;
        }
        alice.put("/a/k", b"v".to_vec(), 0).await.expect("written");
    }
    Caller::log_in(address, "root").await;
}

async fn lost(keyward: &Keyward) -> f64 {
    keyward.metric(LOST, &[("reason", "queue_full")]).await
}

/// Reads all that comes until the process has ended.
fn read_all(mut pipe: PipeReader) -> Vec<Value> {
    let mut text = String::new();
    pipe.read_to_string(&mut text).expect("UTF-8");
    evidence::text("keyward's log", &text);
    // Each line is one whole record.
    text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|_| panic!("{line}"))).collect()
}

#[tokio::test]
async fn calls_logins_health_and_the_end_do_not_wait_for_a_log_that_nobody_reads() {
    for version in &versions() {
        let cluster =
            Cluster::start(version, Options { auth: Auth::On { extra_users: 0 }, ..Options::default() })
                .await;
        let (keyward, unread) = start(&cluster).await;
        calls_and_logins(&keyward).await;
        for path in ["/livez", "/readyz"] {
            assert_eq!(keyward.admin(path).await.0, 200, "{version}: {path}");
        }
        let lost = lost(&keyward).await;
        assert!(lost > 1_000.0, "{version}: {lost} records were lost");
        let (ended, _) = keyward.terminate().await;
        assert!(ended.success(), "{version}: {ended}");
        drop(unread);
    }
}

#[tokio::test]
async fn a_log_that_is_read_again_is_whole_and_tells_what_was_lost() {
    let version = &versions()[0];
    let cluster =
        Cluster::start(version, Options { auth: Auth::On { extra_users: 0 }, ..Options::default() }).await;
    let (keyward, unread) = start(&cluster).await;
    calls_and_logins(&keyward).await;
    let lost_first = lost(&keyward).await;
    assert!(lost_first > 1_000.0, "{lost_first} records were lost");
    let reading = spawn_blocking(move || read_all(unread));
    // Once it is written again a further record is not lost.
    let alice = Caller::log_in(keyward.site().listen, "alice").await;
    let written = async || {
        let before = lost(&keyward).await;
        alice.put("/a/k", b"v".to_vec(), 0).await.expect("written");
        (lost(&keyward).await == before).then_some(())
    };
    wait::until(LIMIT, "records are written again", written).await;
    let (lost, _) = (lost(&keyward).await, keyward.terminate().await);
    let records = reading.await.expect("the reader ends with the process");
    let told = |record: &Value| {
        let is_loss =
            record["message"].as_str().is_some_and(|message| message.starts_with("log records were lost"));
        is_loss.then(|| record["records"].as_f64().expect("a count"))
    };
    let told: f64 = records.iter().filter_map(told).sum();
    assert_eq!(told, lost, "all of them are told");
    let puts = |record: &&Value| record["method"] == "/etcdserverpb.KV/Put";
    let puts = records.iter().filter(puts).count();
    println!("{puts} of some {CALLS} Puts are in the log, {told} records were lost");
    let calls = u32::try_from(CALLS).expect("few");
    assert!(
        f64::from(u32::try_from(puts).expect("few")) + lost >= f64::from(calls),
        "{puts} records of calls, {lost} lost"
    );
    assert_eq!(records.last().expect("some")["message"], "ended", "the last record was written at the end");
}
