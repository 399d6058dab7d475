//! What is wrong with a configuration, and what is only unwise.
//!
//! Owns: faults and warnings, each with its key path and line. Must not know: what any key means.
//! Invariant: a fault or warning is made of names and reasons; no caller puts a secret into one.

use std::collections::HashMap;
use std::fmt;

/// Why a configuration cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The key, as in `listener[1].tls.cert`; empty for the file as a whole.
    pub path: String,
    /// The line of the key, or of the table that lacks it.
    pub line: Option<usize>,
    /// What is wrong, and where it is not plain, what to do.
    pub reason: String,
}

/// What an operator should know about a configuration that can be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Warning {
    /// The key, as in `session.key_files`.
    pub path: String,
    /// What it costs, and what to do.
    pub reason: String,
}

/// All faults of a configuration, in the order of its lines; never empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Faults(Vec<Fault>);

/// Collects faults and warnings while a file is read.
#[derive(Debug, Default)]
pub(super) struct Findings {
    faults: Vec<Fault>,
    warnings: Vec<Warning>,
    lines: HashMap<String, usize>,
}

impl Faults {
    /// One by one.
    pub fn iter(&self) -> impl Iterator<Item = &Fault> {
        self.0.iter()
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.path.is_empty() {
            write!(f, "{}: ", self.path)?;
        }
        f.write_str(&self.reason)?;
        match self.line {
            Some(line) => write!(f, " (line {line})"),
            None => Ok(()),
        }
    }
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path, self.reason)
    }
}

/// One fault a line.
impl fmt::Display for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, fault) in self.0.iter().enumerate() {
            write!(f, "{}{fault}", if index == 0 { "" } else { "\n" })?;
        }
        Ok(())
    }
}

impl std::error::Error for Faults {}

impl Findings {
    /// `lines` tells on which line each key path stands.
    pub(super) fn new(lines: HashMap<String, usize>) -> Self {
        Self { lines, ..Self::default() }
    }

    pub(super) fn fault(&mut self, path: &str, reason: impl fmt::Display) {
        let line = self.line(path);
        self.faults.push(Fault { path: path.to_owned(), line, reason: reason.to_string() });
    }

    /// A fault of the text as such, which has no key.
    pub(super) fn fault_at_line(&mut self, line: Option<usize>, reason: impl fmt::Display) {
        self.faults.push(Fault { path: String::new(), line, reason: reason.to_string() });
    }

    /// A fault that may be the shadow of another: a key counts as missing only where nothing was wrong with it, with
    /// the table that it stands in, or with what stands in it.
    pub(super) fn missing(&mut self, path: &str, reason: impl fmt::Display) {
        if !self.faults.iter().any(|fault| within(path, &fault.path) || within(&fault.path, path)) {
            self.fault(path, reason);
        }
    }

    pub(super) fn warn(&mut self, path: &str, reason: impl fmt::Display) {
        self.warnings.push(Warning { path: path.to_owned(), reason: reason.to_string() });
    }

    /// `value`, and the warnings, where there is no fault.
    pub(super) fn conclude<T>(mut self, value: Option<T>) -> Result<(T, Vec<Warning>), Faults> {
        match value {
            Some(value) if self.faults.is_empty() => Ok((value, self.warnings)),
            _ => {
                self.faults.sort_by_key(|fault| fault.line.unwrap_or(usize::MAX));
                Err(Faults(self.faults))
            }
        }
    }

    /// The line of the key, else of the nearest table around it.
    fn line(&self, path: &str) -> Option<usize> {
        let mut path = path;
        loop {
            if let Some(line) = self.lines.get(path) {
                return Some(*line);
            }
            path = &path[..path.rfind(['.', '['])?];
        }
    }
}

/// Whether `path` is `outer` or stands in it.
fn within(path: &str, outer: &str) -> bool {
    path.strip_prefix(outer).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
}
