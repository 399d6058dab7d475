//! A file of the machine that is read again once it has changed.
//!
//! Owns: the stamp by which a change is seen, and the bound on the file's size. Must not know: the content.
//! Invariant: a missing or unreadable file counts as an empty one, so a lookup never fails for want of it.

use std::fs::Metadata;
use std::io::Read as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

/// Bytes read of a file. Hosts files that block advertisements have some megabytes.
const LARGEST: u64 = 16 << 20;

/// The parsed content of a file.
pub(super) struct FollowedFile<T> {
    path: PathBuf,
    parse: Box<ParseFileFn<T>>,
    stamp: Option<FileStamp>,
    content: T,
}

type ParseFileFn<T> = dyn Fn(&[u8]) -> T + Send;

/// Differs for a file that was written or replaced.
#[derive(Clone, Copy, PartialEq, Eq)]
struct FileStamp {
    file: (u64, u64),
    changed_at: (i64, i64),
    bytes: u64,
}

impl FileStamp {
    fn of(found: &Metadata) -> Self {
        Self {
            file: (found.dev(), found.ino()),
            changed_at: (found.ctime(), found.ctime_nsec()),
            bytes: found.len(),
        }
    }
}

impl<T> FollowedFile<T> {
    /// A file whose content is empty until [`Self::read_again`].
    pub(super) fn new(path: PathBuf, parse: impl Fn(&[u8]) -> T + Send + 'static) -> Self {
        let content = parse(b"");
        Self { path, parse: Box::new(parse), stamp: None, content }
    }

    /// The content as read last.
    pub(super) fn content(&self) -> &T {
        &self.content
    }

    /// Reads the file if it has changed. Blocks for a `stat` at least.
    pub(super) fn read_again(&mut self) {
        // The stamp is taken first: a change during the reading is seen at the next call.
        let stamp = std::fs::metadata(&self.path).ok().map(|found| FileStamp::of(&found));
        if stamp == self.stamp {
            return;
        }
        self.stamp = stamp;
        self.content = (self.parse)(&read(&self.path));
    }
}

fn read(path: &Path) -> Vec<u8> {
    let mut bytes = Vec::new();
    let read = std::fs::File::open(path).and_then(|file| file.take(LARGEST).read_to_end(&mut bytes));
    if let Err(error) = read {
        tracing::debug!(path = %path.display(), %error, "a file about names cannot be read");
        return Vec::new();
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_written_a_replaced_and_a_removed_file_are_noticed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("resolv.conf");
        let mut file = FollowedFile::new(path.clone(), |bytes| String::from_utf8_lossy(bytes).into_owned());
        file.read_again();
        assert_eq!(file.content(), "", "not there yet");
        std::fs::write(&path, "one").unwrap();
        file.read_again();
        assert_eq!(file.content(), "one");
        let beside = folder.path().join("new");
        std::fs::write(&beside, "two").unwrap();
        std::fs::rename(&beside, &path).unwrap();
        file.read_again();
        assert_eq!(file.content(), "two", "of the same length");
        std::fs::remove_file(&path).unwrap();
        file.read_again();
        assert_eq!(file.content(), "");
    }
}
