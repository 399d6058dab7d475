//! `keyward log-level`: the filter of the log until the next reload or restart.
//!
//! Owns: the change, and its record in the log. Must not know: the admin socket. Invariant: the record of a
//! change is in the log, whichever of the two filters is the stricter one.

use keyward_telemetry::log_filter::{LogFilter, log_filter, set_log_filter};

/// Changes the filter of the log. The record of the change is written under the filter that lets more records
/// through at this place: before a change to a stricter level, after any other.
///
/// # Errors
/// The text is no filter, or the process has no log.
pub(super) fn change_log_filter(text: &str, uid: Option<u32>) -> Result<String, String> {
    let filter: LogFilter = text.parse().map_err(|reason| format!("{reason}"))?;
    let former = log_filter().ok_or("this process has no log")?;
    let record = || tracing::info!(%former, now = %filter, uid, "an operator changed the log level");
    let is_stricter = filter.is_stricter_than(&former);
    if is_stricter {
        record();
    }
    set_log_filter(filter.clone());
    if !is_stricter {
        record();
    }
    Ok(format!("log level {filter} until the next reload or restart; before: {former}"))
}
