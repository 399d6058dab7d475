//! The texts of a configuration: files, and one text for each variable and flag.
//!
//! Owns: the positions of the texts in one common space, and reading files with their `include`. Must not
//! know: the meaning of any other key. Invariants: no position belongs to two texts, so that a position alone
//! tells the place of a key; no file is read twice.

use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use data_encoding::HEXLOWER;
use sha2::{Digest as _, Sha256};
use toml::de::{DeTable, DeValue};

use super::findings::ConfigFindings;
use super::setting_place::{KeyPlace, SettingSource};
use super::toml_parse::LineStarts;

/// More than this is no configuration: bytes of all files together.
const MAX_SIZE: usize = 1 << 20;
/// Maximum number of files.
const MAX_FILES: usize = 64;
/// The key with the names of further files.
pub(super) const INCLUDE: &str = "include";

/// A text with its source.
pub(super) struct SourceText {
    pub(super) source: Arc<SettingSource>,
    /// The text behind as many blanks as all texts before have bytes.
    pub(super) text: String,
    begin: usize,
    lines: LineStarts,
}

/// The texts of a configuration, in the order of their positions.
#[derive(Default)]
pub(super) struct SourceTexts(Vec<SourceText>);

impl SourceTexts {
    /// Reads the configuration file, then the files named by `include`, then the files named by these.
    /// Returns true if every file could be read.
    pub(super) fn add_files(&mut self, path: &Path, findings: &mut ConfigFindings) -> bool {
        match read(path) {
            Ok(text) => self.add(SettingSource::File, &text),
            Err(reason) => {
                findings.fault_at("", None, reason);
                return false;
            }
        }
        let mut paths = vec![path.to_owned()];
        let (mut next, first, mut is_readable) = (0, self.0.len() - 1, true);
        while let Some(including) = paths.get(next) {
            let folder = including.parent().unwrap_or(Path::new("")).to_owned();
            for (name, place) in self.included_names(first + next, findings) {
                let path = folder.join(name);
                if let Err(reason) = self.add_included(&path, &paths) {
                    findings.fault_at(INCLUDE, Some(place), reason);
                    is_readable = false;
                } else {
                    paths.push(path);
                }
            }
            next += 1;
        }
        is_readable
    }

    /// Appends a text.
    pub(super) fn add(&mut self, source: SettingSource, text: &str) {
        let begin = self.end();
        // Of a text at the beginning, TOML itself would skip the byte order mark.
        let text = " ".repeat(begin) + text.strip_prefix('\u{feff}').unwrap_or(text);
        let lines = LineStarts::of(&text);
        self.0.push(SourceText { source: Arc::new(source), text, begin, lines });
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &SourceText> {
        self.0.iter()
    }

    /// Identifies the texts: for a file alone the beginning of its SHA-256, in hexadecimal.
    pub(super) fn digest(&self) -> String {
        let mut digest = Sha256::new();
        for text in &self.0 {
            digest.update(&text.text[text.begin..]);
        }
        HEXLOWER.encode(&digest.finalize()[..8])
    }

    /// The included files.
    pub(super) fn included_files(&self) -> impl Iterator<Item = &Path> {
        self.0.iter().filter_map(|text| match &*text.source {
            SettingSource::IncludedFile(path) => Some(&**path),
            _ => None,
        })
    }

    /// The place of a position.
    pub(super) fn place(&self, at: usize) -> KeyPlace {
        let text = self.0.iter().rev().find(|text| text.begin <= at).or(self.0.first());
        match text {
            Some(text) => text.place(at),
            None => KeyPlace { source: Arc::new(SettingSource::File), line: None },
        }
    }

    fn end(&self) -> usize {
        self.0.last().map_or(0, |text| text.text.len())
    }

    fn add_included(&mut self, path: &Path, read_before: &[PathBuf]) -> Result<(), String> {
        let shown = path.display();
        let real = |path: &Path| std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        if read_before.iter().any(|other| real(other) == real(path)) {
            return Err(format!(
                "{shown} is read already; a file is included once, and never includes itself"
            ));
        }
        if read_before.len() >= MAX_FILES {
            return Err(format!("{shown} is one file more than {MAX_FILES}"));
        }
        let text = read(path)?;
        if self.end() + text.len() > MAX_SIZE {
            return Err("all files together are larger than 1 MiB".to_owned());
        }
        self.add(SettingSource::IncludedFile(path.to_owned()), &text);
        Ok(())
    }

    /// The names in the `include` of the text at `index`, with their places.
    fn included_names(&self, index: usize, findings: &mut ConfigFindings) -> Vec<(String, KeyPlace)> {
        let text = &self.0[index];
        let (table, _faults) = DeTable::parse_recoverable(&text.text);
        let Some(value) = table.get_ref().get(INCLUDE) else { return Vec::new() };
        let mut names = Vec::new();
        let strings = match value.get_ref() {
            DeValue::Array(elements) => elements.iter().all(|name| {
                let place = text.place(name.span().start);
                names.extend(name.get_ref().as_str().map(|name| (name.to_owned(), place)));
                name.get_ref().is_str()
            }),
            _ => false,
        };
        if !strings {
            let reason = "must be an array of file names, as in include = [\"listeners.toml\"]";
            findings.fault_at(INCLUDE, Some(text.place(value.span().start)), reason);
        }
        names
    }
}

impl SourceText {
    /// The place of a position in this text.
    fn place(&self, at: usize) -> KeyPlace {
        let is_file = matches!(*self.source, SettingSource::File | SettingSource::IncludedFile(_));
        KeyPlace { source: Arc::clone(&self.source), line: is_file.then(|| self.lines.line(at)) }
    }
}

/// Reads a configuration file.
pub(super) fn read(path: &Path) -> Result<String, String> {
    let mut text = String::new();
    let limit = MAX_SIZE as u64 + 1;
    match File::open(path).and_then(|file| file.take(limit).read_to_string(&mut text)) {
        Ok(_) if text.len() > MAX_SIZE => Err(format!("{} is larger than 1 MiB", path.display())),
        Ok(_) => Ok(text),
        Err(error) => Err(format!("cannot read {}: {error}", path.display())),
    }
}
