//! The users and roles of a cluster with auth on.
//!
//! Owns: who may do what there, which `Auth::On` describes. Must not know how members are started.

use futures_util::{StreamExt, future::join_all, stream};

use super::{
    cluster::{Cluster, password},
    ctl::Ctl,
};

/// Makes the users through etcdctl, turns auth on, and returns when every member knows it.
pub(crate) async fn auth(cluster: &Cluster, extra_users: usize) {
    let ctl = cluster.ctl();
    ctl.ok(&["role", "add", "root"]).await;
    role(&ctl, "ra", "/a/").await;
    user(&ctl, "root", Some("root")).await;
    user(&ctl, "alice", Some("ra")).await;
    user(&ctl, "bob", None).await;
    if extra_users > 0 {
        role(&ctl, "ru", "/u/").await;
        let names: Vec<String> = (0..extra_users).map(|n| format!("u{n:02}")).collect();
        stream::iter(&names).for_each_concurrent(4, |name| user(&ctl, name, Some("ru"))).await;
    }
    ctl.ok(&["auth", "enable"]).await;
    // A linearizable read answers only when the member has applied what was committed before: `auth enable` too.
    let reads = cluster.urls().into_iter().map(|url| {
        let member = ctl.to(vec![url]);
        async move { member.run(&["get", "k"]).await }
    });
    for refused in join_all(reads).await {
        assert_ne!(refused.code, Some(0), "a member answers without a user although auth is on");
    }
}

async fn role(ctl: &Ctl, name: &str, prefix: &str) {
    ctl.ok(&["role", "add", name]).await;
    ctl.ok(&["role", "grant-permission", name, "readwrite", prefix, "--prefix"]).await;
}

async fn user(ctl: &Ctl, name: &str, role: Option<&str>) {
    ctl.ok(&["user", "add", &format!("{name}:{}", password(name))]).await;
    if let Some(role) = role {
        ctl.ok(&["user", "grant-role", name, role]).await;
    }
}
