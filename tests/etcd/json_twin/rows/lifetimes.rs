//! Lease, and what lives on leases: Lock and Election.

use serde_json::{Value, json};

use super::{RestRow, base64, row, stream};
use crate::json_twin::caller_side::Who;

const GRANT: &str = "/v3/lease/grant";
const REVOKE: &str = "/v3/lease/revoke";
const KV_REVOKE: &str = "/v3/kv/lease/revoke";
const KEEP_ALIVE: &str = "/v3/lease/keepalive";
const TIME_TO_LIVE: &str = "/v3/lease/timetolive";
const KV_TIME_TO_LIVE: &str = "/v3/kv/lease/timetolive";
const LEASES: &str = "/v3/lease/leases";
const KV_LEASES: &str = "/v3/kv/lease/leases";
const LOCK: &str = "/v3/lock/lock";
const UNLOCK: &str = "/v3/lock/unlock";
const CAMPAIGN: &str = "/v3/election/campaign";
const LEADER: &str = "/v3/election/leader";
const OBSERVE: &str = "/v3/election/observe";
const PROCLAIM: &str = "/v3/election/proclaim";
const RESIGN: &str = "/v3/election/resign";

/// Everybody's own lease. Root grants them, since not everybody may.
pub(super) fn granted() -> Vec<RestRow> {
    vec![
        row(GRANT, "for nobody", |_, _| vec![grant(Who::None.lease())]).only(&[Who::Root]),
        row(GRANT, "for bob", |_, _| vec![grant(Who::Bob.lease())]).only(&[Who::Root]),
        row(GRANT, "for garbage", |_, _| vec![grant(Who::Garbage.lease())]).only(&[Who::Root]),
        row(GRANT, "for alice", |_, _| vec![grant(Who::Alice.lease())]).only(&[Who::Root]),
        row(GRANT, "for bearer", |_, _| vec![grant(Who::Bearer.lease())]).only(&[Who::Root]),
        row(GRANT, "for root", |_, _| vec![grant(Who::Root.lease())]).only(&[Who::Root]),
    ]
}

pub(super) fn lease() -> Vec<RestRow> {
    vec![
        row(LEASES, "all", |_, _| vec![json!({})]),
        row(KV_LEASES, "all, by the older path", |_, _| vec![json!({})]),
        row(GRANT, "a new one", |_, who| vec![grant(who.lease() + 100)]),
        row(GRANT, "one that is there", |_, who| vec![grant(who.lease())]),
        row(GRANT, "too long a life", |_, _| vec![json!({ "TTL": "9999999999", "ID": 5 })]),
        row(TIME_TO_LIVE, "one's own", |_, who| vec![id(who.lease())]),
        row(KV_TIME_TO_LIVE, "one's own, by the older path", |_, who| vec![id(who.lease())]),
        row(TIME_TO_LIVE, "alice's, with keys", |_, _| {
            vec![json!({ "ID": Who::Alice.lease(), "keys": true })]
        }),
        row(TIME_TO_LIVE, "an unknown one", |_, _| vec![id(4)]),
        row(KEEP_ALIVE, "one's own", |_, who| vec![id(who.lease())]),
        row(KEEP_ALIVE, "one's own, three times", |_, who| vec![id(who.lease()); 3]),
        row(KEEP_ALIVE, "an unknown one", |_, _| vec![id(4)]),
        row(KEEP_ALIVE, "root's, which holds a key", |_, _| vec![id(Who::Root.lease())]),
    ]
}

/// After all that needs them.
pub(super) fn revoked() -> Vec<RestRow> {
    vec![
        row(REVOKE, "an unknown one", |_, _| vec![id(4)]),
        row(REVOKE, "one's own", |_, who| vec![id(who.lease())]),
        row(KV_REVOKE, "an unknown one", |_, _| vec![id(4)]),
        row(KV_REVOKE, "another of one's own", |_, who| vec![id(who.lease() + 100)]),
    ]
}

pub(super) fn lock() -> Vec<RestRow> {
    vec![
        row(LOCK, "a free one", |_, who| {
            vec![json!({ "name": base64(&lock_of(who)), "lease": who.lease() })]
        }),
        row(LOCK, "outside the role", |_, who| {
            vec![json!({ "name": base64(&format!("/b/l/{}", who.name())), "lease": who.lease() })]
        }),
        row(LOCK, "with an unknown lease", |_, _| vec![json!({ "name": base64("/a/l/no"), "lease": "4" })]),
        row(UNLOCK, "one's own, or alice's", |_, who| {
            let who = if who < Who::Alice { Who::Alice } else { who };
            vec![json!({ "key": base64(&format!("{}/{:x}", lock_of(who), who.lease())) })]
        }),
        row(UNLOCK, "what is not locked", |_, _| vec![json!({ "key": base64("/a/l/none/1") })]),
    ]
}

pub(super) fn election() -> Vec<RestRow> {
    vec![
        row(LEADER, "of nobody", |_, _| vec![json!({ "name": base64("/a/e/nobody") })]),
        row(CAMPAIGN, "alone", |_, who| {
            let (name, value) = (base64(&election_of(who)), base64("first"));
            vec![json!({ "name": name, "lease": who.lease(), "value": value })]
        }),
        row(CAMPAIGN, "outside the role", |_, who| {
            let name = base64(&format!("/b/e/{}", who.name()));
            vec![json!({ "name": name, "lease": who.lease(), "value": base64("x") })]
        }),
        row(LEADER, "alice", |_, _| vec![json!({ "name": base64(&election_of(Who::Alice)) })]),
        row(PROCLAIM, "one's own, or alice's", |side, who| {
            vec![json!({ "leader": side.leader(who), "value": base64("second") })]
        }),
        row(PROCLAIM, "without a leadership", |_, _| vec![json!({ "value": base64("second") })]),
        stream(OBSERVE, "alice", 1, |_, _| vec![json!({ "name": base64(&election_of(Who::Alice)) })])
            .only(&[Who::Alice, Who::Bearer, Who::Root]),
        row(OBSERVE, "alice, without permission", |_, _| {
            vec![json!({ "name": base64(&election_of(Who::Alice)) })]
        })
        .only(&[Who::None, Who::Bob, Who::Garbage]),
        stream(OBSERVE, "nobody", 0, |_, _| vec![json!({ "name": base64("/a/e/nobody") })])
            .only(&[Who::Alice]),
        row(RESIGN, "one's own, or alice's", |side, who| vec![json!({ "leader": side.leader(who) })]),
        row(RESIGN, "without a leadership", |_, _| vec![json!({})]),
    ]
}

/// So long a life that no run sees a second of it go: answers with the time left are compared.
fn grant(id: i64) -> Value {
    json!({ "TTL": 3_600, "ID": id })
}

fn id(id: i64) -> Value {
    json!({ "ID": id.to_string() })
}

fn lock_of(who: Who) -> String {
    format!("/a/l/{}", who.name())
}

fn election_of(who: Who) -> String {
    format!("/a/e/{}", who.name())
}
