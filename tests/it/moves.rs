//! Rows and the users file change while sessions and streams go on: what proves a user is what they say now, and nobody who stays the
//! same user is refused for it.

use futures_util::FutureExt as _;
use keyward::members::membership::AuthSetting;
use keyward::refusal::Code;
use keyward::secret::Secret;
use keyward::tasks::Tasks;
use keyward::users::{self, Cost, UserPasswordHashes};
use tokio::time::{Duration, sleep};

use crate::member::Member;
use crate::revocations::{next, watching};
use crate::rig::{Keyward, NOBODY_IN_FILE, paused, settled, token_of};
use crate::unproved_logins::logged_in;
use crate::words::{INVALID_TOKEN, RANGE, WATCH, create_of, created, event, range, ranged, watched};

#[test]
fn a_stream_goes_on_by_a_row_that_comes_and_by_its_own_password_when_it_goes() {
    paused(async {
        let member = Member::new(1, &Tasks::default());
        let keyward = Keyward::with_auth(&[&member]);
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("row"), "another").expect("written");
        let alice = keyward.logged_in("alice").await;
        let (mut stream, call) = watching(&alice, &member).await;
        assert_eq!(call.token(), Some("alice.1"));

        member.change_password("another");
        keyward.publish_rules(folder.path(), "", "[[user]]\nname = 'alice'\npassword_file = 'row'\n");
        settled().await;
        // Nothing happens to a stream that goes on.
        assert!(member.was_called_again().is_none());
        call.end(Code::Unavailable, "etcdserver: server stopped");
        let mut call = next(&member, WATCH).await;
        assert_eq!(call.token(), Some("alice.2"), "by the password of the rules");
        let create = create_of(&call.messages.next().await.expect("a create")).expect("a create");
        call.say(&created(create.watch_id, 9)).await.expect("taken");
        call.say(&event(create.watch_id, 10, 1)).await.expect("taken");
        assert_eq!(watched(&stream.next().await.expect("an event")).events.len(), 1);

        // And back to its own, which is right again.
        member.change_password("right");
        keyward.publish_rules(folder.path(), "", "");
        settled().await;
        call.end(Code::Unavailable, "etcdserver: server stopped");
        let call = next(&member, WATCH).await;
        assert_eq!(call.token(), Some("alice.1"), "what its own password got before");
    });
}

/// Nobody upstream looks at its password then: it is looked at here.
#[test]
fn a_stream_that_goes_on_by_a_row_ends_when_its_password_is_right_no_more() {
    paused(async {
        let member = Member::new(1, &Tasks::default());
        let keyward = Keyward::with_auth(&[&member]);
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("row"), "another").expect("written");
        let alice = keyward.logged_in("alice").await;
        let (stream, mut call) = watching(&alice, &member).await;
        keyward.publish_rules(folder.path(), "", "[[user]]\nname = 'alice'\npassword_file = 'row'\n");
        sleep(Duration::from_secs(60)).await;
        assert!(call.canceled().now_or_never().is_none(), "it is right all along");
        member.change_password("another");
        let told = stream.finish().await.end;
        assert_eq!(told.told(), (Code::Unauthenticated, INVALID_TOKEN));
        call.canceled().await;
    });
}

/// Lines of a users file and the rule for its users are read at once, and published one after the other.
#[test]
fn a_session_whose_user_moves_into_the_file_and_out_of_it_is_never_refused() {
    paused(async {
        let member = Member::new(1, &Tasks::default());
        let folder = tempfile::tempdir().expect("a folder");
        let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).expect("written");
        let hash = users::hash(&Secret::new("right".to_owned()), Cost { memory: 8, passes: 1 });
        let line = format!("alice:{}\n", hash.expect("hashed"));
        write("users", NOBODY_IN_FILE);
        write("entry", "right");
        let lines = "[login]\nsources = ['file', 'etcd']\nusers_file = 'users'\n\
                     [[user]]\nname = 'alice'\npassword_file = 'entry'\n";
        let rule = "[[map]]\npeer = 'file:*'\nas = 'same'\n";
        let keyward = Keyward::at(&[&member], AuthSetting::On, folder.path(), "", lines);
        let alice = logged_in(&keyward, "alice", "right").await;
        assert_eq!(token_of(&member, &alice).await.as_deref(), Some("alice.1"));

        // In: her line is here, its rule is about to come.
        keyward.publish_passwords(None, Some(UserPasswordHashes::parse(line.as_bytes()).expect("valid")));
        sleep(Duration::from_secs(3)).await;
        let coming = async {
            sleep(Duration::from_millis(100)).await;
            assert!(member.was_called_again().is_none(), "nothing is sent before");
            write("users", &line);
            keyward.publish_rules(folder.path(), "", &format!("{lines}{rule}"));
        };
        let (token, ()) = tokio::join!(token_of(&member, &alice), coming);
        assert_eq!(token.as_deref(), Some("alice.1"));

        // Out: what her line proved a moment ago proves nothing.
        write("users", NOBODY_IN_FILE);
        keyward.publish_rules(folder.path(), "", lines);
        let answers = async {
            // Whether her password is known to etcd, and the call itself.
            loop {
                member.called(RANGE).await.reply(&ranged(9)).await;
            }
        };
        let outcome = tokio::select! {
            outcome = alice.call(RANGE, range("k")) => outcome,
            () = answers => unreachable!("it never ends"),
        };
        assert_eq!(outcome.end.told().0, Code::Ok);
    });
}
