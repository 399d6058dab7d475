//! CONTRIBUTING.md lists the modules of `tests/etcd` that run on every pinned etcd version in each run.
//!
//! Owns: reading that list, and which modules ask for which versions. Must not know why a module is in the list.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use super::{quoted, read, root};

/// What stands before the list.
const LIST: &str = "On every version in each run: ";
/// What stands before the modules of the list with tests that run on fewer.
const IN_PART: &str = "Of these, some tests run on fewer versions in ";

/// The first `.rs` file or folder below `tests/etcd` that a source is in, which is the module that `main.rs` names.
fn module(source: &Path) -> String {
    let below = source.strip_prefix(root().join("tests/etcd")).expect("a source of tests/etcd");
    let first = below.iter().next().expect("a name").to_string_lossy();
    first.trim_end_matches(".rs").to_owned()
}

/// Whether a source calls this function, whose name may be the end of a longer one.
fn calls(text: &str, function: &str) -> bool {
    let call = format!("{function}()");
    let is_other = |c: char| c.is_alphanumeric() || c == '_';
    text.match_indices(&call).any(|(at, _)| !text[..at].ends_with(is_other))
}

/// All sources in a folder and its folders.
fn sources(folder: &Path, found: &mut Vec<(String, String)>) {
    for entry in fs::read_dir(folder).expect("a folder of tests/etcd") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|ending| ending == "rs") {
            let text = fs::read_to_string(&path).expect("a source is UTF-8");
            found.push((module(&path), text));
        }
    }
}

#[test]
fn modules_on_every_etcd_version_are_those_of_the_list() {
    let guide = read("CONTRIBUTING.md");
    let list_behind = |words: &str| -> BTreeSet<String> {
        let (_, list) = guide.split_once(words).expect("the list is there");
        let (list, _) = list.split_once(".\n").expect("the list ends with a sentence");
        quoted(list).into_iter().map(str::to_owned).collect()
    };
    let listed = list_behind(LIST);
    assert!(listed.len() > 5, "{listed:?}");

    let mut all = Vec::new();
    sources(&root().join("tests/etcd"), &mut all);
    let asking = |function: &str| -> BTreeSet<String> {
        let asking = all.iter().filter(|(module, text)| module != "harness" && calls(text, function));
        asking.map(|(module, _)| module.clone()).collect()
    };
    assert_eq!(listed, asking("every_version"), "CONTRIBUTING.md, and the modules that call every_version()");
    let on_fewer = &asking("versions") | &asking("few_versions");
    let both: BTreeSet<String> = on_fewer.intersection(&listed).cloned().collect();
    assert_eq!(
        list_behind(IN_PART),
        both,
        "CONTRIBUTING.md, and the modules that run on fewer versions, too"
    );
}

#[test]
fn a_call_is_told_from_the_end_of_a_longer_name() {
    assert!(calls("for version in versions() {", "versions"));
    assert!(calls("harness::versions().pop()", "versions"));
    assert!(!calls("for version in most_versions() {", "versions"));
}
