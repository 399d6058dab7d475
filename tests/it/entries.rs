//! A `[[user]]` entry wins over the client's own password, once etcd has accepted that and as long as it does.

use std::time::Duration;

use keyward::members::membership::AuthSetting;
use keyward::refusal::Code;
use keyward::tasks::Tasks;
use tokio::time::sleep;

use crate::member::Member;
use crate::rig::{Keyward, paused, settled, token_of};
use crate::unproved_logins::logged_in;
use crate::words::{INVALID_TOKEN, RANGE, range, ranged};

const ENTRY: &str = "[[user]]\nname = \"alice\"\npassword_file = \"entry\"\n";

/// Keyward has this password for alice.
fn door(auth: AuthSetting, entry: &str) -> (Member, Keyward) {
    let member = Member::new(1, &Tasks::default());
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("entry"), entry).expect("written");
    let keyward = Keyward::at(&[&member], auth, folder.path(), "", ENTRY);
    (member, keyward)
}

#[test]
fn it_wins_after_the_password_was_accepted_and_no_longer_than_it_is_right() {
    paused(async {
        let (member, keyward) = door(AuthSetting::On, "entry");
        let alice = logged_in(&keyward, "alice", "right").await;
        assert_eq!(member.logins(), 1);
        member.change_password("entry");
        assert_eq!(token_of(&member, &alice).await.as_deref(), Some("alice.2"), "by the entry's password");

        // Nobody upstream sees her own password any more: that it is wrong now must be found out here.
        sleep(Duration::from_secs(3)).await;
        let end = alice.call(RANGE, range("k")).await.end;
        assert_eq!(end.told(), (Code::Unauthenticated, INVALID_TOKEN));
        settled().await;
        while let Some(look) = member.was_called_again() {
            assert_eq!(
                look.token(),
                Some("alice.1"),
                "whether her password is still known: nothing else was sent"
            );
        }
    });
}

#[test]
fn it_never_wins_for_a_password_that_nobody_has_looked_at() {
    paused(async {
        let (member, keyward) = door(AuthSetting::Off, "right");
        let mallory = logged_in(&keyward, "alice", "wrong").await;
        keyward.members.auth.set(AuthSetting::On);
        let end = mallory.call(RANGE, range("k")).await.end;
        assert_eq!(end.told(), (Code::Unauthenticated, INVALID_TOKEN));
        settled().await;
        assert!(member.was_called_again().is_none());
        assert_eq!(member.logins(), 1, "her own, which is refused");
    });
}

/// Nothing that goes upstream by an entry would be refused there, so that nothing else would notice.
#[test]
fn where_auth_is_off_its_password_is_asked_about_too_since_auth_may_be_on_again() {
    paused(async {
        let (member, keyward) = door(AuthSetting::On, "entry");
        let alice = logged_in(&keyward, "alice", "right").await;
        member.turns_auth_off();
        keyward.members.auth.set(AuthSetting::Off);
        for _ in 0..3 {
            sleep(Duration::from_secs(3)).await;
            let first = member.logins() == 1;
            let script = async {
                if first {
                    let look = member.called(RANGE).await;
                    assert_eq!(look.token(), Some("alice.1"), "whether her token is still known");
                    look.refuse(Code::Unauthenticated, INVALID_TOKEN);
                }
                let call = member.called(RANGE).await;
                assert_eq!(call.token(), None, "there are no users");
                call.reply(&ranged(1)).await;
            };
            let (outcome, ()) = tokio::join!(alice.call(RANGE, range("k")), script);
            assert_eq!(outcome.end.code(), Some(Code::Ok), "{:?}", outcome.end);
        }
        assert_eq!(member.logins(), 4, "a question in three seconds");
        // At etcd itself, with another password for her.
        member.change_password("entry");
        sleep(Duration::from_secs(3)).await;
        let end = alice.call(RANGE, range("k")).await.end;
        assert_eq!(end.told(), (Code::Unauthenticated, INVALID_TOKEN));
        settled().await;
        assert!(member.was_called_again().is_none(), "nothing was sent");
    });
}
