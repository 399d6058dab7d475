//! Maintenance and Cluster. One member, so that it may lead, and nothing that it is told stops it.

use keyward::pb::etcdserverpb::{
    AlarmRequest, AlarmType, DefragmentRequest, DowngradeRequest, HashKvRequest, HashRequest,
    MemberAddRequest, MemberListRequest, MemberPromoteRequest, MemberRemoveRequest, MemberUpdateRequest,
    MoveLeaderRequest, PutRequest, SnapshotRequest, StatusRequest, alarm_request::AlarmAction,
    downgrade_request::DowngradeAction,
};

use super::{Row, one, row};
use crate::twin::side::Who;

const ALARM: &str = "/etcdserverpb.Maintenance/Alarm";
const HASH_KV: &str = "/etcdserverpb.Maintenance/HashKV";
const MOVE_LEADER: &str = "/etcdserverpb.Maintenance/MoveLeader";
const DOWNGRADE: &str = "/etcdserverpb.Maintenance/Downgrade";
const LIST: &str = "/etcdserverpb.Cluster/MemberList";
const ADD: &str = "/etcdserverpb.Cluster/MemberAdd";
const REMOVE: &str = "/etcdserverpb.Cluster/MemberRemove";
const UPDATE: &str = "/etcdserverpb.Cluster/MemberUpdate";
const PROMOTE: &str = "/etcdserverpb.Cluster/MemberPromote";
/// Where nobody listens: the learner never starts.
const NOWHERE: &str = "http://127.0.0.1:1";

pub(super) fn maintenance() -> Vec<Row> {
    vec![
        row("/etcdserverpb.Maintenance/Status", "", |_, _| one(&StatusRequest {})),
        row("/etcdserverpb.Maintenance/Hash", "", |_, _| one(&HashRequest {})),
        row(HASH_KV, "now", |_, _| one(&HashKvRequest::default())),
        row(HASH_KV, "the future", |_, _| one(&HashKvRequest { revision: 99_999 })),
        row("/etcdserverpb.Maintenance/Snapshot", "", |_, _| one(&SnapshotRequest {})),
        row("/etcdserverpb.Maintenance/Defragment", "", |_, _| one(&DefragmentRequest {})),
        row(MOVE_LEADER, "to itself", |side, _| one(&MoveLeaderRequest { target_id: side.member })),
        row(MOVE_LEADER, "to nobody", |_, _| one(&MoveLeaderRequest { target_id: 0x1234 })),
        row(DOWNGRADE, "is it possible, to 3.4", |_, _| one(&downgrade(DowngradeAction::Validate, "3.4.0"))),
        row(DOWNGRADE, "to what is no version", |_, _| one(&downgrade(DowngradeAction::Validate, "x"))),
        row(DOWNGRADE, "none to cancel", |_, _| one(&downgrade(DowngradeAction::Cancel, ""))),
        row(ALARM, "none", |_, _| one(&AlarmRequest::default())),
        row(ALARM, "raise", |side, _| {
            one(&AlarmRequest { member_id: side.member, ..alarm(AlarmAction::Activate) })
        }),
        row(ALARM, "one", |_, _| one(&AlarmRequest::default())),
        row("/etcdserverpb.KV/Put", "while there is no space", |_, _| {
            one(&PutRequest { key: "/a/k".into(), value: "x".into(), ..PutRequest::default() })
        })
        .only(&[Who::Alice]),
        row(ALARM, "lower", |side, _| {
            one(&AlarmRequest { member_id: side.member, ..alarm(AlarmAction::Deactivate) })
        }),
    ]
}

pub(super) fn cluster() -> Vec<Row> {
    vec![
        row(LIST, "the member's own view", |_, _| one(&MemberListRequest { linearizable: false })),
        row(LIST, "linearizable", |_, _| one(&MemberListRequest { linearizable: true })),
        row(ADD, "a bad URL", |_, _| {
            one(&MemberAddRequest { peer_ur_ls: vec!["bad".into()], is_learner: true })
        }),
        row(ADD, "no URL", |_, _| one(&MemberAddRequest { peer_ur_ls: Vec::new(), is_learner: true })),
        row(ADD, "a learner", |_, _| {
            one(&MemberAddRequest { peer_ur_ls: vec![NOWHERE.into()], is_learner: true })
        }),
        row(LIST, "with a learner", |_, _| one(&MemberListRequest { linearizable: true })),
        row(UPDATE, "the learner", |side, _| {
            one(&MemberUpdateRequest { id: side.learner, peer_ur_ls: vec!["http://127.0.0.1:2".into()] })
        }),
        row(UPDATE, "an unknown one", |_, _| {
            one(&MemberUpdateRequest { id: 0x1234, peer_ur_ls: vec![NOWHERE.into()] })
        }),
        row(PROMOTE, "the learner, which never started", |side, _| {
            one(&MemberPromoteRequest { id: side.learner })
        }),
        row(PROMOTE, "a voter", |side, _| one(&MemberPromoteRequest { id: side.member })),
        row(PROMOTE, "an unknown one", |_, _| one(&MemberPromoteRequest { id: 0x1234 })),
        row(REMOVE, "the learner", |side, _| one(&MemberRemoveRequest { id: side.learner })),
        row(REMOVE, "an unknown one", |_, _| one(&MemberRemoveRequest { id: 0x1234 })),
    ]
}

fn alarm(action: AlarmAction) -> AlarmRequest {
    AlarmRequest { action: action.into(), alarm: AlarmType::Nospace.into(), ..AlarmRequest::default() }
}

fn downgrade(action: DowngradeAction, version: &str) -> DowngradeRequest {
    DowngradeRequest { action: action.into(), version: version.into() }
}
