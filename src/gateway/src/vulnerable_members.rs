//! Calls that an old member would serve without a check of a patched member (docs/decisions.md#d57).
//!
//! Owns: the list of these calls, and the permission to be proved before each. Must not know: the versions
//! (`members::open_holes`), the questions to etcd (`upstream::permission_probe`).
//! Invariants: a call is refused only while auth may be on at etcd; with patched members only, a call costs
//! one look at the snapshot; a refused call sent nothing of itself. Watches are guarded by `watch::hub`,
//! renewals of leases by `lease::renewal_permission`.

use std::rc::Rc;

use futures_util::FutureExt as _;
use futures_util::future::LocalBoxFuture;
use prost::Message as _;
use tokio::time::Instant;

use crate::call::Call;
use crate::unary_request::UnaryRequest;
use keyward_cluster::membership::AuthSetting;
use keyward_cluster::open_holes::OpenHoles;
use keyward_etcd::pb::etcdserverpb::{AuthRoleGetRequest, LeaseTimeToLiveRequest};
use keyward_etcd::pb::v3electionpb::ProclaimRequest;
use keyward_etcd::refusal::{Code, Refusal, Status};
use keyward_etcd::rpc::body_shape::{lock_lease, lock_name, user_name};
use keyward_etcd::rpc::method::{Class, Effect, Method};
use keyward_etcd::rpc::schema::MessageId;
use keyward_etcd::rpc::txn_permissions::{
    KeyAccess, KeyPermission, TxnHoles, UncheckedTxnParts, unchecked_parts,
};
use keyward_upstream::permission_probe::PermissionProbe;
use keyward_upstream::send::UpstreamUser;

/// The permission to be proved before a call.
#[derive(Clone, Debug, PartialEq, Eq)]
enum RequiredPermission {
    /// The role root.
    Root,
    /// Permissions for ranges, and permission to write every key attached to a lease.
    Ranges(UncheckedTxnParts),
    /// Permission to read every key attached to a lease.
    LeaseKeys(i64),
    /// Permission to read every key attached to any lease.
    AllLeases,
    /// The role root, while an alarm is raised.
    RootUnderAlarm,
    /// The role root for a call about users and roles, while an alarm is raised.
    UsersUnderAlarm,
    /// This role, or the role root, while an alarm is raised.
    RoleUnderAlarm(String),
    /// All permissions that the request needs for keys, while an alarm is raised.
    KeysUnderAlarm,
}

/// The question to etcd before the call, if a member would serve the call without a check: succeeds if the
/// caller has the permission required by a patched etcd. `None` for nearly every call. Boxed, so that the
/// other calls do not pay for a larger future.
pub fn probe<'a>(
    call: &'a Call<'_>,
    request: &'a UnaryRequest,
) -> Option<LocalBoxFuture<'a, Result<(), Refusal>>> {
    let holes = call.snapshot().members.holes;
    let upstream = &call.gateway.upstream;
    let may_be_open = holes.needs_probe() || holes.unchecked_under_alarm || holes.weaknesses.split_txns;
    if !may_be_open || upstream.members.auth.now() == AuthSetting::Off {
        return None;
    }
    let is_nobody = matches!(request.caller.upstream_user, UpstreamUser::Nobody);
    // `require_identity = "as-etcd"`: etcd serves such a caller all methods but those for keys.
    let is_exempt = is_nobody && call.method.body != MessageId::TxnRequest;
    let under_alarm = required_under_alarm(call.method, request)
        .filter(|required| !is_nobody || *required == RequiredPermission::KeysUnderAlarm)
        // Newer patches ask about root before they pass the call on.
        .filter(|required| holes.unguarded_methods || *required != RequiredPermission::RootUnderAlarm)
        .filter(|_| holes.unchecked_under_alarm)
        .filter(|_| {
            call.snapshot().members.may_have_alarm() || upstream.members.alarms.is_recent(Instant::now())
        });
    let required = match required_permission(call.method, request.effect, request.message(), holes) {
        Ok(required) => required.filter(|_| !is_exempt),
        Err(refusal) => {
            let refusal = call.count_not_canonical(refusal);
            return Some(async { Err(refusal) }.boxed_local());
        }
    };
    if required.is_none() && under_alarm.is_none() {
        return None;
    }
    let probe = PermissionProbe { upstream: Rc::clone(upstream), user: request.caller.upstream_user.clone() };
    let proved = async move {
        let required = match under_alarm {
            Some(under_alarm) if probe.may_have_alarm().await => Some(under_alarm),
            _ => required,
        };
        let answered = match required {
            None => Ok(()),
            Some(required) => prove(call, request, &probe, required).await,
        };
        answered.map_err(|refusal| in_the_methods_form(call.method, refusal)).inspect_err(|refusal| {
            tracing::debug!(
                method = call.method.name,
                %refusal,
                "refused a call that a member would serve without a check"
            );
        })?;
        // The questions took time, and the caller may be revoked meanwhile.
        call.identify_again().await.map(drop)
    };
    Some(proved.boxed_local())
}

/// Asks etcd if the caller has the permission.
async fn prove(
    call: &Call<'_>,
    request: &UnaryRequest,
    probe: &PermissionProbe,
    required: RequiredPermission,
) -> Result<(), Refusal> {
    match required {
        RequiredPermission::Root => probe.is_root().await,
        RequiredPermission::Ranges(parts) => {
            probe.has(parts.permissions, &parts.leases, KeyAccess::Write).await
        }
        RequiredPermission::AllLeases => probe.may_list_leases().await,
        RequiredPermission::LeaseKeys(lease) => probe.has(Vec::new(), &[lease], KeyAccess::Read).await,
        RequiredPermission::RootUnderAlarm | RequiredPermission::UsersUnderAlarm => {
            probe.is_root_under_alarm().await
        }
        RequiredPermission::RoleUnderAlarm(role) => probe.has_role(&role).await,
        RequiredPermission::KeysUnderAlarm => probe.has_roles_for(call.method, request.message()).await,
    }
}

/// The refusal in the form of a patched etcd: the Lock and Election services send a denial with code
/// Unknown.
fn in_the_methods_form(method: &Method, refusal: Refusal) -> Refusal {
    if method.class == Class::Lock && refusal.code() == Code::PermissionDenied {
        return Refusal::told(&Status { code: Code::Unknown, ..refusal.status() });
    }
    refusal
}

/// The permission required for a call that members before etcd 3.6 apply without a check while an alarm is
/// raised. A Put is refused by the members then, and reads are answered outside of the apply. Deletions and
/// revocations, which free room, are judged by the caller's own roles.
fn required_under_alarm(method: &Method, request: &UnaryRequest) -> Option<RequiredPermission> {
    match method.body {
        _ if request.effect == Effect::ReadOnly && method.class != Class::Auth => None,
        MessageId::TxnRequest
        | MessageId::DeleteRangeRequest
        | MessageId::LeaseRevokeRequest
        | MessageId::UnlockRequest
        | MessageId::ResignRequest => Some(RequiredPermission::KeysUnderAlarm),
        MessageId::CompactionRequest
        | MessageId::MoveLeaderRequest
        | MessageId::DowngradeRequest
        | MessageId::AlarmRequest => Some(RequiredPermission::RootUnderAlarm),
        MessageId::AuthStatusRequest | MessageId::AuthenticateRequest => None,
        MessageId::AuthRoleGetRequest => {
            let role = AuthRoleGetRequest::decode(request.message()).unwrap_or_default().role;
            Some(RequiredPermission::RoleUnderAlarm(role))
        }
        // etcd answers every user about the user itself.
        MessageId::AuthUserGetRequest if names_the_caller(request) => None,
        _ if method.class == Class::Auth => Some(RequiredPermission::UsersUnderAlarm),
        _ => None,
    }
}

fn names_the_caller(request: &UnaryRequest) -> bool {
    let UpstreamUser::User(identity) = &request.caller.upstream_user else { return false };
    user_name(request.message()) == Some(identity.user().as_str())
}

/// The permission required by a patched etcd and unchecked by a member with `holes`; `None` if every member
/// checks the call.
fn required_permission(
    method: &Method,
    effect: Effect,
    message: &[u8],
    holes: OpenHoles,
) -> Result<Option<RequiredPermission>, Refusal> {
    let of_lease = |lease: i64| {
        let parts = UncheckedTxnParts { leases: vec![lease], ..UncheckedTxnParts::default() };
        (lease != 0).then_some(RequiredPermission::Ranges(parts))
    };
    Ok(match method.body {
        MessageId::TxnRequest if holes.unchecked_txns || holes.weaknesses.split_txns => {
            let holes = TxnHoles {
                unchecked_parts: holes.unchecked_txns,
                ranges_left_out: holes.weaknesses.split_txns,
            };
            let parts = unchecked_parts(message, holes).map_err(|fault| Refusal::not_canonical(fault.0))?;
            (!parts.is_empty()).then_some(RequiredPermission::Ranges(parts))
        }
        // The lock's key is attached to the lease by a Txn, with ranges below the lock's name beside the put.
        MessageId::LockRequest | MessageId::CampaignRequest => {
            let mut parts = UncheckedTxnParts::default();
            let lease = lock_lease(message);
            if holes.unchecked_txns && lease != 0 {
                parts.leases.push(lease);
            }
            if holes.weaknesses.split_txns {
                parts.permissions.push(KeyPermission::below_name(KeyAccess::Read, lock_name(message)));
            }
            (!parts.is_empty()).then_some(RequiredPermission::Ranges(parts))
        }
        MessageId::ProclaimRequest if holes.unchecked_txns => {
            let leader = ProclaimRequest::decode(message).ok().and_then(|request| request.leader);
            of_lease(leader.map_or(0, |leader| leader.lease))
        }
        MessageId::CompactionRequest | MessageId::MoveLeaderRequest | MessageId::DowngradeRequest
            if holes.unguarded_methods =>
        {
            Some(RequiredPermission::Root)
        }
        // Any user may ask for the alarms.
        MessageId::AlarmRequest if holes.unguarded_methods && effect != Effect::ReadOnly => {
            Some(RequiredPermission::Root)
        }
        MessageId::LeaseLeasesRequest if holes.unguarded_methods => Some(RequiredPermission::AllLeases),
        MessageId::LeaseTimeToLiveRequest if holes.told_lease_keys => {
            let request = LeaseTimeToLiveRequest::decode(message).unwrap_or_default();
            request.keys.then_some(RequiredPermission::LeaseKeys(request.id))
        }
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyward_etcd::pb::etcdserverpb::{
        AlarmRequest, PutRequest, RangeRequest, RequestOp, TxnRequest, request_op::Request,
    };
    use keyward_etcd::pb::v3electionpb::LeaderKey;
    use keyward_etcd::pb::v3lockpb::LockRequest;
    use keyward_etcd::rpc::body_shape;
    use keyward_etcd::rpc::fatal_request::Weaknesses;
    use keyward_etcd::rpc::method::{METHODS, lookup};

    const ALL: OpenHoles = OpenHoles {
        unguarded_methods: true,
        unchecked_txns: true,
        told_lease_keys: true,
        unchecked_watches: true,
        unchecked_under_alarm: true,
        weaknesses: Weaknesses { sort_options: true, split_txns: true, lost_leases: true },
    };

    fn required(path: &str, message: &[u8], holes: OpenHoles) -> Option<RequiredPermission> {
        let method = lookup(path).expect("a method");
        let effect = body_shape::effect(method, message);
        required_permission(method, effect, message, holes).expect("readable")
    }

    #[test]
    fn the_calls_reserved_for_root_are_those_of_a_patched_etcd() {
        let names: Vec<_> = METHODS
            .iter()
            .filter(|method| required(method.path, b"", ALL) == Some(RequiredPermission::Root))
            .map(|method| method.name)
            .collect();
        assert_eq!(names, ["Compact", "MoveLeader", "Downgrade"]);
        let alarm = |action| {
            let alarm = AlarmRequest { action, ..AlarmRequest::default() }.encode_to_vec();
            required("/etcdserverpb.Maintenance/Alarm", &alarm, ALL)
        };
        assert_eq!(alarm(0), None);
        assert_eq!(alarm(1), Some(RequiredPermission::Root));
        assert_eq!(alarm(2), Some(RequiredPermission::Root));
    }

    #[test]
    fn a_txn_needs_a_proof_only_for_its_unchecked_parts() {
        let path = "/etcdserverpb.KV/Txn";
        let put = |lease| {
            let put = PutRequest { key: "k".into(), lease, ..PutRequest::default() };
            let success = vec![RequestOp { request: Some(Request::RequestPut(put)) }];
            TxnRequest { success, ..TxnRequest::default() }.encode_to_vec()
        };
        assert_eq!(required(path, &put(0), ALL), None);
        let leased = UncheckedTxnParts { leases: vec![7], ..UncheckedTxnParts::default() };
        assert_eq!(required(path, &put(7), ALL), Some(RequiredPermission::Ranges(leased.clone())));
        assert_eq!(required(path, &put(7), OpenHoles { unchecked_txns: false, ..ALL }), None);
        let lock = |lease| LockRequest { name: "n".into(), lease }.encode_to_vec();
        let of_lease = Some(RequiredPermission::Ranges(leased));
        let alike = OpenHoles { weaknesses: Weaknesses::default(), ..ALL };
        assert_eq!(required("/v3lockpb.Lock/Lock", &lock(7), alike), of_lease);
        assert_eq!(required("/v3lockpb.Lock/Lock", &lock(0), alike), None);
        let leader = Some(LeaderKey { lease: 7, ..LeaderKey::default() });
        let proclaim = ProclaimRequest { leader, ..ProclaimRequest::default() }.encode_to_vec();
        assert_eq!(required("/v3electionpb.Election/Proclaim", &proclaim, ALL), of_lease);
    }

    /// All members but the answering one leave these ranges out, also from their check.
    #[test]
    fn a_write_beside_ranges_needs_permission_to_read_the_ranges() {
        let weaknesses = Weaknesses { split_txns: true, ..Weaknesses::default() };
        let splits = OpenHoles { weaknesses, ..OpenHoles::default() };
        let range = Request::RequestRange(RangeRequest { key: "r".into(), ..RangeRequest::default() });
        let put = Request::RequestPut(PutRequest { key: "k".into(), lease: 7, ..PutRequest::default() });
        let txn = |requests: &[&Request]| {
            let success = requests.iter().map(|one| RequestOp { request: Some((*one).clone()) }).collect();
            let message = TxnRequest { success, ..TxnRequest::default() }.encode_to_vec();
            required("/etcdserverpb.KV/Txn", &message, splits)
        };
        let to_read = |permission| {
            let parts = UncheckedTxnParts { permissions: vec![permission], ..UncheckedTxnParts::default() };
            Some(RequiredPermission::Ranges(parts))
        };
        assert_eq!(txn(&[&range, &put]), to_read(KeyPermission::of_key(KeyAccess::Read, "r".into())));
        assert_eq!(txn(&[&range]), None);
        assert_eq!(txn(&[&put]), None);
        let lock = LockRequest { name: "n".into(), lease: 7 }.encode_to_vec();
        let queue = KeyPermission { access: KeyAccess::Read, key: "n/".into(), range_end: "n0".into() };
        for path in ["/v3lockpb.Lock/Lock", "/v3electionpb.Election/Campaign"] {
            assert_eq!(required(path, &lock, splits), to_read(queue.clone()), "{path}");
            assert_eq!(required(path, &lock, OpenHoles::default()), None);
        }
    }

    #[test]
    fn the_keys_of_leases_need_permission_to_read() {
        let path = "/etcdserverpb.Lease/LeaseTimeToLive";
        let asked = |keys| LeaseTimeToLiveRequest { id: 7, keys }.encode_to_vec();
        assert_eq!(required(path, &asked(false), ALL), None);
        assert_eq!(required(path, &asked(true), ALL), Some(RequiredPermission::LeaseKeys(7)));
        assert_eq!(
            required("/etcdserverpb.Lease/LeaseLeases", b"", ALL),
            Some(RequiredPermission::AllLeases)
        );
    }

    #[test]
    fn patched_members_need_no_proof() {
        for method in METHODS {
            assert_eq!(required(method.path, b"", OpenHoles::default()), None, "{}", method.name);
        }
    }
}
