//! `tests/model` is held to real etcd: random scripts run on both, and what each stream was told is compared, response by response.
//!
//! Owns: how many scripts, on which versions, and how often each kind of answer must have come. Must not know what a script does
//! (`run`, `dice`), how a stream is read (`pair`) or what equal means (`transcript`). Invariants: a seed that differs is told with how to
//! repeat it; a kind of answer that never came proves nothing, so each has a floor.

mod dice;
mod overtaken;
mod pair;
mod run;
mod server;
mod slow;
mod ticks;
mod transcript;

use std::{
    collections::BTreeMap,
    env,
    sync::atomic::{AtomicU64, Ordering},
    time::Instant,
};

use futures_util::future::try_join_all;

use crate::{
    harness::{
        binary::{Version, full},
        every_version, side_by_side,
    },
    model::flavor::Flavor,
};

use self::{run::replay, server::Server};

/// Scripts on each version.
const SHORT: u64 = 60;
const FULL: u64 = 1000;
/// Servers of a version that run scripts at the same time. A server mostly waits for its next pass over watches that are behind.
const SERVERS_SHORT: usize = 3;
const SERVERS_FULL: usize = 6;

/// What happened, by kind.
type Counts = BTreeMap<&'static str, u64>;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_model_answers_as_real_etcd_does() {
    let number = |name| env::var(name).ok().map(|text| text.parse::<u64>().expect("a number"));
    let only = number("KEYWARD_SEED");
    let count = number("KEYWARD_SEEDS").unwrap_or(if full() { FULL } else { SHORT });
    let of_version = async |version: &Version| {
        let began = Instant::now();
        let seeds = only.map_or(0..count, |seed| seed..seed + 1);
        let scripts = seeds.end - seeds.start;
        let counts = match replay_all(version, seeds).await {
            Ok(counts) => counts,
            Err(difference) => panic!("etcd {version}: {difference}"),
        };
        println!("model replay on etcd {version}: {scripts} scripts in {} s", began.elapsed().as_secs());
        counts.iter().for_each(|(kind, count)| println!("  {kind}: {count}"));
        if scripts >= SHORT {
            check_floors(flavor(version), scripts, &counts);
        }
    };
    side_by_side(&every_version(), of_version).await;
}

/// Which row of the model a version is.
fn flavor(version: &Version) -> Flavor {
    match version.to_string().as_str() {
        "3.4.23" => Flavor::V3_4_23,
        "3.5.1" => Flavor::V3_5_1,
        _ if version.at_least("3.5.30") => Flavor::V3_5_35,
        unknown => panic!("the model has no row for etcd {unknown}"),
    }
}

async fn replay_all(version: &Version, seeds: std::ops::Range<u64>) -> Result<Counts, String> {
    let next = AtomicU64::new(seeds.start);
    let most = if full() { SERVERS_FULL } else { SERVERS_SHORT };
    let servers = usize::try_from(seeds.end - seeds.start).unwrap_or(most).min(most);
    let work = (0..servers).map(|_| async {
        let mut server = Server::start(version, flavor(version), &[]).await;
        let mut counts = Counts::new();
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= seeds.end {
                return Ok::<Counts, String>(counts);
            }
            let told = replay(&mut server, seed, &mut counts).await;
            told.map_err(|what| format!("seed {seed}: {what}\nKEYWARD_SEED={seed} repeats it"))?;
        }
    });
    let mut total = Counts::new();
    for counts in try_join_all(work).await? {
        counts.into_iter().for_each(|(kind, count)| *total.entry(kind).or_default() += count);
    }
    Ok(total)
}

/// At least so many in a thousand scripts. What a version never does must not be there.
fn floors(flavor: Flavor) -> Vec<(&'static str, u64)> {
    let only = |switch: bool, floor: u64| if switch { floor } else { 0 };
    vec![
        ("steps", 25_000),
        ("responses", 60_000),
        ("created", 15_000),
        ("canceled", 10_000),
        ("canceled after compacted", 40),
        ("compacted", 200),
        ("events, live", 20_000),
        ("events, caught up", 400),
        ("events, several of one revision", 4_000),
        ("deletes", 10_000),
        ("deletes, at the very compaction", only(flavor.keeps_compacted_tombstone, 15)),
        ("previous values", 40_000),
        ("fragments", 300),
        ("batches cut at 1000 revisions", 30),
        ("open end, asked by alice", 40),
        ("progress", 800),
        ("progress, unanswered", only(flavor.ordered_progress, 500)),
        ("refused: denied", 700),
        ("refused: token", only(flavor.exact_refusals, 800)),
        ("refused: no user", only(flavor.exact_refusals, 400)),
        ("refused: duplicate id", 400),
        ("refused: empty range", 500),
        ("refused: negative start", only(flavor.refuses_negative_start, 120)),
        ("muted answers", only(!flavor.exact_refusals, 400)),
        ("half-closed streams", 80),
    ]
}

fn check_floors(flavor: Flavor, scripts: u64, counts: &Counts) {
    let mut faults = Vec::new();
    for (kind, floor) in floors(flavor) {
        let count = counts.get(kind).copied().unwrap_or(0);
        let least = (floor * scripts / FULL).max(1);
        match floor {
            0 if count > 0 => faults.push(format!("{kind}: {count}, but this version has none")),
            1.. if count < least => faults.push(format!("{kind}: {count}, but {least} are wanted")),
            _ => {}
        }
    }
    assert!(faults.is_empty(), "in {scripts} scripts: {faults:#?}");
}
