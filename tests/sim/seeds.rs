//! The tests: many seeds, one seed twice, and the faults that the checker must see.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use crate::counts::Counts;
use crate::run::{self, Outcome};
#[cfg(feature = "faults")]
use crate::run::{BUSY, RESTLESS};

/// In every run of CI, and at full length.
const SEEDS: u64 = 2_000;
const ALL_SEEDS: u64 = 100_000;
/// How often a long run says where it is.
const TOLD_EVERY: u64 = 10_000;
/// Failing seeds that are told.
const TOLD: usize = 8;
#[cfg(feature = "faults")]
const THOUSAND: u64 = 1_000;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().and_then(|text| text.parse().ok())
}

/// Runs seeds on all cores, until `enough` of them failed; the counts of all, and those that failed.
fn run_all(seeds: u64, enough: usize, prepare: impl Fn() + Sync) -> (Counts, Vec<(u64, String)>) {
    let next = AtomicU64::new(0);
    let total = Mutex::new((Counts::default(), Vec::new()));
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..cores {
            scope.spawn(|| {
                prepare();
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds {
                        return;
                    }
                    if seed > 0 && seed.is_multiple_of(TOLD_EVERY) {
                        println!("{seed} of {seeds} seeds");
                    }
                    let _reproduce = Reproduce(seed);
                    let outcome = run::run(seed);
                    let mut total = total.lock().expect("no thread panicked");
                    total.0.add(&outcome.counts);
                    if let Some(why) = outcome.violation {
                        total.1.push((seed, why));
                        if total.1.len() >= enough {
                            next.store(seeds, Ordering::Relaxed);
                        }
                    }
                }
            });
        }
    });
    let (counts, mut failed) = total.into_inner().expect("no thread panicked");
    failed.sort();
    (counts, failed)
}

/// Says which seed panicked.
struct Reproduce(u64);

impl Drop for Reproduce {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("seed {} fails; KEYWARD_SEED={} repeats it", self.0, self.0);
        }
    }
}

fn tell_one(seed: u64) {
    let outcome = run::run(seed);
    for line in &outcome.trace {
        println!("{line}");
    }
    println!("{}", outcome.counts.table(1));
    assert!(outcome.violation.is_none(), "seed {seed}: {}", outcome.violation.unwrap_or_default());
}

#[test]
fn every_watch_keeps_its_promise_whatever_happens() {
    if let Some(seed) = number("KEYWARD_SEED") {
        return tell_one(seed);
    }
    let full = number("KEYWARD_TEST_FULL") == Some(1);
    let seeds = number("KEYWARD_SEEDS").unwrap_or(if full { ALL_SEEDS } else { SEEDS });
    let began = Instant::now();
    let (counts, failed) = run_all(seeds, TOLD, || {});
    println!("{seeds} seeds in {:.1} s", began.elapsed().as_secs_f64());
    println!("{}", counts.table(seeds));
    let failed: Vec<String> =
        failed.iter().map(|(seed, why)| format!("KEYWARD_SEED={seed}: {why}")).collect();
    assert!(failed.is_empty(), "broken promises:\n{}", failed.join("\n"));
    let few = counts.too_few(seeds);
    assert!(few.is_empty(), "too little happened:\n{}", few.join("\n"));
}

/// The checker is checked: each fault that is put into Keyward on purpose is seen, and by a broken promise.
#[cfg(feature = "faults")]
#[test]
fn every_fault_is_caught_within_a_thousand_seeds() {
    use keyward::watch::planted_fault::PlantedFault;
    for fault in PlantedFault::ALL {
        let (counts, failed) = run_all(THOUSAND, 1, || fault.turn_on());
        let Some((seed, why)) = failed.first() else {
            panic!("{fault:?} was not caught: {}", counts.table(THOUSAND))
        };
        println!("{fault:?} was caught at seed {seed}: {}", why.chars().take(200).collect::<String>());
        assert!(!why.contains(RESTLESS) && !why.contains(BUSY), "{fault:?} was caught by a hang: {why}");
    }
}

#[test]
fn a_seed_repeats_a_run() {
    for seed in 0..40 {
        let outcomes: Vec<Outcome> = (0..2).map(|_| run::run(seed)).collect();
        let [first, second] = &outcomes[..] else { unreachable!("two") };
        let differs = first.trace.iter().zip(&second.trace).position(|(a, b)| a != b);
        assert_eq!(
            first.hash(),
            second.hash(),
            "seed {seed} differs at line {differs:?} of {} and {}",
            first.trace.len(),
            second.trace.len()
        );
    }
}
