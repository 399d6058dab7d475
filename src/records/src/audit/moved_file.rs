//! The audit file, moved, removed or replaced by somebody else than Keyward, such as logrotate.
//!
//! Owns: finding that out, and the new file in its place. Must not know: the records. Invariants: what stands
//! in the place of the file and is no part of the chain is moved aside and never written to, and never
//! removed; the moved file is not touched any more.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use super::audit_folder::FileId;
use super::chain::ChainEnd;
use super::file::{AuditFile, last_line, open, tail};
use super::rotation;
use keyward_telemetry::printable::cut_to;

/// Bytes of a name in a record.
const LONGEST_NAME: usize = 512;

/// The file that was moved or removed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MovedFile {
    /// The present name of a moved file, with its path if in another folder; the name of a removed one.
    pub name: String,
    /// True if the file was removed, or another one was put over it.
    pub is_removed: bool,
}

impl AuditFile {
    /// Compares the file with its path. If they differ, goes on in a new file at the path, or in the one that
    /// is there if its last line is `end`. Returns the file before, unless it had no line.
    ///
    /// # Errors
    /// There is no new file: the records go on into the file before.
    pub(super) fn follow_path(&mut self, end: &ChainEnd) -> io::Result<Option<MovedFile>> {
        if !self.is_regular {
            return Ok(None);
        }
        let (path, present) = (self.settings.path.clone(), self.file.metadata()?);
        match fs::metadata(&path) {
            Ok(found) if FileId::of(&found) == FileId::of(&present) => {
                // Truncated in place, after a copy.
                if !self.is_torn {
                    self.age.size = self.age.size.min(present.len());
                }
                return Ok(None);
            }
            Ok(found) if !found.is_file() => {
                return Err(io::Error::other("something else than a file is in the place of the audit file"));
            }
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        if self.is_torn {
            self.file.set_len(self.age.size)?;
            self.is_torn = false;
        }
        let moved = moved_file(&self.file, &present, &path);
        let mut opened = open(&path)?;
        let length = opened.0.metadata()?.len();
        let is_continued =
            || Ok::<_, io::Error>(last_line(&tail(&opened.0, length)?).1.as_ref() == Some(end));
        let mut size = length;
        if length > 0 && !is_continued()? {
            let aside = rotation::aside_name(self.folder.name(), end.seq + 1);
            tracing::error!(
                ?aside,
                "a file with other bytes is in the place of the audit file, and is moved aside"
            );
            fs::rename(&path, self.folder.folder().join(aside))?;
            (opened, size) = (open(&path)?, 0);
        }
        let had_lines = self.begin_in(opened, size);
        File::open(self.folder.folder())?.sync_all()?;
        Ok(Some(moved).filter(|_| had_lines))
    }
}

/// The present name of an open file.
fn moved_file(file: &File, metadata: &fs::Metadata, path: &Path) -> MovedFile {
    let old_name = || path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    if metadata.nlink() == 0 {
        return MovedFile { name: old_name(), is_removed: true };
    }
    let present = fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).ok();
    let folder = path.parent().and_then(|folder| folder.canonicalize().ok());
    let mut name = match &present {
        Some(present) if present.parent() == folder.as_deref() => {
            present.file_name().unwrap_or_default().to_string_lossy().into_owned()
        }
        Some(present) => present.to_string_lossy().into_owned(),
        None => old_name(),
    };
    name.truncate(cut_to(&name, LONGEST_NAME).len());
    MovedFile { name, is_removed: false }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::SystemTime;

    use super::*;
    use crate::audit::chain::Chain;
    use keyward_config::audit_settings::AuditFileSettings;

    struct Written {
        folder: tempfile::TempDir,
        file: AuditFile,
        chain: Chain,
    }

    impl Written {
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("audit.log");
            let settings =
                AuditFileSettings { path, max_size: 1 << 20, max_age: None, keep: 2, keep_for: None };
            let opened = AuditFile::open(&settings, Arc::default()).unwrap();
            let mut written = Self { folder, file: opened.file, chain: Chain::new("a", opened.end) };
            written.write();
            written
        }

        fn write(&mut self) {
            let mut line = Vec::new();
            self.chain.append(br#"{"time":"t","event":"x"}"#, &mut line);
            self.file.append(&line, self.chain.end.seq, &self.chain.end, SystemTime::now()).unwrap();
        }

        fn follow(&mut self) -> Option<MovedFile> {
            self.file.follow_path(&self.chain.end).unwrap()
        }

        fn text(&self, name: &str) -> String {
            fs::read_to_string(self.folder.path().join(name)).unwrap()
        }
    }

    fn moved(name: &str, is_removed: bool) -> Option<MovedFile> {
        Some(MovedFile { name: name.into(), is_removed })
    }

    #[test]
    fn a_moved_or_removed_file_is_followed_by_a_new_one() {
        let mut written = Written::new();
        assert_eq!(written.follow(), None);
        let path = written.folder.path().join("audit.log");
        fs::rename(&path, written.folder.path().join("audit.log.1")).unwrap();
        assert_eq!(written.follow(), moved("audit.log.1", false));
        assert_eq!((written.text("audit.log"), written.follow()), (String::new(), None));
        // A new file without a line is nobody's loss.
        fs::remove_file(&path).unwrap();
        assert_eq!(written.follow(), None);
        written.write();
        fs::remove_file(&path).unwrap();
        assert_eq!(written.follow(), moved("audit.log", true));
        written.write();
        let elsewhere = tempfile::tempdir().unwrap();
        let target = elsewhere.path().canonicalize().unwrap().join("kept");
        fs::rename(&path, &target).unwrap();
        assert_eq!(written.follow(), moved(target.to_str().unwrap(), false));
    }

    #[test]
    fn a_file_in_the_place_is_continued_only_behind_the_last_line() {
        let mut written = Written::new();
        let path = written.folder.path().join("audit.log");
        let copy = written.folder.path().join("copy");
        // An editor writes a copy, and moves it over the file.
        fs::copy(&path, &copy).unwrap();
        fs::rename(&copy, &path).unwrap();
        assert_eq!(written.follow(), moved("audit.log", true));
        written.write();
        assert_eq!(written.text("audit.log").lines().count(), 2);
        fs::write(&copy, "a stranger's\n").unwrap();
        fs::rename(&copy, &path).unwrap();
        assert_eq!(written.follow(), moved("audit.log", true));
        assert_eq!(written.text("audit.log"), "");
        assert_eq!(written.text("audit.log.00000000000000000003.torn"), "a stranger's\n");
        written.write();
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        assert!(written.file.follow_path(&written.chain.end).is_err());
        written.write();
    }
}
