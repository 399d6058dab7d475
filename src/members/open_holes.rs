//! The published holes in etcd's access control that are open at the members in use.
//!
//! Owns: the holes, and the rule by which a member's version counts. Must not know: how a hole is closed
//! (`upstream::permission_probe`, `gateway::vulnerable_members`, `watch::hub`).
//! Invariant: a member with an unknown version counts as vulnerable as soon as the member takes calls. Every
//! hole is closed by asking etcd itself, so a needless question costs time and refuses no permitted call, with
//! the exceptions of `docs/decisions.md#d55`.

use std::sync::Arc;

use crate::members::fitness::{Readiness, UnreadyReason};
use crate::members::membership::Member;
use crate::members::version::VersionTraits;

/// The holes open at any member in use. The default is: none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpenHoles {
    /// Calls about leases, members and maintenance are served without an identity, and calls reserved for
    /// root are served to every user. See [`VersionTraits::guards_every_method`].
    pub unguarded_methods: bool,
    /// Parts of a Txn are executed without permission. See [`VersionTraits::checks_whole_txns`].
    pub unchecked_txns: bool,
    /// The keys of a lease are told without permission. See [`VersionTraits::guards_lease_keys`].
    pub told_lease_keys: bool,
    /// A watch to the end of the keyspace is allowed by permission for its first key. See
    /// [`VersionTraits::checks_open_watches`].
    pub unchecked_watches: bool,
}

impl OpenHoles {
    /// The holes open at any of `members`.
    #[must_use]
    pub fn of(members: &[Arc<Member>]) -> Self {
        let in_use = members.iter().filter(|member| is_in_use(member));
        in_use.map(|member| Self::of_version(member.traits())).fold(Self::default(), |all, here| Self {
            unguarded_methods: all.unguarded_methods || here.unguarded_methods,
            unchecked_txns: all.unchecked_txns || here.unchecked_txns,
            told_lease_keys: all.told_lease_keys || here.told_lease_keys,
            unchecked_watches: all.unchecked_watches || here.unchecked_watches,
        })
    }

    /// The holes of a version.
    #[must_use]
    pub fn of_version(traits: VersionTraits) -> Self {
        Self {
            unguarded_methods: !traits.guards_every_method,
            unchecked_txns: !traits.checks_whole_txns,
            told_lease_keys: !traits.guards_lease_keys,
            unchecked_watches: !traits.checks_open_watches,
        }
    }

    /// True if any hole is open that is closed by a question to etcd before the call.
    #[must_use]
    pub fn needs_probe(self) -> bool {
        self.unguarded_methods || self.unchecked_txns || self.told_lease_keys
    }
}

/// A member of a known version counts while the member belongs to the cluster: a suspicion or a restart may end
/// before the next snapshot. A member that never told its version counts only while the member takes calls,
/// else a dead member of a patched cluster would count.
fn is_in_use(member: &Member) -> bool {
    let takes_calls =
        matches!(member.readiness, Readiness::Ready | Readiness::NotReady(UnreadyReason::NoLeader));
    takes_calls || (member.version.is_some() && member.is_ours())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::members::membership::tests::member;
    use crate::members::version::Version;

    fn of(version: &str, readiness: Readiness) -> Arc<Member> {
        let mut member = Arc::unwrap_or_clone(member(1, readiness));
        member.version = Version::parse(version).ok();
        Arc::new(member)
    }

    #[test]
    fn one_vulnerable_member_is_enough() {
        let patched = of("3.5.35", Readiness::Ready);
        assert_eq!(OpenHoles::of(&[]), OpenHoles::default());
        assert_eq!(OpenHoles::of(&[Arc::clone(&patched)]), OpenHoles::default());
        let all = OpenHoles::of(&[Arc::clone(&patched), of("3.5.1", Readiness::Ready)]);
        assert!(all.unguarded_methods && all.unchecked_txns && all.told_lease_keys && all.unchecked_watches);
        let between = OpenHoles::of(&[patched, of("3.5.29", Readiness::Ready)]);
        let expected = OpenHoles { unchecked_txns: true, unchecked_watches: true, ..OpenHoles::default() };
        assert_eq!(between, expected);
        assert!(between.needs_probe());
        let watches = OpenHoles::of(&[of("3.5.30", Readiness::Ready)]);
        assert!(watches.unchecked_watches && !watches.needs_probe());
    }

    #[test]
    fn a_version_counts_while_its_member_may_take_calls() {
        let silent = Readiness::NotReady(UnreadyReason::Unprobed);
        let stopped = Readiness::NotReady(UnreadyReason::NoLeader);
        assert_eq!(OpenHoles::of(&[of("unknown", silent)]), OpenHoles::default());
        assert!(OpenHoles::of(&[of("unknown", Readiness::Ready)]).needs_probe());
        assert!(OpenHoles::of(&[of("unknown", stopped)]).needs_probe());
        assert!(OpenHoles::of(&[of("3.4.23", stopped)]).needs_probe());
        let foreign = Readiness::NotReady(UnreadyReason::ForeignCluster);
        assert_eq!(OpenHoles::of(&[of("3.4.23", foreign)]), OpenHoles::default());
    }
}
