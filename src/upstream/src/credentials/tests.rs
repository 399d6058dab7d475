//! Credentials against scripted members, under a paused clock.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::task::LocalSet;
use tokio::time::{Instant, advance, sleep, timeout};

use super::scripted_member::{BCRYPT, ScriptedMember};
use super::*;
use keyward_base::tasks::{TaskHandle, Tasks};

const A: MemberId = MemberId(0xa);
const B: MemberId = MemberId(0xb);
const C: MemberId = MemberId(0xc);
const MINUTE: Duration = Duration::from_secs(60);

struct World {
    credentials: Arc<Credentials>,
    logins: Tasks,
    control: Option<TaskHandle>,
}

fn world(settings: CredentialSettings, members: &[(MemberId, &ScriptedMember)]) -> World {
    let tasks = Tasks::default();
    let channels = ControlChannels::default();
    channels.store(Arc::new(members.iter().map(|(id, member)| (*id, member.channel(&tasks))).collect()));
    let (credentials, control) = Credentials::new(settings, channels).unwrap();
    let logins = Tasks::default();
    let control = tasks.spawn("control", control.run(logins.clone()));
    World { credentials, logins, control: Some(control) }
}

impl World {
    fn identity(&self, user: &str, password: &str) -> Arc<PasswordIdentity> {
        self.credentials.identity(&user.into(), &secret(password))
    }

    async fn verify(
        &self,
        user: &str,
        password: &str,
        members: &[MemberId],
    ) -> Result<Arc<PasswordIdentity>, LoginFailure> {
        self.credentials.verify(&user.into(), &secret(password), members).await
    }
}

fn secret(password: &str) -> Secret<String> {
    Secret::new(password.to_owned())
}

fn logins(member: &ScriptedMember) -> usize {
    member.with(|state| state.logins.len())
}

fn run(test: impl Future<Output = ()>) {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
    runtime.block_on(LocalSet::new().run_until(test));
}

#[test]
fn a_storm_of_logins_costs_one_per_user_and_member_and_admits_no_wrong_password() {
    run(async {
        let names: Vec<_> = (0..20).map(|n| (format!("user{n}"), format!("right{n}"))).collect();
        let users: Vec<_> = names.iter().map(|(name, password)| (&**name, &**password)).collect();
        let [a, b, c] =
            [ScriptedMember::new(&users), ScriptedMember::new(&users), ScriptedMember::new(&users)];
        let world = world(CredentialSettings::default(), &[(A, &a), (B, &b), (C, &c)]);
        let orders = [[A, B, C], [B, C, A], [C, A, B]];
        let right = (0..200).map(|n| {
            let (name, password) = users[n % 20];
            (name, password.to_owned(), orders[n % 3], true)
        });
        let wrong = (0..50).map(|n| (users[n % 20].0, format!("wrong{}", n % 7), orders[n % 3], false));
        let all: Vec<_> = right.chain(wrong).collect();
        let outcomes = join_all(all.iter().map(|(name, password, order, is_right)| {
            let verified = world.verify(name, password, order);
            async move { (is_right, verified.await) }
        }))
        .await;
        for (is_right, outcome) in outcomes {
            match outcome {
                Ok(identity) => assert!(is_right, "{identity:?} was admitted"),
                Err(failure) => assert!(!is_right && failure.is_refusal(), "{failure}"),
            }
        }
        for member in [&a, &b, &c] {
            member.with(|state| {
                assert!(users.iter().all(|(name, _)| state.accepted(name) <= 1), "{:?}", state.logins);
                assert!(state.logins.iter().all(|login| !login.with_token), "3.4.23 would hang");
                assert_eq!(state.most_at_a_time, 2);
            });
        }
        let accepted = users.iter().map(|(name, _)| [&a, &b, &c].map(|m| m.with(|s| s.accepted(name))));
        assert!(
            accepted.map(|each| each.iter().sum::<usize>()).all(|sum| sum == 1),
            "one login proves a user"
        );
        assert_eq!(world.credentials.counters().logins_accepted.load(Relaxed), 20);
    });
}

#[test]
fn a_login_goes_on_when_its_waiters_leave() {
    run(async {
        let member = ScriptedMember::new(&[("alice", "a")]);
        let world = world(CredentialSettings::default(), &[(A, &member)]);
        let alice = world.identity("alice", "a");
        assert!(timeout(BCRYPT / 2, alice.token(A)).await.is_err(), "bcrypt is slower");
        assert!(alice.current(A).is_none());
        let token = alice.token(A).await.unwrap();
        assert_eq!(token.header(), "alice.1");
        assert_eq!(alice.current(A).unwrap().header(), "alice.1");
        assert_eq!(logins(&member), 1);
    });
}

#[test]
fn ten_callers_with_the_same_dead_token_cause_one_login() {
    run(async {
        let member = ScriptedMember::new(&[("alice", "a")]);
        let world = world(CredentialSettings::default(), &[(A, &member)]);
        let alice = world.identity("alice", "a");
        let dead = alice.token(A).await.unwrap();
        member.restart();
        let heal = || async {
            alice.invalidate(A, &dead);
            alice.token(A).await.unwrap()
        };
        let healed = join_all((0..10).map(|_| heal())).await;
        assert!(healed.iter().all(|token| token.header() == "alice.2"));
        alice.invalidate(A, &dead);
        assert_eq!(alice.current(A).unwrap().header(), "alice.2", "the new token was not named");
        assert_eq!((logins(&member), world.credentials.counters().invalidations.load(Relaxed)), (2, 1));
    });
}

#[test]
fn a_refused_password_is_asked_again_ever_more_rarely_and_harms_no_other() {
    run(async {
        let member = ScriptedMember::new(&[("alice", "a")]);
        let world = world(CredentialSettings::default(), &[(A, &member)]);
        let wrong = world.identity("alice", "b");
        let mut asked = Vec::new();
        for second in 0..120 {
            let before = logins(&member);
            assert!(wrong.token(A).await.is_err_and(|failure| failure.is_refusal()));
            assert!(world.verify("alice", "b", &[A]).await.is_err_and(|failure| failure.is_refusal()));
            if logins(&member) > before {
                asked.push(second);
            }
            sleep(Duration::from_secs(1)).await;
        }
        assert_eq!(asked, [0, 1, 3, 7, 15, 31, 61, 91], "waits of 1, 2, 4, 8, 16, 30, 30 s");
        let right = world.verify("alice", "a", &[A]).await.unwrap();
        let count = logins(&member);
        assert!(world.verify("alice", "b", &[A]).await.is_err());
        assert!(right.current(A).is_some() && wrong.current(A).is_none());
        assert_eq!(logins(&member), count, "the wrong one is still refused here");
    });
}

#[test]
fn a_changed_password_ends_the_old_one_and_never_lends_it_the_new_token() {
    run(async {
        let member = ScriptedMember::new(&[("alice", "old"), ("bob", "b")]);
        let world = world(CredentialSettings::default(), &[(A, &member)]);
        let (old, bob) = (world.identity("alice", "old"), world.identity("bob", "b"));
        let token = old.token(A).await.unwrap();
        bob.token(A).await.unwrap();
        member.with(|state| state.change_password("alice", "new"));
        world.credentials.forget_user(&"alice".into());
        assert!(world.verify("alice", "old", &[A]).await.is_err(), "not by what was known before");
        let new = world.verify("alice", "new", &[A]).await.unwrap();
        assert!(!member.knows(token.header()) && member.knows(new.current(A).unwrap().header()));
        assert!(old.current(A).is_none() && bob.current(A).is_some());
        member.with(|state| state.change_password("alice", "old"));
        world.credentials.forget_user(&"alice".into());
        assert!(world.verify("alice", "old", &[A]).await.is_ok(), "nor by a refusal of before");
    });
}

#[test]
fn a_token_that_a_stream_needs_is_touched_and_never_renewed() {
    run(async {
        let [a, b] = [ScriptedMember::new(&[("alice", "a")]), ScriptedMember::new(&[("alice", "a")])];
        let world = world(CredentialSettings::default(), &[(A, &a), (B, &b)]);
        let alice = world.identity("alice", "a");
        let stream = alice.hold();
        let token = alice.token(A).await.unwrap();
        sleep(60 * MINUTE).await;
        assert!(a.knows(token.header()));
        assert_eq!((logins(&a), logins(&b)), (1, 0));
        let touches = a.with(|state| state.touches.clone());
        assert!(touches.iter().all(|touch| touch.alive));
        assert!((3600 / 105..=3600 / 80).contains(&touches.len()), "{}", touches.len());
        assert!(b.with(|state| state.touches.is_empty()), "no token there");
        drop(stream);
        sleep(15 * MINUTE).await;
        assert!(alice.current(A).is_none(), "nobody uses it");
        let touched = a.with(|state| state.touches.len());
        sleep(15 * MINUTE).await;
        assert_eq!(a.with(|state| state.touches.len()), touched);
    });
}

#[test]
fn a_token_in_use_is_not_touched() {
    run(async {
        let member = ScriptedMember::new(&[("alice", "a")]);
        let world = world(CredentialSettings::default(), &[(A, &member)]);
        let token = world.identity("alice", "a").token(A).await.unwrap();
        for _ in 0..60 {
            sleep(MINUTE).await;
            assert!(member.knows(token.header()));
            token.mark_used(Instant::now());
        }
        assert_eq!((logins(&member), member.with(|state| state.touches.len())), (1, 0));
    });
}

/// Requests a token of each identity every 10 s for `rounds` rounds, as occasional calls would.
async fn called_for(identities: &[Arc<PasswordIdentity>], rounds: usize) {
    for _ in 0..rounds {
        for identity in identities {
            identity.token(A).await.unwrap();
        }
        sleep(Duration::from_secs(10)).await;
    }
}

#[test]
fn a_shorter_life_is_learned_and_restarts_teach_nothing() {
    run(async {
        let member = ScriptedMember::new(&[("alice", "a"), ("bob", "b")]);
        member.with(|state| state.token_ttl = Duration::from_secs(5));
        let world = world(CredentialSettings::default(), &[(A, &member)]);
        let identities = [world.identity("alice", "a"), world.identity("bob", "b")];
        let streams = identities.each_ref().map(PasswordIdentity::hold);
        called_for(&identities, 60).await;
        assert!(logins(&member) < 20, "{}", logins(&member));
        let (before, ttl) = (logins(&member), world.credentials.shared.token_ttl(A));
        assert!(ttl < Duration::from_secs(11), "{ttl:?}");
        called_for(&identities, 60).await;
        assert!(logins(&member) <= before + 2, "learned, but for tests: {} after {before}", logins(&member));
        let ttl = world.credentials.shared.token_ttl(A);
        for _ in 0..10 {
            member.restart();
            world.credentials.tokens_may_be_lost(Some(A));
            called_for(&identities, 3).await;
        }
        assert!(world.credentials.shared.token_ttl(A) >= ttl);
        drop(streams);
    });
}

/// Restarted members lose young tokens. Idle tokens must be touched at the configured rate before and after
/// the restarts.
#[test]
fn restarts_do_not_change_how_often_tokens_are_touched() {
    run(async {
        let member = ScriptedMember::new(&[("alice", "a"), ("bob", "b")]);
        let world = world(CredentialSettings::default(), &[(A, &member)]);
        let identities = [world.identity("alice", "a"), world.identity("bob", "b")];
        let streams = identities.each_ref().map(PasswordIdentity::hold);
        for restart in 0..20 {
            for identity in &identities {
                let token = identity.token(A).await.unwrap();
                token.mark_used(Instant::now());
            }
            sleep(Duration::from_millis(1500)).await;
            member.restart();
            // A call may find the token dead before or after the members' task sees the new connection.
            let tell = || world.credentials.tokens_may_be_lost(Some(A));
            if restart % 2 == 0 {
                tell();
            }
            for identity in &identities {
                identity.invalidate(A, &identity.current(A).unwrap());
                identity.token(A).await.unwrap();
            }
            if restart % 2 == 1 {
                tell();
            }
        }
        assert_eq!(world.credentials.shared.token_ttl(A), Duration::from_secs(300));
        let before = member.with(|state| state.touches.len());
        sleep(10 * MINUTE).await;
        let touches = member.with(|state| state.touches.len()) - before;
        assert!((2 * 600 / 105..=2 * 600 / 80).contains(&touches), "{touches} touches in ten minutes");
        drop(streams);
    });
}

/// Covers an operator correcting a member's flag, and a wrongly learned TTL.
#[test]
fn a_learned_life_is_unlearned_when_tokens_outlive_it() {
    run(async {
        let member = ScriptedMember::new(&[("alice", "a"), ("bob", "b")]);
        member.with(|state| state.token_ttl = Duration::from_secs(2));
        let world = world(CredentialSettings::default(), &[(A, &member)]);
        let identities = [world.identity("alice", "a"), world.identity("bob", "b")];
        let streams = identities.each_ref().map(PasswordIdentity::hold);
        called_for(&identities, 60).await;
        let learned = world.credentials.shared.token_ttl(A);
        assert!(learned <= Duration::from_secs(6), "{learned:?}");
        member.with(|state| state.token_ttl = Duration::from_secs(300));
        let before = logins(&member);
        sleep(120 * MINUTE).await;
        assert_eq!(world.credentials.shared.token_ttl(A), Duration::from_secs(300));
        assert_eq!(logins(&member), before, "no token died of it");
        let touched = member.with(|state| state.touches.len());
        sleep(60 * MINUTE).await;
        let touches = member.with(|state| state.touches.len()) - touched;
        assert!((2 * 3600 / 105..=2 * 3600 / 80).contains(&touches), "{touches} touches an hour");
        drop(streams);
    });
}

#[test]
fn a_member_that_hangs_delays_no_other_members_touches() {
    run(async {
        let [a, b] = [ScriptedMember::new(&[("alice", "a")]), ScriptedMember::new(&[("alice", "a")])];
        for member in [&a, &b] {
            member.with(|state| state.token_ttl = Duration::from_secs(2));
        }
        let settings = CredentialSettings { token_ttl: Duration::from_secs(2), ..Default::default() };
        let world = world(settings, &[(A, &a), (B, &b)]);
        let alice = world.identity("alice", "a");
        let stream = alice.hold();
        alice.token(A).await.unwrap();
        let token = alice.token(B).await.unwrap();
        a.with(|state| state.silent = true);
        sleep(5 * MINUTE).await;
        assert!(b.knows(token.header()));
        assert_eq!(logins(&b), 1);
        assert!(alice.current(A).is_none(), "silent for a whole life: not worth a try");
        drop(stream);
    });
}

#[test]
fn each_answer_to_a_login_means_what_etcd_means() {
    run(async {
        let [a, b] = [ScriptedMember::new(&[("alice", "a")]), ScriptedMember::new(&[("alice", "a")])];
        let world = world(CredentialSettings::default(), &[(A, &a), (B, &b)]);
        a.with(|state| drop(state.users.insert("cert".into(), None)));
        assert!(matches!(world.verify("cert", "x", &[A]).await, Err(LoginFailure::NoPassword)));
        assert!(matches!(world.verify("alice", "a", &[C]).await, Err(LoginFailure::NoAnswer)));
        assert!(matches!(world.verify("alice", "a", &[]).await, Err(LoginFailure::NoAnswer)));
        a.with(|state| state.auth = false);
        assert!(matches!(world.verify("alice", "a", &[A, B]).await, Err(LoginFailure::AuthDisabled)));
        assert_eq!(logins(&b), 0, "an answer is final");
        a.with(|state| state.down = Some((14, "etcdserver: request timed out")));
        let Err(LoginFailure::Unavailable(status)) = world.verify("alice", "a", &[A]).await else {
            panic!("a member that cannot say is no refusal")
        };
        assert_eq!((status.code() as i32, status.message()), (14, "etcdserver: request timed out"));
        let alice = world.verify("alice", "a", &[A, B]).await.unwrap();
        assert!(alice.current(A).is_none() && alice.current(B).is_some(), "the next member was asked");
    });
}

#[test]
fn a_login_that_is_not_answered_ends() {
    run(async {
        let member = ScriptedMember::new(&[("alice", "a")]);
        member.with(|state| state.silent = true);
        let mut world = world(CredentialSettings::default(), &[(A, &member)]);
        let alice = world.identity("alice", "a");
        assert!(matches!(alice.token(A).await, Err(LoginFailure::NoAnswer)));
        let abandoned = async |end: &mut dyn FnMut()| {
            let second = Duration::from_secs(1);
            let waits = timeout(2 * second, alice.token(A));
            let ends = async {
                sleep(second).await;
                end();
            };
            assert!(matches!(tokio::join!(waits, ends).0.unwrap(), Err(LoginFailure::NoAnswer)));
        };
        abandoned(&mut || world.logins.abort_all()).await;
        member.with(|state| state.silent = false);
        alice.invalidate(A, &alice.token(A).await.unwrap());
        member.with(|state| state.silent = true);
        abandoned(&mut || drop(world.control.take())).await;
        assert!(matches!(alice.token(A).await, Err(LoginFailure::NoAnswer)), "nobody would make it");
    });
}

#[test]
fn who_asks_for_proof_joins_a_login_under_way_on_any_member() {
    run(async {
        let [a, b] = [ScriptedMember::new(&[("alice", "a")]), ScriptedMember::new(&[("alice", "a")])];
        let world = world(CredentialSettings::default(), &[(A, &a), (B, &b)]);
        let alice = world.identity("alice", "a");
        let (token, proved) = tokio::join!(alice.token(A), world.verify("alice", "a", &[B]));
        assert!(token.is_ok() && proved.is_ok());
        assert_eq!((logins(&a), logins(&b)), (1, 0));
    });
}

#[test]
fn a_proof_that_nobody_kept_alive_is_renewed() {
    run(async {
        let member = ScriptedMember::new(&[("alice", "a")]);
        let world = world(CredentialSettings::default(), &[(A, &member)]);
        let alice = world.verify("alice", "a", &[A]).await.unwrap();
        assert!(alice.is_proved());
        member.with(|state| state.silent = true);
        advance(Duration::from_secs(301)).await;
        assert!(!alice.is_proved());
        member.with(|state| {
            state.silent = false;
            state.change_password("alice", "new");
        });
        assert!(world.verify("alice", "a", &[A]).await.is_err());
    });
}

#[test]
fn a_login_too_many_is_told_so() {
    run(async {
        let member = ScriptedMember::new(&[]);
        let settings = CredentialSettings { logins_waiting: 3, ..Default::default() };
        let world = world(settings, &[(A, &member)]);
        let names: Vec<_> = (0..10).map(|n| n.to_string()).collect();
        let outcomes = join_all(names.iter().map(|name| world.verify(name, "x", &[A]))).await;
        let busy = outcomes.iter().filter(|outcome| matches!(outcome, Err(LoginFailure::Busy))).count();
        assert_eq!((busy, logins(&member)), (5, 5));
    });
}

#[test]
fn wrong_passwords_are_bounded_and_push_out_nobody() {
    run(async {
        let member = ScriptedMember::new(&[("alice", "a")]);
        let settings = CredentialSettings { unproved: 16, ..Default::default() };
        let world = world(settings, &[(A, &member)]);
        world.verify("alice", "a", &[A]).await.unwrap();
        for wrong in 0..500 {
            drop(world.identity("alice", &wrong.to_string()));
            world.credentials.unproved.run_pending_tasks();
        }
        // The cache drops evicted identities only when no thread of the process can be reading a cache,
        // including threads of concurrent tests.
        let sizes = || (world.credentials.known().len(), lock(&world.credentials.known).identities.len());
        let bounded = |(alive, listed): (usize, usize)| alive <= 17 && listed <= 64;
        for more in 0.. {
            world.credentials.unproved.run_pending_tasks();
            world.credentials.proved.run_pending_tasks();
            if bounded(sizes()) {
                break;
            }
            drop(world.identity("alice", &format!("more {more}")));
            std::thread::yield_now();
        }
        world.verify("alice", "a", &[A]).await.unwrap();
        assert_eq!(logins(&member), 1);
    });
}

/// Waits until at most `kept` identities are in memory. The cache frees evicted identities only when no
/// thread, such as a concurrent test, may still read a cache.
fn let_go(world: &World, kept: usize) {
    while world.credentials.known().len() > kept {
        for cache in [&world.credentials.unproved, &world.credentials.proved] {
            cache.run_pending_tasks();
        }
        std::thread::yield_now();
    }
}

#[test]
fn a_flood_of_users_takes_no_more_memory_than_there_is_and_pushes_out_nobody() {
    const FLOOD: u32 = 100_000;
    run(async {
        let member = ScriptedMember::new(&[("alice", "a")]);
        let world = world(CredentialSettings::default(), &[(A, &member)]);
        world.verify("alice", "a", &[A]).await.unwrap();
        let mut most = 0;
        for n in 0..FLOOD {
            drop(world.identity(&format!("user{n}"), "guess"));
            most = most.max(lock(&world.credentials.known).identities.len());
            // A concurrent test may delay the cache from freeing evicted identities for any time.
            if n % 1_000 == 0 {
                let_go(&world, 1_001);
            }
        }
        // At most 2,001 identities live between two waits, and the list has at most as many dropped ones.
        assert!((1_000..=4_002).contains(&most), "{most} identities");
        let_go(&world, 1_001);
        assert!(world.credentials.unproved.entry_count() <= 1_000);
        world.verify("alice", "a", &[A]).await.unwrap();
        assert_eq!(logins(&member), 1);
    });
}

#[test]
fn an_identity_that_only_a_stream_still_holds_is_not_made_twice() {
    run(async {
        let member = ScriptedMember::new(&[("alice", "a")]);
        let world = world(CredentialSettings::default(), &[(A, &member)]);
        let alice = world.verify("alice", "a", &[A]).await.unwrap();
        for cache in [&world.credentials.proved, &world.credentials.unproved] {
            cache.invalidate_all();
        }
        assert!(Arc::ptr_eq(&alice, &world.identity("alice", "a")));
        assert!(!Arc::ptr_eq(&alice, &world.identity("alice", "b")));
        assert!(!Arc::ptr_eq(&alice, &world.identity("alic", "ea")));
    });
}

#[test]
fn debug_shows_no_secret() {
    run(async {
        let member = ScriptedMember::new(&[("alice", "hunter2")]);
        let world = world(CredentialSettings::default(), &[(A, &member)]);
        let alice = world.verify("alice", "hunter2", &[A]).await.unwrap();
        let token = alice.current(A).unwrap();
        let shown = format!("{:?} {alice:?} {token:?} {:?}", world.credentials, alice.hold());
        assert!(shown.contains("alice") && shown.contains("Token(#"), "{shown}");
        assert!(!shown.contains("hunter2") && !shown.contains(token.header().to_str().unwrap()), "{shown}");
    });
}
