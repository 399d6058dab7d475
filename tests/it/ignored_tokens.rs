//! While auth is off upstream, tokens that are none of ours are ignored as etcd ignores them; with auth on a bad one never is.

use keyward::downstream::session::{RevocationChange, Revocations};
use keyward::members::membership::AuthSetting;
use keyward::refusal::Code;
use keyward::tasks::Tasks;

use crate::member::Member;
use crate::revocations::decide;
use crate::rig::{Keyward, paused, settled, token_of};
use crate::unproved_logins::logged_in;
use crate::words::{INVALID_TOKEN, RANGE, range};

const DEFAULT_USER: &str = "default_user = \"app\"\n";
const USERS: &str = "[[user]]\nname = \"app\"\npassword_file = \"app\"\n";
const INVALID: (Code, &str) = (Code::Unauthenticated, INVALID_TOKEN);
const EMPTY: (Code, &str) = (Code::InvalidArgument, "etcdserver: user name is empty");
/// What clients show to clusters without auth.
const FOREIGN: [(&str, &str); 8] = [
    ("token", ""),
    ("token", "nobody-issued-this"),
    ("token", "abcdefghijklmnop.12"),
    ("token", "x.999999999"),
    ("token", "eyJhbGciOiJSUzI1NiJ9.eyJleHAiOjF9.c2lnbmF0dXJl"),
    ("token", "kw1_c29tZWJvZHkgZWxzZSdz"),
    ("authorization", "Basic YWxpY2U6c2VjcmV0"),
    ("authorization", ""),
];

fn door(auth: AuthSetting, listener: &str, lines: &str) -> (Member, Keyward) {
    let member = Member::new(1, &Tasks::default());
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("app"), "right").expect("written");
    let keyward = Keyward::at(&[&member], auth, folder.path(), listener, &format!("{lines}{USERS}"));
    (member, keyward)
}

async fn refused(member: &Member, keyward: &Keyward, expected: (Code, &str)) {
    for (name, value) in FOREIGN {
        let client = keyward.client().await.header(name, value);
        assert_eq!(client.call(RANGE, range("k")).await.end.told(), expected, "{name}: {value:?}");
        settled().await;
        assert!(member.was_called_again().is_none(), "{name}: {value:?} was sent");
    }
}

#[test]
fn a_foreign_token_is_ignored_only_where_auth_is_known_to_be_off() {
    paused(async {
        let (member, keyward) = door(AuthSetting::Off, DEFAULT_USER, "");
        for (name, value) in FOREIGN {
            let client = keyward.client().await.header(name, value);
            assert_eq!(token_of(&member, &client).await, None, "{name}: {value:?}");
        }
        assert_eq!(keyward.metrics.tokens_ignored.get(), FOREIGN.len() as u64);
        assert_eq!(keyward.metrics.sessions_refused.get() + keyward.metrics.jwts_refused.get(), 0);
        for auth in [AuthSetting::On, AuthSetting::Unknown] {
            keyward.members.auth.set(auth);
            refused(&member, &keyward, INVALID).await;
        }
        assert_eq!(keyward.metrics.tokens_ignored.get(), FOREIGN.len() as u64);
        assert_eq!(member.logins(), 0);
    });
}

/// A bad token never falls back: not to the listener's user either, when a member says that auth is on by now.
#[test]
fn a_call_with_an_ignored_token_is_nobody_when_auth_turns_out_to_be_on() {
    paused(async {
        let (member, keyward) = door(AuthSetting::Off, DEFAULT_USER, "");
        let client = keyward.client().await.header("token", "nobody-issued-this");
        let script = async {
            let call = member.called(RANGE).await;
            assert_eq!(call.token(), None);
            call.refuse(EMPTY.0, EMPTY.1);
        };
        let (outcome, ()) = tokio::join!(client.call(RANGE, range("k")), script);
        assert_eq!(outcome.end.told(), EMPTY);
        settled().await;
        assert!(member.was_called_again().is_none(), "it was not made again as the listener's user");
        assert_eq!(member.logins(), 0);
        assert_eq!(keyward.members.auth.now(), AuthSetting::On);
        assert_eq!(client.call(RANGE, range("k")).await.end.told(), INVALID);
        // Who shows nothing is the listener's user, as ever.
        assert_eq!(token_of(&member, &keyward.client().await).await.as_deref(), Some("app.1"));
    });
}

#[test]
fn revocations_blocks_and_denials_hold_while_auth_is_off() {
    paused(async {
        let (member, keyward) = door(AuthSetting::Off, DEFAULT_USER, "");
        let alice = logged_in(&keyward, "alice", "whatever").await;
        assert_eq!(token_of(&member, &alice).await, None);
        let known = decide(&keyward, &Revocations::default(), &RevocationChange::Revoke("alice".into()));
        assert_eq!(
            alice.call(RANGE, range("k")).await.end.told(),
            INVALID,
            "a revoked session is not a foreign token"
        );
        let foreign = keyward.client().await.header("token", "nobody-issued-this");
        assert_eq!(token_of(&member, &foreign).await, None);
        decide(&keyward, &known, &RevocationChange::Block("app".into()));
        assert_eq!(
            foreign.call(RANGE, range("k")).await.end.told().0,
            Code::PermissionDenied,
            "the listener's user is blocked"
        );
        keyward.sealer.apply_revocations(None);
        let untold = alice.call(RANGE, range("k")).await.end;
        assert_eq!(untold.told().0, Code::Unavailable, "nobody knows whether it was revoked");

        let deny = "[[map]]\npeer = \"listener:*\"\ndeny = true\n";
        let (member, keyward) = door(AuthSetting::Off, "", deny);
        refused(&member, &keyward, (Code::PermissionDenied, "etcdserver: permission denied")).await;
    });
}

#[test]
fn where_nothing_shown_is_refused_a_foreign_token_is_a_bad_one() {
    paused(async {
        let (member, keyward) = door(AuthSetting::Off, "identify = [\"token\"]\n", "");
        refused(&member, &keyward, INVALID).await;
        let alice = logged_in(&keyward, "alice", "whatever").await;
        assert_eq!(token_of(&member, &alice).await, None, "a session counts");
    });
}
