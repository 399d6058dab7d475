//! The tests that a document names as the proof of what it says.
//!
//! Must not know: the documents. Invariant: a name counts only if it is that of a test, of the file named before it where one is.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::process::Command;

use super::{quoted, root};

/// A test as a document names it: `` `tests/it/limits.rs` `a_message_of_just_the_limit_passes` ``. The file may be left out.
#[derive(Debug, PartialEq)]
pub(crate) struct CitedTest<'a> {
    file: Option<&'a str>,
    name: &'a str,
}

/// The tests that a text names, each with the last file named before it.
pub(crate) fn cited(text: &str) -> Vec<CitedTest<'_>> {
    let (mut file, mut found) = (None, Vec::new());
    for word in quoted(text) {
        let is_name = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_';
        if word.ends_with(".rs") {
            file = Some(word);
        } else if word.contains('_') && word.bytes().all(is_name) {
            found.push(CitedTest { file, name: word });
        }
    }
    found
}

/// The rows of a document's tables, without their heads.
pub(crate) fn rows(document: &str) -> impl Iterator<Item = &str> {
    let next = document.lines().skip(1).chain([""]);
    let rows =
        document.lines().zip(next).filter(|(line, next)| line.starts_with("| ") && !next.starts_with("|-"));
    rows.map(|(line, _)| line)
}

/// The text of the last column.
pub(crate) fn last_cell(row: &str) -> &str {
    let row = row.trim_end().trim_end_matches('|');
    row.rsplit_once(" | ").map_or(row, |(_, last)| last)
}

/// The files of each test of the tree, by its name.
pub(crate) struct Tests(BTreeMap<String, BTreeSet<String>>);

impl Tests {
    pub(crate) fn of_the_tree() -> Self {
        let listed = Command::new("git")
            .args(["ls-files", "--cached", "--others", "--exclude-standard", "src", "tests"])
            .current_dir(root())
            .output()
            .expect("git lists the tree");
        let listed = String::from_utf8(listed.stdout).expect("file names are UTF-8");
        let mut tests = Self(BTreeMap::new());
        for file in listed.lines().filter(|name| Path::new(name).extension().is_some_and(|ext| ext == "rs")) {
            // A file that was removed, and whose removal git was not told.
            let Ok(source) = fs::read_to_string(root().join(file)) else { continue };
            tests.add(file, &source);
        }
        assert!(tests.0.len() > 1000, "found {} tests", tests.0.len());
        tests
    }

    /// Adds each function behind an attribute `#[test]` or `#[tokio::test]`.
    fn add(&mut self, file: &str, source: &str) {
        let mut is_marked = false;
        for line in source.lines().map(str::trim) {
            let function = line.strip_prefix("async ").unwrap_or(line).strip_prefix("fn ");
            if line.starts_with("#[test]") || line.starts_with("#[tokio::test") {
                is_marked = true;
            } else if let Some(function) = function.filter(|_| is_marked) {
                let name = function.split('(').next().unwrap_or_default();
                self.0.entry(name.to_owned()).or_default().insert(file.to_owned());
                is_marked = false;
            }
        }
    }

    /// The reason why a name is no proof.
    pub(crate) fn fault(&self, test: &CitedTest<'_>) -> Option<String> {
        let CitedTest { file, name } = test;
        match (self.0.get(*name), file) {
            (None, _) => Some(format!("there is no test {name}")),
            (Some(files), Some(file)) if !files.contains(*file) => {
                Some(format!("{name} is not in {file}, but in {files:?}"))
            }
            _ => None,
        }
    }
}

#[test]
fn a_test_that_is_renamed_or_moved_is_missed() {
    let document =
        "| rule | proven by |\n|---|---|\n| `a_b` holds | `tests/x.rs` `c_d` `e_1` |\n| more | Model |\n";
    let found: Vec<_> = rows(document).map(|row| cited(last_cell(row))).collect();
    let of_x = |name| CitedTest { file: Some("tests/x.rs"), name };
    assert_eq!(found, [vec![of_x("c_d"), of_x("e_1")], vec![]]);

    let mut tests = Tests(BTreeMap::new());
    tests.add("tests/x.rs", "#[test]\nfn c_d() {}\nfn e_1() {}\n#[tokio::test]\nasync fn f_g() {}\n");
    assert_eq!(tests.fault(&of_x("c_d")), None);
    assert_eq!(tests.fault(&of_x("f_g")), None);
    assert_eq!(tests.fault(&CitedTest { file: None, name: "c_d" }), None);
    assert!(tests.fault(&of_x("e_1")).is_some(), "a function that is no test");
    assert!(tests.fault(&of_x("c_e")).is_some(), "renamed");
    assert!(tests.fault(&CitedTest { file: Some("tests/y.rs"), name: "c_d" }).is_some(), "moved");
}
