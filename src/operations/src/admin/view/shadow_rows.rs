//! The rows of the view `shadow`: who would be refused what, since when, how often.
//!
//! Owns: the text of a missing grant, and joining the grants found missing by all shards. Must not know: how
//! a denial is noted. Invariant: keys and texts of clients are escaped.

use tokio::time::Instant;

use keyward_access::policy::shadow_register::{MissingGrant, MissingGrants, MissingKeys};
use keyward_gateway::shard_rows::{ShadowRow, key_text, range_text};
use keyward_telemetry::printable::escaped;

/// The rows of the missing grants of all shards at `now`.
pub(super) fn joined(of_shards: Vec<(Option<Box<str>>, MissingGrant)>, now: Instant) -> Vec<ShadowRow> {
    let mut missing = MissingGrants::default();
    for (peer, grant) in of_shards {
        missing.add(peer.as_deref(), grant.of_shard());
    }
    missing.list().into_iter().map(|(peer, grant)| row(peer, &grant, now)).collect()
}

fn row(peer: Option<Box<str>>, grant: &MissingGrant, now: Instant) -> ShadowRow {
    let seconds = |from: Instant| now.saturating_duration_since(from).as_secs();
    ShadowRow {
        peer: peer.map(|peer| escaped(&peer)),
        action: grant.action.name(),
        keys: keys_text(&grant.keys),
        rule: escaped(&grant.rule),
        method: grant.method,
        requests: grant.requests,
        since_seconds: seconds(grant.first),
        last_seconds: seconds(grant.last),
        policy_generation: grant.generation.to_string(),
    }
}

fn keys_text(keys: &MissingKeys) -> Option<String> {
    match keys {
        MissingKeys::None => None,
        MissingKeys::Key(key) => Some(key_text(key)),
        MissingKeys::Folder(folder) => Some(format!("{}*", key_text(folder))),
        MissingKeys::Range(start, None) if start.is_empty() => Some("all keys".into()),
        MissingKeys::Range(start, end) => Some(range_text(start, end.as_deref().unwrap_or(b"\0"))),
        MissingKeys::Further => Some("further keys".into()),
        MissingKeys::UnknownMethod(path) => Some(escaped(path)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_told_as_a_grant_would_name_them() {
        let range = |start: &[u8], end: Option<&[u8]>| MissingKeys::Range(start.into(), end.map(Into::into));
        for (keys, text) in [
            (MissingKeys::None, None),
            (MissingKeys::Key(b"/a\x1b".as_slice().into()), Some("/a\\x1b")),
            (range(b"/a/", Some(b"/a0")), Some("/a/*")),
            (range(b"/a", Some(b"/c")), Some("[/a, /c)")),
            (range(b"/a", None), Some("[/a, end)")),
            (range(b"", None), Some("all keys")),
            (MissingKeys::UnknownMethod("/a.B/C".into()), Some("/a.B/C")),
        ] {
            assert_eq!(keys_text(&keys).as_deref(), text);
        }
    }
}
