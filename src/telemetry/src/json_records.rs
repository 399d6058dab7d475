//! The JSON format of log records.
//!
//! Owns: the order of the keys, and the JSON of a value. Must not know: the field names.
//! Invariant: a record is one line with one object, and a terminal that shows the line obeys none of it.

use std::cell::Cell;
use std::fmt::{self, Debug};
use std::time::SystemTime;

use serde::Serialize;
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_log::NormalizeEvent as _;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use super::module_names::ShownTarget;
use super::printable;
use super::text::{KEPT, write_time};

thread_local! {
    /// A buffer for the JSON of one record.
    static LINE: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// Writes `{"timestamp":…,"level":…,"message":…,"name":value,"target":…}`.
#[derive(Clone, Copy, Debug)]
pub(super) struct JsonRecords;

impl<S, N> FormatEvent<S, N> for JsonRecords
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        _: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        // Taken, not borrowed: formatting a value may log.
        let mut line = JsonLine { bytes: LINE.take() };
        line.bytes.clear();
        let mut time = String::with_capacity(32);
        write_time(&mut time, SystemTime::now());
        // Records of libraries using the crate `log` have their target in a field.
        let normalized = event.normalized_metadata();
        let metadata = normalized.as_ref().unwrap_or_else(|| event.metadata());
        let mut target = String::with_capacity(64);
        ShownTarget::of(metadata.target()).push_to(&mut target);
        line.add("timestamp", &time);
        line.add("level", metadata.level().as_str());
        event.record(&mut line);
        line.add("target", &target);
        line.bytes.extend_from_slice(b"}\n");
        let text = std::str::from_utf8(&line.bytes).map_err(|_| fmt::Error)?;
        let written = writer.write_str(&printable::json(text));
        if line.bytes.capacity() <= KEPT {
            LINE.set(line.bytes);
        }
        written
    }
}

/// The entries of one record.
struct JsonLine {
    bytes: Vec<u8>,
}

impl JsonLine {
    fn add(&mut self, name: &str, value: impl Serialize) {
        let start = self.bytes.len();
        self.bytes.push(if start == 0 { b'{' } else { b',' });
        let name = name.strip_prefix("r#").unwrap_or(name);
        let written = serde_json::to_writer(&mut self.bytes, name).and_then(|()| {
            self.bytes.push(b':');
            serde_json::to_writer(&mut self.bytes, &value)
        });
        // Writing to memory fails only if the value's own formatting does: the line has no half entry.
        if written.is_err() {
            self.bytes.truncate(start);
        }
    }
}

impl Visit for JsonLine {
    fn record_bool(&mut self, field: &Field, value: bool) {
        self.add(field.name(), value);
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.add(field.name(), value);
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.add(field.name(), value);
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.add(field.name(), value);
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.add(field.name(), value);
    }

    /// Handles all other values, including values written with `Display`.
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.add(field.name(), format_args!("{value:?}"));
    }
}
