//! Logins: what they cost, who decides about them, what a wrong one is told and when.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures_util::future::join_all;
use keyward::config::PasswordSources;
use keyward::credentials::{LoginProof, PasswordRefusal};
use keyward::downstream::session::{Session, SessionPeer, SessionProof};
use keyward::gateway::login::password_sources::LoginDenial;
use keyward::members::membership::AuthSetting;
use keyward::pb::etcdserverpb::{AuthenticateRequest, AuthenticateResponse};
use keyward::refusal::Code;
use keyward::secret::Secret;
use keyward::tasks::Tasks;
use keyward::telemetry::single_label::one;
use keyward::users::{self, Cost, UserPasswordHashes};
use prost::Message as _;
use tokio::time::{Instant, sleep};

use crate::client::{Client, Outcome};
use crate::member::Member;
use crate::rig::{Keyward, NOBODY_IN_FILE, paused, settled};
use crate::wire::End;
use crate::words::{INVALID_TOKEN, KEEP_ALIVE, RANGE, WATCH, range, ranged, renew, watch};

const AUTHENTICATE: &str = "/etcdserverpb.Auth/Authenticate";
const CHEAP: Cost = Cost { memory: 8, passes: 1 };
const FAILED: &str = "etcdserver: authentication failed, invalid user ID or password";
const TOO_MANY: &str = "etcdserver: too many requests";
const SECOND: Duration = Duration::from_secs(1);

fn request(user: &str, password: &str) -> Vec<u8> {
    AuthenticateRequest { name: user.into(), password: password.into() }.encode_to_vec()
}

async fn log_in(client: &Client, user: &str, password: &str) -> Outcome {
    client.call(AUTHENTICATE, request(user, password)).await
}

/// The session token of a login that succeeded.
fn token(outcome: &Outcome) -> String {
    AuthenticateResponse::decode(outcome.message().clone()).expect("an answer").token
}

/// How a login ended, in a word or in etcd's.
fn told(outcome: &Outcome) -> String {
    match &outcome.end {
        End::Status(status, _) if status.is_ok() => "admitted".into(),
        End::Status(status, _) => status.message.clone().into_owned(),
        other => format!("{other:?}"),
    }
}

pub(crate) fn line(user: &str, password: &str) -> String {
    let hash = users::hash(&Secret::new(password.to_owned()), CHEAP).expect("hashed");
    format!("{user}:{hash}\n")
}

/// A Keyward with this order of sources and these lines of a users file.
fn with_file(member: &Member, auth: AuthSetting, sources: &str, lines: &str) -> Keyward {
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), lines).expect("written");
    let config = format!("[login]\nsources = {sources}\nusers_file = {:?}\n", file.path());
    Keyward::configured(&[member], auth, &config)
}

/// One that etcd has accepted, nobody knows when.
pub(crate) fn session(user: &str, password: &str) -> Session {
    let peer = SessionPeer::Password { user: user.into(), password: Secret::new(password.to_owned()) };
    Session::begin(peer, SessionProof::Etcd { auth_revision: 0 }, 0, SystemTime::now()).expect("random bytes")
}

fn counted(keyward: &Keyward, result: &str) -> u64 {
    keyward.metrics.logins.get_or_create(&one("result", result)).get()
}

#[test]
fn many_logins_of_one_user_cost_one_and_it_ends_whoever_leaves() {
    paused(async {
        let member = Member::new(1, &Tasks::default());
        let keyward = Keyward::with_auth(&[&member]);
        let client = keyward.client().await;
        member.takes_for_a_login(Duration::from_millis(50));
        let left = client.begin(AUTHENTICATE, request("alice", "right")).await.expect("it began");
        sleep(Duration::from_millis(10)).await;
        left.cancel();
        sleep(Duration::from_millis(50)).await;
        assert_eq!(told(&log_in(&client, "alice", "right").await), "admitted");
        assert_eq!((member.logins(), counted(&keyward, "remembered")), (1, 1), "it went on");
        let all = join_all((0..100).map(|_| log_in(&client, "alice", "right"))).await;
        assert!(all.iter().all(|outcome| told(outcome) == "admitted"));
        assert_eq!(member.logins(), 1);
        let all = join_all((0..100).map(|_| log_in(&client, "bob", "right"))).await;
        assert!(all.iter().all(|outcome| told(outcome) == "admitted"));
        assert_eq!(member.logins(), 2);
        assert_eq!((counted(&keyward, "accepted"), counted(&keyward, "remembered")), (100, 101));
    });
}

#[test]
fn a_password_that_is_known_is_looked_at_again_and_never_costs_a_bcrypt() {
    paused(async {
        let member = Member::new(1, &Tasks::default());
        let keyward = Keyward::with_auth(&[&member]);
        let client = keyward.client().await;
        assert_eq!(told(&log_in(&client, "alice", "right").await), "admitted");
        for _ in 0..3 {
            sleep(10 * SECOND).await;
            let again = join_all((0..20).map(|_| log_in(&client, "alice", "right")));
            let looked_at = async {
                let call = member.called(RANGE).await;
                assert_eq!(call.token(), Some("alice.1"));
                call.reply(&ranged(1)).await;
            };
            let (all, ()) = tokio::join!(again, looked_at);
            assert!(all.iter().all(|outcome| told(outcome) == "admitted"));
        }
        assert_eq!(member.logins(), 1);
        assert_eq!(counted(&keyward, "remembered"), 60);
    });
}

#[test]
fn a_password_that_was_changed_at_etcd_is_refused_within_a_second() {
    paused(async {
        let member = Member::new(1, &Tasks::default());
        let keyward = Keyward::with_auth(&[&member]);
        let client = keyward.client().await;
        assert_eq!(told(&log_in(&client, "alice", "right").await), "admitted");
        member.change_password("new");
        sleep(SECOND).await;
        let looked_at = async { member.called(RANGE).await.refuse(Code::Unauthenticated, INVALID_TOKEN) };
        let (old, ()) = tokio::join!(log_in(&client, "alice", "right"), looked_at);
        assert_eq!(told(&old), FAILED);
        assert_eq!(told(&log_in(&client, "alice", "new").await), "admitted");
        assert_eq!(told(&log_in(&client, "alice", "right").await), FAILED);
        assert_eq!((counted(&keyward, "refused"), counted(&keyward, "refused_again")), (1, 1));
        assert_eq!(member.logins(), 3, "alice, not alice any more, alice again");
    });
}

#[test]
fn a_member_that_does_not_say_proves_nothing() {
    paused(async {
        let member = Member::new(1, &Tasks::default());
        let keyward = Keyward::with_auth(&[&member]);
        let client = keyward.client().await;
        assert_eq!(told(&log_in(&client, "alice", "right").await), "admitted");
        member.change_password("new");
        sleep(SECOND).await;
        // Nobody answers the look.
        assert_eq!(told(&log_in(&client, "alice", "right").await), FAILED);
    });
}

#[test]
fn wrong_passwords_are_limited_and_right_ones_that_are_known_pass() {
    paused(async {
        let member = Member::new(1, &Tasks::default());
        let keyward = Keyward::with_auth(&[&member]);
        let client = keyward.client().await;
        assert_eq!(told(&log_in(&client, "alice", "right").await), "admitted");
        let guesses =
            join_all((0..50).map(async |n| log_in(&client, "alice", &format!("wrong{n}")).await)).await;
        let guesses: Vec<String> = guesses.iter().map(told).collect();
        let count = |text: &str| guesses.iter().filter(|told| *told == text).count();
        assert_eq!((count(FAILED), count(TOO_MANY)), (5, 45), "{guesses:?}");
        assert_eq!(member.logins(), 1 + 5);
        assert_eq!((counted(&keyward, "refused"), counted(&keyward, "limited")), (5, 45));
        let looked_at = async { member.called(RANGE).await.reply(&ranged(1)).await };
        let (known, ()) = tokio::join!(log_in(&client, "alice", "right"), looked_at);
        assert_eq!(told(&known), "admitted", "known");
        assert_eq!(told(&log_in(&client, "bob", "right").await), "admitted", "another");
        assert_eq!(told(&log_in(&client, "alice", "wrong4").await), FAILED, "known to be wrong");
        assert_eq!(member.logins(), 1 + 5 + 1);
    });
}

#[test]
fn the_file_decides_about_its_own_users_and_etcd_about_all_others() {
    paused(async {
        let member = Member::new(1, &Tasks::default());
        let keyward = with_file(&member, AuthSetting::On, "['file', 'etcd']", &line("alice", "mine"));
        let client = keyward.client().await;
        assert_eq!(told(&log_in(&client, "alice", "mine").await), "admitted");
        assert_eq!(told(&log_in(&client, "alice", "right").await), FAILED, "what etcd would take");
        assert_eq!(member.logins(), 0);
        assert_eq!(told(&log_in(&client, "bob", "right").await), "admitted");
        assert_eq!(told(&log_in(&client, "bob", "mine").await), FAILED);
        assert_eq!(member.logins(), 2);
        for _ in 0..10 {
            assert_eq!(told(&log_in(&client, "alice", "mine").await), "admitted");
        }
        assert_eq!(counted(&keyward, "remembered"), 10);
    });
}

#[test]
fn after_etcd_has_refused_the_file_is_not_asked() {
    paused(async {
        let member = Member::new(1, &Tasks::default());
        let keyward = with_file(&member, AuthSetting::On, "['etcd', 'file']", &line("alice", "mine"));
        let client = keyward.client().await;
        assert_eq!(told(&log_in(&client, "alice", "mine").await), FAILED, "it may be her old one");
        assert_eq!(told(&log_in(&client, "alice", "right").await), "admitted");
        assert_eq!(member.logins(), 2);
    });
}

#[test]
fn of_a_user_without_a_password_at_etcd_the_file_decides() {
    paused(async {
        let member = Member::new(1, &Tasks::default());
        member.has_no_passwords();
        let keyward = with_file(&member, AuthSetting::On, "['etcd', 'file']", &line("alice", "mine"));
        let client = keyward.client().await;
        assert_eq!(told(&log_in(&client, "alice", "mine").await), "admitted");
        assert_eq!(told(&log_in(&client, "alice", "right").await), FAILED);
        for n in 0..40 {
            assert_ne!(told(&log_in(&client, "alice", &format!("wrong{n}")).await), "admitted");
        }
        sleep(2 * SECOND).await;
        assert_eq!(told(&log_in(&client, "alice", "mine").await), "admitted", "known, though guessed at");
        member.change_password("etcd's");
        sleep(120 * SECOND).await;
        assert_eq!(told(&log_in(&client, "alice", "mine").await), FAILED, "etcd has one now");
        member.has_no_passwords();
        let nobody = told(&log_in(&client, "bob", "mine").await);
        assert_eq!(nobody, "auth: authentication failed, password was given for no password user");
    });
}

#[test]
fn while_auth_is_off_the_file_still_decides_and_nothing_else_is_proved() {
    paused(async {
        let member = Member::new(1, &Tasks::default());
        for sources in ["['etcd', 'file']", "['file', 'etcd']", "['file']"] {
            let keyward = with_file(&member, AuthSetting::Off, sources, &line("alice", "mine"));
            let client = keyward.client().await;
            assert_eq!(told(&log_in(&client, "alice", "mine").await), "admitted", "{sources}");
            assert_eq!(told(&log_in(&client, "alice", "other").await), FAILED, "{sources}");
            let other = told(&log_in(&client, "bob", "x").await);
            assert_eq!(other, if sources == "['file']" { FAILED } else { "admitted" }, "{sources}");
            assert_eq!(counted(&keyward, "unproved"), u64::from(sources != "['file']"), "{sources}");
        }
        assert_eq!(member.logins(), 0);
    });
}

#[test]
fn a_refusal_takes_the_same_time_whoever_the_user_is_and_whoever_refused() {
    paused(async {
        let member = Member::new(1, &Tasks::default());
        let keyward = with_file(&member, AuthSetting::On, "['file', 'etcd']", &line("alice", "mine"));
        let client = keyward.client().await;
        let mut times = Vec::new();
        for user in ["alice", "bob", "nobody"] {
            let begun = Instant::now();
            assert_eq!(told(&log_in(&client, user, "wrong").await), FAILED);
            times.push(begun.elapsed());
        }
        assert_eq!(times, [SECOND; 3]);
    });
}

#[test]
fn a_refusal_is_not_later_because_many_logged_in_at_once() {
    paused(async {
        let member = Member::new(1, &Tasks::default());
        let keyward = Keyward::with_auth(&[&member]);
        let client = keyward.client().await;
        member.takes_for_a_login(Duration::from_millis(100));
        // The last of them waits for more than a second for its turn.
        let users: Vec<String> = (0..30).map(|n| format!("user{n}")).collect();
        let all = join_all(users.iter().map(|user| log_in(&client, user, "right"))).await;
        assert!(all.iter().all(|outcome| told(outcome) == "admitted"));
        let begun = Instant::now();
        assert_eq!(told(&log_in(&client, "user0", "wrong").await), FAILED);
        assert_eq!(begun.elapsed(), SECOND);
    });
}

#[test]
fn a_session_of_the_file_ends_with_its_line_and_no_other_does() {
    paused(async {
        let member = Member::new(1, &Tasks::default());
        let bob = line("bob", "his");
        let before = line("alice", "mine") + &bob;
        let keyward = with_file(&member, AuthSetting::On, "['file']", &before);
        let client = keyward.client().await;
        let alices = token(&log_in(&client, "alice", "mine").await);
        let bobs = token(&log_in(&client, "bob", "his").await);
        let alices = keyward.client().await.header("token", &alices);
        let bobs = keyward.client().await.header("token", &bobs);
        let call = async |client: &Client| told(&client.call(RANGE, range("k")).await);
        assert_ne!(call(&alices).await, INVALID_TOKEN);
        let after = line("alice", "other") + &bob;
        keyward.publish_passwords(None, Some(UserPasswordHashes::parse(after.as_bytes()).expect("valid")));
        assert_eq!(call(&alices).await, INVALID_TOKEN);
        assert_ne!(call(&bobs).await, INVALID_TOKEN);
        assert_eq!(told(&log_in(&client, "alice", "mine").await), FAILED);
        assert_eq!(told(&log_in(&client, "bob", "his").await), "admitted");
        assert_eq!(counted(&keyward, "remembered"), 1, "bob's line is the same");
        keyward.publish_passwords(None, Some(UserPasswordHashes::default()));
        assert_eq!(call(&bobs).await, INVALID_TOKEN);
    });
}

/// clientv3 ends a watch on an invalid token, and opens it again, with a login anew, where a server stops.
#[test]
fn a_stream_of_a_line_that_another_replica_has_comes_back_for_a_while() {
    paused(async {
        let member = Member::new(1, &Tasks::default());
        let keyward = with_file(&member, AuthSetting::On, "['file']", &line("alice", "mine"));
        let client = keyward.client().await;
        let alices = token(&log_in(&client, "alice", "mine").await);
        let alices = keyward.client().await.header("token", &alices);
        let before = UserPasswordHashes::parse(line("alice", "other").as_bytes()).expect("valid");
        keyward.publish_passwords(None, Some(before));
        let open = async |path: &'static str, first: Vec<u8>| {
            let refused = alices.call(path, first).await.end;
            let (code, text) = refused.told();
            (code, text.to_owned())
        };
        let stopped = (Code::Unavailable, "etcdserver: server stopped".to_owned());
        let invalid = (Code::Unauthenticated, INVALID_TOKEN.to_owned());
        for second in 0..40 {
            let expected = if second < 30 { &stopped } else { &invalid };
            assert_eq!(&open(WATCH, watch("k", 5)).await, expected, "{second}");
            assert_eq!(&open(KEEP_ALIVE, renew(7)).await, expected, "{second}");
            assert_eq!(told(&alices.call(RANGE, range("k")).await), INVALID_TOKEN);
            sleep(SECOND).await;
        }
        let again = UserPasswordHashes::parse(line("alice", "third").as_bytes()).expect("valid");
        keyward.publish_passwords(None, Some(again));
        assert_eq!(open(WATCH, watch("k", 5)).await, stopped, "the file changes once more");
        sleep(31 * SECOND).await;
        assert_eq!(open(WATCH, watch("k", 5)).await, invalid);
    });
}

#[test]
fn a_login_of_the_file_goes_upstream_as_the_rules_say_and_not_at_all_without_one() {
    paused(async {
        let member = Member::new(1, &Tasks::default());
        let folder = tempfile::tempdir().expect("a folder");
        let write = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).expect("written");
            path
        };
        let users = write("users", &["alice", "bob", "root"].map(|user| line(user, "mine")).concat());
        let password = write("password", "right\n");
        let config = format!(
            "[login]\nsources = ['file']\nusers_file = {users:?}\n\
             [[user]]\nname = 'app'\npassword_file = {password:?}\n\
             [[user]]\nname = 'root'\npassword_file = {password:?}\n\
             [[map]]\npeer = 'file:alice'\nas = 'app'\n\
             [[map]]\npeer = 'file:r*'\nas = 'same'\n"
        );
        let keyward = Keyward::configured(&[&member], AuthSetting::On, &config);
        let client = keyward.client().await;
        let logged_in = async |user: &str| {
            let token = token(&log_in(&client, user, "mine").await);
            keyward.client().await.header("token", &token)
        };
        let alice = logged_in("alice").await;
        let answered = async {
            let call = member.called(RANGE).await;
            assert_eq!(call.token(), Some("app.1"));
            call.reply(&ranged(1)).await;
        };
        let (outcome, ()) = tokio::join!(alice.call(RANGE, range("k")), answered);
        assert_eq!(told(&outcome), "admitted");
        for user in ["bob", "root"] {
            let outcome = logged_in(user).await.call(RANGE, range("k")).await;
            assert_eq!(told(&outcome), "etcdserver: permission denied", "{user}");
        }
        assert!(member.was_called_again().is_none(), "nothing was sent");
        assert_eq!(member.logins(), 1);
    });
}

#[test]
fn a_member_that_does_not_answer_logins_is_left_alone() {
    paused(async {
        let member = Member::new(1, &Tasks::default());
        member.answers_no_login();
        let keyward = Keyward::with_auth(&[&member]);
        let client = keyward.client().await;
        let begun = Instant::now();
        let outcome = log_in(&client, "alice", "right").await;
        assert_eq!(told(&outcome), "etcdserver: request timed out");
        assert!(begun.elapsed() <= Duration::from_secs(7));
        assert!((5..=12).contains(&member.logins()), "{} in 7 s, not one each 100 ms", member.logins());
        assert_eq!(counted(&keyward, "untold"), 0, "nobody was told yet: the client's own call ended");
    });
}

/// They share one check as long as it is a check; a limit is one's own.
#[test]
fn an_address_that_may_not_try_again_keeps_out_no_other_that_tries_the_same() {
    paused(async {
        let member = Member::new(1, &Tasks::default());
        let keyward = Keyward::with_auth(&[&member]);
        let (alice, here) = ("alice".into(), "10.0.0.1".parse().ok());
        let check = async |password: &str, from| {
            keyward.logins.check(&alice, &Secret::new(password.to_owned()), from, &|_| ()).await
        };
        for n in 0..5 {
            assert_eq!(
                check(&format!("wrong{n}"), here).await,
                Err(LoginDenial::Refused(PasswordRefusal::WrongPassword))
            );
        }
        let elsewhere = check("right", "10.0.0.2".parse().ok());
        let (limited, admitted) = futures_util::future::join(check("right", here), elsewhere).await;
        assert_eq!((limited, admitted), (Err(LoginDenial::Limited), Ok(LoginProof::Etcd)));
    });
}

#[test]
fn logins_under_way_are_bounded_and_the_rest_is_told_so() {
    const ROOM: usize = 1024;
    paused(async {
        let member = Member::new(1, &Tasks::default());
        member.hold_logins(true);
        let keyward = Keyward::with_auth(&[&member]);
        let known = Secret::new("right".to_owned());
        let flood = (0..3 * ROOM).map(|n| {
            let (user, from) = (format!("user{n}").as_str().into(), format!("10.1.{}.{}", n / 256, n % 256));
            let (logins, known) = (Arc::clone(&keyward.logins), &known);
            async move { logins.check(&user, known, from.parse().ok(), &|_| ()).await }
        });
        let outcomes = join_all(flood).await;
        let limited = outcomes.iter().filter(|outcome| **outcome == Err(LoginDenial::Limited)).count();
        assert_eq!(limited, 2 * ROOM);
        assert_eq!(counted(&keyward, "limited"), 2 * ROOM as u64);
        assert!(member.logins() < 20, "{} at a member that does not answer", member.logins());
        member.hold_logins(false);
        assert_eq!(
            keyward.logins.check(&"alice".into(), &known, None, &|_| ()).await,
            Ok(LoginProof::Etcd),
            "room again"
        );
    });
}

#[test]
fn what_a_session_proved_is_looked_at_again_and_outlives_a_move_into_the_file() {
    paused(async {
        let member = Member::new(1, &Tasks::default());
        let keyward = with_file(&member, AuthSetting::On, "['file', 'etcd']", NOBODY_IN_FILE);
        let alice = "alice".into();
        let session = session("alice", "right");
        let proved = || keyward.logins.prove_again(&session);
        assert_eq!(proved().await, Ok(LoginProof::Etcd));
        // Many calls, one look a second; the first that finds it old does not wait.
        let mut looks = 0;
        for _ in 0..20 {
            sleep(Duration::from_millis(300)).await;
            assert_eq!(proved().await, Ok(LoginProof::Etcd));
            settled().await;
            if let Some(look) = member.was_called_again() {
                look.reply(&ranged(1)).await;
                looks += 1;
            }
        }
        assert!((4..=6).contains(&looks), "{looks} looks in 6 s");
        assert_eq!(member.logins(), 1);
        let hers = UserPasswordHashes::parse(line("alice", "right").as_bytes()).expect("valid");
        let line = hers.line(&alice).expect("there");
        keyward.publish_passwords(None, Some(hers));
        sleep(3 * SECOND).await;
        assert_eq!(proved().await, Ok(LoginProof::File(line)));
        keyward.publish_passwords(None, Some(UserPasswordHashes::default()));
        member.change_password("new");
        sleep(3 * SECOND).await;
        assert_eq!(proved().await, Err(LoginDenial::Refused(PasswordRefusal::WrongPassword)));
        assert_eq!(proved().await, Err(LoginDenial::Refused(PasswordRefusal::WrongPassword)));
    });
}

#[test]
fn sources_and_users_file_change_together_there_and_back() {
    paused(async {
        let member = Member::new(1, &Tasks::default());
        let keyward = with_file(&member, AuthSetting::On, "['file']", &line("alice", "mine"));
        let client = keyward.client().await;
        let in_file = token(&log_in(&client, "alice", "mine").await);
        let in_file = keyward.client().await.header("token", &in_file);
        assert_eq!(told(&log_in(&client, "bob", "right").await), FAILED);
        assert_eq!(member.logins(), 0);

        keyward.publish_passwords(Some(PasswordSources::Etcd), Some(UserPasswordHashes::default()));
        assert_eq!(told(&log_in(&client, "alice", "mine").await), FAILED);
        for user in ["alice", "bob"] {
            assert_eq!(told(&log_in(&client, user, "right").await), "admitted", "{user}");
        }
        let call = async |client: &Client| told(&client.call(RANGE, range("k")).await);
        assert_eq!(call(&in_file).await, INVALID_TOKEN, "what let it in is no source any more");

        // The file may still be named, and lines stand in it.
        keyward.publish_passwords(Some(PasswordSources::Etcd), None);
        assert_eq!(call(&in_file).await, INVALID_TOKEN);
        keyward.publish_passwords(Some(PasswordSources::FileThenEtcd), None);
        assert_ne!(call(&in_file).await, INVALID_TOKEN);
        sleep(SECOND).await;
        assert_eq!(told(&log_in(&client, "alice", "right").await), FAILED);
        for (user, password) in [("alice", "mine"), ("carol", "right")] {
            assert_eq!(told(&log_in(&client, user, password).await), "admitted", "{user}");
        }
    });
}

#[test]
fn guessing_keeps_no_session_from_being_proved() {
    paused(async {
        let member = Member::new(1, &Tasks::default());
        let keyward = Keyward::with_auth(&[&member]);
        let client = keyward.client().await;
        let guesses = (0..40).map(async |n| log_in(&client, "alice", &format!("wrong{n}")).await);
        assert!(join_all(guesses).await.iter().all(|outcome| told(outcome) != "admitted"));
        assert_eq!(told(&log_in(&client, "alice", "right").await), TOO_MANY);
        assert_eq!(keyward.logins.prove_again(&session("alice", "right")).await, Ok(LoginProof::Etcd));
        assert_eq!(told(&log_in(&client, "alice", "right").await), "admitted", "known since");
    });
}
