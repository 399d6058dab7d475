//! What an operator asks of a replica: how everything is doing, and to end.

use std::time::Duration;

use serde_json::Value;

use crate::caller::Caller;
use crate::harness::keyward::{Keyward, Site};
use crate::harness::{Auth, Cluster, Options, versions, wait};
use crate::revocations::command;

const LIMIT: Duration = Duration::from_secs(60);

async fn start(cluster: &Cluster, lines: &str) -> Keyward {
    let site = Site::new();
    let config = format!("{}admin.socket = \"admin.sock\"\n{lines}", site.in_front_of(cluster));
    Keyward::start(site, &config).await
}

/// `keyward status -o json`, and whether it calls the replica serving.
pub(crate) async fn status(keyward: &Keyward) -> (bool, Value) {
    let (code, said) = command(keyward, &["status", "-o", "json"]).await;
    assert!(matches!(code, Some(0 | 1)), "{said}");
    (code == Some(0), serde_json::from_str(&said).expect("JSON"))
}

/// Of each member that etcdctl was told of.
fn as_etcdctl_tells(told: &Value, theirs: &[Value]) {
    for member in theirs {
        let status = &member["Status"];
        let id = format!("{:x}", status["header"]["member_id"].as_u64().expect("an id"));
        let row = told["members"].as_array().expect("members").iter().find(|row| row["id"] == *id);
        let row = row.unwrap_or_else(|| panic!("{id} is missing: {told}"));
        assert_eq!(row["endpoint"], member["Endpoint"]);
        assert_eq!((&row["version"], &row["raft_term"]), (&status["version"], &status["raftTerm"]));
        assert_eq!(row["is_leader"], status["leader"] == status["header"]["member_id"]);
        assert_eq!((&row["is_learner"], &row["why"]), (&false.into(), &Value::Null));
        assert!(row["db_size"].as_u64() > Some(0) && row["raft_applied_index"].as_u64() > Some(0), "{row}");
        assert!(row["raft_index"].as_u64() <= status["raftIndex"].as_u64(), "{row}");
    }
}

/// One address alone; the others have confirmed what is known a moment ago.
async fn nobody_answers(keyward: &Keyward, told: &Value, url: String) {
    let unanswered = told["unanswered"].as_array().expect("addresses");
    assert_eq!(unanswered.len(), 1, "{told}");
    let (_, table) = command(keyward, &["status"]).await;
    assert!(table.contains(&format!("unanswered: {url}: ")), "{table}");
    assert_eq!((&unanswered[0]["endpoint"], &unanswered[0]["at"]), (&url.into(), &Value::Null));
    let age = keyward.metric("keyward_members_age_seconds", &[]).await;
    assert!((0.0..20.0).contains(&age), "as long as /readyz says yes: {age}");
}

/// The lines of a table that have a cell with this word.
fn rows_with(table: &str, word: &str) -> usize {
    table.lines().filter(|line| line.split_whitespace().any(|cell| cell == word)).count()
}

#[tokio::test]
async fn status_tells_of_each_member_what_etcdctl_tells() {
    for version in versions() {
        let auth = Auth::On { extra_users: 0 };
        let mut cluster = Cluster::start(&version, Options { members: 3, auth, ..Options::default() }).await;
        let stranger = Cluster::start(&version, Options::default()).await;
        let learner = cluster.add_learner().await;
        let ctl = cluster.ctl_as_root();
        // A learner refuses to be asked for itself with auth on, so the voters tell.
        let voters = ctl.to((0..3).map(|i| cluster.url(i)).collect());
        let site = Site::new();
        let config = site.in_front_of(&cluster).replacen(
            "cluster.endpoints = [",
            &format!("cluster.endpoints = [{:?}, ", stranger.url(0)),
            1,
        );
        let asked = async || -> Vec<Value> {
            serde_json::from_str(&voters.ok(&["endpoint", "status", "-w", "json"]).await).expect("JSON")
        };
        let id = asked().await[0]["Status"]["header"]["cluster_id"].as_u64().expect("an id");
        let id = format!("{id:x}");
        let config = format!("{config}cluster.id = \"{id}\"\nadmin.socket = \"admin.sock\"\n");
        let keyward = Keyward::start(site, &config).await;
        let complete = async || {
            let (_, told) = status(&keyward).await;
            let members = told["members"].as_array().expect("members");
            let asked = members.iter().filter(|row| row["why"] != "not asked yet").count();
            let ready = members.iter().filter(|row| row["ready"] == true).count();
            let all = (asked, ready) == (4, 3);
            let all = all && told["cluster"]["auth"] == "on";
            (all && told["foreign"].as_array().is_some_and(|foreign| !foreign.is_empty())).then_some(told)
        };
        let told = wait::until(LIMIT, "all members are known", complete).await;
        println!("{version}: {}", command(&keyward, &["status"]).await.1);

        assert_eq!(told["replica"]["state"], "serving");
        assert_eq!((&told["cluster"]["id"], &told["cluster"]["auth"]), (&id.into(), &"on".into()));
        assert_eq!(told["foreign"][0]["endpoint"], stranger.url(0));
        let theirs = asked().await;
        assert_eq!(theirs.len(), 3);
        as_etcdctl_tells(&told, &theirs);
        let learners: Vec<&Value> = told["members"]
            .as_array()
            .expect("members")
            .iter()
            .filter(|row| row["is_learner"] == true)
            .collect();
        assert_eq!(learners.len(), 1);
        assert_eq!(learners[0]["id"], format!("{:x}", cluster.member_id(learner).await));
        assert_eq!((&learners[0]["ready"], &learners[0]["why"]), (&false.into(), &"is a learner".into()));

        let ((code, table), (_, wide)) =
            tokio::join!(command(&keyward, &["status"]), command(&keyward, &["status", "-o", "wide"]));
        assert_eq!(code, Some(0));
        assert!(table.lines().all(|line| line.chars().count() <= 100), "{table}");
        for row in told["members"].as_array().expect("members") {
            let (id, name) = (row["id"].as_str().expect("a text"), row["name"].as_str().expect("a text"));
            assert_eq!(rows_with(&table, id), 1, "by its id: {table}");
            assert_eq!(table.matches(&format!("\n{name} ")).count(), 1, "by its name: {table}");
            assert_eq!(rows_with(&wide, id), 2, "in both tables: {wide}");
        }

        // The others do not serve without it: they are two of four, of which three vote.
        let follower = (cluster.leader().await + 1) % 3;
        let gone = format!("{:x}", cluster.member_id(follower).await);
        cluster.kill(follower);
        let missed = async || {
            let (serves, told) = status(&keyward).await;
            let row = told["members"].as_array()?.iter().find(|row| row["id"] == *gone)?.clone();
            (serves && row["why"] == "unreachable" && row["ready"] == false).then_some(told)
        };
        let told = wait::until(LIMIT, "the killed member is missed", missed).await;
        nobody_answers(&keyward, &told, cluster.url(follower)).await;
        drop(stranger);
    }
}

#[tokio::test]
async fn a_drain_is_followed_to_its_end() {
    let version = versions().pop().expect("one is pinned");
    let auth = Auth::On { extra_users: 0 };
    let mut cluster = Cluster::start(&version, Options { auth, ..Options::default() }).await;
    let keyward = start(&cluster, "drain.wait = \"2s\"\n").await;
    let alice = Caller::log_in(keyward.site().listen, "alice").await;
    alice.put("/a/k", b"v".to_vec(), 0).await.expect("put");

    let draining = command(&keyward, &["drain"]);
    let meanwhile = async {
        // Not ready comes first; who calls is served.
        let unready = async || {
            let (serves, told) = status(&keyward).await;
            (!serves).then_some(told)
        };
        let told = wait::until(LIMIT, "it is not ready", unready).await;
        assert_eq!(told["replica"]["state"], "draining");
        assert_eq!(keyward.admin("/readyz").await, (503, "draining\n".to_owned()));
        alice.put("/a/k", b"w".to_vec(), 0).await.expect("it still takes calls");
    };
    let ((code, said), ()) = tokio::join!(draining, meanwhile);
    assert_eq!(code, Some(0), "{said}");
    let phases: Vec<&str> = said.lines().map(|line| line.split([',', ':']).next().expect("a part")).collect();
    assert_eq!((phases.first(), phases.last()), (Some(&"not ready"), Some(&"ended")), "{said}");
    let (status, _) = keyward.terminate().await;
    assert_eq!(status.code(), Some(0), "it ended by itself");

    let keyward = start(&cluster, "drain.timeout = \"500ms\"\n").await;
    let alice = Caller::log_in(keyward.site().listen, "alice").await;
    cluster.stop(0);
    let mut hangs = std::pin::pin!(alice.put("/a/k", b"v".to_vec(), 0));
    let begun = async || (keyward.metric("keyward_calls_open", &[]).await >= 1.0).then_some(());
    tokio::select! {
        put = &mut hangs => panic!("nobody could answer it: {put:?}"),
        () = wait::until(LIMIT, "the call has begun", begun) => {}
    }
    let (put, (code, said)) = tokio::join!(hangs, command(&keyward, &["drain"]));
    assert!(put.is_err(), "nobody answered it");
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("1 connections were cut"), "{said}");
    cluster.resume(0);
}
