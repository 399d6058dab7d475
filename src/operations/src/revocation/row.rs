//! The text form of one revocation: a line of the state file, or a value in etcd.
//!
//! Owns: the text form. Must not know: files, keys. Invariant: an unreadable row is reported, never skipped
//! silently.

use serde::{Deserialize, Serialize};

use keyward_downstream::session::{RevocationEntry, UserRevocation};

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
enum RevocationRow {
    User { name: String, generation: u64, blocked: bool },
    Session { id: String },
}

/// Returns the row as a line, without a line break.
pub(super) fn write(entry: &RevocationEntry) -> String {
    let row = match entry {
        RevocationEntry::User(name, UserRevocation { generation, blocked }) => {
            RevocationRow::User { name: name.as_str().to_owned(), generation: *generation, blocked: *blocked }
        }
        RevocationEntry::Session(id) => RevocationRow::Session { id: id.to_string() },
    };
    serde_json::to_string(&row).expect("strings, numbers and booleans are always JSON")
}

/// Returns `None` for an unreadable row. The highest generation is rejected, because no higher generation
/// could follow.
pub(super) fn read(text: &[u8]) -> Option<RevocationEntry> {
    match serde_json::from_slice(text).ok()? {
        RevocationRow::User { generation: u64::MAX, .. } => None,
        RevocationRow::User { name, generation, blocked } => {
            Some(RevocationEntry::User(name.as_str().into(), UserRevocation { generation, blocked }))
        }
        RevocationRow::Session { id } => id.parse().ok().map(RevocationEntry::Session),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_read_and_nothing_else() {
        let id = "2188fb71f3e76d20bc325cea09efdc7c";
        let standing = UserRevocation { generation: u64::MAX - 1, blocked: true };
        let entries = [
            RevocationEntry::User("ål\"i\nce".into(), standing),
            RevocationEntry::Session(id.parse().unwrap()),
        ];
        for entry in entries {
            let line = write(&entry);
            assert!(!line.contains('\n'), "{line}");
            assert_eq!(read(line.as_bytes()), Some(entry));
        }
        for other in [
            "",
            "{}",
            "null",
            r#"{"session":{"id":"12"}}"#,
            r#"{"user":{"name":"a","generation":-1,"blocked":true}}"#,
            r#"{"user":{"name":"a","generation":18446744073709551615,"blocked":true}}"#,
            r#"{"user":{"name":"a","generation":1}}"#,
            r#"{"user":{"name":"a","generation":1,"blocked":true,"more":1}}"#,
            r#"{"peer":{"name":"a"}}"#,
        ] {
            assert_eq!(read(other.as_bytes()), None, "{other}");
        }
    }
}
