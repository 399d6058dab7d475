//! The users and roles of a cluster with auth on.
//!
//! Owns: who may do what there, which `Auth::On` describes. Must not know how members are started.

use futures_util::{StreamExt, future::join_all, stream};
use keyward::own_keys::below;
use keyward::pb::{
    authpb::{Permission, UserAddOptions, permission::Type},
    etcdserverpb::{
        AuthEnableRequest, AuthRoleAddRequest, AuthRoleGrantPermissionRequest, AuthUserAddRequest,
        AuthUserGrantRoleRequest, RangeRequest,
    },
};
use prost::Message;

use super::cluster::{Cluster, password};
use crate::raw::{Call, End, Endpoint};

/// Makes the users, turns auth on, and returns when every member knows it. By gRPC: an etcdctl for each step would cost more than the
/// cluster's own start.
pub(crate) async fn auth(cluster: &Cluster, extra_users: usize) {
    let members: Vec<Endpoint> = (0..cluster.len()).map(|i| cluster.endpoint(i)).collect();
    let first = &members[0];
    ok(first, "RoleAdd", AuthRoleAddRequest { name: "root".into() }).await;
    role(first, "ra", "/a/").await;
    user(first, "root", Some("root")).await;
    user(first, "alice", Some("ra")).await;
    user(first, "bob", None).await;
    if extra_users > 0 {
        role(first, "ru", "/u/").await;
        let names: Vec<String> = (0..extra_users).map(|n| format!("u{n:02}")).collect();
        stream::iter(&names).for_each_concurrent(4, |name| user(first, name, Some("ru"))).await;
    }
    ok(first, "AuthEnable", AuthEnableRequest {}).await;
    // A linearizable read answers only when the member has applied what was committed before: the AuthEnable too.
    let read = RangeRequest { key: "k".into(), ..RangeRequest::default() };
    let read = Call::unary("/etcdserverpb.KV/Range", &read.encode_to_vec());
    for refused in join_all(members.iter().map(|member| member.call(&read))).await {
        assert_eq!(refused.end, End::Ended, "a member does not answer: {refused:?}");
        assert_ne!(refused.code(), Some(0), "a member answers without a user although auth is on");
    }
}

async fn role(etcd: &Endpoint, name: &str, prefix: &str) {
    ok(etcd, "RoleAdd", AuthRoleAddRequest { name: name.into() }).await;
    let RangeRequest { key, range_end, .. } = below(prefix);
    let everything = Permission { perm_type: Type::Readwrite.into(), key, range_end };
    let grant = AuthRoleGrantPermissionRequest { name: name.into(), perm: Some(everything) };
    ok(etcd, "RoleGrantPermission", grant).await;
}

async fn user(etcd: &Endpoint, name: &str, role: Option<&str>) {
    let options = Some(UserAddOptions { no_password: false });
    let added = AuthUserAddRequest {
        name: name.into(),
        password: password(name),
        options,
        ..AuthUserAddRequest::default()
    };
    ok(etcd, "UserAdd", added).await;
    if let Some(role) = role {
        ok(etcd, "UserGrantRole", AuthUserGrantRoleRequest { user: name.into(), role: role.into() }).await;
    }
}

/// A call of the Auth service that must succeed.
async fn ok(etcd: &Endpoint, method: &str, request: impl Message) {
    let answer =
        etcd.call(&Call::unary(&format!("/etcdserverpb.Auth/{method}"), &request.encode_to_vec())).await;
    assert_eq!(answer.code(), Some(0), "{method} failed: {answer:?}");
}
