//! The floors of the design: a module imports strictly lower floors only.

use crate::imports::imported;
use crate::report;
use crate::source::{code_of, sources};

/// The floors of the design: a module imports strictly lower ones. `main` stands on top of all.
const FLOORS: &[(u8, &[&str])] = &[
    (12, &["main"]),
    (11, &["app"]),
    (10, &["admin", "reload", "rest"]),
    (9, &["gateway"]),
    (8, &["watch", "lease", "revocation", "policy_store"]),
    (7, &["downstream", "upstream", "own_keys"]),
    (6, &["credentials", "audit"]),
    (5, &["members", "otlp"]),
    (4, &["dial", "policy", "usage"]),
    (3, &["config"]),
    (2, &["rpc"]),
    (1, &["refusal", "shard", "jwt", "users", "authority", "trust"]),
    (
        0,
        &[
            "pb",
            "pem",
            "identity",
            "published",
            "secret",
            "tasks",
            "telemetry",
            "io",
            "byte_account",
            "wall_deadline",
        ],
    ),
];

fn floor_of(module: &str) -> Option<u8> {
    FLOORS.iter().find(|(_, modules)| modules.contains(&module)).map(|(floor, _)| *floor)
}

/// The top module of a module's path; `None` for `lib.rs`, which only lists them.
fn top_of(module: &str) -> Option<&str> {
    module.split('/').next().filter(|top| *top != "lib")
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
    for source in sources() {
        let name = &source.name;
        let Some(module) = top_of(source.module()) else { continue };
        let Some(floor) = floor_of(module) else {
            faults.push(format!("{name}: module `{module}` has no floor"));
            continue;
        };
        let mut paths = imported(source.module(), &code_of(source.product()));
        paths.extend(imported(&format!("{}/tests", source.module()), &code_of(source.tests())));
        let tops = paths.into_iter().filter_map(|path| path.into_iter().next());
        for top in tops.filter(|top| !top.is_empty() && top != module) {
            checked += 1;
            match floor_of(&top) {
                Some(below) if below < floor => {}
                Some(above) => faults.push(format!("{name}: `{module}` ({floor}) imports `{top}` ({above})")),
                None => faults.push(format!("{name}: imports `{top}`, which has no floor")),
            }
        }
    }
    assert!(checked > 5, "found {checked} imports");
    report("a module imports strictly lower floors only", &faults);
}

/// `crate::` says at once that another top module is meant.
#[test]
fn no_module_climbs_out_of_its_floor() {
    let faults: Vec<_> = sources()
        .iter()
        .filter_map(|source| {
            let depth = source.module().split('/').count();
            let climbs = longest_climb(&code_of(source.product())) >= depth;
            let tests_climb = longest_climb(&code_of(source.tests())) > depth;
            (climbs || tests_climb).then(|| format!("{}: `super::` reaches the crate's root", source.name))
        })
        .collect();
    report("write `crate::` to name another top module", &faults);
}

#[test]
fn floors_and_climbs_are_found() {
    assert_eq!(longest_climb("use super::super::x; use super::y;"), 2);
    assert_eq!((floor_of("rpc"), floor_of("nobody")), (Some(2), None));
    assert_eq!((top_of("rpc/scan"), top_of("lib")), (Some("rpc"), None));
}
