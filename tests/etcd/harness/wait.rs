//! Waiting for what only a look can tell: ask again, a little less often each time, up to a limit.
//!
//! Invariant: no wait is without a limit, and none sleeps before its first look.

use std::time::Duration;

use tokio::time::{Instant, sleep};

const FIRST: Duration = Duration::from_millis(2);
const LONGEST: Duration = Duration::from_millis(50);

/// Asks `look` until it has an answer. Panics with `what` when there is none after `within`.
pub(crate) async fn until<T>(within: Duration, what: &str, look: impl AsyncFn() -> Option<T>) -> T {
    match within_limit(within, look).await {
        Some(answer) => answer,
        None => panic!("not within {within:?}: {what}"),
    }
}

/// Asks `look` until it has an answer; `None` when there is none after `within`.
pub(crate) async fn within_limit<T>(within: Duration, look: impl AsyncFn() -> Option<T>) -> Option<T> {
    let end = Instant::now() + within;
    let mut pause = FIRST;
    loop {
        if let Some(answer) = look().await {
            return Some(answer);
        }
        if Instant::now() >= end {
            return None;
        }
        sleep(pause).await;
        pause = (pause * 2).min(LONGEST);
    }
}
