//! The conditions that the log tells, and those that hold now.
//!
//! Owns: the list of all warnings and errors of the log, where else an operator finds each, and the records
//! of this process by row. Must not know: the checks of `keyward doctor`, the form of any page.
//! Invariants: a warning or an error of Keyward's own has a row, or `tests/docs` fails; a record counts
//! whatever the level of the log; a condition ends at once with the record that tells its end, for the one
//! that this record names; the register has `SUBJECTS` entries per row at most, each with bounded details,
//! and a logging thread waits for no reader longer than copying these takes.

mod condition_ends;
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
use super::module_names::ShownTarget;
use super::printable::cut_to;

pub use condition_ends::{CONDITION_ENDS, ConditionEnd};
pub use condition_rows::CONDITIONS;

/// Time for which an event counts as a condition that holds, since its last record.
pub const EVENT_HOLDS: Duration = Duration::from_secs(600);
/// Bytes of a record's fields kept at most.
const DETAILS: usize = 400;
/// Members, names and the like for which a row is kept apart at most.
const SUBJECTS: usize = 64;
/// Bytes of the name of a subject kept at most.
const LONGEST_SUBJECT: usize = 256;

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
    /// A check of `keyward doctor` examines the present state by itself, and finds the condition. The record
    /// holds for [`EVENT_HOLDS`], or until a record of [`CONDITION_ENDS`] before.
    Check(&'static str),
    /// Doctor tells the record from the first record until one of [`CONDITION_ENDS`].
    Until {
        /// The remedy, in one line.
        fix: &'static str,
    },
    /// Doctor tells the record until the process ends: no record says that the condition has ended.
    Lasting {
        /// The remedy, in one line.
        fix: &'static str,
    },
    /// Doctor tells the record for [`EVENT_HOLDS`], or until a record of [`CONDITION_ENDS`] before: a
    /// happening, over with its record.
    Event {
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

/// The records of one row about one subject.
#[derive(Debug)]
struct Sighting {
    is_error: bool,
    records: u64,
    last: Instant,
    details: String,
}

/// The conditions told by the log of a process, by row and by the member, name or sink that has the
/// condition; with an empty text where only one can have it.
#[derive(Debug, Default)]
pub struct ConditionRegister(Mutex<BTreeMap<(usize, String), Sighting>>);

/// The register of the process's log. A process has a single log, so a single register suffices.
static REGISTER: OnceLock<Arc<ConditionRegister>> = OnceLock::new();

/// The conditions that hold now; none if this process has no log of its own.
#[must_use]
pub fn standing_conditions() -> Vec<StandingCondition> {
    REGISTER.get().map(|register| register.standing(Instant::now())).unwrap_or_default()
}

impl LoggedCondition {
    /// The records that end the condition.
    pub fn ends(&self) -> impl Iterator<Item = &'static ConditionEnd> {
        CONDITION_ENDS.iter().filter(|end| end.conditions.contains(&self.name))
    }
}

impl ConditionTelling {
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
    fn note(&self, level: Level, record: RecordText, now: Instant) {
        let lock = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if level > Level::WARN {
            for end in CONDITION_ENDS.iter().filter(|end| end.message == record.message) {
                let subject = record.subject(end.subject);
                lock().retain(|(at, of), _| {
                    let name = CONDITIONS.get(*at).map_or("", |row| row.name);
                    of != subject || !end.conditions.contains(&name)
                });
            }
            return;
        }
        let Some(at) = CONDITIONS.iter().position(|row| row.message == record.message) else { return };
        let row = CONDITIONS.get(at);
        let field = row.and_then(|row| row.ends().next()).and_then(|end| end.subject);
        let mut key = (at, record.subject(field).to_owned());
        let mut sightings = lock();
        sightings.retain(|(at, _), sighting| holds(*at, sighting, now));
        let of_row = sightings.keys().filter(|(other, _)| *other == at).count();
        if of_row >= SUBJECTS && !sightings.contains_key(&key) {
            key.1.clear();
        }
        let records = sightings.get(&key).map_or(0, |before| before.records).saturating_add(1);
        let (is_error, details) = (level == Level::ERROR, record.details);
        sightings.insert(key, Sighting { is_error, records, last: now, details });
    }

    /// The conditions that hold at `now`, in the order of the list: one for each row, with the last record.
    fn standing(&self, now: Instant) -> Vec<StandingCondition> {
        let sightings = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut standing: BTreeMap<usize, StandingCondition> = BTreeMap::new();
        for ((at, _), sighting) in sightings.iter().filter(|((at, _), one)| holds(*at, one, now)) {
            let Some(row) = CONDITIONS.get(*at) else { continue };
            let mut condition = StandingCondition {
                row,
                is_error: sighting.is_error,
                records: sighting.records,
                last: now.saturating_duration_since(sighting.last),
                details: sighting.details.clone(),
            };
            if let Some(other) = standing.remove(at) {
                let records = condition.records.saturating_add(other.records);
                condition = if other.last < condition.last { other } else { condition };
                condition.records = records;
            }
            standing.insert(*at, condition);
        }
        standing.into_values().collect()
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
        self.0.note(*event.metadata().level(), text, Instant::now());
    }
}

/// True for a record of Keyward's own that is no access record and that the layer wants.
fn is_own(metadata: &Metadata<'_>) -> bool {
    let target = metadata.target();
    ShownTarget::of(target).is_own() && target != ACCESS && *metadata.level() <= Level::INFO
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
    /// The fields that name a subject in [`CONDITION_ENDS`].
    subjects: Vec<(&'static str, String)>,
}

impl RecordText {
    /// The name in the field `subject`; an empty one without such a field.
    fn subject(&self, subject: Option<&str>) -> &str {
        let found = self.subjects.iter().find(|(field, _)| Some(*field) == subject);
        found.map_or("", |(_, name)| name.as_str())
    }

    fn add(&mut self, field: &Field, value: fmt::Arguments<'_>) {
        if field.name() == "message" {
            _ = write!(self.message, "{value}");
            return;
        }
        if CONDITION_ENDS.iter().any(|end| end.subject == Some(field.name())) {
            let name = value.to_string();
            self.subjects.push((field.name(), cut_to(&name, LONGEST_SUBJECT).to_owned()));
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
