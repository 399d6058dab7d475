//! Who has the session key, and no password, seals tokens that open; none of them makes anybody (SECURITY.md).

use std::sync::Arc;
use std::time::SystemTime;

use keyward::downstream::session::{
    PeerNamespace, RevocationChange, Revocations, Session, SessionPeer, SessionProof,
};
use keyward::members::membership::AuthSetting;
use keyward::refusal::Code;
use keyward::secret::Secret;
use keyward::tasks::Tasks;
use keyward::users::{self, Cost};

use crate::member::Member;
use crate::rig::{Keyward, paused, settled};
use crate::words::{INVALID_TOKEN, RANGE, range, ranged};

const REFUSED: (Code, &str) = (Code::Unauthenticated, INVALID_TOKEN);

/// alice is in the users file, and rules make somebody of her, of whatever kind she is.
struct Door {
    member: Member,
    keyward: Keyward,
}

impl Door {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let hash = users::hash(&Secret::new("hers".to_owned()), Cost { memory: 8, passes: 1 });
        let line = format!("alice:{}\n", hash.expect("hashed"));
        std::fs::write(folder.path().join("users"), line).expect("written");
        std::fs::write(folder.path().join("app"), "right").expect("written");
        let lines = "[login]\nsources = ['file', 'etcd']\nusers_file = 'users'\n\
                     [[user]]\nname = 'app'\npassword_file = 'app'\n\
                     [[map]]\npeer = 'file:*'\nas = 'app'\n\
                     [[map]]\npeer = 'password:*'\nas = 'app'\n";
        let member = Member::new(1, &Tasks::default());
        let keyward = Keyward::at(&[&member], AuthSetting::On, folder.path(), "", lines);
        Self { member, keyward }
    }

    /// A token as whoever has the key can make it.
    fn seal(&self, peer: SessionPeer, proof: SessionProof, generation: u64) -> String {
        let session = Session::begin(peer, proof, generation, SystemTime::now()).expect("random bytes");
        self.keyward.sealer.seal(&session).expect("it fits").expose().clone()
    }

    async fn refuses(&self, what: &str, token: &str) {
        let client = self.keyward.client().await.header("token", token);
        assert_eq!(client.call(RANGE, range("k")).await.end.told(), REFUSED, "{what}");
        settled().await;
        assert!(self.member.was_called_again().is_none(), "{what}");
    }
}

fn known(namespace: PeerNamespace, user: &str) -> SessionPeer {
    SessionPeer::Known { namespace, user: user.into() }
}

fn with_password(user: &str, password: &str) -> SessionPeer {
    SessionPeer::Password { user: user.into(), password: Secret::new(password.to_owned()) }
}

#[test]
fn a_session_key_alone_makes_nobody() {
    paused(async {
        let door = Door::new();
        let etcd = SessionProof::Etcd { auth_revision: 7 };
        for (what, peer, proof) in [
            ("a user of the file, unproved", known(PeerNamespace::File, "alice"), SessionProof::None),
            ("a user of the file, proved by etcd", known(PeerNamespace::File, "alice"), etcd),
            (
                "a user of the file, by some line",
                known(PeerNamespace::File, "alice"),
                SessionProof::File { line: 7 },
            ),
            ("nobody of the file", known(PeerNamespace::File, "bob"), SessionProof::File { line: 0 }),
            ("a user of etcd's without a password", known(PeerNamespace::Password, "alice"), etcd),
            ("root without a password", known(PeerNamespace::Password, "root"), SessionProof::None),
            ("a user of the file with a guess", with_password("alice", "guess"), etcd),
            ("the same by some line", with_password("alice", "guess"), SessionProof::File { line: 7 }),
        ] {
            door.refuses(what, &door.seal(peer, proof, u64::MAX)).await;
        }
        assert_eq!(door.member.logins(), 0);
        // Of whom the file does not know, etcd is asked: it refuses a guess, and is whom the rule names for no other.
        door.refuses("a guess", &door.seal(with_password("bob", "guess"), etcd, u64::MAX)).await;
        assert_eq!(door.member.logins(), 1);
    });
}

/// What a forged token says of when it was issued, and after which revocations, counts for nothing against a block.
#[test]
fn a_block_holds_for_tokens_that_claim_a_later_generation() {
    paused(async {
        let door = Door::new();
        let token =
            door.seal(with_password("bob", "right"), SessionProof::Etcd { auth_revision: 7 }, u64::MAX);
        let client = door.keyward.client().await.header("token", &token);
        let script = async {
            let call = door.member.called(RANGE).await;
            assert_eq!(call.token(), Some("app.2"), "bob has proved himself, and is app by the rule");
            call.reply(&ranged(1)).await;
        };
        let (answer, ()) = tokio::join!(client.call(RANGE, range("k")), script);
        answer.message();
        let none = Revocations::default();
        let blocked = none.with(none.entry(&RevocationChange::Block("bob".into()), SystemTime::now()));
        door.keyward.sealer.apply_revocations(Some(&Arc::new(blocked.expect("there is room"))));
        door.refuses("a blocked user", &token).await;
    });
}
