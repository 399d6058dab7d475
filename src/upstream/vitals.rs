//! How a member's store and raft log are doing, as its Status says.
//!
//! Owns: what of a Status is kept, and what follows from it alone. Must not know: other members, how it was asked.
//! Invariant: what a version does not tell is `None`, never a zero that looks like a figure.

use std::sync::Arc;
use std::time::Duration;

use crate::pb::etcdserverpb::StatusResponse;

/// What a member said of itself when it last answered a Status.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Vitals {
    /// Bytes of the database file.
    pub db_size: u64,
    /// Bytes of it that are in use.
    pub db_in_use: u64,
    /// The quota in bytes; told from 3.6 on.
    pub db_quota: Option<u64>,
    /// The store's revision.
    pub revision: i64,
    /// The raft log's newest index.
    pub raft_index: u64,
    /// Of those the newest that is applied.
    pub applied: u64,
    /// What it complains about, in etcd's words: alarms, and that there is no leader.
    pub errors: Arc<[String]>,
    /// The version of the storage format, told from 3.6 on.
    pub storage_version: Option<Arc<str>>,
    /// How long that Status took.
    pub took: Duration,
}

impl Vitals {
    /// What `status` says, which took so long.
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
            errors: status.errors.clone().into(),
            storage_version: Some(status.storage_version.as_str())
                .filter(|version| !version.is_empty())
                .map(Into::into),
            took,
        }
    }

    /// How many entries of its own log the member has not applied yet.
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
        let old = Vitals::read(&StatusResponse { db_size: 7, ..StatusResponse::default() }, Duration::ZERO);
        assert_eq!((old.db_size, old.db_quota, old.storage_version), (7, None, None));
        let status = StatusResponse {
            raft_index: 9,
            raft_applied_index: 7,
            db_size_quota: 5,
            storage_version: "3.6.0".into(),
            ..StatusResponse::default()
        };
        let new = Vitals::read(&status, Duration::ZERO);
        assert_eq!(
            (new.unapplied(), new.db_quota, new.storage_version.as_deref()),
            (2, Some(5), Some("3.6.0"))
        );
    }
}
