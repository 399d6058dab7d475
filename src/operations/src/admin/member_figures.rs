//! Converts the published members into the member figures of `/metrics`, and tells the alarms of each.
//!
//! Owns: this conversion. Must not know: names of metrics.

use tokio::time::Instant;

use keyward_cluster::membership::{Member, Membership, Role};
use keyward_telemetry::member_metrics::{ALARMS, MemberSample};

/// The present figures of all members.
pub(super) fn of(members: &Membership) -> Vec<MemberSample> {
    let now = Instant::now();
    members.members.iter().map(|member| one(members, member, now)).collect()
}

fn one(members: &Membership, member: &Member, now: Instant) -> MemberSample {
    let store_status = member.store_status.as_deref();
    let streams = member.load.streams().counts();
    MemberSample {
        member: member.id.to_string(),
        name: member.name.as_ref().into(),
        version: member.version.map(|version| version.to_string()).unwrap_or_default(),
        ready: member.is_ready(),
        leader: members.leader == Some(member.id),
        learner: member.role == Role::Learner,
        alarms: alarms_of(members, member),
        ejected: member.load.ejected(now).is_some(),
        ejections: member.load.ejections().into(),
        latency: member.load.latency(),
        calls: member.load.calls(),
        waiting: member.load.in_flight().into(),
        queued: member.load.queue.waiting().into(),
        queue_waits: (member.load.queue.ended(), member.load.queue.took()),
        refused: member.load.refused(),
        seat_waits: (member.load.seats.ended(), member.load.seats.took()),
        streams: [streams.watches, streams.keepalives, streams.others].map(Into::into),
        lag: member.load.lag(),
        term: member.term,
        errors: store_status.map(|store_status| u64::try_from(store_status.errors.len()).unwrap_or(u64::MAX)),
        db: store_status.map(|store_status| (store_status.db_size, store_status.db_in_use)),
        quota: store_status.and_then(|store_status| store_status.db_quota),
    }
}

/// The alarms of `member`, as told by any member.
pub(super) fn alarms_of(members: &Membership, member: &Member) -> Vec<&'static str> {
    ALARMS.into_iter().filter(|alarm| has_alarm(members, member, alarm)).collect()
}

/// True if a member tells this alarm of `member`: every member's Status tells the alarms of all members, as
/// `memberID:1234 alarm:NOSPACE `.
fn has_alarm(members: &Membership, member: &Member, alarm: &str) -> bool {
    let text = format!("memberID:{} alarm:{}", member.id.0, alarm.to_uppercase());
    let mut told = members.members.iter().filter_map(|member| member.store_status.as_deref());
    told.any(|status| status.errors.iter().any(|error| error.contains(&text)))
}
