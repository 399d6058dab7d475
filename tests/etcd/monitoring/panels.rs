//! Every query of every panel has data from a replica under a small load, and `promtool` finds no fault in the replica's metrics.

use std::cell::Cell;
use std::time::Duration;

use futures_util::stream;
use keyward::pb::etcdserverpb::watch_client::WatchClient;
use keyward::pb::etcdserverpb::watch_request::RequestUnion;
use keyward::pb::etcdserverpb::{WatchCreateRequest, WatchRequest};
use serde_json::Value;

use super::{promtool, read};
use crate::caller::Caller;
use crate::harness::keyward::{Keyward, Site};
use crate::harness::prometheus::Prometheus;
use crate::harness::{Auth, Cluster, Options, newest, ports, wait};

pub(super) const DASHBOARD: &str = "deploy/monitoring/dashboard.json";
const LIMIT: Duration = Duration::from_secs(60);

/// The titles and the queries of all panels but rows.
pub(super) fn panels(dashboard: &str) -> Vec<(String, Vec<String>)> {
    let dashboard: Value = serde_json::from_str(dashboard).expect("JSON");
    let text = |value: &Value| value.as_str().expect("a text").to_owned();
    let panels = dashboard["panels"].as_array().expect("panels").iter();
    let panels = panels.filter(|panel| panel["type"] != "row").map(|panel| {
        let targets = panel["targets"].as_array().expect("targets").iter();
        (text(&panel["title"]), targets.map(|target| text(&target["expr"])).collect())
    });
    let panels: Vec<(String, Vec<String>)> = panels.collect();
    assert!(panels.len() > 20 && panels.iter().all(|(_, queries)| !queries.is_empty()), "{panels:?}");
    panels
}

/// The query as Grafana sends it, with all jobs and instances selected.
fn filled(query: &str) -> String {
    let query = query.replace("$__rate_interval", "10s").replace("$job", ".*").replace("$instance", ".*");
    assert!(!query.contains('$'), "{query}");
    query
}

/// Calls of every kind of a panel: writes, reads, a login, streams that end.
async fn load(alice: &Caller) {
    for number in 0..20 {
        alice.put(&format!("/a/{number}"), vec![b'v'; 1000], 0).await.expect("written");
    }
    alice.keys("/a/").await;
    let create = WatchCreateRequest { key: "/a/".into(), ..WatchCreateRequest::default() };
    let create = WatchRequest { request_union: Some(RequestUnion::CreateRequest(create)) };
    let asked = alice.request(stream::iter([create]));
    let mut watch = WatchClient::new(alice.channel.clone()).watch(asked).await.expect("a watch").into_inner();
    watch.message().await.expect("created");
}

#[tokio::test]
async fn every_panel_has_data_and_the_metrics_are_clean() {
    let auth = Auth::On { extra_users: 0 };
    let cluster = Cluster::start(&newest("3.6"), Options { auth, ..Options::default() }).await;
    let site = Site::new();
    let server = cluster.pki().server();
    let tls = format!(
        "listener = [{{ name = \"tls\", address = \"{}\", tls = {{ cert = {:?}, key = {:?} }} }}, ",
        ports::free(),
        server.cert,
        server.key
    );
    let config = site.in_front_of(&cluster).replacen("listener = [", &tls, 1);
    let keyward = Keyward::start(site, &config).await;
    let prometheus = Prometheus::start(&[keyward.site().admin]).await;
    let alice = Caller::log_in(keyward.site().listen, "alice").await;
    load(&alice).await;
    promtool(&["check", "metrics"], &keyward.admin("/metrics").await.1);

    let panels = panels(&read(DASHBOARD));
    for (title, queries) in &panels {
        let missing = Cell::new("");
        let look = async || {
            load(&alice).await;
            let mut has_number = false;
            for query in queries {
                let samples = prometheus.query(&filled(query)).await;
                missing.set(query.as_str());
                if samples.is_empty() {
                    return None;
                }
                // A quantile of no observation is not a number.
                has_number |= samples.iter().any(|(_, value)| value.is_finite());
            }
            has_number.then_some(())
        };
        let found = wait::within_limit(LIMIT, look).await;
        assert!(found.is_some(), "{title}: no data of {}", missing.get());
    }
    let queries: usize = panels.iter().map(|(_, queries)| queries.len()).sum();
    println!("{} panels with {queries} queries have data", panels.len());
}
