//! Reports to the service manager that started the process (systemd's `sd_notify`).
//!
//! Owns: the reports, and the limit of the time that a report takes. Must not know: the moment of a report.
//! Invariants: without `NOTIFY_SOCKET` in the environment every report is empty; a hanging service manager
//! delays its reporter for one second at most, and no other task; a report that fails changes nothing else.
//!
//! See <https://www.freedesktop.org/software/systemd/man/252/sd_notify.html>.

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

use sd_notify::NotifyState;

/// Time limit of a report: the service manager's socket may be full.
const LIMIT: Duration = Duration::from_secs(1);

/// True if a service manager expects reports.
#[must_use]
pub fn is_present() -> bool {
    std::env::var_os("NOTIFY_SOCKET").is_some()
}

/// The service manager ends the process after this time without a [`report_alive`]; `None` if it never does.
#[must_use]
pub fn watchdog_limit() -> Option<Duration> {
    sd_notify::watchdog_enabled().filter(|limit| !limit.is_zero())
}

/// Reports that the process serves: after its start, and after a reload.
pub async fn report_ready() {
    report(|| send(&[NotifyState::Ready])).await;
}

/// Reports that this process serves in the place of the main process that the service manager started.
pub async fn report_main_process() {
    report(|| send(&[NotifyState::MainPid(std::process::id())])).await;
}

/// Reports the begin of a reload; [`report_ready`] ends the reload.
pub async fn report_reloading() {
    report(|| send(&[NotifyState::Reloading, NotifyState::monotonic_usec_now()?])).await;
}

/// Reports that the process drains and will exit.
pub async fn report_stopping() {
    report(|| send(&[NotifyState::Stopping])).await;
}

/// Reports that the process makes progress.
pub async fn report_alive() {
    report(|| send(&[NotifyState::Watchdog])).await;
}

/// Reports a line about the state, for `systemctl status`.
pub async fn report_status(line: &str) {
    // A line break would begin another variable.
    let line = line.replace(|c: char| c.is_control(), " ");
    report(move || send(&[NotifyState::Status(&line)])).await;
}

/// Sends the states to `NOTIFY_SOCKET`: a path, or `@` and the name of an abstract socket. The crate
/// sd-notify knows paths only.
fn send(states: &[NotifyState<'_>]) -> io::Result<()> {
    let Some(name) = std::env::var_os("NOTIFY_SOCKET") else { return Ok(()) };
    let message: String = states.iter().map(|state| format!("{state}\n")).collect();
    let socket = UnixDatagram::unbound()?;
    socket.connect_addr(&socket_address(name.as_bytes())?)?;
    socket.send(message.as_bytes()).map(drop)
}

fn socket_address(name: &[u8]) -> io::Result<SocketAddr> {
    #[cfg(target_os = "linux")]
    if let Some(name) = name.strip_prefix(b"@") {
        use std::os::linux::net::SocketAddrExt as _;
        return SocketAddr::from_abstract_name(name);
    }
    SocketAddr::from_pathname(OsStr::from_bytes(name))
}

async fn report(send: impl FnOnce() -> io::Result<()> + Send + 'static) {
    if !is_present() {
        return;
    }
    // A blocking thread: the send waits while the socket is full.
    match tokio::time::timeout(LIMIT, tokio::task::spawn_blocking(send)).await {
        Ok(Ok(Ok(()))) => {}
        Ok(Ok(Err(error))) => tracing::warn!(%error, "a report to the service manager failed"),
        Ok(Err(error)) => tracing::warn!(%error, "a report to the service manager was cancelled"),
        Err(_) => tracing::warn!("the service manager takes no reports"),
    }
}
