//! A login while auth is off proves nothing (rules 11): no rule makes it anybody, and later its password must verify.

use keyward::members::membership::AuthSetting;
use keyward::refusal::Code;
use keyward::tasks::Tasks;

use crate::client::Client;
use crate::member::Member;
use crate::rig::{Keyward, log_in_with, paused, settled, token_of};
use crate::words::{INVALID_TOKEN, RANGE, range};

const RULES: &str = "[[map]]\npeer = \"password:alice\"\nas = \"app\"\n\
                     [[map]]\npeer = \"password:mallory\"\ndeny = true\n\
                     [[user]]\nname = \"app\"\npassword_file = \"app\"\n";

fn door(auth: AuthSetting) -> (Member, Keyward) {
    let member = Member::new(1, &Tasks::default());
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("app"), "right").expect("written");
    let keyward = Keyward::at(&[&member], auth, folder.path(), "", RULES);
    (member, keyward)
}

pub(crate) async fn logged_in(keyward: &Keyward, user: &str, password: &str) -> Client {
    let client = keyward.client().await;
    let token = log_in_with(&client, user, password).await;
    client.header("token", &token)
}

#[test]
fn no_rule_makes_it_anybody_once_auth_is_on() {
    paused(async {
        let (member, keyward) = door(AuthSetting::Off);
        for password in ["right", "wrong"] {
            let alice = logged_in(&keyward, "alice", password).await;
            assert_eq!(token_of(&member, &alice).await, None, "there are no users");
            keyward.members.auth.set(AuthSetting::On);
            let end = alice.call(RANGE, range("k")).await.end;
            assert_eq!(end.told(), (Code::Unauthenticated, INVALID_TOKEN), "{password}");
            settled().await;
            assert!(member.was_called_again().is_none());
            assert_eq!(member.logins(), 0);
            keyward.members.auth.set(AuthSetting::Off);
        }
        let mallory = logged_in(&keyward, "mallory", "right").await;
        let end = mallory.call(RANGE, range("k")).await.end;
        assert_eq!(end.told(), (Code::PermissionDenied, "etcdserver: permission denied"));
    });
}

#[test]
fn while_nobody_knows_whether_auth_is_on_its_token_is_not_called_bad() {
    paused(async {
        let (member, keyward) = door(AuthSetting::Off);
        let alice = logged_in(&keyward, "alice", "right").await;
        keyward.members.auth.set(AuthSetting::Unknown);
        let end = alice.call(RANGE, range("k")).await.end;
        assert_eq!(end.told(), (Code::Unavailable, "there is no connection available"));
        settled().await;
        assert!(member.was_called_again().is_none());
        keyward.members.auth.set(AuthSetting::Off);
        assert_eq!(token_of(&member, &alice).await, None);
    });
}

#[test]
fn without_a_rule_its_password_must_verify() {
    paused(async {
        let (member, keyward) = door(AuthSetting::Off);
        let (honest, liar) =
            (logged_in(&keyward, "bob", "right").await, logged_in(&keyward, "root", "wrong").await);
        keyward.members.auth.set(AuthSetting::On);
        assert_eq!(token_of(&member, &honest).await.as_deref(), Some("bob.1"));
        let end = liar.call(RANGE, range("k")).await.end;
        assert_eq!(end.told(), (Code::Unauthenticated, INVALID_TOKEN));
        assert!(member.was_called_again().is_none());
    });
}

#[test]
fn one_that_etcd_has_proved_is_whom_the_rule_says() {
    paused(async {
        let (member, keyward) = door(AuthSetting::On);
        let alice = logged_in(&keyward, "alice", "right").await;
        assert_eq!(
            token_of(&member, &alice).await.as_deref(),
            Some("app.2"),
            "the first proved the password"
        );
    });
}

/// The name is anybody's choice: it may confine, and gives nothing.
#[test]
fn a_claimed_name_gives_no_role_and_weakens_no_mode() {
    paused(async {
        let member = Member::new(1, &Tasks::default());
        let folder = tempfile::tempdir().expect("a folder");
        let policy = "[[role]]\nname = 'all'\nallow = [{ actions = ['read', 'write'], everything = true }]\n\
            [[binding]]\npeer = 'password:alice'\nroles = ['all']\n\
            [[binding]]\npeer = 'password:bob'\nroles = ['all']\nmode = 'off'\n";
        std::fs::write(folder.path().join("policy.toml"), policy).expect("written");
        let lines = "[policy]\nmode = 'enforce'\nfile = 'policy.toml'\n";
        let keyward = Keyward::at(&[&member], AuthSetting::Off, folder.path(), "", lines);
        let denied = (Code::PermissionDenied, "etcdserver: permission denied");
        let alice = logged_in(&keyward, "alice", "right").await;
        let liar = logged_in(&keyward, "alice", "wrong").await;
        for client in [&alice, &liar, &logged_in(&keyward, "bob", "right").await] {
            assert_eq!(client.call(RANGE, range("k")).await.end.told(), denied);
        }
        settled().await;
        assert!(member.was_called_again().is_none());
        // Now etcd sees the password before it serves the call.
        keyward.members.auth.set(AuthSetting::On);
        assert_eq!(token_of(&member, &alice).await.as_deref(), Some("alice.1"));
        assert_eq!(liar.call(RANGE, range("k")).await.end.told(), (Code::Unauthenticated, INVALID_TOKEN));
        // Back again, what the connection remembers of the caller counts no more.
        keyward.members.auth.set(AuthSetting::Off);
        for client in [&alice, &liar] {
            assert_eq!(client.call(RANGE, range("k")).await.end.told(), denied);
        }
    });
}
