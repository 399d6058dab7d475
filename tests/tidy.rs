//! Rules that no compiler holds: floors, sizes, names, and what may not stand in a file.
//!
//! Each check reads the tree as git sees it, tells every fault at once, and fails where it found nothing to read.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The floors of the design: a module imports strictly lower ones. `main` stands on top of all.
const FLOORS: &[(u8, &[&str])] = &[
    (12, &["main"]),
    (11, &["app"]),
    (10, &["admin", "reload"]),
    (9, &["gateway"]),
    (8, &["watch", "lease", "revocation"]),
    (7, &["downstream", "upstream"]),
    (6, &["credentials"]),
    (5, &["members"]),
    (4, &["dial", "policy"]),
    (3, &["config"]),
    (2, &["rpc"]),
    (1, &["refusal", "shard", "jwt", "users", "authority"]),
    (0, &["pb", "pem", "identity", "published", "secret", "tasks", "telemetry", "io", "byte_account"]),
];

/// Lines of one file under `src`, its tests apart.
const MAX_LINES: usize = 600;

/// Names that say nothing about what a file owns.
const EMPTY_NAMES: &[&str] =
    &["util", "utils", "helper", "helpers", "common", "types", "manager", "managers", "misc"];

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Every file that git tracks or would track, with its text; what is not text is left out.
fn tree() -> Vec<(String, String)> {
    let listed = Command::new("git")
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .current_dir(root())
        .output()
        .expect("git lists the tree");
    assert!(listed.status.success(), "{}", String::from_utf8_lossy(&listed.stderr));
    let names = String::from_utf8(listed.stdout).expect("file names are UTF-8");
    let files: BTreeSet<&str> = names.split('\0').filter(|name| !name.is_empty()).collect();
    let texts = files.into_iter().filter_map(|name| {
        // A file that was deleted but is not yet committed is listed and cannot be read.
        let text = String::from_utf8(fs::read(root().join(name)).ok()?).ok()?;
        Some((name.to_owned(), text))
    });
    texts.collect()
}

fn rust_files() -> Vec<(String, String)> {
    let mut files = tree();
    files.retain(|(name, _)| Path::new(name).extension().is_some_and(|ext| ext == "rs"));
    assert!(files.len() > 10, "found {} Rust files", files.len());
    files
}

fn source_files() -> Vec<(String, String)> {
    let mut files = rust_files();
    files.retain(|(name, _)| name.starts_with("src/"));
    assert!(files.len() > 5, "found {} source files", files.len());
    files
}

fn report(rule: &str, faults: &[String]) {
    let mut told = String::new();
    for fault in faults {
        writeln!(told, "  {fault}").expect("a String takes all");
    }
    assert!(faults.is_empty(), "{rule}\n{told}");
}

/// The text up to the inline test module. A test module in a file of its own does not end the code.
fn without_tests(text: &str) -> &str {
    let mut from = 0;
    while let Some(at) = text[from..].find("#[cfg(test)]").map(|at| from + at) {
        let item = text[at..].lines().nth(1).unwrap_or_default().trim();
        if item.contains("mod ") && item.ends_with('{') {
            return &text[..at];
        }
        from = at + 1;
    }
    text
}

/// Files that a `#[cfg(test)] mod name;` of their parent includes, and those in the folder of such a file.
fn test_only_files(files: &[(String, String)]) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for (name, text) in files {
        let folder = name.trim_end_matches(".rs");
        let folder = if ["src/lib", "src/main"].contains(&folder) { "src" } else { folder };
        for (at, _) in text.match_indices("#[cfg(test)]") {
            let item = text[at..].lines().nth(1).unwrap_or_default().trim();
            let item = item.trim_start_matches("pub(crate) ").trim_start_matches("pub(super) ");
            if let Some(module) = item.strip_prefix("mod ").and_then(|rest| rest.strip_suffix(';')) {
                found.insert(format!("{folder}/{module}.rs"));
            }
        }
    }
    let within = |name: &str| {
        let mut folders = found.iter().filter_map(|test| test.strip_suffix(".rs"));
        folders.any(|folder| name.strip_prefix(folder).is_some_and(|rest| rest.starts_with('/')))
    };
    let nested: Vec<_> = files.iter().map(|(name, _)| name.clone()).filter(|name| within(name)).collect();
    found.extend(nested);
    found
}

/// The code of a text, without the lines that are comments only.
fn code_of(text: &str) -> String {
    let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
    code.flat_map(|line| [line, "\n"]).collect()
}

fn floor_of(module: &str) -> Option<u8> {
    FLOORS.iter().find(|(_, modules)| modules.contains(&module)).map(|(floor, _)| *floor)
}

/// The top module that a source file belongs to; `None` for `lib.rs`, which only lists them.
fn module_of(name: &str) -> Option<&str> {
    let path = name.strip_prefix("src/")?.trim_end_matches(".rs");
    let module = path.split('/').next()?;
    (module != "lib").then_some(module)
}

/// The top modules that `code` names by `crate::`, braces included.
fn imports(code: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for (at, root) in code.match_indices("crate::") {
        let before = code[..at].chars().next_back();
        if before.is_some_and(|c| c.is_alphanumeric() || c == '_') {
            continue;
        }
        let rest = code[at + root.len()..].trim_start();
        match rest.strip_prefix('{') {
            None => drop(found.insert(word(rest))),
            Some(list) => found.extend(first_words(list)),
        }
    }
    found.remove("");
    found
}

fn word(text: &str) -> String {
    text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()
}

/// The first word of each item of a braced list, up to its closing brace.
fn first_words(list: &str) -> Vec<String> {
    let (mut depth, mut item_begins, mut words) = (0, true, Vec::new());
    for (at, c) in list.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            ',' if depth == 0 => item_begins = true,
            _ if c.is_whitespace() => {}
            _ if item_begins => {
                words.push(word(&list[at..]));
                item_begins = false;
            }
            _ => {}
        }
    }
    words
}

/// The longest chain of `super::` in `code`.
fn longest_climb(code: &str) -> usize {
    let mut longest = 0;
    for (at, _) in code.match_indices("super::") {
        let mut rest = &code[at..];
        let mut climb = 0;
        while let Some(after) = rest.strip_prefix("super::") {
            (rest, climb) = (after, climb + 1);
        }
        longest = longest.max(climb);
    }
    longest
}

#[test]
fn modules_import_lower_floors_only() {
    let mut faults = Vec::new();
    let mut checked = 0;
    for (name, text) in source_files() {
        let Some(module) = module_of(&name) else { continue };
        let Some(floor) = floor_of(module) else {
            faults.push(format!("{name}: module `{module}` has no floor"));
            continue;
        };
        for imported in imports(&code_of(&text)) {
            checked += 1;
            match floor_of(&imported) {
                _ if imported == module => {}
                Some(below) if below < floor => {}
                Some(above) => {
                    faults.push(format!("{name}: `{module}` ({floor}) imports `{imported}` ({above})"));
                }
                None => faults.push(format!("{name}: imports `{imported}`, which has no floor")),
            }
        }
    }
    assert!(checked > 5, "found {checked} imports");
    report("a module imports strictly lower floors only", &faults);
}

/// `super::` out of the top module would be an import that the check of floors does not see.
#[test]
fn no_module_climbs_out_of_its_floor() {
    let faults: Vec<_> = source_files()
        .iter()
        .filter_map(|(name, text)| {
            let depth = name.strip_prefix("src/")?.split('/').count();
            let code = without_tests(text);
            let climbs = longest_climb(&code_of(code)) >= depth.max(1);
            let tests_climb = longest_climb(&code_of(&text[code.len()..])) > depth;
            (climbs || tests_climb).then(|| format!("{name}: `super::` reaches the crate's root"))
        })
        .collect();
    report("write `crate::` to name another top module", &faults);
}

#[test]
fn files_stay_readable() {
    let files = source_files();
    let tests = test_only_files(&files);
    let mut faults = Vec::new();
    for (name, text) in &files {
        let lines = without_tests(text).lines().count();
        if lines > MAX_LINES && !tests.contains(name) {
            faults.push(format!("{name}: {lines} lines"));
        }
    }
    report("a file stops at 600 lines, tests apart: look for its second noun", &faults);
}

#[test]
fn every_file_says_what_it_owns() {
    let faults: Vec<_> =
        rust_files().into_iter().filter(|(_, text)| !text.starts_with("//!")).map(|(name, _)| name).collect();
    report("a Rust file opens with `//!`", &faults);
}

#[test]
fn no_file_is_named_for_nothing() {
    let files = tree();
    assert!(files.len() > 20, "found {} files", files.len());
    let empty = |part: &str| EMPTY_NAMES.contains(&part.split('.').next().unwrap_or(part));
    let faults: Vec<_> =
        files.into_iter().map(|(name, _)| name).filter(|name| name.split('/').any(empty)).collect();
    report("a name says what a file owns", &faults);
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
    let mut files = source_files();
    files.extend(rust_files().into_iter().filter(|(name, _)| name == "build.rs"));
    let tests = test_only_files(&files);
    let mut faults = Vec::new();
    for (name, text) in files.iter().filter(|(name, _)| !tests.contains(name)) {
        let code = without_tests(text);
        for (line, number) in code.lines().zip(1..) {
            if line.contains(".unwrap()") && !line.trim_start().starts_with("//") {
                faults.push(format!("{name}:{number}"));
            }
        }
    }
    report("`expect` with the reason on the same screen, or an error", &faults);
}

/// The checks above would pass on anything if the readers under them saw nothing.
#[test]
fn the_readers_see_what_they_should() {
    let code =
        "use crate::a::B;\nuse crate::{b::{C, D}, c, d::E};\nlet x = $crate::e::F; let y = my_crate::g;";
    let expected = ["a", "b", "c", "d", "e"];
    assert_eq!(imports(code).into_iter().collect::<Vec<_>>(), expected);
    assert_eq!(code_of("  // crate::x\na\n"), "a\n");
    assert_eq!(longest_climb("use super::super::x; use super::y;"), 2);
    let text = "a\n#[cfg(test)]\nmod far;\nb\n#[cfg(test)]\nmod tests {\nc\n";
    assert_eq!(without_tests(text), "a\n#[cfg(test)]\nmod far;\nb\n");
    let files = [("src/x/y.rs".to_owned(), text.to_owned())];
    assert_eq!(test_only_files(&files).into_iter().collect::<Vec<_>>(), ["src/x/y/far.rs"]);
    let words = [["/wo", "rk/"].concat()];
    let text = ["a /wo", "rk/x\nnet/wo", "rk/\n(/wo", "rk/y)"].concat();
    let lines: Vec<_> = found_words(&text, &words).into_iter().map(|(line, _)| line).collect();
    assert_eq!(lines, [1, 3]);
    assert_eq!((floor_of("rpc"), floor_of("nobody")), (Some(2), None));
    assert_eq!((module_of("src/rpc/scan.rs"), module_of("src/lib.rs")), (Some("rpc"), None));
}
