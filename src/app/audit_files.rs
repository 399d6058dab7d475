//! `keyward audit verify` and `keyward audit search`: reads the files of an audit log.
//!
//! Owns: opening the files, their replicas and their order. Must not know: the checks, the conditions of a
//! search. Invariants: the files of a replica are read in the order of their records, whatever the order of
//! the arguments; the files of each replica are checked as a chain of their own; a search holds one line and
//! one open file of each chain.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fmt;
use std::fs::File;
use std::io::{self, BufRead as _, BufReader, Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};

use serde::ser::SerializeStruct as _;
use serde::{Deserialize, Serialize, Serializer};

use keyward_records::audit::head_signature::{BadPublicKey, HeadPublicKey};
use keyward_records::audit::search::{AuditSearch, FoundRecord};
use keyward_records::audit::verify::{ChainCheck, ChainFault, ChainReport};

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

/// The result of a check: each replica's chain.
#[derive(Debug)]
pub struct VerifiedFiles {
    /// The replicas, by name.
    pub replicas: Vec<VerifiedReplica>,
}

/// The result of the check of one replica's chain.
#[derive(Debug)]
pub struct VerifiedReplica {
    /// The name of the replica in the last file; `None` for a file without a readable record.
    pub replica: Option<String>,
    /// The files, in the order of their records.
    pub files: Vec<PathBuf>,
    /// The report, or the first fault with the file and the line.
    pub outcome: Result<ChainReport, AuditFilesError>,
}

impl VerifiedFiles {
    /// True if no chain has a fault.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.replicas.iter().all(|replica| replica.outcome.is_ok())
    }
}

/// For programs: fields are added, never renamed.
impl Serialize for VerifiedFiles {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Replica<'a> {
            replica: Option<&'a str>,
            files: &'a [PathBuf],
            whole: bool,
            lines: Option<u64>,
            lost: Option<u64>,
            /// The last records of processes that did not end with a stop.
            unstopped: Option<Vec<u64>>,
            from_begin: Option<bool>,
            fault: Option<String>,
            report: Option<String>,
        }
        let row = |VerifiedReplica { replica, files, outcome }: &'_ VerifiedReplica| {
            let report = outcome.as_ref().ok();
            serde_json::to_value(Replica {
                replica: replica.as_deref(),
                files,
                whole: outcome.is_ok(),
                lines: report.map(|report| report.lines),
                lost: report.map(|report| report.lost),
                unstopped: report.map(|report| report.unstopped.iter().map(|(last, _)| *last).collect()),
                from_begin: report.map(|report| report.is_from_begin),
                fault: outcome.as_ref().err().map(ToString::to_string),
                report: report.map(ToString::to_string),
            })
        };
        let rows: Result<Vec<_>, _> = self.replicas.iter().map(row).collect();
        let mut fields = serializer.serialize_struct("VerifiedFiles", 2)?;
        fields.serialize_field("whole", &self.is_whole())?;
        fields.serialize_field("replicas", &rows.map_err(serde::ser::Error::custom)?)?;
        fields.end()
    }
}

impl fmt::Display for VerifiedFiles {
    /// The report of the one replica; or for each of several replicas its name, its files and its report.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let write = |f: &mut fmt::Formatter<'_>,
                     indent: &str,
                     outcome: &Result<ChainReport, AuditFilesError>| match outcome {
            Ok(report) => report.to_string().lines().try_for_each(|line| writeln!(f, "{indent}{line}")),
            Err(fault) => writeln!(f, "{indent}{fault}"),
        };
        if let [only] = &self.replicas[..] {
            return write(f, "", &only.outcome);
        }
        writeln!(f, "the files belong to {} replicas, each with a chain of its own", self.replicas.len())?;
        let names = self.replicas.iter().map(|replica| &replica.replica);
        let shared = names.clone().zip(names.skip(1)).find(|(one, next)| one == next && one.is_some());
        if let Some((Some(name), _)) = shared {
            writeln!(f, "several replicas have the name {name:?}: tell them apart by audit.replica")?;
        }
        for VerifiedReplica { replica, files, outcome } in &self.replicas {
            match replica {
                Some(name) => write!(f, "replica {name:?}:")?,
                None => write!(f, "of no replica:")?,
            }
            files.iter().try_for_each(|file| write!(f, " {}", file.display()))?;
            writeln!(f)?;
            write(f, "  ", outcome)?;
        }
        Ok(())
    }
}

/// Checks the files of each replica as one chain.
///
/// # Errors
/// A file or the public key cannot be read. The fault of a chain is in the result.
pub fn verify(files: &[PathBuf], public_key: Option<&Path>) -> Result<VerifiedFiles, AuditFilesError> {
    let key = public_key.map(|path| {
        HeadPublicKey::read(path).map_err(|source| AuditFilesError::Key { path: path.to_owned(), source })
    });
    let key = key.transpose()?;
    let files = chained(files).map(|path| AuditFileEnds::read(path)).collect::<Result<Vec<_>, _>>()?;
    let mut replicas = Vec::new();
    for files in by_replica(files).into_iter().flat_map(chains_of_one_name) {
        let replica = files.iter().rev().find_map(|file| file.replicas().last().cloned());
        let files: Vec<_> = files.into_iter().map(|file| file.path).collect();
        let outcome = verify_chain(&files, key.as_ref());
        replicas.push(VerifiedReplica { replica, files, outcome });
    }
    replicas.sort_by(|one, other| one.replica.cmp(&other.replica));
    Ok(VerifiedFiles { replicas })
}

/// Checks the files, in the order of their records, as one chain.
fn verify_chain(files: &[PathBuf], key: Option<&HeadPublicKey>) -> Result<ChainReport, AuditFilesError> {
    let mut check = ChainCheck::new(key);
    for path in files {
        let file = open(path)?;
        let mut line = 0;
        if let Err(fault) = check.file(file, &mut line) {
            return Err(AuditFilesError::Line { path: path.clone(), line, fault });
        }
    }
    check.finish().map_err(AuditFilesError::Whole)
}

/// The place of a line in a chain, as the line claims: a line with a fault has its place in the report too.
#[derive(Debug, Deserialize)]
struct ClaimedPlace {
    seq: u64,
    replica: String,
    prev: String,
    hash: String,
}

/// The ends of a file: `None` for a line that cannot be read.
struct AuditFileEnds {
    path: PathBuf,
    first: Option<ClaimedPlace>,
    last: Option<ClaimedPlace>,
}

impl AuditFileEnds {
    fn read(path: &Path) -> Result<Self, AuditFilesError> {
        let unreadable = |source| AuditFilesError::Unreadable { path: path.to_owned(), source };
        let first = first_line(path)?;
        let mut file = File::open(path).map_err(unreadable)?;
        let length = file.metadata().map_err(unreadable)?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(LONGEST_LINE))).map_err(unreadable)?;
        let mut tail = Vec::new();
        file.take(LONGEST_LINE).read_to_end(&mut tail).map_err(unreadable)?;
        let tail = tail.strip_suffix(b"\n").unwrap_or(&tail);
        let last = tail.rsplit(|byte| *byte == b'\n').next().unwrap_or_default();
        let place = |line: &[u8]| serde_json::from_slice(line).ok();
        Ok(Self { path: path.to_owned(), first: place(&first), last: place(last) })
    }

    /// The names of the replica at both ends: a replica may be renamed between two starts.
    fn replicas(&self) -> impl DoubleEndedIterator<Item = &String> {
        self.first.iter().chain(&self.last).map(|place| &place.replica)
    }

    /// True if both files are of one chain: by a name, or because one continues the other.
    fn is_of_one_chain(&self, other: &Self) -> bool {
        let has_name = |name: &String| other.replicas().any(|other| other == name);
        self.replicas().any(has_name) || self.continues(other) || other.continues(self)
    }

    /// True if the file may stand behind `earlier` in one chain: it continues `earlier`, or files between
    /// both are missing. The numbers of one chain never overlap.
    fn may_follow(&self, earlier: &Self) -> bool {
        match (&self.first, earlier.last.as_ref().or(earlier.first.as_ref())) {
            (Some(first), Some(last)) => first.seq > last.seq,
            _ => true,
        }
    }

    /// True if the file begins where `earlier` ends.
    fn continues(&self, earlier: &Self) -> bool {
        match (&self.first, &earlier.last) {
            (Some(first), Some(last)) => first.prev == last.hash,
            _ => false,
        }
    }

    /// The file's place among the files of its chain. A file without a readable line comes last.
    fn place(&self) -> (u64, &Path) {
        (self.first.as_ref().map_or(u64::MAX, |first| first.seq), &self.path)
    }
}

/// The files of each chain. A file that names no replica is checked with the only chain, or alone.
fn by_replica(files: Vec<AuditFileEnds>) -> Vec<Vec<AuditFileEnds>> {
    let (named, nameless): (Vec<_>, Vec<_>) =
        files.into_iter().partition(|file| file.replicas().next().is_some());
    let mut chains: Vec<Vec<AuditFileEnds>> = Vec::new();
    for file in named {
        let is_of = |chain: &Vec<AuditFileEnds>| chain.iter().any(|other| file.is_of_one_chain(other));
        let (joined, others): (Vec<_>, Vec<_>) = chains.into_iter().partition(is_of);
        chains = others;
        chains.push(joined.into_iter().flatten().chain([file]).collect());
    }
    match &mut chains[..] {
        [only] => only.extend(nameless),
        _ => chains.extend(nameless.into_iter().map(|file| vec![file])),
    }
    chains
}

/// The chains among the files of one name, each in its order: two replicas on one machine have the same name
/// unless `audit.replica` tells them apart.
fn chains_of_one_name(mut files: Vec<AuditFileEnds>) -> Vec<Vec<AuditFileEnds>> {
    files.sort_by(|one, other| one.place().cmp(&other.place()));
    let mut chains: Vec<Vec<AuditFileEnds>> = Vec::new();
    for file in files {
        let ends = || chains.iter().map(|chain| chain.last());
        let continued = ends().position(|end| end.is_some_and(|end| file.continues(end)));
        let possible = || ends().position(|end| end.is_some_and(|end| file.may_follow(end)));
        match continued.or_else(possible) {
            Some(at) => chains[at].push(file),
            None => chains.push(vec![file]),
        }
    }
    chains
}

/// Passes each line with its record to `print`, if the conditions hold. The records of several chains come in
/// the order of their times; those of one chain keep the order in which they were written.
///
/// # Errors
/// A file cannot be read, or a result cannot be printed.
pub fn search(
    files: &[PathBuf],
    conditions: &AuditSearch,
    mut print: impl FnMut(&[u8], &FoundRecord) -> io::Result<()>,
) -> Result<(), AuditFilesError> {
    let files = chained(files).map(|path| AuditFileEnds::read(path)).collect::<Result<Vec<_>, _>>()?;
    let chains = by_replica(files).into_iter().flat_map(chains_of_one_name);
    let mut chains: Vec<_> = chains.map(SearchedChain::new).collect();
    chains.sort_by(|one, other| one.files.as_slice().cmp(other.files.as_slice()));
    // The oldest record of each chain is first; equal times keep the order of the chains.
    let mut oldest = BinaryHeap::new();
    for (at, chain) in chains.iter_mut().enumerate() {
        oldest.extend(chain.advance(conditions)?.map(|time| Reverse((time, at))));
    }
    while let Some(Reverse((_, at))) = oldest.pop() {
        let chain = &mut chains[at];
        if let Some(found) = &chain.found {
            print(&chain.line, found).map_err(AuditFilesError::Unprintable)?;
        }
        oldest.extend(chain.advance(conditions)?.map(|time| Reverse((time, at))));
    }
    Ok(())
}

/// The search in one chain: one file is open, and one line is held.
struct SearchedChain {
    files: std::vec::IntoIter<PathBuf>,
    open: Option<(PathBuf, BufReader<File>)>,
    line: Vec<u8>,
    /// The record of the line.
    found: Option<FoundRecord>,
}

impl SearchedChain {
    fn new(files: Vec<AuditFileEnds>) -> Self {
        let files: Vec<_> = files.into_iter().map(|file| file.path).collect();
        Self { files: files.into_iter(), open: None, line: Vec::new(), found: None }
    }

    /// Goes on to the next line for which the conditions hold. Returns its time; `None` at the end.
    fn advance(&mut self, conditions: &AuditSearch) -> Result<Option<String>, AuditFilesError> {
        self.found = None;
        loop {
            let Some((path, file)) = &mut self.open else {
                let Some(path) = self.files.next() else { return Ok(None) };
                self.open = Some((path.clone(), open(&path)?));
                continue;
            };
            self.line.clear();
            let read = file.take(LONGEST_LINE).read_until(b'\n', &mut self.line);
            let read = read.map_err(|source| AuditFilesError::Unreadable { path: path.clone(), source })?;
            if read == 0 {
                self.open = None;
                continue;
            }
            self.found = conditions.find(&self.line);
            if let Some(found) = &self.found {
                return Ok(Some(found.time().to_owned()));
            }
        }
    }
}

fn open(path: &Path) -> Result<BufReader<File>, AuditFilesError> {
    let opened = File::open(path).map(BufReader::new);
    opened.map_err(|source| AuditFilesError::Unreadable { path: path.to_owned(), source })
}

/// The files with lines of a chain: a pattern like `audit.log*` names the ends torn off by crashes, too.
fn chained(files: &[PathBuf]) -> impl Iterator<Item = &PathBuf> {
    let is_torn = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "torn");
    let has_others = files.iter().any(|path| !is_torn(path));
    files.iter().filter(move |path| !(has_others && is_torn(path)))
}

/// The first line, without its line break.
fn first_line(path: &Path) -> Result<Vec<u8>, AuditFilesError> {
    let mut line = Vec::new();
    let read = open(path)?.take(LONGEST_LINE).read_until(b'\n', &mut line);
    read.map_err(|source| AuditFilesError::Unreadable { path: path.to_owned(), source })?;
    line.truncate(line.strip_suffix(b"\n").unwrap_or(&line).len());
    Ok(line)
}
