//! The rooms: the table of ARCHITECTURE.md is that of the manifests, and a room uses those below it.
//!
//! rustc holds that a room imports no room that its manifest does not name.

use std::collections::BTreeSet;

use crate::report;
use crate::source::{read, tree};

/// The rooms that the product code of a manifest may use.
fn used(manifest: &str) -> BTreeSet<String> {
    let product = manifest.split("\n[dev-dependencies]").next().unwrap_or_default();
    let names = product.lines().filter_map(|line| line.strip_prefix("keyward-")?.split(['.', ' ']).next());
    names.map(str::to_owned).collect()
}

/// The rooms of the table, from the top, each with those that it uses.
fn table(page: &str) -> Vec<(&str, BTreeSet<String>)> {
    let rows = page.lines().skip_while(|line| !line.starts_with("| room (")).skip(2);
    let rows = rows.take_while(|line| line.starts_with("| "));
    let cells = rows.map(|row| row.trim_matches(['|', ' ']).split(" | ").collect::<Vec<_>>());
    let quoted = |cell: &str| cell.split('`').skip(1).step_by(2).map(str::to_owned).collect();
    cells.filter_map(|row| Some((row.first()?.trim_matches('`'), quoted(row.last()?)))).collect()
}

#[test]
fn the_table_of_the_rooms_is_that_of_their_manifests_and_none_uses_a_higher_one() {
    let page = read("ARCHITECTURE.md");
    let (mut faults, mut above) = (Vec::new(), BTreeSet::new());
    let rooms: Vec<_> = table(&page).into_iter().filter(|(room, _)| !room.contains(' ')).collect();
    for (room, listed) in &rooms {
        let uses = used(&read(&format!("src/{room}/Cargo.toml")));
        if uses != *listed {
            faults.push(format!("{room}: the table has {listed:?}, and the manifest {uses:?}"));
        }
        above.insert((*room).to_owned());
        faults
            .extend(uses.intersection(&above).map(|higher| format!("{room} uses {higher}, which is higher")));
    }
    let is_manifest = |name: &str| name.starts_with("src/") && name.ends_with("/Cargo.toml");
    let manifests = tree().iter().filter(|(name, _)| is_manifest(name)).count();
    assert_eq!((rooms.len(), manifests > 10), (manifests, true), "a row for each room");
    report("ARCHITECTURE.md shows the rooms as they are", &faults);
}

#[test]
fn rows_and_manifests_are_read() {
    let page = "| room (`src/`) | uses |\n|---|---|\n| the root | all |\n| `a` | x | `b`, `c` |\n| `b` | y | nothing |\n\nz";
    let rows = table(page);
    assert_eq!(
        rows.iter().map(|(room, uses)| (*room, uses.len())).collect::<Vec<_>>(),
        [("the root", 0), ("a", 2), ("b", 0)]
    );
    let manifest = "[dependencies]\nkeyward-a.workspace = true\nb.workspace = true\n\n[dev-dependencies]\nkeyward-c.workspace = true\n";
    assert_eq!(used(manifest).into_iter().collect::<Vec<_>>(), ["a"]);
}
