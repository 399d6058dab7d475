//! The method table: one row per RPC of etcd, and what every part of Keyward decides by it.
//!
//! Owns: the rows and the reading of a path. Must not know: bodies (`shape` refines what a row says).
//! Invariants: a path is matched byte for byte; a row that says [`Effect::ReadOnly`] may be sent again to another
//! member before the first byte of an answer went out. A test holds the rows against the service descriptors.

use std::sync::LazyLock;

use http::uri::PathAndQuery;

use super::schema::MessageId as M;
use crate::refusal::Refusal;

/// One RPC.
#[derive(Debug, PartialEq, Eq)]
pub struct Method {
    /// `/service/name`, as it goes upstream.
    pub path: &'static str,
    /// The service with its package.
    pub service: &'static str,
    /// The method's own name.
    pub name: &'static str,
    /// Which sides stream.
    pub stream: Stream,
    /// The class that policy names.
    pub class: Class,
    /// What it does to the cluster, whatever its body.
    pub effect: Effect,
    /// Which member it wants.
    pub target: Target,
    /// Which of a member's connections it rides.
    pub lane: Lane,
    /// The schema of its request, or of each message of a request stream.
    pub body: M,
    /// Its place in [`METHODS`].
    pub index: u16,
}

/// Which sides send more than one message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stream {
    /// One message each way.
    Unary,
    /// The client streams.
    Client,
    /// The server streams.
    Server,
    /// Both stream.
    Bidi,
}

/// What kind of thing a call is, in the words of a policy.
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
    /// An operator's work; compaction too, since it takes history from everyone.
    Maintenance,
    /// Membership.
    Cluster,
    /// Users, roles, login.
    Auth,
    /// gRPC's health service, which Keyward answers itself.
    Health,
}

/// What a call does to the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Effect {
    /// Nothing that lasts.
    ReadOnly,
    /// The same twice as once.
    Idempotent,
    /// Something that twice is not once. clientv3 sends some of these again; we do not (a second LeaseGrant
    /// leaks a lease, a second LeaseRevoke says "not found").
    Mutates,
}

/// Which member a call wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Target {
    /// Any ready voter.
    AnyVoter,
    /// The leader and no other.
    Leader,
    /// The leader, which answers without a hop; else any ready voter.
    LeaderFirst,
    /// One member, whose own state it is about.
    OneMember,
}

/// Which connections of a member a call rides, so that large answers and long waits do not hold up the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Lane {
    /// Short calls.
    Unary,
    /// What stays open or blocks.
    Stream,
    /// Large answers. A Range is moved here by its body.
    Bulk,
}

/// What a request's path is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathKind<'a> {
    /// A row of the table.
    Known(&'static Method),
    /// A gRPC path without a row: passes raw where unknown methods are allowed.
    WellFormed {
        /// The service with its package.
        service: &'a str,
        /// The method's own name.
        method: &'a str,
    },
    /// No gRPC path. etcd's TLS port would still serve some of these as a known method (`/KV/R%61nge`), so none
    /// of them ever goes upstream.
    Malformed,
}

/// The row of exactly this path.
#[must_use]
pub fn lookup(path: &str) -> Option<&'static Method> {
    METHODS.iter().find(|method| method.path == path)
}

/// What `path` (with its query, if any) is.
#[must_use]
pub fn path_kind(path: &str) -> PathKind<'_> {
    if let Some(method) = lookup(path) {
        return PathKind::Known(method);
    }
    match path.strip_prefix('/').and_then(|rest| rest.split_once('/')) {
        Some((service, method)) if is_service(service) && is_method(method) => {
            PathKind::WellFormed { service, method }
        }
        _ => PathKind::Malformed,
    }
}

fn is_service(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'.')
}

fn is_method(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
}

impl PathKind<'_> {
    /// The refusal of a `path` without a row; `None` for a known one. The words are those of etcd's plaintext port,
    /// where grpc-go takes the path apart at its last slash and looks no closer.
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
    /// Whether who asks means one member, where it names one (rules 23): its own state, or what it alone can do.
    #[must_use]
    pub fn is_about_one_member(&self) -> bool {
        self.target == OneMember || matches!(self.name, "Alarm" | "MoveLeader")
    }

    /// The path, ready for a request; cloning costs nothing.
    #[must_use]
    pub fn path_and_query(&self) -> PathAndQuery {
        static PATHS: LazyLock<Vec<PathAndQuery>> =
            LazyLock::new(|| METHODS.iter().map(|row| PathAndQuery::from_static(row.path)).collect());
        PATHS[usize::from(self.index)].clone()
    }
}

use Class::{Auth, Cluster, Health, Lease, Lock, Maintenance, Read, Watch, Write};
use Effect::{Idempotent, Mutates, ReadOnly};
use Target::{AnyVoter, Leader, LeaderFirst, OneMember};

/// Every RPC that we know.
pub static METHODS: &[Method] = &number([
    unary("/etcdserverpb.KV/Range", Read, ReadOnly, AnyVoter, M::RangeRequest),
    unary("/etcdserverpb.KV/Put", Write, Mutates, AnyVoter, M::PutRequest),
    unary("/etcdserverpb.KV/Txn", Write, Mutates, AnyVoter, M::TxnRequest),
    unary("/etcdserverpb.KV/DeleteRange", Write, Mutates, AnyVoter, M::DeleteRangeRequest),
    unary("/etcdserverpb.KV/Compact", Maintenance, Mutates, AnyVoter, M::CompactionRequest),
    bulk("/etcdserverpb.KV/RangeStream", Read, AnyVoter, M::RangeRequest),
    bidi("/etcdserverpb.Watch/Watch", Watch, ReadOnly, AnyVoter, M::WatchRequest),
    bidi("/etcdserverpb.Lease/LeaseKeepAlive", Lease, Idempotent, LeaderFirst, M::LeaseKeepAliveRequest),
    unary("/etcdserverpb.Lease/LeaseGrant", Lease, Mutates, AnyVoter, M::LeaseGrantRequest),
    unary("/etcdserverpb.Lease/LeaseRevoke", Lease, Mutates, AnyVoter, M::LeaseRevokeRequest),
    unary("/etcdserverpb.Lease/LeaseTimeToLive", Lease, ReadOnly, LeaderFirst, M::LeaseTimeToLiveRequest),
    unary("/etcdserverpb.Lease/LeaseLeases", Lease, ReadOnly, AnyVoter, M::LeaseLeasesRequest),
    blocking("/v3lockpb.Lock/Lock", M::LockRequest),
    unary("/v3lockpb.Lock/Unlock", Lock, Mutates, AnyVoter, M::UnlockRequest),
    blocking("/v3electionpb.Election/Campaign", M::CampaignRequest),
    unary("/v3electionpb.Election/Proclaim", Lock, Mutates, AnyVoter, M::ProclaimRequest),
    unary("/v3electionpb.Election/Leader", Lock, ReadOnly, AnyVoter, M::LeaderRequest),
    following("/v3electionpb.Election/Observe", Lock, M::LeaderRequest),
    unary("/v3electionpb.Election/Resign", Lock, Mutates, AnyVoter, M::ResignRequest),
    unary("/etcdserverpb.Cluster/MemberList", Cluster, ReadOnly, AnyVoter, M::MemberListRequest),
    unary("/etcdserverpb.Cluster/MemberAdd", Cluster, Mutates, AnyVoter, M::MemberAddRequest),
    unary("/etcdserverpb.Cluster/MemberRemove", Cluster, Mutates, AnyVoter, M::MemberRemoveRequest),
    unary("/etcdserverpb.Cluster/MemberUpdate", Cluster, Mutates, AnyVoter, M::MemberUpdateRequest),
    // A follower passes it on without credentials and then times out (story 5).
    unary("/etcdserverpb.Cluster/MemberPromote", Cluster, Mutates, Leader, M::MemberPromoteRequest),
    unary("/etcdserverpb.Maintenance/Status", Maintenance, ReadOnly, OneMember, M::StatusRequest),
    unary("/etcdserverpb.Maintenance/Alarm", Maintenance, Mutates, AnyVoter, M::AlarmRequest),
    unary("/etcdserverpb.Maintenance/Defragment", Maintenance, Mutates, OneMember, M::DefragmentRequest),
    unary("/etcdserverpb.Maintenance/Hash", Maintenance, ReadOnly, OneMember, M::HashRequest),
    unary("/etcdserverpb.Maintenance/HashKV", Maintenance, ReadOnly, OneMember, M::HashKVRequest),
    bulk("/etcdserverpb.Maintenance/Snapshot", Maintenance, OneMember, M::SnapshotRequest),
    unary("/etcdserverpb.Maintenance/MoveLeader", Maintenance, Mutates, Leader, M::MoveLeaderRequest),
    unary("/etcdserverpb.Maintenance/Downgrade", Maintenance, Mutates, AnyVoter, M::DowngradeRequest),
    unary("/etcdserverpb.Auth/Authenticate", Auth, Mutates, AnyVoter, M::AuthenticateRequest),
    unary("/etcdserverpb.Auth/AuthStatus", Auth, ReadOnly, AnyVoter, M::AuthStatusRequest),
    unary("/etcdserverpb.Auth/AuthEnable", Auth, Mutates, AnyVoter, M::AuthEnableRequest),
    unary("/etcdserverpb.Auth/AuthDisable", Auth, Mutates, AnyVoter, M::AuthDisableRequest),
    unary("/etcdserverpb.Auth/UserAdd", Auth, Mutates, AnyVoter, M::AuthUserAddRequest),
    unary("/etcdserverpb.Auth/UserGet", Auth, ReadOnly, AnyVoter, M::AuthUserGetRequest),
    unary("/etcdserverpb.Auth/UserList", Auth, ReadOnly, AnyVoter, M::AuthUserListRequest),
    unary("/etcdserverpb.Auth/UserDelete", Auth, Mutates, AnyVoter, M::AuthUserDeleteRequest),
    unary("/etcdserverpb.Auth/UserChangePassword", Auth, Mutates, AnyVoter, M::AuthUserChangePasswordRequest),
    unary("/etcdserverpb.Auth/UserGrantRole", Auth, Mutates, AnyVoter, M::AuthUserGrantRoleRequest),
    unary("/etcdserverpb.Auth/UserRevokeRole", Auth, Mutates, AnyVoter, M::AuthUserRevokeRoleRequest),
    unary("/etcdserverpb.Auth/RoleAdd", Auth, Mutates, AnyVoter, M::AuthRoleAddRequest),
    unary("/etcdserverpb.Auth/RoleGet", Auth, ReadOnly, AnyVoter, M::AuthRoleGetRequest),
    unary("/etcdserverpb.Auth/RoleList", Auth, ReadOnly, AnyVoter, M::AuthRoleListRequest),
    unary("/etcdserverpb.Auth/RoleDelete", Auth, Mutates, AnyVoter, M::AuthRoleDeleteRequest),
    unary(
        "/etcdserverpb.Auth/RoleGrantPermission",
        Auth,
        Mutates,
        AnyVoter,
        M::AuthRoleGrantPermissionRequest,
    ),
    unary(
        "/etcdserverpb.Auth/RoleRevokePermission",
        Auth,
        Mutates,
        AnyVoter,
        M::AuthRoleRevokePermissionRequest,
    ),
    unary("/grpc.health.v1.Health/Check", Health, ReadOnly, AnyVoter, M::HealthCheckRequest),
    following("/grpc.health.v1.Health/Watch", Health, M::HealthCheckRequest),
]);

const fn unary(path: &'static str, class: Class, effect: Effect, target: Target, body: M) -> Method {
    let (service, name) = split(path);
    let (stream, lane) = (Stream::Unary, Lane::Unary);
    Method { path, service, name, stream, class, effect, target, lane, body, index: 0 }
}

/// One answer each, which may take for ever.
const fn blocking(path: &'static str, body: M) -> Method {
    Method { lane: Lane::Stream, ..unary(path, Lock, Mutates, AnyVoter, body) }
}

const fn bidi(path: &'static str, class: Class, effect: Effect, target: Target, body: M) -> Method {
    Method { stream: Stream::Bidi, lane: Lane::Stream, ..unary(path, class, effect, target, body) }
}

/// Many large answers, then the end.
const fn bulk(path: &'static str, class: Class, target: Target, body: M) -> Method {
    Method { stream: Stream::Server, lane: Lane::Bulk, ..unary(path, class, ReadOnly, target, body) }
}

/// An answer whenever there is news.
const fn following(path: &'static str, class: Class, body: M) -> Method {
    Method { stream: Stream::Server, lane: Lane::Stream, ..unary(path, class, ReadOnly, AnyVoter, body) }
}

/// Service and name of a path of the table.
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

    /// An RPC without a row, or a row that differs from `proto/`, fails here.
    #[test]
    fn every_rpc_of_every_service_has_its_row() {
        let set = prost_types::FileDescriptorSet::decode(crate::pb::DESCRIPTORS).unwrap();
        let mut described = BTreeMap::new();
        for file in &set.file {
            for service in &file.service {
                let service_name = format!("{}.{}", file.package(), service.name());
                for method in &service.method {
                    let stream = match (method.client_streaming(), method.server_streaming()) {
                        (false, false) => Stream::Unary,
                        (true, false) => Stream::Client,
                        (false, true) => Stream::Server,
                        (true, true) => Stream::Bidi,
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
    fn a_row_is_found_by_its_path_and_knows_its_place() {
        for (at, method) in METHODS.iter().enumerate() {
            assert_eq!(usize::from(method.index), at);
            assert_eq!(lookup(method.path), Some(method));
            assert_eq!(path_kind(method.path), PathKind::Known(method));
            assert_eq!(method.path_and_query().as_str(), method.path);
        }
    }

    /// Rules 1: etcd's TLS port would serve some of these as a known method.
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
            assert_eq!(path_kind(path), PathKind::Malformed, "{path}");
        }
        let unknown = PathKind::WellFormed { service: "etcdserverpb.KV", method: "range" };
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

    /// What may never be sent twice, although clientv3 does so with some of them.
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
