//! Checks audit files: every line, the chain, the signatures of heads.
//!
//! Owns: the order of the checks, and the report. Must not know: where the bytes come from. Invariants: a
//! change of any byte of a file is a fault; the first bad line is named; files are checked in the order of
//! their records; with the public key, records without a head for longer than due are a fault.

use std::fmt;
use std::io::{self, BufRead, Read as _};

use time::format_description::well_known::Rfc3339;
use time::{Duration, OffsetDateTime};

use super::chain::{BadLine, ChainEnd, ChainedLine, HEAD, NO_HASH, is_orderly_end};
use super::head_signature::{HeadPublicKey, SignedHead};

/// Bytes of a line at most, far more than a record has.
const LONGEST_LINE: u64 = 1 << 20;
/// How long records may stand without a head. The recorder writes one each 60 seconds in which it has
/// records; the rest is for a slow disk and for what a suspended machine counts.
const HEAD_DUE: Duration = Duration::seconds(120);
/// A gap between two records counts so much at most: the machine was suspended, its clock was set forward, or
/// there was nothing to record.
const LONGEST_GAP: Duration = Duration::seconds(30);
/// Records of several threads are so far out of order at most. A time that is further back is of a clock that
/// was set back.
const DISORDER: Duration = Duration::seconds(5);

/// Processes without a stop that a report names one by one: the last ones.
const UNSTOPPED_TOLD: usize = 5;

/// Checks lines one after the other.
pub struct ChainCheck<'k> {
    key: Option<&'k HeadPublicKey>,
    end: Option<ChainEnd>,
    replica: Option<String>,
    unsigned: Option<UnsignedRecords>,
    /// The last line, but for heads, is the stop of a process or its succession.
    is_stopped: bool,
    report: ChainReport,
}

/// The records since the last head, and how long they have waited for the next one.
struct UnsignedRecords {
    /// The time of the first of them.
    from: String,
    /// The latest time.
    latest: OffsetDateTime,
    waited: Duration,
}

impl UnsignedRecords {
    fn begin(from: &str, at: OffsetDateTime) -> Self {
        Self { from: from.to_owned(), latest: at, waited: Duration::ZERO }
    }

    fn add(&mut self, at: OffsetDateTime) {
        let gap = at - self.latest;
        if gap.is_positive() || gap < -DISORDER {
            self.waited += gap.clamp(Duration::ZERO, LONGEST_GAP);
            self.latest = at;
        }
    }
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
    /// True if that file was removed by somebody else.
    pub is_previous_removed: bool,
    /// True if the first line is the first line of a chain.
    pub is_from_begin: bool,
    /// Records counted as lost.
    pub lost: u64,
    /// The number and the time of the last line of each process that did not end with a stop.
    pub unstopped: Vec<(u64, String)>,
    /// The number and the time of the last head with a verified signature.
    pub signed: Option<(u64, String)>,
    /// The number of processes that began after this head.
    pub starts_unsigned: u64,
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
    /// The line does not follow the line before, and names a file that somebody else moved or removed.
    #[error(
        "the line does not follow the line before: the records before stood in {file}, which somebody {}",
        removal(*.is_removed)
    )]
    Moved {
        /// The file.
        file: String,
        /// True if the file was removed.
        is_removed: bool,
    },
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
    /// No head signs the records before this line for longer than due.
    #[error(
        "no head for longer than two minutes, since the record of {since}: heads were removed, or these \
         records were written without the key"
    )]
    Overdue {
        /// The time of the first record without a head.
        since: String,
    },
    /// The file ends within a line.
    #[error(
        "the file ends within a line: Keyward is writing it at this moment, its disk is full, or the file \
         was cut"
    )]
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
        Self { key, end: None, replica: None, unsigned: None, is_stopped: false, report }
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
            Some(end) if !follows(end) => return Err(gap(&line)),
            Some(_) => {}
            None if (line.seq == 1) != (line.prev == NO_HASH) => return Err(ChainFault::Broken),
            // Every file but a chain's first begins with a line that names the file before.
            None if line.seq != 1 && line.previous_file.is_none() => return Err(ChainFault::Broken),
            None => {
                self.replica = Some(line.replica.clone());
                self.report.first = Some((line.seq, line.time.clone()));
                self.report.is_from_begin = line.seq == 1;
                self.report.previous_file = line.previous_file.clone();
                self.report.is_previous_removed = line.is_moved && line.removed_file.is_some();
            }
        }
        if let Some(key) = self.key {
            self.check_signed(&line, key)?;
        }
        if line.event == "lost" {
            self.report.lost += line.count.unwrap_or(0);
        }
        if line.event == "start" && !self.is_stopped {
            self.report.unstopped.extend(self.report.last.take());
        }
        if line.event != HEAD {
            self.is_stopped = is_orderly_end(&line.event);
        }
        self.report.lines += 1;
        self.end = Some(line.end());
        self.report.last = Some((line.seq, line.time));
        Ok(())
    }

    /// Checks the signature of a head, and how long other records have been without a head.
    fn check_signed(&mut self, line: &ChainedLine<'_>, key: &HeadPublicKey) -> Result<(), ChainFault> {
        if line.event == "head" {
            let head =
                SignedHead { replica: &line.replica, seq: line.seq, time: &line.time, prev: line.prev };
            if !line.signature.as_ref().is_some_and(|signature| head.is_signed(signature, key)) {
                return Err(ChainFault::Signature);
            }
            self.report.signed = Some((line.seq, line.time.clone()));
            self.report.starts_unsigned = 0;
            self.unsigned = None;
            return Ok(());
        }
        let at = OffsetDateTime::parse(&line.time, &Rfc3339).map_err(|_| BadLine::Unreadable)?;
        if line.event == "start" {
            // The process before may have crashed before its next head was due.
            self.report.starts_unsigned += 1;
            self.unsigned = None;
        }
        match &mut self.unsigned {
            Some(unsigned) => {
                unsigned.add(at);
                if unsigned.waited > HEAD_DUE {
                    return Err(ChainFault::Overdue { since: unsigned.from.clone() });
                }
            }
            // Without records no head was due: the gap before the first of them does not count.
            None => self.unsigned = Some(UnsignedRecords::begin(&line.time, at)),
        }
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

/// The fault of a line that does not follow the line before.
fn gap(line: &ChainedLine<'_>) -> ChainFault {
    match &line.previous_file {
        Some(file) if line.is_moved => {
            ChainFault::Moved { file: file.clone(), is_removed: line.removed_file.is_some() }
        }
        _ => ChainFault::Broken,
    }
}

fn removal(is_removed: bool) -> &'static str {
    if is_removed { "removed" } else { "moved: is it whole, and among these files?" }
}

impl fmt::Display for ChainReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Some((first, from)), Some((last, to))) = (&self.first, &self.last) else {
            return writeln!(f, "no records");
        };
        writeln!(f, "{} records, {first} to {last}, {from} to {to}: the chain is whole", self.lines)?;
        match (&self.previous_file, self.is_from_begin) {
            (_, true) => {}
            (Some(file), false) if self.is_previous_removed => {
                writeln!(f, "the records before were in {file}, which somebody removed")?;
            }
            (Some(file), false) => writeln!(f, "the records before are in {file}")?,
            (None, false) => writeln!(f, "earlier records are not in these files")?,
        }
        if self.lost > 0 {
            writeln!(f, "{} records were lost, as the log says itself", self.lost)?;
        }
        if let Some(more) = self.unstopped.len().checked_sub(UNSTOPPED_TOLD).filter(|more| *more > 0) {
            writeln!(f, "{more} processes did not end with a stop before these:")?;
        }
        for (seq, time) in self.unstopped.iter().rev().take(UNSTOPPED_TOLD).rev() {
            writeln!(
                f,
                "the process that wrote up to record {seq} ({time}) did not end with a stop: records of its \
                 last calls may be missing"
            )?;
        }
        match &self.signed {
            Some((seq, time)) if seq == last => {
                writeln!(f, "signed up to the last record ({time})")
            }
            Some((seq, time)) => {
                write!(f, "signed up to record {seq} ({time}); {} records follow unsigned", last - seq)?;
                match self.starts_unsigned {
                    0 => writeln!(f),
                    starts => writeln!(f, " (starts among them: {starts})"),
                }
            }
            None => writeln!(
                f,
                "signatures were not checked: without --public-key, a chain that was rewritten as a whole \
                 looks the same"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use super::*;
    use crate::audit::chain::Chain;
    use crate::audit::head_signature::write_key_pair;
    use crate::audit::record::Timestamp;
    use keyward_base::pem::PrivateKey;

    /// A log written by hand, by a clock that a test moves.
    struct Written {
        chain: Chain,
        lines: Vec<u8>,
        now: Duration,
        key: PrivateKey,
        public: HeadPublicKey,
    }

    impl Written {
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("key");
            let public = HeadPublicKey::read(&write_key_pair(&path).unwrap()).unwrap();
            let (key, now) = (PrivateKey::read(&path).unwrap(), Duration::from_secs(1_800_000_000));
            let chain = Chain::new("a", ChainEnd::default());
            let mut new = Self { chain, lines: Vec::new(), now, key, public };
            new.record("start");
            new
        }

        fn time(&self) -> String {
            Timestamp(UNIX_EPOCH + self.now).to_string()
        }

        fn append(&mut self, fields: &str) {
            let body = format!("{{\"time\":\"{}\",{fields}}}", self.time());
            self.chain.append(body.as_bytes(), &mut self.lines);
        }

        fn record(&mut self, event: &str) {
            self.append(&format!("\"event\":\"{event}\""));
        }

        /// Records, each so many seconds after the one before.
        fn records(&mut self, count: u32, seconds: u64) {
            for _ in 0..count {
                self.now += Duration::from_secs(seconds);
                self.record("change");
            }
        }

        fn head(&mut self) {
            let (seq, prev, time) = (self.chain.end.seq + 1, self.chain.end.hash.clone(), self.time());
            let head = SignedHead { replica: "a", seq, time: &time, prev: &prev };
            let signature = head.sign(&self.key).unwrap();
            self.append(&format!("\"event\":\"head\",\"signature\":\"{signature}\""));
        }

        /// Minutes of a process under load, each with its head.
        fn minutes(&mut self, count: u32) {
            for _ in 0..count {
                self.records(60, 1);
                self.head();
            }
        }

        fn check(&self) -> (Result<ChainReport, ChainFault>, u64) {
            let (mut check, mut line) = (ChainCheck::new(Some(&self.public)), 0);
            let checked = check.file(&*self.lines, &mut line);
            (checked.and_then(|()| check.finish()), line)
        }

        fn report(&self) -> ChainReport {
            let (outcome, line) = self.check();
            outcome.unwrap_or_else(|fault| panic!("line {line}: {fault}"))
        }

        /// The line without a head for too long, and since when.
        fn overdue(&self) -> (u64, String) {
            match self.check() {
                (Err(ChainFault::Overdue { since }), line) => (line, since),
                (other, line) => panic!("line {line}: {other:?}"),
            }
        }

        /// Does as somebody who may write the file and has no key: drops the heads behind `line`, changes
        /// that line, and hashes the rest anew.
        fn rewritten_from(mut self, line: usize, change: impl Fn(&str) -> String) -> Self {
            let whole = String::from_utf8(std::mem::take(&mut self.lines)).unwrap();
            self.chain = Chain::new("a", ChainEnd::default());
            for (number, text) in whole.lines().enumerate() {
                let fields: serde_json::Map<_, _> = serde_json::from_str(text).unwrap();
                if number >= line && fields["event"] == "head" {
                    continue;
                }
                let begin = text.find("\"time\"").unwrap();
                let end = text.rfind(",\"hash\"").unwrap();
                let body = format!("{{{}}}", &text[begin..end]);
                let body = if number == line { change(&body) } else { body };
                self.chain.append(body.as_bytes(), &mut self.lines);
            }
            self
        }
    }

    #[test]
    fn a_log_that_was_rewritten_without_its_heads_is_a_fault_after_two_minutes() {
        let mut log = Written::new();
        log.minutes(10);
        assert_eq!(log.report().signed.map(|(seq, _)| seq), Some(611));
        // Of the minutes 4 to 10: the last head is line 184, the next record is of 181 s after the start.
        let forged = log.rewritten_from(200, |body| body.replacen("change", "login", 1));
        let (line, since) = forged.overdue();
        assert_eq!((line, &*since), (184 + 1 + 121, "2027-01-15T08:03:01.000000Z"));
    }

    #[test]
    fn less_than_two_minutes_may_follow_unsigned_and_the_report_says_so() {
        let mut log = Written::new();
        log.minutes(2);
        log.records(121, 1);
        let report = log.report();
        assert_eq!(report.signed.as_ref().map(|(seq, _)| *seq), Some(123));
        assert!(report.to_string().contains("; 121 records follow unsigned\n"), "{report}");
        log.records(1, 1);
        assert_eq!(log.overdue().0, 123 + 122);
    }

    #[test]
    fn a_log_with_records_each_ten_minutes_needs_a_head_for_each() {
        let mut log = Written::new();
        for _ in 0..50 {
            log.records(1, 600);
            log.now += Duration::from_secs(60);
            log.head();
        }
        log.report();
        let forged = log.rewritten_from(20, str::to_owned);
        assert_eq!(forged.overdue().0, 25, "five gaps count more than two minutes");
    }

    #[test]
    fn a_suspended_machine_and_a_clock_that_is_set_are_no_fault() {
        let mut log = Written::new();
        for _ in 0..5 {
            // An hour's sleep within a minute of work, and another right behind a head.
            log.records(30, 1);
            log.records(1, 3600);
            log.records(30, 1);
            log.head();
            log.now += Duration::from_secs(3600);
        }
        for _ in 0..5 {
            log.records(30, 1);
            log.now -= Duration::from_secs(7200);
            log.records(30, 1);
            log.head();
        }
        log.report();
        // Without heads, a clock that was set back hides nothing.
        assert_eq!(log.rewritten_from(330, str::to_owned).overdue().0, 435, "123 seconds, less two gaps");
    }

    /// Each thread's records are in order, those of two threads are not.
    #[test]
    fn the_disorder_of_threads_counts_once() {
        let mut log = Written::new();
        for _ in 0..600 {
            log.records(1, 2);
            log.now -= Duration::from_millis(1900);
            log.record("change");
        }
        log.head();
        log.report();
    }

    #[test]
    fn a_process_that_crashes_before_its_head_is_no_fault_and_its_starts_are_told() {
        let mut log = Written::new();
        log.minutes(1);
        for _ in 0..5 {
            log.records(59, 1);
            log.now += Duration::from_secs(5);
            log.record("start");
        }
        let report = log.report();
        let unstopped: Vec<_> = report.unstopped.iter().map(|(last, _)| *last).collect();
        assert_eq!(unstopped, [121, 181, 241, 301, 361]);
        assert!(
            report.to_string().contains("300 records follow unsigned (starts among them: 5)"),
            "{report}"
        );
        log.records(59, 1);
        log.head();
        log.report();
        assert_eq!(log.report().starts_unsigned, 0);
    }
}
