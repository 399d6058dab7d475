//! The line about new limits in a document: `policy.mode` and the modes of bindings are no modes of limits
//! (docs/decisions.md#d59).
//!
//! Owns: finding the roles with other limits, and the line. Must not know: how limits are enforced.

use keyward_config::PolicyMode;
use keyward_config::policy_document::{PolicyDocument, PolicyRole};

/// The line about the roles of `after` whose limits are new or changed; `None` without such a role.
pub(super) fn limit_note(
    limits_mode: PolicyMode,
    before: &PolicyDocument,
    after: &PolicyDocument,
) -> Option<String> {
    let is_new = |role: &&PolicyRole| {
        let known = before.roles.iter().find(|known| known.name == role.name);
        let limits = |role: &PolicyRole| (role.limits.clone(), role.total_limits.clone());
        let has_limits = !(role.limits.is_empty() && role.total_limits.is_empty());
        has_limits && known.map(limits) != Some(limits(role))
    };
    let names: Vec<String> =
        after.roles.iter().filter(is_new).map(|role| format!("{:?}", &*role.name)).collect();
    if names.is_empty() {
        return None;
    }
    let consequence = match limits_mode {
        PolicyMode::Enforce => "enforced at once",
        PolicyMode::Shadow => "counted only",
        PolicyMode::Off => "ignored",
    };
    Some(format!(
        "limits of the roles {}: {consequence}, by policy.limits_mode = \"{}\"; policy.mode and the modes of \
         bindings change nothing there\n",
        names.join(", "),
        limits_mode.name()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyward_config::usage_limits::UsageLimits;

    fn document(roles: &[(&str, Option<u32>)]) -> PolicyDocument {
        let role = |(name, watches): &(&str, Option<u32>)| PolicyRole {
            name: (*name).into(),
            allow: Vec::new(),
            deny: Vec::new(),
            limits: UsageLimits { watches: *watches, ..UsageLimits::default() },
            total_limits: UsageLimits::default(),
        };
        PolicyDocument { roles: roles.iter().map(role).collect(), ..PolicyDocument::default() }
    }

    #[test]
    fn new_and_changed_limits_are_named_with_their_own_mode() {
        let before = document(&[("a", Some(1)), ("b", Some(1)), ("c", None), ("d", Some(1))]);
        let after = document(&[("a", Some(1)), ("b", Some(2)), ("c", Some(3)), ("d", None), ("e", Some(4))]);
        let note = limit_note(PolicyMode::Enforce, &before, &after).expect("a note");
        assert!(note.starts_with(r#"limits of the roles "b", "c", "e": enforced at once"#), "{note}");
        let note = limit_note(PolicyMode::Shadow, &document(&[]), &after).expect("a note");
        assert!(note.starts_with(r#"limits of the roles "a", "b", "c", "e": counted only"#), "{note}");
        assert_eq!(limit_note(PolicyMode::Enforce, &after, &after), None);
    }
}
