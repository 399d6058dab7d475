//! The key prefixes with the most calls, in bounded memory.
//!
//! Owns: the sample of calls, and the count by prefix. Must not know: how a call is made. Invariants: of
//! [`SAMPLED`] calls one is counted, and each other call costs an addition; a count is never too low by the
//! sketch, and too high by its stated error at most (Metwally, Agrawal, El Abbadi: "Efficient Computation of
//! Frequent and Top-k Elements in Data Streams", Space-Saving); counts are forgotten after two minutes.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ops::ControlFlow;
use std::time::Duration;

use tokio::time::Instant;

use keyward_etcd::rpc::method::Method;
use keyward_etcd::rpc::touch::{self, TouchTarget};

/// One in so many calls is counted.
pub const SAMPLED: u64 = 16;
/// Prefixes counted at a time.
const PREFIXES: usize = 256;
/// Bytes of a prefix.
const LONGEST_PREFIX: usize = 64;
/// Time covered by a sketch; the sketch before is kept too.
const PERIOD: Duration = Duration::from_secs(60);

/// The sampled prefixes of a shard.
#[derive(Debug)]
pub struct HotPrefixes {
    calls: Cell<u64>,
    sketches: RefCell<RecentSketches>,
}

#[derive(Debug)]
struct RecentSketches {
    began: Instant,
    present: SpaceSaving,
    before: SpaceSaving,
}

/// A sketch of the most frequent prefixes.
#[derive(Debug, Default)]
struct SpaceSaving {
    counts: HashMap<Box<[u8]>, SketchCount>,
}

/// Prefixes with their counts.
pub type CountedPrefixes = Vec<(Box<[u8]>, SketchCount)>;

/// The count of one prefix in sampled calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SketchCount {
    /// Never below the true count.
    pub count: u64,
    /// The count exceeds the true count by this at most.
    pub error: u64,
}

impl Default for HotPrefixes {
    fn default() -> Self {
        let sketches = RecentSketches {
            began: Instant::now(),
            present: SpaceSaving::default(),
            before: SpaceSaving::default(),
        };
        Self { calls: Cell::default(), sketches: RefCell::new(sketches) }
    }
}

impl HotPrefixes {
    /// Counts an answered call, if the call is in the sample. A call that touches several ranges counts for
    /// the first.
    pub fn note(&self, method: &Method, message: &[u8], now: Instant) {
        let calls = self.calls.get().wrapping_add(1);
        self.calls.set(calls);
        if calls.is_multiple_of(SAMPLED) {
            self.count(method, message, now);
        }
    }

    fn count(&self, method: &Method, message: &[u8], now: Instant) {
        let mut sketches = self.sketches.borrow_mut();
        sketches.turn(now);
        let present = &mut sketches.present;
        // A message that cannot be read was refused before.
        _ = touch::visit(method, message, &mut |touch| match touch.target {
            TouchTarget::Keys(range) => {
                present.add(prefix(range.start));
                ControlFlow::Break(())
            }
            _ => ControlFlow::Continue(()),
        });
    }

    /// The prefixes with their counts of sampled calls, and the time covered by the counts.
    #[must_use]
    pub fn recent(&self, now: Instant) -> (CountedPrefixes, Duration) {
        let mut sketches = self.sketches.borrow_mut();
        sketches.turn(now);
        let mut all = sketches.present.counts.clone();
        for (prefix, more) in &sketches.before.counts {
            let known = all.entry(prefix.clone()).or_default();
            *known = SketchCount { count: known.count + more.count, error: known.error + more.error };
        }
        let before = if sketches.before.counts.is_empty() { Duration::ZERO } else { PERIOD };
        (all.into_iter().collect(), now.saturating_duration_since(sketches.began) + before)
    }
}

impl RecentSketches {
    /// Begins a new sketch after [`PERIOD`].
    fn turn(&mut self, now: Instant) {
        let age = now.saturating_duration_since(self.began);
        if age < PERIOD {
            return;
        }
        self.before = std::mem::take(&mut self.present);
        if age >= 2 * PERIOD {
            self.before = SpaceSaving::default();
        }
        self.began = now;
    }
}

impl SpaceSaving {
    fn add(&mut self, prefix: &[u8]) {
        if let Some(known) = self.counts.get_mut(prefix) {
            known.count += 1;
            return;
        }
        let mut error = 0;
        if self.counts.len() >= PREFIXES {
            let rarest = self.counts.iter().min_by_key(|(_, known)| known.count);
            let Some((rarest, count)) = rarest.map(|(prefix, known)| (prefix.clone(), known.count)) else {
                return;
            };
            self.counts.remove(&rarest);
            error = count;
        }
        self.counts.insert(prefix.into(), SketchCount { count: error + 1, error });
    }
}

/// The key up to its last slash, at most [`LONGEST_PREFIX`] bytes; the key itself without a slash.
fn prefix(key: &[u8]) -> &[u8] {
    let end = key.iter().rposition(|byte| *byte == b'/').map_or(key.len(), |slash| slash + 1);
    &key[..end.min(LONGEST_PREFIX)]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use prost::Message as _;

    use super::*;
    use keyward_etcd::pb::etcdserverpb::RangeRequest;
    use keyward_etcd::rpc::method::lookup;

    proptest! {
        /// The two promises of the algorithm.
        #[test]
        fn counts_are_never_too_low_and_frequent_prefixes_never_missing(
            keys in prop::collection::vec((0_u32..600).prop_map(|key| key * key / 600), 0..4000),
        ) {
            let (mut sketch, mut exact) = (SpaceSaving::default(), HashMap::<Box<[u8]>, u64>::new());
            for key in &keys {
                let key: Box<[u8]> = key.to_string().as_bytes().into();
                sketch.add(&key);
                *exact.entry(key).or_default() += 1;
            }
            prop_assert!(sketch.counts.len() <= PREFIXES);
            for (key, known) in &sketch.counts {
                let exact = exact.get(key).copied().unwrap_or(0);
                prop_assert!(known.count >= exact && known.count - known.error <= exact);
            }
            let frequent = exact.iter().filter(|(_, count)| **count > (keys.len() / PREFIXES) as u64);
            for (key, _) in frequent {
                prop_assert!(sketch.counts.contains_key(key));
            }
        }
    }

    #[test]
    fn one_of_many_calls_is_counted_for_two_minutes() {
        let method = lookup("/etcdserverpb.KV/Range").expect("etcd's");
        let message = RangeRequest { key: "/a/b/c".into(), ..RangeRequest::default() }.encode_to_vec();
        let hot = HotPrefixes::default();
        let start = hot.sketches.borrow().began;
        for _ in 0..10 * SAMPLED {
            hot.note(method, &message, start + Duration::from_secs(10));
        }
        let count = SketchCount { count: 10, error: 0 };
        let expected = (vec![(Box::from(&b"/a/b/"[..]), count)], Duration::from_secs(20));
        assert_eq!(hot.recent(start + Duration::from_secs(20)), expected);
        assert_eq!(
            hot.recent(start + Duration::from_secs(70)).1,
            Duration::from_secs(60),
            "a new sketch, and one before"
        );
        assert_eq!(hot.recent(start + Duration::from_secs(140)).0, []);
    }

    #[test]
    fn a_prefix_ends_with_the_last_slash() {
        for (key, expected) in [("/a/b", "/a/"), ("/a/", "/a/"), ("a", "a"), ("", "")] {
            assert_eq!(prefix(key.as_bytes()), expected.as_bytes());
        }
        assert_eq!(prefix(&[b'x'; 100]).len(), LONGEST_PREFIX);
    }
}
