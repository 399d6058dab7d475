//! Who guesses passwords learns nothing from when and what he is told, and keeps nobody else out.

use std::cell::RefCell;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures_util::future::join_all;
use keyward::credentials::LoginProof;
use keyward::downstream::session::{RevocationChange, Revocations};
use keyward::members::membership::AuthSetting;
use keyward::pb::etcdserverpb::AuthenticateRequest;
use keyward::secret::Secret;
use keyward::tasks::Tasks;
use keyward::telemetry::single_label::one;
use keyward::users::{self, Cost};
use prost::Message as _;
use tokio::time::{Instant, sleep};

use crate::client::Client;
use crate::member::Member;
use crate::rig::{Keyward, paused, settled};
use crate::wire::End;
use crate::words::{RANGE, ranged};

const FAILED: &str = "etcdserver: authentication failed, invalid user ID or password";
const TOO_MANY: &str = "etcdserver: too many requests";
const ADMITTED: &str = "admitted";
const BCRYPT: Duration = Duration::from_millis(100);
/// Names that one address tries at once.
const NAMES: usize = 5_000;

/// What a login is told, and after what time.
type Told = (String, Duration);

async fn log_in(client: &Client, user: &str, password: &str) -> Told {
    let begun = Instant::now();
    let login = AuthenticateRequest { name: user.into(), password: password.into() };
    let outcome = client.call("/etcdserverpb.Auth/Authenticate", login.encode_to_vec()).await;
    let text = match outcome.end {
        End::Status(status, _) if status.is_ok() => ADMITTED.into(),
        End::Status(status, _) => status.message.into_owned(),
        other => format!("{other:?}"),
    };
    (text, begun.elapsed())
}

async fn from(keyward: &Keyward, address: &str) -> Client {
    let address: SocketAddr = format!("{address}:50000").parse().expect("an address");
    Client::over(keyward.connect_to(0, Some(address)), &keyward.tasks).await
}

/// The users file knows alice; etcd knows everybody.
fn with_file(member: &Member) -> Keyward {
    let hash = users::hash(&Secret::new("mine".to_owned()), Cost { memory: 8, passes: 1 }).expect("hashed");
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), format!("alice:{hash}\n")).expect("written");
    let config = format!("[login]\nsources = [\"file\", \"etcd\"]\nusers_file = {:?}\n", file.path());
    Keyward::configured(&[member], AuthSetting::On, &config)
}

#[test]
fn the_same_wrong_password_again_does_not_tell_who_stands_in_the_users_file() {
    paused(async {
        let mut all = Vec::new();
        for user in ["alice", "bob"] {
            let member = Member::new(1, &Tasks::default());
            let keyward = with_file(&member);
            let client = keyward.client().await;
            let mut told = Vec::new();
            for pause in [0, 100, 1500, 100, 3000, 20_000, 40_000] {
                sleep(Duration::from_millis(pause)).await;
                told.push(log_in(&client, user, "wrong").await);
            }
            for n in 0..10 {
                told.push(log_in(&client, user, &format!("wrong{n}")).await);
                told.push(log_in(&client, user, &format!("wrong{n}")).await);
            }
            assert!(told.iter().any(|(text, _)| text == TOO_MANY), "{told:?}");
            all.push(told);
        }
        assert_eq!(all[0], all[1]);
    });
}

/// When five wrong passwords at once for one name are answered, where a check at etcd takes so long.
async fn five_at_once(bcrypt: Duration) -> Vec<Told> {
    let member = Member::new(1, &Tasks::default());
    let keyward = Keyward::with_auth(&[&member]);
    member.takes_for_a_login(bcrypt);
    let client = from(&keyward, "10.0.0.1").await;
    let mut told = join_all((0..5).map(async |n| log_in(&client, "alice", &format!("wrong{n}")).await)).await;
    told.sort();
    told
}

#[test]
fn five_guesses_at_once_are_answered_when_nobodys_are_however_slow_a_check_is() {
    paused(async {
        let unknown = five_at_once(Duration::ZERO).await;
        assert!(unknown.iter().all(|(text, _)| text == FAILED), "{unknown:?}");
        for millis in [1, 60, 100, 140, 180, 220, 260, 300, 400, 600] {
            assert_eq!(five_at_once(Duration::from_millis(millis)).await, unknown, "{millis} ms");
        }
    });
}

/// How an address is answered past its limit: for a user who has logged in there, and for one whom nobody knows.
async fn past_the_limit(bcrypt: Duration) -> [Vec<Told>; 2] {
    let member = Member::new(1, &Tasks::default());
    let limits = "[login]\nfailures_per_address = 10\nfailures_per_user = 10\n";
    let keyward = Keyward::configured(&[&member], AuthSetting::On, limits);
    member.takes_for_a_login(bcrypt);
    let client = from(&keyward, "10.0.0.1").await;
    assert_eq!(log_in(&client, "alice", "right").await.0, ADMITTED);
    let mut all = [Vec::new(), Vec::new()];
    for (name, told) in ["alice", "nobody"].into_iter().zip(&mut all) {
        let flood = join_all((0..30).map(async |n| log_in(&client, &format!("{name}{n}"), "guess").await));
        let guesses = async {
            settled().await;
            for n in 0..8 {
                told.push(log_in(&client, name, &format!("wrong{n}")).await);
                sleep(Duration::from_millis(100)).await;
            }
        };
        tokio::join!(flood, guesses);
        sleep(Duration::from_secs(60)).await;
    }
    all
}

#[test]
fn past_the_limit_of_an_address_those_who_logged_in_there_are_refused_like_strangers() {
    paused(async {
        for millis in [0, 100, 400, 2000] {
            let [alice, nobody] = past_the_limit(Duration::from_millis(millis)).await;
            assert!(nobody.iter().any(|(text, _)| text == TOO_MANY), "{nobody:?}");
            assert_eq!(alice, nobody, "{millis} ms");
        }
    });
}

#[test]
fn past_the_limit_of_an_address_who_logged_in_there_gets_in_with_a_password_that_is_new() {
    paused(async {
        let member = Member::new(1, &Tasks::default());
        let limits = "[login]\nfailures_per_address = 10\n";
        let keyward = Keyward::configured(&[&member], AuthSetting::On, limits);
        member.takes_for_a_login(BCRYPT);
        let client = from(&keyward, "10.0.0.1").await;
        assert_eq!(log_in(&client, "alice", "right").await.0, ADMITTED);
        member.change_password("new");
        let flood = join_all((0..30).map(async |n| log_in(&client, &format!("other{n}"), "guess").await));
        let others = async {
            settled().await;
            assert_eq!(log_in(&client, "alice", "new").await.0, ADMITTED);
            assert_eq!(log_in(&client, "carol", "new").await.0, TOO_MANY, "who never logged in from there");
        };
        tokio::join!(flood, others);
    });
}

/// Each of so many passwords at once, from six addresses, in the order of being told.
async fn sixteen_at_once(bcrypt: Duration) -> (Vec<Told>, Told) {
    let member = Member::new(1, &Tasks::default());
    let keyward = Keyward::with_auth(&[&member]);
    member.takes_for_a_login(bcrypt);
    let mut addresses = Vec::new();
    for n in 1..=6 {
        addresses.push(from(&keyward, &format!("10.0.0.{n}")).await);
    }
    let told = RefCell::new(Vec::new());
    let guesses = join_all((0..16).map(async |n| {
        // One after the other: the order in which simultaneous logins come to Keyward's line is open.
        sleep(Duration::from_millis(n as u64)).await;
        let ended = log_in(&addresses[n % 6], "alice", &format!("wrong{n}")).await;
        told.borrow_mut().push(ended);
    }));
    let home = from(&keyward, "10.0.1.1").await;
    let right = async {
        sleep(Duration::from_millis(16)).await;
        log_in(&home, "bob", "right").await
    };
    let (_, right) = tokio::join!(guesses, right);
    assert_eq!(member.logins(), 17);
    (told.into_inner(), right)
}

#[test]
fn a_line_of_guesses_is_told_when_it_would_be_if_nobody_had_to_be_asked() {
    paused(async {
        // etcd has no user of that name, and is done at once; or it has.
        let (unknown, _) = sixteen_at_once(Duration::ZERO).await;
        let (known, right) = sixteen_at_once(BCRYPT).await;
        assert!(known.iter().all(|(text, _)| text == FAILED), "{known:?}");
        assert_eq!(unknown, known);
        assert_eq!(right.0, ADMITTED);
        assert!(right.1 < Duration::from_secs(2), "who is right waits for etcd alone: {right:?}");
    });
}

async fn all_names_of(keyward: &Keyward, address: &str) -> Vec<Told> {
    let (first, second) = (from(keyward, address).await, from(keyward, address).await);
    let tries = (0..NAMES).map(async |n| {
        let client = if n % 2 == 0 { &first } else { &second };
        log_in(client, &format!("user{n}"), "guess").await
    });
    join_all(tries).await
}

/// What somebody at another address, and sessions, notice of it; what the attacker is told.
async fn beside_an_attacker(lines: &str) -> (Keyward, Member, Vec<Told>) {
    let member = Member::new(1, &Tasks::default());
    let keyward = Keyward::configured(&[&member], AuthSetting::On, lines);
    member.takes_for_a_login(Duration::from_millis(50));
    let (known, new) = (from(&keyward, "10.0.1.1").await, from(&keyward, "10.0.1.2").await);
    assert_eq!(log_in(&known, "alice", "right").await.0, ADMITTED);
    let carol = crate::logins::session("carol", "right");
    let attack = all_names_of(&keyward, "10.0.0.1");
    let others = async {
        settled().await;
        assert_eq!(log_in(&known, "alice", "right").await.0, ADMITTED, "a password that is known");
        let begun = Instant::now();
        assert_eq!(keyward.logins.prove_again(&carol).await, Ok(LoginProof::Etcd), "a session");
        assert_eq!(log_in(&new, "bob", "right").await.0, ADMITTED, "who comes from elsewhere");
        assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    };
    let (told, ()) = tokio::join!(attack, others);
    assert!(told.iter().all(|(text, _)| text != ADMITTED));
    (keyward, member, told)
}

fn count(told: &[Told], text: &str) -> usize {
    told.iter().filter(|told| told.0 == text).count()
}

#[test]
fn an_attacker_with_one_address_and_thousands_of_names_keeps_nobody_else_out() {
    paused(async {
        let (keyward, member, told) = beside_an_attacker("").await;
        assert_eq!(count(&told, TOO_MANY), NAMES - 300, "as many as failures_per_address");
        assert!(member.logins() <= 300 + 3, "{}", member.logins());
        let limited = keyward.metrics.logins.get_or_create(&one("result", "limited")).get();
        assert_eq!(limited, 4700);
    });
}

#[test]
fn where_nothing_is_counted_one_address_still_does_not_take_every_place() {
    paused(async {
        let none =
            "[login]\nfailures_per_address = 0\nfailures_per_user = 0\nfailures_per_user_and_address = 0\n";
        let (_keyward, _member, told) = beside_an_attacker(none).await;
        assert_eq!(count(&told, TOO_MANY), NAMES - 512);
    });
}

/// What a user who is blocked is told, whose right password was known before.
async fn blocked(password: &str) -> Vec<Told> {
    let member = Member::new(1, &Tasks::default());
    let keyward = Keyward::with_auth(&[&member]);
    member.takes_for_a_login(BCRYPT);
    let client = from(&keyward, "10.0.0.1").await;
    assert_eq!(log_in(&client, "alice", "right").await.0, ADMITTED);
    let known = Revocations::default();
    let block = |change: &RevocationChange| {
        let more = known.with(known.entry(change, SystemTime::now())).expect("there is room");
        keyward.sealer.apply_revocations(Some(&Arc::new(more)));
    };
    block(&RevocationChange::Block("alice".into()));
    let mut told = Vec::new();
    for pause in [0, 100, 1500, 5000] {
        sleep(Duration::from_millis(pause)).await;
        told.push(log_in(&client, "alice", password).await);
    }
    for n in 0..5 {
        told.push(log_in(&client, "alice", &format!("other{n}")).await);
    }
    told.push(log_in(&client, "alice", password).await);
    assert_eq!(member.logins(), 1, "nobody is asked about a password that opens nothing");
    keyward.sealer.apply_revocations(Some(&Arc::new(Revocations::default())));
    let looked_at = async { member.called(RANGE).await.reply(&ranged(1)).await };
    let (after, ()) = tokio::join!(log_in(&client, "alice", "right"), looked_at);
    assert_eq!(after.0, ADMITTED, "what was said then is not remembered");
    told
}

#[test]
fn of_a_user_who_is_blocked_the_right_password_is_told_like_any_other() {
    paused(async {
        let told = blocked("right").await;
        assert!(told.iter().any(|(text, _)| text == TOO_MANY), "{told:?}");
        assert_eq!(told[0], (FAILED.to_owned(), Duration::from_secs(1)));
        assert_eq!(told, blocked("wrong").await);
    });
}
