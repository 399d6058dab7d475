//! The published holes of etcd that are open at the members in use: in its access control, and requests that
//! end or split members.
//!
//! Owns: the holes. Must not know: members, how a hole is closed
//! (`upstream::permission_probe`, `gateway::vulnerable_members`, `gateway::fatal_requests`, `watch::hub`).
//! Invariant: a member with an unknown version counts as vulnerable as soon as the member takes calls. Every
//! hole in the access control is closed by asking etcd itself, so a needless question costs time and refuses
//! no permitted call, with the exceptions of `docs/decisions.md#d57`.

use crate::version::VersionTraits;
use keyward_etcd::rpc::fatal_request::Weaknesses;

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
    /// While an alarm is raised, writes and changes of users are applied without permission. See
    /// [`VersionTraits::checks_under_alarm`].
    pub unchecked_under_alarm: bool,
    /// Requests that end or split members.
    pub weaknesses: Weaknesses,
}

impl OpenHoles {
    /// The holes open at a member of any of these versions.
    #[must_use]
    pub fn of(versions: impl Iterator<Item = VersionTraits>) -> Self {
        versions.map(Self::of_version).fold(Self::default(), |all, here| Self {
            unguarded_methods: all.unguarded_methods || here.unguarded_methods,
            unchecked_txns: all.unchecked_txns || here.unchecked_txns,
            told_lease_keys: all.told_lease_keys || here.told_lease_keys,
            unchecked_watches: all.unchecked_watches || here.unchecked_watches,
            unchecked_under_alarm: all.unchecked_under_alarm || here.unchecked_under_alarm,
            weaknesses: Weaknesses {
                sort_options: all.weaknesses.sort_options || here.weaknesses.sort_options,
                split_txns: all.weaknesses.split_txns || here.weaknesses.split_txns,
                lost_leases: all.weaknesses.lost_leases || here.weaknesses.lost_leases,
            },
        })
    }

    fn of_version(traits: VersionTraits) -> Self {
        Self {
            unguarded_methods: !traits.guards_every_method,
            unchecked_txns: !traits.checks_whole_txns,
            told_lease_keys: !traits.guards_lease_keys,
            unchecked_watches: !traits.checks_open_watches,
            unchecked_under_alarm: !traits.checks_under_alarm,
            weaknesses: Weaknesses {
                sort_options: !traits.checks_sort_options,
                split_txns: !traits.applies_txns_alike,
                lost_leases: !traits.loads_all_leases,
            },
        }
    }

    /// True if any hole is open that is closed by a question to etcd before the call.
    #[must_use]
    pub fn needs_probe(self) -> bool {
        self.unguarded_methods || self.unchecked_txns || self.told_lease_keys
    }
}
