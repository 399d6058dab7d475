//! The difference between two documents of a policy, as lines for an operator.
//!
//! Owns: the comparison of roles, groups and bindings, and the lines. Must not know: the effect of a rule.
//! Invariant: two documents without a line have the same roles, groups and bindings; the order of rows and
//! the comments of a document are no difference.

use std::collections::{BTreeMap, BTreeSet};

use toml::{Table, Value};

/// The rows of a document: each title with its lines. A binding is a title without lines.
type Rows = BTreeMap<String, BTreeSet<String>>;

/// The lines of the difference between two valid documents: `-` removed, `+` added, `~` changed.
pub(super) fn difference(before: &str, after: &str) -> Vec<String> {
    let (before, after) = (rows(before), rows(after));
    let titles: BTreeSet<&String> = before.keys().chain(after.keys()).collect();
    let mut lines = Vec::new();
    for title in titles {
        let (was, is) = (before.get(title), after.get(title));
        if was == is {
            continue;
        }
        let mark = match (was, is) {
            (None, _) => '+',
            (_, None) => '-',
            (Some(_), Some(_)) => '~',
        };
        lines.push(format!("{mark} {title}"));
        let empty = BTreeSet::new();
        let (was, is) = (was.unwrap_or(&empty), is.unwrap_or(&empty));
        lines.extend(was.difference(is).map(|line| format!("-   {line}")));
        lines.extend(is.difference(was).map(|line| format!("+   {line}")));
    }
    lines
}

fn rows(text: &str) -> Rows {
    let mut rows = Rows::new();
    let document: Table = text.parse().unwrap_or_default();
    for table in tables(&document, "role") {
        let lines = rows.entry(format!("role {}", name(table))).or_default();
        for kind in ["allow", "deny"] {
            lines.extend(tables(table, kind).map(|grant| format!("{kind} {}", inline(grant))));
        }
        let others = table.iter().filter(|(key, _)| !["name", "allow", "deny"].contains(&key.as_str()));
        lines.extend(others.map(|(key, value)| format!("{key} = {value}")));
    }
    for table in tables(&document, "group") {
        let members = table.get("members").and_then(Value::as_array).into_iter().flatten();
        rows.entry(format!("group {}", name(table))).or_default().extend(members.map(Value::to_string));
    }
    let mut bindings: BTreeMap<String, usize> = BTreeMap::new();
    for table in tables(&document, "binding") {
        *bindings.entry(inline(table)).or_default() += 1;
    }
    for (binding, count) in bindings {
        let times = if count > 1 { format!(", {count} times") } else { String::new() };
        rows.insert(format!("binding {binding}{times}"), BTreeSet::new());
    }
    rows
}

fn tables<'t>(table: &'t Table, key: &str) -> impl Iterator<Item = &'t Table> + use<'t> {
    table.get(key).and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_table)
}

fn name(table: &Table) -> String {
    table.get("name").map(Value::to_string).unwrap_or_default()
}

fn inline(table: &Table) -> String {
    Value::Table(table.clone()).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEFORE: &str = r#"
        [[role]]
        name = "app"
        allow = [{ actions = ["read"], prefix = "/app/" }, { actions = ["write"], key = "/app/lock" }]
        [[role]]
        name = "old"
        [[group]]
        name = "team"
        members = ["file:alice", "file:bob"]
        [[binding]]
        roles = ["app"]
        group = "team"
        [[binding]]
        roles = ["old"]
        peer = "file:carol"
    "#;
    const AFTER: &str = r#"
        # Another comment, another order.
        [[binding]]
        group = "team"
        roles = ["app"]
        [[group]]
        name = "team"
        members = ["file:bob", "file:dave"]
        [[role]]
        name = "app"
        allow = [{ actions = ["write"], key = "/app/lock" }, { actions = ["read"], prefix = "/app2/" }]
        deny = [{ actions = ["write"], prefix = "/app/secret/" }]
        limits = { calls_per_second = 5 }
        [[role]]
        name = "new"
    "#;

    #[test]
    fn roles_grants_groups_and_bindings_are_compared_and_comments_and_order_are_not() {
        assert_eq!(difference(BEFORE, BEFORE), Vec::<String>::new());
        assert_eq!(difference(BEFORE, &format!("# a comment\n{BEFORE}")), Vec::<String>::new());
        let lines = difference(BEFORE, AFTER).join("\n");
        let wanted = [
            r#"- binding { peer = "file:carol", roles = ["old"] }"#,
            r#"~ group "team""#,
            r#"-   "file:alice""#,
            r#"+   "file:dave""#,
            r#"~ role "app""#,
            r#"-   allow { actions = ["read"], prefix = "/app/" }"#,
            r#"+   allow { actions = ["read"], prefix = "/app2/" }"#,
            r#"+   deny { actions = ["write"], prefix = "/app/secret/" }"#,
            r#"+   limits = { calls_per_second = 5 }"#,
            r#"+ role "new""#,
            r#"- role "old""#,
        ];
        assert_eq!(lines, wanted.join("\n"));
    }
}
