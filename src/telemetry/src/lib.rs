//! Logging: the destination, format and filter of log records.
//!
//! Owns: the process's only tracing subscriber. Must not know: the logged contents.
//! Invariants: records go to stderr, so that stdout carries only a command's result; a logging thread never
//! waits for stderr; the HTTP/2 and TLS libraries log warnings and errors at most, at every configured level,
//! because their frames and headers carry tokens and passwords.

pub mod access_settings;
pub mod audit_metrics;
pub mod call_figures;
pub mod call_span;
pub mod condition_metrics;
pub mod conditions;
pub mod config_metrics;
pub mod connection_metrics;
pub mod export_metrics;
pub mod export_queue;
pub mod exposition;
pub mod fleet_metrics;
mod json_records;
pub mod latency_histogram;
pub mod limit_metrics;
pub mod limiter;
pub mod listener_metrics;
pub mod log_export;
pub mod log_filter;
#[cfg(any(test, feature = "testing"))]
pub mod log_listener;
pub mod log_throttle;
pub mod member_metrics;
pub mod metrics;
mod module_names;
pub mod otlp_messages;
pub mod policy_metrics;
pub mod policy_store_metrics;
pub mod printable;
pub mod process_metrics;
pub mod refusal_metrics;
pub mod request_memory_metrics;
pub mod rest_metrics;
pub mod single_label;
mod text;
pub mod trace_sampling;
pub mod unread_metrics;
pub mod user_metrics;
pub mod watch_feed_metrics;
pub mod writer;

use std::backtrace::{Backtrace, BacktraceStatus};
use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::AsFd as _;
use std::str::FromStr;
use std::sync::Arc;

use tracing::level_filters::LevelFilter;
use tracing_subscriber::Layer as _;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt as _;

use conditions::{ConditionFilter, ConditionLayer};
use json_records::JsonRecords;
use log_export::LogExportLayer;
use log_filter::{CurrentLogFilter, LogFilter, LogFilterLayer};
use text::TextRecords;
use writer::{FlushGuard, LogQueue};

/// The target of access records: `tracing::info!(target: telemetry::ACCESS, …)`. Always enabled, independent
/// of the level: [`access_settings::AccessLogSettings`] choose the calls with a record.
pub const ACCESS: &str = "keyward::access";

/// Logging settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogSettings {
    /// The format of records.
    pub format: Format,
    /// The least severe level written.
    pub level: LogLevel,
    /// Bytes of records queued for writing at most, and of records queued for the collector.
    pub buffer: usize,
    /// True if records go to the collector too.
    pub is_exported: bool,
}

/// The format of log records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Plain text for people.
    Text,
    /// A JSON object per line.
    Json,
}

/// `off`, `error`, `warn`, `info`, `debug` or `trace`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogLevel(LevelFilter);

/// The error for an unknown level name.
#[derive(Debug, thiserror::Error)]
#[error("is none of off, error, warn, info, debug, trace")]
pub struct UnknownLogLevel;

impl FromStr for LogLevel {
    type Err = UnknownLogLevel;

    fn from_str(word: &str) -> Result<Self, UnknownLogLevel> {
        match word {
            "off" => Ok(Self(LevelFilter::OFF)),
            "error" => Ok(Self(LevelFilter::ERROR)),
            "warn" => Ok(Self(LevelFilter::WARN)),
            "info" => Ok(Self(LevelFilter::INFO)),
            "debug" => Ok(Self(LevelFilter::DEBUG)),
            "trace" => Ok(Self(LevelFilter::TRACE)),
            _ => Err(UnknownLogLevel),
        }
    }
}

impl fmt::Display for LogLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(level) = self;
        write!(f, "{level}")
    }
}

impl Default for LogSettings {
    fn default() -> Self {
        Self {
            format: Format::Text,
            level: LogLevel(LevelFilter::INFO),
            buffer: 4 * 1024 * 1024,
            is_exported: false,
        }
    }
}

/// Installs the process's subscriber; a separate thread writes the records to stderr. A subscriber already
/// installed (by a test) stays in place. `main` must keep the guard.
///
/// # Errors
/// The process has no stderr, or the thread cannot be started.
pub fn init(settings: &LogSettings) -> io::Result<FlushGuard> {
    // A separate file handle: `io::stderr` has a lock, and a hanging write would hold the lock.
    let stderr = File::from(io::stderr().as_fd().try_clone_to_owned()?);
    let (queue, guard) = LogQueue::start(stderr, settings.buffer)?;
    let filter = current_filter(settings);
    let exported =
        || LogExportLayer::install(settings.buffer).with_filter(LogFilterLayer(Arc::clone(&filter)));
    let export = settings.is_exported.then(exported);
    let conditions = ConditionLayer::install().with_filter(ConditionFilter);
    let subscriber =
        subscriber_with(settings.format, Arc::clone(&filter), queue).with(conditions).with(export);
    if subscriber.try_init().is_err() {
        tracing::debug!("a log subscriber is installed already");
        return Ok(FlushGuard::nothing());
    }
    filter.install();
    Ok(guard)
}

/// Logs panics through `tracing`. The standard library's hook writes to stderr directly and would make the
/// panicking thread wait for stderr.
pub fn log_panics() {
    std::panic::set_hook(Box::new(|panic| {
        let payload = panic.payload();
        let owned = || payload.downcast_ref::<String>().map(String::as_str);
        let message = payload.downcast_ref::<&str>().copied().or_else(owned).unwrap_or("no text");
        let at = panic.location().map(tracing::field::display);
        let backtrace = Backtrace::capture();
        let backtrace =
            (backtrace.status() == BacktraceStatus::Captured).then(|| tracing::field::display(backtrace));
        tracing::error!(panic = message, at, backtrace, "a thread panicked");
    }));
}

/// Formats events according to `settings` and passes each record to `writer` in a single call.
pub fn subscriber<W>(
    settings: &LogSettings,
    writer: W,
) -> impl tracing::Subscriber + for<'a> LookupSpan<'a> + Send + Sync
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    subscriber_with(settings.format, current_filter(settings), writer)
}

fn current_filter(settings: &LogSettings) -> Arc<CurrentLogFilter> {
    CurrentLogFilter::new(LogFilter::from(settings.level))
}

fn subscriber_with<W>(
    format: Format,
    filter: Arc<CurrentLogFilter>,
    writer: W,
) -> impl tracing::Subscriber + for<'a> LookupSpan<'a> + Send + Sync
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    // By default, `tracing_subscriber` reports formatting errors with `eprintln`.
    let lines = tracing_subscriber::fmt::layer().log_internal_errors(false);
    let lines = match format {
        Format::Text => Box::new(lines.with_writer(writer).event_format(TextRecords))
            as Box<dyn tracing_subscriber::Layer<_> + Send + Sync>,
        Format::Json => Box::new(lines.with_writer(writer).event_format(JsonRecords)),
    };
    tracing_subscriber::registry().with(lines.with_filter(LogFilterLayer(filter)))
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::{Arc, Mutex};

    use super::log_listener::with_log_listener;
    use super::*;

    /// The captured log output.
    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    pub(super) fn logged(settings: LogSettings, log: impl FnOnce()) -> Vec<String> {
        let lines = Lines::default();
        let writer = lines.clone();
        with_log_listener(subscriber(&settings, move || writer.clone()), log);
        let text = String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
        text.lines().map(str::to_owned).collect()
    }

    fn one_of_each() {
        tracing::debug!(target: "keyward::upstream", "ours debug");
        tracing::info!(target: "keyward", "ours info");
        tracing::error!(target: "keyward::app", "ours error");
        tracing::debug!(target: "h2::codec", "theirs debug");
        tracing::info!(target: "rustls", "theirs info");
        tracing::warn!(target: "hyper", "theirs warn");
        tracing::info!(target: ACCESS, "access");
    }

    fn written(level: &str) -> Vec<&'static str> {
        let settings = LogSettings { level: level.parse().unwrap(), ..LogSettings::default() };
        let lines = logged(settings, one_of_each);
        let all =
            ["ours debug", "ours info", "ours error", "theirs debug", "theirs info", "theirs warn", "access"];
        all.into_iter().filter(|message| lines.iter().any(|line| line.ends_with(message))).collect()
    }

    #[test]
    fn the_level_is_ours_alone_and_access_records_do_not_depend_on_it() {
        assert_eq!(written("trace"), ["ours debug", "ours info", "ours error", "theirs warn", "access"]);
        assert_eq!(written("info"), ["ours info", "ours error", "theirs warn", "access"]);
        assert_eq!(written("error"), ["ours error", "access"]);
        assert_eq!(written("off"), ["access"]);
        assert!("loud".parse::<LogLevel>().is_err());
    }

    #[test]
    fn a_json_line_is_one_object_with_its_fields() {
        let settings = LogSettings { format: Format::Json, ..LogSettings::default() };
        let lines = logged(settings, || tracing::info!(target: "keyward", member = 7, "became leader"));
        assert_eq!(lines.len(), 1);
        let record: serde_json::Value = serde_json::from_str(&lines[0]).unwrap();
        assert_eq!((record["message"].as_str(), record["member"].as_i64()), (Some("became leader"), Some(7)));
        assert_eq!((record["level"].as_str(), record["target"].as_str()), (Some("INFO"), Some("keyward")));
    }

    /// A member's status text or a client's name, containing a forged record in case of unescaped output.
    const FORGED: &str =
        "no\n2026-01-01T00:00:00Z  INFO keyward::access: call user=\"root\" code=Ok\u{1b}[2K";

    #[test]
    fn a_foreign_text_makes_no_record_and_no_field_in_either_format() {
        for format in [Format::Text, Format::Json] {
            let settings = LogSettings { format, ..LogSettings::default() };
            let error = io::Error::other(FORGED);
            let lines = logged(settings, || {
                tracing::warn!(target: "keyward", %error, name = FORGED, debug = ?FORGED, port = 7, "failed");
                tracing::warn!(target: "hyper", "a message with {FORGED}");
            });
            assert_eq!(lines.len(), 2, "{lines:?}");
            for line in &lines {
                assert!(!line.contains('\u{1b}'), "{line}");
            }
            match format {
                Format::Json => {
                    let record: serde_json::Value = serde_json::from_str(&lines[0]).unwrap();
                    assert_eq!(
                        (record["error"].as_str(), record["name"].as_str()),
                        (Some(FORGED), Some(FORGED))
                    );
                    assert_eq!(record["user"], serde_json::Value::Null);
                }
                Format::Text => {
                    let quoted = format!("{FORGED:?}");
                    let fields = format!("failed error={quoted} name={quoted} debug={quoted} port=7");
                    assert!(lines[0].ends_with(&fields), "{}", lines[0]);
                }
            }
        }
    }

    #[test]
    fn a_second_start_is_harmless() {
        let first = init(&LogSettings { level: LogLevel(LevelFilter::OFF), ..LogSettings::default() });
        assert!(first.and(init(&LogSettings::default())).is_ok());
    }
}
