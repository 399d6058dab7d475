//! Must show 6 of the operator's evening: with three replicas, a client in a loop is found and ended by one command on any of
//! them. Nobody without the shared session key asks or orders anything, and a silent replica delays nobody else.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use crate::caller::Caller;
use crate::console::{Loop, watch};
use crate::harness::keyward::{Keyward, Site};
use crate::harness::{Auth, Cluster, Options, newest, wait};
use crate::revocations::command;

const LIMIT: Duration = Duration::from_secs(60);
/// What the admin address has always said to a POST.
const UNKNOWN_REQUEST: (u16, &str) = (405, "GET only\n");

/// The configuration of a replica of this fleet, with its session key.
fn config(site: &Site, cluster: &Cluster, others: &[SocketAddr], key: u8) -> String {
    let base = site.in_front_of(cluster);
    let key: String = (0..32).map(|at| format!("{:02x}", at ^ key)).collect();
    let key: PathBuf = site.write("session.key", &key);
    let others: Vec<String> = others.iter().map(ToString::to_string).collect();
    format!(
        "{base}admin.socket = \"admin.sock\"\nadmin.replicas = {others:?}\nsession.key_files = [{key:?}]\n\
         audit.file = \"audit.log\"\naudit.events = [\"admin\"]\n"
    )
}

/// Three replicas with one session key, each of which names all three.
async fn three_replicas(cluster: &Cluster) -> Vec<Keyward> {
    let sites: Vec<Site> = (0..3).map(|_| Site::new()).collect();
    let addresses: Vec<SocketAddr> = sites.iter().map(|site| site.admin).collect();
    let mut replicas = Vec::new();
    for site in sites {
        let config = config(&site, cluster, &addresses, 7);
        replicas.push(Keyward::start(site, &config).await);
    }
    replicas
}

/// The JSON on standard output of a command with this exit code.
async fn json(keyward: &Keyward, arguments: &[&str], code: i32) -> Value {
    let all = [arguments, &["-o", "json"]].concat();
    let (ended, said) = command(keyward, &all).await;
    assert_eq!(ended, Some(code), "{all:?}: {said}");
    serde_json::from_str(said.lines().next().expect("a line")).expect("JSON")
}

/// The rows of `keyward show … --all`.
async fn show(keyward: &Keyward, arguments: &[&str]) -> Vec<Value> {
    let all = [&["show", "--all"], arguments].concat();
    json(keyward, &all, 0).await["rows"].as_array().expect("rows").clone()
}

fn has_name(row: &Value, replica: &Keyward) -> bool {
    let pid = format!(":{}", replica.id());
    row["replica"].as_str().is_some_and(|name| name.ends_with(&pid))
}

/// The records of kicks in the audit log of a replica, once there are so many.
async fn kicks(replica: &Keyward, at_least: usize) -> Vec<Value> {
    let look = async || {
        let text = std::fs::read_to_string(replica.site().file("audit.log")).expect("an audit log");
        let records = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let kicks: Vec<Value> = records.filter(|record| record["command"] == "kick_peer").collect();
        (kicks.len() >= at_least).then_some(kicks)
    };
    wait::until(LIMIT, "the orders are recorded", look).await
}

#[tokio::test]
async fn a_looping_client_is_found_and_ended_by_one_command_on_any_of_three_replicas() {
    let options = Options { members: 3, auth: Auth::On { extra_users: 0 }, ..Options::default() };
    let cluster = Cluster::start(&newest("3.6"), options).await;
    let replicas = three_replicas(&cluster).await;
    let far = &replicas[2];
    let bystander = Caller::log_in(replicas[1].site().listen, "alice").await;
    let mut open = watch(&bystander, "/a/", 1).await;
    let looping = Loop::start(Caller::log_in(far.site().listen, "root").await);
    looping.goes_on(200).await;

    for (number, asked) in replicas.iter().enumerate() {
        looping.goes_on(50).await;
        let clients = show(asked, &["clients", "--over", "500ms", "--sort", "calls_per_second"]).await;
        assert_eq!(clients[0]["peer"], "password:root", "{clients:?}");
        assert!(has_name(&clients[0], far), "{clients:?}");
        let quiet = clients.iter().find(|row| row["peer"] == "password:alice").expect("the bystander");
        assert!(has_name(quiet, &replicas[1]), "{clients:?}");
        let (code, table) = command(asked, &["show", "clients", "--all"]).await;
        assert!(code == Some(0) && table.starts_with("REPLICA"), "{table}");

        let before = far.metric("keyward_fleet_requests_total", &[("result", "answered")]).await;
        let (code, said) = command(asked, &["kick", "--all", "password:root"]).await;
        assert_eq!(code, Some(0), "{said}");
        assert_eq!(said.matches("was told to leave").count(), 1, "{said}");
        assert_eq!(said.matches("no connection of the peer").count(), 2, "{said}");
        let after = far.metric("keyward_fleet_requests_total", &[("result", "answered")]).await;
        assert_eq!(after - before, if number == 2 { 1.0 } else { 2.0 }, "a replica asks itself once at most");
        looping.goes_on(50).await;
    }
    assert_eq!(looping.stop().await, [""; 0], "the connection ends between calls");
    bystander.put("/a/k", b"v".to_vec(), 0).await.expect("written");
    assert_eq!(open.message().await.expect("open").expect("an event").events.len(), 1);
    let (code, said) = command(&replicas[0], &["kick", "--all", "password:nobody"]).await;
    assert_eq!((code, said.lines().count()), (Some(1), 3), "{said}");

    // Each order has a record where it took effect, with the replica at which it was given.
    let records = kicks(far, 4).await;
    let done: Vec<&Value> = records.iter().filter(|record| record["result"] == "done").collect();
    assert_eq!((records.len(), done.len()), (4, 3), "{records:?}");
    assert!(done.iter().all(|record| record["target"] == "password:root" && record["uid"].is_u64()));
    let origins: Vec<bool> = done.iter().map(|record| record["from_replica"].is_string()).collect();
    assert_eq!(origins, [true, true, false], "{records:?}");
    let kicked =
        |line: &str| line.contains("an operator ended a client connection") && line.contains("from_replica=");
    far.logged("who ended the connection, and where", kicked).await;
}

#[tokio::test]
async fn every_command_sees_the_fleet_and_orders_reach_one_replica_or_all() {
    let cluster = Cluster::start(&newest("3.6"), Options { members: 3, ..Options::default() }).await;
    let replicas = three_replicas(&cluster).await;
    let caller = Caller::anybody(replicas[2].site().listen).await;
    let _open = watch(&caller, "/w/", 3).await;

    let watches = show(&replicas[0], &["watches"]).await;
    assert!(watches.len() == 1 && has_name(&watches[0], &replicas[2]), "{watches:?}");
    for topic in
        ["leases", "locks", "hot", "slow", "sessions", "users", "limits", "certs", "config", "version"]
    {
        let rows = show(&replicas[1], &[topic]).await;
        assert!(rows.iter().all(|row| row["replica"].is_string()), "{topic}: {rows:?}");
    }
    let status = json(&replicas[0], &["status", "--all"], 0).await;
    let rows = status["replicas"].as_array().expect("rows");
    assert_eq!(rows.len(), 3, "{status}");
    assert!(rows.iter().all(|row| row["status"]["replica"]["state"] == "serving"), "{status}");
    // The asked replica is among its own admin.replicas, and asked once, by either name.
    let own = replicas[0].site().admin.to_string();
    assert_eq!(rows[0]["addresses"], serde_json::json!([own]), "{status}");
    let status = json(&replicas[0], &["status", "--replica", &own], 0).await;
    assert!(status["replicas"].as_array().is_some_and(|rows| rows.len() == 1), "{status}");
    assert!(has_name(&status["replicas"][0], &replicas[0]), "{status}");
    let (code, said) = command(&replicas[0], &["status", "--all"]).await;
    assert!(code == Some(0) && said.matches("3 of 3 ready").count() == 3, "{said}");
    let (code, said) = command(&replicas[0], &["show", "replicas", "--all"]).await;
    assert!(code == Some(1) && said.contains("by itself"), "{said}");

    // A member leaves service on one replica, then on all.
    let members = show(&replicas[0], &["members"]).await;
    assert_eq!(members.len(), 9, "{members:?}");
    let member = members[0]["name"].as_str().expect("a name").to_owned();
    let far = watches[0]["replica"].as_str().expect("a name").to_owned();
    let paused = async || {
        let rows = show(&replicas[1], &["members", "--filter", "why~paused"]).await;
        rows.iter().map(|row| row["replica"].as_str().expect("a name").to_owned()).collect::<Vec<_>>()
    };
    let (code, said) = command(&replicas[0], &["pause", &member, "--replica", &far]).await;
    assert!(code == Some(0) && said.starts_with(&format!("{far}: member ")), "{said}");
    assert_eq!(paused().await, std::slice::from_ref(&far));
    let (code, said) = command(&replicas[0], &["pause", &member, "--all"]).await;
    assert!(code == Some(0) && said.contains("is paused already"), "{said}");
    assert_eq!(paused().await.len(), 3);
    let (code, said) = command(&replicas[1], &["status", "--all"]).await;
    assert!(code == Some(0) && said.matches("2 of 3 ready").count() == 3, "{said}");
    let (code, said) = command(&replicas[1], &["resume", &member, "--all"]).await;
    assert!(code == Some(0) && said.matches("gets calls again").count() == 3, "{said}");
    assert_eq!(paused().await, [""; 0]);

    // A number is of one replica.
    let client = watches[0]["client"].as_u64().expect("a number").to_string();
    let (code, said) = command(&replicas[0], &["kick", "--all", &client]).await;
    assert!(code == Some(64) && said.contains("--replica"), "{said}");
    let (code, said) = command(&replicas[0], &["kick", &client, "--replica", "nosuch"]).await;
    assert!(code == Some(1) && said.contains(&far), "{said}");
    let (code, said) = command(&replicas[0], &["kick", &client, "--replica", &far]).await;
    assert!(code == Some(0) && said.contains("1 streams ended"), "{said}");
}

#[tokio::test]
async fn a_replica_that_is_stopped_or_gone_is_named_and_the_others_answer() {
    let cluster = Cluster::start(&newest("3.6"), Options::default()).await;
    let mut replicas = three_replicas(&cluster).await;
    let caller = Caller::anybody(replicas[1].site().listen).await;
    let _open = watch(&caller, "/w/", 1).await;
    let silent = replicas[2].site().admin.to_string();

    replicas[2].signal(Signal::STOP);
    let view = json(&replicas[0], &["show", "watches", "--all"], 1).await;
    assert!(has_name(&view["rows"][0], &replicas[1]), "{view}");
    let unanswered = view["unanswered"].as_array().expect("a list");
    assert_eq!((unanswered.len(), &unanswered[0]["replica"]), (1, &silent.as_str().into()), "{view}");
    let (code, said) = command(&replicas[0], &["status", "--all"]).await;
    assert!(code == Some(1) && said.matches("serving").count() == 2, "{said}");
    assert!(said.contains(&silent) && said.contains("no answer"), "{said}");
    let (code, said) = command(&replicas[0], &["kick", "127.0.0.1", "--all"]).await;
    assert!(code == Some(1) && said.contains("1 streams ended"), "{said}");
    assert!(said.contains(&format!("{silent}: not reached, so nothing was done there")), "{said}");
    replicas[2].signal(Signal::CONT);
    assert_eq!(
        show(&replicas[0], &["version"]).await.iter().filter(|row| row["part"] == "keyward").count(),
        3
    );

    drop(replicas.pop().expect("three").kill());
    let view = json(&replicas[0], &["show", "clients", "--all"], 1).await;
    assert_eq!(view["unanswered"][0]["replica"], silent, "{view}");
    assert!(view["unanswered"][0]["why"].as_str().is_some_and(|why| why.contains("refused")), "{view}");
}

/// What a relay answers to orders.
#[derive(Clone, Copy, PartialEq, Eq)]
enum RelayAnswer {
    /// The answer of the replica.
    Own,
    /// What a replica says to a request that it does not take, in place of the answer.
    Refusal,
}

/// Passes connections on to `to`, and keeps what the clients of the relay send.
async fn recording_relay(
    to: SocketAddr,
    to_orders: RelayAnswer,
) -> (SocketAddr, Arc<Mutex<Vec<Vec<u8>>>>, JoinSet<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("its port");
    let (sent, mut tasks) = (Arc::new(Mutex::new(Vec::new())), JoinSet::new());
    let kept = Arc::clone(&sent);
    tasks.spawn(async move {
        while let Ok((mut near, _)) = listener.accept().await {
            let mut far = TcpStream::connect(to).await.expect("it listens");
            let mut request = vec![0; 64 * 1024];
            let mut length = 0;
            // A request comes in one piece, or in two: head and body.
            while !is_whole(&request[..length]) {
                length += near.read(&mut request[length..]).await.expect("a request");
            }
            request.truncate(length);
            far.write_all(&request).await.expect("taken");
            let is_order = {
                let mut kept = kept.lock().expect("whole");
                kept.push(request);
                kept.len() > 1
            };
            let mut answer = Vec::new();
            far.read_to_end(&mut answer).await.expect("an answer");
            if is_order && to_orders == RelayAnswer::Refusal {
                answer = b"HTTP/1.1 405 Method Not Allowed\r\nContent-Length: 9\r\n\r\nGET only\n".to_vec();
            }
            near.write_all(&answer).await.expect("taken");
        }
    });
    (address, sent, tasks)
}

#[tokio::test]
async fn who_answers_on_the_way_makes_nobody_believe_that_nothing_was_done() {
    let cluster = Cluster::start(&newest("3.6"), Options::default()).await;
    let (near, far) = (Site::new(), Site::new());
    let (relay, _, _relaying) = recording_relay(far.admin, RelayAnswer::Refusal).await;
    let far_config = config(&far, &cluster, &[near.admin], 7);
    let near_config = config(&near, &cluster, &[relay], 7);
    let far = Keyward::start(far, &far_config).await;
    let near = Keyward::start(near, &near_config).await;
    let caller = Caller::anybody(far.site().listen).await;
    let mut open = watch(&caller, "/w/", 1).await;

    let (code, said) = command(&near, &["kick", "127.0.0.1", "--all"]).await;
    assert_eq!(code, Some(75), "{said}");
    assert!(said.contains("it is not known what was done there: HTTP status 405"), "{said}");
    assert!(open.message().await.is_err(), "the order took effect");
    let records = kicks(&far, 1).await;
    assert!(records.len() == 1 && records[0]["result"] == "done", "{records:?}");
    let from = records[0]["from_replica"].as_str().expect("a replica");
    assert!(
        from.ends_with(&format!(":{} at 127.0.0.1", near.id())) || from.ends_with(" at 127.0.0.1"),
        "{from}"
    );
    let given = |line: &str| line.contains("an operator gives an order to other replicas");
    near.logged("who gave the order", given).await;
}

/// Head and body of a request.
fn parts(request: &[u8]) -> Option<(&str, &[u8])> {
    let end = request.windows(4).position(|bytes| bytes == b"\r\n\r\n")?;
    Some((std::str::from_utf8(&request[..end]).expect("a head"), &request[end + 4..]))
}

fn is_whole(request: &[u8]) -> bool {
    let Some((head, body)) = parts(request) else { return false };
    let length = head
        .lines()
        .find_map(|line| line.to_ascii_lowercase().strip_prefix("content-length: ")?.parse().ok());
    body.len() >= length.unwrap_or(0)
}

/// Posts a body to the path of sealed requests; status and text of the answer.
async fn post(address: SocketAddr, body: &[u8]) -> (u16, String) {
    let mut stream = TcpStream::connect(address).await.expect("it listens");
    let length = body.len();
    let head = format!(
        "POST /fleet HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n"
    );
    stream.write_all(&[head.as_bytes(), body].concat()).await.expect("taken");
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.expect("an answer");
    let answer = String::from_utf8_lossy(&answer).into_owned();
    let (head, body) = answer.split_once("\r\n\r\n").expect("an answer");
    (head.split(' ').nth(1).and_then(|code| code.parse().ok()).expect("a status"), body.to_owned())
}

#[tokio::test]
async fn forged_replayed_cut_and_misdirected_requests_are_refused_like_any_unknown_one() {
    let cluster = Cluster::start(&newest("3.6"), Options::default()).await;
    let (near, far, third) = (Site::new(), Site::new(), Site::new());
    let (relay, sent, _relaying) = recording_relay(far.admin, RelayAnswer::Own).await;
    let (far_config, near_config) =
        (config(&far, &cluster, &[near.admin], 7), config(&near, &cluster, &[relay], 7));
    let third_config = config(&third, &cluster, &[far.admin], 8);
    let far = Keyward::start(far, &far_config).await;
    let near = Keyward::start(near, &near_config).await;
    let third = Keyward::start(third, &third_config).await;
    let caller = Caller::anybody(far.site().listen).await;
    let mut open = watch(&caller, "/w/", 1).await;

    let (code, said) = command(&near, &["kick", "10.1.2.3", "--all"]).await;
    assert!(code == Some(1) && said.lines().count() == 2, "{said}");
    let sent: Vec<Vec<u8>> = sent.lock().expect("whole").clone();
    let bodies: Vec<&[u8]> = sent.iter().map(|request| parts(request).expect("whole").1).collect();
    let [hello, order] = bodies[..] else { panic!("{} requests", bodies.len()) };
    for word in ["kick", "10.1.2.3", "replica"] {
        let has_word = |body: &&[u8]| body.windows(word.len()).any(|part| part == word.as_bytes());
        assert!(!bodies.iter().any(has_word), "a request is sealed: {word}");
    }

    let address = far.site().admin;
    let refused = (UNKNOWN_REQUEST.0, UNKNOWN_REQUEST.1.to_owned());
    let count = async |replica: &Keyward, result: &str| {
        replica.metric("keyward_fleet_requests_total", &[("result", result)]).await
    };
    assert_eq!(kicks(&far, 1).await.len(), 1, "the order took effect once");
    assert_eq!(post(address, order).await, refused, "replayed");
    assert_eq!(count(&far, "replayed").await, 1.0);
    let mut changed = order.to_vec();
    *changed.last_mut().expect("a byte") ^= 1;
    let garbage = vec![b'x'; 100_000];
    let forged: [&[u8]; 6] =
        [b"", b"{\"status\":{}}", &order[..order.len() / 2], &order[..40], &changed, &garbage[..16_000]];
    for body in forged {
        assert_eq!(post(address, body).await, refused, "forged");
    }
    assert_eq!(count(&far, "forged").await, 6.0);
    // A hello says nothing to anybody without the key, and changes nothing.
    let (code, welcome) = post(address, hello).await;
    assert!(code == 200 && !welcome.contains("host") && !welcome.contains("millis"), "{welcome}");

    // The same key in another process: the order names the process that it is for.
    assert_eq!(post(near.site().admin, order).await, refused, "misdirected");
    assert_eq!(count(&near, "elsewhere").await, 1.0);
    // Another key: neither asks nor answers.
    assert_eq!(post(third.site().admin, order).await, refused);
    let view = json(&third, &["show", "clients", "--all"], 1).await;
    assert!(
        view["unanswered"][0]["why"].as_str().is_some_and(|why| why.contains("session.key_files")),
        "{view}"
    );
    let told = |line: &str| line.contains("sealed requests of other replicas were refused");
    let log = far.logged("the refusals", told).await;
    assert!(log.lines().filter(|line| told(line)).count() <= 2, "a bounded number of lines: {log}");

    let (code, said) = command(&far, &["kick", "10.9.9.9"]).await;
    assert_eq!(code, Some(1), "{said}");
    assert_eq!(kicks(&far, 2).await.len(), 2, "nothing else took effect before");
    caller.put("/w/k", b"v".to_vec(), 0).await.expect("written");
    assert_eq!(open.message().await.expect("open").expect("an event").events.len(), 1);

    // A replica of no fleet has no door, and says what it lacks.
    let alone = Site::new();
    let alone_config = config(&alone, &cluster, &[], 7);
    let alone = Keyward::start(alone, &alone_config).await;
    assert_eq!(post(alone.site().admin, hello).await, refused);
    let (code, said) = command(&alone, &["status", "--all"]).await;
    assert!(code == Some(1) && said.contains("admin.replicas is not set"), "{said}");
    let looks = async || (!alone.admin("/readyz").await.1.is_empty()).then_some(());
    wait::until(LIMIT, "it goes on", looks).await;
}
