//! `keyward grants` and `keyward policy history` on a terminal.
//!
//! Owns: the columns. Must not know: the storage of a policy.

use super::table::{TableColumn, TableWidth, TerminalTable};
use crate::policy_store::{GenerationRow, GrantRow, PolicyListing};

const GENERATIONS: [TableColumn; 6] = [
    TableColumn::number("GENERATION", 1),
    TableColumn::exact("IN FORCE", 2),
    TableColumn::exact("APPLIED", 3),
    TableColumn::exact("UID", 5),
    TableColumn::exact("SHA-256", 6),
    TableColumn::text("COMMENT", 4),
];
const GRANTS: [TableColumn; 6] = [
    TableColumn::exact("UNTIL", 3),
    TableColumn::exact("UID", 5),
    TableColumn::text("PEER", 1),
    TableColumn::text("ROLE", 2),
    TableColumn::text("REASON", 4),
    TableColumn::text("WHY VOID", 6),
];
/// Letters of a digest that tell generations apart.
const DIGEST: usize = 16;

impl PolicyListing {
    /// The rows as a table.
    #[must_use]
    pub fn table(&self, width: TableWidth) -> String {
        match self {
            Self::Generations(rows) => {
                let mut table = TerminalTable::new(&GENERATIONS, width);
                rows.iter().for_each(|row| table.row(generation_cells(row)));
                table.to_string()
            }
            Self::Grants(rows) => {
                // The last column has a cell in an emergency only.
                let count = if rows.iter().all(|row| row.has_role) { GRANTS.len() - 1 } else { GRANTS.len() };
                let mut table = TerminalTable::new(&GRANTS[..count], width);
                rows.iter().for_each(|row| table.row(grant_cells(row)));
                table.to_string()
            }
        }
    }
}

fn generation_cells(row: &GenerationRow) -> [String; 6] {
    let GenerationRow { generation, in_force, applied_at, uid, sudo_user, sha256, comment } = row;
    let in_force = if *in_force { "true" } else { "" };
    let digest = sha256.get(..DIGEST).unwrap_or(sha256);
    let generation = generation.to_string();
    let operator = shown(*uid, sudo_user.as_deref());
    [generation, in_force.into(), applied_at.clone(), operator, digest.into(), comment.clone()]
}

fn grant_cells(row: &GrantRow) -> [String; 6] {
    let GrantRow { until, uid, sudo_user, peer, role, has_role, reason } = row;
    let void = if *has_role { "" } else { "the policy in force has no such role" };
    let operator = shown(*uid, sudo_user.as_deref());
    [until.clone(), operator, peer.clone(), role.clone(), reason.clone(), void.into()]
}

/// The operator: `0`, or `0 (sudo alice)`.
fn shown(uid: Option<u32>, sudo_user: Option<&str>) -> String {
    let uid = uid.map_or_else(|| "-".to_owned(), |uid| uid.to_string());
    match sudo_user {
        None => uid,
        Some(user) => format!("{uid} (sudo {user})"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peer_role_and_reason_have_columns_of_their_own() {
        let grant = |has_role| GrantRow {
            until: "2026-01-01T00:30:00Z".into(),
            uid: Some(1000),
            sudo_user: None,
            peer: "file:alice".into(),
            role: "operator".into(),
            has_role,
            reason: "disk full, again".into(),
        };
        let table = |rows: Vec<GrantRow>, width| PolicyListing::Grants(rows).table(width);
        let expected = "UNTIL                 UID   PEER        ROLE      REASON\n\
                        2026-01-01T00:30:00Z  1000  file:alice  operator  disk full, again\n";
        assert_eq!(table(vec![grant(true)], TableWidth::Terminal(80)), expected);
        let void = table(vec![grant(true), grant(false)], TableWidth::Uncut);
        assert!(void.ends_with("disk full, again  the policy in force has no such role\n"), "{void}");
        let narrow = table(vec![grant(true)], TableWidth::Terminal(45));
        assert!(narrow.starts_with("UNTIL                 PEER        ROLE\n"), "{narrow}");
    }

    #[test]
    fn the_generation_in_force_is_marked() {
        let row = |generation, in_force| GenerationRow {
            generation,
            in_force,
            applied_at: "2026-01-01T00:30:00Z".into(),
            uid: Some(0),
            sudo_user: Some("olga".into()),
            sha256: "0123456789abcdef0123".into(),
            comment: "team b".into(),
        };
        let table = PolicyListing::Generations(vec![row(7, true), row(6, false)]).table(TableWidth::Uncut);
        let expected = "GENERATION  IN FORCE  APPLIED               UID            SHA-256           COMMENT\n\
                        \x20        7  true      2026-01-01T00:30:00Z  0 (sudo olga)  0123456789abcdef  team b\n\
                        \x20        6            2026-01-01T00:30:00Z  0 (sudo olga)  0123456789abcdef  team b\n";
        assert_eq!(table, expected);
    }
}
