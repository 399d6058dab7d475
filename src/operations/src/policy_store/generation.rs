//! The stored form of a generation of the policy: its pointer, its header and its document.
//!
//! Owns: the values of the keys, and the bounds on a document. Must not know: keys, etcd, the meaning of a
//! rule. Invariant: a document is returned only if its text has the digest named by its pointer.
//!
//! A pointer is a line of JSON. A generation is its header, a line of JSON, followed by the document
//! compressed with gzip: `etcdctl get --print-value-only KEY | tail -n +2 | gunzip` prints the document.

use std::io::{Read as _, Write as _};
use std::sync::Arc;

use bytes::Bytes;
use data_encoding::HEXLOWER;
use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

/// Largest text of a document, in bytes.
const LARGEST_TEXT: usize = 4 << 20;
/// Largest value of a generation, in bytes: with the other operations of its transaction below etcd's limit
/// of a request (`--max-request-bytes`, 1.5 MiB).
const LARGEST_VALUE: usize = 1 << 20;
/// Longest comment, in bytes.
const LONGEST_COMMENT: usize = 1024;

/// Names the current generation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct GenerationPointer {
    /// The generation's number, from 1.
    pub(super) generation: u64,
    /// The SHA-256 of the document's text, in hexadecimal.
    pub(super) sha256: String,
}

/// A generation, without its document.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct GenerationHeader {
    /// The generation's number, from 1.
    pub(super) generation: u64,
    /// The SHA-256 of the document's text, in hexadecimal.
    pub(super) sha256: String,
    /// The operator's comment.
    pub(super) comment: String,
    /// The time of the change, in seconds of the Unix epoch.
    pub(super) applied_at: u64,
    /// The operator's user id on the machine of the replica.
    pub(super) uid: Option<u32>,
    /// The user who became root by sudo, as root's process claims.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) sudo_user: Option<String>,
}

/// Reasons for refusing to store a document.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum DocumentTooLarge {
    /// The text is too long.
    #[error("the policy has {0} bytes; at most {LARGEST_TEXT} are allowed")]
    Text(usize),
    /// The compressed text does not fit into a request to etcd.
    #[error("the policy has {0} bytes after compression; at most {LARGEST_VALUE} fit into a request to etcd")]
    Compressed(usize),
    /// The comment is too long.
    #[error("the comment has {0} bytes; at most {LONGEST_COMMENT} are allowed")]
    Comment(usize),
}

impl GenerationPointer {
    /// Reads a pointer. `None` if unreadable; the highest number is refused, since no number could follow.
    pub(super) fn read(value: &[u8]) -> Option<Self> {
        let pointer: Self = serde_json::from_slice(value).ok()?;
        (pointer.generation > 0 && pointer.generation < u64::MAX).then_some(pointer)
    }

    /// The value of the pointer's key.
    pub(super) fn value(&self) -> Bytes {
        line(self).into()
    }
}

impl GenerationHeader {
    /// The pointer to this generation.
    pub(super) fn pointer(&self) -> GenerationPointer {
        GenerationPointer { generation: self.generation, sha256: self.sha256.clone() }
    }

    /// The value of the generation's key, with the text of the document.
    ///
    /// # Errors
    /// The document or its comment is too large.
    pub(super) fn value(&self, text: &str) -> Result<Bytes, DocumentTooLarge> {
        if text.len() > LARGEST_TEXT {
            return Err(DocumentTooLarge::Text(text.len()));
        }
        if self.comment.len() > LONGEST_COMMENT {
            return Err(DocumentTooLarge::Comment(self.comment.len()));
        }
        let mut value = line(self);
        value.push(b'\n');
        let mut gzip = GzEncoder::new(value, Compression::default());
        let written = gzip.write_all(text.as_bytes()).and_then(|()| gzip.finish());
        // Memory takes every write.
        let value = written.unwrap_or_default();
        if value.len() > LARGEST_VALUE {
            Err(DocumentTooLarge::Compressed(value.len()))
        } else {
            Ok(value.into())
        }
    }

    /// Reads the header of a generation.
    pub(super) fn read(value: &[u8]) -> Option<Self> {
        Some(split(value)?.0)
    }
}

/// Reads the generation named by `pointer`. `None` if the value is of another generation, or damaged.
pub(super) fn read_document(
    pointer: &GenerationPointer,
    value: &[u8],
) -> Option<(GenerationHeader, Arc<str>)> {
    let (header, compressed) = split(value)?;
    let mut text = String::new();
    let limit = u64::try_from(LARGEST_TEXT).unwrap_or(u64::MAX).saturating_add(1);
    GzDecoder::new(compressed).take(limit).read_to_string(&mut text).ok()?;
    let is_whole =
        text.len() <= LARGEST_TEXT && header.pointer() == *pointer && sha256(&text) == pointer.sha256;
    is_whole.then(|| (header, text.into()))
}

/// The digest of a document's text.
pub(super) fn sha256(text: &str) -> String {
    HEXLOWER.encode(&Sha256::digest(text))
}

fn split(value: &[u8]) -> Option<(GenerationHeader, &[u8])> {
    let end = value.iter().position(|byte| *byte == b'\n')?;
    let header = serde_json::from_slice(value.get(..end)?).ok()?;
    Some((header, value.get(end + 1..)?))
}

fn line<T: Serialize>(row: &T) -> Vec<u8> {
    // Strings and numbers are always JSON.
    serde_json::to_vec(row).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    pub(super) fn header(number: u64, text: &str) -> GenerationHeader {
        let comment = "a \"comment\"\nof two lines".to_owned();
        GenerationHeader {
            generation: number,
            sha256: sha256(text),
            comment,
            applied_at: 7,
            uid: Some(0),
            sudo_user: None,
        }
    }

    #[test]
    fn a_large_document_is_stored_compressed_and_a_larger_one_is_refused() {
        let row =
            |n: u32| format!("[[role]]\nname = 'r{n}'\nallow = [{{ actions = ['read'], key = '/k/{n}' }}]\n");
        let text: String = (0..20_000).map(row).collect();
        assert!(text.len() > 1_300_000, "{}", text.len());
        let value = header(3, &text).value(&text).unwrap();
        assert!(value.len() < 400_000, "{}", value.len());
        let (read, back) = read_document(&header(3, &text).pointer(), &value).unwrap();
        assert_eq!((read, &*back), (header(3, &text), &*text));
        let long = "#".repeat(LARGEST_TEXT + 1);
        assert_eq!(header(3, &long).value(&long), Err(DocumentTooLarge::Text(LARGEST_TEXT + 1)));
        // Text without redundancy: each digest differs.
        let random: String = (0..40_000_u32).map(|n| sha256(&n.to_string())).collect();
        assert!(matches!(header(3, &random).value(&random), Err(DocumentTooLarge::Compressed(_))));
    }

    #[test]
    fn the_highest_number_and_number_zero_are_no_pointers() {
        let pointer = |generation| GenerationPointer { generation, sha256: String::new() }.value();
        assert!(GenerationPointer::read(&pointer(1)).is_some());
        assert!(GenerationPointer::read(&pointer(0)).is_none());
        assert!(GenerationPointer::read(&pointer(u64::MAX)).is_none());
        assert!(GenerationPointer::read(b"garbage").is_none());
    }

    proptest! {
        #[test]
        fn a_damaged_value_is_no_document(at in 0_usize..300, byte: u8, cut: bool) {
            let text = "[[role]]\nname = 'a'\n";
            let header = header(3, text);
            let good = header.value(text).unwrap();
            let mut value = good.to_vec();
            let at = at % value.len();
            if cut { value.truncate(at) } else { value[at] = byte }
            // Bytes of the gzip header and of the comment may differ: the text never does.
            if let Some((_, read)) = read_document(&header.pointer(), &value) {
                prop_assert_eq!(&*read, text);
            }
        }
    }
}
