//! `keyward sessions`: the sessions seen by a replica, and the revoked users.
//!
//! Owns: the rows, and their form for a terminal. Must not know: the admin socket. Invariant: no token is
//! shown.

use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use super::table::{TableColumn, TableWidth, TerminalTable};
use keyward_downstream::session::{ListedSession, RevocationEntry, Revocations, Sealer};

const SESSIONS: [TableColumn; 4] = [
    TableColumn::exact("SESSION", 2),
    TableColumn::exact("ISSUED", 3),
    TableColumn::exact("STATE", 4),
    TableColumn::text("PEER", 1),
];
const USERS: [TableColumn; 3] =
    [TableColumn::exact("REVOKED BEFORE", 3), TableColumn::exact("STATE", 2), TableColumn::text("USER", 1)];

/// The sessions seen by a replica, and the revoked users. The JSON form is for programs: fields are added,
/// never renamed.
#[derive(Debug, Serialize, Deserialize)]
pub struct SessionListing {
    sessions: Vec<SessionRow>,
    users: Vec<RevokedUserRow>,
}

#[derive(Debug, Serialize, Deserialize)]
struct SessionRow {
    id: String,
    peer: String,
    /// Seconds of the Unix epoch.
    issued_at: u64,
    valid: bool,
}

#[derive(Debug, Serialize, Deserialize)]
struct RevokedUserRow {
    name: String,
    generation: u64,
    blocked: bool,
}

impl SessionListing {
    /// Lists the sessions known to `sealer`, and the users among `revocations`.
    #[must_use]
    pub fn of(sealer: &Sealer, revocations: &Revocations) -> Self {
        let row = |seen: ListedSession| SessionRow {
            id: seen.id.to_string(),
            peer: seen.peer.to_string(),
            issued_at: seen.issued_at,
            valid: seen.is_valid,
        };
        let mut sessions: Vec<_> = sealer.listed_sessions().into_iter().map(row).collect();
        sessions.sort_by(|a, b| (&a.peer, a.issued_at, &a.id).cmp(&(&b.peer, b.issued_at, &b.id)));
        let user = |entry| match entry {
            RevocationEntry::User(name, standing) => Some(RevokedUserRow {
                name: name.as_str().to_owned(),
                generation: standing.generation,
                blocked: standing.blocked,
            }),
            RevocationEntry::Session(_) => None,
        };
        let mut users: Vec<_> = revocations.entries().filter_map(user).collect();
        users.sort_by(|a, b| a.name.cmp(&b.name));
        Self { sessions, users }
    }
}

impl SessionListing {
    /// The listing for a terminal.
    #[must_use]
    pub fn text(&self, width: TableWidth) -> String {
        let mut sessions = TerminalTable::new(&SESSIONS, width);
        for SessionRow { id, peer, issued_at, valid } in &self.sessions {
            let state = if *valid { "valid" } else { "revoked" };
            sessions.row([id.clone(), moment(*issued_at), state.to_owned(), peer.clone()]);
        }
        if self.users.is_empty() {
            return sessions.to_string();
        }
        let mut users = TerminalTable::new(&USERS, width);
        for RevokedUserRow { name, generation, blocked } in &self.users {
            let state = if *blocked { "blocked" } else { "" };
            users.row([moment(generation / 1_000_000), state.to_owned(), name.clone()]);
        }
        format!("{sessions}\n{users}")
    }
}

/// Formats seconds of the Unix epoch as RFC 3339; a number if the year has more than four digits.
fn moment(seconds: u64) -> String {
    let moment = i64::try_from(seconds).ok().and_then(|s| OffsetDateTime::from_unix_timestamp(s).ok());
    moment.and_then(|moment| moment.format(&Rfc3339).ok()).unwrap_or_else(|| seconds.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_is_valid_or_revoked() {
        let session = |valid| SessionRow { id: "7".into(), peer: "file:a".into(), issued_at: 0, valid };
        let listing = SessionListing { sessions: vec![session(true), session(false)], users: Vec::new() };
        let states: Vec<_> = listing
            .text(TableWidth::Uncut)
            .lines()
            .map(|line| line.split_whitespace().nth(2).map(str::to_owned))
            .collect();
        assert_eq!(states, ["STATE", "valid", "revoked"].map(|state| Some(state.to_owned())));
    }

    #[test]
    fn moments_are_dates() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_700_000_000, "2023-11-14T22:13:20Z"),
            (1_772_323_199, "2026-02-28T23:59:59Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(moment(seconds), text);
        }
    }
}
