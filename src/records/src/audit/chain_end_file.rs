//! The end of a chain, or of the part of a chain that a sink has taken, in a small file beside the audit
//! file.
//!
//! Owns: the form and the name of the file. Must not know: who moves the end. Invariants: the file has one
//! line of a fixed length, written in place, so that a crash of the process leaves the old end or the new
//! one; the name begins with a dot and does not end with `.log`, so that no pattern for logs names the file.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use super::chain::{ChainEnd, HASH};

/// Digits of the number of a line.
const DIGITS: usize = 20;

/// The file.
#[derive(Debug)]
pub(super) struct ChainEndFile {
    path: PathBuf,
    file: Option<File>,
    /// True after a failed write: a series of failures is logged once.
    fails: bool,
}

/// The contents of the file.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum KeptEnd {
    /// There is no file yet.
    Missing,
    /// The file has something else, as after a crash of the machine.
    Unreadable,
    Known(ChainEnd),
}

impl ChainEndFile {
    /// The file beside `audit_file` whose name ends with `suffix`.
    pub(super) fn beside(audit_file: &Path, suffix: &str) -> Self {
        let name = audit_file.file_name().unwrap_or_default().to_string_lossy();
        Self { path: audit_file.with_file_name(format!(".{name}.{suffix}")), file: None, fails: false }
    }

    pub(super) fn read(&self) -> KeptEnd {
        match fs::read(&self.path) {
            Ok(text) => parse(&text).map_or(KeptEnd::Unreadable, KeptEnd::Known),
            Err(error) if error.kind() == io::ErrorKind::NotFound => KeptEnd::Missing,
            Err(_) => KeptEnd::Unreadable,
        }
    }

    /// Writes the end. Without success the file has an older end, and the next call tries again.
    pub(super) fn write(&mut self, end: &ChainEnd) {
        let Err(error) = self.try_write(end) else {
            self.fails = false;
            return;
        };
        if !std::mem::replace(&mut self.fails, true) {
            let path = self.path.display().to_string();
            tracing::warn!(path, %error, "the end of the audit records is not kept for a restart");
        }
    }

    fn try_write(&mut self, end: &ChainEnd) -> io::Result<()> {
        let text = format!("{:0DIGITS$} {}\n", end.seq, end.hash);
        if let Some(file) = &self.file {
            return file.write_all_at(text.as_bytes(), 0);
        }
        let file =
            OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&self.path)?;
        file.write_all_at(text.as_bytes(), 0)?;
        file.set_len(text.len() as u64)?;
        file.sync_all()?;
        self.file = Some(file);
        Ok(())
    }
}

fn parse(text: &[u8]) -> Option<ChainEnd> {
    let text = std::str::from_utf8(text).ok()?.strip_suffix('\n')?;
    let (number, hash) = text.split_once(' ')?;
    let is_hash = hash.len() == HASH && hash.bytes().all(|byte| byte.is_ascii_hexdigit());
    let seq = number.parse().ok().filter(|_| is_hash && number.len() == DIGITS)?;
    Some(ChainEnd { seq, hash: hash.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_is_read_again_and_other_bytes_are_unreadable() {
        let folder = tempfile::tempdir().unwrap();
        let mut kept = ChainEndFile::beside(&folder.path().join("audit.log"), "end");
        assert_eq!(kept.read(), KeptEnd::Missing);
        for seq in [7, 1_000_000] {
            let end = ChainEnd { seq, ..ChainEnd::default() };
            kept.write(&end);
            assert_eq!(kept.read(), KeptEnd::Known(end));
        }
        let path = folder.path().join(".audit.log.end");
        for other in ["", "7\n", "00000000000000000007 00\n"] {
            fs::write(&path, other).unwrap();
            assert_eq!(kept.read(), KeptEnd::Unreadable, "{other:?}");
        }
        // A longer text of somebody else is replaced whole.
        fs::write(&path, "x".repeat(500)).unwrap();
        let mut again = ChainEndFile::beside(&folder.path().join("audit.log"), "end");
        again.write(&ChainEnd::default());
        assert_eq!(again.read(), KeptEnd::Known(ChainEnd::default()));
    }
}
