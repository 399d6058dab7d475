//! The end of the process: the drain, and the orderly shutdown around it.
//!
//! Owns: the order of the end, and its limits of time. Must not know: the reason of the end. Invariants: a
//! drain first waits for load balancers, then stops accepting, then lets open calls finish; further signals
//! end the process at once.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use super::control_runtime::EndSignals;
use super::listeners::Listeners;
use super::{LAST, ServeError};
use keyward_base::io::service_manager;
use keyward_base::shard::Shard;
use keyward_operations::admin::drain::{Exit, Stage};

/// Runs the orderly shutdown; `further` more signals end the process at once.
pub(super) async fn shut_down(
    mut signals: EndSignals,
    further: usize,
    exit: &Exit,
    orderly: impl Future<Output = Result<(), ServeError>>,
) -> Result<(), ServeError> {
    tracing::info!("draining");
    // The service goes on in the process that took over.
    if !exit.is_handed_over() {
        service_manager::report_stopping().await;
    }
    let hurried = async {
        for _ in 0..further {
            signals.next().await;
        }
    };
    let outcome = tokio::select! {
        outcome = orderly => outcome,
        () = hurried => { tracing::warn!("ended at once by a second signal"); Ok(()) }
    };
    exit.enter(Stage::Ended);
    if tokio::time::timeout(LAST, exit.receivers_dropped()).await.is_err() {
        tracing::debug!("somebody who waits for the end does not hear of it");
    }
    tracing::info!("ended");
    outcome
}

/// Drains the listeners and the shards, and waits for the shards' threads.
pub(super) async fn drain_and_join(
    settings: keyward_config::Drain,
    exit: &Exit,
    listeners: &Listeners,
    drain: &watch::Sender<Option<Instant>>,
    shards: Vec<Shard>,
) -> Result<(), ServeError> {
    let until = Instant::now() + settings.wait;
    exit.enter(Stage::Waiting { until });
    tokio::time::sleep_until(until).await;
    listeners.close(exit.is_handed_over()).await;
    let until = Instant::now() + settings.timeout;
    exit.enter(Stage::Leaving { until });
    drain.send_replace(Some(until));
    listeners.leave(until);
    let joined = tokio::task::spawn_blocking(|| shards.into_iter().all(Shard::join));
    let limit = settings.timeout + Duration::from_secs(2);
    match tokio::time::timeout(limit, joined).await {
        Ok(Ok(true)) => Ok(()),
        Ok(_) => Err(ServeError::ShardDied),
        Err(_) => {
            tracing::warn!("the drain took too long; ended with calls open");
            Ok(())
        }
    }
}
