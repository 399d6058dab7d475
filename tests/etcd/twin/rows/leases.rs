//! Lease, and what lives on leases: Lock and Election.

use keyward::pb::{
    etcdserverpb::{
        LeaseGrantRequest, LeaseKeepAliveRequest, LeaseLeasesRequest, LeaseRevokeRequest,
        LeaseTimeToLiveRequest,
    },
    v3electionpb::{CampaignRequest, LeaderRequest, ProclaimRequest, ResignRequest},
    v3lockpb::{LockRequest, UnlockRequest},
};
use prost::Message;

use super::{Row, one, row, server_stream, stream};
use crate::twin::side::Who;

const GRANT: &str = "/etcdserverpb.Lease/LeaseGrant";
const REVOKE: &str = "/etcdserverpb.Lease/LeaseRevoke";
const KEEP_ALIVE: &str = "/etcdserverpb.Lease/LeaseKeepAlive";
const TIME_TO_LIVE: &str = "/etcdserverpb.Lease/LeaseTimeToLive";
const LEASES: &str = "/etcdserverpb.Lease/LeaseLeases";
const LOCK: &str = "/v3lockpb.Lock/Lock";
const UNLOCK: &str = "/v3lockpb.Lock/Unlock";
const CAMPAIGN: &str = "/v3electionpb.Election/Campaign";
const LEADER: &str = "/v3electionpb.Election/Leader";
const OBSERVE: &str = "/v3electionpb.Election/Observe";
const PROCLAIM: &str = "/v3electionpb.Election/Proclaim";
const RESIGN: &str = "/v3electionpb.Election/Resign";
/// So long that no run sees a second of it go: answers with the time left are compared.
const TTL: i64 = 3_600;

/// Everybody's own lease. Root grants them, since not everybody may.
pub(super) fn granted() -> Vec<Row> {
    vec![
        row(GRANT, "for nobody", |_, _| one(&grant(Who::None.lease()))).only(&[Who::Root]),
        row(GRANT, "for bob", |_, _| one(&grant(Who::Bob.lease()))).only(&[Who::Root]),
        row(GRANT, "for garbage", |_, _| one(&grant(Who::Garbage.lease()))).only(&[Who::Root]),
        row(GRANT, "for alice", |_, _| one(&grant(Who::Alice.lease()))).only(&[Who::Root]),
        row(GRANT, "for root", |_, _| one(&grant(Who::Root.lease()))).only(&[Who::Root]),
    ]
}

pub(super) fn lease() -> Vec<Row> {
    vec![
        row(LEASES, "all", |_, _| one(&LeaseLeasesRequest {})),
        row(GRANT, "a new one", |_, who| one(&grant(who.lease() + 100))),
        row(GRANT, "one that is there", |_, who| one(&grant(who.lease()))),
        row(GRANT, "too long a life", |_, _| one(&LeaseGrantRequest { ttl: 9_999_999_999, id: 5 })),
        row(TIME_TO_LIVE, "one's own", |_, who| {
            one(&LeaseTimeToLiveRequest { id: who.lease(), keys: false })
        }),
        row(TIME_TO_LIVE, "alice's, with keys", |_, _| {
            one(&LeaseTimeToLiveRequest { id: Who::Alice.lease(), keys: true })
        }),
        row(TIME_TO_LIVE, "an unknown one", |_, _| one(&LeaseTimeToLiveRequest { id: 4, keys: false })),
        stream(KEEP_ALIVE, "one's own", 1, |_, who| keep_alive(&[who.lease()])),
        stream(KEEP_ALIVE, "one's own, three times", 3, |_, who| keep_alive(&[who.lease(); 3])),
        stream(KEEP_ALIVE, "an unknown one", 1, |_, _| keep_alive(&[4])),
        stream(KEEP_ALIVE, "root's, which holds a key", 1, |_, _| keep_alive(&[Who::Root.lease()])),
    ]
}

/// After all that needs them.
pub(super) fn revoked() -> Vec<Row> {
    vec![
        row(REVOKE, "an unknown one", |_, _| one(&LeaseRevokeRequest { id: 4 })),
        row(REVOKE, "one's own", |_, who| one(&LeaseRevokeRequest { id: who.lease() })),
    ]
}

pub(super) fn lock() -> Vec<Row> {
    vec![
        row(LOCK, "a free one", |_, who| one(&LockRequest { name: lock_of(who).into(), lease: who.lease() })),
        row(LOCK, "outside the role", |_, who| {
            one(&LockRequest { name: format!("/b/l/{}", who.name()).into(), lease: who.lease() })
        }),
        row(LOCK, "with an unknown lease", |_, _| one(&LockRequest { name: "/a/l/no".into(), lease: 4 })),
        row(UNLOCK, "one's own, or alice's", |_, who| {
            let who = if who == Who::Root { Who::Root } else { Who::Alice };
            one(&UnlockRequest { key: format!("{}/{:x}", lock_of(who), who.lease()).into() })
        }),
        row(UNLOCK, "what is not locked", |_, _| one(&UnlockRequest { key: "/a/l/none/1".into() })),
    ]
}

pub(super) fn election() -> Vec<Row> {
    vec![
        row(LEADER, "of nobody", |_, _| one(&LeaderRequest { name: "/a/e/nobody".into() })),
        row(CAMPAIGN, "alone", |_, who| {
            one(&CampaignRequest { name: election_of(who).into(), lease: who.lease(), value: "first".into() })
        }),
        row(CAMPAIGN, "outside the role", |_, who| {
            one(&CampaignRequest {
                name: format!("/b/e/{}", who.name()).into(),
                lease: who.lease(),
                value: "x".into(),
            })
        }),
        row(LEADER, "alice", |_, _| one(&LeaderRequest { name: election_of(Who::Alice).into() })),
        row(PROCLAIM, "one's own, or alice's", |side, who| {
            one(&ProclaimRequest { leader: side.leader(who), value: "second".into() })
        }),
        row(PROCLAIM, "without a leadership", |_, _| {
            one(&ProclaimRequest { leader: None, value: "second".into() })
        }),
        server_stream(OBSERVE, "alice", |_, _| one(&LeaderRequest { name: election_of(Who::Alice).into() })),
        row(RESIGN, "one's own, or alice's", |side, who| one(&ResignRequest { leader: side.leader(who) })),
        row(RESIGN, "without a leadership", |_, _| one(&ResignRequest { leader: None })),
    ]
}

fn grant(id: i64) -> LeaseGrantRequest {
    LeaseGrantRequest { ttl: TTL, id }
}

fn keep_alive(ids: &[i64]) -> Vec<Vec<u8>> {
    ids.iter().map(|id| LeaseKeepAliveRequest { id: *id }.encode_to_vec()).collect()
}

fn lock_of(who: Who) -> String {
    format!("/a/l/{}", who.name())
}

fn election_of(who: Who) -> String {
    format!("/a/e/{}", who.name())
}
