//! The page of error texts has every text that Keyward makes, and every reason by which it tells who refused.

use std::fs;

use keyward::refusal::RefusalReason;

use super::{read, root};

/// The string literals of the code before the tests, each up to its first placeholder.
fn texts(source: &str) -> Vec<String> {
    let code = source.split("#[cfg(test)]").next().unwrap_or_default();
    let code =
        code.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n");
    let literals = code.split('"').skip(1).step_by(2);
    literals.map(|text| text.split('{').next().unwrap_or_default().trim_end().to_owned()).collect()
}

#[test]
fn the_page_has_every_error_text_and_every_reason() {
    let page = read("docs/errors.md");
    let mut sources = vec![read("src/etcd/src/refusal.rs")];
    for entry in fs::read_dir(root().join("src/etcd/src/refusal")).expect("a folder") {
        sources.push(fs::read_to_string(entry.expect("an entry").path()).expect("a file"));
    }
    let begins = [
        "keyward:",
        "etcdserver:",
        "auth:",
        "context ",
        "there is no ",
        "not a primary",
        "grpc:",
        "unknown ",
        "malformed ",
    ];
    let all = sources.iter().flat_map(|source| texts(source));
    let all: Vec<_> = all.filter(|text| begins.iter().any(|begin| text.starts_with(begin))).collect();
    assert!(all.len() > 40, "{all:?}");
    let missing: Vec<_> =
        all.iter().filter(|text| text.len() > "keyward:".len() && !page.contains(text.as_str())).collect();
    assert!(missing.is_empty(), "texts without a row in docs/errors.md: {missing:#?}");
    let reasons = RefusalReason::NAMES.iter().filter(|reason| **reason != "member");
    let missing: Vec<_> = reasons.filter(|reason| !page.contains(&format!("`{reason}`"))).collect();
    assert!(missing.is_empty(), "reasons without a row in docs/errors.md: {missing:?}");
}
