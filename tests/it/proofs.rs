//! A session that goes upstream by a credential of ours is proved now and then for as long as something lives by it: nobody else
//! would notice that its password was changed (rules 12).

use std::time::Duration;

use keyward::members::membership::AuthSetting;
use keyward::pb::etcdserverpb::AuthStatusResponse;
use keyward::refusal::Code;
use keyward::tasks::Tasks;
use prost::Message as _;
use tokio::time::{sleep, timeout};

use crate::member::Member;
use crate::rig::{Keyward, log_in, paused};
use crate::words::{INVALID_TOKEN, RANGE, WATCH, create_of, created, event, ranged, watch, watched};

const LINES: &str = "[[user]]\nname = \"alice\"\njwt = true\n\
    [sign_jwt]\nmethod = \"HS256\"\nkey = \"secret\"\n";

#[test]
fn a_stream_ends_when_the_password_that_let_it_in_was_changed() {
    paused(async {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("secret"), "a secret that etcd has too").expect("written");
        let member = Member::new(1, &Tasks::default());
        let keyward = Keyward::at(&[&member], AuthSetting::On, folder.path(), "", LINES);
        let client = keyward.client().await;
        let token = log_in(&client, "alice").await;
        let client = client.header("token", &token);
        let mut stream = client.open(WATCH).await.expect("open");
        stream.say(&watch("k", 5)).await;
        let status = AuthStatusResponse { enabled: true, auth_revision: 7, ..AuthStatusResponse::default() };
        member.called("/etcdserverpb.Auth/AuthStatus").await.reply(&status.encode_to_vec()).await;
        let mut call = member.called(WATCH).await;
        assert_ne!(call.token(), Some("alice.1"), "not with the token of her password");
        let create = create_of(&call.messages.next().await.expect("a create")).expect("a create");
        call.say(&created(create.watch_id, 9)).await.expect("taken");
        assert!(watched(&stream.next().await.expect("created")).created);

        // It is looked at, without a bcrypt, and goes on.
        for revision in 10..13 {
            let look = timeout(Duration::from_secs(60), member.called(RANGE)).await.expect("a look");
            assert_eq!(look.token(), Some("alice.1"));
            look.reply(&ranged(1)).await;
            sleep(Duration::from_millis(100)).await;
            call.say(&event(create.watch_id, revision, 1)).await.expect("taken");
            assert_eq!(watched(&stream.next().await.expect("an event")).events.len(), 1);
        }
        assert_eq!(member.logins(), 1);

        member.change_password("new");
        let look = timeout(Duration::from_secs(60), member.called(RANGE)).await.expect("a look");
        look.refuse(Code::Unauthenticated, INVALID_TOKEN);
        let outcome = stream.finish().await;
        assert_eq!(outcome.end.told(), (Code::Unauthenticated, INVALID_TOKEN));
        assert!(outcome.messages.is_empty());
        call.canceled().await;
        assert_eq!(member.logins(), 2, "her old one, refused");
    });
}
