//! The conditions that the log tells, and those that hold now.
//!
//! Owns: the list of all warnings and errors of the log, where else an operator finds each, and the records
//! of this process by row. Must not know: the checks of `keyward doctor`, the form of any page.
//! Invariants: a warning or an error of Keyward's own has a row, or `tests/docs` fails; a record counts
//! whatever the level of the log; the register has one entry per row at most, each with bounded details, and
//! a logging thread waits for no reader longer than copying these takes.

mod condition_rows;

use std::collections::BTreeMap;
use std::fmt::{self, Debug, Write as _};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::subscriber::Interest;
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::{Context, Filter};

use super::ACCESS;
use super::printable::cut_to;

pub use condition_rows::CONDITIONS;

/// Time for which an event counts as a condition that holds, since its last record.
pub const EVENT_HOLDS: Duration = Duration::from_secs(600);
/// Bytes of a record's fields kept at most.
const DETAILS: usize = 400;

/// A row of the list: a record of the log at level warn or error.
#[derive(Debug)]
pub struct LoggedCondition {
    /// Name of the condition, stable between versions: the label of the metric, the subject of the finding.
    pub name: &'static str,
    /// The message of the record.
    pub message: &'static str,
    /// Where else an operator finds the condition.
    pub telling: ConditionTelling,
}

/// Where else than in the log an operator finds a condition. Metric, status and page have each of them.
#[derive(Debug)]
pub enum ConditionTelling {
    /// A check of `keyward doctor` examines the present state by itself, and finds the condition.
    Check(&'static str),
    /// Doctor tells the record from the first record until another one says that the condition has ended.
    Until {
        /// The message of the record that ends the condition.
        end: &'static str,
        /// The remedy, in one line.
        fix: &'static str,
    },
    /// Doctor tells the record until the process ends: no record says that the condition has ended.
    Lasting {
        /// The remedy, in one line.
        fix: &'static str,
    },
    /// Doctor tells the record for [`EVENT_HOLDS`]: a happening, over with its record.
    Event {
        /// The message of a record that ends the condition before, if there is one.
        end: Option<&'static str>,
        /// The remedy, in one line.
        fix: &'static str,
    },
    /// Nobody is left to ask after the record.
    NoProcess {
        /// Why not.
        reason: &'static str,
    },
}

/// The records of one condition that holds.
#[derive(Clone, Debug)]
pub struct StandingCondition {
    /// The row.
    pub row: &'static LoggedCondition,
    /// True for a record at level error.
    pub is_error: bool,
    /// Number of records since the condition began.
    pub records: u64,
    /// Time since the last record.
    pub last: Duration,
    /// The fields of the last record. They can name a peer, so no page without a login shows them.
    pub details: String,
}

/// The records of one row.
#[derive(Debug)]
struct Sighting {
    is_error: bool,
    records: u64,
    last: Instant,
    details: String,
}

/// The conditions told by the log of a process.
#[derive(Debug, Default)]
pub struct ConditionRegister(Mutex<BTreeMap<usize, Sighting>>);

/// The register of the process's log. A process has a single log, so a single register suffices.
static REGISTER: OnceLock<Arc<ConditionRegister>> = OnceLock::new();

/// The conditions that hold now; none if this process has no log of its own.
#[must_use]
pub fn standing_conditions() -> Vec<StandingCondition> {
    REGISTER.get().map(|register| register.standing(Instant::now())).unwrap_or_default()
}

impl ConditionTelling {
    /// The message of the record that ends the condition.
    #[must_use]
    pub fn end(&self) -> Option<&'static str> {
        match self {
            Self::Until { end, .. } => Some(end),
            Self::Event { end, .. } => *end,
            Self::Check(_) | Self::Lasting { .. } | Self::NoProcess { .. } => None,
        }
    }

    /// The check of `keyward doctor` that finds the condition.
    #[must_use]
    pub fn check(&self) -> &'static str {
        match self {
            Self::Check(check) => check,
            Self::Until { .. } | Self::Lasting { .. } | Self::Event { .. } => "logged",
            Self::NoProcess { .. } => "",
        }
    }
}

impl ConditionRegister {
    /// Takes in a record of Keyward's own, of any level.
    fn note(&self, level: Level, message: &str, details: String, now: Instant) {
        let mut sightings = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if level > Level::WARN {
            sightings.retain(|at, _| {
                let row = CONDITIONS.get(*at).map(|row| &row.telling);
                row.and_then(ConditionTelling::end) != Some(message)
            });
            return;
        }
        let Some(at) = CONDITIONS.iter().position(|row| row.message == message) else { return };
        let before = sightings.get(&at).filter(|before| holds(at, before, now)).map_or(0, |it| it.records);
        let records = before.saturating_add(1);
        let is_error = level == Level::ERROR;
        sightings.insert(at, Sighting { is_error, records, last: now, details });
    }

    /// The conditions that hold at `now`, in the order of the list.
    fn standing(&self, now: Instant) -> Vec<StandingCondition> {
        let sightings = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let held = sightings.iter().filter(|(at, sighting)| holds(**at, sighting, now));
        let standing = held.filter_map(|(at, sighting)| {
            Some(StandingCondition {
                row: CONDITIONS.get(*at)?,
                is_error: sighting.is_error,
                records: sighting.records,
                last: now.saturating_duration_since(sighting.last),
                details: sighting.details.clone(),
            })
        });
        standing.collect()
    }
}

fn holds(at: usize, sighting: &Sighting, now: Instant) -> bool {
    let is_recent = now.saturating_duration_since(sighting.last) < EVENT_HOLDS;
    match CONDITIONS.get(at).map(|row| &row.telling) {
        Some(ConditionTelling::Until { .. } | ConditionTelling::Lasting { .. }) => true,
        Some(ConditionTelling::Check(_) | ConditionTelling::Event { .. }) => is_recent,
        Some(ConditionTelling::NoProcess { .. }) | None => false,
    }
}

/// Takes the records of the log into a register.
pub(super) struct ConditionLayer(Arc<ConditionRegister>);

impl ConditionLayer {
    /// The layer of the process's log.
    pub(super) fn install() -> Self {
        Self(Arc::clone(REGISTER.get_or_init(Arc::default)))
    }

    #[cfg(test)]
    pub(super) fn with(register: Arc<ConditionRegister>) -> Self {
        Self(register)
    }
}

impl<S: Subscriber> Layer<S> for ConditionLayer {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        if !is_own(event.metadata()) {
            return;
        }
        let mut text = RecordText::default();
        event.record(&mut text);
        self.0.note(*event.metadata().level(), &text.message, text.details, Instant::now());
    }
}

/// True for a record of Keyward's own that is no access record and that the layer wants.
fn is_own(metadata: &Metadata<'_>) -> bool {
    let target = metadata.target();
    let is_keyward = target == "keyward" || target.starts_with("keyward::");
    is_keyward && target != ACCESS && *metadata.level() <= Level::INFO
}

/// Lets warnings and errors through, whatever the level of the log, and the records that end a condition.
pub(super) struct ConditionFilter;

impl<S> Filter<S> for ConditionFilter {
    fn enabled(&self, metadata: &Metadata<'_>, _: &Context<'_, S>) -> bool {
        is_own(metadata)
    }

    /// An access record is wanted here too, and then ignored: a record that every layer wants always is not
    /// asked about again, and a call's record is not to cost more for the sake of the rest.
    fn callsite_enabled(&self, metadata: &'static Metadata<'static>) -> Interest {
        if *metadata.level() <= Level::INFO { Interest::always() } else { Interest::never() }
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(LevelFilter::INFO)
    }
}

/// The texts of a record: its message, and its other fields as the log shows them.
#[derive(Default)]
struct RecordText {
    message: String,
    details: String,
}

impl RecordText {
    fn add(&mut self, field: &Field, value: fmt::Arguments<'_>) {
        if field.name() == "message" {
            _ = write!(self.message, "{value}");
            return;
        }
        if self.details.len() >= DETAILS {
            return;
        }
        let gap = if self.details.is_empty() { "" } else { " " };
        _ = write!(self.details, "{gap}{}={value}", field.name());
        if self.details.len() > DETAILS {
            self.details.truncate(cut_to(&self.details, DETAILS).len());
            self.details.push('…');
        }
    }
}

impl Visit for RecordText {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.add(field, format_args!("{value}"));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.add(field, format_args!("{value:?}"));
    }
}

#[cfg(test)]
mod tests;
