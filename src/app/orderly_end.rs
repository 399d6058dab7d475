//! The end of the process: the drain, and the orderly shutdown around it.
//!
//! Owns: the order of the end, and its limits of time. Must not know: the reason of the end. Invariants: a
//! drain first waits for load balancers, then stops accepting, then lets open calls finish, then has their
//! audit records written, and waits for room for these as long as it may last; the end is told with the
//! number of those that are lost; further signals end the process at once.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use super::control_runtime::EndSignals;
use super::listeners::Listeners;
use super::{LAST, ServeError};
use keyward_base::io::service_manager;
use keyward_base::shard::Shard;
use keyward_operations::admin::drain::{Exit, Stage};
use keyward_records::audit::log::AuditLog;

/// Runs the orderly shutdown; `further` more signals end the process at once.
pub(super) async fn shut_down(
    mut signals: EndSignals,
    further: usize,
    exit: &Exit,
    audit: Option<&Arc<AuditLog>>,
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
    exit.note_audit_lost(write_last_records(audit, Duration::ZERO).await);
    exit.enter(Stage::Ended);
    if tokio::time::timeout(LAST, exit.receivers_dropped()).await.is_err() {
        tracing::debug!("somebody who waits for the end does not hear of it");
    }
    // Commands of operators leave records up to now.
    let lost = write_last_records(audit, Duration::ZERO).await;
    if lost > 0 {
        tracing::error!(
            records = lost,
            "audit records could not be written before the end of the process, and are lost"
        );
    }
    tracing::info!("ended");
    outcome.and_then(|()| if lost > 0 { Err(ServeError::RecordsLost(lost)) } else { Ok(()) })
}

/// Writes the last audit records, with attempts for `attempts` while the disk has no room. Returns the number
/// of those that are lost. Cancelled, the attempts go on until a second call shortens them.
async fn write_last_records(audit: Option<&Arc<AuditLog>>, attempts: Duration) -> u64 {
    let Some(audit) = audit.map(Arc::clone) else { return 0 };
    let waiting = audit.waiting_for_disk();
    if waiting > 0 && !attempts.is_zero() {
        let seconds = attempts.as_secs();
        tracing::info!(waiting, seconds, "the end waits for room for the last audit records");
    }
    let ended = tokio::task::spawn_blocking(move || audit.end(attempts));
    // The writer panics with the process, or not at all.
    ended.await.unwrap_or_default()
}

/// Drains the listeners and the shards, and waits for the shards' threads.
pub(super) async fn drain_and_join(
    settings: keyward_config::Drain,
    exit: &Exit,
    listeners: &Listeners,
    drain: &watch::Sender<Option<Instant>>,
    shards: Vec<Shard>,
    audit: Option<&Arc<AuditLog>>,
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
    let outcome = match tokio::time::timeout(limit, joined).await {
        Ok(Ok(true)) => Ok(()),
        Ok(_) => Err(ServeError::ShardDied),
        Err(_) => {
            tracing::warn!("the drain took too long; ended with calls open");
            Ok(())
        }
    };
    write_last_records(audit, until.saturating_duration_since(Instant::now())).await;
    outcome
}
