//! A member that is removed through us loses nobody's call: it is free of them before it hears of it.

use keyward::pb::etcdserverpb::{MemberRemoveRequest, MemberRemoveResponse};
use keyward::refusal::Code;
use prost::Message as _;

use crate::member::{self, Call, Member};
use crate::rig::{Keyward, paused, settled, three};
use crate::words::{PUT, put, was_put};

const REMOVE: &str = "/etcdserverpb.Cluster/MemberRemove";
const USERS: &str = "/etcdserverpb.Auth/UserList";
const REMOVED: u64 = 2;

/// The next call at any member, and at which.
async fn next_of(members: &[Member]) -> (u64, Call) {
    let (at, call) = member::next_of(members).await;
    (members[at].address.id.0, call)
}

fn remove() -> Vec<u8> {
    MemberRemoveRequest { id: REMOVED }.encode_to_vec()
}

fn rests(keyward: &Keyward) -> bool {
    let members = keyward.members.snapshot.load();
    members.members.iter().any(|member| member.id.0 == REMOVED && member.maintenance.is_open())
}

/// Whether probes of the member are stopped: one that was removed panics at a Status.
fn is_probed(keyward: &Keyward) -> bool {
    let members = keyward.members.snapshot.load();
    members.members.iter().any(|member| member.id.0 == REMOVED && !member.maintenance.is_being_removed())
}

#[test]
fn a_member_is_free_of_calls_before_it_is_removed() {
    paused(async {
        let (members, keyward) = three();
        let client = keyward.client().await;
        // Writes until one is under way at the member that goes.
        let mut open = Vec::new();
        let under_way = loop {
            open.push(client.begin(PUT, put(1)).await.expect("sent"));
            let (at, call) = next_of(&members).await;
            assert_eq!(call.path(), PUT);
            if at == REMOVED {
                break call;
            }
            call.reply(&was_put(1)).await;
        };
        let script = async {
            let (_, users) = next_of(&members).await;
            assert_eq!(users.path(), USERS);
            users.reply(&[]).await;
            settled().await;
            assert!(!is_probed(&keyward));
            assert!(rests(&keyward) && members.iter().all(|member| member.was_called_again().is_none()));
            under_way.reply(&was_put(2)).await;
            let (at, remove) = next_of(&members).await;
            assert_eq!(remove.path(), REMOVE);
            assert_ne!(at, REMOVED);
            remove.reply(&MemberRemoveResponse::default().encode_to_vec()).await;
        };
        let (outcome, ()) = tokio::join!(client.call(REMOVE, remove()), script);
        outcome.message();
        for open in open {
            open.finish().await.message();
        }
        settled().await;
        assert!(rests(&keyward) && !is_probed(&keyward), "until the list says that it is gone");
        for _ in 0..6 {
            let script = async {
                let (at, call) = next_of(&members).await;
                assert_ne!(at, REMOVED);
                call.reply(&was_put(3)).await;
            };
            let (outcome, ()) = tokio::join!(client.call(PUT, put(1)), script);
            outcome.message();
        }
        tokio::time::sleep(std::time::Duration::from_secs(16)).await;
        assert!(!rests(&keyward) && is_probed(&keyward), "whether it answers decides");
    });
}

#[test]
fn who_may_not_remove_has_nobody_freed() {
    paused(async {
        let (members, keyward) = three();
        let client = keyward.client().await;
        let denied = (Code::PermissionDenied, "etcdserver: permission denied");
        let script = async {
            for path in [USERS, REMOVE] {
                let (_, call) = next_of(&members).await;
                assert_eq!(call.path(), path);
                assert!(!rests(&keyward) && is_probed(&keyward));
                call.refuse(denied.0, denied.1);
            }
        };
        let (outcome, ()) = tokio::join!(client.call(REMOVE, remove()), script);
        assert_eq!(outcome.end.told(), denied);
    });
}

#[test]
fn a_removal_that_fails_lets_the_member_be_probed_again() {
    paused(async {
        let (members, keyward) = three();
        let client = keyward.client().await;
        let failed = (Code::NotFound, "etcdserver: member not found");
        let script = async {
            let (_, users) = next_of(&members).await;
            users.reply(&[]).await;
            let (_, remove) = next_of(&members).await;
            assert!(!is_probed(&keyward), "before it is sent");
            remove.refuse(failed.0, failed.1);
        };
        let (outcome, ()) = tokio::join!(client.call(REMOVE, remove()), script);
        assert_eq!(outcome.end.told(), failed);
        assert!(is_probed(&keyward) && !rests(&keyward));
    });
}
