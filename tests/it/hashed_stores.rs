//! An examination asks the members for the hashes of their stores: each once, one at a time, by the credentials of
//! the configuration.

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::time::Duration;

use keyward::admin::doctor::{DoctorReport, ExaminedFor};
use keyward::members::fitness::store_status::StoreStatus;
use keyward::members::membership::{AuthSetting, Member as KnownMember};
use keyward::pb::etcdserverpb::{HashKvRequest, HashKvResponse};
use keyward::refusal::Code;
use keyward::tasks::Tasks;
use prost::Message as _;
use tokio::time::{advance, sleep};

use crate::member::{Member, next_of};
use crate::rig::{Keyward, paused};

const HASH_KV: &str = "/etcdserverpb.Maintenance/HashKV";
const REVISION: i64 = 70;
const PROBED: &str = "probe = { user = 'probe', password_file = 'password' }\n";
const AND_ROOT: &str = "probe = { user = 'probe', password_file = 'password' }\n\
                        [[user]]\nname = 'root'\npassword_file = 'password'\n";

/// The questions that reached the members: at which, by which token.
type Questions = RefCell<Vec<(u64, Option<String>)>>;

fn members() -> Vec<Member> {
    let tasks = Tasks::default();
    (1..=3).map(|id| Member::new(id, &tasks)).collect()
}

fn keyward(members: &[Member], auth: AuthSetting, lines: &str) -> Keyward {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("password"), "right").expect("written");
    let keyward = Keyward::at(&members.iter().collect::<Vec<_>>(), auth, folder.path(), "", lines);
    let store = Arc::new(StoreStatus { revision: REVISION, ..StoreStatus::default() });
    keyward.publish(|membership| {
        for member in &mut membership.members {
            *member = Arc::new(KnownMember { store_status: Some(Arc::clone(&store)), ..(**member).clone() });
        }
    });
    keyward
}

/// Examines, while the members answer HashKV by `hash`: with a hash, or with a denial.
async fn examined(
    keyward: &Keyward,
    members: &[Member],
    (examined_for, at_once): (ExaminedFor, usize),
    questions: &Questions,
    hash: impl Fn(u64, Option<&str>) -> Option<u32>,
) -> Vec<DoctorReport> {
    let admin = keyward.admin();
    let running = Cell::new(0);
    let answer = async {
        loop {
            let (at, mut call) = next_of(members).await;
            assert_eq!(call.path(), HASH_KV);
            assert_eq!(running.replace(1), 0, "one at a time");
            let asked = HashKvRequest::decode(call.message().await).expect("a HashKVRequest");
            assert_eq!(asked.revision, REVISION);
            let (id, token) = (members[at].address.id.0, call.token().map(str::to_owned));
            // Longer than another question would take to come.
            sleep(Duration::from_millis(200)).await;
            assert!(members.iter().all(|member| member.was_called_again().is_none()), "one at a time");
            running.set(0);
            match hash(id, token.as_deref()) {
                Some(hash) => {
                    let told = HashKvResponse { hash, compact_revision: 60, ..HashKvResponse::default() };
                    call.reply(&told.encode_to_vec()).await;
                }
                None => call.refuse(Code::PermissionDenied, "etcdserver: permission denied"),
            }
            questions.borrow_mut().push((id, token));
        }
    };
    let examinations = (0..at_once).map(|_| admin.doctor.examine(examined_for));
    tokio::select! {
        reports = futures_util::future::join_all(examinations) => reports,
        () = answer => unreachable!("it answers for ever"),
    }
}

fn differing(report: &DoctorReport) -> Vec<&str> {
    let found = report.findings.iter().filter(|finding| finding.check == "members_differ");
    found.map(|finding| &*finding.about).collect()
}

#[test]
fn each_member_is_asked_once_for_a_command_and_seldom_for_a_page() {
    paused(async {
        let members = members();
        let keyward = keyward(&members, AuthSetting::Off, "");
        let questions = Questions::default();
        let examine = async |examined_for, at_once| {
            questions.borrow_mut().clear();
            let reports =
                examined(&keyward, &members, (examined_for, at_once), &questions, |_, _| Some(7)).await;
            assert!(reports.iter().all(|report| differing(report).is_empty()), "{reports:?}");
            questions.borrow().iter().map(|(id, token)| (*id, token.is_some())).collect::<Vec<_>>()
        };
        let once = [(1, false), (2, false), (3, false)];
        assert_eq!(examine(ExaminedFor::Command, 1).await, once);
        assert_eq!(examine(ExaminedFor::Page, 1).await, []);
        assert_eq!(examine(ExaminedFor::Command, 1).await, once);
        // Commands at the same moment share the answers.
        assert_eq!(examine(ExaminedFor::Command, 3).await, once);
        advance(Duration::from_secs(601)).await;
        assert_eq!(examine(ExaminedFor::Page, 2).await, once);
    });
}

#[test]
fn a_member_with_other_contents_is_told_after_a_second_look() {
    paused(async {
        let members = members();
        let keyward = keyward(&members, AuthSetting::Off, "");
        let questions = Questions::default();
        let other = |id, _: Option<&str>| Some(if id == 3 { 8 } else { 7 });
        let reports = examined(&keyward, &members, (ExaminedFor::Command, 1), &questions, other).await;
        assert_eq!(differing(&reports[0]), ["m3 (3)"], "{reports:?}");
        assert_eq!(questions.borrow().len(), 6);
    });
}

#[test]
fn a_denial_is_no_finding_and_root_is_asked_for_only_where_the_configuration_names_it() {
    paused(async {
        for (lines, asked) in [
            (PROBED, vec![(1, Some("probe.1".to_owned()))]),
            ("", vec![(1, None)]),
            (AND_ROOT, {
                let of = |id: u64, user: &str, login: usize| (id, Some(format!("{user}.{login}")));
                (1..=3).flat_map(|id| [of(id, "probe", 1), of(id, "root", 2)]).collect()
            }),
        ] {
            let members = members();
            let keyward = keyward(&members, AuthSetting::On, lines);
            let _control = keyward.client().await;
            let questions = Questions::default();
            let hash = |id, token: Option<&str>| {
                let is_root = token.is_some_and(|token| token.starts_with("root."));
                is_root.then_some(if id == 3 { 8 } else { 7 })
            };
            let reports = examined(&keyward, &members, (ExaminedFor::Command, 1), &questions, hash).await;
            let may_read = lines == AND_ROOT;
            assert_eq!(differing(&reports[0]), if may_read { vec!["m3 (3)"] } else { vec![] }, "{reports:?}");
            assert!(!reports[0].unseen.iter().any(|unseen| unseen.contains("hash")), "{reports:?}");
            let questions = questions.into_inner();
            // A difference is looked at twice.
            assert_eq!(questions[..asked.len()], asked, "{lines}");
            assert_eq!(questions.len(), if may_read { 2 * asked.len() } else { asked.len() }, "{lines}");
        }
    });
}
