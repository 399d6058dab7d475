//! The limit on the process's open files, of which every connection takes one.
//!
//! Owns: the limit of the operating system, and the division of the files between clients and all else. Must
//! not know: connections. Invariant: files are left for members, the admin address and the audit log, however
//! many clients there are.

use rustix::process::{Resource, getrlimit, setrlimit};

/// Divisor: the part of the files that is kept.
const KEPT: usize = 8;
/// Bounds of the part. A shard has a few connections to each member, a process some thirty files of its own.
const KEPT_LEAST: usize = 32;
const KEPT_MOST: usize = 512;
/// Divisor and lower bound of the files for clients that are leaving while others arrive
/// (`downstream::connection_table`).
const LEAVING: usize = 8;
const LEAVING_LEAST: usize = 64;

/// The division of the files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DescriptorRoom {
    /// The limit on open files.
    pub limit: usize,
    /// The part that clients do not get.
    kept: usize,
    /// Client connections that fit.
    pub clients: usize,
}

impl DescriptorRoom {
    /// Divides a limit.
    #[must_use]
    pub fn of(limit: usize) -> Self {
        let kept = (limit / KEPT).clamp(KEPT_LEAST, KEPT_MOST);
        let rest = limit.saturating_sub(kept);
        let clients = rest - (rest / LEAVING).max(LEAVING_LEAST).min(rest / 2);
        Self { limit, kept, clients: clients.max(1) }
    }

    /// True while so many files are `open` that the kept part is next.
    #[must_use]
    pub fn is_short(&self, open: u64) -> bool {
        usize::try_from(open).is_ok_and(|open| open.saturating_add(self.kept) >= self.limit)
    }
}

/// Raises the soft limit to the hard one, as Go's runtime does for etcd: systemd and containers begin with a
/// soft limit of 1,024, for programs that use select(2). Returns the division of the limit; `None` without a
/// limit.
#[must_use]
pub fn raise_descriptor_limit() -> Option<DescriptorRoom> {
    let mut limit = getrlimit(Resource::Nofile);
    if limit.current != limit.maximum {
        let before = limit.current;
        limit.current = limit.maximum;
        if let Err(error) = setrlimit(Resource::Nofile, limit) {
            tracing::warn!(%error, "the limit on open files is not raised");
            limit.current = before;
        }
    }
    let limit = usize::try_from(limit.current?).unwrap_or(usize::MAX);
    Some(DescriptorRoom::of(limit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_get_most_of_a_large_limit_and_never_all_of_a_small_one() {
        for limit in [0, 1, 40, 64, 256, 1024, 4096, 65_536, 524_288, usize::MAX] {
            let room = DescriptorRoom::of(limit);
            let leaving = (room.clients / LEAVING).max(LEAVING_LEAST);
            if limit >= 256 {
                assert!(room.clients + leaving + room.kept <= limit, "{room:?}");
                assert!(room.clients >= limit / 8 * 5, "{room:?}");
            }
            assert!(room.clients >= 1, "{room:?}");
        }
        let room = DescriptorRoom::of(1024);
        assert!(!room.is_short(895) && room.is_short(896));
    }
}
