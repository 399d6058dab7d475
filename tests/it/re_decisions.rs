//! Whatever lives is decided upon again when rules, users or revocations change (rules 13, 29): every kind of peer that is
//! another etcd user then, or nobody, ends; who is the same notices nothing.

use std::path::Path;

use keyward::downstream::session::{RevocationChange, Revocations};
use keyward::members::membership::AuthSetting;
use keyward::refusal::Code;
use keyward::tasks::Tasks;

use crate::authority::{Authority, connect};
use crate::client::{Client, Stream};
use crate::jwts::{ISSUER, Issuer, claims};
use crate::member::{Call, Member};
use crate::revocations::{all_kinds, decide, watching};
use crate::rig::{Keyward, log_in, paused, settled};
use crate::words::{INVALID_TOKEN, RANGE, event, range, ranged, watched};

const DENIED: (Code, &str) = (Code::PermissionDenied, "etcdserver: permission denied");
const NOBODY: (Code, &str) = (Code::InvalidArgument, "etcdserver: user name is empty");
const BAD_TOKEN: (Code, &str) = (Code::Unauthenticated, INVALID_TOKEN);
/// Whoever is told so comes again, and is told then by what it shows.
const COME_AGAIN: (Code, &str) = (Code::Unavailable, "etcdserver: server stopped");
const USERS: [&str; 3] = ["app", "alice", "bob"];
const LISTENER: &str = "default_user = \"app\"\n\
    tls = { cert = \"server.crt\", key = \"server.key\", client_ca = \"ca.crt\", client_ca_name = \"staff\", \
    client_auth = \"optional\" }\n";
const JWT: &str = "audience = \"etcd\"\nkeys = \"ci.pem\"\n";
const RULES: &str = "\
    [[map]]\npeer = \"cert:staff:CN=web\"\nas = \"app\"\n\
    [[map]]\npeer = \"jwt:https://ci.test:8443:ci\"\nas = \"app\"\n\
    [[map]]\npeer = \"file:fred\"\nas = \"app\"\n\
    [mapping]\ndefault = \"bob\"\n\
    [login]\nsources = [\"file\", \"etcd\"]\nusers_file = \"users\"\n";
/// The peers, and as whom they go: by certificate, JWT, listener and users file as `app`, by another certificate as the default,
/// and with passwords of their own.
const PEERS: [(&str, &str); 7] = [
    ("certificate", "app"),
    ("jwt", "app"),
    ("listener", "app"),
    ("file", "app"),
    ("other certificate", "bob"),
    ("password with a row", "alice"),
    ("password", "carol"),
];

/// Keyward with every kind of peer, in front of one scripted member.
struct Place {
    folder: tempfile::TempDir,
    authority: Authority,
    issuer: Issuer,
    member: Member,
    keyward: Keyward,
}

fn row(user: &str) -> String {
    format!("[[user]]\nname = \"{user}\"\npassword_file = \"{user}\"\n")
}

fn lines() -> String {
    let rows: String = USERS.into_iter().map(row).collect();
    format!("{rows}[[jwt]]\nissuer = \"{ISSUER}\"\n{JWT}{RULES}")
}

fn write(folder: &Path, name: &str, text: &str) {
    std::fs::write(folder.join(name), text).expect("written");
}

impl Place {
    fn new() -> Self {
        let (authority, issuer) = (Authority::new(), Issuer::new());
        let folder = tempfile::tempdir().expect("a folder");
        authority.write(folder.path(), "ca");
        write(folder.path(), "ci.pem", &issuer.0.public_key_pem());
        write(folder.path(), "users", &crate::logins::line("fred", "right"));
        USERS.iter().for_each(|user| write(folder.path(), user, "right"));
        let member = Member::new(1, &Tasks::default());
        let keyward = Keyward::at(&[&member], AuthSetting::On, folder.path(), LISTENER, &lines());
        Self { folder, authority, issuer, member, keyward }
    }

    async fn client(&self, certificate: Option<&str>) -> Client {
        let shown = certificate.map(|name| self.authority.client(name));
        let io = connect(self.keyward.connect(), self.authority.tls(shown.as_ref())).await;
        Client::over(io.expect("a handshake"), &self.keyward.tasks).await
    }

    async fn peer(&self, kind: &str) -> Client {
        let user = match kind {
            "certificate" => return self.client(Some("web")).await,
            "other certificate" => return self.client(Some("stranger")).await,
            "listener" => return self.client(None).await,
            "jwt" => {
                return self.client(None).await.header("token", &self.issuer.token(&claims("ci")));
            }
            "file" => "fred",
            "password with a row" => "alice",
            _ => "carol",
        };
        let client = self.client(None).await;
        let token = log_in(&client, user).await;
        client.header("token", &token)
    }

    async fn peers(&self) -> Vec<Living> {
        let mut all = Vec::new();
        for (kind, user) in PEERS {
            let client = self.peer(kind).await;
            let (stream, call) = watching(&client, &self.member).await;
            assert!(call.token().is_some_and(|token| token.starts_with(&format!("{user}."))), "{kind}");
            all.push(Living { kind, client, stream, call });
        }
        all
    }

    /// Publishes the configuration, with each of these replaced.
    fn publish(&self, changes: &[(String, String)]) {
        let (mut listener, mut lines) = (LISTENER.to_owned(), lines());
        for (from, to) in changes {
            assert!(listener.contains(from) || lines.contains(from), "{from}");
            (listener, lines) = (listener.replace(from, to), lines.replace(from, to));
        }
        self.keyward.publish_rules(self.folder.path(), &listener, &lines);
    }

    /// A call of this client reaches the member as this user.
    async fn goes_as(&self, client: &Client, user: &str) {
        let script = async {
            let call = self.member.called(RANGE).await;
            assert!(call.token().is_some_and(|token| token.starts_with(&format!("{user}."))), "{user}");
            call.reply(&ranged(1)).await;
        };
        let (outcome, ()) = tokio::join!(client.call(RANGE, range("k")), script);
        outcome.message();
    }
}

/// A peer and its watch.
struct Living {
    kind: &'static str,
    client: Client,
    stream: Stream,
    call: Call,
}

/// These end with what is told, and have their streams upstream ended; all others go on.
async fn only_these_end(all: Vec<Living>, ended: &[(&str, (Code, &str))], why: &str) {
    for Living { kind, mut stream, mut call, .. } in all {
        let told = ended.iter().find(|(ended, _)| *ended == kind);
        if let Some((_, told)) = told {
            let outcome = stream.finish().await;
            assert_eq!(outcome.end.told(), *told, "{why}: {kind}");
            assert!(outcome.messages.is_empty(), "{why}: {kind} heard something more");
            call.canceled().await;
        } else {
            settled().await;
            call.say(&event(1, 10, 1)).await.unwrap_or_else(|end| panic!("{why}: {kind}: {end:?}"));
            let heard = stream.next().await.unwrap_or_else(|end| panic!("{why}: {kind}: {end:?}"));
            assert_eq!(watched(&heard).events.len(), 1, "{why}: {kind}");
        }
    }
}

/// What changes, how, and who ends with what told.
type Case = (&'static str, Vec<(String, String)>, Vec<(&'static str, (Code, &'static str))>);

fn cases() -> Vec<Case> {
    let rule = |peer: &str, outcome: &str| format!("[[map]]\npeer = \"{peer}\"\n{outcome}\n");
    let (app, deny, same) = ("as = \"app\"", "deny = true", "as = \"same\"");
    let (web, ci, fred) = ("cert:staff:CN=web", "jwt:https://ci.test:8443:ci", "file:fred");
    let default = "[mapping]\ndefault = \"bob\"\n";
    let issuer = format!("[[jwt]]\nissuer = \"{ISSUER}\"\n{JWT}");
    let by_default = "default_user = \"app\"\n";
    let to = |from: &str, to: &str| vec![(from.to_owned(), to.to_owned())];
    let refused = |peer| to(&rule(peer, app), &rule(peer, deny));
    let row_goes = [to(&row("app"), ""), to(by_default, ""), refused(web), to(app, same)].concat();
    let bobs_too = rule("password:carol", "as = \"bob\"") + default;
    vec![
        ("nothing", to("audience", "audience"), vec![]),
        ("another rule, the same user", to("CN=web", "CN=w*"), vec![]),
        ("no rule but the default", to(&rule(web, app), ""), vec![("certificate", BAD_TOKEN)]),
        ("another user", to(&rule(web, app), &rule(web, "as = \"alice\"")), vec![("certificate", BAD_TOKEN)]),
        ("a rule refuses a certificate", refused(web), vec![("certificate", DENIED)]),
        ("a rule refuses a JWT", refused(ci), vec![("jwt", DENIED)]),
        ("a rule refuses a file login", refused(fred), vec![("file", DENIED)]),
        ("the default goes", to(default, ""), vec![("other certificate", DENIED)]),
        ("a password is another user", to(default, &bobs_too), vec![("password", BAD_TOKEN)]),
        ("the listener's default goes", to(by_default, ""), vec![("listener", NOBODY)]),
        (
            "the listener's default is another",
            to(by_default, "default_user = \"bob\"\n"),
            vec![("listener", BAD_TOKEN)],
        ),
        (
            "certificates count no more",
            to(by_default, &format!("{by_default}identify = [\"token\", \"jwt\", \"default\"]\n")),
            // The other one is by default who it was by its certificate.
            vec![("other certificate", BAD_TOKEN)],
        ),
        (
            "a row goes",
            row_goes,
            vec![("certificate", DENIED), ("jwt", DENIED), ("file", DENIED), ("listener", NOBODY)],
        ),
        ("a row goes, and its own password is left", to(&row("alice"), ""), vec![]),
        ("an issuer goes", [to(&issuer, ""), to(&rule(ci, app), "")].concat(), vec![("jwt", BAD_TOKEN)]),
        ("another audience", to("\"etcd\"\nkeys", "\"x\"\nkeys"), vec![("jwt", BAD_TOKEN)]),
    ]
}

#[test]
fn rules_that_change_end_whom_they_make_another_and_nobody_else() {
    for (why, changes, ended) in cases() {
        paused(async move {
            let place = Place::new();
            let all = place.peers().await;
            place.publish(&changes);
            only_these_end(all, &ended, why).await;
        });
    }
}

#[test]
fn keys_and_lines_that_change_end_who_was_proved_by_them() {
    paused(async {
        let place = Place::new();
        let all = place.peers().await;
        write(place.folder.path(), "ci.pem", &Issuer::new().0.public_key_pem());
        place.publish(&[]);
        only_these_end(all, &[("jwt", BAD_TOKEN)], "other keys").await;
    });
    for (users, why) in [(crate::logins::line("fred", "new"), "another password"), (String::new(), "no line")]
    {
        paused(async move {
            let place = Place::new();
            let all = place.peers().await;
            write(place.folder.path(), "users", &format!("{users}{}", crate::logins::line("gina", "right")));
            place.publish(&[]);
            only_these_end(all, &[("file", COME_AGAIN)], why).await;
        });
    }
}

#[test]
fn a_user_who_is_revoked_has_all_that_lives_as_it_ended_whoever_it_is_by() {
    paused(async {
        let place = Place::new();
        let all = place.peers().await;
        let clients: Vec<_> = all.iter().map(|living| (living.kind, living.client.again())).collect();
        decide(&place.keyward, &Revocations::default(), &RevocationChange::Revoke("app".into()));
        let ended = ["certificate", "jwt", "listener", "file"].map(|kind| (kind, BAD_TOKEN));
        only_these_end(all, &ended, "revoked").await;
        // What proves them is as good as before: who is to stay out is blocked.
        for ((_, client), (_, user)) in clients.iter().zip(PEERS) {
            place.goes_as(client, user).await;
        }
    });
}

#[test]
fn a_user_who_is_blocked_is_nobodys_until_it_is_not() {
    paused(async {
        let place = Place::new();
        let all = place.peers().await;
        let clients: Vec<_> = all.iter().map(|living| (living.kind, living.client.again())).collect();
        let known = decide(&place.keyward, &Revocations::default(), &RevocationChange::Block("app".into()));
        let shut = ["certificate", "jwt", "listener", "file"];
        only_these_end(all, &shut.map(|kind| (kind, DENIED)), "blocked").await;
        for ((kind, client), (_, user)) in clients.iter().zip(PEERS) {
            if shut.contains(kind) {
                assert_eq!(client.call(RANGE, range("k")).await.end.told(), DENIED, "{kind}");
                let mut stream = client.open(crate::words::WATCH).await.expect("open");
                assert_eq!(stream.next().await.expect_err("refused").told(), DENIED, "{kind}");
            } else {
                place.goes_as(client, user).await;
            }
        }
        settled().await;
        assert!(place.member.was_called_again().is_none(), "nothing of a blocked user arrives");
        assert_eq!(place.keyward.metrics.peers_refused.get(), 8);
        decide(&place.keyward, &known, &RevocationChange::Unblock("app".into()));
        for ((_, client), (_, user)) in clients.iter().zip(PEERS) {
            place.goes_as(client, user).await;
        }
    });
}

#[test]
fn every_kind_of_life_ends_with_its_certificate_s_user() {
    paused(async {
        let place = Place::new();
        let client = place.peer("certificate").await;
        let living = all_kinds(&client, &place.member).await;
        decide(&place.keyward, &Revocations::default(), &RevocationChange::Block("app".into()));
        for (path, stream, mut call) in living {
            let outcome = stream.finish().await;
            assert_eq!(outcome.end.told(), DENIED, "{path}");
            assert!(outcome.messages.is_empty(), "{path} said something more");
            call.canceled().await;
        }
    });
}

#[test]
fn while_nobody_knows_who_is_blocked_nobody_begins_and_what_lives_goes_on() {
    paused(async {
        let place = Place::new();
        let all = place.peers().await;
        let clients: Vec<_> = all.iter().map(|living| (living.kind, living.client.again())).collect();
        place.keyward.sealer.apply_revocations(None);
        for (kind, client) in &clients {
            assert_eq!(client.call(RANGE, range("k")).await.end.told().0, Code::Unavailable, "{kind}");
        }
        settled().await;
        assert!(place.member.was_called_again().is_none());
        only_these_end(all, &[], "unknown").await;
    });
}
