//! Measures the pressure on the cluster, for shedding.
//!
//! Owns: the interval, and the part of its quota that a member's database uses. Must not know: which calls
//! are shed. Invariant: a member that reports no quota counts only with a configured quota.

use std::sync::Arc;

use tokio::time::{MissedTickBehavior, interval};

use keyward_access::usage::register::UsageRegister;
use keyward_access::usage::shedding::INTERVAL;
use keyward_base::published::Published;
use keyward_cluster::membership::{MembersHandle, Membership, Role};
use keyward_config::{Config, PolicyMode};

/// Lets the controller of shedding take its steps, for ever.
pub(super) async fn control_shedding(
    config: Arc<Published<Config>>,
    members: MembersHandle,
    usage: Arc<UsageRegister>,
) {
    let mut steps = interval(INTERVAL);
    steps.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut changes = config.changes();
    let mut was_under_pressure = false;
    loop {
        let settings = config.load().protection;
        let share = db_share(&members.snapshot.load(), settings.db_quota);
        usage.shedding.step(&settings, share);
        let (db, latency) = usage.shedding.pressures();
        let is_under_pressure = (db, latency) != (0, 0);
        if is_under_pressure != was_under_pressure {
            was_under_pressure = is_under_pressure;
            let mode = settings.mode.name();
            if is_under_pressure {
                tracing::warn!(mode, db, latency, share, "calls are shed while db or latency is not 0");
            } else {
                tracing::info!(mode, share, "no calls are shed any more: db and latency are 0");
            }
        }
        if settings.mode == PolicyMode::Off {
            if changes.changed().await.is_err() {
                return;
            }
        } else {
            steps.tick().await;
        }
    }
}

/// The largest part of its quota used by a voter's database, in thousandths.
fn db_share(members: &Membership, configured: Option<u64>) -> Option<u32> {
    let voters = members.members.iter().filter(|member| member.role == Role::Voter);
    let shares = voters.filter_map(|member| {
        let status = member.store_status.as_ref()?;
        let quota = status.db_quota.or(configured)?;
        status.db_size.saturating_mul(1000).checked_div(quota)
    });
    shares.max().map(|share| u32::try_from(share).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyward_cluster::fitness::store_status::StoreStatus;
    use keyward_cluster::membership::{Member, Readiness};
    use keyward_cluster::test_member::member;

    #[test]
    fn the_fullest_voter_counts_by_its_own_quota() {
        let of = |id, role, db_size, db_quota| {
            let store_status = StoreStatus { db_size, db_quota, ..StoreStatus::default() };
            let known = Member::clone(&member(id, Readiness::Ready));
            Arc::new(Member { role, store_status: Some(Arc::new(store_status)), ..known })
        };
        let mut members = Membership::unknown(tokio::time::Instant::now());
        members.members = vec![
            of(1, Role::Voter, 850, Some(1000)),
            of(2, Role::Voter, 900, None),
            of(3, Role::Learner, 999, Some(1000)),
        ];
        assert_eq!(db_share(&members, None), Some(850));
        assert_eq!(db_share(&members, Some(1000)), Some(900));
        members.members.truncate(0);
        assert_eq!(db_share(&members, Some(1000)), None);
    }
}
