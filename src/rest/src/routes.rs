//! The paths of the HTTP face.
//!
//! Owns: the table of JSON routes, as in etcd's swagger files, and the kinds of other paths. Must not
//! know: how a path is answered. Invariants: a path is matched byte for byte, without its query, so that
//! no escape leads around a rule; every RPC that etcd serves over JSON has a route, checked by a test.

use std::collections::HashMap;
use std::sync::LazyLock;

use keyward_cluster::discovery::keyward_page;
use keyward_config::JsonGateway;
use keyward_etcd::rpc::method::{Method, lookup};

/// The paths below `/v3/`, and the method of each.
const ROUTES: &[(&str, &str)] = &[
    ("kv/range", "/etcdserverpb.KV/Range"),
    ("kv/put", "/etcdserverpb.KV/Put"),
    ("kv/deleterange", "/etcdserverpb.KV/DeleteRange"),
    ("kv/txn", "/etcdserverpb.KV/Txn"),
    ("kv/compaction", "/etcdserverpb.KV/Compact"),
    ("watch", "/etcdserverpb.Watch/Watch"),
    ("lease/grant", "/etcdserverpb.Lease/LeaseGrant"),
    ("lease/revoke", "/etcdserverpb.Lease/LeaseRevoke"),
    ("kv/lease/revoke", "/etcdserverpb.Lease/LeaseRevoke"),
    ("lease/keepalive", "/etcdserverpb.Lease/LeaseKeepAlive"),
    ("lease/timetolive", "/etcdserverpb.Lease/LeaseTimeToLive"),
    ("kv/lease/timetolive", "/etcdserverpb.Lease/LeaseTimeToLive"),
    ("lease/leases", "/etcdserverpb.Lease/LeaseLeases"),
    ("kv/lease/leases", "/etcdserverpb.Lease/LeaseLeases"),
    ("cluster/member/add", "/etcdserverpb.Cluster/MemberAdd"),
    ("cluster/member/remove", "/etcdserverpb.Cluster/MemberRemove"),
    ("cluster/member/update", "/etcdserverpb.Cluster/MemberUpdate"),
    ("cluster/member/list", "/etcdserverpb.Cluster/MemberList"),
    ("cluster/member/promote", "/etcdserverpb.Cluster/MemberPromote"),
    ("maintenance/alarm", "/etcdserverpb.Maintenance/Alarm"),
    ("maintenance/status", "/etcdserverpb.Maintenance/Status"),
    ("maintenance/defragment", "/etcdserverpb.Maintenance/Defragment"),
    ("maintenance/hash", "/etcdserverpb.Maintenance/Hash"),
    ("maintenance/hashkv", "/etcdserverpb.Maintenance/HashKV"),
    ("maintenance/snapshot", "/etcdserverpb.Maintenance/Snapshot"),
    ("maintenance/transfer-leadership", "/etcdserverpb.Maintenance/MoveLeader"),
    ("maintenance/downgrade", "/etcdserverpb.Maintenance/Downgrade"),
    ("auth/enable", "/etcdserverpb.Auth/AuthEnable"),
    ("auth/disable", "/etcdserverpb.Auth/AuthDisable"),
    ("auth/status", "/etcdserverpb.Auth/AuthStatus"),
    ("auth/authenticate", "/etcdserverpb.Auth/Authenticate"),
    ("auth/user/add", "/etcdserverpb.Auth/UserAdd"),
    ("auth/user/get", "/etcdserverpb.Auth/UserGet"),
    ("auth/user/list", "/etcdserverpb.Auth/UserList"),
    ("auth/user/delete", "/etcdserverpb.Auth/UserDelete"),
    ("auth/user/changepw", "/etcdserverpb.Auth/UserChangePassword"),
    ("auth/user/grant", "/etcdserverpb.Auth/UserGrantRole"),
    ("auth/user/revoke", "/etcdserverpb.Auth/UserRevokeRole"),
    ("auth/role/add", "/etcdserverpb.Auth/RoleAdd"),
    ("auth/role/get", "/etcdserverpb.Auth/RoleGet"),
    ("auth/role/list", "/etcdserverpb.Auth/RoleList"),
    ("auth/role/delete", "/etcdserverpb.Auth/RoleDelete"),
    ("auth/role/grant", "/etcdserverpb.Auth/RoleGrantPermission"),
    ("auth/role/revoke", "/etcdserverpb.Auth/RoleRevokePermission"),
    ("lock/lock", "/v3lockpb.Lock/Lock"),
    ("lock/unlock", "/v3lockpb.Lock/Unlock"),
    ("election/campaign", "/v3electionpb.Election/Campaign"),
    ("election/proclaim", "/v3electionpb.Election/Proclaim"),
    ("election/leader", "/v3electionpb.Election/Leader"),
    ("election/observe", "/v3electionpb.Election/Observe"),
    ("election/resign", "/v3electionpb.Election/Resign"),
];

/// The paths that etcd 3.4 does not have.
const SINCE_35: [&str; 2] = ["auth/status", "maintenance/downgrade"];

/// The longest path shown in the log: longer than every route.
const LONGEST_PATH: usize = 64;

/// The kind of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PathKind {
    /// A JSON route.
    Route(&'static Method),
    /// Below `/v3/` or `/v3beta/`, without a route.
    UnknownRoute,
    /// etcd's first API, which every supported etcd has off: paths name keys.
    V2,
    Page(Page),
    Other,
}

/// A page at a fixed path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Page {
    Version,
    Health,
    /// `/livez`, or a check below.
    Livez,
    /// `/readyz`, or a check below.
    Readyz,
    Metrics,
    /// The page by which a Keyward is told from a member.
    Keyward,
}

/// The part of a path behind the version of the API.
fn route_of(path: &str) -> Option<&str> {
    path.strip_prefix("/v3/").or_else(|| path.strip_prefix("/v3beta/"))
}

impl PathKind {
    /// The kind of `path`, given without a query, for a cluster whose JSON has this form.
    pub(super) fn of_cluster(path: &str, form: JsonGateway) -> Self {
        let is_new = route_of(path).is_some_and(|route| SINCE_35.contains(&route));
        if is_new && form == JsonGateway::Etcd34 { Self::UnknownRoute } else { Self::of(path) }
    }

    /// The kind of `path`, given without a query.
    pub(super) fn of(path: &str) -> Self {
        static TABLE: LazyLock<HashMap<&str, &'static Method>> = LazyLock::new(|| {
            ROUTES.iter().filter_map(|(path, method)| Some((*path, lookup(method)?))).collect()
        });
        if let Some(route) = route_of(path) {
            return TABLE.get(route).map_or(Self::UnknownRoute, |method| Self::Route(method));
        }
        let is_below = |folder: &str| path.strip_prefix(folder).is_some_and(|rest| rest.starts_with('/'));
        match path {
            "/version" => Self::Page(Page::Version),
            "/health" => Self::Page(Page::Health),
            "/livez" => Self::Page(Page::Livez),
            "/readyz" => Self::Page(Page::Readyz),
            "/metrics" => Self::Page(Page::Metrics),
            keyward_page::PATH => Self::Page(Page::Keyward),
            _ if is_below("/livez") => Self::Page(Page::Livez),
            _ if is_below("/readyz") => Self::Page(Page::Readyz),
            _ if is_below("/v2") => Self::V2,
            _ => Self::Other,
        }
    }

    /// The label in metrics.
    pub(super) fn label(self) -> &'static str {
        match self {
            Self::Route(_) => "/v3/",
            Self::UnknownRoute => "unknown route",
            Self::V2 => "/v2/",
            Self::Page(Page::Version) => "/version",
            Self::Page(Page::Health) => "/health",
            Self::Page(Page::Livez) => "/livez",
            Self::Page(Page::Readyz) => "/readyz",
            Self::Page(Page::Metrics) => "/metrics",
            Self::Page(Page::Keyward) => keyward_page::PATH,
            Self::Other => "other",
        }
    }

    /// The path in the log, without any key.
    pub(super) fn shown(self, path: &str) -> &str {
        let is_plain = path.len() <= LONGEST_PATH
            && path.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'/' | b'-'));
        match self {
            Self::Route(_) | Self::UnknownRoute if is_plain => path,
            _ => self.label(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyward_etcd::rpc::method::METHODS;

    #[test]
    fn every_rpc_but_those_without_json_has_a_route() {
        for (path, method) in ROUTES {
            assert!(lookup(method).is_some(), "{path} leads to {method}, which has no row");
        }
        let mut without: Vec<_> = METHODS
            .iter()
            .map(|row| row.path)
            .filter(|path| ROUTES.iter().all(|(_, method)| method != path))
            .collect();
        without.sort_unstable();
        let none =
            ["/etcdserverpb.KV/RangeStream", "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"];
        assert_eq!(without, none);
    }

    #[test]
    fn a_path_is_counted_by_kind_and_shown_without_a_key() {
        let range = lookup("/etcdserverpb.KV/Range").unwrap();
        for (path, kind, shown) in [
            ("/v3/kv/range", PathKind::Route(range), "/v3/kv/range"),
            ("/v3beta/kv/range", PathKind::Route(range), "/v3beta/kv/range"),
            ("/v3/kv/r%61nge", PathKind::UnknownRoute, "unknown route"),
            ("/v3/kv/range/", PathKind::UnknownRoute, "/v3/kv/range/"),
            ("/v3//kv/range", PathKind::UnknownRoute, "/v3//kv/range"),
            ("/v3alpha/kv/range", PathKind::Other, "other"),
            ("/v3", PathKind::Other, "other"),
            ("/v2/keys/secret/name", PathKind::V2, "/v2/"),
            ("/v2", PathKind::Other, "other"),
            ("/health", PathKind::Page(Page::Health), "/health"),
            ("/health/x", PathKind::Other, "other"),
            ("/readyz/data_corruption", PathKind::Page(Page::Readyz), "/readyz"),
            ("/debug/vars", PathKind::Other, "other"),
            ("/", PathKind::Other, "other"),
        ] {
            let of = PathKind::of(path);
            assert_eq!((of, of.shown(path)), (kind, shown), "{path}");
        }
        let of_34 = |path| PathKind::of_cluster(path, JsonGateway::Etcd34);
        assert_eq!(of_34("/v3beta/auth/status"), PathKind::UnknownRoute);
        assert_eq!(of_34("/v3/kv/range"), PathKind::Route(range));
        assert_ne!(PathKind::of_cluster("/v3/auth/status", JsonGateway::Etcd35), PathKind::UnknownRoute);
        let long = format!("/v3/{}", "a".repeat(LONGEST_PATH));
        assert_eq!(PathKind::of(&long).shown(&long), "unknown route");
    }
}
