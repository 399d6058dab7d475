//! A timer that is rarely over.
//!
//! Owns: setting the timer again. Must not know: the wait's purpose.

use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::time::{Instant, Sleep};

/// Ready at `due`, or somewhat later. The timer is kept and, if it ends too early, set anew only then: most
/// deadlines move on before they come.
pub fn poll_timer(timer: &mut Option<Pin<Box<Sleep>>>, due: Instant, cx: &mut Context<'_>) -> Poll<()> {
    let timer = timer.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(due)));
    if timer.deadline() > due {
        timer.as_mut().reset(due);
    }
    while timer.as_mut().poll(cx).is_ready() {
        if timer.deadline() >= due {
            return Poll::Ready(());
        }
        timer.as_mut().reset(due);
    }
    Poll::Pending
}
