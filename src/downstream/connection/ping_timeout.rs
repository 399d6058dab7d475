//! When a client that says nothing is taken for gone.
//!
//! Owns: the decision. Must not know: how a PING is sent (hyper sends one after the same interval without a frame).
//! Invariants: a client that answers pings is never taken for gone, however slowly it reads, and whoever kept its answer from being read: a
//! peer that took bytes out of a full socket is there, and time in which this thread did not run, or in which the connection is not
//! read on purpose, does not count. See grpc's keepalive (A8), whose times are the same by nature.

use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use crate::config::ClientPings;
use crate::downstream::served_streams::ServedStreams;
use crate::downstream::socket_progress::SocketProgress;

/// A timer that fires so late shows that the thread was busy or stopped.
const LATE: Duration = Duration::from_secs(1);

/// Ends when the client has not answered a PING in time; never where none are sent. Cancel-safe only as a whole: it begins anew.
pub(super) async fn unanswered_ping(
    pings: Option<ClientPings>,
    progress: &SocketProgress,
    streams: &ServedStreams,
) {
    let Some(ClientPings { interval, timeout }) = pings else { return std::future::pending().await };
    loop {
        let sign_of_life = progress.sign_of_life();
        sleep_until(sign_of_life + interval).await;
        if progress.sign_of_life() != sign_of_life {
            continue;
        }
        // A PING has been sent by now, or is sent by the same timer.
        loop {
            let limit = Instant::now() + timeout;
            sleep_until(limit).await;
            if progress.sign_of_life() != sign_of_life {
                break;
            }
            if !streams.is_read_paused() && limit.elapsed() < LATE {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::Pin;
    use std::sync::Arc;

    use futures_util::FutureExt as _;
    use tokio::time::advance;

    use super::*;

    const INTERVAL: Duration = Duration::from_secs(30);
    const TIMEOUT: Duration = Duration::from_secs(15);
    const PINGS: Option<ClientPings> = Some(ClientPings { interval: INTERVAL, timeout: TIMEOUT });

    /// Whether a client is taken for gone after these steps of time, none of which fires a timer late.
    async fn is_gone_after(mut decision: Pin<&mut impl Future<Output = ()>>, seconds: u64) -> bool {
        for _ in 0..seconds * 2 {
            if decision.as_mut().now_or_never().is_some() {
                return true;
            }
            advance(Duration::from_millis(500)).await;
        }
        decision.now_or_never().is_some()
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_is_gone_when_both_times_are_over_and_not_before() {
        let (progress, streams) = (SocketProgress::default(), ServedStreams::new(8, Arc::default()));
        let mut decision = Box::pin(unanswered_ping(PINGS, &progress, &streams));
        assert!(!is_gone_after(decision.as_mut(), 20).await);
        progress.note_received(1);
        assert!(!is_gone_after(decision.as_mut(), 44).await, "counted from the last byte");
        progress.note_received(17);
        assert!(!is_gone_after(decision.as_mut(), 44).await, "it answered in the last moment");
        assert!(is_gone_after(decision.as_mut(), 2).await);
        let never = unanswered_ping(None, &progress, &streams);
        assert!(!is_gone_after(Box::pin(never).as_mut(), 1000).await);
    }

    /// What is written to a socket with room says nothing of its peer: the kernel takes it.
    #[tokio::test(start_paused = true)]
    async fn a_client_that_makes_room_in_a_full_socket_is_there() {
        let (progress, streams) = (SocketProgress::default(), ServedStreams::new(8, Arc::default()));
        let mut decision = Box::pin(unanswered_ping(PINGS, &progress, &streams));
        for _ in 0..20 {
            progress.note_write(false);
            assert!(!is_gone_after(decision.as_mut(), 40).await);
            progress.note_write(true);
        }
        for _ in 0..4 {
            assert!(!is_gone_after(decision.as_mut(), 10).await);
            progress.note_write(true);
        }
        assert!(is_gone_after(decision.as_mut(), 10).await);
    }

    #[tokio::test(start_paused = true)]
    async fn time_in_which_nobody_could_read_an_answer_does_not_count() {
        let (progress, streams) = (SocketProgress::default(), ServedStreams::new(8, Arc::default()));
        let mut decision = Box::pin(unanswered_ping(PINGS, &progress, &streams));
        for _ in 0..4 {
            // The thread stands still.
            advance(Duration::from_secs(3600)).await;
            assert!(decision.as_mut().now_or_never().is_none());
        }
        progress.note_received(17);
        // The connection is not read: more of its streams are served than may be.
        let pending = || std::future::pending::<http::Response<http_body_util::Empty<bytes::Bytes>>>();
        let served: Vec<_> = (0..100).map(|_| streams.serve(pending())).collect();
        assert!(!is_gone_after(decision.as_mut(), 1000).await);
        drop(served);
        assert!(is_gone_after(decision.as_mut(), 16).await);
    }
}
