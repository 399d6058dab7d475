//! Converts the published members into the member figures of `/metrics`.
//!
//! Owns: this conversion. Must not know: names of metrics.

use tokio::time::Instant;

use crate::members::membership::{Member, Membership};
use crate::telemetry::member_metrics::MemberSample;

/// The present figures of all members.
pub(super) fn of(members: &Membership) -> Vec<MemberSample> {
    let now = Instant::now();
    members.members.iter().map(|member| one(members, member, now)).collect()
}

fn one(members: &Membership, member: &Member, now: Instant) -> MemberSample {
    let vitals = member.vitals.as_deref();
    let streams = member.conduct.streams().counts();
    MemberSample {
        member: member.id.to_string(),
        name: member.name.as_ref().into(),
        version: member.version.map(|version| version.to_string()).unwrap_or_default(),
        ready: member.is_ready(),
        leader: members.leader == Some(member.id),
        ejected: member.conduct.ejected(now).is_some(),
        ejections: member.conduct.ejections().into(),
        latency: member.conduct.latency(),
        calls: member.conduct.calls(),
        waiting: member.conduct.in_flight().into(),
        queued: member.conduct.queue.waiting().into(),
        queue_waits: (member.conduct.queue.ended(), member.conduct.queue.took()),
        refused: member.conduct.refused(),
        seat_waits: (member.conduct.seats.ended(), member.conduct.seats.took()),
        streams: [streams.watches, streams.keepalives, streams.others].map(Into::into),
        lag: member.conduct.lag(),
        term: member.term,
        errors: vitals.map(|vitals| u64::try_from(vitals.errors.len()).unwrap_or(u64::MAX)),
        db: vitals.map(|vitals| (vitals.db_size, vitals.db_in_use)),
        quota: vitals.and_then(|vitals| vitals.db_quota),
    }
}
