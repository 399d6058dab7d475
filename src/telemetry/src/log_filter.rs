//! The filter of log records: a level, and levels of single modules.
//!
//! Owns: the text of a filter, its rules, and the filter in force, which can change while running. Must not
//! know: the writing of records.
//! Invariants: a filter changes the levels of Keyward's own modules only, and libraries log warnings and
//! errors at most, because their frames and headers carry tokens and passwords; no filter reaches
//! access records, which follow `log.access` alone.

use std::fmt;
use std::str::FromStr;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use arc_swap::ArcSwap;
use tracing::Metadata;
use tracing::level_filters::LevelFilter;
use tracing::subscriber::Interest;
use tracing_subscriber::Layer;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::{Context, Filter};

use super::module_names::MODULES;
use super::{ACCESS, LogLevel, UnknownLogLevel};

/// Modules in a filter at most.
const MOST_MODULES: usize = 16;

/// A level, and the levels of some modules: `info,watch=debug,upstream::pool=trace`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogFilter {
    level: LogLevel,
    /// Paths below `keyward::`.
    modules: Vec<(String, LogLevel)>,
}

/// The reason why a text is no filter.
#[derive(Debug, thiserror::Error)]
pub enum InvalidLogFilter {
    /// The level of the filter, or of a module, is unknown.
    #[error("{0:?} {1}")]
    Level(String, UnknownLogLevel),
    /// Keyward has no such module.
    #[error("{0:?} is no module of Keyward, such as watch or upstream::pool")]
    Module(String),
    /// The filter is too long.
    #[error("names more than {MOST_MODULES} modules")]
    TooLong,
}

impl From<LogLevel> for LogFilter {
    fn from(level: LogLevel) -> Self {
        Self { level, modules: Vec::new() }
    }
}

impl FromStr for LogFilter {
    type Err = InvalidLogFilter;

    fn from_str(text: &str) -> Result<Self, InvalidLogFilter> {
        let level = |word: &str| word.parse().map_err(|error| InvalidLogFilter::Level(word.into(), error));
        let mut parts = text.split(',').map(str::trim);
        let mut filter = Self::from(level(parts.next().unwrap_or_default())?);
        for part in parts {
            let (written, word) = part.split_once('=').unwrap_or((part, ""));
            let module = written.strip_prefix("keyward::").unwrap_or(written);
            if !is_module(module) {
                return Err(InvalidLogFilter::Module(written.into()));
            }
            if filter.modules.len() == MOST_MODULES {
                return Err(InvalidLogFilter::TooLong);
            }
            filter.modules.push((module.to_owned(), level(word)?));
        }
        Ok(filter)
    }
}

/// True for the path of a module below `keyward::`; only the top module is compared with the list.
fn is_module(path: &str) -> bool {
    let is_name =
        |name: &str| !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
    let mut names = path.split("::");
    names.next().is_some_and(|top| MODULES.iter().any(|(module, _)| *module == top)) && names.all(is_name)
}

impl fmt::Display for LogFilter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.level)?;
        for (module, level) in &self.modules {
            write!(f, ",{module}={level}")?;
        }
        Ok(())
    }
}

impl LogFilter {
    /// True if the level is stricter, whatever the levels of modules.
    #[must_use]
    pub fn is_stricter_than(&self, other: &Self) -> bool {
        self.level.0 < other.level.0
    }

    fn targets(&self) -> Targets {
        let LogLevel(ours) = self.level;
        let level_of = |wanted: &str| {
            self.modules.iter().rfind(|(module, _)| module == wanted).map_or(ours, |(_, level)| level.0)
        };
        // Each top module, because the package of one may be the top of another's path.
        let tops = MODULES.iter().map(|(module, path)| ((*path).to_owned(), level_of(module)));
        let inner = self.modules.iter().filter_map(|(module, level)| {
            let (top, rest) = module.split_once("::")?;
            let (_, path) = MODULES.iter().find(|(module, _)| *module == top)?;
            Some((format!("{path}::{rest}"), level.0))
        });
        Targets::new()
            .with_default(ours.min(LevelFilter::WARN))
            .with_target("keyward", ours)
            .with_targets(tops)
            .with_targets(inner)
            .with_target(ACCESS, LevelFilter::INFO)
    }
}

/// The filter in force of one subscriber.
#[derive(Debug)]
pub(super) struct CurrentLogFilter {
    filter: Mutex<LogFilter>,
    targets: ArcSwap<Targets>,
}

/// The filter in force of the process's subscriber. A process has a single log, so a single filter suffices.
static CURRENT: OnceLock<Arc<CurrentLogFilter>> = OnceLock::new();

impl CurrentLogFilter {
    pub(super) fn new(filter: LogFilter) -> Arc<Self> {
        let targets = ArcSwap::from_pointee(filter.targets());
        Arc::new(Self { filter: Mutex::new(filter), targets })
    }

    /// Makes this filter the filter of the process.
    pub(super) fn install(self: &Arc<Self>) {
        drop(CURRENT.set(Arc::clone(self)));
    }

    fn replace(&self, filter: LogFilter) {
        let mut current = self.filter.lock().unwrap_or_else(PoisonError::into_inner);
        let targets = Arc::new(filter.targets());
        // `tracing_log` passes the records of the `log` crate on up to this level only.
        if let Some(most) = Layer::<tracing_subscriber::Registry>::max_level_hint(&*targets) {
            tracing_log::log::set_max_level(tracing_log::AsLog::as_log(&most));
        }
        self.targets.store(targets);
        *current = filter;
        // Every place that logs has asked the former filter once, and kept the answer.
        tracing::callsite::rebuild_interest_cache();
    }
}

/// The filter in force; `None` if this process has no log of its own.
#[must_use]
pub fn log_filter() -> Option<LogFilter> {
    let current = CURRENT.get()?;
    Some(current.filter.lock().unwrap_or_else(PoisonError::into_inner).clone())
}

/// Replaces the filter in force until the process ends, unless this process has no log of its own.
pub fn set_log_filter(filter: LogFilter) {
    if let Some(current) = CURRENT.get() {
        current.replace(filter);
    }
}

/// Applies the filter in force to each record of one layer.
pub(super) struct LogFilterLayer(pub(super) Arc<CurrentLogFilter>);

impl<S> Filter<S> for LogFilterLayer {
    fn enabled(&self, metadata: &Metadata<'_>, context: &Context<'_, S>) -> bool {
        Filter::<S>::enabled(&**self.0.targets.load(), metadata, context)
    }

    fn callsite_enabled(&self, metadata: &'static Metadata<'static>) -> Interest {
        Filter::<S>::callsite_enabled(&**self.0.targets.load(), metadata)
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Filter::<S>::max_level_hint(&**self.0.targets.load())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_is_a_level_and_levels_of_modules_that_exist() {
        for (text, shown) in [
            ("debug", "debug"),
            ("off", "off"),
            ("info,watch=debug", "info,watch=debug"),
            ("warn, keyward::upstream::pool=trace, rest=off", "warn,upstream::pool=trace,rest=off"),
        ] {
            assert_eq!(text.parse::<LogFilter>().unwrap().to_string(), shown);
        }
        let many = "info".to_owned() + &",watch=info".repeat(17);
        for (text, reason) in [
            ("", "\"\" is none of off, error, warn, info, debug, trace"),
            ("loud", "\"loud\" is none of"),
            ("watch=debug", "\"watch=debug\" is none of"),
            ("info,watch", "\"\" is none of"),
            ("info,wach=debug", "\"wach\" is no module of Keyward"),
            ("info,h2=trace", "\"h2\" is no module"),
            ("info,access=off", "\"access\" is no module"),
            ("info,watch::=debug", "\"watch::\" is no module"),
            ("info,=debug", "\"\" is no module"),
            (many.as_str(), "more than 16"),
        ] {
            let error = text.parse::<LogFilter>().unwrap_err().to_string();
            assert!(error.contains(reason), "{text}: {error}");
        }
    }

    #[test]
    fn a_filter_reaches_our_modules_alone() {
        let targets =
            "info,watch=trace,upstream=off,upstream::pool=debug".parse::<LogFilter>().unwrap().targets();
        for (target, level, is_logged) in [
            ("keyward_streams::watch::hub", tracing::Level::TRACE, true),
            ("keyward_streams::lease", tracing::Level::DEBUG, false),
            ("keyward_streams::lease", tracing::Level::INFO, true),
            ("keyward_upstream", tracing::Level::ERROR, false),
            ("keyward_upstream::send", tracing::Level::ERROR, false),
            ("keyward_upstream::pool", tracing::Level::DEBUG, true),
            ("keyward_upstream::credentials", tracing::Level::INFO, true),
            ("keyward::app", tracing::Level::DEBUG, false),
            ("keyward::app", tracing::Level::INFO, true),
            ("h2::codec", tracing::Level::INFO, false),
            ("h2::codec", tracing::Level::WARN, true),
            (ACCESS, tracing::Level::INFO, true),
        ] {
            assert_eq!(targets.would_enable(target, &level), is_logged, "{target} {level}");
        }
    }
}
