//! Who does what, now: an operator finds the client in a loop and the leaked watches in one command each, ends them, and takes a
//! member out of service and back.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use keyward::pb::etcdserverpb::watch_client::WatchClient;
use keyward::pb::etcdserverpb::watch_request::RequestUnion;
use keyward::pb::etcdserverpb::{WatchCreateRequest, WatchRequest, WatchResponse};
use serde_json::Value;
use tokio::task::JoinSet;
use tonic::{Code, Streaming};

use crate::caller::{Caller, Kind};
use crate::harness::client::lifetime;
use crate::harness::keyward::{Keyward, Site};
use crate::harness::{Auth, Cluster, Options, newest, wait};
use crate::revocations::{command, end};

const LIMIT: Duration = Duration::from_secs(60);
/// Watches that one client leaks, all of the same prefix.
const LEAKED: usize = 3000;

/// The rows of `keyward show`, after checking its envelope.
async fn show(keyward: &Keyward, arguments: &[&str]) -> Vec<Value> {
    let all = [&["show"], arguments, &["-o", "json"]].concat();
    let (code, said) = command(keyward, &all).await;
    assert_eq!(code, Some(0), "{all:?}: {said}");
    let view: Value = serde_json::from_str(&said).expect("JSON");
    assert_eq!((&view["schema_version"], &view["topic"]), (&1.into(), &arguments[0].into()), "{view}");
    view["rows"].as_array().expect("rows").clone()
}

/// A Watch stream with so many watches of a prefix, all created.
pub(crate) async fn watch(caller: &Caller, prefix: &str, watches: usize) -> Streaming<WatchResponse> {
    let mut end = prefix.as_bytes().to_vec();
    *end.last_mut().expect("a prefix") += 1;
    let create = WatchCreateRequest {
        key: prefix.to_owned().into(),
        range_end: end.into(),
        ..WatchCreateRequest::default()
    };
    let create = WatchRequest { request_union: Some(RequestUnion::CreateRequest(create)) };
    let creates = futures_util::stream::iter(vec![create; watches]);
    let asked = futures_util::StreamExt::chain(creates, futures_util::stream::pending());
    let mut client = WatchClient::new(caller.channel.clone());
    let mut stream = client.watch(caller.request(asked)).await.expect("admitted").into_inner();
    for _ in 0..watches {
        assert!(stream.message().await.expect("admitted").expect("created").created);
    }
    stream
}

/// A program that writes without a pause. Counts its calls and its errors until it is to stop.
pub(crate) struct Loop {
    stops: Arc<AtomicBool>,
    calls: Arc<AtomicU64>,
    task: JoinSet<Vec<String>>,
}

impl Loop {
    pub(crate) fn start(caller: Caller) -> Self {
        let (stops, calls) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
        let (is_over, count) = (Arc::clone(&stops), Arc::clone(&calls));
        let mut task = JoinSet::new();
        task.spawn(async move {
            let mut errors = Vec::new();
            while !is_over.load(Ordering::Relaxed) {
                match caller.put("/loop", b"v".to_vec(), 0).await {
                    Ok(_) => _ = count.fetch_add(1, Ordering::Relaxed),
                    Err(status) => errors.push(status.to_string()),
                }
            }
            errors
        });
        Self { stops, calls, task }
    }

    /// Waits for so many calls more.
    pub(crate) async fn goes_on(&self, more: u64) {
        let wanted = self.calls.load(Ordering::Relaxed) + more;
        let look = async || (self.calls.load(Ordering::Relaxed) >= wanted).then_some(());
        wait::until(LIMIT, "the loop goes on", look).await;
    }

    /// Stops the program and returns its errors.
    pub(crate) async fn stop(mut self) -> Vec<String> {
        self.stops.store(true, Ordering::Relaxed);
        self.task.join_next().await.expect("it runs").expect("it does not panic")
    }
}

/// A call to a member that is stopped for a while stands in the list of slow calls, with its keys and the member's part of the time.
#[tokio::test]
async fn a_slow_member_is_named_by_its_slow_calls() {
    let mut cluster = Cluster::start(&newest("3.6"), Options::default()).await;
    let keyward = start(&cluster).await;
    let caller = Caller::anybody(keyward.site().listen).await;
    caller.put("/quick", b"v".to_vec(), 0).await.expect("written");
    cluster.stop(0);
    let mut put = JoinSet::new();
    put.spawn(async move { caller.put("/slow/\n", b"v".to_vec(), 0).await });
    let waits = async || (keyward.metric("keyward_member_calls_in_flight", &[]).await == 1.0).then_some(());
    wait::until(LIMIT, "the call waits for the member", waits).await;
    // The call is with the member from here on, so at least that long.
    lifetime(Duration::from_millis(300)).await;
    cluster.resume(0);
    put.join_next().await.expect("one call").expect("no panic").expect("written");
    let slow = show(&keyward, &["slow", "--filter", "ranges~/slow/"]).await;
    assert_eq!(slow.len(), 1, "{slow:?}");
    let call = &slow[0];
    assert_eq!((&call["method"], &call["code"]), (&"Put".into(), &"OK".into()), "{call}");
    assert!(call["ranges"].as_str().is_some_and(|ranges| ranges.contains("/slow/\\n")), "{call}");
    let part = |field: &str| call[field].as_u64().expect("known");
    assert!(part("member_micros") > part("took_micros") / 2 && part("took_micros") >= 200_000, "{call}");
    assert!(show(&keyward, &["slow", "--filter", "ranges~/quick"]).await.is_empty());
}

async fn start(cluster: &Cluster) -> Keyward {
    let site = Site::new();
    let admin = "admin.socket = \"admin.sock\"\nadmin.user_metrics = 1\n";
    let config = format!("{}{admin}", site.in_front_of(cluster));
    Keyward::start(site, &config).await
}

/// The first user has metrics of its own; the second, over `admin.user_metrics`, is one of the others.
async fn users_have_metrics(keyward: &Keyward) {
    let (_, text) = keyward.admin("/metrics").await;
    let calls = |user: &str| {
        let line = format!("keyward_user_calls_total{{user=\"{user}\",code=\"OK\"}} ");
        text.lines().find_map(|found| found.strip_prefix(&line)?.parse::<u64>().ok())
    };
    assert!(calls("root") > Some(500), "{text}");
    assert!(calls("(others)") > Some(0) && !text.contains("user=\"alice\""), "{text}");
}

fn client_of(row: &Value) -> String {
    row["client"].as_u64().expect("a number").to_string()
}

/// The client in a loop stands at the top, in all and now; its row.
async fn looping_client(keyward: &Keyward) -> Value {
    let clients = show(keyward, &["clients"]).await;
    let (first, next) = (&clients[0], &clients[1]);
    assert!(first["calls"].as_u64() > Some(500) && next["calls"].as_u64() < Some(50), "{clients:?}");
    assert_eq!((&first["user"], &first["peer"]), (&"root".into(), &"password:root".into()));
    assert!(first["user_agent"].as_str().is_some_and(|agent| agent.starts_with("tonic/")), "{first}");
    assert!(first["bytes_in"].as_u64() > Some(500) && first["bytes_out"].as_u64() > Some(500), "{first}");
    let by_rate = show(keyward, &["clients", "--over", "200ms", "--sort", "calls_per_second"]).await;
    assert_eq!(by_rate[0]["client"], first["client"], "{by_rate:?}");
    let users = show(keyward, &["users"]).await;
    assert_eq!((&users[0]["user"], &users[0]["watches"]), (&"root".into(), &1.into()), "{users:?}");

    // The sample has 31 of the loop's first 500 calls at least.
    let hot = show(keyward, &["hot"]).await;
    assert_eq!(hot[0]["prefix"], "/", "{hot:?}");
    assert!(hot[0]["calls_at_least"].as_u64() >= Some(400), "{hot:?}");
    first.clone()
}

/// The leaked watches are one row, and name their client; the row.
async fn leaked_watches(keyward: &Keyward) -> Value {
    let watches = show(keyward, &["watches"]).await;
    assert_eq!(watches.len(), 2, "{watches:?}");
    let leak = &watches[0];
    assert_eq!((&leak["watches"], &leak["live"]), (&LEAKED.into(), &LEAKED.into()), "{leak}");
    assert_eq!((&leak["user"], &leak["range"]), (&"alice".into(), &"/a/leak/*".into()), "{leak}");
    let by_watches = show(keyward, &["clients", "--sort", "watches"]).await;
    assert_eq!(
        (&by_watches[0]["client"], &by_watches[0]["watches"]),
        (&leak["client"], &LEAKED.into()),
        "{by_watches:?}"
    );
    let (code, table) = command(keyward, &["show", "watches", "--filter", "watches>100"]).await;
    assert_eq!((code, table.lines().count()), (Some(0), 2), "{table}");
    assert!(table.lines().all(|line| line.chars().count() <= 100) && table.contains("/a/leak/*"), "{table}");
    leak.clone()
}

/// The waiting lock is told with its name and its lease.
async fn one_lock_waits(keyward: &Keyward, lease: i64) {
    let locks = show(keyward, &["locks"]).await;
    assert_eq!(locks.len(), 1, "{locks:?}");
    assert_eq!((&locks[0]["name"], &locks[0]["method"]), (&"/lock".into(), &"Lock".into()));
    assert_eq!(locks[0]["lease"], format!("{lease:x}"));
}

#[tokio::test]
async fn the_culprit_stands_at_the_top_and_kick_ends_its_connection() {
    let auth = Auth::On { extra_users: 0 };
    let cluster = Cluster::start(&newest("3.6"), Options { auth, ..Options::default() }).await;
    let keyward = start(&cluster).await;
    let address = keyward.site().listen;
    let (bystander, leaking) =
        (Caller::log_in(address, "root").await, Caller::log_in(address, "alice").await);
    let mut one_watch = watch(&bystander, "/a/", 1).await;
    let leaked = watch(&leaking, "/a/leak/", LEAKED).await;
    let lease = bystander.grant(60).await;
    let holder = bystander.queue(Kind::Lock, "/lock", lease, "").await.expect("it is free");
    let waiting = bystander.at(address).await;
    let second = waiting.grant(60).await;
    let mut waits = JoinSet::new();
    waits.spawn(async move { waiting.queue(Kind::Lock, "/lock", second, "").await });
    let looping = Loop::start(Caller::log_in(address, "root").await);
    looping.goes_on(500).await;

    let first = looping_client(&keyward).await;
    let leak = leaked_watches(&keyward).await;
    one_lock_waits(&keyward, second).await;
    bystander.put("/a/k", b"v".to_vec(), 0).await.expect("written");
    assert_eq!(one_watch.message().await.expect("open").expect("an event").events.len(), 1);
    let watched = show(&keyward, &["watches", "--filter", "range=/a/*"]).await;
    assert_eq!((watched.len(), &watched[0]["events"]), (1, &1.into()), "{watched:?}");

    // The leak is ended: its stream says so, and its neighbours go on.
    let leaking = client_of(&leak);
    let (code, said) = command(&keyward, &["kick", &leaking]).await;
    assert!(code == Some(0) && said.contains("1 streams ended") && said.contains("alice"), "{said}");
    assert_eq!(end(leaked, LIMIT).await.code(), Code::Unavailable);
    let is_gone = async || {
        let rows = show(&keyward, &["clients", "--filter", &format!("client={leaking}")]).await;
        rows.is_empty().then_some(())
    };
    wait::until(LIMIT, "the connection ends", is_gone).await;
    assert_eq!(show(&keyward, &["watches"]).await.len(), 1);
    // A connection in the midst of calls ends without an error of any call.
    let (code, said) = command(&keyward, &["kick", &client_of(&first)]).await;
    assert!(code == Some(0) && said.contains("0 streams ended"), "{said}");
    looping.goes_on(100).await;
    assert_eq!(looping.stop().await, [""; 0]);
    bystander.put("/a/k", b"w".to_vec(), 0).await.expect("written");
    assert_eq!(one_watch.message().await.expect("open").expect("an event").events.len(), 1);
    let (code, said) = command(&keyward, &["kick", &leaking]).await;
    assert!(code == Some(1) && said.contains(&format!("no client {leaking}")), "{said}");
    let kicked = |line: &str| line.contains("an operator ended a client connection") && line.contains("uid=");
    keyward.logged("who ended the connection", kicked).await;

    users_have_metrics(&keyward).await;
    bystander.delete(holder).await;
    assert!(waits.join_next().await.expect("one call").expect("no panic").is_ok());
    assert_eq!(show(&keyward, &["locks"]).await.len(), 0);
}

/// `etcdctl` looks for the leader by the status of its endpoints, and Keyward asks a paused leader for none: the
/// command that `pause` names goes to the member.
#[tokio::test]
async fn the_leadership_of_a_paused_leader_moves_by_the_command_that_pause_names() {
    let cluster = Cluster::start(&newest("3.5"), Options { members: 3, ..Options::default() }).await;
    let keyward = start(&cluster).await;
    let through = cluster.ctl().to(vec![format!("http://{}", keyward.site().listen)]);
    let leader = cluster.leader().await;
    let id = format!("{:x}", cluster.member_id(leader).await);
    let (code, said) = command(&keyward, &["pause", &id]).await;
    assert!(code == Some(0) && said.contains("it is the leader"), "{said}");
    let (endpoint, rest) =
        said.split("ETCDCTL_ENDPOINTS=").nth(1).and_then(|it| it.split_once(' ')).expect("it");
    let next =
        rest.strip_prefix("etcdctl move-leader ").and_then(|it| it.split_whitespace().next()).expect("id");
    assert_eq!(endpoint, cluster.url(leader));
    let unmoved = through.run(&["move-leader", next]).await;
    assert_eq!(unmoved.code, Some(128), "no leader is found through Keyward: {unmoved:?}");
    let moved = cluster.ctl().to(vec![endpoint.to_owned()]).ok(&["move-leader", next]).await;
    assert!(moved.contains("Leadership transferred"), "{moved}");
    assert_eq!(format!("{:x}", cluster.member_id(cluster.leader().await).await), next);
}

#[tokio::test]
async fn a_paused_member_gets_no_calls_until_it_is_resumed() {
    let cluster = Cluster::start(&newest("3.6"), Options { members: 3, ..Options::default() }).await;
    let keyward = start(&cluster).await;
    let caller = Caller::anybody(keyward.site().listen).await;
    let mut streams = Vec::new();
    for _ in 0..6 {
        let connection = Caller::anybody(keyward.site().listen).await;
        streams.push(watch(&connection, "/w/", 1).await);
    }
    let puts = async |member: usize| {
        cluster.counter(member, "grpc_server_started_total", &[("grpc_method", "Put")]).await
    };
    let write = async |times: usize| {
        for _ in 0..times {
            caller.put("/k", b"v".to_vec(), 0).await.expect("written");
        }
    };
    let row_of = async |member: usize| {
        let rows = show(&keyward, &["members"]).await;
        rows.into_iter().find(|row| row["endpoint"] == cluster.url(member)).expect("it is listed")
    };
    let paused = (0..3).find(|member| *member != 0).expect("a second member");
    let name = row_of(paused).await["name"].as_str().expect("a name").to_owned();
    write(30).await;
    assert!(puts(paused).await > 0.0, "calls are spread");

    let (code, said) = command(&keyward, &["pause", &name]).await;
    assert!(code == Some(0) && said.contains("gets no new calls"), "{said}");
    let before = puts(paused).await;
    write(60).await;
    assert_eq!(puts(paused).await, before, "a paused member gets no calls");
    let has_left = async || {
        let row = row_of(paused).await;
        (row["watch_streams"] == 0 && row["ready"] == false).then_some(row)
    };
    let row = wait::until(LIMIT, "the streams leave", has_left).await;
    assert!(row["why"].as_str().is_some_and(|why| why.contains("paused")), "{row}");
    caller.put("/w/1", b"v".to_vec(), 0).await.expect("written");
    for stream in &mut streams {
        assert_eq!(stream.message().await.expect("open").expect("an event").events.len(), 1);
    }

    // The last member stays.
    let others: Vec<usize> = (0..3).filter(|member| *member != paused).collect();
    let id = row_of(others[0]).await["id"].as_str().expect("an id").to_owned();
    assert_eq!(command(&keyward, &["pause", &id]).await.0, Some(0), "by its id");
    let last = row_of(others[1]).await["name"].as_str().expect("a name").to_owned();
    let (code, said) = command(&keyward, &["pause", &last]).await;
    assert!(code == Some(1) && said.contains("no other voter is ready"), "{said}");
    write(10).await;
    let (code, said) = command(&keyward, &["pause", "nosuchmember"]).await;
    assert!(code == Some(1) && said.contains(&name), "{said}");

    for member in [&name, &id] {
        let (code, said) = command(&keyward, &["resume", member]).await;
        assert!(code == Some(0) && said.contains("gets calls again"), "{said}");
    }
    assert_eq!(command(&keyward, &["resume", &name]).await.0, Some(1), "it is not paused");
    let before = puts(paused).await;
    let is_back = async || {
        write(10).await;
        (puts(paused).await > before).then_some(())
    };
    wait::until(LIMIT, "calls come back", is_back).await;
    for done in ["an operator paused a member", "an operator resumed a member"] {
        keyward.logged(done, |line| line.contains(done)).await;
    }
}
