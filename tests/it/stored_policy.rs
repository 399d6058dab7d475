//! The policy stored in etcd, against a scripted etcd: a change is sent once, whatever becomes of its answer; nothing is admitted before
//! the rules are known; what is stored stays bounded.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use keyward::admin::doctor::ExaminedFor;
use keyward::members::membership::AuthSetting;
use keyward::pb::etcdserverpb::compare::TargetUnion;
use keyward::pb::etcdserverpb::request_op::Request;
use keyward::pb::etcdserverpb::response_op::Response;
use keyward::pb::etcdserverpb::{RangeRequest, RangeResponse, ResponseOp, TxnRequest, TxnResponse};
use keyward::pb::mvccpb::KeyValue;
use keyward::policy_store::{PolicyAnswer, PolicyCommand, PolicyListing, PolicyRegister, PolicyStoreError};
use keyward::refusal::Code;
use keyward::tasks::Tasks;
use prost::Message as _;
use tokio::time::sleep;

use crate::client::Client;
use crate::member::Member;
use crate::rig::{Keyward, paused, real};
use crate::words::{LOST, RANGE, TXN, header, range};

const LINES: &str = "[policy]\nmode = \"enforce\"\netcd_prefix = \"/p/\"\n";
const ROLE: &str = "[[role]]\nname = 'reader'\nallow = [{ actions = ['read'], everything = true }]\n\
    [[binding]]\npeer = 'listener:clients'\nroles = ['reader']\n";

/// What becomes of the next transaction that writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WriteOutcome {
    Answered,
    /// Applied, and its answer is lost.
    Lost,
    /// Not applied, and its answer is lost.
    NotApplied,
}

/// Values and their mod revisions by key.
type Keys = BTreeMap<Vec<u8>, (Vec<u8>, i64)>;

/// The keys of an etcd, behind one or more members.
struct Store {
    keys: RefCell<Keys>,
    revision: Cell<i64>,
    next_write: Cell<WriteOutcome>,
    /// The transactions that wished to write, at any member, and the size of the largest.
    writes: Cell<usize>,
    largest: Cell<usize>,
    /// While true, every read is refused.
    is_away: Cell<bool>,
    /// Reads of clients' keys.
    reads: Cell<usize>,
}

impl Store {
    fn new() -> Rc<Self> {
        Rc::new(Self {
            keys: RefCell::default(),
            revision: Cell::new(1),
            next_write: Cell::new(WriteOutcome::Answered),
            writes: Cell::default(),
            largest: Cell::default(),
            is_away: Cell::default(),
            reads: Cell::default(),
        })
    }

    /// Answers all calls at the member, for ever.
    fn serve(self: &Rc<Self>, member: &Rc<Member>, tasks: &Tasks) {
        let (store, member) = (Rc::clone(self), Rc::clone(member));
        let serving = async move {
            loop {
                let mut call = member.call().await;
                let message = call.message().await;
                if store.is_away.get() {
                    call.refuse(Code::Unavailable, "etcdserver: no leader");
                    continue;
                }
                match call.path() {
                    RANGE => {
                        let asked = RangeRequest::decode(message).expect("a Range");
                        if !asked.key.starts_with(b"/p/") {
                            store.reads.set(store.reads.get() + 1);
                        }
                        call.reply(&store.range(&asked).encode_to_vec()).await;
                    }
                    TXN => {
                        let size = message.len();
                        let txn = TxnRequest::decode(message).expect("a Txn");
                        let writes = !txn.compare.is_empty();
                        let outcome = if writes {
                            store.writes.set(store.writes.get() + 1);
                            store.largest.set(store.largest.get().max(size));
                            store.next_write.replace(WriteOutcome::Answered)
                        } else {
                            WriteOutcome::Answered
                        };
                        if outcome == WriteOutcome::NotApplied {
                            call.refuse(Code::Unavailable, LOST);
                            continue;
                        }
                        let answer = store.txn(&txn).encode_to_vec();
                        match outcome {
                            WriteOutcome::Answered => call.reply(&answer).await,
                            _ => call.refuse(Code::Unavailable, LOST),
                        }
                    }
                    other => panic!("{other}"),
                }
            }
        };
        tasks.spawn("store", serving).detach();
    }

    fn range(&self, asked: &RangeRequest) -> RangeResponse {
        let keys = self.keys.borrow();
        let is_in = |key: &[u8]| {
            if asked.range_end.is_empty() {
                *key == asked.key[..]
            } else {
                *key >= asked.key[..] && *key < asked.range_end[..]
            }
        };
        let found: Vec<_> = keys.iter().filter(|(key, _)| is_in(key)).collect();
        let count = i64::try_from(found.len()).expect("few");
        let changed = found.into_iter().filter(|(_, (_, revision))| *revision >= asked.min_mod_revision);
        let mut kvs: Vec<_> = changed
            .map(|(key, (value, mod_revision))| KeyValue {
                key: key.clone().into(),
                value: if asked.keys_only { Vec::new().into() } else { value.clone().into() },
                mod_revision: *mod_revision,
                ..KeyValue::default()
            })
            .collect();
        if asked.sort_order == 2 {
            kvs.reverse();
        }
        if asked.limit > 0 {
            kvs.truncate(usize::try_from(asked.limit).expect("a number"));
        }
        if asked.count_only {
            kvs.clear();
        }
        RangeResponse { header: Some(header(self.revision.get())), kvs, count, ..RangeResponse::default() }
    }

    fn txn(&self, txn: &TxnRequest) -> TxnResponse {
        let holds = txn.compare.iter().all(|compare| {
            let known = self.keys.borrow().get(&compare.key[..]).map_or(0, |(_, revision)| *revision);
            compare.target_union == Some(TargetUnion::ModRevision(known))
        });
        let mut responses = Vec::new();
        if holds {
            if !txn.compare.is_empty() {
                self.revision.set(self.revision.get() + 1);
            }
            for op in &txn.success {
                match op.request.as_ref().expect("an operation") {
                    Request::RequestRange(asked) => {
                        let response = Some(Response::ResponseRange(self.range(asked)));
                        responses.push(ResponseOp { response });
                    }
                    Request::RequestPut(put) => {
                        let row = (put.value.to_vec(), self.revision.get());
                        self.keys.borrow_mut().insert(put.key.to_vec(), row);
                    }
                    Request::RequestDeleteRange(delete) => {
                        let is_in = |key: &[u8]| match &delete.range_end[..] {
                            [] => *key == delete.key[..],
                            end => *key >= delete.key[..] && key < end,
                        };
                        self.keys.borrow_mut().retain(|key, _| !is_in(key));
                    }
                    other => panic!("{other:?}"),
                }
            }
        }
        let header = Some(header(self.revision.get()));
        TxnResponse { header, succeeded: holds, responses }
    }

    fn put(&self, key: &str, value: &str) {
        self.revision.set(self.revision.get() + 1);
        self.keys.borrow_mut().insert(key.into(), (value.into(), self.revision.get()));
    }

    fn names(&self) -> Vec<String> {
        let keys = self.keys.borrow();
        keys.keys().map(|key| String::from_utf8(key.clone()).expect("a name")).collect()
    }
}

/// A Keyward before two members with one store.
struct Replica {
    store: Rc<Store>,
    keyward: Keyward,
    policy: PolicyRegister,
}

impl Replica {
    fn new(is_away: bool, lines: &str) -> Self {
        let store = Store::new();
        store.is_away.set(is_away);
        Self::with_store(store, lines)
    }

    fn with_store(store: Rc<Store>, lines: &str) -> Self {
        let tasks = Tasks::default();
        let members = [1, 2].map(|id| Rc::new(Member::new(id, &tasks)));
        let keyward = Keyward::configured(&[&members[0], &members[1]], AuthSetting::Off, lines);
        for member in &members {
            store.serve(member, &keyward.tasks);
        }
        let policy = keyward.admin().policy.clone().expect("configured");
        Self { store, keyward, policy }
    }

    async fn apply(&self, text: &str) -> Result<PolicyAnswer, PolicyStoreError> {
        let command = PolicyCommand::Apply {
            text: text.to_owned(),
            if_generation: None,
            comment: String::new(),
            allow_unreachable: false,
            sudo_user: None,
        };
        self.policy.execute(command, Some(0)).await
    }

    async fn generation(&self, wanted: u64) {
        while self.policy.status().generation != wanted {
            sleep(Duration::from_millis(50)).await;
        }
    }
}

async fn read(client: &Client) -> Option<Code> {
    client.call(RANGE, range("k")).await.end.code()
}

#[test]
fn a_change_with_an_unknown_outcome_is_sent_once() {
    paused(async {
        for outcome in [WriteOutcome::NotApplied, WriteOutcome::Lost] {
            let replica = Replica::new(false, LINES);
            replica.store.next_write.set(outcome);
            let told = replica.apply(ROLE).await;
            assert!(matches!(told, Err(PolicyStoreError::Unknown(_))), "{told:?}");
            sleep(Duration::from_secs(30)).await;
            assert_eq!(replica.store.writes.get(), 1, "of both members one was asked, once");
            let applied = u64::from(outcome == WriteOutcome::Lost);
            assert_eq!(replica.policy.status().generation, applied, "etcd's word holds");
            let grant = PolicyCommand::Grant {
                peer: "listener:clients".into(),
                role: "reader".into(),
                seconds: 60,
                reason: "a test".into(),
                sudo_user: None,
            };
            if outcome == WriteOutcome::Lost {
                replica.store.next_write.set(WriteOutcome::Lost);
                let told = replica.policy.execute(grant, None).await;
                assert!(matches!(told, Err(PolicyStoreError::Unknown(_))), "{told:?}");
                sleep(Duration::from_secs(30)).await;
                assert_eq!((replica.store.writes.get(), replica.policy.status().grants), (2, 1));
            }
        }
    });
}

/// The policy file of the configuration has a role at the same place, with other limits.
#[test]
fn the_limits_of_a_caller_are_those_of_its_stored_roles() {
    paused(async {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("policy.toml");
        let limited = |calls: u32| {
            ROLE.replace("]\n[[binding]]", &format!("]\nlimits.calls_per_second = {calls}\n[[binding]]"))
        };
        std::fs::write(&file, limited(9)).expect("written");
        let replica = Replica::new(false, &format!("{LINES}file = {file:?}\n"));
        let client = replica.keyward.client().await;
        let served = async || {
            let mut served = 0;
            while read(&client).await == Some(Code::Ok) {
                served += 1;
            }
            served
        };
        replica.apply(&limited(3)).await.expect("applied");
        assert_eq!(served().await, 3);
        sleep(Duration::from_secs(5)).await;
        replica.apply(&limited(5)).await.expect("applied");
        assert_eq!(served().await, 5);
    });
}

/// Shadow is a mode of grants: the limits of a document have another.
#[test]
fn whoever_applies_limits_is_told_what_will_happen() {
    paused(async {
        let limited = ROLE.replace("]\n[[binding]]", "]\nlimits.watches = 3\n[[binding]]");
        for (mode, consequence) in
            [("enforce", "enforced at once"), ("shadow", "counted only"), ("off", "ignored")]
        {
            let lines = LINES.replace("enforce", "shadow");
            let replica = Replica::new(false, &format!("{lines}limits_mode = \"{mode}\"\n"));
            replica.apply(ROLE).await.expect("applied");
            let diff = PolicyCommand::Diff { text: limited.clone() };
            let told = replica.policy.execute(diff, Some(0)).await.expect("compared");
            let line = format!("limits of the roles \"reader\": {consequence}, by policy.limits_mode");
            assert!(told.differs && told.text.contains(&line), "{mode}: {}", told.text);
            let told = replica.apply(&limited).await.expect("applied").text;
            assert!(told.contains(&line), "{mode}: {told}");
            let told = replica.apply(&format!("# Another text.\n{limited}")).await.expect("applied").text;
            assert!(!told.contains("limits of"), "the same limits: {told}");
        }
    });
}

#[test]
fn before_the_first_generation_a_document_is_compared_with_the_file_in_force() {
    paused(async {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("policy.toml");
        std::fs::write(&file, ROLE).expect("written");
        let replica = Replica::new(false, &format!("{LINES}file = {file:?}\n"));
        let diff = async |text: &str| {
            replica.policy.execute(PolicyCommand::Diff { text: text.to_owned() }, Some(0)).await
        };
        let told = diff(ROLE).await.expect("compared");
        assert!(!told.differs && told.text.is_empty(), "{}", told.text);
        let other = format!("{ROLE}[[role]]\nname = \"new\"\n");
        let told = diff(&other).await.expect("compared");
        assert!(told.differs && told.text == "+ role \"new\"\n", "{}", told.text);
        // The file on the disk is not in force.
        std::fs::write(&file, &other).expect("written");
        let refused = diff(&other).await.expect_err("another file").to_string();
        assert!(refused.contains("policy.file has changed"), "{refused}");
        replica.apply(&other).await.expect("applied");
        let told = diff(&other).await.expect("compared");
        assert!(!told.differs, "{}", told.text);
    });
}

/// Everybody who may give the command is root by sudo: who was it?
#[test]
fn a_grant_names_the_user_behind_sudo_as_root_claims() {
    paused(async {
        let replica = Replica::new(false, LINES);
        replica.apply(ROLE).await.expect("applied");
        for (uid, shown) in [(0, Some("olga")), (7, None)] {
            let grant = PolicyCommand::Grant {
                peer: "password:a".to_owned(),
                role: "reader".to_owned(),
                seconds: 60,
                reason: "for a test".to_owned(),
                sudo_user: Some("olga".to_owned()),
            };
            replica.policy.execute(grant, Some(uid)).await.expect("given");
            let listed = replica.policy.execute(PolicyCommand::Grants {}, Some(0)).await.expect("listed");
            let Some(PolicyListing::Grants(rows)) = listed.listing else { panic!("{listed:?}") };
            let given = rows.iter().find(|row| row.uid == Some(uid)).map(|row| row.sudo_user.as_deref());
            assert_eq!(given, Some(shown), "{rows:?}");
        }
    });
}

/// Another replica may have a listener for the rule.
#[test]
fn a_rule_of_no_caller_is_applied_on_demand_only() {
    paused(async {
        let replica = Replica::new(false, LINES);
        let nobodys = format!("{ROLE}[[binding]]\npeer = 'file:a'\nnamespace = '/a/'\n");
        let refused = replica.apply(&nobodys).await.expect_err("a rule of nobody");
        assert!(
            matches!(&refused, PolicyStoreError::Unchanged(reason)
            if reason.contains("binding[1]") && reason.contains("--allow-unreachable")),
            "{refused}"
        );
        assert_eq!((replica.store.writes.get(), replica.policy.status().generation), (0, 0));
        let command = PolicyCommand::Apply {
            text: nobodys.clone(),
            if_generation: None,
            comment: String::new(),
            allow_unreachable: true,
            sudo_user: None,
        };
        let applied = replica.policy.execute(command, Some(0)).await.expect("applied");
        assert!(applied.text.contains("warning: policy: binding[1]"), "{}", applied.text);
        let found = replica.keyward.admin().doctor.examine(ExaminedFor::Command).await.findings;
        let found: Vec<_> = found.iter().filter(|found| found.check == "rule_unreachable").collect();
        assert!(matches!(found[..], [one] if one.about == "policy: binding[1]"), "{found:?}");
        replica.apply(ROLE).await.expect("applied");
        // A way back is never closed.
        let back =
            replica.policy.execute(PolicyCommand::Rollback { generation: 1, sudo_user: None }, Some(0)).await;
        assert!(back.expect("applied").text.contains("warning: policy: binding[1]"));
        let grant = |peer: &str| PolicyCommand::Grant {
            peer: peer.to_owned(),
            role: "reader".to_owned(),
            seconds: 60,
            reason: "for a test".to_owned(),
            sudo_user: None,
        };
        let given = replica.policy.execute(grant("file:a"), Some(0)).await.expect("given");
        assert!(given.text.contains("warning: applies to no caller here"), "{}", given.text);
        let given = replica.policy.execute(grant("password:a"), Some(0)).await.expect("given");
        assert!(!given.text.contains("warning"), "{}", given.text);
    });
}

#[test]
fn nothing_is_admitted_before_the_rules_are_known() {
    paused(async {
        for mode in ["off", "shadow", "enforce"] {
            let lines = LINES.replace("enforce", mode);
            let replica = Replica::new(true, &lines);
            let client = replica.keyward.client().await;
            assert_eq!(read(&client).await, Some(Code::Unavailable), "{mode}");
            assert_eq!(replica.store.reads.get(), 0);
            assert!(!replica.policy.status().is_known);
            let apply = replica.apply(ROLE).await;
            assert!(matches!(apply, Err(PolicyStoreError::Unchanged(_))), "{apply:?}");

            // Known, and nothing was ever applied: the configuration's own rules, which give nobody anything.
            replica.store.is_away.set(false);
            while !replica.policy.status().is_known {
                sleep(Duration::from_millis(50)).await;
            }
            let (code, reads) = if mode == "enforce" { (Code::PermissionDenied, 0) } else { (Code::Ok, 1) };
            assert_eq!((read(&client).await, replica.store.reads.get()), (Some(code), reads), "{mode}");
            replica.apply(ROLE).await.expect("applied");
            assert_eq!(read(&client).await, Some(Code::Ok), "{mode}: in force when the operator is told");
            replica.store.is_away.set(true);
            sleep(Duration::from_secs(600)).await;
            assert!(replica.policy.status().age() >= Duration::from_secs(600));
            assert_ne!(read(&client).await, Some(Code::PermissionDenied), "{mode}: the last one stays");
        }
    });
}

#[test]
fn damaged_keys_are_not_taken_for_an_empty_policy() {
    paused(async {
        for key in ["/p/current", "/p/generation/00000000000000000001", "/p/generation/x"] {
            let replica = Replica::new(true, LINES);
            replica.store.put(key, "garbage");
            replica.store.is_away.set(false);
            let client = replica.keyward.client().await;
            sleep(Duration::from_secs(60)).await;
            assert!(!replica.policy.status().is_known && replica.policy.status().fault.is_some(), "{key}");
            assert_eq!(read(&client).await, Some(Code::Unavailable), "{key}");
            replica.apply(ROLE).await.expect("applied");
            assert_eq!(read(&client).await, Some(Code::Ok), "{key}");
        }
    });
}

#[test]
fn the_history_is_bounded_and_ended_grants_go_with_the_next_change() {
    paused(async {
        let replica = Replica::new(false, LINES);
        for number in 1..=30_u64 {
            replica.apply(&format!("# {number}\n{ROLE}")).await.expect("applied");
            assert_eq!(replica.policy.status().generation, number);
            if number == 2 {
                // A grant that ended long ago, and one that another program wrote.
                let ended = r#"{"peer":"listener:clients","role":"reader","reason":"","uid":null,"given_at":1,"until":2}"#;
                let digest = <sha2::Sha256 as sha2::Digest>::digest(b"listener:clients\0reader");
                let name: String = digest[..16].iter().map(|byte| format!("{byte:02x}")).collect();
                replica.store.put(&format!("/p/grant/{name}"), ended);
                replica.store.put("/p/grant/x", "garbage");
                sleep(Duration::from_secs(1)).await;
                assert_eq!(replica.policy.status().grants, 0);
            }
        }
        let names = replica.store.names();
        assert_eq!(names.len(), 22, "{names:?}");
        assert!(names.contains(&"/p/generation/00000000000000000011".to_owned()), "{names:?}");
        assert!(names.contains(&"/p/grant/x".to_owned()), "only what is known to have ended is deleted");
        // A million bytes of rules are one request, far below etcd's limit.
        let role =
            |n: u32| format!("[[role]]\nname = 'r{n}'\nallow = [{{ actions = ['read'], key = '/k/{n}' }}]\n");
        let text: String = (0..20_000).map(role).collect::<String>() + ROLE;
        assert!(text.len() > 1_000_000);
        replica.apply(&text).await.expect("applied");
        replica.generation(31).await;
        assert!(replica.store.largest.get() < 1 << 20, "{}", replica.store.largest.get());
        let shown = replica.policy.execute(PolicyCommand::Show { generation: None }, None).await;
        assert_eq!(shown.expect("in force").text, text);
        let rolled =
            replica.policy.execute(PolicyCommand::Rollback { generation: 20, sudo_user: None }, None).await;
        rolled.expect("kept");
        replica.generation(32).await;
        let shown = replica.policy.execute(PolicyCommand::Show { generation: Some(32) }, None).await;
        assert_eq!(shown.expect("stored").text, format!("# 20\n{ROLE}"));
    });
}

/// The records of admin events in an audit file, once there are `count`.
async fn admin_records(file: &std::path::Path, count: usize) -> Vec<serde_json::Value> {
    loop {
        let text = std::fs::read_to_string(file).unwrap_or_default();
        let lines = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
        let records = lines.map(|line| serde_json::from_str::<serde_json::Value>(line).expect("JSON"));
        let records: Vec<_> = records.filter(|record| record["event"] == "admin").collect();
        if records.len() >= count {
            assert_eq!(records.len(), count, "{records:#?}");
            return records;
        }
        sleep(Duration::from_millis(5)).await;
    }
}

/// No command was given to the replica with the audit log: another replica changed the policy.
#[test]
fn each_change_of_the_policy_in_force_leaves_one_audit_record_whatever_made_it() {
    real(async {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("audit.log");
        let changing = Replica::new(false, LINES);
        let audit = format!("[audit]\nfile = {file:?}\n");
        let audited = Replica::with_store(Rc::clone(&changing.store), &format!("{LINES}{audit}"));
        let first = admin_records(&file, 1).await.remove(0);
        assert_eq!(
            first["reason"], "the policy of the configuration is in force",
            "nothing is stored: {first}"
        );
        changing.apply(ROLE).await.expect("applied");
        let applied = admin_records(&file, 2).await.remove(1);
        assert_eq!((&applied["command"], &applied["result"]), (&"policy".into(), &"done".into()));
        assert_eq!(
            (&applied["reason"], &applied["uid"]),
            (&"the stored policy is in force".into(), &().into())
        );
        assert!(applied["policy_generation"].as_str().is_some_and(|it| it.starts_with("1-")), "{applied}");
        assert_eq!(applied["policy_mode"], serde_json::Value::Null, "the mode is the same: {applied}");
        let grant = PolicyCommand::Grant {
            peer: "password:alice".into(),
            role: "reader".into(),
            seconds: 3600,
            reason: "a test".into(),
            sudo_user: None,
        };
        changing.policy.execute(grant, Some(0)).await.expect("granted");
        let begun = admin_records(&file, 3).await.remove(2);
        let reason = begun["reason"].as_str().expect("a reason").to_owned();
        assert!(reason.starts_with("begins: reader to password:alice until 2"), "{reason}");
        let ungrant =
            PolicyCommand::Ungrant { peer: "password:alice".into(), role: "reader".into(), sudo_user: None };
        changing.policy.execute(ungrant, Some(0)).await.expect("taken back");
        let ended = admin_records(&file, 4).await.remove(3);
        assert_eq!(ended["reason"], reason.replace("begins", "ends"));
        // Whoever publishes other rules, even without a reload.
        let other = LINES.replace("enforce", "off");
        audited.keyward.publish_rules(folder.path(), "", &format!("{other}{audit}"));
        let off = admin_records(&file, 5).await.remove(4);
        assert_eq!((&off["policy_mode_before"], &off["policy_mode"]), (&"enforce".into(), &"off".into()));
        super::audit::assert_all_valid(&admin_records(&file, 5).await);
    });
}
