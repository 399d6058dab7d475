//! A session that was revoked opens nothing more, and what lives by it ends at once, as etcd would end it (rules 13, 29).

use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use keyward::downstream::session::{RevocationChange, Revocations};
use keyward::members::membership::AuthSetting;
use keyward::pb::etcdserverpb::{AuthenticateRequest, RangeRequest};
use keyward::pb::v3electionpb::LeaderRequest;
use keyward::pb::v3lockpb::LockRequest;
use keyward::refusal::Code;
use keyward::tasks::Tasks;
use prost::Message as _;
use tokio::time::Instant;

use crate::client::{Client, Stream};
use crate::member::{Call, Member};
use crate::rig::{Keyward, paused, settled};
use crate::words::{
    INVALID_TOKEN, KEEP_ALIVE, PUT, RANGE, WATCH, create_of, created, event, put, range, ranged, renew,
    renewed, was_put, watch, watched,
};

const AUTHENTICATE: &str = "/etcdserverpb.Auth/Authenticate";
const OBSERVE: &str = "/v3electionpb.Election/Observe";
const LOCK: &str = "/v3lockpb.Lock/Lock";
const SNAPSHOT: &str = "/etcdserverpb.Maintenance/Snapshot";
const REVOKED: (Code, &str) = (Code::Unauthenticated, INVALID_TOKEN);
const AUTH_FAILED: &str = "etcdserver: authentication failed, invalid user ID or password";

fn started() -> (Rc<Member>, Keyward) {
    let member = Rc::new(Member::new(1, &Tasks::default()));
    let keyward = Keyward::with_auth(&[&member]);
    (member, keyward)
}

/// As the store does it: the change on top of what is known.
pub(crate) fn decide(keyward: &Keyward, known: &Revocations, change: &RevocationChange) -> Revocations {
    let more = known.with(known.entry(change, SystemTime::now())).expect("there is room");
    keyward.sealer.apply_revocations(Some(&Arc::new(more.clone())));
    more
}

/// The next call at the member but a look at who leads, which stays without an answer.
pub(crate) async fn next(member: &Member, path: &str) -> Call {
    loop {
        let is_lock = path.starts_with("/v3lockpb.") || path.starts_with("/v3electionpb.");
        let mut call = if is_lock { member.call_after_judges().await } else { member.call().await };
        if call.path() == RANGE && path != RANGE {
            let look = RangeRequest::decode(call.message().await).expect("a Range");
            assert!(look.serializable, "only a look comes in between");
            continue;
        }
        assert_eq!(call.path(), path);
        return call;
    }
}

pub(crate) async fn watching(client: &Client, member: &Member) -> (Stream, Call) {
    let mut stream = client.open(WATCH).await.expect("open");
    stream.say(&watch("k", 5)).await;
    let mut call = next(member, WATCH).await;
    let create = create_of(&call.messages.next().await.expect("a create")).expect("a create");
    call.say(&created(create.watch_id, 9)).await.expect("taken");
    assert!(watched(&stream.next().await.expect("created")).created);
    (stream, call)
}

/// One of everything that lives by a session, as far as it says something, with the member's side of it.
pub(crate) async fn all_kinds(client: &Client, member: &Member) -> Vec<(&'static str, Stream, Call)> {
    let (stream, call) = watching(client, member).await;
    let mut all = vec![(WATCH, stream, call)];

    let mut stream = client.open(KEEP_ALIVE).await.expect("open");
    stream.say(&renew(7)).await;
    let mut call = next(member, KEEP_ALIVE).await;
    call.say(&renewed(7, 5)).await.expect("taken");
    stream.next().await.expect("renewed");
    all.push((KEEP_ALIVE, stream, call));

    let observe = LeaderRequest { name: "n".into() }.encode_to_vec();
    let stream = client.begin(OBSERVE, observe).await.expect("sent");
    all.push((OBSERVE, stream, next(member, OBSERVE).await));

    let lock = LockRequest { name: "n".into(), lease: 0 }.encode_to_vec();
    let stream = client.begin(LOCK, lock).await.expect("sent");
    all.push((LOCK, stream, next(member, LOCK).await));

    let mut stream = client.begin(SNAPSHOT, b"").await.expect("sent");
    let mut call = next(member, SNAPSHOT).await;
    call.say(&[7; 100]).await.expect("taken");
    stream.next().await.expect("a part");
    all.push((SNAPSHOT, stream, call));
    all
}

#[test]
fn what_lives_by_a_revoked_session_ends_at_once_and_nothing_else() {
    paused(async {
        let (member, keyward) = started();
        let (alice, bob) = (keyward.logged_in("alice").await, keyward.logged_in("bob").await);
        let living = all_kinds(&alice, &member).await;
        let (mut other, mut others_call) = watching(&bob, &member).await;
        let began = Instant::now();
        decide(&keyward, &Revocations::default(), &RevocationChange::Revoke("alice".into()));
        for (path, stream, mut call) in living {
            let outcome = stream.finish().await;
            assert_eq!(outcome.end.told(), REVOKED, "{path}");
            assert!(outcome.messages.is_empty(), "{path} said something more");
            call.canceled().await;
        }
        assert!(began.elapsed() < Duration::from_secs(1), "nothing waited: {:?}", began.elapsed());

        let refused = alice.call(RANGE, range("k")).await;
        assert_eq!(refused.end.told(), REVOKED);
        others_call.say(&event(1, 10, 1)).await.expect("taken");
        assert_eq!(watched(&other.next().await.expect("an event")).events.len(), 1);
        settled().await;
        let stray = member.was_called_again();
        assert!(
            stray.is_none(),
            "nothing of a revoked session arrives: {:?}",
            stray.map(|c| c.path().to_owned())
        );
    });
}

#[test]
fn a_user_who_was_revoked_logs_in_again_and_one_who_was_blocked_does_not() {
    paused(async {
        let (member, keyward) = started();
        let old = keyward.logged_in("alice").await;
        let known = decide(&keyward, &Revocations::default(), &RevocationChange::Revoke("alice".into()));
        let new = keyward.logged_in("alice").await;
        assert_eq!(old.call(RANGE, range("k")).await.end.told(), REVOKED);
        let script = async { next(&member, RANGE).await.reply(&ranged(3)).await };
        let (answer, ()) = tokio::join!(new.call(RANGE, range("k")), script);
        answer.message();

        let known = decide(&keyward, &known, &RevocationChange::Block("alice".into()));
        assert_eq!(new.call(RANGE, range("k")).await.end.told(), REVOKED);
        let login = |password: &str| AuthenticateRequest { name: "alice".into(), password: password.into() };
        let client = keyward.client().await;
        for password in ["right", "wrong"] {
            let refused = client.call(AUTHENTICATE, login(password).encode_to_vec()).await;
            assert_eq!(refused.end.told(), (Code::InvalidArgument, AUTH_FAILED), "{password}");
        }
        decide(&keyward, &known, &RevocationChange::Unblock("alice".into()));
        keyward.logged_in("alice").await;
        assert_eq!(new.call(RANGE, range("k")).await.end.told(), REVOKED, "it stays ended");
    });
}

#[test]
fn a_login_that_was_under_way_when_its_user_was_revoked_is_worth_nothing() {
    paused(async {
        let (member, keyward) = started();
        let client = keyward.client().await;
        member.hold_logins(true);
        let login = AuthenticateRequest { name: "alice".into(), password: "right".into() };
        let stream = client.begin(AUTHENTICATE, login.encode_to_vec()).await.expect("sent");
        // The member is being asked; what it will say was true before the revocation only.
        while member.logins() == 0 {
            tokio::task::yield_now().await;
        }
        decide(&keyward, &Revocations::default(), &RevocationChange::Revoke("alice".into()));
        member.hold_logins(false);
        let outcome = stream.finish().await;
        let answer = keyward::pb::etcdserverpb::AuthenticateResponse::decode(outcome.message().clone());
        let client = client.header("token", &answer.expect("an answer").token);
        assert_eq!(client.call(RANGE, range("k")).await.end.told(), REVOKED);
    });
}

#[test]
fn while_nobody_knows_who_was_revoked_tokens_wait_and_streams_go_on() {
    paused(async {
        let (member, keyward) = started();
        let alice = keyward.logged_in("alice").await;
        let (mut stream, mut call) = watching(&alice, &member).await;
        keyward.sealer.apply_revocations(None);
        let refused = alice.call(RANGE, range("k")).await;
        assert_eq!(refused.end.told().0, Code::Unavailable, "a client tries again; its token is not bad");
        let login = AuthenticateRequest { name: "alice".into(), password: "right".into() };
        let refused = keyward.client().await.call(AUTHENTICATE, login.encode_to_vec()).await;
        assert_eq!(refused.end.told().0, Code::Unavailable);
        call.say(&event(1, 10, 1)).await.expect("taken");
        assert_eq!(watched(&stream.next().await.expect("an event")).events.len(), 1);
        // Known again: what was revoked in between ends now.
        decide(&keyward, &Revocations::default(), &RevocationChange::Revoke("alice".into()));
        assert_eq!(stream.finish().await.end.told(), REVOKED);
    });
}

#[test]
fn the_break_glass_ends_every_session_and_its_streams() {
    paused(async {
        let (member, keyward) = started();
        let alice = keyward.logged_in("alice").await;
        let (stream, _call) = watching(&alice, &member).await;
        keyward.sealer.refuse_before(u64::MAX);
        assert_eq!(stream.finish().await.end.told(), REVOKED);
        assert_eq!(alice.call(RANGE, range("k")).await.end.told(), REVOKED);
    });
}

/// A client may take half a minute to send what it has begun: who was let in by its header is looked at again then.
#[test]
fn a_request_that_comes_whole_after_its_session_was_revoked_is_not_sent() {
    paused(async {
        let (member, keyward) = started();
        let alice = keyward.logged_in("alice").await;
        let (mut late, mut in_time) =
            (alice.open(PUT).await.expect("open"), alice.open(PUT).await.expect("open"));
        let framed = keyward::rpc::frame::encode(&put(9));
        for stream in [&mut late, &mut in_time] {
            stream.send.send_data(framed.slice(..7), false).expect("the stream takes it");
        }
        settled().await;
        in_time.send.send_data(framed.slice(7..), true).expect("the stream takes it");
        let script = async { next(&member, PUT).await.reply(&was_put(3)).await };
        let (outcome, ()) = tokio::join!(in_time.finish(), script);
        outcome.message();

        decide(&keyward, &Revocations::default(), &RevocationChange::Revoke("alice".into()));
        late.send.send_data(framed.slice(7..), true).expect("the stream takes it");
        assert_eq!(late.finish().await.end.told(), REVOKED);
        assert!(member.was_called_again().is_none(), "a write of a revoked session is not sent");
    });
}

/// Its session's password is being looked at, since nobody upstream will: what is decided meanwhile holds for it too.
#[test]
fn a_call_that_waits_for_a_look_at_its_password_is_refused_when_its_user_is_revoked_meanwhile() {
    paused(async {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("app"), "right").expect("written");
        let member = Member::new(1, &Tasks::default());
        let lines = "[[user]]\nname = 'app'\npassword_file = 'app'\n\
                     [[map]]\npeer = 'password:alice'\nas = 'app'\n";
        let keyward = Keyward::at(&[&member], AuthSetting::On, folder.path(), "", lines);
        let alice = keyward.logged_in("alice").await;
        // Longer than what was seen of her password at the login counts.
        tokio::time::sleep(Duration::from_secs(10)).await;
        let script = async {
            let look = member.called(RANGE).await;
            assert_eq!(look.token(), Some("alice.1"), "her password, not app's");
            decide(&keyward, &Revocations::default(), &RevocationChange::Revoke("alice".into()));
            look.reply(&ranged(3)).await;
        };
        let (answer, ()) = tokio::join!(alice.call(RANGE, range("k")), script);
        assert_eq!(answer.end.told(), REVOKED);
        settled().await;
        assert!(member.was_called_again().is_none(), "nothing was sent as app");
    });
}
