//! What may not stand in a file.

use std::path::Path;

use crate::report;
use crate::source::{item_under, product_files, rust_files, sources, tree};

#[test]
fn every_file_says_what_it_owns() {
    let faults: Vec<_> =
        rust_files().into_iter().filter(|(_, text)| !text.starts_with("//!")).map(|(name, _)| name).collect();
    report("a Rust file opens with `//!`", &faults);
}

#[test]
fn nothing_is_allowed_or_left_for_later() {
    // Put together here, so that this file does not find itself.
    let words = [["#[al", "low("], ["#![al", "low("], ["TO", "DO"], ["FIX", "ME"], ["todo", "!("]]
        .map(|w| w.concat());
    let mut faults = Vec::new();
    for (name, text) in tree() {
        let kind = Path::new(&name).extension().and_then(|ext| ext.to_str()).unwrap_or_default();
        if !["rs", "proto", "toml", "go", "py", "sh", ""].contains(&kind) || name == "LICENSE" {
            continue;
        }
        for (line, words) in found_words(&text, &words) {
            faults.push(format!("{name}:{line}: {words}"));
        }
    }
    report("use `#[expect(…, reason)]`, and finish it", &faults);
}

#[test]
fn no_file_tells_where_it_was_made() {
    let hosts = [
        ["crates", "io"],
        ["pypi", "org"],
        ["pythonhosted", "org"],
        ["npmjs", "org"],
        ["proxy.golang", "org"],
        ["sum.golang", "org"],
        ["deb.debian", "org"],
    ];
    let mut words = hosts.map(|host| host.join(".")).to_vec();
    words.extend([["/wo", "rk/"].concat(), ["/ro", "ot/"].concat()]);
    let mut faults = Vec::new();
    for (name, text) in tree() {
        // Cargo writes its registry's name there by itself.
        if Path::new(&name).ends_with("Cargo.lock") {
            continue;
        }
        for (line, word) in found_words(&text, &words) {
            faults.push(format!("{name}:{line}: {word}"));
        }
    }
    report("no path of a machine, no registry's host", &faults);
}

/// Lines (from 1) and the words found there. A path counts only where it begins.
fn found_words(text: &str, words: &[String]) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (line, number) in text.lines().zip(1..) {
        for word in words {
            let begins = |at: usize| {
                let before = line[..at].chars().next_back();
                !word.starts_with('/')
                    || before.is_none_or(|c| !(c.is_alphanumeric() || "_-.~})".contains(c)))
            };
            if line.match_indices(word.as_str()).any(|(at, _)| begins(at)) {
                found.push((number, word.clone()));
            }
        }
    }
    found
}

#[test]
fn only_tests_unwrap() {
    let build = rust_files().into_iter().find(|(name, _)| name == "build.rs").expect("it is there");
    let mut files = vec![build];
    files
        .extend(product_files().into_iter().map(|source| (source.name.clone(), source.product().to_owned())));
    let mut faults = Vec::new();
    for (name, code) in files {
        for (line, number) in code.lines().zip(1..) {
            if line.contains(".unwrap()") && !line.trim_start().starts_with("//") {
                faults.push(format!("{name}:{number}"));
            }
        }
    }
    report("`expect` with the reason on the same screen, or an error", &faults);
}

/// Whether code that begins with `#[cfg(test)]`, or names the test build, has other values there.
fn differs_under_test(code: &str) -> bool {
    let item = || item_under(code).unwrap_or_default();
    let is_value = |line: &str| {
        let line = line.split_once("pub").map_or(line, |(_, rest)| rest.trim_start_matches(|c| c != ' '));
        ["const ", "static "].iter().any(|keyword| line.trim_start().starts_with(keyword))
            && !line.contains("fn ")
    };
    !code.starts_with("#[cfg(test)]") || is_value(item())
}

#[test]
fn no_limit_is_another_one_under_test() {
    let marks = ["cfg!(test)", "cfg!(not(test))", "#[cfg(not(test))]", "#[cfg(test)]"];
    let (mut faults, mut seen) = (Vec::new(), 0);
    for source in sources() {
        for mark in marks {
            for (at, _) in source.text.match_indices(mark) {
                seen += 1;
                if differs_under_test(&source.text[at..]) {
                    let line = source.text[..at].matches('\n').count() + 1;
                    faults.push(format!("{}:{line}: {mark}", source.name));
                }
            }
        }
    }
    assert!(seen > 50, "{seen} marks");
    report(
        "a test gives its own limits as arguments, and the product's code is the same under test",
        &faults,
    );
}

/// The standard library's and tokio's connects also take names, and look them up by the C library: musl's and
/// glibc's have limits of their own, and fail at name servers at which the other one does not (docs/decisions.md#d71).
#[test]
fn names_are_looked_up_in_one_place() {
    let ways = [
        "lookup_host",
        "to_socket_addrs",
        "ToSocketAddrs",
        "TcpStream::connect",
        "builder_tokio",
        "getaddrinfo",
    ];
    let (mut faults, mut asked) = (Vec::new(), 0);
    for source in product_files() {
        asked += usize::from(source.product().contains("NameResolver"));
        for (line, words) in found_words(source.product(), &ways.map(str::to_owned)) {
            faults.push(format!("{}:{line}: {words}", source.name));
        }
    }
    assert!(asked > 5, "{asked} files that look names up");
    report("names go through `dial::names`, addresses through `io::tcp_connect`", &faults);
}

#[test]
fn forbidden_words_are_found() {
    let words = [["/wo", "rk/"].concat()];
    let text = ["a /wo", "rk/x\nnet/wo", "rk/\n(/wo", "rk/y)"].concat();
    let lines: Vec<_> = found_words(&text, &words).into_iter().map(|(line, _)| line).collect();
    assert_eq!(lines, [1, 3]);
    assert!(differs_under_test("cfg!(test) { 3 }") && differs_under_test("#[cfg(not(test))]\nuse x;"));
    assert!(differs_under_test("#[cfg(test)]\npub(super) const LIMIT: usize = 3;"));
    assert!(!differs_under_test("#[cfg(test)]\nmod tests {\n    const LIMIT: usize = 3;"));
    assert!(!differs_under_test("#[cfg(test)]\npub(crate) const fn numbered() {}"));
}
