//! Where log lines go, and which.
//!
//! Owns: the one subscriber of the process. Must not know: what is logged.
//! Invariants: lines go to stderr, so that stdout stays a command's answer; the libraries below us (HTTP/2, TLS) never log below
//! `warn`, whatever the level, since their frames and headers carry tokens and passwords.

use std::io;
use std::str::FromStr;

use tracing::level_filters::LevelFilter;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

/// The target of access records: `tracing::info!(target: telemetry::ACCESS, …)`. Switched by [`Settings::access`]
/// alone, whatever the level.
pub const ACCESS: &str = "keyward::access";

/// What is logged, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// How a line is written.
    pub format: Format,
    /// The least severe level that is written.
    pub level: Level,
    /// Whether every call leaves a record.
    pub access: bool,
}

/// How a line is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

/// `off`, `error`, `warn`, `info`, `debug` or `trace`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Level(LevelFilter);

/// The word is no level.
#[derive(Debug, thiserror::Error)]
#[error("is none of off, error, warn, info, debug, trace")]
pub struct UnknownLevel;

impl FromStr for Level {
    type Err = UnknownLevel;

    fn from_str(word: &str) -> Result<Self, UnknownLevel> {
        match word {
            "off" => Ok(Self(LevelFilter::OFF)),
            "error" => Ok(Self(LevelFilter::ERROR)),
            "warn" => Ok(Self(LevelFilter::WARN)),
            "info" => Ok(Self(LevelFilter::INFO)),
            "debug" => Ok(Self(LevelFilter::DEBUG)),
            "trace" => Ok(Self(LevelFilter::TRACE)),
            _ => Err(UnknownLevel),
        }
    }
}

impl Default for Settings {
    fn default() -> Self {
        Self { format: Format::Text, level: Level(LevelFilter::INFO), access: true }
    }
}

/// Installs the subscriber of the process. Where one is installed already (a test's), that one stays.
pub fn init(settings: &Settings) {
    let installed = subscriber(settings, io::stderr).try_init();
    if installed.is_err() {
        tracing::debug!("a log subscriber is installed already");
    }
}

fn subscriber<W>(settings: &Settings, writer: W) -> impl tracing::Subscriber + Send + Sync
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    let lines = tracing_subscriber::fmt::layer().with_writer(writer);
    let lines = match settings.format {
        Format::Text => {
            Box::new(lines.with_ansi(false)) as Box<dyn tracing_subscriber::Layer<_> + Send + Sync>
        }
        Format::Json => {
            Box::new(lines.json().flatten_event(true).with_current_span(false).with_span_list(false))
        }
    };
    tracing_subscriber::registry().with(filter(settings)).with(lines)
}

fn filter(settings: &Settings) -> EnvFilter {
    let Level(ours) = settings.level;
    let libraries = ours.min(LevelFilter::WARN);
    let access = if settings.access { LevelFilter::INFO } else { LevelFilter::OFF };
    EnvFilter::builder().parse_lossy(format!("{libraries},keyward={ours},{ACCESS}={access}"))
}
