//! The method table: a row per RPC of etcd, with every property used for decisions in Keyward.
//!
//! Owns: the rows, and the parsing of a path. Must not know: bodies (`body_shape` refines a row by the body).
//! Invariants: a path is matched byte for byte. A call with [`Effect::ReadOnly`] may be sent again to another
//! member before the first byte of an answer went out. A test compares the rows with the service descriptors.

use std::sync::LazyLock;

use http::uri::PathAndQuery;

use super::schema::MessageId as M;
use crate::refusal::Refusal;

/// An RPC.
#[derive(Debug, PartialEq, Eq)]
pub struct Method {
    /// `/service/name`, as sent upstream.
    pub path: &'static str,
    /// The service with its package.
    pub service: &'static str,
    /// The method's own name.
    pub name: &'static str,
    /// The streaming sides.
    pub stream: StreamingSides,
    /// The class named in policies.
    pub class: Class,
    /// The effect on the cluster, whatever the body.
    pub effect: Effect,
    /// The member wanted.
    pub target: CallTarget,
    /// The lane of the connection to use.
    pub lane: Lane,
    /// The schema of the request, or of each message of a request stream.
    pub body: M,
    /// The part of the gateway that serves the calls.
    pub handler: Handler,
    /// The row's index in [`METHODS`].
    pub index: u16,
}

/// The sides sending more than a single message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StreamingSides {
    /// A single message each way.
    Unary,
    /// The client streams.
    Client,
    /// The server streams.
    Server,
    /// Both sides stream.
    Bidi,
}

/// The part of the gateway that serves a method's calls. Every difference between methods in the way of a
/// call is a handler, or a column of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Handler {
    /// Sent to a member, and answered with the member's answer.
    Forward,
    /// As `Forward`; a success changes users, roles, or auth as a whole.
    AuthChange,
    /// As `Forward`; the answer lists members, whose client URLs are replaced.
    MemberAnswer,
    /// As `MemberAnswer`; the member leaves service before the removal.
    MemberRemove,
    /// As `Forward`; the client is answered once the new leader is known.
    MoveLeader,
    /// As `Forward`; the answer of a member's own store is not older than an answer shown before.
    LeaseTimeToLive,
    /// As `Forward`; the member first confirms that its store is up to date, since the answer has no
    /// revision.
    LeaseLeases,
    /// Defragments one member at a time.
    Defragment,
    /// Waits at etcd without limit: Lock and Campaign.
    Lock,
    /// A stream of changes of a lock queue's first key, ended on both sides.
    Observe,
    /// A watch stream, ended on both sides.
    Watch,
    /// A keepalive stream, ended on both sides.
    KeepAlive,
    /// Answered by Keyward: a password login.
    Login,
    /// Answered by Keyward: gRPC's health check.
    HealthCheck,
    /// Answered by Keyward: gRPC's health stream.
    HealthWatch,
    /// Passed on as it is: a method without a row.
    PassThrough,
}

impl Handler {
    /// True if the call is answered without identifying the caller.
    #[must_use]
    pub fn is_for_anybody(self) -> bool {
        matches!(self, Self::Login | Self::HealthCheck | Self::HealthWatch)
    }
}

/// A call's class, in the words of a policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Class {
    /// Reads keys.
    Read,
    /// Writes keys.
    Write,
    /// Watches keys.
    Watch,
    /// Leases.
    Lease,
    /// Locks and elections.
    Lock,
    /// An operator's work; also compaction, since compaction takes history from all clients.
    Maintenance,
    /// Membership.
    Cluster,
    /// Users, roles, login.
    Auth,
    /// gRPC's health service, answered by Keyward itself.
    Health,
}

/// A call's effect on the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Effect {
    /// No lasting effect.
    ReadOnly,
    /// Repeating the call has no further effect.
    Idempotent,
    /// Repeating the call has a further effect, or another answer (a second LeaseGrant leaks a lease, a
    /// second LeaseRevoke says "not found"). clientv3 sends some of these calls again after an unknown
    /// outcome. Keyward sends such a call again only if an answer proves that the call was not applied.
    Mutates,
}

/// The member wanted by a call. Watch, LeaseKeepAlive and Observe choose for themselves, in `watch` and
/// `lease`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CallTarget {
    /// Any ready voter.
    AnyVoter,
    /// Only the leader.
    Leader,
    /// The leader, to save a hop; otherwise any ready voter.
    LeaderFirst,
    /// A single member, whose own state the call is about.
    OneMember,
}

/// A group of a member's connections: large answers and long waits must not delay short calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Lane {
    /// Short calls.
    Unary,
    /// Streams and blocking calls.
    Stream,
    /// Large answers. A Range moves here by its body.
    Bulk,
}

/// The kind of a request's path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RpcPathKind<'a> {
    /// A path with a row in the table.
    Known(&'static Method),
    /// A gRPC path without a row: passed on raw where unknown methods are allowed.
    WellFormed {
        /// The service with its package.
        service: &'a str,
        /// The method's own name.
        method: &'a str,
    },
    /// Not a gRPC path. etcd's TLS port would still serve some malformed paths as a known method
    /// (`/KV/R%61nge`), so none ever goes upstream.
    Malformed,
}

/// Returns the row with exactly the given path.
#[must_use]
pub fn lookup(path: &str) -> Option<&'static Method> {
    METHODS.iter().find(|method| method.path == path)
}

/// Classifies `path`, given with its query, if any.
#[must_use]
pub fn path_kind(path: &str) -> RpcPathKind<'_> {
    if let Some(method) = lookup(path) {
        return RpcPathKind::Known(method);
    }
    match path.strip_prefix('/').and_then(|rest| rest.split_once('/')) {
        Some((service, method)) if is_service(service) && is_method(method) => {
            RpcPathKind::WellFormed { service, method }
        }
        _ => RpcPathKind::Malformed,
    }
}

fn is_service(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'.')
}

fn is_method(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
}

impl RpcPathKind<'_> {
    /// Returns the refusal of a `path` without a row; `None` for a known path. The text is etcd's on
    /// plaintext ports: grpc-go splits the path at its last slash and checks no further.
    #[must_use]
    pub fn refusal(&self, path: &str) -> Option<Refusal> {
        if let Self::Known(_) = self {
            return None;
        }
        let named = path.strip_prefix('/').and_then(|rest| rest.rsplit_once('/'));
        Some(match named {
            Some((service, method)) if METHODS.iter().any(|row| row.service == service) => {
                Refusal::unknown_method(service, method)
            }
            Some((service, _)) => Refusal::unknown_service(service),
            None => Refusal::malformed_path(path),
        })
    }
}

impl Method {
    /// True if the call may last for as long as its client wants: a stream, or a call that waits for others.
    #[must_use]
    pub fn is_lasting(&self) -> bool {
        self.stream != StreamingSides::Unary || self.handler == Handler::Lock
    }

    /// True if a client naming a member means exactly the named member (`docs/decisions.md#d23`): the call is
    /// about the member's own state, or only the named member can execute the call.
    #[must_use]
    pub fn is_about_one_member(&self) -> bool {
        self.target == OneMember || matches!(self.name, "Alarm" | "MoveLeader")
    }

    const fn by(self, handler: Handler) -> Self {
        Self { handler, ..self }
    }

    /// Returns the path, ready for a request; cloning is free.
    #[must_use]
    pub fn path_and_query(&self) -> PathAndQuery {
        static PATHS: LazyLock<Vec<PathAndQuery>> =
            LazyLock::new(|| METHODS.iter().map(|row| PathAndQuery::from_static(row.path)).collect());
        PATHS[usize::from(self.index)].clone()
    }
}

use CallTarget::{AnyVoter, Leader, LeaderFirst, OneMember};
use Class::{Auth, Cluster, Health, Lease, Lock, Maintenance, Read, Watch, Write};
use Effect::{Idempotent, Mutates, ReadOnly};

/// The row shared by all methods without a row in [`METHODS`], for records and metrics. The class, the schema
/// and the effect stand for nothing: the handler looks at none of them.
pub static UNKNOWN: Method = Method {
    path: "unknown",
    service: "",
    name: "",
    stream: StreamingSides::Unary,
    class: Maintenance,
    effect: Mutates,
    target: AnyVoter,
    lane: Lane::Stream,
    body: M::RangeRequest,
    handler: Handler::PassThrough,
    index: METHODS[METHODS.len() - 1].index + 1,
};

/// Every known RPC.
pub static METHODS: &[Method] = &number([
    unary("/etcdserverpb.KV/Range", Read, ReadOnly, AnyVoter, M::RangeRequest),
    unary("/etcdserverpb.KV/Put", Write, Mutates, AnyVoter, M::PutRequest),
    unary("/etcdserverpb.KV/Txn", Write, Mutates, AnyVoter, M::TxnRequest),
    unary("/etcdserverpb.KV/DeleteRange", Write, Mutates, AnyVoter, M::DeleteRangeRequest),
    unary("/etcdserverpb.KV/Compact", Maintenance, Mutates, AnyVoter, M::CompactionRequest),
    bulk("/etcdserverpb.KV/RangeStream", Read, AnyVoter, M::RangeRequest),
    bidi("/etcdserverpb.Watch/Watch", Watch, ReadOnly, AnyVoter, M::WatchRequest).by(Handler::Watch),
    bidi("/etcdserverpb.Lease/LeaseKeepAlive", Lease, Idempotent, LeaderFirst, M::LeaseKeepAliveRequest)
        .by(Handler::KeepAlive),
    unary("/etcdserverpb.Lease/LeaseGrant", Lease, Mutates, AnyVoter, M::LeaseGrantRequest),
    unary("/etcdserverpb.Lease/LeaseRevoke", Lease, Mutates, AnyVoter, M::LeaseRevokeRequest),
    unary("/etcdserverpb.Lease/LeaseTimeToLive", Lease, ReadOnly, LeaderFirst, M::LeaseTimeToLiveRequest)
        .by(Handler::LeaseTimeToLive),
    unary("/etcdserverpb.Lease/LeaseLeases", Lease, ReadOnly, AnyVoter, M::LeaseLeasesRequest)
        .by(Handler::LeaseLeases),
    blocking("/v3lockpb.Lock/Lock", M::LockRequest),
    unary("/v3lockpb.Lock/Unlock", Lock, Mutates, AnyVoter, M::UnlockRequest),
    blocking("/v3electionpb.Election/Campaign", M::CampaignRequest),
    unary("/v3electionpb.Election/Proclaim", Lock, Mutates, AnyVoter, M::ProclaimRequest),
    unary("/v3electionpb.Election/Leader", Lock, ReadOnly, AnyVoter, M::LeaderRequest),
    following("/v3electionpb.Election/Observe", Lock, M::LeaderRequest).by(Handler::Observe),
    unary("/v3electionpb.Election/Resign", Lock, Mutates, AnyVoter, M::ResignRequest),
    unary("/etcdserverpb.Cluster/MemberList", Cluster, ReadOnly, AnyVoter, M::MemberListRequest)
        .by(Handler::MemberAnswer),
    unary("/etcdserverpb.Cluster/MemberAdd", Cluster, Mutates, AnyVoter, M::MemberAddRequest)
        .by(Handler::MemberAnswer),
    unary("/etcdserverpb.Cluster/MemberRemove", Cluster, Mutates, AnyVoter, M::MemberRemoveRequest)
        .by(Handler::MemberRemove),
    unary("/etcdserverpb.Cluster/MemberUpdate", Cluster, Mutates, AnyVoter, M::MemberUpdateRequest)
        .by(Handler::MemberAnswer),
    // A follower forwards the call without credentials and then times out (etcd-io/etcd#14070).
    unary("/etcdserverpb.Cluster/MemberPromote", Cluster, Mutates, Leader, M::MemberPromoteRequest)
        .by(Handler::MemberAnswer),
    unary("/etcdserverpb.Maintenance/Status", Maintenance, ReadOnly, OneMember, M::StatusRequest),
    unary("/etcdserverpb.Maintenance/Alarm", Maintenance, Mutates, AnyVoter, M::AlarmRequest),
    unary("/etcdserverpb.Maintenance/Defragment", Maintenance, Mutates, OneMember, M::DefragmentRequest)
        .by(Handler::Defragment),
    unary("/etcdserverpb.Maintenance/Hash", Maintenance, ReadOnly, OneMember, M::HashRequest),
    unary("/etcdserverpb.Maintenance/HashKV", Maintenance, ReadOnly, OneMember, M::HashKVRequest),
    bulk("/etcdserverpb.Maintenance/Snapshot", Maintenance, OneMember, M::SnapshotRequest),
    unary("/etcdserverpb.Maintenance/MoveLeader", Maintenance, Mutates, Leader, M::MoveLeaderRequest)
        .by(Handler::MoveLeader),
    unary("/etcdserverpb.Maintenance/Downgrade", Maintenance, Mutates, AnyVoter, M::DowngradeRequest),
    unary("/etcdserverpb.Auth/Authenticate", Auth, Mutates, AnyVoter, M::AuthenticateRequest)
        .by(Handler::Login),
    unary("/etcdserverpb.Auth/AuthStatus", Auth, ReadOnly, AnyVoter, M::AuthStatusRequest),
    auth_change("/etcdserverpb.Auth/AuthEnable", M::AuthEnableRequest),
    auth_change("/etcdserverpb.Auth/AuthDisable", M::AuthDisableRequest),
    auth_change("/etcdserverpb.Auth/UserAdd", M::AuthUserAddRequest),
    unary("/etcdserverpb.Auth/UserGet", Auth, ReadOnly, AnyVoter, M::AuthUserGetRequest),
    unary("/etcdserverpb.Auth/UserList", Auth, ReadOnly, AnyVoter, M::AuthUserListRequest),
    auth_change("/etcdserverpb.Auth/UserDelete", M::AuthUserDeleteRequest),
    auth_change("/etcdserverpb.Auth/UserChangePassword", M::AuthUserChangePasswordRequest),
    auth_change("/etcdserverpb.Auth/UserGrantRole", M::AuthUserGrantRoleRequest),
    auth_change("/etcdserverpb.Auth/UserRevokeRole", M::AuthUserRevokeRoleRequest),
    auth_change("/etcdserverpb.Auth/RoleAdd", M::AuthRoleAddRequest),
    unary("/etcdserverpb.Auth/RoleGet", Auth, ReadOnly, AnyVoter, M::AuthRoleGetRequest),
    unary("/etcdserverpb.Auth/RoleList", Auth, ReadOnly, AnyVoter, M::AuthRoleListRequest),
    auth_change("/etcdserverpb.Auth/RoleDelete", M::AuthRoleDeleteRequest),
    auth_change("/etcdserverpb.Auth/RoleGrantPermission", M::AuthRoleGrantPermissionRequest),
    auth_change("/etcdserverpb.Auth/RoleRevokePermission", M::AuthRoleRevokePermissionRequest),
    unary("/grpc.health.v1.Health/Check", Health, ReadOnly, AnyVoter, M::HealthCheckRequest)
        .by(Handler::HealthCheck),
    following("/grpc.health.v1.Health/Watch", Health, M::HealthCheckRequest).by(Handler::HealthWatch),
]);

/// The methods that a person means by `name`: the path, or its last part in any case. `Watch` is etcd's, as
/// in audit records and tables; the one of gRPC's health service is named by its path.
#[must_use]
pub fn methods_named(name: &str) -> Vec<&'static Method> {
    let is_named = |row: &&Method| row.path == name || row.name.eq_ignore_ascii_case(name);
    let named: Vec<_> = METHODS.iter().filter(is_named).collect();
    let of_etcd: Vec<_> = named.iter().copied().filter(|row| row.class != Health).collect();
    if of_etcd.is_empty() { named } else { of_etcd }
}

const fn unary(path: &'static str, class: Class, effect: Effect, target: CallTarget, body: M) -> Method {
    let (service, name) = split(path);
    let (stream, lane) = (StreamingSides::Unary, Lane::Unary);
    let handler = Handler::Forward;
    Method { path, service, name, stream, class, effect, target, lane, body, handler, index: 0 }
}

const fn auth_change(path: &'static str, body: M) -> Method {
    unary(path, Auth, Mutates, AnyVoter, body).by(Handler::AuthChange)
}

/// A unary call, perhaps blocking without limit.
const fn blocking(path: &'static str, body: M) -> Method {
    Method { lane: Lane::Stream, ..unary(path, Lock, Mutates, AnyVoter, body).by(Handler::Lock) }
}

const fn bidi(path: &'static str, class: Class, effect: Effect, target: CallTarget, body: M) -> Method {
    Method { stream: StreamingSides::Bidi, lane: Lane::Stream, ..unary(path, class, effect, target, body) }
}

/// A stream of many large answers, then the end.
const fn bulk(path: &'static str, class: Class, target: CallTarget, body: M) -> Method {
    Method { stream: StreamingSides::Server, lane: Lane::Bulk, ..unary(path, class, ReadOnly, target, body) }
}

/// A stream with an answer at every change.
const fn following(path: &'static str, class: Class, body: M) -> Method {
    Method {
        stream: StreamingSides::Server,
        lane: Lane::Stream,
        ..unary(path, class, ReadOnly, AnyVoter, body)
    }
}

/// Splits a path of the table into service and name.
const fn split(path: &'static str) -> (&'static str, &'static str) {
    let bytes = path.as_bytes();
    let mut slash = bytes.len() - 1;
    while bytes[slash] != b'/' {
        slash -= 1;
    }
    (path.split_at(slash).0.split_at(1).1, path.split_at(slash + 1).1)
}

const fn number<const N: usize>(mut rows: [Method; N]) -> [Method; N] {
    let mut at: u16 = 0;
    while (at as usize) < N {
        rows[at as usize].index = at;
        at += 1;
    }
    rows
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use prost::Message as _;

    use super::*;

    /// An RPC without a row, or a row different from `proto/`, fails here.
    #[test]
    fn every_rpc_of_every_service_has_its_row() {
        let set = prost_types::FileDescriptorSet::decode(crate::pb::DESCRIPTORS).unwrap();
        let mut described = BTreeMap::new();
        for file in &set.file {
            for service in &file.service {
                let service_name = format!("{}.{}", file.package(), service.name());
                for method in &service.method {
                    let stream = match (method.client_streaming(), method.server_streaming()) {
                        (false, false) => StreamingSides::Unary,
                        (true, false) => StreamingSides::Client,
                        (false, true) => StreamingSides::Server,
                        (true, true) => StreamingSides::Bidi,
                    };
                    let path = format!("/{service_name}/{}", method.name());
                    let input = method.input_type()[1..].to_owned();
                    let row = (service_name.clone(), method.name().to_owned(), stream, input);
                    described.insert(path, row);
                }
            }
        }
        let rows: BTreeMap<_, _> = METHODS
            .iter()
            .map(|m| {
                let body = m.body.message().name.to_owned();
                (m.path.to_owned(), (m.service.to_owned(), m.name.to_owned(), m.stream, body))
            })
            .collect();
        assert_eq!(rows.len(), METHODS.len(), "a path has two rows");
        assert!(described.len() >= 51, "{}", described.len());
        assert_eq!(rows, described);
    }

    #[test]
    fn the_last_part_of_a_path_names_one_method_and_watch_is_that_of_etcd() {
        let paths = |name: &str| methods_named(name).iter().map(|row| row.path).collect::<Vec<_>>();
        for row in METHODS {
            let is_of_health = row.path == "/grpc.health.v1.Health/Watch";
            let expected = if is_of_health { "/etcdserverpb.Watch/Watch" } else { row.path };
            assert_eq!((paths(row.path), paths(row.name)), (vec![row.path], vec![expected]));
            assert_eq!(paths(&row.name.to_lowercase()), [expected]);
        }
        assert_eq!((paths(""), paths("KV/Range"), paths("unknown")), (vec![], vec![], vec![]));
    }

    #[test]
    fn a_row_is_found_by_its_path_and_knows_its_place() {
        for (at, method) in METHODS.iter().enumerate() {
            assert_eq!(usize::from(method.index), at);
            assert_eq!(lookup(method.path), Some(method));
            assert_eq!(path_kind(method.path), RpcPathKind::Known(method));
            assert_eq!(method.path_and_query().as_str(), method.path);
        }
    }

    /// etcd's TLS port would serve some of the paths as a known method (`docs/decisions.md#d01`).
    #[test]
    fn only_exact_paths_are_known() {
        for path in [
            "",
            "/",
            "//",
            "etcdserverpb.KV/Range",
            "/etcdserverpb.KV",
            "/etcdserverpb.KV/",
            "//Range",
            "/etcdserverpb.KV/R%61nge",
            "/etcdserverpb.KV/Range?x=1",
            "/etcdserverpb.KV/Range?",
            "/etcdserverpb.KV/Range/",
            "//etcdserverpb.KV/Range",
            "/etcdserverpb.KV//Range",
            "/x/../etcdserverpb.KV/Range",
            "/etcdserverpb.KV/Range ",
            "/etcdserverpb.KV/Ränge",
            "/etcdserverpb-KV/Range",
            "/etcdserverpb.KV/Range.x",
            "*",
        ] {
            assert_eq!(path_kind(path), RpcPathKind::Malformed, "{path}");
        }
        let unknown = RpcPathKind::WellFormed { service: "etcdserverpb.KV", method: "range" };
        assert_eq!(path_kind("/etcdserverpb.KV/range"), unknown);
    }

    #[test]
    fn a_path_without_a_row_is_refused_in_the_words_of_grpc_go() {
        let text = |path: &str| path_kind(path).refusal(path).map(|refusal| refusal.message().to_owned());
        assert_eq!(text("/etcdserverpb.KV/Range"), None);
        assert_eq!(text("/etcdserverpb.KV/X").unwrap(), "unknown method X for service etcdserverpb.KV");
        assert_eq!(text("/a.B/X").unwrap(), "unknown service a.B");
        let ranged = "unknown method Range?x=1 for service etcdserverpb.KV";
        assert_eq!(text("/etcdserverpb.KV/Range?x=1").unwrap(), ranged);
        assert_eq!(text("/a/b/c").unwrap(), "unknown service a/b");
        assert_eq!(text("/etcdserverpb.KV").unwrap(), "malformed method name: \"/etcdserverpb.KV\"");
    }

    /// Methods never sent again while the outcome is unknown, although clientv3 sends some of them again.
    #[test]
    fn what_changes_the_cluster_is_no_read() {
        for name in [
            "Put",
            "Txn",
            "DeleteRange",
            "Compact",
            "LeaseGrant",
            "LeaseRevoke",
            "Alarm",
            "MoveLeader",
            "Authenticate",
            "Lock",
            "Unlock",
            "Campaign",
            "Proclaim",
            "Resign",
            "Defragment",
            "MemberPromote",
        ] {
            let row = METHODS.iter().find(|m| m.name == name).unwrap();
            assert_eq!(row.effect, Mutates, "{name}");
        }
    }

    #[test]
    fn targets_and_lanes_are_those_of_the_design() {
        let named = |wanted: fn(&Method) -> bool| {
            let mut names: Vec<_> = METHODS.iter().filter(|m| wanted(m)).map(|m| m.name).collect();
            names.sort_unstable();
            names
        };
        assert_eq!(named(|m| m.target == Leader), ["MemberPromote", "MoveLeader"]);
        assert_eq!(named(|m| m.target == LeaderFirst), ["LeaseKeepAlive", "LeaseTimeToLive"]);
        let one = ["Defragment", "Hash", "HashKV", "Snapshot", "Status"];
        assert_eq!(named(|m| m.target == OneMember), one);
        let pinned = ["Alarm", "Defragment", "Hash", "HashKV", "MoveLeader", "Snapshot", "Status"];
        assert_eq!(named(Method::is_about_one_member), pinned);
        assert_eq!(named(|m| m.lane == Lane::Bulk), ["RangeStream", "Snapshot"]);
        let streams = ["Campaign", "LeaseKeepAlive", "Lock", "Observe", "Watch", "Watch"];
        assert_eq!(named(|m| m.lane == Lane::Stream), streams);
    }
}
