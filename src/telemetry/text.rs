//! The fields of a log record in the text format.
//!
//! Owns: quoting. Must not know: the field names. Invariant: a record is a single line, and no value can pose
//! as another field or record: a value other than a plain word is quoted, and control characters are escaped.
//! (In the JSON format, JSON's escaping does the same.)

use std::cell::RefCell;
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
    /// Writes the field, with its value as `write_value` writes it.
    fn write(&mut self, field: &Field, write_value: impl FnOnce(&mut Writer<'_>) -> fmt::Result) {
        if self.result.is_ok() {
            self.result = self.write_name(field.name()).and_then(|()| write_value(&mut self.writer));
        }
    }

    fn write_name(&mut self, name: &str) -> fmt::Result {
        if !std::mem::take(&mut self.is_first) {
            self.writer.write_char(' ')?;
        }
        if name == "message" {
            return Ok(());
        }
        self.writer.write_str(name.strip_prefix("r#").unwrap_or(name))?;
        self.writer.write_char('=')
    }
}

/// Writes `text` in quotes.
fn write_quoted(writer: &mut Writer<'_>, text: &str) -> fmt::Result {
    if !text.bytes().all(|byte| matches!(byte, b' '..=b'~' if byte != b'"' && byte != b'\\')) {
        return write!(writer, "{text:?}");
    }
    writer.write_char('"')?;
    writer.write_str(text)?;
    writer.write_char('"')
}

impl Visit for QuotingVisitor<'_> {
    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            "message" => self.write(field, |writer| write!(writer, "{}", EscapedMessage(value))),
            _ => self.write(field, |writer| write_quoted(writer, value)),
        }
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.write(field, |writer| write!(writer, "{value}"));
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.write(field, |writer| write!(writer, "{value}"));
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.write(field, |writer| write!(writer, "{value}"));
    }

    /// Handles all other values, including values written with `Display`.
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        VALUE.with_borrow_mut(|text| {
            text.clear();
            self.result = self.result.and_then(|()| write!(text, "{value:?}"));
            if field.name() == "message" {
                self.write(field, |writer| write!(writer, "{}", EscapedMessage(text)));
            } else if is_plain(text) {
                self.write(field, |writer| writer.write_str(text));
            } else {
                self.write(field, |writer| write_quoted(writer, text));
            }
        });
    }
}

thread_local! {
    /// A buffer for the text of one value.
    static VALUE: RefCell<String> = const { RefCell::new(String::new()) };
}

/// True if the text is a single word needing no quotes, or already a quoted string.
fn is_plain(text: &str) -> bool {
    if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_graphic() && !is_special(byte)) {
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
    fn a_quoted_text_reads_as_rust_writes_it() {
        for text in ["", "a b", "a=b", "say \"x\"", "back\\slash", "a\nb", "it's", "m\u{fc}ller", "\u{7f}"] {
            let mut written = String::new();
            write_quoted(&mut Writer::new(&mut written), text).expect("written");
            assert_eq!(written, format!("{text:?}"));
        }
    }

    #[test]
    fn a_message_keeps_its_quotes_and_loses_its_line_ends() {
        let text = EscapedMessage("it's \"so\"\nor\u{1b}[31m not").to_string();
        assert_eq!(text, "it's \"so\"\\nor\\u{1b}[31m not");
    }
}
