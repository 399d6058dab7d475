//! The end of a chain, or of the part of a chain that a sink has taken, in a small file beside the audit
//! file; for a chain with the number of records that wait behind its end and could not be written.
//!
//! Owns: the form and the name of the file. Must not know: who moves the end. Invariants: the file has one
//! line of a fixed length, written in place, so that a crash of the process leaves the old line or the new
//! one, and a full disk takes the new one too; the name begins with a dot and does not end with `.log`, so
//! that no pattern for logs names the file.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::chain::{ChainEnd, HASH};
use super::loss_counter::UnreportedLosses;

/// Digits of a number.
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
    Known(ChainEnd, UnreportedLosses),
}

impl ChainEndFile {
    /// The file beside `audit_file` whose name ends with `suffix`.
    pub(super) fn beside(audit_file: &Path, suffix: &str) -> Self {
        let name = audit_file.file_name().unwrap_or_default().to_string_lossy();
        Self { path: audit_file.with_file_name(format!(".{name}.{suffix}")), file: None, fails: false }
    }

    pub(super) fn read(&self) -> KeptEnd {
        match fs::read(&self.path) {
            Ok(text) => {
                parse(&text).map_or(KeptEnd::Unreadable, |(end, unwritten)| KeptEnd::Known(end, unwritten))
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => KeptEnd::Missing,
            Err(_) => KeptEnd::Unreadable,
        }
    }

    /// Writes the end. Without success the file has an older end, and the next call tries again.
    pub(super) fn write(&mut self, end: &ChainEnd) {
        self.write_text(&format!("{}\n", text_of(end)), false);
    }

    /// Writes the end, with the records that wait behind it and are in no file, or with none.
    pub(super) fn write_with_unwritten(&mut self, end: &ChainEnd, unwritten: UnreportedLosses) {
        let since = unwritten.since.and_then(|since| since.duration_since(UNIX_EPOCH).ok());
        let (end, records, since) =
            (text_of(end), unwritten.records, since.map_or(0, |since| since.as_secs()));
        let text = format!("{end} {records:0DIGITS$} {since:0DIGITS$}\n");
        self.write_text(&text, records > 0);
    }

    fn write_text(&mut self, text: &str, syncs: bool) {
        let Err(error) = self.try_write(text, syncs) else {
            self.fails = false;
            return;
        };
        if !std::mem::replace(&mut self.fails, true) {
            let path = self.path.display().to_string();
            tracing::warn!(path, %error, "the end of the audit records is not kept for a restart");
        }
    }

    fn try_write(&mut self, text: &str, syncs: bool) -> io::Result<()> {
        if let Some(file) = &self.file {
            file.write_all_at(text.as_bytes(), 0)?;
            return if syncs { file.sync_data() } else { Ok(()) };
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

fn text_of(end: &ChainEnd) -> String {
    format!("{:0DIGITS$} {}", end.seq, end.hash)
}

fn parse(text: &[u8]) -> Option<(ChainEnd, UnreportedLosses)> {
    let text = std::str::from_utf8(text).ok()?.strip_suffix('\n')?;
    let number = |text: &str| text.parse::<u64>().ok().filter(|_| text.len() == DIGITS);
    let mut fields = text.split(' ');
    let (seq, hash) = (number(fields.next()?)?, fields.next()?);
    let is_hash = hash.len() == HASH && hash.bytes().all(|byte| byte.is_ascii_hexdigit());
    let unwritten = match (fields.next(), fields.next(), fields.next()) {
        (None, ..) => UnreportedLosses::default(),
        (Some(records), Some(since), None) => {
            let (records, since) = (number(records)?, number(since)?);
            let since = SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(since));
            UnreportedLosses { records, since: since.filter(|_| records > 0) }
        }
        _ => return None,
    };
    is_hash.then(|| (ChainEnd { seq, hash: hash.to_owned() }, unwritten))
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
            assert_eq!(kept.read(), KeptEnd::Known(end.clone(), UnreportedLosses::default()));
            let since = Some(UNIX_EPOCH + Duration::from_secs(seq));
            for unwritten in [UnreportedLosses { records: seq, since }, UnreportedLosses::default()] {
                kept.write_with_unwritten(&end, unwritten);
                assert_eq!(kept.read(), KeptEnd::Known(end.clone(), unwritten));
            }
            fs::remove_file(folder.path().join(".audit.log.end")).unwrap();
            kept.file = None;
        }
        let path = folder.path().join(".audit.log.end");
        let hash = crate::audit::chain::NO_HASH;
        let cut = format!("00000000000000000007 {hash} 00000000000000000007\n");
        for other in ["", "7\n", "00000000000000000007 00\n", &cut] {
            fs::write(&path, other).unwrap();
            assert_eq!(kept.read(), KeptEnd::Unreadable, "{other:?}");
        }
        // A longer text of somebody else is replaced whole.
        fs::write(&path, "x".repeat(500)).unwrap();
        let mut again = ChainEndFile::beside(&folder.path().join("audit.log"), "end");
        again.write(&ChainEnd::default());
        assert_eq!(again.read(), KeptEnd::Known(ChainEnd::default(), UnreportedLosses::default()));
    }
}
