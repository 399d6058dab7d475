//! The keys of the configuration, or of a policy, found by asking the mirror of the TOML; and the known key
//! with the name most similar to an unknown one.
//!
//! Owns: the list of keys, without indices of tables. Must not know: types, defaults or meanings of keys.
//! Invariant: the list cannot miss a key of the mirror: serde itself names the fields of each table, in the
//! error for an unknown field.

use std::fmt;

use serde::de::value::{MapDeserializer, SeqDeserializer};
use serde::de::{self, DeserializeOwned, IntoDeserializer, Visitor};
use serde::{Deserializer, forward_to_deserialize_any};

/// One step of the way from the root to a key.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum KeyStep {
    /// A key of a table.
    Key(String),
    /// A row of an array of tables, from 0.
    Row(usize),
}

/// Every key of the mirror `T` that takes a value, as its steps, with row 0 of arrays of tables.
pub(super) fn known_keys<T: DeserializeOwned>() -> Vec<Vec<KeyStep>> {
    let (mut keys, mut tables) = (Vec::new(), vec![Vec::new()]);
    while let Some(table) = tables.pop() {
        for field in fields::<T>(&table).into_iter().flatten() {
            let with = |more: &[KeyStep]| [&table[..], &[KeyStep::Key((*field).to_owned())], more].concat();
            let (key, row) = (with(&[]), with(&[KeyStep::Row(0)]));
            if fields::<T>(&key).is_some() {
                tables.push(key);
            } else if fields::<T>(&row).is_some() {
                tables.push(row);
            } else {
                keys.push(key);
            }
        }
    }
    keys
}

/// The steps of a path such as `listener[0].tls.cert`.
pub(super) fn steps_of_path(path: &str) -> Vec<KeyStep> {
    let row = |part: &str| part.strip_suffix(']').and_then(|index| index.parse().ok());
    let step = |part: &str| row(part).map_or_else(|| KeyStep::Key(part.to_owned()), KeyStep::Row);
    path.split(['.', '[']).map(step).collect()
}

/// The path of the steps.
pub(super) fn path_of(steps: &[KeyStep]) -> String {
    let add = |path: String, step: &KeyStep| match step {
        KeyStep::Row(row) => format!("{path}[{row}]"),
        KeyStep::Key(key) if path.is_empty() => key.clone(),
        KeyStep::Key(key) => format!("{path}.{key}"),
    };
    steps.iter().fold(String::new(), add)
}

/// The steps with row 0 in place of each row.
pub(super) fn with_first_rows(steps: &[KeyStep]) -> Vec<KeyStep> {
    in_row(steps, Some(0))
}

fn in_row(steps: &[KeyStep], row: Option<usize>) -> Vec<KeyStep> {
    let step = |step: &KeyStep| match (step, row) {
        (KeyStep::Row(_), Some(row)) => KeyStep::Row(row),
        _ => step.clone(),
    };
    steps.iter().map(step).collect()
}

/// The known key with the name most similar to `steps`, in the same row of an array of tables, and the number
/// of letters that differ. The ends of steps count little: one underscore in place of two, or a dot too few,
/// is the most likely fault of a name.
pub(super) fn nearest<'k>(
    steps: &[KeyStep],
    known: impl IntoIterator<Item = &'k Vec<KeyStep>>,
) -> Option<(Vec<KeyStep>, usize)> {
    let row = steps.iter().find_map(|step| match step {
        KeyStep::Row(row) => Some(*row),
        KeyStep::Key(_) => None,
    });
    let plain = |steps: &[KeyStep]| {
        let text = |step: &KeyStep| match step {
            KeyStep::Key(key) => key.to_ascii_lowercase(),
            KeyStep::Row(row) => row.to_string(),
        };
        steps.iter().map(text).collect::<Vec<_>>().join("_")
    };
    let wanted = plain(steps);
    let candidates = known.into_iter().map(|key| in_row(key, row));
    let with_distance = candidates.map(|key| {
        let distance = strsim::damerau_levenshtein(&plain(&key), &wanted);
        (key, distance)
    });
    with_distance.min_by_key(|(_, distance)| *distance)
}

/// Why `T` takes no key at this path: the nearest key, or the keys of its table. `None` if `T` takes the key.
pub(super) fn unknown_key<T: DeserializeOwned>(path: &str) -> Option<String> {
    let steps = steps_of_path(path);
    let (KeyStep::Key(name), table) = steps.split_last()? else { return None };
    let fields = fields::<T>(&with_first_rows(table))?;
    if fields.contains(&name.as_str()) {
        return None;
    }
    let keys = known_keys::<T>();
    // A table may be misspelt, too. A key of this table stands before an equally similar one of another.
    let of_table = fields.iter().map(|field| [table, &[KeyStep::Key((*field).to_owned())]].concat());
    let tables = keys.iter().flat_map(|key| (1..=key.len()).map(|length| key[..length].to_vec()));
    let tables = tables.filter(|steps| matches!(steps.last(), Some(KeyStep::Key(_))));
    let known: Vec<Vec<KeyStep>> = of_table.chain(tables).collect();
    let is_likely = |(key, distance): &(Vec<KeyStep>, usize)| {
        let is_longer = matches!(key.last(), Some(KeyStep::Key(key)) if key.starts_with(name.as_str()));
        *distance <= (name.len() / 2).max(1) || (is_longer && key.len() == steps.len())
    };
    Some(match nearest(&steps, &known).filter(is_likely) {
        Some((key, _)) => no_key(Some(&path_of(&key))),
        None => format!("{}; this table has {}", no_key(None), fields.join(", ")),
    })
}

/// The fault of a name that names no key: the same for variables and for files.
pub(super) fn no_key(nearest: Option<&str>) -> String {
    let nearest = nearest.map(|nearest| format!("; the nearest is {nearest}"));
    format!("names no key{}", nearest.unwrap_or_default())
}

/// The fields of the table at `steps`; `None` if there is no table.
fn fields<T: DeserializeOwned>(steps: &[KeyStep]) -> Option<&'static [&'static str]> {
    match T::deserialize(UnknownField { steps }) {
        Err(TableProbe::Fields(fields)) => Some(fields),
        Err(TableProbe::NoTable) | Ok(_) => None,
    }
}

/// A file with an unknown field in the table at `steps`, and nothing else.
struct UnknownField<'s> {
    steps: &'s [KeyStep],
}

/// The answer of the mirror.
#[derive(Debug)]
enum TableProbe {
    Fields(&'static [&'static str]),
    NoTable,
}

impl<'de> Deserializer<'de> for UnknownField<'_> {
    type Error = TableProbe;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, TableProbe> {
        let (key, steps) = match self.steps {
            // No field has an empty name.
            [] => ("", self.steps),
            [KeyStep::Key(key), steps @ ..] => (&**key, steps),
            [KeyStep::Row(_), steps @ ..] => {
                return visitor.visit_seq(SeqDeserializer::new(std::iter::once(Self { steps })));
            }
        };
        visitor.visit_map(MapDeserializer::new(std::iter::once((key, Self { steps }))))
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, TableProbe> {
        visitor.visit_some(self)
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct
        newtype_struct seq tuple tuple_struct map struct enum identifier ignored_any
    }
}

impl<'de> IntoDeserializer<'de, TableProbe> for UnknownField<'_> {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

impl fmt::Display for TableProbe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a probe for the fields of a table")
    }
}

impl std::error::Error for TableProbe {}

impl de::Error for TableProbe {
    fn custom<T: fmt::Display>(_: T) -> Self {
        Self::NoTable
    }

    fn unknown_field(_: &str, expected: &'static [&'static str]) -> Self {
        Self::Fields(expected)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::toml_file::TomlFile;
    use crate::toml_policy::TomlPolicyFile;

    #[test]
    fn an_unknown_key_is_told_with_the_nearest_key_or_with_those_of_its_table() {
        let of_config = unknown_key::<TomlFile>;
        for (path, nearest) in [
            ("cluster.tokn_ttl", "cluster.token_ttl"),
            ("cluster.endpoint", "cluster.endpoints"),
            ("clustr", "cluster"),
            ("listeners", "listener"),
            ("listener[3].adress", "listener[3].address"),
            ("listener[1].tls.crt", "listener[1].tls.cert"),
            ("cluster.probe.password", "cluster.probe.password_file"),
            ("cluster.probe_user", "cluster.probe.user"),
            ("log_level", "log.level"),
        ] {
            let told = of_config(path).unwrap_or_default();
            assert_eq!(told, format!("names no key; the nearest is {nearest}"), "{path}");
        }
        assert_eq!(of_config("cluster.token_ttl"), None);
        assert_eq!(of_config("cluster"), None);
        assert_eq!(of_config("listener[0]"), None);
        let told = of_config("log.colour_of_the_sky").expect("no such key");
        assert!(told.starts_with("names no key; this table has format, "), "{told}");
        assert_eq!(
            unknown_key::<TomlPolicyFile>("role[2].alow").as_deref(),
            Some("names no key; the nearest is role[2].allow")
        );
    }

    #[test]
    fn a_path_is_its_steps() {
        for path in ["cluster", "listener[1].tls.cert", "role[0].allow[2].range.from"] {
            assert_eq!(path_of(&steps_of_path(path)), path);
        }
    }
}
