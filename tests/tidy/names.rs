//! Names: of files, of types, and the words in them.

use std::collections::{BTreeMap, BTreeSet};

use crate::report;
use crate::source::{product_files, read, sources, tree};

/// Names that say nothing about what a file owns.
const EMPTY_NAMES: &[&str] =
    &["util", "utils", "helper", "helpers", "common", "types", "manager", "managers", "misc"];
/// Share of types whose name another type of the program has, in per cent.
const MOST_SHARED_TYPES: f64 = 9.0;
/// File names that occur twice.
const MOST_SHARED_FILES: usize = 6;
/// Words of module names that are plain English and need no line in the glossary.
const PLAIN: &str = "of by in from to and main lib app";

#[test]
fn no_file_is_named_for_nothing() {
    let empty = |part: &str| EMPTY_NAMES.contains(&part.split('.').next().unwrap_or(part));
    let names = tree().into_iter().map(|(name, _)| name);
    let faults: Vec<_> = names.filter(|name| name.split('/').any(empty)).collect();
    report("a name says what a file owns", &faults);
}

/// The name of the type that a line at the left margin declares.
fn declared(line: &str) -> Option<&str> {
    let line = match line.strip_prefix("pub") {
        Some(rest) if rest.starts_with('(') => rest.split_once(')')?.1,
        Some(rest) => rest,
        None => line,
    };
    let (keyword, rest) = line.trim_start().split_once(' ')?;
    let is_type = ["struct", "enum", "trait", "type", "union"].contains(&keyword);
    let name = rest.split(|c: char| !c.is_alphanumeric() && c != '_').next()?;
    (is_type && !line.starts_with("  ") && !name.is_empty()).then_some(name)
}

#[test]
fn a_name_belongs_to_one_type_and_to_one_file() {
    let (mut types, mut files) = (BTreeMap::<_, Vec<_>>::new(), BTreeMap::<_, Vec<_>>::new());
    for source in product_files() {
        for name in source.product().lines().filter(|line| !line.starts_with(' ')).filter_map(declared) {
            types.entry(name.to_owned()).or_default().push(source.module().to_owned());
        }
        let name = source.module().rsplit('/').next().unwrap_or_default().to_owned();
        // Each package has a head and a manifest's script.
        if ["lib", "build"].contains(&&*name) {
            continue;
        }
        files.entry(name).or_default().push(source.module().to_owned());
    }
    let all: usize = types.values().map(Vec::len).sum();
    assert!(all > 300, "{all} types");
    types.retain(|_, places| places.len() > 1);
    files.retain(|_, places| places.len() > 1);
    let shared: usize = types.values().map(Vec::len).sum();
    let share = 100.0 * shared as f64 / all as f64;
    println!("{all} types, {share:.1} % share a name; {} file names occur twice", files.len());
    assert!(share <= MOST_SHARED_TYPES, "{share:.1} % of the types share a name: {types:#?}");
    assert!(files.len() <= MOST_SHARED_FILES, "{files:#?}");
}

#[test]
fn the_glossary_has_every_word_of_the_module_names() {
    let glossary = read("docs/glossary.md").to_lowercase();
    let known: BTreeSet<&str> =
        glossary.split(|c: char| !c.is_alphanumeric()).chain(PLAIN.split_whitespace()).collect();
    let mut missing = BTreeSet::new();
    for source in sources().iter().filter(|source| !source.module().contains("tests")) {
        let words = source.module().split(['/', '_']).chain([source.room()]);
        for word in words.filter(|word| !word.is_empty() && !known.contains(word)) {
            missing.insert(format!("{word} ({})", source.name));
        }
    }
    assert!(missing.is_empty(), "words of module names without a line in docs/glossary.md: {missing:#?}");
}
