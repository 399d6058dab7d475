//! Detection of changed files.
//!
//! Owns: the attributes compared, and the moment a change counts. Must not know: the content of the files.
//! Invariants: symbolic links are followed, so that a swapped target folder is a change (Kubernetes swaps
//! secrets in the same way); a change counts after two equal checks, and only once.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;

/// The attributes of a set of files at a moment; `None` for an absent file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FileSetFingerprint(BTreeMap<PathBuf, Option<FileAttributes>>);

/// The attributes of a file: identity, size, and the times of the last write and of the last status change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FileAttributes {
    device: u64,
    inode: u64,
    size: u64,
    written: (i64, i64),
    changed: (i64, i64),
}

/// The attributes of the loaded files, and of the last check.
pub(super) struct WatchedFiles {
    loaded: FileSetFingerprint,
    last: FileSetFingerprint,
}

impl FileSetFingerprint {
    /// Reads the attributes. Blocks.
    pub(super) fn of(names: Vec<PathBuf>) -> Self {
        let look = |name: PathBuf| {
            let seen = std::fs::metadata(&name).ok().map(|found| FileAttributes {
                device: found.dev(),
                inode: found.ino(),
                size: found.size(),
                written: (found.mtime(), found.mtime_nsec()),
                changed: (found.ctime(), found.ctime_nsec()),
            });
            (name, seen)
        };
        Self(names.into_iter().map(look).collect())
    }
}

impl WatchedFiles {
    pub(super) fn new(loaded: FileSetFingerprint) -> Self {
        Self { last: loaded.clone(), loaded }
    }

    /// True if the files differ from the loaded files and are the same as at the last check.
    pub(super) fn is_due(&mut self, now: &FileSetFingerprint) -> bool {
        let due = *now != self.loaded && *now == self.last;
        self.last = now.clone();
        due
    }

    /// Records the attributes of the files about to be loaded, whatever the outcome.
    pub(super) fn loaded(&mut self, print: FileSetFingerprint) {
        self.last = print.clone();
        self.loaded = print;
    }

    /// Takes a new set of files. Files already known keep their loaded attributes; new files count as loaded.
    pub(super) fn take_new_files(&mut self, mut now: FileSetFingerprint) {
        for (name, look) in &mut now.0 {
            if let Some(before) = self.loaded.0.get(name) {
                *look = *before;
            }
        }
        self.loaded(now);
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    fn print(folder: &tempfile::TempDir) -> FileSetFingerprint {
        FileSetFingerprint::of(vec![folder.path().join("cert"), folder.path().join("key")])
    }

    /// Checks three times; returns true if a change was due, and records the change as loaded.
    fn settles(watched: &mut WatchedFiles, folder: &tempfile::TempDir) -> bool {
        let due: Vec<bool> = (0..3).map(|_| watched.is_due(&print(folder))).collect();
        if due.contains(&true) {
            watched.loaded(print(folder));
        }
        assert!(!due[0], "it must look the same twice");
        due.contains(&true)
    }

    #[test]
    fn every_kind_of_change_is_seen_once() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::write(at("cert"), "one").unwrap();
        let mut watched = WatchedFiles::new(print(&folder));
        assert!(!settles(&mut watched, &folder), "nothing has happened");
        let changes: [&dyn Fn(); 5] = [
            &|| fs::write(at("cert"), "longer").unwrap(),
            &|| fs::write(at("key"), "comes").unwrap(),
            &|| {
                fs::write(at("new"), "longer").unwrap();
                fs::rename(at("new"), at("cert")).unwrap();
            },
            &|| fs::remove_file(at("key")).unwrap(),
            &|| {
                fs::remove_file(at("cert")).unwrap();
                for version in ["v1", "v2"] {
                    fs::create_dir(at(version)).unwrap();
                    fs::write(at(version).join("cert"), "same").unwrap();
                }
                symlink("v1", at("data")).unwrap();
                symlink("data/cert", at("cert")).unwrap();
            },
        ];
        for (number, change) in changes.iter().enumerate() {
            change();
            assert!(settles(&mut watched, &folder), "change {number}");
            assert!(!settles(&mut watched, &folder), "change {number} counts once");
        }
        symlink("v2", at("swap")).unwrap();
        fs::rename(at("swap"), at("data")).unwrap();
        assert!(settles(&mut watched, &folder), "another folder behind the same names");
    }

    #[test]
    fn files_that_are_still_being_written_wait() {
        let folder = tempfile::tempdir().unwrap();
        let mut watched = WatchedFiles::new(print(&folder));
        for part in ["a", "ab", "abc"] {
            fs::write(folder.path().join("cert"), part).unwrap();
            assert!(!watched.is_due(&print(&folder)), "{part}");
        }
        assert!(watched.is_due(&print(&folder)));
    }

    #[test]
    fn a_file_that_changed_while_it_was_read_is_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let mut watched = WatchedFiles::new(print(&folder));
        let before = print(&folder);
        fs::write(folder.path().join("cert"), "meanwhile").unwrap();
        watched.loaded(before);
        watched.take_new_files(print(&folder));
        assert!(!watched.is_due(&print(&folder)));
        assert!(watched.is_due(&print(&folder)));
    }
}
