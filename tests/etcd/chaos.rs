//! Must show 2 and 3 of the streams: five minutes of faults, and every watch of every client shows what the oracle recorded.
//!
//! Three members with auth and tokens that live 2 s, one Keyward in front. Through it random writers, and a hundred watches of all
//! kinds in the hands of real client libraries (`families`) and of bare gRPC (`bare`). Every ten seconds a member is killed or
//! stopped for some seconds, roles change all the time, one user loses its right now and then, and history is compacted up to what
//! the oracle had of every member ten seconds ago. The oracle: direct watches on all members, which must agree with each other,
//! with themselves when replayed, and with what the writers were told. At the end a last key is put into and deleted from every
//! range, and each watch must get there.
//!
//! What is counted:
//! - A *violation* is what a watch showed and the oracle does not explain (`judge` has the list). Ends by compaction are printed with
//!   the watch's next revision and etcd's compact revision, ends by a revoked right with etcd's text; any other end is a violation.
//! - A *hit* is one watch on a member at the moment of a fault, by that member's own count of watches. It *went on* unless its
//!   application saw it end before the next fault. Which watch was on which member is Keyward's to know, so every end in that time is
//!   counted against the fault, up to the number of watches there. Ends by a revoked right are right, and count neither way. At
//!   least 95 % of hits must have gone on. That they did not just fall silent is shown by the last keys.
//! - A fault that hit a watch *ended in a resume* where all its hits went on and, after a kill, Keyward opened at least one
//!   upstream stream to go on (`keyward_watch_resumes_total`). A stopped member may be back before anybody misses it.
//!
//! `KEYWARD_CHAOS_SECONDS` sets the length (30; 300 with `--full`), `KEYWARD_CHAOS_SEED` repeats the choices of a run (never its
//! timing), `KEYWARD_CHAOS_ETCD` names the one etcd version to run against.

mod bare;
pub(crate) mod door;
pub(crate) mod families;
mod faults;
mod history;
mod judge;
mod ledger;
mod oracle;
mod plan;
pub(crate) mod program;
pub(crate) mod record;
mod report;
pub(crate) mod run;
pub(crate) mod seeded;
mod writers;

use std::env;
use std::thread;
use std::time::Duration;

use crate::harness::binary::{Version, full};
use crate::harness::versions_that_survive_kills;
use crate::rewatch::local;
use crate::steady::unix_ms;

use report::Report;

/// Versions that are run against at the same time.
const AT_A_TIME: usize = 2;

fn number(name: &str) -> Option<u64> {
    env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name} is a number")))
}

#[test]
fn every_watch_shows_what_the_oracle_recorded() {
    let seconds = number("KEYWARD_CHAOS_SECONDS").unwrap_or(if full() { 300 } else { 30 });
    let versions = match env::var("KEYWARD_CHAOS_ETCD") {
        Ok(version) => vec![Version::parse(&version)],
        Err(_) => versions_that_survive_kills(),
    };
    // A run waits most of the time, for the next fault and for what comes back after it; its judging must not stop the other's oracle.
    for pair in versions.chunks(AT_A_TIME) {
        let reports: Vec<_> = thread::scope(|scope| {
            let begun: Vec<_> =
                pair.iter().map(|version| scope.spawn(move || one_run(version, seconds))).collect();
            begun.into_iter().map(|run| run.join().expect("the thread has said why it panicked")).collect()
        });
        pair.iter().zip(&reports).for_each(|(version, report)| print!("{}", report.text(version)));
        pair.iter().zip(&reports).for_each(|(version, report)| report.assert(version));
    }
}

fn one_run(version: &Version, seconds: u64) -> Report {
    let now = u64::try_from(unix_ms()).expect("it is past 1970");
    let seed = number("KEYWARD_CHAOS_SEED").unwrap_or(now);
    println!("{version}: seed {seed}, {seconds} s");
    local(Box::pin(run::run(version, seed, Duration::from_secs(seconds))))
}
