//! The keys of the configuration, found by asking the mirror of the TOML.
//!
//! Owns: the list of keys, without indices of tables. Must not know: types, defaults or meanings of keys.
//! Invariant: the list cannot miss a key of the mirror: serde itself names the fields of each table, in the
//! error for an unknown field.

use std::fmt;

use serde::de::value::{MapDeserializer, SeqDeserializer};
use serde::de::{self, IntoDeserializer, Visitor};
use serde::{Deserialize, Deserializer, forward_to_deserialize_any};

use super::toml_file::TomlFile;

/// One step of the way from the root to a key.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum KeyStep {
    /// A key of a table.
    Key(String),
    /// A row of an array of tables, from 0.
    Row(usize),
}

/// Every key that takes a value, as its steps, with row 0 of arrays of tables.
pub(super) fn known_keys() -> Vec<Vec<KeyStep>> {
    let (mut keys, mut tables) = (Vec::new(), vec![Vec::new()]);
    while let Some(table) = tables.pop() {
        for field in fields(&table).into_iter().flatten() {
            let with = |more: &[KeyStep]| [&table[..], &[KeyStep::Key((*field).to_owned())], more].concat();
            let (key, row) = (with(&[]), with(&[KeyStep::Row(0)]));
            if fields(&key).is_some() {
                tables.push(key);
            } else if fields(&row).is_some() {
                tables.push(row);
            } else {
                keys.push(key);
            }
        }
    }
    keys
}

/// The fields of the table at `steps`; `None` if there is no table.
fn fields(steps: &[KeyStep]) -> Option<&'static [&'static str]> {
    match TomlFile::deserialize(UnknownField { steps }) {
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
