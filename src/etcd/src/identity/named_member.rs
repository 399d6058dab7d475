//! A member as named by operators.
//!
//! Owns: the meaning of a member's name in the configuration or a request. Must not know: the existing
//! members. Invariant: a name takes precedence over an id, so that a member whose name looks like the id of
//! another member can still be addressed by name.

use std::fmt;
use std::sync::Arc;

use super::MemberId;

/// A member's name, or a member's id in hexadecimal as displayed by etcdctl.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NamedMember(Arc<str>);

impl NamedMember {
    /// Returns None for an empty text.
    #[must_use]
    pub fn new(text: &str) -> Option<Self> {
        (!text.is_empty()).then(|| Self(text.into()))
    }

    /// The text as written.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The text read as an id, if the text is a hexadecimal id.
    fn id(&self) -> Option<MemberId> {
        let digits = self.0.bytes().all(|byte| byte.is_ascii_hexdigit());
        digits.then(|| u64::from_str_radix(&self.0, 16).ok()).flatten().map(MemberId)
    }

    /// Returns the named member of `members`; `told` returns the id and name of a member.
    pub fn find_member<T>(
        &self,
        members: impl Iterator<Item = T> + Clone,
        told: impl Fn(&T) -> (MemberId, &str),
    ) -> Option<T> {
        let by_name = members.clone().find(|member| told(member).1 == &*self.0);
        by_name.or_else(|| {
            let id = self.id()?;
            members.clone().find(|member| told(member).0 == id)
        })
    }

    /// Returns the row for the member with `id` and `name`, among rows keyed by named member.
    #[must_use]
    pub fn find_row<'a, T>(rows: &'a [(Self, T)], id: MemberId, name: &str) -> Option<&'a T> {
        let by_name = rows.iter().find(|(row, _)| !name.is_empty() && row.as_str() == name);
        by_name.or_else(|| rows.iter().find(|(row, _)| row.id() == Some(id))).map(|(_, of)| of)
    }
}

impl fmt::Display for NamedMember {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(text: &str) -> NamedMember {
        NamedMember::new(text).unwrap()
    }

    #[test]
    fn a_member_is_found_by_name_first_and_by_id_then() {
        let members = [(MemberId(0xa1), "m1"), (MemberId(0xb2), "a1"), (MemberId(0xc3), "")];
        let found = |text: &str| {
            named(text).find_member(members.iter(), |member| (member.0, member.1)).map(|member| member.0.0)
        };
        assert_eq!(found("m1"), Some(0xa1));
        assert_eq!(found("a1"), Some(0xb2), "somebody is called so");
        assert_eq!(found("c3"), Some(0xc3));
        assert_eq!(found("00C3"), Some(0xc3));
        for nobody in ["m4", "+c3", "0xc3", "10000000000000000"] {
            assert_eq!(found(nobody), None, "{nobody}");
        }
        assert_eq!(NamedMember::new(""), None);
    }

    #[test]
    fn a_row_is_that_of_the_name_then_that_of_the_id() {
        let rows = [(named("a1"), 1), (named("m2"), 2), (named("c3"), 3)];
        assert_eq!(NamedMember::find_row(&rows, MemberId(0xa1), "m2"), Some(&2));
        assert_eq!(NamedMember::find_row(&rows, MemberId(0xa1), "m1"), Some(&1));
        assert_eq!(NamedMember::find_row(&rows, MemberId(0xc3), ""), Some(&3));
        assert_eq!(NamedMember::find_row(&rows, MemberId(9), "m9"), None);
    }
}
