//! Whether files have changed.
//!
//! Owns: by what a change is seen, and when it counts. Must not know: what is in the files. Invariants: a link is
//! followed, so that another folder behind it is a change (as Kubernetes swaps secrets); a change counts once it looked
//! the same twice, and once only.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;

/// How some files look at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Print(BTreeMap<PathBuf, Option<Look>>);

/// One file: which it is, how long, and when it was last written or changed otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Look {
    device: u64,
    inode: u64,
    size: u64,
    written: (i64, i64),
    changed: (i64, i64),
}

/// What was loaded, and how the files looked since.
pub(super) struct Watched {
    loaded: Print,
    last: Print,
}

impl Print {
    /// Looks at the files. Blocks.
    pub(super) fn of(names: Vec<PathBuf>) -> Self {
        let look = |name: PathBuf| {
            let seen = std::fs::metadata(&name).ok().map(|found| Look {
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

impl Watched {
    pub(super) fn new(loaded: Print) -> Self {
        Self { last: loaded.clone(), loaded }
    }

    /// Whether the files differ from what was loaded, and have come to rest.
    pub(super) fn is_due(&mut self, now: &Print) -> bool {
        let due = *now != self.loaded && *now == self.last;
        self.last = now.clone();
        due
    }

    /// What looked like this is being loaded, whatever comes of it.
    pub(super) fn loaded(&mut self, print: Print) {
        self.last = print.clone();
        self.loaded = print;
    }

    /// These are the files now: those that were not looked at before count as they are.
    pub(super) fn also(&mut self, mut now: Print) {
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

    fn print(folder: &tempfile::TempDir) -> Print {
        Print::of(vec![folder.path().join("cert"), folder.path().join("key")])
    }

    /// Looks until nothing is due any more; whether something was.
    fn settles(watched: &mut Watched, folder: &tempfile::TempDir) -> bool {
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
        let mut watched = Watched::new(print(&folder));
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
        let mut watched = Watched::new(print(&folder));
        for part in ["a", "ab", "abc"] {
            fs::write(folder.path().join("cert"), part).unwrap();
            assert!(!watched.is_due(&print(&folder)), "{part}");
        }
        assert!(watched.is_due(&print(&folder)));
    }

    #[test]
    fn a_file_that_changed_while_it_was_read_is_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let mut watched = Watched::new(print(&folder));
        let before = print(&folder);
        fs::write(folder.path().join("cert"), "meanwhile").unwrap();
        watched.loaded(before);
        watched.also(print(&folder));
        assert!(!watched.is_due(&print(&folder)));
        assert!(watched.is_due(&print(&folder)));
    }
}
