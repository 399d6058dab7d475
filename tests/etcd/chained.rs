//! A Keyward before a Keyward, as at the edge of a site before a central one.

use crate::caller::Caller;
use crate::harness::binary::newest;
use crate::harness::keyward::{Keyward, Site};
use crate::harness::{Auth, Cluster, Options, versions};
use crate::revocations::command;

/// A Keyward whose only endpoint is another Keyward.
async fn before(inner: &Keyward, cluster: &Cluster) -> Keyward {
    let site = Site::new();
    let config = with_endpoint(&site, cluster, &inner.url());
    Keyward::start(site, &config).await
}

fn with_socket(site: &Site, cluster: &Cluster) -> String {
    site.in_front_of(cluster) + "admin.socket = \"admin.sock\"\n"
}

fn with_endpoint(site: &Site, cluster: &Cluster, endpoint: &str) -> String {
    let config = with_socket(site, cluster);
    let is_endpoint = |line: &&str| line.starts_with("cluster.endpoints");
    let endpoints = config.lines().find(is_endpoint).expect("endpoints");
    config.replace(endpoints, &format!("cluster.endpoints = [{endpoint:?}]"))
}

#[tokio::test]
async fn the_outer_one_sees_auth_as_it_is_and_serves() {
    for version in versions() {
        for auth in [Auth::Off, Auth::On { extra_users: 0 }] {
            let cluster = Cluster::start(&version, Options { auth, ..Options::default() }).await;
            let site = Site::new();
            let config = with_socket(&site, &cluster);
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
            let (_, said) = command(&outer, &["doctor"]).await;
            let note = format!("note [endpoint_is_keyward] {}: is another Keyward", inner.url());
            assert!(said.contains(&note), "{said}");
            let (_, said) = command(&inner, &["doctor"]).await;
            assert!(!said.contains("endpoint_is_keyward"), "{said}");
        }
    }
}

#[tokio::test]
async fn a_keyward_that_is_its_own_endpoint_is_told_so() {
    let cluster = Cluster::start(&newest("3.6"), Options::default()).await;
    let site = Site::new();
    let own = format!("http://{}", site.listen);
    let config = with_endpoint(&site, &cluster, &own);
    let keyward = Keyward::start_unready(site, &config).await;
    let (code, said) = command(&keyward, &["doctor"]).await;
    let error = format!("error [endpoint_is_keyward] {own}: is this Keyward itself");
    assert!(code == Some(2) && said.contains(&error), "{code:?} {said}");
}
