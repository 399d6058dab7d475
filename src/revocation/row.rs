//! One revocation as text: a line of the state file, a value in etcd.
//!
//! Owns: that form. Must not know: files, keys. Invariant: what is not understood is told, never skipped in silence.

use serde::{Deserialize, Serialize};

use crate::downstream::session::{Entry, Standing};

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
enum Row {
    User { name: String, generation: u64, blocked: bool },
    Session { id: String },
}

/// One line, without its end.
pub(super) fn write(entry: &Entry) -> String {
    let row = match entry {
        Entry::User(name, Standing { generation, blocked }) => {
            Row::User { name: name.as_str().to_owned(), generation: *generation, blocked: *blocked }
        }
        Entry::Session(id) => Row::Session { id: id.to_string() },
    };
    serde_json::to_string(&row).expect("strings, numbers and booleans are always JSON")
}

/// `None` for what is no row. The highest generation is none: no other could follow it.
pub(super) fn read(text: &[u8]) -> Option<Entry> {
    match serde_json::from_slice(text).ok()? {
        Row::User { generation: u64::MAX, .. } => None,
        Row::User { name, generation, blocked } => {
            Some(Entry::User(name.as_str().into(), Standing { generation, blocked }))
        }
        Row::Session { id } => id.parse().ok().map(Entry::Session),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_read_and_nothing_else() {
        let id = "2188fb71f3e76d20bc325cea09efdc7c";
        let standing = Standing { generation: u64::MAX - 1, blocked: true };
        let entries = [Entry::User("ål\"i\nce".into(), standing), Entry::Session(id.parse().unwrap())];
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
