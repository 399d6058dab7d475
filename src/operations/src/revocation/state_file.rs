//! The state file: revocations of a single replica.
//!
//! Owns: the file format. Must not know: the source of changes. Invariants: a change counts as stored after
//! the file was replaced and synced to disk; an unreadable line makes the whole file unusable, because the
//! revoked user is unknown.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use super::row;
use keyward_base::io::file_replacement::replace_file;
use keyward_downstream::session::{MOST_ENTRIES, Revocations};

/// The first line of the file.
const MARK: &str = "keyward revocations 1";
/// Size limit of the file, far more than [`MOST_ENTRIES`] rows with the longest user names a session can
/// hold.
const LARGEST: u64 = 64 << 20;

/// Reasons for not being able to use the state file.
#[derive(Debug, thiserror::Error)]
pub enum StateFileError {
    /// The operating system failed.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The line was not written by Keyward, or was written by a later version.
    #[error("{path}: line {line} is no revocation")]
    Line {
        /// The file.
        path: PathBuf,
        /// The line's number, from 1.
        line: usize,
    },
    /// The file holds too many revocations or too many bytes.
    #[error("{path}: holds more than {MOST_ENTRIES} revocations")]
    TooMany {
        /// The file.
        path: PathBuf,
    },
}

/// Reads the revocations of the file. A missing file has no revocations.
pub(super) fn read(path: &Path) -> Result<Revocations, StateFileError> {
    let mut text = Vec::new();
    let opened = File::open(path).and_then(|file| file.take(LARGEST + 1).read_to_end(&mut text));
    match opened {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            tracing::info!(path = %path.display(), "no state file yet: nobody is revoked");
            return Ok(Revocations::default());
        }
        Err(source) => return Err(StateFileError::Io { path: path.to_owned(), source }),
        Ok(_) if text.len() as u64 > LARGEST => {
            return Err(StateFileError::TooMany { path: path.to_owned() });
        }
        Ok(_) => {}
    }
    let bad = |line| StateFileError::Line { path: path.to_owned(), line };
    // Every line ends with a line break, so a file without a final line break was truncated.
    let text = text.strip_suffix(b"\n").ok_or_else(|| bad(1))?;
    let mut lines = text.split(|&byte| byte == b'\n').zip(1..);
    if lines.next().is_none_or(|(first, _)| first != MARK.as_bytes()) {
        return Err(bad(1));
    }
    let entries = lines.map(|(line, number)| row::read(line).ok_or_else(|| bad(number)));
    let all = entries.collect::<Result<Revocations, _>>()?;
    if all.len() > MOST_ENTRIES { Err(StateFileError::TooMany { path: path.to_owned() }) } else { Ok(all) }
}

/// The content of the file.
pub(super) fn content(revocations: &Revocations) -> Vec<u8> {
    let mut lines: Vec<String> = revocations.entries().map(|entry| row::write(&entry)).collect();
    lines.sort_unstable();
    lines.insert(0, MARK.to_owned());
    (lines.join("\n") + "\n").into_bytes()
}

/// Replaces the file. Blocks until the new file is synced to disk.
pub(super) fn write(path: &Path, revocations: &Revocations) -> Result<(), StateFileError> {
    replace_file(path, &content(revocations))
        .map_err(|source| StateFileError::Io { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;
    use keyward_downstream::session::{RevocationEntry, UserRevocation};

    fn revocations() -> Revocations {
        let alice = RevocationEntry::User("alice".into(), UserRevocation { generation: 7, blocked: true });
        [alice, RevocationEntry::Session("2188fb71f3e76d20bc325cea09efdc7c".parse().unwrap())]
            .into_iter()
            .collect()
    }

    #[test]
    fn what_was_written_is_read_and_is_its_owners_only() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state");
        assert_eq!(read(&path).unwrap(), Revocations::default(), "not there yet");
        for revocations in [revocations(), Revocations::default(), revocations()] {
            write(&path, &revocations).unwrap();
            assert_eq!(read(&path).unwrap(), revocations);
            assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
            assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "nothing is left beside it");
        }
    }

    #[test]
    fn a_file_that_was_cut_or_changed_is_not_believed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state");
        write(&path, &revocations()).unwrap();
        let whole = fs::read_to_string(&path).unwrap();
        for end in 0..whole.len() {
            fs::write(&path, &whole[..end]).unwrap();
            let read = read(&path);
            // A file truncated after a complete line is valid, with fewer revocations; only the owner of the
            // folder can truncate the file.
            let at_a_line = end > 0 && whole.as_bytes()[end - 1] == b'\n';
            assert_eq!(read.is_ok(), at_a_line, "cut at {end}");
        }
        fs::write(&path, whole.replace("\"user\"", "\"usr\"")).unwrap();
        assert!(matches!(read(&path), Err(StateFileError::Line { line: 2 | 3, .. })));
        fs::write(&path, "something else\n").unwrap();
        assert!(matches!(read(&path), Err(StateFileError::Line { line: 1, .. })));
    }

    #[test]
    fn a_folder_that_takes_no_file_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("absent").join("state");
        assert!(matches!(write(&path, &revocations()), Err(StateFileError::Io { .. })));
    }
}
