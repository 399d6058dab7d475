//! The last answer of a member that showed an alarm.
//!
//! Owns: the answers that show an alarm, and how long one counts. Must not know: the members' Status, the
//! calls that depend on alarms.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use keyward_etcd::refusal::Status;

/// How long an answer counts: until the probes of all members have come back, which show the alarm as well.
const COUNTS_FOR: Duration = Duration::from_secs(10);
/// The texts of a member's answer to a write while an alarm is raised.
const SHOWS_ALARM: [&str; 2] = ["etcdserver: mvcc: database space exceeded", "etcdserver: corrupt cluster"];

/// The time of the last answer that showed an alarm, for all shards.
#[derive(Debug, Default)]
pub struct AlarmSighting(Mutex<Option<Instant>>);

impl AlarmSighting {
    /// Notes the status of an answer that came at `now`.
    pub fn note(&self, status: &Status, now: Instant) {
        if SHOWS_ALARM.contains(&&*status.message) {
            *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(now);
        }
    }

    /// True if an answer showed an alarm a moment before `now`.
    #[must_use]
    pub fn is_recent(&self, now: Instant) -> bool {
        let seen = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        seen.is_some_and(|seen| now.saturating_duration_since(seen) < COUNTS_FOR)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use keyward_etcd::refusal::{Code, Refusal};

    #[test]
    fn an_answer_that_shows_an_alarm_counts_for_a_moment() {
        let (sighting, now) = (AlarmSighting::default(), Instant::now());
        sighting.note(&Refusal::NO_LEADER.status(), now);
        assert!(!sighting.is_recent(now));
        let message = "etcdserver: mvcc: database space exceeded".into();
        sighting.note(&Status { code: Code::ResourceExhausted, message }, now);
        assert!(sighting.is_recent(now + COUNTS_FOR - Duration::from_millis(1)));
        assert!(!sighting.is_recent(now + COUNTS_FOR));
    }
}
