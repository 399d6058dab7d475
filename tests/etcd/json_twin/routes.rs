//! The routes of etcd's JSON gateway: each has a row, and each version has exactly these.
//!
//! `json_routes.toml` holds the paths of etcd's published API description (its swagger files) with the version from which each is
//! there; a member of every version is asked for each, and so is each path for its row.

use serde::Deserialize;

use super::{
    cluster,
    exchange::{Ask, Reading, Target},
    rows,
};
use crate::harness::{Tls, every_version};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RouteFile {
    routes: Vec<Route>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Route {
    path: String,
    /// The first version that has it; all have it where none is named.
    from: Option<String>,
}

fn routes() -> Vec<Route> {
    let file: RouteFile =
        toml::from_str(include_str!("../json_routes.toml")).expect("json_routes.toml is valid");
    assert_eq!(file.routes.len(), 51, "the newest description has 51 paths");
    file.routes
}

#[test]
fn every_route_has_a_row() {
    let rows = rows::all();
    let posted = |path: &str| rows.iter().any(|row| row.path == path && row.method == "POST");
    let missing: Vec<_> = routes().into_iter().map(|route| route.path).filter(|path| !posted(path)).collect();
    assert!(missing.is_empty(), "no row for {missing:?}");
}

/// A path that etcd does not know is 404, whatever its body; a known one is not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_version_has_the_routes_that_the_list_says() {
    for version in every_version() {
        let cluster = cluster(&version, Tls::Off).await;
        let target = Target::plain(cluster.address(0));
        for Route { path, from } in routes() {
            let listed = from.is_none_or(|from| version.at_least(&from));
            // No request of these streams is answered by a newer member that cannot read it; a path that is not there is answered.
            let reading = if listed { Reading::Documents { at_least: 0 } } else { Reading::ToItsEnd };
            let ask =
                Ask { method: "POST", path: path.clone(), headers: Vec::new(), body: b"[".into(), reading };
            let is_there = target.ask(&ask).await.status != Some(404);
            assert_eq!(is_there, listed, "{path} on etcd {version}");
        }
    }
}
