//! Members that are not there, or not of this cluster.

use keyward::pb::etcdserverpb::PutResponse;
use prost::Message;

use super::{cluster, log_in, log_of, password, put, started, told};
use crate::{
    harness::{
        Tls,
        keyward::{Keyward, Site},
        newest,
    },
    raw::Endpoint,
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_members_it_starts_says_so_and_becomes_ready_when_one_comes() {
    let mut cluster = cluster(&newest("3.5"), Tls::Off).await;
    cluster.kill(0);
    let site = Site::new();
    let config = site.in_front_of(&cluster);
    let keyward = Keyward::start_unready(site, &config).await;
    let (status, why) = keyward.admin("/readyz").await;
    assert_eq!(status, 503);
    assert!(!why.trim().is_empty(), "it does not say why it is not ready");
    let through = Endpoint::plain(keyward.site().listen);
    let refused = log_in(&through, "alice", &password("alice")).await.expect_err("nobody can check it");
    assert_eq!(refused.0, Some(14), "{refused:?}");

    cluster.restart(0).await;
    keyward.ready().await;
    let token = log_in(&through, "alice", &password("alice")).await.expect("the password is right");
    let answer = through.call(&put("/a/k").with("token", &token)).await;
    assert_eq!(told(&answer), (Some(0), String::new()));
    assert!(!keyward.log().contains("panicked"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_of_another_cluster_gets_no_calls() {
    let (ours, other) = (cluster(&newest("3.5"), Tls::Off).await, cluster(&newest("3.5"), Tls::Off).await);
    let site = Site::new();
    let both = format!("cluster.endpoints = {:?}", [other.url(0), ours.url(0)]);
    let config = site.in_front_of(&ours).replace(&format!("cluster.endpoints = {:?}", ours.urls()), &both);
    assert!(config.contains(&both), "the configuration names one endpoint only");
    let config = format!("{config}cluster.id = \"{:x}\"\n", cluster_id(&ours).await);
    let keyward = Keyward::start(site, &config).await;
    let through = Endpoint::plain(keyward.site().listen);
    let token = log_in(&through, "alice", &password("alice")).await.expect("the password is right");
    for n in 0..40 {
        let answer = through.call(&put(&format!("/a/ours/{n}")).with("token", &token)).await;
        assert_eq!(told(&answer), (Some(0), String::new()));
    }
    assert!(log_of(&ours).contains("/a/ours/39"), "etcd does not log requests");
    assert!(!log_of(&other).contains("/a/ours/"), "the other cluster was asked");
    let logins = started(&other, "Authenticate").await;
    let address = other.address(0).to_string();
    let names = |line: &str| line.contains("ERROR") && line.contains(&address);
    keyward.logged("an error that names the other cluster's address", names).await;
    // Which cluster it is, a guarded etcd tells to the probe only.
    assert!(logins <= 1.0, "{logins} passwords went to the other cluster");
}

/// As the cluster's own answers tell it.
async fn cluster_id(cluster: &crate::harness::Cluster) -> u64 {
    let etcd = cluster.endpoint(0);
    let token = log_in(&etcd, "alice", &password("alice")).await.expect("the password is right");
    let answer = etcd.call(&put("/a/id").with("token", &token)).await;
    let message = answer.messages().into_iter().next().expect("an answer");
    PutResponse::decode(message).expect("a PutResponse").header.expect("a header").cluster_id
}
