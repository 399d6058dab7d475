//! The successor of this process: another process of the program file, which takes over at SIGUSR2.
//!
//! Owns: the signal, and the start of the successor. Must not know: the hand-over. Invariants: one successor
//! runs at a time; the successor is started from the path by which this process was started, so that a new
//! program file is in use; a successor that fails changes nothing, and is logged.

use std::ffi::OsString;
use std::io;
use std::process::{Child, Command, Stdio};

use tokio::signal::unix::{Signal, SignalKind, signal};

/// The flag with which a successor is started.
const TAKE_OVER: &str = "--take-over";

/// Receives SIGUSR2, which would end the process otherwise.
///
/// # Errors
/// The operating system's error.
pub(super) fn requests() -> io::Result<Signal> {
    signal(SignalKind::user_defined2())
}

/// Starts a successor at each signal, for ever. A signal while a successor runs is ignored.
pub(super) async fn start_at_signals(mut requests: Signal) {
    while requests.recv().await.is_some() {
        match start(std::env::args_os().collect()) {
            Ok(child) => {
                tracing::info!(pid = child.id(), "a successor was started");
                report_end(child).await;
            }
            Err(error) => tracing::error!(%error, "no successor can be started"),
        }
    }
}

fn start(arguments: Vec<OsString>) -> io::Result<Child> {
    let mut arguments = arguments.into_iter();
    let program = arguments.next().ok_or_else(|| io::Error::other("the path of the program is unknown"))?;
    let others = arguments.filter(|argument| argument != TAKE_OVER);
    // The watchdog of the service manager names one process.
    Command::new(program).args(others).arg(TAKE_OVER).env_remove("WATCHDOG_PID").stdin(Stdio::null()).spawn()
}

/// Waits for the end of the successor. A successor that took over outlives this process.
async fn report_end(mut child: Child) {
    match tokio::task::spawn_blocking(move || child.wait()).await {
        Ok(Ok(status)) => tracing::error!(%status, "the successor has ended: this process goes on"),
        Ok(Err(error)) => tracing::error!(%error, "the end of the successor is unknown"),
        Err(_) => {}
    }
}
