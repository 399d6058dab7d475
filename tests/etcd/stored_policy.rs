//! The policy stored in etcd, on real etcd: replicas under load obey an `apply` and judge no call by half of a generation; whatever
//! happens to the keys or to etcd, the last good generation stays in force.

use std::cell::Cell;
use std::fmt::Write as _;
use std::fs;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use keyward::pb::etcdserverpb::kv_client::KvClient;
use keyward::pb::etcdserverpb::watch_client::WatchClient;
use keyward::pb::etcdserverpb::watch_request::RequestUnion;
use keyward::pb::etcdserverpb::{
    RangeRequest, RequestOp, TxnRequest, WatchCreateRequest, WatchRequest, WatchResponse, request_op,
};
use keyward::tasks::Tasks;
use tonic::{Code, Streaming};

use crate::caller::Caller;
use crate::harness::keyward::{Keyward, Site};
use crate::harness::relay::Relay;
use crate::harness::{Auth, Cluster, Options, versions, wait};
use crate::revocations::{command, done};

const LIMIT: Duration = Duration::from_secs(30);
const PREFIX: &str = "/keyward/policy/";

/// The lines of a replica that enforces the stored policy.
const LINES: &str = "admin.socket = \"admin.sock\"\n\
    policy = { mode = \"enforce\", etcd_prefix = \"/keyward/policy/\" }\n";
const LINES_WITH_STATE: &str = "admin.socket = \"admin.sock\"\n\
    policy = { mode = \"enforce\", etcd_prefix = \"/keyward/policy/\", state_file = \"policy.state\" }\n";

/// The document of generation `number`: every generation may read both keys of `/pair/`, by grants that each generation swaps between
/// two roles; exactly one key of `/only/`; and the keys `/generation/1` to `/generation/{number}`.
fn document(number: u64) -> String {
    let (one, two) = if number.is_multiple_of(2) { ("a", "b") } else { ("b", "a") };
    let mut text = format!(
        "[[role]]\nname = 'one'\nallow = [{{ actions = ['read'], key = '/pair/{one}' }}]\n\
         [[role]]\nname = 'two'\nallow = [{{ actions = ['read'], key = '/pair/{two}' }}]\n\
         [[role]]\nname = 'only'\nallow = [{{ actions = ['read'], key = '/only/{one}' }}]\n\
         [[role]]\nname = 'everything'\nallow = [{{ actions = ['read', 'write', 'watch'], everything = true }}]\n\
         [[role]]\nname = 'generations'\nallow = [\n"
    );
    for known in 1..=number {
        writeln!(text, "{{ actions = ['read'], key = '/generation/{known}' }},").expect("memory");
    }
    text + "]\n[[binding]]\npeer = 'listener:main'\nroles = ['one', 'two', 'only', 'generations']\n"
}

/// Applies the document of this number through a replica, which says that the generation has this number.
async fn apply(keyward: &Keyward, number: u64) {
    let file = keyward.site().write("next.toml", &document(number));
    let (code, said) = command(keyward, &["policy", "apply", file.to_str().expect("a path")]).await;
    assert_eq!(code, Some(0), "{said}");
    assert!(said.starts_with(&format!("generation {number} is in force")), "{said}");
}

/// Applies through a replica on a machine that may be too busy for an answer in time.
async fn apply_patiently(keyward: &Keyward, number: u64) {
    let file = keyward.site().write("next.toml", &document(number));
    done(keyward, &["policy", "apply", file.to_str().expect("a path")]).await;
}

fn range(key: &str) -> RangeRequest {
    RangeRequest { key: key.to_owned().into(), ..RangeRequest::default() }
}

/// The code of reading these keys in one call.
async fn read(caller: &Caller, keys: &[&str]) -> Code {
    let op = |key: &&str| RequestOp { request: Some(request_op::Request::RequestRange(range(key))) };
    let txn = TxnRequest { success: keys.iter().map(op).collect(), ..TxnRequest::default() };
    let mut request = caller.request(txn);
    request.set_timeout(Duration::from_secs(10));
    match KvClient::new(caller.channel.clone()).txn(request).await {
        Ok(_) => Code::Ok,
        Err(status) => status.code(),
    }
}

/// Reads keys through a replica until told to stop, and judges each answer.
async fn judge_replica(address: SocketAddr, current: Rc<Cell<u64>>, seen: Rc<Cell<u64>>) -> (usize, usize) {
    let caller = Caller::anybody(address).await;
    let (mut calls, mut denied) = (0, 0);
    let mut ticks = tokio::time::interval(Duration::from_millis(12));
    while current.get() != u64::MAX {
        ticks.tick().await;
        // Both keys by the grants of two roles: a mixture of two generations would grant one key twice and the other one not at all.
        let both = read(&caller, &["/pair/a", "/pair/b"]).await;
        assert_eq!(both, Code::Ok, "both generations allow both keys");
        let either = read(&caller, &["/only/a", "/only/b"]).await;
        assert_eq!(either, Code::PermissionDenied, "each generation allows one of both keys");
        // The generations are obeyed in their order, without a way back.
        let known = seen.get();
        assert_eq!(read(&caller, &[&format!("/generation/{known}")]).await, Code::Ok, "{known} was in force");
        if read(&caller, &[&format!("/generation/{}", known + 1)]).await == Code::Ok {
            seen.set(known + 1);
        } else {
            denied += 1;
        }
        calls += 4;
    }
    (calls, denied)
}

#[tokio::test]
async fn replicas_under_load_obey_and_judge_no_call_by_half_of_a_generation() {
    for version in versions() {
        let cluster = Cluster::start(&version, Options { members: 3, ..Options::default() }).await;
        let mut replicas = Vec::new();
        for _ in 0..3 {
            let site = Site::new();
            let config = site.in_front_of(&cluster) + LINES;
            replicas.push(Keyward::start(site, &config).await);
        }
        apply_patiently(&replicas[0], 1).await;
        let current = Rc::new(Cell::new(1));
        let seen: Vec<_> = replicas.iter().map(|_| Rc::new(Cell::new(1_u64))).collect();
        for keyward in &replicas {
            in_force(keyward, 1).await;
        }
        let began = Instant::now();
        // Three workers per replica; each judges the order of what it sees by itself.
        let workers = replicas.iter().zip(&seen).flat_map(|(keyward, seen)| {
            let own = [Rc::clone(seen), Rc::new(Cell::new(1)), Rc::new(Cell::new(1))];
            own.map(|seen| judge_replica(keyward.site().listen, Rc::clone(&current), seen))
        });
        let operator = async {
            let mut slowest = Duration::ZERO;
            for number in 2..=7 {
                tokio::time::sleep(Duration::from_millis(300)).await;
                let asked = Instant::now();
                apply(&replicas[usize::try_from(number).expect("small") % 3], number).await;
                let told = asked.elapsed();
                let waits = seen.iter().map(async |seen| {
                    wait::until(LIMIT, "obeyed", async || (seen.get() >= number).then_some(())).await;
                    asked.elapsed()
                });
                let latencies = join_all(waits).await;
                slowest = slowest.max(latencies.iter().copied().max().unwrap_or_default());
                println!("{version}: generation {number}: told after {told:?}, obeyed after {latencies:?}");
            }
            current.set(u64::MAX);
            slowest
        };
        let (counts, slowest) = tokio::join!(join_all(workers), operator);
        let calls: usize = counts.iter().map(|(calls, _)| calls).sum();
        let denied: usize = counts.iter().map(|(_, denied)| denied).sum();
        let rate = calls as f64 / began.elapsed().as_secs_f64();
        println!("{version}: {calls} calls judged, {rate:.0} a second; slowest replica after {slowest:?}");
        assert!(calls > 300 && denied > 0, "{calls} calls, {denied} denied");
        let (code, said) = command(&replicas[1], &["policy", "history"]).await;
        assert!(code == Some(0) && said.contains(" 7  true "), "{said}");
    }
}

/// Waits until the replica says that this generation is in force.
async fn in_force(keyward: &Keyward, number: u64) {
    let wanted = f64::from(u32::try_from(number).expect("small"));
    let look = async || (keyward.metric("keyward_policy_generation", &[]).await == wanted).then_some(());
    wait::until(LIMIT, &format!("generation {number} is in force"), look).await;
}

async fn shown(keyward: &Keyward) -> String {
    let (code, said) = command(keyward, &["policy", "show"]).await;
    assert_eq!(code, Some(0), "{said}");
    said
}

/// The member's address is told as the relay's, so that a replica that begins there knows no other way.
async fn one_member_behind_a_relay(
    version: &crate::harness::binary::Version,
    auth: Auth,
    tasks: &Tasks,
) -> (Cluster, Relay) {
    let relay = Relay::start(tasks).await;
    let options = Options { auth, advertise: vec![relay.address], ..Options::default() };
    let cluster = Cluster::start(version, options).await;
    relay.open(cluster.address(0));
    (cluster, relay)
}

/// A configuration that begins at the member itself, and not at the relay.
fn direct(site: &Site, cluster: &Cluster) -> String {
    site.in_front_of(cluster).replace(&cluster.advertised(0), &cluster.url(0))
}

fn cut(relay: &Relay) {
    // Nobody listens at port 1: what was open is cut, and what comes is refused.
    relay.turn_to(SocketAddr::from(([127, 0, 0, 1], 1)));
}

#[tokio::test(flavor = "local")]
async fn a_replica_cut_off_from_etcd_keeps_the_last_generation_also_over_a_restart() {
    for version in versions() {
        let tasks = Tasks::default();
        let (cluster, relay) = one_member_behind_a_relay(&version, Auth::Off, &tasks).await;
        let site = Site::new();
        let config = direct(&site, &cluster) + LINES;
        let near = Keyward::start(site, &config).await;
        let site = Site::new();
        let config = site.in_front_of(&cluster) + LINES_WITH_STATE;
        let far = Keyward::start(site, &config).await;
        apply_patiently(&near, 1).await;
        in_force(&far, 1).await;
        assert_eq!(read(&Caller::anybody(far.site().listen).await, &["/generation/1"]).await, Code::Ok);

        cut(&relay);
        apply_patiently(&near, 2).await;
        let age = async |keyward: &Keyward| keyward.metric("keyward_policy_age_seconds", &[]).await;
        // The age of the one that is cut off grows; that of the other is what it takes to ask etcd, at its longest.
        let aged = async || {
            let (near, far) = (age(&near).await, age(&far).await);
            (far > 2.0 && near < far).then_some(())
        };
        wait::until(LIMIT, "the age is told", aged).await;
        assert_eq!(shown(&far).await, document(1));
        // What the last generation denies is refused before anything is sent; what it allows finds no member.
        let caller = Caller::anybody(far.site().listen).await;
        assert_eq!(read(&caller, &["/generation/2"]).await, Code::PermissionDenied);
        assert_ne!(read(&caller, &["/generation/1"]).await, Code::PermissionDenied);
        let (code, said) = command(&far, &["policy", "apply", "/dev/null"]).await;
        assert_eq!(code, Some(1), "{said}");

        // Begun again without etcd: with a state file the last generation, without one nothing is allowed.
        let far = Keyward::start_unready(far.kill(), &config).await;
        assert_eq!(shown(&far).await, document(1));
        let caller = Caller::anybody(far.site().listen).await;
        assert_eq!(read(&caller, &["/generation/2"]).await, Code::PermissionDenied);
        let site = Site::new();
        let config = site.in_front_of(&cluster) + LINES;
        let blank = Keyward::start_unready(site, &config).await;
        let (status, said) = blank.admin("/readyz").await;
        // With the reason, once a read has failed.
        assert!(status == 503 && said.starts_with("the stored policy is not known yet"), "{status}: {said}");
        let caller = Caller::anybody(blank.site().listen).await;
        assert_eq!(read(&caller, &["/generation/1"]).await, Code::Unavailable);
        assert_eq!(read(&caller, &["/other"]).await, Code::Unavailable);

        relay.open(cluster.address(0));
        for keyward in [&far, &blank] {
            in_force(keyward, 2).await;
            keyward.ready().await;
            assert_eq!(shown(keyward).await, document(2));
            let caller = Caller::anybody(keyward.site().listen).await;
            assert_eq!(read(&caller, &["/generation/2"]).await, Code::Ok);
        }
    }
}

#[tokio::test]
async fn of_two_applies_at_once_one_wins() {
    for version in versions() {
        let cluster = Cluster::start(&version, Options::default()).await;
        let mut replicas = Vec::new();
        for _ in 0..2 {
            let site = Site::new();
            let config = site.in_front_of(&cluster) + LINES;
            replicas.push(Keyward::start(site, &config).await);
        }
        for round in 0..6_u64 {
            let condition = round.to_string();
            let attempts = replicas.iter().enumerate().map(async |(at, keyward)| {
                let text = format!("# of replica {at}\n{}", document(round + 1));
                let file = keyward.site().write("next.toml", &text);
                let file = file.to_str().expect("a path");
                let (code, said) =
                    command(keyward, &["policy", "apply", file, "--if-generation", &condition]).await;
                (code, said, text)
            });
            let ended = join_all(attempts).await;
            let winners: Vec<_> = ended.iter().filter(|(code, ..)| *code == Some(0)).collect();
            let losers = ended.iter().filter(|(code, said, _)| {
                *code == Some(1) && (said.contains("at the same time") || said.contains("is current, not"))
            });
            assert_eq!((winners.len(), losers.count()), (1, 1), "{ended:?}");
            for keyward in &replicas {
                in_force(keyward, round + 1).await;
                assert_eq!(shown(keyward).await, winners[0].2);
            }
        }
        let file = replicas[0].site().write("next.toml", &document(9));
        let (code, said) = command(&replicas[1], &["policy", "diff", file.to_str().expect("a path")]).await;
        assert!(
            code == Some(1) && said.contains("+   allow { actions = [\"read\"], key = \"/generation/9\" }"),
            "{said}"
        );
        let (code, said) = command(&replicas[1], &["policy", "rollback", "2"]).await;
        assert_eq!(code, Some(0), "{said}");
        in_force(&replicas[0], 7).await;
        let (_, second) = command(&replicas[0], &["policy", "show", "2"]).await;
        assert_eq!(shown(&replicas[0]).await, second);
        println!("{version}: six rounds of two applies, one winner each");
    }
}

#[tokio::test]
async fn the_last_good_generation_stays_whatever_becomes_of_the_keys() {
    for version in versions() {
        let cluster = Cluster::start(&version, Options::default()).await;
        let site = Site::new();
        let config = site.in_front_of(&cluster) + LINES;
        let keyward = Keyward::start(site, &config).await;
        apply_patiently(&keyward, 1).await;
        apply_patiently(&keyward, 2).await;
        let ctl = cluster.ctl();
        let current = format!("{PREFIX}current");
        let pointer = ctl.ok(&["get", "--print-value-only", &current]).await.trim().to_owned();
        let caller = Caller::anybody(keyward.site().listen).await;
        let faults = async |fault: &str| {
            keyward.metric("keyward_policy_store_faults_total", &[("fault", fault)]).await
        };
        let damages: [(&str, &[&str]); 5] = [
            ("pointer_unreadable", &["put", &current, "garbage"]),
            ("went_back", &["put", &current, r#"{"generation":1,"sha256":"00"}"#]),
            ("replaced", &["put", &current, r#"{"generation":2,"sha256":"00"}"#]),
            ("document_missing", &["put", &current, r#"{"generation":3,"sha256":"00"}"#]),
            ("pointer_missing", &["del", "--prefix", PREFIX]),
        ];
        for (fault, arguments) in damages {
            ctl.ok(arguments).await;
            wait::until(LIMIT, fault, async || (faults(fault).await >= 1.0).then_some(())).await;
            assert_eq!(shown(&keyward).await, document(2));
            assert_eq!(read(&caller, &["/generation/2"]).await, Code::Ok);
            assert_eq!(read(&caller, &["/generation/3"]).await, Code::PermissionDenied);
            let (code, said) = command(&keyward, &["doctor"]).await;
            assert!(code == Some(2) && said.contains("policy_faulty"), "{said}");
        }
        // With the keys gone, an operator stores the next generation, and with an old pointer too.
        let file = keyward.site().write("next.toml", &document(3));
        done(&keyward, &["policy", "apply", file.to_str().expect("a path")]).await;
        in_force(&keyward, 3).await;
        ctl.ok(&["put", &current, &pointer]).await;
        wait::until(LIMIT, "went back", async || (faults("went_back").await >= 2.0).then_some(())).await;
        let file = keyward.site().write("next.toml", &document(4));
        done(&keyward, &["policy", "apply", file.to_str().expect("a path")]).await;
        in_force(&keyward, 4).await;
        assert_eq!(shown(&keyward).await, document(4));

        // No client reaches the keys, whatever its role.
        let (code, said) = command(
            &keyward,
            &["grant", "listener:main", "everything", "--for", "10m", "--reason", "a test"],
        )
        .await;
        assert_eq!(code, Some(0), "{said}");
        assert_eq!(read(&caller, &["/other"]).await, Code::Ok);
        assert_eq!(read(&caller, &[&current]).await, Code::PermissionDenied);
        assert_eq!(
            caller.put(&current, Vec::new(), 0).await.map_err(|status| status.code()),
            Err(Code::PermissionDenied)
        );
        // A fault in a document is told before anything is stored.
        let file =
            keyward.site().write("next.toml", "[[binding]]\npeer = 'listener:main'\nroles = ['nobody']\n");
        let (code, said) = command(&keyward, &["policy", "apply", file.to_str().expect("a path")]).await;
        assert!(code == Some(1) && said.contains("is the name of no role"), "{said}");
        println!("{version}: five damages survived");
    }
}

/// A watch that has been created.
async fn watch(caller: &Caller, key: &str) -> Result<Streaming<WatchResponse>, tonic::Status> {
    let create = WatchCreateRequest { key: key.to_owned().into(), ..WatchCreateRequest::default() };
    let create = WatchRequest { request_union: Some(RequestUnion::CreateRequest(create)) };
    let asked =
        futures_util::StreamExt::chain(futures_util::stream::iter([create]), futures_util::stream::pending());
    let stream = WatchClient::new(caller.channel.clone()).watch(caller.request(asked)).await;
    Ok(stream?.into_inner())
}

#[tokio::test(flavor = "local")]
async fn a_grant_ends_under_an_open_watch_while_etcd_is_away() {
    for version in versions() {
        let tasks = Tasks::default();
        let auth = Auth::On { extra_users: 0 };
        let (cluster, relay) = one_member_behind_a_relay(&version, auth, &tasks).await;
        let site = Site::new();
        let config = direct(&site, &cluster) + LINES + "audit.file = \"audit.log\"\n";
        let near = Keyward::start(site, &config).await;
        let site = Site::new();
        // The streams wait for etcd for longer than the grant lasts.
        let config = site.in_front_of(&cluster) + "cluster.unreachable_timeout = \"2m\"\n" + LINES;
        let far = Keyward::start(site, &config).await;
        apply_patiently(&near, 1).await;
        in_force(&far, 1).await;
        let alice = Caller::log_in(far.site().listen, "alice").await;
        assert_eq!(read(&alice, &["/a/k"]).await, Code::PermissionDenied);

        let seconds = 12;
        let duration = format!("{seconds}s");
        let began = Instant::now();
        let given = ["grant", "password:alice", "everything", "--for", &duration, "--reason", "incident 7"];
        done(&near, &given).await;
        let granted = async || (read(&alice, &["/a/k"]).await == Code::Ok).then_some(());
        wait::until(LIMIT, "the grant is in force on the other replica", granted).await;
        println!("{version}: in force on the other replica {:?} after the command began", began.elapsed());
        let (_, said) = command(&far, &["grants"]).await;
        assert!(said.contains("password:alice  everything  incident 7"), "{said}");
        let mut stream = watch(&alice, "/a/k").await.expect("granted");
        assert!(stream.message().await.expect("granted").expect("created").created);

        cut(&relay);
        let ending = async {
            loop {
                match stream.message().await {
                    Ok(Some(message)) if message.canceled => return message.cancel_reason,
                    Ok(Some(_)) => {}
                    Ok(None) => return "ended".to_owned(),
                    Err(status) => return status.message().to_owned(),
                }
            }
        };
        let reason =
            tokio::time::timeout(Duration::from_secs(seconds) + LIMIT, ending).await.expect("it ends");
        assert!(reason.contains("permission denied"), "{reason}");
        assert!(began.elapsed() >= Duration::from_secs(seconds), "not before its end: {:?}", began.elapsed());
        println!("{version}: a grant for {seconds} s ended after {:?}: {reason}", began.elapsed());
        assert_eq!(read(&alice, &["/a/k"]).await, Code::PermissionDenied);
        let (_, said) = command(&far, &["grants"]).await;
        assert!(!said.contains("alice"), "{said}");

        // Taken back before its end; both are in the audit log, with the reason and who gave it.
        done(&near, &given).await;
        done(&near, &["ungrant", "password:alice", "everything"]).await;
        let (code, said) = command(&near, &["ungrant", "password:alice", "everything"]).await;
        assert!(code == Some(1) && said.contains("there is no such grant"), "{said}");
        let audited = async || {
            let text = fs::read_to_string(near.site().file("audit.log")).ok()?;
            let has =
                |command: &str| text.lines().any(|line| line.contains(command) && line.contains("\"uid\":"));
            (has("\"command\":\"grant\"")
                && has("\"command\":\"ungrant\"")
                && has("\"command\":\"policy_apply\",\"target\":\"1\"")
                && text.contains("incident 7"))
            .then_some(())
        };
        wait::until(LIMIT, "the audit log has the grants", audited).await;
    }
}

/// Two tenants of one role, whose grants and denials have variables. The configuration has another policy, or none.
#[tokio::test]
async fn the_variables_of_a_stored_policy_are_each_tenants_own() {
    let version = versions().remove(0);
    let options = Options { auth: Auth::On { extra_users: 1 }, ..Options::default() };
    let cluster = Cluster::start(&version, options).await;
    // At etcd both may do everything: only Keyward parts them.
    for user in ["alice", "u00"] {
        cluster.ctl_as_root().ok(&["user", "grant-role", user, "root"]).await;
    }
    let policy = "[[role]]\nname = 'team'\n\
                  allow = [{ actions = ['read', 'write'], prefix = '/teams/{etcd_user}/' }]\n\
                  deny = [{ actions = ['read'], key = '/teams/{user}/frozen' }]\n\
                  [[binding]]\npeer = 'password:*'\nroles = ['team']\n";
    let configured =
        "[[role]]\nname = 'other'\nallow = [{ actions = ['read'], prefix = '/x/{claim.groups}/' }]\n";
    for file in [None, Some(""), Some(configured), Some(policy)] {
        let site = Site::new();
        let mut lines = LINES.to_owned();
        if let Some(text) = file {
            let file = site.write("policy.toml", text);
            lines = lines.replace("etcd_prefix =", &format!("file = {file:?}, etcd_prefix ="));
        }
        let config = site.in_front_of(&cluster) + &lines;
        let keyward = Keyward::start(site, &config).await;
        let stored = keyward.site().write("next.toml", policy);
        done(&keyward, &["policy", "apply", stored.to_str().expect("a path")]).await;
        let mut callers = Vec::new();
        for user in ["alice", "u00"] {
            callers.push((user, Caller::log_in(keyward.site().listen, user).await));
        }
        for round in 0..2 {
            for (user, caller) in &callers {
                for owner in ["alice", "u00"] {
                    let own = *user == owner;
                    let what = format!("{user} and the keys of {owner}, round {round}, configured: {file:?}");
                    let read_code = read(caller, &[&format!("/teams/{owner}/k")]).await;
                    assert_eq!(
                        read_code,
                        if own { Code::Ok } else { Code::PermissionDenied },
                        "read: {what}"
                    );
                    let put = caller.put(&format!("/teams/{owner}/k"), Vec::new(), 0).await;
                    assert_eq!(put.is_ok(), own, "write: {what}: {put:?}");
                    let frozen = read(caller, &[&format!("/teams/{owner}/frozen")]).await;
                    assert_eq!(frozen, Code::PermissionDenied, "denied: {what}");
                }
            }
        }
    }
}

/// A call is judged by the policy in force on the running replica, with its grants; without a replica never by an empty policy.
#[tokio::test]
async fn calls_are_explained_by_the_policy_in_force_or_not_at_all() {
    let version = versions().remove(0);
    let cluster = Cluster::start(&version, Options::default()).await;
    let site = Site::new();
    let config = site.in_front_of(&cluster) + LINES;
    let keyward = Keyward::start(site, &config).await;
    let explain = ["policy", "explain", "listener:main"];
    let reading = [&explain[..], &["Range", "/only/a"]].concat();
    let (code, said) = command(&keyward, &reading).await;
    assert!(code == Some(1) && said.contains("the configuration's, in force"), "nothing was applied: {said}");

    apply_patiently(&keyward, 2).await;
    let (code, said) = command(&keyward, &reading).await;
    assert!(code == Some(0) && said.contains("generation 1, in force on the running replica"), "{said}");
    assert!(said.contains("mode     enforce") && said.contains("allowed by only.allow[0]"), "{said}");
    let write = [&explain[..], &["Put", "/x"]].concat();
    assert_eq!(command(&keyward, &write).await.0, Some(1));
    let grant = ["grant", "listener:main", "everything", "--for", "1h", "--reason", "incident 9"];
    let said = done(&keyward, &grant).await;
    assert!(said.contains("is the name right?"), "nobody has come yet: {said}");
    let caller = Caller::anybody(keyward.site().listen).await;
    assert_eq!(read(&caller, &["/x"]).await, Code::Ok);
    let said = done(&keyward, &grant).await;
    assert!(!said.contains("is the name right?"), "{said}");
    let (code, said) = command(&keyward, &write).await;
    assert!(code == Some(0) && said.contains("allowed by everything.allow[0]"), "{said}");

    let table = "[[test]]\npeer = 'listener:main'\nmethod = 'Put'\nkey = '/x'\nexpect = 'allow'\n";
    let file = keyward.site().write("table.toml", table);
    let test = ["policy", "test", file.to_str().expect("a path")];
    let (code, said) = command(&keyward, &test).await;
    assert!(code == Some(0) && said.contains("1 calls: all as expected"), "{said}");

    let program = keyward.program().to_owned();
    let (_, site) = keyward.terminate().await;
    for arguments in [&reading[..], &write[..], &test[..]] {
        let mut command = tokio::process::Command::new(&program);
        let run = command.args(arguments).arg("--config").arg(site.file("keyward.toml")).output();
        let output = run.await.expect("keyward runs");
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(64), "{arguments:?}: {said}");
        assert!(output.stdout.is_empty() && said.contains("policy.etcd_prefix"), "{arguments:?}: {said}");
    }
}
