//! The imports of the source files: read from the code, and never in a circle of files.

use std::collections::{BTreeMap, BTreeSet};

use crate::source::{Source, code_of, identifier, product_files};

/// The paths that the code of `module` names by `crate`, `super` or `self`, as modules from the crate's root.
pub(crate) fn imported(module: &str, code: &str) -> Vec<Vec<String>> {
    let here: Vec<&str> = module.split('/').collect();
    let mut found = Vec::new();
    for keyword in ["crate::", "super::", "self::"] {
        for (at, _) in code.match_indices(keyword) {
            let before = code[..at].chars().next_back();
            // The second of two `super::` belongs to the path that begins with the first.
            if before.is_some_and(|c| c.is_alphanumeric() || c == '_') || code[..at].ends_with("::") {
                continue;
            }
            let base = match keyword {
                "crate::" => Vec::new(),
                "super::" => here[..here.len() - 1].to_vec(),
                _ => here.clone(),
            };
            let mut path: Vec<String> = base.into_iter().map(str::to_owned).collect();
            let mut rest = &code[at + keyword.len() - 2..];
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

/// The files of its package that each file imports: packages import each other in no circle. A parent that declares a module may use it.
fn files_imported(sources: &[Source]) -> Vec<BTreeSet<usize>> {
    let place = |source: &Source| (source.room().to_owned(), source.module().to_owned());
    let numbers: BTreeMap<_, usize> = sources.iter().map(place).zip(0..).collect();
    let file_of = |room: &str, path: &[String]| {
        let module = |length| numbers.get(&(room.to_owned(), path[..length].join("/"))).copied();
        (1..=path.len()).rev().find_map(module)
    };
    let of = |source: &Source| {
        let targets = imported(source.module(), &code_of(source.product()));
        let targets = targets.iter().filter_map(|path| file_of(source.room(), path));
        let child = format!("{}/", source.module());
        let foreign = |target: &usize| {
            let module = sources[*target].module();
            module != source.module() && !module.starts_with(&child)
        };
        targets.filter(foreign).collect()
    };
    sources.iter().map(of).collect()
}

#[test]
fn no_files_import_each_other_in_a_circle() {
    let sources = product_files();
    let mut imports = files_imported(&sources);
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
        let targets: Vec<_> = imports[*at].iter().map(|target| sources[*target].module()).collect();
        format!("{} imports {}", sources[*at].module(), targets.join(", "))
    };
    let circles: Vec<_> = left.iter().map(circle).collect();
    crate::report("files import each other in circles, or stand between two circles", &circles);
}

#[test]
fn imports_are_read() {
    let code =
        "use crate::a::B;\nuse crate::{b::{C, D}, c, d::E};\nlet x = $crate::e::F; let y = my_crate::g;";
    let tops: BTreeSet<_> =
        imported("x", code).into_iter().filter_map(|path| path.into_iter().next()).collect();
    assert_eq!(tops.into_iter().collect::<Vec<_>>(), ["a", "b", "c", "d", "e"]);
    let code = "pub(super) use super::super::f; use self::g::H;";
    assert_eq!(imported("x/y/z", code), [vec!["x", "f"], vec!["x", "y", "z", "g", "H"]]);
}
