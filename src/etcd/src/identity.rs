//! Names and numbers that identify members, clusters, revisions, users and callers.
//!
//! Owns: newtypes for ids, revisions and user names; in submodules, the caller (`peer`), patterns of callers
//! in rules (`pattern`), and operators' names for a member (`named`). Must not know: the source of a name or
//! number.
//! Invariant: a [`UserName`] is compared byte for byte, never case-folded.

pub mod named_member;
pub mod pattern;
pub mod peer;

use std::fmt;
use std::sync::Arc;

pub use peer::Peer;

/// A member's id, as in `ResponseHeader.member_id`. Displayed in hexadecimal, as etcdctl does.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MemberId(pub u64);

/// A cluster's id, as in `ResponseHeader.cluster_id`. Displayed in hexadecimal.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ClusterId(pub u64);

/// A revision of the key-value store. 0 means "none known".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Revision(pub i64);

/// The name of an etcd user, byte-exact.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct UserName(Arc<str>);

impl UserName {
    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<&str> for UserName {
    fn from(name: &str) -> Self {
        Self(name.into())
    }
}

impl fmt::Display for UserName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for UserName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

macro_rules! hexadecimal {
    ($($id:ty),*) => {$(
        impl fmt::Display for $id {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:x}", self.0)
            }
        }
        impl fmt::Debug for $id {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:x}", self.0)
            }
        }
    )*};
}
hexadecimal!(MemberId, ClusterId);
