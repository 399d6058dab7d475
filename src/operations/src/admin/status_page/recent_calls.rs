//! The calls of each client within the last ten seconds.
//!
//! Owns: the counts of calls at the page's readings of the last ten seconds, and the field computed from the
//! counts. Must not know: shards, clocks: a reading brings its time. Invariants: a client with a loop stands
//! above a client with more calls since its start; at most [`READINGS`] readings are kept, and none while no
//! page is open.

use std::collections::VecDeque;

use serde_json::Value;

use crate::admin::view::View;

/// The field of a client's row: calls begun within the last ten seconds, or since the page's first reading;
/// null in the first reading.
pub(super) const RECENT_CALLS: &str = "calls_in_ten_seconds";
/// The time of the field, in seconds.
const SPAN_SECONDS: f64 = 10.0;
/// Maximum of readings kept: there is one a second, or fewer.
const READINGS: usize = 16;

/// The readings of the last ten seconds, the oldest first.
#[derive(Default)]
pub(super) struct RecentCalls(VecDeque<CallCounts>);

/// The calls of each client since its start, at one reading.
struct CallCounts {
    uptime_seconds: f64,
    /// By number of the connection, in ascending order.
    calls: Vec<(u64, u64)>,
}

impl RecentCalls {
    /// Adds the field to each row of clients, and keeps the rows' counts for later readings.
    pub(super) fn add_to(&mut self, clients: &mut View) {
        let now = clients.uptime_seconds;
        // The oldest reading kept is the youngest one that is at least ten seconds old, if there is one.
        while self.0.len() >= READINGS
            || self.0.get(1).is_some_and(|reading| now - reading.uptime_seconds >= SPAN_SECONDS)
        {
            self.0.pop_front();
        }
        let mut calls = Vec::with_capacity(clients.rows.len());
        for row in &mut clients.rows {
            let count = |field: &str| row.get(field).and_then(Value::as_u64).unwrap_or_default();
            let (client, now) = (count("client"), count("calls"));
            calls.push((client, now));
            // A client that the oldest reading does not have has come since then, with all of its calls.
            let recent = self.0.front().map(|oldest| now.saturating_sub(oldest.calls_of(client)));
            row.insert(RECENT_CALLS.to_owned(), Value::from(recent));
        }
        calls.sort_unstable();
        self.0.push_back(CallCounts { uptime_seconds: now, calls });
    }
}

impl CallCounts {
    fn calls_of(&self, client: u64) -> u64 {
        let at = self.calls.binary_search_by_key(&client, |(client, _)| *client);
        at.map_or(0, |at| self.calls[at].1)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::admin::view::ViewTopic;

    /// The field of each row of a reading at a time, of clients with these calls since their start.
    fn read(recent: &mut RecentCalls, uptime_seconds: f64, calls: &[(u64, u64)]) -> Vec<Option<u64>> {
        let row = |(client, calls): &(u64, u64)| match json!({"client": client, "calls": calls}) {
            Value::Object(row) => row,
            other => unreachable!("{other}"),
        };
        let mut clients = View {
            schema_version: 1,
            topic: ViewTopic::Clients,
            taken_at: String::new(),
            uptime_seconds,
            rows: calls.iter().map(row).collect(),
            left_out: 0,
            is_of_replicas: false,
        };
        recent.add_to(&mut clients);
        clients.rows.iter().map(|row| row[RECENT_CALLS].as_u64()).collect()
    }

    #[test]
    fn calls_count_for_ten_seconds() {
        let mut recent = RecentCalls::default();
        assert_eq!(read(&mut recent, 100.0, &[(1, 1000)]), [None], "nothing is known of the time before");
        // Client 2 has come since the first reading.
        assert_eq!(read(&mut recent, 101.0, &[(2, 7), (1, 1000)]), [Some(7), Some(0)]);
        for second in 102..110 {
            let now = f64::from(second);
            assert_eq!(read(&mut recent, now, &[(1, 1003), (2, 7)]), [Some(3), Some(7)], "{now}");
        }
        assert_eq!(read(&mut recent, 111.0, &[(1, 1003), (2, 7)]), [Some(3), Some(0)]);
        assert_eq!(read(&mut recent, 112.5, &[(1, 1003), (2, 9)]), [Some(0), Some(2)]);
    }

    #[test]
    fn readings_that_are_far_apart_count_from_the_last_one_before() {
        let mut recent = RecentCalls::default();
        read(&mut recent, 0.0, &[(1, 10)]);
        read(&mut recent, 9.0, &[(1, 20)]);
        assert_eq!(read(&mut recent, 18.0, &[(1, 25)]), [Some(15)], "the reading before is 9 s old");
        assert_eq!(read(&mut recent, 19.5, &[(1, 26)]), [Some(6)]);
        for reading in 0..1000 {
            read(&mut recent, 20.0 + f64::from(reading) / 1000.0, &[(1, 26)]);
        }
        assert!(recent.0.len() <= READINGS);
    }
}
