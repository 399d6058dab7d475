//! Reports of the state, and signs of life, to the service manager.
//!
//! Owns: the moments of both. Must not know: the protocol of the service manager. Invariant: while Keyward
//! serves, a sign of life is sent only if the shard watchdog finds every shard alive, by a task of the
//! control runtime: a stuck shard or a stuck control runtime ends the process.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::time::{Instant, interval};

use keyward_base::io::service_manager;
use keyward_operations::admin::AdminState;
use keyward_operations::admin::drain::{Exit, Stage};

/// Interval of the looks at the state.
const LOOK: Duration = Duration::from_millis(500);
/// The shortest interval: the service manager may name any limit.
const SHORTEST: Duration = Duration::from_millis(1);

/// Reports each changed state, and half of the service manager's limit after a sign of life the next, until
/// another process has taken over.
pub(super) async fn report_state(state: Arc<AdminState>, shards_alive: Arc<AtomicBool>, exit: Arc<Exit>) {
    if !service_manager::is_present() {
        return;
    }
    let half = service_manager::watchdog_limit().map(|limit| (limit / 2).max(SHORTEST));
    let mut looks = interval(half.map_or(LOOK, |half| half.min(LOOK)));
    let (mut reported, mut alive_at) = (String::new(), None);
    // The process that took over reports from then on.
    while !exit.is_handed_over() {
        looks.tick().await;
        let line = state.line();
        if line != reported {
            service_manager::report_status(&line).await;
            reported = line;
        }
        let is_due = half.is_some_and(|half| alive_at.is_none_or(|at: Instant| at.elapsed() >= half));
        if is_due && is_alive(&shards_alive, exit.stage()) {
            service_manager::report_alive().await;
            alive_at = Some(Instant::now());
        }
    }
}

/// True if the process makes progress. A shard ends during a drain, which has time limits of its own.
fn is_alive(shards_alive: &AtomicBool, stage: Stage) -> bool {
    shards_alive.load(Ordering::Relaxed) || stage != Stage::Serving
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stuck_shard_gives_no_sign_of_life_and_a_drained_shard_is_not_stuck() {
        let (alive, stuck) = (AtomicBool::new(true), AtomicBool::new(false));
        let leaving = Stage::Leaving { until: Instant::now() };
        assert!(is_alive(&alive, Stage::Serving) && is_alive(&stuck, leaving));
        assert!(!is_alive(&stuck, Stage::Serving));
    }
}
