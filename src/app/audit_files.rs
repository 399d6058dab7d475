//! `keyward audit verify` and `keyward audit search`: reads the files of an audit log.
//!
//! Owns: opening the files, and their order. Must not know: the checks, the conditions of a search.
//! Invariant: files are read in the order of their records, whatever the order of the arguments.

use std::fs::File;
use std::io::{self, BufRead as _, BufReader, Read as _};
use std::path::{Path, PathBuf};

use crate::audit::chain::ChainedLine;
use crate::audit::head_signature::{BadPublicKey, HeadPublicKey};
use crate::audit::search::{AuditSearch, FoundRecord};
use crate::audit::verify::{ChainCheck, ChainFault, ChainReport};

/// Bytes of a line at most, far more than a record has.
const LONGEST_LINE: u64 = 1 << 20;

/// Why a command about audit files fails.
#[derive(Debug, thiserror::Error)]
pub enum AuditFilesError {
    /// A file cannot be read.
    #[error("{}: {source}", .path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The operating system's error.
        source: io::Error,
    },
    /// The results cannot be printed.
    #[error("cannot print: {0}")]
    Unprintable(io::Error),
    /// The file of the public key is not usable.
    #[error("{}: {source}", .path.display())]
    Key {
        /// The file.
        path: PathBuf,
        /// The fault.
        source: BadPublicKey,
    },
    /// A bad line.
    #[error("{}:{line}: {fault}", .path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// The number of the line, from 1.
        line: u64,
        /// The fault.
        fault: ChainFault,
    },
    /// A fault of the files as a whole.
    #[error("{0}")]
    Whole(ChainFault),
}

/// Checks the files as one chain.
///
/// # Errors
/// The first fault, with the file and the line.
pub fn verify(files: &[PathBuf], public_key: Option<&Path>) -> Result<ChainReport, AuditFilesError> {
    let key = public_key.map(|path| {
        HeadPublicKey::read(path).map_err(|source| AuditFilesError::Key { path: path.to_owned(), source })
    });
    let key = key.transpose()?;
    let mut check = ChainCheck::new(key.as_ref());
    for path in in_order(files)? {
        let file = open(&path)?;
        let mut line = 0;
        if let Err(fault) = check.file(file, &mut line) {
            return Err(AuditFilesError::Line { path, line, fault });
        }
    }
    check.finish().map_err(AuditFilesError::Whole)
}

/// Passes each line with its record to `print`, if the conditions hold.
///
/// # Errors
/// A file cannot be read, or a result cannot be printed.
pub fn search(
    files: &[PathBuf],
    conditions: &AuditSearch,
    mut print: impl FnMut(&[u8], &FoundRecord) -> io::Result<()>,
) -> Result<(), AuditFilesError> {
    for path in in_order(files)? {
        let mut file = open(&path)?;
        let mut line = Vec::new();
        loop {
            line.clear();
            let unreadable = |source| AuditFilesError::Unreadable { path: path.clone(), source };
            if (&mut file).take(LONGEST_LINE).read_until(b'\n', &mut line).map_err(unreadable)? == 0 {
                break;
            }
            if let Some(found) = conditions.find(&line) {
                print(&line, &found).map_err(AuditFilesError::Unprintable)?;
            }
        }
    }
    Ok(())
}

fn open(path: &Path) -> Result<BufReader<File>, AuditFilesError> {
    let opened = File::open(path).map(BufReader::new);
    opened.map_err(|source| AuditFilesError::Unreadable { path: path.to_owned(), source })
}

/// The files by the number of their first line. A file whose first line is bad comes last, and is reported by
/// the check.
fn in_order(files: &[PathBuf]) -> Result<Vec<PathBuf>, AuditFilesError> {
    let mut numbered = Vec::new();
    for path in files {
        let mut line = Vec::new();
        let read = open(path)?.take(LONGEST_LINE).read_until(b'\n', &mut line);
        read.map_err(|source| AuditFilesError::Unreadable { path: path.clone(), source })?;
        let line = line.strip_suffix(b"\n").unwrap_or(&line);
        numbered.push((ChainedLine::read(line).map_or(u64::MAX, |line| line.seq), path.clone()));
    }
    numbered.sort();
    Ok(numbered.into_iter().map(|(_, path)| path).collect())
}
