//! Members that are ejected, paused or slow.
//!
//! Owns: the latency from which calls are slow. Must not know: how latency is measured, and the rules of
//! ejection. Invariant: without calls of the last seconds nothing is said about the speed.

use std::time::Duration;

use tokio::time::Instant;

use super::{DoctorFindings, command_name, name_of};
use keyward_cluster::fitness::member_load::Ejection;
use keyward_cluster::membership::{Member, Membership};

/// Smoothed latency of reads and writes from which calls are slow: etcd itself warns of requests that take
/// 100 ms to apply, and wants a p99 of 10 ms for the disk.
const SLOW: Duration = Duration::from_millis(250);

/// Checks all members at `now`.
pub(super) fn check(members: &Membership, now: Instant, findings: &mut DoctorFindings) {
    for member in &members.members {
        let about = name_of(member);
        if member.maintenance.is_paused() {
            let what = "it is paused by an operator: it gets no calls that others can serve";
            let fix = format!("keyward resume {}, once its work is done", command_name(member));
            findings.warning("member_paused", about, what, fix);
        } else if let Some((why, left)) = member.load.ejected(now) {
            findings.warning("member_ejected", about, ejected(member, why, left), fix(member, why));
        }
    }
    let fresh = || members.ready_voters().filter(|member| member.load.is_fresh(now));
    let latencies = || fresh().filter_map(|member| member.load.latency());
    let (Some(fastest), Some(slowest)) = (latencies().min(), latencies().max()) else { return };
    if fastest >= SLOW {
        let leader = members.leader().map_or("unknown".to_owned(), |leader| name_of(leader));
        let what = format!(
            "calls are slow at every member: they take {} to {}; the leader, whose disk every write waits \
             for, is {leader}",
            millis(fastest),
            millis(slowest)
        );
        let others = fresh().filter(|member| members.leader != Some(member.id));
        let next = others.min_by_key(|member| member.load.latency()).map(|member| member.id.to_string());
        let fix = format!(
            "look at the leader's disk (etcd_disk_wal_fsync_duration_seconds in its /metrics); move the \
             leader away from it, at the member itself: ETCDCTL_ENDPOINTS={} etcdctl move-leader {}; else \
             find large ranges: keyward show slow",
            members.leader().map_or_else(|| "URL".to_owned(), |leader| leader.endpoint.to_string()),
            next.as_deref().unwrap_or("ID")
        );
        findings.warning("calls_slow", "cluster", what, fix);
        return;
    }
    for member in fresh().filter(|member| member.load.ejected(now).is_none()) {
        if let Some(latency) = member.load.latency().filter(|latency| *latency >= SLOW) {
            let what =
                format!("calls through it take {}, and {} at the fastest", millis(latency), millis(fastest));
            findings.warning("member_slow", name_of(member), what, fix(member, Ejection::Slow));
        }
    }
}

fn ejected(member: &Member, why: Ejection, left: Duration) -> String {
    let because = match (why, member.load.latency()) {
        (Ejection::Failing, _) => "calls through it fail".to_owned(),
        (Ejection::Slow, Some(latency)) => {
            format!("it is far slower than the others: {} by its last calls", millis(latency))
        }
        (Ejection::Slow, None) => "it is far slower than the others".to_owned(),
    };
    format!(
        "it is ejected, and gets no calls that others can serve: {because}; tried again in {} s",
        left.as_secs() + 1
    )
}

fn fix(member: &Member, why: Ejection) -> String {
    let look = match why {
        Ejection::Slow => {
            "look at its disk (etcd_disk_wal_fsync_duration_seconds in its /metrics), its CPU and the network"
        }
        Ejection::Failing => "look at its log, and at the network between",
    };
    let name = command_name(member);
    format!(
        "{look}; keyward pause {name} keeps the calls of this replica from it meanwhile, and with --all \
         those of every replica"
    )
}

fn millis(latency: Duration) -> String {
    format!("{} ms", latency.as_millis())
}
