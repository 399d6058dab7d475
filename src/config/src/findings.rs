//! Faults and warnings of a configuration.
//!
//! Owns: faults and warnings, each with the key path and the place of the key. Must not know: the meaning of
//! any key.
//! Invariant: a fault or warning consists of names and reasons, and never contains a secret.

use std::collections::HashMap;
use std::fmt;

use super::setting_place::{KeyPlace, SettingSource};

/// A reason for rejecting a configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigFault {
    /// The key, as in `listener[1].tls.cert`; empty for the file as a whole.
    pub path: String,
    /// The place of the key, or of the table lacking the key.
    pub place: Option<KeyPlace>,
    /// The fault and, unless obvious, the remedy.
    pub reason: String,
}

/// Advice about a valid configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigWarning {
    /// The key, as in `session.key_files`.
    pub path: String,
    /// The consequence and the remedy.
    pub reason: String,
}

/// All faults of a configuration, in the order of sources and lines; never empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigFaults(Vec<ConfigFault>);

/// Collects faults and warnings while a file is read.
#[derive(Debug, Default)]
pub(super) struct ConfigFindings {
    faults: Vec<ConfigFault>,
    warnings: Vec<ConfigWarning>,
    places: HashMap<String, KeyPlace>,
}

impl ConfigFaults {
    /// A fault of the sources as a whole.
    #[must_use]
    pub fn of_sources(reason: String) -> Self {
        Self(vec![ConfigFault { path: String::new(), place: None, reason }])
    }

    /// Iterates over the faults.
    pub fn iter(&self) -> impl Iterator<Item = &ConfigFault> {
        self.0.iter()
    }
}

impl ConfigFault {
    /// A fault without a place, such as a missing table, follows the faults of the configuration file.
    fn order(&self) -> (&SettingSource, usize) {
        match &self.place {
            Some(place) => (&place.source, place.line.unwrap_or(usize::MAX)),
            None => (&SettingSource::File, usize::MAX),
        }
    }
}

impl fmt::Display for ConfigFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.path.is_empty() {
            write!(f, "{}: ", self.path)?;
        }
        f.write_str(&self.reason)?;
        match &self.place {
            Some(place) => write!(f, " ({place})"),
            None => Ok(()),
        }
    }
}

impl fmt::Display for ConfigWarning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path, self.reason)
    }
}

/// Formats one fault per line.
impl fmt::Display for ConfigFaults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, fault) in self.0.iter().enumerate() {
            write!(f, "{}{fault}", if index == 0 { "" } else { "\n" })?;
        }
        Ok(())
    }
}

impl std::error::Error for ConfigFaults {}

impl ConfigFindings {
    /// Sets the places of the keys, for later faults.
    pub(super) fn set_places(&mut self, places: HashMap<String, KeyPlace>) {
        self.places = places;
    }

    pub(super) fn fault(&mut self, path: &str, reason: impl fmt::Display) {
        let place = self.place(path).cloned();
        self.fault_at(path, place, reason);
    }

    /// Adds a fault at a place outside the places of the keys; `path` is empty without a key.
    pub(super) fn fault_at(&mut self, path: &str, place: Option<KeyPlace>, reason: impl fmt::Display) {
        self.faults.push(ConfigFault { path: path.to_owned(), place, reason: reason.to_string() });
    }

    /// Adds a fault for a missing key, unless an earlier fault concerns the key, its table or its content: a
    /// rejected value also looks like a missing key.
    pub(super) fn missing(&mut self, path: &str, reason: impl fmt::Display) {
        if !self.faults.iter().any(|fault| within(path, &fault.path) || within(&fault.path, path)) {
            self.fault(path, reason);
        }
    }

    pub(super) fn warn(&mut self, path: &str, reason: impl fmt::Display) {
        self.warnings.push(ConfigWarning { path: path.to_owned(), reason: reason.to_string() });
    }

    /// Returns `value` and the warnings in the absence of faults.
    pub(super) fn conclude<T>(mut self, value: Option<T>) -> Result<(T, Vec<ConfigWarning>), ConfigFaults> {
        match value {
            Some(value) if self.faults.is_empty() => Ok((value, self.warnings)),
            _ => {
                self.faults.sort_by(|one, other| ConfigFault::order(one).cmp(&ConfigFault::order(other)));
                Err(ConfigFaults(self.faults))
            }
        }
    }

    /// The source of the key, or of the nearest enclosing table.
    pub(super) fn source(&self, path: &str) -> Option<&SettingSource> {
        self.place(path).map(|place| &*place.source)
    }

    /// The place of the key, or of the nearest enclosing table.
    fn place(&self, path: &str) -> Option<&KeyPlace> {
        let mut path = path;
        loop {
            if let Some(place) = self.places.get(path) {
                return Some(place);
            }
            path = &path[..path.rfind(['.', '['])?];
        }
    }
}

/// True if `path` equals `outer` or lies within it.
fn within(path: &str, outer: &str) -> bool {
    path.strip_prefix(outer).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
}
