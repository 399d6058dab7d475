//! Must show 4 of the logins: a burst of them costs etcd one bcrypt a user, a changed password is noticed and harms nobody else, wrong
//! ones are limited and told apart. And the users file beside etcd, and logins from before auth was turned on.

use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use keyward::pb::etcdserverpb::{AuthenticateRequest, AuthenticateResponse, PutRequest};
use keyward::secret::Secret;
use keyward::users::{self, Cost};
use prost::Message;

use crate::harness::binary::full;
use crate::harness::client::lifetime;
use crate::harness::keyward::{ALL_CALLS, Keyward, NOBODY_IN_FILE, Site};
use crate::harness::{Auth, Cluster, Options, Tls, newest, password, setup, versions, wait};
use crate::raw::{Call, Endpoint};

const USERS: usize = 50;
const LOGINS: usize = 1000;
/// Within which a password that was changed at etcd is refused.
const NOTICED: Duration = Duration::from_secs(2);
const SOON: Duration = Duration::from_secs(30);
const ADMITTED: &str = "admitted";
const FAILED: &str = "etcdserver: authentication failed, invalid user ID or password";
const TOO_MANY: &str = "etcdserver: too many requests";
const TIMED_OUT: &str = "etcdserver: request timed out";
const INVALID: &str = "etcdserver: invalid auth token";

/// Its token, or the text with which it was refused.
async fn log_in(endpoint: &Endpoint, user: &str, password: &str) -> Result<String, String> {
    let request = AuthenticateRequest { name: user.into(), password: password.into() };
    let call = Call::unary("/etcdserverpb.Auth/Authenticate", &request.encode_to_vec());
    let answer = endpoint.call(&call).await;
    match (answer.code(), answer.messages().into_iter().next()) {
        (Some(0), Some(message)) => Ok(AuthenticateResponse::decode(message).expect("an answer").token),
        _ => Err(answer.message()),
    }
}

async fn put(endpoint: &Endpoint, token: &str, key: &str) -> String {
    let request = PutRequest { key: key.to_owned().into(), value: "x".into(), ..PutRequest::default() };
    let call = Call::unary("/etcdserverpb.KV/Put", &request.encode_to_vec()).with("token", token);
    let answer = endpoint.call(&call).await;
    if answer.code() == Some(0) { ADMITTED.into() } else { answer.message() }
}

fn told(outcome: &Result<String, String>) -> &str {
    outcome.as_ref().map_or_else(String::as_str, |_token| ADMITTED)
}

/// Passwords of which etcd has said whether they are right, over all members. One that it could not, as on a machine that is too
/// slow for its own limits, is asked about again.
async fn checks(cluster: &Cluster) -> f64 {
    let codes = ["OK", "InvalidArgument"].map(|code| [("grpc_method", "Authenticate"), ("grpc_code", code)]);
    let mut all = 0.0;
    for i in 0..cluster.len() {
        for code in &codes {
            all += cluster.counter(i, "grpc_server_handled_total", code).await;
        }
    }
    all
}

async fn counted(keyward: &Keyward, result: &str) -> f64 {
    keyward.metric("keyward_logins_total", &[("result", result)]).await
}

fn user(n: usize) -> String {
    format!("u{:02}", n % USERS)
}

/// All at once, each on a connection of its own. Where a machine is too slow for all of these bcrypts in etcd's own 7 s, a client
/// is told so and tries again, as clients do: the login that was begun for it goes on.
async fn burst(endpoint: &Endpoint) -> Vec<Result<String, String>> {
    let logins = (0..LOGINS).map(|n| {
        let (endpoint, user) = (endpoint.clone(), user(n));
        async move {
            let answer = async || {
                let outcome = log_in(&endpoint, &user, &password(&user)).await;
                (told(&outcome) != TIMED_OUT).then_some(outcome)
            };
            wait::until(SOON * 4, "a login is answered", answer).await
        }
    });
    join_all(logins).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_burst_costs_one_bcrypt_a_user_and_a_changed_password_is_noticed_by_nobody_else() {
    for version in versions() {
        let options = Options {
            members: 3,
            auth: Auth::On { extra_users: USERS },
            // What is counted is the same at any cost; 10 is etcd's own default.
            bcrypt_cost: if full() { 10 } else { 4 },
            timing: Some((250, 2500)),
            ..Options::default()
        };
        let cluster = Cluster::start(&version, options).await;
        let site = Site::new();
        let config = site.in_front_of(&cluster).replace(ALL_CALLS, "log.access = \"off\"");
        let keyward = Keyward::start(site, &config).await;
        let through = Endpoint::plain(keyward.site().listen);

        let mut costs = Vec::new();
        let mut tokens = Vec::new();
        for number in 1..=2 {
            let (before, begun) = (checks(&cluster).await, Instant::now());
            let outcomes = burst(&through).await;
            let took = begun.elapsed();
            let refused: Vec<_> = outcomes.iter().filter_map(|outcome| outcome.as_ref().err()).collect();
            assert!(refused.is_empty(), "{version}: {refused:?}");
            costs.push(checks(&cluster).await - before);
            println!(
                "{version} burst {number}: {LOGINS} logins of {USERS} users in {took:?}, {} bcrypts",
                costs[number - 1]
            );
            tokens = outcomes.into_iter().flatten().take(USERS).collect();
        }
        assert!(costs[0] <= 50.0 && costs[0] > 0.0, "{version}: {costs:?}");
        assert_eq!(costs[1], 0.0, "{version}");
        assert_eq!(counted(&keyward, "accepted").await + counted(&keyward, "remembered").await, 2000.0);

        one_changes_her_password(&cluster, &keyward, &through, &tokens).await;
        wrong_ones_are_limited(&cluster, &keyward, &through).await;
        assert!(!keyward.log().contains("-secret"), "a password was logged");
    }
}

async fn one_changes_her_password(
    cluster: &Cluster,
    keyward: &Keyward,
    through: &Endpoint,
    tokens: &[String],
) {
    let version = cluster.version();
    let old = password("u07");
    let before = checks(cluster).await;
    let ctl = cluster.ctl_as_root().to(vec![cluster.url(0)]);
    let ended = ctl.run_with(&["user", "passwd", "u07", "--interactive=false"], "new\n").await;
    assert_eq!(ended.code, Some(0), "{version}: {ended:?}");
    let changed = Instant::now();
    let last_admitted = Cell::new(Duration::ZERO);
    let refused = async || match log_in(through, "u07", &old).await {
        Ok(_) => {
            last_admitted.set(changed.elapsed());
            None
        }
        Err(text) => Some(text),
    };
    assert_eq!(wait::until(SOON, "the old password is refused", refused).await, FAILED, "{version}");
    println!(
        "{version}: after the change the old password was admitted until {:?}, refused at {:?}",
        last_admitted.get(),
        changed.elapsed()
    );
    assert!(last_admitted.get() < NOTICED, "{version}");
    assert_eq!(told(&log_in(through, "u07", "new").await), ADMITTED, "{version}");
    let others: Vec<usize> = (0..USERS).filter(|n| *n != 7).collect();
    let again = others.iter().map(async |n| log_in(through, &user(*n), &password(&user(*n))).await);
    let again = join_all(again).await;
    assert!(again.iter().all(Result::is_ok), "{version}: {again:?}");
    // etcdctl's own; her old one, refused; her new one.
    let cost = checks(cluster).await - before;
    println!("{version}: {cost} bcrypts for the change, 1 of them etcdctl's");
    assert_eq!(cost, 3.0, "{version}");
    assert_eq!(counted(keyward, "refused").await, 1.0, "{version}");
    assert_eq!(put(through, &tokens[7], "/u/7").await, INVALID, "{version}: her session of before");
    let wrote = join_all(others.iter().map(async |n| put(through, &tokens[*n], "/u/k").await)).await;
    assert!(wrote.iter().all(|wrote| wrote == ADMITTED), "{version}: {wrote:?}");
}

async fn wrong_ones_are_limited(cluster: &Cluster, keyward: &Keyward, through: &Endpoint) {
    let version = cluster.version();
    let (before, refused) = (checks(cluster).await, counted(keyward, "refused").await);
    let guesses = join_all((0..60).map(|n| {
        let through = through.clone();
        async move { log_in(&through, "u08", &format!("guess-{n}")).await }
    }))
    .await;
    let count = |text: &str| guesses.iter().filter(|guess| told(guess) == text).count();
    assert_eq!((count(FAILED), count(TOO_MANY)), (5, 55), "{version}: {guesses:?}");
    assert_eq!(checks(cluster).await - before, 5.0, "{version}: the others were not checked");
    assert_eq!(counted(keyward, "refused").await - refused, 5.0, "{version}");
    assert_eq!(counted(keyward, "limited").await, 55.0, "{version}");
    for name in ["u08", "u09"] {
        assert_eq!(told(&log_in(through, name, &password(name)).await), ADMITTED, "{version}: {name}");
    }
}

/// Of a bcrypt: 8 takes a quarter of etcd's default, so that two slots of refusals end before a login's patience on a busy machine, too, and is
/// still several times as long as an answer without one.
fn cost_of_a_check() -> u32 {
    if full() { 10 } else { 8 }
}

/// Tries of the comparison, an even number: each of the two is first as often as the other.
const TRIES: usize = 6;

/// How much longer a wrong password takes than a user whom nobody knows. Each try makes both at the same time, so that a busy
/// machine is as slow with both; refusals of one network come one after the other, so that the second waits for the first.
async fn longer_for_a_wrong_password(endpoint: &Endpoint) -> f64 {
    let timed = async |user: &str| {
        let begun = Instant::now();
        assert_eq!(told(&log_in(endpoint, user, "wrong").await), FAILED, "{user}");
        begun.elapsed().as_secs_f64()
    };
    let mut ratios = 1.0;
    for n in 0..TRIES {
        let (known, nobody) = (user(n), format!("nobody-{n}"));
        let (known, nobody) = (Box::pin(timed(&known)), Box::pin(timed(&nobody)));
        let (wrong, unknown) = if n.is_multiple_of(2) {
            tokio::join!(known, nobody)
        } else {
            let (unknown, wrong) = tokio::join!(nobody, known);
            (wrong, unknown)
        };
        ratios *= wrong / unknown;
    }
    ratios.powf(1.0 / TRIES as f64)
}

/// At etcd itself it tells: no bcrypt is made for nobody.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unknown_user_takes_the_time_of_a_wrong_password() {
    for version in versions() {
        let auth = Auth::On { extra_users: TRIES };
        let bcrypt_cost = cost_of_a_check();
        let cluster = Cluster::start(&version, Options { auth, bcrypt_cost, ..Options::default() }).await;
        let site = Site::new();
        let config = site.in_front_of(&cluster);
        let keyward = Keyward::start(site, &config).await;
        let front = Endpoint::plain(keyward.site().listen);
        // By these it learns how long a bcrypt takes here.
        for n in 0..TRIES {
            assert_eq!(told(&log_in(&front, &user(n), &password(&user(n))).await), ADMITTED, "{version}");
        }
        let through = longer_for_a_wrong_password(&front).await;
        let direct = longer_for_a_wrong_password(&Endpoint::plain(cluster.address(0))).await;
        println!(
            "{version}: a wrong password takes {through:.2} times as long as an unknown user, {direct:.1} at etcd"
        );
        assert!((0.4..3.0).contains(&through), "{version}: it tells by {through} whether a user exists");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_login_from_before_auth_was_on_is_worth_what_its_password_is() {
    for version in versions() {
        let cluster = Cluster::start(&version, Options::default()).await;
        let site = Site::new();
        let config = site.in_front_of(&cluster);
        let keyward = Keyward::start(site, &config).await;
        let through = Endpoint::plain(keyward.site().listen);
        let right = log_in(&through, "alice", &password("alice")).await.expect("auth is off");
        let wrong = log_in(&through, "alice", "wrong").await.expect("auth is off");
        let nobody = log_in(&through, "nobody", "x").await.expect("auth is off");
        let root = log_in(&through, "root", "guessed").await.expect("auth is off");
        for token in [&right, &wrong, &nobody, &root] {
            assert_eq!(put(&through, token, "/a/off").await, ADMITTED, "{version}");
        }
        assert_eq!(counted(&keyward, "unproved").await, 4.0);

        Box::pin(setup::auth(&cluster, 0)).await;
        let puts = async || cluster.counter(0, "etcd_mvcc_put_total", &[]).await;
        let before = puts().await;
        for token in [&wrong, &nobody, &root] {
            assert_eq!(put(&through, token, "/a/on").await, INVALID, "{version}");
        }
        assert_eq!(puts().await, before, "{version}: something was written");
        assert_eq!(put(&through, &right, "/a/on").await, ADMITTED, "{version}: its password verifies");
        assert_eq!(told(&log_in(&through, "alice", "wrong").await), FAILED, "{version}");
        assert!(!keyward.log().contains("panicked"));
    }
}

fn line(user: &str, password: &str) -> String {
    let hash = users::hash(&Secret::new(password.to_owned()), Cost::DEFAULT).expect("hashed");
    format!("{user}:{hash}\n")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn accounts_move_into_the_file_one_by_one_and_a_bad_line_changes_nothing() {
    let version = newest("3.6");
    let cluster =
        Cluster::start(&version, Options { auth: Auth::On { extra_users: 0 }, ..Options::default() }).await;
    let site = Site::new();
    let users = site.write("users", &line("alice", "hers-in-the-file"));
    let login = format!("login.sources = [\"file\", \"etcd\"]\nlogin.users_file = {users:?}\n");
    let config = site.in_front_of(&cluster) + &login;
    let keyward = Keyward::start(site, &config).await;
    let through = Endpoint::plain(keyward.site().listen);
    let as_told = async |user: &str, password: &str| told(&log_in(&through, user, password).await).to_owned();
    let before = checks(&cluster).await;
    assert_eq!(as_told("alice", "hers-in-the-file").await, ADMITTED);
    assert_eq!(as_told("alice", &password("alice")).await, FAILED, "what etcd has is of no account");
    assert_eq!(checks(&cluster).await, before);
    assert_eq!(as_told("bob", &password("bob")).await, ADMITTED);
    assert_eq!(checks(&cluster).await, before + 1.0);

    let both = line("alice", "hers-in-the-file") + &line("bob", "his-in-the-file");
    keyward.site().write("users", &format!("{both}carol:$argon2id$hunter2\n"));
    keyward.reload(&config);
    let named = async || keyward.log().contains("users: line 3: ").then_some(());
    wait::until(SOON, "the bad line is named", named).await;
    assert_eq!(as_told("bob", &password("bob")).await, ADMITTED, "the old file stays");
    keyward.site().write("users", &both);
    keyward.reload(&config);
    wait::until(SOON, "bob is the file's", async || {
        (as_told("bob", "his-in-the-file").await == ADMITTED).then_some(())
    })
    .await;
    assert_eq!(as_told("bob", &password("bob")).await, FAILED);
    assert_eq!(as_told("alice", "hers-in-the-file").await, ADMITTED);

    // The file alone, etcd alone, and both again: sources and file change together.
    let other = |sources: &str| config.replace("\"file\", \"etcd\"", sources);
    assert_eq!(as_told("root", &password("root")).await, ADMITTED);
    keyward.reload(&other("\"file\""));
    wait::until(SOON, "etcd is no source", async || {
        (as_told("root", &password("root")).await == FAILED).then_some(())
    })
    .await;
    assert_eq!(as_told("bob", "his-in-the-file").await, ADMITTED);
    keyward.reload(&keyward.site().in_front_of(&cluster));
    wait::until(SOON, "bob is etcd's", async || {
        (as_told("bob", &password("bob")).await == ADMITTED).then_some(())
    })
    .await;
    assert_eq!(as_told("alice", "hers-in-the-file").await, FAILED);
    keyward.reload(&config);
    wait::until(SOON, "bob is the file's again", async || {
        (as_told("bob", "his-in-the-file").await == ADMITTED).then_some(())
    })
    .await;
    let log = keyward.log();
    assert!(!log.contains("$argon2id") && !log.contains("hunter2") && !log.contains("in-the-file"), "{log}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_file_decides_about_whom_etcd_has_without_a_password() {
    for version in versions() {
        let options = Options { auth: Auth::On { extra_users: 0 }, ..Options::default() };
        let cluster = Cluster::start(&version, options).await;
        cluster.ctl_as_root().ok(&["user", "add", "carol", "--no-password"]).await;
        let site = Site::new();
        let lines = line("alice", "hers-in-the-file") + &line("carol", "carols-in-the-file");
        let users = site.write("users", &lines);
        let login = format!("login.sources = [\"etcd\", \"file\"]\nlogin.users_file = {users:?}\n");
        let config = site.in_front_of(&cluster) + &login;
        let keyward = Keyward::start(site, &config).await;
        let through = Endpoint::plain(keyward.site().listen);
        let as_told =
            async |user: &str, password: &str| told(&log_in(&through, user, password).await).to_owned();
        assert_eq!(as_told("carol", "carols-in-the-file").await, ADMITTED, "{version}");
        assert_eq!(as_told("carol", "wrong").await, FAILED, "{version}");
        assert_eq!(as_told("alice", "hers-in-the-file").await, FAILED, "{version}: etcd has one of hers");
        assert_eq!(as_told("alice", &password("alice")).await, ADMITTED, "{version}");
        // `user passwd` would change nothing: etcd keeps that she has none.
        cluster.ctl_as_root().ok(&["user", "delete", "carol"]).await;
        cluster.ctl_as_root().ok(&["user", "add", "carol:etcds"]).await;
        let noticed = async || (as_told("carol", "carols-in-the-file").await == FAILED).then_some(());
        wait::until(SOON, "etcd has a password of carol's", noticed).await;
        assert_eq!(as_told("carol", "etcds").await, ADMITTED, "{version}");
    }
}

/// In the record of a call.
const FROM_ETCD: &str = "peer=\"password:alice\"";
const FROM_FILE: &str = "peer=\"file:alice\"";

/// What alice's application sees while it writes with the token of its first login, and logs in now and then as more of it start.
#[derive(Default)]
struct Seen {
    done: Cell<usize>,
    errors: RefCell<Vec<String>>,
}

impl Seen {
    async fn goes_on(&self, endpoint: &Endpoint, token: &str) {
        loop {
            let again = log_in(endpoint, "alice", &password("alice")).await;
            let again = again.as_ref().map_or_else(String::as_str, String::as_str);
            for token in [token, again] {
                let wrote = put(endpoint, token, "/a/moves").await;
                if wrote != ADMITTED {
                    self.errors.borrow_mut().push(wrote);
                }
            }
            self.done.set(self.done.get() + 1);
        }
    }

    /// Returns when it has done something more, from beginning to end.
    async fn more(&self) {
        let wanted = self.done.get() + 2;
        wait::until(SOON, "the application goes on", async || (self.done.get() >= wanted).then_some(()))
            .await;
        assert_eq!(*self.errors.borrow(), [""; 0]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_account_moves_from_etcd_into_the_file_while_its_clients_are_on() {
    for version in versions() {
        let options = Options { auth: Auth::On { extra_users: 0 }, tls: Tls::Mutual, ..Options::default() };
        let cluster = Cluster::start(&version, options).await;
        let site = Site::new();
        let users = site.write("users", NOBODY_IN_FILE);
        let pair = cluster.pki().client("alice");
        let config = site.in_front_of(&cluster)
            + &format!("login.sources = [\"file\", \"etcd\"]\nlogin.users_file = {users:?}\n")
            + &format!("[[user]]\nname = \"alice\"\ncert = {:?}\nkey = {:?}\n", pair.cert, pair.key)
            + "[[map]]\npeer = \"file:*\"\nas = \"same\"\n";
        let keyward = Keyward::start(site, &config).await;
        let through = Endpoint::plain(keyward.site().listen);
        let token = log_in(&through, "alice", &password("alice")).await.expect("etcd accepts it");
        let seen = Seen::default();
        let moves = async {
            seen.more().await;
            keyward.site().write("users", &line("alice", &password("alice")));
            keyward.reload(&config);
            let moved = async || {
                let from = keyward.log().len();
                seen.more().await;
                // Also her first session, which etcd has proved.
                let log = keyward.log();
                (log[from..].contains(FROM_FILE) && !log[from..].contains(FROM_ETCD)).then_some(())
            };
            wait::until(SOON, "the account has moved", moved).await;
            let ctl = cluster.ctl_as_root();
            let ended = ctl.run_with(&["user", "passwd", "alice", "--interactive=false"], "another\n").await;
            assert_eq!(ended.code, Some(0), "{version}: {ended:?}");
            seen.more().await;
            // Past the time in which a changed password is noticed.
            lifetime(NOTICED).await;
            seen.more().await;
            assert_eq!(told(&log_in(&through, "alice", "another").await), FAILED, "{version}");
            println!("{version}: alice moved, {} rounds without an error", seen.done.get());
        };
        tokio::select! {
            () = seen.goes_on(&through, &token) => {}
            () = moves => {}
        }
        assert_eq!(*seen.errors.borrow(), [""; 0], "{version}");
        drop(keyward);
    }
}
