//! The chain of records: each line has the hash of the line before, and its own.
//!
//! Owns: the form of a line around the record. Must not know: files, the meaning of a record. Invariants:
//! every byte of a line is covered by the line's own hash, or is fixed; the hash covers the hash of the line
//! before, so that no line can be changed, removed or moved without a change of every later line.
//!
//! A line is `{"v":1,"seq":7,"replica":"a","prev":"…",` then the fields of the record, then `,"hash":"…"}`.
//! The hash is the SHA-256 of the line's bytes before `,"hash"`, in hexadecimal; `prev` is the hash of the
//! line before, and 64 zeros in the first line of a chain.

use std::io::Write as _;

use data_encoding::HEXLOWER;
use ring::digest::{SHA256, digest};
use serde::Deserialize;

use super::record;

/// The version of the records' form.
pub const VERSION: u32 = 1;
/// Characters of a hash.
pub const HASH: usize = 64;
/// The hash before the first line of a chain.
pub const NO_HASH: &str = "0000000000000000000000000000000000000000000000000000000000000000";
/// The event of the signature of a chain.
pub const HEAD: &str = "head";
/// The text between the covered bytes and the hash.
const MARK: &[u8] = b",\"hash\":\"";
/// The begin of a line, up to its number.
const BEGIN: &[u8] = b"{\"v\":1,\"seq\":";
/// The text after the hash.
const END: &[u8] = b"\"}";

/// True for the last event of a process that ended orderly, but for heads.
#[must_use]
pub(super) fn is_orderly_end(event: &str) -> bool {
    matches!(event, "stop" | "succession")
}

/// The end of a chain: the number and the hash of the last line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChainEnd {
    /// The number of the last line; 0 before the first line.
    pub seq: u64,
    /// The hash of the last line.
    pub hash: String,
}

impl Default for ChainEnd {
    fn default() -> Self {
        Self { seq: 0, hash: NO_HASH.to_owned() }
    }
}

impl ChainEnd {
    /// The end of a chain whose last line is this one, without its line break. The line's hash is not
    /// checked.
    #[must_use]
    pub(super) fn of_line(line: &[u8]) -> Option<Self> {
        let before_hash = line.strip_suffix(END)?;
        let (_, hash) = before_hash.split_at_checked(before_hash.len().checked_sub(HASH)?)?;
        Some(Self { seq: number_of(line)?, hash: std::str::from_utf8(hash).ok()?.to_owned() })
    }
}

/// The number of the line that begins with these bytes.
#[must_use]
pub(super) fn number_of(line: &[u8]) -> Option<u64> {
    let rest = line.strip_prefix(BEGIN)?;
    let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
    std::str::from_utf8(&rest[..digits]).ok()?.parse().ok()
}

/// Makes lines of records.
#[derive(Clone, Debug)]
pub struct Chain {
    /// The end so far.
    pub end: ChainEnd,
    /// The replica's name as a JSON string.
    replica: String,
}

impl Chain {
    /// Continues a chain of `replica` after `end`.
    #[must_use]
    pub fn new(replica: &str, end: ChainEnd) -> Self {
        let quoted = String::from_utf8(record::body(&replica)).unwrap_or_default();
        Self { end, replica: quoted }
    }

    /// Appends the line of a record to `lines`. `body` is the record's JSON object, with at least one field.
    pub fn append(&mut self, body: &[u8], lines: &mut Vec<u8>) {
        let begin = lines.len();
        let fields = body.get(1..body.len().saturating_sub(1)).unwrap_or_default();
        self.end.seq += 1;
        let (seq, prev, replica) = (self.end.seq, &self.end.hash, &self.replica);
        // A vector takes every byte.
        drop(write!(lines, "{{\"v\":{VERSION},\"seq\":{seq},\"replica\":{replica},\"prev\":\"{prev}\","));
        lines.extend_from_slice(fields);
        self.end.hash.clear();
        HEXLOWER.encode_append(digest(&SHA256, &lines[begin..]).as_ref(), &mut self.end.hash);
        lines.extend_from_slice(MARK);
        lines.extend_from_slice(self.end.hash.as_bytes());
        lines.extend_from_slice(END);
        lines.push(b'\n');
    }
}

/// Why a line is no line of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadLine {
    /// The line does not end with its hash.
    #[error("the line does not end with its hash: it is no audit record, or was cut")]
    NoHash,
    /// The hash is of other bytes.
    #[error("the line was changed: its hash is of other bytes")]
    Changed,
    /// The fields cannot be read.
    #[error("the line is no audit record that this version reads")]
    Unreadable,
}

/// The fields of a line that link it to the chain.
#[derive(Debug, Deserialize)]
pub struct ChainedLine<'a> {
    v: u32,
    /// The number of the line.
    pub seq: u64,
    /// The replica that wrote the line.
    pub replica: String,
    /// The hash of the line before.
    pub prev: &'a str,
    /// The time of the record.
    pub time: String,
    /// The event.
    pub event: String,
    /// The name of the file before, in the first line of a file.
    pub previous_file: Option<String>,
    /// True if somebody else than Keyward moved or removed the file before.
    #[serde(default, rename = "moved")]
    pub is_moved: bool,
    /// The name of a removed file.
    pub removed_file: Option<String>,
    /// The signature of a head.
    pub signature: Option<String>,
    /// Lost records.
    pub count: Option<u64>,
    /// The hash of the line.
    pub hash: &'a str,
}

impl<'a> ChainedLine<'a> {
    /// Reads a line, without its line break, and checks its own hash.
    ///
    /// # Errors
    /// The line is no line of a chain.
    pub fn read(line: &'a [u8]) -> Result<Self, BadLine> {
        let covered = line.len().checked_sub(MARK.len() + HASH + END.len()).ok_or(BadLine::NoHash)?;
        let (covered, tail) = line.split_at(covered);
        let hash = tail
            .strip_prefix(MARK)
            .and_then(|rest| rest.strip_suffix(END))
            .and_then(|hash| std::str::from_utf8(hash).ok())
            .ok_or(BadLine::NoHash)?;
        if HEXLOWER.encode(digest(&SHA256, covered).as_ref()) != hash {
            return Err(BadLine::Changed);
        }
        let read: Self = serde_json::from_slice(line).map_err(|_| BadLine::Unreadable)?;
        if read.v == VERSION && read.hash == hash { Ok(read) } else { Err(BadLine::Unreadable) }
    }

    /// The end of a chain with this line as its last line.
    #[must_use]
    pub fn end(&self) -> ChainEnd {
        ChainEnd { seq: self.seq, hash: self.hash.to_owned() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(count: usize) -> Vec<u8> {
        let mut chain = Chain::new("a \"b\"", ChainEnd::default());
        let mut lines = Vec::new();
        for number in 0..count {
            let body = format!(r#"{{"time":"2026-01-01T00:00:00.000000Z","event":"e{number}"}}"#);
            chain.append(body.as_bytes(), &mut lines);
        }
        lines
    }

    #[test]
    fn a_line_names_the_hash_of_the_line_before() {
        let lines = lines(3);
        let mut end = ChainEnd::default();
        for (line, number) in lines.split(|byte| *byte == b'\n').take(3).zip(1..) {
            let read = ChainedLine::read(line).unwrap();
            assert_eq!((read.seq, read.prev, &*read.replica), (number, &*end.hash, "a \"b\""));
            end = read.end();
            assert_eq!(ChainEnd::of_line(line).as_ref(), Some(&end));
        }
        assert_eq!(end.seq, 3);
    }

    #[test]
    fn a_line_with_another_byte_is_not_read() {
        let lines = lines(1);
        let line = lines.strip_suffix(b"\n").unwrap();
        for at in 0..line.len() {
            for bit in 0..8 {
                let mut changed = line.to_vec();
                changed[at] ^= 1 << bit;
                assert!(ChainedLine::read(&changed).is_err(), "byte {at}, bit {bit}");
            }
            assert!(ChainedLine::read(&line[..at]).is_err(), "cut at {at}");
        }
        assert_eq!(ChainedLine::read(b"").unwrap_err(), BadLine::NoHash);
    }
}
