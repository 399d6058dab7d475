//! A change of any byte of an audit file is noticed, and so is any line that is missing or moved.

use std::io::BufReader;

use keyward::audit::chain::{Chain, ChainEnd};
use keyward::audit::record::{AuditedEnd, AuditedRange, body};
use keyward::audit::verify::{ChainCheck, ChainFault};
use proptest::prelude::*;
use proptest::sample::Index;

/// A file with a record for each key.
fn file(keys: &[Vec<u8>]) -> Vec<u8> {
    let mut chain = Chain::new("a", ChainEnd::default());
    let mut lines = Vec::new();
    for key in keys {
        let range = String::from_utf8(body(&AuditedRange::new("write", key, AuditedEnd::Key))).expect("JSON");
        let record =
            format!("{{\"time\":\"2026-01-02T00:00:00.000000Z\",\"event\":\"change\",\"ranges\":[{range}]}}");
        chain.append(record.as_bytes(), &mut lines);
    }
    lines
}

fn check(file: &[u8]) -> Result<u64, ChainFault> {
    let mut check = ChainCheck::new(None);
    check.file(BufReader::new(file), &mut 0)?;
    check.finish().map(|report| report.lines)
}

proptest! {
    #[test]
    fn any_changed_byte_is_noticed(
        keys in prop::collection::vec(any::<Vec<u8>>(), 1..8), at: Index, change in 1u8..=255,
    ) {
        let mut file = file(&keys);
        prop_assert_eq!(check(&file).expect("whole"), keys.len() as u64);
        let at = at.index(file.len());
        file[at] ^= change;
        prop_assert!(check(&file).is_err(), "byte {} of {}", at, file.len());
    }

    #[test]
    fn a_missing_a_repeated_and_a_moved_line_are_noticed(
        keys in prop::collection::vec(any::<Vec<u8>>(), 3..8), at: Index,
    ) {
        let file = file(&keys);
        let lines: Vec<&[u8]> = file.split_inclusive(|byte| *byte == b'\n').collect();
        let at = at.index(lines.len() - 1);
        let mut missing = lines.clone();
        missing.remove(at);
        prop_assert!(check(&missing.concat()).is_err());
        let mut repeated = lines.clone();
        repeated.insert(at, lines[at]);
        prop_assert!(check(&repeated.concat()).is_err());
        let mut moved = lines.clone();
        moved.swap(at, at + 1);
        prop_assert!(check(&moved.concat()).is_err());
    }

    /// A file that ends early at a line's end is a chain too; its last head tells how far it was signed.
    #[test]
    fn a_file_cut_within_a_line_is_noticed(keys in prop::collection::vec(any::<Vec<u8>>(), 1..5), at: Index) {
        let file = file(&keys);
        let cut = at.index(file.len());
        let at_a_line = cut > 0 && file[cut - 1] == b'\n';
        prop_assert_eq!(check(&file[..cut]).is_ok(), at_a_line);
    }
}
