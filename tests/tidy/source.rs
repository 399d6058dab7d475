//! The files of the repository as git sees them, and the parts of a Rust file.
//!
//! Must not know: any rule. Invariant: a reader that finds too little to be true fails.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A Rust file under `src`, of the program or of one of its packages.
pub(crate) struct Source {
    /// Its path: `src/gateway/src/pipeline.rs`.
    pub(crate) name: String,
    pub(crate) text: String,
    /// Compiled for tests only, whole.
    pub(crate) is_test: bool,
}

impl Source {
    /// The package: `gateway` of `src/gateway/src/pipeline.rs`; empty for the program's own.
    pub(crate) fn room(&self) -> &str {
        self.name.strip_prefix("src/").and_then(|path| path.split_once("/src/")).map_or("", |(room, _)| room)
    }

    /// Path below the package's `src`, without `.rs`: `pipeline` of `src/gateway/src/pipeline.rs`.
    pub(crate) fn module(&self) -> &str {
        let path = self.name.strip_prefix("src/").unwrap_or(&self.name);
        path.split_once("/src/").map_or(path, |(_, path)| path).trim_end_matches(".rs")
    }

    /// The text up to the inline test module.
    pub(crate) fn product(&self) -> &str {
        without_tests(&self.text)
    }

    /// The inline test module.
    pub(crate) fn tests(&self) -> &str {
        &self.text[self.product().len()..]
    }
}

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// A page of the repository.
pub(crate) fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).expect("the page is in the repository")
}

/// Every file that git tracks or would track, with its text; what is not text is left out.
pub(crate) fn tree() -> Vec<(String, String)> {
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
    let tree: Vec<_> = texts.collect();
    assert!(tree.len() > 20, "found {} files", tree.len());
    tree
}

pub(crate) fn rust_files() -> Vec<(String, String)> {
    let mut files = tree();
    files.retain(|(name, _)| Path::new(name).extension().is_some_and(|ext| ext == "rs"));
    assert!(files.len() > 10, "found {} Rust files", files.len());
    files
}

/// All files under `src`.
pub(crate) fn sources() -> Vec<Source> {
    let mut files = rust_files();
    files.retain(|(name, _)| name.starts_with("src/"));
    let tests = test_only_files(&files);
    let source = |(name, text)| Source { is_test: tests.contains(&name), name, text };
    files.into_iter().map(source).collect()
}

/// The files of the program, those apart that are compiled for tests only.
pub(crate) fn product_files() -> Vec<Source> {
    let mut sources = sources();
    sources.retain(|source| !source.is_test);
    assert!(sources.len() > 100, "{} files", sources.len());
    sources
}

/// The text up to the inline test module. A test module in a file of its own does not end the code.
fn without_tests(text: &str) -> &str {
    let mut markers = text.match_indices("#[cfg(test)]").map(|(at, _)| at);
    let opens = |at: &usize| {
        item_under(&text[*at..]).is_some_and(|item| item.contains("mod ") && item.ends_with('{'))
    };
    markers.find(opens).map_or(text, |at| &text[..at])
}

/// The first line of the item under an attribute with which `text` begins.
pub(crate) fn item_under(text: &str) -> Option<&str> {
    text.lines().skip(1).map(str::trim).find(|line| !line.starts_with("#["))
}

/// Files that a `#[cfg(test)] mod name;` of their parent includes, and those in the folder of such a file.
fn test_only_files(files: &[(String, String)]) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for (name, text) in files {
        let folder = name.trim_end_matches(".rs");
        let folder = ["/lib", "/main"].iter().find_map(|root| folder.strip_suffix(root)).unwrap_or(folder);
        let for_tests = ["#[cfg(test)]", "#[cfg(any(test, feature = \"testing\"))]"];
        for (at, _) in for_tests.iter().flat_map(|attribute| text.match_indices(attribute)) {
            let item = item_under(&text[at..]).unwrap_or_default();
            let item = ["pub(crate) ", "pub(super) ", "pub "]
                .iter()
                .find_map(|public| item.strip_prefix(public))
                .unwrap_or(item);
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
pub(crate) fn code_of(text: &str) -> String {
    let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
    code.flat_map(|line| [line, "\n"]).collect()
}

/// The identifier with which a text begins.
pub(crate) fn identifier(text: &str) -> &str {
    let end = text.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(text.len());
    &text[..end]
}

#[test]
fn the_parts_of_a_file_are_told_apart() {
    assert_eq!(code_of("  // crate::x\na\n"), "a\n");
    let text = "a\n#[cfg(test)]\nmod far;\nb\n#[cfg(test)]\n#[path = \"x\"]\nmod tests {\nc\n";
    assert_eq!(without_tests(text), "a\n#[cfg(test)]\nmod far;\nb\n");
    let files = [("src/x/y.rs".to_owned(), text.to_owned())];
    assert_eq!(test_only_files(&files).into_iter().collect::<Vec<_>>(), ["src/x/y/far.rs"]);
    assert_eq!((identifier("a_1::b"), identifier("")), ("a_1", ""));
    let source = Source { name: "src/x/y.rs".to_owned(), text: text.to_owned(), is_test: false };
    assert_eq!((source.room(), source.module(), source.tests().lines().last()), ("", "x/y", Some("c")));
    let source = Source { name: "src/x/src/y/z.rs".to_owned(), ..source };
    assert_eq!((source.room(), source.module()), ("x", "y/z"));
}
