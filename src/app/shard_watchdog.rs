//! Detects a stuck or dead shard, for `/livez`.
//!
//! Owns: the comparison of the shards' counts of turns. Must not know: the work of a shard. Invariant: two
//! compared looks at the counts lie [`STUCK`] apart; a look that comes late, because the whole process was
//! stopped, is compared with nothing.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::{Instant, MissedTickBehavior, interval};

/// A shard without a turn for this long is stuck.
const STUCK: Duration = Duration::from_secs(1);

/// Keeps `healthy` true while every count of `turns` rises, for ever.
pub(super) async fn watch_shards(turns: Vec<Arc<AtomicU64>>, healthy: Arc<AtomicBool>) {
    let mut looks = interval(STUCK);
    // Made up for at once, missed looks would find every shard without a turn.
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let counts = || turns.iter().map(|count| count.load(Ordering::Relaxed)).collect::<Vec<_>>();
    looks.tick().await;
    let (mut last, mut at) = (counts(), Instant::now());
    loop {
        looks.tick().await;
        let now = counts();
        if at.elapsed() > STUCK * 3 / 2 {
            // The shards were stopped too, and may not have turned since.
            (last, at) = (now, Instant::now());
            continue;
        }
        let alive = last.iter().zip(&now).all(|(last, now)| last != now);
        if healthy.swap(alive, Ordering::Relaxed) != alive {
            if alive {
                tracing::info!("all shards make progress again");
            } else {
                tracing::error!("a shard is stuck or gone");
            }
        }
        (last, at) = (now, Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::pin::{Pin, pin};
    use std::task::Poll;

    use tokio::time::advance;

    use super::*;

    /// Polls the watchdog once.
    async fn look(watching: &mut (impl Future<Output = ()> + Unpin)) {
        poll_fn(|cx| Poll::Ready(Pin::new(&mut *watching).poll(cx).is_pending())).await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_pause_of_the_process_is_no_stuck_shard() {
        let (turns, healthy) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(true)));
        let mut watching = pin!(watch_shards(vec![Arc::clone(&turns)], Arc::clone(&healthy)));
        look(&mut watching).await;
        // The watchdog looks late, and before the shard turns.
        advance(10 * STUCK).await;
        look(&mut watching).await;
        assert!(healthy.load(Ordering::Relaxed));
        turns.fetch_add(1, Ordering::Relaxed);
        advance(STUCK).await;
        look(&mut watching).await;
        assert!(healthy.load(Ordering::Relaxed));
    }

    #[tokio::test(start_paused = true)]
    async fn a_shard_without_turns_is_stuck_until_it_turns_again() {
        let turns = [Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0))];
        let healthy = Arc::new(AtomicBool::new(true));
        let mut watching = pin!(watch_shards(turns.to_vec(), Arc::clone(&healthy)));
        let turn = |at: usize| turns[at].fetch_add(1, Ordering::Relaxed);
        look(&mut watching).await;
        turn(0);
        advance(STUCK).await;
        look(&mut watching).await;
        assert!(!healthy.load(Ordering::Relaxed), "the second shard has not turned");
        turn(0);
        turn(1);
        advance(STUCK).await;
        look(&mut watching).await;
        assert!(healthy.load(Ordering::Relaxed));
    }
}
