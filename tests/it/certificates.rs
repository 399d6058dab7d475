//! Client certificates as peers: who they are upstream, when they are refused, and when they end.

use std::net::SocketAddr;
use std::time::Duration;

use keyward::members::membership::AuthSetting;
use keyward::pb::etcdserverpb::AuthenticateRequest;
use keyward::pb::v3lockpb::LockRequest;
use keyward::refusal::Code;
use keyward::tasks::Tasks;
use prost::Message as _;
use rcgen::{CertificateParams, ExtendedKeyUsagePurpose, date_time_ymd};
use tokio::io::AsyncReadExt as _;

use crate::authority::{self, Authority, Shown, connect, valid_for, with_uri};
use crate::client::{Client, Outcome, Stream};
use crate::member::Member;
use crate::revocations::watching;
use crate::rig::{Keyward, paused, settled, token_of};
use crate::words::{INVALID_TOKEN, RANGE, WATCH, created, event, range, watch};

const LOCK: &str = "/v3lockpb.Lock/Lock";
const DENIED: &str = "etcdserver: permission denied";
const USERS: [&str; 4] = ["app", "alice", "root", "bob"];

pub(crate) const TLS: &str = "tls = { cert = \"server.crt\", key = \"server.key\", client_ca = \"ca.crt\", \
    client_crl = \"ca.crl\", client_ca_name = \"staff\", client_auth = \"optional\" }\n";

/// Keyward with TLS in front of one scripted member.
pub(crate) struct Door {
    pub(crate) folder: tempfile::TempDir,
    pub(crate) authority: Authority,
    pub(crate) member: Member,
    pub(crate) keyward: Keyward,
}

/// The listener's lines and those after it. `listener` is what it says beside TLS.
fn lines(listener: &str, rules: &str) -> (String, String) {
    let user = |user| format!("[[user]]\nname = \"{user}\"\npassword_file = \"{user}\"\n");
    (format!("{TLS}{listener}"), format!("{}{rules}", USERS.map(user).concat()))
}

impl Door {
    pub(crate) fn new(listener: &str, rules: &str) -> Self {
        Self::with(AuthSetting::On, listener, rules)
    }

    /// `listener` is what the listener says beside TLS.
    fn with(auth: AuthSetting, listener: &str, rules: &str) -> Self {
        let authority = Authority::new();
        let folder = tempfile::tempdir().expect("a folder");
        authority.write(folder.path(), "ca");
        std::fs::write(folder.path().join("ca.crl"), authority.revoke(&[666])).expect("written");
        let member = Member::new(1, &Tasks::default());
        USERS.iter().for_each(|user| std::fs::write(folder.path().join(user), "right").expect("written"));
        let (listener, rules) = lines(listener, rules);
        let keyward = Keyward::at(&[&member], auth, folder.path(), &listener, &rules);
        Self { folder, authority, member, keyward }
    }

    /// Other rules, while it runs.
    fn publish(&self, listener: &str, rules: &str) {
        let (listener, rules) = lines(listener, rules);
        self.keyward.publish_rules(self.folder.path(), &listener, &rules);
    }

    pub(crate) async fn client(&self, shown: Option<&Shown>) -> Client {
        self.client_from(None, shown).await
    }

    async fn client_from(&self, from: Option<SocketAddr>, shown: Option<&Shown>) -> Client {
        let io = self.keyward.connect_to(0, from);
        let io = connect(io, self.authority.tls(shown)).await.expect("a handshake");
        Client::over(io, &self.keyward.tasks).await
    }

    async fn of(&self, name: &str) -> Client {
        self.client(Some(&self.authority.client(name))).await
    }

    /// The token with which a call of this client reaches the member.
    pub(crate) async fn token_of(&self, client: &Client) -> Option<String> {
        token_of(&self.member, client).await
    }

    /// The call is refused so, and nothing of it reaches the member.
    async fn refuses(&self, client: &Client, code: Code, text: &str) {
        let logins = self.member.logins();
        let Outcome { end, .. } = client.call(RANGE, range("k")).await;
        assert_eq!(end.told(), (code, text));
        settled().await;
        assert!(self.member.was_called_again().is_none());
        assert_eq!(self.member.logins(), logins);
    }

    /// A client that shows this is not let in, and nothing of it reaches the member.
    async fn shuts(&self, shown: &Shown) {
        let failed = self.keyward.metrics.handshakes_failed.get();
        let io = self.keyward.connect();
        if let Ok(mut io) = connect(io, self.authority.tls(Some(shown))).await {
            let mut rest = Vec::new();
            let error = io.read_to_end(&mut rest).await.expect_err("an alert");
            assert_eq!(error.kind(), std::io::ErrorKind::InvalidData, "{error}");
        }
        settled().await;
        assert_eq!(self.keyward.metrics.handshakes_failed.get(), failed + 1);
        assert!(self.member.was_called_again().is_none());
        assert_eq!(self.member.logins(), 0);
    }
}

const WEB: &str = "[[map]]\npeer = \"cert:staff:CN=web-*\"\nas = \"app\"\n";
pub(crate) const SAME: &str = "[[map]]\npeer = \"cert:staff:CN=*\"\nas = \"same\"\n";

#[test]
fn a_certificate_is_the_user_that_the_first_rule_says() {
    paused(async {
        let uri = "[[map]]\nsan_uri = \"spiffe://test/b*\"\nas = \"bob\"\n";
        let door = Door::new("", &format!("{WEB}{uri}{SAME}"));
        assert_eq!(door.token_of(&door.of("web-1").await).await.as_deref(), Some("app.1"));
        assert_eq!(door.token_of(&door.of("web-2").await).await.as_deref(), Some("app.1"), "one login");
        assert_eq!(door.token_of(&door.of("alice").await).await.as_deref(), Some("alice.2"));
        let shown = door.authority.issue(&with_uri(authority::client("alice"), "spiffe://test/bob"));
        assert_eq!(door.token_of(&door.client(Some(&shown)).await).await.as_deref(), Some("bob.3"));
    });
}

#[test]
fn a_peer_that_no_rule_knows_is_refused_and_nothing_is_sent() {
    paused(async {
        let door = Door::new("", WEB);
        door.refuses(&door.of("alice").await, Code::PermissionDenied, DENIED).await;
        assert_eq!(door.keyward.metrics.peers_refused.get(), 1);
        let default = Door::new("", &format!("{WEB}[mapping]\ndefault = \"bob\"\n"));
        assert_eq!(default.token_of(&default.of("alice").await).await.as_deref(), Some("bob.1"));
    });
}

#[test]
fn where_auth_is_off_there_are_no_users_and_only_deny_counts() {
    paused(async {
        let deny = "[[map]]\npeer = \"cert:staff:CN=mallory\"\ndeny = true\n";
        let door = Door::with(AuthSetting::Off, "", &format!("{deny}{WEB}"));
        assert_eq!(door.token_of(&door.of("alice").await).await, None);
        assert_eq!(door.token_of(&door.of("web-1").await).await, None);
        door.refuses(&door.of("mallory").await, Code::PermissionDenied, DENIED).await;
    });
}

/// Where no rule is about certificates, a listener does not look at them unless it says so: the first that is brings that
/// with it.
#[test]
fn the_first_rule_about_certificates_counts_as_soon_as_it_is_published() {
    paused(async {
        let default = "default_user = \"bob\"\n";
        let deny = "[[map]]\npeer = \"cert:staff:CN=alice\"\ndeny = true\n";
        let door = Door::new(default, "");
        let alice = door.of("alice").await;
        assert_eq!(door.token_of(&alice).await.as_deref(), Some("bob.1"));
        let (nobody, mut watches) = (door.client(None).await, Vec::new());
        for client in [&alice, &nobody] {
            let mut stream = client.open(WATCH).await.expect("a stream");
            stream.say(&watch("k", 5)).await;
            let mut upstream = door.member.called(WATCH).await;
            upstream.messages.next().await.expect("a create");
            upstream.say(&created(1, 4)).await.expect("said");
            stream.next().await.expect("created");
            watches.push((stream, upstream));
        }
        door.publish(default, &format!("{deny}{WEB}"));
        let (stream, upstream) = &mut watches[0];
        assert_eq!(stream.next().await.expect_err("denied").told(), (Code::PermissionDenied, DENIED));
        upstream.canceled().await;
        let (stream, upstream) = &mut watches[1];
        upstream.say(&event(1, 5, 1)).await.expect("said");
        stream.next().await.expect("bob's goes on");
        door.refuses(&alice, Code::PermissionDenied, DENIED).await;
        assert_eq!(door.token_of(&door.of("web-1").await).await.as_deref(), Some("app.2"));
        // Where certificates are no etcd users, a denial holds all the same.
        let without = format!("{default}identify = [\"token\", \"default\"]\n");
        door.publish(&without, deny);
        assert_eq!(door.token_of(&door.of("web-1").await).await.as_deref(), Some("bob.1"));
        door.refuses(&alice, Code::PermissionDenied, DENIED).await;
        door.publish(&without, "");
        assert_eq!(door.token_of(&alice).await.as_deref(), Some("bob.1"));
    });
}

/// etcd is down and Keyward has just started: what would be for good to a client is not said before it is known.
#[test]
fn whether_a_peer_is_nobody_is_not_said_before_it_is_known_that_there_are_users() {
    paused(async {
        let deny = "[[map]]\npeer = \"cert:staff:CN=mallory\"\ndeny = true\n";
        let door = Door::with(AuthSetting::Unknown, "", &format!("{deny}{WEB}"));
        let (alice, mallory) = (door.of("alice").await, door.of("mallory").await);
        door.refuses(&alice, Code::Unavailable, "there is no connection available").await;
        assert_eq!(door.keyward.metrics.peers_refused.get(), 0);
        door.refuses(&mallory, Code::PermissionDenied, DENIED).await;
        door.keyward.members.auth.set(AuthSetting::Off);
        assert_eq!(door.token_of(&alice).await, None);
        door.keyward.members.auth.set(AuthSetting::On);
        door.refuses(&alice, Code::PermissionDenied, DENIED).await;
    });
}

/// Its sessions would count for nothing there, and be good at another listener: so there are none, and nothing to guess.
#[test]
fn where_tokens_do_not_count_nobody_logs_in_and_no_password_is_looked_at() {
    paused(async {
        for ways in ["[\"certificate\"]", "[\"certificate\", \"default\"]"] {
            let door = Door::new(&format!("identify = {ways}\n"), WEB);
            let client = door.of("web-1").await;
            for password in ["right", "wrong"] {
                let login = AuthenticateRequest { name: "alice".into(), password: password.into() };
                let Outcome { end, .. } =
                    client.call("/etcdserverpb.Auth/Authenticate", login.encode_to_vec()).await;
                let told = (Code::FailedPrecondition, "etcdserver: authentication is not enabled");
                assert_eq!(end.told(), told, "{ways} {password}");
            }
            assert_eq!(door.member.logins(), 0, "{ways}");
            assert_eq!(
                door.token_of(&client).await.as_deref(),
                Some("app.1"),
                "who goes on without is served"
            );
        }
    });
}

#[test]
fn a_common_name_does_not_make_root() {
    paused(async {
        let door = Door::new("", SAME);
        door.refuses(&door.of("root").await, Code::PermissionDenied, DENIED).await;
        let spelled = "[[map]]\npeer = \"cert:staff:CN=root\"\nas = \"root\"\n";
        let door = Door::new("", &format!("{spelled}{SAME}"));
        assert_eq!(door.token_of(&door.of("root").await).await.as_deref(), Some("root.1"));
    });
}

#[test]
fn a_user_as_whom_keyward_cannot_act_is_nobody() {
    paused(async {
        let door = Door::new("", SAME);
        door.refuses(&door.of("carol").await, Code::PermissionDenied, DENIED).await;
    });
}

#[test]
fn a_name_of_another_authority_is_another_peer() {
    paused(async {
        let (ours, theirs) = (Authority::new(), Authority::new());
        let folder = tempfile::tempdir().expect("a folder");
        theirs.write(folder.path(), "partners");
        ours.write(folder.path(), "staff");
        std::fs::write(folder.path().join("alice"), "right").expect("written");
        let tls = |ca: &str| {
            format!("tls = {{ cert = \"server.crt\", key = \"server.key\", client_ca = \"{ca}.crt\" }}\n")
        };
        let other =
            format!("[[listener]]\nname = \"partners\"\naddress = \"127.0.0.1:1\"\n{}", tls("partners"));
        let rules = "[[user]]\nname = \"alice\"\npassword_file = \"alice\"\n\
                     [[map]]\npeer = \"cert:clients:CN=alice\"\nas = \"same\"\n";
        let member = Member::new(1, &Tasks::default());
        let keyward = Keyward::at(
            &[&member],
            AuthSetting::On,
            folder.path(),
            &tls("staff"),
            &format!("{other}{rules}"),
        );
        // alice of the password, who is known here, and alice of the partners' certificate are two.
        let alice = ours.tls(Some(&theirs.client("alice")));
        let io = connect(keyward.connect_to(1, None), alice.clone()).await.expect("a handshake");
        let client = Client::over(io, &keyward.tasks).await;
        let end = client.call(RANGE, range("k")).await.end;
        assert_eq!(end.told(), (Code::PermissionDenied, DENIED));
        // Under the authority that has a rule it does not verify.
        let mut io =
            connect(keyward.connect_to(0, None), alice).await.expect("the client's half of a handshake");
        io.read_u8().await.expect_err("an alert");
        settled().await;
        assert_eq!(keyward.metrics.handshakes_failed.get(), 1);
        assert!(member.was_called_again().is_none());
        assert_eq!(member.logins(), 0);
    });
}

#[test]
fn a_certificate_that_does_not_verify_opens_nothing() {
    paused(async {
        let door = Door::new("", SAME);
        let alice = || authority::client("alice");
        let changed = |change: &dyn Fn(&mut CertificateParams)| {
            let mut params = alice();
            change(&mut params);
            door.authority.issue(&params)
        };
        assert_eq!(
            door.token_of(&door.client(Some(&changed(&|_| {}))).await).await.as_deref(),
            Some("alice.1")
        );
        let door = Door::new("", SAME);
        let changed = |change: &dyn Fn(&mut CertificateParams)| {
            let mut params = alice();
            change(&mut params);
            door.authority.issue(&params)
        };
        door.shuts(&changed(&|params| params.not_after = date_time_ymd(2026, 1, 1))).await;
        door.shuts(&changed(&|params| params.not_before = date_time_ymd(2090, 1, 1))).await;
        door.shuts(&changed(&|params| {
            params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth]
        }))
        .await;
        door.shuts(&changed(&|params| params.serial_number = Some(666.into()))).await;
        door.shuts(&authority::self_signed(&alice())).await;
        door.shuts(&Authority::new().client("alice")).await;
    });
}

#[test]
fn a_token_beats_a_certificate_and_a_bad_one_falls_back_to_nothing() {
    paused(async {
        let door = Door::new("default_user = \"bob\"\n", SAME);
        let logged_in = door.keyward_session("app").await;
        let client = door.of("alice").await.header("token", &logged_in);
        assert_eq!(door.token_of(&client).await.as_deref(), Some("app.1"));
        let client = door.of("alice").await;
        assert_eq!(door.token_of(&client).await.as_deref(), Some("alice.2"));
        let nobody = door.client(None).await;
        assert_eq!(door.token_of(&nobody).await.as_deref(), Some("bob.3"));
        for bad in ["", "kw1_", "x.1", "Bearer ", "e30.e30.", "a.b.c"] {
            let client = door.of("alice").await.header("token", bad);
            door.refuses(&client, Code::Unauthenticated, INVALID_TOKEN).await;
            let client = door.of("alice").await.header("authorization", bad);
            door.refuses(&client, Code::Unauthenticated, INVALID_TOKEN).await;
        }
    });
}

impl Door {
    /// The token of a login with a password.
    async fn keyward_session(&self, user: &str) -> String {
        let client = self.client(None).await;
        crate::rig::log_in(&client, user).await
    }
}

#[test]
fn the_order_of_ways_is_the_listeners() {
    paused(async {
        let door = Door::new("identify = [\"certificate\", \"token\"]\n", SAME);
        let session = door.keyward_session("app").await;
        let both = door.of("alice").await.header("token", &session);
        assert_eq!(door.token_of(&both).await.as_deref(), Some("alice.2"));
        let token = door.client(None).await.header("token", &session);
        assert_eq!(door.token_of(&token).await.as_deref(), Some("app.1"));
        let nothing = door.client(None).await;
        door.refuses(&nothing, Code::InvalidArgument, "etcdserver: user name is empty").await;

        let door = Door::new("identify = [\"certificate\", \"default\"]\ndefault_user = \"bob\"\n", SAME);
        let token = door.client(None).await.header("token", &session);
        door.refuses(&token, Code::Unauthenticated, INVALID_TOKEN).await;

        let door = Door::new("identify = [\"token\"]\n", SAME);
        door.refuses(&door.of("alice").await, Code::InvalidArgument, "etcdserver: user name is empty").await;
    });
}

#[test]
fn a_rule_may_say_from_where() {
    paused(async {
        let near = "[[map]]\npeer = \"cert:staff:CN=*\"\nnetwork = \"10.0.0.0/8\"\nas = \"same\"\n";
        let default = "[[map]]\npeer = \"listener:clients\"\nnetwork = \"10.0.0.0/8\"\nas = \"app\"\n";
        let door = Door::new("", &format!("{near}{default}"));
        let alice = door.authority.client("alice");
        let from = |text: &str| Some(text.parse().expect("an address"));
        let inside = door.client_from(from("10.1.1.1:1"), Some(&alice)).await;
        assert_eq!(door.token_of(&inside).await.as_deref(), Some("alice.1"));
        for outside in [from("11.1.1.1:1"), from("[::1]:1"), None] {
            let outside = door.client_from(outside, Some(&alice)).await;
            door.refuses(&outside, Code::PermissionDenied, DENIED).await;
        }
        let nobody = door.client_from(from("10.1.1.1:1"), None).await;
        assert_eq!(door.token_of(&nobody).await.as_deref(), Some("app.2"));
    });
}

/// What ends this stream in the half hour to come, if anything.
pub(crate) async fn in_half_an_hour(stream: &mut Stream) -> Option<(Code, String)> {
    let ended = tokio::time::timeout(Duration::from_secs(1800), async {
        loop {
            if let Err(end) = stream.next().await {
                let (code, text) = end.told();
                return (code, text.to_owned());
            }
        }
    });
    ended.await.ok()
}

/// A watch of a client whose certificate ends in ten minutes, after an hour's half: what ended it, if anything.
async fn outlived(listener: &str) -> Option<(Code, String)> {
    let door = Door::new(listener, SAME);
    let params = valid_for(authority::client("alice"), Duration::from_secs(600));
    let client = door.client(Some(&door.authority.issue(&params))).await;
    let (mut stream, _upstream) = watching(&client, &door.member).await;
    let ended = in_half_an_hour(&mut stream).await;
    settled().await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(client.is_closed(), ended.is_some());
    ended
}

#[test]
fn what_a_certificate_let_in_ends_with_it() {
    paused(async {
        let ended = outlived("").await;
        assert_eq!(ended, Some((Code::Unavailable, "etcdserver: server stopped".to_owned())));
    });
}

#[test]
fn a_lock_that_waits_ends_with_the_certificate_that_asked_for_it() {
    paused(async {
        let door = Door::new("", SAME);
        let params = valid_for(authority::client("alice"), Duration::from_secs(600));
        let client = door.client(Some(&door.authority.issue(&params))).await;
        let lock = LockRequest { name: "l".into(), lease: 0 }.encode_to_vec();
        let waiting = client.begin(LOCK, lock).await.expect("a call");
        let mut upstream = door.member.called(LOCK).await;
        let end = waiting.finish().await.end;
        assert_eq!(end.told(), (Code::Unavailable, "etcdserver: server stopped"));
        upstream.canceled().await;
    });
}

#[test]
fn or_goes_on_where_the_listener_says_so() {
    paused(async {
        assert_eq!(outlived("on_expiry = \"keep\"\n").await, None);
    });
}
