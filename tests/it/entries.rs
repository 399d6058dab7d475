//! A `[[user]]` entry wins over the client's own password, once etcd has accepted that and as long as it does.

use std::time::Duration;

use keyward::refusal::Code;
use keyward::tasks::Tasks;
use keyward::upstream::membership::Auth;
use tokio::time::sleep;

use crate::member::Member;
use crate::rig::{Keyward, paused, settled};
use crate::unproved_logins::{logged_in, token_of};
use crate::words::{INVALID_TOKEN, RANGE, range};

const ENTRY: &str = "[[user]]\nname = \"alice\"\npassword_file = \"entry\"\n";

/// Keyward has this password for alice.
fn door(auth: Auth, entry: &str) -> (Member, Keyward) {
    let member = Member::new(1, &Tasks::default());
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("entry"), entry).expect("written");
    let keyward = Keyward::at(&[&member], auth, folder.path(), "", ENTRY);
    (member, keyward)
}

#[test]
fn it_wins_after_the_password_was_accepted_and_no_longer_than_it_is_right() {
    paused(async {
        let (member, keyward) = door(Auth::On, "entry");
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
        let (member, keyward) = door(Auth::Off, "right");
        let mallory = logged_in(&keyward, "alice", "wrong").await;
        keyward.members.auth.set(Auth::On);
        let end = mallory.call(RANGE, range("k")).await.end;
        assert_eq!(end.told(), (Code::Unauthenticated, INVALID_TOKEN));
        settled().await;
        assert!(member.was_called_again().is_none());
        assert_eq!(member.logins(), 1, "her own, which is refused");
    });
}
