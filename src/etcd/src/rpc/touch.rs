//! The actions and keys of a request: everything that a policy must allow, and an audit record names.
//!
//! Owns: for each method and body, the actions on ranges of keys, on the keys of a lease, and on the cluster.
//! Must not know: callers, rules. Invariants (docs/decisions.md#d31): every key read or written by etcd for
//! the request lies in a touch; a body that cannot be read is reported as such, and is never a request
//! without touches. `tests/touches` compares the touches with those of etcd's own Go types.
//!
//! etcd builds the keys of locks and elections in `client/v3/concurrency`: the queue is `name/`.

use std::ops::ControlFlow;

use super::key_range::{KeyRange, end_of_prefix};
use super::method::{Class, Effect, Method};
use super::scan::{ScanFault, WireFields, WireValue};
use super::schema::MessageId;
use super::txn_parts::{TxnPart, TxnParts};

/// A kind of action, in the words of a policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Action {
    /// Reads keys, also in compares and by `prev_kv`.
    Read,
    /// Writes or deletes keys.
    Write,
    /// Watches keys.
    Watch,
    /// Takes part in locks and elections under keys.
    Lock,
    /// Grants, renews, revokes or reads leases.
    Lease,
    /// Takes the history before a revision from all clients.
    Compact,
    /// Reads an operator's view of the store: status, alarms, hashes.
    MaintenanceView,
    /// An operator's work on the store.
    Maintenance,
    /// Reads the list of members.
    ClusterView,
    /// Changes the members.
    Cluster,
    /// Reads users and roles.
    AuthView,
    /// Changes users, roles, or auth as a whole.
    Auth,
}

impl Action {
    /// All actions.
    pub const ALL: [Self; 12] = [
        Self::Read,
        Self::Write,
        Self::Watch,
        Self::Lock,
        Self::Lease,
        Self::Compact,
        Self::MaintenanceView,
        Self::Maintenance,
        Self::ClusterView,
        Self::Cluster,
        Self::AuthView,
        Self::Auth,
    ];
    /// The number of actions on keys: the first ones of [`Action::ALL`].
    pub const ON_KEYS: usize = 4;

    /// True if the action is about ranges of keys.
    #[must_use]
    pub fn is_on_keys(self) -> bool {
        (self as usize) < Self::ON_KEYS
    }

    /// The action's name in a policy.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Watch => "watch",
            Self::Lock => "lock",
            Self::Lease => "lease",
            Self::Compact => "compact",
            Self::MaintenanceView => "maintenance_view",
            Self::Maintenance => "maintenance",
            Self::ClusterView => "cluster_view",
            Self::Cluster => "cluster",
            Self::AuthView => "auth_view",
            Self::Auth => "auth",
        }
    }
}

/// One action of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Touch<'a> {
    /// The action.
    pub action: Action,
    /// The object of the action.
    pub target: TouchTarget<'a>,
}

/// The object of an action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TouchTarget<'a> {
    /// A range of keys.
    Keys(KeyRange<'a>),
    /// All keys attached to a lease, known to etcd only. etcd asks for permission on them as well: revoking
    /// a lease deletes its keys, and renewing a lease keeps them.
    KeysOfLease(i64),
    /// All keys attached to the lease that a key is put with. etcd asks for permission on them as well.
    KeysSharingLease(i64),
    /// The cluster as a whole, for actions not on keys.
    Cluster,
}

/// A body that cannot be read as the method's request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the request cannot be read")]
pub struct UnreadableRequest;

/// Why a visit ended before the last touch.
enum VisitStop {
    /// The visitor wants no further touch.
    Enough,
    /// The body cannot be read.
    Unreadable,
}

type Visit<T = ()> = ControlFlow<VisitStop, T>;
type Visitor<'v> = dyn FnMut(Touch<'_>) -> Visit + 'v;

const DONE: Visit = ControlFlow::Continue(());

/// Calls `visitor` with each touch of a request of `method`, until the visitor breaks. For a stream, `body`
/// is one request message of the stream. Allocates for Lock, Campaign, Leader, Observe, and nested Txns only.
///
/// # Errors
/// The body cannot be read. Some of its touches may have been visited before.
pub fn visit(
    method: &Method,
    body: &[u8],
    visitor: &mut impl FnMut(Touch<'_>) -> ControlFlow<()>,
) -> Result<(), UnreadableRequest> {
    let mut visitor = |touch: Touch<'_>| visitor(touch).map_break(|()| VisitStop::Enough);
    finished(visit_body(method, body, &mut visitor))
}

/// Calls `visitor` with each touch of the watch created by `create`, a WatchCreateRequest, until the visitor
/// breaks.
///
/// # Errors
/// The body cannot be read.
pub fn visit_watch_create(
    create: &[u8],
    visitor: &mut impl FnMut(Touch<'_>) -> ControlFlow<()>,
) -> Result<(), UnreadableRequest> {
    let mut visitor = |touch: Touch<'_>| visitor(touch).map_break(|()| VisitStop::Enough);
    finished(visit_create(create, &mut visitor))
}

fn finished(visited: Visit) -> Result<(), UnreadableRequest> {
    match visited {
        ControlFlow::Break(VisitStop::Unreadable) => Err(UnreadableRequest),
        ControlFlow::Break(VisitStop::Enough) | ControlFlow::Continue(()) => Ok(()),
    }
}

fn visit_body(method: &Method, body: &[u8], visitor: &mut Visitor<'_>) -> Visit {
    match method.body {
        MessageId::RangeRequest => visit_range(body, visitor),
        MessageId::PutRequest => visit_put(body, visitor),
        MessageId::DeleteRangeRequest => visit_delete(body, visitor),
        MessageId::TxnRequest => visit_txn(body, visitor),
        MessageId::WatchRequest => visit_watch(body, visitor),
        MessageId::LeaseGrantRequest => on_cluster(Action::Lease, visitor),
        MessageId::LeaseRevokeRequest | MessageId::LeaseKeepAliveRequest => {
            visit_lease(body, Some(Action::Write), visitor)
        }
        MessageId::LeaseTimeToLiveRequest => {
            let with_keys = last_number(body, 2)? != 0;
            visit_lease(body, with_keys.then_some(Action::Read), visitor)
        }
        MessageId::LeaseLeasesRequest => on_everything(Action::Lease, visitor),
        MessageId::LockRequest | MessageId::CampaignRequest => {
            let lease = last_number(body, 2)?;
            visit_queue(last_bytes(body, 1)?, lease, visitor)
        }
        MessageId::LeaderRequest => visit_queue(last_bytes(body, 1)?, 0, visitor),
        MessageId::UnlockRequest => on_key(Action::Lock, last_bytes(body, 1)?, visitor),
        MessageId::ProclaimRequest | MessageId::ResignRequest => visit_leader_key(body, visitor),
        MessageId::CompactionRequest => on_cluster(Action::Compact, visitor),
        MessageId::SnapshotRequest | MessageId::HashRequest | MessageId::HashKVRequest => {
            on_everything(Action::Maintenance, visitor)
        }
        _ => on_cluster(action_of(method, body), visitor),
    }
}

/// The action of a method without keys. A method that reads only, and an Alarm or Downgrade that only asks,
/// is the viewing action.
fn action_of(method: &Method, body: &[u8]) -> Action {
    let views = super::body_shape::effect(method, body) == Effect::ReadOnly;
    match (method.class, views) {
        (Class::Cluster, true) => Action::ClusterView,
        (Class::Cluster, false) => Action::Cluster,
        (Class::Auth, true) => Action::AuthView,
        (Class::Auth, false) => Action::Auth,
        (Class::Maintenance, true) => Action::MaintenanceView,
        _ => Action::Maintenance,
    }
}

fn on_cluster(action: Action, visitor: &mut Visitor<'_>) -> Visit {
    visitor(Touch { action, target: TouchTarget::Cluster })
}

/// An action that reveals every key.
fn on_everything(action: Action, visitor: &mut Visitor<'_>) -> Visit {
    on_cluster(action, visitor)?;
    visitor(Touch { action: Action::Read, target: TouchTarget::Keys(KeyRange::ALL) })
}

fn on_keys(action: Action, range: KeyRange<'_>, visitor: &mut Visitor<'_>) -> Visit {
    visitor(Touch { action, target: TouchTarget::Keys(range) })
}

fn on_key(action: Action, key: &[u8], visitor: &mut Visitor<'_>) -> Visit {
    on_keys(action, KeyRange::key(key), visitor)
}

/// The keys of the lease that a key is put with, if any.
fn on_keys_sharing(action: Action, lease: i64, visitor: &mut Visitor<'_>) -> Visit {
    if lease == 0 {
        return DONE;
    }
    visitor(Touch { action, target: TouchTarget::KeysSharingLease(lease) })
}

fn visit_range(body: &[u8], visitor: &mut Visitor<'_>) -> Visit {
    let (mut key, mut end) = (&[][..], &[][..]);
    for field in WireFields::new(body) {
        let field = readable(field)?;
        match field.number {
            1 => key = bytes(field.value)?,
            2 => end = end_of_read(bytes(field.value)?),
            _ => {}
        }
    }
    on_keys(Action::Read, KeyRange::of(key, end), visitor)
}

fn visit_put(body: &[u8], visitor: &mut Visitor<'_>) -> Visit {
    let (mut key, mut lease, mut reads) = (&[][..], 0, false);
    for field in WireFields::new(body) {
        let field = readable(field)?;
        match field.number {
            1 => key = bytes(field.value)?,
            3 => lease = number(field.value)?,
            4 => reads = number(field.value)? != 0,
            _ => {}
        }
    }
    on_key(Action::Write, key, visitor)?;
    if reads {
        on_key(Action::Read, key, visitor)?;
    }
    on_keys_sharing(Action::Write, lease, visitor)
}

fn visit_delete(body: &[u8], visitor: &mut Visitor<'_>) -> Visit {
    let (mut key, mut end, mut reads) = (&[][..], &[][..], false);
    for field in WireFields::new(body) {
        let field = readable(field)?;
        match field.number {
            1 => key = bytes(field.value)?,
            2 => end = bytes(field.value)?,
            3 => reads = number(field.value)? != 0,
            _ => {}
        }
    }
    let range = KeyRange::of(key, end);
    on_keys(Action::Write, range, visitor)?;
    if reads { on_keys(Action::Read, range, visitor) } else { DONE }
}

/// Visits the compares and the ops of both branches at every depth: the compares are known to etcd only.
fn visit_txn(body: &[u8], visitor: &mut Visitor<'_>) -> Visit {
    for part in TxnParts::new(body) {
        match readable(part)? {
            TxnPart::Compare(compare) => visit_compare(compare, visitor)?,
            TxnPart::Range(range) => visit_range(range, visitor)?,
            TxnPart::Put(put) => visit_put(put, visitor)?,
            TxnPart::DeleteRange(delete) => visit_delete(delete, visitor)?,
            // Parts unknown here may touch any key.
            TxnPart::UnknownOperation | TxnPart::UnknownField => return UNREADABLE,
        }
    }
    DONE
}

fn visit_compare(body: &[u8], visitor: &mut Visitor<'_>) -> Visit {
    let (mut key, mut end) = (&[][..], &[][..]);
    for field in WireFields::new(body) {
        let field = readable(field)?;
        match field.number {
            3 => key = bytes(field.value)?,
            64 => end = end_of_read(bytes(field.value)?),
            _ => {}
        }
    }
    on_keys(Action::Read, KeyRange::of(key, end), visitor)
}

/// The end of a Range or Compare whose `range_end` is present. If the field is present and empty, etcd 3.4 to
/// 3.6 checks the permission on the key alone and reads every key from the key on
/// (docs/etcd-facts.md#v23), so the end means no end. Deletes and watches are not affected.
fn end_of_read(range_end: &[u8]) -> &[u8] {
    if range_end.is_empty() { b"\0" } else { range_end }
}

/// A watch request touches keys if it creates a watch.
fn visit_watch(body: &[u8], visitor: &mut Visitor<'_>) -> Visit {
    for field in WireFields::new(body) {
        let field = readable(field)?;
        if field.number == 1 {
            visit_create(bytes(field.value)?, visitor)?;
        }
    }
    DONE
}

fn visit_create(body: &[u8], visitor: &mut Visitor<'_>) -> Visit {
    let (mut key, mut end, mut reads) = (&[][..], &[][..], false);
    for field in WireFields::new(body) {
        let field = readable(field)?;
        match field.number {
            1 => key = bytes(field.value)?,
            2 => end = bytes(field.value)?,
            6 => reads = number(field.value)? != 0,
            _ => {}
        }
    }
    // etcd takes the empty key of a watch for the first possible key.
    let range = KeyRange::of(if key.is_empty() { b"\0" } else { key }, end);
    on_keys(Action::Watch, range, visitor)?;
    if reads { on_keys(Action::Read, range, visitor) } else { DONE }
}

/// A call about the lease in field 1, and perhaps about the keys attached to the lease.
fn visit_lease(body: &[u8], on_its_keys: Option<Action>, visitor: &mut Visitor<'_>) -> Visit {
    on_cluster(Action::Lease, visitor)?;
    let lease = last_number(body, 1)?;
    match on_its_keys {
        Some(action) if lease != 0 => visitor(Touch { action, target: TouchTarget::KeysOfLease(lease) }),
        _ => DONE,
    }
}

/// The queue of a lock or an election: all keys below `name/`.
fn visit_queue(name: &[u8], lease: i64, visitor: &mut Visitor<'_>) -> Visit {
    let prefix = [name, b"/"].concat();
    let end = end_of_prefix(&prefix).unwrap_or_default();
    on_keys(Action::Lock, KeyRange::of(&prefix, &end), visitor)?;
    on_keys_sharing(Action::Lock, lease, visitor)
}

/// Proclaim and Resign name the leader's key in their first field. Proclaim puts the key with its lease.
fn visit_leader_key(body: &[u8], visitor: &mut Visitor<'_>) -> Visit {
    let leader = last_bytes(body, 1)?;
    on_key(Action::Lock, last_bytes(leader, 2)?, visitor)?;
    on_keys_sharing(Action::Lock, last_number(leader, 4)?, visitor)
}

const UNREADABLE: Visit = ControlFlow::Break(VisitStop::Unreadable);

fn some<T>(found: Option<T>) -> Visit<T> {
    found.map_or(ControlFlow::Break(VisitStop::Unreadable), ControlFlow::Continue)
}

fn readable<T>(field: Result<T, ScanFault>) -> Visit<T> {
    some(field.ok())
}

fn bytes(value: WireValue<'_>) -> Visit<&[u8]> {
    some(value.bytes())
}

fn number(value: WireValue<'_>) -> Visit<i64> {
    some(value.signed())
}

/// Returns the last value of a field of bytes; empty if absent.
fn last_bytes(body: &[u8], wanted: u32) -> Visit<&[u8]> {
    let mut found = &[][..];
    for field in WireFields::new(body) {
        let field = readable(field)?;
        if field.number == wanted {
            found = bytes(field.value)?;
        }
    }
    ControlFlow::Continue(found)
}

/// Returns the last value of a number; 0 if absent.
fn last_number(body: &[u8], wanted: u32) -> Visit<i64> {
    let mut found = 0;
    for field in WireFields::new(body) {
        let field = readable(field)?;
        if field.number == wanted {
            found = number(field.value)?;
        }
    }
    ControlFlow::Continue(found)
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::*;
    use crate::pb::etcdserverpb::{
        Compare, DeleteRangeRequest, LeaseTimeToLiveRequest, PutRequest, RangeRequest, RequestOp, TxnRequest,
        WatchCreateRequest, WatchRequest, request_op::Request, watch_request::RequestUnion,
    };
    use crate::pb::v3electionpb::{
        CampaignRequest, LeaderKey, LeaderRequest, ProclaimRequest, ResignRequest,
    };
    use crate::pb::v3lockpb::{LockRequest, UnlockRequest};
    use crate::rpc::method::{METHODS, lookup};

    /// The touches of a request as text, one per touch.
    fn touches(path: &str, body: &[u8]) -> Vec<String> {
        let mut seen = Vec::new();
        let read = visit(lookup(path).expect("a method"), body, &mut |touch| {
            let name = touch.action.name();
            let text = |key: &[u8]| key.escape_ascii().to_string();
            seen.push(match touch.target {
                TouchTarget::Cluster => name.to_owned(),
                TouchTarget::KeysOfLease(lease) => format!("{name} lease {lease}"),
                TouchTarget::KeysSharingLease(lease) => format!("{name} beside {lease}"),
                TouchTarget::Keys(KeyRange { start, end }) => match end {
                    super::super::key_range::RangeEnd::StartKey => format!("{name} {}", text(start)),
                    super::super::key_range::RangeEnd::Before(end) => {
                        format!("{name} {}..{}", text(start), text(end))
                    }
                    super::super::key_range::RangeEnd::Unbounded => format!("{name} {}..", text(start)),
                },
            });
            ControlFlow::Continue(())
        });
        if read.is_err() {
            seen.push("unreadable".to_owned());
        }
        seen
    }

    fn ops(requests: Vec<Request>) -> Vec<RequestOp> {
        requests.into_iter().map(|request| RequestOp { request: Some(request) }).collect()
    }

    fn put(key: &'static str) -> PutRequest {
        PutRequest { key: key.into(), value: "v".into(), ..Default::default() }
    }

    #[test]
    fn keys_of_simple_requests() {
        let range = RangeRequest { key: "a".into(), range_end: "b".into(), ..Default::default() };
        assert_eq!(touches("/etcdserverpb.KV/Range", &range.encode_to_vec()), ["read a..b"]);
        assert_eq!(touches("/etcdserverpb.KV/RangeStream", &range.encode_to_vec()), ["read a..b"]);
        let put = PutRequest { lease: 7, prev_kv: true, ..put("k") };
        assert_eq!(
            touches("/etcdserverpb.KV/Put", &put.encode_to_vec()),
            ["write k", "read k", "write beside 7"]
        );
        let delete = DeleteRangeRequest { key: "a".into(), range_end: "\0".into(), prev_kv: true };
        assert_eq!(
            touches("/etcdserverpb.KV/DeleteRange", &delete.encode_to_vec()),
            ["write a..", "read a.."]
        );
        assert_eq!(touches("/etcdserverpb.KV/Compact", b""), ["compact"]);
    }

    #[test]
    fn a_present_and_empty_end_of_a_read_is_no_end() {
        assert_eq!(touches("/etcdserverpb.KV/Range", b"\x0a\x01a\x12\x00"), ["read a.."]);
        assert_eq!(touches("/etcdserverpb.KV/Txn", b"\x12\x07\x0a\x05\x0a\x01a\x12\x00"), ["read a.."]);
        assert_eq!(touches("/etcdserverpb.KV/Txn", b"\x0a\x06\x1a\x01a\x82\x04\x00"), ["read a.."]);
        assert_eq!(touches("/etcdserverpb.KV/DeleteRange", b"\x0a\x01a\x12\x00"), ["write a"]);
        let watch = b"\x0a\x05\x0a\x01a\x12\x00";
        assert_eq!(touches("/etcdserverpb.Watch/Watch", watch), ["watch a"]);
    }

    #[test]
    fn both_branches_and_every_compare_of_nested_txns() {
        let inner = TxnRequest {
            compare: vec![Compare { key: "c".into(), range_end: "d".into(), ..Default::default() }],
            success: ops(vec![Request::RequestPut(put("p"))]),
            failure: ops(vec![Request::RequestDeleteRange(DeleteRangeRequest {
                key: "x".into(),
                ..Default::default()
            })]),
        };
        let outer = TxnRequest {
            compare: vec![Compare { key: "o".into(), ..Default::default() }],
            success: ops(vec![
                Request::RequestTxn(inner),
                Request::RequestRange(RangeRequest { key: "r".into(), ..Default::default() }),
            ]),
            failure: ops(vec![Request::RequestPut(PutRequest { prev_kv: true, ..put("f") })]),
        };
        let mut seen = touches("/etcdserverpb.KV/Txn", &outer.encode_to_vec());
        seen.sort();
        assert_eq!(seen, ["read c..d", "read f", "read o", "read r", "write f", "write p", "write x"]);
    }

    #[test]
    fn a_txn_with_an_unknown_op_or_field_is_unreadable() {
        assert_eq!(touches("/etcdserverpb.KV/Txn", b"\x12\x02\x2a\x00"), ["unreadable"]);
        assert_eq!(touches("/etcdserverpb.KV/Txn", b"\x22\x00"), ["unreadable"]);
        assert_eq!(touches("/etcdserverpb.KV/Range", b"\x0a\x05a"), ["unreadable"]);
    }

    #[test]
    fn a_watch_of_the_empty_key_begins_at_the_first_key() {
        let create = |key: &'static str, range_end: &'static str, prev_kv| {
            let create = WatchCreateRequest {
                key: key.into(),
                range_end: range_end.into(),
                prev_kv,
                ..Default::default()
            };
            WatchRequest { request_union: Some(RequestUnion::CreateRequest(create)) }.encode_to_vec()
        };
        let path = "/etcdserverpb.Watch/Watch";
        assert_eq!(touches(path, &create("", "\0", false)), ["watch \\x00.."]);
        assert_eq!(touches(path, &create("k", "", true)), ["watch k", "read k"]);
        let cancel = WatchRequest { request_union: Some(RequestUnion::CancelRequest(Default::default())) };
        assert!(touches(path, &cancel.encode_to_vec()).is_empty());
    }

    #[test]
    fn leases_are_their_keys() {
        let revoke = b"\x08\x07";
        assert_eq!(touches("/etcdserverpb.Lease/LeaseRevoke", revoke), ["lease", "write lease 7"]);
        assert_eq!(touches("/etcdserverpb.Lease/LeaseKeepAlive", revoke), ["lease", "write lease 7"]);
        assert_eq!(touches("/etcdserverpb.Lease/LeaseTimeToLive", revoke), ["lease"]);
        let with_keys = LeaseTimeToLiveRequest { id: 7, keys: true }.encode_to_vec();
        assert_eq!(touches("/etcdserverpb.Lease/LeaseTimeToLive", &with_keys), ["lease", "read lease 7"]);
        assert_eq!(touches("/etcdserverpb.Lease/LeaseGrant", b""), ["lease"]);
        assert_eq!(touches("/etcdserverpb.Lease/LeaseLeases", b""), ["lease", "read .."]);
    }

    #[test]
    fn locks_and_elections_are_the_queue_or_the_raw_key() {
        let lock = LockRequest { name: "n".into(), lease: 7 }.encode_to_vec();
        assert_eq!(touches("/v3lockpb.Lock/Lock", &lock), ["lock n/..n0", "lock beside 7"]);
        let unlock = UnlockRequest { key: "n/1".into() }.encode_to_vec();
        assert_eq!(touches("/v3lockpb.Lock/Unlock", &unlock), ["lock n/1"]);
        let campaign = CampaignRequest { name: "e".into(), ..Default::default() }.encode_to_vec();
        assert_eq!(touches("/v3electionpb.Election/Campaign", &campaign), ["lock e/..e0"]);
        let name = LeaderRequest { name: "e".into() }.encode_to_vec();
        assert_eq!(touches("/v3electionpb.Election/Leader", &name), ["lock e/..e0"]);
        assert_eq!(touches("/v3electionpb.Election/Observe", &name), ["lock e/..e0"]);
        let leader = LeaderKey { name: "e".into(), key: "raw".into(), rev: 1, lease: 3 };
        let proclaim = ProclaimRequest { leader: Some(leader.clone()), value: "v".into() }.encode_to_vec();
        assert_eq!(touches("/v3electionpb.Election/Proclaim", &proclaim), ["lock raw", "lock beside 3"]);
        let resign = ResignRequest { leader: Some(leader) }.encode_to_vec();
        assert_eq!(touches("/v3electionpb.Election/Resign", &resign), ["lock raw", "lock beside 3"]);
    }

    #[test]
    fn what_reveals_every_key_reads_every_key() {
        for path in ["Snapshot", "Hash", "HashKV"].map(|name| format!("/etcdserverpb.Maintenance/{name}")) {
            assert_eq!(touches(&path, b""), ["maintenance", "read .."], "{path}");
        }
        for (path, action) in [
            ("/etcdserverpb.Maintenance/Status", "maintenance_view"),
            ("/etcdserverpb.Maintenance/Alarm", "maintenance_view"),
            ("/etcdserverpb.Maintenance/Defragment", "maintenance"),
            ("/etcdserverpb.Cluster/MemberList", "cluster_view"),
            ("/etcdserverpb.Cluster/MemberRemove", "cluster"),
            ("/etcdserverpb.Auth/UserList", "auth_view"),
            ("/etcdserverpb.Auth/UserAdd", "auth"),
        ] {
            assert_eq!(touches(path, b""), [action], "{path}");
        }
        assert_eq!(touches("/etcdserverpb.Maintenance/Alarm", b"\x08\x01"), ["maintenance"]);
    }

    /// An empty Txn and a watch request without a create touch nothing: they reveal the revision at most.
    #[test]
    fn every_further_method_touches_something() {
        let may_be_empty = [MessageId::WatchRequest, MessageId::TxnRequest];
        for method in METHODS.iter().filter(|method| !may_be_empty.contains(&method.body)) {
            assert!(!touches(method.path, b"").is_empty(), "{}", method.path);
        }
    }
}
