//! The fields of a log record in the text format.
//!
//! Owns: quoting. Must not know: the field names. Invariant: a record is a single line, and no value can pose
//! as another field or record: a value other than a plain word is quoted, and control characters are escaped.
//! (In the JSON format, JSON's escaping does the same.)

use std::fmt::{self, Debug, Write as _};

use tracing::field::{Field, Visit};
use tracing_subscriber::field::RecordFields;
use tracing_subscriber::fmt::FormatFields;
use tracing_subscriber::fmt::format::Writer;

/// Writes `message name=value name="quoted value"`.
#[derive(Clone, Copy, Debug)]
pub(super) struct QuotedFields;

impl<'writer> FormatFields<'writer> for QuotedFields {
    fn format_fields<R: RecordFields>(&self, writer: Writer<'writer>, fields: R) -> fmt::Result {
        let mut visitor = QuotingVisitor { writer, is_first: true, result: Ok(()) };
        fields.record(&mut visitor);
        visitor.result
    }
}

struct QuotingVisitor<'writer> {
    writer: Writer<'writer>,
    is_first: bool,
    result: fmt::Result,
}

impl QuotingVisitor<'_> {
    fn write(&mut self, field: &Field, value: fmt::Arguments<'_>) {
        if self.result.is_err() {
            return;
        }
        let space = if std::mem::take(&mut self.is_first) { "" } else { " " };
        self.result = match field.name() {
            "message" => write!(self.writer, "{space}{value}"),
            name => write!(self.writer, "{space}{}={value}", name.trim_start_matches("r#")),
        };
    }
}

impl Visit for QuotingVisitor<'_> {
    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            "message" => self.write(field, format_args!("{}", EscapedMessage(value))),
            _ => self.write(field, format_args!("{value:?}")),
        }
    }

    /// Handles all values except strings, including values written with `Display`.
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let text = format!("{value:?}");
        if field.name() == "message" {
            self.write(field, format_args!("{}", EscapedMessage(&text)));
        } else if is_plain(&text) {
            self.write(field, format_args!("{text}"));
        } else {
            self.write(field, format_args!("{text:?}"));
        }
    }
}

/// True if the text is a single word needing no quotes, or already a quoted string.
fn is_plain(text: &str) -> bool {
    let is_plain = |c: char| c.is_alphanumeric() || (c.is_ascii_graphic() && !matches!(c, '"' | '\\' | '='));
    !text.is_empty() && text.chars().all(is_plain) || is_quoted(text)
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

/// A message, unchanged except for escaping characters able to end the line or move the cursor.
struct EscapedMessage<'a>(&'a str);

impl fmt::Display for EscapedMessage<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for c in self.0.chars() {
            // `escape_debug` would also escape quotes, needlessly.
            match c {
                '"' | '\'' | '\\' => f.write_char(c)?,
                _ => write!(f, "{}", c.escape_debug())?,
            }
        }
        Ok(())
    }
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
    fn a_message_keeps_its_quotes_and_loses_its_line_ends() {
        let text = EscapedMessage("it's \"so\"\nor\u{1b}[31m not").to_string();
        assert_eq!(text, "it's \"so\"\\nor\\u{1b}[31m not");
    }
}
