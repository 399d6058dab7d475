//! Text that a terminal shows and does not obey.
//!
//! Owns: the characters that a terminal obeys or that change the order of a line, and their escapes in text,
//! in JSON and in a page of metrics; where a long text is cut. Must not know: the source of a text.
//! Invariant: an escaped text has none of these characters, and two texts stay two.

use std::borrow::Cow;
use std::fmt::{self, Write};

/// True for control characters, line separators and the marks of writing direction.
fn is_obeyed(character: char) -> bool {
    character.is_control()
        || matches!(character,
            '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// The begin of the text: at most `bytes` bytes, and whole characters.
#[must_use]
pub fn cut_to(text: &str, bytes: usize) -> &str {
    let end = (0..=bytes.min(text.len())).rev().find(|end| text.is_char_boundary(*end));
    &text[..end.unwrap_or(0)]
}

/// The text, escaped as in Rust if it has such a character.
#[must_use]
pub fn escaped(text: &str) -> String {
    if text.chars().any(is_obeyed) { text.escape_debug().to_string() } else { text.to_owned() }
}

/// A JSON text, with such characters as JSON escapes: outside of strings JSON has none but line ends.
#[must_use]
pub fn json(text: &str) -> Cow<'_, str> {
    let is_escaped = |character: char| character != '\n' && is_obeyed(character);
    if !text.contains(is_escaped) {
        return Cow::Borrowed(text);
    }
    let mut escaped = String::with_capacity(text.len() + 64);
    for character in text.chars() {
        if is_escaped(character) {
            // All of them have one unit of UTF-16.
            let code = u32::from(character);
            escaped.push_str("\\u");
            let digits = [12, 8, 4, 0].map(|shift| char::from_digit((code >> shift) & 0xf, 16));
            escaped.extend(digits.into_iter().flatten());
        } else {
            escaped.push(character);
        }
    }
    Cow::Owned(escaped)
}

/// A page of metrics while it is written. Such characters occur in values of labels alone, but for the ends
/// of lines.
#[derive(Debug, Default)]
pub struct MetricsText(String);

impl MetricsText {
    /// An empty page with room for so many bytes.
    #[must_use]
    pub fn with_capacity(bytes: usize) -> Self {
        Self(String::with_capacity(bytes))
    }

    /// The page.
    #[must_use]
    pub fn into_text(self) -> String {
        self.0
    }
}

impl Write for MetricsText {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let mut rest = text;
        while let Some(at) = rest.find(|character| character != '\n' && is_obeyed(character)) {
            let (plain, from) = rest.split_at(at);
            self.0.push_str(plain);
            let mut characters = from.chars();
            if let Some(character) = characters.next() {
                // In a label's value a backslash is written twice.
                write!(self.0, "\\\\u{{{:x}}}", u32::from(character))?;
            }
            rest = characters.as_str();
        }
        self.0.push_str(rest);
        Ok(())
    }
}

#[cfg(test)]
mod tests {

    use super::*;

    /// A title for a terminal's window, a C1 escape, and a text that reads backwards.
    const HOSTILE: &str = "a\u{1b}]0;x\u{7}\u{9b}2J\u{202e}b\r\u{7f}";

    fn obeyed(text: &str) -> usize {
        text.chars().filter(|character| is_obeyed(*character)).count()
    }

    #[test]
    fn no_form_keeps_what_a_terminal_obeys() {
        assert_eq!(obeyed(HOSTILE), 6);
        assert_eq!(obeyed(&escaped(HOSTILE)), 0);
        assert_eq!(escaped("größe 鍵"), "größe 鍵");
        let quoted = serde_json::to_string(HOSTILE).expect("JSON");
        assert!(obeyed(&quoted) > 0);
        assert_eq!(obeyed(&json(&quoted)), 0);
        assert_eq!(serde_json::from_str::<String>(&json(&quoted)).expect("JSON"), HOSTILE);
        assert!(matches!(json("{\"a\":\"größe\"}\n"), Cow::Borrowed(_)));
    }

    #[test]
    fn a_page_of_metrics_keeps_its_lines_and_nothing_else() {
        let mut page = MetricsText::with_capacity(8);
        page.write_str("calls{user=\"").expect("text");
        page.write_str(HOSTILE).expect("text");
        page.write_str("\"} 1\nx 2\n").expect("text");
        let text = page.into_text();
        assert_eq!(obeyed(&text), 2, "two lines: {text}");
        assert_eq!(text.lines().count(), 2);
        assert!(text.starts_with("calls{user=\"a\\\\u{1b}]0;x\\\\u{7}"), "{text}");
    }
}
