//! Maintenance and Cluster. One member, so that it may lead, and nothing that it is told stops it.

use serde_json::{Value, json};

use super::{RestRow, base64, row};
use crate::json_twin::caller_side::Who;

const ALARM: &str = "/v3/maintenance/alarm";
const HASH_KV: &str = "/v3/maintenance/hashkv";
const MOVE_LEADER: &str = "/v3/maintenance/transfer-leadership";
const DOWNGRADE: &str = "/v3/maintenance/downgrade";
const LIST: &str = "/v3/cluster/member/list";
const ADD: &str = "/v3/cluster/member/add";
const REMOVE: &str = "/v3/cluster/member/remove";
const UPDATE: &str = "/v3/cluster/member/update";
const PROMOTE: &str = "/v3/cluster/member/promote";
/// Where nobody listens: the learner never starts.
const NOWHERE: &str = "http://127.0.0.1:1";

pub(super) fn maintenance() -> Vec<RestRow> {
    vec![
        row("/v3/maintenance/status", "", |_, _| vec![json!({})]),
        row("/v3/maintenance/hash", "", |_, _| vec![json!({})]),
        row(HASH_KV, "now", |_, _| vec![json!({})]),
        row(HASH_KV, "the future", |_, _| vec![json!({ "revision": 99_999 })]),
        row("/v3/maintenance/snapshot", "", |_, _| vec![json!({})]),
        row("/v3/maintenance/defragment", "", |_, _| vec![json!({})]),
        row(MOVE_LEADER, "to itself", |side, _| vec![json!({ "targetID": side.member.to_string() })]),
        row(MOVE_LEADER, "to nobody", |_, _| vec![json!({ "targetID": "4660" })]),
        row(DOWNGRADE, "is it possible, to 3.4", |_, _| {
            vec![json!({ "action": "VALIDATE", "version": "3.4.0" })]
        }),
        row(DOWNGRADE, "to what is no version", |_, _| vec![json!({ "action": 0, "version": "x" })]),
        row(DOWNGRADE, "none to cancel", |_, _| vec![json!({ "action": "CANCEL" })]),
        row(ALARM, "none", |_, _| vec![json!({})]),
        row(ALARM, "raise", |side, _| vec![alarm(side.member, "ACTIVATE")]),
        row(ALARM, "one", |_, _| vec![json!({ "action": "GET" })]),
        row("/v3/kv/put", "while there is no space", |_, _| {
            vec![json!({ "key": base64("/a/k"), "value": base64("x") })]
        })
        .only(&[Who::Alice]),
        row(ALARM, "lower", |side, _| vec![alarm(side.member, "DEACTIVATE")]),
    ]
}

pub(super) fn cluster() -> Vec<RestRow> {
    vec![
        row(LIST, "the member's own view", |_, _| vec![json!({ "linearizable": false })]),
        row(LIST, "linearizable", |_, _| vec![json!({ "linearizable": true })]),
        row(ADD, "a bad URL", |_, _| vec![json!({ "peerURLs": ["bad"], "isLearner": true })]),
        row(ADD, "no URL", |_, _| vec![json!({ "peerURLs": [], "isLearner": true })]),
        row(ADD, "a learner", |_, _| {
            vec![json!({ "peerURLs": [NOWHERE], "is_learner": true, "isLearner": true })]
        }),
        row(LIST, "with a learner", |_, _| vec![json!({ "linearizable": true })]),
        row(UPDATE, "the learner", |side, _| {
            vec![json!({ "ID": side.learner.to_string(), "peerURLs": ["http://127.0.0.1:2"] })]
        }),
        row(UPDATE, "an unknown one", |_, _| vec![json!({ "ID": 4660, "peerURLs": [NOWHERE] })]),
        row(PROMOTE, "the learner, which never started", |side, _| vec![id(side.learner)]),
        row(PROMOTE, "a voter", |side, _| vec![id(side.member)]),
        row(PROMOTE, "an unknown one", |_, _| vec![id(0x1234)]),
        row(REMOVE, "the learner", |side, _| vec![id(side.learner)]),
        row(REMOVE, "an unknown one", |_, _| vec![id(0x1234)]),
    ]
}

fn alarm(member: u64, action: &str) -> Value {
    json!({ "action": action, "alarm": "NOSPACE", "memberID": member.to_string() })
}

fn id(id: u64) -> Value {
    json!({ "ID": id.to_string() })
}
