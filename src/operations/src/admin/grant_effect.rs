//! The warning about a temporary grant to a peer that this replica has not seen.
//!
//! Owns: the comparison of a grant's peer with connections and sessions, and the warning. Must not know: the
//! storage of grants. Invariant: a warning says nothing of other replicas.

use super::view::{View, ViewTopic, Viewer};
use keyward_etcd::identity::pattern::Glob;

/// The line for an operator whose grant names a peer that nobody here is.
const UNSEEN: &str = "no connection and no session on this replica is of this peer: is the name right?\n";

/// The warning about a grant to the peers of `pattern`, if none of them was seen on this replica.
pub(super) async fn unseen_peer_warning(viewer: &Viewer, pattern: &str) -> Option<&'static str> {
    for topic in [ViewTopic::Clients, ViewTopic::Sessions] {
        // A shard that does not answer in time may have the peer.
        if has_peer(&viewer.view(topic).await.ok()?, pattern) {
            return None;
        }
    }
    Some(UNSEEN)
}

fn has_peer(view: &View, pattern: &str) -> bool {
    let shown = shown_pattern(pattern);
    let mut peers = view.rows.iter().filter_map(|row| row.get("peer")?.as_str());
    peers.any(|peer| shown.matches(peer))
}

/// The pattern of the peers as rows show them: of a certificate with several names, a row shows one.
fn shown_pattern(pattern: &str) -> Glob {
    let authority = |name: &str| pattern.split_once(name).map(|(before, _)| format!("{before}:*"));
    let of_authority =
        pattern.starts_with("cert:").then(|| authority(":DNS=").or_else(|| authority(":URI="))).flatten();
    Glob::new(of_authority.as_deref().unwrap_or(pattern))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_peer_is_found_among_the_rows_of_connections_and_sessions() {
        let row = |peer: &str| json!({ "peer": peer }).as_object().cloned().unwrap_or_default();
        let rows = vec![row("password:alice"), row("cert:staff:CN=web-1"), row("listener:main")];
        let view = View {
            schema_version: 1,
            topic: ViewTopic::Clients,
            taken_at: String::new(),
            uptime_seconds: 0.0,
            rows,
            left_out: 0,
            is_of_replicas: false,
        };
        for (pattern, expected) in [
            ("password:alice", true),
            ("password:a*", true),
            ("password:bob", false),
            ("file:alice", false),
            ("cert:staff:CN=web-*", true),
            ("cert:staff:CN=db-*", false),
            ("cert:staff:DNS=db.example.com", true),
            ("cert:others:URI=spiffe://x", false),
        ] {
            assert_eq!(has_peer(&view, pattern), expected, "{pattern}");
        }
    }
}
