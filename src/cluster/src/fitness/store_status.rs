//! The state of a member's store and raft log, as reported by Status.
//!
//! Owns: the fields kept from a Status answer, and values derived from one answer. Must not know: other
//! members, how Status was called.
//! Invariant: a field missing in older versions is `None`, never a misleading zero.

use std::sync::Arc;
use std::time::Duration;

use keyward_etcd::pb::etcdserverpb::StatusResponse;

/// Equal answers in a row, some two seconds of them, after which no entry is half applied.
const SETTLED: u32 = 4;

/// The state in the last Status answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StoreStatus {
    /// Size of the database file in bytes.
    pub db_size: u64,
    /// Used part of the database file in bytes.
    pub db_in_use: u64,
    /// The quota in bytes; reported from 3.6 on.
    pub db_quota: Option<u64>,
    /// The store's revision.
    pub revision: i64,
    /// The newest index of the raft log.
    pub raft_index: u64,
    /// The newest applied index of the raft log.
    pub applied: u64,
    /// The number of answers in a row before this one with the same revision and applied index.
    pub unchanged: u32,
    /// Errors in etcd's words: alarms, and a missing leader.
    pub errors: Arc<[String]>,
    /// The version of the storage format; reported from 3.6 on.
    pub storage_version: Option<Arc<str>>,
    /// Duration of the Status call.
    pub took: Duration,
}

impl StoreStatus {
    /// Reads a Status answer received after `took`.
    #[must_use]
    pub fn read(status: &StatusResponse, took: Duration) -> Self {
        let size = |bytes: i64| u64::try_from(bytes).unwrap_or(0);
        Self {
            db_size: size(status.db_size),
            db_in_use: size(status.db_size_in_use),
            db_quota: Some(size(status.db_size_quota)).filter(|quota| *quota > 0),
            revision: status.header.as_ref().map_or(0, |header| header.revision),
            raft_index: status.raft_index,
            applied: status.raft_applied_index,
            unchanged: 0,
            errors: status.errors.clone().into(),
            storage_version: Some(status.storage_version.as_str())
                .filter(|version| !version.is_empty())
                .map(Into::into),
            took,
        }
    }

    /// The status, behind an earlier one of the same member.
    #[must_use]
    pub fn after(self, earlier: Option<&Self>) -> Self {
        let is_same = |earlier: &&Self| (earlier.revision, earlier.applied) == (self.revision, self.applied);
        let unchanged = earlier.filter(is_same).map_or(0, |earlier| earlier.unchanged.saturating_add(1));
        Self { unchanged, ..self }
    }

    /// The revision of the store behind the applied entries; `None` while entries are being applied: etcd
    /// reads both one after the other.
    #[must_use]
    pub fn settled_revision(&self) -> Option<i64> {
        (self.unchanged >= SETTLED).then_some(self.revision)
    }

    /// The number of entries in the member's own raft log not applied yet.
    #[must_use]
    pub fn unapplied(&self) -> u64 {
        self.raft_index.saturating_sub(self.applied)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_told_is_none() {
        let old =
            StoreStatus::read(&StatusResponse { db_size: 7, ..StatusResponse::default() }, Duration::ZERO);
        assert_eq!((old.db_size, old.db_quota, old.storage_version), (7, None, None));
        let status = StatusResponse {
            raft_index: 9,
            raft_applied_index: 7,
            db_size_quota: 5,
            storage_version: "3.6.0".into(),
            ..StatusResponse::default()
        };
        let mut settling = StoreStatus::read(&status, Duration::ZERO);
        for _ in 0..SETTLED {
            assert_eq!(settling.settled_revision(), None);
            settling = settling.clone().after(Some(&settling));
        }
        assert_eq!(settling.settled_revision(), Some(0));
        let moved = StoreStatus { revision: 1, ..settling.clone() };
        assert_eq!(moved.after(Some(&settling)).settled_revision(), None);
        let new = StoreStatus::read(&status, Duration::ZERO);
        assert_eq!(
            (new.unapplied(), new.db_quota, new.storage_version.as_deref()),
            (2, Some(5), Some("3.6.0"))
        );
    }
}
