//! The runtime of the control thread, and the signals of the process.
//!
//! Owns: the kinds of signals that are received, and since when. Must not know: the meaning of a signal.
//! Invariants: from the creation of the runtime on, SIGHUP does not end the process, and none is lost;
//! SIGXFSZ does not either, so a limit on the size of files is an error of a write, as a full disk is.

use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};

/// The runtime of the control thread, which receives SIGHUP from its creation on.
pub struct ControlRuntime {
    pub(super) runtime: tokio::runtime::LocalRuntime,
    pub(super) hangups: Signal,
}

impl ControlRuntime {
    /// Creates the runtime. A SIGHUP that comes before the configuration is in force is a reload right after.
    ///
    /// # Errors
    /// An operating system resource is missing.
    pub fn new() -> io::Result<Self> {
        let mut builder = tokio::runtime::Builder::new_current_thread();
        let runtime = builder.enable_all().build_local(tokio::runtime::LocalOptions::default())?;
        let too_large = SignalKind::from_raw(rustix::process::Signal::XFSZ.as_raw());
        // The received signals are of no use: the write that the kernel refuses says more.
        let (hangups, _) = runtime
            .block_on(async { io::Result::Ok((signal(SignalKind::hangup())?, signal(too_large)?)) })?;
        Ok(Self { runtime, hangups })
    }
}

/// The signals to end the process.
pub(super) struct EndSignals {
    terminate: Signal,
    interrupt: Signal,
}

impl EndSignals {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    /// Waits for the next signal. Cancel-safe.
    pub(super) async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}
