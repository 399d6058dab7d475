//! The client libraries whose `watchers` programs take part.
//!
//! Owns: the list. Must not know what a watch is for. To add one: a folder under `tests/clients` whose `build` prints the path of a
//! program that keeps the contract of `watchers` (see `tests/clients/go/README.md`), and a row here.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

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
    /// It hands responses on as they came, not single events.
    pub(crate) whole: bool,
    pub(crate) fragment: bool,
    pub(crate) filters: bool,
    pub(crate) prev_kv: bool,
    pub(crate) progress_notify: bool,
    pub(crate) tail: bool,
}

const ALL: Can =
    Can { whole: true, fragment: true, filters: true, prev_kv: true, progress_notify: true, tail: true };

pub(crate) const FAMILIES: &[Family] = &[
    Family {
        name: "clientv3 3.5.1",
        folder: "go",
        args: &["3.5.1"],
        users: &[User::Alice, User::Tail],
        can: ALL,
    },
    Family {
        name: "clientv3 3.5.11",
        folder: "go",
        args: &["3.5.11"],
        users: &[User::Alice, User::Revocable],
        can: ALL,
    },
    Family {
        name: "clientv3 3.6.16",
        folder: "go",
        args: &["3.6.16"],
        users: &[User::Alice, User::Tail],
        can: ALL,
    },
];

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
    /// The program, which `tests/run` has built before.
    pub(crate) fn program(&self) -> PathBuf {
        let script =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/clients").join(self.folder).join("build");
        let built = Command::new(script).args(self.args).stderr(Stdio::inherit()).output();
        let built = built.expect("the build script runs");
        assert!(built.status.success(), "the program of {} cannot be built", self.name);
        String::from_utf8(built.stdout).expect("a path").trim().into()
    }
}
