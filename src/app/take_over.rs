//! A start in the place of a serving process: with its listening sockets, once this process is ready.
//!
//! Owns: the moments of the hand-over. Must not know: the protocol of the hand-over, the listeners.
//! Invariant: the serving process is told to leave only once this process accepts at every socket and has
//! found the members; before, every failure ends this process and changes nothing for clients.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use tokio::sync::watch;

use super::ServeError;
use keyward_base::io::listening_sockets::{ListeningSockets, NamedSocket};
use keyward_base::io::service_manager;
use keyward_config::{AdminSocketSetting, Config, DEFAULT_ADMIN_SOCKET};
use keyward_operations::admin::take_over::{self, TakeOver};

/// Time limit for finding the members.
const READY: Duration = Duration::from_secs(60);

/// Gets the sockets of the process that serves at the configured admin socket, if any.
pub(super) async fn begin(config: &Config) -> Result<(Option<TakeOver>, Vec<NamedSocket>), ServeError> {
    let path = match &config.admin.socket {
        AdminSocketSetting::Off => {
            return Err(ServeError::TakeOver("the serving process is found by its admin.socket".into()));
        }
        AdminSocketSetting::Path(path) => path.clone(),
        AdminSocketSetting::Default => Path::new(DEFAULT_ADMIN_SOCKET).to_owned(),
    };
    let shown = path.display().to_string();
    let begun = blocking(move || take_over::begin(&path)).await;
    match begun.map_err(|error| ServeError::TakeOver(format!("{shown}: {error}")))? {
        Some((take_over, sockets)) => {
            tracing::info!(sockets = sockets.len(), "taking over from the process at the admin socket");
            Ok((Some(take_over), sockets))
        }
        None => {
            tracing::info!(path = shown, "no process serves at the admin socket: an ordinary start");
            Ok(Default::default())
        }
    }
}

/// Waits until calls can be served. A failure has the reason of `/readyz`, which `unready_reason` tells.
pub(super) async fn wait_until_ready(
    mut ready: watch::Receiver<bool>,
    unready_reason: impl FnOnce() -> Option<String>,
) -> Result<(), ServeError> {
    match tokio::time::timeout(READY, ready.wait_for(|ready| *ready)).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(_)) => Err(ServeError::TakeOver("the start was cancelled".into())),
        Err(_) => {
            let reason = unready_reason().unwrap_or_else(|| "it became ready just now".into());
            Err(ServeError::TakeOver(format!("not ready within {} s: {reason}", READY.as_secs())))
        }
    }
}

/// Makes the other process leave. Sockets of listeners that are no longer configured close with the other
/// process. Returns the socket of the other process's last audit records, if any.
pub(super) async fn finish(
    take_over: TakeOver,
    sockets: &ListeningSockets,
) -> Result<Option<OwnedFd>, ServeError> {
    let left = sockets.drop_unused();
    for socket in &left {
        tracing::info!(socket, "a socket that was taken over is not configured, and closes");
    }
    service_manager::report_main_process().await;
    let finished = blocking(|| take_over.finish(left)).await;
    let relay = finished.map_err(|error| ServeError::TakeOver(error.to_string()))?;
    tracing::info!("the process that served before leaves");
    Ok(relay)
}

/// Runs blocking calls, which have time limits of their own.
async fn blocking<T: Send + 'static>(call: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    tokio::task::spawn_blocking(call).await.unwrap_or_else(|error| Err(io::Error::other(error)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_hand_over_that_gives_up_says_why_it_was_not_ready() {
        let (ready, told) = watch::channel(false);
        let failed = wait_until_ready(told, || Some("no member answers".into())).await.unwrap_err();
        assert_eq!(failed.to_string(), "nothing was taken over: not ready within 60 s: no member answers");
        let waiting = wait_until_ready(ready.subscribe(), || unreachable!("it becomes ready"));
        let (outcome, _) = tokio::join!(waiting, async { ready.send_replace(true) });
        assert!(outcome.is_ok());
    }
}
