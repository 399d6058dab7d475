//! The files of a chain in their folder, by the numbers of their first lines.
//!
//! Owns: which files of the folder belong to the chain: the audit file, those that Keyward renamed, and those
//! that a tool such as logrotate renamed. Must not know: the contents of a line beside its number.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use super::chain::number_of;
use super::rotation;

/// Bytes that have the number of a line.
const LINE_BEGIN: usize = 64;

/// The folder of an audit file.
#[derive(Clone, Debug)]
pub(super) struct AuditFolder {
    path: PathBuf,
}

/// The identity of a file, whatever its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FileId {
    device: u64,
    inode: u64,
}

impl FileId {
    pub(super) fn of(metadata: &fs::Metadata) -> Self {
        Self { device: metadata.dev(), inode: metadata.ino() }
    }
}

impl AuditFolder {
    /// The folder of the audit file at `path`.
    pub(super) fn of(path: &Path) -> Self {
        Self { path: path.to_owned() }
    }

    pub(super) fn folder(&self) -> &Path {
        self.path.parent().filter(|path| !path.as_os_str().is_empty()).unwrap_or(Path::new("."))
    }

    /// The name of the audit file.
    pub(super) fn name(&self) -> &OsStr {
        self.path.file_name().unwrap_or_default()
    }

    fn names(&self) -> io::Result<impl Iterator<Item = OsString>> {
        Ok(fs::read_dir(self.folder())?.filter_map(Result::ok).map(|entry| entry.file_name()))
    }

    /// The names of the files that Keyward renamed, oldest first.
    pub(super) fn old_files(&self) -> io::Result<Vec<OsString>> {
        Ok(rotation::old_files(self.name(), self.names()?))
    }

    /// All files of the chain that have a line, with the number of their first line, in the order of these.
    pub(super) fn chain_files(&self) -> io::Result<Vec<(u64, PathBuf)>> {
        let is_ours = |name: &OsString| rotation::may_be_renamed(self.name(), name) || name == self.name();
        let paths = self.names()?.filter(is_ours).map(|name| self.folder().join(name));
        let mut files: Vec<_> = paths.filter_map(|path| Some((first_number(&path)?, path))).collect();
        files.sort();
        Ok(files)
    }
}

/// The number of a file's first line, if the file begins with one.
fn first_number(path: &Path) -> Option<u64> {
    let file = File::open(path).ok().filter(|file| file.metadata().is_ok_and(|of| of.is_file()))?;
    let mut begin = [0; LINE_BEGIN];
    let length = file.read_at(&mut begin, 0).ok()?;
    number_of(&begin[..length])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_the_chain_are_found_under_the_names_of_logrotate_too() {
        let folder = tempfile::tempdir().unwrap();
        let line = |number| format!("{{\"v\":1,\"seq\":{number},\"replica\":\"a\"");
        let files = [
            ("audit.log", 40),
            ("audit.log.00000000000000000009", 9),
            ("audit.log.1", 30),
            ("audit.log-20261128", 20),
            ("audit.log.torn", 1),
            ("audit.log.old", 1),
            ("audit.log2", 1),
            (".audit.log.end", 1),
        ];
        files.iter().for_each(|(name, first)| fs::write(folder.path().join(name), line(*first)).unwrap());
        fs::write(folder.path().join("audit.log.2"), "\u{1f}packed").unwrap();
        let found = AuditFolder::of(&folder.path().join("audit.log")).chain_files().unwrap();
        let numbers: Vec<_> = found.iter().map(|(first, _)| *first).collect();
        assert_eq!(numbers, [9, 20, 30, 40], "{found:?}");
    }
}
