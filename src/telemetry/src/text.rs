//! The text format of log records.
//!
//! Owns: the time, the level, the target and the quoting of fields. Must not know: the field names.
//! Invariant: a record is a single line, and no value can pose as another field or record: a value other than
//! a plain word is quoted, and control characters are escaped. (In the JSON format, JSON's escaping does the
//! same.) A record is formatted without the formatting machinery of `std` where possible: every call leaves a
//! record.

use std::cell::{Cell, RefCell};
use std::fmt::{self, Debug, Write as _};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_log::NormalizeEvent as _;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use super::module_names::ShownTarget;

thread_local! {
    /// A buffer for the text of one record.
    static LINE: Cell<String> = const { Cell::new(String::new()) };
    /// The last second of a record's time, since 1970, and the text of the second.
    static SECOND: RefCell<(u64, String)> = const { RefCell::new((u64::MAX, String::new())) };
}

/// A buffer grown beyond this size is freed after the record.
pub(super) const KEPT: usize = 16 * 1024;

/// Writes `time LEVEL target: message name=value name="quoted value"`.
#[derive(Clone, Copy, Debug)]
pub(super) struct TextRecords;

impl<S, N> FormatEvent<S, N> for TextRecords
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
        let mut line = LINE.take();
        line.clear();
        write_time(&mut line, SystemTime::now());
        // Records of libraries using the crate `log` have their target in a field.
        let normalized = event.normalized_metadata();
        let metadata = normalized.as_ref().unwrap_or_else(|| event.metadata());
        line.push_str(level(*metadata.level()));
        ShownTarget::of(metadata.target()).push_to(&mut line);
        line.push(':');
        event.record(&mut QuotingVisitor { line: &mut line });
        line.push('\n');
        let written = writer.write_str(&line);
        if line.capacity() <= KEPT {
            LINE.set(line);
        }
        written
    }
}

fn level(level: Level) -> &'static str {
    match level {
        Level::ERROR => " ERROR ",
        Level::WARN => "  WARN ",
        Level::INFO => "  INFO ",
        Level::DEBUG => " DEBUG ",
        Level::TRACE => " TRACE ",
    }
}

/// Writes the time in UTC, in RFC 3339 with microseconds.
pub(super) fn write_time(line: &mut String, now: SystemTime) {
    let since = now.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
    SECOND.with_borrow_mut(|(second, text)| {
        if *second != since.as_secs() {
            *second = since.as_secs();
            *text = text_of_second(*second);
        }
        line.push_str(text);
    });
    // The first digit only keeps the leading zeros.
    let mut digits = itoa::Buffer::new();
    line.push('.');
    line.push_str(&digits.format(1_000_000 + since.subsec_micros())[1..]);
    line.push('Z');
}

/// `2026-01-31T23:59:59`; the number of seconds if the clock is beyond the calendar.
fn text_of_second(second: u64) -> String {
    let moment =
        i64::try_from(second).ok().and_then(|second| OffsetDateTime::from_unix_timestamp(second).ok());
    let text = moment.and_then(|moment| moment.format(&Rfc3339).ok()).unwrap_or_else(|| second.to_string());
    text.trim_end_matches('Z').to_owned()
}

struct QuotingVisitor<'line> {
    line: &'line mut String,
}

impl QuotingVisitor<'_> {
    fn write_name(&mut self, field: &Field) {
        self.line.push(' ');
        let name = field.name();
        if name != "message" {
            self.line.push_str(name.strip_prefix("r#").unwrap_or(name));
            self.line.push('=');
        }
    }
}

impl Visit for QuotingVisitor<'_> {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.write_name(field);
        match field.name() {
            "message" => write_message(self.line, value),
            _ => write_quoted(self.line, value),
        }
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.write_name(field);
        self.line.push_str(itoa::Buffer::new().format(value));
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.write_name(field);
        self.line.push_str(itoa::Buffer::new().format(value));
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.write_name(field);
        self.line.push_str(if value { "true" } else { "false" });
    }

    /// Handles all other values, including values written with `Display`.
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.write_name(field);
        let start = self.line.len();
        // Writing to a `String` fails only if the value's own formatting does.
        if write!(self.line, "{value:?}").is_err() {
            self.line.push_str("(unwritable)");
        }
        let written = &self.line[start..];
        let is_message = field.name() == "message";
        let stays = if is_message { is_printable(written) } else { is_plain(written) };
        if !stays {
            let text = self.line.split_off(start);
            let write = if is_message { write_message } else { write_quoted };
            write(self.line, &text);
        }
    }
}

/// True if the text has only printable ASCII characters.
fn is_printable(text: &str) -> bool {
    every_byte(text, |byte| matches!(byte, b' '..=b'~'))
}

/// True if `is_right` holds for every byte. Reads on after a wrong byte, so that the compiler can test many
/// bytes at once.
fn every_byte(text: &str, is_right: impl Fn(u8) -> bool) -> bool {
    text.bytes().fold(true, |right, byte| right & is_right(byte))
}

/// Writes `text` in quotes, as Rust's `Debug` does.
fn write_quoted(line: &mut String, text: &str) {
    if every_byte(text, |byte| matches!(byte, b' '..=b'~') && byte != b'"' && byte != b'\\') {
        line.push('"');
        line.push_str(text);
        line.push('"');
    } else {
        line.push_str(&format!("{text:?}"));
    }
}

/// Writes a message unchanged, except for escaping characters able to end the line or move the cursor.
fn write_message(line: &mut String, text: &str) {
    if is_printable(text) {
        line.push_str(text);
        return;
    }
    for c in text.chars() {
        // `escape_debug` would also escape quotes, needlessly.
        match c {
            '"' | '\'' | '\\' => line.push(c),
            _ => line.extend(c.escape_debug()),
        }
    }
}

/// True if the text is a single word needing no quotes, or already a quoted string.
fn is_plain(text: &str) -> bool {
    if !text.is_empty() && every_byte(text, |byte| byte.is_ascii_graphic() && !is_special(byte)) {
        return true;
    }
    let is_plain = |c: char| c.is_alphanumeric() || (c.is_ascii_graphic() && !is_special(c));
    !text.is_empty() && text.chars().all(is_plain) || is_quoted(text)
}

fn is_special(sign: impl Into<char>) -> bool {
    matches!(sign.into(), '"' | '\\' | '=')
}

fn is_quoted(text: &str) -> bool {
    let Some(inner) = text.strip_prefix('"').and_then(|text| text.strip_suffix('"')) else { return false };
    let mut is_escaped = false;
    let is_inner = |c: char| {
        let ends = c == '"' && !is_escaped;
        is_escaped = c == '\\' && !is_escaped;
        !ends && (c == ' ' || c.is_alphanumeric() || c.is_ascii_graphic())
    };
    let all_inner = inner.chars().all(is_inner);
    all_inner && !is_escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_words_stand_as_they_are_and_all_else_is_quoted() {
        for plain in
            ["7", "Ok", "127.0.0.1:2379", "[::1]:80", "8211f1d0f64f3269", "500ms", "müller", "\"a b\""]
        {
            assert!(is_plain(plain), "{plain}");
        }
        let quoted = [
            "",
            "a b",
            "a=b",
            "a\nb",
            "a\u{1b}[2J",
            "say \"x\"",
            "\"a\" b=\"c\"",
            "\"a\\\"",
            "\"a\nb\"",
            "\"",
            "a\u{202e}b",
        ];
        for quoted in quoted {
            assert!(!is_plain(quoted), "{quoted:?}");
        }
    }

    #[test]
    fn a_quoted_text_reads_as_rust_writes_it() {
        for text in ["", "a b", "a=b", "say \"x\"", "back\\slash", "a\nb", "it's", "m\u{fc}ller", "\u{7f}"] {
            let mut written = String::new();
            write_quoted(&mut written, text);
            assert_eq!(written, format!("{text:?}"));
        }
    }

    #[test]
    fn a_message_keeps_its_quotes_and_loses_its_line_ends() {
        let mut written = String::new();
        write_message(&mut written, "it's \"so\"\nor\u{1b}[31m not");
        assert_eq!(written, "it's \"so\"\\nor\\u{1b}[31m not");
    }

    #[test]
    fn the_time_is_written_in_rfc_3339_with_microseconds() {
        for (micros, text) in [
            (0, "1970-01-01T00:00:00.000000Z"),
            (1_767_225_599_000_042, "2025-12-31T23:59:59.000042Z"),
            (1_767_225_599_999_999, "2025-12-31T23:59:59.999999Z"),
            (1_767_225_600_100_000, "2026-01-01T00:00:00.100000Z"),
        ] {
            let mut written = String::new();
            write_time(&mut written, UNIX_EPOCH + Duration::from_micros(micros));
            assert_eq!(written, text);
        }
    }
}
