//! Checks audit files: every line, the chain, the signatures of heads.
//!
//! Owns: the order of the checks, and the report. Must not know: where the bytes come from. Invariants: a
//! change of any byte of a file is a fault; the first bad line is named; files are checked in the order of
//! their records.

use std::fmt;
use std::io::{self, BufRead, Read as _};

use super::chain::{BadLine, ChainEnd, ChainedLine, NO_HASH};
use super::head_signature::{HeadPublicKey, SignedHead};

/// Bytes of a line at most, far more than a record has.
const LONGEST_LINE: u64 = 1 << 20;

/// Checks lines one after the other.
pub struct ChainCheck<'k> {
    key: Option<&'k HeadPublicKey>,
    end: Option<ChainEnd>,
    replica: Option<String>,
    report: ChainReport,
}

/// The result of a check without a fault.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChainReport {
    /// The number of lines.
    pub lines: u64,
    /// The number and the time of the first line.
    pub first: Option<(u64, String)>,
    /// The number and the time of the last line.
    pub last: Option<(u64, String)>,
    /// The name of the file before the first file, if the chain begins there.
    pub previous_file: Option<String>,
    /// True if the first line is the first line of a chain.
    pub is_from_begin: bool,
    /// Records counted as lost.
    pub lost: u64,
    /// The number and the time of the last head with a verified signature.
    pub signed: Option<(u64, String)>,
    /// True if signatures were checked.
    pub is_key_known: bool,
}

/// A fault of a file.
#[derive(Debug, thiserror::Error)]
pub enum ChainFault {
    /// The line alone is bad.
    #[error("{0}")]
    Line(#[from] BadLine),
    /// The line does not follow the line before.
    #[error("the line does not follow the line before: a line was changed, removed, added or moved")]
    Broken,
    /// Another replica wrote the line.
    #[error(
        "replica {writer:?} wrote the line, not {chain:?}: a chain is of one replica, and a file of one chain"
    )]
    Replica {
        /// The replica named by the line.
        writer: String,
        /// The replica that wrote the line before.
        chain: String,
    },
    /// The signature of a head is missing, or of another key, or of another chain.
    #[error("the head's signature is missing, or is not of this key and this chain")]
    Signature,
    /// The file ends within a line.
    #[error("the file ends within a line")]
    Torn,
    /// The file has no line.
    #[error("the file has no record")]
    Empty,
    /// No head is signed.
    #[error("no head of the chain is signed")]
    Unsigned,
    /// The file cannot be read.
    #[error("{0}")]
    Unreadable(#[from] io::Error),
}

impl<'k> ChainCheck<'k> {
    /// Begins a check, with the public key of the heads if known.
    #[must_use]
    pub fn new(key: Option<&'k HeadPublicKey>) -> Self {
        let report = ChainReport { is_key_known: key.is_some(), ..ChainReport::default() };
        Self { key, end: None, replica: None, report }
    }

    /// Checks the lines of the next file. Upon a fault, `line` is the number of the bad line in the file,
    /// counted from 1.
    ///
    /// # Errors
    /// The first fault.
    pub fn file(&mut self, mut file: impl BufRead, line: &mut u64) -> Result<(), ChainFault> {
        let mut bytes = Vec::new();
        *line = 0;
        loop {
            bytes.clear();
            *line += 1;
            let length = (&mut file).take(LONGEST_LINE).read_until(b'\n', &mut bytes)?;
            match bytes.split_last() {
                None if length == 0 && *line == 1 => return Err(ChainFault::Empty),
                None => return Ok(()),
                Some((b'\n', line)) => self.line(line)?,
                Some(_) => return Err(ChainFault::Torn),
            }
        }
    }

    fn line(&mut self, line: &[u8]) -> Result<(), ChainFault> {
        let line = ChainedLine::read(line)?;
        let follows = |end: &ChainEnd| line.prev == end.hash && line.seq == end.seq + 1;
        if let Some(chain) = self.replica.as_ref().filter(|chain| **chain != line.replica) {
            // A replica may be renamed between two starts.
            if line.event != "start" || !self.end.as_ref().is_some_and(follows) {
                return Err(ChainFault::Replica { writer: line.replica, chain: chain.clone() });
            }
            self.replica = Some(line.replica.clone());
        }
        match &self.end {
            Some(end) if !follows(end) => return Err(ChainFault::Broken),
            Some(_) => {}
            None if (line.seq == 1) != (line.prev == NO_HASH) => return Err(ChainFault::Broken),
            // Every file but a chain's first begins with a line that names the file before.
            None if line.seq != 1 && line.previous_file.is_none() => return Err(ChainFault::Broken),
            None => {
                self.replica = Some(line.replica.clone());
                self.report.first = Some((line.seq, line.time.clone()));
                self.report.is_from_begin = line.seq == 1;
                self.report.previous_file = line.previous_file.clone();
            }
        }
        if line.event == "head"
            && let Some(key) = self.key
        {
            let head =
                SignedHead { replica: &line.replica, seq: line.seq, time: &line.time, prev: line.prev };
            if !line.signature.as_ref().is_some_and(|signature| head.is_signed(signature, key)) {
                return Err(ChainFault::Signature);
            }
            self.report.signed = Some((line.seq, line.time.clone()));
        }
        if line.event == "lost" {
            self.report.lost += line.count.unwrap_or(0);
        }
        self.report.lines += 1;
        self.end = Some(line.end());
        self.report.last = Some((line.seq, line.time));
        Ok(())
    }

    /// Ends the check.
    ///
    /// # Errors
    /// The key is known, and no head was signed.
    pub fn finish(self) -> Result<ChainReport, ChainFault> {
        if self.key.is_some() && self.report.signed.is_none() {
            return Err(ChainFault::Unsigned);
        }
        Ok(self.report)
    }
}

impl fmt::Display for ChainReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Some((first, from)), Some((last, to))) = (&self.first, &self.last) else {
            return writeln!(f, "no records");
        };
        writeln!(f, "{} records, {first} to {last}, {from} to {to}: the chain is whole", self.lines)?;
        match (&self.previous_file, self.is_from_begin) {
            (_, true) => {}
            (Some(file), false) => writeln!(f, "the records before are in {file}")?,
            (None, false) => writeln!(f, "earlier records are not in these files")?,
        }
        if self.lost > 0 {
            writeln!(f, "{} records were lost, as the log says itself", self.lost)?;
        }
        match &self.signed {
            Some((seq, time)) if seq == last => {
                writeln!(f, "signed up to the last record ({time})")
            }
            Some((seq, time)) => {
                writeln!(f, "signed up to record {seq} ({time}); {} records follow unsigned", last - seq)
            }
            None => writeln!(
                f,
                "signatures were not checked: without --public-key, a chain that was rewritten as a whole \
                 looks the same"
            ),
        }
    }
}
