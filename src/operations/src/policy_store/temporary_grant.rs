//! A role given to a peer for a while: its stored form, and its binding.
//!
//! Owns: the row, the key, the end. Must not know: etcd, the rules of a role. Invariant: an unreadable row,
//! or a row for an unknown role or peer, gives nothing.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use data_encoding::HEXLOWER;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use keyward_config::Conditions;
use keyward_config::policy_document::{PolicyBinding, PolicyDocument};
use keyward_etcd::identity::pattern::PeerPattern;

/// A role given to a peer for a while.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct TemporaryGrant {
    /// The pattern of the peer.
    pub(super) peer: String,
    /// The name of the role.
    pub(super) role: String,
    /// The operator's reason.
    pub(super) reason: String,
    /// The operator's user id on the machine of the replica.
    pub(super) uid: Option<u32>,
    /// The user who became root by sudo, as root's process claims.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) sudo_user: Option<String>,
    /// The time of the change, in seconds of the Unix epoch.
    pub(super) given_at: u64,
    /// The end, in seconds of the Unix epoch.
    pub(super) until: u64,
}

impl TemporaryGrant {
    /// Reads a row at its key, given without the prefix. `None` if unreadable, or of another key.
    pub(super) fn read(key: &str, value: &[u8]) -> Option<Self> {
        let grant: Self = serde_json::from_slice(value).ok()?;
        (grant.key() == key).then_some(grant)
    }

    /// The value of the grant's key.
    pub(super) fn value(&self) -> Bytes {
        // Strings and numbers are always JSON.
        serde_json::to_vec(self).unwrap_or_default().into()
    }

    /// The key, without the prefix: a peer has one grant of a role.
    pub(super) fn key(&self) -> String {
        key_of(&self.peer, &self.role)
    }

    /// True at and after the end.
    pub(super) fn has_ended(&self, now: SystemTime) -> bool {
        self.end() <= now
    }

    fn end(&self) -> SystemTime {
        // A time beyond the clock's range would never end.
        let until = SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(self.until));
        until.unwrap_or(SystemTime::UNIX_EPOCH)
    }

    /// The binding of the role to the peer.
    pub(super) fn binding(&self, document: &PolicyDocument, issuers: &[Arc<str>]) -> Option<PolicyBinding> {
        let role = document.roles.iter().position(|role| *role.name == *self.role)?;
        let peer = PeerPattern::parse(&self.peer, issuers).ok()?;
        Some(PolicyBinding {
            roles: vec![role],
            conditions: Conditions { peer: Some(peer), ..Conditions::default() },
            group: None,
            etcd_user: None,
            listener: None,
            namespace: None,
            until: Some(self.end()),
            mode: None,
        })
    }
}

/// The key of a grant, without the prefix.
pub(super) fn key_of(peer: &str, role: &str) -> String {
    let digest = Sha256::new().chain_update(peer).chain_update([0]).chain_update(role).finalize();
    HEXLOWER.encode(&digest[..16])
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyward_config::policy_document::PolicyRole;

    fn grant() -> TemporaryGrant {
        TemporaryGrant {
            peer: "file:alice".into(),
            role: "b".into(),
            reason: "incident 7".into(),
            uid: Some(0),
            sudo_user: None,
            given_at: 1,
            until: 1_000,
        }
    }

    #[test]
    fn a_row_is_read_at_its_own_key_only() {
        let (row, key) = (grant(), grant().key());
        assert_eq!(TemporaryGrant::read(&key, &row.value()), Some(grant()));
        assert_eq!(TemporaryGrant::read(&key_of("file:bob", "b"), &row.value()), None);
        assert_eq!(TemporaryGrant::read(&key, b"garbage"), None);
        assert_ne!(key_of("file:a", "bc"), key_of("file:ab", "c"));
    }

    #[test]
    fn a_grant_binds_its_role_until_its_end() {
        let role = |name: &str| {
            let (limits, total_limits) = Default::default();
            PolicyRole { name: name.into(), allow: vec![], deny: vec![], limits, total_limits }
        };
        let document = PolicyDocument { roles: vec![role("a"), role("b")], ..PolicyDocument::default() };
        let binding = grant().binding(&document, &[]).unwrap();
        let end = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000);
        assert_eq!((&binding.roles[..], binding.until), (&[1][..], Some(end)));
        assert!(grant().has_ended(end) && !grant().has_ended(end - Duration::from_secs(1)));
        let unknown = TemporaryGrant { role: "c".into(), ..grant() };
        assert_eq!(unknown.binding(&document, &[]), None);
        let nobody = TemporaryGrant { peer: "alice".into(), ..grant() };
        assert_eq!(nobody.binding(&document, &[]), None);
        assert!(TemporaryGrant { until: u64::MAX, ..grant() }.has_ended(end), "a time that no clock reaches");
    }
}
