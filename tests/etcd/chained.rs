//! A Keyward before a Keyward, as at the edge of a site before a central one.

use crate::caller::Caller;
use crate::harness::keyward::{Keyward, Site};
use crate::harness::{Auth, Cluster, Options, versions};

/// A Keyward whose only endpoint is another Keyward.
async fn before(inner: &Keyward, cluster: &Cluster) -> Keyward {
    let site = Site::new();
    let config = site.in_front_of(cluster);
    let is_endpoint = |line: &&str| line.starts_with("cluster.endpoints");
    let endpoints = config.lines().find(is_endpoint).expect("endpoints");
    let config = config.replace(endpoints, &format!("cluster.endpoints = [{:?}]", inner.url()));
    Keyward::start(site, &config).await
}

#[tokio::test]
async fn the_outer_one_sees_auth_as_it_is_and_serves() {
    for version in versions() {
        for auth in [Auth::Off, Auth::On { extra_users: 0 }] {
            let cluster = Cluster::start(&version, Options { auth, ..Options::default() }).await;
            let site = Site::new();
            let config = site.in_front_of(&cluster);
            let inner = Keyward::start(site, &config).await;
            let outer = before(&inner, &cluster).await;
            let address = outer.site().listen;
            let caller = match auth {
                Auth::Off => Caller::anybody(address).await,
                Auth::On { .. } => Caller::log_in(address, "alice").await,
            };
            let put = caller.put("/a/x", b"value".to_vec(), 0).await;
            assert!(put.is_ok(), "{version} {auth:?}: {put:?}");
            assert_eq!(caller.keys("/a/").await, ["/a/x"], "{version} {auth:?}");
        }
    }
}
