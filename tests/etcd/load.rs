//! Must show 3: tokens that live 2 s under a load that goes on for much longer. Nobody notices, and nobody logs in again.

use crate::harness::{Cluster, binary, versions};
use crate::steady::{Load, options, tally};

/// A machine that tests other things too must not elect by itself: the election is not what this is about.
const TIMING: (u32, u32) = (250, 2500);
/// A run in which the leader changed all the same proves nothing, and is repeated this often.
const REPEATS: usize = 2;

#[tokio::test]
async fn a_load_outlives_its_tokens_unnoticed_with_one_login_per_member() {
    let length = if binary::full() { "60s" } else { "15s" };
    for version in versions() {
        let mut void = 0;
        loop {
            let cluster = Cluster::start(&version, options(TIMING)).await;
            let load = Load::start(&cluster, 0, &["--length", length, "--ttl", "6"]).await;
            let ended = load.ended().await;
            println!("{version}: {}", ended.record.the("summary"));
            println!("{version}: resumes of watches and keepalives {:?}", ended.resumes().await);
            if !ended.leader_stayed(&cluster).await && void < REPEATS {
                void += 1;
                println!(
                    "{version}: void run {void}: the leader changed by itself; {:?}",
                    tally(&ended.failed())
                );
                continue;
            }
            ended.streams_held();
            assert_eq!(ended.record.errors(), Vec::<String>::new());
            ended.logged_in_once(&cluster).await;
            break;
        }
    }
}
