//! The client libraries whose `watchers` programs take part.
//!
//! Owns: the list. Must not know what a watch is for. To add one: a folder under `tests/clients` whose `build` prints the path of a
//! program that keeps the contract of `watchers` (see `tests/clients/README.md`), and a row here.

use std::path::PathBuf;

use crate::harness::client_program::client_program;

/// One client library.
#[derive(Debug)]
pub(crate) struct Family {
    pub(crate) name: &'static str,
    /// Under `tests/clients`.
    folder: &'static str,
    /// For its `build`.
    args: &'static [&'static str],
    /// One program runs for each.
    pub(crate) users: &'static [User],
    /// Over TLS only: the library sends no password without.
    pub(crate) tls: bool,
    pub(crate) can: Can,
}

/// As whom a program watches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum User {
    /// Single keys, prefixes, intervals.
    Alice,
    /// Everything from a key on.
    Tail,
    /// One prefix, and at times not even that.
    Revocable,
}

/// What a library offers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Can {
    pub(crate) fragment: bool,
    /// It puts the pieces of a fragmented response together, and takes responses of any size.
    pub(crate) joins: bool,
    pub(crate) filters: bool,
    /// It tells why etcd ended a watch that stood.
    pub(crate) tells_why: bool,
}

const ALL: Can = Can { fragment: true, joins: true, filters: true, tells_why: true };

pub(crate) const FAMILIES: &[Family] = &[
    go("clientv3 3.4.23", &["3.4.23"], &[User::Alice, User::Revocable]),
    go("clientv3 3.5.1", &["3.5.1"], &[User::Alice, User::Tail]),
    go("clientv3 3.5.11", &["3.5.11"], &[User::Alice, User::Revocable]),
    go("clientv3 3.6.16", &["3.6.16"], &[User::Alice, User::Tail]),
    Family {
        name: "etcd-client",
        folder: "rust",
        args: &[],
        users: &[User::Alice, User::Revocable],
        tls: false,
        can: Can { joins: false, ..ALL },
    },
    // It takes a refused watch for one that stands, so it has no user whose right is taken; and none without TLS.
    Family {
        name: "python etcd3",
        folder: "python",
        args: &[],
        users: &[User::Alice, User::Tail],
        tls: true,
        can: Can { fragment: false, joins: false, filters: false, tells_why: true },
    },
    // After a refused watch it opens none, so it has no user whose right is taken.
    Family {
        name: "npm etcd3",
        folder: "node",
        args: &[],
        users: &[User::Alice, User::Tail],
        tls: false,
        can: Can { fragment: false, joins: false, filters: true, tells_why: true },
    },
];

const fn go(name: &'static str, args: &'static [&'static str], users: &'static [User]) -> Family {
    Family { name, folder: "go", args, users, tls: false, can: Can { tells_why: false, ..ALL } }
}

/// The watches of the test process itself: no library's, bare gRPC.
pub(crate) const BARE: Can = ALL;

impl User {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            User::Alice => "alice",
            User::Tail => "tail",
            User::Revocable => "revocable",
        }
    }
}

impl Family {
    pub(crate) fn program(&self) -> PathBuf {
        client_program(self.folder, self.args)
    }
}
