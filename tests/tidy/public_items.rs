//! Public items: another file names each one, or it is private, or dead.

use std::collections::{BTreeMap, BTreeSet};

use crate::report;
use crate::source::{code_of, identifier, product_files, rust_files};

const TYPES: &[&str] = &["struct", "enum", "trait", "type", "union"];

/// Keyword and name of the item that a line declares public.
fn public_item(line: &str) -> Option<(&str, &str)> {
    let mut words = line.trim_start().strip_prefix("pub ")?.split_whitespace();
    let mut keyword = words.next()?;
    let mut next = words.next()?;
    while ["const", "async", "unsafe"].contains(&keyword) && ["async", "unsafe", "fn"].contains(&next) {
        (keyword, next) = (next, words.next()?);
    }
    let is_item = TYPES.contains(&keyword) || ["fn", "const", "static"].contains(&keyword);
    is_item.then_some((keyword, identifier(next)))
}

/// Whether another public item or field of the file, or an associated type, names the type: it is public with them.
fn is_in_interface(code: &str, name: &str) -> bool {
    let names = |text: &str| text.split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| word == name);
    let mut at = 0;
    code.split_inclusive('\n').any(|line| {
        let rest = &code[at..];
        at += line.len();
        let end = match public_item(line) {
            Some((_, declared)) if declared == name => return false,
            Some(("enum" | "trait", _)) => rest.find("\n}"),
            Some(_) => rest.find(['{', ';']),
            None if ["pub ", "type "].iter().any(|word| line.trim_start().starts_with(word)) => {
                Some(line.len())
            }
            None => return false,
        };
        names(&rest[..end.unwrap_or(rest.len())])
    })
}

#[test]
fn another_file_names_every_public_item() {
    let files = rust_files();
    let mut named = BTreeMap::<String, BTreeSet<&str>>::new();
    for (name, text) in &files {
        for word in code_of(text).split(|c: char| !c.is_alphanumeric() && c != '_') {
            named.entry(word.to_owned()).or_default().insert(name);
        }
    }
    let (mut faults, mut checked) = (Vec::new(), 0);
    for source in product_files() {
        let code = code_of(source.product());
        for (keyword, item) in code.lines().filter_map(public_item) {
            checked += 1;
            let elsewhere = named[item].iter().any(|file| *file != source.name);
            let with_others = TYPES.contains(&keyword) && is_in_interface(&code, item);
            if !elsewhere && !with_others {
                faults.push(format!("{}: pub {keyword} {item}", source.name));
            }
        }
    }
    assert!(checked > 1000, "{checked} items");
    report("a public item that no other file names is private, or dead", &faults);
}

#[test]
fn public_items_are_read() {
    let item = public_item;
    assert_eq!(item("    pub const fn a(b: C) {"), Some(("fn", "a")));
    assert_eq!(item("pub const A: B = C;"), Some(("const", "A")));
    assert_eq!(item("pub struct A<B> {"), Some(("struct", "A")));
    assert_eq!(
        [item("pub a: B,"), item("pub(crate) fn a() {"), item("pub use a::B;"), item("fn a() {")],
        [None; 4]
    );
    let code = "pub struct A {\n    pub b: B,\n    c: C,\n}\npub fn d(\n    e: E,\n) -> F {\n    G\n}\n";
    let of = |name| is_in_interface(code, name);
    assert_eq!(["A", "B", "C", "E", "F", "G"].map(of), [false, true, false, true, true, false]);
}
