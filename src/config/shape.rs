//! From text to the mirror, telling every fault of the text's shape: syntax, unknown keys, values of the wrong type.
//!
//! Owns: TOML. Must not know: what a key means.
//! Invariants: one fault hides no other, except that a file which is no TOML is looked at no further; a fault
//! never repeats a value, which may be a secret in the wrong place.
//!
//! How: serde stops at the first fault. So the entry at fault is told, cut out, and the rest is read again, until it reads.

use std::collections::HashMap;
use std::ops::Range;

use serde::Deserialize as _;
use toml::Spanned;
use toml::de::{DeTable, DeValue, Deserializer, Error};

use super::file::File;
use super::findings::Findings;

/// The mirror of what could be read, and all that could not. `None`: it is no TOML.
pub(super) fn read(text: &str) -> (Option<File>, Findings) {
    let (mut table, broken) = DeTable::parse_recoverable(text);
    let mut lines = HashMap::new();
    record_lines(text, table.get_ref(), "", &mut lines);
    let mut findings = Findings::new(lines);
    if !broken.is_empty() {
        for error in broken {
            findings.fault_at_line(error.span().map(|span| line(text, &span)), error.message());
        }
        return (None, findings);
    }
    loop {
        let error = match File::deserialize(Deserializer::from(table.clone())) {
            Ok(file) => return (Some(file), findings),
            Err(error) => error,
        };
        match error.span().and_then(|span| cut(table.get_mut(), "", &span)) {
            Some(culprit) => findings.fault(&culprit.path, reason(&error, &culprit.value)),
            None => {
                // Nothing to cut: without this arm the loop would not end.
                findings.fault("", error.message());
                return (None, findings);
            }
        }
    }
}

/// What was cut out: the path of what is at fault, and its value.
struct Culprit<'i> {
    path: String,
    value: DeValue<'i>,
}

/// Takes the entry out whose key or value stands at `span`. An array is taken out whole, so that the positions of
/// its other elements stay true.
fn cut<'i>(table: &mut DeTable<'i>, path: &str, span: &Range<usize>) -> Option<Culprit<'i>> {
    let mut found = None;
    for (key, value) in table.iter_mut() {
        let path = join(path, key.get_ref());
        if key.span() == *span || value.span() == *span {
            found = Some((key.clone(), path));
            break;
        }
        match value.get_mut() {
            DeValue::Table(inner) => {
                if let Some(culprit) = cut(inner, &path, span) {
                    return Some(culprit);
                }
            }
            DeValue::Array(elements) => {
                for (index, element) in elements.iter_mut().enumerate() {
                    let path = format!("{path}[{index}]");
                    if element.span() == *span {
                        found = Some((key.clone(), path));
                        break;
                    }
                    if let DeValue::Table(inner) = element.get_mut()
                        && let Some(culprit) = cut(inner, &path, span)
                    {
                        return Some(culprit);
                    }
                }
            }
            _ => {}
        }
        if found.is_some() {
            break;
        }
    }
    let (key, path) = found?;
    table.remove(&key).map(|value| Culprit { path, value: value.into_inner() })
}

/// serde's words, without the value.
fn reason(error: &Error, value: &DeValue<'_>) -> String {
    let mut reason = error.message().to_owned();
    let mut mask = |value: &DeValue<'_>| {
        if let Some(text) = value.as_str().filter(|text| !text.is_empty()) {
            reason = reason.replace(&format!("{text:?}"), "\"…\"").replace(&format!("`{text}`"), "`…`");
        }
    };
    mask(value);
    value.as_array().into_iter().flatten().for_each(|element| mask(element.get_ref()));
    reason
}

fn record_lines(text: &str, table: &DeTable<'_>, path: &str, lines: &mut HashMap<String, usize>) {
    let mut element = |value: &Spanned<DeValue<'_>>, path: &str, span: Range<usize>| {
        lines.insert(path.to_owned(), line(text, &span));
        if let DeValue::Table(inner) = value.get_ref() {
            record_lines(text, inner, path, lines);
        }
    };
    for (key, value) in table {
        let path = join(path, key.get_ref());
        element(value, &path, key.span());
        for (index, inner) in value.get_ref().as_array().into_iter().flatten().enumerate() {
            element(inner, &format!("{path}[{index}]"), inner.span());
        }
    }
}

fn join(path: &str, key: &str) -> String {
    if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") }
}

fn line(text: &str, span: &Range<usize>) -> usize {
    let before = text.as_bytes().get(..span.start).unwrap_or(text.as_bytes());
    1 + before.iter().filter(|&&byte| byte == b'\n').count()
}
