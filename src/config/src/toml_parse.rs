//! Parses the text into the mirror, reporting every fault of shape: syntax, unknown keys, values of the wrong
//! type.
//!
//! Owns: TOML. Must not know: the meaning of a key. Invariants: all faults are reported, except after invalid
//! TOML; a fault never repeats a value, possibly a misplaced secret.
//!
//! serde stops at the first fault. Therefore the faulty entry is reported and removed, and the remainder is
//! parsed again, until no fault is left.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use serde::de::DeserializeOwned;
use toml::Spanned;
use toml::de::{DeTable, DeValue, Deserializer, Error};

use super::findings::ConfigFindings;
use super::known_keys::unknown_key;
use super::setting_place::{KeyPlace, SettingSource};

/// Returns the mirror `T` of all valid entries of a text, and the faults of the invalid entries. `None` for
/// invalid TOML.
pub(super) fn read<T: DeserializeOwned>(text: &str) -> (Option<T>, ConfigFindings) {
    let (table, broken) = DeTable::parse_recoverable(text);
    let (starts, source) = (LineStarts::of(text), Arc::new(SettingSource::File));
    let place = |at: usize| KeyPlace { source: Arc::clone(&source), line: Some(starts.line(at)) };
    let mut findings = ConfigFindings::default();
    for error in &broken {
        findings.fault_at("", error.span().map(|span| place(span.start)), error.message());
    }
    match broken.is_empty() {
        true => read_table(table.into_inner(), &place, findings),
        false => (None, findings),
    }
}

/// Returns the mirror `T` of all valid entries of a table, and the faults of the invalid entries. `place`
/// returns the place of a position.
pub(super) fn read_table<T: DeserializeOwned>(
    mut table: DeTable<'_>,
    place: &dyn Fn(usize) -> KeyPlace,
    mut findings: ConfigFindings,
) -> (Option<T>, ConfigFindings) {
    let mut places = HashMap::new();
    record_places(place, &table, "", &mut places);
    findings.set_places(places);
    loop {
        let error = match T::deserialize(Deserializer::from(Spanned::new(0..0, table.clone()))) {
            Ok(file) => return (Some(file), findings),
            Err(error) => error,
        };
        match error.span().and_then(|span| cut(&mut table, "", &span)) {
            Some(culprit) => {
                let unknown = unknown_key::<T>(&culprit.path);
                findings.fault(&culprit.path, unknown.unwrap_or_else(|| reason(&error, &culprit.value)));
            }
            None => {
                // No entry to remove: continuing would loop forever.
                findings.fault("", error.message());
                return (None, findings);
            }
        }
    }
}

/// A removed entry: the path of the fault, and its value.
struct FaultyEntry<'i> {
    path: String,
    value: DeValue<'i>,
}

/// Removes the entry with its key or value at `span`. An array is removed as a whole, since removing an
/// element would shift the indexes of later elements.
fn cut<'i>(table: &mut DeTable<'i>, path: &str, span: &Range<usize>) -> Option<FaultyEntry<'i>> {
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
    table.remove(&key).map(|value| FaultyEntry { path, value: value.into_inner() })
}

/// serde's message without the value.
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

fn record_places(
    place: &dyn Fn(usize) -> KeyPlace,
    table: &DeTable<'_>,
    path: &str,
    places: &mut HashMap<String, KeyPlace>,
) {
    let mut element = |value: &Spanned<DeValue<'_>>, path: &str, span: Range<usize>| {
        places.insert(path.to_owned(), place(span.start));
        if let DeValue::Table(inner) = value.get_ref() {
            record_places(place, inner, path, places);
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

pub(super) fn join(path: &str, key: &str) -> String {
    if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") }
}

/// The offsets of the line breaks of a text. A policy may have a hundred thousand entries, so no entry's line
/// is counted from the beginning.
pub(super) struct LineStarts(Vec<usize>);

impl LineStarts {
    pub(super) fn of(text: &str) -> Self {
        Self(text.match_indices('\n').map(|(at, _)| at).collect())
    }

    /// The line of a position, from 1.
    pub(super) fn line(&self, at: usize) -> usize {
        1 + self.0.partition_point(|line_break| *line_break < at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::findings::ConfigFault;
    use crate::toml_file::TomlFile;

    fn faults(text: &str) -> Vec<ConfigFault> {
        let (_, findings) = read::<TomlFile>(text);
        findings.conclude(None::<()>).unwrap_err().iter().cloned().collect()
    }

    fn places(text: &str) -> Vec<(String, Option<usize>)> {
        let line = |fault: &ConfigFault| fault.place.as_ref().and_then(|place| place.line);
        faults(text).into_iter().map(|fault| (fault.path.clone(), line(&fault))).collect()
    }

    fn at(path: &str, line: usize) -> (String, Option<usize>) {
        (path.to_owned(), Some(line))
    }

    #[test]
    fn every_unknown_key_and_wrong_type_is_told_where_it_stands() {
        let text = "\
            nonsense = 1\n\
            [[listener]]\n\
            name = 'a'\n\
            [[listener]]\n\
            name = 7\n\
            adress = '127.0.0.1:1'\n\
            tls = { cert = 'x', client_auth = 'perhaps', ke = 'y' }\n\
            [cluster]\n\
            endpoints = ['http://a:1',\n\
            5]\n\
            probe.usr = 'x'\n\
            [limits]\n\
            connections = -1\n\
            [log]\n\
            access = 'yes'\n\
            [nowhere.at.all]\n";
        let expected = [
            at("nonsense", 1),
            at("listener[1].name", 5),
            at("listener[1].adress", 6),
            at("listener[1].tls.client_auth", 7),
            at("listener[1].tls.ke", 7),
            at("cluster.endpoints[1]", 10),
            at("cluster.probe.usr", 11),
            at("limits.connections", 13),
            at("log.access", 15),
            at("nowhere", 16),
        ];
        assert_eq!(places(text), expected);
    }

    #[test]
    fn what_is_not_at_fault_is_still_read() {
        let (file, _) =
            read::<TomlFile>("[cluster]\nendpoints = 5\ntoken_ttl = '7s'\n[[listener]]\nname = 'a'\nx = 1\n");
        let file = file.unwrap();
        assert_eq!(file.cluster.token_ttl.as_deref(), Some("7s"));
        assert_eq!(file.listener[0].name.as_deref(), Some("a"));
    }

    #[test]
    fn a_table_where_a_value_belongs_and_the_reverse() {
        assert_eq!(places("cluster = 5\n"), [at("cluster", 1)]);
        assert_eq!(places("[listener]\nname = 'a'\n"), [at("listener", 1)]);
        assert_eq!(places("listener = [5]\n"), [at("listener[0]", 1)]);
        assert_eq!(places("[[log]]\nlevel = 'info'\n"), [at("log", 1)]);
        assert_eq!(places("[cluster.endpoints]\nx = 1\n"), [at("cluster.endpoints", 1)]);
        assert_eq!(places("[[listener]]\ntls = true\n"), [at("listener[0].tls", 2)]);
        assert_eq!(places("[[listener]]\ntls = ['a.crt', 'a.key']\n"), [at("listener[0].tls", 2)]);
        assert_eq!(places("listener = [['a', '127.0.0.1:1']]\n"), [at("listener[0]", 1)]);
    }

    #[test]
    fn dotted_keys_and_inline_tables_have_their_places_too() {
        let text = "cluster.probe.usr = 'x'\ncluster.probe.user = 1\ncluster.tls.ca = 2\n\
                    listener = [{ name = 'a' }, { tls.cert = 3, tls.nothing.at = 4 }]\n";
        let expected = [
            at("cluster.probe.usr", 1),
            at("cluster.probe.user", 2),
            at("cluster.tls.ca", 3),
            at("listener[1].tls.cert", 4),
            at("listener[1].tls.nothing", 4),
        ];
        assert_eq!(places(text), expected);
    }

    #[test]
    fn every_syntax_error_has_its_line() {
        assert_eq!(places("a = \n[cluster]\nb = 1 2\n"), [at("", 1), at("", 3)]);
        assert_eq!(places("[log]\nlevel = 'a'\nlevel = 'b'\n"), [at("", 3)]);
    }

    #[test]
    fn a_secret_in_the_wrong_place_is_not_repeated() {
        let text = "listener = ['hunter2']\n[session]\nkey_files = 'hunter2'\n[[user]]\nname = 'a'\n\
                    password = 'hunter2'\n[limits]\nconnections = 'hunter2\"quoted'\n[log]\n\
                    format = 'hunter2'\naccess = ['hunter2']\n";
        let faults = faults(text);
        assert_eq!(faults.len(), 6, "{faults:?}");
        for fault in faults {
            assert!(!fault.to_string().contains("hunter2"), "{fault}");
        }
    }

    proptest::proptest! {
        #[test]
        fn any_text_is_read_to_an_end(
            text in "([a-z]{1,8}|listener|cluster|log|level|tls|endpoints|[\\[\\]{}=.,'\"\n 0-9]){0,40}",
        ) {
            let (file, findings) = read::<TomlFile>(&text);
            proptest::prop_assert!(
                file.is_some() || findings.conclude(None::<()>).unwrap_err().iter().count() > 0
            );
        }
    }
}
