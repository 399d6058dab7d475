//! The state file: revocations of a single replica.
//!
//! Owns: its form, and that it is whole whenever it is there. Must not know: who changes what. Invariants: it is replaced
//! by a rename after its content is on disk, and the rename is on disk before the change counts as kept; a line that is
//! not understood makes all of it unusable, since nobody knows whom it was about.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use super::row;
use crate::downstream::session::{MOST_ENTRIES, Revocations};

/// The first line.
const MARK: &str = "keyward revocations 1";
/// Far more than [`MOST_ENTRIES`] rows of the longest names that a session can hold.
const LARGEST: u64 = 64 << 20;

/// Why the state file is of no use.
#[derive(Debug, thiserror::Error)]
pub enum Unusable {
    /// The system's words.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// What it holds was not written by Keyward, or by a later one.
    #[error("{path}: line {line} is no revocation")]
    Line {
        /// The file.
        path: PathBuf,
        /// Counted from 1.
        line: usize,
    },
    /// It is too large.
    #[error("{path}: holds more than {MOST_ENTRIES} revocations")]
    TooMany {
        /// The file.
        path: PathBuf,
    },
}

/// What the file says; one that is not there yet says nothing.
pub(super) fn read(path: &Path) -> Result<Revocations, Unusable> {
    let mut text = Vec::new();
    let opened = File::open(path).and_then(|file| file.take(LARGEST + 1).read_to_end(&mut text));
    match opened {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            tracing::info!(path = %path.display(), "no state file yet: nobody is revoked");
            return Ok(Revocations::default());
        }
        Err(source) => return Err(Unusable::Io { path: path.to_owned(), source }),
        Ok(_) if text.len() as u64 > LARGEST => return Err(Unusable::TooMany { path: path.to_owned() }),
        Ok(_) => {}
    }
    let bad = |line| Unusable::Line { path: path.to_owned(), line };
    // The last line has its end too: what has none was cut.
    let text = text.strip_suffix(b"\n").ok_or_else(|| bad(1))?;
    let mut lines = text.split(|&byte| byte == b'\n').zip(1..);
    if lines.next().is_none_or(|(first, _)| first != MARK.as_bytes()) {
        return Err(bad(1));
    }
    let entries = lines.map(|(line, number)| row::read(line).ok_or_else(|| bad(number)));
    let all = entries.collect::<Result<Revocations, _>>()?;
    if all.len() > MOST_ENTRIES { Err(Unusable::TooMany { path: path.to_owned() }) } else { Ok(all) }
}

/// Replaces the file. Blocks until it is on disk.
pub(super) fn write(path: &Path, revocations: &Revocations) -> Result<(), Unusable> {
    let mut lines: Vec<String> = revocations.entries().map(|entry| row::write(&entry)).collect();
    lines.sort_unstable();
    lines.insert(0, MARK.to_owned());
    replace(path, &(lines.join("\n") + "\n")).map_err(|source| Unusable::Io { path: path.to_owned(), source })
}

fn replace(path: &Path, text: &str) -> io::Result<()> {
    let mut beside = path.as_os_str().to_owned();
    beside.push(".new");
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&beside)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    fs::rename(&beside, path)?;
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(folder)?.sync_all()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;
    use crate::downstream::session::{Entry, Standing};

    fn revocations() -> Revocations {
        let alice = Entry::User("alice".into(), Standing { generation: 7, blocked: true });
        [alice, Entry::Session("2188fb71f3e76d20bc325cea09efdc7c".parse().unwrap())].into_iter().collect()
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
            // Cut behind a line it is whole again, and says less: only its folder's owner can do that.
            let at_a_line = end > 0 && whole.as_bytes()[end - 1] == b'\n';
            assert_eq!(read.is_ok(), at_a_line, "cut at {end}");
        }
        fs::write(&path, whole.replace("\"user\"", "\"usr\"")).unwrap();
        assert!(matches!(read(&path), Err(Unusable::Line { line: 2 | 3, .. })));
        fs::write(&path, "something else\n").unwrap();
        assert!(matches!(read(&path), Err(Unusable::Line { line: 1, .. })));
    }

    #[test]
    fn a_folder_that_takes_no_file_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("absent").join("state");
        assert!(matches!(write(&path, &revocations()), Err(Unusable::Io { .. })));
    }
}
