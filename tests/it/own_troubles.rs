//! What is one user's own trouble costs nobody else anything.

use futures_util::future::join_all;
use keyward::members::membership::AuthSetting;
use keyward::refusal::Code;
use keyward::tasks::Tasks;

use crate::client::Client;
use crate::member::{Member, next_of};
use crate::rig::{Keyward, paused};
use crate::words::{RANGE, range, ranged};

/// More than what a shard may send again at once.
const CALLS: usize = 1000;

/// Three members, one listener for alice, another for bob; alice is known everywhere, and bob cannot be proved any more.
async fn without_bob(folder: &std::path::Path) -> (Vec<Member>, Keyward) {
    let tasks = Tasks::default();
    let members: Vec<_> = (1..=3).map(|id| Member::new(id, &tasks)).collect();
    let user = |user| {
        std::fs::write(folder.join(user), "right").expect("written");
        format!("[[user]]\nname = \"{user}\"\npassword_file = \"{user}\"\n")
    };
    let others = "[[listener]]\nname = \"others\"\naddress = \"127.0.0.1:1\"\ndefault_user = \"bob\"\n";
    let lines = format!("{}{}{others}", user("alice"), user("bob"));
    let all: Vec<_> = members.iter().collect();
    let keyward = Keyward::at(&all, AuthSetting::On, folder, "default_user = \"alice\"\n", &lines);
    let alice = keyward.client().await;
    let mut known = [false; 3];
    while known.contains(&false) {
        let script = async {
            let (at, call) = next_of(&members).await;
            call.reply(&ranged(5)).await;
            at
        };
        let (outcome, at) = tokio::join!(alice.call(RANGE, range("k")), script);
        outcome.message();
        known[at] = true;
    }
    members.iter().for_each(Member::answers_no_login);
    (members, keyward)
}

#[test]
fn a_user_who_cannot_be_proved_does_not_use_up_what_others_may_send_again() {
    paused(async {
        let folder = tempfile::tempdir().expect("a folder");
        let (members, keyward) = without_bob(folder.path()).await;
        let bob = Client::over(keyward.connect_to(1, None), &keyward.tasks).await;
        for outcome in join_all((0..CALLS).map(|_| bob.call(RANGE, range("k")))).await {
            assert_eq!(outcome.end.told(), (Code::Unavailable, "there is no connection available"));
        }
        assert!(keyward.metrics.tries.refused.get() > 0, "bob's own are bounded");
        assert!(members.iter().all(|member| member.was_called_again().is_none()));
        let alice = keyward.client().await;
        let script = async {
            let (lost, call) = next_of(&members).await;
            members[lost].cut();
            drop(call);
            let (at, call) = next_of(&members).await;
            assert_ne!(at, lost);
            call.reply(&ranged(5)).await;
        };
        let read = async { alice.call(RANGE, range("k")).await.message().clone() };
        tokio::join!(read, script);
    });
}
