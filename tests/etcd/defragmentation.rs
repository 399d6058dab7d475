//! Story 11: every member is defragmented under load, and nobody notices.

use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use futures_util::{StreamExt as _, stream};
use keyward::pb::etcdserverpb::kv_client::KvClient;
use keyward::pb::etcdserverpb::maintenance_client::MaintenanceClient;
use keyward::pb::etcdserverpb::{DefragmentRequest, RangeRequest};

use crate::caller::Caller;
use crate::harness::binary::full;
use crate::harness::{Auth, Cluster, Options, newest, versions, wait};
use crate::topology::Front;

/// Of each value that fills the store.
const VALUE: usize = 256 << 10;
/// Those who read and those who write all the time, a moment apart.
const READERS: usize = 8;
const WRITERS: usize = 4;
const APART: Duration = Duration::from_millis(4);

/// What the load saw.
#[derive(Default)]
struct Seen {
    reads: RefCell<Vec<Duration>>,
    writes: RefCell<Vec<Duration>>,
    failed: RefCell<Vec<String>>,
    ended: Cell<bool>,
}

impl Seen {
    fn note(&self, into: &RefCell<Vec<Duration>>, began: Instant, error: Option<tonic::Status>) {
        match error {
            None => into.borrow_mut().push(began.elapsed()),
            Some(status) => {
                self.failed.borrow_mut().push(format!("{:?} {}", status.code(), status.message()))
            }
        }
    }

    fn told(&self) -> String {
        let told = |all: &RefCell<Vec<Duration>>| {
            let mut all = all.borrow().clone();
            all.sort_unstable();
            let at =
                |share: usize| all.get((all.len() * share / 1000).min(all.len().saturating_sub(1))).copied();
            format!("{} (p50 {:?} p99 {:?} max {:?})", all.len(), at(500), at(990), all.last())
        };
        format!(
            "reads {}, writes {}, failed {}",
            told(&self.reads),
            told(&self.writes),
            self.failed.borrow().len()
        )
    }
}

/// A linearizable read.
async fn read(caller: &Caller, key: &str) -> Result<Vec<u8>, tonic::Status> {
    let range = RangeRequest { key: key.to_owned().into(), ..RangeRequest::default() };
    let answer = KvClient::new(caller.channel.clone()).range(caller.request(range)).await?.into_inner();
    Ok(answer.kvs.first().map(|kv| kv.value.to_vec()).unwrap_or_default())
}

/// Reads and writes through `callers`, in turn, while `work` goes on.
async fn under_load<T>(callers: &[Caller], place: &str, work: impl Future<Output = T>) -> (T, Seen) {
    let seen = Seen::default();
    let one = async |number: usize| {
        let key = format!("/a/{place}/{number}");
        let mut last = 0;
        for turn in 0.. {
            if seen.ended.get() {
                break;
            }
            let caller = &callers[(number + turn) % callers.len()];
            let began = Instant::now();
            if number < WRITERS {
                let put = caller.put(&key, turn.to_string().into_bytes(), 0).await;
                last = if put.is_ok() { turn } else { last };
                seen.note(&seen.writes, began, put.err());
            } else {
                seen.note(&seen.reads, began, read(caller, "/a/seed").await.err());
            }
            tokio::time::sleep(APART).await;
        }
        if number < WRITERS {
            let kept = read(&callers[0], &key).await.expect("a read");
            let kept: usize = String::from_utf8_lossy(&kept).parse().expect("a number");
            assert!(kept >= last, "{key}: {last} was acknowledged, and there is {kept}");
        }
    };
    let loads = join_all((0..READERS + WRITERS).map(one));
    let begins = || seen.reads.borrow().len() > 100 && seen.writes.borrow().len() > 50;
    let work = async {
        wait::until(Duration::from_secs(60), "the load goes", async || begins().then_some(())).await;
        // What was before counts for neither.
        seen.reads.borrow_mut().clear();
        seen.writes.borrow_mut().clear();
        let done = work.await;
        seen.ended.set(true);
        done
    };
    let (done, _) = tokio::join!(work, loads);
    (done, seen)
}

#[tokio::test]
async fn every_member_is_defragmented_under_load_and_no_call_fails() {
    let megabytes = if full() { 500 } else { 20 };
    let versions = if full() { vec![newest("3.5"), newest("3.6")] } else { versions() };
    for version in versions {
        let flags = vec!["--quota-backend-bytes=4294967296".to_owned()];
        let options = Options { members: 3, auth: Auth::On { extra_users: 0 }, flags, ..Options::default() };
        let cluster = Cluster::start(&version, options).await;
        let front = Front::before(&cluster, 3, "").await;
        let mut callers = Vec::new();
        for i in 0..cluster.len() {
            callers.push(Caller::log_in(cluster.address(i), "root").await);
        }
        let fill = (0..megabytes << 20).step_by(VALUE).map(|at| {
            let caller = &callers[at / VALUE % 3];
            async move { caller.put(&format!("/a/fill/{at}"), vec![7; VALUE], 0).await.expect("written") }
        });
        stream::iter(fill).buffer_unordered(8).for_each(|_| async {}).await;
        callers[0].put("/a/seed", b"seed".to_vec(), 0).await.expect("written");

        let direct = cluster.ctl_as_root();
        let in_turn = async {
            let began = Instant::now();
            for i in 0..cluster.len() {
                direct.to(vec![cluster.url(i)]).ok(&["--command-timeout=300s", "defrag"]).await;
            }
            began.elapsed()
        };
        let (took, bare) = under_load(&callers, "bare", in_turn).await;
        println!("{version}, {megabytes} MB, directly, {took:?}: {}", bare.told());

        // As many connections as there were members.
        let root = Caller::log_in(front.keyward.site().listen, "root").await;
        let through = [
            root.clone(),
            root.at(front.keyward.site().listen).await,
            root.at(front.keyward.site().listen).await,
        ];
        let before = calls(&cluster).await;
        let all = async {
            let began = Instant::now();
            let mut maintenance = MaintenanceClient::new(root.channel.clone());
            let answer = maintenance.defragment(root.request(DefragmentRequest {})).await;
            (answer.map(drop), began.elapsed())
        };
        let ((answer, took), seen) = under_load(&through, "through", all).await;
        println!("{version}, {megabytes} MB, through Keyward, {took:?}: {}", seen.told());
        answer.unwrap_or_else(|status| panic!("{version}: {status:?}\n{}", front.keyward.log()));
        assert_eq!(*seen.failed.borrow(), Vec::<String>::new(), "{version}");
        let each: Vec<_> =
            calls(&cluster).await.iter().zip(before).map(|(after, before)| after - before).collect();
        assert_eq!(each, [1.0, 1.0, 1.0], "{version}: each member once");
        let again =
            MaintenanceClient::new(root.channel.clone()).defragment(root.request(DefragmentRequest {})).await;
        assert!(again.is_ok(), "{version}: {again:?}");
        let now = calls(&cluster).await;
        assert_eq!(now.iter().sum::<f64>(), 6.0, "{version}: they were done a moment ago: {now:?}");
    }
}

async fn calls(cluster: &Cluster) -> Vec<f64> {
    let mut calls = Vec::new();
    for i in 0..cluster.len() {
        calls.push(cluster.counter(i, "grpc_server_started_total", &[("grpc_method", "Defragment")]).await);
    }
    calls
}
