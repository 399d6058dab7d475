//! Calls about one member go to the member that the client names, and to nobody else; all other calls as everywhere.

use std::time::Duration;

use keyward::identity::MemberId;
use keyward::members::membership::{
    AbsenceReason, AbsentMember, AuthSetting, Readiness, Role, UnreadyReason,
};
use keyward::pb::etcdserverpb::MoveLeaderRequest;
use keyward::refusal::Code;
use keyward::rpc::method::METHODS;
use keyward::tasks::Tasks;
use prost::Message as _;
use tokio::time::Instant;

use crate::authority::{Authority, NAME, connect_to_host};
use crate::client::Client;
use crate::member::{Member, next_called};
use crate::rig::{Keyward, paused};
use crate::words::{RANGE, range, ranged};

const HEADER: &str = "x-keyward-member";
const STATUS: &str = "/etcdserverpb.Maintenance/Status";
const HASH: &str = "/etcdserverpb.Maintenance/Hash";
const MOVE_LEADER: &str = "/etcdserverpb.Maintenance/MoveLeader";

fn three() -> Vec<Member> {
    let tasks = Tasks::default();
    (1..=3).map(|id| Member::new(id, &tasks)).collect()
}

/// Which of them is called, which answers OK.
async fn answers(members: &[Member], client: &Client, path: &str) -> u64 {
    let script = async {
        let (at, call) = next_called(members, path).await;
        call.reply(&ranged(1)).await;
        members[at].address.id.0
    };
    let message = if path == RANGE { range("k") } else { Vec::new() };
    let (outcome, id) = tokio::join!(client.call(path, message), script);
    assert_eq!(outcome.end.code(), Some(Code::Ok), "{path}");
    id
}

fn nobody_is_called(members: &[Member]) {
    for member in members {
        let call = member.was_called_again();
        assert!(call.is_none(), "{:?} got {:?}", member.address.id, call.map(|call| call.path().to_owned()));
    }
}

#[test]
fn a_header_leads_each_call_that_is_about_one_member() {
    paused(async {
        let members = three();
        let keyward = Keyward::before(&members.iter().collect::<Vec<_>>());
        let pinned: Vec<_> = METHODS.iter().filter(|method| method.is_about_one_member()).collect();
        // What is done to a member is not a mere forward, and has a test of its own.
        let plain: Vec<_> = pinned.iter().filter(|method| method.name != "Defragment").collect();
        assert_eq!(plain.len(), 6);
        for method in plain {
            for (named, expected) in [("m3", 3), ("2", 2), ("m1", 1)] {
                let client = keyward.client().await.header(HEADER, named);
                assert_eq!(answers(&members, &client, method.path).await, expected, "{}", method.path);
            }
        }
        // Whoever names nobody is answered by the leader, so that all answers speak of one member.
        assert_eq!(answers(&members, &keyward.client().await, STATUS).await, 1);
    });
}

#[test]
fn a_listener_leads_calls_about_its_member_only_and_a_header_goes_before_it() {
    paused(async {
        let members = three();
        let folder = tempfile::tempdir().expect("a folder");
        let all = members.iter().collect::<Vec<_>>();
        let keyward = Keyward::at(&all, AuthSetting::Off, folder.path(), "member = 'm2'\n", "");
        let client = keyward.client().await;
        for path in [STATUS, HASH, MOVE_LEADER] {
            assert_eq!(answers(&members, &client, path).await, 2, "{path}");
        }
        assert_eq!(answers(&members, &client.again().header(HEADER, "m3"), STATUS).await, 3);
        let mut seen = std::collections::BTreeSet::new();
        for _ in 0..6 {
            seen.insert(answers(&members, &client, RANGE).await);
        }
        assert_eq!(seen.len(), 3, "a read is everybody's: {seen:?}");
    });
}

#[test]
fn a_host_that_is_named_in_tls_leads_like_a_listener_of_its_own() {
    paused(async {
        let (members, authority) = (three(), Authority::new());
        let folder = tempfile::tempdir().expect("a folder");
        authority.write(folder.path(), "ca");
        let listener = format!(
            "tls = {{ cert = \"server.crt\", key = \"server.key\" }}\nserver_names = {{ \"M3.{NAME}\" = \"m3\" }}\n"
        );
        let all = members.iter().collect::<Vec<_>>();
        let keyward = Keyward::at(&all, AuthSetting::Off, folder.path(), &listener, "");
        for (host, expected) in [(format!("m3.{NAME}"), 3), (NAME.to_owned(), 1), (format!("m4.{NAME}"), 1)] {
            let io = connect_to_host(keyward.connect(), authority.tls(None), host.clone()).await;
            let client = Client::over(io.expect("a handshake"), &keyward.tasks).await;
            assert_eq!(answers(&members, &client, STATUS).await, expected, "{host}");
        }
    });
}

#[test]
fn a_learner_and_one_that_is_not_ready_answer_for_themselves() {
    paused(async {
        let members = three();
        let keyward = Keyward::before(&members.iter().collect::<Vec<_>>());
        keyward.publish(|membership| {
            for (at, role, reason) in
                [(1, Role::Learner, UnreadyReason::Learner), (2, Role::Voter, UnreadyReason::NoLeader)]
            {
                let mut member = keyward::members::membership::Member::clone(&membership.members[at]);
                (member.role, member.readiness) = (role, Readiness::NotReady(reason));
                membership.members[at] = std::sync::Arc::new(member);
            }
        });
        for (named, id) in [("m2", 2), ("m3", 3)] {
            let client = keyward.client().await.header(HEADER, named);
            assert_eq!(answers(&members, &client, STATUS).await, id);
            assert_eq!(
                answers(&members, &client, RANGE).await,
                1,
                "what is not about it alone is not led there"
            );
        }
        let client = keyward.client().await.header(HEADER, "m2");
        let refuses = async {
            members[1]
                .called(HASH)
                .await
                .refuse(Code::Unavailable, "etcdserver: rpc not supported for learner");
        };
        let began = Instant::now();
        let (outcome, ()) = tokio::join!(client.call(HASH, []), refuses);
        assert_eq!(outcome.end.told(), (Code::Unavailable, "etcdserver: rpc not supported for learner"));
        assert_eq!(began.elapsed(), Duration::ZERO, "the truth is told at once");
        nobody_is_called(&members);
    });
}

#[test]
fn a_follower_that_is_named_says_that_it_does_not_lead() {
    paused(async {
        let members = three();
        let keyward = Keyward::before(&members.iter().collect::<Vec<_>>());
        let client = keyward.client().await.header(HEADER, "m3");
        let refuses = async {
            members[2].called(MOVE_LEADER).await.refuse(Code::FailedPrecondition, "etcdserver: not leader");
        };
        let (outcome, ()) = tokio::join!(client.call(MOVE_LEADER, []), refuses);
        assert_eq!(outcome.end.told(), (Code::FailedPrecondition, "etcdserver: not leader"));
        nobody_is_called(&members);
    });
}

/// etcdctl looks for the leader, and tells it to move leadership: the next command is to find the next leader.
#[test]
fn leadership_that_was_moved_is_known_when_that_is_told() {
    paused(async {
        let members = three();
        let keyward = Keyward::before(&members.iter().collect::<Vec<_>>());
        let client = keyward.client().await;
        for seen in [true, false] {
            let began = Instant::now();
            let target = if seen { 3 } else { 2 };
            let moves = async {
                let leader = usize::from(!seen) * 2;
                members[leader].called(MOVE_LEADER).await.reply(&[]).await;
                tokio::time::sleep(Duration::from_millis(150)).await;
                if seen {
                    keyward.publish(|membership| membership.leader = Some(MemberId(3)));
                }
            };
            let message = MoveLeaderRequest { target_id: target }.encode_to_vec();
            let (outcome, ()) = tokio::join!(client.call(MOVE_LEADER, message), moves);
            assert_eq!(outcome.end.code(), Some(Code::Ok));
            let waited = Duration::from_millis(if seen { 150 } else { 1000 });
            assert_eq!(began.elapsed().as_millis(), waited.as_millis());
            assert_eq!(answers(&members, &client, STATUS).await, 3);
        }
    });
}

#[test]
fn whoever_names_nobody_that_can_be_reached_is_told_so() {
    paused(async {
        let members = three();
        let keyward = Keyward::before(&members.iter().collect::<Vec<_>>());
        keyward.publish(|membership| {
            membership.absent = vec![AbsentMember {
                id: MemberId(4),
                name: "m4".into(),
                role: Role::Voter,
                why: AbsenceReason::Unstarted,
            }];
        });
        let named = async |name: &str| {
            let outcome = keyward.client().await.header(HEADER, name).call(STATUS, []).await;
            let (code, text) = outcome.end.told();
            (code, text.to_owned())
        };
        assert_eq!(named("m9").await, (Code::NotFound, "keyward: the cluster has no member \"m9\"".into()));
        assert_eq!(named("").await.0, Code::NotFound);
        let nowhere = (Code::Unavailable, "there is no connection available".to_owned());
        assert_eq!(named("m4").await, nowhere, "it was never started");
        members[1].refuse_connections(true);
        assert_eq!(named("m2").await, nowhere, "nobody answers for it");
        let mut twice = keyward.client().await.header(HEADER, "m1");
        twice.headers.append(HEADER, http::HeaderValue::from_static("m2"));
        assert_eq!(twice.call(STATUS, []).await.end.told().0, Code::InvalidArgument);
        // A wish about calls that are everybody's is no wish.
        assert_eq!(answers(&members, &twice, RANGE).await % 2, 1);
        keyward.publish(|membership| membership.members.clear());
        assert_eq!(named("m1").await, nowhere, "nothing is known yet");
        nobody_is_called(&members);
    });
}
