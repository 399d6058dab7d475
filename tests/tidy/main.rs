//! Rules that no compiler holds: rooms, sizes, names, language, and what may not stand in a file.
//!
//! Each check reads the tree as git sees it, tells every fault at once, and fails where it found nothing to read.

mod forbidden;
mod imports;
mod language;
mod names;
mod public_items;
mod rooms;
mod sizes;
mod source;

/// Fails with all faults against a rule, if there are any.
fn report(rule: &str, faults: &[String]) {
    assert!(faults.is_empty(), "{rule}\n  {}\n", faults.join("\n  "));
}
