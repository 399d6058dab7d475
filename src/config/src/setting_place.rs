//! The place of a setting: a line of a file, an environment variable, or a flag.
//!
//! Owns: the words for places. Must not know: the meaning of any key. Invariant: a place names a file, a
//! variable or a flag, never a value.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

/// The source of a setting. The order is the order of faults in a report.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SettingSource {
    /// The configuration file.
    File,
    /// A file named by `include`.
    IncludedFile(PathBuf),
    /// An environment variable.
    Variable(String),
    /// A flag of the command line.
    Flag(&'static str),
}

/// The place of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyPlace {
    /// The source.
    pub source: Arc<SettingSource>,
    /// The line in a file, from 1; `None` for a variable or flag, and for a file that cannot be read.
    pub line: Option<usize>,
}

/// Formats the place as in `line 3`, `line 3 of tls.toml`, `environment variable KEYWARD_LOG__LEVEL`.
impl fmt::Display for KeyPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&*self.source, self.line) {
            (SettingSource::File, Some(line)) => write!(f, "line {line}"),
            (SettingSource::File, None) => f.write_str("the configuration file"),
            (SettingSource::IncludedFile(path), Some(line)) => write!(f, "line {line} of {}", path.display()),
            (SettingSource::IncludedFile(path), None) => write!(f, "{}", path.display()),
            (SettingSource::Variable(name), _) => write!(f, "environment variable {name}"),
            (SettingSource::Flag(flag), _) => write!(f, "flag {flag}"),
        }
    }
}
