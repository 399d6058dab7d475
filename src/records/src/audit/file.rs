//! The audit file: appended, synced, rotated, and continued after a crash.
//!
//! Owns: the file and its folder. Must not know: the contents of a record. Invariants: a batch stands in the
//! file as a whole, synced to disk, or not at all once [`AuditFile::append`] has succeeded again; the end of
//! a file cut by a crash is kept in a file beside; one process writes a file; the number of records that a
//! full disk keeps out of the file stands beside it.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use super::audit_folder::AuditFolder;
use super::chain::{ChainEnd, ChainedLine, HEAD, is_orderly_end};
use super::chain_end_file::{ChainEndFile, KeptEnd};
use super::loss_counter::UnreportedLosses;
use super::retention::AuditRetention;
use super::rotation::{self, FileAge, SurplusFiles};
use keyward_config::audit_settings::AuditFileSettings;

/// Bytes read from the end of a file to find the last line: far more than a line.
const TAIL: u64 = 1 << 20;

/// Reasons for an unusable audit file.
#[derive(Debug, thiserror::Error)]
pub enum AuditFileError {
    /// The operating system failed.
    #[error("{0}: {1}", .path.display(), .source)]
    Io {
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// Another process writes the file.
    #[error("{}: another process writes this file", .0.display())]
    InUse(PathBuf),
    /// The file ends with something else than audit records.
    #[error("{}: holds no audit records at its end; move the file away", .0.display())]
    NotAudit(PathBuf),
}

/// The file written now.
pub(super) struct AuditFile {
    pub(super) settings: AuditFileSettings,
    pub(super) folder: AuditFolder,
    kept_end: ChainEndFile,
    pub(super) file: File,
    pub(super) is_regular: bool,
    pub(super) age: FileAge,
    /// The number of the file's first line; 0 for a file without lines.
    first: u64,
    /// True if a failed write may have left bytes behind `age.size`.
    pub(super) is_torn: bool,
    /// The number of old files, and the time of the first record of the oldest.
    old: (usize, Option<SystemTime>),
    retention: Arc<AuditRetention>,
}

/// A file ready for records, and the chain so far.
pub(super) struct ContinuedFile {
    pub(super) file: AuditFile,
    pub(super) end: ChainEnd,
    /// The name of the file with the last line, if the file has no line or another last line.
    pub(super) previous: Option<String>,
    /// The file with the last line is not here: somebody moved or removed it.
    pub(super) is_moved: bool,
    /// Bytes cut from the end.
    pub(super) torn: u64,
    /// The last line is neither the stop of a process nor its succession.
    pub(super) is_unstopped: bool,
    /// Records that the process before could not write behind the last line.
    pub(super) unwritten: UnreportedLosses,
}

/// The end of a chain as found in the files, and beside them.
struct FoundEnd {
    end: ChainEnd,
    /// The name of the file of the last line, unless that is the present file.
    previous: Option<String>,
    /// That file is not here.
    is_moved: bool,
    is_unstopped: bool,
    unwritten: UnreportedLosses,
}

impl AuditFile {
    /// Opens the file, cuts off an end torn by a crash, and finds the end of the chain.
    ///
    /// # Errors
    /// The file cannot be opened, another process writes the file, or the file holds something else.
    pub(super) fn open(
        settings: &AuditFileSettings,
        retention: Arc<AuditRetention>,
    ) -> Result<ContinuedFile, AuditFileError> {
        let path = &settings.path;
        let at = |source| AuditFileError::Io { path: path.clone(), source };
        let (file, is_regular) = open(path).map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => AuditFileError::InUse(path.clone()),
            _ => at(error),
        })?;
        let age = FileAge { size: 0, begun: SystemTime::now() };
        let (settings, first, is_torn, old) = (settings.clone(), 0, false, (0, None));
        let (folder, kept_end) = (AuditFolder::of(path), ChainEndFile::beside(path, "end"));
        let mut opened =
            Self { settings, folder, kept_end, file, is_regular, age, first, is_torn, old, retention };
        if !is_regular {
            return Ok(ContinuedFile {
                file: opened,
                end: ChainEnd::default(),
                previous: None,
                is_moved: false,
                torn: 0,
                is_unstopped: false,
                unwritten: UnreportedLosses::default(),
            });
        }
        opened.look_at_old_files().map_err(at)?;
        let length = opened.file.metadata().map_err(at)?.len();
        let tail = tail(&opened.file, length).map_err(at)?;
        let (whole, end) = last_line(&tail);
        if end.is_none() && length > 0 && (length > TAIL || tail.contains(&b'\n')) {
            return Err(AuditFileError::NotAudit(path.clone()));
        }
        let torn = (tail.len() - whole) as u64;
        if torn > 0 {
            keep_torn(path, &tail[whole..]).map_err(at)?;
            opened.file.set_len(length - torn).and_then(|()| opened.file.sync_all()).map_err(at)?;
        }
        opened.age.size = length - torn;
        if end.is_some() {
            opened.read_begin();
        }
        let is_unstopped = is_unstopped(&tail[..whole]);
        let found = opened.chain_end(end.map(|end| (end, is_unstopped))).map_err(at)?;
        let FoundEnd { end, previous, is_moved, is_unstopped, unwritten } = found;
        Ok(ContinuedFile { file: opened, end, previous, is_moved, torn, is_unstopped, unwritten })
    }

    /// Closes the file, whose lock is free from here on. Returns what it takes to open the file again.
    pub(super) fn released(self) -> (AuditFileSettings, Arc<AuditRetention>) {
        (self.settings, self.retention)
    }

    /// Looks if the file can be continued once the process that writes the file now has left it.
    ///
    /// # Errors
    /// The file cannot be opened, or holds something else.
    pub(super) fn check(path: &Path) -> Result<(), AuditFileError> {
        let at = |source| AuditFileError::Io { path: path.to_owned(), source };
        let file = OpenOptions::new().read(true).append(true).create(true).mode(0o600).open(path);
        let file = file.map_err(at)?;
        let metadata = file.metadata().map_err(at)?;
        let tail = tail(&file, metadata.len()).map_err(at)?;
        if metadata.is_file() && last_line(&tail).1.is_none() && tail.contains(&b'\n') {
            return Err(AuditFileError::NotAudit(path.to_owned()));
        }
        Ok(())
    }

    /// The end of the chain, given that of the file: the last line that stands in a file of the folder, or
    /// the last line that was ever written, if its file is not here.
    fn chain_end(&self, end: Option<(ChainEnd, bool)>) -> io::Result<FoundEnd> {
        let (end, is_unstopped, previous) = match end {
            Some((end, is_unstopped)) => (end, is_unstopped, None),
            None => self.newest_other_file()?.unwrap_or_default(),
        };
        let mut found =
            FoundEnd { end, previous, is_moved: false, is_unstopped, unwritten: UnreportedLosses::default() };
        if let KeptEnd::Known(kept, unwritten) = self.kept_end.read() {
            if kept.seq > found.end.seq {
                let (written, found) = (kept.seq, found.end.seq);
                tracing::error!(written, found, "the last audit records are in no file of the folder");
                let previous = Some(self.folder.name().to_string_lossy().into_owned());
                // The event of the last line is not known.
                return Ok(FoundEnd { end: kept, previous, is_moved: true, is_unstopped: false, unwritten });
            }
            // Behind any other line stands what was written later.
            if kept == found.end {
                found.unwritten = unwritten;
            }
        }
        Ok(found)
    }

    /// Reads the number and the time of the first line.
    fn read_begin(&mut self) {
        let mut begin = vec![0; usize::try_from(TAIL.min(self.age.size)).unwrap_or(0)];
        let read = self.file.read_exact_at(&mut begin, 0);
        let line = begin.split(|byte| *byte == b'\n').next().unwrap_or_default();
        if let (Ok(()), Ok(line)) = (read, ChainedLine::read(line)) {
            self.first = line.seq;
            self.age.begun = time_of(&line).unwrap_or(self.age.begun);
        }
    }

    /// The end of the chain in the newest other file of the folder, with the file's name, and true if no
    /// process has stopped there.
    fn newest_other_file(&self) -> io::Result<Option<(ChainEnd, bool, Option<String>)>> {
        let Some((_, newest)) = self.folder.chain_files()?.pop() else { return Ok(None) };
        let file = File::open(&newest)?;
        let tail = tail(&file, file.metadata()?.len())?;
        let name = newest.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let (whole, end) = last_line(&tail);
        Ok(end.map(|end| (end, is_unstopped(&tail[..whole]), Some(name))))
    }

    /// True if the file is to be rotated before `more` bytes are written.
    pub(super) fn is_due(&self, more: usize, now: SystemTime) -> bool {
        self.is_regular && rotation::is_due(&self.settings, self.age, more, now)
    }

    /// Appends lines, of which the first has the number `first`, and syncs the file. `end` is the end of the
    /// chain with the last of the lines.
    ///
    /// # Errors
    /// The operating system's error: none of the lines stands in the file after the next success.
    pub(super) fn append(
        &mut self,
        lines: &[u8],
        first: u64,
        end: &ChainEnd,
        now: SystemTime,
    ) -> io::Result<()> {
        if self.is_torn {
            self.file.set_len(self.age.size)?;
            self.is_torn = false;
        }
        let written = self.file.write_all(lines).and_then(|()| self.sync());
        if written.is_err() {
            // A disk with little room took a part of the lines, which are all written again.
            self.is_torn = self.is_regular && self.file.set_len(self.age.size).is_err();
            return written;
        }
        if self.is_regular {
            if self.age.size == 0 {
                (self.first, self.age.begun) = (first, now);
            }
            self.age.size += lines.len() as u64;
            self.kept_end.write_with_unwritten(end, UnreportedLosses::default());
            self.note_kept(now);
        }
        Ok(())
    }

    /// Keeps the number of records that could not be written behind `end` for the next process.
    pub(super) fn keep_unwritten(&mut self, end: &ChainEnd, unwritten: UnreportedLosses) {
        if self.is_regular {
            self.kept_end.write_with_unwritten(end, unwritten);
        }
    }

    /// Goes on in another file, which has `size` bytes of the chain. Returns true if the file before had a
    /// line.
    pub(super) fn begin_in(&mut self, (file, is_regular): (File, bool), size: u64) -> bool {
        let had_lines = self.age.size > 0;
        (self.file, self.is_regular, self.first) = (file, is_regular, 0);
        self.age = FileAge { size, begun: SystemTime::now() };
        if size > 0 {
            self.read_begin();
        }
        had_lines
    }

    /// Counts the old files, and reads the time of their first record.
    fn look_at_old_files(&mut self) -> io::Result<()> {
        let old = self.folder.old_files()?;
        let oldest = old.first().and_then(|oldest| time_of_first_line(&self.folder.folder().join(oldest)));
        self.old = (old.len(), oldest);
        Ok(())
    }

    fn note_kept(&self, now: SystemTime) {
        let (files, oldest) = self.old;
        #[expect(clippy::cast_precision_loss, reason = "a forecast")]
        let files = files as f64 + rotation::used_part(&self.settings, self.age, now);
        self.retention.note(files, oldest.or(Some(self.age.begun)), now);
    }

    fn sync(&self) -> io::Result<()> {
        if self.is_regular { self.file.sync_data() } else { Ok(()) }
    }

    /// Renames the file, and begins a new file. Returns the old file's new name.
    ///
    /// # Errors
    /// The operating system's error: the file stays as it was.
    pub(super) fn rotate(&mut self) -> io::Result<String> {
        if self.is_torn {
            self.file.set_len(self.age.size)?;
            self.is_torn = false;
        }
        let name = rotation::old_name(self.folder.name(), self.first);
        let old = self.folder.folder().join(&name);
        fs::rename(&self.settings.path, &old)?;
        match open(&self.settings.path) {
            Ok(opened) => drop(self.begin_in(opened, 0)),
            Err(error) => {
                fs::rename(&old, &self.settings.path)?;
                return Err(error);
            }
        }
        File::open(self.folder.folder())?.sync_all()?;
        Ok(name.to_string_lossy().into_owned())
    }

    /// Removes surplus files, but for those with lines behind `taken`.
    ///
    /// # Errors
    /// The operating system's error: files that were not removed stay.
    pub(super) fn remove_surplus(&mut self, taken: u64) -> io::Result<SurplusFiles> {
        if !self.is_regular {
            return Ok(SurplusFiles { removed: Vec::new(), held: 0 });
        }
        let (old, now) = (self.folder.old_files()?, SystemTime::now());
        let surplus = rotation::surplus(&old, self.settings.keep, taken);
        for (at, (file, _)) in surplus.removed.iter().enumerate() {
            // No record is younger than the first one of the next file.
            let next = old.get(at + 1).map(|next| self.folder.folder().join(next));
            let youngest = next.map_or(Some(now), |next| time_of_first_line(&next));
            fs::remove_file(self.folder.folder().join(file))?;
            self.retention.note_removed(&file.to_string_lossy(), youngest, now);
        }
        self.look_at_old_files()?;
        Ok(surplus)
    }
}

/// Opens a file for appending, and locks a regular file.
pub(super) fn open(path: &Path) -> io::Result<(File, bool)> {
    let file = OpenOptions::new().read(true).append(true).create(true).mode(0o600).open(path)?;
    let is_regular = file.metadata()?.is_file();
    if is_regular {
        file.try_lock().map_err(io::Error::from)?;
    }
    Ok((file, is_regular))
}

fn time_of(line: &ChainedLine) -> Option<SystemTime> {
    OffsetDateTime::parse(&line.time, &Rfc3339).ok().map(SystemTime::from)
}

/// The time of the first record of a file, if the file can be read.
fn time_of_first_line(path: &Path) -> Option<SystemTime> {
    let mut line = Vec::new();
    BufReader::new(File::open(path).ok()?).take(TAIL).read_until(b'\n', &mut line).ok()?;
    time_of(&ChainedLine::read(line.strip_suffix(b"\n")?).ok()?)
}

/// The last bytes of a file.
pub(super) fn tail(file: &File, length: u64) -> io::Result<Vec<u8>> {
    let size = length.min(TAIL);
    let mut tail = vec![0; usize::try_from(size).unwrap_or(0)];
    file.read_exact_at(&mut tail, length - size)?;
    Ok(tail)
}

/// The length of `tail` up to its last whole line, and the end of the chain there. A crash of the machine may
/// leave whole lines of other bytes behind the last synced line.
pub(super) fn last_line(tail: &[u8]) -> (usize, Option<ChainEnd>) {
    let mut end = tail.len();
    while let Some(line_break) = tail[..end].iter().rposition(|byte| *byte == b'\n') {
        let begin = tail[..line_break].iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        if let Ok(line) = ChainedLine::read(&tail[begin..line_break]) {
            return (line_break + 1, Some(line.end()));
        }
        end = line_break;
    }
    (0, None)
}

/// True if the process that wrote these lines neither stopped nor left them to a successor: behind the stop
/// and the succession there are heads at most.
fn is_unstopped(lines: &[u8]) -> bool {
    let lines = lines.split(|byte| *byte == b'\n').rev().filter(|line| !line.is_empty());
    let mut read = lines.filter_map(|line| ChainedLine::read(line).ok());
    read.find(|line| line.event != HEAD).is_some_and(|line| !is_orderly_end(&line.event))
}

/// Appends the torn end of a file to a file beside.
fn keep_torn(path: &Path, torn: &[u8]) -> io::Result<()> {
    let mut beside = path.as_os_str().to_owned();
    beside.push(".torn");
    let mut file = OpenOptions::new().append(true).create(true).mode(0o600).open(beside)?;
    file.write_all(torn)?;
    file.write_all(b"\n")?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::audit::chain::Chain;

    fn settings(folder: &Path) -> AuditFileSettings {
        let path = folder.join("audit.log");
        AuditFileSettings { path, max_size: 1 << 20, max_age: None, keep: 2, keep_for: None }
    }

    fn open_file(settings: &AuditFileSettings) -> Result<ContinuedFile, AuditFileError> {
        AuditFile::open(settings, Arc::default())
    }

    fn write(file: &mut AuditFile, chain: &mut Chain, event: &str) {
        let mut line = Vec::new();
        chain.append(format!("{{\"time\":\"t\",\"event\":\"{event}\"}}").as_bytes(), &mut line);
        file.append(&line, chain.end.seq, &chain.end, SystemTime::now()).unwrap();
    }

    #[test]
    fn a_torn_end_is_moved_aside_and_the_chain_goes_on() {
        let folder = tempfile::tempdir().unwrap();
        let settings = settings(folder.path());
        let ContinuedFile { mut file, end, previous, torn, .. } = open_file(&settings).unwrap();
        assert_eq!((end.seq, previous, torn), (0, None, 0));
        let mut chain = Chain::new("a", end);
        write(&mut file, &mut chain, "x");
        write(&mut file, &mut chain, "y");
        assert!(matches!(open_file(&settings), Err(AuditFileError::InUse(_))));
        drop(file);
        let whole = fs::read(&settings.path).unwrap();
        for torn in [&whole[..30], &b"\0\0\0\0\n\0\0"[..]] {
            fs::write(&settings.path, [&whole, torn].concat()).unwrap();
            let continued = open_file(&settings).unwrap();
            assert_eq!(continued.end, chain.end);
            assert_eq!(continued.torn, torn.len() as u64);
            assert_eq!(fs::read(&settings.path).unwrap(), whole);
        }
        let kept = fs::read(folder.path().join("audit.log.torn")).unwrap();
        assert_eq!(kept, [&whole[..30], b"\n\0\0\0\0\n\0\0\n"].concat());
        // Nothing but a torn line: no number is given twice.
        fs::write(&settings.path, &whole[..30]).unwrap();
        let continued = open_file(&settings).unwrap();
        let previous = continued.previous.as_deref();
        assert_eq!((continued.end, previous, continued.is_moved), (chain.end, Some("audit.log"), true));
        drop(continued.file);
        fs::write(&settings.path, "some text\n").unwrap();
        assert!(matches!(open_file(&settings), Err(AuditFileError::NotAudit(_))));
    }

    #[test]
    fn old_files_are_named_for_their_first_line_and_removed() {
        let folder = tempfile::tempdir().unwrap();
        let settings = settings(folder.path());
        let mut file = open_file(&settings).unwrap().file;
        let mut chain = Chain::new("a", ChainEnd::default());
        let mut removed = Vec::new();
        for _ in 0..4 {
            write(&mut file, &mut chain, "x");
            write(&mut file, &mut chain, "y");
            let first = chain.end.seq - 1;
            assert_eq!(file.rotate().unwrap(), format!("audit.log.{first:020}"));
            let surplus = file.remove_surplus(u64::MAX).unwrap();
            removed.extend(surplus.removed.into_iter().map(|(name, _)| name));
        }
        assert_eq!(removed, ["audit.log.00000000000000000001", "audit.log.00000000000000000003"]);
        let old = file.folder.old_files().unwrap();
        assert_eq!(old, ["audit.log.00000000000000000005", "audit.log.00000000000000000007"]);
        drop(file);
        // The process ended between the rotation and the first line of the new file.
        let continued = open_file(&settings).unwrap();
        assert_eq!(continued.end, chain.end);
        assert_eq!(continued.previous.as_deref(), Some("audit.log.00000000000000000007"));
    }

    #[test]
    fn a_full_disk_is_an_error_each_time() {
        let full = AuditFileSettings {
            path: "/dev/full".into(),
            max_size: 1,
            max_age: None,
            keep: 0,
            keep_for: None,
        };
        let mut file = open_file(&full).unwrap().file;
        assert!(!file.is_due(5, SystemTime::now()));
        for _ in 0..2 {
            let error = file.append(b"x\n", 1, &ChainEnd::default(), SystemTime::now()).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        }
    }
}
