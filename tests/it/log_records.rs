//! What strangers, and refused clients, can write into the log: a bounded number of records, all of them counted. What a record
//! says of a failed call.

use std::fmt;
use std::io;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use keyward::admin::view::ViewTopic;
use keyward::downstream::session::{RevocationChange, Revocations};
use keyward::gateway::shard_questions::{KickTarget, ShardQuestion};
use keyward::members::membership::AuthSetting;
use keyward::members::version::Version;
use keyward::pb::etcdserverpb::AuthenticateRequest;
use keyward::refusal::{Code, RefusalReason};
use keyward::tasks::Tasks;
use keyward::telemetry;
use keyward::telemetry::access_settings::RecordedCalls;
use keyward::telemetry::rest_metrics::RestLabels;
use keyward::telemetry::single_label::one;
use prost::Message as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::{sleep, timeout};

use crate::audit::Audited;
use crate::client::Client;
use crate::member::Member;
use crate::revocations::decide;
use crate::rig::{Keyward, log_in, paused, renewing, settled, watching};
use crate::words::{
    KEEP_ALIVE, PUT, RANGE, WATCH, create_of, created, put, range, ranged, refused as refused_watch, renew,
    watch, watched,
};

/// What was logged on this thread.
#[derive(Clone, Default)]
pub(crate) struct Log(Arc<Mutex<Vec<u8>>>);

impl fmt::Debug for Log {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&String::from_utf8_lossy(&self.0.lock().expect("no holder panics")))
    }
}

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().expect("no holder panics").extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Log {
    pub(crate) fn listen(&self) -> tracing::subscriber::DefaultGuard {
        let log = self.clone();
        let lines = telemetry::subscriber(&telemetry::LogSettings::default(), move || log.clone());
        tracing::subscriber::set_default(lines)
    }

    fn count(&self, is_one: impl Fn(&str) -> bool) -> usize {
        let log = self.0.lock().expect("no holder panics");
        String::from_utf8_lossy(&log).lines().filter(|line| is_one(line)).count()
    }

    pub(crate) fn lines_with(&self, what: &str) -> usize {
        self.count(|line| line.contains(what))
    }

    fn lines_starting_with(&self, what: &str) -> usize {
        self.count(|line| line.starts_with(what))
    }
}

const ENFORCED: &str = "[policy]\nmode = 'enforce'\nfile = 'policy.toml'\n";

/// The folder of a configuration, with a policy whose role may read and watch `/a/`.
fn policy_folder(binding: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let role = "[[role]]\nname = 'reader'\n[[role.allow]]\nactions = ['read', 'watch']\nprefix = '/a/'\n";
    std::fs::write(folder.path().join("policy.toml"), format!("{role}{binding}")).expect("written");
    folder
}

#[test]
fn refused_strangers_leave_a_bounded_number_of_records_and_all_are_counted() {
    paused(async {
        let member = Member::new(1, &Tasks::default());
        let keyward = Keyward::configured(&[&member], AuthSetting::On, "");
        let log = Log::default();
        let _listening = log.listen();
        let stranger = keyward.client().await.header("token", "kw1_nothing");
        for _ in 0..500 {
            assert_eq!(stranger.call(RANGE, range("k")).await.end.code(), Some(Code::Unauthenticated));
        }
        assert_eq!(log.lines_with("keyward::access"), 100);
        assert_eq!(keyward.metrics.log_records_left_out.get(), 400);
        assert_eq!(keyward.metrics.calls_with(Code::Unauthenticated as u8), 500);
        // A second later there is room for some again.
        tokio::time::advance(Duration::from_secs(1)).await;
        for _ in 0..50 {
            stranger.call(RANGE, range("k")).await;
        }
        assert_eq!(log.lines_with("keyward::access"), 120);
    });
}

/// A client in a loop that Keyward refuses, as with a full disk of the audit log, does not fill the disk of the log too.
#[test]
fn refused_calls_of_a_proved_peer_leave_a_bounded_number_of_records_too() {
    paused(async {
        let folder = policy_folder("[[binding]]\npeer = 'password:*'\nroles = ['reader']\n");
        let member = Member::new(1, &Tasks::default());
        let keyward = Keyward::at(&[&member], AuthSetting::On, folder.path(), "", ENFORCED);
        let log = Log::default();
        let _listening = log.listen();
        let (alice, bob) = (keyward.logged_in("alice").await, keyward.logged_in("bob").await);
        for _ in 0..500 {
            assert_eq!(alice.call(PUT, put(1)).await.end.code(), Some(Code::PermissionDenied));
        }
        assert_eq!(log.lines_with("keyward::access"), 100);
        assert_eq!(keyward.metrics.log_records_left_out.get(), 400);
        bob.call(PUT, put(1)).await;
        assert_eq!(log.lines_with("password:bob"), 1, "another peer has records of its own");
    });
}

/// etcd's own refusal, one of the policy, and one of a limit have the same texts as each other, and different records.
#[test]
fn a_record_says_who_refused_the_call_or_the_watch_and_by_which_rule_or_limit() {
    paused(async {
        let folder = policy_folder("[[binding]]\npeer = 'password:alice'\nroles = ['reader']\n");
        let member = Rc::new(Member::new(1, &Tasks::default()));
        let lines = format!("{ENFORCED}[policy.peer_limits]\nwatches = 1\n");
        let keyward = Keyward::at(&[&member], AuthSetting::On, folder.path(), "", &lines);
        let log = Log::default();
        let _listening = log.listen();
        let alice = keyward.logged_in("alice").await;
        alice.call(PUT, put(1)).await;
        let refused = async {
            member.called(RANGE).await.refuse(Code::PermissionDenied, "etcdserver: permission denied");
        };
        tokio::join!(alice.call(RANGE, range("/a/k")), refused).0.end.code();
        let mut stream = alice.open(WATCH).await.expect("open");
        for key in ["/b", "/a/1", "/a/2"] {
            stream.say(&watch(key, 1)).await;
        }
        settled().await;
        let line = |texts: &[&str]| log.count(|line| texts.iter().all(|text| line.contains(text)));
        for (what, fields) in [
            ("call", r#"refused_by="policy" rule="no_grant: write""#),
            ("call", r#"refused_by="etcd""#),
            ("watch refused", r#"refused_by="policy" rule="no_grant: watch""#),
            ("watch refused", r#"refused_by="limit" limit="peer watches""#),
        ] {
            assert_eq!(
                line(&["keyward::access", what, r#"peer="password:alice""#, fields]),
                1,
                "{fields}: {log:?}"
            );
        }
        let rows = keyward.shown(ViewTopic::Clients).await;
        assert_eq!((&rows[0]["failed"], &rows[0]["last_error_by"]), (&4.into(), &"limit".into()));
    });
}

/// The fields of an access record, and the number of its lines.
fn access_lines(log: &Log, texts: &[&str]) -> usize {
    log.count(|line| line.contains("keyward::access") && texts.iter().all(|text| line.contains(text)))
}

/// A client is told the same for several causes: `etcdserver: server stopped`, `invalid auth token`. The records tell them apart.
#[test]
fn a_stream_that_keyward_ends_has_the_cause_in_its_record_and_in_the_metric() {
    paused(async {
        for cause in ["draining", "kicked", "blocked", "token"] {
            let member = Rc::new(Member::new(1, &Tasks::default()));
            let keyward = Keyward::with_auth(&[&member]);
            keyward.metrics.refusals.name_reasons(RefusalReason::NAMES);
            let log = Log::default();
            let _listening = log.listen();
            let client = keyward.logged_in("alice").await;
            let (watching, _watched) = watching(&client, &member).await;
            let (renewing, _renewed) = renewing(&client, &member).await;
            let known = Revocations::default();
            match cause {
                "draining" => keyward.drain(Duration::from_secs(5)),
                "kicked" => {
                    let target = KickTarget::Named("password:alice".into());
                    let ask = |answer| ShardQuestion::Kick(target.clone(), answer);
                    let kicked = keyward.admin().viewer.questions.ask(ask).await;
                    assert!(kicked.is_ok(), "every shard answers");
                }
                "blocked" => drop(decide(&keyward, &known, &RevocationChange::Block("alice".into()))),
                _ => drop(decide(&keyward, &known, &RevocationChange::Revoke("alice".into()))),
            }
            let ends = [watching.finish().await, renewing.finish().await].map(|outcome| outcome.end);
            assert_eq!(ends[0].told(), ends[1].told(), "{cause}");
            settled().await;
            let by = format!("refused_by={cause:?}");
            for method in ["/etcdserverpb.Watch/Watch", "/etcdserverpb.Lease/LeaseKeepAlive"] {
                assert_eq!(access_lines(&log, &[method, &by]), 1, "{cause} {method}: {log:?}");
            }
            assert_eq!(access_lines(&log, &["refused_by"]), 2, "{cause}: {log:?}");
            assert_eq!(refused(&keyward, cause), 2, "{cause}");
        }
    });
}

#[test]
fn a_watch_that_a_changed_policy_ends_leaves_a_record_with_the_rule() {
    paused(async {
        let folder = policy_folder("[[binding]]\npeer = 'password:alice'\nroles = ['reader']\n");
        let member = Rc::new(Member::new(1, &Tasks::default()));
        let keyward = Keyward::at(&[&member], AuthSetting::On, folder.path(), "", ENFORCED);
        let log = Log::default();
        let _listening = log.listen();
        let alice = keyward.logged_in("alice").await;
        let mut stream = alice.open(WATCH).await.expect("open");
        stream.say(&watch("/a/1", 1)).await;
        let mut call = member.called(WATCH).await;
        let create = create_of(&call.messages.next().await.expect("a create")).expect("a create");
        call.say(&created(create.watch_id, 4)).await.expect("taken");
        stream.next().await.expect("Created");
        keyward.metrics.refusals.name_reasons(RefusalReason::NAMES);
        std::fs::write(folder.path().join("policy.toml"), "").expect("written");
        keyward.publish_rules(folder.path(), "", ENFORCED);
        stream.next().await.expect("the end of the watch");
        let fields = ["watch refused", r#"refused_by="policy" rule="no_role: watch""#];
        assert_eq!(access_lines(&log, &fields), 1, "{log:?}");
        assert_eq!(refused(&keyward, "policy"), 1);
        let rows = keyward.shown(ViewTopic::Clients).await;
        assert_eq!((&rows[0]["failed"], &rows[0]["last_error_by"]), (&1.into(), &"policy".into()));
    });
}

/// The policy has no part in it: the member's own cancel of the create is the refusal.
#[test]
fn a_watch_that_etcds_roles_refuse_leaves_a_record_and_counts_as_failed() {
    paused(async {
        let member = Rc::new(Member::new(1, &Tasks::default()));
        let keyward = Keyward::with_auth(&[&member]);
        keyward.metrics.refusals.name_reasons(RefusalReason::NAMES);
        let log = Log::default();
        let _listening = log.listen();
        let alice = keyward.logged_in("alice").await;
        let mut stream = alice.open(WATCH).await.expect("open");
        stream.say(&watch("/a/1", 1)).await;
        let mut call = member.called(WATCH).await;
        call.messages.next().await.expect("a create");
        call.say(&refused_watch(ROLE_DENIES)).await.expect("taken");
        let told = watched(&stream.next().await.expect("the refusal"));
        assert_eq!((told.canceled, &*told.cancel_reason), (true, ROLE_DENIES), "as the member said it");
        let fields = [
            "watch refused",
            r#"code="PermissionDenied""#,
            r#"reason="etcdserver: permission denied""#,
            r#"refused_by="etcd""#,
        ];
        assert_eq!(access_lines(&log, &fields), 1, "{log:?}");
        assert_eq!(access_lines(&log, &["watch refused", "rule="]), 0, "no rule of Keyward's: {log:?}");
        assert_eq!(refused(&keyward, "member"), 1);
        let rows = keyward.shown(ViewTopic::Clients).await;
        assert_eq!((&rows[0]["failed"], &rows[0]["last_error_by"]), (&1.into(), &"etcd".into()));
        assert_eq!(rows[0]["last_error"], "PermissionDenied");
    });
}

const MOVE_LEADER: &str = "/etcdserverpb.Maintenance/MoveLeader";
const USER_LIST: &str = "/etcdserverpb.Auth/UserList";
const ROLE_DENIES: &str = "rpc error: code = PermissionDenied desc = etcdserver: permission denied";

/// The client is told what it would be told of a wrong password, and only an operator is told the difference.
#[test]
fn a_blocked_users_login_is_told_apart_from_a_wrong_password() {
    paused(async {
        let member = Member::new(1, &Tasks::default());
        let keyward = Keyward::with_auth(&[&member]);
        keyward.metrics.refusals.name_reasons(RefusalReason::NAMES);
        let log = Log::default();
        let _listening = log.listen();
        decide(&keyward, &Revocations::default(), &RevocationChange::Block("carol".into()));
        let client = keyward.client().await;
        let told = async |name: &str| {
            let login = AuthenticateRequest { name: name.into(), password: "wrong".into() };
            client.call("/etcdserverpb.Auth/Authenticate", login.encode_to_vec()).await.end
        };
        assert_eq!(told("carol").await.told(), told("alice").await.told());
        for (user, by) in [("carol", "blocked"), ("alice", "password")] {
            let (peer, by_field) = (format!("peer=\"password:{user}\""), format!("refused_by={by:?}"));
            assert_eq!(access_lines(&log, &[&peer, &by_field]), 1, "{user}: {log:?}");
            assert_eq!(refused(&keyward, by), 1, "{user}");
        }
        let logins = |result| keyward.metrics.logins.get_or_create(&one("result", result)).get();
        assert_eq!((logins("blocked"), logins("refused")), (1, 1));
        let rows = keyward.shown(ViewTopic::Clients).await;
        assert_eq!(rows[0]["last_error_by"], "password");
    });
}

/// A blocked user's program that goes on asking keeps its connections. A name that a connection claims ends nobody's proved streams.
#[test]
fn a_blocked_user_who_goes_on_asking_is_shown_and_kicked_by_name() {
    paused(async {
        let member = Member::new(1, &Tasks::default());
        let keyward = Keyward::with_auth(&[&member]);
        decide(&keyward, &Revocations::default(), &RevocationChange::Block("carol".into()));
        let logs_in = async |client: &Client, name: &str| {
            let login = AuthenticateRequest { name: name.into(), password: "wrong".into() };
            client.call("/etcdserverpb.Auth/Authenticate", login.encode_to_vec()).await
        };
        let (carol, bob) = (keyward.client().await, keyward.client().await);
        let alice = keyward.logged_in("alice").await;
        let (_watching, _watched) = watching(&alice, &member).await;
        // Alice's stream on a connection whose last call showed nobody.
        let shared = keyward.client().await;
        let token = log_in(&shared, "alice").await;
        let alices = shared.again().header("token", &token);
        let (_watching_too, _watched_too) = watching(&alices, &member).await;
        let refused = async {
            member.called(RANGE).await.refuse(Code::InvalidArgument, "etcdserver: user name is empty")
        };
        tokio::join!(shared.call(RANGE, range("/k")), refused);
        for (client, name) in [(&carol, "carol"), (&bob, "bob"), (&alice, "carol"), (&shared, "carol")] {
            logs_in(client, name).await;
        }
        let rows = keyward.shown(ViewTopic::Clients).await;
        let named = |name: &str, user: Option<&str>| {
            rows.iter().filter(|row| row["blocked_login"] == name && row["user"].as_str() == user).count()
        };
        assert_eq!(
            (named("carol", None), named("carol", Some("alice")), named("bob", None)),
            (2, 1, 0),
            "{rows:?}"
        );
        let kick = async |name: &str| {
            let target = KickTarget::Named(name.into());
            let ask = |answer| ShardQuestion::Kick(target.clone(), answer);
            keyward.admin().viewer.questions.ask(ask).await.expect("every shard answers")
        };
        let kicked = kick("carol").await;
        assert_eq!((kicked.len(), kicked[0].client.user.as_deref()), (1, None), "{kicked:?}");
        assert!(kick("bob").await.is_empty(), "a wrong password gives no name");
        assert_eq!(kick("alice").await.len(), 1);
    });
}

/// The second and third refusal of a network come after two seconds and three: etcdctl waits for two.
#[test]
fn a_login_given_up_before_its_refusal_is_told_has_the_reason_and_counts_once() {
    paused(async {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("audit.log");
        let member = Member::new(1, &Tasks::default());
        let lines = format!("[audit]\nfile = {file:?}\nevents = ['logins']\n");
        let keyward = Keyward::at(&[&member], AuthSetting::On, folder.path(), "", &lines);
        keyward.metrics.refusals.name_reasons(RefusalReason::NAMES);
        let log = Log::default();
        let _listening = log.listen();
        decide(&keyward, &Revocations::default(), &RevocationChange::Block("carol".into()));
        let users = [("carol", "blocked"), ("alice", "password")];
        let logins = |result| keyward.metrics.logins.get_or_create(&one("result", result)).get();
        for (limit, code) in [(None, "Canceled"), (Some("300m"), "DeadlineExceeded")] {
            for (user, by) in users {
                let client = keyward.client().await;
                let client = match limit {
                    None => client,
                    Some(limit) => client.header("grpc-timeout", limit),
                };
                let login = AuthenticateRequest { name: user.into(), password: format!("wrong{code}") };
                let told = client.call("/etcdserverpb.Auth/Authenticate", login.encode_to_vec());
                let told = timeout(Duration::from_millis(500), told).await;
                assert_eq!(told.is_ok(), limit.is_some(), "{user} {code}");
                settled().await;
                let fields = [format!("peer=\"password:{user}\""), format!("code={code:?}")];
                let by_field = format!("refused_by={by:?}");
                assert_eq!(access_lines(&log, &[&fields[0], &fields[1], &by_field]), 1, "{log:?}");
                let rows = keyward.shown(ViewTopic::Clients).await;
                let row = rows.iter().find(|row| row["last_error"] == code && row["last_error_by"] == by);
                assert_eq!(row.expect("a row of the connection")["failed"], 1, "{rows:?}");
            }
        }
        // The checks go on, and the answers that nobody waits for count no second time.
        sleep(Duration::from_secs(30)).await;
        for (_, by) in users {
            assert_eq!(refused(&keyward, by), 2, "{by}");
        }
        assert_eq!((logins("blocked"), logins("refused")), (2, 2));
        let (records, _) = Audited { member, keyward, folder }.ended().await;
        for (user, by) in users {
            let of = records.iter().filter(|record| record["user"] == user && record["refused_by"] == by);
            assert_eq!(of.count(), 2, "{user}: {records:?}");
        }
    });
}

/// `etcdserver: permission denied` of the namespace, of a check in place of an old member's, of etcd and of the policy.
#[test]
fn causes_with_one_text_are_told_apart_in_the_log_the_audit_log_the_view_and_the_metric() {
    paused(async {
        let namespace = "[[binding]]\npeer = 'password:bob'\nnamespace = '/t/'\nmode = 'shadow'\n";
        let role =
            "[[role]]\nname = 'all'\n[[role.allow]]\nactions = ['read', 'maintenance']\neverything = true\n";
        let carol = "[[binding]]\npeer = 'password:carol'\nroles = ['all']\n";
        let folder = policy_folder(&format!("{role}{namespace}{carol}"));
        let file = folder.path().join("audit.log");
        let mut member = Member::new(1, &Tasks::default());
        member.version = Version::parse("3.5.1").expect("a version");
        let lines = format!("{ENFORCED}[audit]\nfile = {file:?}\nevents = ['refusals']\n");
        let keyward = Keyward::at(&[&member], AuthSetting::On, folder.path(), "", &lines);
        keyward.metrics.refusals.name_reasons(RefusalReason::NAMES);
        let log = Log::default();
        let _listening = log.listen();
        let [bob, carol] = [keyward.logged_in("bob").await, keyward.logged_in("carol").await];
        let denies = async |path: &'static str| {
            member.called(path).await.refuse(Code::PermissionDenied, "etcdserver: permission denied");
        };
        let mut told = Vec::new();
        told.push(bob.call(USER_LIST, b"").await.end);
        let by_patch = tokio::join!(carol.call(MOVE_LEADER, b""), denies(USER_LIST)).0;
        told.push(by_patch.end);
        told.push(carol.call(PUT, put(1)).await.end);
        told.push(tokio::join!(carol.call(RANGE, range("/k")), denies(RANGE)).0.end);
        assert!(told.iter().all(|end| end.told() == told[0].told()), "{told:?}");
        let rows = keyward.shown(ViewTopic::Clients).await;
        let last_by = rows.iter().map(|row| (row["user"].clone(), row["last_error_by"].clone()));
        let last_by: Vec<_> = last_by.filter(|(_, by)| !by.is_null()).collect();
        assert!(last_by.contains(&("bob".into(), "namespace".into())), "{last_by:?}");
        assert!(last_by.contains(&("carol".into(), "etcd".into())), "{last_by:?}");
        let causes = ["namespace", "patch", "policy", "etcd"];
        for by in causes {
            let field = format!("refused_by={by:?}");
            assert_eq!(access_lines(&log, &[&field]), 1, "{by}: {log:?}");
        }
        // Calls that a member refuses are no refusals of Keyward's.
        assert_eq!(["namespace", "patch", "policy"].map(|by| refused(&keyward, by)), [1, 1, 1]);
        drop((bob, carol));
        let (records, _) = Audited { member, keyward, folder }.ended().await;
        for by in causes {
            let of = records.iter().filter(|record| record["refused_by"] == by).count();
            assert_eq!(of, 1, "{by}: {records:#?}");
        }
    });
}

#[test]
fn a_refused_renewal_names_the_rule() {
    paused(async {
        let folder = policy_folder("[[binding]]\npeer = 'password:alice'\nroles = ['reader']\n");
        let member = Rc::new(Member::new(1, &Tasks::default()));
        let keyward = Keyward::at(&[&member], AuthSetting::On, folder.path(), "", ENFORCED);
        let log = Log::default();
        let _listening = log.listen();
        let alice = keyward.logged_in("alice").await;
        let mut stream = alice.open(KEEP_ALIVE).await.expect("open");
        stream.say(&renew(7)).await;
        assert_eq!(stream.next().await.expect_err("refused").code(), Some(Code::PermissionDenied));
        let fields = ["LeaseKeepAlive", r#"refused_by="policy" rule="no_grant: lease""#];
        assert_eq!(access_lines(&log, &fields), 1, "{log:?}");
        let rows = keyward.shown(ViewTopic::Clients).await;
        assert_eq!(rows[0]["last_error_rule"], "no_grant: lease");
    });
}

/// The calls that Keyward refused for this reason.
fn refused(keyward: &Keyward, reason: &str) -> u64 {
    let at = RefusalReason::NAMES.iter().position(|name| *name == reason).expect("a reason");
    keyward.metrics.refusals.counts()[at]
}

#[test]
fn a_line_is_heard_although_a_thread_without_a_listener_logged_it_first() {
    paused(async {
        let log = Log::default();
        let _listening = log.listen();
        let say = || tracing::info!(target: "keyward", "the same line");
        std::thread::spawn(say).join().expect("no panic");
        say();
        assert_eq!(log.lines_with("the same line"), 1);
    });
}

/// A record of the text format, as a member may write it into its status.
const FORGED: &str =
    "busy\n2026-01-01T00:00:00.000000Z  INFO keyward::access: call code=Ok user=\"root\"\u{1b}[2K";

#[test]
fn a_members_status_text_makes_no_log_lines() {
    paused(async {
        let member = Member::new(1, &Tasks::default());
        let keyward = Keyward::with_auth(&[&member]);
        let log = Log::default();
        let _listening = log.listen();
        member.refuses_logins_with(FORGED);
        let client = keyward.client().await;
        let login = AuthenticateRequest { name: "alice".into(), password: "right".into() };
        client.call("/etcdserverpb.Auth/Authenticate", login.encode_to_vec()).await;
        assert!(log.lines_with(format!("{FORGED:?}").trim_matches('"')) > 0, "it is told, escaped");
        assert_eq!(
            (log.lines_with("\u{1b}"), log.lines_starting_with("2026-01-01T00:00:00.000000Z")),
            (0, 0)
        );
    });
}

#[test]
fn with_access_all_every_call_that_is_served_leaves_a_record() {
    paused(async {
        let member = Rc::new(Member::new(1, &Tasks::default()));
        let keyward = Keyward::configured(&[&member], AuthSetting::Off, "[log]\naccess = 'all'\n");
        let log = Log::default();
        let _listening = log.listen();
        let client = keyward.client().await;
        for _ in 0..300 {
            let script = async { member.called(RANGE).await.reply(&ranged(1)).await };
            let (outcome, ()) = tokio::join!(client.call(RANGE, range("k")), script);
            assert_eq!(outcome.end.code(), Some(Code::Ok));
        }
        drop(client);
        settled().await;
        assert_eq!(log.lines_with("keyward::access"), 300);
        assert_eq!(keyward.metrics.log_records_left_out.get(), 0);
    });
}

#[test]
fn a_request_without_grpc_is_counted_and_logged_within_the_same_bound() {
    paused(async {
        let member = Rc::new(Member::new(1, &Tasks::default()));
        let keyward = Keyward::configured(&[&member], AuthSetting::Off, "[log]\naccess = 'all'\n");
        let log = Log::default();
        let _listening = log.listen();
        let requests = [
            ("GET", "/v3/kv/range", "/v3/", 405),
            ("GET", "/v2/keys/a-key", "/v2/", 404),
            ("GET", "/health", "/health", 200),
            ("GET", "/x?a-key", "other", 404),
        ];
        for _ in 0..40 {
            for (method, path, _, _) in requests {
                let said = format!(
                    "{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nUser-Agent: jet\"c\r\n\r\n"
                );
                let mut io = keyward.connect();
                io.write_all(said.as_bytes()).await.expect("room");
                drop(io.read_to_end(&mut Vec::new()).await);
            }
        }
        for (_, _, path, status) in requests {
            let counted = keyward.metrics.rest_requests.get_or_create(&RestLabels { path, status }).get();
            assert_eq!(counted, 40, "{path}");
        }
        assert_eq!(log.lines_with("request without gRPC"), 100);
        assert_eq!(keyward.metrics.log_records_left_out.get(), 60);
        assert!(log.lines_with("/v3/kv/range") > 0 && log.lines_with(r#"user_agent="jet\"c""#) > 0);
        assert_eq!(log.lines_with("a-key"), 0, "no key is shown");
    });
}

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";

#[test]
fn by_default_failed_and_slow_calls_leave_a_record_that_says_why_and_whose() {
    paused(async {
        let member = Rc::new(Member::new(1, &Tasks::default()));
        let keyward = Keyward::configured(&[&member], AuthSetting::On, "[log]\nkeys = true\n");
        let log = Log::default();
        let _listening = log.listen();
        let client = keyward
            .client()
            .await
            .header("user-agent", "backup/1.2 \"nightly\"")
            .header("traceparent", &format!("00-{TRACE}-b7ad6b7169203331-01"));
        let token = log_in(&client, "alice").await;
        let client = client.header("token", &token);
        let served = async |wait| {
            let script = async {
                let called = member.called(RANGE).await;
                sleep(Duration::from_millis(wait)).await;
                called.reply(&ranged(1)).await;
            };
            let (outcome, ()) = tokio::join!(client.call(RANGE, range("/app/k")), script);
            assert_eq!(outcome.end.code(), Some(Code::Ok));
        };
        served(300).await;
        assert_eq!(log.lines_with("keyward::access"), 0, "neither failed nor slow");
        served(301).await;
        let refused = async {
            member.called(RANGE).await.refuse(Code::PermissionDenied, "etcdserver: permission denied");
        };
        let (outcome, ()) = tokio::join!(client.call(RANGE, range("/app/k")), refused);
        assert_eq!(outcome.end.code(), Some(Code::PermissionDenied));
        let trace = format!("trace={TRACE:?}");
        let shared = [
            r#"peer="password:alice" user="alice" session="#,
            r#"user_agent="backup/1.2 \"nightly\"""#,
            &trace,
        ];
        let is_of_alice = |line: &str| shared.iter().all(|field| line.contains(field));
        for fields in [
            r#"code="OK""#,
            r#"chosen_by="slow""#,
            r#"code="PermissionDenied""#,
            r#"reason="etcdserver: permission denied""#,
            r#"chosen_by="error""#,
        ] {
            let count = log.count(|line| line.contains("keyward::access") && line.contains(fields));
            assert_eq!(count, 1, "{fields}: {log:?}");
        }
        assert_eq!(log.lines_with(r#"keys="read \"/app/k\"""#), 2, "{log:?}");
        assert_eq!(log.count(is_of_alice), 2, "{log:?}");
    });
}

#[test]
fn the_choice_of_calls_changes_while_running() {
    paused(async {
        let member = Rc::new(Member::new(1, &Tasks::default()));
        let keyward = Keyward::configured(&[&member], AuthSetting::Off, "[log]\naccess = 'off'\n");
        let log = Log::default();
        let _listening = log.listen();
        let client = keyward.client().await.header("user-agent", "first");
        let fails = async || {
            let script = async { member.called(RANGE).await.refuse(Code::Unknown, "no") };
            tokio::join!(client.call(RANGE, range("k")), script)
        };
        fails().await;
        assert_eq!(log.lines_with("keyward::access"), 0);
        for (calls, records) in [(RecordedCalls::Errors, 1), (RecordedCalls::Off, 1), (RecordedCalls::All, 2)]
        {
            let mut config = keyward.config.load().as_ref().clone();
            config.access_log.calls = calls;
            keyward.config.publish(config);
            fails().await;
            assert_eq!(log.lines_with("keyward::access"), records, "{calls:?}");
        }
        assert_eq!(log.lines_with(r#"user_agent="first""#), 2);
    });
}

#[test]
fn a_watch_stream_has_the_ranges_of_its_watches_and_its_end_by_the_client_is_no_error() {
    paused(async {
        let member = Rc::new(Member::new(1, &Tasks::default()));
        let keyward = Keyward::configured(
            &[&member],
            AuthSetting::Off,
            "[log]\naccess = 'slow'\nsample = 1\nkeys = true\n",
        );
        let log = Log::default();
        let _listening = log.listen();
        let client = keyward.client().await;
        let mut stream = client.open(WATCH).await.expect("open");
        stream.say(&watch("/a", 5)).await;
        stream.say(&watch("/b", 5)).await;
        settled().await;
        drop((stream, client));
        settled().await;
        let line = r#"keys="watch \"/a\"; watch \"/b\"""#;
        assert_eq!(log.lines_with(line), 1, "{log:?}");
        assert_eq!(log.lines_with(r#"code="Canceled""#), 1, "{log:?}");
        assert_eq!(log.lines_with(r#"chosen_by="sample""#), 1, "{log:?}");
    });
}
