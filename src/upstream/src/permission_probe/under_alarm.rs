//! The questions about a caller's permissions while an alarm is raised, when etcd before 3.6 applies writes
//! and changes of users without a check of permissions (etcd-io/etcd#22386).
//!
//! Owns: the questions that etcd answers truthfully then: about root by a call that is checked before it is
//! answered, and about keys by the roles of the user. Must not know: when an alarm is raised.
//! Invariant: a judgement by roles allows no more than etcd's own.

use std::ops::ControlFlow;

use bytes::Bytes;
use prost::Message as _;
use tokio::time::timeout;

use super::{PATIENCE, PermissionProbe, Unproved, within_patience};
use crate::send::UpstreamUser;
use keyward_cluster::choose::MemberTarget;
use keyward_etcd::pb::authpb::{Permission, permission};
use keyward_etcd::pb::etcdserverpb::{
    AlarmRequest, AlarmResponse, AuthRoleGetRequest, AuthRoleGetResponse, AuthUserGetRequest,
    AuthUserGetResponse, HashKvRequest,
};
use keyward_etcd::refusal::Refusal;
use keyward_etcd::rpc::key_range::{KeyRange, is_covered};
use keyward_etcd::rpc::method::Method;
use keyward_etcd::rpc::touch::{self, Action, TouchTarget};
use keyward_etcd::rpc::txn_permissions::{KeyAccess, KeyPermission};

const ALARM: &str = "/etcdserverpb.Maintenance/Alarm";
const HASH_KV: &str = "/etcdserverpb.Maintenance/HashKV";
const USER_GET: &str = "/etcdserverpb.Auth/UserGet";
const ROLE_GET: &str = "/etcdserverpb.Auth/RoleGet";
const ROOT_ROLE: &str = "root";
/// The answer to a HashKV at a revision to come.
const FUTURE_REVISION: &str = "etcdserver: mvcc: required revision is a future revision";

impl PermissionProbe {
    /// True if an alarm is raised, or if no member says that none is. Any user may ask.
    pub async fn may_have_alarm(&self) -> bool {
        let asked = AlarmRequest::default().encode_to_vec();
        let listed = timeout(PATIENCE, self.ask(ALARM, &asked, MemberTarget::Any)).await;
        let alarms = listed.ok().and_then(Result::ok).and_then(|answer| AlarmResponse::decode(answer).ok());
        alarms.is_none_or(|answer| !answer.alarms.is_empty())
    }

    /// Succeeds if the user has this role, or the root role.
    ///
    /// # Errors
    /// etcd's refusal, or no member answered.
    pub async fn has_role(&self, role: &str) -> Result<(), Refusal> {
        within_patience(async {
            let roles = self.roles().await?;
            if roles.iter().any(|own| own == role || own == ROOT_ROLE) { Ok(()) } else { Err(denied()) }
        })
        .await
    }

    /// Succeeds if the user has the root role. A member answers a HashKV behind its check of the role, and at
    /// a revision to come before it hashes anything.
    ///
    /// # Errors
    /// etcd's refusal, or no member answered.
    pub async fn is_root_under_alarm(&self) -> Result<(), Refusal> {
        let asked = HashKvRequest { revision: i64::MAX }.encode_to_vec();
        within_patience(async {
            match self.ask(HASH_KV, &asked, MemberTarget::Any).await {
                Ok(_) => Ok(()),
                Err(Unproved::Denied(status)) if status.message == FUTURE_REVISION => Ok(()),
                Err(unproved) => Err(unproved),
            }
        })
        .await
    }

    /// Succeeds if the roles of the user permit everything that `method` with `message` does to keys.
    ///
    /// # Errors
    /// The roles permit less, the message cannot be read, or no member answered.
    pub async fn has_roles_for(&self, method: &Method, message: &[u8]) -> Result<(), Refusal> {
        if matches!(self.user, UpstreamUser::Nobody) {
            return Err(Refusal::USER_EMPTY);
        }
        within_patience(async {
            let permissions = match self.permissions().await? {
                UserPermissions::Root => return Ok(()),
                UserPermissions::Of(permissions) => permissions,
            };
            let (mut needed, leases) = needed(method, message).ok_or_else(denied)?;
            for lease in leases {
                let keys = self.lease_keys(lease).await?;
                needed.extend(keys.into_iter().map(|key| KeyPermission::of_key(KeyAccess::Write, key)));
            }
            if needed.iter().all(|needed| is_permitted(needed, &permissions)) {
                Ok(())
            } else {
                Err(denied())
            }
        })
        .await
    }

    /// The roles of the user.
    async fn roles(&self) -> Result<Vec<String>, Unproved> {
        let UpstreamUser::User(identity) = &self.user else { return Ok(Vec::new()) };
        let asked = AuthUserGetRequest { name: identity.user().as_str().to_owned() }.encode_to_vec();
        let answer = self.ask(USER_GET, &asked, MemberTarget::Any).await?;
        Ok(AuthUserGetResponse::decode(answer).map_err(unreadable)?.roles)
    }

    async fn permissions(&self) -> Result<UserPermissions, Unproved> {
        let roles = self.roles().await?;
        if roles.iter().any(|role| role == ROOT_ROLE) {
            return Ok(UserPermissions::Root);
        }
        let mut permissions = Vec::new();
        for role in roles {
            let asked = AuthRoleGetRequest { role }.encode_to_vec();
            let answer = self.ask(ROLE_GET, &asked, MemberTarget::Any).await?;
            permissions.extend(AuthRoleGetResponse::decode(answer).map_err(unreadable)?.perm);
        }
        Ok(UserPermissions::Of(permissions))
    }
}

enum UserPermissions {
    Root,
    Of(Vec<Permission>),
}

fn denied() -> Unproved {
    Unproved::Denied(Refusal::PERMISSION_DENIED.status())
}

fn unreadable(_fault: prost::DecodeError) -> Unproved {
    Unproved::Unknown(Refusal::NOTHING_SENT)
}

/// The ranges, and the leases whose keys must all be writable; `None` for a message that cannot be read.
fn needed(method: &Method, message: &[u8]) -> Option<(Vec<KeyPermission>, Vec<i64>)> {
    let (mut ranges, mut leases) = (Vec::new(), Vec::new());
    let visited = touch::visit(method, message, &mut |touch| {
        match touch.target {
            TouchTarget::Keys(range) => {
                let access = if touch.action == Action::Read { KeyAccess::Read } else { KeyAccess::Write };
                let (key, range_end) = range.fields();
                let (key, range_end) = (Bytes::copy_from_slice(key), Bytes::copy_from_slice(range_end));
                ranges.push(KeyPermission { access, key, range_end });
            }
            TouchTarget::KeysOfLease(lease) | TouchTarget::KeysSharingLease(lease) => leases.push(lease),
            TouchTarget::Cluster => {}
        }
        ControlFlow::Continue(())
    });
    visited.ok().map(|()| (ranges, leases))
}

/// True if the union of the permissions of the needed kind has the whole range, as etcd judges.
fn is_permitted(needed: &KeyPermission, permissions: &[Permission]) -> bool {
    let suits = |permission: &&Permission| match permission.perm_type() {
        permission::Type::Read => needed.access == KeyAccess::Read,
        permission::Type::Write => needed.access == KeyAccess::Write,
        permission::Type::Readwrite => true,
    };
    let ranges: Vec<_> = permissions
        .iter()
        .filter(suits)
        .map(|permission| KeyRange::of(&permission.key, &permission.range_end))
        .collect();
    is_covered(KeyRange::of(&needed.key, &needed.range_end), &ranges)
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyward_etcd::pb::etcdserverpb::{DeleteRangeRequest, LeaseRevokeRequest};
    use keyward_etcd::rpc::method::lookup;

    fn permission(perm_type: permission::Type, key: &'static str, end: &'static str) -> Permission {
        Permission { perm_type: perm_type.into(), key: key.into(), range_end: end.into() }
    }

    #[test]
    fn a_range_is_permitted_by_the_union_of_permissions_of_its_kind() {
        use permission::Type::{Read, Readwrite, Write};
        let needs = |access, key: &'static str, end: &'static str, permissions: &[Permission]| {
            is_permitted(&KeyPermission { access, key: key.into(), range_end: end.into() }, permissions)
        };
        let roles =
            [permission(Write, "a", "c"), permission(Readwrite, "c", "e"), permission(Read, "e", "\0")];
        assert!(needs(KeyAccess::Write, "a", "e", &roles));
        assert!(!needs(KeyAccess::Write, "a", "f", &roles));
        assert!(needs(KeyAccess::Read, "c", "\0", &roles));
        assert!(!needs(KeyAccess::Read, "b", "\0", &roles));
        assert!(!needs(KeyAccess::Write, "\0", "\0", &roles));
        assert!(needs(KeyAccess::Write, "d", "", &roles));
    }

    #[test]
    fn a_delete_needs_its_range_and_a_revocation_the_keys_of_the_lease() {
        let delete =
            DeleteRangeRequest { key: "a".into(), range_end: "b".into(), prev_kv: true }.encode_to_vec();
        let (ranges, leases) =
            needed(lookup("/etcdserverpb.KV/DeleteRange").unwrap(), &delete).expect("readable");
        let found: Vec<_> =
            ranges.iter().map(|range| (range.access, &*range.key, &*range.range_end)).collect();
        assert_eq!(found, [(KeyAccess::Write, &b"a"[..], &b"b"[..]), (KeyAccess::Read, b"a", b"b")]);
        assert!(leases.is_empty());
        let revoke = LeaseRevokeRequest { id: 7 }.encode_to_vec();
        let (ranges, leases) =
            needed(lookup("/etcdserverpb.Lease/LeaseRevoke").unwrap(), &revoke).expect("readable");
        assert!(ranges.is_empty());
        assert_eq!(leases, [7]);
    }
}
