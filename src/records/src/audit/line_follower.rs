//! Reads the lines of the audit files for a sink, behind the last line that its receiver has taken.
//!
//! Owns: the place in the files, kept over a restart. Must not know: how lines are sent, or who names the
//! files. Invariants: a line is read after its sync, and before the files are removed by number; the lines
//! are found by their numbers, whatever the names of the files; a line is counted as taken after the receiver
//! has it, so that a crash leads to a second copy and never to a gap.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Arc;

use super::audit_folder::{AuditFolder, FileId};
use super::chain::ChainEnd;
use super::chain_end_file::{ChainEndFile, KeptEnd};
use super::sink_lines::{SinkLimits, SinkLines};
use super::sink_state::SinkState;
use super::written_lines::WrittenLines;
use keyward_config::audit_settings::SINK_BYTES;

/// Looks for lines that are in no file before they are counted as lost: a tool may be renaming a file.
const LOOKS: u32 = 3;

/// The reader of one sink.
pub(super) struct LineFollower {
    folder: AuditFolder,
    written: Arc<WrittenLines>,
    state: Arc<SinkState>,
    taken: ChainEnd,
    kept: ChainEndFile,
    open: Option<OpenedFile>,
    buffer: Vec<u8>,
    looks: u32,
}

/// Where a sink begins to read.
pub(super) struct FollowerBegin {
    pub(super) taken: ChainEnd,
    kept: ChainEndFile,
}

impl FollowerBegin {
    /// Behind the last line taken before the process began. A sink that is new begins at the end of the
    /// chain; one whose place cannot be read, at the oldest line.
    pub(super) fn read(audit_file: &Path, sink: &str, end: &ChainEnd) -> io::Result<Self> {
        let mut kept = ChainEndFile::beside(audit_file, &format!("sent-to-{sink}"));
        let taken = match kept.read() {
            KeptEnd::Known(taken, _) if taken.seq <= end.seq => taken,
            KeptEnd::Missing => end.clone(),
            KeptEnd::Known(..) | KeptEnd::Unreadable => {
                tracing::warn!(sink, "the place in the audit files is not known: all records are sent again");
                let oldest = AuditFolder::of(audit_file).chain_files()?.first().map(|(first, _)| *first);
                ChainEnd { seq: oldest.map_or(end.seq, |first| first - 1), ..ChainEnd::default() }
            }
        };
        kept.write(&taken);
        Ok(Self { taken, kept })
    }
}

impl LineFollower {
    pub(super) fn new(
        audit_file: &Path,
        begin: FollowerBegin,
        state: Arc<SinkState>,
        written: Arc<WrittenLines>,
    ) -> Self {
        let FollowerBegin { taken, kept } = begin;
        let folder = AuditFolder::of(audit_file);
        Self { folder, written, state, taken, kept, open: None, buffer: Vec::new(), looks: 0 }
    }

    /// Waits for lines, and reads as many as fit. `None` if no line follows any more.
    ///
    /// # Errors
    /// The files cannot be read now, or a line is in none of them.
    pub(super) fn next(&mut self, most: SinkLimits) -> io::Result<Option<SinkLines>> {
        loop {
            let Some(last) = self.written.wait_beyond(self.taken.seq) else { return Ok(None) };
            if let Some(lines) = self.read(last, most)? {
                self.looks = 0;
                return Ok(Some(lines));
            }
            self.looks += 1;
            if self.looks < LOOKS {
                return Err(io::Error::new(io::ErrorKind::NotFound, "the next records are in no audit file"));
            }
            self.looks = 0;
            self.state.note_gap(self.taken.seq, last + 1);
            self.take(ChainEnd { seq: last, ..ChainEnd::default() });
        }
    }

    /// Notes that the receiver has the first `sent` of the lines.
    pub(super) fn note_taken(&mut self, lines: &SinkLines, sent: u64) {
        let all = lines.bytes.split(|byte| *byte == b'\n');
        let last = usize::try_from(sent).ok().and_then(|sent| sent.checked_sub(1));
        if let Some(end) = last.and_then(|last| all.clone().nth(last)).and_then(ChainEnd::of_line) {
            self.take(end);
        }
    }

    /// True once the sink is to end.
    pub(super) fn is_closing(&self) -> bool {
        self.written.is_closing()
    }

    fn take(&mut self, end: ChainEnd) {
        // A place written in the same moment is an older one: lines are sent twice.
        if !self.written.is_left() {
            self.kept.write(&end);
        }
        self.state.note_taken(end.seq);
        self.taken = end;
    }

    /// Reads lines behind the last one taken, up to the number `last`.
    fn read(&mut self, last: u64, most: SinkLimits) -> io::Result<Option<SinkLines>> {
        self.buffer.resize(SINK_BYTES, 0);
        if let Some(lines) = self.read_open(last, most)? {
            return Ok(Some(lines));
        }
        for opened in self.open_others()? {
            self.open = Some(opened);
            if let Some(lines) = self.read_open(last, most)? {
                return Ok(Some(lines));
            }
        }
        Ok(None)
    }

    fn read_open(&mut self, last: u64, most: SinkLimits) -> io::Result<Option<SinkLines>> {
        let Some(open) = &mut self.open else { return Ok(None) };
        open.read(&self.state, self.taken.seq, last, most, &mut self.buffer)
    }

    /// Opens the file that has the next line by the number of its first line, and the file behind.
    fn open_others(&self) -> io::Result<Vec<OpenedFile>> {
        let _names = self.written.hold_names();
        let files = self.folder.chain_files()?;
        let behind = files.partition_point(|(first, _)| *first <= self.taken.seq + 1);
        let candidates = files.iter().skip(behind.saturating_sub(1)).take(2);
        let opened = candidates.filter_map(|(_, path)| match OpenedFile::open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            opened => Some(opened),
        });
        let opened: Vec<_> = opened.collect::<io::Result<_>>()?;
        let present = self.open.as_ref().map(|open| open.id);
        Ok(opened.into_iter().filter(|opened| Some(opened.id) != present).collect())
    }
}

/// A file, and the place in it.
struct OpenedFile {
    file: File,
    id: FileId,
    offset: u64,
}

impl OpenedFile {
    fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        let id = FileId::of(&file.metadata()?);
        Ok(Self { file, id, offset: 0 })
    }

    /// Reads lines with numbers above `taken`, up to `last`. `None` if the file has none. A line above `last`
    /// may be torn, and is read again later.
    fn read(
        &mut self,
        state: &SinkState,
        taken: u64,
        last: u64,
        most: SinkLimits,
        buffer: &mut [u8],
    ) -> io::Result<Option<SinkLines>> {
        if self.offset > self.file.metadata()?.len() {
            // The file was truncated in place, after a copy.
            self.offset = 0;
        }
        let (mut lines, mut before) = (SinkLines::default(), taken);
        loop {
            let length = self.file.read_at(buffer, self.offset)?;
            let read = &buffer[..length];
            let mut done = 0;
            let whole = read.split_inclusive(|byte| *byte == b'\n').filter(|line| line.ends_with(b"\n"));
            for line in whole {
                let end = line.split_last().and_then(|(_, line)| ChainEnd::of_line(line));
                match end.map(|end| end.seq) {
                    Some(number) if number > last || !most.fits(&lines, line.len()) => break,
                    Some(number) if number > before => {
                        state.note_gap(before, number);
                        lines.push(line);
                        before = number;
                    }
                    // Sent already, or no line of a chain.
                    _ => {}
                }
                done += line.len();
            }
            if done == 0 && length == buffer.len() && lines.count == 0 && !read.contains(&b'\n') {
                // Longer than any line.
                done = length;
            }
            self.offset += done as u64;
            if lines.count > 0 {
                state.note_held(before);
                return Ok(Some(lines));
            }
            if done == 0 {
                return Ok(None);
            }
        }
    }
}
