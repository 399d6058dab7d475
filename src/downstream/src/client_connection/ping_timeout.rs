//! Detection of a dead client that sends no bytes.
//!
//! Owns: the decision. Must not know: how a PING is sent (`http2_server` sends a PING after the same interval
//! without a sign of life).
//! Invariants: a client answering pings is never declared dead, however slowly the client reads, even if
//! Keyward itself delayed reading the answer. A peer that took bytes out of a full socket is alive. Time in
//! which the thread did not run, or in which reading is paused on purpose, does not count. See gRPC proposal
//! A8 (client-side keepalive), with the same meaning of the two times.

use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use crate::served_streams::ServedStreams;
use crate::socket_progress::SocketProgress;
use keyward_config::ClientPings;

/// A timer firing this late shows a busy or stopped thread.
const LATE: Duration = Duration::from_secs(1);

/// Ends when the client has not answered a PING in time; never ends if no pings are sent. Cancelling loses
/// the elapsed time: a new future starts over.
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
        // A PING has been sent by now, or is about to be sent by the same timer.
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

    /// True if the client is declared dead within `seconds`, in steps too short to fire a timer late.
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

    /// A write to a socket with free buffer space proves nothing about the peer: the kernel takes the bytes.
    #[tokio::test(start_paused = true)]
    async fn a_client_that_makes_room_in_a_full_socket_is_there() {
        let (progress, streams) = (SocketProgress::default(), ServedStreams::new(8, Arc::default()));
        let mut decision = Box::pin(unanswered_ping(PINGS, &progress, &streams));
        for _ in 0..20 {
            progress.note_write(false, 0);
            assert!(!is_gone_after(decision.as_mut(), 40).await);
            progress.note_write(true, 1);
        }
        for _ in 0..4 {
            assert!(!is_gone_after(decision.as_mut(), 10).await);
            progress.note_write(true, 1);
        }
        assert!(is_gone_after(decision.as_mut(), 10).await);
    }

    #[tokio::test(start_paused = true)]
    async fn time_in_which_nobody_could_read_an_answer_does_not_count() {
        let (progress, streams) = (SocketProgress::default(), ServedStreams::new(8, Arc::default()));
        let mut decision = Box::pin(unanswered_ping(PINGS, &progress, &streams));
        for _ in 0..4 {
            // The thread does not run.
            advance(Duration::from_secs(3600)).await;
            assert!(decision.as_mut().now_or_never().is_none());
        }
        progress.note_received(17);
        // Reading is paused: more streams of the connection are being served than allowed.
        let pending = || std::future::pending::<http::Response<http_body_util::Empty<bytes::Bytes>>>();
        let served: Vec<_> = (0..100).map(|_| streams.serve(pending())).collect();
        assert!(!is_gone_after(decision.as_mut(), 1000).await);
        drop(served);
        assert!(is_gone_after(decision.as_mut(), 16).await);
    }
}
