//! How clearly the source speaks to a reader who has never seen it: shares of pronouns, names that occur twice, imports in circles.
//!
//! Measured over `src` without test code. The bounds are near the figures of the best public network code in Rust; a figure past its bound
//! is reported with the places that cause it. Must not know: the meaning of any module.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Words that point at a thing instead of naming it.
const PRONOUNS: &str = "it its that what who whoever whom whose which one ones there they them their those these such other others \
    this nobody somebody anybody everybody nothing something anything";
/// Words with which no comment begins: a clause in the place of a subject.
const OPENINGS: &str = "What Who Whoever Whose Whether Which Those Nobody Whom";
/// Share of pronouns in all words of comments, in per cent.
const MOST_PRONOUNS: f64 = 5.5;
/// Comments that begin with one of the [`OPENINGS`].
const MOST_OPENINGS: usize = 25;
/// Share of types whose name another type of the program has, in per cent.
const MOST_SHARED_TYPES: f64 = 9.0;
/// File names that occur twice.
const MOST_SHARED_FILES: usize = 6;
/// Columns of a line.
const WIDTH: usize = 110;
/// Words of module names that are plain English and need no line in the glossary.
const PLAIN: &str = "of by in from to and main lib app";

/// A file under `src`, without its test module.
struct Source {
    /// Path below `src`, without `.rs`: `gateway/pipeline`.
    module: String,
    text: String,
}

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).expect("the page is in the repository")
}

fn rust_files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a folder of the repository") {
        let path = entry.expect("a readable folder").path();
        if path.is_dir() {
            rust_files(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// The files of the program, test code left out.
fn sources() -> Vec<Source> {
    let base = root().join("src");
    let mut paths = Vec::new();
    rust_files(&base, &mut paths);
    paths.sort();
    let mut sources = Vec::new();
    for path in paths {
        let module = path.strip_prefix(&base).expect("found below it").with_extension("");
        let module = module.to_str().expect("UTF-8").to_owned();
        if module.split('/').any(|part| part.starts_with("tests")) {
            continue;
        }
        let text = fs::read_to_string(&path).expect("a text");
        sources.push(Source { module, text: without_tests(&text).to_owned() });
    }
    assert!(sources.len() > 100, "{} files", sources.len());
    sources
}

/// The text up to its inline test module.
fn without_tests(text: &str) -> &str {
    for (at, marker) in text.match_indices("#[cfg(test)]\n") {
        let rest = text[at + marker.len()..].lines().find(|line| !line.starts_with("#["));
        let opens = rest.is_some_and(|line| line.starts_with("mod ") && line.ends_with('{'));
        if opens && (at == 0 || text[..at].ends_with('\n')) {
            return &text[..at];
        }
    }
    text
}

/// The comments of a text: the line on which each begins, and its words.
fn comments(text: &str) -> Vec<(usize, String)> {
    let (mut comments, mut open) = (Vec::new(), None::<(usize, String)>);
    for (line, number) in text.lines().chain([""]).zip(1..) {
        match line.trim_start().strip_prefix("//") {
            Some(rest) => {
                let (_, words) = open.get_or_insert_with(|| (number, String::new()));
                *words += rest.trim_start_matches(['/', '!']);
                words.push(' ');
            }
            None => comments.extend(open.take()),
        }
    }
    comments
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_ascii_alphabetic() && c != '\'').filter(|word| !word.is_empty())
}

#[test]
fn comments_name_the_things_that_they_are_about() {
    let pronouns: BTreeSet<&str> = PRONOUNS.split_whitespace().collect();
    let openings: BTreeSet<&str> = OPENINGS.split_whitespace().collect();
    let (mut all, mut pointing, mut begins) = (0, 0, Vec::new());
    let mut shares = Vec::new();
    for source in sources() {
        let (mut here, mut here_pointing) = (0, 0);
        for (line, comment) in comments(&source.text) {
            let first = words(&comment).next().unwrap_or_default();
            if openings.contains(first) {
                begins.push(format!("src/{}.rs:{line}: {}", source.module, comment.trim()));
            }
            for word in words(&comment) {
                here += 1;
                here_pointing += usize::from(pronouns.contains(word.to_lowercase().as_str()));
            }
        }
        if here > 60 {
            shares.push((100 * here_pointing / here, source.module));
        }
        (all, pointing) = (all + here, pointing + here_pointing);
    }
    assert!(all > 10_000, "{all} words of comments");
    let share = 100.0 * pointing as f64 / all as f64;
    println!("{all} words of comments, {share:.1} % pronouns, {} openings", begins.len());
    shares.sort_unstable();
    let worst: Vec<_> = shares.iter().rev().take(10).collect();
    assert!(share <= MOST_PRONOUNS, "{share:.1} % of the words are pronouns, most in (per cent): {worst:?}");
    assert!(begins.len() <= MOST_OPENINGS, "{begins:#?}");
}

#[test]
fn every_line_fits_the_width() {
    let wide = |source: Source| {
        let lines: Vec<_> = source.text.lines().map(str::to_owned).zip(1..).collect();
        let wide = lines.into_iter().filter(|(line, _)| line.chars().count() > WIDTH);
        wide.map(move |(_, number)| format!("src/{}.rs:{number}", source.module)).collect::<Vec<_>>()
    };
    let wide: Vec<_> = sources().into_iter().flat_map(wide).collect();
    assert!(wide.is_empty(), "wider than {WIDTH} columns: {wide:#?}");
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
    for source in sources() {
        for name in source.text.lines().filter(|line| !line.starts_with(' ')).filter_map(declared) {
            types.entry(name.to_owned()).or_default().push(source.module.clone());
        }
        let name = source.module.rsplit('/').next().unwrap_or_default().to_owned();
        files.entry(name).or_default().push(source.module);
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

/// The paths that code imports, as modules from the crate's root.
fn imported(module: &str, code: &str) -> Vec<Vec<String>> {
    let here: Vec<&str> = module.split('/').collect();
    let mut found = Vec::new();
    for keyword in ["crate", "super", "self"] {
        for (at, _) in code.match_indices(keyword) {
            let before = code[..at].chars().next_back();
            if before.is_some_and(|c| c.is_alphanumeric() || c == '_') {
                continue;
            }
            let base = match keyword {
                "crate" => Vec::new(),
                "super" => here[..here.len() - 1].to_vec(),
                _ => here.clone(),
            };
            let mut path: Vec<String> = base.into_iter().map(str::to_owned).collect();
            let mut rest = &code[at + keyword.len()..];
            while let Some(after) = rest.strip_prefix("::") {
                if let Some(list) = after.strip_prefix('{') {
                    found.extend(listed(list).into_iter().map(|item| [path.clone(), item].concat()));
                    break;
                }
                let name = identifier(after);
                rest = &after[name.len()..];
                match name {
                    "super" => drop(path.pop()),
                    name => path.push(name.to_owned()),
                }
            }
            found.push(path);
        }
    }
    found
}

fn identifier(text: &str) -> &str {
    let end = text.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(text.len());
    &text[..end]
}

/// The heads of the paths in a braced list, up to its closing brace.
fn listed(list: &str) -> Vec<Vec<String>> {
    let (mut depth, mut items, mut item) = (0, Vec::new(), String::new());
    for c in list.chars() {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            ',' if depth == 0 => items.push(std::mem::take(&mut item)),
            _ if depth == 0 => item.push(c),
            _ => {}
        }
    }
    items.push(item);
    let path = |item: &String| item.trim().split("::").map(|part| identifier(part).to_owned()).collect();
    items.iter().map(path).collect()
}

/// The files that each file imports. A parent that declares a module may use it.
fn imports(sources: &[Source]) -> Vec<BTreeSet<usize>> {
    let numbers: BTreeMap<&str, usize> =
        sources.iter().map(|source| source.module.as_str()).zip(0..).collect();
    let file_of = |path: &[String]| {
        (1..=path.len()).rev().find_map(|length| numbers.get(path[..length].join("/").as_str()).copied())
    };
    let of = |source: &Source| {
        let code = source.text.lines().map(|line| line.split("//").next().unwrap_or_default());
        let code = code.collect::<Vec<_>>().join("\n");
        let targets = imported(&source.module, &code);
        let targets = targets.iter().filter_map(|path| file_of(path));
        let child = format!("{}/", source.module);
        let foreign = |target: &usize| {
            let module = &sources[*target].module;
            *module != source.module && !module.starts_with(&child)
        };
        targets.filter(foreign).collect()
    };
    sources.iter().map(of).collect()
}

#[test]
fn no_files_import_each_other_in_a_circle() {
    let sources = sources();
    let mut imports = imports(&sources);
    assert!(imports.iter().map(BTreeSet::len).sum::<usize>() > 500, "imports are found");
    // A file whose imports have all gone is in no circle, and neither is a file that no other file imports.
    let mut left: BTreeSet<usize> = (0..sources.len()).collect();
    loop {
        let imported: BTreeSet<usize> = left.iter().flat_map(|at| imports[*at].clone()).collect();
        let before = left.len();
        left.retain(|at| imported.contains(at) && !imports[*at].is_empty());
        for targets in &mut imports {
            targets.retain(|target| left.contains(target));
        }
        if left.len() == before {
            break;
        }
    }
    let circle = |at: &usize| {
        let targets: Vec<_> = imports[*at].iter().map(|target| sources[*target].module.as_str()).collect();
        format!("{} imports {}", sources[*at].module, targets.join(", "))
    };
    let circles: Vec<_> = left.iter().map(circle).collect();
    assert!(
        circles.is_empty(),
        "files that import each other in circles, and files between two circles: {circles:#?}"
    );
}

#[test]
fn comments_point_only_at_what_the_repository_holds() {
    let mut faults = Vec::new();
    let mut links = 0;
    let pages: BTreeMap<&str, String> =
        ["docs/decisions.md", "docs/etcd-facts.md", "docs/glossary.md"].map(|page| (page, read(page))).into();
    for source in sources() {
        for (line, comment) in comments(&source.text) {
            let place = format!("src/{}.rs:{line}", source.module);
            let numbered = |name: &str| {
                comment
                    .match_indices(name)
                    .any(|(at, _)| comment[at + name.len()..].starts_with(|c: char| c.is_ascii_digit()))
            };
            if ["rule ", "rules ", "Rule ", "story "].into_iter().any(numbered) {
                faults.push(format!("{place}: a rule or story that the repository does not hold"));
            }
            for (at, _) in comment.match_indices("docs/") {
                let link: String = comment[at..]
                    .chars()
                    .take_while(|c| c.is_alphanumeric() || "/.#-_".contains(*c))
                    .collect();
                let link = link.trim_end_matches('.');
                let (page, anchor) = link.split_once('#').unwrap_or((link, ""));
                links += 1;
                match pages.get(page) {
                    Some(_) if anchor.is_empty() => {}
                    Some(text) if text.contains(&format!("<a id=\"{anchor}\"></a>")) => {}
                    _ => faults.push(format!("{place}: {link} leads nowhere")),
                }
            }
        }
    }
    assert!(links > 20, "{links} links");
    assert!(faults.is_empty(), "{faults:#?}");
}

#[test]
fn the_glossary_has_every_word_of_the_module_names() {
    let glossary = read("docs/glossary.md").to_lowercase();
    let known: BTreeSet<&str> =
        glossary.split(|c: char| !c.is_alphanumeric()).chain(PLAIN.split_whitespace()).collect();
    let mut missing = BTreeSet::new();
    for source in sources() {
        for word in source.module.split(['/', '_']).filter(|word| !known.contains(word)) {
            missing.insert(format!("{word} (src/{}.rs)", source.module));
        }
    }
    assert!(missing.is_empty(), "words of module names without a line in docs/glossary.md: {missing:#?}");
}
