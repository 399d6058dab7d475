//! A member as operators name it.
//!
//! Owns: what such a name means. Must not know which members there are. Invariant: a name goes before an id, so that a
//! member whose name looks like another's id is still found by it.

use std::fmt;
use std::sync::Arc;

use super::MemberId;

/// A member's name, or its id in hexadecimal as etcdctl shows it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NamedMember(Arc<str>);

impl NamedMember {
    /// None for nothing.
    #[must_use]
    pub fn new(text: &str) -> Option<Self> {
        (!text.is_empty()).then(|| Self(text.into()))
    }

    /// As it was written.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The id, if it can be one.
    fn id(&self) -> Option<MemberId> {
        let digits = self.0.bytes().all(|byte| byte.is_ascii_hexdigit());
        digits.then(|| u64::from_str_radix(&self.0, 16).ok()).flatten().map(MemberId)
    }

    /// Which of these it names; `told` says id and name of each.
    pub fn among<T>(
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

    /// Of rows that name members, the one of this member.
    #[must_use]
    pub fn row<'a, T>(rows: &'a [(Self, T)], id: MemberId, name: &str) -> Option<&'a T> {
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
            named(text).among(members.iter(), |member| (member.0, member.1)).map(|member| member.0.0)
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
        assert_eq!(NamedMember::row(&rows, MemberId(0xa1), "m2"), Some(&2));
        assert_eq!(NamedMember::row(&rows, MemberId(0xa1), "m1"), Some(&1));
        assert_eq!(NamedMember::row(&rows, MemberId(0xc3), ""), Some(&3));
        assert_eq!(NamedMember::row(&rows, MemberId(9), "m9"), None);
    }
}
